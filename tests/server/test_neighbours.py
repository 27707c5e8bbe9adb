"""What one client does to its connection has no effect on the streams of others, over real sockets."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import time
from typing import Any

import pytest

from ds4.server.http import Limits
from ds4.testing import Script, ScriptedEngine
from tests.support.neighbours import neighbours, say
from tests.support.running_server import RunningServer, Serve

PIECE = "x" * 4000
N_PIECES = 1500
"""Six megabytes: more than any socket buffer takes."""


def model(prompt: str) -> Script:
    if found := say(prompt):
        return found
    if "flood" in prompt:
        return Script.of([PIECE] * N_PIECES)
    if "endless" in prompt:
        return Script.of([PIECE]).endless()
    return Script.text("One two three.")


def request(content: str, **fields: Any) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connect(server: RunningServer, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(60)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((server.app._http.host, server.app.port))
    return connection


def reset(connection: socket.socket) -> None:
    """Closes with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_stream(connection: socket.socket) -> bytes:
    """All bytes of one chunked response, up to its last chunk."""
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        piece = connection.recv(1 << 20)
        assert piece, "the connection ended inside a response"
        received += piece
    return received


def content(received: bytes) -> str:
    """The text of streamed chat answers, and that each of them ended."""
    data = re.findall(rb"^data: (\{.*\})\r?$", received, re.MULTILINE)
    return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in data)


def wait_until_idle(server: RunningServer) -> None:
    deadline = time.monotonic() + 30
    while {state["phase"] for state in server.http.get("/slots").json()} != {"idle"}:
        assert time.monotonic() < deadline, "a session is still busy"
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(2))
def test_dropped_connections(serve: Serve, seed: int) -> None:
    """Closed or reset within the head, within the body, while queued, and while an answer comes."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    server = serve(model, slots=4)
    whole = request("endless", stream=True)
    with neighbours(server) as streams:
        for _ in range(40):
            connection = connect(server)
            sent = rng.choice((rng.randrange(1, 40), whole.index(b"\r\n\r\n") + 4 + rng.randrange(20), len(whole)))
            connection.sendall(whole[:sent])
            if sent == len(whole) and rng.random() < 0.7:
                connection.recv(1000)
            reset(connection) if rng.random() < 0.5 else connection.close()
        assert any(stream.is_alive() for stream in streams)
    wait_until_idle(server)
    assert server.chat().json()["choices"][0]["message"]["content"] == "One two three."


def test_a_slow_reader(serve: Serve) -> None:
    """It has read nothing when the others have all that they asked for; then it gets everything."""
    server = serve(model, slots=4)
    connection = connect(server, receive_buffer=4096)
    with neighbours(server):
        connection.sendall(request("flood", stream=True))
    received = read_stream(connection)
    assert content(received) == PIECE * N_PIECES
    assert received.rstrip().endswith(b"0")
    connection.close()


def test_a_reader_that_stops(serve: Serve) -> None:
    """It is given up and its session is free, while the others go on."""
    server = serve(model, slots=4, limits=Limits(stall_timeout=0.3))
    connection = connect(server, receive_buffer=4096)
    with neighbours(server):
        connection.sendall(request("endless", stream=True))
    wait_until_idle(server)
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_the_next_request_before_the_last_answer_is_read(serve: Serve, stream: bool) -> None:
    """Answers come whole and in order."""
    server = serve(model, slots=4)
    connection = connect(server)
    with neighbours(server):
        asked = [request(text, stream=stream) for text in ("flood", "a", "b")]
        connection.sendall(b"".join(asked) + b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    received = b""
    while piece := connection.recv(1 << 20):
        received += piece
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 4
    first, *rest, models = received.split(b"HTTP/1.1 200 OK\r\n")[1:]
    if stream:
        assert content(first) == PIECE * N_PIECES
        assert [content(answer) for answer in rest] == ["One two three."] * 2
    else:
        assert first.count(PIECE.encode()) == N_PIECES
        assert all(answer.count(b"One two three.") == 1 for answer in rest)
    assert b'"object":"list"' in models
    connection.close()


def test_the_neighbours_see_a_missing_word(serve: Serve) -> None:
    """The check can fail."""
    server = serve(ScriptedEngine(lambda prompt: Script.text("n0.0 n0.2").slow(0.3)), slots=2)
    with pytest.raises(AssertionError), neighbours(server, 1):
        pass
