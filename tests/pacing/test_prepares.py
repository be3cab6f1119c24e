"""Whose drafter reads a prompt beside the target."""

from __future__ import annotations

from forerun.pacing import auto
from pacing.simulator import CPU, Machine, World


def test_prompts_are_not_prepared_for_a_drafter_that_never_pays():
    pacing = auto.build(auto.Options(), None)
    world = World(lambda step, b: 0.0, machine=Machine(CPU, pass_s=0.004))
    assert pacing.prepares(world.sequence(0))
    world.run(pacing, 600)
    assert not pacing.prepares(world.sequence(0))
    assert pacing.prepares(World(lambda step, b: 0.0).sequence(1, spec_length=3))


def test_before_anything_was_measured_a_few_requests_are_prepared():
    """Enough to find out whether drafting pays; all of their chunks, and whoever asks for a length of his own."""
    pacing, world = auto.build(auto.Options(), None), World(lambda step, b: 0.9, machine=Machine(CPU, pass_s=0.004))
    for _ in range(2):
        assert [pacing.prepares(world.sequence(b)) for b in range(5)] == [True, True, True, False, False]
    assert pacing.prepares(world.sequence(5, spec_length=3))
    pacing.end(world.sequence(1))
    assert pacing.prepares(world.sequence(3)), "one of the three has gone"
    other = World(lambda step, b: 0.9, draft="lookup")
    assert pacing.prepares(other.sequence(9)), "three of each drafter"
    world.run(pacing, 100)
    assert pacing.prepares(world.sequence(6)), "it pays"


def test_beside_prompts_that_never_end_more_are_prepared_after_a_while():
    """Nothing is measured where every step runs a prompt, too: that is no reason to prepare nobody for ever."""
    pacing = auto.build(auto.Options(), None)
    world = World(lambda step, b: 0.9, 3, Machine(CPU, pass_s=0.004), num_prompt_rows=lambda step: 100)
    for b in range(3):
        assert pacing.prepares(world.sequence(b))
    world.run(pacing, 20)
    assert not pacing.prepares(world.sequence(7))
    world.run(pacing, 20)
    assert pacing.prepares(world.sequence(8))
