// Packs row-major weights into panels, and can give the source's memory back while it does.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace forerun {

// Rows of one source matrix, row-major, of the packed type.
struct Part {
    const void* rows;
    int num_rows;
};

class Packed {
  public:
    // paired: exactly two parts of equal height (gate, up), 16 outputs of each in a panel; otherwise the parts follow each
    // other. bias: float32 over all outputs in the order of the parts, or null. give_back: the pages of the source are
    // returned to the system as they are packed, and its owner must not read it again.
    Packed(Team& team, Type type, const std::vector<Part>& parts, int num_in, bool paired, const float* bias,
           bool give_back);
    // Quantised weights, which `fill` brings. num_rows: of each part.
    Packed(Type type, const std::vector<int>& num_rows, int num_in, bool paired, const float* bias, bool wide_scales, bool has_zeros,
           int groups_per_unit);
    // Rows [first, first + count) of all parts in order. codes [count, num_in]; scales, minimums (or zeros) float32 [count, groups],
    // where a row of 32 inputs has groups_per_unit groups. Returns false where they do not fit into float16.
    bool fill(Team& team, int first, int count, const uint8_t* codes, const float* scales, const float* minimums);
    Packed(const Packed&) = delete;
    Packed& operator=(const Packed&) = delete;

    const Matrix& matrix() const { return matrix_; }
    // Copies the weights of one output, [num_in] in the packed type, float32 where it is quantised.
    void unpack(int index, void* out) const;

  private:
    struct Release {
        void operator()(void* data) const;
    };

    void put_bias(const float* bias, int num_out);
    const void* source_row(const std::vector<Part>& parts, int panel, int lane) const;
    void pack_panel(const std::vector<Part>& parts, int panel, uint32_t* out) const;

    Matrix matrix_;
    std::vector<float> bias_;
    std::unique_ptr<void, Release> data_;
};

}  // namespace forerun
