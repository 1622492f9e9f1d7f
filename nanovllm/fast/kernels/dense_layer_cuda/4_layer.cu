// What completes each product's rows, and the roles of a block's warps.

// Rows of an item that a warp completes at once, and their sums over the splits: of two features, and of two more of a
// second block.
template <class P>
struct Rows {
    static constexpr int COUNT = P::BATCH, STRIDE = CONSUMERS / 32;
    const Item& item;
    const int num_rows, first;  // first: of the batch, among those of the split

    DEVICE int place(int at) const { return first + threadIdx.x / 32 - 4 + at * STRIDE; }
    DEVICE bool is_there(int at) const {
        return place(at) < P::SHARE && item.row + item.split * P::SHARE + place(at) < num_rows;
    }
    // Others are read in place of rows that are not there, so that no branch keeps rows from being computed together.
    DEVICE int column(int at) const { return min(item.split * P::SHARE + min(place(at), P::SHARE - 1), COLUMNS - 1); }
    DEVICE int row(int at) const { return min(item.row + column(at), num_rows - 1); }

    // Slots of the rows' adapters, -1 for none.
    DEVICE void load_slots(bool is_adapted, const Layer& layer, int (&slots)[COUNT]) const {
#pragma unroll
        for (int at = 0; at < COUNT; ++at) slots[at] = is_adapted ? layer.row_slots[row(at)] : -1;
    }

    DEVICE void load(const float* tile, int first, int second, float2 (&parts)[COUNT][P::SPLITS][P::BLOCKS]) const {
#pragma unroll
        for (int at = 0; at < COUNT; ++at)
#pragma unroll
            for (int split = 0; split < P::SPLITS; ++split)
#pragma unroll
                for (int of = 0; of < P::BLOCKS; ++of)
                    parts[at][split][of] = __ldcg(reinterpret_cast<const float2*>(
                        tile + (split * COLUMNS + column(at)) * P::WIDTH + (of ? second : first)));
    }
};

template <int SPLITS, int BLOCKS>
DEVICE float2 sum_splits(const float2 (&parts)[SPLITS][BLOCKS], int of) {
    float2 total = parts[0][of];
#pragma unroll
    for (int split = 1; split < SPLITS; ++split) total.x += parts[split][of].x, total.y += parts[split][of].y;
    return total;
}

// The residual sum after a product, its squares, and its product with a norm's weight (none after the last layer).
template <class P, int PRODUCT>
DEVICE void add_rows(const Layer& layer, const Memory& memory, Places& places, u32* counters, const bf16* residual,
                     const bf16* weight, bf16* rows, bf16* scaled, float* squares, bool is_adapted) {
    typedef Rows<P> Batch;
    const LowRank& low_rank = layer.low_rank[PRODUCT];
    is_adapted &= low_rank.down != nullptr;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int number = blockIdx.x; number < P::ITEMS; number += gridDim.x) {
        const Item item = Item::of(number, P());
        const int feature = item.tile * 64 + 2 * lane;
        const u32 factors = weight ? load_pair(weight + feature) : 0;
        int adapters[Batch::COUNT];
        Batch{item, layer.num_rows, 0}.load_slots(is_adapted, layer, adapters);
        float sums[P::SUMS];
        multiply_item<P>(sums, item, memory, places);
        const float* tile = exchange<P>(sums, item, layer.partial, counters);
        if (is_adapted && number == blockIdx.x) await_helpers(PRODUCT);
#pragma unroll 1
        for (int from = 0; from < P::SHARE; from += Batch::COUNT * Batch::STRIDE) {
            const Batch own{item, layer.num_rows, from};
            float2 parts[Batch::COUNT][P::SPLITS][1];
            u32 before[Batch::COUNT];
            float2 totals[Batch::COUNT][1];
            int places[Batch::COUNT];
            if (from) own.load_slots(is_adapted, layer, adapters);
            own.load(tile, 2 * lane, 0, parts);
#pragma unroll
            for (int i = 0; i < Batch::COUNT; ++i)
                before[i] = load_fresh(residual + own.row(i) * HIDDEN + feature);
#pragma unroll
            for (int i = 0; i < Batch::COUNT; ++i) places[i] = own.row(i), totals[i][0] = sum_splits(parts[i], 0);
            if (is_adapted) expand<P>(totals, layer, low_rank, adapters, places, 0, feature);
#pragma unroll
            for (int i = 0; i < Batch::COUNT; ++i) {
                const int row = own.row(i);
                const float2 total = totals[i][0];
                const float first = rounded(rounded(total.x) + low(before[i]));
                const float second = rounded(rounded(total.y) + high(before[i]));
                const float square = sum_lanes(first * first + second * second, 32);
                if (!own.is_there(i)) continue;
                store_pair(rows + row * HIDDEN + feature, first, second);
                if (!weight) continue;
                store_pair(scaled + row * HIDDEN + feature, first * low(factors), second * high(factors));
                if (lane == 0) squares[item.tile * ROWS + row] = square;
            }
        }
    }
}

