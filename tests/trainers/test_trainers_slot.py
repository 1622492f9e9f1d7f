"""The slot `generate_batch`: tokens of `transformers`, draws by seed, the trainer's log-probabilities and steps."""

import copy
import inspect
import io
import logging

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from nanovllm.features.trainers import generation_options
from nanovllm.trainers import install, uninstall
from tests.support.rollouts import own_logprobs
from tests.support.tiny_models import random_prompts, tiny_model

SIZES = {"num_kv_blocks": 129, "max_num_seqs": 8, "max_model_len": 160, "max_num_batched_tokens": 64}
PROMPTS = random_prompts(5, low=3, high=70, seed=3)
GREEDY = GenerationConfig(max_new_tokens=10, do_sample=False, pad_token_id=0)
SAMPLED = GenerationConfig(max_new_tokens=10, do_sample=True)


def with_slot(*args, **overrides):
    model = tiny_model(*args, **overrides)
    install(model, **SIZES)
    return model


def close(model):
    uninstall(model)
    return model


def own_tokens(model, prompts, config):
    """Tokens of `model.generate`, prompt by prompt."""
    was_training = model.training
    model.eval()
    answers = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        answers.append(model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)[0])
    model.train(was_training)
    return [answer[len(prompt) :].tolist() for answer, prompt in zip(answers, prompts, strict=True)]


def tokens_of(results):
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize("changed", [
    {}, {"repetition_penalty": 1.4}, {"temperature": 0.7, "top_k": 3}, {"num_beams": 1, "typical_p": 1.0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_tokens_are_those_of_generate(family, changed):
    model = with_slot(family)
    config = GenerationConfig(**GREEDY.to_diff_dict() | changed)
    results = model.generate_batch(PROMPTS, generation_config=config)
    assert tokens_of(results) == own_tokens(model, PROMPTS, config)
    close(model)


def test_tokens_and_results_are_those_of_the_slot_of_transformers():
    model = with_slot()
    ours = model.generate_batch(PROMPTS, generation_config=GREEDY, record_timestamps=True)
    theirs = close(model).generate_batch(
        PROMPTS,
        generation_config=copy.deepcopy(GREEDY),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, return_logprobs=True),
        record_timestamps=True,
        warmup=False,
    )
    assert list(ours) == list(theirs)
    for name, result in ours.items():
        other = theirs[name]
        assert isinstance(result, GenerationOutput)
        assert (result.request_id, result.prompt_ids) == (other.request_id, other.prompt_ids)
        assert result.generated_tokens == other.generated_tokens
        assert result.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert (result.error, result.status) == (None, RequestStatus.FINISHED) == (other.error, other.status)
        assert len(result.timestamps) == len(result.generated_tokens) == len(other.timestamps)
        times = [result.created_time, result.lifespan[0], *result.timestamps, result.lifespan[1]]
        assert times == pytest.approx(sorted(times), abs=1e-3)


def test_the_signature_is_that_of_transformers():
    model = tiny_model()
    theirs = inspect.signature(model.generate_batch).parameters
    install(model, **SIZES)
    ours = inspect.signature(model.generate_batch).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]
    assert model.generate_batch([]) == {}


@pytest.mark.parametrize("place", ["call", "generation config", "config", "several"])
def test_end_tokens_come_from_the_call_then_from_the_model(place):
    model = with_slot()
    (free,) = own_tokens(model, PROMPTS[:1], GREEDY)
    config = copy.deepcopy(GREEDY)
    if place in ("call", "several"):
        config.eos_token_id = free[4] if place == "call" else [511, free[4]]
    else:
        (model.config if place == "config" else model.generation_config).eos_token_id = free[4]
    (result,) = model.generate_batch(PROMPTS[:1], generation_config=config).values()
    assert result.generated_tokens == free[: free.index(free[4]) + 1]
    config.eos_token_id = -1
    (result,) = model.generate_batch(PROMPTS[:1], generation_config=config).values()
    assert result.generated_tokens == free
    close(model)


def test_several_sequences_of_a_prompt_differ_and_have_the_ids_of_transformers():
    model = with_slot()
    config = GenerationConfig(max_new_tokens=10, do_sample=True, num_return_sequences=3)
    results = model.generate_batch(PROMPTS[:2] * 2, generation_config=config, seed=5)
    names = ["__child#0", "__child#1", ""]
    assert list(results) == [f"req_{index}{name}" for index in range(4) for name in names]
    assert [result.prompt_ids for result in results.values()] == [p for p in PROMPTS[:2] * 2 for _ in names]
    assert len(set(map(tuple, tokens_of(results)))) == 12
    again = model.generate_batch(PROMPTS[:2] * 2, generation_config=SAMPLED, num_return_sequences=3, seed=5)
    assert tokens_of(again) == tokens_of(results)
    close(model)


def test_draws_repeat_by_seed_and_by_the_seed_of_torch():
    model = with_slot()

    def draw(**options):
        return tokens_of(model.generate_batch(PROMPTS, generation_config=SAMPLED, **options))

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.manual_seed(7)
    assert first == draw() != second
    assert draw(seed=1, max_new_tokens=4) == [tokens[:4] for tokens in draw(seed=1)]
    close(model)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}], ids=str)
