"""Tables of pages that list what the code has: options, parameters, flags, commands, choices; with their defaults."""

import dataclasses
import re

import pytest

from nanovllm import AsyncLLM, EngineConfig, OutputKind, SamplingParams, StructuredOutput
from nanovllm.cli import conversation
from nanovllm.config import ATTENTION_BACKENDS
from nanovllm.features.engine_config import QUANTIZATIONS, ROUTING_POLICIES
from nanovllm.features.infill.infill import MARKERS
from nanovllm.features.scoring.scores import METHODS
from nanovllm.models.gguf.architectures import ARCHITECTURES
from nanovllm.models.sizes import DTYPE_BYTES, QUANTISED_BYTES, kv_layers
from nanovllm.serving.server.settings import REASONING_FORMATS, TOOL_FORMATS, ServerSettings
from nanovllm.tools.bench.engines import ENGINES
from nanovllm.tools.workloads.files import FIELDS as TRACE_FIELDS
from nanovllm.tools.workloads.workloads import WORKLOADS
from tests.support.command_line import command_parsers
from tests.support.pages import TEXTS, inline_code, tables

OPTIONS = {field.name: field for field in dataclasses.fields(EngineConfig)}
PARAMETERS = {field.name: field for field in dataclasses.fields(SamplingParams)}

# A page, the head of a table's first column, and the names in that column.
CHOICES = [
    ("docs/guide/agents.md", "`--reasoning-format`", {*REASONING_FORMATS} - {"auto"}),
    ("docs/guide/agents.md", "`--tool-format`", {*TOOL_FORMATS} - {"auto"}),
    ("docs/guide/async.md", "`output_kind`", {f'"{kind.value}"' for kind in OutputKind}),
    ("docs/guide/benchmarking.md", "name", {*WORKLOADS, *ENGINES}),
    ("docs/guide/benchmarking.md", "field", {*TRACE_FIELDS}),
    ("docs/guide/embeddings.md", "`method`", {f'"{method}"' for method in METHODS}),
    ("docs/guide/gguf.md", "`general.architecture`", {*ARCHITECTURES}),
    ("docs/guide/kv_events.md", "option", {name for name in OPTIONS if name.startswith("kv_events")}),
    ("docs/guide/quantisation.md", "`quantization`", {*QUANTIZATIONS}),
    ("docs/guide/replicas.md", "`routing`", {*ROUTING_POLICIES}),
    ("docs/guide/server.md", "markers of", {*MARKERS}),
    ("docs/guide/simulator.md", "policy", {*ROUTING_POLICIES}),
    (
        "docs/guide/structured_output.md",
        "field, exactly one",
        {field.name for field in dataclasses.fields(StructuredOutput)},
    ),
]


def rows(page, head):
    """Rows of a page's tables with this head of the first column."""
    for first, *others in tables(TEXTS[page]):
        if first[0] == head:
            yield from others


def first_codes(found):
    """The code in the first cells."""
    return [code for row in found for code in inline_code(row[0])]


