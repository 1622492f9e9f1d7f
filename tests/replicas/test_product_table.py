"""Every public option, argument and call that replicas, or several ranks, do not refuse is run there."""

import asyncio
import functools
import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanovllm import LLM, AsyncLLM, BeamSearchParams, QueueFullError, SamplingParams, TraceWriter
from nanovllm.features.refusals import REFUSALS, REPLICAS, TENSOR_PARALLEL
from nanovllm.features.scoring import scores
from tests.support.adapter_files import save_adapter
from tests.support.async_llms import collect
from tests.support.features import public_names, refusals
from tests.support.llms import generate
from tests.support.replicas import answers, completions, tiny_folder
from tests.support.sweeps import CALIBRATION
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("programs_are_forked")

MODES = (REPLICAS, TENSOR_PARALLEL)
TEMPLATE = Path(tempfile.mkdtemp(prefix="nanovllm-template-"), "template.jinja")
TEMPLATE.write_text(tiny_tokenizer().chat_template.replace("<|user|>", "<|user|>ask "))
LIMITS = {
    "dtype": "float32", "device": "cpu", "max_model_len": 256, "max_num_batched_tokens": 96, "max_num_seqs": 8,
    "max_queue": 16, "step_timeout": 900.0, "priority_ageing_s": 5.0,
    "block_size": 16, "num_kv_blocks": 65, "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": True, "max_num_partial_prefills": 3, "max_long_partial_prefills": 2,
    "long_prefill_token_threshold": 48, "attention_backend": "sdpa", "enforce_eager": True, "overlap": True,
    "cuda_graphs": False, "allow_control_tokens_in_messages": True, "skip_tokenizer_init": False,
    "record_itl": True, "seed": 7, "trust_remote_code": True, "kv_cache_touch": "none",
    "client_weights": {"batch": 0.5}, "max_loras": 3, "max_lora_rank": 16,
    "prefix_cache_host_bytes": 8 << 20, "prefix_cache_dir_bytes": 64 << 20,
    "itl_goal": 60.0, "ttft_goal": 90.0, "chat_template": str(TEMPLATE),
    "chat_template_content_format": "string", "speculation": "suffix",
    "num_speculative_tokens": 5,
}  # fmt: skip
OTHERS = {
    "kv_cache_memory_bytes": 8 << 20,
    "block_size": 32,
    "max_model_len": 512,
    "enforce_eager": True,
    "seed": 9,
}
MESSAGES = [{"role": "user", "content": "what is there <|end|> to say"}]
PROMPTS = random_prompts(4, low=20, high=40, seed=41)
SCORED = ("the capital", ["Paris is the capital.", "Two and two are four."])
LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def favour_the_last(token_ids, logits):
    logits[token_ids[-1] :] += 1.0
    return logits


# Values of parameters that have an effect: answers differ from those without them.
EVEN = tuple(range(0, 512, 2))
FEW = {"allowed_token_ids": (3, 300, 400, 500)}  # few tokens, which repeat
PARAMS = FEW | {
    "n": 3, "truncate_prompt_tokens": 3, "bad_words": (tiny_tokenizer().decode([7]),),
    "logit_bias": {7: 9.0, 400: 9.0}, "repetition_penalty": 1.6, "frequency_penalty": 1.5, "presence_penalty": 1.5,
    "logits_processors": (favour_the_last,), "temperature": 2.0, "top_k": 2, "top_p": 0.3, "min_p": 0.3,
    "logprobs": 2, "prompt_logprobs": 1, "prompt_logprobs_start": 15, "max_tokens": 5, "min_tokens": 6,
    "ignore_eos": False, "stop_token_ids": EVEN, "stop": ("e", "a"), "include_stop_str_in_output": True,
    "skip_special_tokens": False, "seed": 12, "itl_goal": 70.0, "ttft_goal": 95.0,
}  # fmt: skip
# What a parameter needs beside it to have one.
BESIDE = {
    "prompt_logprobs_start": {"prompt_logprobs": 1},
    "min_tokens": {"stop_token_ids": EVEN},
    "include_stop_str_in_output": {"stop": ("e", "a")},
    "skip_special_tokens": {"allowed_token_ids": (0, 1, 2, 3)},
}
# Options of both answers that make it visible.
BASES = {
    **dict.fromkeys(("repetition_penalty", "frequency_penalty", "presence_penalty"), FEW),
    "bad_words": {"logit_bias": {7: 40.0}},
}
# These change no token here.
SAME = {"ignore_eos", "logprobs", "prompt_logprobs", "prompt_logprobs_start", "itl_goal", "ttft_goal"}


