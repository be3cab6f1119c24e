// Bindings of whole models. The interpreter lock is released while they run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cpu.h"
#include "distributions.h"
#include "matrix.h"
#include "model.h"
#include "spec.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace forerun;

namespace {

using Addresses = std::vector<Address>;
using Places = std::unordered_map<std::string, Address>;
using Rotations = std::vector<std::pair<Address, int64_t>>;  // cos and sin, and of how many positions

// ----------------------------------------------------------------------------------------------------------------
// caches

struct Pools {
    std::vector<void*> keys, values;
    int block_tokens;
    std::vector<std::array<size_t, 2>> row_bytes;  // by pool: of keys and of values
    std::vector<int64_t> num_rows;                 // by pool
    std::vector<int> kinds;                        // by pool: which runs of a pass have its rows

    // Of recurrent layers: each pool, null where a layer has none, with the bytes of a state, of the inputs before it,
    // of a token's inputs and of its gates; and the number of states and of rows in each.
    std::vector<StatePool> states;
    std::vector<std::array<size_t, 4>> state_bytes;
    int64_t num_states = 0, num_state_rows = 0;

    Type type;
    bool refined;  // whether keys in bytes have second codes

    Pools(const Addresses& k, const Addresses& v, int tokens, std::vector<std::array<size_t, 2>> bytes,
          std::vector<int64_t> rows, int type_number, bool is_refined, std::vector<int> of)
        : block_tokens(tokens), row_bytes(std::move(bytes)), num_rows(std::move(rows)), kinds(std::move(of)),
          type(static_cast<Type>(type_number)), refined(is_refined) {
        for (Address a : k) keys.push_back(at<void>(a));
        for (Address a : v) values.push_back(at<void>(a));
        if (row_bytes.size() == 1) row_bytes.resize(keys.size(), std::array<size_t, 2>(row_bytes[0]));
        if (num_rows.size() == 1) num_rows.resize(keys.size(), int64_t(num_rows[0]));
        if (kinds.empty()) kinds.resize(keys.size());
        if (keys.size() != values.size() || keys.size() != row_bytes.size() || keys.size() != num_rows.size() ||
            keys.size() != kinds.size())
            throw std::invalid_argument(
                "every pool of keys needs one of values, the bytes of a row, a number of rows, and a kind");
        if (block_tokens < 1 || std::any_of(kinds.begin(), kinds.end(), [](int kind) { return kind < 0; }))
            throw std::invalid_argument("blocks have tokens, and kinds are counted from 0");
        states.resize(keys.size()), state_bytes.resize(keys.size());
    }

    void keep_states(int64_t states_each, int64_t rows_each,
                     const std::vector<std::tuple<size_t, std::array<Address, 4>, std::array<size_t, 4>>>& layers) {
        if (states_each < 0 || rows_each < 0) throw std::invalid_argument("there are no less than no states");
        num_states = states_each, num_state_rows = rows_each;
        for (const auto& [layer, places, bytes] : layers) {
            if (layer >= states.size()) throw std::invalid_argument("states are those of a layer");
            states[layer] = {at<float>(places[0]), at<void>(places[1]), at<void>(places[2]), at<float>(places[3])};
            state_bytes[layer] = bytes;
        }
    }

    // Rows that all pools have.
    int64_t common_rows() const { return num_rows.empty() ? 0 : *std::min_element(num_rows.begin(), num_rows.end()); }

    // The rows of a block of all pools, keys then values of each, one behind the other, to or from `bytes`.
    template <bool to_pools>
    void move(int64_t index, char* bytes, size_t num_bytes) const {
        size_t wanted = 0;
        for (const auto& [key, value] : row_bytes) wanted += (key + value) * static_cast<size_t>(block_tokens);
        require(index >= 0 && index < common_rows() / block_tokens, "a cache has no such block");
        require(num_bytes == wanted, "the bytes of a block are as many as its rows have");
        const size_t block = static_cast<size_t>(index);
        for (size_t p = 0; p < keys.size(); ++p) {
            for (size_t part = 0; part < 2; ++part) {
                const size_t size = row_bytes[p][part] * static_cast<size_t>(block_tokens);
                char* const rows = static_cast<char*>(part == 0 ? keys[p] : values[p]) + block * size;
                std::memcpy(to_pools ? rows : bytes, to_pools ? bytes : rows, size);
                bytes += size;
            }
        }
    }

