"""One layer's attention, milliseconds: our C++ kernels and vLLM's operator in turn, with ratios.

    python bench/machines/attention.py --vllm-python ../vllm/bin/python

Both read K and V of 30 layers' caches in turn, so that none of it lies in the processor's cache; 9 query heads on 3 KV
heads of 64, bfloat16. vLLM's operator is called as its CPU backend calls it, without its own overhead around it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
# (tokens before, new tokens) of each sequence
CASES = {
    **{f"{n} decodes at {context}": [(context - 1, 1)] * n for context in (200, 512) for n in (1, 8, 32, 64)},
    "512 tokens alone": [(0, 512)],
    "512 tokens behind 1,024": [(1024, 512)],
    "16 times 32 tokens behind 512": [(512, 32)] * 16,
}


def ours(spans: list[tuple[int, int]], block_size: int = 64) -> Callable[[], None]:
    from nanovllm.attention.cpp import CppAttention
    from nanovllm.cache.kinds import LayerTraits
    from nanovllm.core.batch import ScheduledSequence
    from nanovllm.core.batch_layout import build_layout
    from nanovllm.core.sampling_params import SamplingParams
    from nanovllm.core.sequence import NewRequest, Sequence
    from nanovllm.kernels.cpp import load_kernels

    entries, num_blocks = [], 1
    for number, (start, count) in enumerate(spans):
        end = start + count
        blocks = -(-end // block_size)
        sequence = Sequence(NewRequest(str(number), [0] * end, SamplingParams()), arrival=number, max_model_len=end + 1)
        table = list(range(num_blocks, num_blocks + blocks))
        entries.append(ScheduledSequence(sequence, start, count, 1, table, start))
        num_blocks += blocks
    traits = LayerTraits(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM)
    kernels = load_kernels(torch.bfloat16, HEAD_DIM, HEADS // KV_HEADS)
    form = CppAttention([traits], [kernels], num_blocks=num_blocks, block_size=block_size)
    plan = form.plan(build_layout(entries, block_size))
    caches = [torch.randn(2, num_blocks * block_size, KV_HEADS, HEAD_DIM).bfloat16() for _ in range(LAYERS)]
    query = torch.randn(sum(count for _, count in spans), HEADS, HEAD_DIM).bfloat16()
    output = torch.empty_like(query)

    def run() -> None:
        for keys, values in caches:
            plan.attend_into(output, query, keys, values, HEAD_DIM**-0.5)

    return run


def vllm(spans: list[tuple[int, int]], block_size: int = 128) -> Callable[[], None]:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(torch.bfloat16, block_size, HEAD_DIM)
    lengths = torch.tensor([start + count for start, count in spans], dtype=torch.int32)
    starts = torch.tensor([0, *(count for _, count in spans)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    width = -(-int(lengths.max()) // block_size)
    table = torch.arange(len(spans) * width, dtype=torch.int32).view(len(spans), width)
    shape = (len(spans) * width, KV_HEADS, 2 * block_size, HEAD_DIM)
    caches = [torch.randn(shape).bfloat16().chunk(2, dim=2) for _ in range(LAYERS)]
    query = torch.randn(int(starts[-1]), HEADS, HEAD_DIM).bfloat16()
    output = torch.empty_like(query)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(spans), num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, seq_lens=lengths,
        dtype=torch.bfloat16, query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa,
        enable_kv_split=True,
    )  # fmt: skip

    def run() -> None:
        for keys, values in caches:
            ops.cpu_attention_with_kv_cache(
                query=query, key_cache=keys, value_cache=values, output=output, query_start_loc=starts,
                seq_lens=lengths, scale=HEAD_DIM**-0.5, causal=True, alibi_slopes=None, sliding_window=-1,
                block_table=table, softcap=0.0, scheduler_metadata=metadata, s_aux=None,
            )  # fmt: skip

    return run


def milliseconds(run: Callable[[], None]) -> float:
    """A layer's, the best of several rounds."""
    run()
    rounds = []
    while len(rounds) < 5 or sum(rounds) < 0.5:
        begin = time.perf_counter()
        run()
        rounds.append(time.perf_counter() - begin)
    return 1e3 * min(rounds) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", metavar="PYTHON", help="the interpreter of vLLM's environment")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", choices=("ours", "vllm"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        make = {"ours": ours, "vllm": vllm}[arguments.child]
        print(json.dumps({name: milliseconds(make(spans)) for name, spans in CASES.items()}))
        return
    pythons = {"ours": sys.executable} | ({"vllm": arguments.vllm_python} if arguments.vllm_python else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for _ in range(arguments.runs):
        for name, python in pythons.items():
            done = subprocess.run([python, __file__, "--child", name], stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'case':<32}{'ours':>8}" + (f"{'vLLM':>8}{'ratio':>8}" if "vllm" in found else ""))
    for case in CASES:
        own, *peer = [statistics.median(run[case] for run in runs) for runs in found.values()]
        print(f"{case:<32}{own:>8.3f}" + (f"{peer[0]:>8.3f}{own / peer[0]:>8.2f}" if peer else ""))


if __name__ == "__main__":
    main()
