"""Encoder-decoders in the engine: sources of different lengths in one batch, with drafts, preemption and aborts."""

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import published as published_heads
from engine.load import assert_empty, heard
from forerun import LLM, BadOption, PromptTooLong, SamplingParams
from forerun.errors import UnsupportedModel
from tiny import byte_tokenizer, write_tiny

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 257,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 3,
    "eos_token_id": 0,
}


COUNTS = {"layers": 2, "ffn_dim": 48, "attention_heads": 4}


def written(module: Any, folder: Path, noise: float = 0.05) -> Any:
    """Move the weights of a module of transformers a little, write it with a tokenizer of bytes, and return it."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += noise * torch.randn_like(parameter)
    module.save_pretrained(folder)
    byte_tokenizer("<|end|>").save(str(folder / "tokenizer.json"))
    return module


def write_t5(folder: Path, seed: int, **sizes: Any) -> Any:
    """Write a T5 of random weights over bytes, and return transformers' module."""
    torch.manual_seed(seed)
    config = transformers.T5Config(**{**SMALL, "num_layers": 2, "num_decoder_layers": 2, **sizes})
    return written(transformers.T5ForConditionalGeneration(config).eval(), folder)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A target, its folder, and the folder of a draft."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    module = write_t5(target, 1)
    write_t5(draft, 1, num_decoder_layers=1)
    return module, target, draft


def write_other(folder: Path, name: str, **generation: Any) -> Any:
    """Write a BART or Marian of random weights over bytes, and return transformers' module.

    generation: what generation_config.json says.
    """
    torch.manual_seed(2)
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in COUNTS.items()}
    ids = {"pad_token_id": 1, "bos_token_id": 4, "eos_token_id": 0, "decoder_start_token_id": 2}
    sizes |= {"vocab_size": 257, "d_model": 32, "max_position_embeddings": 128}
    config = getattr(transformers, f"{name}Config")(**sizes, **ids)
    classes = {"Bart": "BartForConditionalGeneration", "Marian": "MarianMTModel"}
    module = getattr(transformers, classes[name])(config).eval()
    module.generation_config.update(**generation)
    return written(module, folder)


def generated(module: Any, source: list[int], num: int, **more: Any) -> list[int]:
    """What generate() of transformers says behind the start of an answer."""
    mask = torch.ones(1, len(source), dtype=torch.int64)
    given = {"max_new_tokens": num, "do_sample": False, "num_beams": 1, **more}
    ids: list[int] = module.generate(torch.tensor([source]), attention_mask=mask, **given)[0, 1:].tolist()
    return ids


def sources(num: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1, 257) for _ in range(rng.randrange(1, longest))] for _ in range(num)]


def opened(folder: Path, **options: Any) -> LLM:
    """Open an engine with room for a source and an answer of 96 tokens."""
    return LLM(folder, **{"max_seq_len": 96, "dtype": "float32", **options})


