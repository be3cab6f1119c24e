"""Speculation against plain decoding, bit for bit: prompts, runs that keep a digest of every row, comparison.

Every token of an output is decided by a row: the hidden state after the token before it, and its logits. A run records
what each row of prompt and output was, bit by bit, the last time the engine computed it: rows behind a rejected draft
are computed again with the right token before them, and replaced. So two runs can be compared by what the model said,
and not only by what was chosen.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.models.loading import DTYPES, Checkpoint, load_checkpoint
from forerun.models.named import DATA
from forerun.models.runner import Run, Runner, Scores
from forerun.ops.cpu import CpuOps
from forerun.ops.reference import ReferenceOps
from forerun.sampling import probs
from forerun.sampling.largest import Rows
from forerun.sampling.random import gumbel
from forerun.text.tokenizer import Tokenizer
from models.gguf_vocabularies import smollm2
from parity.covering import Group, Setting

PLAIN = Setting("none", 1, 0, 512, "contiguous")
RULES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "match": {"temperature": 0.8},
    "match, top-p": {"temperature": 0.8, "top_p": 0.9},
    "match, top-k": {"temperature": 1.0, "top_k": 50},
}
MAX_SEQ_LEN = 1024


# ------------------------------------------------------------------------------------------------------------ prompts


@cache
def held_out_texts(most: int | None = None) -> list[str]:
    """The first of the shipped held-out texts; None = all of them."""
    lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines[:most]]


@cache
def held_out(tokenizer_folder: Path = SHIPPED_TARGET) -> list[list[int]]:
    """The same as ids."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    return [tokenizer.encode(text) for text in held_out_texts()]


