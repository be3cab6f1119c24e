"""`forerun train head`: features, resuming, what the drafters make of the files, and files that are refused."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM, SamplingParams, registry
from forerun.config import EngineConfig
from forerun.drafters.shared import head_files
from forerun.engine.opened import Opened
from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.host_tensor import HostTensor
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.models.opened import read_config
from forerun.ops.torch import TorchModel, empty_weights
from forerun.ops.torch_tensors import tensor_of
from forerun.train import head as training, heads, loop
from forerun.train.config import HeadConfig
from forerun.train.fingerprint import fingerprint
from forerun.train.heads import dflash, eagle as eagle_head
from forerun.train.samples import read_samples
from refusals import refusal
from support import rounds_of
from tiny import tiny_config as mini, write_tiny
from train.conftest import Interrupt, read_log, run_command
from train.written import write, writer_of

METHODS = ["eagle:draft_vocab=200,steps=3", "mtp:draft_vocab=257,steps=3", "medusa:draft_vocab=200,heads=2",
           "hydra:draft_vocab=200,heads=3,blocks=2", "dflash:draft_vocab=200,block=4,depth=1",
           "blockwise:draft_vocab=200,heads=2,units=16", "pass:vectors=2,every=4"]  # fmt: skip
NUM_TOKENS = 2500  # of the samples; first weights are made of about each once
MEDUSA_2 = "medusa:draft_vocab=257,heads=2,backbone=true"
Make = Callable[..., HeadConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return opened(folder)


@pytest.fixture(scope="module")
def samples(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "samples"
    write(writer_of(folder, ops="reference"), path, NUM_TOKENS)
    return path


def tiny_config(**overrides: Any) -> HeadConfig:
    """The configuration of a tiny run; keyword arguments are its other fields, or override them."""
    options: dict[str, Any] = {
        "steps": 8, "tokens_per_step": 128, "seq_len_tokens": 64, "lr": 5e-3, "warmup_steps": 2,
        "validate_every_steps": 4, "autocast": "off", "method": METHODS[0], "fit_tokens": NUM_TOKENS,
    }  # fmt: skip
    return HeadConfig(**{**options, **overrides})


@pytest.fixture(scope="module")
def features(samples: Path, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's hidden states, stored once: a test below shows that they are those that are recomputed."""
    folder = tmp_path_factory.mktemp("features")
    training.prepare(tiny_config(out=folder / "run", samples=samples, features=folder / "rows"), checkpoint)
    return folder / "rows"


@pytest.fixture
def tiny(samples: Path, features: Path, tmp_path: Path) -> Make:
    """Makes the configuration of a tiny run in a folder of the test's own."""
    own = {"samples": samples, "features": features}
    return lambda out="run", **overrides: tiny_config(out=tmp_path / out, **{**own, **overrides})


def opened(folder: Path) -> Checkpoint:
    """A target on the reference operators."""
    return Opened.of(EngineConfig(target=str(folder), ops="reference")).load()


@pytest.mark.parametrize("method", METHODS)
def test_a_head_learns_and_drafts_what_the_target_says(
    tiny: Make, checkpoint: Checkpoint, folder: Path, method: str
) -> None:
    config = tiny(method=method, steps=40, validate_every_steps=40)
    numbers = training.train(config, checkpoint, quiet=True)
    losses = [line["train_loss"] for line in read_log(config) if "train_loss" in line]
    assert losses[-1] < losses[0] - 0.2
    assert 0 <= numbers["agreement_1"] <= 1
    name = method.partition(":")[0]
    llm = LLM(str(folder), draft=f"{name}:path={config.out / 'head'}", spec_length=3, ops="reference", max_seq_len=128)
    prompts = [[5, 9, 40, 8], [70, 71, 72]]
    for params in (SamplingParams(max_tokens=20, temperature=0), SamplingParams(max_tokens=20, seed=4)):
        plain = llm.generate(prompts, replace(params, draft="none"))
        drafted = llm.generate(prompts, params)
        assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
        assert sum(out.report.num_drafted for out in drafted) > 10


