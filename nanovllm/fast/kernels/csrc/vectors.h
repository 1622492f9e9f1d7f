// Vectors of 16 floats, and their exchange with memory of the model's ELEMENT type (float or bfloat16).
#pragma once

#include "lanes.h"

namespace {

using Element = ELEMENT;

#define ALL_LANES(f) \
  f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#define UPPER_LANES(f) \
  f(16), f(17), f(18), f(19), f(20), f(21), f(22), f(23), f(24), f(25), f(26), f(27), f(28), f(29), f(30), f(31)

// Thirty-two neighbours.
inline void store(bfloat16* to, Floats low, Floats high) {
#ifdef __AVX512BF16__
  const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  std::memcpy(to, &halves, sizeof(halves));
#else
  store(to, low), store(to + kLanes, high);
#endif
}

inline void store(float* to, Floats low, Floats high) { store(to, low), store(to + kLanes, high); }

// The elements of two rows in turn.
inline void store_pairs(bfloat16* to, Halves first, Halves second) {
  const Words pairs = __builtin_convertvector(first, Words) | __builtin_convertvector(second, Words) << 16;
  std::memcpy(to, &pairs, sizeof(pairs));
}

// Elements of sixteen outputs in one step of a packed panel: two neighbours along the depth in bfloat16, else one.
[[maybe_unused]] inline void store_step(bfloat16* to, Floats first, Floats second) {
#ifdef __AVX512BF16__
  constexpr auto in_turn = [](int at) { return at / 2 + at % 2 * kLanes; };
  using Twice = uint16_t __attribute__((vector_size(4 * kLanes)));
  const Twice halves = (Twice)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  const Twice pairs = __builtin_shufflevector(halves, halves, ALL_LANES(in_turn), UPPER_LANES(in_turn));
  std::memcpy(to, &pairs, sizeof(pairs));
#else
  store_pairs(to, rounded(first), rounded(second));
#endif
}

[[maybe_unused]] inline void store_step(float* to, Floats only, Floats) { store(to, only); }

// Lane i of the result is the sum of all lanes of values[i]. Halves the number of vectors and the lanes left to add in
// each of four rounds; `values` is used up.
template <int kDistance>
inline Floats add_halves(Floats a, Floats b) {
  constexpr auto of_a = [](int lane) { return (lane & kDistance) == 0; };
  constexpr auto stay = [=](int lane) { return of_a(lane) ? lane : lane + kLanes; };
  constexpr auto cross = [=](int lane) { return (lane ^ kDistance) + (of_a(lane) ? 0 : kLanes); };
  return __builtin_shufflevector(a, b, ALL_LANES(stay)) + __builtin_shufflevector(a, b, ALL_LANES(cross));
}

inline Floats sums(Floats (&values)[kLanes]) {
  for (int i = 0; i < 8; ++i) values[i] = add_halves<8>(values[i], values[i + 8]);
  for (int i = 0; i < 4; ++i) values[i] = add_halves<4>(values[i], values[i + 4]);
  for (int i = 0; i < 2; ++i) values[i] = add_halves<2>(values[i], values[i + 2]);
  return add_halves<1>(values[0], values[1]);
}

// Transposes: swaps off-diagonal blocks in squares of 16, 8, 4 and 2 words.
template <int kDistance>
inline void swap_corners(Words& a, Words& b) {
  constexpr auto upper = [](int lane) { return (lane & kDistance) == 0 ? lane : lane - kDistance + kLanes; };
  constexpr auto lower = [](int lane) { return (lane & kDistance) == 0 ? lane + kDistance : lane + kLanes; };
  const Words top = __builtin_shufflevector(a, b, ALL_LANES(upper));
  b = __builtin_shufflevector(a, b, ALL_LANES(lower));
  a = top;
}

template <int kDistance = 8>
inline void transpose(Words (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    if ((i & kDistance) == 0) swap_corners<kDistance>(rows[i], rows[i + kDistance]);
  if constexpr (kDistance > 1) transpose<kDistance / 2>(rows);
}

// e^x with a relative error of 3e-6 and fewer operations: enough for weights that bfloat16 rounds to 4e-3.
inline Floats rough_exponential(Floats x) {
  const Ints is_small = x < -87.0f;
  const Floats logarithm = x * 1.44269504f;            // base 2
  const Floats shifted = logarithm + 12582912.0f;      // the whole part, in the lowest bits
  const Floats rest = logarithm - (shifted - 12582912.0f);
  Floats power = rest * 1.3333558e-3f + 9.6181291e-3f;  // the series of 2^rest
  power = power * rest + 5.5504109e-2f;
  power = power * rest + 2.4022651e-1f;
  power = power * rest + 6.9314718e-1f;
  power = power * rest + 1.0f;
  return is_small ? Floats{} : (Floats)((Ints)power + ((Ints)shifted << 23));
}

// cap * tanh(x / cap): scores that stay within -cap and cap.
inline Floats capped(Floats x, float cap) {
  const Floats magnitude = (Floats)((Words)x & 0x7fffffffu);
  const Floats power = exponential(magnitude * (-2.0f / cap));
  const Floats size = (1.0f - power) / (1.0f + power) * cap;
  return x < 0 ? -size : size;
}

inline Floats weight_of(float, Floats x) { return exponential(x); }
inline Floats weight_of(bfloat16, Floats x) { return rough_exponential(x); }

}  // namespace
