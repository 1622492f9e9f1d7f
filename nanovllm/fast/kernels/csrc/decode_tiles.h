// A decode's attention in matrix tiles: tokens are rows, and the query heads of up to 16 / NUM_GROUPS KV heads are
// lanes.
//
// Each KV head's queries have separate lanes, with zeros in the others, so that the scores of all heads are in the same
// tiles, and one softmax serves them all. Values are interleaved in the tiles' order, two tokens at a time.
#pragma once

#include "query_lanes.h"

namespace {

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
constexpr bool kDecodesSuitTiles =
    sizeof(Element) == 2 && kGroup <= kLanes && kDim % kTileDepth == 0 && kValueDim % (2 * kLanes) == 0;
#else
constexpr bool kDecodesSuitTiles = false;
#endif

// Keys and values of a run of tokens, of some neighbouring KV heads.
struct Tokens {
  const Element *keys, *values;
  int64_t num_kv_heads;  // in the cache
  int num_heads, count;

  const Element* key(int token, int head) const { return keys + (token * num_kv_heads + head) * kDim; }
  const Element* value(int token, int head) const { return values + (token * num_kv_heads + head) * kValueDim; }
};

// Prefetches keys and values of the next run evenly during this one.
class Fetch {
 public:
  Fetch(const Tokens& next, int num_calls)
      : next_(next), each_((2 * next.count * next.num_heads + num_calls - 1) / num_calls) {}

  void some() {
    for (int i = 0; i < each_ && token_ < next_.count; ++i) {
      if (!has_key_) {
        prefetch<kDim>(next_.key(token_, head_));
      } else {
        prefetch<kValueDim>(next_.value(token_, head_));
        if (++head_ == next_.num_heads) head_ = 0, ++token_;
      }
      has_key_ = !has_key_;
    }
  }

 private:
  const Tokens& next_;
  int each_, token_ = 0, head_ = 0;
  bool has_key_ = false;
};

template <bool kSuits = kDecodesSuitTiles, class = Element>
struct DecodeLanes {
  static constexpr int kMostHeads = 1, kMostTokens = 1;
  Tiles tiles;
  void begin(const Element*, int) {}
  void add(const Tokens&, int, const Tokens&, float, float, State*) {}
  void end(State*, float) {}
};

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)

// A template, so that it is not instantiated for unsupported sizes.
template <class Number>
struct DecodeLanes<true, Number> {
  static constexpr int kMostHeads = kLanes / kGroup, kMostTokens = kTileDepth;
  static constexpr int kDepths = kDim / kTileDepth;
  static constexpr int kColumns = kVectors % 4 == 0 ? 4 : 2;  // tiles of values at once

  alignas(64) Number queries[kMostHeads * kDepths][kTileSteps][kLanes][2];
  alignas(64) float scores[kMostTokens][kLanes];
  alignas(64) Words weights[kMostTokens / 2];             // of two tokens in each lane; then of a lane's tokens
  alignas(64) __m512i values[kMostTokens / 2][kVectors];  // of two tokens in turn
  alignas(64) float products[kLanes][kValueDim];
  Floats maxima, totals;
  int num_heads;
  Tiles tiles;

  // Loads the queries [num_kv_heads * kGroup, kDim] of some KV heads.
  void begin(const Element* from, int num_kv_heads) {
    num_heads = num_kv_heads, maxima = Floats{} + kLeast, totals = Floats{};
    std::memset(queries, 0, num_heads * kDepths * sizeof(queries[0]));
    for (int lane = 0; lane < num_heads * kGroup; ++lane)
      for (int d = 0; d < kDim; d += 2)
        std::memcpy(queries[lane / kGroup * kDepths + d / kTileDepth][d % kTileDepth / 2][lane], from + lane * kDim + d,
                    2 * sizeof(Element));
  }

  // Adds up to kMostTokens - skipped tokens; `skipped` tokens before them there is a multiple of 16 within the page.
  void add(const Tokens& tokens, int skipped, const Tokens& next, float scaling, float softcap, State* states) {
    constexpr int kPairs = kMostTokens / 2;
    const int end = skipped + tokens.count;
    Fetch fetch(next, num_heads * kDepths + kPairs * (1 + num_heads));
    multiply_keys({tokens.key(-skipped, 0), nullptr, tokens.num_kv_heads, num_heads, end}, fetch);
    const auto all = [](int, Floats found) { return found; };
    const Floats rescale = weigh_lanes(&scores[0][0], (Element*)weights, kLanes, skipped, end, kMostTokens, scaling,
                                       softcap, maxima, totals, all, [&] { fetch.some(); });
    transpose(weights);
    for (int head = 0; head < num_heads; ++head) {
      for (int pair = 0; pair < kPairs; ++pair) {
        interleave(tokens, head, 2 * pair - skipped, values[pair]);
        fetch.some();
      }
      for (int first = 0; first < kVectors; first += kColumns)
        tiles.template multiply_columns<kColumns>(weights, &values[0][first], sizeof(values[0]),
                                                  &products[0][first * kLanes]);
      for (int lane = head * kGroup; lane < (head + 1) * kGroup; ++lane)
        for (int d = 0; d < kValueDim; d += kLanes)
          store(states[lane].sums + d, load(states[lane].sums + d) * rescale[lane] + load(&products[lane][d]));
    }
  }

  // Completes the states: their sums are in the order of `interleave`.
  void end(State* states, float scaling) const {
    for (int lane = 0; lane < num_heads * kGroup; ++lane) {
      State& state = states[lane];
      state.maximum = maxima[lane] * scaling, state.total = totals[lane];
      for (int d = 0; d < kValueDim; d += 2 * kLanes) {
        const Floats low = load(state.sums + d), high = load(state.sums + d + kLanes);
        store(state.sums + d,
              __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
        store(state.sums + d + kLanes,
              __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
      }
    }
  }

 private:
  // Scores of the first tokens, in whole tiles: surplus rows before and after them are of the same page, and unused.
  void multiply_keys(const Tokens& tokens, Fetch& fetch) {
    const int64_t stride = tokens.num_kv_heads * kDim * sizeof(Element);
    const auto keys = [&](int number) {
      fetch.some();
      return tokens.key(0, number / kDepths) + number % kDepths * kTileDepth;
    };
    const int count = num_heads * kDepths;
    if (tokens.count > kTileRows)
      tiles.template multiply_sum<2>(count, keys, stride, queries, &scores[0][0]);
    else
      tiles.template multiply_sum<1>(count, keys, stride, queries, &scores[0][0]);
  }

  // Elements of the tokens `token` and `token` + 1 interleaved; zeros for a missing token, since 0 * NaN is NaN. Within
  // 32 neighbours the order is the processor's interleaving: 0-3, 8-11, 16-19, 24-27, then the rest.
  static void interleave(const Tokens& tokens, int head, int token, __m512i* to) {
    const bool has_first = token >= 0 && token < tokens.count, has_second = token + 1 >= 0 && token + 1 < tokens.count;
    for (int v = 0; v < kVectors; v += 2) {
      __m512i first = {}, second = {};
      if (has_first) first = _mm512_loadu_si512(tokens.value(token, head) + v * kLanes);
      if (has_second) second = _mm512_loadu_si512(tokens.value(token + 1, head) + v * kLanes);
      to[v] = _mm512_unpacklo_epi16(first, second), to[v + 1] = _mm512_unpackhi_epi16(first, second);
    }
  }
};

#endif

}  // namespace
