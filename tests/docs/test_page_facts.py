"""What pages name is there: commands and their flags, fields, metrics, messages, figures, files, pictures."""

import configparser
import dataclasses
import inspect
import json
import re
import shlex
import subprocess
import tomllib
from operator import itemgetter

import pytest
import yaml

import nanovllm
from nanovllm import SamplingParams
from nanovllm.cli import main as command_line
from nanovllm.models.default_model import ensure_default_model
from nanovllm.serving.server.openai.protocol import ChatRequest, CompletionRequest
from nanovllm.serving.server.settings import ServerSettings
from tests.support.command_line import own_flags
from tests.support.messages import logged_texts, says, source_texts
from tests.support.pages import PAGES, ROOT, TEXTS, commands, inline_code, snippets, tables

GUIDES = [name for name in PAGES if name == "README.md" or name.startswith("docs/guide/")]
PROJECT, TOOLS = itemgetter("project", "tool")(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
SHELL = [snippet for name in PAGES for snippet in snippets(name) if snippet.language == "bash"]
COMING_FROM, TROUBLE = "docs/guide/coming_from.md", "docs/guide/troubleshooting.md"
FIELDS = {*ChatRequest.model_fields, *CompletionRequest.model_fields}


def is_valid(arguments):
    """Whether the command's parser takes the arguments; its errors are on standard error."""
    try:
        command_line._parser().parse_args(arguments)
    except SystemExit as exit_:
        return exit_.code == 0
    return True


@pytest.mark.parametrize("snippet", SHELL, ids=str)
def test_commands_of_a_shell_block_can_be_given(snippet):
    for command in commands(snippet.text):
        name, *arguments = command
        if name == "nanovllm":
            assert is_valid(arguments), command
        for word in arguments if name in ("pip", "/opt/nanovllm/bin/pip") else ():
            if extra := re.fullmatch(r"(?:\.|nanovllm)\[(.*)\]", word):
                assert set(extra[1].split(",")) <= set(PROJECT["optional-dependencies"]), command
            if word.startswith("torch=="):
                assert word in PROJECT["optional-dependencies"]["cpu"], command
        for word in command:
            if re.match(r"(?:bench|examples|tests|\.ci)/", word):
                assert (ROOT / word).exists(), command


@pytest.mark.parametrize("name", PAGES)
def test_commands_within_sentences_can_be_given(name):
    for code in inline_code(TEXTS[name]):
        words = shlex.split(code) if code.startswith("nanovllm ") else []
        if not words or any(re.fullmatch(r"[A-Z]{3,}|.*\.\.\..*|…", word) for word in words) or len(words) == 2:
            continue
        if words[-1].startswith("--"):  # which may want a value
            assert words.pop() in own_flags(), code
        assert is_valid(words[1:]), code


@pytest.mark.costly
@pytest.mark.parametrize("name", GUIDES)
def test_flags_within_sentences_are_flags(name):
    """Of a command, unless the code begins with another program, or the column is another engine's."""
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "bench").rglob("*.py"))
    flags = own_flags()
    text = re.sub(r"^\|[^|]*\|", "|", TEXTS[name], flags=re.MULTILINE) if name == COMING_FROM else TEXTS[name]
    for code in inline_code(text):
        if code.startswith("--"):
            flag = re.match(r"--[\w-]*", code)[0].rstrip("-")
            is_prefix = code.endswith("...") and any(known.startswith(flag) for known in flags)
            assert flag in flags or is_prefix or f'"{flag}"' in scripts, f"{name}: {code}"


def check_python_name(code):
    """`from nanovllm import NAME`, `NAME.METHOD`, or `NAME(... KEYWORD=...)` with its last keyword."""
    if code.startswith("from nanovllm import "):
        exec(code, {})
        return
    name, method, _, keyword = re.match(r"(\w+)(?:\.(\w+))?(\(.*?(\w+)=)?", code).groups()
    owner = getattr(nanovllm, name)
    owner = getattr(owner, method) if method else owner
    assert keyword is None or keyword in inspect.signature(owner).parameters, code


def test_what_other_engines_names_become_is_there():
    text, flags = TEXTS[COMING_FROM], own_flags()
    names = {*FIELDS, *(field.name for field in dataclasses.fields(SamplingParams)), "logprobs"}
    others = {"HF_HOME", "NANOVLLM_CACHE", "NANOVLLM_API_KEY", "OMP_NUM_THREADS", "/", "/metrics"}
    found = 0
    for section in text.split("\n### ")[1:]:
        for row in next(tables(section))[1:]:
            for code in inline_code(row[1]):
                found += 1
                if code.startswith("--"):
                    assert code.split()[0] in flags, code
                elif code.startswith("nanovllm "):
                    assert is_valid(shlex.split(code)[1:]), code
                elif re.search("[(. ]", code):
                    check_python_name(code)
                else:
                    assert code in names | others, code
            for code in inline_code(row[0]) if row[1] == "the same" else ():
                assert code in names or code.startswith("LLM"), code
    assert found > 80


def test_what_is_said_to_be_refused_is_no_field():
    """A row without a name of ours must not name a field that is there."""
    for section in TEXTS[COMING_FROM].split("\n### ")[1:]:
        if "ields" in section.splitlines()[0] or "ptions" in section.splitlines()[0]:
            for row in next(tables(section))[1:]:
                for code in inline_code(row[0]) if not row[1] else ():
                    assert code not in FIELDS, code


@pytest.mark.full
def test_every_quoted_message_is_one():
    texts = source_texts()
    quoted = [next(inline_code(row[0])) for table in tables(TEXTS[TROUBLE]) for row in table[1:] if row[0][0] == "`"]
    wrong = [message for message in quoted if not any(says(text, message) for text in texts)]
    assert wrong == [] and len(quoted) > 40


