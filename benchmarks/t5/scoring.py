"""Measures answers of an encoder-decoder against known ones, and alpha-hat of its drafts."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from benchmarks.t5 import examples
from benchmarks.t5.examples import Example
from forerun.bench.plans import Plan
from forerun.engine.llm import LLM
from forerun.registry import REQUIRED, option
from forerun.train import evaluate
from forerun.train.evaluate import PairNumbers

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class ScorePlan(Plan):
    """What `benchmarks.t5 score` measures."""

    target: Path = option(REQUIRED, "checkpoint folder of an encoder-decoder")
    data: tuple[Path, ...] = option(REQUIRED, "folder of `benchmarks.t5 examples`")
    drafts: tuple[Path, ...] = option((), "checkpoint folder of a draft model, to be measured", flag="--draft")
    num_examples: int = option(200, "examples of each folder, the first ones of bench.jsonl", min=1)
    max_tokens: int = option(96, "tokens of an answer at most", min=1)
    spec_length: int = option(5, "tokens drafted per round", min=1)
    seed: int = option(0, "of the draws")


@dataclass(frozen=True)
class Score:
    """How good answers are. exact: the share that is a right answer; overlap: the mean of `word_overlap`."""

    num: int
    exact: float
    overlap: float


def score(answers: Seq[str], right: Seq[Example]) -> Score:
    """Compare answers with what is right."""
    exact = [answer in (example.target, *example.also) for answer, example in zip(answers, right, strict=True)]
    overlaps = [word_overlap(answer, example.target) for answer, example in zip(answers, right, strict=True)]
    return Score(len(right), sum(exact) / len(exact), sum(overlaps) / len(overlaps))


def word_overlap(answer: str, wanted: str) -> float:
    """Return the harmonic mean of precision and recall of words, whatever their case (ROUGE-1, Lin 2004)."""
    ours, theirs = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, wanted))
    return 2 * (ours & theirs).total() / max(1, ours.total() + theirs.total())


@dataclass(frozen=True)
class Measured:
    """One task at one temperature. draft: None where the target decoded alone."""

    task: str
    draft: Path | None
    score: Score
    pair: PairNumbers


def measure(plan: ScorePlan) -> Iterator[Measured]:
    """Decode the held-out examples of each folder, without a draft model or with each of them."""
    tasks = [examples.read(folder, "bench")[: plan.num_examples] for folder in plan.data]
    for draft in plan.drafts or (None,):
        llm = LLM(str(plan.target), draft="none" if draft is None else str(draft), spec_length=plan.spec_length)
        for task in tasks:
            for temperature in TEMPERATURES:
                sources = [example.source for example in task]
                outputs = evaluate.decode(llm, sources, temperature, plan.max_tokens, plan.seed, ignore_eos=False)
                answers = score([output.text for output in outputs], task)
                yield Measured(
                    task[0].task, draft, answers, evaluate.pair_numbers(outputs, temperature, plan.spec_length)
                )
