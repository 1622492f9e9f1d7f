// Attention of chunks over paged K and V. A work item is a head and up to 128 consecutive rows of a chunk; a thread block
// takes one item after the other as one row of tiles: the scores of an item's first tile are computed while the values of
// the last one's are added, so that matrix instructions do not wait at an item's ends.
//
//     warpgroup 0    fetches Q of an item, then tiles of KEYS keys and values, the last first
//     warpgroup 1    rows 0 to 63     scores of tile i + 1 while tile i's values are added
//     warpgroup 2    rows 64 to 127   its products wait while warpgroup 1 multiplies, and the other way round
//
// After FlashAttention-3 (Shah et al. 2024). Set by the caller: TYPE, HEAD_DIM and VALUE_DIM (multiples of 8 up to 256),
// HEADS, KV_HEADS, BLOCK_SIZE (divides 128), KEYS (of a tile: 64 or 128), WINDOW and CHUNK (0: none), SOFTCAP (0: none; a
// float), STAGES, QUERIES (buffers of Q; with one, items do not overlap).

// Blocks of an item's tiles of keys, of which `blocks` are the next one's.
struct Blocks {
    const int* table;
    int first, last;
    int blocks[BOXES];

    DEVICE void begin(const Item& item, const int* tables) {
        table = tables + item.table;
        first = first_seen(item.tile.position) / BLOCK_SIZE;
        last = (item.tile.position + item.tile.num_rows - 1) / BLOCK_SIZE;
        if (item.tile.num_rows) load(item.span().last);
    }

    DEVICE void load(int tile) { load_blocks(blocks, table, tile, first, last); }
};

// Fetches the tiles of all items; the next item is known before the last tile of one is fetched.
DEVICE void fetch_items(const TensorMap* queries, const TensorMap* keys, const TensorMap* values, const Memory& memory,
                        Items items, const int* tables) {
    Place<QUERIES> query_place;
    Place<STAGES> place;
    Item item = items.take(blockIdx.x);
    Blocks blocks;
    blocks.begin(item, tables);
    while (item.tile.num_rows) {
        const int head = item.head, kv_head = head / (HEADS / KV_HEADS), row = item.tile.row;
        const Span span = item.span();
        for (int i = 0; i < span.count; ++i, place.advance()) {
            const int barrier = 8 * place.stage, tile = span.last - i;
            const bool is_last = i == span.count - 1;
            int number = 0, own[BOXES];
            if (is_last) number = items.claim();
#pragma unroll
            for (int b = 0; b < BOXES; ++b) own[b] = blocks.blocks[b];
            barrier_wait(memory.key_empty + barrier, place.parity ^ 1);
            fetch_tile<PANELS>(memory.keys + place.stage * KEY_TILE_BYTES, keys, memory.key_full + barrier, kv_head, tile,
                               own);
            if (i == 0) {
                const unsigned to = memory.queries + query_place.stage * QUERY_BYTES;
                const unsigned full = memory.query_full + 8 * query_place.stage;
                barrier_wait(memory.query_empty + 8 * query_place.stage, query_place.parity ^ 1);
                memory.items[query_place.stage] = item;
                barrier_expect(full, QUERY_BYTES);
#pragma unroll
                for (int p = 0; p < PANELS; ++p) fetch(to + p * QUERY_PANEL_BYTES, queries, full, p * PANEL, head, row);
                query_place.advance();
            }
            if (is_last) {
                item = items.take(number);
                blocks.begin(item, tables);
            } else {
                blocks.load(tile - 1);
            }
            barrier_wait(memory.value_empty + barrier, place.parity ^ 1);
            fetch_tile<VALUE_PANELS>(memory.values + place.stage * VALUE_TILE_BYTES, values,
                                     memory.value_full + barrier, kv_head, tile, own);
        }
    }
    barrier_wait(memory.query_empty + 8 * query_place.stage, query_place.parity ^ 1);
    memory.items[query_place.stage] = item;
    barrier_arrive(memory.query_full + 8 * query_place.stage);
    items.finish();
}

