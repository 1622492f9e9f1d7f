"""Structured outputs: what they add to a step and to a first token, what masks cost the host, which documents come out.

    python bench/machines/structured.py speed                      the default model; on a GPU add --shape 0.6b
    python bench/machines/structured.py masks --vocab-size 151936
    python bench/machines/structured.py suite --suite PATH_OF_JSON-Schema-Test-Suite
    python bench/machines/structured.py documents --documents 10000 --schemas 200

speed: seconds a step with and without structure, in turn in one process. All requests have the same number of new
    tokens: no form has a near end. A step is a long run less a short one, the ratio that of the medians.
masks: microseconds of the processor that a mask and a consumed token take, on random walks within each grammar. The
    tokenizer's words are those of the standard library's code; 151,936 of them are as many as Qwen3 has. The first
    walk meets new states, the second those that are known.
suite: the JSON Schema Test Suite, token by token. A valid document must be accepted to its end; an invalid one must be
    stopped at a token, or before its end. A schema that is refused counts by the reason.
documents: sampled documents of random schemas, or of the suite's with --suite, each validated by `jsonschema`. The part
    fails if one that ended by itself is invalid.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
from harness import Figures, Option, Part, in_turn, random_prompts, run_parts
from random_models import SHAPES, checkpoint

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.features.grammar.compiler import GrammarCompiler, check_form
from nanovllm.features.structured_output import GrammarError
from nanovllm.models.default_model import DEFAULT_MODEL, ensure_default_model
from nanovllm.tools.workloads.workloads import w

# --------------------------------------------------------------------------------------------------------------- models


END = "<|endoftext|>"
_WORD = re.compile(r" ?[A-Za-z_]+|[0-9]{1,3}| ?[^\sA-Za-z0-9_]{1,6}|\s{1,12}")


def wide_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """Bytes, and words of Python's standard library with their beginnings, as tokens; good for decoding alone."""
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        for word in dict.fromkeys(_WORD.findall(path.read_text(encoding="utf-8", errors="ignore"))):
            mapped = as_bytes.pre_tokenize_str(word)[0][0]
            words |= dict.fromkeys(mapped[:length] for length in range(2, len(mapped) + 1))
        if len(words) >= num_tokens:
            break
    if len(words) < num_tokens - 1:
        raise RuntimeError(f"the standard library has words for {len(words)} tokens, not {num_tokens}")
    vocabulary = {word: number for number, word in enumerate(list(words)[: num_tokens - 1])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = as_bytes
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def text_checkpoint(shape: str) -> Path:
    """A folder of its own, whose weights are those of `checkpoint`."""
    folder = Path(tempfile.mkdtemp(prefix=f"nanovllm-text-{shape}-"))
    for path in checkpoint(shape).iterdir():
        (folder / path.name).symlink_to(path)
    tokenizer = wide_tokenizer(SHAPES[shape]["vocab_size"])
    tokenizer.save_pretrained(folder)
    config = folder / "generation_config.json"
    config.unlink(missing_ok=True)
    config.write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    return folder


# ---------------------------------------------------------------------------------------------------------------- speed


NESTED = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "maxItems": 50, "items": {
            "type": "object", "required": ["id", "kind", "price"],
            "properties": {
                "id": {"type": "integer", "minimum": 1}, "kind": {"enum": ["book", "film", "song"]},
                "price": {"type": "number", "minimum": 0}, "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            },
        }},
    },
    "required": ["items"],
}  # fmt: skip


RECORD = {  # facts drawn from a text
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60}, "born": {"type": "string", "format": "date"},
        "email": {"type": "string", "format": "email"}, "score": {"type": "number", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5}, "is_member": {"type": "boolean"},
        "notes": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "born", "email", "score", "tags", "is_member", "notes"],
    "additionalProperties": False,
}  # fmt: skip


CALL = {  # of one of several tools
    "anyOf": [
        {
            "type": "object",
            "properties": {"tool": {"const": name}, "arguments": {
                "type": "object", "properties": {key: {"type": kind} for key, kind in arguments.items()},
                "required": list(arguments), "additionalProperties": False,
            }},
            "required": ["tool", "arguments"], "additionalProperties": False,
        }
        for name, arguments in {
            "search": {"query": "string", "limit": "integer"}, "read_file": {"path": "string"},
            "weather": {"city": "string", "days": "integer", "is_metric": "boolean"}, "run": {"command": "string"},
        }.items()
    ]
}  # fmt: skip


def many(schema: dict[str, Any], least: int = 1000) -> StructuredOutput:
    return StructuredOutput(json_schema={"type": "array", "items": schema, "minItems": least})


