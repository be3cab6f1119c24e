"""`forerun plan` computes the memory that a configuration needs, from config.json and headers, and whether it fits.

numpy is imported when the command runs, not to print help. torch is imported only to examine a CUDA device.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.plans import SHAPE_NAMES
from forerun.cli import flags
from forerun.cli.folding import folded
from forerun.cli.signatures import Given
from forerun.config import EngineConfig
from forerun.errors import BadOption, shown
from forerun.models.named import PAIR

if TYPE_CHECKING:
    from forerun.blocks import Spec
    from forerun.engine.fitting import Outlines
    from forerun.engine.opened import Opened
    from forerun.memory.plan import MemoryPlan
    from forerun.models.outline import Outline
    from forerun.ops.memory import MemoryPart

NARROW = 76  # columns; in a narrower terminal, the text after a number stands under it
DOES_NOT_FIT = 3  # exit code, as for CapacityError
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SHAPE_HELP = f"as if widened to it: {SHAPE_NAMES} [default: none]"
MEMORY_HELP = "what there is, as 16GB, 16GiB or 8e9 [default: what this machine has free]"

ENGINE = (
    *("ignore_config_keys", "draft", "extra_drafts", "spec_length", "max_batch_size", "max_seq_len"),
    *("kv_cache_tokens", "max_num_batched_tokens", "prefill_chunk_tokens", "draft_catchup_tokens", "pacing"),
)


def plan(
    engine: Annotated[Given, flags.engine(*ENGINE, *flags.MODEL)],
    target: flags.TargetArgument = None,
    shape: Annotated[str | None, typer.Option(help=f"the target {SHAPE_HELP}", show_default=False)] = None,
    draft_shape: Annotated[str | None, typer.Option(help=f"the draft model {SHAPE_HELP}", show_default=False)] = None,
    memory: Annotated[str | None, typer.Option(help=MEMORY_HELP, show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Compute the memory that a configuration needs, before anything is loaded. Exit code 3: it does not fit."""
    config = flags.engine_config({**engine, "target": target})
    if shape is not None or draft_shape is not None:  # without a target, the shipped pair is widened
        config = dataclasses.replace(config, target=config.target or PAIR)
    from forerun.cli.waiting import OPENING_S
    from forerun.text.waiting import Waiting

    with Waiting("reading the headers of the models", OPENING_S):
        models = Models.of(config, shape, draft_shape)
        opened, planned = models.plan(None if memory is None else parse_bytes(memory))
    settings = models.settings(opened)
    if as_json:
        typer.echo(json.dumps({**settings, **plan_dict(planned), "unchecked": models.unchecked}))
    else:
        from forerun.text.terminal import make_console, visible

        width = make_console().width
        for line in plan_lines(settings, planned, width):
            typer.echo(visible(line))
        if models.unchecked is not None:
            said = f"Whether draft and target have the same tokens was not checked: {models.unchecked}."
            typer.echo(visible(folded(said, width)))
    if not planned.fits:
        raise typer.Exit(DOES_NOT_FIT)


