// Penalties of tokens that occur in a row's prompt and output.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kFields = 8;

inline float float_of(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace

// Penalise rows of logits [*, vocab_size], `stride` apart. An entry of `entries` [num_entries, 8]: row; start of its
// tokens, their number, and the number of prompt tokens among them; index in `previous` of one more output token, or
// -1; bits of its repetition, frequency and presence penalties.
extern "C" void penalise(float* logits, int64_t stride, const int32_t* entries, const int32_t* tokens,
                         const int64_t* previous, int64_t num_entries, int64_t vocab_size, int num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && num_entries > 1)
  {
    // 2 per occurrence in the output, plus 1 if in the prompt; all 0 between entries.
    std::vector<int32_t> counts(vocab_size);
#pragma omp for schedule(dynamic)
    for (int64_t at = 0; at < num_entries; ++at) {
      const int32_t* entry = entries + at * kFields;
      const int32_t* own = tokens + entry[1];
      const int32_t length = entry[2], num_prompt = entry[3];
      const int64_t latest = entry[4] < 0 ? -1 : previous[entry[4]] < 0 ? 0 : previous[entry[4]];
      const float repetition = float_of(entry[5]), frequency = float_of(entry[6]), presence = float_of(entry[7]);
      float* row = logits + entry[0] * stride;
      for (int32_t place = 0; place < length; ++place) {
        if (own[place] >= vocab_size) continue;  // of a prompt; without a logit
        if (place < num_prompt)
          counts[own[place]] |= 1;
        else
          counts[own[place]] += 2;
      }
      if (latest >= 0) counts[latest] += 2;
      const auto change = [&](int64_t token) {
        const int32_t found = counts[token];
        if (found == 0) return;
        counts[token] = 0;
        float value = row[token];
        value = value > 0 ? value / repetition : value * repetition;
        value -= frequency * (float)(found >> 1);
        row[token] = value - (found > 1 ? presence : 0.0f);
      };
      for (int32_t place = 0; place < length; ++place)
        if (own[place] < vocab_size) change(own[place]);
      if (latest >= 0) change(latest);
    }
  }
}
