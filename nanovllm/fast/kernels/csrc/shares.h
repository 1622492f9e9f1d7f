// Tasks of a parallel loop, in a share for each thread. A thread does its own from front to back, since neighbours read
// neighbouring memory, then takes tasks from the ends of others' shares. So a thread that is delayed, as by another
// process on its core, holds the others for one task at most.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "barrier.h"

namespace {

class Shares;

// One loop of a parallel region; each thread has its own copy. Its tasks are done once all threads have waited.
class SharedLoop {
 public:
  SharedLoop(Shares* shares, uint32_t number) : shares_(shares), number_(number) {}

  int num_threads() const;

  // Calls task(number) for each number below num_tasks that this thread gets; all threads pass the same num_tasks.
  template <class Task>
  void run(int64_t num_tasks, const Task& task) const;

  void wait() const;

 private:
  int64_t next(int owner, bool is_own, int64_t size) const;

  Shares* shares_;
  uint32_t number_;
};

// Kept by the thread that opens parallel regions, used by all threads of a region.
class Shares {
 public:
  // Begins a region with at most `num_loops` loops. Outside of it.
  void begin(int num_threads, int num_loops) {
    if (num_threads > num_slots_) slots_.reset(new Slot[num_slots_ = num_threads]());
    num_threads_ = num_threads;
    first_ = next_, next_ += num_loops;
  }

  SharedLoop loop(int number) { return {this, first_ + number}; }

  // Until all threads of the region have come here.
  void wait() { barrier_.wait((uint32_t)omp_get_num_threads()); }

 private:
  friend class SharedLoop;

  // The loop that its counts belong to (32 bits), tasks taken from the front and from the end (16 bits each). Counts of
  // an earlier loop are zero: nobody has to reset them, so a share can be taken whose owner has not come yet.
  struct alignas(64) Slot {
    std::atomic<uint64_t> taken{0};
  };

  std::unique_ptr<Slot[]> slots_;
  int num_slots_ = 0, num_threads_ = 1;
  uint32_t first_ = 1, next_ = 1;
  Barrier barrier_;
};

inline int SharedLoop::num_threads() const { return shares_->num_threads_; }

inline void SharedLoop::wait() const { shares_->wait(); }

// Next task of a share of `size` tasks, from its beginning; -1 if all are taken.
inline int64_t SharedLoop::next(int owner, bool is_own, int64_t size) const {
  std::atomic<uint64_t>& taken = shares_->slots_[owner].taken;
  uint64_t found = taken.load(std::memory_order_relaxed);
  while (true) {
    const uint64_t now = found >> 32 == number_ ? found : (uint64_t)number_ << 32;
    const int64_t front = now >> 16 & 0xffff, back = now & 0xffff;
    if (front + back >= size) return -1;
    if (taken.compare_exchange_weak(found, now + (is_own ? 1 << 16 : 1), std::memory_order_relaxed))
      return is_own ? front : size - 1 - back;
  }
}

template <class Task>
void SharedLoop::run(int64_t num_tasks, const Task& task) const {
  const int64_t count = num_threads(), thread = omp_get_thread_num();
  const int64_t together = num_tasks / (count * 0xffff) + 1;  // of neighbouring tasks, so that 16 bits count a share
  const int64_t units = (num_tasks + together - 1) / together;
  for (int64_t distance = 0; distance < count; ++distance) {
    const int64_t owner = (thread + distance) % count;
    const int64_t begin = units * owner / count, size = units * (owner + 1) / count - begin;
    for (int64_t unit; (unit = next((int)owner, distance == 0, size)) >= 0;)
      for (int64_t at = (begin + unit) * together; at < std::min(num_tasks, (begin + unit + 1) * together); ++at)
        task(at);
  }
}

inline Shares& own_shares() {
  static thread_local Shares own;
  return own;
}

}  // namespace
