#include "stored.h"

#include <cstring>

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
    out.scale = half_at(data);
    put_nibbles(data + 2, 16, out.codes);
}

void q4_1(const uint8_t* data, UnpackedBlock& out) {
    out.scale = half_at(data), out.subtracted = negative(half_at(data + 2));
    put_nibbles(data + 4, 16, out.codes);
}

void q5_0(const uint8_t* data, UnpackedBlock& out) {
    out.scale = half_at(data);
    put_nibbles(data + 6, 16, out.codes);
    put_fifth_bits(data + 2, out.codes);
}

void q5_1(const uint8_t* data, UnpackedBlock& out) {
    out.scale = half_at(data), out.subtracted = negative(half_at(data + 2));
    put_nibbles(data + 8, 16, out.codes);
    put_fifth_bits(data + 4, out.codes);
}

void q8_0(const uint8_t* data, UnpackedBlock& out) {
    out.scale = half_at(data);
    for (int i = 0; i < UNIT; ++i) out.codes[i] = data[2 + i] ^ 128;  // from -128 on -> from 0 on
}

// The numbers of Q4_K and Q5_K: two halves, then 6 bits for each unit's scale and minimum.
void put_levels(const uint8_t* data, UnpackedBlock& out) {
    out.scale = half_at(data), out.subtracted = half_at(data + 2);
    const uint8_t *low = data + 4, *middle = data + 8, *high = data + 12;
    for (int i = 0; i < 4; ++i) {
        out.scale_levels[i][0] = static_cast<int8_t>(low[i] & 63);
        out.scale_levels[4 + i][0] = static_cast<int8_t>((high[i] & 15) | (low[i] >> 6) << 4);
        out.minimum_levels[i] = middle[i] & 63;
        out.minimum_levels[4 + i] = static_cast<uint8_t>(high[i] >> 4 | (middle[i] >> 6) << 4);
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
    out.scale = half_at(data + 208);
}

Format with_zero(int bits) { return {bits, 1, 1, false, false, Offset::zero, 1 << (bits - 1), 0, nullptr}; }
Format with_minimum(int bits) { return {bits, 1, 1, false, false, Offset::minimums, 0, 0, nullptr}; }
Format two_levels(int bits) { return {bits, 1, 8, false, true, Offset::minimums, 0, 0, nullptr}; }

const StoredType TYPES[] = {
    {2, 1, 18, with_zero(4), q4_0},     {3, 1, 20, with_minimum(4), q4_1}, {6, 1, 22, with_zero(5), q5_0},
    {7, 1, 24, with_minimum(5), q5_1},  {8, 1, 34, with_zero(8), q8_0},    {12, 8, 144, two_levels(4), q4_k},
    {13, 8, 176, two_levels(5), q5_k},  {14, 8, 210, {6, 2, 8, false, true, Offset::zero, 32, 0, nullptr}, q6_k},
};

}  // namespace

static float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ffu;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) * 0x1p-24f;
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

void StoredType::dequantise(const uint8_t* data, float* out) const {
    UnpackedBlock block;
    unpack(data, block);
    const float scale = from_half(block.scale), zero = static_cast<float>(format.zero);
    const float subtracted = format.offset == Offset::minimums ? from_half(block.subtracted) : 0.0f;
    const int span = UNIT / format.groups;
    for (int u = 0; u < num_units; ++u)
        for (int g = 0; g < format.groups; ++g) {
            const float own = format.two_levels ? static_cast<float>(block.scale_levels[u][g]) * scale : scale;
            const float least = format.two_levels ? static_cast<float>(block.minimum_levels[u]) * subtracted : subtracted;
            const int first = u * UNIT + g * span;
            for (int i = first; i < first + span; ++i) {
                const float code = static_cast<float>(block.codes[i]);
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
