"""Converts the tokenizer in a GGUF file's metadata into the files of a checkpoint folder.

The tokenizer gives the same ids as llama.cpp (llama-vocab.cpp). Three kinds of tokenizers are read. "gpt2" is a
byte-level BPE; tokenizer.ggml.pre names the patterns in cuttings.py that cut texts into words. "llama" is
SentencePiece's BPE, where the merges follow from the scores of tokens. "gemma4" is a BPE with merges, whose tokens
spell spaces as SentencePiece does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from forerun.errors import UnsupportedModel
from forerun.models.gguf.config import text
from forerun.models.gguf.cuttings import CUTTINGS, Cutting
from forerun.models.gguf.header import Texts, Value

KEY = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # types of tokens; 1 is a normal one, 6 a byte
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)  # tokens that no merge makes
PADDING = re.compile(r"\[PAD\d+\]")  # tokens with which converters pad a matrix
SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
# Finding the merges of SentencePiece's tokens takes time and memory as the sum of their squared lengths. The sum is 333
# million for 1,000 tokens that are each one "a" longer, in a file of 1 MB. The larger of these two limits bounds it.
MOST_SQUARES, MOST_SQUARES_PER_TOKEN = 1 << 22, 256

# Texts that end an answer in published models, even where no key says so; llama.cpp stops at them.
_END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|endoftext|> <|eom_id|> <|end_of_text|> <end_of_turn> <EOT> </s> <|return|> "
    "<|call|> <|flush|> <|calls|> _<EOT> [EOT] [EOS] <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ "
    "<\uff5cend\u2581of\u2581sentence\uff5c>"
)
END_TEXTS = frozenset(_END_TEXTS.split())
# A text -> sets of texts. The text does not end an answer where a vocabulary has all texts of a set: harmony's <|end|>
# ends one message of several.
NO_END_BESIDE = {
    "<|end|>": ({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"}),
    "</s>": ({"<|tool_response>"},),
}
MODELS = {"gpt2": "byte-level BPE", "llama": "SentencePiece BPE", "gemma4": "BPE of words with SentencePiece's spaces"}
NO_CUTTING = (
    "%s has no tokenizer.ggml.pre, which says how texts are cut, so they are cut as by 'default', and most models were "
    "trained with other ids than that gives: fetch a newer file, or name the way with gguf-new-metadata "
    "--pre-tokenizer NAME of the package gguf, where NAME is llama-bpe for a Llama 3"
)


def write_tokenizer(metadata: Mapping[str, Value], num_rows: int, path: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into `folder`.

    metadata: the metadata of the GGUF file `path`. num_rows: the number of rows of the embedding. Raises
    UnsupportedModel for kinds of tokenizers that MODELS lacks, and for metadata that contradicts itself.
    """
    vocabulary = _Vocabulary.read(metadata, num_rows, path)
    try:
        backend = vocabulary.backend()
    except UnsupportedModel:
        raise
    except Exception as error:  # the library raises bare Exception for merges of unknown tokens and the like
        raise UnsupportedModel(f"{path} holds a tokenizer that makes no sense ({error}): fetch it again") from error
    backend.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", vocabulary.config())
    ids = {"bos_token_id": vocabulary.id_of("bos"), "eos_token_id": vocabulary.end_ids()}
    _write(folder / "generation_config.json", {key: value for key, value in ids.items() if value not in (None, [])})


