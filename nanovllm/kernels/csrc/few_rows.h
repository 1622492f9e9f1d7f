// Products of few rows with quantised panels, in integers: each weight is read once and multiplied as it is.
//
// Where AVX-512 multiplies bytes (VNNI), widening would take longer than reading what is widened. So a row of bfloat16
// becomes integers of 15 bits with one scale, in two planes of bytes; sums of a run are exact, and its scale and
// minimum are multiplied with these.
#pragma once

#include <memory>

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
  const int8_t *high, *low;                  // [depth]
  const int8_t *high_in_turn, *low_in_turn;  // of each eight elements the even ones, then the odd ones
  const float* sums;                         // [depth / 16], of as many neighbours
  float scale;
};

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

class IntegerRows {
 public:
  IntegerRow rows[kFewRows > 0 ? kFewRows : 1];

  void fill(const Element* from, int count, int64_t depth) {
    const int64_t plane = (depth + 63) / 64 * 64, num_bytes = plane * 4 + depth / 16 * (int64_t)sizeof(float);
    const int64_t stride = (num_bytes + 63) / 64 * 64;
    if (size_ < stride * count) {
      size_ = stride * count;
      memory_.reset(new Line[size_ / 64]);
    }
    for (int i = 0; i < count; ++i) {
      int8_t* at = memory_[0].bytes + i * stride;
      rows[i] = {at, at + plane, at + 2 * plane, at + 3 * plane, (const float*)(at + 4 * plane), 0.0f};
      fill_row(from + i * depth, depth, at, plane, rows[i].scale);
    }
  }

 private:
  struct alignas(64) Line {
    int8_t bytes[64];
  };
  using Eight = int8_t __attribute__((vector_size(16)));

  static void fill_row(const Element* from, int64_t depth, int8_t* to, int64_t plane, float& scale) {
    constexpr float kLargest = 127 * 128, kLeast = 0x1p-110f;  // below, the inverse would be infinite
    Floats maximum = {}, nothing = {};
    for (int64_t at = 0; at < depth; at += kLanes) {
      const Floats values = load(from + at), magnitude = (Floats)((Words)values & 0x7fffffffu);
      maximum = magnitude > maximum ? magnitude : maximum;
      nothing += values * 0.0f;  // NaN if any value is not finite
    }
    const float most = std::max(largest(maximum), kLeast);
    scale = most / kLargest + sum(nothing);
    const float inverse = kLargest / most;
    float* sums = (float*)(to + 4 * plane);
    for (int64_t at = 0; at < depth; at += kLanes) {
      const Floats shifted = load(from + at) * inverse + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
      const Ints whole = (Ints)shifted - 0x4b400000;
      sums[at / kLanes] = sum(shifted - 12582912.0f);
      const Eight high = __builtin_convertvector(whole >> 7, Eight), low = __builtin_convertvector(whole & 127, Eight);
      store_both(high, to + at, to + 2 * plane + at);
      store_both(low, to + plane + at, to + 3 * plane + at);
    }
  }

  static void store_both(Eight values, int8_t* to, int8_t* to_in_turn) {
    std::memcpy(to, &values, sizeof(values));
    values = __builtin_shufflevector(values, values, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    std::memcpy(to_in_turn, &values, sizeof(values));
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

  Floats whole() const { return __builtin_convertvector(((Ints)high << 7) + (Ints)low, Floats); }
};

// Brings the highest of five bits to where they are added: of each lane's word bit k + 2 * i + kOdd becomes bit 4 of byte
// i of the lane.
template <int kOdd>
inline __m512i highest_bits(__m512i words, int k) {
  alignas(64) static constexpr auto kShifts = [] {
    struct { uint8_t at[64]; } table = {};
    for (int i = 0; i < 64; ++i) table.at[i] = (uint8_t)(i % 8 / 4 * 32 + i % 4 * 2 + kOdd - 4 + 64);
    return table;
  }();
  const __m512i shifts = _mm512_add_epi8(_mm512_load_si512(kShifts.at), _mm512_set1_epi8((char)k));
  return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, words), _mm512_set1_epi8(16));
}

