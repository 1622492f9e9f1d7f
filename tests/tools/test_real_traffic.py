"""Look-alikes of public traces: quantiles, bursts, shared prefixes, and what a scale, a rate and a seed change.

Expected figures are of the traces themselves: Azure's conversation and code traces of 2023, Mooncake's conversations.
"""

import numpy as np
import pytest

from nanovllm.tools.workloads.real_traffic import draw_arrivals
from nanovllm.tools.workloads.specs import build
from nanovllm.tools.workloads.trace_statistics import PERCENTILES, TRACES

AT = (10, 25, 50, 75, 90, 95, 99)
PROMPTS = {
    "azure-conv": (207, 396, 1020, 1189, 2734, 4083, 4142),
    "azure-code": (147, 578, 1469, 2744, 5187, 7303, 7436),
    "mooncake": (964, 2306, 6909, 15367, 27367, 39550, 85400),
}
OUTPUTS = {
    "azure-conv": (54, 85, 129, 395, 424, 451, 601),
    "azure-code": (7, 9, 13, 24, 55, 90, 251),
    "mooncake": (24, 156, 350, 472, 597, 698, 1118),
}
COUNTS = {"azure-conv": 19_366, "azure-code": 8_819, "mooncake": 12_031}
MEANS = {"azure-conv": (1155, 211), "azure-code": (2048, 28), "mooncake": (12_035, 343)}
# Index of dispersion, variance over mean, of counts in 1, 10 and 60 s. Mooncake's times come in steps of 3 s; spread
# evenly over a step, its counts in 1 s have no dispersion of their own.
DISPERSIONS = {"azure-conv": (1.39, 3.86, 16.1), "azure-code": (13.2, 71.6, 164.0), "mooncake": (None, 1.36, 2.87)}
BLOCK = 512


def lengths(workload):
    return [len(r.prompt_token_ids) for r in workload.requests], [r.num_output_tokens for r in workload.requests]


def dispersion(times, window):
    counts = np.histogram(times, bins=np.arange(0.0, times[-1], window))[0]
    return float(counts.var() / counts.mean())


