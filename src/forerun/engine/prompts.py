"""Converts the prompts, conversations and parameters of callers into lists, and raises BadOption for invalid values."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq, Set
from typing import Any, TypeVar

from forerun.errors import BadOption, shown
from forerun.registry import by_name, unknown
from forerun.types import SamplingParams

Prompt = str | Seq[int]
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, as chat templates want it
A_CONVERSATION = 'a list of messages such as [{"role": "user", "content": "hello"}]'


Method = TypeVar("Method", bound=Callable[..., Any])


def names_keywords(method: Method) -> Method:
    """Wrap a method of LLM so that an unknown keyword raises BadOption. The message says where the keyword belongs."""
    parameters = list(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)
    def checked(self: Any, *given: Any, **named: Any) -> Any:
        for name in named.keys() - set(parameters):
            raise BadOption(no_keyword(f"LLM.{method.__name__}", name, named[name], parameters))
        return method(self, *given, **named)

    return checked  # type: ignore[return-value]


def no_keyword(call: str, name: str, value: object, keywords: Seq[str]) -> str:
    """Return the error text for a keyword that a call does not accept.

    call: the called method, such as LLM.chat. name, value: the keyword and its value. keywords: the accepted keywords.
    """
    fields = SamplingParams.__dataclass_fields__
    near = difflib.get_close_matches(name, [*keywords, *fields], n=1)
    if near and near[0] in fields:
        return f"{call} takes no {name}: use SamplingParams({near[0]}={shown(value)}), given as params"
    if name == "sampling_params":  # vLLM's
        return f"{call} takes no {name}: it is called params here"
    there = None if near else by_name(name, keywords, "SamplingParams")
    return there or unknown(f"argument of {call} called", name, keywords)


def as_list(prompts: object) -> list[Prompt]:
    """Return one prompt, or a sequence of prompts, as a list. A prompt is a text or a sequence of token ids.

    The ids may be an array of numpy or torch. Raises BadOption for other values.
    """
    given = _plain(prompts)
    if isinstance(given, str):
        return [given]
    if isinstance(given, _NO_LISTS) or not isinstance(given, Iterable):
        raise _refusal(prompts)
    items = list(given)
    return [_ids(items)] if items and _is_id(items[0]) else [p if isinstance(p, str) else _ids(p) for p in items]


def only_one(prompt: object) -> Prompt:
    """Return the prompt of a stream. Raises BadOption if there is no prompt, or more than one prompt."""
    prompts = as_list(prompt)
    if len(prompts) != 1:
        raise BadOption(f"a stream takes one prompt and was given {len(prompts)}: start one stream for each")
    return prompts[0]


def refuse_to_stream(params: object) -> None:
    """Raise BadOption for a beam search, which finds its best text only at the end."""
    if isinstance(params, SamplingParams) and params.searches:
        raise BadOption(
            f"num_beams={params.num_beams} cannot be streamed, as its texts are known at the end: use generate"
        )


def conversations(messages: object) -> list[list[Message]]:
    """Return one conversation, or a sequence of conversations, as a list of message lists.

    Raises BadOption for other values.
    """
    items = [] if isinstance(messages, str | Mapping) else _items(messages)
    if items and all(isinstance(item, Mapping) for item in items):
        return [items]
    lists = [[] if isinstance(item, str | Mapping) else _items(item) for item in items]
    if not lists or not all(part and all(isinstance(message, Mapping) for message in part) for part in lists):
        raise BadOption(f"messages={shown(messages)} is not possible: it must be {A_CONVERSATION}, or several of them")
    return lists


def params_for(num_prompts: int, params: object, default: SamplingParams) -> list[SamplingParams]:
    """Return a list with the parameters of each prompt.

    params: one SamplingParams for all prompts, or one for each prompt; None = `default` for all prompts. Raises
    BadOption for other values.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * num_prompts
    each = [] if isinstance(params, str | Mapping) else _items(params)
    if not each or not all(isinstance(param, SamplingParams) for param in each):
        raise BadOption(
            f"params={shown(params)} is not possible: it must be SamplingParams(...), one or one per prompt"
        )
    if len(each) != num_prompts:
        raise BadOption(f"{len(each)} SamplingParams for {num_prompts} prompts: give one, or one per prompt")
    return each


def _items(values: object) -> list[Any]:
    values = _plain(values)
    return list(values) if isinstance(values, Iterable) else [values]


# Items of bytes look like ids; sets and mappings have no order.
_NO_LISTS = (bytes, bytearray, memoryview, Mapping, Set)


def _plain(value: Any) -> Any:
    """Convert an array or scalar, for example of numpy or torch, to Python lists and numbers.

    Other values are returned unchanged.
    """
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, memoryview) else value


def _is_id(item: object) -> bool:
    try:
        _id(item)
    except (TypeError, ValueError):
        return False
    return True


def _id(item: Any) -> int:
    if type(item) is int:
        return item
    item = _plain(item)
    if isinstance(item, bool):
        raise TypeError
    return operator.index(item)


def _ids(prompt: object) -> list[int]:
    """Return token ids as Python integers.

    Raises BadOption if `prompt` is not a sequence of integers, or has an integer outside -2^31 .. 2^31 - 1.
    """
    given = _plain(prompt)
    try:
        if isinstance(given, _NO_LISTS):
            raise TypeError
        ids = [_id(token) for token in given]
    except (TypeError, ValueError):
        raise _refusal(prompt) from None
    for token in ids:
        if not -(2**31) <= token < 2**31:  # which ids the model has is checked by the engine
            raise BadOption(f"a prompt holds the id {shown(token)}, which is beyond every model's vocabulary")
    return ids


def _refusal(prompt: object) -> BadOption:
    hint = "; LLM.chat takes conversations" if isinstance(prompt, Mapping) else ""
    hint = "; decode bytes to a text first" if isinstance(prompt, bytes | bytearray | memoryview) else hint
    return BadOption(f"a prompt must be a text or a sequence of token ids, not {shown(prompt)}{hint}")
