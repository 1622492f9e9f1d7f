"""`nanovllm tune`: the settings that are tried, and shares of a workload."""

from collections import Counter

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.outputs import RequestMetrics
from nanovllm.tools.tune.goals import Goal, RequestGoals, itl_goals_to_try
from nanovllm.tools.tune.settings import SWEPT, Resolver, sample, values_to_try
from nanovllm.tools.tune.shares import smallest_share, take_share
from nanovllm.tools.workloads.workloads import bursty, chat, poisson, random_requests, whales

# ------------------------------------------------------------------------------------------------------------- settings

RESOLVER = Resolver("cpu", {})
WIDE = values_to_try("cpu", {}, longest_prompt=5000, most_at_once=1000, wide=True)
UNSET = {name: [None] for name in SWEPT}


def test_the_first_setting_is_the_engines_defaults():
    values = values_to_try("cpu", {}, longest_prompt=10, most_at_once=10, wide=False)
    assert values["max_num_seqs"] == [16]  # chosen, not set by the user
    first = RESOLVER.candidates(values).settings[0]
    assert first.options == {
        "max_num_batched_tokens": 1024, "max_num_seqs": 64, "block_size": 64, "max_num_partial_prefills": 4,
        "max_long_partial_prefills": 1, "long_prefill_token_threshold": 512,
    }  # fmt: skip
    pinned = RESOLVER.candidates({**values, "block_size": [32]}, ["block_size"]).settings[0]
    assert pinned.options["block_size"] == 32 and pinned.options["max_num_batched_tokens"] == 1024


def test_equivalent_combinations_are_one_setting_and_contradictions_are_reported():
    values = UNSET | {
        "max_num_batched_tokens": [128, 1024], "max_num_seqs": [64, 128], "max_num_partial_prefills": [None, 4],
    }  # fmt: skip
    candidates = RESOLVER.candidates(values)
    # 128 with 64 sequences leaves 64 for a block; 128 with 128 leaves none. None and 4 are the same.
    assert [of.values[:3] for of in candidates.settings] == [(1024, 64, 64), (128, 64, 64), (1024, 128, 64)]
    ((options, why),) = candidates.refused
    assert options == {"max_num_batched_tokens": 128, "max_num_seqs": 128}
    assert "max_num_batched_tokens is 128, but" in why


def test_values_that_cannot_differ_are_not_tried():
    def tried(**about):
        return values_to_try("cpu", {}, **({"longest_prompt": 100, "most_at_once": 500, "wide": False} | about))

    assert tried()["max_num_seqs"] == [16, 32, 64, 128]
    assert tried(most_at_once=20)["max_num_seqs"] == [16, 32]  # 64 can never run
    assert tried(most_at_once=4)["max_num_seqs"] == [16]
    assert tried()["max_num_partial_prefills"] == (None,)
    assert 16 in tried(longest_prompt=200)["max_num_partial_prefills"]  # more than half of a budget of 256
    assert max(tried(wide=True)["max_num_batched_tokens"]) == 4096


def test_limits_of_partial_prefills_are_tried_by_the_budgets_that_are_named():
    def partial(*budgets):
        named = {"max_num_batched_tokens": budgets}
        values = values_to_try("cpu", named, longest_prompt=200, most_at_once=9, wide=False)
        return values["max_num_partial_prefills"]

    assert partial(4096, 8192) == (None,)  # 200 tokens are no long prompt there
    assert partial(8192, 399) == (None, 16)


@hypothesis.settings(deadline=None)
@given(st.integers(16, 5000), st.integers(1, 300), st.sampled_from([16, 32, 64]), st.integers(1, 9), st.integers(1, 9))
def test_the_flags_of_a_setting_make_that_setting(budget, num_seqs, block_size, partial, long):
    options = {"max_num_batched_tokens": budget, "max_num_seqs": num_seqs, "block_size": block_size}
    options |= {"max_num_partial_prefills": partial, "max_long_partial_prefills": long}
    try:
        made = RESOLVER.resolve(options)
    except ValueError:
        return
    words = RESOLVER.flags(made).split()
    reported = {flag[2:].replace("-", "_"): int(value) for flag, value in zip(words[::2], words[1::2], strict=True)}
    assert RESOLVER.resolve(reported) == made


def test_a_sample_holds_the_first_and_every_value_about_equally_often():
    settings = RESOLVER.candidates(WIDE).settings
    taken = sample(settings, 36)
    assert taken[0] == settings[0] and len(set(taken)) == 36 and set(taken) <= set(settings)
    for index, name in enumerate(SWEPT[:3]):
        counts = Counter(of.values[index] for of in taken)
        assert set(counts) == {of.values[index] for of in settings}, name
        assert max(counts.values()) - min(counts.values()) <= 3, (name, counts)
    assert sample(settings, 10**6)[1:] != settings[1:] and set(sample(settings, 10**6)) == set(settings)
    assert taken == sample(settings, 36)


