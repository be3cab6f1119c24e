#include "pacing_acceptance.h"

#include <algorithm>
#include <cmath>

namespace forerun::pacing {

namespace {

constexpr std::array<int, NUM_CLASSES + 1> STARTS = {0, 1, 3, 7, 1024};
constexpr Rates FIRST_MEANS = {2.0 / 3, 2.0 / 3, 2.0 / 3, 2.0 / 3, 0.9, 0.99};
constexpr Rates DRAFTER_STRENGTHS = {12.0, 8.0, 8.0, 8.0, 2.0, 10.0};
constexpr Rates REQUEST_STRENGTHS = {16.0, 16.0, 16.0, 16.0, 4.0, 20.0};
constexpr double FEW_ROUNDS = 32.0, LEAST_KNOWN = 0.25;
constexpr double MIN_GAIN = 0.02, RECENT = 0.9, ALARM = 9.0, KEPT = 4.0, DISTRUST = 0.1;

double odds(double mean) {
    mean = std::min(std::max(mean, 1e-3), 1 - 1e-3);
    return mean / (1 - mean);
}

double shift(double mean, double other, double other_next) {
    const double moved = odds(mean) * odds(other_next) / odds(other);
    return moved / (1 + moved);
}

}  // namespace

Acceptance::Acceptance(double memory_rounds, std::shared_ptr<Acceptance> parent)
    : parent_(std::move(parent)), keep_(1 - 1 / memory_rounds) {
    refresh();
}

bool Acceptance::count(int granted, int num_drafted, int num_tested, int num_accepted) {
    add(FOUND, num_drafted > 0, num_drafted == 0);
    if (num_drafted) add(WENT_ON, num_drafted - 1, num_drafted < granted);
    if (parent_) return watch(num_tested, num_accepted);
    count_tests(num_tested, num_accepted);
    return false;
}

void Acceptance::count_tests(int num_tested, int num_accepted) {
    is_fresh_ = false;
    for (int c = 0; c < NUM_CLASSES && num_tested > STARTS[c]; ++c) {
        const int hits = std::max(0, std::min(num_accepted, STARTS[c + 1]) - STARTS[c]);
        add(c, hits, std::min(num_tested, STARTS[c + 1]) - STARTS[c] - hits);
    }
}

bool Acceptance::watch(int num_tested, int num_accepted) {
    count_tests(num_tested, num_accepted);
    recent_ = {recent_.hits * RECENT, recent_.tests * RECENT, recent_.surprise * RECENT, recent_.variance * RECENT};
    for (int c = 0; c < NUM_CLASSES && num_tested > STARTS[c]; ++c) {
        const int tested = std::min(num_tested, STARTS[c + 1]) - STARTS[c];
        const int hits = std::max(0, std::min(num_accepted, STARTS[c + 1]) - STARTS[c]);
        recent_.hits += hits;
        recent_.tests += tested;
        recent_.surprise += hits - tested * means_[c];
        recent_.variance += tested * means_[c] * (1 - means_[c]);
    }
    if (recent_.surprise * recent_.surprise <= ALARM * (0.5 + recent_.variance)) return false;
    forget(recent_.hits / recent_.tests);
    return true;
}

void Acceptance::add(int c, double hits, double misses) {
    hits_[c] = hits_[c] * keep_ + hits;
    misses_[c] = misses_[c] * keep_ + misses;
}

void Acceptance::forget(double mean) {
    for (int c = 0; c < NUM_CLASSES; ++c) {
        hits_[c] = KEPT * mean;
        misses_[c] = KEPT * (1 - mean);
    }
    recent_ = {};
    trust_ = DISTRUST;
    refresh();
}

double Acceptance::strength(int c) const {
    if (!parent_) return DRAFTER_STRENGTHS[c];
    const double rounds = parent_->hits_[0] + parent_->misses_[0];
    const double known = c < FOUND ? std::max(LEAST_KNOWN, rounds / (rounds + FEW_ROUNDS)) : 1.0;
    return REQUEST_STRENGTHS[c] * known * trust_;
}

void Acceptance::refresh() {
    is_fresh_ = true;
    if (parent_ && !parent_->is_fresh_) parent_->refresh();
    for (int c = 0; c < NUM_RATES; ++c) {
        double prior = parent_ ? parent_->means_[c] : FIRST_MEANS[c];
        if (0 < c && c < NUM_CLASSES)
            prior = parent_ ? shift(means_[c - 1], parent_->means_[c - 1], prior) : means_[c - 1];
        const double total = strength(c) + hits_[c] + misses_[c];
        means_[c] = (strength(c) * prior + hits_[c]) / total;
        if (!parent_ && c == 0) means_[c] += std::sqrt(means_[c] * (1 - means_[c]) / (total + 1));
    }
}

std::pair<std::vector<double>, double> Acceptance::gains(int limit) {
    refresh();
    const double found = means_[FOUND], went_on = means_[WENT_ON];
    double gain = found / went_on;
    std::vector<double> gains;
    for (int c = 0; c < NUM_CLASSES; ++c) {
        const double total = strength(c) + hits_[c] + misses_[c], accepted = means_[c] * total;
        for (int i = 0; i < std::min(STARTS[c + 1], limit) - STARTS[c]; ++i) {
            gain *= went_on * (accepted + i) / (total + i);
            if (gain < MIN_GAIN) return {gains, found};
            gains.push_back(gain);
        }
    }
    return {gains, found};
}

}  // namespace forerun::pacing
