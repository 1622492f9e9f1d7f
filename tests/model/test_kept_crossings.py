"""Weights that stay quantised beside each other feature, in float32: what the dequantised weights give without it."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.models.quantised.blocks import QuantisedLinear
from tests.support.cpu_answers import GREEDY, ON_A_CPU, OPTIONS, PROMPTS, tokens
from tests.support.llms import check_engine, generate, token_ids
from tests.support.quantised_checkpoints import save_quantised, small_llama
from tests.support.tiny_classes import tiny_class_model

pytestmark = [
    pytest.mark.usefixtures("programs_are_forked"),
    ON_A_CPU,
]
FLOAT32 = OPTIONS | {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu", "enforce_eager": True}
SAMPLED = SamplingParams(seed=7, n=2, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of the same target in W4A16, and of two small drafts: W4A16 and plain."""
    base = tmp_path_factory.mktemp("models")
    draft = small_llama(num_layers=1)
    draft.save_pretrained(base / "plain draft")
    small_llama().save_pretrained(base / "plain")
    save_quantised(base / "kept", "ct-w4a16-asym")
    save_quantised(base / "kept draft", "fp8-block", draft)
    return {path.name: str(path) for path in base.iterdir()}


@pytest.fixture(scope="module")
def wanted(folders):
    """Tokens of the dequantised and of the plain target, and two samples and embeddings of the dequantised one."""
    with LLM(folders["kept"], **FLOAT32, quantization="dequantize") as llm:
        found = {"kept": tokens(llm), "samples": samples(llm), "embeddings": embeddings(llm)}
    with LLM(folders["plain"], **FLOAT32) as llm:
        return found | {"plain": tokens(llm)}


def samples(llm):
    return [[each.token_ids for each in output.outputs] for output in generate(llm, PROMPTS[:3], SAMPLED)]


def embeddings(llm):
    return torch.tensor([output.embedding for output in llm.embed(PROMPTS[:3], use_tqdm=False)])


def num_kept(model):
    return sum(isinstance(module, QuantisedLinear) for module in model.modules())


def test_samples_embeddings_and_aborts(folders, wanted):
    with LLM(folders["kept"], **FLOAT32) as llm:
        assert num_kept(llm._engine.model_runner.binding.model) == 14
        assert samples(llm) == wanted["samples"]
        torch.testing.assert_close(embeddings(llm), wanted["embeddings"], rtol=1e-5, atol=1e-6)
        left = iter(llm.stream(PROMPTS[3], GREEDY))
        next(left)
        left.close()
        assert tokens(llm) == wanted["kept"]
        check_engine(llm)


@pytest.mark.parametrize("kind", ["host", "folder"])
def test_prefixes_in_other_memory(kind, folders, wanted, tmp_path):
    """Found there after they are evicted, and in files by another engine of kept weights, not by one of plain ones."""
    tiers = {"prefix_cache_host_bytes": 1 << 26} if kind == "host" else {"prefix_cache_dir": str(tmp_path)}
    options = FLOAT32 | {"num_kv_blocks": 33} | tiers
    with LLM(folders["kept"], **options) as llm:
        for _ in range(2):
            assert tokens(llm) == wanted["kept"]
        assert kind == "folder" or llm.stats().prefix_cache_hits > 0
    if kind == "folder":
        cached = {}
        for option in ("auto", "dequantize"):
            with LLM(folders["kept"], **options, quantization=option) as llm:
                outputs = generate(llm, PROMPTS, GREEDY)
                assert token_ids(outputs) == wanted["kept"]
                cached[option] = sum(output.num_cached_tokens for output in outputs)
        assert cached["auto"] > 0 and cached["dequantize"] == 0


@pytest.mark.costly
@pytest.mark.parametrize(
    "target, draft", [("plain", "kept draft"), ("kept", "plain draft"), ("kept", "kept draft")], ids=str
)
def test_drafts_of_another_format(target, draft, folders, wanted):
    options = FLOAT32 | {"speculation": "draft", "draft_model": folders[draft]}
    with LLM(folders[target], **options) as llm:
        assert tokens(llm) == wanted[target]
        assert llm.stats().speculation.num_draft_tokens > 0
        check_engine(llm)


@pytest.mark.full
def test_replicas(folders, wanted):
    with LLM(folders["kept"], **FLOAT32, data_parallel_size=2) as llm:
        assert tokens(llm) == wanted["kept"]


@pytest.mark.costly
@pytest.mark.parametrize("name", ["FalconH1ForCausalLM", "Qwen3NextForCausalLM", "Lfm2ForCausalLM"])
def test_models_with_recurrent_states(name, tmp_path):
    model = tiny_class_model(name).to(torch.bfloat16)
    folder = str(save_quantised(tmp_path, "ct-int8-channel", model))
    prompts = [[3 + token % 60 for token in prompt] for prompt in PROMPTS[:4]]
    options = {
        "block_size": 64,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "num_kv_blocks": 60,
        "max_num_batched_tokens": 90,
    }
    found = {}
    for option in ("dequantize", "keep"):
        with LLM(folder, **(FLOAT32 | options), quantization=option) as llm:
            assert (num_kept(llm._engine.model_runner.binding.model) > 0) == (option == "keep")
            for _ in range(2):
                found.setdefault(option, []).append(token_ids(generate(llm, prompts, GREEDY)))
    assert found["keep"] == found["dequantize"]
