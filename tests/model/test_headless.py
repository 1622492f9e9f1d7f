"""Embedding models saved without a head: they embed as `transformers` does, and are refused for all that generates."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModel

from nanovllm import LLM, BeamSearchParams, EmbeddingParams, SamplingParams
from nanovllm.errors import UnsupportedModelError
from nanovllm.features.engine_config import EngineConfig
from nanovllm.models import loader
from tests.support import async_llms
from tests.support.llms import assert_idle_and_whole, generate, greedy, token_ids
from tests.support.other_models import small
from tests.support.snapshots import Snapshot, assert_untouched
from tests.support.tiny_models import VOCAB_SIZE, edit_json, random_prompts, save_tiny, tiny_model, tiny_tokenizer

SMALL = {"max_model_len": 256, "num_kv_blocks": 65, "block_size": 16}
PROMPTS = random_prompts(4, low=1, high=90)
REFUSAL = "MistralModel has no language model head, so it generates nothing: it embeds"


def save_base(folder, family="mistral", **options):
    """A folder of the family's base class, in several files of weights, with a tokenizer."""
    tiny_model(family, **options).base_model.save_pretrained(folder, max_shard_size="500KB")
    tiny_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **SMALL) as llm:
        yield llm


def last_states(model):
    with torch.no_grad():
        return [model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy() for prompt in PROMPTS]


def assert_embeds(llm, model, *, atol=1e-4):
    outputs = llm.embed(PROMPTS, normalize=False, use_tqdm=False)
    for output, expected in zip(outputs, last_states(model), strict=True):
        np.testing.assert_allclose(output.embedding, expected, atol=atol)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "llama"])
@pytest.mark.parametrize("is_eager", [False, True])
def test_it_embeds_as_automodel_and_generates_nothing(tmp_path, family, is_tied, is_eager, caplog):
    save_base(tmp_path, family, tie_word_embeddings=is_tied)
    model = AutoModel.from_pretrained(tmp_path)
    with LLM(tmp_path, enforce_eager=is_eager, **SMALL) as llm:
        assert_embeds(llm, model)
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no language model head"):
            llm.generate(PROMPTS[0])
        assert_idle_and_whole(llm)
    assert caplog.text.count("has no language model head") == 1


def test_no_memory_is_taken_for_a_head(folder):
    loaded = loader.load_weights(str(folder), EngineConfig())
    base = AutoModel.from_pretrained(folder)
    rows = loaded.model.get_output_embeddings().weight
    assert loaded.model.num_parameters() == base.num_parameters() + rows.numel()
    assert len(rows) < VOCAB_SIZE and not rows.any()


def test_a_base_class_with_the_weights_of_a_head_generates(tmp_path):
    save_tiny(tmp_path, "mistral")
    with LLM(tmp_path, **SMALL) as llm:
        expected = token_ids(generate(llm, PROMPTS, greedy(4)))
    edit_json(tmp_path / "config.json", architectures=["MistralModel"])
    with LLM(tmp_path, **SMALL) as llm:
        assert token_ids(generate(llm, PROMPTS, greedy(4))) == expected


MESSAGES = [{"role": "user", "content": "hello"}]
GENERATING = {
    "generate": lambda llm: llm.generate("hello"),
    "some": lambda llm: llm.generate([[1], [2]], [EmbeddingParams(), SamplingParams()]),
    "prompt_logprobs": lambda llm: llm.generate([1, 2], SamplingParams(prompt_logprobs=0, max_tokens=1)),
    "as_completed": lambda llm: next(llm.as_completed("hello")),
    "stream": lambda llm: next(llm.stream("hello")),
    "chat": lambda llm: llm.chat(MESSAGES),
    "chat without a template": lambda llm: llm.chat(MESSAGES, chat_template="{{ no_such() }}"),
    "beam_search": lambda llm: llm.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=2)),
    "yes_no": lambda llm: llm.score("a", ["b"]),
}


@pytest.mark.costly
@pytest.mark.parametrize("call", GENERATING)
def test_each_call_that_generates_is_refused_by_name(llm, call):
    before = llm.stats()
    with pytest.raises(ValueError, match=REFUSAL):
        GENERATING[call](llm)
    assert llm.stats() == before
    assert not llm.can_generate


def test_scores_are_cosines_of_embeddings(llm):
    query, document = (one.embedding for one in llm.embed(["a query", "a document"], use_tqdm=False))
    for method in ("auto", "cosine"):
        (score,) = llm.score("a query", "a document", method=method, use_tqdm=False)
        assert score.score == pytest.approx(float(query @ document), abs=1e-5)


