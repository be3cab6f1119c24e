#include "spec.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <map>
#include <set>
#include <stdexcept>

#include "cpu.h"

namespace nb = nanobind;

namespace forerun {

namespace {

using std::optional, std::string;

// ------------------------------------------------------------------------------------------------------------ refusals

// The fields that are read here or decide nothing here (tables of rotations come from Python). Any other field, also
// one that is new in blocks.py, must have its default.
const std::map<string, std::set<string>> READ = {
    {"Norm", {"kind", "eps", "offset", "weight", "bias", "span"}},
    {"Rope",
     {"theta", "kind", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions", "dims", "pairs",
      "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_factor", "long_factor",
      "truncate", "far"}},
    {"Attention", {"heads",  "kv_heads",       "head_dim", "scale",  "window",       "rope",  "q_norm",
                   "k_norm", "v_norm",         "qkv_bias", "o_bias", "softcap",      "sinks", "reads",
                   "sees",   "position_scale", "bias",     "k_is_v", "shares_kv_of", "gate"}},
    {"Recurrence",
     {"kind", "conv", "key_heads", "value_heads", "key_dim", "value_dim", "norm", "decay", "biases", "grouped"}},
    {"Buckets", {"num", "max_distance", "both_ways"}},
    {"Mlp", {"size", "act", "gated", "bias", "down"}},
    {"Experts",
     {"num", "chosen", "mlp", "shared", "shared_gate", "router_norm", "score", "normalise", "scale", "router_bias",
      "reads_stream", "score_scale", "scaled", "choice_bias", "sum_eps"}},
    {"LayerInput", {"size", "act", "norm"}},
    {"Block",
     {"pre_attention", "attention", "recurrence", "post_attention", "pre_mlp", "mlp", "experts", "post_mlp", "norm_at",
      "parallel", "branch_scale", "out_scale", "per_layer_input", "post_dense", "pre_experts", "post_experts"}},
    {"Positions", {"num", "offset", "kind"}},
    {"Spec",
     {"model_type", "vocab_size", "hidden_size", "max_positions", "blocks", "final_norm", "embed_scale", "embed_norm",
      "positions", "head", "tied", "head_bias", "logit_softcap", "logit_scale", "encoder", "own_embedding",
      "features"}},
    {"Features",
     {"num_ids", "size", "num", "joined", "bias", "act", "row_norms", "whole_norm", "side_norms", "context_norm",
      "input", "input_bias", "normed_stream", "feeds", "eps", "largest"}},
};

// What a field stands for, for people.
const std::map<string, string> WORDS = {
    {"Spec.next_tokens", "blocks that guess further tokens"},
};

const std::set<string> ACTS = {"silu", "gelu", "gelu_tanh", "relu"};
const string GATED_ACT = "clamped_silu";  // which bounds what it is multiplied by, too

string type_of(nb::handle object) { return nb::cast<string>(object.type().attr("__name__")); }
string shown(nb::handle object) { return nb::cast<string>(nb::repr(object)); }
string no(const string& what) { return "the native kernels compute no " + what; }

optional<string> refusal_of(nb::handle object);

optional<string> refusal_of_parts(nb::handle value) {
    if (nb::hasattr(value, "__dataclass_fields__")) return refusal_of(value);
    if (nb::isinstance<nb::tuple>(value))
        for (nb::handle item : value)
            if (auto reason = refusal_of_parts(item)) return reason;
    return {};
}

optional<string> refusal_of_values(const string& type, nb::handle object) {
    const auto number = [&](const char* name) { return nb::cast<int>(object.attr(name)); };
    if (type == "Attention" && number("head_dim") % 2 != 0)
        return no("pairs of dimensions where head_dim is odd, as " + std::to_string(number("head_dim")));
    if (type == "Attention" && (number("kv_heads") < 1 || number("heads") % number("kv_heads") != 0))
        return no("heads=" + std::to_string(number("heads")) +
                  " that are no multiple of kv_heads=" + std::to_string(number("kv_heads")));
    if (type == "Attention" && nb::cast<string>(object.attr("sees")) == "encoder")
        for (const char* name : {"window", "rope", "k_norm", "v_norm", "shares_kv_of"})
            if (!object.attr(name).is_none()) return no(string(name) + " of an encoder's keys and values");
    if (type == "Block" && !object.attr("mlp").is_none() && !object.attr("experts").is_none()) {
        if (!object.attr("experts").attr("shared").is_none()) return no("shared expert beside a feed-forward part");
    } else if (type == "Block") {
        for (const char* name : {"post_dense", "pre_experts", "post_experts"})
            if (!object.attr(name).is_none()) return no(string(name) + " but of experts beside a feed-forward part");
    }
    if (type == "Block" && !object.attr("attention").is_none() && !object.attr("recurrence").is_none())
        return no("block with attention and a state");
    if (type == "Recurrence") {
        const nb::object norm = object.attr("norm");
        if (!norm.is_none() && (nb::cast<string>(norm.attr("kind")) != "rms" || nb::cast<bool>(norm.attr("bias"))))
            return no("norm but RMS, without a bias, of what is read of a state");
        if (number("value_dim") % 2 != 0)
            return no("states with an odd value_dim, as " + std::to_string(number("value_dim")));
    }
    if (type == "Block" && !object.attr("experts").is_none() && nb::cast<bool>(object.attr("parallel")))
        return no("experts beside attention");
    const auto yes = [&](const char* name) { return nb::cast<bool>(object.attr(name)); };
    if (type == "Features") {
        const string input = nb::cast<string>(object.attr("input"));
        if (input == "read" && !yes("side_norms")) return no("features that attention reads without a norm");
        if (!yes("joined") && (yes("row_norms") || yes("whole_norm"))) return no("norms of rows that no matrix joins");
        if ((input == "context") == object.attr("context_norm").is_none())
            return no("context without a norm, or a norm of one that is not there");
        if (!object.attr("act").is_none() && (!yes("joined") || ACTS.count(nb::cast<string>(object.attr("act"))) == 0))
            return no("activation of features that no matrix makes, or other than silu, gelu, gelu_tanh and relu");
    }
    if (type == "Mlp" && !yes("down") && yes("gated")) return no("feed-forward part with a gate and no last matrix");
    if (type == "Experts")
        for (const char* name : {"mlp", "shared"})
            if (!object.attr(name).is_none() && !nb::cast<bool>(object.attr(name).attr("down")))
                return no("experts without a last matrix");
    if (type == "Block" && !object.attr("mlp").is_none() && !nb::cast<bool>(object.attr("mlp").attr("down")))
        if (!object.attr("experts").is_none() || yes("parallel"))
            return no("feed-forward part without a last matrix beside another part");
    if (type == "Features" && !nb::cast<bool>(object.attr("joined")) && number("num") != 1)
        return no("features of several rows that no matrix joins");
    if (type == "Mlp" || type == "LayerInput") {
        const string act = nb::cast<string>(object.attr("act"));
        const bool is_gated = type == "Mlp" && nb::cast<bool>(object.attr("gated"));
        if (ACTS.count(act) == 0 && !(is_gated && act == GATED_ACT))
            return no("activation " + act + (act == GATED_ACT ? " without a gate" : ""));
    }
    return {};
}

optional<string> refusal_of(nb::handle object) {
    const string type = type_of(object);
    const auto read = READ.find(type);
    if (read == READ.end()) return no(type);
    for (nb::handle field : nb::module_::import_("dataclasses").attr("fields")(object)) {
        const string name = nb::cast<string>(field.attr("name"));
        const nb::object value = object.attr(name.c_str());
        if (read->second.count(name) == 0) {
            if (value.equal(field.attr("default"))) continue;
            const auto words = WORDS.find(type + "." + name);
            return no(words == WORDS.end() ? type + "." + name + "=" + shown(value) : words->second);
        }
        if (auto reason = refusal_of_parts(value)) return reason;
    }
    return refusal_of_values(type, object);
}

// --------------------------------------------------------------------------------------------------------------
// reading

int whole(nb::handle object, const char* name, int otherwise = 0) {
    const nb::object value = object.attr(name);
    return value.is_none() ? otherwise : nb::cast<int>(value);
}
float real(nb::handle object, const char* name, float otherwise = 0.0f) {
    const nb::object value = object.attr(name);
    return value.is_none() ? otherwise : static_cast<float>(nb::cast<double>(value));
}
bool yes(nb::handle object, const char* name) { return nb::cast<bool>(object.attr(name)); }
string text(nb::handle object, const char* name) { return nb::cast<string>(object.attr(name)); }

Sees sees_of(const string& name) { return name == "past" ? Sees::past : name == "all" ? Sees::all : Sees::source; }

class Reader {
  public:
    Reader(Type type, const WeightPlaces* places) : type_(type), places_(places) {}

