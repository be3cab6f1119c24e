#include "pool.h"

#include <string>
#include <utility>

namespace forerun {

namespace {

constexpr int NUM_SPINS = 4000;  // about 40 us: longer than a tile, shorter than the scheduler's time slice

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#else
    std::this_thread::yield();
#endif
}

// Thrown in a thread's body where the body failed on another thread, or the pass is over without this one.
struct GivenUp {};

}  // namespace

void Signal::raise() {
    count_.fetch_add(1);
    if (num_sleepers_.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
}

void Signal::wait_beyond(uint64_t seen) {
    for (int i = 0; i < NUM_SPINS; ++i) {
        if (now() > seen) return;
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    num_sleepers_.fetch_add(1);  // before the count is read again, so that a later `raise` sees a sleeper
    wake_.wait(lock, [&] { return count_.load() > seen; });
    num_sleepers_.fetch_sub(1);
}

// ------------------------------------------------------------------------------------------------------ the threads

TeamThreads::TeamThreads(int num_threads)
    : num_threads_(num_threads), claimed_(static_cast<size_t>(num_threads)), phase_(static_cast<size_t>(num_threads)) {}

TeamThreads::~TeamThreads() { end(); }

void TeamThreads::start() {
    if (!threads_.empty()) return;
    const size_t wanted = static_cast<size_t>(num_threads_) - 1;
    try {
        threads_.reserve(wanted);
        while (threads_.size() < wanted) {
            const int thread = static_cast<int>(threads_.size()) + 1;
            threads_.emplace_back([this, thread, seen = begin_.now()]() mutable {
                for (;;) {
                    begin_.wait_beyond(seen);
                    seen = begin_.now();
                    if (ending_) return;
                    if (!enter()) continue;
                    work(thread);
                    leave();
                }
            });
        }
    } catch (const std::exception& error) {
        const std::string num_started = std::to_string(threads_.size() + 1);  // the caller is one of them
        end();
        throw NoThreads("only " + num_started + " of " + std::to_string(num_threads_) +
                        " threads for the native kernels could be started (" + error.what() +
                        "): set FORERUN_NUM_THREADS to " + num_started + " or less");
    }
}

void TeamThreads::end() {
    ending_ = true;
    begin_.raise();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    ending_ = false;
}

// ----------------------------------------------------------------------------------------------------------- a pass

void TeamThreads::run(bool alone, const std::function<void(int)>& body) {
    std::lock_guard<std::mutex> lock(turn_);
    alone_ = alone || num_threads_ == 1;
    if (alone_) return body(0);
    start();
    body_ = &body;
    failed_ = over_ = false;
    first_phase_ = passed_.now();
    num_done_ = 0;
    inside_ = OPEN;
    begin_.raise();
    work(0);
    over_ = true;
    const uint64_t seen = left_.now();
    if (inside_.fetch_and(~OPEN) != OPEN) left_.wait_beyond(seen);
    if (failed_) std::rethrow_exception(std::exchange(error_, nullptr));
}

// A thread that comes when the pass is closed waits for the next one, because the body must not be used any more.
bool TeamThreads::enter() {
    uint32_t found = inside_.load();
    while (found & OPEN)
        if (inside_.compare_exchange_weak(found, found + 1)) return true;
    return false;
}

void TeamThreads::leave() {
    if (inside_.fetch_sub(1) == 1) left_.raise();  // the last, of a closed pass
}

void TeamThreads::work(int thread) {
    phase_[static_cast<size_t>(thread)].value = first_phase_;
    try {
        (*body_)(thread);
    } catch (const GivenUp&) {
    } catch (...) {
        fail(std::current_exception());
    }
}

void TeamThreads::fail(std::exception_ptr error) {
    {
        std::lock_guard<std::mutex> lock(error_mutex_);
        if (!failed_.exchange(true)) error_ = std::move(error);
    }
    over_ = true;
    passed_.raise();  // those that wait for the phase find the pass over
}

uint64_t TeamThreads::next_phase(int thread) {
    if (over_.load(std::memory_order_acquire)) throw GivenUp();
    return phase_[static_cast<size_t>(thread)].value.fetch_add(1, std::memory_order_relaxed);
}

// The phase cannot be over while a thread has a tile, so those who add to `num_done_` are all in the same one.
void TeamThreads::finish(uint64_t phase, int num_done, int num_tiles) {
    if (num_done > 0 && num_done_.fetch_add(num_done) + num_done == num_tiles) {
        num_done_ = 0;
        passed_.raise();
        return;
    }
    passed_.wait_beyond(phase);
    if (over_.load(std::memory_order_acquire)) throw GivenUp();
}

}  // namespace forerun
