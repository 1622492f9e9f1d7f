"""Sampling on a GPU: the kernels against float64 and against the forms in torch, by themselves and within graphs."""

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.device import find_kernel
from nanovllm.fast.fast_draws import fast_sampler
from nanovllm.fast.gpu.head_extras import HeadExtras
from nanovllm.features.costs.buckets import HeadShape
from nanovllm.features.logprobs.logprobs import MOST_BY_KERNEL, Measured, StepLogprobs
from nanovllm.features.penalties.penalties import LatestTokens, change_logits
from nanovllm.features.request_options import RequestOptions
from nanovllm.sampler import DrawInputs, DrawTensors, draw
from nanovllm.sequence import NewRequest, Sequence

# By name, since their files need Triton, and this one is read where the tests are skipped too.
filter_floors = find_kernel("filter_floors", "filter_floors")
measure = find_kernel("logprobs", "measure")
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FILTERS = [
    {"top_k": 1}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.9999}, {"top_p": 1e-4}, {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.9}, {"top_k": 7, "top_p": 0.5, "min_p": 0.3}, {"top_k": 30_000, "top_p": 0.7},
    {"top_k": 10**9, "top_p": 0.3}, {"top_k": 40_000, "min_p": 0.001},
]  # fmt: skip


def request(seed=0, tokens=(1,), num_output=0, **params):
    new = NewRequest("r", list(tokens[: len(tokens) - num_output]), SamplingParams(**params))
    sequence = Sequence(new, arrival=0, max_model_len=100_000, seed=seed)
    sequence.token_ids.extend(tokens[len(tokens) - num_output :])
    return sequence


def inputs_of(requests):
    return DrawInputs.from_sequences(requests, [5] * len(requests)).to_device(CUDA)


