"""What the lists of models of every API read of one that is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from forerun.engine.llm import LLM


class Served(Protocol):
    """A model that answers under a name."""

    @property
    def name(self) -> str: ...
    @property
    def llm(self) -> LLM: ...
