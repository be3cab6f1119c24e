// Keys turned once, so that a vector holds a number of 16 keys and a score is one sum; in the operations of every set.
//
// Everything is multiplied as floats. Pairs of bfloat16 have the bits that an instruction gives for pairs
// (avx512_tiles.h): the odd one of a pair is added first, and denormals are zeros.
#pragma once

#include "../linear.h"
#include "../rounded_tile.h"
#include "../tile.h"

namespace forerun {
namespace FORERUN_ISA {

// The sixteen floats of a vector in memory. A compiler that copies a whole F16 of two registers keeps it in memory all
// along, and a sum took twice as long.
inline float* floats_of(F16& vector) { return reinterpret_cast<float*>(&vector); }

template <class T, int DIM = 0>
struct TurnedTile : Dimensions<DIM>, NextBlock<T> {
    using Dimensions<DIM>::dim, Dimensions<DIM>::padded_dim;
    using Stored = T;
    static constexpr bool PAIRS = sizeof(T) == 2, DENORMALS_ARE_ZERO = PAIRS;
    float* keys;                 // [dim][64]; of pairs, the odd dimension is before the even one
    const T* values[KEY_BLOCK];  // stay where they are

    TurnedTile(float* memory, const Attention& a) : Dimensions<DIM>(a.head_dim), keys(memory) {}

    // The dimensions in the order of the keys.
    const void* query(const float* q, const uint16_t*, float* memory) const {
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
            F16 block[LANES];
            const auto words = [&](int i) { return first_words(rows[i] + PER_WORD * d, n); };
            if (count >= LANES)
                for (int i = 0; i < LANES; ++i) block[i] = words(i);
            else
                for (int i = 0; i < LANES; ++i) block[i] = i < count ? words(i) : f16(0.0f);
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

    // Of V vectors of keys, from one on.
    template <int N, int V>
    void score(const State* states, int first, F16 (*scores)[VECTORS]) const {
        if constexpr (ROUNDS_ONCE || !PAIRS) score_by<Once, N, V>(states, first, scores);
        else with_pairs([&](auto how) { score_by<decltype(how), N, V>(states, first, scores); });
    }
    template <class How, int N, int V>
    FORERUN_INLINE void score_by(const State* states, int first, F16 (*scores)[VECTORS]) const {
        F16 sums[N][V];
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < V; ++i) sums[n][i] = f16(0.0f);
        for (int d = 0; d < dim; ++d) {
            F16 key[V];
            for (int i = 0; i < V; ++i) key[i] = load(keys + d * KEY_BLOCK + (first + i) * LANES);
            if (first == 0 && d < KEY_BLOCK) this->fetch_key(d, 0, dim);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const F16 x = f16(static_cast<const float*>(states[n].q)[d]);
#pragma GCC unroll 4
                for (int i = 0; i < V; ++i) sums[n][i] = How::add(key[i], x, sums[n][i]);
            }
        }
        if constexpr (!ROUNDS_ONCE) finish_sums(sums);
        for (int n = 0; n < N; ++n)
            for (int i = 0; i < V; ++i) store(floats_of(scores[n][first + i]), sums[n][i]);
    }
    template <int N>
    void score(const State* states, Seen seen, F16 (*scores)[VECTORS]) const {
        if constexpr (WIDE_REGISTERS) {
            if (seen.last > 3 * LANES) return score<N, 4>(states, 0, scores);
            if (seen.last > 2 * LANES) return score<N, 3>(states, 0, scores);
            if (seen.last > LANES) return score<N, 2>(states, 0, scores);
            return score<N, 1>(states, 0, scores);
        }
        constexpr int V = N == 1 ? 4 : N == 2 ? 2 : 1;  // sums that fit into the registers
        for (int i = 0; i * LANES < seen.last; i += V) score<N, V>(states, i, scores);
    }

    struct Weights {
        alignas(64) float of[KEY_BLOCK];
    };
    static F16 keep(Weights& weights, int lane, F16 weight) {
        if constexpr (PAIRS) {
            alignas(64) uint16_t halves[LANES];
            narrow(weight, halves);
            weight = load_bf16(halves);
        }
        store(weights.of + lane, weight);
        return weight;
    }

