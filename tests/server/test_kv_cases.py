"""What users reported about caches and batches: the cases of `tests/data/cases.jsonl` of the areas kv and batching.

Each id is checked here against the whole server, in `test_cases.py`, or by the tests that `ELSEWHERE` names.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ds4.engine.types import EngineConfig
from ds4.prompt.types import Special
from ds4.server import kvfile
from ds4.server.config import ServerConfig
from ds4.server.kvpolicy import KvConfig
from ds4.testing import ScriptedEngine
from tests.server import test_cases
from tests.server.test_isolation import answer as all_it_holds
from tests.support.running_server import RunningServer

LINES = (Path(__file__).parents[1] / "data" / "cases.jsonl").read_text().splitlines()
CASES = {case["id"] for case in map(json.loads, LINES) if case["area"] in ("kv", "batching")}

ELSEWHERE = {
    "KV-02": ("test_killed_server.py", "test_killed_under_load", "test_kvstore.py", "test_killed_while_writing"),
    "KV-03": ("test_checkpoints.py", "test_room_for_a_new_conversation"),
    "BA-01": ("test_scheduler.py", "test_a_long_prompt_never_stalls_a_stream_by_more_than_one_small_chunk"),
}
HERE = {
    "KV-01": "test_one_flipped_bit_costs_one_prefill",
    "KV-04": "test_the_second_conversation_is_found_after_a_shutdown",
    "KV-05": "test_a_prompt_that_is_asked_again_or_with_another_end",
    "BA-03": "test_answers_do_not_leak",
}


def test_every_case_has_a_test() -> None:
    here = Path(__file__).parent
    for case, names in ELSEWHERE.items():
        for file, test in zip(names[::2], names[1::2], strict=True):
            assert f"\ndef {test}(" in (here / file).read_text(), case
    for case, test in HERE.items():
        assert test in globals(), case
    assert {*ELSEWHERE, *HERE, *(CASES & set(test_cases.CHECKS))} == CASES


class Server:
    """A server over one directory that can be stopped and started again with the same flags."""

    def __init__(self, directory: Path, script: Callable[[str], Any], slots: int, **fields: Any) -> None:
        self._script, self._slots = script, slots
        self._sessions = {name: fields.pop(name) for name in ("rewinds", "slack", "snapshots") if name in fields}
        self.directory = directory
        self._kv = KvConfig(directory, **{"min_tokens": 64, "boundary_align": 0, **fields})
        self.start()

    def start(self) -> None:
        self.engine = ScriptedEngine(self._script, slots=self._slots, **self._sessions)
        # Tokens of their own, as a model that was trained on them draws them.
        self.engine.tokenizer.encode_segments([Special("<tool_call>"), Special("</tool_call>")])
        config = EngineConfig(ctx=self.engine.config.ctx, slots=self._slots)
        self.running = RunningServer(self.engine, ServerConfig(engine=config, port=0, drain_seconds=5.0, kv=self._kv))

    def restart(self) -> None:
        self.running.stop()
        self.start()

    def ask(self, messages: list[Any], **fields: Any) -> tuple[dict[str, Any], int, int]:
        """(message, prompt tokens, cached tokens)"""
        body = {"messages": messages, "temperature": 0, **fields}
        answer = self.running.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"], usage["prompt_tokens"], cached

    def files(self) -> list[Path]:
        store = self.running.app._store
        assert store is not None
        store.flush()
        return sorted(self.directory.glob("*.kv"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(script: Callable[[str], Any], slots: int = 1, **fields: Any) -> Server:
        made.append(Server(tmp_path / f"kv{len(made)}", script, slots, **fields))
        return made[-1]

    yield make
    for one in made:
        one.running.stop()


def talk(name: str, length: int = 300) -> list[Any]:
    return [
        {"role": "system", "content": "You answer with care. " * 20},
        {"role": "user", "content": f"My secret is {name}. " + "x" * length},
    ]


def bit_places(path: Path, where: str) -> list[int]:
    with path.open("rb", buffering=0) as file:
        layout = kvfile.read_layout(file)
    middle = (layout.payload_at + layout.trailer_at) // 2
    return {
        "payload": [middle],
        "text": [52 + layout.text_bytes // 2, layout.payload_at - 3],
        "end": list(range(layout.size - 4, layout.size)),
        "header": [8, 40, 48],
    }[where]


@pytest.mark.parametrize("where", ["payload", "text", "end", "header"])
def test_one_flipped_bit_costs_one_prefill(
    server: Callable[..., Server], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """KV-01: the answer is right, nothing is cached, the file goes or is replaced and named, then it hits again."""
    first = server(all_it_holds)
    said, _, _ = first.ask(talk("blue"))
    first.running.stop()
    places = {path: bit_places(path, where) for path in first.directory.glob("*.kv")}
    assert places
    for i in range(max(map(len, places.values()))):
        for path, offsets in places.items():
            if path.exists():
                data = bytearray(path.read_bytes())
                data[offsets[i % len(offsets)]] ^= 1 << i % 8
                path.write_bytes(data)
        with caplog.at_level("INFO", logger="ds4.kv"):
            caplog.clear()
            first.start()
            again, _, cached = first.ask(talk("blue"))
            assert (again["content"], cached) == (said["content"], 0), "no damaged state is used"
            first.files()
            assert any(path.name in caplog.text for path in places), "a line names the file"
        second, prompt, cached = first.ask(talk("blue"))
        assert second["content"] == said["content"] and cached > 0
        first.restart()
        third, prompt, cached = first.ask(talk("blue"))
        assert third["content"] == said["content"]
        assert cached > prompt // 3, "from disk"
        first.running.stop()
        places = {path: bit_places(path, where) for path in first.directory.glob("*.kv")}
    first.start()


def with_calls(prompt: str) -> list[str]:
    """Calls a tool when the last message asks for it; what it says depends on all that the session holds."""
    last = prompt.rpartition("<|im_start|>user")[2]
    said = all_it_holds(prompt)
    if "use the tool" in last and "<tool_response>" not in last:
        said += "\n\n<tool_call>\n<function=look>\n<parameter=at>\nsea\n</parameter>\n</function>\n</tool_call>"
    return re.findall("</?tool_call>|.", said, re.DOTALL)


def test_the_second_conversation_is_found_after_a_shutdown(server: Callable[..., Server]) -> None:
    """KV-04: two conversations in one slot, the second one with tool calls; both are restored nearly whole."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    one = server(with_calls)
    a, b = talk("anna", 900), talk("bert", 900)
    for turn in range(4):
        message, _, _ = one.ask(a)
        a += [message, {"role": "user", "content": f"And then {turn}?"}]
    calls = 0
    for turn in range(8):
        message, size_b, _ = one.ask(b, tools=tools)
        b.append(message)
        if message.get("tool_calls"):
            calls += 1
            b.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "waves"})
        else:
            b.append({"role": "user", "content": f"Now use the tool, for the {turn}. time."})
    assert calls >= 3
    history = size_b
    plain = server(with_calls, cold_max=0, min_tokens=30000)
    expected = [plain.ask(talk, **fields)[0]["content"] for talk, fields in ((b, {"tools": tools}), (a, {}))]
    one.restart()
    message, _, cached = one.ask(b, tools=tools)
    assert cached >= 0.9 * history
    assert message["content"] == expected[0]
    message, size_a, cached = one.ask(a)
    assert cached >= 0.8 * size_a
    assert message["content"] == expected[1]


