"""Replicas refuse unsupported features by name, before anything is loaded."""

import subprocess

import pytest
import torch

from nanovllm import LLM, AsyncLLM, BeamSearchParams, EngineConfig, ModelLoadError, SamplingParams, TraceWriter
from nanovllm.cli.main import main
from nanovllm.features.engine_config import ROUTING_POLICIES
from nanovllm.features.refusals import RAY, REFUSALS, REPLICAS, check_options
from nanovllm.scheduler import WaitingQueue
from nanovllm.serving.replicas import opening
from nanovllm.serving.replicas.engine_process import replica_options
from nanovllm.serving.replicas.routing import POLICIES
from nanovllm.tools.simulate.simulator import simulate
from nanovllm.trainers import RolloutParams
from tests.support.features import public_names, refusals
from tests.support.llms import generate
from tests.support.mock_drafts import KnownAnswers
from tests.support.replicas import shared_pool, tiny_folder
from tests.support.tiny_models import tiny_model, tiny_tokenizer

REFUSED = refusals(REPLICAS)


def test_every_refusal_is_of_a_public_name_or_says_more_about_one():
    assert {name for name in REFUSALS.keys() - public_names() if " " not in name} == set()


@pytest.fixture
def no_process(monkeypatch):
    """Fail if a process is started."""

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))


class Unpicklable:
    def __call__(self, text):
        return {"input_ids": [1]}

    def decode(self, token_ids, **options):
        return ""

    def __reduce__(self):
        raise TypeError("not this one")


