// Layers that keep a state in place of rows of keys and values: what a pass goes through of each run, and what the
// kernel of the gated delta rule reads and writes. src/forerun/kv/states.py says which states and rows these are.
//
// A state is known at positions that are multiples of STATE_TOKENS, and the tokens from there to the next such position
// are a *stretch*: what they do is computed from the state that the stretch begins with. Which tokens are in a stretch
// follows from positions alone, so the bits of a row and of a state do not depend on what a pass begins with or how it
// is composed.
#pragma once

#include <vector>

#include "kernels.h"

namespace forerun {

constexpr int STATE_TOKENS = 16;  // of blocks.py: states are written where so many tokens are whole

// The states of a layer and the inputs of tokens behind them. history: the last conv - 1 inputs before each state, the
// oldest first. Inputs are float32 or bfloat16, all else is float32.
struct StatePool {
    float* states;  // [states, heads, key_dim, value_dim]
    void* history;  // [states, conv - 1, width]
    void* inputs;   // [rows, width]
    float* gates;   // [rows, number of gates]
};

// A state that is written when so many tokens behind the first state are done.
struct StateSave {
    int num_tokens, state;
};

// Tokens that are computed from one state. Tokens of one path have consecutive slots, which keep their keys and what
// they add to a state until no later stretch needs them. Stretches that begin behind different tokens of one stretch
// are computed one after the other, and the last of them takes its place.
struct Stretch {
    // The stretch, and the token of it, that the state is behind; -1: it is the first state of the run.
    int from, from_token;
    int save;          // where that state is written, -1 = nowhere
    int first, count;  // its tokens, among StateRun::order
    int slot, level;   // of its first token; of its state
};

// The tokens of a run as kernels see them: the tokens behind its first state, and then its own rows.
struct StateTokens {
    int first_row, num_behind;  // first_row: of its own, in the pass
    int first;                  // the state that it begins with, -1 = zeros
    const int* behind;          // rows of the pool with the inputs of the tokens before its own
    const int* parents;         // of each token, -1 = the state
    const Stretch* stretches;   // each behind the one that it goes on from
    int num_stretches;
    const int* order;           // tokens by stretch, ascending
    const int *slots, *depths;  // of each token; depths: in its stretch
    const int* paths;  // [tokens, STATE_TOKENS] slots of the tokens of its stretch that it stands behind, then its own
    int num_slots, num_levels, most_tokens;  // most_tokens: of a stretch

    FORERUN_INLINE const int* path(int token) const { return paths + static_cast<size_t>(token) * STATE_TOKENS; }
};

// A run as recurrent layers see it.
struct StateRun {
    int first_row, num_rows;
    int first;  // as above
    int start;  // the position behind that state
    std::vector<int> behind;
    std::vector<int> rows;  // [num_rows] where its own inputs go, -1 = they are not kept
    std::vector<int> parents;
    std::vector<StateSave> saves;

    std::vector<Stretch> stretches;
    std::vector<int> order, slots, depths, paths;
    int num_slots = 0, num_levels = 0, most_tokens = 0;

    int num_tokens() const { return static_cast<int>(behind.size()) + num_rows; }
    StateTokens tokens() const {
        return {first_row,
                static_cast<int>(behind.size()),
                first,
                behind.data(),
                parents.data(),
                stretches.data(),
                static_cast<int>(stretches.size()),
                order.data(),
                slots.data(),
                depths.data(),
                paths.data(),
                num_slots,
                num_levels,
                most_tokens};
    }

    // Cuts the tokens into stretches.
    void arrange();
    // Own rows [from, from + count) of a chain, where those before have been run: behind the last state that they have
    // left.
    StateRun part(int from, int count, int first_row) const;
};

// Where the inputs of tokens are: in a state's history, in the pool, and of a run's own rows in the pass.
struct StateInputs {
    Type type;
    int width, conv;
    StatePool pool;
    const void* zeros;  // an input of them
    const float* rows;  // [rows, stride] of the pass, which begin with inputs in their type
    size_t stride;

    FORERUN_INLINE size_t row_bytes() const { return static_cast<size_t>(width) * bytes_of(type); }
    // token: -1 is the last one that the state has seen, and so on.
    FORERUN_INLINE const void* of(const StateTokens& run, int token) const {
        if (token >= run.num_behind) return rows + static_cast<size_t>(run.first_row + token - run.num_behind) * stride;
        if (token >= 0)
            return static_cast<const char*>(pool.inputs) + static_cast<size_t>(run.behind[token]) * row_bytes();
        return run.first < 0 ? zeros : history(run.first, conv - 1 + token);
    }
    FORERUN_INLINE char* history(int state, int i) const {
        return static_cast<char*>(pool.history) +
               (static_cast<size_t>(state) * static_cast<size_t>(conv - 1) + static_cast<size_t>(i)) * row_bytes();
    }
    // The inputs that a token's convolution reads, the oldest first.
    FORERUN_INLINE void window(const StateTokens& run, int token, const void** to) const {
        for (int j = conv - 1; j >= 0; --j) {
            to[j] = of(run, token);
            token = token < 0 ? token - 1 : run.parents[token];
        }
    }
};

// The heads of a block with a gated delta rule. head_step: from a value head to the next one that reads the same key
// head.
struct StateHeads {
    int key_heads, value_heads, key_dim, value_dim;
    int head_step;

    FORERUN_INLINE int share() const { return value_heads / key_heads; }  // value heads of a key head
    FORERUN_INLINE int value_head(int key_head, int i) const {
        return (head_step == 1 ? key_head * share() : key_head) + i * head_step;
    }
};

// Some of the value heads that read one key head, [first, last) of these, for one run.
struct StateItem {
    StateTokens run;
    int key_head, first, last;
};

// The gated delta rule of one layer and pass.
struct DeltaRule {
    StateHeads heads;
    StateInputs inputs;            // q, k and v of all heads; z stands `width` floats behind the beginning of a row
    const float* taps;             // [conv, width]
    const float *dt_bias, *decay;  // [value heads]; decay: what the softplus is multiplied by
    const float* norm;             // [value_dim], null = there is none
    float norm_eps;
    const float* gates;  // [rows, 2 value heads]: b, then a
    Inputs next;         // of the product behind it
};

// Floats that a thread needs for an item.
size_t delta_scratch(const StateHeads& heads, int num_heads, int num_slots, int num_levels, int most_tokens);

}  // namespace forerun
