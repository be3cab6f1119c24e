// Kernels of one instruction set with the threads that run them, and the products that they compute together.
#pragma once

#include <functional>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace forerun {

struct Backend {
    const Kernels& kernels;
    Team team;
    Scratch prepared;  // inputs of the product of many rows that runs now, which all threads prepare and read
    Backend(const Kernels& k, int num_threads) : kernels(k), team(num_threads) {}
};

constexpr size_t ALONE_BYTES = 1 << 20;  // what reads less runs on one thread: waking others would cost more

// Computes a product with all threads of a team; each of them must call it inside `run`. prepare: what a thread does
// before its first tile, to write a copy of the inputs of its own.
void product(Backend& backend, int thread, const Matrix& w, const Inputs& x, const Output& to,
             const std::function<void()>& prepare = nullptr);

// One of several products that are computed together.
struct Product {
    const Matrix* w;
    Inputs x;
    Output to;
};

// Computes products of different weights and rows that do not wait for each other; otherwise as `product`.
void products(Backend& backend, int thread, const std::vector<Product>& all);

// A norm of rows. weight: with its offset; ones where a norm has none. bias: or null. is_per_head: over each head of a
// row.
struct Norm {
    bool is_layer;
    float eps;
    const float *weight, *bias;
    bool is_per_head;
};

// out may be x.
void norm_row(const Kernels& kernels, const Norm& norm, const float* x, int width, float* out);

// Rows that stand side by side, each behind a norm of its own, and their product: [norm(a) | norm(b) | ...] w. It makes
// what the layer of a head reads (EAGLE).
struct Join {
    std::vector<const float*> norms;  // of each part; null = the part as it is
    float norm_eps;
    const Matrix* w;
    const float* whole_norm = nullptr;  // of all parts side by side; null = none
    float largest = 0.0f;               // parts are cut to -largest .. largest before; 0 = they are not
};

// Throws std::invalid_argument unless parts of this width are the inputs of the product.
void check_join(const Join& join, int width);

// Writes the numbers of a row, but no smaller than -largest and no larger than `largest`, and returns where they are.
const float* cut(const float* x, int width, float largest, float* out);

// parts: of each float32 [num_rows, inputs of w / parts]. out: float32 [num_rows, outputs of w].
void join_rows(Backend& backend, const Join& join, const std::vector<const float*>& parts, int num_rows, float* out);

}  // namespace forerun
