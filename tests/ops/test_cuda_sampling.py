"""Draws on the device are those of the host's pipeline, bit for bit, and so are an engine's texts.

They run on a card where there is one, and else under Triton's interpreter.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.errors import InternalError
from forerun.models.runner import Run, Runner
from forerun.ops import cuda
from forerun.ops.cuda import sampling as cuda_sampling
from forerun.ops.cuda.sampling import Cuts, Drawn, Field, Sampler, fill
from forerun.sampling import arithmetic, filters_of, probs
from forerun.sampling.random import PhiloxCoins
from forerun.types import Draw, Probs
from ops.native_cases import seeded
from ops.test_cuda import DEVICE, needs_triton, operators
from tiny import write_tiny

pytestmark = [needs_triton, pytest.mark.usefixtures("operators")]  # which are interpreted where there is no card
__all__ = ["operators"]  # a fixture


def drawn(logits: Tensor, draws: list[Draw], depth: int, part_ids: int) -> Drawn:
    """Draw from rows with parts of so many ids."""
    numbers = np.zeros((len(Field), len(draws)), dtype=np.int64)
    fill(numbers, draws, logits.shape[1])
    sampler = Sampler(cuda.CudaOps().largest_in_parts, part_ids=part_ids)
    depths = torch.full((len(draws),), depth, dtype=torch.int32, device=DEVICE)
    settings = torch.from_numpy(numbers).to(DEVICE)
    return sampler.draw(logits.to(DEVICE), settings, depths, Cuts.of(draws, logits.shape[1]))


def spelled(found: Probs, width: int) -> Tensor:
    """A distribution as a vector."""
    if found.ids is None:
        return torch.from_numpy(found.weights)
    return torch.zeros(width).index_copy(0, torch.from_numpy(found.ids), torch.from_numpy(found.weights))


def rows_of(width: int) -> list[Tensor]:
    """A peaked row, a flat one, one with many ties, and one in which most ids are impossible."""
    generator = seeded(width)
    flat, ties, rare = (torch.randn(width, generator=generator) for _ in range(3))
    ties = (ties * 2).round() / 2
    rare[torch.arange(width) % 7 > 0] = -math.inf
    return [flat * 5, flat, ties, rare]


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1e-5, "top_p": 1e-7},
]


@pytest.mark.parametrize(("width", "part_ids"), [(300, 128), (4997, 4096)])
@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: " ".join(f) or "none")
def test_a_draw_has_the_bits_of_the_host(width: int, part_ids: int, filters: dict[str, Any]) -> None:
    """Both kinds of draws from every kind of row, at a depth behind the first token."""
    params = SamplingParams(**{"temperature": 1.0, **filters})
    rows, draws, expected = list[Tensor](), list[Draw](), list[tuple[Tensor, int]]()
    for i, row in enumerate(rows_of(width)):
        coins = PhiloxCoins(2**64 - 1 - 77 * i, 1000 + i, 3)
        made = probs(row, params)
        for shares_noise in (True, False):
            rows.append(row)
            draws.append(coins.ahead(filters_of(params, width), shares_noise))
            expected.append((spelled(made, width), (coins.pick if shares_noise else coins.draft)(made, 2)))
    found = drawn(torch.stack(rows), draws, 2, part_ids)
    for i, (own, id_) in enumerate(expected):
        assert torch.equal(found.probs[i].cpu(), own), (filters, i)
        assert int(found.ids[i]) == id_, (filters, i)
        assert float(found.chances[i]) == float(own[id_])
        assert int(found.best[i]) == int(rows[i].argmax())


def test_a_draw_from_a_wide_row_counts_in_the_ticks_of_the_host() -> None:
    """A vector of 2^18 ids has coarser ticks than a list of few; the list is what the host makes of it."""
    width = 1 << 18
    row = torch.randn(width, generator=seeded(1))
    rows, draws, expected = list[Tensor](), list[Draw](), list[int]()
    for round_, filters in enumerate(({}, {"top_k": 30})):
        params, coins = SamplingParams(temperature=1.0, **filters), PhiloxCoins(5, 9, round_)
        rows.append(row)
        draws.append(coins.ahead(filters_of(params, width), shares_noise=False))
        expected.append(coins.draft(probs(row, params), 0))
    assert drawn(torch.stack(rows), draws, 0, width).ids.tolist() == expected


def test_rows_that_take_the_likeliest_id_and_rows_without_numbers() -> None:
    logits = torch.randn(4, 300, generator=seeded(2))
    logits[1, 7] = torch.nan
    logits[2, 7] = torch.inf
    logits[3, 250] = logits[3, 260] = 50.0
    coins = PhiloxCoins(1, 2, 3)
    greedy = coins.ahead(filters_of(SamplingParams(temperature=0), 300), shares_noise=False)
    warm = coins.ahead(filters_of(SamplingParams(temperature=1.0), 300), shares_noise=True)
    found = drawn(logits, [greedy, warm, greedy, greedy], 0, 128)
    assert found.ids.tolist() == found.best.tolist() == [int(logits[0].argmax()), -1, -1, 250]


# ------------------------------------------------------------------------------------------------------------- engines


ON_DEVICE: Any = {"ops": "cuda", "device": DEVICE.type, "max_seq_len": 64, "dtype": "float32"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A random target, and a draft model that resembles it."""
    folder = tmp_path_factory.mktemp("drawn")
    return tuple(str(write_tiny(folder / n, num_layers=1, inner_scale=s)) for n, s in (("t", 0.05), ("d", 0.3)))  # type: ignore[return-value]


