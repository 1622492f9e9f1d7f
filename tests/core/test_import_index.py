"""The index of transformers' model files, kept between processes."""

from __future__ import annotations

import json
import os
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
from nanovllm.import_index import import_index_kept
before = list(sys.meta_path)
with import_index_kept():
    import transformers, transformers.models
from transformers.utils import import_utils
function = getattr(import_utils, "define_import_structure", None)
print(json.dumps({
    "calls": len(import_utils.CALLS),
    "indices": [{key: sorted(values) for key, values in index[frozenset()].items()}
                for index in (transformers.INDEX, transformers.models.INDEX)],
    "is_own": function is None or function.__module__ == import_utils.__name__,
    "is_clean": sys.meta_path == before and "exec_module" not in vars(import_utils.__loader__),
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


def imported(library: Path, program: str = PROGRAM, cache: Path | None = None):
    """What a process says that imports the package, and the index is what the function itself makes of the files."""
    environment = os.environ | {
        "PYTHONPATH": f"{library.parent}{os.pathsep}{ROOT}",
        "NANOVLLM_CACHE": str(cache or library.parent / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
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
assert import_utils.define_import_structure.__module__ == import_utils.__name__
print("""
    program = PROGRAM.replace("print(", again, 1)
    assert imported(library, program)["calls"] == 2
    assert imported(library, program)["calls"] == 0


def test_what_is_imported_already_stays(library):
    first = "import transformers, transformers.models\nfrom nanovllm.import_index"
    program = PROGRAM.replace("from nanovllm.import_index", first)
    for _ in range(2):
        assert imported(library, program)["calls"] == 2


def test_an_import_that_fails_leaves_nothing_behind(library):
    good = (library / "models" / "__init__.py").read_text()
    (library / "models" / "__init__.py").write_text(good + "\n1 / 0\n")
    program = """
import sys
from nanovllm.import_index import import_index_kept
before = list(sys.meta_path)
try:
    with import_index_kept():
        import transformers, transformers.models
except ZeroDivisionError:
    from transformers.utils import import_utils
    assert import_utils.define_import_structure.__module__ == import_utils.__name__
    assert sys.meta_path == before
    print("caught")
"""
    environment = os.environ | {
        "PYTHONPATH": f"{library.parent}{os.pathsep}{ROOT}",
        "NANOVLLM_CACHE": str(library.parent / "cache"),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "caught\n", done.stderr


def test_the_kept_index_is_the_one_that_transformers_makes(tmp_path):
    program = """
import marshal, sys
from pathlib import Path
from nanovllm import import_index
kept = {}
keep = import_index._Index.keep
import_index._Index.keep = lambda index: (kept.update(index._results), keep(index))
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
