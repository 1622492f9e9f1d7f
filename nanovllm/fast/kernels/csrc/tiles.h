// Products in the matrix tiles (AMX) of Intel's Xeons since Sapphire Rapids: 16 rows times 16 outputs in one
// instruction, 32 deep in bfloat16, 64 in bytes. A packed panel is read in place: 16 of its steps, 128 bytes each, are
// two adjacent tiles.
//
// The order in which a row's products are added depends on neither the other rows nor their number.
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__linux__)
#define BF16_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;
constexpr int kTileSteps = kTileDepth / 2;

// Address of 16 rows of 32 elements, and strides in bytes to the next row, the next 32 elements and the next 16 rows.
struct TileRows {
  const void* at;
  int64_t next_row, next_depth, next_tile;
};

#ifdef BF16_TILES

// Linux gives the tiles' registers to a process that asks, once, for all of its threads.
inline bool ask_for_tiles() {
  constexpr int kArchRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchRequestPermission, kTileData) == 0;
}

const bool kTilesAreThere = ask_for_tiles();

// The calling thread's tiles during this object's life: 0 to 3 sums, 4 and 5 rows, 6 and 7 halves of a panel.
class Tiles {
 public:
  ~Tiles() { release(); }

  // Frees the processor's tiles until the next product.
  void release() {
    if (rows_ != 0) _tile_release();
    rows_ = 0;
  }

  // sums[row][output of the panel] of up to 32 rows; num_steps is a multiple of kTileSteps. `meanwhile` is called for
  // each 32 of the depth, and overlaps with the products. It may write the panel's next 32. kMask: of offsets in bytes
  // from the panel on.
  template <int64_t kMask = -1, class Meanwhile>
  void multiply(int num_rows, const TileRows& rows, const void* panel, int64_t num_steps, float* sums,
                const Meanwhile& meanwhile) {
    constexpr int64_t kPanelStride = 128;
    if (num_rows != rows_) configure(num_rows, num_rows - kTileRows, num_rows);
    const char* first = (const char*)rows.at;
    const char* second = first + rows.next_tile;
    const char* at = (const char*)panel;
    const bool has_second = num_rows > kTileRows;
    asm volatile("" ::: "memory");  // the compiler does not know that loads of tiles read memory
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < num_steps; step += kTileSteps) {
      _tile_loadd(6, at, kPanelStride);
      _tile_loadd(7, at + 64, kPanelStride);
      // Iterates over rows, so that the panel stays in the L1 cache.
      _tile_stream_loadd(4, first, rows.next_row);
      if (has_second) _tile_stream_loadd(5, second, rows.next_row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (has_second) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      at += kTileSteps * kPanelStride, first += rows.next_depth, second += rows.next_depth;
      if constexpr (kMask != -1) at = (const char*)panel + (at - (const char*)panel & kMask);
      meanwhile();
      asm volatile("" ::: "memory");
    }
    constexpr int kSumsStride = 128;
    _tile_stored(0, sums, kSumsStride);
    _tile_stored(1, sums + 16, kSumsStride);
    if (has_second) {
      sums += kTileRows * 32;
      _tile_stored(2, sums, kSumsStride);
      _tile_stored(3, sums + 16, kSumsStride);
    }
    asm volatile("" ::: "memory");
  }

  // Integer sums[plane][row][output of the panel] of up to 16 rows in two planes of bytes, with a panel of bytes
  // [depth / 4][32][4]. For each 64 of the depth, the planes of these rows are consecutive; sums of a plane have
  // room for 16 rows. `meanwhile` as above, for each 64 of the depth.
#ifdef __AMX_INT8__
  template <class Meanwhile>
  void multiply_planes(int num_rows, const int8_t* planes, const void* panel, int64_t depth, float* sums,
                       const Meanwhile& meanwhile) {
    constexpr int64_t kPanelStride = 128, kByteDepth = 64;
    if (kPlanes + num_rows != rows_) configure(num_rows, num_rows, kPlanes + num_rows);
    const char* at = (const char*)panel;
    const int64_t plane = num_rows * kByteDepth;
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += kByteDepth) {
      _tile_loadd(6, at, kPanelStride);
      _tile_loadd(7, at + 64, kPanelStride);
      _tile_stream_loadd(4, planes, kByteDepth);
      _tile_stream_loadd(5, planes + plane, kByteDepth);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
      at += kTileSteps * kPanelStride, planes += 2 * plane;
      meanwhile();
    }
    constexpr int kSumsStride = 128;
    _tile_stored(0, sums, kSumsStride);
    _tile_stored(1, sums + 16, kSumsStride);
    sums += kTileRows * 32;
    _tile_stored(2, sums, kSumsStride);
    _tile_stored(3, sums + 16, kSumsStride);
    asm volatile("" ::: "memory");
  }
