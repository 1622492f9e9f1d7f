// Attention over a paged KV cache: the kernels of the `cpp` form.
//
// Compiled for one ELEMENT type (float or bfloat16), HEAD_DIM, VALUE_DIM and NUM_GROUPS (query heads a KV head). The heads
// of a group are handled together, so that K and V are read once, straight from their pages. Scores, softmax and sums
// are float32. The softmax is the online one (Milakov and Gimelshein 2018). Only the slots of a sequence's own tokens
// are read, so nothing that lies in others can matter.
//
// Chunks, and decodes that share pages, have many queries for each key: there the queries are the lanes of vectors
// (query_lanes.h). A single decode has one group of queries for each key: there a key's elements are.

#include <vector>

#include "query_lanes.h"

namespace {

constexpr int kMaxShare = 1024;    // tokens of a work item
constexpr int kMaxStates = 65536;  // of the parts of a shared prefix: some tens of megabytes
// Heads of a group that are handled at once: as many as leave their sums in registers.
constexpr int kSlice = std::min(kGroup, std::max(1, 16 / kVectors));

// ----------------------------------------------------------------------------------------------------------- decodes

// One query head over the tokens of a work item: softmax(scores) @ values = sums / total, both scaled by e^-maximum.
// The items that a sequence took part in are merged afterwards (Flash-Decoding, Dao et al. 2023).
struct State {
  float sums[kValueDim];
  float maximum;
  float total;
};

template <int kSize>
inline void prefetch(const Element* row) {
  for (int at = 0; at < kSize; at += 64 / (int)sizeof(Element)) __builtin_prefetch(row + at, 0, 2);
}

// Where a tile's keys or values of kSize elements lie, and those that come next, which the processor fetches meanwhile.
template <int kSize>
struct Rows {
  const Element* rows;
  const Element* next;
  int64_t stride;
  const Element* operator[](int token) const { return rows + token * stride; }
  void fetch_next(int token) const { prefetch<kSize>(next + token * stride); }
};

// sums[head] += weights[head] @ values, of kHeads heads.
template <int kHeads>
void add_values(const float (*weights)[kTile], const Rows<kValueDim>& values, int count, Floats (*sums)[kVectors]) {
  int token = 0;
#ifdef __AVX512BF16__
  if constexpr (sizeof(Element) == 2 && kValueDim % (2 * kLanes) == 0) {
    // Two tokens at once: neighbours in pairs, values element by element, weights rounded to bfloat16.
    using Words16 = uint16_t __attribute__((vector_size(64)));
    bfloat16 rounded[kHeads][kTile];
    for (int head = 0; head < kHeads; ++head)
      for (int at = 0; at < count; at += kLanes) store(&rounded[head][at], load(&weights[head][at]));
    for (; token < count; token += 2) {
      const Element* first = values[token];
      const Element* second = values[std::min(token + 1, count - 1)];  // where there is none, its weight is 0
      values.fetch_next(token), values.fetch_next(token + 1);
      __m512bh pairs[kVectors];
      for (int v = 0; v < kVectors; v += 2) {
        Words16 a, b;
        std::memcpy(&a, first + v * kLanes, sizeof(a)), std::memcpy(&b, second + v * kLanes, sizeof(b));
        pairs[v] = (__m512bh)__builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8,
                                                     40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
        pairs[v + 1] =
            (__m512bh)__builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24,
                                              56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
      }
      for (int head = 0; head < kHeads; ++head) {
        int32_t pair;
        std::memcpy(&pair, &rounded[head][token], sizeof(pair));
        const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
        for (int v = 0; v < kVectors; ++v)
          sums[head][v] = (Floats)_mm512_dpbf16_ps((__m512)sums[head][v], weight, pairs[v]);
      }
    }
  }
#endif
  for (; token < count; ++token) {
    const Element* value = values[token];
    values.fetch_next(token);
    for (int v = 0; v < kVectors; ++v) {
      const Floats part = load(value + v * kLanes);
      for (int head = 0; head < kHeads; ++head) sums[head][v] += part * weights[head][token];
    }
  }
}

// Adds a tile of `count` tokens to the states of kHeads query heads that share a KV head.
template <int kHeads>
void add_tokens(const Element* queries, float scaling, float softcap, const Rows<kDim>& keys,
                const Rows<kValueDim>& values, int count, State* states) {
  alignas(64) float weights[kHeads][kTile];
  for (int first = 0; first < count; first += kLanes) {
    for (int token = first; token < std::min(first + kLanes, count); ++token) keys.fetch_next(token);
    for (int head = 0; head < kHeads; ++head) {
      Floats products[kLanes];
      for (int i = 0; i < kLanes; ++i)
        products[i] = multiply_heads(queries + head * kDim, keys[std::min(first + i, count - 1)]);
      const Floats scores = sums(products) * scaling;
      store(&weights[head][first], softcap > 0 ? capped(scores, softcap) : scores);
    }
  }
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  Floats results[kHeads][kVectors];
  for (int head = 0; head < kHeads; ++head) {
    State& state = states[head];
    for (int token = count; token < padded; ++token) weights[head][token] = -INFINITY;
    Floats maxima = load(&weights[head][0]);
    for (int token = kLanes; token < padded; token += kLanes) {
      const Floats scores = load(&weights[head][token]);
      maxima = scores > maxima ? scores : maxima;
    }
    const float maximum = std::max(state.maximum, largest(maxima));
    Floats totals = {};
    for (int token = 0; token < padded; token += kLanes) {
      const Floats part = weight_of(Element{}, load(&weights[head][token]) - maximum);
      store(&weights[head][token], part);
      totals += part;
    }
    const float rescale = std::exp(state.maximum - maximum);
    state.total = state.total * rescale + sum(totals);
    state.maximum = maximum;
    for (int v = 0; v < kVectors; ++v) results[head][v] = load(state.sums + v * kLanes) * rescale;
  }
  add_values<kHeads>(weights, values, count, results);
  for (int head = 0; head < kHeads; ++head)
    for (int v = 0; v < kVectors; ++v) store(states[head].sums + v * kLanes, results[head][v]);
}

// Tokens begin..end-1 of sequences whose tables name the same pages there: one sequence, or many with one prefix; for
// the KV heads first_head..end_head-1.
struct Item {
  int64_t first_member, num_members, begin, end, first_state, first_head, end_head;
};

struct Decodes {
  const Element* queries;
  const Element* key_cache;
  const Element* value_cache;
  const int64_t* tables;
  const int64_t* members;  // the sequences in the order of their groups
  int64_t table_width, page_size, num_kv_heads;
  float scaling;
  Traits traits;

