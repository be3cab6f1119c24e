// The plans that pacing "auto" looks at, and what is expected of each: the twin of src/forerun/pacing/_plan.py.
#pragma once

#include <memory>
#include <vector>

#include "pacing_costs.h"

namespace forerun::pacing {

// One decoding request: expected tokens of its nodes, how often there is a draft, its place among the drafters, and the
// length that is not for the plan to choose, or -1.
struct Candidate {
    std::vector<double> gains;
    double found;
    int drafter, fixed;
};

struct Value {
    double goodput, seconds, rows;
};

// drafts[d] belongs to drafter d. `passes` is looked at as long as this lives.
class Plans {
 public:
    Plans(std::vector<Candidate> candidates, const PassTime& passes, std::vector<DraftTime> drafts);

    // Look at the first nodes in order of their gains, for some numbers of nodes and all cuts; first of all, none.
    void search(double max_rows);
    Value value(const int* lengths);  // [num_requests]

    int num_requests() const { return static_cast<int>(candidates_.size()); }
    int num() const { return static_cast<int>(values_.size()); }
    std::vector<int> lengths(int i) const;
    const Value& found(int i) const { return values_.at(i); }
    int best() const;
    int drafting() const;  // the best plan that has a node, or -1
    std::vector<int> marks() const;

 private:
    struct Draft {
        double depth, num_nodes;
    };
    double passes_s(const int* lengths, double rows) const;

    std::vector<Candidate> candidates_;
    const PassTime& passes_;
    std::vector<DraftTime> drafts_;
    bool is_spread_ = false;                   // somebody may find nothing
    std::vector<std::vector<double>> tokens_;  // of each request, by its nodes
    std::vector<Draft> scratch_;  // of each drafter, in the plan that is being valued
    std::vector<int> lengths_;    // [num, num_requests]
    std::vector<Value> values_;
};

}  // namespace forerun::pacing
