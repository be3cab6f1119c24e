"""A served model, as the APIs describe it in their lists of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from forerun.errors import UserError

if TYPE_CHECKING:
    from forerun.engine.llm import LLM


class Served(Protocol):
    """A model that answers under a name."""

    @property
    def name(self) -> str: ...
    @property
    def llm(self) -> LLM: ...


def template_of(service: Served) -> str:
    """Return a model's chat templates as text; "" where they cannot be read. A chat request then gets the error."""
    try:
        return service.llm.chat_template.text
    except UserError:
        return ""
