// Keys and values that a cache has as bytes (rounding.h), on every instruction set.
//
// A query is rounded to bytes as well, and multiplied with keys as a row is with weights of 8 bits: the keys of a block
// are turned into the layout of such weights. The factors of values, weight times scale, are rounded to bytes relative
// to the largest in the block, and four keys are added at once. All sums within a block are exact integers, so the
// order in which they are added decides nothing, and a lane that a query does not see changes nothing: it is multiplied
// by 0.
#pragma once

#include "quantised.h"
#include "tile.h"

namespace forerun {
namespace FORERUN_ISA {

alignas(16) constexpr int8_t NO_TABLE[16] = {};
// A code that values are multiplied by: two of its products fit into 16 bits (AVX2).
constexpr float MOST_WEIGHT = 127.0f;
// A weight times a scale that counts as zero where no larger one is in a block.
constexpr float LEAST_WEIGHT = 1e-30f;

// A size, which the compiler knows where it is not 0.
template <int SIZE>
struct Whole {
    explicit Whole(int) {}
    constexpr operator int() const { return SIZE; }
};
template <>
struct Whole<0> {
    const int size;
    explicit Whole(int s) : size(s) {}
    operator int() const { return size; }
};

// KEY_DIM: as DIM, of keys.
template <int DIM = 0, int KEY_DIM = 0>
struct RoundedTile : Dimensions<DIM>, NextBlock<int8_t> {
    using Dimensions<DIM>::dim, Dimensions<DIM>::padded_dim;
    using Stored = int8_t;
    static constexpr bool DENORMALS_ARE_ZERO = false, ADDS_BLOCKS = true;
    static constexpr int QUERIES = 8, AT_ONCE = WIDE_REGISTERS ? 4 : 2;  // whose sums fit into the registers

    char* keys;                     // [units][64 / 8][8 words][8 keys], as `dot` takes them
    uint16_t* key_scales;           // [units][64]
    int8_t* values;                 // [64 / 4][units][128]: of four neighbouring keys, in the order of `put_fours`
    uint16_t* value_scales;         // [groups][64]
    const int8_t* rows[KEY_BLOCK];  // of values
    Whole<KEY_DIM> key_dim;

    RoundedTile(float* memory, const Attention& a)
        : Dimensions<DIM>(a.head_dim), keys(reinterpret_cast<char*>(memory)), key_dim(a.order.key_dim) {
        key_scales = reinterpret_cast<uint16_t*>(keys + key_units() * UNIT * KEY_BLOCK);
        values = reinterpret_cast<int8_t*>(key_scales + key_units() * KEY_BLOCK);
        value_scales = reinterpret_cast<uint16_t*>(values + num_units() * UNIT * KEY_BLOCK);
    }

    int key_units() const { return (key_dim + UNIT - 1) / UNIT; }
    int num_units() const { return (dim + UNIT - 1) / UNIT; }  // of values

    const void* query(const float* q, const uint16_t* order, float* memory) const {
        float ordered[MOST_KEY_DIM];
        for (int i = 0; i < key_dim && order; ++i) ordered[i] = q[order[i]];
        round_row(order ? ordered : q, key_dim, key_units() * UNIT, reinterpret_cast<RoundedUnit*>(memory), 1);
        return memory;
    }

    // ------------------------------------------------------------------------------------------------ a block

    char* words_of(int unit, int lane) const {
        return keys + (unit * (KEY_BLOCK / 8) + lane / 8) * 8 * UNIT + lane % 8 * 4;
    }
    // Whatever is behind the last dimension, in the last word or in memory, is multiplied by 0.
    void put_key(int unit, int lane, const int8_t* key) const {
        const int num_words = (key_dim - unit * UNIT + 3) / 4;
        for (int j = 0; j < UNIT_WORDS && j < num_words; ++j)
            std::memcpy(words_of(unit, lane) + 32 * j, key + unit * UNIT + 4 * j, 4);
    }
    void put_keys(int first, int last, const int8_t* const* from) const {
        const int units = key_units(), whole = key_dim / UNIT;
        for (int lane = first, count; lane < last; lane += count) {
            count = lane % 8 == 0 && lane + 8 <= last ? 8 : 1;
            for (int i = lane; i < lane + count; ++i) {
                this->fetch_key(i, 0, key_dim + 2 * units);
                for (int u = 0; u < units; ++u)
                    std::memcpy(key_scales + u * KEY_BLOCK + i, from[i] + key_dim + 2 * u, 2);
            }
            for (int u = 0; u < units; ++u) {
                if (count == 8 && u < whole) turn_words(from + lane, u * UNIT, words_of(u, lane));
                else
                    for (int i = lane; i < lane + count; ++i) put_key(u, i, from[i]);
            }
        }
    }

