"""Checks the fields of request bodies for all APIs, and defines the Job that a body becomes.

The policy is the same as for checkpoints: a field that would change the answer, but is not supported, is refused by
name. Each API defines how its fields are treated (fields.py), and every other field is refused. A field that is null
counts as absent. Some agents always send unsupported fields. So a server may be set to ignore such fields and to name
the ignored fields in the answer (`Given.ignored`).

This module needs no web framework, file or clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forerun.errors import BadOption, CapacityError, ForerunError, PromptTooLong, UserError, shown
from forerun.models.named import there
from forerun.params import CONSTRAINTS
from forerun.registry import by_name, unknown
from forerun.serve.fields import (
    EVERYWHERE,
    MAX_CHOICES,
    MOST_ENTRIES,
    MOST_TEXT_CHARS,
    MOST_TEXTS_CHARS,
    PARAMS,
    SHARED,
    SHORT_TEXTS,
    SPECULATION,
    Field,
    Fields,
)
from forerun.serve.refused import Refused as Refused
from forerun.serve.schemas import check_schema, whole
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.request import RequestOutput
    from forerun.text.answer_form import AnswerForm
    from forerun.text.tools import ToolRequest

Body = Mapping[str, Any]
Prompt = str | list[int]
Message = Mapping[str, Any]

LATEST = ":latest"  # a tag that Ollama's clients append to a name without a tag
OFF = {"top_k": 0, "seed": None, "max_tokens": None}  # what -1 means for these fields: clients of other servers send it
NO_CALLS = "tools are described by `tools`, and chosen by `tool_choice`"
ONE_ANSWER = "this API gives one answer"
# Names that a chat template's variables cannot have: they are parameters of LLM.apply_chat_template.
_NO_VARIABLES = ("self", "messages", "tools", "documents", "name", "add_generation_prompt", "continue_final_message")
_REPORTED = ("num_steps", "num_drafted", "num_tested", "num_accepted", "num_emitted")
_GRAMMARS = (*CONSTRAINTS, "a JSON schema", "the grammar or schema")  # how errors of the engine call a grammar
_MAY_BE_IGNORED = ("unknown_parameter", "unsupported_parameter")


@dataclass(frozen=True)
class Form:
    """The fields of the bodies of one route.

    own: the fields of this route alone. Every route also has the fields in EVERYWHERE. A route whose answers a model
    writes also has the fields in SHARED. A field in `own` replaces a field with the same name in EVERYWHERE or SHARED.
    elsewhere: fields that only a similar route has -> the url of that route. other_names: other names that some clients
    give to fields -> our names. grammars: paths of the route's own fields that may hold a grammar or a schema for the
    answer. is_of_an_answer: whether a model writes the route's answers.
    """

    url: str
    own: Fields
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    grammars: tuple[str, ...] = ()
    is_of_an_answer: bool = True

    @property
    def fields(self) -> Fields:
        """All fields that a body may have: name -> Field."""
        return {**EVERYWHERE, **(SHARED if self.is_of_an_answer else {}), **self.own}

    def grammar_field(self, given: Body) -> str | None:
        """Return the path of the body's field that holds a grammar or a schema; None if no field does."""
        for path in (*self.grammars, *CONSTRAINTS):
            name, _, inner = path.partition(".")
            value = given.get(name)
            if value.get(inner) if inner and isinstance(value, Mapping) else value:
                return path
        return None

    def named(self, body: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return a body in which fields with other names (other_names) have our names.

        If a body has a field under both names, the value under our name is kept.
        """
        others = {ours: body[other] for other, ours in self.other_names.items() if other in body}
        return {**others, **{name: value for name, value in body.items() if name not in self.other_names}}


@dataclass(frozen=True)
class Job:
    """The work that one body asks for: params.n answers to a conversation (messages), or else to each prompt."""

    url: str
    model: str  # as the answer names it
    params: SamplingParams
    prompts: tuple[Prompt, ...] = ()
    suffix: str | None = None  # the text after the gap that is to be filled in; None = there is no gap
    messages: list[Message] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    continue_final_message: bool = False  # the last message is the beginning of the answer
    add_generation_prompt: bool | None = None  # None = as the template's own default here
    stream: bool = False
    include_usage: bool = False  # at the end of a stream
    continuous_usage: bool = False  # also the usage so far, with each chunk
    report: bool = False  # whether the body asks how speculation went
    token_ids: bool = False  # whether the body asks for the ids of prompts and answers
    ignored: tuple[str, ...] = ()  # names of fields that were ignored
    given: Mapping[str, Any] = field(default_factory=dict)  # fields of the body that the answer needs
    tools: ToolRequest | None = None
    effort: str | None = None  # how long the model is to think, as a word
    max_thinking_tokens: int | None = None  # limit of the reasoning
    thinks: bool | None = None  # whether the model thinks at all; None = as it usually does
    items: bytes | None = None  # of /v1/responses: the input as a JSON list, where the response is kept
    echo: bool = False  # whether the answer repeats the prompt
    context: tuple[str, int] | None = (
        None  # the field that says how large a context the client counts on, and its tokens
    )
    thinking_wish: str | None = None  # the body's name for max_thinking_tokens, where this limit need not be kept
    without_template: str | None = None  # the prompt in place of messages, where the model has no chat template
    answer_form: AnswerForm | None = None  # tells the parts of the answer apart
    # The path of the body's field that holds a grammar or a schema. Only errors have it, so two jobs that differ in it
    # alone are the same.
    grammar_field: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.stream and self.params.searches:
            raise Refused("stream=True is not possible with beams: which text is best is known at the end", "stream")

    def refusal(self, error: ForerunError) -> ForerunError:
        """Return the error to report. An error about a grammar becomes a Refused that names the body's field.

        If the tools and the answer both have schemas, `error` is returned unchanged, because it does not say which is
        wrong.
        """
        tools, field = self.tools, self.grammar_field
        if tools is None or not (tools.strict or tools.is_forced):
            return of_grammar(error, field)
        return error if field is not None else of_grammar(error, "tools")

    @property
    def num_choices(self) -> int:
        """The number of choices that the body asks for, over all prompts."""
        return self.params.n * (len(self.prompts) if self.messages is None else 1)


@dataclass(frozen=True)
class Given:
    """The honoured fields of a body, without fields that are null. body: the whole body.

    ignored: the names of the fields that were ignored. ignores: whether unsupported fields are ignored instead of
    refused.
    """

    fields: dict[str, Any]
    ignored: list[str]
    ignores: bool
    body: Mapping[str, Any]

    def ignore(self, refusal: Refused) -> None:
        """Add the refused field to `ignored`. Raises `refusal` itself if the field may not be ignored."""
        if not self.ignores or refusal.code not in _MAY_BE_IGNORED:
            raise refusal
        self.ignored.append(str(refusal.param))


# --------------------------------------------------------------------------------------------------------- requests


def check(form: Form, body: object, served_names: Seq[str] = (), *, ignore_unsupported: bool = False) -> Given:
    """Check the fields of a body, and return the honoured fields. Raises Refused, naming the field at fault.

    served_names: the names that the body may give the model; () = any name.
    """
    if not isinstance(body, Mapping):
        raise Refused(f"the body is {shown(body)}: it must be a JSON object")
    body, fields = form.named(body), form.fields
    given = Given({}, [], ignore_unsupported, body)
    for name, value in body.items():
        known = fields.get(name)
        if value is None or (known is not None and known.inert):
            continue
        try:
            if known is None:
                raise _unknown(form, name, fields.keys())
            value = value if known.schema is None else whole(value, known.schema)
            check_value(name, value, known)
        except Refused as error:
            given.ignore(error)
            continue
        if known.is_noted and value:
            given.ignored.append(name)
        elif known.schema is not None:
            given.fields[name] = value
    for name, known in fields.items():
        if known.is_required and name not in given.fields:
            raise Refused(f"there is no {name}: {known.why}", name)
    _check_model(given.fields, served_names)
    return given


def _unknown(form: Form, name: str, known: Collection[str]) -> Refused:
    if name in form.elsewhere:
        message = f"{name} is a field of {form.elsewhere[name]}, not of {form.url}"
    else:
        message = by_name(name, known, "the engine") or unknown("field", name, known)
    return Refused(message, name, code="unknown_parameter")


def check_value(name: str, value: Any, field: Field) -> None:
    """Raise Refused for a value that a field does not permit."""
    if field.schema is not None and not field.is_read:
        check_schema(name, value, field.schema)
    _check_value(name, value, field)


def _check_value(name: str, value: Any, field: Field) -> None:
    """Raise Refused for a value that `Field.neutral` does not list, if the field has such a list."""
    allowed = field.neutral
    if allowed is None or any(value == other and type(value) is type(other) for other in allowed):
        return
    hint = f"leave it out (or say {' or '.join(map(shown, allowed))})" if allowed else "leave it out"
    message = f"{name}={shown(value)} is not possible: {field.why}; {hint}"
    raise Refused(message, name, code="unsupported_parameter")


def _check_model(given: Body, served_names: Seq[str]) -> None:
    model = given.get("model")
    if model is not None and served_names and meant(model, served_names) not in served_names:
        message = f"model={shown(model)} is not here: it must be {named(served_names)}, or left out"
        raise Refused(message, "model", code="model_not_found", status=404)


def meant(name: str, served_names: Collection[str]) -> str:
    """Return the served name that a client means by `name`; `name` itself if no served name matches.

    A client may add `:latest` to a served name, or leave out the `.gguf` at its end.
    """
    bare = name.removesuffix(LATEST)
    return next((known for known in (name, bare, f"{name}.gguf", f"{bare}.gguf") if known in served_names), name)


def named(served_names: Seq[str]) -> str:
    """Return the names that a model may be called by, as text for a message."""
    return " or ".join(map(repr, public_names(served_names)))


def public_names(served_names: Seq[str]) -> Seq[str]:
    """Return the names that clients may see. Paths on this machine are left out, unless all names are paths."""
    return [name for name in served_names if not name.startswith(("/", ".", "~"))] or served_names


def model_names(target: str) -> tuple[str, ...]:
    """Return the names by which requests may call a model. target: the model's path or hub id.

    The names of a path on this machine are its last part and the path. The names of a hub id are the id without the
    revision, and the id with the revision.
    """
    path = there(target)
    if path is not None:
        return tuple(dict.fromkeys((path.resolve().name, target)))
    return tuple(dict.fromkeys((target.partition("@")[0], target)))


def params_of(given: Body, defaults: Mapping[str, Any], names: Mapping[str, str], logprobs: Any) -> SamplingParams:
    """Return the sampling parameters of a body. Raises Refused.

    defaults: values for the fields of SamplingParams that the body leaves out. names: field of the API -> field of
    SamplingParams, for fields outside of PARAMS. logprobs: the value of SamplingParams.logprobs.
    """
    fields = {**defaults, **{name: value for name, value in given.items() if name in PARAMS}}
    for name, ours in names.items():
        if name in given:
            if ours != name and ours in given and given[ours] != given[name]:
                raise Refused(
                    f"{name}={shown(given[name])} and {ours}={shown(given[ours])} are two names of one limit: drop "
                    "one of them",
                    name,
                )
            fields[ours] = given[name]
    fields.update(_speculation(given))
    for name, off in OFF.items():
        if type(fields.get(name)) is int and fields[name] == -1:
            fields[name] = off
    if isinstance(fields.get("logit_bias"), dict):
        fields["logit_bias"] = _biases(fields["logit_bias"])
    if isinstance(fields.get("prediction"), dict):
        fields["prediction"] = _prediction(fields["prediction"])
    fields["logprobs"] = logprobs
    if type(n := fields.get("n")) is int and not 1 <= n <= MAX_CHOICES:
        raise Refused(f"n={n} is not possible: it must be at least 1 and at most {MAX_CHOICES}", "n")
    try:
        _check_sizes(fields)
        return SamplingParams(**fields)
    except BadOption as error:
        raise _named_as_given(error, given, names) from None


def _check_sizes(fields: Mapping[str, Any]) -> None:
    """Raise BadOption for a field with more entries or characters than a request may have."""

    def refuse(name: str, has: int, most: int, what: str) -> None:
        if has > most:
            message = f"{name}={shown(fields[name])} is not possible: it must have at most {most:,} {what}, not {has:,}"
            raise BadOption(message, name)

    for name, most in MOST_ENTRIES.items():
        if isinstance(value := fields.get(name), list | tuple | dict):
            refuse(name, len(value), most, "entries")
    for name in SHORT_TEXTS:
        value = fields.get(name)
        texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
        lengths = [len(text) for text in texts if isinstance(text, str)]
        refuse(name, max(lengths, default=0), MOST_TEXT_CHARS, "characters in a text")
        refuse(name, sum(lengths), MOST_TEXTS_CHARS, "characters in all its texts")


def _speculation(given: Body) -> dict[str, Any]:
    """Return the fields of SamplingParams that the object `speculation` of a body gives. Raises Refused.

    The object is {"draft": ..., "spec_length": ..., "acceptance": ..., "report": ...}. Each field may be missing.
    """
    wanted: Mapping[str, Any] = given.get("speculation", {})
    for name in wanted:
        if name in given and given[name] != wanted[name]:
            message = f"{name}={shown(given[name])} and speculation.{name}={shown(wanted[name])} contradict each other"
            raise Refused(f"{message}: drop one of them", name)
    return {name: wanted[name] for name in SPECULATION if wanted.get(name) is not None}


def wants_report(given: Body) -> bool:
    """Return whether the body asks for a report on speculation."""
    return bool(given.get("speculation", {}).get("report"))


def _biases(biases: dict[str, Any]) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise Refused(f"logit_bias={shown(biases)} is not possible: its keys must be token ids", "logit_bias") from None


def _prediction(given: Mapping[str, Any]) -> str:
    """Return the text of a prediction in the form of OpenAI's API. Raises Refused for any other form.

    The prediction's type must be "content". Its content must be a text or a list of text parts.
    """
    content = given.get("content") if given.keys() == {"type", "content"} and given["type"] == "content" else None
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        form = '{"type": "content", "content": "..."}'
        raise Refused(f"prediction={shown(given)} is not possible: it must be {form}, a text or ids", "prediction")
    return "".join(map(str, texts))


def _named_as_given(error: BadOption, given: Body, names: Mapping[str, str]) -> Refused:
    """Convert an error of SamplingParams to a Refused that calls the field by its name in the body.

    names: name in the body -> field of SamplingParams.
    """
    message = str(error).replace(", or None", ", or null")
    name = error.option
    if name is None:
        return Refused(message)
    for other, ours in {**names, "top_logprobs": "logprobs"}.items():
        if name == ours and other in given:
            return Refused(other + message.removeprefix(name), other)
    return Refused(message, name)


def of_grammar(error: ForerunError, field: str | None) -> ForerunError:
    """Return the error to report for `error`. An error about a grammar becomes a Refused that names the body's field.

    The message of such an error begins with the engine's name for a grammar; `field` replaces this name. field: the
    path of the body's field with the grammar or the schema; None = return `error` unchanged.
    """
    message = str(error)
    name = next((name for name in _GRAMMARS if message.startswith((f"{name} ", f"{name}="))), None)
    if name is None or field is None or not isinstance(error, BadOption):
        return error
    return Refused(field + message.removeprefix(name), field)


def are_ids(prompt: object) -> bool:
    """Return whether a prompt is a list of token ids that is not empty."""
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def variables(given: Body) -> Mapping[str, Any]:
    """Return the chat template's variables that a body gives (chat_template_kwargs). Raises Refused."""
    kwargs: Mapping[str, Any] = given.get("chat_template_kwargs", {})
    if wrong := [name for name in _NO_VARIABLES if name in kwargs]:
        message = f"chat_template_kwargs={shown(wrong)} is not possible: it takes the template's own variables, by name"
        raise Refused(message, "chat_template_kwargs")
    return kwargs


def texts_of(content: Any, where: str, kinds: Set[str]) -> str:
    """Return the content of a message as one text, with newlines between the parts. Raises Refused.

    where: the path of the content in the body. kinds: the types of parts that hold text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise Refused(f"{where}={shown(content)} is not possible: it must be a text, or a list of parts", where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(kind, str) or kind not in kinds:
            raise Refused(f"{where}[{i}] has the type {shown(kind)}: the model reads texts alone", where)
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise Refused(f"{where}[{i}] has no text: give it one", where)
        texts.append(text)
    return "\n".join(texts)


# ---------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens, summed over all choices of a request.

    prompt: tokens of the prompts, each prompt counted once. cached: prompt tokens that were in the prefix cache. disk:
    cached tokens that came from disk. accepted, rejected: accepted and rejected tokens among the tokens drafted from
    the request's prediction; None = no tokens were drafted from a prediction. reasoning: completion tokens of the
    reasoning.
    """

    prompt: int
    cached: int
    completion: int
    accepted: int | None = None
    rejected: int | None = None
    reasoning: int = 0
    disk: int = 0

    @property
    def prompt_details(self) -> dict[str, int]:
        """The field prompt_tokens_details of OpenAI's API. Tokens from disk also count as cached tokens."""
        return {"cached_tokens": self.cached} | ({"disk_tokens": self.disk} if self.disk else {})

    @classmethod
    def of(cls, outputs: Seq[RequestOutput], params: SamplingParams) -> Usage:
        """Return the token counts. outputs: params.n outputs for each prompt, in the order of the prompts."""
        firsts = outputs[:: params.n]
        predicted = [o.report for o in outputs if params.prediction is not None and o.report.draft == "prediction"]
        num_drafted, num_accepted = (
            sum(getattr(r, name) for r in predicted) for name in ("num_drafted", "num_accepted")
        )
        return cls(
            prompt=sum(len(output.prompt_ids) for output in firsts),
            cached=sum(output.report.num_cached_tokens for output in firsts),
            disk=sum(output.report.num_disk_tokens for output in firsts),
            completion=sum(len(output.token_ids) for output in outputs),
            accepted=num_accepted if num_drafted else None,
            rejected=num_drafted - num_accepted if num_drafted else None,
            reasoning=sum(o.answer_parts.num_reasoning_tokens for o in outputs if o.answer_parts is not None),
        )


def status_of(error: ForerunError) -> tuple[int, str | None, str | None]:
    """Return the HTTP status of an error, its code, and the name of the field at fault. Code and name may be None."""
    if isinstance(error, Refused):
        return error.status, error.code, error.param
    if isinstance(error, UserError):
        return 400, "context_length_exceeded" if isinstance(error, PromptTooLong) else None, None
    return (503, "capacity", None) if isinstance(error, CapacityError) else (500, "internal_error", None)


def report_of(outputs: Seq[RequestOutput]) -> dict[str, Any]:
    """Return the report on speculation, summed over all choices. The report has the seed that reproduces the choices.

    Counts are sums over all choices, see RequestReport. A ratio is None if its denominator is 0. scores: the scores of
    the outputs, in a beam search.
    """
    reports = {id(output.report): output.report for output in outputs}.values()  # a beam search's outputs share one
    sums = {name: sum(getattr(report, name) for report in reports) for name in _REPORTED}

    def ratio(above: str, below: str) -> float | None:
        return sums[above] / sums[below] if sums[below] else None

    scores = {"scores": [o.score for o in outputs]} if any(o.score is not None for o in outputs) else {}
    first = outputs[0].report
    prices = [price for output in outputs for price in output.report.prices]
    return {
        "seed": outputs[0].seed,
        "draft": first.draft,
        "acceptance": first.acceptance,
        "is_lossless": first.is_lossless,
        "tv_price": sum(prices) / len(prices) if prices else None,
        **sums,
        "acceptance_rate": ratio("num_accepted", "num_drafted"),
        "mean_accepted_length": ratio("num_emitted", "num_steps"),
        "alpha_hat": ratio("num_accepted", "num_tested"),
        **scores,
    }
