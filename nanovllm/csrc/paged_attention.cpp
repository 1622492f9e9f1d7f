// Attention over a paged KV cache: the kernels of the `cpp` form.
//
// Compiled for one ELEMENT type (float or bfloat16), HEAD_DIM and NUM_GROUPS (query heads a KV head). The query heads of
// a group are handled together, so that K and V are read once, straight from their pages. Scores, softmax and sums are
// float32. The softmax is the online one (Milakov and Gimelshein 2018). Only the slots of a sequence's own tokens are
// read, so nothing that lies in others can matter.

#include <memory>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kTile = 64;  // tokens whose scores are held at once
// Heads of a group that are handled at once: as many as leave their sums in registers.
constexpr int kSlice = std::min(kGroup, std::max(1, 16 / kVectors));

// ----------------------------------------------------------------------------------------------------------- decodes

// A work item is a sequence and a share of its pages; shares are merged afterwards (Flash-Decoding, Dao et al. 2023).

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

// ------------------------------------------------------------------------------------------------------------ chunks

// Query rows, of all heads of a group, are the lanes: scores and sums are kept transposed, so that the softmax needs no
// sums across lanes, and K and V are broadcast element by element.
constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }
constexpr int kEvenRows = 64 / greatest_common_divisor(64, kGroup);  // positions whose queries fill 64 lanes evenly
constexpr int kMaxQueries = 256;  // so that a work item's scratch memory stays in the second-level cache
// Positions of a work item.
constexpr int kRows = kEvenRows * kGroup > kMaxQueries ? std::max(1, kMaxQueries / kGroup)
                      : kEvenRows * kGroup < 128       ? 2 * kEvenRows
                                                       : kEvenRows;
constexpr int kQueries = (kRows * kGroup + kLanes - 1) / kLanes * kLanes;

struct Scratch {
  alignas(64) float queries[kDim][kQueries];
  alignas(64) float sums[kDim][kQueries];
  alignas(64) float scores[kTile][kQueries];
  alignas(64) float keys[kTile][kDim];
  alignas(64) float values[kTile][kDim];
  alignas(64) float maxima[kQueries];
  alignas(64) float totals[kQueries];
  alignas(64) int32_t positions[kQueries];
};

// c[i][lane] (+)= sum over k of a[i * a_row + k * a_step] * b[k][lane], for 4 rows i and kVectorsOfLanes * 16 lanes.
template <int kVectorsOfLanes, bool kAdd>
inline void multiply_4_rows(const float* a, int a_row, int a_step, const float* b, float* c, int depth) {
  Floats acc[4][kVectorsOfLanes];
  for (int i = 0; i < 4; ++i)
    for (int v = 0; v < kVectorsOfLanes; ++v) acc[i][v] = kAdd ? load(c + i * kQueries + v * kLanes) : Floats{};
  for (int k = 0; k < depth; ++k) {
    Floats lanes[kVectorsOfLanes];
    for (int v = 0; v < kVectorsOfLanes; ++v) lanes[v] = load(b + k * kQueries + v * kLanes);
    for (int i = 0; i < 4; ++i)
      for (int v = 0; v < kVectorsOfLanes; ++v) acc[i][v] += a[i * a_row + k * a_step] * lanes[v];
  }
  for (int i = 0; i < 4; ++i)
    for (int v = 0; v < kVectorsOfLanes; ++v) store(c + i * kQueries + v * kLanes, acc[i][v]);
}

template <bool kAdd>
void multiply(const float* a, int a_row, int a_step, const float* b, float* c, int rows, int depth, int num_vectors) {
  for (int v = 0; v < num_vectors; v += 4) {
    for (int i = 0; i < rows; i += 4) {
      const float* from = a + i * a_row;
      const float* lanes = b + v * kLanes;
      float* to = c + i * kQueries + v * kLanes;
      switch (num_vectors - v) {
        case 1: multiply_4_rows<1, kAdd>(from, a_row, a_step, lanes, to, depth); break;
        case 2: multiply_4_rows<2, kAdd>(from, a_row, a_step, lanes, to, depth); break;
        case 3: multiply_4_rows<3, kAdd>(from, a_row, a_step, lanes, to, depth); break;
        default: multiply_4_rows<4, kAdd>(from, a_row, a_step, lanes, to, depth);
      }
    }
  }
}

// Adds one tile of `count` tokens, the first at position `begin`, to the sums of all queries.
void add_tile(Scratch& s, int64_t begin, int count, int num_vectors, bool is_masked) {
  const int rows = (count + 3) / 4 * 4;  // those behind `count` are zero and masked
  multiply<false>(&s.keys[0][0], kDim, 1, &s.queries[0][0], &s.scores[0][0], rows, kDim, num_vectors);
  for (int at = 0; at < num_vectors * kLanes; at += kLanes) {
    if (is_masked) {
      Ints positions;
      std::memcpy(&positions, &s.positions[at], sizeof(positions));
      for (int token = 0; token < rows; ++token) {
        const Floats scores = load(&s.scores[token][at]);
        const bool is_real = token < count;
        store(&s.scores[token][at], is_real ? ((int32_t)(begin + token) > positions ? Floats{} - INFINITY : scores)
                                            : Floats{} - INFINITY);
      }
    }
    const Floats before = load(&s.maxima[at]);
    Floats maximum = before;
    for (int token = 0; token < count; ++token) {
      const Floats scores = load(&s.scores[token][at]);
      maximum = scores > maximum ? scores : maximum;
    }
    const Floats rescale = exponential(before - maximum);
    Floats total = load(&s.totals[at]) * rescale;
    for (int token = 0; token < rows; ++token) {
      const Floats weights = exponential(load(&s.scores[token][at]) - maximum);
      store(&s.scores[token][at], weights);
      total += weights;
    }
    store(&s.totals[at], total);
    store(&s.maxima[at], maximum);
    for (int d = 0; d < kDim; ++d) store(&s.sums[d][at], load(&s.sums[d][at]) * rescale);
  }
  multiply<true>(&s.values[0][0], 1, kDim, &s.scores[0][0], &s.sums[0][0], kDim, rows, num_vectors);
}