def test_filters_and_the_temperature_take_effect_in_draws_alone(options):
    model = with_slot()
    config = GenerationConfig(max_new_tokens=10, do_sample=True, **options)
    greedy = own_tokens(model, PROMPTS, GREEDY)
    assert tokens_of(model.generate_batch(PROMPTS, generation_config=config)) == greedy
    assert tokens_of(model.generate_batch(PROMPTS, generation_config=SAMPLED)) != greedy
    close(model)


@pytest.mark.parametrize("options", [
    {"num_beams": 4}, {"no_repeat_ngram_size": 1}, {"min_new_tokens": 1}, {"min_length": 12}, {"bad_words_ids": [[3]]},
    {"suppress_tokens": [4]}, {"renormalize_logits": True}, {"guidance_scale": 1.5}, {"typical_p": 0.9},
    {"stop_strings": "x"}, {"max_time": 3.0}, {"prompt_lookup_num_tokens": 3}, {"use_mtp": True},
    {"some_new_option": 2},
], ids=str)  # fmt: skip
def test_options_that_would_change_the_tokens_are_refused_by_name(options):
    model = with_slot()
    config = copy.deepcopy(GREEDY)
    (name,) = options
    setattr(config, name, options[name])
    with pytest.raises(ValueError, match=f"got {name}=.*does not apply"):
        model.generate_batch(PROMPTS, generation_config=config)
    with pytest.raises(ValueError, match=f"got {name}="):
        model.generate_batch(PROMPTS, generation_config=GREEDY, **options)
    close(model)


def test_a_maximum_length_and_greedy_copies_are_refused():
    model = with_slot()
    with pytest.raises(ValueError, match="got max_length=30"):
        model.generate_batch(PROMPTS, generation_config=GenerationConfig(max_length=30))
    with pytest.raises(ValueError, match="num_return_sequences is 2 without do_sample"):
        model.generate_batch(PROMPTS, generation_config=GREEDY, num_return_sequences=2)
    with pytest.raises(ValueError, match="top_p"):
        model.generate_batch(PROMPTS, generation_config=SAMPLED, top_p=1.5)
    close(model)


def test_hints_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(generation_options, "_logged", set())
    caplog.set_level(logging.INFO, generation_options.__name__)
    model = with_slot()
    config = GenerationConfig(**GREEDY.to_diff_dict(), cache_implementation="static", max_length=90)
    for _ in range(2):
        model.generate_batch(PROMPTS[:1], config, ContinuousBatchingConfig(), persistent_manager=True, warmup=False)
    texts = [record.getMessage() for record in caplog.records if record.name == generation_options.__name__]
    assert texts == [
        "generate_batch: continuous_batching_config: no effect in this engine.",
        "generate_batch: cache_implementation, max_length: no effect in this engine.",
    ]
    close(model)


def test_log_probabilities_are_those_of_the_trainers_forward_pass():
    model = with_slot()
    for result in model.generate_batch(PROMPTS * 2, generation_config=SAMPLED, seed=1).values():
        own = own_logprobs(model, result.prompt_ids, result.generated_tokens).detach()
        torch.testing.assert_close(torch.tensor(result.logprobs), own, rtol=0, atol=1e-5)
    close(model)


