"""A served model, as every API's list of models reads it."""

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
    """Return a model's chat templates as text; "" where none can be read, which chats then report."""
    try:
        return service.llm.chat_template.text
    except UserError:
        return ""
