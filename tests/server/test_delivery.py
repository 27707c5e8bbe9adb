"""How events get to a client: at once while it reads, together when it was slow, and always with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ds4.engine.types import SamplingParams
from ds4.errors import ClientDisconnected
from ds4.server.api import delivery
from ds4.server.api.answer import Collected
from ds4.server.api.errors import WireError
from ds4.server.bridge import Pending
from ds4.server.types import ContentDelta, Event, Failed, Finish, GenerationRequest, Started, ToolCallStart

END = Finish("stop", 1, 0, 1, 1)


class Letters:
    """An answer that writes its events as letters. A text "broken" cannot be written."""

    keepalive = b""

    def begin(self) -> bytes:
        return b"<"

    def events(self, batch: Sequence[Event], choice: int = 0) -> bytes:
        out = b""
        for event in batch:
            if isinstance(event, ContentDelta):
                if event.text == "broken":
                    raise ValueError("cannot be written")
                out += b"%d%b " % (choice, event.text.encode())
            elif isinstance(event, Finish):
                out += b"%d%b " % (choice, event.reason.encode())
        return out

    def end(self, finishes: Sequence[Finish]) -> bytes:
        return b">"

    def error_event(self, error: WireError) -> bytes:
        return b"!%b" % error.message.encode()

    def whole(self, collected: Sequence[Collected]) -> bytes:
        if any(answer.content == "broken" for answer in collected):
            raise ValueError("cannot be written")
        return b"|".join(answer.content.encode() for answer in collected)

    def error(self, error: WireError) -> bytes:
        return b"!%b" % error.message.encode()


class Client:
    """The client's end: a responder and its stream in one. `paused`: it does not read."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False
        self.aborted = ""
        self.started = False
        self.status = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.gone = False
        self.request = SimpleNamespace(body=b"")
        self.lose: list[Callable[[], None]] = []
        self.told: list[str] = []

    def handed_over(self) -> None:
        self.told.append("handed over")

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self.lose.append(callback)

    def send(self, status: int, body: bytes, *, headers: tuple[tuple[str, str], ...] = (), reason: str = "") -> None:
        self.started = True
        self.status = status
        self.headers = headers
        self.writes.append(body)

    @property
    def paused(self) -> bool:
        return not self.reads.is_set()

    def send_framed(self, events: bytes) -> None:
        assert not self.closed
        self.writes.append(events)

    async def drain(self) -> None:
        await self.reads.wait()
        if self.gone:
            raise ClientDisconnected("gone")

    def close(self) -> None:
        self.closed = True

    def abort(self, reason: str) -> None:
        self.aborted = reason


class Machine:
    """One request with `choices` generations; `bring` is a step of the engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, choices: int = 1) -> None:
        self.client = Client()
        self.pending: list[Pending] = []
        self.cancelled: list[object] = []
        monkeypatch.setattr(delivery.EventStream, "start", self._open)
        self.requests = [
            GenerationRequest(f"r{i}", "chat", "m", (1,), b"", SamplingParams(), 10) for i in range(choices)
        ]

    def _open(self, *arguments: object, first: bytes, **options: object) -> Client:
        self.client.writes.append(first)
        return self.client

    def submit(self, request: GenerationRequest, body: bytes, *, stream: bool) -> Pending:
        pending = Pending(request)
        pending.submitted(cast(Any, SimpleNamespace(cancel=self.cancelled.append)), cast(Any, request.id))
        self.pending.append(pending)
        self.client.told.append(request.id)
        return pending

    def send(self, *, stream: bool = True) -> Coroutine[Any, Any, None]:
        service = SimpleNamespace(submit=self.submit, keepalive=None)
        return delivery.send(cast(Any, service), self.requests, Letters, cast(Any, self.client), stream=stream)

    async def bring(self, *events: Event, choice: int = 0) -> None:
        self.pending[choice].put(events)
        for _ in range(5):
            await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_each_step_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        machine = Machine(monkeypatch)
        sending = asyncio.ensure_future(machine.send())
        await asyncio.sleep(0)
        machine.pending[0].put([Started(0, "none", 1, 0), ContentDelta("a")])
        # No other task has run since: what a step brings needs none.
        assert machine.client.writes == [b"<", b"0a "]
        await machine.bring(ContentDelta("b"), END)
        await sending
        assert machine.client.writes == [b"<", b"0a ", b"0b 0stop >"]
        assert machine.client.closed and not machine.cancelled

    run(test)


def test_a_request_is_on_its_way_no_more_before_the_engine_can_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the engine might take it for a sign of another one."""

    async def test() -> None:
        machine = Machine(monkeypatch, 2)
        sending = asyncio.ensure_future(machine.send())
        await asyncio.sleep(0)
        assert machine.client.told == ["handed over", "r0", "r1"]
        await machine.bring(END)
        await machine.bring(END, choice=1)
        await sending

    run(test)


