"""The published results of Leviathan, Kalman, Matias 2023 (arXiv 2211.17192): Tables 1 to 5, and appendix A.5."""

from __future__ import annotations

from typing import NamedTuple


class Operations(NamedTuple):
    """A row of Table 1, for c = c_hat = 0: arithmetic operations and speed, in multiples of plain decoding."""

    alpha: float
    gamma: int
    operations: float
    speed: float


TABLE_1 = (
    Operations(0.6, 2, 1.53, 1.96),
    Operations(0.7, 3, 1.58, 2.53),
    Operations(0.8, 2, 1.23, 2.44),
    Operations(0.8, 5, 1.63, 3.69),
    Operations(0.9, 2, 1.11, 2.71),
    Operations(0.9, 10, 1.60, 6.86),
)


class Speed(NamedTuple):
    """A row of Table 4, with T5-XXL as the target. Table 2 lists the same runs without c and `expected`."""

    task: str
    draft: str
    temperature: int
    gamma: int
    alpha: float
    c: float
    expected: float
    measured: float


TABLE_4 = (
    Speed("EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    Speed("EnDe", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    Speed("EnDe", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    Speed("EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    Speed("EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    Speed("EnDe", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    Speed("CNNDM", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    Speed("CNNDM", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    Speed("CNNDM", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    Speed("CNNDM", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    Speed("CNNDM", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    Speed("CNNDM", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)
ALPHA_STEP, C_STEP = 0.01, 0.01  # Table 4 rounds alpha and c to multiples of these


class Lenience(NamedTuple):
    """An entry of the lists in appendix A.5: T5-small drafts for T5-XXL on EnDe. speed: the improvement factor."""

    temperature: int
    lenience: float
    alpha: float
    speed: float


A_5 = (
    Lenience(1, 1.0, 0.62, 2.5),
    Lenience(1, 0.5, 0.71, 3.1),
    Lenience(1, 0.3, 0.76, 3.6),
    Lenience(1, 0.1, 0.84, 5.0),
    Lenience(0, 1.0, 0.75, 3.3),
    Lenience(0, 0.5, 0.75, 3.3),
    Lenience(0, 0.3, 0.80, 3.9),
    Lenience(0, 0.1, 0.87, 4.9),
)
A_5_C, A_5_GAMMA = 0.015, 8  # the paper gives gamma for temperature 0 only

LENIENCES = (1.0, 0.5, 0.3, 0.1)
# Table 5: alpha of each draft at temperature 1, with each of these leniences.
TABLE_5 = {
    "unigram": (0.07, 0.10, 0.11, 0.16),
    "bigram": (0.19, 0.23, 0.25, 0.32),
    "T5-small": (0.62, 0.71, 0.76, 0.84),
    "T5-base": (0.68, 0.80, 0.83, 0.90),
}

# Table 3: for each target and draft, alpha at temperatures 0 and 1. LaMDA always samples with top-k 40.
TABLE_3 = {
    "GPT-like 97M": {"unigram": (0.03, 0.03), "bigram": (0.05, 0.05), "GPT-like 6M": (0.88, 0.89)},
    "T5-XXL EnDe": {
        "unigram": (0.08, 0.07),
        "bigram": (0.20, 0.19),
        "T5-small": (0.75, 0.62),
        "T5-base": (0.80, 0.68),
        "T5-large": (0.82, 0.71),
    },
    "T5-XXL CNNDM": {
        "unigram": (0.13, 0.08),
        "bigram": (0.23, 0.16),
        "T5-small": (0.65, 0.53),
        "T5-base": (0.73, 0.55),
        "T5-large": (0.74, 0.56),
    },
    "LaMDA 137B": {"LaMDA 100M": (0.61, 0.57), "LaMDA 2B": (0.71, 0.71), "LaMDA 8B": (0.75, 0.74)},
}