@functools.cache
def greedy_folder():
    """The tiny model with a generation config of its own."""
    folder = tempfile.mkdtemp(prefix="nanovllm-greedy-")
    shutil.copytree(tiny_folder(), folder, dirs_exist_ok=True)
    Path(folder, "generation_config.json").write_text('{"temperature": 0.0, "repetition_penalty": 1.3}')
    return folder


@functools.cache
def one():
    return LLM(greedy_folder(), tokenizer=tiny_tokenizer(), **LIMITS)


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def steps():
    return []


@pytest.fixture(scope="module")
def trace(mode, tmp_path_factory):
    return None if mode == REPLICAS else tmp_path_factory.mktemp("trace") / "trace.json"


@pytest.fixture(scope="module")
def llm(mode, steps, trace):
    writer = trace and TraceWriter(str(trace))
    own = LIMITS | {mode: 2} | ({"routing": "least-loaded"} if mode == REPLICAS else {})
    with LLM(greedy_folder(), tokenizer=tiny_tokenizer(), on_step=steps.append, trace=writer, **own) as llm:
        yield llm
    if writer:
        writer.close()
        assert trace.stat().st_size > 1000


@pytest.fixture(scope="module")
def async_options(mode, tmp_path_factory):
    events = f"ipc://{tmp_path_factory.mktemp('events')}/"
    own = {"kv_events": f"{events}events", "kv_events_replay": f"{events}replay", "kv_events_topic": "kv"}
    costs = tmp_path_factory.mktemp("costs") / "costs.json"
    CALIBRATION.save(costs)
    own |= {"itl_goal": 60.0, "step_costs": str(costs)}
    return OTHERS | {mode: 2, "prepares_when_idle": True, "kv_events_rank": 3} | own


def params_with_and_without(name):
    base = {"seed": 11, "max_tokens": 8} | BASES.get(name, {})
    return [SamplingParams(**base | given) for given in (BESIDE.get(name, {}) | {name: PARAMS[name]}, {})]


@functools.cache
def expected_with_and_without(name):
    """Answers of one engine, for both modes."""
    return [generate(one(), PROMPTS, params) for params in params_with_and_without(name)]


@pytest.mark.parametrize("name", PARAMS)
def test_a_parameter_gives_the_answers_of_one_engine(llm, mode, name):
    if name in refusals(mode):
        with pytest.raises(ValueError, match=f"^{name} does not work with {mode}"):
            generate(llm, PROMPTS, SamplingParams(**{name: PARAMS[name]}))
        return
    outputs = generate(llm, PROMPTS, params_with_and_without(name)[0])
    expected, without = expected_with_and_without(name)
    assert completions(outputs) == completions(expected)
    assert (completions(expected) == completions(without)) == (name in SAME)
    for left, right in zip(outputs, expected, strict=True):
        assert_same_logprobs([c.logprobs for c in left.outputs], [c.logprobs for c in right.outputs])
        assert_same_logprobs([left.prompt_logprobs], [right.prompt_logprobs])
        assert (left.outputs[0].logprobs is not None) == (name == "logprobs")
        assert (left.prompt_logprobs is not None) == name.startswith("prompt_logprobs")


def assert_same_logprobs(lefts, rights):
    for left, right in zip(lefts, rights, strict=True):
        assert (left is None) == (right is None)
        for one_token, other in zip(left or (), right or (), strict=True):
            assert (one_token or {}).keys() == (other or {}).keys()
            for token_id, found in (one_token or {}).items():
                assert math.isclose(found.logprob, other[token_id].logprob, abs_tol=1e-3)


# ------------------------------------------------------------------------------------------------- calls and options


def assert_same(llm, prompts, params=LONG, **options):
    assert answers(llm, prompts, params, **options) == answers(one(), prompts, params, **options)


def run_prompts(llm, steps):
    before = len(steps)
    assert_same(llm, [PROMPTS[0], "the cat sat on the mat"])
    assert len(steps) > before


