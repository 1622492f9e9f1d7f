// All layers, part by part: see layer_stack.py. The grid has one block per multiprocessor.

// RMS norm of rows [R, HIDDEN], a warp each. The norm's weight is loaded before the barrier.
struct Normed {
    uint4 scale[HIDDEN / 256];
    __device__ void prepare(const bf16 *weight) {
        if (threadIdx.x / 32 < ROWS)
#pragma unroll
            for (int at = 0; at < HIDDEN / 256; ++at)
                scale[at] = reinterpret_cast<const uint4 *>(weight)[at * 32 + threadIdx.x % 32];
    }
    template <int R> __device__ void fill(const bf16 *rows, double epsilon, uint4 *to) {
        int row = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (row < R) {
            uint4 packed[HIDDEN / 256];
            float sum = 0.f;
#pragma unroll
            for (int at = 0; at < HIDDEN / 256; ++at)
                packed[at] = load_fresh(rows + row * HIDDEN + (at * 32 + lane) * 8);
#pragma unroll
            for (int at = 0; at < HIDDEN / 256; ++at) {
                float values[8];
                widen(packed[at], values);
#pragma unroll
                for (int dim = 0; dim < 8; ++dim) sum = fmaf(values[dim], values[dim], sum);
            }
            float factor = rsqrtf(sum_lanes(sum, 32) / HIDDEN + float(epsilon));
#pragma unroll
            for (int at = 0; at < HIDDEN / 256; ++at) {
                float values[8], weights[8];
                widen(packed[at], values), widen(scale[at], weights);
#pragma unroll
                for (int dim = 0; dim < 8; ++dim) values[dim] = rounded(values[dim] * factor) * weights[dim];
                to[row * (HIDDEN / 8) + at * 32 + lane] = narrow8(values);
            }
        }
        sync_block();
    }
};

struct Block {  // shared by a block's warps
    Layer layers[2];  // in turn
    Tokens tokens;
    __device__ void load(const Step &step, int at) {
        if (at < step.num_layers && threadIdx.x < sizeof(Layer) / 8)
            reinterpret_cast<u64 *>(layers + at % 2)[threadIdx.x] = reinterpret_cast<const u64 *>(step.layers + at)[threadIdx.x];
    }
    __device__ void start(const Step &step) {
        int row = threadIdx.x;
        if (row < ROWS) {
            tokens.positions[row] = int(step.positions[row]), tokens.slots[row] = step.slots[row];
            tokens.table_starts[row] = step.table_starts[row];
        }
        load(step, 0);
    }
};

// R rows of HIDDEN or INNER elements, written by all blocks.
template <int R, int WIDTH> __device__ inline void copy_rows(const bf16 *from, uint4 *to) {
    constexpr int COUNT = (R * WIDTH / 8 + THREADS - 1) / THREADS;
    uint4 held[COUNT];
#pragma unroll
    for (int at = 0; at < COUNT; ++at)
        if (int place = at * THREADS + threadIdx.x; place < R * WIDTH / 8) held[at] = load_fresh(from + place * 8);
#pragma unroll
    for (int at = 0; at < COUNT; ++at)
        if (int place = at * THREADS + threadIdx.x; place < R * WIDTH / 8) to[place] = held[at];
    sync_block();
}

