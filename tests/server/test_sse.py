"""Event streams: framing, whole events on every kind of end, keep-alives by one timer."""

from __future__ import annotations

import asyncio
import random

import pytest

from ds4.server.flow import FlowControl
from ds4.server.http import Request, Responder
from ds4.server.sse import COMMENT, DONE, EventStream, KeepAlive, frame
from tests.support.wire import eventually, get, run, serving


def parse(data: bytes) -> list[tuple[str, str]]:
    """(event, data) of each complete event, by the rules of the WHATWG specification; comments are dropped."""
    events = []
    name, lines = "message", []
    text = data.decode()
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line:
            if lines:
                events.append((name, "\n".join(lines)))
            name, lines = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            lines.append(value)
        else:
            assert field == "", f"unknown field {field!r}"
    assert not lines, "half an event"
    return events


def test_frame_bytes():
    assert frame(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert frame(b"{}", "message_start") == b"event: message_start\ndata: {}\n\n"
    assert DONE == b"data: [DONE]\n\n"
    assert COMMENT.startswith(b":") and COMMENT.endswith(b"\n\n")


@pytest.mark.parametrize("seed", range(20))
def test_frames_parse_back_whatever_is_in_them(seed: int):
    rng = random.Random(seed)
    print("seed", seed)
    wanted, data = [], b""
    for _ in range(50):
        text = "".join(
            rng.choice(["a", " ", ":", "\n", "\r", "\r\n", "data: ", "event: x", "é", "\U0001f600"]) for _ in range(8)
        )
        name = rng.choice([None, "ping", "response.in_progress"])
        data += frame(text.encode(), name)
        lines = text.replace("\r\n", "\n").replace("\r", "\n")
        wanted.append((name or "message", lines))
    assert parse(data) == wanted


@pytest.mark.parametrize("name", ["", "a\nb", "a\rb", "a\0"])
def test_event_names_cannot_break_the_frame(name: str):
    with pytest.raises(ValueError):
        frame(b"{}", name)


def test_a_stream_on_the_wire():
    async def handler(request: Request, responder: Responder) -> None:
        events = EventStream.start(responder, headers=(("X-Request-Id", "r1"),))
        events.send(b'{"n":0}')
        events.send_framed(frame(b'{"n":1}', "delta") + frame(b'{"n":2}', "delta"))
        events.send_framed(b"")
        await events.drain()
        events.done()
        events.done()

    async def main():
        async with serving(handler) as wire:
            client = await wire.connect()
            for _ in range(2):
                await client.send(get())
                status, headers = await client.head()
                assert status == 200
                assert headers["content-type"] == "text/event-stream"
                assert headers["cache-control"] == "no-cache"
                assert headers["x-request-id"] == "r1"
                assert await client.chunk() == b'data: {"n":0}\n\n'
                assert parse(await client.chunk()) == [("delta", '{"n":1}'), ("delta", '{"n":2}')]
                assert await client.chunk() == DONE
                assert await client.chunk() == b""

    run(main)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_first_events_go_out_with_the_head(version: str, monkeypatch: pytest.MonkeyPatch):
    writes: list[bytes] = []
    write = FlowControl.write
    monkeypatch.setattr(FlowControl, "write", lambda self, data: (writes.append(data), write(self, data))[1])

    async def handler(request: Request, responder: Responder) -> None:
        EventStream.start(responder, first=b"data: 1\n\n").close()

    async def main():
        async with serving(handler) as wire:
            client = await wire.connect()
            for method in ("GET", "HEAD") if version == "1.1" else ("GET",):
                asked = get().replace(b"GET", method.encode(), 1).replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1)
                writes.clear()
                await client.send(asked)
                status, _ = await client.head()
                assert status == 200
                if method == "HEAD":
                    assert writes[-1].endswith(b"\r\n\r\n")
                elif version == "1.1":
                    assert await client.chunk() == b"data: 1\n\n"
                    assert await client.chunk() == b""
                    assert writes[0].endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n")
                else:
                    assert writes[0].endswith(b"\r\n\r\ndata: 1\n\n")

    run(main)


def test_the_head_goes_out_before_anything_else_happens():
    async def main():
        release = asyncio.Event()

        async def handler(request: Request, responder: Responder) -> None:
            events = EventStream.start(responder)
            await release.wait()
            events.close()

        async with serving(handler) as wire:
            client = await wire.connect()
            await client.send(get())
            assert (await client.head())[0] == 200
            release.set()
            assert await client.chunk() == b""

    run(main)


