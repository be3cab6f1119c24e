"""How tokens are guessed: one method per file, found by scanning this folder.

A file `<name>.py` holds `Options` (a frozen dataclass; each field with its unit and range in `metadata`) and
`build(options, target) -> Drafter`. It may hold `check(options, tokenizer)`, which refuses what can be seen before any
weight is read. Nothing else has to change for a new method.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from forerun.errors import BadOption
from forerun.registry import by_value, load, make_options, names, parse_spec
from forerun.types import Budget, Coins, Draft, Sequence

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.kv.cache import Backend
    from forerun.models.loading import Checkpoint
    from forerun.models.runner import Model, Runner, Scores


@dataclass(frozen=True)
class Seen:
    """What one target pass showed of one sequence, to the drafter that serves it.

    start: index in the text of the first token that was run and kept. kept: rows of the pass, of the tokens that were
    kept; scored: all rows of the sequence (the last committed token, nodes, extra rows). scores: of the whole pass.
    """

    start: int
    kept: Seq[int]
    scored: range
    run: int
    scores: Scores

    @property
    def hidden(self) -> Tensor:
        """Final-norm hidden states of the kept rows, [len(kept), H]."""
        return self.scores.hidden[list(self.kept)]

    def layer(self, k: int) -> Tensor:
        """The residual stream behind k layers of the kept rows, float32 [len(kept), H]; k is one of `hidden_layers`."""
        return self.scores.taps[k][list(self.kept)]

    def top(self, num: int) -> tuple[Tensor, Tensor]:
        """Ids and logits of the `num` likeliest tokens behind each scored row, [rows, num]; at most `top_logits`.

        A prompt chunk wants no logits and has no rows.
        """
        values, ids = self.scores.logits[self.run].topk(num)
        return ids, values


class Drafter:
    """Makes drafts. Only `propose` is required; the rest has empty defaults.

    caught_up, catchup_s: of the last call of `propose` or `catch_up`, by sequence the committed tokens that were run
    only to catch up (not those that every round feeds), and the seconds that it took.
    """

    hidden_layers: tuple[int, ...] = ()  # whose rows `observe` is to get: k = behind k layers of the target
    top_logits = 0  # likeliest tokens of each scored row that `observe` is to get
    shape = "chain"  # of its drafts: "chain" or "tree"
    draws = "independent"  # how siblings are drawn: "point" masses, "independent", "distinct" (without replacement)
    runner: Runner | None = None  # of a model of its own, whose passes are worth measuring
    is_free = False  # it runs no model and draws nothing: a guess of it costs microseconds and no coins
    caught_up: Mapping[int, int] = MappingProxyType({})
    catchup_s = 0.0

    def begin(self, seq: Sequence) -> None:
        """A sequence was admitted."""

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        """Guess for these decoding sequences, at most budget.num_tokens[b] nodes for seqs[b].

        Every token must be drawn from the law that its `probs` row states, and budget.go_on must be asked before
        each draw. A drafter that has not caught up with a sequence drafts nothing for it. `seqs` are the step's own, to
        be read only; the budget's numbers may be counted down.
        """
        raise NotImplementedError

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """See what a target pass showed of this drafter's own sequences, prompt chunks included, after the commit."""

    def resumes_from(self, seq: Sequence, num_tokens: int) -> int:
        """Of so many first tokens that the target's cache holds already, how many the drafter can do without seeing.

        A drafter that lives on hidden states has to see each token's: the target then runs the others again.
        """
        return num_tokens

    def end(self, seq: Sequence) -> None:
        """A sequence is finished or aborted: forget it."""

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Run at most so many committed tokens of these sequences, in order, without drafting.

        Called while the target runs their prompts, so that the first draft need not wait for a prompt of the drafter's.
        """

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        """Tokens that still fit into the drafter's own cache; None = no limit of its own.

        without: ids of sequences that count as ended.
        """
        return None


@dataclass(frozen=True)
class Target:
    """What a drafter may know of the engine that it is built for."""

    model: Model  # the target model; its device, dtype and operators are the draft model's too
    tokenizer: Any  # forerun.text.tokenizer.Tokenizer, or None where ids are all there is
    end_ids: frozenset[int]
    num_ids: int  # ids that have a token
    holes: tuple[int, ...]  # ids below num_ids without one
    max_batch_size: int
    max_seq_len: int  # tokens
    kv_cache_backend: Backend
    kv_cache_tokens: int | None = None  # tokens in a cache of the drafter's own; None = room for everybody
    prefix_caching: bool = True  # in a cache of the drafter's own
    shipped_draft: str | None = None  # folder of the draft model that belongs to this target, if one ships with it
    loaded_draft: Checkpoint | None = None  # a draft model that the caller has loaded; it comes before the shipped one


def resolve(spec: str, has_shipped_draft: bool) -> tuple[str, Any]:
    """(method, its Options) of `name[:option=value,...]`, of a draft model's folder or hub id, or of `auto`.

    auto = the shipped draft model for the shipped target, else lookup. What has a separator or exists is a model.
    Raises BadOption for anything unknown; what other engines would take there is answered with ours.
    """
    if spec == "auto":
        spec = "model" if has_shipped_draft else "lookup"
    is_method = spec.partition(":")[0] in names(__name__)
    is_path = "/" in spec or os.sep in spec or (spec != "" and Path(spec).exists())
    if not is_method and not is_path and (there := by_value("draft", spec.partition(":")[0])):
        raise BadOption(there)
    # A folder's name may have a colon in it, so it is looked for before the text is taken apart.
    name, options = ("model", {"path": spec}) if is_path and not is_method else parse_spec(spec)
    return name, make_options(load(__name__, name, "drafter").Options, options, name)


def check(name: str, options: Any, tokenizer: Any) -> None:
    """Let a method refuse its options before any weight is read: its file may define `check(options, tokenizer)`."""
    module = load(__name__, name, "drafter")
    if hasattr(module, "check"):
        module.check(options, tokenizer)


def make(spec: str, target: Target) -> Drafter:
    """The drafter that `resolve` names, built for a target. Raises BadOption for anything unknown."""
    name, options = resolve(spec, target.shipped_draft is not None)
    drafter: Drafter = load(__name__, name, "drafter").build(options, target)
    return drafter
