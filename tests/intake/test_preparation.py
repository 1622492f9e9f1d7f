"""Preparation of a request before it is queued: in which thread, how often, and not with a full queue."""

import asyncio
import threading
from unittest.mock import Mock

import pytest

from nanovllm import SamplingParams
from nanovllm.errors import QueueFullError
from nanovllm.features.intake import pieces
from nanovllm.features.intake.intake import LONG_CHARS, Intake, form_turn
from nanovllm.features.intake.preparation import text_size
from tests.support.async_llms import offline, open_llm
from tests.support.tiny_models import tiny_tokenizer

SHORT = SamplingParams(temperature=0.0, max_tokens=2)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


async def ended(outputs):
    """The tokens of the last output."""
    return [output async for output in outputs][-1].outputs[0].token_ids


async def test_bad_words_are_tokenised_once_for_all_prompts_of_a_request(monkeypatch):
    spell = Mock(side_effect=pieces.spellings_of)
    monkeypatch.setattr(pieces, "spellings_of", spell)
    params = SamplingParams(temperature=0.0, max_tokens=2, bad_words=("answer", "question"))
    async with open_llm() as llm:
        outputs = await llm.submit([[5, 6], [7, 8], [9]], params)
        assert len([output async for output in outputs if output.finished]) == 3
    words = [call.args[0] for call in spell.call_args_list if call.args[0]]
    assert words == [("answer", "question")]


async def test_a_full_queue_refuses_before_anything_is_tokenised(monkeypatch):
    async with open_llm(max_num_seqs=1, max_queue=1) as llm:
        streams = [llm.generate([number] * 20, ENDLESS) for number in (5, 6)]
        await anext(streams[0])
        second = asyncio.create_task(anext(streams[1]))
        while (await llm.stats()).num_waiting < 1:
            await asyncio.sleep(0.005)
        prepare = Mock()
        monkeypatch.setattr(llm._input_processor, "process_each", prepare)
        monkeypatch.setattr(llm._input_processor.parts.chat, "apply_to", prepare)
        with pytest.raises(QueueFullError, match="max_queue"):
            await llm.submit(["a long text"], SHORT)
        with pytest.raises(QueueFullError, match="max_queue"):
            await llm.submit_chat([{"role": "user", "content": "a long text"}], SHORT)
        assert not prepare.called
        second.cancel()


async def test_short_requests_do_not_wait_until_long_texts_are_tokenised(monkeypatch):
    may_go_on = threading.Event()
    async with open_llm() as llm:
        tokenize = llm._input_processor.tokenize

        def held(prompt, **options):
            if isinstance(prompt, str) and len(prompt) > LONG_CHARS:
                may_go_on.wait(30.0)
            return tokenize(prompt, **options)

        monkeypatch.setattr(llm._input_processor, "tokenize", held)
        truncated = SamplingParams(temperature=0.0, max_tokens=2, truncate_prompt_tokens=20)
        long = asyncio.create_task(ended(llm.generate("the sea " * LONG_CHARS, truncated)))
        await asyncio.sleep(0)
        try:
            tokens = await asyncio.wait_for(ended(llm.generate("the sea", SHORT)), 20.0)
            assert not long.done()
        finally:
            may_go_on.set()
        assert tokens == offline().generate("the sea", SHORT)[0].outputs[0].token_ids
        assert len(await long) == 2


async def test_short_requests_are_prepared_in_the_order_of_their_calls(monkeypatch):
    async with open_llm() as llm:
        prepare = Mock(side_effect=llm._input_processor.process_each)
        monkeypatch.setattr(llm._input_processor, "process_each", prepare)
        await asyncio.gather(*(ended(llm.generate([number + 1], SHORT)) for number in range(20)))
    assert [call.args[0] for call in prepare.call_args_list] == [[[number + 1]] for number in range(20)]


def test_both_threads_use_one_fast_tokenizer_to_the_same_token_ids():
    tokenizer = tiny_tokenizer()
    assert tokenizer.is_fast
    texts = [f"the sea is {number} and the answer a question " * (1 + number % 40) for number in range(200)]
    expected = [tokenizer(text)["input_ids"] for text in texts]
    intake = Intake()
    futures = [
        intake.submit(lambda text=text: tokenizer(text)["input_ids"], (number % 2) * 2 * LONG_CHARS)
        for number, text in enumerate(texts)
    ]
    assert [future.result(60.0) for future in futures] == expected
    intake.shutdown()


def test_a_tokenizer_in_python_is_used_by_one_thread_at_a_time():
    intake, is_used = Intake(is_parallel=False), threading.Lock()

    def use():
        is_alone = is_used.acquire(blocking=False)
        if is_alone:
            is_used.release()
        return is_alone

    assert all(intake.submit(use, size).result(30.0) for size in (1, 10**9) * 50)
    with form_turn():
        pass
    intake.shutdown()


def test_the_size_of_texts_is_counted_up_to_where_it_matters():
    assert text_size("abc") == 19
    assert text_size([{"role": "user", "content": "abc"}], None) == 16 * 5 + 7
    assert text_size(b"x" * 80) == 16 + 10
    endless = ["x"]
    endless.append(endless)
    assert text_size(endless) > LONG_CHARS
