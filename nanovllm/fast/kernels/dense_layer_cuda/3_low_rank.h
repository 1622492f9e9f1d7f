// Low-rank products of the rows' adapters: `up` of a slot times (`down` of it times a row), added to a product's sums.
//
// Helpers of all blocks multiply rows by `down`, while the consumers multiply the layer's weights. Each sum has a fixed
// order, so that no row depends on others.

DEVICE void multiply_low_rank(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

constexpr int TILE_ROWS = 16;

// Tiles of rows of one slot each.
DEVICE int count_tiles(const Layer& layer) {
    int tiles = 0;
    for (int slot = threadIdx.x % 32; slot < layer.num_slots; slot += 32)
        tiles += (layer.starts[slot + 1] - layer.starts[slot] + TILE_ROWS - 1) / TILE_ROWS;
    return __reduce_add_sync(~0u, tiles);
}

// A warp's part of a product with `down`: a tile of rows, 8 numbers of each, and a slice of the depth.
struct Unit {
    int slot, slice, value, rows[2], last;  // rows: of a lane, as they are in the batch; last: which of them is the last

    template <class P>
    static DEVICE Unit of(const Layer& layer, int groups, int number, P) {
        const int lane = threadIdx.x % 32;
        Unit unit = {0, number % P::SLICES, number / P::SLICES % groups * 8, {0, 0}, -1};
        int tile = number / P::SLICES / groups;
#pragma unroll 1
        for (int from = 0;; from += 32) {
            const bool is_there = from + lane < layer.num_slots;
            const int begin = is_there ? layer.starts[from + lane] : 0, end = is_there ? layer.starts[from + lane + 1] : 0;
            const int tiles = (end - begin + TILE_ROWS - 1) / TILE_ROWS;
            int last = tiles;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int before = __shfl_up_sync(~0u, last, step);
                if (lane >= step) last += before;
            }
            const u32 found = __ballot_sync(~0u, last > tile);
            if (!found) {
                tile -= __shfl_sync(~0u, last, 31);
                continue;
            }
            const int own = __ffs(found) - 1, stop = __shfl_sync(~0u, end, own);
            const int first = __shfl_sync(~0u, begin + (tile - last + tiles) * TILE_ROWS, own) + lane / 4;
            unit.slot = from + own;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unit.rows[i] = layer.order[min(first + 8 * i, stop - 1)];
                if (first + 8 * i < stop) unit.last = i;
            }
            return unit;
        }
    }
};

template <class P>
DEVICE void shrink(const Layer& layer, const LowRank& factors, const bf16* states, const Unit& unit) {
    const int lane = threadIdx.x % 32, width = P::PARTS * factors.rank;
    const uint4 *of_rows[2], *of_slot = reinterpret_cast<const uint4*>(
        factors.down + (size_t(unit.slot) * width + unit.value + lane / 4) * P::DEPTH + lane % 4 * 8);
#pragma unroll
    for (int i = 0; i < 2; ++i)
        of_rows[i] = reinterpret_cast<const uint4*>(states + unit.rows[i] * P::DEPTH + lane % 4 * 8);
    float sums[4] = {};
#pragma unroll 1
    for (int step = P::STEPS * unit.slice / P::SLICES; step < P::STEPS * (unit.slice + 1) / P::SLICES; ++step) {
        uint4 first[4], second[4], weights[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // 32 elements each; both operands have one order of the depth
            weights[i] = __ldg(of_slot + step * (STEP / 8) + 4 * i);
            first[i] = __ldcg(of_rows[0] + step * (STEP / 8) + 4 * i);
            second[i] = __ldcg(of_rows[1] + step * (STEP / 8) + 4 * i);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            multiply_low_rank(sums, first[i].x, second[i].x, first[i].y, second[i].y, weights[i].x, weights[i].y);
            multiply_low_rank(sums, first[i].z, second[i].z, first[i].w, second[i].w, weights[i].z, weights[i].w);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float* to = layer.shrunk + (unit.slice * ROWS + unit.rows[i]) * width + unit.value + 2 * (lane % 4);
        if (i <= unit.last) __stcg(reinterpret_cast<float2*>(to), make_float2(sums[2 * i], sums[2 * i + 1]));
    }
}

// Adds the products of rows with `up` to their sums of features `feature`, of HEAD_DIM / 2 further, and the next of each.
template <class P, int COUNT, int PAIRS>
DEVICE void expand(float2 (&sums)[COUNT][PAIRS], const Layer& layer, const LowRank& factors, const int (&slots)[COUNT],
                   const int (&rows)[COUNT], int part, int feature) {
    const int width = P::PARTS * factors.rank;
    const float* shrunk = layer.shrunk + part * factors.rank + threadIdx.x % 16;
#pragma unroll 1
    for (int from = 0; from < factors.rank; from += 16) {
        u32 pairs[COUNT][16][PAIRS];
        float values[COUNT];  // each half of the warp has those of its features' part
#pragma unroll
        for (int at = 0; at < COUNT; ++at) {
            const bf16* up = factors.up + (size_t(max(slots[at], 0)) * factors.rank + from) * P::FEATURES + feature;
#pragma unroll
            for (int k = 0; k < 16; ++k)
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) pairs[at][k][i] = load_pair(up + k * P::FEATURES + i * (HEAD_DIM / 2));
            values[at] = 0.f;
#pragma unroll
            for (int slice = 0; slice < P::SLICES; ++slice)
                values[at] += __ldcg(shrunk + (slice * ROWS + rows[at]) * width + from);
        }
#pragma unroll
        for (int at = 0; at < COUNT; ++at)
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                const float factor = __shfl_sync(~0u, values[at], k, 16);
                if (slots[at] < 0) continue;
#pragma unroll
                for (int i = 0; i < PAIRS; ++i)
                    sums[at][i].x += factor * low(pairs[at][k][i]), sums[at][i].y += factor * high(pairs[at][k][i]);
            }
    }
}

