"""Counts what the sources hold: tokens, the import closure of the engine, lines that name a feature, openings of prose.

Tokens are those of Python's tokenizer: names, operators, numbers and strings, without comments and docstrings. They are
counted on Python 3.11, whose tokenizer takes an f-string as one.
"""

from __future__ import annotations

import ast
import io
import re
import token
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanovllm"
COMPOSITION_ROOT = "nanovllm.build"
# The engine's front door, and what the composition root puts behind it where every folder is missing.
ENTRIES = tuple(
    f"nanovllm.{name}"
    for name in ("llm", "engine", "scheduler", "block_manager", "model_runner", "flex", "one_pool", "defaults")
)
# Files at the top that are not the engine's: what composes it with the folders, and doors to some of them.
ROOTS = {"__init__.py", "build.py", "testing.py", "trainers.py"}
COUNTED_TOKENS = {token.OP, token.NAME, token.NUMBER, token.STRING}
NATIVE_SUFFIXES = {".cpp", ".h", ".cu"}
PAGE_SUFFIXES = {".js", ".css", ".html"}
# The words by which a line names a capability that a reader may want to leave out.
FEATURES = {
    "prefix tiers": r"\btiers?\b|Tier|tier_|prefix_cache_(host|dir)",
    "speculation": r"draft|Draft|specul|Specul",
    "recurrent states": r"[Mm]ixer|record_bytes|StateBlocks|is_record|are_records|keeps_records|KeptStates|state_reads|"
    r"state_writes|recurrent",
    "tensor parallelism": r"\branks?\b|Rank|tensor_parallel|WorkerProcesses|when_failed",
    "client shares": r"client_weights|ClientQueue|is_shared\b|\.account\b|slot_exchange|SlotExchange",
    "latency goals": r"itl_goal|ttft_goal|StepBudget|step_costs|LearnedCosts",
    "forks and beams": r"\bfork|Fork|[Bb]eam",
    "structured output": r"structured_output|StructuredOutput|[Mm]atcher|[Gg]rammar",
    "windows and groups": r"group_tables|GroupTables|CacheGroups|GroupBlocks|further\b.*table|\.others\b|pools\.groups",
    "live modules": r"is_live|ModuleWatch|model_changed|weights_changed|forget_model",
    "replicas": r"[Rr]eplica|data_parallel",
    "embeddings": r"[Ee]mbeddingParams|EmbeddedRows|EMBEDDED|embedded\b",
    "prompt log-probabilities": r"prompt_logprobs|PromptRows",
    "resumption": r"\bresum|Resum",
    "late draws": r"late_draw|LateDraw|draws_late|needs_host_tokens",
    "CUDA graphs": r"[Gg]raphShape|HeadShape|uses_graphs|GraphExecutor|cuda_graphs",
    "host memory and threads": r"numa|huge_page|HugePages|collector_paused|take_some_memory|fresh_pages",
}
# Relative clauses and idioms where the field has a noun or a verb.
DIALECT = re.compile(
    r"\b(what|whose|whom|of which|that of|those that|let go|beside|be it|one another|behind|as it is|is told|are told|"
    r"tells of|to be had|can be had|comes of it|but for|of its own|by itself|heard of|no sooner|who reads|who gets)\b",
    re.IGNORECASE,
)
PARAMETER = re.compile(r"^\s*\w+(?:, \w+)*: (?P<text>\S.*)$")
# Words that begin the rest of a sentence instead of a noun: prepositions, conjunctions, relative pronouns, participles.
LOOSE_OPENING = re.compile(
    r"(above|across|after|against|along|among|and|around|as|at|because|before|behind|below|beside|besides|between|but|by|"
    r"despite|during|else|except|for|from|how|if|in|instead|into|like|near|of|off|on|once|or|out|over|per|since|so|than|"
    r"that|though|through|till|to|toward|under|unless|until|up|upon|what|when|where|whereas|whether|which|while|who|whom|"
    r"whose|why|with|within|without|"
    r"begun|borrowed|bound|built|cast|chosen|cut|done|drawn|given|held|kept|known|laid|left|lost|made|meant|paid|put|read|"
    r"said|seen|sent|set|shared|shown|split|spent|taken|thrown|told|written|\w{3,}ed|\w{3,}ing)\b",
)
NOUNS_IN_ING = re.compile(
    r"(padding|sampling|ageing|scaling|string|thing|timing|setting|mapping|warning|meaning|nothing|seed|need)\b"
)


