// Integer products of few rows with quantised panels: each weight is read once and multiplied without widening.
//
// With AVX-512 VNNI, which multiplies bytes, widening would take longer than reading the weights. So a bfloat16 row
// becomes integers of 15 bits with one scale, in two planes of bytes; sums of a run are exact, and are multiplied with
// the run's scale and minimum.
#pragma once

#include <memory>
#include <type_traits>

#include "widening.h"

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
constexpr int kFewRows = sizeof(Element) == 2 ? 4 : 0;
#else
constexpr int kFewRows = 0;
#endif
constexpr int kRunOfRows = 32;  // a row's depth is a multiple

// Up to kFewRows rows as integers: 128 * high + low, times the row's scale.
struct IntegerRow {
  const int8_t *high, *low;   // [depth], in the order of panels
  const int32_t *sums, *excess_of_16, *excess_of_32;  // of 16 neighbours; -128 times those of as many
  int32_t high_sum, low_sum;  // of all
  float scale;
};

constexpr int64_t kDeepestBytes = 65536;  // of sums in 32 bits, of bytes of 7 bits and unsigned ones of 8
constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits

// Scale of a row by its largest magnitude: NaN if that is infinite or NaN.
struct RowScale {
  float scale, inverse;

  explicit RowScale(float most) {
    constexpr float kLargest = 127 * 128, kLeast = 0x1p-110f;  // below, the inverse would be infinite
    most = most < kLeast ? kLeast : most;
    scale = most / kLargest + most * 0.0f, inverse = kLargest / most;
  }
};

// Sums with a panel of kBytes, which are integers: [plane][row][output], the high plane first.
constexpr int kRowsOfSums = 16;  // as many as a matrix tile's

// Sixteen of them, of one row, as floats.
inline Floats joined_planes(const float* at) {
  Ints high, low;
  std::memcpy(&high, at, sizeof(high)), std::memcpy(&low, at + kRowsOfSums * kPanel, sizeof(low));
  return __builtin_convertvector(high, Floats) * 128.0f + __builtin_convertvector(low, Floats);
}

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

// Signed bytes are multiplied as unsigned ones that are 128 more. (A row that is not finite has any sum.)
inline int32_t excess_of(int32_t sum_of_row) { return (int32_t)(-128u * (uint32_t)sum_of_row); }

class IntegerRows {
 public:
  IntegerRow rows[kFewRows > 0 ? kFewRows : 1];
  float scales[kFewRows > 0 ? kFewRows : 1];

  void fill(const Element* from, int count, int64_t depth) {
    const int64_t plane = (depth + 63) / 64 * 64, parts = depth / 16;
    const int64_t num_bytes = plane * 2 + (2 * parts + parts / 2) * (int64_t)sizeof(int32_t);
    const int64_t stride = (num_bytes + 63) / 64 * 64;
    if (size_ < stride * count) {
      size_ = stride * count;
      memory_.reset(new Line[size_ / 64]);
    }
    for (int i = 0; i < count; ++i) {
      int8_t* at = memory_[0].bytes + i * stride;
      const int32_t* of_parts = (const int32_t*)(at + 2 * plane);
      rows[i] = {at, at + plane, of_parts, of_parts + parts, of_parts + 2 * parts, 0, 0, 0};
      fill_row(from + i * depth, depth, at, plane, rows[i]);
      scales[i] = rows[i].scale;
    }
  }

 private:
  struct alignas(64) Line {
    int8_t bytes[64];
  };
  using Eight = int8_t __attribute__((vector_size(16)));

  static void fill_row(const Element* from, int64_t depth, int8_t* to, int64_t plane, IntegerRow& row) {
    Floats maximum = {}, nothing = {};
    for (int64_t at = 0; at < depth; at += kLanes) {
      const Floats values = load(from + at), magnitude = (Floats)((Words)values & 0x7fffffffu);
      maximum = magnitude > maximum ? magnitude : maximum;
      nothing += values * 0.0f;  // NaN if any value is not finite
    }
    const RowScale of_row(largest(maximum));
    row.scale = of_row.scale + sum(nothing);
    const __m512 inverse = _mm512_set1_ps(of_row.inverse);
    int32_t* sums = (int32_t*)(to + 2 * plane);
    Ints high_sums = {}, low_sums = {};
    for (int64_t at = 0; at < depth; at += kLanes) {
      const Floats shifted = (Floats)_mm512_fmadd_ps((__m512)load(from + at), inverse, _mm512_set1_ps(kRounding));
      const Ints whole = (Ints)shifted - 0x4b400000;
      const int64_t part = at / kLanes, num_parts = depth / kLanes;
      sums[part] = _mm512_reduce_add_epi32((__m512i)whole);
      sums[num_parts + part] = excess_of(sums[part]);
      if (part % 2 == 1) sums[2 * num_parts + part / 2] = excess_of(sums[part - 1] + sums[part]);
      high_sums += whole >> 7, low_sums += whole & 127;
      const Eight high = __builtin_convertvector(whole >> 7, Eight), low = __builtin_convertvector(whole & 127, Eight);
      store_in_order(high, to + at), store_in_order(low, to + plane + at);
    }
    row.high_sum = _mm512_reduce_add_epi32((__m512i)high_sums);
    row.low_sum = _mm512_reduce_add_epi32((__m512i)low_sums);
  }

