"""A language model of token ids that stand for no text: rows of one length in, a checkpoint without a tokenizer out."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from forerun import LLM, SamplingParams
from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.train import batches, lm
from forerun.train.config import TrainConfig
from forerun.train.model import read_shape
from forerun.train.samples import HELD_OUT_EVERY
from forerun.train.shape import ModelShape
from train.conftest import run_command

NUM_IDS, LENGTH = 12, 8
SHAPE = ModelShape(32, 2, 4, 2, 64, NUM_IDS)


def counting_rows(num: int) -> NDArray[np.uint8]:
    """Rows that count on from their first id, modulo the number of ids."""
    return ((np.arange(num)[:, None] + np.arange(LENGTH + 1)) % NUM_IDS).astype(np.uint8)


def config_for(out: Path, **overrides: Any) -> TrainConfig:
    options: dict[str, Any] = {"shape": SHAPE, "out": out, "ids": out.parent / "rows.npy", "steps": 40,
                               "tokens_per_step": 16 * LENGTH, "seq_len_tokens": LENGTH, "lr": 1e-2, "warmup_steps": 5,
                               "autocast": "off"}  # fmt: skip
    return TrainConfig(**{**options, **overrides})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("ids")
    np.save(folder / "rows.npy", counting_rows(64))
    config = config_for(folder / "target")
    assert lm.train(config, quiet=True)["validation_loss"] < 0.1
    return config


def test_the_checkpoint_runs_without_a_tokenizer(trained: TrainConfig) -> None:
    model = trained.out / "model"
    assert not (model / "tokenizer.json").exists()
    assert json.loads((model / "config.json").read_text())["eos_token_id"] is None
    (output,) = LLM(model, draft="none").generate([3], SamplingParams(max_tokens=LENGTH, temperature=0))
    assert output.token_ids == [(4 + i) % NUM_IDS for i in range(LENGTH)]
    assert output.finish_reason == "length"
    facts = json.loads((trained.out / "run.json").read_text())
    assert len(facts["ids_sha256"]) == 64
    assert facts["num_text_tokens"] == 60 * (LENGTH + 1)
    assert "tokenizer_sha256" not in facts


def test_a_draft_learns_from_its_target(trained: TrainConfig, tmp_path: Path) -> None:
    options = {"shape": ModelShape(16, 1, 2, 1, 32, NUM_IDS), "teacher": trained.out / "model", "loss": "kl"}
    options["steps"] = 80
    assert lm.train(config_for(tmp_path / "draft", ids=trained.ids, **options), quiet=True)["alpha"] > 0.9


def test_each_epoch_has_every_row_once_and_none_that_is_held_out() -> None:
    rows = counting_rows(40).astype(np.int64)
    rows[:, 0] = np.arange(40)
    seen, held_out = batches.split_rows(rows)
    assert held_out[:, 0].tolist() == list(range(0, 40, HELD_OUT_EVERY))
    stream, num = batches.WholeRows(seen, seed=3), len(seen)
    epochs = [stream.rows(epoch * num, num)[:, 0].tolist() for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [seen[:, 0].tolist()] * 2
    assert epochs[0] != epochs[1]
    assert stream.rows(num - 3, 6)[:, 0].tolist() == epochs[0][-3:] + epochs[1][:3]


@pytest.mark.parametrize(
    ("rows", "error", "sentence"),
    [
        (None, NotFound, r"there is no file .*rows\.npy'?: name one that numpy\.save wrote"),
        (b"no array", UnsupportedModel, r"rows\.npy is not an array that numpy\.save wrote"),
        (np.zeros(9, np.int64), BadOption, "must hold one array of integers with two dimensions"),
        (np.zeros((4, LENGTH + 1)), BadOption, "must hold one array of integers with two dimensions"),
        (np.zeros((4, 6), np.int64), BadOption, "4 sequences of 6 ids, .* --seq-len-tokens 5"),
        (np.full((4, LENGTH + 1), 12), BadOption, "holds ids 12 .. 12: give --vocab-size, such as 13"),
        (np.full((4, LENGTH + 1), -1), BadOption, r"holds ids -1 \.\. -1: no id is negative"),
    ],
    ids=["no file", "no array", "one dimension", "no integers", "other length", "too large", "negative"],
)
def test_rows_that_cannot_be_learned(tmp_path: Path, rows: Any, error: type[Exception], sentence: str) -> None:
    if isinstance(rows, bytes):
        (tmp_path / "rows.npy").write_bytes(rows)
    elif rows is not None:
        np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(error, match=sentence):
        lm.prepare(config_for(tmp_path / "out"))


def test_options_of_texts_are_refused_beside_ids(tmp_path: Path) -> None:
    for name in ("text", "tokenizer", "samples"):
        with pytest.raises(BadOption, match=f"--ids are all that is learned from, and --{name} is for text: drop one"):
            config_for(tmp_path / "out", **{name: tmp_path})


def test_the_command(tmp_path: Path) -> None:
    """A draft has the ids of its teacher, where nothing is said of them."""
    np.save(tmp_path / "rows.npy", counting_rows(32))
    sizes = "--hidden-size 16 --layers 1 --heads 2 --kv-heads 1 --ffn-size 32 --seq-len-tokens 8 --tokens-per-step 64"
    command = f"lm --ids {tmp_path}/rows.npy {sizes} --max-steps 3 --quiet --out {tmp_path}"
    for more in ("/run --vocab-size 12", f"/draft --teacher {tmp_path}/run/model --loss kl"):
        assert run_command(f"{command}{more}").startswith("validation_loss=")
    for name in ("run", "draft"):
        assert read_shape(tmp_path / name / "model").vocab_size == 12


def test_the_tutorial_of_images_runs(tmp_path: Path, curves: None) -> None:
    """docs/tutorials/not_text.py at a hundredth of its size: what it says of exactness holds for any two models."""
    pytest.importorskip("sklearn", reason="the images come with scikit-learn: pip install scikit-learn")
    script = Path(__file__).parents[2] / "docs" / "tutorials" / "not_text.py"
    spec = importlib.util.spec_from_file_location("not_text", script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["not_text"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = "--target-steps 10 --draft-steps 2 --own 32 --images 10 --beginnings 500 --lines 1 --spec-length 3"
    numbers = module.main(["--out", str(tmp_path), *sizes.split()])
    assert numbers["check"]["num_equal"] == numbers["check"]["num_images"] == 10
    assert numbers["check"]["p_value"] > 1e-4
    assert numbers["speculation"][3]["tokens_per_pass"] > 1
    assert (tmp_path / "digits.png").stat().st_size > 5_000
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 10
