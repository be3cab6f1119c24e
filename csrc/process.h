// State that has a lock, kept apart for each process.
//
// A forked child has one thread and a copy of all memory as it was at that moment: a lock that another thread held
// stays locked for ever, a condition counts sleepers that do not exist, and what a lock protects may be half written.
// So whatever has a lock lies in one block on the heap, and a child that needs it makes a new one. The old one is left
// where it is, for nothing in it can be used, not even to destroy it; its pages stay shared with the parent.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace forerun {

extern std::atomic<uint32_t> fork_count;

// Forks between the process that loaded the library and this one; a child has one more than its parent.
inline uint32_t num_forks() { return fork_count.load(std::memory_order_relaxed); }

// A T of this process, made when it is first asked for.
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
