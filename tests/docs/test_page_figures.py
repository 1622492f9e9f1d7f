"""Defaults, limits and sizes that sentences of pages quote: each sentence is made here from what it quotes."""

import ast
import re
import tomllib
from types import SimpleNamespace

import pytest

import nanovllm
from nanovllm import EngineConfig, attention
from nanovllm.block_manager import HASH_BYTES
from nanovllm.cli import tune
from nanovllm.config import DEVICE_DEFAULTS
from nanovllm.fast.gpu import forward_graphs
from nanovllm.fast.host import memory
from nanovllm.fast.kernels import layer_stack, processor_classes
from nanovllm.features.costs import buckets
from nanovllm.features.grammar.compiler import MAX_CACHED_BYTES, STATES_BYTES
from nanovllm.features.intake import intake
from nanovllm.features.kv_events import kv_events
from nanovllm.features.logprobs import logprobs
from nanovllm.features.structured_output import MAX_CHOICES, MAX_FORM_BYTES, MAX_SCHEMA_DEPTH
from nanovllm.models.gguf.config import READ_TYPES
from nanovllm.observability import trace_writer
from nanovllm.observability.step_records import RECENT_STEPS
from nanovllm.sampling_params import MAX_SAMPLES, MIN_TEMPERATURE
from nanovllm.serving.replicas import engine_process, fleet, pool, pool_request, routing
from nanovllm.serving.replicas import replica as one_replica
from nanovllm.serving.server import body_limits, connections, lifecycle, recorder, retry_after, state
from nanovllm.serving.server.answers import text_values
from nanovllm.serving.server.answers.string_formats import FORMATS
from nanovllm.serving.server.answers.template_options import EFFORTS
from nanovllm.serving.server.batch_files import ENDPOINTS
from nanovllm.serving.server.live import engine_snapshot, live_feed
from nanovllm.serving.server.openai.protocol import CompletionRequest
from nanovllm.serving.server.settings import ENGINE_DEFAULTS, ServerSettings
from nanovllm.serving.streaming import engine_thread
from nanovllm.tools.bench import other_engines, worker
from nanovllm.tools.simulate import cost_fit, utilisation
from nanovllm.tools.tune import find_rate, forecast, ranking, report, settings, shares
from nanovllm.tools.workloads import block_tokens, recorded
from nanovllm.tools.workloads.specs import build
from tests.support.command_line import command_parsers
from tests.support.pages import ROOT, TEXTS

PAGES = ROOT / "nanovllm" / "observability" / "pages"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CPU, GPU, ENGINE, SERVER = DEVICE_DEFAULTS["cpu"], DEVICE_DEFAULTS["cuda"], EngineConfig(), ServerSettings()
ENGINE_LIMITS = ENGINE.resolve_limits("cpu", 40_960)
MIB, GIB = 2**20, 2**30
MINIMUM = {name.partition(">=")[0]: name.partition(">=")[2].partition(",")[0] for name in PROJECT["dependencies"]}
COMPLETION_TOKENS = CompletionRequest.model_fields["max_tokens"].default
WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 8: "eight"}


def percent(share):
    return f"{100 * share:g} %"


