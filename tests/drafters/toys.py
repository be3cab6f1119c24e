"""Small engines on a toy whose next token depends on the last one alone, for tests of drafters."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.load import MODEL, greedy, run, runner_with, take_steps
from forerun import LLM
from forerun.drafters import Drafter
from forerun.engine.engine import Engine
from forerun.kv.cache import BlockCache
from forerun.models.runner import Runner
from forerun.models.toy import ToyModel, ToyTable
from forerun.pacing.fixed import FixedPacing
from forerun.types import SamplingParams, StepReport

V, SPACE_TOKENS = 24, 64
TOY = ToyModel(V, 4, ToyTable(order=1))


def likeliest(token: int, num: int = 1) -> list[int]:
    """The toy's likeliest tokens behind `token`, best first."""
    return np.argsort(-TOY.logits_after([token]), kind="stable")[:num].tolist()


def engine_of(drafter: Drafter, spec_length: int, num_tokens: int | None = None) -> Engine:
    """An engine on the toy. num_tokens: of its cache."""
    cache = BlockCache.of(TOY, "paged", max_batch_size=3, max_seq_len=SPACE_TOKENS, num_tokens=num_tokens)
    return Engine(Runner(TOY, cache), drafter, FixedPacing(spec_length), max_seq_len=SPACE_TOKENS, max_batch_size=3)


def engine_with(drafter: Drafter, spec_length: int, **options: Any) -> Engine:
    """An engine on a decoder of random weights."""
    return Engine(runner_with(MODEL, 1024), drafter, FixedPacing(spec_length), **{"max_seq_len": 128, **options})


def members_of(target: Any, **options: Any) -> dict[str, Drafter]:
    """Return the drafters of an engine that is opened with these options, by their names."""
    with LLM(target, max_seq_len=64, **options) as llm:
        return dict(llm.engine.drafter.members)


def drafts_of(llm: LLM, kind: type) -> list[tuple[list[int], list[int]]]:
    """A list that fills with what an engine's drafter, of that kind, drafts by itself, and the tokens behind which."""
    drafter = llm.engine.drafter.first
    seen = list[tuple[list[int], list[int]]]()
    assert isinstance(drafter, kind)
    own: Any = drafter
    own_draft = own.own_draft

    def watched(seqs: Any, budget: Any, coins: Any) -> Any:
        draft = own_draft(seqs, budget, coins)
        seen.append((list(seqs[0].tokens), list(draft.tokens)))
        return draft

    own.own_draft, own.search = watched, None
    return seen


def check_drafts(
    target: Path,
    draft: str,
    kind: type,
    guessed: Callable[[list[int], int], list[int]],
    params: SamplingParams,
    ops: str,
) -> int:
    """Assert that an engine says what it says without drafts, and that each draft is what is `guessed` of its length.

    Returns the number of drafts.
    """
    options: dict[str, Any] = {"dtype": "float32", "ops": ops, "max_seq_len": 200}
    prompt = random.Random(3).choices(range(1, 257), k=37)
    with LLM(str(target), draft=draft, pacing="fixed", spec_length=3, **options) as llm:
        seen = drafts_of(llm, kind)
        (out,) = llm.generate([prompt], params)
    with LLM(str(target), draft="none", **options) as plain:
        assert plain.generate([prompt], params)[0].token_ids == out.token_ids
    drafts = [(tokens, draft) for tokens, draft in seen if draft]
    assert [draft for _, draft in drafts] == [guessed(tokens, len(draft)) for tokens, draft in drafts]
    return len(drafts)


def first_drafted(engine: Engine, salt: str | None) -> int:
    """Tokens that the first round of a request drafts."""
    return spoken(engine, [5, 2, 7], cache_salt=salt)[0].num_drafted


def check_salts_never_share(drafter: Drafter) -> None:
    """Of a drafter that shares what it learns and reads no prompt: texts of one salt alone know each other."""
    engine = engine_of(drafter, 3)
    assert first_drafted(engine, "a") == 0
    assert first_drafted(engine, "b") == first_drafted(engine, None) == 0
    assert first_drafted(engine, "a") == first_drafted(engine, "b") == first_drafted(engine, None) == 3


def spoken(engine: Engine, prompt: list[int], max_tokens: int = 20, **params: object) -> list[StepReport]:
    """The reports of the steps that decode one greedy request, which says what the toy says."""
    reports: list[StepReport] = []
    end = engine.listen(reports.append)
    wanted = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **params})  # type: ignore[arg-type]
    (output,) = run(engine, [engine.add(prompt, wanted)])
    end()
    text = [*prompt[-1:], *output]
    assert text[1:] == [likeliest(token)[0] for token in text[:-1]]
    return [report for report in reports if report.num_decoding]


def crowded(drafter: Drafter, spec_length: int = 5) -> int:
    """Serve more requests than the cache has room for, abort one, and return how many were preempted."""
    engine = engine_of(drafter, spec_length, num_tokens=64)
    requests = [engine.add([i, 3, i, 3], greedy(42)) for i in range(5)]
    take_steps(engine, 6)
    engine.abort(requests[0])
    run(engine, requests)
    return engine.scheduler.num_preemptions
