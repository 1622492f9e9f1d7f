constexpr int GROUP_ROWS = 64, ROWS = 2 * GROUP_ROWS;    // queries of a warpgroup, and of an item
constexpr float LOG2_E = 1.44269504f;
constexpr int PANEL = 64;                                // columns whose rows are 128 bytes
constexpr int PANELS = (HEAD_DIM + PANEL - 1) / PANEL;   // of Q and K; the copy engine fills the last one up with zeros
constexpr int VALUE_PANELS = (VALUE_DIM + PANEL - 1) / PANEL;
constexpr int BOX = BLOCK_SIZE < KEYS ? BLOCK_SIZE : KEYS, BOXES = KEYS / BOX, BLOCK_BOXES = BLOCK_SIZE / BOX;
constexpr unsigned ROW_BYTES = PANEL * 2;
constexpr unsigned PANEL_BYTES = KEYS * ROW_BYTES, QUERY_PANEL_BYTES = ROWS * ROW_BYTES;
constexpr unsigned KEY_TILE_BYTES = PANELS * PANEL_BYTES, VALUE_TILE_BYTES = VALUE_PANELS * PANEL_BYTES;
constexpr unsigned QUERY_BYTES = PANELS * QUERY_PANEL_BYTES;
constexpr unsigned PATTERN_BYTES = 8 * ROW_BYTES;        // of the swizzle
constexpr bool HAS_FIRST = WINDOW > 0 || CHUNK > 0;        // rows see no keys before some place
constexpr int FETCH_REGISTERS = VALUE_DIM > 128 ? 40 : 56, PRODUCT_REGISTERS = VALUE_DIM > 128 ? 232 : 224;  // of a thread
constexpr bool OVERLAPS = QUERIES > 1;  // the first scores of an item, and the last values of the one before
constexpr int SUMS = KEYS / 2, OUTPUTS = VALUE_PANELS * 32;    // accumulators of a thread

// Of a tile's rows: the first in the batch, its position, their number (0: an unused tile).
struct Tile {
    int row, position, num_rows;
};

struct Barriers {
    unsigned long long query_full[QUERIES], query_empty[QUERIES];
    unsigned long long key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
};

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE unsigned narrow(float low, float high) {
    unsigned pair;
    asm("cvt.rn." TYPE_NAME "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The first key that a row sees.
DEVICE int first_seen(int position) {
    const int in_window = WINDOW ? max(0, position - WINDOW + 1) : 0;
    return max(in_window, CHUNK ? position - position % (CHUNK ? CHUNK : 1) : 0);
}

// ------------------------------------------------------------------------------------------------------- fetching

template <int COUNT>
DEVICE void fetch_tile(unsigned to, const TensorMap* map, unsigned barrier, int head, int tile,
                       const int (&blocks)[BOXES]) {
    barrier_expect(barrier, COUNT * PANEL_BYTES);
#pragma unroll
    for (int b = 0; b < BOXES; ++b)
#pragma unroll
        for (int p = 0; p < COUNT; ++p)
            fetch(to + p * PANEL_BYTES + b * BOX * ROW_BYTES, map, barrier, p * PANEL, head,
                  blocks[b] * BLOCK_SIZE + tile % BLOCK_BOXES * BOX);
}

// Blocks of a tile's boxes. Those outside of first..last, which no row sees, are replaced by one of these.
DEVICE void load_blocks(int (&blocks)[BOXES], const int* table, int tile, int first, int last) {
#pragma unroll
    for (int b = 0; b < BOXES; ++b) blocks[b] = table[max(first, min(tile * BOXES / BLOCK_BOXES + b, last))];
}

// -------------------------------------------------------------------------------------------------------- a row's

struct Row {
    float highest, sum;  // of scores so far, and of this thread's weights
};

// Scores become tanh(score / SOFTCAP), exact to 2^-21; `scale`: of scores, times log2(e).
DEVICE void cap(float (&scores)[SUMS], float scale) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const float power = exp2_fast(scores[i] * (scale * (2.f / SOFTCAP)));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(scores[i]) : "f"(power + 1.f));
        scores[i] = 1.f - 2.f * scores[i];
    }
}

// Turns scores into weights; returns the factor for what was summed before.
template <int HALF>
DEVICE float weigh(float (&scores)[SUMS], Row& row, float scale) {
    float highest = row.highest;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) highest = fmaxf(highest, fmaxf(scores[i + HALF], scores[i + HALF + 1]));
    highest = quad_max(highest);
    const float base = highest == -INFINITY ? 0.f : highest * scale;  // a row that has seen no key yet
    const float factor = exp2_fast(row.highest * scale - base);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float weight = exp2_fast(scores[i + HALF + k] * scale - base);
            scores[i + HALF + k] = weight;
            sum += weight;
        }
    row.highest = highest;
    row.sum = row.sum * factor + sum;
    return factor;
}