def num_sources(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that fills with how many sources each call of a model's encoder reads."""
    counts, begin = list[int](), model.begin
    monkeypatch.setattr(model, "begin", lambda sources, cache: counts.append(len(sources)) or begin(sources, cache))
    return counts


@pytest.fixture(scope="module")
def llm(published: tuple[Any, Path, Path]) -> Iterator[LLM]:
    with opened(published[1], draft="suffix", extra_drafts=f"model:path={published[2]}", max_batch_size=4) as made:
        yield made


def test_greedy_texts_are_those_of_transformers(published: tuple[Any, Path, Path], llm: LLM) -> None:
    module, asked = published[0], sources(24)
    for draft in ("none", "suffix", "model"):
        outs = llm.generate(asked, SamplingParams(max_tokens=24, temperature=0, draft=draft))
        for source, out in zip(asked, outs, strict=True):
            assert out.token_ids == generated(module, source, 24)
            assert out.prompt_ids == source


@pytest.mark.parametrize(("name", "more"), [("Bart", {"forced_bos_token_id": 4}), ("Marian", {})])
def test_the_texts_of_others(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    """A token that is forced behind the start is what the answer begins with, and no part of it."""
    module, asked = write_other(tmp_path, name, **more), sources(12)
    num_begun = 1 + len(more)
    with opened(tmp_path, draft="suffix") as made:
        outs = made.generate(asked, SamplingParams(max_tokens=20, temperature=0))
    for source, out in zip(asked, outs, strict=True):
        assert out.token_ids == generated(module, source, 19 + num_begun, forced_eos_token_id=None)[num_begun - 1 :]


@pytest.mark.parametrize("name", ["Bart", "Marian"])
def test_a_cut_answer_ends_as_transformers_ends_it(tmp_path: Path, name: str) -> None:
    """With forced_eos_token_id, of a greedy text and of beams; it counts, and is not in the text."""
    module, asked = write_other(tmp_path, name, forced_eos_token_id=0), sources(8)
    with opened(tmp_path, draft="suffix") as made:
        assert made.params().forced_eos_token_id == 0
        for source, num in itertools.product(asked, (1, 2, 9)):
            wanted = generated(module, source, num)
            (out,) = made.generate(source, made.params(max_tokens=num, temperature=0))
            assert out.token_ids == wanted
            assert out.finish_reason == ("length" if len(wanted) == num else "stop")
            assert out.text == made.tokenizer.decode(wanted[:-1])
            wanted = generated(module, source, num, num_beams=3)
            (out,) = made.generate(source, made.params(max_tokens=num, temperature=0, num_beams=3, draft="lookup"))
            assert out.token_ids == wanted
        assert made.generate(asked[0], SamplingParams(max_tokens=1, temperature=0))[0].token_ids != [0]
        ends: dict[str, Any] = {"stop_token_ids": [70], "forced_eos_token_id": 70}  # which has a text
        (out,) = made.generate(asked[0], SamplingParams(max_tokens=3, temperature=0, **ends))
        assert out.text == made.tokenizer.decode(out.token_ids[:-1]) != made.tokenizer.decode(out.token_ids)
        with pytest.raises(BadOption, match="forced_eos_token_id holds the id 257"):
            made.generate(asked[0], SamplingParams(max_tokens=4, forced_eos_token_id=257))


def test_an_answer_that_begins_as_it_was_told(published: tuple[Any, Path, Path], llm: LLM) -> None:
    module, source = published[0], [5, 80, 7, 9]
    (out,) = llm.generate(source, SamplingParams(max_tokens=10, temperature=0, decoder_prompt=[9, 8]))
    assert out.token_ids == generated(module, source, 10, decoder_input_ids=torch.tensor([[3, 9, 8]]))[2:]


def test_drawn_texts_are_plain_decodings(llm: LLM) -> None:
    """With match and one seed; the source is no part of what penalties count."""
    asked = sources(12)
    texts = []
    for draft in ("none", "suffix", "model"):
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, repetition_penalty=1.2, draft=draft)
        texts.append([out.token_ids for out in llm.generate(asked, params)])
    assert texts[0] == texts[1] == texts[2]
    assert len({tuple(text) for text in texts[0]}) > 6


def test_beams_are_those_of_transformers(published: tuple[Any, Path, Path], llm: LLM) -> None:
    module = published[0]
    for i, source in enumerate(sources(6)):
        draft = "model" if i % 2 else "none"
        params = SamplingParams(max_tokens=12, temperature=0, num_beams=3, n=3, ignore_eos=True, draft=draft)
        outs = llm.generate(source, params)
        wanted = module.generate(
            torch.tensor([source]), max_new_tokens=12, min_new_tokens=12, num_beams=3, num_return_sequences=3
        )
        assert [out.token_ids for out in outs] == wanted[:, 1:].tolist()


def test_equal_sources_are_run_once(llm: LLM, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """At once, and later; under another salt again. What differs behind the same beginning is run for itself."""
    num_run = num_sources(llm.engine.runner.model, monkeypatch)
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "draft": "none"}
    source, params = [*range(40, 75)], SamplingParams(**fields, cache_salt=request.node.name)  # new here
    first = llm.generate([source] * 3, params)
    assert sum(num_run) == 1
    assert llm.generate(source, params)[0].token_ids == first[0].token_ids == first[2].token_ids
    assert sum(num_run) == 1
    salted = SamplingParams(**fields, cache_salt=f"{request.node.name} again")
    assert llm.generate(source, salted)[0].token_ids == first[0].token_ids
    assert sum(num_run) == 2
    assert llm.generate([*source, 9], params)[0].token_ids != []
    assert sum(num_run) == 3


def test_equal_texts_of_other_sources_share_nothing(published: tuple[Any, Path, Path], llm: LLM) -> None:
    """Of a text that fills blocks, the rows of two sources differ from the first layer that reads one on.

    Some sources here begin like others, by whole blocks.
    """
    module, begun = published[0], [3, *range(10, 50)]
    params = {"max_tokens": 6, "temperature": 0.0, "draft": "none"}
    texts, long = set(), [*range(60, 108)]
    for source in ([5, 80, 7, 9], [200, 201], [5, 80, 7, 9], long, long[:16], long[:32], [*long[:32], *[200] * 16]):
        (out,) = llm.generate(source, SamplingParams(**params, decoder_prompt=begun[1:]))
        assert out.token_ids == generated(module, source, 6, decoder_input_ids=torch.tensor([begun]))[len(begun) - 1 :]
        texts.add(tuple(out.token_ids))
    assert len(texts) > 1


def test_equal_sources_without_a_prefix_cache(published: tuple[Any, Path, Path], llm: LLM) -> None:
    """Those that begin together share rows all the same; their rows go when the last of them ends."""
    params = SamplingParams(max_tokens=8, temperature=0)
    wanted = [out.token_ids for out in llm.generate(sources(3), params)]
    with opened(published[1], max_batch_size=6, prefix_caching=False) as made:
        assert [out.token_ids for out in made.generate([*sources(3), *sources(3)], params)] == [*wanted, *wanted]
        assert_empty(made.engine.runner.cache)


def test_what_cannot_be_served(published: tuple[Any, Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="is an encoder-decoder and the target is none"):
        LLM(write_tiny(tmp_path / "llama"), draft=f"model:path={published[2]}", max_seq_len=64)
    with pytest.raises(BadOption, match=r"translated cannot draft by .*, an encoder-decoder"):
        LLM(published[1], draft=f"translated:path={published[2]}", max_seq_len=64)
    for file in published[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for file, keys in (("generation_config.json", {}), ("config.json", {"decoder_start_token_id": 257})):
        raw = {**json.loads((tmp_path / file).read_text()), **keys}
        raw = raw if keys else {key: value for key, value in raw.items() if key != "decoder_start_token_id"}
        (tmp_path / file).write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match="decoder_start_token_id=257, which is not possible"):
        LLM(tmp_path, max_seq_len=64)


def test_preempted_requests_say_the_same(published: tuple[Any, Path, Path], llm: LLM) -> None:
    """Of 60 requests in a cache that holds two or three; nothing is left of them."""
    _, target, draft = published
    asked = sources(60)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    wanted = [out.token_ids for out in llm.generate(asked, params)]
    # The chunks are so small that sources wait for others.
    options = {"max_batch_size": 8, "kv_cache_tokens": 144, "prefill_chunk_tokens": 16}
    with opened(target, draft=f"model:path={draft}", **options) as small:
        assert [out.token_ids for out in small.generate(asked, params)] == wanted
        assert small.engine.scheduler.num_preemptions > 0
        assert_empty(small.engine.runner.cache, small.drafters["model"].runner.cache)


def test_sources_are_run_as_prompts_are(published: tuple[Any, Path, Path]) -> None:
    """No more tokens in a step than prompts may have, but one source at least; the others' texts go on."""
    with opened(published[1], max_batch_size=6, prefill_chunk_tokens=40) as made:
        reports = heard(made)
        made.generate([[7] * n for n in (30, 31, 9, 50, 8, 8)], SamplingParams(max_tokens=20, temperature=0))
    assert [report.num_prefill_tokens for report in reports if report.num_prefill_tokens] == [30, 40, 50, 16]
    assert [report.num_decoding for report in reports][:4] == [1, 3, 4, 6]


@pytest.mark.once("it asks for its drafters itself")
def test_nothing_is_left_of_aborted_requests(llm: LLM) -> None:
    """Of 1,000, before their sources are run, behind that and while texts are written; nor in the draft's cache."""
    runners: list[Any] = [llm.engine.runner, llm.drafters["model"].runner]
    for i in range(100):
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, draft=(None, "model")[i % 2])
        requests = llm.submit(sources(10), params)
        if i % 3:
            llm.generate([7, 8], SamplingParams(max_tokens=1 + i % 5, temperature=0))
        llm.end(requests)
    llm.generate([7, 8], SamplingParams(max_tokens=1, temperature=0))
    assert_empty(*(runner.cache for runner in runners))
    assert not any(runner.sources._known for runner in runners)


def test_what_no_encoder_reads(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match="the prompt has 97 tokens and the encoder reads at most 96"):
        llm.generate([1] * 97, SamplingParams(max_tokens=4))
    with pytest.raises(PromptTooLong, match="the answer begins with 1 tokens and max_tokens=96, but max_seq_len is 96"):
        llm.generate([1], SamplingParams(max_tokens=96))
    with pytest.raises(BadOption, match="the prompt has no tokens"):
        llm.generate([[]], SamplingParams(max_tokens=4))
    with pytest.raises(BadOption, match="max_tokens=0 is not possible here: an encoder-decoder"):
        llm.generate([1], SamplingParams(max_tokens=0))
    with pytest.raises(BadOption, match="the prompt holds the id 257"):
        llm.generate([257], SamplingParams(max_tokens=4))
    with pytest.raises(BadOption, match="decoder_prompt holds the id 300"):
        llm.generate([1], SamplingParams(max_tokens=4, decoder_prompt=[300]))
    with LLM("shipped", draft="none", max_seq_len=64) as plain, pytest.raises(BadOption, match="has no encoder"):
        plain.generate("def", SamplingParams(max_tokens=4, decoder_prompt="x"))


HEADS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "medusa": (
        "medusa",
        {"medusa_num_heads": 2, "medusa_num_layers": 1},
        published_heads.medusa_shapes("{0}.{1}.linear.", "{0}.{1}.weight", 2, 1),
    ),
    "EAGLE-1": ("eagle", published_heads.DECODER, published_heads.eagle_1_shapes()),
    "EAGLE-3": (
        "eagle",
        {**published_heads.EAGLE_3, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        published_heads.eagle_3_shapes(),
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_published_heads_run_on_the_decoder(published: tuple[Any, Path, Path], tmp_path: Path, name: str) -> None:
    """They read its rows, whose layers are two blocks each, and see no source; the texts are those without one."""
    method, config, shapes = HEADS[name]
    weights = published_heads.random_weights(shapes)
    published_heads.write(
        tmp_path, config, published_heads.with_ids(weights) if "draft_vocab_size" in config else weights
    )
    few = dict.fromkeys(range(8, 257), -math.inf) if method == "eagle" else None  # of which it draws the right one
    asked, params = sources(6), SamplingParams(max_tokens=20, temperature=3.0, seed=1, logit_bias=few)
    options: dict[str, Any] = {"ops": "reference_row_by_row", "max_seq_len": 96, "spec_length": 4}
    with LLM(published[1], draft=f"{method}:path={tmp_path}", extra_drafts="none", **options) as made:
        outs = made.generate(asked, params)
        plain = made.generate(asked, dataclasses.replace(params, draft="none"))
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert sum(out.report.num_drafted for out in outs) > 40
    if few is not None:
        assert sum(out.report.num_accepted for out in outs) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_backend": "contiguous", "max_batch_size": 1},
        {"quantization": "int8:group=16"},
        {"dtype": "bfloat16", "ops": "reference_row_by_row"},
    ],
    ids=str,
)
def test_other_ways_to_run(published: tuple[Any, Path, Path], options: dict[str, Any]) -> None:
    """Each says with every draft what it says with none: with one of a part of its layers, too."""
    asked = sources(5)
    more = ";".join(("lookup", "bigram", "recycle", "early_exit:layers=2", f"model:path={published[2]}"))
    with LLM(published[1], draft="none", extra_drafts=more, max_seq_len=96, **options) as made:
        texts = []
        for draft in ("none", *made.drafters):
            params = SamplingParams(max_tokens=16, temperature=0, draft=draft)
            texts.append([out.token_ids for out in made.generate(asked, params)])
        assert len(texts) >= 6
        assert all(found == texts[0] for found in texts)


def test_a_draft_reads_sources_when_it_is_to_draft(
    published: tuple[Any, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a batch in few calls, as its steps have room; never, where nothing is drafted."""
    _, target, draft = published
    with opened(target, draft=f"model:path={draft},search=none", max_batch_size=6, pacing="fixed") as made:
        num_run = num_sources(made.drafters["model"].runner.model, monkeypatch)
        asked = [[7 + i] * 20 for i in range(6)]
        plain = made.generate(asked, SamplingParams(max_tokens=1, temperature=0))  # the last token has no draft
        assert num_run == []
        found = made.generate(asked, SamplingParams(max_tokens=8, temperature=0, spec_length=3, ignore_eos=True))
        assert sum(num_run) == 6
        assert max(num_run) > 1
        assert [out.token_ids[:1] for out in found] == [out.token_ids for out in plain]


def test_a_draft_reads_sources_however_few_tokens_a_step_has_for_that(published: tuple[Any, Path, Path]) -> None:
    """Where a step's first source has taken them all, the others wait; what a source takes is no drafting."""
    _, target, draft = published
    options = {"max_batch_size": 4, "pacing": "fixed", "draft_catchup_tokens": 1}
    with opened(target, draft=f"model:path={draft},search=none", **options) as made:
        reports = heard(made)
        asked = [[7 + i] * 20 for i in range(4)]
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, decoder_prompt=[9, 8, 7, 6])
        assert [len(out.token_ids) for out in made.generate(asked, params)] == [16] * 4
    read = [step.num_catchup_tokens for report in reports for step in report.drafts.values()]
    assert sum(num >= 20 for num in read) == 4
    assert max(read) < 40
    assert all(step.catchup_s > 0 for report in reports for step in report.drafts.values() if step.num_catchup_tokens)
