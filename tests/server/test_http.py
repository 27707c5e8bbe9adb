"""The HTTP layer over real sockets: each bad input is refused, and everybody else is served on.

Most tests run beside a long stream (`undisturbed`) that must get every one of its events, and end with a normal
request: the process is alive and nobody else noticed.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import zstandard

from ds4.errors import ClientDisconnected
from ds4.server.http import HttpServer, Refusal, Request, Responder
from tests.support.wire import FAST, Client, Seen, Wire, echo, eventually, get, post, run, serving


class Router:
    """A handler with the behaviours that the tests need, by path."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.events: list[str] = []
        self.bodies: list[bytes] = []

    async def __call__(self, request: Request, responder: Responder) -> None:
        path = request.path
        self.bodies.append(request.body)
        if path == "/ticks":
            stream = responder.start()
            number = 0
            while not responder.disconnected and not self.release.is_set():
                stream.write(b"tick %d\n" % number)
                number += 1
                await asyncio.sleep(0.005)
            stream.write(b"end %d\n" % number)
            stream.close()
        elif path == "/wait":
            responder.on_disconnect(lambda: self.events.append("disconnect"))
            self.events.append("waiting")
            await self.release.wait()
            responder.send(200, b"waited")
        elif path == "/flood":
            stream = responder.start()
            self.events.append("flood")
            try:
                while True:
                    stream.write(b"x" * 65536)
                    await stream.drain()
            except ClientDisconnected:
                self.events.append("gone")
                raise
        elif path == "/boom":
            raise ValueError("secret detail")
        elif path == "/half-boom":
            responder.start().write(b"half")
            raise ValueError("secret detail")
        elif path == "/nothing":
            pass
        elif path == "/short":
            stream = responder.start()
            stream.write(b"short")
            await stream.drain()
            stream.close()
            stream.close()
        elif path == "/big":
            responder.send(200, b"y" * (8 << 20), "text/plain")
        else:
            await echo(request, responder)


@asynccontextmanager
async def undisturbed(limits=FAST, **options) -> AsyncIterator[tuple[Wire, Router]]:
    """A server with a running stream; at the end the stream must be whole and a normal request answered."""
    router = Router()
    async with serving(router, limits=limits, **options) as wire:
        stream = await wire.connect()
        await stream.send(get("/ticks"))
        status, _ = await stream.head()
        assert status == 200
        yield wire, router
        reply = await wire.ask(get("/alive"))
        assert (reply.status, reply.body) == (200, b"GET /alive ? 0 ")
        router.release.set()
        text = b""
        while chunk := await stream.chunk():
            text += chunk
        lines = text.decode().splitlines()
        number = len(lines) - 1
        assert lines == [f"tick {i}" for i in range(number)] + [f"end {number}"]
        assert number > 0


# ---- what is well-formed


def test_requests_are_understood():
    async def main():
        async with serving() as wire:
            client = await wire.connect()
            reply = await client.ask(get("/v1/models/a%2Fb%20c?x=%20&y"))
            assert reply.body == b"GET /v1/models/a/b c ?x=%20&y 0 "
            assert reply.headers == {"content-length": str(len(reply.body)), "content-type": "text/plain"}
            reply = await client.ask(post(b"abc", "/p"))
            assert reply.body == b"POST /p ? 3 abc"
            chunked = b"POST /c HTTP/1.1\r\nhOsT: LOCALHOST:99\r\nTransfer-Encoding: chunked\r\n\r\n"
            reply = await client.ask(chunked + b"3;ext=1\r\nabc\r\n1\r\nd\r\n0\r\nX-Trailer: 1\r\n\r\n")
            assert reply.body == b"POST /c ? 4 abcd"
            reply = await client.ask(b"GET http://127.0.0.1/abs?q HTTP/1.1\r\nHost: evil.example\r\n\r\n")
            assert reply.body == b"GET /abs ?q 0 "
            reply = await client.ask(get("/last", "Connection: close"))
            assert reply.headers["connection"] == "close"
            assert await client.at_eof()
            assert [r[:3] for r in wire.seen.responses] == [
                ("GET", "/v1/models/a%2Fb%20c", 200),
                ("POST", "/p", 200),
                ("POST", "/c", 200),
                ("GET", "/abs", 200),
                ("GET", "/last", 200),
            ]
            assert all(0 <= s < 10 for s in wire.seen.seconds)

    run(main)


def test_one_byte_at_a_time():
    async def main():
        async with serving(limits=replace(FAST, read_timeout=5, head_timeout=10, request_timeout=10)) as wire:
            client = await wire.connect()
            for byte in get("/a") + post(b"body", "/b"):
                await client.send(bytes([byte]))
                await asyncio.sleep(0)
            assert (await client.reply()).body == b"GET /a ? 0 "
            assert (await client.reply()).body == b"POST /b ? 4 body"

    run(main)


