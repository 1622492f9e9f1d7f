// All layers, part by part: see layer_stack.py. The grid has at most one block per multiprocessor.

// A request with NaN continues with token 0 until the host ends it.
__device__ inline long long token_of(const Step &step, long long token) {
    if (token >= 0) return token;
    token = step.sampled[-1 - token < step.num_sampled ? -1 - token : step.num_sampled - 1];
    return token < 0 ? 0 : token;
}

struct Block {  // shared by a block's warps
    Layer layers[2];  // in turn
    Tokens tokens;
    int tables[PACKED_BYTES / 4];
    float squares[WARPS * 8];
    u32 last_epoch;
    __device__ void load(const Step &step, int at) {
        if (at < step.num_layers && threadIdx.x < sizeof(Layer) / 8)
            reinterpret_cast<u64 *>(layers + at % 2)[threadIdx.x] = reinterpret_cast<const u64 *>(step.layers + at)[threadIdx.x];
    }
    __device__ void start(const Step &step, const Packed &packed) {
        int row = threadIdx.x;
        const int *counts = given(step, packed, step.counts);
        if (row < step.num_rows) {
            int position = int(given(step, packed, step.positions)[row]);
            tokens.positions[row] = position, tokens.splits[row] = splits_of(position);
            tokens.slots[row] = given(step, packed, step.slots)[row];
            tokens.table_starts[row] = given(step, packed, step.table_starts)[row];
            long turn = step.embedding ? long(position) * HEAD_DIM : row * HEAD_DIM;
            tokens.cosines[row] = step.cosines + turn, tokens.sines[row] = step.sines + turn;
            tokens.inputs[row] = step.input + row * HIDDEN;
            if (step.embedding)
                tokens.inputs[row] = step.embedding + token_of(step, given(step, packed, step.token_ids)[row]) * HIDDEN;
            if (step.head && counts[row] > 0) {  // there are as many samples as rows before the padding
                int of = int(given(step, packed, step.sample_rows)[row]);
                tokens.samples[of] = row, tokens.noise_keys[of] = given(step, packed, step.noise_keys)[row];
                tokens.inverse_temperatures[of] = given(step, packed, step.inverse_temperatures)[row];
                tokens.noise_scales[of] = given(step, packed, step.noise_scales)[row];
            }
        }
        if (row == 0) {
            int decodes = 0;
            for (int at = 0; at < step.num_rows; ++at) decodes += counts[at] > 0;
            tokens.num_rows = decodes, last_epoch = step.counter[0];
            tokens.tables = step.is_packed ? tables : step.tables;
        }
        if (step.is_packed)
            for (int at = threadIdx.x; at < step.num_tables; at += THREADS + 32) tables[at] = given(step, packed, step.tables)[at];
        load(step, 0);
    }
};

// Product with a weight whose inputs are words of all blocks, some pieces at a time, as registers have room.
template <int DEPTH>
__device__ inline void multiply_words(Ring &ring, Sums<HIDDEN_HALVES> &sums, const u64 *words, u32 epoch, int num_rows) {
    constexpr int PIECES = DEPTH / PIECE, SOME = at_most(PIECES, at_least(1, MOST_AWAITED / STEPS)), REST = PIECES % SOME;
#pragma unroll 1
    for (int first = 0; first < PIECES - REST; first += SOME) {
        Inputs<SOME * PIECE> inputs;
        inputs.template wait<DEPTH>(words, epoch, num_rows, first);
        sums.template multiply<SOME>(ring, inputs.packed);
    }
    if constexpr (REST > 0) {
        Inputs<REST * PIECE> inputs;
        inputs.template wait<DEPTH>(words, epoch, num_rows, PIECES - REST);
        sums.template multiply<REST>(ring, inputs.packed);
    }
}

