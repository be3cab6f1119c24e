"""Defines how the APIs see a served model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from forerun.errors import UserError

if TYPE_CHECKING:
    from forerun.engine.llm import LLM


class Served(Protocol):
    """A model that the server serves under a name."""

    @property
    def name(self) -> str: ...
    @property
    def llm(self) -> LLM: ...


def template_of(service: Served) -> str:
    """Return a model's chat templates as text; "" if they cannot be read. Chat requests then get the error."""
    try:
        return service.llm.chat_template.text
    except UserError:
        return ""
