"""Drafters guess tokens ahead of the target. Each method is one file, found by scanning this folder.

A file `<name>.py` holds `Options` (a frozen dataclass; each field with its unit and range in `metadata`) and
`build(options, target) -> Drafter`. If the method reads files, or needs anything else that the memory plan counts, the
file also holds

    needs(options, target) -> Needs     what must be known before any weight is read; target: a `Known`. Raises
                                        UserError where the options, or files such as config.json, show that the
                                        drafter is impossible

A new method also needs its page, docs/methods/<name>.md. `make pages` then writes all lists of drafters in the docs.
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
from forerun.errors import BadOption, NotFound, shown
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
_FILES = (".gguf", ".safetensors")  # how the names of files of models end
WITHOUT_MODEL = "suffix:shape=tree"  # auto means this where nothing better is known; see docs/which-draft.md
BY_MODEL = "model"  # auto means this where a draft model belongs to the target


@dataclass(frozen=True)
class Seen:
    """What a drafter sees of one pass of the target, for one sequence of the pass.

    Kept tokens are the tokens that the pass ran and that were not rejected. start: the index of the first kept token in
    the sequence. kept: the rows of the kept tokens in the pass. scored: all rows of the sequence in the pass: the last
    committed token, draft nodes and extra rows. run: the index of the sequence in the lists of `scores`. scores: the
    results of the whole pass, for all sequences.
    """

    start: int
    kept: Seq[int]
    scored: range
    run: int
    scores: Scores

    @property
    def hidden(self) -> Any:
        """The hidden states after the final norm of the tokens that were not rejected, [len(kept), H]."""
        return self.scores.hidden[list(self.kept)]

    def layer(self, k: int) -> Any:
        """Return the residual stream after k layers of the tokens that were not rejected, float32 [len(kept), H].

        k: one of the drafter's `hidden_layers`.
        """
        rows, kept = self.scores.taps[k], self.kept
        if len(kept) == len(rows):
            return rows  # no copy is needed: each pass has new arrays
        return rows[list(kept)]

    @property
    def tokens(self) -> Seq[int]:
        """The input tokens of all rows that the sequence has in the pass (`scored`)."""
        return self.scores.runs[self.run].tokens

    @property
    def rows(self) -> dict[int, int]:
        """A map from token id to row, counted from the first scored row. Of several rows of an id, a kept row wins."""
        kept = [row - self.scored.start for row in self.kept]
        return {self.tokens[row]: row for row in (*range(len(self.scored)), *kept)}

    @property
    def best(self) -> list[int]:
        """The likeliest next token id at each scored row, lowest on ties; NO_NUMBERS (-1) where logits are not finite.

        A drafter may read this property without setting `top_logits`. A prompt chunk has no logits, so the list is
        empty.
        """
        from forerun.sampling import largest

        return self.scores.best[self.run] or largest.best(self.scores.logits[self.run])

    def top(self, num: int) -> tuple[Ids, Rows]:
        """Return the ids and logits of the `num` likeliest next tokens at each scored row, two arrays [rows, num].

        The likeliest token comes first. num: at most the drafter's `top_logits`. A prompt chunk has no logits, so both
        arrays have 0 rows.
        """
        from forerun.sampling import largest

        return largest.top(self.scores.logits[self.run], num)


def _point(guess: Seq[int]) -> Next | None:
    """Return the first guessed token as a `Next` with log-probability 0; None where nothing was guessed."""
    return (lambda num: ((guess[0],), (0.0,))) if guess else None


class Drafter:
    """The base of all drafters. Only `propose` is required; the other methods have defaults that do nothing.

    caught_up: by sequence id, how many tokens the last call of `propose` or `catch_up` ran only to catch up: committed
    tokens, and tokens of an encoder's input. The tokens that every round runs anyway are not counted. catchup_s: the
    seconds that these runs took.
    """

    hidden_layers: tuple[int, ...] = ()  # hidden states that `observe` gets: k = after k layers of the target
    top_logits = 0  # how many of the likeliest tokens of each scored row `observe` gets
    shape = "chain"  # "chain" or "tree": the shape of the drafts
    # How siblings are drawn: "point" masses; "independent" draws from one distribution; "distinct" draws (without
    # replacement: each sibling's distribution is what the earlier siblings left); "any": each has its own distribution.
    draws = "independent"
    runner: Runner | None = None  # runs the drafter's own model
    # Whether the drafter can draft after tokens that are sure to be committed and that the target has not run yet
    # (`forced`). A drafter that reads the target's rows of the last committed token cannot.
    drafts_behind = True
    branches = False  # whether `branch` makes guesses, so that the drafter serves beam searches
    num_passes: int | None = None  # passes of the drafter's model for the last draft; None = the depth of the draft
    num_found = 0  # nodes of the last draft that a search of the text found, without the drafter's model
    search_s, num_searched = 0.0, 0  # of the last draft: seconds of text search, and how many sequences were searched
    searches = False  # whether the drafter searches the text before it asks its model (`Stop.search`)
    tells_confidence = False  # whether the drafter tells `Budget.stops` its confidence in each drafted token
    is_free = False  # True = the drafter runs no model and draws nothing: a guess costs microseconds and no coins
    clock: Callable[[], float] = staticmethod(time.perf_counter)  # the clock that a drafter may steer by; tests set it
    caught_up: Mapping[int, int] = MappingProxyType({})
    catchup_s = 0.0

    @property
    def runners(self) -> Seq[Runner]:
        """The runners of the drafter's own models. Pacing measures their passes."""
        return () if self.runner is None else (self.runner,)

    def caches(self, seq: Sequence) -> Seq[KVCache]:
        """Return the caches of the drafter's own models that hold rows of the sequence's tokens."""
        return [runner.cache for runner in self.runners]

    def lend(self, cache: KVCache) -> None:
        """Receive the target's KV cache, which the drafter may only read. Called once, before any sequence begins."""

    def begin(self, seq: Sequence) -> None:
        """Prepare for a sequence that was admitted."""

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        """Draft for these decoding sequences, at most budget.num_tokens[b] nodes for seqs[b].

        Every token must be drawn from the distribution in its entry of `probs`, and budget.go_on must be asked before
        each draw. A drafter that has not caught up with a sequence drafts nothing for that sequence. The drafter may
        only read `seqs`, because they belong to the step. It may lower the numbers in `budget`.
        """
        raise NotImplementedError

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Learn from a target pass over these sequences, prompt chunks included. Called after tokens are committed."""

    def resumes_from(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens, all in the target's cache, need not be run again.

        A drafter that must see the target's hidden states of every token returns a number below `num_tokens`. The
        target then runs the tokens after that number again.
        """
        return num_tokens

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that is finished or aborted."""

    def ahead(self, seq: Sequence, drafted: Seq[int], num_tokens: int) -> Seq[int]:
        """Guess at most `num_tokens` tokens that follow the committed tokens and then the uncommitted tokens `drafted`.

        Runs no model and draws nothing. Returns () where there is no guess. The drafter must not remember `drafted`.
        """
        return ()

    def branch(self, seqs: Seq[Sequence], levels: Seq[Seq[int]], catchup_tokens: int) -> list[list[Next | None]]:
        """Return the tokens that may follow each of the nodes levels[b] in the beam search of seqs[b] (seq.hypotheses).

        A level lists the last nodes of the beams, and then guessed nodes. The entry of a node is None where there is no
        guess for the node, or while the drafter has not caught up with the sequence. Drafters that guess by `ahead`
        return one token for each node. Drafters that cannot guess for several nodes leave `branches` False.
        catchup_tokens: as in Budget.
        """
        following: list[list[Next | None]] = []
        for seq, nodes in zip(seqs, levels, strict=True):
            texts = [seq.hypotheses.text(node, seq.hypotheses.base) for node in nodes] if seq.hypotheses else []
            following.append([_point(self.ahead(seq, text, 1)) for text in texts])
        return following

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Run at most `num_tokens` committed tokens of these sequences, in order, without drafting.

        Called while the target runs the sequences' prompts. Otherwise the first draft would wait until the drafter's
        own model has run the whole prompt.
        """

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        """Return how many tokens still fit into the drafter's own cache; None = the drafter sets no limit.

        without: the ids of sequences that are treated as ended.
        """
        return None


