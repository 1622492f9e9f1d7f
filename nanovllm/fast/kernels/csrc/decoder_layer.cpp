// A decoder layer around its attention: RMS norm, projections, rotary embedding, KV write; then the output projection
// and a gated feed-forward block. Two functions, each one parallel region. Between two roundings to ELEMENT everything
// is float32. Compiled once for heads of any size; paged_attention.h declares what depends on sizes.

#include "low_rank.h"
#include "paged_attention.h"
#include "products.h"

namespace {

// Described in nanovllm/fast/kernels/packed_product.py, filled in by nanovllm/fast/layers/fused_layers.py.
struct Layer {
  Norm input_norm, post_attention_norm;
  Norm query_norm, key_norm;  // of each head; null weights for no norm
  Product qkv;                // queries, keys and values concatenated
  Product attention_output;
  Product gate_up;  // each panel has 16 outputs of the gate and the same 16 of up
  Product down;
  int64_t num_heads, num_kv_heads;
  const AdapterRows* adapters;  // null without adapters
  const LowRank* low_rank[4];   // of each slot, for qkv, attention_output, gate_up, down

  Addition addition(int64_t number, const Product& product) const {
    const int64_t head_size = qkv.num_outputs / (num_heads + 2 * num_kv_heads);
    const bool is_split = number == 0, is_interleaved = number == 2;
    const int64_t first = is_split ? num_heads * head_size : product.num_outputs / (is_interleaved ? 2 : 1);
    const int64_t other = is_split ? num_kv_heads * head_size : first;
    const bool is_on = adapters != nullptr && adapters->slots != nullptr;
    return {is_on ? adapters : nullptr, low_rank[number], first, other, is_interleaved};
  }
};

void normalize_rows(const Norm& norm, const Element* from, const ProductRows& to, int64_t num_rows, Shares& shares) {
#pragma omp for schedule(static) nowait
  for (int64_t row = 0; row < num_rows; ++row)
    normalize(norm, from + row * to.depth, to.depth, [&](int64_t at) { return to.place(row, at); });
  shares.wait();
}

// Rows of products' inputs in scratch memory: whole tiles.
inline int64_t padded_rows(int64_t num_rows) { return (num_rows + kTileRows - 1) / kTileRows * kTileRows; }

Floats silu(Floats x) {
  const Floats magnitude = (Floats)((Words)x & 0x7fffffffu);
  const Floats power = exponential(-magnitude);
  return x * (x < 0 ? power : Floats{} + 1.0f) / (1.0f + power);
}

}  // namespace

// Norm, projections and rotary embedding of `hidden` [num_rows, hidden_size]; keys and values go to their slots
// [num_rows] of the caches [slots, num_kv_heads, HEAD_DIM], queries to `queries` [num_rows, num_heads, HEAD_DIM].
// cosines, sines: [num_rows, HEAD_DIM]. scratch: [a multiple of 16 rows, hidden_size + outputs of qkv].
extern "C" void attention_inputs(const Layer* layer, const Element* hidden, const Element* cosines,
                                 const Element* sines, const int64_t* slots, Element* key_cache, Element* value_cache,
                                 Element* queries, Element* scratch, int64_t num_rows, int num_threads) {
  const int64_t hidden_size = layer->qkv.depth, qkv_size = layer->qkv.num_outputs;
  const ProductRows normed = rows_for(layer->qkv, scratch, num_rows);
  const Addition added = layer->addition(0, layer->qkv);
  Element* qkv = scratch + padded_rows(num_rows) * hidden_size;
  Shares& shares = own_shares();
  shares.begin(num_threads, 1);
#pragma omp parallel num_threads(num_threads)
  {
    normalize_rows(layer->input_norm, hidden, normed, num_rows, shares);
    added.shrink(normed, num_rows, shares);
    multiply(layer->qkv, normed, num_rows, shares.loop(0), [=](int64_t row, int64_t output, Floats low, Floats high) {
      added.to(row, output, low, high);
      store(qkv + row * qkv_size + output, low, high);
    });
    place_heads(&layer->query_norm, &layer->key_norm, layer->num_heads, layer->num_kv_heads, qkv, qkv_size, cosines,
                sines, slots, key_cache, value_cache, queries, num_rows);
    shares.wait();  // OpenMP's own barrier would spin for long
  }
}

