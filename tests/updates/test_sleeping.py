"""Sleep and wake: memory is given back, tokens stay the same, running requests go on, and calls are refused by name."""

import asyncio
import random
import threading
from pathlib import Path

import pytest

from nanovllm import LLM, AsyncLLM
from tests.support.adapter_files import merged, save_adapter
from tests.support.layer_kinds import own_answer
from tests.support.llms import assert_idle_and_whole, comes_true, generate, greedy, submit, token_ids
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

NUM_TOKENS = 10
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
SIZES = {"dtype": "float32", "num_kv_blocks": 65, "max_num_seqs": 6, "max_model_len": 160, "max_num_batched_tokens": 64}
OF_MODULE = {name: value for name, value in SIZES.items() if name != "dtype"}
PROMPTS = [[token % 60 for token in prompt] for prompt in random_prompts(5, low=3, high=70, seed=8)]
FORMS = {
    "fused": {}, "eager": {"enforce_eager": True}, "compiled": {"attention_backend": "sdpa"},
    "overlap": {"overlap": False}, "suffix": {"speculation": "suffix"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


def answers_of(model):
    return [own_answer(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def answers():
    return answers_of(tiny_model())


def answered(llm):
    return token_ids(generate(llm, PROMPTS, GREEDY))


def caches_of(llm):
    return [caches for _, caches in llm._engine.model_runner.binding.caches._together]


def resident_bytes():
    return 4096 * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


def test_the_memory_of_the_kv_cache_is_given_back_and_idle_threads_take_none(folder, answers):
    with LLM(folder, **SIZES | {"num_kv_blocks": 4000}) as llm:
        num_bytes = sum(caches.fill_(0.5).nbytes for caches in caches_of(llm))
        before = resident_bytes()
        llm.sleep()
        assert before - resident_bytes() > 0.95 * num_bytes > 2**27
        assert not llm._engine.use_idle_time(captures=True)
        llm.wake()
        assert not any(caches.any() for caches in caches_of(llm))
        assert answered(llm) == answers


@pytest.mark.parametrize("form", ["fused", "eager", pytest.param("compiled", marks=pytest.mark.full), "live"])
def test_tokens_after_wake_are_those_before(form, folder):
    source, options = (tiny_model(), OF_MODULE) if form == "live" else (folder, SIZES | FORMS[form])
    with LLM(source, **options) as llm:
        first = answered(llm)
        for level in (1, 2):
            llm.sleep(level)
            assert llm.is_asleep
            llm.wake()
            outputs = generate(llm, PROMPTS, GREEDY)
            assert token_ids(outputs) == first and not any(output.num_cached_tokens for output in outputs)
        assert_idle_and_whole(llm)


def test_a_draft_model_gives_its_cache_back_too(folder, answers):
    drafts = {"speculation": "draft", "draft_model": str(folder)}
    with LLM(folder, tokenizer=None, skip_tokenizer_init=True, **SIZES | drafts) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        own = llm._engine.scheduler.proposer.drafter._runner.binding.caches
        llm.sleep()
        assert own.memory.num_taken == 0 and not any(caches.any() for _, caches in own._together)
        llm.wake()
        assert [*stream][-1].outputs[0].token_ids == answers[0]
        assert answered(llm) == answers
        assert llm.stats().speculation.num_accepted_tokens > 0


def test_running_requests_go_on_after_wake(folder, answers):
    with LLM(folder, overlap=True, **SIZES) as llm:
        engine = llm._engine
        for number in range(7):
            submit(engine, str(number), PROMPTS[number % 5], GREEDY)
            engine.step()
        assert engine.scheduler.running and engine._in_flight
        llm.sleep()
        assert llm.stats().num_used_blocks == llm.stats().num_running == 0
        llm.wake()
        while engine.has_unfinished:
            engine.step()
        assert all(output.outputs[0].token_ids == answers[int(output.request_id) % 5] for output in engine.outputs)
        assert len(engine.outputs) == 7
        engine.outputs.clear()


def test_a_call_of_another_thread_waits_and_goes_on(folder):
    with LLM(folder, **SIZES | {"max_model_len": 1000, "num_kv_blocks": 200}) as llm:
        found = []
        params = greedy(900, ignore_eos=True)
        expected = token_ids(generate(llm, PROMPTS[:2], params))
        thread = threading.Thread(target=lambda: found.extend(generate(llm, PROMPTS[:2], params)))
        thread.start()
        comes_true(lambda: llm.stats().num_running == 2)
        llm.sleep()
        assert llm.stats().num_waiting == 2 and not found
        llm.wake()
        thread.join()
        assert token_ids(found) == expected


def test_calls_while_asleep_are_refused_by_name(folder, answers):
    with LLM(folder, **SIZES) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        llm.sleep()
        for call in (lambda: generate(llm, PROMPTS), lambda: next(llm.stream(PROMPTS[0])), lambda: next(stream)):
            with pytest.raises(RuntimeError, match=r"asleep .* call wake\(\)"):
                call()
        llm.wake()
        assert answered(llm) == answers
        assert_idle_and_whole(llm)


def test_sleeping_twice_and_waking_twice_change_nothing(folder, answers, caplog):
    with LLM(folder, **SIZES) as llm:
        llm.wake()
        with pytest.raises(ValueError, match=r"level is 3; it must be 1, .* or 2"):
            llm.sleep(3)
        assert not llm.is_asleep
        llm.sleep()
        llm.sleep(2)
        assert "is level 1 on a CPU" in caplog.text
        llm.wake()
        llm.wake()
        assert answered(llm) == answers
        llm.sleep()  # it is closed asleep


def test_weights_are_updated_asleep(folder, answers, tmp_path):
    other = tiny_model(seed=1)
    path = save_adapter(tmp_path / "a", other, seed=9)
    with LLM(folder, **SIZES) as llm:
        generate(llm, PROMPTS, GREEDY)
        llm.sleep()
        llm.update_weights(other.state_dict())
        llm.load_adapter("a", path)
        assert llm.is_asleep
        llm.wake()
        assert answered(llm) == answers_of(other)
        (output,) = generate(llm, PROMPTS[:1], GREEDY, adapter="a")
        assert output.outputs[0].token_ids == own_answer(merged(other, path), PROMPTS[0], NUM_TOKENS)


@pytest.mark.parametrize("files", [False, True], ids=["host", "files"])
def test_prefixes_in_host_memory_and_files_are_found_after_wake(files, folder, answers, tmp_path):
    tiers = {"prefix_cache_host_bytes": 2**24} | ({"prefix_cache_dir": str(tmp_path)} if files else {})
    with LLM(folder, **SIZES | tiers) as llm:
        assert answered(llm) == answers
        while llm._engine.use_idle_time(captures=True):
            pass
        for _ in range(2):
            llm.sleep()
            llm.wake()
            outputs = generate(llm, PROMPTS, GREEDY)
            assert token_ids(outputs) == answers and any(output.num_cached_tokens for output in outputs)
        assert_idle_and_whole(llm)
        llm._engine.tiers.books.check()


def test_streams_wait_and_submits_are_refused(folder):
    async def run():
        async with AsyncLLM(folder, **SIZES) as llm:
            stream = llm.generate(PROMPTS[0], greedy(60, ignore_eos=True))
            await anext(stream)
            await llm.sleep()
            assert llm.is_asleep
            with pytest.raises(RuntimeError, match="asleep"):
                await llm.submit(PROMPTS[1:2], GREEDY)
            count = (await llm.stats()).num_output_tokens
            await asyncio.sleep(0.05)
            assert (await llm.stats()).num_output_tokens == count < 60
            await llm.wake()
            return [output async for output in stream][-1].outputs[0].token_ids

    assert asyncio.run(run()) == own_answer(tiny_model(), PROMPTS[0], 60)


@pytest.mark.parametrize("form", ["fused", "suffix", "host"])
@pytest.mark.parametrize("seed", range(3))
def test_sleeps_updates_aborts_and_steps_in_any_order_leave_the_tokens(seed, form, folder):
    rng = random.Random(f"{form} {seed}")
    extra = {"prefix_cache_host_bytes": 2**22, "num_kv_blocks": 20} if form == "host" else FORMS[form]
    weights = {name: tensor.clone() for name, tensor in tiny_model().state_dict().items()}
    prompts = [prompt + tail for prompt in PROMPTS for tail in ([], [5], [6, 7])]
    with LLM(folder, **SIZES | extra) as llm:
        engine = llm._engine
        asked = {}
        for turn in range(400):
            acts = ["wake"] if llm.is_asleep else ["add", "add", *["step"] * 20, "sleep"]
            act = rng.choice([*acts, "abort", "idle", "update"])
            if act == "add":
                asked[str(turn)] = rng.choice(prompts)
                submit(engine, str(turn), asked[str(turn)], GREEDY)
            elif act == "abort" and engine.requests:
                engine.abort(rng.choice(list(engine.requests)))
            elif act in ("sleep", "wake"):
                getattr(llm, act)()
            elif act == "update" and rng.random() < 0.3:
                llm.update_weights(weights)
            elif act == "idle" or act == "step":
                with llm._lock:  # a thread of the LLM uses its idle time, too
                    engine.step() if act == "step" else engine._in_flight or engine.use_idle_time(captures=True)
        llm.wake()
        while engine.has_unfinished:
            engine.step()
        for output in engine.outputs:
            assert output.outputs[0].token_ids == own_answer(tiny_model(), asked[output.request_id], NUM_TOKENS)
        assert len(engine.outputs) > 3
        engine.outputs.clear()
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("order", ["pause sleep wake resume", "sleep pause resume wake", "pause sleep resume wake"])
def test_pauses_and_sleep_cross_in_any_order(order, folder):
    """Trainers pause, sleep, update, wake and go on; each state refuses calls until it has ended."""
    calls = {"pause": "pause_generation", "resume": "resume_generation", "sleep": "sleep", "wake": "wake"}
    with LLM(folder, **SIZES) as llm:
        right = token_ids(generate(llm, PROMPTS, GREEDY))
        for name in order.split():
            getattr(llm, calls[name])()
            if llm.is_asleep or llm.is_paused:
                with pytest.raises(RuntimeError, match=r"wake|resume_generation"):
                    generate(llm, PROMPTS, GREEDY)
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == right