@dataclass(frozen=True)
class OwnModel:
    """The facts that the memory plan needs about a draft model that a drafter makes from the target.

    quantization: the format to which a copy of the target's weights is rounded; None = no copy is made, because the
    draft model reads the target's weights. layers: the target's layers that the draft model runs and caches, ascending;
    None = all. config: the spec of layers that are not the target's; their weights are counted in `Needs.weights`.
    """

    quantization: str | None = None
    layers: tuple[int, ...] | None = None
    config: Spec | None = None


@dataclass(frozen=True)
class OwnCheckpoint:
    """The facts that the memory plan needs about a draft model that a drafter loads.

    path: folder, file, name or hub id; None = the shipped draft model. quantization: the format to which the weights
    are rounded; None = they stay as they are.
    """

    path: str | None = None
    quantization: str | None = None

    def weights(self, shipped: str | None) -> Hashable:
        """Return a key that is equal for checkpoints with the same weights. shipped: the path if `path` is None."""
        said = self.quantization
        return named.place(self.path or shipped or ""), said if said is None or said == AUTO else Quantization.parse(
            said
        )


@dataclass(frozen=True)
class Needs:
    """What a drafter will need, for the memory plan and for the engine.

    layers: the inner layers of the target; the drafter reads their outputs (`Drafter.hidden_layers`). loads: the draft
    model that the drafter loads. makes: the draft model that the drafter makes from the target. weights: the weights
    that the drafter keeps in memory besides a draft model. parts: the specs of the drafters that the drafter combines.
    """

    layers: tuple[int, ...] = ()
    loads: OwnCheckpoint | None = None
    makes: OwnModel | None = None
    weights: Beside | None = None
    parts: tuple[str, ...] = ()

    @property
    def has_model(self) -> bool:
        """Whether the drafter runs a draft model, loaded or made from the target."""
        return self.loads is not None or self.makes is not None


