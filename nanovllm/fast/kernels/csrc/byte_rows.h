// Products of rows with quantised panels as bytes (VNNI), where there are no matrix tiles: weights are not widened.
//
// Each run of 32 neighbours of a row becomes bytes with one scale, as in llama.cpp, or with two for weights in runs of
// 16; with EXACT_ROWS it becomes integers of 15 bits in two planes of bytes, twice the products. A run's sums are exact
// integers, multiplied with the scales of row and weights. Panels of all kinds become unsigned bytes in thread-local
// memory before the rows pass over them. A row's result depends on neither the other rows nor their number.
#pragma once

#ifdef __AVXVNNI__
#include <immintrin.h>
#endif

#include "few_rows.h"
#include "tiles.h"

namespace {

constexpr int kPlanesOfRows = EXACT_ROWS ? 2 : 1;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define BYTE_ROWS
using ByteSums = int32_t __attribute__((vector_size(64)));

inline ByteSums add_fours(ByteSums sums, ByteSums weights, ByteSums row) {
  return (ByteSums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)row);
}
#elif defined(__AVXVNNI__)
#define BYTE_ROWS
using ByteSums = int32_t __attribute__((vector_size(32)));

inline ByteSums add_fours(ByteSums sums, ByteSums weights, ByteSums row) {
  return (ByteSums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)row);
}
#endif

#if defined(BYTE_ROWS)

constexpr bool kHasByteRows = sizeof(Element) == 2;
constexpr int kWidth = sizeof(ByteSums) / sizeof(int32_t);   // outputs of a vector
constexpr int kPairsOfRows = kWidth == kLanes ? 3 : 1;       // as registers have room for
constexpr int kRowsOfBytes = kPlanesOfRows == 2 ? kPairsOfRows + 1 : kPairsOfRows == 3 ? 6 : 3;  // of a group
constexpr int kFours = kRunOfRows / 4;

using ByteFloats = float __attribute__((vector_size(sizeof(ByteSums))));

// A run of a group's rows.
struct alignas(64) RunOfGroup {
  int32_t values[kPlanesOfRows][kFours][kRowsOfBytes];  // four bytes each, in the order of panels; the high plane first
  float scales[2][kRowsOfBytes];                  // of both halves
  float sums[kRowsOfBytes];                       // of the run's values, times the scale
  int32_t excess[3][kPlanesOfRows][kRowsOfBytes];       // -128 times the values' sum: of both halves, and of the run
};

// Memory for groups of rows; owned by the calling thread, read by all threads of its parallel regions.
class ByteMemory {
 public:
  // Rows with one scale a run, with two for runs of 16, or both.
  bool has_whole_runs = false, has_halves = false;

  void reserve(int64_t num_rows, int64_t depth) {
    num_runs_ = (num_rows + kRowsOfBytes - 1) / kRowsOfBytes * (depth / kRunOfRows);
    if (2 * num_runs_ > size_) runs_.reset(new RunOfGroup[size_ = 2 * num_runs_]);
  }

  RunOfGroup* runs(bool in_halves) const { return runs_.get() + (in_halves ? num_runs_ : 0); }

 private:
  std::unique_ptr<RunOfGroup[]> runs_;
  int64_t num_runs_ = 0, size_ = 0;
};

inline bool takes_bytes(int64_t depth) { return kHasByteRows && !kTilesAreThere && depth % kRunOfRows == 0; }

// Sixteen neighbours as integers, in the order of panels as bytes: high plane, low plane.
struct SplitValues {
  using Bytes = int8_t __attribute__((vector_size(16)));
  Bytes planes[kPlanesOfRows];
  int32_t sums[kPlanesOfRows];

