// Quantised panels of a weight, widened to ELEMENT: the order in which `products.h` reads a panel.
//
// A panel is widened right before its use, to thread-local memory that stays in the cache while all rows pass over it;
// with matrix tiles one step ahead of the first rows' products. So less is read from memory, and sums equal those of
// the dequantised weights, rounded to ELEMENT (weights with one scale an output are not rounded).
#pragma once

#include <memory>

#include "vectors.h"

namespace {

constexpr int kPanel = 2 * kLanes;                   // outputs
constexpr int kStep = sizeof(Element) == 2 ? 2 : 1;  // depth that is multiplied at once

// Of a panel. Runs are of neighbours along the depth; each run begins with its 32 scales, and minima if it has them.
// Bytes lie as [depth / 4][32 outputs][4], nibbles as [depth / 8][32 outputs][4 bytes]: of eight neighbours the first
// four in the lower halves of the bytes. Four lie in the order 0, 2, 1, 3, so that pairs are 16 bits apart. Of five
// bits the highest ones of a run lie before its nibbles, a word for each output: of even elements, then of odd ones.
// Codes of 4-bit floats (e2m1) lie as nibbles do, those of 8-bit floats (e4m3) as bytes do.
enum Kind : int64_t {
  kPlain,                // ELEMENTs, as products.h describes
  kBytes,                // one run as deep as the panel: sums are multiplied with its float scales
  kBytesHalfScales,      // runs of 32: float16 scales
  kBytesOfSixteen,       // runs of 16: float scales
  kNibblesHalfScales,    // runs of 32: float16 scales and minima
  kNibblesFloatScales,   // runs of 32: float scales and minima
  kFiveBitsHalfScales,   // runs of 32: float16 scales and minima
  kFiveBitsFloatScales,  // runs of 32: float scales and minima
  kNibblesHalfZeros,     // runs of 32: float16 scales and zero points
  kFloat4,               // runs of 32: half of their scales, as bfloat16
  kFloat4OfSixteen,      // runs of 16: the same, to be multiplied with a float scale of each output before all runs
  kFloat8,               // one run as deep as the panel, after its float scales
  kFloat8OfMany,         // runs of 128: float scales
  kFloat8OfFew,          // runs of 32: float scales
  kFloat8Unscaled,       // of no panel: runs of 128, widened without their scales
};

// Whether a kind's values are whole numbers or become them.
inline bool is_whole(int64_t kind) { return kind != kPlain && kind < kFloat8; }

inline bool is_of_sixteen(int64_t kind) { return kind == kBytesOfSixteen || kind == kFloat4OfSixteen; }

constexpr int64_t kScaleBytes = kPanel * sizeof(float);  // of the kind kBytes

// Offset of a panel in a packed weight, in bytes, and its Kind.
struct Panel {
  int64_t offset, kind;
};

struct float16 {
  uint16_t bits;
};

// Exact, also without hardware support.
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

// The lowest four bits of each lane.
inline Floats lowest_nibbles(Words words) {
#ifdef __AVX512F__
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (Floats)_mm512_permutexvar_ps((__m512i)words, numbers);
#else
  return __builtin_convertvector((Ints)(words & 15u), Floats);
#endif
}

// For values of up to 16 bits: both halves of a panel's step from sixteen outputs' elements, exact in ELEMENT.
[[maybe_unused]] inline void store_exact(bfloat16* to, Floats first, Floats second) {
  const Words pairs = (Words)first >> 16 | (Words)second;
  std::memcpy(to, &pairs, sizeof(pairs));
}

[[maybe_unused]] inline void store_exact(float* to, Floats only, Floats) { store(to, only); }

constexpr int64_t kAhead = 4096;  // bytes; also into the next panel, which follows

// Prefetches: the hardware prefetcher stops at each page boundary.
inline void fetch(const void* from, int64_t size) {
  for (int64_t at = kAhead; at < kAhead + size; at += 64) __builtin_prefetch((const char*)from + at, 0, 2);
}

// Position of element i of four, and the element at position i.
constexpr int place_of_four(int i) { return i == 1 || i == 2 ? 3 - i : i; }

// Four neighbours (adjacent bytes) of each of sixteen outputs, each multiplied by 2^24.
struct FourBytes {
  static constexpr float kUnit = 0x1p-24f;
  Words words;