DEVICE void clear(float (&outputs)[OUTPUTS]) {
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) outputs[i] = 0.f;
}

DEVICE void clear(Row (&rows)[2]) { rows[0] = rows[1] = {-INFINITY, 0.f}; }

// ------------------------------------------------------------------------------------------------------- products

DEVICE void multiply_keys(float (&scores)[SUMS], unsigned queries, unsigned keys) {
    products_begin();
#pragma unroll
    for (int k = 0; k < (HEAD_DIM + 15) / 16; ++k) {
        const unsigned query = (k / 4) * QUERY_PANEL_BYTES + (k % 4) * 32, key = (k / 4) * PANEL_BYTES + (k % 4) * 32;
        multiply(scores, operand(queries + query, 16, PATTERN_BYTES), operand(keys + key, 16, PATTERN_BYTES), k > 0);
    }
    products_commit();
}

// The products of 16 keys, 128 columns at once.
template <int FIRST = 0>
DEVICE void multiply_columns(float (&outputs)[OUTPUTS], const unsigned (&weights)[4], unsigned values) {
    constexpr int COUNT = OUTPUTS - FIRST < 64 ? OUTPUTS - FIRST : 64;  // two columns each
    multiply(reinterpret_cast<float (&)[COUNT]>(outputs[FIRST]), weights,
             operand(values + FIRST / 32 * PANEL_BYTES, PANEL_BYTES, PATTERN_BYTES));
    if constexpr (FIRST + COUNT < OUTPUTS) multiply_columns<FIRST + COUNT>(outputs, weights, values);
}

DEVICE void multiply_values(float (&outputs)[OUTPUTS], const unsigned (&weights)[KEYS / 16][4], unsigned values) {
    products_begin();
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) multiply_columns(outputs, weights[k], values + k * 16 * ROW_BYTES);
    products_commit();
}

DEVICE void narrow_weights(unsigned (&weights)[KEYS / 16][4], const float (&scores)[SUMS]) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[k][i] = narrow(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
}

// `own_row`: this thread's first of the tile's rows; its second is 8 further.
DEVICE void mask(float (&scores)[SUMS], int first_key, const Tile& tile, int own_row) {
    const int position = tile.position + own_row, from = first_key + threadIdx.x % 4 * 2;
    const int lasts[2] = {position - from, position + 8 - from};
    const int firsts[2] = {first_seen(position) - from, first_seen(position + 8) - from};
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const int key = 8 * (i / 4) + (i & 1), row = (i >> 1) & 1;
        if (key > lasts[row] || (HAS_FIRST && key < firsts[row])) scores[i] = -INFINITY;
    }
}

// -------------------------------------------------------------------------------------------------- shared memory

struct Item;  // of 3_items.h

// Addresses in shared memory; a barrier of stage i is 8 * i bytes further.
struct Memory {
    Item* items;  // of the queries in each buffer
    unsigned queries, keys, values, query_full, query_empty, key_full, key_empty, value_full, value_empty;
};

// A place in a ring of stages that all items of a block go through; `parity` of its barriers' phase.
template <int COUNT>
struct Place {
    int stage = 0, parity = 0;

    DEVICE void advance() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

DEVICE Memory divide(unsigned char* memory, Barriers& barriers, Item* items = nullptr) {
    const unsigned queries = (shared_address(memory) + PATTERN_BYTES - 1) & ~(PATTERN_BYTES - 1);
    const unsigned keys = queries + QUERIES * QUERY_BYTES;
    return {items, queries, keys, keys + STAGES * KEY_TILE_BYTES, shared_address(barriers.query_full),
            shared_address(barriers.query_empty), shared_address(barriers.key_full), shared_address(barriers.key_empty),
            shared_address(barriers.value_full), shared_address(barriers.value_empty)};
}

// Sets barriers up, for all threads of a block.
DEVICE void begin(const Memory& memory) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < QUERIES; ++i)
            barrier_init(memory.query_full + 8 * i, 1), barrier_init(memory.query_empty + 8 * i, 8);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(memory.key_full + 8 * i, 1), barrier_init(memory.value_full + 8 * i, 1);
            barrier_init(memory.key_empty + 8 * i, 8), barrier_init(memory.value_empty + 8 * i, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
}
