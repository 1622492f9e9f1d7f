// A step's attention over the paged caches, in splits of contexts, merged in order.

struct Tokens {  // of the step's rows, in shared memory
    int positions[ROWS], table_starts[ROWS], splits[ROWS];
    u64 slots[ROWS];
    int num_rows;  // before the padding
};

// Splits of a row's context: of its length alone, so that a row's bits do not depend on the others.
__device__ inline int splits_of(int past) { return past <= ALONE ? 1 : at_most(MAX_SPLITS, up(past, SPLIT)); }

struct Head {  // a lane's inputs for norm and rotary embedding of its 8 dimensions of a head
    float cosines[8], sines[8];
    __device__ void turn(float *values, const float *weights, float epsilon) const {
        if (HAS_NORMS) {
            float sum = 0.f;
#pragma unroll
            for (int dim = 0; dim < 8; ++dim) sum = fmaf(values[dim], values[dim], sum);
            float factor = rsqrtf(sum_lanes(sum, TOKEN_LANES) / HEAD_DIM + epsilon);
#pragma unroll
            for (int dim = 0; dim < 8; ++dim) values[dim] = rounded(rounded(values[dim] * factor) * weights[dim]);
        }
        bool is_first = threadIdx.x % TOKEN_LANES < TOKEN_LANES / 2;
#pragma unroll
        for (int dim = 0; dim < 8; ++dim) {
            float other = __shfl_xor_sync(~0u, values[dim], TOKEN_LANES / 2);
            values[dim] = rounded(values[dim] * cosines[dim] + (is_first ? -other : other) * sines[dim]);
        }
    }
};

struct Softmax {
    float top, total, output[8];
    __device__ void raise(float new_top) {
        float decay = exp2f(top - new_top);
        total *= decay, top = new_top;
#pragma unroll
        for (int dim = 0; dim < 8; ++dim) output[dim] *= decay;
    }
    __device__ void add(float score, const float *values) {  // of a score up to `top`
        float weight = exp2f(score - top);
        total += weight;
#pragma unroll
        for (int dim = 0; dim < 8; ++dim) output[dim] = fmaf(weight, values[dim], output[dim]);
    }
    __device__ void merge(float other_top, float other_total, const float *other) {
        raise(fmaxf(top, other_top));
        float scale = exp2f(other_top - top);
        total = fmaf(scale, other_total, total);
#pragma unroll
        for (int dim = 0; dim < 8; ++dim) output[dim] = fmaf(scale, other[dim], output[dim]);
    }
};

__device__ inline u32 pair_up(float value) {  // with the next lane's
    return narrow2(value, __shfl_down_sync(~0u, value, 1));
}

// Attention of one row, for the query heads of one KV head, to a split of its context. The last split adds the row's
// token and writes it to the caches. The first K and V are loaded before q is there, since earlier steps wrote them.
__device__ inline void attend(const Step &step, const Tokens &tokens, const Layer &layer, int row, int head, int split,
                              u32 epoch, float *shared) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dims = lane % TOKEN_LANES * LANE_DIMS;
    int group = warp * TOKENS + lane / TOKEN_LANES;
    int past = tokens.positions[row], splits = tokens.splits[row];
    int start = int(long(past) * split / splits), end = int(long(past) * (split + 1) / splits);
    const int *table = step.tables + tokens.table_starts[row];
    uint4 keys[LOADS], values[LOADS];
    auto load = [&](int first) {
#pragma unroll
        for (int at = 0; at < LOADS; ++at) {
            int token = first + at * WARPS * TOKENS;
            if (token < end) {
                u64 slot = u64(table[token / BLOCK_SIZE]) * BLOCK_SIZE + token % BLOCK_SIZE;
                u64 from = slot * KV + head * HEAD_DIM + dims;
                keys[at] = *reinterpret_cast<const uint4 *>(layer.keys + from);
                values[at] = *reinterpret_cast<const uint4 *>(layer.values + from);
            } else
                keys[at] = values[at] = make_uint4(0, 0, 0, 0);
        }
    };
    load(start + group);
    Head turned;
    widen(*reinterpret_cast<const uint4 *>(step.cosines + row * HEAD_DIM + dims), turned.cosines);
    widen(*reinterpret_cast<const uint4 *>(step.sines + row * HEAD_DIM + dims), turned.sines);
    float query_scale[8], key_scale[8];
    if (HAS_NORMS) {
        widen(*reinterpret_cast<const uint4 *>(layer.q_norm + dims), query_scale);
        widen(*reinterpret_cast<const uint4 *>(layer.k_norm + dims), key_scale);
    }

    const u64 *qkv = step.qkv + row * (QKV / 2);
    bool adds_own = split == splits - 1 && warp == 0;
    uint4 packed[GROUPS], own[2];
    await<2, GROUPS>(epoch, [&](int of) { return qkv + ((head * GROUPS + of) * HEAD_DIM + dims) / 2; }, packed);
    if (adds_own) await<2, 2>(epoch, [&](int of) { return qkv + (QUERY + of * KV + head * HEAD_DIM + dims) / 2; }, own);
    __syncwarp();
    float query[GROUPS][8];
    Softmax states[GROUPS];
