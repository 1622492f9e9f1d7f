"""The backend that "auto" takes on a GPU where FlashAttention is installed."""

from __future__ import annotations

import logging
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from nanovllm.attention import backends as attention_choice
from nanovllm.attention import flash
from nanovllm.attention.backends import AttentionChoice, preferred_block_size
from nanovllm.attention.flash import TRIED_VERSION
from nanovllm.attention.operator import AttentionLayer
from nanovllm.cache.kinds import LayerTraits
from nanovllm.core.config import EngineConfig

LAYERS = [AttentionLayer(nn.Identity(), LayerTraits(16, 8, 128, 128), torch.bfloat16, 1.0)]
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def flash_is_there(monkeypatch):
    monkeypatch.setattr(attention_choice, "missing_for_flash", lambda *_: None)
    monkeypatch.setattr(attention_choice, "has_tried_version", lambda: True)
    monkeypatch.setattr(attention_choice, "import_failure", lambda: None)
    monkeypatch.setattr(attention_choice, "_missing_compiler", lambda _: None)


def choice(**options):
    config = EngineConfig(**options)
    size = preferred_block_size(LAYERS, DEVICE, config)
    return AttentionChoice.for_model(LAYERS, DEVICE, config.resolve_limits("cuda", 4096, block_size=size)).backend, size


def test_auto_takes_flash_and_blocks_of_its_size(flash_is_there):
    assert choice() == ("flash", 128)


def test_auto_takes_flex_for_blocks_of_another_size(flash_is_there):
    assert choice(block_size=64)[0] == "flex"


def test_auto_takes_neither_where_nothing_is_compiled(flash_is_there):
    assert choice(enforce_eager=True) == ("sdpa", None)


def test_auto_leaves_a_version_that_was_not_tried_alone(flash_is_there, monkeypatch):
    monkeypatch.setattr(attention_choice, "has_tried_version", lambda: False)
    assert choice() == ("flex", None)
    assert choice(attention_backend="flash") == ("flash", 128)


def test_the_extra_installs_the_version_that_was_tried():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8"))
    assert f"flash-attn-4=={TRIED_VERSION}" in project["project"]["optional-dependencies"]["flash"]


# ------------------------------------------------------------------------------- a FlashAttention that is there, broken


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Puts a FlashAttention-4 of this code in place, on a GPU that it was tried on; counts its imports in a file."""
    imports = tmp_path / "imports"
    imports.write_text("")

    def put(code: str) -> None:
        package = tmp_path / "flash_attn" / "cute"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").write_text("")
        (package / "__init__.py").write_text("")
        head = f"open({str(imports)!r}, 'a').write('once\\n')\n"
        (package / "interface.py").write_text(head + code)

    put.num_imports = lambda: len(imports.read_text().splitlines())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(attention_choice, "has_tried_version", lambda: True)
    monkeypatch.setattr(attention_choice, "_missing_compiler", lambda _: None)
    flash.import_failure.cache_clear()
    yield put
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]
    flash.import_failure.cache_clear()


def test_where_flash_is_not_installed_it_is_asked_for_by_the_command_that_installs_it(install):
    with pytest.raises(ValueError, match=r"flash-attn-4 is not installed \(pip install 'nanovllm\[flash\]'\)"):
        choice(attention_backend="flash")


BROKEN = {
    "OSError: libcute.so: cannot open": "raise OSError('libcute.so: cannot open')",
    "ModuleNotFoundError: No module named 'quack_x'": "import quack_x",
    "AttributeError: module 'os' has no attribute 'gone'": "import os; os.gone",
}


@pytest.mark.parametrize(("cause", "code"), BROKEN.items())
def test_auto_takes_flex_with_one_line_where_flash_cannot_be_imported(install, caplog, cause, code):
    install(code)
    assert choice() == ("flex", None)
    [record] = [record for record in caplog.records if record.name == "nanovllm"]
    assert record.levelno == logging.WARNING
    assert f"attention is 'flex': flash-attn-4 is installed but cannot be imported ({cause}" in record.getMessage()
    assert install.num_imports() == 1
    caplog.clear()
    assert choice(block_size=128) == ("flex", None)
    assert len(caplog.records) == 1 and install.num_imports() == 1


def test_flash_that_cannot_be_imported_is_an_error_where_it_was_asked_for(install):
    install("raise OSError('libcute.so: cannot open')")
    with pytest.raises(ValueError, match=r"cannot be imported \(OSError: libcute.*reinstall it.*Use 'auto' or 'flex'"):
        choice(attention_backend="flash")


def test_a_package_around_it_that_is_broken_is_no_end_either(install, tmp_path, caplog):
    install("")
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise OSError('libcudart.so')")
    assert choice() == ("flex", None)
    assert "OSError: libcudart.so" in caplog.text


def test_flash_is_imported_once_and_only_where_it_may_be_used(install, monkeypatch):
    install("")
    assert choice(block_size=64) == ("flex", None) and choice(enforce_eager=True)[0] == "sdpa"
    assert preferred_block_size(LAYERS, torch.device("cpu"), EngineConfig()) is None
    assert install.num_imports() == 0
    assert choice() == choice() == ("flash", 128)
    assert install.num_imports() == 1


def test_debug_lines_of_flash_stay_out_of_stderr(install, capsys):
    install(
        "import logging, sys\n"
        "log = logging.getLogger('flash_attn.cute.cache')\n"
        "log.addHandler(logging.StreamHandler(sys.stderr))\n"
        "log.setLevel(logging.DEBUG)\n"
        "log.debug('while it is imported')\n"
    )
    assert choice() == ("flash", 128)
    logging.getLogger("flash_attn.cute.cache").debug("a kernel was compiled")
    logging.getLogger("quack.later").debug("another")
    logging.getLogger("flash_attn.cute.cache").warning("worth reading")
    assert capsys.readouterr().err == "worth reading\n"
    assert logging.root.manager.disable == logging.NOTSET
