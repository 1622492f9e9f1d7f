"""Policies of users: any queue and budget that is one runs in every door; what is none is refused by name."""

import importlib.util
import sys
from pathlib import Path

import pytest

from nanovllm import LLM, EngineConfig, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.cli.main import main
from nanovllm.features.policies.loop import Loop
from nanovllm.features.policies.opening import METHODS, PROTOCOLS, kind_of, set_policies
from nanovllm.features.policies.walk import check_policy, make_config
from nanovllm.features.shares.client_queue import ClientQueue
from nanovllm.scheduler import Scheduler, WaitingQueue, WholeBudget
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.tools.workloads.specs import build
from tests.support.llms import GREEDY, SAMPLED, assert_idle_and_whole, generate, open_llm, token_ids
from tests.support.rank_pair import one_pair_of_processes
from tests.support.replicas import OPTIONS, REPLICAS, completions, one_engine, process_ids, tiny_folder
from tests.support.sweeps import CALIBRATION, COST
from tests.support.tiny_models import random_prompts, save_tiny
from tests.support.whole_fuzz import walk

EXAMPLE = Path(__file__).parents[2] / "examples" / "least_progress_first.py"
PROMPTS = random_prompts(8, low=20, high=150, seed=3)


def load_example():
    spec = importlib.util.spec_from_file_location("least_progress_first", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["least_progress_first"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LeastProgressFirst = load_example().LeastProgressFirst


class LastComeFirst(WaitingQueue):
    """Another order of admission, which reads the clock."""

    def __init__(self, config, clock):
        super().__init__()
        self.config, self.times = config, [clock()]

    def in_order(self):
        return list(reversed(list(super().in_order())))


class HalfBudget(WholeBudget):
    def of_step(self, decodes, *_, has_slot):
        budget, threshold = super().of_step(has_slot=has_slot)
        return max(budget // 2, min(budget, len(decodes) + threshold)), threshold


GOOD = {
    "plain": WaitingQueue,
    "whole": WholeBudget,
    "shares": ClientQueue,
    "least progress": LeastProgressFirst,
    "last come": LastComeFirst,
    "half": HalfBudget,
    "function": lambda config, blocks: ClientQueue(config, blocks, decode_cost=2.0),
    "by name": "nanovllm.scheduler:WaitingQueue",
}


@pytest.mark.parametrize("name", GOOD)
def test_a_policy_that_is_one_passes(name):
    check_policy(GOOD[name], num_walks=12, num_calls=120)


# ------------------------------------------------------------------------------------------------- broken policies


class Loses(WaitingQueue):
    def rejoin(self, sequence):
        if sequence.num_preemptions < 1:
            self.join(sequence)


class Repeats(WaitingQueue):
    def in_order(self):
        return [*super().in_order(), *super().in_order()]


class Starves(WaitingQueue):
    def startable(self):
        return [s for s in super().in_order() if s.priority <= 0]


class PreemptsTheOneThatAsks(WaitingQueue):
    def victims(self, running, sequence):
        return list(running)


class PreemptsWhatWaits(WaitingQueue):
    def victims(self, running, sequence):
        return list(self)


class Evicts(WaitingQueue):
    """Everyone gives way to any that waits, in each step."""

    def make_way(self, running, preempt):
        for sequence in list(running) if len(self) else ():
            preempt(sequence)


class MissesTheFirst(WaitingQueue):
    first = None


class Overspends(WholeBudget):
    def of_step(self, *_, has_slot):
        return self._tokens[0] + 1, self._tokens[1]


class Stops(WholeBudget):
    def of_step(self, decodes, *_, has_slot):
        return len(decodes), 1


class Raises(WholeBudget):
    def in_step(self, running):
        return running[:0] if len(running) < 2 else running[9]


BROKEN = {
    Loses: "lacks a request that waits|the queue counts",
    Repeats: "in_order has a request twice",
    Starves: "work is left, none is in flight, none is scheduled|no sequence advanced",
    PreemptsTheOneThatAsks: "was preempted for its own blocks",
    PreemptsWhatWaits: "ValueError",
    Evicts: "no sequence advanced or ended",
    MissesTheFirst: "the first request of the queue does not wait",
    Overspends: "a step has a budget of",
    Stops: "work is left, none is in flight, none is scheduled",
    Raises: "IndexError",
}


@pytest.mark.costly
@pytest.mark.parametrize("policy", BROKEN, ids=lambda policy: policy.__name__)
def test_a_policy_that_breaks_an_invariant_is_named_with_the_walk_that_repeats_it(policy):
    with pytest.raises(AssertionError, match=f"{policy.__name__}.*seed .*, step .*: .*({BROKEN[policy]})") as hit:
        check_policy(policy)
    seed = int(str(hit.value).split("seed ")[1].split(",")[0])
    with pytest.raises(AssertionError) as again:
        check_policy(policy, num_walks=1, first_seed=seed)
    assert str(again.value) == str(hit.value)


# -------------------------------------------------------------------------------------------------- with all else


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(24))
def test_with_tiers_drafts_goals_and_forks_every_invariant_holds(seed):
    walk(seed, policies={"queue": (LeastProgressFirst, LastComeFirst)[seed % 2]})


ENGINES = {
    "scarce blocks": {"num_kv_blocks": 34},
    "chunks": {"max_num_batched_tokens": 32, "num_kv_blocks": 34},
    "overlap": {"overlap": True, "num_kv_blocks": 34},
    "drafts": {"speculation": "suffix", "num_kv_blocks": 34},
    "tiers": {"prefix_cache_host_bytes": 1 << 22, "num_kv_blocks": 34},
    "no prefixes": {"enable_prefix_caching": False, "num_kv_blocks": 34},
    "few slots": {"max_num_seqs": 2, "priority_ageing_s": 1.0},
}


@pytest.fixture(scope="module")
def expected():
    with open_llm() as llm:
        return {name: answers(llm, params) for name, params in REQUESTS.items()}


REQUESTS = {"greedy": GREEDY, "sampled": SAMPLED, "n": SamplingParams(seed=5, n=3, max_tokens=40, ignore_eos=True)}


def answers(llm, params):
    priorities = [number % 3 for number in range(len(PROMPTS))]
    outputs = generate(llm, PROMPTS, params, priority=priorities)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.full
@pytest.mark.parametrize("name", ENGINES)
def test_answers_are_those_without_a_policy(name, expected):
    policies = {"queue": LeastProgressFirst, "budget": HalfBudget}
    with open_llm(policies=policies, **ENGINES[name]) as llm:
        assert type(llm._engine.scheduler.waiting) is LeastProgressFirst
        assert type(llm._engine.scheduler.budget) is HalfBudget
        for kind, params in REQUESTS.items():
            assert answers(llm, params) == expected[kind]
        assert_idle_and_whole(llm)


def test_the_queue_decides_who_is_preempted():
    """Of two younger ones, the default preempts the youngest, which has computed more here."""
    lost = {}
    for queue in (WaitingQueue, LeastProgressFirst):
        config = make_config(num_kv_blocks=1 + 9, max_model_len=20, policies={"queue": queue})
        scheduler = Scheduler(config, BlockManager(config.num_kv_blocks, 4))
        set_policies(scheduler, lambda: 0.0)
        loop = Loop(scheduler)
        for first, length in enumerate((11, 4, 12)):
            loop.add([first] * length, max_tokens=20 - length)
        while not scheduler.stats.num_preemptions:
            loop.step()
        lost[queue] = [sequence.request_id for sequence in loop.sequences if sequence.num_preemptions]
        loop.drain()
        loop.check_outputs()
    assert lost == {WaitingQueue: ["2"], LeastProgressFirst: ["1"]}


@pytest.mark.full
def test_replicas_import_their_policies_by_name(folder):
    """From the working directory too; each builds its own."""
    (folder / "noted.py").write_text(
        "import os, pathlib\nfrom nanovllm.scheduler import WaitingQueue\n\n\nclass Noted(WaitingQueue):\n"
        "    def join(self, sequence):\n        super().join(sequence)\n"
        "        pathlib.Path(f'joined-{os.getpid()}').touch()\n"
    )
    expected = completions(generate(one_engine(), PROMPTS, SAMPLED))
    with LLM(tiny_folder(), policies={"queue": "noted:Noted"}, **REPLICAS) as llm:
        assert completions(generate(llm, PROMPTS, SAMPLED)) == expected
        assert {path.name for path in folder.glob("joined-*")} == {f"joined-{number}" for number in process_ids(llm)}
        assert llm.config.policies == {"queue": "noted:Noted"}


@pytest.mark.full
def test_ranks_compute_what_the_policies_of_the_first_decide(tmp_path):
    folder = str(save_tiny(tmp_path / "model"))
    policies = {"queue": LeastProgressFirst, "budget": lambda config: HalfBudget(config)}
    with one_pair_of_processes():
        with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
            plain = answers(llm, GREEDY)
        with LLM(folder, tensor_parallel_size=2, policies=policies, **(OPTIONS | {"num_kv_blocks": 34})) as llm:
            assert type(llm._engine.scheduler.budget) is HalfBudget
            assert answers(llm, GREEDY) == plain


# ---------------------------------------------------------------------------------------------------- what is refused


class Half:
    def join(self, sequence): ...


class Needs(WaitingQueue):
    def __init__(self, model):
        super().__init__()


@pytest.mark.parametrize(
    "policies, error, named",
    [
        ("my:Queue", TypeError, "policies must map queue and budget to policies, not 'my:Queue'"),
        ({"order": WaitingQueue}, ValueError, "a key of policies is 'order'; it must be one of queue, budget"),
        ({"queue": 3}, TypeError, "policies has 3 as queue; it must be a callable, or its name"),
        ({"queue": WholeBudget}, TypeError, r"no queue: it lacks num_clients, gap, first, join.*WaitingQueue"),
        ({"budget": WaitingQueue}, TypeError, "no budget: it lacks see, in_step, of_step"),
        ({"queue": Half}, TypeError, "no queue: it lacks num_clients.*Derive its class"),
        ({"queue": Needs}, TypeError, "needs 'model', but it is given config, blocks, clock by keyword. Rename"),
        ({"queue": "nowhere_to_be:Found"}, ValueError, "'nowhere_to_be:Found' cannot be imported.*as module:Class"),
        ({"queue": "nanovllm.scheduler:Found"}, ValueError, "cannot be imported .AttributeError"),
        ({"queue": "nanovllm.scheduler:SCHEDULING_KEY.missing"}, ValueError, "cannot be imported"),
        ({"queue": "nanovllm.batch:NULL_BLOCK"}, TypeError, "it must be a class or a function"),
        ({"queue": "unknown"}, ValueError, "entry point of the group nanovllm.features; installed are: "),
    ],
)
def test_what_is_no_policy_is_refused_before_a_model_is_loaded(policies, error, named, monkeypatch):
    monkeypatch.setattr("nanovllm.models.loader.load", None)
    with pytest.raises(error, match=named):
        open_llm(policies=policies)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"policies": {"queue": WaitingQueue}, "client_weights": {"a": 2.0}}, "client_weights is .*another queue"),
        ({"policies": {"budget": WholeBudget}, "itl_goal": 0.1}, "itl_goal is 0.1, but policies has another budget"),
    ],
)
def test_options_that_a_policy_takes_the_place_of_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        EngineConfig(**options)


