"""Defines the form of an answer: the model's marks, such as <think>, and the constraints of the request.

The marks come from the model's chat template. A tool call goes through four stages: the ToolRequest (what the request
says about tools), the AnswerForm (how the answer is read and constrained), the Grammar (the compiled constraint), and
the GrammarState (the place that one text has reached in the grammar).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from forerun.errors import BadOption, shown
from forerun.params import CONSTRAINTS, Thinking
from forerun.text.call_grammars import ANY, WRITTEN, Rules, Thought, literal
from forerun.text.calls import USUAL, Dialect, dialect, of_template
from forerun.text.declared import Declared
from forerun.text.parts import CallBegin, Reasoning, Scanner, Steps, Text
from forerun.text.tokenizer import Tokenizer
from forerun.text.tools import AUTO, REQUIRED, ToolRequest, Tools
from forerun.types import SamplingParams

# The marks around reasoning, in the families of models that have such marks.
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
)
_PLAIN = SamplingParams()
_TAIL_TOKENS = 16  # the last tokens of a prompt, in which the prompt may open the reasoning


@dataclass(frozen=True)
class AnswerMarks:
    """The marks in one model's answers.

    dialect: how the model writes tool calls; None = not known. thoughts: the opening and closing marks of reasoning.
    template: the text of the chat template. declared: the model's own declaration of how its answers are read; None =
    not given. A declaration takes precedence over dialect and thoughts.
    """

    dialect: Dialect | None
    thoughts: tuple[tuple[str, str], ...]
    template: str = field(default="", repr=False)
    declared: Declared | None = None

    @classmethod
    def of_template(cls, source: str, reads_tools: bool, declared: Declared | None = None) -> AnswerMarks:
        """Return the marks that the chat template `source` uses.

        reads_tools: whether the template knows tools. declared: the model's declaration of how its answers are read.
        """
        known = of_template(source)
        if known is None and reads_tools:
            known = dialect(USUAL)
        return cls(known, tuple(pair for pair in THOUGHTS if pair[1] in source), source, declared)

    @property
    def reads_always(self) -> bool:
        """Whether answers contain the dialect's marks even if the request has no tools."""
        return self.dialect is not None and self.dialect.reads_always

    def with_tools(self, use: ToolRequest | None, max_thinking_tokens: int | None = None) -> AnswerForm | None:
        """Return the AnswerForm of a request with the tools `use`; None if answers to such a request are only text."""
        has_calls = self.reads_always or (self.dialect is not None and use is not None)
        return AnswerForm(self, use, max_thinking_tokens) if has_calls or self.thoughts or self.declared else None


