"""Which file may import which, what imports without torch, and how long files, functions and signatures may be."""

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.package_sources import trees

ROOT = Path(__file__).parents[1] / "nanovllm"
TEST_FILES = sorted(Path(__file__).parent.rglob("*.py"))
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}

# What a reader may leave out: a folder of one of these, or a file directly in it. The rest are units as they stand.
SPLIT = ("features", "fast")
# Units of no folder: what composes the others, and the doors of a few lines.
ROOTS = ("__init__", "build", "testing", "trainers")
INTERFACES = ("serving.server.openai.", "serving.server.anthropic.", "serving.server.ollama.", "serving.server.live.")
MAX_LINES = 500
MAX_FUNCTION_LINES = 60  # one statement a line; .ci/limits.py counts tokens
MAX_PARAMETERS = 8
MAX_TEST_LINES = 600
LONG_FILES = {}
LONG_FUNCTIONS = {
    "fast.kernels.paged_decode_triton.attend_pieces": "a kernel's parameters alone take half of it",
    "fast.kernels.decode_pieces_triton.cut_contexts": "a kernel's parameters alone take a quarter of it",
}
MANY_PARAMETERS = {
    "tools.workloads.workloads.chat": "the options of a workload",
    "tools.workloads.workloads.whales": "the options of a workload",
}


def unit_of(name):
    """The folder at the top, and in `features` and `fast` the part of it; "engine" for the files at the top."""
    top, *rest = name.removesuffix(".__init__").split(".")
    if not rest and top in FILES and top not in ROOTS:
        return "engine"
    return f"{top}.{rest[0]}" if rest and top in SPLIT else top


def needs():
    """Each unit, and the others that its files import, for type checkers alone too; the package's own name aside."""
    found = {unit_of(name): set() for name in FILES}
    for importer, tree in trees().items():
        for imported, _, _ in own_imports(tree):
            if imported != "__init__" and importer != "__init__":
                found[unit_of(importer)].add(unit_of(imported))
    return {unit: others - {unit} for unit, others in found.items()}


def own_imports(tree):
    """(file, name taken from it) of each import of our own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nanovllm":
            for alias in node.names:
                file = f"{node.module}.{alias.name}".removeprefix("nanovllm.")
                is_file = file in FILES or f"{file}.__init__" in FILES
                yield (file, None, node) if is_file else (node.module.partition(".")[2] or "__init__", alias.name, node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "nanovllm":
                    yield alias.name.partition(".")[2] or "__init__", None, node


def named_functions(name):
    """Each function of a file by its qualified name."""
    pending = [(name, trees()[name])]
    while pending:
        path, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            pending.append((f"{path}.{child.name}" if named else path, child))
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path}.{child.name}", child


def parameter_names(function):
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def is_kernel(function):
    """Whether it is Triton's, which takes numbers and pointers alone."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def too_much(found, limit, allowed):
    """What exceeds the limit and is not allowed to, and what is allowed to and need not be."""
    excess = {name: count for name, count in found.items() if count > limit}
    return {name: excess.get(name, 0) for name in excess.keys() ^ allowed.keys()}


def modules_imported_by(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_the_engine_imports_its_own_files_alone():
    """And `build.py`, to which its front door hands the options."""
    assert needs()["engine"] == {"build"}


def test_no_two_folders_need_each_other():
    """`graphlib` names the first circle."""
    graph = needs()
    graph["engine"] = set()
    TopologicalSorter(graph).prepare()


def test_each_folder_says_what_it_needs():
    """`NEEDS` of its `__init__.py`: what is deleted with it, or falls back by name."""
    wrong = {}
    for unit, others in needs().items():
        tree = trees().get(f"{unit}.__init__")
        if unit.startswith(SPLIT) and unit not in SPLIT and tree is not None:
            expected = tuple(sorted(others - {"engine"}))
            values = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
            if values != [expected]:
                wrong[unit] = expected
    assert wrong == {}


def test_contributing_names_every_folder_and_the_limits():
    page = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\| `([\w/]+)/` \|", page, re.MULTILINE))
    folders = {unit.replace(".", "/") for unit in needs() if f"{unit}.__init__" in FILES and unit != "__init__"}
    assert shown == folders - set(SPLIT)
    assert f"files up to {MAX_LINES} lines, functions up to {MAX_FUNCTION_LINES}" in page
    assert f"a file up to {MAX_TEST_LINES} lines" in (ROOT.parent / "tests" / "README.md").read_text(encoding="utf-8")


def test_the_interfaces_of_the_server_are_imported_by_its_app_alone():
    """And by the files of the same interface: `openai` and `live` import `server`, never the reverse.

    The APIs of Anthropic and Ollama are translated to OpenAI's.
    """
    wrong = [
        f"{importer} imports {imported}"
        for importer, tree in trees().items()
        for imported, _, _ in own_imports(tree)
        if imported.startswith(INTERFACES) and importer.rpartition(".")[0] != imported.rpartition(".")[0]
    ]
    translated = re.compile(r"serving\.server\.(anthropic|ollama)\.\w+ imports serving\.server\.openai\.")
    assert [w for w in wrong if not w.startswith("serving.server.app ") and not translated.match(w)] == []


def test_folders_themselves_import_nothing():
    for name, tree in trees().items():
        if name.endswith(".__init__") and name not in ("observability.pages.__init__", "ray.__init__"):
            assert not any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(tree)), name