// SiLU of the gates times the others, of two rows.
DEVICE u32 gated(u32 gates, u32 ups) {
    auto silu = [](float gate) { return __fdividef(gate, 1.f + __expf(-gate)); };
    return narrow2(silu(low(gates)) * low(ups), silu(high(gates)) * high(ups));
}

DEVICE void gate_rows(const Layer& layer, const Memory& memory, Places& places, bool is_adapted) {
    typedef Gate P;
    const LowRank& low_rank = layer.low_rank[1];
    is_adapted &= low_rank.down != nullptr;
    const int thread = threadIdx.x - 128, lane = thread % 32, half = thread / 128;
#pragma unroll 1
    for (int number = blockIdx.x; number < P::ITEMS; number += gridDim.x) {
        const Item item = Item::of(number, P());
        const int first = item.row + (P::BLOCKS == 1 ? half * P::OWN_COLUMNS : 0);
        const int block = item.tile * P::BLOCKS + (P::BLOCKS == 2 ? half : 0);
        const int own_feature = block * 32 + thread / 32 % 4 * 8 + lane / 4;  // of `sums`
        float sums[P::SUMS];
        GateFactors factors;
        multiply_item<P>(sums, item, memory, places);
        if (is_adapted) factors.begin(layer, low_rank, first, own_feature);
        if (number == blockIdx.x) await_helpers(1);
        if (is_adapted) factors.add(sums, layer, low_rank, first, own_feature);
        const int feature = block * 32 + thread / 32 % 4 * 8 + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < P::OWN_COLUMNS / 8; ++j) {
            const float2 scale = *reinterpret_cast<const float2*>(memory.scales + first + 8 * j + 2 * (lane % 4));
            u32 pair = gated(narrow2(sums[4 * j] * scale.x, sums[4 * j + 1] * scale.y),
                             narrow2(sums[4 * j + 2] * scale.x, sums[4 * j + 3] * scale.y));
            // From two rows of one feature to two features of one row.
            asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
            const int row = first + 8 * j + lane / 4;
            if (row < layer.num_rows) *reinterpret_cast<u32*>(layer.inner_rows + row * INNER + feature) = pair;
        }
    }
}

// Four elements of a row that belong to a lane: two pairs, one of each half of a head.
struct Four {
    u32 pairs[2];
    DEVICE void load(const bf16* from) { pairs[0] = load_pair(from), pairs[1] = load_pair(from + HEAD_DIM / 2); }
    DEVICE float operator[](int i) const { return i % 2 ? high(pairs[i / 2]) : low(pairs[i / 2]); }
};

