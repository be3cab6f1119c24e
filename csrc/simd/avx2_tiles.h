// For few queries: keys are turned in registers where they are used, eight at a time. Scores have the bits of
// turned_tile.h.
#pragma once

#include "turned_tile.h"

namespace forerun {
namespace FORERUN_ISA {

template <class T, int DIM = 0>
struct TurningTile : TurnedTile<T, DIM> {
    using Turned = TurnedTile<T, DIM>;
    using Turned::dim, Turned::PAIRS;
    static constexpr int EIGHT = 8, PER_WORD = PAIRS ? 2 : 1;
    const T* rows[KEY_BLOCK];

    using Turned::Turned;

    void put_keys(int first, int last, const T* const* from) {
        for (int lane = first; lane < last; ++lane) rows[lane] = from[lane];
    }

    // Adds the products of one of eight keys' words and of the dimensions of N queries that it holds.
    template <int N>
    FORERUN_INLINE static void add_word(__m256 word, const State* states, int d, __m256 (&sums)[N]) {
        const auto query = [&](int n, int i) {
            return _mm256_broadcast_ss(static_cast<const float*>(states[n].q) + d + i);
        };
        if constexpr (PAIRS) {
            const __m256 odd =
                _mm256_and_ps(word, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u))));
            const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(word), 16));
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[n] = _mm256_fmadd_ps(odd, query(n, 0), sums[n]);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[n] = _mm256_fmadd_ps(even, query(n, 1), sums[n]);
        } else {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[n] = _mm256_fmadd_ps(word, query(n, 0), sums[n]);
        }
    }

    // In place of a key that is not seen another is taken, whose score is hidden.
    template <int N>
    void score(const State* states, Seen seen, F16 (*scores)[VECTORS]) const {
        const int num_words = dim / PER_WORD, whole = num_words / EIGHT * EIGHT;
        for (int lane = seen.first / EIGHT * EIGHT; lane < seen.last; lane += EIGHT) {
            const float* words[EIGHT];
            for (int i = 0; i < EIGHT; ++i) {
                words[i] = reinterpret_cast<const float*>(rows[seen.has(lane + i) ? lane + i : seen.first]);
                this->fetch_key(lane + i, 0, dim);
            }
            __m256 sums[N], block[EIGHT];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[n] = _mm256_setzero_ps();
            for (int w = 0; w < whole; w += EIGHT) {
#pragma GCC unroll 8
                for (int i = 0; i < EIGHT; ++i) block[i] = _mm256_loadu_ps(words[i] + w);
                transpose_eight(block);
#pragma GCC unroll 8
                for (int i = 0; i < EIGHT; ++i) add_word<N>(block[i], states, PER_WORD * (w + i), sums);
            }
            if (whole < num_words) {
                const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                const __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32(num_words - whole), lanes);
                for (int i = 0; i < EIGHT; ++i) block[i] = _mm256_maskload_ps(words[i] + whole, some);
                transpose_eight(block);
                for (int i = 0; whole + i < num_words; ++i) add_word<N>(block[i], states, PER_WORD * (whole + i), sums);
            }
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) _mm256_storeu_ps(floats_of(scores[n][lane / LANES]) + lane % LANES, sums[n]);
        }
    }
};

constexpr int FEW_QUERIES = 16;

// Calls `use` with the type of the tile that suits so many queries of each key head.
template <class Use>
void with_tile(const Attention& a, int num_queries, const Use& use) {
    if (a.type == Type::int8) return with_rounded_tile(a, use);
    if (num_queries > FEW_QUERIES) return with_turned_tile(a, use);
    if (a.type == Type::float32) return use(As<TurningTile<float>>());
    if (a.head_dim == 64) return use(As<TurningTile<uint16_t, 64>>());
    if (a.head_dim == 128) return use(As<TurningTile<uint16_t, 128>>());
    use(As<TurningTile<uint16_t>>());
}

}  // namespace FORERUN_ISA
}  // namespace forerun
