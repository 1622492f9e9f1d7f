// Structured outputs: forbids tokens with bit 0.

#include <cstdint>
#include <limits>

// logits [*, vocab_size]: in `rows` [num_rows], -infinity is added to tokens with bit 0 in masks [num_rows, num_words];
// added, so that NaN stays NaN. Bit i % 32 of word i / 32 is token i's.
extern "C" void keep_bits(float* logits, const int64_t* rows, const uint32_t* masks, int64_t num_rows,
                          int64_t vocab_size, int64_t num_words, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t at = 0; at < num_rows; ++at) {
    float* row = logits + rows[at] * vocab_size;
    const uint32_t* mask = masks + at * num_words;
    for (int64_t first = 0; first < vocab_size; first += 32) {
      const uint32_t word = mask[first / 32];
      if (word == ~0u) continue;
      const int64_t count = vocab_size - first < 32 ? vocab_size - first : 32;
      if (count == 32 && word == 0) {  // most of a schema's words
        for (int64_t bit = 0; bit < 32; ++bit) row[first + bit] += -std::numeric_limits<float>::infinity();
        continue;
      }
      for (int64_t bit = 0; bit < count; ++bit)
        row[first + bit] += word >> bit & 1 ? 0.0f : -std::numeric_limits<float>::infinity();
    }
  }
}
