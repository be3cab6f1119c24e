"""Encoder-decoders compute what `transformers` computes: many sources in one batch, in chunks and trees."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.config import Quantization
from forerun.kv.cache import BlockCache
from forerun.models.loading import load_checkpoint
from forerun.models.runner import Run, Runner
from forerun.ops import reference
from forerun.ops.cpu import CpuOps
from forerun.ops.reference import ReferenceOps
from saved import save_checkpoint
from support import needs_native, runner_for

transformers = pytest.importorskip("transformers")

T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}  # fmt: skip
BART = {"vocab_size": 97, "d_model": 32, "max_position_embeddings": 64, "encoder_layers": 2, "encoder_ffn_dim": 48,
        "encoder_attention_heads": 2, "decoder_layers": 3, "decoder_ffn_dim": 64,
        "decoder_attention_heads": 4}  # fmt: skip
GEMMA_2 = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024,
           "sliding_window": 4, "query_pre_attn_scalar": 12}  # fmt: skip
WIDE = {**GEMMA_2, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3}
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", T5),
    "t5 1.1": ("T5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("Bart", BART | IDS),
    "bart scaled": ("Bart", BART | IDS | {"scale_embedding": True, "activation_function": "relu"}),
    "t5gemma": ("T5Gemma",
                {"vocab_size": 97, "encoder": GEMMA_2, "decoder": GEMMA_2 | {"attn_logit_softcapping": 0.01}}),
    "t5gemma 9b-2b": ("T5Gemma", {"vocab_size": 97, "encoder": WIDE | {"attn_logit_softcapping": 4.0,
                      "layer_types": ["full_attention"] * 3}, "decoder": GEMMA_2 | {"attn_logit_softcapping": None,
                      "final_logit_softcapping": 5.0}, "tie_word_embeddings": False}),
    "marian": ("Marian", BART | IDS | {"activation_function": "swish", "scale_embedding": True}),
}  # fmt: skip
CLASSES = {"T5": "T5ForConditionalGeneration", "Bart": "BartForConditionalGeneration", "Marian": "MarianMTModel",
           "T5Gemma": "T5GemmaForConditionalGeneration"}  # fmt: skip
SOURCES = {0: [*range(3, 40)], 1: [5, 4, 96], 2: [*range(90, 20, -3)]}
TEXTS = {0: [0, 7, 9, 11, 50, 3, 2, 8], 1: [0, 90, 4, 4, 4, 17], 2: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}


@pytest.fixture(scope="module", params=CASES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small module of random weights, and the folder that it was saved to."""
    name, config = CASES[request.param]
    torch.manual_seed(1)
    made = getattr(transformers, f"{name}Config")(**config)
    module = getattr(transformers, CLASSES[name])(made).eval()
    for parameter in module.parameters():
        if parameter.requires_grad:  # not of a table of sines
            parameter.data += 0.02 * torch.randn_like(parameter)
    if hasattr(module, "final_logits_bias"):
        module.final_logits_bias += torch.randn_like(module.final_logits_bias)
    folder = tmp_path_factory.mktemp("published")
    module.save_pretrained(folder)
    return module, folder


row_by_row = partial(ReferenceOps, row_by_row=True)
REFERENCE, ROW_BY_ROW = pytest.param(ReferenceOps, id="fast"), pytest.param(row_by_row, id="row_by_row")
NATIVE = pytest.param(CpuOps, id="native", marks=needs_native)


def runner_of(folder: Path, ops: Callable[[], ReferenceOps] = ReferenceOps) -> Runner:
    return runner_for(load_checkpoint(folder, dtype="float32", ops=ops()).model, max_seq_len=64)


def reading(runner: Runner, sources: Mapping[int, list[int]]) -> Runner:
    """The same runner, which has read a source for each of these slots."""
    for slot, source in sources.items():
        runner.cache.open(slot)
        runner.sources.open(slot, source, None)
    runner.sources.run(list(sources))
    return runner


