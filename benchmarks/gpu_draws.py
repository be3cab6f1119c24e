"""Rows that are drawn from on the device: their bits against the host's pipeline, and the times of both."""

# ruff: noqa: B023 (what is timed runs at once, inside of the loop that it stands in)

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import DEVICE, IS_REHEARSED, captured, seconds
from forerun.ops import cuda
from forerun.ops.cuda.sampling import Cuts, Sampler, Settings
from forerun.sampling import filters_of, probs
from forerun.sampling.random import PhiloxCoins
from forerun.types import Draw, Probs, SamplingParams

WIDTH = 300 if IS_REHEARSED else 128256
NUM_ROWS = (2,) if IS_REHEARSED else (1, 6, 9, 64)
FILTERS: dict[str, dict[str, Any]] = {
    "none": {}, "top_p": {"top_p": 0.95}, "top_k, top_p": {"top_k": 20, "top_p": 0.95}, "min_p": {"min_p": 0.05}
}  # fmt: skip


def draws(out: dict[str, Any]) -> None:
    """Differing rows of each number of rows and filter; milliseconds on the device, and on the host with the copy."""
    found = out["draws"] = {}
    sampler = Sampler(cuda.make().largest_in_parts)  # type: ignore[attr-defined]
    for num in NUM_ROWS:
        for scale, kind in ((5.0, "peaked"), (1.0, "flat")):
            logits = torch.randn(num, WIDTH, device=DEVICE) * scale
            for name, filters in FILTERS.items():
                params = SamplingParams(temperature=0.8, **filters)
                coins = [PhiloxCoins(i + 7, 100 + i, i) for i in range(num)]
                wanted = [own.ahead(filters_of(params, WIDTH), i % 2 == 0) for i, own in enumerate(coins)]
                settings = Settings(num, WIDTH, DEVICE)
                settings.send(wanted)
                depths = torch.zeros(num, dtype=torch.int32, device=DEVICE)
                cuts = Cuts.of(wanted, WIDTH)
                drawn = sampler.draw(logits, settings.device, depths, cuts)
                start = time.perf_counter()
                rows = [probs(row, params) for row in logits.cpu()]
                ids = [_drawn(*each) for each in zip(coins, wanted, rows, strict=True)]
                host_s = time.perf_counter() - start
                differ = sum(
                    int(drawn.ids[i]) != ids[i] or not torch.equal(drawn.probs[i].cpu(), _spelled(rows[i]))
                    for i in range(num)
                )
                device_s = seconds(captured(lambda: sampler.draw(logits, settings.device, depths, cuts)))
                found[f"{num} {kind} {name}"] = {"differ": differ, "device_ms": device_s * 1e3, "host_ms": host_s * 1e3}
                print("draws", num, kind, name, found[f"{num} {kind} {name}"], flush=True)
    found["median_share_of_host"] = median(
        own["device_ms"] / own["host_ms"] for own in found.values() if isinstance(own, dict)
    )


def _drawn(coins: PhiloxCoins, draw: Draw, made: Probs) -> int:
    return coins.pick(made, 0) if draw.shares_noise else coins.draft(made, 0)


def _spelled(made: Probs) -> Tensor:
    found = torch.zeros(WIDTH)
    found[slice(None) if made.ids is None else torch.from_numpy(made.ids)] = torch.from_numpy(made.weights)
    return found
