// Products of up to 16 rows with quantised panels in matrix tiles of bfloat16, run by run.
//
// Widening a panel, with its scales, takes longer than the products of so few rows. Here values become bfloat16
// integers plus a constant, in two or three instructions per 32 values: nibbles are masked in below an exponent, codes
// of 4-bit floats looked up. A run's sums are read from the tiles and multiplied with its scales in float32; the
// constant is subtracted by means of the sum of the row's run, as minima are added. So results are closer to the exact
// product than with bfloat16 weights.
#pragma once

#include "tiles.h"
#include "widening.h"

namespace {

constexpr int kRowsOfRuns = kTileRows;
constexpr float kRunUnit = 0x1p-8f;  // of whole numbers, so that one large activation does not overflow

#if defined(BF16_TILES) && defined(__AVX512BW__)

// The rows of a product, and their sums of each run of 32. (Of activations below 1e-36 tiles take some as 0 that the
// sums have.)
class RunRows {
 public:
  TileRows tiles;
  int num_rows;
  int64_t num_runs;
  static constexpr int64_t kRing = 4;
  alignas(64) float sums_of_tiles[kRing][kTileRows * kLanes] = {};  // those of the last runs

  void fill(const TileRows& rows, int count, int64_t depth) {
    tiles = rows, num_rows = count, num_runs = depth / kTileDepth;
    if (num_runs > size_) row_sums_.reset(new RowSums[size_ = num_runs]);
    for (int64_t run = 0; run < num_runs; ++run) {
      Floats values[kLanes] = {};
      for (int row = 0; row < num_rows; ++row) {
        const Element* at = (const Element*)(of_run(run) + row * rows.next_row);
        values[row] = load(at) + load(at + kLanes);
      }
      store(row_sums_[run].at, sums(values));
    }
  }

  const char* of_run(int64_t run) const { return (const char*)tiles.at + run * tiles.next_depth; }
  const float* row_sums(int64_t run) const { return row_sums_[run].at; }  // [16], zero after the rows

 private:
  struct alignas(64) RowSums {
    float at[kTileRows];
  };
  std::unique_ptr<RowSums[]> row_sums_;
  int64_t size_ = 0;
};

// A run's values of 16 outputs as [16 pairs of neighbours][16 outputs][2], in units, kExcess too large; if they are not
// there, runs are widened instead.
template <class Runs>
struct WholeNumbers {
  static constexpr bool kAreThere = false;
};

// Of each half of a word the bits `mask`, once the word is turned by kTurn bits, below an exponent.
template <int kTurn>
inline __m512i below(uint32_t exponent, uint32_t mask, __m512i words) {
  const __m512i turned = kTurn > 0 ? _mm512_slli_epi32(words, kTurn) : _mm512_srli_epi32(words, -kTurn);
  constexpr int kOrAnd = 0xf8;  // exponent | (turned & mask)
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32((int)exponent), turned, _mm512_set1_epi32((int)mask), kOrAnd);
}

template <class Scale, bool kHasZeros>
struct WholeNumbers<Nibbles<Scale, false, kHasZeros>> {
  static constexpr bool kAreThere = true;
  static constexpr float kExcess = 16;

  __attribute__((always_inline)) static void convert(const char* run, int half, __m512i* to) {
    const char* from = run + Nibbles<Scale, false, kHasZeros>::kScales + half * 64;
    for (int pair = 0; pair < 16; pair += 4, from += 4 * kPanel) {
      constexpr uint32_t kExponent = 0x3d803d80, kMask = 0x00780078;  // 16 units, and below it 8, 4, 2 and 1
      const __m512i words = _mm512_loadu_si512(from);
      to[pair] = below<3>(kExponent, kMask, words);
      to[pair + 1] = below<-5>(kExponent, kMask, words);
      to[pair + 2] = below<-1>(kExponent, kMask, words);
      to[pair + 3] = below<-9>(kExponent, kMask, words);
    }
  }
};