// Norm and rotary embedding of a head.
DEVICE void rotate(float (&values)[4], const Four& weights, float epsilon, const Four& cosines, const Four& sines) {
    if (HAS_NORMS) {
        const float square = values[0] * values[0] + values[1] * values[1] + values[2] * values[2] + values[3] * values[3];
        const float factor = rsqrtf(sum_lanes(square, HEAD_DIM / 4) / HEAD_DIM + epsilon);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = rounded(rounded(values[i] * factor) * weights[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float first = values[i], second = values[2 + i];
        values[i] = first * cosines[i] - second * sines[i];
        values[2 + i] = second * cosines[2 + i] + first * sines[2 + i];
    }
}

DEVICE void store_heads(const Layer& layer, const Memory& memory, Places& places, u32* counters, bool is_adapted) {
    typedef Next P;
    typedef Rows<P> Batch;
    constexpr int LANES = HEAD_DIM / 4;
    const LowRank& low_rank = layer.low_rank[3];
    is_adapted &= low_rank.down != nullptr;
    const int lane = threadIdx.x % 32, dim = 2 * (lane % LANES), own_feature = lane / LANES * HEAD_DIM + dim;
#pragma unroll 1
    for (int number = blockIdx.x; number < P::ITEMS; number += gridDim.x) {
        const Item item = Item::of(number, P());
        const int feature = item.tile * P::WIDTH + own_feature, head = feature - dim;
        const bool is_query = head < QUERY, is_value = head >= QUERY + KV;
        Four weights = {}, biases = {};
        if (HAS_NORMS) weights.load((is_query ? layer.q_norm : layer.k_norm) + dim);
        if (HAS_BIAS) biases.load(layer.bias + feature);
        int adapters[Batch::COUNT];
        Batch{item, layer.num_rows, 0}.load_slots(is_adapted, layer, adapters);
        float sums[P::SUMS];
        multiply_item<P>(sums, item, memory, places);
        const float* tile = exchange<P>(sums, item, layer.partial, counters);
        if (number == blockIdx.x) await_helpers(3);
#pragma unroll 1
        for (int from = 0; from < P::SHARE; from += Batch::COUNT * Batch::STRIDE) {
            const Batch own{item, layer.num_rows, from};
            float2 parts[Batch::COUNT][P::SPLITS][2];
            Four cosines[Batch::COUNT], sines[Batch::COUNT];
            long long slots[Batch::COUNT];
            float2 halves[Batch::COUNT][2];
            int places[Batch::COUNT];
            if (from) own.load_slots(is_adapted, layer, adapters);
            own.load(tile, own_feature, own_feature + HEAD_DIM / 2, parts);
#pragma unroll
            for (int i = 0; i < Batch::COUNT; ++i) {
                cosines[i].load(layer.cosines + own.row(i) * HEAD_DIM + dim);
                sines[i].load(layer.sines + own.row(i) * HEAD_DIM + dim);
                slots[i] = layer.slots[own.row(i)];
                places[i] = own.row(i), halves[i][0] = sum_splits(parts[i], 0), halves[i][1] = sum_splits(parts[i], 1);
            }
            if (is_adapted) expand<P>(halves, layer, low_rank, adapters, places, is_query ? 0 : is_value ? 2 : 1, feature);
#pragma unroll
            for (int i = 0; i < Batch::COUNT; ++i) {
                const int row = own.row(i);
                bf16* to = layer.query + row * QUERY + feature;
                if (!is_query) to = (is_value ? layer.values - KV : layer.keys) + slots[i] * KV + feature - QUERY;
                const float scale = memory.scales[ROWS + row];
                const float totals[4] = {halves[i][0].x, halves[i][0].y, halves[i][1].x, halves[i][1].y};
                float plain[4], turned[4];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    plain[k] = turned[k] = rounded(totals[k] * scale + (HAS_BIAS ? biases[k] : 0.f));
                rotate(turned, weights, is_query ? layer.q_epsilon : layer.k_epsilon, cosines[i], sines[i]);
#pragma unroll
                for (int k = 0; k < 4; ++k) turned[k] = is_value ? plain[k] : turned[k];
                if (!own.is_there(i)) continue;
                store_pair(to, turned[0], turned[1]);
                store_pair(to + HEAD_DIM / 2, turned[2], turned[3]);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- roles

DEVICE void arrive_before(int product, const Layer& layer) {
    fence_copies();
    sync_consumers();
    if (threadIdx.x == 128) arrive_with_grid(layer.passed + product);
}

// Two warps: the factors of the norm before a product, and the rows' products with their adapters' `down`.
template <class P, int PRODUCT>
DEVICE void help(const Layer& layer, const Memory& memory, int tiles, const bf16* states, const float* squares,
                 float epsilon) {
    const LowRank& low_rank = layer.low_rank[PRODUCT];
    const int groups = P::PARTS * low_rank.rank / 8, units = low_rank.down ? tiles * groups * P::SLICES : 0;
    const int place = gridDim.x - 1 - blockIdx.x;  // the last blocks have no items
    const bool has_items = blockIdx.x < P::ITEMS, shrinks = place < units;
    if (!units && !(has_items && squares)) return;
    u32 *counter = layer.passed + 4 + PRODUCT, begin = 0;
    if (units && threadIdx.x == 64) {
        begin = begin_of_round(counter);  // before this block arrives
        if (!shrinks) arrive_with_grid(counter);
    }
    if (!shrinks && !has_items) return;
    int number = (threadIdx.x / 32 - 2) * gridDim.x + place;
    Unit unit = {};
    if (number < units) unit = Unit::of(layer, groups, number, P());
    if (PRODUCT) barrier_wait(memory.passed + 8 * PRODUCT, 0);
    if (shrinks) {
#pragma unroll 1
        while (number < units) {
            shrink<P>(layer, low_rank, states, unit);
            if ((number += 2 * gridDim.x) < units) unit = Unit::of(layer, groups, number, P());
        }
        sync_helpers();
        if (threadIdx.x == 64) arrive_with_grid(counter);
    }
    if (!has_items) return;
    if (squares) compute_scales(memory.scales + PRODUCT / 2 * ROWS, squares, epsilon);
    if (units && threadIdx.x == 64) await(counter, begin, begin, GRID_ROUND);
    arrive_as_helper(PRODUCT);
}

template <bool ADAPTS>
DEVICE void multiply_all(const Layer& layer, const Memory& memory) {
    Places places;
    const bool is_adapted = ADAPTS && layer.num_slots && layer.starts[layer.num_slots];
    if (blockIdx.x >= Output::ITEMS) barrier_wait(memory.passed, 0);  // it arrives at once, at counters that are read before
    u32 *output = layer.exchanged, *down = output + NUM_TILES, *next = down + NUM_TILES;
    add_rows<Output, 0>(layer, memory, places, output, layer.residual, layer.middle_norm, layer.middle_rows,
                        layer.middle_scaled, layer.middle_squares, is_adapted);
    arrive_before(1, layer);
    gate_rows(layer, memory, places, is_adapted);
    arrive_before(2, layer);
    add_rows<Down, 2>(layer, memory, places, down, layer.middle_rows, layer.has_next ? layer.next_norm : nullptr,
                      layer.next_rows, layer.next_scaled, layer.next_squares, is_adapted);
    if (!layer.has_next) return;
    arrive_before(3, layer);
    store_heads(layer, memory, places, next, is_adapted);
}

template <bool ADAPTS>
DEVICE void run_layer(const Layer& layer) {
    extern __shared__ unsigned char dynamic_memory[];
    __shared__ Barriers barriers;
    __shared__ __align__(16) float scales[2 * ROWS];
    Memory memory;
    memory.weights = (shared_address(dynamic_memory) + 1023) / 1024 * 1024;
    memory.inputs = memory.weights + WEIGHT_SLOTS * WEIGHT_BYTES;
    memory.weight_full = shared_address(barriers.weight_full), memory.weight_empty = shared_address(barriers.weight_empty);
    memory.input_full = shared_address(barriers.input_full), memory.input_empty = shared_address(barriers.input_empty);
    memory.passed = shared_address(barriers.passed), memory.scales = scales;
    if (threadIdx.x == 0) {
        for (int i = 0; i < WEIGHT_SLOTS; ++i)
            barrier_init(memory.weight_full + 8 * i, 1), barrier_init(memory.weight_empty + 8 * i, CONSUMERS / 32);
        for (int i = 0; i < INPUT_SLOTS; ++i)
            barrier_init(memory.input_full + 8 * i, 1), barrier_init(memory.input_empty + 8 * i, CONSUMERS / 32);
        for (int i = 0; i < 4; ++i) barrier_init(memory.passed + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    start_next();
    const int warp = threadIdx.x / 32;
    if (warp >= 4) {
        if (ADAPTS) asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
        else asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        await_previous();
        return multiply_all<ADAPTS>(layer, memory);
    }
    if (ADAPTS) asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp == 0 && threadIdx.x == 0) {
        WeightPlaces places;
        fetch_weights<Output>(memory, &layer.output_weight, places);
        barrier_wait(memory.passed, 0);  // else the first inputs would wait for all these weights
        fetch_weights<Gate, true>(memory, &layer.gate_weight, places);
        fetch_weights<Down>(memory, &layer.down_weight, places);
        if (layer.has_next) fetch_weights<Next>(memory, &layer.next_weight, places);
    } else if (warp == 1 && threadIdx.x == 32) {
        Place<INPUT_SLOTS> place;
        u32 begins[4];  // read before this block arrives
        await_previous();
        for (int i = 1; i < 4; ++i) begins[i] = begin_of_round(layer.passed + i);
        fetch_inputs<Output>(memory, &layer.attended, place);
        barrier_arrive(memory.passed);
        prefetch_map(&layer.gate_weight), prefetch_map(&layer.middle), prefetch_map(&layer.down_weight);
        prefetch_map(&layer.inner), prefetch_map(&layer.next_weight), prefetch_map(&layer.next);
        fetch_inputs_after<Gate, ADAPTS>(1, begins[1], layer, memory, &layer.middle, place);
        fetch_inputs_after<Down, ADAPTS>(2, begins[2], layer, memory, &layer.inner, place);
        if (layer.has_next) fetch_inputs_after<Next, ADAPTS>(3, begins[3], layer, memory, &layer.next, place);
    } else if (warp >= 2) {
        const int tiles = ADAPTS ? count_tiles(layer) : 0;
        await_previous();
        help<Output, 0>(layer, memory, tiles, layer.attended_rows, nullptr, 0.f);
        help<Gate, 1>(layer, memory, tiles, layer.middle_scaled, layer.middle_squares, layer.middle_epsilon);
        help<Down, 2>(layer, memory, tiles, layer.inner_rows, nullptr, 0.f);
        if (layer.has_next) help<Next, 3>(layer, memory, tiles, layer.next_scaled, layer.next_squares, layer.next_epsilon);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dense_layer(const __grid_constant__ Layer layer) {
    run_layer<false>(layer);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) adapted_dense_layer(const __grid_constant__ Layer layer) {
    run_layer<true>(layer);
}