FORMS = {
    "json": many(NESTED),
    "records": many(RECORD),
    "calls": many(CALL),
    "regex": StructuredOutput(regex=r"([a-z]{1,12},[0-9]{1,6}(\.[0-9]{2})?\n){2000,}"),
    "free text": StructuredOutput(regex=r"(?s:.){2000,}"),
}


SEVERAL = [many(schema, 1001 + number) for number, schema in enumerate([NESTED, RECORD, CALL] * 3)]  # beside each other


def first_token_seconds(llm: LLM, params: SamplingParams, prompt: list[int], clock: Callable[[], float]) -> float:
    llm.reset_prefix_cache()
    begin = clock()
    stream = llm.stream(prompt, params)
    next(stream)
    seconds = clock() - begin
    stream.close()  # type: ignore[attr-defined]
    return seconds


def step_seconds(
    llm: LLM,
    prompts: list[list[int]],
    make: Callable[[int], SamplingParams | list[SamplingParams]],
    new_tokens: int,
    clock: Callable[[], float],
) -> float:
    """Of a step that decodes all prompts: a long run less a short one, so that prompts and start do not count."""
    seconds = []
    for count in (new_tokens, new_tokens // 4):
        begin = clock()
        outputs = llm.generate(prompts, make(count), use_tqdm=False)
        seconds.append(clock() - begin)
        for output in outputs:
            if output.error or len(output.outputs[0].token_ids) != count:
                raise RuntimeError(output.error or "an output has another length than it was asked for")
    return (seconds[0] - seconds[1]) / (new_tokens - new_tokens // 4)


def added_to_first_token(
    llm: LLM, plain: SamplingParams, common: dict[str, Any], prompt: list[int], clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds by which a schema that comes for the first time, and again, delays a request's first token."""
    seconds: dict[str, list[float]] = {}
    for number in range(9):
        form = StructuredOutput(json_schema={"type": "object", "properties": {f"key{number}": NESTED, "other": NESTED}})
        structured = SamplingParams(structured_output=form, **common)
        for name, params in (("plain", plain), ("new schema", structured), ("known schema", structured)):
            seconds.setdefault(name, []).append(first_token_seconds(llm, params, prompt, clock))
    base = statistics.median(seconds.pop("plain"))
    return {name: round((statistics.median(each) - base) * 1e3, 2) for name, each in seconds.items()}


def maker(temperature: float, rows: int, *forms: StructuredOutput | None) -> Callable[[int], list[SamplingParams]]:
    """Return a function of the number of new tokens: the parameters of each row, whose forms take turns."""

    def make(count: int) -> list[SamplingParams]:
        each = [
            SamplingParams(
                structured_output=form, ignore_eos=form is None, max_tokens=count, temperature=temperature, seed=0
            )
            for form in forms
        ]
        return [each[row % len(each)] for row in range(rows)]

    return make


def measured(llm: LLM, prompts: list[list[int]], temperature: float, options: argparse.Namespace) -> Figures:
    clock = time.process_time if options.cpu_time else time.perf_counter
    forms: dict[str, list[StructuredOutput | None]] = {"plain": [None], "several": [*SEVERAL]}
    forms |= {name: [form] for name, form in FORMS.items()}
    makers = {name: maker(temperature, len(prompts), *each) for name, each in forms.items()}

    def step_of(name: str) -> Callable[[int], float]:
        return lambda _: step_seconds(llm, prompts, makers[name], options.new_tokens, clock)

    steps = in_turn({name: step_of(name) for name in makers}, options.rounds)
    plain = makers["plain"](options.new_tokens)[0]
    common = {"temperature": temperature, "seed": 0, "max_tokens": options.new_tokens}
    middle = {name: statistics.median(each) for name, each in steps.items()}
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "rows": len(prompts),
        "step, ms": {name: [round(each * 1e3, 3) for each in found] for name, found in steps.items()},
        "times a plain step": {name: round(middle[name] / middle["plain"], 3) for name in makers},
        "first token, added ms": added_to_first_token(llm, plain, common, prompts[0], clock),
    }


def measure_speed(options: argparse.Namespace) -> Figures:
    limits: dict[str, Any] = {}
    if options.shape:
        model: Any = text_checkpoint(options.shape)
        limits["max_model_len"] = 2048
        prompts = random_prompts(options.rows, options.prompt_tokens or 128, 500, "structured")
    else:
        model = options.model
        longest = options.prompt_tokens or None
        prompts = [request.prompt_token_ids[:longest] for request in w().requests[: options.rows]]
    with LLM(model, enable_prefix_caching=False, **limits) as llm:
        return {f"temperature {each:g}": measured(llm, prompts, each, options) for each in options.temperature}


# ---------------------------------------------------------------------------------------------------------------- masks


MASK_FORMS = {
    "any text": StructuredOutput(regex=r"(?s:.)*"),
    "any 2,000 characters": StructuredOutput(regex=r"(?s:.){2000,}"),
    "a line of up to 500": StructuredOutput(regex=r"[^\n]{0,500}"),
    "lines of values, counted": StructuredOutput(regex=r"([a-z]{1,12},[0-9]{1,6}(\.[0-9]{2})?\n){2000,}"),
    "JSON strings": StructuredOutput(json_schema={"type": "array", "items": {"type": "string"}, "minItems": 50}),
    "JSON string of up to 2,000": StructuredOutput(json_schema={"type": "string", "maxLength": 2000}),
}


def walk(matchers: list[Any], num_steps: int, eos: int, chance: np.random.Generator) -> tuple[list[int], list[int]]:
    """Nanoseconds of each mask, and of each token consumed."""
    masks: list[int] = []
    tokens: list[int] = []
    for _ in range(num_steps):
        for matcher in matchers:
            words = np.empty(matcher.num_words, np.int32)
            begin = time.thread_time_ns()
            matcher.fill(words)
            masks.append(time.thread_time_ns() - begin)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed != eos]
            if len(allowed):
                token_id = int(allowed[chance.integers(len(allowed))])
                begin = time.thread_time_ns()
                matcher.consume(token_id)
                tokens.append(time.thread_time_ns() - begin)
    return masks, tokens


def microseconds(nanoseconds: list[int]) -> dict[str, float]:
    values = np.array(nanoseconds) / 1e3
    found = {"median": np.median(values), "mean": values.mean(), "p99": np.percentile(values, 99)}
    return {name: round(float(value), 1) for name, value in found.items()}


def measure_masks(options: argparse.Namespace) -> Figures:
    tokenizer = wide_tokenizer(options.vocab_size)
    eos = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [eos])
    found: Figures = {}
    for name, form in MASK_FORMS.items():
        for seed, states in enumerate(("new", "known")):
            matchers = [compiler.matcher(form).copy() for _ in range(options.rows)]
            masks, tokens = walk(matchers, options.steps, eos, np.random.default_rng(seed))
            found[f"{name}, {states} states"] = {"mask, us": microseconds(masks), "token, us": microseconds(tokens)}
    return found


