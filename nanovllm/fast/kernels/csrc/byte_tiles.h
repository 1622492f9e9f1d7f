// Products with panels of bytes (kBytes) in integer matrix tiles (AMX-INT8), which multiply twice as many bytes as
// bfloat16 elements: a panel is read once, half the size of a bfloat16 one, and not widened.
//
// A row is split into two planes of bytes, as in few_rows.h, which cost as much as one bfloat16 row. Sums of each plane
// are exact integers over the whole depth. So a row's result has the same bits among few and many rows, if the depth is
// supported.
#pragma once

#include "few_rows.h"
#include "tiles.h"

namespace {

static_assert(kRowsOfSums == kTileRows);
constexpr int64_t kPlaneDepth = 64;  // of a tile of bytes

// Memory for rows in planes; owned by the calling thread, read by all threads of its parallel regions.
class PlaneMemory {
 public:
  void reserve(int64_t num_rows, int64_t depth) {
    const int64_t rows = (num_rows + kTileRows - 1) / kTileRows * kTileRows;
    if (rows > num_scales_) scales_.reset(new float[rows]), num_scales_ = rows;
    if (rows * depth > size_) bytes_.reset(new Line[rows * depth * 2 / 64]), size_ = rows * depth;
  }

  int8_t* bytes() const { return bytes_[0].at; }
  float* scales() const { return scales_.get(); }

 private:
  struct alignas(64) Line {
    int8_t at[64];
  };
  std::unique_ptr<Line[]> bytes_;
  std::unique_ptr<float[]> scales_;
  int64_t num_scales_ = 0, size_ = 0;
};

#if defined(BF16_TILES) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

inline bool takes_planes(int64_t depth) {
  return kFewRows > 0 && kTilesAreThere && depth % kPlaneDepth == 0 && depth <= kDeepestBytes;
}

// Thirty-two neighbours as integers of 15 bits.
inline __m512i fifteen_bits(__m512i elements, __m512 inverse) {
  const __m512 magic = _mm512_set1_ps(kRounding);
  const __m512 even = (__m512)_mm512_slli_epi32(elements, 16);
  const __m512 odd = (__m512)_mm512_and_si512(elements, _mm512_set1_epi32((int)0xffff0000u));
  const __m512i low = (__m512i)_mm512_fmadd_ps(even, inverse, magic);
  const __m512i high = (__m512i)_mm512_fmadd_ps(odd, inverse, magic);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_slli_epi32(high, 16));
}

// Splits a bfloat16 row in the order of panels: 64 elements of the high plane, then of the low one, `plane` bytes
// apart.
inline void split_row(const void* from, int64_t depth, int8_t* to, int64_t plane, float& scale) {
  const char* row = (const char*)from;
  __m512i most = _mm512_setzero_si512();
  for (int64_t k = 0; k < depth; k += 32)
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(row + 2 * k), _mm512_set1_epi16(0x7fff)));
  most = _mm512_max_epu32(_mm512_slli_epi32(most, 16), _mm512_and_si512(most, _mm512_set1_epi32((int)0xffff0000u)));
  const uint32_t bits = _mm512_reduce_max_epu32(most);
  float largest_of_row;
  std::memcpy(&largest_of_row, &bits, sizeof(bits));
  const RowScale of_row(largest_of_row);
  scale = of_row.scale;
  const __m512 inverse = _mm512_set1_ps(of_row.inverse);
  alignas(64) static constexpr auto kEven = [] {
    struct { uint8_t at[64]; } table = {};
    for (int i = 0; i < 64; ++i) table.at[i] = (uint8_t)(2 * (i / 4 * 4 + place_of_four(i % 4)));
    return table;
  }();
  const __m512i even = _mm512_load_si512(kEven.at), odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
  for (int64_t k = 0; k < depth; k += kPlaneDepth, to += 2 * plane) {
    const __m512i first = fifteen_bits(_mm512_loadu_si512(row + 2 * k), inverse);
    const __m512i second = fifteen_bits(_mm512_loadu_si512(row + 2 * k + 64), inverse);
    const __m512i lows = _mm512_permutex2var_epi8(first, even, second);
    _mm512_store_si512(to + plane, _mm512_and_si512(lows, _mm512_set1_epi8(127)));
    _mm512_store_si512(to, _mm512_permutex2var_epi8(_mm512_slli_epi16(first, 1), odd, _mm512_slli_epi16(second, 1)));
  }
}

#else

inline bool takes_planes(int64_t) { return false; }
inline void split_row(const void*, int64_t, int8_t*, int64_t, float&) {}

#endif

// Rows [num_rows, depth] in tiles with equal numbers of rows, so that one tile configuration serves all: for each 64 of
// the depth the high plane, then the low one. The last tile may contain unused rows.
struct PlaneRows {
  const PlaneMemory* memory;
  int64_t num_rows, depth;

  int64_t rows_of_tile() const {
    const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    return (num_rows + num_tiles - 1) / num_tiles;
  }

  // `row` is a multiple of rows_of_tile().
  int8_t* tile(int64_t row) const { return memory->bytes() + row * depth * 2; }

  // Divides the rows among the threads of the enclosing parallel region, without a barrier at the end.
  void fill(const Element* rows) const {
    const int64_t of_tile = rows_of_tile(), plane = of_tile * kPlaneDepth;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < num_rows; ++row)
      split_row(rows + row * depth, depth, tile(row / of_tile * of_tile) + row % of_tile * kPlaneDepth, plane,
                memory->scales()[row]);
  }
};

}  // namespace
