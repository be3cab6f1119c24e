"""Which web pages may use a server: its own, and those of --allow-origin.

A browser sends what any page asks it to, also to a server that nobody but its own machine reaches. It says of which
page a request is (Origin), and asks first before it sends JSON elsewhere; but a page may point a name of its own at
this machine's address, and then everything here is the page's own. So names are looked at, too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from forerun.errors import BadOption, shown
from forerun.serve.bodies import Refused

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+|null|\*", re.IGNORECASE)
_JSON = re.compile(rb"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_SAFE = ("GET", "HEAD", "OPTIONS")  # they make nothing here, and another page cannot read what they are answered


@dataclass(frozen=True)
class Origins:
    """allowed: origins beside the server's own; "*" = any. only_local: the server has to be called by a local name."""

    allowed: frozenset[str] = frozenset()
    only_local: bool = False

    @classmethod
    def parse(cls, origins: Iterable[str], *, only_local: bool = False) -> Origins:
        """Raises BadOption for what is no origin."""
        found = [origin.rstrip("/") for origin in origins]
        for origin in found:
            if not _ORIGIN.fullmatch(origin):
                raise BadOption(
                    f"--allow-origin={shown(origin)} is not possible: write SCHEME://HOST[:PORT], as in "
                    "https://chat.example.org, or * for any"
                )
        return cls(frozenset(map(str.lower, found)), only_local)

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Refused for a request of a page that may not use this server, or one that a page need not ask for."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self.only_local and ANY not in self.allowed and not self._is_ours(host):
            raise Refused(
                f"this server is called by a name of this machine, such as localhost, and not {shown(host)}: where a "
                "proxy is in front of it give --api-key, or --allow-origin with the proxy's address",
                code="host_not_allowed",
                status=403,
            )
        if method in _SAFE:
            return
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and not {ANY, origin} & self.allowed and origin.partition("://")[2] != host:
            raise Refused(
                f"pages of {shown(origin)} may not use this server: to let them, start it with --allow-origin and that",
                code="origin_not_allowed",
                status=403,
            )
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        if has_body and not _JSON.fullmatch(headers.get(b"content-type", b"")):
            raise Refused(
                "the body must be JSON and say so: send the header content-type: application/json",
                code="unsupported_media_type",
                status=415,
            )

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header is a name of this machine or of an allowed origin; HTTP/1.0 may have none."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return not host or is_local(name.rstrip(".")) or any(urlsplit(one).hostname == name for one in self.allowed)


def is_local(name: str) -> bool:
    """Whether a host's name or address leads to this machine alone."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
