"""Names of sessions: long conversations are rendered off the engine thread, and named before anyone can ask again."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from ds4.engine.types import SamplingParams
from ds4.prompt.types import Conversation, Message, Special
from ds4.server import kvfile
from ds4.server.api import prepare
from ds4.server.api.prepare import Limits, Preparer
from ds4.server.generation import Job
from ds4.server.kvpolicy import KvConfig
from ds4.server.scheduler import NAMED_HERE
from ds4.testing import ScriptedEngine
from ds4.testing.driver import Driver
from tests.support.running_server import Serve

LONG, SHORT = "Tell me more of it. " * 1000, "Tell me."


def thinker(*answers: str) -> ScriptedEngine:
    scripts = [re.findall("</think>|.", f"Let me think.</think>{answer}", re.DOTALL) for answer in answers]
    engine = ScriptedEngine(*scripts, syntax="deepseek4", ctx=1 << 17)
    engine.tokenizer.encode_segments([Special("</think>")])
    return engine


@pytest.mark.parametrize(("text", "here"), [(LONG, False), (SHORT, True)], ids=["long", "short"])
def test_who_renders(serve: Serve, monkeypatch: pytest.MonkeyPatch, text: str, here: bool) -> None:
    threads: list[str] = []
    render = prepare.visible_key

    def watched(*what: Any) -> bytes | None:
        threads.append(threading.current_thread().name)
        return render(*what)

    monkeypatch.setattr(prepare, "visible_key", watched)
    assert (len(text) < NAMED_HERE) == here
    server = serve(thinker("Yes.", "No."), slots=1)
    history = [{"role": "user", "content": text}]
    body = {"messages": history, "temperature": 0}
    first = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert threads == ["ds4-engine"] if here else threads and "ds4-engine" not in threads
    history += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Sure?"}]
    usage = server.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 20
    assert server.app._service.metrics.reuse == {"none": 1, "thinking-visible": 1}


def test_a_long_session_is_stored_by_what_the_client_saw(serve: Serve, tmp_path: Path) -> None:
    server = serve(thinker("Yes."), slots=1, kv=KvConfig(tmp_path, cold_max=0, continued_interval=0))
    server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": LONG}], "temperature": 0})
    server.stop()
    (path,) = tmp_path.glob("*.kv")
    with path.open("rb", buffering=0) as file:
        assert kvfile.read_layout(file).header.flags & kvfile.THINKING_VISIBLE


class Talk:
    """A scheduler whose ends nobody has passed on yet."""

    def __init__(self) -> None:
        self.engine = thinker("Yes.", "No.")
        self.driver = Driver(self.engine, names_elsewhere=True)
        self.preparer = Preparer(self.engine, 1000)
        self.slot = self.driver.scheduler.slots[0]

    def submit(self, text: str) -> Job:
        conversation = Conversation((Message("user", text),))
        prompt = asyncio.run(self.preparer.prompt(conversation))
        sampling = SamplingParams(temperature=0)
        request = self.preparer.request("id", "chat", "m", prompt, conversation, sampling, Limits(), param=None)
        return self.driver.scheduler.submit(request)

    def ask(self, text: str) -> Job:
        job = self.submit(text)
        self.driver.run()
        return job


def test_a_session_that_was_taken_meanwhile_is_not_named() -> None:
    talk = Talk()
    first = talk.ask(LONG)
    assert talk.slot.naming is first.naming is not None and talk.slot.visible is None
    second = talk.ask("Something else.")
    names = talk.slot.text, talk.slot.visible
    assert second.naming is None and names[1] is not None
    talk.driver.scheduler.name(first)
    talk.driver.step()
    assert (talk.slot.text, talk.slot.visible) == names


def test_the_last_names_are_waited_for_at_the_end() -> None:
    talk = Talk()
    job = talk.ask(LONG)
    scheduler = talk.driver.scheduler
    scheduler.shutdown(1.0)
    talk.driver.step()
    assert not scheduler.stopped
    scheduler.name(job)
    talk.driver.step()
    assert scheduler.stopped and talk.slot.visible is not None and talk.slot.naming is None


def test_names_that_fail_are_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    talk = Talk()
    job = talk.ask(LONG)

    def fails(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("ds4.server.naming.Naming._visible", fails)
    talk.driver.scheduler.name(job)
    talk.driver.step()
    assert talk.slot.naming is None and talk.slot.visible is None
    assert "the live text is not known: no such thing" in caplog.text


@pytest.mark.parametrize("text", [LONG, SHORT], ids=["long", "short"])
def test_what_was_cut_off_is_known_by_its_text(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """The client has left in the middle: what is there serves the next one."""
    talk = Talk()
    job = talk.submit(text)
    while talk.slot.generation is None or talk.slot.generation.completion_tokens < 5:
        talk.driver.step()
    talk.driver.scheduler.cancel(job)
    talk.driver.run()
    assert not [r for r in caplog.records if r.levelno > logging.INFO]
    assert talk.slot.naming is None and job.naming is None
    assert talk.slot.text is not None and talk.slot.visible is None
    assert talk.slot.text.tokens == talk.slot.session.n_tokens > len(job.prompt)
    assert talk.slot.text.whole == job.query.key + b"Let me think"[: talk.slot.session.n_tokens - len(job.prompt)]
