"""Encoder-decoders by the hundred: texts and beams of transformers, bits that no neighbour and no preemption moves."""

import copy
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.load import assert_empty, at_work, run
from engine.test_encoder_decoders import sources, write_other, write_t5, written
from forerun import LLM, SamplingParams
from forerun.engine.request import Request, RequestOutput

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.once("each test asks for its drafters itself")

GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
NUM, MOST = 50, 16
Kind = tuple[Any, Path, LLM]


@pytest.fixture(scope="module", params=["T5", "T5 1.1", "Bart", "Marian", "T5Gemma"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    """A module of transformers, its folder, and an LLM of it, which can draft by a copy that is off a little."""
    folder, near = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("near")
    more = GATED if request.param == "T5 1.1" else {}
    if request.param == "T5Gemma":
        module = write_t5gemma(folder)
    elif request.param.startswith("T5"):
        module = write_t5(folder, 1, **more)
    else:
        module = write_other(folder, request.param)
    written(copy.deepcopy(module), near, noise=0.02)
    options: dict[str, Any] = {"max_seq_len": 96, "dtype": "float32", "ops": "reference", "spec_length": 3}
    with LLM(folder, draft="suffix", extra_drafts=f"model:path={near}", **options) as llm:
        yield module, folder, llm


def write_t5gemma(folder: Path) -> Any:
    """Write a T5Gemma of random weights over bytes, with windows that matter, and return transformers' module."""
    torch.manual_seed(3)
    side = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    ids = {"bos_token_id": 3, "eos_token_id": 0, "pad_token_id": 1}
    side |= {"num_key_value_heads": 2, "vocab_size": 257, "sliding_window": 6, "max_position_embeddings": 128, **ids}
    config = transformers.T5GemmaConfig(vocab_size=257, encoder=side, decoder=side)
    return written(transformers.T5GemmaForConditionalGeneration(config).eval(), folder, noise=0.1)


def by_transformers(module: Any, asked: list[list[int]], **options: Any) -> list[list[int]]:
    """What generate() says of all sources in one batch, of several outputs one behind the other."""
    longest = max(map(len, asked))
    ids = torch.tensor([[*source, *[1] * (longest - len(source))] for source in asked])
    mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in asked])
    given = {"do_sample": False, "num_beams": 1, "max_new_tokens": MOST, "pad_token_id": 1, **options}
    end = module.config.eos_token_id
    texts = module.generate(ids, attention_mask=mask, **given)[:, 1:].tolist()
    return [text[: text.index(end) + 1] if end in text else text for text in texts]


def logits_behind(module: Any, source: list[int], text: list[int]) -> Tensor:
    start = next(i for i in (module.config.decoder_start_token_id, module.config.bos_token_id) if i is not None)
    with torch.inference_mode():
        made = module(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[start, *text]]))
    return made.logits[0, -1].double()  # type: ignore[no-any-return]


def is_tied(module: Any, source: list[int], ours: list[int], theirs: list[int]) -> bool:
    """Whether two texts differ first at two tokens that are the best two and nearly equal (docs/exactness.md).

    tau: twice the largest deviation of a logit of this module in float32 from float64 over the text so far.
    """
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    wide = copy.deepcopy(module).double()
    exact = [logits_behind(wide, source, ours[:i]) for i in range(at + 1)]
    off = max((logits_behind(module, source, ours[:i]) - row).abs().max() for i, row in enumerate(exact))
    best = exact[-1].topk(2)
    return set(best.indices.tolist()) == {ours[at], theirs[at]} and bool(best.values[0] - best.values[1] <= 2 * off)


def test_many_texts_are_those_of_transformers(kind: Kind) -> None:
    """Alone, and with drafts of both kinds; a difference has a tie certificate, and few have one."""
    module, _, llm = kind
    asked = sources(NUM, longest=40)
    wanted, num_tied = by_transformers(module, asked), 0
    for draft in ("none", "suffix", "model"):
        outs = llm.generate(asked, llm.params(max_tokens=MOST, temperature=0, draft=draft))
        assert draft == "none" or sum(out.report.num_accepted for out in outs) > NUM
        for source, out, theirs in zip(asked, outs, wanted, strict=True):
            if out.token_ids != theirs:
                assert is_tied(module, source, out.token_ids, theirs)
                num_tied += 1
    assert num_tied < 3


def test_beams_are_those_of_transformers(kind: Kind) -> None:
    module, _, llm = kind
    asked = sources(4, longest=40)
    end = by_transformers(module, asked)[0][4]  # which beams reach, so that texts of several lengths compete
    for penalty in (1.0, -2.0):
        settings = {"num_beams": 3, "length_penalty": penalty}
        wanted = by_transformers(module, asked, num_return_sequences=3, eos_token_id=end, **settings)
        cut = [text[: text.index(end) + 1] if end in text else text for text in wanted]
        for draft in ("none", "lookup", "model"):
            asked_for = {"max_tokens": MOST, "temperature": 0, "n": 3, "ignore_eos": True, **settings}
            outs = llm.generate(asked, llm.params(draft=draft, stop_token_ids=[end], **asked_for))
            assert [out.token_ids for out in outs] == cut


# ---------------------------------------------------------------------------------------------------------------- bits


