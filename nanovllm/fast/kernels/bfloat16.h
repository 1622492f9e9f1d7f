// Numbers, and pairs of bfloat16 in a word, for the kernels whose sources follow this file.

typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ constexpr int at_least(int one, int other) { return one > other ? one : other; }
__device__ constexpr int at_most(int one, int other) { return one < other ? one : other; }
__device__ constexpr int up(int count, int by) { return (count + by - 1) / by; }

__device__ inline float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline float wide(bf16 value) { return __uint_as_float(u32(value) << 16); }
__device__ inline u32 narrow2(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ inline bf16 narrow(float value) { return bf16(narrow2(value, 0.f)); }
__device__ inline float rounded(float value) { return low(narrow2(value, 0.f)); }
