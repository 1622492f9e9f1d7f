// Products of bfloat16 in the matrix tiles (AMX) of Intel's Xeons since Sapphire Rapids: 16 rows times 16 outputs, 32
// deep, in one instruction. A packed panel is read as it is: 16 of its steps, 128 bytes each, are two tiles side by side.
//
// The order in which a row's products are added depends on neither the other rows nor their number.
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;
constexpr int kTileSteps = kTileDepth / 2;

#if defined(__AMX_BF16__) && defined(__linux__)

// Linux gives the tiles' registers to a process that asks, once, for all of its threads.
inline bool ask_for_tiles() {
  constexpr int kArchRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchRequestPermission, kTileData) == 0;
}

const bool kTilesAreThere = ask_for_tiles();

// The calling thread's tiles as long as this lives: sums 0 to 3, rows 4 and 5, halves of a panel 6 and 7.
class Tiles {
 public:
  ~Tiles() {
    if (rows_ != 0) _tile_release();
  }

  // sums[row][output of the panel] of up to 32 rows, which lie `row_stride` elements apart; num_steps is a multiple of
  // kTileSteps. Meanwhile `next_panel` is fetched, unless it is null.
  void multiply(int num_rows, const void* rows, int64_t row_stride, const void* panel, int64_t num_steps,
                const void* next_panel, float* sums) {
    constexpr int64_t kPanelStride = 128, kTileBytes = kTileSteps * kPanelStride;
    if (num_rows != rows_) configure(num_rows);
    const char* first = (const char*)rows;
    const char* second = first + kTileRows * 2 * row_stride;
    const char* at = (const char*)panel;
    const bool has_second = num_rows > kTileRows;
    asm volatile("" ::: "memory");  // the compiler does not know that loads of tiles read memory
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < num_steps; step += kTileSteps, at += kTileBytes) {
      if (next_panel != nullptr)
        for (int64_t line = 0; line < kTileBytes; line += 64)
          __builtin_prefetch((const char*)next_panel + step * kPanelStride + line, 0, 2);
      _tile_loadd(4, first + step * 4, 2 * row_stride);
      _tile_loadd(6, at, kPanelStride);
      _tile_loadd(7, at + 64, kPanelStride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (has_second) {
        _tile_loadd(5, second + step * 4, 2 * row_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    constexpr int kSumsStride = 128;
    _tile_stored(0, sums, kSumsStride);
    _tile_stored(1, sums + 16, kSumsStride);
    if (!has_second) return;
    sums += kTileRows * 32;
    _tile_stored(2, sums, kSumsStride);
    _tile_stored(3, sums + 16, kSumsStride);
  }

 private:
  struct Layout {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
  };

  void configure(int num_rows) {
    alignas(64) Layout layout;
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_second = tile == 2 || tile == 3 || tile == 5;
      const int rows = tile >= 6 ? kTileRows : is_second ? num_rows - kTileRows : num_rows;
      layout.row_bytes[tile] = 64;
      layout.num_rows[tile] = (uint8_t)(rows < 1 ? 1 : rows > kTileRows ? kTileRows : rows);
    }
    // Some compilers think that it reads the first eight bytes alone, and might leave out the rest.
    asm volatile("" ::"r"(&layout) : "memory");
    _tile_loadconfig(&layout);
    rows_ = num_rows;
  }

  int rows_ = 0;  // as configured
};

#else

constexpr bool kTilesAreThere = false;

struct Tiles {
  void multiply(int, const void*, int64_t, const void*, int64_t, const void*, float*) {}
};

#endif

}  // namespace
