// State with a lock, a separate one in each process.
//
// A forked child has one thread and a copy of all memory as it was at the fork: a lock that another thread held stays
// locked for ever, a condition variable counts sleepers that do not exist, and data behind a lock may be half written.
// So all state with a lock is in one block on the heap, and a child that needs the state makes a new block. The old
// block is never freed, because it cannot even be destroyed safely; its pages stay shared with the parent.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace forerun {

extern std::atomic<uint32_t> fork_count;

// The number of forks between the process that loaded the library and this one; a child has one more than its parent.
inline uint32_t num_forks() { return fork_count.load(std::memory_order_relaxed); }

// Holds this process's T, which is made when it is first needed.
template <class T>
class PerProcess {
  public:
    PerProcess() = default;
    PerProcess(const PerProcess&) = delete;
    PerProcess& operator=(const PerProcess&) = delete;
    ~PerProcess() {
        Block* found = block_.load();
        if (found && found->forks == num_forks()) delete found;
    }

    template <class... Args>
    T& get(const Args&... args) {
        Block* found = block_.load(std::memory_order_acquire);
        if (found && found->forks == num_forks()) return found->value;
        auto made = std::make_unique<Block>(args...);
        if (block_.compare_exchange_strong(found, made.get())) return made.release()->value;
        return found->value;  // another thread of this process was faster
    }

  private:
    struct Block {
        template <class... Args>
        explicit Block(const Args&... args) : value(args...) {}

        const uint32_t forks = num_forks();
        T value;
    };

    std::atomic<Block*> block_{nullptr};
};

}  // namespace forerun
