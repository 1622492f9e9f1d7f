// Shared by the kernel's parts: sizes, addresses of a layer and a step, words with epochs; behind `bfloat16.h`.
//
// Set by the caller: HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, PIECE, SLOTS, ROWS, GRID (blocks of the
// launch), HAS_NORMS, HAS_BIAS, SPLIT (tokens of a context's split), ALONE (tokens of a context without splits), FLIGHT
// (slots of weights on their way at once; HEAD_FLIGHT: while the head is read), PACKED_BYTES (of
// inputs as launch arguments), PATIENCE (reads before a wait traps; 0: for ever).

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // computing warps; one more warp fetches weights
constexpr int QUERY = HEADS * HEAD_DIM, KV = KV_HEADS * HEAD_DIM, QKV = QUERY + 2 * KV, GROUPS = HEADS / KV_HEADS;
constexpr int MAX_SPLITS = at_least(1, at_most(32, GRID / KV_HEADS));
constexpr float LOWEST = -1e30f;  // a score before any

struct Layer {
    const bf16 *q, *k, *v, *o, *gate, *up, *down;
    const bf16 *input_norm, *post_norm, *q_norm, *k_norm;
    const bf16 *q_bias, *k_bias, *v_bias;
    bf16 *keys, *values;
    double input_epsilon, post_epsilon, q_epsilon, k_epsilon;
};

struct Step {
    const Layer *layers;
    const bf16 *input, *cosines, *sines;  // [rows, HIDDEN]; [rows or positions, HEAD_DIM]
    bf16 *output;
    const u64 *positions, *slots;               // [rows]
    const int *tables, *table_starts, *counts;  // counts: blocks of each row, 0 for padding
    u64 *qkv, *attended, *middle, *inner, *hidden;  // words: [ROWS, ... / 2]
    u64 *partial;                               // floats with epochs: [ROWS, KV_HEADS, MAX_SPLITS, GROUPS, HEAD_DIM + 2]
    u32 *counter;                               // the last launch's last epoch, exits
    // Of a step from tokens to tokens, else null. Cosines and sines are of positions then.
    const bf16 *embedding, *norm, *head;  // [tokens, HIDDEN], [HIDDEN], [vocab_size, HIDDEN]
    const long long *token_ids;           // [rows]: -1 - i for the i-th of `sampled`
    const u64 *sample_rows, *noise_keys;  // of samples
    const float *inverse_temperatures, *noise_scales;
    long long *sampled, *host_sampled;    // by the step before, and by this one; for the host, or null
    u64 *best;                            // words [GRID, ROWS, 2]: a score and its token
    bf16 *logits;                         // [ROWS, vocab_size], or null
    float scaling, norm_epsilon;
    int num_layers, num_rows, vocab_size, num_sampled, non_finite, num_tables;
    u32 gamma;
    int is_packed;  // arrays of rows and samples, and the tables, are named by their offsets in `Packed`
};

// Inputs as launch arguments, which need no copy to the device before.
struct Packed {
    u64 words[PACKED_BYTES / 8];
};
template <typename T> __device__ inline const T *given(const Step &step, const Packed &packed, const T *from) {
    return step.is_packed ? reinterpret_cast<const T *>(reinterpret_cast<const unsigned char *>(packed.words) + u64(from)) : from;
}

__device__ inline u32 multiply2(u32 pair, u32 other) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(other));
    return product;
}
__device__ inline void widen(uint4 packed, float *values) {
    values[0] = low(packed.x), values[1] = high(packed.x), values[2] = low(packed.y), values[3] = high(packed.y);
    values[4] = low(packed.z), values[5] = high(packed.z), values[6] = low(packed.w), values[7] = high(packed.w);
}
__device__ inline uint4 narrow8(const float *values) {
    return make_uint4(narrow2(values[0], values[1]), narrow2(values[2], values[3]), narrow2(values[4], values[5]),
                      narrow2(values[6], values[7]));
}
__device__ inline float sum_lanes(float value, int lanes) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        if (step < lanes) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

__device__ inline void sync_block() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

struct Patience {
    u32 tries = 0;
    __device__ void lose() {
        if constexpr (PATIENCE > 0)
            if (++tries > PATIENCE) __trap();
    }
};

// Blocks pass one another words: two bfloat16, or a float, with the epoch (one per layer, counted over launches) in
// which they were written. Whoever needs a word reads until it has its epoch. Nothing else orders the blocks: that costs
// one trip through the L2 cache, where a barrier over the grid and reading behind it cost three.
//
// A word is not overwritten too early: its next epoch comes a layer later, for which each block waited for words that
// every block writes (GRID is so small that all own some) after it had read its own.
__device__ inline void write_word(u64 *to, u32 value, u32 epoch) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(u64(epoch) << 32 | value) : "memory");
}
__device__ inline u64 read_word(const u64 *from) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
__device__ inline void read_words(const u64 *from, u64 *words) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(from) : "memory");
}
__device__ inline bool is_of(u64 word, u32 epoch) { return u32(word >> 32) == epoch; }

// Where an input of a product has its word of two elements: of 16 words the four lanes of a matrix instruction take four
// each, in two loads of 64 contiguous bytes.
__device__ inline int spot(int word) { return word & ~15 | (word & 2) << 2 | (word & 12) >> 1 | word & 1; }

// Vectors of 8 elements, four words each, from where `place(number)` says; the third and fourth are NEXT words further.
template <int NEXT, int COUNT, typename Place> __device__ inline void await(u32 epoch, Place place, uint4 *packed) {
    u64 words[COUNT][4];
    Patience patience;
    bool is_there;
    do {
#pragma unroll
        for (int at = 0; at < COUNT; ++at) read_words(place(at), words[at]), read_words(place(at) + NEXT, words[at] + 2);
        is_there = true;
#pragma unroll
        for (int at = 0; at < COUNT; ++at)
#pragma unroll
            for (int word = 0; word < 4; ++word) is_there &= is_of(words[at][word], epoch);
        patience.lose();
    } while (!is_there);
#pragma unroll
    for (int at = 0; at < COUNT; ++at)
        packed[at] = make_uint4(u32(words[at][0]), u32(words[at][1]), u32(words[at][2]), u32(words[at][3]));
}