def files(folder: Path, suffixes: set[str]) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes and "__pycache__" not in path.parts)


@cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(source(path))


def num_lines(paths: list[Path]) -> int:
    return sum(source(path).count("\n") for path in paths)


def docstring_nodes(path: Path) -> Iterator[ast.Constant]:
    """Strings that stand alone: docstrings, and texts below a field."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


@cache
def tokens_of_lines(path: Path) -> Counter[int]:
    """Tokens that begin in each line, 1-based."""
    skipped = {
        line for node in docstring_nodes(path) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    counts: Counter[int] = Counter()
    for found in tokenize.generate_tokens(io.StringIO(source(path)).readline):
        if found.type in COUNTED_TOKENS and found.start[0] not in skipped:
            counts[found.start[0]] += 1
    return counts


def num_tokens(paths: list[Path]) -> int:
    return sum(tokens_of_lines(path).total() for path in paths)


def num_code_lines(paths: list[Path]) -> int:
    """Lines in which a token begins."""
    return sum(len(tokens_of_lines(path)) for path in paths)


def num_parallel_assignments(paths: list[Path]) -> int:
    """Assignments of several values to several names in one statement."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) > 1
        for path in paths
        for node in ast.walk(tree(path))
    )


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, lines, tokens) of each function; a docstring counts as lines alone."""
    counts = tokens_of_lines(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            last = node.end_lineno or node.lineno
            yield node.name, last - node.lineno + 1, sum(counts[line] for line in range(node.lineno, last + 1))


def function_size(path: Path, name: str) -> tuple[int, int]:
    """(lines, tokens) of the only function of this name."""
    [(_, lines, tokens)] = [found for found in functions(path) if found[0] == name]
    return lines, tokens


# --------------------------------------------------------------------------------------------------------- imports


@cache
def modules() -> dict[str, Path]:
    """Path of each module of the package, by its name."""
    paths = files(PACKAGE, {".py"})
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return dict(zip(names, paths, strict=True))


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """What lies below a node, without what type checkers alone read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _at_run_time(child)


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, in functions too; names taken from a module are yielded as if they were modules."""
    for node in _at_run_time(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def closure(starts: tuple[str, ...], without: tuple[str, ...]) -> list[Path]:
    """Files that modules reach by imports, functions' imports too, but not through the modules in `without`."""
    reached: dict[str, Path] = {}
    pending = [*starts]
    while pending:
        name = pending.pop()
        if name in reached or name in without or name == "nanovllm" or name not in modules():
            continue
        reached[name] = modules()[name]
        pending += imports(modules()[name])
        pending.append(name.rpartition(".")[0])
    return list(reached.values())


# ----------------------------------------------------------------------------------------------------------- words


def engine_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.glob("*.py")) if path.name not in ROOTS]


def num_lines_that_name_a_feature(paths: list[Path]) -> int:
    feature = re.compile("|".join(f"(?:{words})" for words in FEATURES.values()))
    return sum(feature.search(line) is not None for path in paths for line in source(path).splitlines())


def comments(paths: list[Path]) -> Iterator[str]:
    """Each comment's words; of one that takes several lines, each line."""
    for path in paths:
        for found in tokenize.generate_tokens(io.StringIO(source(path)).readline):
            if found.type == token.COMMENT:
                yield found.string.removeprefix("#").strip()


def docstrings(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        yield from (str(node.value) for node in docstring_nodes(path))


def has_loose_opening(text: str) -> bool:
    return LOOSE_OPENING.match(text) is not None and NOUNS_IN_ING.match(text) is None


def num_loose_parameters(paths: list[Path]) -> int:
    """Lines of docstrings that describe a parameter by the rest of a sentence."""
    lines = (line for text in docstrings(paths) for line in text.splitlines())
    return sum(has_loose_opening(found["text"]) for line in lines if (found := PARAMETER.match(line)))


def num_loose_comments(paths: list[Path]) -> int:
    """Comments at the end of a line of code that begin with the rest of a sentence."""
    count = 0
    for path in paths:
        code = tokens_of_lines(path)
        for found in tokenize.generate_tokens(io.StringIO(source(path)).readline):
            if found.type == token.COMMENT and code[found.start[0]]:
                count += has_loose_opening(found.string.removeprefix("#").strip())
    return count


def num_dialect_words(paths: list[Path]) -> int:
    return sum(len(DIALECT.findall(text)) for text in (*docstrings(paths), *comments(paths)))
