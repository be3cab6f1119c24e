"""Which web pages may use a server: its own, and those of --allow-origin.

A browser sends what any page asks it to, also to a server that nobody but its own machine reaches. It says of which
page a request is (Origin), and asks first before it sends JSON elsewhere; but a page may point a name of its own at
this machine's address (DNS rebinding), and then everything here is the page's own. An API key keeps it out. Without
one the server looks at the name that it is called by (Host): nobody can point an address elsewhere, nor localhost, nor
a name that this machine has.

Bodies must be said to be JSON. Those of Ollama's routes need not, as its clients often do not, where a request has no
header by which browsers tell of a page: with a POST they always send Origin.
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
PROBES = ("/health", "/ready")  # they say one word, to whoever asks by whatever name: load balancers call them
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+|null|\*", re.IGNORECASE)
_HOST = re.compile(r"[\w.-]+|\*")
_SHORT_ADDRESS = re.compile(r"(\d+|0x[\da-f]+)(\.(\d+|0x[\da-f]+)){0,3}")  # 127.1 is 127.0.0.1
_JSON = re.compile(rb"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_SAFE = ("GET", "HEAD", "OPTIONS")  # they make nothing here, and another page cannot read what they are answered
_LAX = "/api/"  # Ollama's routes
_OF_BROWSERS = frozenset((b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode"))  # no page leaves all out
_PORTS = {"http": 80, "https": 443}  # what a browser leaves out
# Of requests by pages, where a browser does not say which it will send; and of answers, which they may read.
SENT = b"authorization, content-type, x-api-key, anthropic-version, anthropic-beta, x-request-id"
EXPOSED = b"x-request-id, request-id, x-forerun-ignored, retry-after"
_LOCAL = "localhost"


@dataclass(frozen=True)
class Origins:
    """What may call a server, and how.

    allowed: origins beside the server's own; "*" = any. hosts: names that it is called by, beside this machine's own
    and addresses; "*" = any. only_local: of addresses, those of this machine alone.
    """

    allowed: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset((ANY,))
    only_local: bool = False

    @classmethod
    def parse(cls, origins: Iterable[str], hosts: Iterable[str] = (), *, only_local: bool = False) -> Origins:
        """Raises BadOption for what is no origin, or no name of a host."""
        found, names = [origin.rstrip("/").lower() for origin in origins], [host.lower() for host in hosts]
        for origin in found:
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
        return cls(frozenset(found), frozenset(map(_canonical, names)), only_local)

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Refused for a request of a page that may not use this server, or one that a page need not ask for."""
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
        is_lax = path.startswith(_LAX) and not headers.keys() & _OF_BROWSERS
        if has_body and not is_lax and not _JSON.fullmatch(headers.get(b"content-type", b"")):
            raise Refused(
                "the body must be JSON and say so: send the header content-type: application/json",
                code="unsupported_media_type",
                status=415,
            )

    def answer_headers(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """What lets a browser show the answer to a page of another origin (CORS); nothing where that may not see it."""
        origin = headers.get(b"origin", b"")
        if not origin or not self._is_friend(_header(headers, b"origin")):
            return [(b"vary", b"Origin")]  # what keeps answers must not give this one to a page that may see it
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"Origin"),
        ]

    def preflight(self, method: str, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]] | None:
        """The headers that answer a browser which asks whether a page may send a request; None for any other request.

        It asks without the API key. A page that may not is told by a refusal.
        """
        if method != "OPTIONS" or b"access-control-request-method" not in headers or b"origin" not in headers:
            return None
        if not self._is_friend(origin := _header(headers, b"origin")):
            raise _foreign(origin)
        asked = headers.get(b"access-control-request-headers", b"")
        found = [
            (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", asked or SENT),
            (b"access-control-max-age", b"600"),
        ]
        if _header(headers, b"access-control-request-private-network") == "true":
            found.append((b"access-control-allow-private-network", b"true"))
        return found

    def knows(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request calls the server by a name that no page can have given it; HTTP/1.0 may name none."""
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
        """Whether a page's origin is among those that are allowed, or where the request itself goes."""
        if self._is_friend(origin):
            return True
        scheme, _, where = origin.partition("://")
        found = _place(where, _PORTS.get(scheme, 0))
        return scheme in _PORTS and found is not None and found == _place(host, _PORTS[scheme])

    def _is_friend(self, origin: str) -> bool:
        """Whether a page's origin is among those that are allowed."""
        if ANY in self.allowed:
            return True
        scheme, _, where = origin.partition("://")
        found = _place(where, _PORTS.get(scheme, 0))
        if scheme not in _PORTS or found is None:
            return origin in self.allowed
        friends = (one.partition("://") for one in self.allowed)
        return any(found == _place(friend, _PORTS[scheme]) for kind, _, friend in friends if kind == scheme)


def _foreign(origin: str) -> Refused:
    return Refused(
        f"pages of {shown(origin)} may not use this server: to let them, or where a proxy with that address does not "
        "pass its Host on, start it with --allow-origin and that",
        code="origin_not_allowed",
        status=403,
    )


def is_local(name: str) -> bool:
    """Whether a host's name or address leads to this machine alone."""
    return _canonical(name) == _LOCAL


def _header(headers: Mapping[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1").strip().lower()


def _place(where: str, usual: int) -> tuple[str, int] | None:
    """The host and the port of HOST[:PORT]; None where it is none. usual: the port that is left out."""
    try:
        parts = urlsplit(f"//{where}")
        port = usual if parts.port is None else parts.port
    except ValueError:
        return None
    return (_canonical(parts.hostname), port) if parts.hostname and parts.username is None else None


def _canonical(name: str) -> str:
    """A host's name or address, by which it can be compared: whatever leads to this machine alone is localhost."""
    name = name.lower().rstrip(".")
    address = _address(_bare(name))
    if address is not None:
        return _LOCAL if address.is_loopback else str(address)
    return _LOCAL if name.endswith(f".{_LOCAL}") else name


def _bare(name: str) -> str:
    return name.removeprefix("[").removesuffix("]")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a text is, also one of IPv4 in the form of IPv6 or with fewer numbers; None for a name."""
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
    """What this machine calls itself, alone and in its own network (mDNS)."""
    name = socket.gethostname().lower().rstrip(".")
    first = name.partition(".")[0]
    return frozenset((name, first, f"{first}.local"))