def texts(
    pair: tuple[str, str], draft: str, params: SamplingParams, unwritten: frozenset[int] = frozenset()
) -> list[tuple[int, ...]]:
    """What an engine says, with the nodes that it drafted and accepted. unwritten: ids that no draft keeps."""
    options = {} if draft == "none" else {"pacing": "fixed", "spec_length": 3}
    draft = draft.replace("MODEL", f"model:path={pair[1]}")
    with LLM(pair[0], draft=draft, max_batch_size=2, **ON_DEVICE, **options) as llm:
        llm.engine.drafter.unwritten = unwritten
        found = llm.generate(["abc hello", "abcabcabcab"], params, raw=True)
        return [(o.report.num_drafted, o.report.num_accepted, *o.token_ids) for o in found]


def bring_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every row come to the host."""
    for name in ("draws_rows", "draws_ahead"):
        monkeypatch.setattr(Runner, name, False)


@pytest.mark.parametrize(
    ("draft", "rule", "filters"),
    [
        ("none", "ratio", {"top_p": 0.9}),
        ("MODEL", "match", {}),
        ("MODEL", "ratio", {"top_k": 40}),
        ("MODEL", "block", {}),
        ("lookup", "ratio", {}),
    ],
)
def test_an_engine_says_what_it_says_where_rows_come_to_the_host(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, draft: str, rule: str, filters: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=3.0, seed=5, max_tokens=7, ignore_eos=True, acceptance=rule, **filters)
    num_drawn = 0
    draw = Runner._drawn

    def counted(self: Runner, *args: Any) -> Any:
        nonlocal num_drawn
        num_drawn += 1
        return draw(self, *args)

    monkeypatch.setattr(Runner, "_drawn", counted)
    found = texts(pair, draft, params)
    assert num_drawn > 0, "rows came to the host"
    bring_rows(monkeypatch)
    num_drawn = 0
    assert texts(pair, draft, params) == found
    assert num_drawn == 0
    assert draft == "none" or any(drafted > accepted for drafted, accepted, *_ in found), "nothing was rejected"


@pytest.mark.parametrize("rule", ["ratio", "match"])
def test_drafts_without_ids_that_are_never_written_are_those_of_the_host(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """A token that stays was drawn on the condition that it is none of them, and the rule must be told so."""
    params = SamplingParams(temperature=3.0, seed=5, max_tokens=7, ignore_eos=True, acceptance=rule)
    unwritten = frozenset(range(0, 257, 2))
    found = texts(pair, "MODEL", params, unwritten)
    bring_rows(monkeypatch)
    assert texts(pair, "MODEL", params, unwritten) == found
    assert any(drafted for drafted, *_ in found)


def test_the_constants_of_kernels_are_those_of_the_host() -> None:
    """A wrong digit far behind the point changes no row that a test would draw."""
    source = Path(cuda_sampling.__file__).with_name("sampling_kernels.py").read_text(encoding="utf-8")
    numbers = {float(number) for number in re.findall(r"\d\.\d{5,}(?:e[-+]\d+)?|\d\.\d+e[-+]\d+", source)}
    assert {*arithmetic._LOG_EVEN, *arithmetic._LOG_ODD, arithmetic._LOG_LN2_HIGH, arithmetic._LOG_LN2_LOW} <= numbers
    assert {float(c) for c in arithmetic._EXP_POLYNOMIAL} <= {float(np.float32(number)) for number in numbers}


def test_a_row_that_was_drawn_over_is_not_read(pair: tuple[str, str]) -> None:
    """The weights of a row may be asked for until the next draws from its model, and are then refused."""
    with LLM(pair[0], draft="none", **ON_DEVICE) as llm:
        runner = llm.engine.runner
        runner.cache.open(0)
        draw = PhiloxCoins(1, 3, 0).behind(filters_of(SamplingParams(temperature=1.0), 257), True, 0)
        first = runner.forward([Run(0, [1, 2, 3], "last", draws=[draw], asked=[[5]])])
        weights = first.drawn[0][0].weights
        assert float(weights.sum()) == pytest.approx(1, abs=1e-5)
        assert first.drawn[0][0].at(5) == float(weights[5])
        again = runner.forward([Run(0, [1, 2, 3], "last", draws=[draw])])
        runner.forward([Run(0, [1, 2, 3], "last", draws=[draw])])
        with pytest.raises(InternalError, match="behind the next draws"):
            _ = again.drawn[0][0].weights
