"""States of recurrent blocks: the bits of every token and state, however its tokens came.

A text is computed in one pass, and again in silent chunks, chains and trees of which some rows are rejected, beside
other sequences; states are written on the way where kv/states.py wants them, and sequences begin with those of others.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from forerun import native
from forerun.blocks import STATE_TOKENS, Mlp, Recurrence, Spec, weights
from forerun.config import Quantization
from forerun.errors import InternalError
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner
from forerun.ops.cpu.memory import NativeSizes
from forerun.ops.cpu.model import CpuModel
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch_tensors import tensor_of
from ops.native_blocks import DELTA, GATED, NUM_POSITIONS, RMS, SHORT, Native, spec_of, with_state
from ops.native_cases import FLOAT32, ISAS, needs_native, ops_of, seeded, several_sets
from tensors import load_model

pytestmark = needs_native
NUM_TOKENS, NUM_IDS = 150, 61
TEXT = torch.randint(NUM_IDS, (NUM_TOKENS,), generator=seeded(7)).tolist()
WIDE = Recurrence("gated_delta", 4, 2, 4, 32, 64, RMS)
SPECS = {
    "delta": spec_of([with_state(DELTA), GATED, with_state(replace(DELTA, decay="negative", grouped=False))],
                     max_positions=256),
    "wide": replace(spec_of([replace(with_state(WIDE), mlp=Mlp(64)), replace(GATED, mlp=Mlp(64))], hidden_size=64),
                    max_positions=256),
    "short": spec_of([with_state(SHORT), with_state(replace(SHORT, conv=4, biases=True)), GATED], max_positions=256),
    "alone": spec_of([with_state(DELTA), with_state(SHORT)], max_positions=256),
}  # fmt: skip
every_spec = pytest.mark.parametrize("name", SPECS)


def weights_of(spec: Spec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator, found = seeded(3), {}
    for weight in weights(spec):
        made = torch.randn(weight.shape, generator=generator) * 0.25
        if weight.name.endswith("A_log.weight"):
            made = -made.exp()
        found[weight.name] = (made + ("norm" in weight.name)).to(dtype)
    return found


@cache
def model_of(name: str, dtype: torch.dtype, isa: str, num_threads: int = 1, *, rounds: bool = False) -> CpuModel:
    model: CpuModel = load_model(SPECS[name], weights_of(SPECS[name], dtype), ops_of(isa, num_threads))
    return model.rounded(Quantization(4, 32)) if rounds else model


def new_runner(model: Any, kept: str | None = None) -> Runner:
    """A runner whose states, and rows of inputs, are NaN until they are written."""
    options: dict[str, Any] = {} if kept is None else {"dtype": kept}
    cache = BlockCache.of(model, "paged", max_batch_size=4, max_seq_len=256, **options)
    for pool in cache.pools.states.values():
        for part in (pool.states, pool.history, pool.inputs, pool.gates):
            numbers = part if isinstance(part, torch.Tensor) else tensor_of(part)
            numbers.view(torch.int8).fill_(-1) if numbers.numel() else None
    return Runner(model, cache)


def whole(model: Any, kept: str | None = None) -> np.ndarray[Any, Any]:
    """Logits of the text in one pass, all of whose rows may be judged."""
    runner = new_runner(model, kept)
    runner.cache.open(0)
    return np.asarray(runner.forward([Run(0, TEXT, "all")]).logits[0])


@dataclass
class Composer:
    """Feeds the text to slot 1, in pieces that a seed decides, with other sequences beside it."""

    runner: Runner
    seed: int
    length: int = 0
    logits: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    others: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for slot in (0, 1, 2):
            self.runner.cache.open(slot)

    def run(self) -> None:
        while self.length < NUM_TOKENS:
            left = NUM_TOKENS - self.length
            kind = self.random.choice(["silent", "chain", "chain", "tree"])
            num = min(left, self.random.choice([1, 1, 2, 3, 5, 17, 40] if kind == "silent" else [1, 2, 4, 8, 21]))
            self.feed(*getattr(self, kind)(num))
            self.runner.cache.publish(1, TEXT[: self.length])
            self.runner.cache.check_integrity()

    def silent(self, num: int) -> tuple[Run, list[int]]:
        return Run(1, TEXT[self.length : self.length + num], "none"), list(range(num))

    def chain(self, num: int) -> tuple[Run, list[int]]:
        right = self.random.randrange(1, num + 1)
        guessed = TEXT[self.length : self.length + right] + [self.random.randrange(NUM_IDS) for _ in range(num - right)]
        return Run(1, guessed, "all"), list(range(right))

    def tree(self, num: int) -> tuple[Run, list[int]]:
        """The text's next tokens with wrong ones beside and between them, and behind those."""
        tokens = list[int]()
        parents = list[int]()
        path = list[int]()
        last = -1
        for i in range(num):
            for _ in range(self.random.choice([0, 0, 1, 2]) if tokens else 0):
                tokens.append(self.random.randrange(NUM_IDS))
                parents.append(self.random.choice([last, len(tokens) - 2]))
            tokens.append(TEXT[self.length + i])
            parents.append(last)
            last = len(tokens) - 1
            path.append(last)
        return Run(1, tokens, "all", parents), path

    def feed(self, run: Run, path: list[int]) -> None:
        """Half of the trees come in two passes, the first of which leaves its rows pending."""
        rows = list[np.ndarray[Any, Any]]()
        if run.parents is not None and len(run.tokens) > 3 and self.random.random() < 0.5:
            cut = self.random.randrange(1, len(run.tokens) - 1)
            first = Run(1, run.tokens[:cut], "all", run.parents[:cut], pending=True)
            rows += list(np.asarray(self.runner.forward([first]).logits[0]))
            run = Run(1, run.tokens[cut:], "all", run.parents[cut:])
        runs, kept = [run], {1: path}
        if self.others < 90 and self.random.random() < 0.5:
            self.others += (num := self.random.choice([1, 6, 19]))
            other = Run(self.random.choice([0, 2]), TEXT[-num:], self.random.choice(["all", "none"]))
            runs.insert(self.random.randrange(2), other)
            kept[other.slot] = list(range(num))
        rows += list(np.asarray(self.runner.forward(runs).logits[runs.index(run)]))
        if run.logits != "none":
            self.logits |= {self.length + i: rows[row] for i, row in enumerate(path)}
        self.runner.cache.keep(kept)
        self.length += len(path)


