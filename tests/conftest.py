"""For every test: its tier, a quiet tokenizers library, threads as before; a browser.

A run of the whole suite takes a process a core and the cases that support/default_tier.py chooses; `-n 0` keeps it in
one process, `-m full` runs the other cases. A folder that is named has the same tiers, a file all of its cases.
"""

import asyncio
import contextlib
import ctypes
import gc
import inspect
import logging
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
import types

import pytest

with contextlib.suppress(ModuleNotFoundError):  # on a GPU's machine it may be missing
    import hypothesis

    # A busy machine is neither a slow test nor slow data.
    hypothesis.settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any machine")

pytest.register_assert_rewrite("tests.support")  # which says what was compared, as in the tests themselves

from tests.support import default_tier  # noqa: E402

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads leave their core to other processes
SWITCH_SECONDS = sys.getswitchinterval()
MAX_PROCESSES = 4  # each has up to 2 GiB
MAX_PROCESSES_OF_A_GPU = 12
GPU_FOLDER = os.path.join(os.path.dirname(__file__), "gpu")
# What takes longest begins first, so that no core waits at the end for a file that began late.
LONGEST = (
    "test_every_class", "test_snippets", "test_cpp_attention", "test_processor_classes", "test_byte_products",
    "test_real_model", "test_equality", "test_live_page", "test_replica_deaths", "test_speculated_answers",
    "test_server_faults", "test_tiers", "test_hybrid_models", "test_deletion",
    "test_server_attack", "test_product_table", "test_structured_answers", "test_examples", "test_tune_command",
    "test_traffic", "test_default_model_errors", "test_server_schema", "test_live_chat", "test_timeline_figures",
    "test_tensor_parallel", "test_fused_layers", "test_interrupts", "test_server_connections", "test_sampler",
    "test_cli_pull", "test_tensor_parallel_failures", "test_whole_fuzz", "test_draft_models",
    "test_llm_forks", "test_engine_process", "test_cli_conversation", "test_replica_ranks", "test_drafts_on_ranks",
)  # fmt: skip
# Of all processes, start and collection included; a run that takes more fails. CI sets it for the default tier.
# Seconds are those of a Zen 5, which compiles a piece between tests in this time: others and busy hosts take more.
USUAL_PIECE_SECONDS = 2.5e-3
PIECE = "\n".join(f"def f{number}(a, b):\n    return [a + {number}, (b, 'text'), {{a: b}}]" for number in range(100))
MAX_PROCESSOR_SECONDS = float(os.environ.get("NANOVLLM_MAX_TEST_SECONDS", "inf"))
FIRST_COLLECTION_BYTES = 3 * 2**29
COLLECT_AFTER_BYTES = 2**29  # of growth since the last full collection, which takes two seconds in a large process
collect_above = FIRST_COLLECTION_BYTES
piece_seconds = []  # before the tests of each file
PROCESSOR_SECONDS = pytest.StashKey[float]()  # of the processes that xdist started
FETCH_SECONDS = pytest.StashKey[float]()  # of the default model, where it was not there: counted apart
LOGGERS = [logging.getLogger(name) for name in (None, "nanovllm", "nanovllm.progress", "huggingface_hub")]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Chooses the tier, and spreads the whole suite over the cores, unless options say otherwise.

    A folder has the default tier, a file that is named all of its cases but the slow ones. Whole files go to a process,
    so that module fixtures are built once and the tests of a file keep their order; on a GPU the processes share cases.
    """
    is_whole_suite = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # with the options of the process that started it
    if is_worker:
        return
    names_files = not all(os.path.isdir(argument) for argument in config.args)
    if not config.option.markexpr:
        config.option.markexpr = "not slow" if names_files else "not slow and not full"
    is_gpu_folder = [os.path.abspath(argument) for argument in config.args] == [GPU_FOLDER]
    if not (is_whole_suite or is_gpu_folder) or config.option.usepdb:
        return
    if getattr(config.option, "numprocesses", 0) is None:
        config.option.numprocesses = "auto"
        config.option.maxprocesses = config.option.maxprocesses or (
            MAX_PROCESSES_OF_A_GPU if is_gpu_folder else MAX_PROCESSES
        )
        config.option.dist = "worksteal" if is_gpu_folder else "loadfile"
        config.option.loadscopereorder = False  # files with many tests first
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of several processes wait for one another's cores
        if is_whole_suite:
            config.stash[FETCH_SECONDS] = _seconds_of_fetching_the_default_model()


@pytest.hookimpl(tryfirst=True)  # the plugin of marks selects by what is marked here
def pytest_collection_modifyitems(items):
    """Marks what the default tier leaves out as `full`, and puts the files that take longest first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))
    for case in default_tier.cases_left_out(items):
        case.add_marker("full")


@pytest.hookimpl(tryfirst=True)  # pytest itself refuses coroutines
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test that is a coroutine, for two minutes at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 120.0))
    return True


def pytest_sessionfinish(session):
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["processor_seconds"] = _processor_seconds()
    elif _seconds_of_all(session.config) > MAX_PROCESSOR_SECONDS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the last line but one, where a log that is cut shows it
