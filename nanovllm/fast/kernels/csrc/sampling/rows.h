// Rows of logits for the sampling kernels. Compiled without contraction: each product and each sum is rounded, so that
// results equal torch's.
#pragma once

#include <limits>
#include <vector>

#include "../lanes.h"

namespace {

using Doubles = double __attribute__((vector_size(64)));
using Longs = int64_t __attribute__((vector_size(64)));
using HalfFloats = float __attribute__((vector_size(32)));
using HalfInts = int32_t __attribute__((vector_size(32)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline Floats broadcast(float value) { return Floats{} + value; }

// Bit i says whether lane i of a comparison holds.
inline uint32_t bits_of(Ints comparison) {
#ifdef __AVX512DQ__
  return _mm512_movepi32_mask((__m512i)comparison);
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= (uint32_t)(comparison[lane] & 1) << lane;
  return bits;
#endif
}

// 16 values from `first` on; -infinity past the row's end.
template <class T>
inline Floats load_part(const T* row, int64_t first, int64_t size) {
  if (first + kLanes <= size) return load(row + first);
  T rest[kLanes] = {};
  std::memcpy(rest, row + first, (size - first) * sizeof(T));
  const Floats values = load(rest);
  const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lanes < (int32_t)(size - first) ? values : broadcast(-kInfinity);
}

inline int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// The largest value, or NaN if there is one.
template <class T>
inline float largest_of(const T* row, int64_t size) {
  Floats top = broadcast(-kInfinity);
  Ints is_nan = {};
  for (int64_t first = 0; first < size; first += kLanes) {
    const Floats values = load_part(row, first, size);
    top = values > top ? values : top;
    is_nan |= values != values;
  }
  if (bits_of(is_nan)) return std::numeric_limits<float>::quiet_NaN();
  float largest = top[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = std::max(largest, top[lane]);
  return largest;
}

// `filters.masses`: e^level for levels <= 0, rounded to multiples of 2^-34, so that sums are exact in any order.
struct Masses {
  Doubles low, high;
};

inline Masses masses_of(Floats level) {
  const Floats x = level < -32.0f ? broadcast(-32.0f) : level;
  const Floats whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  power = power * rest + 8.3334519073e-3f;
  power = power * rest + 4.1665795894e-2f;
  power = power * rest + 1.6666665459e-1f;
  power = power * rest + 5.0000001201e-1f;
  power = (power * rest * rest + rest) + 1.0f;
  const Ints exponent = (__builtin_convertvector(whole, Ints) + 127) << 23;
  const Floats masses = power * (Floats)exponent;
  HalfFloats halves[2];
  std::memcpy(halves, &masses, sizeof(halves));
  constexpr double round = 393216.0;  // 1.5 * 2^18
  return {(__builtin_convertvector(halves[0], Doubles) + round) - round,
          (__builtin_convertvector(halves[1], Doubles) + round) - round};
}

inline double sum(Doubles values) {
  double total = 0;
  for (int lane = 0; lane < 8; ++lane) total += values[lane];
  return total;
}

// Masses of the lanes selected by a comparison.
inline Doubles chosen(Masses masses, Ints comparison) {
  HalfInts halves[2];
  std::memcpy(halves, &comparison, sizeof(halves));
  return (Doubles)((Longs)masses.low & __builtin_convertvector(halves[0], Longs)) +
         (Doubles)((Longs)masses.high & __builtin_convertvector(halves[1], Longs));
}

// Append the lanes selected by a comparison's bits; overwrites up to 16 floats past them.
inline int64_t append(float* to, int64_t count, Floats values, uint32_t bits) {
#ifdef __AVX512F__
  const __m512 packed = _mm512_maskz_compress_ps((__mmask16)bits, (__m512)values);
  _mm512_storeu_ps(to + count, packed);
  return count + __builtin_popcount(bits);
#else
  for (; bits; bits &= bits - 1) to[count++] = values[__builtin_ctz(bits)];
  return count;
#endif
}

}  // namespace
