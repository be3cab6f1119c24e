"""Published heads: each reader against what published.py computes from a description, and what is refused."""

import itertools
import json
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters import published as they
from drafters.published import EAGLE_3, NUM_VOCAB, WIDTH, speculators
from forerun import LLM, SamplingParams, native
from forerun.cli.main import main
from forerun.drafters import eagle
from forerun.drafters.shared.converting import convert_head
from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.types import Budget, Coins, Draft, Probs, Sequence
from refusals import refusal
from tiny import write_tiny

NUM_LAYERS = 8
PROMPT = [5, 9, 40, 8, 100, 3]
NATIVE = pytest.mark.skipif(native.isa() == "reference", reason=f"no native operators: {native.why_not()}")
Inner = Callable[[list[Tensor], list[Tensor]], list[Tensor]]  # inputs and outputs of layers -> those that are read


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target") / "model", num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> they.Target:
    return they.Target(target_folder)


@dataclass(frozen=True)
class Case:
    """A head of EAGLE. inner: the rows of the target that it reads, None = those behind the final norm."""

    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    inner: Inner | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of published.eagle_3

    def step(self, target: they.Target) -> they.Step:
        w = they.doubled(self.weights)
        return they.eagle_1(w, target) if self.inner is None else they.eagle_3(w, target, **self.options)

    def features(self, target: they.Target, ids: Seq[int], inner: Inner | None = None) -> Tensor:
        inputs, outputs, last = target.run(ids)
        if self.inner is None:
            return last
        return they.eagle_3_features(they.doubled(self.weights), (inner or self.inner)(inputs, outputs))


def inputs_of(*layers: int) -> Inner:
    return lambda inputs, outputs: [inputs[j] for j in layers]


def outputs_of(*layers: int) -> Inner:
    return lambda inputs, outputs: [outputs[j] for j in layers]


