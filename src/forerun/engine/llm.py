"""The class LLM, for callers with checkpoints and texts. An LLM loads models, encodes prompts and runs an engine."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence as Seq
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, Unpack

from forerun.config import EngineConfig
from forerun.drafters import Drafter, Target
from forerun.engine.building import build
from forerun.engine.fitting import refuse_early, with_room
from forerun.engine.loop import Loop
from forerun.engine.opened import Opened
from forerun.engine.options import LLMOptions, llm_signature
from forerun.engine.prompts import (
    Message,
    Prompt,
    as_list,
    conversations,
    names_keywords,
    no_keyword,
    only_one,
    params_for,
    refuse_to_stream,
)
from forerun.engine.request import Chunk, Mark, Reader, Request, RequestOutput, unheard
from forerun.engine.router import OWN
from forerun.errors import BadOption, UserError, shown
from forerun.kv.disk import Folder
from forerun.models.loading import Checkpoint
from forerun.pacing.log import PacingLog
from forerun.pacing.pass_time import PassTime
from forerun.text.answer_form import AnswerForm
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer, needed
from forerun.text.tools import AUTO, NO_TOOLS, NONE, ToolRequest, limit_of
from forerun.types import Listener, SamplingParams, StepReport

LOG = logging.getLogger(__name__)
_LET_GO = ("engine", "checkpoint", "opened", "_loop", "_loaded_draft")  # the attributes that `close` removes


def _end(loop: Loop, folder: Folder | None) -> None:
    """End the engine's thread, and write the pending KV-cache rows to `folder`."""
    loop.close()
    if folder is not None:
        folder.close()


