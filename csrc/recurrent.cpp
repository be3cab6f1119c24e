// Recurrent blocks in a pass: one phase over rows that keeps their inputs, and one over runs and heads that does all
// the rest.
#include <algorithm>
#include <cstring>

#include "buffers.h"
#include "model.h"
#include "recurrent.h"

namespace forerun {

namespace {

constexpr int ITEMS_PER_THREAD = 2;  // with fewer, value heads that share a key head are items of their own

// In how many items the value heads of a key head are cut.
int parts_of_head(const StateHeads& heads, size_t num_runs, int num_threads) {
    return static_cast<int>(num_runs) * heads.key_heads < ITEMS_PER_THREAD * num_threads ? heads.share() : 1;
}

const StateRun& run_of(const std::vector<StateRun>& runs, int row) {
    const StateRun* run = runs.data();
    while (row >= run->first_row + run->num_rows) ++run;
    return *run;
}

StateInputs inputs_of(const RecurrencePart& r, const StatePool& pool, Type type, const float* rows,
                      const std::vector<float>& zeros) {
    return {type, r.width, r.conv, pool, zeros.data(), rows, static_cast<size_t>(r.input_size())};
}

}  // namespace

size_t state_floats(const RecurrencePart& r, const std::vector<StateRun>& runs, int num_threads) {
    size_t most = 0;
    if (r.is_short) return most;
    const int num_heads = r.heads.share() / parts_of_head(r.heads, runs.size(), num_threads);
    for (const StateRun& run : runs)
        most = std::max(most, delta_scratch(r.heads, num_heads, run.num_slots, run.num_levels, run.most_tokens));
    return most;
}

size_t most_state_floats(const RecurrencePart& r, int num_rows) {
    constexpr int MOST_NODES = 128, MOST_PENDING = 64;  // of a tree, see kv/states.py
    const int nodes = STATE_TOKENS + std::min(num_rows, MOST_NODES) + MOST_PENDING;
    return r.is_short ? 0 : delta_scratch(r.heads, r.heads.share(), nodes, 1 + nodes / STATE_TOKENS, nodes);
}

void Model::run_recurrence(int thread, int index, const Pass& pass, Buffers& b) {
    const Block& block = parts_.blocks[static_cast<size_t>(index)];
    const RecurrencePart& r = *block.recurrence;
    const StatePool& pool = pass.state_pools[index];
    times_rows(thread, b.residual, b.width, block.pre_attention, *r.input,
               stored(b.qkv, static_cast<size_t>(r.input_size())), b);
    if (r.gates)
        times_rows(thread, b.residual, b.width, block.pre_attention, *r.gates,
                   stored(b.state_gates, static_cast<size_t>(r.num_gates())), b);
    keep_inputs(thread, r, pool, pass, b);
    if (r.is_short) run_short_conv(thread, r, pool, pass, b);
    else run_delta_rule(thread, r, pool, pass, b);
    add_branch(thread, block, block.post_attention, *r.o, b.inputs_of(*r.o, b.inputs), b);
}

// Rounds what is convolved of each row to the type in which it is kept, where it is, and keeps it.
void Model::keep_inputs(int thread, const RecurrencePart& r, const StatePool& pool, const Pass& pass,
                        Buffers& b) const {
    const size_t stride = static_cast<size_t>(r.input_size()), width = static_cast<size_t>(r.width),
                 num_gates = static_cast<size_t>(r.num_gates());
    const Type type = pass.inputs();
    backend_.team.tiles(thread, pass.num_rows, [&](int row) {
        float* const x = b.qkv + static_cast<size_t>(row) * stride;
        for (size_t i = 0; i < width && r.is_short; ++i) x[i] *= x[i + 2 * width];
        if (type != Type::float32) backend_.kernels.to_type(x, r.width, type, x);
        const StateRun& run = run_of(pass.states, row);
        const int place = run.rows[static_cast<size_t>(row - run.first_row)];
        if (place < 0) return;
        const size_t bytes = width * bytes_of(type);
        std::memcpy(static_cast<char*>(pool.inputs) + static_cast<size_t>(place) * bytes, x, bytes);
        if (num_gates > 0)
            std::memcpy(pool.gates + static_cast<size_t>(place) * num_gates,
                        b.state_gates + static_cast<size_t>(row) * num_gates, num_gates * sizeof(float));
    });
}

void Model::run_delta_rule(int thread, const RecurrencePart& r, const StatePool& pool, const Pass& pass,
                           Buffers& b) const {
    const Norm* const norm = r.norm ? &*r.norm : nullptr;
    const DeltaRule rule{r.heads,
                         inputs_of(r, pool, pass.inputs(), b.qkv, zeros_),
                         r.taps,
                         r.dt_bias,
                         r.decay,
                         norm ? norm->weight : nullptr,
                         norm ? norm->eps : 0.0f,
                         b.state_gates,
                         b.inputs_of(*r.o, b.inputs)};
    const int parts = parts_of_head(r.heads, pass.states.size(), backend_.team.num_threads()),
              per_run = r.heads.key_heads * parts;
    const int num_heads = r.heads.share() / parts;
    float* const scratch = b.state + b.state_stride * static_cast<size_t>(thread);
    keep_history(thread, r, pool, pass, b);
    backend_.team.tiles(thread, static_cast<int>(pass.states.size()) * per_run, [&](int i) {
        const int part = i % parts;
        backend_.kernels.delta_rule(rule,
                                    {pass.states[static_cast<size_t>(i / per_run)].tokens(), i % per_run / parts,
                                     part * num_heads, (part + 1) * num_heads},
                                    scratch);
    });
}

void Model::run_short_conv(int thread, const RecurrencePart& r, const StatePool& pool, const Pass& pass,
                           Buffers& b) const {
    const Inputs next = b.inputs_of(*r.o, b.inputs);
    const StateInputs inputs = inputs_of(r, pool, pass.inputs(), b.qkv, zeros_);
    float* const sum = b.normed + b.normed_stride * static_cast<size_t>(thread);
    keep_history(thread, r, pool, pass, b);
    // Rows of one block share cache lines, so a block belongs to one thread.
    backend_.team.tiles(thread, next.num_blocks(), [&](int block) {
        for (int row = next.block_start(block); row < next.block_start(block + 1); ++row) {
            const StateTokens run = run_of(pass.states, row).tokens();
            const void* window[STATE_TOKENS];
            inputs.window(run, run.num_behind + row - run.first_row, window);
            backend_.kernels.convolve(pass.inputs(), window, r.taps, r.bias, r.width, r.conv, sum);
            const float* const c = b.qkv + static_cast<size_t>(row) * inputs.stride + r.width;
            for (int i = 0; i < r.width; ++i) sum[i] *= c[i];
            backend_.kernels.put_row(next, row, sum, r.width);
        }
    });
}

// Writes the last inputs before each state that a run leaves, which are no branch of a tree.
void Model::keep_history(int thread, const RecurrencePart& r, const StatePool& pool, const Pass& pass,
                         Buffers& b) const {
    const StateInputs inputs = inputs_of(r, pool, pass.inputs(), b.qkv, zeros_);
    const bool saves =
        std::any_of(pass.states.begin(), pass.states.end(), [](const StateRun& run) { return !run.saves.empty(); });
    backend_.team.tiles(thread, saves ? static_cast<int>(pass.states.size()) : 0, [&](int i) {
        const StateTokens run = pass.states[static_cast<size_t>(i)].tokens();
        for (const StateSave& save : pass.states[static_cast<size_t>(i)].saves)
            for (int j = 0; j < r.conv - 1; ++j)
                std::memcpy(inputs.history(save.state, j), inputs.of(run, save.num_tokens - (r.conv - 1) + j),
                            inputs.row_bytes());
    });
}

}  // namespace forerun