// The layer after attention: output [num_rows, hidden_size] from `attended` [num_rows, num_heads, HEAD_DIM] and the
// layer's input `hidden`. scratch: [a multiple of 16 rows, hidden_size + depth of down].
extern "C" void attention_outputs(const Layer* layer, const Element* attended, const Element* hidden, Element* output,
                                  Element* scratch, int64_t num_rows, int num_threads) {
  const int64_t hidden_size = layer->down.num_outputs;
  const ProductRows heads = plain_rows(layer->attention_output, attended, num_rows);
  const ProductRows normed = rows_for(layer->gate_up, scratch, num_rows);
  const ProductRows inner = rows_for(layer->down, scratch + padded_rows(num_rows) * hidden_size, num_rows);
  const Addition of_output = layer->addition(1, layer->attention_output), of_gate = layer->addition(2, layer->gate_up),
                 of_down = layer->addition(3, layer->down);
  const auto add_to = [=](const Element* residual, const Addition& added) {
    return [=](int64_t row, int64_t first, Floats low, Floats high) {
      added.to(row, first, low, high);
      const int64_t at = row * hidden_size + first;
      store(output + at, load(residual + at) + low, load(residual + at + kLanes) + high);
    };
  };
  Shares& shares = own_shares();
  shares.begin(num_threads, 3);
#pragma omp parallel num_threads(num_threads)
  {
    of_output.shrink(heads, num_rows, shares);
    multiply(layer->attention_output, heads, num_rows, shares.loop(0), add_to(hidden, of_output));
    normalize_rows(layer->post_attention_norm, output, normed, num_rows, shares);
    of_gate.shrink(normed, num_rows, shares);
    multiply(layer->gate_up, normed, num_rows, shares.loop(1), [=](int64_t row, int64_t first, Floats gate, Floats up) {
      of_gate.to(row, first, gate, up);
      store(inner.place(row, first / 2), silu(gate) * up);
    });
    of_down.shrink(inner, num_rows, shares);
    multiply(layer->down, inner, num_rows, shares.loop(2), add_to(output, of_down));
  }
}

namespace {

struct StackedLayer {
  const Layer* layer;
  Element *key_cache, *value_cache;
  float scaling;
};

// Per-step arguments of both functions of paged_attention.h.
struct AttentionRows {
  const int64_t *decode_tables, *contexts, *members, *group_starts, *shared;
  int64_t num_decodes, num_groups, decode_width;
  const int64_t *chunk_tables, *first_rows, *starts, *counts;
  int64_t num_chunks, chunk_width, page_size;
};

// Layers write to both outputs in turn.
struct Workspace {
  Element *queries, *attended, *scratch, *outputs[2];
};

}  // namespace

// All layers with full attention in one call: between separate calls the caller's code and data would have been evicted
// from the processor's caches by the weights.
extern "C" void decoder_layers(const StackedLayer* layers, int64_t num_layers, const AttentionRows* step,
                               const Workspace* space, const Element* hidden, const Element* cosines,
                               const Element* sines, const int64_t* slots, int64_t num_rows, int num_threads) {
  for (int64_t i = 0; i < num_layers; ++i) {
    const auto& [layer, key_cache, value_cache, scaling] = layers[i];
    attention_inputs(layer, hidden, cosines, sines, slots, key_cache, value_cache, space->queries, space->scratch,
                     num_rows, num_threads);
    if (step->num_decodes > 0)
      paged_decode_attention(space->queries, key_cache, value_cache, step->decode_tables, step->contexts, step->members,
                             step->group_starts, step->shared, space->attended, step->num_decodes, step->num_groups,
                             step->decode_width, step->page_size, layer->num_kv_heads, scaling, num_threads, 0, 0, 0,
                             nullptr);
    if (step->num_chunks > 0)
      paged_chunk_attention(space->queries, key_cache, value_cache, step->chunk_tables, step->first_rows, step->starts,
                            step->counts, space->attended, step->num_chunks, step->chunk_width, step->page_size,
                            layer->num_kv_heads, scaling, num_threads, 0, 0, 0, nullptr);
    Element* output = space->outputs[i % 2];
    attention_outputs(layer, space->attended, hidden, output, space->scratch, num_rows, num_threads);
    hidden = output;
  }
}

namespace {

template <class Output>
void multiply_alone(const Product& product, const Element* rows, Output* output, int64_t num_rows, int num_threads) {
  const ProductRows operand = plain_rows(product, rows, num_rows);
  Shares& shares = own_shares();
  shares.begin(num_threads, 1);
#pragma omp parallel num_threads(num_threads)
  multiply(product, operand, num_rows, shares.loop(0),
           [&](int64_t row, int64_t first, Floats low, Floats high) {
             store(output + row * product.num_outputs + first, low, high);
           });
}

}  // namespace

// The number of rows from which rows of products with quantised weights have 8 bits; 0 if they never have.
extern "C" int64_t least_byte_rows() { return kPlanesOfRows == 1 && takes_bytes(kRunOfRows) ? kFewRows + 1 : 0; }

// output [num_rows, num_outputs] = rows [num_rows, depth] times the weight, plus the bias; rounded to ELEMENT or not.
extern "C" void linear(const Product* product, const Element* rows, Element* output, int64_t num_rows,
                       int num_threads) {
  multiply_alone(*product, rows, output, num_rows, num_threads);
}

extern "C" void linear_unrounded(const Product* product, const Element* rows, float* output, int64_t num_rows,
                                 int num_threads) {
  multiply_alone(*product, rows, output, num_rows, num_threads);
}