    void put_four(int lane, const int8_t* const* from) const {
        int8_t* to = values + lane / 4 * num_units() * 4 * UNIT;
        for (int u = 0; u < dim / UNIT; ++u, to += 4 * UNIT) {
            const int8_t* const at[] = {from[0] + u * UNIT, from[1] + u * UNIT, from[2] + u * UNIT, from[3] + u * UNIT};
            put_fours(at, to);
        }
        const int left = dim % UNIT;
        if (left == 0) return;
        int8_t rest[4][UNIT] = {};
        for (int i = 0; i < 4; ++i) std::memcpy(rest[i], from[i] + dim - left, static_cast<size_t>(left));
        const int8_t* const at[] = {rest[0], rest[1], rest[2], rest[3]};
        put_fours(at, to);
    }
    // The lanes before the first have been put already. Lanes of a four that are not there have the values of one that
    // is.
    void put_values(int first, int last, const int8_t* const* from) {
        const int num_groups = value_groups(dim);
        for (int lane = first; lane < last; ++lane) {
            this->fetch_value(lane, 0, dim + 2 * num_groups);
            rows[lane] = from[lane];
            for (int g = 0; g < num_groups; ++g)
                std::memcpy(value_scales + g * KEY_BLOCK + lane, from[lane] + dim + 2 * g, 2);
        }
        for (int lane = last; lane % 4 != 0; ++lane) rows[lane] = rows[last - 1];
        for (int lane = first / 4 * 4; lane < last; lane += 4) put_four(lane, rows + lane);
    }

    // ------------------------------------------------------------------------------------------------ keys

    // Adds, unit by unit, scale of the query * scale of the key * their sum.
    template <int N>
    void score(const State* states, Seen seen, F16 (*scores)[VECTORS]) const {
        constexpr int FIRST = N < 4 ? N : 4, REST = N - FIRST;
        score_some<FIRST>(states, seen.last, scores);
        if constexpr (REST > 0) score<REST>(states + FIRST, seen, scores + FIRST);
    }
    template <int N>
    void score_some(const State* states, int end, F16 (*scores)[VECTORS]) const {
        constexpr int WIDTH = SIXTEENS<1>, MOST = KEY_DIM > 0 ? KEY_DIM : MOST_KEY_DIM;
        RoundedUnit x[MOST / UNIT + 1][N];  // side by side, as `dot` takes them
        for (int u = 0; u < key_units(); ++u)
            for (int n = 0; n < N; ++n) x[u][n] = static_cast<const RoundedUnit*>(states[n].q)[u];
        for (int i = 0; i < VECTORS && i * LANES < end; i += WIDTH) {
            F16 found[WIDTH][N];
            for (int w = 0; w < WIDTH; ++w)
                for (int n = 0; n < N; ++n) found[w][n] = f16(0.0f);
            for (int u = 0; u < key_units(); ++u) {
                I16 sums[WIDTH][N];
                dot<Codes<8>, 0, UNIT_WORDS>(words_of(u, i * LANES), NO_TABLE, x[u], sums);
                for (int w = 0; w < WIDTH; ++w) {
                    const F16 scale = load(key_scales + u * KEY_BLOCK + (i + w) * LANES);
                    for (int n = 0; n < N; ++n)
                        found[w][n] = madd(f16(x[u][n].scale) * scale, to_float(sums[w][n]), found[w][n]);
                }
            }
            for (int w = 0; w < WIDTH; ++w)
                for (int n = 0; n < N; ++n) scores[n][i + w] = found[w][n];
        }
    }

    // ------------------------------------------------------------------------------------------------ values

    struct Weights {
        alignas(64) float of[KEY_BLOCK];
    };
    static F16 weight_of(F16 score) { return rough_exp(score); }  // which is rounded to a byte
    static F16 keep(Weights& weights, int lane, F16 weight) {
        store(weights.of + lane, weight);
        return weight;
    }

