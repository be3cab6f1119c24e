"""An LLM that is closed, and what help() says of the public dataclasses."""

import dataclasses
import gc
import weakref
from pathlib import Path

import pytest

from forerun import LLM, BadOption, Chunk, EngineConfig, RequestOutput, SamplingParams
from tiny import write_tiny


def test_a_closed_llm_has_ended_its_requests_and_let_go_of_its_weights(tmp_path: Path) -> None:
    with LLM(write_tiny(tmp_path / "tiny"), draft="none") as llm:
        (request,) = llm.submit([5, 6, 7], SamplingParams(max_tokens=None, ignore_eos=True))
        weights = weakref.ref(llm.checkpoint.model)
        cache = llm.engine.runner.cache
    assert request.seq.finish_reason is not None
    assert cache.length(request.seq.id) == 0
    del cache
    gc.collect()
    assert weights() is None
    llm.close()
    assert repr(llm) == "<LLM, closed>"
    for use in (
        lambda: llm.generate([5]),
        lambda: next(llm.stream([5])),
        lambda: llm.listen(print),
        lambda: llm.drafters,
    ):
        with pytest.raises(BadOption, match="this LLM is closed: make another one"):
            use()
    with pytest.raises(AttributeError, match="nothing"):
        _ = llm.nothing  # type: ignore[attr-defined]


def test_help_says_what_each_field_is() -> None:
    for cls in (SamplingParams, EngineConfig, RequestOutput, Chunk):
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            starts = f"{field.name}:", f"{field.name},"
            line = next(line for line in str(cls.__doc__).splitlines() if line.strip().startswith(starts))
            assert len(line.split()) > 2, field.name
