"""Writers of small samples, for tests of sampling and of what learns from samples."""

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from forerun import LLM
from forerun.train.samples import SampleWriter
from forerun.train.writing import Lengths, Shares, Writer
from tiny import write_tiny

TEXTS = [
    "".join(f"{i * i} rivers rose in {i} nights.\n" for i in range(400)),
    "def area(w, h):\n    return w * h\n" * 8,
]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<A>{% endif %}"
CONTINUATIONS = Shares(0, 0, 1)
NUM_ENDS = 24  # of 257 ids, so that questions end


def writer_of(
    target: Path | str | None, texts: Seq[str] = TEXTS, seed: int = 0, shares: Shares = CONTINUATIONS, **options: Any
) -> Writer:
    """A writer of short texts; of continuations alone, for few models here have a chat template."""
    llm = LLM(target, draft="none", max_batch_size=4, max_seq_len=256, calibrate=False, **options)
    return Writer(llm, texts, seed=seed, shares=shares, lengths=Lengths((4, 8), 12, 24))


def chatting(folder: Path, template: str = TEMPLATE, **options: Any) -> Path:
    """A random checkpoint with a chat template."""
    write_tiny(folder, **options)
    config = folder / "tokenizer_config.json"
    known = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    config.write_text(json.dumps({**known, "chat_template": template}), encoding="utf-8")
    ends = json.dumps({"eos_token_id": list(range(NUM_ENDS))})
    (folder / "generation_config.json").write_text(ends, encoding="utf-8")
    return folder


def write(writer: Writer, path: Path, num_tokens: int, batch_size: int = 4) -> bytes:
    """Sample into a file, or go on with it; returns what the file holds then."""
    file = SampleWriter(path, writer.options())
    try:
        writer.write(file, num_tokens, batch_size)
    finally:
        file.close()
    return path.read_bytes()