@pytest.mark.parametrize("seed", range(4))
def test_pipelined_requests_are_answered_in_order_however_they_are_cut(seed):
    async def handler(request: Request, responder: Responder) -> None:
        await asyncio.sleep(random.random() * 0.003)
        await echo(request, responder)

    async def main():
        rng = random.Random(seed)
        print("seed", seed)
        async with serving(handler) as wire:
            client = await wire.connect()
            data, expected = b"", []
            for i in range(60):
                body = rng.randbytes(rng.randrange(200))
                kind = rng.randrange(4)
                if kind == 0:
                    data += get(f"/{i}")
                    expected.append(f"GET /{i} ? 0 ".encode())
                    continue
                if kind == 1:
                    cuts = sorted(rng.randrange(len(body) + 1) for _ in range(3))
                    parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) if a != b]
                    data += f"POST /{i} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
                    data += b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"
                elif kind == 2:
                    data += post(body, f"/{i}", "Connection: Upgrade", "Upgrade: h2c")
                else:
                    data += post(body, f"/{i}")
                expected.append(f"POST /{i} ? {len(body)} ".encode() + body[:64])

            async def sender() -> None:
                rest = data
                while rest:
                    n = rng.choice((1, 7, 100, 5000))
                    await client.send(rest[:n])
                    rest = rest[n:]
                    await asyncio.sleep(0)

            sending = asyncio.create_task(sender())
            for want in expected:
                assert (await client.reply()).body == want
            await sending

    run(main)


def test_answers_of_plain_functions_do_not_nest():
    """A thousand pipelined requests to a handler that answers at once: no recursion."""

    def handler(request: Request, responder: Responder) -> None:
        responder.send(200, request.path.encode())

    async def main():
        async with serving(handler) as wire:
            client = await wire.connect()
            await client.send(b"".join(get(f"/{i}") for i in range(2000)))
            for i in range(2000):
                assert (await client.reply()).body == b"/%d" % i

    run(main)


def test_head_is_get_without_body():
    async def main():
        async with undisturbed() as (wire, _router):
            client = await wire.connect()
            head = get("/x").replace(b"GET", b"HEAD")
            reply = await client.ask(head, "HEAD")
            assert reply.status == 200
            assert reply.headers["content-length"] == str(len(b"GET /x ? 0 "))
            # What follows is the next response, so there was no body.
            assert (await client.ask(get("/y"))).body == b"GET /y ? 0 "
            await client.send(get("/short").replace(b"GET", b"HEAD"))
            assert (await client.head())[1]["transfer-encoding"] == "chunked"
            assert (await client.ask(get("/short"))).body == b"short"

    run(main)


def test_options_is_answered_here():
    async def main():
        async with undisturbed() as (wire, _):
            reply = await wire.ask(get("/v1/x").replace(b"GET", b"OPTIONS"))
            assert reply.status == 204 and reply.headers["content-length"] == "0"
            assert "access-control-allow-origin" not in reply.headers

    run(main)


def test_cors_headers_are_on_every_response():
    async def main():
        async with serving(Router(), cors=True) as wire:
            requests = [
                get("/v1/x", "Origin: https://page.example").replace(b"GET", b"OPTIONS"),
                get("/x", "Origin: https://page.example"),
                get("/boom"),
                b"nonsense\r\n\r\n",
                post(b"", "/x", "Content-Encoding: br"),
                get("/x").replace(b"localhost", b"evil.example"),
            ]
            statuses = []
            for request in requests:
                reply = await wire.ask(request)
                statuses.append(reply.status)
                assert reply.headers["access-control-allow-origin"] == "*"
                assert reply.headers["access-control-allow-methods"] == "GET, POST, OPTIONS"
                assert reply.headers["access-control-allow-headers"] == "*"
            assert statuses == [204, 200, 500, 400, 415, 403]
            client = await wire.connect()
            await client.send(get("/ticks"))
            assert (await client.head())[1]["access-control-allow-origin"] == "*"

    run(main)