def guesses_cutting(metadata: Mapping[str, Value]) -> bool:
    """Whether a file with a byte-level BPE lacks the key that says how texts are cut into words (see `NO_CUTTING`)."""
    return metadata.get(KEY + "model") == b"gpt2" and not metadata.get(KEY + "pre")


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer in a file's metadata. types: the type of each token."""

    metadata: Mapping[str, Value]
    path: Path
    model: str
    tokens: Seq[str]
    types: Seq[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Value], num_rows: int, path: Path) -> _Vocabulary:
        model = text(metadata, KEY + "model", path)
        if model not in MODELS:
            known = ", ".join(f"{name!r} ({what})" for name, what in MODELS.items())
            raise UnsupportedModel(
                f"{path} sets {KEY}model={model!r:.80}, and forerun reads {known}: use the original repository"
            )
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_texts(metadata, KEY + "tokens", path))]
        if not 0 < len(tokens) <= num_rows:
            raise UnsupportedModel(
                f"{path} has {len(tokens):,} tokens and an embedding of {num_rows:,} rows: fetch it again"
            )
        if len(set(tokens)) < len(tokens):
            twice = Counter(tokens).most_common(1)[0][0]
            raise UnsupportedModel(f"{path} has the token {twice!r:.80} twice, and texts need one id: fetch it again")
        types = _numbers(metadata, KEY + "token_type", len(tokens), path)
        return cls(metadata, path, model, tokens, [1] * len(tokens) if types is None else types.astype(int).tolist())

    # ------------------------------------------------------------------------------------------------ tokenizer.json

    def backend(self) -> Tokenizer:
        """Return the tokenizer as an object of the tokenizers library."""
        backend = self._byte_level() if self.model == "gpt2" else self._spaced()
        added = [
            AddedToken(self.tokens[i], special=kind != USER_DEFINED, normalized=False, rstrip=self._strips(i))
            for i, kind in enumerate(self.types)
            if kind in ADDED
        ]
        backend.add_tokens(added)
        self._add_ends(backend)
        return backend

    def _vocab(self) -> dict[str, int]:
        """Map each token to its id, without padding tokens."""
        entries = zip(self.tokens, self.types, strict=True)
        return {t: i for i, (t, kind) in enumerate(entries) if kind != UNUSED or not PADDING.fullmatch(t)}

    def _byte_level(self) -> Tokenizer:
        cutting = self._cutting()
        merges = self._pairs()
        backend = Tokenizer(models.BPE(vocab=self._vocab(), merges=merges, ignore_merges=cutting.whole_words))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cutting.patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        return backend

    def _pairs(self) -> list[tuple[str, str]]:
        return [self._pair(merge) for merge in _texts(self.metadata, KEY + "merges", self.path)]

    def _pair(self, merge: str) -> tuple[str, str]:
        first, _, second = merge.partition(" ") if merge[:1] != " " else ("", "", "")
        if not first or not second:
            raise UnsupportedModel(f"{self.path} has the merge {merge!r:.80}, which is no pair: fetch it again")
        return first, second

    def _cutting(self) -> Cutting:
        name = text(self.metadata, KEY + "pre", self.path, "default") or "default"
        if name not in CUTTINGS:
            raise UnsupportedModel(
                f"{self.path} sets {KEY}pre={name!r:.80}, a way to cut texts that forerun does not have: it must be "
                f"one of {list(CUTTINGS)}; use the original repository"
            )
        return CUTTINGS[name]

    def _spaced(self) -> Tokenizer:
        """Build a tokenizer that spells a space as SPACE, and a character without a token as its bytes."""
        vocab, unknown = self._vocab(), self.id_of("unknown")
        backend = Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=self._pairs() if self.model == "gemma4" else self._scored_pairs(vocab),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = self.model == "llama" and self._flag("add_space_prefix", True)
        backend.normalizer = normalizers.Sequence(
            [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
        )
        if self.model == "gemma4":
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace(SPACE, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                *([decoders.Strip(" ", 1, 0)] if prefix else []),
            ]
        )
        return backend

    def _scored_pairs(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        scores = _numbers(self.metadata, KEY + "scores", len(self.tokens), self.path)
        if scores is None or not np.isfinite(scores).all():
            raise UnsupportedModel(f"{self.path} has no finite {KEY}scores, which its tokenizer needs: fetch it again")
        if sum(len(token) ** 2 for token in vocab) > max(MOST_SQUARES, MOST_SQUARES_PER_TOKEN * len(vocab)):
            raise UnsupportedModel(
                f"{self.path} has too many long tokens, of up to {max(map(len, vocab)):,} characters, to find out "
                "which ones make them up: fetch it again"
            )
        return _merges(vocab, scores.tolist())

    def _strips(self, token_id: int) -> bool:
        """Whether the blanks that follow an added token belong to this token.

        In Phi-3's files, the blanks belong to every added token except <unk>, <s> and <|endoftext|>, although no key of
        the metadata says so.
        """
        is_phi3 = self.model == "llama" and self.metadata.get("general.architecture") == b"phi3"
        return is_phi3 and self.tokens[token_id] not in ("<unk>", "<s>", "<|endoftext|>")

    def _add_ends(self, backend: Tokenizer) -> None:
        """Make the tokenizer add BOS before each text, and EOS after each text, if the file or a default says so.

        Raises UnsupportedModel if the file has no id for a token that is to be added.
        """
        default = self.model != "gpt2" or self._cutting().add_bos
        # Published files of Gemma 4 ask for no BOS, which llama.cpp overrules.
        begins = self.model == "gemma4" or self._flag("add_bos_token", default)
        names = {"bos": begins, "eos": self._flag("add_eos_token", False)}
        ids = {}
        for name in (name for name, wanted in names.items() if wanted):
            token_id = self.id_of(name)
            if token_id is None:
                raise UnsupportedModel(f"{self.path} wants a {name} token in each text and names none: fetch it again")
            ids[name] = token_id
        if ids:
            # Names in place of tokens, which may hold a colon or a dollar sign that the library would interpret.
            single = [f"<{name}>" if name in ids else "" for name in ("bos", "eos")]
            backend.post_processor = processors.TemplateProcessing(
                single=" ".join(filter(None, [single[0], "$A", single[1]])),
                special_tokens=[(f"<{name}>", token_id) for name, token_id in ids.items()],
            )

    # ---------------------------------------------------------------------------------------------------- other files

    def config(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json."""
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        ids = {f"{short}_token": self.id_of(name) for name, short in names.items()}
        config: dict[str, Any] = {key: self.tokens[i] for key, i in ids.items() if i is not None}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        ends = [i for i in dict.fromkeys(ids.values()) if i is not None and self.types[i] in ADDED]
        # So that readers find these ids without the vocabulary.
        config["added_tokens_decoder"] = {str(i): {"content": self.tokens[i]} for i in ends}
        if templates := self._templates():
            alone = list(templates) == ["default"]
            listed = [{"name": name, "template": template} for name, template in templates.items()]
            config["chat_template"] = templates["default"] if alone else listed
        return config

    def end_ids(self) -> list[int]:
        """Return the token ids that end an output."""
        named = [self.id_of(name) for name in ("eos", "eot", "eom")]
        entries = enumerate(zip(self.tokens, self.types, strict=True))
        known = {token: i for i, (token, kind) in entries if token in END_TEXTS and kind in (CONTROL, USER_DEFINED)}
        for token, groups in NO_END_BESIDE.items():
            if any(group <= known.keys() for group in groups):
                known.pop(token, None)
        return sorted({i for i in named if i is not None} | set(known.values()))

    def id_of(self, name: str) -> int | None:
        """Return the id of the special token `name`, such as "bos"; None where the metadata gives no id for it.

        SentencePiece has default ids for bos, eos and unknown. Raises UnsupportedModel for an id outside of the tokens.
        """
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if self.model == "llama" else {}
        value = self.metadata.get(f"{KEY}{name}_token_id", defaults.get(name))
        if value is None or (isinstance(value, int) and value in (-1, 0xFFFFFFFF)):  # arrays compare item by item
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise UnsupportedModel(
                f"{self.path} sets {KEY}{name}_token_id={value!r:.80}, and its tokens end at {len(self.tokens) - 1}: "
                "fetch it again"
            )
        return value

    def _templates(self) -> dict[str, str]:
        """Return the chat templates by name."""
        key = "tokenizer.chat_template"
        templates = {"default": text(self.metadata, key, self.path)} if key in self.metadata else {}
        named = {k.removeprefix(key + "."): k for k in sorted(self.metadata) if k.startswith(key + ".")}
        return templates | {name: text(self.metadata, k, self.path) for name, k in named.items()}

    def _flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(KEY + name, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{self.path} sets {KEY}{name} to no true or false: fetch it again")
        return value


def _merges(vocab: Mapping[str, int], scores: Seq[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that join to a token, in SentencePiece's order of merging: the best score first.

    Of pairs with equal scores, SentencePiece merges the pair that comes first in the text. In published files all
    tokens of blanks have the same score, so SentencePiece extends a run of blanks from the run's beginning. Here pairs
    with equal scores are sorted by the length of the joined token, the longest first, which has the same effect.
    """
    pairs = [
        (-scores[i], -len(token), i, cut)
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    tokens = {i: token for token, i in vocab.items()}
    return [(tokens[i][:cut], tokens[i][cut:]) for _, _, i, cut in sorted(pairs)]


def _texts(metadata: Mapping[str, Value], key: str, path: Path) -> list[str]:
    value = metadata.get(key)
    try:
        if isinstance(value, Texts):
            return [item.decode() for item in value.read()]
    except UnicodeDecodeError:
        pass
    raise UnsupportedModel(f"{path} has no list of UTF-8 texts as {key}, which its tokenizer needs: fetch it again")


def _numbers(metadata: Mapping[str, Value], key: str, num: int, path: Path) -> np.ndarray[Any, Any] | None:
    """Return the metadata list `key`, with one number for each token; None where the key is missing."""
    value = metadata.get(key)
    if value is not None and (not isinstance(value, np.ndarray) or len(value) != num):
        raise UnsupportedModel(f"{path} has not one number for each of {num:,} tokens as {key}: fetch it again")
    return value


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
