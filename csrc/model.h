// A whole model as one native call for each pass: a list of blocks on a residual stream.
#pragma once

#include <array>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "attention_work.h"
#include "backend.h"
#include "blocks.h"
#include "memory.h"
#include "process.h"
#include "sampling.h"

namespace forerun {

// One ragged pass through some blocks, in ascending order. tokens, positions [num_rows]. sources: for each run, the
// rows of a source that its blocks see, as cached rows. rotations: for each kind of the model, cos and sin by position,
// [.., 2, turned dimensions], and the number of positions. keys, values: one pool for each block, and the bytes of
// their rows. kinds: for each pool, which runs have its rows. states, state_pools: of recurrent blocks, by run and by
// block. input: the first block's input, null = embeddings of the tokens. read: what the first block's attention reads,
// null = the stream behind its norm. hidden: receives the result, behind the final norm if is_normed. taps: ascending
// pairs (k, memory that receives the residual stream before block k). All rows are float32 [num_rows, hidden_size], but
// rows of `read` are as wide as attention reads them.
struct Pass {
    int num_rows;
    const int64_t *tokens, *positions;
    std::vector<std::pair<const float*, int64_t>> rotations;
    std::vector<std::vector<Run>> runs;  // by kind of layers: the same but for their rows
    std::vector<Run> sources;
    void* const* keys;
    void* const* values;
    const std::array<size_t, 2>* row_bytes;
    const int* kinds;
    std::vector<StateRun> states;
    const StatePool* state_pools;
    Type kept;     // of keys and values
    bool refined;  // whether keys in bytes have second codes
    Type inputs() const { return kept == Type::float32 ? Type::float32 : Type::bfloat16; }  // of recurrent blocks
    std::vector<int> layers;
    const float *input, *read;
    std::vector<std::pair<int, float*>> taps;
    bool is_normed;
    float* hidden;
};

// Floats and words of the buffers of a pass, by name; `each` = of every thread.
struct BufferSizes {
    size_t residual, branch, qkv, inputs, ffn, parts;
    size_t experts_in, scores, experts_out, shared_out, experts_words, experts_inner, groups, layer_inputs, state_gates;
    size_t each_normed, each_own, each_attention, each_state;
};

// weights_are_quantised: whether some matrix is: its inputs take more. state_floats: of each thread, for recurrent
// blocks.
BufferSizes buffer_sizes(const ModelParts& model, bool weights_are_quantised, int num_rows, size_t part_floats,
                         size_t state_floats);

// The bytes of the buffers of a model after a pass of so many rows behind a context, an upper bound.
size_t pass_bytes(const Kernels& kernels, const ModelParts& model, bool weights_are_quantised, int num_rows,
                  int context, int num_threads);

class Model;

// What a head borrows from its target: the embedding, where it has none, and the target's id for each of its ids.
struct Lent {
    const Model* target = nullptr;  // null = no head
    std::vector<int64_t> ids;
};

// When a run that is continued greedily ends before its length: behind id k (from 0) if the product of the shares of
// all ids so far is below least[k], or there is no least[k]. shares[i]: how often an id is right whose probability is
// at least i of the ascending edges.
struct Stop {
    std::vector<float> edges, shares, least;
};

// How the ids of a run that is continued are drawn, with the bits of forerun.sampling: picked by the noise of match
// verification, which is shared, or by a uniform number of the run's own.
struct Draw {
    Filters filters;  // of temperature 0: the id of the largest logit
    bool shares_noise;
    uint64_t seed, position;  // position: of the first id
    uint32_t round;
};

// What follows a run: ids; where they are asked for, the probability of each; and the distribution that each was drawn
// from, which is empty where nothing was drawn.
struct Continued {
    std::vector<int64_t> ids;
    std::vector<float> chances;
    std::vector<Probs> probs;
};

class Model {
  public:
    // vectors: weights of norms that the parts point to and that nobody else keeps. Throws std::invalid_argument for
    // matrices of a head that do not fit its rows.
    Model(Backend& backend, ModelParts parts, std::vector<std::vector<float>> vectors, Lent lent = {});

