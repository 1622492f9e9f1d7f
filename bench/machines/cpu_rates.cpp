// What a processor reaches at best: multiply-adds from registers alone, and bytes read from memory in order.
//
// Compiled for the class of processors under measurement; one thread calls each function on its own data.

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
// Independent chains, enough to fill two units of latency 4 to 6; by name, since the compiler keeps an array in memory.
constexpr int kSums = 12;
#define EACH_SUM(f) f(s0) f(s1) f(s2) f(s3) f(s4) f(s5) f(s6) f(s7) f(s8) f(s9) f(s10) f(s11)
#define DECLARE(sum) Sum sum = {};
#define ADD_UP(sum) *result += sum[0];
using Floats = float __attribute__((vector_size(kBytes)));

// Keeps the compiler from seeing through a value.
template <class T>
inline void hide(T& value) {
#if defined(__x86_64__)
#ifdef __AVX512F__
  asm volatile("" : "+v"(value));
#else
  asm volatile("" : "+x"(value));
#endif
#else
  asm volatile("" : "+w"(value));
#endif
}

}  // namespace

// Operations (two for a multiply-add) of `rounds` rounds in float32.
extern "C" double multiply_floats(int64_t rounds, float* result) {
  using Sum = Floats;
  Floats a = Floats{} + 0.999f, b = Floats{} + 1e-3f;
  EACH_SUM(DECLARE)
#define MULTIPLY(sum) sum = sum * a + b, hide(sum);
  for (int64_t round = 0; round < rounds; ++round) {
    EACH_SUM(MULTIPLY)
  }
  *result = 0;
  EACH_SUM(ADD_UP)
  return (double)rounds * kSums * (kBytes / 4) * 2;
}

// The same of bfloat16 by the processor's instruction for it, tiles where there are some; 0 where there is none.
extern "C" double multiply_bfloat16(int64_t rounds, float* result) {
#if defined(__AMX_BF16__)
  constexpr int kArchRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kArchRequestPermission, kTileData) != 0) return 0;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};
  } layout;
  for (int tile = 0; tile < 8; ++tile) layout.row_bytes[tile] = 64, layout.num_rows[tile] = 16;
  asm volatile("" ::"r"(&layout) : "memory");
  _tile_loadconfig(&layout);
  alignas(64) uint16_t ones[512];
  for (auto& one : ones) one = 0x3f80;
  asm volatile("" ::"r"(ones) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, ones, 64);
  _tile_loadd(5, ones, 64);
  _tile_loadd(6, ones, 64);
  _tile_loadd(7, ones, 64);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float sums[256];
  _tile_stored(0, sums, 64);
  asm volatile("" ::"r"(sums) : "memory");
  *result = sums[0];
  _tile_release();
  return (double)rounds * 4 * 16 * 16 * 32 * 2;
#elif defined(__AVX512BF16__)
  using Sum = __m512;
  __m512i ones = _mm512_set1_epi32(0x3f803f80);
  EACH_SUM(DECLARE)
#define MULTIPLY_PAIRS(sum) sum = _mm512_dpbf16_ps(sum, (__m512bh)ones, (__m512bh)ones), hide(sum);
  for (int64_t round = 0; round < rounds; ++round) {
    EACH_SUM(MULTIPLY_PAIRS)
  }
  *result = 0;
  EACH_SUM(ADD_UP)
  return (double)rounds * kSums * 32 * 2;
#else
  *result = (float)rounds;
  return 0;
#endif
}

// Reads `size` bytes, a multiple of 1,024, in order; returns them.
extern "C" double read_bytes(const char* from, int64_t size, int64_t* result) {
  using Words = int64_t __attribute__((vector_size(kBytes)));
  Words sums[8] = {};
  for (int64_t at = 0; at < size; at += 8 * kBytes)
    for (int i = 0; i < 8; ++i) {
      Words values;
      std::memcpy(&values, from + at + i * kBytes, kBytes);
      sums[i] ^= values;
    }
  *result = 0;
  for (int i = 0; i < 8; ++i) *result ^= sums[i][0];
  return (double)size;
}
