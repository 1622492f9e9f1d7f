// Attention over a paged KV cache: the kernels of the backend `cpp`.
//
// Compiled for one ELEMENT type (float or bfloat16), HEAD_DIM, VALUE_DIM and NUM_GROUPS (query heads per KV head).
// Heads of a group are processed together, so that K and V are read once, directly from their pages. Scores, softmax
// and sums are float32, with online softmax (Milakov and Gimelshein 2018). Contents of other sequences' slots have no
// effect.
//
// Chunks, and decodes that share pages, have many queries per key: queries are vector lanes (query_lanes.h). A single
// decode has one group of queries per key: its queries are the lanes of matrix tiles (decode_tiles.h), or a key's
// elements are vector lanes (decode_vectors.h).

#include "paged_attention.h"

#include <vector>

#include "decode_tiles.h"
#include "decode_vectors.h"
#include "rotary.h"
#include "shares.h"

namespace {

constexpr int kMaxShare = 1024;    // tokens of a work item
constexpr int kMaxStates = 65536;  // of the parts of a shared prefix: some tens of megabytes

// ----------------------------------------------------------------------------------------------------------- decodes

// Tokens begin..end-1 of one sequence, or of many with the same pages there (a shared prefix); for the KV heads
// first_head..end_head-1.
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

  int count_in_page(const Item& item, int64_t begin, int64_t room) const {
    return (int)std::min({item.end - begin, page_size - begin % page_size, room});
  }

  // Tokens of an item from `begin` on within one page, at most `room`; of the KV heads from `head` on.
  Tokens tokens(const Item& item, int64_t begin, int64_t head, int64_t room = DecodeLanes<>::kMostTokens) const {
    const int64_t at = slot(item, begin) * num_kv_heads + head;
    const int num_heads = (int)std::min<int64_t>(DecodeLanes<>::kMostHeads, item.end_head - head);
    return {key_cache + at * kDim, value_cache + at * kValueDim, num_kv_heads, num_heads,
            count_in_page(item, begin, room)};
  }

  // The heads of an item in matrix tiles. `following`: the thread's probable next item.
  void attend_in_tiles(const Item& item, const Item& following, State* states) const {
    static thread_local const std::unique_ptr<DecodeLanes<>> own(new DecodeLanes<>);
    DecodeLanes<>& lanes = *own;
    for (int64_t head = item.first_head; head < item.end_head; head += lanes.kMostHeads) {
      const int64_t count = std::min<int64_t>(lanes.kMostHeads, item.end_head - head);
      State* of_heads = states + head * kGroup;
      for (int64_t i = 0; i < count * kGroup; ++i) std::memset(of_heads[i].sums, 0, sizeof(of_heads[i].sums));
      lanes.begin(queries + (members[item.first_member] * num_kv_heads + head) * kGroup * kDim, (int)count);
      for (int64_t begin = item.begin; begin < item.end;) {
        const int skipped = (int)(begin % kTileRows);
        const Tokens now = tokens(item, begin, head, lanes.kMostTokens - skipped);
        begin += now.count;
        const Tokens next = begin < item.end                ? tokens(item, begin, head)
                            : head + count < item.end_head ? tokens(item, item.begin, head + count)
                                                            : tokens(following, following.begin, following.first_head);
        lanes.add(now, skipped, next, scaling, traits.softcap, of_heads);
      }
      lanes.end(of_heads, scaling);
    }
    lanes.tiles.release();
  }

  // The heads of an item without tiles.
  void attend(const Item& item, const Item& following, State* states) const {
    const int64_t num_heads = num_kv_heads * kGroup;
    for (int64_t i = item.first_head * kGroup; i < item.end_head * kGroup; ++i) states[i] = State{{}, -INFINITY, 0};
    for (int64_t begin = item.begin; begin < item.end;) {
      const int count = count_in_page(item, begin, kTile);
      const int64_t after = begin + count;
      const bool is_last = after == item.end;
      const int64_t at = slot(item, begin), next = is_last ? slot(following, following.begin) : slot(item, after);
      const int num_next =
          is_last ? count_in_page(following, following.begin, kTile) : count_in_page(item, after, kTile);
      for (int64_t kv_head = item.first_head; kv_head < item.end_head; ++kv_head) {
        const auto rows_of = [&](const Element* cache, auto size) {
          const auto row = [&](int64_t of) { return cache + (of * num_kv_heads + kv_head) * size; };
          return Rows<size>{row(at), row(next), (int64_t)num_kv_heads * size, num_next};
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

  void attend_alone(const Item& item, const Item& following, State* states) const {
    // With fewer heads, or runs of 16 tokens, tiles would mostly multiply zeros.
    const bool fills_tiles = (item.end_head - item.first_head) * kGroup >= 4 && page_size % kTileDepth == 0;
    if (kDecodesSuitTiles && kTilesAreThere && fills_tiles)
      attend_in_tiles(item, following, states);
    else
      attend(item, following, states);
  }

  // An item of many members, with queries as lanes.
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
// tables: [num_sequences, table_width] page numbers; contexts: [num_sequences] tokens to see. members: [num_sequences]
// sequences sorted by group; group_starts: [num_groups + 1]. Tables of a group's members start with the same pages for
// shared [num_groups] tokens, which are read once for all members; 0 for layers with a window or chunks. window, chunk,
// softcap, sinks [heads]: see `Traits`.
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
  // Small enough to balance the threads, large enough to make merging nearly free.
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
  // Splits items by head if threads would be idle, starting with shared prefixes, which come first and take longest.
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
  Shares& shares = own_shares();
  const Decodes decodes = {queries,     key_cache, value_cache,  tables, members,
                           table_width, page_size, num_kv_heads, scaling, traits};
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for schedule(dynamic, 1) nowait
    for (size_t number = 0; number < items.size(); ++number) {
      const Item& item = items[number];
      if (item.num_members > 1)
        decodes.attend_together(item, first_state + item.first_state);
      else
        decodes.attend_alone(item, items[std::min(number + num_threads, items.size() - 1)],
                             first_state + item.first_state);
    }
    shares.wait();
#pragma omp for schedule(static) collapse(2) nowait
    for (int64_t i = 0; i < num_sequences; ++i)
      for (int64_t head = 0; head < num_heads; ++head)
        merge(states_of[i], head, sinks, outputs + (i * num_heads + head) * kValueDim);
    shares.wait();
  }
}

// Chunks of consecutive positions, with contiguous rows in queries and outputs from first_rows[i] on.
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
  // If threads would be idle, fewer rows per item, although each item reads keys and values.
  while (rows > kLeastRows && total / rows * num_kv_heads < 2 * num_threads) rows /= 2;
  std::vector<Part> items;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
    for (int64_t row = 0; row < counts[chunk]; row += rows) items.push_back({chunk, row});
  // Longest items first, to balance the threads.
  std::sort(items.begin(), items.end(), [&](const Part& a, const Part& b) {
    return starts[a.chunk] + a.row > starts[b.chunk] + b.row;
  });
  const int64_t num_heads = num_kv_heads * kGroup;
  Shares& shares = own_shares();
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for schedule(dynamic, 1) nowait
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
    shares.wait();
  }
}
