// A step's attention over the paged caches by matrix instructions, in splits of contexts, merged in order.

struct Tokens {  // of the step's rows, in shared memory
    int positions[ROWS], table_starts[ROWS], splits[ROWS], samples[ROWS];
    u64 slots[ROWS], noise_keys[ROWS];
    float inverse_temperatures[ROWS], noise_scales[ROWS];
    const bf16 *inputs[ROWS], *cosines[ROWS], *sines[ROWS];
    const int *tables;
    int num_rows;  // before the padding
};

// Splits of a row's context: of its length alone, so that a row's bits do not depend on the others.
__device__ inline int splits_of(int position) {
    return position < ALONE ? 1 : at_most(MAX_SPLITS, up(position + 1, SPLIT));
}

// One head of a row's q, k or v from words of all blocks into shared memory, by a warp: with norm and rotary embedding
// if it `turns`. A lane has the same words of both halves of the head, which the rotary embedding mixes.
constexpr int HALF = HEAD_DIM / 4, LANE_WORDS = up(HALF, 32);
template <typename Take> __device__ inline void each_word(Take take) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int at = 0; at < LANE_WORDS; ++at)
        if (lane + 32 * at < HALF)
#pragma unroll
            for (int side = 0; side < 2; ++side) take(at, side, lane + 32 * at + side * HALF);
}
__device__ inline void bring_head(const Tokens &tokens, int row, const u64 *words, const bf16 *weight, float epsilon, bool turns,
                                  u32 epoch, u32 *to, bf16 *cache) {
    u32 cosines[LANE_WORDS][2], sines[LANE_WORDS][2], weights[LANE_WORDS][2];
    float values[LANE_WORDS][2][2] = {};
    if (turns)
        each_word([&](int at, int side, int word) {
            cosines[at][side] = reinterpret_cast<const u32 *>(tokens.cosines[row])[word];
            sines[at][side] = reinterpret_cast<const u32 *>(tokens.sines[row])[word];
            if (HAS_NORMS) weights[at][side] = reinterpret_cast<const u32 *>(weight)[word];
        });
    bool is_there;
    Patience patience;
    do {
        u64 read[LANE_WORDS][2];
        is_there = true;
        each_word([&](int at, int side, int word) { read[at][side] = read_word(words + word); });
        each_word([&](int at, int side, int word) {
            is_there &= is_of(read[at][side], epoch);
            values[at][side][0] = low(u32(read[at][side])), values[at][side][1] = high(u32(read[at][side]));
        });
        patience.lose();
    } while (!is_there);
    __syncwarp();
    if (turns) {
        if (HAS_NORMS) {
            float sum = 0.f;
            each_word([&](int at, int side, int) {
#pragma unroll
                for (int of = 0; of < 2; ++of) sum = fmaf(values[at][side][of], values[at][side][of], sum);
            });
            float factor = rsqrtf(sum_lanes(sum, 32) / HEAD_DIM + epsilon);
            each_word([&](int at, int side, int) {
                u32 scale = weights[at][side];
                values[at][side][0] = rounded(rounded(values[at][side][0] * factor) * low(scale));
                values[at][side][1] = rounded(rounded(values[at][side][1] * factor) * high(scale));
            });
        }
#pragma unroll
        for (int at = 0; at < LANE_WORDS; ++at)
#pragma unroll
            for (int of = 0; of < 2; ++of) {
                auto part = [&](u32 pair) { return of ? high(pair) : low(pair); };
                float one = values[at][0][of], other = values[at][1][of];
                values[at][0][of] = one * part(cosines[at][0]) - other * part(sines[at][0]);
                values[at][1][of] = other * part(cosines[at][1]) + one * part(sines[at][1]);
            }
    }
    each_word([&](int at, int side, int word) {
        to[word] = narrow2(values[at][side][0], values[at][side][1]);
        if (cache) reinterpret_cast<u32 *>(cache)[word] = to[word];
    });
}