def run_chat(llm, steps):
    params = SamplingParams(seed=5, max_tokens=10)
    assert llm.apply_chat_template(MESSAGES) == one().apply_chat_template(MESSAGES)
    own, expected = (completions(each.chat(MESSAGES, params, use_tqdm=False)) for each in (llm, one()))
    assert own == expected
    arguments = {
        "chat_template": "{{ mood }}{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "chat_template_kwargs": {"mood": "kind"}, "tools": [{"type": "function", "function": {"name": "f"}}],
        "add_generation_prompt": False, "continue_final_message": False,
    }  # fmt: skip
    assert llm.apply_chat_template(MESSAGES, **arguments) == one().apply_chat_template(MESSAGES, **arguments)


def run_stream(llm, steps):
    """Two at once, one with a higher priority; one is left early, which aborts it."""
    left, read = llm.stream(PROMPTS[0], LONG, priority=1), llm.stream(PROMPTS[1], LONG, priority=-1)
    next(left)
    outputs = list(read)
    left.close()
    assert len(outputs) > 20
    assert completions(outputs[-1:]) == answers(one(), PROMPTS[1], LONG)
    assert outputs[-1].metrics.itls
    assert not llm._engine.requests


def run_resume_and_fork(llm, steps):
    if llm.config.data_parallel_size > 1:
        return  # replicas refuse these
    (cut,) = generate(llm, PROMPTS[0], replace(LONG, max_tokens=12))
    *_, last = llm.resume(cut, replace(LONG, max_tokens=18))
    (whole,) = generate(one(), PROMPTS[0], LONG)
    assert completions([last]) == completions([whole])
    stream = llm.stream(PROMPTS[0], LONG)
    output = next(output for output in stream if len(output.outputs[0].token_ids) >= 9)
    *_, last = llm.fork(output.request_id, len(PROMPTS[0]) + 5, replace(LONG, max_tokens=20))
    assert last.outputs[0].token_ids == whole.outputs[0].token_ids[5:25]
    stream.close()
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    own, found = ([[s.tokens for s in o.sequences] for o in each.beam_search(PROMPTS, params)] for each in (one(), llm))
    assert own == found


def run_pauses(llm, steps):
    llm.pause_generation()
    assert llm.is_paused
    with pytest.raises(RuntimeError, match="is paused"):
        generate(llm, PROMPTS)
    llm.resume_generation()
    assert not llm.is_paused
    assert_same(llm, PROMPTS)


def run_updates(llm, steps):
    weights = tiny_model().state_dict()
    calls = {"update_weights": [weights], "sleep": [], "wake": []}
    for name, arguments in calls.items():
        getattr(llm, name)(*arguments)
    assert_same(llm, PROMPTS)


def run_priority(llm, steps):
    assert_same(llm, PROMPTS, priority=[3, 0, -2, 1])


def run_client(llm, steps):
    assert_same(llm, PROMPTS, client=["batch", "one", "batch", "two"])
    stream = llm.stream(PROMPTS[0], LONG, client="batch")
    next(stream)
    assert llm.stats().num_clients == 1 and llm.stats().client_gap == 0.0
    stream.close()


def run_cache_salt(llm, steps):
    llm.reset_prefix_cache()
    prompt, params = [*range(200)], SamplingParams(temperature=0.0, max_tokens=3)

    def num_cached(salt):  # of a burst, so that each replica has seen the prompt
        return max(o.num_cached_tokens for o in generate(llm, [prompt] * 4, params, cache_salt=salt))

    num_cached("one")
    assert num_cached("one") >= 176
    before = llm.stats().prefix_cache_hits
    generate(llm, prompt, params, cache_salt="two")
    assert llm.stats().prefix_cache_hits == before


def run_adapters(llm, steps):
    folder = save_adapter(Path(tempfile.mkdtemp(prefix="nanovllm-adapter-")), tiny_model())
    for each in (llm, one()):
        each.load_adapter(name="tuned", path=folder)
    assert llm.adapters.keys() == {"tuned"}
    assert_same(llm, PROMPTS, adapter=["tuned", None, "tuned", None])
    for each in (llm, one()):
        each.unload_adapter("tuned")
        with pytest.raises(ValueError, match="no adapter is named 'tuned'"):
            generate(each, PROMPTS, LONG, adapter="tuned")


def run_timeout(llm, steps):
    outputs = generate(llm, PROMPTS, LONG, timeout=[1e-3, 60.0, 60.0, 60.0])
    assert [output.outputs[0].finish_reason for output in outputs] == ["timeout", "length", "length", "length"]


