"""LLM: checkpoints and texts on the outside, the engine on the inside."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from forerun import drafters, pacing
from forerun.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.memory import resolve_max_seq_len
from forerun.engine.request import Chunk, Request, RequestOutput
from forerun.errors import BadOption, NotFound
from forerun.kv.cache import KVCache
from forerun.models.generation import sampling_defaults
from forerun.models.hub import locate
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.models.runner import Runner
from forerun.ops.reference import ReferenceOps
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from forerun.types import Listener, SamplingParams

DATA = Path(__file__).resolve().parent.parent / "data"
SHIPPED_TARGET, SHIPPED_DRAFT = DATA / "target", DATA / "draft"

Prompt = str | Seq[int]
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, as chat templates want it


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
        self.checkpoint = loaded or load_target(self.config)
        if loaded is not None:
            _check_loaded(loaded, self.config)
        self.tokenizer = self.checkpoint.tokenizer or Tokenizer.load(self.checkpoint.folder)
        self.default_params = SamplingParams()
        if self.config.generation_config == "model":
            self.default_params = sampling_defaults(self.checkpoint.folder)
        if self.config.chat_template is not None:
            _ = self.chat_template  # a file that cannot be read is refused here
        self.engine = self._build()
        self._lock = threading.Lock()  # held by whoever touches the engine

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """From a finished configuration."""
        options = {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__ if name != "target"}
        return cls(config.target, **options)

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts. A prompt is a text or token ids; params: one, or one per prompt."""
        requests = self._add_all(_as_list(prompts), params)
        try:
            while any(r.seq.finish_reason is None for r in requests):
                with self._lock:
                    self.engine.step()
        finally:
            self._abort(requests)
        for i, request in enumerate(requests):
            if request.error is not None:
                raise type(request.error)(f"prompt {i + 1}: {request.error}") from request.error
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Chunks as they are verified: text that can no longer change, and the tokens behind it."""
        requests = self._add_all(_as_list(prompt), params)
        try:
            finished = False
            while not finished:
                chunk = self._advance(requests[0])
                finished = chunk.finish_reason is not None
                if chunk.token_ids or finished:
                    yield chunk
        finally:
            self._abort(requests)

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Chunk]:
        """`stream` for asyncio. The event loop stays free; several streams run in one batch.

        Leaving the loop early, closing the iterator or cancelling the task ends the request and frees what it holds.
        """
        loop, requests = asyncio.get_running_loop(), list[Request]()

        def add() -> None:
            requests.extend(self._add_all(_as_list(prompt), params))

        try:
            await loop.run_in_executor(self._worker, add)
            finished = False
            while not finished:
                chunk = await loop.run_in_executor(self._worker, self._advance, requests[0])
                finished = chunk.finish_reason is not None
                if chunk.token_ids or finished:
                    yield chunk
        finally:
            # A cancelled task leaves its last job running: the worker gets to this one after it.
            await asyncio.shield(loop.run_in_executor(self._worker, self._abort, requests))

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """The next turn of one conversation, or of several at once; `template` as for `apply_chat_template`."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Seq[Any] = messages if several else [messages]
        return self.generate([self.apply_chat_template(c, **template) for c in conversations], params)

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

    def _advance(self, request: Request) -> Chunk:
        """What is new of a request; a step of the batch where nothing is. Other calls may step, and finish, it too."""
        with self._lock:
            if request.seq.finish_reason is None and not request.has_news:
                self.engine.step()
            chunk = request.chunk()
        if request.error is not None:
            raise request.error
        return chunk

    def _abort(self, requests: Seq[Request]) -> None:
        with self._lock:
            for request in requests:
                self.engine.abort(request)

    def _add_all(self, prompts: list[Prompt], params: SamplingParams | Seq[SamplingParams] | None) -> list[Request]:
        each = list(params) if isinstance(params, Seq) else [params or self.default_params] * len(prompts)
        if len(each) != len(prompts):
            raise BadOption(f"{len(each)} SamplingParams for {len(prompts)} prompts: give one, or one per prompt")
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else _ids(p) for p in prompts]
        added: list[Request] = []
        try:
            with self._lock:
                for prompt, param in zip(ids, each, strict=True):
                    added.append(self.engine.add(prompt, param))
        except Exception:
            self._abort(added)
            raise
        return added

    def _build(self) -> Engine:
        config, checkpoint = self.config, self.checkpoint
        model = checkpoint.model
        max_seq_len = resolve_max_seq_len(config.max_seq_len, model.config.max_positions)
        cache = KVCache.create(
            model.config.cache_shape,
            config.kv_cache_backend,  # type: ignore[arg-type]
            max_batch_size=config.max_batch_size,
            max_seq_len=max_seq_len,
            num_tokens=config.kv_cache_tokens,
            dtype=model.dtype,
            device=model.device,
        )
        num_ids = min(self.tokenizer.num_ids, model.config.vocab_size)
        runner = Runner(model, cache, num_ids, sorted(self.tokenizer.holes))
        target = drafters.Target(
            model=model,
            tokenizer=self.tokenizer,
            end_ids=checkpoint.end_ids,
            num_ids=num_ids,
            holes=tuple(sorted(self.tokenizer.holes)),
            max_batch_size=config.max_batch_size,
            max_seq_len=max_seq_len,
            kv_cache_backend=config.kv_cache_backend,  # type: ignore[arg-type]
            kv_cache_tokens=config.kv_cache_tokens,
            shipped_draft=str(SHIPPED_DRAFT) if Path(checkpoint.folder) == SHIPPED_TARGET else None,
            loaded_draft=self._loaded_draft,
        )
        return Engine(
            runner,
            drafters.make(config.draft, target),
            pacing.make(config.pacing, config.spec_length),
            tokenizer=self.tokenizer,
            end_ids=checkpoint.end_ids,
            max_seq_len=max_seq_len,
            max_batch_size=config.max_batch_size,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            catchup_tokens=config.draft_catchup_tokens,
        )


