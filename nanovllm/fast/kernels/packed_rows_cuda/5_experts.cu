// Products of routed experts. A block has some tiles of the experts that rows have chosen, one expert after another:
//
//     ids ──> passes of each expert, of up to `most` rows ──> the block's tiles
//     weights ──(copy engine)──> a warp's ring ──> registers ──> numbers ──┐
//     rows of a pass ──> shared memory ────────────────────────────────────┴─> sums ──(warps of a team)──(gate)──> pairs
//
// A team of SPLIT warps has a tile at a time and divides its depth; its copies go on into the next tile, of the next expert
// too. A weight is widened once for up to 8 * GROUPS rows, and read once where an expert has no more. Experts without rows
// are not read. Numbers are exact; scales multiply the sums of their runs, in float32.
//
// With GATED a tile is 8 outputs of the gate and the 8 that they multiply, and its results are 8.
//
// Set by the caller: WARPS, BLOCKS (of a multiprocessor), SPLIT, GROUPS, SLOTS (of a ring), CHUNKS (of a slot), GATED,
// MAX_PAIRS, MAX_EXPERTS.

constexpr int THREADS = 32 * WARPS, TEAMS = WARPS / SPLIT, TEAM = 32 * SPLIT;
constexpr int PARTS_STRIDE = TILE + 4;  // floats, without conflicts
// 4-bit floats are multiplied as 2^-126 of theirs, and inputs as 2^63 of theirs, so that neither leaves its range.
constexpr bool IS_WHOLE = KIND != FLOAT4;
constexpr float UNIT = IS_WHOLE ? 1.f : IS_HALF ? 16384.f : 9223372036854775808.f;  // of the sums: 2^14 or 2^63
constexpr int CODE_BYTES = VECTORS * 512, GROUP_BYTES = 8 * FACTOR_BYTES;  // of a chunk, of a tile's runs in a group
constexpr int SCALES_AT = CHUNKS * CODE_BYTES, SHIFTS_AT = SCALES_AT + CHUNKS * GROUP_BYTES;
constexpr int SLOT_BYTES = SHIFTS_AT + (SHIFTS != NONE ? CHUNKS * GROUP_BYTES : 0);
static_assert(SPLIT == 1 || GROUPS == 1);

struct ExpertsCall {
    Weights weights;         // of all experts one behind another; outputs and width are one's
    const bf16 *states;      // [rows, width] of NUMBER where `gathers`, else [pairs, width]
    const bf16 *bias;        // [experts, outputs] of NUMBER, or null
    bf16 *output;            // [pairs, outputs], with GATED half of them
    const long long *ids;    // [pairs], experts; `top_k` for each row
    const long long *slots;  // [num_slots], 0 for rows of padding, as are further rows; null without any
    int experts, pairs, top_k, num_slots, gathers;
    int most;                  // rows in shared memory at once
    float alpha, limit, plus;  // of the gate
};

__device__ inline void multiply(float (&sums)[4], const u32 (&one)[4], u32 first, u32 second) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(one[0]), "r"(one[1]), "r"(one[2]), "r"(one[3]), "r"(first), "r"(second));
}
__device__ inline void load_inputs(u32 (&inputs)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(inputs[0]), "=r"(inputs[1]), "=r"(inputs[2]), "=r"(inputs[3])
                 : "r"(address));
}
// Of the kernels before this one, all but the last are done when it begins; `wait` is for that one.
__device__ inline void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline long long load_now(const long long *from) { return *(const volatile long long *)from; }
__device__ inline void init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ inline void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void copy_whole(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ inline void meet_team(int team) { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM) : "memory"); }

// The passes of all experts, in shared memory.
struct Routes {
    int first[MAX_EXPERTS + 1];  // pass of each expert
    unsigned short of_pair[MAX_PAIRS];  // expert, or `experts` for pairs of padding
    int pairs[8 * GROUPS];  // of the rows in shared memory
    int found[WARPS];