    void copy(const std::vector<size_t>& sources, const std::vector<size_t>& targets) const {
        require(sources.size() == targets.size(), "every row that is copied needs a target");
        const size_t end = static_cast<size_t>(common_rows());
        for (const auto* rows : {&sources, &targets})
            for (size_t row : *rows) require(row < end, "a cache has no such row");
        for (size_t part = 0; part < 2; ++part)
            for (size_t p = 0; p < keys.size(); ++p) {
                char* const pool = static_cast<char*>(part == 0 ? keys[p] : values[p]);
                const size_t size = row_bytes[p][part];
                for (size_t i = 0; i < sources.size(); ++i)
                    std::memcpy(pool + targets[i] * size, pool + sources[i] * size, size);
            }
    }
};

// ----------------------------------------------------------------------------------------------------------------
// models

std::unique_ptr<Model> make_model(Backend& b, nb::handle spec, bool bfloat16,
                                  const std::unordered_map<std::string, const Packed*>& matrices, const Places& vectors,
                                  const Places& tables, const Model* target, const Ids& ids) {
    if (target)
        for (int64_t id : ids)
            if (id < 0 || id >= target->parts().vocab_size)
                throw std::invalid_argument("an id is none of the target's");
    WeightPlaces places{{}, vectors, tables};
    for (const auto& [name, packed] : matrices) places.matrices[name] = &packed->matrix();
    auto [parts, kept] = read_spec(spec, bfloat16 ? Type::bfloat16 : Type::float32, &places);
    return std::make_unique<Model>(b, std::move(parts), std::move(kept), Lent{target, ids});
}

size_t bytes_of_pass(const std::string& isa, nb::handle spec, bool bfloat16, bool quantised, int num_rows, int context,
                     int num_threads) {
    const ModelParts parts = read_spec(spec, bfloat16 ? Type::bfloat16 : Type::float32, nullptr).first;
    return pass_bytes(kernels_for(isa), parts, quantised, num_rows, context, num_threads);
}

// ----------------------------------------------------------------------------------------------------------------
// passes

// Throws WrongNumbers for layers that the model has not, or that do not ascend.
void check_layers(const Model& m, const std::vector<int>& layers, const Pools& pools) {
    const int num_blocks = static_cast<int>(m.parts().blocks.size());
    require(pools.keys.size() == m.parts().blocks.size(), "every block of a model needs a pool");
    for (size_t i = 0; i < layers.size(); ++i)
        require(layers[i] >= 0 && layers[i] < num_blocks && (i == 0 || layers[i - 1] < layers[i]),
                "layers must ascend, and be a model's own");
}

// The rows of the smallest pool that some layers read, of each kind of runs, or of their sources.
int64_t rows_of(const Model& m, const std::vector<int>& layers, const Pools& pools, int kind, bool of_sources) {
    int64_t rows = INT32_MAX;
    for (int layer : layers) {
        const auto& attention = m.parts().blocks[static_cast<size_t>(layer)].attention;
        if (!attention || (attention->sees == Sees::source) != of_sources) continue;
        const size_t pool = static_cast<size_t>(m.keys_of(layer));
        if (of_sources || pools.kinds[pool] == kind) rows = std::min(rows, pools.num_rows[pool]);
    }
    return rows;
}

// numbers: six for each run, as for `Runs`; empty without sources.
Runs sources_of(const Model& m, const Numbers& numbers, int num_runs, const std::vector<int>& layers,
                const Pools& pools) {
    Runs sources(numbers, numbers.empty() ? 0 : num_runs, pools.block_tokens, rows_of(m, layers, pools, 0, true));
    for (const Run& source : sources.runs)
        require(source.num_rows == 0 && source.pending == 0 && !source.parents,
                "a source has cached rows, and no others");
    return sources;
}

// The runs of a pass for each kind of layers.
std::vector<Runs> runs_of(const Model& m, const std::vector<Numbers>& numbers, int num_runs,
                          const std::vector<int>& layers, const Pools& pools) {
    const int most = pools.kinds.empty() ? 0 : *std::max_element(pools.kinds.begin(), pools.kinds.end());
    if (static_cast<int>(numbers.size()) <= most)
        throw std::invalid_argument("every kind of pools needs the runs of a pass");
    std::vector<Runs> runs;
    for (size_t kind = 0; kind < numbers.size(); ++kind) {
        runs.emplace_back(numbers[kind], num_runs, pools.block_tokens,
                          rows_of(m, layers, pools, static_cast<int>(kind), false));
        for (size_t i = 0; i < runs[0].runs.size(); ++i) {
            const Run &first = runs[0].runs[i], &own = runs[kind].runs[i];
            require(first.first_row == own.first_row && first.num_rows == own.num_rows && first.cached == own.cached &&
                        first.pending == own.pending,
                    "the runs of all kinds differ in their rows of the cache alone");
        }
    }
    return runs;
}

// What recurrent layers read and write for each run. numbers, by run: the first state, -1 = zeros; how many kept tokens
// are behind that state, how many pending ones of a tree, and how many states it leaves; the rows of these tokens; the
// rows of its own inputs, -1 = not kept; and for each state the tokens in it and where it goes. Throws WrongNumbers for
// what no pool has.
std::vector<StateRun> state_runs_of(const Model& m, const Numbers& numbers, const std::vector<Run>& runs,
                                    const std::vector<int>& layers, const Pools& pools) {
    int64_t num_states = pools.num_states, num_rows = pools.num_state_rows;
    bool has_states = false;
    for (int layer : layers) {
        const auto& r = m.parts().blocks[static_cast<size_t>(layer)].recurrence;
        if (!r) continue;
        has_states = true;
        const size_t i = static_cast<size_t>(layer);
        if (!pools.states[i].inputs) num_states = num_rows = 0;
        else
            require(pools.state_bytes[i] == r->kept_bytes(pools.type == Type::float32 ? Type::float32 : Type::bfloat16),
                    "a pool has the states of another block");
    }
    std::vector<StateRun> found;
    if (!has_states) return found;
    size_t next = 0;
    const auto take = [&](int64_t least, int64_t end) {
        require(next < numbers.size() && numbers[next] >= least && numbers[next] < end,
                "a run has a state or a row that recurrent layers have not");
        return numbers[next++];
    };
    const int64_t most = static_cast<int64_t>(numbers.size());
    for (const Run& run : runs) {
        StateRun own{};
        own.first_row = run.first_row, own.num_rows = run.num_rows;
        own.first = take(-1, num_states);
        const int num_before = take(0, most), num_pending = take(0, most), num_saves = take(0, most);
        require(num_pending == (run.parents ? run.pending : 0), "pending rows of recurrent layers are those of a tree");
        own.start = run.cached + (run.parents ? 0 : run.pending) - num_before;
        require(own.start >= 0, "a run has more tokens behind a state than it has");
        for (int i = 0; i < num_before + num_pending; ++i) own.behind.push_back(take(0, num_rows));
        for (int i = 0; i < run.num_rows; ++i) own.rows.push_back(take(-1, num_rows));
        for (int i = 0; i < num_saves; ++i) {
            const int num_tokens = take(1, int64_t{num_before} + (run.parents ? 0 : run.num_rows) + 1);
            require((own.start + num_tokens) % STATE_TOKENS == 0,
                    "a state is written where a block of tokens is whole");
            own.saves.push_back({num_tokens, take(0, num_states)});
        }
        for (int i = 0; i < own.num_tokens(); ++i) {
            const int node = i - num_before;
            const int parent = node < 0 || !run.parents ? i - 1
                               : run.parents[node] < 0  ? num_before - 1
                                                        : num_before + run.parents[node];
            own.parents.push_back(parent);
        }
        own.arrange();
        found.push_back(std::move(own));
    }
    require(next == numbers.size(), "recurrent layers have numbers of other runs");
    return found;
}

// sources: for each run the rows of its source, written as a run with cached rows alone; none without sources.
Pass make_pass(const Ids& tokens, const int64_t* positions, const Rotations& rotations, const std::vector<Runs>& runs,
               const Runs& sources, const Pools& pools, const std::vector<int>& layers) {
    Pass pass{};
    pass.num_rows = static_cast<int>(tokens.size());
    pass.tokens = tokens.data(), pass.positions = positions;
    for (const auto& [table, num_positions] : rotations)
        pass.rotations.emplace_back(at<const float>(table), num_positions);
    for (const Runs& own : runs) pass.runs.push_back(own.runs);
    pass.sources = sources.runs;
    for (size_t i = 0; i < pass.sources.size(); ++i)
        pass.sources[i].first_row = pass.runs[0][i].first_row, pass.sources[i].num_rows = pass.runs[0][i].num_rows;
    pass.keys = pools.keys.data(), pass.values = pools.values.data(), pass.kinds = pools.kinds.data();
    pass.row_bytes = pools.row_bytes.data(), pass.state_pools = pools.states.data();
    pass.kept = pools.type, pass.refined = pools.refined;
    pass.layers = layers;
    pass.is_normed = true;
    return pass;
}

// input: 0 = embeddings of the tokens. taps: see Pass.
std::vector<int> forward(Model& m, const Ids& tokens, const Ids& positions, const Rotations& rotations, int num_runs,
                         const std::vector<Numbers>& numbers, const Pools& pools, const std::vector<int>& layers,
                         Address input, const std::vector<std::pair<int, Address>>& taps, bool is_normed,
                         Address hidden, const Numbers& source_numbers, const Numbers& state_numbers) {
    if (positions.size() != tokens.size()) throw std::invalid_argument("every token needs a position");
    check_layers(m, layers, pools);
    const std::vector<Runs> runs = runs_of(m, numbers, num_runs, layers, pools);
    runs[0].check_rows(static_cast<int>(tokens.size()));
    const Runs sources = sources_of(m, source_numbers, num_runs, layers, pools);
    Pass pass = make_pass(tokens, positions.data(), rotations, runs, sources, pools, layers);
    pass.input = at<const float>(input);
    pass.is_normed = is_normed;
    pass.hidden = at<float>(hidden);
    pass.states = state_runs_of(m, state_numbers, runs[0].runs, layers, pools);
    const int num_blocks = static_cast<int>(m.parts().blocks.size());
    for (const auto& [k, address] : taps) {
        require(k >= 0 && k <= num_blocks && (pass.taps.empty() || pass.taps.back().first < k),
                "taps must ascend from 0 to the blocks of a model");
        pass.taps.emplace_back(k, at<float>(address));
    }
    nb::gil_scoped_release release;
    return m.forward(pass);
}

void logits(Model& m, Address hidden, int num_rows, int num_ids, Address out) {
    require(num_rows >= 0 && num_ids > 0, "logits are of rows and ids that are there");
    nb::gil_scoped_release release;
    m.logits(at<const float>(hidden), num_rows, num_ids, at<float>(out));
}

// Returns the ids of the largest logits, and these logits.
std::pair<Ids, std::vector<float>> largest(Model& m, Address hidden, int num_rows, const std::vector<int>& rows,
                                           int num_ids) {
    require(num_ids > 0, "logits are of rows and ids that are there");
    for (int row : rows) require(row >= 0 && row < num_rows, "logits are of rows and ids that are there");
    Ids ids(rows.size());
    std::vector<float> values(rows.size());
    {
        nb::gil_scoped_release release;
        m.argmax(at<const float>(hidden), rows, num_ids, ids.data(), values.data());
    }
    return {std::move(ids), std::move(values)};
}

// By run the ids, their probabilities where there are stops, and the distribution of each where draws are made.
using Found = std::tuple<std::vector<Ids>, std::vector<std::vector<float>>, std::vector<std::vector<nb::object>>>;

Found found_of(std::vector<Continued>&& runs) {
    Found found;
    auto& [ids, chances, probs] = found;
    for (Continued& run : runs) {
        ids.push_back(std::move(run.ids));
        chances.push_back(std::move(run.chances));
        probs.emplace_back();
        for (Probs& own : run.probs) probs.back().push_back(distribution_of(std::move(own)));
    }
    return found;
}

void check_layer_rows(const Model& m, const Addresses& layer_rows) {
    if (!m.parts().features || static_cast<size_t>(m.parts().features->num) != layer_rows.size())
        throw std::invalid_argument("a head is given rows of as many layers as it joins");
}

void features(const Model& m, const Addresses& layer_rows, int num_rows, Address out) {
    check_layer_rows(m, layer_rows);
    require(num_rows >= 0, "features are of rows that are there");
    std::vector<const float*> rows;
    for (Address layer : layer_rows) rows.push_back(at<const float>(layer));
    nb::gil_scoped_release release;
    m.features(rows, num_rows, at<float>(out));
}

// As `forward`, of a head's context.
void remember(Model& m, const Ids& positions, const Rotations& rotations, int num_runs,
              const std::vector<Numbers>& numbers, const Pools& pools, const Addresses& layer_rows) {
    check_layer_rows(m, layer_rows);
    if (m.parts().features->begins != Begins::context)
        throw std::invalid_argument("only a head with a context remembers rows");
    std::vector<int> layers(m.parts().blocks.size());
    for (size_t i = 0; i < layers.size(); ++i) layers[i] = static_cast<int>(i);
    check_layers(m, layers, pools);
    const std::vector<Runs> runs = runs_of(m, numbers, num_runs, layers, pools);
    runs[0].check_rows(static_cast<int>(positions.size()));
    const Ids tokens(positions.size());
    const Pass pass =
        make_pass(tokens, positions.data(), rotations, runs, sources_of(m, {}, num_runs, layers, pools), pools, layers);
    std::vector<const float*> rows;
    for (Address layer : layer_rows) rows.push_back(at<const float>(layer));
    nb::gil_scoped_release release;
    m.remember(pass, rows);
}

// Throws WrongNumbers unless a run that is fed one by one behind its first rows leaves its states within these, and
// keeps the inputs of what is behind its last state.
void check_fed(const StateRun& run, int count) {
    size_t done = 0;
    for (const StateSave& save : run.saves) done = std::max(done, static_cast<size_t>(save.num_tokens));
    require(done <= run.behind.size() + static_cast<size_t>(count),
            "a run that goes on leaves states of its first rows alone");
    for (size_t i = 0; i < run.rows.size(); ++i)
        require(run.rows[i] >= 0 || run.behind.size() + i < done,
                "a run that goes on keeps the inputs behind its states");
}

// Returns None where a logit is NaN. numbers: as for `forward`, with rows for all tokens that are fed; counts: how many
// of `tokens` each run begins with.
std::optional<Found> run_ahead(Model& m, const Ids& tokens, const Ids& positions, const std::vector<int>& counts,
                               const std::vector<int>& lengths, const Rotations& rotations,
                               const std::vector<Numbers>& numbers, const Pools& pools, const std::vector<int>& layers,
                               int num_ids, Address input, const std::vector<Stop>& stops, const Addresses& layer_rows,
                               const Numbers& source_numbers, const std::vector<Draw>& draws,
                               const Numbers& state_numbers) {
    const bool is_head = m.parts().features.has_value();
    if ((input != 0) + !layer_rows.empty() != is_head)
        throw std::invalid_argument("a head, and only a head, has an input or rows of layers");
    if (!layer_rows.empty()) check_layer_rows(m, layer_rows);
    require(num_ids > 0, "logits are of rows and ids that are there");
    if (is_head && m.lent().ids.size() < static_cast<size_t>(num_ids))
        throw std::invalid_argument("every id needs one of the target");
    if (lengths.size() != counts.size()) throw std::invalid_argument("every run needs a length");
    if (!stops.empty() && stops.size() != counts.size())
        throw std::invalid_argument("every run needs a stop, or none does");
    if (!draws.empty() && is_head) throw std::invalid_argument("the ids of a head are not those that its coins are of");
    if (!draws.empty() && draws.size() != counts.size())
        throw std::invalid_argument("every run needs a draw, or none does");
    for (const Stop& stop : stops)
        if (stop.shares.size() != stop.edges.size() + 1)
            throw std::invalid_argument("a stop has a share more than edges");
    check_layers(m, layers, pools);
    std::vector<Runs> runs = runs_of(m, numbers, static_cast<int>(counts.size()), layers, pools);
    std::vector<StateRun> states = state_runs_of(m, state_numbers, runs[0].runs, layers, pools);
    int first_row = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        for (Runs& own : runs) {
            Run& run = own.runs[i];
            if (counts[i] < 1 || lengths[i] < 1 || lengths[i] - 1 > run.num_rows - counts[i])
                throw std::invalid_argument("a run is fed its tokens, and all that is wanted but the last");
            run.first_row = first_row, run.num_rows = counts[i];
        }
        if (!states.empty()) check_fed(states[i], counts[i]);
        first_row += counts[i];
    }
    if (static_cast<size_t>(first_row) != tokens.size() || positions.size() != tokens.size() || counts.empty())
        throw std::invalid_argument("every token needs a run and a position");
    const Runs sources = sources_of(m, source_numbers, static_cast<int>(counts.size()), layers, pools);
    Pass pass = make_pass(tokens, positions.data(), rotations, runs, sources, pools, layers);
    pass.input = at<const float>(input);
    pass.states = std::move(states);
    std::vector<const float*> rows;
    for (Address layer : layer_rows) rows.push_back(at<const float>(layer));
    std::vector<Continued> found;
    bool are_numbers;
    {
        nb::gil_scoped_release release;
        are_numbers = m.run_ahead(pass, lengths, num_ids, rows, stops, draws, found);
    }
    if (!are_numbers) return {};
    return found_of(std::move(found));
}

}  // namespace

