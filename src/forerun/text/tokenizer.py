"""Loads the tokenizer of a checkpoint folder (`tokenizers` library), and checks that draft and target fit together."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence as Seq
from functools import cached_property, lru_cache
from itertools import groupby, takewhile
from operator import itemgetter
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from forerun.errors import BadOption, NotFound, VocabularyMismatch, shown
from forerun.text.files import unreadable

REPLACEMENT = "\ufffd"  # the text of bytes that are no character (yet)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPELLINGS = ("ByteLevel", "ByteFallback", "▁", "WordPiece", "BPEDecoder", "CTC")  # in the decoder of tokenizer.json


class Tokenizer:
    """Converts text to token ids and back, as tokenizer.json says, but without truncation and padding.

    Args:
        backend: the loaded tokenizer, whose truncation and padding are turned off.
        folder: the folder that the tokenizer came from, for messages.
    """

    def __init__(self, backend: tokenizers.Tokenizer, folder: Path) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.folder = folder
        self._own_text: dict[int, str] = {}

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read `folder`/tokenizer.json. Raises NotFound if the file is missing, UnsupportedModel if it is broken."""
        file = Path(folder) / "tokenizer.json"
        if not cls.is_in(folder):
            raise NotFound(f"there is no tokenizer.json in {folder}: name a checkpoint folder that holds one")
        try:
            stat = file.stat()
        except OSError as error:
            raise unreadable(file, error, "a file of the tokenizers library") from error
        return _loaded(file, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))

    @classmethod
    def find(cls, folder: str | Path) -> Tokenizer | None:
        """Load a folder's tokenizer. Returns None if there is no tokenizer.json.

        The file is missing, for example, if the model's ids stand for no text.
        """
        return cls.load(folder) if cls.is_in(folder) else None

    @staticmethod
    def is_in(folder: str | Path) -> bool:
        """Return whether a folder has a tokenizer.json, without reading it."""
        return os.path.lexists(Path(folder) / "tokenizer.json")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the special tokens (such as beginning of sequence) that tokenizer.json adds.

        Raises BadOption for a text that UTF-8 cannot hold, such as half a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadOption(f"the text {shown(text)} is not valid UTF-8 at character {error.start}: mend it") from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_names(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text in which the names of special tokens are plain text.

        No other thread may use the tokenizer meanwhile.
        """
        self._backend.encode_special_tokens = True
        try:
            return self.encode(text, add_special_tokens)
        finally:
            self._backend.encode_special_tokens = False

    def inner(self, ids: Seq[int]) -> range:
        """Return the range of indices in `ids` without the special ids that `encode` adds at both ends, if present."""
        before, behind = self._around
        start = len(before) if list(ids[: len(before)]) == before else 0
        end = len(ids) - (len(behind) if list(ids[len(ids) - len(behind) :]) == behind else 0)
        return range(start, max(start, end))

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special ids that `encode` puts before a text, and the special ids that it puts after a text."""
        encoding = self._backend.encode("a")
        num_before = len(list(takewhile(bool, encoding.special_tokens_mask)))
        num_behind = len(list(takewhile(bool, encoding.special_tokens_mask[:num_before:-1])))
        return encoding.ids[:num_before], encoding.ids[len(encoding.ids) - num_behind :]

    def decode(self, ids: Seq[int], skip_special_tokens: bool = False) -> str:
        """Decode ids together. Bytes that are no character become U+FFFD, and ids without a token make no text."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @cached_property
    def id_to_token(self) -> dict[int, str]:
        """A map from ids to tokens, added tokens included, in ascending order of the ids."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return {token_id: token for token, token_id in sorted(vocabulary.items(), key=itemgetter(1))}

    def token_of(self, token_id: int) -> str | None:
        """Return the token of an id, without listing all tokens; None where the id has no token."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.num_ids else None

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None where there is no such token. Added tokens take precedence."""
        return self._backend.token_to_id(token)

    @cached_property
    def num_ids(self) -> int:
        """The highest id + 1. A model's matrices may have more rows (padding)."""
        return int(self._ids.max(initial=-1)) + 1

    @cached_property
    def _ids(self) -> NDArray[np.int64]:
        """Every id that has a token, in no particular order."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return np.fromiter(vocabulary.values(), np.int64, len(vocabulary))

    @cached_property
    def fingerprint(self) -> str:
        """The hexadecimal hash of the map from ids to tokens. Files that contain ids contain this hash, too."""
        lines = "".join(f"{token_id} {token!r}\n" for token_id, token in self.id_to_token.items())
        return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def holes(self) -> frozenset[int]:
        """The ids below num_ids that have no token. Such ids must have probability 0."""
        has_token = np.zeros(self.num_ids, np.bool_)
        has_token[self._ids] = True
        return frozenset(np.flatnonzero(~has_token).tolist())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of control tokens, which make no text."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids of byte tokens such as <0x0A>, which make characters together; empty without byte fallback."""
        if "ByteFallback" not in _decoder_types(self._backend):
            return frozenset()
        return frozenset(i for i, token in self.id_to_token.items() if _BYTE_TOKEN.fullmatch(token))

    @cached_property
    def token_bytes(self) -> list[bytes] | None:
        """The bytes that each id below num_ids stands for inside a text; b"" = no bytes.

        None if the bytes are unknown. The bytes are known for byte-level tokens, and for tokens in which ▁ stands for a
        blank. Other decoders may turn a token into a text that depends on the tokens beside it.
        """
        spelling = self.spelling
        added = self._backend.get_added_tokens_decoder()
        if "ByteLevel" not in spelling and "▁" not in spelling:
            return None
        by_id = [b""] * self.num_ids
        for token_id, name in self.id_to_token.items():
            if token_id in added or ("ByteLevel" in spelling and not all(c in BYTES for c in name)):
                by_id[token_id] = name.encode("utf-8", "surrogatepass")
            elif "ByteLevel" in spelling:
                by_id[token_id] = bytes(BYTES[c] for c in name)
            elif token_id in self.byte_ids:
                by_id[token_id] = bytes([int(name[1:-1], 16)])
            else:
                by_id[token_id] = name.replace("▁", " ").encode("utf-8", "surrogatepass")
        return by_id

    @cached_property
    def spelling(self) -> frozenset[str]:
        """The parts of the decoder, such as ByteLevel, that define how token strings stand for text.

        In tokenizers with the same spelling, equal strings are equal texts.
        """
        decoder = _decoder_types(self._backend)
        return frozenset(name for name in _SPELLINGS if name in decoder)

    def decode_so_far(self, ids: Seq[int]) -> tuple[str, int]:
        """Return the text of the ids so far, and the number of its leading characters that no later id can change.

        The text is the same as from `decode`, with one exception. If a run of byte tokens is not UTF-8, the library
        turns each byte of the run into U+FFFD. This method keeps the whole characters at the beginning of the run,
        because they may already have been shown, or may have completed a stop string.
        """
        breaks, num_open = self._broken_runs(ids) if self.byte_ids else ([], 0)
        if not breaks:
            text = self.decode(ids)
        else:
            tokens: list[str] = []
            for start, end in zip([0, *breaks], [*breaks, len(ids)], strict=True):
                # A token without text ends a run for the library's decoder.
                tokens += ["", *(str(self._backend.id_to_token(i)) for i in ids[start:end])]
            text = str(self._backend.decoder.decode(tokens[1:]))
        if ids and ids[-1] in self.byte_ids:
            return text, len(text) - num_open
        # An unfinished character is exactly one U+FFFD (Unicode's "maximal subpart" practice).
        return text, len(text) - text.endswith(REPLACEMENT)

    def _broken_runs(self, ids: Seq[int]) -> tuple[list[int], int]:
        """Return the breaks in runs of byte tokens that are not UTF-8, and the number of open bytes.

        A break is the index in `ids` of the first token in a run whose byte belongs to no whole character. A break at
        the beginning of a run is left out. Open bytes are the bytes of an unfinished character at the end of the ids.
        """
        breaks, num_open, start = [], 0, 0
        for is_run, group in groupby(ids, self.byte_ids.__contains__):
            run = list(group)
            num_open = 0
            if is_run:
                try:
                    bytes(int(self.id_to_token[i][1:-1], 16) for i in run).decode()
                except UnicodeDecodeError as error:
                    breaks += [start + error.start] if error.start else []
                    num_open = len(run) - error.start if error.reason == "unexpected end of data" else 0
            start += len(run)
        return breaks, num_open

    def own_text(self, token_id: int) -> str:
        """Return the text of one id decoded alone. The text is cached."""
        if token_id not in self._own_text:
            self._own_text[token_id] = self.decode([token_id])
        return self._own_text[token_id]

    def is_solid(self, token_id: int) -> bool:
        """Return whether the id's text alone is made of whole characters, so that decoding may start anew at the id."""
        text = self.own_text(token_id)
        return bool(text) and REPLACEMENT not in text and token_id not in self.byte_ids


@lru_cache(maxsize=2)  # a target's and its draft's: each is asked for more than once while they are opened
def _loaded(file: Path, version: tuple[int, ...]) -> Tokenizer:
    """Load the tokenizer of a file. version: numbers that differ if the file has changed since an earlier call."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise unreadable(file, error, "a file of the tokenizers library") from error
    return Tokenizer(backend, file.parent)


def needed(tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    """Return `tokenizer` itself. Raises NotFound if the model `name` has no tokenizer."""
    if tokenizer is None:
        raise without_text(name)
    return tokenizer


def without_text(name: str) -> NotFound:
    """Return the error for a text that is given to a model without a tokenizer."""
    return NotFound(
        f"{name} has no tokenizer.json, so it takes and gives token ids, not text: give lists of ids as prompts, or "
        "copy tokenizer.json from the model that it was made of"
    )


def compare(target: Tokenizer, draft: Tokenizer, draft_name: str) -> None:
    """Check that each id that both tokenizers know has the same token in both, added tokens included.

    Equal sizes prove nothing. An id that only one tokenizer knows, such as a token added for chats, is permitted: the
    id gets probability 0 in the draft. Raises VocabularyMismatch, which names the first id that differs and both
    tokens.
    """
    a, b = target.id_to_token, draft.id_to_token
    first = next((i for i in a if i in b and a[i] != b[i]), None)
    if first is None and a.keys() & b.keys():
        return
    first = 0 if first is None else first
    raise VocabularyMismatch(
        f"the draft model's tokenizer differs from the target's at id {first}: the target has {_name(a, first)}, "
        f"the draft {draft_name} has {_name(b, first)}; "
        f"take a draft model of the same family, --draft translated:path={draft_name}, which takes any vocabulary, "
        "or --draft lookup, which needs no model"
    )


def _name(tokens: dict[int, str], token_id: int) -> str:
    return repr(tokens[token_id]) if token_id in tokens else "no token"


def _decoder_types(backend: tokenizers.Tokenizer) -> str:
    """Return the decoder's representation as text, which names the types of its parts; '' if there is no decoder."""
    return repr(backend.decoder) if backend.decoder is not None else ""


def _byte_names() -> dict[str, int]:
    """Map characters in byte-level tokens to bytes (Radford et al. 2019). Printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_names()


def token_text(tokenizer: Tokenizer | None, token: int, left: int | None) -> str:
    """Return the text that a token adds after the token `left`, for display. left: None = no token before it.

    Without a tokenizer, the text is the id. Control characters are escaped, and bytes of an unfinished character are
    written as <E2>.
    """
    if tokenizer is None:
        return f" {token}"
    before = "" if left is None else tokenizer.decode([left])
    text = tokenizer.decode([token] if left is None else [left, token])
    piece = text[len(before) :] if text.startswith(before) else tokenizer.decode([token])
    if REPLACEMENT in piece or not piece:
        name = tokenizer.id_to_token.get(token)
        if name is None:
            return f"<{token}>"
        piece = "".join(f"<{BYTES[c]:02X}>" for c in name) if all(c in BYTES for c in name) else name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece)
