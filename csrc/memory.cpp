#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "process.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace forerun {

namespace {

constexpr size_t HUGE_PAGE = size_t{1} << 21;

#if defined(__linux__)

// Maps pages that are huge ones where the system has them; null where there is no memory.
void* map(size_t size, size_t alignment) {
    void* const mapped = mmap(nullptr, size + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* const from = static_cast<char*>(mapped);
    const size_t skipped = -reinterpret_cast<uintptr_t>(from) % alignment;
    if (skipped > 0) munmap(from, skipped);
    munmap(from + skipped + size, alignment - skipped);
    madvise(from + skipped, size, MADV_HUGEPAGE);
    return from + skipped;
}

// Where small matrices lie one behind the other, until the last of them is released; the region begins with this.
struct Region {
    size_t num_used;  // bytes
    int num_blocks;
};

constexpr size_t REGION_BYTES = 16 * HUGE_PAGE;  // a region begins at a multiple of it; only what is written to takes memory
constexpr size_t LEAST_SHARED = size_t{1} << 16;

struct Regions {
    std::mutex mutex;
    Region* open = nullptr;  // where the next matrix goes, if it fits
};

Regions& regions() {
    static PerProcess<Regions>& found = *new PerProcess<Regions>;  // is not destroyed before the last matrix
    return found.get();
}

// A page of 4 KiB may cost more to find than to read, above all where a virtual machine has two page tables to walk and other
// programs have emptied the caches of what they say: see docs/kernels.md.
bool shares_pages(size_t bytes) { return bytes >= LEAST_SHARED && bytes < HUGE_PAGE; }

#endif

}  // namespace

size_t allocated_bytes(size_t bytes) { return up_to(std::max<size_t>(bytes, 1), bytes >= HUGE_PAGE ? HUGE_PAGE : 64); }

// Large blocks are mapped one by one: between those of a heap there would be gaps, up to a huge page before each.
void* allocate(size_t bytes) {
#if defined(__linux__)
    if (bytes >= HUGE_PAGE) return map(allocated_bytes(bytes), HUGE_PAGE);
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
        munmap(data, up_to(bytes, HUGE_PAGE));
        return;
    }
#else
    (void)bytes;
#endif
    std::free(data);
}

void* allocate_weights(size_t bytes) {
#if defined(__linux__)
    if (shares_pages(bytes)) {
        Regions& own = regions();
        const std::lock_guard<std::mutex> lock(own.mutex);
        const size_t size = up_to(bytes, 64);
        if (!own.open || own.open->num_used + size > REGION_BYTES) {
            void* const mapped = map(REGION_BYTES, REGION_BYTES);
            if (!mapped) return nullptr;
            own.open = new (mapped) Region{64, 0};
        }
        char* const data = reinterpret_cast<char*>(own.open) + own.open->num_used;
        own.open->num_used += size;
        ++own.open->num_blocks;
        return data;
    }
#endif
    return allocate_zeros(bytes);
}

void release_weights(void* data, size_t bytes) {
#if defined(__linux__)
    if (shares_pages(bytes)) {
        Regions& own = regions();
        const std::lock_guard<std::mutex> lock(own.mutex);
        Region* const region = reinterpret_cast<Region*>(reinterpret_cast<uintptr_t>(data) / REGION_BYTES * REGION_BYTES);
        if (--region->num_blocks > 0) return;
        if (own.open == region) own.open = nullptr;
        munmap(region, REGION_BYTES);
        return;
    }
#endif
    release(data, bytes);
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
