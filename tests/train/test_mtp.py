"""`forerun train head --method mtp`: a block that is found in a copy of its target's folder, without being named."""

import json
import random
import shutil
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM, BadOption, SamplingParams, native
from forerun.blocks import resized, weight_shapes
from forerun.config import EngineConfig
from forerun.drafters import mtp
from forerun.engine.opened import Opened
from forerun.models import next_tokens
from forerun.models.loading import load_checkpoint
from forerun.models.opened import OpenedCheckpoint
from forerun.train import head as training, lm, loop
from forerun.train.config import HeadConfig
from forerun.train.shape import ModelShape
from models.gguf_files import write_model
from tiny import tiny_config as mini, write_tiny
from train.conftest import tiny_config
from train.written import write, writer_of

SHAPE = ModelShape(32, 4, 4, 2, 64, 300, family="qwen3_5_text")
GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1, top_p=0.9, seed=4, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0, regex="def [a-z]{2,8}_[0-9]\\(value\\):\n    total = value"),
]
BLOCK = {"fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"}  # modules beside the layer, as published


def made(target: Path, out: Path, num_tokens: int = 3000, **options: Any) -> HeadConfig:
    """Let a target write samples, and train a block of them."""
    ops = options.pop("ops", "reference")
    write(writer_of(target, ops=ops), out / "samples", num_tokens)
    sizes: dict[str, Any] = {"steps": 60, "tokens_per_step": 256, "seq_len_tokens": 64, "lr": 5e-3, "warmup_steps": 2}
    own: dict[str, Any] = {"method": "mtp:steps=3", "autocast": "off", "fit_tokens": num_tokens, **sizes, **options}
    config = HeadConfig(out=out, samples=out / "samples", **own)
    training.train(config, Opened.of(EngineConfig(target=str(target), ops=ops)).load(), quiet=True)
    return config


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, sources: Path) -> Path:
    """The folder of a run with a small hybrid that has learned something, and a block of it."""
    folder = tmp_path_factory.mktemp("hybrid")
    lm.train(tiny_config(folder / "target", sources, shape=SHAPE, steps=60), quiet=True)
    made(folder / "target" / "model", folder / "mtp")
    return folder


def texts(target: Path, draft: str, prompts: Seq[list[int]], **options: Any) -> tuple[list[Any], float]:
    """What is written, by every kind of request, and the tokens of a pass."""
    with LLM(str(target), **{"dtype": "float32", "max_seq_len": 128, "draft": draft, **options}) as llm:
        outs = [out for params in PARAMS for out in llm.generate(list(prompts), params)]
        llm.engine.runner.cache.check_integrity()
    return [(out.token_ids, out.finish_reason) for out in outs], sum(out.report.num_accepted for out in outs)


