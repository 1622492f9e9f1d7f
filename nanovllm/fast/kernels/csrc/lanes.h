// Vectors of 16 lanes, loads and stores, sums and e^x, for all kernels.
//
// With GCC's and Clang's vector extensions the code compiles to AVX-512, AVX2 or NEON.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

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

inline Halves rounded(Floats values) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)values);
#else
  const Words bits = (Words)values;
  const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // ties to even
  const Words quiet = (bits >> 16) | 0x40;
  const Ints is_nan = values != values;
  return __builtin_convertvector(is_nan ? quiet : nearest, Halves);
#endif
}

inline void store(bfloat16* to, Floats values) {
  const Halves halves = rounded(values);
  std::memcpy(to, &halves, sizeof(halves));
}

// Sum of all lanes, by halves: the compiler may not reorder a plain loop's operations.
template <class Join>
inline float join_lanes(Floats values, const Join& join) {
  using Half = float __attribute__((vector_size(32)));
  using Quarter = float __attribute__((vector_size(16)));
  const Half eight = join(__builtin_shufflevector(values, values, 0, 1, 2, 3, 4, 5, 6, 7),
                          __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15));
  const Quarter four = join(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                            __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
  return join(join(four[0], four[2]), join(four[1], four[3]));
}

inline float sum(Floats values) {
  return join_lanes(values, [](auto a, auto b) { return a + b; });
}

inline float largest(Floats values) {
  return join_lanes(values, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x for x <= 0, to float32's precision (the polynomial of Cephes' expf, Moshier 1992). NaN stays NaN, and denormal
// results become 0.
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

}  // namespace
