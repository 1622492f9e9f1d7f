// Products of up to 8 rows. A block has a tile at a time; its warps divide the depth, chunk by chunk, and add up in shared
// memory. A warp's loads go on into the block's next tile:
//
//     weights ──> registers ──> numbers ──────────┐
//     rows ──> shared memory ──(norm or none)─────┴─> sums of a run ──(scales)──> sums ──(warps)──> outputs
//
// Numbers are exact; scales multiply the sums, in float32. The rest of a layer that a launch of its own would cost more
// than: an RMS norm before, a gate or a residual sum behind.
//
// Set by the caller: PANEL (inputs by which shared memory is divided).

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int FACTORS = RUNS == 0 ? 0 : SHIFTS == NONE ? 1 : 2;              // kinds of a chunk's factors
constexpr int LANE_BYTES = FACTORS * FACTOR_BYTES, CHUNK_BYTES = 32 * (16 * VECTORS + LANE_BYTES);
constexpr int PAIR = 2;  // chunks that a warp takes at once
constexpr bool IS_LONG = RUN > 0 && RUN % (PAIR * CHUNK) == 0;  // a pair lies in one run

template <int BYTES> __device__ inline void copy(u32 to, const void *from) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
}

// A warp's next chunks of weights, in shared memory; each lane copies and reads what it multiplies.
struct Ahead {
    unsigned char *slots;  // the lane's place for vectors in the first
    u32 address;
    int lane, slot = 0;

    __device__ Ahead(unsigned char *memory) : lane(threadIdx.x % 32) {
        slots = memory + threadIdx.x / 32 * (SLOTS * PAIR * CHUNK_BYTES) + lane * 16;
        address = u32(__cvta_generic_to_shared(slots));
    }
    // Place of a lane's factors within a slot, from its vectors.
    __device__ int of_factors() const { return 512 * VECTORS + lane * (LANE_BYTES - 16); }
    __device__ void fetch(const Places &places, int chunk, int of_pair) const {
        const u32 to = address + (slot * PAIR + of_pair) * CHUNK_BYTES;
#pragma unroll
        for (int at = 0; at < VECTORS; ++at) copy<16>(to + 512 * at, places.codes + chunk * (VECTORS * 32) + 32 * at);
        if (RUNS > 0 && !(IS_LONG && of_pair)) {
            constexpr int PIECE = at_most(FACTOR_BYTES, 16);
            const int place = (RUN <= CHUNK ? chunk : chunk / at_least(RUN / CHUNK, 1)) * (8 * FACTOR_BYTES);
#pragma unroll
            for (int at = 0; at < FACTOR_BYTES; at += PIECE) {
                copy<PIECE>(to + of_factors() + at, places.scales + place + at);
                if constexpr (SHIFTS != NONE) copy<PIECE>(to + of_factors() + FACTOR_BYTES + at, places.shifts + place + at);
            }
        }
    }
    __device__ static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    // Wait for the oldest pair: for all but the SLOTS - 1 latest groups.
    __device__ static void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 1) : "memory"); }
    __device__ void take(Packed &packed, int of_pair) const {
        const unsigned char *from = slots + (slot * PAIR + of_pair) * CHUNK_BYTES;
#pragma unroll
        for (int at = 0; at < VECTORS; ++at) packed.vectors[at] = *reinterpret_cast<const uint4 *>(from + 512 * at);
        if constexpr (RUNS > 0)
#pragma unroll
            for (int at = 0; at < FACTOR_WORDS; ++at) {
                const u32 *words = reinterpret_cast<const u32 *>(from + of_factors() - (IS_LONG ? of_pair * CHUNK_BYTES : 0));
                packed.scales.words[at] = words[at];
                if constexpr (SHIFTS != NONE) packed.shifts.words[at] = words[FACTOR_WORDS + at];
            }
    }
    __device__ void turn() { slot = slot == SLOTS - 1 ? 0 : slot + 1; }
};

