"""Drafters of users: what they are given, and what becomes of those that fail; failed steps, aborts and streams."""

import sys
from dataclasses import replace

import pytest

from nanovllm import LLM, SamplingParams, StepError, StructuredOutput, TraceWriter
from nanovllm.features.groups.block_checks import check_scheduler
from nanovllm.observability.timeline import read_trace, summary
from nanovllm.observability.trace_writer import STATES, details_of
from tests.support.forked_processes import programs_are_forked
from tests.support.llms import OPTIONS, assert_idle_and_whole, fail_in_step, generate, open_llm, submit, token_ids
from tests.support.mock_drafts import known_answers
from tests.support.structured import EOS
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, save_tiny, tiny_model, tiny_tokenizer

PROMPTS = random_prompts(4, low=5, high=40, seed=2)
PARAMS = SamplingParams(seed=3, max_tokens=24)


@pytest.fixture(scope="module")
def wanted():
    with open_llm() as llm:
        return token_ids(generate(llm, PROMPTS, PARAMS))


@pytest.fixture
def right(wanted):
    return known_answers(PROMPTS, wanted)


class Recorder:
    """Proposes nothing, and keeps what it is asked."""

    def __init__(self):
        self.asked = []
        self.seen = []

    def propose(self, requests):
        for request in requests:
            self.seen.append((
                request.request_id, request.index, request.seed, request.cache_salt, request.num_tokens,
                request.num_prompt_tokens, request.token_ids, request.tokens_from(-2), request.max_tokens,
            ))  # fmt: skip
        return [[] for _ in requests]


def test_a_drafter_sees_each_sample_with_its_tokens_and_seed(wanted):
    recorder = Recorder()
    with open_llm(speculation=recorder, num_speculative_tokens=5) as llm:
        generate(llm, PROMPTS[:1], PARAMS, cache_salt="mine")
    first = recorder.seen[0]
    prompt, answer = PROMPTS[0], wanted[0]
    assert first[1:] == (0, 3, "mine", len(prompt) + 1, len(prompt), [*prompt, answer[0]], [prompt[-1], answer[0]], 5)
    lengths = [(seen[4] - len(prompt), seen[8]) for seen in recorder.seen]
    assert lengths == [(n, min(5, 24 - n - 1)) for n in range(1, 23)]


FIELDS = ("description of the harbour", "year in which it was built", "number of piers")
FORM = StructuredOutput(
    json_schema={
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in FIELDS},
        "required": list(FIELDS),
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)


@pytest.mark.costly
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_a_form_forces_are_drafts_that_cannot_fail(temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=120, structured_output=FORM)
    model = tiny_model(eos_token_id=EOS)
    with open_llm(model) as llm:
        wanted = token_ids(generate(llm, PROMPTS, params))
        num_steps = llm.stats().num_steps
    with open_llm(model, speculation=Recorder()) as llm:
        assert token_ids(generate(llm, PROMPTS, params)) == wanted
        stats = llm.stats()
    drafted, accepted = stats.speculation.by_source["grammar"]
    assert drafted == accepted == stats.speculation.num_draft_tokens > sum(map(len, wanted)) / 2
    assert stats.num_steps < num_steps / 2


def test_traces_and_step_records_show_drafts_and_nothing_without_them(tmp_path, wanted, right):
    for drafter, is_drafted in ((right, True), (Recorder(), False)):
        records = []
        path = tmp_path / f"{is_drafted}.json"
        with TraceWriter(path) as trace, open_llm(speculation=drafter, trace=trace, on_step=records.append) as llm:
            assert token_ids(generate(llm, PROMPTS, PARAMS)) == wanted
            count = llm.stats().speculation.num_draft_tokens
        run = read_trace(path)
        assert all(r.num_decode_tokens == r.num_sequences for r in records if not r.num_prefill_tokens)
        for lane in run.lanes:
            decoded = sum(details["tokens"] for state, _, _, details in lane.spans if STATES[state] == "decode")
            assert decoded == lane.spans[-1][3]["output_tokens"] - 1
        assert (run.num_drafts, run.num_accepted) == (count, count) and (count > 50) == is_drafted
        words = {record.step_id: words for record in records if (words := details_of(record))}
        assert words == run.groups and bool(words) == is_drafted
        assert (f"{count} of {count} drafts accepted" in summary(run)) == is_drafted


class Broken:
    def __init__(self, answer):
        self.answer, self.num_calls = answer, 0

    def propose(self, requests):
        self.num_calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(requests)


FAULTS = {
    "raises": RuntimeError("no idea"),
    "too few": lambda requests: [],
    "below the vocabulary": lambda requests: [[-1] for _ in requests],
    "beyond the vocabulary": lambda requests: [[VOCAB_SIZE] for _ in requests],
    "no token ids": lambda requests: [["a"] for _ in requests],
    "no lists": lambda requests: [None for _ in requests],
    "nothing": lambda requests: None,
}


