"""A widened model keeps its distribution in every combination of what widening can do, and mutants are caught."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.widening import GROUPS, PROMPT, ROPES, TOLERANCE, case, difference, random_weights, run_greedy, widen
from forerun.blocks import Plain, Spec
from forerun.host_tensor import Floats, HostTensor
from forerun.models import widening
from forerun.ops.torch_tensors import HostWeights
from forerun.sampling import probs
from forerun.types import SamplingParams
from saved import save_checkpoint

STEPS = 32
FACTORS = (1, 2, 4, 3)
WAYS = list(itertools.product((True, False), (True, False)))  # tied, grown
CASES = [
    (factor, group, rope, *WAYS[(i + j + k) % len(WAYS)])
    for (i, factor), (j, group), (k, rope) in itertools.product(*map(enumerate, (FACTORS, GROUPS, ROPES)))
]


def test_the_cases_cover_every_pair_of_choices() -> None:
    choices = (FACTORS, GROUPS, ROPES, (True, False), (True, False))
    for a, b in itertools.combinations(range(len(choices)), 2):
        assert {(c[a], c[b]) for c in CASES} == set(itertools.product(choices[a], choices[b]))


def share_of_new_ids(logits: Tensor, num_old: int, temperature: float) -> float:
    """The largest probability that any new id has in any row, by the sampler's own pipeline."""
    params = SamplingParams(temperature=temperature)
    rows = [probs(row, params).dense for row in logits]
    return max(float(row[num_old:].max()) for row in rows if row is not None)


@pytest.mark.parametrize(("factor", "group", "rope", "tied", "grown"), CASES)
def test_same_distribution(factor: int, group: str, rope: str, tied: bool, grown: bool) -> None:
    config, shape = case(factor, group, rope, tied=tied, grown=grown)
    weights = random_weights(config)
    wide_config, wide = widen(config, weights, shape)
    tokens, logits = run_greedy(config, weights, STEPS)
    wide_tokens, wide_logits = run_greedy(wide_config, wide, STEPS)
    assert wide_tokens == tokens
    assert difference(logits, wide_logits) < TOLERANCE
    shift = (wide_logits[:, : config.vocab_size] - logits).mean(-1)
    if not (tied and grown):
        assert shift.abs().max() < TOLERANCE
    else:
        # c times a lane as large as the others; a mean over 97 ids is rounded to some 1e-6.
        assert shift.min() > 1e-4
        assert shift.max() < 1e-2
    if grown:
        assert wide_logits.shape[1] == 301
        assert share_of_new_ids(wide_logits, config.vocab_size, 1.0) == 0
        assert share_of_new_ids(wide_logits, config.vocab_size, 100.0) == 0
        assert (wide_logits / 100).softmax(-1)[:, config.vocab_size :].max() == 0  # as torch computes it, too


def last_stream(config: Spec, wide_config: Spec, wide: dict[str, Tensor]) -> tuple[Floats, Floats]:
    """Run a model over old ids, other ones than those that widening measures; results as `_last_stream`."""
    old, new = config.vocab_size, wide_config.vocab_size
    old_ids = {name: weight[:old] for name, weight in wide.items() if len(weight) == new}
    narrow = Plain.of(dataclasses.replace(wide_config, vocab_size=old))
    return widening._last_stream(narrow, HostWeights(wide | old_ids), seed=5)


def test_the_spare_dimension_is_about_as_large_as_the_others() -> None:
    """So hidden states that are stored in 8 bits lose nothing by widening."""
    config, shape = case(2, "4 to 3", grown=True)
    stream, hidden = last_stream(config, *widen(config, random_weights(config), shape))
    assert np.unique(stream[:, -1]).tolist() == [2.0**-10]
    typical = np.sqrt(np.square(hidden[:, : config.hidden_size]).mean())
    assert 0.5 < np.median(hidden[:, -1]) / typical < 2
    assert not hidden[:, config.hidden_size : -1].any()


def test_new_ids_stay_below_in_a_model_whose_residual_stream_is_large_and_uneven() -> None:
    """One id with an embedding a thousand times as large: there the spare lane is a thousand times as small."""
    config, shape = case(grown=True)
    weights = random_weights(config)
    weights["model.embed_tokens.weight"][PROMPT[2]] *= 1000
    _, logits = run_greedy(*widen(config, weights, shape), 2)
    assert share_of_new_ids(logits, config.vocab_size, 100.0) == 0


def test_bfloat16_holds_the_spare_dimension_exactly() -> None:
    config, shape = case(2, "4 to 3", grown=True)
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(config).items()}
    wide_config, wide = widen(config, weights, shape)
    stream, _ = last_stream(config, wide_config, wide)
    assert np.unique(stream[:, -1]).tolist() == [2.0**-10]
    _, logits = run_greedy(wide_config, wide, 4)
    assert share_of_new_ids(logits, config.vocab_size, 100.0) == 0