# ------------------------------------------------------------------------------------------------------------ documents


RESULTS = ("valid, accepted", "valid, stopped", "invalid, stopped", "invalid, accepted")


def suite_documents(folder: Path) -> list[tuple[str, Any, Any, bool, str]]:
    """(keyword file, schema, document, whether it is valid, description)."""
    nested = folder / "tests" / "draft2020-12"
    files = sorted((nested if nested.is_dir() else folder).glob("*.json")) or sorted(folder.rglob("*.json"))
    return [
        (path.stem, group["schema"], test["data"], test["valid"], f"{group['description']}: {test['description']}")
        for path in files
        for group in json.loads(path.read_text(encoding="utf-8"))
        for test in group["tests"]
    ]


def accepts(matcher: Any, token_ids: list[int]) -> bool:
    matcher = matcher.copy()
    try:
        for token_id in token_ids:
            matcher.consume(token_id)
    except GrammarError:
        return False
    return bool(matcher.is_complete())


def run(folder: Path) -> tuple[dict[str, Counter[str]], Counter[str], list[str]]:
    """Counts by file, reasons of refusals, and the documents that went wrong."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_default_model())
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    counts: dict[str, Counter[str]] = {}
    refusals: Counter[str] = Counter()
    wrong = []
    for keyword, schema, document, is_valid, description in suite_documents(folder):
        own = counts.setdefault(keyword, Counter())
        try:
            matcher = compiler.matcher(StructuredOutput(json_schema=schema))
        except (TypeError, ValueError) as error:
            own["refused"] += 1
            refusals[f"{keyword}: {error}"] += 1
            continue
        text = json.dumps(document, ensure_ascii=False)
        accepted = accepts(matcher, tokenizer.encode(text, add_special_tokens=False))
        result = f"{'valid' if is_valid else 'invalid'}, {'accepted' if accepted else 'stopped'}"
        own[result] += 1
        if accepted != is_valid:
            wrong.append(f"{result}: {keyword}: {description}: {json.dumps(schema)} {text}")
    return counts, refusals, wrong


def measure_suite(options: argparse.Namespace) -> Figures:
    if options.suite is None:
        raise SystemExit("suite: --suite names no folder; give that of the JSON Schema Test Suite.")
    counts, refusals, wrong = run(Path(options.suite))
    print("| file | " + " | ".join(RESULTS) + " | refused |\n|" + "---|" * (len(RESULTS) + 2))
    for name, own in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(f"| {name} | " + " | ".join(str(own[result]) for result in (*RESULTS, "refused")) + " |")
    return {"refused": dict(refusals), "wrong": wrong}


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5},
    {"top_p": 0.9},
    {"repetition_penalty": 1.1},
    {"temperature": 0},
]


def schema(choice: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose documents are short: strings, arrays and objects are bounded."""
    kinds = ["string", "pattern", "integer", "number", "boolean", "enum", "const", "null", "any of"]
    kind = choice.choice(kinds + ["array", "object"] * 4 * (depth < 3)) if depth else "object"
    if kind == "string":
        low = choice.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + choice.randrange(8)}
    if kind == "pattern":
        return {"type": "string", "pattern": choice.choice(["^[a-z]{2,5}$", r"^\d{3}-\d{2}$", "^(yes|no)!?$"])}
    if kind in ("integer", "number"):
        low = choice.randrange(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + choice.randrange(1, 1000)}
    if kind == "enum":
        return {"enum": choice.sample(["red", "grün", 1, 2.5, None, True, [1, "a"]], choice.randint(1, 4))}
    if kind == "const":
        return {"const": choice.choice(["x", 7, {"a": [1]}, "\n\t\"'"])}
    if kind == "any of":
        return {"anyOf": [schema(choice, depth + 1) for _ in range(2)]}
    if kind == "array":
        low = choice.randrange(3)
        return {"type": "array", "items": schema(choice, depth + 1), "minItems": low, "maxItems": low + 2}
    if kind == "object":
        names = choice.sample(["id", "name", "größe", "a b", "tags", "x-y", "z"], choice.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: schema(choice, depth + 1) for name in names},
            "required": choice.sample(names, choice.randint(0, len(names))),
            "additionalProperties": False,
        }
    return {"type": kind}


