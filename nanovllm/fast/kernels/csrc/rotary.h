// Queries and keys of a step's rows: norm of each head, rotary embedding, and the KV write.
#pragma once

#include "heads.h"
#include "paged_attention.h"

namespace {

// Query or key of one head, in place or not: optional norm, then rotary embedding (Su et al. 2021, halves paired as in
// GPT-NeoX).
void turn(const Norm& norm, const Element* from, const float* cosines, const float* sines, Element* to) {
  alignas(64) Element normed[kDim];
  if (norm.weight != nullptr) normalize(norm, from, kDim, [&](int64_t at) { return normed + at; }), from = normed;
  alignas(64) float values[kDim], turned[kDim];
  for (int d = 0; d < kDim; d += kLanes) store(values + d, load(from + d));
  constexpr int kHalf = kDim / 2;
  for (int d = 0; d < kHalf; ++d) {
    turned[d] = values[d] * cosines[d] - values[d + kHalf] * sines[d];
    turned[d + kHalf] = values[d + kHalf] * cosines[d + kHalf] + values[d] * sines[d + kHalf];
  }
  for (int d = 0; d < kDim; d += kLanes) store(to + d, load(turned + d));
}

}  // namespace

// Divides rows [num_rows, qkv_size] of queries, keys and values among the threads of the enclosing parallel region,
// without a barrier at the end.
// Queries go to `queries` [num_rows, num_heads, HEAD_DIM], keys and values to their slots [num_rows] of the caches
// [slots, num_kv_heads, HEAD_DIM]. cosines, sines: [num_rows, HEAD_DIM].
void place_heads(const Norm* query_norm, const Norm* key_norm, int64_t num_heads, int64_t num_kv_heads,
                 const Element* qkv, int64_t qkv_size, const Element* cosines, const Element* sines,
                 const int64_t* slots, Element* key_cache, Element* value_cache, Element* queries, int64_t num_rows) {
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < num_rows; ++row) {
    alignas(64) float row_cosines[kDim], row_sines[kDim];
    for (int d = 0; d < kDim; d += kLanes) {
      store(row_cosines + d, load(cosines + row * kDim + d));
      store(row_sines + d, load(sines + row * kDim + d));
    }
    const Element* from = qkv + row * qkv_size;
    for (int64_t head = 0; head < num_heads; ++head, from += kDim)
      turn(*query_norm, from, row_cosines, row_sines, queries + (row * num_heads + head) * kDim);
    const int64_t at = slots[row] * num_kv_heads * kDim;
    for (int64_t head = 0; head < num_kv_heads; ++head, from += kDim)
      turn(*key_norm, from, row_cosines, row_sines, key_cache + at + head * kDim);
    std::memcpy(value_cache + at, from, num_kv_heads * kDim * sizeof(Element));
  }
}
