// forerun._native.Sampler: what src/forerun/sampling do to float32 rows, under the same names.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu.h"
#include "distributions.h"
#include "door.h"
#include "philox.h"
#include "sampling.h"

namespace nb = nanobind;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>;
using Found = std::optional<int64_t>;

Found or_none(int64_t found) { return found < 0 ? Found() : Found(found); }

struct Sampler {
    explicit Sampler(const std::string& isa) : kernels(forerun::kernels_for(isa).sampling) {}

    Found argmax(Floats row) const {
        nb::gil_scoped_release released;
        return or_none(forerun::argmax(kernels, row.data(), row.size()));
    }

    nb::object probs(Floats row, double temperature, int64_t top_k, double log_min_p, double top_p,
                     int64_t most_listed) const {
        const forerun::Filters filters = forerun::filters_of(temperature, top_k, log_min_p, top_p, most_listed);
        forerun::Probs probs;
        bool is_distribution;
        {
            nb::gil_scoped_release released;
            is_distribution = forerun::make_probs(kernels, row.data(), row.size(), filters, probs);
        }
        return is_distribution ? forerun::distribution_of(std::move(probs)) : nb::none();
    }

    double mass(Floats weights) const {
        nb::gil_scoped_release released;
        return forerun::mass_of(kernels, weights.data(), weights.size());
    }

    double mass_of_logits(Floats row) const {
        nb::gil_scoped_release released;
        return forerun::mass_of_logits(kernels, row.data(), row.size());
    }

    Found place(Floats weights, uint64_t uniform) const {
        nb::gil_scoped_release released;
        return or_none(forerun::place_of(kernels, weights.data(), weights.size(), uniform));
    }

    Found race(Floats weights, std::optional<Ids> ids, uint64_t seed, uint64_t position) const {
        forerun::require(!ids || ids->size() == weights.size(), "every weight of a race needs an id, or none does");
        nb::gil_scoped_release released;
        return or_none(
            forerun::race(kernels, weights.data(), ids ? ids->data() : nullptr, weights.size(), seed, position));
    }

    Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t key0, uint32_t key1) const {
        const forerun::PhiloxWords out = forerun::philox({{c0, c1, c2, c3}}, key0, key1);
        return {out.word[0], out.word[1], out.word[2], out.word[3]};
    }

    double log(double x) const { return forerun::log_of(x); }

    const forerun::SamplingKernels& kernels;
};

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::class_<Sampler>(m, "Sampler")
        .def(nb::init<const std::string&>(), nb::arg("isa"))
        .def("argmax", &Sampler::argmax, nb::arg("row"), "The lowest index of the largest; None where it is no number.")
        .def("probs", &Sampler::probs, nb::arg("row"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("log_min_p"),
             nb::arg("top_p"), nb::arg("most_listed"),
             "(ids or None, probabilities); None where logits are no numbers.")
        .def("mass", &Sampler::mass, nb::arg("weights"), "The sum of weights >= 0; 0 where one is no finite number.")
        .def("mass_of_logits", &Sampler::mass_of_logits, nb::arg("row"),
             "The sum of e^(logit - the largest); 0 where logits are no numbers.")
        .def("place", &Sampler::place, nb::arg("weights"), nb::arg("uniform"),
             "Where the cumulative sum is above uniform * 2^-53 of all; None where there is no mass.")
        .def("race", &Sampler::race, nb::arg("weights"), nb::arg("ids").none(), nb::arg("seed"), nb::arg("position"),
             "The id with the least -log u / weight; None where there is no mass.")
        .def("log", &Sampler::log, nb::arg("x"), "Natural logarithm of a positive number, as the race takes it.")
        .def("philox", &Sampler::philox, nb::arg("c0"), nb::arg("c1"), nb::arg("c2"), nb::arg("c3"), nb::arg("key0"),
             nb::arg("key1"), "Philox4x32-10: four words of counter, two of key -> four words.");
}
