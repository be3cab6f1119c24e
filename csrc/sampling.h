// From logits to a distribution, and from a distribution to a token: the native implementation of forerun.sampling.
//
// Every function returns the bits that the one in numpy returns, on every instruction set: exp and log are spelled out
// in operations that IEEE 754 rounds alike everywhere, nothing is fused, and masses are whole numbers of ticks, whose
// sum has no order (src/forerun/sampling/arithmetic.py). Python is not known here.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "sampling_loops.h"

namespace forerun {

constexpr int PLACE_BLOCK = 512;  // weights summed together by a draw

struct Filters {
    float temperature;
    int64_t top_k;
    float log_min_p;  // minus infinity = none
    double top_p;
    int64_t most_listed;
};

inline int64_t blocks_of(int64_t n) { return (n + SCAN_BLOCK - 1) / SCAN_BLOCK; }

// A weight of `largest` among n counts as up to 2^44 ticks; fewer where n of them would not fit (arithmetic.ticks).
inline double ticks_per_one_of(int64_t n, float largest) {
    int bits_of_n = 0, exponent;
    for (int64_t rest = n; rest > 0; rest >>= 1) ++bits_of_n;
    std::frexp(largest, &exponent);
    return std::ldexp(1.0, (bits_of_n > 18 ? 62 - bits_of_n : 44) - exponent);
}

// A row of floats that goes back to a small pool: fresh memory costs more than the arithmetic done on it.
class Buffer {
  public:
    explicit Buffer(int64_t size);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    float* data() { return data_.get(); }
    int64_t size() const { return size_; }

  private:
    int64_t size_;
    std::unique_ptr<float[]> data_;
};

struct Probs {
    std::unique_ptr<Buffer> dense;  // [n]; empty where the distribution is a list
    std::vector<int64_t> ids;
    std::vector<float> listed;
};

// The lowest index of the largest value; -1 where that is no number.
int64_t argmax(const SamplingKernels& kernels, const float* row, int64_t n);

// False where the logits are no numbers.
bool make_probs(const SamplingKernels& kernels, const float* row, int64_t n, const Filters& filters, Probs& probs);

// The sum of weights >= 0, and the sum of e^(logit - the largest); 0 where one is no finite number.
double mass_of(const SamplingKernels& kernels, const float* weights, int64_t n);
double mass_of_logits(const SamplingKernels& kernels, const float* row, int64_t n);

// The first place at which the sum of ticks is above uniform * 2^-53 of all; -1 where there is no mass.
int64_t place_of(const SamplingKernels& kernels, const float* weights, int64_t n, uint64_t uniform);

// Natural logarithm of a positive number, within 1 unit in the last place (FreeBSD e_log.c, Sun Microsystems 1993).
double log_of(double x);

// The id with the least -log u / weight, lowest id on ties; -1 where there is no mass. ids null = 0 .. n - 1.
int64_t race(const SamplingKernels& kernels, const float* weights, const int64_t* ids, int64_t n, uint64_t seed,
             uint64_t position);

}  // namespace forerun