    // Returns how many experts some row chose, for each block with experts, in the order of the layers.
    // Throws std::out_of_range for a token that is no row of the embedding, or a position that has none, and
    // WrongNumbers for pools of other heads. The layers must be some of the blocks, and the runs have rows that are
    // there.
    std::vector<int> forward(const Pass& pass);
    // Final norm of rows [num_rows, hidden_size], float32.
    void norm(const float* hidden, int num_rows, float* out);
    // Rows of the final hidden states [num_rows, hidden_size] -> float32 logits [num_rows, outputs of the head].
    // num_ids: of the first outputs alone; the rest of the head is not read.
    void logits(const float* hidden, int num_rows, int num_ids, float* out);
    // Finds the largest of the first num_ids logits of some rows and its id, without writing the other logits. Ties go
    // to the lowest id; a NaN counts as the largest, the first one if there are several. probs: null, or the softmax of
    // these logits at each id.
    void argmax(const float* hidden, const std::vector<int>& rows, int num_ids, int64_t* ids, float* values,
                float* probs = nullptr);
    // Continues each run: ids[k] follows the run's tokens and ids[0 .. k-1], which are fed one by one.
    // lengths [runs], each at least 1: how many ids are wanted; a run must have cache rows for all of them but the
    // last, and so must its states. draws: for each run, or none at all = the likeliest ids. Stops and returns false
    // where a logit is NaN. A head takes the features of the tokens as input, or makes them from `layer_rows` (see
    // `features`); for an id just found, the head's own row before it serves as features. stops: for each run, or none
    // at all; with stops every id's probability is returned.
    bool run_ahead(const Pass& first, const std::vector<int>& lengths, int num_ids,
                   const std::vector<const float*>& layer_rows, const std::vector<Stop>& stops,
                   const std::vector<Draw>& draws, std::vector<Continued>& found);
    // Writes a head's features to `out` [num_rows, hidden_size], from its target's rows by layer [num_rows,
    // features.size].
    void features(const std::vector<const float*>& layer_rows, int num_rows, float* out) const;
    // Writes keys and values of the features that a head makes from its target's rows, as context of its blocks.
    void remember(const Pass& pass, const std::vector<const float*>& layer_rows);
    void embed(int64_t token, float* x) const;  // the token must be a row of the embedding
    const Model& embedder() const { return parts_.embedding.is_there() || !lent_.target ? *this : *lent_.target; }
    const Lent& lent() const { return lent_; }
    const ModelParts& parts() const { return parts_; }
    int keys_of(int block) const;  // the block whose keys and values a block reads

  private:
    struct Buffers;
    // The buffers of passes, which take turns.
    struct Room {
        std::mutex turn;
        Scratch residual, branch, qkv, inputs, own, ffn, normed, attention, parts;
        Scratch experts_in, scores, experts_out, shared_out, experts_words, experts_inner, layer_inputs;
        Scratch state_gates, state;
    };
    const Matrix& head() const;
    void check(const Pass& pass) const;
    std::vector<int> run(const Pass& pass);
    Pass begun(const Pass& pass, std::vector<float>& stream, std::vector<float>& read) const;
    bool begins(Begins with) const { return parts_.features && parts_.features->begins == with; }
    bool joins_tokens() const { return begins(Begins::product) || begins(Begins::read); }  // with features
    void keep_keys(int thread, int index, const Pass& pass, Buffers& b);
    void add_activated(int thread, const Block& block, Buffers& b);
    Buffers buffers(Room& room, const Pass& pass) const;
    Inputs head_inputs(Room& room, const Matrix& head, int num_rows) const;
    void enter(const Pass& pass, int row, float* x) const;
    void run_block(int thread, int index, const Pass& pass, Buffers& b);
    void run_attention(int thread, int index, const Pass& pass, Buffers& b);
    void run_recurrence(int thread, int index, const Pass& pass, Buffers& b);
    void keep_inputs(int thread, const RecurrencePart& r, const StatePool& pool, const Pass& pass, Buffers& b) const;
    void run_delta_rule(int thread, const RecurrencePart& r, const StatePool& pool, const Pass& pass, Buffers& b) const;
    void run_short_conv(int thread, const RecurrencePart& r, const StatePool& pool, const Pass& pass, Buffers& b) const;
    void keep_history(int thread, const RecurrencePart& r, const StatePool& pool, const Pass& pass, Buffers& b) const;
    void feed(int thread, const Block& block, Buffers& b);
    void make_layer_inputs(int thread, const Pass& pass, Buffers& b);
    void add_layer_input(int thread, int index, const Block& block, Buffers& b);
    void unpack(const Table& table, int64_t row, int width, float* x) const;
    void run_experts(int thread, int index, const Block& block, Buffers& b);
    void times_rows(int thread, const float* rows, int width, const std::optional<Norm>& norm, const Matrix& w,
                    const Output& to, Buffers& b);
    void add_branch(int thread, const Block& block, const std::optional<Norm>& post, const Matrix& w, const Inputs& x,
                    Buffers& b);
    struct Next;
    std::vector<Next> likeliest(const float* hidden, const std::vector<int>& rows, int num_ids, bool is_told);
    std::vector<Next> drawn(const float* hidden, const std::vector<int>& rows, int num_ids,
                            const std::vector<const Draw*>& draws, uint64_t depth, bool is_told);
    void join_branch(int thread, const Block& block, const std::optional<Norm>& post, Buffers& b);
    void rotate_and_write(const AttentionPart& a, int index, const Pass& pass, Buffers& b, int row) const;
    KeyOrder order_of(int block, const Pass& pass) const;
    std::vector<int> kinds_of(const Pass& pass) const;
    bool alone(int num_rows) const;

    Backend& backend_;
    ModelParts parts_;
    Lent lent_;
    std::vector<std::vector<float>> vectors_;
    std::vector<HeadShape> shapes_;              // of attention, each once
    std::vector<size_t> shape_of_;               // by block
    std::vector<std::vector<uint16_t>> orders_;  // of keys, by block; of what has none they are empty
    std::vector<float> zeros_;                   // the inputs of no token
    size_t bytes_ = 0;                           // weights that a pass reads
    bool is_any_quantised_ = false;
    PerProcess<Room> room_;
};

}  // namespace forerun
