// Products of up to ROWS rows by Hopper's tensor cores, which read inputs from shared memory and weights from registers:
//
//     weights ──> registers ──(scales)──> numbers ──┐
//     rows ──(copies, steps ahead)──> shared memory ──┴─> sums ──(warpgroups, blocks of a cluster)──> outputs
//
// A block has GROUPS * 64 outputs. PARTS warpgroups of each divide the depth, step by step, as do blocks of a cluster.
// Warps that share inputs may be some steps apart, so that some widen weights while others multiply.
//
// Set by the caller: ROWS (32, 64 or 128), GROUPS, PARTS, SLOTS (steps of inputs in shared memory, 3 or 4).

constexpr int THREADS = 128 * GROUPS * PARTS, OUTPUTS = 64 * GROUPS;
constexpr int WIDE = at_most(ROWS, 64), PIECES = ROWS / WIDE;  // rows of an instruction, instructions
constexpr int CHUNKS = ROWS <= 64 ? 2 : 1;  // of a step
constexpr int CHUNK_BYTES = ROWS * CHUNK * 2, SLOT_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int AHEAD = ROWS <= 64 ? 1 : 2;  // steps of a warp on their way
constexpr int BARRIERS = PARTS * SLOTS * SLOT_BYTES;  // place in shared memory

__device__ inline void multiply(float (&sums)[16], const u32 (&left)[4], u64 right) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}
__device__ inline void multiply(float (&sums)[32], const u32 (&left)[4], u64 right) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
          "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]),
          "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}

// Rows of 128 bytes whose pieces of 16 are exchanged by the row's number, eight rows a pattern.
__device__ inline u64 operand(u32 address) {
    return u64((address & 0x3ffff) >> 4) | 1ull << 16 | u64(8 * 128 >> 4) << 32 | 1ull << 62;
}
__device__ inline void init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void arrive_with_copies(u32 barrier) {  // when this thread's copies so far are there
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline u32 rank_of_block() {
    u32 value;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
    return value;
}
__device__ inline u32 blocks_of_cluster() {
    u32 value;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
    return value;
}
__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline float read_of(u32 block, u32 at) {
    u32 there;
    float value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there));
    return value;
}

extern "C" __global__ __launch_bounds__(THREADS) void more_packed_rows(const Call call) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Weights &weights = call.weights;
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128 % GROUPS, part = threadIdx.x / (128 * GROUPS);
    const int of_part = threadIdx.x % (128 * GROUPS);
    const u32 blocks = blocks_of_cluster(), rank = rank_of_block();
    const int stride = PARTS * blocks * CHUNKS, begin = (rank * PARTS + part) * CHUNKS, chunks = weights.chunks;
    const int first_output = blockIdx.x / blocks * OUTPUTS;
    const int tile = (first_output + group * 64) / TILE + threadIdx.x % 128 / 32;
    const u32 shared = u32(__cvta_generic_to_shared(memory)), slots = shared + part * SLOTS * SLOT_BYTES;

    const Places places(weights, at_most(tile, up(weights.outputs, TILE) - 1));  // one that is not there is not stored
    Packed ahead[AHEAD][CHUNKS];
    auto load = [&](Packed(&packed)[CHUNKS], int chunk) {
#pragma unroll
        for (int at = 0; at < CHUNKS; ++at) places.load(packed[at], chunk + at, chunk + at < chunks);
    };
#pragma unroll
    for (int at = 0; at < AHEAD; ++at) load(ahead[at], begin + at * stride);
    const u32 full = shared + BARRIERS + part * 16 * SLOTS, empty = full + 8 * SLOTS;  // of slot 0
    if (of_part == 0)
        for (int at = 0; at < SLOTS; ++at) init(full + 8 * at, 128 * GROUPS), init(empty + 8 * at, 4 * GROUPS);
    __syncthreads();
    follow();

    // Copies of the step `number`, whose slot held a step SLOTS before.
    auto copy = [&](int number) {
        int chunk = begin + number * stride, slot = number % SLOTS;
        if (chunk >= chunks) return;
        if (number >= SLOTS) await(empty + 8 * slot, number / SLOTS - 1 & 1);
#pragma unroll
        for (int at = of_part; at < ROWS * 8 * CHUNKS; at += 128 * GROUPS) {
            int row = at / 8 % ROWS, piece = at % 8, input = (chunk + at / 8 / ROWS) * CHUNK + piece * 8;
            bool is_there = row < call.rows && input < weights.width;
            const bf16 *from = call.states + (is_there ? size_t(row) * weights.width + input : 0);
            copy16(slots + slot * SLOT_BYTES + at / 8 * 128 + (piece ^ row % 8) * 16, from, is_there);
        }
        arrive_with_copies(full + 8 * slot);
    };
    float sums[PIECES][WIDE / 2] = {};
    for (int at = 0; at < AHEAD; ++at) copy(at);
    int number = 0;
    for (int start = begin; start < chunks; start += AHEAD * stride)
#pragma unroll
        for (int at = 0; at < AHEAD; ++at, ++number) {
            int chunk = start + at * stride, slot = number % SLOTS;
            if (chunk >= chunks) break;
            copy(number + AHEAD);
            u32 left[CHUNKS][STEPS][4];
#pragma unroll
            for (int place = 0; place < STEPS; ++place) widen<false>(ahead[at][0], place, left[0][place]);
            await(full + 8 * slot, number / SLOTS & 1);
            __syncwarp();
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll
            for (int of_step = 0; of_step < CHUNKS; ++of_step) {
#pragma unroll
                for (int place = 0; place < STEPS && of_step > 0; ++place)
                    widen<false>(ahead[at][of_step], place, left[of_step][place]);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                u64 right = operand(slots + slot * SLOT_BYTES + of_step * CHUNK_BYTES);
#pragma unroll
                for (int place = 0; place < STEPS; ++place)
#pragma unroll
                    for (int piece = 0; piece < PIECES; ++piece)
                        multiply(sums[piece], left[of_step][place], right + 2 * place + piece * (WIDE * 128 >> 4));
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            }
            load(ahead[at], chunk + AHEAD * stride);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
                for (int place = 0; place < WIDE / 2; ++place) asm volatile("" : "+f"(sums[piece][place])::"memory");
            if (lane == 0) arrive(empty + 8 * slot);
        }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    float *totals = reinterpret_cast<float *>(memory);  // [PARTS, ROWS, OUTPUTS]
#pragma unroll
    for (int at = 0; at < ROWS / 2; ++at) {
        int row = at / 4 * 8 + lane % 4 * 2 + at % 2;
        int output = of_part / 32 * TILE + lane / 4 + at % 4 / 2 * 8;
        totals[(part * ROWS + row) * OUTPUTS + output] = sums[at / (WIDE / 2)][at % (WIDE / 2)];
    }
    if (blocks > 1)
        meet_cluster();
    else
        __syncthreads();
    for (int at = rank * THREADS + threadIdx.x; at < call.rows * OUTPUTS; at += blocks * THREADS) {
        float sum = 0;
        for (int other = 0; other < blocks; ++other)
#pragma unroll
            for (int number = 0; number < PARTS; ++number)
                sum += read_of(other, shared + (number * ROWS * OUTPUTS + at) * 4);
        call.store(at / OUTPUTS, first_output + at % OUTPUTS, sum);
    }
    if (blocks > 1) meet_cluster();
}
