// One token of the gated delta rule: S' = decay S + k (beta (v - k (decay S))), output q S', for S [key width, value
// width] of each sequence and head. The state is read twice, the second time from a cache, and written once.

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
  float squares = 0;
  for (int64_t i = 0; i < width; ++i) squares += row[i] * row[i];
  return 1.0f / std::sqrt(squares + 1e-6f);
}

template <class T>
void update_head(Head& head, const T* query, const T* key, const T* value, const float* decay, int64_t decay_width,
                 float beta, bool normalises, const float* from, float* to, T* output) {
  const int64_t width = head.key_width;
  widen(query, head.query, width), widen(key, head.key, width);
  const float of_key = scale_of(head.key, width, normalises);
  const float of_query = scale_of(head.query, width, normalises) / std::sqrt((float)width);
  for (int64_t i = 0; i < width; ++i) {
    head.key[i] *= of_key, head.query[i] *= of_query;
    head.decay[i] = decay[decay_width == 1 ? 0 : i];
  }
  constexpr int kVectors = 4;
  constexpr int64_t kColumns = kVectors * kLanes;
  float values[kColumns], outputs[kColumns];
  for (int64_t first = 0; first < head.value_width;) {
    const int64_t left = head.value_width - first, count = left >= kColumns ? kColumns : std::min<int64_t>(left, kLanes);
    widen(value + first, values, count);
    (count == kColumns ? update_columns<kVectors> : update_columns<1>)(head, from + first, to + first, values, beta,
                                                                       outputs, count);
    narrow(outputs, output + first, count);
    first += count;
  }
}

template <class T>
void update(const void* query, const void* key, const void* value, const int64_t* strides, const float* decay,
            const float* beta, Slots<float> slots, void* output, const int64_t* sizes, bool normalises, int num_threads) {
  const int64_t num_sequences = sizes[0], key_heads = sizes[1], value_heads = sizes[2], key_width = sizes[3];
  const int64_t value_width = sizes[4], decay_width = sizes[5], group = value_heads / key_heads;
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t task = 0; task < num_sequences * value_heads; ++task) {
    const int64_t sequence = task / value_heads, index = task % value_heads, key_head = index / group;
    const int64_t offset = index * key_width * value_width;
    Head head;
    head.key_width = key_width, head.value_width = value_width;
    update_head(head, (const T*)query + sequence * strides[0] + key_head * key_width,
                (const T*)key + sequence * strides[1] + key_head * key_width,
                (const T*)value + sequence * strides[2] + index * value_width, decay + task * decay_width, decay_width,
                beta[task], normalises, slots.read(sequence) + offset, slots.write(sequence) + offset,
                (T*)output + task * value_width);
  }
}

}  // namespace

// query, key: [num_sequences, key heads, key width]; value, output: [num_sequences, value heads, value width], of T.
// strides: elements from one sequence to the next in query, key and value. decay: [num_sequences, value heads, 1 or key
// width], beta: [num_sequences, value heads]. pool: [num_slots, value heads, key width, value width].
// sizes: num_sequences, key heads, value heads, key width, value width, width of decay.
extern "C" void delta_rule(const void* query, const void* key, const void* value, int is_bfloat16,
                           const int64_t* strides, const float* decay, const float* beta, float* pool,
                           const int64_t* reads, const int64_t* writes, void* output, const int64_t* sizes,
                           int normalises, int num_threads) {
  const Slots<float> slots = {pool, reads, writes, sizes[2] * sizes[3] * sizes[4]};
  (is_bfloat16 ? update<bfloat16> : update<float>)(query, key, value, strides, decay, beta, slots, output, sizes,
                                                   normalises != 0, num_threads);
}
