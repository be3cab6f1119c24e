"""generation_config.json: which ids end an output, which values become sampling parameters, which are refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer as Backend, models

from forerun import LLM, SamplingParams
from forerun.cli.flags import sampling_params
from forerun.errors import BadOption, UnsupportedModel
from forerun.models import generation
from forerun.text.small_files import SmallFiles
from refusals import refusal
from tiny import write_tiny

CONFIG = {"vocab_size": 100, "max_position_embeddings": 64}


def folder_with(tmp_path: Path, **values: Any) -> Path:
    return written(tmp_path, "generation_config", values)


def written(folder: Path, name: str, values: Any) -> Path:
    (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def sampling_fields(folder: Path) -> dict[str, Any]:
    small = SmallFiles(folder)
    return generation.sampling_fields(small, small.json("config.json"))


def sampling_defaults(folder: Path) -> SamplingParams:
    fields = sampling_fields(folder)
    generation.check_together(fields, SmallFiles(folder))
    return SamplingParams(**fields)


def end_ids_of(folder: Path, raw: dict[str, Any]) -> frozenset[int]:
    return generation.end_ids_of(SmallFiles(folder), raw)


def test_published_values_become_sampling_parameters(tmp_path: Path) -> None:
    """The file of a Llama 3 and of a Qwen 2.5, bookkeeping keys included."""
    ids = {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "transformers_version": "4.45.0.dev0"}
    llama = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    assert sampling_defaults(folder_with(tmp_path, **llama, **ids)) == SamplingParams(temperature=0.6, top_p=0.9)
    qwen = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    expected = SamplingParams(repetition_penalty=1.05, temperature=0.7, top_p=0.8, top_k=20)
    assert sampling_defaults(folder_with(tmp_path, **qwen, pad_token_id=151643)) == expected
    assert sampling_fields(tmp_path) == {key: value for key, value in qwen.items() if key != "do_sample"}


INERT = {
    "Baichuan 2 and Qwen 1": {"user_token_id": 5, "assistant_token_id": 6, "chat_format": "chatml"}
    | {"max_window_size": 6144, "trust_remote_code": True},
    "saved from config.json": {"_from_model_config": True, "transformers_version": "5.0", "output_attentions": False},
    "caches": {"use_cache": False, "cache_implementation": "hybrid", "cache_config": {"a": 1}, "low_memory": True},
    "returned": {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 1},
    "speculation": {"num_assistant_tokens": 20, "prompt_lookup_num_tokens": 3, "assistant_confidence_threshold": 0.4},
    "one beam": {"num_beams": 1, "early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 0.0},
    "neutral": {"min_length": 0, "typical_p": 1.0, "guidance_scale": 1, "no_repeat_ngram_size": 0, "eta_cutoff": 0.0},
    "empty": {"bad_words_ids": [], "token_healing": False, "max_time": None, "watermarking_config": {}, "later": ""},
    "as long as can be": {"max_length": 64},
    "more than can be": {"max_length": 4096},
    "nothing suppressed": {"suppress_tokens": [], "stop_strings": [], "do_sample": True},
}


@pytest.mark.parametrize("name", INERT)
def test_what_changes_nothing_is_taken(tmp_path: Path, name: str) -> None:
    written(tmp_path, "config", CONFIG)
    assert sampling_fields(folder_with(tmp_path, **INERT[name])) == {}


def test_every_key_of_transformers_has_an_answer(tmp_path: Path) -> None:
    """None of them is refused with the value it has there unless the user sets it."""
    known = pytest.importorskip("transformers").GenerationConfig()
    ours = {"max_length", "top_k"}  # 20 and 50 there, which no published file relies on
    values = known._get_default_generation_params() | {k: v for k, v in known.to_dict().items() if v is not None}
    found = sampling_defaults(folder_with(tmp_path, **{k: v for k, v in values.items() if k not in ours}))
    assert found == SamplingParams(temperature=0)


def test_greedy_lengths_and_suppressed_ids(tmp_path: Path) -> None:
    values = {"do_sample": False, "temperature": 0.6, "max_new_tokens": 40, "min_new_tokens": 3}
    written(tmp_path, "config", CONFIG)
    found = sampling_defaults(folder_with(tmp_path, **values, suppress_tokens=[5, -1, 9, 100]))
    assert found == SamplingParams(temperature=0, max_tokens=40, min_tokens=3, logit_bias={5: -math.inf, 9: -math.inf})


def test_an_end_that_is_forced(tmp_path: Path) -> None:
    """By config.json only where there is no other file, as in transformers."""
    written(tmp_path, "config", CONFIG | {"forced_eos_token_id": 7})
    assert sampling_fields(tmp_path) == {"forced_eos_token_id": 7}
    assert sampling_fields(folder_with(tmp_path, forced_eos_token_id=2)) == {"forced_eos_token_id": 2}
    assert sampling_fields(folder_with(tmp_path, eos_token_id=2)) == {}
    (tmp_path / "generation_config.json").unlink()
    written(tmp_path, "config", CONFIG | {"forced_eos_token_id": [7, 8]})
    with pytest.raises(UnsupportedModel, match=r"^config\.json in .*: forced_eos_token_id=.* must be an integer"):
        sampling_fields(tmp_path)


@pytest.mark.parametrize("texts", ["END", ["END"], ["END", "\n\n"]])
def test_stop_strings_are_stop(tmp_path: Path, texts: Any) -> None:
    assert sampling_defaults(folder_with(tmp_path, stop_strings=texts)).stop == SamplingParams(stop=texts).stop


def test_a_length_beside_one_without_the_prompt_has_no_say(tmp_path: Path) -> None:
    values = {"max_length": 20, "max_new_tokens": 40, "min_length": 5, "min_new_tokens": 3}
    assert sampling_fields(folder_with(tmp_path, **values)) == {"max_tokens": 40, "min_tokens": 3}


def test_flags_come_over_the_fields_before_they_are_checked_together(tmp_path: Path) -> None:
    """A least number above our default greatest lifts it; the greatest of the command line counts then."""
    fields = sampling_fields(folder_with(tmp_path, min_new_tokens=200))
    assert fields == {"min_tokens": 200, "max_tokens": None}
    assert sampling_defaults(tmp_path) == SamplingParams(min_tokens=200, max_tokens=None)
    assert sampling_params({"max_tokens": 500}, fields) == SamplingParams(min_tokens=200, max_tokens=500)
    assert sampling_params({"top_k": 3, "stop": None}, {"top_k": 5, "top_p": 0.5}) == SamplingParams(top_k=3, top_p=0.5)
    assert sampling_params({"top_k": 3}) == SamplingParams(top_k=3)
    with pytest.raises(BadOption, match="min_tokens=200 is not possible: it must be at most max_tokens"):
        sampling_params({"max_tokens": 100}, fields)
    assert sampling_fields(folder_with(tmp_path, min_new_tokens=0)) == {"min_tokens": 0}
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json in .*: min_tokens=5 is not possible"):
        sampling_defaults(folder_with(tmp_path, min_new_tokens=5, max_new_tokens=3))


def test_no_file_and_null_values_are_our_own_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingParams()
    assert sampling_defaults(folder_with(tmp_path, temperature=None, num_beams=1, typical_p=1.0)) == SamplingParams()


OTHERS = "give generation_config='none' and the sampling values that you want"
LENGTH = "which counts the prompt, too: give generation_config='none' and {}, which counts the output alone"
REFUSED = [
    *[({key: 4}, OTHERS) for key in ("num_beams", "num_return_sequences", "max_time", "no_repeat_ngram_size")],
    *[({key: True}, OTHERS) for key in ("token_healing", "num_beams", "a_key_of_the_future")],
    ({"diversity_penalty": 0.5, "num_beams": 4}, OTHERS),
    ({"typical_p": 0.9}, OTHERS),
    *[({"bad_words_ids": value}, "give the texts as bad_words") for value in ([[7], [7, 8]], [7], 7, {}, [["a"]])],
    ({"stop_words_ids": [[7]]}, OTHERS),
    ({"forced_eos_token_id": [0, 1]}, "it must be an integer"),
    ({"forced_bos_token_id": 0}, OTHERS),
    ({"assistant_ensemble_weight": 0.5}, OTHERS),
    ({"max_length": 63}, LENGTH.format("max_tokens")),
    ({"max_length": "64"}, LENGTH.format("max_tokens")),
    ({"min_length": 5}, LENGTH.format("min_tokens")),
    ({"min_p": 7}, "it must be in [0, 1]"),
    ({"temperature": "1"}, "it must be a number"),
    ({"temperature": "1", "do_sample": False}, "it must be a number"),
    ({"top_k": 5.5}, "it must be an integer"),
    ({"max_new_tokens": 0}, "max_new_tokens=0, which is not possible: it must be at least 1, or None"),
    ({"min_new_tokens": True}, "it must be an integer"),
    ({"do_sample": "false"}, "it must be true or false"),
    ({"do_sample": 0}, "it must be true or false"),
    *[({"suppress_tokens": value}, "it must be a list of ids") for value in (5, [True], ["a"], [[1]], {})],
    *[({"stop_strings": value}, "a text or a list of texts") for value in (5, {"a": 1})],
    *[({"stop_strings": value}, "it must be ") for value in ("", ["a", ""], ["a", 5])],
]


@pytest.mark.parametrize(("values", "way_out"), REFUSED, ids=[str(values) for values, _ in REFUSED])
def test_what_would_change_the_output_is_refused(tmp_path: Path, values: Any, way_out: str) -> None:
    written(tmp_path, "config", CONFIG)
    for read in (sampling_fields, sampling_defaults):
        text = refusal(UnsupportedModel, read, folder_with(tmp_path, **values))
        assert text.startswith(f"generation_config.json in {tmp_path}")
        assert any(f"{key}=" in text for key in values)
        assert way_out in text


# ------------------------------------------------------------------------------------------------------------- end ids


@pytest.mark.parametrize(
    ("value", "ids"),
    [(None, set()), (5, {5}), (0, {0}), ([], set()), ([5, 99], {5, 99}), (-1, set()), ([5, -1, 100, 2**70], {5})],
)
def test_end_ids(tmp_path: Path, value: Any, ids: set[int]) -> None:
    assert end_ids_of(folder_with(tmp_path, eos_token_id=value), CONFIG) == ids
    assert end_ids_of(folder_with(tmp_path), CONFIG | {"eos_token_id": value}) == ids
    assert end_ids_of(folder_with(tmp_path, eos_token_id=value), {"eos_token_id": [7]}) >= ids | {7}


def test_end_ids_are_those_of_all_files_together(tmp_path: Path) -> None:
    written(tmp_path, "tokenizer_config", {"eos_token": "</s>", "added_tokens_decoder": {"9": {"content": "</s>"}}})
    assert end_ids_of(folder_with(tmp_path, eos_token_id=[2, 3]), CONFIG | {"eos_token_id": 5}) == {2, 3, 5, 9}


@pytest.mark.parametrize("value", ["</s>", "5", "", [None], [[1]], {}, True, False, 1.5, [5, True], [1.0]], ids=repr)
def test_what_is_no_end_id_is_refused(tmp_path: Path, value: Any) -> None:
    wanted = f"sets eos_token_id={value!r}, which is not possible: it must be null, an id or a list of ids"
    for file in ("generation_config", "config"):
        raw = CONFIG | ({"eos_token_id": value} if file == "config" else {})
        folder = folder_with(tmp_path, **({} if file == "config" else {"eos_token_id": value}))
        assert refusal(UnsupportedModel, end_ids_of, folder, raw) == f"{file}.json in {tmp_path} {wanted}"


DECODER = {"7": {"content": "<end>"}, "100": {"content": "<beyond>"}}
WORDS = models.WordLevel({"<end>": 9, "<none>": 0}, unk_token="<none>")
UNIGRAM = models.Unigram([("<none>", 0.0), ("<end>", -1.0)], unk_id=0)


def tokenizer_of(model: Any, *added: str) -> dict[str, Any]:
    """What tokenizer.json says of a vocabulary, and of tokens that were added to it."""
    backend = Backend(model)
    backend.add_tokens([AddedToken(token) for token in added])
    return json.loads(backend.to_str())


@pytest.mark.parametrize(
    ("named", "tokenizer", "ids"),
    [
        ({"eos_token": "<end>", "added_tokens_decoder": DECODER}, None, {7}),
        ({"eos_token": {"content": "<end>"}, "added_tokens_decoder": DECODER}, None, {7}),
        ({"eos_token": "<beyond>", "added_tokens_decoder": DECODER}, None, set()),
        ({"eos_token": None, "added_tokens_decoder": []}, None, set()),
        ({"eos_token": "<end>", "added_tokens_decoder": None}, tokenizer_of(models.BPE(), "<a>", "<end>"), {1}),
        ({"eos_token": "<end>"}, tokenizer_of(WORDS), {9}),
        ({"eos_token": "<end>"}, tokenizer_of(UNIGRAM), {1}),
        ({"eos_token": "<end>"}, tokenizer_of(models.BPE(), "<a>"), set()),
        ({"eos_token": "<end>"}, None, set()),
    ],
)
def test_the_id_of_the_end_token(tmp_path: Path, named: Any, tokenizer: Any, ids: set[int]) -> None:
    written(tmp_path, "tokenizer_config", named)
    if tokenizer is not None:
        written(tmp_path, "tokenizer", tokenizer)
    assert end_ids_of(tmp_path, CONFIG) == ids


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("added_tokens_decoder", [{"content": "<end>"}]),
        ("added_tokens_decoder", {"seven": {"content": "<end>"}}),
        ("added_tokens_decoder", {"7": "<end>"}),
        *[("eos_token", value) for value in (["<end>"], 7, {}, {"content": 7})],
    ],
)
def test_an_odd_file_of_the_tokenizer_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    written(tmp_path, "tokenizer_config", {"eos_token": "<end>"} | {key: value})
    assert refusal(UnsupportedModel, end_ids_of, tmp_path, CONFIG).startswith(
        f"tokenizer_config.json in {tmp_path} sets {key}={value!r}, which is not possible: it "
    )


def test_an_end_token_in_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "tokenizer_config", {"eos_token": "<end>"})
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json is not a file of the tokenizers library"):
        end_ids_of(written(tmp_path, "tokenizer", {"added_tokens": [{"content": "<end>"}]}), CONFIG)


def test_no_end_id_lies_outside_the_vocabulary(tmp_path: Path) -> None:
    """-1 would be the last row where min_tokens forbids the end ids."""
    folder = folder_with(write_tiny(tmp_path / "model"), eos_token_id=[0, -1])
    params = SamplingParams(temperature=0, min_tokens=8, max_tokens=8, logit_bias={256: 1e4})
    (output,) = LLM(folder, draft="none").generate([3, 4, 5], params)
    assert output.token_ids == [256] * 8


# ---------------------------------------------------------------------------------------------------------- the engine


def test_words_of_one_token_are_forbidden(tmp_path: Path) -> None:
    """As every Opus-MT forbids its padding; together with what is suppressed."""
    found = sampling_defaults(folder_with(tmp_path, bad_words_ids=[[7], [9]], suppress_tokens=[9, 5]))
    assert found.logit_bias == {5: -math.inf, 7: -math.inf, 9: -math.inf}


def test_what_is_not_done_leaves_the_other_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"top_k": 7, "no_repeat_ngram_size": 3, "bad_words_ids": [[5, 6]], "temperature": 0.5, "top_p": 7}
    folder = folder_with(write_tiny(tmp_path / "model"), **values)
    assert LLM(folder).usual_fields == {"top_k": 7, "temperature": 0.5}
    said = [record.getMessage() for record in caplog.records]
    for key, way_out in {
        "no_repeat_ngram_size": "'none'",
        "bad_words_ids": "as bad_words",
        "top_p": "in (0, 1]",
    }.items():
        (line,) = [line for line in said if f"{key}" in line]
        assert way_out in line
        assert line.endswith("this value is left out")
    assert "no_repeat_ngram_size" in refusal(UnsupportedModel, LLM, folder, generation_config="model")


def test_they_are_applied_on_request_only(tmp_path: Path) -> None:
    folder = folder_with(write_tiny(tmp_path / "model"), eos_token_id=2, do_sample=False, max_new_tokens=5)
    plain, asked = LLM(folder, generation_config="none"), LLM(folder)
    assert plain.checkpoint.end_ids == asked.checkpoint.end_ids == {0, 2}
    assert plain.default_params == SamplingParams()
    assert asked.default_params == SamplingParams(temperature=0, max_tokens=5)
    (output,) = asked.generate([3, 4, 5])
    assert (len(output.token_ids), output.finish_reason) == (5, "length")
    assert asked.generate([3, 4, 5])[0].token_ids == output.token_ids
    # Parameters of the caller's are taken as they are.
    assert len(asked.generate([3, 4, 5], SamplingParams(max_tokens=7, temperature=0))[0].token_ids) == 7
