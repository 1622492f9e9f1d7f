// Products of contiguous rows with one panel of ELEMENTs, in vectors: what attention and layers share.
#pragma once

#include "tiles.h"
#include "widening.h"

namespace {

constexpr int kRowsAtOnce = 12;              // 24 vectors of sums, and room for the operands
constexpr int kRowsOfTiles = 2 * kTileRows;  // the same, in matrix tiles

// Rows of a product: element k of row i is element k % kStep at i * row_stride + k / kStep * step_stride.
struct Operand {
  const Element* rows;
  int64_t row_stride, step_stride;
};

inline bool suits_tiles(int64_t depth) { return kStep == 2 && kTilesAreThere && depth % kTileDepth == 0; }

// Contiguous rows of `depth` elements, for tiles.
inline TileRows tile_rows(const Element* rows, int64_t depth) {
  constexpr int64_t kSize = sizeof(Element);
  return {rows, depth * kSize, kTileDepth * kSize, kTileRows * depth * kSize};
}

// sums[row][output of the panel], for kRows rows; prefetches `next_panel` unless it is null.
template <int kRows, bool kFetches>
__attribute__((noinline)) void multiply_rows(const Operand& operand, const Element* panel, int64_t num_steps,
                                             const Element* next_panel, float* sums) {
  Floats low[kRows] = {}, high[kRows] = {};
  const Element* rows = operand.rows;
  const int64_t row_stride = operand.row_stride, step_stride = operand.step_stride;
  for (int64_t step = 0; step < num_steps; ++step, rows += step_stride, panel += kStep * kPanel) {
    if constexpr (kFetches)
      for (int at = 0; at < kStep * kPanel; at += 64 / (int)sizeof(Element))
        __builtin_prefetch(next_panel + step * kStep * kPanel + at, 0, 2);
    if constexpr (kStep == 1) {
      const Floats first = load(panel), second = load(panel + kLanes);
      for (int i = 0; i < kRows; ++i) {
        const float value = *(const float*)(rows + i * row_stride);
        low[i] += value * first, high[i] += value * second;
      }
    } else {
      Words first, second;  // the pairs of 16 outputs each
      std::memcpy(&first, panel, sizeof(first));
      std::memcpy(&second, panel + 2 * kLanes, sizeof(second));
      for (int i = 0; i < kRows; ++i) {
        uint32_t pair;
        std::memcpy(&pair, rows + i * row_stride, sizeof(pair));
#ifdef __AVX512BF16__
        const __m512bh values = (__m512bh)_mm512_set1_epi32((int)pair);
        low[i] = (Floats)_mm512_dpbf16_ps((__m512)low[i], values, (__m512bh)first);
        high[i] = (Floats)_mm512_dpbf16_ps((__m512)high[i], values, (__m512bh)second);
#else
        const Words even = Words{} + (pair << 16), odd = Words{} + (pair & 0xffff0000u);
        low[i] += (Floats)even * (Floats)(first << 16) + (Floats)odd * (Floats)(first & 0xffff0000u);
        high[i] += (Floats)even * (Floats)(second << 16) + (Floats)odd * (Floats)(second & 0xffff0000u);
#endif
      }
    }
  }
  for (int i = 0; i < kRows; ++i) store(sums + i * kPanel, low[i]), store(sums + i * kPanel + kLanes, high[i]);
}

// The same for any number of rows up to kRows.
template <int kRows = kRowsAtOnce>
inline void multiply_rows(int count, const Operand& operand, const Element* panel, int64_t num_steps,
                          const Element* next_panel, float* sums) {
  if constexpr (kRows > 1)
    if (count < kRows) return multiply_rows<kRows - 1>(count, operand, panel, num_steps, next_panel, sums);
  if (next_panel != nullptr)
    multiply_rows<kRows, true>(operand, panel, num_steps, next_panel, sums);
  else
    multiply_rows<kRows, false>(operand, panel, num_steps, nullptr, sums);
}

}  // namespace