DEFAULT = inputs_of(2, NUM_LAYERS // 2, NUM_LAYERS - 3)
IDS = "eagle_aux_hidden_state_layer_ids"


def eagle_1(config: Mapping[str, Any] | None = None, **more: tuple[int, ...]) -> Case:
    """more: shapes of further tensors, with two underscores for a dot."""
    shapes = they.eagle_1_shapes() | {name.replace("__", "."): shape for name, shape in more.items()}
    return Case({**they.DECODER, "architectures": ["LlamaForCausalLM"], **(config or {})}, they.random_weights(shapes))


def eagle_3(config: Mapping[str, Any] | None = None, inner: Inner = DEFAULT, **options: Any) -> Case:
    shapes = they.eagle_3_shapes(num_layers=options.pop("num_layers", 3)) | options.pop("more", {})
    return Case({**EAGLE_3, **(config or {})}, they.with_ids(they.random_weights(shapes)), inner, options)


def headed() -> Case:
    """EAGLE-1 with an LM head, of small logits: nothing norms what the last steps read, in float32."""
    case = eagle_1(fc__bias=(WIDTH,), lm_head__weight=(NUM_VOCAB, WIDTH))
    return replace(case, weights={**case.weights, "lm_head.weight": case.weights["lm_head.weight"] / 8})


def wrapped(case: Case) -> Case:
    """As vLLM has a head of EAGLE-1."""
    config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": case.config, "eagle_fc_bias": True}
    return Case({**config, "truncated_vocab_size": NUM_VOCAB}, case.weights)


def changed(case: Case, drop: Seq[str] = (), add: Mapping[str, Tensor] | None = None, **config: Any) -> Case:
    weights = {name: weight for name, weight in case.weights.items() if name not in drop}
    return replace(case, config={**case.config, **config}, weights={**weights, **(add or {})})


def of_speculators(
    config: Mapping[str, Any], layer: Mapping[str, Any], more: Mapping[str, Any], **options: Any
) -> Case:
    at = "layers.0."
    weights = they.with_ids(they.random_weights({**they.eagle_3_shapes(at), **more}))
    inner = inputs_of(*config[IDS]) if config.get(IDS) else DEFAULT
    return Case(speculators(layer, **config), weights, inner, {"at": at, **options})


FC_NORMS = {f"fc_norm.{i}.weight": (WIDTH,) for i in range(3)}
SECOND = {**they.decoder_layer("layers.1."), "layers.1.input_layernorm.weight": (WIDTH,)}
QK_NORMS = {f"layers.0.self_attn.{name}_norm.weight": (they.HEAD_DIM,) for name in "qk"}
QKV_BIASES = {f"midlayer__self_attn__{n}_proj__bias": (they.HEAD_DIM * (4 if n == "q" else 2),) for n in "qkv"}

CASES = {
    "EAGLE-1": eagle_1(fc__bias=(WIDTH,)),
    "EAGLE-1 without a bias": eagle_1({"bias": False}),
    "EAGLE-1 with embeddings": eagle_1(fc__bias=(WIDTH,), embed_tokens__weight=(NUM_VOCAB, WIDTH)),
    "EAGLE-1 with an LM head": headed(),
    "EAGLE-1 in vLLM's wrapper": wrapped(headed()),
    "EAGLE-3": eagle_3(),
    "EAGLE-3 with the target's number of layers": eagle_3({"num_hidden_layers": 40}),
    "EAGLE-3 with embeddings": eagle_3(more={"embed_tokens.weight": (NUM_VOCAB, WIDTH)}),
    "EAGLE-3 with biases": eagle_3(more={name.replace("__", "."): shape for name, shape in QKV_BIASES.items()}),
    "EAGLE-3 with the target's LM head": changed(eagle_3(), drop=["lm_head.weight"]),
    "EAGLE-3 over all ids": changed(eagle_3(), drop=["d2t", "t2d", "lm_head.weight"], draft_vocab_size=None),
    "EAGLE-3 norm_before_residual": eagle_3({"norm_before_residual": True}, before_residual=True),
    "EAGLE-3 ids of vLLM": eagle_3({IDS: [1, 3, 6]}, inputs_of(1, 3, 6)),
    "EAGLE-3 ids of SGLang": eagle_3(
        {"eagle_config": {IDS: [1, 3, 6], "use_aux_hidden_state": True}}, outputs_of(1, 3, 6)
    ),
    "EAGLE-3 two layers are read": eagle_3({IDS: [0, 7]}, inputs_of(0, 7), num_layers=2),
    "EAGLE-3.1": eagle_3({"fc_norm": True, "norm_output": True}, more=FC_NORMS, norm_output=True),
    "speculators": of_speculators({"norm_before_residual": False}, {}, {}),
    "speculators norm_before_fc": of_speculators(
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, IDS: [1, 3, 6]},
        {},
        {"input_norm.weight": (3 * WIDTH,)},
        before_residual=True,
        norm_output=True,
    ),
    "speculators two layers": of_speculators({"norm_before_residual": True}, {"num_hidden_layers": 2}, SECOND,
                                             before_residual=True),
    "speculators qwen3": of_speculators(
        {"norm_before_residual": True}, {"model_type": "qwen3", "head_dim": 8}, QK_NORMS, before_residual=True
    ),
}  # fmt: skip


def recorded(llm: LLM) -> list[tuple[list[int], Draft]]:
    """Each draft for a text that is alone, with the text, as it is made."""
    drafter = llm.engine.drafter.first
    real, made = drafter.propose, list[tuple[list[int], Draft]]()

    def propose(seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        draft = real(seqs, budget, coins)
        made.extend((list(seq.tokens), draft) for seq in seqs)
        return draft

    drafter.propose = propose  # type: ignore[method-assign]
    return made


def llm_with(target_folder: Path, spec: str, **options: Any) -> LLM:
    return LLM(str(target_folder), draft=spec, **{"spec_length": 3, "ops": "reference", "max_seq_len": 128, **options})


def eagle_of(case: Case, target_folder: Path, folder: Path, **options: Any) -> LLM:
    """Write a head into a folder, and open an engine that drafts with it."""
    they.write(folder, case.config, case.weights)
    return llm_with(target_folder, f"eagle:path={folder}", **options)


def drafts_of(llm: LLM, temperature: float, num_tokens: int = 6) -> list[tuple[list[int], Draft]]:
    made = recorded(llm)
    llm.generate([PROMPT], SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=3, ignore_eos=True))
    assert sum(len(draft.tokens) for _, draft in made) >= 6
    return made


