// Attention of chunks over paged K and V. A work item is a head and up to 128 consecutive rows of a chunk; a thread block
// takes one item after the other, and fetches the next one's tiles while it multiplies the last of this.
//
//     warpgroup 0    fetches Q of an item, then tiles of KEYS keys and values, the last first
//     warpgroup 1    rows 0 to 63     scores of tile i + 1 while tile i's values are added
//     warpgroup 2    rows 64 to 127   its products wait while warpgroup 1 multiplies, and the other way round
//
// After FlashAttention-3 (Shah et al. 2024). Set by the caller: TYPE, HEAD_DIM and VALUE_DIM (multiples of 8 up to 256),
// HEADS, KV_HEADS, BLOCK_SIZE (divides 128), KEYS (of a tile: 64 or 128), WINDOW and CHUNK (0: none), SOFTCAP (0: none; a
// float), STAGES.

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
constexpr int SUMS = KEYS / 2, OUTPUTS = VALUE_PANELS * 32;    // accumulators of a thread

// Of a tile's rows: the first in the batch, its position, their number (0: an unused tile).
struct Tile {
    int row, position, num_rows;
};

struct Barriers {
    unsigned long long query_full, query_empty;
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

DEVICE void mask(float (&scores)[SUMS], int first_key, int column, const int (&positions)[2], const int (&firsts)[2]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const int key = first_key + 8 * (i / 4) + column + (i & 1), row = (i >> 1) & 1;
        if (key > positions[row] || (HAS_FIRST && key < firsts[row])) scores[i] = -INFINITY;
    }
}

// ------------------------------------------------------------------------------------------------------------- roles

// The item of a block in a round. Items are sorted, the longest first, so every other round goes backwards.
DEVICE int item_of(int round) {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// Addresses in shared memory; a barrier of stage i is 8 * i bytes further.
struct Memory {
    unsigned queries, keys, values, query_full, query_empty, key_full, key_empty, value_full, value_empty;
};

// A place in the ring of stages that all items of a block go through; `parity` of its barriers' phase.
struct Place {
    int stage = 0, parity = 0;

    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

DEVICE Memory divide(unsigned char* memory, Barriers& barriers) {
    const unsigned queries = (shared_address(memory) + PATTERN_BYTES - 1) & ~(PATTERN_BYTES - 1);
    const unsigned keys = queries + QUERY_BYTES;
    return {queries, keys, keys + STAGES * KEY_TILE_BYTES, shared_address(&barriers.query_full),
            shared_address(&barriers.query_empty), shared_address(barriers.key_full), shared_address(barriers.key_empty),
            shared_address(barriers.value_full), shared_address(barriers.value_empty)};
}

// Tiles of keys from the last that a row sees to the first.
struct Span {
    int last, count;
};

DEVICE Span span_of(const Tile& tile) {
    const int last = (tile.position + tile.num_rows - 1) / KEYS;
    return {last, last - first_seen(tile.position) / KEYS + 1};
}

// Fetches an item's tiles; `item_parity`: of the phase of Q's barriers.
DEVICE void fetch_item(const TensorMap* queries, const TensorMap* keys, const TensorMap* values, const Memory& memory,
                       const Tile& tile, const int* table, int head, int item_parity, Place& place) {
    const Span span = span_of(tile);
    const int kv_head = head / (HEADS / KV_HEADS);
    const int first_block = first_seen(tile.position) / BLOCK_SIZE;
    const int last_block = (tile.position + tile.num_rows - 1) / BLOCK_SIZE;
    int blocks[BOXES], next[BOXES];
    load_blocks(blocks, table, span.last, first_block, last_block);
    barrier_wait(memory.query_empty, item_parity ^ 1);
    barrier_expect(memory.query_full, QUERY_BYTES);
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
        fetch(memory.queries + p * QUERY_PANEL_BYTES, queries, memory.query_full, p * PANEL, head, tile.row);
    for (int i = 0; i < span.count; ++i, place.advance()) {
        const int barrier = 8 * place.stage;
        load_blocks(next, table, span.last - i - 1, first_block, last_block);  // while it waits
        barrier_wait(memory.key_empty + barrier, place.parity ^ 1);
        fetch_tile<PANELS>(memory.keys + place.stage * KEY_TILE_BYTES, keys, memory.key_full + barrier, kv_head,
                           span.last - i, blocks);
        barrier_wait(memory.value_empty + barrier, place.parity ^ 1);
        fetch_tile<VALUE_PANELS>(memory.values + place.stage * VALUE_TILE_BYTES, values, memory.value_full + barrier,
                                 kv_head, span.last - i, blocks);
#pragma unroll
        for (int b = 0; b < BOXES; ++b) blocks[b] = next[b];
    }
}

// The attention of 64 rows of an item's tile; `group`: which.
DEVICE void attend(const Memory& memory, const Tile& tile, int group, float score_scale, const float* sink,
                   unsigned short* output, long long output_stride, int item_parity, Place& place) {
    const Span span = span_of(tile);
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, column = lane % 4 * 2;
    const int own_row = group * GROUP_ROWS + warp * 16 + lane / 4;
    const int positions[2] = {tile.position + own_row, tile.position + own_row + 8};
    const int firsts[2] = {first_seen(positions[0]), first_seen(positions[1])};
    const int last_first = first_seen(tile.position + tile.num_rows - 1);
    const unsigned own_queries = memory.queries + group * GROUP_ROWS * ROW_BYTES;
    const int own_turn = 1 + group, other_turn = 2 - group;
    const float scale = SOFTCAP ? SOFTCAP * LOG2_E : score_scale;

    float scores[SUMS], outputs[OUTPUTS];
    unsigned weights[KEYS / 16][4];
    Row rows[2] = {{-INFINITY, 0.f}, {-INFINITY, 0.f}};
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) outputs[i] = 0.f;

    barrier_wait(memory.query_full, item_parity);
    barrier_wait(memory.key_full + 8 * place.stage, place.parity);
    multiply_keys(scores, own_queries, memory.keys + place.stage * KEY_TILE_BYTES);
    products_wait<0>();
    pin(scores);
    if (lane == 0) barrier_arrive(memory.key_empty + 8 * place.stage);
    if (SOFTCAP) cap(scores, score_scale);
    mask(scores, span.last * KEYS, column, positions, firsts);
    weigh<0>(scores, rows[0], scale), weigh<2>(scores, rows[1], scale);
    narrow_weights(weights, scores);

    for (int i = 1; i < span.count; ++i) {
        const Place before = place;
        place.advance();
        barrier_wait(memory.key_full + 8 * place.stage, place.parity);
        wait_for_turn(own_turn);
        multiply_keys(scores, own_queries, memory.keys + place.stage * KEY_TILE_BYTES);
        barrier_wait(memory.value_full + 8 * before.stage, before.parity);
        pin(outputs);
        multiply_values(outputs, weights, memory.values + before.stage * VALUE_TILE_BYTES);
        give_turn(other_turn);
        products_wait<1>();
        pin(scores);
        if (lane == 0) barrier_arrive(memory.key_empty + 8 * place.stage);
        if (SOFTCAP) cap(scores, score_scale);
        const int first_key = (span.last - i) * KEYS;
        if (first_key + KEYS - 1 > tile.position || (HAS_FIRST && first_key < last_first))
            mask(scores, first_key, column, positions, firsts);
        const float factors[2] = {weigh<0>(scores, rows[0], scale), weigh<2>(scores, rows[1], scale)};
        products_wait<0>();
        pin(outputs);
        if (lane == 0) barrier_arrive(memory.value_empty + 8 * before.stage);
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) outputs[k] *= factors[(k >> 1) & 1];
        narrow_weights(weights, scores);
    }
    if (lane == 0) barrier_arrive(memory.query_empty);
    barrier_wait(memory.value_full + 8 * place.stage, place.parity);
    multiply_values(outputs, weights, memory.values + place.stage * VALUE_TILE_BYTES);
    products_wait<0>();
    pin(outputs);
    if (lane == 0) barrier_arrive(memory.value_empty + 8 * place.stage);
    place.advance();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = quad_sum(rows[half].sum);
        if (sink) sum += exp2_fast(*sink * LOG2_E - rows[half].highest * scale);
        const float share = 1.f / sum;
        if (own_row + 8 * half < tile.num_rows) {
            unsigned short* to = output + (own_row + 8 * half) * output_stride + column;
#pragma unroll
            for (int i = 0; i < VALUE_DIM / 8; ++i)
                *reinterpret_cast<unsigned*>(to + 8 * i) =
                    narrow(outputs[4 * i + 2 * half] * share, outputs[4 * i + 2 * half + 1] * share);
        }
    }
}