def test_every_warning_and_error_of_the_log_is_explained():
    quoted = [code for table in tables(TEXTS[TROUBLE]) for row in table[1:] for code in inline_code(row[0])]
    missing = {
        text for text in logged_texts() if not any(says(text, message) and len(message) > 8 for message in quoted)
    }
    assert missing == set()


def test_metrics_and_alerts_name_what_is_served():
    server = TEXTS["docs/guide/server.md"]
    known = set(re.findall(r"`(\w+)`", server[server.index("## Metrics") : server.index("## Deployment")]))
    for name in GUIDES:
        for code in inline_code(TEXTS[name]):
            for metric in re.findall(r"\bnanovllm:(\w+)", code) if "--" not in code else ():
                assert {metric, re.sub(r"_(bucket|count|sum)$", "", metric)} & known or metric in ("NAME", "python"), (
                    code
                )


def numbers(text):
    return set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text))


def test_figures_of_the_readme_are_those_of_the_results():
    readme = TEXTS["README.md"]
    speed = readme[readme.index("## Speed") : readme.index("## Status")]
    summary = TEXTS["docs/results/README.md"]
    for row in next(tables(speed))[1:]:
        assert numbers(row[2]) | numbers(row[3]) <= numbers(summary), row
    measured = numbers(TEXTS["docs/results/gpu.md"] + TEXTS["docs/results/cpu.md"] + TEXTS["docs/guide/tuning.md"])
    for table in tables(summary):
        for row in table[1:]:
            assert numbers(row[1]) | numbers(row[2].replace("`transformers`", "")) <= measured, row
    (number,) = re.findall(r"\*\*([\d,]+) output tokens per second\*\*", speed)
    assert f"**The project's number: {number} output tokens per second**" in summary


def test_the_unit_of_the_page_is_the_file():
    (text,) = (snippet.text for snippet in snippets("docs/guide/server.md") if snippet.language == "ini")
    assert text == (ROOT / "examples" / "nanovllm.service").read_text(encoding="utf-8")
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string(text)
    assert is_valid(shlex.split(unit["Service"]["ExecStart"])[1:])
    assert float(unit["Service"]["TimeoutStopSec"]) >= ServerSettings().drain_timeout + 5


def test_the_container_runs_the_commands_of_the_pages():
    """Without a container engine: each instruction is read, and the files and options that it names exist."""
    text = (ROOT / "examples" / "Containerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").split("\n")
    found = [line.split(maxsplit=1) for line in lines if line.strip()]
    assert {name for name, _ in found} == {"FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "ENTRYPOINT"}
    assert found[0][0] == "FROM" and found[0][1].startswith("python:3.")
    steps = dict(found)
    for name, value in found:
        sources = value.split()[:-1] if name == "COPY" else []
        assert all((ROOT / source).exists() for source in sources), value
    runs = [command for name, value in found if name == "RUN" for command in commands(value)]
    assert ["useradd", "--create-home", steps["USER"]] in runs
    pip = [[word for word in command if word != "--no-cache-dir"] for command in runs if command[0] == "pip"]
    (install,) = (snippet for snippet in snippets("README.md") if ".[serve]" in snippet.text)
    assert pip == [command for command in commands(install.text) if command[0] == "pip"]
    (program,) = (command[2] for command in runs if command[:2] == ["python", "-c"])
    assert "ensure_default_model()" in program
    exec(program, {})
    assert ensure_default_model().exists()
    program, *arguments = json.loads(steps["ENTRYPOINT"])
    assert program == "nanovllm" and is_valid(arguments)
    assert int(steps["EXPOSE"]) == ServerSettings().port
    (page,) = (snippet for snippet in snippets("docs/guide/production.md") if "podman" in snippet.text)
    assert all(command in text for command in page.text.splitlines())
    assert int(re.search(r"--stop-timeout (\d+)", text)[1]) >= ServerSettings().drain_timeout + 5


def test_ci_runs_the_test_command_of_the_readme_word_for_word():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    (command,) = (line for line in script if line.startswith('eval "$(sed '))
    assert script[-1] == "python -m pytest -m full"
    run = subprocess.run(["bash", "-c", command.replace("eval", "echo", 1)], cwd=ROOT, capture_output=True, text=True)
    lines = [line for snippet in snippets("README.md") for line in snippet.text.splitlines()]
    assert [run.stdout.strip()] == [line for line in lines if line.endswith("&& python -m pytest")]


def test_pictures_are_there_in_light_and_dark():
    for name, text in TEXTS.items():
        for path in re.findall(r"(?:srcset=|src=|\]\()\"?([^\s\"()#]+\.(?:png|svg))", text):
            assert (PAGES[name].parent / path).is_file(), f"{name}: {path}"
            if "_light" in path:
                assert path.replace("_light", "_dark") in text, f"{name}: {path} has no dark variant"


def test_alerts_of_the_pages_are_those_of_the_file():
    rules = yaml.safe_load((ROOT / "examples" / "prometheus_alerts.yaml").read_text(encoding="utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert re.findall(r"`(Nanovllm\w+)`", TEXTS["docs/guide/production.md"]) == alerts


def test_the_description_of_the_package_has_no_link_into_the_repository():
    """README as the package's page on an index shows it, by the substitutions of pyproject.toml."""
    hook = TOOLS["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = TEXTS[hook["fragments"][0]["path"]]
    assert "](docs/" in text and "<picture>" in text
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert re.findall(r"\]\((?!https?://)[^)]*\)|<picture>|<!--|docs/images", text) == []
    assert len(text) > 0.7 * len(TEXTS["README.md"]) and text.count("```") == TEXTS["README.md"].count("```")
