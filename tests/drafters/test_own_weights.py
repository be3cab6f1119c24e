"""Drafters that run the target's own weights: all of them at fewer bits (self), or some of its layers (early_exit)."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import support
from drafters.requests import proposed
from forerun import LLM
from forerun.blocks import resized, weight_shapes
from forerun.cli.main import main
from forerun.config import Quantization
from forerun.drafters import Target
from forerun.drafters.early_exit import KIND, Options, build, chosen
from forerun.drafters.shared import artifacts
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.drafters.shared.short_vocab import SIZES, ShortVocabulary
from forerun.errors import BadOption, UnsupportedModel, UserError
from forerun.models.loading import load_checkpoint
from forerun.models.runner import Run
from forerun.ops import load_model
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.model import CpuModel
from forerun.ops.quantising import quantise, scheme_of
from forerun.ops.torch import TorchModel
from forerun.ops.torch_tensors import host_of
from forerun.testing.engines import target_for
from forerun.train.skip import Scorer, search, windows_of
from forerun.types import Budget, Draft, SamplingParams, Sequence
from refusals import refusal
from support import VOCAB, built, needs_native, random_decoder, runner_for
from tiny import write_tiny

GREEDY = SamplingParams(max_tokens=20, temperature=0)
TEXT = [5, 9, 2, 44, 17, 3, 8]


def target_of(model: TorchModel) -> Target:
    return target_for(model, num_ids=VOCAB, max_batch_size=2, max_seq_len=64)


def on_native(model: TorchModel, dtype: str = "bfloat16") -> CpuModel:
    return support.on_native(model.config, model.weights, dtype)


def drafted(drafter, num_tokens: int = 4, temperature: float = 0.0) -> Draft:
    """The draft behind TEXT."""
    params = dataclasses.replace(GREEDY, temperature=temperature)
    return proposed(drafter, Sequence(0, list(TEXT), len(TEXT), params, 0, 60), Budget([num_tokens], 64))


def alone(model: TorchModel, layers: list[int]) -> TorchModel:
    """A model of its own that has these layers of another one."""
    weights = {n: w for n, w in model.weights.items() if not n.startswith("model.layers.")}
    for new, old in enumerate(layers):
        at = f"model.layers.{old}."
        weights |= {n.replace(at, f"model.layers.{new}."): w for n, w in model.weights.items() if n.startswith(at)}
    return load_model(resized(model.config, num_layers=len(layers)), weights, model.ops)


def likeliest(model: TorchModel, num_tokens: int = 4) -> list[int]:
    """The greedy continuation of TEXT by a model, each time computed from the beginning."""
    tokens = list(TEXT)
    for _ in range(num_tokens):
        runner = runner_for(model)
        runner.cache.open(0)
        tokens.append(int(runner.forward([Run(0, tokens, "last")]).logits[0][-1].argmax()))
    return tokens[len(TEXT) :]


# ------------------------------------------------------------------------------------------------------- early exits


def skip_file(folder: Path, layers: list[int], num_layers: int) -> str:
    path = folder / "layers.safetensors"
    arrays = {"layers": np.array(layers, dtype=np.int64)}
    artifacts.save(path, KIND, arrays, artifacts.fingerprint(None, VOCAB), {"num_layers": str(num_layers)})
    return str(path)


@pytest.mark.parametrize("layers", [[0], [0, 1, 2], [0, 2, 4], [1, 3], [4]])
@pytest.mark.parametrize("ops", ["reference", pytest.param("native", marks=needs_native)])
def test_the_draft_is_what_a_model_of_these_layers_says(layers, ops, tmp_path):
    model = random_decoder(3, layers=5)
    expected = likeliest(alone(model, layers))
    run = model if ops == "reference" else on_native(model, "float32")
    skip = "+".join(str(i) for i in range(5) if i not in layers)
    for options in (Options(path=skip_file(tmp_path, layers, 5)), Options(skip=skip)):
        assert drafted(build(options, target_of(run))).tokens == expected
    if layers == [0, 1, 2]:
        assert drafted(build(Options(layers=3), target_of(run))).tokens == expected


def test_nothing_is_in_memory_twice(tmp_path):
    """The model is the target's object, and the cache has as many pools as layers that draft."""
    model = random_decoder(3, layers=6)
    for layers in ([0, 1], [1, 4]):
        drafter = build(Options(path=skip_file(tmp_path, layers, 6)), target_of(model))
        assert drafter.runner is not None
        assert drafter.runner.model is model
        cache = drafter.runner.cache
        assert len({pool.data_ptr() for pool in cache.pools.tensors()}) == 2 * len(layers)
        assert cache.shape.bytes_per_token("float32") * 3 == model.config.cache_shape.bytes_per_token("float32")


@pytest.mark.parametrize(("num_layers", "num"), [(1, 1), (2, 1), (5, 2), (30, 10)])
def test_a_third_of_the_layers_draft_unless_told_otherwise(num_layers, num):
    assert list(chosen(Options(), num_layers)) == list(range(num))


