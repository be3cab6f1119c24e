#include "pool.h"

#include <unistd.h>

namespace forerun {

namespace {

constexpr int NUM_SPINS = 4000;  // about 40 us: longer than a tile, shorter than a time slice

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

void Team::Signal::raise() {
    count_.fetch_add(1);
    if (num_sleepers_.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
}

void Team::Signal::wait_beyond(uint32_t seen) {
    for (int i = 0; i < NUM_SPINS; ++i) {
        if (now() != seen) return;
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    num_sleepers_.fetch_add(1);  // before the count is read again: whoever raises it afterwards sees a sleeper
    wake_.wait(lock, [&] { return count_.load() != seen; });
    num_sleepers_.fetch_sub(1);
}

Team::Team(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads), next_(num_threads_) {}

void Team::reset() {
    num_arrived_ = 0;
    for (Counter& counter : next_) counter.value = 0;
}

Team::~Team() {
    if (owner_ != getpid()) {  // a fork: these threads never existed here
        for (std::thread& thread : threads_) thread.detach();
        return;
    }
    ending_ = true;
    begin_.raise();
    for (std::thread& thread : threads_) thread.join();
}

void Team::start() {
    for (std::thread& thread : threads_) thread.detach();  // left behind by a fork
    threads_.clear();
    owner_ = getpid();
    for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this, i, seen = begin_.now()]() mutable {
        for (;;) {
            begin_.wait_beyond(seen);
            seen = begin_.now();
            if (ending_) return;
            work(i);
        }
    });
}

void Team::run(bool alone, const std::function<void(int)>& body) {
    std::lock_guard<std::mutex> lock(turn_);
    num_active_ = alone ? 1 : num_threads_;
    if (num_active_ == 1) return body(0);
    if (owner_ != getpid()) start();
    body_ = &body;
    reset();
    begin_.raise();
    work(0);
}

void Team::work(int thread) {
    (*body_)(thread);
    barrier();
}

void Team::barrier() {
    const uint32_t seen = passed_.now();
    if (num_arrived_.fetch_add(1) + 1 < num_active_) return passed_.wait_beyond(seen);
    reset();
    passed_.raise();
}

}  // namespace forerun
