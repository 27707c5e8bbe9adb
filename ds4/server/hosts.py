"""Whom a loopback server answers: the `Host` and `Origin` headers against DNS rebinding and foreign web pages.

A page on the web can make a browser send requests to a server on this machine: under a name that the page's owner
points to 127.0.0.1 (then `Host` is foreign), or directly, as a form post without preflight (then `Origin` is
foreign). Neither is a legitimate client of a server that is bound to loopback.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def host_name(authority: str) -> str | None:
    """The name in `name[:port]` or `[v6][:port]`, lower case, without a final dot; None if malformed."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        name, bracket, port = authority[1:].partition("]")
        if not bracket or (port and not (port[0] == ":" and port[1:].isascii() and port[1:].isdigit())):
            return None
        return name or None
    name, colon, port = authority.partition(":")
    if colon and port and not (port.isascii() and port.isdigit()):
        return None
    name = name.removesuffix(".")
    return name if name and not any(c in "/\\@?#,[] \t" for c in name) else None


def is_loopback(address: str) -> bool:
    """True for an IP address of this machine's loopback network."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class HostPolicy:
    """Decides by `Host` (and, without CORS, `Origin`) whether a request may be served.

    `address` is the bound IP address, `names` further names that are legitimate (the `--host` as given and each
    `--allowed-host`). On an address that is not loopback nothing is checked but the presence of `Host`.
    """

    def __init__(self, address: str, names: Iterable[str] = (), *, cors: bool = False) -> None:
        self._checked = is_loopback(address)
        self._cors = cors
        wanted = {host_name(f"[{name}]" if name.count(":") > 1 else name) for name in (address, *names)}
        self._names = _LOOPBACK_NAMES | {name for name in wanted if name}
        self._known: set[str] = set()

    def refusal(
        self, headers: Mapping[str, str], version: str, authority: str = "", method: str = "GET"
    ) -> tuple[int, str] | None:
        """None, or the (status, message) to refuse with. `authority` is that of an absolute-form target.

        A preflight (OPTIONS) may have any origin: its answer without CORS headers is the refusal.
        400: no `Host` in HTTP/1.1 (RFC 9112 section 3.2). 403: a foreign name or page.
        """
        host = headers.get("host")
        if host is None and version == "1.1":
            return 400, "bad HTTP request: HTTP/1.1 demands a Host header"
        if not self._checked:
            return None
        host = authority or host
        if host not in self._known and host is not None:
            if host_name(host) not in self._names:
                return 403, f"Host {host[:80]!r} is not a name of this server; --allowed-host adds one"
            if len(self._known) < 64:
                self._known.add(host)
        if "origin" in headers and not self._cors and method != "OPTIONS" and self._foreign(headers["origin"]):
            return 403, f"Origin {headers['origin'][:80]!r} is not allowed; --cors allows requests from web pages"
        return None

    def _foreign(self, origin: str) -> bool:
        """Web origins and the opaque origin `null`; the schemes of installed applications are not web pages."""
        scheme, separator, authority = origin.strip().partition("://")
        if not separator:
            return True
        return scheme.lower() in ("http", "https") and host_name(authority) not in self._names
