"""Builds fill-in-the-middle prompts, which give a code model the texts before and after the gap that it fills."""

from __future__ import annotations

from forerun.errors import BadOption
from forerun.text.tokenizer import Tokenizer

# For each family of models, its marks in the order of the prompt; "prefix" and "suffix" stand for the two texts.
FORMS: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", "prefix", "<|fim_suffix|>", "suffix", "<|fim_middle|>"),  # Qwen Coder, Codegemma
    ("<fim_prefix>", "prefix", "<fim_suffix>", "suffix", "<fim_middle>"),  # StarCoder 2, Granite
    ("<fim-prefix>", "prefix", "<fim-suffix>", "suffix", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "prefix", "<｜fim▁hole｜>", "suffix", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "prefix", "▁<SUF>", "suffix", "▁<MID>"),  # Code Llama
    ("[SUFFIX]", "suffix", "[PREFIX]", "prefix"),  # Codestral
)
_TEXTS = ("prefix", "suffix")


def filling_ids(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Return the token ids of a fill-in-the-middle prompt. prefix, suffix: the texts before and after the gap.

    Raises BadOption for a model without tokens for fill-in-the-middle.
    """
    ids = {token: token_id for token_id, token in tokenizer.id_to_token.items()}
    form = next((form for form in FORMS if all(mark in ids for mark in form if mark not in _TEXTS)), None)
    if form is None:
        raise BadOption(
            "this model has no tokens for filling in a text between two others: leave out what stands behind it"
        )
    texts = {"prefix": prefix, "suffix": suffix}
    prompt = tokenizer.encode("")  # what every text of the model begins with
    for mark in form:
        prompt += tokenizer.encode(texts[mark], add_special_tokens=False) if mark in texts else [ids[mark]]
    return prompt
