"""Drafters guess tokens ahead of the target. Each method is one file, found by scanning this folder.

A file `<name>.py` holds `Options` (a frozen dataclass; each field with its unit and range in `metadata`) and
`build(options, target) -> Drafter`. If the method reads files, or needs anything else that the memory plan counts, the
file also holds

    needs(options, target) -> Needs     returns the needs of the drafter before any weight is read. target: a `Known`.
                                        Raises UserError if the options, or files such as config.json, show that the
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
from forerun.registry import by_value, load, make_options, names, parse_spec, unknown, unwrapped
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
    """Holds the results of one target pass for one sequence.

    Kept tokens are the tokens that the pass ran and that were not rejected. start: the index of the first kept token in
    the sequence. kept: the row of each kept token in the pass. scored: the range of the sequence's rows in the pass,
    which are the last committed token, draft nodes and extra rows, or the tokens of a prompt chunk. run: the index of
    the sequence in the lists of `scores`. scores: the results of the whole pass, for all sequences.
    """

    start: int
    kept: Seq[int]
    scored: range
    run: int
    scores: Scores

    @property
    def hidden(self) -> Any:
        """The target's hidden states, after the final norm, of the tokens that were not rejected, [len(kept), H]."""
        return self.scores.hidden[list(self.kept)]

    def layer(self, k: int) -> Any:
        """Return the residual stream after the target's first k layers, float32 [len(kept), H].

        The rows are for the tokens that were not rejected. k: one of the drafter's `hidden_layers`.
        """
        rows, kept = self.scores.taps[k], self.kept
        if len(kept) == len(rows):
            return rows  # no copy is needed: each pass has new arrays
        return rows[list(kept)]

    @property
    def tokens(self) -> Seq[int]:
        """The input token ids of all rows in `scored`."""
        return self.scores.runs[self.run].tokens

    @property
    def rows(self) -> dict[int, int]:
        """The row of each input token id (0 = first scored row). If rows share an id, the last kept row is given."""
        kept = [row - self.scored.start for row in self.kept]
        return {self.tokens[row]: row for row in (*range(len(self.scored)), *kept)}

    @property
    def best(self) -> list[int]:
        """The likeliest next token id at each row of `scored`; NO_NUMBERS (-1) for a row whose logits are not finite.

        Of ids with equal logits, the lowest is given. A drafter may read this property without setting `top_logits`. A
        prompt chunk has no logits, so its list is empty.
        """
        from forerun.sampling import largest

        return self.scores.best[self.run] or largest.best(self.scores.logits[self.run])

    def top(self, num: int) -> tuple[Ids, Rows]:
        """Return the ids and logits of the `num` likeliest next tokens at each row of `scored`: two arrays [rows, num].

        The likeliest token comes first. num: at most the drafter's `top_logits`. A prompt chunk has no logits, so both
        arrays have 0 rows.
        """
        from forerun.sampling import largest

        return largest.top(self.scores.logits[self.run], num)


def _point(guess: Seq[int]) -> Next | None:
    """Return the first token of `guess` as a `Next`, with log-probability 0; None if `guess` is empty."""
    return (lambda num: ((guess[0],), (0.0,))) if guess else None


