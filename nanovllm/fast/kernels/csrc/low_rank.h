// Low-rank products of adapters (LoRA), added to the sums of a product before they are rounded: rows shrink to a few
// numbers each, which the product's own loop expands again.
#pragma once

#include "products.h"

namespace {

constexpr int kMostParts = 3;                // linear layers of a product
constexpr int64_t kVector = kStep * kLanes;  // elements in one vector of steps

// Sixteen steps along a depth: one element each, or two neighbours in bfloat16.
inline Floats load_steps(const float* from) { return load(from); }

inline Words load_steps(const bfloat16* from) {
  Words pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  return pairs;
}

// One step in all lanes.
inline Floats same_step(const float* from) { return Floats{} + *from; }

inline Words same_step(const bfloat16* from) {
  uint32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return Words{} + pair;
}

inline Floats add_products(Floats sums, Floats a, Floats b) { return sums + a * b; }

inline Floats add_products(Floats sums, Words a, Words b) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
  return sums + (Floats)(a << 16) * (Floats)(b << 16) + (Floats)(a & 0xffff0000u) * (Floats)(b & 0xffff0000u);
#endif
}

// Factors of one adapter for a product, by part: down [rank, depth]; up, packed: for each sixteen outputs and each step
// along the rank, the step's elements of the outputs. Ranks are whole steps. Null where the adapter has none. Described
// in nanovllm/fast/kernels/packed_product.py.
struct LowRank {
  const Element *down[kMostParts], *up[kMostParts];
  int64_t ranks[kMostParts];
};

// Adapters of a step's rows, for all layers.
struct AdapterRows {
  const int32_t* slots;  // [num_rows], -1 for none; null in a step without adapters
  Element* shrunk;       // [num_rows, kMostParts, max_rank]
  int64_t max_rank;
};

// Products of a row with `kCount` rows of a factor.
template <int kCount>
inline void multiply_row(const Element* factor, const ProductRows& from, int64_t row, Element* to) {
  Floats totals[kCount] = {};
  const int64_t depth = from.depth, whole = depth / kVector * kVector;
  for (int64_t k = 0; k < whole; k += kVector) {
    const auto states = load_steps(from.place(row, k));
    for (int j = 0; j < kCount; ++j) totals[j] = add_products(totals[j], states, load_steps(factor + j * depth + k));
  }
  if (whole < depth) {
    Element states[kVector] = {}, values[kVector] = {};
    std::memcpy(states, from.place(row, whole), (depth - whole) * sizeof(Element));
    for (int j = 0; j < kCount; ++j) {
      std::memcpy(values, factor + j * depth + whole, (depth - whole) * sizeof(Element));
      totals[j] = add_products(totals[j], load_steps(states), load_steps(values));
    }
  }
  for (int j = 0; j < kCount; ++j) {
    Element lanes[kLanes];
    store(lanes, Floats{} + sum(totals[j]));
    to[j] = lanes[0];
  }
}

// Addition to one product. Parts lie one after another, the first of `first` outputs and the others of `other`, or
// alternate by sixteen outputs.
struct Addition {
  const AdapterRows* rows;  // null where nothing is added
  const LowRank* of_slots;
  int64_t first, other;
  bool is_interleaved;

  Element* shrunk(int64_t row, int part) const { return rows->shrunk + (row * kMostParts + part) * rows->max_rank; }

  // In a parallel region; all threads wait for the rows.
  void shrink(const ProductRows& from, int64_t num_rows, Shares& shares) const {
    if (rows == nullptr) return;
#pragma omp for schedule(static) nowait
    for (int64_t task = 0; task < num_rows * kMostParts; ++task) {
      const int64_t row = task / kMostParts;
      const int part = (int)(task % kMostParts);
      if (rows->slots[row] < 0) continue;
      const LowRank& factors = of_slots[rows->slots[row]];
      const Element* down = factors.down[part];
      if (down == nullptr) continue;
      int64_t i = 0;
      for (; i + 8 <= factors.ranks[part]; i += 8)
        multiply_row<8>(down + i * from.depth, from, row, shrunk(row, part) + i);
      for (; i < factors.ranks[part]; ++i) multiply_row<1>(down + i * from.depth, from, row, shrunk(row, part) + i);
    }
    shares.wait();
  }

  // Adds to 32 neighbouring sums of a row, in two vectors that may belong to two parts.
  void to(int64_t row, int64_t output, Floats& low, Floats& high) const {
    if (rows == nullptr || rows->slots[row] < 0) return;
    const LowRank& factors = of_slots[rows->slots[row]];
    if (is_interleaved) {
      expand(factors, row, 0, output / 2, low);
      expand(factors, row, 1, output / 2, high);
      return;
    }
    expand_at(factors, row, output, low);
    expand_at(factors, row, output + kLanes, high);
  }

  void expand_at(const LowRank& factors, int64_t row, int64_t output, Floats& sums) const {
    const int part = output < first ? 0 : output < first + other ? 1 : 2;
    expand(factors, row, part, part == 0 ? output : output - first - (part - 1) * other, sums);
  }

  void expand(const LowRank& factors, int64_t row, int part, int64_t column, Floats& sums) const {
    if (factors.up[part] == nullptr) return;
    const int64_t rank = factors.ranks[part];
    const Element *up = factors.up[part] + column * rank, *states = shrunk(row, part);
    Floats more = {};
    int64_t i = 0;
    for (; i + 2 * kStep <= rank; i += 2 * kStep) {
      sums = add_products(sums, same_step(states + i), load_steps(up + i * kLanes));
      more = add_products(more, same_step(states + i + kStep), load_steps(up + (i + kStep) * kLanes));
    }
    if (i < rank) sums = add_products(sums, same_step(states + i), load_steps(up + i * kLanes));
    sums += more;
  }
};

}  // namespace
