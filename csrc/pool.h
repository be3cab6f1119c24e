// A team of threads that walk through one pass together.
//
// Work between two barriers is cut into tiles that are taken from atomic counters, so a thread that the operating
// system takes off its processor costs one tile and not a share. Waiting is short spinning, then sleep: a sleeping
// thread leaves its processor to the very teammate that everybody waits for, where a spinning one would keep it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace forerun {

class Team {
  public:
    explicit Team(int num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int num_threads() const { return num_threads_; }

    // Run body(thread) on every thread, or on the caller alone, who is thread 0; returns when all are done. Calls from
    // several Python threads take turns.
    void run(bool alone, const std::function<void(int)>& body);

    // Inside a body, by every thread: tile(i) once for each i below `count`, then a barrier. Each thread begins with a
    // share of neighbouring tiles, because memory is read fastest in long runs (59 GB/s against 51 for tiles of 128 KB
    // dealt out in turn), and then helps the others with what is left of theirs.
    template <class Tile>
    void tiles(int thread, int count, Tile tile) {
        if (num_active_ == 1) {
            for (int i = 0; i < count; ++i) tile(i);
            return;
        }
        for (int k = 0; k < num_threads_; ++k) {
            const int whose = (thread + k) % num_threads_;
            const int first = share(count, whose), size = share(count, whose + 1) - first;
            std::atomic<int>& next = next_[static_cast<size_t>(whose)].value;
            for (int i = next.fetch_add(1, std::memory_order_relaxed); i < size;
                 i = next.fetch_add(1, std::memory_order_relaxed))
                tile(first + i);
        }
        barrier();
    }

  private:
    // An event counter that can be waited on: spins for some microseconds, then sleeps.
    class Signal {
      public:
        uint32_t now() const { return count_.load(std::memory_order_acquire); }
        void raise();
        void wait_beyond(uint32_t seen);

      private:
        std::atomic<uint32_t> count_{0};
        std::atomic<int> num_sleepers_{0};
        std::mutex mutex_;
        std::condition_variable wake_;
    };

    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };

    int share(int count, int thread) const {
        return static_cast<int>(static_cast<int64_t>(count) * thread / num_threads_);
    }
    void start();
    void reset();
    void work(int thread);
    void barrier();

    const int num_threads_;
    int num_active_ = 1;
    long owner_ = 0;  // process that has the threads: a fork takes none of them along
    std::mutex turn_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* body_ = nullptr;
    std::atomic<bool> ending_{false};
    alignas(64) Signal begin_;
    std::vector<Counter> next_;  // one for each thread's share
    alignas(64) std::atomic<int> num_arrived_{0};
    alignas(64) Signal passed_;
};

}  // namespace forerun
