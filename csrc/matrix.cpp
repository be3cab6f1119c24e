#include "matrix.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>

#include "cpu.h"
#include "memory.h"
#include "stored.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if !defined(_WIN32)
#include <sys/types.h>
#include <unistd.h>
#endif

namespace forerun {

namespace {

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

int panels_of(int height, bool paired) {
    const int outputs = paired ? PANEL / 2 : PANEL;
    return (height + outputs - 1) / outputs;
}

Matrix dense_layout(Type type, int num_out, int num_in, bool paired) {
    const int height = paired ? num_out / 2 : num_out;
    return {type,    paired,  height,  num_in, steps_of(type, num_in), panels_of(height, paired),
            nullptr, nullptr, nullptr, 0};
}

// Where the panels of each section begin, in panels and in bytes.
struct Sections {
    std::vector<Format> formats;
    std::vector<size_t> starts;  // and the end of the last one
    int num_out = 0;

    Sections(const std::vector<Section>& sections, int num_in, bool paired) : starts{0} {
        const int num_units = steps_of(Type::int8, num_in) / UNIT;
        for (const Section& section : sections) {
            formats.push_back(section.format);
            formats.back().first_panel = num_out / PANEL;
            num_out += section.num_rows;
        }
        const int num_panels = panels_of(paired ? num_out / 2 : num_out, paired);
        for (size_t i = 0; i < formats.size(); ++i) {
            const int end = i + 1 < formats.size() ? formats[i + 1].first_panel : num_panels;
            const size_t count = static_cast<size_t>(end - formats[i].first_panel);
            starts.push_back(starts[i] + formats[i].panel_bytes(num_units) * count);
        }
    }
};

}  // namespace

size_t packed_bytes(Type type, int num_out, int num_in, bool paired) {
    return dense_layout(type, num_out, num_in, paired).bytes();
}

size_t packed_bytes(const std::vector<Section>& sections, int num_in, bool paired) {
    return Sections(sections, num_in, paired).starts.back();
}

Packed::Packed(Team& team, Type type, const std::vector<Part>& parts, int num_in, bool paired, const float* bias,
               bool give_back) {
    int num_out = 0;
    for (const Part& part : parts) num_out += part.num_rows;
    matrix_ = dense_layout(type, num_out, num_in, paired);
    data_ = {allocate(matrix_.bytes()), Release{matrix_.bytes()}};
    if (!data_) throw std::bad_alloc();
    matrix_.data = data_.get();
    uint32_t* words = static_cast<uint32_t*>(data_.get());
    const int panels_per_turn = static_cast<int>(std::max<size_t>(1, GIVE_BACK_BYTES / matrix_.panel_bytes()));
    const int outputs_per_panel = paired ? PANEL / 2 : PANEL;
    const size_t row_bytes = static_cast<size_t>(num_in) * bytes_of(type);
    for (int start = 0; start < matrix_.num_panels; start += panels_per_turn) {
        const int end = std::min(matrix_.num_panels, start + panels_per_turn);
        team.run(matrix_.bytes() < (size_t{1} << 20), [&](int thread) {
            team.tiles(thread, end - start,
                       [&](int i) { pack_panel(parts, start + i, words + matrix_.panel_bytes() / 4 * (start + i)); });
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
    const Sections laid(sections, num_in, paired);
    formats_ = laid.formats;
    const std::vector<size_t>& starts = laid.starts;
    data_ = {allocate_zeros(starts.back()), Release{starts.back()}};
    if (!data_) throw std::bad_alloc();
    for (size_t i = 0; i < formats_.size(); ++i) formats_[i].data = static_cast<const char*>(data_.get()) + starts[i];
    matrix_ = dense_layout(Type::int8, laid.num_out, num_in, paired);
    matrix_.data = data_.get(), matrix_.formats = formats_.data(),
    matrix_.num_formats = static_cast<int>(formats_.size());
    put_bias(bias, laid.num_out);
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
    half = static_cast<uint16_t>(
        sign | (exponent >= -14 ? static_cast<uint32_t>(exponent + 15) << 10 | (kept & 0x3ffu) : kept));
    return true;
}

// Puts the codes of 32 inputs and one output among eight outputs: four inputs side by side are one word.
template <int BITS>
void put_codes(const uint8_t* codes, char* to) {
    constexpr int LOW = num_low_bits(BITS), HIGH = BITS > LOW ? BITS - LOW : 1;
    constexpr uint32_t EACH = 0x01010101u, LOW_MASK = EACH * ((1u << LOW) - 1), HIGH_MASK = EACH * ((1u << HIGH) - 1);
    uint32_t words[BITS] = {};
    for (int k = 0; k < UNIT; k += 4) {
        uint32_t four;
        std::memcpy(&four, codes + k, 4);
        const Place low = low_bits(BITS, k, 0);
        words[low.byte / 32] |= (BITS == 8 ? four ^ 128 * EACH : four & LOW_MASK) << low.shift;
        if constexpr (BITS > LOW) {
            const Place high = high_bits(BITS, k, 0);
            words[high.byte / 32] |= (four >> LOW & HIGH_MASK) << high.shift;
        }
    }
    for (int i = 0; i < BITS; ++i) std::memcpy(to + 32 * i, words + i, 4);
}

// One output of a panel, to be written. Outputs share no byte, so threads may write any of them side by side.
struct Lane {
    // Copies, and what follows from the format: what is written through a char* might be any of them, and would be read
    // again.
    const Format f;
    char* const data;
    const int lane;
    const size_t unit_bytes = f.unit_bytes(), head_bytes = f.head_bytes();
    const size_t codes_at =
        f.level_bytes() + static_cast<size_t>(lane / 8) * f.code_bytes() + 4 * static_cast<size_t>(lane % 8);
    void (*const put)(const uint8_t*, char*) = f.bits == 2   ? put_codes<2>
                                               : f.bits == 3 ? put_codes<3>
                                               : f.bits == 4 ? put_codes<4>
                                               : f.bits == 5 ? put_codes<5>
                                               : f.bits == 6 ? put_codes<6>
                                                             : put_codes<8>;

    // A head and a unit are given by where they begin.
    char* head(int unit) const { return data + f.head_of(unit); }
    char* unit(int index) const { return data + f.unit_at(index); }
    bool put_number(char* head, int group, int what, float number) const {
        uint32_t bits;
        std::memcpy(&bits, &number, 4);
        uint16_t half = 0;
        if (f.number_bytes == 2) return as_half(number, half) && (put_bits(head, group, what, half), true);
        if (f.number_bytes == 1) return (bits & 0x807fffffu) == 0 && (put_bits(head, group, what, bits >> 23), true);
        return put_bits(head, group, what, bits), true;
    }
    void put_bits(char* head, int group, int what, uint32_t bits) const {
        char* const to = head + f.number_at(group, what, lane);
        f.number_bytes == 4   ? std::memcpy(to, &bits, 4)
        : f.number_bytes == 2 ? std::memcpy(to, &bits, 2)
                              : std::memcpy(to, &bits, 1);
    }
    void put_level(char* unit, int group, int what, int level) const {
        unit[f.level_at(group, what, lane)] = static_cast<char>(level);
    }
    void put_unit(char* unit, const uint8_t* codes) const { put(codes, unit + codes_at); }
};

bool are_alike(const Format& a, const Format& b) {
    return a.bits == b.bits && a.groups == b.groups && a.head_units == b.head_units &&
           a.number_bytes == b.number_bytes && a.two_levels == b.two_levels && a.offset == b.offset &&
           a.zero == b.zero && a.looks_up == b.looks_up && std::memcmp(a.table, b.table, sizeof a.table) == 0;
}

}  // namespace

bool Packed::fill(Team& team, int first, int count, const QuantisedRows& rows) {
    const Matrix& m = matrix_;
    const int num_units = m.num_steps / UNIT;
    std::atomic<bool> fits{true};
    const auto pack_row = [&](int index) {
        const auto [panel, number] = place_of(first + index);
        const Format& f = m.format_of(panel);
        const Lane lane{f, const_cast<char*>(m.panel_at(panel)), number};
        const int num_heads = (num_units + f.head_units - 1) / f.head_units;
        for (int h = 0; h < num_heads; ++h)
            for (int g = 0; g < f.head_groups(); ++g) {
                const int at = (index * num_heads + h) * f.head_groups() + g;
                char* const head = lane.head(h * f.head_units);
                bool is_exact = lane.put_number(head, g, 0, rows.scales[at]);
                if (f.offset != Offset::zero) is_exact &= lane.put_number(head, g, 1, rows.subtracted[at]);
                if (!is_exact) fits = false;
            }
        const uint8_t* codes = rows.codes + static_cast<size_t>(index) * static_cast<size_t>(m.num_in);
        for (int u = 0; u < num_units; ++u) {
            char* const unit = lane.unit(u);
            for (int g = 0; f.two_levels && g < f.groups; ++g) {
                const int at = (index * num_units + u) * f.groups + g;
                lane.put_level(unit, g, 0, rows.scale_levels[at]);
                if (f.offset == Offset::minimums) lane.put_level(unit, g, 1, rows.minimum_levels[at]);
            }
            const int left = m.num_in - u * UNIT;
            if (left >= UNIT) {
                lane.put_unit(unit, codes + u * UNIT);
                continue;
            }
            uint8_t padded[UNIT];
            std::memset(padded, f.bits == 8 ? 128 : 0, UNIT);  // what is packed as zeros
            std::memcpy(padded, codes + u * UNIT, static_cast<size_t>(left));
            lane.put_unit(unit, padded);
        }
    };
    team.run(count < 64, [&](int thread) { team.tiles(thread, count, pack_row); });
    return fits;
}

bool Packed::fill_stored(Team& team, int first, int count, const StoredRows& rows) {
    const Matrix& m = matrix_;
    const StoredType* const type = stored_type(rows.type);
    const int outputs = m.paired ? PANEL / 2 : PANEL, height = m.paired ? m.num_out : first + count;
    const int start = first % height / outputs, end = ((first + count - 1) % height) / outputs + 1;  // panels
    if (!type || m.num_in % (type->num_units * UNIT) != 0 || &m.format_of(start) != &m.format_of(end - 1) ||
        !are_alike(m.format_of(start), type->format))
        return false;
    const int num_blocks = m.num_in / (type->num_units * UNIT);
    const auto pack_row = [&](const uint8_t* data, int index) {
        const auto [panel, number] = place_of(index);
        const Lane lane{m.format_of(panel), const_cast<char*>(m.panel_at(panel)), number};
        const int num_numbers = lane.f.head_groups(), num_groups = lane.f.two_levels ? lane.f.groups : 0;
        const bool has_minimums = lane.f.offset == Offset::minimums;
        UnpackedBlock block;
        bool is_good = true;
        char* to = lane.data;
        for (int b = 0; b < num_blocks; ++b, data += type->num_bytes) {
            type->unpack(data, block);
            const uint32_t* scales = block.scales;
            for (int first = 0; first < type->num_units; first += lane.f.head_units) {  // a head, and its units
                for (int g = 0; g < num_numbers; ++g) {
                    is_good &= is_finite(*scales, lane.f.number_bytes);
                    lane.put_bits(to, g, 0, *scales++);
                    if (!has_minimums) continue;
                    lane.put_bits(to, g, 1, block.subtracted);
                    is_good &= is_finite(block.subtracted, lane.f.number_bytes);
                }
                to += lane.head_bytes;
                for (int u = first; u < first + lane.f.head_units; ++u, to += lane.unit_bytes) {
                    for (int g = 0; g < num_groups; ++g) {
                        lane.put_level(to, g, 0, block.scale_levels[u][g]);
                        if (has_minimums) lane.put_level(to, g, 1, block.minimum_levels[u][g]);
                    }
                    lane.put_unit(to, block.codes + u * UNIT);
                }
            }
        }
        return is_good;
    };
    return each_stored(team, first, count, rows, static_cast<size_t>(num_blocks) * type->num_bytes, pack_row);
}

bool Packed::each_stored(Team& team, int first, int count, const StoredRows& rows, size_t row_bytes,
                         const std::function<bool(const uint8_t*, int)>& pack_row) {
    const Matrix& m = matrix_;
    const int outputs = m.paired ? PANEL / 2 : PANEL, height = m.paired ? m.num_out : first + count;
    const int start = first % height / outputs, end = ((first + count - 1) % height) / outputs + 1;  // panels
    std::atomic<bool> is_good{true};
    team.run(count < outputs, [&](int thread) {
        std::vector<uint8_t> data(row_bytes * static_cast<size_t>(outputs));
        team.tiles(thread, end - start, [&](int tile) {
            if (!is_good) return;
            const int from = std::max(0, (start + tile) * outputs - first % height);
            const int to = std::min(count, (start + tile + 1) * outputs - first % height);
            if (!rows.read(from, to, row_bytes, data.data())) is_good = false;
            for (int i = from; i < to && is_good; ++i)
                if (!pack_row(data.data() + row_bytes * static_cast<size_t>(i - from), first + i)) is_good = false;
        });
    });
    return is_good;
}

bool Packed::round_stored(Team& team, int first, int count, const StoredRows& rows, int group,
                          void (*round_group)(const float*, int, int, const RoundedGroup&), bool& fits) {
    const Matrix& m = matrix_;
    const StoredType* const type = stored_type(rows.type);
    if (!type || m.num_in % (type->num_units * UNIT) != 0 || group % UNIT != 0 || group > MOST_GROUP ||
        m.num_in % group != 0)
        return false;
    const Format& f = m.format_of(place_of(first).first);
    if (&f != &m.format_of(place_of(first + count - 1).first) || f.bits != 4 || f.offset != Offset::zeros ||
        f.two_levels || f.groups != 1 || f.head_units * UNIT != group)
        return false;
    const int num_blocks = m.num_in / (type->num_units * UNIT);
    const size_t num_groups = static_cast<size_t>(m.num_in / group), width = static_cast<size_t>(m.num_in);
    std::atomic<bool> all_fit{true};
    const auto pack_row = [&](const uint8_t* data, int index) {
        thread_local std::vector<float> weights;
        thread_local std::vector<uint8_t> codes, zeros;
        thread_local std::vector<uint16_t> scales;
        weights.resize(width), codes.resize(width), zeros.resize(num_groups), scales.resize(num_groups);
        for (int b = 0; b < num_blocks; ++b)
            type->dequantise(data + static_cast<size_t>(b) * type->num_bytes,
                             weights.data() + b * type->num_units * UNIT);
        float product = 0.0f;  // NaN where a weight is no number
        for (const float weight : weights) product += weight * 0.0f;
        if (!(product == 0.0f)) return false;
        for (size_t g = 0; g < num_groups; ++g) {
            const size_t at = g * static_cast<size_t>(group);
            round_group(weights.data() + at, group, 4, {codes.data() + at, scales.data() + g, zeros.data() + g});
        }
        const auto [panel, number] = place_of(index);
        const Lane lane{f, const_cast<char*>(m.panel_at(panel)), number};
        for (size_t g = 0; g < num_groups; ++g) {
            const uint32_t bits = static_cast<uint32_t>(scales[g]) << 16;  // of a bfloat16 number
            float scale;
            std::memcpy(&scale, &bits, sizeof scale);
            char* const head = lane.head(static_cast<int>(g) * f.head_units);
            if (!lane.put_number(head, 0, 0, scale)) all_fit = false;
            lane.put_number(head, 0, 1, static_cast<float>(zeros[g]));
        }
        for (int u = 0; u < m.num_in / UNIT; ++u) lane.put_unit(lane.unit(u), codes.data() + u * UNIT);
        return true;
    };
    const bool is_good =
        each_stored(team, first, count, rows, static_cast<size_t>(num_blocks) * type->num_bytes, pack_row);
    fits = all_fit;
    return is_good;
}

bool StoredRows::read(int from, int to, size_t row_bytes, uint8_t* out) const {
#if defined(_WIN32)
    return false;
#else
    const auto row = [&](int i) { return numbers ? numbers[i] : i; };
    while (from < to) {
        int next = from + 1;
        while (next < to && row(next) == row(next - 1) + 1) ++next;
        size_t left = row_bytes * static_cast<size_t>(next - from);
        off_t at = static_cast<off_t>(start + row_bytes * static_cast<size_t>(row(from)));
        while (left > 0) {
            const ssize_t got = pread(file, out, left, at);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) return false;
            out += got, at += got, left -= static_cast<size_t>(got);
        }
        from = next;
    }
    return true;
#endif
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
    constexpr int STEPS = 16;  // whose words are one line of a row: all lines of a turn stay in the cache
    const size_t row_bytes = static_cast<size_t>(matrix_.num_in) * bytes_of(matrix_.type);
    const char* rows[PANEL];
    for (int lane = 0; lane < PANEL; ++lane) rows[lane] = static_cast<const char*>(source_row(parts, panel, lane));
    for (int first = 0; first < matrix_.num_steps; first += STEPS)
        for (int lane = 0; lane < PANEL; ++lane) {
            uint32_t words[STEPS] = {};
            const size_t at = static_cast<size_t>(first) * 4;
            const size_t left = row_bytes - at;
            if (rows[lane] && left >= sizeof words)  // told apart for the compiler, which then copies 64 bytes at once
                std::memcpy(words, rows[lane] + at, sizeof words);
            else if (rows[lane]) std::memcpy(words, rows[lane] + at, left);
            const int count = std::min(STEPS, matrix_.num_steps - first);
            uint32_t* to = out + static_cast<size_t>(first) * PANEL + lane;
            for (int s = 0; s < count; ++s, to += PANEL) *to = words[s];
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
