"""TRL's GRPO trains through the slot: `.ci/trainers` runs it, in an environment that has TRL."""

import importlib.util

import pytest
import torch

from nanovllm.trainers import install
from tests.support.rollouts import own_logprobs
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL; .ci/trainers installs it")
NUM_STEPS = 3


def test_grpo_of_trl_draws_its_rollouts_from_the_engine_and_sees_each_step(tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = tiny_model(eos_token_id=511, attention_dropout=0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    drawn = []

    def share_of_even_tokens(completion_ids, **_):
        drawn.extend(completion_ids)
        return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]

    tokenizer = tiny_tokenizer(eos_token="<|end|>")
    tokenizer.pad_token = tokenizer.eos_token
    arguments = GRPOConfig(
        output_dir=str(tmp_path), max_steps=NUM_STEPS, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=12, learning_rate=1e-3, use_transformers_continuous_batching=True, use_cpu=True,
        bf16=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    install(model, num_kv_blocks=65, max_num_seqs=8, max_model_len=128)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=share_of_even_tokens,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["The quick brown fox", "Two and two are"] * 4}),
        processing_class=tokenizer,
    )
    results = []
    slot = model.generate_batch

    def checked_slot(*args, **kwargs):
        results.append(slot(*args, **kwargs))
        for answer in results[-1].values():
            own = own_logprobs(model, answer.prompt_ids, answer.generated_tokens)
            torch.testing.assert_close(torch.tensor(answer.logprobs), own, rtol=0, atol=2e-5)
        return results[-1]

    trainer.model.generate_batch = checked_slot
    trainer.train()

    assert len(results) == NUM_STEPS
    answers = [answer for result in results for answer in result.values()]
    assert [answer.generated_tokens for answer in answers] == drawn
    assert all(answer.error is None and 1 <= len(answer.generated_tokens) <= 12 for answer in answers)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(len({tuple(answer.generated_tokens) for answer in result.values()}) > 1 for result in results)
