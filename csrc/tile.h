// One block of 64 keys and values of one head.
//
// RowTile reads them where they are, on every instruction set. PairTile turns bfloat16 keys into the layout of the
// instruction that multiplies pairs of them (AVX-512 BF16): half the multiplications.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "simd.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr int VECTORS = KEY_BLOCK / LANES;

constexpr int padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

// The lanes [first, last) of a block that a row sees.
struct Seen {
    int first, last;
    bool has(int lane) const { return lane >= first && lane < last; }
};

// The running state of one query row and head: maximum, sum, weighted values [padded_dim]. q: in the tile's layout.
struct State {
    const void* q;
    float max, sum;
    float* values;
};

// The first lanes of the block after this one. Each is fetched while the same lane is read here: 256 lines of memory asked
// for at once would wait for each other.
template <class T>
struct NextBlock {
    static constexpr int LINE = 64 / sizeof(T);  // numbers in a line of memory
    const T *next_keys[KEY_BLOCK], *next_values[KEY_BLOCK];
    int num_next = 0;

    void fetch_key(int lane, int first, int last) const {
        if (lane < num_next)
            for (int d = first; d < last; d += LINE) __builtin_prefetch(next_keys[lane] + d, 0, NEAR_CACHE);
    }
    void fetch_value(int lane, int first, int last) const {
        if (lane < num_next)
            for (int d = first; d < last; d += LINE) __builtin_prefetch(next_values[lane] + d, 0, NEAR_CACHE);
    }
};

// ------------------------------------------------------------------------------------------------ rows as they lie

// Keys and values stay where the cache has them and are widened in registers. A score is 16 sums over every 16th
// dimension, which one fixed tree adds.
//
// DIM: the head dimension where the compiler knows it, which unrolls all loops over dimensions; 0 otherwise.
template <int DIM>
struct Dimensions {
    static constexpr int dim = DIM, padded_dim = padded(DIM);
    explicit Dimensions(int) {}
};
template <>
struct Dimensions<0> {
    const int dim, padded_dim;
    explicit Dimensions(int head_dim) : dim(head_dim), padded_dim(padded(head_dim)) {}
};

template <class T, int DIM = 0>
struct RowTile : Dimensions<DIM>, NextBlock<T> {
    using Dimensions<DIM>::dim, Dimensions<DIM>::padded_dim;
    using Stored = T;
    static constexpr bool DENORMALS_ARE_ZERO = false;
    const T *keys[KEY_BLOCK], *values[KEY_BLOCK];

    RowTile(float*, int head_dim) : Dimensions<DIM>(head_dim) {}

    // With zeros behind the last dimension, where the next head's numbers are.
    const void* query(const float* q, float* memory) const {
        for (int d = 0; d < dim; d += LANES) store(memory + d, load_first(q + d, dim - d));
        return memory;
    }

    void put_keys(int first, int last, const T* const* rows) {
        for (int lane = first; lane < last; ++lane) keys[lane] = rows[lane];
    }
    void put_values(int first, int last, const T* const* rows) {
        for (int lane = first; lane < last; ++lane) values[lane] = rows[lane];
    }

    // Computes the scores of N queries for the lanes seen; the other lanes are 0.
    template <int N>
    void score(const State* states, Seen seen, F16 (*scores)[VECTORS]) const {
        for (int i = 0; i < VECTORS; ++i) {
            alignas(64) float halves[N][LANES][HALF];
            for (int j = 0; j < LANES; ++j) {
                const int lane = i * LANES + j;
                this->fetch_key(lane, 0, dim);
                F16 sums[N];
                for (int n = 0; n < N; ++n) sums[n] = f16(0.0f);
                if (lane >= seen.first && lane < seen.last) {
                    const T* key = keys[lane];
                    for (int d = 0; d < dim; d += LANES) {
                        const F16 part = load_first(key + d, dim - d);
                        for (int n = 0; n < N; ++n)
                            sums[n] = madd(load(static_cast<const float*>(states[n].q) + d), part, sums[n]);
                    }
                }
                for (int n = 0; n < N; ++n) store_half_sum(halves[n][j], sums[n]);
            }
            for (int n = 0; n < N; ++n) scores[n][i] = sums_of_halves(halves[n]);
        }
    }

    struct Weights {
        alignas(64) float of[KEY_BLOCK];
    };
    // Stores 16 weights, and returns them as rounded by that.
    static F16 keep(Weights& weights, int lane, F16 weight) {
        store(weights.of + lane, weight);
        return weight;
    }

