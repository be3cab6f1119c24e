"""Decides which web pages may use a server: the server's own pages, and the pages of origins in --allow-origin.

A browser sends any request that a page asks for, even to a server that only the browser's machine can reach. The
browser says which page sends a request (header Origin), and asks the server before it sends JSON to another origin. But
a page may point a host name that it controls at this machine's address (DNS rebinding). Then the browser takes this
server for the page's own. An API key keeps such a page out. Without a key, the server checks the name in the header
Host. The server accepts the names of --allow-host. It also accepts addresses, localhost and this machine's names,
because no page can change the machine to which they lead.

A body must be declared as JSON. Ollama's clients often leave out this declaration. So Ollama's routes require the
declaration only in requests that have a header of browsers, such as Origin. With a POST, browsers always send Origin.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from forerun.errors import BadOption, shown
from forerun.serve.bodies import Refused

ANY = "*"
PROBES = ("/health", "/ready")  # they answer one word under any name: load balancers call them
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+|null|\*", re.IGNORECASE)
_HOST = re.compile(r"[\w.-]+|\*")
_SHORT_ADDRESS = re.compile(r"(\d+|0x[\da-f]+)(\.(\d+|0x[\da-f]+)){0,3}")  # 127.1 is 127.0.0.1
_JSON = re.compile(rb"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_SAFE = ("GET", "HEAD", "OPTIONS")  # they change nothing, and another page cannot read their answers
_OF_BROWSERS = frozenset((b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode"))  # a browser sends some of them
_PORTS = {"http": 80, "https": 443}  # the port that a browser leaves out
# Headers that pages may send, where a browser does not say which, and headers of answers that pages may read.
SENT = b"authorization, content-type, x-api-key, anthropic-version, anthropic-beta, x-request-id"
EXPOSED = b"x-request-id, request-id, x-forerun-ignored, retry-after"
_LOCAL = "localhost"


@dataclass(frozen=True)
class Origins:
    """The web pages that may call a server, and the host names by which the server may be called.

    allowed: origins besides the server's own; "*" = any. hosts: host names besides this machine's names and IP
    addresses; "*" = any. only_local: whether only loopback addresses are accepted, in place of all IP addresses.
    """

    allowed: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset((ANY,))
    only_local: bool = False

    @classmethod
    def parse(cls, origins: Iterable[str], hosts: Iterable[str] = (), *, only_local: bool = False) -> Origins:
        """Return the Origins for the values of the options --allow-origin and --allow-host.

        Raises BadOption for a value that is no origin, or no host name. only_local: see Origins.
        """
        allowed, names = [origin.rstrip("/").lower() for origin in origins], [host.lower() for host in hosts]
        for origin in allowed:
            if not _ORIGIN.fullmatch(origin):
                raise BadOption(
                    f"--allow-origin={shown(origin)} is not possible: write SCHEME://HOST[:PORT], as in "
                    "https://chat.example.org, or * for any"
                )
        for name in names:
            if not _HOST.fullmatch(name) and _address(_bare(name)) is None:
                raise BadOption(
                    f"--allow-host={shown(name)} is not possible: write a name without scheme and port, as in "
                    "llm.example.org, or * for any"
                )
        return cls(frozenset(allowed), frozenset(map(_canonical, names)), only_local)

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes], *, is_lax: bool = False) -> None:
        """Raise Refused for a foreign host name or page, and for a body that is compressed or not declared as JSON.

        is_lax: whether programs may omit the declaration that a body is JSON. Web pages must always declare it.
        """
        is_safe = method in _SAFE
        if not (self.knows(headers) or (is_safe and path in PROBES)):
            raise Refused(
                "this server is called by a name of this machine, such as localhost, or by its address, and not by "
                f"{shown(_header(headers, b'host'))}: to call it so, as through a proxy, start it with --allow-host "
                "and that name, or with --api-key",
                code="host_not_allowed",
                status=403,
            )
        if is_safe:
            return
        origin = _header(headers, b"origin")
        if origin and not self._allows(origin, _header(headers, b"host")):
            raise _foreign(origin)
        if (coding := _header(headers, b"content-encoding")) not in ("", "identity"):
            raise Refused(
                f"the body is compressed (content-encoding: {shown(coding)}): send it as it is",
                code="unsupported_media_type",
                status=415,
            )
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        may_leave_out = is_lax and not headers.keys() & _OF_BROWSERS
        if has_body and not may_leave_out and not _JSON.fullmatch(headers.get(b"content-type", b"")):
            raise Refused(
                "the body must be JSON and say so: send the header content-type: application/json",
                code="unsupported_media_type",
                status=415,
            )

    def answer_headers(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Return the CORS headers that let a page of an allowed origin read the answer; else only `vary`."""
        origin = headers.get(b"origin", b"")
        if not origin or not self._is_friend(_header(headers, b"origin")):
            return [(b"vary", b"Origin")]  # a cache must not give this answer, without the headers, to an allowed page
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"Origin"),
        ]

    def preflight(self, method: str, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]] | None:
        """Return the headers of the answer to a browser's preflight request; None for any other request.

        A preflight request comes without the API key. Raises Refused for a page that may not send requests.
        """
        if method != "OPTIONS" or b"access-control-request-method" not in headers or b"origin" not in headers:
            return None
        if not self._is_friend(origin := _header(headers, b"origin")):
            raise _foreign(origin)
        asked = headers.get(b"access-control-request-headers", b"")
        answer = [
            (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", asked or SENT),
            (b"access-control-max-age", b"600"),
        ]
        if _header(headers, b"access-control-request-private-network") == "true":
            answer.append((b"access-control-allow-private-network", b"true"))
        return answer

    def knows(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the server accepts the host name in a request (header Host).

        The server accepts this machine's names, IP addresses (see `only_local`), allowed host names, and the hosts of
        allowed origins. No foreign page can change the machine to which any of these leads. A request without a host
        name is also accepted.
        """
        host = _header(headers, b"host")
        if not host or ANY in self.hosts | self.allowed:
            return True
        place = _place(host, 0)
        if place is None:
            return False
        name = place[0]
        if name == _LOCAL or (not self.only_local and _address(name) is not None):
            return True
        friends = (_place(origin.partition("://")[2], 0) for origin in self.allowed)
        return name in self.hosts | _own_names() or name in {friend[0] for friend in friends if friend is not None}

    def _allows(self, origin: str, host: str) -> bool:
        """Return whether a page's origin is allowed, or is the server's own. host: the request's header Host."""
        if self._is_friend(origin):
            return True
        scheme, _, where = origin.partition("://")
        place = _place(where, _PORTS.get(scheme, 0))
        return scheme in _PORTS and place is not None and place == _place(host, _PORTS[scheme])

    def _is_friend(self, origin: str) -> bool:
        """Return whether a page's origin is among the allowed origins."""
        if ANY in self.allowed:
            return True
        scheme, _, where = origin.partition("://")
        place = _place(where, _PORTS.get(scheme, 0))
        if scheme not in _PORTS or place is None:
            return origin in self.allowed
        friends = (allowed.partition("://") for allowed in self.allowed)
        return any(place == _place(friend, _PORTS[scheme]) for kind, _, friend in friends if kind == scheme)


def _foreign(origin: str) -> Refused:
    return Refused(
        f"pages of {shown(origin)} may not use this server: to let them, or where a proxy with that address does not "
        "pass its Host on, start it with --allow-origin and that",
        code="origin_not_allowed",
        status=403,
    )


def is_local(name: str) -> bool:
    """Return whether a host's name or address leads to this machine alone."""
    return _canonical(name) == _LOCAL


def _header(headers: Mapping[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1").strip().lower()


def _place(where: str, usual: int) -> tuple[str, int] | None:
    """Return the host and the port of HOST[:PORT]; None for any other text. usual: the default port."""
    try:
        parts = urlsplit(f"//{where}")
        port = usual if parts.port is None else parts.port
    except ValueError:
        return None
    return (_canonical(parts.hostname), port) if parts.hostname and parts.username is None else None


def _canonical(name: str) -> str:
    """Return a host's name or address in a form that can be compared.

    Every name or address that leads to this machine alone becomes localhost.
    """
    name = name.lower().rstrip(".")
    address = _address(_bare(name))
    if address is not None:
        return _LOCAL if address.is_loopback else str(address)
    return _LOCAL if name.endswith(f".{_LOCAL}") else name


def _bare(name: str) -> str:
    return name.removeprefix("[").removesuffix("]")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address in a text; None for a name.

    An IPv4 address may also be written in IPv6 form, or with fewer numbers, such as 127.1.
    """
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        try:
            short = socket.inet_aton(name) if _SHORT_ADDRESS.fullmatch(name) else None
        except OSError:
            short = None
        return None if short is None else ipaddress.IPv4Address(short)
    return getattr(address, "ipv4_mapped", None) or address


def _own_names() -> frozenset[str]:
    """Return this machine's names: its host name, with and without domain, and its name in the local network (mDNS)."""
    name = socket.gethostname().lower().rstrip(".")
    first = name.partition(".")[0]
    return frozenset((name, first, f"{first}.local"))