@dataclass(frozen=True)
class AnswerForm:
    """Reads the answers to one request, and constrains them as the request asks.

    tool_request: None = the request has no tools. max_thinking_tokens: the number of reasoning tokens after which the
    reasoning is closed; None = no limit.
    """

    answer_marks: AnswerMarks
    tool_request: ToolRequest | None = None
    max_thinking_tokens: int | None = None

    def constrained(self, params: SamplingParams, tokenizer: Tokenizer, prompt_ids: Seq[int]) -> SamplingParams:
        """Return `params` with a grammar that enforces this form; `params` itself if no such grammar is necessary.

        The grammar forces a call, keeps calls valid, or limits reasoning, as the request asks. A constraint in `params`
        becomes part of the grammar. It applies only after the reasoning, or only inside the channel of the answer if
        the model writes channels. A grammar in Lark's or llama.cpp's form stays unchanged. If the answer must be a
        call, a JSON constraint has no effect, and any other constraint raises BadOption. A limit of the reasoning
        together with a grammar in `params` also raises BadOption.
        """
        special = {tokenizer.token_of(i) or "": i for i in tokenizer.special_ids}
        rules = Rules(special, self.answer_marks.template, {"start": ""})
        try:
            rest = self._rest(rules, params)
        except BadOption:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
            raise BadOption(f"the schema of a tool or of the answer cannot be read ({error}): mend it") from error
        thought = self._thinks(self.begun(tail_of(tokenizer, prompt_ids)))
        limit = self.max_thinking_tokens
        if rest is None and (limit is None or thought is None):
            return params
        grammar: str | Thinking
        if limit is not None and thought is not None:
            opening, closing = _ids(thought, tokenizer, limit)
            grammar = Thinking(opening, closing, limit, "" if rest is None else _closed(rules, rest, thought, closing))
        else:
            assert rest is not None
            rules.rules["start"] = rest if thought is None else _behind(rules, rest, thought)
            grammar = rules.text()
        plain: Any = {name: getattr(_PLAIN, name) for name in (*CONSTRAINTS, "json_whitespace")}
        return dataclasses.replace(params, **{**plain, "grammar": grammar})

    def can_limit(self, tokenizer: Tokenizer) -> bool:
        """Return whether reasoning can be limited: a single token closes reasoning, or the model does not reason."""
        thought = self._thinks(None)
        try:
            return thought is None or bool(_ids(thought, tokenizer, 0))
        except BadOption:
            return False

    def _thinks(self, begun: str | None) -> Thought | None:
        """Return the marks around the answer's reasoning; None if the answer contains no reasoning.

        begun: the result of the method `begun` for the prompt.
        """
        if begun == "":
            return None
        if self.dialect is not None and self.dialect.thought is not None:
            return self.dialect.thought
        if begun is not None:
            return Thought((), begun)
        return next((Thought((opening,), closing) for opening, closing in self.answer_marks.thoughts), None)

    def _rest(self, rules: Rules, params: SamplingParams) -> str | None:
        """Return the grammar rule for the answer after its reasoning; None if the request adds no constraint.

        Raises BadOption for constraints that exclude one another.
        """
        use, one, limit = self.tool_request, self.dialect, self.max_thinking_tokens
        says = None if one is None else one.says
        if use is not None and use.is_forced:
            if params.regex is not None or params.choice or params.grammar is not None:
                raise BadOption(f"tool_choice={shown(use.choice)} and a grammar for the answer: drop one of them")
        elif params.constraint is not None:
            if params.grammar is not None and limit is not None:
                raise BadOption(f"max_thinking_tokens={limit} and a grammar for the answer: drop one of them")
            # Calls without a mark cannot be told from the answer, so that only the answer is allowed.
            may_call = use is not None and one is not None and (says is not None or one.is_marked(rules))
            if params.grammar is not None or not (self.answer_marks.thoughts or says or may_call):
                return None
            answer = _answer(rules, params)
            if may_call:
                return self._calls(rules, answer)
            return answer if one is None or says is None else one.around(rules, says(rules, answer))
        if use is not None and one is not None and (use.is_forced or use.strict):
            return self._calls(rules)
        return None

    def _calls(self, rules: Rules, answer: str = "") -> str:
        """Return the grammar rule for an answer that must or may call tools.

        answer: the rule for an answer without calls; '' = any text.
        """
        use, one = self.tool_request, self.dialect
        assert use is not None
        assert one is not None
        tools = use.tools if use.choice in (AUTO, REQUIRED) else use.tools.only(use.choice)
        if not use.is_forced:
            tools = Tools({name: tools.schemas[name] if name in use.strict else ANY for name in tools})
        may_say = not use.is_forced
        return rules.add(one.grammar(rules, tools, parallel=use.parallel, may_say=may_say, answer=answer))

    def begun(self, prompt: str) -> str | None:
        """Return the mark that closes the reasoning, if the end of a prompt opens the reasoning.

        Returns None if the prompt opens no reasoning. Returns '' if the prompt also closes the reasoning, so that the
        answer contains none.
        """
        end = prompt.rstrip()
        for opening, closing in self.answer_marks.thoughts:
            if end.endswith((opening.strip(), closing)):
                return "" if end.endswith(closing) else closing
        return None

    @property
    def tools(self) -> Tools:
        """The tools that an answer may call."""
        return Tools({}) if self.tool_request is None else self.tool_request.tools

    @property
    def dialect(self) -> Dialect | None:
        """The dialect of the calls that the answer may contain; None if calls are not looked for."""
        candidate = self.answer_marks.dialect
        return (
            candidate if candidate is not None and (self.tool_request is not None or candidate.reads_always) else None
        )

    @cached_property
    def marks(self) -> frozenset[str]:
        """The marks of calls and of reasoning that are looked for in the answer."""
        call_marks = () if self.dialect is None else self.dialect.marks
        return frozenset((*call_marks, *(mark.strip() for pair in self.answer_marks.thoughts for mark in pair)))

    def steps(self, scan: Scanner, prompt: str) -> Steps:
        """Yield an answer as pieces of text, reasoning and calls. prompt: the text at the end of the prompt."""
        if (declared := self.answer_marks.declared) is not None:
            yield from declared.read(scan, self.tools, prompt)
            return
        yield from self._thought(scan, prompt)
        if self.dialect is not None:
            yield from self.dialect.read(scan, self.tools)
        yield from scan.until((), Text)

    def scanner(self) -> Scanner:
        """Return a new scanner for `steps`. The scanner keeps the marks of calls out of the text for the user."""
        return Scanner(self.dialect.marks if self.dialect is not None and self.answer_marks.declared is None else ())

    def _thought(self, scan: Scanner, prompt: str) -> Steps:
        """Yield the reasoning at the beginning of an answer. The prompt may already contain the opening mark.

        In some dialects a call ends the reasoning, too, unless a grammar requires the closing mark.
        """
        thoughts = dict(self.answer_marks.thoughts)
        if not thoughts:
            return
        closing = self.begun(prompt)
        if closing == "":
            return
        if closing is None:
            before = yield from scan.space()
            mark = yield from scan.skip(*thoughts, *thoughts.values())
            if mark is None:
                yield Text(before)
            if mark not in thoughts:
                return
            closing = thoughts[mark]
        opening = self.dialect.opening if self.dialect is not None and self.dialect.ends_thought else ()
        if self.max_thinking_tokens is not None or (
            self.tool_request is not None and (self.tool_request.is_forced or self.tool_request.strict)
        ):
            opening = ()  # a grammar asks for the mark
        while (mark := (yield from scan.until((closing, *opening), Reasoning))) not in (None, closing):
            if (yield from self._is_call(scan, mark)):
                scan.rest = mark + scan.rest
                return
            yield Reasoning(mark)

    def _is_call(self, scan: Scanner, mark: str) -> Steps:
        """Return whether a call begins with `mark`, which was already consumed.

        Also returns True if the answer ends before the question is decided. The text after the mark is only read ahead,
        not consumed.
        """
        assert self.dialect is not None
        ahead, num_read = Scanner(), 0
        ahead.rest = mark
        for part in self.dialect.read(ahead, self.tools):
            if part is not None:
                if isinstance(part, CallBegin):
                    return True
                if isinstance(part, Text | Reasoning) and part.text:
                    return False
                continue
            if num_read == len(scan.rest) and not scan.is_closed:
                yield None
            ahead.rest += scan.rest[num_read:]
            num_read = len(scan.rest)
            ahead.is_closed = scan.is_closed
            ahead.is_cut = scan.is_cut
        return True


