"""When what the plan does not use is tried, and what that costs."""

from __future__ import annotations

import itertools

import pytest

from forerun.pacing import auto
from forerun.pacing._costs import PassTime
from forerun.pacing._drafts import DraftTime
from forerun.pacing._plan import Batch, Candidate, Search
from forerun.pacing._trials import _PLAIN, Request, Trials, _stretch
from forerun.pacing._twins import acceptance
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


def test_free_trials_are_counted_by_size():
    """One request has used up its eight, and there was never any allowance: eight requests get theirs all the same."""
    world = World(lambda step, b: 0.9, machine=Machine(GPU, pass_s=1e-4), noise=QUIET)
    world.batch = lambda step: range(1) if step < 2500 else range(1, 9)
    pacing = auto.build(auto.Options(trial_share=1e-9), None)
    pacing._trials._allowance = 0.0
    track = world.run(pacing, 2700)
    assert pacing._trials._num_plain[0] == 8
    assert len(plain_trials(track, 2500, 2700)) >= 3


def test_looks_beside_prompts_do_not_wait_for_trials(monkeypatch):
    """Plain decoding is due to be tried while prompts run beside every step: nothing can be, nobody looks for it."""
    monkeypatch.setattr(auto._OwnTime, "spacing", lambda self: 500)
    world = World(lambda step, b: 0.9, 4, Machine(GPU, pass_s=1e-4), noise=QUIET)
    world.num_prompt_rows = lambda step: 64 if step >= 40 else 0
    pacing, looks = auto.build(auto.Options(), None), list[int]()
    look = pacing._look
    monkeypatch.setattr(pacing, "_look", lambda: (looks.append(pacing._step), look()))
    world.run(pacing, 400)
    assert len([step for step in looks if step > 60]) <= 2


def test_what_cannot_be_paid_blocks_nothing():
    """The best plan that was not seen for long needs a request that has much to catch up: plain decoding is tried."""
    passes, drafts = PassTime(), {"model": DraftTime()}
    for rows in (2, 4, 8):
        passes.observe([0.01 + 0.0001 * rows] * 20, rows, 2)
    drafts["model"].observe_catchup(1.0, 10)
    requests = [Request("model", acceptance(80), None, 0, lag=lag) for lag in (0, 1000)]
    search = Search(Batch([Candidate("model", [0.9, 0.8, 0.7], 1.0) for _ in requests], passes, drafts), 16)
    plan = search.value([1, 0])
    dear = search.best
    assert dear.goodput > plan.goodput > search.plain.goodput
    trials = Trials(0.006)
    trials._seen = {(1, _stretch(mark)): 0 for mark in search.marks} | {(1, _PLAIN): 0}
    assert trials._stale(1000, 1, search, plan, requests, drafts) is search.plain
    requests[1].lag = 0
    assert trials._stale(1000, 1, search, plan, requests, drafts) is not search.plain
