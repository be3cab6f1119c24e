"""Every drafter, rule and policy in one continuous batch, against plain decoding of each request alone, bit for bit.

Drafters, rules and policies are found by scanning their rooms. An engine has all drafters and one policy; its requests
differ in drafter, rule, length and sampling. They wait for each other, share beginnings, are preempted in a small
cache, and some are aborted. A drafter that raises is not spared here (`unspared`), so that no failure hides.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.load import runner_with
from forerun import LLM, SamplingParams, drafters, pacing, registry, verify
from forerun.drafters import Drafter
from forerun.engine.engine import Engine
from forerun.engine.router import Router
from forerun.errors import BadOption
from forerun.kv import KVCache
from forerun.models.runner import Run, Runner, Scores
from forerun.testing.engines import target_for
from methods import NEEDS, VARIANTS
from parity.bitwise import RULES as SAMPLING, Models, Row, digest
from support import VOCAB, drafter_for, everyone, new_folder, random_decoder

DRAFTERS = registry.names(drafters.__name__)
POLICIES = registry.names(pacing.__name__)
LOSSLESS = [name for name in verify.rules() if verify.find(name).is_lossless]
MAX_SEQ_LEN = 768
FIRST_ID = 1_000_000_000  # of an engine's sequences, so that no id of a token is taken for one of them
Needs = Mapping[str, Mapping[str, Any]]
LENGTHS = (None, 1, 3, 8, 16)  # of a request; None = as the policy paces
HEAD_TOKENS = 160  # that some prompts of an engine begin with: two blocks, and a part of a third
STEPS_BETWEEN_PREEMPTIONS = 25


# ---------------------------------------------------------------------------------------------------------- one engine


@contextmanager
def unspared() -> Iterator[None]:
    """Let what a drafter raises pass through the router, which otherwise goes on without it."""

    @contextmanager
    def raised(self: Router, name: str, seqs: Seq[Any] = ()) -> Iterator[None]:
        yield

    spared, Router._spared = Router._spared, raised  # type: ignore[method-assign]
    try:
        yield
    finally:
        Router._spared = spared  # type: ignore[method-assign]


@dataclass(frozen=True)
class Place:
    """What one engine is started with, beside its drafters."""

    policy: str
    spec_length: int
    chunk_tokens: int
    backend: str
    batch_size: int
    cache_tokens: int | None  # None = room for all


def places(num: int, seed: int, smallest: int = MAX_SEQ_LEN) -> list[Place]:
    """Every policy in turn; two of three engines have caches in which requests preempt each other."""
    rng, made = random.Random(seed), []
    for i in range(num):
        paged, size = i % 3 < 2, rng.choice((3, 5, 8))
        tokens = smallest + rng.choice((0, 64, 192)) if paged else None
        chunk = rng.choice((1, 7, 16, 48, 100, 512)) if i % 4 else 5
        made.append(
            Place(
                POLICIES[i % len(POLICIES)], rng.choice((2, 5, 9, 16)), chunk, "paged" if paged else "contiguous",
                size, tokens,
            )
        )  # fmt: skip
    return made


def specs(models: Models, names: Seq[str], num_variants: int, rng: random.Random, needs: Needs) -> list[str]:
    """The spec of each drafter with what it needs for the target, and some of the variants of methods.py.

    needs: by drafter, what it needs, instead of what that file makes.
    """
    needs = {name: needs[name] if name in needs else needed(models, name) for name in names}
    variants = [(name, options) for name in names for options in VARIANTS.get(name, [])]
    chosen = [(name, {}) for name in names] + rng.sample(variants, min(num_variants, len(variants)))
    return [spec_of(name, {**needs[name], **options}) for name, options in chosen]


def needed(models: Models, name: str) -> dict[str, Any]:
    """The options that a drafter cannot do without, for this target."""
    if name not in NEEDS:
        return {}
    target = models.target
    known = target_for(target.model, target.tokenizer, target.end_ids, max_seq_len=MAX_SEQ_LEN)
    return dict(NEEDS[name](known, new_folder()))


def spec_of(name: str, options: dict[str, Any]) -> str:
    """The text that asks for a drafter with these options."""
    given = ",".join(f"{key}={value}" for key, value in options.items() if value is not None)
    return f"{name}:{given}" if given else name


def engine_of(models: Models, place: Place, drafts: Seq[str]) -> Engine:
    """An engine with all these drafters; requests that name none get the draft model."""
    engine = LLM(
        models.target,
        draft=models.draft,
        extra_drafts=";".join(spec for spec in drafts if spec not in ("model", "none")),
        pacing=place.policy,
        spec_length=place.spec_length,
        max_batch_size=place.batch_size,
        prefill_chunk_tokens=place.chunk_tokens,
        kv_cache_backend=place.backend,  # type: ignore[arg-type]
        kv_cache_tokens=place.cache_tokens,
        max_seq_len=MAX_SEQ_LEN,
        calibrate=False,
    ).engine
    engine._ids = itertools.count(FIRST_ID)
    return engine


def judged_by(drafter: Drafter) -> list[str]:
    """The lossless rules that can judge the drafts of a drafter."""
    found = []
    for name in LOSSLESS:
        try:
            verify.find(name).check("", drafter.shape, drafter.draws)
        except BadOption:
            continue
        found.append(name)
    return found


# ------------------------------------------------------------------------------------------------------- its requests


@dataclass(frozen=True)
class Asked:
    """One request. abort_after: the step behind which it is aborted, counted from when it was added; None = never."""

    number: int
    prompt_ids: list[int]
    params: SamplingParams
    abort_after: int | None = None

    def plain(self) -> SamplingParams:
        """The same for plain decoding; every other one needs all logits, where greedy ones take a shorter way."""
        alone = {"draft": None, "spec_length": None, "acceptance": None, "cache_salt": None, "prediction": None}
        needs_logits = self.number % 2 and not self.params.searches
        return dataclasses.replace(self.params, logprobs=0 if needs_logits else None, **alone)

    def searched(self) -> Asked:
        """The same as a search with two beams."""
        beams = {"num_beams": 2, "temperature": 0.0, "acceptance": None}
        return dataclasses.replace(self, params=dataclasses.replace(self.params, **beams))

    def __str__(self) -> str:
        p = self.params
        rule, length = p.acceptance, p.spec_length
        return f"request {self.number} ({len(self.prompt_ids)} tokens), T={p.temperature}, {p.draft}, {rule}, {length}"


@dataclass
class Mix:
    """Draws requests so that the pairs of drafter and rule, and the lengths, are used alike."""

    rng: random.Random
    num_tokens: int
    used: Counter[Any] = field(default_factory=Counter)
    number: int = 0

    def asked(self, pair: tuple[str, str], prompt_ids: list[int]) -> Asked:
        """A request of this drafter and rule. Sampled ones have a seed and the rule match."""
        draft, rule = pair
        names = [name for name in SAMPLING if (name == "greedy") == (rule != "match")]
        self.number += 1
        params = SamplingParams(
            max_tokens=self.rng.randint(max(1, self.num_tokens // 2), self.num_tokens),
            seed=1000 + self.number,
            draft=draft,
            acceptance=rule,
            spec_length=self._least("length", LENGTHS),
            cache_salt=self.rng.choice((None, None, "a")),
            priority=self.rng.choice((0, 0, 1, 2)),
            ignore_eos=self.rng.random() < 0.8,
            **SAMPLING[self._least("sampling", names)],
        )
        abort_after = self.rng.randint(0, self.num_tokens) if self.rng.random() < 0.1 else None
        return Asked(self.number, prompt_ids, params, abort_after)

    def pairs(self, engine: Engine, num: int) -> list[tuple[str, str]]:
        """(drafter, rule) of so many requests of an engine: those that were used least."""
        all_ = [(name, rule) for name, d in engine.drafter.members.items() for rule in judged_by(d)]
        chosen = []
        for _ in range(num):
            chosen.append(self._least("pair", all_, lambda pair: (self.used["drafter", pair[0]], self.used[pair])))
            self.used["drafter", chosen[-1][0]] += 1
            self.used[chosen[-1]] += 1
        return chosen

    def _least(self, what: str, values: Seq[Any], key: Callable[[Any], Any] | None = None) -> Any:
        """The value that was used least so far; any of equal ones."""
        found = min(values, key=lambda value: (key(value) if key else self.used[what, value], self.rng.random()))
        self.used[what, found] += 1
        return found


# ------------------------------------------------------------------------------------------------------------ its rows


class KeptRows:
    """Keeps a digest of every row whose token is kept, by (sequence, position), of chains, trees and prompt chunks."""

    def __init__(self, runner: Runner) -> None:
        self.forward, self.keep, self.cache = runner.forward, runner.cache.keep, runner.cache
        self.rows: dict[tuple[int, int], Row] = {}
        self._last: dict[int, Callable[[int], Row]] = {}
        runner.forward = self._forward  # type: ignore[method-assign]
        runner.cache.keep = self._keep  # type: ignore[method-assign]

    def _forward(self, runs: Seq[Run]) -> Scores:
        scores = self.forward(runs)
        for b, run in enumerate(runs):
            self._last[run.slot] = partial(self._row, scores, b)
        return scores

    def _keep(self, kept: Any, held: Mapping[int, Any] = MappingProxyType({})) -> list[int]:
        """held: rows of beam searches, whose pending ones are numbered, too: no digest is kept of them."""
        for slot, rows in kept.items():
            start = self.cache.length(slot)
            for i, row in enumerate(rows if slot not in held else ()):
                self.rows[slot, start + i] = self._last[slot](row)
        return self.keep(kept, held)

    @staticmethod
    def _row(scores: Scores, b: int, i: int) -> Row:
        rows, logits = scores.rows[b], scores.logits[b]
        return Row(digest(scores.hidden[rows.start + i]), digest(logits[i]) if len(logits) == len(rows) else None)


# ---------------------------------------------------------------------------------------------------------- comparison


@dataclass
class Mixture:
    """The result of a comparison. mismatches: a sentence for each output that differs from plain decoding."""

    num_engines: int = 0
    num_outputs: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    num_other_rows: int = 0
    num_preemptions: int = 0
    num_cached: int = 0  # prompt tokens that were found in a cache
    num_searches: int = 0
    accepted: Counter[str] = field(default_factory=Counter)  # by drafter
    drafted: Counter[str] = field(default_factory=Counter)
    by_pair: Counter[tuple[str, str]] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        methods = ", ".join(f"{name} {self.accepted[name]}/{num}" for name, num in sorted(self.drafted.items()))
        return (
            f"{self.num_engines} engines, {self.num_outputs} outputs ({self.num_aborted} of them aborted, "
            f"{self.num_tokens} tokens, {len(self.by_pair)} pairs of drafter and rule), {self.num_rows} rows, "
            f"{self.num_other_rows} of them other; {self.num_preemptions} preemptions, {self.num_cached} cached "
            f"tokens; {len(self.mismatches)} mismatches; accepted {methods}"
        )


def compare_mixed(
    plain: Models,
    ours: Models,
    engines: Seq[Place],
    prompts: Seq[list[int]],
    num_tokens: int,
    *,
    seed: int,
    names: Seq[str] = tuple(DRAFTERS),
    num_variants: int = 0,
    needs: Needs = MappingProxyType({}),
    say: Callable[[str], None] = lambda text: None,
) -> Mixture:
    """Every prompt in one of these engines, against plain decoding of it alone. Raises what a drafter raises.

    plain, ours: the same weights. names: the drafters; num_variants: more of them in each engine; needs: see `specs`.
    """
    rng = random.Random(seed)
    mix, found = Mix(rng, num_tokens), Mixture()
    shares = [list(prompts[i :: len(engines)]) for i in range(len(engines))]
    plain_engine = LLM(plain.target, draft="none", max_batch_size=1, prefix_caching=False, max_seq_len=MAX_SEQ_LEN)
    for place, share in zip(engines, shares, strict=True):
        engine = engine_of(ours, place, specs(ours, names, num_variants, rng, needs))
        head = max(prompts, key=len)[:HEAD_TOKENS]
        requests = []
        for pair, ids in zip(mix.pairs(engine, len(share)), share, strict=True):
            shared = head[: rng.randint(64, HEAD_TOKENS)] if rng.random() < 0.4 else []
            asked = mix.asked(pair, [*shared, *ids][: MAX_SEQ_LEN - num_tokens])
            # Two texts that share nothing but the prompt must fit into the whole cache.
            num_needed = len(asked.prompt_ids) + 2 * num_tokens
            is_small = num_needed <= (place.cache_tokens or MAX_SEQ_LEN)
            may_search = is_small and engine.drafter.members[pair[0]].branches and pair[1] == "ratio"
            requests.append(asked.searched() if may_search else asked)
        rng.shuffle(requests)
        expected = [alone(plain_engine.engine, asked) for asked in requests]
        requests = [_with_prediction(asked, ids) for asked, (ids, _) in zip(requests, expected, strict=True)]
        _serve(engine, requests, expected, found, place)
        found.num_engines += 1
        say(str(found))
    return found


def _with_prediction(asked: Asked, output_ids: list[int]) -> Asked:
    """A request served by `prediction` brings the text that it will say, but for one token; every other one does."""
    if asked.params.draft != "prediction" or asked.number // len(DRAFTERS) % 2:
        return asked
    guess = list(output_ids)
    guess[len(guess) // 2] = guess[0]
    return dataclasses.replace(asked, params=dataclasses.replace(asked.params, prediction=tuple(guess)))


def alone(engine: Engine, asked: Asked) -> tuple[list[int], dict[int, Row]]:
    """Output ids of plain decoding, and the rows by position."""
    forward, keep = engine.runner.forward, engine.runner.cache.keep
    recorder = KeptRows(engine.runner)
    try:
        request = engine.add(asked.prompt_ids, asked.plain())
        while request.seq.finish_reason is None:
            engine.step()
    finally:
        engine.runner.forward, engine.runner.cache.keep = forward, keep  # type: ignore[method-assign]
    assert request.error is None, request.error
    return request.seq.output_ids, {position: row for (_, position), row in recorder.rows.items()}


def _serve(
    engine: Engine,
    wanted: Seq[Asked],
    expected: Seq[tuple[list[int], dict[int, Row]]],
    found: Mixture,
    place: Place,
) -> None:
    """Run the requests, a third at once and the others one by one, and count what differs."""
    recorder, steps = KeptRows(engine.runner), itertools.count()
    requests, added_at = [], []
    with unspared():
        for step in steps:
            while len(requests) < min(len(wanted), max(len(wanted) // 3, step // 3)):
                asked = wanted[len(requests)]
                requests.append(engine.add(asked.prompt_ids, asked.params))
                added_at.append(step)
            for request in engine.step():
                assert request.error is None, request.error
            for request, asked, at in zip(requests, wanted, added_at, strict=False):
                if asked.abort_after is not None and step - at == asked.abort_after:
                    engine.abort(request)
            if place.cache_tokens is not None and step % STEPS_BETWEEN_PREEMPTIONS == 0:
                preempt_last(engine)
            for cache in caches_of(engine).values():
                cache.check_integrity()
            if len(requests) == len(wanted) and all(r.seq.finish_reason is not None for r in requests):
                break
    for asked, request, (ids, rows) in zip(wanted, requests, expected, strict=True):
        seq, report = request.seq, request.report
        was_cut = seq.finish_reason == "abort"
        same = seq.output_ids == (ids[: len(seq.output_ids)] if was_cut else ids)
        pairs = [(at, row, rows[at]) for (slot, at), row in recorder.rows.items() if slot == seq.id and at in rows]
        others = [at for at, row, plain_row in pairs if row.differs(plain_row)]
        found.num_outputs += 1
        found.num_aborted += was_cut
        found.num_searches += request.searcher is not None
        found.num_tokens += len(seq.output_ids)
        found.num_rows += len(pairs)
        found.num_other_rows += len(others)
        found.num_preemptions += report.num_preemptions
        found.num_cached += report.num_cached_tokens
        found.accepted[method_of(seq.draft)] += report.num_accepted
        found.drafted[method_of(seq.draft)] += report.num_drafted
        found.by_pair[seq.draft, seq.acceptance] += 1
        if not same or others:
            at = next((i for i, (a, b) in enumerate(zip(ids, seq.output_ids, strict=False)) if a != b), None)
            found.mismatches.append(f"{asked}, {place}: output {at} differs; rows at {others[:3]}")
    assert not leaks(engine)


def method_of(draft: str) -> str:
    """The drafter's method, without its options."""
    return draft.partition(":")[0]