def as_written(value):
    """A default as the tables write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if isinstance(value, str) else f"{value:,}"


def test_every_engine_option_has_a_row():
    named = first_codes(rows("docs/guide/tuning.md", "option"))
    assert sorted(named) == sorted(OPTIONS)


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_defaults_of_engine_options_are_those_of_the_code(device):
    resolved = EngineConfig().resolve_limits({"CPU": "cpu", "GPU": "cuda"}[device], 40_960)
    for head, *found in tables(TEXTS["docs/guide/tuning.md"]):
        for row in found if head[0] == "option" else ():
            cell = row[head.index(device if device in head else "default")]
            names = list(inline_code(row[0]))
            for name, default in zip(names, cell.split(", ") if len(names) > 1 else [cell], strict=True):
                value = getattr(EngineConfig() if name == "device" else resolved, name)
                if value not in (None, "") and re.match(r"[\d`]|on$|off$|none$", default):
                    assert re.match(rf"{as_written(value)}(?![\w,])", default), f"{name} is {value}: {default}"


def test_every_sampling_parameter_has_a_row_with_its_default_and_range():
    found = list(rows("docs/guide/api.md", "parameter"))
    assert [code for row in found for code in list(inline_code(row[0]))[:1]] == list(dict.fromkeys(first_codes(found)))
    assert set(first_codes(found)) == set(PARAMETERS)
    for name, _, limits, default, *_ in found:
        (name,) = inline_code(name)
        value, check = PARAMETERS[name].default, getattr(PARAMETERS[name].metadata["check"], "keywords", {})
        if isinstance(value, bool):
            assert default == f"`{value}`", name
        elif isinstance(value, int | float):
            assert float(default) == value, name
        texts = re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", limits.replace("2^64 - 1", str(2**64 - 1)))
        numbers = {float(text.replace(",", "")) for text in texts}
        bounds = {float(check[end]) for end in ("low", "high") if end in check}
        assert bounds - {float("inf")} <= numbers, name


def test_every_flag_of_the_server_is_on_its_page():
    page = TEXTS["docs/guide/server.md"]
    for field in dataclasses.fields(ServerSettings):
        name = field.name.replace("_", "-")
        assert re.search(rf"--(?:no-)?{name}(?![\w-])", page), f"--{name}"


def test_every_command_is_in_each_list_of_commands():
    for page in ("README.md", "docs/guide/command_line.md"):
        named = [code for code in first_codes(rows(page, "command")) if not code.startswith("/")]
        names = [code.removeprefix("nanovllm ").split()[0] for code in named]
        assert sorted(names) == sorted(command_parsers()), page


def test_every_attention_backend_is_in_each_list_of_them():
    backends = set(ATTENTION_BACKENDS) - {"auto"}
    (glossary,) = (row[1] for row in rows("docs/glossary.md", "word") if row[0] == "**attention backend**")
    assert set(inline_code(glossary)) == backends
    assert set(first_codes(rows("docs/guide/tuning.md", "`attention_backend`"))) == backends
    (bullet,) = re.findall(r"^- \*\*Paged attention.*?(?=^- )", TEXTS["README.md"], re.MULTILINE | re.DOTALL)
    assert backends <= set(inline_code(bullet))
    walk = TEXTS["docs/internals/life_of_a_request.md"]
    assert {code for found in re.findall(r"^- (`.*?):", walk, re.MULTILINE) for code in inline_code(found)} == backends


@pytest.mark.parametrize("page, head, choices", CHOICES, ids=[f"{page}, {head}" for page, head, _ in CHOICES])
def test_a_table_of_choices_lists_all_of_them(page, head, choices):
    assert {code.partition("=")[0] for code in first_codes(rows(page, head))} == choices


def test_every_command_of_a_chat_has_a_row():
    named = {code.split()[0] for code in first_codes(rows("docs/guide/command_line.md", "command")) if code[0] == "/"}
    assert named == {"/help", *re.findall(r"^/\w+", conversation.HELP, re.MULTILINE)}


def test_every_call_of_the_asynchronous_engine_has_a_row():
    codes = first_codes(rows("docs/guide/async.md", "call"))
    named = [re.match(r"(?:await )?(\w+)", code)[1] for code in codes]
    assert sorted(named) == sorted(name for name in dir(AsyncLLM) if not name.startswith("_"))


def test_sizes_of_models_are_those_that_fit_computes():
    """docs/guide/what_can_i_run.md: every figure follows from parameters, layers, KV heads and head size."""
    page = TEXTS["docs/guide/what_can_i_run.md"]
    found = re.findall(r"^\| \S+ \| ([\d.]+) \| (\d+) x (\d+) x (\d+) \|(.*)\|$", page, re.M)
    assert len(found) > 5
    for billions, layers, heads, size, cells in found:
        config = {"num_hidden_layers": int(layers), "num_attention_heads": int(heads), "head_dim": int(size)}
        kv_bytes = sum(num_bytes for _, num_bytes in kv_layers(config, DTYPE_BYTES["bfloat16"]))
        context = 8192 * kv_bytes / 1e9
        each = (DTYPE_BYTES["bfloat16"], QUANTISED_BYTES["int8"], QUANTISED_BYTES["int4"])
        sums = [f"{float(billions) * num_bytes + context:.1f} GB" for num_bytes in each]
        assert [cell.strip() for cell in cells.split("|")] == [f"{kv_bytes:,}", f"{context:.2f} GB", *sums]
