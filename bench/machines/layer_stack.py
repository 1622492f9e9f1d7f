"""Times the decoder layers of few rows as one launch, beside what a barrier and reading the weights take by themselves.

python bench/machines/layer_stack.py
"""

import argparse
import ctypes
import time
from functools import partial

import torch
from gpu_timing import replayed_micros  # beside this file

from nanovllm.kernels import nvrtc
from nanovllm.kernels.layer_stack import source_text

PARTS = """
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) barriers(Step step) {
    if (threadIdx.x >= THREADS) return;
    Barrier barrier{step.counter, 0};
    for (int at = 0; at < 1000; ++at) barrier.arrive(), barrier.wait();
    barrier.leave();
}
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) read_weights(Step step) {
    extern __shared__ __align__(128) unsigned char memory[];
    uint4 *pieces = reinterpret_cast<uint4 *>(memory);
    u64 *barriers = reinterpret_cast<u64 *>(pieces + WARPS * SLOTS * (PIECE / 8));
    int warp = threadIdx.x / 32, of = threadIdx.x % 32;
    if (threadIdx.x < WARPS) Slots(pieces, barriers, threadIdx.x).prepare();
    __syncthreads();
    if (warp == WARPS) {
        if (of < WARPS) fetch_weights(step.layers, step.num_layers, Rows(of), Slots(pieces, barriers, of));
        return;
    }
    Rows rows(warp);
    Weights weights{Slots(pieces, barriers, warp), pieces + warp * SLOTS * (PIECE / 8), 0, 0};
    int units = rows.count(QKV) * HIDDEN + rows.count(HIDDEN) * (QUERY + INNER) + 2 * rows.count(INNER) * HIDDEN;
    u32 sum = 0;
    for (int left = step.num_layers * (units / PIECE); left; --left) sum += weights.next()[of].x, weights.release();
    if (sum == 1) step.counter[2] = 1;
}
"""
HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK = 1024, 3072, 16, 8, 128, 64
SIZES = {"q": (HEADS * DIM, HIDDEN), "k": (KV_HEADS * DIM, HIDDEN), "v": (KV_HEADS * DIM, HIDDEN),
         "o": (HIDDEN, HEADS * DIM), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER),
         "input_norm": (HIDDEN,), "post_norm": (HIDDEN,), "q_norm": (DIM,), "k_norm": (DIM,)}  # fmt: skip
EPSILON = 1e-6
SPACES = {"qkv": (HEADS + 2 * KV_HEADS) * DIM, "hidden": HIDDEN, "middle": HIDDEN, "inner": INNER}


# What is left out or otherwise, of one row: the difference in time is what it takes.
VARIANTS: list[dict[str, int]] = [
    {"SLOTS": 6}, {"WITHOUT": 32}, {"SLOTS": 8}, {"WITHOUT": 64}, {"WITHOUT": 1}, {"WITHOUT": 2}, {"WITHOUT": 4},
    {"WITHOUT": 8}, {"WITHOUT": 15}, {"WITHOUT": 31}, {"SLOTS": 4},
]  # fmt: skip


LOAD_CACHED = """
__device__ inline uint4 load_cached(const bf16 *from) {
    const uint4 *at = reinterpret_cast<const uint4 *>(from);
    return WITHOUT & 32 ? __ldcs(at) : WITHOUT & 64 ? __ldcg(at) : *at;
}
"""


def without(source):
    """The source with the macro WITHOUT. Its bits: attention, merging splits, norms, copying inner states, barriers.

    32 and 64 load K and V in other ways.
    """
    for before, after in (
        ("attend(step, block", "if (WITHOUT & 1) { if (!has_waited) barrier.wait(); } else attend(step, block"),
        ("merge_splits<R>(step,", "if (!(WITHOUT & 2)) merge_splits<R>(step,"),
        ("        norm.fill<R>", "        if (!(WITHOUT & 4)) norm.fill<R>"),
        ("copy_rows<R, INNER>(step", "if (!(WITHOUT & 8)) copy_rows<R, INNER>(step"),
        ("= *reinterpret_cast<const uint4 *>(layer.", "= load_cached(layer."),
        ("__device__ inline void widen(", LOAD_CACHED + "__device__ inline void widen("),
        ("while (arrived < target)", "while (!(WITHOUT & 16) && arrived < target)"),
    ):
        if before not in source:
            raise ValueError(f"the kernel has no {before!r} any more.")
        source = source.replace(before, after)
    return source


