// The grid barrier and rings of weights, behind `bfloat16.h`, for kernels with one block per multiprocessor.
//
// Set by the caller: GRID (blocks, at most one per multiprocessor), ROWS (the most of a call, up to 8), SLOTS (of a warp's
// ring), PATIENCE (reads before a wait traps).

constexpr int WARPS = 8, THREADS = 32 * WARPS, ALL_WARPS = GRID * WARPS;
static_assert(ROWS <= WARPS && GRID <= 256, "sizes");

__device__ inline float sum_lanes(float value) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
    return value;
}
__device__ inline float dot8(uint4 one, uint4 other, float sum) {
    sum = fmaf(low(one.x), low(other.x), sum), sum = fmaf(high(one.x), high(other.x), sum);
    sum = fmaf(low(one.y), low(other.y), sum), sum = fmaf(high(one.y), high(other.y), sum);
    sum = fmaf(low(one.z), low(other.z), sum), sum = fmaf(high(one.z), high(other.z), sum);
    return fmaf(high(one.w), high(other.w), fmaf(low(one.w), low(other.w), sum));
}
__device__ inline uint4 load16(const void *from) { return *reinterpret_cast<const uint4 *>(from); }

struct Patience {
    u32 tries = 0;
    __device__ void lose() {
        if (PATIENCE > 0 && ++tries > PATIENCE) __trap();
    }
};

// The next kernel may begin where blocks of this one end, as far as `await_previous`, if it is launched so.
__device__ inline void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// All blocks wait for one another. A round of arrivals adds a power of 2, in spite of any number of blocks, so that it
// begins at a multiple of it and the counter may overflow.
constexpr u32 ROUND = 256;
__device__ inline void meet(u32 *counter) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 arrived, amount = blockIdx.x == 0 ? ROUND + 1 - GRID : 1;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
        u32 begin = arrived / ROUND * ROUND;
        asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(amount) : "memory");
        Patience patience;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
            patience.lose();
        } while (arrived - begin < ROUND);
    }
    __syncthreads();
}

// A warp's slots of shared memory, filled by the copy engine in the order of use. No step reads a weight twice, so that
// other data should stay in the L2 cache.
template <int SLOT_BYTES> struct Ring {
    u32 memory, full;
    u64 policy;
    __device__ Ring(const unsigned char *all, const u64 *barriers)
        : memory(u32(__cvta_generic_to_shared(all)) + threadIdx.x / 32 * SLOTS * SLOT_BYTES),
          full(u32(__cvta_generic_to_shared(barriers)) + threadIdx.x / 32 * SLOTS * 8) {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        if (threadIdx.x % 32 == 0) {
            for (int at = 0; at < SLOTS; ++at)
                asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(full + 8 * at) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
    }
    __device__ u32 slot_of(int number) const { return memory + number % SLOTS * SLOT_BYTES; }
    __device__ u32 barrier_of(int number) const { return full + 8 * (number % SLOTS); }
    // By one lane: the bytes to come into the slot of the warp's `number`-th copy.
    __device__ void expect(int number, u32 bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier_of(number)), "r"(bytes) : "memory");
    }
    __device__ void copy(int number, const bf16 *from, u32 bytes, u32 offset = 0) const {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                     ::"r"(slot_of(number) + offset), "l"(from), "r"(bytes), "r"(barrier_of(number)), "l"(policy)
                     : "memory");
    }
    __device__ void fill(int number, const bf16 *from, u32 bytes) const {
        expect(number, bytes);
        copy(number, from, bytes);
    }
    // The address of the slot of that copy, which has arrived.
    __device__ u32 wait(int number) const {
        u32 done;
        Patience patience;
        do {
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                         : "=r"(done) : "r"(barrier_of(number)), "r"(u32(number / SLOTS & 1)) : "memory");
            patience.lose();
        } while (!done);
        return slot_of(number);
    }
};
__device__ inline uint4 load_shared(u32 address) {
    uint4 found;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "r"(address));
    return found;
}

// A row of COUNT * 256 elements, spread over a warp's lanes.
template <int COUNT> struct Row {
    uint4 packed[COUNT];
    __device__ static int place(int at) { return (at * 32 + threadIdx.x % 32) * 8; }
    __device__ void load(const bf16 *from) {
#pragma unroll
        for (int at = 0; at < COUNT; ++at) packed[at] = load16(from + place(at));
    }
    __device__ void store(bf16 *to) const {
#pragma unroll
        for (int at = 0; at < COUNT; ++at) *reinterpret_cast<uint4 *>(to + place(at)) = packed[at];
    }
    __device__ float dot(const Row &other) const {
        float sums[2] = {};
#pragma unroll
        for (int at = 0; at < COUNT; ++at) sums[at % 2] = dot8(packed[at], other.packed[at], sums[at % 2]);
        return sum_lanes(sums[0] + sums[1]);
    }
    // The RMS norm with these weights.
    __device__ void normalise(const Row &weights, float epsilon) {
        float scale = rsqrtf(dot(*this) / (COUNT * 256) + epsilon);
        auto scaled = [&](u32 pair, u32 factors) {
            return narrow2(rounded(low(pair) * scale) * low(factors), rounded(high(pair) * scale) * high(factors));
        };
#pragma unroll
        for (int at = 0; at < COUNT; ++at) {
            uint4 own = packed[at], factors = weights.packed[at];
            packed[at] = make_uint4(scaled(own.x, factors.x), scaled(own.y, factors.y), scaled(own.z, factors.z),
                                    scaled(own.w, factors.w));
        }
    }
};

__device__ inline bool is_padding(const long long *slots, int num_slots, int row) {
    return slots != nullptr && (row >= num_slots || slots[row] == 0);
}

// Brings a warp's share of num_bytes, a multiple of 16, into the L2 cache, for a kernel that reads them later.
__device__ inline void prefetch(const bf16 *from, long long num_bytes) {
    int warp = blockIdx.x * WARPS + threadIdx.x / 32;
    long long share = (num_bytes / 16 + ALL_WARPS - 1) / ALL_WARPS * 16, begin = warp * share;
    u32 bytes = u32(begin < num_bytes ? min(share, num_bytes - begin) : 0);
    if (threadIdx.x % 32 == 0 && bytes > 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + begin / 2), "r"(bytes) : "memory");
}