@pytest.mark.parametrize("how", ["raise", "abort", "shutdown"])
def test_a_failing_stream_ends_between_events(how: str):
    """Whatever ends a stream, what the client has got so far is whole events, and it can tell that more was due."""

    async def handler(request: Request, responder: Responder) -> None:
        events = EventStream.start(responder)
        for i in range(1000):
            events.send(b'{"n":%d,"pad":"%b"}' % (i, b"x" * 500))
            if i % 100 == 99:
                await events.drain()
                await asyncio.sleep(0.01)
            if i == 500 and how == "raise":
                raise RuntimeError("broken")
            if i == 500 and how == "abort":
                events.abort("broken")
                return
        await asyncio.sleep(10)

    async def main():
        async with serving(handler) as wire:
            client = await wire.connect()
            await client.send(get())
            await client.head()
            text = b""
            try:
                while chunk := await client.chunk():
                    text += chunk
                    if how == "shutdown" and len(text) > 100_000 and not wire.server.shutting_down:
                        wire.server.begin_shutdown()
                        await wire.server.wait_closed(0)
                raise AssertionError("the stream looks complete")
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            events = parse(text)
            assert events
            assert [e[1].split(",")[0] for e in events] == [f'{{"n":{i}' for i in range(len(events))]

    run(main)


def test_keep_alives_while_quiet_and_only_then():
    async def main():
        timer = KeepAlive(0.08)
        release = asyncio.Event()
        beats = 0

        def numbered() -> bytes:
            nonlocal beats
            beats += 1
            return frame(b'{"sequence_number":%d}' % beats, "response.in_progress")

        async def handler(request: Request, responder: Responder) -> None:
            if request.path == "/busy":
                events = EventStream.start(responder, timer)
                while not release.is_set():
                    events.send(b"{}")
                    await asyncio.sleep(0.01)
                events.done()
                return
            events = EventStream.start(
                responder, timer, keep_alive=numbered if request.path == "/numbered" else COMMENT
            )
            await release.wait()
            events.done()

        async with serving(handler) as wire:
            busy, quiet, numbering = [await wire.connect() for _ in range(3)]
            await busy.send(get("/busy"))
            await quiet.send(get("/quiet"))
            await numbering.send(get("/numbered"))
            for client in (busy, quiet, numbering):
                await client.head()
            for i in range(1, 4):
                assert await quiet.chunk() == COMMENT
                assert await numbering.chunk() == b'event: response.in_progress\ndata: {"sequence_number":%d}\n\n' % i
            assert len(timer) == 3
            release.set()
            text = b""
            while chunk := await busy.chunk():
                text += chunk
            # A machine that stalls for the whole interval makes the busy stream quiet: then one comment is right.
            assert text.count(COMMENT) <= 1
            assert parse(text)[-1] == ("message", "[DONE]")
            await eventually(lambda: len(timer) == 0)
            assert timer._handle is None or not timer._streams
            timer.stop()

    run(main)


def test_a_stream_whose_client_left_gets_no_keep_alive_and_keeps_no_timer():
    async def main():
        timer = KeepAlive(0.02)

        async def handler(request: Request, responder: Responder) -> None:
            EventStream.start(responder, timer)
            await asyncio.sleep(60)

        async with serving(handler) as wire:
            client = await wire.connect()
            await client.send(get())
            assert (await client.head())[0] == 200
            assert await client.chunk() == COMMENT
            await client.close()
            await eventually(lambda: len(timer) == 0)
            await eventually(lambda: timer._handle is None)

    run(main)


def test_a_failing_keep_alive_fails_one_stream_only(caplog):
    async def main():
        timer = KeepAlive(0.02)

        def broken() -> bytes:
            raise RuntimeError("no number")

        async def handler(request: Request, responder: Responder) -> None:
            EventStream.start(responder, timer, keep_alive=broken if request.path == "/broken" else COMMENT)
            while not responder.disconnected:
                await asyncio.sleep(0.01)

        async with serving(handler) as wire:
            bad, good = [await wire.connect() for _ in range(2)]
            await bad.send(get("/broken"))
            await bad.head()
            await good.send(get("/good"))
            await good.head()
            assert await bad.at_eof()
            for _ in range(5):
                assert await good.chunk() == COMMENT

    run(main)
    assert "no number" in caplog.text
