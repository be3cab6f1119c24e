// What a look of pacing "auto" computes, for Python: under the names that src/forerun/pacing/_*.py have for it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "pacing_acceptance.h"
#include "pacing_costs.h"
#include "pacing_plans.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace forerun::pacing;

namespace {

using Lengths = std::vector<int>;
using Numbers = std::tuple<double, double, double>;
using Plan = std::tuple<Lengths, double, double, double>;

Plan plan_of(const Plans& plans, int i) {
    const Value& v = plans.found(i);  // throws std::out_of_range
    return {plans.lengths(i), v.goodput, v.seconds, v.rows};
}

void make_plans(Plans* self, std::vector<std::vector<double>> gains, const std::vector<double>& found,
                const std::vector<int>& drafters, const Lengths& fixed, const PassTime& passes,
                const std::vector<DraftTime*>& drafts) {
    std::vector<Candidate> candidates;
    for (size_t b = 0; b < gains.size(); ++b) {
        if (drafters.at(b) < 0 || drafters[b] >= static_cast<int>(drafts.size())) throw std::out_of_range("drafter");
        candidates.push_back({std::move(gains[b]), found.at(b), drafters[b], fixed.at(b)});
    }
    std::vector<DraftTime> copied;
    for (const DraftTime* draft : drafts) {
        if (!draft) throw std::invalid_argument("a drafter without a time");
        copied.push_back(*draft);
    }
    new (self) Plans(std::move(candidates), passes, std::move(copied));
}

Numbers value_of(Plans& plans, const Lengths& lengths) {
    const bool is_plan = static_cast<int>(lengths.size()) == plans.num_requests();
    if (!is_plan || std::any_of(lengths.begin(), lengths.end(), [](int length) { return length < 0; }))
        throw std::invalid_argument("one length for each request, none below 0");
    const Value v = plans.value(lengths.data());
    return {v.goodput, v.seconds, v.rows};
}

}  // namespace

void bind_pacing(nb::module_& m) {
    nb::class_<PassTime>(m, "PassTime", "Twin of forerun.pacing._costs.PassTime.")
        .def(nb::init<>())
        .def("of", &PassTime::of, "num_rows"_a, "num_sequences"_a)
        .def("sequences", &PassTime::sequences, "num_sequences"_a)
        .def("rows", &PassTime::rows, "num_rows"_a)
        .def("spread", &PassTime::spread, "num_rows"_a, "other_rows"_a, "seconds"_a, "other_seconds"_a,
             "num_sequences"_a)
        .def("per_prompt_row", &PassTime::per_prompt_row)
        .def("unit_s", &PassTime::unit_s, "seconds"_a, "num_other"_a, "num_rows"_a, "num_sequences"_a)
        .def("observe_prompts", &PassTime::observe_prompts, "seconds"_a, "num_other"_a, "num_rows"_a, "num_sequences"_a)
        .def("observe", &PassTime::observe, "run_s"_a, "num_rows"_a, "num_sequences"_a, nb::kw_only(),
             "disturbance"_a = 0.0)
        .def("rest", &PassTime::rest, "num_steps"_a)
        .def_prop_ro("is_settled", &PassTime::is_settled)
        .def_prop_ro("num_steps", &PassTime::num_steps)
        .def_prop_ro("widest", &PassTime::widest);
    nb::class_<DraftTime>(m, "DraftTime", "Twin of forerun.pacing._drafts.DraftTime.")
        .def(nb::init<>())
        .def("of", &DraftTime::of, "depth"_a, "num_nodes"_a)
        .def("catchup", &DraftTime::catchup, "num_tokens"_a)
        .def("observe", &DraftTime::observe, "ratio"_a, "shape"_a, "num_drafts"_a = 1)
        .def("fade", &DraftTime::fade, "num_steps"_a)
        .def("fit", &DraftTime::fit, "passes"_a)
        .def("observe_catchup", &DraftTime::observe_catchup, "relative"_a, "num_tokens"_a);
    nb::class_<Acceptance>(m, "Acceptance", "Twin of forerun.pacing._acceptance.Acceptance.")
        .def(nb::init<double, std::shared_ptr<Acceptance>>(), "memory_rounds"_a, "parent"_a = nb::none())
        .def("count", &Acceptance::count, "granted"_a, "num_drafted"_a, "num_tested"_a, "num_accepted"_a)
        .def("refresh", &Acceptance::refresh)
        .def("gains", &Acceptance::gains, "limit"_a)
        .def_prop_ro("means", &Acceptance::means)
        .def_prop_ro("hits", &Acceptance::hits)
        .def_prop_ro("misses", &Acceptance::misses)
        .def_prop_ro("parent", &Acceptance::parent, nb::sig("def parent(self) -> Acceptance | None"));
    nb::class_<Plans>(m, "Plans", "Twin of forerun.pacing._plan.Plans.")
        .def("__init__", &make_plans, "gains"_a, "found"_a, "drafters"_a, "fixed"_a, "passes"_a, "drafts"_a,
             nb::keep_alive<1, 6>())
        .def("search", &Plans::search, "max_rows"_a)
        .def("value", &value_of, "lengths"_a)
        .def("plan", &plan_of, "i"_a)
        .def("best", &Plans::best)
        .def("drafting", &Plans::drafting)
        .def("marks", &Plans::marks);
}