def described(llm: LLM, case: Case, target: they.Target) -> Iterator[tuple[int, Probs, Tensor]]:
    """Yield each token of several drafts, what the drafter states of it, and what the description says."""
    for text, draft in drafts_of(llm, temperature=1.0):
        wanted = they.chain(case.step(target), case.features(target, text[:-1]), text, draft.tokens)
        yield from zip(draft.tokens, draft.probs, wanted, strict=True)


@pytest.mark.parametrize("name", CASES)
def test_a_draft_is_what_the_description_says(
    name: str, target: they.Target, target_folder: Path, tmp_path: Path
) -> None:
    """Every row of several drafts, of the first token and of those behind, whose features are the head's own."""
    for _, probs, row in described(eagle_of(CASES[name], target_folder, tmp_path), CASES[name], target):
        stated = torch.zeros(NUM_VOCAB, dtype=torch.float64)
        stated[: len(probs.weights)] = torch.from_numpy(probs.weights)
        assert torch.allclose(stated, row, rtol=3e-3, atol=1e-30)  # of a probability: 0.003 of its logit


@pytest.mark.parametrize(
    ("name", "off_by_one"),
    [
        ("EAGLE-3", outputs_of(2, NUM_LAYERS // 2, NUM_LAYERS - 3)),
        ("EAGLE-3 ids of vLLM", outputs_of(1, 3, 6)),
        ("EAGLE-3 ids of SGLang", inputs_of(1, 3, 6)),
        ("speculators norm_before_fc", outputs_of(1, 3, 6)),
    ],
)
def test_a_layer_id_that_is_off_by_one_would_show(name: str, off_by_one: Inner, target: they.Target) -> None:
    """Otherwise the test above could not tell the conventions apart."""
    case, step = CASES[name], CASES[name].step(target)
    right, wrong = (
        they.chain(step, case.features(target, PROMPT[:-1], inner), PROMPT, [1])[0] for inner in (None, off_by_one)
    )
    assert float((right - wrong).abs().max()) > 0.05


OPS = ["reference_row_by_row", *(pytest.param(d, marks=NATIVE, id=f"native {d}") for d in ("float32", "bfloat16"))]


@pytest.mark.parametrize("ops", OPS)
def test_texts_are_those_of_plain_decoding(ops: str, target_folder: Path, tmp_path: Path) -> None:
    """Bit for bit, with every computation that differs; and a batch drafts what each text alone does."""
    heads = [CASES[name] for name in ("EAGLE-1", "EAGLE-3", "speculators two layers")]
    folders = [they.write(tmp_path / str(i), case.config, case.weights) for i, case in enumerate(heads)]
    they.write(tmp_path / "medusa", {}, MEDUSA["v2"].weights, MEDUSA["v2"].file)
    specs = [*(f"eagle:path={folder}" for folder in folders), f"medusa:path={tmp_path / 'medusa'}"]
    choice = {"ops": ops} if "reference" in ops else {"ops": "native", "dtype": ops}
    for spec in specs:
        llm = llm_with(target_folder, spec, **choice)
        for params in ({"temperature": 0}, {"seed": 4}):
            asked = [SamplingParams(max_tokens=12, logprobs=1, draft=draft, **params) for draft in ("none", None)]
            plain, drafted = (llm.generate([PROMPT, [70, 71, 72]], own) for own in asked)
            for one, other in zip(drafted, plain, strict=True):
                assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
            assert sum(out.report.num_drafted for out in drafted) > 6


@NATIVE
@pytest.mark.parametrize("name", CASES)
def test_native_operators_compute_the_same(name: str, target: they.Target, target_folder: Path, tmp_path: Path) -> None:
    """Each pass of a head is one native call, as its target's is."""
    llm = eagle_of(CASES[name], target_folder, tmp_path, ops="native", dtype="float32")
    drafter: Any = llm.engine.drafter.first
    assert type(drafter.model) is type(llm.engine.runner.model)
    for token, probs, row in described(llm, CASES[name], target):
        assert probs.at(token) == pytest.approx(float(row[token]), abs=1e-4)


def test_a_head_of_another_width_than_the_target(target: they.Target, target_folder: Path, tmp_path: Path) -> None:
    """target_hidden_size: then it has embeddings and an LM head of its own."""
    width = 48
    shapes = {**they.eagle_3_shapes(width=width), "embed_tokens.weight": (NUM_VOCAB, width)}
    config = {**EAGLE_3, "hidden_size": width, "head_dim": they.HEAD_DIM, "target_hidden_size": WIDTH}
    case = Case(config, they.with_ids(they.random_weights(shapes)), DEFAULT)
    for token, probs, row in described(eagle_of(case, target_folder, tmp_path), case, target):
        assert probs.at(token) == pytest.approx(float(row[token]), abs=2e-5)


def test_the_targets_own_embeddings_are_kept_once(target: they.Target, target_folder: Path, tmp_path: Path) -> None:
    case = CASES["EAGLE-3 with embeddings"]
    own = {**case.weights, "embed_tokens.weight": target.embeddings.float()}
    for i, (weights, is_kept) in enumerate(((case.weights, True), (own, False))):
        drafter = eagle_of(replace(case, weights=weights), target_folder, tmp_path / str(i)).engine.drafter.first
        assert isinstance(drafter, eagle.EagleDrafter)
        assert (drafter.model._embedding is not None) == is_kept


def test_weights_are_rounded_where_that_is_asked_for(target_folder: Path, tmp_path: Path) -> None:
    case = CASES["EAGLE-3"]
    they.write(tmp_path, case.config, case.weights)
    specs = [f"eagle:path={tmp_path},quantization={name}" for name in ("none", "int8:group=16")]
    heads: list[Any] = [llm_with(target_folder, spec).engine.drafter.first for spec in specs]
    first, second = (drafter.model.weight("fc.weight") for drafter in heads)
    assert 0 < float(np.abs(first - second).max()) < 0.02


# ------------------------------------------------------------------------------------------------------------- Medusa


@dataclass(frozen=True)
class MedusaCase:
    """Heads. ids: those that their LM heads have rows of, in order."""

    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    names: tuple[str, str]
    sizes: tuple[int, int]
    file: str = "model.safetensors"
    ids: Tensor = field(default_factory=lambda: torch.arange(NUM_VOCAB))


V2 = ("{0}.{1}.linear.", "{0}.{1}.weight")
VLLM = ("blocks.{0}.layers.{1}.", "lm_heads.{0}.weight")
TOKEN_MAP = torch.tensor([200, 3, 77, 9, 120, 250, 31, 64])


def medusa_case(names: tuple[str, str], sizes: tuple[int, int], config: Mapping[str, Any], **more: Any) -> MedusaCase:
    return MedusaCase(config, they.random_weights(they.medusa_shapes(*names, *sizes)), names, sizes, **more)


def mapped(case: MedusaCase, num_rows: int) -> MedusaCase:
    """Over the ids of TOKEN_MAP, with LM heads of so many rows."""
    heads = {name for name in case.weights if name.startswith("lm_heads")}
    cut = {name: weight[TOKEN_MAP] if name in heads else weight for name, weight in case.weights.items()}
    weights = {**(cut if num_rows == len(TOKEN_MAP) else case.weights), "token_map": TOKEN_MAP}
    config = {**case.config, "truncated_vocab_size": len(TOKEN_MAP)}
    return MedusaCase(config, weights, case.names, case.sizes, ids=TOKEN_MAP)


VLLM_CONFIG = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": WIDTH, "vocab_size": NUM_VOCAB,
               "num_heads": 2, "num_hidden_layers": 1, "medusa_fc_bias": True}  # fmt: skip
MEDUSA = {
    # Old files say 2 heads and hold more.
    "v2": medusa_case(V2, (3, 1), {"medusa_num_heads": 2, "medusa_num_layers": 1}, file="medusa_lm_head.safetensors"),
    "v2 two blocks": medusa_case(V2, (2, 2), {"medusa_num_heads": 2, "medusa_num_layers": 2}),
    "vLLM": medusa_case(VLLM, (2, 1), VLLM_CONFIG),
    "vLLM token_map": mapped(medusa_case(VLLM, (2, 1), VLLM_CONFIG), len(TOKEN_MAP)),
    "vLLM token_map of whole LM heads": mapped(medusa_case(VLLM, (2, 1), VLLM_CONFIG), NUM_VOCAB),
}


@pytest.mark.parametrize("ops", ["reference", pytest.param("native", marks=NATIVE)])
@pytest.mark.parametrize("name", MEDUSA)
def test_medusa_drafts_what_the_description_says(
    name: str, ops: str, target: they.Target, target_folder: Path, tmp_path: Path
) -> None:
    case = MEDUSA[name]
    they.write(tmp_path, case.config, case.weights, case.file)
    weights = they.doubled(case.weights)
    if "token_map" in weights:
        heads = {n: w for n, w in weights.items() if n.startswith("lm_heads") and len(w) == NUM_VOCAB}
        weights |= {n: w[TOKEN_MAP] for n, w in heads.items()}
    widths, sizes = (3, 2, 1)[: case.sizes[0]], set[int]()
    llm = llm_with(target_folder, f"medusa:path={tmp_path},shape=3x2x1", spec_length=15, ops=ops, dtype="float32")
    for text, draft in drafts_of(llm, temperature=0.0, num_tokens=20):
        logits = they.medusa(weights, *case.names, *case.sizes, target.run(text[:-1])[2][-1])
        best = [case.ids[row.topk(num).indices].tolist() for row, num in zip(logits, widths, strict=True)]
        depths, behind = list[int](), dict[int, list[int]]()
        for parent, token in zip(draft.parents, draft.tokens, strict=True):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            behind.setdefault(parent, []).append(token)
        for parent, tokens in behind.items():
            assert tokens == best[0 if parent < 0 else depths[parent] + 1][: len(tokens)]
        sizes.add(len(draft.tokens))
    assert max(sizes) == sum(itertools.accumulate(widths, operator.mul))


def test_one_lm_head_for_all(target: they.Target, target_folder: Path, tmp_path: Path) -> None:
    """original_lm_head, in vLLM's words."""
    case = MEDUSA["vLLM"]
    shared = {name: weight for name, weight in case.weights.items() if name != "lm_heads.1.weight"}
    they.write(tmp_path, {**case.config, "original_lm_head": True}, shared)
    whole = they.doubled({**shared, "lm_heads.1.weight": shared["lm_heads.0.weight"]})
    for text, draft in drafts_of(llm_with(target_folder, f"medusa:path={tmp_path},shape=1x1"), temperature=0.0):
        logits = they.medusa(whole, *case.names, *case.sizes, target.run(text[:-1])[2][-1])
        assert draft.tokens == [int(row.argmax()) for row in logits][: len(draft.tokens)]


# ----------------------------------------------------------------------------------------------------------- refusals


def some(*shape: int) -> Tensor:
    return torch.zeros(shape)


E1, E3, SP = CASES["EAGLE-1"], CASES["EAGLE-3"], CASES["speculators"]
REFUSED: dict[str, tuple[Case, type, str]] = {
    "shape": (changed(E3, add={"midlayer.self_attn.q_proj.weight": some(32, 32)}), UnsupportedModel,
              r"midlayer.self_attn.q_proj.weight of shape \[32, 32\].*ask for \[32, 64\]"),
    "layers": (changed(E3, eagle_aux_hidden_state_layer_ids=[1, 2]), UnsupportedModel,
               r"fc.weight of shape \[32, 96\].*ask for \[32, 64\]"),
    "missing": (changed(E3, drop=["midlayer.hidden_norm.weight"]), UnsupportedModel, "no tensor midlayer.hidden_norm"),
    "unknown": (changed(E3, add={"midlayer.gate": some(3)}), UnsupportedModel, "holds the tensor 'midlayer.gate'"),
    "no fc_norm": (changed(E3, fc_norm=True), UnsupportedModel, "no tensor fc_norm.0.weight"),
    "fc_norm unsaid": (changed(E3, add={"fc_norm.0.weight": some(32)}), UnsupportedModel, "tensor 'fc_norm.0.w"),
    "no d2t": (changed(E3, drop=["d2t"]), UnsupportedModel, "no tensor d2t"),
    "ids": (changed(E3, add={"d2t": torch.full((129,), 200)}), UnsupportedModel, "d2t must lead to different ids"),
    "wrapped, of some ids": (changed(CASES["EAGLE-1 in vLLM's wrapper"], truncated_vocab_size=9), UnsupportedModel,
                             "truncated_vocab_size=9"),
    "vocabulary": (changed(E3, vocab_size=32000), BadOption, "of 32000 ids, and the target has 257"),
    "width": (changed(E1, hidden_size=64), BadOption, "reads rows of 64, and the target has rows of 32"),
    "both ids": (changed(E3, eagle_aux_hidden_state_layer_ids=[1, 3, 6], eagle_config={IDS: [1, 3, 6]}),
                 UnsupportedModel, "must be one more than the second"),
    "a layer too far": (changed(E3, eagle_aux_hidden_state_layer_ids=[1, 3, 60]), BadOption, "behind 60 layers"),
    "no ids": (changed(E3, eagle_aux_hidden_state_layer_ids=[1, -3, "a"]), UnsupportedModel, "must list layers"),
    "nested": (changed(E3, eagle_config={"use_aux_hidden_state": False}), UnsupportedModel, "aux_hidden_state=False"),
    "nested unknown": (changed(E3, eagle_config={"use_gates": True}), UnsupportedModel, "use_gates=True"),
    "unknown key": (changed(E3, residual_scale=2.0), UnsupportedModel, "residual_scale=2.0.*ignore-config-key"),
    "norm_before_residual": (changed(SP, norm_before_residual=None), UnsupportedModel, "no norm_before_residual"),
    "type": (changed(SP, speculators_model_type="eagle4"), UnsupportedModel, "speculators_model_type='eagle4'"),
    "unknown key of speculators": (changed(SP, gates=3), UnsupportedModel, "gates=3"),
    "P-EAGLE": (changed(SP, speculators_model_type="peagle"), UnsupportedModel, "of P-EAGLE, which forerun does not"),
    "P-EAGLE by its tensors": (changed(E3, add={"mask_hidden": some(1, 1, 96)}), UnsupportedModel, "head of P-EAGLE"),
    "DSpark": (changed(E3, add={"markov_head.markov_w1.weight": some(257, 4)}), UnsupportedModel, "head of DSpark"),
    "MTP": (Case({}, {"mtp.fc.weight": some(32, 64)}), BadOption, "name it as mtp:path=FOLDER"),
    "DFlash": (Case({}, {"hidden_norm.weight": some(32)}), BadOption, "head of DFlash, which eagle does not read"),
    "Medusa": (Case({}, MEDUSA["v2"].weights), BadOption, "Medusa, which eagle does not read: name it as medusa:"),
    "something else": (Case({}, {"a.weight": some(2)}), UnsupportedModel, "'a.weight' and is no head that forerun"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused(name: str, target_folder: Path, tmp_path: Path) -> None:
    case, error, said = REFUSED[name]
    with pytest.raises(error, match=said):
        eagle_of(case, target_folder, tmp_path)


MEDUSA_REFUSED: dict[str, tuple[Mapping[str, Any], Mapping[str, Tensor], type, str]] = {
    "vocabulary": ({}, {"0.0.linear.weight": some(32, 32), "0.1.weight": some(32000, 32)}, BadOption, "of 32000 ids"),
    "shape": ({}, {"0.0.linear.weight": some(64, 64)}, UnsupportedModel, r"shape \[64, 64\].*ask for \[32, 32\]"),
    "missing": ({}, {"0.0.linear.weight": some(32, 32), "2.0.linear.weight": some(32, 32)}, UnsupportedModel,
                "no tensor 1.0.linear.weight"),
    "token_map": (VLLM_CONFIG, {**MEDUSA["vLLM token_map"].weights, "token_map": torch.tensor([1, 2, 2])},
                  UnsupportedModel, "token_map must lead to different ids"),
    "no LM head": ({**VLLM_CONFIG, "original_lm_head": True},
                   {n: w for n, w in MEDUSA["vLLM"].weights.items() if not n.startswith("lm_head")},
                   UnsupportedModel, "original_lm_head=true in config.json and no LM head"),
    "EAGLE": ({}, E1.weights, BadOption, "head of EAGLE-1, which medusa does not read: name it as eagle:"),
    "Hydra": ({}, {"hydra_mlp.0.0.linear.weight": some(32, 64)}, BadOption, "head of Hydra, which medusa does not"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEDUSA_REFUSED)
def test_other_files_are_no_medusa_heads(name: str, target_folder: Path, tmp_path: Path) -> None:
    config, weights, error, said = MEDUSA_REFUSED[name]
    they.write(tmp_path, config, weights)
    with pytest.raises(error, match=said):
        llm_with(target_folder, f"medusa:path={tmp_path}")


@pytest.mark.parametrize(("method", "file"), [("medusa", "medusa_lm_head.pt"), ("eagle", "pytorch_model.bin")])
def test_pickles_are_refused_with_the_way_out(method: str, file: str, target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(pickle.dumps({}))
    with pytest.raises(UnsupportedModel, match=r"is a pickle.*forerun convert-head FOLDER OUT"):
        llm_with(target_folder, f"{method}:path={tmp_path}")


def test_a_key_that_changes_nothing_may_be_ignored(target_folder: Path, tmp_path: Path) -> None:
    llm = eagle_of(changed(E3, residual_scale=2.0), target_folder, tmp_path, ignore_config_keys="residual_scale")
    assert llm.generate([PROMPT], SamplingParams(max_tokens=4))[0].token_ids


def test_a_head_may_lie_in_several_files(target_folder: Path, tmp_path: Path) -> None:
    names = sorted(E3.weights)
    for i, part in enumerate((names[:5], names[5:])):
        they.write(tmp_path, E3.config, {n: E3.weights[n] for n in part}, f"model-0000{i + 1}-of-00002.safetensors")
    assert drafts_of(llm_with(target_folder, f"eagle:path={tmp_path}"), temperature=0.0)


# ----------------------------------------------------------------------------------------------------------- pickles


def pickled(folder: Path, *parts: Any, name: str = "pytorch_model{}.bin") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(E3.config))
    for i, part in enumerate(parts):
        torch.save(part, folder / name.format(i or ""))
    return folder


def test_a_pickled_head_is_converted(target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From several files; it then drafts what the same head in safetensors drafts."""
    names = sorted(E3.weights)
    folder = pickled(tmp_path / "old", *({n: E3.weights[n] for n in part} for part in (names[:5], names[5:])))
    with pytest.raises(SystemExit) as ended:
        main(["convert-head", str(folder), str(tmp_path / "new")])
    assert not ended.value.code
    assert f"{len(names)} tensors; name it as METHOD:path=" in capsys.readouterr().out
    they.write(tmp_path / "same", E3.config, E3.weights)
    specs = (f"eagle:path={tmp_path / name}" for name in ("same", "new"))
    old, new = (drafts_of(llm_with(target_folder, spec), temperature=0.0) for spec in specs)
    assert [draft.tokens for _, draft in old] == [draft.tokens for _, draft in new]


class Runs:
    """Would write a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_nothing_of_a_pickle_is_run(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin holds more than tensors, and loading it would run"):
        convert_head(pickled(tmp_path / "old", {"a": Runs(tmp_path / "ran")}), tmp_path / "new")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "new").exists()


NO_HEADS: dict[str, tuple[tuple[Any, ...], type, str]] = {
    "a list": (([some(2)],), UnsupportedModel, "holds no tensors by their names alone"),
    "nested": (({"state_dict": {"a": some(2)}},), UnsupportedModel, "holds no tensors by their names alone"),
    "twice": (({"a": some(2)}, {"a": some(2)}), UnsupportedModel, "has the tensor 'a' of another file, too"),
    "nothing": ((), NotFound, "in .*old: name the folder of a head"),
}


@pytest.mark.parametrize("case", NO_HEADS)
def test_other_pickles_are_not_converted(tmp_path: Path, case: str) -> None:
    parts, error, words = NO_HEADS[case]
    with pytest.raises(error, match=words):
        convert_head(pickled(tmp_path / "old", *parts), tmp_path / "new")


def test_a_broken_pickle_and_a_full_folder(tmp_path: Path) -> None:
    folder = pickled(tmp_path / "old", {"a": some(2)})
    assert "old exists and is not empty: name a new one" in refusal(BadOption, convert_head, folder, folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:100])
    assert "pytorch_model.bin " in refusal(UnsupportedModel, convert_head, folder, tmp_path / "new")
