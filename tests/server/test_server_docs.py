"""docs/guide/server.md: its commands run, its configuration loads, its lists are complete."""

import re
import tomllib
from pathlib import Path

from nanovllm.cli.main import main
from nanovllm.serving.server.openai.protocol import ChatRequest, CompletionRequest, SamplingFields
from tests.support.command_line import words
from tests.support.serving import serving

DOCS = Path(__file__).parents[2] / "docs" / "guide" / "server.md"
TEXT = DOCS.read_text(encoding="utf-8")
OPENAI_FIELDS = {
    "model", "stream", "stream_options", "n", "temperature", "top_p", "frequency_penalty", "presence_penalty",
    "logit_bias", "stop", "seed", "user",
}  # fmt: skip


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_configuration_file_is_one(monkeypatch, tmp_path):
    (text,) = blocks("toml")
    (tmp_path / "keys").write_text("secret\n")
    file = tmp_path / "serve.toml"
    file.write_text(text.replace("/etc/nanovllm", str(tmp_path)))
    calls = []
    monkeypatch.setattr("nanovllm.serving.server.app.serve", lambda *arguments: calls.append(arguments) or 0)
    monkeypatch.setattr("nanovllm.serving.server.preparing.bind", lambda host, port: [])
    assert main(words(f"serve --config {file}")) == 0
    ((model, _, settings, engine, _),) = calls
    written = tomllib.loads(file.read_text())
    assert {name: ({"model": model} | engine).get(name, getattr(settings, name, None)) for name in written} == written


def test_every_extension_and_every_refused_field_is_named():
    for name in set(SamplingFields.model_fields) - OPENAI_FIELDS:
        assert f"`{name}`" in TEXT, name
    for model in (ChatRequest, CompletionRequest):
        for name in model.refused:
            assert f"`{name}`" in TEXT, name


# Options with metrics of their own.
OPTIONAL = {"speculation": "suffix", "prefix_cache_host_bytes": 4 * 2**20}


def test_every_endpoint_and_every_metric_is_named():
    with serving(itl_goal=60.0, **OPTIONAL) as running:
        running.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 3})
        text = running.get("/metrics").text
        paths = running.app.openapi()["paths"]
    for path in paths:
        assert path in TEXT, path
    served = set(re.findall(r"^# TYPE nanovllm:(\w+) ", text, re.MULTILINE))
    served = {name for name in served if not name.endswith("_created")}
    table = TEXT[TEXT.index("## Metrics") : TEXT.index("## Deployment")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    of_replicas = {name for name in named if name.startswith("replica_")}  # shown where there are several
    assert named - of_replicas == served and len(of_replicas) == 4
