// Which experts the rows choose.
//
// Set by the caller: HIDDEN, INNER (multiples of 256), EXPERTS, TOP_K.

constexpr int PAIRS = ROWS * TOP_K;
constexpr int OUTPUTS = up(HIDDEN, ALL_WARPS);  // of a warp, of the last product
constexpr int SLOT_BYTES = at_least(2 * HIDDEN, 2 * INNER * OUTPUTS);
constexpr int HELD = ROWS * HIDDEN / INNER;  // pairs whose inner states fit where the rows were
static_assert(HIDDEN % 256 == 0 && INNER % 256 == 0 && HELD > 0, "sizes");

struct Call {
    const bf16 *states;            // [num_rows, HIDDEN]
    const bf16 *norm;              // [HIDDEN], of an RMS norm before the router, whose input is added to the output; or null
    const bf16 *router;            // [EXPERTS, HIDDEN]; or null: ids and weights, [num_rows, TOP_K], are given
    const long long *ids;
    const float *weights;
    const bf16 *gate_up, *down;    // [EXPERTS, 2 * INNER, HIDDEN], [EXPERTS, HIDDEN, INNER]
    const long long *slots;        // [num_slots] of K and V; 0, or none, for padding
    bf16 *output;                  // [num_rows, HIDDEN]
    bf16 *inner;                   // [PAIRS, INNER]
    float *logits;                 // [ROWS, EXPERTS]
    u32 *counter;                  // arrivals at the barrier, of all launches
    float epsilon;
    int num_rows, num_slots, normalises, rounds;  // of the router's weights: they add up to 1, they are bfloat16
};

struct Routes {  // of a block; pairs of a row and an expert, in the order of experts
    bool is_real[ROWS];      // not padding
    int chosen[PAIRS];       // expert of each pair in the order of rows; EXPERTS for padding's
    float given[PAIRS];      // its weight
    int rows[PAIRS], sorted[PAIRS];
    float weights[PAIRS];
    int experts[PAIRS];      // that are chosen, each once
    int starts[PAIRS + 1];   // the first pair of each of them
    int num_experts, num_pairs;
};

// Warp r brings row r into shared memory, normalised if there is a norm, and scores it for the block's experts.
__device__ inline void load_rows(const Call &call, bf16 *rows, Routes &routes) {
    constexpr int COUNT = HIDDEN / 256;
    constexpr bool AT_ONCE = COUNT <= 8;  // all loads, as registers have room
    int row = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= ROWS) return;
    bool is_real = row < call.num_rows;
    Row<COUNT> own, norm, router;
    if (is_real) {
        own.load(call.states + row * HIDDEN);
        if (AT_ONCE && call.norm != nullptr) norm.load(call.norm);
        if (AT_ONCE && call.router != nullptr && blockIdx.x < EXPERTS) router.load(call.router + blockIdx.x * HIDDEN);
        is_real = !is_padding(call.slots, call.num_slots, row);
    }
    if (lane == 0) routes.is_real[row] = is_real;
    if (!is_real) return;
    if (call.norm != nullptr) {
        if (!AT_ONCE) norm.load(call.norm);
        own.normalise(norm, call.epsilon);
    }
    own.store(rows + row * HIDDEN);
    if (call.router == nullptr) return;
    for (int expert = blockIdx.x; expert < EXPERTS; expert += GRID) {
        if (!AT_ONCE || expert != blockIdx.x) router.load(call.router + expert * HIDDEN);
        float score = rounded(router.dot(own));
        if (lane == 0) call.logits[row * EXPERTS + expert] = score;
    }
}

// A number that is greater for greater scores, which are bfloat16, and of equal scores for the earlier expert.
__device__ inline u32 place_of(float score, int expert) {
    u32 bits = __float_as_uint(score);
    return ((bits >> 31 ? ~bits : bits | 0x80000000u) & 0xffff0000u) | u32(0xffff - expert);
}
__device__ inline float score_of(u32 place) {
    u32 bits = place & 0xffff0000u;
    return __uint_as_float(bits >> 31 ? bits & 0x7fff0000u : ~bits & 0xffff0000u);
}

