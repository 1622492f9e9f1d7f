// Attention of many queries to the same keys, with queries as vector lanes; and code shared with decodes.
//
// Two products per tile of tokens: keys times queries, and transposed values times weights. So the softmax needs no
// sums across lanes. Keys are read in place.
#pragma once

#include <memory>

#include "heads.h"
#include "row_products.h"

namespace {

constexpr int kTile = 64;  // tokens with scores in memory at a time
// Less than any score, and finite: a query that sees nothing of the first tiles subtracts it from itself.
constexpr float kLeast = -1e30f;

// Traits of a layer beyond plain attention; zeros and a null pointer for none.
struct Traits {
  int64_t window;      // a row at position q sees q - window + 1 to q
  int64_t chunk;       // a row sees only the positions of its chunk
  float softcap;       // of the scores
  const float* sinks;  // per head: a score that joins the softmax without a value

  int64_t first_seen(int64_t position) const {
    int64_t first = 0;
    if (window > 0) first = std::max(first, position - window + 1);
    if (chunk > 0) first = std::max(first, position / chunk * chunk);
    return first;
  }
};

constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }
constexpr int kEvenRows = 64 / greatest_common_divisor(64, kGroup);  // positions with queries that fill 64 lanes evenly
constexpr int kMaxQueries = 256;  // keeps a work item's scratch memory in the L2 cache
// Positions of a work item.
constexpr int kRows = kEvenRows * kGroup > kMaxQueries ? std::max(1, kMaxQueries / kGroup)
                      : kEvenRows * kGroup < 128       ? 2 * kEvenRows
                                                       : kEvenRows;
constexpr int kLeastRows = kPanel / greatest_common_divisor(kPanel, kGroup);  // for whole panels of queries
constexpr int kPanels = (kRows * kGroup + kPanel - 1) / kPanel;

struct Scratch {
  alignas(64) Element queries[kPanels][kDim / kStep][kPanel][kStep];
  alignas(64) float sums[kPanels][kValueDim][kPanel];
  alignas(64) float scores[kTile][kPanel];
  alignas(64) Element weights[kTile / kStep][kPanel][kStep];
  alignas(64) float products[kValueDim][kPanel];
  alignas(64) Element values[kTile * kValueDim];  // as `arrange_values` leaves them
  alignas(64) float maxima[kPanels][kPanel];
  alignas(64) float totals[kPanels][kPanel];
  alignas(64) int32_t positions[kPanels][kPanel];  // the last that each query sees
  alignas(64) int32_t firsts[kPanels][kPanel];     // the first
};

// Thread-local, kept for the next call: the system would clear fresh memory, page by page, in every layer.
Scratch& scratch() {
  static thread_local const std::unique_ptr<Scratch> own(new Scratch);
  return *own;
}

// One query head over the tokens of a work item: softmax(scores) @ values = sums / total, both scaled by e^-maximum.
// A sequence's items are merged afterwards (Flash-Decoding, Dao et al. 2023).
struct State {
  float sums[kValueDim];
  float maximum;
  float total;
};

template <int kSize>
inline void prefetch(const Element* row) {
  for (int at = 0; at < kSize; at += 64 / (int)sizeof(Element)) __builtin_prefetch(row + at, 0, 2);
}

// Tokens multiplied with weights: with matrix tiles padded to whole tiles, at weight 0.
inline int padded(int count) {
  const int whole = kStep == 2 && kTilesAreThere ? kTileDepth : kStep;
  return (count + whole - 1) / whole * whole;
}

// to[row][lane] for any number of rows.
void multiply_all(Tiles& tiles, int num_rows, const Operand& operand, const Element* panel, int64_t num_steps,
                  float* to) {
  const bool suits = operand.step_stride == kStep && suits_tiles(num_steps * kStep);
  const int at_once = suits ? kRowsOfTiles : kRowsAtOnce, num_blocks = (num_rows + at_once - 1) / at_once;
  for (int block = 0; block < num_blocks; ++block) {
    const int first = num_rows * block / num_blocks, end = num_rows * (block + 1) / num_blocks;
    const Operand rows = {operand.rows + first * operand.row_stride, operand.row_stride, operand.step_stride};
    if (suits)
      tiles.multiply(end - first, tile_rows(rows.rows, rows.row_stride), panel, num_steps,
                     to + first * kPanel, [] {});
    else
      multiply_rows(end - first, rows, panel, num_steps, nullptr, to + first * kPanel);
  }
}

