"""Models without a head on a GPU: start, idle captures and rehearsals with the stand-in, and embeddings around them."""

import numpy as np
import pytest
import torch

from nanovllm import LLM
from tests.support.tiny_models import random_prompts, tiny_model, tiny_tokenizer

PROMPTS = random_prompts(6, low=1, high=60)


@pytest.mark.parametrize("is_eager", [False, True], ids=["default", "eager"])
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_they_embed_before_and_after_idle_captures(tmp_path, caplog, family, is_eager):
    base = tiny_model(family, dtype=torch.bfloat16).base_model
    base.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with torch.no_grad():
        expected = [base(torch.tensor([ids])).last_hidden_state[0, -1].float().numpy() for ids in PROMPTS]
    with (
        caplog.at_level("INFO", logger="nanovllm"),
        LLM(str(tmp_path), device="cuda", max_model_len=512, num_kv_blocks=200, enforce_eager=is_eager) as llm,
    ):
        engine = llm._engine
        for _ in range(2):
            for output, state in zip(llm.embed(PROMPTS, use_tqdm=False), expected, strict=True):
                assert output.embedding @ state / np.linalg.norm(state) > 0.9  # of bfloat16; other rows' are about 0
            while engine.use_idle_time(captures=True):
                pass
        with pytest.raises(ValueError, match="has no language model head, so it generates nothing"):
            llm.generate(PROMPTS[0])
    assert "a rehearsal failed" not in caplog.text