def asked_of(num: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Sources, some of them equal or of one beginning, with every kind of sampling and drafter."""
    rng = random.Random(11)
    heads = [[rng.randrange(1, 257) for _ in range(17)] for _ in range(3)]
    made = []
    for i in range(num):
        source = rng.choice(heads)[: rng.choice((0, 0, 16, 17))]
        own = [rng.randrange(1, 257) for _ in range(rng.randrange(7))]
        fields: dict[str, Any] = {
            "max_tokens": rng.choice((2, 2, 3, 36)),
            "temperature": rng.choice((0.0, 0.7, 1.3)),
            "seed": i,
            "logprobs": 1,
            "decoder_prompt": [rng.randrange(257) for _ in range(rng.choice((0, 0, 3)))] or None,
            "repetition_penalty": rng.choice((1.0, 1.2)),
            "priority": rng.choice((0, 0, 1)),
            "spec_length": rng.choice((1, 2)),  # so that what is preempted depends on no clock
        }
        made.append((source + own or [7], fields))
    return made


def told(output: RequestOutput) -> tuple[Any, ...]:
    """What must have the same bits: ids, and their log-probabilities."""
    return output.token_ids, output.finish_reason, output.logprobs


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and a draft, of as little as has all parts."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1}
    target, draft = tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("draft")
    write_t5(target, 1, **sizes)
    write_t5(draft, 2, **sizes)
    return target, draft


def test_no_neighbour_and_no_preemption_moves_a_bit(small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """300 requests in a cache of three, where texts that are being decoded are preempted, beside each of them alone."""
    asked = asked_of(300)
    drafts = ("none", "suffix", "lookup", "model", "bigram", "prediction", "recycle")
    options: dict[str, Any] = {"ops": "reference_row_by_row", "dtype": "float32", "max_seq_len": 64}
    with LLM(small[0], draft="none", max_batch_size=1, prefix_caching=False, **options) as llm:
        alone = [told(llm.generate(source, SamplingParams(**fields))[0]) for source, fields in asked]
    preempted = list[int]()
    more = {"kv_cache_tokens": 112, "max_batch_size": 8, "prefill_chunk_tokens": 16}
    extra = ";".join(f"model:path={small[1]}" if name == "model" else name for name in drafts[1:])
    with LLM(small[0], draft="none", extra_drafts=extra, **more, **options) as llm:
        scheduler = llm.engine.scheduler
        preempt = scheduler._preempt

        def watched(request: Request) -> None:
            preempted.append(request.seq.num_output_tokens)
            preempt(request)

        monkeypatch.setattr(scheduler, "_preempt", watched)
        params = [SamplingParams(**fields, draft=drafts[i % len(drafts)]) for i, (_, fields) in enumerate(asked)]
        # Right up to a token, and wrong behind it.
        for i in range(drafts.index("prediction"), len(params), len(drafts)):
            params[i] = dataclasses.replace(params[i], prediction=[*alone[i][0][:-1], 99])
        outs = llm.generate([source for source, _ in asked], params)
        assert_empty(llm.engine.runner.cache, llm.drafters["model"].runner.cache)
    assert [told(out) for out in outs] == alone
    assert sum(num > 0 for num in preempted) > 10, "of texts that had begun"
    by_draft = {name: sum(out.report.num_accepted for out in outs[i :: len(drafts)]) for i, name in enumerate(drafts)}
    assert all(num > 0 for name, num in by_draft.items() if name != "none"), by_draft


def test_the_source_of_who_gives_way_is_room_for_another(small: tuple[Path, Path]) -> None:
    """Seven blocks: two of an equal request, four of a worse one, three of them its source; the late one needs four."""
    options: dict[str, Any] = {"ops": "reference", "dtype": "float32", "max_seq_len": 64, "kv_cache_tokens": 112}
    with LLM(small[0], draft="none", **options) as llm:
        engine = llm.engine

        def asked(first: int, num: int, priority: int) -> Request:
            params = llm.params(max_tokens=9, temperature=0, ignore_eos=True, priority=priority)
            (request,) = engine.make(list(range(first, first + num)), params)
            engine.queue([request])
            return request

        equal, worse = asked(10, 16, 0), asked(40, 48, 1)
        at_work(engine, equal, worse)
        late = asked(100, 48, 0)
        engine.step()
        assert engine.scheduler.running == [equal, late]
        assert [request.report.num_preemptions for request in (equal, worse, late)] == [0, 1, 0]
        run(engine, [equal, worse, late])


def test_a_text_that_copies_its_source_does_not_take_its_rows(kind: Kind) -> None:
    """A preempted text looks for its rows among those of the same salt, which are not the source's."""
    engine, told = kind[2].engine, []
    asked = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    params = kind[2].params(draft="none", logit_bias={70: 1e3}, **asked)
    start = engine.make([70], params)[0].seq.tokens[0]
    for is_preempted in (False, True):
        (request,) = engine.make([start, *[70] * 40], params)
        engine.queue([request])
        while request.seq.finish_reason is None:
            engine.step()
            if is_preempted and len(request.seq.tokens) == 36 and not request.report.num_preemptions:
                engine.scheduler._preempt(request)
        assert request.seq.tokens[:40] == [start, *[70] * 39]  # some have an end that is forced
        assert request.report.num_preemptions == is_preempted
        told.append([logprob.logprob for logprob in request.seq.logprobs[:39]])
    assert told[1] == pytest.approx(told[0], abs=1e-4)
