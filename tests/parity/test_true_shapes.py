"""The pair of Llama 3.2 1B and 3B at its true shapes (widened small models, 9 GB): what D10's last three tests ask."""

from functools import cache
from typing import Any

import pytest

from engine.speculative_cases import continuous_batching, e2e, greedy_parity
from forerun import LLM
from forerun.bench.widen import shape_named, write_widened
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.models.opened import spec_of

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    folder = tmp_path_factory.mktemp("true shapes")
    loaded = []
    for source, shape in ((SHIPPED_TARGET, "llama-3.2-3b"), (SHIPPED_DRAFT, "llama-3.2-1b")):
        write_widened(source, folder / shape, shape_named(shape, spec_of(source)))
        loaded.append(load_checkpoint(folder / shape, dtype="bfloat16", with_tokenizer=True))
        for file in (folder / shape).glob("*.safetensors"):
            file.unlink()  # packed by now, and gigabytes on the disk
    return loaded[0], loaded[1]


@pytest.fixture(scope="module")
def make(pair: tuple[Checkpoint, Checkpoint]) -> Any:
    @cache
    def made(**options: Any) -> LLM:
        target, draft = pair
        drafted = {} if options.get("use_speculative_decoding") is False else {"draft": draft}
        return LLM(target, **{"max_seq_len": 512, "max_batch_size": 4, **drafted, **options})

    return made


def test_speculative_greedy_parity(make: Any) -> None:
    greedy_parity(make, 16)


def test_speculative_e2e(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    e2e(make, 24, caplog)


def test_speculative_with_continuous_batching(make: Any) -> None:
    continuous_batching(make, 12)
