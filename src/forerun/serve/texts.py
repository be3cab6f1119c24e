"""Reads a request body, from bytes to token ids: parses JSON, checks fields, applies the chat template, tokenizes.

No engine is needed. Bodies are not read in the event loop. A thread of the server reads short bodies, and the process
of aside.py reads long bodies. A text that cannot fit into the context is refused before it is tokenized.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from forerun.errors import BadOption, NotFound, PromptTooLong, UnsupportedModel, echoing_json, shown
from forerun.sampling.grammar import Grammar, vocabulary
from forerun.serve.apis import with_bodies
from forerun.serve.bodies import Job, Prompt, Refused, check, meant
from forerun.serve.events import in_slices
from forerun.serve.routes import Count, Generate
from forerun.serve.tools import THINKING, thinking_variables
from forerun.text.answer_form import AnswerForm
from forerun.text.chat import ChatTemplate
from forerun.text.filling import filling_ids
from forerun.text.template_files import ANOTHER
from forerun.text.tokenizer import Tokenizer
from forerun.text.tools import NO_TOOLS
from forerun.types import SamplingParams

LOG = logging.getLogger(__name__)
MOST_TRIED_S, MOST_TRIED_BYTES = 2.0, 512 << 20  # processor time and memory that a grammar may take to be compiled
_MARGIN = 2  # for tokenizers that drop some of a text before they read it
AsJson = tuple[bytes, tuple[str, ...]]  # an answer as JSON, and the fields that were ignored


@dataclass(frozen=True)
class TextOptions:
    """The facts about a model that are needed to read bodies for the model, without its engine.

    folder: the folder with the tokenizer's files. capacity: the most choices that run or wait at once. names, defaults,
    ignore_unsupported: see Service. others: the names of the server's other models. chat_template: a file; None = the
    checkpoint's own template.
    """

    folder: Path
    names: tuple[str, ...]
    max_seq_len: int
    capacity: int
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignore_unsupported: bool = False
    chat_template: str | None = None
    others: tuple[str, ...] = ()


def _pages(column: int) -> int:
    """Return this process's number of memory pages; 0 where the number cannot be read.

    column: 0 = the whole address space, 1 = the resident pages.
    """
    try:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[column])
    except OSError:
        return 0


@contextmanager
def _limited() -> Iterator[None]:
    """Run the `with` block, and end this process if the block takes too much processor time or memory.

    More than MOST_TRIED_S seconds of processor time end the process with SIGPROF. More than MOST_TRIED_BYTES of memory
    end the process with SIGABRT.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    if (size := _pages(0)) > 0:
        most = size * resource.getpagesize() + MOST_TRIED_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most if before[1] < 0 else min(most, before[1]), before[1]))
    signal.setitimer(signal.ITIMER_PROF, MOST_TRIED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


class Library:
    """Reads the bodies for all models of a server. Each body is read by the Texts of its model; see `_of`."""

    def __init__(self, texts: Seq[Texts]) -> None:
        self._first = texts[0]
        self._by_name = {name: reader for reader in texts for name in reader.options.names}
        self._routes = with_bodies()

    def work(self, url: str, body: bytes) -> tuple[Job, list[list[int]]] | AsJson:
        """Read a body that was sent to the route at `url`, and return the result of `Texts.work`. Raises UserError."""
        try:
            given, route = parse(body), self._routes[url]
            return self._of(route, given).work(route, given)
        except RecursionError:
            raise Refused("the body is nested too deeply to be read: make it flatter") from None

    def begin(self) -> None:
        """Prepare the vocabulary that the grammars of the first model need."""
        vocabulary(self._first.tokenizer)

    def attempt(self, name: str, key: tuple[str, str]) -> int:
        """Compile a grammar for the model `name`, and return how many bytes of memory the grammar takes.

        key: the grammar, as in `SamplingParams.constraint`. Raises BadOption. Ends this process if compiling takes too
        much time or memory.
        """
        known = vocabulary(self._by_name[name].tokenizer)
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)  # memory freed by the last grammar would hide what this one takes
        before = _pages(1)
        with _limited():
            grammar = Grammar(key, known)
        held = (_pages(1) - before) * resource.getpagesize()
        del grammar
        return held

    def _of(self, route: Generate | Count, given: Any) -> Texts:
        """Return the Texts of the model that a body names. given: the parsed body.

        If the body names no model, return the first model's Texts. If the body names a model that is not served, also
        return the first model's Texts, which refuses the name.
        """
        name = route.form.named(given).get("model") if isinstance(given, dict) else None
        return self._by_name.get(meant(name, self._by_name), self._first) if isinstance(name, str) else self._first