def cut_prompts(num: int, seed: int, longest: int = 640, tokenizer_folder: Path = SHIPPED_TARGET) -> list[list[int]]:
    """Different prompts, made of the held-out texts by cutting them at random lengths.

    Prompt j begins with text j (round and round) and, where it is longer than that, goes on into the texts that
    follow. Of sixteen lengths, two are 1 .. 8 tokens, eleven 9 .. 100, two 101 .. 256, one 257 .. `longest`.
    """
    rng, texts = random.Random(seed), held_out(tokenizer_folder)
    found: dict[tuple[int, ...], None] = {}
    ranges = [(1, 8)] * 2 + [(9, 100)] * 11 + [(101, 256)] * 2 + [(257, 640)]
    while len(found) < num:
        j = len(found)
        low, high = ranges[(j + j // len(texts)) % len(ranges)]
        ids: list[int] = []
        for text in itertools.islice(itertools.cycle(texts), j % len(texts), None):
            ids += text
            if len(ids) >= high:
                break
        found[tuple(ids[: min(rng.randint(low, high), longest)])] = None
    return [list(ids) for ids in found]


# --------------------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Models:
    """A loaded target and the draft model that belongs to it."""

    target: Checkpoint
    draft: Checkpoint

    @classmethod
    def smollm2(cls, *, packed_target: bool) -> Models:
        """The model as its file has it, and in bfloat16; each is the other's draft model."""
        dense = CpuOps()
        dense.packs_scheme = lambda scheme: False  # type: ignore[method-assign]
        load = partial(load_checkpoint, smollm2() or Path(), dtype="bfloat16", with_tokenizer=True)
        target, draft = (CpuOps(), dense) if packed_target else (dense, CpuOps())
        return cls(load(ops=target), load(ops=draft))

    @classmethod
    def shipped(cls, weights: str, ops: ReferenceOps) -> Models:
        """The shipped pair with weights of a type, or of 8 bits, as the target's file has them, or rounded to fewer."""
        dtype, few = (weights, None) if weights in DTYPES else ("bfloat16", weights)
        again = None if few in (None, "int8") else f"{few}:again"
        load = partial(load_checkpoint, dtype=dtype, ops=ops, with_tokenizer=True)
        with pytest.MonkeyPatch.context() as patch:
            if few is None:  # what the target's 8 bits stand for
                patch.setattr(ops, "packs_scheme", lambda scheme: False)
            return cls(load(SHIPPED_TARGET, quantization=again), load(SHIPPED_DRAFT, quantization=few))


@dataclass(frozen=True)
class Job:
    """One prompt and how it is sampled; num_tokens come out, end or no end."""

    number: int
    prompt_ids: list[int]
    rule: str
    num_tokens: int
    logprobs: int | None = None

    @property
    def seed(self) -> int:
        """Another one for each prompt."""
        return 1000 + self.number

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.num_tokens, seed=self.seed, logprobs=self.logprobs, ignore_eos=True, **RULES[self.rule]
        )

    def alone(self) -> Job:
        """The same for plain decoding. Every other one asks for log-probabilities, which changes no token.

        Greedy decoding then needs all logits, where it takes a shorter way to the largest otherwise.
        """
        return replace(self, logprobs=0 if self.number % 2 else None)


@dataclass(frozen=True)
class Row:
    """Digests of a hidden state and of its logits, None where they were not computed."""

    hidden: bytes
    logits: bytes | None

    def differs(self, other: Row) -> bool:
        """In a bit of what both know."""
        both = self.logits is not None and other.logits is not None
        return self.hidden != other.hidden or (both and self.logits != other.logits)


@dataclass(frozen=True)
class Outcome:
    """Output ids, the row at every position but the last, and how many drafted tokens were accepted."""

    token_ids: list[int]
    rows: list[Row]
    num_accepted: int
    num_drafted: int


class Recorder:
    """Takes the place of a runner's `forward` and keeps every row by (slot, position)."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.forward = runner, runner.forward
        self.rows: dict[tuple[int, int], Row] = {}
        runner.forward = self  # type: ignore[method-assign]

    def __call__(self, runs: Seq[Run]) -> Scores:
        starts = [self.runner.cache.length(run.slot) for run in runs]
        scores = self.forward(runs)
        for run, start, rows, logits in zip(runs, starts, scores.rows, scores.logits, strict=True):
            hidden = scores.hidden[rows.start : rows.stop]
            for i in range(len(hidden)):
                known = digest(logits[i]) if len(logits) == len(hidden) else None
                self.rows[run.slot, start + i] = Row(digest(hidden[i]), known)
        return scores

    def of(self, slot: int, num_positions: int) -> list[Row]:
        return [self.rows[slot, position] for position in range(num_positions)]


def digest(row: torch.Tensor | Rows) -> bytes:
    return hashlib.blake2b(bits(row).numpy().tobytes(), digest_size=8).digest()


def engine_of(models: Models, setting: Setting) -> Engine:
    """An engine with room for a sequence and its neighbours. The draft model is loaded once where it has no options."""
    return LLM(
        models.target,
        draft=models.draft if setting.drafter == "model" else setting.drafter,
        spec_length=setting.spec_length,
        max_batch_size=setting.num_neighbours + 1,
        prefill_chunk_tokens=setting.chunk_tokens,
        kv_cache_backend=setting.backend,
        max_seq_len=MAX_SEQ_LEN,
    ).engine


def serve(engine: Engine, jobs: Seq[Job]) -> list[Outcome]:
    """Run jobs in one continuous batch, in their order."""
    recorder = Recorder(engine.runner)
    requests = [engine.add(job.prompt_ids, job.params) for job in jobs]
    while any(r.seq.finish_reason is None for r in requests):
        for request in engine.step():
            assert request.error is None, request.error
    engine.runner.cache.check_integrity()
    return [
        Outcome(
            r.seq.output_ids,
            recorder.of(r.seq.id, len(r.seq.tokens) - 1),
            r.report.num_accepted,
            r.report.num_drafted,
        )
        for r in requests
    ]


# --------------------------------------------------------------------------------------------------------- comparison


@dataclass
class Comparison:
    """The result of a comparison. mismatches: a sentence for each output that differs from plain decoding."""

    num_outputs: int = 0
    num_tokens: int = 0
    num_other_outputs: int = 0  # outputs of which a token differs
    num_rows: int = 0  # of prompts and outputs, up to the first token that differs
    num_other_rows: int = 0
    num_accepted: int = 0
    num_drafted: int = 0
    num_engines: int = 0
    mismatches: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_outputs - self.num_other_outputs} of {self.num_outputs} outputs equal to plain decoding "
            f"({self.num_tokens} tokens, {self.num_engines} engines, {self.num_accepted} of {self.num_drafted} drafted "
            f"tokens accepted), {self.num_rows - self.num_other_rows} of {self.num_rows} rows in every bit; "
            f"{self.num_other_outputs} mismatches"
        )


def compare(
    plain: Models,
    ours: Models,
    groups: Seq[Group],
    prompts: Seq[list[int]],
    num_tokens: int,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Every prompt under the setting of its group, against plain decoding of it alone.

    plain, ours: the same weights; they may be the same objects. say: hears how far it is, and each mismatch at once.
    """
    found, rest = Comparison(), iter(enumerate(prompts))
    for group in groups:
        jobs = [Job(j, ids, rule, num_tokens) for rule, (j, ids) in zip(group.rules, rest, strict=False)]
        alone = serve(engine_of(plain, PLAIN), [job.alone() for job in jobs])
        together = serve(engine_of(ours, group.setting), jobs)
        found.num_engines += 1
        num_known = len(found.mismatches)
        for job, expected, outcome in zip(jobs, alone, together, strict=True):
            _count(found, plain, group.setting, job, expected, outcome)
        for mismatch in found.mismatches[num_known:]:
            say(mismatch)
        if found.num_engines % 20 == 0 or found.num_engines == len(groups):
            say(str(found))
    return found


def _count(found: Comparison, models: Models, setting: Setting, job: Job, expected: Outcome, outcome: Outcome) -> None:
    found.num_outputs += 1
    found.num_tokens += len(outcome.token_ids)
    found.num_accepted += outcome.num_accepted
    found.num_drafted += outcome.num_drafted
    same = [a == b for a, b in zip(expected.token_ids, outcome.token_ids, strict=True)]
    at = same.index(False) if False in same else len(same)
    # A row is decided by the tokens up to its own, so the one that decided the first different token must be the same.
    pairs = list(zip(expected.rows, outcome.rows, strict=True))[: len(job.prompt_ids) + at]
    others = [position for position, (a, b) in enumerate(pairs) if a.differs(b)]
    found.num_other_outputs += at < len(same)
    found.num_rows += len(pairs)
    found.num_other_rows += len(others)
    if at < len(same) or others:
        rows = f"the first row with other bits is that of position {others[0]}" if others else "all rows are equal"
        tokens = _first(models, job, expected, outcome, at) if at < len(same) else "all tokens are equal"
        prompt = f"prompt {job.number} ({len(job.prompt_ids)} tokens), {job.rule}"
        found.mismatches.append(f"{prompt}, {setting}: {tokens}; {rows}")


def _first(models: Models, job: Job, expected: Outcome, outcome: Outcome, at: int) -> str:
    gap = gap_of_best_two(models, job, expected.token_ids[:at])
    return (
        f"output {at} (position {len(job.prompt_ids) + at}) is {outcome.token_ids[at]} and not "
        f"{expected.token_ids[at]}, gap of the best two {gap:.3g}"
    )


def gap_of_best_two(models: Models, job: Job, output_ids: list[int]) -> float:
    """How far the scores of the two best ids of the next token are apart, by plain decoding."""
    ids = [*job.prompt_ids, *output_ids]
    runner = engine_of(models, PLAIN).runner
    runner.cache.open(0)
    logits = runner.forward([Run(0, ids, "last")]).logits[0][-1]
    scores = logits.astype(np.float64)
    params = job.params
    if not params.greedy:
        target = probs(logits, params)
        kept = np.arange(len(target.weights)) if target.ids is None else target.ids
        with np.errstate(divide="ignore"):
            scores = np.log(target.weights.astype(np.float64)) + gumbel(job.seed, len(ids), kept)
    best = np.sort(scores)[-2:]
    return float(best[1] - best[0]) if len(best) == 2 else float("inf")


# ------------------------------------------------------------------------------------------------------ runner level


def bits(rows: torch.Tensor | Rows) -> torch.Tensor:
    """The bit patterns, so that -0 is not 0."""
    x = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def cached(runner: Runner, slot: int, start: int, stop: int) -> torch.Tensor:
    """Bits of all keys and values of these positions, [layers, 2, positions, kv_heads, head_dim]."""
    rows = runner.cache.rows(slot, start, stop)
    return torch.stack([torch.stack([bits(kept) for kept in pool.read(rows)]) for pool in runner.cache.pools])


def feed(runner: Runner, slot: int, ids: Seq[int], chunk: int, neighbours: Seq[Run] = ()) -> torch.Tensor:
    """Run ids in chunks, beside neighbours whose rows are not kept, and keep them; bits of all logits [T, V]."""
    found = []
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        found.append(bits(runner.forward([*neighbours, Run(slot, piece)]).logits[-1]))
        runner.cache.keep({slot: range(len(piece))})
    return torch.cat(found)
