// Work items of attention of chunks, and how thread blocks share them.

// Tiles of keys from the last that a row sees to the first.
struct Span {
    int last, count;
};

DEVICE Span span_of(const Tile& tile) {
    const int last = (tile.position + tile.num_rows - 1) / KEYS;
    return {last, last - first_seen(tile.position) / KEYS + 1};
}

// A work item: a tile, a head, and `count` tiles of keys, from the last to the first, after skipping `begin`. It is one of
// `num_parts` parts, which consecutive thread blocks take. A tile without rows: none.
struct Item {
    int place, head;
    Tile tile;
    int table;  // where it begins
    int begin, count, part, num_parts;

    DEVICE Span span() const {
        const Span whole = span_of(tile);
        return {whole.last - begin, min(whole.count, count)};
    }
};

// A tile and the start of its block table.
struct alignas(16) TableTile {
    Tile tile;
    int start;
};

constexpr int MOST_CACHED = 256;  // tiles in shared memory

// Where tiles are few, some thread blocks would have an item more than others. So each takes an equal share of all tiles of
// keys, in order of tiles and heads: a part of an item, or some parts. Shares begin where items do if that costs little, as
// blocks then read the same keys at the same time.
struct Plan {
    constexpr static int MOST_TILES = 32;
    int share;                     // tiles of keys of a thread block; 0: whole items
    int lengths[MOST_TILES];       // tiles of keys of each tile
    int sizes[MOST_TILES];         // and with those that fill its last share up
    int starts[MOST_TILES + 1];    // sizes of all tiles before it
};

DEVICE int sum_up_to(int lane, int x) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const int other = __shfl_up_sync(~0u, x, i);
        x += lane >= i ? other : 0;
    }
    return x;
}

// Makes the plan, by one warp, if it saves a fifth of the time. A part costs some two tiles more.
DEVICE void make_plan(Plan& plan, const Tile* tiles, int num_tiles) {
    const int lane = threadIdx.x % 32, grid = gridDim.x;
    const bool has_more = num_tiles > Plan::MOST_TILES && tiles[Plan::MOST_TILES].num_rows;
    const Tile tile = lane < num_tiles ? tiles[lane] : Tile{0, 0, 0};
    const int length = tile.num_rows ? span_of(tile).count : 0, num_used = __popc(__ballot_sync(~0u, length > 0));
    plan.lengths[lane] = length;
    if (lane == 0) plan.share = plan.starts[0] = 0;
    __syncwarp();
    if (has_more || num_used == 0) return;
    // Time of some blocks with whole items, dealt out in rounds, every other one backwards; the last item's among them.
    const int num_items = num_used * HEADS, rounds = (num_items + grid - 1) / grid, last = (num_items - 1) % grid;
    int block = lane * (grid - 1) / 31, load = 0;
    if (lane == 15) block = rounds & 1 ? last : grid - 1 - last;
    for (int round = 0; round < rounds; ++round) {
        const int item = round * grid + (round & 1 ? grid - 1 - block : block);
        load += item < num_items ? plan.lengths[item / HEADS] : 0;
    }
    load = __reduce_max_sync(~0u, load);
    const int longest = __reduce_max_sync(~0u, length), limit = (longest + lane) / (lane + 1);
    int num_shares = 0;  // if each ends with its item
    for (int i = 0; i < num_used; ++i) num_shares += (plan.lengths[i] + limit - 1) / limit;
    const int aligned = __reduce_min_sync(~0u, num_shares * HEADS <= grid ? limit : 1 << 20);
    const int least = (__reduce_add_sync(~0u, length) * HEADS + grid - 1) / grid;
    const bool is_aligned = 8 * aligned <= 9 * least + 8;
    const int share = is_aligned ? aligned : least, size = is_aligned ? (length + share - 1) / share * share : length;
    plan.sizes[lane] = size, plan.starts[lane + 1] = sum_up_to(lane, size);
    if (lane == 0 && 5 * share + 10 < 4 * load) plan.share = share;
}

// The items of a block: parts by the plan, or whole ones, the next of all blocks' when this one needs another. counts: of
// items taken after each block's first, and of blocks that are done; zeros between launches.
struct Items {
    const TableTile* cached;
    const Tile* tiles;
    const int* table_starts;
    const Plan& plan;
    int* counts;
    int num_items, next, end, place = 0;  // next: tile of keys at which the next part begins

    DEVICE Items(const TableTile* cached, const Tile* tiles, int num_tiles, const int* table_starts, const Plan& plan,
                 int* counts)
        : cached(cached), tiles(tiles), table_starts(table_starts), plan(plan), counts(counts),
          num_items(num_tiles * HEADS), next(plan.share * blockIdx.x),
          end(min(next + plan.share, plan.starts[Plan::MOST_TILES] * HEADS)) {}

    DEVICE TableTile tile_at(int place) const {
        return place < MOST_CACHED ? cached[place] : TableTile{tiles[place], table_starts[place]};
    }

    // The number of another whole item.
    DEVICE int claim() { return plan.share ? 0 : gridDim.x + atomicAdd(counts, 1); }

    // The next part, or the item of this number; none after the last one and from the first unused tile on.
    DEVICE Item take(int number) {
        const Item none = {0, 0, {0, 0, 0}, 0, 0, 0, 0, 1};
        if (plan.share == 0) {
            if (number >= num_items) return none;
            const TableTile found = tile_at(number / HEADS);
            return {number / HEADS, number % HEADS, found.tile, found.start, 0, 1 << 30, 0, 1};
        }
        const int now = next;
        if (now >= end) return none;
        while (now >= plan.starts[place + 1] * HEADS) ++place;
        const int length = plan.lengths[place], size = plan.sizes[place], within = now - plan.starts[place] * HEADS;
        const int begin = within % size, count = min(length - begin, end - now), first = (now - begin) / plan.share;
        next = begin + count == length ? now - begin + size : end;
        const TableTile found = tile_at(place);
        return {place, within / size, found.tile, found.start, begin, count, int(blockIdx.x) - first,
                (now - begin + length - 1) / plan.share - first + 1};
    }

    DEVICE void finish() {
        if (plan.share == 0 && atomicAdd(counts + 1, 1) == gridDim.x - 1) counts[0] = counts[1] = 0;
    }
};
