"""Numbers with units, in flags and in the server's configuration file."""

import pytest

from nanovllm.cli import serve
from nanovllm.cli.units import whole_number
from tests.support.command_line import assert_refused


@pytest.mark.parametrize(
    "text, number",
    {
        "512": 512, "-1": -1, "65_536": 65536, "4k": 4000, "4K": 4096, "4Ki": 4096, "1.5k": 1500,
        "512MiB": 512 * 2**20, "512 MiB": 512 * 2**20, "2GB": 2 * 10**9, "2GiB": 2**31, "8B": 8,
        "1kB": 1000,
        "1m": 10**6, "1M": 2**20, "1t": 10**12,
    }.items(),
)  # fmt: skip
def test_a_unit_multiplies(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "4x", "1.5", "0x10", "4 k k", "1e3", "_", "٤k"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ValueError, match="whole number"):
        whole_number(text)


@pytest.fixture
def seen(monkeypatch):
    """Arguments of each call of the server."""
    seen = []
    monkeypatch.setattr("nanovllm.serving.server.app.serve", lambda *given: seen.append(given) or 0)
    return seen


def test_flags_and_the_configuration_file_take_them(monkeypatch, tmp_path, command, seen):
    file = tmp_path / "serve.toml"
    file.write_text('kv-cache-memory-bytes = "64MiB"\nmax_queue = 7\nmax_body_bytes = "1MB"\n')
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    assert command(f"serve --config {file} --max-model-len 4k")[0] == 0
    ((model, _, settings, engine, _),) = seen
    assert engine == {"kv_cache_memory_bytes": 64 * 2**20, "max_queue": 7, "max_model_len": 4000, "itl_goal": "auto"}
    assert settings.max_body_bytes == 10**6
    assert model == "smollm2-135m-instruct"
    file.write_text('kv-cache-memory-bytes = "64 lots"\n')
    assert command(f"serve --config {file}")[0] == 2


def test_a_model_is_named_by_an_argument_or_a_flag(folder, command, seen):
    for model in (folder, f"-m {folder}", f"--model {folder}", f"{folder} -m {folder}"):
        assert command(f"serve {model}")[0] == 0
    assert [given[0] for given in seen] == [str(folder)] * 4
    assert_refused(command(f"serve {folder} -m /elsewhere"), "give one of them")
    assert_refused(command("serve /nowhere"), "no folder /nowhere")