    ModelParts model(nb::handle spec) {
        ModelParts m{};
        m.vocab_size = whole(spec, "vocab_size"), m.hidden_size = hidden_ = whole(spec, "hidden_size");
        m.type = type_;
        int index = 0;
        for (nb::handle block : spec.attr("blocks")) {
            const string at = "model.layers." + std::to_string(index) + ".";
            m.blocks.push_back(this->block(block, at));
            biases_.push_back(m.blocks.back().attention ? m.blocks.back().attention->biases : Biases{});
            if (m.blocks.back().attention)
                m.blocks.back().attention->rotation = rotation(block.attr("attention"), index, m.rotations);
            ++index;
        }
        m.embed_norm = norm(spec.attr("embed_norm"), "model.embed_norm", hidden_);
        m.final_norm = norm(spec.attr("final_norm"), "model.norm", hidden_);
        m.embed_scale = rounded(real(spec, "embed_scale"));
        m.range = {real(spec, "logit_scale"), real(spec, "logit_softcap")};
        m.embedding = {maybe(places_ ? &places_->matrices : nullptr, "embedding"), table("model.embed_tokens.weight"),
                       m.vocab_size};
        const nb::object features = spec.attr("features");
        if (!features.is_none()) {
            m.features = this->features(features);
            m.embedding.num_rows = m.features->num_ids;
        }
        const nb::object inputs = spec.attr("layer_input");
        if (!inputs.is_none()) m.layer_inputs = layer_inputs(inputs, m.vocab_size);
        const nb::object positions = spec.attr("positions");
        if (!positions.is_none()) {
            m.position_offset = whole(positions, "offset");
            m.positions = {nullptr, table("model.embed_positions.weight"), whole(positions, "num") + m.position_offset};
            if (places_ && !m.positions.rows)
                throw std::invalid_argument("there is no weight model.embed_positions.weight");
        }
        if (yes(spec, "head") || m.features) {  // of a head without one it is the target's
            m.head = maybe(places_ ? &places_->matrices : nullptr, "head");
            if (!m.head && yes(spec, "tied")) m.head = m.embedding.packed;
        }
        return m;
    }