    __device__ void read(const ExpertsCall &call) {
        for (int at = threadIdx.x; at <= call.experts; at += THREADS) first[at] = 0;
        __syncthreads();
        for (int pair = threadIdx.x; pair < call.pairs; pair += THREADS) {
            int row = pair / call.top_k;
            long long id = load_now(call.ids + pair);
            bool is_real = !call.slots || (row < call.num_slots && load_now(call.slots + row) != 0);
            int expert = is_real && id >= 0 && id < call.experts ? int(id) : call.experts;
            of_pair[pair] = expert;
            if (expert < call.experts) atomicAdd(first + expert + 1, 1);  // rows, for now
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            int before = 0, lane = threadIdx.x;
#pragma unroll 1
            for (int start = 0; start < call.experts; start += 32) {
                int at = start + lane, passes = at < call.experts ? up(first[at + 1], call.most) : 0;
#pragma unroll
                for (int by = 1; by < 32; by *= 2) {
                    int other = __shfl_up_sync(~0u, passes, by);
                    if (lane >= by) passes += other;
                }
                if (at < call.experts) first[at + 1] = before + passes;
                before += __shfl_sync(~0u, passes, 31);
            }
        }
        __syncthreads();
    }
    // The expert of a pass, which is the same for all lanes.
    __device__ int expert_of(int pass, int experts) const {
        int expert = 0;
#pragma unroll 1
        for (int start = 0; start < experts; start += 32) {
            int at = start + threadIdx.x % 32;
            expert += __popc(__ballot_sync(~0u, at < experts && first[at + 1] <= pass));
        }
        return expert;
    }
    // Lists an expert's pairs from its number `skipped` on, up to `most`, in their order; returns how many.
    __device__ int list(const ExpertsCall &call, int expert, int skipped) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, per = up(call.pairs, THREADS) * 32;
        auto mine = [&](int at) { return at < call.pairs && of_pair[at] == expert; };
        int count = 0;
#pragma unroll 1
        for (int start = warp * per; start < (warp + 1) * per; start += 32)
            count += __popc(__ballot_sync(~0u, mine(start + lane)));
        if (lane == 0) found[warp] = count;
        __syncthreads();
        int place = -skipped, total = -skipped;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) {
            if (other < warp) place += found[other];
            total += found[other];
        }
#pragma unroll 1
        for (int start = warp * per; start < (warp + 1) * per; start += 32) {
            bool is_mine = mine(start + lane);
            u32 all = __ballot_sync(~0u, is_mine);
            int at = place + __popc(all & (1u << lane) - 1);
            if (is_mine && at >= 0 && at < call.most) pairs[at] = start + lane;
            place += __popc(all);
        }
        __syncthreads();
        return at_most(total, call.most);
    }
};

// Sums of a tile for some groups of 8 rows.
template <int COUNT> struct Sums {
    float of[COUNT][4] = {};

    // Add a chunk's products; `places` are the lane's, of its row of each group, and `at` the chunk's bytes before it.
    __device__ void add(const Packed &packed, const u32 (&places)[COUNT], u32 at) {
        u32 inputs[COUNT][4];  // operand B of two steps
#pragma unroll
        for (int run = 0; run < at_least(RUNS, 1); ++run) {
            float products[COUNT][4] = {}, totals[COUNT][4] = {};
#pragma unroll
            for (int step = run * STEPS_OF_RUN; step < (run + 1) * STEPS_OF_RUN; ++step) {
                if (step % 2 == 0)
#pragma unroll
                    for (int group = 0; group < COUNT; ++group) load_inputs(inputs[group], places[group] + at + 32 * step);
                u32 numbers[4];
                packed.numbers<IS_WHOLE>(step, numbers);
#pragma unroll
                for (int group = 0; group < COUNT; ++group) {
                    u32 first = inputs[group][step % 2 * 2], second = inputs[group][step % 2 * 2 + 1];
                    multiply(RUNS == 0 ? of[group] : products[group], numbers, first, second);
                    if constexpr (SHIFTS != NONE) multiply(totals[group], {ONES, ONES, ONES, ONES}, first, second);
                }
            }
            if constexpr (RUNS > 0)
#pragma unroll
                for (int at = 0; at < 4; ++at) {
                    float scale = packed.scales(run, at / 2);
#pragma unroll
                    for (int group = 0; group < COUNT; ++group) {
                        float product = products[group][at], total = totals[group][at], &sum = of[group][at];
                        if constexpr (SHIFTS == SUBTRACTED) product = fmaf(-packed.shifts(run, at / 2), total, product);
                        sum = fmaf(scale, product, sum);
                        if constexpr (SHIFTS == ADDED) sum = fmaf(packed.shifts(run, at / 2), total, sum);
                    }
                }
        }
    }
};