def preempt_last(engine: Engine) -> None:
    """Take the blocks of the last request in rank, as a full cache does: how often one is full, times decide, too."""
    if len(engine.scheduler.running) > 1:
        engine.scheduler.give_way()


# --------------------------------------------------------------------------------------------------------------- leaks


def caches_of(engine: Engine) -> dict[str, KVCache]:
    """The caches of the target and of every drafter, those within other drafters too, by whose they are."""
    found = {"target": engine.runner.cache}
    for name, member in engine.drafter.members.items():
        for i, each in enumerate(everyone(member)):
            if each.runner is not None:
                found[f"{name}, part {i}"] = each.runner.cache
    return found


def leaks(engine: Engine) -> list[str]:
    """What an engine without requests still holds of them: cache rows, and ids or sequences in any attribute.

    It needs ids of sequences from FIRST_ID on. Walks everything that drafters, policy and scheduler reach.
    """
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    found = []
    for name, cache in caches_of(engine).items():
        cache.check_integrity()
        if cache.free_tokens() != cache.num_blocks * cache.block_tokens:
            found.append(f"the cache of {name} has {cache.free_tokens()} tokens free")
    roots = {"drafter": engine.drafter, "pacing": engine.pacing, "scheduler": engine.scheduler}
    return found + list(_held(roots, "engine", set()))


