"""What a caller may give as a prompt, a conversation and parameters, brought into one form or refused."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence as Seq
from typing import Any

from forerun.errors import BadOption
from forerun.types import SamplingParams

Prompt = str | Seq[int]
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, as chat templates want it
A_CONVERSATION = 'a list of messages such as [{"role": "user", "content": "hello"}]'


def as_list(prompts: object) -> list[Prompt]:
    """One prompt or several: a text, a sequence of ids (numpy's and torch's included), or a list of either."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    return [_ids(items)] if items and _is_id(items[0]) else [p if isinstance(p, str) else _ids(p) for p in items]


def only_one(prompt: object) -> Prompt:
    """The prompt of a stream. Raises BadOption for none, and for several."""
    prompts = as_list(prompt)
    if len(prompts) != 1:
        raise BadOption(f"a stream takes one prompt and was given {len(prompts)}: start one stream for each")
    return prompts[0]


def conversations(messages: object) -> list[list[Message]]:
    """One conversation or several, each a list of messages. Raises BadOption for anything else."""
    items = [] if isinstance(messages, str | Mapping) else _items(messages)
    if items and all(isinstance(item, Mapping) for item in items):
        return [items]
    lists = [[] if isinstance(item, str | Mapping) else _items(item) for item in items]
    if not lists or not all(part and all(isinstance(message, Mapping) for message in part) for part in lists):
        raise BadOption(f"messages={messages!r:.60} is not possible: it must be {A_CONVERSATION}, or several of them")
    return lists


def params_for(num_prompts: int, params: object, default: SamplingParams) -> list[SamplingParams]:
    """Parameters for each prompt: the default, one for all, or one per prompt. Raises BadOption for anything else."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * num_prompts
    each = [] if isinstance(params, str | Mapping) else _items(params)
    if not each or not all(isinstance(param, SamplingParams) for param in each):
        raise BadOption(f"params={params!r:.60} is not possible: it must be SamplingParams(...), one or one per prompt")
    if len(each) != num_prompts:
        raise BadOption(f"{len(each)} SamplingParams for {num_prompts} prompts: give one, or one per prompt")
    return each


def _items(values: object) -> list[Any]:
    return list(values) if isinstance(values, Iterable) else [values]


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
        hint = "; LLM.chat takes conversations" if isinstance(prompt, Mapping) else ""
        raise BadOption(f"a prompt must be a text or a sequence of token ids, not {prompt!r:.60}{hint}") from None