def load_target(config: EngineConfig) -> Checkpoint:
    """The target that a configuration names, on its device and in its type; the shipped one where it names none."""
    if config.target is None and not SHIPPED_TARGET.exists():
        raise NotFound("the shipped model is missing from this installation: name a checkpoint folder as target")
    ops = ReferenceOps(row_by_row=config.ops == "reference_row_by_row")
    name, device = config.target or SHIPPED_TARGET, _device(config.device)
    return load_checkpoint(name, dtype=config.dtype, device=device, ops=ops, with_tokenizer=True)


def suggested_params(config: EngineConfig) -> SamplingParams:
    """What the target's generation_config.json suggests, read without its weights; see models/generation.py."""
    return sampling_defaults(locate(config.target or SHIPPED_TARGET, config_only=True))


def _check_loaded(checkpoint: Checkpoint, config: EngineConfig) -> None:
    """A loaded model brings type, device and operators along: options that say otherwise are refused, not ignored."""
    model = checkpoint.model
    row_by_row = {"auto": model.ops.row_by_row, "reference": False, "reference_row_by_row": True}[config.ops]
    facts = {
        "dtype": (config.dtype, str(model.dtype).removeprefix("torch.")),
        "device": (config.device, model.device.type),
        "ops": (config.ops, config.ops if row_by_row == model.ops.row_by_row else "other operators"),
    }
    for name, (wanted, fact) in facts.items():
        if wanted not in ("auto", fact):
            raise BadOption(f"{name}={wanted!r} contradicts the loaded model ({fact}): load the model that way instead")


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or several: a text, a sequence of ids (numpy's and torch's included), or a list of either."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    return [_ids(items)] if items and _is_id(items[0]) else [p if isinstance(p, str) else _ids(p) for p in items]


def _is_id(item: object) -> bool:
    try:
        operator.index(item)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _ids(prompt: object) -> list[int]:
    """Token ids as Python integers. Raises BadOption for anything that is no sequence of integers."""
    try:
        return [operator.index(token) for token in prompt]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise BadOption(f"a prompt must be a text or a sequence of token ids, not {prompt!r:.60}") from None


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise BadOption("device='cuda' is not possible: torch sees no CUDA device; use device='cpu'")
    return torch.device("cuda" if name in ("auto", "cuda") and available else "cpu")
