// A mixture of experts in a pass: rows are grouped by expert, so that each expert's weights are read once for all rows
// that chose it. A row's result does not depend on the others: its experts' outputs are summed by ascending number.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "buffers.h"
#include "model.h"

namespace forerun {

namespace {

// e^x for x <= 0, with the bits of every instruction set.
void exp_below_zero(const Kernels& kernels, float* x, int n) { kernels.sampling.exp(x, n, 1.0, x); }

float sigmoid(const Kernels& kernels, float x) {
    float power = std::max(-std::fabs(x), -87.0f);
    exp_below_zero(kernels, &power, 1);
    return (x < 0 ? power : 1.0f) / (1.0f + power);
}

void divide(float* x, int n, float total) {
    for (int i = 0; i < n; ++i) x[i] /= total;
}

void softmax(const Kernels& kernels, float* x, int n) {
    const float top = *std::max_element(x, x + n);
    float total = 0.0f;
    for (int i = 0; i < n; ++i) x[i] = std::max(x[i] - top, -87.0f);
    exp_below_zero(kernels, x, n);
    for (int i = 0; i < n; ++i) total += x[i];
    divide(x, n, total);
}

// The numbers to compare where a bias counts for the choice alone; else the router's outputs serve, which rise with
// scores.
void rank(const Kernels& kernels, const ExpertsPart& e, const float* scores, float* ranks) {
    std::memcpy(ranks, scores, static_cast<size_t>(e.num) * sizeof(float));
    if (e.scores == Scores::softmax) softmax(kernels, ranks, e.num);
    for (int i = 0; i < e.num; ++i)
        ranks[i] = (e.scores == Scores::sigmoid ? sigmoid(kernels, ranks[i]) : ranks[i]) + e.choice_bias[i];
}

// The numbers of the experts with the largest scores, ascending; of equal scores the lowest number counts as larger.
void choose(const float* scores, int num, int chosen, int* out) {
    int count = 0;  // of those so far, the largest first
    for (int i = 0; i < num; ++i) {
        if (count == chosen && !(scores[i] > scores[out[count - 1]])) continue;
        int place = count < chosen ? count++ : count - 1;
        for (; place > 0 && scores[i] > scores[out[place - 1]]; --place) out[place] = out[place - 1];
        out[place] = i;
    }
    std::sort(out, out + chosen);
}

// The share of each chosen expert's output. scores [num]: of the router, which are overwritten.
void weigh(const Kernels& kernels, const ExpertsPart& e, float* scores, const int* chosen, float* shares) {
    if (e.scores == Scores::softmax) softmax(kernels, scores, e.num);
    for (int k = 0; k < e.chosen; ++k)
        shares[k] = e.scores == Scores::sigmoid ? sigmoid(kernels, scores[chosen[k]]) : scores[chosen[k]];
    if (e.scores == Scores::softmax_of_chosen) softmax(kernels, shares, e.chosen);
    else if (e.normalises) {
        float total = 0.0f;
        for (int k = 0; k < e.chosen; ++k) total += shares[k];
        divide(shares, e.chosen, total + e.sum_eps);
    }
    for (int k = 0; k < e.chosen; ++k) shares[k] *= e.scales ? e.scale * e.scales[chosen[k]] : e.scale;
}

}  // namespace

// Groups what the rows chose by expert. The choices of row r are r * chosen and on.
void ExpertGroups::group(int num_rows, const ExpertsPart& e) {
    std::vector<int> counts(static_cast<size_t>(e.num) + 1, 0);
    const int num = num_rows * e.chosen;
    for (int i = 0; i < num; ++i) ++counts[static_cast<size_t>(chosen[static_cast<size_t>(i)]) + 1];
    experts.clear(), firsts.clear();
    for (int expert = 0, first = 0; expert < e.num; ++expert) {
        const int count = counts[static_cast<size_t>(expert) + 1];
        if (count > 0) experts.push_back(expert), firsts.push_back(first);
        counts[static_cast<size_t>(expert)] = first;
        first += count;
    }
    firsts.push_back(num);
    rows.resize(static_cast<size_t>(num)), place_of.resize(static_cast<size_t>(num));
    for (int i = 0; i < num; ++i) {
        const int place = counts[static_cast<size_t>(chosen[static_cast<size_t>(i)])]++;
        rows[static_cast<size_t>(place)] = i / e.chosen, place_of[static_cast<size_t>(i)] = place;
    }
}

void Model::run_experts(int thread, int index, const Block& block, Buffers& b) {
    const ExpertsPart& e = *block.experts;
    const Kernels& kernels = backend_.kernels;
    Team& team = backend_.team;
    // Of this block alone: a thread that comes late reads what no later phase writes.
    ExpertGroups& groups = b.groups[static_cast<size_t>(index)];
    const size_t width = static_cast<size_t>(b.width), num = static_cast<size_t>(e.num),
                 chosen = static_cast<size_t>(e.chosen);

    // What all experts read, and the router's inputs. Rows of one block share cache lines, so a block belongs to one
    // thread.
    const Inputs routed = b.inputs_of(*e.router, b.inputs);
    const std::optional<Norm>& pre = block.mlp ? block.pre_experts : block.pre_mlp;
    float* const own = b.normed + b.normed_stride * static_cast<size_t>(thread);
    team.tiles(thread, routed.num_blocks(), [&](int k) {
        for (int row = routed.block_start(k); row < routed.block_start(k + 1); ++row) {
            float* const to = b.row(b.experts_in, row);
            const float* const stream = b.row(b.residual, row);
            if (pre) norm_row(kernels, *pre, stream, b.width, to);
            else std::memcpy(to, stream, width * sizeof(float));
            const float* const read = e.reads_stream ? stream : to;
            if (e.router_norm) norm_row(kernels, *e.router_norm, read, b.width, own);
            kernels.put_row(routed, row, e.router_norm ? own : read, b.width);
        }
    });
    product(backend_, thread, *e.router, routed, stored(b.scores, num));
    team.tiles(thread, b.num_rows, [&](int row) {
        const size_t at = static_cast<size_t>(row) * chosen;
        float* const scores = b.scores + static_cast<size_t>(row) * num;
        for (size_t i = 0; i < num && e.score_scale != 1.0f; ++i) scores[i] *= e.score_scale;
        static thread_local std::vector<float> ranks;
        if (e.choice_bias) ranks.resize(num), rank(kernels, e, scores, ranks.data());
        choose(e.choice_bias ? ranks.data() : scores, e.num, e.chosen, groups.chosen.data() + at);
        weigh(kernels, e, scores, groups.chosen.data() + at, groups.shares.data() + at);
    });
    team.tiles(thread, 1, [&](int) { groups.group(b.num_rows, e); });

    // Each expert's rows side by side: its inputs, what is between its two products, its outputs.
    const size_t num_experts = groups.experts.size();
    std::vector<Product> up, down;
    for (size_t i = 0; i < num_experts; ++i) {
        const MlpPart& part = e.parts[static_cast<size_t>(groups.experts[i])];
        const size_t first = static_cast<size_t>(groups.firsts[i]);
        const int count = groups.firsts[i + 1] - groups.firsts[i];
        const Inputs x{b.experts_words + first * static_cast<size_t>(part.up->num_steps), part.up->type, count,
                       part.up->num_steps};
        const Inputs inner{b.experts_inner + first * static_cast<size_t>(part.down->num_steps), part.down->type, count,
                           part.down->num_steps};
        up.push_back({part.up, x, activated_as(inner, part.act, part.gated)});
        down.push_back({part.down, inner, stored(b.experts_out + first * width, width)});
    }
    team.tiles(thread, static_cast<int>(num_experts), [&](int i) {
        const Inputs& x = up[static_cast<size_t>(i)].x;
        const int first = groups.firsts[static_cast<size_t>(i)];
        for (int k = 0; k < x.num_rows; ++k)
            kernels.put_row(x, k, b.row(b.experts_in, groups.rows[static_cast<size_t>(first + k)]), b.width);
    });
    products(backend_, thread, up);
    products(backend_, thread, down);

    if (e.shared) {
        const Inputs inner = b.inputs_of(*e.shared->down, b.ffn);
        times_rows(thread, b.experts_in, b.width, std::nullopt, *e.shared->up,
                   activated_as(inner, e.shared->act, e.shared->gated), b);
        product(backend_, thread, *e.shared->down, inner, stored(b.shared_out, width));
        if (e.shared_gate)
            times_rows(thread, b.experts_in, b.width, std::nullopt, *e.shared_gate, stored(b.scores, 1), b);
    }
    team.tiles(thread, b.num_rows, [&](int row) {
        float* const sum = b.row(b.branch, row);
        std::fill(sum, sum + width, 0.0f);
        for (size_t k = 0; k < chosen; ++k) {
            const size_t at = static_cast<size_t>(row) * chosen + k;
            const float* const part = b.row(b.experts_out, groups.place_of[at]);
            const float share = groups.shares[at];
            for (size_t i = 0; i < width; ++i) sum[i] += part[i] * share;
        }
        if (block.mlp) {  // whose outputs are there
            float* const dense = b.row(b.shared_out, row);
            if (block.post_experts) norm_row(kernels, *block.post_experts, sum, b.width, sum);
            if (block.post_dense) norm_row(kernels, *block.post_dense, dense, b.width, dense);
            for (size_t i = 0; i < width; ++i) sum[i] += dense[i];
        }
        if (!e.shared) return;
        float gate = 1.0f;
        if (e.shared_gate) {
            const float score = b.scores[row];
            float power = std::max(-std::fabs(score), -87.0f);
            exp_below_zero(kernels, &power, 1);
            gate = (score < 0 ? power : 1.0f) / (1.0f + power);
        }
        const float* const part = b.row(b.shared_out, row);
        for (size_t i = 0; i < width; ++i) sum[i] += part[i] * gate;
    });
}

}  // namespace forerun
