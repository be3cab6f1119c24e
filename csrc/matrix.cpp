#include "matrix.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "decoder.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace forerun {

namespace {

constexpr size_t GIVE_BACK_BYTES = 8 << 20;  // packed weights after which source pages are given back

// Gives the whole pages within [from, to) back to the system; after that they would read as zeros.
void give_pages_back(const char* from, const char* to) {
#if defined(__linux__)
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(from) + page - 1) / page * page;
    const uintptr_t last = reinterpret_cast<uintptr_t>(to) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
    (void)from, (void)to;
#endif
}

}  // namespace

Packed::Packed(Team& team, Type type, const std::vector<Part>& parts, int num_in, bool paired, const float* bias,
               bool give_back) {
    int num_out = 0;
    for (const Part& part : parts) num_out += part.num_rows;
    const int height = paired ? parts[0].num_rows : num_out;
    const int outputs_per_panel = paired ? PANEL / 2 : PANEL;
    matrix_ = {type, paired, height, num_in, steps_of(type, num_in),
               (height + outputs_per_panel - 1) / outputs_per_panel, nullptr, nullptr, false, false, 0};
    data_.reset(allocate(matrix_.bytes()));
    if (!data_) throw std::bad_alloc();
    matrix_.data = data_.get();
    uint32_t* words = static_cast<uint32_t*>(data_.get());
    const int panels_per_turn = static_cast<int>(std::max<size_t>(1, GIVE_BACK_BYTES / matrix_.panel_bytes()));
    const size_t row_bytes = static_cast<size_t>(num_in) * bytes_of(type);
    for (int start = 0; start < matrix_.num_panels; start += panels_per_turn) {
        const int end = std::min(matrix_.num_panels, start + panels_per_turn);
        team.run(matrix_.bytes() < (size_t{1} << 20), [&](int thread) {
            team.tiles(thread, end - start, [&](int i) {
                pack_panel(parts, start + i, words + matrix_.panel_bytes() / 4 * (start + i));
            });
        });
        if (!give_back) continue;
        int before = 0;  // outputs in the parts before
        for (const Part& part : parts) {
            // Begins at the part's beginning each time: else a page that two turns share would never be given back.
            const int last = std::clamp(end * outputs_per_panel - (paired ? 0 : before), 0, part.num_rows);
            const char* rows = static_cast<const char*>(part.rows);
            give_pages_back(rows, rows + row_bytes * static_cast<size_t>(last));
            before += part.num_rows;
        }
    }
    put_bias(bias, num_out);
}

void Packed::put_bias(const float* bias, int num_out) {
    const int height = matrix_.num_out;
    if (!bias) return;
    bias_.assign(static_cast<size_t>(matrix_.num_panels) * PANEL, 0.0f);
    for (int i = 0; i < num_out; ++i) {
        const int of = matrix_.paired ? i % height : i;
        const size_t at = matrix_.paired ? static_cast<size_t>(of / 16 * PANEL + of % 16 + (i >= height ? 16 : 0)) : i;
        bias_[at] = bias[i];
    }
    matrix_.bias = bias_.data();
}

Packed::Packed(Type type, const std::vector<int>& num_rows, int num_in, bool paired, const float* bias, bool wide_scales, bool has_zeros,
               int groups_per_unit) {
    int num_out = 0;
    for (int rows : num_rows) num_out += rows;
    const int height = paired ? num_rows[0] : num_out, outputs_per_panel = paired ? PANEL / 2 : PANEL;
    matrix_ = {type, paired, height, num_in, steps_of(type, num_in), (height + outputs_per_panel - 1) / outputs_per_panel,
               nullptr, nullptr, wide_scales, has_zeros, groups_per_unit};
    data_.reset(allocate(matrix_.bytes()));
    if (!data_) throw std::bad_alloc();
    std::memset(data_.get(), 0, matrix_.bytes());
    matrix_.data = data_.get();
    put_bias(bias, num_out);
}

namespace {

// A number as float16, exactly; false where it has no such form.
bool as_half(float x, uint16_t& half) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude == 0) return half = static_cast<uint16_t>(sign), true;
    const int exponent = static_cast<int>(magnitude >> 23) - 127;
    if (exponent > 15 || exponent < -24) return false;
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const int dropped = exponent >= -14 ? 13 : 13 + (-14 - exponent);  // denormal halves have fewer bits
    if (mantissa & ((1u << dropped) - 1)) return false;
    const uint32_t kept = mantissa >> dropped;
    half = static_cast<uint16_t>(sign | (exponent >= -14 ? static_cast<uint32_t>(exponent + 15) << 10 | (kept & 0x3ffu) : kept));
    return true;
}

}  // namespace

