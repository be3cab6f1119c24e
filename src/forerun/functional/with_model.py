"""Speculation for a model of transformers in one line. Prompts are texts, conversations or token ids."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

import tokenizers
import torch

from forerun import pacing
from forerun.engine.request import RequestOutput
from forerun.errors import BadOption, NotFound, shown
from forerun.functional.engines import as_ids, assembled, num_ids_of
from forerun.functional.modules import ModuleModel
from forerun.text.tokenizer import Tokenizer
from forerun.types import Listener, SamplingParams

Message = Mapping[str, Any]


def speculate_with(
    model: Any,
    tokenizer: Any = None,
    draft: Any = "suffix",
    *,
    spec_length: int | None = None,
    pacing_policy: str = "auto",
    use_cache: bool = True,
    draft_model: Any = None,
) -> Speculating:
    """Put speculation around a model of transformers. forerun need not know the model's architecture.

    Args:
        model: a causal or encoder-decoder module, in evaluation mode, on its own device.
        tokenizer: the model's tokenizer, a fast one; None = prompts are token ids, and outputs have no text.
        draft: a drafter without a model, by its name and options (suffix, lookup, ngram, recycle, ...;
            docs/drafters.md), or a module that drafts, on its own device, with the same vocabulary.
        spec_length: the number of tokens drafted per step; None = the policy's default. pacing_policy: decides how far
            to draft (docs/methods); `auto` drafts as far as it pays.
        use_cache: keep keys and values between passes; False for a model with a state that cannot be cut.
        draft_model: the module that drafts, where `draft` names a drafter that needs one, such as tree or cascade.

    Raises UserError for arguments that cannot be honoured.
    """
    is_module = isinstance(draft, torch.nn.Module)
    if is_module and draft_model is not None:
        raise BadOption("two draft models are given: name a drafter by draft and its module by draft_model")
    module = draft if is_module else draft_model
    num_ids = num_ids_of(tokenizer)
    target = ModuleModel(model, "model", uses_cache=use_cache, num_ids=num_ids)
    drafted = None
    if module is not None:
        drafted = ModuleModel(module, "draft model", uses_cache=use_cache, num_ids=num_ids)
    return Speculating(target, tokenizer, "model" if is_module else draft, drafted, pacing_policy, spec_length)


class Speculating:
    """A model with speculation, made by `speculate_with`. Only one thread may use it at a time.

    A drafter that learns from texts keeps its knowledge for later calls.
    """

    def __init__(
        self,
        target: ModuleModel,
        tokenizer: Any,
        draft: str,
        draft_model: ModuleModel | None,
        pacing_policy: str,
        spec_length: int | None,
    ) -> None:
        self.tokenizer, self._target = tokenizer, target
        if tokenizer is not None and getattr(tokenizer, "eos_token_id", None) is not None:
            end_ids = target.end_ids() | {tokenizer.eos_token_id}
        else:
            end_ids = target.end_ids()
        self._texts = None if tokenizer is None else own_tokenizer(tokenizer)
        self._assembly = assembled(
            target,
            draft,
            draft_model,
            pacing.make(pacing_policy, spec_length),
            tokenizer=self._texts,
            end_ids=end_ids,
            spares=True,
        )
        self.engine = self._assembly.engine

    def generate(self, prompts: Any, params: SamplingParams | None = None) -> Any:
        """Generate for one prompt or several. Return a RequestOutput (text, token_ids, report), or a list of these.

        prompts: a text, a conversation (messages with role and content) or token ids; or a list of these. params: None
        = the defaults of SamplingParams, which draw at temperature 1. The result is a list for several prompts, and if
        params.n is above 1. Raises UserError for arguments that cannot be honoured.
        """
        params = params or SamplingParams()
        is_one = self._is_one(prompts)
        inputs = [self._ids(prompt) for prompt in ([prompts] if is_one else prompts)]
        outputs: list[RequestOutput] = []
        for ids in inputs:
            with self._assembly.request(ids, params) as requests:
                self._assembly.run(requests)
                outputs += [request.output() for request in requests]
        return outputs[0] if is_one and params.n == 1 else outputs

    def listen(self, listener: Listener, *, detail: bool = False) -> Any:
        """Call `listener` with every StepReport from now on. Returns a function that ends the calls.

        detail: whether the reports contain their rounds.
        """
        return self.engine.listen(listener, detail=detail)

    def _is_one(self, prompts: Any) -> bool:
        if isinstance(prompts, str):
            return True
        if isinstance(prompts, torch.Tensor):
            return prompts.dim() < 2
        if not isinstance(prompts, Seq) or not prompts:
            raise BadOption(f"{shown(prompts)} is no prompt: give a text, messages, token ids, or a list of such")
        return isinstance(prompts[0], Mapping) or not (isinstance(prompts[0], str) or hasattr(prompts[0], "__len__"))

    def _ids(self, prompt: Any) -> list[int]:
        """Return the token ids of one prompt: a text, a conversation or token ids."""
        is_chat = isinstance(prompt, Seq) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if not isinstance(prompt, str) and not is_chat:
            return as_ids(prompt)
        if self._texts is None:
            raise BadOption("a text needs a tokenizer: give speculate_with the model's tokenizer, or give token ids")
        if isinstance(prompt, str):
            return self._texts.encode(prompt)
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise NotFound("the tokenizer has no chat template: give a text, or set tokenizer.chat_template")
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return self._texts.encode(text, add_special_tokens=False)


def own_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return the engine's Tokenizer for a fast tokenizer of transformers. The tokenizer's backend is copied.

    A Tokenizer of the engine is returned as it is. Raises BadOption for any other object.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise BadOption(
            f"the tokenizer {shown(type(tokenizer).__name__)} is not a fast one: leave it out and give token ids"
        )
    return Tokenizer(copy.deepcopy(backend), Path(str(getattr(tokenizer, "name_or_path", "") or "tokenizer")))
