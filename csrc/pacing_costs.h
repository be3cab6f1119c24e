// What steps take, as pacing "auto" learns it: the twins of src/forerun/pacing/_costs.py and _drafts.py, which say why
// it is done so. The numbers are the same but for rounding (tests/pacing/test_twins.py).
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace forerun::pacing {

constexpr int NUM_KNOTS = 26;
constexpr std::array<int, NUM_KNOTS> KNOTS = {1,  2,  3,  4,  6,   8,   10,  12,  16,  20,  24,   32,   40,
                                              48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096};

// Knots at or below a width, and knots below it.
int knots_up_to(double num_rows);
int knots_below(double num_rows);

double median(std::vector<double> values);

// How far one pass differs from the next, and how much of that lasts.
class Roughness {
 public:
    Roughness();
    void observe(const std::vector<double>& run_s);
    double drift() const { return drift_; }
    double noise() const;
    int memory_steps() const;
    double noise_of(int num_passes) const;

 private:
    double drift_, near_, far_;
};

// Relative time of a target pass, with all that follows it, by its rows and its sequences.
class PassTime {
 public:
    PassTime();
    double of(double num_rows, double num_sequences) const { return rows(num_rows) + sequences(num_sequences); }
    double sequences(double num_sequences) const { return std::exp(state_[1]) * (num_sequences - 1); }
    double rows(double num_rows) const;
    double spread(double num_rows, double other_rows, double seconds, double other_seconds, double num_sequences) const;
    bool is_settled() const { return outliers_ == 0; }
    double per_prompt_row() const { return per_prompt_row_ > 0 ? per_prompt_row_ : 0.0; }
    double unit_s(double seconds, int num_other, int num_rows, int num_sequences) const;
    void observe_prompts(double seconds, int num_other, int num_rows, int num_sequences);
    void observe(const std::vector<double>& run_s, int num_rows, int num_sequences, double disturbance);
    void rest(int num_steps);
    int num_steps() const { return num_steps_; }
    int widest() const { return widest_; }

 private:
    // State 0 is the unit's, 1 what a sequence adds, and those of the knots behind the first follow: knot i has i + 1.
    static constexpr int NUM_STATES = NUM_KNOTS + 1;
    using States = std::array<double, NUM_STATES>;
    int num_states() const { return num_ + 1; }
    struct Weight {
        int knot;
        double share;
    };
    struct Weights {
        Weight of[2];
        int num;
    };
    static Weights weights(double num_rows);
    void hear_of_prompts(double seconds, int num_rows);
    void observe_few(double seconds, int num_rows, int num_passes, double num_idle, double disturbance);
    void correct(const States& slope, double error, double noise, int place, int num_passes);
    bool is_astray(double error, int place, int num_passes);
    double doubt(const States& slope, int place, States& away);
    bool jumped(double error, int num_passes);
    void widen(int num_rows);
    void order(int narrow);
    void smooth();

    States state_{};
    std::array<States, NUM_STATES> cov_{};
    std::array<double, NUM_KNOTS> values_{}, slopes_{};  // of the first `num_` knots
    std::array<int, NUM_KNOTS + 1> num_seen_{}, astray_{};
    int num_ = 1, num_sequences_ = 1, outliers_ = 0, num_steps_ = 0, widest_ = 0, first_prompt_rows_ = 0;
    double per_prompt_row_ = 0.0, num_prompts_ = 0.0, first_prompt_s_ = 0.0;
    Roughness roughness_;
};

// Relative time of one drafter: a share per call, per pass (one after another), and per node.
class DraftTime {
 public:
    double of(double depth, double num_nodes) const { return shares_[0] + shares_[1] * depth + shares_[2] * num_nodes; }
    double catchup(double num_tokens) const;
    using Shape = std::array<int, 4>;  // depth, nodes; rows and sequences of the target's pass
    void observe(double ratio, const Shape& shape, int num_drafts);
    void fade(int num_steps);
    void fit(const PassTime& passes);
    void observe_catchup(double relative, int num_tokens);

 private:
    struct Seen {
        Shape shape;
        double ratio, number;
    };
    std::array<double, 3> shares_ = {0.0, 0.1, 0.0};
    std::vector<Seen> seen_;
    double catchup_s_ = 0.0, catchup_tokens_ = 0.0;
};

}  // namespace forerun::pacing
