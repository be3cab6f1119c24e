"""Blocks on the kernels: the function that plain torch computes, and the bits of a row whatever is beside it."""

import dataclasses
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import native
from forerun.blocks import Attention, Block, Experts, LayerInput, Mlp, Norm, Rope, Spec
from forerun.ops.reference import ReferenceOps
from ops.native_blocks import (
    DELTA,
    NUM_POSITIONS,
    PLAIN,
    RMS,
    SHORT,
    SPECS,
    Native,
    Reference,
    random_weights,
    spec_of,
    stands_for,
)
from ops.native_cases import BFLOAT16, FLOAT32, ISAS, Session, needs_native, ops_of, path_to, same_bits, seeded
from refusals import refusal
from tensors import load_model

pytestmark = needs_native
every_spec = pytest.mark.parametrize("name", SPECS)
# What weights are stored as, and how far rows may be from those of exact arithmetic, in shares of their lengths.
TYPES = [
    pytest.param(FLOAT32, 0, 1e-5, id="float32"),
    pytest.param(BFLOAT16, 0, 0.06, id="bfloat16"),
    pytest.param(BFLOAT16, 4, 0.2, id="int4"),
    pytest.param(BFLOAT16, 8, 0.2, id="int8"),
]
every_type = pytest.mark.parametrize(("dtype", "bits", "tolerance"), TYPES)
TREE = [-1, 0, 0, 1, 1, 2, -1, 6]


