// Products of few rows with panels of 8-bit floats (e4m3): each weight is read once and widened in registers.
//
// Every e4m3 is exact in bfloat16, so two tables of bytes widen 64 of them without arithmetic. Scales are multiplied with
// a run's sums.
#pragma once

#include "widening.h"

namespace {

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)

constexpr int kFewFloatRows = sizeof(Element) == 2 ? 4 : 0;
constexpr float kFloat8Unit = 0x1p-9f;  // of widened numbers, below 1: large activations overflow no sooner by them

// The low and high bytes of magnitudes in bfloat16, in units, by the lowest seven bits of a code.
struct Float8Bytes {
  uint8_t low[128], high[128];

  constexpr Float8Bytes() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      const int mantissa = code & 7, exponent = code >> 3;
      int highest = 2;
      while (highest > 0 && mantissa >> highest == 0) --highest;
      int bits = (exponent + 127 - 7 - 9) << 7 | mantissa << 4;
      if (exponent == 0) bits = mantissa == 0 ? 0 : (highest + 127 - 9 - 9) << 7 | (mantissa << (7 - highest) & 127);
      low[code] = (uint8_t)(bits & 255), high[code] = (uint8_t)(bits >> 8);
    }
  }
};

class Float8Table {
 public:
  Float8Table() {
    alignas(64) static constexpr Float8Bytes kBytes;
    for (int half = 0; half < 2; ++half) {
      low_[half] = _mm512_loadu_si512(kBytes.low + 64 * half);
      high_[half] = _mm512_loadu_si512(kBytes.high + 64 * half);
    }
  }

  // Four neighbours of each of sixteen outputs, as the pairs that are multiplied at once.
  void widen(const char* from, __m512i& first, __m512i& second) const {
    const __m512i codes = _mm512_loadu_si512(from);
    constexpr int kOrAnd = 0xf8, kSelect = 0xca;
    const __m512i low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(-128), kOrAnd);
    const __m512i lower = _mm512_set1_epi16(255);
    first = _mm512_ternarylogic_epi32(lower, low, _mm512_slli_epi16(high, 8), kSelect);
    second = _mm512_ternarylogic_epi32(lower, _mm512_srli_epi16(low, 8), high, kSelect);
  }

 private:
  __m512i low_[2], high_[2];
};

inline __m512 add_pairs(__m512 sums, const Element* row, __m512i weights) {
  int32_t pair;
  std::memcpy(&pair, row, sizeof(pair));
  return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
}

template <class Runs, int kRows>
void multiply_float_runs(const char* panel, int64_t depth, const Element* rows, float* sums) {
  const Float8Table table;
  const int64_t length = Runs::kHeader > 0 ? depth : Runs::kRun;
  Floats totals[kRows][2] = {};
  const char* from = panel + Runs::kHeader;
  for (int64_t run = 0; run < depth; run += length) {
    const char* of_run = from;
    __m512 sums_of_run[kRows][2][2] = {};  // of each half's pairs
    fetch(from, Runs::kScales);
    from += Runs::kScales;
#pragma GCC unroll 2
    for (int64_t k = run; k < run + length; k += 4, from += 4 * kPanel) {
      fetch(from, 4 * kPanel);
      for (int half = 0; half < 2; ++half) {
        __m512i first, second;
        table.widen(from + half * 4 * kLanes, first, second);
        for (int i = 0; i < kRows; ++i) {
          const Element* row = rows + i * depth + k;
          sums_of_run[i][half][0] = add_pairs(sums_of_run[i][half][0], row, first);
          sums_of_run[i][half][1] = add_pairs(sums_of_run[i][half][1], row + 2, second);
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      const Floats scale = Runs::scale(panel, of_run, half) / kFloat8Unit;
      for (int i = 0; i < kRows; ++i)
        totals[i][half] += (Floats)(sums_of_run[i][half][0] + sums_of_run[i][half][1]) * scale;
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) store(sums + i * kPanel + half * kLanes, totals[i][half]);
}

// sums[row][output of the panel] of up to kFewFloatRows contiguous rows.
template <int kRows = kFewFloatRows>
void multiply_few_floats(int64_t kind, const char* panel, int64_t depth, const Element* rows, int count, float* sums) {
  if constexpr (kRows > 1)
    if (count < kRows) return multiply_few_floats<kRows - 1>(kind, panel, depth, rows, count, sums);
  if constexpr (kRows > 0)
    with_runs(kind, [&](auto runs) {
      if constexpr (!decltype(runs)::kIsWhole) multiply_float_runs<decltype(runs), kRows>(panel, depth, rows, sums);
    });
}

#else

constexpr int kFewFloatRows = 0;

inline void multiply_few_floats(int64_t, const char*, int64_t, const Element*, int, float*) {}

#endif

inline bool takes_few_floats(int64_t kind, int64_t depth, int64_t num_rows) {
  return kind >= kFloat8 && depth % 4 == 0 && num_rows <= kFewFloatRows;
}

}  // namespace
