"""`AsyncLLM`: closing, forgetting to close, and prompts submitted together."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import weakref
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from nanovllm import AsyncLLM, QueueFullError
from tests.support.async_llms import (
    ENDLESS,
    GREEDY,
    OPTIONS,
    answer,
    answers,
    assert_idle_and_whole,
    collect,
    open_llm,
)
from tests.support.tiny_models import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("overlap", [False, True])
async def test_closing_ends_open_streams_with_what_they_have(overlap):
    llm = open_llm(max_num_seqs=2, overlap=overlap)
    streams = [llm.generate([number] * 20, ENDLESS) for number in range(3)]
    for stream in streams[:2]:
        await anext(stream)
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    await asyncio.sleep(0.05)
    await asyncio.gather(llm.close(), llm.close())
    ends = [outputs[-1].outputs[0] for outputs in await asyncio.gather(*tasks)]
    assert [end.finish_reason for end in ends] == ["abort"] * 3
    assert [len(end.token_ids) > 0 for end in ends] == [True, True, False]
    assert not llm._engine_thread._thread.is_alive()
    for use in (lambda: anext(llm.generate([5])), llm.stats, lambda: llm.abort("a")):
        with pytest.raises(RuntimeError, match="closed; build a new one"):
            await use()
    await llm.close()


async def test_a_stream_closed_after_its_engine_does_nothing():
    llm = open_llm()
    stream = llm.generate([5] * 20, ENDLESS)
    await anext(stream)
    await llm.close()
    await stream.aclose()


def test_an_engine_that_is_forgotten_ends_its_thread():
    llm = open_llm()
    thread, gone = llm._engine_thread._thread, weakref.ref(llm)
    del llm
    gc.collect()
    thread.join(20)
    assert gone() is None
    assert not thread.is_alive()


@pytest.mark.usefixtures("programs_are_forked")
def test_a_program_that_forgets_to_close_ends():
    script = """
        import asyncio
        from nanovllm import AsyncLLM, SamplingParams
        from tests.support.tiny_models import tiny_model

        llm = AsyncLLM(tiny_model(), enforce_eager=True, block_size=16, num_kv_blocks=65, max_model_len=1024)

        async def main():
            stream = llm.generate([5, 6, 7], SamplingParams(max_tokens=900, ignore_eos=True))
            await anext(stream)
            asyncio.get_running_loop().kept = stream

        asyncio.run(main())
        stream = None
        loop = asyncio.new_event_loop()
        loop.run_until_complete(anext(llm.generate([8, 9], SamplingParams(max_tokens=900, ignore_eos=True))))
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "Traceback" not in done.stderr


async def test_a_live_module_is_its_owners_again_after_closing():
    model = tiny_model()
    before = sorted(vars(model.model.layers[0].self_attn))
    async with AsyncLLM(model, tokenizer=tiny_tokenizer(), **OPTIONS) as llm:
        async with aclosing(llm.generate([5, 6, 7], ENDLESS)) as stream:
            await anext(stream)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.flip(0))
        await llm.weights_changed()
        changed = await answer(llm.generate([5, 6, 7], GREEDY))
    assert changed != answers([[5, 6, 7]])[0]
    assert sorted(vars(model.model.layers[0].self_attn)) == before


async def test_submitted_prompts_are_queued_together_under_their_ids_or_not_at_all():
    async with open_llm(max_num_seqs=2, max_queue=2) as llm:
        with pytest.raises(QueueFullError):
            await llm.submit([[5], [6], [7], [8], [9]], GREEDY)
        outputs = await llm.submit([[5, 6], [7]], GREEDY, request_ids=["a", "b"], output_kind="final")
        with pytest.raises(ValueError, match="'b' is running already"):
            await llm.submit([[5], [6]], GREEDY, request_ids=["c", "b"])
        got = {output.request_id: output.outputs[0].token_ids async for output in outputs}
        assert [got["a"], got["b"]] == [token_ids for token_ids, _ in answers([[5, 6], [7]])]
        await assert_idle_and_whole(llm)


async def test_closing_submitted_prompts_aborts_those_that_are_unfinished():
    async with open_llm() as llm:
        outputs = await llm.submit([[5, 6, 7], [6], [7]], ENDLESS, output_kind="delta")
        first = await anext(outputs)
        await outputs.aclose()
        assert not first.finished
        assert [output async for output in outputs] == []
        await assert_idle_and_whole(llm)


@pytest.mark.costly
@pytest.mark.parametrize(
    "prompts, ids, error",
    [
        ("text", None, TypeError),
        ([], None, ValueError),
        ([[5], [6]], ["a"], ValueError),
        ([[5], [6]], ["a", "a"], ValueError),
    ],
)
async def test_prompts_that_cannot_be_submitted_are_refused(prompts, ids, error):
    async with open_llm() as llm:
        with pytest.raises(error):
            await llm.submit(prompts, request_ids=ids)
        await assert_idle_and_whole(llm)
