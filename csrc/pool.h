// A team of threads that walk through one pass together.
//
// Work between two barriers is cut into tiles that are taken from atomic counters, so a thread that the operating
// system takes off its processor costs one tile and not a share. Waiting is short spinning, then sleep: a sleeping
// thread leaves its processor to the very teammate that everybody waits for, where a spinning one would keep it.
// The threads start with the first pass that wants them; a forked child starts its own (process.h).
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

// The system gives fewer threads than a team has.
struct NoThreads : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Can be waited on until it is raised: spins for some microseconds, then sleeps.
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

// The threads of one team in one process, and all that they share.
class Crew {
  public:
    explicit Crew(int num_threads);
    ~Crew();

    void run(bool alone, const std::function<void(int)>& body);
    bool is_alone() const { return alone_; }
    // The counter of a thread's share.
    std::atomic<int>& next(int thread) { return next_[static_cast<size_t>(thread)].value; }
    // Waits for all others; leaves the body where one of them could not go on.
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
    bool alone_ = true;  // the pass that runs now
    bool given_up_ = false;  // whether somebody had failed when the last barrier was passed
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

    // Run body(thread) on every thread, or on the caller alone, who is thread 0; returns when all are done. Calls from
    // several Python threads take turns. What a body throws ends the pass for all and is thrown again here; throws
    // NoThreads where they cannot be started.
    void run(bool alone, const std::function<void(int)>& body) { crew_.get(num_threads_).run(alone, body); }

    // Inside a body, by every thread: tile(i) once for each i below `count`, then a barrier. Each thread begins with a
    // share of neighbouring tiles, because memory is read fastest in long runs (59 GB/s against 51 for tiles of 128 KB
    // dealt out in turn), and then helps the others with what is left of theirs.
    template <class Tile>
    void tiles(int thread, int count, Tile tile) {
        Crew& crew = crew_.get(num_threads_);
        if (crew.is_alone()) {
            for (int i = 0; i < count; ++i) tile(i);
            return;
        }
        for (int k = 0; k < num_threads_; ++k) {
            const int whose = (thread + k) % num_threads_;
            const int first = share(count, whose), size = share(count, whose + 1) - first;
            std::atomic<int>& next = crew.next(whose);
            for (int i = next.fetch_add(1, std::memory_order_relaxed); i < size;
                 i = next.fetch_add(1, std::memory_order_relaxed))
                tile(first + i);
        }
        crew.meet();
    }

  private:
    int share(int count, int thread) const {
        return static_cast<int>(static_cast<int64_t>(count) * thread / num_threads_);
    }

    const int num_threads_;
    PerProcess<Crew> crew_;
};

}  // namespace forerun
