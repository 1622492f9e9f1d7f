// Top-k and top-p as the smallest kept level, without sorting: by the weight above a few pivots, then again among the
// levels between two of them. Levels are logits minus their row's largest, divided by the temperature.
#pragma once

#include "rows.h"

namespace {

constexpr int kPivots = 8;
constexpr int kFew = 48;             // up to so many levels are sorted
constexpr int kBlock = 64;           // levels per block; top-k looks at each block's largest first
constexpr float kLeast = -25.0f;     // below it a mass is 0

// int32 keys in the order of floats, and back.
inline int32_t key_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float value_of(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Sums weights of levels: each 1, or its mass.
struct Count {
  Ints count = {};
  void add(bool, Ints comparison) { count -= comparison; }
  double total() const {
    int64_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += count[lane];
    return (double)sum;
  }
  static bool prepare(Floats) { return true; }
  static double weight(float) { return 1.0; }
};

struct Mass {
  Doubles mass = {};
  void add(const Masses& masses, Ints comparison) { mass += chosen(masses, comparison); }
  double total() const { return sum(mass); }
  static Masses prepare(Floats levels) { return masses_of(levels); }
  static double weight(float level) { return masses_of(broadcast(level)).low[0]; }
};

// Weights of levels [size, padded with -infinity] at and above each pivot; pivots are in descending order.
template <class Weight>
inline void sum_above(const float* levels, int64_t size, const float (&pivots)[kPivots], double (&sums)[kPivots]) {
  Weight above[kPivots];
  for (int64_t first = 0; first < size; first += kLanes) {
    const Floats values = load(levels + first);
    Ints is_above = values >= pivots[kPivots - 1];
    if (!bits_of(is_above)) continue;
    const auto weights = Weight::prepare(values);
    for (int at = kPivots - 1;;) {
      above[at].add(weights, is_above);
      if (--at < 0) break;
      is_above = values >= pivots[at];
      if (!bits_of(is_above)) break;
    }
  }
  for (int at = 0; at < kPivots; ++at) sums[at] = above[at].total();
}

// Levels of a row between two values, with the weight above them.
struct Between {
  float* levels;  // [size, padded with -infinity]
  int64_t size;
  double above;
};

inline int64_t keep_between(const float* from, int64_t size, float low, float high, float* to) {
  int64_t count = 0;
  for (int64_t first = 0; first < size; first += kLanes) {
    const Floats values = load(from + first);
    const uint32_t bits = bits_of((values >= low) & (values < high));
    if (bits) count = append(to, count, values, bits);
  }
  for (int64_t lane = count; lane < padded(count); ++lane) to[lane] = -kInfinity;
  return count;
}

// Keep the levels of `from` that may include the floor, by the weights at and above pivots; none is below `least`.
inline Between narrowed(const float* from, int64_t size, double above, const float (&pivots)[kPivots],
                        const double (&sums)[kPivots], float least, double target, float* to) {
  float low = least, high = kInfinity;
  double beyond = above;
  for (int at = 0; at < kPivots; ++at) {
    if (above + sums[at] >= target) {
      low = pivots[at];
      break;
    }
    high = pivots[at];
    beyond = above + sums[at];
  }
  return {to, keep_between(from, size, low, high, to), beyond};
}

// The largest level at which the weight from it on, plus the weight above, reaches the target; overwrites the levels.
template <class Weight>
inline float find_floor(Between within, double target) {
  for (int round = 0;; ++round) {
    float* levels = within.levels;
    if (within.size <= kFew) {
      std::sort(levels, levels + within.size, [](float a, float b) { return a > b; });
      double weight = within.above;
      for (int64_t at = 0; at < within.size; ++at)
        if ((weight += Weight::weight(levels[at])) >= target) return levels[at];
      return within.size ? levels[within.size - 1] : -kInfinity;
    }
    float least = levels[0], most = levels[0];
    for (int64_t at = 1; at < within.size; ++at) {
      least = std::min(least, levels[at]);
      most = std::max(most, levels[at]);
    }
    if (least == most) return least;
    // Even steps of values, then of their bits, which terminate for any values.
    const int64_t low_key = key_of(least), num_keys = (int64_t)key_of(most) - low_key;
    float pivots[kPivots];
    const bool by_value = round < 4 && most - least < kInfinity;
    for (int at = 0; at < kPivots; ++at) {
      const int share = kPivots - at;
      pivots[at] = by_value ? least + (most - least) * ((float)share / (kPivots + 1))
                            : value_of((int32_t)(low_key + std::max<int64_t>(1, num_keys * share / (kPivots + 1))));
    }
    double sums[kPivots];
    sum_above<Weight>(levels, within.size, pivots, sums);
    within = narrowed(levels, within.size, within.above, pivots, sums, least, target, levels);
  }
}

// The k-th largest level. The k-th largest among the blocks' maxima is a lower bound.
inline float count_floor(const float* levels, int64_t size, int64_t k, std::vector<float>& scratch) {
  float* to = scratch.data();
  float least = -kInfinity;
  const int64_t num_blocks = size / kBlock;
  if (k <= num_blocks) {
    for (int64_t block = 0; block < num_blocks; ++block) {
      Floats top = load(levels + block * kBlock);
      for (int part = kLanes; part < kBlock; part += kLanes) {
        const Floats values = load(levels + block * kBlock + part);
        top = values > top ? values : top;
      }
      float largest = top[0];
      for (int lane = 1; lane < kLanes; ++lane) largest = std::max(largest, top[lane]);
      to[block] = largest;
    }
    std::nth_element(to, to + (k - 1), to + num_blocks, [](float a, float b) { return a > b; });
    least = to[k - 1];
  }
  const int64_t count = keep_between(levels, size, std::max(least, -std::numeric_limits<float>::max()), kInfinity, to);
  if (count < k) return -kInfinity;
  return find_floor<Count>({to, count, 0.0}, (double)k);
}

// The level at which the cumulative mass of the most probable tokens, among those of at least `least`, reaches top_p.
inline float mass_floor(const float* levels, int64_t size, float least, float share, std::vector<float>& scratch) {
  const float from = std::max(least, kLeast);
  constexpr float steps[kPivots] = {-0.5f, -1.5f, -2.5f, -4.0f, -6.0f, -8.0f, -12.0f, kLeast};
  float pivots[kPivots];
  for (int at = 0; at < kPivots; ++at) pivots[at] = std::max(steps[at], from);
  double sums[kPivots];
  sum_above<Mass>(levels, size, pivots, sums);
  const double target = (double)share * sums[kPivots - 1];
  return find_floor<Mass>(narrowed(levels, size, 0.0, pivots, sums, from, target, scratch.data()), target);
}

}  // namespace
