// What a pass writes besides the caches: for model.cpp and experts.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"

namespace forerun {

// Which experts the rows of a pass have chosen in one block, and those rows by expert.
struct ExpertGroups {
    std::vector<int> chosen;    // [rows * chosen] experts of each row, ascending
    std::vector<float> shares;  // [rows * chosen] what their outputs are multiplied by
    std::vector<int> experts;   // that some row has chosen, ascending
    std::vector<int> firsts;    // [experts + 1] where the rows of each begin among `rows`
    std::vector<int> rows;      // [rows * chosen] by expert
    std::vector<int> place_of;  // [rows * chosen] where each choice of a row is among `rows`

    void group(int num_rows, const ExpertsPart& e);
};

// The buffers that one pass writes, besides the caches. The inputs of one product after the other use the same memory.
struct Model::Buffers {
    int num_rows, width;
    float *residual, *branch, *qkv, *normed, *attention, *parts;
    size_t normed_stride, attention_stride;
    uint32_t *inputs, *ffn;  // inputs of products; attention heads take the place of the hidden rows
    uint32_t* own;           // each thread's own copy of the normed rows, or null
    size_t own_stride;
    std::vector<AttentionWork> work;                        // by shape
    std::vector<ExpertGroups> groups;                       // by block
    float *experts_in, *scores, *experts_out, *shared_out;  // normed rows, their scores, and the experts' outputs
    float* layer_inputs;                                    // of all blocks, of each row side by side
    uint32_t *experts_words, *experts_inner;                // inputs of the experts' products
    float *state_gates, *state;                             // of recurrent blocks; the latter of each thread
    size_t state_stride;

    Inputs inputs_of(const Matrix& w, uint32_t* words) const { return {words, w.type, num_rows, w.num_steps}; }
    float* row(float* rows, int i) const { return rows + static_cast<size_t>(i) * static_cast<size_t>(width); }
    Output add() const { return added(residual, static_cast<size_t>(width)); }
};

}  // namespace forerun
