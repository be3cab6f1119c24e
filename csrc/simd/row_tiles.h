// Keys and values as they lie, on every instruction set.
//
// They stay where the cache has them and are widened in registers. A score is 16 sums over every 16th dimension, which one
// fixed tree adds.
#pragma once

#include "../rounded_tile.h"
#include "../tile.h"

namespace forerun {
namespace FORERUN_ISA {

template <class T, int DIM = 0>
struct RowTile : Dimensions<DIM>, NextBlock<T> {
    using Dimensions<DIM>::dim, Dimensions<DIM>::padded_dim;
    using Stored = T;
    static constexpr bool DENORMALS_ARE_ZERO = false;
    const T *keys[KEY_BLOCK], *values[KEY_BLOCK];

    RowTile(float*, const Attention& a) : Dimensions<DIM>(a.head_dim) {}

    // With zeros behind the last dimension, where the next head's numbers are.
    const void* query(const float* q, const uint16_t*, float* memory) const {
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

// Calls `use` with the type of the tile that suits so many queries of each key head.
template <class Use>
void with_tile(const Attention& a, int, const Use& use) {
    if (a.type == Type::int8) return with_rounded_tile(a, use);
    if (a.type == Type::float32) return use(As<RowTile<float>>());
    if (a.head_dim == 64) return use(As<RowTile<uint16_t, 64>>());
    if (a.head_dim == 128) return use(As<RowTile<uint16_t, 128>>());
    use(As<RowTile<uint16_t>>());
}

}  // namespace FORERUN_ISA
}  // namespace forerun
