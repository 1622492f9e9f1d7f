// Products of the chosen experts: see few_experts.py.

// A warp's copies in the order of use: gate's and up's row of each of its units of the first product, then of each chosen
// expert the rows of its outputs of the last product.
struct Work {
    int warp, units, total, first, outputs;
    __device__ Work(const Routes &routes) : warp(blockIdx.x * WARPS + threadIdx.x / 32) {
        units = routes.num_experts * INNER > warp ? up(routes.num_experts * INNER - warp, ALL_WARPS) : 0;
        first = warp * OUTPUTS, outputs = min(OUTPUTS, at_least(0, HIDDEN - first));
        total = 2 * units + (outputs > 0 ? routes.num_experts : 0);
    }
    __device__ int unit(int number) const { return warp + number * ALL_WARPS; }
    __device__ void fetch(const Call &call, const Routes &routes, const Ring<SLOT_BYTES> &ring, int number) const {
        if (number >= total) return;
        if (number < 2 * units) {
            int own = unit(number / 2), row = own % INNER + number % 2 * INNER;
            ring.fill(number, call.gate_up + (u64(routes.experts[own / INNER]) * 2 * INNER + row) * HIDDEN, 2 * HIDDEN);
        } else {
            u64 expert = routes.experts[number - 2 * units];
            ring.fill(number, call.down + (expert * HIDDEN + first) * INNER, 2 * INNER * outputs);
        }
    }
};

// Inner states of one unit for all rows of its expert.
__device__ inline void gate_and_up(const Call &call, const Routes &routes, const bf16 *rows, int own, u32 gate, u32 upper) {
    int lane = threadIdx.x % 32, expert = own / INNER;
    for (int pair = routes.starts[expert]; pair < routes.starts[expert + 1]; ++pair) {
        const bf16 *row = rows + routes.rows[pair] * HIDDEN;
        float sums[2][2] = {};
#pragma unroll
        for (int at = 0; at < HIDDEN / 256; ++at) {
            int place = (at * 32 + lane) * 8;
            uint4 inputs = load16(row + place);
            sums[0][at % 2] = dot8(load_shared(gate + 2 * place), inputs, sums[0][at % 2]);
            sums[1][at % 2] = dot8(load_shared(upper + 2 * place), inputs, sums[1][at % 2]);
        }
        float first = rounded(sum_lanes(sums[0][0] + sums[0][1])), second = rounded(sum_lanes(sums[1][0] + sums[1][1]));
        if (lane == 0) call.inner[pair * INNER + own % INNER] = narrow(first / (1.f + __expf(-first)) * second);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) few_experts(Call call) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Routes routes;
    __shared__ u64 barriers[WARPS * SLOTS];
    bf16 *rows = reinterpret_cast<bf16 *>(memory + WARPS * SLOTS * SLOT_BYTES);  // [ROWS, HIDDEN]
    int lane = threadIdx.x % 32;
    Ring<SLOT_BYTES> ring(memory, barriers);
    route(call, rows, routes);
    Work work(routes);
    for (int number = 0; number < SLOTS; ++number) {  // the copy engine serves all warps' first slots first
        if (lane == 0) work.fetch(call, routes, ring, number);
        __syncthreads();
    }
    for (int number = 0; number < work.units; ++number) {
        u32 gate = ring.wait(2 * number), upper = ring.wait(2 * number + 1);
        gate_and_up(call, routes, rows, work.unit(number), gate, upper);
        __syncwarp();
        if (lane < 2) work.fetch(call, routes, ring, 2 * number + lane + SLOTS);
    }
    meet(call.counter);  // weights of the last product are on their way meanwhile
    start_next();

    float sums[ROWS][OUTPUTS] = {};
    u32 slot = 0;
    int expert = -1;
    for (int begin = 0; begin < routes.num_pairs; begin += HELD) {
        int end = min(begin + HELD, routes.num_pairs);
        if (begin > 0) __syncthreads();
        for (int at = threadIdx.x; at < (end - begin) * INNER / 8; at += THREADS)
            reinterpret_cast<uint4 *>(rows)[at] = load16(call.inner + begin * INNER + at * 8);
        __syncthreads();
        if (work.outputs == 0) continue;
        for (int pair = begin; pair < end; ++pair) {
            if (routes.starts[expert + 1] == pair) ++expert, slot = ring.wait(2 * work.units + expert);
            float weight = routes.weights[pair];
#pragma unroll
            for (int output = 0; output < OUTPUTS; ++output) {
                float sum = 0.f;
#pragma unroll
                for (int at = 0; at < INNER / 256; ++at) {
                    int place = (at * 32 + lane) * 8;
                    sum = dot8(load_shared(slot + 2 * (output * INNER + place)), load16(rows + (pair - begin) * INNER + place), sum);
                }
#pragma unroll
                for (int row = 0; row < ROWS; ++row)
                    sums[row][output] += routes.rows[pair] == row ? weight * sum : 0.f;
            }
            if (routes.starts[expert + 1] == pair + 1) {
                __syncwarp();
                if (lane == 0) work.fetch(call, routes, ring, 2 * work.units + expert + SLOTS);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
        if (row < call.num_rows)
#pragma unroll
            for (int output = 0; output < OUTPUTS; ++output) {
                float sum = routes.is_real[row] ? rounded(sum_lanes(sums[row][output])) : 0.f;
                int place = row * HIDDEN + work.first + output;
                if (lane == 0 && output < work.outputs)
                    call.output[place] = narrow(call.norm != nullptr ? wide(call.states[place]) + sum : sum);
            }
}
