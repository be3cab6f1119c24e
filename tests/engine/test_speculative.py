"""The nine tests that document 001 (D10) asks for, under its names; docs/study/serving.md says what each is about.

The last three run on the shipped pair here, and at the shapes of Llama 3.2 1B and 3B in `make parity`.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.speculative_cases import PROMPTS, continuous_batching, e2e, greedy_parity
from forerun import LLM, BadOption, SamplingParams, VocabularyMismatch
from forerun.config import EngineConfig
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.kv.cache import BlockCache, CacheShape
from forerun.testing import Branching, enumerate_outcomes
from forerun.types import Draft, Probs
from forerun.verify import ratio

pytestmark = pytest.mark.once("each compares plain decoding with speculation itself")


@cache
def make(**options: Any) -> LLM:
    return LLM("shipped", **options)


def test_accept_reject_greedy() -> None:
    """Prompts one by one, exactly plain decoding's tokens; a rejected token is replaced by the target's own."""
    params = SamplingParams(max_tokens=24, temperature=0)
    for prompt in PROMPTS:
        (plain,) = make(draft="none").generate(prompt, params)
        (out,) = make(spec_length=5).generate(prompt, params)
        assert out.token_ids == plain.token_ids
        assert out.text == plain.text
        assert set(out.report.origins) <= {"accepted", "correction", "bonus", "plain"}


@pytest.mark.parametrize(
    ("p", "q"),
    [((0.5, 0.3, 0.2), (0.2, 0.6, 0.2)), ((0.1, 0.9, 0.0), (0.6, 0.2, 0.2)), ((0.2, 0.3, 0.5), (0.2, 0.3, 0.5))],
)
def test_accept_reject_sampling(p: tuple[float, ...], q: tuple[float, ...]) -> None:
    """Every outcome of one round with one drafted token: acceptance min(1, p/q), correction norm(max(0, p - q))."""
    p_probs, q_probs = [Probs(dense=np.array(weights)) for weights in (p, q)]

    def run(coins: Branching) -> tuple[int, bool, int]:
        token = coins.draft(q_probs, 0)
        draft = Draft.chains([[token]], [[q_probs]])
        verdict = ratio.verify(draft, [[p_probs, Probs(point=0)]], [coins])
        return token, bool(verdict.paths[0]), verdict.emitted(draft, 0)[0]

    ways = enumerate_outcomes(run)
    rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    for x in range(3):
        accepted = sum(w for w, (token, taken, _) in ways if token == x and taken)
        corrected = sum(w for w, (_, taken, emitted) in ways if not taken and emitted == x)
        assert sum(w for w, (token, _, _) in ways if token == x) == pytest.approx(q[x], abs=1e-12)
        assert accepted == pytest.approx(min(p[x], q[x]), abs=1e-12)
        assert corrected == pytest.approx(rest[x], abs=1e-12)  # all that is rejected has the mass sum(rest)
        assert sum(w for w, (_, _, emitted) in ways if emitted == x) == pytest.approx(p[x], abs=1e-12)


@pytest.mark.parametrize("length", range(41))
def test_kv_cache_rollback(length: int) -> None:
    """truncate_to sets the length and frees every block at index >= ceil(length / 16), no other."""
    cache = BlockCache.create(CacheShape(1, 1, 4), "paged", max_batch_size=1, max_seq_len=64)
    cache.open(0)
    cache.reserve(0, 40)
    cache.keep({0: range(40)})
    had = cache.rows(0, 0, 40).tolist()
    cache.truncate_to(0, length)
    assert cache.length(0) == length
    assert cache.free_tokens() == 64 - 16 * -(-length // 16)
    assert cache.rows(0, 0, length).tolist() == had[:length]
    cache.check_integrity()


def test_draft_target_tokenizer_mismatch(tmp_path: Path) -> None:
    """Equal vocabulary sizes and end ids are not enough: the whole map from ids to tokens is compared."""
    for file in SHIPPED_DRAFT.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"]
    ids["def"], ids["class"] = ids["class"], ids["def"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(VocabularyMismatch, match=r"at id \d+: the target has 'def', the draft .* has 'class'"):
        LLM(SHIPPED_TARGET, draft=str(tmp_path))


def test_config_validation() -> None:
    """Speculation that is asked for needs a draft; lengths are at least 1; None leaves it to the engine."""
    with pytest.raises(BadOption, match="use_speculative_decoding=True needs a draft"):
        EngineConfig.make(use_speculative_decoding=True)
    with pytest.raises(BadOption, match="spec_length=0"):
        EngineConfig.make(draft_model="lookup", spec_length=0)
    with pytest.raises(BadOption, match="drop one of them"):
        EngineConfig.make(use_speculative_decoding=False, draft_model="lookup")
    assert EngineConfig.make(use_speculative_decoding=True, draft_model="lookup").draft == "lookup"
    assert EngineConfig.make(use_speculative_decoding=False).draft == "none"
    config = EngineConfig.make()
    assert (config.draft, config.pacing_spec, config.spec_length) == ("auto", "auto", None)
    assert EngineConfig.make(spec_length=5).pacing_spec == "fixed"


def test_multi_token_output() -> None:
    """One round brings several tokens, in order; where one of them ends the output, those behind it are dropped."""
    llm, params = make(spec_length=5), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    chunks = list(llm.stream(PROMPTS[0], params))
    assert max(len(chunk.token_ids) for chunk in chunks) > 1
    ids = [token for chunk in chunks for token in chunk.token_ids]
    (plain,) = make(draft="none").generate(PROMPTS[0], params)
    assert ids == plain.token_ids
    ends = 0
    for i, chunk in enumerate(chunks):
        before = sum(len(c.token_ids) for c in chunks[:i])
        inside = next((j for j, t in enumerate(chunk.token_ids[:-1]) if t not in ids[: before + j]), None)
        if inside is None:
            continue
        stop = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=(chunk.token_ids[inside],))
        (out,) = llm.generate(PROMPTS[0], stop)
        assert out.token_ids == ids[: before + inside + 1]
        assert out.finish_reason == "stop"
        assert out.report.num_emitted > len(out.token_ids)  # the round had more
        ends += 1
    assert ends > 0


def test_speculative_greedy_parity() -> None:
    greedy_parity(make, 32)


def test_speculative_e2e(caplog: pytest.LogCaptureFixture) -> None:
    e2e(make, 40, caplog)


def test_speculative_with_continuous_batching() -> None:
    continuous_batching(make, 24)
