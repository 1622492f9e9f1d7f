// Products of few rows with panels of 8-bit floats (e4m3): each weight is read once and widened in registers, or right
// before matrix tiles. Scales are multiplied with a run's sums, those of the whole depth by the caller.
#pragma once

#include "row_products.h"

namespace {

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)

constexpr int kFewFloatRows = sizeof(Element) == 2 ? 8 : 0;  // as registers have room for
constexpr int kFewBesideTiles = 4;                           // for more rows tiles are faster

inline __m512 add_pairs(__m512 sums, const Element* row, __m512i weights) {
  int32_t pair;
  std::memcpy(&pair, row, sizeof(pair));
  return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
}

template <class Runs, int kRows>
void multiply_float_runs(const char* panel, int64_t depth, const Element* rows, float* sums) {
  constexpr int kChains = kRows <= 4 ? 2 : 1;  // of additions, which wait for one another
  const Float8Table table;
  const int64_t length = Runs::kHeader > 0 ? depth : Runs::kRun;
  Floats totals[kRows][2] = {};
  const char* from = panel + Runs::kHeader;
  for (int64_t run = 0; run < depth; run += length) {
    const char* of_run = from;
    __m512 sums_of_run[kRows][2][kChains] = {};  // of each half's pairs
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
          auto& sums_of_half = sums_of_run[i][half];
          sums_of_half[0] = add_pairs(sums_of_half[0], row, first);
          sums_of_half[kChains - 1] = add_pairs(sums_of_half[kChains - 1], row + 2, second);
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      const Floats scale = Runs::kHeader > 0 ? Floats{} + 1.0f : Runs::scale(panel, of_run, half) / kFloat8Unit;
      for (int i = 0; i < kRows; ++i) {
        Floats sum = (Floats)sums_of_run[i][half][0];
        if (kChains > 1) sum += (Floats)sums_of_run[i][half][kChains - 1];
        totals[i][half] += sum * scale;
      }
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

constexpr int kFewFloatRows = 0, kFewBesideTiles = 0;

inline void multiply_few_floats(int64_t, const char*, int64_t, const Element*, int, float*) {}

#endif

inline bool takes_few_floats(int64_t kind, int64_t depth, int64_t num_rows) {
  const int64_t most = suits_tiles(depth) ? std::min(kFewFloatRows, kFewBesideTiles) : kFewFloatRows;
  return kind >= kFloat8 && depth % 4 == 0 && num_rows <= most;
}

inline bool takes_float_tiles(int64_t kind, int64_t num_rows) {
  return kind == kFloat8OfMany && num_rows <= kRowsOfTiles;
}

// sums[row][output of the panel] of up to kRowsOfTiles rows in matrix tiles. For so few rows multiplying each run's sums
// with the scales is faster than multiplying the weights; `wide` is the panel without scales.
template <class Meanwhile>
void multiply_float_tiles(Tiles& tiles, int num_rows, TileRows rows, const char* panel, const WidePanel& wide,
                          int64_t depth, float* sums, const Meanwhile& meanwhile) {
  using Runs = Float8<128>;
  alignas(64) float of_run[kRowsOfTiles * kPanel];
  for (int64_t run = 0; run < depth; run += Runs::kRun, panel += Runs::kBytes) {
    tiles.multiply(num_rows, rows, wide.at(run), Runs::kRun / kStep, of_run, [&] { meanwhile(); });
    rows.at = (const char*)rows.at + Runs::kRun / kTileDepth * rows.next_depth;
    for (int half = 0; half < 2; ++half) {
      const Floats scale = Runs::scale(panel, panel, half) / kFloat8Unit;
      for (int at = half * kLanes; at < num_rows * kPanel; at += kPanel)
        store(sums + at, (run > 0 ? load(sums + at) : Floats{}) + load(of_run + at) * scale);
    }
  }
}

}  // namespace
