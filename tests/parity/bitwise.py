"""Speculation against plain decoding, bit for bit: prompts, runs that keep a digest of every row of logits, comparison.

Every token of an output is decided by a row of logits. A run records what each of these rows was, bit by bit, the last
time the engine computed it: rows behind a rejected draft are computed again with the right token before them, and
replaced. So two runs can be compared by what the model said, and not only by what was chosen.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from forerun import LLM, SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.opening import DATA, SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.models.runner import Run, Runner, Scores
from forerun.ops.reference import ReferenceOps
from forerun.rng import gumbel
from forerun.sampling import probs
from forerun.text.tokenizer import Tokenizer
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
def held_out() -> list[list[int]]:
    """The shipped held-out texts as ids."""
    tokenizer = Tokenizer.load(SHIPPED_TARGET)
    lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer.encode(json.loads(line)["text"]) for line in lines]


def cut_prompts(num: int, seed: int, longest: int = 640) -> list[list[int]]:
    """Different prompts, made of the held-out texts by cutting them at random lengths.

    Prompt j begins with text j (round and round) and, where it is longer than that, goes on into the texts that
    follow. Of sixteen lengths, two are 1 .. 8 tokens, eleven 9 .. 100, two 101 .. 256, one 257 .. `longest`.
    """
    rng, texts = random.Random(seed), held_out()
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
    def shipped(cls, dtype: str, ops: ReferenceOps) -> Models:
        folders = (SHIPPED_TARGET, SHIPPED_DRAFT)
        return cls(*(load_checkpoint(folder, dtype=dtype, ops=ops, with_tokenizer=True) for folder in folders))


@dataclass(frozen=True)
class Job:
    """One prompt and how it is sampled."""

    prompt_ids: list[int]
    params: SamplingParams

    @classmethod
    def of(cls, prompt_ids: list[int], rule: str, seed: int, num_tokens: int) -> Job:
        options = RULES[rule]
        given = None if options["temperature"] == 0 else seed
        return cls(prompt_ids, SamplingParams(max_tokens=num_tokens, seed=given, ignore_eos=True, **options))


@dataclass(frozen=True)
class Outcome:
    """Output ids, the digest of the row of logits that decided each, and how many drafted tokens were accepted."""

    token_ids: list[int]
    digests: list[bytes]
    num_accepted: int = 0
    num_drafted: int = 0


class Recorder:
    """Takes the place of a runner's `forward` and keeps a digest of every row of logits by (slot, position)."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.forward = runner, runner.forward
        self.digests: dict[tuple[int, int], bytes] = {}
        runner.forward = self  # type: ignore[method-assign]

    def __call__(self, runs: Seq[Run]) -> Scores:
        starts = [self.runner.cache.length(run.slot) for run in runs]
        scores = self.forward(runs)
        for run, start, logits in zip(runs, starts, scores.logits, strict=True):
            for i, row in enumerate(logits.numpy()):
                self.digests[run.slot, start + i] = hashlib.blake2b(row.tobytes(), digest_size=8).digest()
        return scores

    def of(self, slot: int, positions: range) -> list[bytes]:
        return [self.digests[slot, position] for position in positions]


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
            recorder.of(r.seq.id, range(r.seq.num_prompt_tokens - 1, len(r.seq.tokens) - 1)),
            r.report.num_accepted,
            r.report.num_drafted,
        )
        for r in requests
    ]


# --------------------------------------------------------------------------------------------------------- comparison