  static void store_in_order(Eight values, int8_t* to) {
    values = __builtin_shufflevector(values, values, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    std::memcpy(to, &values, sizeof(values));
  }

  std::unique_ptr<Line[]> memory_;
  int64_t size_ = 0;
};

// Four neighbours of a row, for each lane.
inline __m512i four(const int8_t* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return _mm512_set1_epi32(bytes);
}

// The integer sums of a run, of 16 outputs.
struct RunSums {
  __m512i high = {}, low = {};

  void add(__m512i weights, const int8_t* highs, const int8_t* lows) {
    high = _mm512_dpbusd_epi32(high, weights, four(highs));
    low = _mm512_dpbusd_epi32(low, weights, four(lows));
  }

  Ints whole() const { return ((Ints)high << 7) + (Ints)low; }
};

// A run's exact sum in a row's total; the same in all forms.
inline Floats add_run(Floats total, Ints whole, Floats scale) {
  return (Floats)_mm512_fmadd_ps((__m512)__builtin_convertvector(whole, Floats), (__m512)scale, (__m512)total);
}

// The highest bits of the elements k to k + 3 of each lane, where bytes have their fifth bit.
inline __m512i highest_bits(__m512i words, int k) {
  alignas(64) static constexpr auto kShifts = [] {
    struct { uint8_t at[64]; } table = {};
    for (int i = 0; i < 64; ++i) table.at[i] = (uint8_t)(i % 8 / 4 * 32 + i % 4 / 2 * 16 + i % 2 - 4 + 64);
    return table;
  }();
  const __m512i shifts = _mm512_add_epi8(_mm512_load_si512(kShifts.at), _mm512_set1_epi8((char)(k / 2)));
  return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, words), _mm512_set1_epi8(16));
}

// Eight neighbours of each of sixteen outputs, the first four, then the next, as bytes.
struct EightBytes {
  __m512i first, second;
};

// The values k to k + 7 of one half of a run.
template <class Runs>
inline EightBytes eight_bytes(const char* run, int k, int half) {
  if constexpr (Runs::kHasCodes) {
    const __m512i words = _mm512_loadu_si512(run + Runs::kScales + k / 2 * kPanel + half * 64);
    // The table repeats each 16 bytes: the instruction reads six bits of an index, two more than a code's.
    return {_mm512_permutexvar_epi8(words, float4_table()),
            _mm512_permutexvar_epi8(_mm512_srli_epi16(words, 4), float4_table())};
  } else if constexpr (!Runs::kHasMinima) {
    const char* from = run + Runs::kScales + k * kPanel + half * 64;
    return {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 4 * kPanel)};
  } else {
    const char* highest_at = run + Runs::kScales + half * 64;
    const __m512i words = _mm512_loadu_si512(highest_at + Runs::kHighest + k / 2 * kPanel);
    const __m512i lowest = _mm512_set1_epi8(15);
    EightBytes bytes = {_mm512_and_si512(words, lowest), _mm512_and_si512(_mm512_srli_epi16(words, 4), lowest)};
    if constexpr (Runs::kFive) {
      const __m512i highest = _mm512_loadu_si512(highest_at);
      bytes.first = _mm512_or_si512(bytes.first, highest_bits(highest, k));
      bytes.second = _mm512_or_si512(bytes.second, highest_bits(highest, k + 4));
    }
    return bytes;
  }
}

