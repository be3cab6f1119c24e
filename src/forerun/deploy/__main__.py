"""`python -m forerun.deploy port=8000 max_replicas=2`: serves replicas until Ctrl-C (docs/use/scaling.md).

Uses the Ray cluster at RAY_ADDRESS, or else a cluster that runs on this machine. If there is no such cluster, starts a
cluster that consists of this machine.
"""

from __future__ import annotations

import os
import sys

import ray
from ray import serve

from forerun.deploy.ray import CALLBACK, CALLBACK_VARIABLE, NAME, application
from forerun.errors import BadOption, UserError
from forerun.text.terminal import note

EXIT_CODE = 2  # errors that the caller can mend


def main(arguments: list[str]) -> int:
    """Serve until Ctrl-C. Returns the exit code. arguments: texts NAME=VALUE, see `deploy.ray.application`."""
    try:
        given = dict(_pair(argument) for argument in arguments)
        host, port = given.pop("host", "127.0.0.1"), given.pop("port", "8000")
        if not port.isdecimal():
            raise BadOption(f"port={port} is not possible: it must be a number")
        app = application(given)
    except UserError as error:
        note(str(error))
        return EXIT_CODE
    os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)
    ray.init(log_to_driver=False)
    serve.start(http_options={"host": host, "port": int(port)})
    serve.run(app, name=NAME, blocking=True)
    return 0


def _pair(argument: str) -> tuple[str, str]:
    name, is_pair, value = argument.partition("=")
    if not is_pair:
        raise BadOption(f"{argument!r} is no argument: write NAME=VALUE")
    return name.replace("-", "_"), value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