class LLM:
    """Runs a target model with speculative decoding.

    target: a checkpoint folder, a GGUF file, a hub id, a name that `forerun models` lists, a loaded Checkpoint, or None
    for smollm2, which must be on this machine. Options: the fields of EngineConfig, with the aliases draft_model,
    num_speculative_tokens, speculative_config, use_speculative_decoding; draft may also be a loaded Checkpoint, or a
    function that makes a custom drafter for a drafters.Target.
    Raises UserError for every problem that the caller can fix.

    Threads and asynchronous tasks may share one LLM. Their requests run in one batch, in a thread of the LLM.
    """

    __signature__ = llm_signature()

    def __init__(self, target: str | Path | Checkpoint | Opened | None = None, **given: Unpack[LLMOptions]) -> None:
        options: dict[str, Any] = dict(given)
        draft = options.get("draft")
        self._loaded_draft = draft if isinstance(draft, Checkpoint) else None
        if self._loaded_draft is not None:
            options["draft"] = "model"
        own_drafter = _own_drafter(options)
        opened = _open(target, options, self._loaded_draft is not None)
        log = None if opened.config.pacing_log is None else PacingLog(opened.config.pacing_log)
        if isinstance(target, Checkpoint):
            self.checkpoint = target
        else:
            outlines = refuse_early(opened)
            if self._loaded_draft is None:
                opened = with_room(outlines)
            self.checkpoint = opened.load()
        self.opened, self.config = opened, opened.config
        self.usual_fields: Mapping[str, Any] = opened.usual_fields
        self.default_params = SamplingParams(**self.usual_fields)
        self.answers_texts = self.has_text and opened.answers_texts
        if self.config.chat_template is not None:
            _ = self.chat_template  # refuses a file that cannot be read
        self.engine = build(opened, self.checkpoint, self._loaded_draft, own_drafter)
        opened.beside.clear()  # the draft models are loaded: their small files are not needed any more
        if log is not None:
            self.listen(log, detail=True)
        self._loop = Loop(self.engine)
        self._at_exit = weakref.finalize(self, _end, self._loop, self.engine.folder)

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Make an LLM from an EngineConfig, which also names the target."""
        return cls(config.target, **config.options())

    @classmethod
    def from_opened(cls, opened: Opened) -> LLM:
        """Make an LLM of a target that is already opened. `opened` also has the configuration."""
        return cls(opened)

    def params(self, **fields: Any) -> SamplingParams:
        """Return the model's default parameters with the given fields changed, such as `llm.params(max_tokens=32)`.

        SamplingParams(max_tokens=32) is different: its other fields have the defaults of the class SamplingParams, such
        as temperature 1, and not the model's defaults.
        """
        return SamplingParams(**{**self.usual_fields, **fields})

    @names_keywords
    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        raw: bool = False,
    ) -> list[RequestOutput]:
        """Generate and return the outputs of all prompts, in the order of the prompts. A prompt is a text or token ids.

        If the model has a chat template (`answers_texts`), a text is a message that the model answers. Otherwise, and
        with raw=True, the model continues the text. Token ids are never changed. params: one SamplingParams for all
        prompts, or one for each prompt; None = the model's defaults (`default_params`).

        If params.n asks for several outputs, all outputs of a prompt come before the outputs of the next prompt. A beam
        search (params.num_beams) returns its outputs best first, each with its score.
        """
        return self._generate(as_list(prompts), params, raw)

    def _generate(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None,
        raw: bool = False,
        answer_form: AnswerForm | None = None,
    ) -> list[RequestOutput]:
        ended = SimpleQueue[Request]()

        def hear(request: Request) -> None:
            if request.seq.finish_reason is not None:
                ended.put(request)

        requests = self._make(prompts, params, hear, raw, answer_form)
        try:
            self._loop.add(requests)
            for _ in requests:
                ended.get()
        finally:
            self._loop.end(requests)
        failed = next((request for request in requests if request.error is not None), None)
        if failed is not None and failed.error is not None:
            number = 1 + sum(request.index == 0 for request in requests[1 : requests.index(failed) + 1])
            raise type(failed.error)(f"prompt {number}: {failed.error}") from failed.error
        return [request.output() for request in requests]

    @names_keywords
    def submit(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        raw: bool = False,
        hear: Callable[[Request], None] = unheard,
        answer_form: AnswerForm | None = None,
    ) -> list[Request]:
        """Queue all prompts, and return their requests without waiting: params.n requests for each prompt, in order.

        If one prompt is impossible, no prompt is queued. Prompts, params and raw are as in `generate`, and answer_form
        is as in `stream`.

        The engine's thread calls hear(request) after each step that advanced the request, and when the request ends.
        `hear` must be fast: it should only put the request into a queue. A request has ended when its
        `seq.finish_reason` is set. It then has its `output()`, or the `error` that ended it. Call `end` for requests
        that are no longer wanted.
        """
        requests = self._make(as_list(prompts), params, hear, raw, answer_form)
        self._loop.add(requests)
        return requests

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer. Raises NotFound if the target has no tokenizer, so that prompts must be token ids."""
        return needed(self.opened.tokenizer, self.checkpoint.name)

    @property
    def has_text(self) -> bool:
        """Whether the target has a tokenizer. Otherwise prompts are token ids, and the text of outputs is empty."""
        return self.opened.tokenizer is not None

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        """The drafters that requests may choose, by name. The first drafter serves requests that choose no drafter."""
        return self.engine.drafter.members

    @property
    def failure(self) -> BaseException | None:
        """The error of the last step that failed as a whole; None where no step has failed."""
        return self._loop.failure

    def queue(self, requests: Seq[Request]) -> None:
        """Queue requests that `engine.make` has made, and return without waiting for them (see `submit`)."""
        self._loop.add(requests)

    def end(self, requests: Seq[Request]) -> None:
        """End submitted requests and free their memory, once the running step is over. Returns without waiting.

        Requests that have already ended are not changed.
        """
        self._loop.end(requests)

    @names_keywords
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        answer_form: AnswerForm | None = None,
    ) -> Iterator[Chunk]:
        """Yield chunks of the output as tokens are committed. A chunk has new tokens, and text that is final.

        prompt, params and raw are as in `generate`. answer_form: the result of the method `answer_form`, if the parts
        of the answer are wanted. Each chunk then has `parts`: text, reasoning, and tool calls as they are written.

        If params.n asks for several outputs, their chunks are interleaved, each with the `index` of its output. Leaving
        the loop early ends the request.
        """
        refuse_to_stream(params)
        news = SimpleQueue[tuple[Request, Mark]]()
        requests = self._make(
            [only_one(prompt)], params, lambda request: news.put((request, request.mark())), raw, answer_form
        )
        readers = {request: Reader(request) for request in requests}
        try:
            self._loop.add(requests)
            while readers:
                yield from _chunks(readers, *news.get())
        finally:
            self._loop.end(requests)

    @names_keywords
    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        answer_form: AnswerForm | None = None,
    ) -> AsyncIterator[Chunk]:
        """Yield chunks like `stream`, for asyncio. The event loop is not blocked; several streams run in one batch.

        Leaving the loop early, closing the iterator or cancelling the task ends the request and frees its memory.
        """
        refuse_to_stream(params)
        loop = asyncio.get_running_loop()
        news = asyncio.Queue[tuple[Request, Mark]]()

        def hear(request: Request) -> None:  # raises where the event loop was closed, which ends the request
            loop.call_soon_threadsafe(news.put_nowait, (request, request.mark()))

        requests = await asyncio.to_thread(self._make, [only_one(prompt)], params, hear, raw, answer_form)
        readers = {request: Reader(request) for request in requests}
        try:
            self._loop.add(requests)
            while readers:
                for chunk in _chunks(readers, *await news.get()):
                    yield chunk
        finally:
            self._loop.end(requests)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        tools: Seq[Mapping[str, Any]] | None = None,
        tool_choice: str = AUTO,
        parallel_tool_calls: bool = True,
        max_thinking_tokens: int | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each of several conversations.

        An output has its tool calls in `tool_calls`, its reasoning in `reasoning`, and the whole answer in `message`,
        as a message to append to the conversation. tools: JSON schemas of functions that the model may call.
        tool_choice: auto; required, which constrains the answer to calls with valid arguments; none; or the name of the
        tool to call. parallel_tool_calls: whether an answer may have several calls. max_thinking_tokens: the largest
        number of reasoning tokens; None = no limit. template: see `apply_chat_template`.
        """
        answer_form = self.answer_form(tools, tool_choice, parallel_tool_calls, max_thinking_tokens)
        tools = None if tool_choice == NONE else tools
        ids: list[Prompt] = []
        several = conversations(messages)
        for name in template.keys() & SamplingParams.__dataclass_fields__.keys() - self.chat_template.reads:
            raise BadOption(no_keyword("LLM.chat", name, template[name], ()))
        for i, conversation in enumerate(several):
            try:
                ids.append(self.apply_chat_template(conversation, tools=tools, **template))
            except UserError as error:
                raise type(error)(f"conversation {i + 1}: {error}" if len(several) > 1 else str(error)) from error
        return self._generate(ids, params, answer_form=answer_form)

    def answer_form(
        self,
        tools: Seq[Mapping[str, Any]] | None = None,
        tool_choice: str = AUTO,
        parallel_tool_calls: bool = True,
        max_thinking_tokens: int | None = None,
    ) -> AnswerForm | None:
        """Return the AnswerForm that splits the model's answers into text, reasoning and tool calls.

        The marks around these parts, such as <think>, come from the chat template. Returns None if the model's answers
        have no such marks. The arguments are as in `chat`. Raises BadOption for invalid tools, and for a tool_choice
        that is not possible.
        """
        use = ToolRequest.of(tools or (), tool_choice, parallel_tool_calls)
        answer_marks = self.chat_template.answer_marks
        if use is not None and answer_marks.dialect is None:
            raise BadOption(NO_TOOLS)
        return answer_marks.with_tools(use, limit_of(max_thinking_tokens))

    def apply_chat_template(self, messages: Seq[Message], **template: Any) -> list[int]:
        """Return a conversation as token ids, ready for `generate`, `stream` and `astream`.

        template: tools, documents, name, add_generation_prompt, continue_final_message, and other variables that the
        template reads (forerun.text.chat). Raises NotFound where the checkpoint has no chat template.
        """
        return self.chat_template.encode(self.tokenizer, messages, **template)

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the configuration, or else of the checkpoint. Raises NotFound if neither has one."""
        return self.opened.chat_template

    def listen(self, listener: Listener, *, detail: bool = False) -> Callable[[], None]:
        """Call `listener` with every StepReport. Returns a function that ends these calls.

        detail: whether the reports contain `rounds`, with the drafted tokens, probabilities and tests of each round.
        The engine's thread calls the listener inside a step. If the listener raises an error, the error is logged and
        the listener is not called again.
        """

        has_failed, end = False, _nothing  # a step may call it before `engine.listen` has returned

        def guarded(report: StepReport) -> None:
            nonlocal has_failed
            if has_failed:
                return
            try:
                listener(report)
            except BaseException:  # sys.exit() in the engine's thread would only end the requests
                LOG.exception("a listener failed and is not called again")
                has_failed = True
                end()

        end = self.engine.listen(guarded, detail=detail)
        if has_failed:
            end()
        return end

    def call_behind(self, call: Callable[[], object]) -> Callable[[], None]:
        """Run `call` once after each step, when `hear` of all requests of the step has been called.

        So the news of all these requests can be handed to another thread at once. The engine's thread runs `call`.
        Returns a function that ends these calls.
        """
        self._loop.behind += (call,)

        def end() -> None:
            self._loop.behind = tuple(kept for kept in self._loop.behind if kept is not call)

        return end

    def pass_times(self) -> dict[str, PassTime]:
        """Return the pass times of the target (under "") and of each drafter, by name.

        Each value is a curve: the time of a pass by its number of rows. If the pacing policy needs pass times, they are
        measured once on a machine, as soon as no request has come for a second. Before, a curve has default values,
        which the passes of requests correct. `one_row_s` of a curve is None before the model's first pass.
        """
        costs = self.engine.costs
        return {name: copy.deepcopy(curve) for name, curve in {"": costs.target, **costs.drafts}.items()}

    def measure_passes(self) -> None:
        """Measure unknown pass times now, without waiting for a second in which no request comes.

        Running requests wait during the measurement. If the pacing policy needs no pass times, nothing is measured.
        """
        self._loop.call(self.engine.pacing.measure)

    def close(self) -> None:
        """End all requests, and release weights and caches. Later calls raise BadOption, except another `close`.

        `with LLM(...) as llm:` calls `close` at the end of the block.
        """
        if "engine" not in vars(self):
            return
        self._loop.end_all()
        self._at_exit()
        for name in _LET_GO:
            vars(self).pop(name, None)
        gc.collect()  # reference cycles hold the weights, too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            """Raise BadOption for attributes that `close` removed."""
            if name in _LET_GO:
                raise BadOption("this LLM is closed: make another one")
            raise AttributeError(f"LLM has no attribute {name!r}")

    def __repr__(self) -> str:
        if "engine" not in vars(self):
            return "<LLM, closed>"
        model, config = self.checkpoint.model, self.config
        drafts = OWN if OWN in self.engine.drafter.members else config.draft
        return (
            f"<LLM {self.checkpoint.name}: {model.config.model_type}, {model.precision} on {model.device}, "
            f"{model.ops.name} operators, draft={drafts!r}, up to {config.max_batch_size} sequences of "
            f"{self.engine.max_seq_len:,} tokens>"
        )

    def __reduce__(self) -> Any:
        raise BadOption(
            "an LLM cannot be pickled: it holds weights in memory and a running thread; make one in each process"
        )

    def _make(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None,
        hear: Callable[[Request], None],
        raw: bool,
        answer_form: AnswerForm | None = None,
    ) -> list[Request]:
        """Return the requests of all prompts, not queued yet.

        Raises UserError or CapacityError for an impossible request.
        """
        requests: list[Request] = []
        for prompt, each in zip(prompts, params_for(len(prompts), params, self.default_params), strict=True):
            ids = self._ids(prompt, raw) if isinstance(prompt, str) else prompt
            held = each if answer_form is None else answer_form.constrained(each, self.tokenizer, ids)
            requests += self.engine.make(ids, held)
        for request in requests:
            request.hear, request.answer_form = hear, answer_form
        return requests

    def _ids(self, text: str, raw: bool) -> list[int]:
        if raw or not self.answers_texts:
            return self.tokenizer.encode(text)
        return self.apply_chat_template([{"role": "user", "content": text}])


