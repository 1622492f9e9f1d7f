"""Workloads: content by seed, arrival times, and files."""

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from nanovllm.tools.workloads.files import read_trace, write_trace
from nanovllm.tools.workloads.specs import build, parse_spec
from nanovllm.tools.workloads.workloads import (
    WORKLOADS,
    TimedRequest,
    Workload,
    bursty,
    chat,
    p1,
    paced,
    poisson,
    random_requests,
    whales,
)
from tests.support.command_line import python
from tests.support.refusals import invalid
from tests.support.small_workloads import SMALL, digest

# ------------------------------------------------------------------------------------------------------- what they hold


@pytest.mark.parametrize(
    "name, begin",
    {
        "W": "f909854602a9f421",
        "P": "a8f986567fc60604",
        "single": "f042e5b39ee980bc",
        "W1": "199c6f016a1bff73",
        "W2": "417ee71235ad1ae0",
    }.items(),
)
def test_the_fixed_workloads_keep_their_tokens(name, begin):
    workload = WORKLOADS[name]()
    pair = [[r.prompt_token_ids for r in workload.requests], [r.num_output_tokens for r in workload.requests]]
    assert hashlib.sha256(json.dumps(pair).encode()).hexdigest().startswith(begin)
    assert not workload.is_timed


def test_p1_has_eight_system_prompts_of_2000_tokens_among_1024_requests():
    workload = p1()
    beginnings = {tuple(request.prompt_token_ids[:2000]) for request in workload.requests}
    assert len(workload.requests) == 1024 and len(beginnings) == 8
    assert {len(request.prompt_token_ids) for request in workload.requests} == {2064}
    assert len({tuple(request.prompt_token_ids) for request in workload.requests}) == 1024


def test_each_turn_of_a_chat_extends_the_last_and_waits_for_it():
    workload = chat(conversations=3, turns=4, system=10, user=(2, 5), answer=7)
    assert len(workload.requests) == 12
    beginning = workload.requests[0].prompt_token_ids[:10]
    for index, request in enumerate(workload.requests):
        assert request.prompt_token_ids[:10] == beginning
        if index < 3:
            assert request.after is None and request.arrival == 0.0
            continue
        last = workload.requests[request.after]
        grown = len(request.prompt_token_ids) - len(last.prompt_token_ids)
        assert request.after == index - 3 and request.arrival > 0.0
        assert request.prompt_token_ids[: len(last.prompt_token_ids)] == last.prompt_token_ids
        assert 7 + 2 <= grown <= 7 + 5


def test_thinking_takes_as_long_as_it_should_on_average():
    times = [r.arrival for r in chat(conversations=500, turns=5, user=1, answer=1, think=3.0).requests if r.after]
    assert np.mean(times) == pytest.approx(3.0, rel=0.1)


def test_whales_arrive_while_the_others_decode():
    workload = whales(scale=0.125, delay=2.0)
    small, long = workload.requests[:8], workload.requests[8:]
    assert {(r.arrival, len(r.prompt_token_ids), r.num_output_tokens) for r in small} == {(0.0, 64, 75)}
    assert [(r.arrival, len(r.prompt_token_ids)) for r in long] == [(2.0, 1024)]


def test_lengths_lie_between_their_ends_and_reach_both():
    workload = random_requests(requests=200, prompt=(5, 8), output=(1, 3), shared=4)
    assert {len(r.prompt_token_ids) for r in workload.requests} == {5, 6, 7, 8}
    assert {r.num_output_tokens for r in workload.requests} == {1, 2, 3}
    assert len({tuple(r.prompt_token_ids[:4]) for r in workload.requests}) == 1
    assert all(17 <= token < 10_000 for r in workload.requests for token in r.prompt_token_ids)