def roundable(spec: Spec) -> Spec:
    """The same blocks with sizes that groups of 16 divide."""

    def block(b: Block) -> Block:
        a, mlp, own = b.attention, b.mlp, b.per_layer_input
        if a is not None:
            rope = a.rope and replace(a.rope, dims=a.rope.dims and 8)
            a = replace(a, head_dim=16 if a.head_dim < 24 else 32, rope=rope)

        def wide(mlp: Mlp | None) -> Mlp | None:
            return mlp and replace(mlp, size=-(-mlp.size // 32) * 32)

        r = b.recurrence
        if r is not None and r.kind == "gated_delta":
            r = replace(r, key_dim=16, value_dim=32)

        e = b.experts and replace(b.experts, mlp=wide(b.experts.mlp), shared=wide(b.experts.shared))
        own = own and replace(own, size=16)
        return replace(b, attention=a, recurrence=r, mlp=wide(mlp), experts=e, per_layer_input=own)

    return replace(spec, hidden_size=48, blocks=tuple(map(block, spec.blocks)))


@cache
def model_of(name: str, dtype: torch.dtype, bits: int, isa: str, num_threads: int = 1) -> tuple[Native, Reference]:
    spec = roundable(SPECS[name]) if bits else SPECS[name]
    stored = random_weights(spec, dtype, bits)
    made = Native(spec, stored, dtype, isa, bits=bits, num_threads=num_threads)
    return made, Reference(spec, stands_for(spec, stored, bits), dtype)


def tokens_of(seed: int, num: int) -> list[int]:
    return torch.randint(61, (num,), generator=seeded(seed)).tolist()


def passes(model: Native) -> list[tuple[list[int], Tensor]]:
    """Chunks of 17, 8 and 2 rows, a tree and a row, two sequences side by side: the tokens before each row, and it."""
    texts: dict[int, list[int]] = {0: [], 1: []}
    found: list[tuple[list[int], Tensor]] = []
    for step, (own, other) in enumerate([(17, 1), (8, 17), (2, 2), (len(TREE), 3), (1, 1)]):
        runs = {0: tokens_of(step, own), 1: tokens_of(9 + step, other)}
        tree = TREE if own == len(TREE) and step == 3 else None
        rows = model.run(runs, {slot: len(text) for slot, text in texts.items()}, {0: tree} if tree else None)
        at = 0
        for slot, run in runs.items():
            own_tree = tree if slot == 0 else None
            found += [(texts[slot] + [run[k] for k in path_to(i, own_tree)], rows[at + i]) for i in range(len(run))]
            at += len(run)
            texts[slot] += run if own_tree is None else [run[k] for k in path_to(0, own_tree)]
        # Of the tree its first row is kept, which is where a chain's first row would be.
    return found


def alone(model: Native, text: list[int]) -> Tensor:
    """The last row of a text that is decoded one token at a time, in a slot of its own."""
    return torch.cat([model.run({2: [token]}, {2: i}) for i, token in enumerate(text)])


@every_type
@every_spec
def test_rows_are_those_of_torch_and_their_bits_those_of_rows_alone(
    name: str, dtype: torch.dtype, bits: int, tolerance: float, isa: str
) -> None:
    model, reference = model_of(name, dtype, bits, isa)
    found = passes(model)
    texts = sorted({tuple(text) for text, _ in found}, key=len)
    longest = [text for text in texts if not any(other[: len(text)] == text and other != text for other in texts)]
    expected: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    for text in longest:
        exact, plain = reference.rows(list(text)), alone(model, list(text))
        expected |= {text[: i + 1]: (exact[i], plain[i]) for i in range(len(text))}
    far = 0
    for text, row in found:
        exact, plain = expected[tuple(text)]
        assert same_bits(row, plain), len(text)
        far += float((row.double() - exact).norm()) > tolerance * float(exact.norm())
    # Rounded rows choose other experts where two scores are nearly equal, and what is read of a state is normed
    # even where query and key nearly cancel.
    few = 0.25 if "experts" in name else 0.1 if "delta" in name else 0
    assert far <= (few * len(found) if tolerance > 1e-3 else 0)


def test_of_equal_scores_the_lowest_experts_are_chosen(isa: str) -> None:
    """Of a router whose rows are all alike, and of one in which the last two are alike and the largest."""
    spec = spec_of([replace(PLAIN, mlp=None, experts=Experts(6, 2, Mlp(24)))])
    for weight in (torch.zeros(6, 44), torch.cat((torch.zeros(3, 44), torch.ones(3, 44) * 0.5))):
        stored = random_weights(spec, FLOAT32) | {"model.layers.0.mlp.gate.weight": weight}
        found = Native(spec, stored, FLOAT32, isa).run({0: tokens_of(1, 9)}, {0: 0})
        exact = Reference(spec, stored, FLOAT32).rows(tokens_of(1, 9))
        assert float((found.double() - exact).norm()) <= 1e-5 * float(exact.norm())


def test_gates_are_bounded(isa: str) -> None:
    """Where gate and up are far beyond their bounds, on both sides."""
    spec = spec_of([replace(PLAIN, mlp=Mlp(40, "clamped_silu"))])
    stored = random_weights(spec, FLOAT32)
    for name in ("gate_proj", "up_proj"):
        stored[f"model.layers.0.mlp.{name}.weight"] *= 8
    found = Native(spec, stored, FLOAT32, isa).run({0: tokens_of(1, 9)}, {0: 0})
    exact, loose = (Reference(spec, stored, FLOAT32, bound=bound).rows(tokens_of(1, 9)) for bound in (7, 70))
    assert float((found.double() - exact).norm()) <= 1e-5 * float(exact.norm())
    assert float((loose - exact).norm()) > 0.1 * float(exact.norm())


def test_sinks_beside_keys_of_several_ranges(isa: str) -> None:
    """Texts of 600 tokens, whose ranges threads share; each row has the bits of one thread, whatever its chunk."""
    spec = replace(SPECS["gpt_oss, experts"], max_positions=640)
    stored, found = random_weights(spec, FLOAT32), []
    for operators, cut in ((ops_of(isa), 600), (ops_of(isa, 3), 590), (ops_of(isa, 3), 599), (ReferenceOps(), 600)):
        session = Session(load_model(spec, dict(stored), operators), max_seq_len=640)
        text = tokens_of(4, 600)
        found.append(torch.cat([session.run({0: part}) for part in (text[:cut], text[cut:]) if part]))
    plain, chunked, decoded, reference = found
    assert same_bits(plain, chunked)
    assert same_bits(plain, decoded)
    assert float((plain - reference).norm()) < 1e-5 * float(reference.norm())


def test_a_pass_tells_how_many_experts_its_rows_chose(isa: str) -> None:
    """Of each layer that has any, and of those alone that ran."""
    model, reference = model_of("experts", FLOAT32, 0, isa, 2)
    found = []
    for num in (1, 2, 3, 8, 24):
        reference.chosen.clear()
        model.run({0: tokens_of(9, num)}, {0: 0})
        reference.rows(tokens_of(9, num))
        assert model.num_experts == [len(own) for own in reference.chosen], num
        found.append(model.num_experts)
    assert len({tuple(own) for own in found}) > 3
    model.run({0: tokens_of(9, 1)}, {0: 0}, layers=[1, 3])
    assert model.num_experts == [2, 1]
    dense, _ = model_of("gemma3", FLOAT32, 0, isa)
    dense.run({0: tokens_of(9, 2)}, {0: 0})
    assert dense.num_experts == []


@every_spec
def test_threads_do_not_matter(name: str, isa: str) -> None:
    one, three = (passes(model_of(name, BFLOAT16, 0, isa, num)[0]) for num in (1, 3))
    assert all(same_bits(a, b) for (_, a), (_, b) in zip(one, three, strict=True))


def test_the_best_id_is_that_of_the_logits(isa: str) -> None:
    """Where a cap makes logits equal, the lowest id wins, as among the logits that are written."""
    for name in ("gemma2", "sizes", "partial"):
        model, _ = model_of(name, FLOAT32, 0, isa)
        hidden = torch.randn(5, 44, generator=seeded(1)) * torch.tensor([1, 3, 30, 1e4, 1e30])[:, None]
        logits = model.logits(hidden)
        ids, values = model.model.argmax(hidden.data_ptr(), 5, [0, 1, 2, 3, 4], 61)
        assert same_bits(torch.tensor(values), logits.max(1).values)
        assert ids == [int((row == row.max()).nonzero()[0]) for row in logits]


def test_a_run_goes_on_as_one_pass_for_each_token_would(isa: str) -> None:
    for name in ("gemma3", "gpt2", "gemma4, own inputs", "gemma4, experts", "gpt_oss, experts"):
        model, _ = model_of(name, BFLOAT16, 0, isa, 2)
        text = tokens_of(3, 9)
        numbers = [model.numbers({0: 0}, {0: 9 + 4}, {})]
        given = (text, list(range(9)), [9], [5], model.addresses, numbers, model.native_pools)
        ((ids,), _, _) = model.model.run_ahead(*given, list(range(model.spec.num_layers)), 61)
        for i, token in enumerate(ids):
            assert token == int(model.run({1: text + ids[:i]}, {1: 0})[-1, 44:].argmax())


def test_taps_parts_and_rows_in_place_of_embeddings(isa: str) -> None:
    """A pass cut behind a block goes on from its rows; learned positions come with the first block."""
    for name in ("gpt2", "gemma3", "gemma4, own inputs"):
        model, _ = model_of(name, FLOAT32, 0, isa)
        last = model.spec.num_layers - 1
        whole = model.run({0: tokens_of(1, 6)}, {0: 0})
        first = torch.empty(6, 44)
        middle = model.run(
            {0: tokens_of(1, 6)}, {0: 0}, layers=list(range(last)), is_normed=False, taps=[(0, first.data_ptr())]
        )[:, :44].contiguous()
        assert same_bits(model.run({0: tokens_of(1, 6)}, {0: 0}, layers=[last], input=middle.data_ptr()), whole)
        embedded = first - model._addressed[1]["model.embed_positions.weight"][:6] if name == "gpt2" else first
        again = model.run({0: tokens_of(1, 6)}, {0: 0}, input=embedded.contiguous().data_ptr())
        assert bool((again - whole).abs().max() < 1e-4)


def test_attention_over_rows_of_another_width_is_refused() -> None:
    """Only the first block of a head reads an embedding beside features."""
    spec = spec_of([replace(PLAIN, pre_attention=None, attention=replace(PLAIN.attention, reads=88)), PLAIN])
    model = Native(spec, random_weights(spec, FLOAT32), FLOAT32, native.isa())
    assert "another width" in refusal(ValueError, model.run, {0: [1]}, {0: 0})


def test_a_position_that_is_not_there_is_refused(isa: str) -> None:
    model, _ = model_of("gpt2", FLOAT32, 0, isa)
    assert "no position 96" in refusal(IndexError, model.run, {0: [1]}, {0: 0}, positions=[96])
    assert "no token with the id 61" in refusal(IndexError, model.run, {0: [61]}, {0: 0})


@pytest.mark.parametrize("name", [name for name in SPECS if name != "sizes"])  # whose rows no cache of one size holds
def test_the_model_of_this_backend_computes_what_that_of_torch_does(name: str, isa: str) -> None:
    """Both as the engine has them, with its cache. A head of fewer ids has scale, cap and bias, too."""
    spec, found = SPECS[name], []
    stored = random_weights(spec, FLOAT32)
    weight = next(name for name in stored if name.endswith(("o_proj.weight", "out_proj.weight")))
    for operators in (ops_of(isa), ReferenceOps()):
        model = load_model(spec, dict(stored), operators)
        session = Session(model, max_seq_len=NUM_POSITIONS)
        rows = torch.cat((session.run({0: tokens_of(1, 9), 1: tokens_of(2, 3)}), session.run({0: [5, 6], 1: [7]})))
        hidden, logits = rows.split([spec.hidden_size, spec.vocab_size], dim=1)
        assert bool((model.logits(hidden, 40) - logits[:, :40]).abs().max() < 1e-5)
        found.append(torch.cat((rows, model.norm(hidden), model.embed(tokens_of(3, len(rows)))), dim=1))
        assert same_bits(model.weight(weight), stored[weight])
    assert float((found[0] - found[1]).norm()) < 1e-5 * float(found[1].norm())


# ------------------------------------------------------------------------------------------------------------- refusals

NOT_COMPUTED: dict[str, tuple[Any, str]] = {
    "both": (replace(PLAIN, experts=Experts(4, 2, Mlp(8), Mlp(8))), "shared expert beside a feed-forward part"),
    "norm of both": (replace(PLAIN, pre_experts=RMS), "pre_experts but of experts beside a feed-forward part"),
    "act of inputs": (replace(PLAIN, per_layer_input=LayerInput(8, "clamped_silu")), "activation clamped_silu"),
    "both of them": (replace(PLAIN, recurrence=SHORT), "block with attention and a state"),
    "odd state": (Block(RMS, recurrence=replace(DELTA, value_dim=15)), "odd value_dim, as 15"),
    "state's norm": (Block(RMS, recurrence=replace(DELTA, norm=Norm("layer"))), "norm but RMS"),
    "turned source": (replace(PLAIN, attention=Attention(2, 1, 16, rope=Rope(), sees="encoder")), "rope of an encoder"),
    "window": (replace(PLAIN, attention=Attention(2, 1, 16, window=4, sees="encoder")), "window of an encoder"),
    "odd": (replace(PLAIN, attention=Attention(2, 1, 15)), "head_dim is odd, as 15"),
    "act": (replace(PLAIN, mlp=Mlp(8, "clamped_silu", gated=False)), "activation clamped_silu without a gate"),
}


@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_what_is_not_computed_is_refused_in_a_sentence(name: str) -> None:
    block, words = NOT_COMPUTED[name]
    reason = native.extension().refusal(spec_of([PLAIN, block]))
    assert reason.startswith("the native kernels compute no ")
    assert words in reason
    assert "\n" not in reason
    with pytest.raises(ValueError, match="the native kernels compute no"):
        native.extension().make_model(ops_of(ISAS[0]).backend, spec_of([block]), False, {}, {}, {})


def test_what_is_computed_is_not_refused() -> None:
    assert [native.extension().refusal(spec) for spec in SPECS.values()] == [None] * len(SPECS)
    for rope in (Rope(kind="yarn", factor=4.0), Rope(kind="longrope", short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)):
        assert native.extension().refusal(spec_of([replace(PLAIN, attention=Attention(2, 1, 16, rope=rope))])) is None


def test_a_field_that_the_kernels_do_not_know_is_refused_unless_it_says_nothing() -> None:
    """A description that is newer than the extension is never computed as if it were older."""
    newer = dataclasses.make_dataclass("Mlp", [("new", int, 0)], bases=(Mlp,), frozen=True)
    assert native.extension().refusal(spec_of([replace(PLAIN, mlp=newer(8))])) is None
    assert "Mlp.new=3" in native.extension().refusal(spec_of([replace(PLAIN, mlp=newer(8, new=3))]))


def test_a_missing_weight_is_named() -> None:
    spec = spec_of([PLAIN])
    made = Native(spec, random_weights(spec, FLOAT32), FLOAT32, ISAS[0])
    matrices = {name: packed.handle for name, packed in made.kept.items()}
    vectors = {name: tensor.data_ptr() for name, tensor in made._addressed[0].items()}
    backend = ops_of(ISAS[0]).backend
    without = {name: matrix for name, matrix in matrices.items() if not name.endswith(".o")}
    with pytest.raises(ValueError, match=r"no product model.layers.0.o$"):
        native.extension().make_model(backend, spec, False, without, vectors, {})
    del vectors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"no weight model.norm.weight$"):
        native.extension().make_model(backend, spec, False, matrices, vectors, {})


def test_norms_are_equal_in_every_way_to_say_them() -> None:
    """An offset is added to the stored weight in float32; a norm without weights has ones."""
    weights = random_weights(SPECS["gemma3"], FLOAT32)
    plain = replace(SPECS["gemma3"], final_norm=Norm(eps=1e-6))
    folded = {**weights, "model.norm.weight": weights["model.norm.weight"] + 1}
    a = Native(SPECS["gemma3"], weights, FLOAT32, ISAS[0]).run({0: [1, 2]}, {0: 0})
    assert same_bits(a, Native(plain, folded, FLOAT32, ISAS[0]).run({0: [1, 2]}, {0: 0}))
