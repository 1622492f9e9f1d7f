// Short convolutions by channel. Of one token: the last inputs move on by one, and their weighted sum is the output. Of
// a chunk: the last inputs stay in a ring of rows.

#include "rows.h"

namespace {

constexpr int64_t kChannels = 256;  // of one task
constexpr int64_t kMaxTaps = 8;

inline Floats silu(Floats x) {
  const Floats power = exponential(x < 0 ? x : -x);
  return x / (1.0f + power) * (x < 0 ? power : Floats{} + 1.0f);
}

// Four channels of four inputs move on by one; their new inputs are lanes kFirst to kFirst + 3 of `inputs`.
template <int kFirst>
inline Floats moved_on(Floats kept, Floats inputs) {
  return __builtin_shufflevector(kept, inputs, 1, 2, 3, 16 + kFirst, 5, 6, 7, 17 + kFirst, 9, 10, 11, 18 + kFirst, 13,
                                 14, 15, 19 + kFirst);
}

// The sum of each two neighbours, of `low` first.
inline Floats add_pairs(Floats low, Floats high) {
  return __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Sixteen channels of four inputs; returns their weighted sums.
template <class T>
inline Floats update_sixteen(const T* input, const T* from, T* to, const T* weight) {
  const Floats inputs = load(input);
  const Floats states[4] = {
      moved_on<0>(load(from), inputs), moved_on<4>(load(from + kLanes), inputs),
      moved_on<8>(load(from + 2 * kLanes), inputs), moved_on<12>(load(from + 3 * kLanes), inputs)};
  Floats products[4];
  for (int i = 0; i < 4; ++i) {
    store(to + i * kLanes, states[i]);
    products[i] = states[i] * load(weight + i * kLanes);
  }
  return add_pairs(add_pairs(products[0], products[1]), add_pairs(products[2], products[3]));
}

// Results of up to kChannels channels, rounded before the activation too, as between two modules.
template <class T>
void finish(float* results, T* output, int64_t count, bool activates) {
  narrow(results, output, count);
  if (!activates) return;
  widen(output, results, count);
  for (int64_t i = 0; i < count; i += kLanes) store(results + i, silu(load(results + i)));
  narrow(results, output, count);
}

// Channels of one sequence. `kWidth` is the number of inputs kept, 0 for one that is known at run time.
template <class T, int kWidth>
void update_channels(const T* input, const T* from, T* to, const T* weight, const T* bias, T* output, int64_t count,
                     int64_t any_width, bool activates) {
  const int64_t width = kWidth ? kWidth : any_width;
  float results[kChannels] = {};
  int64_t i = 0;
  if constexpr (kWidth == 4)
    for (; i + kLanes <= count; i += kLanes) {
      Floats sums = update_sixteen(input + i, from + i * kWidth, to + i * kWidth, weight + i * kWidth);
      if (bias) sums += load(bias + i);
      store(results + i, sums);
    }
  for (; i < count; ++i) {
    float result = bias ? as_float(bias[i]) : 0.0f;
    for (int64_t j = 0; j + 1 < width; ++j) {
      const T kept = from[i * width + j + 1];
      result += as_float(kept) * as_float(weight[i * width + j]);
      to[i * width + j] = kept;
    }
    to[i * width + width - 1] = input[i];
    results[i] = result + as_float(input[i]) * as_float(weight[i * width + width - 1]);
  }
  finish(results, output, count, activates);
}

template <class T>
void update(const void* inputs, int64_t stride, Slots<T> slots, const void* weight, const void* bias, void* output,
            const int64_t* sizes, bool activates, int num_threads) {
  const int64_t num_sequences = sizes[0], num_channels = sizes[1], width = sizes[2];
  const int64_t num_tasks = (num_channels + kChannels - 1) / kChannels;
  const auto function = width == 4 ? update_channels<T, 4> : width == 3 ? update_channels<T, 3> : update_channels<T, 0>;
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t task = 0; task < num_sequences * num_tasks; ++task) {
    const int64_t sequence = task / num_tasks, first = task % num_tasks * kChannels;
    function((const T*)inputs + sequence * stride + first, slots.read(sequence) + first * width,
             slots.write(sequence) + first * width, (const T*)weight + first * width,
             bias ? (const T*)bias + first : nullptr, (T*)output + sequence * num_channels + first,
             std::min(kChannels, num_channels - first), width, activates);
  }
}

// Channels of a chunk, whose inputs and outputs have rows `stride` and `num_channels` apart. Input s of the sequence's last
// ones is row (s + width - 1) % width of the ring.
template <class T>
void convolve_channels(const T* input, int64_t stride, int64_t num_rows, const T* from, T* to, const T* weight,
                       const T* bias, T* output, int64_t num_channels, int64_t count, int64_t width, bool activates) {
  float ring[kMaxTaps][kChannels] = {}, taps[kMaxTaps][kChannels] = {}, biases[kChannels] = {}, results[kChannels];
  for (int64_t i = 0; i < count; ++i) {
    biases[i] = bias ? as_float(bias[i]) : 0.0f;
    for (int64_t j = 0; j < width; ++j) {
      taps[j][i] = as_float(weight[i * width + j]);
      if (from && j) ring[j - 1][i] = as_float(from[i * width + j]);
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    widen(input + row * stride, ring[(row + width - 1) % width], count);
    for (int64_t i = 0; i < count; i += kLanes) {
      Floats sums = load(biases + i);
      for (int64_t j = 0; j < width; ++j) sums += load(ring[(row + j) % width] + i) * load(taps[j] + i);
      store(results + i, sums);
    }
    finish(results, output + row * num_channels, count, activates);
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < width; ++j) to[i * width + j] = nearest(ring[(num_rows + width - 1 + j) % width][i], T{});
}

template <class T>
void convolve(const void* inputs, int64_t stride, Slots<T> slots, const void* weight, const void* bias, void* output,
              const int64_t* sizes, bool activates, int num_threads) {
  const int64_t num_sequences = sizes[0], num_channels = sizes[1], width = sizes[2];
  const int64_t num_tasks = (num_channels + kChannels - 1) / kChannels;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
  for (int64_t task = 0; task < num_sequences * num_tasks; ++task) {
    const int64_t sequence = task / num_tasks, first = task % num_tasks * kChannels, row = slots.first_row(sequence);
    convolve_channels((const T*)inputs + row * stride + first, stride, slots.num_rows(sequence),
                      slots.begins(sequence) ? nullptr : slots.read(sequence) + first * width,
                      slots.write(sequence) + first * width, (const T*)weight + first * width,
                      bias ? (const T*)bias + first : nullptr, (T*)output + row * num_channels + first, num_channels,
                      std::min(kChannels, num_channels - first), width, activates);
  }
}

}  // namespace

// inputs, output: [num_sequences, channels], `stride` elements apart in inputs; pool: [num_slots, channels, width];
// weight: [channels, width]; bias: [channels], or null; all of one type. sizes: num_sequences, channels, width.
extern "C" void convolution(const void* inputs, int is_bfloat16, int64_t stride, void* pool, const int64_t* reads,
                            const int64_t* writes, const void* weight, const void* bias, void* output,
                            const int64_t* sizes, int activates, int num_threads) {
  const int64_t size = sizes[1] * sizes[2];
  if (is_bfloat16)
    update<bfloat16>(inputs, stride, {(bfloat16*)pool, reads, writes, nullptr, size}, weight, bias, output, sizes,
                     activates != 0, num_threads);
  else
    update<float>(inputs, stride, {(float*)pool, reads, writes, nullptr, size}, weight, bias, output, sizes, activates != 0,
                  num_threads);
}

// The same of chunks: inputs, output: [num_rows, channels]; starts: as of `Slots`.
extern "C" void convolution_chunks(const void* inputs, int is_bfloat16, int64_t stride, void* pool,
                                   const int64_t* reads, const int64_t* writes, const int64_t* starts,
                                   const void* weight, const void* bias, void* output, const int64_t* sizes,
                                   int activates, int num_threads) {
  const int64_t size = sizes[1] * sizes[2];
  if (is_bfloat16)
    convolve<bfloat16>(inputs, stride, {(bfloat16*)pool, reads, writes, starts, size}, weight, bias, output, sizes,
                       activates != 0, num_threads);
  else
    convolve<float>(inputs, stride, {(float*)pool, reads, writes, starts, size}, weight, bias, output, sizes,
                    activates != 0, num_threads);
}
