"""Shows speculation in a terminal: one line per target pass, and text in colours that show each token's origin.

Accepted tokens are green, rejected tokens red, corrections and bonus tokens blue (Figure 1 of Leviathan et al. 2023).
Tokens after a rejection, which are never tested, are dim. The lines of passes have marks, too, so that they can be
copied and read without colour: [-rejected-], {never tested}, [+the target's own+].
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Sequence as Seq
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from forerun.cli.folding import folded
from forerun.models.named import named_models
from forerun.registry import about, abouts, load
from forerun.text.detokenizer import Detokenizer
from forerun.text.rounds import MARKS, STYLES, Kind, Piece, committed_pieces, round_pieces
from forerun.text.terminal import PIPE_WIDTH, visible
from forerun.text.tokenizer import Tokenizer, token_text
from forerun.types import SamplingParams, StepReport

if TYPE_CHECKING:
    from forerun.engine.llm import LLM
    from forerun.engine.request import Chunk

LEGEND: tuple[tuple[str, Kind], ...] = (
    ("accepted, ", "accepted"),
    ("[-rejected-], ", "rejected"),
    ("{never tested}, ", "untested"),
    ("[+the target's own+]", "correction"),
)


class RoundPrinter:
    """A listener that prints a legend, then a line for each target pass: number, accepted/drafted counts, tokens.

    left: the prompt's last token id, which the text of the next token depends on; None = the prompt is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, console: Console, left: int | None) -> None:
        self._tokenizer, self._console, self._left = tokenizer, console, left
        self.num_passes = 0

    def __call__(self, report: StepReport) -> None:
        for detail in report.rounds:
            if not self.num_passes:
                self._line("", [(text, STYLES[kind]) for text, kind in LEGEND])
                self._line("pass accepted/drafted", [])
            self.num_passes += 1
            pieces = round_pieces(detail, report.num_committed)
            self._line(
                f"{self.num_passes:4} {len(detail.accepted):2}/{len(detail.tokens):<2} ", list(self._cells(pieces))
            )

    def _line(self, label: str, cells: Seq[tuple[str, str]]) -> None:
        for i, line in enumerate(wrap(cells, self._console.width - len(label))):
            head = Text.assemble((label if i == 0 else " " * len(label), "dim"))
            self._console.print(head + line, soft_wrap=True)

    def _cells(self, pieces: Seq[Piece]) -> Iterator[tuple[str, str]]:
        for piece in pieces:
            text = token_text(self._tokenizer, piece.token, self._left)
            if piece.kind not in ("rejected", "untested"):
                self._left = piece.token
            before, after = MARKS.get(piece.kind, ("", ""))
            yield before + text + after, STYLES[piece.kind]


def wrap(cells: Seq[tuple[str, str]], width: int) -> list[Text]:
    """Break styled texts into lines of at most `width` columns, between texts where possible.

    cells: pairs of a text and its style.
    """
    lines = [Text()]
    used = 0
    for text, style in cells:
        if used and used + cell_len(text) > width:
            lines.append(Text())
            used = 0
        while text:
            fitting = _fitting(text, width - used)
            lines[-1].append(text[:fitting], style)
            used, text = used + cell_len(text[:fitting]), text[fitting:]
            if text:
                lines.append(Text())
                used = 0
    return lines


def _fitting(text: str, width: int) -> int:
    """Return the number of characters that fit into `width` columns, at least one."""
    used = 0
    for i, char in enumerate(text):
        used += cell_len(char)
        if used > width:
            return max(i, 1)
    return len(text)


class LiveText:
    """A listener that writes the output as it grows, coloured by the tokens' origins if the console has colours."""

    def __init__(self, tokenizer: Tokenizer, console: Console, prompt_ids: Seq[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._console = console

    def __call__(self, report: StepReport) -> None:
        for detail in report.rounds:
            for piece in committed_pieces(detail, report.num_committed):
                self.write(self._detokenizer.push([piece.token]).text, STYLES[piece.kind])

    def finish(self) -> None:
        """Write the text that was held back, and end the line."""
        self.write(self._detokenizer.finish() + "\n", "")

    def write(self, text: str, style: str) -> None:
        """Write a text. In a pipe, do not write it with rich, which drops some control characters and keeps others."""
        if self._console.is_terminal:
            self._console.print(Text(visible(text), style), end="", soft_wrap=True)
        else:
            self._console.file.write(text)
        self._console.file.flush()


def model_lines(width: int) -> Iterator[str]:
    """Yield lines about each named model: a row of facts, and below it the model's description and source."""
    row = "{:18} {:>7} {:8} {:>7} {:10} {}"
    yield row.format("name", "weights", "kind", "size", "licence", "here")
    for model in named_models().values():
        weights = _about(model.parameters)
        size = f"{_about(model.num_bytes).replace(' B', ' G')}B"
        yield row.format(model.name, weights, model.kind, size, model.licence, "yes" if model.is_here() else "no")
        sources = [model.how_to_get] if model.how_to_get else []
        sources += [] if model.repository is None else [f"{model.repository} on the hub"]
        comes = f"from: {', or '.join(sources)}" if sources else "part of this package"
        draft = [] if model.smaller is None else [f"its draft model: --draft {model.smaller}"]
        for text in (model.about, comes, *draft, f"run so far: {model.tried}"):
            yield folded(text, width, " " * 4, " " * 6)


def _about(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"


def method_lines(package: str, width: int = PIPE_WIDTH) -> Iterator[str]:
    """Yield a line for each method of a package: the name, and the first paragraph of its file's docstring.

    No method is imported, because some need packages that are not always there.
    """
    known = abouts(package)
    indent = max(map(len, known)) + 2
    for name, text in known.items():
        yield folded(text, width, name.ljust(indent), " " * indent)


def option_lines(package: str, name: str, what: str, width: int = PIPE_WIDTH) -> Iterator[str]:
    """Yield lines about one method: the first paragraph of its file's docstring, and its options.

    what: the word for a method of this package in errors. Raises BadOption for an unknown name.
    """
    module = load(package, name, what)
    yield folded(about(module), width, f"{name}  ", "    ")
    hints = typing.get_type_hints(module.Options)
    for field in dataclasses.fields(module.Options):
        kind = str(getattr(hints[field.name], "__name__", hints[field.name])).replace(" | None", "")
        low, high = field.metadata.get("min"), field.metadata.get("max")
        bounds = ""
        if low is not None:
            bounds = f", at least {low}" if high is None else f", {low} to {high}"
        default = "" if field.default is None else f" [default: {field.default}]"
        text = f"{field.name} ({kind}{bounds}): {field.metadata.get('help', '')}{default}"
        yield folded(text, width, " " * 4, " " * 6)
    if not dataclasses.fields(module.Options):
        yield "    no options"


def watched(llm: LLM, ids: Seq[int], params: SamplingParams, show: Callable[[StepReport], None]) -> Iterator[Chunk]:
    """Stream an output, and call `show` with the report of each step before yielding the step's chunk.

    `show` is called in the thread that takes the chunks. Each report contains `rounds`.
    """
    reports = SimpleQueue[StepReport]()
    end = llm.listen(reports.put, detail=True)
    try:
        for chunk in llm.stream(ids, params):
            while not reports.empty():
                show(reports.get())
            yield chunk
    finally:
        end()
