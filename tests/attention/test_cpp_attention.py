"""The C++ backend: build and cache of its kernels, when it is chosen, and the packed weights that go with it."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanovllm import LLM
from nanovllm.fast.attention import cpp
from nanovllm.fast.kernels import cpp as kernels
from nanovllm.fast.replaced_layers import FastLayers
from nanovllm.layout import build_layout
from tests.support.cpu_answers import ON_A_CPU, OPTIONS, by_transformers, tokens
from tests.support.paged_cases import PagedCase, assert_dense
from tests.support.paged_cases import cpp as cpp_backend
from tests.support.sanitizer import check_sanitized
from tests.support.shared_decodes import changing_steps
from tests.support.tiny_models import DTYPES, tiny_model

pytestmark = ON_A_CPU


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-O0"))  # a third of the time; nothing is computed
    return tmp_path / "kernels"


@pytest.fixture
def layers_as_they_are(monkeypatch):
    """Where the C++ kernel cannot be had, layers are compiled, which takes ten seconds."""
    monkeypatch.setattr(FastLayers, "compile_layers", lambda *_: None)


@pytest.fixture(params=[1, 2, 7])
def num_threads(request):
    """A context is cut into more shares, and a product into more parts, the more threads there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
@DTYPES
def test_a_context_cut_into_shares_gives_the_same_as_one_in_one_piece(dtype):
    assert_dense(cpp_backend, [(200, 1), (0, 1), (99, 1), (250, 1)], dtype=dtype)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("traits", [{}, {"window": 41}], ids=str)
def test_decodes_over_runs_of_every_length_equal_the_dense_ones(block_size, traits):
    """Matrix tiles take 32 tokens at once; the window's first token is in the middle of these."""
    ends = [1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 159]
    assert_dense(cpp_backend, [(end - 1, 1) for end in ends], dtype=torch.bfloat16, block_size=block_size, **traits)


@pytest.mark.parametrize("num_kv_heads, groups", [(11, 3), (1, 3), (2, 1), (5, 7)])
def test_decodes_of_more_heads_than_tiles_have_lanes_equal_the_dense_ones(num_kv_heads, groups):
    assert_dense(
        cpp_backend,
        [(99, 1), (31, 1), (70, 1)],
        dtype=torch.bfloat16,
        block_size=64,
        num_kv_heads=num_kv_heads,
        groups=groups,
    )


@pytest.mark.usefixtures("num_threads")
@DTYPES
@pytest.mark.parametrize("shared", [1, 6])
def test_a_prefix_that_is_read_once_for_all_gives_what_reading_it_for_each_gives(shared, dtype):
    spans = [(96, 1), (100, 1), (97, 1), (96, 30), (111, 1)]
    case = PagedCase(spans, dtype=dtype, shared=shared)
    backend = cpp_backend(case)
    groups = backend.plan(case.layout).shared_decodes.groups
    assert groups.shared.tolist() == [16 * shared] and sorted(groups.members) == list(range(4))
    case.check(case.run(backend))


@DTYPES
def test_chunks_are_the_same_to_the_bit_with_any_number_of_threads(dtype):
    """Many threads get items of fewer rows."""
    outputs, before = [], torch.get_num_threads()
    for num_threads in (1, 3, 24):
        torch.set_num_threads(num_threads)
        case = PagedCase([(0, 150), (21, 70), (0, 33)], dtype=dtype)
        outputs.append(case.run(cpp_backend(case)))
    torch.set_num_threads(before)
    case.check(outputs[0])
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_only_whole_blocks_that_every_member_sees_are_shared(monkeypatch):
    """The third shares one block with the first two, which share four; the last has a first block of its own."""
    monkeypatch.setattr(cpp, "MIN_SHARING_QUERIES", 1)
    case = PagedCase([(70, 1), (63, 1), (40, 1), (33, 1)])
    tables = [[1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 9, 8], [7, 2, 3]]
    entries = [entry._replace(block_table=table) for entry, table in zip(case.entries, tables, strict=True)]

    def shared(of):
        groups = cpp_backend(case).plan(build_layout(of, 16)).shared_decodes.groups
        parts = np.split(groups.members, groups.starts[1:-1])
        return {tuple(part.tolist()): tokens for part, tokens in zip(parts, groups.shared.tolist(), strict=True)}

    assert shared(entries) == {(0, 1, 2): 16, (3,): 0}
    assert shared(entries[:2]) == {(0, 1): 64}
    assert shared(entries[:1]) == {(0,): 0}


