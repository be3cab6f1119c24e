#include "stored.h"

#include <cstring>

#include "grids.h"

namespace forerun {

namespace {

uint16_t half_at(const uint8_t* data) {
    uint16_t half;
    std::memcpy(&half, data, 2);
    return half;
}

// n bytes: the low four bits become the first n codes, the high ones the next n.
void put_nibbles(const uint8_t* data, int n, uint8_t* codes) {
    for (int i = 0; i < n; ++i) codes[i] = data[i] & 15;
    for (int i = 0; i < n; ++i) codes[n + i] = static_cast<uint8_t>(data[i] >> 4);
}

void put_fifth_bits(const uint8_t* data, uint8_t* codes) {
    for (int i = 0; i < UNIT; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (data[i / 8] >> i % 8 & 1) << 4);
}

uint16_t negative(uint16_t half) { return half ^ 0x8000u; }

void q4_0(const uint8_t* data, UnpackedBlock& out) {
    out.scales[0] = half_at(data);
    put_nibbles(data + 2, 16, out.codes);
}

void q4_1(const uint8_t* data, UnpackedBlock& out) {
    out.scales[0] = half_at(data), out.subtracted = negative(half_at(data + 2));
    put_nibbles(data + 4, 16, out.codes);
}

void q5_0(const uint8_t* data, UnpackedBlock& out) {
    out.scales[0] = half_at(data);
    put_nibbles(data + 6, 16, out.codes);
    put_fifth_bits(data + 2, out.codes);
}

void q5_1(const uint8_t* data, UnpackedBlock& out) {
    out.scales[0] = half_at(data), out.subtracted = negative(half_at(data + 2));
    put_nibbles(data + 8, 16, out.codes);
    put_fifth_bits(data + 4, out.codes);
}

void q8_0(const uint8_t* data, UnpackedBlock& out) {
    out.scales[0] = half_at(data);
    for (int i = 0; i < UNIT; ++i) out.codes[i] = data[2 + i] ^ 128;  // from -128 on -> from 0 on
}

// The numbers of Q4_K and Q5_K: two halves, then 6 bits for each unit's scale and minimum.
void put_levels(const uint8_t* data, UnpackedBlock& out) {
    out.scales[0] = half_at(data), out.subtracted = half_at(data + 2);
    const uint8_t *low = data + 4, *middle = data + 8, *high = data + 12;
    for (int i = 0; i < 4; ++i) {
        out.scale_levels[i][0] = static_cast<int8_t>(low[i] & 63);
        out.scale_levels[4 + i][0] = static_cast<int8_t>((high[i] & 15) | (low[i] >> 6) << 4);
        out.minimum_levels[i][0] = middle[i] & 63;
        out.minimum_levels[4 + i][0] = static_cast<uint8_t>(high[i] >> 4 | (middle[i] >> 6) << 4);
    }
}

void q4_k(const uint8_t* data, UnpackedBlock& out) {
    put_levels(data, out);
    for (int i = 0; i < 4; ++i) put_nibbles(data + 16 + 32 * i, 32, out.codes + 64 * i);
}

void q5_k(const uint8_t* data, UnpackedBlock& out) {
    put_levels(data, out);
    for (int i = 0; i < 4; ++i) put_nibbles(data + 48 + 32 * i, 32, out.codes + 64 * i);
    for (int unit = 0; unit < 8; ++unit)  // bit `unit` of byte i belongs to weight i of that unit
        for (int i = 0; i < UNIT; ++i) {
            uint8_t& code = out.codes[unit * UNIT + i];
            code = static_cast<uint8_t>(code | (data[16 + i] >> unit & 1) << 4);
        }
}

void q6_k(const uint8_t* data, UnpackedBlock& out) {
    for (int half = 0; half < 2; ++half) put_nibbles(data + 64 * half, 64, out.codes + 128 * half);
    for (int unit = 0; unit < 8; ++unit) {
        const uint8_t* high = data + 128 + unit / 4 * 32;
        const int shift = unit % 4 * 2;
        for (int i = 0; i < UNIT; ++i) {
            uint8_t& code = out.codes[unit * UNIT + i];
            code = static_cast<uint8_t>(code | (high[i] >> shift & 3) << 4);
        }
        std::memcpy(out.scale_levels[unit], data + 192 + 2 * unit, 2);
    }
    out.scales[0] = half_at(data + 208);
}

// 64 bytes of pairs of bits: of each half the lowest ones first.
void put_quarters(const uint8_t* data, uint8_t* codes) {
    for (int i = 0; i < 8 * UNIT; ++i) codes[i] = data[i / 128 * UNIT + i % UNIT] >> i / UNIT % 4 * 2 & 3;
}

void q2_k(const uint8_t* data, UnpackedBlock& out) {
    for (int i = 0; i < 16; ++i) {
        out.scale_levels[i / 2][i % 2] = data[i] & 15;
        out.minimum_levels[i / 2][i % 2] = data[i] >> 4;
    }
    put_quarters(data + 16, out.codes);
    out.scales[0] = half_at(data + 80), out.subtracted = half_at(data + 82);
}

void q3_k(const uint8_t* data, UnpackedBlock& out) {
    put_quarters(data + 32, out.codes);
    for (int i = 0; i < 8 * UNIT; ++i)
        out.codes[i] = static_cast<uint8_t>(out.codes[i] | (data[i % UNIT] >> i / UNIT & 1) << 2);
    const uint8_t *low = data + 96, *high = data + 104;
    for (int i = 0; i < 16; ++i) {
        const int level = (low[i % 8] >> i / 8 * 4 & 15) | (high[i % 4] >> i / 4 * 2 & 3) << 4;
        out.scale_levels[i / 2][i % 2] = static_cast<int8_t>(level - 32);
    }
    out.scales[0] = half_at(data + 108);
}

void iq4_nl(const uint8_t* data, UnpackedBlock& out) { q4_0(data, out); }

void iq4_xs(const uint8_t* data, UnpackedBlock& out) {
    out.scales[0] = half_at(data);
    for (int u = 0; u < 8; ++u) {
        const int level = (data[4 + u / 2] >> u % 2 * 4 & 15) | (data[2 + u / 4] >> u % 4 * 2 & 3) << 4;
        out.scale_levels[u][0] = static_cast<int8_t>(level - 32);
        put_nibbles(data + 8 + 16 * u, 16, out.codes + UNIT * u);
    }
}

// The scale 2^(exponent - 128), for a table of doubled numbers up to 12, is a float of that exponent less 1. Below 2 it
// would be less than the least normal one, and from 253 on its weights are infinite: 0 for zeros, else what is no
// finite number.
void mxfp4(const uint8_t* data, UnpackedBlock& out) {
    put_nibbles(data + 1, 16, out.codes);
    uint8_t any = 0;
    for (int i = 0; i < UNIT; ++i) any = static_cast<uint8_t>(any | (out.codes[i] & 7));
    out.scales[0] = any == 0 ? 0 : data[0] < 2 || data[0] > 252 ? 255 : data[0] - 1u;
}

// Half of an E4M3 number as ggml reads it, without a sign and with 0 for 127, in float16.
uint16_t half_of_e4m3(uint8_t number) {
    const int exponent = number >> 3 & 15, mantissa = number & 7;
    if (number == 127) return 0;
    if (exponent > 0) return static_cast<uint16_t>((exponent + 7) << 10 | mantissa << 7);
    // Of 1 / 1024 each.
    static constexpr uint16_t LOWEST[] = {0, 0x1400, 0x1800, 0x1a00, 0x1c00, 0x1d00, 0x1e00, 0x1f00};
    return LOWEST[mantissa];
}

void nvfp4(const uint8_t* data, UnpackedBlock& out) {
    for (int i = 0; i < 4; ++i) {
        out.scales[i] = half_of_e4m3(data[i]);
        put_nibbles(data + 4 + 8 * i, 8, out.codes + 16 * i);
    }
}

// A four of grids.h with signs, as codes of a table whose upper half has the magnitudes, the lower their negatives.
void put_four(const char* digits, int signs, uint8_t* codes) {
    for (int i = 0; i < 4; ++i) codes[i] = static_cast<uint8_t>((digits[i] - '0' + 8) ^ (signs >> i & 1) * 15);
}

void iq3_s(const uint8_t* data, UnpackedBlock& out) {
    out.scales[0] = half_at(data);
    for (int i = 0; i < 2 * UNIT; ++i) {
        const int four = data[2 + i] | (data[66 + i / 8] >> i % 8 & 1) << 8;
        put_four(IQ3_S_FOURS + 4 * four, data[74 + i / 2] >> i % 2 * 4, out.codes + 4 * i);
    }
    for (int u = 0; u < 8; ++u)
        out.scale_levels[u][0] = static_cast<int8_t>(2 * (data[106 + u / 2] >> u % 2 * 4 & 15) + 1);
}

float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, exponent = half >> 10 & 31,
                   mantissa = half & 0x3ffu;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

void iq3_xxs(const uint8_t* data, UnpackedBlock& out) {
    const float scale = from_half(half_at(data)) / 4;
    std::memcpy(out.scales, &scale, 4);
    for (int u = 0; u < 8; ++u) {
        uint32_t word;  // four times 7 bits of signs, then 4 bits of the scale
        std::memcpy(&word, data + 66 + 4 * u, 4);
        out.scale_levels[u][0] = static_cast<int8_t>(2 * (word >> 28) + 1);
        for (int i = 0; i < 8; ++i) {
            // The eighth sign makes their number even.
            int signs = word >> i / 2 * 7 & 127, parity = signs ^ signs >> 4;
            parity ^= parity >> 2, parity ^= parity >> 1;
            signs |= (parity & 1) << 7;
            put_four(IQ3_XXS_FOURS + 4 * data[2 + 8 * u + i], signs >> i % 2 * 4, out.codes + UNIT * u + 4 * i);
        }
    }
}

Format with_zero(int bits) { return {bits, 1, 1, 2, false, Offset::zero, 1 << (bits - 1), false, {}, 0, nullptr}; }
Format with_minimum(int bits) { return {bits, 1, 1, 2, false, Offset::minimums, 0, false, {}, 0, nullptr}; }
Format two_levels(int bits, int groups, Offset offset, int zero) {
    return {bits, groups, 8, 2, true, offset, zero, false, {}, 0, nullptr};
}
constexpr int8_t IQ4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t E2M1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t ODD[] = {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15};
constexpr int8_t IQ3_XXS[] = {-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62};
Format with_table(const int8_t (&table)[16], int groups, int head_units, int number_bytes) {
    Format made{4, groups, head_units, number_bytes, head_units > 1, Offset::zero, 0, true, {}, 0, nullptr};
    std::memcpy(made.table, table, sizeof made.table);
    return made;
}

const StoredType TYPES[] = {
    {2, 1, 18, with_zero(4), q4_0},
    {3, 1, 20, with_minimum(4), q4_1},
    {6, 1, 22, with_zero(5), q5_0},
    {7, 1, 24, with_minimum(5), q5_1},
    {8, 1, 34, with_zero(8), q8_0},
    {12, 8, 144, two_levels(4, 1, Offset::minimums, 0), q4_k},
    {13, 8, 176, two_levels(5, 1, Offset::minimums, 0), q5_k},
    {14, 8, 210, two_levels(6, 2, Offset::zero, 32), q6_k},
    {20, 1, 18, with_table(IQ4, 1, 1, 2), iq4_nl},
    {23, 8, 136, with_table(IQ4, 1, 8, 2), iq4_xs},
    {39, 1, 17, with_table(E2M1, 1, 1, 1), mxfp4},
    {10, 8, 84, two_levels(2, 2, Offset::minimums, 0), q2_k},
    {11, 8, 110, two_levels(3, 2, Offset::zero, 4), q3_k},
    {21, 8, 110, with_table(ODD, 1, 8, 2), iq3_s},
    {18, 8, 98, with_table(IQ3_XXS, 1, 8, 4), iq3_xxs},
    {40, 2, 36, with_table(E2M1, 2, 1, 2), nvfp4},
};

float number_of(uint32_t bits, int number_bytes) {
    if (number_bytes == 2) return from_half(static_cast<uint16_t>(bits));
    const uint32_t whole = number_bytes == 4 ? bits : bits << 23;
    float found;
    std::memcpy(&found, &whole, sizeof found);
    return found;
}

}  // namespace

void StoredType::dequantise(const uint8_t* data, float* out) const {
    UnpackedBlock block;
    unpack(data, block);
    const float zero = static_cast<float>(format.zero);
    const float subtracted =
        format.offset == Offset::minimums ? number_of(block.subtracted, format.number_bytes) : 0.0f;
    const int span = UNIT / format.groups;
    for (int u = 0; u < num_units; ++u)
        for (int g = 0; g < format.groups; ++g) {
            const int number = u / format.head_units * format.head_groups() + (format.two_levels ? 0 : g);
            const float scale = number_of(block.scales[number], format.number_bytes);
            const float own = format.two_levels ? static_cast<float>(block.scale_levels[u][g]) * scale : scale;
            const float least =
                format.two_levels ? static_cast<float>(block.minimum_levels[u][g]) * subtracted : subtracted;
            const int first = u * UNIT + g * span;
            for (int i = first; i < first + span; ++i) {
                const float code = static_cast<float>(format.looks_up ? format.table[block.codes[i]] : block.codes[i]);
                out[i] = format.offset == Offset::zero ? (code - zero) * own : code * own - least;
            }
        }
}

const StoredType* stored_type(int number) {
    for (const StoredType& type : TYPES)
        if (type.number == number) return &type;
    return nullptr;
}

}  // namespace forerun
