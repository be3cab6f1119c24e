"""Prints a certificate: a line for each check, the failures, the verdict, and the claims that are not proven."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from forerun.certify.certificate import NOT_PROVEN, Certificate
from forerun.certify.checks import ETA, LEVEL, POWER, Check
from forerun.cli.folding import folded
from forerun.testing.wrong import find

MOST_PROBLEMS = 5  # printed problems of one check
WORDS = {True: "passed", False: "FAILED", None: "nothing to see"}


def print_certificate(certificate: Certificate, console: Console) -> None:
    """Print the whole certificate."""
    facts, mutant = certificate.facts, certificate.plan.mutant
    lines = [
        f"{facts['target']} ({facts['model_type']}, {facts['precision']}) with {facts['draft_spec']} as "
        f"{facts['draft']}; {facts['ops']} operators, {facts['build']}, {facts['num_threads']} threads; "
        f"forerun {facts['forerun']}, torch {facts['torch'] or 'not installed'}; "
        f"seed {certificate.plan.seed}, {certificate.taken_s:.0f} s"
    ]
    lines += [f"The wrong version {mutant} is switched in: {find(mutant).about}."] if mutant else []
    for line in lines:
        console.print(folded(line, console.width))
    console.print()
    console.print(_table(certificate))
    console.print()
    for line in [*_problems(certificate), certificate.verdict(), _legend(certificate), "It does not prove:"]:
        console.print(folded(line, console.width))
    for text in NOT_PROVEN:
        console.print(folded(text, console.width, "  - ", "    "))


def _table(certificate: Certificate) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("check", "on", "samples", "sees TV  at most  least p", ""):
        table.add_column(name, no_wrap=True)
    for check in certificate.checks:
        samples = f"{check.num_samples:,} {check.unit}"
        table.add_row(check.name, check.subject, samples, _finding(certificate, check), WORDS[check.passed])
    return table


def _finding(certificate: Certificate, check: Check) -> str:
    if not check.tests:
        return check.result
    upper = max((test.tv_upper for test in check.tests if test.tv_upper is not None), default=None)
    least = min(test.p_value for test in check.tests)
    return f"{_number(certificate.detects(check)):>7}  {_number(upper):>7}  {least:>7.1g}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _problems(certificate: Certificate) -> Iterator[str]:
    for check in certificate.checks:
        for problem in check.problems[:MOST_PROBLEMS]:
            yield f"{check.name}: {problem}"
        if len(check.problems) > MOST_PROBLEMS:
            yield f"{check.name}: and {len(check.problems) - MOST_PROBLEMS} more"


def _legend(certificate: Certificate) -> str:
    return (
        "on: toy = models of 3 ids whose probabilities are known; few ids = this pair, held to at most 8; pair = as it "
        f"is. sees TV: the total variation that each test of the line finds with probability {POWER:g}. at most: what "
        f"it is at most, with probability {1 - ETA:g} (Weissman). least p: the smallest of the line's tests; all "
        f"{len(certificate.tests)} are judged together (Holm, level {LEVEL:g})."
    )