def test_scale_makes_everything_smaller():
    for text in ("random", "P1", "chat", "whales"):
        whole, small = build(text), build(f"{text}:scale=0.25")
        assert len(small.requests) == len(whole.requests) / 4
        assert small.num_prompt_tokens < whole.num_prompt_tokens / 8


# ---------------------------------------------------------------------------------------------------------------- seeds


def test_the_same_seed_gives_the_same_workload_in_every_process():
    script = (
        "from nanovllm.tools.workloads.specs import build\nfrom nanovllm.tools.workloads.workloads import poisson\n"
        "from tests.support.small_workloads import SMALL, digest\n"
        "print([digest(poisson(build(text, seed=3), 2.0, seed=3)) for text in SMALL])"
    )
    reported = set()
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        reported.add(python("-c", script, env=environment, check=True).stdout)
    assert reported == {f"{[digest(poisson(build(text, seed=3), 2.0, seed=3)) for text in SMALL]}\n"}


@pytest.mark.parametrize("text", SMALL)
def test_another_seed_gives_another_workload(text):
    assert digest(build(text, seed=1)) != digest(build(text, seed=2))
    assert digest(build(f"{text},seed=1", seed=2)) == digest(build(text, seed=1))


# ------------------------------------------------------------------------------------------------------------- arrivals


def gaps(workload):
    return np.diff([0.0, *(r.arrival for r in workload.requests if r.after is None)])


def test_own_arrivals_keep_their_pattern_at_another_rate():
    own = build("azure-code:requests=400")
    faster = paced(own, 10.0)
    assert faster.requests[-1].arrival == pytest.approx(40.0)
    before, after = gaps(own), gaps(faster)
    assert after / after.mean() == pytest.approx(before / before.mean()) and after.std() > 3.0 * after.mean()
    assert [request.prompt_token_ids for request in faster.requests] == [r.prompt_token_ids for r in own.requests]
    assert faster.parameters["rate"] == 10.0 and faster.parameters["arrivals"] == "own"
    followed = Workload("two turns", [TimedRequest(2.0, [17], 1), TimedRequest(3.0, [17], 1, after=0)])
    assert [request.arrival for request in paced(followed, 1.0).requests] == [1.0, 3.0]
    with invalid(r"all requests of W arrive at once"):
        paced(WORKLOADS["W"](), 1.0)


def test_poisson_arrivals_have_their_rate_and_exponential_gaps():
    of = gaps(poisson(random_requests(requests=4000, prompt=1, output=1), 5.0))
    assert (of >= 0).all()
    assert of.mean() == pytest.approx(0.2, rel=0.05)
    assert of.std() == pytest.approx(of.mean(), rel=0.1)  # an exponential distribution
    assert (of > 0.2).mean() == pytest.approx(np.exp(-1), abs=0.03)


def test_bursts_come_together_at_the_same_rate():
    workload = bursty(random_requests(requests=4001, prompt=1, output=1), 5.0, burst=4)
    times = [request.arrival for request in workload.requests]
    assert len(set(times)) == 1001 and times == sorted(times)
    assert times[3] == times[0] < times[4]
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)


def test_only_requests_that_follow_no_other_get_a_new_arrival():
    before = chat(conversations=4, turns=2, scale=0.1)
    after = poisson(before, 1.0)
    for old, new in zip(before.requests, after.requests, strict=True):
        assert (old.arrival == new.arrival) == (old.after is not None)
        assert old.prompt_token_ids == new.prompt_token_ids
    assert after.name.endswith("poisson 1/s") and after.parameters["rate"] == 1.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_cannot_be_is_refused(rate):
    with invalid("the rate is"):
        poisson(random_requests(requests=2), rate)


# ----------------------------------------------------------------------------------------------------------- from texts


