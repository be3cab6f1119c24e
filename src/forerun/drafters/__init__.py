"""Drafters guess tokens ahead of the target. Each method is one file, found by scanning this folder.

A file `<name>.py` holds `Options` (a frozen dataclass; each field with its unit and range in `metadata`) and
`build(options, target) -> Drafter`. A method that is more than a search in the text also holds

    needs(options, target) -> Needs     what must be known before any weight is read; target: a `Known`. Raises
                                        UserError where the options and small files show that it is impossible

Nothing else has to change for a new method.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from forerun import ops
from forerun.config import AUTO, Quantization
from forerun.errors import BadOption
from forerun.models import named
from forerun.registry import by_value, load, make_options, names, parse_spec, unwrapped
from forerun.types import Budget, Coins, Draft, Next, Sequence

if TYPE_CHECKING:
    from forerun.blocks import Spec
    from forerun.config import EngineConfig
    from forerun.kv import KVCache
    from forerun.models.loading import Checkpoint
    from forerun.models.next_tokens import NextTokens
    from forerun.models.opened import OpenedCheckpoint
    from forerun.models.outline import Beside
    from forerun.models.runner import Runner, Scores
    from forerun.ops.model import Model
    from forerun.ops.operators import Operators
    from forerun.sampling.largest import Ids, Rows
    from forerun.text.tokenizer import Tokenizer

T = TypeVar("T")
WITHOUT_MODEL = "suffix:shape=tree"  # what auto is where nothing better is known; docs/which-draft.md compares it
BY_MODEL = "model"  # what auto is where a draft model belongs to the target


@dataclass(frozen=True)
class Seen:
    """What a drafter sees of one target pass over one of its sequences.

    start: index in the sequence of the first token that was run and kept. kept: the rows of the pass whose tokens were
    kept. scored: all rows of the sequence (the last committed token, nodes, extra rows). run: index of the sequence's
    run in the pass. scores: the results of the whole pass.
    """

    start: int
    kept: Seq[int]
    scored: range
    run: int
    scores: Scores

    @property
    def hidden(self) -> Any:
        """The hidden states of the kept rows behind the final norm, [len(kept), H]."""
        return self.scores.hidden[list(self.kept)]

    def layer(self, k: int) -> Any:
        """Return the residual stream of the kept rows behind k layers, float32 [len(kept), H].

        k: one of the drafter's `hidden_layers`.
        """
        rows, kept = self.scores.taps[k], self.kept
        if len(kept) == len(rows):
            return rows  # each pass has its own
        return rows[list(kept)]

    @property
    def tokens(self) -> Seq[int]:
        """The tokens of the scored rows."""
        return self.scores.runs[self.run].tokens

    @property
    def rows(self) -> dict[int, int]:
        """The scored row of each token; where one was run twice, its accepted row and not a rejected guess's."""
        kept = [row - self.scored.start for row in self.kept]
        return {self.tokens[row]: row for row in (*range(len(self.scored)), *kept)}

    @property
    def best(self) -> list[int]:
        """The likeliest id behind each scored row, the lowest on ties; NO_NUMBERS (-1) where logits are no numbers.

        It needs no `top_logits`. A prompt chunk computes no logits and has 0 rows.
        """
        from forerun.sampling import largest

        return self.scores.best[self.run] or largest.best(self.scores.logits[self.run])

    def top(self, num: int) -> tuple[Ids, Rows]:
        """Return ids and logits of the `num` likeliest tokens behind each scored row, each [rows, num], best first.

        num: at most the drafter's `top_logits`. A prompt chunk computes no logits and has 0 rows.
        """
        from forerun.sampling import largest

        return largest.top(self.scores.logits[self.run], num)


def _point(guess: Seq[int]) -> Next | None:
    """Return a guessed next token with log-probability 0; None without a guess."""
    return (lambda num: ((guess[0],), (0.0,))) if guess else None


