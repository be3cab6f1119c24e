"""`forerun plan` computes from config.json alone what memory a configuration needs, and whether it fits.

torch is imported when the command runs, not to print help.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import flags
from forerun.cli.bench import SHAPE_NAMES
from forerun.config import EngineConfig
from forerun.errors import BadOption, shown

if TYPE_CHECKING:
    import torch

    from forerun.memory.parts import MemoryPart
    from forerun.memory.plan import MemoryPlan
    from forerun.models.layers import DecoderConfig

WIDTH = 80  # columns
DOES_NOT_FIT = 3  # exit code, as for CapacityError
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SHAPE_HELP = f"as if widened to it: {SHAPE_NAMES} [default: none]"
MEMORY_HELP = "what there is, as 16GB, 16GiB or 8e9 [default: what this machine has free]"


def plan(
    target: flags.Target = None,
    ignore_config_keys: flags.IgnoreConfigKeys = None,
    draft: flags.Draft = None,
    extra_drafts: flags.ExtraDrafts = None,
    shape: Annotated[str | None, typer.Option(help=f"the target {SHAPE_HELP}", show_default=False)] = None,
    draft_shape: Annotated[str | None, typer.Option(help=f"the draft model {SHAPE_HELP}", show_default=False)] = None,
    spec_length: flags.SpecLength = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    ops: flags.Ops = None,
    max_batch_size: flags.MaxBatchSize = None,
    max_seq_len: flags.MaxSeqLen = None,
    kv_cache_backend: flags.CacheBackend = None,
    kv_cache_tokens: flags.CacheTokens = None,
    prefill_chunk_tokens: flags.PrefillChunkTokens = None,
    draft_catchup_tokens: flags.DraftCatchupTokens = None,
    memory: Annotated[str | None, typer.Option(help=MEMORY_HELP, show_default=False)] = None,
    config: flags.ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Compute the memory that a configuration needs, before anything is loaded. Exit code 3: it does not fit."""
    engine = flags.engine_config(dict(locals()), config)
    models = Models.of(engine, shape, draft_shape)
    made = models.plan(engine, None if memory is None else parse_bytes(memory))
    if as_json:
        typer.echo(json.dumps({**models.settings(engine), **plan_dict(made)}))
    else:
        from forerun.text.terminal import visible

        for line in plan_lines(models.settings(engine), made):
            typer.echo(visible(line))
    if not made.fits:
        raise typer.Exit(DOES_NOT_FIT)


@dataclasses.dataclass(frozen=True)
class Models:
    """The models of a configuration, their type of weights, and their device, "cpu" or "cuda".

    extra_drafts: the models among the extra drafters, by their names in the configuration.
    """

    target: DecoderConfig
    draft: DecoderConfig | None
    extra_drafts: Mapping[str, DecoderConfig]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, config: EngineConfig, shape: str | None, draft_shape: str | None) -> Models:
        """Read the config.json of each model of a configuration. Raises UserError for a model that LLM refuses."""
        from forerun.engine.factory import SHIPPED_TARGET, device_of, draft_name, dtype_of, extra_draft_names

        read = functools.partial(_config_of, ignore=config.ignored_config_keys)
        raw = read(config.target or str(SHIPPED_TARGET))
        name = draft_name(config)
        if draft_shape is not None and name is None:
            raise BadOption(
                f"draft_shape={shown(draft_shape)} needs a draft model, and draft={shown(config.draft)} has none"
            )
        device = device_of(config)
        return cls(
            target=_shaped(raw, shape),
            draft=None if name is None else _shaped(read(name), draft_shape),
            extra_drafts={spec: _shaped(read(path), None) for spec, path in extra_draft_names(config).items()},
            dtype=dtype_of(config, device, raw),
            device=device,
        )

    def plan(self, config: EngineConfig, available: int | None) -> MemoryPlan:
        """Return the memory plan. available: bytes, None = what this machine has."""
        from forerun.engine.factory import device_of, num_taps
        from forerun.memory.machine import available_bytes
        from forerun.memory.plan import memory_plan

        if available is None:
            if self.device == "cuda" and device_of(EngineConfig()) != "cuda":
                raise BadOption("device='cuda' needs memory=... here: torch sees no CUDA device that could be asked")
            available = available_bytes(self.device)
        return memory_plan(
            self.target,
            self.draft,
            config,
            dtype=self.dtype,
            device=self.device,
            available_bytes=available,
            extra_drafts=self.extra_drafts,
            num_taps=num_taps(config),
        )

    def settings(self, config: EngineConfig) -> dict[str, Any]:
        """Return the settings that the plan is for, by name."""
        from forerun import ops
        from forerun.memory.plan import resolve_max_seq_len

        return {
            "max_batch_size": config.max_batch_size,
            "max_seq_len": resolve_max_seq_len(config.max_seq_len, self.target.max_positions),
            "spec_length": 0 if config.draft == "none" and not self.extra_drafts else config.longest_draft,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device,
            "ops": ops.resolve(config.ops, self.device),
        }


