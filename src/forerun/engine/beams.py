"""Runs beam searches in the engine: the beams of a request form one tree, which one pass scores (docs/methods/beam.md).

The request commits the tokens with which all live beams begin. The cache rows of the later tokens of the beams stay
pending, as a tree that is not committed yet. A pass runs the nodes without a cache row, and then the drafted levels
below them. Then the steps of the search are replayed on the target's scores, until a node has no score. Without drafts
this is plain beam search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import partial

from forerun import sampling
from forerun.engine.request import Committed, Request
from forerun.engine.router import NONE
from forerun.kv import Held
from forerun.models.branches import Branches
from forerun.models.runner import Run, Scores
from forerun.pacing import Pacing
from forerun.sampling.arithmetic import Row
from forerun.sampling.largest import Rows
from forerun.text.detokenizer import Detokenizer
from forerun.text.tokenizer import Tokenizer
from forerun.types import BEAM, NO_TOKEN, Coins, Draft, Hypotheses, Next, Origin, Probs, Sequence, SequenceStep, Verdict
from forerun.verify import Ruling
from forerun.verify.beams import Ends, Rules, Search

Branch = Callable[[Seq[Sequence], Seq[Seq[int]]], list[list[Next | None]]]


class BeamSearch:
    """Holds the beam search of one request.

    seq: the sequence of the search. It commits only the tokens that all live beams share. outputs: the requests that
    get the best texts, best first. ends: see Search. fed: nodes of live beams that have no cache row yet, and that this
    pass runs. guesses: the drafted nodes of this pass. num_levels: the number of levels of `guesses`.
    """

    def __init__(self, seq: Sequence, outputs: Seq[Request], ends: Ends | None) -> None:
        params, self.seq, self.outputs = seq.params, seq, outputs
        self.tree = seq.hypotheses = seq.hypotheses or Hypotheses()
        rules = Rules(
            params.num_beams, params.length_penalty, params.early_stopping, seq.max_len - seq.num_prompt_tokens
        )
        self.search = Search(rules, self.tree, seq.end_ids, ends)
        self.width = params.draft_beams or params.num_beams
        self.origins: list[Origin] = []
        self.branches = Branches()
        self.fed = list[int]()
        self.guesses = list[int]()
        self.num_levels = 0
        self.num_steps = 0
        self._logits: dict[int, Row] = {}
        self._wanted, self._level, self._scores = 0, list[int](), list[float]()  # of the draft while it grows
        self._nodes = list[int]()  # tree node of each draft node
        self._after = self.search  # the search as judged; a step that fails does not commit it

    @property
    def is_over(self) -> bool:
        """Whether the search has ended, so that its best texts are known."""
        return self.search.is_over

    @property
    def num_rows(self) -> int:
        """The number of rows that this search needs in the next pass if nothing is drafted.

        Each node without a cache row needs one row. The number is at least 1, and at most the number of beams.
        """
        return max(1, min(self.num_unrun, self.search.rules.num_beams))

    @property
    def num_unrun(self) -> int:
        """The number of nodes without a cache row, from the tree's base (included) to the tips of the live beams."""
        return len(self.branches.missing(self.tree))

    def restart(self) -> None:
        """Mark all nodes as having no cache row, because the rows of the sequence were released."""
        self.branches.forget(self.tree.base)
        self._logits = {}

    # -------------------------------------------------------------------------------------------------------- propose

    def begin(self, limit: int, levels: int) -> None:
        """Choose which of the nodes without a cache row this pass runs, and begin a new draft.

        limit: how many rows the pass may have beyond `num_rows`. levels: how many levels the draft should have.
        """
        missing = self.branches.missing(self.tree)
        allowed = self.num_rows + limit
        self.fed = missing[:allowed]
        self.guesses = []
        self.num_levels = 0
        most = min(
            levels, (allowed - len(missing)) // self.width, self.search.rules.most_tokens - self.search.length - 1
        )
        self._wanted = max(0, most) if len(self.fed) == len(missing) else 0
        self._level, self._scores = self.search.tips, self.search.scores

    @property
    def level(self) -> Seq[int]:
        """The nodes after which the drafter should guess tokens; empty once the draft is complete."""
        return self._level if self.num_levels < self._wanted else ()

    def grow(self, nexts: Seq[Next | None]) -> None:
        """Add a level to the draft. nexts: for each node of `level`, the drafter's next tokens; None = unknown."""
        guesses = self.search.guessed(self._level, self._scores, nexts, self.width)
        self._level = [self.tree.add(self._level[guess.beam], guess.token) for guess in guesses]
        self._scores = [guess.score for guess in guesses]
        self.guesses += self._level
        self.num_levels += bool(guesses)
        self._wanted = self._wanted if guesses else 0

    def draft(self) -> Draft:
        """Return the draft of the sequence: the live nodes below the tree's base, then the guessed nodes."""
        known = [node for node in self.tree.live() if node != self.tree.base]
        self._nodes = [*known, *self.guesses]
        places = {node: i for i, node in enumerate(self._nodes)}
        tokens = [self.tree.tokens[node] for node in self._nodes]
        parents = [places.get(self.tree.parents[node], -1) for node in self._nodes]
        points = [Probs.of_point(token) for token in tokens]
        return Draft(tokens, parents, [0, len(tokens)], points)

    # ---------------------------------------------------------------------------------------------------------- score

    def run(self) -> Run:
        """Return the tokens to run in this pass: the nodes without a cache row, then the drafted nodes."""
        return self.branches.run(self.seq.id, self.tree, [*self.fed, *self.guesses], self.seq.tokens[-1])

    def scored(self, logits: Rows) -> None:
        """Store the logits [rows, V] of the pass, one row for each token of the run that `run` returned."""
        self._logits |= zip([*self.fed, *self.guesses], logits, strict=True)

    # ---------------------------------------------------------------------------------------------------------- judge

    def rule(self, draft: Draft, b: int) -> Ruling:
        """Replay the steps of the search on the target's scores, and return the ruling on sequence b of the draft.

        The ruling has the draft nodes that all live beams share, the next token that they share, and no tests. The next
        token is NO_TOKEN where the beams share no further token, and where the search is over.
        """
        self._after, self.num_steps = self.search.replayed(self._next)
        if self._after.is_over:
            return [], NO_TOKEN, []
        first = draft.node_starts[b]
        places = {node: first + i for i, node in enumerate(self._nodes)}
        path = self.tree.path(self._after.shared(), self.tree.base)
        inside = [places[node] for node in path if node in places]
        return inside, self.tree.tokens[path[-1]] if len(path) > len(inside) else NO_TOKEN, []

    def _next(self, node: int) -> Next | None:
        logits = self._logits.get(node)
        if logits is None:
            return None
        history = sampling.History.of(self.seq, self.tree.text(node, self.tree.base))
        return partial(sampling.likeliest, logits, self.seq.params, history)

    # --------------------------------------------------------------------------------------------------------- commit

    def settle(self) -> tuple[SequenceStep, list[int], Held]:
        """Commit the replayed search.

        Returns the counts of the step, the cache rows to commit, and the cache rows that stay pending.
        """
        self.search = self._after
        is_whole = self.num_steps == self.num_levels + 1
        last: Origin = "plain" if not self.num_levels else "bonus" if is_whole or self.search.is_over else "correction"
        self.origins += ["accepted"] * (self.num_steps - 1)
        self.origins += [last] * (self.num_steps > 0)
        num_accepted = max(0, self.num_steps - 1)
        num_tested = num_accepted + (last == "correction" and self.num_steps > 0)
        step = SequenceStep(
            self.seq.id,
            self.seq.draft,
            len(self.guesses),
            num_tested,
            tuple(i * self.width for i in range(num_accepted)),
            self.num_steps,
        )
        if self.search.is_over:
            return step, [], Held([], [])
        self.branches.add([*self.fed, *self.guesses])
        self.tree.base = self.search.shared()
        self.tree.tips = self.search.tips
        kept, held = self.branches.settle(self.tree)
        self._logits = {tip: self._logits[tip] for tip in self.search.tips if tip in self._logits}
        return step, kept, held

    def conclude(self) -> None:
        """Give the best texts to `outputs`, best first. If masks allowed too few texts, abort the remaining outputs."""
        self.seq.finish_reason = "stop"
        for output, text in zip(self.outputs, [*self.search.pool.texts, *[None] * len(self.outputs)], strict=False):
            if output.seq.finish_reason is not None:
                continue
            if text is None:
                output.abort()
                continue
            tokens = self.tree.text(text.node)
            output.score, output.cumulative_logprob = text.penalised, text.score
            output.append(tokens, self.origins[: len(tokens)])


