// How often drafted tokens are accepted, as pacing "auto" learns it: the twin of src/forerun/pacing/_acceptance.py.
#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

namespace forerun::pacing {

constexpr int NUM_CLASSES = 4;  // of depths; behind their rates come two more
constexpr int FOUND = NUM_CLASSES, WENT_ON = NUM_CLASSES + 1, NUM_RATES = NUM_CLASSES + 2;

using Rates = std::array<double, NUM_RATES>;

// Rates of one request, or, without a parent, of one drafter over all of its requests.
class Acceptance {
 public:
    Acceptance(double memory_rounds, std::shared_ptr<Acceptance> parent);
    bool count(int granted, int num_drafted, int num_tested, int num_accepted);
    void refresh();
    std::pair<std::vector<double>, double> gains(int limit);

    const Rates& means() const { return means_; }
    const Rates& hits() const { return hits_; }
    const Rates& misses() const { return misses_; }
    const std::shared_ptr<Acceptance>& parent() const { return parent_; }

 private:
    void count_tests(int num_tested, int num_accepted);
    bool watch(int num_tested, int num_accepted);
    void add(int c, double hits, double misses);
    void forget(double mean);
    double strength(int c) const;

    std::shared_ptr<Acceptance> parent_;
    Rates hits_{}, misses_{}, means_{};
    double keep_, trust_ = 1.0;
    struct {
        double hits = 0.0, tests = 0.0, surprise = 0.0, variance = 0.0;
    } recent_;
    bool is_fresh_ = false;
};

}  // namespace forerun::pacing