def _nothing() -> None:
    """Do nothing."""


def _chunks(readers: dict[Request, Reader], request: Request, mark: Mark) -> Iterator[Chunk]:
    """Yield the chunk that a step added to a request. Yields nothing for a step without new tokens.

    If the request has ended, its last chunk is yielded even without new tokens, and its reader is removed from
    `readers`. mark: the progress of the request after the step.
    """
    chunk = readers[request].chunk(mark)
    if mark.finish_reason is not None:
        del readers[request]
    if chunk.token_ids or mark.finish_reason is not None:
        yield chunk


def _own_drafter(options: dict[str, Any]) -> Callable[[Target], Drafter] | None:
    """Return the function in the options that makes a drafter, or None if the options have no such function.

    If there is such a function, the option `draft` is set to "none". Raises BadOption if another option also names a
    drafter, and if an option is a Drafter object instead of a function that makes a drafter.
    """
    names = ("draft", "draft_model")
    for name in names:
        if isinstance(options.get(name), Drafter):
            raise BadOption(f"{name} is a drafter already: give the function that makes it for a drafters.Target")
    given = [name for name in names if callable(options.get(name))]
    if not given:
        return None
    for name in (*names, "speculative_config", "use_speculative_decoding"):
        if name != given[0] and options.get(name) is not None:
            raise BadOption(f"{given[0]} makes a drafter, and {name} says something else of drafts: drop one of them")
    make: Callable[[Target], Drafter] = options.pop(given[0])
    options["draft"] = "none"
    return make


