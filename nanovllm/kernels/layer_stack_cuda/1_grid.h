// Shared by the kernel's parts: sizes, addresses of a layer and a step, bfloat16, the grid barrier.
//
// Set by the caller: HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, PIECE, SLOTS, ROWS, HAS_NORMS, HAS_BIAS,
// SPLIT (tokens of a context's split, at least).

typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int WARPS = 8, THREADS = 32 * WARPS, LANE_DIMS = 8;  // computing warps; one more warp fetches weights
constexpr int QUERY = HEADS * HEAD_DIM, KV = KV_HEADS * HEAD_DIM, QKV = QUERY + 2 * KV, GROUPS = HEADS / KV_HEADS;
constexpr int TOKEN_LANES = HEAD_DIM / LANE_DIMS, TOKENS = 32 / TOKEN_LANES;  // of a warp at once
constexpr int DEEPEST = INNER > QUERY ? (INNER > HIDDEN ? INNER : HIDDEN) : (QUERY > HIDDEN ? QUERY : HIDDEN);
constexpr int AHEAD = 4;  // tokens per load of a group of lanes
constexpr int MAX_SPLITS = 32;
constexpr float LOWEST = -1e30f;  // a score before any

struct Layer {
    const bf16 *q, *k, *v, *o, *gate, *up, *down;
    const bf16 *input_norm, *post_norm, *q_norm, *k_norm;
    const bf16 *q_bias, *k_bias, *v_bias;
    bf16 *keys, *values;
    double input_epsilon, post_epsilon, q_epsilon, k_epsilon;
};

struct Step {
    const Layer *layers;
    const bf16 *input, *cosines, *sines;  // [rows, HIDDEN], [rows, HEAD_DIM]
    bf16 *output;
    const u64 *positions, *slots;               // [rows]
    const int *tables, *table_starts, *counts;  // counts: blocks of each row, 0 for padding
    bf16 *qkv, *hidden, *middle, *inner;        // [rows, ...]
    float *partial, *sums;                      // [rows, HEADS, splits, HEAD_DIM], [rows, HEADS, splits, 2]
    u32 *counter;                               // arrivals, exits
    float scaling;
    int num_layers;
};

__device__ inline float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline float wide(bf16 value) { return __uint_as_float(u32(value) << 16); }
__device__ inline u32 narrow2(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ inline bf16 narrow(float value) { return bf16(narrow2(value, 0.f)); }
__device__ inline float rounded(float value) { return low(narrow2(value, 0.f)); }
__device__ inline uint4 load_fresh(const void *from) {  // data written by other blocks: from the L2 cache
    return __ldcg(reinterpret_cast<const uint4 *>(from));
}
__device__ inline void widen(uint4 packed, float *values) {
    values[0] = low(packed.x), values[1] = high(packed.x), values[2] = low(packed.y), values[3] = high(packed.y);
    values[4] = low(packed.z), values[5] = high(packed.z), values[6] = low(packed.w), values[7] = high(packed.w);
}
__device__ inline uint4 narrow8(const float *values) {
    return make_uint4(narrow2(values[0], values[1]), narrow2(values[2], values[3]), narrow2(values[4], values[5]),
                      narrow2(values[6], values[7]));
}
__device__ inline float sum_lanes(float value, int lanes) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        if (step < lanes) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

__device__ inline void sync_block() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

struct Barrier {
    u32 *counter;
    u32 target;
    __device__ void arrive() {
        sync_block();
        target += gridDim.x;
        if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    }
    __device__ void wait() {
        if (threadIdx.x == 0) {
            u32 arrived;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
            while (arrived < target);
        }
        sync_block();
    }
    __device__ void leave() {  // the last one out resets both counters for the next launch
        sync_block();
        if (threadIdx.x == 0 && atomicAdd(counter + 1, 1) == gridDim.x - 1) counter[0] = 0, counter[1] = 0;
    }
};