def _held(value: Any, path: str, seen: set[int]) -> Iterator[str]:
    if id(value) in seen or isinstance(value, str | bytes | float | type):
        return
    seen.add(id(value))
    if isinstance(value, int):
        if value >= FIRST_ID:
            yield f"{path} holds the sequence {value - FIRST_ID}"
        return
    if isinstance(value, drafters.Sequence):
        yield f"{path} holds a sequence"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _held(key, f"a key of {path}", seen)
            yield from _held(item, f"{path}[{str(key)[:40]}]", seen)
    elif isinstance(value, list | tuple | set | frozenset):
        if len(value) > 100_000:
            return
        for item in value:
            yield from _held(item, f"{path}[...]", seen)
    elif type(value).__module__.startswith("forerun.") and not type(value).__module__.startswith("forerun._native"):
        names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        own = {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})
        for name, item in own.items():
            if name == "caught_up":  # says what the last call did, and is replaced by the next one
                continue
            yield from _held(item, f"{path}.{name}", seen)


@dataclass(frozen=True)
class Left:
    """What was held whenever all requests had ended."""

    num_requests: int
    num_aborted: int
    num_preemptions: int
    blocks: list[int]  # of memory of the interpreter, at each rest
    resident_bytes: list[int]

    def __str__(self) -> str:
        megabytes = [round(num / 1e6, 1) for num in self.resident_bytes]
        return (
            f"{self.num_requests} requests, {self.num_aborted} aborted, {self.num_preemptions} preemptions; at rest "
            f"{self.blocks} blocks of memory, {megabytes} MB resident"
        )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def small_engine(policy: str, cache_tokens: int = 192) -> Engine:
    """A small random model with every drafter beside it; the store of `suffix` is full after a few requests."""
    model = random_decoder(3)
    options = {"suffix": {"max_cached_tokens": 200}}
    members = {name: drafter_for(name, model, **options.get(name, {})) for name in DRAFTERS}
    engine = Engine(
        runner_with(model, cache_tokens),
        Router({"model": members["model"], **members}),
        pacing.make(policy, 5),
        max_seq_len=128,
        max_batch_size=6,
        prefill_chunk_tokens=11,
    )
    engine._ids = itertools.count(FIRST_ID)
    return engine