def test_wrong_layers_are_refused(tmp_path):
    model = random_decoder(3, layers=2)
    with pytest.raises(BadOption, match="layers=3 is not possible: the target has 2"):
        build(Options(layers=3), target_of(model))
    with pytest.raises(BadOption, match="fitted for a target of 5 layers, and this one has 2"):
        build(Options(path=skip_file(tmp_path, [0], 5)), target_of(model))
    for two in ({"layers": 1, "path": "a file"}, {"layers": 1, "skip": "0"}, {"path": "a file", "skip": "0"}):
        assert "all choose layers: give one of them" in refusal(BadOption, Options, **two)
    for skip in ("", "a", "1,2", "-1", "1++2", "1+01"):
        with pytest.raises(BadOption, match=r"early_exit:skip=|is no list"):
            Options(skip=skip)
    for skip in ("2", "0+1"):
        with pytest.raises(BadOption, match="the target has the layers 0 to 1, and one of them must draft"):
            build(Options(skip=skip), target_of(model))
    with pytest.raises(BadOption, match="another tokenizer"):
        build(Options(path=skip_file(tmp_path, [0], 2)), dataclasses.replace(target_of(model), num_ids=VOCAB - 1))


# ------------------------------------------------------------------------------------------- the search for such layers


def idle(model: TorchModel, layers: list[int]) -> TorchModel:
    """The same model, but these layers add nothing to the residual stream."""
    weights = dict(model.weights)
    for i in layers:
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{i}.{name}.weight"] = torch.zeros_like(weights[f"model.layers.{i}.{name}.weight"])
    return load_model(model.config, weights, model.ops)


def scorer_of(model: TorchModel) -> Scorer:
    return Scorer(model, windows_of([i * 7 % VOCAB for i in range(80)], 80, 32))


def test_the_search_finds_layers_that_do_nothing():
    """Leaving them out changes no choice, so the best set is all others, at agreement 1."""
    model = idle(random_decoder(3, layers=5), [1, 3])
    best = search(scorer_of(model), 12)
    assert set(best.layers) <= {0, 2, 4}
    scored = scorer_of(model).score((0, 2, 4))
    assert scored.agreement == 1
    assert best.speedup >= scored.speedup > 1
    assert best == search(scorer_of(model), 12), "the same arguments give the same set"


def test_a_search_ends_at_its_evaluations_and_needs_two_layers():
    scorer, count = scorer_of(random_decoder(3, layers=4)), []
    scoring = scorer.score
    scorer.score = lambda layers: count.append(layers) or scoring(layers)  # type: ignore[func-returns-value]
    search(scorer, 3)
    assert len(count) == 3
    assert "one layer" in refusal(BadOption, search, scorer_of(random_decoder(3, layers=1)), 3)
    assert "fewer than two tokens" in refusal(BadOption, windows_of, [4], 10, 5)


def test_a_fitted_file_drafts_for_its_target_alone(tmp_path):
    """From the command to the engine: the text is plain decoding's; files of others are refused before weights are."""
    target = write_tiny(tmp_path / "model")
    out = tmp_path / "fitted" / "layers.safetensors"
    text = tmp_path / "text.txt"
    text.write_text("some text of the kind that is written", encoding="utf-8")
    arguments = ["train", "skip", "--target", str(target), "--text", str(text), "--out", str(out)]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--evaluations", "3", "--ops", "reference"])
    options: dict[str, Any] = {"ops": "reference_row_by_row", "dtype": "float32"}
    llms = [LLM(target, draft=draft, **options) for draft in ("none", f"early_exit:path={out}")]
    plain, guessed = (llm.generate(["some"], GREEDY)[0].token_ids for llm in llms)
    assert guessed == plain
    assert "ids of another tokenizer" in refusal(BadOption, LLM, "shipped", draft=f"early_exit:path={out}")
    out.write_bytes(out.read_bytes()[:-4])
    assert "layers.safetensors" in refusal(UnsupportedModel, LLM, target, draft=f"early_exit:path={out}", **options)


# --------------------------------------------------------------------------------------------------------------- self


@needs_native
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_rounded_in_memory_are_those_rounded_from_the_file(model_type, dtype, tmp_path):
    """Also where matrices are packed together, paired, and with biases (qwen2)."""
    folder = write_tiny(tmp_path / "model", model_type)
    made = load_checkpoint(folder, dtype=dtype, ops=CpuOps()).model.rounded(Quantization(8, 16))
    if dtype == "bfloat16":  # what the file's float32 weights are in memory
        expected = dict(load_checkpoint(folder, dtype=dtype).model.rounded(Quantization(8, 16)).weights)
    else:
        expected = dict(load_checkpoint(folder, dtype="float32", quantization="int8:group=16").model.weights)
    assert isinstance(made, CpuModel)
    assert made.weight_bits == (8,)
    for name, shape in weight_shapes(made.config).items():
        rows = made.matrix_rows(name, range(shape[0])) if len(shape) == 2 else made.vector(name)
        stood_for = host_of(expected[name])
        assert np.array_equal(rows.to(stood_for.dtype).values, stood_for.values), name


