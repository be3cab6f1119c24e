"""How texts are cut into words before merges (pre-tokenisation), by the value of tokenizer.ggml.pre in a GGUF file.

Names and words follow llama.cpp (llama-vocab.cpp), except in `_cased`, which follows the published pattern: it
distinguishes upper and lower case and allows combining marks within a word. llama.cpp knows the case of ASCII letters
only and ends words at marks, so that its ids for some texts in Hindi, or with capitals beyond ASCII, differ from those
in training.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cutting:
    """How texts are cut into words before merges: by each pattern in turn, as Oniguruma reads it.

    whole_words: a word that is a token is that token, whatever the merges say. add_bos: whether texts begin with BOS,
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


def _words(digits: str, letters: str = _LETTERS, signs: str = _SIGNS, blanks: str = f"{_LINES}|{_BLANKS}") -> str:
    return _tried(_SHORT, letters, digits, signs, blanks)


def _cased(digits: str, after: str = "") -> str:
    """Return the pattern with words by case. after: what may end a word, such as `_SHORT`."""
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
    "gpt-2": _GPT_2,
    "phi-2": _GPT_2,
    "mpt": _GPT_2,
    "olmo": _GPT_2,
    "jais": _GPT_2,
    "gigachat": _GPT_2,
    "mellum": _GPT_2,
    "a.x-4.0": _GPT_2,
    "exaone4": _GPT_2,
    "trillion": _GPT_2,
    "granite-docling": _GPT_2,
    "modern-bert": _GPT_2,
    "starcoder": _DIGITS_GPT_2,
    "refact": _DIGITS_GPT_2,
    "command-r": _DIGITS_GPT_2,
    "smollm": _DIGITS_GPT_2,
    "codeshell": _DIGITS_GPT_2,
    "exaone": _DIGITS_GPT_2,
    "minerva-7b": _DIGITS_GPT_2,
    "mellum2": _DIGITS_GPT_2,
    "falcon": _FALCON,
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "falcon-h1": _LLAMA_3,
    "pixtral": _LLAMA_3,
    "midm-2.0": _LLAMA_3,
    "lfm2": _LLAMA_3,
    "dbrx": _BY_MERGES,
    "smaug-bpe": _BY_MERGES,
    "chatglm-bpe": _BY_MERGES,
    "glm4": _GLM_4,
    "glm5": _GLM_4,
    "jais-2": Cutting((_words(r"\p{N}{1,3}", blanks=f"{_LINES}|{_HALVES}"),)),
    "minicpm5": Cutting((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True),
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "kormo": _QWEN_2,
    "f2llmv2": _QWEN_2,
    "megrez": _QWEN_2,
    "stablelm2": _QWEN_2,
    "hunyuan": _QWEN_2,
    "solar-open": _QWEN_2,
    "grok-2": _QWEN_2,
    "laguna": Cutting((r"[^\n]+|\n+", *_QWEN_2.patterns)),
    "ufakzeka": Cutting((_tried(_LETTERS, r"\p{N}", _SIGNS, _LINES, _BLANKS),)),
    "seed-coder": Cutting((_words(r"\p{N}", signs=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "qwen35": Cutting((_words(r"\p{N}", _MARKED, _MARKLESS_SIGNS),)),
    "bailingmoe": _QWEN_2,
    "bailingmoe2": _QWEN_2,
    "llada-moe": _QWEN_2,
    "exaone-moe": Cutting(
        (_words(r"\p{N}", _BEFORE + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r" ?[^\s\p{L}\p{N}]+[\r\n/]?"),)
    ),
    "deepseek-llm": Cutting((r"[\r\n]", rf"\s?{_LETTERS_2023}+", rf"\s?{_SIGNS_2023}+", r"\s+\z", _CHINESE, r"\p{N}+")),
    "deepseek-coder": Cutting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")),
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
    "hy_v4": _DEEPSEEK_V3,
    "tekken": Cutting((_cased(r"\p{N}"),), whole_words=True, add_bos=True),
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
    "kanana2": _GPT_4O,
    "talkie": _GPT_4O,
    "minimax-m2": _GPT_4O,
    "poro-chat": _PORO,
    "bloom": _PORO,
    "gpt3-finnish": _PORO,
    "viking": Cutting((_PHRASES, r"\p{N}")),
}
