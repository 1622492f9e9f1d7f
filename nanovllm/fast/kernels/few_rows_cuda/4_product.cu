// A product of few rows, normalised before, with a weight: see normed_linear.py.
//
// Set by the caller: DEPTH, PIECE (which divides it, a multiple of 32), OUTPUTS.

// A warp owns contiguous rows of the weight, up to 8. They come in pieces; in shared memory rows begin 16 banks apart.
constexpr int MOST = up(OUTPUTS, ALL_WARPS), PIECES = DEPTH / PIECE, PIECE_BYTES = 2 * PIECE;
constexpr u32 WEIGHT_STRIDE = PIECE_BYTES + 64, ROW_STRIDE = 2 * DEPTH + 64, SLOT_BYTES = MOST * WEIGHT_STRIDE;
static_assert(MOST <= 8 && DEPTH % 256 == 0 && PIECE % 64 == 0 && DEPTH % PIECE == 0, "sizes");

struct Call {
    const bf16 *states, *norm, *weight;  // [num_rows, DEPTH], [DEPTH], [OUTPUTS, DEPTH]
    const long long *slots;              // [num_slots] of K and V; 0, or none, for padding
    bf16 *output;                        // [num_rows, OUTPUTS]
    const bf16 *next;                    // a weight that a later kernel reads, of next_bytes
    long long next_bytes;
    float epsilon;
    int num_rows, num_slots;
};

// Adds the products of 8 rows (four more registers would be of 8 further rows) and 8 rows of the weight.
__device__ inline void add_product(float *sums, u32 row0, u32 row1, u32 weight0, u32 weight1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(row0), "r"(0), "r"(row1), "r"(0), "r"(weight0), "r"(weight1));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) normed_product(Call call) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ u64 barriers[WARPS * SLOTS];
    unsigned char *rows = memory + WARPS * SLOTS * SLOT_BYTES;  // [ROWS, ROW_STRIDE]
    int lane = threadIdx.x % 32, warp = blockIdx.x * WARPS + threadIdx.x / 32;
    int first = OUTPUTS * warp / ALL_WARPS, count = OUTPUTS * (warp + 1) / ALL_WARPS - first;
    Ring<SLOT_BYTES> ring(memory, barriers);
    auto fetch = [&](int piece) {
        if (piece >= PIECES) return;
        if (lane == 0) ring.expect(piece, count * PIECE_BYTES);
        __syncwarp();
        if (lane < count)
            ring.copy(piece, call.weight + u64(first + lane) * DEPTH + piece * PIECE, PIECE_BYTES, lane * WEIGHT_STRIDE);
    };
    fetch(0);
    await_previous();
    // Warp r brings row r into shared memory, normalised; zeros for padding. Its loads would wait behind further pieces.
    int own_row = threadIdx.x / 32;
    bool is_row = own_row < call.num_rows;
    long long slot = is_row;
    if (is_row && call.slots != nullptr) slot = own_row < call.num_slots ? call.slots[own_row] : 0;
    Row<DEPTH / 256> row = {}, norm;
    if (is_row) row.load(call.states + own_row * DEPTH), norm.load(call.norm);
    for (int piece = 1; piece < SLOTS; ++piece) {  // the copy engine serves all warps' first pieces first
        __syncthreads();
        fetch(piece);
    }
    if (own_row < ROWS) {
        if (is_row) row.normalise(norm, call.epsilon);
        if (slot == 0) row = {};
        row.store(reinterpret_cast<bf16 *>(rows + own_row * ROW_STRIDE));
    }
    __syncthreads();
    // A lane has 8 elements of every 32, of a row and of a row of the weight: which ones does not matter to the sum.
    u32 own = u32(__cvta_generic_to_shared(rows)) + lane / 4 * ROW_STRIDE + lane % 4 * 16;
    float sums[2][4] = {};
    for (int piece = 0; piece < PIECES; ++piece) {
        u32 weights = ring.wait(piece) + lane / 4 * WEIGHT_STRIDE + lane % 4 * 16;
#pragma unroll 8
        for (int at = 0; at < PIECE_BYTES; at += 64) {
            uint4 input = load_shared(own + piece * PIECE_BYTES + at), weight = load_shared(weights + at);
            add_product(sums[0], input.x, input.y, weight.x, weight.y);
            add_product(sums[1], input.z, input.w, weight.z, weight.w);
        }
        __syncwarp();
        fetch(piece + SLOTS);
    }
    prefetch(call.next, call.next_bytes);
    int result = lane / 4;
#pragma unroll
    for (int of = 0; of < 2; ++of) {
        int place = lane % 4 * 2 + of;
        if (result < call.num_rows && place < count)
            call.output[result * OUTPUTS + first + place] = narrow(sums[0][of] + sums[1][of]);
    }
}