  explicit FourBytes(const char* from) { std::memcpy(&words, from, sizeof(words)); }

  Floats operator[](int element) const {
#ifdef __AVX512BW__
    alignas(64) static constexpr auto kPlaces = [] {
      struct { uint8_t at[4][64]; } table = {};
      for (int k = 0; k < 4; ++k)
        for (int i = 0; i < 64; ++i) table.at[k][i] = (uint8_t)(i % 4 == 3 ? i % 16 - 3 + place_of_four(k) : 128);
      return table;
    }();
    const __m512i places = _mm512_load_si512(kPlaces.at[element]);
    return (Floats)_mm512_cvtepi32_ps(_mm512_shuffle_epi8((__m512i)words, places));
#else
    return __builtin_convertvector((Ints)(words << (24 - 8 * place_of_four(element)) & 0xff000000u), Floats);
#endif
  }
};

// Power of two below each scale of the kind kBytes, the factor in widening: sums of plain bytes could overflow where
// sums of the weights do not.
inline Floats unit_of(Floats scale) {
  const Words exponent = (Words)scale & 0x7f800000u, least = Words{} + 0x00800000u;
  return (Floats)(exponent > least ? exponent : least);
}

// Runs of the kinds, of kBytes bytes each; of the kind kBytes the four that lie together. `panel` is where they begin.

struct PlainBytes {
  static constexpr bool kIsWhole = true;
  static constexpr int64_t kRun = 4, kScales = 0, kBytes = kRun * kPanel, kHeader = kScaleBytes;

  static void widen(const char* panel, const char* run, Element* to) {
    for (int half = 0; half < 2; ++half) {
      const Floats unit = unit_of(load((const float*)panel + half * kLanes));
      const FourBytes values(run + half * 4 * kLanes);
      for (int k = 0; k < kRun; k += kStep)
        store_exact(to + k * kPanel + half * kStep * kLanes, values[k] * FourBytes::kUnit * unit,
                    values[k + kStep - 1] * FourBytes::kUnit * unit);
    }
  }
};

template <class ScaleOfRun, int kLength>
struct ScaledBytes {
  using Scale = ScaleOfRun;
  static constexpr int64_t kRun = kLength, kScales = kPanel * sizeof(Scale), kBytes = kScales + kPanel * kRun;
  static constexpr int64_t kHeader = 0;
  static constexpr bool kHasMinima = false, kHasCodes = false, kIsWhole = true;

  static Floats scale_of_run(const char* run, int half) { return load((const Scale*)run + half * kLanes); }
  static Floats scale(const char*, const char* run, int half) { return scale_of_run(run, half); }

  static void widen(const char*, const char* run, Element* to) {
    for (int half = 0; half < 2; ++half) {
      const Floats scale = load((const Scale*)run + half * kLanes) * FourBytes::kUnit;
      for (int k = 0; k < kRun; k += 4) {
        const FourBytes values(run + kScales + k * kPanel + half * 4 * kLanes);
        for (int i = 0; i < 4; i += kStep)
          store_step(to + (k + i) * kPanel + half * kStep * kLanes, values[i] * scale, values[i + kStep - 1] * scale);
      }
    }
  }
};

// The lowest four bits of each lane, and above them the lowest of `highest`.
inline Floats lowest_five(Words words, Words highest) {
  return __builtin_convertvector((Ints)((words & 15u) | (highest & 1u) << 4), Floats);
}

template <class ScaleOfRun, bool kHasFive, bool kHasZeros = false>
struct Nibbles {
  using Scale = ScaleOfRun;
  static constexpr bool kHasMinima = true, kHasCodes = false, kIsWhole = true, kFive = kHasFive;
  static constexpr int64_t kHeader = 0;
  static constexpr int kOfWord = 8;
  static constexpr int64_t kRun = 32, kScales = 2 * kPanel * sizeof(Scale), kHighest = kFive ? kPanel * kRun / 8 : 0;
  static constexpr int64_t kBytes = kScales + kHighest + kPanel * kRun / 2;

  static Floats scale_of_run(const char* run, int half) { return load((const Scale*)run + half * kLanes); }
  static Floats scale(const char*, const char* run, int half) { return scale_of_run(run, half); }

