"""The command `forerun theory`: what speculation gains for an acceptance rate, a cost and a draft length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forerun.errors import BadOption

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.table import Table

    from forerun.theory.landscape import Landscape

ROOFLINE_HELP = "with --draft-shape and --machine in place of --c and --verify-ratio"


def theory(
    alpha: Annotated[float, typer.Option(help="acceptance rate of a tested token, 0 to 1", min=0, max=1)] = 0.8,
    c: Annotated[float | None, typer.Option(help="time of a draft token / of a target token [default: 0.1]")] = None,
    spec_length: Annotated[int, typer.Option(help="the longest draft (K, gamma) of the table", min=1, max=64)] = 8,
    verify_ratio: Annotated[
        float | None, typer.Option(help="time of a target pass over K + 1 tokens / over one [default: 1]")
    ] = None,
    overhead: Annotated[float, typer.Option(help="time outside of the models per round / of a target token")] = 0.0,
    num_tokens: Annotated[int, typer.Option("--tokens", help="of the text whose finite length is shown", min=1)] = 64,
    target_shape: Annotated[str | None, typer.Option(help=f"a name as llama-3.1-8b; {ROOFLINE_HELP}")] = None,
    draft_shape: Annotated[str | None, typer.Option(help="a name as llama-3.2-1b")] = None,
    machine: Annotated[str | None, typer.Option(help="h100, a100, rtx-4090 or cpu-2-cores")] = None,
    batch: Annotated[int, typer.Option(help="sequences in a pass, for the roofline", min=1)] = 1,
    context: Annotated[int, typer.Option(help="tokens behind which each of them is, for the roofline", min=0)] = 0,
    overlap: Annotated[
        float,
        typer.Option(help="of the experts that a pass's rows choose: 0 = independent, 1 = all the same", min=0, max=1),
    ] = 0.0,
) -> None:
    """Show what speculation gives for an acceptance rate and a cost: tokens, speed-up, the best length, the limits.

    Formulas: Leviathan et al. 2023, docs/study/theory.md. `forerun bench latency` measures alpha, c, v and overhead.
    """
    import numpy as np

    from forerun.cli.folding import folded
    from forerun.text.terminal import make_console
    from forerun.theory import formulas
    from forerun.theory.landscape import landscape

    console = make_console()
    named = (target_shape, draft_shape, machine)
    if any(named) and not all(named):
        raise BadOption("--target-shape, --draft-shape and --machine belong together: give all three, or none")
    if any(named) and (c is not None or verify_ratio is not None):
        raise BadOption("--c and --verify-ratio follow from --machine: give the shapes and the machine, or these two")
    if all(named):
        names = str(target_shape), str(draft_shape), str(machine)
        cost, ratios, about = _roofline(*names, batch, context, overlap, spec_length)
        console.print(about)
    else:
        cost = 0.1 if c is None else c
        ratios = np.full(spec_length + 1, 1.0 if verify_ratio is None else verify_ratio)
        ratios[0] = 1.0
    if cost < 0 or ratios.min() <= 0 or overhead < 0:
        raise BadOption(
            f"c={cost:g}, verify ratio={verify_ratio}, overhead={overhead:g} cannot be costs: give positive ones"
        )
    grid = landscape([alpha], spec_length, cost, ratios, overhead)
    best = int(grid.best_gammas[0])
    console.print(_table(alpha, cost, grid, num_tokens, [float(ratio) for ratio in ratios], overhead))
    gained = (
        f"K = {best} is the best of these, {grid.best_speedups[0]:.2f} times plain decoding" if best else "no K pays"
    )
    oracle = formulas.oracle_speedup(alpha, cost)
    limit = f"drafting exactly what will be accepted would give {oracle:.2f}"
    lengths = sorted({1, spec_length})
    where = [formulas.break_even_alpha(g, cost, float(ratios[g]), overhead) for g in lengths]
    pays = ", ".join(
        f"K = {g} from alpha = {a:.2f} on" if a is not None else f"K = {g} never"
        for g, a in zip(lengths, where, strict=True)
    )
    lines = f"alpha = {alpha:g}, c = {cost:.3g}: {gained}; {limit}. What pays: {pays}."
    notes = (
        "K: drafted tokens of a round. tokens: that it emits. cost: in target tokens. speed-up: tokens / cost (Theorem "
        f"3.8), and of a text of {num_tokens} tokens. operations: per token, if the draft model's are c times the "
        "target's (Theorem 3.11). reads: of the target's weights, per token. full: rounds that accept all K."
    )
    for text in (lines, notes):
        console.print(folded(text, console.width))


def _table(alpha: float, c: float, grid: Landscape, num_tokens: int, ratios: list[float], overhead: float) -> Table:
    """Return a table with a row for each draft length; the best length is marked.

    c, overhead: the time of a draft token, and of a round outside of the models, in times of a target token. ratios:
    the v of `_roofline` for each draft length. num_tokens: the length of the text in the column "of num_tokens".
    """
    from rich.table import Table

    from forerun.theory import formulas

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("K", "", "tokens", "cost", "speed-up", f"of {num_tokens}", "operations", "reads", "full"):
        table.add_column(name, justify="right", no_wrap=True)
    for k in range(len(grid.costs)):
        table.add_row(
            str(k),
            "best" if k == grid.best_gammas[0] else "",
            f"{grid.tokens[0, k]:.4f}",
            f"{grid.costs[k]:.2f}",
            f"{grid.speedups[0, k]:.4f}",
            f"{formulas.speedup_of_length(alpha, k, c, num_tokens, ratios[k], overhead):.2f}",
            f"{formulas.operations_factor(alpha, k, c):.2f}",
            f"{formulas.memory_access_factor(alpha, k):.2f}",
            f"{formulas.accepted_length_probs(alpha, k)[-1]:.0%}",
        )
    return table


def _roofline(
    target: str, draft: str, machine: str, batch: int, context: int, overlap: float, max_gamma: int
) -> tuple[float, npt.NDArray[np.float64], str]:
    """Return the ratio c, a ratio v for each draft length, and a sentence about both, by the roofline model.

    c is the time of a draft token, divided by the time of a target token. v is the time of a target pass over all
    drafted tokens and one more, divided by the time of a pass over one token. target, draft, machine: names in
    theory/roofline.py. batch, context, overlap: see Step. max_gamma: the longest draft. Raises BadOption for unknown
    names.
    """
    from forerun.registry import unknown
    from forerun.theory.roofline import MACHINES, SHAPES, Step, cost_ratio, pass_seconds, verify_ratios

    shapes = []
    for name in (target, draft):
        if name not in SHAPES:
            raise BadOption(unknown("shape", name, SHAPES))
        shapes.append(SHAPES[name])
    if machine not in MACHINES:
        raise BadOption(unknown("machine", machine, MACHINES))
    on = MACHINES[machine]
    step = Step(batch=batch, context=context, overlap=overlap)
    c = cost_ratio(shapes[1], shapes[0], step, on)
    ratios = verify_ratios(shapes[0], step, on, max_gamma)
    shared = f", overlap {overlap:g}" if any(shape.has_experts for shape in shapes) else ""
    about = (
        f"{target} with {draft} on {machine}, batch {batch}, context {context}{shared}, by the roofline: a pass "
        f"takes at least {1e3 * pass_seconds(shapes[0], step, on):.3g} ms, c = {c:.3f}, "
        f"v({max_gamma}) = {ratios[-1]:.2f}"
    )
    return c, ratios, about
