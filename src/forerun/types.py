"""The nouns that every room shares. No arithmetic on models happens here, and nothing imports torch.

Shape legend, used in every docstring of the package:

    B  sequences of one step         T  rows (new tokens) of one ragged batch      N  draft nodes of one step
    R  rows whose logits are wanted  V  vocabulary size (rows of the LM head)      H  hidden size
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from forerun.errors import InternalError, shown
from forerun.params import SamplingParams as SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from forerun.blocks import CacheShape
    from forerun.config import Quantization
    from forerun.kv.pool import MakePools
    from forerun.ops.operators import Operators

FinishReason = Literal["stop", "length", "abort"]
Origin = Literal["accepted", "correction", "bonus", "plain"]

BEAM = "beam"  # in place of a rule, of a request that is a beam search
FORCED = "forced"  # the drafter of what a grammar leaves no choice about, which is asked before a request's own
NO_TOKEN = -2  # in place of a token where there is none: of a search whose texts differ, or where masks leave none
ROUND_TOKENS = 2  # committed tokens that a round leaves a draft model to run: one, or two after a fully accepted draft


# ------------------------------------------------------------------------------------------------- what is committed


@dataclass
class TokenLogprob:
    """Log-probabilities of one position under the raw model distribution (before bias, penalties, temperature)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)  # the most likely ids, best first


class TokenCounts:
    """The distinct ids of a sequence, and how often each occurs in its output, kept for the penalties.

    `update` reads each token once, the first time that it is asked after it was committed, so that a row costs the same
    however long the sequence is. A request without penalties never asks.
    """

    __slots__ = ("_num_counted", "counts", "ids", "places")

    def __init__(self) -> None:
        self.ids = array("q")  # in the order of their first occurrence
        self.counts = array("q")  # of the same ids; 0 = in the prompt only
        self.places: dict[int, int] = {}  # id -> where it stands in both
        self._num_counted = 0

    def update(self, tokens: Seq[int], num_prompt_tokens: int) -> None:
        """Count what was appended to `tokens` since the last call."""
        if self._num_counted == 0:
            self.ids = array("q", dict.fromkeys(tokens[:num_prompt_tokens]))
            self.counts = array("q", bytes(8 * len(self.ids)))
            self.places = {token: place for place, token in enumerate(self.ids)}
            self._num_counted = num_prompt_tokens
        for token in tokens[self._num_counted :]:
            place = self.places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0)
            self.counts[place] += 1
        self._num_counted = len(tokens)


# What may follow a text: num -> its `num` likeliest tokens, or fewer, best first, and their log-probabilities.
Next = Callable[[int], tuple[Seq[int], Seq[float]]]


class Hypotheses:
    """The texts that a beam search looks at, as a tree that only grows: each node is a token behind its parent.

    tokens, parents: by node; -1 = the prompt. base: node of the last committed token, which all live texts share. tips:
    the last nodes of the live texts, best first. Drafters read it, and add the nodes that they guess.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.base, self.tips = -1, [-1]
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int | None:
        """Return the node of `token` behind a node; None where there is none."""
        return self._children.get((parent, token))

    def add(self, parent: int, token: int) -> int:
        """Return that node, made where there is none."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def path(self, node: int, above: int = -1) -> list[int]:
        """Return the nodes behind `above`, an ancestor, down to `node`, which is among them unless it is `above`."""
        path = []
        while node != above:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def text(self, node: int, above: int = -1) -> list[int]:
        """Return the tokens of `path`."""
        return [self.tokens[n] for n in self.path(node, above)]

    def live(self) -> list[int]:
        """Return the base and all nodes between it and the tips, these included; each behind its parent."""
        return sorted({self.base}.union(*(self.path(tip, self.base) for tip in self.tips)))


def salt_of(source_ids: Seq[int], salt: str | None) -> str:
    """Return what names a source and the salt of its request, so that rows which depend on another are not found."""
    return f"{salt or ''} {hashlib.sha256(array('q', source_ids).tobytes()).hexdigest()}"


class Constraint(Protocol):
    """Where a grammar stands along a sequence (forerun.sampling.grammar.Walk)."""

    @property
    def failure(self) -> Exception | None:
        """Why it cannot be followed any more; its request ends with it."""

    @property
    def may_draft(self) -> bool:
        """Whether drafts may ask it, which takes time."""

    def allowed(self, committed: Seq[int], drafted: Seq[int] = ()) -> Any:
        """Return the ids that may follow these tokens. Raises BadOption where the grammar refuses them."""

    def is_over(self, committed: Seq[int], drafted: Seq[int] = ()) -> bool:
        """Whether nothing can follow these tokens, which are a whole text of the grammar."""

    def forced(self, committed: Seq[int], drafted: Seq[int] = ()) -> list[int]:
        """Return the tokens that must come next."""

    def behind(self, committed: Seq[int], sure: Seq[int]) -> Constraint:
        """Return how it is seen by a drafter for which tokens that must come next are committed already."""


