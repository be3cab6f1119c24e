"""Greedy text of modules is generate()'s of transformers, whatever drafts, however long, with and without a cache."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch

from forerun.functional import (
    MultinomialProcessor,
    autoregressive_generate,
    beam_search_generate,
    ngram_assisted_speculative_generate,
    speculative_generate,
)
from forerun.functional.modules import ModuleModel
from forerun.models.runner import Run, Runner
from forerun.models.toy import ToyModel, ToyTable
from functional.modules import PROMPT, NewerModule, ToyModule, generated, module_of, noisy

KINDS = ("gpt2", "llama", "qwen2", "t5", "bart")
NUM = 20
WHOLE: dict[str, Any] = {"max_gen_len": NUM, "eos_tokens_id": None}
CACHED: dict[str, Any] = {**WHOLE, "use_cache": True}
TOY = ToyModel(7, 1)
GAMMAS = [pytest.param(gamma, marks=() if gamma in (1, 5) else pytest.mark.parity) for gamma in range(1, 9)]


@functools.cache
def pair(kind: str) -> tuple[Any, Any]:
    target = module_of(kind)
    return target, noisy(target)


@functools.cache
def expected(kind: str, inputs: tuple[int, ...] = tuple(PROMPT)) -> list[int]:
    return generated(pair(kind)[0], list(inputs), NUM)


def logits_behind(module: Any, inputs: list[int], output: list[int]) -> torch.Tensor:
    """Logits [V] of the next token, by one pass over everything."""
    with torch.inference_mode():
        if module.config.is_encoder_decoder:
            start = [module.config.decoder_start_token_id]
            found = module(input_ids=torch.tensor([inputs]), decoder_input_ids=torch.tensor([start + output]))
        else:
            found = module(input_ids=torch.tensor([inputs + output]))
    return found.logits[0, -1].double()


def assert_same_or_tied(kind: str, inputs: list[int], ours: list[int], theirs: list[int]) -> None:
    """Equal, or different first at two tokens that are the best two and nearly equal (docs/exactness.md).

    tau: twice the largest deviation of a logit of this module in float32 from float64 over the text so far.
    """
    if ours == theirs:
        return
    module = pair(kind)[0]
    wide = copy.deepcopy(module).double()
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    exact = logits_behind(wide, inputs, ours[:at])
    pairs = [[logits_behind(own, inputs, ours[:i]) for own in (module, wide)] for i in range(at + 1)]
    deviations = [(rounded - other).abs().max() for rounded, other in pairs]
    best = exact.topk(2)
    assert set(best.indices.tolist()) == {ours[at], theirs[at]}
    assert best.values[0] - best.values[1] <= 2 * max(deviations)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_that_of_generate(kind: str, gamma: int, use_cache: bool) -> None:
    target, drafter = pair(kind)
    ids, rate = speculative_generate(PROMPT, drafter, target, gamma=gamma, use_cache=use_cache, **WHOLE)
    assert_same_or_tied(kind, PROMPT, ids, expected(kind))
    assert 0 < rate < 1  # drafts were right, and wrong


@pytest.mark.parametrize("kind", KINDS)
def test_other_functions_say_the_same(kind: str) -> None:
    """Alone, with n-grams, by entropy, and with the drafts of a module that knows nothing of the target."""
    target, drafter = pair(kind)
    said = [
        autoregressive_generate(PROMPT, target, **CACHED),
        ngram_assisted_speculative_generate(PROMPT, target, **CACHED)[0],
        speculative_generate(PROMPT, drafter, target, use_egag=True, gamma_min=2, egag_ema_beta=0.5, **CACHED)[0],
        speculative_generate(PROMPT, module_of(kind, seed=3), target, first_target=False, **CACHED)[0],
    ]
    for ids in said:
        assert_same_or_tied(kind, PROMPT, ids, expected(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_as_its_own_drafter_is_always_right(kind: str) -> None:
    """Which it would not be with a wrong cache, a wrong start or a wrong encoder."""
    target = pair(kind)[0]
    ids, rate = speculative_generate(PROMPT, target, target, gamma=3, **CACHED)
    assert_same_or_tied(kind, PROMPT, ids, expected(kind))
    assert rate == 1


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_several_inputs_give_lists(kind: str) -> None:
    target, drafter = pair(kind)
    inputs = [PROMPT, [7], [50, 51, 50]]
    ids, rates = speculative_generate(inputs, drafter, target, **CACHED)
    assert ids == autoregressive_generate(inputs, target, **WHOLE)
    for own, said in zip(inputs, ids, strict=True):
        assert_same_or_tied(kind, own, said, expected(kind, tuple(own)))
    assert len(rates) == 3
    assert speculative_generate(torch.tensor([PROMPT]), drafter, target, max_gen_len=4)[0][0] == ids[0][:4]


def test_a_sliding_window_is_a_matter_of_the_mask() -> None:
    target = module_of("mistral")
    ids, rate = speculative_generate(PROMPT, noisy(target), target, **CACHED)
    assert ids == generated(target, PROMPT, NUM)
    assert rate > 0


def test_a_state_that_cannot_be_cut_runs_without_a_cache() -> None:
    target = module_of("mamba")
    ids, _ = speculative_generate(PROMPT, noisy(target), target, max_gen_len=8, eos_tokens_id=None)
    assert ids == generated(target, PROMPT, 8)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_the_encoder_runs_once_and_its_keys_stay(kind: str) -> None:
    target, drafter = (copy.deepcopy(module) for module in pair(kind))
    runs, keys = [], set()
    for module in (target, drafter):
        module.get_encoder().register_forward_hook(lambda *_: runs.append(1))

    def look(module: Any, args: Any, output: Any) -> None:
        layer = output.past_key_values.cross_attention_cache.layers[0]
        assert layer.keys.shape[2] == len(PROMPT)
        keys.add(layer.keys.data_ptr())

    target.register_forward_hook(look)
    ids, _ = speculative_generate(PROMPT, drafter, target, **CACHED)
    assert_same_or_tied(kind, PROMPT, ids, expected(kind))
    assert (len(runs), len(keys)) == (2, 1)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_equal_sources_are_run_once(kind: str) -> None:
    """By the interface that the engine's own encoder-decoders have; texts of another source say something else."""
    module, runs = copy.deepcopy(pair(kind)[0]), list[int]()
    module.get_encoder().register_forward_hook(lambda *_: runs.append(1))
    model = ModuleModel(module, "model")
    runner = Runner(model, model.own_cache())
    assert runner.sources is not None
    for slot, source in enumerate((PROMPT, PROMPT, PROMPT[1:])):
        runner.cache.open(slot)
        runner.sources.open(slot, source, None)
    runner.sources.run([0, 1, 2])
    first, second, third = runner.forward([Run(slot, [3, 9, 4]) for slot in range(3)]).logits
    assert len(runs) == 2
    assert (first == second).all()
    assert not np.allclose(first, third, atol=1e-3)


