"""K and V in 8-bit floats: in any schedule the tokens of `transformers` over K and V that are rounded alike.

An engine on a CPU refuses them; these tests lift the refusal and compute by the form without kernels.
"""

import functools

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention import kv_formats, write_states, write_states_compiled
from nanovllm.block_manager import root_hash
from nanovllm.features import option_checks
from nanovllm.features.kv_fp8.fp8_format import CACHE_DTYPE, Fp8Format, write_rows
from nanovllm.models.sizes import read_sizes
from tests.support import layer_kinds
from tests.support.class_cases import chunk_prompts
from tests.support.equality import model, prompts
from tests.support.fp8_caches import OPTION, Fp8Case, own_answer, rounded
from tests.support.llms import check_engine, greedy, submit
from tests.support.paged_cases import MIXED_STEPS, SPANS, TRAITS, sdpa
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import FAMILIES, tiny_model, tiny_tokenizer

NUM_NEW_TOKENS = 8
GREEDY = greedy(NUM_NEW_TOKENS)
EAGER = {"attention_backend": "sdpa", "enforce_eager": True, **OPTION}
SETTINGS = {
    "defaults": {},
    "smallest budget": {"max_num_batched_tokens": 20, "max_num_seqs": 4, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "block_size": 32},
    "preemption": {"num_kv_blocks": 17, "block_size": 16, "max_model_len": 230, "max_num_batched_tokens": 80},
    "drafts": {"speculation": "suffix", "block_size": 16},
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(option_checks, "why_no_8_bit_kv", lambda device: None)


@functools.cache
def expected(family):
    return [own_answer(model(family), prompt, NUM_NEW_TOKENS) for prompt in prompts()]


def generate(llm, batch, params=GREEDY):
    outputs = llm.generate(batch, params, use_tqdm=False)
    check_engine(llm)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def alone(tokens):
    return [[one] for one in tokens]


# ------------------------------------------------------------------------------------------------------------ the form


@pytest.mark.parametrize("is_value", [False, True], ids=["K", "V"])
def test_a_row_is_rounded_by_its_own_largest_number(is_value):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(48, 3, 80, generator=generator) * torch.logspace(-30, 30, 48)[:, None, None]
    rows[5] = 0
    cache = torch.zeros(64, 3, 84, dtype=CACHE_DTYPE)
    slots = torch.randperm(64, generator=generator)[:48]
    write_rows(rows, cache, slots, is_value=is_value)
    found = Fp8Format().read(cache, torch.float32, is_value)
    assert torch.equal(found[slots], rounded(rows))
    largest = rows.abs().amax(-1, keepdim=True)
    assert ((found[slots] - rows).abs() <= largest * (16 / 448) * (1 + 1e-6)).all()
    torch.testing.assert_close(found[slots].abs().amax(-1, keepdim=True), largest, rtol=1e-6, atol=0)
    others = torch.ones(64, dtype=torch.bool)
    others[slots] = False
    assert not found[others].any(), "other slots stay as they are"


def test_a_row_does_not_depend_on_its_neighbours():
    rows = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(1))
    together = torch.zeros(32, 2, 68, dtype=CACHE_DTYPE)
    apart = torch.zeros_like(together)
    write_rows(rows, together, torch.arange(32))
    for row in reversed(range(32)):
        write_rows(rows[row : row + 1], apart, torch.tensor([row]))
    assert torch.equal(together, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_steps_equal_dense_attention_over_rounded_k_and_v(dtype):
    for spans in MIXED_STEPS.values():
        case = Fp8Case(spans, dtype=dtype)
        case.check(case.run(sdpa(case), num_padding=3))


@pytest.mark.parametrize("trait", TRAITS)
def test_every_trait_over_poisoned_blocks_equals_dense_attention(trait):
    case = Fp8Case(SPANS, **TRAITS[trait])
    case.check(case.run(sdpa(case), through_operator=True))


def test_compiled_layers_write_the_same_bytes():
    kv_formats.setdefault(CACHE_DTYPE, Fp8Format())
    write = torch.compile(write_states_compiled, fullgraph=True, backend="aot_eager")
    key, value = torch.randn(2, 1, 2, 5, 32).unbind()
    slots = torch.tensor([3, 17, 18, 40, 1])
    plain, compiled = torch.zeros(2, 2, 48, 2, 36, dtype=CACHE_DTYPE).unbind()
    write_states(key, value, plain, slots)
    write(key, value, compiled, slots)
    assert torch.equal(plain, compiled) and plain.any()


# -------------------------------------------------------------------------------------------------------- any schedule


@pytest.mark.costly
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_over_rounded_k_and_v(family, name):
    setting = SETTINGS[name]
    with LLM(model(family), **EAGER, **setting) as llm:
        assert generate(llm, prompts()) == alone(expected(family))
        assert (llm.stats().num_preemptions > 0) == (name == "preemption")
        assert generate(llm, prompts()) == alone(expected(family)), "with a warm cache"
        assert (llm.stats().prefix_cache_hits > 0) == setting.get("enable_prefix_caching", True)
        assert all(cache.dtype == CACHE_DTYPE for cache in llm._engine.model_runner.binding.caches.of_layers)


def test_rounding_is_seen_in_tokens():
    with LLM(model("llama"), attention_backend="sdpa", enforce_eager=True) as llm:
        plain = generate(llm, prompts())
    assert sum(one != other for one, other in zip(plain, alone(expected("llama")), strict=True)) > 3


@pytest.mark.costly
@pytest.mark.parametrize("family", layer_kinds.MODELS)
def test_every_kind_of_layer_keeps_rounded_k_and_v(family):
    """Windows, chunks, soft-caps, sinks, layers that share K and V, latent attention; chunks, and groups of caches."""
    module = layer_kinds.model(family)
    answers = [own_answer(module, prompt, NUM_NEW_TOKENS) for prompt in layer_kinds.prompts()]
    tight = {"block_size": 16, "num_kv_blocks": 40, "max_model_len": 160, "max_num_batched_tokens": 50}
    with LLM(module, **EAGER, **tight, max_num_seqs=6) as llm:
        for _ in range(2):
            assert generate(llm, layer_kinds.prompts()) == alone(answers)


@pytest.mark.costly
@pytest.mark.parametrize("class_name", ["Qwen3_5ForCausalLM", "FalconH1ForCausalLM"])
def test_states_of_hybrids_stay_as_they_are(class_name):
    module = tiny_class_model(class_name)
    options = {"max_model_len": 224, "max_num_seqs": 4, "max_num_batched_tokens": 90, "block_size": 64}
    found = []
    for own in ({}, {"max_num_batched_tokens": 70, "max_num_seqs": 2}):
        with LLM(module, **EAGER, **(options | own), num_kv_blocks=60) as llm:
            found += [generate(llm, chunk_prompts(), greedy(6)) for _ in range(2)]
            caches = llm._engine.model_runner.binding.caches
            assert {state.dtype for states in caches.of_records for state in states} == {torch.float32}
            assert {cache.dtype for cache in caches.of_layers} == {CACHE_DTYPE}
    assert all(each == found[0] for each in found)


def test_samples_forks_and_aborts_change_nothing():
    sampled = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    prompt = prompts()[9]
    with LLM(model("llama"), **EAGER, block_size=16) as llm:
        (wanted,) = generate(llm, [prompt], sampled)
        assert len({tuple(tokens) for tokens in wanted}) > 1
    with LLM(model("llama"), **EAGER, **SETTINGS["preemption"]) as llm:
        engine = llm._open_engine()
        for number, other in enumerate(prompts()[10:14]):
            submit(engine, f"aborted {number}", other, greedy(200))
        for _ in range(6):
            engine.step()
        engine.abort("aborted 1")
        for _ in range(3):
            engine.step()
        for number in (0, 2, 3):
            engine.abort(f"aborted {number}")
        assert generate(llm, [prompt, *prompts()[5:8]], [sampled, *3 * [GREEDY]])[0] == wanted
        running = llm.stream(prompts()[11], greedy(40))
        first = next(running)
        *_, last = llm.fork(first.request_id, len(prompts()[11]), GREEDY)
        assert last.outputs[0].token_ids == expected("llama")[11]
        running.close()


# ------------------------------------------------------------------------------------------------------------ crossings


def open_folder(folder, **options):
    return LLM(folder, tokenizer=tiny_tokenizer(), **({"dtype": "float32", "block_size": 16} | EAGER | options))


def test_blocks_return_from_host_memory_with_their_scales(folder):
    tight = {"num_kv_blocks": 20, "max_model_len": 230, "prefix_cache_host_bytes": 2**24}
    with open_folder(folder, **tight) as llm:
        found = [generate(llm, prompts()[8:]) for _ in range(3)]
        assert llm.stats().tiers.num_loaded_blocks > 0
    assert found == 3 * [alone(expected("llama")[8:])]


def test_files_serve_engines_of_the_same_form_alone(folder, tmp_path):
    options = {"prefix_cache_dir": str(tmp_path / "prefixes"), "num_kv_blocks": 100, "max_model_len": 230}
    loaded = []
    for own in ({}, {}, {"kv_cache_dtype": "auto"}):
        with open_folder(folder, **options, **own) as llm:
            tokens = generate(llm, prompts()[8:])
            loaded.append(llm.stats().tiers.num_loaded_blocks)
            assert (tokens == alone(expected("llama")[8:])) == (not own)
    assert loaded[0] == 0 < loaded[1] and loaded[2] == 0


def test_the_root_of_prefixes_names_the_form(folder):
    roots = []
    for own in ({}, {"kv_cache_dtype": "auto"}):
        with open_folder(folder, **own) as llm:
            roots.append(root_hash(llm._open_engine().block_manager.hash_seed, ""))
    assert roots[0] != roots[1]


def test_a_token_takes_half_of_the_bytes_of_bfloat16_and_a_scale(folder):
    taken = {}
    for form in ("auto", "fp8"):
        with open_folder(folder, kv_cache_dtype=form, dtype="bfloat16", kv_cache_memory_bytes=2**22) as llm:
            caches = llm._engine.model_runner.binding.caches
            taken[form] = caches.num_bytes(1), llm.config.num_kv_blocks
            assert sum(caches.group_bytes.values()) == caches.num_bytes(16) * llm.config.num_kv_blocks
        assert read_sizes(folder, dtype="bfloat16", kv_cache_dtype=form).kv_token_bytes == taken[form][0]
    (plain, few), (rounded_bytes, many) = taken["auto"], taken["fp8"]
    assert rounded_bytes * 2 * 64 == plain * (64 + 4) and many > 1.8 * few


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("source", ["module", "missing"])
def test_a_cpu_refuses_before_it_loads(monkeypatch, tmp_path, source):
    monkeypatch.undo()
    name = tiny_model("llama") if source == "module" else str(tmp_path / "no such model")
    with pytest.raises(ValueError, match=r"kv_cache_dtype is 'fp8', but the device is a CPU, .* slower\. Leave it out"):
        LLM(name, device="cpu", **OPTION)


@pytest.mark.parametrize("mode", ["data_parallel_size", "tensor_parallel_size"])
def test_processes_of_a_cpu_refuse_it_too(monkeypatch, folder, mode):
    monkeypatch.undo()
    with pytest.raises((ValueError, RuntimeError), match="kv_cache_dtype is 'fp8', but the device is a CPU"):
        LLM(folder, tokenizer=tiny_tokenizer(), device="cpu", **{mode: 2}, **OPTION)


def test_an_older_gpu_refuses_by_its_capability(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert option_checks.why_no_8_bit_kv(torch.device("cuda:1")) == (
        "it is for GPUs of capability 8.9 and later, and cuda:1 has 8.0"
    )


def test_a_model_without_attention_refuses():
    with pytest.raises(ValueError, match="no layer of Mamba2ForCausalLM attends"):
        LLM(tiny_class_model("Mamba2ForCausalLM"), enforce_eager=True, **OPTION)
