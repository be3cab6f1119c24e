// Packs row-major weights into panels, and can give the source's memory back while it does.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace forerun {

// Rows of one source matrix, row-major, of the packed type.
struct Part {
    const void* rows;
    int num_rows;
};

// Outputs of a quantised matrix that are packed alike.
struct Section {
    int num_rows;
    Format format;  // without its panels
};

// codes [rows, num_in]. scales, subtracted: float32 numbers of heads, [rows, heads, head_groups]; subtracted is null
// where all have one zero point. levels: integers of units, [rows, units, groups], null without a second level.
struct QuantisedRows {
    const uint8_t* codes;
    const float *scales, *subtracted;
    const int8_t* scale_levels;
    const uint8_t* minimum_levels;
};

// Rows of a file as it stores them. type: see stored.h. file: its descriptor. start: the first byte of row 0. numbers:
// of the wanted rows, in order; null = all from row 0 on.
struct StoredRows {
    int type, file;
    size_t start;
    const int32_t* numbers;

    bool read(int from, int to, size_t row_bytes, uint8_t* out) const;  // false where the file has not got them
};

constexpr size_t GIVE_BACK_BYTES = 8 << 20;  // packed weights after which source pages are given back

// Bytes of a packed matrix, padding included. num_out: of all parts. See the constructors of Packed.
size_t packed_bytes(Type type, int num_out, int num_in, bool paired);
size_t packed_bytes(const std::vector<Section>& sections, int num_in, bool paired);

class Packed {
  public:
    // paired: exactly two parts of equal height (gate, up), 16 outputs of each in a panel; otherwise the parts follow
    // each other. bias: float32 over all outputs in the order of the parts, or null. give_back: the pages of the source
    // are returned to the system as they are packed, and its owner must not read it again.
    Packed(Team& team, Type type, const std::vector<Part>& parts, int num_in, bool paired, const float* bias,
           bool give_back);
    // Quantised weights, which `fill` brings. sections: outputs in the order of the parts, with a format for each; all
    // but the last have a multiple of 32 outputs, and a paired matrix is one section.
    Packed(const std::vector<Section>& sections, int num_in, bool paired, const float* bias);
    // Rows [first, first + count) of all parts in order. Returns false where a number of a head does not fit into
    // float16.
    bool fill(Team& team, int first, int count, const QuantisedRows& rows);
    // The same rows, read from a file and packed by all threads at once; of a paired matrix rows of one part. Returns
    // false where they cannot be read, are packed otherwise than their type is, or have numbers that are not finite.
    bool fill_stored(Team& team, int first, int count, const StoredRows& rows);
    // Rows of a file, too, each rounded to 4 bits in these groups first (Kernels::round_group); `fits` is false where a
    // scale does not fit into float16.
    bool round_stored(Team& team, int first, int count, const StoredRows& rows, int group,
                      void (*round_group)(const float*, int, int, const RoundedGroup&), bool& fits);
    Packed(const Packed&) = delete;
    Packed& operator=(const Packed&) = delete;

    const Matrix& matrix() const { return matrix_; }
    // Copies the weights of one output, [num_in] in the packed type, float32 where it is quantised.
    void unpack(int index, void* out) const;

  private:
    struct Release {
        size_t num_bytes;
        void operator()(void* data) const;
    };

    std::pair<int, int> place_of(int index) const;  // panel and lane of an output
    // Reads `count` rows of a file, each panel on one thread, and calls pack_row with the data and the output of each
    // row, until it returns false.
    bool each_stored(Team& team, int first, int count, const StoredRows& rows, size_t row_bytes,
                     const std::function<bool(const uint8_t*, int)>& pack_row);
    void put_bias(const float* bias, int num_out);
    const void* source_row(const std::vector<Part>& parts, int panel, int lane) const;
    void pack_panel(const std::vector<Part>& parts, int panel, uint32_t* out) const;

    Matrix matrix_;
    std::vector<Format> formats_;
    std::vector<float> bias_;
    std::unique_ptr<void, Release> data_;
};

}  // namespace forerun
