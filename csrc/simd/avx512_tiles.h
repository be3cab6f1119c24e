// Keys and values in the layouts of the instruction that multiplies pairs of bfloat16, which halves the
// multiplications; or turned.
#pragma once

#include <immintrin.h>

#include "turned_tile.h"

namespace forerun {
namespace FORERUN_ISA {

// -------------------------------------------------------------------------------------- pairs of bfloat16

// What the layouts of pairs have in common: queries and weights rounded to bfloat16, and the operations on them.
struct PairLayout : NextBlock<uint16_t> {
    using Stored = uint16_t;
    static constexpr bool DENORMALS_ARE_ZERO = true;  // of all that is computed beside the products, too
    int dim, padded_dim;

    explicit PairLayout(int head_dim) : dim(head_dim), padded_dim(padded(head_dim)) {}

    const void* query(const float* q, const uint16_t*, float* memory) const {
        uint16_t* halves = reinterpret_cast<uint16_t*>(memory);
        for (int d = 0; d < dim; d += LANES) narrow(load_first(q + d, dim - d), halves + d);
        return halves;
    }

    struct Weights {
        alignas(64) uint16_t of[KEY_BLOCK];
    };
    static F16 keep(Weights& weights, int lane, F16 weight) {
        narrow(weight, weights.of + lane);
        return load_bf16(weights.of + lane);
    }

    template <int N>
    static constexpr int chunks() {
        return 4;
    }

    // 16 keys, from word d on, as 16 vectors that hold one word of each. rows: null where a key is not seen.
    void words_of_keys(int lane, int d, int count, const uint16_t* const* rows, F16 (&block)[LANES]) const {
        const __mmask16 some = static_cast<__mmask16>((1u << count) - 1);
        for (int i = 0; i < LANES; ++i) {
            fetch_key(lane + i, 2 * d, 2 * (d + count));
            block[i] = {_mm512_castsi512_ps(rows[i] ? _mm512_maskz_loadu_epi32(some, rows[i] + 2 * d)
                                                    : _mm512_setzero_si512())};
        }
        transpose(block);
    }

    // 16 dimensions of two neighbouring values in words. Where a value is not seen, and may be NaN, its row is null.
    __m512i words_of_values(const uint16_t* even, const uint16_t* odd, int d) const {
        const __mmask16 some = static_cast<__mmask16>((1u << (dim - d < LANES ? dim - d : LANES)) - 1);
        const auto wide = [&](const uint16_t* row) {
            return row ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, row + d)) : _mm512_setzero_si512();
        };
        return _mm512_or_si512(wide(even), _mm512_slli_epi32(wide(odd), 16));
    }
};

// For few queries: pairs are made where they are used.
struct PairRowTile : PairLayout {
    const uint16_t *keys[KEY_BLOCK], *values[KEY_BLOCK];

    PairRowTile(float*, const Attention& a) : PairLayout(a.head_dim) {}

    void put_keys(int first, int last, const uint16_t* const* rows) {
        for (int lane = first; lane < last; ++lane) keys[lane] = rows[lane];
    }
    void put_values(int first, int last, const uint16_t* const* rows) {
        for (int lane = first; lane < last; ++lane) values[lane] = rows[lane];
    }

    template <int N>
    void score(const State* states, Seen seen, F16 (*scores)[VECTORS]) const {
        for (int i = 0; i < VECTORS; ++i) {
            const uint16_t* rows[LANES];
            for (int j = 0; j < LANES; ++j) rows[j] = seen.has(i * LANES + j) ? keys[i * LANES + j] : nullptr;
            for (int d = 0; d < dim / 2; d += LANES) {
                const int count = dim / 2 - d < LANES ? dim / 2 - d : LANES;
                F16 block[LANES];
                words_of_keys(i * LANES, d, count, rows, block);
                for (int j = 0; j < LANES && j < count; ++j)
                    for (int n = 0; n < N; ++n) {
                        const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<const int*>(states[n].q)[d + j]);
                        scores[n][i].v = _mm512_dpbf16_ps(scores[n][i].v, x, (__m512bh)_mm512_castps_si512(block[j].v));
                    }
            }
        }
    }

    template <int N, int CHUNKS>
    void add(int d, const Weights* weights, Seen seen, F16 (*sums)[CHUNKS]) const {
        for (int lane = seen.first / 2 * 2; lane < seen.last; lane += 2) {
            fetch_value(lane, d, d + CHUNKS * LANES), fetch_value(lane + 1, d, d + CHUNKS * LANES);
            const uint16_t* even = seen.has(lane) ? values[lane] : nullptr;
            const uint16_t* odd = seen.has(lane + 1) ? values[lane + 1] : nullptr;
            __m512bh value[CHUNKS];
            for (int c = 0; c < CHUNKS; ++c) value[c] = (__m512bh)words_of_values(even, odd, d + c * LANES);
            for (int n = 0; n < N; ++n) {
                int word;
                std::memcpy(&word, weights[n].of + lane, 4);
                const __m512bh weight = (__m512bh)_mm512_set1_epi32(word);
                for (int c = 0; c < CHUNKS; ++c) sums[n][c].v = _mm512_dpbf16_ps(sums[n][c].v, weight, value[c]);
            }
        }
    }
};

