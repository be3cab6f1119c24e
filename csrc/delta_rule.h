// The gated delta rule (Yang et al. 2024, eq. 10) of one run and some value heads that share a key head, and the
// convolution of inputs in front of it. recurrence.h says what a stretch is.
//
// A token t multiplies the state S by e^g and adds k u with u = beta (v - k S). From the state S0 that a stretch begins
// with that is, with G the sum of g along the token's path and j the tokens before it (section 3.3 there),
//
//     u_t = beta_t (v_t - e^G_t (k_t S0) - sum_j e^(G_t - G_j) (k_t k_j) u_j)
//     o_t = e^G_t (q_t S0) + sum_j e^(G_t - G_j) (q_t k_j) u_j,        j = t included
//     S   = e^G S0 + sum_j e^(G - G_j) k_j u_j,                         where a stretch ends
//
// so that all tokens of a stretch are multiplied with S0 while it is near, tokens that are gone through again need no
// more than k S0, and a tree's branches share all of that. Each sum has one order: over key_dim from first to last,
// lanes being values; over the tokens of the path from the oldest on.
#pragma once

#include "activations.h"
#include "linear.h"
#include "pieces.h"
#include "recurrence.h"
#include "rows.h"
#include "simd.h"

namespace forerun {
namespace FORERUN_ISA {

constexpr float LENGTH_EPS = 1e-6f;    // added to the squared lengths of q and k, as in published code
constexpr float LEAST_DECAY = -1e30f;  // of g, so that differences of sums are numbers

constexpr int up_to_lanes(int n) { return (n + LANES - 1) / LANES * LANES; }

// log(1 + e^x): with t = e^-|x| it is max(x, 0) + log(1 + t), and log(1 + t) = 2 atanh(t / (2 + t)), within 4e-10 of
// it.
inline F16 softplus(F16 x) {
    constexpr float ATANH[] = {3.333333367e-1f, 1.999985068e-1f, 1.429629173e-1f, 1.085165726e-1f, 1.161952626e-1f};
    const F16 t = exp(negative(max(x, negative(x)))), s = t / (t + f16(2.0f)), twice = s + s, square = s * s;
    return max(f16(0.0f), x) + madd(twice * square, polynomial(ATANH, square), twice);
}

// ------------------------------------------------------------------------------------------------- convolutions

// Sixteen sums over the inputs of a window, the oldest first; fewer at the end of a row.
template <class T>
inline F16 convolved(const T* const* window, const float* taps, size_t width, int conv, int column, int count) {
    F16 total = load_first(window[0] + column, count) * load_first(taps + column, count);
    for (int j = 1; j < conv; ++j)
        total = madd(load_first(window[j] + column, count),
                     load_first(taps + static_cast<size_t>(j) * width + column, count), total);
    return total;
}

template <class T>
void convolve_typed(const void* const* window, const float* taps, const float* bias, int width, int conv, float* out) {
    const T* inputs[STATE_TOKENS];
    for (int j = 0; j < conv; ++j) inputs[j] = static_cast<const T*>(window[j]);
    for (int i = 0; i < width; i += LANES) {
        const int count = width - i < LANES ? width - i : LANES;
        const F16 total = convolved(inputs, taps, static_cast<size_t>(width), conv, i, count);
        store_first(out + i, bias ? total + load_first(bias + i, count) : total, count, false);
    }
}

inline void convolve(Type type, const void* const* window, const float* taps, const float* bias, int width, int conv,
                     float* out) {
    (type == Type::float32 ? convolve_typed<float> : convolve_typed<uint16_t>)(window, taps, bias, width, conv, out);
}

// ------------------------------------------------------------------------------------ products with states

// Rows of a product with a state that share each load of it, and vectors of values. With AVX2 a vector is two of 16
// registers.
constexpr int STATE_ROWS = 6, STATE_VECTORS = WIDE_REGISTERS ? 4 : 1;

// out [ROWS, N vectors] = x [ROWS, n] times columns of a state. ahead: asks for a line with each row of the state.
template <int ROWS, int N>
inline void times_columns(const float* x, size_t x_stride, const float* state, size_t stride, int n, float* out,
                          Ahead& ahead) {
    F16 sums[ROWS][N];
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < N; ++i) sums[r][i] = f16(0.0f);
    for (int d = 0; d < n; ++d) {
        F16 columns[N];
        __builtin_prefetch(ahead.at, 0, 2);
        ahead.at += ahead.stride;
        for (int i = 0; i < N; ++i) columns[i] = load(state + static_cast<size_t>(d) * stride + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const F16 number = f16(x[static_cast<size_t>(r) * x_stride + d]);
            for (int i = 0; i < N; ++i) sums[r][i] = madd(number, columns[i], sums[r][i]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < N; ++i) store(out + static_cast<size_t>(r) * stride + i * LANES, sums[r][i]);
}

template <int ROWS>
inline void times_state_rows(const float* x, size_t x_stride, const float* state, int stride, int n, float* out,
                             Ahead& ahead) {
    int column = 0;
    for (; column + STATE_VECTORS * LANES <= stride; column += STATE_VECTORS * LANES)
        times_columns<ROWS, STATE_VECTORS>(x, x_stride, state + column, static_cast<size_t>(stride), n, out + column,
                                           ahead);
    for (; column < stride; column += LANES)
        times_columns<ROWS, 1>(x, x_stride, state + column, static_cast<size_t>(stride), n, out + column, ahead);
}

template <int ROWS>
inline void times_some_rows(int num_rows, const float* x, size_t x_stride, const float* state, int stride, int n,
                            float* out, Ahead& ahead) {
    if (num_rows >= ROWS) return times_state_rows<ROWS>(x, x_stride, state, stride, n, out, ahead);
    if constexpr (ROWS > 1) times_some_rows<ROWS - 1>(num_rows, x, x_stride, state, stride, n, out, ahead);
}

// out [num_rows, stride] = x [num_rows, n] times a state [n, stride].
inline void times_state(int num_rows, const float* x, size_t x_stride, const float* state, int stride, int n,
                        float* out, Ahead& ahead) {
    const int num_blocks = (num_rows + STATE_ROWS - 1) / STATE_ROWS;
    for (int block = 0; block < num_blocks; ++block) {
        const int first = num_rows * block / num_blocks, last = num_rows * (block + 1) / num_blocks;
        times_some_rows<STATE_ROWS>(last - first, x + static_cast<size_t>(first) * x_stride, x_stride, state, stride, n,
                                    out + static_cast<size_t>(first) * static_cast<size_t>(stride), ahead);
    }
}

// to = decay times from, plus for each token of a path the outer product of keys [tokens, ROWS ..] and rows of `added`.
template <int ROWS, int N>
inline void add_products(const float* from, float* to, size_t stride, float decay, const float* keys, size_t key_stride,
                         const float* added, const int* path, int num) {
    F16 sums[ROWS][N];
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < N; ++i) sums[r][i] = load(from + static_cast<size_t>(r) * stride + i * LANES) * f16(decay);
    for (int j = 0; j < num; ++j) {
        const float* const row = added + static_cast<size_t>(path[j]) * stride;
        F16 columns[N];
        for (int i = 0; i < N; ++i) columns[i] = load(row + i * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const F16 number = f16(keys[static_cast<size_t>(j) * key_stride + r]);
            for (int i = 0; i < N; ++i) sums[r][i] = madd(number, columns[i], sums[r][i]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < N; ++i) store(to + static_cast<size_t>(r) * stride + i * LANES, sums[r][i]);
}

template <int ROWS>
inline void advance_rows(const float* from, float* to, int stride, float decay, const float* keys, size_t key_stride,
                         const float* added, const int* path, int num) {
    int column = 0;
    for (; column + STATE_VECTORS * LANES <= stride; column += STATE_VECTORS * LANES)
        add_products<ROWS, STATE_VECTORS>(from + column, to + column, static_cast<size_t>(stride), decay, keys,
                                          key_stride, added + column, path, num);
    for (; column < stride; column += LANES)
        add_products<ROWS, 1>(from + column, to + column, static_cast<size_t>(stride), decay, keys, key_stride,
                              added + column, path, num);
}

// Adds to N vectors of sums the rows of a path, each times its share.
template <int N>
inline void add_path(const float* rows, size_t stride, const int* path, const float* shares, int num, F16 (&sums)[N]) {
    for (int j = 0; j < num; ++j) {
        const F16 share = f16(shares[j]);
        const float* const row = rows + static_cast<size_t>(path[j]) * stride;
        for (int i = 0; i < N; ++i) sums[i] = madd(share, load(row + i * LANES), sums[i]);
    }
}

inline float dot(const float* a, const float* b, int n) {
    F16 total = f16(0.0f);
    for (int i = 0; i < n; i += LANES) total = madd(load(a + i), load(b + i), total);
    return sum(total);
}

// ------------------------------------------------------------------------------------------------- the delta rule

// One item of work, in memory that a caller lends. T: the type of inputs. Rows of keys and values are padded with
// zeros.
template <class T>
class DeltaItem {
  public:
    DeltaItem(const DeltaRule& rule, const StateItem& item, float* scratch)
        : d_(rule), h_(rule.heads), in_(rule.inputs), run_(item.run), item_(item), num_heads_(item.last - item.first),
          key_width_(up_to_lanes(h_.key_dim)), value_width_(up_to_lanes(h_.value_dim)),
          slots_(static_cast<size_t>(run_.num_slots)) {
        Floats memory{scratch};
        const size_t heads = static_cast<size_t>(num_heads_), most = static_cast<size_t>(run_.most_tokens);
        const size_t keys = static_cast<size_t>(key_width_), values = static_cast<size_t>(value_width_);
        keys_ = memory.take(slots_ * keys);
        added_ = memory.take(heads * slots_ * values);
        sums_ = memory.take(heads * slots_);
        shares_ = memory.take(heads * slots_ * STATE_TOKENS);
        decays_ = memory.take(heads * slots_);
        const size_t num_states = static_cast<size_t>(run_.num_levels) * heads;
        states_ = memory.take(num_states * state_floats());
        places_ = reinterpret_cast<const float**>(memory.take(num_states * sizeof(float*) / sizeof(float)));
        queries_ = memory.take(most * keys);
        of_keys_ = memory.take(most * STATE_TOKENS);
        of_queries_ = memory.take(most * STATE_TOKENS);
        known_ = memory.take(most * values);
        read_ = memory.take(most * values);
        betas_ = memory.take(most + LANES);
        steps_ = memory.take(most + LANES);
        weighed_ = memory.take(STATE_TOKENS * keys);
    }

    void run() {
        for (int s = 0; s < run_.num_stretches; ++s) {
            const Stretch& stretch = run_.stretches[s];
            for (int i = 0; i < num_heads_ && stretch.from >= 0; ++i) advance(stretch, i);
            make_keys(stretch);
            for (int i = 0; i < num_heads_; ++i) {
                if (stretch.from < 0) begin(stretch, i);
                if (stretch.save >= 0) save(stretch, i);
                if (stretch.count > 0) go_through(stretch, i);
            }
        }
    }

  private:
    size_t state_floats() const { return static_cast<size_t>(h_.key_dim) * static_cast<size_t>(value_width_); }
    float* room(int level, int i) const {
        return states_ + static_cast<size_t>(level * num_heads_ + i) * state_floats();
    }
    const float*& state(int level, int i) const { return places_[level * num_heads_ + i]; }
    float* keys(int slot) const { return keys_ + static_cast<size_t>(slot) * static_cast<size_t>(key_width_); }
    float* added(int i) const { return added_ + static_cast<size_t>(i) * slots_ * static_cast<size_t>(value_width_); }
    float* shares(int i, int slot) const {
        return shares_ + (static_cast<size_t>(i) * slots_ + static_cast<size_t>(slot)) * STATE_TOKENS;
    }
    float* sums(int i) const { return sums_ + static_cast<size_t>(i) * slots_; }
    float* decays(int i) const { return decays_ + static_cast<size_t>(i) * slots_; }
    int token(const Stretch& stretch, int k) const { return run_.order[stretch.first + k]; }
    int depth(int token) const { return run_.depths[token]; }
    int head(int i) const { return h_.value_head(item_.key_head, item_.first + i); }
    int query_column() const { return item_.key_head * h_.key_dim; }
    int key_column() const { return (h_.key_heads + item_.key_head) * h_.key_dim; }
    int value_column(int i) const { return 2 * h_.key_heads * h_.key_dim + head(i) * h_.value_dim; }
    float* place(int index, int i) const {
        const size_t all = static_cast<size_t>(h_.key_dim) * static_cast<size_t>(h_.value_dim);
        return in_.pool.states +
               (static_cast<size_t>(index) * static_cast<size_t>(h_.value_heads) + static_cast<size_t>(head(i))) * all;
    }

    // The first of the stretch's tokens that are rows of the run; those before have been gone through before.
    int first_own(const Stretch& stretch) const {
        int k = 0;
        while (k < stretch.count && token(stretch, k) < run_.num_behind) ++k;
        return k;
    }

    // The state that the run begins with: where it is kept, or a copy whose rows end with whole vectors.
    void begin(const Stretch& stretch, int i) const {
        float* to = room(stretch.level, i);
        state(stretch.level, i) = to;
        if (run_.first >= 0 && h_.value_dim == value_width_)
            return void(state(stretch.level, i) = place(run_.first, i));
        if (run_.first < 0) return void(std::memset(to, 0, state_floats() * sizeof(float)));
        const float* from = place(run_.first, i);
        for (int row = 0; row < h_.key_dim; ++row, from += h_.value_dim, to += value_width_)
            for (int c = 0; c < h_.value_dim; c += LANES) store(to + c, load_first(from + c, h_.value_dim - c));
    }

    // Prefetches the inputs of a token's values and of the next token's queries and keys, while its own keys are made.
    void fetch(const Stretch& stretch, int k) const {
        constexpr int LINE = 64 / sizeof(T);
        const T* const inputs = static_cast<const T*>(in_.of(run_, token(stretch, k)));
        for (int i = 0; i < num_heads_; ++i)
            for (int c = 0; c < h_.value_dim; c += LINE) __builtin_prefetch(inputs + value_column(i) + c, 0, 2);
        if (k + 1 == stretch.count) return;
        const T* const next = static_cast<const T*>(in_.of(run_, token(stretch, k + 1)));
        for (int column : {query_column(), key_column()})
            for (int c = 0; c < h_.key_dim; c += LINE) __builtin_prefetch(next + column + c, 0, 3);
    }

    // The same head of the item behind this one, whose state follows in memory: it is fetched while this one is
    // multiplied.
    Ahead next_state(const Stretch& stretch, int i) const {
        const bool is_kept = stretch.from < 0 && run_.first >= 0 && h_.head_step == 1;
        const float* const own = is_kept ? place(run_.first, i) : room(stretch.level, i);
        return {reinterpret_cast<const char*>(is_kept ? own + num_heads_ * h_.key_dim * h_.value_dim : own),
                is_kept ? 64 : 0};
    }

    void save(const Stretch& stretch, int i) const {
        const float* from = state(stretch.level, i);
        float* to = place(stretch.save, i);
        for (int row = 0; row < h_.key_dim; ++row, from += value_width_, to += h_.value_dim)
            std::memcpy(to, from, static_cast<size_t>(h_.value_dim) * sizeof(float));
    }

    // Makes the first state of a stretch from the state before it and what the tokens on the path have added.
    void advance(const Stretch& stretch, int i) const {
        const int last = stretch.from_token, slot = run_.slots[last], num = depth(last) + 1;
        const int* const path = run_.path(last);
        const float* const share = shares(i, slot);
        for (int j = 0; j < num; ++j)
            for (int k = 0; k < key_width_; k += LANES)
                store(weighed_ + j * key_width_ + k, load(keys(path[j]) + k) * f16(share[j]));
        const float* const from = state(run_.stretches[stretch.from].level, i);
        float* const to = room(stretch.level, i);
        state(stretch.level, i) = to;
        const float decay = decays(i)[slot];
        constexpr int ROWS = 4;
        int row = 0;
        const size_t width = static_cast<size_t>(value_width_), stride = static_cast<size_t>(key_width_);
        for (; row + ROWS <= h_.key_dim; row += ROWS)
            advance_rows<ROWS>(from + row * width, to + row * width, value_width_, decay, weighed_ + row, stride,
                               added(i), path, num);
        for (; row < h_.key_dim; ++row)
            advance_rows<1>(from + row * width, to + row * width, value_width_, decay, weighed_ + row, stride, added(i),
                            path, num);
    }

    size_t row_of(int token) const { return static_cast<size_t>(run_.first_row + token - run_.num_behind); }
    const float* gates(int token) const {
        const size_t width = 2 * static_cast<size_t>(h_.value_heads);
        if (token < run_.num_behind) return in_.pool.gates + static_cast<size_t>(run_.behind[token]) * width;
        return d_.gates + row_of(token) * width;
    }
    void window(int token, const T** to) const {
        const void* inputs[STATE_TOKENS];
        in_.window(run_, token, inputs);
        for (int j = 0; j < in_.conv; ++j) to[j] = static_cast<const T*>(inputs[j]);
    }

    // A head behind convolution and silu.
    void convolve(const T* const* window, int column, int dim, int width, float* to) const {
        for (int c = 0; c < width; c += LANES) {
            alignas(64) float lanes[LANES] = {};
            const int count = dim - c < LANES ? dim - c : LANES;
            store_first(lanes,
                        silu(convolved(window, d_.taps, static_cast<size_t>(in_.width), in_.conv, column + c, count)),
                        count, false);
            store(to + c, load(lanes));
        }
    }
    void to_length(float* x, float length) const {
        const F16 factor = f16(length / __builtin_sqrtf(dot(x, x, key_width_) + LENGTH_EPS));
        for (int k = 0; k < key_width_; k += LANES) store(x + k, load(x + k) * factor);
    }

    // Keys of all tokens of a stretch and queries of its own rows, and their products along each path.
    void make_keys(const Stretch& stretch) const {
        const int own = first_own(stretch);
        const float length = 1.0f / __builtin_sqrtf(static_cast<float>(h_.key_dim));
        for (int k = 0; k < stretch.count; ++k) {
            const int t = token(stretch, k), num = depth(t);
            const int* const path = run_.path(t);
            fetch(stretch, k);
            const T* inputs[STATE_TOKENS];
            window(t, inputs);
            float* const key = keys(stretch.slot + k);
            convolve(inputs, key_column(), h_.key_dim, key_width_, key);
            to_length(key, 1.0f);
            for (int j = 0; j < num; ++j) of_keys_[k * STATE_TOKENS + j] = dot(key, keys(path[j]), key_width_);
            if (k < own) continue;
            float* const query = queries_ + static_cast<size_t>(k) * static_cast<size_t>(key_width_);
            convolve(inputs, query_column(), h_.key_dim, key_width_, query);
            to_length(query, length);
            for (int j = 0; j <= num; ++j) of_queries_[k * STATE_TOKENS + j] = dot(query, keys(path[j]), key_width_);
        }
    }

    // beta, and the decay of a state and of each addition until each token.
    void make_gates(const Stretch& stretch, int i) const {
        const F16 bias = f16(d_.dt_bias[head(i)]), decay = f16(d_.decay[head(i)]);
        float* const total = sums(i);
        for (int first = 0; first < stretch.count; first += LANES) {
            alignas(64) float a[LANES] = {}, b[LANES] = {};
            for (int k = first; k < stretch.count && k < first + LANES; ++k) {
                const float* const own = gates(token(stretch, k));
                b[k - first] = own[head(i)], a[k - first] = own[h_.value_heads + head(i)];
            }
            store(betas_ + first, sigmoid(load(b)));
            store(steps_ + first, max(f16(LEAST_DECAY), decay * softplus(load(a) + bias)));
        }
        for (int k = 0; k < stretch.count; ++k) {
            const int t = token(stretch, k), num = depth(t), slot = stretch.slot + k;
            const int* const path = run_.path(t);
            total[slot] = num > 0 ? total[path[num - 1]] + steps_[k] : steps_[k];
            alignas(64) float between[LANES] = {};
            for (int j = 0; j <= num; ++j) between[j] = total[slot] - total[path[j]];
            store(shares(i, slot), exp(load(between)));
        }
        float* const all = decays(i) + stretch.slot;
        for (int k = 0; k < stretch.count; k += LANES) {
            const int count = stretch.count - k < LANES ? stretch.count - k : LANES;
            store_first(all + k, exp(load_first(total + stretch.slot + k, count)), count, false);
        }
    }

    template <int N>
    void add_columns(const Stretch& stretch, int i, int own, int column) const {
        const size_t width = static_cast<size_t>(value_width_);
        float* const rows = added(i) + column;
        for (int k = 0; k < stretch.count; ++k) {
            const int t = token(stretch, k), num = depth(t), slot = stretch.slot + k;
            const int* const path = run_.path(t);
            float* const at = rows + static_cast<size_t>(slot) * width;
            const float* const share = shares(i, slot);
            const F16 decay = f16(decays(i)[slot]), beta = f16(betas_[k]);
            alignas(64) float along[STATE_TOKENS];
            store(along, load(share) * load(of_keys_ + k * STATE_TOKENS));
            F16 totals[N];
            for (int n = 0; n < N; ++n)
                totals[n] = load(known_ + static_cast<size_t>(k) * width + column + n * LANES) * decay;
            add_path<N>(rows, width, path, along, num, totals);
            for (int n = 0; n < N; ++n) store(at + n * LANES, (load(at + n * LANES) - totals[n]) * beta);
            if (k < own) continue;
            float* const out = read_ + static_cast<size_t>(k) * width + column;
            store(along, load(share) * load(of_queries_ + k * STATE_TOKENS));
            for (int n = 0; n < N; ++n) totals[n] = load(out + n * LANES) * decay;
            add_path<N>(rows, width, path, along, num + 1, totals);
            for (int n = 0; n < N; ++n) store(out + n * LANES, totals[n]);
        }
    }

    // What the tokens of a stretch add to the state of a head, and what its own rows read.
    void go_through(const Stretch& stretch, int i) const {
        const int own = first_own(stretch);
        const size_t width = static_cast<size_t>(value_width_), key_width = static_cast<size_t>(key_width_);
        make_gates(stretch, i);
        for (int k = 0; k < stretch.count; ++k) {
            const T* inputs[STATE_TOKENS];
            window(token(stretch, k), inputs);
            convolve(inputs, value_column(i), h_.value_dim, value_width_,
                     added(i) + static_cast<size_t>(stretch.slot + k) * width);
        }
        const float* const before = state(stretch.level, i);
        const size_t past = static_cast<size_t>(own);
        Ahead ahead = next_state(stretch, i);
        times_state(stretch.count, keys(stretch.slot), key_width, before, value_width_, h_.key_dim, known_, ahead);
        times_state(stretch.count - own, queries_ + past * key_width, key_width, before, value_width_, h_.key_dim,
                    read_ + past * width, ahead);
        constexpr int N = WIDE_REGISTERS ? 4 : 2;
        int column = 0;
        for (; column + N * LANES <= value_width_; column += N * LANES) add_columns<N>(stretch, i, own, column);
        for (; column < value_width_; column += LANES) add_columns<1>(stretch, i, own, column);
        for (int k = own; k < stretch.count; ++k)
            put_out(row_of(token(stretch, k)), i, read_ + static_cast<size_t>(k) * width);
    }

    // What a row reads of a head, behind its norm and times silu(z).
    void put_out(size_t row, int i, float* x) const {
        const int first = head(i) * h_.value_dim;
        const float* const z = in_.rows + row * in_.stride + in_.width + first;
        if (d_.norm) rms_norm(x, d_.norm, h_.value_dim, d_.norm_eps, x);
        for (int c = 0; c < h_.value_dim; c += LANES) {
            const int count = h_.value_dim - c < LANES ? h_.value_dim - c : LANES;
            put(d_.next, static_cast<int>(row), first + c, load(x + c) * silu(load_first(z + c, count)), count);
        }
    }

    const DeltaRule& d_;
    const StateHeads& h_;
    const StateInputs& in_;
    const StateTokens& run_;
    const StateItem& item_;
    const int num_heads_, key_width_, value_width_;
    const size_t slots_;
    // By slot: keys; by head and slot what is added to a state, sums of g along the path, shares of the path, and
    // e^sum.
    float *keys_, *added_, *sums_, *shares_, *decays_;
    float* states_;         // room for those that are made, by level and head
    const float** places_;  // where each is
    // Of the tokens of a stretch.
    float *queries_, *of_keys_, *of_queries_, *known_, *read_, *betas_, *steps_;
    float* weighed_;  // keys times shares
};

inline void delta_rule(const DeltaRule& rule, const StateItem& item, float* scratch) {
    if (rule.inputs.type == Type::float32) DeltaItem<float>(rule, item, scratch).run();
    else DeltaItem<uint16_t>(rule, item, scratch).run();
}

}  // namespace FORERUN_ISA
}  // namespace forerun