void bind_model(nb::module_& m) {
    m.attr("STATE_TOKENS") = STATE_TOKENS;
    m.def(
        "refusal", &refusal, "spec"_a,
        "Says why these kernels do not compute a forerun.blocks.Spec, in a sentence without an end; None where they do.");
    m.def("pass_bytes", &bytes_of_pass, "isa"_a, "spec"_a, "bfloat16"_a, "quantised"_a, "num_rows"_a, "context"_a,
          "num_threads"_a,
          "Counts the bytes of a model's buffers after a pass of so many rows behind so many tokens, an upper bound.");
    nb::class_<Stop>(m, "Stop", "When a run that is continued greedily ends before its length.")
        .def(
            nb::init<std::vector<float>, std::vector<float>, std::vector<float>>(), "edges"_a, "shares"_a, "least"_a,
            "edges: ascending probabilities. shares: one more; how often an id is right whose probability is at least so many "
            "of the edges. least: the product of the shares of all ids so far, below which nothing follows, behind each id.");
    nb::class_<Draw>(m, "Draw", "How the ids of a run that is continued are drawn: with the bits of forerun.sampling.")
        .def(
            "__init__",
            [](Draw* self, double temperature, int64_t top_k, double log_min_p, double top_p, int64_t most_listed,
               bool shares_noise, uint64_t seed, uint64_t position, uint32_t round) {
                new (self) Draw{filters_of(temperature, top_k, log_min_p, top_p, most_listed), shares_noise, seed,
                                position, round};
            },
            "temperature"_a, "top_k"_a, "log_min_p"_a, "top_p"_a, "most_listed"_a, "shares_noise"_a, "seed"_a,
            "position"_a, "round"_a,
            "temperature: 0 = the id of the largest logit. shares_noise: whether ids are drawn with the noise of match "
            "verification. position: the position of the first id.");
    nb::class_<Pools>(m, "Pools", "Addresses of a cache's keys and values, one pool for each block.")
        .def(
            nb::init<const Addresses&, const Addresses&, int, std::vector<std::array<size_t, 2>>, std::vector<int64_t>,
                     int, bool, std::vector<int>>(),
            "keys"_a, "values"_a, "block_tokens"_a, "row_bytes"_a, "num_rows"_a, "type"_a, "refined"_a = false,
            "kinds"_a = std::vector<int>{},
            "row_bytes: the bytes of a row of keys and of a row of values, one pair for all pools or one for each pool. "
            "num_rows: the number of rows, likewise. type: 0 float32, 1 bfloat16, 2 bytes. refined: whether keys in bytes have "
            "second codes, see KeyOrder in csrc/kernels.h. kinds: for each pool the index of the runs, among a pass's lists "
            "of runs, that tell the pool's rows; none = the first.")
        .def(
            "save",
            [](const Pools& self, int64_t block, Address bytes, size_t num_bytes) {
                self.move<false>(block, at<char>(bytes), num_bytes);
            },
            Free(), "block"_a, "bytes"_a, "num_bytes"_a,
            "Writes the rows of a block to an address: for each pool its keys, then its values.")
        .def(
            "load",
            [](const Pools& self, int64_t block, Address bytes, size_t num_bytes) {
                self.move<true>(block, at<char>(bytes), num_bytes);
            },
            Free(), "block"_a, "bytes"_a, "num_bytes"_a, "Reads the rows of a block from where `save` wrote them.")
        .def(
            "keep_states", &Pools::keep_states, "num_states"_a, "num_rows"_a, "layers"_a,
            "Says where recurrent layers keep their states, and the inputs of the tokens after these states.\n\n"
            "layers: for each layer its number, then four addresses (of states, of the inputs before each state, of the "
            "inputs of tokens, and of the gates of tokens), then the bytes of one entry at each address.")
        .def("copy", &Pools::copy, "sources"_a, "targets"_a,
             "Copies row sources[i] to row targets[i] in every block, one after the other.");
    nb::class_<Model>(m, "Model",
                      "A whole model; one call for each pass. Arguments that are integers where a tensor is meant are "
                      "addresses of contiguous memory, which the caller keeps alive.")
        .def_prop_ro(
            "rotations", [](const Model& self) { return self.parts().rotations; },
            "For each table of cos and sin that a pass takes, the first block that uses the table.")
        .def(
            "forward", &forward, "tokens"_a, "positions"_a, "rotations"_a, "num_runs"_a, "numbers"_a, "pools"_a,
            "layers"_a, "input"_a, "taps"_a, "is_normed"_a, "hidden"_a, "sources"_a = Numbers(), "states"_a = Numbers(),
            "Runs a ragged pass through some blocks and writes its rows, float32 [tokens, hidden_size], to `hidden`.\n\n"
            "rotations: for each table of the property `rotations`, the address of cos and sin by position, float32 "
            "[positions, 2, turned dimensions], and the number of positions. numbers: the runs, from "
            "forerun.ops.cpu.packed.run_numbers. layers: the blocks to run, ascending. input: float32 rows for the first "
            "block, 0 = the tokens' embeddings; for a head the features of the tokens, 0 = zeros. taps: ascending pairs "
            "(k, address) that receive the residual stream before block k. is_normed: whether the final norm is applied. "
            "sources: for each run the rows of its source, written as a run with cached rows alone. states: the states that "
            "recurrent blocks read and write for each run, from forerun.ops.cpu.packed.state_numbers. "
            "Returns for each block with experts how many experts the rows chose. "
            "Raises IndexError for a token without a row in the embedding, and for a position without cos and sin. Raises "
            "InternalError for numbers of runs, blocks, sources, layers or taps that contradict each other.")
        .def(
            "features", &features, "layer_rows"_a, "num_rows"_a, "out"_a,
            "Writes a head's features, float32 [num_rows, hidden_size], to `out`.\n\nlayer_rows: the target's rows after "
            "each layer that the head reads, float32 [num_rows, size].")
        .def("remember", &remember, "positions"_a, "rotations"_a, "num_runs"_a, "numbers"_a, "pools"_a, "layer_rows"_a,
             "Writes the keys and values of a head's features into all pools, as the context of the head's blocks.\n\n"
             "positions: the position of each row. The other arguments are as for `forward` and `features`.")
        .def(
            "norm",
            [](Model& self, Address hidden, int rows, Address out) {
                require(rows >= 0, "a norm is of rows that are there");
                self.norm(at<const float>(hidden), rows, at<float>(out));
            },
            Free(), "hidden"_a, "num_rows"_a, "out"_a,
            "Writes rows behind the final norm, float32 [num_rows, hidden_size], to `out`.")
        .def("logits", &logits, "hidden"_a, "num_rows"_a, "num_ids"_a, "out"_a,
             "Writes the first `num_ids` logits of rows after the final norm, float32 [num_rows, num_ids], to `out`.")
        .def(
            "argmax", &largest, "hidden"_a, "num_rows"_a, "rows"_a, "num_ids"_a,
            "Returns the ids of the largest of the first `num_ids` logits of some of the rows, and these logits.\n\nTies go to the "
            "lowest id, and NaN counts as the largest.")
        .def(
            "run_ahead", &run_ahead, "tokens"_a, "positions"_a, "counts"_a, "lengths"_a, "rotations"_a, "numbers"_a,
            "pools"_a, "layers"_a, "num_ids"_a, "input"_a = 0, "stops"_a = std::vector<Stop>(),
            "layer_rows"_a = Addresses(), "sources"_a = Numbers(), "draws"_a = std::vector<Draw>(),
            "states"_a = Numbers(),
            "Continues each run by lengths[i] ids, and returns these ids.\n\n"
            "With stops, also returns the ids' probabilities; with draws, also their distributions in the form of "
            "Sampler.probs, empty for an id that was not drawn. Returns None if a logit is NaN. "
            "draws: one for each run, or none; without draws, the id with the largest logit is taken. stops: one for each run, "
            "which may end the run earlier, or none. counts: the number of tokens that each run begins with. numbers: as for "
            "`forward`, with cache rows for all tokens that are fed. input: for a head, the features of the tokens in `counts`, "
            "float32 [tokens, hidden_size]. layer_rows: in place of the features, the target's rows after each layer that "
            "the head reads, each of the features' shape. states: as for `forward`, for all tokens that are fed.");
    m.def(
        "make_model", &make_model, "backend"_a, "spec"_a, "bfloat16"_a, "matrices"_a, "vectors"_a, "tables"_a,
        "target"_a.none() = nb::none(), "ids"_a = Ids(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 7>(),
        "Makes a model of a forerun.blocks.Spec.\n\n"
        "bfloat16: whether keys, values and plain rows are bfloat16; otherwise they are float32. matrices: packed matrices "
        "with their biases, by the products of blocks.weights(spec); gate and up are paired, and \"head\" is left out if it "
        "is \"embedding\". vectors: the addresses of the norms' weights and biases, float32, by name. tables: an embedding "
        "that is not packed, and learned positions, in the type of plain rows. The caller keeps all weights alive. target: "
        "for a head, the model whose embedding the head reads if it has none of its own. ids: the target's token id for each "
        "id of the head. "
        "Raises ValueError for a spec that `refusal` refuses, and for a missing weight.");
}
