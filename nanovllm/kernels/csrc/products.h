// Products of activations with a packed weight: rows [num_rows, depth] times weight [num_outputs, depth], transposed.
//
// A weight is packed in panels of 32 outputs, in the order in which they are read: for each step along the depth (one
// element, or two neighbours in bfloat16, which the processor multiplies in pairs) the panel's 32 outputs. A panel
// stays in the second-level cache while up to 12 rows at a time pass over it, their 12 x 32 sums in registers;
// meanwhile the next panel is fetched. So weights are read from memory once, which is all that counts with few rows,
// and with many rows every load serves several products. Where the processor has matrix tiles, bfloat16 is multiplied
// in these, 32 rows at a time.
#pragma once

#include "few_rows.h"
#include "tiles.h"

namespace {

constexpr int kRowsAtOnce = 12;                         // 24 vectors of sums, and room for the operands
constexpr int kRowsOfTiles = 2 * kTileRows;             // the same, in matrix tiles
constexpr int64_t kRowsOfTask = 384;                    // few enough that their activations stay in the cache

struct Product {
  const char* weight;   // packed panels
  const Element* bias;  // [num_outputs] or null
  int64_t num_outputs;  // a multiple of kPanel
  int64_t depth;        // a multiple of kStep, and of each kind's runs
  const Panel* panels;  // null if all are plain

  Panel panel(int64_t number) const {
    return panels != nullptr ? panels[number] : Panel{number * kPanel * depth * (int64_t)sizeof(Element), kPlain};
  }
};

// Rows of a product: element k of row i is element k % kStep at i * row_stride + k / kStep * step_stride.
struct Operand {
  const Element* rows;
  int64_t row_stride, step_stride;
};

// Whether the processor's tiles multiply rows whose elements lie side by side, `num_steps` deep.
inline bool suits_tiles(const Operand& operand, int64_t num_steps) {
  return kStep == 2 && kTilesAreThere && operand.step_stride == kStep && num_steps % kTileSteps == 0;
}

// sums[row][output of the panel], for kRows rows. Meanwhile `next_panel` is fetched, unless it is null.
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

// The same for any number of rows up to kRowsOfTiles if they suit the tiles, else up to kRowsAtOnce.
inline void multiply_rows(Tiles& tiles, bool suits, int count, const Operand& operand, const Element* panel,
                          int64_t num_steps, const Element* next_panel, float* sums) {
  if (suits)
    tiles.multiply(count, operand.rows, operand.row_stride, panel, num_steps, next_panel, sums);
  else
    multiply_rows(count, operand, panel, num_steps, next_panel, sums);
}

// Parts of a product's rows: as many as their activations ask for, and more where the panels alone would leave threads
// idle. The first number that lets 9 of 10 threads work all the time, or else the best.
inline int64_t parts_of(int64_t num_rows, int64_t num_panels, int64_t num_threads, int64_t at_once) {
  const auto idle = [=](int64_t parts) {  // rounds of all threads, for one task
    const int64_t tasks = parts * num_panels;
    return (double)((tasks + num_threads - 1) / num_threads * num_threads) / (double)tasks;
  };
  const int64_t most = std::max<int64_t>(1, num_rows / at_once);
  const int64_t least = std::min((num_rows + kRowsOfTask - 1) / kRowsOfTask, most);
  int64_t best = least;
  for (int64_t parts = least; parts <= most && idle(best) > 1.0 / 0.9; ++parts)
    if (idle(parts) < idle(best)) best = parts;
  return best;
}

// Shares a product among the threads of the enclosing parallel region, and waits for all of them. `take` gets each
// row's 32 sums of a panel: take(row, first output, low half, high half).
template <class Take>
void multiply(const Product& product, const Element* rows, int64_t num_rows, int num_threads, const Take& take) {
  const int64_t num_panels = product.num_outputs / kPanel, depth = product.depth;
  const bool suits = suits_tiles({rows, depth, kStep}, depth / kStep);
  const int64_t at_once = suits ? kRowsOfTiles : kRowsAtOnce;
  const bool are_few = product.panels != nullptr && num_rows <= kFewRows && depth % kRunOfRows == 0;
  if (are_few) integer_rows().fill(rows, (int)num_rows, depth);
  Tiles tiles;
  const int64_t num_parts = parts_of(num_rows, num_panels, num_threads, at_once);
#pragma omp for schedule(static) collapse(2)
  for (int64_t part = 0; part < num_parts; ++part) {
    for (int64_t number = 0; number < num_panels; ++number) {
      const int64_t begin = num_rows * part / num_parts, count = num_rows * (part + 1) / num_parts - begin;
      const auto [offset, kind] = product.panel(number);
      const char* packed = product.weight + offset;
      const char* next = number + 1 < num_panels ? product.weight + product.panel(number + 1).offset : nullptr;
      const bool is_integer = are_few && kind != kPlain;
      const Element* panel =
          kind == kPlain || is_integer ? (const Element*)packed : widened(kind, packed, depth);
      const Element* next_panel = kind == kPlain ? (const Element*)next : nullptr;
      const int64_t first_output = number * kPanel;
      Floats low_scale = Floats{} + 1.0f, high_scale = low_scale, low_bias = {}, high_bias = {};
      if (kind == kBytes)
        low_scale = load((const float*)packed), high_scale = load((const float*)packed + kLanes);
      if (product.bias != nullptr)
        low_bias = load(product.bias + first_output), high_bias = load(product.bias + first_output + kLanes);
      alignas(64) float sums[kRowsOfTiles * kPanel];
      const int64_t num_blocks = (count + at_once - 1) / at_once;  // of nearly equal size
      for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = begin + count * block / num_blocks, end = begin + count * (block + 1) / num_blocks;
        if (is_integer)
          multiply_few(kind, packed, depth, integer_rows().rows, (int)num_rows, sums);
        else
          multiply_rows(tiles, suits, (int)(end - first), {rows + first * depth, depth, kStep}, panel, depth / kStep,
                        block == 0 ? next_panel : nullptr, sums);
        for (int64_t row = first; row < end; ++row) {
          const float* at = sums + (row - first) * kPanel;
          take(row, first_output, load(at) * low_scale + low_bias, load(at + kLanes) * high_scale + high_bias);
        }
      }
    }
  }
}

}  // namespace
