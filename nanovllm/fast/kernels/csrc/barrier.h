// A barrier of the threads of a parallel region. Threads that wait spin, since the others are there in microseconds; if
// one does not come in half a millisecond, it has probably lost its core to another process. For a while then, threads
// that wait sleep soon, so that it can run on their cores.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

class Barrier {
 public:
  // All num_threads threads of the region call it.
  void wait(uint32_t num_threads) {
    if (num_threads <= 1) return;
    const uint32_t turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1);
      if (num_asleep_.load() > 0) wake();
    } else if (!spin(turn)) {
      ++num_asleep_;
      while (turn_.load() == turn) sleep(turn);
      --num_asleep_;
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t kQuietSpin = 500'000, kCrowdedSpin = 10'000, kCrowdedFor = 200'000'000;  // ns
  static constexpr int kPauses = 32;  // between two looks at the clock

  static int64_t now() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // False if the turn did not end in time.
  bool spin(uint32_t turn) {
    int64_t end = 0;
    while (true) {
      for (int i = 0; i < kPauses; ++i, pause())
        if (turn_.load(std::memory_order_acquire) != turn) return true;
      const int64_t time = now();
      const bool is_crowded = time < crowded_until_.load(std::memory_order_relaxed);
      if (end == 0) end = time + (is_crowded ? kCrowdedSpin : kQuietSpin);
      if (time < end) continue;
      if (!is_crowded) crowded_until_.store(time + kCrowdedFor, std::memory_order_relaxed);
      return false;
    }
  }

#ifdef __linux__
  void sleep(uint32_t turn) { syscall(SYS_futex, &turn_, FUTEX_WAIT_PRIVATE, turn, nullptr); }
  void wake() { syscall(SYS_futex, &turn_, FUTEX_WAKE_PRIVATE, INT32_MAX); }
#else
  void sleep(uint32_t) { std::this_thread::yield(); }
  void wake() {}
#endif

  alignas(64) std::atomic<uint32_t> turn_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<int32_t> num_asleep_{0};
  std::atomic<int64_t> crowded_until_{0};
};

}  // namespace
