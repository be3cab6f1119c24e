"""What a checkpoint says about generating: the ids that end an output, and the sampling values its makers suggest.

End ids are always applied. The suggested sampling values are applied only on request (generation_config="model"):
they change what is distributed how, and whoever compares two runs should see every such value written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import BadOption, UnsupportedModel
from forerun.files import read_json_if_there
from forerun.types import SamplingParams

FILE = "generation_config.json"
# Keys of the file -> fields of SamplingParams that mean the same.
SAME = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
# Keys that change what is drawn and have no counterpart here -> the value that changes nothing.
NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "guidance_scale": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "watermarking_config": None,
    "stop_strings": None,
}


def sampling_defaults(folder: Path) -> SamplingParams:
    """The values of generation_config.json, over our own defaults where it says nothing.

    do_sample=false is temperature 0; suppress_tokens are biases of minus infinity. Raises UnsupportedModel for a value
    that would change the output and is not implemented, or that is out of range.
    """
    raw = {key: value for key, value in read_json_if_there(folder / FILE).items() if value is not None}
    for key, neutral in NEUTRAL.items():
        if raw.get(key, neutral) not in (neutral, [], {}):
            raise UnsupportedModel(
                f"{FILE} sets {key}={raw[key]!r}, which forerun does not do: leave out generation_config='model' and "
                "give the sampling values that you want"
            )
    fields: dict[str, Any] = {field: raw[key] for key, field in SAME.items() if key in raw}
    if raw.get("do_sample") is False:
        fields["temperature"] = 0.0
    if raw.get("suppress_tokens"):
        fields["logit_bias"] = dict.fromkeys(raw["suppress_tokens"], float("-inf"))
    try:
        return SamplingParams(**fields)
    except BadOption as error:
        raise UnsupportedModel(f"{FILE} in {folder}: {error}") from error


def end_ids_of(folder: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end the output: the union of generation_config.json, config.json and tokenizer_config.json."""
    generation = read_json_if_there(folder / FILE)
    named = read_json_if_there(folder / "tokenizer_config.json")
    ids: set[int] = set()
    for source in (generation, raw):
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    token = named.get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    return frozenset(int(i) for i in ids) | _ids_of_token(folder, named, text)


def _ids_of_token(folder: Path, named: Mapping[str, Any], text: str | None) -> frozenset[int]:
    """The id of a token, by tokenizer_config.json or tokenizer.json; none where no id has that text: it never comes."""
    if text is None:
        return frozenset()
    for token_id, entry in named.get("added_tokens_decoder", {}).items():
        if entry.get("content") == text:
            return frozenset([int(token_id)])
    tokenizer = read_json_if_there(folder / "tokenizer.json")
    for entry in tokenizer.get("added_tokens") or []:
        if entry["content"] == text:
            return frozenset([int(entry["id"])])
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    return frozenset([int(vocab[text])]) if isinstance(vocab, Mapping) and text in vocab else frozenset()
