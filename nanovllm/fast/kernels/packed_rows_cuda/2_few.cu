// Products of up to 8 rows. A block has a tile; its warps divide the depth, chunk by chunk, and add up in shared memory:
//
//     weights ──> registers ──> numbers ──┐
//     rows ──> shared memory ─────────────┴─> sums of a run ──(scales)──> sums ──(warps)──> outputs
//
// Numbers are exact in bfloat16; scales multiply the sums, in float32.

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int AHEAD = 4 / VECTORS;  // chunks of a warp on their way

__device__ inline void multiply(float (&sums)[4], const u32 (&one)[4], u32 first, u32 second) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
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
    const Weights &weights = call.weights;
    const u32 shared = u32(__cvta_generic_to_shared(memory));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = weights.chunks;
    const int panel = call.panel, stride = 2 * panel + 16;  // bytes of a row, without conflicts

    const Places places(weights, blockIdx.x);
    Packed ahead[AHEAD];
#pragma unroll
    for (int at = 0; at < AHEAD; ++at) places.load(ahead[at], warp + at * WARPS, warp + at * WARPS < chunks);
    follow();

    Sums sums;
    const u32 place = shared + at_most(lane % 8, call.rows - 1) * stride + lane / 8 * 16;  // rows behind are not stored
    for (int start = 0; start < weights.width; start += panel) {
        __syncthreads();
        for (int row = 0; row < call.rows; ++row)
            for (int at = threadIdx.x * 8; at < panel; at += THREADS * 8) {
                bool is_there = start + at < weights.width;
                const bf16 *from = call.states + (is_there ? size_t(row) * weights.width + start + at : 0);
                copy16(shared + row * stride + at * 2, from, is_there);
            }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        int last = at_most((start + panel) / CHUNK, chunks);
        for (int chunk = start / CHUNK + warp; chunk < last; chunk += WARPS * AHEAD)
#pragma unroll
            for (int at = 0; at < AHEAD; ++at) {
                int number = chunk + at * WARPS;
                sums.add(ahead[at], place + (number * CHUNK - start) * 2);
                places.load(ahead[at], number + AHEAD * WARPS, number + AHEAD * WARPS < chunks);
            }
    }
    __syncthreads();

    float *parts = reinterpret_cast<float *>(memory);  // [WARPS, 8 rows, TILE]
#pragma unroll
    for (int at = 0; at < 4; ++at)
        parts[(warp * 8 + lane % 4 * 2 + at % 2) * TILE + lane / 4 + at / 2 * 8] = sums.of[at];
    __syncthreads();
    for (int at = threadIdx.x; at < call.rows * TILE; at += THREADS) {
        float sum = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) sum += parts[other * 8 * TILE + at];
        call.store(at / TILE, blockIdx.x * TILE + at % TILE, sum);
    }
}
