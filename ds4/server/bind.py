"""May the server listen where it was told to? Imports little, so that the answer comes before anything is loaded."""

from __future__ import annotations

import socket

from ds4.errors import Ds4Error


class BindError(Ds4Error):
    """The server cannot listen where it was told to."""


def check_address(host: str, port: int) -> None:
    """Raises BindError when nothing can listen there: better told before a model is loaded than after."""
    name = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise BindError(f"cannot listen on {host}:{port}: {reason(error)}") from None


def reason(error: OSError) -> str:
    return error.strerror or str(error)
