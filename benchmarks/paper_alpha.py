"""Alpha along texts that the target writes, for Tables 3 and 5 of Leviathan et al. 2023 (arXiv 2211.17192).

Every position of a text gives one acceptance sum_x min(p, q), and alpha is their mean (Corollary 3.6, section 4.2). p
and q are what the engine would draw from: both go through its one sampling pipeline, with the same parameters.

How far acceptances are from independent is measured on the same texts. On a text x drawn from p, the mean of the
products of min(1, q(x) / p(x)) over i positions is the probability that a round accepts i tokens, whatever depends on
what; equation (1) has alpha^i in its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.paper_tasks import Task
from benchmarks.peers import say
from forerun.bench import latency
from forerun.bench.widen import num_parameters
from forerun.drafters.shared import artifacts, tables
from forerun.engine.llm import LLM
from forerun.errors import InternalError
from forerun.kv.cache import BlockCache
from forerun.models.loading import Checkpoint
from forerun.models.runner import Run, Runner
from forerun.sampling.pipeline import probs
from forerun.theory.lenience import lenient_acceptance, lenient_greedy
from forerun.theory.published import LENIENCES
from forerun.theory.simulate import Estimate
from forerun.train.ngram import fitted
from forerun.types import Probs, SamplingParams

Floats = npt.NDArray[np.float64]


class Text(NamedTuple):
    """Ids that were written from `first` on. source: what the encoder of an encoder-decoder reads."""

    ids: list[int]
    first: int
    source: tuple[int, ...] = ()

    @property
    def own(self) -> list[int]:
        """What was written."""
        return self.ids[self.first :]


Logits = Callable[[Text], torch.Tensor]  # -> [n, V] logits of what was written

TOKENS_PER_TEXT = 128
BATCH_SIZE = 16  # of the target while it writes
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


def guessers(
    drafts: Mapping[str, Checkpoint], table: tables.FittedTable | None, target: Checkpoint, longest: int
) -> list[Guesser]:
    """Return unigram and bigram, where there is a table, and the draft models, which are the smallest first.

    longest: tokens of a text, and of a source.
    """
    found = []
    if table is not None:
        width = target.model.config.vocab_size
        found += [Guesser(name, _table_logits(table, order, width)) for order, name in ((1, "unigram"), (2, "bigram"))]
    for name, draft in drafts.items():
        found.append(Guesser(name, _model_logits(draft, longest), num_parameters(draft.model.config)))
    return found


def named_by_size(drafts: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """Return draft models by their sizes in words, the smallest first; of equal ones with what they were called."""
    ordered = sorted(drafts.items(), key=lambda one: num_parameters(one[1].model.config))
    sizes = [size_name(num_parameters(draft.model.config)) for _, draft in ordered]
    return {
        size if sizes.count(size) == 1 else f"{size} {name}": draft
        for size, (name, draft) in zip(sizes, ordered, strict=True)
    }


def size_name(size: int) -> str:
    """Return a number of parameters in words."""
    return f"{size / 1e6:.1f} M" if size >= 100_000 else f"{size / 1e3:.0f} k"


def load_table(file: Path, target: Checkpoint) -> tables.FittedTable:
    """Return what a file of `forerun train ngram` has counted. Raises UserError for one that is not of this target."""
    arrays, _ = artifacts.load(str(file), tables.KIND, target.text_tokenizer.fingerprint)
    return tables.FittedTable(arrays)


def counted(references: Seq[str], target: Checkpoint, start_ids: Seq[int]) -> tables.FittedTable:
    """Count tokens and pairs of tokens in answers, as the target's decoder would have them."""
    tokenizer, end = target.text_tokenizer, sorted(target.end_ids)[:1]
    answers = [[*start_ids, *tokenizer.encode(text, add_special_tokens=False), *end] for text in references]
    return tables.FittedTable(fitted(answers, target.model.config.vocab_size, 2).arrays(tables.MOST_IDS))


def _table_logits(table: tables.FittedTable, order: int, width: int) -> Logits:
    @lru_cache(8192)
    def row(token: int) -> torch.Tensor:
        ids, weights = tables.mixture(table.behind(token) if order > 1 else tables.NOTHING, table.unigram(), 1.0)
        logits = torch.full((width,), -torch.inf)
        logits[torch.from_numpy(ids)] = torch.from_numpy(np.log(weights)).float()
        return logits

    def logits(text: Text) -> torch.Tensor:
        return torch.stack([row(text.ids[i - 1] if order > 1 else 0) for i in range(text.first, len(text.ids))])

    return logits


def _model_logits(checkpoint: Checkpoint, longest: int) -> Logits:
    model, tokenizer = checkpoint.model, checkpoint.text_tokenizer
    cache = BlockCache.of(
        model, "contiguous", max_batch_size=model.config.num_slots, max_seq_len=longest, prefix_caching=False
    )
    runner = Runner(model, cache, min(tokenizer.num_ids, model.config.vocab_size), sorted(tokenizer.holes))

    def logits(text: Text) -> torch.Tensor:
        cache.open(0)
        try:
            if runner.sources is not None:
                runner.sources.open(0, text.source, None)
                runner.sources.run([0])
            return torch.from_numpy(runner.forward([Run(0, text.ids[:-1])]).logits[0])[text.first - 1 :]
        finally:
            cache.release(0)
            if runner.sources is not None:
                runner.sources.release(0)

    return logits


