// Prefetch of weights into shared memory, and products with them by matrix instructions.

// A block's contiguous rows of a weight, in pairs. `MOST` blocks have no more.
template <int TOTAL> struct Share {
    static constexpr int MOST = 2 * up(TOTAL / 2, GRID), HALVES = up(MOST, 8);
    __device__ static int first() { return 2 * int(long(TOTAL / 2) * blockIdx.x / GRID); }
    __device__ static int count() { return 2 * int(long(TOTAL / 2) * (blockIdx.x + 1) / GRID) - first(); }
};

// Shared memory has a ring of slots, each for 8 rows of a weight (a half of a matrix instruction's 16), PIECE elements
// of each. A separate warp lets the copy engine fill them as far as there is room, even while the block waits.
constexpr int ROW_BYTES = 2 * PIECE + 64;  // rows begin 16 banks apart
constexpr int SLOT_BYTES = 8 * ROW_BYTES;
constexpr int SLICE = PIECE / WARPS, STEPS = SLICE / 32;  // of a warp: of a piece's depth; 32 elements a step

// The order in which a layer's products take slots: for each piece of the depth, all halves of rows.
constexpr int QKV_HALVES = Share<QKV>::HALVES, HIDDEN_HALVES = Share<HIDDEN>::HALVES, INNER_TILES = Share<INNER>::HALVES;
constexpr int QKV_END = QKV_HALVES * (HIDDEN / PIECE), O_END = QKV_END + HIDDEN_HALVES * (QUERY / PIECE);
constexpr int GATE_END = O_END + 2 * INNER_TILES * (HIDDEN / PIECE), LAYER_END = GATE_END + HIDDEN_HALVES * (INNER / PIECE);

struct Source {  // of a slot: one lane's row, and how many rows are there
    const bf16 *row;
    int count;
    __device__ void set(const bf16 *weight, int first, int end, int depth, int piece, int line, int start = 0) {
        count = at_least(0, at_most(8, end - first));
        row = weight + u64(first + line - start) * depth + piece * PIECE;
    }
    __device__ Source(const bf16 *head, int first, int end, int piece, int line) {
        set(head, first, end, HIDDEN, piece, line);
    }
    __device__ Source(const Layer &layer, int at, int line) {
        if (at < QKV_END) {
            int first = Share<QKV>::first() + at % QKV_HALVES * 8, own = first + line;
            bool is_q = own < QUERY, is_k = !is_q && own < QUERY + KV;
            set(is_q ? layer.q : is_k ? layer.k : layer.v, first, Share<QKV>::first() + Share<QKV>::count(), HIDDEN,
                at / QKV_HALVES, line, is_q ? 0 : is_k ? QUERY : QUERY + KV);
        } else if (at < O_END || at >= GATE_END) {
            bool is_down = at >= GATE_END;
            at -= is_down ? GATE_END : QKV_END;
            set(is_down ? layer.down : layer.o, Share<HIDDEN>::first() + at % HIDDEN_HALVES * 8,
                Share<HIDDEN>::first() + Share<HIDDEN>::count(), is_down ? INNER : QUERY, at / HIDDEN_HALVES, line);
        } else {
            at -= O_END;
            int half = at % (2 * INNER_TILES);
            set(half % 2 ? layer.up : layer.gate, Share<INNER>::first() + half / 2 * 8,
                Share<INNER>::first() + Share<INNER>::count(), HIDDEN, at / (2 * INNER_TILES), line);
        }
    }
};

__device__ inline void wait_for(u32 barrier, u32 parity) {
    u32 done;
    Patience patience;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        patience.lose();
    } while (!done);
}

struct Ring {
    u32 pieces, full, empty, slot, round;
    __device__ Ring(const void *memory, const u64 *barriers)
        : pieces(u32(__cvta_generic_to_shared(memory))), full(u32(__cvta_generic_to_shared(barriers))),
          empty(full + 8 * SLOTS), slot(0), round(0) {}
    __device__ void prepare() const {
        for (int at = 0; at < SLOTS; ++at) {
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(full + 8 * at) : "memory");
            asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(empty + 8 * at), "n"(WARPS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __device__ void advance() {
        if (++slot == SLOTS) slot = 0, ++round;
    }
    // By a whole warp: each of its first 8 lanes fetches a row of the next slot. More than `flight` slots on their way
    // would delay what blocks read from one another.
    __device__ void fill(const Source &source, int line, int flight) {
        u32 own = full + 8 * slot;
        if (round > 0 || slot >= flight) {
            u32 before = slot >= flight ? slot - flight : slot + SLOTS - flight;
            wait_for(full + 8 * before, slot >= flight ? round & 1 : round - 1 & 1);
        }
        if (round > 0) wait_for(empty + 8 * slot, round - 1 & 1);
        if (line == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(own), "r"(source.count * 2 * PIECE) : "memory");
        __syncwarp();
        if (line < source.count)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(pieces + slot * SLOT_BYTES + line * ROW_BYTES), "l"(source.row), "r"(2 * PIECE), "r"(own)
                         : "memory");
        advance();
    }
    // By all computing warps: a lane's part of the next slots, 8 elements of every 32 of row lane / 4.
    template <int COUNT> __device__ void take(uint4 (*parts)[STEPS]) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u32 own = lane / 4 * ROW_BYTES + (warp * SLICE + lane % 4 * 8) * 2, taken[COUNT];
#pragma unroll
        for (int of = 0; of < COUNT; ++of) {
            wait_for(full + 8 * slot, round & 1);
#pragma unroll
            for (int at = 0; at < STEPS; ++at) {
                uint4 &part = parts[of][at];
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(part.x), "=r"(part.y), "=r"(part.z), "=r"(part.w)
                             : "r"(pieces + slot * SLOT_BYTES + own + at * 64));
            }
            taken[of] = empty + 8 * slot;
            advance();
        }
        __syncwarp();
#pragma unroll
        for (int of = 0; of < COUNT; ++of)
            if (lane == of) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(taken[of]) : "memory");
    }
};