def test_http_1_0():
    async def main():
        async with undisturbed() as (wire, _router):
            client = await wire.connect()
            reply = await client.ask(b"GET /old HTTP/1.0\r\n\r\n")
            assert reply.headers["connection"] == "close" and await client.at_eof()
            client = await wire.connect()
            reply = await client.ask(b"GET /old HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert reply.headers["connection"] == "keep-alive"
            assert (await client.ask(b"GET /two HTTP/1.0\r\n\r\n")).body == b"GET /two ? 0 "
            # A stream has no chunks there: it ends with the connection.
            client = await wire.connect()
            await client.send(b"GET /ticks HTTP/1.0\r\n\r\n")
            _, headers = await client.head()
            assert "transfer-encoding" not in headers and headers["connection"] == "close"
            assert (await client.reader.readline()) == b"tick 0\n"

    run(main)


def test_expect_100_continue():
    async def main():
        async with undisturbed() as (wire, _):
            client = await wire.connect()
            head = post(b"", "/e", "Expect: 100-Continue").replace(b"Length: 0", b"Length: 4")
            await client.send(head)
            assert (await client.head())[0] == 100
            assert (await client.ask(b"body")).body == b"POST /e ? 4 body"
            # A client that does not wait gets at most one, and its answer.
            assert (await client.ask(head + b"body")).body == b"POST /e ? 4 body"
            # Too large: the final answer, no 100.
            await client.send(head.replace(b"Length: 4", b"Length: 99999999"))
            assert (await client.head())[0] == 413
            reply = await wire.ask(post(b"", "/e", "Expect: cookies"))
            assert reply.status == 417

    run(main)


def test_expect_behind_a_pipelined_request():
    async def main():
        router = Router()
        async with serving(router) as wire:
            client = await wire.connect()
            head = post(b"", "/e", "Expect: 100-continue").replace(b"Length: 0", b"Length: 4")
            await client.send(get("/wait") + head)
            await eventually(lambda: router.events == ["waiting"])
            router.release.set()
            assert (await client.reply()).body == b"waited"
            assert (await client.head())[0] == 100
            assert (await client.ask(b"body")).body == b"POST /e ? 4 body"

    run(main)


# ---- content codings

BODY = b'{"model":"m","input":"hi"}' * 50


def deflate_raw(data: bytes) -> bytes:
    squeeze = zlib.compressobj(wbits=-15)
    return squeeze.compress(data) + squeeze.flush()


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("GZIP", lambda d: gzip.compress(d[:9]) + gzip.compress(d[9:])),
        ("deflate", zlib.compress),
        ("deflate", deflate_raw),
        ("zstd", zstandard.compress),
        ("zstd", lambda d: zstandard.compress(d[:9]) + zstandard.compress(d[9:])),
        ("identity", lambda d: d),
        ("", lambda d: d),
    ],
)
def test_compressed_bodies(name: str, encode: Callable[[bytes], bytes]):
    async def main():
        router = Router()
        async with serving(router) as wire:
            reply = await wire.ask(post(encode(BODY), "/echo", f"Content-Encoding: {name}"))
            assert reply.status == 200
            assert router.bodies == [BODY]

    run(main)


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("br", BODY, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415),
        ("gzip", BODY, 400),
        ("zstd", BODY, 400),
        ("deflate", b"\xff\xff", 400),
        ("gzip", gzip.compress(BODY)[:-1], 400),
        ("zstd", zstandard.compress(BODY)[:-1], 400),
        ("deflate", zlib.compress(BODY)[:-1], 400),
        ("gzip", gzip.compress(BODY) + b"tail", 400),
        ("deflate", zlib.compress(BODY) + b"tail", 400),
        ("gzip", gzip.compress(b" " * (200 << 20), 1), 413),
        ("zstd", zstandard.compress(b" " * (200 << 20)), 413),
        ("deflate", zlib.compress(b" " * (200 << 20), 1), 413),
    ],
    ids=lambda v: v if isinstance(v, str) else str(v)[:12],
)
def test_bad_codings_and_bombs(name: str, body: bytes, status: int):
    async def main():
        async with undisturbed() as (wire, router):
            calls = len(router.bodies)
            reply = await wire.ask(post(body, "/echo", f"Content-Encoding: {name}"))
            assert reply.status == status
            if status == 415:
                assert b"content-encoding" in reply.body.lower()
                assert "zstd" in reply.headers["accept-encoding"]
            else:
                assert name.encode() in reply.body
            assert len(router.bodies) == calls, "the handler was asked"

    run(main)


# ---- refused by syntax or framing

H = b"Host: localhost\r\n"
P = b"POST /echo HTTP/1.1\r\n" + H