BAD = {
    "a loaded module as model": lambda: {"model": tiny_model(), "tokenizer": tiny_tokenizer()},
    "a tokenizer that cannot be pickled": lambda: {"tokenizer": Unpicklable()},
    "trace": lambda: {"trace": TraceWriter("/dev/null")},
    "a GPU by its number as device": lambda: {"device": "cuda:1"},
    "a policy that cannot be pickled": lambda: {"policies": {"queue": lambda: WaitingQueue()}},
    "a Drafter that cannot be pickled": lambda: {"speculation": KnownAnswers({}, lambda _, drafts: drafts)},
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sent_is_refused_before_anything_is_loaded(name, no_process):
    given = {"model": tiny_folder()} | BAD[name]()
    for door in (LLM, AsyncLLM):
        with pytest.raises(ValueError, match=f"^{name} does not work with data_parallel_size: ") as refusal:
            door(**given, data_parallel_size=2)
        assert str(refusal.value).endswith(REFUSED[name])


FUNCTION = SamplingParams(logits_processors=[lambda ids, row: row])
CALLS = [
    ("weights_changed", lambda llm, _: llm.weights_changed()),
    ("resume", lambda llm, output: llm.resume(output)),
    ("fork", lambda llm, output: llm.fork(output)),
    ("beam_search", lambda llm, _: llm.beam_search([1, 2], BeamSearchParams(beam_width=2, max_tokens=2))),
    ("logits_processors", lambda llm, _: generate(llm, [1, 2], FUNCTION)),
    ("logits_processors", lambda llm, _: next(llm.stream([1, 2], FUNCTION))),
    ("a report of draws", lambda llm, _: generate(llm, [1, 2], RolloutParams(max_tokens=1))),
]


def test_calls_and_parameters_are_refused_by_a_pool():
    llm = shared_pool()
    (output,) = generate(llm, [1, 2], SamplingParams(max_tokens=1))
    for name, call in CALLS:
        with pytest.raises(ValueError, match=f"{name} does not work with data_parallel_size"):
            call(llm, output)
    assert not llm._engine.requests


COMMANDS = {
    "nanovllm bench": ["bench", "--workload", "chat"],
    "nanovllm tune": ["tune", "--workload", "chat", "--output", "nowhere"],
    "nanovllm calibrate": ["calibrate", "--output", "calibration.json"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_that_measure_one_engine_refuse_replicas(name, no_process, capsys):
    assert main([*COMMANDS[name], "--data-parallel-size", "2"]) == 2
    assert f"{name} does not work with data_parallel_size: {REFUSED[name]}" in capsys.readouterr().err


def test_the_simulator_has_replicas_of_its_own():
    config = EngineConfig(data_parallel_size=2)
    with pytest.raises(ValueError, match="nanovllm simulate does not work with data_parallel_size: set --replicas"):
        simulate(None, config, None)


def test_each_refusal_of_the_table_is_tested_here():
    tested = {name for name, _ in CALLS} | {"nanovllm simulate"}
    assert REFUSED.keys() == BAD.keys() | COMMANDS.keys() | tested


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size is 0; it must be at least 1"),
        ({"data_parallel_size": 2, "routing": "random"}, "routing is 'random'; it must be one of prefix-aware, least-"),
        ({"routing": "round-robin"}, "routing is 'round-robin', but there is one replica"),
        ({"data_parallel_size": 2, "dtype": "float8"}, "dtype is 'float8'"),
        *(({"data_parallel_size": size}, "data_parallel_size must be a whole number") for size in ("2", 2.0, True)),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options, message, no_process):
    with pytest.raises((ValueError, TypeError), match=message):
        LLM(tiny_folder(), **options)


def test_more_replicas_than_cores_are_refused_with_their_number(no_process, monkeypatch):
    monkeypatch.setattr(opening.os, "sched_getaffinity", lambda _: {0, 5, 6})
    with pytest.raises(ValueError, match=r"data_parallel_size is 4, and there are 3 cores .* Set it to at most 3"):
        LLM(tiny_folder(), data_parallel_size=4, device="cpu")


def test_more_replicas_than_gpus_are_refused_with_their_number(no_process, gpus):
    gpus(2)
    with pytest.raises(ValueError, match=r"data_parallel_size is 3, and there are 2 GPUs .* Set it to at most 2"):
        LLM(tiny_folder(), data_parallel_size=3)


def test_a_model_that_is_not_there_is_refused_before_a_process_is_started(no_process):
    with pytest.raises(ModelLoadError, match="there is no folder"):
        LLM("./nowhere", data_parallel_size=2)


def test_an_error_of_a_replica_is_raised_as_one_engine_raises_it():
    with pytest.raises(ValueError, match=r"max_model_len is 9999, but the model has positions for 2048 tokens"):
        opening.open_pool(tiny_folder(), None, None, {"max_model_len": 9999})


def test_a_gpu_that_is_not_there_is_refused_as_one_engine_refuses_it(gpus):
    gpus(0)
    with pytest.raises(ValueError, match="but PyTorch sees no GPU"):
        opening.split_host(EngineConfig(device="cuda", data_parallel_size=2))


@pytest.fixture
def gpus(monkeypatch):
    """Lets PyTorch see so many GPUs."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


@pytest.mark.parametrize(
    "size, gpus_each, visible, expected",
    [
        (3, 1, "4,5,GPU-7f", ["4", "5", "GPU-7f"]),
        (1, 3, "4,5,GPU-7f", ["4,5,GPU-7f"]),
        (2, 2, "0,1,2,3,4", ["0,1", "2,3"]),
    ],
)
def test_each_replica_takes_gpus_of_its_own(gpus, monkeypatch, size, gpus_each, visible, expected):
    gpus(len(visible.split(",")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    shares = opening.split_host(EngineConfig(data_parallel_size=size), gpus_each=gpus_each)
    assert [share.environment for share in shares] == [{"CUDA_VISIBLE_DEVICES": own} for own in expected]


@pytest.mark.parametrize(
    "gpus_each, said",
    [
        (2, "there are 3 GPUs for replicas of 2 each. Set it to at most 1"),
        (4, "tensor_parallel_size is 4, and there are 3 GPUs"),
    ],
)
def test_replicas_of_more_gpus_than_there_are_are_refused(gpus, gpus_each, said):
    gpus(3)
    with pytest.raises(ValueError, match=said):
        opening.split_host(EngineConfig(data_parallel_size=2), gpus_each=gpus_each)


@pytest.mark.parametrize("options", [{"data_parallel_size": 2}, {"kv_events": "tcp://*:5557"}])
def test_what_does_not_work_on_ray_is_refused_by_name(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name} does not work with nanovllm.ray: "):
        check_options(EngineConfig(max_queue=3, **options), RAY)
    check_options(EngineConfig(max_queue=3, data_parallel_size=1, kv_events=None, tensor_parallel_size=2), RAY)


def test_each_replica_publishes_kv_events_with_a_rank_of_its_own():
    given = {"kv_events": "tcp://*:5557", "kv_events_rank": 2}
    assert [replica_options({"options": given, "index": index})["kv_events_rank"] for index in (0, 1)] == [2, 3]
    assert replica_options({"options": {"seed": 1}, "index": 1}) == {"seed": 1}


def test_the_policies_are_those_of_the_option():
    assert sorted(POLICIES) == sorted(ROUTING_POLICIES)
