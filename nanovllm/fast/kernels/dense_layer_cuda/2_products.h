// What a layer computes between its attention and the next layer's, for up to ROWS decodes.
//
//     output product, sum, squares | gate and up, SiLU | down product, sum, squares | next q k v, norms, rotary, KV write
//
// A grid barrier (|) separates the products, since each reads rows that all blocks wrote. A norm is split: a row is
// multiplied by the norm's weight as it is written, with the sum of its squares; the products are divided by the root. The
// roles of a block, which take its items of all four products one after the other:
//
//     warp 0              fetches weights, as far ahead as there are slots, since they depend on no barrier
//     warp 1              fetches inputs, after the barrier
//     warps 2 and 3       compute the norms' factors, and the rows' products with their adapters' `down` factors
//     warpgroups 1 and 2  multiply; blocks that share a tile by splits of its depth exchange sums, and complete rows each

struct Item {
    int tile, row, split, index;  // row: the first; index: of the tile among all row tiles
    int begin, steps;             // of the depth
    template <class P>
    static DEVICE Item of(int number, P) {
        constexpr bool IS_EVEN = P::STEPS % P::SPLITS == 0;  // then a constant
        const int part = number / P::SPLITS, split = number % P::SPLITS, begin = P::STEPS * split / P::SPLITS;
        const int steps = IS_EVEN ? P::STEPS / P::SPLITS : P::STEPS * (split + 1) / P::SPLITS - begin;
        return {part / ROW_TILES, part % ROW_TILES * COLUMNS, split, part, begin, steps};
    }
    // The depth of a step. Tiles begin at different steps, so that blocks do not all read the same inputs at once.
    DEVICE int depth(int step) const { return (begin + (step + tile) % steps) * STEP; }
};

// ------------------------------------------------------------------------------------------------------- fetching

template <class P, bool IS_GATE>
DEVICE void fetch_block(u32 to, const TensorMap* map, u32 barrier, int depth, int row) {
    if constexpr (IS_GATE) fetch_gates(to, map, barrier, depth, row);
    else fetch(to, map, barrier, depth, row);
}

// Slots are filled in order, with few on their way: more would only delay what blocks read from one another.
struct WeightPlaces {
    Place<WEIGHT_SLOTS> next, arriving;
    int num_begun = 0;
    // Waits until the next slot may be filled.
    DEVICE void wait(const Memory& memory) {
        barrier_wait(memory.weight_empty + 8 * next.slot, next.parity ^ 1);
        if (FLIGHT == WEIGHT_SLOTS || num_begun++ < FLIGHT) return;
        barrier_wait(memory.weight_full + 8 * arriving.slot, arriving.parity);
        arriving.advance();
    }
};

template <class P, bool IS_GATE = false>
DEVICE void fetch_weights(const Memory& memory, const TensorMap* map, WeightPlaces& places) {
    Place<WEIGHT_SLOTS>& place = places.next;
#pragma unroll 1
    for (int number = blockIdx.x; number < P::ITEMS; number += gridDim.x) {
        const Item item = Item::of(number, P());
        const int row = item.tile * P::WIDTH;
#pragma unroll 1
        for (int part = 0; part < item.steps * P::BLOCKS; ++part, place.advance()) {
            const u32 full = memory.weight_full + 8 * place.slot, to = memory.weights + place.slot * WEIGHT_BYTES;
            const int depth = item.depth(part / P::BLOCKS) + part % P::BLOCKS * PANEL;
            places.wait(memory);
            barrier_expect(full, WEIGHT_BYTES);
            fetch_block<P, IS_GATE>(to, map, full, depth, row);
            if (P::BLOCKS == 1) fetch_block<P, IS_GATE>(to + BLOCK_BYTES, map, full, depth + PANEL, row);
            else fetch_block<P, IS_GATE>(to + BLOCK_BYTES, map, full, depth, row + 64);
        }
    }
}

template <class P>
DEVICE void fetch_inputs(const Memory& memory, const TensorMap* map, Place<INPUT_SLOTS>& place) {
#pragma unroll 1
    for (int number = blockIdx.x; number < P::ITEMS; number += gridDim.x) {
        const Item item = Item::of(number, P());
#pragma unroll 1
        for (int step = 0; step < item.steps; ++step, place.advance()) {
            const u32 full = memory.input_full + 8 * place.slot, to = memory.inputs + place.slot * INPUT_BYTES;
            const int depth = item.depth(step);
            barrier_wait(memory.input_empty + 8 * place.slot, place.parity ^ 1);
            barrier_expect(full, INPUT_BYTES);
            fetch(to, map, full, depth, item.row);
            fetch(to + PANEL_BYTES, map, full, depth + PANEL, item.row);
        }
    }
}