def shared_blocks(workload, block):
    """Blocks of each prompt that an earlier one had, from its first on, and all of its blocks."""
    seen = set()
    found = []
    for request in workload.requests:
        tokens = np.array(request.prompt_token_ids, np.uint8)
        whole = [tokens[: end + block].tobytes() for end in range(0, len(tokens) - block + 1, block)]
        found.append((sum(prefix in seen for prefix in whole), -(-len(tokens) // block)))
        seen.update(whole)
    return found


@pytest.fixture(scope="module", params=COUNTS)
def drawn(request):
    """As many requests as the trace has; of mooncake's, whose prompts are long, a third."""
    count = COUNTS[request.param] // (3 if request.param == "mooncake" else 1)
    return request.param, build(f"{request.param}:requests={count},seed=1")


@pytest.mark.costly
def test_lengths_have_the_quantiles_and_the_means_of_the_trace(drawn):
    name, workload = drawn
    prompts, outputs = lengths(workload)
    assert np.percentile(prompts, AT[:5]) == pytest.approx(PROMPTS[name][:5], rel=0.15)
    tails = 0.3 if name == "mooncake" else 0.15  # a few long conversations make its tails
    assert np.percentile(prompts, AT[5:]) == pytest.approx(PROMPTS[name][5:], rel=tails)
    assert np.percentile(outputs, AT) == pytest.approx(OUTPUTS[name], rel=0.15)
    assert (np.mean(prompts), np.mean(outputs)) == pytest.approx(MEANS[name], rel=tails / 2 if tails > 0.15 else 0.1)


def test_outputs_depend_on_prompts_as_in_the_trace():
    prompts, outputs = map(np.array, lengths(build("azure-conv:requests=10000")))
    tenths = np.searchsorted(np.percentile(prompts, range(10, 100, 10)), prompts)
    means = [outputs[tenths == tenth].mean() for tenth in range(10)]
    assert means == pytest.approx([152, 85, 100, 106, 325, 412, 413, 338, 117, 74], rel=0.1)


@pytest.mark.parametrize("name", TRACES)
def test_arrivals_are_as_bursty_as_in_the_trace(name):
    trace = TRACES[name]
    runs = [draw_arrivals(trace.arrivals, COUNTS[name], trace.rate, np.random.default_rng(seed)) for seed in range(12)]
    for window, expected in zip((1, 10, 60), DISPERSIONS[name], strict=True):
        if expected is not None:
            assert np.mean([dispersion(times, window) for times in runs]) == pytest.approx(expected, rel=0.15)
    assert all((np.diff(times) >= 0.0).all() and times[0] >= 0.0 for times in runs)


@pytest.mark.full
def test_mooncakes_prompts_share_as_many_blocks_as_in_the_trace():
    rates, continued = [], []
    for seed in range(3):
        found = shared_blocks(build(f"mooncake:requests=192000,scale=0.03125,seed={seed}"), 16)
        assert all(shared >= 1 for shared, _ in found[1:])  # the block that begins all prompts
        rates.append(sum(shared for shared, _ in found) / sum(blocks for _, blocks in found))
        continued.append(np.mean([shared > 1 for shared, _ in found]))
    assert np.mean(rates) == pytest.approx(0.366, rel=0.1)
    assert np.mean(continued) == pytest.approx(0.387, rel=0.1)


@pytest.mark.parametrize("name", TRACES)
def test_prompts_share_nothing_but_declared_prefixes(name):
    workload = build(f"{name}:requests=300")
    beginning = BLOCK if TRACES[name].conversations else 0
    own = [tuple(r.prompt_token_ids[beginning : beginning + 16]) for r in workload.requests]
    own = [tokens for tokens in own if len(tokens) == 16]
    if TRACES[name].conversations is None:
        assert len(set(own)) == len(own)
    else:
        assert len({tuple(r.prompt_token_ids[:BLOCK]) for r in workload.requests}) == 1
        assert 0.5 * len(own) < len(set(own)) < 0.75 * len(own)
    assert all(17 <= token < 256 for r in workload.requests for token in r.prompt_token_ids)


@pytest.mark.parametrize("name", TRACES)
def test_a_rate_plays_the_same_requests_faster(name):
    own, fast = build(f"{name}:requests=50"), build(f"{name}:requests=50,rate={10 * TRACES[name].rate}")
    assert lengths(own) == lengths(fast)
    assert [r.arrival for r in own.requests] == pytest.approx([10 * r.arrival for r in fast.requests])
    assert own.requests[-1].arrival <= 50 / TRACES[name].rate


@pytest.mark.parametrize("name", TRACES)
def test_a_scale_multiplies_the_number_of_requests_and_their_lengths(name):
    whole, small = build(f"{name}:requests=200"), build(f"{name}:requests=1600,scale=0.125")
    assert len(small.requests) == 200
    for long, short in zip(whole.requests, small.requests, strict=True):
        assert len(short.prompt_token_ids) == pytest.approx(len(long.prompt_token_ids) / 8, abs=1)
        assert short.num_output_tokens == pytest.approx(max(1, long.num_output_tokens / 8), abs=1)


def test_a_scale_keeps_which_blocks_are_shared():
    whole, small = (build(f"mooncake:requests={count}") for count in ("100", "800,scale=0.125"))
    assert shared_blocks(whole, BLOCK) == shared_blocks(small, BLOCK // 8)


def test_every_table_rises_and_has_percentiles():
    for trace in TRACES.values():
        tables = [trace.prompts, *trace.outputs]
        if trace.conversations is not None:
            tables += [getattr(trace.conversations, name) for name in ("ages", "growths", "kept", "ratios")]
        for table in tables:
            assert len(table) in PERCENTILES and list(table) == sorted(table) and table[0] > 0
