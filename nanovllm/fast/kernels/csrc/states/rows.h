// Rows of float or bfloat16 elements as floats, for the kernels of recurrent states.
#pragma once

#include "../lanes.h"

namespace {

constexpr int kMaxWidth = 512;  // of a head's keys, and of a state space's row

// The states of all sequences: one a slot, read from `reads` and written to `writes`, which may be the same.
template <class T>
struct Slots {
  T* pool;
  const int64_t *reads, *writes;
  const int64_t* starts;  // first row of each sequence, and their end; null if each has one row
  int64_t size;           // elements of one state

  int64_t first_row(int64_t sequence) const { return starts ? starts[sequence] : sequence; }
  int64_t num_rows(int64_t sequence) const { return starts ? starts[sequence + 1] - starts[sequence] : 1; }
  // Whether it reads the null slot: its state is 0.
  bool begins(int64_t sequence) const { return reads[sequence] == 0; }
  const T* read(int64_t sequence) const { return pool + reads[sequence] * size; }
  T* write(int64_t sequence) const { return pool + writes[sequence] * size; }
};

inline float as_float(float value) { return value; }

inline float as_float(bfloat16 value) {
  const uint32_t bits = (uint32_t)value.bits << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline float nearest(float value, float) { return value; }

inline bfloat16 nearest(float value, bfloat16) { return {rounded(Floats{} + value)[0]}; }

template <class T>
inline void widen(const T* from, float* to, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i));
  for (; i < size; ++i) to[i] = as_float(from[i]);
}

template <class T>
inline void narrow(const float* from, T* to, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i));
  for (; i < size; ++i) to[i] = nearest(from[i], T{});
}

// Up to 16 neighbours; lanes from `count` on are 0.
inline Floats load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  float values[kLanes] = {};
  std::memcpy(values, from, count * sizeof(float));
  return load(values);
}

inline void store_some(float* to, Floats values, int64_t count) {
  std::memcpy(to, &values, std::min<int64_t>(count, kLanes) * sizeof(float));
}

}  // namespace
