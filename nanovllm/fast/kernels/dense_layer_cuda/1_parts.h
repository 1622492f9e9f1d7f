// Sizes, arguments, grid barrier and copies of the kernel; follows prompt_attention_cuda/1_hopper.h and bfloat16.h.
//
// Set by the caller: HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM (64 or 128), ROWS (16 to 256, a power of 2), HAS_NORMS,
// HAS_BIAS, WEIGHT_SLOTS, INPUT_SLOTS; O_SPLITS, DOWN_SPLITS, QKV_SPLITS of the depth; GATE_BLOCKS of 64 rows of weights;
// FLIGHT (slots of weights on their way, at most), PATIENCE (reads before a wait traps; 0: for ever).

constexpr int QUERY = HEADS * HEAD_DIM, KV = KV_HEADS * HEAD_DIM, QKV = QUERY + 2 * KV;
constexpr int COLUMNS = ROWS < 128 ? ROWS : 128, ROW_TILES = ROWS / COLUMNS;  // rows of the batch are columns here
constexpr int PANEL = 64, STEP = 2 * PANEL;                                   // depth of a box, and of a step
constexpr u32 BLOCK_BYTES = 64 * PANEL * 2, WEIGHT_BYTES = 2 * BLOCK_BYTES;   // of 64 rows of weights; of a slot
constexpr u32 PANEL_BYTES = COLUMNS * PANEL * 2, INPUT_BYTES = 2 * PANEL_BYTES;
constexpr int MEETING_ROUND = 8;                                              // the most splits of a depth
constexpr int CONSUMERS = 256, HELPERS = 64, THREADS = 128 + CONSUMERS;

// A product of weights [FEATURES, DEPTH] and the batch. An item is BLOCKS * 64 features, COLUMNS rows, a split of the depth.
template <int FEATURES_, int DEPTH_, int BLOCKS_, int SPLITS_, int PARTS_>
struct Product {
    static constexpr int FEATURES = FEATURES_, DEPTH = DEPTH_, BLOCKS = BLOCKS_, SPLITS = SPLITS_, WIDTH = 64 * BLOCKS;
    static constexpr int STEPS = DEPTH / STEP;
    static constexpr int PARTS = PARTS_;                            // linear layers, each with factors of its own
    static constexpr int SLICES = at_most(at_least(STEPS / 2, 1), 16);  // of the depth, in products with `down`
    static constexpr int ITEMS = FEATURES / WIDTH * ROW_TILES * SPLITS;
    // Two warpgroups share an item: half of its columns each, or 64 features.
    static constexpr int OWN_COLUMNS = BLOCKS == 1 ? COLUMNS / 2 : COLUMNS, SUMS = OWN_COLUMNS / 2;
    static constexpr int SHARE = (COLUMNS + SPLITS - 1) / SPLITS;       // rows that each split completes
    static constexpr int BATCH = SHARE <= 8 ? 1 : SHARE <= 16 ? 2 : 4;  // rows of a warp at once
    static_assert(DEPTH % STEP == 0 && FEATURES % WIDTH == 0 && SPLITS <= MEETING_ROUND, "sizes");
    static_assert(ROW_TILES == 1 || COLUMNS % SPLITS == 0, "rows");
};
typedef Product<HIDDEN, QUERY, 1, O_SPLITS, 1> Output;
typedef Product<2 * INNER, HIDDEN, GATE_BLOCKS, 1, 2> Gate;
typedef Product<HIDDEN, INNER, 1, DOWN_SPLITS, 1> Down;
typedef Product<QKV, HIDDEN, 2, QKV_SPLITS, 3> Next;
constexpr int HIDDEN_TILES = HIDDEN / 64, NUM_TILES = HIDDEN_TILES * ROW_TILES, NEXT_TILES = QKV / 128 * ROW_TILES;

// Factors of a product's adapters by slot, see `Factors` in adapted_layers.py; down is null if no adapter has any.
struct LowRank {
    const bf16 *down, *up;  // [slots, PARTS, rank, DEPTH], [slots, rank, FEATURES]
    int rank;               // a multiple of 16
};