    template <int N>
    static constexpr int chunks() {
        return WIDE_REGISTERS || N == 1 ? 4 : N == 2 ? 2 : 1;
    }

    // Adds a lane that is seen, or zeros in place of one that is not and may be NaN. last_chunk: the dimensions of the
    // last chunk.
    template <class How, int N, int CHUNKS>
    FORERUN_INLINE void add_lane(int d, int lane, bool is_seen, int last_chunk, const Weights* weights,
                                 F16 (&sums)[N][CHUNKS]) const {
        if (d % NextBlock<T>::LINE == 0) this->fetch_value(lane, d, d + CHUNKS * LANES);
        F16 value[CHUNKS];
#pragma GCC unroll 4
        for (int c = 0; c < CHUNKS; ++c)
            value[c] =
                is_seen ? load_first(values[lane] + d + c * LANES, c + 1 < CHUNKS ? LANES : last_chunk) : f16(0.0f);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const F16 weight = f16(weights[n].of[lane]);
#pragma GCC unroll 4
            for (int c = 0; c < CHUNKS; ++c) sums[n][c] = How::add(value[c], weight, sums[n][c]);
        }
    }

    template <int N, int CHUNKS>
    void add(int d, const Weights* weights, Seen seen, F16 (*to)[CHUNKS]) const {
        if constexpr (ROUNDS_ONCE || !PAIRS) {
            add_by<Once, N, CHUNKS>(d, weights, seen, to);
        } else {
            F16 before[N][CHUNKS];
            std::memcpy(before, to, sizeof before);
            with_pairs([&](auto how) {
                std::memcpy(to, before, sizeof before);
                add_by<decltype(how), N, CHUNKS>(d, weights, seen, to);
            });
        }
    }
    template <class How, int N, int CHUNKS>
    FORERUN_INLINE void add_by(int d, const Weights* weights, Seen seen, F16 (*to)[CHUNKS]) const {
        const int left = dim - d - (CHUNKS - 1) * LANES;
        if (left >= LANES) return add_chunks<How, N, CHUNKS>(d, LANES, weights, seen, to);
        add_chunks<How, N, CHUNKS>(d, left, weights, seen, to);
    }
    template <class How, int N, int CHUNKS>
    FORERUN_INLINE void add_chunks(int d, int some, const Weights* weights, Seen seen, F16 (*to)[CHUNKS]) const {
        F16 sums[N][CHUNKS];
        for (int n = 0; n < N; ++n)
            for (int c = 0; c < CHUNKS; ++c) sums[n][c] = load(floats_of(to[n][c]));
        int lane = seen.first;
        if constexpr (PAIRS) {
            if (lane % 2 == 1) {
                add_lane<How, N, CHUNKS>(d, lane, true, some, weights, sums);
                add_lane<How, N, CHUNKS>(d, lane - 1, false, some, weights, sums);
                ++lane;
            }
            for (; lane + 1 < seen.last; lane += 2) {
                add_lane<How, N, CHUNKS>(d, lane + 1, true, some, weights, sums);
                add_lane<How, N, CHUNKS>(d, lane, true, some, weights, sums);
            }
            if (lane < seen.last) add_lane<How, N, CHUNKS>(d, lane + 1, false, some, weights, sums);
        }
        for (; lane < seen.last; ++lane) add_lane<How, N, CHUNKS>(d, lane, true, some, weights, sums);
        if constexpr (!ROUNDS_ONCE) finish_sums(sums);
        for (int n = 0; n < N; ++n)
            for (int c = 0; c < CHUNKS; ++c) store(floats_of(to[n][c]), sums[n][c]);
    }
};

// Calls `use` with the type of the turned tile of these numbers.
template <class Use>
void with_turned_tile(const Attention& a, const Use& use) {
    if (a.type == Type::float32 && a.head_dim == 64) return use(As<TurnedTile<float, 64>>());
    if (a.type == Type::float32) return use(As<TurnedTile<float>>());
    if (a.head_dim == 64) return use(As<TurnedTile<uint16_t, 64>>());
    use(As<TurnedTile<uint16_t>>());
}

}  // namespace FORERUN_ISA
}  // namespace forerun