@pytest.mark.parametrize(("form", "cross"), [(ToyModule, False), (ToyModule, True), (NewerModule, False)])
def test_tuples_hold_what_was_kept_and_no_token_is_run_twice(form: type[ToyModule], cross: bool) -> None:
    toy = ToyModel(7, 1, ToyTable(scale=2.0))
    near = ToyModel(7, 2, ToyTable(distance=1.0), near=toy)
    plain = autoregressive_generate([1, 2, 3], ToyModule(toy), **WHOLE)
    target, drafter = form(toy, cross=cross), form(near, cross=cross)
    ids, rate = speculative_generate([1, 2, 3], drafter, target, gamma=4, **CACHED)
    assert ids == plain
    assert 0 < rate < 1
    assert target.calls[0] == (0, 2)  # the prompt, but its last token
    assert all(num <= 5 for _, num in target.calls[1:])
    assert all(num <= 2 for _, num in drafter.calls[1:])  # a token, or two behind a draft that was right


@pytest.mark.parametrize("use_cache", [False, True])
def test_an_end_inside_a_draft_ends_the_output(use_cache: bool) -> None:
    target = pair("llama")[0]
    whole = expected("llama")
    for ends in (whole[3], [96, whole[5], whole[3]]):
        ids, _ = speculative_generate(PROMPT, target, target, gamma=6, eos_tokens_id=ends, use_cache=use_cache)
        assert ids == whole[: whole.index(whole[3]) + 1] or ids[-1] == whole[5]
        assert autoregressive_generate(PROMPT, target, eos_tokens_id=ends) == ids