def _open(
    target: str | Path | Checkpoint | Opened | None, options: Mapping[str, Any], has_loaded_draft: bool
) -> Opened:
    """Open the target of an LLM under the configuration that `options` describe.

    has_loaded_draft: whether the caller has loaded a draft model. Raises UserError for impossible options.
    """
    if isinstance(target, Opened):
        return target
    if isinstance(target, Checkpoint):
        config = EngineConfig.make(**options)
        _check_loaded(target, config)
        return Opened.of_loaded(target, config, has_loaded_draft)
    named = {} if target is None else {"target": target}
    config = EngineConfig.make(**named, **options)
    if config.pacing_log is not None:
        PacingLog(config.pacing_log).close()  # refuses a log that cannot be written, before any other file is opened
    return Opened.of(config, has_loaded_draft)


def _check_loaded(checkpoint: Checkpoint, config: EngineConfig) -> None:
    """Raise BadOption for options that contradict the dtype, device, operators or quantization of a loaded model."""
    model = checkpoint.model
    facts = {
        "dtype": (config.dtype, model.weight_dtype),
        "device": (config.device, model.device),
        "ops": (config.ops, model.ops.name),
        "quantization": (config.quantization, checkpoint.quantization),
    }
    for name, (wanted, fact) in facts.items():
        if wanted not in ("auto", None, fact):
            raise BadOption(
                f"{name}={shown(wanted)} contradicts the loaded model ({fact}): load the model that way instead"
            )