def states_of(cache: Any, slot: int) -> Iterator[bytes]:
    """The state that a slot stands on, and the inputs before it, of each recurrent layer."""
    states = cache.states
    for pool in cache.pools.states.values():
        yield from (part.values[states._lines[slot].state].tobytes() for part in (pool.states, pool.history))


def check(model: CpuModel, expected: np.ndarray[Any, Any], kept: str | None = None, seeds: int = 3) -> None:
    """Compositions of the text, and what a sequence finds that begins where they ended."""
    states = set()
    for seed in range(seeds):
        composer = Composer(new_runner(model, kept), seed)
        composer.run()
        for i, row in composer.logits.items():
            assert row.tobytes() == expected[i].tobytes(), (seed, i)
        assert len(composer.logits) > NUM_TOKENS // 4
        cache = composer.runner.cache
        composer.runner.forward([Run(1, [1], "none")])  # the last whole block is written by the pass behind it
        cache.keep({1: [0]})
        states.add(tuple(states_of(cache, 1)))
        cache.release(1)
        begun = cache.open(3, TEXT)
        assert begun == NUM_TOKENS // STATE_TOKENS * STATE_TOKENS
        rows = np.asarray(composer.runner.forward([Run(3, TEXT[begun:], "all")]).logits[0])
        assert rows.tobytes() == expected[begun:].tobytes()
        cache.check_integrity()
    assert len(states) == 1


@every_spec
def test_bits_do_not_depend_on_how_tokens_came(name: str, dtype: torch.dtype, isa: str) -> None:
    expected = whole(model_of(name, dtype, isa))
    assert bool(np.isfinite(expected).all())
    check(model_of(name, dtype, isa), expected)
    check(model_of(name, dtype, isa, 3), expected, seeds=2)


@pytest.mark.parametrize("kept", ["float32", "int8"])
def test_in_a_cache_of_another_type(kept: str, isa: str) -> None:
    """In one of 8 bits inputs are bfloat16."""
    model = model_of("wide", torch.bfloat16, isa, 2)
    check(model, whole(model, kept), kept, seeds=1)


def test_with_weights_of_four_bits(isa: str) -> None:
    model = model_of("wide", torch.bfloat16, isa, 2, rounds=True)
    assert model.weight_bits == (4, 8)
    check(model, whole(model))


@several_sets
@pytest.mark.parametrize("rounds", [False, True])
@every_spec
def test_sets_have_the_same_bits(name: str, dtype: torch.dtype, rounds: bool) -> None:
    rounds = rounds and name == "wide"
    first, *others = (whole(model_of(name, dtype, isa, rounds=rounds)) for isa in ISAS)
    assert all(other.tobytes() == first.tobytes() for other in others)


@every_spec
def test_the_reference_computes_the_same(name: str, isa: str) -> None:
    """Of several blocks of tokens, whose states the reference goes through one token after the other."""
    expected = whole(load_model(SPECS[name], weights_of(SPECS[name], FLOAT32), ReferenceOps()))
    found = whole(model_of(name, FLOAT32, isa))
    assert float(np.linalg.norm(found - expected)) < 1e-5 * float(np.linalg.norm(expected))


