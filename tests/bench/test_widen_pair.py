"""The shipped pair, both sides widened: the draft model is accepted as often as before."""

import json
from dataclasses import dataclass

from forerun import LLM, SamplingParams
from forerun.bench.widen import widen_checkpoint
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.models.named import DATA
from forerun.models.widening import WideShape

# Heads twice as wide, groups of 4 and 3 split into groups of 3 and 2, a new layer, new ids.
TARGET_SHAPE = WideShape(768, 7, 12, 4, 2048, head_dim=128, vocab_size=6000)
DRAFT_SHAPE = WideShape(320, 3, 8, 4, 1024, head_dim=64, vocab_size=6000)
NUM_PROMPTS, NUM_TOKENS = 3, 24


@dataclass(frozen=True)
class Spoken:
    """What a pair said, and the share of tested draft tokens that were accepted."""

    token_ids: list[list[int]]
    alpha_hat: float
    num_ids: int


def spoken(target: Checkpoint, draft: Checkpoint) -> Spoken:
    lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    llm = LLM(target, draft=draft, max_seq_len=512, spec_length=5)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    outs = llm.generate([json.loads(line)["text"] for line in lines], params)
    accepted, tested = (sum(getattr(o.report, name) for o in outs) for name in ("num_accepted", "num_tested"))
    return Spoken([o.token_ids for o in outs], accepted / tested, llm.engine.runner.num_ids)


def test_the_widened_pair_says_the_same_at_the_same_acceptance() -> None:
    target, draft = (load_checkpoint(f, dtype="float32", with_tokenizer=True) for f in (SHIPPED_TARGET, SHIPPED_DRAFT))
    narrow = spoken(target, draft)
    wide = spoken(widen_checkpoint(target, TARGET_SHAPE), widen_checkpoint(draft, DRAFT_SHAPE))
    assert wide.token_ids == narrow.token_ids
    assert abs(wide.alpha_hat - narrow.alpha_hat) <= 0.02
    assert (narrow.num_ids, wide.num_ids) == (4096, 6000)
