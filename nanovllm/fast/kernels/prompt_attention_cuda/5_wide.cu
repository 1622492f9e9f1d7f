// Attention of many decodes to a prefix that they share. A thread block attends to one piece of the prefix for the query
// heads of one KV head of up to ROWS / GROUPS decodes, as `wide_pieces_triton` does; `4_prompts.cu` has the roles.

constexpr int GROUPS = HEADS / KV_HEADS;

// A piece, as the host writes it: members [first, first + num_members) attend to tokens [start, end) of a block table.
struct Piece {
    int first, num_members, start, end, table, part, unused[2];
};

// The decode and query head of a row; no decode: -1.
struct PieceRow {
    int decode, head;
};

DEVICE PieceRow row_of(const Piece& piece, const int* members, int kv_head, int row) {
    const int member = row / GROUPS, head = kv_head * GROUPS + row % GROUPS;
    return {member < piece.num_members ? members[piece.first + member] : -1, head};
}

// Writes the queries of 64 rows to shared memory, in the copy engine's swizzle.
DEVICE void gather_queries(unsigned to, const unsigned short* queries, const Piece& piece, const int* members, int kv_head,
                           int group) {
    constexpr int CHUNKS = PANELS * 8;  // of 16 bytes, of a row
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < GROUP_ROWS * CHUNKS; i += 128) {
        const int own_row = i / CHUNKS, chunk = i % CHUNKS;
        const PieceRow row = row_of(piece, members, kv_head, group * GROUP_ROWS + own_row);
        uint4 part = {0, 0, 0, 0};
        if (row.decode >= 0 && chunk * 8 < HEAD_DIM)
            part = *reinterpret_cast<const uint4*>(
                queries + (static_cast<long long>(row.decode) * HEADS + row.head) * HEAD_DIM + chunk * 8);
        const unsigned at = to + chunk / 8 * QUERY_PANEL_BYTES + own_row * ROW_BYTES + (chunk % 8 ^ own_row % 8) * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(part.x), "r"(part.y), "r"(part.z),
                     "r"(part.w)
                     : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");
}

DEVICE void fetch_piece(const TensorMap* keys, const TensorMap* values, const Memory& memory, const Piece& piece,
                        const int* tables, int kv_head) {
    const int* table = tables + piece.table + piece.start / BLOCK_SIZE;
    const int length = piece.end - piece.start, last_block = (length - 1) / BLOCK_SIZE;
    Place<STAGES> place;
    int blocks[BOXES], next[BOXES];
    const int last = (length - 1) / KEYS;
    load_blocks(blocks, table, last, 0, last_block);
    for (int tile = last; tile >= 0; --tile, place.advance()) {
        const int barrier = 8 * place.stage;
        load_blocks(next, table, tile - 1, 0, last_block);  // while it waits
        barrier_wait(memory.key_empty + barrier, place.parity ^ 1);
        fetch_tile<PANELS>(memory.keys + place.stage * KEY_TILE_BYTES, keys, memory.key_full + barrier, kv_head, tile,
                           blocks);
        barrier_wait(memory.value_empty + barrier, place.parity ^ 1);
        fetch_tile<VALUE_PANELS>(memory.values + place.stage * VALUE_TILE_BYTES, values, memory.value_full + barrier,
                                 kv_head, tile, blocks);
#pragma unroll
        for (int b = 0; b < BOXES; ++b) blocks[b] = next[b];
    }
}

// Where a piece's results go, as in `paged_decode_triton`: `splits` [num_decodes, 2], the first part of each decode.
struct Workspace {
    const int* splits;
    float* outputs;
    float* logarithms;
    int* arrivals;  // counted if not null
};

