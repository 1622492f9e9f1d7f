// Vectors of 16 lanes and loads, for the model's kernels and the sampling kernels.
//
// With GCC's and Clang's vector extensions the code compiles to AVX-512, AVX2 or NEON.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));

struct bfloat16 {
  uint16_t bits;
};

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

}  // namespace
