#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace forerun {

namespace {

constexpr size_t HUGE_PAGE = size_t{1} << 21;
constexpr size_t PAGE = size_t{1} << 12;

}  // namespace

// The rest behind the last whole huge page lies in small pages: another huge page would add a third to an expert of
// gpt-oss-20b.
size_t allocated_bytes(size_t bytes) { return up_to(std::max<size_t>(bytes, 1), bytes >= HUGE_PAGE ? PAGE : 64); }

// Large blocks are mapped one by one: in a heap there would be gaps between them, up to a huge page before each.
void* allocate(size_t bytes) {
#if defined(__linux__)
    if (bytes >= HUGE_PAGE) {
        const size_t size = allocated_bytes(bytes);
        void* const mapped =
            mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) return nullptr;
        char* const from = static_cast<char*>(mapped);
        const size_t skipped = -reinterpret_cast<uintptr_t>(from) % HUGE_PAGE;
        if (skipped > 0) munmap(from, skipped);
        munmap(from + skipped + size, HUGE_PAGE - skipped);
        madvise(from + skipped, size, MADV_HUGEPAGE);
        return from + skipped;
    }
#endif
    // Prefetches may reach behind the end by one line pair and the distance fetched ahead; nothing is read there.
    return std::aligned_alloc(64, up_to(std::max<size_t>(bytes, 1), 64));
}

void* allocate_zeros(size_t bytes) {
    void* const data = allocate(bytes);
#if defined(__linux__)
    if (bytes >= HUGE_PAGE) return data;  // new pages are zeros, and are made where they are first written to
#endif
    if (data) std::memset(data, 0, bytes);
    return data;
}

void release(void* data, size_t bytes) {
#if defined(__linux__)
    if (data && bytes >= HUGE_PAGE) {
        munmap(data, allocated_bytes(bytes));
        return;
    }
#else
    (void)bytes;
#endif
    std::free(data);
}

Scratch::~Scratch() { release(data_, size_); }

void* Scratch::bytes(size_t count) {
    if (count > size_) {
        release(data_, size_);
        size_ = 0;
        data_ = allocate(count);
        if (!data_) throw std::bad_alloc();
        size_ = count;
        std::memset(data_, 0, count);
    }
    return data_;
}

}  // namespace forerun