def run_generation_config(llm, steps):
    """Without parameters the model's generation config holds, else `SamplingParams`."""
    assert llm.default_sampling_params == SamplingParams(temperature=0.0, repetition_penalty=1.3)
    assert llm.sampling_defaults == {"temperature": 0.0, "repetition_penalty": 1.3}
    assert llm.can_generate and not llm.is_asleep
    prompt = [7] * 236  # leaves 20 tokens of max_model_len
    expected = generate(one(), prompt, SamplingParams(temperature=0.0, repetition_penalty=1.3))
    assert answers(llm, prompt, None) == completions(expected)
    [(index, plain)] = llm.as_completed(prompt, SamplingParams(temperature=0.0))
    assert index == 0 and completions([plain]) != completions(expected)


def run_options(llm, steps):
    """Each is resolved as set, with its visible effect."""
    assert {name: getattr(llm.config, name) for name in LIMITS} == LIMITS
    count = llm.config.data_parallel_size
    with pytest.raises(QueueFullError):
        generate(llm, [[1, 2]] * (llm.config.max_num_seqs * count + 17), LONG)
    with pytest.raises(ValueError, match="256"):
        generate(llm, [[1] * 300], LONG)
    assert llm.stats().num_blocks == 64 * count
    assert len(llm.replicas()) == (2 if count == 2 else 0)


