// A decode's attention in vectors with the elements of a key or value as lanes.
#pragma once

#include "query_lanes.h"

namespace {

// Heads of a group per pass: as many as keep their sums in registers.
constexpr int kSlice = std::min(kGroup, std::max(1, 16 / kVectors));

// Addresses of a tile's keys or values of kSize elements, and of the next tile's, which are prefetched.
template <int kSize>
struct Rows {
  const Element* rows;
  const Element* next;
  int64_t stride;
  int num_next;
  const Element* operator[](int token) const { return rows + token * stride; }
  void fetch_next(int token) const { prefetch<kSize>(next + token * stride); }
  // Prefetches the rest of a next tile with more than `count` tokens.
  void fetch_rest(int count) const {
    for (; count < num_next; ++count) fetch_next(count);
  }
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
      const Element* second = values[std::min(token + 1, count - 1)];  // a missing token has weight 0
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
  values.fetch_rest(count);
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
  keys.fetch_rest(count);
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

}  // namespace
