"""`forerun theory` as a command."""

import pytest

from forerun.theory import formulas

SHAPES = ("--target-shape", "llama-3.1-8b", "--draft-shape", "llama-3.2-1b")


def test_the_worked_example(ok):
    """2.9412 tokens and 1.4706 at K = 5; the best K is 3."""
    printed = ok("theory", "--alpha", "0.7", "--c", "0.2", "--spec-length", "5")
    rows = {line.split()[0]: line.split() for line in printed.splitlines()[1:7]}
    assert rows["5"][1:4] == ["2.9412", "2.00", "1.4706"]
    assert rows["3"][1] == "best"
    assert f"{formulas.oracle_speedup(0.7, 0.2):.2f}" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_a_machine_in_place_of_costs(cli):
    base = ("theory", *SHAPES, "--machine", "h100", "--context", "500")
    alone, many = cli(*base), cli(*base, "--batch", "512")
    assert "v(8) = 1.00" in alone.stdout
    assert "K = 4 is the best" in alone.stdout
    assert "K = 1 is the best" in many.stdout
    assert "overlap" not in many.stdout


def test_experts_that_rows_share(cli):
    shapes = ("--target-shape", "qwen3-30b-a3b", "--draft-shape", "smollm2-135m", "--machine", "cpu-2-cores")
    base = ("theory", *shapes, "--spec-length", "7", "--overlap")
    apart, shared = (cli(*base, overlap).stdout for overlap in ("0", "1"))
    assert "overlap 0, by" in " ".join(apart.split())
    assert "v(7) = 4.25" in " ".join(apart.split())
    assert "v(7) = 1.00" in " ".join(shared.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--c", "-1"), "cannot be costs"),
        (("--machine", "h100"), "belong together"),
        (("--machine", "h10", *SHAPES), "did you mean 'h100'"),
        (("--machine", "h100", "--target-shape", "x", "--draft-shape", "llama-3.2-1b", "--c", "1"), "follow from"),
        (("--alpha", "2"), "alpha"),
    ],
    ids=["cost", "alone", "machine", "both", "alpha"],
)
def test_refusals(refused, arguments, message):
    assert message in refused("theory", *arguments)