@pytest.mark.parametrize("rings", [False, True])
def test_a_prompt_that_is_asked_again_or_with_another_end(server: Callable[..., Server], rings: bool) -> None:
    """KV-05: the live state is cut; nothing of the prompt but its end is evaluated again. Where the state cannot be
    cut that far, not more than a chunk is."""
    sessions = {"rewinds": False, "slack": 32, "snapshots": 4} if rings else {}
    one = server(all_it_holds, **sessions)
    prompt = talk("green", 4000)
    said, size, _ = one.ask(prompt)
    again, _, cached = one.ask(prompt)
    assert cached >= size - 64
    assert again["content"] == said["content"]
    other = [prompt[0], {"role": "user", "content": prompt[1]["content"][:-200] + "y" * 200}]
    third, _, cached = one.ask(other)
    assert cached >= size - 200 - 64 - (one.engine.config.prefill_chunk if rings else 0)
    assert one.running.app._service.metrics.reuse == {"none": 1, "memory-rewind": 2}
    fresh = server(all_it_holds, cold_max=0, min_tokens=30000)
    assert third["content"] == fresh.ask(other)[0]["content"]


def test_answers_do_not_leak(server: Callable[..., Server]) -> None:
    """BA-03: eight conversations with code words, four at once in random order, two sessions, room for few files."""
    rng = random.Random(5)
    words = [f"word{rng.randrange(10**9)}" for _ in range(8)]
    talks = [talk(word, rng.randrange(50, 900)) for word in words]
    one = server(all_it_holds, slots=2, budget_bytes=25_000)
    plain = server(all_it_holds, cold_max=0, min_tokens=30000)
    errors: list[BaseException] = []

    def ask(i: int) -> None:
        try:
            with httpx.Client(base_url=one.running.url, timeout=60) as http:
                body = {"messages": talks[i], "temperature": 0}
                answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            said = answer["choices"][0]["message"]["content"]
            assert words[i] in said
            assert not any(word in said for word in words if word != words[i])
            talks[i] += [{"role": "assistant", "content": said}, {"role": "user", "content": "And what is it?"}]
        except BaseException as error:
            errors.append(error)

    for _ in range(8):
        chosen = rng.sample(range(8), 4)
        threads = [threading.Thread(target=ask, args=(i,)) for i in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    for history in talks:
        for i, message in enumerate(history):
            if message["role"] == "assistant" and re.search("secret", history[1]["content"]):
                assert plain.ask(history[:i])[0]["content"] == message["content"]
    assert sum(path.stat().st_size for path in one.files()) <= 25_000