@pytest.mark.parametrize("form", ["train mode with dropout", "gradient checkpointing", "no cache", "gradients"])
def test_the_module_stays_its_trainers_between_calls(form):
    model = with_slot(attention_dropout=0.3 if form == "train mode with dropout" else 0.0)
    model.train()
    if form == "gradient checkpointing":
        model.gradient_checkpointing_enable()
    model.config.use_cache = form != "no cache"
    expected = own_tokens(model, PROMPTS, GREEDY)
    for _ in range(2):
        assert tokens_of(model.generate_batch(PROMPTS, generation_config=GREEDY)) == expected
        assert all(module.training for module in model.modules())
        assert model.is_gradient_checkpointing == (form == "gradient checkpointing")
        assert model.config.use_cache == (form != "no cache")
        loss = model(torch.tensor(PROMPTS[:1]), labels=torch.tensor(PROMPTS[:1])).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()
    close(model)


def test_a_step_of_the_optimizer_between_calls_is_seen_and_no_prefix_of_old_weights_is_found():
    model = with_slot()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    answers = []
    for _ in range(3):
        results = model.generate_batch(PROMPTS, generation_config=GREEDY)
        answers.append(tokens_of(results))
        assert answers[-1] == own_tokens(model, PROMPTS, GREEDY)
        model(torch.tensor(PROMPTS[:1]), labels=torch.tensor(PROMPTS[:1])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert answers[0] != answers[1] != answers[2]
    close(model)


def test_a_model_without_finite_logits_gives_failed_results_and_recovers_with_its_weights():
    model = with_slot()
    weights = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    for result in model.generate_batch(PROMPTS, generation_config=GREEDY).values():
        assert result.status == RequestStatus.FAILED and "finite" in result.error and result.generated_tokens == []
    with torch.no_grad():
        model.lm_head.weight.copy_(weights)
    assert tokens_of(model.generate_batch(PROMPTS, generation_config=GREEDY)) == own_tokens(model, PROMPTS, GREEDY)
    close(model)


def test_a_module_cast_to_another_dtype_gets_another_engine():
    model = with_slot()
    model.generate_batch(PROMPTS, generation_config=GREEDY)
    model.to(torch.bfloat16)
    assert all(len(tokens) == 10 for tokens in tokens_of(model.generate_batch(PROMPTS, generation_config=GREEDY)))
    model.to(torch.float32)
    assert tokens_of(model.generate_batch(PROMPTS, generation_config=GREEDY)) == own_tokens(model, PROMPTS, GREEDY)
    close(model)


def test_policy_gradients_raise_the_reward_and_rollouts_agree_with_the_trainer_at_each_step():
    """GRPO in small: rewards are shares of even tokens, advantages are relative to the prompt's own answers."""
    model = with_slot()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)  # logits as large as those of a trained model
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prompts = PROMPTS[:2]
    config = GenerationConfig(max_new_tokens=8, do_sample=True, num_return_sequences=8)
    means = []
    for step in range(8):
        results = list(model.generate_batch(prompts, generation_config=config, seed=step).values())
        rewards = torch.tensor([sum(t % 2 == 0 for t in result.generated_tokens) / 8 for result in results])
        groups = rewards.view(len(prompts), -1)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        loss = torch.zeros(())
        for result, advantage in zip(results, advantages, strict=True):
            own = own_logprobs(model, result.prompt_ids, result.generated_tokens)
            rollout = torch.tensor(result.logprobs)
            assert (own.detach() - rollout).abs().max() <= 1e-5
            loss = loss - advantage * (own - rollout).exp().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(rewards.mean().item())
    assert means[-1] > means[0] + 0.1, means
    close(model)


def test_uninstalling_restores_the_method_and_closes_the_engine():
    model = tiny_model()
    method = model.generate_batch
    uninstall(model)
    install(model, **SIZES)
    model.generate_batch(PROMPTS, generation_config=GREEDY)
    engine = model.generate_batch._llm
    install(model, **SIZES)  # takes the place of the first
    for _ in range(2):
        uninstall(model)
        assert model.generate_batch == method
        assert "generate_batch" not in vars(model)
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([[1]], use_tqdm=False)


def test_copies_and_pickles_of_the_model_have_slots_of_their_own():
    model = with_slot()
    expected = tokens_of(model.generate_batch(PROMPTS, generation_config=GREEDY))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            copied.lm_head.weight.neg_()
        assert tokens_of(copied.generate_batch(PROMPTS, generation_config=GREEDY)) == own_tokens(
            copied, PROMPTS, GREEDY
        )
        close(copied)
    assert tokens_of(model.generate_batch(PROMPTS, generation_config=GREEDY)) == expected
    close(model)


def test_a_model_that_cannot_generate_is_refused():
    with pytest.raises(TypeError, match="model is Linear; a loaded causal language model"):
        install(torch.nn.Linear(2, 2))
