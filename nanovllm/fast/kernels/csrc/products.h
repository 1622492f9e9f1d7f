// Products of activations with a packed weight: rows [num_rows, depth] times weight [num_outputs, depth], transposed.
//
// A weight is packed in panels of 32 outputs, in reading order: for each step along the depth (one element, or two
// neighbours in bfloat16, which the processor multiplies in pairs) the panel's 32 outputs. A panel stays in the L2
// cache while rows pass over it, 12 at a time with 12 x 32 sums in registers; meanwhile the next panel is prefetched.
// So weights are read from memory once, the only cost that counts with few rows, and with many rows each load serves
// several products. With matrix tiles bfloat16 is multiplied 32 rows at a time; int8 weights of most depths are
// multiplied without widening (byte_tiles.h), and other kinds too for up to 16 rows (run_tiles.h). Without matrix tiles
// all quantised kinds are multiplied as bytes (byte_rows.h).
#pragma once

#include "byte_rows.h"
#include "byte_tiles.h"
#include "float8_rows.h"
#include "row_products.h"
#include "run_tiles.h"
#include "shares.h"

namespace {

constexpr int64_t kRowsOfTask = 384;  // few enough that their activations stay in the cache

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

// Rows [num_rows, depth], contiguous or in the order of tiles: 32 elements of each of 16 rows, then their next 32.
struct ProductRows {
  Element* at;
  int64_t depth;
  bool is_tiled = false;
  PlaneMemory* planes = nullptr;  // where the product splits them, if it does
  ByteMemory* bytes = nullptr;    // the same, without matrix tiles

  // Of sixteen neighbours from element k on, a multiple of 16.
  Element* place(int64_t row, int64_t k) const {
    if (!is_tiled) return at + row * depth + k;
    return at + (row / kTileRows * (depth / kTileDepth) + k / kTileDepth) * kTileRows * kTileDepth +
           row % kTileRows * kTileDepth + k % kTileDepth;
  }

  TileRows tiles(int64_t row) const {
    constexpr int64_t kSize = sizeof(Element), kTileBytes = kTileRows * kTileDepth * kSize;
    if (!is_tiled) return tile_rows(place(row, 0), depth);
    return {place(row, 0), kTileDepth * kSize, kTileBytes, depth / kTileDepth * kTileBytes};
  }
};

// Kind of a panel's product: in vectors or matrix tiles of ELEMENT, or quantised (few_rows.h, run_tiles.h,
// byte_tiles.h, byte_rows.h, float8_rows.h).
enum class Form { kByVectors, kByTiles, kByFewRows, kByRuns, kByPlanes, kByBytes, kByFewFloats, kByFloatTiles };

inline bool takes_few_rows(int64_t kind, int64_t depth, int64_t num_rows) {
  const bool fits = depth % kRunOfRows == 0 && (kind != kBytes || depth <= kDeepestBytes);
  return is_whole(kind) && num_rows <= kFewRows && fits;
}

inline Form form_of(int64_t kind, const ProductRows& rows, int64_t num_rows) {
  const bool suits = suits_tiles(rows.depth);
  if (kind == kBytes && rows.planes != nullptr) return Form::kByPlanes;
  if (is_whole(kind) && rows.bytes != nullptr) return Form::kByBytes;
  if (takes_few_rows(kind, rows.depth, num_rows)) return Form::kByFewRows;
  if (takes_few_floats(kind, rows.depth, num_rows) && !rows.is_tiled) return Form::kByFewFloats;
  if (suits && num_rows <= kRowsOfRuns && takes_runs(kind)) return Form::kByRuns;
  if (suits && takes_float_tiles(kind, num_rows)) return Form::kByFloatTiles;
  return suits ? Form::kByTiles : Form::kByVectors;
}

// Memory in which a product with panels of bytes splits its rows; null if it does not split them. Called outside of the
// parallel region. A single row is as fast in vectors, without a barrier between threads.
inline PlaneMemory* planes_for(const Product& product, int64_t num_rows) {
  static thread_local PlaneMemory own;
  if (product.panels == nullptr || num_rows <= 1 || !takes_planes(product.depth)) return nullptr;
  const Panel* end = product.panels + product.num_outputs / kPanel;
  if (std::none_of(product.panels, end, [](const Panel& panel) { return panel.kind == kBytes; })) return nullptr;
  own.reserve(num_rows, product.depth);
  return &own;
}

// The same for a product with panels of any kind of whole numbers.
inline ByteMemory* bytes_for(const Product& product, int64_t num_rows) {
  static thread_local ByteMemory own;
  if (product.panels == nullptr || num_rows <= kFewRows || !takes_bytes(product.depth)) return nullptr;
  own.has_whole_runs = own.has_halves = false;
  for (int64_t number = 0; number < product.num_outputs / kPanel; ++number)
    if (const int64_t kind = product.panels[number].kind; is_whole(kind))
      (is_of_sixteen(kind) ? own.has_halves : own.has_whole_runs) = true;
  if (!own.has_whole_runs && !own.has_halves) return nullptr;
  own.reserve(num_rows, product.depth);
  return &own;
}

// Contiguous rows for a product.
inline ProductRows plain_rows(const Product& product, const Element* rows, int64_t num_rows) {
  return {(Element*)rows, product.depth, false, planes_for(product, num_rows), bytes_for(product, num_rows)};
}

// Rows in `memory` for whole tiles of rows, in the product's fastest order.
inline ProductRows rows_for(const Product& product, Element* memory, int64_t num_rows) {
  ProductRows rows = plain_rows(product, memory, num_rows);
  const bool takes_integers = product.panels != nullptr && (num_rows <= kFewRows || rows.planes != nullptr);
  rows.is_tiled = suits_tiles(product.depth) && !takes_integers;
  return rows;
}

// Number of parts of a product's rows: as required by the size of activations, more if panels alone would leave threads
// idle. The first number that keeps 9 of 10 threads busy, or else the best.
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

// A block's sums, passed on to `take`.
struct Sums {
  const float* at = nullptr;          // the next row's
  const float* row_scales = nullptr;  // of sums in two planes
  int64_t row = 0, end = 0, first_output = 0;
  Floats low_scale = {}, high_scale = {}, low_bias = {}, high_bias = {};