def some_prompts() -> list[list[int]]:
    chance = random.Random(2)
    return [[chance.randrange(4, 300) for _ in range(num)] for num in (3, 17, 40)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_draft_changes_what_a_trained_hybrid_writes(hybrid: Path, dtype: str) -> None:
    """Chains, trees, its block, a search, and what a grammar leaves no choice of; together in one batch, too."""
    if native.isa() == "reference":
        pytest.skip(f"no native operators: {native.why_not()}")
    target = hybrid / "mtp" / "model"
    options = {"dtype": dtype, "pacing": "fixed", "spec_length": 4}
    plain, _ = texts(target, "none", some_prompts(), dtype=dtype)
    drafts = ["mtp", "mtp:search=none", "suffix", "recycle", "forced", f"model:path={hybrid / 'target' / 'model'}"]
    for draft in drafts:
        drafted, num_accepted = texts(target, draft, some_prompts(), **options)
        assert drafted == plain, draft
        assert num_accepted > 0, draft


@pytest.mark.parametrize("ops", ["reference", *(["native"] if native.isa() != "reference" else [])])
def test_auto_is_the_block(hybrid: Path, ops: str) -> None:
    """It is in the copy alone; the target takes it where it is named, and drafts the same with it."""
    target, block = hybrid / "target" / "model", hybrid / "mtp" / "head"
    options: dict[str, Any] = {"ops": ops, "dtype": "float32", "pacing": "fixed", "spec_length": 3, "max_seq_len": 128}
    found = []
    for folder, draft in ((hybrid / "mtp" / "model", "auto"), (target, f"mtp:path={block}")):
        with LLM(str(folder), draft=draft, **options) as llm:
            assert isinstance(llm.engine.drafter.first, mtp.MtpDrafter)
            outs = llm.generate(some_prompts(), GREEDY)
            found.append([(out.token_ids, out.report.num_accepted, out.report.num_drafted) for out in outs])
    with LLM(load_checkpoint(hybrid / "mtp" / "model", with_tokenizer=True), max_seq_len=128) as llm:
        assert isinstance(llm.engine.drafter.first, mtp.MtpDrafter), "of a model that somebody has loaded, too"
    assert found[0] == found[1]
    assert sum(num for _, num, _ in found[0]) > 20
    with LLM(str(target), **options) as llm:
        assert not isinstance(llm.engine.drafter.first, mtp.MtpDrafter)


def test_the_copy_is_the_target_and_a_block_as_published(hybrid: Path) -> None:
    """For transformers it is the target; the names and the key of config.json are those of Qwen 3.5's own files."""
    transformers = pytest.importorskip("transformers")
    paths = [hybrid / "target" / "model", hybrid / "mtp" / "model"]
    both = [transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval() for path in paths]
    tokens = torch.tensor([some_prompts()[2]])
    with torch.no_grad():
        first, second = (model(tokens).logits for model in both)
    assert torch.equal(first, second)
    configs = [json.loads((path / "config.json").read_text(encoding="utf-8")) for path in paths]
    assert configs[1] == {**configs[0], "mtp_num_hidden_layers": 1}
    index = json.loads((paths[1] / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = {name: load_file(paths[1] / name) for name in set(index["weight_map"].values())}
    assert {name: file for file, own in files.items() for name in own} == index["weight_map"]
    original = load_file(paths[0] / "model.safetensors")
    [block] = [own for own in files.values() if not own.keys() & original.keys()]
    attending = {name for name in original if name.startswith("model.layers.3.")}
    layer = {name.replace("model.layers.3.", "mtp.layers.0.") for name in attending}
    assert block.keys() == layer | {f"mtp.{module}.weight" for module in BLOCK}
    for name in attending:
        assert block[name.replace("model.layers.3.", "mtp.layers.0.")].shape == original[name].shape


def test_a_target_that_has_a_block_gets_another(hybrid: Path, tmp_path: Path) -> None:
    """Its copy has the new one alone. A run that would write its copy over the target is refused before it begins."""
    target = hybrid / "mtp" / "model"
    made(target, tmp_path / "again", steps=2)
    files = [load_file(path) for path in sorted((tmp_path / "again" / "model").glob("*.safetensors"))]
    blocks = [{name for name in own if name.startswith("mtp.")} for own in files]
    assert [bool(block) for block in blocks] == [False, True]
    assert next_tokens.find(OpenedCheckpoint.of(tmp_path / "again" / "model")) is not None
    index = json.loads((tmp_path / "again" / "model" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for own in files for tensor in own.values())
    joined = shutil.copytree(target, tmp_path / "joined")
    whole = {name: tensor for path in joined.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for path in [*joined.glob("*.safetensors"), joined / "model.safetensors.index.json"]:
        path.unlink()
    save_file(whole, joined / "model.safetensors", {"format": "pt"})
    written = list[int]()
    for _ in range(2):
        next_tokens.save_with_block(tmp_path / "twice", OpenedCheckpoint.of(joined), {})
        written.append((tmp_path / "twice" / "model-00001-of-00002.safetensors").stat().st_ctime_ns)
    assert load_file(tmp_path / "twice" / "model-00001-of-00002.safetensors").keys() == whole.keys() - blocks[1]
    assert written[0] == written[1]
    own = shutil.copytree(target, tmp_path / "own" / "model")
    with pytest.raises(BadOption, match=r"would write over the target, in .*model: choose another"):
        made(own, own.parent, steps=2)
    files = {path.name: path.read_bytes() for path in own.iterdir()}
    made(own, own.parent, method="medusa", steps=2)  # which writes no model
    assert files == {path.name: path.read_bytes() for path in own.iterdir()}


def test_a_block_is_read_as_it_was_written(hybrid: Path) -> None:
    """Also by a run that goes on from it, to the rounding of its file."""
    config = HeadConfig(out=hybrid / "mtp", samples=hybrid / "mtp" / "samples", method="mtp:steps=3", steps=60)
    checkpoint = Opened.of(EngineConfig(target=str(hybrid / "target" / "model"), ops="reference")).load()
    task = training.prepare(config, checkpoint)
    loop.load_state(loop.Run(config, task, loop.make_optimizer(config, task.weights)))
    assert next_tokens.find(OpenedCheckpoint.of(hybrid / "mtp" / "head")) is not None
    head: Any = task.head
    found = head.read(str(hybrid / "mtp" / "head"))
    assert found.keys() == head.weights.keys()
    for name, weight in head.weights.items():
        assert torch.allclose(found[name], weight, rtol=0.01, atol=0.01), name
    assert any("norm" in name and abs(float(w.mean()) - 1) > 1e-4 for name, w in found.items())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_5", "lfm2", "phi3", "glm4", "olmo2"])
def test_a_block_is_made_for_other_families(family: str, tmp_path: Path) -> None:
    """Also where files have other names, or join matrices, and inside of a checkpoint that sees images, too."""
    target = write_tiny(tmp_path / "target", "qwen3_5_text" if family == "qwen3_5" else family, num_layers=4)
    if family == "qwen3_5":
        nest(target)
    made(target, tmp_path / "mtp", 600, steps=2)
    options: dict[str, Any] = {"dtype": "float32", "max_seq_len": 128, "pacing": "fixed"}
    with LLM(str(target), draft="none", **options) as llm:
        plain = [out.token_ids for out in llm.generate([[5, 6, 7]], GREEDY)]
    for folder, draft in ((tmp_path / "mtp" / "model", "auto"), (target, f"mtp:path={tmp_path / 'mtp' / 'head'}")):
        with LLM(str(folder), draft=draft, **options) as llm:
            assert isinstance(llm.engine.drafter.first, mtp.MtpDrafter)
            (out,) = llm.generate([[5, 6, 7]], GREEDY)
            assert [out.token_ids] == plain
            assert out.report.num_drafted > 0


def nest(folder: Path) -> None:
    """Make a checkpoint of a text model one of a model that sees images, as published, without its eyes."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    whole = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": config["tie_word_embeddings"]}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})


def test_nothing_is_added_to_a_gguf_file(tmp_path: Path) -> None:
    spec = resized(mini("qwen2"), vocab_size=260)
    file = tmp_path / "target.gguf"
    generator = torch.Generator().manual_seed(0)
    shapes = weight_shapes(spec).items()
    write_model(file, spec, {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes})
    said = list[str]()
    out = tmp_path / "mtp"
    write(writer_of(file, ops="reference"), tmp_path / "samples", 600)
    config = HeadConfig(out=out, samples=tmp_path / "samples", method="mtp", steps=1, tokens_per_step=64,
                        seq_len_tokens=64)  # fmt: skip
    checkpoint = Opened.of(EngineConfig(target=str(file), ops="reference")).load()
    training.train(config, checkpoint, quiet=True, warn=said.append)
    assert said == ["target.gguf is a GGUF file, to which nothing is added: name the block with mtp:path=OUT/head"]
    assert not (out / "model").exists()
    with LLM(str(file), draft=f"mtp:path={out / 'head'}", pacing="fixed", max_seq_len=128) as llm:
        assert llm.generate([[5, 6, 7]], GREEDY)[0].report.num_drafted > 0


def test_a_block_of_another_target_is_refused(hybrid: Path, tmp_path: Path) -> None:
    target = shutil.copytree(hybrid / "target" / "model", tmp_path / "other")
    block = hybrid / "mtp" / "head"
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"] = torch.randn(300, 32, generator=torch.Generator().manual_seed(0))
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadOption, match="was trained for a target with other weights"):
        LLM(str(target), draft=f"mtp:path={block}", max_seq_len=64)
    config = json.loads((block / "config.json").read_text(encoding="utf-8"))
    wrong = shutil.copytree(block, tmp_path / "wrong")
    config["forerun"]["tokenizer"] = "0" * 64
    (wrong / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(BadOption, match="holds ids of another tokenizer"):
        LLM(str(hybrid / "target" / "model"), draft=f"mtp:path={wrong}", max_seq_len=64)
