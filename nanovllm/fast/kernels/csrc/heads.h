// Sizes of a model's heads. Sources without this header are compiled once for models of any sizes.
#pragma once

#include "vectors.h"

namespace {

constexpr int kDim = HEAD_DIM;         // of queries and keys
constexpr int kValueDim = VALUE_DIM;
constexpr int kGroup = NUM_GROUPS;
constexpr int kVectors = kValueDim / kLanes;
static_assert(kDim % kLanes == 0 && kValueDim % kLanes == 0);

// The lanes' shares of a product of two rows of kDim elements.
inline Floats multiply_heads(const float* a, const float* b) {
  Floats product = {};
  for (int d = 0; d < kDim; d += kLanes) product += load(a + d) * load(b + d);
  return product;
}

inline Floats multiply_heads(const bfloat16* a, const bfloat16* b) {
  Floats product = {};
  int d = 0;
#ifdef __AVX512BF16__
  for (; d + 2 * kLanes <= kDim; d += 2 * kLanes)
    product = (Floats)_mm512_dpbf16_ps((__m512)product, (__m512bh)_mm512_loadu_si512(a + d),
                                       (__m512bh)_mm512_loadu_si512(b + d));
#endif
  for (; d < kDim; d += kLanes) product += load(a + d) * load(b + d);
  return product;
}

}  // namespace