def test_a_goal_stands_for_every_budget_and_meets_the_other_values():
    values = UNSET | {"max_num_batched_tokens": [256, 512], "max_num_seqs": [32, 64]}
    settings = RESOLVER.candidates(values, itl_goals=[0.036]).settings
    assert [(of.values[:2], of.itl_goal) for of in settings] == [
        ((1024, 64), None), ((256, 32), None), ((256, 64), None), ((512, 32), None), ((512, 64), None),
        ((1024, 64), 0.036), ((1024, 32), 0.036),
    ]  # fmt: skip
    pinned = RESOLVER.candidates(values | {"max_num_batched_tokens": [512]}, SWEPT[:1], [0.036]).settings
    assert {of.values[0] for of in pinned} == {512}
    flags = "--max-num-batched-tokens 1024 --max-num-seqs 64 --block-size 64 --itl-goal 36ms"
    assert RESOLVER.flags(settings[5]) == flags and "itl_goal" not in settings[0].options
    assert RESOLVER.varying(settings) == ["max_num_batched_tokens", "max_num_seqs", "itl_goal"]


def test_a_quarter_of_a_sample_has_a_goal():
    settings = RESOLVER.candidates(WIDE, itl_goals=[0.036]).settings
    for count, num_goals in ((16, 4), (8, 2), (2, 1), (1, 0)):
        taken = sample(settings, count)
        goals = [of for of in taken if of.itl_goal is not None]
        assert len(set(taken)) == count and len(goals) == num_goals and taken[0] == settings[0]
        assert not goals or goals[0].values == settings[0].values
    assert set(sample(settings, 10**6)) == set(settings)


def test_the_goal_to_try_follows_from_the_strictest_limit_on_a_tail():
    limits = [Goal("itl", "p99", 0.04), Goal("itl", "p90", 0.033), Goal("itl", "mean", 0.01), Goal("ttft", "p99", 0.01)]
    assert itl_goals_to_try(limits) == [0.03] and itl_goals_to_try(limits[:1]) == [0.036]
    assert itl_goals_to_try(limits[2:]) == [] and itl_goals_to_try([Goal("itl", "p99", 0.001)]) == []


# --------------------------------------------------------------------------------------------------------------- shares


def test_a_share_of_requests_over_time_is_their_beginning_at_the_same_rate():
    whole = poisson(random_requests(requests=40, prompt=4), 5.0)
    share = take_share(whole, 0.25)
    assert share.requests == whole.requests[:10]
    assert take_share(whole, 1.0) is whole
    assert smallest_share(whole, max_num_seqs=500) == 8 / 40


def test_whales_stay_among_those_that_decode():
    share = take_share(whales(decoding=8, whales=4, prompt=2, whale_prompt=50, scale=1.0), 0.5)
    assert [(request.arrival, len(request.prompt_token_ids)) for request in share.requests] == [(0, 2)] * 4 + [
        (5, 50)
    ] * 2


def test_conversations_come_as_a_whole():
    whole = chat(conversations=6, turns=3, system=0, user=2, answer=2)
    share = take_share(whole, 0.5)
    assert len(share.requests) == 9
    for request in share.requests[3:]:
        before = share.requests[request.after]
        assert request.prompt_token_ids[: len(before.prompt_token_ids)] == before.prompt_token_ids
    bursts = take_share(bursty(whole, 3.0, burst=1), 0.5)
    assert [request.after for request in bursts.requests] == [None] * 3 + [0, 1, 2, 3, 4, 5]


def test_a_share_of_requests_at_once_can_fill_the_engine():
    workload = random_requests(requests=64, prompt=4)
    assert smallest_share(workload, max_num_seqs=16) == 0.25
    assert len(take_share(workload, smallest_share(workload, max_num_seqs=48)).requests) == 48
    assert smallest_share(workload, max_num_seqs=128) == 1.0


def test_goals_of_a_request_count_those_that_keep_all_of_them():
    requests = [
        RequestMetrics(0.0, first_token_time=ttft, max_itl=slowest)
        for ttft, slowest in ((0.5, 0.01), (2.0, 0.01), (0.5, 0.05), (1.0, None))
    ]
    goals = RequestGoals(ttft=1.0, itl=0.03)
    assert goals.figures(requests, 4.0) == {"ttft": 1.0, "itl": 0.03, "share": 0.5, "requests_per_second": 0.5}
    assert RequestGoals(itl=0.03).figures(requests, 4.0)["share"] == 0.75
    assert str(goals) == "TTFT <= 1000 ms and each ITL <= 30 ms"