def test_the_target_ends_where_its_positions_do() -> None:
    target = ToyModule(TOY, max_positions=10)
    ids, _ = speculative_generate([1, 2, 3], target, target, eos_tokens_id=None, use_cache=True)
    assert len(ids) == 7
    assert speculative_generate([1] * 10, target, target, eos_tokens_id=None) == ([], 0.0)


def test_nothing_drafted_has_the_rate_0() -> None:
    target = ToyModule(TOY)
    assert speculative_generate([1], target, target, max_gen_len=1)[1] == 0.0
    assert speculative_generate([1], target, target, max_gen_len=0) == ([], 0.0)


class Placed(ToyModule):
    """Says that it is on another device than its tensors, and notes where it is given ids."""

    device = torch.device("meta")

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        assert input_ids.device == self.device
        return super().forward(torch.ones(input_ids.shape, dtype=torch.int64), past_key_values, use_cache)


def test_ids_go_to_the_device_of_each_module() -> None:
    """A device that holds no numbers shows where they were sent."""
    ids, _ = speculative_generate([1, 2], Placed(TOY), ToyModule(TOY), **WHOLE)
    assert ids == autoregressive_generate([1, 2], ToyModule(TOY), **WHOLE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("kind", KINDS)
def test_drafter_and_target_on_two_devices(kind: str) -> None:
    target, drafter = pair(kind)
    other = copy.deepcopy(drafter).to("cuda")
    assert_same_or_tied(kind, PROMPT, speculative_generate(PROMPT, other, target, **CACHED)[0], expected(kind))
    on_cuda = speculative_generate(PROMPT, drafter, copy.deepcopy(target).to("cuda"), **CACHED)[0]
    assert_same_or_tied(kind, PROMPT, on_cuda, expected(kind))


def test_torch_seeds_the_draws() -> None:
    target, said = ToyModule(TOY), []
    for _ in range(2):
        torch.manual_seed(5)
        said.append(speculative_generate([1], target, target, logits_processor=MultinomialProcessor(1.0)))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"length_penalty": -4.0},
        {"length_penalty": 4.0, "early_stopping": True},
        {"length_penalty": 4.0, "early_stopping": "never"},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_beam_search_is_that_of_generate(kind: str, settings: dict[str, Any]) -> None:
    """With an end that texts reach, so that each setting changes some output; with and without drafts and a cache."""
    module, drafter = pair(kind)
    end = expected(kind)[2]
    beams = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    rows = module.generate(torch.tensor([PROMPT]), max_new_tokens=12, **beams, **settings)
    wanted = [behind_start(module, row, end) for row in rows]
    options = {"max_gen_len": 12, "num_beams": 3, "eos_tokens_id": end, **settings}
    for more in ({}, {"use_cache": True}, {"use_cache": True, "drafter": drafter, "draft_beams": 5, "gamma": 3}):
        assert beam_search_generate(PROMPT, module, num_return_sequences=2, **options, **more) == wanted
    both = beam_search_generate([PROMPT, [7]], module, use_cache=True, **options)
    assert both == [wanted[0], beam_search_generate([7], module, **options)]


def test_drafts_save_passes_of_a_beam_search() -> None:
    toy = ToyModule(ToyModel(7, 1, ToyTable(scale=2.0)))
    said, passes = [], []
    for drafter in (None, ToyModule(ToyModel(7, 1, ToyTable(scale=2.0)))):
        toy.calls.clear()
        options: dict[str, Any] = {"max_gen_len": 12, "eos_tokens_id": None, "use_cache": True, "drafter": drafter}
        said.append(beam_search_generate([1, 2], toy, num_beams=2, gamma=3, **options))
        passes.append(len(toy.calls))
    assert said[0] == said[1]
    assert passes[1] < passes[0]


def behind_start(module: Any, row: torch.Tensor, end: int) -> list[int]:
    """The tokens that were generated, the end included and the padding not."""
    ids: list[int] = row[1 if module.config.is_encoder_decoder else len(PROMPT) :].tolist()
    return ids[: ids.index(end) + 1] if end in ids else ids
