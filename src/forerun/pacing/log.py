"""The pacing log, one JSON line per round: the tokens granted, drafted and accepted, and the policy's own numbers."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

from forerun.errors import BadOption, shown
from forerun.types import StepReport

LOG = logging.getLogger(__name__)


class PacingLog:
    """A listener that appends a line for each sequence of a step. It needs reports with rounds (detail=True).

    Entries of a line: sequence_id, position (absolute index of the round's first token), drafter, spec_length_granted,
    spec_length_used (nodes drafted), spec_length_accepted, and the policy's own values (`Pacing.facts`), such as
    entropy_normalized and entropy_smoothed. Raises BadOption where the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            # Buffered by lines, so that the log of a process that is killed ends with a whole round. The file stays
            # open as long as the engine may step.
            self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise BadOption(
                f"pacing_log={shown(path)} cannot be written ({error.strerror}): name a file in a folder that exists"
            ) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __call__(self, report: StepReport) -> None:
        if self._file.closed:
            return
        for step, round_ in zip(report.sequences, report.rounds, strict=True):
            line = {
                "sequence_id": round_.sequence_id,
                "position": round_.position,
                "drafter": step.draft,
                "spec_length_granted": round_.granted,
                "spec_length_used": len(round_.tokens),
                "spec_length_accepted": len(round_.accepted),
                **round_.pacing,
            }
            try:
                self._file.write(json.dumps(line) + "\n")
            except OSError as error:
                name, reason = shown(str(self._file.name)), error.strerror
                LOG.warning("pacing_log=%s ends here (%s): make room there, and start again", name, reason)
                with suppress(OSError):  # the lines that the file could not take are lost
                    self._file.close()
                return
