"""LLM: checkpoints and texts on the outside, the engine on the inside."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from forerun import drafters, pacing
from forerun.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.request import Chunk, Request, RequestOutput
from forerun.errors import BadOption, NotFound
from forerun.kv.cache import KVCache
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.models.runner import Runner
from forerun.ops.reference import ReferenceOps
from forerun.text.tokenizer import Tokenizer
from forerun.types import Listener, SamplingParams

DATA = Path(__file__).resolve().parent.parent / "data"
SHIPPED_TARGET, SHIPPED_DRAFT = DATA / "target", DATA / "draft"
DEFAULT_MAX_SEQ_LEN = 4096  # tokens; a model's own limit may be far beyond what its cache should take unasked

Prompt = str | Seq[int]


class LLM:
    """A target model with speculation.

    target: a checkpoint folder, a loaded Checkpoint, or None for the shipped model. Options are those of
    EngineConfig, with the aliases draft_model, num_speculative_tokens, speculative_config, use_speculative_decoding.
    Raises UserError for everything that the caller can mend.
    """

    def __init__(self, target: str | Path | Checkpoint | None = None, **options: Any) -> None:
        loaded = target if isinstance(target, Checkpoint) else None
        named = {} if target is None or loaded is not None else {"target": str(target)}
        self.config = EngineConfig.make(**named, **options)
        self.checkpoint = loaded or load_target(self.config)
        if loaded is not None:
            _check_loaded(loaded, self.config)
        self.tokenizer = Tokenizer.load(self.checkpoint.folder)
        self.engine = self._build()

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
                self.engine.step()
        finally:
            for request in requests:
                self.engine.abort(request)
        for i, request in enumerate(requests):
            if request.error is not None:
                raise type(request.error)(f"prompt {i + 1}: {request.error}") from request.error
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Chunks as they are verified: text that can no longer change, and the tokens behind it."""
        (request,) = self._add_all(_as_list(prompt), params)
        try:
            while True:
                # Other calls may step the engine, and finish this request, between two pieces.
                if request.seq.finish_reason is None:
                    self.engine.step()
                chunk = request.chunk()
                if request.error is not None:
                    raise request.error
                if chunk.token_ids or chunk.finish_reason:
                    yield chunk
                if chunk.finish_reason:
                    return
        finally:
            self.engine.abort(request)

    def listen(self, listener: Listener, *, detail: bool = False) -> Callable[[], None]:
        """Hear every StepReport; `detail` fills its rounds. Returns a function that ends it."""
        return self.engine.listen(listener, detail=detail)

    def _add_all(self, prompts: list[Prompt], params: SamplingParams | Seq[SamplingParams] | None) -> list[Request]:
        each = list(params) if isinstance(params, Seq) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise BadOption(f"{len(each)} SamplingParams for {len(prompts)} prompts: give one, or one per prompt")
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else _ids(p) for p in prompts]
        added: list[Request] = []
        try:
            for prompt, param in zip(ids, each, strict=True):
                added.append(self.engine.add(prompt, param))
        except Exception:
            for request in added:
                self.engine.abort(request)
            raise
        return added

    def _build(self) -> Engine:
        config, checkpoint = self.config, self.checkpoint
        model, max_seq_len = checkpoint.model, self._max_seq_len()
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

    def _max_seq_len(self) -> int:
        limit = self.checkpoint.model.config.max_positions
        if self.config.max_seq_len is None:
            return min(limit, DEFAULT_MAX_SEQ_LEN)
        if self.config.max_seq_len > limit:
            raise BadOption(f"max_seq_len={self.config.max_seq_len} is not possible: the model has {limit} positions")
        return self.config.max_seq_len


def load_target(config: EngineConfig) -> Checkpoint:
    """The target that a configuration names, on its device and in its type; the shipped one where it names none."""
    if config.target is None and not SHIPPED_TARGET.exists():
        raise NotFound("the shipped model is missing from this installation: name a checkpoint folder as target")
    ops = ReferenceOps(row_by_row=config.ops == "reference_row_by_row")
    folder = config.target or SHIPPED_TARGET
    return load_checkpoint(folder, dtype=config.dtype, device=_device(config.device), ops=ops)


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