#else
  template <class Meanwhile>
  void multiply_planes(int, const int8_t*, const void*, int64_t, float*, const Meanwhile&) {}
#endif

  // Up to 16 rows, which are `stride` bytes apart, 32 deep, times a packed tile of 16 outputs; end_run() stores the
  // sums[row][output].
  void begin_run(int num_rows, const void* rows, int64_t stride, const void* packed) {
    if (num_rows != rows_) configure(num_rows, num_rows - kTileRows, num_rows);
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_loadd(4, rows, stride);
    _tile_loadd(6, packed, 64);
    _tile_dpbf16ps(0, 4, 6);
  }

  void end_run(float* sums) {
    _tile_stored(0, sums, 64);
    asm volatile("" ::: "memory");
  }

  // sums[row][lane] of 16 * kTiles rows and 16 lanes: of `count` products, 32 deep, of the rows at rows_of(number),
  // which are `stride` bytes apart, with consecutive packed tiles.
  template <int kTiles, class RowsOf>
  void multiply_sum(int count, const RowsOf& rows_of, int64_t stride, const void* packed, float* sums) {
    static_assert(kTiles <= 2);
    begin_whole_tiles();
    _tile_zero(0);
    if constexpr (kTiles > 1) _tile_zero(1);
    for (int number = 0; number < count; ++number) {
      const char* rows = (const char*)rows_of(number);
      _tile_loadd(6, (const char*)packed + number * 1024, 64);
      _tile_loadd(4, rows, stride);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kTiles > 1) {
        _tile_loadd(5, rows + kTileRows * stride, stride);
        _tile_dpbf16ps(1, 5, 6);
      }
    }
    _tile_stored(0, sums, 64);
    if constexpr (kTiles > 1) _tile_stored(1, sums + 256, 64);
    asm volatile("" ::: "memory");
  }

  // sums[row][column] of 16 rows, 32 deep, and 16 * kTiles columns [16][column][2]. Rows of columns, and those of sums,
  // are `stride` bytes apart.
  template <int kTiles>
  void multiply_columns(const void* rows, const void* columns, int64_t stride, float* sums) {
    static_assert(kTiles == 2 || kTiles == 4);
    begin_whole_tiles();
    const char* at = (const char*)columns;
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, rows, 64);
    _tile_loadd(6, at, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, at + 64, stride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTiles > 2) {
      _tile_zero(2);
      _tile_zero(3);
      _tile_loadd(6, at + 128, stride);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, at + 192, stride);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + 16, stride);
    if constexpr (kTiles > 2) {
      _tile_stored(2, sums + 32, stride);
      _tile_stored(3, sums + 48, stride);
    }
    asm volatile("" ::: "memory");
  }

 private:
  struct Layout {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
  };

  void begin_whole_tiles() {
    if (rows_ != 2 * kTileRows) configure(kTileRows, kTileRows, 2 * kTileRows);
    asm volatile("" ::: "memory");
  }

  static constexpr int kPlanes = 100;  // in rows_, added to rows that have two planes

  // Sums 0 and 1 and tile 4 have so many rows, sums 2 and 3 and tile 5 as many as `second`: one to 16.
  void configure(int first, int second, int name) {
    alignas(64) Layout layout;
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_second = tile == 2 || tile == 3 || tile == 5;
      const int rows = tile >= 6 ? kTileRows : is_second ? second : first;
      layout.row_bytes[tile] = 64;
      layout.num_rows[tile] = (uint8_t)(rows < 1 ? 1 : rows > kTileRows ? kTileRows : rows);
    }
    // Some compilers assume that it reads only the first eight bytes, and might omit stores to the rest.
    asm volatile("" ::"r"(&layout) : "memory");
    _tile_loadconfig(&layout);
    rows_ = name;
  }

  int rows_ = 0;  // as configured
};

#else

constexpr bool kTilesAreThere = false;

struct Tiles {
  void release() {}
  template <int64_t kMask = -1, class Meanwhile>
  void multiply(int, const TileRows&, const void*, int64_t, float*, const Meanwhile&) {}
  template <class Meanwhile>
  void multiply_planes(int, const int8_t*, const void*, int64_t, float*, const Meanwhile&) {}
};

#endif

}  // namespace