__device__ inline void prefetch(const void *from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Fills the ring. One block brings the next layer's norms into the L2 cache.
__device__ inline void fetch_weights(const Layer *layers, int num_layers, Ring &ring) {
    int lane = threadIdx.x % 32;
    for (int at = 0; at < num_layers; ++at) {
        if (at + 1 < num_layers && blockIdx.x == at % GRID) {
            const Layer &next = layers[at + 1];
            if (lane == 0) prefetch(next.input_norm, 2 * HIDDEN);
            if (lane == 1) prefetch(next.post_norm, 2 * HIDDEN);
            if (HAS_NORMS && lane == 2) prefetch(next.q_norm, 2 * HEAD_DIM);
            if (HAS_NORMS && lane == 3) prefetch(next.k_norm, 2 * HEAD_DIM);
        }
        for (int slot = 0; slot < LAYER_END; ++slot) ring.fill(Source(layers[at], slot, lane % 8), lane, FLIGHT);
    }
}

__device__ inline void add_product(float *sums, u32 weight0, u32 weight1, u32 weight2, u32 weight3, u32 input0, u32 input1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(weight0), "r"(weight1), "r"(weight2), "r"(weight3), "r"(input0), "r"(input1));
}

constexpr int MOST_AWAITED = 12;  // vectors of a lane

// Inputs of a product as matrix instructions take them: of row lane / 4 the elements that `place` says. A warp has its
// slice of each piece; which elements a lane has may be chosen, as long as it is the same for weights.
template <int DEPTH> struct Inputs {
    static constexpr int PIECES = DEPTH / PIECE, COUNT = PIECES * STEPS;
    uint4 packed[COUNT];
    __device__ static int place(int at) {
        return at / STEPS * PIECE + threadIdx.x / 32 * SLICE + at % STEPS * 32 + threadIdx.x % 4 * 8;
    }
    __device__ static int row() { return threadIdx.x % 32 / 4; }
    __device__ void load(const bf16 *const *rows, int num_rows) {
#pragma unroll
        for (int at = 0; at < COUNT; ++at)
            packed[at] = row() < num_rows ? *reinterpret_cast<const uint4 *>(rows[row()] + place(at)) : make_uint4(0, 0, 0, 0);
    }
    // From words [rows, ROW / 2] of all blocks, pieces from `first` on.
    template <int ROW> __device__ void wait(const u64 *words, u32 epoch, int num_rows, int first) {
        if (row() < num_rows) {
            const u64 *from = words + u64(row()) * (ROW / 2) + first * PIECE / 2;
            await_some<0>(epoch, from, packed);
        } else
#pragma unroll
            for (int at = 0; at < COUNT; ++at) packed[at] = make_uint4(0, 0, 0, 0);
        __syncwarp();
    }
    // As many at once as registers have room for.
    template <int FIRST> __device__ static void await_some(u32 epoch, const u64 *from, uint4 *packed) {
        constexpr int SOME = COUNT - FIRST <= MOST_AWAITED ? COUNT - FIRST : 8;
        auto spot_of = [&](int at) { return from + (place(FIRST + at) - threadIdx.x % 4 * 8) / 2 + threadIdx.x % 4 * 2; };
        await<8, SOME>(epoch, spot_of, packed + FIRST);
        if constexpr (FIRST + SOME < COUNT) await_some<FIRST + SOME>(epoch, from, packed);
    }
    // RMS norm. squares: [WARPS, 8], shared. `scale` has the norm's weight where there are registers for it.
    static constexpr bool KEEPS_SCALE = COUNT <= 8;
    __device__ void normalise(const uint4 *scale, const bf16 *weight, double epsilon, float *squares) {
        float sum = 0.f;
#pragma unroll
        for (int at = 0; at < COUNT; ++at) {
            float values[8];
            widen(packed[at], values);
#pragma unroll
            for (int dim = 0; dim < 8; ++dim) sum = fmaf(values[dim], values[dim], sum);
        }
        sum = sum_lanes(sum, 4);
        if (threadIdx.x % 4 == 0) squares[threadIdx.x / 4] = sum;
        sync_block();
        float total = 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) total += squares[warp * 8 + row()];
        float factor = rsqrtf(total / HIDDEN + float(epsilon));
#pragma unroll
        for (int at = 0; at < COUNT; ++at) {
            uint4 weights = KEEPS_SCALE ? scale[at] : *reinterpret_cast<const uint4 *>(weight + place(at));
            auto scaled = [&](u32 pair, u32 by) { return multiply2(narrow2(low(pair) * factor, high(pair) * factor), by); };
            packed[at] = make_uint4(scaled(packed[at].x, weights.x), scaled(packed[at].y, weights.y),
                                    scaled(packed[at].z, weights.z), scaled(packed[at].w, weights.w));
        }
    }
    __device__ static void load_scale(const bf16 *weight, uint4 *scale) {
        if (!KEEPS_SCALE) return;
#pragma unroll
        for (int at = 0; at < COUNT; ++at) scale[at] = *reinterpret_cast<const uint4 *>(weight + place(at));
    }
};

