// Measures how fast this machine reads memory, which limits every kernel that streams weights.
//
// No kernel may be faster than this limit, so the probe reads as the kernels do, with the same team of threads, tiles
// from a counter, huge pages and prefetching, and computes almost nothing. Which way of reading is fastest depends on
// the processor and on its load: several are tried in turn, and the caller takes the best.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "pool.h"

namespace forerun {

struct Reading {
    std::string probe;                // how the buffer was read
    std::vector<double> bytes_per_s;  // one value per repeat
};

class BandwidthProbe {
  public:
    // num_bytes is rounded down to whole tiles of 4 MiB. Throws std::invalid_argument where that leaves none, and
    // std::bad_alloc where the memory cannot be had.
    BandwidthProbe(size_t num_bytes, int num_threads);

    size_t num_bytes() const { return num_bytes_; }

    // Runs every probe num_repeats times, in turn, so that a change of the machine's load affects all of them.
    std::vector<Reading> read(int num_repeats);

  private:
    Team team_;
    const size_t num_bytes_;
    std::unique_ptr<char, void (*)(void*)> buffer_;
};

}  // namespace forerun