async def test_an_idle_engine_touches_no_head(folder, monkeypatch, info_log):
    monkeypatch.setattr("nanovllm.fast.gpu.rehearsal.DEVICES", {"cpu"})
    with LLM(folder, **SMALL) as llm:
        engine = llm._engine
        while engine.use_idle_time(captures=True):
            pass
        assert engine.model_runner.paths.num_rehearsed > 0
        assert_embeds(llm, AutoModel.from_pretrained(folder))
        assert_idle_and_whole(llm)
    async with async_llms.AsyncLLM(str(folder), prepares_when_idle=True, **SMALL) as served:
        (output,) = await served.embed(["hello"])
        with pytest.raises(ValueError, match=REFUSAL):
            await async_llms.collect(served.chat(MESSAGES))
        assert (await served.score("a", "b", method="auto"))[0].score is not None
        await async_llms.assert_idle_and_whole(served)
    assert output.embedding is not None
    assert "failed" not in info_log.text


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}, {"prefix_cache_dir": "cache"}],
    ids=str,
)
def test_it_embeds_in_other_forms_of_the_engine(folder, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    with LLM(str(folder), **SMALL, **options) as llm:
        assert_embeds(llm, AutoModel.from_pretrained(folder))
        with pytest.raises(ValueError, match=REFUSAL):
            llm.generate("hello")


def test_quantised_weights_embed_nearly_the_same(folder):
    with LLM(folder, quantization="int8", **SMALL) as llm:
        outputs = llm.embed(PROMPTS, use_tqdm=False)
    for output, expected in zip(outputs, last_states(AutoModel.from_pretrained(folder)), strict=True):
        assert output.embedding @ expected / np.linalg.norm(expected) > 0.99


@pytest.mark.parametrize("is_part", [False, True])
def test_a_live_base_embeds_and_stays_its_owners(is_part):
    causal = tiny_model("mistral")
    base = causal.model if is_part else AutoModel.from_config(causal.config).eval()
    before = Snapshot(base)
    with LLM(base, tokenizer=tiny_tokenizer(), **SMALL) as llm:
        assert_embeds(llm, base)
        assert_untouched(base, before)
        with torch.no_grad():
            base.layers[0].self_attn.v_proj.weight.mul_(0.5)
        assert_embeds(llm, base)
        with pytest.raises(ValueError, match=REFUSAL):
            llm.generate("hello")


def test_drafts_are_refused(folder):
    with pytest.raises(ValueError, match=r"speculation is 'suffix', but MistralModel has no .* Leave speculation out"):
        LLM(folder, speculation="suffix", **SMALL)
    with pytest.raises(ValueError, match=r"draft_model is .* it has no language model head, so it drafts nothing"):
        LLM(tiny_model(), tokenizer=tiny_tokenizer(), speculation="draft", draft_model=str(folder), **SMALL)


POOLED = {  # modules' (name, type), config of the pooling
    "mean": ([("1_Pooling", "Pooling")], {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}),
    "two": ([("1_Pooling", "Pooling")], {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}),
    "by name": ([("1_Pooling", "Pooling")], {"pooling_mode": "mean"}),
    "dense": ([("1_Pooling", "Pooling"), ("2_Dense", "Dense")], {"pooling_mode_lasttoken": True}),
    "last": ([("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")], {"pooling_mode_lasttoken": True}),
    "last by name": ([("1_Pooling", "Pooling")], {"pooling_mode": "lasttoken", "include_prompt": True}),
}


@pytest.mark.parametrize("name", POOLED)
def test_another_pooling_than_that_of_the_last_token_is_refused(tmp_path, name):
    modules, pooling = POOLED[name]
    save_base(tmp_path)
    kind = "sentence_transformers.models."
    named = [{"path": "", "type": f"{kind}Transformer"}]
    named += [{"path": path, "type": f"{kind}{module}"} for path, module in modules]
    (tmp_path / "modules.json").write_text(json.dumps(named))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 256} | pooling))
    if name.startswith("last"):
        with LLM(tmp_path, enforce_eager=True, **SMALL) as llm:
            assert_embeds(llm, AutoModel.from_pretrained(tmp_path))
        return
    with pytest.raises(UnsupportedModelError, match=r"MistralModel of .* embeds otherwise than by the last token's"):
        LLM(tmp_path, enforce_eager=True, **SMALL)


OTHERS = {
    "both directions": ("Gemma3Text", {"use_bidirectional_attention": True, "head_dim": 16}, "in both directions"),
    "encoder": ("Bert", {}, "BertModel.* has no language model head"),
    "parts": ("OPT", {"ffn_dim": 64}, "OPTModel has no head, and OPTForCausalLM does not"),
}


@pytest.mark.costly
@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_bases_that_are_no_causal_decoders_are_refused(tmp_path, name, is_live):
    family, options, message = OTHERS[name]
    model = small(family, model_class=f"{family}Model", **options)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        LLM(model if is_live else str(tmp_path), skip_tokenizer_init=not is_live, max_model_len=64, block_size=16)