def test_a_workloads_name_has_what_differs_from_the_defaults_and_its_parameters_have_all():
    workload = build("random:requests=5,prompt=3-9,output=64", seed=7)
    assert workload.name == "random:requests=5,prompt=3-9,seed=7"
    assert workload.parameters == {
        "workload": "random", "requests": 5, "prompt": (3, 9), "shared": 0, "output": 64, "vocab": 10_000,
        "scale": 1.0, "seed": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text, named",
    {
        "X": "no workload 'X'; there are W, P",
        "W:seed=1": "W has no parameter 'seed'; it takes none",
        "chat:turn=1": "no parameter 'turn'; it takes conversations, turns",
        "chat:turns": "'turns' in 'chat:turns' is not of the form",
        "chat:turns=0": "chat:turns is 0, which is too small",
        "chat:turns=1.5": "chat:turns is 1.5; it must be a whole number",
        "chat:turns=1-2": "chat:turns is 1-2; it must be a whole number.",
        "chat:user=9-2": "chat:user is 9-2; it must be a whole number or LOW-HIGH",
        "chat:think=x": "chat:think is x; it must be a number",
        "chat:scale=nan": "chat:scale is nan, which is too small",
        "chat:think=inf": "chat:think is inf, which is too large",
        "random:requests=True": "random:requests is True",
        "random:prompt=8,shared=9": "shared is 9, above the shortest prompt",
        "random:vocab=17": "vocab is 17",
        "azure-conv:rate=0": "azure-conv:rate is 0.0, which is too small",
        "azure-code:prompt=8": "no parameter 'prompt'; it takes requests, rate, scale, seed",
        "mooncake:requests=0": "mooncake:requests is 0, which is too small",
    }.items(),
)
def test_a_text_that_makes_no_sense_is_refused_by_name(text, named):
    with pytest.raises(ValueError) as error:
        build(text)
    assert named in str(error.value)


def test_values_of_a_text_are_read_as_what_they_are():
    name, values = parse_spec("vllm:a=1,b=0.5,c=True,d=None,e=../x-y/z,f=3-4")
    assert name == "vllm"
    assert values == {"a": 1, "b": 0.5, "c": True, "d": None, "e": "../x-y/z", "f": (3, 4)}


# ---------------------------------------------------------------------------------------------------------- trace files


def test_a_trace_file_gives_back_what_was_written(tmp_path):
    workload = poisson(chat(conversations=3, turns=2, scale=0.1), 2.0)
    special = TimedRequest(99.5, [1, 2], 3, priority=-2, cache_salt="tenant é")
    workload = Workload(workload.name, [*workload.requests, special], workload.parameters)
    write_trace(workload, tmp_path / "some.jsonl")
    again = read_trace(tmp_path / "some.jsonl")
    assert again.requests == workload.requests
    assert again.name == "some"


def test_text_in_a_trace_goes_through_the_tokenizer(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"prompt": "abc", "output_tokens": 2}\n\n{"prompt": [4], "output_tokens": 1, "after": 0}\n')
    requests = read_trace(path, tokenize=lambda text: [ord(letter) for letter in text]).requests
    assert requests == [TimedRequest(0.0, [97, 98, 99], 2), TimedRequest(0.0, [4], 1, after=0)]
    with invalid(r"text\.jsonl, line 1: the prompt is text"):
        read_trace(path)


GOOD = '{"arrival": 1, "prompt": [1], "output_tokens": 1}'


