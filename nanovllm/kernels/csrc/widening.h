// Quantised panels of a weight, widened to ELEMENT: the order in which `products.h` reads a panel.
//
// Quantised values are widened when their panel's turn comes, to memory of the thread's own that stays in its cache
// while all rows pass over it. So less is read from memory, and sums are those of the dequantised weights, rounded to
// ELEMENT, whatever the number of rows.
#pragma once

#include <memory>

#include "vectors.h"

namespace {

constexpr int kPanel = 2 * kLanes;                   // outputs
constexpr int kStep = sizeof(Element) == 2 ? 2 : 1;  // depth that is multiplied at once

// Of a panel. Runs are of neighbours along the depth; each run begins with its 32 scales, and minima if it has them.
// Bytes lie as [depth][32 outputs], nibbles as [depth / 8][32 outputs][4 bytes], the first in the lowest bits. Of five
// bits the highest ones of a run lie before its nibbles, a word for each output, the first in the lowest bit.
enum Kind : int64_t {
  kPlain,                // ELEMENTs, as products.h describes
  kBytes,                // one run as deep as the panel: sums are multiplied with its float scales
  kBytesHalfScales,      // runs of 32: float16 scales
  kBytesOfSixteen,       // runs of 16: float scales
  kNibblesHalfScales,    // runs of 32: float16 scales and minima
  kNibblesFloatScales,   // runs of 32: float scales and minima
  kFiveBitsHalfScales,   // runs of 32: float16 scales and minima
  kFiveBitsFloatScales,  // runs of 32: float scales and minima
};

constexpr int64_t kScaleBytes = kPanel * sizeof(float);  // of the kind kBytes

// Where a packed weight has a panel, in bytes, and its Kind.
struct Panel {
  int64_t offset, kind;
};

struct float16 {
  uint16_t bits;
};

// Exactly, and without a processor's help as well.
inline Floats load(const float16* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof(bits));
#ifdef __AVX512F__
  return (Floats)_mm512_cvtph_ps((__m256i)bits);
#else
  const Words wide = __builtin_convertvector(bits, Words);
  const Floats magnitude = (Floats)((wide & 0x7fffu) << 13) * 0x1p112f;
  return (Floats)((Words)magnitude | (wide & 0x8000u) << 16);
#endif
}

using Bytes = int8_t __attribute__((vector_size(kLanes)));

inline Floats load(const int8_t* from) {
  Bytes values;
  std::memcpy(&values, from, sizeof(values));
#ifdef __AVX512F__
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)values));
#else
  return __builtin_convertvector(values, Floats);
#endif
}

// The lowest four bits of each lane.
inline Floats lowest_nibbles(Words words) {
#ifdef __AVX512F__
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (Floats)_mm512_permutexvar_ps((__m512i)words, numbers);
#else
  return __builtin_convertvector((Ints)(words & 15u), Floats);
#endif
}

// What has 16 bits at most: both halves of a panel's step from sixteen outputs' elements, which ELEMENT holds exactly.
[[maybe_unused]] inline void store_exact(bfloat16* to, Floats first, Floats second) {
  const Words pairs = (Words)first >> 16 | (Words)second;
  std::memcpy(to, &pairs, sizeof(pairs));
}

[[maybe_unused]] inline void store_exact(float* to, Floats only, Floats) { store(to, only); }

constexpr int64_t kAhead = 4096;  // bytes; also into the next panel, which lies behind

// Asks for what will be read soon: the processor's own prefetching ends with each page.
inline void fetch(const void* from, int64_t size) {
  for (int64_t at = kAhead; at < kAhead + size; at += 64) __builtin_prefetch((const char*)from + at, 0, 2);
}

// The power of two below each scale of the kind kBytes, with which its bytes are widened: sums of whole bytes overflow
// where those of the weights do not.
inline Floats unit_of(Floats scale) {
  const Words exponent = (Words)scale & 0x7f800000u, least = Words{} + 0x00800000u;
  return (Floats)(exponent > least ? exponent : least);
}