// Warp r chooses the TOP_K highest scores of row r.
__device__ inline void choose(const Call &call, Routes &routes) {
    int row = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= ROWS) return;
    if (!routes.is_real[row]) {
        if (lane < TOP_K) routes.chosen[row * TOP_K + lane] = EXPERTS;
        return;
    }
    constexpr int COUNT = up(EXPERTS, 32);
    u32 places[COUNT], own = 0;
#pragma unroll
    for (int at = 0; at < COUNT; ++at) {
        int expert = at * 32 + lane;
        places[at] = expert < EXPERTS ? place_of(call.logits[row * EXPERTS + expert], expert) : 0;
    }
    float highest = 0.f, total = 0.f;
#pragma unroll
    for (int number = 0; number < TOP_K; ++number) {
        u32 best = 0;
#pragma unroll
        for (int at = 0; at < COUNT; ++at) best = max(best, places[at]);
        best = __reduce_max_sync(~0u, best);
        if (number == 0) {
            highest = score_of(best);
#pragma unroll
            for (int at = 0; at < COUNT; ++at) total += places[at] > 0 ? __expf(score_of(places[at]) - highest) : 0.f;
        }
        if (lane == number) own = best;
#pragma unroll
        for (int at = 0; at < COUNT; ++at)
            if (places[at] == best) places[at] = 0;
    }
    float weight = lane < TOP_K ? __expf(score_of(own) - highest) : 0.f;
    weight /= sum_lanes(call.normalises ? weight : total);
    if (lane < TOP_K) {
        routes.chosen[row * TOP_K + lane] = 0xffff - int(own & 0xffffu);
        routes.given[row * TOP_K + lane] = call.rounds ? rounded(weight) : weight;
    }
}

// A stable counting sort by expert: a pair's rank is the number of pairs before it.
__device__ inline void sort_pairs(Routes &routes) {
    int own = threadIdx.x, lane = threadIdx.x % 32, end = 0, num_pairs = 0;
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
        if (routes.is_real[row]) end = (row + 1) * TOP_K, num_pairs += TOP_K;
    if (own < end && routes.chosen[own] < EXPERTS) {
        int expert = routes.chosen[own], rank = 0;
        for (int other = 0; other < end; ++other) {
            int theirs = routes.chosen[other];
            rank += theirs < expert || (theirs == expert && other < own);
        }
        routes.rows[rank] = own / TOP_K, routes.weights[rank] = routes.given[own], routes.sorted[rank] = expert;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int count = 0;
        for (int pair = lane; pair - lane < num_pairs; pair += 32) {
            bool is_first = pair < num_pairs && (pair == 0 || routes.sorted[pair] != routes.sorted[pair - 1]);
            u32 firsts = __ballot_sync(~0u, is_first);
            int place = count + __popc(firsts & ((1u << lane) - 1));
            if (is_first) routes.experts[place] = routes.sorted[pair], routes.starts[place] = pair;
            count += __popc(firsts);
        }
        if (lane == 0) routes.num_experts = count, routes.num_pairs = routes.starts[count] = num_pairs;
    }
    __syncthreads();
}

__device__ inline void route(const Call &call, bf16 *rows, Routes &routes) {
    long long id = 0;
    float weight = 0.f;
    int own = threadIdx.x;
    if (call.router == nullptr && own < call.num_rows * TOP_K) id = call.ids[own], weight = call.weights[own];
    load_rows(call, rows, routes);
    if (call.router != nullptr) {
        meet(call.counter);
        choose(call, routes);
    } else {
        __syncthreads();
        if (own < PAIRS) routes.chosen[own] = routes.is_real[own / TOP_K] ? int(id) : EXPERTS, routes.given[own] = weight;
    }
    __syncthreads();
    sort_pairs(routes);
}