#pragma unroll
    for (int of = 0; of < GROUPS; ++of) {
        widen(packed[of], query[of]);
        turned.turn(query[of], query_scale, float(layer.q_epsilon));
        states[of].top = LOWEST, states[of].total = 0.f;
#pragma unroll
        for (int dim = 0; dim < 8; ++dim) states[of].output[dim] = 0.f;
#pragma unroll
        for (int dim = 0; dim < 8; ++dim) query[of][dim] *= step.scaling * 1.4426950408889634f;
    }
    auto score = [&](int of, const float *key, bool is_seen) {
        float sum = 0.f;
#pragma unroll
        for (int dim = 0; dim < 8; ++dim) sum = fmaf(query[of][dim], key[dim], sum);
        sum = sum_lanes(sum, TOKEN_LANES);
        return is_seen ? sum : 2 * LOWEST;  // its weight is 0 for any top
    };
    if (adds_own) {
        float key[8], value[8];
        widen(own[0], key), widen(own[1], value);
        turned.turn(key, key_scale, float(layer.k_epsilon));
        if (lane < TOKEN_LANES) {
            u64 to = tokens.slots[row] * KV + head * HEAD_DIM + dims;
            *reinterpret_cast<uint4 *>(layer.keys + to) = narrow8(key);
            *reinterpret_cast<uint4 *>(layer.values + to) = own[1];
        }
#pragma unroll
        for (int of = 0; of < GROUPS; ++of) {
            float scored = score(of, key, lane < TOKEN_LANES);
            states[of].raise(fmaxf(states[of].top, scored)), states[of].add(scored, value);
        }
    }
    for (int first = start + warp * TOKENS; first < end; first += LOADS * WARPS * TOKENS) {
        int own = first + lane / TOKEN_LANES;
        uint4 held_keys[LOADS], held_values[LOADS];
#pragma unroll
        for (int at = 0; at < LOADS; ++at) held_keys[at] = keys[at], held_values[at] = values[at];
        if (first + LOADS * WARPS * TOKENS < end) load(own + LOADS * WARPS * TOKENS);
        float scores[GROUPS][LOADS], tops[GROUPS];
#pragma unroll
        for (int of = 0; of < GROUPS; ++of) tops[of] = states[of].top;
#pragma unroll
        for (int at = 0; at < LOADS; ++at) {
            float key[8];
            widen(held_keys[at], key);
#pragma unroll
            for (int of = 0; of < GROUPS; ++of) {
                scores[of][at] = score(of, key, own + at * WARPS * TOKENS < end);
                tops[of] = fmaxf(tops[of], scores[of][at]);
            }
        }
#pragma unroll
        for (int of = 0; of < GROUPS; ++of) states[of].raise(tops[of]);
#pragma unroll
        for (int at = 0; at < LOADS; ++at) {
            float value[8];
            widen(held_values[at], value);
#pragma unroll
            for (int of = 0; of < GROUPS; ++of) states[of].add(scores[of][at], value);
        }
    }

    // The groups of lanes of a warp, then the warps.
