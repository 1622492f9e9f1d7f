"""Requests of several clients through the front doors: the same answers as alone, whoever yields to whom."""

import random

import pytest

from nanovllm import SamplingParams, StructuredOutput
from nanovllm.tools.workloads.files import read_trace, write_trace
from nanovllm.tools.workloads.workloads import TimedRequest, Workload
from tests.support import structured
from tests.support.llms import check_engine, generate, greedy, open_llm, shared_llm, token_ids
from tests.support.public_options import make_sequence
from tests.support.replicas import completions
from tests.support.scheduling import make_scheduler
from tests.support.tiny_models import random_prompts

LONG = greedy(30, ignore_eos=True)
SAMPLES = SamplingParams(n=6, seed=3, max_tokens=30, ignore_eos=True)


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_kv_blocks", [129, 20])
def test_answers_do_not_depend_on_who_takes_whose_place(overlap, num_kv_blocks):
    prompts = random_prompts(4, low=10, high=30, seed=5)
    params = [SAMPLES, LONG, LONG, SAMPLES]
    expected = completions([generate(shared_llm(), [p], one)[0] for p, one in zip(prompts, params, strict=True)])
    pool = {"num_kv_blocks": num_kv_blocks, "max_model_len": 256}
    with open_llm(max_num_seqs=3, overlap=overlap, client_weights={"c": 2.0}, **pool) as llm:
        outputs = generate(llm, prompts, params, client=["a", "b", "c", "b"])
        assert completions(outputs) == expected
        stats = llm.stats()
        assert stats.num_preemptions > 0 and (stats.num_clients, stats.client_gap) == (0, 0.0)
        check_engine(llm)


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
def test_a_structured_output_that_loses_its_place_goes_on_where_it_was(overlap):
    form = StructuredOutput(regex="[a-c]{40}")
    params = greedy(80, structured_output=form)
    with structured.open_llm(max_num_seqs=2, overlap=overlap) as llm:
        alone = generate(llm, ["x"], params)
        streams = [llm.stream("x", params, client="a") for _ in range(2)]
        for stream in streams:
            next(stream)
        generate(llm, ["y"], LONG, client="b")
        assert llm.stats().num_preemptions > 0
        assert token_ids([list(stream)[-1] for stream in streams]) == token_ids(alone) * 2


def test_a_stream_counts_as_a_client_until_it_is_closed():
    with open_llm(max_num_seqs=2) as llm:
        streams = [llm.stream([5, 6, number], LONG, client=str(number)) for number in range(3)]
        for stream in streams:
            next(stream)
        assert llm.stats().num_clients == 3
        for stream in streams:
            stream.close()
        generate(llm, [[1, 2]])
        assert llm.stats().num_clients == 0


@pytest.mark.parametrize("client", [5, None, ["a", 7]])
def test_a_client_that_is_no_string_is_refused(client):
    with pytest.raises(TypeError, match="client must be a string"):
        generate(shared_llm(), [[1], [2]], client=client)


def test_a_trace_keeps_the_client(tmp_path):
    requests = [TimedRequest(0.0, [1, 2], 3, client="a"), TimedRequest(0.5, [1, 2], 3)]
    write_trace(Workload("two", requests), tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl").requests == requests


def test_older_requests_do_not_take_the_blocks_of_a_client_beyond_the_bound_of_shares():
    rng = random.Random(8)
    limits = {"max_num_batched_tokens": 25, "max_num_partial_prefills": 1, "long_prefill_token_threshold": 1}
    scheduler = make_scheduler(block_size=1, num_kv_blocks=17, max_model_len=16, max_num_seqs=8, **limits)
    arrival, gaps = 0, []
    while not arrival or any(sequence.client == "a" for sequence in scheduler.waiting):
        while arrival < 60 or sum(sequence.client == "b" for sequence in scheduler.waiting) < 2:
            client, longest, most = ("a", 10, 6) if arrival < 60 else ("b", 13, 16)
            tokens = [rng.randrange(8) for _ in range(rng.randint(1, longest))]
            scheduler.add(make_sequence(tokens, arrival=arrival, client=client, max_tokens=most, max_model_len=16))
            arrival += 1
        batch = scheduler.schedule()
        scheduler.update(batch, [1] * len(batch.sampling))
        gaps.append(scheduler.waiting.gap)
    assert scheduler.waiting.bound < max(gaps) < 1.5 * scheduler.waiting.bound
