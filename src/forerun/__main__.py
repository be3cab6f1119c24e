"""`python -m forerun` is the command `forerun`."""

from __future__ import annotations

import sys

ABORTED = 130  # what a shell reports for a process that SIGINT ended


def main() -> None:
    """Run the command line and exit. Ctrl-C ends the command quietly, even while modules are still being loaded."""
    try:
        from forerun.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(ABORTED)


if __name__ == "__main__":
    main()
