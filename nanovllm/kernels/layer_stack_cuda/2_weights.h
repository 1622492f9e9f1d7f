// Prefetch of weights into shared memory, and products with them.

// A warp's rows of all products of all layers, in order, PIECE elements at a time. A separate warp lets the copy engine
// prefetch them as far as shared memory has room, even while the blocks wait.
struct Rows {
    int first, stride;  // the numbers of a warp's rows of each weight
    __device__ Rows(int warp) : first(warp * gridDim.x + blockIdx.x), stride(WARPS * gridDim.x) {}
    __device__ int count(int rows) const { return rows > first ? (rows - first + stride - 1) / stride : 0; }
};

struct Slots {  // of a warp: pieces of weights, each with two barriers (full, empty)
    u32 pieces, full, empty;
    __device__ Slots(const uint4 *memory, const u64 *barriers, int warp) {
        pieces = u32(__cvta_generic_to_shared(memory)) + warp * SLOTS * 2 * PIECE;
        full = u32(__cvta_generic_to_shared(barriers)) + warp * SLOTS * 16, empty = full + SLOTS * 8;
    }
    __device__ void prepare() const {
        for (int slot = 0; slot < 2 * SLOTS; ++slot)
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(full + 8 * slot) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
};

__device__ inline void wait_for(u32 barrier, u32 parity) {
    u32 done;
    do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                    : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    while (!done);
}

struct Feed {  // one lane, which fetches for one warp
    Slots slots;
    u32 slot, round;
    __device__ void fetch(const bf16 *row, int depth) {
        for (int at = 0; at < depth; at += PIECE) {
            u32 full = slots.full + 8 * slot;
            if (round > 0) wait_for(slots.empty + 8 * slot, round - 1 & 1);
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(2 * PIECE) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(slots.pieces + slot * 2 * PIECE), "l"(row + at), "r"(2 * PIECE), "r"(full) : "memory");
            if (++slot == SLOTS) slot = 0, ++round;
        }
    }
};

__device__ inline void fetch_weights(const Layer *layers, int num_layers, Rows rows, Slots slots) {
    Feed feed{slots, 0, 0};
    int qkv = rows.count(QKV), hidden = rows.count(HIDDEN), inner = rows.count(INNER);
    for (int at = 0; at < num_layers; ++at) {
        const Layer layer = layers[at];
        for (int unit = 0; unit < qkv; ++unit) {
            u64 row = rows.first + unit * rows.stride;
            feed.fetch(row < QUERY ? layer.q + row * HIDDEN
                       : row < QUERY + KV ? layer.k + (row - QUERY) * HIDDEN : layer.v + (row - QUERY - KV) * HIDDEN,
                       HIDDEN);
        }
        for (int unit = 0; unit < hidden; ++unit) feed.fetch(layer.o + u64(rows.first + unit * rows.stride) * QUERY, QUERY);
        for (int unit = 0; unit < inner; ++unit) {
            u64 row = u64(rows.first + unit * rows.stride) * HIDDEN;
            feed.fetch(layer.gate + row, HIDDEN);
            feed.fetch(layer.up + row, HIDDEN);
        }
        for (int unit = 0; unit < hidden; ++unit) feed.fetch(layer.down + u64(rows.first + unit * rows.stride) * INNER, INNER);
    }
}

struct Weights {  // of a warp, in fetch order
    Slots slots;
    const uint4 *memory;
    u32 slot, round;
    __device__ const uint4 *next() {
        wait_for(slots.full + 8 * slot, round & 1);
        return memory + slot * (PIECE / 8);
    }
    __device__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(slots.empty + 8 * slot) : "memory");
        if (++slot == SLOTS) slot = 0, ++round;
    }
};

__device__ inline void add_products(uint4 weights, const float *inputs, float &sum) {
    sum = fmaf(low(weights.x), inputs[0], sum), sum = fmaf(high(weights.x), inputs[1], sum);
    sum = fmaf(low(weights.y), inputs[2], sum), sum = fmaf(high(weights.y), inputs[3], sum);
    sum = fmaf(low(weights.z), inputs[4], sum), sum = fmaf(high(weights.z), inputs[5], sum);
    sum = fmaf(low(weights.w), inputs[6], sum), sum = fmaf(high(weights.w), inputs[7], sum);
}

// Multiplies each of the warp's next units (rows of a weight) with R rows in shared memory. All lanes call
// `take(unit, sums)`.
template <int R, int DEPTH, typename Take>
__device__ inline void multiply(Weights &weights, const uint4 *inputs, int num_units, Take take) {
    constexpr int VECTORS = PIECE / 256;
    constexpr bool KEEPS = DEPTH == PIECE;  // the inputs in registers: of one row as float32
    int lane = threadIdx.x % 32;
    float kept[KEEPS && R == 1 ? VECTORS * 8 : 1];
    uint4 packed[KEEPS && R > 1 ? R * VECTORS : 1];
    if constexpr (KEEPS) {
#pragma unroll
        for (int at = 0; at < R * VECTORS; ++at) {
            uint4 some = inputs[at / VECTORS * (DEPTH / 8) + at % VECTORS * 32 + lane];
            if constexpr (R == 1)
                widen(some, kept + 8 * at);
            else
                packed[at] = some;
        }
    }
    for (int unit = 0; unit < num_units; ++unit) {
        float sums[R][2] = {};
#pragma unroll
        for (int piece = 0; piece < DEPTH / PIECE; ++piece) {
            const uint4 *from = weights.next();
            uint4 some[VECTORS];
#pragma unroll
            for (int at = 0; at < VECTORS; ++at) some[at] = from[at * 32 + lane];
            weights.release();
#pragma unroll
            for (int at = 0; at < VECTORS; ++at) {
#pragma unroll
                for (int row = 0; row < R; ++row) {
                    if constexpr (KEEPS && R == 1)
                        add_products(some[at], kept + 8 * at, sums[row][at % 2]);
                    else {
                        float values[8];
                        widen(KEEPS ? packed[row * VECTORS + at]
                                    : inputs[row * (DEPTH / 8) + (piece * VECTORS + at) * 32 + lane], values);
                        add_products(some[at], values, sums[row][at % 2]);
                    }
                }
            }
        }
        float totals[R];
#pragma unroll
        for (int row = 0; row < R; ++row) totals[row] = sum_lanes(sums[row][0] + sums[row][1], 32);
        take(unit, totals);
    }
}