@pytest.mark.parametrize("method", METHODS)
def test_a_target_on_native_kernels_teaches_a_head(folder: Path, samples: Path, tmp_path: Path, method: str) -> None:
    """Its rows are numpy's, and training takes tensors; without features in a folder they are computed again."""
    checkpoint = Opened.of(EngineConfig(target=str(folder))).load()
    config = tiny_config(method=method, out=tmp_path / "run", samples=samples, steps=2, validate_every_steps=2)
    training.train(config, checkpoint, quiet=True)
    llm = LLM(str(folder), draft=f"{method.partition(':')[0]}:path={config.out / 'head'}", spec_length=3)
    (out,) = llm.generate([[5, 9, 40, 8]], SamplingParams(max_tokens=8, temperature=0))
    assert out.report.num_drafted > 0


@pytest.mark.parametrize("method", [*METHODS, MEDUSA_2])
def test_a_resumed_run_equals_an_uninterrupted_one(
    tiny: Make, checkpoint: Checkpoint, interrupt: Interrupt, method: str
) -> None:
    whole, parts = tiny("whole", method=method), tiny("parts", method=method)
    training.train(whole, checkpoint, quiet=True)
    interrupt(5, lambda: training.train(parts, checkpoint, quiet=True))
    training.train(parts, checkpoint, resume=True, quiet=True)
    assert read_log(parts) == read_log(whole)
    for name in ("head", *(["model"] if method == MEDUSA_2 else [])):
        files = [config.out / name / "model.safetensors" for config in (parts, whole)]
        assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(BadOption, match="holds a run of"):
        training.train(tiny("parts", method=method, seed=1), checkpoint, resume=True, quiet=True)


