// Distributions as Python sees them: what bind_model.cpp and bind_sampling.cpp share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "sampling.h"

namespace forerun {

template <class T>
nanobind::object array_of(T* data, size_t size, nanobind::handle owner) {
    return nanobind::cast(nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>(data, {size}, owner));
}

template <class T>
nanobind::object array_of(std::vector<T>&& values) {
    auto* kept = new std::vector<T>(std::move(values));
    nanobind::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return array_of(kept->data(), kept->size(), owner);
}

// (ids or None, probabilities); None of a distribution that was not made.
inline nanobind::object distribution_of(Probs&& probs) {
    if (probs.dense) {
        Buffer* dense = probs.dense.release();
        nanobind::capsule owner(dense, [](void* p) noexcept { delete static_cast<Buffer*>(p); });
        return nanobind::make_tuple(nanobind::none(),
                                    array_of(dense->data(), static_cast<size_t>(dense->size()), owner));
    }
    if (probs.ids.empty()) return nanobind::none();
    return nanobind::make_tuple(array_of(std::move(probs.ids)), array_of(std::move(probs.listed)));
}

inline Filters filters_of(double temperature, int64_t top_k, double log_min_p, double top_p, int64_t most_listed) {
    return {static_cast<float>(temperature), top_k, static_cast<float>(log_min_p), top_p, most_listed};
}

}  // namespace forerun