@pytest.mark.parametrize(
    "line, named",
    {
        "{": "not JSON",
        "[1, 2]": "a request must be a JSON object",
        '{"prompt": [1]}': "the field 'output_tokens' is missing",
        '{"prompt": [1], "output_tokens": 1, "max_tokens": 1}': "no field 'max_tokens'",
        '{"prompt": [1], "output_tokens": 0, "arrival": 1}': "output_tokens is 0",
        '{"prompt": [1], "output_tokens": true, "arrival": 1}': "output_tokens is True",
        '{"prompt": [], "output_tokens": 1}': "not empty",
        '{"prompt": [1.5], "output_tokens": 1}': "a list of token ids",
        '{"prompt": [-1], "output_tokens": 1}': "a list of token ids",
        '{"prompt": [1], "output_tokens": 1, "arrival": -1}': "arrival is -1",
        '{"prompt": [1], "output_tokens": 1, "arrival": NaN}': "arrival is nan",
        '{"prompt": [1], "output_tokens": 1, "arrival": 0.5}': "arrival 0.5 is before 1 of an earlier line",
        '{"prompt": [1], "output_tokens": 1, "after": 1}': "after is 1",
        '{"prompt": [1], "output_tokens": 1, "arrival": 1, "priority": "x"}': "priority is 'x'",
        '{"prompt": [1], "output_tokens": 1, "arrival": 1, "cache_salt": 3}': "cache_salt is 3",
    }.items(),
)
def test_a_bad_line_of_a_trace_is_refused_by_its_number(tmp_path, line, named):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(ValueError) as error:
        read_trace(path)
    assert "bad.jsonl, line 3: " in str(error.value) and named in str(error.value)


def test_the_example_of_the_documentation_can_be_read(tmp_path):
    docs = Path(__file__).parents[2].joinpath("docs/guide/benchmarking.md").read_text()
    path = tmp_path / "example.jsonl"
    path.write_text(docs.split("```json\n")[1].split("```")[0])
    requests = read_trace(path, tokenize=lambda text: [1] * len(text)).requests
    assert [(r.arrival, r.after, r.priority, r.cache_salt) for r in requests] == [
        (0.0, None, 0, ""), (1.5, None, -1, "a"), (2.0, 0, 0, ""),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ public traces


def test_mooncakes_trace_shares_the_prefixes_that_its_hashes_say(tmp_path):
    path = tmp_path / "conversation.jsonl"
    path.write_text(
        '{"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [46, 47, 49]}\n'
        '{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [46, 47, 48]}\n'
    )
    first, second = read_trace(path).requests
    assert (first.arrival, second.arrival, first.num_output_tokens, second.num_output_tokens) == (0.0, 3.0, 500, 7)
    assert (len(first.prompt_token_ids), len(second.prompt_token_ids)) == (1100, 1030)
    assert first.prompt_token_ids[:1024] == second.prompt_token_ids[:1024]
    assert first.prompt_token_ids[1024:1030] != second.prompt_token_ids[1024:]
    assert first.prompt_token_ids[:512] != first.prompt_token_ids[512:1024]
    assert {17 <= token < 256 for token in first.prompt_token_ids} == {True}  # in every vocabulary
    assert len(read_trace(path, first=1).requests) == 1


def test_azures_trace_has_prompts_of_their_own(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        "2024-05-10 00:00:00.009930+00:00,374,0\r\n"
    )
    first, second = read_trace(path).requests
    assert (len(first.prompt_token_ids), first.num_output_tokens, second.num_output_tokens) == (374, 44, 1)
    assert second.arrival == pytest.approx(175 * 86400 + 5 * 3600 + 44 * 60 + 13.32934, abs=1e-3)
    assert first.prompt_token_ids != second.prompt_token_ids


@pytest.mark.parametrize(
    "text, named",
    [
        ("\n", "holds no request"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n', "hash_ids has 1 entries"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n', "line 1: the field 'output_length' is missing"),
        ('{"timestamp": "now", "input_length": 5, "output_length": 1, "hash_ids": [1]}\n', "the arrival is 'now'"),
        ("TIMESTAMP,ContextTokens\n", "line 1: the columns are"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2: Invalid isoformat"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "in the column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,x\n", "line 2: GeneratedTokens is 'x'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,2\n", "line 2: ContextTokens is 0"),
    ],
)  # fmt: skip
def test_a_bad_line_of_a_public_trace_is_refused_by_its_number(tmp_path, text, named):
    path = tmp_path / "trace"
    path.write_text(text)
    with invalid(re.escape(named)):
        read_trace(path)