class Drafter:
    """A drafter makes drafts. Only `propose` is required; the other methods have defaults that do nothing.

    caught_up, catchup_s: what the last call of `propose` or `catch_up` ran only to catch up: committed and source
    tokens by sequence (without the tokens that every round feeds), and seconds.
    """

    hidden_layers: tuple[int, ...] = ()  # hidden states that `observe` gets: k = behind k layers of the target
    top_logits = 0  # how many of the likeliest tokens of each scored row `observe` gets
    shape = "chain"  # "chain" or "tree": the shape of its drafts
    # How siblings are drawn: "point" masses; "independent" draws of one distribution; "distinct" draws (without
    # replacement, each states what its earlier siblings left); "any": each states its own distribution.
    draws = "independent"
    runner: Runner | None = None  # of the drafter's own model
    # Whether it drafts behind tokens that are sure to be committed and that the target has not run yet (`forced`). A
    # drafter that reads the target's rows of the last committed token cannot.
    drafts_behind = True
    branches = False  # whether `branch` answers, so that the drafter serves beam searches
    num_passes: int | None = None  # passes of its model for the last draft; None = the depth of the draft
    num_found = 0  # nodes of the last draft that it found in the text, without its model
    search_s, num_searched = 0.0, 0  # of the last draft: seconds of text search, over so many sequences
    searches = False  # whether it searches the text before it asks its model (`Stop.search`)
    tells_confidence = False  # whether it tells `Budget.stops` its confidence in each drafted token
    is_free = False  # whether it runs no model and draws nothing, so that a guess costs microseconds and no coins
    clock: Callable[[], float] = staticmethod(time.perf_counter)  # the clock that a drafter may steer by; tests set it
    caught_up: Mapping[int, int] = MappingProxyType({})
    catchup_s = 0.0

    @property
    def runners(self) -> Seq[Runner]:
        """The runners of its own models, whose passes pacing measures."""
        return () if self.runner is None else (self.runner,)

    def caches(self, seq: Sequence) -> Seq[KVCache]:
        """Return the caches of its own models, which hold rows of the sequence's tokens."""
        return [runner.cache for runner in self.runners]

    def lend(self, cache: KVCache) -> None:
        """Take the target's cache, which may be read and must not be written to; called once, before any sequence."""

    def begin(self, seq: Sequence) -> None:
        """Prepare for a sequence that was admitted."""

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        """Draft for these decoding sequences, at most budget.num_tokens[b] nodes for seqs[b].

        Every token must be drawn from the distribution that its `probs` entry states, and budget.go_on must be asked
        before each draw. A drafter that has not caught up with a sequence drafts nothing for it. The drafter may only
        read `seqs`, which belong to the step; it may count the budget's numbers down.
        """
        raise NotImplementedError

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Learn from a target pass over this drafter's sequences, prompt chunks included. Called after the commit."""

    def resumes_from(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens, which the target has cached, the drafter need not see.

        A drafter that must see the hidden states of every token returns fewer; the target runs the others again.
        """
        return num_tokens

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that is finished or aborted."""

    def ahead(self, seq: Sequence, drafted: Seq[int], num_tokens: int) -> Seq[int]:
        """Guess at most `num_tokens` tokens behind the committed tokens and `drafted`, which are not committed.

        Only free drafters are asked, and they must not remember `drafted`. Without a guess: ().
        """
        return ()

    def branch(self, seqs: Seq[Sequence], levels: Seq[Seq[int]], catchup_tokens: int) -> list[list[Next | None]]:
        """Say what may follow nodes of beam searches (seq.hypotheses): levels[b] of seqs[b], tips first, then guesses.

        None for a node about which nothing is known, or while the drafter has not caught up with the sequence. Drafters
        that guess by `ahead` state one token. Drafters that cannot tell what follows several nodes leave `branches`
        False. catchup_tokens: as in Budget.
        """
        following: list[list[Next | None]] = []
        for seq, nodes in zip(seqs, levels, strict=True):
            texts = [seq.hypotheses.text(node, seq.hypotheses.base) for node in nodes] if seq.hypotheses else []
            following.append([_point(self.ahead(seq, text, 1)) for text in texts])
        return following

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Run at most `num_tokens` committed tokens of these sequences, in order, without drafting.

        It is called while the target runs their prompts, so that the first draft need not wait until the drafter's own
        model has run the prompt.
        """

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        """Return how many tokens still fit into the drafter's own cache; None = it sets no limit.

        without: ids of sequences that count as ended.
        """
        return None


@dataclass(frozen=True)
class OwnModel:
    """A draft model that a drafter makes of the target, for the memory plan.

    quantization: what its copy of the weights is rounded to; None = it reads the target's weights. layers: which of the
    target's layers it runs, ascending, and caches; None = all. config: of layers that are not the target's, whose
    weights `Needs.weights` counts.
    """

    quantization: str | None = None
    layers: tuple[int, ...] | None = None
    config: Spec | None = None


@dataclass(frozen=True)
class OwnCheckpoint:
    """A draft model that a drafter loads, for the memory plan.

    path: folder, file, name or hub id; None = the shipped one. quantization: what its weights are rounded to.
    """

    path: str | None = None
    quantization: str | None = None

    def weights(self, shipped: str | None) -> Hashable:
        """Return a key that is equal for checkpoints with the same weights. shipped: the path that None stands for."""
        said = self.quantization
        return named.place(self.path or shipped or ""), said if said is None or said == AUTO else Quantization.parse(
            said
        )


@dataclass(frozen=True)
class Needs:
    """What a drafter will need, for the memory plan and for the engine.

    layers: the inner layers of the target whose rows it reads (`Drafter.hidden_layers`). loads: the draft model that it
    loads. makes: the draft model that it makes of the target. weights: what it keeps besides a draft model. parts: the
    specs of the drafters that it is made of.
    """

    layers: tuple[int, ...] = ()
    loads: OwnCheckpoint | None = None
    makes: OwnModel | None = None
    weights: Beside | None = None
    parts: tuple[str, ...] = ()

    @property
    def has_model(self) -> bool:
        """Whether it runs a draft model, which it loads or makes of the target."""
        return self.loads is not None or self.makes is not None


class Known(Protocol):
    """What is known of a target before its weights are read, opened once by the engine (engine/opened.py).

    is_packed: whether its weights will be integers of 4 or 8 bits in memory. auto: what the drafter `auto` is for it.
    shipped_draft: the folder of the draft model that ships with it, if one does. kv_cache_tokens: size of a drafter's
    own cache; None = max_batch_size * max_seq_len.
    """

    @property
    def config(self) -> EngineConfig: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where ids are all there is, or are not to be compared."""

    @property
    def fingerprint(self) -> str | None:
        """The tokenizer fingerprint that files with ids must name; None = not compared."""

    @property
    def end_ids(self) -> frozenset[int]: ...
    @property
    def is_packed(self) -> bool: ...
    @property
    def auto(self) -> str: ...
    @property
    def shipped_draft(self) -> str | None: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def kv_cache_tokens(self) -> int | None: ...
    @property
    def next_tokens(self) -> NextTokens | None:
        """The block for multi-token prediction in its files; None = there is none."""

    def resolve(self, spec: str) -> tuple[str, Any]:
        """Return the method and Options of a drafter's spec, as `resolve` of this file, computed once."""

    def open(self, name: str) -> OpenedCheckpoint:
        """Open a checkpoint beside the target, such as a draft model's, once. Raises what opening it raises."""


@dataclass(frozen=True)
class Wanted:
    """The method that a spec asks for, its Options, and its needs for a target."""

    method: str
    options: Any
    needs: Needs


@dataclass(frozen=True)
class Target:
    """What a drafter may know of the engine that it is built for."""

    model: Model  # the target model; the draft model has the same device and dtype
    opened: Known  # what was known before its weights were read
    num_ids: int  # ids that have a token
    holes: tuple[int, ...] = ()  # ids below num_ids without one
    loaded_draft: Checkpoint | None = None  # a draft model that the caller has loaded; it comes before the shipped one
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, model: Model, opened: Known, loaded_draft: Checkpoint | None = None) -> Target:
        """Return a target with the ids of its tokenizer, or without one with all ids of the model."""
        num_ids, tokenizer = model.config.vocab_size, opened.tokenizer
        if tokenizer is None:
            return cls(model, opened, num_ids, loaded_draft=loaded_draft)
        return cls(model, opened, min(tokenizer.num_ids, num_ids), tuple(sorted(tokenizer.holes)), loaded_draft)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where ids are all there is."""
        return self.opened.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end an output."""
        return self.opened.end_ids

    @property
    def max_batch_size(self) -> int:
        """How many sequences run together at most."""
        return self.opened.config.max_batch_size

    @property
    def max_seq_len(self) -> int:
        """The tokens of the longest sequence."""
        return self.opened.max_seq_len

    def operators(self, spec: Spec) -> Operators:
        """Return the operators of a draft model. Raises UnsupportedModel where no allowed operators compute it."""
        target_ops, config = self.model.ops, cast("Spec", self.model.config)
        name = ops.beside(self.opened.config.ops, target_ops.name, self.model.device, config, spec)
        return target_ops if name == target_ops.name else ops.make(name, self.model.device, spec)

    def shared(self, weights: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` makes, called once for these weights: the drafters of an engine share them."""
        if weights not in self._shared:
            self._shared[weights] = make()
        value: T = self._shared[weights]
        return value


def resolve(spec: str, auto: str = WITHOUT_MODEL, *, looks: bool = True) -> tuple[str, Any]:
    """Return the method and its Options for `name[:option=value,...]`, a model's folder, name or hub id, or `auto`.

    auto: the spec that `auto` stands for. looks: whether to look for a folder of that name; where False, as for a
    request's spec, the disk is not read. A spec with a path separator, of an existing folder, or with a name from
    data/models.toml is a model. Raises BadOption for anything unknown; where other engines have such a value, the
    message names ours.
    """
    if spec == "auto":
        spec = auto
    bare = unwrapped(spec)
    is_method = bare.partition(":")[0] in names(__name__)
    is_path = "/" in spec or os.sep in spec or (looks and (os.path.exists(spec) or named.find(spec) is not None))
    if not is_method and not is_path and (there := by_value("draft", spec.partition(":")[0])):
        raise BadOption(there)
    # A folder's name may have a colon in it, so it is looked for before the text is taken apart.
    name, options = ("model", {"path": spec}) if is_path and not is_method else parse_spec(bare)
    return name, make_options(load(__name__, name, "drafter").Options, options, name)


def instead(method: str, options: Any) -> tuple[str, Any]:
    """Return `method` with the given (not default) options of another. Raises BadOption for one that it lacks."""
    usual = type(options)()
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    given = {name: value for name, value in given.items() if value != getattr(usual, name)}
    return method, make_options(load(__name__, method, "drafter").Options, given, method)


def wanted(spec: str, target: Known) -> list[Wanted]:
    """Return what a spec asks for, followed by its parts, recursively.

    Raises BadOption as `resolve` does, and whatever the methods raise for this target.
    """
    name, options = target.resolve(spec)
    module = load(__name__, name, "drafter")
    needs = module.needs(options, target) if has_needs(name) else Needs()
    whole = Wanted(name, options, needs)
    return [whole, *(entry for part in needs.parts for entry in wanted(part, target))]


def needs_a_model(name: str) -> str:
    """Return the sentence that refuses a method without its draft model."""
    example = "path/to/draft" if name == "model" else f"{name}:path=path/to/draft"
    return f"the drafter {name!r} needs a draft model: give its folder or hub id, as in draft={example!r}"


def has_needs(method: str) -> bool:
    """Return whether a method reads files, or needs something else that the memory plan counts."""
    return hasattr(load(__name__, method, "drafter"), "needs")


def make(spec: str, target: Target) -> Drafter:
    """Build the drafter that a spec means for a target. Raises BadOption for anything unknown."""
    name, options = target.opened.resolve(spec)
    drafter: Drafter = load(__name__, name, "drafter").build(options, target)
    return drafter