def _behind(rules: Rules, rest: str, thought: Thought) -> str:
    """Return the grammar rule for an answer that may begin with reasoning.

    The reasoning is optional unless the prompt has already opened it. rest: the rule for the answer after the
    reasoning.
    """
    opening = " ".join(map(rules.mark, thought.opening))
    reasoning = f"{opening} {rules.up_to(thought.closing)} {_between(rules, thought)}"
    return f"({reasoning})? {rest}" if opening else f"{reasoning} {rest}"


def _closed(rules: Rules, rest: str, thought: Thought, closing: int) -> str:
    """Return the grammar of an answer from the token that closes the reasoning on, this token included.

    If the prompt has not opened the reasoning, the grammar also allows an answer that consists of `rest` alone. rest:
    the rule for the answer after the reasoning. closing: the id of the token that closes the reasoning.
    """
    behind = f"<[{closing}]> {_between(rules, thought)} {rest}"
    rules.rules["start"] = f"({rest}) | {behind}" if thought.opening else behind
    return rules.text()


def _between(rules: Rules, thought: Thought) -> str:
    """Return the grammar rule for the text between the reasoning and the rest of the answer."""
    return " ".join(map(rules.mark, thought.rest)) or "/[ \\n]{0,4}/"


def _ids(thought: Thought, tokenizer: Tokenizer, limit: int) -> tuple[tuple[int, ...], int]:
    """Return the token ids that open the reasoning, and the token id that closes it.

    Raises BadOption for a mark of several tokens that does not begin with a special token, because no single token
    could close the reasoning. limit: max_thinking_tokens, for the message.
    """
    for mark in (*thought.opening[:1], thought.closing):
        ids = tokenizer.encode(mark.strip(), False)
        if len(ids) != 1 and ids[0] not in tokenizer.special_ids:
            raise BadOption(
                f"max_thinking_tokens={limit} is not possible: {mark!r} is no single token of this model, so its "
                "reasoning cannot be closed by one; leave it out"
            )
    return tuple(tokenizer.encode("".join(thought.opening).strip(), False)), ids[0]


def tail_of(tokenizer: Tokenizer, prompt_ids: Seq[int]) -> str:
    """Return the text of a prompt's last tokens, special tokens included."""
    return tokenizer.decode(list(prompt_ids[-_TAIL_TOKENS:]))


def _answer(rules: Rules, params: SamplingParams) -> str:
    """Return the grammar rule for an answer that satisfies the constraint in the parameters."""
    if params.regex is not None:
        slash = "\\/"
        return f"/{params.regex.replace(slash, '/').replace('/', slash)}/"
    if params.choice:
        return f"({' | '.join(map(literal, params.choice))})"
    schema = {"type": "object"} if params.json_schema is None else json.loads(str(params.json_schema))
    schema = schema if isinstance(schema, dict) else {"anyOf": [schema]}
    return rules.json(schema, WRITTEN[params.json_whitespace])
