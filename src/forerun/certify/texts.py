"""The certificate's second part: greedy and `match` texts must equal the texts of plain decoding, token for token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

from forerun.certify.checks import Check, Clock
from forerun.certify.pair import Pair, Source, run
from forerun.certify.ties import measured_tau, why_no_tie
from forerun.engine.request import Request
from forerun.kv.cache import BlockCache
from forerun.models.runner import Runner
from forerun.types import SamplingParams

NUM_TOKENS = 40  # of a text
LENGTHS = (1, 4, 7)  # K
SPOILED = 5  # every 5th token of the plain text is replaced, for drafts that are right up to a wrong token
MODES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    "match": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, ignore_eos=True),
    "match, top-p, penalties": SamplingParams(
        max_tokens=NUM_TOKENS, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3, ignore_eos=True
    ),
}
LEAST_ALPHA = 0.98  # of a perfect copy, where rows of a pass may round differently
ADVERSARY = "the text with errors"


@dataclass(frozen=True)
class Job:
    """One text that must equal the text of plain decoding."""

    about: str
    source: Source
    params: SamplingParams


def checks(clock: Clock, pair: Pair, seed: int) -> list[Check]:
    """Compare texts with plain decoding's texts until the time is over. Then check the perfect copy's acceptance."""
    equal = Check(
        "equal texts",
        "pair",
        f"greedy and match outputs against plain decoding of the prompt alone, K = {', '.join(map(str, LENGTHS))}",
        "verification, caches and batching change no token, with a drafter that is right, one that is wrong and one "
        "that lies; for these prompts, and for outputs without an end of sequence",
        unit="texts",
    )
    copies = Check(
        "a perfect copy",
        "pair",
        "the target as its own draft model: accepted over tested",
        "the draft's cache is that of the committed tokens (m17), and rows of one pass are those of another",
        unit="tokens",
    )
    compared = _Compared(pair, equal)
    for number, (prompt, (mode, usual)) in enumerate(_endless(pair.prompts())):
        if not clock.look(f"{equal.num_samples} texts") and number >= len(MODES):
            break
        params = usual if usual.greedy else dataclasses.replace(usual, seed=seed + number)
        (alone,) = run(pair.llm.engine, [(prompt, dataclasses.replace(params, draft="none"))])
        compared.look(prompt, mode, params, alone)
    compared.conclude()
    _judge_copies(copies, compared, pair.row_invariant)
    return [equal, copies]


def _endless(prompts: Seq[list[int]]) -> Iterator[tuple[list[int], tuple[str, SamplingParams]]]:
    """Yield each prompt in each mode, without end."""
    for prompt in itertools.cycle(prompts):
        for mode in MODES.items():
            yield prompt, mode


def _judge_copies(check: Check, compared: _Compared, row_invariant: bool) -> None:
    check.num_samples = compared.num_copied
    check.ran = compared.num_copied > 0
    if not check.ran:
        return
    alpha = compared.num_right_copies / compared.num_copied
    least = 1.0 if row_invariant else LEAST_ALPHA
    check.facts["alpha"], check.result = alpha, f"accepted {100 * alpha:.4g} %"
    if alpha < least:
        check.problems.append(f"{alpha:.4f} of the tokens of a perfect copy were accepted, and {least:g} must be")


class _Compared:
    """The counts of all comparisons with plain decoding so far."""

    def __init__(self, pair: Pair, check: Check) -> None:
        self.pair, self.check = pair, check
        self.num_tokens = self.num_ties = self.num_copied = self.num_right_copies = 0
        self.by_source: dict[str, tuple[int, int]] = {}  # numbers of texts, and of accepted tokens

    def look(self, prompt: list[int], mode: str, params: SamplingParams, alone: Request) -> None:
        """Run a prompt with every drafter and draft length, and compare each text with the plain text of `alone`."""
        plain = alone.seq.output_ids
        jobs = self._jobs(mode, params, plain)
        for llm in (self.pair.llm, self.pair.copy.llm):
            group = [job for job in jobs if job.source.llm is llm]
            for job, request in zip(group, run(llm.engine, [(prompt, job.params) for job in group]), strict=True):
                self._compare(job, prompt, plain, request)
                if job.source is self.pair.copy:
                    self.num_copied += request.report.num_tested
                    self.num_right_copies += request.report.num_accepted

    def _jobs(self, mode: str, params: SamplingParams, plain: Seq[int]) -> list[Job]:
        pair, jobs = self.pair, list[Job]()
        adversary = Source(ADVERSARY, pair.llm, "prediction")
        for source, length in itertools.product((pair.own, pair.copy, adversary, pair.bad), LENGTHS):
            prediction = spoiled(plain, pair.llm.engine.runner.num_ids, length) if source is adversary else None
            one = dataclasses.replace(params, draft=source.draft, spec_length=length, prediction=prediction)
            jobs.append(Job(f"{source.name}, {mode}, K={length}", source, one))
        return jobs

    def _compare(self, job: Job, prompt: list[int], plain: list[int], request: Request) -> None:
        ours = request.seq.output_ids
        num, accepted = self.by_source.get(job.source.name, (0, 0))
        self.by_source[job.source.name] = num + 1, accepted + request.report.num_accepted
        self.check.num_samples += 1
        self.num_tokens += len(ours)
        if ours == plain:
            return
        if len(ours) != len(plain):
            self.check.problems.append(f"{job.about}: {len(ours)} tokens, and {len(plain)} by plain decoding")
            return
        if self.pair.row_invariant:
            at = next(i for i, (a, b) in enumerate(zip(plain, ours, strict=True)) if a != b)
            self.check.problems.append(f"{job.about}: token {at} is {ours[at]} and not {plain[at]}")
        elif why := why_no_tie(self._oracle, prompt, plain, ours, job.params, self._tau):
            self.check.problems.append(f"{job.about}: {why}")
        else:
            self.num_ties += 1

    @cached_property
    def _oracle(self) -> Runner:
        """The target, computed row by row, so that rows do not depend on each other. Only torch's backends need it."""
        from forerun.ops.reference import ReferenceOps
        from forerun.ops.torch import TorchModel

        model = self.pair.llm.checkpoint.model
        assert isinstance(model, TorchModel)
        slow = TorchModel(model.config, model.weights, ReferenceOps(row_by_row=True))
        return _runner(slow, self.pair)

    @cached_property
    def _tau(self) -> float:
        return measured_tau(_runner(self.pair.llm.checkpoint.model, self.pair), self.pair.prompts()[:20])

    def conclude(self) -> None:
        """Write the results into the check."""
        check, num = self.check, self.check.num_samples
        if not num:
            check.ran = False
            return
        check.result = f"{num - len(check.problems) - self.num_ties} equal"
        check.result += f", {self.num_ties} part at a tie" if self.num_ties else ""
        check.facts = {f"texts of {name}": f"{n}, {a} tokens accepted" for name, (n, a) in self.by_source.items()}
        check.facts |= {"tokens": self.num_tokens, "ties": self.num_ties}
        check.facts["share_of_texts_that_would_have_shown"] = 1 - 0.01 ** (1 / num)
        check.facts["row_invariant"] = str(self.pair.row_invariant)


def _runner(model: object, pair: Pair) -> Runner:
    """Return a runner of a model with a small cache of its own."""
    served, llm = pair.llm.engine.runner, pair.llm
    cache = BlockCache.of(
        model,  # type: ignore[arg-type]
        "contiguous",
        max_batch_size=1,
        max_seq_len=llm.engine.max_seq_len,
    )
    return Runner(model, cache, served.num_ids, served.holes)  # type: ignore[arg-type]


def spoiled(ids: Seq[int], num_ids: int, first: int) -> tuple[int, ...]:
    """Replace every SPOILED-th id by that id + 1, beginning at index `first` (mod SPOILED)."""
    return tuple((i + 1) % num_ids if n % SPOILED == first % SPOILED else i for n, i in enumerate(ids))