    std::vector<std::vector<float>> vectors;

  private:
    Block block(nb::handle b, const string& at) {
        Block found{};
        const bool has_post = !b.attr("post_attention").is_none();
        found.pre_attention = norm(b.attr("pre_attention"), at + "input_layernorm", hidden_);
        found.post_attention = norm(b.attr("post_attention"), at + "post_attention_layernorm", hidden_);
        found.pre_mlp = norm(b.attr("pre_mlp"),
                             at + (has_post ? "pre_feedforward_layernorm" : "post_attention_layernorm"), hidden_);
        found.post_mlp = norm(b.attr("post_mlp"), at + "post_feedforward_layernorm", hidden_);
        found.norms_sum = text(b, "norm_at") == "sum";
        found.parallel = yes(b, "parallel");
        found.branch_scale = real(b, "branch_scale");
        if (!b.attr("attention").is_none()) found.attention = attention(b.attr("attention"), at);
        if (!b.attr("recurrence").is_none()) found.recurrence = recurrence(b.attr("recurrence"), at);
        if (!b.attr("mlp").is_none()) found.mlp = mlp(b.attr("mlp"), at + "mlp.");
        if (!b.attr("experts").is_none()) found.experts = experts(b.attr("experts"), at + "mlp.");
        found.post_dense = norm(b.attr("post_dense"), at + "post_feedforward_layernorm_1", hidden_);
        found.pre_experts = norm(b.attr("pre_experts"), at + "pre_feedforward_layernorm_2", hidden_);
        found.post_experts = norm(b.attr("post_experts"), at + "post_feedforward_layernorm_2", hidden_);
        const nb::object input = b.attr("per_layer_input");
        if (!input.is_none())
            found.layer_input = LayerInputPart{whole(input, "size"), act_of(text(input, "act")),
                                               matrix(at + "layer_gate"), matrix(at + "layer_up"),
                                               norm(input.attr("norm"), at + "post_per_layer_input_norm", hidden_)};
        found.out_scale = yes(b, "out_scale") && places_ ? *vector(at + "layer_scalar.weight") : 1.0f;
        return found;
    }

