"""The models under test: a target with four drafters, and the target's distributions by plain decoding."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from forerun import verify
from forerun.config import EngineConfig
from forerun.drafters import Drafter
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.request import Request
from forerun.errors import BadOption, InternalError
from forerun.kv.cache import BlockCache
from forerun.models.named import DATA
from forerun.models.runner import Run, Runner
from forerun.sampling import History, probs
from forerun.sampling.arithmetic import Row
from forerun.sampling.largest import Rows
from forerun.types import Probs, SamplingParams

PROMPT_TOKENS = 24
NUM_TRIED = 8  # prompts that cells.py tries, to take the prompt with the least certain next token
CELL_TOKENS = 17  # of such a prompt: all tokens but the last fill one block of the cache, which the outputs share
MAX_SEQ_LEN = 512  # prompts and outputs are short
WARMER, RANDOM = "model:draft_temperature=0.6", "random"
BAD = "random ids"  # a drafter that is nearly always wrong


@dataclass(frozen=True)
class Source:
    """One way to draft. name: the name to print. llm: the LLM with the drafter. draft: the drafter's name in `llm`."""

    name: str
    llm: LLM
    draft: str

    @property
    def drafter(self) -> Drafter:
        """The drafter object that serves requests for `draft`."""
        return self.llm.engine.drafter.members[self.llm.engine.drafter.chosen(self.draft)]

    def rules(self) -> list[str]:
        """Return the lossless rules that can judge the drafter's drafts, `ratio` and `match` first."""
        names = [
            name
            for name in verify.rules()
            if verify.find(name).is_lossless and verify.find(name).judges(self.drafter.shape, self.drafter.draws)
        ]
        return sorted(names, key=lambda name: (name not in ("ratio", "match"), name != "ratio", name))


