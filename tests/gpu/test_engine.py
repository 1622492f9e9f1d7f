"""Engines on a GPU, with and without CUDA graphs and overlap: token for token the same as `transformers`."""

import asyncio
import functools
import gc
import itertools
import os
import random
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.fast.gpu.graph_pool import GraphPool
from nanovllm.fast.gpu.rehearsal import rehearse
from nanovllm.models import default_model
from tests.support import logprobs, samples
from tests.support.equality import model, reference
from tests.support.equality import prompts as long_prompts
from tests.support.llms import check_engine
from tests.support.other_models import small
from tests.support.overlap import requests
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, favour_next_tokens, tiny_model, tiny_tokenizer, widen

OPTIONS = {"num_kv_blocks": 200, "max_model_len": 300, "max_num_seqs": 32}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
WAYS = {
    "graphs, overlapped": {},
    "graphs, one by one": {"overlap": False},
    "no graphs, overlapped": {"cuda_graphs": False},
    "no graphs, one by one": {"cuda_graphs": False, "overlap": False},
}


def open_llm(module=None, **options):
    return LLM(module or model("llama"), tokenizer=tiny_tokenizer(), **(OPTIONS | options))


def answers(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    check_engine(llm)
    return [
        (o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason, o.outputs[0].stop_reason, o.error)
        for o in outputs
    ]


@functools.cache
def expected(family):
    return [reference(model(family), prompt) for prompt in long_prompts()]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family):
    with open_llm(model(family)) as llm:
        for name in ("cold", "warm"):
            tokens = [answer[0] for answer in answers(llm, long_prompts(), GREEDY)]
            assert tokens == expected(family), f"with a {name} cache"
        for prompt, right in zip(long_prompts(), expected(family), strict=True):
            assert answers(llm, [prompt], GREEDY)[0][0] == right


@functools.cache
def answers_in_one_way(way, pool):
    small = {"num_kv_blocks": 17, "max_model_len": 230, "block_size": 16, "max_num_batched_tokens": 80}
    with open_llm(**WAYS[way], **(small if pool == "tiny" else {})) as llm:
        result = answers(llm, *requests())
        assert (llm.stats().num_preemptions > 0) == (pool == "tiny")
        assert answers(llm, *requests()) == result, "with a warm cache"
        return result


def test_steps_of_chunks_alone_sample_nothing_without_graphs():
    with open_llm(enforce_eager=True, max_num_batched_tokens=64) as llm:
        outputs = llm.generate(long_prompts()[10:14], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected("llama")[10:14]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pool", ["roomy", "tiny"])
def test_requests_that_end_in_every_way_end_the_same_in_every_way_of_stepping(way, pool):
    """Stop tokens and strings, lengths, seeds, filters, minima, shared prefixes; float32. Preempted ones, too."""
    with LLM(model("llama"), tokenizer=tiny_tokenizer(), enforce_eager=True, **OPTIONS) as llm:
        assert answers_in_one_way(way, pool) == answers(llm, *requests())


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_equal_those_of_transformers(way):
    """Of outputs and prompts, in one batch with requests that ask for none; float32."""
    module, (prompts, params) = model("qwen3"), logprobs.mixed_requests()
    with open_llm(module, **WAYS[way]) as llm:
        for output, wanted in zip(llm.generate(prompts, params, use_tqdm=False), params, strict=True):
            logprobs.assert_right(module, output, wanted, atol=1e-3)


def test_eager_engines_call_no_kernel_that_would_be_compiled(monkeypatch):
    """A machine without a C compiler has no other engine."""

    def forbidden(*_):
        raise AssertionError("Triton compiles at the first call")

    monkeypatch.setattr("nanovllm.features.penalties.penalties._kernel", forbidden)
    monkeypatch.setattr("nanovllm.features.logprobs.logprobs._kernel", forbidden)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, **own)
        for own in ({"logprobs": 2}, {"prompt_logprobs": 1}, {"repetition_penalty": 1.3}, {"allowed_token_ids": [3, 9]})
    ]
    with open_llm(enforce_eager=True) as llm:
        assert all(answer[2] == "length" and answer[4] is None for answer in answers(llm, [[5, 6, 7]] * 4, params))


