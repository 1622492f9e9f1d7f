// Vectors of 16 floats, and their exchange with memory of the model's ELEMENT type (float or bfloat16).
//
// GCC's and Clang's vector extensions: the same code becomes AVX-512, AVX2 or NEON, as the processor has it.
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
// be denormal becomes 0.
inline Floats exponential(Floats x) {
  const Ints is_small = x < -87.0f;
  x = is_small ? Floats{} - 87.0f : x;
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
  return is_small ? Floats{} : power * (Floats)exponent;
}

constexpr int kDim = HEAD_DIM;
constexpr int kGroup = NUM_GROUPS;
constexpr int kVectors = kDim / kLanes;
static_assert(kDim % kLanes == 0);

}  // namespace
