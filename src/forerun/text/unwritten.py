"""The ids that a chat template alone writes: they begin messages, and no answer has them in it."""

from __future__ import annotations

from collections.abc import Collection

from forerun.errors import UserError
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer

QUESTION, ANSWER = "forerun asks", "forerun answers"  # found again in the text of a template


def unwritten_ids(template: ChatTemplate, tokenizer: Tokenizer, end_ids: Collection[int]) -> frozenset[int]:
    """Return the special ids that stand around messages and that a model never writes, such as the id of <|im_start|>.

    They stand around an answer between two questions, except for end ids and for ids that the template puts into the
    model's own turn behind the generation prompt, such as <think>. Tokens of tool calls are not among them, as the
    conversation has no tools. Where an answer does not end with an end id the model may go on to another message by
    itself, as gpt-oss does: then, and where the template refuses such a conversation, there are none.
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
    """Return the special ids of a text, in order."""
    return [i for i in tokenizer.encode(text, add_special_tokens=False) if i in tokenizer.special_ids]