  int64_t slot(const Item& item, int64_t position) const {
    const int64_t* pages = tables + members[item.first_member] * table_width;
    return pages[position / page_size] * page_size + position % page_size;
  }

  // The heads of an item. `following` is what the thread will probably work on afterwards.
  void attend(const Item& item, const Item& following, State* states) const {
    const int64_t num_heads = num_kv_heads * kGroup;
    for (int64_t i = item.first_head * kGroup; i < item.end_head * kGroup; ++i) states[i] = State{{}, -INFINITY, 0};
    for (int64_t begin = item.begin; begin < item.end;) {
      const int count = (int)std::min({item.end - begin, page_size - begin % page_size, (int64_t)kTile});
      const int64_t after = begin + count;
      const int64_t at = slot(item, begin);
      const int64_t next = after < item.end ? slot(item, after) : slot(following, following.begin);
      for (int64_t kv_head = item.first_head; kv_head < item.end_head; ++kv_head) {
        const auto rows_of = [&](const Element* cache, auto size) {
          const auto row = [&](int64_t of) { return cache + (of * num_kv_heads + kv_head) * size; };
          return Rows<size>{row(at), row(next), num_kv_heads * size};
        };
        const auto keys = rows_of(key_cache, std::integral_constant<int, kDim>{});
        const auto values = rows_of(value_cache, std::integral_constant<int, kValueDim>{});
        const Element* query = queries + (members[item.first_member] * num_heads + kv_head * kGroup) * kDim;
        State* own = states + kv_head * kGroup;
        int head = 0;
        for (; head + kSlice <= kGroup; head += kSlice)
          add_tokens<kSlice>(query + head * kDim, scaling, traits.softcap, keys, values, count, own + head);
        for (; head < kGroup; ++head)
          add_tokens<1>(query + head * kDim, scaling, traits.softcap, keys, values, count, own + head);
      }
      begin = after;
    }
  }