class SearchRequest(Request):
    """Represents a request that runs a beam search for its outputs.

    Its sequence gets the tokens that all live beams share, and is not shown to the user. outputs: the requests that get
    the best texts, best first.
    """

    is_paced = False  # `num_levels` chooses the levels of all searches together

    def __init__(self, seq: Sequence, tokenizer: Tokenizer | None, outputs: Seq[Request]) -> None:
        super().__init__(seq, tokenizer, outputs=outputs)
        self.search = BeamSearch(seq, outputs, self._ends if seq.params.stop else None)
        self.report.acceptance = BEAM
        for output in outputs:
            output.searcher = self
            output.report = self.report

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        return self.search.num_rows

    @property
    def num_unrun(self) -> int:  # type: ignore[override]
        return self.search.num_unrun

    @property
    def num_places(self) -> int:  # type: ignore[override]
        return self.seq.params.num_beams

    def restart(self) -> None:
        self.search.restart()

    def run(self, draft: Draft, b: int, best_only: bool, coins: Coins | None = None) -> Run:
        return self.search.run()

    def judge(self, draft: Draft, b: int, scores: Scores, coins: Coins) -> Ruling:
        self.search.scored(scores.logits[b])
        return self.search.rule(draft, b)

    def next_token(self, verdict: Verdict, b: int) -> int:
        """Return the next token that all live beams share. If they share none, return the best beam's last token."""
        if verdict.next_tokens[b] != NO_TOKEN:
            return verdict.next_tokens[b]
        tree = self.search.tree
        return tree.tokens[tree.tips[0]] if tree.tips else self.seq.tokens[-1]

    def commit(self, draft: Draft, b: int, scores: Scores, verdict: Verdict) -> Committed:
        search, shared = self.search, verdict.emitted(draft, b)
        step, kept, held = search.settle()
        num_rows = len(search.fed) + step.num_drafted
        self.report.count(
            step.num_drafted, search.num_levels, step.num_accepted, step.num_tested, num_rows, search.num_steps
        )
        self.append(shared, ["plain"] * len(shared))
        self.seq.round += 1
        if search.is_over:
            search.conclude()
        return Committed(step, kept, step.num_accepted + (search.num_steps > 0), held)

    def _ends(self, tokens: Seq[int]) -> bool:
        """Return whether the last of the output tokens `tokens` completes a stop text.

        The earlier tokens must contain no stop text. Only as many characters as the longest stop text has are decoded.
        So the time does not grow with the length of the text.
        """
        tokenizer = self._tokenizer
        stops = self.seq.params.stop
        start = len(tokens) - 1
        num_chars = 0
        if tokenizer is None:
            return False
        while start > 0 and num_chars < max(map(len, stops)):
            start -= 1
            if tokens[start] not in tokenizer.special_ids and tokenizer.is_solid(tokens[start]):
                num_chars += len(tokenizer.own_text(tokens[start]))
        prompt = self.seq.tokens[: self.seq.num_prompt_tokens]
        reader = Detokenizer(tokenizer, [*prompt, *tokens[:start]], stops)
        reader.push(tokens[start:])
        return reader.stop is not None


