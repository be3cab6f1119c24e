"""Turns a conversation into one text by a chat template, in the format that the chat model was trained on.

Templates, variables and the resulting text are the same as in transformers' `apply_chat_template`. Some input is
refused that transformers would silently drop or misprint: tools for a template that does not know tools, a variable
that the template does not read, and a role that no template knows. If a template takes content only as text, content in
parts is joined to one text. The arguments of calls get the form that the template takes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import BadOption, UnsupportedModel, shown
from forerun.registry import unknown
from forerun.text.answer_form import AnswerMarks
from forerun.text.declared import KEY, Declared
from forerun.text.messages import call_forms, copy_documents, copy_messages, copy_tools, plain, with_texts
from forerun.text.small_files import SmallFiles
from forerun.text.template_files import CONFIG, DEFAULT, Source, find_sources, special_tokens
from forerun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from forerun.text.sandbox import CompiledTemplate

LOG = logging.getLogger(__name__)
ROLES = ("assistant", "developer", "function", "system", "tool", "user")  # roles that any template may print
TOOL_USE = "tool_use"  # the name of the template for conversations with tools, where there are several
MARK = "FORERUN_END_OF_MESSAGE "  # marks a message's end in the text; the space shows whether the template trims


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of one model, and the special tokens they may write, such as {"bos_token": "<s>"}."""

    templates: Mapping[str, CompiledTemplate]
    special_tokens: Mapping[str, str]
    response_template: Any = None  # of tokenizer_config.json: how answers are to be read (declared.py)

    @classmethod
    def load(cls, folder: str | Path, file: str | Path | None = None) -> ChatTemplate:
        """Find and compile the templates of a checkpoint folder, or the template in `file`; see `template_files`.

        Raises NotFound if there is no template, and UnsupportedModel for a template that cannot be read or compiled.
        """
        small = SmallFiles(Path(folder))
        return cls.of(small, find_sources(small, None if file is None else Path(file)), is_own=file is None)

    @classmethod
    def of(cls, small: SmallFiles, sources: Mapping[str, Source], *, is_own: bool) -> ChatTemplate:
        """Compile the templates in `sources` (name -> Source). Raises UnsupportedModel.

        is_own: whether the templates come from the checkpoint itself. If so, the checkpoint's response template is
        used, too.
        """
        from forerun.text.sandbox import compile_template  # imported here, so that Jinja is imported only for chats

        templates = {name: compile_template(source.text, source.where) for name, source in sources.items()}
        response = small.json(CONFIG).get(KEY) if is_own else None
        return cls(templates, special_tokens(small), response)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the templates, sorted. A single template is named "default"."""
        return tuple(sorted(self.templates))

    @property
    def reads(self) -> frozenset[str]:
        """The variables that the templates look up."""
        return frozenset().union(*(template.reads for template in self.templates.values()))

    @property
    def text(self) -> str:
        """The texts of all templates, one below the other."""
        return "\n".join(template.source for template in self.templates.values())

    @cached_property
    def answer_marks(self) -> AnswerMarks:
        """The marks of reasoning and tool calls in answers of this model."""
        declared: Declared | None = None
        if self.response_template is not None:
            try:
                declared = Declared.of(self.response_template)
            except UnsupportedModel as error:  # the marks in the template are still known
                LOG.warning("%s; answers are read by the marks in the chat template", error)
        reads_tools = "tools" in self.reads or TOOL_USE in self.templates
        return AnswerMarks.of_template(self.text, reads_tools, declared)

    def render(
        self,
        messages: Seq[Mapping[str, Any]],
        /,
        *,
        tools: Seq[Mapping[str, Any]] | None = None,
        documents: Seq[Mapping[str, Any]] | None = None,
        name: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation. The arguments are not changed.

        Args:
            messages: each with "role", and "content" or "tool_calls"; arguments of calls are mappings or JSON texts.
            tools: JSON schemas of functions that the model may call.
            documents: mappings with "title" and "text", for templates that know documents.
            name: the template's name, if there are several; None = "tool_use" if there are tools, else "default".
            add_generation_prompt: end with the header of the model's answer; None = not continue_final_message.
            continue_final_message: end right after the last message's text, so that the model continues this text.
            variables: further variables that the template reads, such as enable_thinking; they override special tokens.

        Raises BadOption for input that cannot be honoured or that the template refuses, and UnsupportedModel if the
        template fails.
        """
        if add_generation_prompt and continue_final_message:
            raise BadOption("add_generation_prompt and continue_final_message exclude one another: set one of them")
        conversation = copy_messages(messages)
        lists = {"tools": copy_tools(tools), "documents": copy_documents(documents)}
        template = self.templates[self._choose(name, tools)]
        _check_roles(template, conversation)
        _check_reads(template, [*variables, *(key for key, value in lists.items() if value)], self.special_tokens)
        final = _mark_end(conversation[-1]) if continue_final_message else None
        add = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        given = {**self.special_tokens, **plain(variables, "variables"), **lists}
        text = _with_calls(template, {**given, "add_generation_prompt": add}, conversation)
        return text if final is None else _cut(text, final)

    def encode(self, tokenizer: Tokenizer, messages: Seq[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Return the token ids of the text that `render(messages, **options)` returns.

        The tokenizer adds no special tokens, because a template writes the beginning-of-sequence token itself. Names of
        special tokens in the messages become these tokens, as in transformers.
        """
        return tokenizer.encode(self.render(messages, **options), add_special_tokens=False)

    def _choose(self, name: str | None, tools: object) -> str:
        if name is not None:
            if name not in self.templates:
                raise BadOption(f"there is no chat template {shown(name)}: it must be one of {list(self.names)}")
            return name
        if tools is not None and TOOL_USE in self.templates:
            return TOOL_USE
        if DEFAULT not in self.templates:
            raise BadOption(f"no chat template of this model is the default: choose one of {list(self.names)} by name")
        return DEFAULT


def _check_reads(template: CompiledTemplate, names: Iterable[str], special_tokens: Iterable[str]) -> None:
    """Raise BadOption for a name that the template does not look up."""
    known = template.reads - {"messages", "add_generation_prompt"}
    unread = sorted(set(names) - known)
    if unread:
        others = sorted(known - set(special_tokens))
        raise BadOption(
            f"this model's chat template does not read {shown(unread[0])}, so it would have no effect: leave it out "
            f"(it reads {', '.join(others) or 'the messages alone'})"
        )


def _check_roles(template: CompiledTemplate, messages: Seq[Mapping[str, Any]]) -> None:
    """Raise BadOption for an unusual role that the template does not name.

    Otherwise the template might print the role without an error.
    """
    for i, message in enumerate(messages):
        if message["role"] not in ROLES and message["role"] not in template.texts:
            raise BadOption(f"messages[{i}]: {unknown('role', message['role'], ROLES)}")


def _with_calls(template: CompiledTemplate, variables: Mapping[str, Any], messages: Seq[Mapping[str, Any]]) -> str:
    """Render a conversation, and return the text. Try each form of its tool calls until the template takes a form.

    Raises the first error if the template takes no form.
    """
    first: BadOption | UnsupportedModel | None = None
    for form in call_forms(messages):
        try:
            text = _rendered(template, variables, form)
        except (BadOption, UnsupportedModel) as error:
            first = first or error
            continue
        if not any(repr(given) in text for given in _arguments(form)):
            return text
    raise first or BadOption(
        "this model's chat template prints the arguments of tool calls as Python does: leave them out"
    )


def _arguments(messages: Seq[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield the arguments of each call, if they are a mapping that Python prints differently from JSON."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            given = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(given, dict) and repr(given) != json.dumps(given, ensure_ascii=False):
                yield given


def _rendered(template: CompiledTemplate, variables: Mapping[str, Any], messages: Seq[Mapping[str, Any]]) -> str:
    """Render a conversation, and return the text. If the template takes no content in parts, join the parts.

    Such a template fails, prints the parts as Python does, or leaves out some parts. Raises BadOption for other content
    that the template prints as Python does.
    """
    if (texts := with_texts(messages)) is not None:
        try:
            text = template.render({**variables, "messages": messages})
        except (BadOption, UnsupportedModel):
            messages = texts
        else:
            parts = [
                part["text"].strip()
                for message, flattened in zip(messages, texts, strict=True)
                if message.get("content") != flattened.get("content")
                for part in message["content"]
            ]
            if _printed(text, messages) is None and all(part in text for part in parts):
                return text
            messages = texts
    text = template.render({**variables, "messages": messages})
    if (i := _printed(text, messages)) is not None:
        raise BadOption(
            f"this model's chat template takes content as a text, and messages[{i}].content is "
            f"{shown(messages[i]['content'])}: give it as one text"
        )
    return text


def _mark_end(message: dict[str, Any]) -> str:
    """Append MARK to a message's text in place, and return the text without MARK.

    Raises BadOption if the message has no text.
    """
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + MARK
            return text
    raise BadOption("continue_final_message=True is not possible: the last message has no text to be continued")


def _cut(text: str, final: str) -> str:
    """Return the text before MARK, without white space before MARK if the template trims messages.

    final: the text of the last message. Raises BadOption if the template has left out the message or parts of it.
    """
    end = text.rfind(MARK.strip())
    if end < 0 or final.strip() not in text:
        raise BadOption(
            "continue_final_message=True is not possible: the chat template leaves out the last message or parts of it"
        )
    return text[:end] if text.startswith(MARK, end) else text[:end].rstrip()


def _printed(text: str, messages: Seq[Mapping[str, Any]]) -> int | None:
    """Return the index of the first message whose content was printed in Python's notation; None if no content was.

    Only content that is a list or mapping can be printed in this way.
    """
    for i, message in enumerate(messages):
        content = message.get("content")
        if not content or not isinstance(content, list | dict):
            continue
        if repr(content) in text and repr(content) != json.dumps(content, ensure_ascii=False):
            return i
    return None