def run_score(llm, steps):
    template = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    kinds = ({}, {"instruction": "is it about towns?"}, {"template": template}, {"method": "cosine"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "ANSWERS", ("y", "n"))  # which the tiny tokenizer has tokens for
        own, found = (
            [output.score for kind in kinds for output in each.score(*SCORED, use_tqdm=False, **kind)]
            for each in (one(), llm)
        )
    assert found == pytest.approx(own, abs=1e-4) and len({round(score, 4) for score in own}) == 8


def run_embed(llm, steps):
    for normalize in (True, False):
        own, found = (each.embed(PROMPTS, normalize=normalize, use_tqdm=False) for each in (one(), llm))
        for expected, output in zip(own, found, strict=True):
            assert output.embedding.dtype == np.float32 and output.embedding.flags.writeable
            np.testing.assert_allclose(output.embedding, expected.embedding, atol=2e-3)
            assert output.finish_reason == expected.finish_reason and output.error is None
    output = generate(llm, PROMPTS[:1], SamplingParams(max_tokens=2, temperature=0.0))[0]
    assert output.embedding is None and len(output.outputs[0].token_ids) == 2


SYNCHRONOUS = {
    run_prompts: {"prompts", "generate", "on_step", "tokenizer", "model", "trace"},
    run_chat: {
        "chat",
        "apply_chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    },
    run_stream: {"stream", "record_itl"},
    run_resume_and_fork: {"resume", "beam_search", "params", "fork", "at"},
    run_priority: {"priority"},
    run_client: {"client"},
    run_cache_salt: {"cache_salt", "reset_prefix_cache"},
    run_pauses: {"pause_generation", "resume_generation", "is_paused"},
    run_updates: {"update_weights", "sleep", "wake"},
    run_adapters: {"load_adapter", "unload_adapter", "adapters", "adapter", "name", "path"},
    run_timeout: {"timeout"},
    run_embed: {"embed", "normalize"},
    run_score: {"score", "query", "documents", "method", "instruction", "template"},
    run_generation_config: {
        "generation_config",
        "as_completed",
        "default_sampling_params",
        "sampling_defaults",
        "can_generate",
        "is_asleep",
    },
    run_options: {*LIMITS, "stats", "replicas", "routing", "config"},
}


@pytest.mark.costly
@pytest.mark.parametrize("run", SYNCHRONOUS, ids=lambda run: run.__name__.removeprefix("run_"))
def test_a_call_or_option_works(llm, steps, run):
    run(llm, steps)


ASYNCHRONOUS = {
    "submit", "submit_chat", "abort", "tokenize", "detokenize", "prepare", "work", "texts", "compiles",
    "heartbeat", "is_dead", "inspect", "close",
    "plan_scores", "output_kind", "request_id", "prepares_when_idle", "kv_cache_memory_bytes", "kv_events",
    "kv_events_replay", "kv_events_topic", "kv_events_rank", "step_costs",
}  # fmt: skip


@pytest.mark.full
def test_asynchronous_calls_work(mode, async_options):
    asyncio.run(asyncio.wait_for(use_asynchronously(mode, async_options), 120.0))


async def use_asynchronously(mode, options):
    params = SamplingParams(seed=4, max_tokens=12)
    (expected,) = answers(one(), PROMPTS[0], params)
    async with AsyncLLM(tiny_folder(), **options) as llm:
        assert {name: getattr(llm.config, name) for name in OTHERS} == OTHERS
        assert llm.config.kv_events_rank == 3 and not llm.is_dead
        stream = await llm.submit([PROMPTS[0]], params, output_kind="delta", request_ids=["named"])
        deltas = await collect(stream)
        assert {output.request_id for output in deltas} == {"named"}
        assert [token_id for output in deltas for token_id in output.outputs[0].token_ids] == expected[0][1]
        answer = await collect(await llm.submit_chat(MESSAGES, params, request_id="chat"))
        assert answer[-1].finished and answer[-1].request_id == "chat"
        stream = await llm.submit([PROMPTS[1]], SamplingParams(max_tokens=400, ignore_eos=True), request_ids=["long"])
        await anext(aiter(stream))
        assert await llm.abort("long") and not await llm.abort("long")
        assert (await collect(stream))[-1].outputs[0].finish_reason == "abort"
        assert await llm.detokenize(await llm.tokenize("the cat")) == "the cat"
        assert await llm.prepare(lambda: "prepared", texts=["the cat"], compiles=True) == "prepared"
        assert llm.heartbeat().age >= 0.0 and (await llm.stats()).num_output_tokens > 12
        assert await llm.inspect(lambda engine: len(engine.requests)) == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scores, "ANSWERS", ("y", "n"))
            assert len((await llm.plan_scores(*SCORED)).prompts) == 2
            assert None not in [output.score for output in await llm.score(*SCORED)]
        await llm.reset_prefix_cache()
        assert len(llm.replicas()) == (2 if mode == REPLICAS else 0)


# Names that take processes of their own, and where they are run.
HUB = {
    "revision": "names a commit of the hub, which tests do not reach",
    "window_pool_share": "needs a model of window layers, which tests of the pools have",
}
PICTURES = ("limit_mm_per_prompt", "mm_processor_kwargs", "takes_pictures")
ELSEWHERE = {
    REPLICAS: {
        "data_parallel_size": "test_replica_pool", "tensor_parallel_size": "test_replica_ranks",
        "structured_output": "test_structured_replicas",
        "quantization": "test_quantised_models", "exact_activations": "test_quantised_models",
        "draft_model": "test_draft_models", "kv_cache_dtype": "test_fp8_kv",
        "prefix_cache_dir": "test_tiers", "engine_process": "test_engine_process", "policies": "test_policies",
        "answer_params": "test_server_structured",
    } | HUB | dict.fromkeys(PICTURES, "test_picture_prompts"),
    TENSOR_PARALLEL: {
        "data_parallel_size": "test_replica_ranks", "tensor_parallel_size": "test_tensor_parallel",
        "engine_process": "test_engine_process", "policies": "test_policies",
        "a policy that cannot be pickled": "test_policies",
        "prefix_cache_dir": "test_rank_tiers", "answer_params": "test_server_structured",
        "structured_output": "test_tensor_parallel", "quantization": "test_dequantised",
        "kv_cache_dtype": "test_two_gpus",
        "draft_model": "test_drafts_on_ranks", "a Drafter that cannot be pickled": "test_drafts_on_ranks",
        **dict.fromkeys(("update_weights", "sleep", "wake"), "test_updates_on_ranks"),
        "a report of draws": "of a loaded module, which several ranks refuse",
        "a tokenizer that cannot be pickled": "rank 0 is this process, and the others have no tokenizer",
        "nanovllm bench": "steps an LLM as here", "nanovllm tune": "steps an LLM as here",
        "nanovllm calibrate": "steps an LLM as here", "nanovllm simulate": "starts no engine",
    } | HUB | dict.fromkeys(PICTURES, "several ranks read text alone, by test_picture_prompts"),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("one_mode", MODES)
def test_every_name_that_works_is_run(one_mode):
    run = ASYNCHRONOUS.union(*SYNCHRONOUS.values(), PARAMS)
    names = public_names() | REFUSALS.keys()
    assert names - refusals(one_mode).keys() - run - ELSEWHERE[one_mode].keys() == set()
    assert (run | ELSEWHERE[one_mode].keys()) - names == set()
