#include "process.h"

#include <pthread.h>

namespace forerun {

std::atomic<uint32_t> fork_count{0};

namespace {

// Asking for the process's id would be a system call for every lock.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

}  // namespace forerun
