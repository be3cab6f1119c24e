// A team of threads that compute one pass together.
//
// A pass is a row of phases. The work of a phase is cut into tiles, which threads take from atomic counters, and the
// phase is over when its tiles are done, not when all threads have come: when the operating system suspends a thread,
// only its current tile waits, and a thread that is suspended between tiles, or wakes late, holds nothing up. A waiting
// thread spins briefly and then sleeps: a sleeping thread leaves its processor to the thread that all others wait for,
// where a spinning one would keep it. The threads start with the first pass that needs them; a forked child starts its
// own (process.h).
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

// A counter on which threads wait until it is larger. They spin for some microseconds, then sleep.
class Signal {
  public:
    uint64_t now() const { return count_.load(std::memory_order_acquire); }
    void raise();
    void wait_beyond(uint64_t seen);

  private:
    std::atomic<uint64_t> count_{0};
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
    // The phase that a thread comes to; phases are counted over all passes. Leaves the body, by an exception, where the
    // pass has failed on another thread, or is over.
    uint64_t next_phase(int thread);
    // Takes a tile of a share of `size` tiles; -1 where all are taken.
    int claim(uint64_t phase, int share, int size) {
        std::atomic<uint64_t>& counter = claimed_[static_cast<size_t>(share)].value;
        const uint64_t none = phase << TILE_BITS;  // a counter with less than this was last used in an earlier phase
        for (uint64_t found = counter.load(std::memory_order_relaxed);;) {
            const int64_t ahead = static_cast<int64_t>(found - none), taken = ahead < 0 ? 0 : ahead;
            if (taken >= size) return -1;
            if (counter.compare_exchange_weak(found, none + static_cast<uint64_t>(taken) + 1,
                                              std::memory_order_relaxed))
                return static_cast<int>(taken);
        }
    }
    // Says that a thread has done so many of the phase's tiles, and waits until all are done.
    void finish(uint64_t phase, int num_done, int num_tiles);

    static constexpr int TILE_BITS = 24;

  private:
    struct alignas(64) Counter {
        std::atomic<uint64_t> value{0};
    };
    static constexpr uint32_t OPEN = 1u << 31;

    void start();
    void end();
    void work(int thread);
    bool enter();
    void leave();
    void fail(std::exception_ptr error);

    const int num_threads_;
    bool alone_ = true;         // whether the current pass runs on the calling thread alone
    uint64_t first_phase_ = 0;  // of the current pass
    std::atomic<bool> ending_{false}, failed_{false};
    std::atomic<bool> over_{false};  // no tile is left, or the pass has failed
    std::mutex turn_, error_mutex_;
    std::exception_ptr error_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) Signal begin_;
    std::vector<Counter> claimed_;  // phase and tiles taken, for each thread's share
    std::vector<Counter> phase_;    // that each thread comes to next; only it reads and writes its own
    alignas(64) std::atomic<int> num_done_{0};
    alignas(64) Signal passed_;                    // phases that are over
    alignas(64) std::atomic<uint32_t> inside_{0};  // started threads inside of the body, and OPEN while they may enter
    Signal left_;                                  // raised by the last thread that leaves after the pass was closed
};

class Team {
  public:
    explicit Team(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {}

    int num_threads() const { return num_threads_; }

    // Runs body(thread) on the calling thread, which is thread 0, and unless `alone` on all others that come in time;
    // returns when the calling thread is done and no other is inside. What a thread does outside of tiles must not
    // matter to others, and it must not read there what the tiles of a later phase write, because that phase may be
    // over already. Calls from several Python threads take turns. An exception of a body ends the pass on all threads
    // and is thrown again here. Throws NoThreads where the threads cannot be started.
    void run(bool alone, const std::function<void(int)>& body) { threads_.get(num_threads_).run(alone, body); }

    // A phase, to be called by every thread inside a body: tile(i) runs once for each i below `count`, and all of them
    // are done when this returns. Each thread begins with a share of neighbouring tiles, because memory is read fastest
    // in long runs (59 GB/s; 51 for tiles of 128 KB dealt out in turn), and then takes tiles that are left of the other
    // shares.
    template <class Tile>
    void tiles(int thread, int count, Tile tile) {
        TeamThreads& threads = threads_.get(num_threads_);
        if (threads.is_alone()) {
            for (int i = 0; i < count; ++i) tile(i);
            return;
        }
        if (count == 0) return;
        if (count >> TeamThreads::TILE_BITS) throw std::length_error("too many tiles");
        const uint64_t phase = threads.next_phase(thread);
        int num_done = 0;
        for (int k = 0; k < num_threads_; ++k) {
            const int whose = (thread + k) % num_threads_;
            const int first = share(count, whose), size = share(count, whose + 1) - first;
            for (int i = threads.claim(phase, whose, size); i >= 0; i = threads.claim(phase, whose, size)) {
                tile(first + i);
                ++num_done;
            }
        }
        threads.finish(phase, num_done, count);
    }

  private:
    int share(int count, int thread) const {
        return static_cast<int>(static_cast<int64_t>(count) * thread / num_threads_);
    }

    const int num_threads_;
    PerProcess<TeamThreads> threads_;
};

}  // namespace forerun
