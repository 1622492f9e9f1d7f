// Statistics of a row for logprobs: its largest logit, its mass relative to that, a token's rank, the top tokens.

#include "rows.h"

namespace {

struct Top {
  float value;
  int32_t token;
};

inline bool is_before(const Top& a, const Top& b) {
  return a.value > b.value || (a.value == b.value && a.token < b.token);
}

// Whether the row has no NaN and a finite maximum; if not, nothing is written.
template <class T>
inline bool measure_row(const T* row, int64_t size, int64_t token, int64_t num_top, float* largest, double* mass,
                        int64_t* rank, int64_t* top_ids, std::vector<Top>& best) {
  const float top = largest_of(row, size);
  if (!(std::abs(top) < kInfinity)) return false;
  const float own = token < size ? load_part(row, token, size)[0] : -kInfinity;
  Doubles total = {};
  Ints above = {};
  best.clear();  // a heap with the worst kept token first
  float least = -kInfinity;
  for (int64_t first = 0; first < size; first += kLanes) {
    const Floats values = load_part(row, first, size), levels = values - top;
    above -= values > own;
    if (bits_of(levels > -25.0f)) {  // else their masses are 0
      const Masses masses = masses_of(levels);
      total += masses.low + masses.high;
    }
    if (num_top == 0) continue;
    const bool is_full = (int64_t)best.size() == num_top;
    uint32_t bits = is_full ? bits_of(values > least) : 0xffffu;  // of equal ones, the lower token came first
    for (; bits; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      if (first + lane >= size) break;
      if ((int64_t)best.size() == num_top) {
        if (!(values[lane] > least)) continue;
        std::pop_heap(best.begin(), best.end(), is_before);
        best.pop_back();
      }
      best.push_back({values[lane], (int32_t)(first + lane)});
      std::push_heap(best.begin(), best.end(), is_before);
      least = best.front().value;
    }
  }
  std::sort(best.begin(), best.end(), is_before);
  for (int64_t place = 0; place < num_top; ++place) top_ids[place] = best[place].token;
  int64_t num_above = 0;
  for (int lane = 0; lane < kLanes; ++lane) num_above += above[lane];
  *largest = top;
  *mass = sum(total);
  *rank = num_above + 1;
  return true;
}

template <class T>
inline void measure_rows(const T* logits, int64_t stride, const int64_t* tokens, int64_t num_top, float* largest,
                         double* masses, int64_t* ranks, int64_t* top_ids, uint8_t* is_sound, int64_t num_rows,
                         int64_t vocab_size, int num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
  {
    std::vector<Top> best;
    best.reserve(num_top + 1);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < num_rows; ++row)
      is_sound[row] = measure_row(logits + row * stride, vocab_size, tokens[row], num_top, largest + row, masses + row,
                                  ranks + row, top_ids + row * num_top, best);
  }
}

}  // namespace

// Measure rows of logits [num_rows, vocab_size], contiguous, `stride` apart. tokens [num_rows], at least 0; vocab_size
// and above for tokens without a logit. Writes the largest logit, the mass relative to it, the tokens' ranks,
// [num_rows] each, and the tokens of the num_top largest logits [num_rows, num_top], lower ids first among equal
// logits. num_top is at most vocab_size. is_sound [num_rows]: 0 for rows with a non-finite maximum, for which nothing
// else is written.
extern "C" void measure(const void* logits, int is_bfloat16, int64_t stride, const int64_t* tokens, int64_t num_top,
                        float* largest, double* masses, int64_t* ranks, int64_t* top_ids, uint8_t* is_sound,
                        int64_t num_rows, int64_t vocab_size, int num_threads) {
  if (is_bfloat16)
    measure_rows((const bfloat16*)logits, stride, tokens, num_top, largest, masses, ranks, top_ids, is_sound, num_rows,
                 vocab_size, num_threads);
  else
    measure_rows((const float*)logits, stride, tokens, num_top, largest, masses, ranks, top_ids, is_sound, num_rows,
                 vocab_size, num_threads);
}