// The inputs of a product whose rows other blocks write, after the grid's barrier.
template <class P, bool ADAPTS>
DEVICE void fetch_inputs_after(int product, u32 begin, const Layer& layer, const Memory& memory, const TensorMap* map,
                               Place<INPUT_SLOTS>& place) {
    if (blockIdx.x >= P::ITEMS && !(ADAPTS && layer.low_rank[product].down)) return;
    await(layer.passed + product, begin, begin, GRID_ROUND);
    barrier_arrive(memory.passed + 8 * product);
    fence_copies();
    fetch_inputs<P>(memory, map, place);
}

// The factors of a norm, by two warps.
DEVICE void compute_scales(float* scales, const float* squares, float epsilon) {
    for (int row = threadIdx.x % HELPERS; row < ROWS; row += HELPERS) {
        float sum = 0.f;
#pragma unroll 16
        for (int tile = 0; tile < HIDDEN_TILES; ++tile) sum += __ldcg(squares + tile * ROWS + row);
        scales[row] = rsqrtf(sum / HIDDEN + epsilon);
    }
}

// Of the helpers, whose warps arrive for a product.
DEVICE void await_helpers(int product) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + product), "n"(CONSUMERS + HELPERS) : "memory");
}
DEVICE void arrive_as_helper(int product) {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(2 + product), "n"(CONSUMERS + HELPERS) : "memory");
}

// ----------------------------------------------------------------------------------------------------- multiplying

struct Places {
    Place<WEIGHT_SLOTS> weights;
    Place<INPUT_SLOTS> inputs;
};

// Sums [64 features, OWN_COLUMNS] of one item.
template <class P>
DEVICE void multiply_item(float (&sums)[P::SUMS], const Item& item, const Memory& memory, Places& places) {
    const int half = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
    const u32 weight_offset = P::BLOCKS == 1 ? 0 : half * BLOCK_BYTES;
    const u32 input_offset = P::BLOCKS == 1 ? half * (P::OWN_COLUMNS * PANEL * 2) : 0;
    u32 read_weights = 0, read_inputs = 0;  // barriers of slots whose products are under way
    auto release = [&] {
        if (lane == 0 && read_weights) barrier_arrive(read_weights);
        if (lane == 0 && read_inputs) barrier_arrive(read_inputs);
        read_weights = read_inputs = 0;
    };
#pragma unroll 1
    for (int step = 0; step < item.steps; ++step) {
        barrier_wait(memory.input_full + 8 * places.inputs.slot, places.inputs.parity);
#pragma unroll
        for (int panel = 0; panel < 2; ++panel) {
            if (P::BLOCKS == 2 || panel == 0)
                barrier_wait(memory.weight_full + 8 * places.weights.slot, places.weights.parity);
            const u32 left = memory.weights + places.weights.slot * WEIGHT_BYTES + weight_offset +
                             (P::BLOCKS == 1 ? panel * BLOCK_BYTES : 0);
            const u32 right = memory.inputs + places.inputs.slot * INPUT_BYTES + panel * PANEL_BYTES + input_offset;
            products_begin();
#pragma unroll
            for (int k = 0; k < 4; ++k)
                multiply(sums, operand(left + 32 * k, 16, 1024), operand(right + 32 * k, 16, 1024),
                         step | panel | k);
            products_commit();
            products_wait<1>();
            release();
            if (P::BLOCKS == 2 || panel == 1) {
                read_weights = memory.weight_empty + 8 * places.weights.slot;
                places.weights.advance();
            }
        }
        read_inputs = memory.input_empty + 8 * places.inputs.slot;
        places.inputs.advance();
    }
    products_wait<0>();
    pin(sums);
    release();
}

// A thread's sum 4j + 2h + e is of feature 8h + lane / 4 of its warp's 16 and of column 8j + 2 (lane % 4) + e.

// Writes an item's sums [COLUMNS, WIDTH] for the blocks that complete its rows, and waits for theirs.
template <class P>
DEVICE const float* exchange(const float (&sums)[P::SUMS], const Item& item, float* partial, u32* counters) {
    const int thread = threadIdx.x - 128, lane = thread % 32, half = thread / 128;
    float* tile = partial + item.index * (P::SPLITS * COLUMNS * P::WIDTH);
    float* to = tile + item.split * (COLUMNS * P::WIDTH) + (P::BLOCKS == 2 ? half * 64 : 0) + thread / 32 % 4 * 16 + lane / 4;
    const int first = (P::BLOCKS == 1 ? half * P::OWN_COLUMNS : 0) + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < P::SUMS; ++i) __stcg(to + (first + i / 4 * 8 + i % 2) * P::WIDTH + i / 2 % 2 * 8, sums[i]);
    sync_consumers();
    if (thread == 0) meet(counters + item.index, item.split, P::SPLITS);
    sync_consumers();
    return tile;
}
