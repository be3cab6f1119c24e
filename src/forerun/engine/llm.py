"""LLM: checkpoints and texts on the outside, the engine on the inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from forerun.config import EngineConfig
from forerun.engine.factory import build, check_loaded, load_target, refuse_early, refuse_what_does_not_fit
from forerun.engine.loop import SharedEngine
from forerun.engine.prompts import Message, Prompt, as_list, conversations, only_one, params_for
from forerun.engine.request import Chunk, Request, RequestOutput
from forerun.errors import BadOption, UserError
from forerun.models.generation import sampling_defaults
from forerun.models.loading import Checkpoint
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from forerun.types import Listener, SamplingParams


class _Held:
    """The request of an asynchronous stream. A stream whose loop is gone is never closed, only forgotten."""

    def __init__(self, shared: SharedEngine) -> None:
        self.shared = shared
        self.requests: list[Request] = []

    def end(self) -> None:
        """End it, and free what it holds."""
        self.shared.end(self.requests)

    def __del__(self) -> None:
        self.end()


class LLM:
    """A target model with speculation.

    target: a checkpoint folder, a hub id, a loaded Checkpoint, or None for the shipped model. Options are those of
    EngineConfig, with the aliases draft_model, num_speculative_tokens, speculative_config, use_speculative_decoding;
    draft may be a loaded Checkpoint, too.
    Raises UserError for everything that the caller can mend.

    Threads and asynchronous tasks may share one LLM: their requests run in one batch, and one of them at a time steps
    it for all.
    """

    def __init__(self, target: str | Path | Checkpoint | None = None, **options: Any) -> None:
        loaded = target if isinstance(target, Checkpoint) else None
        self._loaded_draft = options.get("draft") if isinstance(options.get("draft"), Checkpoint) else None
        if self._loaded_draft is not None:
            options["draft"] = "model"
        named = {} if target is None or loaded is not None else {"target": target}
        self.config = EngineConfig.make(**named, **options)
        tokenizer = None
        if loaded is None:
            tokenizer = refuse_early(self.config, self._loaded_draft is not None)
            if self._loaded_draft is None:
                refuse_what_does_not_fit(self.config)
        else:
            check_loaded(loaded, self.config)
        self.checkpoint = loaded or load_target(self.config, with_tokenizer=False)
        if tokenizer is None or tokenizer.folder != self.checkpoint.folder:  # a branch of the hub may have moved
            tokenizer = self.checkpoint.tokenizer or Tokenizer.load(self.checkpoint.folder)
        self.tokenizer = tokenizer
        self.default_params = SamplingParams()
        if self.config.generation_config == "model":
            self.default_params = sampling_defaults(self.checkpoint.folder)
        if self.config.chat_template is not None:
            _ = self.chat_template  # a file that cannot be read is refused here
        self.engine = build(self.checkpoint, self.tokenizer, self.config, self._loaded_draft)
        self._shared = SharedEngine(self.engine)

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """From a finished configuration."""
        return cls(config.target, **config.options())

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts. A prompt is a text or token ids; params: one, or one per prompt.

        Where params.n asks for several outputs, those of one prompt follow each other.
        """
        requests = self._add(as_list(prompts), params)
        try:
            while any(r.seq.finish_reason is None for r in requests):
                self._shared.step()
        finally:
            self._shared.end(requests)
        failed = next((request for request in requests if request.error is not None), None)
        if failed is not None and failed.error is not None:
            number = 1 + sum(request.index == 0 for request in requests[1 : requests.index(failed) + 1])
            raise type(failed.error)(f"prompt {number}: {failed.error}") from failed.error
        return [request.output() for request in requests]

    def submit(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Request]:
        """Queue prompts, all or none, and return at once: params.n requests for each of them, in order.

        Each `step` brings them on; one is over when its `seq.finish_reason` is set, and then has its `output()`, or the
        `error` that ended it. Requests that nobody waits for any more are to be given to `end`.
        """
        return self._add(as_list(prompts), params)

    def step(self) -> None:
        """One step of the batch, for every request that is queued or running."""
        self._shared.step()

    def end(self, requests: Seq[Request]) -> None:
        """End submitted requests and free what they hold; those that are over are left as they are."""
        self._shared.end(requests)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, every_step: bool = False
    ) -> Iterator[Chunk]:
        """Chunks as they are verified: text that can no longer change, and the tokens behind it.

        every_step: yield an empty chunk, too, after a step that brought nothing, such as one of a long prompt's.
        """
        requests = self._add([only_one(prompt)], params, one=True)
        try:
            finished = False
            while not finished:
                chunk = self._shared.advance(requests[0])
                finished = chunk.finish_reason is not None
                if chunk.token_ids or finished or every_step:
                    yield chunk
        finally:
            self._shared.end(requests)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, every_step: bool = False
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio. The event loop stays free; several streams run in one batch.

        Leaving the loop early, closing the iterator or cancelling the task ends the request and frees what it holds.
        """
        loop, held = asyncio.get_running_loop(), _Held(self._shared)

        def add() -> None:
            held.requests = self._add([only_one(prompt)], params, one=True)

        try:
            await loop.run_in_executor(self._worker, add)
            finished = False
            while not finished:
                chunk = await loop.run_in_executor(self._worker, self._shared.advance, held.requests[0])
                finished = chunk.finish_reason is not None
                if chunk.token_ids or finished or every_step:
                    yield chunk
        finally:
            if loop.is_closed():
                held.end()
            else:  # A cancelled task leaves its last job running: the worker gets to this one after it.
                await asyncio.shield(loop.run_in_executor(self._worker, held.end))

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """The next turn of one conversation, or of several at once; `template` as for `apply_chat_template`."""
        ids: list[Prompt] = []
        several = conversations(messages)
        for i, conversation in enumerate(several):
            try:
                ids.append(self.apply_chat_template(conversation, **template))
            except UserError as error:
                raise type(error)(f"conversation {i + 1}: {error}" if len(several) > 1 else str(error)) from error
        return self.generate(ids, params)

    def apply_chat_template(self, messages: Seq[Message], **template: Any) -> list[int]:
        """A conversation as token ids, ready for `generate`, `stream` and `astream`.

        template: tools, documents, name, add_generation_prompt, continue_final_message, and variables of the
        template's own (forerun.text.chat). Raises NotFound where the checkpoint has no chat template.
        """
        return self.chat_template.encode(self.tokenizer, messages, **template)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template that the configuration names, else the checkpoint's. Raises NotFound where there is none."""
        return ChatTemplate.load(self.checkpoint.folder, self.config.chat_template)

    def listen(self, listener: Listener, *, detail: bool = False) -> Callable[[], None]:
        """Hear every StepReport; `detail` fills its rounds. Returns a function that ends it."""
        return self.engine.listen(listener, detail=detail)

    @cached_property
    def _worker(self) -> ThreadPoolExecutor:
        """One thread for all asynchronous streams: each thread of its own would get a pool of torch threads."""
        return ThreadPoolExecutor(1, thread_name_prefix="forerun")

    def _add(
        self, prompts: list[Prompt], params: SamplingParams | Seq[SamplingParams] | None, *, one: bool = False
    ) -> list[Request]:
        each = params_for(len(prompts), params, self.default_params)
        if one and each[0].n > 1:
            raise BadOption(f"n={each[0].n} is not possible for a stream, which has one output: start several streams")
        return self._shared.add([self.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts], each)