// Converts scores [token][stride] of 16 lanes to weights [token / kStep][stride][kStep] of the first `padded_end`
// tokens; tokens outside of first..end-1 get weight 0. `seen` returns a token's masked scores, `meanwhile` is called
// once per step. Updates the lanes' maxima and totals. Returns the factor for earlier sums.
template <class Seen, class Meanwhile>
inline Floats weigh_lanes(float* scores, Element* weights, int stride, int first, int end, int padded_end,
                          float scaling, float softcap, Floats& maxima, Floats& totals, const Seen& seen,
                          const Meanwhile& meanwhile) {
  const Floats before = maxima;
  Floats maximum = before;
  for (int token = first; token < end; ++token) {
    Floats found = load(scores + token * stride);
    if (softcap > 0) found = capped(found * scaling, softcap) / scaling;
    found = seen(token, found);
    store(scores + token * stride, found);
    maximum = found > maximum ? found : maximum;
  }
  const Floats rescale = exponential((before - maximum) * scaling);
  Floats total = totals * rescale;
  const auto weights_of = [&](int token) {
    if (token < first || token >= end) return Floats{};
    const Floats found = weight_of(Element{}, (load(scores + token * stride) - maximum) * scaling);
    total += found;
    return found;
  };
  for (int token = 0; token < padded_end; token += kStep) {
    const Floats one = weights_of(token), other = kStep == 2 ? weights_of(token + 1) : Floats{};
    store_step(weights + token * stride, one, other);
    meanwhile();
  }
  maxima = maximum, totals = total;
  return rescale;
}

// Converts the tile's scores of 16 of a panel's queries to weights; updates maxima and totals. Returns the factor for
// earlier sums.
inline Floats weigh(Scratch& s, int panel, int at, int count, int64_t begin, bool is_masked, float scaling,
                    float softcap) {
  Ints positions, firsts;
  std::memcpy(&positions, &s.positions[panel][at], sizeof(positions));
  std::memcpy(&firsts, &s.firsts[panel][at], sizeof(firsts));
  Floats maxima = load(&s.maxima[panel][at]), totals = load(&s.totals[panel][at]);
  const auto weigh_seen = [&](const auto& seen) {
    return weigh_lanes(&s.scores[0][at], &s.weights[0][at][0], kPanel, 0, count, padded(count), scaling, softcap,
                       maxima, totals, seen, [] {});
  };
  const Floats rescale = !is_masked ? weigh_seen([](int, Floats scores) { return scores; })
                                    : weigh_seen([&](int token, Floats scores) {
                                        const int32_t position = (int32_t)(begin + token);
                                        const Ints hidden = (position > positions) | (position < firsts);
                                        return hidden ? Floats{} - INFINITY : scores;
                                      });
  store(&s.totals[panel][at], totals);
  store(&s.maxima[panel][at], maxima);
  return rescale;
}

// Adds a tile of `count` tokens, the first at position `begin`, to the sums of the panel's queries.
void add_tile(Scratch& s, Tiles& tiles, int panel, const Operand& keys, const Operand& values, int64_t begin,
              int count, bool is_masked, float scaling, float softcap) {
  multiply_all(tiles, count, keys, &s.queries[panel][0][0][0], kDim / kStep, &s.scores[0][0]);
  Floats rescale[2];
  for (int half = 0; half < 2; ++half)
    rescale[half] = weigh(s, panel, half * kLanes, count, begin, is_masked, scaling, softcap);
  multiply_all(tiles, kValueDim, values, &s.weights[0][0][0], padded(count) / kStep, &s.products[0][0]);
  for (int half = 0; half < 2; ++half) {
    Ints positions, firsts;
    std::memcpy(&positions, &s.positions[panel][half * kLanes], sizeof(positions));
    std::memcpy(&firsts, &s.firsts[panel][half * kLanes], sizeof(firsts));
    // Skips 0 * value, which is NaN if the value is.
    const Ints sees_tile = (positions >= (int32_t)begin) & (firsts < (int32_t)(begin + count));
    for (int d = 0; d < kValueDim; ++d) {
      float* sums = &s.sums[panel][d][half * kLanes];
      const Floats products = load(&s.products[d][half * kLanes]);
      store(sums, load(sums) * rescale[half] + (sees_tile ? products : Floats{}));
    }
  }
}

