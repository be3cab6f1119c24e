#include "process.h"

#include <pthread.h>

namespace forerun {

std::atomic<uint32_t> fork_count{0};

namespace {

// Forks are counted here, because reading the process's id would take a system call for every lock.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

}  // namespace forerun