class Step(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in (
        "layers", "input", "cosines", "sines", "output", "positions", "slots", "tables", "table_starts", "counts",
        "qkv", "hidden", "middle", "inner", "partial", "sums", "counter")]  # fmt: skip
    _fields_ += [("scaling", ctypes.c_float), ("num_layers", ctypes.c_int)]


def random(*shape, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def make_layers(count, num_slots):
    layers = []
    for _ in range(count):
        layer = {name: 1 + random(*size, scale=0.1) if len(size) == 1 else random(*size, scale=size[1] ** -0.5)
                 for name, size in SIZES.items()}  # fmt: skip
        layer["keys"], layer["values"] = random(num_slots, KV_HEADS, DIM), random(num_slots, KV_HEADS, DIM)
        layers.append(layer)
    return layers


def layer_table(layers):
    names = [*SIZES, None, None, None, "keys", "values"]
    rows = [[layer[name].data_ptr() if name else 0 for name in names] for layer in layers]
    table = torch.zeros(len(layers), 20, dtype=torch.int64)
    table[:, :16] = torch.tensor(rows)
    table[:, 16:] = torch.full((len(layers), 4), EPSILON, dtype=torch.float64).view(torch.int64)
    return table.cuda()


def norm(states, weight):
    states = states.float()
    return (
        (states * (states.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).bfloat16().float() * weight.float()
    ).bfloat16()


def turn(states, cosines, sines):
    first, second = states.float().chunk(2, -1)
    return (
        states.float() * cosines[:, None].float() + torch.cat([-second, first], -1) * sines[:, None].float()
    ).bfloat16()


def reference(layers, hidden, cosines, sines, positions, slots, tables):
    for layer in layers:
        normed = norm(hidden, layer["input_norm"])
        query, key, value = (
            (normed.float() @ layer[name].float().T).bfloat16().view(len(hidden), -1, DIM) for name in "qkv"
        )
        query, key = (
            turn(norm(query, layer["q_norm"]), cosines, sines),
            turn(norm(key, layer["k_norm"]), cosines, sines),
        )
        keys, values = layer["keys"].clone(), layer["values"].clone()
        keys[slots], values[slots] = key, value
        attended = []
        for row, position in enumerate(positions.tolist()):
            places = (tables[row].long()[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()[
                : position + 1
            ]
            own_keys, own_values = (
                part[places].repeat_interleave(HEADS // KV_HEADS, 1).float() for part in (keys, values)
            )
            scores = torch.einsum("hd,thd->ht", query[row].float(), own_keys) * DIM**-0.5
            attended.append(torch.einsum("ht,thd->hd", scores.softmax(-1), own_values).flatten())
        attended = torch.stack(attended).bfloat16()
        hidden = hidden + (attended.float() @ layer["o"].float().T).bfloat16()
        normed = norm(hidden, layer["post_norm"]).float()
        gate, up = (normed @ layer["gate"].float().T).bfloat16(), (normed @ layer["up"].float().T).bfloat16()
        inner = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
        hidden = hidden + (inner.float() @ layer["down"].float().T).bfloat16()
    return hidden


def error(held, layers, active):
    """Of the change that the layers make, after they have run."""
    rows = (held[name][:active] for name in ("input", "cosines", "sines", "positions", "slots", "tables"))
    expected = reference(layers, *rows).float()
    return (
        (held["output"][:active].float() - expected).norm() / (expected - held["input"][:active].float()).norm()
    ).item()


def shared_bytes(rows, slots):
    return 8 * slots * (2048 + 16) + rows * INNER * 2 + 2 * 8 * (DIM + 2) * 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=28)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    print(torch.cuda.get_device_name(), num_sms, torch.__version__, torch.version.cuda, flush=True)
    longest = 840  # blocks
    layers = make_layers(arguments.layers, longest * BLOCK)
    table = layer_table(layers)
    print("made", flush=True)
    counter = torch.zeros(4, dtype=torch.int32, device="cuda")

    def inputs(rows, context, active=1):
        """A step's tensors: so many decodes of that context, then padding."""
        held = {"layers": table, "counter": counter, "input": random(rows, HIDDEN)}
        held["output"] = torch.full((rows, HIDDEN), torch.nan, device="cuda", dtype=torch.bfloat16)
        turns = torch.rand(rows, DIM // 2, device="cuda") * 6
        turns = torch.cat([turns, turns], -1)
        held["cosines"], held["sines"] = turns.cos().bfloat16(), turns.sin().bfloat16()
        blocks = -(-context // BLOCK)
        held["tables"] = torch.zeros(rows, blocks, dtype=torch.int32, device="cuda")
        held["tables"][:active] = 1 + torch.randperm(longest - 1, device="cuda")[: active * blocks].view(active, blocks)
        numbers = torch.arange(rows, device="cuda")
        held["table_starts"] = (numbers * blocks).int()
        held["counts"] = ((numbers < active) * blocks).int()
        held["positions"] = (context - 1 - numbers).clamp(min=0) * (numbers < active)
        places = held["positions"]
        held["slots"] = held["tables"].gather(1, (places // BLOCK)[:, None])[:, 0].long() * BLOCK + places % BLOCK
        held |= {name: random(rows, size) for name, size in SPACES.items()}
        held |= {"partial": torch.empty(rows * HEADS * 32 * DIM, device="cuda")}
        return held | {"sums": torch.empty(rows * HEADS * 64, device="cuda")}

    def launch(function, held, count=arguments.layers):
        pointers = (held[name].data_ptr() for name, _ in Step._fields_[:-2])
        function.launch_at_once(num_sms, Step(*pointers, DIM**-0.5, count))

    def compiled(rows, slots, name="layer_stack", **options):
        start = time.perf_counter()
        definitions = {
            "HIDDEN": HIDDEN, "INNER": INNER, "HEADS": HEADS, "KV_HEADS": KV_HEADS, "HEAD_DIM": DIM,
            "BLOCK_SIZE": BLOCK, "PIECE": 1024, "SLOTS": slots, "ROWS": rows, "HAS_NORMS": 1, "HAS_BIAS": 0,
            "SPLIT": 64, "WITHOUT": 0,
        }  # fmt: skip
        code = nvrtc.compile_source(without(source_text()) + PARTS, "sm_90", definitions | options)
        function = nvrtc.CudaFunction(code, name, num_threads=288, shared_bytes=shared_bytes(rows, slots))
        return function, time.perf_counter() - start

    held = inputs(1, 256)
    weight_bytes = sum(layers[0][name].nbytes for name in SIZES) * len(layers)
    function, took = compiled(1, 6, "barriers")
    barrier = replayed_micros(partial(launch, function, held), rounds=5) / 1000
    print(f"compiled in {took:.2f} s; a barrier {barrier:.3f} µs", flush=True)
    for slots in (2, 6):
        function, _ = compiled(1, slots, "read_weights")
        us = replayed_micros(partial(launch, function, held))
        print(
            f"reading {len(layers)} layers, {slots} slots: {us:.1f} µs, {weight_bytes / us / 1e6:.2f} TB/s", flush=True
        )
    for rows, slots, actives in ((4, 6, (1, 2, 4)),):
        function, took = compiled(rows, slots)
        print(f"{rows} rows, compiled in {took:.1f} s", flush=True)
        for active in actives:
            line = []
            for context in (128, 384, 2048, 32768):
                if active * context <= 64 * (longest - 1):
                    held = inputs(rows, context, active)
                    line.append(f"{context}: {replayed_micros(partial(launch, function, held)):.1f}")
            print(f"  {active} decodes, µs of {len(layers)} layers by context: {', '.join(line)}", flush=True)
            for context in (9, 300, 1500):
                errors = []
                for count in (1, len(layers)):
                    held = inputs(rows, context, active)
                    launch(function, held, count)
                    errors.append(error(held, layers[:count], active))
                print(f"  {active} decodes of {context}: errors {errors[0]:.5f}, {errors[1]:.5f}", flush=True)
    for options in VARIANTS:
        function, _ = compiled(1, options.get("SLOTS", 6), **options)
        times = [replayed_micros(partial(launch, function, inputs(1, context))) for context in (128, 384, 2048, 32768)]
        print(f"{options}: {', '.join(f'{us:.1f}' for us in times)}", flush=True)


if __name__ == "__main__":
    main()