    FeatureParts features(nb::handle f) {
        FeatureParts found{};
        found.num_ids = whole(f, "num_ids"), found.size = whole(f, "size"), found.num = whole(f, "num");
        const auto norm_of = [&](const string& name, bool is_there) {
            return is_there && places_ ? vector(name + ".weight") : nullptr;
        };
        const float eps = real(f, "eps");
        const string input = text(f, "input");
        found.begins = input == "product"    ? Begins::product
                       : input == "read"     ? Begins::read
                       : input == "features" ? Begins::features
                                             : Begins::context;
        if (!f.attr("act").is_none()) found.act = act_of(text(f, "act"));
        found.layers = {{},
                        eps,
                        yes(f, "joined") ? matrix("fc") : nullptr,
                        norm_of("input_norm", yes(f, "whole_norm")),
                        real(f, "largest")};
        for (int i = 0; i < found.num; ++i)
            found.layers.norms.push_back(norm_of("fc_norm." + std::to_string(i), yes(f, "row_norms")));
        found.sides = {{}, eps, found.begins == Begins::product ? matrix("input") : nullptr};
        for (const char* side : {"embedding_norm", "hidden_norm"})
            found.sides.norms.push_back(norm_of(side, yes(f, "side_norms")));
        found.context_norm = norm(f.attr("context_norm"), "hidden_norm", hidden_);
        found.normed_stream = yes(f, "normed_stream"), found.feeds_normed = text(f, "feeds") == "normed";
        return found;
    }

    LayerInputs layer_inputs(nb::handle input, int vocab_size) {
        const int size = whole(input, "size");
        const Table rows{maybe(places_ ? &places_->matrices : nullptr, "model.layer_embedding"),
                         table("model.embed_tokens_per_layer.weight"), vocab_size};
        if (places_ && !rows.is_there())
            throw std::invalid_argument("there is no weight model.embed_tokens_per_layer.weight");
        return {size, rows, rounded(static_cast<float>(std::sqrt(static_cast<double>(size)))),
                matrix("model.layer_inputs"), norm(input.attr("norm"), "model.per_layer_projection_norm", size)};
    }

    AttentionPart attention(nb::handle a, const string& at) {
        AttentionPart found{};
        found.sees = sees_of(text(a, "sees"));
        const string own = at + (found.sees == Sees::source ? "encoder_attn." : "self_attn.");
        found.heads = whole(a, "heads"), found.kv_heads = whole(a, "kv_heads"), found.head_dim = whole(a, "head_dim");
        // A source's own width is its keys'.
        found.reads = found.sees == Sees::source ? hidden_ : whole(a, "reads", hidden_);
        found.scale = real(a, "scale", 1.0f / std::sqrt(static_cast<float>(found.head_dim)));
        found.softcap = real(a, "softcap"), found.window = whole(a, "window");
        const nb::object by_position = a.attr("position_scale");
        if (!by_position.is_none()) {
            found.position_beta = nb::cast<double>(by_position[nb::int_(0)]);
            found.position_step = nb::cast<int64_t>(by_position[nb::int_(1)]);
        }
        found.q_norm = head_norm(a.attr("q_norm"), own + "q_norm", found.heads, found.head_dim);
        found.keys_of = whole(a, "shares_kv_of", -1), found.k_is_v = yes(a, "k_is_v"), found.gated = yes(a, "gate");
        if (found.makes_keys()) {
            found.k_norm = head_norm(a.attr("k_norm"), own + "k_norm", found.kv_heads, found.head_dim);
            found.v_norm = head_norm(a.attr("v_norm"), own + "v_norm", found.kv_heads, found.head_dim);
        }
        const nb::object rope = a.attr("rope");
        if (!rope.is_none()) {
            found.turned = text(rope, "kind") == "proportional" ? found.head_dim : whole(rope, "dims", found.head_dim);
            found.adjacent = text(rope, "pairs") == "adjacent";
        }
        found.qkv = matrix(at + "qkv"), found.o = matrix(at + "o");
        found.biases = biases(a.attr("bias"), own);
        found.sinks = yes(a, "sinks") && places_ ? vector(own + "sinks.weight") : nullptr;
        return found;
    }