template <class Scale>
struct WholeNumbers<Nibbles<Scale, true>> {
  static constexpr bool kAreThere = true;
  static constexpr float kExcess = 32;

  __attribute__((always_inline)) static void convert(const char* run, int half, __m512i* to) {
    const char* from = run + Nibbles<Scale, true>::kScales + half * 64;
    __m512i highest = _mm512_rol_epi32(_mm512_loadu_si512(from), 6);  // the pair's bits are the seventh of both halves
    from += Nibbles<Scale, true>::kHighest;
    const auto with_highest = [&](__m512i lower) {
      const __m512i both = _mm512_ternarylogic_epi32(lower, highest, _mm512_set1_epi32(0x00400040), 0xf8);
      highest = _mm512_ror_epi32(highest, 1);
      return both;
    };
    for (int pair = 0; pair < 16; pair += 4, from += 4 * kPanel) {
      constexpr uint32_t kExponent = 0x3e003e00, kMask = 0x003c003c;  // 32 units, and below it 8, 4, 2 and 1
      const __m512i words = _mm512_loadu_si512(from);
      to[pair] = with_highest(below<2>(kExponent, kMask, words));
      to[pair + 1] = with_highest(below<-6>(kExponent, kMask, words));
      to[pair + 2] = with_highest(below<-2>(kExponent, kMask, words));
      to[pair + 3] = with_highest(below<-10>(kExponent, kMask, words));
    }
  }
};

template <>
struct WholeNumbers<Float4<32>> {
  static constexpr bool kAreThere = true;
  static constexpr float kExcess = 0;

  __attribute__((always_inline)) static void convert(const char* run, int half, __m512i* to) {
    alignas(64) static constexpr uint16_t kNumbers[16] = {  // of 4-bit floats, doubled
        0, 0x3b80, 0x3c00, 0x3c40, 0x3c80, 0x3cc0, 0x3d00, 0x3d40,
        0, 0xbb80, 0xbc00, 0xbc40, 0xbc80, 0xbcc0, 0xbd00, 0xbd40};
    const __m512i numbers = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)kNumbers));  // of five bits, too
    const char* from = run + Float4<32>::kScales + half * 64;
    for (int pair = 0; pair < 16; pair += 4, from += 4 * kPanel) {
      const __m512i words = _mm512_loadu_si512(from);
      to[pair] = _mm512_permutexvar_epi16(words, numbers);
      to[pair + 1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), numbers);
      to[pair + 2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), numbers);
      to[pair + 3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), numbers);
    }
  }
};

#ifdef __AVX512FP16__

template <>
struct WholeNumbers<ScaledBytes<float16, 32>> {
  static constexpr bool kAreThere = true;
  static constexpr float kExcess = 129;  // 1 to 256, which bfloat16 holds

  __attribute__((always_inline)) static void convert(const char* run, int half, __m512i* to) {
    const char* from = run + ScaledBytes<float16, 32>::kScales + half * 64;
    const __m512i sign = _mm512_set1_epi16(0x80), one = _mm512_set1_epi16(1);
    // By float16 with three more bits; its exponents are 112 less, 8 of them for the unit.
    const auto number = [=](__m512i bytes) {
      const __m512i half_number = (__m512i)_mm512_cvtepu16_ph(_mm512_add_epi16(bytes, one));
      return _mm512_add_epi16(_mm512_srli_epi16(half_number, 3), _mm512_set1_epi16((112 - 8) << 7));
    };
    for (int pair = 0; pair < 16; pair += 2, from += 4 * kPanel) {
      const __m512i words = _mm512_loadu_si512(from);
      constexpr int kXorAnd = 0x28;  // (words ^ sign) & mask
      to[pair] = number(_mm512_ternarylogic_epi32(words, sign, _mm512_set1_epi16(0xff), kXorAnd));
      to[pair + 1] = number(_mm512_xor_si512(_mm512_srli_epi16(words, 8), sign));
    }
  }
};

