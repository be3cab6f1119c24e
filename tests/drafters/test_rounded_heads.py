"""Heads whose files have 8 or 4 bits: what a dense head becomes when it is rounded at load, and fewer bytes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import test_memory_heads as memory
from forerun import LLM, SamplingParams, blocks
from forerun.blocks import Plain
from forerun.drafters import Target
from forerun.drafters.shared import eagle_model, head_files
from forerun.drafters.shared.head_matrices import dense_of
from forerun.host_tensor import Floats
from methods import NEEDS, _random, _saved
from models.test_quantising import command
from ops.native_cases import needs_native
from parity import small_models

INT8 = "int8:group=16"
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def wide_eagle(target: Target, folder: Path) -> Mapping[str, Any]:
    """A head of random weights whose rows whole groups fill."""
    width, num_ids = target.model.config.hidden_size, target.num_ids
    config = eagle_model.EagleConfig(Plain("llama", num_ids, width, 1, 4, 2, 16, 96, 1e-5, 256, tied=True).spec, (0, 2))
    random = _random({**eagle_model.input_shapes(config), **eagle_model.layer_shapes(config)}, width)
    weights = {name: weight.to("bfloat16") for name, weight in random.items()}  # as `forerun train head` writes them
    return _saved(target, folder, "eagle", weights, config.to_json())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_models.write(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


def written(model: Path, method: str, root: Path, quantization: str = INT8) -> tuple[Path, Path]:
    """A head, and the same in fewer bits."""
    llm = LLM(str(model), draft="none", dtype="float32")
    target = Target.of(llm.checkpoint.model, llm.opened)
    path = Path((wide_eagle if method == "eagle" else NEEDS[method])(target, root)["path"])
    assert command("quantize", str(path), str(root / "rounded"), "--quantization", quantization) == 0
    return path, root / "rounded"


def weights_of(llm: LLM) -> dict[str, Floats]:
    """What a head of eagle has in memory."""
    drafter: Any = llm.engine.drafter.first
    return {weight.name: drafter.model.weight(weight.name) for weight in blocks.weights(drafter.model.config)}


@needs_native
def test_it_is_what_a_dense_head_is_rounded_to(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit, and so are all that it drafts; a plan counts as much. As float32 it is what the 8 bits stand for."""
    dense, rounded = written(model, "eagle", tmp_path)
    assert "int8:group=16" in capsys.readouterr().out
    sizes = [(folder / head_files.WEIGHTS).stat().st_size for folder in (dense, rounded)]
    assert sizes[1] < 0.7 * sizes[0]
    options: dict[str, Any] = {"spec_length": 3, "max_seq_len": 128, "max_batch_size": 1}
    llms = [LLM(str(model), draft=f"eagle:path={path},quantization={INT8}", **options) for path in (dense, rounded)]
    first, second = map(weights_of, llms)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    outs = [llm.generate("abc abc", GREEDY)[0] for llm in llms]
    assert outs[0].report.num_accepted == outs[1].report.num_accepted
    counted = [head_files.own_weights(str(path), llms[0].opened, all_rows=False) for path in (dense, rounded)]
    assert sorted(map(str, counted[0].matrices)) == sorted(map(str, counted[1].matrices))
    plain = LLM(str(model), draft=f"eagle:path={rounded},quantization=none", dtype="float32", **options)
    stood_for = head_files.stored(rounded)
    for name, weight in weights_of(plain).items():
        if name != blocks.HEAD:  # which is the target's
            assert np.array_equal(weight, dense_of(stood_for[name]).float32()), name


@needs_native
def test_nothing_asked_for_it_keeps_the_bits_of_its_file(model: Path, tmp_path: Path) -> None:
    """Its LM head, whose rows are the target's, has 8 bits all the same; a plan counts both."""
    dense, rounded = written(model, "eagle", tmp_path, "int4:group=32")
    specs = [f"eagle:path={rounded}", f"eagle:path={dense},quantization=int4:group=32", f"eagle:path={dense}"]
    kept, wanted, wider = (LLM(str(model), draft=spec, max_seq_len=128, max_batch_size=1) for spec in specs)
    weights, same = weights_of(kept), weights_of(wanted)
    assert all(np.array_equal(weights[name], same[name]) for name in weights)
    drafters: list[Any] = [llm.engine.drafter.first for llm in (kept, wanted, wider)]
    sizes = [drafter.model.bytes_per_pass for drafter in drafters]
    assert sizes[0] == sizes[1] < sizes[2]
    planned = [memory.planned(llm.config)["draft weights"] for llm in (kept, wanted, wider)]
    assert planned[0] == planned[1] < planned[2]


@needs_native
@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_heads_of_other_methods(model: Path, tmp_path: Path, method: str) -> None:
    """They compute with what the 8 bits stand for, and the text is plain decoding's."""
    _, rounded = written(model, method, tmp_path)
    llm = LLM(str(model), draft=f"{method}:path={rounded}", extra_drafts="none", max_seq_len=128)
    plain = LLM(str(model), draft="none", max_seq_len=128)
    assert llm.generate("abc abc", GREEDY)[0].token_ids == plain.generate("abc abc", GREEDY)[0].token_ids


def test_what_cannot_be_rounded_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, rounded = written(model, "eagle", tmp_path)
    for arguments, said in (
        ([str(dense), str(rounded)], "exists and is not empty: name a new one"),
        ([str(rounded), str(tmp_path / "twice")], "is quantised already ("),
        ([str(dense), str(tmp_path / "new"), "--quantization", "int8:group=128"], "groups of 128 do not divide the"),
    ):
        capsys.readouterr()
        assert command("quantize", *arguments) == 2
        assert said in capsys.readouterr().err
    config = json.loads((rounded / head_files.CONFIG).read_text(encoding="utf-8"))
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["forerun"]["method"] == "eagle"