    // sums[n][c] += weight * value over the lanes seen, lane by lane, dimensions d + 16 c.
    template <int N, int CHUNKS>
    void add(int d, const Weights* weights, Seen seen, F16 (*sums)[CHUNKS]) const {
        for (int lane = seen.first; lane < seen.last; ++lane) {
            if (d % NextBlock<T>::LINE == 0) this->fetch_value(lane, d, d + CHUNKS * LANES);
            F16 value[CHUNKS];
            for (int c = 0; c < CHUNKS; ++c) value[c] = load_first(values[lane] + d + c * LANES, dim - d - c * LANES);
            for (int n = 0; n < N; ++n) {
                const F16 weight = f16(weights[n].of[lane]);
                for (int c = 0; c < CHUNKS; ++c) sums[n][c] = madd(weight, value[c], sums[n][c]);
            }
        }
    }

    // Chunks of 16 dimensions that N queries sum at once: as many as fit into registers.
    template <int N>
    static constexpr int chunks() {
        return N == 1 ? 4 : N == 2 ? 2 : WIDE_REGISTERS ? 2 : 1;
    }
};

// -------------------------------------------------------------------------------------- pairs of bfloat16

#if defined(__AVX512BF16__)

// What the layouts of pairs have in common: queries and weights rounded to bfloat16, and the operations on them.
struct Pairs : NextBlock<uint16_t> {
    using Stored = uint16_t;
    static constexpr bool DENORMALS_ARE_ZERO = false;
    int dim, padded_dim;

    explicit Pairs(int head_dim) : dim(head_dim), padded_dim(padded(head_dim)) {}