def test_a_run_that_was_begun_with_other_defaults_is_refused(
    tiny: Make, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of another version may be: the options that nobody wrote are part of the run, too."""
    config = tiny(method="eagle:draft_vocab=200,steps=2")
    training.train(config, checkpoint, quiet=True)
    load = heads.load

    def another_version(spec: str, target: Any) -> Any:
        name, module, options = load(spec, target)
        return name, module, replace(options, every=2)

    monkeypatch.setattr(heads, "load", another_version)
    assert "holds a run of" in refusal(BadOption, training.train, config, checkpoint, resume=True, quiet=True)


def test_a_target_that_is_trained_along_is_another_one(tiny: Make, checkpoint: Checkpoint, folder: Path) -> None:
    """Medusa-2: near the original, heads agree with it more often, and speculation gives its texts, not the others."""
    sizes: dict[str, Any] = {"steps": 100, "tokens_per_step": 256, "validate_every_steps": 100}
    before = fingerprint(checkpoint.model)
    alone = training.train(tiny("alone", method=MEDUSA_2.replace("true", "false"), **sizes), checkpoint, quiet=True)
    config = tiny("both", method=MEDUSA_2, **sizes)
    both = training.train(config, checkpoint, quiet=True)
    assert "kl" not in alone
    assert 0 < both["kl"] < 0.1
    assert 0.5 < both["same_best"] < 1
    assert both["overlap_1"] > alone["overlap_1"] + 0.01
    assert fingerprint(checkpoint.model) == before  # the original stays as it is
    new = load_checkpoint(config.out / "model")
    options = {"ops": "reference", "dtype": "float32", "max_seq_len": 128}
    card = (config.out / "model" / "README.md").read_text(encoding="utf-8")
    assert "**It is not that\nmodel**" in card
    assert before in card
    assert before != fingerprint(new.model)
    assert fingerprint(new.model) in card
    old, llm = (LLM(str(path), draft="none", **options) for path in (folder, config.out / "model"))
    draft = f"medusa:path={config.out / 'head'}"
    drafting = LLM(str(config.out / "model"), draft=draft, spec_length=3, pacing="fixed", **options)
    prompts = [[5, 9, 40, 8], [70, 71, 72], [33, 8]]
    greedy = SamplingParams(max_tokens=40, temperature=0)
    texts = [[out.token_ids for out in each.generate(prompts, greedy)] for each in (old, llm, drafting)]
    assert texts[0] != texts[1] == texts[2]
    assert drafting.generate(prompts, greedy)[0].report.num_drafted > 20


def test_what_cannot_be_trained_along_is_refused(tiny: Make, checkpoint: Checkpoint) -> None:
    for wrong in ("backbone_rate=0", "heads_first=1", "heads_weight=-1"):
        with pytest.raises(BadOption, match="heads_first from 0 to below 1"):
            heads.load(f"medusa:{wrong}", checkpoint.model.config)


def test_no_head_is_trained_for_an_encoder_decoder(tiny: Make, checkpoint: Checkpoint) -> None:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    spec = read_config({"model_type": "t5", **sizes})
    other = replace(checkpoint, model=TorchModel(spec, empty_weights(spec, torch.float32, "cpu")))
    assert "is an encoder-decoder, for which no head is trained" in refusal(BadOption, training.prepare, tiny(), other)


def test_stored_features_are_the_recomputed_ones(tiny: Make, checkpoint: Checkpoint, tmp_path: Path) -> None:
    stored = tiny(features=tmp_path / "features")
    tasks = [training.prepare(config, checkpoint) for config in (tiny(features=None), stored)]
    batches = [task.data.batch(3) for task in tasks]
    for name in heads.Batch.__dataclass_fields__:
        assert torch.equal(getattr(batches[0], name), getattr(batches[1], name)), name
    rows = tmp_path / "features" / "features.bin"
    data = rows.read_bytes()
    rows.write_bytes(data[: len(data) // 3 - 7])  # as a kill leaves it
    training.prepare(stored, checkpoint)
    assert rows.read_bytes() == data
    fewer = training.prepare(tiny(features=tmp_path / "features", method="eagle:layers=1+2"), checkpoint)
    assert torch.equal(fewer.data.batch(3).layers, batches[0].layers)
    without = training.prepare(tiny(features=tmp_path / "features", method=METHODS[2]), checkpoint)
    assert without.data.batch(0).layers.shape[2] == 0
    with pytest.raises(BadOption, match="are of layers="):
        training.prepare(tiny(features=tmp_path / "features", method="eagle:layers=0+1"), checkpoint)


def test_features_are_those_of_the_target(tiny: Make, checkpoint: Checkpoint) -> None:
    """Row i is of token i: the rows behind the final norm give the token that the target says next."""
    task = training.prepare(tiny(features=None), checkpoint)
    batch = task.data.batch(0)
    logits = checkpoint.model.logits(batch.hidden[0].float())
    near = logits.topk(2).values.diff().abs()[:, 0] > 0.1  # bfloat16 may turn nearly tied ones around
    inside = (batch.text[0] >= 0) & near
    assert torch.equal(logits.argmax(-1)[inside], batch.best[0][inside])
    greedy = next(s for s in read_samples(task.config.samples).samples if s.temperature == 0 and len(s.ids) > 20)
    found = task.data._source.of(greedy)
    written = np.arange(greedy.num_given, len(greedy.ids))
    assert (found.best.numpy()[written - 1] == greedy.ids[written]).mean() > 0.95


@pytest.mark.parametrize("method", [*METHODS[:-1], "pass:vectors=2,every=1"])
def test_the_drafter_computes_what_was_trained(tiny: Make, checkpoint: Checkpoint, folder: Path, method: str) -> None:
    """A draft is the chain of the training's own steps: row, position and token are paired in the same way in both."""
    config = tiny(steps=40 if method == METHODS[0] else 12, method=method)
    training.train(config, checkpoint, quiet=True)
    task = training.prepare(replace(config, features=None), checkpoint)  # other texts will be read
    loop.load_state(loop.Run(config, task, loop.make_optimizer(config, task.weights)))
    name = method.partition(":")[0]
    draft = f"{name}:path={config.out / 'head'}" + (",shape=1x1x1" if name in ("medusa", "hydra") else "")
    length = 5 if name == "pass" else 3  # some of which are vectors
    llm = LLM(str(folder), draft=draft, spec_length=length, pacing="fixed", ops="reference", max_seq_len=128)
    rounds = rounds_of(llm)
    out = llm.generate([[5, 9, 40, 8, 100, 3]], SamplingParams(max_tokens=12, temperature=0))[0]
    tokens = [5, 9, 40, 8, 100, 3, *out.token_ids]
    num = num_equal = 0
    for one in rounds:
        ids = [*tokens[: one.position], *one.tokens]
        with torch.no_grad():
            trained = chain_of(task, ids, len(one.tokens))
        num, num_equal = num + len(trained), num_equal + sum(a == b for a, b in zip(one.tokens, trained, strict=True))
    assert num > 10
    assert num_equal >= 0.9 * num  # the file's bfloat16 weights turn nearly tied ids around


def chain_of(task: training.HeadTask, ids: list[int], num: int) -> list[int]:
    """The training's guesses for the last `num` of these ids, each step given the ids before it."""
    sample = replace(read_samples(task.config.samples).samples[0], ids=np.array(ids, dtype=np.uint32), num_given=0)
    batch = heads.Packing([sample], task.data._source, 64, 1, 0).joined([[0]])
    batch = replace(batch, best=torch.full_like(batch.best, int(task.head.ids[0])))  # so that every row is learned
    guesses, row = [], len(ids) - num - 2
    if isinstance(task.head, dflash.Head):  # a block begins with the token whose features are not known
        parts, row = task.head._places(batch, torch.tensor([row + 1])), 0
    else:
        parts = parts_of(task.head, batch)
    for _, (learned, own, _) in zip(range(num), parts, strict=False):
        guesses.append(int(task.head.ids[own[int(learned[0, :row].sum())].argmax()]))
    return guesses


def parts_of(head: Any, batch: heads.Batch) -> Any:
    return head._steps(batch) if isinstance(head, eagle_head.SteppingHead) else head._heads(batch)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_learned_is_what_the_target_says_there(tiny: Make, checkpoint: Checkpoint, method: str) -> None:
    """Row m learns the target's distribution of the token m+2+k at place k: its likeliest id there is known apart."""
    few = method.replace("draft_vocab=200", "draft_vocab=20")  # so that many rows have nothing to learn
    task = training.prepare(tiny(method=few), checkpoint)
    batch, num = task.data.batch(0), 0
    if isinstance(task.head, dflash.Head):  # a block's first token is the one behind the features
        anchors = torch.arange(1, batch.ids.shape[1], 3)
        parts, columns, first = task.head._places(batch, anchors), anchors, 0
    else:
        parts = parts_of(task.head, batch)
        columns = torch.arange(batch.ids.shape[1])
        first = 1
    with torch.no_grad():
        for k, (learned, own, target) in enumerate(parts):
            said = heads.shifted(batch.best, k + first)[:, columns][learned]
            assert len(own) == len(target) == len(said)
            assert (task.head.ids[target.argmax(-1)] == said).float().mean() > 0.95  # rounded to bfloat16
            num += len(said)
    assert num > 30
    assert len(said.unique()) > 3


@pytest.mark.parametrize("loss", ["ce", "alpha"])
def test_heads_learn_by_other_losses(tiny: Make, checkpoint: Checkpoint, loss: str) -> None:
    config = tiny(method=f"medusa:draft_vocab=200,heads=1,loss={loss}", steps=40)
    training.train(config, checkpoint, quiet=True)
    losses = [line["train_loss"] for line in read_log(config) if "train_loss" in line]
    assert losses[-1] < losses[0]
    assert loss == "ce" or 0 <= losses[-1] <= 1
    assert "ce, kl or alpha" in refusal(BadOption, heads.load, "pass:loss=mse", checkpoint.model.config)


@pytest.fixture(scope="module")
def trained(samples: Path, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    sizes: dict[str, Any] = {"steps": 1, "tokens_per_step": 64, "seq_len_tokens": 64, "fit_tokens": NUM_TOKENS}
    training.train(HeadConfig(out=out, method=METHODS[0], samples=samples, **sizes), checkpoint, quiet=True)
    return out / "head"


@pytest.mark.parametrize("method", [*METHODS, MEDUSA_2])
def test_a_run_begins_as_a_head_that_was_trained_before(tiny: Make, checkpoint: Checkpoint, method: str) -> None:
    """With its weights, and the ids that it drafts; its losses before any step are those of the first run's end."""
    first = training.prepare(tiny(method=method), checkpoint)
    training.train(tiny(method=method), checkpoint, quiet=True)
    head = tiny().out / "head"
    trained = head_files.tensors(head / head_files.WEIGHTS)
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    if method.startswith("dflash"):  # the mask of this text; that of another would be another id
        config["dflash_config"]["mask_token_id"] -= 1
        (head / "config.json").write_text(json.dumps(config), encoding="utf-8")
    again = tiny("again", method=method, init_from=str(head), steps=1, lr=1e-12)
    weights, sizes = training.prepare(again, checkpoint).head.files()
    assert weights.keys() == trained.keys() - {head_files.PROBE}
    for name, weight in weights.items():
        assert torch.equal(weight, tensor_of(trained[name])), name
    assert sizes == {key: value for key, value in config.items() if key != "forerun"}
    assert any(not torch.equal(weight, weights[name]) for name, weight in first.head.files()[0].items())
    training.train(again, checkpoint, quiet=True)
    if method != MEDUSA_2 and not method.startswith("dflash"):  # a target that was trained along is another one
        last, begun = loop.read_log(tiny().out)[-1], loop.read_log(again.out)[0]
        losses = [name for name in last if name.startswith("loss_")]
        assert [begun[name] for name in losses] == pytest.approx([last[name] for name in losses], abs=0.01)
    ended = head_files.tensors(again.out / "head" / head_files.WEIGHTS)
    assert all(np.array_equal(ended[name].values, weight.values) for name, weight in trained.items())
    with pytest.raises(BadOption, match="holds a run of init_from="):
        training.train(replace(again, init_from=None), checkpoint, resume=True, quiet=True)


def test_ids_of_before_are_drafted_where_the_new_texts_leave_room(tiny: Make, checkpoint: Checkpoint) -> None:
    """Behind those that were written, and before all others; how many there are may be another number."""
    old = tiny(method="medusa:draft_vocab=4,heads=1", steps=1)
    training.train(old, checkpoint, quiet=True)
    head = old.out / "head"
    chosen = np.array([3, 200, 250, 255])  # as if other texts had been written
    found = head_files.tensors(head / head_files.WEIGHTS)
    head_config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    known = head_config.pop("forerun")["tokenizer"]
    head_files.save(head, "medusa", found | {"d2t": HostTensor.of(chosen - np.arange(4))}, head_config, known)
    short = tiny("again", method="medusa:draft_vocab=250,heads=1", init_from=str(head), num_tokens=600)
    task = training.prepare(short, checkpoint)
    given = [sample for sample in task.data.samples if not sample.is_held_out]
    written = {int(i) for sample in given for i in sample.ids[sample.num_given :]}
    ids = set(task.head.ids.tolist())  # type: ignore[attr-defined]
    assert len(ids) == 250 > len(written | set(chosen.tolist()))
    assert written | set(chosen.tolist()) <= ids
    full = replace(short, method=f"medusa:draft_vocab={len(written)},heads=1")
    assert set(training.prepare(full, checkpoint).head.ids.tolist()) == written  # type: ignore[attr-defined]


def test_a_target_in_bfloat16_is_known_again(folder: Path) -> None:
    """By the embeddings that a head keeps of it, and as the writer of its texts."""
    wide, narrow = (load_checkpoint(folder, dtype=dtype).model for dtype in ("float32", "bfloat16"))
    probes = [head_files.probe(model, 257) for model in (wide, narrow)]
    assert np.array_equal(probes[0].values, probes[1].values)
    assert fingerprint(narrow) != fingerprint(wide)


def test_a_target_may_stand_in_other_files_than_when_the_head_was_made(
    tiny: Make, checkpoint: Checkpoint, trained: Path, tmp_path: Path
) -> None:
    """A GGUF file rounds the target's epsilon to float32, and calls it a llama."""
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    assert config["rms_norm_eps"] != float(np.float32(config["rms_norm_eps"]))
    rounded = {"rms_norm_eps": float(np.float32(config["rms_norm_eps"])), "model_type": "mistral"}
    shutil.copytree(trained, tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | rounded), encoding="utf-8")
    task = training.prepare(tiny(init_from=str(tmp_path / "head")), checkpoint)
    before = tensor_of(head_files.tensors(trained / head_files.WEIGHTS)["fc.weight"])
    assert torch.equal(task.head.files()[0]["fc.weight"], before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "medusa:draft_vocab=257"}, "is a head of 'eagle' and not of medusa"),
        ({"method": "eagle:layers=0+2,draft_vocab=257"}, "write the options that it was trained with"),
        ({"init_from": "nothing"}, "there is no head 'nothing'"),
        ({"init_from": "published"}, "was not made by `forerun train head`"),
        ({"init_from": "smollm2", "method": "eagle"}, "another tokenizer"),
        ({"init_from": "other weights"}, "trained for a target with other weights"),
    ],
)
def test_heads_that_a_run_cannot_go_on_from(
    tiny: Make, checkpoint: Checkpoint, trained: Path, tmp_path: Path, change: dict[str, str], said: str
) -> None:
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text("{}", encoding="utf-8")
    shutil.copy(trained / "model.safetensors", published)
    change = {"init_from": str(trained)} | change
    if change["init_from"] == "published":
        change["init_from"] = str(published)
    if change["init_from"] == "other weights":
        change["init_from"] = str(trained)
        checkpoint = opened(write_tiny(tmp_path / "other", seed=1))
    with pytest.raises((BadOption, NotFound), match=said):
        training.prepare(tiny(**change, features=tmp_path / "features"), checkpoint)
    assert not (tmp_path / "features").exists(), "refused before hidden states are stored"


