// Packed weights as a plain matrix, for products of many rows. A warp has a chunk of a tile.

extern "C" __global__ __launch_bounds__(256) void widen_all(const Weights weights, bf16 *output) {
    const int lane = threadIdx.x % 32;
    const int place = blockIdx.x * 8 + threadIdx.x / 32, tile = place / weights.chunks, chunk = place % weights.chunks;
    if (tile * TILE >= weights.outputs) return;
    __shared__ __align__(16) u32 rows[8][TILE][CHUNK / 2 + 4];
    auto &own = rows[threadIdx.x / 32];
    Packed packed;
    Places(weights, tile).load(packed, chunk, true);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 pairs[4];
        widen(packed, step, pairs);
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            int row = lane / 4 + at % 2 * 8, output = tile * TILE + row;
            if (weights.units && output < weights.outputs) {
                float unit = weights.units[output];
                pairs[at] = pair_of(first_of(pairs[at]) * unit, second_of(pairs[at]) * unit);
            }
            own[row][step * 8 + lane % 4 + at / 2 * 4] = pairs[at];
        }
    }
    __syncwarp();
#pragma unroll
    for (int at = lane; at < TILE * 8; at += 32) {
        int row = tile * TILE + at / 8, input = chunk * CHUNK + at % 8 * 8;
        if (row < weights.outputs && input < weights.width)
            *reinterpret_cast<uint4 *>(output + size_t(row) * weights.width + input) =
                *reinterpret_cast<const uint4 *>(&own[at / 8][at % 8 * 4]);
    }
}