def test_few_queries_read_for_themselves():
    for members, expected in ((3, 0), (4, 96)):  # of three heads a KV head each
        case = PagedCase([(96, 1)] * members, shared=6)
        assert cpp_backend(case).plan(case.layout).shared_decodes.groups.shared.tolist() == [expected]


@pytest.mark.parametrize(
    "table, message",
    [([1, 2, 40], "names block 40"), ([1, -1, 2], "names block -1"), ([1, 2], "ends at 32 tokens, not 38")],
)
def test_a_bad_block_table_is_refused_before_a_kernel_sees_it(table, message):
    case = PagedCase([(37, 1)])
    layout = replace(case.layout, entries=[case.entries[0]._replace(block_table=table)])
    with pytest.raises(ValueError, match=message):
        cpp_backend(case).plan(layout)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_tables_kept_from_step_to_step_are_those_made_anew(seed):
    case = PagedCase([(5, 1)])
    backend = cpp_backend(case)
    for entries in changing_steps(seed):
        layout = build_layout(entries, 16)
        kept, new = backend.plan(layout), cpp_backend(case).plan(layout)
        for own, other in ((kept.decode_rows, new.decode_rows), (kept.chunk_rows, new.chunk_rows)):
            for row, context in enumerate(own.contexts.tolist()):
                assert own.tables[row, : -(-context // 16)].tolist() == other.tables[row, : -(-context // 16)].tolist()


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="the sanitizer's library is found through g++")
def test_the_kernels_keep_within_their_memory(tmp_path):
    """A build with AddressSanitizer, in a process of its own: attention, sampling, states, quantised products, models.

    All are of one shape, so that there is one build a dtype. What tiles load, the sanitizer does not see.
    """
    script = f"""
        import torch
        from nanovllm import LLM, SamplingParams
        from nanovllm.fast.kernels import cpp as kernels
        from nanovllm.fast.kernels.cpp_states import load_state_kernels
        from nanovllm.models.packed_linears import PackedLinear
        from nanovllm.models.quantised.blocks import FORMATS, QuantisedLinear
        from tests.support.paged_cases import MIXED_STEPS, assert_dense, cpp
        from tests.support.quantised import random_blocks
        from tests.support.tiny_models import random_prompts, save_tiny

        kernels.FLAGS = (*kernels.FLAGS, "-fsanitize=address", "-O0")
        load_state_kernels()  # and their start check
        shape = {{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}}
        for dtype in (torch.float32, torch.bfloat16):
            for spans in MIXED_STEPS.values():
                assert_dense(cpp, spans, dtype=dtype)
            for family in ("llama", "qwen3"):
                folder = {str(tmp_path)!r} + f"/{{family}}-{{dtype}}"
                save_tiny(folder, family, dtype=dtype, num_layers=1, **shape)
                with LLM(folder, num_kv_blocks=40, block_size=16, max_num_seqs=4) as llm:
                    assert len(llm._engine.model_runner.binding.fused_layers) == 1
                    prompts = random_prompts(6, low=1, high=100, seed=5)
                    options = {{"top_k": 90, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 3}}
                    params = [SamplingParams(max_tokens=5, **options) if n % 2 else SamplingParams(max_tokens=5)
                              for n in range(6)]
                    llm.generate(prompts, params, use_tqdm=False)
            own = kernels.load_kernels(dtype, 64, 3)
            for kind in FORMATS:
                layer = QuantisedLinear(kind, random_blocks(kind, 64, 256), torch.ones(64, dtype=dtype), dtype=dtype)
                packed = PackedLinear(layer, own)
                assert all(packed(torch.ones(n, 256, dtype=dtype)).isfinite().all() for n in (1, 2, 3, 4, 5, 33))
        print("no complaints")
    """
    check_sanitized(script, tmp_path)
    assert len(list((tmp_path / "kernels").iterdir())) == 4  # two dtypes, sampling, and states


SMALL_GROUPS = [pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 5)]  # those of other tests are 1 to 8


