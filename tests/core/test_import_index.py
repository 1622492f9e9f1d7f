"""The index of transformers' model files, kept between processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What matters of the library: a function that reads all files of a folder when the package is imported, twice.
FUNCTION = """
import os
CALLS = []
def define_import_structure(module_path, prefix=None):
    CALLS.append(prefix)
    folder = os.path.dirname(module_path) if str(module_path).endswith(".py") else module_path
    files = {
        os.path.join(prefix or "", name): {open(os.path.join(folder, name)).read()}
        for name in sorted(os.listdir(folder))
        if name.endswith(".py")
    }
    return {frozenset(): files, frozenset({"torch"}): {}}
"""
PACKAGE = """
from pathlib import Path
from .utils.import_utils import define_import_structure
INDEX = define_import_structure(Path(__file__).parent / "models", prefix="models")
assert not INDEX[frozenset({"torch"})]
INDEX[frozenset({"torch"})]["of this process"] = {"x"}  # the library adds to what it was given
"""
MODELS = """
from ..utils.import_utils import define_import_structure
INDEX = define_import_structure(__file__)
"""
PROGRAM = """
import json, sys
from importlib.machinery import SourceFileLoader
from nanovllm.process.import_index import import_index_kept
before = list(sys.meta_path)
with import_index_kept():
    import transformers, transformers.models
from transformers.utils import import_utils
function = getattr(import_utils, "define_import_structure", None)
print(json.dumps({
    "calls": len(import_utils.CALLS),
    "indices": [{key: sorted(values) for key, values in index[frozenset()].items()}
                for index in (transformers.INDEX, transformers.models.INDEX)],
    "is_own": function is None or type(function).__module__ != "nanovllm.process.import_index",
    "is_clean": sys.meta_path == before
    and type(import_utils.__loader__) is type(import_utils.__spec__.loader) is SourceFileLoader,
}))
"""


@pytest.fixture
def library(tmp_path):
    """A package by that name with two model files."""
    for folder in ("utils", "models"):
        (tmp_path / "transformers" / folder).mkdir(parents=True)
    for name, text in {
        "__init__.py": PACKAGE,
        "utils/__init__.py": "",
        "utils/import_utils.py": FUNCTION,
        "models/__init__.py": MODELS,
        "models/llama.py": "Llama",
        "models/qwen.py": "Qwen",
    }.items():
        (tmp_path / "transformers" / name).write_text(text)
    return tmp_path / "transformers"


def output(library: Path, program: str, cache: Path | None = None) -> str:
    environment = os.environ | {
        "PYTHONPATH": f"{library.parent}{os.pathsep}{ROOT}",
        "NANOVLLM_CACHE": str(cache or library.parent / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(library: Path, program: str = PROGRAM, cache: Path | None = None):
    """What a process says that imports the package, and the index is what the function itself makes of the files."""
    found = json.loads(output(library, program, cache))
    files = {path.name: [path.read_text()] for path in sorted((library / "models").glob("*.py"))}
    assert found["indices"] == [{f"models/{name}": text for name, text in files.items()}, files]
    assert found["is_own"]
    assert found["is_clean"]
    return found


def kept_file(library: Path) -> Path:
    (file,) = (library.parent / "cache" / "imports").iterdir()
    return file


def test_the_second_process_takes_the_index_of_the_first(library):
    assert imported(library)["calls"] == 2
    assert imported(library)["calls"] == 0


def test_a_file_that_changed_is_read_again(library):
    imported(library)
    (library / "models" / "llama.py").write_text("Llama, LlamaModel")
    assert imported(library)["calls"] == 2
    assert imported(library)["calls"] == 0


def test_a_file_that_was_touched_is_read_again(library):
    imported(library)
    os.utime(library / "models" / "llama.py", ns=(1, 1))
    assert imported(library)["calls"] == 2


def test_new_and_removed_files_are_noticed(library):
    imported(library)
    (library / "models" / "gemma.py").write_text("Gemma")
    assert imported(library)["calls"] == 2
    (library / "models" / "llama.py").unlink()
    assert imported(library)["calls"] == 2


def test_another_version_of_the_function_makes_its_own_index(library):
    imported(library)
    source = library / "utils" / "import_utils.py"
    source.write_text(source.read_text() + "# newer")
    assert imported(library)["calls"] == 2


def test_a_damaged_file_is_replaced(library):
    imported(library)
    whole = kept_file(library).read_bytes()
    for damaged in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole[:80]):
        kept_file(library).write_bytes(damaged)
        assert imported(library)["calls"] == 2
        assert kept_file(library).read_bytes() == whole


def test_without_a_writable_cache_folder_the_files_are_read(library, tmp_path):
    (tmp_path / "a file").write_text("")
    for _ in range(2):
        assert imported(library, cache=tmp_path / "a file")["calls"] == 2


def test_a_file_that_cannot_be_looked_at_keeps_nobody_from_importing(library):
    (library / "models" / ".#lock").symlink_to("nowhere")
    for _ in range(2):
        assert imported(library)["calls"] == 2


def test_a_library_without_the_function_is_imported_as_it_is(library):
    source = library / "utils" / "import_utils.py"
    source.write_text(source.read_text().replace("define_import_structure", "structure"))
    for file in (library / "__init__.py", library / "models" / "__init__.py"):
        file.write_text(file.read_text().replace("import define", "import structure as define"))
    for _ in range(2):
        assert imported(library)["calls"] == 2


def test_the_index_serves_the_second_import_of_a_first_model_too(library):
    again = """