@pytest.mark.parametrize("way", WAYS)
def test_samples_bad_words_and_own_processors_are_the_same_in_every_way_of_stepping(way):
    prompts, params = samples.requests()
    results = []
    for options in ({"enforce_eager": True}, WAYS[way]):
        with open_llm(**options) as llm:
            results.append(samples.answers(llm.generate(prompts, params, use_tqdm=False)))
    assert results[0] == results[1]


def test_penalties_and_log_probabilities_within_graphs_are_those_of_an_eager_engine():
    """In steps with requests that ask for neither, some of them too few for a graph; float32."""
    own = [
        {"repetition_penalty": 1.3}, {}, {"logprobs": 3}, {"frequency_penalty": 0.3, "logprobs": 1, "top_k": 40},
    ]  # fmt: skip
    params = [
        SamplingParams(seed=n, temperature=0.8 * (n % 3), max_tokens=10 + 4 * n, **own[n % len(own)]) for n in range(8)
    ]
    results = []
    for options in ({"enforce_eager": True}, {}):
        with open_llm(**options) as llm:
            outputs = llm.generate([[5, 6, 7 + n] for n in range(8)], params, use_tqdm=False)
            if options == {}:
                assert any(head.penalises for head in llm._engine.model_runner.executor._heads.graphs)
        results.append([output.outputs[0] for output in outputs])
    for eager, captured, wanted in zip(*results, params, strict=True):
        assert captured.token_ids == eager.token_ids
        assert (captured.logprobs is None) == (wanted.logprobs is None)
        for ours, theirs in zip(captured.logprobs or (), eager.logprobs or (), strict=True):
            assert ours.keys() == theirs.keys()
            for token_id, value in ours.items():
                assert abs(value.logprob - theirs[token_id].logprob) < 1e-3 and value.rank == theirs[token_id].rank


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_captured_steps_compute_what_uncaptured_ones_do_in_bfloat16(family, tmp_path, monkeypatch):
    """The same kernels on the same shapes, so to the last bit.

    In a compiler cache of its own: where other processes fill it meanwhile, the second engine may take the tiling that
    one of them found fastest, which rounds otherwise.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module = tiny_model(family, dtype=torch.bfloat16).cuda()
    results = []
    for graphs in (True, False):
        with open_llm(module, cuda_graphs=graphs) as llm:
            results.append([answer[0] for answer in answers(llm, long_prompts(), GREEDY)])
    assert results[0] == results[1]


@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_bfloat16_logits_are_within_its_rounding_of_float32(backend):
    """No further from it than the logits of `transformers` in bfloat16 are, all prompts together."""
    exact, module = tiny_model("qwen3").cuda(), tiny_model("qwen3", dtype=torch.bfloat16).cuda()
    ours, theirs = [], []
    with open_llm(module, attention_backend=backend, overlap=False) as llm:
        sampler = llm._engine.model_runner.sampler
        captured, sample = [], sampler.sample
        sampler.sample = lambda logits, *rest: captured.append(logits.float().clone()) or sample(logits, *rest)
        as_they_are = (lambda token_ids, logits: logits,)  # makes the host's sampler see the logits
        params = SamplingParams(logits_processors=as_they_are, max_tokens=1)
        for prompt in long_prompts():
            llm.generate([prompt], params, use_tqdm=False)
            with torch.no_grad():
                inputs = torch.tensor([prompt], device="cuda")
                right = exact(inputs).logits[0, -1]
                theirs.append((module(inputs).logits[0, -1].float() - right).norm() / right.norm())
            ours.append((captured[-1][0] - right).norm() / right.norm())
    assert sum(ours) / len(ours) < 1.25 * sum(theirs) / len(theirs)


def test_every_number_of_requests_finds_a_graph_that_holds_it():
    choice = random.Random(5)
    prompts = [[choice.randrange(VOCAB_SIZE) for _ in range(choice.randint(1, 40))] for _ in range(21)]
    with open_llm(max_num_seqs=21) as llm:
        alone = [answers(llm, [prompt], GREEDY)[0] for prompt in prompts]
        for count in range(1, 22):
            assert answers(llm, prompts[:count], GREEDY) == alone[:count]
        executor = llm._engine.model_runner.executor
        assert max(shape.num_decodes for shape in executor._forwards.graphs) >= 21
        most = executor._buckets.max_decodes
        assert any(shape.num_decodes == most and not shape.num_tiles for shape in executor._forwards.graphs)
        assert {head.num_samples for head in executor._heads.graphs} <= set(executor._buckets.sample_counts)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 7, 300])
def test_any_limit_of_requests_can_be_set(max_num_seqs):
    with open_llm(max_num_seqs=max_num_seqs, num_kv_blocks=600) as llm:
        assert [answer[0] for answer in answers(llm, long_prompts(), GREEDY)] == expected("llama")


def test_steps_of_calls_on_different_streams_come_one_after_the_other():
    params = SamplingParams(temperature=0.0, max_tokens=30)
    with open_llm() as llm:
        (alone,) = answers(llm, [[5, 6, 7]], params)
        streams = [torch.cuda.Stream() for _ in range(3)]
        seen = llm.stream([5, 6, 7], params)
        for number in range(30):
            with torch.cuda.stream(streams[number % 3]):
                last = next(seen)
        assert last.outputs[0].token_ids == alone[0]


def test_filters_do_not_make_the_host_wait():
    """Torch raises for every operation that would: all of a step but the reading of its tokens."""
    params = [SamplingParams(seed=n, max_tokens=12, **f) for n, f in enumerate(
        [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.01}, {"min_tokens": 5, "stop_token_ids": (3,)}]
    )]  # fmt: skip
    with open_llm() as llm:
        expected = answers(llm, [[5, 6, 7]] * 5, params)  # captures what is needed
        launch = llm._engine.model_runner.launch_step

        def checked(run, *arguments):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return run(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        llm._engine.model_runner.launch_step = lambda *step: functools.partial(checked, checked(launch, *step))
        assert answers(llm, [[5, 6, 7]] * 5, params) == expected


def test_graphs_that_were_not_used_for_longest_make_room(monkeypatch):
    monkeypatch.setattr("nanovllm.fast.gpu.forward_graphs.MAX_GRAPHS", 3)
    with open_llm() as llm:
        tokens = [answer[0] for answer in answers(llm, long_prompts(), GREEDY)]
        assert tokens == expected("llama")
        assert len(llm._engine.model_runner.executor._forwards.graphs) <= 3


def mixed_company(seed):
    """Requests that come to steps of many shapes: many short prompts, some long, answers of any length."""
    choice = random.Random(seed)
    prompts = [
        [
            choice.randrange(VOCAB_SIZE)
            for _ in range(choice.choice([1, choice.randint(2, 20), choice.randint(20, 200)]))
        ]
        for _ in range(40)
    ]
    params = [
        SamplingParams(temperature=choice.choice([0.0, 0.9]), seed=n, max_tokens=choice.randint(1, 60), **extra)
        for n, extra in enumerate(choice.choices([{}, {}, {"logprobs": 1}, {"repetition_penalty": 1.3}], k=40))
    ]
    return prompts, params


@pytest.mark.parametrize("prepared", [True, False])
def test_steps_of_any_shape_run_without_a_capture_once_an_engine_serves(tmp_path, caplog, prepared):
    """As larger shapes or without graphs, with the tokens of steps that run without any graph."""
    module = model("llama")
    module.save_pretrained(tmp_path)
    results = []
    for options in ({"enforce_eager": True}, {}):
        with open_llm(tmp_path, max_num_batched_tokens=160, **options) as llm:
            if options == {} and prepared:
                while llm._engine.model_runner.capture_ahead():
                    pass
            with caplog.at_level("DEBUG", logger="nanovllm"):
                caplog.clear()
                outputs = llm.generate(*mixed_company(3), use_tqdm=False)
                outputs += llm.generate(*mixed_company(4), use_tqdm=False)
                # A head of rare options alone, which takes a few milliseconds, is captured where it is seen often.
                assert not [
                    record for record in caplog.records if record.getMessage().startswith("captured GraphShape")
                ]
            results.append([output.outputs[0].token_ids for output in outputs])
    assert results[0] == results[1]


def test_shapes_that_were_missing_are_captured_ahead_of_the_usual_ones(tmp_path):
    model("llama").save_pretrained(tmp_path)
    with open_llm(tmp_path, max_num_batched_tokens=160) as llm:
        runner, (prompts, params) = llm._engine.model_runner, mixed_company(5)
        executor = runner.executor
        llm.generate(prompts, params, use_tqdm=False)
        while rehearse(runner, runner.paths.num_rehearsed):  # as idle time does first
            runner.paths.num_rehearsed += 1
        missed = set(executor._forwards.missed) - set(executor._forwards.graphs)
        heads = executor._heads  # those of rare options come first
        for _ in {*missed, *(set(heads._num_steps) - set(heads.graphs))}:
            assert runner.capture_ahead()
        assert missed <= set(executor._forwards.graphs)
        before = set(executor._forwards.missed)
        llm.generate(prompts, params, use_tqdm=False)
        assert set(executor._forwards.missed) <= before


def captured(executor):
    """Forward passes, and heads without options: those with some are captured when steps use them."""
    return set(executor._forwards.graphs), {head for head in executor._heads.graphs if not head.is_rare}


def test_idle_time_after_a_change_of_weights_captures_what_start_up_did(tmp_path):
    model("llama").save_pretrained(tmp_path)
    with open_llm(tmp_path, max_num_batched_tokens=160) as llm:
        runner = llm._engine.model_runner
        executor = runner.executor
        at_start = captured(executor)
        llm.weights_changed()
        assert not executor._forwards.graphs and not executor._heads.graphs
        assert runner.capture_ahead()
        assert captured(executor) == at_start


def test_an_interrupt_while_graphs_are_captured_anew_leaves_the_rest_to_the_next_call(tmp_path, monkeypatch):
    model("llama").save_pretrained(tmp_path)
    with open_llm(tmp_path, max_num_batched_tokens=160) as llm:
        executor = llm._engine.model_runner.executor
        at_start = captured(executor)
        capture, captures = executor._pool.capture, itertools.count()

        def interrupted(run, **options):
            if next(captures) == 5:
                raise KeyboardInterrupt
            return capture(run, **options)

        monkeypatch.setattr(executor._pool, "capture", interrupted)
        llm.weights_changed()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(long_prompts(), GREEDY, use_tqdm=False)
        assert len(executor._forwards.graphs) == 5
        assert [answer[0] for answer in answers(llm, long_prompts(), GREEDY)] == expected("llama")
        assert captured(executor) == at_start


def test_a_pool_whose_first_capture_was_interrupted_takes_the_next():
    numbers = torch.ones(8, device="cuda")

    def interrupted():
        numbers.add_(1)
        if torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt

    pool = GraphPool(numbers.device)
    with suppress(KeyboardInterrupt):
        pool.capture(interrupted)
    gc.collect()  # the graph
    graph = pool.capture(lambda: numbers.add_(1))
    graph.replay()
    assert numbers.tolist() == [4.0] * 8  # two trial runs and the replay


@pytest.mark.parametrize("graphs", [True, False])
def test_a_live_module_whose_owner_makes_its_logits_depend_on_more_than_hidden_states_is_computed_whole(graphs):
    module = tiny_model("llama").cuda()
    with open_llm(module, cuda_graphs=graphs) as llm:
        before = [answer[0] for answer in answers(llm, long_prompts(), GREEDY)]
        favour_next_tokens(module)
        after = [answer[0] for answer in answers(llm, long_prompts(), GREEDY)]
        assert after == [reference(module, prompt) for prompt in long_prompts()] != before


@pytest.mark.parametrize("family", ["OPT", "GPT2"])
def test_models_whose_head_is_not_computed_apart_are_captured_too(tmp_path, family):
    fields = {"OPT": {"ffn_dim": 64, "word_embed_proj_dim": 64},
                              "GPT2": {"model_class": "GPT2LMHeadModel"}}[family]  # fmt: skip
    module = small(family, **fields)
    widen(module)
    module.save_pretrained(tmp_path)
    module = module.cuda()
    prompts = [[5, 6, 7], [8] * 40, [9, 10] * 20]
    with open_llm(tmp_path, max_model_len=120, num_kv_blocks=64) as llm:
        assert llm._engine.model_runner.executor._splits_head == (family == "GPT2")
        tokens = [answer[0] for answer in answers(llm, prompts, GREEDY)]
    assert tokens == [reference(module, prompt) for prompt in prompts]


def open_preparing(folder):
    options = OPTIONS | {"max_num_seqs": 8, "max_num_batched_tokens": 160, "block_size": 64}
    return AsyncLLM(folder, tokenizer=tiny_tokenizer(), prepares_when_idle=True, **options)


async def prepared_graphs(llm):
    """Wait until all that usually comes is captured."""
    executor = llm._engine_thread._engine.model_runner.executor
    end = time.monotonic() + 120
    while executor._forwards.usual and time.monotonic() < end:
        await asyncio.sleep(0.1)
    await llm.stats()  # the last one is captured
    captured = dict(executor._forwards.graphs)
    assert len(captured) > 8 and set(executor._buckets.usual()) <= set(captured)
    return captured


def test_an_engine_in_a_thread_captures_what_usually_comes_while_it_has_nothing_to_do(tmp_path):
    module = model("llama")
    module.save_pretrained(tmp_path)

    async def run():
        async with open_preparing(tmp_path) as llm:
            captured = await prepared_graphs(llm)
            prompts = [prompt for prompt in long_prompts() if len(prompt) < 160]
            streams = [llm.generate(prompt, GREEDY, output_kind="final") for prompt in prompts]
            for prompt, stream in zip(prompts, streams, strict=True):
                (output,) = [output async for output in stream]  # one after the other
                assert output.outputs[0].token_ids == reference(module, prompt)
            assert await prepared_graphs(llm) == captured  # and none more was needed

    asyncio.run(run())


def test_engines_of_one_process_prepare_steps_without_disturbing_one_another(tmp_path):
    module = model("llama")
    module.save_pretrained(tmp_path)

    async def run():
        async with open_preparing(tmp_path) as first:
            await asyncio.sleep(0.6)  # it has begun
            async with await asyncio.to_thread(open_preparing, tmp_path) as second:
                await asyncio.gather(prepared_graphs(first), prepared_graphs(second))
                for llm in (first, second):
                    (output,) = [o async for o in llm.generate([5, 6, 7], GREEDY, output_kind="final")]
                    assert output.outputs[0].token_ids == reference(module, [5, 6, 7])

    asyncio.run(run())


def test_a_request_whose_logits_are_not_finite_ends_and_its_neighbours_go_on():
    module = tiny_model().cuda()
    with torch.no_grad():
        module.get_input_embeddings().weight[99] = float("nan")
    good = [[5, 6, 7], [8] * 40]
    with open_llm(module) as llm:
        alone = answers(llm, good, GREEDY)
        first, bad, second = answers(llm, [good[0], [4, 99, 3] * 20, good[1]], GREEDY)
        assert bad[2] == "error" and "not finite" in bad[4]
        assert [first, second] == alone
        assert answers(llm, good, GREEDY) == alone


def test_a_live_module_is_followed_through_updates_replacements_and_hooks():
    module = tiny_model().cuda()
    prompt = [5, 6, 7, 8] * 9
    called = []
    with open_llm(module) as llm:
        assert answers(llm, [prompt], GREEDY)[0][0] == reference(module, prompt)
        with torch.no_grad():
            for parameter in module.parameters():  # in place: the graphs stay
                parameter.copy_(parameter.flip(0))
        assert answers(llm, [prompt], GREEDY)[0][0] == reference(module, prompt)
        layer = module.model.layers[0].mlp
        layer.up_proj.weight = torch.nn.Parameter(-layer.up_proj.weight.detach())  # elsewhere: they are captured anew
        assert answers(llm, [prompt], GREEDY)[0][0] == reference(module, prompt)
        hook = module.lm_head.register_forward_hook(lambda *_: called.append(1))
        assert answers(llm, [prompt], GREEDY)[0][0] == reference(module, prompt)
        assert len(called) >= 20 + 20  # the engine's steps and the reference's
        hook.remove()
        assert answers(llm, [prompt], GREEDY)[0][0] == reference(module, prompt)
        module.model.layers[1].mlp.act_fn = torch.nn.Tanh()  # no weight moves
        assert answers(llm, [prompt], GREEDY)[0][0] == reference(module, prompt)


def test_a_model_of_its_own_merges_products_and_answers_the_same(tmp_path):
    """q/k/v with biases (Qwen2) and without, gate/up; and products of few rows by a kernel of our own."""
    for family, dtype in (("qwen2", torch.float32), ("llama", torch.float32), ("qwen3", torch.bfloat16)):
        module = tiny_model(family, dtype=dtype)
        folder = tmp_path / family
        module.save_pretrained(folder)
        with LLM(folder, tokenizer=tiny_tokenizer(), **OPTIONS) as llm:
            merged = [m for m in llm._engine.model_runner.binding.model.modules() if type(m).__name__ == "MergedLinear"]
            assert len(merged) == 2 * 2
            assert len(llm._engine.model_runner.binding.rotary_changes) == 2, (
                "norms, rotary embedding and KV write in one"
            )
            outputs = answers(llm, long_prompts(), GREEDY)
        if dtype == torch.float32:
            assert [answer[0] for answer in outputs] == [reference(module.cuda(), prompt) for prompt in long_prompts()]


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other tests take memory of the same GPU meanwhile")
def test_the_pool_leaves_what_other_processes_hold():
    """Another process takes a quarter of the GPU; the default pool is smaller by about as much."""
    script = (
        "import sys, torch; total = torch.cuda.mem_get_info()[1]\n"
        "held = torch.empty(total // 4, dtype=torch.uint8, device='cuda')\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    # More than any GPU has, if every request grew to its limit: so it is the memory that decides.
    module = tiny_model(num_layers=8, max_position_embeddings=65_536).cuda()
    total = torch.cuda.mem_get_info()[1]

    def pool_bytes():
        torch.cuda.empty_cache()
        with LLM(module, enforce_eager=True) as llm:
            blocks = llm.config.num_kv_blocks
            assert blocks < llm.config.max_num_seqs * 65_536 // llm.config.block_size
            return blocks * llm._engine.model_runner.binding.caches.num_bytes(llm.config.block_size)

    before = pool_bytes()
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        beside = pool_bytes()
        other.communicate()
    assert 0.85 * total / 4 < before - beside < 1.2 * total / 4


def test_a_pool_that_does_not_fit_says_what_there_is():
    with pytest.raises((ValueError, torch.OutOfMemoryError), match=r"\d"):
        LLM(model("llama"), max_model_len=2000, gpu_memory_utilization=0.001)
    with pytest.raises(ValueError, match="num_kv_blocks"):
        LLM(model("llama"), max_model_len=2000, num_kv_blocks=3)


@pytest.mark.skipif(
    not default_model._is_ready(default_model.cache_root() / default_model._FOLDER_NAME),
    reason="the embedded default model is not in this machine's cache",
)
def test_the_default_model_answers_as_transformers_does_in_float32():
    folder = default_model.ensure_default_model()
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    questions = [
        "What is the capital of France?", "Write a haiku about rivers.", "2 + 3 =", "Explain why the sky is blue.",
        "List three fruits.", "Who wrote Hamlet?", "Translate 'good morning' into Spanish.", "Tell me a story.",
    ]  # fmt: skip
    with LLM(default_model.DEFAULT_MODEL, dtype="float32", max_model_len=1024) as llm:
        prompts = llm.apply_chat_template([[{"role": "user", "content": question}] for question in questions])
        prompts += [(prompts[0] * 30)[: 64 * n + shift] for n in (1, 4, 9) for shift in (-1, 0, 1)]
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    for prompt, tokens in zip(prompts, outputs, strict=True):
        inputs = torch.tensor([prompt], device="cuda")
        with torch.no_grad():
            right = module.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=40, min_new_tokens=40,
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        assert tokens == right[0, len(prompt) :].tolist()