class Drafter:
    """The base class of all drafters. A subclass must define `propose`; the other methods have defaults.

    caught_up: by sequence id, the number of tokens that the drafter's model ran in the last call of `propose` or
    `catch_up` only to catch up: committed tokens, and tokens of an encoder's input. The tokens that every round runs
    anyway are not counted. catchup_s: the seconds that the model took for the tokens in `caught_up`.
    """

    hidden_layers: tuple[int, ...] = ()  # hidden states that `observe` gets: k = after k layers of the target
    top_logits = 0  # how many of the likeliest tokens of each scored row `observe` gets
    shape = "chain"  # "chain" or "tree": the shape of the drafts
    also_chains = False  # whether a request gets chains if its rule does not judge the drafter's trees
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
        """Return the KV caches of the drafter's own models that may hold rows of `seq`."""
        return [runner.cache for runner in self.runners]

    def lend(self, cache: KVCache) -> None:
        """Receive the target's KV cache, which the drafter may only read. Called once, before any sequence begins."""

    def begin(self, seq: Sequence) -> None:
        """Prepare for a sequence that was admitted."""

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        """Draft for these decoding sequences, at most budget.num_tokens[b] nodes for seqs[b].

        Every token must be drawn from the distribution that the draft's `probs` gives for the token. The drafter must
        call budget.go_on before each draw. A drafter that has not caught up with a sequence drafts nothing for that
        sequence. The drafter must not change `seqs`, but it may lower the numbers in `budget`. coins: for each
        sequence, the random numbers with which tokens are drawn (see `Coins`).
        """
        raise NotImplementedError

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Learn from a target pass, which may include prompt chunks. Called after the pass's tokens are committed."""

    def resumes_from(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens of `seq` the target need not run again for this drafter.

        The target's cache holds all `num_tokens` tokens. A drafter that must see the target's hidden states of every
        token returns a smaller number. The target then runs the tokens after that number again.
        """
        return num_tokens

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that is finished or aborted."""

    def ahead(self, seq: Sequence, drafted: Seq[int], num_tokens: int) -> Seq[int]:
        """Guess at most `num_tokens` tokens after the committed tokens of `seq` followed by the tokens `drafted`.

        The drafter must not remember `drafted`, because these tokens may be rejected. This method runs no model and
        draws nothing. Returns () if there is no guess.
        """
        return ()

    def branch(self, seqs: Seq[Sequence], levels: Seq[Seq[int]], catchup_tokens: int) -> list[list[Next | None]]:
        """Return the tokens that may follow each node in levels[b], for the beam search of seqs[b] (seq.hypotheses).

        For each pass of the target, this method is called once for each level. The first level lists the last nodes of
        the beams. Each later level lists the nodes that were guessed in the level before. The entry of a node is None
        if there is no guess, or if the drafter has not caught up with the sequence. Drafters that guess by `ahead`
        return one token for each node. Drafters that cannot guess for several nodes leave `branches` False.
        catchup_tokens: as in Budget.
        """
        following: list[list[Next | None]] = []
        for seq, nodes in zip(seqs, levels, strict=True):
            texts = [seq.hypotheses.text(node, seq.hypotheses.base) for node in nodes] if seq.hypotheses else []
            following.append([_point(self.ahead(seq, text, 1)) for text in texts])
        return following

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Run at most `num_tokens` committed tokens of these sequences through the drafter's model, without drafting.

        The tokens of each sequence are run in order. Called while the target runs the sequences' prompts. Otherwise the
        first draft would wait until the drafter's own model has run the whole prompt.
        """

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        """Return how many tokens still fit into the drafter's own cache; None = the drafter sets no limit.

        without: the ids of sequences that are treated as ended.
        """
        return None


@dataclass(frozen=True)
class OwnModel:
    """Describes, for the memory plan, a draft model that a drafter makes from the target.

    quantization: the format to which a copy of the target's weights is rounded; None = no copy is made, because the
    draft model reads the target's weights. layers: the target's layers that the draft model runs and caches, ascending;
    None = all. config: the spec of the draft model's own layers, if it has any; `Needs.weights` counts their weights.
    """

    quantization: str | None = None
    layers: tuple[int, ...] | None = None
    config: Spec | None = None


@dataclass(frozen=True)
class OwnCheckpoint:
    """Describes, for the memory plan, a draft model that a drafter loads from a checkpoint.

    path: folder, file, name or hub id; None = the shipped draft model. quantization: the format to which the weights
    are rounded; None = the weights stay as they are stored.
    """

    path: str | None = None
    quantization: str | None = None

    def weights(self, shipped: str | None) -> Hashable:
        """Return a key that is equal for checkpoints with equal weights. shipped: the path to use if `path` is None."""
        said = self.quantization
        return named.place(self.path or shipped or ""), said if said is None or said == AUTO else Quantization.parse(
            said
        )


@dataclass(frozen=True)
class Needs:
    """Holds the needs of a drafter, for the memory plan and for the engine.

    layers: the target's inner layers after which the drafter reads the target's hidden states
    (`Drafter.hidden_layers`). loads: the draft model that the drafter loads. makes: the draft model that the drafter
    makes from the target. weights: all further weights that the drafter keeps in memory. parts: the specs of the
    drafters that the drafter combines.
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
    """Holds the facts about a target that are known before its weights are read.

    The engine opens the target once (engine/opened.py). is_packed: whether the target's weights will be integers of 4
    or 8 bits in memory. auto: the spec that the drafter `auto` stands for. shipped_draft: the folder of the draft model
    that ships with the target; None = no draft model ships. kv_cache_tokens: the number of tokens for which a drafter's
    own cache has room; None = max_batch_size * max_seq_len.
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
        """The target's tokenizer; None if the target has only ids, or if tokenizers are not to be compared."""

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint that a file with token ids must have to fit the target; None = fingerprints are ignored."""

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
        """The block for multi-token prediction in the target's files; None if the files have no such block."""

    def resolve(self, spec: str) -> tuple[str, Any]:
        """Return the method and the Options of a drafter's spec, as `drafters.resolve` does, but only once per spec."""

    def open(self, name: str) -> OpenedCheckpoint:
        """Open the checkpoint `name`, such as a draft model's, and return it. Each checkpoint is opened only once.

        Raises the errors that opening a checkpoint raises.
        """


@dataclass(frozen=True)
class Wanted:
    """Holds the method that a spec names, the method's Options, and the drafter's needs for a target."""

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
        """Return a Target with all ids of the tokenizer, or without a tokenizer all ids of the model's vocabulary."""
        num_ids, tokenizer = model.config.vocab_size, opened.tokenizer
        if tokenizer is None:
            return cls(model, opened, num_ids, loaded_draft=loaded_draft)
        return cls(model, opened, min(tokenizer.num_ids, num_ids), tuple(sorted(tokenizer.holes)), loaded_draft)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer; None if the target has only ids."""
        return self.opened.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """The token ids that end an output."""
        return self.opened.end_ids

    @property
    def max_batch_size(self) -> int:
        """The largest number of sequences that the engine runs together."""
        return self.opened.config.max_batch_size

    @property
    def max_seq_len(self) -> int:
        """The largest number of tokens that a sequence may have."""
        return self.opened.max_seq_len

    def operators(self, spec: Spec) -> Operators:
        """Return the operators that compute a draft model with this spec. Raises UnsupportedModel if none can."""
        target_ops = self.model.ops
        config = cast("Spec", self.model.config)
        name = ops.beside(self.opened.config.ops, target_ops.name, self.model.device, config, spec)
        return target_ops if name == target_ops.name else ops.make(name, self.model.device, spec)

    def shared(self, weights: Hashable, make: Callable[[], T]) -> T:
        """Call `make` once for each key `weights`, and return its result, so that drafters share weights.

        weights: a key that is equal for equal weights. A later call with the same key returns the stored result.
        """
        if weights not in self._shared:
            self._shared[weights] = make()
        value: T = self._shared[weights]
        return value


def resolve(spec: str, auto: str = WITHOUT_MODEL, *, looks: bool = True) -> tuple[str, Any]:
    """Return the method and the Options that a spec names.

    A spec is `name[:option=value,...]`, `auto`, or a model's folder, name or hub id. auto: the spec that `auto` stands
    for. looks: whether to look for a folder with the spec's name; False = do not read the disk, as for a request's
    spec. A spec names a model if it has a path separator, is an existing folder, or is a name from data/models.toml.
    Raises BadOption for anything unknown, and NotFound for a missing GGUF or safetensors file. If another engine has a
    method with the unknown name, the message gives forerun's name for that method.
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
    if not is_method and not is_path and looks and ":" not in bare:
        raise BadOption(
            f"{unknown('drafter', bare, names(__name__))}, or a draft model: its folder, GGUF file or hub id (org/name)"
        )
    # A folder's name may have a colon in it, so the folder is looked for before the spec is split at its colon.
    name, options = ("model", {"path": spec}) if is_path and not is_method else parse_spec(bare)
    return name, make_options(load(__name__, name, "drafter").Options, options, name)


def instead(method: str, options: Any) -> tuple[str, Any]:
    """Return `method`, and Options of `method` with those values of `options` that are not defaults.

    options: the Options of another method. Raises BadOption if `method` has no option for one of these values.
    """
    usual = type(options)()
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    given = {name: value for name, value in given.items() if value != getattr(usual, name)}
    return method, make_options(load(__name__, method, "drafter").Options, given, method)


def wanted(spec: str, target: Known) -> list[Wanted]:
    """Return a Wanted for the drafter that a spec names, then one for each drafter that it combines, recursively.

    Raises BadOption as `resolve` does, and the errors of each method's `needs`.
    """
    name, options = target.resolve(spec)
    module = load(__name__, name, "drafter")
    needs = module.needs(options, target) if has_needs(name) else Needs()
    return [Wanted(name, options, needs), *(entry for part in needs.parts for entry in wanted(part, target))]


def needs_a_model(name: str) -> str:
    """Return the error message for a method that was given no draft model."""
    return f"the drafter {name!r} needs a draft model: name its folder or hub id, as in {name}:path=FOLDER"


def has_needs(method: str) -> bool:
    """Return whether a method's file defines `needs`, because the drafter reads files or counts in the memory plan."""
    return hasattr(load(__name__, method, "drafter"), "needs")


def make(spec: str, target: Target) -> Drafter:
    """Build the drafter that a spec names, for a target. Raises BadOption for an unknown method or option."""
    name, options = target.opened.resolve(spec)
    drafter: Drafter = load(__name__, name, "drafter").build(options, target)
    return drafter
