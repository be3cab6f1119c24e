"""Tokens that are no text: `python examples/not_text.py [FOLDER]`.

A melody is a row of ids, here of the 12 notes of an octave. Two small models learn such rows and are written as
checkpoints without a tokenizer; the larger one is the target, the smaller one its draft model. Images work the same
way: docs/tutorials/not_text.md draws digits pixel by pixel. Training needs `pip install '.[train]'`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from forerun import LLM, SamplingParams
from forerun.errors import not_installed

try:
    from forerun.train import lm
except ImportError as error:
    sys.exit(str(not_installed("this example", "train", error.name)))
from forerun.train.config import TrainConfig
from forerun.train.shape import ModelShape

NUM_NOTES, LENGTH = 12, 16
NAMES = ["C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B"]
TARGET = ModelShape(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=64, vocab_size=NUM_NOTES)
DRAFT = ModelShape(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=32, vocab_size=NUM_NOTES)


def melodies(num: int) -> np.ndarray:
    """Return rows of notes, uint8 [num, LENGTH + 1]: each goes up or down by a third or a fifth, at random."""
    steps = np.random.default_rng(0).choice([3, 4, 7, -3, -4], size=(num, LENGTH + 1))
    return (steps.cumsum(axis=1) % NUM_NOTES).astype(np.uint8)


def train(folder: Path, name: str, shape: ModelShape) -> str:
    """Train a model on folder/notes.npy and return where its checkpoint is."""
    config = TrainConfig(
        shape=shape,
        out=folder / name,
        ids=folder / "notes.npy",
        steps=60,
        warmup_steps=5,
        tokens_per_step=16 * LENGTH,
        seq_len_tokens=LENGTH,
        lr=1e-2,
        autocast="off",
    )
    lm.train(config, quiet=True)
    return str(folder / name / "model")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "notes.npy", melodies(256))
    target = train(folder, "target", TARGET)
    draft = train(folder, "draft", DRAFT)

    params = [SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=seed) for seed in range(8)]
    starts = [[seed] for seed in range(8)]  # a prompt is a list of ids
    plain = LLM(target, draft="none").generate(starts, params)
    fast = LLM(target, draft=draft, spec_length=3).generate(starts, params)
    print(" ".join(NAMES[note] for note in [0, *fast[0].token_ids]))
    print("the same melodies:", [out.token_ids for out in fast] == [out.token_ids for out in plain])
    accepted = sum(out.report.num_accepted for out in fast)
    print(f"{accepted} of {sum(out.report.num_drafted for out in fast)} guessed notes were accepted")


if __name__ == "__main__":
    main()
