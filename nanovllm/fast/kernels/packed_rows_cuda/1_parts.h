// Packed weights in registers, for the kernels whose sources follow this file and `bfloat16.h`.
//
// A tile is 16 outputs; a chunk, 64 inputs of them. A lane holds of each 16 inputs what it multiplies as operand A:
// outputs g and g + 8 of inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, with g = lane / 4 and t = lane % 4.
//
// Numbers are of NUMBER, bfloat16 or float16 as the inputs; "pair" is two of them in a word.
//
// Set by the caller: NUMBER (dtype), KIND (of codes), ZERO (subtracted from 4-bit integers), SCALE (dtype), SHIFTS, RUN (inputs with one
// scale: 16, 32, or a multiple of 64; 0 for none).

constexpr int INT4 = 0, FLOAT4 = 1, INT8 = 2, FLOAT8 = 3;
constexpr int FLOAT16 = 0, BFLOAT16 = 1, FLOAT = 2;
constexpr bool IS_HALF = NUMBER == FLOAT16;
constexpr int NONE = 0, ADDED = 1, SUBTRACTED = 2;
constexpr u32 ONES = IS_HALF ? 0x3c003c00u : 0x3f803f80u, MINUS_ONES = ONES | 0x80008000u;  // pairs
constexpr int CHUNK = 64, TILE = 16, STEPS = CHUNK / 16;
constexpr int VECTORS = KIND == INT8 || KIND == FLOAT8 ? 2 : 1;        // 16 bytes each, of a lane's chunk
constexpr int RUNS = RUN == 0 ? 0 : RUN < CHUNK ? CHUNK / RUN : 1;     // of a chunk
constexpr int STEPS_OF_RUN = RUNS == 0 ? STEPS : STEPS / RUNS;
constexpr int FACTOR_BYTES = RUNS * 2 * (SCALE == FLOAT ? 4 : 2);      // scales of a lane's two outputs in a chunk
constexpr int FACTOR_WORDS = FACTOR_BYTES / 4;

__device__ inline float of_half(bf16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ inline float first_of(u32 pair) { return IS_HALF ? of_half(bf16(pair)) : low(pair); }
__device__ inline float second_of(u32 pair) { return IS_HALF ? of_half(bf16(pair >> 16)) : high(pair); }
__device__ inline u32 pair_of(float first, float second) {
    if constexpr (!IS_HALF) return narrow2(first, second);
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Loads of what is read once; without `is_there` the value stays.
__device__ inline void load_once(uint4 &value, const void *from, bool is_there) {
    asm volatile(
        "{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %5, 0;\n\t"
        "@there ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
        : "l"(from), "r"(u32(is_there)));
}
template <int WORDS> __device__ inline void load(u32 *words, const void *from, bool is_there) {
    if constexpr (WORDS == 2)
        asm volatile(
            "{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %3, 0;\n\t@there ld.global.nc.v2.u32 {%0, %1}, [%2];\n\t}"
            : "+r"(words[0]), "+r"(words[1])
            : "l"(from), "r"(u32(is_there)));
    else
        asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %2, 0;\n\t@there ld.global.nc.u32 %0, [%1];\n\t}"
                     : "+r"(words[0])
                     : "l"(from), "r"(u32(is_there)));
}

struct Factors {
    u32 words[at_least(FACTOR_WORDS, 1)] = {};
    __device__ void load(const unsigned char *from, bool is_there) {
        constexpr int PIECE = FACTOR_WORDS == 1 ? 1 : 2;
#pragma unroll
        for (int at = 0; at < FACTOR_WORDS; at += PIECE) ::load<PIECE>(words + at, from + 4 * at, is_there);
    }
    // A pair of equal numbers.
    __device__ u32 twice(int run, int half) const { return __byte_perm(words[run], 0, half ? 0x3232 : 0x1010); }
    // Of a run of the chunk, for the first or second of the lane's outputs.
    __device__ float operator()(int run, int half) const {
        if constexpr (SCALE == FLOAT) return __uint_as_float(words[2 * run + half]);
        u32 word = words[run];
        if constexpr (SCALE == BFLOAT16) return half ? high(word) : low(word);
        return of_half(bf16(half ? word >> 16 : word));
    }
};