  SplitValues(Floats values, float inverse) {
    const Ints whole = (Ints)(values * inverse + kRounding) - 0x4b400000;
    for (int plane = 0; plane < kPlanesOfRows; ++plane) {
      const Ints part = kPlanesOfRows == 1 ? whole : plane == 0 ? whole >> 7 : whole & 127;
      const Bytes bytes = __builtin_convertvector(part, Bytes);  // any, if the values are not finite
      planes[plane] = __builtin_shufflevector(bytes, bytes, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
      sums[plane] = (int32_t)sum(__builtin_convertvector(bytes, Floats));  // exact
    }
  }
};

inline void split_run(const Element* from, RunOfGroup& to, int row, bool in_halves) {
  constexpr float kLargest = kPlanesOfRows == 1 ? 127.0f : 127.0f * 128, kLeast = 0x1p-110f;  // as in RowScale
  const Floats low = load(from), high = load(from + kLanes);
  float most[2] = {largest((Floats)((Words)low & 0x7fffffffu)), largest((Floats)((Words)high & 0x7fffffffu))};
  for (float& each : most) each = std::max(in_halves ? each : std::max(most[0], most[1]), kLeast);
  const float nothing = sum(low * 0.0f + high * 0.0f);  // NaN if any value is not finite
  const SplitValues halves[2] = {{low, kLargest / most[0]}, {high, kLargest / most[1]}};
  float whole = 0;
  for (int plane = 0; plane < kPlanesOfRows; ++plane) {
    for (int half = 0; half < 2; ++half) {
      int32_t fours[kFours / 2];
      std::memcpy(fours, &halves[half].planes[plane], sizeof(fours));
      for (int i = 0; i < kFours / 2; ++i) to.values[plane][half * kFours / 2 + i][row] = fours[i];
      to.excess[half][plane][row] = -128 * halves[half].sums[plane];
    }
    const int32_t of_run = halves[0].sums[plane] + halves[1].sums[plane];
    to.excess[2][plane][row] = -128 * of_run;
    whole = whole * 128 + (float)of_run;
  }
  for (int half = 0; half < 2; ++half) to.scales[half][row] = most[half] / kLargest + nothing;
  to.sums[row] = whole * to.scales[0][row];  // for minima, which runs of 16 do not have
}

// A panel of any kind as unsigned bytes, [depth / 4][32 outputs][4], with float scales and minima.
class BytePanel {
 public:
  const int32_t* bytes = nullptr;
  const float *scales = nullptr, *minima = nullptr;  // [runs][32]; no minima: signed bytes, which are 128 more
  int64_t next_scales = 0;                           // from one run to the next
  bool is_of_sixteen = false;                        // runs of 16

  BytePanel(int64_t kind, const char* panel, int64_t depth) {
    if (depth == 0) return;
    static thread_local std::unique_ptr<Line[]> memory;
    static thread_local int64_t size = 0;
    const int64_t most_scales = depth / 16 * kPanel, needed = depth * kPanel / 4 + most_scales;  // words
    if (needed > size) memory.reset(new Line[needed / 16]), size = needed;
    int32_t* to = memory[0].words;
    float* factors = (float*)(to + depth * kPanel / 4);
    bytes = to, scales = factors, next_scales = kPanel;
    with_runs(kind, [&](auto runs) {
      using Runs = decltype(runs);
      if constexpr (std::is_same_v<Runs, PlainBytes>) {
        scales = (const float*)panel, next_scales = 0;
        read_bytes(panel + kScaleBytes, depth, to);
      } else if constexpr (Runs::kIsWhole) {
        is_of_sixteen = Runs::kRun == 16;
        if (Runs::kHasMinima) minima = factors + most_scales / 2;
        const char* first_of_panel = panel;
        panel += Runs::kHeader;
        for (int64_t run = 0; run < depth / Runs::kRun; ++run, panel += Runs::kBytes, to += Runs::kRun * kPanel / 4) {
          fetch(panel, Runs::kBytes);
          for (int half = 0; half < 2; ++half) {
            float* of_run = factors + run * kPanel + half * kLanes;
            store(of_run, Runs::scale(first_of_panel, panel, half));
            if constexpr (Runs::kHasMinima) store(of_run + most_scales / 2, Runs::minimum(panel, half));
          }
          if constexpr (Runs::kHasCodes)
            read_codes<Runs>(panel + Runs::kScales, to);
          else if constexpr (Runs::kHasMinima)
            read_nibbles<Runs>(panel + Runs::kScales, to);
          else
            read_bytes(panel + Runs::kScales, Runs::kRun, to);
        }
      }
    });
  }

 private:
  struct alignas(64) Line {
    int32_t words[16];
  };