@dataclass
class Comparison:
    """What came of it. mismatches: a sentence for each output whose tokens differ from plain decoding's."""

    num_outputs: int = 0
    num_tokens: int = 0
    num_rows_that_differ: int = 0  # rows of logits up to the first token that differs
    num_accepted: int = 0
    num_drafted: int = 0
    num_engines: int = 0
    mismatches: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_outputs - len(self.mismatches)} of {self.num_outputs} outputs equal to plain decoding "
            f"({self.num_tokens} tokens, {self.num_engines} engines, {self.num_accepted} of {self.num_drafted} drafted "
            f"tokens accepted); {len(self.mismatches)} mismatches, {self.num_rows_that_differ} rows of logits that "
            "differ in a bit"
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
        jobs = [Job.of(ids, rule, 1000 + j, num_tokens) for rule, (j, ids) in zip(group.rules, rest, strict=False)]
        alone = serve(engine_of(plain, PLAIN), jobs)
        together = serve(engine_of(ours, group.setting), jobs)
        for job, expected, outcome in zip(jobs, alone, together, strict=True):
            _count(found, plain, group.setting, job, expected, outcome)
        if found.num_engines % 20 == 0 or found.num_engines == len(groups) - 1:
            say(f"after {found.num_engines + 1} of {len(groups)} engines: {found}")
        found.num_engines += 1
    return found


def _count(found: Comparison, models: Models, setting: Setting, job: Job, expected: Outcome, outcome: Outcome) -> None:
    found.num_outputs += 1
    found.num_tokens += len(outcome.token_ids)
    found.num_accepted += outcome.num_accepted
    found.num_drafted += outcome.num_drafted
    same = [a == b for a, b in zip(expected.token_ids, outcome.token_ids, strict=True)]
    at = same.index(False) if False in same else len(same)
    # The row that decided the first different token still has the same history.
    rows = list(zip(expected.digests, outcome.digests, strict=True))[: at + 1]
    differing = [i for i, (a, b) in enumerate(rows) if a != b]
    found.num_rows_that_differ += len(differing)
    if at < len(same):
        found.mismatches.append(_describe(models, setting, job, expected, outcome, at, differing))


def _describe(
    models: Models, setting: Setting, job: Job, expected: Outcome, outcome: Outcome, at: int, rows: list[int]
) -> str:
    first = f"logits differ first at output {rows[0]}" if rows else "logits are equal in all bits"
    return (
        f"prompt of {len(job.prompt_ids)} tokens {job.prompt_ids}, {job.params}, {setting}: output {at} (position "
        f"{len(job.prompt_ids) + at}) is {outcome.token_ids[at]} and not {expected.token_ids[at]}; {first}; gap of the "
        f"best two {gap_of_best_two(models, job, expected.token_ids[:at]):.3g}"
    )


def gap_of_best_two(models: Models, job: Job, output_ids: list[int]) -> float:
    """How far the scores of the two best ids of the next token are apart, by plain decoding."""
    ids = [*job.prompt_ids, *output_ids]
    runner = engine_of(models, PLAIN).runner
    runner.cache.open(0)
    logits = runner.forward([Run(0, ids, "last")]).logits[0][-1]
    scores = logits.double().numpy()
    if not job.params.greedy:
        law = probs(logits, job.params)
        kept = np.arange(len(law.weights)) if law.ids is None else law.ids.numpy()
        with np.errstate(divide="ignore"):
            scores = np.log(law.weights.double().numpy()) + gumbel(job.params.seed or 0, len(ids), kept)
    best = np.sort(scores)[-2:]
    return float(best[1] - best[0]) if len(best) == 2 else float("inf")


# ------------------------------------------------------------------------------------------------------ runner level


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns, so that -0 is not 0."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def cached(runner: Runner, slot: int, start: int, stop: int) -> torch.Tensor:
    """Bits of all keys and values of these positions, [layers, 2, positions, kv_heads, head_dim]."""
    rows = runner.cache.rows(slot, start, stop)
    pools = zip(runner.cache.keys, runner.cache.values, strict=True)
    return torch.stack([torch.stack([bits(k[rows]), bits(v[rows])]) for k, v in pools])


def feed(runner: Runner, slot: int, ids: Seq[int], chunk: int, neighbours: Seq[Run] = ()) -> torch.Tensor:
    """Run ids in chunks, beside neighbours whose rows are not kept, and keep them; bits of all logits [T, V]."""
    found = []
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        found.append(bits(runner.forward([*neighbours, Run(slot, piece)]).logits[-1]))
        runner.cache.keep(slot, list(range(len(piece))))
    return torch.cat(found)