// first * second + third of pairs, rounded once.
__device__ inline u32 fma2(u32 first, u32 second, u32 third) {
    u32 sum;
    if constexpr (IS_HALF)
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(first), "r"(second), "r"(third));
    else
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(first), "r"(second), "r"(third));
    return sum;
}

// Bits of a word within a mask, and those of another, by one instruction.
__device__ inline u32 masked(u32 word, u32 mask, u32 more) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(word), "r"(mask), "r"(more));
    return bits;
}

// One lane's chunk of a tile, with its scales.
struct Packed {
    uint4 vectors[VECTORS] = {};
    Factors scales, shifts;

    // Numbers of 16 inputs, as operand A; without `IS_WHOLE` 4-bit floats are 2^-126 of theirs (float16 2^-14), 8-bit 2^-120 (2^-8).
    template <bool IS_WHOLE = true> __device__ void numbers(int step, u32 (&pairs)[4]) const {
        constexpr u32 BASE = IS_HALF ? 0x64006400u : 0x43004300u;  // 1024 or 128: its last bits are ones
        if constexpr (KIND == INT4) {
            u32 word = word_of(vectors[0], step);
            constexpr u32 less = BASE | 0x80008000u | (ZERO ? 0x00080008u : 0);
#pragma unroll
            for (int at = 0; at < 4; ++at) pairs[at] = fma2(masked(word >> 4 * at, 0x000f000fu, BASE), ONES, less);
        } else if constexpr (KIND == FLOAT4) {  // moved to the number's bits; a power of two makes up for the exponent
            u32 word = word_of(vectors[0], step);
            constexpr u32 power = IS_HALF ? 0x74007400u : 0x7e807e80u;  // 2^14 or 2^126
            constexpr u32 magnitudes = IS_HALF ? 0x0e000e00u : 0x01c001c0u;
            constexpr int by = IS_HALF ? 9 : 6;
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                u32 magnitude = 3 * at <= by ? word << by - 3 * at : word >> 3 * at - by;
                pairs[at] = masked(magnitude, magnitudes, word << at & 0x80008000u);
                if constexpr (IS_WHOLE) pairs[at] = fma2(pairs[at], power, 0u);
            }
        } else if constexpr (KIND == FLOAT8) {  // likewise, 2^8 or 2^120
            constexpr u32 power = IS_HALF ? 0x5c005c00u : 0x7b807b80u;
            constexpr int by = IS_HALF ? 7 : 4;
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                u32 bytes = word_of(vectors[step / 2], step % 2 * 2 + at / 2) >> 8 * (at % 2);
                pairs[at] = masked(bytes << by, 0x007f007fu << by, bytes << 8 & 0x80008000u);
                if constexpr (IS_WHOLE) pairs[at] = fma2(pairs[at], power, 0u);
            }
        } else {  // the base and the lower bits, less the base and the sign
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                u32 bytes = word_of(vectors[step / 2], step % 2 * 2 + at / 2) >> 8 * (at % 2);
                pairs[at] = fma2(masked(bytes, 0x00800080u, BASE), MINUS_ONES, masked(bytes, 0x007f007fu, BASE));
            }
        }
    }
    __device__ static u32 word_of(const uint4 &vector, int at) {
        return at == 0 ? vector.x : at == 1 ? vector.y : at == 2 ? vector.z : vector.w;
    }
};