    const void* query(const float* q, float* memory) const {
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
            block[i] = {_mm512_castsi512_ps(rows[i] ? _mm512_maskz_loadu_epi32(some, rows[i] + 2 * d) : _mm512_setzero_si512())};
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
struct PairRowTile : Pairs {
    const uint16_t *keys[KEY_BLOCK], *values[KEY_BLOCK];

    PairRowTile(float*, int head_dim) : Pairs(head_dim) {}

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
struct PairTile : Pairs {
    uint32_t* keys;    // [padded_dim / 2][64]: two dimensions of a key in a word
    uint32_t* values;  // [32][padded_dim]: one dimension of two neighbouring keys in a word

    PairTile(float* memory, int head_dim)
        : Pairs(head_dim), keys(reinterpret_cast<uint32_t*>(memory)), values(keys + padded(head_dim) * KEY_BLOCK) {}

    void put_key(int lane, const uint16_t* key) const {
        for (int d = 0; d < dim / 2; ++d) std::memcpy(keys + d * KEY_BLOCK + lane, key + 2 * d, 4);
    }
    void put_16_keys(int lane, const uint16_t* const* rows) const {
        for (int d = 0; d < dim / 2; d += LANES) {
            const int count = dim / 2 - d < LANES ? dim / 2 - d : LANES;
            F16 block[LANES];
            words_of_keys(lane, d, count, rows, block);
            for (int i = 0; i < count; ++i) store(reinterpret_cast<float*>(keys + (d + i) * KEY_BLOCK + lane), block[i]);
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
                value[c] = (__m512bh)_mm512_and_si512(_mm512_loadu_si512(values + pair * padded_dim + d + c * LANES), keep);
            for (int n = 0; n < N; ++n) {
                int word;
                std::memcpy(&word, weights[n].of + 2 * pair, 4);
                const __m512bh weight = (__m512bh)_mm512_set1_epi32(word);
                for (int c = 0; c < CHUNKS; ++c) sums[n][c].v = _mm512_dpbf16_ps(sums[n][c].v, weight, value[c]);
            }
        }
    }
};

#endif

#if defined(__AVX512BF16__)

// Keys are turned once, so that a vector holds a number of 16 keys and a score is one sum. Everything is multiplied as
// floats. Pairs of bfloat16 give the bits of PairTile: the odd one of a pair is added first, and denormals are zeros.
template <class T, int DIM = 0>
struct TurnedTile : Dimensions<DIM>, NextBlock<T> {
    using Dimensions<DIM>::dim, Dimensions<DIM>::padded_dim;
    using Stored = T;
    static constexpr bool PAIRS = sizeof(T) == 2, DENORMALS_ARE_ZERO = PAIRS;
    float* keys;                    // [dim][64]; of pairs, the odd dimension is before the even one
    const T* values[KEY_BLOCK];     // stay where they are

    TurnedTile(float* memory, int head_dim)
        : Dimensions<DIM>(head_dim), keys(memory) {}

    // The dimensions in the order of the keys.
    const void* query(const float* q, float* memory) const {
        if constexpr (PAIRS) {
            alignas(64) uint16_t halves[LANES];
            for (int d = 0; d < dim; d += LANES) {
                narrow(load_first(q + d, dim - d), halves);
                for (int i = 0; i < LANES; ++i) memory[d + i] = widen(halves[i ^ 1]);
            }
        } else {
            for (int d = 0; d < dim; d += LANES) store(memory + d, load_first(q + d, dim - d));
        }
        return memory;
    }

    // The first `count` of 16 keys, and zeros.
    void put_16_keys(int lane, int count, const T* const* rows) const {
        constexpr int PER_WORD = PAIRS ? 2 : 1;
        const int num_words = dim / PER_WORD;
        for (int d = 0; d < num_words; d += LANES) {
            const int n = num_words - d < LANES ? num_words - d : LANES;
            const __mmask16 some = static_cast<__mmask16>((1u << n) - 1);
            F16 block[LANES];
            const auto word = [&](int i) { return _mm512_maskz_loadu_epi32(some, rows[i] + PER_WORD * d); };
            if (count >= LANES)
                for (int i = 0; i < LANES; ++i) block[i].v = _mm512_castsi512_ps(word(i));
            else
                for (int i = 0; i < LANES; ++i) block[i].v = _mm512_castsi512_ps(i < count ? word(i) : _mm512_setzero_si512());
            transpose(block);
            for (int i = 0; i < n; ++i) {
                float* const to = keys + static_cast<size_t>(PER_WORD * (d + i)) * KEY_BLOCK + lane;
                if constexpr (PAIRS) {
                    const Halves halves = WidePairStep::weights(&block[i]);
                    store(to, halves.odd), store(to + KEY_BLOCK, halves.even);
                } else {
                    store(to, block[i]);
                }
            }
        }
    }
    void put_key(int lane, const T* key) const {
        for (int d = 0; d < dim; ++d) keys[(PAIRS ? d ^ 1 : d) * KEY_BLOCK + lane] = widen(key[d]);
    }
    void put_keys(int first, int last, const T* const* rows) const {
        int lane = first;
        for (; lane < last && lane % LANES != 0; ++lane) put_key(lane, rows[lane]);
        for (; lane + 4 < last; lane += LANES) put_16_keys(lane, last - lane, rows + lane);
        for (; lane < last; ++lane) put_key(lane, rows[lane]);
    }
    void put_values(int first, int last, const T* const* rows) {
        for (int lane = first; lane < last; ++lane) values[lane] = rows[lane];
    }

    template <int N, int V>
    void score(const State* states, F16 (*scores)[VECTORS]) const {
        F16 sums[N][V];
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < V; ++i) sums[n][i] = f16(0.0f);
        for (int d = 0; d < dim; ++d) {
            F16 key[V];
            for (int i = 0; i < V; ++i) key[i] = load(keys + d * KEY_BLOCK + i * LANES);
            if (d < KEY_BLOCK) this->fetch_key(d, 0, dim);
            for (int n = 0; n < N; ++n) {
                const F16 x = f16(static_cast<const float*>(states[n].q)[d]);
                for (int i = 0; i < V; ++i) sums[n][i] = madd(key[i], x, sums[n][i]);
            }
        }
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < V; ++i) scores[n][i] = sums[n][i];
    }
    template <int N>
    void score(const State* states, Seen seen, F16 (*scores)[VECTORS]) const {
        if (seen.last > 3 * LANES) return score<N, 4>(states, scores);
        if (seen.last > 2 * LANES) return score<N, 3>(states, scores);
        if (seen.last > LANES) return score<N, 2>(states, scores);
        score<N, 1>(states, scores);
    }

    static F16 load_some(__mmask16 some, const float* p) { return {_mm512_maskz_loadu_ps(some, p)}; }
    static F16 load_some(__mmask16 some, const uint16_t* p) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)), 16))};
    }

    struct Weights {
        alignas(64) float of[KEY_BLOCK];
    };
    static F16 keep(Weights& weights, int lane, F16 weight) {
        if constexpr (PAIRS) {
            const __m256i halves = (__m256i)_mm512_cvtneps_pbh(weight.v);
            weight = {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
        }
        store(weights.of + lane, weight);
        return weight;
    }

    template <int N>
    static constexpr int chunks() {
        return 4;
    }

    // Adds a lane that is seen, or zeros in place of one that is not and may be NaN.
    template <int N, int CHUNKS>
    FORERUN_INLINE void add_lane(int d, int lane, bool is_seen, __mmask16 last_chunk, const Weights* weights,
                                 F16 (&sums)[N][CHUNKS]) const {
        if (d % NextBlock<T>::LINE == 0) this->fetch_value(lane, d, d + CHUNKS * LANES);
        F16 value[CHUNKS];
        for (int c = 0; c < CHUNKS; ++c)
            value[c] = is_seen ? load_some(c + 1 < CHUNKS ? 0xffff : last_chunk, values[lane] + d + c * LANES) : f16(0.0f);
        for (int n = 0; n < N; ++n) {
            const F16 weight = f16(weights[n].of[lane]);
            for (int c = 0; c < CHUNKS; ++c) sums[n][c] = madd(value[c], weight, sums[n][c]);
        }
    }

    template <int N, int CHUNKS>
    void add(int d, const Weights* weights, Seen seen, F16 (*to)[CHUNKS]) const {
        const int left = dim - d - (CHUNKS - 1) * LANES;
        const __mmask16 some = static_cast<__mmask16>(left < LANES ? (1u << left) - 1 : 0xffffu);  // of the last chunk
        F16 sums[N][CHUNKS];
        for (int n = 0; n < N; ++n)
            for (int c = 0; c < CHUNKS; ++c) sums[n][c] = to[n][c];
        int lane = seen.first;
        if constexpr (PAIRS) {
            if (lane % 2 == 1) {
                add_lane<N, CHUNKS>(d, lane, true, some, weights, sums);
                add_lane<N, CHUNKS>(d, lane - 1, false, some, weights, sums);
                ++lane;
            }
            for (; lane + 1 < seen.last; lane += 2) {
                add_lane<N, CHUNKS>(d, lane + 1, true, some, weights, sums);
                add_lane<N, CHUNKS>(d, lane, true, some, weights, sums);
            }
            if (lane < seen.last) add_lane<N, CHUNKS>(d, lane + 1, false, some, weights, sums);
        }
        for (; lane < seen.last; ++lane) add_lane<N, CHUNKS>(d, lane, true, some, weights, sums);
        for (int n = 0; n < N; ++n)
            for (int c = 0; c < CHUNKS; ++c) to[n][c] = sums[n][c];
    }
};