# ----------------------------------------------------------------------------------------------------------- mutants


def first_copy_only(of: Callable[..., Any]) -> Callable[..., Any]:
    def places(config: Plain, wide: Plain) -> Any:
        heads = of(config, wide)
        _, first = np.unique(heads.kv_sources // config.head_dim, return_index=True)
        kept = (first[:, None] + np.arange(config.head_dim)).ravel()
        return dataclasses.replace(heads, kv_rows=heads.kv_rows[kept], kv_sources=heads.kv_sources[kept])

    return places


def new_lanes_as_noise(of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *sizes: dataclasses.replace(of(*sizes), q_new_rows=np.empty(0, np.int64))


def lanes_in_place(head_dim: int, wide: int) -> list[int]:
    """Pair i stays pair i, which turns faster in a larger head."""
    return [*range(head_dim // 2), *range(wide // 2, wide // 2 + head_dim // 2)]


def eps_of_the_width_alone(config: Plain, wide: Plain) -> float:
    return config.norm_eps * config.hidden_size / wide.hidden_size


def eps_as_it_was(config: Plain, wide: Plain) -> float:
    return config.norm_eps - widening._carried(config) ** 2 / wide.hidden_size


def read_by_all_norms(separate: Callable[..., None]) -> Callable[..., None]:
    def wrong(made: dict[str, HostTensor], config: Plain, spare: Any) -> None:
        separate(made, config, spare)
        for name, out in made.items():
            if "layernorm" in name:
                out.values[-1] = spare.norm_weight

    return wrong


PLACES, SEPARATE = widening._HeadPlaces.of, widening._separate
MUTANTS: dict[str, tuple[str, Any]] = {
    "pair i stays pair i": ("_lanes", lanes_in_place),
    "queries keep their size": ("_query_scale", lambda config, wide: 1.0),
    "new query lanes are noise": ("_HeadPlaces.of", new_lanes_as_noise(PLACES)),
    "key-value heads are not copied": ("_HeadPlaces.of", first_copy_only(PLACES)),
    "eps does not know of c": ("_wide_eps", eps_of_the_width_alone),
    "eps does not know of the width": ("_wide_eps", eps_as_it_was),
    "layers read the spare dimension": ("_separate", read_by_all_norms(SEPARATE)),
}


def quiet_case() -> tuple[Spec, Any, dict[str, Tensor]]:
    """Everything at once, in a model so quiet that eps and c^2 are as large as its own squares."""
    config, shape = case(2, "4 to 3", "llama3", tied=False, grown=True, norm_eps=1.2e-7)
    weights = random_weights(config)
    for name in weights:
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            weights[name] *= 1e-3
    return config, shape, weights


def difference_now() -> float:
    """Over the prompt: later rows would differ by their tokens, too."""
    config, shape, weights = quiet_case()
    _, logits = run_greedy(config, weights, 1)
    _, wide_logits = run_greedy(*widen(config, weights, shape), 1)
    return difference(logits, wide_logits)


def test_a_quiet_model_keeps_its_distribution() -> None:
    assert difference_now() < TOLERANCE


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(f"forerun.models.widening.{name}", wrong)
    assert difference_now() > 100 * TOLERANCE


def test_new_ids_without_their_mark_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmarked(made: dict[str, HostTensor], config: Plain, spare: Any) -> None:
        SEPARATE(made, config, dataclasses.replace(spare, new_id=0.0))

    monkeypatch.setattr(widening, "_separate", unmarked)
    config, shape = case(grown=True)
    _, logits = run_greedy(*widen(config, random_weights(config), shape), 2)
    assert share_of_new_ids(logits, config.vocab_size, 1.0) > 0


# ---------------------------------------------------------------------------------------------- another implementation


@pytest.mark.parametrize(
    ("factor", "group", "rope", "tied", "grown"),
    [(2, "4 to 3", "llama3", True, True), (4, "3 to 4", "linear", False, True), (2, "equal", "default", True, False)],
)
def test_transformers_says_the_same(
    tmp_path: Path, factor: int, group: str, rope: str, tied: bool, grown: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    config, shape = case(factor, group, rope, tied=tied, grown=grown)
    weights = random_weights(config)
    tokens, logits = run_greedy(config, weights, STEPS)
    save_checkpoint(tmp_path, *widen(config, weights, shape), torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT + tokens[:-1]])).logits[0]
    assert theirs.argmax(-1)[len(PROMPT) - 1 :].tolist() == tokens
    assert difference(logits, theirs) < TOLERANCE
    if grown:
        assert (theirs / 100).softmax(-1)[:, config.vocab_size :].max() == 0