def test_the_methods_asked_for_are_those_of_the_protocols():
    assert len(METHODS["queue"]) == 16 and {"first", "join", "victims", "__len__", "__iter__"} <= {*METHODS["queue"]}
    assert METHODS["budget"] == ["see", "in_step", "of_step", "has_time", "stats"]
    assert [kind_of(policy) for policy in (WaitingQueue, WholeBudget)] == list(PROTOCOLS)


# ------------------------------------------------------------------------------------------------- names and commands


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a module, and an installed distribution whose entry points name its classes."""
    (tmp_path / "work").mkdir()
    (tmp_path / "site" / "own_policies-1.dist-info").mkdir(parents=True)
    (tmp_path / "work" / "policies_here.py").write_text(
        "from nanovllm.scheduler import WaitingQueue, WholeBudget\n\n\nclass Queue(WaitingQueue): ...\n\n\n"
        "class Budget(WholeBudget): ...\n"
    )
    (tmp_path / "site" / "own_policies-1.dist-info" / "METADATA").write_text("Name: own-policies\nVersion: 1\n")
    (tmp_path / "site" / "own_policies-1.dist-info" / "entry_points.txt").write_text(
        "[nanovllm.features]\nown-queue = policies_here:Queue\n"
    )
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    yield tmp_path / "work"
    sys.modules.pop("policies_here", None)


def test_names_are_of_the_working_directory_or_of_installed_entry_points(folder):
    for name in ("policies_here:Queue", "own-queue"):
        with open_llm(policies={"queue": name}) as llm:
            assert type(llm._engine.scheduler.waiting).__module__ == "policies_here"
            assert len(token_ids(generate(llm, PROMPTS[:2]))) == 2
    with pytest.raises(ValueError, match=r"installed are: .*own-queue"):
        kind_of("own-budget")


@pytest.fixture
def served(monkeypatch):
    """Engine options of each call of `serve`."""
    calls = []
    monkeypatch.setattr("nanovllm.serving.server.app.serve", lambda *arguments: calls.append(arguments[3]) or 0)
    monkeypatch.setattr("nanovllm.serving.server.preparing.bind", lambda host, port: [])
    return calls


def test_a_server_is_given_policies_by_flags_or_by_a_file(folder, served):
    (folder / "serve.toml").write_text('[policy]\nqueue = "own-queue"\n')
    assert main(["serve", "--policy", "policies_here:Queue"]) == 0
    assert main(["serve", "--policy", "own-queue", "--policy", "policies_here:Budget"]) == 0
    assert main(["serve", "--config", "serve.toml"]) == 0
    assert served == [
        {"policies": {"queue": "policies_here:Queue"}, "itl_goal": "auto", "max_queue": served[0]["max_queue"]},
        {"policies": {"queue": "own-queue", "budget": "policies_here:Budget"}, "max_queue": served[0]["max_queue"]},
        {"policies": {"queue": "own-queue"}, "itl_goal": "auto", "max_queue": served[0]["max_queue"]},
    ]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--policy", "policies_here:Nothing"], "'policies_here:Nothing' cannot be imported"),
        (["--policy", "policies_here:Queue", "--policy", "own-queue"], "--policy names two of a kind"),
        (
            ["--policy", "policies_here:Budget", "--itl-goal", "50ms"],
            "itl_goal is 0.05, but policies has another budget",
        ),
    ],
)
def test_a_server_refuses_what_is_wrong_at_once(folder, served, arguments, named, capsys):
    try:
        assert main(["serve", *arguments]) == 2
    except SystemExit as exit:
        assert exit.code == 2
    assert named in capsys.readouterr().err
    assert not served


def test_a_simulation_has_the_policies(folder, capsys):
    CALIBRATION.save("calibration.json")
    arguments = ["--calibration", "calibration.json", "--workload", "random:requests=9,prompt=20-200,output=40"]
    limits = ["--num-kv-blocks", "40", "--max-model-len", "300"]
    example = ["--policy", "least_progress_first:LeastProgressFirst"]
    figures = []
    for policy in ([], example):
        assert main(["simulate", *arguments, *limits, *policy]) == 0
        figures.append(capsys.readouterr().out.partition("\n")[2])
    assert figures[0] != figures[1] and "preemptions" in figures[1]


def test_a_simulated_policy_reads_virtual_time():
    times = []

    class Clocked(WaitingQueue):
        def __init__(self, clock):
            super().__init__()
            self.clock = clock

        def charge_generated(self, advanced, without_token):
            times.append(self.clock())

    config = CALIBRATION.resolve(EngineConfig(policies={"queue": Clocked}))
    simulation = simulate(build("random:requests=5,prompt=20,output=9"), config, COST)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(simulation.figures()["seconds"], rel=0.1)