// Where results go. output: the first element, and elements from one row to the next. workspace: sums of each thread of
// two items a block: the first, begun by others, and the last. arrivals: parts done, by warp.
struct Results {
    unsigned short* output;
    long long stride;
    float4* workspace;
    int* arrivals;
};

// Leaves a part's sums in the workspace; true for the warp that comes last, which gets the sums of all, merged in order.
DEVICE bool merge_parts(float (&outputs)[OUTPUTS], Row (&rows)[2], const Item& item, float scale, const Results& to) {
    constexpr int WORDS = OUTPUTS / 4 + 1;
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    constexpr int ITEM = 8 * WORDS * 32;
    float4* sums = to.workspace + warp * (WORDS * 32) + lane;
    float4* own = sums + (2 * blockIdx.x + (item.part == 0)) * ITEM;
#pragma unroll
    for (int i = 0; i < OUTPUTS / 4; ++i)
        own[i * 32] = {outputs[4 * i], outputs[4 * i + 1], outputs[4 * i + 2], outputs[4 * i + 3]};
    own[OUTPUTS / 4 * 32] = {rows[0].highest, rows[0].sum, rows[1].highest, rows[1].sum};
    __threadfence();
    __syncwarp();
    int* arrivals = to.arrivals + (item.place * HEADS + item.head) * 8 + warp;
    int arrived = lane == 0 ? atomicAdd(arrivals, 1) : 0;
    arrived = __shfl_sync(~0u, arrived, 0);
    if (arrived != item.num_parts - 1) return false;
    __threadfence();
    if (lane == 0) *arrivals = 0;  // for the next launch
    clear(outputs), clear(rows);
    for (int part = 0; part < item.num_parts; ++part) {
        const float4* from = sums + (2 * (blockIdx.x - item.part + part) + (part == 0)) * ITEM;
        const float4 other = __ldcg(from + OUTPUTS / 4 * 32);
        const float highest[2] = {other.x, other.z}, sums[2] = {other.y, other.w};
        float factors[2], shares[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float top = fmaxf(rows[half].highest, highest[half]);
            const float base = top == -INFINITY ? 0.f : top * scale;
            factors[half] = exp2_fast(rows[half].highest * scale - base);
            shares[half] = exp2_fast(highest[half] * scale - base);
            rows[half] = {top, rows[half].sum * factors[half] + sums[half] * shares[half]};
        }
#pragma unroll
        for (int i = 0; i < OUTPUTS / 4; ++i) {
            const float4 part_sums = __ldcg(from + i * 32);
            outputs[4 * i] = outputs[4 * i] * factors[0] + part_sums.x * shares[0];
            outputs[4 * i + 1] = outputs[4 * i + 1] * factors[0] + part_sums.y * shares[0];
            outputs[4 * i + 2] = outputs[4 * i + 2] * factors[1] + part_sums.z * shares[1];
            outputs[4 * i + 3] = outputs[4 * i + 3] * factors[1] + part_sums.w * shares[1];
        }
    }
    return true;
}

// Exchanges words of four threads: thread i gets those numbered i, in order of threads.
DEVICE void turn(unsigned (&words)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool is_upper = lane & step;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (!(k & step)) {
                const unsigned sent = is_upper ? words[k] : words[k | step];
                const unsigned got = __shfl_xor_sync(~0u, sent, step);
                (is_upper ? words[k] : words[k | step]) = got;
            }
    }
}