// For many queries: pairs are made once and kept.
struct PairTile : PairLayout {
    uint32_t* keys;    // [padded_dim / 2][64]: two dimensions of a key in a word
    uint32_t* values;  // [32][padded_dim]: one dimension of two neighbouring keys in a word

    PairTile(float* memory, const Attention& a)
        : PairLayout(a.head_dim), keys(reinterpret_cast<uint32_t*>(memory)), values(keys + padded_dim * KEY_BLOCK) {}

    void put_key(int lane, const uint16_t* key) const {
        for (int d = 0; d < dim / 2; ++d) std::memcpy(keys + d * KEY_BLOCK + lane, key + 2 * d, 4);
    }
    void put_16_keys(int lane, const uint16_t* const* rows) const {
        for (int d = 0; d < dim / 2; d += LANES) {
            const int count = dim / 2 - d < LANES ? dim / 2 - d : LANES;
            F16 block[LANES];
            words_of_keys(lane, d, count, rows, block);
            for (int i = 0; i < count; ++i)
                store(reinterpret_cast<float*>(keys + (d + i) * KEY_BLOCK + lane), block[i]);
        }
    }
    void put_keys(int first, int last, const uint16_t* const* rows) const {
        int lane = first;
        for (; lane < last && lane % LANES != 0; ++lane) put_key(lane, rows[lane]);
        for (; lane + LANES <= last; lane += LANES) put_16_keys(lane, rows + lane);
        for (; lane < last; ++lane) put_key(lane, rows[lane]);
    }
    void put_value(int lane, const uint16_t* row) const {
        uint16_t* halves = reinterpret_cast<uint16_t*>(values + lane / 2 * padded_dim) + lane % 2;
        for (int d = 0; d < dim; ++d) halves[2 * d] = row[d];
    }
    void put_values(int first, int last, const uint16_t* const* rows) const {
        int lane = first;
        if (lane < last && lane % 2 == 1) put_value(lane, rows[lane]), ++lane;
        for (; lane + 1 < last; lane += 2) {
            fetch_value(lane, 0, dim), fetch_value(lane + 1, 0, dim);
            for (int d = 0; d < dim; d += LANES)
                _mm512_storeu_si512(values + lane / 2 * padded_dim + d, words_of_values(rows[lane], rows[lane + 1], d));
        }
        if (lane < last) put_value(lane, rows[lane]);
    }

    template <int N>
    void score(const State* states, Seen, F16 (*scores)[VECTORS]) const {
        for (int d = 0; d < dim / 2; ++d) {
            __m512bh key[VECTORS];
            for (int i = 0; i < VECTORS; ++i) key[i] = (__m512bh)_mm512_loadu_si512(keys + d * KEY_BLOCK + i * LANES);
            for (int n = 0; n < N; ++n) {
                const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<const int*>(states[n].q)[d]);
                for (int i = 0; i < VECTORS; ++i) scores[n][i].v = _mm512_dpbf16_ps(scores[n][i].v, x, key[i]);
            }
        }
    }

    template <int N, int CHUNKS>
    void add(int d, const Weights* weights, Seen seen, F16 (*sums)[CHUNKS]) const {
        for (int pair = seen.first / 2; 2 * pair < seen.last; ++pair) {
            // Where only one of a pair is seen, the other's value is replaced by 0, because it may be NaN.
            uint32_t mask = 0xffffffffu;
            if (2 * pair < seen.first) mask &= 0xffff0000u;
            if (2 * pair + 1 >= seen.last) mask &= 0x0000ffffu;
            const __m512i keep = _mm512_set1_epi32(static_cast<int>(mask));
            __m512bh value[CHUNKS];
            for (int c = 0; c < CHUNKS; ++c)
                value[c] =
                    (__m512bh)_mm512_and_si512(_mm512_loadu_si512(values + pair * padded_dim + d + c * LANES), keep);
            for (int n = 0; n < N; ++n) {
                int word;
                std::memcpy(&word, weights[n].of + 2 * pair, 4);
                const __m512bh weight = (__m512bh)_mm512_set1_epi32(word);
                for (int c = 0; c < CHUNKS; ++c) sums[n][c].v = _mm512_dpbf16_ps(sums[n][c].v, weight, value[c]);
            }
        }
    }
};

// Calls `use` with the type of the tile that suits so many queries of each key head.
template <class Use>
void with_tile(const Attention& a, int num_queries, const Use& use) {
    if (a.type == Type::int8) return with_rounded_tile(a, use);
    if (a.type == Type::float32 || widens_pairs) return with_turned_tile(a, use);
    if (num_queries <= 4) return use(As<PairRowTile>());
    use(As<PairTile>());
}

}  // namespace FORERUN_ISA
}  // namespace forerun
