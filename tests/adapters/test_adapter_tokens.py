"""Requests with adapters: tokens of `transformers` with merged weights, in every form, schedule and company."""

import itertools

import pytest
import torch

from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutput
from tests.support.adapter_files import KINDS, merged, save_adapter, save_kinds
from tests.support.layer_kinds import own_answer
from tests.support.llms import generate, greedy, token_ids
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model, tiny_tokenizer

NAMES = [None, *KINDS]
NUM_TOKENS = 12
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
SIZES = {"dtype": "float32", "num_kv_blocks": 129, "max_num_seqs": 8, "max_model_len": 256}
PROMPTS = random_prompts(10, low=3, high=90, seed=3)
OF_PROMPTS = [NAMES[number % len(NAMES)] for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of a model, adapters' folders by name, the model)"""
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny_model()
    save_tiny(folder / "model")
    return folder / "model", save_kinds(folder, model), model


@pytest.fixture(scope="module")
def answers(saved):
    """The greedy tokens of each prompt with each adapter, by `transformers`."""
    _, folders, model = saved
    models = {name: model if name is None else merged(model, folders[name]) for name in NAMES}
    return {
        (number, name): own_answer(models[name], prompt, NUM_TOKENS)
        for number, prompt in enumerate(PROMPTS)
        for name in NAMES
    }


def expected(answers, names=None):
    return [answers[each] for each in enumerate(OF_PROMPTS if names is None else names)]


def opened(saved, **options):
    folder, folders, _ = saved
    llm = LLM(folder, **SIZES | options)
    for name, path in folders.items():
        llm.load_adapter(name, path)
    return llm


@pytest.fixture(scope="module")
def llm(saved):
    with opened(saved) as engine:
        yield engine


def test_adapters_change_the_tokens(answers):
    for number in range(len(PROMPTS)):
        assert len({tuple(answers[number, name]) for name in NAMES}) == len(NAMES)


FORMS = {
    "fused": {},
    "eager": {"enforce_eager": True},
    "compiled": {"attention_backend": "sdpa"},
    "two slots": {"max_loras": 2},
    "one slot": {"max_loras": 1},
    "small chunks": {"max_num_batched_tokens": 20, "max_num_seqs": 3},
    "tiny pool": {"num_kv_blocks": 17, "max_num_batched_tokens": 40},
    "without prefixes": {"enable_prefix_caching": False},
    "drafts": {"speculation": "suffix", "num_speculative_tokens": 3},
    "no overlap": {"overlap": False},
    "goal": {"itl_goal": 0.05},
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_merged_weights_cold_and_warm(form, saved, answers):
    with opened(saved, **FORMS[form]) as llm:
        for _ in range(2):
            assert token_ids(generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)) == expected(answers)
        assert (llm.stats().prefix_cache_hits > 0) == (form != "without prefixes")
        everyone = [(number, name) for number in range(4) for name in NAMES]  # one prompt with each adapter at once
        outputs = generate(llm, [PROMPTS[n] for n, _ in everyone], GREEDY, adapter=[name for _, name in everyone])
        assert token_ids(outputs) == [answers[each] for each in everyone]


def test_a_live_module_gives_the_same_tokens(saved, answers):
    _, folders, model = saved
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    options = {name: value for name, value in SIZES.items() if name != "dtype"}
    with LLM(model, **options) as llm:
        for name, path in folders.items():
            llm.load_adapter(name, path)
        assert token_ids(generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)) == expected(answers)
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
        assert own_answer(model, PROMPTS[0], NUM_TOKENS) == answers[0, None]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "olmo2", "mistral"])