// For matrix tiles: each element's values of all tokens adjacent, 0 for missing tokens.
[[maybe_unused]] Operand transpose_values(Scratch& s, const bfloat16* values, int64_t stride, int count) {
  for (int first = 0; first < padded(count); first += 2 * kLanes)
    for (int d = 0; d < kValueDim; d += kLanes) {
      Words pairs[kLanes];  // of two tokens
      for (int i = 0; i < kLanes; ++i) {
        Halves both[2] = {};
        for (int64_t token = first + 2 * i, half = 0; half < 2 && token + half < count; ++half)
          std::memcpy(&both[half], values + (token + half) * stride + d, sizeof(Halves));
        pairs[i] = __builtin_convertvector(both[0], Words) | __builtin_convertvector(both[1], Words) << 16;
      }
      transpose(pairs);
      for (int i = 0; i < kLanes; ++i) std::memcpy(s.values + (d + i) * kTile + first, &pairs[i], sizeof(Words));
    }
  return {(const Element*)s.values, kTile, kStep};
}

// A tile's values in the second product's order; without matrix tiles, pairs of neighbouring tokens.
[[maybe_unused]] Operand arrange_values(Scratch& s, const bfloat16* values, int64_t stride, int count) {
  if (kTilesAreThere) return transpose_values(s, values, stride, count);
  for (int token = 0; token < count; token += 2)
    for (int d = 0; d < kValueDim; d += kLanes) {
      Halves first, second;
      const bfloat16* at = values + token * stride + d;
      std::memcpy(&first, at, sizeof(first));
      std::memcpy(&second, token + 1 < count ? at + stride : at, sizeof(second));  // else any, at weight 0
      store_pairs((bfloat16*)s.values + token * kValueDim + 2 * d, first, second);
    }
  return {s.values, kStep, kStep * kValueDim};
}

[[maybe_unused]] Operand arrange_values(Scratch&, const float* values, int64_t stride, int) {
  return {(const Element*)values, 1, stride};
}

// Loads up to kPanels * kPanel queries of one KV head: query_of(m) sees tokens up to position_of(m), within the layer's
// traits.
template <class QueryOf, class PositionOf>
void begin_lanes(Scratch& s, int num_queries, const Traits& traits, const QueryOf& query_of,
                 const PositionOf& position_of) {
  const int num_panels = (num_queries + kPanel - 1) / kPanel;
  std::memset(s.queries, 0, num_panels * sizeof(s.queries[0]));
  std::memset(s.sums, 0, num_panels * sizeof(s.sums[0]));
  for (int m = 0; m < num_panels * kPanel; ++m) {
    const int panel = m / kPanel, lane = m % kPanel;
    s.maxima[panel][lane] = kLeast, s.totals[panel][lane] = 0;
    const int64_t position = position_of(std::min(m, num_queries - 1));
    s.positions[panel][lane] = (int32_t)position;
    s.firsts[panel][lane] = (int32_t)traits.first_seen(position);
    if (m >= num_queries) continue;
    const Element* query = query_of(m);
    for (int d = 0; d < kDim; d += kStep)
      std::memcpy(s.queries[panel][d / kStep][lane], query + d, kStep * sizeof(Element));
  }
}

// Adds tokens begin..end-1, with keys and values in `pages`, to the sums of all lanes.
void add_to_lanes(Scratch& s, int num_queries, const Element* keys, const Element* values, const int64_t* pages,
                  int64_t begin, int64_t end, int64_t page_size, int64_t num_kv_heads, float scaling, float softcap) {
  const int num_panels = (num_queries + kPanel - 1) / kPanel;
  Tiles tiles;
  while (begin < end) {
    const int count = (int)std::min({end - begin, page_size - begin % page_size, (int64_t)kTile});
    const int64_t at = (pages[begin / page_size] * page_size + begin % page_size) * num_kv_heads;
    const int64_t key_stride = num_kv_heads * kDim, value_stride = num_kv_heads * kValueDim;
    const Operand tile_values = arrange_values(s, values + at * kValueDim, value_stride, count);
    for (int panel = 0; panel < num_panels; ++panel)
      if (begin <= s.positions[panel][kPanel - 1] && s.firsts[panel][0] < begin + count)
        add_tile(s, tiles, panel, {keys + at * kDim, key_stride, kStep}, tile_values, begin, count,
                 begin + count - 1 > s.positions[panel][0] || begin < s.firsts[panel][kPanel - 1], scaling, softcap);
    begin += count;
  }
}

}  // namespace