// One KV head's queries of `num_rows` positions from `start` on.
void attend_rows(Scratch& s, const Element* queries, const Element* keys, const Element* values, const int64_t* pages,
                 Element* outputs, int64_t start, int num_rows, int64_t page_size, int64_t query_stride,
                 int64_t kv_stride, float scaling) {
  const int num_queries = num_rows * kGroup;
  const int num_vectors = (num_queries + kLanes - 1) / kLanes;
  std::memset(s.queries, 0, sizeof(s.queries));
  std::memset(s.sums, 0, sizeof(s.sums));
  for (int m = 0; m < num_vectors * kLanes; ++m) {
    s.maxima[m] = -INFINITY, s.totals[m] = 0;
    s.positions[m] = (int32_t)(start + std::min(m, num_queries - 1) / kGroup);
  }
  alignas(64) float row[kDim];
  for (int m = 0; m < num_queries; ++m) {
    const Element* query = queries + (m / kGroup) * query_stride + (m % kGroup) * kDim;
    for (int v = 0; v < kVectors; ++v) store(row + v * kLanes, load(query + v * kLanes) * scaling);
    for (int d = 0; d < kDim; ++d) s.queries[d][m] = row[d];
  }
  const int64_t end = start + num_rows;
  for (int64_t begin = 0; begin < end; begin += kTile) {
    const int count = (int)std::min((int64_t)kTile, end - begin);
    for (int token = 0; token < (count + 3) / 4 * 4; ++token) {
      const int64_t position = begin + token;
      const int64_t offset = token < count ? (pages[position / page_size] * page_size + position % page_size) * kv_stride : 0;
      for (int v = 0; v < kVectors; ++v) {
        store(&s.keys[token][v * kLanes], token < count ? load(keys + offset + v * kLanes) : Floats{});
        store(&s.values[token][v * kLanes], token < count ? load(values + offset + v * kLanes) : Floats{});
      }
    }
    add_tile(s, begin, count, num_vectors, begin + kTile > start);
  }
  for (int m = 0; m < num_queries; ++m) {
    for (int d = 0; d < kDim; ++d) row[d] = s.sums[d][m] / s.totals[m];
    Element* output = outputs + (m / kGroup) * query_stride + (m % kGroup) * kDim;
    for (int v = 0; v < kVectors; ++v) store(output + v * kLanes, load(row + v * kLanes));
  }
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

// Chunks of consecutive positions: their rows lie one behind another in queries and outputs, from first_rows[i] on.
// starts, counts: [num_chunks] first position and number of rows; tables: [num_chunks, table_width].
extern "C" void paged_chunk_attention(const Element* queries, const Element* key_cache, const Element* value_cache,
                                      const int64_t* tables, const int64_t* first_rows, const int64_t* starts,
                                      const int64_t* counts, Element* outputs, int64_t num_chunks,
                                      int64_t table_width, int64_t page_size, int64_t num_kv_heads, float scaling,
                                      int num_threads) {
  struct Item {
    int64_t chunk, row;
  };
  std::vector<Item> items;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
    for (int64_t row = 0; row < counts[chunk]; row += kRows) items.push_back({chunk, row});
  // The longest first, so that the threads end together.
  std::sort(items.begin(), items.end(), [&](const Item& a, const Item& b) {
    return starts[a.chunk] + a.row > starts[b.chunk] + b.row;
  });
  const int64_t query_stride = num_kv_heads * kGroup * kDim, kv_stride = num_kv_heads * kDim;
#pragma omp parallel num_threads(num_threads)
  {
    std::unique_ptr<Scratch> scratch(new Scratch);
#pragma omp for schedule(dynamic, 1)
    for (int64_t number = 0; number < (int64_t)items.size() * num_kv_heads; ++number) {
      const Item& item = items[number / num_kv_heads];
      const int64_t kv_head = number % num_kv_heads, chunk = item.chunk;
      const int64_t at = (first_rows[chunk] + item.row) * query_stride + kv_head * kGroup * kDim;
      attend_rows(*scratch, queries + at, key_cache + kv_head * kDim, value_cache + kv_head * kDim,
                  tables + chunk * table_width, outputs + at, starts[chunk] + item.row,
                  (int)std::min((int64_t)kRows, counts[chunk] - item.row), page_size, query_stride, kv_stride, scaling);
    }
  }
}
