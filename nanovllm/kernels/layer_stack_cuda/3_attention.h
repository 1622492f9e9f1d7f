// A step's attention over the paged caches, in splits of contexts, merged in order.

struct Tokens {  // of the step's rows, in shared memory: a barrier over the grid empties the L1 cache
    int positions[ROWS], table_starts[ROWS];
    u64 slots[ROWS];
};

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

// Attention of one row, for the query heads of one KV head, to a split of its context. The last split adds the row's
// token and writes it to the caches. The first K and V are loaded before the barrier, since earlier steps wrote them.
__device__ inline void attend(const Step &step, const Tokens &tokens, const Layer &layer, int row, int head, int split,
                              int splits, Barrier *barrier, float *shared) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dims = lane % TOKEN_LANES * LANE_DIMS;
    int group = warp * TOKENS + lane / TOKEN_LANES;
    int past = tokens.positions[row];
    int start = int(long(past) * split / splits), end = int(long(past) * (split + 1) / splits);
    const int *table = step.tables + tokens.table_starts[row];
    uint4 keys[AHEAD], values[AHEAD];
    auto load = [&](int first) {
#pragma unroll
        for (int at = 0; at < AHEAD; ++at) {
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
    if (barrier) barrier->wait();

    const bf16 *qkv = step.qkv + row * QKV;
    bool adds_own = split == splits - 1 && warp == 0;
    uint4 packed[GROUPS], own_key, own_value;
#pragma unroll
    for (int of = 0; of < GROUPS; ++of)
        packed[of] = load_fresh(qkv + (head * GROUPS + of) * HEAD_DIM + dims);
    if (adds_own) {
        own_key = load_fresh(qkv + QUERY + head * HEAD_DIM + dims);
        own_value = load_fresh(qkv + QUERY + KV + head * HEAD_DIM + dims);
    }
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
        widen(own_key, key), widen(own_value, value);
        turned.turn(key, key_scale, float(layer.k_epsilon));
        if (lane < TOKEN_LANES) {
            u64 to = tokens.slots[row] * KV + head * HEAD_DIM + dims;
            *reinterpret_cast<uint4 *>(layer.keys + to) = narrow8(key);
            *reinterpret_cast<uint4 *>(layer.values + to) = own_value;
        }
#pragma unroll
        for (int of = 0; of < GROUPS; ++of) {
            float own = score(of, key, lane < TOKEN_LANES);
            states[of].raise(fmaxf(states[of].top, own)), states[of].add(own, value);
        }
    }
    for (int first = start + warp * TOKENS; first < end; first += AHEAD * WARPS * TOKENS) {
        int own = first + lane / TOKEN_LANES;
        uint4 held_keys[AHEAD], held_values[AHEAD];
#pragma unroll
        for (int at = 0; at < AHEAD; ++at) held_keys[at] = keys[at], held_values[at] = values[at];
        if (first + AHEAD * WARPS * TOKENS < end) load(own + AHEAD * WARPS * TOKENS);
        float scores[GROUPS][AHEAD], tops[GROUPS];
#pragma unroll
        for (int of = 0; of < GROUPS; ++of) tops[of] = states[of].top;
#pragma unroll
        for (int at = 0; at < AHEAD; ++at) {
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
        for (int at = 0; at < AHEAD; ++at) {
            float value[8];
            widen(held_values[at], value);
#pragma unroll
            for (int of = 0; of < GROUPS; ++of) states[of].add(scores[of][at], value);
        }
    }

    // The groups of lanes of a warp, then the warps.
    constexpr int WIDTH = HEAD_DIM + 2;
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
        u64 place = u64(row * HEADS + head * GROUPS + at / HEAD_DIM) * splits + split;
        step.partial[place * HEAD_DIM + at % HEAD_DIM] = output;
        if (at % HEAD_DIM == 0) step.sums[2 * place] = top, step.sums[2 * place + 1] = total;
    }
    sync_block();
}

// Merges the splits of all heads of R rows into shared memory.
template <int R> __device__ inline void merge_splits(const Step &step, int splits, uint4 *to) {
    for (int at = threadIdx.x; at < R * QUERY / 8; at += THREADS) {
        u64 place = u64(at / (HEAD_DIM / 8)) * splits;
        const float *sums = step.sums + 2 * place, *partial = step.partial + place * HEAD_DIM + at % (HEAD_DIM / 8) * 8;
        Softmax state = {LOWEST, 0.f, {}};
        for (int first = 0; first < splits; first += AHEAD) {
            uint4 parts[AHEAD][2];
            float2 own[AHEAD];
#pragma unroll
            for (int split = 0; split < AHEAD; ++split) {
                int of = min(first + split, splits - 1);
                own[split] = __ldcg(reinterpret_cast<const float2 *>(sums + 2 * of));
                parts[split][0] = load_fresh(partial + of * HEAD_DIM), parts[split][1] = load_fresh(partial + of * HEAD_DIM + 4);
            }
#pragma unroll
            for (int split = 0; split < AHEAD; ++split)
                if (first + split < splits)
                    state.merge(own[split].x, own[split].y, reinterpret_cast<const float *>(parts[split]));
        }
        float factor = state.total > 0.f ? 1.f / state.total : 0.f;
#pragma unroll
        for (int dim = 0; dim < 8; ++dim) state.output[dim] *= factor;
        to[at] = narrow8(state.output);
    }
    sync_block();
}