// What the sums of two outputs of a tile, `place` and `place` + 8, become.
struct Results {
    const ExpertsCall &call;
    int tile, place;
    float units[2] = {UNIT, UNIT}, biases[2] = {0.f, 0.f};

    __device__ Results(const ExpertsCall &call, int expert, int tile, int place) : call(call), tile(tile), place(place) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            size_t output = size_t(expert) * call.weights.outputs + tile * TILE + place + 8 * half;
            if (call.weights.units) units[half] *= call.weights.units[output];
            if (call.bias) biases[half] = first_of(call.bias[output]);
        }
    }
    __device__ void store(int pair, float first, float second) const {
        first = fmaf(first, units[0], biases[0]), second = fmaf(second, units[1], biases[1]);
        if constexpr (GATED) {
            first = first > call.limit ? call.limit : first;  // what is no number stays so
            second = second > call.limit ? call.limit : second < -call.limit ? -call.limit : second;
            float product = (second + call.plus) * first / (1.f + __expf(-call.alpha * first));
            call.output[size_t(pair) * (call.weights.outputs / 2) + tile * 8 + place] = bf16(pair_of(product, 0.f));
        } else {
            bf16 *to = call.output + size_t(pair) * call.weights.outputs + tile * TILE + place;
            to[0] = bf16(pair_of(first, 0.f)), to[8] = bf16(pair_of(second, 0.f));
        }
    }
};

// A warp's ring of slots in shared memory, which the copy engine fills with the chunks of its part of each tile.
struct Ring {
    const ExpertsCall &call;
    const Routes &routes;
    const int tiles, end;  // of an expert; end of the block's tiles
    int first, chunks;     // of the part
    int turns;             // of a tile
    const unsigned char *memory;
    u32 copied, full;         // the same place for the copy engine, barrier of slot 0
    int slot = 0;             // that is taken next, and filled again
    u32 parity = 0;           // of its barrier
    int unit, pass, tile;     // of the next copies
    int turns_left, left;     // turns of that tile, chunks of the part
    const unsigned char *codes, *scales, *shifts;  // of the next copies; factors of the tile