template <class Runs, int kRows>
void multiply_few_runs(const char* panel, int64_t depth, const IntegerRow* rows, float* sums) {
  constexpr int kSums = Runs::kRun / kLanes;
  Floats totals[kRows][2] = {};
  const __m512i sign = _mm512_set1_epi8(Runs::kHasMinima || Runs::kHasCodes ? 0 : -128);
  const char* first_of_panel = panel;
  panel += Runs::kHeader;
  for (int64_t run = 0; run < depth / Runs::kRun; ++run, panel += Runs::kBytes) {
    fetch(panel, Runs::kBytes);
    RunSums of_run[kRows][2];
    if constexpr (!Runs::kHasMinima)
      for (int i = 0; i < kRows; ++i) {
        const int32_t* excess = kSums == 1 ? rows[i].excess_of_16 : rows[i].excess_of_32;
        of_run[i][0].low = of_run[i][1].low = _mm512_set1_epi32(excess[run]);
      }
    for (int k = 0; k < Runs::kRun; k += 8)
      for (int half = 0; half < 2; ++half) {
        const auto [first, second] = eight_bytes<Runs>(panel, k, half);
        for (int i = 0; i < kRows; ++i) {
          const int8_t *high = rows[i].high + run * Runs::kRun + k, *low = rows[i].low + run * Runs::kRun + k;
          of_run[i][half].add(_mm512_xor_si512(first, sign), high, low);
          of_run[i][half].add(_mm512_xor_si512(second, sign), high + 4, low + 4);
        }
      }
    for (int half = 0; half < 2; ++half) {
      const Floats scale = Runs::scale_of_run(panel, half);
      for (int i = 0; i < kRows; ++i) {
        Floats& total = totals[i][half];
        total = add_run(total, of_run[i][half].whole(), scale);
        if constexpr (Runs::kHasMinima) {
          int32_t sum_of_row = 0;
          for (int part = 0; part < kSums; ++part) sum_of_row += rows[i].sums[run * kSums + part];
          total = add_run(total, Ints{} + sum_of_row, Runs::minimum(panel, half));
        }
      }
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) {
      if constexpr (Runs::kHeader > 0) totals[i][half] *= load((const float*)first_of_panel + half * kLanes);
      store(sums + i * kPanel + half * kLanes, totals[i][half] * rows[i].scale);
    }
}

// Sums for the kind kBytes: integers, in the order of joined_planes().
template <int kRows>
void multiply_whole_bytes(const char* panel, int64_t depth, const IntegerRow* rows, float* sums) {
  RunSums of_row[kRows][2];
  const __m512i sign = _mm512_set1_epi8(-128);
  const char* from = panel + kScaleBytes;
  for (int64_t k = 0; k < depth; k += 4, from += 4 * kPanel) {
    fetch(from, 4 * kPanel);
    for (int half = 0; half < 2; ++half) {
      const __m512i weights = _mm512_xor_si512(_mm512_loadu_si512(from + half * 64), sign);
      for (int i = 0; i < kRows; ++i) of_row[i][half].add(weights, rows[i].high + k, rows[i].low + k);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) {
      float* to = sums + i * kPanel + half * kLanes;
      const __m512i high_excess = _mm512_set1_epi32(excess_of(rows[i].high_sum));
      const __m512i low_excess = _mm512_set1_epi32(excess_of(rows[i].low_sum));
      _mm512_storeu_si512(to, _mm512_add_epi32(of_row[i][half].high, high_excess));
      _mm512_storeu_si512(to + kRowsOfSums * kPanel, _mm512_add_epi32(of_row[i][half].low, low_excess));
    }
}

// sums[row][output of the panel] of up to kFewRows rows; of the kind kBytes integers.
template <int kRows = kFewRows>
void multiply_few(int64_t kind, const char* panel, int64_t depth, const IntegerRow* rows, int count, float* sums) {
  if constexpr (kRows > 1)
    if (count < kRows) return multiply_few<kRows - 1>(kind, panel, depth, rows, count, sums);
  if constexpr (kRows > 0)
    with_runs(kind, [&](auto runs) {
      if constexpr (std::is_same_v<decltype(runs), PlainBytes>)
        multiply_whole_bytes<kRows>(panel, depth, rows, sums);
      else if constexpr (decltype(runs)::kIsWhole)
        multiply_few_runs<decltype(runs), kRows>(panel, depth, rows, sums);
    });
}

#else

struct IntegerRows {
  const IntegerRow* rows = nullptr;
  const float* scales = nullptr;
  void fill(const Element*, int, int64_t) {}
};

inline void multiply_few(int64_t, const char*, int64_t, const IntegerRow*, int, float*) {}

#endif

// Owned by the calling thread, kept for its next product.
inline IntegerRows& own_integer_rows() {
  static thread_local IntegerRows own;
  return own;
}

}  // namespace