MALFORMED = {
    "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "unknown method": b"BREW /pot HTTP/1.1\r\n" + H + b"\r\n",
    "lower-case method": b"get / HTTP/1.1\r\n" + H + b"\r\n",
    "long method": b"A" * 300 + b" / HTTP/1.1\r\n" + H + b"\r\n",
    "http2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "bad version": b"GET / HTTP/1.7\r\n" + H + b"\r\n",
    "space in target": b"GET /a b HTTP/1.1\r\n" + H + b"\r\n",
    "control character in target": b"GET /\x01 HTTP/1.1\r\n" + H + b"\r\n",
    "content-length and chunked": P + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and content-length": P + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two content-lengths": P + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "the same content-length twice": P + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "list of content-lengths": P + b"Content-Length: 5, 5\r\n\r\nhello",
    "negative content-length": P + b"Content-Length: -5\r\n\r\nhello",
    "signed content-length": P + b"Content-Length: +5\r\n\r\nhello",
    "hexadecimal content-length": P + b"Content-Length: 0x5\r\n\r\nhello",
    "empty content-length": P + b"Content-Length:\r\n\r\nhello",
    "huge content-length": P + b"Content-Length: 99999999999999999999\r\n\r\nhello",
    "chunk size not hexadecimal": P + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
    "chunk size with prefix": P + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "negative chunk size": P + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
    "huge chunk size": P + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "chunk longer than its size": P + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n",
    "chunk ended by LF": P + b"Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
    "chunked not last": P + b"Transfer-Encoding: chunked, gzip\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "transfer-encoding in 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "content-length in a trailer": P + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 5\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\n" + H + b"X: a\r\n b\r\n\r\n",
    "space before colon": b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "space in header name": b"GET / HTTP/1.1\r\n" + H + b"X Y: 1\r\n\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\n" + H + b"X: a\0b\r\n\r\n",
    "bare CR in a header": b"GET / HTTP/1.1\r\n" + H + b"X: a\rY: b\r\n\r\n",
    "bare LF line ends": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "two hosts": b"GET / HTTP/1.1\r\n" + H + H + b"\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_requests_are_refused_and_the_connection_ends(case: str):
    async def main():
        async with undisturbed() as (wire, router):
            calls = len(router.bodies)
            client = await wire.connect()
            # A request smuggled behind the bad one must not be answered.
            reply = await client.ask(MALFORMED[case] + get("/smuggled"))
            assert reply.status == 400
            assert reply.headers["connection"] == "close"
            assert b"bad HTTP request" in reply.body
            assert await client.at_eof()
            assert len(router.bodies) == calls
            assert wire.seen.responses[-1][2] == 400 and wire.seen.responses[-1][3]

    run(main)


_CHUNK = b"8000\r\n" + b"x" * 32768 + b"\r\n"

OTHER_REFUSALS = {
    "http 0.9": (b"GET /\r\n\r\n", 505),
    "http 2.0 in words": (b"GET / HTTP/2.0\r\n" + H + b"\r\n", 505),
    "transfer-encoding gzip": (P + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "chunked misspelt": (P + b"Transfer-Encoding: xchunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 501),
    "connect": (b"CONNECT localhost:1 HTTP/1.1\r\n" + H + b"\r\nraw", 405),
    "long path": (get("/" + "a" * 255), 414),
    "long query": (get("/?" + "a" * 9000), 414),
    "many headers": (get("/", *(f"X-{i}: 1" for i in range(300))), 431),
    "large head": (get("/", *(f"X-{i}: " + "v" * 1000 for i in range(70))), 431),
    "one endless header": (b"GET / HTTP/1.1\r\n" + H + b"X: " + b"v" * (256 << 10), 431),
    "endless chunk extension": (P + b"Transfer-Encoding: chunked\r\n\r\n5;" + b"e" * (256 << 10), 431),
    "endless trailer": (P + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"v" * (256 << 10), 431),
    "many trailers": (P + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: 1234567890\r\n" * 6000, 431),
    "large body announced": (P + b"Content-Length: 1048577\r\n\r\n", 413),
    "large body in chunks": (
        P + b"Transfer-Encoding: chunked\r\n\r\n" + (b"8000\r\n" + b"x" * 32768 + b"\r\n") * 40,
        413,
    ),
}


@pytest.mark.parametrize("case", OTHER_REFUSALS)
def test_limits(case: str):
    data, status = OTHER_REFUSALS[case]

    async def main():
        async with undisturbed() as (wire, router):
            calls = len(router.bodies)
            client = await wire.connect()
            reply = await client.ask(data)
            assert reply.status == status
            assert reply.headers["connection"] == "close"
            assert await client.at_eof()
            assert len(router.bodies) == calls

    run(main)


def test_a_hundred_megabytes_are_refused_before_they_are_read():
    """The client sends and sends; it must be able to read the 413 all the same, not a reset."""

    async def main():
        async with undisturbed() as (wire, _):
            client = await wire.connect()
            sent = 0

            async def sender() -> None:
                nonlocal sent
                await client.send(P + b"Content-Length: 104857600\r\n\r\n")
                for _ in range(1600):
                    await client.send(b"x" * 65536)
                    sent += 65536

            sending = asyncio.create_task(sender())
            reply = await client.reply()
            assert reply.status == 413
            assert sent < 50 << 20
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            assert wire.server.body_bytes == 0

    run(main)


def test_a_client_that_reads_only_after_sending_gets_the_refusal():
    """Closing with unread bytes in the socket would reset the connection under the client's feet."""

    async def main():
        async with undisturbed(replace(FAST, linger=10)) as (wire, _):

            def talk() -> bytes:
                with socket.create_connection((wire.server.host, wire.server.port), timeout=10) as sock:
                    sock.sendall(P + b"Content-Length: 20000000\r\n\r\n")
                    for _ in range(20):
                        sock.sendall(b"x" * 1_000_000)
                        time.sleep(0.005)
                    return sock.recv(65536)

            answer = await asyncio.get_running_loop().run_in_executor(None, talk)
            assert answer.startswith(b"HTTP/1.1 413 ")

    run(main)


def test_bodies_of_all_connections_together_are_bounded():
    async def main():
        async with undisturbed(replace(FAST, body_total=1 << 20, read_timeout=5, request_timeout=5)) as (wire, _):
            first = await wire.connect()
            await first.send(P + b"Content-Length: 900000\r\n\r\n" + b"x" * 800_000)
            await eventually(lambda: wire.server.body_bytes == 800_000)
            reply = await wire.ask(post(b"y" * 500_000))
            assert reply.status == 503 and reply.headers["retry-after"] == "1"
            assert (await first.ask(b"x" * 100_000)).status == 200
            assert wire.server.body_bytes == 0

    run(main)


@pytest.mark.parametrize("seed", range(6))
def test_damaged_requests_get_whole_answers_or_none(seed: int):
    """Good requests with bytes changed, cut, repeated or mixed, cut into random pieces: whatever comes back is a
    sequence of whole HTTP responses, and the server still works."""

    async def main():
        rng = random.Random(seed)
        print("seed", seed)
        seeds = [
            *MALFORMED.values(),
            get("/a?b"),
            post(b"hello", "/echo", "Content-Encoding: gzip"),
            post(gzip.compress(b"hello"), "/echo", "Content-Encoding: gzip", "Expect: 100-continue"),
            P + b"Transfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nT: 1\r\n\r\n",
            post(b"hello", "/short", "Connection: Upgrade", "Upgrade: h2c"),
        ]
        async with undisturbed(replace(FAST, read_timeout=0.1, head_timeout=0.2, linger=0.1)) as (wire, _):

            async def one(data: bytes, cuts: list[int]) -> None:
                client = await wire.connect()
                try:
                    for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
                        await client.send(data[a:b])
                        await asyncio.sleep(0)
                    client.writer.write(get("/end", "Connection: close"))
                    while True:
                        await client.reply()
                except (ConnectionError, asyncio.IncompleteReadError) as error:
                    # The end, between two responses.
                    assert not getattr(error, "partial", b"")
                finally:
                    await client.close()

            for _ in range(12):
                batch = []
                for _ in range(8):
                    data = bytearray(rng.choice(seeds) + rng.choice(seeds))
                    for _ in range(rng.randrange(4)):
                        at = rng.randrange(len(data))
                        kind = rng.randrange(4)
                        if kind == 0:
                            data[at] = rng.choice(b"\r\n\0 :,;0f\x80") if rng.random() < 0.7 else rng.randrange(256)
                        elif kind == 1:
                            del data[at : at + rng.randrange(1, 9)]
                        elif kind == 2:
                            data[at:at] = data[at : at + rng.randrange(1, 30)]
                        else:
                            data[at:at] = rng.choice([b"\r\n", b"Content-Length: 3\r\n", b"GET / HTTP/1.1\r\n", b"\0"])
                        data = data or bytearray(b"x")
                    cuts = sorted(rng.randrange(len(data)) for _ in range(rng.randrange(4)))
                    batch.append(one(bytes(data), cuts))
                await asyncio.gather(*batch)

    run(main)


# ---- the gate, hosts and origins


def test_the_gate_refuses_before_the_body():
    def gate(request: Request) -> Refusal | None:
        if request.headers.get("authorization") != "Bearer k":
            return Refusal(401, "no key", (("WWW-Authenticate", "Bearer"),))
        return None

    async def main():
        async with undisturbed_with_key(gate) as (wire, _router):
            client = await wire.connect()
            reply = await client.ask(P + b"Expect: 100-continue\r\nContent-Length: 1000\r\n\r\n")
            assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer"
            assert await client.at_eof()
            # Without a body the connection can go on.
            client = await wire.connect()
            assert (await client.ask(get("/x"))).status == 401
            reply = await client.ask(get("/x").replace(b"GET", b"HEAD"), "HEAD")
            assert reply.status == 401
            assert (await client.ask(get("/x", "Authorization: Bearer k"))).status == 200
            assert (await client.ask(get("/x").replace(b"GET", b"OPTIONS"))).status == 204
            twice = get("/x", "Authorization: Bearer no", "Authorization: Bearer k")
            assert (await client.ask(twice)).status == 401

    @asynccontextmanager
    async def undisturbed_with_key(gate):
        router = Router()
        async with serving(router, gate=gate) as wire:
            yield wire, router
            assert router.bodies == [b""]

    run(main)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Host: evil.example:8000"], 403),
        (["Host: localhost.evil.example"], 403),
        (["Host: 127.0.0.1.evil.example"], 403),
        (["Host: evil.example#localhost"], 403),
        (["Host: user@localhost"], 403),
        (["Host: [::1"], 403),
        (["Host: "], 403),
        (["Host: localhost"], 200),
        (["Host: LocalHost.:1234"], 200),
        (["Host: 127.0.0.1:8000"], 200),
        (["Host: [::1]:8000"], 200),
        (["Host: my-box.lan:1"], 200),
        (["Host: other.lan"], 403),
        (["Host: localhost", "Origin: https://evil.example"], 403),
        (["Host: localhost", "Origin: null"], 403),
        (["Host: localhost", "Origin: http://localhost:3000"], 200),
        (["Host: localhost", "Origin: vscode-webview://x"], 200),
    ],
)
def test_host_and_origin_on_loopback(lines: list[str], status: int):
    async def main():
        router = Router()
        async with serving(router, allowed_hosts=("my-box.lan",)) as wire:
            request = "POST /x HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\nContent-Length: 2\r\n\r\nhi"
            client = await wire.connect()
            assert (await client.ask(request)).status == status
            assert router.bodies == ([b"hi"] if status == 200 else [])

    run(main)


def test_no_host_check_on_other_addresses():
    async def main():
        async with serving(host="0.0.0.0") as wire:
            reader, writer = await asyncio.open_connection("127.0.0.1", wire.server.port)
            reply = await Client(reader, writer).ask(get("/x", "Origin: https://x").replace(b"localhost", b"box.lan"))
            writer.close()
            assert reply.status == 200
            assert (await wire.ask(b"GET / HTTP/1.1\r\n\r\n")).status == 400

    run(main)


def test_ipv6():
    async def main():
        try:
            async with serving(host="::1") as wire:
                client = await wire.connect()
                assert (await client.ask(get("/six"))).status == 200
                assert wire.server.host == "::1"
        except OSError as error:
            if error.errno in (97, 99):
                pytest.skip("no IPv6 here")
            raise

    run(main)


# ---- time


def test_a_dribbling_head_meets_a_deadline():
    """Bytes keep coming, so no gap is long: the deadline for the whole head ends it (408)."""

    async def main():
        async with undisturbed() as (wire, _):
            clients = [await wire.connect() for _ in range(20)]
            started = time.monotonic()

            async def dribble(client: Client) -> int:
                await client.send(b"GET / HTTP/1.1\r\nHost: x\r\nX-A: ")

                async def drip() -> None:
                    while True:
                        await client.send(b"a")
                        await asyncio.sleep(0.05)

                dripping = asyncio.create_task(drip())
                reply = await client.reply()
                dripping.cancel()
                await asyncio.gather(dripping, return_exceptions=True)
                return reply.status

            tasks = [asyncio.create_task(dribble(c)) for c in clients]
            assert (await wire.ask(get("/now"))).status == 200
            assert await asyncio.gather(*tasks) == [408] * 20
            assert time.monotonic() - started >= FAST.head_timeout
            await eventually(lambda: wire.seen.open_now == 1)

    run(main)


def test_a_dribbling_body_meets_a_deadline():
    async def main():
        async with undisturbed() as (wire, router):
            calls = len(router.bodies)
            client = await wire.connect()
            await client.send(P + b"Content-Length: 1000\r\n\r\n")

            async def drip() -> None:
                while True:
                    await client.send(b"a")
                    await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            assert (await client.reply()).status == 408
            dripping.cancel()
            await asyncio.gather(dripping, return_exceptions=True)
            assert len(router.bodies) == calls

    run(main)


@pytest.mark.parametrize("start", [b"GET / HT", P + b"Content-Length: 10\r\n\r\nhalf"])
def test_a_silent_sender_meets_the_read_timeout(start: bytes):
    async def main():
        limits = replace(FAST, head_timeout=60, request_timeout=60)
        async with undisturbed(limits) as (wire, _):
            client = await wire.connect()
            assert (await client.ask(start)).status == 408
            assert await client.at_eof()

    run(main)


def test_idle_connections_are_closed_and_active_ones_are_not():
    async def main():
        async with undisturbed(replace(FAST, idle_timeout=0.3)) as (wire, router):
            fresh, used, busy = [await wire.connect() for _ in range(3)]
            await busy.send(get("/wait"))
            assert (await used.ask(get())).status == 200
            started = time.monotonic()
            assert await fresh.at_eof() and await used.at_eof()
            assert time.monotonic() - started >= 0.2
            await asyncio.sleep(0.3)
            router.release.set()
            assert (await busy.reply()).body == b"waited"

    run(main)


def test_a_long_answer_outlives_every_deadline():
    async def main():
        limits = replace(FAST, head_timeout=0.1, read_timeout=0.1, request_timeout=0.1, idle_timeout=0.1)
        async with undisturbed(limits) as (wire, router):
            client = await wire.connect()
            await client.send(post(b"x", "/wait"))
            await asyncio.sleep(0.6)
            router.release.set()
            assert (await client.reply()).body == b"waited"

    run(main)


# ---- disconnects and slow readers


@pytest.mark.parametrize("how", ["fin", "reset", "half-close", "fin behind pipelined bytes", "fin behind a flood"])
def test_a_disconnect_is_noticed_at_once(how: str):
    async def main():
        async with undisturbed() as (wire, router):
            client = await wire.connect()
            await client.send(get("/wait"))
            await eventually(lambda: "waiting" in router.events)
            if how == "fin behind pipelined bytes":
                await client.send(get("/next") * 3 + b"GET /unfinished")
            if how == "fin behind a flood":
                await client.send(get("/next") * 100_000)
            if how == "reset":
                client.writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                )
            if how == "half-close":
                client.writer.write_eof()
            else:
                client.writer.close()
            await eventually(lambda: "disconnect" in router.events)
            # Once, and the requests behind it were not begun.
            assert router.events == ["waiting", "disconnect"]
            assert wire.seen.responses[-1] == ("GET", "/wait", 0, "client disconnected")

    run(main)


def test_on_disconnect_after_the_disconnect_calls_at_once():
    async def main():
        called: list[str] = []
        ready = asyncio.Event()

        async def handler(request: Request, responder: Responder) -> None:
            while not responder.disconnected:
                await asyncio.sleep(0.001)
            responder.on_disconnect(lambda: called.append("late"))
            responder.send(200, b"nobody reads this")
            ready.set()

        async with serving(handler) as wire:
            client = await wire.connect()
            await client.send(get())
            await eventually(lambda: wire.seen.open_now == 1)
            client.writer.close()
            await ready.wait()
            assert called == ["late"]

    run(main)


def test_a_handler_that_ignores_the_disconnect_is_cancelled():
    async def main():
        ended: list[str] = []

        async def handler(request: Request, responder: Responder) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        async with serving(handler) as wire:
            client = await wire.connect()
            await client.send(get())
            await eventually(lambda: wire.seen.open_now == 1)
            await asyncio.sleep(0.02)
            client.writer.close()
            await eventually(lambda: ended == ["cancelled"])

    run(main)


def test_a_fin_is_seen_although_answers_are_stuck():
    async def main():
        async with undisturbed(replace(FAST, stall_timeout=60)) as (wire, router):
            client = await wire.connect(limit=1024)
            await client.send(get("/flood"))
            await eventually(lambda: "flood" in router.events)
            await asyncio.sleep(0.1)
            client.writer.write_eof()
            await eventually(lambda: "gone" in router.events)

    run(main)


def test_a_reader_that_stops_fails_and_holds_little():
    async def main():
        async with undisturbed() as (wire, router):
            client = await wire.connect(limit=1024)
            await client.send(get("/flood"))
            await eventually(lambda: "gone" in router.events)
            assert wire.seen.responses[-1] == ("GET", "/flood", 200, "the client stopped reading")

    run(main)


def test_a_slow_reader_that_makes_progress_is_kept():
    async def main():
        async with undisturbed() as (wire, _router):
            sock = socket.create_connection((wire.server.host, wire.server.port))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            sock.sendall(get("/big"))
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            got, started = 0, time.monotonic()
            while got < 8 << 20:
                part = await loop.sock_recv(sock, 256 << 10)
                assert part, "cut off"
                got += len(part)
                if time.monotonic() - started < 1.0:
                    await asyncio.sleep(0.05)
            assert time.monotonic() - started > 2 * FAST.stall_timeout
            sock.close()

    run(main)


def test_a_writer_that_never_drains_is_cut_at_the_limit():
    async def main():
        ended = asyncio.Event()

        async def handler(request: Request, responder: Responder) -> None:
            stream = responder.start()
            for _ in range(1000):
                stream.write(b"x" * 65536)
                await asyncio.sleep(0)
            assert responder.disconnected
            ended.set()

        async with serving(handler, limits=replace(FAST, unsent=4 << 20, stall_timeout=60)) as wire:
            client = await wire.connect(limit=1024)
            await client.send(get())
            await ended.wait()
            assert wire.seen.responses == [("GET", "/", 200, "the client reads too slowly")]

    run(main)


def test_pipelined_requests_wait_for_a_reader_that_does_not_read():
    async def main():
        async with undisturbed() as (wire, router):
            client = await wire.connect(limit=1024)
            calls = len(router.bodies)
            await client.send(get("/big") * 50)
            await asyncio.sleep(0.15)
            assert len(router.bodies) - calls <= 2

    run(main)


# ---- handlers that fail


def test_a_failing_handler_is_500_and_the_connection_goes_on(caplog):
    async def main():
        async with undisturbed() as (wire, _):
            client = await wire.connect()
            reply = await client.ask(get("/boom"))
            assert reply.status == 500 and b"secret" not in reply.body
            assert reply.headers["content-type"] == "application/json"
            assert (await client.ask(get("/nothing"))).status == 500
            assert (await client.ask(get("/fine"))).status == 200

    run(main)
    assert "secret detail" in caplog.text


def test_a_failure_inside_a_stream_leaves_it_unfinished():
    async def main():
        async with undisturbed() as (wire, _):
            client = await wire.connect()
            await client.send(get("/half-boom"))
            await client.head()
            rest = await client.reader.read()
            assert b"secret" not in rest and not rest.endswith(b"0\r\n\r\n")
            assert b"HTTP/1.1" not in rest

    run(main)


def test_a_second_response_is_an_error_of_the_handler(caplog):
    async def main():
        def handler(request: Request, responder: Responder) -> None:
            responder.send(200, b"one")
            responder.send(200, b"two")

        async with serving(handler) as wire:
            client = await wire.connect()
            assert (await client.ask(get())).body == b"one"
            assert (await client.ask(get())).body == b"one"

    run(main)
    assert "a second response" in caplog.text


def test_response_headers_cannot_be_split():
    async def main():
        def handler(request: Request, responder: Responder) -> None:
            responder.send(200, b"", headers=(("X-Echo", request.query),))

        def injecting(request: Request, responder: Responder) -> None:
            responder.send(200, b"", headers=(("X-Echo", "a\r\nX-Evil: 1"),))

        async with serving(handler) as wire:
            assert (await wire.ask(get("/?ok"))).headers["x-echo"] == "ok"
        async with serving(injecting) as wire:
            reply = await wire.ask(get())
            assert reply.status == 500 and "x-evil" not in reply.headers

    run(main)


def test_errors_take_the_form_of_the_path():
    def shape(status: int, message: str, path: str) -> bytes:
        return f"{status}|{message}|{path}".encode()

    async def main():
        async with serving(Router(), error_body=shape) as wire:
            assert (await wire.ask(get("/boom"))).body == b"500|internal server error|/boom"
            reply = await wire.ask(post(b"x", "/v1/messages", "Content-Encoding: br"))
            assert reply.body.startswith(b"415|") and reply.body.endswith(b"|/v1/messages")
            assert (await wire.ask(b"???\r\n")).body.startswith(b"400|")

    run(main)


@pytest.mark.parametrize("broken", ["gate", "error_body", "observer"])
def test_a_broken_hook_is_ours_and_harms_nobody(broken: str, caplog):
    def fail(*_: object) -> None:
        raise RuntimeError("hook broke")

    class BrokenObserver:
        connections = staticmethod(fail)
        response = staticmethod(fail)

    async def main():
        options = {} if broken == "observer" else {broken: fail}
        async with serving(Router(), **options) as wire:
            if broken == "observer":
                wire.server.observers = (BrokenObserver(), wire.seen)
            client = await wire.connect()
            reply = await client.ask(post(b"x", "/echo"))
            assert reply.status == (500 if broken == "gate" else 200)
            if broken == "gate":
                assert b"hook broke" not in reply.body
            else:
                reply = await client.ask(get("/boom"))
                assert reply.status == 500 and b"internal server error" in reply.body
                assert wire.seen.responses[-1][2] == 500

    run(main)
    assert "hook broke" in caplog.text


# ---- many connections, shutdown


def test_at_the_connection_limit_idle_ones_make_room():
    async def main():
        async with undisturbed(replace(FAST, connections=4)) as (wire, router):
            idle = await wire.connect()
            assert (await idle.ask(get())).status == 200
            busy = [await wire.connect() for _ in range(2)]
            for client in busy:
                await client.send(get("/wait"))
            await eventually(lambda: router.events.count("waiting") == 2)
            newcomer = await wire.connect()
            assert (await newcomer.ask(get("/room"))).status == 200
            assert await idle.at_eof()
            await newcomer.send(get("/wait"))
            await eventually(lambda: router.events.count("waiting") == 3)
            refused = await wire.connect()
            reply = await refused.reply()
            assert reply.status == 503 and reply.headers["retry-after"] == "1"
            assert await refused.at_eof()
            router.release.set()
            for client in (*busy, newcomer):
                assert (await client.reply()).body == b"waited"
            await busy[0].close()
            await eventually(lambda: wire.server.open_connections == 3)

    run(main)


def test_shutdown_lets_running_requests_finish():
    async def main():
        router = Router()
        seen = Seen()
        server = HttpServer(router, limits=FAST, observers=(seen,))
        await server.start("127.0.0.1", 0)
        wire = Wire(server, seen)
        idle, busy, sending = [await wire.connect() for _ in range(3)]
        assert (await idle.ask(get())).status == 200
        await busy.send(get("/wait") + get("/behind"))
        await sending.send(b"GET /late HT")
        await eventually(lambda: router.events == ["waiting"])
        await asyncio.sleep(0.02)
        server.begin_shutdown()
        closing = asyncio.create_task(server.wait_closed(5))
        assert await idle.at_eof()
        with pytest.raises(OSError):
            await wire.connect()
        reply = await sending.ask(b"TP/1.1\r\nHost: localhost\r\n\r\n")
        assert reply.status == 503 and reply.headers["connection"] == "close"
        router.release.set()
        reply = await busy.reply()
        assert reply.body == b"waited" and reply.headers["connection"] == "close"
        assert await busy.at_eof(), "the request behind it would be lost work"
        assert await closing is True
        assert server.open_connections == 0

    run(main)


def test_shutdown_cuts_what_does_not_end_in_time():
    async def main():
        router = Router()
        server = HttpServer(router, limits=FAST)
        await server.start("127.0.0.1", 0)
        wire = Wire(server, Seen())
        client = await wire.connect()
        await client.send(get("/wait"))
        await eventually(lambda: router.events == ["waiting"])
        server.begin_shutdown()
        assert await server.wait_closed(0.05) is False
        assert router.events == ["waiting", "disconnect"]
        assert await client.at_eof()

    run(main)


def test_a_port_in_use_is_an_error_and_localhost_is_ipv4():
    async def main():
        async with serving(host="localhost") as wire:
            assert wire.server.host == "127.0.0.1"
            with pytest.raises(OSError):
                await HttpServer(echo).start("127.0.0.1", wire.server.port)
            with pytest.raises(OSError):
                await HttpServer(echo).start("no-such-host.invalid", 0)

    run(main)


def test_idle_connections_have_no_timers_of_their_own():
    """256 idle connections: the loop has one timer for all of them, and none once they are gone."""

    async def main():
        timers: list[object] = []
        async with serving() as wire:
            loop = asyncio.get_running_loop()
            clients = [await wire.connect() for _ in range(256)]
            for client in clients:
                assert (await client.ask(get())).status == 200
            assert wire.server.open_connections == 256
            original = loop.call_later
            sweeps = wire.server._sweep
            assert callable(sweeps)

            class Counting:
                def __call__(self, *args, **kwargs):
                    timers.append(args)
                    return original(*args, **kwargs)

            wire.server._loop = _LoopSpy(loop, Counting())
            await asyncio.sleep(wire.server._sweep_interval * 4.5)
            assert 1 <= len(timers) <= 6
            for client in clients:
                client.writer.close()
            await eventually(lambda: wire.server.open_connections == 0)
            await eventually(lambda: wire.server._sweeper is None)

    class _LoopSpy:
        def __init__(self, loop, call_later):
            self._loop = loop
            self.call_later = call_later

        def __getattr__(self, name):
            return getattr(self._loop, name)

    run(main)
