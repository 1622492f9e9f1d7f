"""What the engine does with parts that it is handed: queues, budgets, stages of sampling, watches, progress."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.admission import WaitingQueue
from nanovllm.block_manager import PrefixEntry
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.requests import IncrementalDetokenizer
from nanovllm.sampler import LogitsStage, Sampler
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler, WholeBudget
from tests.engine.blocks import A, B, C, computed, make_manager, make_sequence, release
from tests.engine.loops import Loop, chunks, make_config, make_scheduler, prompt, running, waiting
from tests.engine.models import (
    GREEDY,
    byte_tokenizer,
    generate,
    make_it_say,
    open_llm,
    own_answer,
    tiny_model,
    token_ids,
)

# ------------------------------------------------------------------------------------------------- queues and budgets


class Exchanging(WaitingQueue):
    """The running sequence named "0" yields its slot to whoever waits, once."""

    has_yielded = False

    def make_way(self, running, preempt):
        victims = [sequence for sequence in running if sequence.request_id == "0"]
        return victims[0] if victims and len(self) and not self.has_yielded else None

    def charge(self, sequence, num_tokens, victim=None):
        self.has_yielded |= victim is not None


class Reduced(WholeBudget):
    """A budget of one block a step."""

    def of_step(self, *_: object, has_slot: bool) -> tuple[int, int]:
        return 4, 4


def loop_with(queue: Any = None, budget: Any = None, **limits: Any) -> Loop:
    manager = make_scheduler(**limits).block_manager
    config = make_config(**limits)
    return Loop(Scheduler(config, manager, None if budget is None else budget(config), queue))


def step(scheduler: Scheduler) -> dict[str, tuple[int, int]]:
    batch = scheduler.schedule()
    scheduler.update(batch, [1] * len(batch.sampling))
    return chunks(batch)


def test_a_running_sequence_yields_its_slot_where_the_first_waiting_one_can_start():
    loop = loop_with(Exchanging(), max_num_seqs=1)
    loop.add(prompt(6), max_tokens=4)
    step(loop.scheduler)
    loop.add(prompt(6, 1), max_tokens=2)
    assert step(loop.scheduler) == {"1": (0, 6)}
    assert (running(loop), waiting(loop), loop.scheduler.stats.num_preemptions) == (["1"], ["0"], 1)


def test_the_sequence_that_would_have_yielded_goes_on_where_the_waiting_one_cannot_start():
    loop = loop_with(Exchanging(), max_num_seqs=2, num_kv_blocks=1 + 6, max_model_len=24)
    loop.add(prompt(4), max_tokens=4)
    loop.add(prompt(14, 1), max_tokens=8)
    step(loop.scheduler)
    loop.add(prompt(20, 2), max_tokens=2)
    assert step(loop.scheduler) == {"1": (14, 15), "0": (4, 5)}
    assert (running(loop), waiting(loop)) == (["0", "1"], ["2"])


def test_in_a_step_of_a_single_chunk_prompts_take_turns_by_rank_and_then_by_their_last_chunk():
    loop = loop_with(budget=Reduced)
    for number, priority in enumerate((1, 1, 0)):
        loop.add(prompt(12, number), max_tokens=1, priority=priority)
    # "1" starts two steps after "0" did, since both would otherwise count as placed in that step.
    assert "".join(name for _ in range(9) for name in chunks(loop.step())) == "222001011"
    loop.check_outputs()


def test_functions_at_steps_are_called_before_each_step_is_scheduled():
    loop, seen = loop_with(), []
    loop.manager.at_steps.append(lambda: seen.append(len(loop.scheduler.in_flight)))
    loop.add(prompt(3), max_tokens=2)
    loop.launch()
    loop.launch()
    assert seen == [0, 1]


def test_an_observer_of_prefixes_hears_of_each_content_once_and_of_its_end():
    manager, heard = make_manager(3), []

    class Observer:
        def findable(self, entry: PrefixEntry, parent_hash: bytes | None) -> None:
            heard.append((entry.block_hash, parent_hash))

        def forgotten(self, block_hash: bytes) -> None:
            heard.append(block_hash)

        def all_forgotten(self) -> None:
            heard.append("all")

    manager.observer = Observer()
    first = computed(manager, A + B + [9])
    hashes = first.block_hashes
    release(manager, first)
    release(manager, computed(manager, [*A, 9]))
    assert heard == [(hashes[0], None), (hashes[1], hashes[0])]
    other = computed(manager, C * 2 + [9])
    found = other.block_hashes
    assert heard[2:] == [hashes[1], hashes[0], (found[0], None), (found[1], found[0])]
    manager.reset_prefix_cache()
    assert heard[-1] == "all"


# ------------------------------------------------------------------------------------------------------------ sampling


class NoRepeat(SamplingParams):
    """No token comes twice."""

    is_plain = False
    needs_host_tokens = True


class Report:
    needs_logits = True
    reads_rows = False

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def record(self, sequences: Any, token_ids: list[int]) -> None:
        self.recorded += token_ids


class NoRepeatStage(LogitsStage):
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def begin_report(self, batch: Any, layout: Any) -> Any:
        self.reports.append(Report())
        return self.reports[-1]

    def inputs(self, layout: Any, sequences: Any, previous: Any) -> Any:
        assert not any(sequence.num_in_flight_tokens > 1 for sequence in sequences)  # its own alone: others are read
        return [sequence.token_ids.tolist() for sequence in sequences]

    def apply(self, draw: Any, logits: Any, sequences: Any, positions: Any, inputs: Any, report: Any) -> Any:
        for row, known in enumerate(inputs):
            if sequences[row].needs_host_tokens:
                logits[row, known] = -torch.inf
        return draw(logits, sequences, positions)


def answer_without_repeats(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    known = [*prompt]
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([known])).logits[0, -1]
        logits[known] = -torch.inf
        known.append(int(logits.argmax()))
    return known[len(prompt) :]


@pytest.mark.costly
@pytest.mark.parametrize("overlap", [False, True])
def test_a_stage_that_needs_the_tokens_before_gets_them_and_what_it_reports_is_recorded(overlap):
    model, prompts = tiny_model(), [[1, 2], [5] * 20]
    with open_llm(model, overlap=overlap) as llm:
        engine, stage = llm._engine, NoRepeatStage()
        engine.model_runner.sampler.stage = stage
        for number, params in enumerate((NoRepeat(temperature=0.0, max_tokens=50, ignore_eos=True), GREEDY)):
            request = engine.input_processor.process_one(str(number), prompts[number])
            engine.add(replace(request, params=params))
        while engine.has_unfinished:
            engine.step()
        found = token_ids(sorted(engine.outputs, key=lambda output: output.request_id))
    assert found[0] == answer_without_repeats(model, prompts[0], 50) != own_answer(model, prompts[0], 50)
    assert found[1] == own_answer(model, prompts[1])
    assert {*found[0]} <= {token_id for report in stage.reports for token_id in report.recorded}


def test_logits_on_a_cpu_are_drawn_from_by_the_function_for_them():
    sampler = Sampler(draw_on_cpu=lambda logits, inputs: logits.argmin(dim=-1))
    assert sampler.sample(torch.tensor([[3.0, 1.0, 2.0]]), [make_sequence([1])], [1]).tolist() == [1]


# ------------------------------------------------------------------------------------------------------- live modules


def test_a_change_that_the_watch_of_a_module_sees_drops_what_was_computed():
    model, prompt = tiny_model(), [*range(40)]
    with open_llm(model) as llm:
        runner, changes = llm._engine.model_runner, [(False, False)]
        runner.binding.watch = SimpleNamespace(changes=lambda with_structure: changes[0])
        for _ in range(2):
            (output,) = generate(llm, [prompt])
        assert output.num_cached_tokens == 32
        with torch.no_grad():
            model.lm_head.weight.neg_()
        stream = llm.stream(prompt, GREEDY)
        changes[0] = (True, False)
        next(stream)
        changes[0] = (False, False)
        *_, output = stream
    assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == own_answer(model, prompt)


# ----------------------------------------------------------------------------------------------------------- requests


class Progress:
    """The tokens that each sample had; the second has ended."""

    tokens = ([3, 4], [5])

    def restore(self, sample: Any) -> None:
        sequence = sample.sequence
        sequence.token_ids.extend(self.tokens[sequence.index])
        sequence.num_known_tokens = len(sequence.token_ids)
        if sequence.index == 1:
            sequence.finish_reason, sequence.is_finished = "stop", True


def test_a_request_goes_on_behind_the_tokens_that_its_samples_had():
    model = tiny_model()
    with open_llm(model) as llm:
        engine = llm._engine
        params = SamplingParams(temperature=0.001, n=2, max_tokens=8, ignore_eos=True)
        request = engine.input_processor.process_one("moved", [1, 2], params)
        engine.add(replace(request, resumed=Progress()))
        while engine.has_unfinished:
            engine.step()
        (output,) = engine.outputs
    own = own_answer(model, [1, 2, 3, 4], 6)
    assert [completion.token_ids for completion in output.outputs] == [[3, 4, *own], [5]]


class EndedPrompt(list):
    """Token ids of a prompt with end tokens of its own."""

    end_token_ids = (5,)


def test_a_prompt_may_bring_end_tokens_whose_text_is_not_shown(monkeypatch):
    with open_llm(tokenizer=byte_tokenizer()) as llm:
        monkeypatch.setattr(llm._engine.input_processor.parts, "ended", lambda prompt, ids, params: EndedPrompt(ids))
        make_it_say(monkeypatch, llm, [7, 8, 5, 9])
        (output,) = generate(llm, [[1]], SamplingParams(max_tokens=9))
        assert output.outputs[0].token_ids == [7, 8, 5] and output.outputs[0].stop_reason == 5
        assert output.outputs[0].text == llm.tokenizer.decode([7, 8])


# ---------------------------------------------------------------------------------------------------------------- text


def decode_bytes(ids: list[int]) -> str:
    """Text of byte tokens; a token from 256 on has none."""
    return bytes(token_id for token_id in ids if token_id < 256).decode(errors="replace")


TEXT = "Größe 你好 😀 end"


@pytest.mark.parametrize("ids", [
    [*TEXT.encode()],
    [0xF0, 0x9F, *b"ab"],
    [*b"a", *[0x80] * 20, *b"b"],
    [0x80] * 7 + [0xF0, 0x9F, 0x98, 0x80],
    [*[256] * 12, *b"a", *[256] * 12, *"é".encode()],
], ids=["text", "cut", "invalid", "invalid and a character", "without text"])  # fmt: skip
@pytest.mark.parametrize("knows_texts", [False, True])
def test_text_that_comes_token_by_token_is_the_text_of_all_tokens(ids, knows_texts):
    texts = {token_id: chr(token_id) if token_id < 128 else "" for token_id in range(257)}
    detokenizer = IncrementalDetokenizer(decode_bytes, texts if knows_texts else None)
    so_far = ""
    for token_id in ids:
        detokenizer.add(token_id)
        assert detokenizer.text.startswith(so_far)
        so_far = detokenizer.text
    assert so_far + detokenizer.unfinished_text() == decode_bytes(ids)


def test_a_delta_of_a_further_sample_joins_the_output():
    first, second = (
        RequestOutput(
            "a", None, [1], [CompletionOutput(index, "x", [2], None, None, [{}])], False, 0, RequestMetrics(0)
        )
        for index in (0, 1)
    )
    first.extend(second)
    first.extend(second)
    assert [(each.index, each.text, len(each.logprobs)) for each in first.outputs] == [(0, "x", 1), (1, "xx", 2)]
