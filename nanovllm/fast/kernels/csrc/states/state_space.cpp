// Tokens of Mamba-2's state space: S' = decay S + (step x) B, output S' C + D x, for S [head width, state width] of each
// sequence and head, one token after another.

#include "rows.h"

namespace {

template <class T>
void update(const void* inputs, const void* b, const void* c, const int64_t* strides, const float* decay,
            const float* step, const float* skip, Slots<float> slots, void* output, const int64_t* sizes,
            int num_threads) {
  const int64_t num_sequences = sizes[0], num_heads = sizes[1], num_groups = sizes[2], width = sizes[3];
  const int64_t state_width = sizes[4], heads_in_group = num_heads / num_groups;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 4)
  for (int64_t task = 0; task < num_sequences * num_heads; ++task) {
    const int64_t sequence = task / num_heads, head = task % num_heads, group = head / heads_in_group;
    const int64_t size = width * state_width, first = slots.first_row(sequence), end = first + slots.num_rows(sequence);
    const float* from = slots.read(sequence) + head * size;
    float* to = slots.write(sequence) + head * size;
    if (slots.begins(sequence)) {
      std::fill_n(to, size, 0.0f);
      from = to;
    }
    for (int64_t row = first; row < end; ++row, from = to) {
      const int64_t place = row * num_heads + head;
      const T* input = (const T*)inputs + row * strides[0] + head * width;
      float own_b[kMaxWidth], own_c[kMaxWidth];
      widen((const T*)b + row * strides[1] + group * state_width, own_b, state_width);
      widen((const T*)c + row * strides[2] + group * state_width, own_c, state_width);
      for (int64_t i = 0; i < width; ++i) {
        const float value = as_float(input[i]), change = step[place] * value;
        const float* old = from + i * state_width;
        float* updated = to + i * state_width;
        Floats products = {};
        for (int64_t j = 0; j < state_width; j += kLanes) {
          const int64_t count = state_width - j;
          const Floats state = load_some(old + j, count) * decay[place] + load_some(own_b + j, count) * change;
          store_some(updated + j, state, count);
          products += state * load_some(own_c + j, count);
        }
        const float result = sum(products) + (skip ? skip[head] * value : 0.0f);
        ((T*)output)[place * width + i] = nearest(result, T{});
      }
    }
  }
}

}  // namespace

// inputs, output: [num_rows, heads, head width], b, c: [num_rows, groups, state width], of T. strides: elements from one
// row to the next in inputs, b and c. decay, step: [num_rows, heads]; skip: [heads], or null. starts: as of `Slots`.
// pool: [num_slots, heads, head width, state width]. sizes: num_sequences, heads, groups, head width, state width.
extern "C" void state_space(const void* inputs, const void* b, const void* c, int is_bfloat16, const int64_t* strides,
                            const float* decay, const float* step, const float* skip, float* pool, const int64_t* reads,
                            const int64_t* writes, const int64_t* starts, void* output, const int64_t* sizes,
                            int num_threads) {
  const Slots<float> slots = {pool, reads, writes, starts, sizes[1] * sizes[3] * sizes[4]};
  (is_bfloat16 ? update<bfloat16> : update<float>)(inputs, b, c, strides, decay, step, skip, slots, output, sizes,
                                                   num_threads);
}