__device__ inline void run(const Step &step, Block &block, Ring ring, Parts parts) {
    const Tokens &tokens = block.tokens;
    int num_rows = tokens.num_rows;
    u32 epoch = block.last_epoch;
    auto place_of = [](int tile, int pair) { return Share<HIDDEN>::first() + tile * 16 + pair * 2; };
    u32 residual = 0;  // of this thread's two hidden states
    {
        int tile = threadIdx.x / 64, pair = threadIdx.x / 8 % 8, row = threadIdx.x % 8;
        if (row < num_rows && tile * 16 + pair * 2 < Share<HIDDEN>::count())
            residual = *reinterpret_cast<const u32 *>(tokens.inputs[row] + place_of(tile, pair));
    }
    for (int at = 0; at < step.num_layers; ++at) {
        const Layer &layer = block.layers[at % 2];
        bool is_last = at == step.num_layers - 1 && !step.head;
        ++epoch;
        {
            Inputs<HIDDEN> inputs;
            uint4 scale[inputs.COUNT];
            inputs.load_scale(layer.input_norm, scale);
            if (at == 0)
                inputs.load(tokens.inputs, num_rows);
            else
                inputs.template wait<HIDDEN>(step.hidden, epoch - 1, num_rows, 0);
            inputs.normalise(scale, layer.input_norm, layer.input_epsilon, block.squares);
            Sums<QKV_HALVES> sums;
            sums.template multiply<inputs.PIECES>(ring, inputs.packed);
            add_up(parts, sums, [&](int tile, int pair, int row, Totals totals) {
                int own = tile * 16 + pair * 2, place = Share<QKV>::first() + own;
                if (row >= num_rows || own >= Share<QKV>::count()) return;
                float first = totals(2 * pair), second = totals(2 * pair + 1);
                if (HAS_BIAS) {
                    const bf16 *biases = place < QUERY ? layer.q_bias : place < QUERY + KV ? layer.k_bias - QUERY
                                                                                           : layer.v_bias - QUERY - KV;
                    first += wide(biases[place]), second += wide(biases[place + 1]);
                }
                write_word(step.qkv + (row * QKV + place) / 2, narrow2(first, second), epoch);
            });
        }
        attend_all(step, tokens, layer, epoch, parts.spare());

        auto add_to_residual = [&](int tile, int pair, int row, Totals totals, u64 *words, bool is_output) {
            if (row >= step.num_rows || tile * 16 + pair * 2 >= Share<HIDDEN>::count()) return;
            if (row >= num_rows && !is_output) return;
            float first = rounded(totals(2 * pair)) + low(residual), second = rounded(totals(2 * pair + 1)) + high(residual);
            residual = row < num_rows ? narrow2(first, second) : 0;
            int place = row * HIDDEN + place_of(tile, pair);
            if (is_output)
                *reinterpret_cast<u32 *>(step.output + place) = residual;
            else
                write_word(words + spot(place / 2), residual, epoch);
        };
        block.load(step, at + 1);
        {
            Sums<HIDDEN_HALVES> sums;
            multiply_words<QUERY>(ring, sums, step.attended, epoch, num_rows);
            add_up(parts, sums, [&](int tile, int pair, int row, Totals totals) {
                add_to_residual(tile, pair, row, totals, step.middle, false);
            });
        }
        {
            Inputs<HIDDEN> inputs;
            uint4 scale[inputs.COUNT];
            inputs.load_scale(layer.post_norm, scale);
            inputs.template wait<HIDDEN>(step.middle, epoch, num_rows, 0);
            inputs.normalise(scale, layer.post_norm, layer.post_epsilon, block.squares);
            Sums<2 * INNER_TILES> sums;
            sums.template multiply<inputs.PIECES>(ring, inputs.packed);
            add_up(parts, sums, [&](int tile, int pair, int row, Totals totals) {
                int own = tile * 8 + pair * 2;
                if (pair >= 4 || row >= num_rows || own >= Share<INNER>::count()) return;
                float values[2];
#pragma unroll
                for (int of = 0; of < 2; ++of) {
                    float gate = rounded(totals(2 * pair + of));
                    values[of] = gate / (1.f + __expf(-gate)) * rounded(totals(8 + 2 * pair + of));
                }
                write_word(step.inner + spot((row * INNER + Share<INNER>::first() + own) / 2), narrow2(values[0], values[1]), epoch);
            });
        }
        {
            Sums<HIDDEN_HALVES> sums;
            multiply_words<INNER>(ring, sums, step.inner, epoch, num_rows);
            add_up(parts, sums, [&](int tile, int pair, int row, Totals totals) {
                add_to_residual(tile, pair, row, totals, step.hidden, is_last);
            });
        }
    }
    if (step.head) draw_tokens(step, tokens, block.squares, ring, parts, epoch++);
    // The last one out says to the next launch which epoch was the last.
    sync_block();
    if (threadIdx.x == 0 && atomicAdd(step.counter + 1, 1) == GRID - 1) step.counter[0] = epoch, step.counter[1] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    layer_stack(const __grid_constant__ Step step, const __grid_constant__ Packed packed) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Block block;
    float *parts = reinterpret_cast<float *>(memory + SLOTS * SLOT_BYTES);
    Ring ring(memory, reinterpret_cast<u64 *>(parts + 2 * PART));
    if (threadIdx.x == 0) ring.prepare();
    block.start(step, packed);
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        fetch_weights(step.layers, step.num_layers, ring);
        if (step.head) fetch_head(step, ring);
    } else
        run(step, block, ring, Parts{parts, 0});
}
