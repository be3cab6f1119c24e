"""Says what a command waits for while models are opened, loaded and read, and while they write."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cli.words import counted
from forerun.models.hub import is_hub_id
from forerun.text.waiting import Waiting

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from forerun.config import EngineConfig
    from forerun.engine.llm import LLM
    from forerun.engine.opened import Opened
    from forerun.types import StepReport

OPENING_S = 0.8  # before a terminal shows that a model is opened, which rarely takes long


class Answering(Waiting):
    """Shows how many tokens of the prompts were read, and then how many tokens were written.

    num_tokens: the number of tokens of all prompts; None = not known yet. writes: whether written tokens are shown.
    """

    def __init__(self, llm: LLM, num_tokens: int | None, *, writes: bool = True) -> None:
        super().__init__("reading" if num_tokens is None else f"reading {counted(num_tokens, 'token')}")
        self._num_tokens = num_tokens
        self._writes = writes
        self._num_read = 0
        self._num_written = 0
        self._unlisten = llm.listen(self._see)

    def end(self) -> None:
        if not self._over.is_set():
            self._unlisten()
        super().end()
        self.break_silence()  # the answer is printed now

    def _see(self, report: StepReport) -> None:
        self._num_read += report.num_prefill_tokens
        self._num_written += report.num_committed
        if self._num_written and self._writes:
            self.tell(f"{counted(self._num_written, 'token')} written")
        elif self._num_tokens is None:
            self.tell(f"{counted(self._num_read, 'token')} read")
        else:
            self.tell(f"reading {self._num_read:,} of {counted(self._num_tokens, 'token')}")


def opened(config: EngineConfig) -> Opened:
    """Open the models of a configuration, and say meanwhile that they are being opened.

    A large tokenizer takes seconds the first time. Nothing is shown for models of the hub.
    """
    from forerun.engine.opened import Opened

    names = [name for name in (config.target, config.draft) if name is not None]
    is_of_hub = any(map(is_hub_id, names))
    with nullcontext() if is_of_hub else Waiting(f"opening {Path(config.target or 'the model').name}", OPENING_S):
        return Opened.of(config)


def loading(opened: Opened) -> AbstractContextManager[object]:
    """Return a display that says that a model is being loaded.

    Nothing is shown for models of the hub: downloads have progress bars, which a further line would make scroll.
    """
    if opened.files.is_of_hub or is_hub_id(opened.config.draft):
        return nullcontext()
    return Waiting(f"loading {opened.files.name}")
