"""Finds the special token ids that only a chat template writes, between messages. No answer contains these ids."""

from __future__ import annotations

from collections.abc import Collection

from forerun.errors import UserError
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer

QUESTION, ANSWER = "forerun asks", "forerun answers"  # looked for in the text that a template prints


def unwritten_ids(template: ChatTemplate, tokenizer: Tokenizer, end_ids: Collection[int]) -> frozenset[int]:
    """Return the special ids that a template writes around messages and a model never writes, such as <|im_start|>.

    The template renders a question, an answer and a question. The result is the special ids around the answer. End ids
    are left out. Ids that the template puts into the model's own turn after the generation prompt, such as <think>, are
    also left out. Tokens of tool calls are not found, because this conversation has no tools.

    Returns no ids if the template refuses this conversation, or if no end id follows the answer. Without such an end id
    a model, for example gpt-oss, may continue with another message by itself.
    """
    question, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    try:
        prompt = template.render([question])
        answered = template.render([question, answer], add_generation_prompt=False)
        amid = template.render([question, answer, question], add_generation_prompt=False)
    except UserError:
        return frozenset()
    if ANSWER not in answered or amid.count(ANSWER) != 1:
        return frozenset()
    turn = answered[len(prompt) :] if answered.startswith(prompt) else answered[answered.rfind(ANSWER) :]
    before, after = (_special(tokenizer, text) for text in amid.split(ANSWER))
    if not after or after[0] not in end_ids:
        return frozenset()
    return frozenset([*before, *after]) - frozenset(end_ids) - frozenset(_special(tokenizer, turn))


def _special(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the special token ids of a text, in order."""
    return [i for i in tokenizer.encode(text, add_special_tokens=False) if i in tokenizer.special_ids]