#endif

// totals[row][output of the panel], of 16 of its outputs. Not inline, and nothing else is done meanwhile: all registers
// hold totals.
template <class Runs>
__attribute__((noinline)) void multiply_half(Tiles& tiles, RunRows& rows, const char* panel, int half, float* totals) {
  // Loads and stores of tiles wait until earlier stores have left the processor's store queue.
  constexpr int64_t kRunsAhead = 2, kRunsBehind = 2, kRing = RunRows::kRing;
  const int64_t num_runs = rows.num_runs;
  // The next panel is prefetched evenly: half of it per call, a part with each run.
  constexpr int64_t kShare = (Runs::kBytes + 127) / 128;  // lines
  const char* next = panel + num_runs * Runs::kBytes + half * num_runs * kShare * 64;
  alignas(64) __m512i numbers[kRing][16];
  __m512 total[kTileRows];
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) total[i] = _mm512_setzero_ps();
  for (int64_t run = 0; run < std::min(kRunsAhead, num_runs); ++run)
    WholeNumbers<Runs>::convert(panel + run * Runs::kBytes, half, numbers[run]);
  for (int64_t run = 0; run < num_runs + kRunsBehind; ++run) {
    if (run < num_runs) {
      for (int line = 0; line < kShare; ++line, next += 64) __builtin_prefetch(next, 0, 2);
      tiles.begin_run(rows.num_rows, rows.of_run(run), rows.tiles.next_row, numbers[run % kRing]);
      if (const int64_t ahead = run + kRunsAhead; ahead < num_runs)
        WholeNumbers<Runs>::convert(panel + ahead * Runs::kBytes, half, numbers[ahead % kRing]);
    }
    if (const int64_t last = run - kRunsBehind; last >= 0) {
      const char* at = panel + last * Runs::kBytes;
      const Floats scale = Runs::scale(panel, at, half);
      Floats minimum = scale * -WholeNumbers<Runs>::kExcess;
      if constexpr (Runs::kHasMinima) minimum += Runs::minimum(at, half);
      minimum *= kRunUnit;
      const float *sums = rows.sums_of_tiles[last % kRing], *row_sums = rows.row_sums(last);
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        total[i] = _mm512_fmadd_ps(_mm512_load_ps(sums + i * kLanes), (__m512)scale, total[i]);
        total[i] = _mm512_fmadd_ps(_mm512_set1_ps(row_sums[i]), (__m512)minimum, total[i]);
      }
    }
    if (run < num_runs) tiles.end_run(rows.sums_of_tiles[run % kRing]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i)
    if (i < rows.num_rows) store(totals + i * kPanel + half * kLanes, (Floats)total[i] / kRunUnit);
}

inline bool takes_runs(int64_t kind) {
  bool takes = false;
  if (kTilesAreThere && kind != kPlain)
    with_runs(kind, [&](auto runs) { takes = WholeNumbers<decltype(runs)>::kAreThere; });
  return takes;
}

// totals[row][output of the panel] of a kind that takes_runs().
inline void multiply_runs(int64_t kind, Tiles& tiles, RunRows& rows, const char* panel, float* totals) {
  with_runs(kind, [&](auto runs) {
    using Runs = decltype(runs);
    if constexpr (WholeNumbers<Runs>::kAreThere)
      for (int half = 0; half < 2; ++half) multiply_half<Runs>(tiles, rows, panel, half, totals);
  });
}

#else

struct RunRows {
  void fill(const TileRows&, int, int64_t) {}
};

inline bool takes_runs(int64_t) { return false; }

inline void multiply_runs(int64_t, Tiles&, RunRows&, const char*, float*) {}

#endif

// Owned by the calling thread, kept for its next product.
inline RunRows& own_run_rows() {
  static thread_local RunRows own;
  return own;
}

}  // namespace