def test_the_draft_is_what_the_rounded_model_says():
    model = random_decoder(3)
    rounded = model.rounded(Quantization(8, 16))
    assert any(not rounded.weights[name].equal(weight) for name, weight in model.weights.items())
    assert drafted(built("self", target_of(model), {"quantization": "int8:group=16"})).tokens == likeliest(rounded)


@needs_native
def test_passes_of_a_rounded_model_and_of_a_part_are_timed_as_their_own():
    """Pacing keeps the times of passes by this name: a draft with the target's times would never seem to pay."""
    model = on_native(random_decoder(3, hidden=64))
    named = [("self", {"quantization": "int8:group=16"}), ("early_exit", {}), ("early_exit", {"draft_vocab": "9"})]
    runners = [runner_for(model), *(built(name, target_of(model), options).runner for name, options in named)]
    assert len({runner.fingerprint for runner in runners if runner is not None}) == 4


@needs_native
def test_weights_of_8_bits_are_rounded_to_4():
    """What the 8 bits stand for is rounded, as it is where it is dense; embedding and LM head keep 8."""
    packed = on_native(random_decoder(3, hidden=64, ffn=64)).rounded(Quantization(8))
    rounded = packed.rounded(Quantization(4))
    assert rounded.weight_bits == (4, 8)
    name = "model.layers.0.mlp.down_proj.weight"
    wanted = quantise(packed.weight(name), scheme_of(4, 32)).dequantise()
    assert np.array_equal(rounded.weight(name), wanted)
    assert not np.array_equal(packed.weight(name), wanted)


@needs_native
def test_what_cannot_be_rounded_is_refused():
    model = random_decoder(3, hidden=64)
    twice = on_native(model).rounded(Quantization(8, 16))
    with pytest.raises(UserError, match="the model has 8-bit weights in memory; load it with dtype='float32'"):
        twice.rounded(Quantization(8))
    with pytest.raises(BadOption, match="groups of 32 do not divide the 48 inputs"):
        built("self", target_of(model), {"quantization": "int4"})
    assert "int3" in refusal(BadOption, built, "self", target_of(model), {"quantization": "int3"})


# -------------------------------------------------------------------------------------------------------- draft_vocab


@needs_native
@pytest.mark.parametrize("bits", [None, 8])
def test_logits_of_the_first_ids_are_those_of_all(bits):
    """Bit for bit: the rest of the head is not read."""
    model = on_native(random_decoder(3, hidden=64))
    model = model if bits is None else model.rounded(Quantization(bits, 16))
    hidden = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    whole, few = model.logits(hidden), model.logits(hidden, 40)
    assert few.shape == (3, 40)
    assert np.array_equal(few, whole[:, :40])
    assert whole.any()


@pytest.mark.parametrize("ops", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_first_ids_are_drafted(ops, temperature):
    """The likeliest of all ids here is beyond them, so that a draft of all would begin otherwise."""
    model = random_decoder(3) if ops == "reference" else on_native(random_decoder(3), "float32")
    assert likeliest(random_decoder(3))[0] >= 5
    draft = drafted(built("early_exit", target_of(model), {"layers": 2, "draft_vocab": "5"}), 6, temperature)
    assert len(draft.tokens) == 6
    assert all(token < 5 for token in draft.tokens)
    assert all(probs.at(token) == 0 for probs in draft.probs for token in range(5, VOCAB))


def test_as_many_ids_are_drafted_as_the_text_needs() -> None:
    """English needs few, a text whose ids come late all; what was read is not read again."""
    short = ShortVocabulary(150_000, head_share=0.27, pass_cost=0.33)
    assert short.best() == 65536
    english = Sequence(0, [5] * 3000, 3000, GREEDY, 0, 9000)
    short.read([english])
    assert short.best() == SIZES[0]
    had = list(short.counts)
    short.read([english])
    assert short.counts == had
    english.tokens += [140_000] * 900
    short.read([english])
    assert short.best() == 150_000
    assert ShortVocabulary(150_000, 0.27, 0.01).best() == 150_000  # what costs nothing


def test_a_large_vocabulary_is_drafted_in_part_and_texts_are_the_same() -> None:
    """The drafter's logits are as wide as it says, for greedy and drawn tokens, from one draft to the next."""
    drafter = built("early_exit", target_of(random_decoder(3)), {"layers": 2})
    assert isinstance(drafter, ModelDrafter)
    short = ShortVocabulary(VOCAB, 0.5, 0.5)
    widths = iter([3, 7, VOCAB, 4])
    short.best = lambda: next(widths)  # type: ignore[method-assign]
    drafter.shorten(short)
    for temperature in (0.0, 1.0):
        draft = drafted(drafter, 5, temperature)
        assert len(draft.tokens) == 5
        assert max(draft.tokens) < (7 if temperature == 0 else VOCAB)
