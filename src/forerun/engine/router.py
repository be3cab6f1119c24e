"""Runs several drafters in one batch: each sequence is served by the drafter that its request chose.

If a drafter raises a UserError, it does not suit the requests for which it was called, and these requests are decoded
plainly from then on. A drafter that raises any other error is broken and is not called again. Neither case changes the
texts of requests that are greedy or have the acceptance rule `match`, or the distribution of sampled texts. For this,
no drafter may raise an error because of the value of a token that it drew: such an error would change the distribution.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from functools import partial

from forerun import drafters, verify
from forerun.drafters import Drafter, Seen, Target
from forerun.engine import cutting
from forerun.errors import BadOption, InternalError, UserError, shown
from forerun.kv import KVCache
from forerun.registry import unknown
from forerun.sampling.random import LaterCoins
from forerun.types import FORCED, FOUND_SHARE, MODEL_SHARE, Budget, Coins, Draft, DraftStep, Next, Sequence

LOG = logging.getLogger(__name__)
NONE = "none"  # the drafter of requests that are decoded plainly; there is always one
OWN = "own"  # the drafter that a program has made itself
LOOKUP, PREDICTION = "lookup", "prediction"  # always there, as FORCED is: they cost no weights and no cache


class _Silent(Drafter):
    """A drafter that drafts nothing. It replaces a drafter that has failed, or that does not suit a request."""

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        return Draft.empty(len(seqs))


def _how_to_add(name: str) -> str:
    """Return a hint on how to start an engine with the drafter `name`; "" if no drafter has this name.

    `name` comes from a request, so no file is opened or searched for it.
    """
    try:
        drafters.resolve(name, looks=False)
    except UserError:
        return ""
    return f"; start it with draft={shown(name)} or extra_drafts={shown(name)}"


class Router(Drafter):
    """Calls the drafter that `seq.draft` names for each sequence, and joins the drafts.

    members: the drafters by name; the first drafter serves requests that choose no drafter. aliases: other names for
    members. is_auto: whether draft=auto chose the first drafter. If so, `lookup` serves requests whose verification
    rule or beam search cannot use drafts of the first drafter.

    shares_s: for each sequence id, the seconds that catching up has taken in this step so far. unasked: ids of the
    sequences whose drafter was not called in this step, because the drafter cannot draft after tokens that a grammar
    forces. spares: whether requests go on without a drafter that raises an error; if False, the error is raised.
    packs_siblings: whether equal siblings of a draft share a row; False only in tests. unwritten: token ids that the
    model never writes; they are removed from all drafts.
    """

    spares = True
    packs_siblings = True
    unwritten: frozenset[int] = frozenset()

    def __init__(
        self, members: Mapping[str, Drafter], aliases: Mapping[str, str] | None = None, is_auto: bool = False
    ) -> None:
        self.members = {**members, NONE: members.get(NONE, _Silent())}
        self.main = next(iter(self.members))
        self.hidden_layers = tuple(sorted({k for drafter in self.members.values() for k in drafter.hidden_layers}))
        self._aliases = {"auto": self.main, **(aliases or {})}
        self._is_auto = is_auto
        self._unsuited: set[int] = set()  # ids of the sequences that their drafter has refused
        self._steps: dict[str, DraftStep] = {}
        self.shares_s: dict[int, float] = {}
        self.unasked: set[int] = set()

    def check_layers(self, num_layers: int) -> None:
        """Raise BadOption where a drafter reads a hidden state that a target of `num_layers` layers does not have."""
        for name, drafter in self.members.items():
            if wrong := [k for k in drafter.hidden_layers if not 0 <= k <= num_layers]:
                raise BadOption(
                    f"the drafter {shown(name)} reads hidden states behind {wrong[0]} layers, but the target has "
                    f"{num_layers}: 0 to {num_layers} are possible; use a drafter that was made for this target"
                )

    @property
    def first(self) -> Drafter:
        """The first drafter, which serves requests that choose no drafter."""
        return self.members[self.main]

    def chosen(
        self, wanted: str | None, has_prediction: bool = False, acceptance: str = "ratio", searches: bool = False
    ) -> str:
        """Return the name of the drafter that serves a request. Raises BadOption for a drafter that the engine lacks.

        wanted: the drafter that the request names. If it is None, the engine's first drafter serves the request. If the
        request also has a prediction, the drafter `prediction` serves it instead, unless the first drafter is `none`.
        acceptance: the request's verification rule. searches: whether the request is a beam search.
        """
        usual = PREDICTION if has_prediction and self.main != NONE and PREDICTION in self.members else self.main
        name = usual if wanted is None else self._aliases.get(wanted, wanted)
        if name not in self.members:
            known = unknown("drafter in this engine", name, ["auto", *self.members])
            raise BadOption(f"{known}{_how_to_add(name)}")
        drafter = self.members[name]
        is_free_to_choose = self._is_auto and name == self.main and wanted in (None, "auto")
        serves = drafter.also_chains or verify.find(acceptance).judges(drafter.shape, drafter.draws)
        serves = drafter.branches if searches else serves
        if is_free_to_choose and not serves:
            return LOOKUP
        return name

    def of(self, seq: Sequence) -> Drafter:
        """Return the drafter that serves a sequence: `none` if the sequence's drafter has refused it."""
        return self.members[NONE if seq.id in self._unsuited else seq.draft]

    def caches(self, seq: Sequence) -> Seq[KVCache]:
        return self.of(seq).caches(seq)

    def lend(self, cache: KVCache) -> None:
        for drafter in self.members.values():
            drafter.lend(cache)

    def begin(self, seq: Sequence) -> None:
        with self._spared(seq.draft, [seq]):
            self.of(seq).begin(seq)

    def end(self, seq: Sequence) -> None:
        with self._spared(seq.draft):
            self.of(seq).end(seq)
        self._unsuited.discard(seq.id)

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        """Return how many more tokens fit into the drafters' fullest cache; None if no drafter has a cache.

        without: ids of sequences whose blocks count as free.
        """
        free_by_drafter = []
        for name in self.members:
            with self._spared(name):
                free_by_drafter.append(self.members[name].free_tokens(without))
        return min([free for free in free_by_drafter if free is not None], default=None)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self.unasked = set()
        held = self._held(seqs, budget)
        if held:
            draft = self._around_forced(seqs, budget, coins, held)
        else:
            budget.limits = []
            draft = self._proposed(seqs, budget, coins)
        return draft.packed() if self.packs_siblings else draft

    def _held(self, seqs: Seq[Sequence], budget: Budget) -> dict[int, int]:
        """Map the index of each sequence whose grammar may force tokens to the largest number of its draft nodes.

        This number does not depend on the number of nodes that the pacing policy has granted.
        """
        if FORCED not in self.members or not budget.limits:
            return {}
        held = dict[int, int]()
        for b, seq in enumerate(seqs):
            most = min(budget.limits[b], seq.params.spec_length or budget.limits[b])
            if most > 0 and seq.grammar is not None and seq.hypotheses is None and seq.draft != NONE:
                held[b] = most
        return held

    def _around_forced(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins], held: Mapping[int, int]) -> Draft:
        """Return the drafters' drafts with forced tokens added: tokens that grammars dictate before or after a draft.

        Forced tokens before a draft are never rejected. So the request's drafter drafts as if these tokens were
        committed, and the drafter's cache of these tokens stays valid. coins: for each sequence, the random numbers
        with which its drafter draws tokens. held: the result of `_held`.
        """
        asked = list(seqs)
        own_coins = list(coins)
        limits = [0] * len(seqs)
        runs = self._forced(seqs, coins, held)
        for b, run in runs.items():
            asked[b], own_coins[b] = seqs[b].behind(run), LaterCoins(coins[b], len(run))
            if not self.of(seqs[b]).drafts_behind:
                budget.num_tokens[b] = 0
                self.unasked.add(seqs[b].id)
        for b, most in held.items():
            limits[b] = most - len(runs.get(b, ()))
            budget.num_tokens[b] = min(budget.num_tokens[b], limits[b])
        budget.limits = limits
        draft = self._proposed(asked, budget, own_coins)
        parts = [draft.only(b) for b in range(len(seqs))]
        for b in held:
            if parts[b].tokens:
                share = FOUND_SHARE if self.of(seqs[b]).is_free else MODEL_SHARE
                carries = partial(budget.carries, b, share=share)
                parts[b] = self._with_end(parts[b], asked[b], limits[b], carries)
            parts[b] = parts[b].behind(runs.get(b, ()))
        return Draft.joined(parts)

    def _forced(self, seqs: Seq[Sequence], coins: Seq[Coins], held: Mapping[int, int]) -> dict[int, list[int]]:
        """Map indices of sequences to the tokens that their grammars force after the committed tokens.

        Sequences without forced tokens are left out. coins: random numbers, which are only passed on to the drafter.
        held: the result of `_held`.
        """
        clock = time.perf_counter()
        budget = Budget(list(held.values()), 0)
        draft = self._asked(FORCED, [seqs[b] for b in held], budget, [coins[b] for b in held])
        self._add_draft(FORCED, clock, draft)
        parts = {b: draft.only(i).tokens for i, b in enumerate(held)}
        return {b: tokens for b, tokens in parts.items() if tokens}

    def _with_end(self, part: Draft, seq: Sequence, most: int, carries: Callable[[int, int], bool]) -> Draft:
        """Append the tokens that a grammar forces after a draft's best path, if all fit and are worth their rows.

        If the path is accepted, the same pass also decides the token after the forced tokens. Appending only some of
        the forced tokens would only move rows from the next pass to this pass. part: the draft of one sequence. most:
        the largest number of nodes of the sequence. carries: `Budget.carries` for this sequence, which tells whether
        forced tokens are worth their rows.
        """
        tip, path, num_guessed = -1, list[int](), 0
        for node, parent in enumerate(part.parents):
            if parent == tip:
                tip = node
                path.append(part.tokens[node])
                num_guessed += node not in part.forced
        left, run = most - len(part.tokens), list[int]()
        with self._spared(FORCED):
            run = list(self.members[FORCED].ahead(seq, path, left + 1))
        return part.before(run, tip) if len(run) <= left and carries(num_guessed, len(run)) else part

    def _proposed(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        clock = time.perf_counter()
        groups = self._groups(seqs, budget.num_tokens)
        if [len(members) for members in groups.values()] != [len(seqs)]:
            return self._joined(seqs, budget, coins, groups, clock)
        (name,) = groups  # one drafter serves all sequences
        draft = self._asked(name, seqs, budget, coins)
        self._add_draft(name, clock, draft)
        return draft

    def _joined(
        self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins], groups: Mapping[str, Seq[int]], clock: float
    ) -> Draft:
        """Let each drafter draft for its sequences, and join the drafts. Sequences without a drafter get no nodes.

        coins: for each sequence, the random numbers with which its drafter draws tokens. groups: the result of
        `_groups`. clock: the time at which drafting began.
        """
        step = DraftStep()
        parts = [Draft.empty(1)] * len(seqs)
        catchup_tokens = budget.catchup_tokens
        for name, members in groups.items():
            drafter = self.members[name]
            share = budget.only(members, catchup_tokens)
            draft = self._asked(name, [seqs[b] for b in members], share, [coins[b] for b in members])
            catchup_tokens -= sum(drafter.caught_up.values())
            for i, b in enumerate(members):
                parts[b] = draft.only(i)
            step = self._add_draft(name, clock, draft)
            clock = time.perf_counter()
        joined = Draft.joined(parts)
        step.seconds += time.perf_counter() - clock  # all drafting time is charged to some drafter
        return joined

    def _asked(self, name: str, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        """Return the draft of the drafter `name`, without tokens that cannot be accepted (cutting.py).

        If the drafter fails, the draft is empty. A drafter that drafts more nodes than its budget has failed, too.
        coins: for each sequence, the random numbers with which the drafter draws tokens.
        """
        granted = list(budget.num_tokens)
        with self._spared(name, seqs):
            draft = self.members[name].propose(seqs, budget, coins)
            if draft.num_sequences != len(granted):
                raise InternalError(f"it drafted for {draft.num_sequences} sequences and was asked for {len(granted)}")
            most = [max(pair) for pair in zip(granted, budget.limits or granted, strict=True)]
            if any(draft.num_asked(b) > granted[b] or len(draft.nodes(b)) > most[b] for b in range(len(granted))):
                raise InternalError(f"it drafted more nodes than the {granted} that it was granted")
            for b in range(len(granted)):
                draft.check(b)
            draft = cutting.without(draft, self.unwritten) if self.unwritten else draft
            has_grammar = any(seq.grammar is not None for seq in seqs)
            return cutting.within_grammars(draft, seqs) if has_grammar else draft
        return Draft.empty(len(seqs))

    @contextmanager
    def _spared(self, name: str, seqs: Seq[Sequence] = ()) -> Iterator[None]:
        """Return a context manager that handles errors which the drafter `name` raises.

        After a UserError, the sequences `seqs` go on without the drafter. After any other error, all sequences go on
        without the drafter. An AssertionError is raised again, because it shows a bug of the program.
        """
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            if not self.spares:
                raise
            if isinstance(error, UserError) and seqs:
                self._leave(name, seqs, error)
            else:
                self._give_up(name)

    def _leave(self, name: str, seqs: Seq[Sequence], error: UserError) -> None:
        """From now on, decode plainly the sequences `seqs`, which the drafter `name` has refused.

        The drafter still serves other sequences.
        """
        for seq in seqs:
            LOG.warning("request %d is decoded plainly: the drafter %r does not suit it (%s)", seq.id, name, error)
            with self._spared(name):
                self.members[name].end(seq)
            self._unsuited.add(seq.id)

    def _give_up(self, name: str) -> None:
        """From now on, decode plainly all sequences of the broken drafter `name`."""
        LOG.exception("the drafter %r failed and is not asked again: its requests are decoded plainly", name)
        self.members[name] = _Silent()

    def _add_draft(self, name: str, begun: float, draft: Draft) -> DraftStep:
        """Add a draft to the record of the drafter `name` for this step, and return the record.

        begun: the time at which the drafter was called.
        """
        depths = [draft.depth(b) for b in range(draft.num_sequences)]
        step = self._steps.setdefault(name, DraftStep())
        step.num_sequences += sum([depth > 0 for depth in depths])
        step.num_nodes += len(draft.tokens)
        step.num_found += self.members[name].num_found
        step.search_s += self.members[name].search_s
        step.num_searched += self.members[name].num_searched
        step.depth = max(step.depth, *depths)
        passes = self.members[name].num_passes
        step.passes += max(depths) if passes is None else passes
        self._count(name, begun)
        return step

    def branch(self, seqs: Seq[Sequence], levels: Seq[Seq[int]], catchup_tokens: int) -> list[list[Next | None]]:
        answers: list[list[Next | None]] = [[None] * len(level) for level in levels]
        for name, members in self._groups(seqs, list(map(len, levels))).items():
            drafter = self.members[name]
            their_levels = [levels[b] for b in members]
            begun = time.perf_counter()
            served = [seqs[b] for b in members]
            with self._spared(name, served):
                nexts = drafter.branch(served, their_levels, catchup_tokens)
                for b, each in zip(members, nexts, strict=True):
                    answers[b] = each
            catchup_tokens -= sum(drafter.caught_up.values())
            step = self._steps.setdefault(name, DraftStep())
            step.depth, step.num_nodes = step.depth + 1, step.num_nodes + sum(map(len, their_levels))
            self._count(name, begun)
        return answers

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        for name, members in self._groups(seqs, [num_tokens] * len(seqs)).items():
            drafter, start = self.members[name], time.perf_counter()
            served = [seqs[b] for b in members]
            with self._spared(name, served):
                drafter.catch_up(served, num_tokens)
            if drafter.caught_up:
                self._count(name, start)
                num_tokens -= sum(drafter.caught_up.values())

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for name, members in self._groups(seqs, [1] * len(seqs)).items():
            served = [seqs[b] for b in members]
            with self._spared(name, served):
                self.members[name].observe(served, [seen[b] for b in members])

    def resumes_from(self, seq: Sequence, num_tokens: int) -> int:
        with self._spared(seq.draft, [seq]):
            return self.of(seq).resumes_from(seq, num_tokens)
        return num_tokens

    def _count(self, name: str, begun: float) -> None:
        """Add the time and the caught-up tokens of a call to the record of the drafter `name` for this step.

        begun: the time at which the drafter was called.
        """
        drafter = self.members[name]
        step = self._steps.setdefault(name, DraftStep())
        caught_up = sum(drafter.caught_up.values())
        step.num_catchup_tokens += caught_up
        step.catchup_s += drafter.catchup_s
        for sequence_id, num_tokens in drafter.caught_up.items():
            had = self.shares_s.get(sequence_id, 0.0)
            self.shares_s[sequence_id] = had + drafter.catchup_s * num_tokens / caught_up
        step.seconds += time.perf_counter() - begun

    @property
    def num_caught_up(self) -> int:
        """The number of committed tokens that drafters have run to catch up in this step so far."""
        return sum([step.num_catchup_tokens for step in self._steps.values()])

    def take_steps(self) -> dict[str, DraftStep]:
        """Return the records of the drafters since the last call, by name, and begin new records."""
        steps = self._steps
        self._steps = {}
        self.shares_s = {}
        return steps

    def _groups(self, seqs: Seq[Sequence], granted: Seq[int]) -> dict[str, list[int]]:
        """Map the name of each drafter to the indices of the sequences for which it may draft.

        granted: for each sequence, the number of granted tokens; 0 = leave the sequence out. Sequences that are decoded
        plainly are left out, too.
        """
        groups: dict[str, list[int]] = {}
        for b, seq in enumerate(seqs):
            if granted[b] > 0 and seq.draft != NONE and seq.id not in self._unsuited:
                groups.setdefault(seq.draft, []).append(b)
        return groups


def _made(spec: str, target: Target) -> tuple[str, Drafter]:
    """Make the drafter of a spec. Returns the drafting method and the drafter.

    If the spec is `auto` and the chosen drafter cannot be made, a drafter without a model is returned instead.
    """
    try:
        return target.opened.resolve(spec)[0], drafters.make(spec, target)
    except UserError as error:
        auto = target.opened.auto
        if spec != "auto" or auto in (drafters.WITHOUT_MODEL, drafters.BY_MODEL):
            raise
        LOG.warning("draft=auto is %s, because %s cannot serve: %s", drafters.WITHOUT_MODEL, auto, error)
        return _made(drafters.WITHOUT_MODEL, target)


def make(specs: Seq[str], target: Target, make_own: Callable[[Target], Drafter] | None = None) -> Router:
    """Make the drafters of `specs`, and four drafters without a model: lookup, prediction, forced and none.

    A drafter has the name of its method. If several specs have the same method, the spec without options gets this
    name, or else the first spec. The other drafters are named by their whole specs. make_own: makes one more drafter,
    which comes before all others and is named `own`. Raises UserError for a drafter that cannot be made.
    """
    members: dict[str, Drafter] = {}
    if make_own is not None:
        members[OWN] = make_own(target)
        if not isinstance(members[OWN], Drafter):
            raise BadOption(f"draft made {type(members[OWN]).__name__}: it must make a forerun.drafters.Drafter")
    aliases: dict[str, str] = {}
    for text in specs:
        method, drafter = _made(text, target)
        is_taken = method in members or (method in specs and text != method)
        name = text if is_taken else method
        members[name], aliases[text] = drafter, name
    for name in (LOOKUP, PREDICTION, FORCED):
        members.setdefault(name, drafters.make(name, target))
    return Router(members, aliases, is_auto=specs[0] == "auto")
