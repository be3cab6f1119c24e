"""generation_config.json: which of its values become sampling parameters, and which are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import UnsupportedModel
from forerun.models.generation import sampling_defaults
from tiny import write_tiny


def folder_with(tmp_path: Path, **values: Any) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return tmp_path


def test_published_values_become_sampling_parameters(tmp_path: Path) -> None:
    """The file of a Llama 3 and of a Qwen 2.5, bookkeeping keys included."""
    llama = folder_with(
        tmp_path,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        transformers_version="4.45.0.dev0",
    )
    assert sampling_defaults(llama) == SamplingParams(temperature=0.6, top_p=0.9)
    qwen = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    expected = SamplingParams(repetition_penalty=1.05, temperature=0.7, top_p=0.8, top_k=20)
    assert sampling_defaults(folder_with(tmp_path, **qwen, pad_token_id=151643)) == expected


def test_greedy_lengths_and_suppressed_ids(tmp_path: Path) -> None:
    values = {"do_sample": False, "temperature": 0.6, "max_new_tokens": 40, "min_new_tokens": 3}
    found = sampling_defaults(folder_with(tmp_path, **values, suppress_tokens=[5, 9]))
    assert found == SamplingParams(temperature=0, max_tokens=40, min_tokens=3, logit_bias={5: -math.inf, 9: -math.inf})


def test_no_file_and_null_values_are_our_own_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingParams()
    assert sampling_defaults(folder_with(tmp_path, temperature=None, num_beams=1, typical_p=1.0)) == SamplingParams()


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_beams", 4), ("typical_p", 0.9), ("no_repeat_ngram_size", 3), ("bad_words_ids", [[7]]), ("min_p", 7)],
)
def test_what_would_change_the_output_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        sampling_defaults(folder_with(tmp_path, **{key: value}))
    in_range = key != "min_p"
    way_out = "leave out generation_config='model'" if in_range else "it must be in [0, 1]"
    assert f"{key}={value!r}" in str(caught.value)
    assert way_out in str(caught.value)


def test_they_are_applied_on_request_only(tmp_path: Path) -> None:
    folder = folder_with(write_tiny(tmp_path / "model"), eos_token_id=2, do_sample=False, max_new_tokens=5)
    plain, asked = LLM(folder), LLM(folder, generation_config="model")
    assert plain.checkpoint.end_ids == asked.checkpoint.end_ids == {0, 2}
    assert plain.default_params == SamplingParams()
    assert asked.default_params == SamplingParams(temperature=0, max_tokens=5)
    (output,) = asked.generate([3, 4, 5])
    assert (len(output.token_ids), output.finish_reason) == (5, "length")
    assert asked.generate([3, 4, 5])[0].token_ids == output.token_ids
    # Parameters of the caller's are taken as they are.
    assert len(asked.generate([3, 4, 5], SamplingParams(max_tokens=7, temperature=0))[0].token_ids) == 7
