"""Tables 3 and 5 of Leviathan et al. 2023 (arXiv 2211.17192), measured: alpha along texts that the target writes.

Every position of a text gives one acceptance sum_x min(p, q), and alpha is their mean (Corollary 3.6, section 4.2). p
and q are what the engine would draw from: both go through its one sampling pipeline, with the same parameters.

How far acceptances are from independent is measured on the same texts. On a text x drawn from p, the mean of the
products of min(1, q(x) / p(x)) over i positions is the probability that a round accepts i tokens, whatever depends on
what; equation (1) has alpha^i in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.peers import say
from forerun.bench import latency
from forerun.bench.exhibits import Curve, Exhibit, Panel, Plot, Value, dots
from forerun.bench.tables import Column
from forerun.bench.widen import num_parameters
from forerun.drafters import artifacts, tables
from forerun.engine.llm import LLM
from forerun.kv.cache import BlockCache
from forerun.models.loading import Checkpoint
from forerun.models.runner import Run, Runner
from forerun.sampling.pipeline import probs
from forerun.theory import formulas
from forerun.theory.lenience import lenient_acceptance, lenient_greedy
from forerun.theory.published import LENIENCES, TABLE_3, TABLE_5
from forerun.theory.simulate import Estimate
from forerun.types import Probs, SamplingParams

Floats = npt.NDArray[np.float64]
Logits = Callable[[Seq[int], int], torch.Tensor]  # (ids, first) -> [n, V] logits of ids[first:]

TOKENS_PER_TEXT = 128
SETTINGS = {
    "T=0": SamplingParams(temperature=0.0),
    "T=1": SamplingParams(temperature=1.0),
    "T=1, top-k 40": SamplingParams(temperature=1.0, top_k=40),
}
T5 = ("T5-small", "T5-base", "T5-large")  # the published draft models, in the order of their sizes
GPT_RATIO = 97 / 6  # parameters of the paper's GPT-like target / of its draft model


@dataclass(frozen=True)
class Guesser:
    """A draft model or a table. num_parameters: None of a table."""

    name: str
    logits: Logits
    num_parameters: int | None = None


@dataclass
class Acceptances:
    """One guesser along all texts of one setting; each entry has an array per text, of one number per position.

    overlap: sum min(p, q). ratio: min(1, q(x) / p(x)) of the text's own token. lenient: [positions, LENIENCES].
    """

    overlap: list[Floats] = field(default_factory=list)
    ratio: list[Floats] = field(default_factory=list)
    lenient: list[Floats] = field(default_factory=list)

    @property
    def alpha(self) -> float:
        """The mean acceptance."""
        return float(np.concatenate(self.overlap).mean())

    @property
    def alpha_error(self) -> float:
        """One standard error of alpha, from text to text."""
        means = [float(one.mean()) for one in self.overlap]
        return float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan

    @property
    def alphas_by_lenience(self) -> list[float]:
        """[LENIENCES] alpha at each."""
        return [float(one) for one in np.concatenate(self.lenient).mean(axis=0)]

    def correlation(self) -> float:
        """Return the correlation of the acceptances of neighbouring positions."""
        before, after = (np.concatenate([one[cut] for one in self.overlap]) for cut in (slice(-1), slice(1, None)))
        return float(np.corrcoef(before, after)[0, 1]) if before.std() > 0 and after.std() > 0 else math.nan

    def tokens(self, gamma: int) -> Estimate:
        """Return the mean emitted tokens of rounds that begin anywhere in the texts, dependences included.

        The standard error is from text to text.
        """
        kept = [
            np.cumprod(np.lib.stride_tricks.sliding_window_view(one, gamma), axis=1)
            for one in self.ratio
            if len(one) >= gamma
        ]
        means = [float(one.sum(axis=1).mean()) for one in kept]
        error = float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        return Estimate(1 + float(np.concatenate(kept).sum(axis=1).mean()), error)


Measured = Mapping[tuple[str, str], Acceptances]  # by setting and guesser


def guessers(drafts: Seq[Checkpoint], ngram: Path | None, target: Checkpoint, longest: int) -> list[Guesser]:
    """Return unigram and bigram, where a file is named, and the draft models, the smallest first.

    Raises UserError for a file that is not of this target.
    """
    found = []
    if ngram is not None:
        arrays, _ = artifacts.load(str(ngram), tables.KIND, target.text_tokenizer.fingerprint)
        table = tables.FittedTable(arrays)
        width = target.model.config.vocab_size
        found += [Guesser(name, _table_logits(table, order, width)) for order, name in ((1, "unigram"), (2, "bigram"))]
    models = sorted(drafts, key=lambda draft: num_parameters(draft.model.config))
    for draft in models:
        size = num_parameters(draft.model.config)
        found.append(Guesser(size_name(size), _model_logits(draft, longest), size))
    return found


def size_name(size: int) -> str:
    """Return a number of parameters in words."""
    return f"{size / 1e6:.1f} M"


def _table_logits(table: tables.FittedTable, order: int, width: int) -> Logits:
    @lru_cache(8192)
    def row(token: int) -> torch.Tensor:
        ids, weights = tables.mixture(table.behind(token) if order > 1 else tables.NOTHING, table.unigram(), 1.0)
        logits = torch.full((width,), -torch.inf)
        logits[torch.from_numpy(ids)] = torch.from_numpy(np.log(weights)).float()
        return logits

    def logits(ids: Seq[int], first: int) -> torch.Tensor:
        return torch.stack([row(ids[i - 1] if order > 1 else 0) for i in range(first, len(ids))])

    return logits


def _model_logits(checkpoint: Checkpoint, longest: int) -> Logits:
    model = checkpoint.model
    cache = BlockCache.create(
        model.config.cache_shape, "contiguous", max_batch_size=1, max_seq_len=longest, dtype=model.cache_dtype
    )
    cache.open(0)
    runner = Runner(model, cache)

    def logits(ids: Seq[int], first: int) -> torch.Tensor:
        cache.truncate_to(0, 0)
        found = runner.forward([Run(0, list(ids[:-1]))]).logits[0].float()
        cache.keep({0: range(len(ids) - 1)})
        return found[first - 1 :]

    return logits


# ----------------------------------------------------------------------------------------------------------- measuring


def texts(target: Checkpoint, params: SamplingParams, num_tokens: int, seed: int) -> list[tuple[list[int], int]]:
    """Let the target write at least so many tokens behind held-out prompts; return ids, and where the prompt ends."""
    num_texts = -(-num_tokens // TOKENS_PER_TEXT)
    prompts = [text for _, text in latency.read_prompts(num_texts)]
    length = -(-num_tokens // len(prompts))
    llm = LLM(target, draft="none", max_batch_size=16, prefix_caching=False)
    given = [
        SamplingParams(
            temperature=params.temperature, top_k=params.top_k, max_tokens=length, seed=seed + i, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, given)
    return [([*output.prompt_ids, *output.token_ids], len(output.prompt_ids)) for output in outputs]


def measure(target: Checkpoint, drafts: Seq[Checkpoint], ngram: Path | None, num_tokens: int, seed: int) -> Found:
    """Write texts in every setting, and return what every guesser accepts along them."""
    written = {}
    for name, params in SETTINGS.items():
        say(f"the target writes {num_tokens:,} tokens at {name} ...")
        written[name] = texts(target, params, num_tokens, seed)
    longest = max(len(ids) for one in written.values() for ids, _ in one)
    guesses = guessers(drafts, ngram, target, longest)
    of_target = _model_logits(target, longest)
    found: dict[tuple[str, str], Acceptances] = {
        (setting, guess.name): Acceptances() for setting in SETTINGS for guess in guesses
    }
    for setting, params in SETTINGS.items():
        for i, (ids, first) in enumerate(written[setting]):
            say(f"{setting}: text {i + 1} of {len(written[setting])} ...")
            raw = of_target(ids, first)
            p = _dense(raw, params)
            soft = raw.softmax(-1).double().numpy() if params.temperature == 0 else p
            for guess in guesses:
                _add(found[setting, guess.name], ids[first:], p, soft, _dense(guess.logits(ids, first), params))
    count = sum(len(ids) - first for ids, first in written["T=1"])
    return Found(found, guesses, num_parameters(target.model.config), count)


@dataclass(frozen=True)
class Found:
    """All acceptances, whose they are, the target's parameters, and the tokens of one setting."""

    acceptances: Measured
    guessers: list[Guesser]
    target_parameters: int
    num_tokens: int