struct Layer {
    TensorMap attended, output_weight, middle, gate_weight, inner, down_weight, next, next_weight;
    const bf16 *residual, *middle_norm, *next_norm, *q_norm, *k_norm, *bias, *cosines, *sines;
    const long long* slots;
    bf16 *middle_rows, *middle_scaled, *inner_rows, *next_rows, *next_scaled;  // [ROWS, ...]; scaled: by the norm's weight
    bf16 *query, *keys, *values;
    float *partial, *middle_squares, *next_squares;  // squares: [HIDDEN / 64, ROWS]
    u32* passed;     // [8], arrivals of all launches: at the barrier before each product, with products by `down`
    u32* exchanged;  // [2 * NUM_TILES + NEXT_TILES], arrivals of a tile's splits: output, down, next
    float middle_epsilon, next_epsilon, q_epsilon, k_epsilon;
    int num_rows, has_next;
    LowRank low_rank[4];  // of each product
    const bf16* attended_rows;              // read by rows
    const int *row_slots, *order, *starts;  // see `RowsBySlot`
    float* shrunk;                          // [SLICES, ROWS, PARTS * rank], of the running product
    int num_slots;
};

DEVICE u32 load_pair(const bf16* from) { return *reinterpret_cast<const u32*>(from); }
DEVICE u32 load_fresh(const bf16* from) { return __ldcg(reinterpret_cast<const u32*>(from)); }  // other blocks wrote it
DEVICE void store_pair(bf16* to, float first, float second) { *reinterpret_cast<u32*>(to) = narrow2(first, second); }
DEVICE float sum_lanes(float value, int lanes) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        if (step < lanes) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// ------------------------------------------------------------------------------------------------------ barriers

DEVICE void sync_helpers() { asm volatile("bar.sync 6, %0;" ::"n"(HELPERS) : "memory"); }
DEVICE void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
// The next kernel may begin where blocks of this one end, as far as `await_previous`, if it is launched so.
DEVICE void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Between writes to global memory and the copy engine's reads of them.
DEVICE void fence_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Counters only rise, over all launches, so that none has to reset them. A round of arrivals adds a power of 2, so that it
// begins at a multiple of it, in spite of overflows.

constexpr u32 GRID_ROUND = 256;  // of all blocks, the first of which makes up for those that are missing

DEVICE u32 begin_of_round(const u32* counter) {
    u32 arrived;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    return arrived / GRID_ROUND * GRID_ROUND;
}

DEVICE void arrive_with_grid(u32* counter) {
    const u32 amount = blockIdx.x == 0 ? GRID_ROUND + 1 - gridDim.x : 1;
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(amount) : "memory");
}

DEVICE void await(const u32* counter, u32 arrived, u32 begin, u32 count) {
    for (u32 tries = 0; arrived - begin < count; ++tries) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
        if (PATIENCE && tries > PATIENCE) __trap();
    }
}

// Arrives as one of `count`, up to MEETING_ROUND, and waits for the others.
DEVICE void meet(u32* counter, u32 own, u32 count) {
    const u32 amount = own == 0 ? MEETING_ROUND + 1 - count : 1;
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(amount) : "memory");
    await(counter, before + amount, before / MEETING_ROUND * MEETING_ROUND, MEETING_ROUND);
}

// A place in a ring of slots that a role goes through.
template <int SLOTS>
struct Place {
    int slot = 0;
    u32 parity = 0;
    DEVICE void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

struct Barriers {
    u64 weight_full[WEIGHT_SLOTS], weight_empty[WEIGHT_SLOTS], input_full[INPUT_SLOTS], input_empty[INPUT_SLOTS];
    u64 passed[4];  // the grid barrier before each product
};

struct Memory {  // addresses in shared memory; a barrier of slot i is 8 * i bytes further
    u32 weights, inputs, weight_full, weight_empty, input_full, input_empty, passed;
    float* scales;  // [2, ROWS], of the middle norm and the next
};

// ---------------------------------------------------------------------------------------------------------- copies

DEVICE void fetch(u32 to, const TensorMap* map, u32 barrier, int depth, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
            "r"(to), "l"(map), "r"(barrier), "r"(depth), "r"(row)
        : "memory");
}

// 64 rows of gate and up, eight of one and eight of the other in turn.
DEVICE void fetch_gates(u32 to, const TensorMap* map, u32 barrier, int depth, int row) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5}], [%2];" ::
            "r"(to), "l"(map), "r"(barrier), "r"(depth), "r"(0), "r"(row / 16)
        : "memory");
}

// ----------------------------------------------------------------------- narrow products, as `multiply` of 1_hopper.h

DEVICE void multiply(float (&sums)[4], u64 left, u64 right, int adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, adds, 1, 1, 0, 0;\n}"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "l"(left), "l"(right), "r"(adds));
}

DEVICE void multiply(float (&sums)[8], u64 left, u64 right, int adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, adds, 1, 1, 0, 0;\n}"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7])
        : "l"(left), "l"(right), "r"(adds));
}

DEVICE void multiply(float (&sums)[16], u64 left, u64 right, int adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15}, %16, %17, adds, 1, 1, 0, 0;\n}"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15])
        : "l"(left), "l"(right), "r"(adds));
}
