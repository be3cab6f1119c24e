#include "matrix.h"

#include <algorithm>
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
    const int per_step = inputs_per_step(type), height = paired ? parts[0].num_rows : num_out;
    const int outputs_per_panel = paired ? PANEL / 2 : PANEL;
    matrix_ = {type, paired, height, num_in, (num_in + per_step - 1) / per_step,
               (height + outputs_per_panel - 1) / outputs_per_panel, nullptr, nullptr};
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
    if (!bias) return;
    bias_.assign(static_cast<size_t>(matrix_.num_panels) * PANEL, 0.0f);
    for (int i = 0; i < num_out; ++i) {
        const int of = paired ? i % height : i;
        const size_t at = paired ? static_cast<size_t>(of / 16 * PANEL + of % 16 + (i >= height ? 16 : 0)) : i;
        bias_[at] = bias[i];
    }
    matrix_.bias = bias_.data();
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
    const uint32_t* words = static_cast<const uint32_t*>(data_.get()) + matrix_.panel_bytes() / 4 * panel + lane;
    const size_t row_bytes = static_cast<size_t>(matrix_.num_in) * bytes_of(matrix_.type);
    for (int s = 0; s < matrix_.num_steps; ++s) {
        const size_t at = static_cast<size_t>(s) * 4;
        std::memcpy(static_cast<char*>(out) + at, words + static_cast<size_t>(s) * PANEL,
                    at + 4 <= row_bytes ? 4 : row_bytes - at);
    }
}

}  // namespace forerun