#pragma unroll
    for (int of = 0; of < GROUPS; ++of) {
#pragma unroll
        for (int step = TOKEN_LANES; step < 32; step <<= 1) {
            float top = __shfl_xor_sync(~0u, states[of].top, step), other[8];
            float total = __shfl_xor_sync(~0u, states[of].total, step);
#pragma unroll
            for (int dim = 0; dim < 8; ++dim) other[dim] = __shfl_xor_sync(~0u, states[of].output[dim], step);
            states[of].merge(top, total, other);
        }
        float *to = shared + (of * WARPS + warp) * WIDTH;
        if (lane < TOKEN_LANES)
#pragma unroll
            for (int dim = 0; dim < 8; ++dim) to[dims + dim] = states[of].output[dim];
        if (lane == 0) to[HEAD_DIM] = states[of].top, to[HEAD_DIM + 1] = states[of].total;
    }
    sync_block();
    u64 *partial = step.partial + u64((row * KV_HEADS + head) * MAX_SPLITS + split) * GROUPS * WIDTH;
    u64 *attended = step.attended + (row * QUERY + head * GROUPS * HEAD_DIM) / 2;
    for (int at = threadIdx.x; at < GROUPS * HEAD_DIM; at += THREADS) {
        const float *from = shared + at / HEAD_DIM * WARPS * WIDTH;
        float top = LOWEST, total = 0.f, output = 0.f;
#pragma unroll
        for (int of = 0; of < WARPS; ++of) top = fmaxf(top, from[of * WIDTH + HEAD_DIM]);
#pragma unroll
        for (int of = 0; of < WARPS; ++of) {
            float weight = exp2f(from[of * WIDTH + HEAD_DIM] - top);
            total += weight * from[of * WIDTH + HEAD_DIM + 1], output += weight * from[of * WIDTH + at % HEAD_DIM];
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

// Merges the splits of a row's query heads of one KV head, a thread for each dimension.
__device__ inline void merge_splits(const Step &step, int row, int head, int splits, u32 epoch) {
    constexpr int TOGETHER = 4;  // splits per load
    u64 *attended = step.attended + (row * QUERY + head * GROUPS * HEAD_DIM) / 2;
    for (int at = threadIdx.x; at < GROUPS * HEAD_DIM; at += THREADS) {
        const u64 *from = step.partial + (u64(row * KV_HEADS + head) * MAX_SPLITS * GROUPS + at / HEAD_DIM) * WIDTH;
        float top = LOWEST, total = 0.f, output = 0.f;
        for (int first = 0; first < splits; first += TOGETHER) {
            u64 sums[TOGETHER][2], own[TOGETHER][2];
            bool is_there;
            Patience patience;
            do {
#pragma unroll
                for (int split = 0; split < TOGETHER; ++split) {
                    const u64 *part = from + at_most(first + split, splits - 1) * GROUPS * WIDTH;
                    read_words(part + HEAD_DIM, sums[split]), read_words(part + at % HEAD_DIM / 2 * 2, own[split]);
                }
                is_there = true;
#pragma unroll
                for (int split = 0; split < TOGETHER; ++split)
#pragma unroll
                    for (int of = 0; of < 2; ++of) is_there &= is_of(sums[split][of], epoch) && is_of(own[split][of], epoch);
                patience.lose();
            } while (!is_there);
#pragma unroll
            for (int split = 0; split < TOGETHER; ++split)
                if (first + split < splits) {
                    float other = __uint_as_float(u32(sums[split][0])), higher = fmaxf(top, other);
                    float decay = exp2f(top - higher), scale = exp2f(other - higher);
                    total = decay * total + scale * __uint_as_float(u32(sums[split][1]));
                    output = decay * output + scale * __uint_as_float(u32(at % 2 ? own[split][1] : own[split][0]));
                    top = higher;
                }
        }
        __syncwarp();
        u32 pair = pair_up(output / total);
        if (at % 2 == 0) write_word(attended + spot(at / 2), pair, epoch);
    }
}

// All of a layer's attention: first the splits, which wait for q, k and v alone, then the merges, which wait for splits.
__device__ inline void attend_all(const Step &step, const Tokens &tokens, const Layer &layer, u32 epoch, float *shared) {
    int before = 0;
    for (int row = 0; row < tokens.num_rows; ++row) {
        int units = tokens.splits[row] * KV_HEADS, first = (blockIdx.x + GRID - before % GRID) % GRID;
        for (int unit = first; unit < units; unit += GRID)
            attend(step, tokens, layer, row, unit % KV_HEADS, unit / KV_HEADS, epoch, shared);
        before += units;
    }
    for (int at = GRID - 1 - blockIdx.x; at < tokens.num_rows * KV_HEADS; at += GRID)
        if (int row = at / KV_HEADS, splits = tokens.splits[row]; splits > 1)
            merge_splits(step, row, at % KV_HEADS, splits, epoch);
}
