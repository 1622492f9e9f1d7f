"""Updates, pauses and sleep of an engine of two ranks: each takes its part, and all of them or none change."""

import os
import random
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, AsyncLLM
from nanovllm.fast.host.memory import LazyMemory
from nanovllm.features.updates import sleeping
from nanovllm.kv_cache import CacheMemory
from tests.support.layer_kinds import own_answer
from tests.support.llms import assert_idle_and_whole, generate, greedy, submit, token_ids
from tests.support.other_models import small
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

pytestmark = pytest.mark.usefixtures("programs_are_forked")

NUM_TOKENS = 10
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
SIZES = {
    "dtype": "float32", "num_kv_blocks": 65, "max_num_seqs": 6, "max_model_len": 160, "max_num_batched_tokens": 64,
    "tensor_parallel_size": 2,
}  # fmt: skip
PROMPTS = random_prompts(5, low=3, high=70, seed=8)


def answers(model, prompts=PROMPTS):
    return [own_answer(model, prompt, NUM_TOKENS) for prompt in prompts]


def answered(llm, prompts=PROMPTS):
    return token_ids(generate(llm, prompts, GREEDY))


@pytest.fixture(scope="module")
def models():
    return [tiny_model(seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


def test_tokens_are_those_of_the_new_weights_with_a_cold_and_a_warm_cache(models, folder):
    with LLM(folder, **SIZES) as llm:
        for model in (models[1], models[2], models[0]):
            llm.update_weights(model.state_dict())
            outputs = generate(llm, PROMPTS, GREEDY)
            assert token_ids(outputs) == answers(model) and not any(output.num_cached_tokens for output in outputs)
            warm = generate(llm, PROMPTS, GREEDY)
            assert token_ids(warm) == answers(model) and any(output.num_cached_tokens for output in warm)
        assert_idle_and_whole(llm)
        (worker,) = llm._engine.model_runner.workers.process_ids
        for process in (os.getpid(), worker):  # nobody keeps the memory by which weights came
            assert "memfd:nanovllm" not in Path(f"/proc/{process}/maps").read_text(encoding="utf-8")
            files = Path(f"/proc/{process}/fd").iterdir()
            assert not any("memfd:nanovllm" in os.readlink(file) for file in files if file.is_symlink())


def mixtral(seed):
    torch.manual_seed(seed)
    model = small("Mixtral", vocab_size=512, num_local_experts=4, intermediate_size=96, num_key_value_heads=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval()


KINDS = {
    "biases": lambda seed: tiny_model("qwen2", seed=seed),
    "biases of rows": lambda seed: tiny_model("llama", seed=seed, attention_bias=True, mlp_bias=True),
    "tied, padded": lambda seed: tiny_model("llama", seed=seed, tie_word_embeddings=True, vocab_size=509),
    "one KV head": lambda seed: tiny_model("mistral", seed=seed),
    "experts": mixtral,
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_and_then_a_part_of_them(kind, tmp_path):
    first, second, third = map(KINDS[kind], range(3))
    first.save_pretrained(tmp_path)
    with LLM(tmp_path, skip_tokenizer_init=True, **SIZES) as llm:
        assert answered(llm) == answers(first)
        llm.update_weights(second.state_dict())
        assert answered(llm) == answers(second)
        weights = third.state_dict()
        del third
        if kind == "tied, padded":
            del weights["lm_head.weight"]
        names = {name.split(".", 3)[-1] if ".layers." in name else name for name in weights}
        for end in sorted(names):  # one weight of each layer alone
            some = {name: tensor for name, tensor in weights.items() if name.endswith(end)}
            llm.update_weights(lambda some=some: some.items())
            second.load_state_dict(some, strict=False)
            assert answered(llm, PROMPTS[:2]) == answers(second, PROMPTS[:2]), end


@pytest.mark.costly
@pytest.mark.parametrize("keeps_kv", [False, True])
def test_requests_that_stream_go_on_with_the_new_weights(keeps_kv, models, folder):
    with LLM(folder, overlap=True, **SIZES) as llm:
        engine = llm._engine
        for number, prompt in enumerate(PROMPTS):
            submit(engine, str(number), prompt, GREEDY)
        for _ in range(7):
            engine.step()
        assert engine._in_flight
        heads = {name: request.sequences[0].output_token_ids for name, request in engine.requests.items()}
        assert len(heads) == len(PROMPTS) and any(heads.values())
        llm.update_weights(models[1].state_dict(), keep_kv=keeps_kv)
        assert bool(engine.scheduler.running) == keeps_kv
        while engine.has_unfinished:
            engine.step()
        for output in engine.outputs:
            head = heads[output.request_id]
            tokens = output.outputs[0].token_ids
            prompt = PROMPTS[int(output.request_id)] + head
            assert tokens[: len(head)] == head and len(tokens) == NUM_TOKENS
            if not keeps_kv:
                assert tokens[len(head) :] == own_answer(models[1], prompt, NUM_TOKENS - len(head))
        engine.outputs.clear()
        outputs = generate(llm, PROMPTS, GREEDY)  # they find no block of the weights before
        assert token_ids(outputs) == answers(models[1])
        assert not keeps_kv or not any(output.num_cached_tokens for output in outputs)


class OpenHere:
    """Shared tensors that another process cannot open."""

    def __init__(self, values):
        self.process = os.getpid()
        self.values = {name: tensor for name, (tensor, _) in values.items()}

    def __getstate__(self):
        return {"process": self.process}

    def open(self):
        if os.getpid() != self.process:
            raise ValueError("no such memory")
        return self.values


@pytest.mark.costly
@pytest.mark.parametrize(
    "change, error",
    [
        (lambda w: w | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}, "no weight 'model.layers.9"),
        (lambda w: w | {"lm_head.weight": w["lm_head.weight"][:256]}, r"lm_head.weight has shape \(256, 384\), .*512"),
        (lambda w: w | {"lm_head.weight": w["lm_head.weight"].int()}, "dtype torch.int32"),
        (lambda w: {}, "without weights changes nothing"),
        (None, "^rank 1: ValueError: no such memory$"),
    ],
)
def test_an_update_that_one_rank_refuses_changes_none(change, error, models, folder, monkeypatch):
    with LLM(folder, **SIZES) as llm:
        right = answers(models[0], PROMPTS[-2:])
        assert answered(llm, PROMPTS[-2:]) == right
        weights = models[1].state_dict()
        runner = llm._engine.model_runner
        if change is None:
            monkeypatch.setattr(runner, "share", OpenHere)
        with pytest.raises((ValueError, RuntimeError), match=error):
            llm.update_weights(change(weights) if change else weights)
        assert not hasattr(runner, "staged_weights")
        outputs = generate(llm, PROMPTS[-2:], GREEDY)
        assert token_ids(outputs) == right and any(output.num_cached_tokens for output in outputs)
        monkeypatch.undo()
        llm.update_weights(weights)
        assert answered(llm, PROMPTS[-2:]) == answers(models[1], PROMPTS[-2:])


@pytest.mark.full
def test_updates_and_pauses_between_steps_leave_no_stale_kv(models, folder):
    """Each token is that of the whole prefix under the weights in force when it is drawn."""
    rng = random.Random(3)
    known = {}

    def next_token(version, tokens):
        if (version, tokens) not in known:
            known[version, tokens] = own_answer(models[version], list(tokens), 1)[0]
        return known[version, tokens]

    with LLM(folder, overlap=False, **SIZES) as llm:
        engine = llm._engine
        version = 0
        sequences = {}
        for turn in range(120):
            act = rng.choice(["add", "add", "step", "step", "step", "step", "abort", "update", "pause"])
            if act == "add":
                submit(engine, str(turn), prompt := rng.choice(PROMPTS), greedy(6, ignore_eos=True))
                sequences[engine.requests[str(turn)].sequences[0]] = len(prompt)
            elif act == "abort" and engine.requests:
                engine.abort(rng.choice(list(engine.requests)))
            elif act == "update":
                version = rng.randrange(3)
                llm.update_weights(models[version].state_dict())
            elif act == "pause":
                (llm.resume_generation if llm.is_paused else llm.pause_generation)()
            count = engine.num_output_tokens()
            engine.step()
            assert engine.num_output_tokens() == count or not llm.is_paused
            engine.outputs.clear()
            for sequence, seen in sequences.items():
                tokens = tuple(sequence.token_ids)
                for end in range(seen, len(tokens)):
                    assert tokens[end] == next_token(version, tokens[:end])
                sequences[sequence] = len(tokens)
        assert sum(seen for seen in sequences.values()) > 300
        llm.resume_generation()
        while engine.has_unfinished:
            engine.step()
        engine.outputs.clear()
        assert_idle_and_whole(llm)


@pytest.mark.full
async def test_an_asynchronous_engine_is_updated_while_it_is_paused(models, folder):
    async with AsyncLLM(folder, **SIZES) as llm:
        stream = llm.generate(PROMPTS[0], greedy(60, ignore_eos=True))
        head = (await anext(stream)).outputs[0].token_ids
        await llm.pause_generation()
        await llm.update_weights(models[1].state_dict())
        assert await llm.is_paused()
        await llm.resume_generation()
        async for output in stream:
            tokens = output.outputs[0].token_ids
        assert tokens[: len(head)] == head and len(tokens) == 60
        async for output in llm.generate(PROMPTS[1], GREEDY):
            tokens = output.outputs[0].token_ids
        assert tokens == own_answer(models[1], PROMPTS[1], NUM_TOKENS)


def fill_caches(runner, value):
    for _, caches in runner.binding.caches._together:
        caches.fill_(value)


def check_caches_are_zero(runner):
    assert not any(caches.any() for _, caches in runner.binding.caches._together)
    assert not hasattr(runner, "asleep")


def lacks_memory_there(runner):
    if runner.workers is None:
        raise torch.OutOfMemoryError("others have it")


def resident_bytes(process):
    return 4096 * int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])


def test_every_rank_gives_its_memory_back_until_it_wakes(models, folder):
    with LLM(folder, **SIZES | {"num_kv_blocks": 8000}) as llm:
        runner = llm._engine.model_runner
        runner.together(fill_caches, 0.5)
        num_bytes = sum(caches.nbytes for _, caches in runner.binding.caches._together)
        processes = os.getpid(), *runner.workers.process_ids
        before = [resident_bytes(process) for process in processes]
        llm.sleep()
        after = [resident_bytes(process) for process in processes]
        assert all(one - other > 0.9 * num_bytes > 2**26 for one, other in zip(before, after, strict=True))
        llm.wake()
        runner.together(check_caches_are_zero)
        assert answered(llm) == answers(models[0])


@pytest.mark.full
def test_requests_go_on_after_sleep_and_an_update_within_it(models, folder):
    with LLM(folder, overlap=True, **SIZES) as llm:
        engine = llm._engine
        for number in range(7):
            submit(engine, str(number), PROMPTS[number % 5], GREEDY)
            engine.step()
        assert engine.scheduler.running and engine._in_flight
        llm.sleep()
        llm.sleep(2)
        llm.wake()
        while engine.has_unfinished:
            engine.step()
        right = answers(models[0])
        assert all(output.outputs[0].token_ids == right[int(output.request_id) % 5] for output in engine.outputs)
        assert len(engine.outputs) == 7
        engine.outputs.clear()
        llm.sleep()
        with pytest.raises(RuntimeError, match=r"asleep .* call wake\(\)"):
            generate(llm, PROMPTS)
        llm.update_weights(models[2].state_dict())
        llm.wake()
        assert answered(llm) == answers(models[2])
        assert_idle_and_whole(llm)
        llm.sleep()  # it is closed asleep


def test_where_one_rank_lacks_memory_all_sleep_on(models, folder, monkeypatch):
    monkeypatch.setattr(sleeping, "_keeps_addresses", lambda _: False)  # storages of this rank lose their bytes
    monkeypatch.setattr(LazyMemory, "zeros", CacheMemory.zeros)
    with LLM(folder, enforce_eager=True, **SIZES) as llm:
        binding = llm._engine.model_runner.binding
        storages = [caches.untyped_storage() for _, caches in binding.caches._together]
        assert answered(llm) == answers(models[0])
        llm.sleep()
        assert not any(storage.nbytes() for storage in storages)
        with monkeypatch.context() as patch:
            take = sleeping._take_caches
            patch.setattr(sleeping, "on_all_ranks", lambda runner, function, *rest: (
                take(runner), runner.together(lacks_memory_there)) if function is take
                else runner.together(function, *rest))  # fmt: skip
            with pytest.raises(torch.OutOfMemoryError, match=r"^rank 1: OutOfMemoryError: others have it$"):
                llm.wake()
        assert llm.is_asleep and not any(storage.nbytes() for storage in storages)
        llm.wake()
        assert answered(llm) == answers(models[0])