// Writes an item's result: sums of values over sums of weights. `own_row`: as in `mask`.
DEVICE void store(float (&outputs)[OUTPUTS], Row (&rows)[2], const Item& item, int own_row, float scale,
                  const float* sinks, const Results& to) {
    if (item.num_parts > 1 && !merge_parts(outputs, rows, item, scale, to)) return;
    const int head = item.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = own_row + 8 * half;
        float sum = quad_sum(rows[half].sum);
        if (sinks) sum += exp2_fast(sinks[head] * LOG2_E - rows[half].highest * scale);
        const float share = 1.f / sum;
        unsigned short* output = to.output + (item.tile.row + row) * to.stride + head * VALUE_DIM;
        const int lane = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < VALUE_PANELS * 2; ++i) {  // of 32 columns: each of four threads gets 8
            unsigned words[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int own = 16 * i + 4 * k + 2 * half;
                words[k] = narrow(outputs[own] * share, outputs[own + 1] * share);
            }
            turn(words, lane);
            if (row < item.tile.num_rows && 32 * i + 8 * lane < VALUE_DIM)
                *reinterpret_cast<uint4*>(output + 32 * i + 8 * lane) = {words[0], words[1], words[2], words[3]};
        }
    }
}

// The attention of 64 rows of each item's tile; `group`: which.
DEVICE void attend_items(const Memory& memory, int group, float score_scale, const float* sinks, const Results& to) {
    const int lane = threadIdx.x % 32, own_row = group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const unsigned own_queries = memory.queries + group * GROUP_ROWS * ROW_BYTES;
    const int own_turn = 1 + group, other_turn = 2 - group;
    const float scale = SOFTCAP ? SOFTCAP * LOG2_E : score_scale;
    Place<QUERIES> query_place;
    Place<STAGES> place;
    float scores[SUMS], outputs[OUTPUTS];
    unsigned weights[KEYS / 16][4];

    // The item whose queries come next.
    const auto next_item = [&] {
        barrier_wait(memory.query_full + 8 * query_place.stage, query_place.parity);
        return memory.items[query_place.stage];
    };
    const auto start_scores = [&] {
        multiply_keys(scores, own_queries + query_place.stage * QUERY_BYTES, memory.keys + place.stage * KEY_TILE_BYTES);
    };
    const auto start_values = [&](const Place<STAGES>& at) {
        barrier_wait(memory.value_full + 8 * at.stage, at.parity);
        pin(outputs);
        multiply_values(outputs, weights, memory.values + at.stage * VALUE_TILE_BYTES);
    };
    const auto end_scores = [&](bool is_last) {
        pin(scores);
        if (lane == 0) barrier_arrive(memory.key_empty + 8 * place.stage);
        if (is_last) {
            if (lane == 0) barrier_arrive(memory.query_empty + 8 * query_place.stage);
            query_place.advance();
        }
        if (SOFTCAP) cap(scores, score_scale);
    };
    const auto end_values = [&](const Place<STAGES>& at) {
        products_wait<0>();
        pin(outputs);
        if (lane == 0) barrier_arrive(memory.value_empty + 8 * at.stage);
    };
    // Scores of the next tile, while values of the one before are added.
    const auto start_both = [&] {
        const Place<STAGES> before = place;
        place.advance();
        barrier_wait(memory.key_full + 8 * place.stage, place.parity);
        wait_for_turn(own_turn);
        start_scores();
        start_values(before);
        give_turn(other_turn);
        products_wait<1>();
        return before;
    };

    Item item = next_item();
    bool is_begun = false;  // the scores of its last tile of keys are there
    Row rows[2];
    while (item.tile.num_rows) {
        const Span span = item.span();
        if (!is_begun) {
            clear(outputs), clear(rows);
            barrier_wait(memory.key_full + 8 * place.stage, place.parity);
            start_scores();
            products_wait<0>();
            end_scores(span.count == 1);
            mask(scores, span.last * KEYS, item.tile, own_row);
            weigh<0>(scores, rows[0], scale), weigh<2>(scores, rows[1], scale);
            narrow_weights(weights, scores);
        }
        for (int i = 1; i < span.count; ++i) {
            const Place<STAGES> before = start_both();
            end_scores(i == span.count - 1);
            const int first_key = (span.last - i) * KEYS;
            if (first_key + KEYS - 1 > item.tile.position ||
                (HAS_FIRST && first_key < first_seen(item.tile.position + item.tile.num_rows - 1)))
                mask(scores, first_key, item.tile, own_row);
            const float factors[2] = {weigh<0>(scores, rows[0], scale), weigh<2>(scores, rows[1], scale)};
            end_values(before);
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) outputs[k] *= factors[(k >> 1) & 1];
            narrow_weights(weights, scores);
        }
        Item next = item;
        if (OVERLAPS) next = next_item();
        if (OVERLAPS && next.tile.num_rows) {
            const Span span = next.span();
            const Place<STAGES> before = start_both();
            end_scores(span.count == 1);
            Row next_rows[2];
            clear(next_rows);
            mask(scores, span.last * KEYS, next.tile, own_row);
            weigh<0>(scores, next_rows[0], scale), weigh<2>(scores, next_rows[1], scale);
            end_values(before);
            store(outputs, rows, item, own_row, scale, sinks, to);
            narrow_weights(weights, scores);
            clear(outputs);
            rows[0] = next_rows[0], rows[1] = next_rows[1];
            is_begun = true;
        } else {
            start_values(place);
            end_values(place);
            place.advance();
            store(outputs, rows, item, own_row, scale, sinks, to);
            if (!OVERLAPS) next = next_item();
        }
        item = next;
    }
}