    // Rounds weights times the scales of a group of values; a code of 1 stands for steps[n], which is NaN where one is
    // no number.
    template <int N>
    void round_weights(const Weights* weights, const Seen* seen, int end, const uint16_t* scales,
                       uint8_t (*codes)[KEY_BLOCK], float* steps) const {
        F16 products[N][VECTORS], factors[VECTORS];
        alignas(64) float tops[LANES] = {}, inverses[LANES];
        for (int i = 0; i < VECTORS; ++i) factors[i] = i * LANES < end ? load(scales + i * LANES) : f16(0.0f);
        for (int n = 0; n < N; ++n) {
            for (int i = 0; i < VECTORS; ++i)
                products[n][i] = i * LANES < end ? load(weights[n].of + i * LANES) * factors[i] : f16(0.0f);
            hide(seen[n], products[n], 0.0f);
            F16 most = f16(0.0f);
            for (int i = 0; i < VECTORS; ++i) most = max(products[n][i], most);
            tops[n] = largest(most);
        }
        const F16 top = load(tops), least = f16(LEAST_WEIGHT), none = f16(0.0f);
        store(inverses, less_than(top, least, none, f16(MOST_WEIGHT) / top));
        store(tops, less_than(top, least, none, top * f16(1.0f / MOST_WEIGHT)));
        for (int n = 0; n < N; ++n) {
            const F16 inverse = f16(inverses[n]);
            F16 sum = none;
            for (int i = 0; i < VECTORS; ++i) {
                const F16 scaled = products[n][i] * inverse;
                put_bytes(scaled, codes[n] + i * LANES);
                sum = sum + scaled;
            }
            steps[n] = any_at_least(sum, 2 * VECTORS * MOST_WEIGHT) ? __builtin_nanf("") : tops[n];
        }
    }

    template <int N>
    void add_unit(int u, Seen seen, const uint8_t (*codes)[KEY_BLOCK], const float* steps, const float* scales,
                  State* states) const {
        I16 sums[N][2];
        for (int n = 0; n < N; ++n) sums[n][0] = sums[n][1] = no_sums();
        for (int four = seen.first / 4; 4 * four < seen.last; ++four) {
            const int8_t* const at = values + (four * num_units() + u) * 4 * UNIT;
            const I16 first = load_fours(at), second = load_fours(at + 2 * UNIT);
            for (int n = 0; n < N; ++n) {
                int32_t weights;
                std::memcpy(&weights, codes[n] + 4 * four, 4);
                sums[n][0] = add_fours(sums[n][0], weights, first);
                sums[n][1] = add_fours(sums[n][1], weights, second);
            }
        }
        for (int n = 0; n < N; ++n) {
            order_sums(sums[n]);
            for (int c = 0; c < 2 && u * UNIT + c * LANES < padded_dim; ++c) {
                float* const to = states[n].values + u * UNIT + c * LANES;
                store(to, madd(to_float(sums[n][c]), f16(steps[n]), load(to) * f16(scales[n])));
            }
        }
    }

    template <int N>
    void add_units(int u, Seen seen, const uint8_t (*codes)[KEY_BLOCK], const float* steps, const float* scales,
                   State* states) const {
        constexpr int FIRST = N < AT_ONCE ? N : AT_ONCE, REST = N - FIRST;
        add_unit<FIRST>(u, seen, codes, steps, scales, states);
        if constexpr (REST > 0) add_units<REST>(u, seen, codes + FIRST, steps + FIRST, scales + FIRST, states + FIRST);
    }
    template <int N>
    void add_block(const Weights* weights, const Seen* seen, Seen any, const float* scales, State* states) const {
        alignas(64) uint8_t codes[N][KEY_BLOCK];
        float steps[N];
        for (int u = 0; u < num_units(); ++u) {
            if (u * UNIT % VALUE_GROUP == 0)
                round_weights<N>(weights, seen, any.last, value_scales + u * UNIT / VALUE_GROUP * KEY_BLOCK, codes,
                                 steps);
            add_units<N>(u, any, codes, steps, scales, states);
        }
    }
};

// Calls `use` with the type of the tile for keys and values in bytes.
template <class Use>
void with_rounded_tile(const Attention& a, const Use& use) {
    const auto has = [&](int dim, int more) { return a.head_dim == dim && a.order.key_dim == dim + more; };
    if (has(64, 0)) return use(As<RoundedTile<64, 64>>());
    if (has(64, REFINED)) return use(As<RoundedTile<64, 64 + REFINED>>());
    if (has(128, 0)) return use(As<RoundedTile<128, 128>>());
    if (has(128, REFINED)) return use(As<RoundedTile<128, 128 + REFINED>>());
    use(As<RoundedTile<>>());
}

}  // namespace FORERUN_ISA
}  // namespace forerun
