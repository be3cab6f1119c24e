// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) for one counter. It returns the
// same words as forerun.sampling.random.philox_words. sampling_kernels.h runs many counters at once.
#pragma once

#include <cstdint>

namespace forerun {

constexpr uint32_t PHILOX_MULTIPLIER_0 = 0xD2511F53u, PHILOX_MULTIPLIER_1 = 0xCD9E8D57u;
constexpr uint32_t PHILOX_INCREMENT_0 = 0x9E3779B9u, PHILOX_INCREMENT_1 = 0xBB67AE85u;
constexpr int PHILOX_ROUNDS = 10;
constexpr uint32_t PURPOSE_DRAFT = 0, PURPOSE_MATCH = 3;

struct PhiloxWords {
    uint32_t word[4];
};

// 53 bits of two words: a uniform number in units of 2^-53.
inline uint64_t uniform53(uint32_t word0, uint32_t word1) {
    return (static_cast<uint64_t>(word0 >> 5) << 26) + (word1 >> 6);
}

inline PhiloxWords philox(PhiloxWords counter, uint32_t key0, uint32_t key1) {
    uint32_t* c = counter.word;
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
        const uint64_t product0 = static_cast<uint64_t>(c[0]) * PHILOX_MULTIPLIER_0;
        const uint64_t product1 = static_cast<uint64_t>(c[2]) * PHILOX_MULTIPLIER_1;
        c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0;
        c[1] = static_cast<uint32_t>(product1);
        c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1;
        c[3] = static_cast<uint32_t>(product0);
        key0 += PHILOX_INCREMENT_0, key1 += PHILOX_INCREMENT_1;
    }
    return counter;
}

}  // namespace forerun