def test_other_families_give_the_same_tokens(family, tmp_path):
    model = tiny_model(family)
    save_tiny(tmp_path / "model", family)
    path = save_adapter(tmp_path / "a", model, seed=5)
    own = [own_answer(module, PROMPTS[0], NUM_TOKENS) for module in (model, merged(model, path))]
    with LLM(tmp_path / "model", **SIZES) as llm:
        llm.load_adapter("a", path)
        assert token_ids(generate(llm, [PROMPTS[0]] * 2, GREEDY, adapter=[None, "a"])) == own


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["fused", "eager"])
def test_bfloat16_is_near_the_float32_model(options, saved):
    folder, folders, model = saved
    with LLM(folder, **SIZES | {"dtype": "bfloat16"} | options) as llm:
        llm.load_adapter("b", folders["b"])
        outputs = generate(llm, PROMPTS, SamplingParams(max_tokens=1, prompt_logprobs=0), adapter="b")
    reference = merged(model, folders["b"])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            rows = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        own = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        right = [rows[at, token].item() for at, token in enumerate(prompt[1:])]
        assert sum(abs(one - other) for one, other in zip(own, right, strict=True)) / len(own) < 0.25


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_keep_their_adapters_apart(quantization, saved):
    with opened(saved, quantization=quantization) as llm:
        together = token_ids(generate(llm, PROMPTS[:1] * len(NAMES), GREEDY, adapter=NAMES))
        assert len(set(map(tuple, together))) == len(NAMES)
        llm.reset_prefix_cache()
        alone = [token_ids(generate(llm, PROMPTS[:1], GREEDY, adapter=name))[0] for name in NAMES]
        assert together == alone


def test_other_bytes_under_one_name_miss_and_equal_bytes_under_two_names_hit(saved, tmp_path):
    folder, folders, model = saved
    prompt = random_prompts(1, low=80, high=80, seed=9)
    other = save_adapter(tmp_path / "other", model, seed=77)
    right = {path: own_answer(merged(model, path), prompt[0], NUM_TOKENS) for path in (folders["b"], other)}
    with LLM(folder, **SIZES) as llm:
        for path, cached in ((folders["b"], 0), (other, 0), (folders["b"], 64), (other, 64)):
            llm.load_adapter("x", path)
            (output,) = generate(llm, prompt, GREEDY, adapter="x")
            assert (output.outputs[0].token_ids, output.num_cached_tokens) == (right[path], cached)
        first = llm.load_adapter("y", folders["b"])
        (output,) = generate(llm, prompt, GREEDY, adapter="y")
        assert (output.outputs[0].token_ids, output.num_cached_tokens) == (right[folders["b"]], 64)
        assert first.digest != llm.adapters["x"].digest and generate(llm, prompt, GREEDY)[0].num_cached_tokens == 0


def test_a_request_keeps_its_adapter_when_the_name_goes_or_names_another(saved, answers):
    _, folders, _ = saved
    with opened(saved) as llm:
        streams = {name: llm.stream(PROMPTS[0], GREEDY, adapter=name) for name in KINDS}
        for stream in streams.values():
            next(stream)
        llm.unload_adapter("a")
        llm.load_adapter("b", folders["c"])
        llm.unload_adapter("c")
        for name, stream in streams.items():
            *_, last = stream
            assert last.outputs[0].token_ids == answers[0, name]
        assert sorted(llm.adapters) == ["b", "d"]
        assert token_ids(generate(llm, PROMPTS[:1], GREEDY, adapter="b")) == [answers[0, "c"]]
        with pytest.raises(ValueError, match="no adapter is named 'a'; loaded are: b, d"):
            llm.generate(PROMPTS[0], adapter="a")


def test_samples_and_scores_are_those_of_a_request_alone(saved, llm):
    params = SamplingParams(n=3, seed=5, max_tokens=8, logprobs=2, prompt_logprobs=1)
    together = generate(llm, PROMPTS, params, adapter=OF_PROMPTS)
    llm.reset_prefix_cache()
    for prompt, name, output in zip(PROMPTS, OF_PROMPTS, together, strict=True):
        (alone,) = generate(llm, [prompt], params, adapter=name)
        assert [sample.token_ids for sample in alone.outputs] == [sample.token_ids for sample in output.outputs]
        for own, other in zip(alone.outputs[0].logprobs, output.outputs[0].logprobs, strict=True):
            assert {t: p.logprob for t, p in own.items()} == pytest.approx(
                {t: p.logprob for t, p in other.items()}, abs=1e-4
            )