  // The same for an item of many members, whose queries become lanes.
  void attend_together(const Item& item, State* states) const {
    const int64_t num_heads = num_kv_heads * kGroup;
    const int64_t* pages = tables + members[item.first_member] * table_width;
    constexpr int64_t kMembers = kPanels * kPanel / kGroup;  // at once
    for (int64_t first = 0; first < item.num_members; first += kMembers)
      for (int64_t kv_head = item.first_head; kv_head < item.end_head; ++kv_head) {
        Scratch& s = scratch();
        const int num_queries = (int)std::min(kMembers, item.num_members - first) * kGroup;
        const auto head_of = [=](int m) { return kv_head * kGroup + m % kGroup; };
        begin_lanes(
            s, num_queries, Traits{},
            [&](int m) {
              return queries + (members[item.first_member + first + m / kGroup] * num_heads + head_of(m)) * kDim;
            },
            [&](int) { return item.end; });
        add_to_lanes(s, num_queries, key_cache + kv_head * kDim, value_cache + kv_head * kValueDim, pages, item.begin,
                     item.end, page_size, num_kv_heads, scaling, traits.softcap);
        for (int m = 0; m < num_queries; ++m) {
          State& state = states[(first + m / kGroup) * num_heads + head_of(m)];
          const int panel = m / kPanel, lane = m % kPanel;
          for (int d = 0; d < kValueDim; ++d) state.sums[d] = s.sums[panel][d][lane];
          state.maximum = s.maxima[panel][lane] * scaling, state.total = s.totals[panel][lane];
        }
      }
  }
};

// Writes one head's output from its states and its sink, if there is one.
void merge(const std::vector<const State*>& states, int64_t head, const float* sinks, Element* output) {
  float maximum = sinks == nullptr ? -INFINITY : sinks[head];
  for (const State* state : states) maximum = std::max(maximum, state[head].maximum);
  float total = sinks == nullptr ? 0 : std::exp(sinks[head] - maximum);
  Floats sums[kVectors] = {};
  for (const State* state : states) {
    const float rescale = std::exp(state[head].maximum - maximum);
    total += state[head].total * rescale;
    for (int v = 0; v < kVectors; ++v) sums[v] += load(state[head].sums + v * kLanes) * rescale;
  }
  for (int v = 0; v < kVectors; ++v) store(output + v * kLanes, sums[v] / total);
}

}  // namespace

// queries, outputs: [num_sequences, num_kv_heads * NUM_GROUPS, HEAD_DIM]. caches: [slots, num_kv_heads, HEAD_DIM].
// tables: [num_sequences, table_width] page numbers; contexts: [num_sequences] tokens to see.
// members: [num_sequences] the sequences by groups, whose first ones are group_starts [num_groups + 1]; the tables of a
// group's members begin with the same pages for shared [num_groups] tokens, which are read once for all of them: none
// where rows see less than all before them. window, chunk, softcap, sinks [heads]: see `Traits`.
extern "C" void paged_decode_attention(const Element* queries, const Element* key_cache, const Element* value_cache,
                                       const int64_t* tables, const int64_t* contexts, const int64_t* members,
                                       const int64_t* group_starts, const int64_t* shared, Element* outputs,
                                       int64_t num_sequences, int64_t num_groups, int64_t table_width,
                                       int64_t page_size, int64_t num_kv_heads, float scaling, int num_threads,
                                       int64_t window, int64_t chunk, float softcap, const float* sinks) {
  const Traits traits = {window, chunk, softcap, sinks};
  const int64_t num_heads = num_kv_heads * kGroup;
  int64_t work = 0, num_states = 0;
  for (int64_t i = 0; i < num_sequences; ++i) work += contexts[i] - traits.first_seen(contexts[i] - 1);
  // Small enough that all threads end together, large enough that merging is nearly free.
  const int64_t share = std::min(std::max(work / (4 * num_threads), (int64_t)kTile), (int64_t)kMaxShare);
  std::vector<Item> items;
  const auto split = [&](int64_t first_member, int64_t count, int64_t begin, int64_t end) {
    const int64_t most = std::max<int64_t>(1, kMaxStates / (count * num_heads));
    const int64_t wanted = count > 1 ? std::min<int64_t>(2 * num_threads, most) : (end - begin) / share;
    const int64_t parts = std::max<int64_t>(1, std::min((end - begin) / kTile, wanted));
    for (int64_t part = 0; part < parts; ++part) {
      const auto cut = [&](int64_t at) { return begin + (end - begin) * at / parts / kLanes * kLanes; };
      items.push_back({first_member, count, part == 0 ? begin : cut(part), part + 1 == parts ? end : cut(part + 1),
                       num_states, 0, num_kv_heads});
      num_states += count * num_heads;
    }
  };
  for (int64_t group = 0; group < num_groups; ++group)
    if (shared[group] > 0) split(group_starts[group], group_starts[group + 1] - group_starts[group], 0, shared[group]);
  for (int64_t group = 0; group < num_groups; ++group)
    for (int64_t member = group_starts[group]; member < group_starts[group + 1]; ++member) {
      const int64_t end = contexts[members[member]], begin = std::max(shared[group], traits.first_seen(end - 1));
      if (end > begin) split(member, 1, begin, end);
    }
  static thread_local std::vector<State> states;  // kept, as the scratch memory is
  if ((int64_t)states.size() < num_states) states.resize(num_states);
  std::vector<std::vector<const State*>> states_of(num_sequences);
  for (const Item& item : items)
    for (int64_t member = 0; member < item.num_members; ++member)
      states_of[members[item.first_member + member]].push_back(states.data() + item.first_state + member * num_heads);
  // Head by head where threads would be idle, at first those of the shared prefixes, which come first and take longest.
  const int64_t num_shared = std::count_if(items.begin(), items.end(), [](auto& item) { return item.num_members > 1; });
  std::vector<Item> by_heads;
  for (Item item : items) {
    const int64_t num_alike = item.num_members > 1 ? num_shared : (int64_t)items.size();
    const int64_t width = num_threads > 1 && num_alike < 2 * num_threads ? 1 : num_kv_heads;
    for (; item.first_head < num_kv_heads; item.first_head += width) {
      item.end_head = item.first_head + width;
      by_heads.push_back(item);
    }
  }
  items.swap(by_heads);
  State* first_state = states.data();  // the calling thread's, for all threads
  const Decodes decodes = {queries,     key_cache, value_cache,  tables, members,
                           table_width, page_size, num_kv_heads, scaling, traits};
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (size_t number = 0; number < items.size(); ++number) {
      const Item& item = items[number];
      if (item.num_members > 1)
        decodes.attend_together(item, first_state + item.first_state);
      else
        decodes.attend(item, items[std::min(number + num_threads, items.size() - 1)], first_state + item.first_state);
    }
#pragma omp for schedule(static) collapse(2)
    for (int64_t i = 0; i < num_sequences; ++i)
      for (int64_t head = 0; head < num_heads; ++head)
        merge(states_of[i], head, sinks, outputs + (i * num_heads + head) * kValueDim);
  }
}