def pytest_terminal_summary(terminalreporter, config):
    yield
    seconds = _seconds_of_all(config)
    limit = f", more than the limit of {MAX_PROCESSOR_SECONDS:.0f} s" if seconds > MAX_PROCESSOR_SECONDS else ""
    fetch = config.stash.get(FETCH_SECONDS, 0.0)
    apart = f"; {fetch:.0f} s before them for the default model" if fetch > 1 else ""
    terminalreporter.write_line(f"processor time of all tests, of a Zen 5: {seconds:.0f} s{limit}{apart}")


def pytest_configure(config):
    config.stash[PROCESSOR_SECONDS] = 0.0
    if hasattr(config, "workerinput"):
        config.option.markexpr = config.workerinput["markexpr"]
    elif config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(Workers(config))


class Workers:
    """Tells the processes that xdist starts their tier, and adds up their processor time."""

    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["markexpr"] = self.config.option.markexpr

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.config.stash[PROCESSOR_SECONDS] += getattr(node, "workeroutput", {}).get("processor_seconds", 0.0)


def _seconds_of_fetching_the_default_model():
    """Processor time; without a network the tests that need the model say so."""
    before = _processor_seconds()
    program = "from nanovllm.models.default_model import ensure_default_model; ensure_default_model()"
    subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    return _processor_seconds() - before


def _seconds_of_all(config):
    """Of this process and of those of xdist, which are its children too once they have ended."""
    seconds_of_workers = config.stash[PROCESSOR_SECONDS]
    if seconds_of_workers:
        return seconds_of_workers + _seconds_of_a_zen_5(sum(os.times()[:2]))
    return _processor_seconds() - config.stash.get(FETCH_SECONDS, 0.0)


def _processor_seconds():
    """Seconds of this process and of its children that ended, start and collection included."""
    return _seconds_of_a_zen_5(sum(os.times()[:4]))


def _seconds_of_a_zen_5(seconds):
    return seconds * USUAL_PIECE_SECONDS / statistics.fmean(piece_seconds or [_piece_seconds()])


def _piece_seconds():
    """Processor time of the same work in each run, which tells how fast processor and memory are at the moment."""
    begin = time.thread_time()
    compile(PIECE, "piece", "exec")
    return time.thread_time() - begin


@pytest.fixture(autouse=True)
def threads_stay():
    """A test that leaves PyTorch with another number of threads fails, rather than some test after it."""
    before = _num_threads()
    yield
    after = _num_threads()
    if before is not None and after != before:
        sys.modules["torch"].set_num_threads(before)
        pytest.fail(f"PyTorch computed with {before} threads before this test, and with {after} after it")


@pytest.fixture(autouse=True)
def interpreter_is_as_before():
    """Engines and a server in this process have frozen what was loaded, and a server shortened the turns of threads."""
    yield
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.unfreeze()


@pytest.fixture(autouse=True)
def loggers_are_as_before():
    """A command that ran in this process has set which lines are logged."""
    yield from _loggers_restored()


@pytest.fixture
def info_log(caplog):
    """What the engine logs, from INFO on."""
    caplog.set_level("INFO", logger="nanovllm")
    return caplog


@pytest.fixture(scope="module", autouse=True)
def loggers_are_as_before_the_file():
    """A fixture of the file may run a command too."""
    yield from _loggers_restored()


def _loggers_restored():
    before = [(logger.level, logger.propagate) for logger in LOGGERS]
    yield
    for logger, (level, propagate) in zip(LOGGERS, before, strict=True):
        logger.propagate = propagate
        if logger.level != level:
            logger.setLevel(level)


def _num_threads():
    torch = sys.modules.get("torch")  # which the tests without it shall not import
    return torch and torch.get_num_threads()


@pytest.fixture(scope="module", autouse=True)
def pace_is_measured():
    piece_seconds.append(_piece_seconds())


@pytest.fixture(scope="module", autouse=True)
def free_memory_is_given_back():
    """glibc keeps up to 1 GiB that the models of a file have freed, and cycles of references keep more.

    Only a process that has grown has a full collection.
    """
    yield
    global collect_above
    # FastAPI remembers kinds of endpoints by the function, which holds its application, and so the engine.
    for name, value in vars(sys.modules.get("fastapi.dependencies.models", types)).items():
        if name.endswith("_cached"):
            value.cache_clear()
    is_due = _resident_bytes() > collect_above
    if is_due:
        gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if is_due:
        collect_above = _resident_bytes() + COLLECT_AFTER_BYTES


def _resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.fixture(scope="module")
def programs_are_forked():
    """Replicas and ranks of this file are forks of a process with the imports, which cost each of them 4 s."""
    from tests.support.forked_processes import programs_are_forked

    with programs_are_forked():
        yield


@pytest.fixture
def sigint_is_heeded():
    """Where tests run in the background, the shell has told its children to ignore the interrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def small_default_cache(monkeypatch):
    """256 MiB instead of 4 GiB: engines with the defaults touch all of their KV cache while they are idle."""
    monkeypatch.setattr("nanovllm.fast.host.memory.MAX_DEFAULT_CPU_CACHE_BYTES", 256 * 2**20)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium. Not for longer than a module: while it is open, its thread has an event loop that runs."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium found; Debian's package is `chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