  static Floats minimum(const char* run, int half) {
    const Floats stored = load((const Scale*)run + kPanel + half * kLanes);
    return kHasZeros ? -stored * scale_of_run(run, half) : stored;
  }

  static void widen(const char* panel, const char* run, Element* to) {
    for (int half = 0; half < 2; ++half) {
      const Floats scale = Nibbles::scale(panel, run, half), minimum = Nibbles::minimum(run, half);
      Words words, highest = {};
      if (kFive) std::memcpy(&highest, run + kScales + half * sizeof(highest), sizeof(highest));
      const auto value = [&](int i) {  // of a word's eight
        const Words nibble = words >> (place_of_four(i % 4) * 8 + i / 4 * 4);
        const Floats number = kFive ? lowest_five(nibble, highest >> (i / 2 + i % 2 * 16)) : lowest_nibbles(nibble);
        return number * scale + minimum;
      };
      for (int k = 0; k < kRun; k += kOfWord, highest >>= kOfWord / 2) {
        std::memcpy(&words, run + kScales + kHighest + k / 2 * kPanel + half * sizeof(words), sizeof(words));
        for (int i = 0; i < kOfWord; i += kStep)
          store_step(to + (k + i) * kPanel + half * kStep * kLanes, value(i), value(i + kStep - 1));
      }
    }
  }
};

// Magnitudes of floats of few bits from their exponents and mantissas in a float's places; `zero` is the float of their
// exponent 0. Read so, subnormal ones have a 1 before their mantissa, which the smaller result is without. (Subnormal
// floats instead would cost some processors 150 cycles for each vector.)
inline Floats magnitudes_of(Words bits, uint32_t zero) {
  const Floats normal = (Floats)(bits + zero), subnormal = normal + normal - (Floats)(Words{} + zero + 0x00800000u);
  return subnormal < normal ? subnormal : normal;
}

// Twice the numbers of the 4-bit floats whose codes are the lowest four bits of each lane.
inline Floats doubled_float4(Words words) {
#ifdef __AVX512F__
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  return (Floats)_mm512_permutexvar_ps((__m512i)words, numbers);
#else
  return (Floats)((Words)magnitudes_of((words & 7u) << 22, 127u << 23) | (words & 8u) << 28);
#endif
}

#ifdef __AVX512BW__
// The same as bytes, 128 more, by code, four times.
inline __m512i float4_table() {
  return _mm512_broadcast_i32x4(
      _mm_setr_epi8(-128, -127, -126, -125, -124, -122, -120, -116, -128, 127, 126, 125, 124, 122, 120, 116));
}
#endif

// The same of codes in the bytes of each lane.
inline Words float4_bytes(Words codes) {
#ifdef __AVX512BW__
  return (Words)_mm512_shuffle_epi8(float4_table(), (__m512i)codes);
#else
  constexpr uint8_t kTable[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
  uint8_t bytes[sizeof(codes)];
  std::memcpy(bytes, &codes, sizeof(codes));
  for (uint8_t& byte : bytes) byte = kTable[byte];
  std::memcpy(&codes, bytes, sizeof(codes));
  return codes;
#endif
}

template <int kLength>
struct Float4 {
  static constexpr bool kHasMinima = false, kHasCodes = true, kIsWhole = true;
  static constexpr int kOfWord = 8;
  static constexpr int64_t kRun = kLength, kScales = kPanel * sizeof(bfloat16), kBytes = kScales + kPanel * kRun / 2;
  static constexpr int64_t kHeader = kRun == 16 ? kScaleBytes : 0;

  static Floats scale_of_run(const char* run, int half) { return load((const bfloat16*)run + half * kLanes); }

  static Floats scale(const char* panel, const char* run, int half) {
    const Floats of_run = scale_of_run(run, half);
    return kHeader > 0 ? of_run * load((const float*)panel + half * kLanes) : of_run;
  }

  static void widen(const char* panel, const char* run, Element* to) {
    for (int half = 0; half < 2; ++half) {
      const Floats scale = Float4::scale(panel, run, half);
      Words words;
      const auto value = [&](int i) {
        return doubled_float4(words >> (place_of_four(i % 4) * 8 + i / 4 * 4)) * scale;
      };
      for (int k = 0; k < kRun; k += kOfWord) {
        std::memcpy(&words, run + kScales + k / 2 * kPanel + half * sizeof(words), sizeof(words));
        for (int i = 0; i < kOfWord; i += kStep)
          store_step(to + (k + i) * kPanel + half * kStep * kLanes, value(i), value(i + kStep - 1));
      }
    }
  }
};

constexpr float kFloat8Unit = 0x1p-9f;  // of widened numbers, below 1: large activations overflow no sooner by them

#ifdef __AVX512VBMI__

// The low and high bytes of magnitudes in bfloat16, in units, by the lowest seven bits of a code.
struct Float8Bytes {
  uint8_t low[128], high[128];

  constexpr Float8Bytes() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      const int mantissa = code & 7, exponent = code >> 3;
      int highest = 2;
      while (highest > 0 && mantissa >> highest == 0) --highest;
      int bits = (exponent + 127 - 7 - 9) << 7 | mantissa << 4;
      if (exponent == 0) bits = mantissa == 0 ? 0 : (highest + 127 - 9 - 9) << 7 | (mantissa << (7 - highest) & 127);
      low[code] = (uint8_t)(bits & 255), high[code] = (uint8_t)(bits >> 8);
    }
  }
};

