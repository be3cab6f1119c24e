"""Mixed requests for one engine, and the same requests alone, whose outputs must be equal."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from forerun import LLM, blocks, pacing
from forerun.drafters import Drafter
from forerun.drafters.lookup import LookupDrafter, Options as LookupOptions
from forerun.drafters.model import Options
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.router import Router
from forerun.engine.turns import Turns
from forerun.kv.cache import BlockCache
from forerun.kv.disk import Folder, weights_digest
from forerun.kv.keeping import Keeper
from forerun.models.runner import Runner
from forerun.ops.cpu.model import CpuModel
from forerun.ops.torch import TorchModel
from forerun.pacing import Pacing
from forerun.types import SamplingParams
from speculation import mode, pacing_of
from support import VOCAB, heard, noisy_copy, random_decoder

__all__ = ["heard"]  # the tests take it from here, too

MODEL = random_decoder(3, row_by_row=True, layers=1, hidden=16)
DRAFT = noisy_copy(MODEL, 7)


def runner_with(
    model: TorchModel | CpuModel,
    num_tokens: int,
    backend: str = "paged",
    prefix_caching: bool = True,
    folder: Folder | None = None,
) -> Runner:
    """A runner whose cache holds so many tokens in all. folder: where its blocks are kept on disk."""
    sizes = {"max_batch_size": 8, "max_seq_len": 128, "num_tokens": num_tokens}
    cache = BlockCache.of(model, backend, prefix_caching=prefix_caching, **sizes)
    if folder is not None:
        about = [blocks.weights(model.config), weights_digest(model.stored())]
        cache.keep_on_disk(Keeper(cache.pools, folder.shelf(about, cache.record_bytes)))
    return Runner(model, cache)


def engine_with(
    num_tokens: int = 1024, *, spec_length: int | None = None, policy: str | Pacing | None = None, **options: Any
) -> Engine:
    """A target and a draft model with caches of so many tokens, and lookup beside them.

    With speculation off, requests that choose no drafter are decoded plainly. policy: None = that of speculation.py.
    folder: where both keep their blocks on disk. model, draft_model: None = MODEL and DRAFT.
    """
    paced = pacing_of(spec_length) if policy is None else policy
    kept = options.pop("backend", "paged"), options.pop("prefix_caching", True), options.get("folder")
    drafting = ModelDrafter(runner_with(options.pop("draft_model", DRAFT), num_tokens, *kept), Options())
    members = {"model": drafting, "lookup": LookupDrafter(LookupOptions())}
    return Engine(
        runner_with(options.pop("model", MODEL), num_tokens, *kept),
        Router({"none": Drafter(), **members} if mode() == "off" else members),
        pacing.make(paced, spec_length) if isinstance(paced, str) else paced,
        **{"max_seq_len": 128, "turns": Turns(), **options},
    )


def named(llm: LLM, beginning: str) -> str:
    """Return the name of the engine's drafter whose name begins so."""
    return next(name for name in llm.drafters if name.startswith(beginning))


def mixed(seed: int, num_requests: int, longest: int = 60) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, some of which begin alike, with every kind of sampling, drafter and length; greedy or seeded."""
    random_ = random.Random(seed)
    heads = [[random_.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    made = []
    for i in range(num_requests):
        own = [random_.randrange(VOCAB) for _ in range(random_.randint(1, 20))]
        prompt = random_.choice(heads)[: random_.randint(0, 40)] + own
        params: dict[str, Any] = {
            "max_tokens": random_.randint(1, longest),
            "temperature": random_.choice((0.0, 0.7, 1.2)),
            "seed": i,
            "draft": random_.choice((None, "none", "lookup", "model")),
            "spec_length": random_.choice((None, 1, 3, 9)),
            "priority": random_.choice((0, 0, 1)),
        }
        if random_.random() < 0.3:
            params |= {"top_k": 7, "top_p": 0.9, "repetition_penalty": 1.2}
        made.append((prompt, SamplingParams(**params)))
    return made


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Return the parameters of a greedy request."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)


def plain(max_tokens: int = 2, **more: Any) -> SamplingParams:
    """Return the parameters of a greedy request without drafts that no id of the model ends."""
    return greedy(max_tokens, **{"ignore_eos": True, "draft": "none", **more})


def run(engine: Engine, requests: list[Request], max_steps: int = 100_000) -> list[list[int]]:
    """Step until all are finished; the caches are sound after every step."""
    for _ in range(max_steps):
        if all(request.seq.finish_reason is not None for request in requests):
            return [request.seq.output_ids for request in requests]
        engine.step()
        check(engine)
    raise AssertionError("the requests did not finish")


def take_steps(engine: Engine, num: int) -> None:
    """Step so many times."""
    for _ in range(num):
        engine.step()


def at_work(engine: Engine, *requests: Request) -> None:
    """Step until all of them decode."""
    while not all(request.report.num_steps for request in requests):
        engine.step()


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    give_up_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def interrupt(engine: Engine, requests: list[Request], at: Request) -> None:
    """Step until tokens of one request are to be committed, and interrupt that step as Ctrl-C would."""
    kind: Any = type(at)
    commit = kind.commit

    def interrupted(self: Request, *arguments: Any) -> Any:
        if self is at:
            raise KeyboardInterrupt
        return commit(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine, requests)


def check(engine: Engine) -> None:
    """Check that no cache lost a block or holds more than the committed tokens, and that the last pass had its room."""
    for cache in caches(engine):
        cache.check_integrity()
    assert not engine.scheduler._is_full, "a pass had less room than was counted"
    for request in engine.scheduler.running:
        assert engine.runner.cache.length(request.seq.id) <= len(request.seq.tokens) - 1


def assert_empty(*caches: BlockCache) -> None:
    """Every block of these caches is there, and free."""
    for cache in caches:
        cache.check_integrity()
        assert cache.free_tokens() == cache.num_blocks * cache.block_tokens


def caches(engine: Engine) -> list[BlockCache]:
    """Return the caches of the target and of its drafters."""
    runners = [getattr(drafter, "runner", None) for drafter in engine.drafter.members.values()]
    return [engine.runner.cache, *(runner.cache for runner in runners if runner is not None)]


def alone(wanted: list[tuple[list[int], SamplingParams]], **options: Any) -> list[list[int]]:
    """Run each request alone, without drafts, neighbours, or shared prefixes. options: of `engine_with`."""
    outputs = []
    for prompt, params in wanted:
        engine = engine_with(**{**options, "prefix_caching": False})
        outputs += run(engine, [engine.add(prompt, SamplingParams(**{**vars(params), "draft": "none"}))])
    return outputs