// The weight itself of the lane's places of 16 inputs, rounded once, or nearly so without `IS_EXACT`, as operand A.
template <bool IS_EXACT = true> __device__ inline void widen(const Packed &packed, int step, u32 (&pairs)[4]) {
    constexpr bool HAS_RESTS = !IS_EXACT && !IS_HALF && RUNS > 0 && SCALE == FLOAT && SHIFTS == NONE;
    packed.template numbers<!(HAS_RESTS && KIND == FLOAT8)>(step, pairs);
    if constexpr (RUNS > 0 && SCALE == NUMBER && SHIFTS != ADDED) {
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            if constexpr (SHIFTS == SUBTRACTED)
                pairs[at] = fma2(packed.shifts.twice(step / STEPS_OF_RUN, at % 2), MINUS_ONES, pairs[at]);
            pairs[at] = fma2(pairs[at], packed.scales.twice(step / STEPS_OF_RUN, at % 2), 0u);
        }
    } else if constexpr (RUNS > 0)
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            float scale = packed.scales(step / STEPS_OF_RUN, at % 2) * (HAS_RESTS && KIND == FLOAT8 ? 0x1p120f : 1.f);
            if constexpr (HAS_RESTS) {  // by what bfloat16 has of a scale, and by its rest
                u32 most = pair_of(scale, scale);
                float rest = scale - first_of(most);
                pairs[at] = fma2(pairs[at], most, fma2(pairs[at], pair_of(rest, rest), 0u));
                continue;
            }
            float shift = SHIFTS != NONE ? packed.shifts(step / STEPS_OF_RUN, at % 2) : 0.f;
            auto widened = [&](float number) {
                return SHIFTS == SUBTRACTED ? (number - shift) * scale : fmaf(number, scale, shift);
            };
            pairs[at] = pair_of(widened(first_of(pairs[at])), widened(second_of(pairs[at])));
        }
}

struct Weights {
    const uint4 *codes;             // [tiles, chunks, VECTORS, 32 lanes]
    const unsigned char *scales;    // [tiles, groups of runs, 8, RUNS, 2]
    const unsigned char *shifts;    // likewise, added behind scales, or zero points
    const float *units;             // [outputs] that products are multiplied with, or null
    int outputs, width, chunks, groups;
};

// A lane's places in a tile's parts.
struct Places {
    const uint4 *codes;
    const unsigned char *scales, *shifts;

    __device__ Places(const Weights &weights, int tile) {
        int lane = threadIdx.x % 32;
        codes = weights.codes + size_t(tile) * weights.chunks * (VECTORS * 32) + lane;
        size_t place = (size_t(tile) * weights.groups * 8 + lane / 4) * FACTOR_BYTES;
        scales = weights.scales + place, shifts = weights.shifts + place;
    }
    __device__ void load(Packed &packed, int chunk, bool is_there) const {
#pragma unroll
        for (int at = 0; at < VECTORS; ++at)
            load_once(packed.vectors[at], codes + chunk * (VECTORS * 32) + 32 * at, is_there);
        if constexpr (RUNS > 0) {
            int group = RUN <= CHUNK ? chunk : chunk / at_least(RUN / CHUNK, 1);
            packed.scales.load(scales + group * (8 * FACTOR_BYTES), is_there);
            if constexpr (SHIFTS != NONE) packed.shifts.load(shifts + group * (8 * FACTOR_BYTES), is_there);
        }
    }
};

struct Call {
    Weights weights;
    const bf16 *states;  // [rows, width] of NUMBER, as are the other numbers
    const bf16 *bias;    // [outputs] or null
    bf16 *output;        // [rows, outputs], or half of them if `gated`
    // Of the kernel for few rows, null or 0 without:
    const bf16 *norm;        // [width], weight of an RMS norm of the inputs
    const bf16 *residual;    // added to the outputs
    const long long *slots;  // [rows], 0 for padding, which comes last; its outputs are zeros
    int rows;
    int bytes;      // of shared memory for inputs
    float epsilon;  // of the norm
    int gated;      // the first half of the products are gates of the second: outputs are silu(gate) * up

    // A product rounded as an output without the rest.
    __device__ float rounded(int output, float sum) const {
        if (weights.units) sum *= weights.units[output];
        if (bias) sum += first_of(bias[output]);
        return first_of(pair_of(sum, 0.f));
    }
    __device__ void store(int row, int output, float sum) const {
        if (output < weights.outputs)
            this->output[size_t(row) * weights.outputs + output] = bf16(pair_of(rounded(output, sum), 0.f));
    }
};

// The next kernel may begin; what this one reads of those before is there from here on.
__device__ inline void follow() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ inline void copy16(u32 to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0));
}
__device__ inline void await(u32 barrier, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred is_done;\n\tagain:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1;\n\t"
        "@!is_done bra again;\n\t}" ::"r"(barrier), "r"(parity)
        : "memory");
}
