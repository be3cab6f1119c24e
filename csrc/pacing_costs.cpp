#include "pacing_costs.h"

#include <algorithm>
#include <cmath>

namespace forerun::pacing {

namespace {

constexpr double FLAT = 0.2, STEEP = 0.75, SHAPE_SD = 0.6, CURVE_DRIFT = 0.002, NEW_NOISE = 0.15, OUTLIER = 3.0;
constexpr double JUMP = 0.5, ORDER_NOISE = 0.01, OTHER_BATCH = 0.05, LEAST_SECONDS = 1e-9;
constexpr double PER_SEQUENCE = 0.02, PER_SEQUENCE_SD = 0.7, PER_SEQUENCE_DRIFT = 0.01;
constexpr double LEAST_PER_SEQUENCE = 1e-4, MOST_PER_SEQUENCE = 0.5;
constexpr int NEW_STEPS = 4, COLD_STEPS = 16, JUMP_STEPS = 4, FAR = 3, PROMPT_ROWS = 32;

struct Deviations {
    double first, least, most;
};
constexpr Deviations NOISE = {0.05, 0.02, 0.3}, UNIT_DRIFT = {0.02, 0.003, 0.03};

double square(double x) { return x * x; }

double within(const Deviations& limits, double variance) {
    return std::min(std::max(variance, square(limits.least)), square(limits.most));
}

}  // namespace

int knots_up_to(double num_rows) {
    return static_cast<int>(std::upper_bound(KNOTS.begin(), KNOTS.end(), num_rows) - KNOTS.begin());
}

int knots_below(double num_rows) {
    return static_cast<int>(std::lower_bound(KNOTS.begin(), KNOTS.end(), num_rows) - KNOTS.begin());
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const size_t half = values.size() / 2;
    return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// ------------------------------------------------------------------------------------------------------- roughness

Roughness::Roughness() : drift_(square(UNIT_DRIFT.first)) {
    const double noise = square(NOISE.first);
    near_ = 2 * noise + drift_;
    far_ = 2 * noise + FAR * drift_;
}

void Roughness::observe(const std::vector<double>& run_s) {
    std::vector<double> logs;
    logs.reserve(run_s.size());
    for (double seconds : run_s) logs.push_back(std::log(std::max(seconds, LEAST_SECONDS)));
    for (size_t i = FAR; i < logs.size(); ++i) {
        const double near = square(logs[i] - logs[i - 1]), far = square(logs[i] - logs[i - FAR]);
        near_ += 0.02 * (std::min(near, square(OUTLIER) * near_) - near_);
        far_ += 0.02 * (std::min(far, square(OUTLIER) * far_) - far_);
    }
    drift_ = within(UNIT_DRIFT, (far_ - near_) / (FAR - 1));
}

double Roughness::noise() const { return within(NOISE, (near_ - drift_) / 2); }

int Roughness::memory_steps() const {
    const double steps = std::nearbyint(std::sqrt(3 * noise() / drift_));
    return static_cast<int>(std::max(2.0, std::min(16.0, steps)));
}

double Roughness::noise_of(int num_passes) const { return noise() / num_passes + drift_ * (num_passes - 1) / 3; }

// -------------------------------------------------------------------------------------------------------- passes

PassTime::PassTime() {
    cov_[0][0] = 100.0;
    state_[1] = std::log(PER_SEQUENCE);
    cov_[1][1] = square(PER_SEQUENCE_SD);
    values_[0] = 1.0;
    slopes_[0] = FLAT;
}

double PassTime::rows(double num_rows) const {
    const int i = std::max(1, std::min(knots_up_to(num_rows), num_)) - 1;
    return values_[i] + slopes_[i] * (num_rows - KNOTS[i]);
}

double PassTime::spread(double num_rows, double other_rows, double seconds, double other_seconds,
                        double num_sequences) const {
    std::array<double, NUM_KNOTS> slopes{};
    const std::pair<double, double> sides[] = {{num_rows, 1 / seconds}, {other_rows, -1 / other_seconds}};
    for (const auto& [width, scale] : sides) {
        const Weights found = weights(width);
        for (int k = 0; k < found.num; ++k) slopes[found.of[k].knot] += found.of[k].share * scale;
    }
    double variance = 0.0;
    States known{};
    known[1] = sequences(num_sequences) * (1 / seconds - 1 / other_seconds);
    for (int i = 1; i < num_; ++i) known[i + 1] = slopes[i] * values_[i];
    for (int i = 1; i < num_states(); ++i)
        for (int j = 1; j < num_states(); ++j)
            if (known[i] != 0 && known[j] != 0) variance += known[i] * known[j] * cov_[i][j];
    for (int i = num_; i < NUM_KNOTS; ++i)
        if (slopes[i] != 0)
            variance += square(SHAPE_SD * slopes[i] * values_[num_ - 1] *
                               std::log(static_cast<double>(KNOTS[i]) / KNOTS[num_ - 1]));
    return std::sqrt(std::max(0.0, variance));
}

double PassTime::unit_s(double seconds, int num_other, int num_rows, int num_sequences) const {
    return std::max(seconds, LEAST_SECONDS) / (of(num_rows, num_sequences) + num_other * per_prompt_row());
}

void PassTime::observe_prompts(double seconds, int num_other, int num_rows, int num_sequences) {
    if (num_steps_ == 0) {
        if (num_rows == 0 && num_other >= std::max(PROMPT_ROWS, first_prompt_rows_))
            first_prompt_s_ = seconds, first_prompt_rows_ = num_other;
        return;
    }
    if (per_prompt_row_ != 0 && num_prompts_ == 0) num_prompts_ = 1;
    const double alone = num_rows ? of(num_rows, num_sequences) : 1.0;
    const double extra = seconds / std::exp(state_[0]) - alone;
    const double share = square(std::min(1.0, static_cast<double>(num_other) / PROMPT_ROWS)), had = per_prompt_row_;
    num_prompts_ += share;
    double found = std::max(0.0, extra / num_other);
    if (num_prompts_ > 3 && had != 0) found = std::min(found, 2 * had);
    per_prompt_row_ += share * std::max(1 / num_prompts_, found < had ? 0.5 : 0.1) * (found - had);
    smooth();
}

void PassTime::hear_of_prompts(double seconds, int num_rows) {
    if (num_prompts_ > 0 || first_prompt_rows_ < 2 * num_rows || num_steps_ > NEW_STEPS) return;
    const double row_s = std::max(0.0, first_prompt_s_ - seconds) / (first_prompt_rows_ - num_rows);
    if (num_steps_ == 0)
        state_[0] = std::log(std::max({seconds - (num_rows - 1) * row_s, seconds / num_rows, LEAST_SECONDS}));
    per_prompt_row_ = row_s / std::exp(state_[0]);
    smooth();
}

void PassTime::observe(const std::vector<double>& run_s, int num_rows, int num_sequences, double disturbance) {
    if (run_s.empty()) return;
    roughness_.observe(run_s);
    hear_of_prompts(median(run_s), num_rows);
    widen(num_rows);
    if (num_sequences != num_sequences_) {
        cov_[0][0] += square(OTHER_BATCH * std::log(static_cast<double>(num_sequences) / num_sequences_));
        num_sequences_ = num_sequences;
    }
    const int num = static_cast<int>(run_s.size()), most = roughness_.memory_steps();
    if (num < 2 * most) {
        observe_few(median(run_s), num_rows, num, 0.0, disturbance);
    } else {
        const double num_idle = (num - 2 * most) / 2.0;
        observe_few(median({run_s.begin(), run_s.begin() + most}), num_rows, most, num_idle, disturbance);
        observe_few(median({run_s.end() - most, run_s.end()}), num_rows, most, num_idle, disturbance);
    }
    num_steps_ += num;
    widest_ = std::max(widest_, num_rows);
    smooth();
}

void PassTime::rest(int num_steps) { cov_[0][0] += num_steps * roughness_.drift(); }

void PassTime::observe_few(double seconds, int num_rows, int num_passes, double num_idle, double disturbance) {
    const double total = of(num_rows, num_sequences_);
    States slope{};
    slope[0] = 1.0, slope[1] = sequences(num_sequences_) / total;
    const Weights near = weights(num_rows);
    for (int k = 0; k < near.num; ++k)
        if (const int knot = near.of[k].knot) slope[knot + 1] = near.of[k].share * values_[knot] / total;
    const int place = knots_up_to(num_rows);
    const bool is_new = num_seen_[place] == 0;
    num_seen_[place] += num_passes;
    const double level = std::log(std::max(seconds, LEAST_SECONDS) / total);
    if (num_steps_ == 0) state_[0] = level;
    for (int i = 0; i < num_states(); ++i) {
        const double drift = i == 0 ? roughness_.drift() : square(i == 1 ? PER_SEQUENCE_DRIFT : CURVE_DRIFT);
        cov_[i][i] += (num_passes + num_idle) * drift;
    }
    const double noise = std::max(roughness_.noise_of(num_passes), is_new ? square(NEW_NOISE) : 0.0) + square(disturbance);
    correct(slope, level - state_[0], noise, disturbance > 0 ? -1 : place, num_passes);
}

PassTime::Weights PassTime::weights(double num_rows) {
    const int i = std::max(1, knots_up_to(num_rows)) - 1;
    if (i + 1 >= NUM_KNOTS || num_rows == KNOTS[i]) return {{{i, 1.0}, {}}, 1};
    const double share = (num_rows - KNOTS[i]) / (KNOTS[i + 1] - KNOTS[i]);
    return {{{i, 1 - share}, {i + 1, share}}, 2};
}

void PassTime::correct(const States& slope, double error, double noise, int place, int num_passes) {
    const int num = num_states();
    States cross{};
    double prior = 0.0;
    for (int i = 0; i < num; ++i)
        for (int j = 0; j < num; ++j) cross[i] += cov_[i][j] * slope[j];
    for (int i = 0; i < num; ++i) prior += cross[i] * slope[i];
    const double limit = square(OUTLIER) * (prior + noise);
    if (place >= 0 && num_seen_[place] > NEW_STEPS) {
        if (square(error) <= limit) {
            outliers_ = astray_[place] = 0;
        } else if (error > 0 || num_seen_[place] > COLD_STEPS) {
            const bool is_again = is_astray(error, place, num_passes);
            if (jumped(error, num_passes)) {
                cov_[0][0] += square(JUMP);
                astray_.fill(0);
                return;
            }
            if (is_again) {
                States away{};
                const double along = doubt(slope, place, away);
                for (int i = 0; i < num; ++i) cross[i] += along * away[i];
                prior += square(along);
            } else {
                const double excess = square(error) / limit;
                noise += (excess * (num_passes == 1 ? excess : 1.0) - 1) * (prior + noise);
            }
        }
    }
    for (int i = 0; i < num; ++i) {
        const double gain = cross[i] / (prior + noise);
        state_[i] += gain * error;
        for (int j = 0; j < num; ++j) cov_[i][j] -= gain * cross[j];
    }
}

bool PassTime::is_astray(double error, int place, int num_passes) {
    if (error > 0 && num_passes == 1) return false;
    const int side = error > 0 ? 1 : -1;
    const bool is_again = outliers_ == 0 && astray_[place] == side;
    astray_[place] = side;
    return is_again;
}

double PassTime::doubt(const States& slope, int place, States& away) {
    const int num = num_states();
    double along = 0.0;
    for (int i = 0; i < num; ++i) {
        away[i] = place == 1 ? (i ? -JUMP : JUMP) : i > 1 ? JUMP * slope[i] : 0.0;
        along += away[i] * slope[i];
    }
    for (int i = 0; i < num; ++i)
        for (int j = 0; j < num; ++j) cov_[i][j] += away[i] * away[j];
    return along;
}

bool PassTime::jumped(double error, int num_passes) {
    const int sign = std::min(num_passes, JUMP_STEPS / 2) * (error > 0 ? 1 : -1);
    outliers_ = outliers_ * sign > 0 ? outliers_ + sign : sign;
    if (std::abs(outliers_) < JUMP_STEPS) return false;
    outliers_ = 0;
    return true;
}

void PassTime::widen(int num_rows) {
    while (num_ < NUM_KNOTS && KNOTS[num_ - 1] < num_rows) {
        const int last = num_ - 1, from = last + 1, to = num_states();  // places of the last knot and of the new one
        const double deviation = SHAPE_SD * std::log(static_cast<double>(KNOTS[last + 1]) / KNOTS[last]);
        state_[to] = std::log(values_[last] + slopes_[last] * (KNOTS[last + 1] - KNOTS[last]));
        for (int i = 0; i < to; ++i) cov_[i][to] = cov_[to][i] = last ? cov_[from][i] : 0.0;
        cov_[to][to] = (last ? cov_[from][from] : 0.0) + square(deviation);
        ++num_;
        smooth();
    }
}

void PassTime::order(int narrow) {
    const int wide = narrow + 1;
    const double excess = state_[narrow] - state_[wide];
    if (excess <= 0) return;
    const auto apart = [&](int state) { return cov_[state][narrow] - cov_[state][wide]; };
    const double factor = excess / (apart(narrow) - apart(wide) + square(ORDER_NOISE));
    for (int i = 0; i < num_states(); ++i) state_[i] -= factor * apart(i);
}

void PassTime::smooth() {
    for (int i = 2; i < num_; ++i) order(i);
    for (int i = num_ - 1; i > 1; --i) order(i);
    double top = 0.0;
    values_[0] = 1.0;
    state_[1] = std::min(std::max(state_[1], std::log(LEAST_PER_SEQUENCE)), std::log(MOST_PER_SEQUENCE));
    for (int i = 1; i < num_; ++i) {
        double& state = state_[i + 1];
        state = std::min(std::max(state, -0.1), std::log(static_cast<double>(KNOTS[i])) + 0.1);
        top = std::max(top, state);
        values_[i] = std::exp(top);
    }
    const int last = num_ - 1;
    for (int i = 0; i < last; ++i) slopes_[i] = (values_[i + 1] - values_[i]) / (KNOTS[i + 1] - KNOTS[i]);
    const bool is_known = last > 0 && num_seen_[num_] + num_seen_[last] > NEW_STEPS;
    const double own = is_known ? slopes_[last - 1] : 0.0, steepest = values_[last] / KNOTS[last];
    const double told = std::min(per_prompt_row_, STEEP * steepest);
    slopes_[last] = std::min(std::max({own, FLAT * steepest, told}), steepest);
}

// -------------------------------------------------------------------------------------------------------- drafts

namespace {

constexpr std::array<double, 3> GUESS = {0.0, 0.1, 0.0}, DOUBT = {0.15, 0.3, 0.02};
constexpr double DRAFT_NOISE = 0.003, DRAFT_SHARE = 0.15, MISFIT = 0.05, LEAST_WEIGHT = 1e-3;
constexpr double FORGET = 1.0 / 200, FADE = 1.0 / 2000;
constexpr size_t MOST_SHAPES = 48;

// x of the rows and columns `free` of matrix x = right, 0 elsewhere; by elimination, for the matrix is positive
// definite.
std::array<double, 3> solve(std::array<std::array<double, 3>, 3> matrix, std::array<double, 3> right,
                            const std::vector<int>& free) {
    for (size_t a = 0; a < free.size(); ++a) {
        const int i = free[a];
        for (size_t b = a + 1; b < free.size(); ++b) {
            const int k = free[b];
            const double factor = matrix[k][i] / matrix[i][i];
            for (size_t c = a; c < free.size(); ++c) matrix[k][free[c]] -= factor * matrix[i][free[c]];
            right[k] -= factor * right[i];
        }
    }
    std::array<double, 3> found{};
    for (size_t a = free.size(); a-- > 0;) {
        const int i = free[a];
        double rest = right[i];
        for (size_t b = a + 1; b < free.size(); ++b) rest -= matrix[i][free[b]] * found[free[b]];
        found[i] = rest / matrix[i][i];
    }
    return found;
}

}  // namespace

double DraftTime::catchup(double num_tokens) const {
    if (catchup_tokens_ != 0) return num_tokens * catchup_s_ / catchup_tokens_;
    return num_tokens * shares_[1] * 0.03;
}

void DraftTime::observe(double ratio, const Shape& shape, int num_drafts) {
    const double keep = std::pow(1 - FORGET, num_drafts);
    for (Seen& seen : seen_) seen.number *= keep;
    const auto faded = [](const Seen& seen) { return seen.number <= LEAST_WEIGHT; };
    seen_.erase(std::remove_if(seen_.begin(), seen_.end(), faded), seen_.end());
    const auto same = [&](const Seen& seen) { return seen.shape == shape; };
    auto at = std::find_if(seen_.begin(), seen_.end(), same);
    if (at == seen_.end()) at = seen_.insert(at, {shape, ratio, 0.0});
    at->number += num_drafts;
    at->ratio += num_drafts / at->number * (ratio - at->ratio);
    const auto fewer = [](const Seen& a, const Seen& b) { return a.number < b.number; };
    if (seen_.size() > MOST_SHAPES) seen_.erase(std::min_element(seen_.begin(), seen_.end(), fewer));
}

void DraftTime::fade(int num_steps) {
    const double keep = std::pow(1 - FADE, num_steps);
    for (Seen& seen : seen_) seen.number *= keep;
}

void DraftTime::fit(const PassTime& passes) {
    std::array<std::array<double, 3>, 3> matrix{};
    std::array<double, 3> right{};
    for (int i = 0; i < 3; ++i) {
        matrix[i][i] = 1 / square(DOUBT[i]);
        right[i] = GUESS[i] / square(DOUBT[i]);
    }
    for (const Seen& seen : seen_) {
        const auto& [depth, num_nodes, num_rows, num_sequences] = seen.shape;
        const double seconds = seen.ratio * passes.of(num_rows, num_sequences);
        const double weight = 1 / (square(DRAFT_NOISE + DRAFT_SHARE * seconds) * (1 / seen.number + MISFIT));
        const std::array<double, 3> parts = {1.0, static_cast<double>(depth), static_cast<double>(num_nodes)};
        for (int i = 0; i < 3; ++i) {
            right[i] += weight * parts[i] * seconds;
            for (int j = 0; j < 3; ++j) matrix[i][j] += weight * parts[i] * parts[j];
        }
    }
    std::vector<int> free = {0, 1, 2};
    while (true) {
        shares_ = solve(matrix, right, free);
        const auto worst = std::min_element(free.begin(), free.end(), [&](int a, int b) { return shares_[a] < shares_[b]; });
        if (worst == free.end() || shares_[*worst] >= 0) return;
        free.erase(worst);
    }
}

void DraftTime::observe_catchup(double relative, int num_tokens) {
    catchup_s_ = catchup_s_ * 0.9 + relative;
    catchup_tokens_ = catchup_tokens_ * 0.9 + num_tokens;
}

}  // namespace forerun::pacing