// Chunks of consecutive positions: their rows lie one behind another in queries and outputs, from first_rows[i] on.
// starts, counts: [num_chunks] first position and number of rows; tables: [num_chunks, table_width].
extern "C" void paged_chunk_attention(const Element* queries, const Element* key_cache, const Element* value_cache,
                                      const int64_t* tables, const int64_t* first_rows, const int64_t* starts,
                                      const int64_t* counts, Element* outputs, int64_t num_chunks,
                                      int64_t table_width, int64_t page_size, int64_t num_kv_heads, float scaling,
                                      int num_threads, int64_t window, int64_t chunk_size, float softcap,
                                      const float* sinks) {
  const Traits traits = {window, chunk_size, softcap, sinks};
  struct Part {
    int64_t chunk, row;
  };
  int64_t total = 0, rows = kRows;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) total += counts[chunk];
  // Where threads would be idle, fewer rows an item, though keys and values are read for each.
  while (rows > kLeastRows && total / rows * num_kv_heads < 2 * num_threads) rows /= 2;
  std::vector<Part> items;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
    for (int64_t row = 0; row < counts[chunk]; row += rows) items.push_back({chunk, row});
  // The longest first, so that the threads end together.
  std::sort(items.begin(), items.end(), [&](const Part& a, const Part& b) {
    return starts[a.chunk] + a.row > starts[b.chunk] + b.row;
  });
  const int64_t num_heads = num_kv_heads * kGroup;
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t number = 0; number < (int64_t)items.size() * num_kv_heads; ++number) {
      const Part& item = items[number / num_kv_heads];
      const int64_t kv_head = number % num_kv_heads, chunk = item.chunk;
      const int64_t at = (first_rows[chunk] + item.row) * num_heads + kv_head * kGroup;
      const int64_t start = starts[chunk] + item.row, num_rows = std::min(rows, counts[chunk] - item.row);
      const int num_queries = (int)num_rows * kGroup;
      const auto index_of = [=](int m) { return at + m / kGroup * num_heads + m % kGroup; };
      Scratch& s = scratch();
      begin_lanes(
          s, num_queries, traits, [&](int m) { return queries + index_of(m) * kDim; },
          [&](int m) { return start + m / kGroup; });
      add_to_lanes(s, num_queries, key_cache + kv_head * kDim, value_cache + kv_head * kValueDim,
                   tables + chunk * table_width, traits.first_seen(start), start + num_rows, page_size, num_kv_heads,
                   scaling, softcap);
      for (int m = 0; m < num_queries; ++m) {
        alignas(64) float row[kValueDim];
        const int panel = m / kPanel, lane = m % kPanel;
        float total = s.totals[panel][lane];
        if (sinks != nullptr) total += std::exp(sinks[kv_head * kGroup + m % kGroup] - s.maxima[panel][lane] * scaling);
        for (int d = 0; d < kValueDim; ++d) row[d] = s.sums[panel][d][lane] / total;
        for (int v = 0; v < kVectors; ++v)
          store(outputs + index_of(m) * kValueDim + v * kLanes, load(row + v * kLanes));
      }
    }
  }
}