class Known(Protocol):
    """What is known of a target before its weights are read. The engine opens the target once (engine/opened.py).

    is_packed: whether the target's weights will be integers of 4 or 8 bits in memory. auto: the spec that the drafter
    `auto` stands for. shipped_draft: the folder of the draft model that ships with the target; None = there is no such
    model. kv_cache_tokens: the number of tokens of a drafter's own cache; None = max_batch_size * max_seq_len.
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
        """The tokenizer; None where the target has only ids, or where tokenizers are not to be compared."""

    @property
    def fingerprint(self) -> str | None:
        """The tokenizer fingerprint that files with token ids must name; None = fingerprints are not compared."""

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
        """The block for multi-token prediction in the target's files; None where the files have no such block."""

    def resolve(self, spec: str) -> tuple[str, Any]:
        """Return the method and Options of a drafter's spec, as this file's `resolve` does, computed once per spec."""

    def open(self, name: str) -> OpenedCheckpoint:
        """Return another checkpoint, such as a draft model's, opened only once.

        Raises what opening raises.
        """


@dataclass(frozen=True)
class Wanted:
    """The method that a spec asks for, the method's Options, and what the drafter will need for a target."""

    method: str
    options: Any
    needs: Needs


@dataclass(frozen=True)
class Target:
    """The target model, and the other parts of an engine that a drafter may use."""

    model: Model  # the target model; the draft model has the same device and dtype
    opened: Known  # what was known before the target's weights were read
    num_ids: int  # all ids that have a token are below this number
    holes: tuple[int, ...] = ()  # ids below num_ids without a token
    loaded_draft: Checkpoint | None = None  # a draft model loaded by the caller; preferred to the shipped draft model
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, model: Model, opened: Known, loaded_draft: Checkpoint | None = None) -> Target:
        """Return a Target with the ids of the opened tokenizer, or else with all ids of the model's vocabulary."""
        num_ids, tokenizer = model.config.vocab_size, opened.tokenizer
        if tokenizer is None:
            return cls(model, opened, num_ids, loaded_draft=loaded_draft)
        return cls(model, opened, min(tokenizer.num_ids, num_ids), tuple(sorted(tokenizer.holes)), loaded_draft)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where the target has only ids."""
        return self.opened.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end an output."""
        return self.opened.end_ids

    @property
    def max_batch_size(self) -> int:
        """The most sequences that run together."""
        return self.opened.config.max_batch_size

    @property
    def max_seq_len(self) -> int:
        """The number of tokens that the longest sequence may have."""
        return self.opened.max_seq_len

    def operators(self, spec: Spec) -> Operators:
        """Return the operators for a draft model. Raises UnsupportedModel where the engine's cannot compute it."""
        target_ops = self.model.ops
        config = cast("Spec", self.model.config)
        name = ops.beside(self.opened.config.ops, target_ops.name, self.model.device, config, spec)
        return target_ops if name == target_ops.name else ops.make(name, self.model.device, spec)

    def shared(self, weights: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`, or the result of an earlier call for the same weights: drafters share weights.

        weights: a key that is equal for equal weights.
        """
        if weights not in self._shared:
            self._shared[weights] = make()
        value: T = self._shared[weights]
        return value


def resolve(spec: str, auto: str = WITHOUT_MODEL, *, looks: bool = True) -> tuple[str, Any]:
    """Return the method and the Options that a spec names.

    A spec is `name[:option=value,...]`, `auto`, or a model's folder, name or hub id. auto: the spec that `auto` stands
    for. looks: whether to look for a folder with the spec's name. If it is False, as for a request's spec, the disk is
    not read. A spec names a model if it has a path separator, is an existing folder, or is a name from
    data/models.toml. Raises BadOption for anything unknown. Where other engines use the unknown name for a method, the
    message gives forerun's name for that method.
    """
    if spec == "auto":
        spec = auto
    bare = unwrapped(spec)
    if bare.startswith("auto:"):
        raise BadOption(f"draft={shown(spec)} is not possible: 'auto' has no options; name the drafter itself")
    is_method = bare.partition(":")[0] in names(__name__)
    is_path = "/" in spec or os.sep in spec or (looks and (os.path.exists(spec) or named.find(spec) is not None))
    if not is_method and not is_path and (there := by_value("draft", spec.partition(":")[0])):
        raise BadOption(there)
    if not is_method and not is_path and looks and spec.endswith(_FILES):
        raise NotFound(f"there is no file {shown(spec)}: check the name")
    # A folder's name may have a colon in it, so the folder is looked for before the spec is split at its colon.
    name, options = ("model", {"path": spec}) if is_path and not is_method else parse_spec(bare)
    return name, make_options(load(__name__, name, "drafter").Options, options, name)


def instead(method: str, options: Any) -> tuple[str, Any]:
    """Return `method` and Options for it, which take over the values of `options` that are not defaults.

    options: the Options of another method. Raises BadOption where `method` lacks the option of such a value.
    """
    usual = type(options)()
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    given = {name: value for name, value in given.items() if value != getattr(usual, name)}
    return method, make_options(load(__name__, method, "drafter").Options, given, method)


def wanted(spec: str, target: Known) -> list[Wanted]:
    """Return an entry for the drafter that a spec asks for, and entries for the drafters it combines, recursively.

    Raises BadOption as `resolve` does, and whatever the methods raise for this target.
    """
    name, options = target.resolve(spec)
    module = load(__name__, name, "drafter")
    needs = module.needs(options, target) if has_needs(name) else Needs()
    whole = Wanted(name, options, needs)
    return [whole, *(entry for part in needs.parts for entry in wanted(part, target))]


def needs_a_model(name: str) -> str:
    """Return the error message for a method that was given no draft model."""
    return f"the drafter {name!r} needs a draft model: name its folder or hub id, as in {name}:path=FOLDER"


def has_needs(method: str) -> bool:
    """Return whether a method has a function `needs`: it reads files, or needs memory that the memory plan counts."""
    return hasattr(load(__name__, method, "drafter"), "needs")


def make(spec: str, target: Target) -> Drafter:
    """Build the drafter that a spec names, for a target. Raises BadOption for anything unknown."""
    name, options = target.opened.resolve(spec)
    drafter: Drafter = load(__name__, name, "drafter").build(options, target)
    return drafter