def as_pickle(weights: Path) -> None:
    weights.unlink()
    weights.with_name("pytorch_model.bin").write_bytes(pickle.dumps({}))


def with_other_ids(weights: Path) -> None:
    tensors = load_file(weights)
    save_file(tensors | {"d2t": tensors["d2t"] + 1000}, weights)


# What becomes of the weights of a head, or of what its config.json says.
SPOILT: dict[str, tuple[Callable[[Path], object] | None, Callable[[Any], object] | None, type[Exception], str]] = {
    "truncated": (lambda w: w.write_bytes(w.read_bytes()[:-100]), None, UnsupportedModel, "not a readable safetensors"),
    "pickle": (as_pickle, None, UnsupportedModel, "is a pickle"),
    "missing": (lambda w: shutil.rmtree(w.parent), None, NotFound, "name a folder with config.json"),
    "ids": (with_other_ids, None, UnsupportedModel, "d2t"),
    "method": (None, lambda c: c["forerun"].update(method="medusa"), BadOption, "is a head of 'medusa'"),
    "tokenizer": (None, lambda c: c["forerun"].update(tokenizer="0" * 64), BadOption, "another tokenizer"),
    "sizes": (None, lambda c: c.update(intermediate_size=c["intermediate_size"] + 1), UnsupportedModel, "of shape"),
    "layers": (None, lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 9]), BadOption, "behind 9 layers"),
    "target": (None, None, BadOption, "other weights"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_wrong_files_are_refused(trained: Path, folder: Path, tmp_path: Path, case: str) -> None:
    of_weights, of_config, error, said = SPOILT[case]
    path = shutil.copytree(trained, tmp_path / "head")
    if of_weights is not None:
        of_weights(path / "model.safetensors")
    if of_config is not None:
        config = json.loads((path / "config.json").read_text())
        of_config(config)
        (path / "config.json").write_text(json.dumps(config))
    target = write_tiny(tmp_path / "other", seed=1) if case == "target" else folder
    assert said in refusal(error, LLM, str(target), draft=f"eagle:path={path}", ops="reference")


def test_samples_of_another_target_are_refused(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="another tokenizer"):
        training.prepare(tiny(), opened(write_tiny(tmp_path / "other", end_token="<|stop|>")))


def test_layers_that_are_read() -> None:
    config = mini("llama", num_layers=30)
    for name in ("eagle", "dflash"):
        module = heads.load(name, config)[1]
        assert module.layers(module.Options(), config) == (15, 29, 30)
    assert "the target has 30 layers" in refusal(BadOption, heads.load, "eagle:layers=2+31", config)
    assert "so 1 is the first" in refusal(BadOption, heads.load, "dflash:layers=0+30", config)
    assert "method that can be trained" in refusal(BadOption, heads.load, "egale", config)


def test_a_head_without_a_file_says_how_to_make_one(folder: Path) -> None:
    for name in ("eagle", "medusa", "hydra", "dflash", "blockwise", "pass"):
        assert f"train drafter --method {name}" in refusal(BadOption, LLM, str(folder), draft=name)


def test_numbers_count_what_is_not_drafted_and_what_was_not_reached() -> None:
    """One text of six tokens; ids 0 and 1 are drafted, so that a row whose likeliest id is 2 is a miss."""
    best = torch.tensor([[0, 1, 2, 0, 1, 1]])
    nothing = torch.zeros(1, 6, 1)
    everywhere = torch.ones_like(best, dtype=torch.bool)
    text = torch.zeros_like(best)
    batch = heads.Batch(best, text, text, everywhere, nothing, nothing, best, torch.zeros(1, 6))

    def part(ahead: int, guesses: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        learned = batch.ahead(ahead) & (heads.shifted(best, ahead - 1) < 2)
        own = torch.nn.functional.one_hot(torch.tensor(guesses), 2).float()
        assert len(own) == learned.sum()
        return learned, own, torch.zeros_like(own)

    parts = [part(2, [1, 1, 1]), part(3, [0, 1]), part(4, [0, 1])]  # right: rows 0 and 3; rows 1 and 2; rows 0 and 1
    numbers = heads.measured(parts, batch, torch.tensor([0, 1]))
    assert [numbers[f"agreement_{k}"] for k in (1, 2, 3)] == [(2, 4), (0, 1), (0, 0)]
    assert [numbers[f"overlap_{k}"][1] for k in (1, 2, 3)] == [4, 3, 2]
    assert heads.measured(parts, batch, torch.tensor([0, 1]), of_learned=True)["agreement_1"] == (2, 3)


def test_a_run_is_not_begun_anew_over_another(tiny: Make, checkpoint: Checkpoint) -> None:
    config = tiny(steps=2)
    training.train(config, checkpoint, quiet=True)
    before = {path: path.read_bytes() for path in config.out.rglob("*") if path.is_file()}
    assert "go on with --resume" in refusal(BadOption, training.train, tiny(steps=4), checkpoint, quiet=True)
    assert {path: path.read_bytes() for path in config.out.rglob("*") if path.is_file()} == before


def test_features_of_other_samples_are_refused(
    tiny: Make, checkpoint: Checkpoint, folder: Path, tmp_path: Path
) -> None:
    """The same target, seed and texts, but longer answers: other ids stand at the same places."""
    writer = writer_of(folder, ops="reference")
    writer.lengths = replace(writer.lengths, answer=30)
    write(writer, tmp_path / "longer", NUM_TOKENS // 4)
    assert "samples" in refusal(BadOption, training.prepare, tiny(samples=tmp_path / "longer"), checkpoint)


def test_what_a_user_should_know_of_the_samples_is_said(
    tiny: Make, checkpoint: Checkpoint, folder: Path, tmp_path: Path
) -> None:
    """A fine-tuned model, with the embeddings and norms of the one that wrote the samples."""
    said: list[str] = []
    stored: list[tuple[int, int]] = []
    config = tiny(features=tmp_path / "features")
    training.prepare(config, checkpoint, lambda num, of: stored.append((num, of)), said.append)
    assert said == []
    num = len(read_samples(config.samples).samples)
    assert stored == [(i, num) for i in range(1, num + 1)]
    other = opened(folder)
    other.model.weights[f"model.layers.{other.model.config.num_layers // 2}.self_attn.v_proj.weight"][0, 0] += 1
    training.prepare(tiny(features=None), other, warn=said.append)
    assert len(said) == 1
    assert "other weights" in said[0]


def test_a_batch_with_nothing_to_learn_changes_nothing(tiny: Make, checkpoint: Checkpoint) -> None:
    for method in METHODS:
        task = training.prepare(tiny(method=method), checkpoint)
        batch = task.data.batch(0)
        nothing = replace(batch, is_written=torch.zeros_like(batch.is_written))
        for weight in task.weights.values():
            weight.requires_grad_(True)
        task.head.loss(nothing).backward()
        assert all(w.grad is None or not w.grad.any() for w in task.weights.values()), method


def test_ids_without_a_token_are_never_drafted(checkpoint: Checkpoint) -> None:
    counts = torch.zeros(checkpoint.model.config.vocab_size)
    counts[5] = 3
    teacher = heads.Teacher.of(checkpoint.model, counts, num_ids=100)  # the others are padding
    for wanted, num in ((8, 8), (200, 100)):
        ids = heads.Vocabulary(teacher, wanted).ids.tolist()
        assert len(ids) == num
        assert 5 in ids
        assert max(ids) < 100


def test_every_method_has_a_learning_rate_of_its_own() -> None:
    rates = {name: heads.rate_of(name) for name in registry.names("forerun.train.heads")}
    assert rates.keys() == {method.partition(":")[0] for method in METHODS}
    assert set(rates.values()) == {8e-4, 1e-3, 3e-4, 1e-2}
    assert (heads.rate_of("eagle", 1152), heads.rate_of("eagle", 64)) == (4e-4, 8e-4)
    assert heads.rate_of("pass", 1152) == 1e-2
    assert "there is no method that can be trained 'eagel'" in refusal(BadOption, heads.rate_of, "eagel")


def test_the_command_trains_at_the_rate_of_the_method(samples: Path, folder: Path, tmp_path: Path) -> None:
    command = f"head --method pass --samples {samples} --target {folder} --out {tmp_path / 'run'} --quiet"
    sizes = "--max-steps 1 --tokens-per-step 128 --seq-len-tokens 64 --ops reference"
    assert "agreement_1=" in run_command(f"{command} {sizes}")
    assert json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["options"]["lr"] == 1e-2


def test_the_command_goes_on_and_says_what_a_head_was_before(
    samples: Path, folder: Path, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = f"head --method {METHODS[0]} --samples {samples} --target {folder} --out {out} --quiet"
    sizes = f"--init-from {trained} --max-steps 6 --lr 0.01 --tokens-per-step 64 --seq-len-tokens 64 --ops reference"
    lines = run_command(f"{command} {sizes}").split("before: ")[1].splitlines()
    before, after = (dict(word.split("=") for word in line.split()) for line in lines)
    ended, begun = loop.read_log(trained.parent)[-1], loop.read_log(out)[0]
    assert before.keys() == after.keys() > {"agreement_1", "overlap_1", "loss_1"}
    assert before == {name: f"{begun[name]:.4f}" for name in before}
    assert before != after
    assert begun["loss_1"] == pytest.approx(ended["loss_1"], abs=0.01)
    assert json.loads((out / "run.json").read_text(encoding="utf-8"))["options"]["init_from"] == str(trained)


def test_the_curves_of_a_head_are_drawn(trained: Path, tmp_path: Path, curves: None) -> None:
    """With the numbers of each position, which no other run has."""
    lines = loop.read_log(trained.parent)
    assert {"agreement_1", "overlap_3"} <= lines[-1].keys()
    loop.draw_curves(lines, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_impossible_options_of_the_loop_are_refused(tiny: Make) -> None:
    assert "--decay-share 1.5 is not possible" in refusal(BadOption, tiny, decay_share=1.5)
