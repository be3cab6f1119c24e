// From logits to a distribution, and from a distribution to a token: the native implementation of forerun.sampling.
//
// Every function returns the bits that the one in numpy returns, on every instruction set: exp and log are spelled out
// in operations that IEEE 754 rounds alike everywhere, nothing is fused, and masses are whole numbers of ticks, whose
// sum has no order (src/forerun/sampling/arithmetic.py). Python is not known here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace forerun {

constexpr int SCAN_BLOCK = 64;   // values whose largest is remembered, so that later passes can skip them
constexpr int PLACE_BLOCK = 512;  // weights summed together by a draw
constexpr int NUM_BUCKETS = 8192;  // of logits below the largest, when top-p looks for its threshold
constexpr float BUCKETS_PER_UNIT = 256.0f;

// What one pass over a row tells. `ordered`: no NaN.
struct Scan {
    float largest, smallest;
    bool ordered;
};

// logit -> (logit - top) / temperature
struct Scale {
    float top, temperature;
};

// How many values are above a threshold, and how many equal to it.
struct Counts {
    int64_t above, equal;
};

// Where the match noise comes from: the absolute index of the token, and the seed as a Philox key.
struct Noise {
    uint32_t position, key0, key1;
};

// The inner loops, one set of them for each instruction set.
struct SamplingKernels {
    Scan (*scan)(const float* x, int64_t n, float* block_largest);
    void (*scale)(const float* x, int64_t n, Scale scale, float* out);
    // Weights e^x and the sum of their ticks; `ticks_per_one` is a power of two.
    uint64_t (*exp)(const float* x, int64_t n, double ticks_per_one, float* weights);
    uint64_t (*ticks)(const float* weights, int64_t n, double ticks_per_one);
    void (*divide)(float* x, int64_t n, float divisor);
    void (*divide_from)(const float* values, float threshold, float* weights, int64_t n, float divisor);
    Counts (*count)(const float* values, int64_t n, float threshold);
    // Copies the values at or above the threshold and their ids; returns how many. May write one place behind them.
    int64_t (*from)(const float* values, int64_t n, float threshold, int64_t first_id, int64_t* ids, float* kept);
    // Copies the values in (low, high]; returns how many. May write one place behind them.
    int64_t (*between)(const float* values, int64_t n, float low, float high, float* out);
    // Adds the ticks of at most SCAN_BLOCK values to the buckets of their depths.
    void (*buckets)(const float* values, const float* weights, int64_t n, double ticks_per_one, uint64_t* mass);
    uint64_t (*able)(const float* weights, uint32_t block, Noise noise, float reach, uint32_t* words);
};

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

// A weight as a whole number of ticks. Adding 1.5 * 2^52 rounds to a whole number, which then stands in the low bits.
inline __attribute__((always_inline)) uint64_t tick_of(float weight, double ticks_per_one) {
    const double shifted = weight * ticks_per_one + 6755399441055744.0;
    uint64_t bits;
    std::memcpy(&bits, &shifted, 8);
    return bits - 0x4338000000000000u;
}

// A row of floats that goes back to a small pool: fresh memory costs more than the arithmetic done on it.
class Buffer {
  public:
    explicit Buffer(int64_t size);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    float* data() { return data_.get(); }

  private:
    int64_t size_;
    std::unique_ptr<float[]> data_;
};

struct Probs {
    std::unique_ptr<Buffer> dense;  // [n]; empty where the distribution is a list
    std::vector<int64_t> ids;
    std::vector<float> listed;
};

// Throws std::invalid_argument for a name that is none.
const SamplingKernels& sampling_kernels(const std::string& isa);

// The lowest index of the largest value; -1 where that is no number.
int64_t argmax(const SamplingKernels& kernels, const float* row, int64_t n);

// False where the logits are no numbers.
bool make_probs(const SamplingKernels& kernels, const float* row, int64_t n, const Filters& filters, Probs& probs);

// The first place at which the sum of ticks is above uniform * 2^-53 of all; -1 where there is no mass.
int64_t place_of(const SamplingKernels& kernels, const float* weights, int64_t n, uint64_t uniform);

// Natural logarithm of a positive number, within 1 unit in the last place (FreeBSD e_log.c, Sun Microsystems 1993).
double log_of(double x);

// The id with the least -log u / weight, lowest id on ties; -1 where there is no mass. ids null = 0 .. n - 1.
int64_t race(const SamplingKernels& kernels, const float* weights, const int64_t* ids, int64_t n, uint64_t seed,
             uint64_t position);

}  // namespace forerun
