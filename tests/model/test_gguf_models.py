"""GGUF files: the greedy tokens and logits of `transformers` with the weights that `gguf` dequantises."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.models.gguf.file import GGUFFile
from nanovllm.models.gguf.weights import load_model, model_config
from nanovllm.models.quantised.blocks import QuantisedEmbedding, QuantisedLinear
from tests.support.class_cases import own_answers
from tests.support.cpu_answers import ON_A_CPU
from tests.support.llms import generate, greedy, token_ids
from tests.support.other_models import small
from tests.support.tiny_gguf import finish, write_gguf
from tests.support.tiny_models import VOCAB_SIZE, random_prompts, widen

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 65, "max_model_len": 256}
GREEDY = greedy(12, ignore_eos=True)
SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
PHI3_FACTORS = {
    "short_factor": [1.0 + 0.01 * i for i in range(24)],
    "long_factor": [1.5 + 0.1 * i for i in range(24)],
}
# Architecture of the file: its family, fields of its config, and the metadata that it has beside those of all.
MODELS = {
    "llama": ("Llama", {}, {"rope.dimension_count": 64, "vocab_size": VOCAB_SIZE}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
        {"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.2, "logit_scale": 4.0},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("Qwen3", {"head_dim": 128}, {}),
    "qwen3moe": (
        "Qwen3Moe",
        EXPERTS,
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64},
    ),
    "gemma": ("Gemma", {}, {}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": 8, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 20.0},
        {"attention.sliding_window": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 6,
            "sliding_window": 8,
            "query_pre_attn_scalar": 64,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {"attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": (
        "Phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 128,
                **PHI3_FACTORS,
            },
        },
        {"rope.dimension_count": 48, "rope.scaling.original_context_length": 128},
    ),
}


def make(architecture, **overrides):
    """A wide random module of the class."""
    family, own, _ = MODELS[architecture]
    torch.manual_seed(0)
    model = small(family, **(SIZES | own | overrides))
    widen(model)
    if architecture.startswith("gemma"):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter -= 1  # from zero, where it is added
    return model


def written(tmp_path, architecture, kind="Q8_0", **options):
    """A file, and the module with its weights."""
    model = make(architecture, **options.pop("overrides", {}))
    metadata = MODELS[architecture][2] | options.pop("metadata", {})
    path = tmp_path / f"{architecture}.gguf"
    return write_gguf(path, model, kind, architecture=architecture, metadata=metadata, **options), model


def engine_tokens(path, prompts, **options):
    with LLM(path, **(OPTIONS | {"dtype": "float32"} | options)) as llm:
        return token_ids(generate(llm, prompts, GREEDY))


@pytest.mark.costly
@pytest.mark.parametrize("architecture", MODELS)
def test_logits_are_those_of_transformers_with_the_dequantised_weights(tmp_path, architecture):
    more = {}
    if architecture == "phi3":
        more = {f"rope_factors_{kind}.weight": PHI3_FACTORS[f"{kind}_factor"] for kind in ("long", "short")}
    path, reference = written(tmp_path, architecture, more=more)
    model = load_model(GGUFFile(path), torch.float32, keeps_blocks=True).eval()
    token_ids = torch.tensor(random_prompts(1)[0][:40])[None]
    with torch.no_grad():
        ours, theirs = model(token_ids).logits, reference(token_ids).logits
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    assert theirs.std() > 0.1


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32"])
def test_greedy_tokens_of_a_float32_engine_equal_those_of_transformers(tmp_path, kind):
    path, reference = written(tmp_path, "llama", kind)
    prompts = random_prompts(5, high=40)
    assert engine_tokens(path, prompts) == own_answers(reference, prompts, 12)


@pytest.mark.costly
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_greedy_tokens_of_other_architectures_and_of_mixed_types(tmp_path, architecture):
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output.weight": "Q6_K"}  # as in Q4_K_M
    path, reference = written(tmp_path, architecture, "Q4_K", kinds=kinds)
    prompts = random_prompts(3, high=40)
    assert engine_tokens(path, prompts) == own_answers(reference, prompts, 12)


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 32, "max_num_seqs": 4},  # chunks
        {"num_kv_blocks": 9, "max_model_len": 96},  # preemption
        {"overlap": True},
        {"attention_backend": "sdpa"},
    ],
    ids=str,
)
def test_scheduling_does_not_change_the_tokens(tmp_path, options):
    path, reference = written(tmp_path, "llama", "Q4_K", kinds={"attn_v": "Q6_K"})
    prompts = random_prompts(6, high=60)
    prompts[1][:32] = prompts[0][:32] = prompts[2][:32]  # a cached prefix
    assert engine_tokens(path, prompts, **options) == own_answers(reference, prompts, 12)


def test_a_file_overwritten_in_place_changes_no_engine_that_is_there_and_lends_none_its_prefixes(tmp_path):
    """Both engines have the same block hashes for a prompt, whose KV differs: each finds its own blocks alone."""
    path, first = written(tmp_path, "llama")
    prompts = random_prompts(2, low=40, high=60)
    with LLM(path, **OPTIONS, dtype="float32") as before:
        expected = own_answers(first, prompts, 12)
        assert token_ids(generate(before, prompts, GREEDY)) == expected
        second = make("llama")
        widen(second, seed=1)
        other = write_gguf(tmp_path / "other.gguf", second, "Q8_0", metadata=MODELS["llama"][2])
        path.write_bytes(other.read_bytes())
        with LLM(path, **OPTIONS, dtype="float32") as after:
            managers = [llm._engine.block_manager for llm in (before, after)]
            assert managers[0].hash_seed == managers[1].hash_seed
            assert token_ids(generate(after, prompts, GREEDY)) == own_answers(second, prompts, 12) != expected
            before.reset_prefix_cache()
            assert token_ids(generate(before, prompts, GREEDY)) == expected  # computed anew


@pytest.mark.costly
@ON_A_CPU
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_of_an_odd_vocabulary_is_packed_like_any_other(tmp_path, caplog, is_tied):
    options = {"vocab_size": 517, "tie_word_embeddings": is_tied}
    path, reference = written(tmp_path, "qwen2", "Q8_0", overrides=options)
    prompts = random_prompts(3, high=40)
    params = greedy(12, ignore_eos=True, logprobs=3, repetition_penalty=1.0001)
    with LLM(path, **(OPTIONS | {"enforce_eager": False, "dtype": "float32"})) as llm:
        assert llm._engine.model_runner.binding.model.get_output_embeddings().blocks.numel() == 0
        outputs = generate(llm, prompts, params)
    assert token_ids(outputs) == own_answers(reference, prompts, 12)
    assert "dequantises" not in caplog.text
    with torch.no_grad():
        exact = [reference(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in prompts]
    for output, expected in zip(outputs, exact, strict=True):
        for token, found in output.outputs[0].logprobs[0].items():
            assert abs(found.logprob - float(expected[token])) < 1e-3


def test_linear_layers_and_embedding_keep_their_blocks_and_a_tied_head_shares_them(tmp_path):
    path, _ = written(tmp_path, "qwen2", "Q4_K")
    model = load_model(GGUFFile(path), None, keeps_blocks=True)
    assert model.get_parameter("model.norm.weight").dtype == torch.bfloat16
    linears = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(linears) == 2 * 7 + 1 and not any(type(module) is torch.nn.Linear for module in model.modules())
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, QuantisedEmbedding)
    assert model.get_output_embeddings().blocks.data_ptr() == embedding.blocks.data_ptr()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert weights < 10_000  # norms and biases


@pytest.mark.parametrize("kind, dtype", [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")])
def test_dtype_auto_is_the_type_of_the_files_matrices_and_bfloat16_for_blocks(tmp_path, kind, dtype):
    path, _ = written(tmp_path, "llama", kind)
    assert load_model(GGUFFile(path), None, keeps_blocks=True).dtype == getattr(torch, dtype)


def test_experts_are_held_dequantised_and_a_line_says_so(tmp_path, info_log):
    path, _ = written(tmp_path, "qwen3moe", "Q8_0")
    load_model(GGUFFile(path), None, keeps_blocks=True)
    assert "qwen3moe.gguf: tensors held dequantised: 6 of Q8_0" in info_log.text


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_without_blocks_every_weight_is_plain_and_equal(tmp_path, architecture):
    path, reference = written(tmp_path, architecture, "Q4_1")
    model = load_model(GGUFFile(path), torch.float32, keeps_blocks=False)
    theirs = reference.state_dict()
    assert model.state_dict().keys() == theirs.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, theirs[name]), name


def test_factors_of_rotary_frequencies_are_those_of_llama_3_1(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    scaled = make("llama", rope_parameters=rope).model.rotary_emb.inv_freq
    plain = make("llama").model.rotary_emb.inv_freq
    path, reference = written(
        tmp_path, "llama", overrides={"rope_parameters": rope}, more={"rope_freqs.weight": (plain / scaled).numpy()}
    )
    assert (plain / scaled).max() > 7
    prompts = random_prompts(3, low=100, high=150)
    assert engine_tokens(path, prompts) == own_answers(reference, prompts, 12)


def test_yarn_is_read_from_the_metadata(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.finetuned": True,
    }
    path, reference = written(tmp_path, "qwen2", metadata=metadata, overrides={"rope_parameters": rope})
    ours = load_model(GGUFFile(path), torch.float32, keeps_blocks=True).model.rotary_emb
    theirs = reference.model.rotary_emb
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_scaling == pytest.approx(theirs.attention_scaling)


def test_the_config_agrees_with_what_transformers_reads_from_the_file(tmp_path):
    from transformers import AutoConfig

    path, _ = written(tmp_path, "qwen3")
    ours, theirs = model_config(GGUFFile(path)), AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    assert type(ours) is type(theirs)
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.rope_parameters == theirs.rope_parameters


def test_a_split_file_is_read_whole(tmp_path):
    path, reference = written(tmp_path, "llama")
    whole = GGUFFile(path)
    parts = split(path, 2)
    assert {name: t.data.tobytes() for name, t in GGUFFile(parts[0]).tensors.items()} == {
        name: t.data.tobytes() for name, t in whole.tensors.items()
    }
    prompts = random_prompts(2, high=20)
    assert engine_tokens(parts[0], prompts) == own_answers(reference, prompts, 12)


def split(path, count):
    """The tensors of a file in parts, named as llama.cpp does; the metadata in the first."""
    import gguf

    reader = gguf.GGUFReader(path)
    parts = [path.with_name(f"part-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1)]
    for index, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        if index == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    kinds = field.types
                    writer.add_key_value(key, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
        for tensor in reader.tensors[index::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return parts
