"""How many drafts are verified: by what they bring, and what they cost beside so many decodes."""

from __future__ import annotations

import pytest

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.features.costs.buckets import RowSizes, runs_as_decodes
from nanovllm.features.costs.cost_model import DeviceCost, StepWork
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.features.speculation import costs as costs_of_drafts
from nanovllm.features.speculation.costs import draft_costs
from nanovllm.features.speculation.drafter import DraftRequest
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.features.speculation.lengths import Acceptance, DraftCosts, DraftLengths
from nanovllm.layout import build_layout
from nanovllm.observability.step_records import StepRecord
from tests.engine.blocks import make_sequence
from tests.support.llms import generate, open_llm
from tests.support.mock_drafts import KnownAnswers
from tests.support.sweeps import CALIBRATION

# Steps are bound by reading the weights up to 16 rows, and by arithmetic above.
COST = DeviceCost(16, fixed=10.0, per_token_below=0.01, per_token_above=1.0)


class Costs:
    tries, has_refused = None, False

    def __init__(self, cost: DeviceCost = COST) -> None:
        self.cost = cost

    def seconds(self, work: StepWork) -> float:
        return self.cost.seconds(work)

    def plain_seconds(self, work: StepWork) -> float:
        return self.seconds(work)

    def work(self, batch: ScheduledBatch) -> StepWork:
        return StepWork.from_batch(batch, 16)


def decodes(count: int) -> list[ScheduledSequence]:
    sequences = [make_sequence(range(20), arrival=arrival) for arrival in range(count)]
    return [ScheduledSequence(sequence, 19, 1, 1, [1, 2], 19) for sequence in sequences]


def trusted() -> Acceptance:
    return Acceptance(num_accepted=50.0)


def test_one_sequence_has_all_its_drafts_where_rows_are_free():
    assert DraftLengths(Costs(), 7).choose(decodes(1), [(trusted(), 7)], 63) == [7]


def test_many_sequences_have_none_where_rows_cost_as_much_as_they_bring():
    lengths = DraftLengths(Costs(), 7)
    assert lengths.choose(decodes(40), [(trusted(), 7)] * 40, 100) == [0] * 40
    assert not lengths.may_pay(decodes(40)) and lengths.may_pay(decodes(1))


def test_drafts_fill_the_rows_that_are_free():
    counts = DraftLengths(Costs(), 7).choose(decodes(8), [(trusted(), 7)] * 8, 100)
    assert sum(counts) == 8


def test_fewer_drafts_pay_where_the_rows_of_a_rejected_one_are_computed_again():
    dear, entries = DeviceCost(1, fixed=3.0, per_token_above=1.0), decodes(1)
    counts = []
    for are_repeated in (False, True):
        costs = Costs(dear)
        counts += DraftLengths(costs, 7, are_repeated=are_repeated).choose(entries, [(Acceptance(6.0, 1.0), 7)], 63)
    assert counts[0] > counts[1] > 0


def test_the_sequence_whose_drafts_are_accepted_has_most():
    bad, good = Acceptance(num_rejected=9.0), trusted()
    counts = DraftLengths(Costs(), 7).choose(decodes(8), [(bad, 7), (good, 7)], 100)
    assert counts[1] == 7 and counts[0] <= 1


def test_drafts_that_fail_are_fewer_and_come_back_after_a_while():
    lengths, acceptance = DraftLengths(Costs(), 7), Acceptance()
    expensive = DeviceCost(1, fixed=10.0, per_token_above=4.0)
    lengths.costs.seconds = expensive.seconds
    assert lengths.choose(decodes(1), [(acceptance, 7)], 63)[0] > 0
    for _ in range(12):
        lengths.note(acceptance, 3, 0)
    assert lengths.choose(decodes(1), [(acceptance, 7)], 63) == [0]
    chosen = [lengths.choose(decodes(1), [(acceptance, 7)], 63)[0] for _ in range(200)]
    assert chosen[-1] >= 0 and acceptance.num_rejected < 0.1


def test_there_are_never_more_than_room():
    assert DraftLengths(Costs(), 7).choose(decodes(2), [(trusted(), 7)] * 2, 5) in ([5, 0], [3, 2], [2, 3], [4, 1])
    assert DraftLengths(None, 7).choose(decodes(3), [(trusted(), 7)] * 3, 9) == [7, 2, 0]


def test_drafts_fill_the_rows_that_a_gpu_pads_to():
    """There drafts run as further decodes: each costs nothing up to the next captured size."""
    sizes = RowSizes(64, 256)
    lengths = DraftLengths(Costs(), 7, row_sizes=sizes)
    lengths.costs.seconds = DeviceCost(1, per_token_above=1.0).seconds
    lengths.costs.work = lambda batch: StepWork.from_batch(batch, 16, sizes)
    assert sizes.padded(5, 0) == (8, 8) and sum(lengths.choose(decodes(5), [(trusted(), 7)] * 5, 100)) == 3
    lengths.costs.seconds = DeviceCost(1, fixed=1.0).seconds
    assert sum(lengths.choose(decodes(30), [(trusted(), 7)] * 30, 4)) == 4
    assert lengths.may_pay(decodes(40)) and not lengths.may_pay(decodes(64)), "no step has more rows"


