"""Published points of the landscape: Table 4 of Leviathan, Kalman, Matias 2023, arXiv 2211.17192."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A measured speed-up, with the alpha and c that the paper estimated."""

    task: str
    draft: str
    temperature: int
    gamma: int
    alpha: float
    c: float
    measured: float


TABLE_4 = [
    Point("EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.4),
    Point("EnDe", "T5-base", 0, 7, 0.8, 0.04, 2.8),
    Point("EnDe", "T5-large", 0, 7, 0.82, 0.11, 1.7),
    Point("EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.6),
    Point("EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4),
    Point("EnDe", "T5-large", 1, 3, 0.71, 0.11, 1.4),
    Point("CNNDM", "T5-small", 0, 5, 0.65, 0.02, 3.1),
    Point("CNNDM", "T5-base", 0, 5, 0.73, 0.04, 3.0),
    Point("CNNDM", "T5-large", 0, 3, 0.74, 0.11, 2.2),
    Point("CNNDM", "T5-small", 1, 5, 0.53, 0.02, 2.3),
    Point("CNNDM", "T5-base", 1, 3, 0.55, 0.04, 2.2),
    Point("CNNDM", "T5-large", 1, 3, 0.56, 0.11, 1.7),
]
