"""Which folders the engine does without: each is hidden in turn with all that imports it, and a mixed batch compared.

    python .ci/deletions.py

Tokens have to be those of transformers. Lists the folders itself, so that a new one is tried from its first commit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

import torch
from sources import PACKAGE, imports, modules
from transformers import LlamaConfig, LlamaForCausalLM

NUM_LEAST = 20
SHELVES = {"nanovllm", "nanovllm.features", "nanovllm.fast"}  # they hold folders, which are deleted one by one
OPTIONS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 24,
    "block_size": 16,
    "attention_backend": "sdpa",
    "enforce_eager": True,
}
PROMPTS = [[1, 2, 3], list(range(5, 60)), [7] * 20]  # the second takes several chunks, beside decodes


class Hidden(MetaPathFinder):
    """Makes modules below some names unimportable, as if their folders were deleted."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def folders() -> Iterator[str]:
    """Names of modules: each folder at the top, and each directly below one."""
    for path in sorted(PACKAGE.rglob("__init__.py")):
        name = ".".join(path.parent.relative_to(PACKAGE).parts)
        if name and name.count(".") < 2:
            yield f"nanovllm.{name}"


def dependents(name: str) -> list[str]:
    """A folder, and every folder and file outside of the engine that needs it, by way of others too."""
    units = sorted([*folders(), *modules()], key=len)
    engine = {f"nanovllm.{path.stem}" for path in PACKAGE.glob("*.py")} | {"nanovllm"}
    users: dict[str, set[str]] = {}
    for module, path in modules().items():
        if module not in engine:
            for imported in imports(path):
                users.setdefault(imported, set()).add(
                    next(u for u in units if f"{module}.".startswith(f"{u}.") and u not in SHELVES)
                )
    found, pending = {name}, [name]
    while pending:
        below = pending.pop()
        for imported, by in users.items():
            if f"{imported}.".startswith(f"{below}."):
                pending += by - found
                found |= by
    return sorted(found)


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)).eval()


def run(model: LlamaForCausalLM, expected: list[list[int]], hidden: Sequence[str]) -> None:
    """Generate without the hidden modules; raises whatever goes wrong."""
    sys.meta_path.insert(0, Hidden(hidden))
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(model, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    if [list(ids) for ids in tokens] != expected:
        raise AssertionError(f"{tokens} are not the tokens of transformers, {expected}")


def works(model: LlamaForCausalLM, expected: list[list[int]], hidden: Sequence[str]) -> str:
    """The error of a child that runs without the hidden modules; empty if its tokens are right."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        error = ""
        try:
            run(model, expected, hidden)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        os.write(sink, error.encode()[:2000])
        os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        error = pipe.read().decode()
    os.waitpid(child, 0)
    return error


def deletions() -> dict[str, str]:
    """Each folder, and what fails without it and its dependents; empty if nothing does. The last is all at once."""
    imported = [name for name in sys.modules if name.startswith("nanovllm")]
    if imported:
        raise AssertionError(f"{imported} are imported already, so hiding them changes nothing")
    torch.set_num_threads(1)
    model = small_model()
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, len(prompt) :]
        .tolist()
        for prompt in PROMPTS
    ]  # fmt: skip
    names = list(folders())
    if len(names) < NUM_LEAST:
        raise AssertionError(f"only {len(names)} folders are listed, {names}; expected at least {NUM_LEAST}")
    errors = {name: works(model, expected, dependents(name)) for name in names}
    spare = [name for name, error in errors.items() if not error]
    return errors | {
        f"all {len(spare)} that it does without": works(model, expected, sorted(set().union(*map(dependents, spare))))
    }


if __name__ == "__main__":
    failed = 0
    for name, error in deletions().items():
        failed += bool(error)
        print(f"{name}: {error or 'not needed'}")
    print(f"needed: {failed}")