def in_chunks(runner: Runner, texts: Mapping[int, list[int]], chunks: Sequence[tuple[int, int]]) -> dict[int, Tensor]:
    """The logits of all texts, whose chunks are beside each other until a text has no more."""
    found: dict[int, list[Tensor]] = {slot: [] for slot in texts}
    for start, stop in chunks:
        runs = [Run(slot, text[start:stop]) for slot, text in texts.items() if len(text) > start]
        scores = runner.forward(runs)
        runner.cache.keep({run.slot: range(len(run.tokens)) for run in runs})
        for run, logits in zip(runs, scores.logits, strict=True):
            found[run.slot].append(torch.from_numpy(logits))
    return {slot: torch.cat(logits) for slot, logits in found.items()}


def logits_of(folder: Path, source: list[int], text: list[int]) -> Tensor:
    """In one pass of the fast reference operators."""
    return torch.from_numpy(reading(runner_of(folder), {0: source}).forward([Run(0, text)]).logits[0])


def by_transformers(module: Any, source: list[int], text: list[int]) -> Tensor:
    with torch.no_grad():
        return module(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([text])).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("ops", [REFERENCE, NATIVE])
def test_logits_in_one_batch(published: tuple[Any, Path], ops: Callable[[], ReferenceOps]) -> None:
    module, folder = published
    runner = reading(runner_of(folder, ops), SOURCES)
    found = in_chunks(runner, TEXTS, [(0, 2), (2, 6), (6, 13)])
    for slot, text in TEXTS.items():
        wanted = by_transformers(module, SOURCES[slot], text)
        assert torch.allclose(found[slot], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    runner.cache.check_integrity()


def test_a_head_of_its_own_that_is_said_to_be_tied(tmp_path: Path) -> None:
    """As transformers 5 saves T5 1.1; what it stores is what it computes with."""
    torch.manual_seed(1)
    module = transformers.T5ForConditionalGeneration(transformers.T5Config(**CASES["t5 1.1"][1])).eval()
    module.lm_head.weight = torch.nn.Parameter(torch.randn(97, 32))
    module.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    found = logits_of(tmp_path, SOURCES[0], TEXTS[0])
    wanted = by_transformers(module, SOURCES[0], TEXTS[0])
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("ops", [ROW_BY_ROW, NATIVE])
def test_a_tree_of_a_text(published: tuple[Any, Path], ops: Callable[[], ReferenceOps]) -> None:
    """Each row sees its own ancestors, and all of its source; alone it has the same bits."""
    module, folder = published
    source, text = SOURCES[0], TEXTS[0]
    runner = reading(runner_of(folder, ops), {0: source, 1: source})
    runner.forward([Run(0, text[:4])])
    runner.cache.keep({0: range(4)})
    tree, parents = [text[4], 60, 61, text[5], 62], [-1, -1, 0, 0, 3]
    found = torch.from_numpy(runner.forward([Run(0, tree, parents=parents)]).logits[0])
    for path, row in [((0,), 0), ((1,), 1), ((0, 2), 2), ((0, 3, 4), 4)]:
        tokens = [*text[:4], *(tree[node] for node in path)]
        assert torch.allclose(found[row], by_transformers(module, source, tokens)[-1], rtol=1e-3, atol=1e-3)
        assert torch.equal(found[row], torch.from_numpy(runner.forward([Run(1, tokens)]).logits[0])[-1])


def test_it_is_saved_as_it_was(published: tuple[Any, Path], tmp_path: Path) -> None:
    """transformers reads what we write."""
    module, folder = published
    loaded = load_checkpoint(folder, dtype="float32")
    save_checkpoint(tmp_path, loaded.model.config, dict(loaded.tensors), torch.float32)
    again = type(module).from_pretrained(tmp_path).eval()
    assert torch.equal(*(by_transformers(own, SOURCES[1], TEXTS[1]) for own in (module, again)))


@pytest.mark.parametrize("published", ["t5"], indirect=True)
def test_tensors_of_early_files_that_nothing_reads(published: tuple[Any, Path], tmp_path: Path) -> None:
    folder = published[1]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    held = load_file(tmp_path / "model.safetensors")
    held["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 4)
    held["encoder.embed_tokens.weight"] = held["shared.weight"].clone()
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_checkpoint(tmp_path).model.config == load_checkpoint(folder).model.config


@pytest.mark.parametrize("published", ["t5", "bart"], indirect=True)
def test_a_long_source_is_scored_in_parts(published: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    module, folder = published
    source, text = [3 + i * 7 % 90 for i in range(60)], TEXTS[0]
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", 64)
    assert torch.allclose(logits_of(folder, source, text), by_transformers(module, source, text), rtol=1e-3, atol=1e-3)


def test_a_cache_of_some_layers_has_what_these_read(published: tuple[Any, Path]) -> None:
    """A layer that is not kept has another one's pool, which is not to be written to."""
    model = load_checkpoint(published[1], dtype="float32").model
    shape, rows = model.config.cache_shape, list[Tensor]()
    for layers in (None, (1, 2)):
        own = dataclasses.replace(shape, layers=layers)
        cache = BlockCache.of(model, "paged", max_batch_size=1, max_seq_len=64, shape=own)
        cache.open(0)
        cache.reserve(0, 30)
        model.begin({0: [*range(3, 33)]}, cache)  # type: ignore[attr-defined]
        rows.append(torch.cat(cache.pools[1].read(cache.rows(0, 0, 30))))
    assert torch.equal(rows[0], rows[1])


@needs_native
@pytest.mark.parametrize("published", ["t5", "t5 1.1", "t5gemma"], indirect=True)
def test_kernels_behind_long_sources(published: tuple[Any, Path]) -> None:
    """Ranges of keys that threads share, far beyond the largest distance: bits depend on neither threads nor chunks."""
    module, folder = published
    source = [3 + i * i % 93 for i in range(700)]
    text = [0, *(3 + i * 7 % 90 for i in range(320))]
    rows = []
    for num_threads, step in [(1, 321), (2, 321), (12, 50), (3, 1)]:
        model = load_checkpoint(folder, dtype="float32", ops=CpuOps(num_threads=num_threads)).model
        runner = runner_for(model, max_seq_len=704)
        if step != 50:  # a source beside it that is open and not read
            runner.cache.open(0)
            runner.sources.open(0, [5, 6], None)
        reading(runner, {0: [5, 6], 1: source} if step == 50 else {1: source})
        chunks = [(start, start + step) for start in range(0, 321, step)]
        rows.append(in_chunks(runner, {1: text}, chunks)[1])
    wanted = by_transformers(module, source, text)
    assert torch.allclose(rows[0], wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    assert all(torch.equal(rows[0], others) for others in rows[1:])


@needs_native
@pytest.mark.parametrize(("dtype", "bits", "tolerance"), [("bfloat16", "", 0.05), ("bfloat16", "int8:group=16", 0.05)])
def test_kernels_of_narrow_types(published: tuple[Any, Path], dtype: str, bits: str, tolerance: float) -> None:
    """Queries, keys and values that are rounded change little, in encoder and decoder."""
    module, folder = published
    model: Any = load_checkpoint(folder, dtype="float32" if bits else dtype, ops=CpuOps()).model
    model = model.rounded(Quantization.parse(bits)) if bits else model
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 64, "dtype": model.cache_dtype}
    runner = reading(Runner(model, BlockCache.of(model, "paged", **sizes)), SOURCES)
    scores = runner.forward([Run(slot, text) for slot, text in TEXTS.items()])
    for (slot, text), found in zip(TEXTS.items(), scores.logits, strict=True):
        wanted = by_transformers(module, SOURCES[slot], text)
        assert float((torch.from_numpy(found) - wanted).norm()) < tolerance * float(wanted.norm())


@needs_native
def test_runs_that_go_on_in_one_call_keep_their_sources(published: tuple[Any, Path]) -> None:
    """Each of three ends where it is to end; the ids are those of a pass for each token."""
    runner = reading(runner_of(published[1], CpuOps), SOURCES)
    lengths = [2, 6, 4]
    found = runner.run_ahead([Run(slot, text[:5]) for slot, text in TEXTS.items()], lengths).ids
    for slot, length in zip(SOURCES, lengths, strict=True):
        tokens, wanted = TEXTS[slot][:5], list[int]()
        for _ in range(length):
            (logits,) = runner.forward([Run(slot, tokens)]).logits
            runner.cache.keep({slot: range(len(tokens))})
            tokens = [int(logits[-1].argmax())]
            wanted += tokens
        assert found[slot] == wanted