def num_levels(seqs: Seq[Sequence], pacing: Pacing, num_rows: int) -> dict[int, int]:
    """Map the id of each sequence to the number of levels that its search drafts.

    The number is the request's spec_length. If spec_length is not set, the pacing policy chooses the number. The number
    is 0 for the drafter `none`. num_rows: the number of rows of the pass, without the rows of the searches.
    """
    paced = [seq for seq in seqs if seq.params.spec_length is None and seq.draft != NONE]
    levels = pacing.levels(paced, num_rows + len(seqs) - len(paced)) if paced else 0
    return {seq.id: 0 if seq.draft == NONE else seq.params.spec_length or levels for seq in seqs}


def with_trees(draft: Draft, requests: Seq[Request], limits: Seq[int], pacing: Pacing, branch: Branch) -> Draft:
    """Return the draft of a step with the trees of beam searches added.

    limits [B]: the largest number of draft rows of each sequence. branch(seqs, levels): returns the drafters' guesses
    of the tokens after the nodes levels[i] of sequence seqs[i]. `branch` is called once for each level, for all
    searches together.
    """
    searches = {b: request.search for b, request in enumerate(requests) if isinstance(request, SearchRequest)}
    if not searches:
        return draft
    seqs = [search.seq for search in searches.values()]
    num_rows = len(draft.tokens) + draft.num_sequences
    wanted = num_levels(seqs, pacing, num_rows - len(searches))
    for b, search in searches.items():
        search.begin(limits[b], wanted[search.seq.id])
    while growing := [search for search in searches.values() if search.level]:
        nexts = branch([search.seq for search in growing], [search.level for search in growing])
        for search, answers in zip(growing, nexts, strict=True):
            search.grow(answers)
    parts = [searches[b].draft() if b in searches else draft.only(b) for b in range(draft.num_sequences)]
    return Draft.joined(parts)