  static void read_bytes(const char* from, int64_t depth, int32_t* to) {
    for (int64_t at = 0; at < depth * kPanel; at += 64) {
      Words words;
      if (at % 4096 == 0) fetch(from + at, 4096);
      std::memcpy(&words, from + at, sizeof(words));
      words ^= 0x80808080u;
      std::memcpy((char*)to + at, &words, sizeof(words));
    }
  }

  // Bits of the elements k to k + 3 among the highest of a run, as `widening.h` has them, in their bytes.
  static Words highest_of(Words highest, int k) {
    const Words bits = highest >> (k / 2);
    return (bits & 0x00010001u) << 4 | (bits & 0x00020002u) << 11;
  }

  template <class Runs>
  static void read_codes(const char* from, int32_t* to) {
    for (int lane = 0; lane < kPanel; lane += kLanes)
      for (int k = 0; k < Runs::kRun; k += 8) {
        Words words;
        std::memcpy(&words, from + k / 2 * kPanel + lane * 4, sizeof(words));
        const Words first = float4_bytes(words & 0x0f0f0f0fu), second = float4_bytes(words >> 4 & 0x0f0f0f0fu);
        std::memcpy(to + k / 4 * kPanel + lane, &first, sizeof(first));
        std::memcpy(to + (k / 4 + 1) * kPanel + lane, &second, sizeof(second));
      }
  }

  template <class Runs>
  static void read_nibbles(const char* from, int32_t* to) {
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      Words highest = {};
      if (Runs::kFive) std::memcpy(&highest, from + lane * 4, sizeof(highest));
      for (int k = 0; k < Runs::kRun; k += 8) {
        Words words;
        std::memcpy(&words, from + Runs::kHighest + k / 2 * kPanel + lane * 4, sizeof(words));
        Words first = words & 0x0f0f0f0fu, second = words >> 4 & 0x0f0f0f0fu;
        if (Runs::kFive) first |= highest_of(highest, k), second |= highest_of(highest, k + 4);
        std::memcpy(to + k / 4 * kPanel + lane, &first, sizeof(first));
        std::memcpy(to + (k / 4 + 1) * kPanel + lane, &second, sizeof(second));
      }
    }
  }
};

// Neighbouring outputs of a panel from the given one on, 2 * kWidth of them, and kRows rows of a group.
template <int kRows, bool kHasMinima, bool kOfSixteen>
void multiply_outputs(const BytePanel& panel, int first, const RunOfGroup* rows, int64_t depth, float* sums) {
  constexpr int kParts = kOfSixteen ? 2 : 1, kSteps = kFours / kParts;
  const auto load_outputs = [](const auto* from, int half, auto& to) {
    std::memcpy(&to, from + half * kWidth, sizeof(to));
  };
  ByteFloats totals[kRows][2] = {};
  const int32_t* weights = panel.bytes + first;
  const float *scales = panel.scales + first, *minima = panel.minima + first;
  for (int64_t run = 0; run < depth / kRunOfRows; ++run, ++rows)
    for (int part = 0; part < kParts; ++part, scales += panel.next_scales) {
      ByteSums of_run[kPlanesOfRows][kRows][2];
#pragma GCC unroll 2
      for (int plane = 0; plane < kPlanesOfRows; ++plane)
#pragma GCC unroll 6
        for (int i = 0; i < kRows; ++i)
          of_run[plane][i][0] = of_run[plane][i][1] =
              ByteSums{} + (kHasMinima ? 0 : rows->excess[kOfSixteen ? part : 2][plane][i]);
#pragma GCC unroll 1
      for (int four = part * kSteps; four < (part + 1) * kSteps; ++four, weights += kPanel) {
        ByteSums of_outputs[2];
        load_outputs(weights, 0, of_outputs[0]), load_outputs(weights, 1, of_outputs[1]);
#pragma GCC unroll 2
        for (int plane = 0; plane < kPlanesOfRows; ++plane)
#pragma GCC unroll 6
          for (int i = 0; i < kRows; ++i) {
            const ByteSums row = ByteSums{} + rows->values[plane][four][i];
            of_run[plane][i][0] = add_fours(of_run[plane][i][0], of_outputs[0], row);
            of_run[plane][i][1] = add_fours(of_run[plane][i][1], of_outputs[1], row);
          }
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        ByteFloats scale, minimum = {};
        load_outputs(scales, half, scale);
        if (kHasMinima) load_outputs(minima, half, minimum);
#pragma GCC unroll 6
        for (int i = 0; i < kRows; ++i) {
          ByteSums whole = of_run[0][i][half];
          if (kPlanesOfRows == 2) whole = (whole << 7) + of_run[kPlanesOfRows - 1][i][half];
          totals[i][half] += __builtin_convertvector(whole, ByteFloats) * (scale * rows->scales[part][i]);
          if (kHasMinima) totals[i][half] += minimum * rows->sums[i];
        }
      }
      if (kHasMinima) minima += kPanel;
    }
  for (int i = 0; i < kRows; ++i) std::memcpy(sums + i * kPanel + first, totals[i], sizeof(totals[i]));
}

