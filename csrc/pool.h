// A team of threads that compute one pass together.
//
// The work between two barriers is cut into tiles, and threads take tiles from atomic counters: when the operating
// system suspends a thread, only its current tile waits, not a whole share of the work. A waiting thread spins briefly
// and then sleeps: a sleeping thread leaves its processor to the thread that all others wait for, where a spinning one
// would keep it. The threads start with the first pass that needs them; a forked child starts its own (process.h).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "process.h"

namespace forerun {

// The system has started fewer threads than a team needs.
struct NoThreads : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A counter on which threads wait until it is raised. They spin for some microseconds, then sleep.
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

// The threads of one team in one process, with the state that they share.
class TeamThreads {
  public:
    explicit TeamThreads(int num_threads);
    ~TeamThreads();

    void run(bool alone, const std::function<void(int)>& body);
    bool is_alone() const { return alone_; }
    // The counter of the tiles in a thread's share.
    std::atomic<int>& next(int thread) { return next_[static_cast<size_t>(thread)].value; }
    // Waits for all other threads; leaves the body, by an exception, where one of them failed.
    void meet();

  private:
    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };

    void start();
    void end();
    void reset();
    void work(int thread);
    bool barrier();
    void fail(std::exception_ptr error);

    const int num_threads_;
    bool alone_ = true;  // whether the current pass runs on the calling thread alone
    bool given_up_ = false;  // whether a thread had failed when the last barrier was passed
    std::atomic<bool> ending_{false}, failed_{false};
    std::mutex turn_, error_mutex_;
    std::exception_ptr error_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) Signal begin_;
    std::vector<Counter> next_;
    alignas(64) std::atomic<int> num_arrived_{0};
    alignas(64) Signal passed_;
};

class Team {
  public:
    explicit Team(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {}

    int num_threads() const { return num_threads_; }

    // Runs body(thread) on every thread, or on the calling thread alone, which is thread 0; returns when all are done.
    // Calls from several Python threads take turns. An exception of a body ends the pass on all threads and is thrown
    // again here. Throws NoThreads where the threads cannot be started.
    void run(bool alone, const std::function<void(int)>& body) { threads_.get(num_threads_).run(alone, body); }

    // To be called by every thread inside a body: runs tile(i) once for each i below `count`, then waits at a barrier.
    // Each thread begins with a share of neighbouring tiles, because memory is read fastest in long runs (59 GB/s; 51
    // for tiles of 128 KB dealt out in turn), and then takes tiles that are left of the other shares.
    template <class Tile>
    void tiles(int thread, int count, Tile tile) {
        TeamThreads& threads = threads_.get(num_threads_);
        if (threads.is_alone()) {
            for (int i = 0; i < count; ++i) tile(i);
            return;
        }
        for (int k = 0; k < num_threads_; ++k) {
            const int whose = (thread + k) % num_threads_;
            const int first = share(count, whose), size = share(count, whose + 1) - first;
            std::atomic<int>& next = threads.next(whose);
            for (int i = next.fetch_add(1, std::memory_order_relaxed); i < size;
                 i = next.fetch_add(1, std::memory_order_relaxed))
                tile(first + i);
        }
        threads.meet();
    }

  private:
    int share(int count, int thread) const {
        return static_cast<int>(static_cast<int64_t>(count) * thread / num_threads_);
    }

    const int num_threads_;
    PerProcess<TeamThreads> threads_;
};

}  // namespace forerun