with import_index_kept():
    import_utils.define_import_structure(transformers.models.__file__)
print("""
    program = PROGRAM.replace("print(", again, 1)
    assert imported(library, program)["calls"] == 2
    assert imported(library, program)["calls"] == 0


def test_what_is_imported_already_stays(library):
    first = "import transformers, transformers.models\nfrom nanovllm.process.import_index"
    program = PROGRAM.replace("from nanovllm.process.import_index", first)
    for _ in range(2):
        assert imported(library, program)["calls"] == 2


def test_an_import_that_fails_leaves_nothing_behind(library):
    good = (library / "models" / "__init__.py").read_text()
    (library / "models" / "__init__.py").write_text(good + "\n1 / 0\n")
    program = """
import sys
from nanovllm.process.import_index import import_index_kept
before = list(sys.meta_path)
try:
    with import_index_kept():
        import transformers, transformers.models
except ZeroDivisionError:
    from transformers.utils import import_utils
    assert type(import_utils.define_import_structure) is type(import_index_kept)
    assert sys.meta_path == before
    print("caught")
"""
    assert output(library, program) == "caught\n"


START = """
import json, sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from nanovllm.process.import_index import _Index, import_index_kept
def function():
    from transformers.utils import import_utils
    return import_utils.define_import_structure
def is_exchanged():
    return type(function()) is _Index
"""
# What others do beside a block, and what has to hold.
BESIDE = {
    "a block within another": """
with import_index_kept():
    import transformers
    with import_index_kept():
        assert is_exchanged()
    assert is_exchanged()
assert not is_exchanged()
""",
    "a block of another thread": """
from threading import Event, Thread
first, second = Event(), Event()
def other():
    with import_index_kept():
        first.set()
        assert second.wait(30)
with import_index_kept():
    thread = Thread(target=other)
    thread.start()
    assert first.wait(30)
    import transformers
assert is_exchanged()
second.set()
thread.join()
assert not is_exchanged()
""",
    "an import of another thread that outlasts the block": """
from threading import Event, Thread
first, second = Event(), Event()
class Waits(SourceFileLoader):
    def exec_module(self, module):
        first.set()
        assert second.wait(30)
        super().exec_module(module)
class Finder:
    def find_spec(self, name, path, target=None):
        spec = PathFinder.find_spec(name, path, target)
        if name.endswith("import_utils"):
            spec.loader = Waits(name, spec.origin)
        return spec
sys.meta_path.insert(0, Finder())
with import_index_kept():
    thread = Thread(target=lambda: __import__("transformers"))
    thread.start()
    assert first.wait(30)
second.set()
thread.join()
assert not is_exchanged()
""",
    "a function of the user's": """
with import_index_kept():
    import transformers
from transformers.utils import import_utils
mine = import_utils.define_import_structure = lambda *args: {}
with import_index_kept():
    assert function() is mine
assert function() is mine
with import_index_kept():
    mine = import_utils.define_import_structure = lambda *args: {}
assert function() is mine
""",
    "a list of finders put back": """
before = list(sys.meta_path)
with import_index_kept():
    import transformers
    sys.meta_path[:] = before
assert sys.meta_path == before and not is_exchanged()
""",
    "a finder in front": """
seen = []
class Finder:
    def find_spec(self, name, path, target=None):
        seen.append(name)
sys.meta_path.insert(0, Finder())
with import_index_kept():
    import transformers
    assert "transformers.utils.import_utils" in seen and is_exchanged()
""",
    "a loader that takes no attributes": """
class Fixed(SourceFileLoader):
    __slots__ = ()
    def __setattr__(self, name, value):
        if name == "exec_module":
            raise AttributeError(name)
        super().__setattr__(name, value)
class Finder:
    def find_spec(self, name, path, target=None):
        spec = PathFinder.find_spec(name, path, target)
        if name.endswith("import_utils"):
            spec.loader = Fixed(name, spec.origin)
        return spec
sys.meta_path.insert(0, Finder())
with import_index_kept():
    import transformers
    assert is_exchanged()
assert type(sys.modules["transformers.utils.import_utils"].__loader__) is Fixed
""",
    "another way to call it": """
with import_index_kept():
    import transformers
    models = Path(transformers.__file__).parent / "models"
    from transformers.utils.import_utils import define_import_structure as held
    assert type(held) is _Index and held.__name__ == "define_import_structure"
    expected = held(str(models))
    assert expected[frozenset()].keys() == {"__init__.py", "llama.py", "qwen.py"}
    assert held(module_path=str(models)) == held(models) == held(models, None) == expected
    try:
        held()
        raise AssertionError
    except TypeError as error:
        assert "module_path" in str(error)
assert held(str(models)) == expected  # it may be kept by its name
""",
    "a function with a memo": """
with import_index_kept():
    import transformers.models
    from transformers.utils import import_utils
    assert not hasattr(function(), "cache_info")
    from functools import cache
    from nanovllm.process import import_index
    import_utils.define_import_structure = cache(import_utils.define_import_structure._original)
    held = import_index._Index(import_utils)
    assert held.cache_info().currsize == 0
    held(Path(transformers.__file__).parent, "x")
    assert held.cache_info().currsize == 1
    held.cache_clear()
    assert held.cache_info().currsize == 0
""",
}


@pytest.mark.parametrize("program", BESIDE.values(), ids=BESIDE)
def test_what_others_do_beside_a_block_stays_as_it_is(library, program):
    output(library, START + program)


def test_the_second_attempt_after_an_import_that_failed_takes_the_index_too(library):
    (library / "models" / "llama.py").write_text("Llama")
    (library / "__init__.py").write_text(PACKAGE + "import sys\nif not hasattr(sys, 'again'):\n    sys.again = 1 / 0\n")
    program = """
for _ in range(2):
    try:
        with import_index_kept():
            import transformers
            assert is_exchanged()
    except ZeroDivisionError:
        assert "transformers" not in sys.modules and not is_exchanged()
        sys.again = True
from transformers.utils import import_utils
print(import_utils.CALLS)
"""
    assert output(library, START + program) == "['models']\n"


def test_another_version_of_the_library_makes_its_own_index(library):
    for version, calls in (("1.0", 2), ("1.0", 0), ("1.1", 2)):
        source = library / "__init__.py"
        source.write_text(f'__version__ = "{version}"\n{PACKAGE}')
        os.utime(source, ns=(1, 1))  # in an image all files may have one time
        shutil.rmtree(library / "__pycache__", ignore_errors=True)  # Python takes bytecode of that time and size
        assert imported(library)["calls"] == calls


@pytest.mark.parametrize("change", [
    ("define_import_structure(module_path, prefix=None)", "define_import_structure(module_path, prefix=None, /)"),
    ("define_import_structure(module_path, prefix=None):", "define_import_structure(*, prefix=None, **given):\n"
     "    module_path = given['models']"),
], ids=["positions", "names"])  # fmt: skip
def test_a_function_that_takes_something_else_is_called_as_it_is(library, change):
    source = library / "utils" / "import_utils.py"
    source.write_text(source.read_text().replace(*change))
    for file in (library / "__init__.py", library / "models" / "__init__.py"):
        text = file.read_text()
        if "given" in change[1]:
            text = text.replace('Path(__file__).parent / "models"', 'models=Path(__file__).parent / "models"')
            text = text.replace("(__file__)\n", "(models=__file__)\n")
        else:
            text = text.replace('prefix="models"', '"models"')
        file.write_text(text)
    calls = [imported(library)["calls"] for _ in range(2)]
    assert calls == ([2, 2] if "given" in change[1] else [2, 0])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' paths are text")
def test_a_path_that_is_no_text_keeps_nobody_from_importing(library):
    odd = library.parent / os.fsdecode(b"\xff")
    odd.mkdir()
    library = library.rename(odd / "transformers")
    (library / "models" / os.fsdecode(b"\xfe.txt")).write_text("")
    cache = odd.parent / "cache"
    assert [imported(library, cache=cache)["calls"] for _ in range(2)] == [2, 0]


def test_a_write_that_was_cut_short_leaves_one_file_that_the_next_replaces(library):
    imported(library)
    whole = kept_file(library).read_bytes()
    kept_file(library).with_suffix(".new").write_bytes(whole[:50])
    (library / "models" / "llama.py").write_text("Llama, LlamaModel")
    imported(library)
    assert kept_file(library).read_bytes() != whole


def test_the_kept_index_is_the_one_that_transformers_makes(tmp_path):
    program = """
import marshal, sys
from pathlib import Path
from nanovllm.process import import_index
kept = {}
keep = import_index._Index._keep
import_index._Index._keep = lambda index: (kept.update(index._results), keep(index))
with import_index.import_index_kept():
    import transformers.models
from transformers.utils.import_utils import define_import_structure
folder = Path(transformers.__file__).parent / "models"
made = []
if len(sys.argv) > 1:
    made = [define_import_structure(folder, prefix="models"), define_import_structure(str(folder / "__init__.py"))]
    assert [marshal.loads(result) for result in kept.values()] == made
    assert len(made[0][frozenset()]) > 500
print(len(kept))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NANOVLLM_CACHE": str(tmp_path)}
    for arguments in ([], ["compare"]):
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "2\n"