#endif

// --------------------------------------------------------------------------------------- from the cache

// Returns the depth of a row of the run below the cached rows.
inline int depth_of(const Run& run, int row) {
    if (!run.parents) return row;
    int depth = 0;
    for (int at = run.parents[run.pending + row]; at >= 0; at = run.parents[at]) ++depth;
    return depth;
}

// Returns the index, among pending rows and the run's own, of a row's ancestor at a depth; in a chain it is the depth.
inline int ancestor_at(const Run& run, int row, int own_depth, int depth) {
    if (!run.parents) return depth;
    int at = run.pending + row;
    for (int d = own_depth; d > depth; --d) at = run.parents[at];
    return at;
}

// Where the rows of lanes [first, last) have their keys and values, of the block that begins at position `start`. All of
// them are cached.
template <class T>
void find_cached(const Attention& a, const Run& run, int kv_head, int start, int first, int last, const T** keys, const T** values) {
    const int64_t width = static_cast<int64_t>(a.num_kv_heads) * a.head_dim, offset = static_cast<int64_t>(kv_head) * a.head_dim;
    const T *const all_keys = static_cast<const T*>(a.keys) + offset, *const all_values = static_cast<const T*>(a.values) + offset;
    const int32_t* const rows = run.rows + start;
    for (int lane = first; lane < last; ++lane) {
        keys[lane] = all_keys + rows[lane] * width;
        values[lane] = all_values + rows[lane] * width;
    }
}

// Has the cached rows of the block that begins at position `start` prefetched while the one before it is read: they lie far
// apart, so the processor does not prefetch them itself.
template <class Tile>
void fetch_next(const Attention& a, const Run& run, Tile& tile, int kv_head, int start) {
    const int left = run.cached - start;
    tile.num_next = left < 0 ? 0 : left < KEY_BLOCK ? left : KEY_BLOCK;
    find_cached(a, run, kv_head, start, 0, tile.num_next, tile.next_keys, tile.next_values);
}

// Fills lanes [first, last) of the block that begins at position `start`, as `row` of the run sees them.
template <class Tile>
void fill_tile(const Attention& a, const Run& run, Tile& tile, int kv_head, int start, int first, int last, int row,
               int own_depth) {
    using T = typename Tile::Stored;
    const size_t width = static_cast<size_t>(a.num_kv_heads) * static_cast<size_t>(a.head_dim);
    const T *keys[KEY_BLOCK], *values[KEY_BLOCK];
    const int committed = run.cached - start, own = committed < first ? first : committed < last ? committed : last;
    find_cached(a, run, kv_head, start, first, own, keys, values);
    for (int lane = own; lane < last; ++lane) {
        const int index = run.cached + ancestor_at(run, row, own_depth, lane - committed);
        const size_t at = static_cast<size_t>(run.rows[index]) * width + static_cast<size_t>(kv_head) * a.head_dim;
        keys[lane] = static_cast<const T*>(a.keys) + at;
        values[lane] = static_cast<const T*>(a.values) + at;
    }
    tile.put_keys(first, last, keys);
    tile.put_values(first, last, values);
}

}  // namespace FORERUN_ISA
}  // namespace forerun
