"""A GGUF file in several processes: the tokens of one engine, from blocks in replicas and plain weights in ranks."""

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.features.refusals import REPLICAS, TENSOR_PARALLEL
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import random_prompts, tiny_model

pytestmark = pytest.mark.usefixtures("programs_are_forked")

OPTIONS = {"enforce_eager": True, "dtype": "float32", "num_kv_blocks": 17, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.mark.full
@pytest.mark.parametrize("mode", [REPLICAS, TENSOR_PARALLEL])
def test_tokens_are_those_of_one_engine(tmp_path, mode):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    path = write_gguf(tmp_path / "m.gguf", tiny_model(hidden_size=256, intermediate_size=256, **sizes), "Q4_K")
    prompts = random_prompts(4, high=40)

    def tokens(**options):
        with LLM(path, **OPTIONS, **options) as llm:
            assert llm.tokenizer.chat_template
            return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]

    assert tokens(**{mode: 2}) == tokens()
