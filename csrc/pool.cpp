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

// Thrown in a thread's body where the body failed on another thread.
struct GivenUp {};

}  // namespace

void Signal::raise() {
    count_.fetch_add(1);
    if (num_sleepers_.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
}

void Signal::wait_beyond(uint32_t seen) {
    for (int i = 0; i < NUM_SPINS; ++i) {
        if (now() != seen) return;
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    num_sleepers_.fetch_add(1);  // before the count is read again, so that a later `raise` sees a sleeper
    wake_.wait(lock, [&] { return count_.load() != seen; });
    num_sleepers_.fetch_sub(1);
}

// ------------------------------------------------------------------------------------------------------ the threads

TeamThreads::TeamThreads(int num_threads) : num_threads_(num_threads), next_(static_cast<size_t>(num_threads)) {}

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
                    work(thread);
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

void TeamThreads::reset() {
    num_arrived_ = 0;
    for (Counter& counter : next_) counter.value = 0;
}

void TeamThreads::run(bool alone, const std::function<void(int)>& body) {
    std::lock_guard<std::mutex> lock(turn_);
    alone_ = alone || num_threads_ == 1;
    if (alone_) return body(0);
    start();
    body_ = &body;
    failed_ = false;
    reset();
    begin_.raise();
    work(0);
    if (failed_) std::rethrow_exception(std::exchange(error_, nullptr));
}

// All threads leave the body at the same barrier. After a failure this may be any barrier of the body; one more barrier
// then waits until all threads have left, because the body must not be used after this pass.
void TeamThreads::work(int thread) {
    bool given_up;
    try {
        (*body_)(thread);
        given_up = barrier();
    } catch (const GivenUp&) {
        given_up = true;
    } catch (...) {
        fail(std::current_exception());
        given_up = barrier();
    }
    if (given_up) barrier();
}

void TeamThreads::fail(std::exception_ptr error) {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (!failed_.exchange(true)) error_ = std::move(error);
}

void TeamThreads::meet() {
    if (barrier()) throw GivenUp();
}

// The last thread to arrive decides for all whether to go on, because another thread may fail before the others read it.
bool TeamThreads::barrier() {
    const uint32_t seen = passed_.now();
    if (num_arrived_.fetch_add(1) + 1 < num_threads_) {
        passed_.wait_beyond(seen);
    } else {
        reset();
        given_up_ = failed_;
        passed_.raise();
    }
    return given_up_;
}

}  // namespace forerun
