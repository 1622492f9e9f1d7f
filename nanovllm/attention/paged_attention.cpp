// Attention of one query position a sequence over a paged KV cache: what the `cpp` form does for decodes.
//
// Compiled for one ELEMENT type (float or bfloat16), HEAD_DIM and NUM_GROUPS (query heads a KV head). A work item is a
// sequence and a share of its pages. The query heads of a group are handled together, so that K and V are read once,
// straight from their pages. Scores, softmax and sums are float32. The softmax is the online one (Milakov and Gimelshein
// 2018), over shares that are merged afterwards (Flash-Decoding, Dao et al. 2023). Only the slots of a sequence's own
// tokens are read, so nothing that lies in others can matter.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));

struct bfloat16 {
  uint16_t bits;
};
using Element = ELEMENT;

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof(values));
  return values;
}

inline Floats load(const bfloat16* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof(bits));
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof(values)); }

inline void store(bfloat16* to, Floats values) {
  const Words bits = (Words)values;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const Words quiet = (bits >> 16) | 0x40;
  const Ints is_nan = values != values;
  const Halves halves = __builtin_convertvector(is_nan ? quiet : rounded, Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

inline float sum(Floats values) {
  // By halves: the compiler may not reorder a plain loop's additions.
  using Half = float __attribute__((vector_size(32)));
  using Quarter = float __attribute__((vector_size(16)));
  const Half eight = __builtin_shufflevector(values, values, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15);
  const Quarter four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// e^x for x <= 0, to float32's precision (the polynomial of Cephes' expf, Moshier 1992). NaN stays NaN, and what would
// be denormal becomes about 1e-38.
inline Floats exponential(Floats x) {
  x = x < -87.0f ? Floats{} - 87.0f : x;
  const Floats shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
  const Floats whole = shifted - 12582912.0f;
  const Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  power = power * rest + 8.3334519073e-3f;
  power = power * rest + 4.1665795894e-2f;
  power = power * rest + 1.6666665459e-1f;
  power = power * rest + 5.0000001201e-1f;
  power = power * rest * rest + rest + 1.0f;
  const Ints exponent = (__builtin_convertvector(whole, Ints) + 127) << 23;
  return power * (Floats)exponent;
}


constexpr int kDim = HEAD_DIM;
constexpr int kGroup = NUM_GROUPS;
constexpr int kVectors = kDim / kLanes;
constexpr int kTile = 64;  // tokens whose scores are held at once
// Heads of a group that are handled at once: as many as leave their sums in registers.
constexpr int kSlice = std::min(kGroup, std::max(1, 16 / kVectors));
static_assert(kDim % kLanes == 0);

inline void prefetch(const Element* row) {
  for (int at = 0; at < kDim; at += 64 / (int)sizeof(Element)) __builtin_prefetch(row + at, 0, 2);
}

// One query head over the tokens seen so far: softmax(scores) @ values = sums / total, both scaled by e^-maximum.
struct State {
  float sums[kDim];
  float maximum;
  float total;
};

// Adds `count` tokens, whose keys and values lie `stride` elements apart, to the states of kHeads query heads, while the
// processor fetches those that come next.
template <int kHeads>
void add_tokens(const float* queries, const Element* keys, const Element* values, int count, int64_t stride,
                const Element* next_keys, const Element* next_values, State* states) {
  alignas(64) float scores[kHeads][kTile];
  for (int token = 0; token < count; ++token) {
    const Element* key = keys + token * stride;
    prefetch(next_keys + token * stride);
    Floats product[kHeads] = {};
    for (int v = 0; v < kVectors; ++v) {
      const Floats part = load(key + v * kLanes);
      for (int head = 0; head < kHeads; ++head) product[head] += part * load(queries + head * kDim + v * kLanes);
    }
    for (int head = 0; head < kHeads; ++head) scores[head][token] = sum(product[head]);
  }
  Floats sums[kHeads][kVectors];
  for (int head = 0; head < kHeads; ++head) {
    State& state = states[head];
    float maximum = state.maximum;
    for (int token = 0; token < count; ++token) maximum = std::max(maximum, scores[head][token]);
    float total = 0;
    for (int token = 0; token < count; token += kLanes) {
      const Floats weights = exponential(load(&scores[head][token]) - maximum);
      store(&scores[head][token], weights);
      if (count - token >= kLanes)
        total += sum(weights);
      else
        for (int lane = 0; lane < count - token; ++lane) total += weights[lane];
    }
    const float rescale = std::exp(state.maximum - maximum);
    state.total = state.total * rescale + total;
    state.maximum = maximum;
    for (int v = 0; v < kVectors; ++v) sums[head][v] = load(state.sums + v * kLanes) * rescale;
  }
  for (int token = 0; token < count; ++token) {
    const Element* value = values + token * stride;
    prefetch(next_values + token * stride);
    for (int v = 0; v < kVectors; ++v) {
      const Floats part = load(value + v * kLanes);
      for (int head = 0; head < kHeads; ++head) sums[head][v] += part * scores[head][token];
    }
  }
  for (int head = 0; head < kHeads; ++head)
    for (int v = 0; v < kVectors; ++v) store(states[head].sums + v * kLanes, sums[head][v]);
}

// All heads of one sequence over positions begin..end-1.
void attend(const float* queries, const Element* key_cache, const Element* value_cache, const int64_t* pages,
            int64_t begin, int64_t end, int64_t page_size, int num_kv_heads, State* states) {
  const int64_t stride = (int64_t)num_kv_heads * kDim;
  for (int head = 0; head < num_kv_heads * kGroup; ++head) states[head] = State{{}, -INFINITY, 0};
  while (begin < end) {
    const int64_t in_page = begin % page_size;
    const int count = (int)std::min({end - begin, page_size - in_page, (int64_t)kTile});
    const int64_t offset = (pages[begin / page_size] * page_size + in_page) * stride;
    const int64_t after = begin + count < end ? begin + count : begin;
    const int64_t next = (pages[after / page_size] * page_size + after % page_size) * stride;
    for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
      const Element* keys = key_cache + offset + kv_head * kDim;
      const Element* values = value_cache + offset + kv_head * kDim;
      const Element* next_keys = key_cache + next + kv_head * kDim;
      const Element* next_values = value_cache + next + kv_head * kDim;
      int head = kv_head * kGroup;
      const int last = head + kGroup;
      for (; head + kSlice <= last; head += kSlice)
        add_tokens<kSlice>(queries + head * kDim, keys, values, count, stride, next_keys, next_values, states + head);
      for (; head < last; ++head) add_tokens<1>(queries + head * kDim, keys, values, count, stride, next_keys, next_values, states + head);
    }
    begin += count;
  }
}

// Writes one head's output from the states of its splits.
void merge(const State* states, int num_splits, int num_heads, Element* output) {
  float maximum = -INFINITY, total = 0;
  for (int split = 0; split < num_splits; ++split) maximum = std::max(maximum, states[split * num_heads].maximum);
  Floats sums[kVectors] = {};
  for (int split = 0; split < num_splits; ++split) {
    const State& state = states[split * num_heads];
    const float rescale = std::exp(state.maximum - maximum);
    total += state.total * rescale;
    for (int v = 0; v < kVectors; ++v) sums[v] += load(state.sums + v * kLanes) * rescale;
  }
  for (int v = 0; v < kVectors; ++v) store(output + v * kLanes, sums[v] / total);
}

}  // namespace

// queries, outputs: [num_sequences, num_kv_heads * NUM_GROUPS, HEAD_DIM]. caches: [slots, num_kv_heads, HEAD_DIM].
// tables: [num_sequences, table_width] page numbers; contexts: [num_sequences] tokens to see.
extern "C" void paged_decode_attention(const Element* queries, const Element* key_cache, const Element* value_cache,
                                       const int64_t* tables, const int64_t* contexts, Element* outputs,
                                       int64_t num_sequences, int64_t table_width, int64_t page_size,
                                       int64_t num_kv_heads, int64_t split_size, float scaling, int num_threads) {
  const int num_heads = (int)num_kv_heads * kGroup;
  std::vector<int64_t> first_item(num_sequences + 1, 0);
  for (int64_t i = 0; i < num_sequences; ++i)
    first_item[i + 1] = first_item[i] + (contexts[i] + split_size - 1) / split_size;
  const int64_t num_items = first_item[num_sequences];
  std::vector<int64_t> sequence_of(num_items);
  for (int64_t i = 0; i < num_sequences; ++i)
    std::fill(sequence_of.begin() + first_item[i], sequence_of.begin() + first_item[i + 1], i);
  std::unique_ptr<State[]> states(new State[num_items * num_heads]);
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<float> scaled(num_heads * kDim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_items; ++item) {
      const int64_t i = sequence_of[item];
      const Element* query = queries + i * num_heads * kDim;
      for (int at = 0; at < num_heads * kDim; at += kLanes) store(&scaled[at], load(query + at) * scaling);
      const int64_t begin = (item - first_item[i]) * split_size;
      attend(scaled.data(), key_cache, value_cache, tables + i * table_width, begin,
             std::min(begin + split_size, contexts[i]), page_size, (int)num_kv_heads, &states[item * num_heads]);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_sequences; ++i)
      for (int head = 0; head < num_heads; ++head)
        merge(&states[first_item[i] * num_heads + head], (int)(first_item[i + 1] - first_item[i]), num_heads,
              outputs + (i * num_heads + head) * kDim);
  }
}