void widen_bytes(const char* panel, int64_t depth, Element* to) {
  const Floats units[2] = {unit_of(load((const float*)panel)), unit_of(load((const float*)panel + kLanes))};
  const int8_t* from = (const int8_t*)(panel + kScaleBytes);
  for (int64_t at = 0; at < depth; at += kStep, from += kStep * kPanel, to += kStep * kPanel) {
    fetch(from, kStep * kPanel);
    for (int half = 0; half < 2; ++half)
      store_exact(to + half * kStep * kLanes, load(from + half * kLanes) * units[half],
                  load(from + (kStep - 1) * kPanel + half * kLanes) * units[half]);
  }
}

template <class Scale, int kRun>
void widen_scaled_bytes(const char* panel, int64_t depth, Element* to) {
  constexpr int64_t kRunBytes = kPanel * (sizeof(Scale) + kRun);
  for (int64_t run = 0; run < depth / kRun; ++run) {
    const Scale* scales = (const Scale*)(panel + run * kRunBytes);
    const int8_t* from = (const int8_t*)(scales + kPanel);
    fetch(scales, kRunBytes);
    for (int half = 0; half < 2; ++half) {
      const Floats scale = load(scales + half * kLanes);
      for (int k = 0; k < kRun; k += kStep) {
        const int8_t* at = from + k * kPanel + half * kLanes;
        store_step(to + k * kPanel + half * kStep * kLanes, load(at) * scale, load(at + (kStep - 1) * kPanel) * scale);
      }
    }
    to += kRun * kPanel;
  }
}

// The lowest four bits of each lane, and above them the lowest of `highest`.
inline Floats lowest_five(Words words, Words highest) {
  return __builtin_convertvector((Ints)((words & 15u) | (highest & 1u) << 4), Floats);
}

template <class Scale, bool kFive>
void widen_nibbles(const char* panel, int64_t depth, Element* to) {
  constexpr int kRun = 32, kOfWord = 8;
  constexpr int64_t kHighest = kFive ? kPanel * kRun / 8 : 0;
  constexpr int64_t kRunBytes = kPanel * (2 * sizeof(Scale) + kRun / 2) + kHighest;
  for (int64_t run = 0; run < depth / kRun; ++run) {
    const Scale* scales = (const Scale*)(panel + run * kRunBytes);
    const char* from = (const char*)(scales + 2 * kPanel) + kHighest;
    fetch(scales, kRunBytes);
    for (int half = 0; half < 2; ++half) {
      const Floats scale = load(scales + half * kLanes), minimum = load(scales + kPanel + half * kLanes);
      Words words, highest = {};
      if (kFive) std::memcpy(&highest, from - kHighest + half * sizeof(highest), sizeof(highest));
      const auto value = [&](int shift) {
        if constexpr (kFive) return lowest_five(words >> 4 * shift, highest >> shift) * scale + minimum;
        return lowest_nibbles(words >> 4 * shift) * scale + minimum;
      };
      for (int k = 0; k < kRun; k += kOfWord) {
        std::memcpy(&words, from + k / 2 * kPanel + half * sizeof(words), sizeof(words));
        for (int i = 0; i < kOfWord; i += kStep, words >>= 4 * kStep, highest >>= kStep)
          store_step(to + (k + i) * kPanel + half * kStep * kLanes, value(0), value(1));
      }
    }
    to += kRun * kPanel;
  }
}

// A quantised panel of `depth`, in the thread's memory until its next call.
const Element* widened(int64_t kind, const char* panel, int64_t depth) {
  struct alignas(64) Line {
    Element elements[64 / sizeof(Element)];
  };
  static thread_local std::unique_ptr<Line[]> memory;
  static thread_local int64_t size = 0;
  if (size < depth * kPanel) {
    size = depth * kPanel;
    memory.reset(new Line[size * sizeof(Element) / sizeof(Line)]);
  }
  Element* to = memory[0].elements;
  switch (kind) {
    case kBytes: widen_bytes(panel, depth, to); break;
    case kBytesHalfScales: widen_scaled_bytes<float16, 32>(panel, depth, to); break;
    case kBytesOfSixteen: widen_scaled_bytes<float, 16>(panel, depth, to); break;
    case kNibblesHalfScales: widen_nibbles<float16, false>(panel, depth, to); break;
    case kNibblesFloatScales: widen_nibbles<float, false>(panel, depth, to); break;
    case kFiveBitsHalfScales: widen_nibbles<float16, true>(panel, depth, to); break;
    default: widen_nibbles<float, true>(panel, depth, to);
  }
  return to;
}

}  // namespace
