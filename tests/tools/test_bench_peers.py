"""`nanovllm bench` with other engines, by doubles of their packages."""

import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from nanovllm.tools.bench.engines import load_engine
from nanovllm.tools.bench.replay import figures, replay
from nanovllm.tools.workloads.workloads import TimedRequest, Workload, random_requests
from tests.support.refusals import invalid


@pytest.fixture
def llama_cpp(monkeypatch):
    """A `llama_cpp` that keeps the KV of the last sequence; returns the prompts that it was asked to continue."""
    asked = []

    class Llama:
        def __init__(self, path, n_ctx, verbose):
            self.input_ids, self.n_tokens = np.zeros(n_ctx, np.intc), 0

        def reset(self):
            self.n_tokens = 0

        def generate(self, tokens, temp):
            assert temp == 0.0
            asked.append(tuple(tokens))
            known = list(tokens)
            while True:
                self.input_ids[: len(known)] = known
                self.n_tokens = len(known)
                known.append(7)
                yield 7

    module = ModuleType("llama_cpp")
    module.Llama = Llama
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    return asked


def test_llama_cpp_takes_one_request_after_the_other_and_keeps_what_they_share(llama_cpp):
    requests = [TimedRequest(0.0, [1, 2, 3, 4], 3), TimedRequest(0.0, [1, 2, 9], 2), TimedRequest(0.0, [1, 2, 9], 1)]
    workload = Workload("test", requests)
    player = load_engine("llama.cpp", "unused", {"gguf": "model.gguf"}, 7)
    player.prepare(workload)
    played = replay(player, workload)
    reported = figures(workload, played)
    assert llama_cpp == [(1, 2, 3, 4), (1, 2, 9), (1, 2, 9)]
    # The last token of a cached prompt is computed again.
    assert [ended.num_cached_tokens for ended in played.finished] == [0, 2, 2]
    assert reported["cached_tokens"] == 4
    assert played.finished[0].token_times[-1] <= played.finished[1].token_times[0]


def test_llama_cpp_wants_a_file(llama_cpp):
    with invalid(r"llama\.cpp:gguf=FILE"):
        load_engine("llama.cpp", "unused", {}, 7)


@pytest.fixture
def vllm(monkeypatch):
    """A `vllm` that gives every request a token a step, two from the third step on; returns what was added."""
    added = []

    class EngineDouble:
        def __init__(self):
            self.running = {}
            self.num_steps = 0

        def add_request(self, request_id, prompt, params, *, priority):
            added.append(prompt | {"id": request_id, "priority": priority})
            self.running[request_id] = params.max_tokens, []

        def step(self):
            self.num_steps += 1
            time.sleep(0.002)
            outputs = []
            for request_id, (limit, tokens) in list(self.running.items()):
                tokens += [7] * min(limit - len(tokens), 1 if self.num_steps < 3 else 2)
                if finished := len(tokens) == limit:
                    del self.running[request_id]
                completion = SimpleNamespace(token_ids=tokens)
                outputs.append(
                    SimpleNamespace(request_id=request_id, outputs=[completion], finished=finished, num_cached_tokens=3)
                )
            return outputs

    module = ModuleType("vllm")
    module.SamplingParams = lambda **options: SimpleNamespace(**options)
    module.LLM = lambda model, **options: SimpleNamespace(llm_engine=EngineDouble(), reset_prefix_cache=lambda: None)
    monkeypatch.setitem(sys.modules, "vllm", module)
    return added


def test_vllm_gives_each_token_the_time_of_the_step_that_brought_it(vllm):
    workload = Workload("test", [TimedRequest(0.0, [1, 2], 4, cache_salt="a", priority=2), TimedRequest(0.0, [1], 1)])
    player = load_engine("vllm", "unused", {}, 10)
    player.prepare(workload)
    played = replay(player, workload)
    first, second = played.finished
    assert first.token_times == sorted(first.token_times) and len(set(first.token_times)) == 3
    assert first.token_times[2] == first.token_times[3]
    assert second.token_times == first.token_times[:1]
    assert player.counters() == {"steps": 3}
    assert figures(workload, played)["cached_tokens"] == 6
    assert vllm[0] == {"prompt_token_ids": [1, 2], "cache_salt": "a", "id": "0", "priority": 2}
    replay(player, workload)
    assert vllm[2]["id"] == "2"  # ids are unique


@pytest.mark.full
def test_continuous_batching_of_transformers_respects_arrivals(folder):
    requests = [TimedRequest(0.0, [5, 6, 7], 3), TimedRequest(0.0, [8, 9], 2, after=0), TimedRequest(0.3, [3], 2)]
    workload = Workload("test", requests)
    player = load_engine("transformers-continuous", str(folder), {"num_blocks": 8, "max_batch_tokens": 64}, 10)
    try:
        player.prepare(workload)
        played = replay(player, workload)
    finally:
        player.close()
    assert figures(workload, played)["itl"]["mean"] > 0
    for arrival, ended in zip(played.arrivals, played.finished, strict=True):
        assert ended.token_times[0] > arrival
    assert played.arrivals[1] == played.finished[0].token_times[-1]
    assert played.arrivals[2] == pytest.approx(played.arrivals[0] + 0.3)


def test_an_option_that_transformers_generate_does_not_have_is_refused():
    with invalid("no option 'batchsize'; there are dtype and batch_size"):
        load_engine("transformers", "unused", {"batchsize": 2}, 10)


def test_batches_of_transformers_are_as_large_as_asked(folder):
    workload = random_requests(requests=5, prompt=(2, 9), output=(1, 4), vocab=512)
    player = load_engine("transformers", str(folder), {"batch_size": 2}, 13)
    player.prepare(workload)
    for number, request in enumerate(workload.requests):
        player.add(number, request)
    sizes = [len(player.step()) for _ in range(3)]
    assert sizes == [2, 2, 1]
