// The final norm, the head, and the draw of a token for each row, by the rules of gumbel_draw.py without filters.

// A block's tokens of the vocabulary, in halves of 8 rows of the head. It adds up a group of halves at once.
constexpr int GROUP = 2 * TOGETHER, HIDDEN_PIECES = HIDDEN / PIECE;
struct HeadShare {
    int first, end, num_groups;
    __device__ HeadShare(int vocab_size) {
        long halves = up(vocab_size, 8);
        int from = int(halves * blockIdx.x / GRID), to = int(halves * (blockIdx.x + 1) / GRID);
        first = 8 * from, end = at_most(8 * to, vocab_size), num_groups = up(to - from, GROUP);
    }
};

__device__ inline void fetch_head(const Step &step, Ring &ring) {
    HeadShare share(step.vocab_size);
    int lane = threadIdx.x % 32, num_slots = share.num_groups * HIDDEN_PIECES * GROUP;
    for (int at = 0; at < num_slots; ++at) {
        int group = at / (HIDDEN_PIECES * GROUP), piece = at / GROUP % HIDDEN_PIECES, half = at % GROUP;
        // The first ones come while blocks still read from one another. Not all slots at once: one without rows is full at
        // once, while a slow lane may still wait for its last round.
        ring.fill(Source(step.head, share.first + (group * GROUP + half) * 8, share.end, piece, lane % 8), lane,
                  at < SLOTS ? FLIGHT : at_most(HEAD_FLIGHT, SLOTS - 1));
    }
}

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

struct Best {  // a row's best score so far, and the first token that has it
    float score = -infinity();
    int token = 0;
    __device__ void take(float other, int of) {
        if (other > score || other == score && of < token) score = other, token = of;
    }
    __device__ void take_lane(int step) {
        float other = __shfl_xor_sync(~0u, score, step);
        take(other, __shfl_xor_sync(~0u, token, step));
    }
};

struct Draw {  // of a row
    u64 key;
    float inverse;
    bool has_noise;
    __device__ Draw(const Tokens &tokens, int row)
        : key(tokens.noise_keys[row]), inverse(tokens.inverse_temperatures[row]), has_noise(tokens.noise_scales[row] > 0.f) {}
    __device__ static u32 mixed(u32 bits) {
        bits = (bits ^ bits >> 16) * 0x7feb352du;
        bits = (bits ^ bits >> 15) * 0x846ca68bu;
        return bits ^ bits >> 16;
    }
    __device__ static float noise(int token, u64 key, u32 gamma) {
        u32 bits = mixed(mixed(u32(token + 1) * gamma + u32(key)) + u32(key >> 32));
        float uniform = fminf((float(bits >> 1) + 0.5f) * 4.656612873077393e-10f, 1.f - 5.960464477539063e-08f);
        float small = uniform * (1.f + uniform * (0.5f + uniform * (1.f / 3 + uniform * 0.25f)));
        return -__logf(uniform < 0.015625f ? small : -__logf(1.f - uniform));
    }
    __device__ float score(float logit, int token, u32 gamma) const {
        float score = has_noise ? logit * inverse + noise(token, key, gamma) : logit;
        return score == score ? score : infinity();  // comparisons would ignore NaN
    }
};

// The best of all threads of a block, by row; in threads of rows that `shared` [WARPS, 8] then tells.
__device__ inline Best best_of_block(Best best, float2 *shared) {
    int lane = threadIdx.x % 32;
    best.take_lane(8), best.take_lane(16);
    if (lane < 8) shared[threadIdx.x / 32 * 8 + lane] = make_float2(best.score, __int_as_float(best.token));
    sync_block();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        float2 other = shared[warp * 8 + lane % 8];
        best.take(other.x, __float_as_int(other.y));
    }
    return best;
}

__device__ inline void draw_tokens(const Step &step, const Tokens &tokens, float *squares, Ring &ring, Parts &parts, u32 epoch) {
    int num_rows = tokens.num_rows, row = threadIdx.x % 8;
    HeadShare share(step.vocab_size);
    Inputs<HIDDEN> inputs;
    {
        uint4 scale[inputs.COUNT];
        inputs.load_scale(step.norm, scale);
        inputs.template wait<HIDDEN>(step.hidden, epoch, num_rows, 0);
        inputs.normalise(scale, step.norm, step.norm_epsilon, squares);
    }
    Draw draw(tokens, row);
    Best best;
#pragma unroll 1
    for (int group = 0; group < share.num_groups; ++group) {
        Sums<GROUP> sums;
        sums.template multiply<HIDDEN_PIECES>(ring, inputs.packed);
        add_up(parts, sums, [&](int tile, int pair, int, Totals totals) {
            int token = share.first + group * GROUP * 8 + tile * 16 + pair * 2;
#pragma unroll
            for (int of = 0; of < 2; ++of)
                if (row < num_rows && token + of < share.end) {
                    float logit = rounded(totals(2 * pair + of));
                    if (step.logits) step.logits[u64(row) * step.vocab_size + token + of] = bf16(narrow2(logit, 0.f));
                    best.take(draw.score(logit, token + of, step.gamma), token + of);
                }
        });
    }
    ++epoch;
    best = best_of_block(best, reinterpret_cast<float2 *>(parts.next()));
    if (threadIdx.x < num_rows) {
        u64 *to = step.best + (blockIdx.x * ROWS + row) * 2;
        write_word(to, __float_as_uint(best.score), epoch), write_word(to + 1, best.token, epoch);
    }
    row = GRID - 1 - blockIdx.x;  // which this block decides
    if (row >= num_rows) return;
    best = Best();
    for (int at = threadIdx.x; at < GRID; at += THREADS) {
        u64 words[2];
        Patience patience;
        do {
            read_words(step.best + (at * ROWS + row) * 2, words);
            patience.lose();
        } while (!is_of(words[0], epoch) || !is_of(words[1], epoch));
        best.take(__uint_as_float(u32(words[0])), int(words[1]));
    }
    __syncwarp();
    best.take_lane(1), best.take_lane(2), best.take_lane(4);
    best = best_of_block(best, reinterpret_cast<float2 *>(parts.next()));
    bool is_finite = best.score > -infinity() && best.score < infinity();
    if (threadIdx.x > 0) return;
    int token = is_finite ? best.token : step.non_finite, sample = tokens.samples[row];
    step.sampled[sample] = token;
    if (step.host_sampled) step.host_sampled[sample] = token;
}
