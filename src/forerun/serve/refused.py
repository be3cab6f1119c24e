"""Defines the error for a request that cannot be honoured, in any API."""

from __future__ import annotations

from forerun.errors import BadOption


class Refused(BadOption):
    """A request that cannot be honoured.

    param: the field at fault. status: the HTTP status. code: a word by which programs recognise the error.
    retry_after_s: the number of seconds after which the client may send the request again; None if another attempt
    would not help.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        status: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, param)
        self.param, self.code, self.status, self.retry_after_s = param, code, status, retry_after_s
