"""Patterns that cut texts into words before BPE merges (pre-tokenisation), by the name in tokenizer.ggml.pre.

Names and patterns follow llama.cpp (llama-vocab.cpp). An exception is `_cased`, which follows the published pattern: it
distinguishes upper and lower case, and allows combining marks within a word. llama.cpp knows the case of ASCII letters
only, and ends words at combining marks. So for some texts in Hindi, or with capital letters beyond ASCII, llama.cpp
gives other ids than the model saw in training.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cutting:
    """Describes how texts are cut into words before BPE merges.

    patterns: regular expressions in Oniguruma's syntax, which are applied one after another. whole_words: whether a
    word that is a token of the vocabulary becomes this token without merges. add_bos: whether texts begin with BOS,
    unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


def _tried(*alternatives: str) -> str:
    return "|".join(alternatives)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SHORT = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"  # what follows an apostrophe in English
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # the blank or sign that a word may begin with
_LETTERS, _MARKED = _BEFORE + r"\p{L}+", _BEFORE + r"[\p{L}\p{M}]+"
_SIGNS, _MARKLESS_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_LINES, _BLANKS = r"\s*[\r\n]+", r"\s+(?!\S)|\s+"
_HALVES = _tried(*(rf"\s{{{1 << n}}}(?!\S)" for n in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s")
_CHINESE, _JAPANESE = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_PHRASES = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Capital and small letters of scripts, as of a vocabulary of 2023.
_LETTERS_2023 = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\uab68"
    "\U00010570-\U000105bc\U00010d00-\U00010d8f\U00016e40-\U0001e8ff]]"
)
_SIGNS_2023 = r"[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _same(names: str, cutting: Cutting) -> dict[str, Cutting]:
    return dict.fromkeys(names.split(), cutting)


def _words(digits: str, letters: str = _LETTERS, signs: str = _SIGNS, blanks: str = f"{_LINES}|{_BLANKS}") -> str:
    return _tried(_SHORT, letters, digits, signs, blanks)


def _cased(digits: str, after: str = "") -> str:
    """Return a pattern that also cuts words where a capital letter follows a lower-case letter.

    digits: the pattern of numbers. after: a pattern that may end a word, such as `_SHORT`.
    """
    words = [f"{_BEFORE}{_UPPER}{more}{after}" for more in (f"*{_LOWER}+", f"+{_LOWER}*")]
    return _tried(*words, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _LINES, _BLANKS)


_FALCON = Cutting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))
_GPT_2, _DIGITS_GPT_2 = Cutting((_GPT2,)), Cutting((r"\p{N}", _GPT2))
_LLAMA_3, _BY_MERGES = Cutting((_words(r"\p{N}{1,3}"),), True, True), Cutting((_words(r"\p{N}{1,3}"),))
_GLM_4, _QWEN_2 = Cutting(_BY_MERGES.patterns, whole_words=True), Cutting((_words(r"\p{N}"),))
_V3_WORDS = (
    r"[!-/:-@\[-`{-~][A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", _LINES, _BLANKS,
)  # fmt: skip
_DEEPSEEK_V3 = Cutting((r"\p{N}{1,3}", _JAPANESE, _tried(*_V3_WORDS)))
_GPT_4O = Cutting((_cased(r"\p{N}{1,3}", f"(?:{_SHORT})?"),))
_PORO = Cutting((_PHRASES,))

CUTTINGS = {
    "default": Cutting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **_same("gpt-2 phi-2 mpt olmo jais gigachat mellum a.x-4.0 exaone4 trillion", _GPT_2),
    **_same("granite-docling modern-bert", _GPT_2),
    **_same("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGITS_GPT_2),
    "falcon": _FALCON,
    **_same("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA_3),
    **_same("dbrx smaug-bpe chatglm-bpe", _BY_MERGES),
    **_same("glm4 glm5", _GLM_4),
    "jais-2": Cutting((_words(r"\p{N}{1,3}", blanks=f"{_LINES}|{_HALVES}"),)),
    "minicpm5": Cutting((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True),
    **_same("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN_2),
    "laguna": Cutting((r"[^\n]+|\n+", *_QWEN_2.patterns)),
    "ufakzeka": Cutting((_tried(_LETTERS, r"\p{N}", _SIGNS, _LINES, _BLANKS),)),
    "seed-coder": Cutting((_words(r"\p{N}", signs=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "qwen35": Cutting((_words(r"\p{N}", _MARKED, _MARKLESS_SIGNS),)),
    **_same("bailingmoe bailingmoe2 llada-moe", _QWEN_2),
    "exaone-moe": Cutting(
        (_words(r"\p{N}", _BEFORE + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r" ?[^\s\p{L}\p{N}]+[\r\n/]?"),)
    ),
    "deepseek-llm": Cutting((r"[\r\n]", rf"\s?{_LETTERS_2023}+", rf"\s?{_SIGNS_2023}+", r"\s+\z", _CHINESE, r"\p{N}+")),
    "deepseek-coder": Cutting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")),
    **_same("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK_V3),
    "tekken": Cutting((_cased(r"\p{N}"),), whole_words=True, add_bos=True),
    **_same("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT_4O),
    **_same("poro-chat bloom gpt3-finnish", _PORO),
    "viking": Cutting((_PHRASES, r"\p{N}")),
}