    RecurrencePart recurrence(nb::handle r, const string& at) {
        RecurrencePart found{};
        found.is_short = text(r, "kind") == "short_conv";
        found.conv = whole(r, "conv"), found.width = nb::cast<int>(r.attr("width")(hidden_));
        const int key_heads = whole(r, "key_heads");
        found.heads = {key_heads, whole(r, "value_heads"), whole(r, "key_dim"), whole(r, "value_dim"),
                       yes(r, "grouped") ? 1 : key_heads};
        const string own = at + (found.is_short ? "conv." : "linear_attn.");
        found.input = matrix(at + "state_in"), found.o = matrix(at + "o");
        found.norm = norm(r.attr("norm"), own + "norm", found.heads.value_dim);
        if (!found.is_short) found.gates = matrix(at + "state_gates");
        if (!places_) return found;
        found.taps = turned(own + (found.is_short ? "conv.weight" : "conv1d.weight"), found.width, found.conv);
        if (found.is_short && yes(r, "biases")) found.bias = vector(own + "conv.bias");
        if (found.is_short) return found;
        found.dt_bias = vector(own + "dt_bias.weight");
        found.decay = vector(own + "A_log.weight");
        if (text(r, "decay") == "log") {
            std::vector<float> decay(static_cast<size_t>(found.heads.value_heads));
            for (size_t i = 0; i < decay.size(); ++i)
                decay[i] = static_cast<float>(-std::exp(static_cast<double>(found.decay[i])));
            vectors.push_back(std::move(decay));
            found.decay = vectors.back().data();
        }
        return found;
    }

    // A weight [rows, columns] as [columns, rows].
    const float* turned(const string& name, int num_rows, int num_columns) {
        const float* const stored = vector(name);
        std::vector<float> found;
        for (int column = 0; column < num_columns; ++column)
            for (int row = 0; row < num_rows; ++row) found.push_back(stored[row * num_columns + column]);
        vectors.push_back(std::move(found));
        return vectors.back().data();
    }

    // bias: buckets, the block whose biases are shared, or none.
    Biases biases(nb::handle bias, const string& own) {
        if (bias.is_none()) return {};
        if (nb::isinstance<nb::int_>(bias)) return biases_.at(nb::cast<size_t>(bias));
        return {places_ ? vector(own + "relative_attention_bias.by_distance") : nullptr,
                whole(bias, "max_distance") + KEY_BLOCK};
    }

    MlpPart mlp(nb::handle m, const string& at) {
        const bool has_down = yes(m, "down");
        return {whole(m, "size"),
                act_of(text(m, "act")),
                yes(m, "gated"),
                matrix(at + "gate_up"),
                has_down ? matrix(at + "down") : nullptr,
                has_down};
    }

    ExpertsPart experts(nb::handle e, const string& at) {
        ExpertsPart found{};
        found.num = whole(e, "num"), found.chosen = whole(e, "chosen");
        for (int i = 0; i < found.num; ++i)
            found.parts.push_back(mlp(e.attr("mlp"), at + "experts." + std::to_string(i) + "."));
        if (!e.attr("shared").is_none()) found.shared = mlp(e.attr("shared"), at + "shared_expert.");
        found.router = matrix(at + "router");
        if (yes(e, "shared_gate")) found.shared_gate = matrix(at + "shared_gate");
        found.router_norm = norm(e.attr("router_norm"), at + "router_norm", hidden_);
        const string score = text(e, "score");
        found.scores = score == "softmax"   ? Scores::softmax
                       : score == "sigmoid" ? Scores::sigmoid
                                            : Scores::softmax_of_chosen;
        found.normalises = yes(e, "normalise"), found.scale = real(e, "scale");
        found.reads_stream = yes(e, "reads_stream"), found.score_scale = real(e, "score_scale");
        found.choice_bias = yes(e, "choice_bias") && places_ ? vector(at + "choice_bias.weight") : nullptr;
        found.sum_eps = real(e, "sum_eps");
        found.scales = yes(e, "scaled") && places_ ? vector(at + "expert_scale.weight") : nullptr;
        return found;
    }