def parse_bytes(text: str) -> int:
    """Read bytes from '16GB', '16 GiB' or '8e9'; GB are 10^9 and GiB 2^30. Raises BadOption for other forms."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        if match is None:
            raise ValueError
        found = int(float(match[1]) * UNITS[match[2].upper()])
    except (ValueError, KeyError, OverflowError):
        found = 0
    if found <= 0:
        raise BadOption(f"memory={shown(text)} is not possible: write a number of bytes as 16GB, 16GiB or 8e9")
    return found


# -------------------------------------------------------------------------------------------------- what is asked for


def _config_of(name: str, ignore: Collection[str]) -> Mapping[str, Any]:
    """config.json without these keys, of a folder, a hub id, or the file itself. Raises as `read_raw_config`."""
    from forerun.models.loading import read_raw_config
    from forerun.text.json_files import read_json

    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        return read_raw_config(name, ignore)
    return {key: value for key, value in read_json(path).items() if key not in ignore}


def _shaped(raw: Mapping[str, Any], shape: str | None) -> DecoderConfig:
    from forerun.bench.widen import shape_named
    from forerun.models.loading import read_config
    from forerun.models.widening import wide_config

    config = read_config(raw)
    return config if shape is None else wide_config(config, shape_named(shape, config))


# ------------------------------------------------------------------------------------------------------- what is shown


def plan_dict(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan for `--json`, with all sizes in bytes."""
    return {**dataclasses.asdict(plan), "total_bytes": plan.total_bytes, "fits": plan.fits, "verdict": plan.verdict()}


def plan_lines(settings: Mapping[str, Any], plan: MemoryPlan) -> Iterator[str]:
    """Yield the lines of the table, then the verdict. GB are 10^9 bytes, GiB 2^30."""
    from forerun.memory.parts import MemoryPart

    yield textwrap.fill(
        f"{settings['max_batch_size']} sequences of {settings['max_seq_len']:,} tokens, {settings['spec_length']} "
        f"drafted per step, {settings['dtype']} on {settings['device']} ({settings['ops']})",
        WIDTH,
    )
    yield from (textwrap.fill(f"{label}: {spec}", WIDTH) for label, spec in plan.extra_drafts.items())
    yield ""
    yield f"{'':22}{'GB':>8}{'GiB':>8}"
    yield from (_line(part) for part in plan.parts)
    yield _line(MemoryPart("total", plan.total_bytes, ""))
    yield ""
    yield textwrap.fill(plan.verdict(), WIDTH)
    for part in plan.later:
        yield textwrap.fill(f"In time, on top: {part.bytes / 1e9:.2f} GB of {part.name}, {part.how}.", WIDTH)


def _line(part: MemoryPart) -> str:
    numbers = f"{part.name:22}{part.bytes / 1e9:8.3f}{part.bytes / 2**30:8.3f}  "
    return textwrap.fill(numbers + part.how, WIDTH, subsequent_indent=" " * len(numbers))
