#include "bandwidth.h"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace forerun {

namespace {

constexpr size_t HUGE_PAGE_BYTES = 2u << 20;
constexpr size_t TILE_BYTES = 2 * HUGE_PAGE_BYTES;
constexpr int LINE_BYTES = 64;

typedef uint64_t Line __attribute__((vector_size(LINE_BYTES), aligned(LINE_BYTES), may_alias));

using Read = uint64_t (*)(const char* tile);

// Returns the exclusive or of a tile. It reads `streams` contiguous parts side by side and prefetches each `ahead`
// bytes ahead: for one use (`once`), or to stay in the caches as usual. ahead = 0: only the processor itself
// prefetches. A prefetch beyond the buffer does nothing.
template <int streams, int ahead, bool once>
__attribute__((always_inline)) inline uint64_t read_tile(const char* tile) {
    constexpr size_t part = TILE_BYTES / streams;
    Line sums[4] = {};
    for (size_t i = 0; i < part; i += 4 * LINE_BYTES)
        for (int s = 0; s < streams; ++s)
            for (int j = 0; j < 4; ++j) {
                const char* line = tile + s * part + i + j * LINE_BYTES;
                if (ahead > 0) __builtin_prefetch(line + ahead, 0, once ? 0 : 3);
                sums[j] ^= *reinterpret_cast<const Line*>(line);
            }
    const Line all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    uint64_t sum = 0;
    for (int i = 0; i < LINE_BYTES / 8; ++i) sum ^= all[i];
    return sum;
}

// The same function once per width of a load: the compiler splits a line where the registers are narrower.
template <int streams, int ahead, bool once>
struct Reader {
#if defined(__x86_64__)
    __attribute__((target("avx512f"))) static uint64_t avx512(const char* tile) {
        return read_tile<streams, ahead, once>(tile);
    }
    __attribute__((target("avx2"))) static uint64_t avx2(const char* tile) {
        return read_tile<streams, ahead, once>(tile);
    }
#endif
    static uint64_t baseline(const char* tile) { return read_tile<streams, ahead, once>(tile); }

    static Read best() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f")) return avx512;
        if (__builtin_cpu_supports("avx2")) return avx2;
#endif
        return baseline;
    }
};

struct Probe {
    const char* name;
    Read read;
};

// Of two dozen ways that were tried, these were the fastest in some case: on an idle machine two streams read most, on
// a busy one all are alike, and one thread alone reads most with two streams and a prefetch that spares the caches.
std::vector<Probe> all_probes() {
    return {
        {"1 stream, the processor's own prefetching", Reader<1, 0, false>::best()},
        {"1 stream, prefetch once 4096 bytes ahead", Reader<1, 4096, true>::best()},
        {"2 streams, prefetch once 512 bytes ahead", Reader<2, 512, true>::best()},
        {"2 streams, prefetch once 1024 bytes ahead", Reader<2, 1024, true>::best()},
        {"2 streams, prefetch 2048 bytes ahead", Reader<2, 2048, false>::best()},
        {"4 streams, prefetch 1024 bytes ahead", Reader<4, 1024, false>::best()},
    };
}

size_t whole_tiles(size_t num_bytes) {
    if (num_bytes < TILE_BYTES) throw std::invalid_argument("a bandwidth probe needs 4 MiB at least");
    return num_bytes / TILE_BYTES * TILE_BYTES;
}

char* huge_pages(size_t num_bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, HUGE_PAGE_BYTES, num_bytes) != 0) throw std::bad_alloc();
#if defined(__linux__)
    madvise(memory, num_bytes, MADV_HUGEPAGE);  // the system may ignore it
#endif
    return static_cast<char*>(memory);
}

}  // namespace

BandwidthProbe::BandwidthProbe(size_t num_bytes, int num_threads)
    : team_(num_threads), num_bytes_(whole_tiles(num_bytes)), buffer_(huge_pages(num_bytes_), std::free) {
    // The system allocates a page when it is first written; pages not written would all be the same page of zeros.
    team_.run(false, [this](int thread) {
        team_.tiles(thread, static_cast<int>(num_bytes_ / TILE_BYTES),
                    [this](int i) { std::memset(buffer_.get() + i * TILE_BYTES, 1, TILE_BYTES); });
    });
}

std::vector<Reading> BandwidthProbe::read(int num_repeats) {
    using Clock = std::chrono::steady_clock;
    const std::vector<Probe> probes = all_probes();
    std::vector<Reading> readings;
    for (const Probe& probe : probes) readings.push_back({probe.name, {}});
    std::atomic<uint64_t> sink{0};  // keeps the compiler from leaving reads out
    for (int repeat = 0; repeat < num_repeats; ++repeat)
        for (size_t p = 0; p < probes.size(); ++p) {
            const Clock::time_point start = Clock::now();
            team_.run(false, [&](int thread) {
                uint64_t sum = 0;
                team_.tiles(thread, static_cast<int>(num_bytes_ / TILE_BYTES),
                            [&](int i) { sum ^= probes[p].read(buffer_.get() + i * TILE_BYTES); });
                sink.fetch_xor(sum);
            });
            const std::chrono::duration<double> seconds = Clock::now() - start;
            readings[p].bytes_per_s.push_back(static_cast<double>(num_bytes_) / seconds.count());
        }
    return readings;
}

}  // namespace forerun