@pytest.mark.costly
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_go_on_without_the_drafts_of_a_drafter_that_fails(fault, wanted, caplog):
    drafter = Broken(FAULTS[fault])
    with open_llm(speculation=drafter) as llm:
        assert token_ids(generate(llm, PROMPTS, PARAMS)) == wanted
        counts = llm._engine.scheduler.proposer.counts
    assert counts.num_failures == drafter.num_calls > 20 and not counts.drafted
    assert len([r for r in caplog.records if "the drafter" in r.message and "failed" in r.message]) == 1


def test_a_step_with_drafts_that_fails_is_done_again(monkeypatch, wanted, right):
    with open_llm(speculation=right) as llm:
        for number in (1, 2, 3):
            fail_in_step(monkeypatch, llm, number, RuntimeError("the device is busy"))
            engine = llm._engine
            outputs, failures = {}, 0
            for index, prompt in enumerate(PROMPTS):
                submit(engine, str(index), prompt, PARAMS)
            while engine.has_unfinished:
                try:
                    engine.step()
                except StepError:
                    failures += 1
                    check_scheduler(engine.scheduler)
                while engine.outputs:
                    output = engine.outputs.popleft()
                    outputs[output.request_id] = output.outputs[0].token_ids
            assert failures == 1 and [outputs[str(index)] for index in range(4)] == wanted
            monkeypatch.undo()
        assert_idle_and_whole(llm)


def test_a_request_with_drafts_is_aborted_at_any_time_and_leaves_nothing_behind(wanted, right):
    with open_llm(speculation=right, overlap=True) as llm:
        for num_outputs in range(1, 4):
            stream = llm.stream(PROMPTS[0], PARAMS)
            for _ in range(num_outputs):
                output = next(stream)
                assert output.outputs[0].token_ids == wanted[0][: len(output.outputs[0].token_ids)]
            stream.close()
            assert_idle_and_whole(llm)


def test_a_stream_brings_several_tokens_at_once_and_each_once(wanted, right):
    with open_llm(speculation=right, record_itl=True) as llm:
        outputs = list(llm.stream(PROMPTS[0], PARAMS))
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [1, 9, 17, 24]
    metrics = outputs[-1].metrics
    assert len(metrics.itls) == 23 and metrics.itls.count(0.0) >= 20
    assert metrics.mean_itl == pytest.approx(sum(metrics.itls) / 23)


def test_logits_processors_see_no_drafts(wanted, right):
    lengths = []

    def note(token_ids, logits):
        lengths.append(len(token_ids))
        return logits

    params = replace(PARAMS, logits_processors=(note,))
    with open_llm(speculation=right) as llm:
        assert token_ids(generate(llm, PROMPTS[:1], params)) == wanted[:1]
    assert lengths == [len(PROMPTS[0]) + n for n in range(24)]


def test_with_no_draft_found_the_steps_are_those_without_speculation(monkeypatch):
    """Byte for byte: each step's rows as they are handed to the model."""

    def steps(**options):
        rows = []
        with open_llm(**options) as llm:
            executor = llm._engine.model_runner.executor
            launch = executor.launch

            def noted(batch, layout, masks, report):
                rows.append([
                    getattr(layout, name).tobytes()
                    for name in ("token_ids", "positions", "slot_mapping", "sample_rows", "sampled_positions")
                ])  # fmt: skip
                return launch(batch, layout, masks, report)

            monkeypatch.setattr(llm._engine.model_runner, "launch_step", noted)
            generate(llm, PROMPTS, PARAMS)
        return rows

    assert steps(speculation=Recorder()) == steps()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"speculation": "ngrams"}, "speculation is 'ngrams'; it must be"),
        ({"speculation": object()}, "or an object with a method `propose`"),
        ({"speculation": Recorder(), "num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be"),
        ({"speculation": Recorder(), "max_num_seqs": 1}, "max_num_seqs is 1, so a step draws one token"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("folder", **options)


@programs_are_forked()
def test_each_replica_has_a_copy_of_a_drafter(tmp_path, wanted, right):
    folder = str(save_tiny(tmp_path, num_layers=1))
    options = OPTIONS | {"tokenizer": tiny_tokenizer(), "speculation": right, "data_parallel_size": 2}
    with LLM(folder, routing="round-robin", **options) as llm:
        assert token_ids(generate(llm, PROMPTS, PARAMS)) == wanted
        counts = llm.stats().speculation
    assert counts.num_failures == 0 and counts.num_accepted_tokens == counts.num_draft_tokens > 0


def test_a_drafter_of_the_program_itself_is_refused_for_replicas(monkeypatch):
    """A replica would not find its class."""
    monkeypatch.setattr(Recorder, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Recorder", Recorder, raising=False)
    with pytest.raises(ValueError, match="a Drafter that cannot be pickled does not work with data_parallel_size"):
        LLM("folder", speculation=Recorder(), data_parallel_size=2)
