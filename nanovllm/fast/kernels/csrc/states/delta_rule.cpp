// Tokens of the gated delta rule: S' = decay S + k (beta (v - k (decay S))), output q S', for S [key width, value
// width] of each sequence and head, one token after another. Several tokens update a few columns of S before the next
// columns are read, so that these stay in a cache.

#include "rows.h"

namespace {

struct Head {
  float query[kMaxWidth], key[kMaxWidth], decay[kMaxWidth];
  int64_t key_width, value_width;
};

// kVectors times 16 columns of S, or the last few of them.
template <int kVectors>
void update_columns(const Head& head, const float* from, float* to, const float* value, float beta, float* output,
                    int64_t count) {
  Floats sums[kVectors] = {};
  for (int64_t i = 0; i < head.key_width; ++i)
    for (int j = 0; j < kVectors; ++j) {
      const float* row = from + i * head.value_width + j * kLanes;
      sums[j] += (kVectors > 1 ? load(row) : load_some(row, count)) * (head.decay[i] * head.key[i]);
    }
  Floats changes[kVectors], outputs[kVectors] = {};
  for (int j = 0; j < kVectors; ++j) changes[j] = (load_some(value + j * kLanes, count) - sums[j]) * beta;
  for (int64_t i = 0; i < head.key_width; ++i)
    for (int j = 0; j < kVectors; ++j) {
      const int64_t at = i * head.value_width + j * kLanes;
      Floats state = kVectors > 1 ? load(from + at) : load_some(from + at, count);
      state = state * head.decay[i] + changes[j] * head.key[i];
      kVectors > 1 ? store(to + at, state) : store_some(to + at, state, count);
      outputs[j] += state * head.query[i];
    }
  for (int j = 0; j < kVectors; ++j) store_some(output + j * kLanes, outputs[j], count);
}

inline float scale_of(const float* row, int64_t width, bool normalises) {
  if (!normalises) return 1.0f;
  Floats squares = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats values = load_some(row + i, width - i);
    squares += values * values;
  }
  return 1.0f / std::sqrt(sum(squares) + 1e-6f);
}

constexpr int64_t kTokens = 16;  // that update some columns before the next ones

// What all sequences have in common; see `delta_rule`.
template <class T>
struct Inputs {
  const T *query, *key, *value;
  const int64_t* strides;
  const float *decay, *beta;
  T* output;
  int64_t key_heads, value_heads, key_width, value_width, decay_width;
  bool normalises;
};

template <class T>
void prepare(Head& head, const Inputs<T>& inputs, int64_t row, int64_t index) {
  const int64_t width = inputs.key_width, at = index / (inputs.value_heads / inputs.key_heads) * width;
  head.key_width = width, head.value_width = inputs.value_width;
  widen(inputs.query + row * inputs.strides[0] + at, head.query, width);
  widen(inputs.key + row * inputs.strides[1] + at, head.key, width);
  const float of_key = scale_of(head.key, width, inputs.normalises);
  const float of_query = scale_of(head.query, width, inputs.normalises) / std::sqrt((float)width);
  const float* decay = inputs.decay + (row * inputs.value_heads + index) * inputs.decay_width;
  for (int64_t i = 0; i < width; ++i) {
    head.key[i] *= of_key, head.query[i] *= of_query;
    head.decay[i] = decay[inputs.decay_width == 1 ? 0 : i];
  }
}

// `count` tokens of one sequence and head, from row `row` on.
template <class T>
void update_tokens(Head* heads, const Inputs<T>& inputs, int64_t row, int64_t count, int64_t index, const float* from,
                   float* to) {
  constexpr int kVectors = 4;
  constexpr int64_t kColumns = kVectors * kLanes;
  for (int64_t token = 0; token < count; ++token) prepare(heads[token], inputs, row + token, index);
  float values[kColumns], outputs[kColumns];
  for (int64_t first = 0; first < inputs.value_width;) {
    const int64_t left = inputs.value_width - first;
    const int64_t columns = left >= kColumns ? kColumns : std::min<int64_t>(left, kLanes);
    for (int64_t token = 0; token < count; ++token) {
      const int64_t own = row + token, place = own * inputs.value_heads + index;
      widen(inputs.value + own * inputs.strides[2] + index * inputs.value_width + first, values, columns);
      (columns == kColumns ? update_columns<kVectors> : update_columns<1>)(
          heads[token], (token ? to : from) + first, to + first, values, inputs.beta[place], outputs, columns);
      narrow(outputs, inputs.output + place * inputs.value_width + first, columns);
    }
    first += columns;
  }
}

template <class T>
void update(const Inputs<T>& inputs, Slots<float> slots, int64_t num_sequences, int num_threads) {
  const int64_t size = inputs.key_width * inputs.value_width;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 4)
  for (int64_t task = 0; task < num_sequences * inputs.value_heads; ++task) {
    const int64_t sequence = task / inputs.value_heads, index = task % inputs.value_heads;
    const float* from = slots.read(sequence) + index * size;
    float* to = slots.write(sequence) + index * size;
    if (slots.begins(sequence)) {
      std::fill_n(to, size, 0.0f);
      from = to;
    }
    Head heads[kTokens];
    const int64_t first = slots.first_row(sequence), num_rows = slots.num_rows(sequence);
    for (int64_t token = 0; token < num_rows; token += kTokens)
      update_tokens(heads, inputs, first + token, std::min(kTokens, num_rows - token), index, token ? to : from, to);
  }
}

template <class T>
void run(const void* query, const void* key, const void* value, const int64_t* strides, const float* decay,
         const float* beta, Slots<float> slots, void* output, const int64_t* sizes, bool normalises, int num_threads) {
  const Inputs<T> inputs = {(const T*)query, (const T*)key, (const T*)value, strides,  decay,    beta,
                            (T*)output,      sizes[1],      sizes[2],        sizes[3], sizes[4], sizes[5],
                            normalises};
  update(inputs, slots, sizes[0], num_threads);
}

}  // namespace

// query, key: [num_rows, key heads, key width]; value, output: [num_rows, value heads, value width], of T. strides:
// elements from one row to the next in query, key and value. decay: [num_rows, value heads, 1 or key width], beta:
// [num_rows, value heads]. pool: [num_slots, value heads, key width, value width]. starts: as of `Slots`.
// sizes: num_sequences, key heads, value heads, key width, value width, width of decay.
extern "C" void delta_rule(const void* query, const void* key, const void* value, int is_bfloat16,
                           const int64_t* strides, const float* decay, const float* beta, float* pool,
                           const int64_t* reads, const int64_t* writes, const int64_t* starts, void* output,
                           const int64_t* sizes, int normalises, int num_threads) {
  const Slots<float> slots = {pool, reads, writes, starts, sizes[2] * sizes[3] * sizes[4]};
  (is_bfloat16 ? run<bfloat16> : run<float>)(query, key, value, strides, decay, beta, slots, output, sizes,
                                             normalises != 0, num_threads);
}
