// Products of up to 8 rows. A block has a tile at a time; its warps divide the depth, chunk by chunk, and add up in shared
// memory. A warp's loads go on into the block's next tile:
//
//     weights ──> registers ──> numbers ──┐
//     rows ──> shared memory ─────────────┴─> sums of a run ──(scales)──> sums ──(warps)──> outputs
//
// Numbers are exact; scales multiply the sums, in float32.

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int AHEAD = 8 / VECTORS;  // chunks of a warp on their way

__device__ inline void multiply(float (&sums)[4], const u32 (&one)[4], u32 first, u32 second) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(one[0]), "r"(one[1]), "r"(one[2]), "r"(one[3]), "r"(first), "r"(second));
}

struct Sums {
    float of[4] = {};

    // Add a chunk's products; `place` is the lane's, of its row's inputs.
    __device__ void add(const Packed &packed, u32 place) {
        u32 inputs[2][4];  // operand B of two steps each
#pragma unroll
        for (int half = 0; half < 2; ++half)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(inputs[half][0]), "=r"(inputs[half][1]), "=r"(inputs[half][2]), "=r"(inputs[half][3])
                         : "r"(place + 64 * half));
#pragma unroll
        for (int run = 0; run < at_least(RUNS, 1); ++run) {
            float products[4] = {}, totals[4] = {};
#pragma unroll
            for (int step = run * STEPS_OF_RUN; step < (run + 1) * STEPS_OF_RUN; ++step) {
                u32 numbers[4], first = inputs[step / 2][step % 2 * 2], second = inputs[step / 2][step % 2 * 2 + 1];
                packed.numbers(step, numbers);
                multiply(RUNS == 0 ? of : products, numbers, first, second);
                if constexpr (SHIFTS != NONE) multiply(totals, {ONES, ONES, ONES, ONES}, first, second);
            }
            if constexpr (RUNS > 0)
#pragma unroll
                for (int at = 0; at < 4; ++at) {
                    float scale = packed.scales(run, at / 2);
                    if constexpr (SHIFTS == SUBTRACTED) products[at] = fmaf(-packed.shifts(run, at / 2), totals[at], products[at]);
                    of[at] = fmaf(scale, products[at], of[at]);
                    if constexpr (SHIFTS == ADDED) of[at] = fmaf(packed.shifts(run, at / 2), totals[at], of[at]);
                }
        }
    }
};

extern "C" __global__ __launch_bounds__(THREADS) void few_packed_rows(const Call call) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ float parts[2][WARPS][8][TILE];
    const Weights &weights = call.weights;
    const u32 shared = u32(__cvta_generic_to_shared(memory));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = weights.chunks;
    const int panel = call.panel, stride = 2 * panel + 16;  // bytes of a row, without conflicts
    const int num_tiles = up(weights.outputs, TILE), turns = up(up(chunks, WARPS), AHEAD) * AHEAD;  // of a warp in a tile

    // The warp's next loads: turns of a tile, whose places are kept.
    int next_tile = blockIdx.x, next_turn = 0;
    Places places(weights, next_tile);
    Packed ahead[AHEAD];
    auto load = [&](int at) {
        int chunk = (next_turn + at) * WARPS + warp;
        places.load(ahead[at], chunk, chunk < chunks && next_tile < num_tiles);
    };
    auto advance = [&] {
        next_turn += AHEAD;
        if (next_turn == turns) next_turn = 0, next_tile += gridDim.x, places = Places(weights, next_tile);
    };
#pragma unroll
    for (int at = 0; at < AHEAD; ++at) load(at);
    advance();
    follow();

    auto copy = [&](int start) {
        for (int row = 0; row < call.rows; ++row)
            for (int at = threadIdx.x * 8; at < panel; at += THREADS * 8) {
                bool is_there = start + at < weights.width;
                const bf16 *from = call.states + (is_there ? size_t(row) * weights.width + start + at : 0);
                copy16(shared + row * stride + at * 2, from, is_there);
            }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
    };
    const bool is_whole = panel >= weights.width;
    const u32 place = shared + at_most(lane % 8, call.rows - 1) * stride + lane / 8 * 16;  // rows behind are not stored
    if (is_whole) copy(0);
    int number = 0;  // of the tile in the block
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, ++number) {
        Sums sums;
        for (int turn = 0, start = 0; turn < turns; turn += AHEAD) {
            if (!is_whole && turn * WARPS * CHUNK % panel == 0) {
                start = turn * WARPS * CHUNK;
                __syncthreads();
                copy(start);
            }
#pragma unroll
            for (int at = 0; at < AHEAD; ++at) {
                sums.add(ahead[at], place + (((turn + at) * WARPS + warp) * CHUNK - start) * 2);
                load(at);
            }
            advance();
        }
        auto &own = parts[number % 2];
#pragma unroll
        for (int at = 0; at < 4; ++at) own[warp][lane % 4 * 2 + at % 2][lane / 4 + at / 2 * 8] = sums.of[at];
        __syncthreads();
        for (int at = threadIdx.x; at < call.rows * TILE; at += THREADS) {
            float sum = 0;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) sum += own[other][at / TILE][at % TILE];
            call.store(at / TILE, tile * TILE + at % TILE, sum);
        }
    }
}