class OnlyAside(Exception):
    """The error for a body that only a separate process may read.

    Reading the body changes the tokenizer, and the tokenizer of this process is shared with other threads.
    """


class Texts:
    """Reads bodies for one model.

    tokenizer: the model's tokenizer, if it is already loaded. template: returns the model's chat template, if it is
    already loaded. None = load from options.folder.
    """

    def __init__(
        self,
        options: TextOptions,
        tokenizer: Tokenizer | None = None,
        template: Callable[[], ChatTemplate] | None = None,
    ) -> None:
        self.options, self.name, self._served = options, options.names[0], (*options.names, *options.others)
        self.tokenizer, self._is_shared = tokenizer or Tokenizer.load(options.folder), tokenizer is not None
        self._load_template = template or (lambda: ChatTemplate.load(options.folder, options.chat_template))
        longest = max(map(len, self.tokenizer.id_to_token.values()), default=1)
        self._most_chars = _MARGIN * longest * options.max_seq_len

    @property
    def max_seq_len(self) -> int:
        """The length of the context in tokens."""
        return self.options.max_seq_len

    @echoing_json()
    def work(self, route: Generate | Count, body: Any) -> tuple[Job, list[list[int]]] | AsJson:
        """Read a body for a route.

        Returns the result of `read` for a Generate. For a Count, returns the answer as JSON, and the names of ignored
        fields.
        """
        if isinstance(route, Generate):
            return self.read(route, body)
        given = check(route.form, body, self._served, ignore_unsupported=self.options.ignore_unsupported)
        answer, ignored = route.work(self, given)
        return in_slices(answer), tuple(dict.fromkeys((*given.ignored, *ignored)))

    @echoing_json()
    def read(self, route: Generate, body: Any) -> tuple[Job, list[list[int]]]:
        """Return the Job of a body, and the Job's prompts as token ids. Raises UserError.

        A prediction in the Job is converted to token ids as well.
        """
        options = self.options
        job = self._read(route, body)
        if job.num_choices > options.capacity:
            raise Refused(
                f"the request makes {job.num_choices} choices (its prompts, n of each) and this server takes "
                f"{options.capacity} at once: ask for fewer, or raise --max-queue"
            )
        if job.without_template is not None and self._template_if_there is None:
            job = dataclasses.replace(job, messages=None, prompts=(job.without_template,))
        job = self._with_wishes(self.templated(job))
        prompts = self.encode(job)
        params = job.params
        if job.answer_form is not None:
            try:
                params = job.answer_form.constrained(params, self.tokenizer, prompts[0])
            except BadOption as error:
                raise job.refusal(error) from None
        params = self._with_prediction(params)
        # Prompts and messages are ids now. Only texts that the answer repeats are kept.
        echoed = tuple[Prompt, ...](prompt if isinstance(prompt, str) else [] for prompt in job.prompts if job.echo)
        return dataclasses.replace(job, params=params, prompts=echoed, messages=None, variables={}), prompts

    def _read(self, route: Generate, body: Any) -> Job:
        """Return the Job of a body. Raises Refused.

        If a field is refused as unsupported, the message also names the option that makes the server ignore such
        fields.
        """
        options, ignore = self.options, self.options.ignore_unsupported
        try:
            return route.job(body, self.name, options.defaults, self._served, ignore_unsupported=ignore)
        except Refused as error:
            if error.code != "unsupported_parameter":
                raise
            more = "; or start the server with --ignore-unsupported, which serves such requests without it"
            raise Refused(f"{error}{more}", error.param, code=error.code, status=error.status) from None

    def templated(self, job: Job) -> Job:
        """Return a job prepared for the model's chat template; see the function `templated`."""
        return templated(job, lambda: self.template, ignore_unsupported=self.options.ignore_unsupported)

    def _with_wishes(self, job: Job) -> Job:
        """Return the job, with wishes of the client that cannot be met added to `ignored`.

        Such a wish is a context longer than max_seq_len, or a limit of the reasoning that is not possible with the
        tokenizer. An impossible limit is also removed from the job.
        """
        form, unkept = job.answer_form, list[str]()
        if job.context is not None and job.context[1] > self.max_seq_len:
            unkept.append(job.context[0])
        limit = None if form is None else form.max_thinking_tokens
        if job.thinking_wish and form is not None and limit is not None and not form.can_limit(self.tokenizer):
            form = dataclasses.replace(form, max_thinking_tokens=None)
            unkept.append(job.thinking_wish)
        return dataclasses.replace(job, answer_form=form, ignored=(*job.ignored, *unkept)) if unkept else job

    def encode(self, job: Job) -> list[list[int]]:
        """Return the prompts of a job as token ids. Raises UserError."""
        if job.messages is not None:
            return [self.tokenizer.encode(self.rendered(job), add_special_tokens=False)] if job.messages else []
        self._check_size(job)
        if job.suffix is not None:
            return [filling_ids(self.tokenizer, str(job.prompts[0]), job.suffix)]
        return [self.tokenizer.encode(p) if isinstance(p, str) else p for p in job.prompts]

    def rendered(self, job: Job) -> str:
        """Return the text that the chat template makes of a job's messages. Raises UserError."""
        self._check_size(job)
        try:
            return self.template.render(job.messages or [], **form_of(job))
        except UnsupportedModel as error:
            raise self._unusable(error) from None

    def _unusable(self, error: UnsupportedModel) -> Refused:
        """Convert a chat template's error to a Refused for the client, without paths and advice for the operator."""
        LOG.warning("%s", error)  # the whole message is for whoever has the files
        message = str(error)
        for folder in filter(None, (self.options.folder, self.options.chat_template)):
            message = message.replace(f"{folder}/", "").replace(str(folder), "the chat template")
        for verb in ("fetch it again, or ", "mend it, or ", "or ", ""):
            message = message.replace(f": {verb}{ANOTHER}", "").replace(f", {verb}{ANOTHER}", "")
        return Refused(message, "messages")

    def literal_ids(self, text: str, add_special: bool) -> list[int]:
        """Return the token ids of a text in which the names of special tokens are plain text.

        Raises OnlyAside if the text has such names and the tokenizer is shared with other threads.
        """
        special = (self.tokenizer.id_to_token[i] for i in self.tokenizer.special_ids)
        if not any(name in text for name in special):
            return self.tokenizer.encode(text, add_special)
        if self._is_shared:
            raise OnlyAside
        return self.tokenizer.encode_names(text, add_special)

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises Refused if the model has no chat template."""
        if self._template_if_there is None:
            raise Refused(
                f"the model {shown(self.name)} has no chat template, as is usual for a base model, and cannot read a "
                "conversation: send a text to /v1/completions",
                "messages",
            )
        return self._template_if_there

    @cached_property
    def _template_if_there(self) -> ChatTemplate | None:
        try:
            return self._load_template()
        except NotFound as error:
            LOG.warning("%s", error)
            return None
        except UnsupportedModel as error:
            raise self._unusable(error) from None

    def check_text(self, text: str) -> None:
        """Raise PromptTooLong for a text with so many characters that its tokens cannot fit into the context.

        The text is not tokenized for this check, because tokenizing may take seconds.
        """
        if len(text) > self._most_chars:
            raise self._too_many_chars(len(text))

    def _too_many_chars(self, num_chars: int) -> PromptTooLong:
        most = self.max_seq_len
        return PromptTooLong(
            f"the prompt has {num_chars:,} characters, which are more than {most} tokens whatever they are, and "
            "max_seq_len is no more: shorten it"
        )

    def _check_size(self, job: Job) -> None:
        """Raise PromptTooLong for a job that has too many characters or messages to fit into the context.

        The texts are not tokenized for this check, because tokenizing megabytes of text takes seconds. Each message,
        and each part of a message, takes at least one token.
        """
        most = self.options.max_seq_len
        contents = [m.get("content") for m in job.messages or ()]
        num_parts = sum(len(content) if isinstance(content, list) else 1 for content in contents)
        if num_parts > most:
            raise PromptTooLong(
                f"the conversation has {num_parts:,} messages and parts of messages, and max_seq_len is {most} tokens: "
                "shorten it"
            )
        texts = (*job.prompts, job.suffix or "") if job.messages is None else contents
        num_chars = max(map(_num_chars, texts), default=0)
        if job.messages is not None:
            num_chars = sum(map(_num_chars, texts))
        if num_chars > self._most_chars:
            raise self._too_many_chars(num_chars)
        for prompt in job.prompts:
            if not isinstance(prompt, str) and len(prompt) >= most + (job.params.max_tokens == 0):
                raise PromptTooLong(
                    f"the prompt has {len(prompt)} tokens and max_seq_len is {most}, so there is no room for an "
                    "answer: shorten it"
                )

    def _with_prediction(self, params: SamplingParams) -> SamplingParams:
        """Return params with the prediction as token ids. Raises Refused for a prediction longer than the context."""
        given, most = params.prediction, self.options.max_seq_len
        if given is None:
            return params
        if isinstance(given, str):
            if len(given) > self._most_chars:
                raise Refused(
                    f"prediction has {len(given):,} characters, which are more than {most} tokens whatever they are, "
                    "and no answer is longer: shorten it",
                    "prediction",
                )
            given = tuple(self.tokenizer.encode(given, add_special_tokens=False))
        if len(given) > most:
            raise Refused(
                f"prediction has {len(given):,} tokens and max_seq_len is {most}, so no answer is as long: shorten it",
                "prediction",
            )
        return dataclasses.replace(params, prediction=given)


def templated(job: Job, template: Callable[[], ChatTemplate], *, ignore_unsupported: bool = False) -> Job:
    """Return a job prepared for its chat template. template: returns the chat template.

    Sets the template's variables, the tools, and the AnswerForm, which separates the parts of the answer. Removes
    variables about thinking that the template does not read. Raises Refused for tools if the template has no known form
    for calls. With ignore_unsupported, such tools are ignored instead, unless the job requires a call.
    """
    if not job.messages:
        return job
    reads, answer_marks = template().reads, template().answer_marks
    ignored = list(job.ignored)
    variables = dict(job.variables)
    tools = job.tools
    unread = (THINKING & variables.keys()) - reads  # many clients ask every model to think, or not to
    ignored += [f"chat_template_kwargs.{name}" for name in sorted(unread) if variables[name] is not False]
    variables = {name: value for name, value in variables.items() if name not in unread}
    if tools is not None and answer_marks.dialect is None:
        if not ignore_unsupported or tools.is_forced:
            raise Refused(NO_TOOLS, "tools", code="unsupported_parameter")
        tools, ignored = None, [*ignored, "tools"]
    if job.effort is not None or job.thinks is not None:
        thinking = thinking_variables(reads, job.effort, job.thinks)
        if thinking is None and (job.thinks or job.effort not in (None, "none")):
            ignored.append("reasoning_effort")
        variables = {**(thinking or {}), **variables}
    answer_form = answer_marks.with_tools(tools, job.max_thinking_tokens)
    if answer_form is None and job.params.logprobs is not None:
        answer_form = AnswerForm(answer_marks)  # it tells the text's tokens from end tokens
    return dataclasses.replace(job, variables=variables, tools=tools, ignored=tuple(ignored), answer_form=answer_form)


def form_of(job: Job) -> dict[str, Any]:
    """Return the arguments with which to render a job's chat template, except the messages."""
    form: dict[str, Any] = {"continue_final_message": True} if job.continue_final_message else {}
    if job.add_generation_prompt is False:
        form["add_generation_prompt"] = False
    if job.tools is not None:
        form["tools"] = job.tools.given
    return {**form, **job.variables}


def _num_chars(content: Any) -> int:
    """Return the number of characters in a text or in a list of text parts; 0 for token ids."""
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    return sum(len(part["text"]) for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def parse(body: bytes) -> Any:
    """Parse the JSON text of a body. Raises Refused."""
    try:
        return json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise Refused("the body is not UTF-8: encode it so") from None
    except ValueError as error:
        raise Refused(f"the body is not valid JSON: {error!s:.200}") from None