class Pair:
    """A target, and four ways to draft for it.

    The four ways are the user's drafter, the target at another temperature, a perfect copy of the target, and a drafter
    that is nearly always wrong. Raises UserError as LLM does.
    """

    def __init__(self, config: EngineConfig) -> None:
        _refuse_no_draft(config)
        limits: dict[str, Any] = {"spec_length": None, "pacing": None, "calibrate": False}
        longest = min(MAX_SEQ_LEN, config.max_seq_len or MAX_SEQ_LEN)
        self.llm = _opened(dataclasses.replace(config, extra_drafts=RANDOM, max_seq_len=longest, **limits), longest)
        checkpoint = dataclasses.replace(self.llm.checkpoint, tokenizer=self.llm.tokenizer)
        twin_config = dataclasses.replace(
            self.llm.config, target=None, draft="none", extra_drafts=WARMER, dtype="auto", quantization=None
        )
        twin = LLM(checkpoint, **{**twin_config.options(), "draft": checkpoint})
        self.own = Source(self.llm.engine.drafter.main, self.llm, self.llm.engine.drafter.main)
        self.warmer = Source("itself at T=0.6", twin, WARMER)
        self.copy = Source("a perfect copy", twin, "model")
        self.bad = Source(BAD, self.llm, RANDOM)
        self._built = {source.name: source.drafter for source in self.sources}
        self.plain = Plain(self.llm)

    @property
    def sources(self) -> list[Source]:
        """Every way to draft."""
        return [self.own, self.warmer, self.copy, self.bad]

    @property
    def row_invariant(self) -> bool:
        """Whether the bits of a token's logits depend on no other row of a pass. If so, all texts must be equal."""
        return bool(self.llm.checkpoint.model.ops.row_invariant)

    def failed_drafters(self) -> list[str]:
        """Return the names of drafters that raised. Their engine went on by plain decoding, which proves nothing."""
        return [source.name for source in self.sources if source.drafter is not self._built[source.name]]

    @cached_property
    def last_rows(self) -> list[tuple[list[int], Row]]:
        """Some short prompts, and the logits of the token after each prompt."""
        prompts = [prompt[:CELL_TOKENS] for prompt in self.prompts()[:NUM_TRIED]]
        return [(prompt, self.plain.logits(prompt, len(prompt))[-1]) for prompt in prompts]

    def prompts(self) -> list[list[int]]:
        """Return the beginnings of the shipped held-out texts and tasks, as ids of the target's tokenizer."""
        lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        tasks = (DATA / "work.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines[::5]]
        texts += [json.loads(line)["messages"][-1]["content"] for line in tasks]
        most = min(PROMPT_TOKENS, self.llm.engine.max_seq_len // 2)
        known = range(self.llm.engine.runner.num_ids)
        encoded = [self.llm.tokenizer.encode(text)[:most] for text in texts]
        return [ids for ids in encoded[::2] + encoded[1::2] if len(ids) > 1 and all(i in known for i in ids)]


def _refuse_no_draft(config: EngineConfig) -> None:
    if config.draft == "none":
        raise BadOption("draft='none' is plain decoding, so there is nothing to certify: name a drafter")


def _opened(config: EngineConfig, longest: int) -> LLM:
    """Open the target with at most `longest` positions. A target with fewer positions gets its own maximum."""
    try:
        return LLM.from_config(config)
    except BadOption:
        if longest < MAX_SEQ_LEN or config.max_seq_len != MAX_SEQ_LEN:
            raise
        return LLM.from_config(dataclasses.replace(config, max_seq_len=None))


def run(engine: Engine, jobs: Seq[tuple[Seq[int], SamplingParams]]) -> list[Request]:
    """Run requests in one continuous batch. Raises InternalError where a request failed."""
    requests = [request for prompt, params in jobs for request in engine.make(prompt, params)]
    engine.queue(requests)
    while any(request.seq.finish_reason is None for request in requests):
        engine.step()
    for request in requests:
        if request.error is not None:
            raise InternalError(f"a request failed: {request.error}")
    return requests


class Plain:
    """The target alone, as plain decoding runs it: with a separate cache, one token per pass.

    Where the backend is row-invariant, a pass over many tokens gives the same bits (docs/exactness.md), so many tokens
    are run at once.
    """

    def __init__(self, llm: LLM) -> None:
        model, runner = llm.checkpoint.model, llm.engine.runner
        cache = BlockCache.of(
            model,
            "contiguous",
            max_batch_size=1,
            max_seq_len=llm.engine.max_seq_len,
            dtype=getattr(runner.cache, "dtype", model.cache_dtype),  # as kv_cache_dtype says
        )
        cache.open(0)
        self._runner = Runner(model, cache, runner.num_ids, runner.holes)
        self._rows = 1 << 20 if model.ops.row_invariant else 1
        self._ids: list[int] = []

    def logits(self, ids: Seq[int], start: int) -> Rows:
        """Return the logits after ids[:start], after ids[:start + 1], ..., and after ids: [len(ids) - start + 1, V]."""
        shared = 0
        while shared < min(len(self._ids), start - 1) and self._ids[shared] == ids[shared]:
            shared += 1
        shared = self._runner.cache.truncate_to(0, shared)
        rows = list[Row]()
        for first in range(shared, len(ids), self._rows):
            tokens = list(ids[first : first + self._rows])
            logits = self._runner.forward([Run(0, tokens)]).logits[0]
            self._runner.cache.keep({0: range(len(tokens))})
            rows += [row.copy() for row in logits[max(0, start - 1 - first) :]]
        self._ids = list(ids)
        return np.stack(rows)

    def distributions(self, ids: Seq[int], num_prompt_tokens: int, params: SamplingParams) -> list[Probs]:
        """Return plain decoding's distribution of each output token of `ids`, and of the token after the last."""
        return [
            probs(row, params, History(ids[: num_prompt_tokens + i], num_prompt_tokens))
            for i, row in enumerate(self.logits(ids, num_prompt_tokens))
        ]

    def next(self, ids: Seq[int], num_prompt_tokens: int, params: SamplingParams) -> Probs:
        """Return plain decoding's distribution of the token after `ids`."""
        return probs(self.logits(ids, len(ids))[-1], params, History(ids, num_prompt_tokens))

    def outputs(self, prompt: Seq[int], length: int, params: SamplingParams) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield every possible output of `length` tokens, and its probability."""

        def behind(output: tuple[int, ...], weight: float) -> Iterator[tuple[tuple[int, ...], float]]:
            if len(output) == length:
                yield output, weight
                return
            for token, share in listed(self.next([*prompt, *output], len(prompt), params)).items():
                yield from behind((*output, token), weight * share)

        yield from behind((), 1.0)


def listed(target_probs: Probs) -> Mapping[int, float]:
    """Map each id that has a probability above 0 to that probability."""
    if target_probs.point is not None:
        return {target_probs.point: 1.0}
    weights = target_probs.weights.astype(np.float64)
    ids = np.arange(len(weights)) if target_probs.ids is None else target_probs.ids
    kept = weights > 0
    total = float(weights.sum())
    return {int(i): float(w) / total for i, w in zip(ids[kept].tolist(), weights[kept].tolist(), strict=True)}