def schemas_of_suite(folder: Path) -> list[dict[str, Any]]:
    """Objects that the compiler takes, which refuses the others by name, and that `jsonschema` can check; each once."""
    import jsonschema

    found = {}
    for _, one, document, _, _ in suite_documents(folder):
        if not isinstance(one, dict):
            continue
        try:
            check_form(StructuredOutput(json_schema=one))
            jsonschema.validate(document, one)
        except jsonschema.ValidationError:
            pass
        except (TypeError, ValueError, jsonschema.SchemaError):  # such as a pattern that Python's `re` does not know
            continue
        found[json.dumps(one)] = one
    return list(found.values())


def is_invalid(text: str, schema: dict[str, Any]) -> str | None:
    """Why a text is no document of a schema, or None."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)
    return None


def measure_documents(options: argparse.Namespace) -> Figures:
    choice = random.Random(0)
    given = schemas_of_suite(Path(options.suite)) if options.suite else [schema(choice) for _ in range(options.schemas)]
    schemas = [one | {"x-guidance": {"whitespace_flexible": False}} for one in given]
    chosen = [schemas[number % len(schemas)] for number in range(options.documents)]
    params = [
        SamplingParams(
            seed=number, max_tokens=options.max_tokens, structured_output=StructuredOutput(json_schema=one),
            **choice.choice(SAMPLING),
        )
        for number, one in enumerate(chosen)
    ]  # fmt: skip
    with LLM(options.model, overlap=options.overlap, max_model_len=512) as llm:
        outputs = llm.generate([[20 + n % 200, 40 + n % 31] for n in range(options.documents)], params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    ended = [(one, each.text) for one, each in zip(chosen, completions, strict=True) if each.finish_reason == "stop"]
    wrong = [(one, text, error) for one, text in ended if (error := is_invalid(text, one))]
    if wrong:
        raise SystemExit(f"{len(wrong)} documents are invalid, the first is {wrong[0]!r}")
    return {"ends": dict(Counter(each.finish_reason for each in completions)), "invalid": 0}


PARTS = {
    "speed": Part(measure_speed),
    "masks": Part(measure_masks),
    "suite": Part(measure_suite, is_default=False),
    "documents": Part(measure_documents, needs=("jsonschema",), is_default=False),
}
OPTIONS = {
    "model": Option(DEFAULT_MODEL, "of speed and documents"),
    "shape": Option(None, "random weights instead, see random_models.py, and random prompts; of speed"),
    "rows": Option(64, "requests at once of speed, matchers of masks"),
    "prompt_tokens": Option(0, "length to which prompts are cut, 0 for their own; of speed"),
    "new_tokens": Option(64, "of speed"),
    "rounds": Option(3, "of speed"),
    "temperature": Option([0.0], "of speed"),
    "cpu_time": Option(False, "seconds of the processor, for a machine with other load; of speed"),
    "vocab_size": Option(151_936, "of masks"),
    "steps": Option(96, "of masks"),
    "suite": Option(None, "folder of the JSON Schema Test Suite"),
    "documents": Option(10_000, "of documents"),
    "schemas": Option(200, "of documents"),
    "max_tokens": Option(256, "of documents"),
    "overlap": Option(False, "steps that overlap, of documents"),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, OPTIONS)