// queries [rows, HEADS, HEAD_DIM]; keys [slots, KV_HEADS, HEAD_DIM], values [slots, KV_HEADS, VALUE_DIM]; output [rows,
// HEADS, VALUE_DIM], whose rows are output_stride elements apart; tiles [num_tiles], and the start of each one's block
// table; scale: of scores, times log2(e); sinks [HEADS] or null.
extern "C" __global__ void __launch_bounds__(384, 1)
    prompt_attention(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                     const __grid_constant__ TensorMap values, unsigned short* output, long long output_stride,
                     const Tile* tiles, int num_tiles, const int* table_starts, const int* tables, const float* sinks,
                     float scale) {
    extern __shared__ unsigned char dynamic_memory[];
    __shared__ Barriers barriers;
    const Memory memory = divide(dynamic_memory, barriers);
    if (threadIdx.x == 0) {
        barrier_init(memory.query_full, 1), barrier_init(memory.query_empty, 8);  // by each warp that multiplies
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(memory.key_full + 8 * i, 1), barrier_init(memory.value_full + 8 * i, 1);
            barrier_init(memory.key_empty + 8 * i, 8), barrier_init(memory.value_empty + 8 * i, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    const int num_items = num_tiles * HEADS, num_rounds = (num_items + gridDim.x - 1) / gridDim.x;
    int item_parity = 0;
    Place place;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x) return;
        prefetch_map(&queries), prefetch_map(&keys), prefetch_map(&values);
        for (int round = 0; round < num_rounds; ++round) {
            const int item = item_of(round);
            if (item >= num_items || tiles[item / HEADS].num_rows == 0) continue;
            const Tile tile = tiles[item / HEADS];
            fetch_item(&queries, &keys, &values, memory, tile, tables + table_starts[item / HEADS], item % HEADS,
                       item_parity, place);
            item_parity ^= 1;
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int group = threadIdx.x / 128 - 1;
        if (group == 1) give_turn(1);
        for (int round = 0; round < num_rounds; ++round) {
            const int item = item_of(round);
            if (item >= num_items || tiles[item / HEADS].num_rows == 0) continue;
            const Tile tile = tiles[item / HEADS];
            const int head = item % HEADS;
            attend(memory, tile, group, scale, sinks ? sinks + head : nullptr,
                   output + tile.row * output_stride + head * VALUE_DIM, output_stride, item_parity, place);
            item_parity ^= 1;
        }
    }
}