// Every e4m3 is exact in bfloat16, so two tables of bytes widen 64 of them without arithmetic.
class Float8Table {
 public:
  Float8Table() {
    alignas(64) static constexpr Float8Bytes kBytes;
    for (int half = 0; half < 2; ++half) {
      low_[half] = _mm512_loadu_si512(kBytes.low + 64 * half);
      high_[half] = _mm512_loadu_si512(kBytes.high + 64 * half);
    }
  }

  // Four neighbours of each of sixteen outputs, as the pairs that are multiplied at once.
  void widen(const char* from, __m512i& first, __m512i& second) const {
    const __m512i codes = _mm512_loadu_si512(from);
    constexpr int kOrAnd = 0xf8, kSelect = 0xca;
    const __m512i low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(-128), kOrAnd);
    const __m512i lower = _mm512_set1_epi16(255);
    first = _mm512_ternarylogic_epi32(lower, low, _mm512_slli_epi16(high, 8), kSelect);
    second = _mm512_ternarylogic_epi32(lower, _mm512_srli_epi16(low, 8), high, kSelect);
  }

 private:
  __m512i low_[2], high_[2];
};

#endif

// A length of 0: the panel is one run, widened in units in bfloat16: its sums are multiplied with the scales.
template <int kLength, bool kMayScale = kLength != 0 || kStep == 1>
struct Float8 {
  static constexpr bool kHasMinima = false, kIsWhole = false, kIsScaled = kMayScale;
  static constexpr int64_t kRun = kLength > 0 ? kLength : 4, kScales = kLength > 0 ? kScaleBytes : 0;
  static constexpr int64_t kBytes = kScales + kPanel * kRun, kHeader = kLength > 0 ? 0 : kScaleBytes;

  static Floats scale(const char* panel, const char* run, int half) {
    return load((const float*)(kLength > 0 ? run : panel) + half * kLanes);
  }

  static void widen(const char* panel, const char* run, Element* to) {
    for (int half = 0; half < 2; ++half) {
      const Floats scale = kIsScaled ? Float8::scale(panel, run, half) / kFloat8Unit : Floats{} + 1.0f;
      for (int64_t k = 0; k < kRun; k += 4) {
        const char* from = run + kScales + k * kPanel + half * 4 * kLanes;
        __builtin_prefetch(from + kAhead, 0, 2);  // evenly: 65 lines at once would wait for one another
        widen_four(from, scale, to + k * kPanel + half * kStep * kLanes);
      }
    }
  }