def adversarial_rows(vocab_size, dtype):
    generator = torch.Generator("cuda").manual_seed(vocab_size)

    def normal(scale):
        return scale * torch.randn(vocab_size, generator=generator, device="cuda")

    uniform = torch.rand(vocab_size, generator=generator, device="cuda")
    zeros = torch.zeros(vocab_size, device="cuda")
    tiny = -12 - 0.01 * uniform
    tiny[vocab_size // 3] = 0.0
    one_hot = zeros.clone()
    one_hot[5] = 60.0
    last = torch.full_like(zeros, -torch.inf)
    last[-1] = 3.0
    biased = normal(0.6)
    biased[: vocab_size // 8] -= 100.0
    rows = [
        normal(2.0), normal(0.6), normal(12.0), zeros, zeros + 5, zeros - 7, one_hot, last, tiny, biased,
        (5 * uniform).floor(), normal(1.0).masked_fill(uniform < 0.9, -torch.inf), -100 * uniform - 3,
        normal(1.0) + 6e4 * (torch.arange(vocab_size, device="cuda") == 17),
    ]  # fmt: skip
    return torch.stack(rows).to(dtype)


def kept_by_float64(levels, params):
    """Which tokens of a row `transformers`' filters keep, all ties kept, and how near the mass comes to top_p."""
    is_kept, distance = levels > -torch.inf, 1.0
    if 0 < params.top_k < len(levels):
        is_kept &= levels >= levels.topk(params.top_k).values[-1]
    if params.top_p < 1:
        ordered = levels[is_kept].sort(descending=True).values
        masses = ordered.double().exp()
        reached = masses.cumsum(0) / masses.sum()
        top_p = float(np.float32(params.top_p))
        distance = float((reached - top_p).abs().min())
        is_kept &= levels >= ordered[min(int((reached < top_p).sum()), len(ordered) - 1)]
    if params.min_p > 0:
        is_kept &= levels >= torch.tensor(params.min_p, device="cuda").log()
    return is_kept, distance


def levels_of(logits, inputs):
    return (logits.float() - logits.float().amax(dim=-1, keepdim=True)) * inputs.inverse_temperatures[:, None]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [512, 50_257, 151_936])
def test_floors_keep_what_exact_filters_keep_on_adversarial_rows(vocab_size, dtype, options):
    logits = adversarial_rows(vocab_size, dtype)
    for temperature in (1.0, 0.6, 1.7):
        requests = [request(temperature=temperature, **options)] * len(logits)
        inputs = inputs_of(requests)
        offsets, floors = filter_floors(logits, inputs)
        levels = levels_of(logits, inputs)
        assert torch.equal(offsets, logits.float().amax(dim=-1))
        for row, floor in enumerate(floors.tolist()):
            expected, distance = kept_by_float64(levels[row], requests[0].params)
            kept = (levels[row] >= floor) & (levels[row] > -torch.inf)
            if distance > 4e-6:  # else rounding decides whether the mass has reached top_p
                assert torch.equal(kept, expected), (row, temperature, int(kept.sum()), int(expected.sum()))


@pytest.mark.parametrize("count", [1, 3000])
def test_a_nucleus_that_ends_exactly_on_top_p_has_no_token_more(count):
    near = torch.tensor([0.0, -1e-9], device=CUDA).repeat_interleave(count)  # e^-1e-9 is 1 in float32
    logits = torch.cat([near, torch.full((5,), -torch.inf, device=CUDA)])[None]
    for top_p, kept in ((0.5, count), (0.50001, 2 * count)):
        floor = filter_floors(logits, inputs_of([request(top_p=top_p)]))[1]
        assert int((logits >= floor[:, None]).sum()) == kept


def test_a_row_has_the_same_floor_in_every_batch():
    logits = adversarial_rows(151_936, torch.bfloat16)
    inputs = inputs_of([request(**FILTERS[row % len(FILTERS)]) for row in range(len(logits))])
    together = filter_floors(logits, inputs)[1]
    order = torch.randperm(len(logits), device="cuda")
    assert torch.equal(filter_floors(logits[order], DrawTensors(*(i[order] for i in inputs)))[1], together[order])
    crowd = torch.arange(300, device="cuda") % len(logits)
    assert torch.equal(filter_floors(logits[crowd], DrawTensors(*(i[crowd] for i in inputs)))[1], together[crowd])
    for row in range(len(logits)):
        alone = filter_floors(logits[row : row + 1], DrawTensors(*(i[row : row + 1] for i in inputs)))[1]
        assert torch.equal(alone, together[row : row + 1])


def mixed_requests(count):
    ways = [{}, {"temperature": 0.0}, {"temperature": 1e-3}, {"temperature": 0.7, "top_p": 0.9}, *FILTERS]
    return [request(seed, **ways[seed % len(ways)]) for seed in range(count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [512, 50_257, 151_936])
def test_the_kernels_draw_what_the_form_in_torch_draws(vocab_size, dtype):
    """Where the two best scores are not so near that rounding decides."""
    logits = (4 * torch.randn(64, vocab_size, generator=torch.Generator("cuda").manual_seed(1), device="cuda")).to(
        dtype
    )
    requests = mixed_requests(len(logits))
    inputs = inputs_of(requests)
    sampler = fast_sampler(compiles=True, build_stage=RequestOptions)
    drawn, expected = sampler.draw(logits, inputs), draw(logits, inputs)
    assert (drawn != expected).sum() <= 1
    on_host = fast_sampler(build_stage=RequestOptions).sample(logits.cpu(), requests, [5] * len(requests))
    assert (drawn.cpu() != on_host).sum() <= 1
    assert torch.equal(sampler.sample(logits, requests, [5] * len(requests)), drawn)


@pytest.mark.parametrize("draws", [draw, None], ids=["torch", "kernels"])
def test_a_graph_of_the_draw_follows_its_inputs(draws):
    draws = draws or fast_sampler(compiles=True).draw
    logits = torch.randn(32, 5000, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    static = DrawTensors(*(torch.zeros_like(tensor) for tensor in inputs_of(mixed_requests(32))))
    draws(logits, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = draws(logits, static)
    graph.replay()
    assert torch.equal(logits.gather(1, output[:, None])[:, 0], logits.amax(dim=-1))  # rows of zeros are greedy
    for count in (32, 20, 32):
        inputs = inputs_of(mixed_requests(count)[::-1])
        for to, values in zip(static, inputs, strict=True):
            to.zero_()
            to[:count] = values
        graph.replay()
        assert torch.equal(output[:count], draws(logits[:count], inputs))


def test_rows_that_are_not_finite_give_no_token_behind_filters():
    logits = torch.randn(5, 20_000, device="cuda")
    logits[0, 7] = torch.nan
    logits[1, 500] = torch.inf
    logits[2] = -torch.inf
    logits[3, :19_999] = -torch.inf  # one token is left
    for options in FILTERS:
        drawn = fast_sampler(compiles=True).draw(logits, inputs_of([request(n, **options) for n in range(5)])).tolist()
        assert drawn[:3] == [-1] * 3 and drawn[3] == 19_999 and drawn[4] >= 0


@pytest.mark.parametrize("num_top", [0, 1, 5, MOST_BY_KERNEL])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [100, 50_257, 151_936])
def test_log_probabilities_are_those_of_float64(vocab_size, dtype, num_top):
    logits = torch.cat([adversarial_rows(vocab_size, dtype)] * 5)
    generator = torch.Generator("cuda").manual_seed(0)
    token_ids = torch.randint(-1, vocab_size + 3, (len(logits),), generator=generator, device="cuda")
    ids, logprobs, ranks = measure(logits, token_ids, num_top)
    exact = logits.double().log_softmax(dim=-1)
    chosen = token_ids.clamp(min=0)
    without = chosen >= vocab_size
    of_chosen = exact.gather(1, chosen.clamp(max=vocab_size - 1)[:, None])[:, 0].masked_fill(without, -torch.inf)
    assert torch.equal(ids[:, 0], chosen)
    torch.testing.assert_close(logprobs[:, 0].double(), of_chosen, atol=2e-5, rtol=1e-6)
    assert torch.equal(ranks, (exact > of_chosen[:, None]).sum(dim=-1) + 1)
    top = logits.double().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids[:, 1:], top.indices[:, :num_top])
    torch.testing.assert_close(logprobs[:, 1:].double(), exact.gather(1, ids[:, 1:]), atol=2e-5, rtol=1e-6)
    measured = Measured.from_logits(logits, token_ids, num_top)
    assert torch.equal(measured.logprobs, logprobs) and torch.equal(measured.ranks, ranks)


def test_penalties_and_allowed_tokens_equal_those_of_the_host():
    rng = np.random.default_rng(0)
    vocab_size, requests, positions, latest = 3000, [], [], []
    options = [
        {"repetition_penalty": 1.3}, {"frequency_penalty": 0.4}, {"presence_penalty": -0.7}, {},
        {"repetition_penalty": 0.6, "frequency_penalty": -0.2, "presence_penalty": 1.1},
        {"allowed_token_ids": [3, 9, 2999], "presence_penalty": 0.5}, {"allowed_token_ids": list(range(7, 2000, 3))},
        {"logit_bias": {5: 3.0, 7: -100.0}, "repetition_penalty": 1.1},
    ]  # fmt: skip
    previous = torch.from_numpy(rng.integers(0, vocab_size, 40))
    for number in range(40):
        tokens = tuple(rng.integers(0, 60 if number % 2 else vocab_size + 50, rng.integers(1, 5000)).tolist())
        num_output = int(rng.integers(0, len(tokens)))
        tokens = tokens[: len(tokens) - num_output] + tuple(t % vocab_size for t in tokens[len(tokens) - num_output :])
        requests.append(request(number, tokens, num_output, **options[number % len(options)]))
        is_in_flight = number % 3 == 0
        positions.append(len(tokens) + is_in_flight)
        latest.append(-1 - number if is_in_flight else tokens[-1])
    logits = 3 * torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[6, 100] = torch.nan
    latest = np.array(latest)
    for dtype in (torch.float32, torch.bfloat16):
        expected = change_logits(logits.to(dtype, copy=True), requests, positions, LatestTokens(latest, previous))
        given = logits.to(dtype).cuda()
        ours = change_logits(given, requests, positions, LatestTokens(latest, previous.cuda()))
        torch.testing.assert_close(ours.cpu(), expected, atol=1e-6, rtol=1e-6, equal_nan=True)
    expected = change_logits(logits.clone(), requests, [len(r.token_ids) for r in requests], None)
    ours = change_logits(logits.cuda(), requests, [len(r.token_ids) for r in requests], None)
    torch.testing.assert_close(ours.cpu(), expected, atol=1e-6, rtol=1e-6, equal_nan=True)


def test_penalties_and_log_probabilities_of_a_head_equal_those_of_the_host():
    rng, vocab_size, count = np.random.default_rng(0), 3000, 11
    options = [
        {"repetition_penalty": 1.3, "logprobs": 2}, {}, {"frequency_penalty": 0.4}, {"presence_penalty": -0.7},
    ]  # fmt: skip
    requests = []
    for n in range(count):
        tokens = tuple(rng.integers(0, 60, rng.integers(30, 5000)).tolist())
        requests.append(request(n, tokens, 20, **options[n % len(options)]))
    positions = [len(own.token_ids) + n % 2 for n, own in enumerate(requests)]
    latest = LatestTokens(np.array([-1 - n if n % 2 else 5 for n in range(count)]), torch.arange(40) * 7)
    extras = HeadExtras(32, CUDA)
    needed = extras.needed(requests, positions)
    assert needed is not None and needed.penalises and needed.num_top == 5
    head = HeadShape(16, True, False, *needed)
    assert extras.upload(head, requests, positions, lambda: latest, {})
    assert not extras.upload(head, requests, positions, lambda: latest, {}), "the buffer is large enough"
    logits = 3 * torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        given = logits.to(dtype).cuda()
        ours = extras.penalised(given, latest.previous.cuda())
        expected = change_logits(logits[:count].to(dtype, copy=True), requests, positions, latest)
        torch.testing.assert_close(ours[:count].cpu(), expected, atol=1e-6, rtol=1e-6)
        assert torch.equal(ours[count:], given[count:].float()) and torch.equal(given.cpu(), logits.to(dtype))
        extras.measure(given, torch.arange(16, device=CUDA), 5)
        ours = extras.measured(head, count).to_host()
        torch.cuda.synchronize()
        expected = Measured.from_logits(given[:count].cpu(), torch.arange(count), 5)
        assert torch.equal(ours.token_ids[:, 0], expected.token_ids[:, 0])
        torch.testing.assert_close(ours.logprobs, expected.logprobs, atol=2e-5, rtol=1e-5)
        assert torch.equal(ours.ranks, expected.ranks)


@pytest.mark.parametrize("compiles", [True, False], ids=["kernels", "torch"])
def test_no_option_makes_the_host_wait(compiles):
    """Torch raises for every operation that would."""
    options = [
        {}, {"temperature": 0.0}, {"temperature": 1e-3}, *FILTERS, {"logprobs": 0}, {"logprobs": 20, "top_p": 0.9},
        {"logprobs": 40}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.4, "logprobs": 1},
        {"allowed_token_ids": [3, 9, 2999]}, {"logit_bias": {5: 3.0}}, {"min_tokens": 9, "stop_token_ids": [4]},
    ]  # fmt: skip
    requests = [request(n, (1, 2, 3), 1, **own) for n, own in enumerate(options)]
    sampler = fast_sampler(compiles=compiles, build_stage=RequestOptions)
    latest = LatestTokens(-1 - np.arange(len(options)), torch.arange(50).cuda())
    logits = torch.randn(len(options), 3000, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16()

    def sample():
        report = StepLogprobs()
        return sampler.sample(logits.clone(), requests, [4] * len(requests), latest, report), report.to_host()

    expected, _ = sample()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens, report = sample()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens, expected)
    report.record(requests, tokens.tolist())
    for own in requests:
        if own.logprobs is not None:
            assert len(own.logprobs) == 1 and len(own.logprobs[0]) in (own.params.logprobs, own.params.logprobs + 1)
