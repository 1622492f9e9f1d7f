"""`nanovllm serve`: its options, from flags, the environment and a file."""

import dataclasses
import logging

import pytest

from nanovllm import EngineConfig
from nanovllm.cli import serve as command
from nanovllm.cli.main import main
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.serving.server import preparing
from nanovllm.serving.server.settings import ServerSettings
from tests.support.command_line import words


@pytest.fixture
def served(monkeypatch):
    """Record the arguments of `serve`: model, tokenizer, settings, engine options and sockets of each call."""
    calls = []

    def serve(*arguments):
        calls.append(arguments)
        return 0

    monkeypatch.setattr("nanovllm.serving.server.app.serve", serve)
    monkeypatch.setattr("nanovllm.serving.server.preparing.bind", lambda host, port: [])
    monkeypatch.setattr("nanovllm.models.hub.is_reachable", lambda *_, **__: True)
    monkeypatch.delenv(command.KEY_VARIABLE, raising=False)
    return calls


def refused(capsys, *arguments):
    assert main(["serve", *arguments]) == 2
    return capsys.readouterr().err


def test_flags_reach_server_and_engine(served):
    assert main(words("serve --port 9 --api-key a --api-key b --no-ui --max-queue 7")) == 0
    ((_, _, settings, engine, _),) = served
    assert settings == ServerSettings(port=9, api_key=("a", "b"), ui=False)
    assert engine == {"max_queue": 7, "itl_goal": "auto"}


def test_the_help_documents_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for options in (ServerSettings, EngineConfig):
        for field in dataclasses.fields(options):
            name = (field.metadata["flag"] or field.name).replace("_", "-")
            assert f"--{name}" in text


def test_a_file_has_the_same_names_and_flags_go_before_it(served, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(
        'port = 9\nmodel = "m"\napi-key = ["a"]\nmax_queue = 5\nblock-size = 16\nui = false\nverbose = true\n'
    )
    assert main(words(f"serve --config {file} --port 10 --block-size 32")) == 0
    ((model, _, settings, engine, _),) = served
    assert (model, settings) == ("m", ServerSettings(port=10, api_key=("a",), ui=False))
    assert engine == {"max_queue": 5, "block_size": 32, "itl_goal": "auto"}


@pytest.mark.parametrize("arguments, goal", [
    ("", "auto"), ("--itl-goal 50ms", 0.05), ("--itl-goal none", None),
    ("--max-num-batched-tokens 512", None), ("--max-num-batched-tokens 512 --itl-goal auto", "auto"),
])  # fmt: skip
def test_a_server_has_a_goal_unless_that_is_none_or_its_budget_is_set(served, arguments, goal):
    assert main(["serve", *words(arguments)]) == 0
    assert served[0][3].get("itl_goal") == goal


def test_a_flag_that_names_the_default_model_goes_before_a_file_and_against_an_argument(served, capsys, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('model = "m"\ntokenizer = "t"\n')
    assert main([*words(f"serve --config {file} --model"), DEFAULT_MODEL]) == 0
    assert main(["serve", "--config", str(file), DEFAULT_MODEL]) == 0
    assert main(words(f"serve --config {file} other")) == 0
    assert [call[:2] for call in served] == [(DEFAULT_MODEL, "t"), (DEFAULT_MODEL, "t"), ("other", "t")]
    assert "give one of them" in refused(capsys, "other", "--model", DEFAULT_MODEL)


@pytest.mark.parametrize(
    "text, named",
    [
        ("prot = 9", "did you mean port"),
        ("max_num_batched-token = 9", "did you mean max_num_batched_tokens"),
        ("port = ", "TOML"),
        ('port = "9"', "port must be a whole number"),
        ("[server]\nport = 9", "server"),
        ("max_queue = -1", "max_queue"),
        ('api_key = "a"', "api_key"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(served, capsys, tmp_path, text, named):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert named in refused(capsys, "--config", str(file))
    assert not served


def test_the_key_of_the_environment_counts_too(served, monkeypatch):
    monkeypatch.setenv(command.KEY_VARIABLE, "secret")
    assert main(["serve"]) == 0
    assert served[0][2].api_key == ("secret",)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--port 70000", "65535"),
        ("--tool-format x", "hermes"),
        ("--drain-timeout -1", "drain_timeout"),
        ("--max-prompts 0", "max_prompts"),
        ("--api-key-file /nowhere/keys", "keys"),
        ("--cache-salt-per-key", "API key"),
        ("--block-size 17", "block_size"),
        ("--api-key ''", "api_key"),
    ],
)
def test_options_that_are_wrong_are_refused_before_a_model_is_loaded(served, capsys, arguments, named):
    assert named in refused(capsys, *words(arguments))
    assert not served


def test_without_its_packages_the_command_says_what_to_install(served, capsys, monkeypatch):
    monkeypatch.setattr(preparing, "NEEDS", ("fastapi", "no_such_package"))
    assert "no_such_package: pip install 'nanovllm[serve]'" in refused(capsys)
    assert not served


def test_spans_need_packages_of_their_own_which_are_asked_for_before_a_model_is_loaded(served, capsys, monkeypatch):
    monkeypatch.setattr(preparing, "SPANS_NEED", ("no_such_parent.package",))
    assert "no_such_parent.package: pip install 'nanovllm[otel]'" in refused(
        capsys, "--otlp-traces-endpoint", "http://localhost:4318/v1/traces"
    )
    assert not served


def test_the_level_of_the_log_is_an_option(served, monkeypatch):
    levels = []
    monkeypatch.setattr(
        "nanovllm.serving.server.app.serve", lambda *_: levels.append(logging.getLogger("nanovllm").level) or 0
    )
    assert main(words("serve --log-level warning")) == main(["serve"]) == 0
    assert levels == [logging.WARNING, logging.INFO]
    with pytest.raises(ValueError, match="log_level is 'loud'"):
        ServerSettings(log_level="loud")