 private:
  static void widen_four(const char* from, Floats scale, Element* to) {
#ifdef __AVX512VBMI__
    if constexpr (kStep == 2) {
      const Float8Table table;
      __m512i pairs[2];
      table.widen(from, pairs[0], pairs[1]);
      for (const __m512i& pair : pairs) {
        const Words words = (Words)pair;
        if (kIsScaled)
          store_step(to, (Floats)(words << 16) * scale, (Floats)(words & 0xffff0000u) * scale);
        else
          std::memcpy(to, &words, sizeof(words));
        to += 2 * kPanel;
      }
      return;
    }
#endif
    Words words;
    std::memcpy(&words, from, sizeof(words));
    const auto value = [&](int i) {
      const Words bits = (Words)((Ints)(words << (24 - 8 * place_of_four(i))) >> 4);
      const Floats magnitude = magnitudes_of(bits & 0x07f00000u, (127 - 7 - 9) << 23);
      return (Floats)((Words)magnitude | (bits & 0x80000000u)) * scale;
    };
    for (int i = 0; i < 4; i += kStep) store_step(to + i * kPanel, value(i), value(i + kStep - 1));
  }
};

// Calls `use` with a kind's runs.
template <class Use>
inline void with_runs(int64_t kind, const Use& use) {
  switch (kind) {
    case kBytes: return use(PlainBytes{});
    case kBytesHalfScales: return use(ScaledBytes<float16, 32>{});
    case kBytesOfSixteen: return use(ScaledBytes<float, 16>{});
    case kNibblesHalfScales: return use(Nibbles<float16, false>{});
    case kNibblesFloatScales: return use(Nibbles<float, false>{});
    case kFiveBitsHalfScales: return use(Nibbles<float16, true>{});
    case kNibblesHalfZeros: return use(Nibbles<float16, false, true>{});
    case kFloat4: return use(Float4<32>{});
    case kFloat4OfSixteen: return use(Float4<16>{});
    case kFloat8: return use(Float8<0>{});
    case kFloat8OfMany: return use(Float8<128>{});
    case kFloat8OfFew: return use(Float8<32>{});
    case kFloat8Unscaled: return use(Float8<128, false>{});
    default: return use(Nibbles<float, true>{});
  }
}

// A quantised panel, widened step by step in memory that the thread's next panel overwrites. One that is read only once
// takes as much as stays in the L1 cache, again and again.
class WidePanel {
 public:
  static constexpr int64_t kRing = 256;  // depth: two of the longest runs
  static constexpr int64_t kRingMask = kRing * kPanel * (int64_t)sizeof(Element) - 1;
  const int64_t mask;  // of offsets in bytes from elements() on

  WidePanel(int64_t kind, const char* panel, int64_t depth, bool is_read_once)
      : mask(is_read_once ? kRingMask : -1), kind_(kind), panel_(panel), from_(panel), depth_(depth) {
    if (depth == 0) return;
    static thread_local std::unique_ptr<Line[]> memory;
    static thread_local int64_t size = 0;
    const int64_t kept = is_read_once ? kRing : depth;
    if (const int64_t needed = (kept + 3) / 4 * 4 * kPanel; size < needed) {  // whole runs
      size = needed;
      memory.reset(new Line[size * sizeof(Element) / sizeof(Line)]);
    }
    first_ = (Element*)memory.get();
    with_runs(kind, [this](auto runs) { from_ += decltype(runs)::kHeader; });
  }

  const Element* elements() const { return first_; }
  const Element* at(int64_t k) const { return (const Element*)((const char*)first_ + offset(k)); }

  // The next `depth` elements of each output, in whole runs, or the remaining ones.
  void widen(int64_t depth) {
    wanted_ = std::min(wanted_ + depth, depth_);
    if (widened_ < wanted_) with_runs(kind_, [this](auto runs) { widen_runs<decltype(runs)>(); });
  }

 private:
  struct alignas(64) Line {
    Element elements[64 / sizeof(Element)];
  };

  int64_t offset(int64_t k) const { return k * kPanel * (int64_t)sizeof(Element) & mask; }

  // Not inline: the compiler would mix its registers with those of the tiles' loop.
  template <class Runs>
  __attribute__((noinline)) void widen_runs() {
    for (; widened_ < wanted_; widened_ += Runs::kRun, from_ += Runs::kBytes) {
      fetch(from_, Runs::kIsWhole ? Runs::kBytes : Runs::kScales);
      Runs::widen(panel_, from_, (Element*)((char*)first_ + offset(widened_)));
    }
  }

  int64_t kind_;
  const char *panel_, *from_;
  int64_t depth_, wanted_ = 0, widened_ = 0;
  Element* first_ = nullptr;
};

}  // namespace