def test_the_work_of_a_run_on_a_gpu_is_that_of_decodes_with_common_blocks():
    single, run, chunk = decodes(3)
    run, chunk = (
        run._replace(num_new_tokens=4, num_samples=4),
        chunk._replace(start=0, num_new_tokens=16, num_samples=0),
    )
    batch = ScheduledBatch(0, (single, run, chunk), 1)
    sizes = RowSizes(64, 256)
    work = StepWork.from_batch(batch, 16, sizes)
    assert work == StepWork(sizes.padded(5, 16)[1], 5, 1, 20 + 23, 20 + 21 + 22, 16 * 17 // 2, 5)
    assert StepWork.from_batch(batch, 16) == StepWork(21, 1, 2, 20, 0, 20 + 21 + 22 + 23 + 16 * 17 // 2, 5)


def play(
    count: int,
    times: tuple[float, float, float],
    *,
    start: float,
    accepted: int,
    steps: int,
    busy: slice | None = None,
) -> tuple[list[bool], float]:
    """Which steps had drafts, and tokens per second.

    Args:
        times: of a step with drafts, of one without after it, and of one that runs ahead.
        start: predicted seconds of all of them at first.
        busy: steps that take three times as long.
    """
    entries, time, num_tokens = decodes(count), 0.0, 0
    costs = DraftCosts(EngineConfig(max_num_seqs=128, block_size=16, overlap=True), cost=DeviceCost(1, fixed=start))
    lengths = DraftLengths(costs, 7)
    states, last, drafted = [Acceptance() for _ in entries], 0, []
    slow = set(range(steps)[busy or slice(0)])
    for step_id in range(steps):
        counts = [0] * count
        if lengths.may_pay(entries):
            counts = lengths.choose(entries, [(state, 7) for state in states], 128 - count)
        drafts, plain, runs = Drafts(), [], []
        for entry, num_drafts in zip(entries, counts, strict=True):
            if num_drafts:
                drafts[entry.sequence] = [0] * num_drafts
                runs.append(entry._replace(num_new_tokens=1 + num_drafts, num_samples=1 + num_drafts))
            else:
                plain.append(entry)
        seconds = (times[0] if drafts else times[1] if last else times[2]) * (3.0 if step_id in slow else 1.0)
        ahead = 1e-4 if not drafts and not last else 0.0
        last = len(drafts)
        drafted.append(bool(drafts))
        record = StepRecord(
            step_id, time + seconds, time - ahead, count, count, 0, 0, count, 0, 16, 0.0, 0.0, seconds, 0.0, (),
        )  # fmt: skip
        costs.step_ended(record, ScheduledBatch(step_id, (*plain, *runs), len(plain), drafts=drafts))
        time += seconds
        for state, num_drafts in zip(states, counts, strict=True):
            if num_drafts:
                lengths.note(state, num_drafts, min(num_drafts, accepted))
            num_tokens += min(num_drafts, accepted) + 1
    return drafted, num_tokens / time


@pytest.mark.parametrize(("accepted", "pays"), [(3, False), (7, True)])
def test_steps_that_run_ahead_are_measured_although_drafts_looked_better(accepted, pays):
    drafted, rate = play(16, (5e-3, 4e-3, 1e-3), start=5e-3, accepted=accepted, steps=600)
    if pays:
        assert sum(drafted) > 560
    else:
        assert sum(drafted[200:]) < 30 and rate > 0.8 * 16 / 1e-3


@pytest.mark.parametrize(("start", "seconds", "busy"), [(4e-3, 2e-3, None), (2e-3, 3e-3, slice(500, 515))])
def test_drafts_come_back_after_they_looked_dear(start, seconds, busy):
    """At first, or while the machine was busy: all are accepted, and bring 8 tokens for the time of 2 or 3."""
    drafted, _ = play(4, (seconds, 1.5e-3, 1e-3), start=start, accepted=7, steps=1200, busy=busy)
    assert sum(drafted[-200:]) > 180


def test_a_run_as_decodes_has_the_same_rows_and_samples():
    single, run, chunk = decodes(3)
    run, chunk = (
        run._replace(num_new_tokens=4, num_samples=4),
        chunk._replace(start=0, num_new_tokens=16, num_samples=1),
    )
    for sequence in (single.sequence, run.sequence, chunk.sequence):
        sequence.token_ids.extend(range(50, 60))
    batch = ScheduledBatch(0, (single, run, chunk), 1)
    entries = [*runs_as_decodes(batch.entries)]
    assert [(e.start, e.num_new_tokens, e.num_samples) for e in entries] == [
        (19, 1, 1), (19, 1, 1), (20, 1, 1), (21, 1, 1), (22, 1, 1), (0, 16, 1),
    ]  # fmt: skip
    assert ScheduledBatch(0, tuple(entries), 5).sampling == batch.sampling
    one, other = build_layout(batch.entries, 16), build_layout(entries, 16, longest_first=True)
    assert other.num_decodes == 5
    for name in ("token_ids", "positions", "slot_mapping"):
        assert getattr(one, name)[one.sample_rows].tolist() == getattr(other, name)[other.sample_rows].tolist()
    assert one.sampled_positions.tolist() == other.sampled_positions.tolist()


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_an_engine_drafts_as_its_costs_say(seconds):
    prompt = [5, 6, 7, 8]
    with open_llm() as llm:
        wanted = llm.generate([prompt], use_tqdm=False)[0].outputs[0].token_ids
    with open_llm(speculation=KnownAnswers({tuple(prompt): [wanted]})) as llm:
        costs = Costs()
        costs.seconds = DeviceCost(1, fixed=1.0, per_token_above=seconds).seconds
        llm._engine.scheduler.proposer.lengths.costs = costs
        assert llm.generate([prompt], use_tqdm=False)[0].outputs[0].token_ids == wanted
        assert (llm.stats().speculation.num_drafts > 0) == (seconds == 0.0)


def test_costs_are_measured_at_the_start_and_corrected_by_steps(monkeypatch):
    monkeypatch.setattr(costs_of_drafts, "draft_costs", draft_costs)
    with open_llm(speculation="suffix") as llm:
        costs = llm._engine.scheduler.proposer.lengths.costs
        few, many = (costs.seconds(StepWork(rows, 0, 1, 0, 100 * rows, 0, rows)) for rows in (2, 64))
        assert 0.0 < few <= many
        before = costs.error
        generate(llm, [[5, 6, 7] * 10])
        assert before is None and costs.error is not None


def test_costs_of_a_calibration_are_taken_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(costs_of_drafts, "draft_costs", draft_costs)
    CALIBRATION.save(tmp_path / "costs.json")
    with open_llm(speculation="suffix", step_costs=str(tmp_path / "costs.json")) as llm:
        work = StepWork(8, 0, 1, 0, 100, 0, 8)
        expected = CALIBRATION.cost_model.step_cost(overlap=False).seconds(work)
        assert llm._engine.scheduler.proposer.lengths.costs.seconds(work) == pytest.approx(expected)


def test_steps_run_ahead_after_one_that_waited_for_few_in_vain():
    lengths, entries = DraftLengths(Costs(), 7), decodes(8)
    waits = []
    for _ in range(300):
        waits.append(lengths.may_pay(entries))
        if waits[-1]:
            lengths.note_step(1, 8, has_drafts=False)
    assert [step for step, is_waiting in enumerate(waits) if is_waiting] == [0, 2, 6, 14, 30, 62, 126, 190, 254]
    lengths = DraftLengths(Costs(), 7)
    lengths.note_step(4, 8, has_drafts=False)
    assert lengths.may_pay(entries), "most were asked, and each pauses by itself"
    for has_drafts in (False, False, True, False):
        lengths.note_step(1, 8, has_drafts=has_drafts)
    assert [lengths.may_pay(entries) for _ in range(2)] == [False, True], "drafts were found meanwhile"


def test_decodes_wait_for_those_with_drafts():
    """Two steps of a part of the decodes each read the weights, and none of them costs what is predicted."""
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with open_llm() as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    answers = {tuple(prompt): [tokens] for prompt, tokens in zip(prompts, wanted, strict=True)}

    def of_the_first(request: DraftRequest, drafts: list[int]) -> list[int]:
        return drafts[:2] if request.token_ids[0] == 5 else []

    with open_llm(speculation=KnownAnswers(answers, of_the_first), overlap=True) as llm:
        costs, batches = Costs(), []
        costs.seconds = DeviceCost(1, fixed=1.0).seconds
        llm._engine.scheduler.proposer.lengths.costs = costs
        schedule = llm._engine.scheduler.schedule
        llm._engine.scheduler.schedule = lambda: batches.append(schedule()) or batches[-1]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    drafted = [batch for batch in batches if batch is not None and batch.drafts]
    assert len(drafted) > 5 and all(len(batch.entries) == 3 for batch in drafted)


def test_no_prompt_runs_ahead_of_drafts():
    """A step of it alone would have no goal, though decodes wait for its end."""
    prompts = [[5, 6, 7, 8], [9, 10, 11], [20 + token % 7 for token in range(200)]]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with open_llm() as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    answers = {tuple(prompt): [tokens] for prompt, tokens in zip(prompts, wanted, strict=True)}
    with open_llm(speculation=KnownAnswers(answers), overlap=True, max_num_batched_tokens=80) as llm:
        engine = llm._engine
        schedule, ahead = engine.scheduler.schedule, []

        def watched() -> ScheduledBatch | None:
            has_drafts = any(batch.drafts for batch in engine.scheduler.in_flight)
            batch = schedule()
            ahead.append((has_drafts, batch))
            return batch

        engine.scheduler.schedule = watched
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert sum(has_drafts for has_drafts, _ in ahead) > 5
    assert all(batch is None for has_drafts, batch in ahead if has_drafts)
