// Bindings of host memory: bytes that numpy views, and conversions between the types of numbers that files have.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "backend.h"
#include "bindings.h"
#include "memory.h"

#define FORERUN_ISA numbers  // the conversions of scalar.h, compiled here for every processor
#include "scalar.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace forerun;

namespace {

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

struct Block {
    void* data;
    size_t size;
};

// The memory goes when the last view of it does.
Bytes empty(size_t num_bytes) {
    Block* const block = new Block{allocate(num_bytes), num_bytes};
    if (!block->data) {
        delete block;
        throw std::bad_alloc();
    }
    nb::capsule owner(block, [](void* p) noexcept {
        const Block* const own = static_cast<Block*>(p);
        release(own->data, own->size);
        delete own;
    });
    return Bytes(block->data, {num_bytes}, owner);
}

// Floats of 8 bits: a sign, 4 bits of exponent, 3 of mantissa, no infinities (OCP 8-bit Floating Point, E4M3).
std::array<float, 256> float8_table() {
    std::array<float, 256> table{};
    for (int code = 0; code < 256; ++code) {
        const int exponent = code >> 3 & 15, mantissa = code & 7;
        float magnitude = exponent ? std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, exponent - 7)
                                   : std::ldexp(static_cast<float>(mantissa), -9);
        if ((code & 127) == 127) magnitude = std::numeric_limits<float>::quiet_NaN();
        table[static_cast<size_t>(code)] = code & 128 ? -magnitude : magnitude;
    }
    return table;
}

// Rounds to nearest, ties to even; what is too large becomes infinite, and NaN stays NaN.
uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;
    if (magnitude >= 0x47800000u) return sign | 0x7c00u;
    if (magnitude < 0x38800000u) {  // below the least normal half: the sum's last bit is the least denormal
        float wide;
        std::memcpy(&wide, &magnitude, 4);
        wide += 0.5f;
        uint32_t sum;
        std::memcpy(&sum, &wide, 4);
        return static_cast<uint16_t>(sign | (sum - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};
struct Eighth {
    uint8_t bits;
};

const std::array<float, 256> FLOAT8 = float8_table();

float read(float x) { return x; }
float read(double x) { return static_cast<float>(x); }
float read(Half x) { return numbers::half_to_float(x.bits); }
float read(Brain x) { return numbers::bf16_to_float(x.bits); }
float read(Eighth x) { return FLOAT8[x.bits]; }
void write(float x, float& out) { out = x; }
void write(float x, double& out) { out = x; }
void write(float x, Half& out) { out.bits = float_to_half(x); }
void write(float x, Brain& out) { out.bits = numbers::float_to_bf16(x); }

using Convert = void (*)(const void* from, void* to, size_t count);

template <class From, class To>
void convert_all(const void* from, void* to, size_t count) {
    const From* const source = static_cast<const From*>(from);
    To* const target = static_cast<To*>(to);
    for (size_t i = 0; i < count; ++i) write(read(source[i]), target[i]);
}

struct Conversion {
    Convert convert;
    size_t from_bytes, to_bytes;
};

template <class From>
Conversion from(const std::string& to) {
    if (to == "float32") return {convert_all<From, float>, sizeof(From), 4};
    if (to == "float64") return {convert_all<From, double>, sizeof(From), 8};
    if (to == "float16") return {convert_all<From, Half>, sizeof(From), 2};
    if (to == "bfloat16") return {convert_all<From, Brain>, sizeof(From), 2};
    throw std::invalid_argument("numbers are not converted to " + to);
}

Conversion conversion_of(const std::string& source, const std::string& target) {
    if (source == "float32") return from<float>(target);
    if (source == "float64") return from<double>(target);
    if (source == "float16") return from<Half>(target);
    if (source == "bfloat16") return from<Brain>(target);
    if (source == "float8_e4m3fn") return from<Eighth>(target);
    throw std::invalid_argument("numbers are not converted from " + source);
}

void convert(Backend& b, Address source, const std::string& source_type, Address target, const std::string& target_type,
             size_t count) {
    const Conversion own = conversion_of(source_type, target_type);
    constexpr size_t PER_TILE = 1 << 16;
    const char* const first = at<const char>(source);
    char* const out = at<char>(target);
    b.team.run(count <= 2 * PER_TILE, [&](int thread) {
        b.team.tiles(thread, static_cast<int>((count + PER_TILE - 1) / PER_TILE), [&](int tile) {
            const size_t begin = static_cast<size_t>(tile) * PER_TILE, num = std::min(PER_TILE, count - begin);
            own.convert(first + begin * own.from_bytes, out + begin * own.to_bytes, num);
        });
    });
}

}  // namespace

void bind_numbers(nb::module_& m) {
    m.def(
        "empty", &empty, "num_bytes"_a,
        "Makes so many bytes that are not written yet, uint8 [num_bytes]: aligned to 64, in huge pages from 2 MiB on where the "
        "system has them.");
    m.def(
        "convert", &convert, Free(), "backend"_a, "source"_a, "source_type"_a, "target"_a, "target_type"_a, "count"_a,
        "Converts numbers at one address to another type at another address, on all threads.\n\n"
        "Types: float64, float32, float16 and bfloat16; float8_e4m3fn can only be read. Each number is rounded to float32 "
        "first, then to the nearest number of the type, ties to even.");
}
