"""Results of calls go on with the state that made the calls: bound by ids, 400 when never known, 409 when gone."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from ds4.errors import RequestError
from ds4.prompt.types import Conversation, Message, Special, ToolCall
from ds4.server.api.live import LiveTurn, LiveTurns
from ds4.server.api.prepare import Preparer
from ds4.server.reuse import Bound, Query
from ds4.server.types import Continuation, Failed
from ds4.testing import ScriptedEngine
from ds4.testing.driver import Driver
from tests.support.running_server import RunningServer, Serve

CALL = (
    '<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="b" string="true">{0}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}


def calling(*places: str, thought: str = "I shall look.") -> list[str]:
    """A thinking turn that calls, a token per character but for what the family draws as special tokens."""
    calls = "".join(CALL.format(place) for place in places)
    text = f"{thought}</think>Wait.\n\n<｜DSML｜tool_calls>\n{calls}</｜DSML｜tool_calls>"
    return re.findall("</think>|｜DSML｜|.", text, re.DOTALL)


def saying(text: str) -> list[str]:
    return re.findall("</think>|.", f"hm</think>{text}", re.DOTALL)


@dataclass(frozen=True)
class Dialect:
    """One client: how it asks, and how it sends a turn with calls and their results back."""

    name: str
    path: str
    what: str
    history: str

    def body(self, items: list[Any], **fields: Any) -> dict[str, Any]:
        if self.name == "responses":
            tool = {"type": "function", "name": "look", "parameters": PARAMETERS}
            return {"input": items, "tools": [tool], "temperature": 0, **fields}
        tool = {"name": "look", "input_schema": PARAMETERS}
        return {"messages": items, "tools": [tool], "temperature": 0, "max_tokens": 500, **fields}

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    def calls(self, answer: Any) -> list[str]:
        if self.name == "responses":
            return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]

    def turn(self, answer: Any, *, reorder: bool = False) -> list[Any]:
        """The answer as history; without its reasoning, and perhaps with the members of its arguments turned round."""
        if self.name == "responses":
            items = [{k: v for k, v in item.items() if k != "id"} for item in answer["output"]]
            items = [item for item in items if item["type"] != "reasoning"]
            for item in items:
                if reorder and item["type"] == "function_call":
                    item["arguments"] = json.dumps(dict(reversed(json.loads(item["arguments"]).items())))
            return items
        blocks = [dict(block) for block in answer["content"] if block["type"] != "thinking"]
        for block in blocks:
            if reorder and block["type"] == "tool_use":
                block["input"] = dict(reversed(block["input"].items()))
        return [{"role": "assistant", "content": blocks}]

    def results(self, ids: Sequence[str]) -> list[Any]:
        if self.name == "responses":
            return [{"type": "function_call_output", "call_id": i, "output": f"r{n}"} for n, i in enumerate(ids)]
        return [
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": i, "content": f"r{n}"} for n, i in enumerate(ids)],
            }
        ]

    def text(self, answer: Any) -> str:
        if self.name == "responses":
            return "".join(
                part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]
            )
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


DIALECTS = {
    "responses": Dialect("responses", "/v1/responses", "Responses", "input"),
    "anthropic": Dialect("messages", "/v1/messages", "Anthropic", "messages"),
}


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return DIALECTS[request.param]


class Talk:
    """A server with a scripted DeepSeek model, and one client."""

    def __init__(self, serve: Serve, dialect: Dialect, *scripts: Any, slots: int = 1, ctx: int = 32768, **fields: Any):
        self.engine = ScriptedEngine(*scripts, syntax="deepseek4", slots=slots, ctx=ctx)
        self.engine.tokenizer.encode_segments([Special("</think>"), Special("｜DSML｜")])
        self.server: RunningServer = serve(self.engine, slots=slots, **fields)
        self.dialect = dialect

    def post(self, items: list[Any], **fields: Any) -> httpx.Response:
        return self.server.http.post(self.dialect.path, json=self.dialect.body(items, **fields))

    def ask(self, items: list[Any], **fields: Any) -> Any:
        response = self.post(items, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def live(self, slot: int = 0) -> str:
        return self.engine.tokenizer.decode(self.engine.sessions[slot].tokens.tolist()).decode()

    @property
    def evaluated(self) -> int:
        """Tokens of all steps so far."""
        return sum(step.n_tokens for step in self.engine.steps)


Routes = Callable[[int], list[str]]


@pytest.fixture
def routes(caplog: pytest.LogCaptureFixture) -> Iterator[Routes]:
    """The tiers of so many decisions, read from the log, which may have them a moment after the answer."""
    found: list[str] = []
    came = threading.Condition()

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            match = re.search(r"slot \d+: ([\w-]+)", record.getMessage())
            if match:
                with came:
                    found.append(match[1])
                    came.notify_all()

    def decisions(n: int) -> list[str]:
        with came:
            assert came.wait_for(lambda: len(found) >= n, timeout=10)
            return list(found)

    logger = logging.getLogger("ds4.slots")
    handler = Reader()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield decisions
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize("alone", [True, False], ids=["results alone", "whole history"])
def test_only_what_follows_the_calls_is_evaluated(serve: Serve, dialect: Dialect, routes: Routes, alone: bool) -> None:
    talk = Talk(serve, dialect, calling("sea", "sky"), saying("Both are blue."))
    first = talk.ask(talk.dialect.user("Look!"))
    before, held = talk.evaluated, talk.live()
    assert "I shall look." in held
    ids = dialect.calls(first)
    assert len(ids) == 2
    results = dialect.results(ids)
    items = results if alone else [*dialect.user("Look!"), *dialect.turn(first, reorder=True), *results]
    second = talk.ask(items)
    assert dialect.text(second) == "Both are blue."
    tier = routes(2)[1]
    assert tier == f"{dialect.what.lower()}-tool-output" or (not alone and tier == "responses-visible")
    live = talk.live()
    assert live.startswith(held), "what was sampled stays, hidden reasoning too"
    tail = live[len(held) :]
    assert tail.startswith(">") and tail.count("r0") == tail.count("r1") == 1 and tail.index("r0") < tail.index("r1")
    assert talk.evaluated - before == len(talk.engine.sessions[0].tokens) - len(
        talk.engine.tokenizer.encode_with_specials(held)
    )


def test_results_in_another_order_stand_in_the_order_of_the_calls() -> None:
    """Where the family was trained to see them so, as DeepSeek V4.1."""
    preparer = Preparer(ScriptedEngine(syntax="deepseek41"), 1000)
    live = LiveTurns()
    calls = tuple(ToolCall(call_id, "look", "{}") for call_id in ("c1", "c2"))
    turn = (Message("user", "Look!"), Message("assistant", "Wait.", calls=calls))
    live.remember("turn", LiveTurn(None, turn))
    results = [Message("tool", f"of {call.id}", call_id=call.id) for call in calls]
    tails = set()
    for order in (results, results[::-1]):
        found = live.continuation("x", preparer, Conversation((*turn, *order)), required=True)
        assert found is not None and found.turn == "turn"
        tails.add(found.tail)
    (tail,) = tails
    assert 0 < tail.index(b"of c1") < tail.index(b"of c2")
    for some in (results[:1], [*results, Message("tool", "x", call_id="c3")], [Message("user", "more")]):
        assert live.continuation("x", preparer, Conversation((*turn, *some)), required=True) is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_state_that_is_gone_is_409(serve: Serve, dialect: Dialect, stream: bool) -> None:
    talk = Talk(serve, dialect, calling("sea"), saying("Hello."), saying("Blue."))
    first = talk.ask(dialect.user("Look!"))
    talk.ask(dialect.user("somebody else " * 9))
    results = dialect.results(dialect.calls(first))
    refused = talk.post(results, stream=stream)
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert error["message"] == (
        f"{dialect.what} continuation state is not available; retry by replaying the full {dialect.history} history"
    )
    assert error["type"] == "invalid_request_error"
    replayed = talk.ask([*dialect.user("Look!"), *dialect.turn(first), *results])
    assert dialect.text(replayed) == "Blue."
    assert talk.server.http.get("/slots").json()[0]["phase"] == "idle"


def test_ids_that_were_never_known_are_400(serve: Serve, dialect: Dialect) -> None:
    talk = Talk(serve, dialect, saying("x"))
    refused = talk.post(dialect.results(["call_never"]))
    assert refused.status_code == 400
    name = "call_id" if dialect.name == "responses" else "tool_use_id"
    assert f"{name} call_never; retry by replaying the full {dialect.history} history" in refused.text
    assert talk.engine.steps == []


def test_the_bound_slot_is_taken_although_another_has_more(serve: Serve, dialect: Dialect, routes: Routes) -> None:
    """Two agents with one system prompt; each goes on in its own state."""
    talk = Talk(serve, dialect, calling("sea"), calling("sky"), saying("one"), saying("two"), slots=2)
    shared = "A long beginning. " * 30
    first = [talk.ask(dialect.user(shared + name)) for name in ("a", "b" * 90)]
    for answer, text in zip(first, ("one", "two"), strict=True):
        said = talk.ask(dialect.results(dialect.calls(answer)))
        assert dialect.text(said) == text
    assert routes(4)[2:] == [f"{dialect.what.lower()}-tool-output"] * 2


def test_two_answers_to_the_same_calls(serve: Serve, dialect: Dialect) -> None:
    """The first one takes the state along; the second one finds it gone."""
    talk = Talk(serve, dialect, calling("sea"), saying("one"), saying("two"), slots=2)
    first = talk.ask(dialect.user("Look!"))
    results = dialect.results(dialect.calls(first))
    assert dialect.text(talk.ask(results)) == "one"
    assert talk.post(results).status_code == 409
    assert dialect.text(talk.ask([*dialect.user("Look!"), *dialect.turn(first), *results])) == "two"


def test_an_edited_history_is_not_the_live_one(serve: Serve, dialect: Dialect, routes: Routes) -> None:
    talk = Talk(serve, dialect, calling("sea"), saying("x"))
    first = talk.ask(dialect.user("Look at it!"))
    results = dialect.results(dialect.calls(first))
    talk.ask([*dialect.user("Look at me!"), *dialect.turn(first), *results])
    assert routes(2)[1] == "memory-rewind"
    assert "Look at it!" not in talk.live() and "I shall look." not in talk.live()


def test_a_cut_turn_binds_nothing(serve: Serve, dialect: Dialect) -> None:
    """The limit ends the turn inside its second call: no call is handed out, and none can be answered."""
    limit = {"responses": "max_output_tokens", "messages": "max_tokens"}[dialect.name]
    talk = Talk(serve, dialect, calling("sea", "sky"), saying("x"))
    answer = talk.ask(dialect.user("Look!"), **{limit: len(calling("sea", "sky")) - 30})
    for call_id in dialect.calls(answer):
        assert talk.post(dialect.results([call_id])).status_code == 400
    assert talk.server.app._scheduler.slots[0].bound is None


def test_a_state_that_cannot_be_gone_on_with_is_409() -> None:
    """No room behind it, or a tail that cannot be encoded. The state stays as it is, and nothing waits."""
    driver = Driver(ScriptedEngine("abc", ctx=100))
    driver.ask("x" * 50)
    slot = driver.scheduler.slots[0]
    held = slot.session.tokens.tolist()
    for tail in (b"y" * 90, b"\xc3", b""):
        slot.bound = Bound("turn", len(held))
        continues = Continuation("responses-tool-output", "turn", tail, required=True)
        end = driver.end(driver.ask("x" * 60, dialect="responses", continues=continues))
        assert isinstance(end, Failed) and end.status == 409
        assert slot.session.tokens.tolist() == held and not slot.busy


def test_a_bound_slot_that_is_busy_is_waited_for() -> None:
    driver = Driver(ScriptedEngine("abc"), slots=2)
    driver.ask("x" * 50)
    slot = next(slot for slot in driver.scheduler.slots if slot.session.n_tokens)
    slot.bound = Bound("turn", slot.session.n_tokens)
    query = Query(np.array([1, 2], np.int32), b"", Continuation("responses-tool-output", "turn", b"y", required=True))
    slot.generation = SimpleNamespace()  # type: ignore[assignment]
    assert driver.scheduler.slots.route(query, 0.0) is None
    slot.generation = None
    route = driver.scheduler.slots.route(query, 0.0)
    assert route is not None and route.slot is slot and route.reuse.tokens == slot.session.n_tokens
    slot.session.clear()
    with pytest.raises(RequestError) as caught:
        driver.scheduler.slots.route(query, 0.0)
    assert caught.value.status == 409


def test_a_response_that_is_named_is_evaluated_anew_when_its_state_is_gone(serve: Serve) -> None:
    dialect = DIALECTS["responses"]
    talk = Talk(serve, dialect, calling("sea"), saying("Hello."), saying("Blue."))
    first = talk.ask(dialect.user("Look!"))
    talk.ask(dialect.user("somebody else " * 9))
    said = talk.ask(dialect.results(dialect.calls(first)), previous_response_id=first["id"])
    assert dialect.text(said) == "Blue."


@pytest.mark.parametrize("reasoning", [True, False], ids=["sent back", "left out"])
def test_a_chat_client_that_spells_its_calls_anew_evaluates_its_results_only(serve: Serve, reasoning: bool) -> None:
    """Two turns of calls: also the earlier ones stand as sampled in what the state is found by, and white space that
    the model put before its calls is no reason to evaluate them again."""
    scripts = [calling("sea"), calling("sky"), saying("x")]
    for script in scripts[:2]:
        script.insert(script.index("W"), "\n")
        script.insert(script.index(".", script.index("W")) + 1, " ")
    engine = ScriptedEngine(*scripts, syntax="deepseek4", slots=1)
    engine.tokenizer.encode_segments([Special("</think>"), Special("｜DSML｜")])
    server = serve(engine, slots=1)
    tools = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": "Look!"}]
    for _ in range(2):
        body = {"messages": messages, "tools": tools, "temperature": 0}
        turn = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        (call,) = turn["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())))
        if not reasoning:
            del turn["reasoning_content"]
        messages += [turn, {"role": "tool", "tool_call_id": call["id"], "content": "blue"}]
        held = engine.sessions[0].n_tokens
        usage = server.http.post("/v1/chat/completions", json={**body, "messages": messages, "max_tokens": 0}).json()
        new = usage["usage"]["prompt_tokens"] - usage["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert new < 60, "the end of the turn, the result, the next header"
        assert engine.sessions[0].n_tokens == held + new


# ---- a call that is drawn anew: what of the sampled state is given up


@pytest.mark.parametrize("replay", [True, False])
def test_sampled_calls_are_given_up_only_where_nothing_binds_them(serve: Serve, routes: Routes, replay: bool) -> None:
    """A Chat client sends its calls with other spelling. Replayed exactly they stand as sampled; without replay the
    state is cut to where the rendered call differs, and no more than that is evaluated again."""
    engine_script = calling("sea", thought="")[1:]  # thinking is off
    engine = ScriptedEngine(engine_script, saying("x")[3:], syntax="deepseek4", slots=1)
    engine.tokenizer.encode_segments([Special("</think>"), Special("｜DSML｜")])
    server = serve(engine, slots=1, exact_tool_replay=replay)
    tools = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    fields = {"tools": tools, "temperature": 0, "reasoning_effort": "none"}
    user = {"role": "user", "content": "Look!"}
    chat = "/v1/chat/completions"
    turn = server.http.post(chat, json={"messages": [user], **fields}).json()["choices"][0]["message"]
    (call,) = turn["tool_calls"]
    held = engine.sessions[0].tokens.tolist()
    prompt = len(held) - len(engine_script) + 1
    call["function"]["arguments"] = json.dumps(dict(reversed(json.loads(call["function"]["arguments"]).items())))
    result = {"role": "tool", "tool_call_id": call["id"], "content": "blue"}
    usage = server.http.post(chat, json={"messages": [user, turn, result], **fields}).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    if replay:
        assert routes(2)[1] == "memory-token"
        assert cached == len(held)
    else:
        assert routes(2)[1] == "memory-rewind"
        differs = "".join(engine_script).index('name="b"') + len('name="')
        assert (
            cached >= prompt + len(re.findall("</think>|｜DSML｜|.", "".join(engine_script)[:differs], re.DOTALL)) - 1
        )
        assert cached < len(held)
        live = engine.tokenizer.decode(engine.sessions[0].tokens.tolist()).decode()
        assert live.index('name="a"') < live.index('name="b"')


def test_a_thinking_turn_that_ends_by_length_is_not_drawn_anew(serve: Serve) -> None:
    """Nothing is evaluated when the limit comes, and the next turn keeps all up to the answer."""
    engine = ScriptedEngine(saying("A long answer that goes on"), saying("Yes."), syntax="deepseek4")
    engine.tokenizer.encode_segments([Special("</think>")])
    server = serve(engine, slots=1)
    user = {"role": "user", "content": "Speak! " * 20}
    answer = server.http.post("/v1/chat/completions", json={"messages": [user], "max_tokens": 10}).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    slot = server.app._scheduler.slots[0]
    assert slot.visible is None and slot.bound is None
    assert len(engine.steps) == 10, "one step a token; none more"
    history = [user, {"role": "assistant", "content": choice["message"]["content"]}, {"role": "user", "content": "On?"}]
    usage = server.http.post("/v1/chat/completions", json={"messages": history}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"] - 2