// The same for a thread's sums of a gate's item, of gate `feature` and the same one of up, and of rows from `first`.
struct GateFactors {
    static constexpr int TILES = Gate::OWN_COLUMNS / 8, AHEAD = 4;  // slots of which factors are loaded at once
    int slots[TILES];
    u32 up[AHEAD][2][2];

    DEVICE void load(const Layer& layer, const LowRank& factors, int slot, int from, int feature) {
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            const int own = min(slot + ahead, layer.num_slots - 1);
            const bf16* of_slot = factors.up + (size_t(own) * factors.rank + from) * Gate::FEATURES + feature;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bf16* two = of_slot + i % 2 * 8 * Gate::FEATURES + i / 2 * INNER;
                up[ahead][i / 2][i % 2] = two[0] | u32(two[Gate::FEATURES]) << 16;
            }
        }
    }

    // Before the rows' products with `down` are there.
    DEVICE void begin(const Layer& layer, const LowRank& factors, int first, int feature) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const int row = first + 8 * j + lane / 4;
            slots[j] = row < layer.num_rows ? layer.row_slots[row] : -1;
        }
        load(layer, factors, 0, 2 * (lane % 4), feature);
    }

    DEVICE void add(float (&sums)[Gate::SUMS], const Layer& layer, const LowRank& factors, int first, int feature) {
        const int lane = threadIdx.x % 32, width = 2 * factors.rank;
#pragma unroll 1
        for (int from = 2 * (lane % 4); from < factors.rank; from += 16) {
            u32 shrunk[TILES][2][2];  // of a row: of gate and up, of two numbers and of two 8 further
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = min(first + 8 * j + lane / 4, ROWS - 1);
                    const float* of_row = layer.shrunk + row * width + i / 2 * factors.rank + from + i % 2 * 8;
                    float2 total = {0.f, 0.f};
#pragma unroll
                    for (int slice = 0; slice < Gate::SLICES; ++slice) {
                        const float2 some = *reinterpret_cast<const float2*>(of_row + slice * ROWS * width);
                        total.x += some.x, total.y += some.y;
                    }
                    shrunk[j][i / 2][i % 2] = narrow2(total.x, total.y);
                }
#pragma unroll 1
            for (int slot = 0; slot < layer.num_slots; slot += AHEAD) {
                if (slot || from >= 16) load(layer, factors, slot, from, feature);
#pragma unroll
                for (int ahead = 0; ahead < AHEAD; ++ahead)
#pragma unroll
                    for (int j = 0; j < TILES; ++j) {
                        const u32 mask = slots[j] == slot + ahead ? ~0u : 0;
                        if (!__any_sync(~0u, mask)) continue;
                        float(&own)[4] = *reinterpret_cast<float(*)[4]>(&sums[4 * j]);
                        u32(&gates)[2] = up[ahead][0], (&ups)[2] = up[ahead][1];
                        multiply_low_rank(own, gates[0], 0, gates[1], 0, shrunk[j][0][0] & mask, shrunk[j][0][1] & mask);
                        multiply_low_rank(own, 0, ups[0], 0, ups[1], shrunk[j][1][0] & mask, shrunk[j][1][1] & mask);
                    }
            }
        }
    }
};