// Clears rows from `first_row` on that no tile has, up to `num_rows`, by one warp of each block.
DEVICE void clear_padding(const Tile* tiles, int num_tiles, int first_row, int num_rows, const Results& to) {
    const int lane = threadIdx.x % 32;
    int end = first_row;
    for (int i = lane; i < num_tiles; i += 32) end = max(end, tiles[i].num_rows ? tiles[i].row + tiles[i].num_rows : 0);
    end = __reduce_max_sync(~0u, end);
    for (int row = end + blockIdx.x; row < num_rows; row += gridDim.x)
        for (int i = lane * 2; i < HEADS * VALUE_DIM; i += 64)
            *reinterpret_cast<unsigned*>(to.output + row * to.stride + i) = 0;
}

// queries [rows, HEADS, HEAD_DIM]; keys [slots, KV_HEADS, HEAD_DIM], values [slots, KV_HEADS, VALUE_DIM]; output [rows,
// HEADS, VALUE_DIM], whose rows are output_stride elements apart; tiles [num_tiles], and the start of each one's block
// table; scale: of scores, times log2(e); sinks [HEADS] or null; workspace: of two items a block;
// arrivals and counts: zeros; rows from first_row to num_rows that no tile has become 0.
extern "C" __global__ void __launch_bounds__(384, 1)
    prompt_attention(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                     const __grid_constant__ TensorMap values, unsigned short* output, long long output_stride,
                     const Tile* tiles, int num_tiles, const int* table_starts, const int* tables, const float* sinks,
                     float scale, float4* workspace, int* arrivals, int* counts, int first_row, int num_rows) {
    extern __shared__ unsigned char dynamic_memory[];
    __shared__ Barriers barriers;
    __shared__ Plan plan;
    __shared__ Item items[QUERIES];
    __shared__ TableTile cached[MOST_CACHED];
    const Memory memory = divide(dynamic_memory, barriers, items);
    if (threadIdx.x / 32 == 1) make_plan(plan, tiles, num_tiles);
    if (threadIdx.x >= 128 && threadIdx.x - 128 < min(num_tiles, MOST_CACHED))
        cached[threadIdx.x - 128] = {tiles[threadIdx.x - 128], table_starts[threadIdx.x - 128]};
    begin(memory);
    const Results results = {output, output_stride, workspace, arrivals};
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCH_REGISTERS));
        if (threadIdx.x / 32 == 1) clear_padding(tiles, num_tiles, first_row, num_rows, results);
        if (threadIdx.x) return;
        prefetch_map(&queries), prefetch_map(&keys), prefetch_map(&values);
        fetch_items(&queries, &keys, &values, memory, {cached, tiles, num_tiles, table_starts, plan, counts}, tables);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(PRODUCT_REGISTERS));
        const int group = threadIdx.x / 128 - 1;
        if (group == 1) give_turn(1);
        attend_items(memory, group, scale, sinks, results);
    }
}