template <int kRows>
void multiply_group(const BytePanel& panel, const RunOfGroup* rows, int64_t depth, float* sums) {
  for (int first = 0; first < kPanel; first += 2 * kWidth)
    if (panel.minima != nullptr)
      multiply_outputs<kRows, true, false>(panel, first, rows, depth, sums);
    else if (panel.is_of_sixteen)
      multiply_outputs<kRows, false, true>(panel, first, rows, depth, sums);
    else
      multiply_outputs<kRows, false, false>(panel, first, rows, depth, sums);
}

template <int kRows = kRowsOfBytes>
void multiply_bytes(const BytePanel& panel, const RunOfGroup* rows, int count, int64_t depth, float* sums) {
  if constexpr (kRows > 1)
    if (count < kRows) return multiply_bytes<kRows - 1>(panel, rows, count, depth, sums);
  multiply_group<kRows>(panel, rows, depth, sums);
}

// Rows [num_rows, depth] in groups with equal numbers of rows, but for the last.
struct ByteRows {
  const ByteMemory* memory;
  int64_t num_rows, depth;

  int64_t num_groups() const { return (num_rows + kRowsOfBytes - 1) / kRowsOfBytes; }
  int64_t rows_of_group() const { return (num_rows + num_groups() - 1) / num_groups(); }

  const RunOfGroup* group(int64_t row, bool in_halves) const {
    return memory->runs(in_halves) + row / rows_of_group() * (depth / kRunOfRows);
  }

  // Divides the runs among the threads of the enclosing parallel region, without a barrier at the end.
  void fill(const Element* rows) const {
    for (const bool in_halves : {false, true})
      if (in_halves ? memory->has_halves : memory->has_whole_runs) fill(rows, in_halves);
  }

  void fill(const Element* rows, bool in_halves) const {
    const int64_t num_runs = depth / kRunOfRows, of_group = rows_of_group();
#pragma omp for schedule(static) nowait
    for (int64_t number = 0; number < num_groups() * num_runs; ++number) {
      const int64_t first = number / num_runs * of_group, run = number % num_runs;
      for (int64_t row = first; row < std::min(num_rows, first + of_group); ++row)
        split_run(rows + row * depth + run * kRunOfRows, memory->runs(in_halves)[number], (int)(row - first), in_halves);
    }
  }

  // sums[row][output of the panel] of the rows row..end-1, whole groups.
  void multiply(const BytePanel& panel, int64_t row, int64_t end, float* sums) const {
    if constexpr (kHasByteRows)
      for (; row < end; row += rows_of_group(), sums += rows_of_group() * kPanel)
        multiply_bytes(panel, group(row, panel.is_of_sixteen), (int)std::min(end - row, rows_of_group()), depth, sums);
  }
};

#else

inline bool takes_bytes(int64_t) { return false; }

struct ByteMemory {
  bool has_whole_runs, has_halves;
  void reserve(int64_t, int64_t) {}
};

struct BytePanel {
  BytePanel(int64_t, const char*, int64_t) {}
};

struct ByteRows {
  const ByteMemory* memory;
  int64_t num_rows, depth;

  int64_t rows_of_group() const { return 1; }
  void fill(const Element*) const {}
  void multiply(const BytePanel&, int64_t, int64_t, float*) const {}
};

#endif

}  // namespace