def test_no_file_imports_the_private_names_of_another():
    wrong = [
        f"{importer} imports {name} of {imported}"
        for importer, tree in trees().items()
        for imported, name, _ in own_imports(tree)
        if name is not None and name.startswith("_") and not name.startswith("__")
    ]
    assert wrong == []


def test_kernels_are_imported_by_name_within_functions():
    """Outside of their folder, and of `fast.attention.cpp`, which is imported the same way."""
    for name, tree in trees().items():
        if unit_of(name) == "fast.kernels" or name == "fast.attention.cpp":
            continue
        at_once = ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        assert not any(file.startswith("fast.kernels") for file, _, _ in own_imports(at_once)), name


def test_files_functions_and_signatures_are_short():
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    functions = dict(named for name in FILES for named in named_functions(name))
    lengths = {name: (f.end_lineno or 0) - f.lineno + 1 for name, f in functions.items()}
    counts = {name: len(parameter_names(f)) for name, f in functions.items() if not is_kernel(f)}
    assert too_much(lines, MAX_LINES, LONG_FILES) == {}
    assert too_much(lengths, MAX_FUNCTION_LINES, LONG_FUNCTIONS) == {}
    assert too_much(counts, MAX_PARAMETERS, MANY_PARAMETERS) == {}


def test_no_test_file_imports_another():
    """Nor by a relative import; what several files need is in `tests/support`, or is a module of `tests/engine`."""
    wrong = [
        f"{path} imports {module}"
        for path in TEST_FILES
        for module in modules_imported_by(ast.parse(path.read_text(encoding="utf-8")))
        if (module.startswith((".", "tests.")) and not module.startswith(("tests.support", "tests.engine")))
        or ".test_" in f".{module}"
    ]
    assert wrong == []


def test_the_tests_of_the_engine_need_nothing_of_other_tests():
    wrong = [
        f"{path} imports {module}"
        for path in TEST_FILES
        if path.parent.name == "engine"
        for module in modules_imported_by(ast.parse(path.read_text(encoding="utf-8")))
        if module.startswith("tests.") and not module.startswith("tests.engine.")
    ]
    assert wrong == []


def test_test_files_are_short():
    lines = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in TEST_FILES}
    assert too_much(lines, MAX_TEST_LINES, {}) == {}


def test_no_two_test_files_share_a_name():
    names = Counter(path.name for path in TEST_FILES if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("names", [
    ("scheduler", "block_manager", "sequence", "batch"), ("testing", "features.policies"),
    ("features.chat", "features.infill", "features.intake"),
    ("features.grammar.c", "features.grammar.m", "features.grammar.t"),
    ("features.groups.cache_", "features.groups.group_", "features.groups.state_blocks", "features.tiers.tiered"),
    ("serving.replicas.routing", "serving.replicas.prefix_index"),
    tuple(f"tools.simulate.{n}" for n in ("simulator", "replica", "indexed_replica", "calibration", "cost_fit")),
    ("features.costs.cost_model", "features.costs.learned_costs"),
], ids=lambda names: names[0])  # fmt: skip
def test_imports_without_torch(names):
    modules = [f"nanovllm.{name}" for name in FILES if name.startswith(names) and not name.endswith("calibrate")]
    assert modules
    imports = "\n".join(f"import {module.removesuffix('.__init__')}" for module in modules)
    assert run(f"import sys\n{imports}\nprint('torch' in sys.modules)") == "False\n"


def test_tests_patch_the_configuration_of_torch_by_its_own_context_managers():
    """`monkeypatch.setattr(torch._dynamo.config, name, ...)` leaves the name hidden for the rest of the process."""
    patched = [
        f"{path.name}:{node.lineno}"
        for path in TEST_FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("monkeypatch.setattr", "mock.patch.object"))
        and re.match(r"'?torch\.[\w.]*config\b", ast.unparse(node.args[0]))
    ]
    assert patched == []