// Of 16 rows of a weight and 8 rows of inputs, a warp's slice of the depth; two chains where there are few.
template <int HALVES> struct Sums {
    static constexpr int TILES = up(HALVES, 2), CHAINS = TILES <= 4 ? 2 : 1;
    float of[TILES][CHAINS][4] = {};
    // Some pieces of the inputs times the block's rows.
    template <int PIECES> __device__ void multiply(Ring &ring, const uint4 *inputs) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                uint4 halves[2][STEPS] = {};
                2 * tile + 1 < HALVES ? ring.template take<2>(halves) : ring.template take<1>(halves);
#pragma unroll
                for (int at = 0; at < STEPS; ++at) {
                    uint4 input = inputs[piece * STEPS + at], one = halves[0][at], other = halves[1][at];
                    add_product(of[tile][0], one.x, other.x, one.y, other.y, input.x, input.y);
                    add_product(of[tile][CHAINS - 1], one.z, other.z, one.w, other.w, input.z, input.w);
                }
            }
    }
};

// Where warps add up their slices: [2, TOGETHER tiles, WARPS, 16, 8]. Two parts in turn, so that one is written while
// slow warps read the other.
constexpr int MOST_TILES = at_least(INNER_TILES, up(at_least(QKV_HALVES, HIDDEN_HALVES), 2));
constexpr int TOGETHER = at_most(MOST_TILES, THREADS / 64);
// Attention uses a part, too: for a warp's outputs, top and total of a query head, for queries, and for a token's k and v.
constexpr int WIDTH = HEAD_DIM + 2, OUTPUTS = HEAD_DIM + 4, QUERY_WORDS = HEAD_DIM / 2 + 16;
constexpr int PART = at_least(TOGETHER * WARPS * 128, GROUPS * (WARPS * OUTPUTS + QUERY_WORDS) + HEAD_DIM);
struct Parts {
    float *memory;
    int part;
    __device__ float *next() { return memory + (part ^= 1) * PART; }
    __device__ float *spare() const { return memory + (part ^ 1) * PART; }
};

struct Totals {  // over warps, of a tile and row
    const float *from;
    __device__ float operator()(int line) const {
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += from[warp * 128 + line * 8];
        return sum;
    }
};

// Calls `take(tile, pair, row, totals)` in a thread for each of 8 pairs of a tile's lines and of 8 rows.
template <int HALVES, typename Take> __device__ inline void add_up(Parts &parts, const Sums<HALVES> &sums, Take take) {
    constexpr int TILES = Sums<HALVES>::TILES, CHAINS = Sums<HALVES>::CHAINS;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int first = 0; first < TILES; first += TOGETHER) {
        float *memory = parts.next();
#pragma unroll
        for (int tile = first; tile < first + TOGETHER && tile < TILES; ++tile) {
            const float *one = sums.of[tile][0], *other = sums.of[tile][CHAINS - 1];
            float *to = memory + ((tile - first) * WARPS + warp) * 128 + lane * 2;
            float both[4];
#pragma unroll
            for (int at = 0; at < 4; ++at) both[at] = CHAINS > 1 ? one[at] + other[at] : one[at];
            *reinterpret_cast<float2 *>(to) = make_float2(both[0], both[1]);
            *reinterpret_cast<float2 *>(to + 64) = make_float2(both[2], both[3]);
        }
        sync_block();
        int tile = first + threadIdx.x / 64, row = threadIdx.x % 8;
        if (tile < TILES && tile < first + TOGETHER)
            take(tile, threadIdx.x / 8 % 8, row, Totals{memory + (tile - first) * WARPS * 128 + row});
    }
}