__device__ inline void multiply(float (&sums)[4], const u32 (&one)[4], u32 first, u32 second) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(one[0]), "r"(one[1]), "r"(one[2]), "r"(one[3]), "r"(first), "r"(second));
}

struct Sums {
    float of[4] = {}, products[4], totals[4];  // the last two of a run

    // Add a chunk's products; `place` is the lane's, of its row's inputs. A long run begins and ends with these chunks.
    __device__ void add(const Packed &packed, u32 place, bool begins, bool ends) {
        u32 inputs[2][4];  // operand B of two steps each
#pragma unroll
        for (int half = 0; half < 2; ++half)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(inputs[half][0]), "=r"(inputs[half][1]), "=r"(inputs[half][2]), "=r"(inputs[half][3])
                         : "r"(place + 64 * half));
#pragma unroll
        for (int run = 0; run < at_least(RUNS, 1); ++run) {
            if (begins)
#pragma unroll
                for (int at = 0; at < 4; ++at) products[at] = totals[at] = 0.f;
#pragma unroll
            for (int step = run * STEPS_OF_RUN; step < (run + 1) * STEPS_OF_RUN; ++step) {
                u32 numbers[4], first = inputs[step / 2][step % 2 * 2], second = inputs[step / 2][step % 2 * 2 + 1];
                packed.numbers(step, numbers);
                multiply(RUNS == 0 ? of : products, numbers, first, second);
                if constexpr (SHIFTS != NONE) multiply(totals, {ONES, ONES, ONES, ONES}, first, second);
            }
            if (RUNS > 0 && ends)
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

// The RMS norm of rows in shared memory, in their place.
__device__ inline void normalise(unsigned char *memory, int rows, int stride, int width, const bf16 *norm, float epsilon) {
    __shared__ float squares[WARPS][8];
    const uint4 *weight = reinterpret_cast<const uint4 *>(norm);  // in shared memory it would cost a block of three
    const int pieces = width / 8;  // of 16 bytes
    auto piece = [&](int row, int at) -> uint4 & { return reinterpret_cast<uint4 *>(memory + row * stride)[at]; };
    for (int row = 0; row < rows; ++row) {
        float sum = 0;
        for (int at = threadIdx.x; at < pieces; at += THREADS) {
            const uint4 own = piece(row, at);
            for (u32 pair : {own.x, own.y, own.z, own.w})
                sum = fmaf(first_of(pair), first_of(pair), fmaf(second_of(pair), second_of(pair), sum));
        }
        for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32][row] = sum;
    }
    __syncthreads();
    for (int row = 0; row < rows; ++row) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += squares[warp][row];
        const float factor = rsqrtf(sum / width + epsilon);
        for (int at = threadIdx.x; at < pieces; at += THREADS) {
            const uint4 own = piece(row, at), scale = weight[at];
            auto scaled = [&](u32 pair, u32 by) {
                return pair_of(first_of(pair) * factor * first_of(by), second_of(pair) * factor * second_of(by));
            };
            piece(row, at) = {scaled(own.x, scale.x), scaled(own.y, scale.y), scaled(own.z, scale.z), scaled(own.w, scale.w)};
        }
    }
    __syncthreads();
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void few_packed_rows(const Call call) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ float parts[2][WARPS][8][TILE];
    const Weights &weights = call.weights;
    unsigned char *inputs = memory + WARPS * SLOTS * PAIR * CHUNK_BYTES;
    const u32 shared = u32(__cvta_generic_to_shared(inputs));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = weights.chunks;
    const int whole = up(weights.width, PANEL) * PANEL;
    const int turns = up(chunks, PAIR * WARPS);    // of a warp in a tile
    const int num_parts = call.gated ? 2 : 1;      // tiles that a block multiplies for its outputs
    const int num_units = up(weights.outputs, TILE) / num_parts;

