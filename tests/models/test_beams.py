"""Beam search against transformers' generate() in float32: texts, their order, and their scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from forerun import SamplingParams
from forerun.config import Quantization
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.engine.engine import Engine
from forerun.engine.router import Router
from forerun.models.loading import load_checkpoint
from forerun.ops.reference import ReferenceOps
from forerun.pacing.fixed import FixedPacing
from models.test_parity import oracle_of
from support import runner_for

Raw = dict[str, Any]
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}  # for int8
ENDS = (3, 10, 11, 12, 40, 41)  # several, so that texts of random models do end
MOST = 12
MODELS: dict[str, Raw] = {"llama": {}, "mistral": {"sliding_window": None}, "qwen2": {"tie_word_embeddings": True},
                          "qwen3": {}}  # fmt: skip
# What is asked of both: fields of SamplingParams, and what transformers calls others.
SEARCHES: dict[str, tuple[Raw, Raw]] = {
    "usual": ({"num_beams": 4, "n": 4}, {}),
    "short texts": ({"num_beams": 3, "n": 2, "length_penalty": -1.5}, {}),
    "long texts": ({"num_beams": 3, "n": 3, "length_penalty": 2.0, "early_stopping": "never"}, {}),
    "at the first": ({"num_beams": 5, "n": 3, "length_penalty": 0.0, "early_stopping": True}, {}),
    "not so soon": ({"num_beams": 2, "n": 2, "min_tokens": 6}, {"min_new_tokens": 6}),
    "no repeats": ({"num_beams": 3, "n": 3, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "biased": ({"num_beams": 3, "n": 3, "logit_bias": {5: -2.0, 7: 1.5}}, {"sequence_bias": {(5,): -2.0, (7,): 1.5}}),
}


class Text(NamedTuple):
    """What both say of a text."""

    tokens: list[int]
    score: float


class Both:
    """One checkpoint in an engine, with a draft model that resembles it, and in transformers."""

    def __init__(self, folder: Path) -> None:
        checkpoint = load_checkpoint(folder, ops=ReferenceOps(row_by_row=True))
        drafter = ModelDrafter(runner_for(checkpoint.model.rounded(Quantization.parse("int8")), max_seq_len=64))
        runner, members = runner_for(checkpoint.model, max_seq_len=64), Router({"model": drafter})
        self.engine = Engine(runner, members, FixedPacing(2), end_ids=frozenset(ENDS), max_seq_len=64)
        self.oracle = oracle_of(folder)

    def found(self, prompt: list[int], **given: Any) -> list[Text]:
        requests = self.engine.add_all(prompt, SamplingParams(temperature=0.0, max_tokens=MOST, **given))
        while any(request.seq.finish_reason is None for request in requests):
            self.engine.step()
        outputs = [request.output() for request in requests]
        return [Text(output.token_ids, output.score or 0.0) for output in outputs]

    def expected(self, prompt: list[int], ours: Raw, theirs: Raw) -> list[Text]:
        names = {name: name for name in ("num_beams", "length_penalty", "early_stopping")}
        names["n"] = "num_return_sequences"
        given = {names[name]: value for name, value in ours.items() if name in names}
        ends = {"max_new_tokens": MOST, "eos_token_id": list(ENDS), "pad_token_id": 0}
        scores = {"return_dict_in_generate": True, "output_scores": True}
        with torch.inference_mode():
            made = self.oracle.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                **ends,
                **scores,
                **given,
                **theirs,
            )
        texts = [_cut(row[len(prompt) :].tolist()) for row in made.sequences]
        return [Text(*pair) for pair in zip(texts, made.sequences_scores.tolist(), strict=True)]


def _cut(tokens: list[int]) -> list[int]:
    """Without the padding behind an end."""
    end = next((i for i, token in enumerate(tokens) if token in ENDS), len(tokens) - 1)
    return tokens[: end + 1]


@pytest.fixture(params=list(MODELS))
def both(request: pytest.FixtureRequest, write_checkpoint: Callable[..., Path], llama_raw: Raw) -> Both:
    return Both(write_checkpoint({**llama_raw, **SIZES, "model_type": request.param, **MODELS[request.param]}))


def test_transformers_finds_the_same_texts_with_the_same_scores(both: Both) -> None:
    """Without drafts, and with them; drafted or not, each score is the same in every bit."""
    num_ended = 0
    for seed, (ours, theirs) in enumerate(SEARCHES.values()):
        prompt = torch.randint(97, (5 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        expected = both.expected(prompt, ours, theirs)
        plain = both.found(prompt, draft="none", **ours)
        assert [text.tokens for text in plain] == [text.tokens for text in expected], ours
        assert [text.score for text in plain] == pytest.approx([text.score for text in expected], rel=1e-4, abs=1e-5)
        assert both.found(prompt, draft="model", draft_beams=ours["num_beams"] + 1, **ours) == plain
        num_ended += sum(text.tokens[-1] in ENDS for text in expected)
    assert num_ended > 1, "some texts end before they are cut"
