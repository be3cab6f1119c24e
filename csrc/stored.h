// Quantised weights as GGUF files store them: the types of blocks, and what is in one (ggml-quants.c of llama.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace forerun {

constexpr int MOST_UNITS = 8;  // of a block

constexpr int MOST_NUMBERS = 4;

// A block, unpacked: codes without a sign, the bits of its numbers as its type's format has them (see
// Format::number_bytes), and the integers of its units.
struct UnpackedBlock {
    uint8_t codes[MOST_UNITS * UNIT];
    uint32_t scales[MOST_NUMBERS], subtracted;
    int8_t scale_levels[MOST_UNITS][2];
    uint8_t minimum_levels[MOST_UNITS][2];
};

// Whether the bits stand for a finite number.
inline bool is_finite(uint32_t bits, int number_bytes) {
    const uint32_t exponent = number_bytes == 4 ? 0x7f800000u : number_bytes == 2 ? 0x7c00u : 0xffu;
    return (bits & exponent) != exponent;
}

// One type. format: how its weights are packed where nothing else shares their panels.
struct StoredType {
    int number;  // in a file
    int num_units;
    size_t num_bytes;
    Format format;
    // A block that the format cannot hold gets a scale that is not finite.
    void (*unpack)(const uint8_t* block, UnpackedBlock& out);

    // The weights of a block as floats, rounded in the order in which ops/quantised.py rounds them.
    void dequantise(const uint8_t* block, float* out) const;
};

// Null where the type of this number is not known.
const StoredType* stored_type(int number);

}  // namespace forerun