# ----------------------------------------------------------------------------------------------------------- measuring


def texts(llm: LLM, params: SamplingParams, num_tokens: int, seed: int, task: Task | None = None) -> list[Text]:
    """Let a model write at least so many tokens, behind held-out prompts or, of a task, to its sources.

    Answers end where the model ends them; they are fewer tokens where a greedy model has answered all sources.
    """
    if task is not None:
        return _answers(llm, params, num_tokens, seed, task)
    num_texts = -(-num_tokens // TOKENS_PER_TEXT)
    room = llm.checkpoint.model.config.max_positions - TOKENS_PER_TEXT
    encode = llm.checkpoint.text_tokenizer.encode
    prompts = [text for _, text in latency.read_prompts(1_000_000) if len(encode(text)) < room][:num_texts]
    length = -(-num_tokens // len(prompts))
    given = [replace(params, max_tokens=length, seed=seed + i, ignore_eos=True) for i in range(len(prompts))]
    outputs = llm.generate(prompts, given)
    return [Text([*output.prompt_ids, *output.token_ids], len(output.prompt_ids)) for output in outputs]


def _answers(llm: LLM, params: SamplingParams, num_tokens: int, seed: int, task: Task) -> list[Text]:
    found = list[Text]()
    missing = num_tokens
    start_ids = list(llm.engine.start_ids)
    for turn in itertools.count():
        if turn > 0 and params.temperature == 0:
            return found
        for i in range(0, len(task.measured), BATCH_SIZE):
            sources = task.measured[i : i + BATCH_SIZE]
            seeds = [seed + turn * len(task.measured) + i + j for j in range(len(sources))]
            given = [replace(params, max_tokens=TOKENS_PER_TEXT, seed=own) for own in seeds]
            for output in llm.generate(sources, given):
                found.append(Text([*start_ids, *output.token_ids], len(start_ids), tuple(output.prompt_ids)))
                missing -= len(output.token_ids)
            if missing <= 0:
                return found
    raise InternalError("turns have no end")


def measure(
    target: Checkpoint,
    drafts: Mapping[str, Checkpoint],
    ngram: Path | None,
    num_tokens: int,
    seed: int,
    task: Task | None = None,
) -> Found:
    """Write texts in every setting, and return what every guesser accepts along them.

    drafts: by name, the smallest first. ngram: a file with counts of tokens; where there is none they are counted in
    the references of a task that has some.
    """
    llm = LLM(target, draft="none", max_batch_size=BATCH_SIZE, prefix_caching=False)
    table = None if ngram is None else load_table(ngram, target)
    if table is None and task is not None and task.counted:
        table = counted(task.counted, target, llm.engine.start_ids)
    written = {}
    for name, params in SETTINGS.items():
        say(f"{task.name + ': ' if task is not None else ''}the target writes {num_tokens:,} tokens at {name} ...")
        written[name] = texts(llm, params, num_tokens, seed, task)
    longest = max(max(len(text.ids), len(text.source)) for one in written.values() for text in one)
    guesses = guessers(drafts, table, target, longest)
    of_target = _model_logits(target, longest)
    found: dict[tuple[str, str], Acceptances] = {
        (setting, guess.name): Acceptances() for setting in SETTINGS for guess in guesses
    }
    for setting, params in SETTINGS.items():
        for i, text in enumerate(written[setting]):
            if i % BATCH_SIZE == 0:
                say(f"{setting}: text {i + 1} of {len(written[setting])} ...")
            raw = of_target(text)
            p = _dense(raw, params)
            soft = raw.softmax(-1).double().numpy() if params.temperature == 0 else p
            for guess in guesses:
                _add(found[setting, guess.name], text.own, p, soft, _dense(guess.logits(text), params, p.shape[1]))
    counts = [sum(len(text.own) for text in own) for own in written.values()]
    return Found(found, guesses, num_parameters(target.model.config), counts)


@dataclass(frozen=True)
class Found:
    """All acceptances, whose they are, the target's parameters, and the tokens of each setting."""

    acceptances: Measured
    guessers: list[Guesser]
    target_parameters: int
    num_tokens: Seq[int]

    @property
    def tokens(self) -> str:
        """How many tokens were written in each setting, in words."""
        least, most = min(self.num_tokens), max(self.num_tokens)
        return f"{least:,}" if least == most else f"{least:,} to {most:,}"


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


def _dense(logits: torch.Tensor, params: SamplingParams, width: int | None = None) -> Floats:
    """Return [n, V] what the engine draws from. width: V, where a draft model has other rows than its target."""
    width = width or logits.shape[1]
    found = np.zeros((len(logits), max(width, logits.shape[1])))
    for row, one in zip(found, logits, strict=True):
        _fill(row, probs(one, params))
    return found[:, :width]


def _fill(row: Floats, one: Probs) -> None:
    if one.point is not None:
        row[one.point] = 1.0
    elif one.ids is not None:
        row[one.ids] = one.weights
    else:
        row[: len(one.weights)] = one.weights


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