def lose_nothing(num_requests: int, seed: int, policy: str = "auto", num_rests: int = 4) -> Left:
    """Serve mixed requests, some of which are aborted at any time, and look at what is left when all have ended.

    That is done `num_rests` times. Nothing of the requests may be left, and memory may not grow from the second on.
    """
    rng, engine = random.Random(seed), small_engine(policy)
    mix, blocks, resident = Mix(rng, 24), list[int](), list[int]()
    num_aborted, steps = 0, itertools.count()
    heads = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    with unspared():
        for _ in range(num_rests):
            waiting = mix.pairs(engine, num_requests // num_rests)
            alive: list[tuple[Any, int | None]] = []
            while waiting or alive:
                while waiting and len(alive) < 10:
                    own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
                    asked = mix.asked(waiting.pop(), rng.choice(heads)[: rng.randint(0, 40)] + own)
                    alive.append((engine.add(asked.prompt_ids, asked.params), asked.abort_after))
                engine.step()
                for request, steps_left in alive:
                    if steps_left == 0 and request.seq.finish_reason is None:
                        engine.abort(request)
                        num_aborted += 1
                    assert request.error is None, request.error
                if next(steps) % STEPS_BETWEEN_PREEMPTIONS == 0:
                    preempt_last(engine)
                alive = [(r, n and n - 1) for r, n in alive if r.seq.finish_reason is None]
            found = leaks(engine)
            assert not found, "\n".join(found)
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            resident.append(resident_bytes())
    return Left(mix.number, num_aborted, engine.scheduler.num_preemptions, blocks, resident)
