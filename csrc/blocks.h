// A model as a list of blocks (src/forerun/blocks.py), as far as these kernels compute it. spec.cpp reads it from
// Python.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "backend.h"
#include "recurrence.h"

namespace forerun {

// Attention of one block. Weights are null where only sizes are asked for.
struct AttentionPart {
    int heads, kv_heads, head_dim;
    int reads;             // width of what is projected
    float scale;           // of the scores
    float softcap;         // 0 = none
    int window;            // 0 = all
    double position_beta;  // q is scaled by 1 + beta log(1 + position / step), the quotient rounded down; 0 = it is not
    int64_t position_step;
    int rotation;   // which of a model's tables of cos and sin, -1 = none
    int turned;     // dimensions of a head that are rotated
    int keys_of;    // the block whose keys and values are read, -1 = this one's own
    bool k_is_v;    // whether values are what the keys are before their norm
    bool gated;     // whether the output is multiplied by the sigmoid of a projection, which is behind the queries
    bool adjacent;  // whether dimension 2i turns with 2i + 1, in place of i + turned / 2
    Sees sees;
    Biases biases;
    const float* sinks;  // of each head, null = none
    std::optional<Norm> q_norm, k_norm, v_norm;
    const Matrix *qkv, *o;  // qkv: of queries alone where keys and values are a source's or another block's

    int q_size() const { return heads * head_dim; }
    int kv_size() const { return kv_heads * head_dim; }
    bool makes_keys() const { return sees != Sees::source && keys_of < 0; }
    int keys_at() const { return gated ? 2 * q_size() : q_size(); }  // where keys are in what is projected
    int qkv_size() const { return keys_at() + (makes_keys() ? 2 * kv_size() : 0); }
};

// The part of a block that keeps a state: a gated delta rule, or a short convolution, whose state is its last inputs.
struct RecurrencePart {
    bool is_short;                    // [B, C, x] are projected; what leaves is C times a convolution of B x
    StateHeads heads;                 // of a short convolution there are none
    int conv, width;                  // inputs that a convolution reads, and the numbers of each
    const Matrix *input, *gates, *o;  // input: with z behind it, or C and x; gates: null of a short convolution
    const float *taps, *bias;         // [conv, width], and [width] or null
    const float *dt_bias, *decay;
    std::optional<Norm> norm;

    int input_size() const { return is_short ? 3 * width : width + inner(); }
    int inner() const { return is_short ? width : heads.value_heads * heads.value_dim; }  // inputs of `o`
    int num_gates() const { return is_short ? 0 : 2 * heads.value_heads; }
    // The bytes of a state, of the inputs before it, of a token's inputs and of its gates, as a cache has them.
    std::array<size_t, 4> kept_bytes(Type inputs) const {
        const size_t row = static_cast<size_t>(width) * bytes_of(inputs),
                     head = static_cast<size_t>(heads.key_dim) * static_cast<size_t>(heads.value_dim);
        return {static_cast<size_t>(heads.value_heads) * head * sizeof(float), static_cast<size_t>(conv - 1) * row, row,
                static_cast<size_t>(num_gates()) * sizeof(float)};
    }
};

struct MlpPart {
    int size;
    Act act;
    bool gated;
    const Matrix *up, *down;  // up: gate and up, paired, where it is gated
    bool has_down;            // else it is act(up(x)), as wide as a row
};

// The scores that a router's outputs become: a softmax of all, a sigmoid of each, or a softmax of the chosen ones.
enum class Scores { softmax, sigmoid, softmax_of_chosen };

// A mixture of feed-forward parts: a row takes the parts with the `chosen` largest scores.
struct ExpertsPart {
    int num, chosen;
    std::vector<MlpPart> parts;
    std::optional<MlpPart> shared;       // of every row
    const Matrix *router, *shared_gate;  // shared_gate: its sigmoid weighs the shared part; null = it counts whole
    std::optional<Norm> router_norm;
    bool reads_stream;  // whether the router reads rows before the norm in front of the experts
    float score_scale;  // of the router's outputs
    Scores scores;
    bool normalises;           // whether the chosen scores are divided by their sum
    float scale;               // of the chosen scores
    const float* scales;       // of each expert's share, null = none
    const float* choice_bias;  // added to each score for the choice alone, null = nothing
    float sum_eps;             // added to the sum of the chosen scores
};

// What a block adds from its second input, beside the residual stream: norm(up(act(gate(x)) * inputs)).
struct LayerInputPart {
    int size;
    Act act;
    const Matrix *gate, *up;
    std::optional<Norm> norm;
};

// post-norms are of a branch before it is added, or of the sum.
struct Block {
    std::optional<Norm> pre_attention, post_attention, pre_mlp, post_mlp;
    std::optional<AttentionPart> attention;
    std::optional<RecurrencePart> recurrence;  // in place of it
    std::optional<MlpPart> mlp;
    std::optional<ExpertsPart> experts;  // in place of it, or beside it, where each has norms of its own
    std::optional<Norm> post_dense, pre_experts, post_experts;
    std::optional<LayerInputPart> layer_input;
    float out_scale;           // of the block's output
    bool norms_sum, parallel;  // parallel: both parts read the rows that come in
    float branch_scale;
};

// Rows that are looked up by number: a packed matrix, plain rows in the model's type, or none.
struct Table {
    const Matrix* packed;
    const void* rows;
    int num_rows;
    bool is_there() const { return packed || rows; }
};

// Makes the second inputs of all blocks, side by side for each token. scale: of rows of the table.
struct LayerInputs {
    int size;
    Table table;
    float scale;
    const Matrix* projection;
    std::optional<Norm> norm;
};

// What a head's residual stream begins with: a product of a token's embedding and features; features, while the first
// block's attention reads both; features alone; or the embedding, with the features of other tokens as context.
enum class Begins { product, read, features, context };

// The input of a head: the embedding of a token beside features, which are made from rows of the target.
struct FeatureParts {
    Begins begins;
    int num_ids, size, num;  // ids of tokens; width of the target's rows, and rows read for a token
    Join layers;             // makes features of these; without a matrix there is one row, taken as it is
    std::optional<Act> act;  // features are the first half of the product plus the act of the second
    std::optional<Norm> context_norm;
    Join sides;          // of the embedding and the features: norms, and where both make the stream, the matrix
    bool normed_stream;  // whether a stream that begins with features has them behind their norm
    bool feeds_normed;   // whether the next step's features are behind the final norm
};

struct ModelParts {
    int vocab_size, hidden_size;
    Type type;  // of dense weights, keys and values
    std::vector<Block> blocks;
    std::vector<int> rotations;  // of each table of cos and sin, the first block that uses it
    std::optional<Norm> embed_norm, final_norm;
    Table embedding, positions;
    float embed_scale;
    int position_offset;  // the row of position 0
    std::optional<LayerInputs> layer_inputs;
    std::optional<FeatureParts> features;
    LogitRange range;
    const Matrix* head;  // null = none
};

}  // namespace forerun