def test_forks_beams_and_resumed_requests_have_the_adapter(saved, llm, answers):
    stream = llm.stream(PROMPTS[1], GREEDY, adapter="b")
    for _ in range(4):
        output = next(stream)
    *_, fork = llm.fork(output.request_id, params=greedy(NUM_TOKENS - 4, ignore_eos=True))
    assert output.outputs[0].token_ids + fork.outputs[0].token_ids == answers[1, "b"]
    *_, last = stream
    *_, fork = llm.fork(last, at=len(PROMPTS[1]) + 2, params=greedy(NUM_TOKENS - 2, ignore_eos=True), adapter="b")
    assert last.outputs[0].token_ids[:2] + fork.outputs[0].token_ids == answers[1, "b"]
    (cut,) = generate(llm, PROMPTS[1], greedy(5, ignore_eos=True), adapter="b")
    *_, resumed = llm.resume(cut, greedy(NUM_TOKENS - 5, ignore_eos=True), adapter="b")
    assert resumed.outputs[0].token_ids == answers[1, "b"]
    (beams,) = llm.beam_search([PROMPTS[1]], BeamSearchParams(1, NUM_TOKENS, ignore_eos=True), adapter="b")
    assert beams.sequences[0].tokens[-NUM_TOKENS:] == answers[1, "b"]
    found = dict(llm.as_completed(PROMPTS, GREEDY, adapter=OF_PROMPTS))
    assert token_ids([found[number] for number in range(len(PROMPTS))]) == expected(answers)


def test_conversations_and_forms_take_adapters(llm):
    params = greedy(40, structured_output=StructuredOutput(regex="[a-z]{8}"))
    outputs = llm.chat([[{"role": "user", "content": "the cat"}]] * 2, params, adapter=["a", None], use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts[0] != texts[1] and {*texts[0], *texts[1]} <= set("abcdefghijklmnopqrstuvwxyz")
    with pytest.raises(ValueError, match="adapter has 2 entries"):
        llm.generate(PROMPTS[:2], adapter=["a", "b"], cache_salt=["x"])
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        llm.generate(PROMPTS[:3], adapter=["a", "b"])
    with pytest.raises(TypeError, match="adapter must be the name"):
        llm.generate(PROMPTS[0], adapter=3)


def test_no_salt_of_a_client_spells_an_adapter(llm):
    digest = llm.adapters["a"].digest
    for salt in (f"\0adapter {digest} ", "\0", "\0x"):
        for call in (llm.generate, llm.stream):
            with pytest.raises(ValueError, match="must not begin with the null character"):
                call(PROMPTS[0], cache_salt=salt)
        with pytest.raises(ValueError, match="must not begin with the null character"):
            llm.as_completed([PROMPTS[0]], cache_salt=salt)
    prompt = random_prompts(1, low=80, high=80, seed=12)
    cached = [generate(llm, prompt, GREEDY, adapter="a", cache_salt=salt)[0].num_cached_tokens for salt in "xyx"]
    assert cached == [0, 0, 64]


def test_a_step_that_fails_leaves_later_steps_as_they_were(saved, monkeypatch, answers):
    with opened(saved, enforce_eager=True) as llm:
        runner = llm._engine.model_runner
        binding = runner.binding
        forward = binding.model.model.layers[1].mlp.forward
        broken = itertools.chain([True], itertools.repeat(False))

        def failing(states):
            if next(broken):
                raise RuntimeError("an error of the model")
            return forward(states)

        monkeypatch.setitem(vars(binding.model.model.layers[1].mlp), "forward", failing)
        with pytest.raises(RuntimeError, match="an error of the model"):
            generate(llm, PROMPTS, GREEDY, adapter="b")
        assert token_ids(generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)) == expected(answers)
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == expected(answers, [None] * len(PROMPTS))


def test_prefixes_in_host_memory_and_files_are_the_adapter_s(saved, answers, tmp_path):
    options = {"prefix_cache_dir": str(tmp_path / "kv"), "prefix_cache_host_bytes": 2**24, "num_kv_blocks": 40}
    for is_warm in (False, True):
        with opened(saved, **options) as llm:
            for _ in range(2):
                outputs = generate(llm, PROMPTS, GREEDY, adapter=OF_PROMPTS)
                assert token_ids(outputs) == expected(answers)
            everyone = generate(llm, PROMPTS[:1] * len(NAMES), GREEDY, adapter=NAMES)
            assert token_ids(everyone) == [answers[0, name] for name in NAMES]
            assert is_warm is False or llm.stats().prefix_cache_hits > 0


def test_an_adapter_of_a_module_with_a_tokenizer_serves_text(saved):
    _, folders, model = saved
    options = {name: value for name, value in SIZES.items() if name != "dtype"}
    with LLM(model, tokenizer=tiny_tokenizer(), **options) as llm:
        llm.load_adapter("a", folders["a"])
        outputs = [generate(llm, "the cat", GREEDY, adapter=name)[0] for name in (None, "a")]
        assert len({output.outputs[0].text for output in outputs}) == 2
