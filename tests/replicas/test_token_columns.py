"""Tokens sent in columns: a reader gets the outputs that whole messages would bring, times and counts included."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.features.composition.input_processor import AllParts
from nanovllm.features.engine_stats import EngineStats
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput, OutputKind, RequestMetrics, RequestOutput
from nanovllm.responses import Request, TokenTimes, deliver
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.messages import Report, SentOutput, decode_from_engine, encode
from nanovllm.serving.replicas.pool_request import PoolRequest
from nanovllm.serving.replicas.token_columns import TokenSender
from tests.support.tiny_models import tiny_tokenizer

NUM_REQUESTS = 4
NO_STATS = EngineStats(*[0] * 14, None, None, None)


class Streams:
    """Requests of an engine without a model, and their records in two fronts: by columns, and by whole messages."""

    def __init__(self, kind, params):
        config = SimpleNamespace(max_model_len=1000, seed=0, record_itl=False)
        limits = SimpleNamespace(eos_token_ids=())
        processor = SimpleNamespace(
            config=config, limits=limits, tokenizer=tiny_tokenizer(), parts=AllParts(tiny_tokenizer(), config, limits)
        )
        arrivals = count()
        self.requests = {}
        self.fronts = []
        for number, own in enumerate(params):
            shown = NewRequest(str(number), [5, 6], own, output_kind=kind, arrival_time=0.25, bad_words=())
            asked = replace(shown, output_kind=OutputKind.DELTA)
            self.requests[str(number)] = Request(asked, processor, number=number, arrivals=arrivals)
            self.fronts.append((PoolRequest(shown), PoolRequest(shown)))
        self.sender, self.num_columns, self.num_whole = TokenSender(), 0, 0
        self.placements = {str(number): number for number in range(len(params))}

    def advance(self, rows, now, event="token"):
        """Tokens of these requests, unless they have ended."""
        sequences = [self.requests[str(row)].sequences[0] for row in rows]
        sequences = [sequence for sequence in sequences if not sequence.is_finished]
        runs = {sequence: len(sequence.token_ids) for sequence in sequences} if event == "two tokens" else {}
        for sequence in sequences:
            for _ in range(2 if runs else 1):
                sequence.token_ids.append(20 + len(sequence.token_ids) % 100)
                if sequence.logprobs is not None:
                    sequence.logprobs.append({})
            sequence.num_preemptions += event == "preempted"
            sequence.num_cached_tokens += event == "found in the cache"
            if event == "ended":
                sequence.finish_reason, sequence.is_finished = "length", True
        self.send(deliver(self.requests, sequences, now, TokenTimes(), lambda *_: None, runs))

    def send(self, outputs):
        every = [SentOutput.from_output(output, self.placements[output.request_id], None) for output in outputs]
        whole, tokens = self.sender.split(outputs, self.placements)
        sent = [SentOutput.from_output(output, self.placements[output.request_id], None) for output in whole]
        report = decode_from_engine(encode(Report(sent, NO_STATS, [], b"", tokens)))
        expected = decode_from_engine(encode(Report(every, NO_STATS, [], b"")))
        assert isinstance(report, Report) and isinstance(expected, Report)
        found = {each.request_id: self.fronts[each.placement][0].record(each) for each in report.outputs}
        if (columns := report.tokens) is not None:
            self.num_columns += len(columns.placements)
            for placement, text, token_id in zip(columns.placements, columns.texts, columns.token_ids, strict=True):
                found[str(placement)] = self.fronts[placement][0].record_token(text, token_id, columns.time)
        self.num_whole += len(whole)
        assert found == {each.request_id: self.fronts[each.placement][1].record(each) for each in expected.outputs}
        for by_columns, by_whole in self.fronts:
            assert by_columns.resumed() == by_whole.resumed()


EVENTS = st.sampled_from(["token"] * 6 + ["two tokens", "preempted", "found in the cache", "ended"])


@pytest.mark.costly
@pytest.mark.parametrize("kind", [OutputKind.DELTA, OutputKind.CUMULATIVE])
@given(st.lists(st.tuples(st.sets(st.integers(0, NUM_REQUESTS - 1), min_size=1), EVENTS), max_size=25), st.data())
@settings(deadline=None, max_examples=60)
def test_columns_and_whole_messages_bring_the_same_outputs(kind, steps, data):
    params = [SamplingParams(max_tokens=50, logprobs=None if row else 0) for row in range(NUM_REQUESTS)]
    streams, now = Streams(kind, params), 1.0
    for rows, event in steps:
        now += data.draw(st.floats(1e-4, 0.1))
        streams.advance(sorted(rows), now, event)


def test_each_token_behind_the_first_is_sent_in_columns():
    streams = Streams(OutputKind.DELTA, [SamplingParams(max_tokens=50)] * NUM_REQUESTS)
    for step in range(1, 11):
        streams.advance(range(NUM_REQUESTS), float(step))
    assert (streams.num_whole, streams.num_columns) == (NUM_REQUESTS, 9 * NUM_REQUESTS)


def test_a_request_with_the_id_of_one_that_ended_begins_with_a_whole_output():
    streams = Streams(OutputKind.DELTA, [SamplingParams(max_tokens=50)])
    for step in range(1, 4):
        streams.advance([0], float(step))
    streams.sender.forget("0")
    streams.advance([0], 4.0)
    assert (streams.num_whole, streams.num_columns) == (2, 2)


def test_samples_of_one_request_are_sent_whole():
    streams = Streams(OutputKind.DELTA, [SamplingParams(max_tokens=50, n=2)])
    for step in range(1, 4):
        sequences = streams.requests["0"].sequences
        for sequence in sequences:
            sequence.token_ids.append(30)
        streams.send(deliver(streams.requests, sequences, float(step), TokenTimes(), lambda *_: None))
    assert (streams.num_whole, streams.num_columns) == (3, 0)


def test_tokens_of_another_time_are_sent_whole():
    def token(request_id, time):
        metrics = RequestMetrics(0.0, last_token_time=time, num_output_tokens=2)
        return RequestOutput(request_id, None, [1], [CompletionOutput(0, "a", [5], None, None)], False, 0, metrics)

    sender, placements = TokenSender(), {"0": 7, "1": 8}
    assert sender.split([token("0", 1.0), token("1", 1.0)], placements)[1] is None
    whole, columns = sender.split([token("0", 2.0), token("1", 3.0)], placements)
    assert [output.request_id for output in whole] == ["1"]
    assert (columns.time, columns.placements) == (2.0, [7])
