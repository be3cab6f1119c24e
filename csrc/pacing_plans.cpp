#include "pacing_plans.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>

namespace forerun::pacing {

namespace {

constexpr int DEPTHS[] = {1, 2, 3, 4, 6, 8, 12};
constexpr int NUM_EXACT = 17;                    // numbers of nodes that are looked at one by one,
constexpr int FIRST_COARSE = 17, END_COARSE = 65;  // then 2^(i/4)
constexpr double SURE = 0.999;

std::vector<int> numbers_below(int total) {
    std::vector<int> numbers;
    for (int n = 0; n < NUM_EXACT && n < total; ++n) numbers.push_back(n);
    for (int i = FIRST_COARSE; i < END_COARSE; ++i) {
        const int n = static_cast<int>(std::nearbyint(std::exp2(i / 4.0)));
        if (n < total) numbers.push_back(n);
    }
    numbers.push_back(total);
    return numbers;
}

std::vector<int> cuts(const std::vector<int>& usable) {
    int deepest = 0, free = 0;
    for (int num : usable) {
        deepest = std::max(deepest, num);
        free += num >= 0;
    }
    std::vector<int> depths;
    if (free != 1)
        for (int depth : DEPTHS)
            if (depth < deepest) depths.push_back(depth);
    depths.push_back(deepest);
    return depths;
}

}  // namespace

Plans::Plans(std::vector<Candidate> candidates, const PassTime& passes, std::vector<DraftTime> drafts)
    : candidates_(std::move(candidates)), passes_(passes), drafts_(std::move(drafts)) {
    for (const Candidate& c : candidates_) {
        std::vector<double> tokens = {1.0};
        for (double gain : c.gains) tokens.push_back(tokens.back() + gain);
        tokens_.push_back(std::move(tokens));
        is_spread_ = is_spread_ || (c.found < SURE && c.found > 0);
    }
}

void Plans::search(double max_rows) {
    struct Node {
        double gain;
        int depth, request;
    };
    const int num = static_cast<int>(candidates_.size());
    std::vector<Node> nodes;
    std::vector<int> usable(num, -1);
    for (int b = 0; b < num; ++b) {
        const Candidate& c = candidates_[b];
        if (c.fixed >= 0) continue;
        usable[b] = 0;
        for (size_t depth = 0; depth < c.gains.size() && c.gains[depth] > 0; ++depth, ++usable[b])
            nodes.push_back({c.gains[depth], static_cast<int>(depth), b});
    }
    std::sort(nodes.begin(), nodes.end(), [](const Node& x, const Node& y) {
        if (x.gain != y.gain) return x.gain > y.gain;
        return x.depth != y.depth ? x.depth < y.depth : x.request < y.request;
    });
    lengths_.clear();
    values_.clear();
    const std::vector<int> numbers = numbers_below(static_cast<int>(nodes.size()));
    for (int cut : cuts(usable)) {
        std::vector<int> lengths(num);
        for (int b = 0; b < num; ++b) lengths[b] = std::max(0, candidates_[b].fixed);
        int taken = 0;
        for (int number : numbers) {
            for (; taken < number; ++taken)
                if (lengths[nodes[taken].request] < cut) ++lengths[nodes[taken].request];
            Value found = value(lengths.data());
            if (!values_.empty() && found.rows > max_rows) found.goodput = 0.0;  // the first plan is always possible
            lengths_.insert(lengths_.end(), lengths.begin(), lengths.end());
            values_.push_back(found);
        }
    }
}

Value Plans::value(const int* lengths) {
    const size_t num = candidates_.size();
    double tokens = 0.0, rows = static_cast<double>(num);
    scratch_.assign(drafts_.size(), {0.0, 0.0});
    for (size_t b = 0; b < num; ++b) {
        const Candidate& c = candidates_[b];
        tokens += tokens_[b][std::min<size_t>(lengths[b], tokens_[b].size() - 1)];
        const double own = lengths[b] * c.found;
        rows += own;
        Draft& draft = scratch_[c.drafter];
        draft = {std::max(draft.depth, own), draft.num_nodes + own};
    }
    double seconds = passes_s(lengths, rows);
    for (size_t d = 0; d < drafts_.size(); ++d)
        if (scratch_[d].num_nodes > 0) seconds += drafts_[d].of(scratch_[d].depth, scratch_[d].num_nodes);
    return {tokens / seconds, seconds, rows};
}

std::vector<int> Plans::lengths(int i) const {
    const auto begin = lengths_.begin() + static_cast<int64_t>(i) * num_requests();
    return {begin, begin + num_requests()};
}

double Plans::passes_s(const int* lengths, double rows) const {
    const double others = passes_.sequences(static_cast<double>(candidates_.size()));
    if (!is_spread_) return passes_.rows(rows) + others;
    double variance = 0.0, third = 0.0;
    for (size_t b = 0; b < candidates_.size(); ++b) {
        const double found = candidates_[b].found, length = lengths[b];
        const double spread = found < SURE ? found * (1 - found) : 0.0;
        variance += length * length * spread;
        third += length * length * length * spread * (1 - 2 * found);
    }
    variance = std::max(variance, 1e-9);
    const double half = third / std::pow(variance, 1.5) / 2, root = std::sqrt(1 + half * half);
    const double deviation = std::sqrt(variance), share = (root - half) / (2 * root);
    const double low = std::max(static_cast<double>(candidates_.size()), rows + deviation * (half - root));
    return share * passes_.rows(rows + deviation * (half + root)) + (1 - share) * passes_.rows(low) + others;
}

int Plans::best() const {
    int best = 0;
    for (int i = 1; i < num(); ++i)
        if (values_[i].goodput > values_[best].goodput) best = i;
    return best;
}

int Plans::drafting() const {
    int best = -1;
    for (int i = 0; i < num(); ++i) {
        const auto begin = lengths_.begin() + static_cast<int64_t>(i) * num_requests();
        const bool drafts = std::any_of(begin, begin + num_requests(), [](int length) { return length > 0; });
        if (drafts && values_[i].goodput > (best < 0 ? 0.0 : values_[best].goodput)) best = i;
    }
    return best;
}

std::vector<int> Plans::marks() const {
    std::map<int, int> found;  // by stretch of widths between two knots
    for (int i = 1; i < num(); ++i) {
        const auto at = found.find(knots_below(values_[i].rows));
        if (values_[i].goodput > (at == found.end() ? 0.0 : values_[at->second].goodput))
            found[knots_below(values_[i].rows)] = i;
    }
    std::vector<int> marks = {0};
    for (const auto& [stretch, i] : found) marks.push_back(i);
    return marks;
}

}  // namespace forerun::pacing
