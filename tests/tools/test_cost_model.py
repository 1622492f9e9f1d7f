"""The cost model: the work of a batch, and a fit that recovers the costs of the samples."""

import random
from dataclasses import astuple

import pytest

from nanovllm import EngineConfig
from nanovllm.features.costs.buckets import RowSizes
from nanovllm.features.costs.cost_model import CostModel, DeviceCost, HostCost, StepWork
from nanovllm.tools.simulate.cost_fit import StepSample, fit, non_negative_least_squares
from tests.support.scheduling import Loop, make_scheduler

TRUE = CostModel(
    HostCost(2e-5, 1e-6, 1e-5),
    DeviceCost(
        knee=32,
        fixed=10e-3,
        per_token_below=0.02e-3,
        per_token_above=0.2e-3,
        per_decode=0.05e-3,
        per_chunk=0.3e-3,
        per_context_token=4e-7,
        per_shared_context_token=1e-7,
        per_chunk_pair=5e-8,
        per_sample=0.03e-3,
        both=2e-3,
    ),
    HostCost(3e-5, 2e-6),
    HostCost(4e-5, 3e-6, 2e-5),
)


def random_work(r):
    num_decodes, num_chunks = r.choice([0, 1, 2, 4, 8, 16, 32, 64]), r.choice([0, 1, 1, 2, 4, 8])
    if num_decodes == num_chunks == 0:
        num_chunks = 1
    new = num_chunks * r.choice([8, 16, 32, 64, 128])
    context, chunk_context = num_decodes * r.randint(1, 2000), r.choice([0, 0, 1024, 4096])
    shared, num_samples = r.choice([0, 0, context // 2]), num_decodes + r.randint(0, num_chunks)
    return StepWork(
        num_decodes + new, num_decodes, num_chunks, context, shared, new * (chunk_context + 20), num_samples
    )


def random_works(seed, count):
    r = random.Random(seed)
    return [random_work(r) for _ in range(count)]


def sampled(works, noise=0.0, seed=0):
    r = random.Random(seed)

    def noisy(seconds):
        return seconds * (1.0 + r.gauss(0.0, noise))

    def sample(work):
        size = work.num_sequences, work.num_chunks
        seconds = (TRUE.schedule.seconds(*size), TRUE.launch.seconds(*size), TRUE.device.seconds(work),
                   TRUE.update.seconds(*size))  # fmt: skip
        return StepSample(work, *map(noisy, seconds))

    return [sample(work) for work in works]


def worst_error(fitted, works):
    return max(abs(fitted.device.seconds(work) / TRUE.device.seconds(work) - 1.0) for work in works)


def test_the_work_counts_tokens_sequences_context_pairs_and_samples():
    loop = Loop(make_scheduler(max_num_batched_tokens=16))
    loop.add(range(6), max_tokens=9)
    loop.add(range(100, 103), max_tokens=9)
    first = loop.step()
    loop.add(range(200, 220), max_tokens=9)
    second = loop.step()
    assert StepWork.from_batch(first, 4) == (9, 0, 2, 0, 0, 6 * 7 // 2 + 3 * 4 // 2, 2)
    # Two decodes read 7 and 4 tokens; 12 of the 20 prompt tokens fit in whole blocks of 4.
    assert StepWork.from_batch(second, 4) == (14, 2, 1, 11, 0, 12 * 13 // 2, 2)
    assert StepWork.from_batch(loop.step(), 4) == (10, 2, 1, 13, 0, 8 * 12 + 8 * 9 // 2, 3)


def test_the_work_counts_a_common_prefix_of_decodes_once():
    loop = Loop(make_scheduler(max_num_batched_tokens=200))
    for own in (range(100, 103), range(200, 205), range(300, 301)):
        loop.add([*range(17), *own], max_tokens=9)
    loop.add([*range(9), *range(400, 420)], max_tokens=9)  # shares two blocks of 4
    loop.add(range(500, 507), max_tokens=9)
    loop.step()
    # The first four share 8 tokens, the first three of them 8 more.
    contexts = [21, 23, 19, 30, 8]
    assert StepWork.from_batch(loop.step(), 4) == (5, 5, 0, sum(contexts) - 3 * 8, 3 * 8, 0, 5)


def test_the_work_counts_the_rows_that_a_gpu_computes():
    sizes = RowSizes(max_num_seqs=64, max_num_batched_tokens=256)
    loop = Loop(make_scheduler(max_num_batched_tokens=256, max_num_seqs=64))
    for first in range(0, 1800, 200):
        loop.add(range(first, first + 6), max_tokens=9)
    assert StepWork.from_batch(loop.step(), 4, sizes).num_tokens == 64  # 54 rows of chunks
    assert StepWork.from_batch(loop.step(), 4, sizes).num_tokens == 16  # 9 decodes
    loop.add(range(2000, 2060), max_tokens=9)
    mixed = loop.step()
    assert StepWork.from_batch(mixed, 4, sizes) == (128, 9, 1, 9 * 8, 0, 60 * 61 // 2, 10)  # 16 and 60 rows
    assert StepWork.from_batch(mixed, 4).num_tokens == 9 + 60


@pytest.mark.parametrize(
    "device, attention_backend, rounds",
    [("cuda", "flex", True), ("cuda:1", "flex", True), ("cuda", "sdpa", False), ("cpu", "flex", False),
     ("auto", "auto", False)],
)  # fmt: skip
def test_only_engines_that_lay_steps_out_for_graphs_round_up(device, attention_backend, rounds):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    sizes = RowSizes.from_config(EngineConfig(device=device, attention_backend=attention_backend, **limits))
    assert (sizes is not None) == rounds


@pytest.mark.full
def test_what_taking_a_request_in_costs_is_fitted_by_its_prompt():
    works = [random_work(random.Random(1)) for _ in range(20)]
    intakes = [(size, 5e-5 + 2e-7 * size) for size in (1, 10, 100, 1000)]
    intake = fit(sampled(works), intakes, launch_blocks=True).intake
    assert (intake.fixed, intake.per_token) == pytest.approx((5e-5, 2e-7))
    assert fit(sampled(works), launch_blocks=True).intake.seconds(1000) == 0.0


@pytest.mark.full
@pytest.mark.parametrize("launch_blocks", [False, True])
def test_without_noise_the_fit_is_exact(launch_blocks):
    works = random_works(1, 80)
    fitted = fit(sampled(works), launch_blocks=launch_blocks)
    launch = (0.0, 0.0, 0.0) if launch_blocks else (4e-5, 3e-6, 2e-5)
    assert astuple(fitted.launch) == pytest.approx(launch)
    assert fitted.device.coefficients == pytest.approx(TRUE.device.coefficients, rel=1e-6)
    assert fitted.device.knee == TRUE.device.knee
    assert astuple(fitted.schedule) == pytest.approx((2e-5, 1e-6, 1e-5))
    assert astuple(fitted.update) == pytest.approx((3e-5, 2e-6, 0.0), abs=1e-12)


@pytest.mark.full
def test_where_nothing_was_shared_shared_context_costs_as_much_as_any():
    works = [work._replace(num_shared_context_tokens=0) for work in random_works(1, 80)]
    fitted = fit(sampled(works), launch_blocks=True).device
    assert fitted.per_shared_context_token == fitted.per_context_token == pytest.approx(4e-7, rel=1e-6)


@pytest.mark.full
def test_with_noise_the_fit_predicts_steps_that_it_has_not_seen():
    works = random_works(2, 400)
    fitted = fit(sampled(works[:200], noise=0.05), launch_blocks=True)
    assert worst_error(fitted, works[200:]) < 0.06
    assert fitted.device.fixed == pytest.approx(TRUE.device.fixed, rel=0.1)
    assert fitted.device.per_context_token == pytest.approx(TRUE.device.per_context_token, rel=0.1)


def test_small_steps_weigh_as_much_as_large_ones():
    # One large step is 30 % off; in absolute terms it would outweigh all the small ones.
    r = random.Random(3)
    works = [StepWork(n, n, 0, n * 100, 0, 0, n) for n in (1, 2, 3, 4) for _ in range(10)]
    samples = sampled(works, noise=0.01)
    large = StepWork(4096, 0, 1, 0, 0, 4096 * 2048, 1)
    samples.append(StepSample(large, 1e-5, 1e-5, 1.3 * TRUE.device.seconds(large), 1e-5))
    fitted = fit(samples, launch_blocks=True)
    assert worst_error(fitted, r.sample(works, 10)) < 0.02


@pytest.mark.full
def test_steps_that_the_launch_computed_do_not_draw_the_fit():
    # Launched without a CUDA graph, a few steps took long to launch and no time behind that.
    works = random_works(5, 200)
    samples = sampled(works, noise=0.01)
    for index in range(0, 200, 20):
        samples[index] = samples[index]._replace(launch_time=4 * samples[index].device_time, device_time=1e-5)
    assert worst_error(fit(samples, launch_blocks=False), works) < 0.05


def test_no_coefficient_is_ever_negative():
    # Unconstrained, the second column would get -1.
    coefficients, error = non_negative_least_squares([(1, 0), (1, 0.5), (1, 0.9)], [1.0, 0.5, 0.1])
    assert coefficients[1] == 0.0
    assert coefficients[0] > 0.0
    assert error > 0.0


def test_the_least_squares_minimum_is_no_worse_than_points_around_it():
    r = random.Random(4)
    rows = [[r.random() for _ in range(4)] for _ in range(30)]
    targets = [r.uniform(0.5, 1.5) for _ in rows]

    def error_at(coefficients):
        predicted = [sum(c * x for c, x in zip(coefficients, row, strict=True)) for row in rows]
        return sum((p / t - 1.0) ** 2 for p, t in zip(predicted, targets, strict=True))

    best, error = non_negative_least_squares(rows, targets)
    assert error == pytest.approx(error_at(best))
    for _ in range(300):
        assert error_at([max(0.0, c + r.gauss(0.0, 0.05)) for c in best]) >= error - 1e-12


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="3 measured steps are too few"):
        fit(sampled([StepWork(1, 1, 0, 1, 0, 0, 1)] * 3), launch_blocks=True)