    // The table of cos and sin that a block uses: blocks with equal ropes and heads share one.
    int rotation(nb::handle attention, int index, std::vector<int>& first_blocks) {
        const nb::object rope = attention.attr("rope");
        if (rope.is_none()) return -1;
        const nb::object key = nb::make_tuple(rope, attention.attr("head_dim"));
        for (size_t i = 0; i < ropes_.size(); ++i)
            if (ropes_[i].equal(key)) return static_cast<int>(i);
        ropes_.push_back(key), first_blocks.push_back(index);
        return static_cast<int>(ropes_.size()) - 1;
    }

    optional<Norm> head_norm(nb::handle n, const string& name, int heads, int head_dim) {
        const bool is_whole = !n.is_none() && text(n, "span") == "all";
        return norm(n, name, is_whole ? heads * head_dim : head_dim);
    }

    // The stored weight and the offset are added in float32, as published code adds them in every pass.
    optional<Norm> norm(nb::handle n, const string& name, int width) {
        if (n.is_none()) return {};
        Norm found{text(n, "kind") == "layer", real(n, "eps"), nullptr, nullptr, text(n, "span") == "head"};
        if (!places_) return found;
        if (yes(n, "bias")) found.bias = vector(name + ".bias");
        const float* const stored = yes(n, "weight") ? vector(name + ".weight") : nullptr;
        const float offset = real(n, "offset");
        if (stored && offset == 0.0f) {
            found.weight = stored;
            return found;
        }
        std::vector<float> weight(static_cast<size_t>(width), 1.0f);
        for (int i = 0; i < width && stored; ++i) weight[static_cast<size_t>(i)] = stored[i] + offset;
        vectors.push_back(std::move(weight));
        found.weight = vectors.back().data();
        return found;
    }

    const float* vector(const string& name) const {
        const auto found = places_->vectors.find(name);
        if (found == places_->vectors.end()) throw std::invalid_argument("there is no weight " + name);
        return reinterpret_cast<const float*>(found->second);
    }
    const Matrix* matrix(const string& product) const {
        if (!places_) return nullptr;
        const Matrix* const found = maybe(&places_->matrices, product);
        if (!found) throw std::invalid_argument("there is no product " + product);
        return found;
    }
    static const Matrix* maybe(const std::unordered_map<string, const Matrix*>* matrices, const string& name) {
        if (!matrices) return nullptr;
        const auto found = matrices->find(name);
        return found == matrices->end() ? nullptr : found->second;
    }
    const void* table(const string& name) const {
        if (!places_) return nullptr;
        const auto found = places_->tables.find(name);
        return found == places_->tables.end() ? nullptr : reinterpret_cast<const void*>(found->second);
    }

    float rounded(float x) const {  // to the model's type
        uint16_t half[16];
        if (type_ != Type::bfloat16) return x;
        float out;
        portable_kernels().to_type(&x, 1, type_, half);
        portable_kernels().from_type(half, 1, type_, &out);
        return out;
    }

    const Type type_;
    const WeightPlaces* const places_;
    int hidden_ = 0;
    std::vector<Biases> biases_;  // by block
    std::vector<nb::object> ropes_;
};

}  // namespace

Act act_of(const string& name) {
    if (name == GATED_ACT) return Act::clamped_silu;
    return name == "silu" ? Act::silu : name == "gelu" ? Act::gelu : name == "gelu_tanh" ? Act::gelu_tanh : Act::relu;
}

optional<string> refusal(nb::handle spec) { return refusal_of(spec); }

std::pair<ModelParts, std::vector<std::vector<float>>> read_spec(nb::handle spec, Type type,
                                                                 const WeightPlaces* places) {
    if (const auto reason = refusal(spec)) throw std::invalid_argument(*reason);
    Reader reader(type, places);
    ModelParts parts = reader.model(spec);
    return {std::move(parts), std::move(reader.vectors)};
}

}  // namespace forerun
