"""Attention of chunks by the kernel for Hopper against dense float32 attention."""

import numpy as np
import pytest
import torch
import transformers

from nanovllm import LLM, SamplingParams
from nanovllm.fast.attention.flex_chunks import FlexChunks
from nanovllm.fast.attention.tiles import spans_of
from nanovllm.fast.kernels.prompt_attention import TOLERANCE as START_TOLERANCE
from nanovllm.fast.kernels.prompt_attention import AttentionSizes, PromptAttention, why_not
from tests.support.llms import check_engine
from tests.support.tiny_models import VOCAB_SIZE, tiny_tokenizer, widen

CUDA = torch.device("cuda")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
# First position and number of rows of each chunk.
STEPS = {
    "one row": [(0, 1)],
    "a part of a tile": [(0, 7)],
    "a tile": [(0, 128)],
    "a tile and a row": [(0, 129)],
    "a prompt": [(0, 1000)],
    "a later chunk": [(1024, 300)],
    "inside of a block": [(77, 300)],
    "one row far on": [(3000, 1)],
    "several": [(0, 300), (640, 200), (5, 3), (4096, 128)],
}


class Chunks:
    """Chunks of sequences whose blocks lie in shuffled order among blocks of NaN, after rows of decodes."""

    def __init__(self, sizes, chunks, *, num_decodes=3, sinks=False):
        generator = torch.Generator().manual_seed(len(chunks))
        self.sizes, self.chunks, self.num_decodes, block = sizes, chunks, num_decodes, sizes.block_size
        starts, rows = (np.array(part) for part in zip(*chunks, strict=True))
        counts = [-(-(start + count) // block) for start, count in chunks]
        self.tables = (torch.randperm(sum(counts) + 5, generator=generator) + 1)[: sum(counts)]
        self.table_starts = np.cumsum([0, *counts[:-1]])
        slots = (sum(counts) + 6) * block
        held = (self.tables[:, None] * block + torch.arange(block)).flatten()

        def cache(width):
            filled = torch.full((slots, sizes.num_kv_heads, width), torch.nan, dtype=sizes.dtype)
            filled[held] = torch.randn(len(held), *filled.shape[1:], generator=generator).to(sizes.dtype)
            return filled.to(CUDA)

        self.keys, self.values = (cache(width) for width in sizes.widths)
        heads = num_decodes + int(rows.sum()), sizes.num_heads, sizes.head_dim
        self.query = (2 * torch.randn(heads, generator=generator)).to(sizes.dtype).to(CUDA)
        self.sinks = torch.randn(sizes.num_heads, generator=generator).to(CUDA) if sinks else None
        spans = spans_of(np.cumsum(rows) - rows, starts, starts + rows)
        spans = np.concatenate([spans, np.zeros((2, 4), np.int64)])  # padding
        spans[:, 1] += num_decodes
        self.step = [
            torch.tensor(spans[:, 1:], dtype=torch.int32, device=CUDA),
            torch.tensor(self.table_starts[spans[:, 0]], dtype=torch.int32, device=CUDA),
            self.tables.int().to(CUDA),
        ]
        self.scaling = sizes.head_dim**-0.5

    def run(self, kernel):
        num_rows, num_heads, _ = self.query.shape
        output = self.query.new_full((num_rows + 300, num_heads, self.sizes.widths[1]), torch.nan)
        kernel.attend(
            self.query, self.keys, self.values, tuple(self.step), self.scaling, output, self.sinks,
            num_decodes=self.num_decodes,
        )  # fmt: skip
        assert output[: self.num_decodes].isnan().all()  # rows of decodes are another kernel's
        assert (output[num_rows:] == 0).all(), "padding"
        return output[self.num_decodes : num_rows]

    def dense(self):
        sizes, block, parts, row = self.sizes, self.sizes.block_size, [], self.num_decodes
        for (start, rows), first in zip(self.chunks, self.table_starts, strict=True):
            seen = torch.arange(start + rows)
            slots = (self.tables[first + seen // block] * block + seen % block).to(CUDA)
            groups = sizes.num_heads // sizes.num_kv_heads
            keys, values = (part[slots].float().repeat_interleave(groups, 1) for part in (self.keys, self.values))
            scores = torch.einsum("qhd,khd->hqk", self.query[row : row + rows].float(), keys) * self.scaling
            own, seen = torch.arange(start, start + rows, device=CUDA)[:, None], seen.to(CUDA)
            is_seen = (seen <= own) & (seen > own - (sizes.window or len(seen)))
            if sizes.chunk is not None:
                is_seen &= seen // sizes.chunk == own // sizes.chunk
            if sizes.softcap is not None:
                scores = sizes.softcap * torch.tanh(scores / sizes.softcap)
            scores = scores.masked_fill(~is_seen, -torch.inf)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks[:, None, None].expand(-1, rows, 1)], 2)
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(2)[:, :, : start + rows], values))
            row += rows
        return torch.cat(parts)