STATE, ROW, LAST = 0, 5, 3 * NUM_POSITIONS - 1  # places that `Native` has: one state, and rows of three sequences
WRONG = {
    "no numbers": ([], "a state or a row that recurrent layers have not"),
    "no such state": ([1, 0, 0, 0, ROW, ROW], "a state or a row that recurrent layers have not"),
    "no such row": ([-1, 0, 0, 0, ROW, LAST + 1], "a state or a row that recurrent layers have not"),
    "more before than cached": ([-1, 1, 0, 0, ROW, ROW, ROW], "more tokens behind a state than it has"),
    "pending of a chain": ([-1, 0, 1, 0, ROW, ROW, ROW], "pending rows of recurrent layers are those of a tree"),
    "a state inside of a block": ([-1, 0, 0, 1, ROW, LAST, 2, STATE], "where a block of tokens is whole"),
    "a state of more tokens": ([-1, 0, 0, 1, ROW, LAST, 3, STATE], "a state or a row that recurrent layers have not"),
    "numbers behind": ([-1, 0, 0, 0, ROW, LAST, 7], "numbers of other runs"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_places_that_are_not_there_are_refused(wrong: str) -> None:
    """What leads out of the pools, or is no end of a block, never reaches the kernels."""
    model = Native(SPECS["delta"], weights_of(SPECS["delta"], FLOAT32), FLOAT32, ISAS[0])
    numbers, words = WRONG[wrong]
    with pytest.raises(InternalError, match=words):
        model.run({0: [1, 2]}, {0: 0}, states=numbers)
    model.run({0: [1, 2]}, {0: 0}, states=[-1, 0, 0, 0, ROW, LAST])


def test_blocks_of_states_are_the_same_in_both_languages() -> None:
    assert native.extension().STATE_TOKENS == STATE_TOKENS


@every_spec
def test_a_run_goes_on_as_one_pass_for_each_token_would(name: str, dtype: torch.dtype, isa: str) -> None:
    """Behind catching up with few tokens and many, two sequences at once, of which not all that was fed is kept."""
    model = model_of(name, dtype, isa, 2)
    runner, plain = new_runner(model), new_runner(model)
    texts: dict[int, list[int]] = {0: [], 1: []}
    for slot in texts:
        runner.cache.open(slot)
    for step, (own, other, num) in enumerate([(5, 1, 6), (3, 40, 9), (20, 2, 20), (140, 1, 3), (1, 1, 17), (2, 16, 1)]):
        fed = {0: TEXT[:own], 1: TEXT[step : step + other]}
        ahead = runner.run_ahead([Run(slot, tokens) for slot, tokens in fed.items()], [num, num + 2])
        for (slot, tokens), ids in zip(fed.items(), ahead.ids, strict=True):
            texts[slot] += tokens
            plain.cache.open(9)
            logits = np.asarray(plain.forward([Run(9, texts[slot] + ids[:-1])]).logits[0])
            plain.cache.release(9)
            assert [int(row.argmax()) for row in logits[len(texts[slot]) - 1 :]] == ids, (step, slot)
            num_kept = min(len(ids) - 1, step)
            runner.cache.keep({slot: range(len(tokens) + num_kept)})
            texts[slot] += ids[:num_kept]
        runner.cache.check_integrity()
    for slot, text in texts.items():
        plain.cache.open(9)
        expected = np.asarray(plain.forward([Run(9, [*text, 1])]).logits[0])[-1]
        plain.cache.release(9)
        assert np.asarray(runner.forward([Run(slot, [1])]).logits[0])[0].tobytes() == expected.tobytes()


def test_weights_take_what_is_planned() -> None:
    """Beside what is stored: the weights of convolutions by input, decays, and the inputs of no token."""
    spec = SPECS["delta"]
    model = model_of("delta", FLOAT32, ISAS[0])
    matrices = sum(matrix.nbytes for matrix in model.matrices.values())
    vectors = sum(vector.nbytes for vector in model._vectors.values())
    (part,) = NativeSizes("float32", 256, 2).weights({"target": spec})
    width = DELTA.width(spec.hidden_size)
    assert part.bytes == matrices + vectors + 4 * (2 * width * DELTA.conv + DELTA.value_heads + width)


@pytest.mark.parametrize("num_rows", [1, 8, 300])
def test_buffers_of_a_pass_are_counted(num_rows: int) -> None:
    """Heads of large states, whose buffers are most of what a pass takes."""
    large = Recurrence("gated_delta", 4, 1, 2, 256, 512, RMS)
    counted = [
        int(native.extension().pass_bytes(native.isa(), spec, False, False, num_rows, 256, 2))
        for spec in (spec_of([with_state(large), GATED]), spec_of([with_state(replace(large, value_dim=16)), GATED]))
    ]
    assert counted[0] - counted[1] > 2 * 2 * 4 * 256 * 496 + 4 * num_rows * 2 * 2 * 496  # states of threads, and rows