template <class Scale, bool kFive, int kRows>
void multiply_nibbles(const char* panel, int64_t depth, const IntegerRow* rows, float* sums) {
  constexpr int kRun = 32, kOfWord = 8;
  constexpr int64_t kHighest = kFive ? kPanel * kRun / 8 : 0;
  constexpr int64_t kRunBytes = kPanel * (2 * sizeof(Scale) + kRun / 2) + kHighest;
  Floats totals[kRows][2] = {};
  const __m512i lowest = _mm512_set1_epi8(15);
  for (int64_t run = 0; run < depth / kRun; ++run) {
    const Scale* scales = (const Scale*)(panel + run * kRunBytes);
    const char* from = (const char*)(scales + 2 * kPanel) + kHighest;
    fetch(scales, kRunBytes);
    RunSums of_run[kRows][2];
    for (int k = 0; k < kRun; k += kOfWord)
      for (int half = 0; half < 2; ++half) {
        const __m512i words = _mm512_loadu_si512(from + k / 2 * kPanel + half * 64);
        __m512i even = _mm512_and_si512(words, lowest), odd = _mm512_and_si512(_mm512_srli_epi16(words, 4), lowest);
        if constexpr (kFive) {
          const __m512i highest = _mm512_loadu_si512(from - kHighest + half * 64);
          even = _mm512_or_si512(even, highest_bits<0>(highest, k));
          odd = _mm512_or_si512(odd, highest_bits<1>(highest, k));
        }
        for (int i = 0; i < kRows; ++i) {
          const int64_t at = run * kRun + k;
          of_run[i][half].add(even, rows[i].high_in_turn + at, rows[i].low_in_turn + at);
          of_run[i][half].add(odd, rows[i].high_in_turn + at + 4, rows[i].low_in_turn + at + 4);
        }
      }
    for (int half = 0; half < 2; ++half) {
      const Floats scale = load(scales + half * kLanes), minimum = load(scales + kPanel + half * kLanes);
      for (int i = 0; i < kRows; ++i) {
        const float sum_of_row = rows[i].sums[2 * run] + rows[i].sums[2 * run + 1];
        totals[i][half] += of_run[i][half].whole() * scale + sum_of_row * minimum;
      }
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int half = 0; half < 2; ++half) store(sums + i * kPanel + half * kLanes, totals[i][half] * rows[i].scale);
}

// Signed bytes, as unsigned ones that are 128 more. Without scales, runs only bound the integers.
template <class Scale, int kRun, bool kScaled, int kRows>
void multiply_bytes(const char* panel, int64_t depth, const IntegerRow* rows, float* sums) {
  constexpr int64_t kScalesOfRun = kScaled ? kPanel * sizeof(Scale) : 0, kRunBytes = kScalesOfRun + kPanel * kRun;
  alignas(64) static constexpr auto kInTurn = [] {
    struct { uint8_t at[64]; } table = {};
    for (int i = 0; i < 64; ++i) table.at[i] = (uint8_t)(i % 4 * kPanel + i / 4);
    return table;
  }();
  Floats totals[kRows][2] = {};
  const __m512i sign = _mm512_set1_epi8(-128), first = _mm512_load_si512(kInTurn.at);
  const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi8(kLanes));
  const char* from = panel + (kScaled ? 0 : kScaleBytes);
  for (int64_t run = 0; run < depth / kRun; ++run, from += kRunBytes) {
    fetch(from, kRunBytes);
    RunSums of_run[kRows][2];
    for (int k = 0; k < kRun; k += 4) {
      const char* at = from + kScalesOfRun + k * kPanel;
      const __m512i two = _mm512_xor_si512(_mm512_loadu_si512(at), sign);
      const __m512i others = _mm512_xor_si512(_mm512_loadu_si512(at + 2 * kPanel), sign);
      const __m512i weights[2] = {_mm512_permutex2var_epi8(two, first, others),
                                  _mm512_permutex2var_epi8(two, second, others)};
      for (int i = 0; i < kRows; ++i)
        for (int half = 0; half < 2; ++half)
          of_run[i][half].add(weights[half], rows[i].high + run * kRun + k, rows[i].low + run * kRun + k);
    }
    for (int half = 0; half < 2; ++half) {
      Floats scale = Floats{} + 1.0f;
      if (kScaled) scale = load((const Scale*)from + half * kLanes);
      for (int i = 0; i < kRows; ++i) {
        float sum_of_row = 0;
        for (int part = 0; part < kRun / kLanes; ++part) sum_of_row += rows[i].sums[run * (kRun / kLanes) + part];
        totals[i][half] += (of_run[i][half].whole() - 128 * sum_of_row) * scale;
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    Floats scale = Floats{} + 1.0f;
    if (!kScaled) scale = load((const float*)panel + half * kLanes);  // before the row's: a large one may overflow
    for (int i = 0; i < kRows; ++i) store(sums + i * kPanel + half * kLanes, totals[i][half] * scale * rows[i].scale);
  }
}

// sums[row][output of the panel] of up to kFewRows rows.
template <int kRows = kFewRows>
void multiply_few(int64_t kind, const char* panel, int64_t depth, const IntegerRow* rows, int count, float* sums) {
  if constexpr (kRows > 1)
    if (count < kRows) return multiply_few<kRows - 1>(kind, panel, depth, rows, count, sums);
  if constexpr (kRows > 0) switch (kind) {
      case kBytes: return multiply_bytes<float, 32, false, kRows>(panel, depth, rows, sums);
      case kBytesHalfScales: return multiply_bytes<float16, 32, true, kRows>(panel, depth, rows, sums);
      case kBytesOfSixteen: return multiply_bytes<float, 16, true, kRows>(panel, depth, rows, sums);
      case kNibblesHalfScales: return multiply_nibbles<float16, false, kRows>(panel, depth, rows, sums);
      case kNibblesFloatScales: return multiply_nibbles<float, false, kRows>(panel, depth, rows, sums);
      case kFiveBitsHalfScales: return multiply_nibbles<float16, true, kRows>(panel, depth, rows, sums);
      default: return multiply_nibbles<float, true, kRows>(panel, depth, rows, sums);
    }
}

#else

struct IntegerRows {
  const IntegerRow* rows = nullptr;
  void fill(const Element*, int, int64_t) {}
};

inline void multiply_few(int64_t, const char*, int64_t, const IntegerRow*, int, float*) {}

#endif

// The calling thread's, kept for its next product.
inline IntegerRows& integer_rows() {
  static thread_local IntegerRows own;
  return own;
}

}  // namespace
