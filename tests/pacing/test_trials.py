"""When what the plan does not use is tried, and what that costs."""

from __future__ import annotations

import itertools

import pytest

from forerun.pacing import auto
from pacing.simulator import CPU, GPU, QUIET, Machine, Track, World


def plain_trials(track: Track, first: int, last: int) -> list[int]:
    """Steps at which nobody began to draft for a while."""
    plain = [not any(granted) for granted in track.granted[first:last]]
    return [i + 1 for i, (before, now) in enumerate(itertools.pairwise([False, *plain])) if now and not before]


def test_every_size_of_batch_has_first_trials_of_its_own():
    """What one request used up for itself, over 700 steps in which drafting pays, is not missing to eight."""
    world = World(lambda step, b: 0.9, machine=Machine(GPU, pass_s=1e-4), noise=QUIET)
    world.batch = lambda step: range(1) if step < 700 else range(1, 9)
    track = world.run(auto.build(auto.Options(), None), 900)
    begins = plain_trials(track, 700, 900)
    assert begins[0] < 10
    assert [b - a for a, b in itertools.pairwise(begins[:4])] == pytest.approx([16, 32, 64], abs=4)


def test_looks_come_when_plain_decoding_is_due(monkeypatch):
    """However rarely there are looks otherwise."""
    monkeypatch.setattr(auto._OwnTime, "spacing", lambda self: 500)
    world = World(lambda step, b: 0.9, 4, Machine(GPU, pass_s=1e-4), noise=QUIET)
    begins = plain_trials(world.run(auto.build(auto.Options(), None), 250), 0, 250)
    assert [b - a for a, b in itertools.pairwise(begins[:4])] == pytest.approx([16, 32, 64], abs=4)


def test_a_probe_whose_tokens_are_accepted_pays_for_itself():
    """A drafter becomes good after 1,500 steps in which it was never right: the first probe that tells is not cut off.

    An allowance that is all but spent has to last until the plan has heard of it.
    """
    world = World(lambda step, b: 0.0 if step < 1500 else 0.95, machine=Machine(CPU, pass_s=0.008), noise=QUIET)
    drafts = [granted[0] > 0 for granted in world.run(auto.build(auto.Options(), None), 2200).granted]
    first = next(i for i in range(1500, 2200) if all(drafts[i : i + 2]))
    assert sum(drafts[first:]) > 0.9 * (2200 - first)