def _add(to: Acceptances, own: Seq[int], p: Floats, soft: Floats, q: Floats) -> None:
    """Add one text. p, q: [n, V]; soft: [n, V] p at temperature 1, where p is greedy."""
    at = np.arange(len(own)), np.asarray(own)
    to.overlap.append(np.minimum(p, q).sum(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        to.ratio.append(np.where(p[at] > 0, np.minimum(1.0, q[at] / p[at]), 0.0))
    if soft is p:
        rows = [[lenient_acceptance(one, two, x) for x in LENIENCES] for one, two in zip(p, q, strict=True)]
    else:
        best = q.argmax(axis=1)
        rows = [
            [float(lenient_greedy(one, x)[token]) for x in LENIENCES] for one, token in zip(soft, best, strict=True)
        ]
    to.lenient.append(np.array(rows))


def _dense(logits: torch.Tensor, params: SamplingParams) -> Floats:
    """Return [n, V] what the engine draws from."""
    found = np.zeros(tuple(logits.shape))
    for row, one in zip(found, logits, strict=True):
        _fill(row, probs(one, params))
    return found


def _fill(row: Floats, one: Probs) -> None:
    if one.point is not None:
        row[one.point] = 1.0
    elif one.ids is not None:
        row[one.ids.numpy()] = one.weights.numpy()
    else:
        row[: len(one.weights)] = one.weights.numpy()


# ------------------------------------------------------------------------------------------------------------ exhibits


def published(
    found: Found, table: Mapping[str, Any], guess: Guesser, is_gpt: bool = False, drafts: Seq[str] = T5
) -> Any:
    """Return the published entry beside a guesser: tables by name, models in the order of their sizes; None of none.

    is_gpt: of the GPT-like pair, whose one draft model stands beside the one with the nearest ratio of sizes. drafts:
    the published draft models, by size.
    """
    models = [one for one in found.guessers if one.num_parameters]
    if guess.num_parameters is None:
        return table.get(guess.name)
    if not is_gpt:
        place = models.index(guess)
        return table.get(drafts[place]) if place < len(drafts) else None

    def distance(one: Guesser) -> float:
        return abs(math.log(found.target_parameters / (one.num_parameters or 1) / GPT_RATIO))

    return table.get("GPT-like 6M") if guess is min(models, key=distance) else None


def table_3(found: Found, recipe: str) -> Exhibit:
    """Return alpha of every guesser and setting."""
    rows: list[tuple[Value, ...]] = []
    for guess in found.guessers:
        for setting in SETTINGS:
            one = found.acceptances[setting, guess.name]
            at = {"T=0": 0, "T=1": 1}.get(setting)
            beside = [
                None if at is None or pair is None else pair[at]
                for pair in (
                    published(found, TABLE_3["GPT-like 97M"], guess, is_gpt=True),
                    published(found, TABLE_3["T5-XXL EnDe"], guess),
                    published(found, TABLE_3["T5-XXL CNNDM"], guess),
                    published(found, TABLE_3["LaMDA 137B"], guess, drafts=tuple(TABLE_3["LaMDA 137B"])),
                )
            ]
            rows.append((guess.name, setting, one.alpha, one.alpha_error, *beside))
    curves = (
        dots("measured", rows, 2),
        dots("published, GPT-like 97M", rows, 4),
        dots("published, T5-XXL EnDe", rows, 5),
        dots("published, T5-XXL CNNDM", rows, 6),
        dots("published, LaMDA 137B", rows, 7),
    )
    return Exhibit(
        "table-3",
        "Table 3: alpha by draft and sampling",
        (
            Column("draft"),
            Column("sampling"),
            Column("alpha", form="{:.3f}"),
            Column("+-", form="{:.3f}"),
            Column("published,\nGPT-like 97M", form="{:.2f}"),
            Column("published,\nT5-XXL EnDe", form="{:.2f}"),
            Column("published,\nT5-XXL CNNDM", form="{:.2f}"),
            Column("published,\nLaMDA 137B", form="{:.2f}"),
        ),
        rows,
        Plot([Panel("", "alpha", "", curves, [f"{row[0]}, {row[1]}" for row in rows], x_limit=1)]),
        f"alpha: mean of sum min(p, q) over {found.num_tokens:,} tokens that the target, of "
        f"{size_name(found.target_parameters)} parameters, wrote in each setting; +-: one standard error, from text to "
        "text. Published: of other models and texts: unigram and bigram beside theirs, T5-small, base and large "
        "and LaMDA 100M, 2B and 8B beside the draft "
        "models in the order of their sizes, GPT-like 6M beside the one with the nearest ratio of sizes. LaMDA always "
        "samples through top-k 40.",
        recipe,
    )


def table_5(found: Found, recipe: str) -> Exhibit:
    """Return alpha by lenience, at temperature 1 and, by the largest probability, at 0."""
    rows: list[tuple[Value, ...]] = []
    for setting in ("T=1", "T=0"):
        for guess in found.guessers:
            own = found.acceptances[setting, guess.name].alphas_by_lenience
            beside = published(found, TABLE_5, guess) if setting == "T=1" else None
            price = own[-1] - own[0] if setting == "T=1" else None
            rows.append((guess.name, setting, *own, price, *(beside or [None] * len(LENIENCES))))
    curves = [
        Curve(str(row[0]), LENIENCES, [float(str(value)) for value in row[2:6]]) for row in rows if row[1] == "T=1"
    ]
    return Exhibit(
        "table-5",
        "Table 5: alpha by lenience",
        (
            Column("draft"),
            Column("T"),
            *(Column(f"l={x:g}", form="{:.3f}") for x in LENIENCES),
            Column("TV at\n.1", form="{:.3f}"),
            *(Column(f"publ.\nl={x:g}", form="{:.2f}") for x in LENIENCES),
        ),
        rows,
        Plot([Panel("temperature 1", "lenience l", "alpha", curves, y_limit=1, x_limit=1)]),
        f"Over the {found.num_tokens:,} tokens of table 3. T=1: mean of sum min(p / l, q); TV at .1: what that costs, "
        "the total variation distance to the target at a tested position. T=0: share of the draft's likeliest tokens "
        "with p >= l max p, where the paper prints <=. Published (T5-XXL, EnDe, T=1) in the order of sizes.",
        recipe,
    )


def independence(found: Found, spec_lengths: Seq[int], recipe: str) -> Exhibit:
    """Return what equation (1) says of a round, beside what the texts say without assuming independence."""
    rows: list[tuple[Value, ...]] = []
    for setting in ("T=0", "T=1"):
        for guess in found.guessers:
            one = found.acceptances[setting, guess.name]
            for gamma in spec_lengths:
                by_formula, along = formulas.expected_tokens(one.alpha, gamma), one.tokens(gamma)
                correlation = one.correlation() if gamma == spec_lengths[0] else None
                more = along.mean / by_formula - 1
                rows.append((guess.name, setting, gamma, one.alpha, by_formula, *along, more, correlation))
    curves = (dots("equation (1)", rows, 4), dots("along the texts", rows, 5))
    return Exhibit(
        "independence",
        "Tokens of a round: independent acceptances, and those of the texts",
        (
            Column("draft"),
            Column("T"),
            Column("K"),
            Column("alpha", form="{:.3f}"),
            Column("equation\n(1)", form="{:.3f}"),
            Column("along\ntexts", form="{:.3f}"),
            Column("+-", form="{:.3f}"),
            Column("more", form="{:+.1%}"),
            Column("neighbours'\ncorrelation", form="{:+.2f}"),
        ),
        rows,
        Plot([Panel("", "tokens of a round", "", curves, [f"{row[0]}, {row[1]}, K={row[2]}" for row in rows])]),
        "along texts: mean, over rounds that begin anywhere in the texts of table 3, of products of min(1, q / p): it "
        "assumes nothing; +-: one standard error, from text to text. correlation: of the acceptances of neighbouring "
        "tokens. Rounds of an engine begin behind the token that ended the round before, not anywhere.",
        recipe,
    )
