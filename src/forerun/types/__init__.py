"""The data types that all packages of forerun share. No models are computed here, and nothing here imports torch.

Shape legend, used in every docstring of forerun:

    B  sequences of one step         T  rows (new tokens) of one ragged batch      N  draft nodes of one step
    R  rows whose logits are wanted  V  vocabulary size (rows of the LM head)      H  hidden size
"""

from __future__ import annotations

from forerun.params import SamplingParams
from forerun.types.batch import CacheView, RaggedBatch, Rows, Source, ancestor_words, bits
from forerun.types.budget import EDGES, FOUND_SHARE, MODEL_SHARE, ROUND_TOKENS, ROW_PRICE, Budget, Stop
from forerun.types.draft import FORCED, Draft, Extra, SharedRows
from forerun.types.hypotheses import Hypotheses, Next
from forerun.types.probs import Afar, Coins, Draw, Probs
from forerun.types.report import DraftStep, Listener, RoundDetail, SequenceStep, StepReport, Toss
from forerun.types.sequence import BEAM, Constraint, FinishReason, Origin, Sequence, TokenCounts, TokenLogprob, salt_of
from forerun.types.verdict import NO_TOKEN, AcceptanceTest, Verdict

__all__ = [
    "BEAM",
    "EDGES",
    "FORCED",
    "FOUND_SHARE",
    "MODEL_SHARE",
    "NO_TOKEN",
    "ROUND_TOKENS",
    "ROW_PRICE",
    "AcceptanceTest",
    "Afar",
    "Budget",
    "CacheView",
    "Coins",
    "Constraint",
    "Draft",
    "DraftStep",
    "Draw",
    "Extra",
    "FinishReason",
    "Hypotheses",
    "Listener",
    "Next",
    "Origin",
    "Probs",
    "RaggedBatch",
    "RoundDetail",
    "Rows",
    "SamplingParams",
    "Sequence",
    "SequenceStep",
    "SharedRows",
    "Source",
    "StepReport",
    "Stop",
    "TokenCounts",
    "TokenLogprob",
    "Toss",
    "Verdict",
    "ancestor_words",
    "bits",
    "salt_of",
]