    __device__ Ring(const ExpertsCall &call, const Routes &routes, int tiles, int unit, int end, const unsigned char *all,
                    const u64 *barriers)
        : call(call), routes(routes), tiles(tiles), end(end), memory(all + threadIdx.x / 32 * (SLOTS * SLOT_BYTES)),
          copied(u32(__cvta_generic_to_shared(memory))),
          full(u32(__cvta_generic_to_shared(barriers)) + threadIdx.x / 32 * (SLOTS * 8)), unit(unit), pass(unit / tiles),
          tile(unit % tiles) {
        const int per = up(call.weights.chunks, SPLIT);
        first = threadIdx.x / 32 % SPLIT * per, chunks = at_least(at_most(per, call.weights.chunks - first), 0);
        turns = up(per, CHUNKS);
        aim();
        for (int at = 0; at < SLOTS; ++at) fill(at);
    }
    __device__ static int group_of(int chunk) { return RUN <= CHUNK ? chunk : chunk / at_least(RUN / CHUNK, 1); }
    __device__ void aim() {
        const Weights &weights = call.weights;
        turns_left = turns, left = chunks;
        if (unit >= end) return;
        size_t at = size_t(routes.expert_of(pass, call.experts)) * tiles + tile;
        codes = reinterpret_cast<const unsigned char *>(weights.codes) + (at * weights.chunks + first) * CODE_BYTES;
        scales = weights.scales + (at * weights.groups + group_of(first)) * GROUP_BYTES;
        shifts = weights.shifts + (at * weights.groups + group_of(first)) * GROUP_BYTES;
    }
    // Begin the next copies into a slot, which all lanes have read.
    __device__ void fill(int slot) {
        if (unit >= end) return;
        if (threadIdx.x % 32 == 0) {
            const int count = at_most(CHUNKS, left);
            const u32 barrier = full + slot * 8, to = copied + slot * SLOT_BYTES;
            if (count > 0) {
                const int begin = first + chunks - left, group = group_of(begin);
                const u32 of_codes = count * CODE_BYTES;
                const u32 of_groups = RUNS == 0 ? 0 : (group_of(begin + count - 1) + 1 - group) * GROUP_BYTES;
                const u32 at = RUN <= CHUNK ? 0 : (group - group_of(first)) * GROUP_BYTES;
                expect(barrier, of_codes + (SHIFTS != NONE ? 2 : 1) * of_groups);
                copy_whole(to, codes, of_codes, barrier);
                if constexpr (RUNS > 0) copy_whole(to + SCALES_AT, scales + at, of_groups, barrier);
                if constexpr (SHIFTS != NONE) copy_whole(to + SHIFTS_AT, shifts + at, of_groups, barrier);
            } else
                expect(barrier, 0);
        }
        codes += CHUNKS * CODE_BYTES;
        if constexpr (RUN <= CHUNK) scales += CHUNKS * GROUP_BYTES, shifts += CHUNKS * GROUP_BYTES;
        left -= CHUNKS;
        if (--turns_left > 0) return;
        unit += TEAMS, tile += TEAMS;
        while (tile >= tiles) tile -= tiles, ++pass;
        aim();
    }
    // A chunk of the next slot, which begins with the part's number `begin`.
    __device__ void read(Packed &packed, int begin, int at) const {
        const unsigned char *own = memory + slot * SLOT_BYTES;
        const int lane = threadIdx.x % 32, group = RUN <= CHUNK ? at : group_of(first + begin + at) - group_of(first + begin);
#pragma unroll
        for (int vector = 0; vector < VECTORS; ++vector)
            packed.vectors[vector] = *reinterpret_cast<const uint4 *>(own + at * CODE_BYTES + vector * 512 + lane * 16);
#pragma unroll
        for (int word = 0; word < FACTOR_WORDS; ++word) {
            const unsigned char *from = own + SCALES_AT + group * GROUP_BYTES + lane / 4 * FACTOR_BYTES + 4 * word;
            packed.scales.words[word] = *reinterpret_cast<const u32 *>(from);
            if constexpr (SHIFTS != NONE)
                packed.shifts.words[word] = *reinterpret_cast<const u32 *>(from + SHIFTS_AT - SCALES_AT);
        }
    }
    __device__ void wait_for_slot() const { await(full + slot * 8, parity); }
    // The slot was read, and is filled again.
    __device__ void give_slot() {
        __syncwarp();
        fill(slot);
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

struct Pass {
    int expert, number, count, last;  // last: end of the block's tiles in it
    u32 place;                        // of the lane's inputs in shared memory, of row 0
    int stride;                       // bytes of a row
};

// A team's tiles of a pass of up to 8 * COUNT rows.
template <int COUNT> __device__ __forceinline__ void multiply_tiles(
    const ExpertsCall &call, const Routes &routes, const Pass &pass, Ring &ring, int &unit, int &number,
    float (*parts)[WARPS][8][PARTS_STRIDE]
) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / SPLIT;
    u32 places[COUNT];
#pragma unroll
    for (int group = 0; group < COUNT; ++group)  // rows behind the last are not stored
        places[group] = pass.place + at_most(group * 8 + lane % 8, pass.count - 1) * pass.stride + ring.first * (CHUNK * 2);
    for (; unit < pass.last; unit += TEAMS, ++number) {
        const Results results(call, pass.expert, unit - pass.number * ring.tiles, SPLIT == 1 ? lane / 4 : lane % 8);
        Sums<COUNT> sums;
#pragma unroll 1
        for (int begin = 0; begin < ring.turns * CHUNKS; begin += CHUNKS) {
            ring.wait_for_slot();
            auto add = [&](int at) {
                Packed packed;
                ring.read(packed, begin, at);
                sums.add(packed, places, (begin + at) * (CHUNK * 2));
            };
            if (begin + CHUNKS <= ring.chunks) {
#pragma unroll
                for (int at = 0; at < CHUNKS; ++at) add(at);
            } else {
#pragma unroll 1
                for (int at = 0; begin + at < ring.chunks; ++at) add(at);
            }
            ring.give_slot();
        }
        if constexpr (SPLIT == 1) {
#pragma unroll
            for (int at = 0; at < 2 * COUNT; ++at) {
                int row = at / 2 * 8 + lane % 4 * 2 + at % 2;
                if (row < pass.count) results.store(routes.pairs[row], sums.of[at / 2][at % 2], sums.of[at / 2][at % 2 + 2]);
            }
        } else {
            auto &own = parts[number % 2];
#pragma unroll
            for (int at = 0; at < 4; ++at) own[warp][lane % 4 * 2 + at % 2][lane / 4 + at / 2 * 8] = sums.of[0][at];
            meet_team(team);
            for (int row = threadIdx.x % TEAM / 8; row < pass.count; row += TEAM / 8) {
                float first = 0, second = 0;
#pragma unroll
                for (int other = 0; other < SPLIT; ++other) {
                    first += own[team * SPLIT + other][row][lane % 8];
                    second += own[team * SPLIT + other][row][lane % 8 + 8];
                }
                results.store(routes.pairs[row], first, second);
            }
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void packed_experts(const ExpertsCall call) {
    extern __shared__ __align__(128) unsigned char memory[];  // rings, rows [most, chunks * CHUNK + 8] of NUMBER
    __shared__ Routes routes;
    __shared__ float parts[SPLIT == 1 ? 1 : 2][WARPS][8][PARTS_STRIDE];
    __shared__ u64 barriers[WARPS * SLOTS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int width = call.weights.width, padded = call.weights.chunks * CHUNK, tiles = call.weights.outputs / TILE;

    if (lane == 0) {
        for (int at = 0; at < SLOTS; ++at) init(u32(__cvta_generic_to_shared(barriers)) + (warp * SLOTS + at) * 8);
        publish_barriers();
    }
    if (call.gathers) wait();  // ids are of the kernel before; for the second product, of one before that
    routes.read(call);
    const u64 units = u64(routes.first[call.experts]) * tiles;
    const int begin = int(units * blockIdx.x / gridDim.x), end = int(units * (blockIdx.x + 1) / gridDim.x);
    int unit = begin + warp / SPLIT, number = 0;  // of the team's next tile; of those before it
    Ring ring(call, routes, tiles, unit, end, memory, barriers);
    if (!call.gathers) wait();
    let_next_begin();

    const int results = call.weights.outputs / (GATED ? 2 : 1);
    for (int pair = blockIdx.x; pair < call.pairs; pair += gridDim.x)
        if (routes.of_pair[pair] == call.experts)
            for (int at = threadIdx.x; at < results; at += THREADS) call.output[size_t(pair) * results + at] = 0;

    Pass pass;
    pass.stride = 2 * padded + 16;  // without conflicts
    unsigned char *const rows = memory + WARPS * SLOTS * SLOT_BYTES;
    pass.place = u32(__cvta_generic_to_shared(rows)) + lane / 8 * 16;
    for (pass.number = begin / tiles; pass.number * tiles < end; ++pass.number) {
        pass.expert = routes.expert_of(pass.number, call.experts);
        pass.last = at_most(end, (pass.number + 1) * tiles);
        pass.count = routes.list(call, pass.expert, (pass.number - routes.first[pass.expert]) * call.most);
        for (int row = warp; row < pass.count; row += WARPS) {
            int pair = routes.pairs[row], source = call.gathers ? pair / call.top_k : pair;
            const bf16 *from = call.states + size_t(source) * width;
#pragma unroll 4
            for (int at = lane * 8; at < padded; at += 32 * 8) {
                uint4 piece = {};
                if (at < width) piece = *reinterpret_cast<const uint4 *>(from + at);
                if constexpr (!IS_WHOLE && !IS_HALF) {
                    constexpr u32 power = 0x5f005f00u;  // 2^63
                    piece.x = fma2(piece.x, power, 0u), piece.y = fma2(piece.y, power, 0u);
                    piece.z = fma2(piece.z, power, 0u), piece.w = fma2(piece.w, power, 0u);
                }
                *reinterpret_cast<uint4 *>(rows + row * pass.stride + at * 2) = piece;
            }
        }
        __syncthreads();
        const int groups = up(pass.count, 8);
        if (GROUPS == 1 || groups == 1)
            multiply_tiles<1>(call, routes, pass, ring, unit, number, parts);
        else if (GROUPS == 2 || groups == 2)
            multiply_tiles<at_most(2, GROUPS)>(call, routes, pass, ring, unit, number, parts);
        else if (GROUPS == 3 || groups == 3)
            multiply_tiles<at_most(3, GROUPS)>(call, routes, pass, ring, unit, number, parts);
        else
            multiply_tiles<GROUPS>(call, routes, pass, ring, unit, number, parts);
    }
}
