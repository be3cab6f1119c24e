"""Reads a checkpoint's generation settings: token ids that end an output, and the makers' suggested sampling values.

End ids are always applied. The suggested sampling values become the defaults of a request (`Opened.usual_fields`). With
generation_config="none" the suggested values are not used.

The keys of SAME are honoured, and so are do_sample, stop_strings, suppress_tokens and bad_words_ids. The keys of INERT
change nothing. The keys of NEUTRAL change nothing if they have their neutral value. Any other key must be absent, null,
false or empty. Otherwise the key might change the output, and it is refused by name, as in config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from forerun.errors import BadOption, UnsupportedModel, shown
from forerun.models.configs import Raw, given
from forerun.text.small_files import SmallFiles
from forerun.types import SamplingParams

FILE = "generation_config.json"
# Keys of the file -> fields of SamplingParams with the same meaning.
SAME = {
    field.metadata["suggested"]: name
    for name, field in SamplingParams.__dataclass_fields__.items()
    if "suggested" in field.metadata
}
# Bookkeeping; caching, compiling and return values; how to speculate, which is ours to decide; keys for beam search;
# logits shifted as a whole or repaired where they are not finite; words for a chat program.
_INERT = (
    "bos_token_id eos_token_id pad_token_id decoder_start_token_id transformers_version transformers.js_config "
    "name_or_path trust_remote_code torch_dtype dtype attn_implementation use_cache max_cache_len prefill_chunk_size "
    "low_memory compile_config disable_compile continuous_batching_config is_assistant num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit assistant_lookbehind "
    "target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size use_mtp speculation_type early_stopping "
    "length_penalty renormalize_logits remove_invalid_values chat_format max_window_size user_token_id "
    "assistant_token_id"
)
INERT = frozenset(_INERT.split())
INERT_BEGINNINGS = ("_", "cache_", "output_", "return_")
KNOWN = frozenset({*SAME, *INERT, "do_sample", "stop_strings", "suppress_tokens", "bad_words_ids"})
FORCED_START, FORCED_END = "forced_bos_token_id", "forced_eos_token_id"
# Keys that change what is drawn and have no counterpart here -> the value that changes nothing.
_ONES = "num_beams num_beam_groups num_return_sequences typical_p guidance_scale encoder_repetition_penalty"
_ZEROS = (
    "diversity_penalty min_length epsilon_cutoff eta_cutoff penalty_alpha no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size"
)
NEUTRAL = {**dict.fromkeys(_ONES.split(), 1), **dict.fromkeys(_ZEROS.split(), 0)}
# Lengths that count the prompt, too -> the key that wins where both are set, and the option to give here.
WITH_PROMPT = {"max_length": ("max_new_tokens", "max_tokens"), "min_length": ("min_new_tokens", "min_tokens")}


def check_together(fields: Mapping[str, Any], small: SmallFiles) -> None:
    """Raise UnsupportedModel where the fields of generation_config.json contradict each other.

    fields: the fields of SamplingParams that the file sets. small: the checkpoint's files besides the weights.
    """
    try:
        SamplingParams(**fields)
    except BadOption as error:
        raise UnsupportedModel(f"{FILE} in {small.folder}: {error}") from error


def sampling_fields(
    small: SmallFiles, config: Raw, refuse: Callable[[UnsupportedModel], None] | None = None
) -> dict[str, Any]:
    """Return the fields of SamplingParams that generation_config.json sets. config: the content of config.json.

    small: the checkpoint's files besides the weights. do_sample=false becomes temperature 0, and stop_strings become
    stop. suppress_tokens and bad words of one token become biases of minus infinity. Where the file sets a minimum
    number of tokens and no maximum, max_tokens becomes None (no limit), because the default maximum may be below the
    minimum.

    Raises UnsupportedModel for a value that has a wrong type or range, or that would change the output in a way that is
    not implemented. If `refuse` is given, it gets the error instead, and the other keys are still read.
    """
    raw, name = given(small.json(FILE)), FILE
    if not raw:  # then config.json forces tokens, as in transformers
        raw = given({FORCED_END: config.get(FORCED_END)})
        name = "config.json"
    where = f"{name} in {small.folder}"
    fields = dict[str, Any]()
    forbidden = frozenset[int]()
    for key, value in raw.items():
        try:
            if not _is_known(key, value, raw, config):
                _refuse_key(key, value, where)
            fields |= _fields_of(key, value, where)
            forbidden |= _forbidden_ids(key, value, where, _num_ids(config))
        except UnsupportedModel as error:
            if refuse is None:
                raise
            refuse(error)
    if raw.get("do_sample") is False:
        fields["temperature"] = 0.0
    if forbidden:
        fields["logit_bias"] = dict.fromkeys(sorted(forbidden), float("-inf"))
    if fields.get("min_tokens"):
        fields.setdefault("max_tokens", None)
    return fields


def end_ids_of(small: SmallFiles, raw: Raw) -> frozenset[int]:
    """Return the token ids that end an output, from generation_config.json, config.json and tokenizer_config.json.

    small: the checkpoint's files besides the weights. raw: the content of config.json. Ids outside of the vocabulary
    are left out, because the model never outputs them; some files write -1 for "no id". Raises UnsupportedModel for a
    value that is not an id.
    """
    num_ids, ids = _num_ids(raw), frozenset[int]()
    for file, source in ((FILE, small.json(FILE)), ("config.json", raw)):
        value = source.get("eos_token_id")
        listed = [value] if type(value) is int else value
        if value is None:
            listed = []
        ids |= _ids(listed, "eos_token_id", f"{file} in {small.folder}", "null, an id or a list of ids", num_ids)
    return ids | _ids_of_end_token(small, num_ids)


def start_ids_of(small: SmallFiles, raw: Raw) -> list[int]:
    """Return the token ids that begin an encoder-decoder's output: the start token, then the forced token, if any.

    small: the checkpoint's files besides the weights. raw: the content of config.json. The start token comes from
    generation_config.json, or else from config.json. Where neither file names a start token, bos_token_id is used, as
    in transformers. The forced token comes from generation_config.json if that file exists, else from config.json.
    Raises UnsupportedModel where there is no start token.
    """
    file = small.json(FILE)
    forced = {key: (file or raw).get(key) for key in ("decoder_start_token_id", FORCED_START)}
    starts = (place.get(key) for key in ("decoder_start_token_id", "bos_token_id") for place in (file, raw))
    forced["decoder_start_token_id"] = next((value for value in starts if value is not None), None)
    if forced["decoder_start_token_id"] is None:
        raise UnsupportedModel(f"{small.folder} names no decoder_start_token_id: add the id that its texts begin with")
    num_ids = _num_ids(raw)
    for key, value in forced.items():
        fits = value is None or (type(value) is int and 0 <= value < (num_ids or value + 1))
        _require(fits, key, value, f"{FILE} or config.json in {small.folder}", "an id of the vocabulary")
    return [value for value in forced.values() if value is not None]


# -------------------------------------------------------------------------------------------------- sampling values


def _fields_of(key: str, value: Any, where: str) -> dict[str, Any]:
    """Return the fields of SamplingParams that a known key sets. Raises UnsupportedModel for an impossible value.

    where: the file's name, for the message.
    """
    if key in SAME:
        # A request may ask for no token; a model that suggests it would never answer.
        _require(key != "max_new_tokens" or value != 0, key, value, where, "at least 1, or None")
        return {SAME[key]: _checked(key, SAME[key], value, where)}
    if key == "do_sample":
        _require(isinstance(value, bool), key, value, where, "true or false")
    stop = _texts(value, where) if key == "stop_strings" else ()
    return {"stop": _checked(key, "stop", stop, where)} if stop else {}


def _forbidden_ids(key: str, value: Any, where: str, num_ids: int | None) -> frozenset[int]:
    """Return the token ids that a key forbids at all positions. Raises UnsupportedModel for an impossible value.

    where: the file's name, for the message. num_ids: the size of the vocabulary; None = unknown.
    """
    if key == "suppress_tokens":
        return _ids(value, key, where, "a list of ids", num_ids)
    if key != "bad_words_ids":
        return frozenset()
    words = value if isinstance(value, list) else [value]
    one_each = all(isinstance(word, list) and len(word) == 1 for word in words)
    what = "lists of one id each; of words of several tokens give the texts as bad_words"
    _require(one_each, key, value, where, what)
    return _ids([word[0] for word in words], key, where, what, num_ids)


def _is_known(key: str, value: Any, raw: Raw, config: Raw) -> bool:
    """Whether forerun honours `key` of generation_config.json, or `key` with this value changes nothing.

    raw: all keys of the file that are set. config: the content of config.json.
    """
    if key in KNOWN or key.startswith(INERT_BEGINNINGS) or value is False or value in ("", [], {}):
        return True
    if key == FORCED_START and config.get("is_encoder_decoder") is True:  # see `start_ids_of`
        return True
    if key in WITH_PROMPT and WITH_PROMPT[key][0] in raw:
        return True
    if key == "max_length":  # no limit where it lies beyond the context length
        positions = config.get("max_position_embeddings")
        return type(value) is int and type(positions) is int and value >= positions
    return not isinstance(value, bool) and key in NEUTRAL and bool(value == NEUTRAL[key])


def _refuse_key(key: str, value: Any, where: str) -> NoReturn:
    reason, give = "which forerun does not do", "the sampling values that you want"
    if key in WITH_PROMPT:
        reason = "which counts the prompt, too"
        give = f"{WITH_PROMPT[key][1]}, which counts the output alone"
    raise UnsupportedModel(f"{where} sets {key}={shown(value)}, {reason}: give generation_config='none' and {give}")


def _checked(key: str, field: str, value: Any, where: str) -> Any:
    """Return `value` if SamplingParams accepts it as its only setting; otherwise raise UnsupportedModel.

    key: the name of the value in the file. field: the name of the value in SamplingParams. where: the file's name, for
    the message. `check_together` checks all values in combination.
    """
    try:
        SamplingParams(**{"max_tokens": None, field: value})
    except BadOption as error:
        raise UnsupportedModel(f"{where}: {key}{str(error).removeprefix(field)}") from error
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    """Return the stop_strings of a file as a tuple. A file may have one text or a list of texts."""
    _require(isinstance(value, str | list), "stop_strings", value, where, "a text or a list of texts")
    return (value,) if isinstance(value, str) else tuple(value)


# -------------------------------------------------------------------------------------------------------------- ids


def _ids_of_end_token(small: SmallFiles, num_ids: int | None) -> frozenset[int]:
    """Return a set with the id of the eos_token in tokenizer_config.json; the empty set if no id has this text."""
    where = f"tokenizer_config.json in {small.folder}"
    named = small.json("tokenizer_config.json")
    token = named.get("eos_token")
    text = token["content"] if isinstance(token, Mapping) and "content" in token else token
    if not isinstance(text, str):
        _require(text is None, "eos_token", token, where, "null, a text or the description of a token")
        return frozenset()
    for token_id, content in _added(named.get("added_tokens_decoder"), where):
        if content == text:
            return _ids([token_id], "added_tokens_decoder", where, "a mapping of ids", num_ids)
    known = None if small.tokenizer is None else small.tokenizer.id_of(text)
    return _ids([] if known is None else [known], "eos_token", where, "a token of tokenizer.json", num_ids)


def _added(decoder: Any, where: str) -> Iterator[tuple[int, Any]]:
    """Yield (id, text) for each entry of `decoder`, the mapping added_tokens_decoder in tokenizer_config.json.

    The keys of this mapping are ids in decimal digits. None = there is no mapping. where: the file's name, for
    messages.
    """
    entries = {} if decoder is None else decoder
    ok = isinstance(entries, Mapping) and all(
        token_id.isdecimal() and isinstance(entry, Mapping) for token_id, entry in entries.items()
    )
    _require(ok, "added_tokens_decoder", decoder, where, "null, or a mapping from ids to descriptions of tokens")
    for token_id, entry in entries.items():
        yield int(token_id), entry.get("content")


def _ids(value: Any, key: str, where: str, what: str, num_ids: int | None) -> frozenset[int]:
    """Return those token ids of the list `value` that are in the vocabulary.

    num_ids: the size of the vocabulary; None = unknown. what: the possible values of `key`, in words, for the error.
    """
    _require(isinstance(value, list) and all(type(i) is int for i in value), key, value, where, what)
    return frozenset(i for i in value if i >= 0 and (num_ids is None or i < num_ids))


def _num_ids(config: Raw) -> int | None:
    size = config.get("vocab_size")
    return size if type(size) is int else None


def _require(ok: bool, key: str, value: Any, where: str, what: str) -> None:
    if not ok:
        raise UnsupportedModel(f"{where} sets {key}={shown(value)}, which is not possible: it must be {what}")