  // `take` gets the next rows, up to `count` of them.
  template <class Take>
  void hand_over(int64_t count, const Take& take) {
    for (const int64_t until = std::min(end, row + count); row < until; ++row, at += kPanel) {
      const Floats low = (row_scales != nullptr ? joined_planes(at) : load(at)) * low_scale;
      const Floats high = (row_scales != nullptr ? joined_planes(at + kLanes) : load(at + kLanes)) * high_scale;
      const float row_scale = row_scales != nullptr ? row_scales[row] : 1.0f;  // last: a large one may overflow
      take(row, first_output, low * row_scale + low_bias, high * row_scale + high_bias);
    }
  }
};

// Sums of a panel before its first block; row_scales: for sums in two planes.
inline Sums sums_of(const Product& product, int64_t number, Form form, const float* row_scales) {
  const auto [offset, kind] = product.panel(number);
  Sums own;
  own.first_output = number * kPanel;
  own.row_scales = row_scales;
  own.low_scale = own.high_scale = Floats{} + 1.0f;
  if (kind == kBytes && form != Form::kByBytes) {
    const float* scales = (const float*)(product.weight + offset);
    own.low_scale = load(scales), own.high_scale = load(scales + kLanes);
    if (row_scales == nullptr) own.low_scale /= unit_of(own.low_scale), own.high_scale /= unit_of(own.high_scale);
  }
  if (kind == kFloat8 && !Float8<0>::kIsScaled) {
    const float* scales = (const float*)(product.weight + offset);
    own.low_scale = load(scales) / kFloat8Unit, own.high_scale = load(scales + kLanes) / kFloat8Unit;
  }
  if (product.bias != nullptr) {
    const Element* bias = product.bias + own.first_output;
    own.low_bias = load(bias), own.high_bias = load(bias + kLanes);
  }
  return own;
}

// Divides a product among the threads of the enclosing parallel region, with a barrier at the end. `take` receives each
// row's 32 sums of a panel: take(row, first output, low half, high half), one block late: with tiles while the next
// block is multiplied and the next panel prefetched.
template <class Take>
void multiply(const Product& product, const ProductRows& rows, int64_t num_rows, const SharedLoop& loop,
              const Take& take) {
  const int64_t num_panels = product.num_outputs / kPanel, depth = product.depth;
  const PlaneRows planes{rows.planes, num_rows, depth};
  const ByteRows bytes{rows.bytes, num_rows, depth};
  const bool has_planes = rows.planes != nullptr, has_bytes = rows.bytes != nullptr, suits = suits_tiles(depth);
  const int64_t unit = has_planes ? planes.rows_of_tile() : has_bytes ? bytes.rows_of_group() : suits ? kTileRows : 1;
  const int64_t at_once = has_planes ? unit : has_bytes ? kRowsAtOnce / unit * unit : suits ? kRowsOfTiles : kRowsAtOnce;
  const int64_t num_units = (num_rows + unit - 1) / unit;
  if (has_planes) planes.fill(rows.at), loop.wait();
  if (has_bytes) bytes.fill(rows.at), loop.wait();
  IntegerRows* few_rows = nullptr;  // the rows for other quantised kinds, made on first use
  RunRows* run_rows = nullptr;
  Tiles tiles;
  alignas(64) float memory[2][kRowsOfTiles * kPanel];
  Sums sums;
  int turn = 0;  // of the two blocks of memory
  const int64_t rows_of_step = (kRowsOfTiles * kTileDepth + depth - 1) / depth;
  const int64_t num_parts = parts_of(num_rows, num_panels, loop.num_threads(), at_once);
  loop.run(num_parts * num_panels, [&](int64_t task) {
    const int64_t part = task / num_panels, number = task % num_panels;
    const int64_t begin = num_units * part / num_parts, count = num_units * (part + 1) / num_parts - begin;
    const auto [offset, kind] = product.panel(number);
    const char* packed = product.weight + offset;
    const Form form = form_of(kind, rows, num_rows);
    if (form == Form::kByFewRows && few_rows == nullptr)
      (few_rows = &own_integer_rows())->fill(rows.at, (int)num_rows, depth);
    if (form == Form::kByRuns && run_rows == nullptr)
      (run_rows = &own_run_rows())->fill(rows.tiles(0), (int)num_rows, depth);
    const bool is_tiled = form == Form::kByTiles || form == Form::kByFloatTiles;
    const bool widens = kind != kPlain && (form == Form::kByVectors || is_tiled);
    const int64_t num_blocks = (count * unit + at_once - 1) / at_once;  // of nearly equal size
    const int64_t widened_kind = form == Form::kByFloatTiles ? (int64_t)kFloat8Unscaled : kind;
    WidePanel wide(widened_kind, packed, widens ? depth : 0, widens && is_tiled && num_blocks == 1);
    const Element* panel = widens ? wide.elements() : (const Element*)packed;
    wide.widen(is_tiled ? kTileDepth : depth);
    const float* row_scales = form == Form::kByPlanes ? planes.memory->scales()
                              : form == Form::kByFewRows && kind == kBytes ? few_rows->scales : nullptr;
    const BytePanel byte_panel(kind, packed, form == Form::kByBytes ? depth : 0);
    Sums own = sums_of(product, number, form, row_scales);
    // The next panel; after the last one, the next product's. Kinds that read runs prefetch these themselves; 8-bit
    // floats in vectors have both.
    const int64_t element_bytes = kind == kPlain ? sizeof(Element) : 1;
    const char* next = packed + depth * kPanel * element_bytes + (kind == kBytes ? kScaleBytes : 0);
    constexpr int64_t kLines = kTileDepth * kPanel * sizeof(Element) / 64;  // for one step of tiles
    const int64_t lines_of_step =
        kind == kPlain || form == Form::kByPlanes ? (kLines + num_blocks - 1) / num_blocks : 0;
    for (int64_t block = 0; block < num_blocks; ++block) {
      own.row = (begin + count * block / num_blocks) * unit;
      own.end = std::min(num_rows, (begin + count * (block + 1) / num_blocks) * unit);
      float* to = memory[turn ^= 1];
      own.at = to;
      const int rows_of_block = (int)(own.end - own.row);
      const auto meanwhile = [&]() __attribute__((always_inline)) {
        for (int64_t line = 0; line < lines_of_step; ++line, next += 64) __builtin_prefetch(next, 0, 2);
        sums.hand_over(rows_of_step, take);
        wide.widen(kTileDepth);  // for the next instructions
      };
      switch (form) {
        case Form::kByFewRows: multiply_few(kind, packed, depth, few_rows->rows, (int)num_rows, to); break;
        case Form::kByFewFloats:
          multiply_few_floats(kind, packed, depth, rows.place(own.row, 0), rows_of_block, to);
          break;
        case Form::kByFloatTiles:
          multiply_float_tiles(tiles, rows_of_block, rows.tiles(own.row), packed, wide, depth, to, meanwhile);
          break;
        case Form::kByRuns: multiply_runs(kind, tiles, *run_rows, packed, to); break;
        case Form::kByPlanes:
          tiles.multiply_planes((int)unit, planes.tile(own.row), packed + kScaleBytes, depth, to, meanwhile);
          break;
        case Form::kByBytes: bytes.multiply(byte_panel, own.row, own.end, to); break;
        case Form::kByTiles:
          if (wide.mask == -1)
            tiles.multiply(rows_of_block, rows.tiles(own.row), panel, depth / kStep, to, meanwhile);
          else
            tiles.multiply<WidePanel::kRingMask>(rows_of_block, rows.tiles(own.row), panel, depth / kStep, to, meanwhile);
          break;
        default:
          multiply_rows(rows_of_block, {rows.place(own.row, 0), depth, kStep}, panel, depth / kStep,
                        block == 0 && (kind == kPlain || kind >= kFloat8) ? (const Element*)next : nullptr, to);
      }
      sums.hand_over(kRowsOfTiles, take);
      sums = own;
    }
  });
  sums.hand_over(kRowsOfTiles, take);
  loop.wait();
}

}  // namespace
