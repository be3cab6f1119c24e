"""For the API pages: a table of a dataclass's fields, with what their metadata or their comments say.

Nothing is imported: griffe reads the source.
"""

import ast
import re
import tokenize
from typing import Any

import griffe


class Fields(griffe.Extension):
    """Adds a section Attributes to the docstring of each dataclass."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Describe the public fields of a dataclass."""
        if "dataclass" not in cls.labels and not any("dataclass" in str(each.value) for each in cls.decorators):
            return
        comments = _comments(str(cls.filepath))
        rows = []
        for name, field in cls.members.items():
            if name.startswith("_") or not field.is_attribute or field.annotation is None or "property" in field.labels:
                continue
            text = _told(field, comments)
            if text:
                rows.append(f"    {name}: {text}")
        if rows and cls.docstring is not None:
            cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *rows])


def _told(field: griffe.Attribute, comments: dict[int, str]) -> str:
    """What a field says of itself: help and range of its metadata, else the comment on its lines; and its default."""
    value = str(field.value) if field.value is not None else ""
    made = ast.parse(value, mode="eval").body if value else None
    text = ""
    if isinstance(made, ast.Call):
        metadata = {word.arg: word.value for word in made.keywords}
        given = metadata.pop("metadata", None)
        if isinstance(given, ast.Dict):
            keys = [key.value for key in given.keys if isinstance(key, ast.Constant)]
            metadata |= dict(zip(keys, given.values, strict=False))
        told = metadata.get("help") or next(iter(made.args[1:]), None)
        text = _text(told)
        words = {"min": "from", "max": "to"}
        bounds = {word: ast.unparse(metadata[key]) for key, word in words.items() if key in metadata}
        range_ = _text(metadata.get("range")) or " ".join(f"{word} {bound}" for word, bound in bounds.items())
        if any(re.search(rf"(?<![\w.]){re.escape(bound)}(?![\w.])", text) for bound in bounds.values()):
            range_ = ""  # the text says it
        beside = [each for each in (_text(metadata.get("unit")), range_) if each and "python" not in metadata]
        text = _text(metadata.get("python")) or text
        if beside:
            text += f" ({', '.join(beside)})"
        default = made.args[0] if made.args else metadata.get("default")
        value = ast.unparse(default) if default is not None else ""
    lines = range(field.lineno or 0, (field.endlineno or 0) + 1)
    text = text or next((comments[line] for line in lines if line in comments), "")
    if value and text:
        text += f" Default: `{value}`." if text.endswith(".") else f". Default: `{value}`."
    return " ".join(text.split())


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def _comments(path: str) -> dict[int, str]:
    """Comments by line that stand behind code."""
    with open(path, "rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    return {
        token.start[0]: token.string.lstrip("# ")
        for token in tokens
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
    }