DEVICE void store_piece(const float (&outputs)[OUTPUTS], const Row (&rows)[2], const Piece& piece, const int* members,
                        int kv_head, int own_row, float scale, const Workspace& to) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const PieceRow row = row_of(piece, members, kv_head, own_row + 8 * half);
        const float sum = quad_sum(rows[half].sum), share = 1.f / sum;
        if (row.decode < 0) continue;
        const long long first = static_cast<long long>(to.splits[2 * row.decode]) * HEADS + row.head;
        const long long own = first + static_cast<long long>(piece.part) * HEADS;
        float* output = to.outputs + own * VALUE_DIM + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 8; ++i)
            *reinterpret_cast<float2*>(output + 8 * i) = {outputs[4 * i + 2 * half] * share,
                                                          outputs[4 * i + 2 * half + 1] * share};
        if (threadIdx.x % 4 == 0) {
            to.logarithms[own] = rows[half].highest * scale + __log2f(sum);
            if (to.arrivals) atomicAdd(to.arrivals + first, 1);
        }
    }
}

// The attention of 64 rows; `group`: which.
DEVICE void attend_piece(const Memory& memory, const Piece& piece, const unsigned short* queries, const int* members,
                         int kv_head, int group, float score_scale, const Workspace& to) {
    const int lane = threadIdx.x % 32, own_row = group * GROUP_ROWS + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const unsigned own_queries = memory.queries + group * GROUP_ROWS * ROW_BYTES;
    const int own_turn = 1 + group, other_turn = 2 - group;
    const float scale = SOFTCAP ? SOFTCAP * LOG2_E : score_scale;
    const int length = piece.end - piece.start;
    Place<STAGES> place;
    float scores[SUMS], outputs[OUTPUTS];
    unsigned weights[KEYS / 16][4];
    Row rows[2];
    clear(outputs), clear(rows);
    gather_queries(own_queries, queries, piece, members, kv_head, group);

    barrier_wait(memory.key_full, 0);
    multiply_keys(scores, own_queries, memory.keys);
    products_wait<0>();
    pin(scores);
    if (lane == 0) barrier_arrive(memory.key_empty);
    if (SOFTCAP) cap(scores, score_scale);
    const int seen = (length - 1) % KEYS + 1 - lane % 4 * 2;  // of the last tile's keys, from this thread's first
#pragma unroll
    for (int i = 0; i < SUMS; ++i)
        if (8 * (i / 4) + (i & 1) >= seen) scores[i] = -INFINITY;
    weigh<0>(scores, rows[0], scale), weigh<2>(scores, rows[1], scale);
    narrow_weights(weights, scores);
    for (int tile = (length - 1) / KEYS - 1; tile >= 0; --tile) {
        const Place<STAGES> before = place;
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
        const float factors[2] = {weigh<0>(scores, rows[0], scale), weigh<2>(scores, rows[1], scale)};
        products_wait<0>();
        pin(outputs);
        if (lane == 0) barrier_arrive(memory.value_empty + 8 * before.stage);
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) outputs[k] *= factors[(k >> 1) & 1];
        narrow_weights(weights, scores);
    }
    barrier_wait(memory.value_full + 8 * place.stage, place.parity);
    multiply_values(outputs, weights, memory.values + place.stage * VALUE_TILE_BYTES);
    products_wait<0>();
    pin(outputs);
    store_piece(outputs, rows, piece, members, kv_head, own_row, scale, to);
}

// queries [num_decodes, HEADS, HEAD_DIM]; keys and values as in `prompt_attention`; pieces [gridDim.x / KV_HEADS]; members:
// decodes; scale: of scores, times log2(e).
extern "C" __global__ void __launch_bounds__(384, 1)
    wide_attention(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
                   const unsigned short* queries, const int* tables, const Piece* pieces, const int* members,
                   const int* splits, float* outputs, float* logarithms, int* arrivals, float scale) {
    extern __shared__ unsigned char dynamic_memory[];
    __shared__ Barriers barriers;
    const Piece piece = pieces[blockIdx.x / KV_HEADS];
    if (piece.num_members == 0) return;
    const Memory memory = divide(dynamic_memory, barriers);
    begin(memory);
    const int kv_head = blockIdx.x % KV_HEADS;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x) return;
        prefetch_map(&keys), prefetch_map(&values);
        fetch_piece(&keys, &values, memory, piece, tables, kv_head);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int group = threadIdx.x / 128 - 1;
        if (group == 1) give_turn(1);
        attend_piece(memory, piece, queries, members, kv_head, group, scale, {splits, outputs, logarithms, arrivals});
    }
}