template <int R>
__device__ inline void run(const Step &step, Block &block, Rows rows, Weights weights, uint4 *inputs, float *shared) {
    Barrier barrier{step.counter, 0};
    int lane = threadIdx.x % 32, longest = 0;
    for (int row = 0; row < R; ++row) longest = max(longest, block.tokens.positions[row] + 1);
    int most = max(1, min(MAX_SPLITS, int(gridDim.x) / (R * KV_HEADS)));
    int splits = max(1, min(most, (longest + SPLIT - 1) / SPLIT)), num_units = R * KV_HEADS * splits;
    int num_qkv = rows.count(QKV), num_hidden = rows.count(HIDDEN), num_inner = rows.count(INNER);
    Normed norm;
    norm.prepare(block.layers[0].input_norm);
    for (int at = 0; at < step.num_layers; ++at) {
        const Layer &layer = block.layers[at % 2];
        const bf16 *hidden = at == 0 ? step.input : step.hidden;
        bf16 *output = at == step.num_layers - 1 ? step.output : step.hidden;
        if (at > 0) barrier.wait();
        norm.fill<R>(hidden, layer.input_epsilon, inputs);
        multiply<R, HIDDEN>(weights, inputs, num_qkv, [&](int unit, const float *sums) {
            int place = rows.first + unit * rows.stride;
            const bf16 *biases = place < QUERY ? layer.q_bias : place < QUERY + KV ? layer.k_bias - QUERY
                                                                                   : layer.v_bias - QUERY - KV;
            float bias = HAS_BIAS ? wide(biases[place]) : 0.f;
#pragma unroll
            for (int row = 0; row < R; ++row)
                if (lane == row) step.qkv[row * QKV + place] = narrow(sums[row] + bias);
        });
        barrier.arrive();

        norm.prepare(layer.post_norm);
        bool has_waited = false;
        for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x, has_waited = true)
            attend(step, block.tokens, layer, unit / KV_HEADS % R, unit % KV_HEADS, unit / KV_HEADS / R, splits,
                      has_waited ? nullptr : &barrier, shared);
        if (!has_waited) barrier.wait();
        barrier.arrive();

        float before = 0.f;  // summand of the product, of unit lane / R and row lane % R
        auto load_residual = [&](const bf16 *from) {
            int place = rows.first + lane / R * rows.stride;
            if (place < HIDDEN) before = wide(__ldcg(from + lane % R * HIDDEN + place));
        };
        load_residual(hidden);
        block.load(step, at + 1);
        barrier.wait();
        merge_splits<R>(step, splits, inputs);
        auto add_to = [&](bf16 *to) {
            return [=, &before](int unit, const float *sums) {
#pragma unroll
                for (int row = 0; row < R; ++row)
                    if (lane == unit * R + row)
                        to[row * HIDDEN + rows.first + unit * rows.stride] = narrow(rounded(sums[row]) + before);
            };
        };
        multiply<R, QUERY>(weights, inputs, num_hidden, add_to(step.middle));
        barrier.arrive();
        barrier.wait();

        norm.fill<R>(step.middle, layer.post_epsilon, inputs);
        if (at + 1 < step.num_layers) norm.prepare(block.layers[(at + 1) % 2].input_norm);
        float gates[R];
        multiply<R, HIDDEN>(weights, inputs, 2 * num_inner, [&](int unit, const float *sums) {
#pragma unroll
            for (int row = 0; row < R; ++row) {
                if (unit % 2 == 0) {
                    float gate = rounded(sums[row]);
                    gates[row] = gate / (1.f + __expf(-gate));
                } else if (lane == row)
                    step.inner[row * INNER + rows.first + unit / 2 * rows.stride] =
                        narrow(gates[row] * rounded(sums[row]));
            }
        });
        barrier.arrive();
        load_residual(step.middle);
        barrier.wait();
        copy_rows<R, INNER>(step.inner, inputs);
        multiply<R, INNER>(weights, inputs, num_hidden, add_to(output));
        if (at + 1 < step.num_layers) barrier.arrive();
    }
    barrier.leave();
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) layer_stack(Step step) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Block block;
    uint4 *pieces = reinterpret_cast<uint4 *>(memory), *inputs = pieces + WARPS * SLOTS * (PIECE / 8);
    float *shared = reinterpret_cast<float *>(inputs + ROWS * DEEPEST / 8);
    u64 *barriers = reinterpret_cast<u64 *>(shared + GROUPS * WARPS * (HEAD_DIM + 2));
    int warp = threadIdx.x / 32;
    if (threadIdx.x < WARPS) Slots(pieces, barriers, threadIdx.x).prepare();
    block.start(step);
    __syncthreads();
    if (warp == WARPS) {
        int of = threadIdx.x % 32;
        if (of < WARPS) fetch_weights(step.layers, step.num_layers, Rows(of), Slots(pieces, barriers, of));
        return;
    }
    Weights weights{Slots(pieces, barriers, warp), pieces + warp * SLOTS * (PIECE / 8), 0, 0};
    int decodes = 0;  // before the padding
    for (int row = 0; row < ROWS; ++row) decodes += step.counts[row] > 0;
    if constexpr (ROWS > 4) return run<ROWS>(step, block, Rows(warp), weights, inputs, shared);
    if constexpr (ROWS == 4)
        if (decodes > 2) return run<4>(step, block, Rows(warp), weights, inputs, shared);
    if constexpr (ROWS >= 2)
        if (decodes == 2) return run<2>(step, block, Rows(warp), weights, inputs, shared);
    run<1>(step, block, Rows(warp), weights, inputs, shared);
}
