"""Trains a byte-level BPE tokenizer for code with `tokenizers`, and saves it as the standard tokenizer.json.

The pre-tokenizer is made for code. A line break and the indentation after it are one piece, so that common indents
become single tokens. A word includes one leading character (" self", ".append", "_name"), as in the tokenizers of
current code models. Numbers are split into groups of at most three digits. All 256 bytes are in the alphabet, so decode
returns every encoded text unchanged.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence as Seq
from pathlib import Path
from types import MappingProxyType

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from forerun.errors import NotFound, raising_os_errors
from forerun.models.saving import TOKENIZER_FILES
from forerun.text.files import unreadable

END_OF_TEXT = "<|endoftext|>"
SPECIAL = MappingProxyType({"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT})
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+[ \t]*|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, special: Seq[str] = (END_OF_TEXT,)) -> Tokenizer:
    """Train a tokenizer with `vocab_size` entries on texts. The same texts give the same tokenizer.

    The entries are the special tokens `special` (from id 0 on), the 256 bytes, and merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, max_seq_len: int, special: Mapping[str, str | None] = SPECIAL
) -> None:
    """Write tokenizer.json and tokenizer_config.json to `folder`, in the form that transformers and others read.

    special: the tokens at the beginning and the end of a text, by their names in transformers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with raising_os_errors(folder / "tokenizer.json"):
        tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_seq_len,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files (TOKENIZER_FILES, such as tokenizer.json) of a checkpoint from `source` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer. path: a tokenizer.json, or a folder with a tokenizer.json.

    Raises NotFound for other paths, and UnsupportedModel for a file of another kind.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise NotFound(f"no tokenizer.json at {path}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise unreadable(file, error, "a file of the tokenizers library") from error


def tokenizer_hash(path: Path) -> str:
    """Return the SHA-256 of the tokenizer.json in the folder `path`, in hexadecimal."""
    return hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()