def constants(file):
    """Numbers at the top of a file that imports packages of an extra."""
    found = {}
    for node in ast.parse((ROOT / "nanovllm" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found[node.targets[0].id] = node.value.value
    return SimpleNamespace(**found)


def flag_default(command, flag):
    (action,) = (each for each in command_parsers()[command]._actions if flag in each.option_strings)
    return action.default


ROUTER, REQUEST = constants("ray/router.py"), constants("serving/replicas/pool_request.py")
APPLICATION, BATCHES = constants("ray/application.py"), constants("ray/batches.py")
LM_EVAL = constants("tools/evaluation/lm_eval_model.py")
SWEPT = settings.values_to_try("cpu", {}, longest_prompt=10**6, most_at_once=10**6, wide=False)
D = [f"D/{1 / factor:g}" if factor < 1 else f"{factor:g} D" for factor in settings.WIDE]

MODELS = re.search(r"Of (\d+) classes (\d+) are served", TEXTS["docs/guide/models.md"])
QUANTISED = ", ".join(kind for kind in READ_TYPES if kind.startswith("Q"))

# Of the pages in a browser.
PATIENCE = re.search(r"PATIENCE_MS = \[(.*)\]", (PAGES / "live_server.js").read_text(encoding="utf-8"))[1].split(",")
MOST_ROWS = re.search(r"MOST_ROWS = (\d+)", (PAGES / "timeline_tables.js").read_text(encoding="utf-8"))[1]
SCREEN = r"\(min-width: (\d+)px\) and \(min-height: (\d+)px\)"
WIDE = [int(size) for size in re.search(SCREEN, (PAGES / "live.css").read_text(encoding="utf-8")).groups()]

QUOTED = {
    "README.md": [
        "{1} of the {0} causal language model classes".format(*MODELS.groups()),
        f"Python {PROJECT['requires-python'].removeprefix('>=')} or newer",
        f"any torch from {MINIMUM['torch']} on",
        f"Version {nanovllm.__version__.rpartition('.')[0]}: ",
        f"derived from the engine's `seed` ({ENGINE.seed})",
        f"`/v1/completions` to `max_tokens` {COMPLETION_TOKENS}",
    ],
    "CONTRIBUTING.md": [f"Python {PROJECT['requires-python'].removeprefix('>=')}, and a C++ compiler"],
    "SECURITY.md": [f"below `--min-priority` ({SERVER.min_priority})", f"listens on {SERVER.host} unless"],
    "docs/glossary.md": [f"the keys and values of `block_size` ({CPU.block_size}) consecutive tokens"],
    "docs/internals/life_of_a_request.md": [
        f"(xxh3, {8 * HASH_BYTES} bits, chained",
        f"the model's head runs again, {logprobs.ROWS_AT_ONCE} rows at a time",
        f"a step of up to {WORDS[max(layer_stack.NUM_ROWS)]} decodes runs all layers",
    ],
    "docs/guide/api.md": [
        f"| 0 (greedy), or {MIN_TEMPERATURE:.0e} and".replace("e-06", "e-6"),
        f"| 1 to {MAX_SAMPLES:,}; 1 if greedy |",
        f"`logprobs` up to {logprobs.MOST_BY_KERNEL} act within a CUDA graph",
        f"once {forward_graphs.STEPS_TO_CAPTURE} steps had them",
        f"from `prompt_logprobs_start` on, {logprobs.ROWS_AT_ONCE} rows at a time",
    ],
    "docs/guide/async.md": [
        f"some {intake.LONG_CHARS:,} characters",
        f"a shape of which {forward_graphs.STEPS_TO_CAPTURE} steps ran without a graph",
        f"after {engine_thread.MAX_FAILED_STEPS} failed steps in a row",
        f"over the last {RECENT_STEPS:,} steps",
    ],
    "docs/guide/agents.md": [
        f"`reasoning_effort` ({str(list(EFFORTS))[1:-1]})".replace("'", '"'),
        f"`minLength` (at most {text_values._MAX_LEAST:,})",
    ],
    "docs/guide/benchmarking.md": [
        *(f"{load.num_prompt_tokens:,} and {load.num_output_tokens:,}" for load in map(build, ("W", "P", "W1", "W2"))),
        f"ids from {block_tokens.LOWEST_ID} up to `vocab`",
        f"with ids from {block_tokens.LOWEST_ID} to {block_tokens.LOWEST_ID + block_tokens.DRAWN - 1}",
        f"blocks of {recorded.MOONCAKE_BLOCK} tokens",
        f"the first {worker.TIMED_WARM_UP}, slow engines play {WORDS[other_engines.SLOW_WARM_UP_REQUESTS]}",
    ],
    "docs/guide/coming_from.md": [
        f"| `--block-size` | {CPU.block_size} |",
        f"{GPU.max_num_seqs:,} and {GPU.max_num_batched_tokens:,} on a GPU, "
        f"{CPU.max_num_seqs} and {CPU.max_num_batched_tokens:,} on a CPU",
        f"| {CPU.max_num_seqs} on a CPU, {GPU.max_num_seqs:,} on a GPU |",
        f"half the budget, {ENGINE_LIMITS.max_num_partial_prefills}, {ENGINE_LIMITS.max_long_partial_prefills} |",
        f"{ENGINE_DEFAULTS['max_queue']:,}; beyond it 429",
        f"{SERVER.host}:{SERVER.port}",
        f"{QUANTISED}, F16, BF16 and F32",
        f"| {SERVER.port}, not 8080 |",
    ],
    "docs/guide/command_line.md": [
        f"{', '.join(f'`{path}`' for path in ENDPOINTS[:-1])} or `{ENDPOINTS[-1]}`; a body",
    ],
    "docs/guide/evaluation.md": [
        f"`max_model_len` - {LM_EVAL.UNREAD_TOKENS} |",
        f"sets no limit | {LM_EVAL.MAX_NEW_TOKENS} |",
        f"`block_size` {LM_EVAL.BLOCK_SIZE} |",
    ],
    "docs/guide/gguf.md": [f"| {QUANTISED} | linear layers and embedding stay packed |"],
    "docs/guide/kv_events.md": [
        f"{kv_events.MAX_UNSENT:,} messages wait for it",
        f"{kv_events.MAX_QUEUED:,} batches wait for it",
        f"The last {kv_events.MAX_REPLAYED:,} batches are kept",
    ],
    "docs/guide/live_view.md": [
        f"From {WIDE[0]:,} by {WIDE[1]} pixels up",
        f"(retried every {int(PATIENCE[-1]) // 1000} seconds at most)",
        f"the sparkline covers the last {RECENT_STEPS:,} steps",
        f"per several blocks above {engine_snapshot.MAX_CELLS:,}",
        f"the first {engine_snapshot.MAX_ROWS} running and the first {engine_snapshot.MAX_ROWS} waiting",
        f"or {live_feed.MAX_WATCHERS} pages watch already",
        f"ten per second and {percent(live_feed.MOST_ENGINE_TIME)} of the engine's thread",
    ],
    "docs/guide/many_machines.md": [
        f"(`target_ongoing_requests`, {APPLICATION.TARGET_ONGOING} unless it is given)",
        f"{ROUTER.FINGERPRINT_BYTES} bytes a block and at most {ROUTER.MAX_REPORTED:,} blocks",
        f"within the last {ROUTER.EXPECTED_SECONDS:g} seconds",
        f"A request that takes {WORDS[REQUEST.MAX_DEATHS]} replicas along",
        f"{WORDS[BATCHES.SPARE_CPUS]} CPUs of the cluster must be left",
        f"rows are a task, and {WORDS[BATCHES.CONCURRENT_BATCHES]} tasks run in an engine at a time",
    ],
    "docs/guide/replicas.md": [
        f"the one with the least of {routing.WAITING_WEIGHT} x waiting + running samples",
        f"those of whole answers up to {engine_process.PROGRESS_SECONDS} s before",
        "after {:g}, {:g}, {:g} and {:g} s".format(*one_replica.BACKOFF_SECONDS[1:]),
        f"reports no step for {fleet.STALL_SECONDS:g} s while",
        f"{WORDS[pool_request.MAX_DEATHS]} replicas die with a request",
        f"`timeout` ends one after {pool.GRACE_SECONDS} s more",
    ],
    "docs/guide/server.md": [
        f"`--port` ({SERVER.port}; 0 takes a free one)",
        f"except `max_tokens`: {COMPLETION_TOKENS} for completions",
        f"at least `--min-priority` ({SERVER.min_priority})",
        f"`--max-queue` ({ENGINE_DEFAULTS['max_queue']:,}) unfinished",
        f"`Retry-After` is {retry_after.MIN_SECONDS:g} to {retry_after.MAX_SECONDS:g} seconds",
        f"| `--max-body-bytes` | {SERVER.max_body_bytes // MIB} MiB |",
        f"| `--max-body-items` | {SERVER.max_body_items:,}, plus two",
        f"| `--max-messages`, `--max-tools` | {SERVER.max_messages:,}, {SERVER.max_tools} |",
        f"| `--max-word-chars` | {SERVER.max_word_chars:,} |",
        f"| `--max-prompts`, `--max-prompt-chars` | {SERVER.max_prompts}, {state.CHARS_PER_TOKEN} per token",
        f"| `--max-samples`, `--max-logprobs` | {SERVER.max_samples}, {SERVER.max_logprobs} |",
        f"Bodies of {body_limits.LARGE_BYTES // 1024} KiB and more",
        f"`--send-timeout` seconds ({SERVER.send_timeout:g})",
        f"`--keep-alive-interval` seconds ({SERVER.keep_alive_interval:g})",
        f"`--drain-timeout` seconds ({SERVER.drain_timeout:g})",
        f"`--stall-timeout` seconds ({SERVER.stall_timeout:g})",
        f"after {WORDS[lifecycle.LAST_SECONDS]} seconds the process exits with 1",
        f"| `--max-connections` | {SERVER.max_connections:,} open sockets |",
        f"| `--max-header-bytes`, `--max-headers` | {SERVER.max_header_bytes // 1024} KiB, {SERVER.max_headers}:",
        f"| `--header-timeout` | {SERVER.header_timeout:g} s from",
        f"| `--body-timeout` | {SERVER.body_timeout:g} s from",
        f"after {connections.MAX_PIPELINED} of them (h11: {connections.MAX_PIPELINED_BYTES // MIB} MiB)",
        f"`--min-priority` ({SERVER.min_priority}) |",
        f"a number for each {recorder.BLOCK_TOKENS} tokens of the prompt",
        f"beyond {recorder.MAX_QUEUED_TOKENS // MIB} million queued prompt tokens",
        f"Above `--record-max-bytes` ({SERVER.record_max_bytes // MIB} MiB)",
    ],
    "docs/guide/simulator.md": [
        f"`--repeats` ({flag_default('calibrate', '--repeats')}) times in turn",
        f"load = {routing.WAITING_WEIGHT} x waiting + running requests",
        f"+ {routing.BALANCE} x the blocks that it was given to compute beyond the replica with fewest "
        f"(at most {routing.MAX_IMBALANCE:g})",
        f"a load above {routing.OVERLOAD_FACTOR} x the least load of all + {routing.OVERLOAD_MARGIN}",
        f"Above {utilisation.MOST_PREDICTABLE} it warns",
        f"Errors above {percent(cost_fit.SMALL_MISS)} count as they are",
        f"that {WORDS[1 + cost_fit.NUM_REWEIGHTINGS]} times, with new weights",
    ],
    "docs/guide/structured_output.md": [
        f"more than {MAX_FORM_BYTES // 1024} KiB",
        f"deeper than {MAX_SCHEMA_DEPTH} levels",
        f"more than {MAX_CHOICES:,} choices",
        f"{MAX_CACHED_BYTES // 2**30} GiB of compiled forms, of at least {STATES_BYTES // 2**20} MB each",
        f"formats but {', '.join(f'`{name}`' for name in sorted(FORMATS))}.",
    ],
    "docs/guide/tracing.md": [
        f"lists the first {MOST_ROWS}, and a click",
        f"written {WORDS[round(1 / trace_writer._FLUSH_SECONDS)]} times per second",
    ],
    "docs/guide/troubleshooting.md": [
        f"after {WORDS[engine_thread.MAX_FAILED_STEPS]} failures requests in it end",
        f"up to {WORDS[len(one_replica.BACKOFF_SECONDS) + 1]} times in a row",
    ],
    "docs/guide/tuning.md": [
        f"a server (default {ENGINE_DEFAULTS['max_queue']:,}) refuses early",
        f"| {CPU.block_size} | {GPU.block_size} |",
        f"at most {memory.MAX_DEFAULT_CPU_CACHE_BYTES // GIB} GiB",
        f"`--candidates` ({tune.CANDIDATES}) of the combinations",
        f"measures `--candidates` ({tune.FORECAST_CANDIDATES}) of them",
        f"simulates up to {forecast.MOST_SIMULATED} combinations",
        f"{D[1]}, {D[2]}, D and {D[4]} of the budget",
        f"more values ({D[0]} to {D[-1]})",
        "blocks of {}, {} and {},".format(*SWEPT["block_size"]),
        f"{ENGINE_LIMITS.max_num_partial_prefills} and {SWEPT['max_num_partial_prefills'][1]} partial and "
        f"{ENGINE_LIMITS.max_long_partial_prefills} and {SWEPT['max_long_partial_prefills'][1]} long partial prefills",
        f"`--repeats` ({flag_default('tune', '--repeats')}) times in turn",
        f"among settings within {percent(ranking.EQUAL)} the one",
        "at {}, {}, {} and {} of it".format(*find_rate.SHARES_OF_CAPACITY),
        f"are {percent(find_rate.TOLERANCE)} apart",
        f"a spread above {percent(report.DISTURBED)} is a warning",
        f"the first requests (at least {shares.FEWEST})",
        f"a utilisation above {utilisation.MOST_PREDICTABLE} is a warning",
        f"computes scores in float32, {attention.PIECE_ROWS} rows at a time",
        f"(classes: {', '.join(f'`{each.name}`' for each in processor_classes.X86)};",
        f"a shape of which {forward_graphs.STEPS_TO_CAPTURE} steps had none",
        f"up to {WORDS[max(layer_stack.NUM_ROWS)]} decodes run all layers of Llama's kind",
        f"up to {layer_stack.MAX_LAYER_BYTES // MIB} MiB of weights a layer",
    ],
    "docs/decisions/two_graphs_a_step.md": [
        f"half as many rows again, and more than {buckets.STAND_IN_ROWS:,}, it runs without",
        f"with more than {buckets.MAX_MORE_TILES} tiles beyond whole blocks are not captured",
        f"after {forward_graphs.STEPS_TO_CAPTURE} steps that would have used it",
        f"that {forward_graphs.STALE_STEPS:,} steps had no use for, once {forward_graphs.MAX_GRAPHS} are kept",
    ],
    "docs/results/gpu.md": [f"; {forward_graphs.MAX_GRAPHS} are kept"],
}


@pytest.mark.parametrize("page", QUOTED)
def test_figures_in_sentences_are_those_of_the_code(page):
    text = re.sub(r"\s+", " ", TEXTS[page]).replace("\N{MULTIPLICATION SIGN}", "x")
    assert [sentence for sentence in QUOTED[page] if sentence not in text] == []
