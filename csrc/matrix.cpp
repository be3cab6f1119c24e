#include "matrix.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "cpu.h"
#include "memory.h"

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
               (height + outputs_per_panel - 1) / outputs_per_panel, nullptr, nullptr, nullptr, 0};
    data_ = {allocate(matrix_.bytes()), Release{matrix_.bytes()}};
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
    if (!bias) return;
    bias_.assign(static_cast<size_t>(matrix_.num_panels) * PANEL, 0.0f);
    for (int i = 0; i < num_out; ++i) {
        const auto [panel, lane] = place_of(i);
        bias_[static_cast<size_t>(panel * PANEL + lane)] = bias[i];
    }
    matrix_.bias = bias_.data();
}

Packed::Packed(const std::vector<Section>& sections, int num_in, bool paired, const float* bias) {
    int num_out = 0;
    for (const Section& section : sections) {
        formats_.push_back(section.format);
        formats_.back().first_panel = num_out / PANEL;
        num_out += section.num_rows;
    }
    const int height = paired ? num_out / 2 : num_out, outputs_per_panel = paired ? PANEL / 2 : PANEL;
    const int num_steps = steps_of(Type::int8, num_in), num_panels = (height + outputs_per_panel - 1) / outputs_per_panel;
    std::vector<size_t> starts{0};
    for (size_t i = 0; i < formats_.size(); ++i) {
        const int end = i + 1 < formats_.size() ? formats_[i + 1].first_panel : num_panels;
        starts.push_back(starts[i] + formats_[i].panel_bytes(num_steps / UNIT) * static_cast<size_t>(end - formats_[i].first_panel));
    }
    data_ = {allocate(starts.back()), Release{starts.back()}};
    if (!data_) throw std::bad_alloc();
    std::memset(data_.get(), 0, starts.back());
    for (size_t i = 0; i < formats_.size(); ++i) formats_[i].data = static_cast<const char*>(data_.get()) + starts[i];
    matrix_ = {Type::int8, paired, height, num_in, num_steps, num_panels, data_.get(), nullptr, formats_.data(),
               static_cast<int>(formats_.size())};
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

bool Packed::fill(Team& team, int first, int count, const QuantisedRows& rows) {
    const Matrix& m = matrix_;
    const int num_units = m.num_steps / UNIT;
    std::atomic<bool> fits{true};
    const auto pack_row = [&](int index) {
        const auto [panel, lane] = place_of(first + index);
        const Format& f = m.format_of(panel);
        char* const data = const_cast<char*>(m.panel_at(panel));
        const auto put_number = [&](char* p, float number) {
            uint16_t half = 0;
            if (f.wide) std::memcpy(p, &number, 4);
            else if (as_half(number, half)) std::memcpy(p, &half, 2);
            else fits = false;
        };
        const int num_heads = (num_units + f.head_units - 1) / f.head_units;
        for (int h = 0; h < num_heads; ++h)
            for (int g = 0; g < f.head_groups(); ++g) {
                const int at = (index * num_heads + h) * f.head_groups() + g;
                char* const head = data + f.head_of(h * f.head_units);
                put_number(head + f.number_at(g, 0, lane), rows.scales[at]);
                if (f.offset != Offset::zero) put_number(head + f.number_at(g, 1, lane), rows.subtracted[at]);
            }
        const uint8_t* codes = rows.codes + static_cast<size_t>(index) * static_cast<size_t>(m.num_in);
        for (int u = 0; u < num_units; ++u) {
            char* const unit = data + f.unit_at(u);
            for (int g = 0; f.two_levels && g < f.groups; ++g) {
                const int at = (index * num_units + u) * f.groups + g;
                unit[f.level_at(g, 0, lane)] = static_cast<char>(rows.scale_levels[at]);
                if (f.offset == Offset::minimums) unit[f.level_at(g, 1, lane)] = static_cast<char>(rows.minimum_levels[at]);
            }
            // Outputs share no byte, so threads may pack any rows side by side.
            char* const to = unit + f.level_bytes() + static_cast<size_t>(lane / 8) * f.code_bytes();
            const auto put_bits = [&](Place place, int bits) { to[place.byte] = static_cast<char>(to[place.byte] | bits << place.shift); };
            const int left = std::min(UNIT, m.num_in - u * UNIT);
            for (int k = 0; k < left; ++k) {
                const int code = codes[u * UNIT + k];
                put_bits(low_bits(f.bits, k, lane % 8), f.bits == 8 ? code ^ 128 : code & 15);
                if (f.bits == 5 || f.bits == 6) put_bits(high_bits(f.bits, k, lane % 8), code >> 4);
            }
        }
    };
    team.run(count < 64, [&](int thread) { team.tiles(thread, count, pack_row); });
    return fits;
}

std::pair<int, int> Packed::place_of(int index) const {
    if (!matrix_.paired) return {index / PANEL, index % PANEL};
    const int of = index % matrix_.num_out;
    return {of / 16, of % 16 + (index >= matrix_.num_out ? 16 : 0)};
}

void Packed::Release::operator()(void* data) const { release(data, num_bytes); }

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
    const auto [panel, lane] = place_of(index);
    if (is_quantised(matrix_.type))  // the same bits on every instruction set
        return portable_kernels().unpack_row(matrix_, panel * PANEL + lane, static_cast<float*>(out));
    const uint32_t* words = static_cast<const uint32_t*>(data_.get()) + matrix_.panel_bytes() / 4 * panel + lane;
    const size_t row_bytes = static_cast<size_t>(matrix_.num_in) * bytes_of(matrix_.type);
    for (int s = 0; s < matrix_.num_steps; ++s) {
        const size_t at = static_cast<size_t>(s) * 4;
        std::memcpy(static_cast<char*>(out) + at, words + static_cast<size_t>(s) * PANEL,
                    at + 4 <= row_bytes ? 4 : row_bytes - at);
    }
}

}  // namespace forerun