def test_a_slow_reader_gets_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        machine = Machine(monkeypatch, 2)
        client = machine.client
        sending = asyncio.ensure_future(machine.send())
        await asyncio.sleep(0)
        client.reads.clear()
        await machine.bring(ContentDelta("a"))
        await machine.bring(ContentDelta("b"))
        await machine.bring(ContentDelta("c"), END, choice=1)
        assert client.writes == [b"<"]
        client.reads.set()
        await machine.bring(ContentDelta("d"))
        # What came while it was slow goes out together, and before what came after it.
        assert client.writes == [b"<", b"0a 0b ", b"1c 1stop ", b"0d "]
        client.reads.clear()
        await machine.bring(ContentDelta("e"), END)
        assert not sending.done()
        client.reads.set()
        await sending
        assert client.writes[4:] == [b"0e 0stop >"]

    run(test)


def test_a_slow_reader_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        machine = Machine(monkeypatch)
        sending = asyncio.ensure_future(machine.send())
        await asyncio.sleep(0)
        machine.client.reads.clear()
        await machine.bring(ContentDelta("a"))
        machine.client.gone = True
        machine.client.reads.set()
        await sending
        assert machine.client.writes == [b"<"]
        assert machine.client.aborted and machine.cancelled == ["r0"]

    run(test)


def test_a_disconnect_ends_the_handler_and_the_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(stream: bool) -> None:
        machine = Machine(monkeypatch, 2)
        sending = asyncio.ensure_future(machine.send(stream=stream))
        await asyncio.sleep(0)
        await machine.bring(ContentDelta("a"))
        for lose in machine.client.lose:
            lose()
        await sending
        before = list(machine.client.writes)
        await machine.bring(ContentDelta("late"), END)
        assert machine.client.writes == before
        assert machine.cancelled == ["r0", "r1"]

    run(lambda: test(True))
    run(lambda: test(False))


@pytest.mark.parametrize("event", [Failed("the engine broke"), ContentDelta("broken")])
def test_a_failure_is_an_event_and_ends_all_choices(monkeypatch: pytest.MonkeyPatch, event: Event) -> None:
    async def test() -> None:
        machine = Machine(monkeypatch, 2)
        sending = asyncio.ensure_future(machine.send())
        await asyncio.sleep(0)
        await machine.bring(ContentDelta("a"))
        await machine.bring(event, choice=1)
        await sending
        assert machine.client.writes[:2] == [b"<", b"0a "]
        (error,) = machine.client.writes[2:]
        assert error == (b"!the engine broke" if isinstance(event, Failed) else b"!internal error")
        assert machine.client.closed
        assert machine.cancelled == (["r0"] if isinstance(event, Failed) else ["r0", "r1"])

    run(test)


def test_an_unfinished_call_is_no_normal_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        machine = Machine(monkeypatch)
        sending = asyncio.ensure_future(machine.send())
        await asyncio.sleep(0)
        await machine.bring(ToolCallStart(0, "f"), Finish("error", 1, 0, 1, 1, error="cut off"))
        await sending
        assert machine.client.writes == [b"<", b"!cut off"]

    run(test)


def test_a_whole_answer_waits_for_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        machine = Machine(monkeypatch, 2)
        sending = asyncio.ensure_future(machine.send(stream=False))
        await asyncio.sleep(0)
        await machine.bring(ContentDelta("b"), END, choice=1)
        assert machine.client.writes == []
        await machine.bring(ContentDelta("a"))
        await machine.bring(END)
        await sending
        assert (machine.client.status, machine.client.writes) == (200, [b"a|b"])

    run(test)


@pytest.mark.parametrize(("event", "status"), [(Failed("too late", 503), 503), (ContentDelta("broken"), 500)])
def test_a_whole_answer_that_fails_has_a_status(monkeypatch: pytest.MonkeyPatch, event: Event, status: int) -> None:
    async def test() -> None:
        machine = Machine(monkeypatch, 2)
        sending = asyncio.ensure_future(machine.send(stream=False))
        await asyncio.sleep(0)
        await machine.bring(*([event] if isinstance(event, Failed) else [event, END]))
        if not isinstance(event, Failed):
            await machine.bring(ContentDelta("fine"), END, choice=1)
        await sending
        assert machine.client.status == status and len(machine.client.writes) == 1
        assert ("Retry-After" in dict(machine.client.headers)) is (status == 503)

    run(test)
