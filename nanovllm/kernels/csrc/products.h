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

inline bool suits_tiles(int64_t depth) { return kStep == 2 && kTilesAreThere && depth % kTileDepth == 0; }

// Rows [num_rows, depth], one behind another or as tiles read them: 16 rows of 32 elements, then the next 32 of these.
struct ProductRows {
  Element* at;
  int64_t depth;
  bool is_tiled = false;

  // Of sixteen neighbours, the first of which is element k, a multiple of 16.
  Element* place(int64_t row, int64_t k) const {
    if (!is_tiled) return at + row * depth + k;
    return at + (row / kTileRows * (depth / kTileDepth) + k / kTileDepth) * kTileRows * kTileDepth +
           row % kTileRows * kTileDepth + k % kTileDepth;
  }

  TileRows tiles(int64_t row) const {
    constexpr int64_t kSize = sizeof(Element), kTileBytes = kTileRows * kTileDepth * kSize;
    if (!is_tiled) return {place(row, 0), depth * kSize, kTileDepth * kSize, kTileRows * depth * kSize};
    return {place(row, 0), kTileDepth * kSize, kTileBytes, depth / kTileDepth * kTileBytes};
  }
};

// Whether a product multiplies its rows as integers.
inline bool takes_integers(const Product& product, int64_t num_rows) {
  return product.panels != nullptr && num_rows <= kFewRows && product.depth % kRunOfRows == 0;
}

// Rows that a product reads, in `memory` for whole tiles of rows, in the order that it reads fastest.
inline ProductRows rows_for(const Product& product, Element* memory, int64_t num_rows) {
  return {memory, product.depth, suits_tiles(product.depth) && !takes_integers(product, num_rows)};
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

// A block's sums, on their way to those who asked for them.
struct Sums {
  const float* at = nullptr;  // the next row's
  int64_t row = 0, end = 0, first_output = 0;
  Floats low_scale = {}, high_scale = {}, low_bias = {}, high_bias = {};

  // `take` gets the next rows, up to `count` of them.
  template <class Take>
  void hand_over(int64_t count, const Take& take) {
    for (const int64_t until = std::min(end, row + count); row < until; ++row, at += kPanel)
      take(row, first_output, load(at) * low_scale + low_bias, load(at + kLanes) * high_scale + high_bias);
  }
};

// Shares a product among the threads of the enclosing parallel region, and waits for all of them. `take` gets each
// row's 32 sums of a panel: take(row, first output, low half, high half), one block late: in tiles while the next block
// is multiplied, and the next panel fetched.
template <class Take>
void multiply(const Product& product, const ProductRows& rows, int64_t num_rows, int num_threads, const Take& take) {
  const int64_t num_panels = product.num_outputs / kPanel, depth = product.depth;
  const bool suits = suits_tiles(depth), is_integer_product = takes_integers(product, num_rows);
  const int64_t unit = suits ? kTileRows : 1, at_once = suits ? kRowsOfTiles : kRowsAtOnce;
  const int64_t num_units = (num_rows + unit - 1) / unit;
  if (is_integer_product) integer_rows().fill(rows.at, (int)num_rows, depth);
  Tiles tiles;
  alignas(64) float memory[2][kRowsOfTiles * kPanel];
  Sums sums;
  int turn = 0;  // of the two blocks of memory
  const int64_t rows_of_step = (kRowsOfTiles * kTileDepth + depth - 1) / depth;
  const int64_t num_parts = parts_of(num_rows, num_panels, num_threads, at_once);
#pragma omp for schedule(static) collapse(2) nowait
  for (int64_t part = 0; part < num_parts; ++part) {
    for (int64_t number = 0; number < num_panels; ++number) {
      const int64_t begin = num_units * part / num_parts, count = num_units * (part + 1) / num_parts - begin;
      const auto [offset, kind] = product.panel(number);
      const char* packed = product.weight + offset;
      const char* next = packed + depth * kPanel * (int64_t)sizeof(Element);  // that of the next product behind the last
      const bool is_integer = is_integer_product && kind != kPlain;
      const Element* panel =
          kind == kPlain || is_integer ? (const Element*)packed : widened(kind, packed, depth);
      Sums own;
      own.first_output = number * kPanel;
      own.low_scale = own.high_scale = Floats{} + 1.0f;
      if (kind == kBytes && !is_integer) {
        const Floats low = load((const float*)packed), high = load((const float*)packed + kLanes);
        own.low_scale = low / unit_of(low), own.high_scale = high / unit_of(high);
      }
      if (product.bias != nullptr)
        own.low_bias = load(product.bias + own.first_output),
        own.high_bias = load(product.bias + own.first_output + kLanes);
      const int64_t num_blocks = (count * unit + at_once - 1) / at_once;  // of nearly equal size
      constexpr int64_t kLines = kTileDepth * kPanel * sizeof(Element) / 64;  // for one step of tiles
      const int64_t lines_of_step = kind == kPlain ? (kLines + num_blocks - 1) / num_blocks : 0;
      for (int64_t block = 0; block < num_blocks; ++block) {
        own.row = (begin + count * block / num_blocks) * unit;
        own.end = std::min(num_rows, (begin + count * (block + 1) / num_blocks) * unit);
        own.at = memory[turn ^= 1];
        if (is_integer) {
          multiply_few(kind, packed, depth, integer_rows().rows, (int)num_rows, memory[turn]);
        } else if (suits) {
          tiles.multiply((int)(own.end - own.row), rows.tiles(own.row), panel, depth / kStep, memory[turn], [&] {
            for (int64_t line = 0; line < lines_of_step; ++line, next += 64) __builtin_prefetch(next, 0, 2);
            sums.hand_over(rows_of_step, take);
          });
        } else {
          multiply_rows((int)(own.end - own.row), {rows.place(own.row, 0), depth, kStep}, panel, depth / kStep,
                        block == 0 && kind == kPlain ? (const Element*)next : nullptr, memory[turn]);
        }
        sums.hand_over(kRowsOfTiles, take);
        sums = own;
      }
    }
  }
  sums.hand_over(kRowsOfTiles, take);
#pragma omp barrier
}

}  // namespace