@pytest.mark.full
@pytest.mark.parametrize("groups", [*SMALL_GROUPS, 7, 12, 71])
def test_groups_of_any_size_are_right(groups):
    """Uneven ones do not fill the kernel's lanes; very large ones leave room for few positions at once."""
    assert_dense(cpp_backend, [(33, 1), (0, 17), (48, 70), (7, 1)], num_kv_heads=1, groups=groups, head_dim=32)


def test_a_live_module_is_not_packed_and_its_new_weights_count():
    model = tiny_model()
    with LLM(model, **OPTIONS) as llm:
        assert llm._engine.model_runner.config.attention_backend == "cpp"
        assert tokens(llm) == by_transformers(model)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
        assert tokens(llm) == by_transformers(model)
        assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.full
def test_the_kernel_is_built_once_for_a_processor_and_kept(empty_cache, monkeypatch):
    kernels.load_kernels(torch.float32, 64, 3)
    (library,) = empty_cache.iterdir()  # nothing else is left behind
    monkeypatch.setattr(kernels, "_build", lambda _, other: shutil.copy(library, other))
    kernels.load_kernels(torch.float32, 64, 3)
    assert list(empty_cache.iterdir()) == [library]
    monkeypatch.setattr(kernels, "processor", lambda: "another one, with the same home folder")
    kernels.load_kernels(torch.float32, 64, 3)
    assert len(list(empty_cache.iterdir())) == 2


@pytest.mark.full
def test_models_with_heads_of_other_sizes_share_what_does_not_depend_on_them(empty_cache):
    kernels.load_kernels(torch.float32, 64, 3)
    kernels.load_kernels(torch.float32, 32, 1)
    objects = [path.name.split("-")[0] for path in (empty_cache.parent / "objects").iterdir()]
    assert sorted(objects) == ["decoder_layer", "paged_attention", "paged_attention"]
    assert len(list(empty_cache.iterdir())) == 2


def assert_done_without(model, words, caplog):
    with LLM(model, **OPTIONS) as llm:
        assert llm._engine.model_runner.config.attention_backend == "sdpa"
    assert words in caplog.text


@pytest.mark.usefixtures("layers_as_they_are")
def test_a_kernel_that_does_not_compile_is_said_in_a_line_and_done_without(empty_cache, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-no-such-flag"))
    assert_done_without(tiny_model(), "no-such-flag", caplog)
    with pytest.raises(ValueError, match="no-such-flag"):
        LLM(tiny_model(), attention_backend="cpp", **OPTIONS)
    assert not any(path.is_file() for path in empty_cache.parent.rglob("*"))


@pytest.mark.usefixtures("layers_as_they_are")
def test_a_cache_folder_that_cannot_be_written_is_said_and_done_without(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "file"))
    assert_done_without(tiny_model(), str(tmp_path / "file"), caplog)


@pytest.mark.usefixtures("layers_as_they_are")
def test_a_dtype_that_the_kernel_does_not_serve_is_named(caplog):
    model = tiny_model().half()
    assert_done_without(model, "float16", caplog)
    with pytest.raises(ValueError, match=r"attention_backend='cpp'.*float16"):
        LLM(model, attention_backend="cpp", **OPTIONS)


def test_cpp_contradicts_eager_mode():
    with pytest.raises(ValueError, match="enforce_eager"):
        LLM(tiny_model(), attention_backend="cpp", enforce_eager=True, **OPTIONS)