bool Packed::fill(Team& team, int first, int count, const uint8_t* codes, const float* scales, const float* minimums) {
    const Matrix& m = matrix_;
    const size_t groups = static_cast<size_t>(m.num_steps / UNIT) * static_cast<size_t>(m.groups_per_unit);
    const size_t size = m.scale_bytes() + m.code_bytes(), width = m.wide_scales ? 4 : 2;
    char* const data = static_cast<char*>(data_.get());
    std::atomic<bool> fits{true};
    const auto pack_row = [&](int index) {
        const int output = first + index, of = m.paired ? output % m.num_out : output;
        const int panel = m.paired ? of / 16 : of / PANEL;
        const int lane = m.paired ? of % 16 + (output >= m.num_out ? 16 : 0) : of % PANEL;
        char* at = data + m.panel_bytes() * static_cast<size_t>(panel) + size * static_cast<size_t>(lane / 8);
        const size_t o = static_cast<size_t>(lane % 8);
        const auto put = [&](char* p, float number) {
            uint16_t half = 0;
            if (m.wide_scales) std::memcpy(p, &number, 4);
            else if (as_half(number, half)) std::memcpy(p, &half, 2);
            else fits = false;
        };
        for (int u = 0; u < m.num_steps / UNIT; ++u, at += 4 * size) {
            for (int g = 0; g < m.groups_per_unit; ++g) {
                const size_t group = static_cast<size_t>(index) * groups + static_cast<size_t>(u * m.groups_per_unit + g);
                put(at + (static_cast<size_t>(2 * g) * 8 + o) * width, scales[group]);
                put(at + (static_cast<size_t>(2 * g + 1) * 8 + o) * width, minimums[group]);
            }
            uint8_t* to = reinterpret_cast<uint8_t*>(at + m.scale_bytes());
            const int left = std::min(UNIT, m.num_in - u * UNIT);
            for (int k = 0; k < left; ++k) {
                const uint8_t code = codes[static_cast<size_t>(index) * m.num_in + static_cast<size_t>(u * UNIT + k)];
                if (m.type == Type::int8) to[static_cast<size_t>(k / 4) * 32 + 4 * o + k % 4] = code;
                else to[static_cast<size_t>(k / 8) * 32 + 4 * o + k % 4] |= static_cast<uint8_t>(code << (k % 8 < 4 ? 0 : 4));
            }
        }
    };
    // Rows that share a byte of four bits do not exist: a word belongs to one output.
    team.run(count < 64, [&](int thread) { team.tiles(thread, count, pack_row); });
    return fits;
}

void Packed::Release::operator()(void* data) const { release(data); }

const void* Packed::source_row(const std::vector<Part>& parts, int panel, int lane) const {
    size_t part = 0;
    int row;
    if (matrix_.paired) {
        part = lane < PANEL / 2 ? 0 : 1;
        row = panel * (PANEL / 2) + lane % (PANEL / 2);
    } else {
        row = panel * PANEL + lane;
        while (part + 1 < parts.size() && row >= parts[part].num_rows) row -= parts[part++].num_rows;
    }
    if (row >= parts[part].num_rows) return nullptr;
    const size_t row_bytes = static_cast<size_t>(matrix_.num_in) * bytes_of(matrix_.type);
    return static_cast<const char*>(parts[part].rows) + row_bytes * static_cast<size_t>(row);
}

void Packed::pack_panel(const std::vector<Part>& parts, int panel, uint32_t* out) const {
    const size_t row_bytes = static_cast<size_t>(matrix_.num_in) * bytes_of(matrix_.type);
    for (int lane = 0; lane < PANEL; ++lane) {
        const char* row = static_cast<const char*>(source_row(parts, panel, lane));
        for (int s = 0; s < matrix_.num_steps; ++s) {
            uint32_t word = 0;
            const size_t at = static_cast<size_t>(s) * 4;
            if (row) std::memcpy(&word, row + at, at + 4 <= row_bytes ? 4 : row_bytes - at);
            out[static_cast<size_t>(s) * PANEL + lane] = word;
        }
    }
}

void Packed::unpack(int index, void* out) const {
    const int height = matrix_.num_out;
    const int of = matrix_.paired ? index % height : index;
    const int panel = matrix_.paired ? of / 16 : of / PANEL;
    const int lane = matrix_.paired ? of % 16 + (index >= height ? 16 : 0) : of % PANEL;
    if (is_quantised(matrix_.type))  // the same bits on every instruction set
        return baseline_kernels.unpack_row(matrix_, panel * PANEL + lane, static_cast<float*>(out));
    const uint32_t* words = static_cast<const uint32_t*>(data_.get()) + matrix_.panel_bytes() / 4 * panel + lane;
    const size_t row_bytes = static_cast<size_t>(matrix_.num_in) * bytes_of(matrix_.type);
    for (int s = 0; s < matrix_.num_steps; ++s) {
        const size_t at = static_cast<size_t>(s) * 4;
        std::memcpy(static_cast<char*>(out) + at, words + static_cast<size_t>(s) * PANEL,
                    at + 4 <= row_bytes ? 4 : row_bytes - at);
    }
}

}  // namespace forerun
