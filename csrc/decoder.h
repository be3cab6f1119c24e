// A pre-norm decoder (Llama, Mistral, Qwen) as one native call for each pass.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "process.h"

namespace forerun {

// Kernels of one instruction set with the threads that run them.
struct Backend {
    const Kernels& kernels;
    Team team;
    Backend(const Kernels& k, int num_threads) : kernels(k), team(num_threads) {}
};

// Aligned memory that grows on demand; its contents are lost when it grows.
class Scratch {
  public:
    ~Scratch();
    void* bytes(size_t count);
    float* floats(size_t count) { return static_cast<float*>(bytes(count * sizeof(float))); }
    uint32_t* words(size_t count) { return static_cast<uint32_t*>(bytes(count * sizeof(uint32_t))); }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

void* allocate(size_t bytes);  // uses huge pages where the system has them; null where there is no memory
void release(void* data, size_t bytes);  // as many as were asked for

struct DecoderShape {
    int hidden_size, num_heads, num_kv_heads, head_dim, ffn_size, vocab_size;
    float norm_eps;
    Type type;  // of dense weights, keys and values
};

struct Layer {
    const float *input_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
    const Matrix *qkv, *o, *gate_up, *down;
    int window;  // 0 = full attention
};

// The embedding: a packed matrix (tied to the head), or plain rows in the model's type.
struct Embedding {
    const Matrix* packed;
    const void* rows;
};

// One ragged pass through some layers, in ascending order. tokens, positions [num_rows]; rotations: cos and sin by
// position, [.., 2, head_dim]; keys, values: one pool for each layer; input: the first layer's input, null = embeddings of
// the tokens; hidden: receives the result, after the final norm if is_normed; taps: ascending pairs (k, memory that
// receives the residual stream before layer k). All rows are float32 [num_rows, hidden_size].
struct Pass {
    int num_rows;
    const int64_t *tokens, *positions;
    const float* rotations;
    std::vector<Run> runs;
    void* const* keys;
    void* const* values;
    std::vector<int> layers;
    const float* input;
    std::vector<std::pair<int, float*>> taps;
    bool is_normed;
    float* hidden;
};

// Rows that stand side by side, each behind a norm of its own, and their product: [norm(a) | norm(b) | ...] w. It makes
// what the layer of a head reads (EAGLE).
struct Join {
    std::vector<const float*> norms;  // of each part; null = the part as it is
    float norm_eps;
    const Matrix* w;
};

// parts: of each float32 [num_rows, inputs of w / parts]. out: float32 [num_rows, outputs of w].
void join_rows(Backend& backend, const Join& join, const std::vector<const float*>& parts, int num_rows, float* out);

class Decoder;

// How a head goes on: the row behind a found id joins that id's embedding of the target with what the last layer has
// left of the row before.
struct Ahead {
    const Decoder* target;
    std::vector<int64_t> ids;  // the target's, of each own id
    Join join;
};

class Decoder {
  public:
    Decoder(Backend& backend, DecoderShape shape, std::vector<Layer> layers, Embedding embedding,
            const float* final_norm, const Matrix* head);

    // Throws std::out_of_range for a token that is no row of the embedding.
    void forward(const Pass& pass);
    // Rows of the final hidden states [num_rows, hidden_size] -> float32 logits [num_rows, vocab_size].
    void logits(const float* hidden, int num_rows, float* out);
    // Finds the largest of the first num_ids logits of some rows and its id, without writing the other logits. Ties go to
    // the lowest id; a NaN counts as the largest, the first one if there are several.
    void argmax(const float* hidden, const std::vector<int>& rows, int num_ids, int64_t* ids, float* values);
    // Continues each run greedily: ids[i][k] follows the run's tokens and ids[i][0 .. k-1], which are fed one by one.
    // lengths [runs], each at least 1: how many ids are wanted; a run must have cache rows for all of them but the last.
    // Stops and returns false where a logit is NaN. ahead: of a head, whose pass has an input; null = a found id is fed by its
    // embedding.
    bool run_ahead(const Pass& first, const std::vector<int>& lengths, int num_ids, const Ahead* ahead,
                   std::vector<std::vector<int64_t>>& ids);
    void embed(int64_t token, float* x) const;  // the token must be a row of the embedding
    const DecoderShape& shape() const { return shape_; }

  private:
    struct Buffers;
    struct Share;
    // The buffers of passes, which take turns.
    struct Room {
        std::mutex turn;
        Scratch residual, qkv, inputs, own, ffn, normed, attention, parts;
    };
    Buffers buffers(Room& room, const Pass& pass);
    std::vector<Share> shares_of(const Pass& pass, int window) const;
    Inputs head_inputs(Room& room, int num_rows) const;
    void layer(int thread, const Layer& layer, int index, const Pass& pass, Buffers& b);
    void attend(int thread, const Layer& layer, int index, const Pass& pass, Buffers& b);
    void rotate_and_write(const Layer& layer, int index, const Pass& pass, Buffers& b, int row);
    bool alone(int num_rows) const;

    Backend& backend_;
    DecoderShape shape_;
    std::vector<Layer> layers_;
    Embedding embedding_;
    const float* final_norm_;
    const Matrix* head_;
    size_t bytes_;  // weights that a pass reads
    bool is_any_quantised_ = false;
    PerProcess<Room> room_;
};

// Computes a product with all threads of a team; each of them must call it inside `run`. prepare: what a thread does before
// its first tile, to write a copy of the inputs of its own.
void product(Backend& backend, int thread, const Matrix& w, const Inputs& x, const Output& to,
             const std::function<void()>& prepare = nullptr);

}  // namespace forerun