@dataclass(slots=True)
class Sequence:
    """The committed tokens of one request. Only `commit` appends to them; drafted tokens never enter.

    acceptance: the verification rule; where the request names none, match if it has a seed and temperature > 0.
    """

    id: int  # also the slot of its caches
    tokens: list[int]  # prompt, then committed tokens
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_len: int  # prompt + output tokens at most, by max_tokens and max_seq_len
    end_ids: frozenset[int] = frozenset()  # ids that end the output (end of sequence and stop ids)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    prediction_ids: tuple[int, ...] = ()  # what the request expects its output to resemble
    draft: str = "none"  # name of the drafter that serves it
    round: int = 0  # decode steps so far; part of the random counter, so it survives preemption
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # By place in the prompt, where they are asked for; the first token has none.
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    hypotheses: Hypotheses | None = None  # of a beam search; what all of its live texts begin with is committed
    source_ids: tuple[int, ...] = ()  # of an encoder-decoder, whose tokens are the decoder's
    grammar: Constraint | None = None  # what its output is held to
    acceptance: str = field(init=False)
    counts: TokenCounts = field(init=False, default_factory=TokenCounts, repr=False, compare=False)

    def __post_init__(self) -> None:
        usual = "match" if self.params.seed is not None and not self.params.greedy else "ratio"
        self.acceptance = usual if self.params.acceptance is None else self.params.acceptance

    def commit(self, token: int, origin: Origin) -> FinishReason | None:
        """Append a verified token, and return why the output ends with it; None where it goes on.

        Stop strings are not looked at here: they need the text.
        Raises InternalError on a finished sequence or beyond max_len.
        """
        if self.finish_reason is not None or len(self.tokens) >= self.max_len:
            raise InternalError(f"sequence {self.id} cannot take one more token")
        self.tokens.append(token)
        self.origins.append(origin)
        is_full = len(self.tokens) >= self.max_len
        if is_full and self.params.forced_eos_token_id is not None:
            return "length"  # the end that stands there says nothing of what the model would have said
        if token in self.end_ids:
            return "stop"
        if self.grammar is not None and self.hypotheses is None and self.grammar.is_over(self.tokens):
            return "stop"
        return "length" if is_full else None

    def behind(self, sure: Seq[int]) -> Sequence:
        """Return the sequence as it will be when tokens are committed that are sure to be, for a drafter to read."""
        grammar = None if self.grammar is None else self.grammar.behind(self.tokens, sure)
        return replace(self, tokens=[*self.tokens, *sure], grammar=grammar)

    @property
    def salt(self) -> str | None:
        """What the cache rows of its tokens depend on beside these: the request's salt, and its source."""
        return salt_of(self.source_ids, self.params.cache_salt) if self.source_ids else self.params.cache_salt

    @property
    def output_ids(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


# --------------------------------------------------------------------------------------------- probabilities, coins


@dataclass(frozen=True, slots=True)
class Probs:
    """One exact distribution over V ids, in one of four forms.

    The forms are a point mass, which stands for a one-hot vector without storing it; a dense vector; and a list of the
    few ids of a wide vocabulary that filters left. Ids beyond a vector, and ids that a list lacks, have probability 0.
    soft: of a greedy row, the distribution at temperature 1, where the verification rule asks for it. afar: in place of
    the vector, a distribution that is still on a device, and comes when its weights are asked for. Whatever numpy takes
    for an array may be given, and is kept as one, of the same memory.
    """

    point: int | None = None  # the id that has probability 1
    dense: npt.NDArray[np.floating[Any]] | None = None  # [V], float32 or wider
    ids: npt.NDArray[np.int64] | None = None  # [n], ascending
    listed: npt.NDArray[np.floating[Any]] | None = None  # [n], float32 or wider: the probabilities of `ids`
    soft: Probs | None = None
    afar: Afar | None = None

    def __post_init__(self) -> None:
        if self.point is not None:
            return
        import numpy as np  # a module that only names things does not wait for numpy

        for name in ("dense", "ids", "listed"):
            given = getattr(self, name)
            if given is not None and type(given) is not np.ndarray:
                object.__setattr__(self, name, np.asarray(given))

    @staticmethod
    @functools.cache
    def of_point(token: int) -> Probs:
        """Return the distribution in which `token` has probability 1."""
        return Probs(point=token)

    def at(self, token: int) -> float:
        """Probability of `token`."""
        if self.point is not None:
            return 1.0 if token == self.point else 0.0
        if self.afar is not None and self.dense is None and token in self.afar.chances:
            return self.afar.chances[token]
        place = token
        if self.ids is not None:
            place = int(self.ids.searchsorted(token))
            if place == len(self.ids) or int(self.ids[place]) != token:
                return 0.0
        return float(self.weights[place]) if 0 <= place < len(self.weights) else 0.0

    @property
    def weights(self) -> npt.NDArray[np.floating[Any]]:
        """[n]: the probabilities of `ids`, or of the ids 0 to n - 1. Raises InternalError where there is no vector."""
        weights = self.dense if self.ids is None else self.listed
        if weights is None and self.afar is not None:
            weights = self.afar.weights
        if weights is None:
            raise InternalError("a distribution needs a point or a dense vector, or ids with their probabilities")
        return weights


class Afar:
    """A distribution that a device holds, and what is known of it here.

    fetch() -> [V] copies its weights to the host; they are kept. chances: the probabilities of some ids. draw: how an
    id was drawn from it there, and `token`, the one that was.
    """

    __slots__ = ("_fetch", "_weights", "chances", "draw", "token")

    def __init__(
        self, fetch: Callable[[], npt.NDArray[np.floating[Any]]], chances: Mapping[int, float], draw: Draw, token: int
    ) -> None:
        self._fetch, self.chances, self.draw, self.token = fetch, chances, draw, token
        self._weights: npt.NDArray[np.floating[Any]] | None = None

    @property
    def weights(self) -> npt.NDArray[np.floating[Any]]:
        """The probabilities of the ids 0 to V - 1, on the host."""
        if self._weights is None:
            self._weights = self._fetch()
        return self._weights


class Coins(Protocol):
    """The random decisions of one sequence in one round, passed in from outside (docs/exactness.md).

    `depth` counts from the first token of the round: the token decided has absolute index (committed tokens + depth).
    `lane` separates several coins at one depth.
    """

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """Return True with probability min(1, prob): never for 0, always for 1."""

    def draw(self, probs: Probs, depth: int) -> int:
        """Draw a correction or a bonus: an id with the distribution `probs`."""

    def draft(self, probs: Probs, depth: int, lane: int = 0) -> int:
        """Draw a drafter's own id with the distribution `probs`. Several draws at one depth need several lanes."""

    def pick(self, probs: Probs, depth: int) -> int:
        """Return the argmax of log probs + Gumbel noise of (seed, absolute index).

        Drafter, verifier and plain decoding share this noise.
        """

    def picks(self, probs: Probs, depth: int, num: int) -> list[int]:
        """Return the `num` ids of the largest log probs + the same noise, in order; fewer where fewer are possible.

        The first is that of `pick`. A drafter's several children of one node are these.
        """


# ------------------------------------------------------------------------------------------------ the guess, the ruling


@dataclass(frozen=True)
class Extra:
    """Rows of one sequence that are scored and shown to `Drafter.observe`, never judged and never kept.

    They count as nodes of the budget. tokens [M]; parents [M]: an index among the sequence's nodes and then these rows,
    -1 = the last committed token. The depth of a row is the number of its ancestors. vectors: by row, the vector [H]
    that the first layer gets in place of the token's embedding (learned look-ahead tokens).
    """

    tokens: list[int]
    parents: list[int]
    vectors: Mapping[int, Rows] = field(default_factory=dict)


class SharedRows(NamedTuple):
    """The rows that score the nodes of one sequence: tokens [M], parents [M] (-1 = the last committed token).

    places [nodes]: the row of each node.
    """

    tokens: list[int]
    parents: list[int]
    places: list[int]


@dataclass(frozen=True)
class Draft:
    """The drafted tokens of all sequences of one step, in flat lists.

    tokens [N], parents [N] (index of the parent node in the same flat numbering, -1 = the node follows the last
    committed token; parents come before children), node_starts [B+1], probs [N] (the distribution each token was drawn
    from). A chain is a tree in which the parent of each node is the node before it. A sequence may have no nodes: it
    then decodes plainly. Siblings come in the order in which they were drawn, and a sequence's nodes best first.
    extra: by sequence, rows that are scored as well. shared: by sequence, how its nodes share rows (`packed`). forced:
    nodes that a grammar leaves no choice about, and not of the drafter that serves the sequence.

    Three numberings meet in a step. A *node* is a place in `tokens`, over all sequences. A *row of a run* is a place
    among what one sequence contributes to a pass: row 0 is its last committed token, then come its nodes, and extra
    rows last (`row`). A *row of the pass* is a place among the runs of all sequences, one behind the other
    (models.runner.Scores.rows).
    """

    tokens: list[int]
    parents: list[int]
    node_starts: list[int]
    probs: list[Probs]
    extra: Mapping[int, Extra] = field(default_factory=dict)
    shared: Mapping[int, SharedRows] = field(default_factory=dict)
    forced: frozenset[int] = frozenset()

    @staticmethod
    def empty(num_sequences: int) -> Draft:
        """Return a draft in which no sequence has a node."""
        return Draft([], [], [0] * (num_sequences + 1), [])

    @staticmethod
    def chains(tokens: Seq[Seq[int]], probs: Seq[Seq[Probs]]) -> Draft:
        """Make a draft of one chain per sequence; `tokens[b][i]` was drawn from `probs[b][i]` after `tokens[b][:i]`."""
        starts, parents = [0], []
        for chain in tokens:
            parents += [-1 if i == 0 else starts[-1] + i - 1 for i in range(len(chain))]
            starts.append(starts[-1] + len(chain))
        return Draft([t for c in tokens for t in c], parents, starts, [p for c in probs for p in c])

    @staticmethod
    def joined(drafts: Seq[Draft]) -> Draft:
        """Put the drafts of several groups of sequences one after the other."""
        tokens: list[int] = []
        parents: list[int] = []
        starts, probs = [0], list[Probs]()
        extra: dict[int, Extra] = {}
        shared: dict[int, SharedRows] = {}
        forced = set[int]()
        for draft in drafts:
            first = len(tokens)
            forced |= {first + node for node in draft.forced}
            extra |= {len(starts) - 1 + b: rows for b, rows in draft.extra.items()}
            shared |= {len(starts) - 1 + b: rows for b, rows in draft.shared.items()}
            tokens += draft.tokens
            parents += [p if p < 0 else first + p for p in draft.parents]
            starts += [first + start for start in draft.node_starts[1:]]
            probs += draft.probs
        return Draft(tokens, parents, starts, probs, extra, shared, frozenset(forced))

    def only(self, b: int) -> Draft:
        """Return the draft of sequence b as a draft of one sequence, its nodes numbered from 0."""
        own = self.nodes(b)
        parents = [p if p < 0 else p - own.start for p in self.parents[own.start : own.stop]]
        cut = slice(own.start, own.stop)
        extra = {0: self.extra[b]} if b in self.extra else {}
        shared = {0: self.shared[b]} if b in self.shared else {}
        forced = frozenset(node - own.start for node in self.forced if node in own)
        return Draft(self.tokens[cut], parents, [0, len(own)], self.probs[cut], extra, shared, forced)

    @property
    def num_sequences(self) -> int:
        return len(self.node_starts) - 1

    def nodes(self, b: int) -> range:
        """Return the flat indices of sequence b's nodes."""
        return range(self.node_starts[b], self.node_starts[b + 1])

    def behind(self, run: Seq[int]) -> Draft:
        """Return a draft of one sequence with these tokens before it, a chain that is forced."""
        num = len(run)
        extra = {b: replace(own, parents=[num + p for p in own.parents]) for b, own in self.extra.items()}
        return Draft(
            [*run, *self.tokens],
            [*range(-1, num - 1), *(num + p for p in self.parents)],  # from -1, what it followed, to the last of them
            [0, num + len(self.tokens)],
            [*map(Probs.of_point, run), *self.probs],
            extra,
            forced=frozenset({*range(num), *(num + node for node in self.forced)}),
        )

    def before(self, run: Seq[int], tip: int) -> Draft:
        """Return a draft of one sequence with these tokens behind its node `tip`, a chain that is forced.

        A draft with extra rows, which are counted from the end of its nodes, is returned as it is.
        """
        if not run or self.extra:
            return self
        num = len(self.tokens)
        return Draft(
            [*self.tokens, *run],
            [*self.parents, tip, *range(num, num + len(run) - 1)],
            [0, num + len(run)],
            [*self.probs, *map(Probs.of_point, run)],
            forced=self.forced | set(range(num, num + len(run))),
        )

    def num_own(self, b: int) -> int:
        """Return how many nodes of sequence b are those of the drafter that serves it."""
        return sum([node not in self.forced for node in self.nodes(b)]) if self.forced else len(self.nodes(b))

    def num_asked(self, b: int) -> int:
        """Return how many nodes and extra rows sequence b has, which are what its budget counts."""
        return self.num_own(b) + (len(self.extra[b].tokens) if b in self.extra else 0)

    def num_rows(self, b: int) -> int:
        """Return how many rows of sequence b's run score its nodes."""
        return len(self.shared[b].tokens) if b in self.shared else len(self.nodes(b))

    def row(self, b: int, node: int) -> int:
        """Return the row of sequence b's run that scores one of its nodes."""
        place = node - self.node_starts[b]
        return 1 + (self.shared[b].places[place] if b in self.shared else place)

    def packed(self) -> Draft:
        """Return the draft with `shared` set for each sequence whose nodes need fewer rows than there are of them.

        A sequence with extra rows, which hang from rows of nodes, is left as it is, and so are chains.
        """
        shared: dict[int, SharedRows] = {}
        for b in range(self.num_sequences):
            nodes = self.nodes(b)
            is_chain = self.parents[nodes.start + 1 : nodes.stop] == list(nodes[:-1])
            if len(nodes) > 1 and not is_chain and b not in self.extra:
                rows = self.shared_rows(b)
                if len(rows.tokens) < len(nodes):
                    shared[b] = rows
        return replace(self, shared=shared) if shared else self

    def shared_rows(self, b: int) -> SharedRows:
        """Merge sequence b's equal siblings, and what hangs below them, into one row each, as a prefix tree.

        The nodes stay: each was drawn by itself, and is judged by itself with its own probs. So K drafts of a sequence
        cost the rows of their different prefixes alone (speculative decoding of several drafts, packed as a tree).
        """
        nodes = self.nodes(b)
        places: list[int] = []
        rows: dict[tuple[int, int], int] = {}  # (row of the parent, token) -> row
        for node in nodes:
            parent = self.parents[node]
            key = (places[parent - nodes.start] if parent >= 0 else -1, self.tokens[node])
            places.append(rows.setdefault(key, len(rows)))
        return SharedRows([token for _, token in rows], [parent for parent, _ in rows], places)

    def check(self, b: int) -> None:
        """Raise InternalError where a node or an extra row of sequence b has a parent that does not come before it."""
        nodes, extra = self.nodes(b), self.extra.get(b)
        is_tree = all(p == -1 or nodes.start <= p < n for n, p in zip(nodes, self.parents[nodes.start :], strict=False))
        if not is_tree or any(not -1 <= p < i for i, p in enumerate(extra.parents if extra else (), len(nodes))):
            raise InternalError(f"the parents of the draft {shown(self)} are no trees: a parent comes before its child")

    def depth(self, b: int) -> int:
        """Return the number of nodes on the longest path of sequence b."""
        depths: dict[int, int] = {-1: 0}
        for node in self.nodes(b):
            depths[node] = depths[self.parents[node]] + 1
        return max(depths.values())

    def path(self, node: int) -> list[int]:
        """Return the flat indices from the first node of the path down to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


def _may(*_: Any) -> bool:
    """Say yes: the answer of a policy that leaves a drafter the whole of its budget."""
    return True


@dataclass
class Draw:
    """How the tokens of one run are drawn where its model draws them itself (`run_ahead`), with the pipeline's bits.

    filters: (temperature, 0 = the likeliest id; top_k; log of min_p; top_p; the most ids that are listed), as
    `sampling.filters_of` gives them. shares_noise: whether an id is picked as `Coins.pick` picks it, else as
    `Coins.draft` draws. seed, position, round: of these coins. purpose: of the coin, where no noise is shared. probs:
    the distribution that each token was drawn from, which the model adds.
    """

    filters: tuple[float, int, float, float, int]
    shares_noise: bool
    seed: int
    position: int
    round: int
    purpose: int = 0  # forerun.sampling.random.PURPOSE_DRAFT
    probs: list[Probs] = field(default_factory=list)


MODEL_SHARE, FOUND_SHARE = 0.85, 0.5  # of guesses that are accepted under a grammar, where nobody counts them
# Of a further row, in passes that are spared: on a processor it takes 0.13 to 0.19 of a pass of one row, and not each
# pass with such a row behind it spares one.
ROW_PRICE = 0.25
EDGES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)  # of a guess's probability: how sure a model is of it


@dataclass
class Stop:
    """When one sequence's chain of guesses ends: where it is no longer likely enough that all of it is accepted.

    shares [len(EDGES) + 1]: how often a token is accepted whose probability, by the model that guessed it, lies below
    the first edge, between two of them, or above the last. worth: the least probability, of all tokens up to it, at
    which each is worth drafting; behind the last none is. share: how often a token is accepted that is not known yet.
    confidences: the probabilities of the tokens that were drafted, which the drafter adds. A token that ends a chain
    stays in it, so that the decision looks only at what is drawn already (docs/exactness.md); a drafter that draws
    nothing may look at a token first (`takes`).
    is_shut: whether a model is not to draft at all. num_unread: committed tokens that it has not run, which a drafter
    says that searches. search: of a guess that a search in the text makes before the model is asked; it is drafted
    where its tokens promise at least `bar` more than they cost.
    """

    shares: Seq[float]
    worth: Seq[float]
    share: float = 1.0
    is_shut: bool = False
    num_unread: int | None = None
    search: Stop | None = None
    bar: float = 0.0
    confidences: list[float] = field(default_factory=list)
    gain: float = 0.0  # what the tokens that were taken promise, less what they cost
    _survival: float = 1.0

    @staticmethod
    def never(length: int) -> Stop:
        """Return a stop that ends no chain of at most `length` tokens early."""
        return Stop((1.0,) * (len(EDGES) + 1), (0.0,) * (length + 1))

    @property
    def least(self) -> list[float]:
        """The product of the shares of all tokens so far, below which no other one follows.

        Behind the first token, the second and so on; behind the last of them none does.
        """
        return [worth / max(self.share, 1e-6) for worth in self.worth[1:]]

    @property
    def survival(self) -> float:
        """How likely all tokens are accepted that were drafted, by the model or by the search."""
        is_found = self.search is not None and self.search.confidences and not self.confidences
        return self.search._survival if self.search is not None and is_found else self._survival

    @property
    def pays(self) -> bool:
        """Whether a first token is worth drafting."""
        return self.worth[0] / max(self.share, 1e-6) <= 1

    def takes(self, confidence: float) -> bool:
        """Return whether a token is worth its row, and add it if it is; only of a point mass."""
        depth, survival = len(self.confidences), self._survival * self.share_of(confidence)
        if depth >= len(self.worth) or survival < self.worth[depth]:
            return False
        self.confidences.append(confidence)
        self.gain += survival - self.worth[depth]
        self._survival = survival
        return True

    def share_of(self, confidence: float) -> float:
        """Return how often a token is accepted of which its drafter is so sure."""
        return self.shares[bisect.bisect_right(EDGES, confidence)]

    def goes_on(self, confidence: float) -> bool:
        """Add a token, and return whether another may follow."""
        depth = len(self.confidences)
        self.confidences.append(confidence)
        self._survival *= self.share_of(confidence)
        least = self.least
        return depth < len(least) and self._survival >= least[depth]


@dataclass
class Budget:
    """How far this step may draft. The pacing policy makes it, and the drafter reads it.

    num_tokens [B]: most draft nodes of each sequence. catchup_tokens: most committed tokens the drafter may run
    through its own model before drafting, beside those that the previous round left.
    go_on(b, depth, draft_probs[, logits]): the drafter asks it before each draw; it may look at the distribution, never
    at the drawn token (docs/exactness.md). go_behind(b, depth, token, draft_probs[, logits]): a drafter with a model
    asks it after each draw, whether another token may follow; the drawn one stays in the draft whatever the answer.
    limits [B]: nodes that each could have by its own end and the room there is, whatever is granted. What a grammar
    forces may take them; 0 = it is not to be drafted; empty = of no sequence.
    logits [V]: a model's own, before bias, temperature and filters. A drafter without a model leaves them out, and one
    with a model need not compute them unless `reads_logits`. stops: by sequence, when a chain of guesses of which a
    model tells the probabilities ends besides; only of drafters that `tells_confidence`.
    """

    num_tokens: list[int]
    catchup_tokens: int
    go_on: Callable[..., bool] = _may
    go_behind: Callable[..., bool] = _may
    reads_logits: bool = False
    stops: Mapping[int, Stop] = field(default_factory=dict)
    limits: list[int] = field(default_factory=list)

    @property
    def stops_early(self) -> bool:
        """Whether a draft may end before its budget; where it cannot, a drafter may make a whole draft at once."""
        return self.go_on is not _may or self.go_behind is not _may

    def carries(self, b: int, num_guessed: int, num_forced: int, share: float = MODEL_SHARE) -> bool:
        """Whether tokens that a grammar forces are worth their rows behind so many guesses of sequence b.

        They spare a pass if all guesses are accepted, and are lost otherwise. share: of guesses that are accepted,
        where pacing does not know it.
        """
        stop = self.stops.get(b)
        survival = share**num_guessed if stop is None else stop.survival
        return survival >= (1 - survival) * ROW_PRICE * num_forced

    def only(self, members: Seq[int], catchup_tokens: int) -> Budget:
        """Return the budget of some of the sequences, which are numbered anew.

        members: their indices in this budget. catchup_tokens: what the other drafters of the step left to them.
        """
        own = Budget([self.num_tokens[b] for b in members], catchup_tokens, reads_logits=self.reads_logits)
        own.limits = [self.limits[b] for b in members] if self.limits else []
        own.stops = {i: self.stops[b] for i, b in enumerate(members) if b in self.stops}
        if self.go_on is not _may:
            own.go_on = lambda i, *at: self.go_on(members[i], *at)
        if self.go_behind is not _may:
            own.go_behind = lambda i, *at: self.go_behind(members[i], *at)
        return own


@dataclass(frozen=True)
class AcceptanceTest:
    """One test of a verdict: the node, its target and draft probability, and the outcome.

    Where a node has several children, each test after the first uses what the earlier tests left of the target's
    probabilities. price: of a lossy rule that knows it, the total variation between the target's distribution and that
    of the token emitted here.
    """

    node: int
    target_prob: float
    draft_prob: float
    accepted: bool
    price: float | None = None


@dataclass
class Verdict:
    """The ruling on a Draft. Lists over the B sequences; a step emits len(paths[b]) + 1 tokens."""

    paths: list[list[int]]  # accepted nodes, flat indices, root to tip
    # A correction after a rejection, a bonus after none, plain where nothing was drafted; NO_TOKEN = the path alone is
    # emitted, by a beam search whose texts differ behind it.
    next_tokens: list[int]
    tests: list[list[AcceptanceTest]]  # of every child that was tested, in order

    def num_tested(self, b: int) -> int:
        """Return how many nodes of sequence b's path had a child that was tested, the root included.

        The children that were tested below one node count once.
        """
        is_rejected = bool(self.tests[b]) and not self.tests[b][-1].accepted
        return len(self.paths[b]) + is_rejected

    def emitted(self, draft: Draft, b: int) -> list[int]:
        """Return the tokens that the step emits for sequence b: the accepted ones, then the next token."""
        path, next_token = self.paths[b], self.next_tokens[b]
        behind = [] if next_token == NO_TOKEN else [next_token]
        return [*[draft.tokens[n] for n in path], *behind] if path else behind


# ------------------------------------------------------------------------------------------------ one forward pass


class Source(NamedTuple):
    """Where the rows of an encoder-decoder's source lie: a slot of the cache, and how many of its rows are of it."""

    slot: int
    num_tokens: int


@dataclass(frozen=True)
class RaggedBatch:
    """One forward pass: each sequence contributes a run of new tokens, and nothing is padded.

    tokens [T] and positions [T] (lists, or int64 tensors where they never were on the host), run_starts [B+1],
    slots [B] (cache slot of each run), cached [B] (rows of the slot that every row of the run sees, in order).
    pending [B]: rows behind the cached ones that are written and not kept, which only some rows of the run see.
    ancestors [T]: of a row in a tree, the pending rows and rows of its run that it sees, itself included: bit j is the
    j-th of them. 0 = the row of a run whose rows follow each other, which sees all that comes before it. Both lists are
    empty where no run is a tree. `words` has them for backends that want 64 bits.
    sources [B]: of an encoder-decoder, where the source of each run lies; empty where there is none.
    silent: runs of which no logits are wanted, as of a prompt's.
    """

    tokens: list[int] | Rows
    positions: list[int] | Rows
    run_starts: list[int]
    slots: list[int]
    cached: list[int]
    pending: Seq[int] = ()
    ancestors: Seq[int] = ()
    sources: Seq[Source] = ()
    silent: frozenset[int] = frozenset()

    def ids(self) -> tuple[list[int], list[int]]:
        """Return tokens and positions as lists on the host."""
        tokens, positions = (ids if isinstance(ids, list) else ids.tolist() for ids in (self.tokens, self.positions))
        return tokens, positions

    def run(self, b: int) -> range:
        """Return the rows of run b."""
        return range(self.run_starts[b], self.run_starts[b + 1])

    def is_tree(self, b: int) -> bool:
        """Return whether rows of run b have ancestors of their own; else they follow each other."""
        run = self.run(b)
        return bool(self.ancestors) and len(run) > 0 and self.ancestors[run.start] != 0

    def num_pending(self, b: int) -> int:
        """Return the pending rows before run b."""
        return self.pending[b] if self.pending else 0

    def end(self, b: int) -> int:
        """Return the rows of run b's slot once the run is written: cached ones, pending ones, and the run's own."""
        return self.cached[b] + self.num_pending(b) + len(self.run(b))

    def seen(self, b: int) -> list[list[int]]:
        """Return which pending rows and rows of run b each of its rows sees, ascending, itself last.

        A row comes behind its ancestors, so this is also the order of their logical positions.
        """
        if not self.is_tree(b):
            return [list(range(i + 1)) for i in range(len(self.run(b)))]
        return [bits(self.ancestors[row]) for row in self.run(b)]

    def words(self, b: int) -> tuple[int, list[int]]:
        """Return how many of the first pending rows and rows of a tree all rows of run b see, and a word for each row.

        Bit j of a word is row `shared + j`. The first row of a verified draft is the last committed token, which all
        rows see, so the words of at most 64 nodes, extra rows included, have 64 bits. Those of a beam search may have
        more.
        """
        words = [self.ancestors[row] for row in self.run(b)]
        common = functools.reduce(int.__and__, words)
        shared = (common ^ (common + 1)).bit_length() - 1
        return shared, [word >> shared for word in words]

    def parents(self, b: int) -> list[int]:
        """Return the parent of each pending row and of each row of run b, an index into these; -1 = the cached rows.

        A pending row that no row of the run sees has -1.
        """
        num_pending = self.num_pending(b)
        found = [-1] * (num_pending + len(self.run(b)))
        for own in self.seen(b):
            for parent, child in itertools.pairwise(own):
                found[child] = parent
        return found

    def visible(self, b: int, i: int) -> list[int]:
        """Return what row i of run b attends to, as indices into CacheView.read_rows[b].

        They are the cached rows, then the row's ancestors, then the row itself.
        """
        cached = self.cached[b]
        if not self.is_tree(b):
            return list(range(cached + i + 1))
        return [*range(cached), *(cached + j for j in bits(self.ancestors[self.run_starts[b] + i]))]


def bits(word: int) -> list[int]:
    """Return the places of the bits that are set, ascending."""
    found = []
    while word:
        lowest = word & -word
        found.append(lowest.bit_length() - 1)
        word ^= lowest
    return found


def ancestor_words(parents: Seq[int]) -> list[int]:
    """Return, of each row of a tree, the bits of its ancestors and of itself; parents [n] come before children."""
    words: list[int] = []
    for i, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << i)
    return words


