"""`python -m forerun` is the command `forerun`."""

from __future__ import annotations

import sys

ABORTED = 130  # what a shell reports for a process that SIGINT ended


def main() -> None:
    """Run the command line and exit. Ctrl-C while its modules are loaded ends it as quietly as it does later."""
    try:
        from forerun.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(ABORTED)


if __name__ == "__main__":
    main()