    // The warp's next copies: turns of a tile, whose places are kept.
    int next_unit = blockIdx.x, next_part = 0, next_chunk = PAIR * warp;
    Places places(weights, next_unit);
    Ahead ahead(memory);
    auto fetch = [&] {
        if (next_unit < num_units)
#pragma unroll
            for (int at = 0; at < PAIR; ++at)
                if (next_chunk + at < chunks) ahead.fetch(places, next_chunk + at, at);
        Ahead::commit();
        ahead.turn();
        next_chunk += PAIR * WARPS;
        if (next_chunk < turns * (PAIR * WARPS)) return;
        next_chunk = PAIR * warp;
        if (++next_part == num_parts) next_part = 0, next_unit += gridDim.x;
        places = Places(weights, next_unit + next_part * num_units);
    };
#pragma unroll 1
    for (int at = 0; at < SLOTS; ++at) fetch();
    follow();

    int rows = call.rows;
    if (call.slots) {
        u32 used = __ballot_sync(~0u, lane < rows && call.slots[at_most(lane, rows - 1)] != 0);
        rows = at_least(32 - __clz(used), 1);
    }
    const int panel = rows * (2 * whole + 16) <= call.bytes ? whole : (call.bytes / rows - 16) / (2 * PANEL) * PANEL;
    const int stride = 2 * panel + 16;  // bytes of a row, without conflicts
    auto copy_rows = [&](int start) {
        for (int row = 0; row < rows; ++row)
            for (int at = threadIdx.x * 8; at < panel; at += THREADS * 8) {
                const bool is_there = start + at < weights.width;
                const bf16 *from = call.states + size_t(row) * weights.width + (is_there ? start + at : 0);
                copy16(shared + row * stride + at * 2, from, is_there);
            }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
    };
    const u32 place = shared + at_most(lane % 8, rows - 1) * stride + lane / 8 * 16;  // rows behind are not stored
    if (panel == whole) copy_rows(0);
    if (call.norm) normalise(inputs, rows, stride, weights.width, call.norm, call.epsilon);
    int number = 0;  // of the tile in the block
    const int row = threadIdx.x / TILE;
    for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        float gate = 0, residual = 0;
        const size_t to = size_t(row) * (weights.outputs / num_parts) + unit * TILE + threadIdx.x % TILE;
        if (call.residual && row < rows && unit * TILE + threadIdx.x % TILE < weights.outputs)
            residual = first_of(call.residual[to]);  // its way overlaps the products
        for (int part = 0; part < num_parts; ++part, ++number) {
            Sums sums;
            for (int turn = 0, start = 0; turn < turns; ++turn) {
                const int chunk = turn * (PAIR * WARPS) + PAIR * warp;
                if (panel != whole && turn * (PAIR * WARPS * CHUNK) % panel == 0) {
                    start = turn * (PAIR * WARPS * CHUNK);
                    __syncthreads();
                    copy_rows(start);
                }
                Packed packed[PAIR];
                Ahead::wait();
#pragma unroll
                for (int at = 0; at < PAIR; ++at) ahead.take(packed[at], at);
                fetch();
#pragma unroll
                for (int at = 0; at < PAIR; ++at)
                    if (chunk + at < chunks)
                        sums.add(packed[at], place + ((chunk + at) * CHUNK - start) * 2, !IS_LONG || at == 0, !IS_LONG || at == PAIR - 1);
            }
            auto &own = parts[number % 2];
#pragma unroll
            for (int at = 0; at < 4; ++at) own[warp][lane % 4 * 2 + at % 2][lane / 4 + at / 2 * 8] = sums.of[at];
            __syncthreads();
            const int output = (unit + part * num_units) * TILE + threadIdx.x % TILE;
            if (row >= call.rows || output >= weights.outputs) continue;
            float sum = 0;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) sum += own[other][row][threadIdx.x % TILE];
            sum = call.rounded(output, sum);
            if (part < num_parts - 1) {
                gate = sum;
                continue;
            }
            if (call.gated) sum = gate / (1.f + __expf(-gate)) * sum;
            call.output[to] = row < rows ? bf16(pair_of(sum + residual, 0.f)) : bf16(0);
        }
    }
}