@dataclass(frozen=True)
class CacheView:
    """The rows of the cache that one ragged batch reads and writes; they are the same in all layers.

    write_rows [T]: physical row of each new token. read_rows[b]: physical rows of run b's keys, the cached ones in
    logical order, then pending ones, then the run's own.
    """

    batch: RaggedBatch
    write_rows: npt.NDArray[np.int64]
    read_rows: list[npt.NDArray[np.int64]]


class ModelConfig(Protocol):
    """What the engine must know of an architecture."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def cache_shape(self) -> CacheShape: ...


class Rows(Protocol):
    """Hidden rows [T, H] where a model computes: numpy's array on the host, a tensor on a device."""

    @property
    def shape(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def tolist(self) -> Any: ...


class RowsOf(Protocol):
    """What can be done with the rows of a model, wherever they are."""

    def empty(self, num: int, width: int) -> Any:
        """Return rows that are not written yet."""

    def join(self, parts: Any) -> Any:
        """Return rows one behind the other."""

    def take(self, rows: Any, places: Seq[int]) -> Any:
        """Return a copy of the rows at some places."""

    def from_host(self, rows: npt.NDArray[Any]) -> Any:
        """Return rows of the host as those of the model."""

    def top(self, logits: Any, num: int) -> npt.NDArray[np.int64]:
        """Return the ids of the largest logits of each row, best first [R, num], on the host."""

    def to_host(self, rows: Any) -> npt.NDArray[Any]:
        """Return the rows as numpy's array, which is written once the model was waited for."""


class Model(Protocol):
    """Weights plus one forward pass. It knows nothing of drafts, requests or text, and reads caches of one class.

    What only some models can do is a protocol of its own: FindsBest, DrawsRows, RunsAhead.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def device(self) -> str: ...
    @property
    def weight_dtype(self) -> str: ...
    @property
    def activation_dtype(self) -> str: ...
    @property
    def cache_dtype(self) -> str: ...
    @property
    def make_pools(self) -> MakePools: ...
    @property
    def rows(self) -> RowsOf: ...
    @property
    def ops(self) -> Operators: ...

    def forward(
        self,
        batch: RaggedBatch,
        cache: Any,
        layers: Seq[int] | None = None,
        hidden: Any = None,
        taps: Mapping[int, Any] | None = None,
    ) -> Any:
        """Run every new token through these layers (None = all) and write what they keep into the cache.

        hidden [T, H]: what the first layer gets; None = the tokens' embeddings. taps: by k, a float32 [T, H] to which
        the residual stream before layer k is written. A model with experts takes `num_experts`, too: a list to which is
        appended, by the end of `wait`, of each such layer, how many of them some row chose. Returns rows [T, H], behind
        the final norm if the last layer ran.
        """

    def rounded(self, quantization: Quantization) -> Model:
        """Return a second model of these weights, each matrix rounded to so many bits."""

    def embed(self, ids: Seq[int]) -> Any:
        """Return the embeddings of these ids [n, H]."""

    def head(self, ids: Seq[int]) -> npt.NDArray[np.float32]:
        """Return rows of the LM head on the host [n, H]."""

    def norm(self, hidden: Any) -> Any:
        """Return rows of the residual stream [R, H] behind the final norm."""

    def logits(self, hidden: Any, num_ids: int | None = None) -> Any:
        """hidden [R, H] -> float32 logits [R, V], or [R, num_ids] of the first ids."""

    def wait(self) -> None:
        """Return when all that was asked for is computed; until then a time that is read is that of a launch."""


@runtime_checkable
class FindsBest(Protocol):
    """A model that finds the largest logits without writing the others."""

    def best(self, hidden: Any, rows: list[int], num_ids: int) -> tuple[list[int], list[float]]:
        """Return ids and values of the largest of the first `num_ids` logits of some rows of hidden [T, H].

        Ties go to the lowest id, and NaN counts as the largest.
        """


@runtime_checkable
class DrawsRows(Protocol):
    """A model that draws from rows of logits where these are, with the bits of the sampling pipeline."""

    def draw(
        self, hidden: Any, rows: list[int], num_ids: int, draws: Seq[Draw], asked: Seq[Seq[int]]
    ) -> tuple[list[Probs], list[int]]:
        """Draw an id of the first `num_ids` logits of each of these rows of hidden [T, H], as its draw says.

        asked: of each row, ids whose probabilities are wanted with it. Returns the distributions and the likeliest ids,
        -1 where logits are no numbers.
        """


@runtime_checkable
class RunsAhead(Protocol):
    """A model that continues runs in one call. tells_confidence: it takes stops; draws_ahead: it takes draws."""

    tells_confidence: bool
    draws_ahead: bool

    @property
    def run_ahead(self) -> Callable[..., list[list[int]] | None]:
        """Return what continues each run of a batch; None where a logit is no number (ops/cpu/model.py says more)."""


# ---------------------------------------------------------------------------------------------------- what was done


class Toss(NamedTuple):
    """One coin of a round: the probability to accept, and the uniform that had to be below it.

    depth and lane: as in `Coins.accept`. coin: None where the probability was 0 or 1, for which none is tossed, and
    where the coins are no random numbers.
    """

    depth: int
    lane: int
    prob: float
    coin: float | None
    is_accepted: bool


@dataclass
class RoundDetail:
    """One round of one sequence, for listeners that ask for detail. Probabilities are those of the drafted tokens."""

    sequence_id: int
    position: int  # absolute index of the first token of this round
    tokens: list[int]  # drafted
    parents: list[int]  # within this round; -1 = the last committed token
    draft_probs: list[float]
    target_probs: list[float | None]  # None behind a rejection, where the rule did not ask for the row
    tests: list[AcceptanceTest]  # nodes counted within this round
    accepted: list[int]  # node indices within this round
    next_token: int
    granted: int  # the pacing policy's budget
    tosses: Seq[Toss] = ()  # of the rule, in order; a rule that compares draws tosses none
    pacing: Mapping[str, float] = field(default_factory=dict)  # what the policy tells of the round


class SequenceStep(NamedTuple):
    """What one step did for one decoding sequence. Stop conditions shorten num_committed alone, no other count."""

    sequence_id: int
    draft: str  # name of the drafter that serves it, or FORCED where all nodes are forced
    num_drafted: int
    num_tested: int
    accepted_ranks: tuple[int, ...]  # of the accepted nodes, within the sequence's draft
    num_committed: int = 0  # after stop conditions cut
    forced: frozenset[int] = frozenset()  # ranks of nodes that a grammar leaves no choice about

    @property
    def num_accepted(self) -> int:
        return len(self.accepted_ranks)

    @property
    def parts(self) -> list[SequenceStep]:
        """What FORCED drafted, and what the drafter did that serves the sequence; each only where it drafted.

        One that drafted nothing is a part where neither did.
        """
        if not self.forced:
            return [self]
        ranks = tuple([rank for rank in self.accepted_ranks if rank in self.forced])
        forced = SequenceStep(self.sequence_id, FORCED, len(self.forced), len(ranks), ranks, self.num_committed)
        return [forced] if self.draft == FORCED else [forced, self.without_forced]

    @property
    def without_forced(self) -> SequenceStep:
        """The step without what was forced, which is never refused and teaches nothing."""
        if not self.forced:
            return self
        own = {rank: i for i, rank in enumerate(r for r in range(self.num_drafted) if r not in self.forced)}
        ranks = tuple([own[rank] for rank in self.accepted_ranks if rank in own])
        num_forced = len(self.accepted_ranks) - len(ranks)
        return self._replace(
            num_drafted=len(own),
            num_tested=self.num_tested - num_forced,
            accepted_ranks=ranks,
            num_committed=max(0, self.num_committed - num_forced),
            forced=frozenset(),
        )


@dataclass
class DraftStep:
    """What one drafter did in one step.

    depth: length of the longest path of a draft. passes: that a draft model made for it, one after another.
    num_catchup_tokens: committed tokens that it ran before drafting, beside those that the previous round left.
    catchup_s: the part of `seconds` that they took. num_found: nodes that were found in the text, without the model.
    search_s: the part of `seconds` in which the text was searched, of `num_searched` sequences.
    """

    seconds: float = 0.0
    num_sequences: int = 0  # that got at least one node
    num_nodes: int = 0
    depth: int = 0
    passes: int = 0
    num_catchup_tokens: int = 0
    catchup_s: float = 0.0
    num_found: int = 0
    search_s: float = 0.0
    num_searched: int = 0


@dataclass
class StepReport:
    """The numbers of one step. Metrics, printers, benchmarks and pacing read this and nothing else."""

    num_prefill_tokens: int = 0
    num_prefill_keys: int = 0  # that their rows saw, themselves among them
    num_decoding: int = 0  # sequences that emitted
    num_rows: int = 0  # of the target pass: prompt chunks, one per decoding sequence, and draft nodes
    num_experts: float = 0.0  # that some row of it chose, on average over the layers with experts; 0 = it has none
    num_context_tokens: int = 0  # in the target's cache before the pass, over the decoding sequences
    num_drafted: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_emitted: int = 0  # before stop conditions cut
    num_committed: int = 0  # after
    schedule_s: float = 0.0  # in the engine since the last report: listeners, finishing requests, the scheduler
    draft_s: float = 0.0
    score_s: float = 0.0
    judge_s: float = 0.0
    commit_s: float = 0.0
    target_forward_s: float = 0.0  # the part of score_s inside the model
    sequences: list[SequenceStep] = field(default_factory=list)  # one for each that decoded
    drafts: dict[str, DraftStep] = field(default_factory=dict)  # by name, of the drafters that were asked
    rounds: list[RoundDetail] = field(default_factory=list)  # only when a listener wants detail

    @property
    def seconds(self) -> float:
        """The duration of the whole step."""
        return self.schedule_s + self.draft_s + self.score_s + self.judge_s + self.commit_s


Listener = Callable[[StepReport], Any]