// A matrix of 8 x 8 elements of two bytes, a row in four lanes, transposed.
__device__ inline u32 transposed(u32 pair) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}
__device__ inline u32 word_of(const uint4 &vector, int at) {
    return at == 0 ? vector.x : at == 1 ? vector.y : at == 2 ? vector.z : vector.w;
}
__device__ inline float max_rows(float value) {  // over lanes of equal lane % 4
#pragma unroll
    for (int step = 4; step < 32; step <<= 1) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
}
__device__ inline u32 pair_up(float value) {  // with the next lane's
    return narrow2(value, __shfl_down_sync(~0u, value, 1));
}

// K and V of 16 tokens as a warp's matrix instructions take them, straight from the caches. K is the first operand of the
// scores: a lane has tokens lane / 4 and 8 further, 8 dimensions of every 32. V, transposed, is the first operand of the
// outputs: a lane has 8 dimensions of every 64, of tokens 2 * (lane % 4), the next one, and of both 8 further.
constexpr int AT_ONCE = 16, KEY_LOADS = HEAD_DIM / 32, VALUE_LOADS = HEAD_DIM / 64;
constexpr bool LOADS_AHEAD = HEAD_DIM <= 128;  // of values: where registers have room
struct Held {
    uint4 keys[2][KEY_LOADS], values[4][VALUE_LOADS];
    __device__ static int key_token(int of) { return threadIdx.x % 32 / 4 + 8 * of; }
    __device__ static int value_token(int of) { return threadIdx.x % 4 * 2 + of % 2 + of / 2 * 8; }
    __device__ static int key_dims(int at) { return at * 32 + threadIdx.x % 4 * 8; }
    __device__ static int value_dims(int at) { return at * 64 + threadIdx.x % 32 / 4 * 8; }
    __device__ static const bf16 *slot(const bf16 *cache, const int *table, int token) {
        return cache + (u64(table[token / BLOCK_SIZE]) * BLOCK_SIZE + token % BLOCK_SIZE) * KV;
    }
    __device__ void load_keys(const bf16 *cache, const int *table, int first, int end) {
#pragma unroll
        for (int of = 0; of < 2; ++of) {
            int token = first + key_token(of);
            const bf16 *from = token < end ? slot(cache, table, token) : nullptr;
#pragma unroll
            for (int at = 0; at < KEY_LOADS; ++at)
                keys[of][at] = from ? *reinterpret_cast<const uint4 *>(from + key_dims(at)) : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ void load_values(const bf16 *cache, const int *table, int first, int end) {
#pragma unroll
        for (int of = 0; of < 4; ++of) {
            int token = first + value_token(of);
            const bf16 *from = token < end ? slot(cache, table, token) : nullptr;
#pragma unroll
            for (int at = 0; at < VALUE_LOADS; ++at)
                values[of][at] = from ? *reinterpret_cast<const uint4 *>(from + value_dims(at)) : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ void put_own_key(const u32 *own, int token) {  // into the place of a token
#pragma unroll
        for (int of = 0; of < 2; ++of)
            if (key_token(of) == token)
#pragma unroll
                for (int at = 0; at < KEY_LOADS; ++at) keys[of][at] = *reinterpret_cast<const uint4 *>(own + key_dims(at) / 2);
    }
    __device__ void put_own_value(const u32 *own, int token) {
#pragma unroll
        for (int of = 0; of < 4; ++of)
            if (value_token(of) == token)
#pragma unroll
                for (int at = 0; at < VALUE_LOADS; ++at)
                    values[of][at] = *reinterpret_cast<const uint4 *>(own + value_dims(at) / 2);
    }
};

// A warp's attention to some tokens: a lane has the query heads 2 * (lane % 4) and the next one.
struct Softmax {
    float tops[2] = {LOWEST, LOWEST}, totals[2] = {}, outputs[HEAD_DIM / 16][4] = {};
    // Returns the weights of 16 tokens as the second operand of the outputs, and what rounding takes off them.
    __device__ uint4 weigh(const float *scores) {  // of tokens lane / 4 and 8 further: of two heads each
        float weights[4];
#pragma unroll
        for (int of = 0; of < 2; ++of) {
            float top = fmaxf(tops[of], max_rows(fmaxf(scores[of], scores[2 + of]))), decay = exp2f(tops[of] - top);
            weights[of] = exp2f(scores[of] - top), weights[2 + of] = exp2f(scores[2 + of] - top);
            totals[of] = totals[of] * decay + weights[of] + weights[2 + of], tops[of] = top;
#pragma unroll
            for (int tile = 0; tile < HEAD_DIM / 16; ++tile) outputs[tile][of] *= decay, outputs[tile][2 + of] *= decay;
        }
        u32 pairs[4];
#pragma unroll
        for (int of = 0; of < 2; ++of) {
            u32 pair = narrow2(weights[2 * of], weights[2 * of + 1]);
            pairs[of] = transposed(pair);
            pairs[2 + of] = transposed(narrow2(weights[2 * of] - low(pair), weights[2 * of + 1] - high(pair)));
        }
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    __device__ void add(const Held &held, uint4 weights) {
#pragma unroll
        for (int at = 0; at < VALUE_LOADS; ++at)
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                u32 pairs[4];
#pragma unroll
                for (int of = 0; of < 4; of += 2) {  // of two tokens one dimension each
                    u32 one = word_of(held.values[of][at], word), other = word_of(held.values[of + 1][at], word);
                    pairs[of] = __byte_perm(one, other, 0x5410), pairs[of + 1] = __byte_perm(one, other, 0x7632);
                }
                float *output = outputs[at * 4 + word];
                add_product(output, pairs[0], pairs[1], pairs[2], pairs[3], weights.x, weights.y);
                add_product(output, pairs[0], pairs[1], pairs[2], pairs[3], weights.z, weights.w);
            }
    }
    // To [GROUPS, WARPS, OUTPUTS]: outputs, top, total.
    __device__ void store(float *to) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int of = 0; of < 2; ++of) {
            float total = totals[of];
#pragma unroll
            for (int step = 4; step < 32; step <<= 1) total += __shfl_xor_sync(~0u, total, step);
            int head = lane % 4 * 2 + of;
            if (head >= GROUPS) continue;
            float *own = to + (head * WARPS + threadIdx.x / 32) * OUTPUTS;
#pragma unroll
            for (int tile = 0; tile < HEAD_DIM / 16; tile += 2)
                *reinterpret_cast<float4 *>(own + Held::value_dims(tile / 4) + tile % 4 * 2) = make_float4(
                    outputs[tile][of], outputs[tile][2 + of], outputs[tile + 1][of], outputs[tile + 1][2 + of]);
            if (lane < 4) *reinterpret_cast<float2 *>(own + HEAD_DIM) = make_float2(tops[of], total);
        }
    }
};

// Attention of one row, for the query heads of one KV head, to a split of its context. The last split has the row's own
// token and writes it to the caches. The first K and V are loaded before q is there, since earlier steps wrote them.
__device__ inline void attend(const Step &step, const Tokens &tokens, const Layer &layer, int row, int head, int split,
                              u32 epoch, float *shared) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int position = tokens.positions[row], splits = tokens.splits[row];
    int start = int(long(position + 1) * split / splits), end = int(long(position + 1) * (split + 1) / splits);
    bool has_own = split == splits - 1;
    int past = has_own ? position : end;  // the end of what the caches hold
    const int *table = tokens.tables + tokens.table_starts[row];
    const bf16 *keys = layer.keys + head * HEAD_DIM, *values = layer.values + head * HEAD_DIM;
    u32 *queries = reinterpret_cast<u32 *>(shared + GROUPS * WARPS * OUTPUTS), *own = queries + GROUPS * QUERY_WORDS;

    int first = start + warp * AT_ONCE;
    Held held;
    held.load_keys(keys, table, first, past);
    if (LOADS_AHEAD) held.load_values(values, table, first, past);
    const u64 *qkv = step.qkv + row * (QKV / 2);
    for (int at = warp; at < GROUPS + (has_own ? 2 : 0); at += WARPS) {
        bool is_query = at < GROUPS, is_key = at == GROUPS;
        int place = (is_query ? head * GROUPS + at : is_key ? HEADS + head : HEADS + KV_HEADS + head) * HEAD_DIM;
        bf16 *cache = is_query ? nullptr : (is_key ? layer.keys : layer.values) + tokens.slots[row] * KV + head * HEAD_DIM;
        u32 *to = is_query ? queries + at * QUERY_WORDS : own + (is_key ? 0 : HEAD_DIM / 2);
        bring_head(tokens, row, qkv + place / 2, is_query ? layer.q_norm : layer.k_norm,
                   float(is_query ? layer.q_epsilon : layer.k_epsilon), is_query || is_key, epoch, to, cache);
    }
    sync_block();

    uint4 query[KEY_LOADS];
#pragma unroll
    for (int at = 0; at < KEY_LOADS; ++at)
        query[at] = lane / 4 < GROUPS
                        ? *reinterpret_cast<const uint4 *>(queries + lane / 4 * QUERY_WORDS + Held::key_dims(at) / 2)
                        : make_uint4(0, 0, 0, 0);
    Softmax softmax;
    for (; first < end; first += WARPS * AT_ONCE) {
        if (has_own) held.put_own_key(own, position - first);
        float sums[2][4] = {};
#pragma unroll
        for (int at = 0; at < KEY_LOADS; ++at) {
            uint4 one = held.keys[0][at], other = held.keys[1][at];
            add_product(sums[0], one.x, other.x, one.y, other.y, query[at].x, query[at].y);
            add_product(sums[1], one.z, other.z, one.w, other.w, query[at].z, query[at].w);
        }
        if (!LOADS_AHEAD) held.load_values(values, table, first, past);
        bool goes_on = first + WARPS * AT_ONCE < end;
        if (LOADS_AHEAD && goes_on) held.load_keys(keys, table, first + WARPS * AT_ONCE, past);
        float scores[4];
#pragma unroll
        for (int of = 0; of < 4; ++of) {
            bool is_seen = first + Held::key_token(of / 2) < end;  // others weigh 0 for any top
            scores[of] = is_seen ? (sums[0][of] + sums[1][of]) * (step.scaling * 1.4426950408889634f) : 2 * LOWEST;
        }
        uint4 weights = softmax.weigh(scores);
        if (has_own) held.put_own_value(own + HEAD_DIM / 2, position - first);
        softmax.add(held, weights);
        if (LOADS_AHEAD && goes_on) held.load_values(values, table, first + WARPS * AT_ONCE, past);
        if (!LOADS_AHEAD && goes_on) held.load_keys(keys, table, first + WARPS * AT_ONCE, past);
    }
    softmax.store(shared);
    sync_block();

    u64 *partial = step.partial + u64((row * KV_HEADS + head) * MAX_SPLITS + split) * GROUPS * WIDTH;
    u64 *attended = step.attended + (row * QUERY + head * GROUPS * HEAD_DIM) / 2;
    for (int at = threadIdx.x; at < GROUPS * HEAD_DIM; at += THREADS) {
        const float *from = shared + at / HEAD_DIM * WARPS * OUTPUTS;
        float top = LOWEST, total = 0.f, output = 0.f;
#pragma unroll
        for (int of = 0; of < WARPS; ++of) top = fmaxf(top, from[of * OUTPUTS + HEAD_DIM]);
#pragma unroll
        for (int of = 0; of < WARPS; ++of) {
            float weight = exp2f(from[of * OUTPUTS + HEAD_DIM] - top);
            total += weight * from[of * OUTPUTS + HEAD_DIM + 1], output += weight * from[of * OUTPUTS + at % HEAD_DIM];
        }
        if (splits > 1) {
            u64 *to = partial + at / HEAD_DIM * WIDTH;
            write_word(to + at % HEAD_DIM, __float_as_uint(output), epoch);
            if (at % HEAD_DIM < 2) write_word(to + HEAD_DIM + at % HEAD_DIM, __float_as_uint(at % HEAD_DIM ? total : top), epoch);
        } else {
            u32 pair = pair_up(output / total);
            if (at % 2 == 0) write_word(attended + spot(at / 2), pair, epoch);
        }
    }
    sync_block();
}

// Merges the splits of 64 dimensions of a row's query head: a lane has two, a warp every eighth split.
constexpr int MERGED = 64, MERGES = HEADS * (HEAD_DIM / MERGED);  // of a row
__device__ inline void merge_splits(const Step &step, int row, int head, int piece, int splits, u32 epoch, float *shared) {
    constexpr int MOST = up(MAX_SPLITS, WARPS);  // of a warp
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 *from = step.partial + (u64(row * KV_HEADS + head / GROUPS) * MAX_SPLITS * GROUPS + head % GROUPS) * WIDTH;
    u64 sums[MOST][2], own[MOST][2];
    bool is_there;
    Patience patience;
    do {
        is_there = true;
#pragma unroll
        for (int at = 0; at < MOST; ++at) {
            const u64 *part = from + at_most(warp + at * WARPS, splits - 1) * GROUPS * WIDTH;
            read_words(part + HEAD_DIM, sums[at]), read_words(part + piece * MERGED + lane * 2, own[at]);
        }
#pragma unroll
        for (int at = 0; at < MOST; ++at)
#pragma unroll
            for (int of = 0; of < 2; ++of) is_there &= is_of(sums[at][of], epoch) && is_of(own[at][of], epoch);
        patience.lose();
    } while (!is_there);
    __syncwarp();
    auto number = [](u64 word) { return __uint_as_float(u32(word)); };
    float top = LOWEST, total = 0.f, outputs[2] = {};
#pragma unroll
    for (int at = 0; at < MOST; ++at)
        if (warp + at * WARPS < splits) top = fmaxf(top, number(sums[at][0]));
#pragma unroll
    for (int at = 0; at < MOST; ++at)
        if (warp + at * WARPS < splits) {
            float scale = exp2f(number(sums[at][0]) - top);
            total += scale * number(sums[at][1]);
#pragma unroll
            for (int of = 0; of < 2; ++of) outputs[of] += scale * number(own[at][of]);
        }
    float4 *parts = reinterpret_cast<float4 *>(shared);
    parts[threadIdx.x] = make_float4(top, total, outputs[0], outputs[1]);
    sync_block();
    if (warp == 0) {
        float4 of_warps[WARPS];
        top = LOWEST, total = outputs[0] = outputs[1] = 0.f;
#pragma unroll
        for (int of = 0; of < WARPS; ++of) of_warps[of] = parts[of * 32 + lane], top = fmaxf(top, of_warps[of].x);
#pragma unroll
        for (int of = 0; of < WARPS; ++of) {
            float scale = exp2f(of_warps[of].x - top);
            total += scale * of_warps[of].y, outputs[0] += scale * of_warps[of].z, outputs[1] += scale * of_warps[of].w;
        }
        u64 *to = step.attended + (row * QUERY + head * HEAD_DIM) / 2;
        write_word(to + spot(piece * (MERGED / 2) + lane), narrow2(outputs[0] / total, outputs[1] / total), epoch);
    }
    sync_block();
}

// The block's splits of all rows, as `take(row, head, split)`.
template <typename Take> __device__ inline void each_split(const Tokens &tokens, Take take) {
    int before = 0;
    for (int row = 0; row < tokens.num_rows; ++row) {
        int units = tokens.splits[row] * KV_HEADS, first = (blockIdx.x + GRID - before % GRID) % GRID;
        for (int unit = first; unit < units; unit += GRID) take(row, unit % KV_HEADS, unit / KV_HEADS);
        before += units;
    }
}

// All of a layer's attention: first the splits, which wait for q, k and v alone, then the merges, which wait for splits.
__device__ inline void attend_all(const Step &step, const Tokens &tokens, const Layer &layer, u32 epoch, float *shared) {
    each_split(tokens, [&](int row, int head, int split) { attend(step, tokens, layer, row, head, split, epoch, shared); });
    int before = 0;
    for (int row = 0; row < tokens.num_rows; ++row) {
        int splits = tokens.splits[row];
        if (splits == 1) continue;
        for (int at = (GRID - 1 - blockIdx.x + GRID - before % GRID) % GRID; at < MERGES; at += GRID)
            merge_splits(step, row, at % HEADS, at / HEADS, splits, epoch, shared);
        before += MERGES;
    }
}