def check(sizes, chunks, **options):
    if reason := why_not(sizes, CUDA):
        pytest.skip(reason)
    case = Chunks(sizes, chunks, **options)
    output, expected, tolerance = case.run(PromptAttention(sizes, CUDA)), case.dense(), TOLERANCE[sizes.dtype]
    torch.testing.assert_close(output.float(), expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "block_size"), [((16, 8, 128), 64), ((9, 3, 64), 16), ((8, 1, 128), 128)])
def test_chunks_equal_dense_attention(heads, block_size, dtype, name):
    check(AttentionSizes(*heads, block_size, dtype), STEPS[name])


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("window", "sinks"), [(1, False), (100, False), (128, True), (1000, False), (None, True)])
def test_windows_and_sinks_equal_dense_attention(window, sinks, name):
    check(AttentionSizes(8, 2, 64, 32, torch.bfloat16, window), STEPS[name], sinks=sinks)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (100, 3.0, True), (1000, None, False)])
@pytest.mark.parametrize(
    ("heads", "block_size"),
    [((8, 4, 256), 64), ((4, 1, 256), 128), ((3, 3, 256), 16), ((4, 2, 192), 64), ((2, 2, 96), 64), ((4, 4, 80), 16)],
)
def test_other_widths_of_heads_equal_dense_attention(heads, block_size, window, softcap, sinks, name):
    """Gemma's and Qwen3.5's, Phi's; a block of 128 is fetched in two halves, and widths are filled up with zeros."""
    check(AttentionSizes(*heads, block_size, torch.bfloat16, window, softcap), STEPS[name], sinks=sinks)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("softcap", "window", "sinks"), [(2.0, None, False), (50.0, 100, False), (5.0, 1000, True)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_soft_caps_equal_dense_attention(head_dim, softcap, window, sinks, dtype, name):
    check(AttentionSizes(8, 2, head_dim, 32, dtype, window, softcap), STEPS[name], sinks=sinks)


@pytest.mark.parametrize(("chunk", "window"), [(1, None), (100, None), (256, None), (1000, 300), (8192, None)])
@pytest.mark.parametrize(("head_dim", "softcap", "sinks"), [(128, None, False), (64, 5.0, True), (256, None, True)])
def test_rows_that_see_their_own_chunk_alone_equal_dense_attention(head_dim, softcap, sinks, chunk, window):
    for chunks in STEPS.values():
        check(AttentionSizes(8, 2, head_dim, 32, torch.bfloat16, window, softcap, chunk), chunks, sinks=sinks)


@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (100, None, True), (1000, 9.0, False)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("widths", [(192, 128), (128, 64), (64, 128), (96, 64), (256, 128), (128, 256), (80, 200)])
def test_values_of_other_widths_than_keys_equal_dense_attention(widths, dtype, window, softcap, sinks):
    """DeepSeek's, and others in which tiles of K and of V have other numbers of panels."""
    head_dim, value_dim = widths
    sizes = AttentionSizes(4, 4, head_dim, 64, dtype, window, softcap, None, value_dim)
    for chunks in STEPS.values():
        check(sizes, chunks, sinks=sinks)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize(("chunk", "value_dim"), [(None, None), (None, 128), (512, None), (8192, 64)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (512, None), (4096, 50.0), (None, 30.0)])
def test_the_comparison_at_start_admits_each_form(head_dim, window, softcap, chunk, value_dim):
    sizes = AttentionSizes(8, 4, head_dim, 64, torch.bfloat16, window, softcap, chunk, value_dim)
    if reason := why_not(sizes, CUDA):
        pytest.skip(reason)
    assert PromptAttention(sizes, CUDA).error_at_start() <= START_TOLERANCE


@pytest.mark.parametrize("head_dim", [128, 256])
def test_blocks_that_left_a_window_are_not_read(head_dim):
    sizes = AttentionSizes(8, 2, head_dim, 64, torch.bfloat16, 200)
    if reason := why_not(sizes, CUDA):
        pytest.skip(reason)
    case = Chunks(sizes, [(1000, 150)])
    expected = case.dense()
    case.step[2][: (1000 - 199) // 64] = 0  # the null block
    case.keys[:64], case.values[:64] = torch.nan, torch.nan
    output = case.run(PromptAttention(sizes, CUDA))
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("chunks", [[(8192, 1152)], [(9000, 130), (3, 2)], [(2000, 900)], [(40000, 5)]], ids=str)
@pytest.mark.parametrize("heads", [(16, 8, 128), (4, 4, 64), (8, 2, 256), (2, 1, 192)], ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (3000, True)])
def test_keys_of_few_tiles_cut_in_parts_equal_dense_attention(window, sinks, heads, chunks):
    check(AttentionSizes(*heads, 64, torch.bfloat16, window), chunks, sinks=sinks)


def test_more_tiles_than_shared_memory_holds_equal_dense_attention():
    check(AttentionSizes(4, 2, 128, 16, torch.bfloat16), [(5, 3)] * 300 + [(700, 200)])


@pytest.mark.parametrize("chunks", [STEPS["several"] * 8, [(5000, 130)]], ids=["many tiles", "parts"])
@pytest.mark.parametrize(("head_dim", "softcap"), [(128, None), (128, 50.0), (256, None)])
def test_the_same_bits_whenever_a_step_is_computed(head_dim, softcap, chunks):
    sizes = AttentionSizes(16, 8, head_dim, 64, torch.bfloat16, None, softcap)
    if reason := why_not(sizes, CUDA):
        pytest.skip(reason)
    case, kernel = Chunks(sizes, chunks), PromptAttention(sizes, CUDA)
    first = case.run(kernel)
    assert all(torch.equal(case.run(kernel), first) for _ in range(30))


def test_a_wrong_kernel_is_found_at_start(monkeypatch):
    sizes = AttentionSizes(16, 8, 128, 64, torch.bfloat16)
    if reason := why_not(sizes, CUDA):
        pytest.skip(reason)
    kernel = PromptAttention(sizes, CUDA)
    assert kernel.error_at_start() < 8e-3
    attend = kernel.attend

    def wrong(query, keys, values, step, scaling, output, sinks=None):
        attend(query, keys, values, step, 0.9 * scaling, output, sinks)

    monkeypatch.setattr(kernel, "attend", wrong)
    assert kernel.error_at_start() > 8e-3


SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
}  # fmt: skip
MODELS = {
    "qwen3": transformers.Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=128, **SIZES),
    "llama": transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=2, head_dim=64, **SIZES),
    "window": transformers.MistralConfig(
        num_attention_heads=4, num_key_value_heads=1, head_dim=128, sliding_window=200, **SIZES
    ),
    "soft-cap": transformers.Gemma2Config(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        sliding_window=200,
        attn_logit_softcapping=20.0,
        attn_implementation="eager",
        **SIZES,
    ),
    "narrow values": transformers.DeepseekV3Config(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=64,
        qk_rope_head_dim=64, v_head_dim=64, first_k_dense_replace=SIZES["num_hidden_layers"], **SIZES,
    ),
}  # fmt: skip


