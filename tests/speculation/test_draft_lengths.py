"""How many drafts are verified: by what they bring, and what they cost beside so many decodes."""

from __future__ import annotations

import pytest

from nanovllm.core.batch import ScheduledBatch, ScheduledSequence
from nanovllm.execution.cost_model import DeviceCost, StepWork
from nanovllm.speculation import costs as costs_of_drafts
from nanovllm.speculation.costs import draft_costs
from nanovllm.speculation.lengths import Acceptance, DraftLengths
from tests.support.llms import generate, open_llm
from tests.support.mock_drafts import KnownAnswers
from tests.support.scheduling import make_sequence
from tests.support.sweeps import CALIBRATION

# Steps are bound by reading the weights up to 16 rows, and by arithmetic above.
COST = DeviceCost(16, fixed=10.0, per_token_below=0.01, per_token_above=1.0)


class Costs:
    def seconds(self, work: StepWork) -> float:
        return COST.seconds(work)

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


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_an_engine_drafts_as_its_costs_say(seconds):
    prompt = [5, 6, 7, 8]
    with open_llm() as llm:
        wanted = llm.generate([prompt], use_tqdm=False)[0].outputs[0].token_ids
    with open_llm(speculation=KnownAnswers({tuple(prompt): [wanted]})) as llm:
        costs = Costs()
        costs.seconds = DeviceCost(1, fixed=1.0, per_token_above=seconds).seconds
        llm._engine.scheduler.drafting.lengths.costs = costs
        assert llm.generate([prompt], use_tqdm=False)[0].outputs[0].token_ids == wanted
        assert (llm.stats().speculation.num_drafts > 0) == (seconds == 0.0)


def test_costs_are_measured_at_the_start_and_corrected_by_steps(monkeypatch):
    monkeypatch.setattr(costs_of_drafts, "draft_costs", draft_costs)
    with open_llm(speculation="suffix") as llm:
        costs = llm._engine.scheduler.drafting.lengths.costs
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
        assert llm._engine.scheduler.drafting.lengths.costs.seconds(work) == pytest.approx(expected)