@dataclasses.dataclass(frozen=True)
class Models:
    """The outlines of a configuration's models, and the memory needs of its drafters.

    by_name: the outline of each model, by name. unchecked: why the tokens of draft and target were not compared; None =
    they were compared.
    """

    outlines: Outlines
    by_name: Mapping[str, Outline]
    unchecked: str | None

    @classmethod
    def of(cls, config: EngineConfig, shape: str | None, draft_shape: str | None) -> Models:
        """Read the outline of each model of a configuration. Raises UserError for a model that LLM refuses."""
        from forerun.engine.fitting import planned

        outlines, unchecked = planned(config, lambda spec: _wide_spec(spec, shape, config.max_seq_len))
        by_name = dict(outlines.models)
        if draft_shape is not None and "draft" not in by_name:
            raise BadOption(
                f"draft_shape={shown(draft_shape)} needs a draft model, and draft={shown(config.draft)} has none"
            )
        if draft_shape is not None and by_name["draft"].is_made:
            raise BadOption(
                f"draft_shape={shown(draft_shape)} is not possible: draft={shown(config.draft)} is made of "
                "the target, so give shape instead"
            )
        if draft_shape is not None:
            draft = by_name["draft"]
            by_name["draft"] = draft.widened(_wide_spec(draft.config, draft_shape, config.max_seq_len))
        return cls(outlines, by_name, unchecked)

    def plan(self, available: int | None) -> tuple[Opened, MemoryPlan]:
        """Return the target as an engine would open it, and the plan of the memory.

        available: the bytes that the plan may use; None = the bytes that the device has available.
        """
        from forerun.memory.machine import available_bytes

        device = self.outlines.opened.device
        if available is None:
            if device == "cuda" and not _sees_a_card():
                raise BadOption("device='cuda' needs memory=... here: torch sees no CUDA device that could be asked")
            available = available_bytes(device)
        return self.outlines.fitted(available, self.by_name)

    def settings(self, opened: Opened) -> dict[str, Any]:
        """Return the settings for which the plan is made, such as max_batch_size, by name."""
        from forerun import ops

        config, has_drafts = opened.config, len(self.by_name) > 1
        return {
            "max_batch_size": config.max_batch_size,
            "max_seq_len": opened.max_seq_len,
            "spec_length": 0 if config.draft == "none" and not has_drafts else config.longest_draft,
            "dtype": opened.dtype,
            "device": opened.device,
            "ops": ops.resolve(config.ops, opened.device, opened.spec),
        }


def _sees_a_card() -> bool:
    from forerun import native

    if native.torch_version() is None:
        return False
    import torch

    return torch.cuda.is_available()


def parse_bytes(text: str) -> int:
    """Read a number of bytes: '16GB' (10^9 each), '16 GiB' (2^30 each) or '8e9'. Raises BadOption for other forms."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        if match is None:
            raise ValueError
        num_bytes = int(float(match[1]) * UNITS[match[2].upper()])
    except (ValueError, KeyError, OverflowError):
        num_bytes = 0
    if num_bytes <= 0:
        raise BadOption(f"memory={shown(text)} is not possible: write a number of bytes as 16GB, 16GiB or 8e9")
    return num_bytes


def _wide_spec(spec: Spec, shape: str | None, max_seq_len: int | None) -> Spec:
    """Return the spec of a model widened to a shape, with at least max_seq_len positions. shape: None = not widened."""
    if shape is None:
        return spec
    from forerun.bench.widen import shape_named
    from forerun.models.widening import wide_config

    wide = wide_config(spec, shape_named(shape, spec))
    return dataclasses.replace(wide, max_positions=max(wide.max_positions, max_seq_len or 0))


# ------------------------------------------------------------------------------------------------------- what is shown


def plan_dict(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan for `--json`, with all sizes in bytes."""
    return {**dataclasses.asdict(plan), "total_bytes": plan.total_bytes, "fits": plan.fits, "verdict": plan.verdict()}


def plan_lines(settings: Mapping[str, Any], plan: MemoryPlan, width: int) -> Iterator[str]:
    """Yield the lines of the table, then the verdict. GB are 10^9 bytes, GiB 2^30."""
    from forerun.ops.memory import MemoryPart

    yield folded(
        f"{settings['max_batch_size']} sequences of up to {settings['max_seq_len']:,} tokens, "
        f"{settings['spec_length']} drafts a step, {settings['dtype']} on {settings['device']} ({settings['ops']})",
        width,
    )
    yield from (folded(f"{label}: {spec}", width) for label, spec in plan.extra_drafts.items())
    yield ""
    yield f"{'':22}{'GB':>8}{'GiB':>8}"
    yield from (_line(part, width) for part in plan.parts)
    yield _line(MemoryPart("total", plan.total_bytes, ""), width)
    yield ""
    yield folded(plan.verdict(), width)
    for part in plan.later:
        yield folded(f"In time, on top: {part.bytes / 1e9:.2f} GB of {part.name}, {part.how}.", width)


def _line(part: MemoryPart, width: int) -> str:
    numbers = f"{part.name:22}{part.bytes / 1e9:8.3f}{part.bytes / 2**30:8.3f}"
    if not part.how:
        return numbers
    if width < NARROW:
        return f"{numbers}\n{folded(part.how, width, '    ', '    ')}"
    return folded(part.how, width, f"{numbers}  ", " " * (len(numbers) + 2))
