"""A draft model with another vocabulary than the target's.

how=tokens: only tokens in both vocabularies are drafted. The draft model's logits of these tokens are renormalised, and
assigned to the target's ids (token-level intersection; Timor et al. 2025, arXiv 2502.05202, algorithm 4). how=text: the
draft model continues the text greedily in its own vocabulary. The new text is encoded with the target's tokenizer, and
the resulting ids are drafted as point masses.

In both ways the draft model reads the committed text in ids of its own tokenizer (text/translation.py). When the text
grows, only the last of these ids change. So the draft model's cache is cut to the unchanged ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from forerun.config import AUTO
from forerun.drafters import Drafter, Known, Needs, OwnCheckpoint, Seen, Target
from forerun.drafters.model import Options as Draws
from forerun.drafters.shared.chain import Row
from forerun.drafters.shared.chains import draw_chains
from forerun.drafters.shared.draft_models import cache_for, has_encoder, loaded
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.drafters.shared.model_options import PATH, QUANTIZATION, TEMPERATURE, TOP_K, check_temperature, rounding
from forerun.errors import BadOption, shown
from forerun.models.runner import Runner
from forerun.registry import option
from forerun.sampling import History, probs
from forerun.text.detokenizer import Detokenizer
from forerun.text.tokenizer import Tokenizer
from forerun.text.translation import Translation, continuation, shared_ids
from forerun.types import Budget, Coins, Draft, Probs, SamplingParams, Sequence

HOW = ("tokens", "text")


@dataclass(frozen=True)
class Options:
    """The options: the draft model, how its drafts are translated, and how tokens are drawn."""

    path: str | None = field(default=None, metadata=PATH)
    how: str = option(
        "tokens", "tokens: draws among the tokens of both vocabularies; text: a greedy text, encoded again"
    )
    quantization: str = field(default=AUTO, metadata=QUANTIZATION)
    draft_temperature: float | None = field(default=None, metadata=TEMPERATURE)
    draft_top_k: int | None = field(default=None, metadata=TOP_K)

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise BadOption(f"translated:how={shown(self.how)} is not possible: it must be {' or '.join(HOW)}")
        if self.how == "text" and (self.draft_temperature, self.draft_top_k) != (None, None):
            raise BadOption("translated:how=text draws nothing: leave draft_temperature and draft_top_k out")
        rounding(self.quantization)
        check_temperature("translated", self.draft_temperature)


class Intersection(ModelDrafter):
    """Drafts only tokens in both vocabularies with a draft model, and returns them as ids of the target.

    The draft model reads sequences in its own ids. ids: maps each id of the target to the draft model's id of the same
    token. width: the number of the target's ids. sources: by sequence id, the same sequences in the target's ids, for
    penalties and masks.
    """

    def __init__(self, runner: Runner, options: Draws, ids: Mapping[int, int], width: int) -> None:
        super().__init__(runner, options)
        self.sources: dict[int, Sequence] = {}
        self.width = width
        # The token of the largest logit may be one that the target lacks.
        self.finds_best = self.draws_ahead = False
        self._ids = ids
        self._target_ids, self._own_ids = np.array(list(ids)), np.array(list(ids.values()))

    def distribution(self, row: Row, seq: Sequence, drafted: Seq[int]) -> Probs:
        assert not isinstance(row, int)
        shared = row[self._own_ids]
        if shared.max() == -np.inf:
            raise BadOption("no token of both vocabularies is possible here")
        logits = np.full(self.width, -np.inf, shared.dtype)
        logits[self._target_ids] = shared
        return probs(logits, self.params(seq), History.of(self.sources[seq.id], drafted))

    def own_id(self, token: int) -> int:
        return self._ids[token]

    def forced(self, seq: Sequence, drafted: Seq[int]) -> list[int]:
        return []  # the draft model may have no ids for these tokens


class Translated(Drafter):
    """Hands each sequence to a draft model, in the draft model's ids. Subclasses translate drafts back.

    tokenizers: the target's and the draft model's; None = both models have only ids, and equal ids mean equal tokens.
    `free_tokens` gives no limit, because a text may have more tokens in the draft model's ids. A sequence without room
    in the draft model's cache gets no drafts, so that the target does not wait for room.
    """

    def __init__(self, inner: ModelDrafter, tokenizers: tuple[Tokenizer, Tokenizer] | None) -> None:
        self.inner, self.tokenizers, self.runner = inner, tokenizers, inner.runner
        self._mirrors: dict[int, Sequence] = {}  # the sequences in the draft model's ids
        self._translations: dict[int, Translation] = {}

    def begin(self, seq: Sequence) -> None:
        tokens = seq.tokens
        if self.tokenizers is not None:
            translation = self._translations[seq.id] = Translation(*self.tokenizers)
            translation.read(seq.tokens)
            tokens = translation.ids
        self._mirrors[seq.id] = self.mirror(seq, tokens)
        self.inner.begin(self._mirrors[seq.id])

    def end(self, seq: Sequence) -> None:
        self._translations.pop(seq.id, None)
        if mirror := self._mirrors.pop(seq.id, None):
            self.inner.end(mirror)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        self.inner.observe([self._followed(seq) for seq in seqs if seq.id in self.inner.guessing], ())

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        self.inner.catch_up([mirror for seq in seqs if (mirror := self._followed(seq)).tokens], num_tokens)
        self.caught_up, self.catchup_s = self.inner.caught_up, self.inner.catchup_s

    def mirror(self, seq: Sequence, tokens: list[int]) -> Sequence:
        """Return the sequence in the draft model's ids. tokens: the committed text in the draft model's ids."""
        return dataclasses.replace(seq, tokens=tokens)

    def ask(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        """Return the draft model's draft after the committed texts. A text without ids of this model gets no draft.

        coins: for each sequence, its random numbers (see `Coins`).
        """
        mirrors = [self._followed(seq) for seq in seqs]
        budget.num_tokens = [
            num if mirror.tokens else 0 for num, mirror in zip(budget.num_tokens, mirrors, strict=True)
        ]
        draft = self.inner.propose(mirrors, budget, coins)
        self.caught_up, self.catchup_s = self.inner.caught_up, self.inner.catchup_s
        return draft

    def _followed(self, seq: Sequence) -> Sequence:
        """Return the mirror of a sequence, updated with the tokens that were committed since the last call."""
        mirror = self._mirrors[seq.id]
        if translation := self._translations.get(seq.id):
            self.inner.doubt(mirror, translation.read(seq.tokens))
        return mirror


class TranslatedTokens(Translated):
    """The drafter of how=tokens. Its draft model returns ids of the target, so drafts need no translation back."""

    inner: Intersection

    def begin(self, seq: Sequence) -> None:
        self.inner.sources[seq.id] = seq
        super().begin(seq)

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        self.inner.sources.pop(seq.id, None)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self.inner.sources |= {seq.id: seq for seq in seqs}  # these may have tokens that are not committed yet
        return self.ask(seqs, budget, coins)


class TranslatedText(Translated):
    """The drafter of how=text. A draft depends on the committed tokens alone, and no token of it is drawn at random.

    num_ids: the number of the target's ids; no other ids are drafted.
    """

    draws = "point"

    def __init__(self, inner: ModelDrafter, tokenizers: tuple[Tokenizer, Tokenizer], num_ids: int) -> None:
        super().__init__(inner, tokenizers)
        self._target, self._draft = tokenizers
        self._num_ids = num_ids

    def mirror(self, seq: Sequence, tokens: list[int]) -> Sequence:
        params = SamplingParams(temperature=0.0, cache_salt=seq.params.cache_salt)
        return dataclasses.replace(seq, tokens=tokens, params=params, bad_word_ids=())

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        # The pacing policy does not stop the model's own draft. It stops the translated draft of point masses.
        model_draft = self.ask(seqs, Budget(budget.num_tokens, budget.catchup_tokens), coins)
        texts = {
            seq.id: self._text(seq, [model_draft.tokens[i] for i in model_draft.nodes(b)]) for b, seq in enumerate(seqs)
        }
        guesses = {seq.id: continuation(self._target, seq.tokens, texts[seq.id]) for seq in seqs if texts[seq.id]}

        def expected(seq: Sequence, drafted: Seq[int]) -> Probs | None:
            guess = guesses.get(seq.id, ())
            token = guess[len(drafted)] if len(drafted) < len(guess) else self._num_ids
            return Probs.of_point(token) if token < self._num_ids else None

        return draw_chains(seqs, budget, coins, expected)

    def _text(self, seq: Sequence, drafted: Seq[int]) -> str:
        """Return the text of the draft model's drafted tokens, up to a control token or an incomplete character."""
        if not drafted:
            return ""
        end = next((i for i, token in enumerate(drafted) if token in self._draft.special_ids), len(drafted))
        return Detokenizer(self._draft, self._mirrors[seq.id].tokens, skip_special_ids=()).push(drafted[:end]).text


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: the draft model to load. With how=tokens, raises VocabularyMismatch as `shared_ids` does."""
    if options.path is not None and options.how == "tokens" and target.tokenizer is not None:
        shared_ids(target.tokenizer, target.open(options.path).text_tokenizer)
    return Needs(loads=OwnCheckpoint(options.path, rounding(options.quantization)))


def build(options: Options, target: Target) -> Drafter:
    """Load the draft model beside the target: same device and dtype, and the best operators for the draft model.

    Raises VocabularyMismatch as `shared_ids` does. Raises BadOption for an encoder-decoder, and for how=text without
    tokenizers.
    """
    checkpoint = loaded("translated", options, target)
    if has_encoder(checkpoint.model):
        raise BadOption(
            f"translated cannot draft by {checkpoint.name}, an encoder-decoder, because sources are not translated: "
            "name a model without an encoder, or one with the target's vocabulary as the draft"
        )
    model, tokenizers = checkpoint.model, None
    num_ids, holes = target.num_ids, list(target.holes)
    ids = {i: i for i in range(num_ids) if i not in target.holes}
    if target.tokenizer is not None:
        draft = checkpoint.tokenizer or checkpoint.opened.text_tokenizer
        tokenizers = (target.tokenizer, draft)
        num_ids, holes = draft.num_ids, sorted(draft.holes)
        ids = shared_ids(*tokenizers) if options.how == "tokens" else {}
    runner = Runner(model, cache_for(model, target), num_ids, holes)
    draws = Draws(draft_temperature=options.draft_temperature, draft_top_k=options.draft_top_k)
    if options.how == "tokens":
        known = {i: draft_id for i, draft_id in ids.items() if i < target.num_ids and draft_id < runner.width}
        return TranslatedTokens(Intersection(runner, draws, known, target.num_ids), tokenizers)
    if tokenizers is None:
        raise BadOption("translated:how=text needs the tokenizers of both models: use how=tokens")
    return TranslatedText(ModelDrafter(runner, draws), tokenizers, target.num_ids)
