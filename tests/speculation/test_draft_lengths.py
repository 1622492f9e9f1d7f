"""How many drafts are verified: by the number of running sequences, and none for a while after they lost time."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from nanovllm.batch import ScheduledBatch, ScheduledSequence
from nanovllm.features.costs.buckets import RowSizes, runs_as_decodes
from nanovllm.features.costs.cost_model import StepWork
from nanovllm.features.speculation import lengths as rule
from nanovllm.features.speculation.lengths import (
    BOUNDS,
    DRAFT_COST,
    LONGEST_REST,
    PLAIN_WINDOW,
    REST,
    WINDOW,
    WINDOWS,
    Acceptance,
    BatchSize,
    DraftLengths,
)
from nanovllm.layout import build_layout
from tests.support.llms import generate, greedy, open_llm, token_ids
from tests.support.mock_drafts import known_answers
from tests.support.public_options import make_sequence


@pytest.fixture(autouse=True)
def _steps_take_time(_steps_are_free, monkeypatch):
    monkeypatch.setattr(rule, "PLAIN_WINDOW", PLAIN_WINDOW)
    monkeypatch.setattr(rule, "BOUNDS", BOUNDS)


def decodes(count):
    sequences = [make_sequence(range(20), arrival=arrival) for arrival in range(count)]
    return [ScheduledSequence(sequence, 19, 1, 1, [1, 2], 19) for sequence in sequences]


def test_drafts_are_bounded_by_the_number_of_running_sequences():
    for num_running, most, limit in (
        (1, 7, 7), (16, 32, 7), (17, 7, 3), (64, 7, 3), (65, 7, 0), (1000, 7, 0), (16, 5, 5), (64, 2, 2),
    ):  # fmt: skip
        assert DraftLengths(most, overlap=False).limit(num_running) == limit


class Steps:
    """Steps of one number of sequences, as a rule of lengths sees them; time stands still between calls.

    Args:
        seconds: of a step with drafts, and of one without.
        accepted: drafts of each sequence that are right.
    """

    def __init__(self, seconds, *, accepted=0.0, count=4):
        self.lengths = DraftLengths(7, overlap=True)
        self.seconds, self.accepted, self.count = seconds, accepted, count
        self.time, self.drafted = 0.0, []
        self.step(0.0)  # steps are measured from the end of the one before

    def step(self, seconds=None, **changes):
        """One step, drafted if it may be; `changes` of its record."""
        is_drafted = self.lengths.limit(self.count) > 0 and seconds is None
        ahead = 0.0 if is_drafted else 1e-6
        start, self.time = self.time - ahead, self.time + (self.seconds[not is_drafted] if seconds is None else seconds)
        drafts = 7 * self.count if is_drafted else 0
        values = {
            "start_time": start, "time": self.time, "num_running": self.count, "num_decode_tokens": self.count,
            "num_draft_tokens": drafts, "num_accepted_tokens": int(self.accepted * self.count) * is_drafted,
        }  # fmt: skip
        self.lengths.step_ended(SimpleNamespace(**values | changes), ScheduledBatch(len(self.drafted), ()))
        self.drafted.append(is_drafted)

    def run(self, number):
        for _ in range(number):
            self.step()
        return self.drafted[-number:]


def runs_of(steps):
    """Lengths of the runs of equal steps; drafted ones come first."""
    ends = [at for at in range(1, len(steps)) if steps[at] != steps[at - 1]]
    return [end - begin for begin, end in zip([0, *ends], [*ends, len(steps)], strict=True)]


def test_drafts_rest_while_tokens_a_second_are_lower_with_them():
    steps = Steps((3e-3, 1e-3), accepted=1.5)  # 2.5 tokens in the time of three
    first = [PLAIN_WINDOW, PLAIN_WINDOW, WINDOW - PLAIN_WINDOW]
    resting = [REST, 2 * REST, 4 * REST, 8 * REST, LONGEST_REST, LONGEST_REST]
    steps.run(PLAIN_WINDOW + sum(resting) + 7 * WINDOW)
    then = [part for rest in resting for part in (rest, WINDOW)]
    assert runs_of(steps.drafted[1:]) == first + then
    steps = Steps((3e-3, 1e-3), accepted=2.5)  # 3.5 tokens: they go on but for a few steps that are measured
    won = WINDOWS * WINDOW
    assert runs_of(steps.run(2000)) == [*first[:2], won, PLAIN_WINDOW, 2000 - won - 3 * PLAIN_WINDOW]


def test_a_clear_loss_ends_drafts_early():
    steps = Steps((3e-3, 1e-3), accepted=1.0)  # two tokens in the time of three
    assert runs_of(steps.run(3 * PLAIN_WINDOW + REST)) == [PLAIN_WINDOW, PLAIN_WINDOW + REST, PLAIN_WINDOW]


def test_another_number_of_sequences_is_measured_by_itself():
    steps = Steps((3e-3, 1e-3))
    steps.run(WINDOW + PLAIN_WINDOW)
    assert [steps.lengths.limit(count) for count in (2, 3, 4, 5)] == [7, 0, 0, 7]


def test_drafts_come_back_once_they_are_right():
    steps = Steps((2e-3, 1e-3))
    steps.run(2 * PLAIN_WINDOW)
    steps.accepted = 6
    assert not any(steps.run(REST)) and all(steps.run(4 * WINDOW))


def test_a_gain_ends_the_doubling_of_rests():
    size = BatchSize(rest=4 * REST)
    for number in range(PLAIN_WINDOW + WINDOW):
        is_drafted = number >= PLAIN_WINDOW
        size.note(1e-3, 1.0 + is_drafted, is_drafted=is_drafted)
    assert size.rest == REST


def test_only_decodes_of_a_busy_engine_are_measured_and_the_slowest_are_left_out():
    """Idle time, prompts, compilations and captures say nothing of drafts, which win here."""
    steps = Steps((2e-3, 1e-3), accepted=3)
    for number in range(WINDOW + 1):
        if number % 16 == 0:
            steps.seconds = (9.0, 1e-3)  # a capture
        steps.step()
        steps.seconds = (2e-3, 1e-3)
        steps.step(1e-9, num_decode_tokens=0)  # a step of prompts
        steps.step(1e-3, num_running=0)
        steps.time += 100.0
        steps.step()  # the first one after idle time
    assert all(steps.run(2 * WINDOW)[PLAIN_WINDOW:])


def test_a_step_that_waited_for_drafts_in_vain_counts_as_one_with_them():
    lost = Steps((2e-3, 1e-3))
    start = None
    for _ in range(WINDOW):
        start = lost.time
        lost.step(2e-3, start_time=start)
    for _ in range(PLAIN_WINDOW):
        lost.step(1e-3)
    assert lost.lengths.limit(lost.count) == 0


def answers_without_drafts(prompts, params):
    with open_llm() as llm:
        return token_ids(generate(llm, prompts, params))


def test_few_rows_are_shared_evenly():
    """A first draft is right more often than a later one, so 16 sequences have three of 48 rows each."""
    prompts = [[5, 6, 7, 8 + number] for number in range(16)]
    params = greedy(24, ignore_eos=True)
    wanted = answers_without_drafts(prompts, params)
    most = []

    def watched(request, drafts):
        most.append(request.max_tokens)
        return drafts

    with open_llm(speculation=known_answers(prompts, wanted, watched), max_num_seqs=64) as llm:
        assert token_ids(generate(llm, prompts, params)) == wanted
    assert most[:16] == [3] * 16


@pytest.mark.full
def test_an_engine_drafts_nothing_while_drafts_rest():
    prompts, params = [[5, 6, 7, 8]], greedy(12)
    wanted = answers_without_drafts(prompts, params)
    for rest in (0, 2 * LONGEST_REST):
        with open_llm(speculation=known_answers(prompts, wanted)) as llm:
            llm._engine.scheduler.proposer.lengths._size(1).num_left = rest
            assert token_ids(generate(llm, prompts, params)) == wanted
            assert (llm.stats().speculation.num_drafts > 0) == (rest == 0)


def decode_run_and_chunk(num_samples):
    """Of one token, of a token and its drafts, and of a prompt."""
    single, run, chunk = decodes(3)
    run = run._replace(num_new_tokens=4, num_samples=4)
    return single, run, chunk._replace(start=0, num_new_tokens=16, num_samples=num_samples)


def test_the_work_of_a_run_on_a_gpu_is_that_of_decodes_with_common_blocks():
    batch = ScheduledBatch(0, decode_run_and_chunk(0), 1)
    sizes = RowSizes(64, 256)
    work = StepWork.from_batch(batch, 16, sizes)
    assert work == StepWork(sizes.padded(5, 16)[1], 5, 1, 20 + 23, 20 + 21 + 22, 16 * 17 // 2, 5)
    assert StepWork.from_batch(batch, 16) == StepWork(21, 1, 2, 20, 0, 20 + 21 + 22 + 23 + 16 * 17 // 2, 5)


def test_a_run_as_decodes_has_the_same_rows_and_samples():
    batch = ScheduledBatch(0, decode_run_and_chunk(1), 1)
    for entry in batch.entries:
        entry.sequence.token_ids.extend(range(50, 60))
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


def test_decodes_wait_for_those_with_drafts():
    """Two steps of a part of the decodes each read the weights, and none of them costs what is predicted."""
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    params = greedy(30, ignore_eos=True)
    wanted = answers_without_drafts(prompts, params)

    def of_the_first(request, drafts):
        return drafts[:2] if request.token_ids[0] == 5 else []

    with open_llm(speculation=known_answers(prompts, wanted, of_the_first), overlap=True) as llm:
        batches = []
        schedule = llm._engine.scheduler.schedule
        llm._engine.scheduler.schedule = lambda: batches.append(schedule()) or batches[-1]
        assert token_ids(generate(llm, prompts, params)) == wanted
    drafted = [batch for batch in batches if batch is not None and batch.drafted]
    assert len(drafted) > 5 and all(len(batch.entries) == 3 for batch in drafted)


def test_no_prompt_runs_ahead_of_drafts():
    """A step of it alone would have no goal, though decodes wait for its end."""
    prompts = [[5, 6, 7, 8], [9, 10, 11], [20 + token % 7 for token in range(200)]]
    params = greedy(30, ignore_eos=True)
    wanted = answers_without_drafts(prompts, params)
    with open_llm(speculation=known_answers(prompts, wanted), overlap=True, max_num_batched_tokens=80) as llm:
        engine = llm._engine
        schedule, ahead = engine.scheduler.schedule, []

        def watched():
            has_drafts = any(batch.drafted for batch in engine.scheduler.in_flight)
            batch = schedule()
            ahead.append((has_drafts, batch))
            return batch

        engine.scheduler.schedule = watched
        assert token_ids(generate(llm, prompts, params)) == wanted
    assert sum(has_drafts for has_drafts, _ in ahead) > 5
    assert all(batch is None for has_drafts, batch in ahead if has_drafts)


@pytest.mark.parametrize(
    "share, most_often, least_gain", [(0.0, 0, 0.98), (0.3, 0, 1.0), (0.5, 2, 1.2), (0.7, 3, 1.5), (0.95, 3, 2.2)]
)
def test_a_chain_is_as_long_as_its_drafts_are_accepted(share, most_often, least_gain):
    acceptance, rng = Acceptance(3), random.Random(0)
    counts, tokens, cost = Counter(), 0, 0.0
    for _ in range(2000):
        count = acceptance.limit()
        accepted = 0
        while accepted < count and rng.random() < share:
            accepted += 1
        if count:
            acceptance.note(count, accepted)
        counts[count] += 1
        tokens += 1 + accepted
        cost += 1 + DRAFT_COST * count
    assert counts.most_common(1)[0][0] == most_often
    assert tokens / cost > least_gain


def test_heads_that_become_right_draft_again():
    acceptance = Acceptance(3)
    for _ in range(1000):
        if count := acceptance.limit():
            acceptance.note(count, 0)
    counts = []
    for _ in range(4000):
        counts.append(acceptance.limit())
        acceptance.note(counts[-1], counts[-1])
    assert counts[-100:] == [3] * 100