def prompts_with_a_shared_beginning():
    draw = torch.Generator().manual_seed(3)
    shared, *own = (
        torch.randint(VOCAB_SIZE, (length,), generator=draw).tolist() for length in (300, 5, 64, 129, 400, 1000, 777)
    )
    return [(shared if number % 2 else []) + part for number, part in enumerate(own)]


def log_probabilities(module, prompts):
    with torch.no_grad():
        logits = [module(torch.tensor([prompt], device=CUDA)).logits[0, :-1].float() for prompt in prompts]
    tokens = [torch.tensor(prompt[1:], device=CUDA)[:, None] for prompt in prompts]
    parts = [part.log_softmax(1).gather(1, own)[:, 0] for part, own in zip(logits, tokens, strict=True)]
    return torch.cat(parts).cpu()


@pytest.mark.costly
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_of_prompts_are_as_near_to_float32_as_with_flex_attention(name, options, monkeypatch):
    """In chunks, next to decodes and behind cached prefixes; each engine calls the attention that is meant."""
    config, prompts = MODELS[name], prompts_with_a_shared_beginning()
    if reason := why_not(AttentionSizes(4, 2, config.head_dim, 64, torch.bfloat16), CUDA):
        pytest.skip(reason)
    exact, module = (transformers.AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    widen(exact)
    module.load_state_dict(exact.state_dict())
    right, module = log_probabilities(exact.to(CUDA), prompts), module.to(CUDA, torch.bfloat16)

    def error(owner):
        calls, attend, given = [], owner.attend, {"max_num_batched_tokens": 384, "num_kv_blocks": 80, "max_num_seqs": 8}
        monkeypatch.setattr(
            owner, "attend", lambda *arguments, **options: calls.append(1) or attend(*arguments, **options)
        )
        with LLM(module, tokenizer=tiny_tokenizer(), max_model_len=1500, **given, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=0)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            check_engine(llm)
        assert calls
        ours = [
            entry[token].logprob
            for output, prompt in zip(outputs, prompts, strict=True)
            for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        ]
        return float((torch.tensor(ours) - right).square().mean().sqrt())

    own = error(PromptAttention)
    monkeypatch.setattr(
        "nanovllm.fast.kernels.prompt_attention.why_not", lambda *_: "FlexAttention is what is asked for"
    )
    assert own < 1.15 * error(FlexChunks)


def test_a_model_with_chunks_answers_as_near_to_float32_as_with_flex_attention(monkeypatch):
    """Llama 4 reports no log-probabilities of prompts, so those of each prompt's next token are compared."""
    config = transformers.Llama4TextConfig(
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, attention_chunk_size=200, moe_layers=[],
        no_rope_layers=[1, 0, 1], intermediate_size_mlp=512, **SIZES,
    )  # fmt: skip
    if reason := why_not(AttentionSizes(4, 2, 64, 64, torch.bfloat16, chunk=200), CUDA):
        pytest.skip(reason)
    exact, module = (transformers.AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    widen(exact)
    module.load_state_dict(exact.state_dict())
    exact, module = exact.to(CUDA), module.to(CUDA, torch.bfloat16)
    prompts = [prompt[at:] for prompt in prompts_with_a_shared_beginning() for at in range(4)]
    with torch.no_grad():
        right = [exact(torch.tensor([p], device=CUDA)).logits[0, -1].float().log_softmax(0).cpu() for p in prompts]

    def error(owner):
        calls, attend, squares = [], owner.attend, []
        monkeypatch.setattr(
            owner, "attend", lambda *arguments, **options: calls.append(1) or attend(*arguments, **options)
        )
        with LLM(module, tokenizer=tiny_tokenizer(), max_model_len=1500, max_num_batched_tokens=384) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert calls
        for output, expected in zip(outputs, right, strict=True):
            found = output.outputs[0].logprobs[0]
            squares += [(entry.logprob - float(expected[token])) ** 2 for token, entry in found.items()]
        return float(np.mean(squares)) ** 0.5

    own = error(PromptAttention)
    monkeypatch.setattr(
        "nanovllm.fast.kernels.prompt_attention.why_not", lambda *_: "FlexAttention is what is asked for"
    )
    assert own < 1.3 * error(FlexChunks)


def test_sizes_that_the_kernel_lacks_are_named():
    others = [(84, 64, torch.bfloat16), (32, 64, torch.bfloat16), (320, 64, torch.bfloat16)]
    others += [(128, 64, torch.float32), (128, 256, torch.bfloat16)]
    others += [(128, 64, torch.bfloat16, None, None, None, 32)]
    assert all(why_not(AttentionSizes(8, 2, *sizes), CUDA) for sizes in others)
