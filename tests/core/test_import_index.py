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
from nanovllm.fast.host.import_index import keep_import_index
before = list(sys.meta_path)
keep_import_index()
import transformers, transformers.models
from transformers.utils import import_utils
print(json.dumps({
    "calls": len(import_utils.CALLS),
    "indices": [{key: sorted(values) for key, values in index[frozenset()].items()}
                for index in (transformers.INDEX, transformers.models.INDEX)],
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
    assert found["is_clean"]
    return found


def kept_files(library: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in (library.parent / "cache" / "imports").glob("*.index")}


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


def test_damaged_files_are_replaced(library):
    imported(library)
    whole = kept_files(library)
    assert len(whole) == 2
    for damage in (lambda _: b"", lambda w: w[:-1], lambda w: w[:-1] + bytes([w[-1] ^ 1]), lambda w: w[:40]):
        for file, content in whole.items():
            file.write_bytes(damage(content))
        assert imported(library)["calls"] == 2
        assert kept_files(library) == whole


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


def test_what_is_imported_already_stays(library):
    first = "import transformers, transformers.models\nfrom nanovllm.fast.host.import_index"
    program = PROGRAM.replace("from nanovllm.fast.host.import_index", first)
    assert [imported(library, program)["calls"] for _ in range(2)] == [2, 2]
    assert kept_files(library) == {}


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


def test_a_write_that_was_cut_short_is_written_again(library):
    imported(library)
    whole = kept_files(library)
    for file, content in whole.items():
        file.with_suffix(".new").write_bytes(content[:50])
        file.unlink()
    imported(library)
    assert kept_files(library) == whole


def test_the_kept_index_is_the_one_that_transformers_makes(tmp_path):
    program = """
from pathlib import Path
from nanovllm.fast.host.import_index import keep_import_index
keep_import_index()
import transformers.models
"""
    comparison = """
from transformers.utils.import_utils import define_import_structure as find
folder = Path(transformers.__file__).parent / "models"
calls = [((folder,), {"prefix": "models"}), ((str(folder / "__init__.py"),), {})]
results = [(find(*args, **options), find.__wrapped__(*args, **options)) for args, options in calls]
assert all(found == made for found, made in results) and len(results[0][0][frozenset()]) > 500
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NANOVLLM_CACHE": str(tmp_path)}
    kept = []
    for each in (program, program + comparison):  # one that made an index has changed it since
        subprocess.run([sys.executable, "-c", each], env=environment, timeout=120, check=True)
        kept.append({file: file.stat().st_mtime_ns for file in (tmp_path / "imports").iterdir()})
    assert len(kept[0]) == 2 and kept[0] == kept[1]  # the second process wrote nothing


PACKAGES = """
import json, sys
from importlib import metadata
from nanovllm.fast.host import import_index
make, calls = metadata.packages_distributions, []
metadata.packages_distributions = lambda: calls.append(1) or make()
import_index.keep_import_index()
print(json.dumps([metadata.packages_distributions() == make(), len(calls)]))
"""


def test_the_index_of_installed_packages_is_kept_until_one_is_installed(library):
    package = library.parent / "some_package-1.0.dist-info"
    assert json.loads(output(library, PACKAGES)) == [True, 1]
    assert json.loads(output(library, PACKAGES)) == [True, 0]
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
    (package / "top_level.txt").write_text("some_module\n")
    assert json.loads(output(library, PACKAGES)) == [True, 1]
    assert json.loads(output(library, PACKAGES)) == [True, 0]
    (package / "top_level.txt").write_text("another_module\n")
    os.utime(package, ns=(1, 1))  # an installation replaces the folder
    assert json.loads(output(library, PACKAGES)) == [True, 1]
