// Draws one token per row by the Gumbel-max rule, after the filters.

#include "floors.h"

namespace {

constexpr float kMostNoise = 22.4f;   // noise ends at 22.2
constexpr float kNoiseError = 2e-5f;  // several times the errors of this noise and torch's together
constexpr int64_t kNotFinite = -1, kUnsure = -2;

inline Words mixed(Words bits) {
  bits = (bits ^ (bits >> 16)) * 0x7feb352du;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
  return bits ^ (bits >> 16);
}

// Uniform numbers of tokens, as in `noise.gumbel_noise`.
inline Floats uniforms_of(Words tokens, uint32_t low, uint32_t high) {
  const Words bits = mixed(mixed((tokens + 1) * 0x9e3779b9u + low) + high);
  const Floats uniform = (__builtin_convertvector((Ints)(bits >> 1), Floats) + 0.5f) * 0x1p-31f;
  constexpr float most = 1.0f - 0x1p-24f;
  return uniform < most ? uniform : broadcast(most);
}

// Logarithm to 1e-6, for normal x > 0.
inline Floats logarithm(Floats x) {
  const Ints bits = (Ints)x;
  const Ints exponent = (bits - 0x3f3504f3) >> 23;  // by sqrt(1/2): the rest is within a factor of sqrt(2) of 1
  const Floats rest = (Floats)(bits - (exponent << 23)) - 1.0f;
  Floats series = rest * 7.0376836292e-2f - 1.1514610310e-1f;  // of Cephes' logf (Moshier 1992)
  series = series * rest + 1.1676998740e-1f;
  series = series * rest - 1.2420140846e-1f;
  series = series * rest + 1.4249322787e-1f;
  series = series * rest - 1.6668057665e-1f;
  series = series * rest + 2.0000714765e-1f;
  series = series * rest - 2.4999993993e-1f;
  series = series * rest + 3.3333331174e-1f;
  const Floats square = rest * rest;
  return series * rest * square - 0.5f * square + rest + __builtin_convertvector(exponent, Floats) * 0.69314718f;
}

inline Floats noise_of(Floats uniform) {
  // -log(1 - u); computing 1 - u would lose precision for small u
  const Floats small = uniform * (1.0f + uniform * (0.5f + uniform * (1.0f / 3 + uniform * 0.25f)));
  return -logarithm(uniform < 0x1p-6f ? small : -logarithm(1.0f - uniform));
}

// Upper bound of the noise: it is at most -log(u), bounded by a linear function of the bits of u.
inline Floats most_noise_of(Floats uniform) {
  return (127.0f - __builtin_convertvector((Ints)uniform, Floats) * 0x1p-23f) * 0.69314718f + 1e-4f;
}

// The best token among levels of at least the floor; kUnsure if torch's rounding of the noise might choose another.
inline int64_t best_of(const float* levels, int64_t size, float floor, uint64_t key) {
  const uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
  float best = -kInfinity, close = -kInfinity;  // scores of at least `close` rival the best
  int64_t token = 0;
  bool has_rival = false;
  const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t first = 0; first < size; first += kLanes) {
    const Floats level = load(levels + first);
    const Ints is_kept = (level >= floor) & (level > close - kMostNoise);
    if (!bits_of(is_kept)) continue;
    const Floats uniform = uniforms_of(lanes + (uint32_t)first, low, high);
    if (!bits_of(is_kept & (level + most_noise_of(uniform) >= close))) continue;
    const Floats score = level + noise_of(uniform);
    for (uint32_t bits = bits_of(is_kept & (score >= close)); bits; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      if (score[lane] < close) continue;
      const float margin = kNoiseError + std::abs(score[lane]) * 0x1p-20f;
      if (score[lane] > best) {
        has_rival = score[lane] - margin <= best;
        best = score[lane];
        close = best - margin;
        token = first + lane;
      } else {
        has_rival = true;
      }
    }
  }
  return has_rival ? kUnsure : token;
}

struct Filters {
  int32_t top_k;
  float top_p, least;  // least: smallest level that min-p keeps
};

template <class T>
inline int64_t draw_row(const T* row, int64_t size, uint64_t key, float inverse, const Filters& filters,
                        std::vector<float>& levels, std::vector<float>& scratch) {
  const float top = largest_of(row, size);
  if (!(std::abs(top) < kInfinity)) return kNotFinite;
  Ints is_nan = {};
  for (int64_t first = 0; first < size; first += kLanes) {
    const Floats level = (load_part(row, first, size) - top) * inverse;
    store(levels.data() + first, level);
    is_nan |= level != level;
  }
  if (bits_of(is_nan)) return kNotFinite;
  float floor = -kInfinity;
  if (filters.top_k > 0 && filters.top_k < size) floor = count_floor(levels.data(), size, filters.top_k, scratch);
  if (filters.top_p > 0) floor = std::max(floor, mass_floor(levels.data(), size, floor, filters.top_p, scratch));
  floor = std::max({floor, filters.least, -std::numeric_limits<float>::max()});
  return best_of(levels.data(), size, floor, key);
}

template <class T>
inline int64_t greedy_row(const T* row, int64_t size) {
  const float top = largest_of(row, size);
  if (!(std::abs(top) < kInfinity)) return kNotFinite;
  for (int64_t first = 0;; first += kLanes) {
    const uint32_t bits = bits_of(load_part(row, first, size) == top);
    if (bits) return first + __builtin_ctz(bits);
  }
}

template <class T>
inline void draw_rows(const T* logits, int64_t stride, const int64_t* keys, const float* inverses,
                      const float* noise_scales, const int32_t* top_k, const float* top_p, const float* least,
                      int64_t* tokens, int64_t num_rows, int64_t vocab_size, int num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
  {
    std::vector<float> levels(padded(vocab_size)), scratch(padded(vocab_size) + kLanes);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < num_rows; ++row) {
      const T* from = logits + row * stride;
      tokens[row] = noise_scales[row] > 0 ? draw_row(from, vocab_size, (uint64_t)keys[row], inverses[row],
                                                     Filters{top_k[row], top_p[row], least[row]}, levels, scratch)
                                          : greedy_row(from, vocab_size);
    }
  }
}

}  // namespace

// Draw a token for each row of logits [num_rows, vocab_size], contiguous, `stride` apart. The other arrays [num_rows]
// are those of `draw.DrawInputs`; least: smallest level that min-p keeps, -infinity keeps all. tokens [num_rows]: -1
// for a non-finite row, -2 if torch's noise must decide.
extern "C" void draw(const void* logits, int is_bfloat16, int64_t stride, const int64_t* keys, const float* inverses,
                     const float* noise_scales, const int32_t* top_k, const float* top_p, const float* least,
                     int64_t* tokens, int64_t num_rows, int64_t vocab_size, int num_threads) {
  if (is_bfloat16)
    draw_rows((const bfloat16*)logits, stride, keys, inverses, noise_scales, top_k, top_p, least, tokens, num_rows,
              vocab_size, num_threads);
  else
    draw_rows((const float*)logits, stride, keys, inverses, noise_scales, top_k, top_p, least, tokens, num_rows,
              vocab_size, num_threads);
}

// masses [size] float64 of levels [size]: for tests against `filters.masses`.
extern "C" void masses(const float* levels, double* to, int64_t size) {
  for (int64_t at = 0; at < size; ++at) to[at] = masses_of(broadcast(levels[at])).low[0];
}
