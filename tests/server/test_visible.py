"""Reuse of live state by clients that do not send the reasoning back, with the DeepSeek syntax."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from ds4.engine.types import SamplingParams
from ds4.prompt.types import Conversation, Message, Special, Tool, ToolCall
from ds4.server.api.prepare import Limits, Preparer
from ds4.server.generation import Job
from ds4.server.keys import tokens_of_key, visible_key
from ds4.server.types import Dialect
from ds4.testing import ScriptedEngine
from ds4.testing.driver import Driver

TOOL = Tool("look", '{"name":"look","parameters":{"type":"object","properties":{"at":{"type":"string"}}}}')
CALL = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" string="true">the sea</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
THOUGHT = "The user greets me, so I shall greet back; but not for too long, since time is short."


def pieces(text: str) -> list[str]:
    """One token per character, but for what a model of this family draws as special tokens."""
    return re.findall("</think>|｜DSML｜|.", text, re.DOTALL)


class Talk:
    """A conversation with a scripted model, as one client's dialect renders it."""

    def __init__(self, *scripts: str, dialect: Dialect = "chat", tools: bool = False, **engine: Any) -> None:
        self.engine = ScriptedEngine(*(pieces(s) for s in scripts), syntax="deepseek4", **engine)
        self.engine.tokenizer.encode_segments([Special("</think>"), Special("｜DSML｜")])
        self.preparer = Preparer(self.engine, 10_000)
        self.driver = Driver(self.engine)
        self.dialect: Dialect = dialect
        self.tools = (TOOL,) if tools else ()

    def ask(self, *messages: Message, **fields: Any) -> Job:
        conversation = Conversation(messages, self.tools)
        prompt = asyncio.run(self.preparer.prompt(conversation))
        request = self.preparer.request(
            "id", self.dialect, "m", prompt, conversation, SamplingParams(temperature=0), Limits(**fields), param=None
        )
        assert request.thinking
        job = self.driver.scheduler.submit(request)
        self.driver.run()
        return job

    def reuse(self, job: Job) -> tuple[str, int]:
        started = self.driver.started(job)
        assert started is not None
        return started.reuse, started.cached_tokens

    def live(self) -> str:
        return self.engine.tokenizer.decode(self.engine.sessions[0].tokens.tolist()).decode()


USER = Message("user", "Hello!")
SECOND = Message("user", "And now?")


@pytest.mark.parametrize("rewinds", [True, False])
def test_the_next_turn_goes_on_with_the_hidden_reasoning(rewinds: bool) -> None:
    talk = Talk(f"{THOUGHT}</think>Good day.", "x</think>Bye.", rewinds=rewinds)
    first = talk.ask(USER)
    assert talk.driver.reasoning(first) == THOUGHT
    held = talk.engine.sessions[0].n_tokens
    second = talk.ask(USER, Message("assistant", "Good day."), SECOND)
    kind, cached = talk.reuse(second)
    assert kind == "thinking-visible"
    assert len(second.prompt) > held
    rest = len(second.prompt) - held
    asked = len(second.request.prompt_tokens)
    assert cached == asked - rest
    finish = talk.driver.finish(second)
    assert (finish.prompt_tokens, finish.cached_tokens, finish.cache_write_tokens) == (asked, cached, rest)
    live = talk.live()
    assert live.count(THOUGHT) == 1
    assert live.endswith("<｜User｜>And now?<｜Assistant｜><think>x</think>Bye.")
    assert f"{THOUGHT}</think>Good day.<｜end▁of▁sentence｜><｜User｜>And now?" in live


def test_many_turns_grow_one_state() -> None:
    talk = Talk(*(f"{THOUGHT} {i}.</think>Answer {i}." for i in range(6)))
    messages = [USER]
    for i in range(6):
        job = talk.ask(*messages)
        if i:
            assert talk.reuse(job)[0] == "thinking-visible", i
        messages += [Message("assistant", talk.driver.text(job)), Message("user", f"Question {i}")]
    assert talk.live().count(THOUGHT) == 6


def test_a_client_that_sends_the_reasoning_gets_the_same() -> None:
    """Without tools the history is rendered without reasoning, whoever sends it."""
    talk = Talk(f"{THOUGHT}</think>Good day.")
    talk.ask(USER)
    job = talk.ask(USER, Message("assistant", "Good day.", reasoning=THOUGHT), SECOND)
    assert talk.reuse(job)[0] == "thinking-visible"


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        (f"{THOUGHT}</think>Good day.", {"max_tokens": len(THOUGHT) + 10}),
        (f"{THOUGHT}</think>Good day. STOP and so on", {"stop": (b"STOP",)}),
        (THOUGHT, {}),
    ],
    ids=["length", "stop string", "still thinking"],
)
def test_no_record(script: str, fields: dict[str, Any]) -> None:
    talk = Talk(script, "b")
    talk.ask(USER, **fields)
    slot = talk.driver.scheduler.slots[0]
    assert slot.visible is None
    assert slot.text is not None and slot.text.tokens == slot.session.n_tokens


def test_another_answer_is_another_conversation() -> None:
    talk = Talk(f"{THOUGHT}</think>Good day.")
    talk.ask(USER)
    for edited in ("Good day!", "Good", ""):
        job = talk.ask(USER, Message("assistant", edited), SECOND)
        assert talk.reuse(job)[0] == "memory-rewind"
        talk.engine.sessions[0].clear()
        talk.ask(USER)


def test_a_foreign_request_clears_the_record() -> None:
    talk = Talk(f"{THOUGHT}</think>Good day.", "q</think>r", "s</think>t")
    talk.ask(USER)
    talk.ask(Message("user", "somebody else"))
    job = talk.ask(USER, Message("assistant", "Good day."), SECOND)
    assert talk.reuse(job)[0] == "memory-rewind"
    assert THOUGHT not in talk.live()


def test_reasoning_that_does_not_fit_any_more_is_dropped() -> None:
    """The client's prompt fits; with all hidden reasoning it would not: the state starts anew."""
    long = "hm " * 100
    talk = Talk(f"{long}</think>A.", "b</think>c", ctx=400)
    talk.ask(USER)
    job = talk.ask(USER, Message("assistant", "A."), Message("user", "z" * 120))
    assert talk.reuse(job)[0] == "memory-rewind"
    assert talk.driver.finish(job).reason == "stop"
    assert "hm" not in talk.live()


def tool_turn(talk: Talk) -> tuple[Message, ...]:
    """The history after a call, as a client sends it whose calls are replayed exactly, without reasoning."""
    job = talk.ask(USER)
    assert talk.driver.finish(job).reason == "tool_calls"
    call = ToolCall("c1", "look", talk.driver.arguments(job), CALL.encode())
    return USER, Message("assistant", "Let me see.", calls=(call,)), Message("tool", "blue", call_id="c1")


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [("responses", "responses-visible"), ("messages", "thinking-visible"), ("chat", "thinking-visible")],
)
def test_results_of_calls(dialect: Dialect, kind: str) -> None:
    talk = Talk(f"{THOUGHT}</think>Let me see.{CALL}", "y</think>It is blue.", dialect=dialect, tools=True)
    history = tool_turn(talk)
    held = talk.engine.sessions[0].n_tokens
    job = talk.ask(*history)
    assert talk.reuse(job)[0] == kind
    live = talk.live()
    assert f"<think>{THOUGHT}</think>Let me see.{CALL}<｜end▁of▁sentence｜><｜User｜>" in live
    assert job.prompt[:held].tolist() == talk.engine.sessions[0].tokens[:held].tolist()
    assert talk.driver.text(job) == "It is blue."


@pytest.mark.parametrize("dialect", ["messages", "chat"])
def test_the_name_on_disk_is_the_whole_text_until_a_client_leaves_reasoning_out(dialect: Dialect) -> None:
    talk = Talk(f"{THOUGHT}</think>Let me see.{CALL}", "y</think>It is blue.", dialect=dialect, tools=True)
    history = tool_turn(talk)
    slot = talk.driver.scheduler.slots[0]
    assert slot.visible is not None and slot.visible.sent
    talk.ask(*history)
    assert slot.visible is not None and not slot.visible.sent


@pytest.mark.parametrize("dialect", ["responses", "messages", "chat"])
def test_reasoning_that_is_sent_back_is_found_exactly(dialect: Dialect) -> None:
    talk = Talk(f"{THOUGHT}</think>Let me see.{CALL}", "y</think>It is blue.", dialect=dialect, tools=True)
    user, turn, result = tool_turn(talk)
    held = talk.engine.sessions[0].n_tokens
    job = talk.ask(user, replace(turn, reasoning=THOUGHT), result)
    kind, cached = talk.reuse(job)
    assert kind == "memory-token"
    assert cached == held


def test_another_call_is_not_the_live_one() -> None:
    talk = Talk(f"{THOUGHT}</think>Let me see.{CALL}", "y</think>It is blue.", dialect="responses", tools=True)
    user, turn, result = tool_turn(talk)
    other = CALL.replace("the sea", "the sky").encode()
    job = talk.ask(user, replace(turn, calls=(replace(turn.calls[0], raw=other),)), result)
    assert talk.reuse(job)[0] == "memory-rewind"


@pytest.mark.parametrize("seed", range(5))
def test_the_key_is_a_prefix_of_what_the_next_request_renders(seed: int) -> None:
    """For random conversations: of the next request's key, and up to exactly the end of the answer."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = ScriptedEngine(syntax="deepseek4")
    preparer = Preparer(engine, 1000)
    for _ in range(40):
        tools = (TOOL,) if rng.random() < 0.5 else ()
        messages = [Message("system", "Be kind.")] if rng.random() < 0.5 else []
        for _ in range(rng.randrange(3)):
            messages += [Message("user", f"u{rng.random()}"), Message("assistant", f"a{rng.random()}", reasoning="r")]
        messages.append(Message("user", "q"))
        answer = Message("assistant", rng.choice(["yes", "no\n", "", " 漢字 "]))
        if tools and rng.random() < 0.5:
            answer = replace(answer, calls=(ToolCall("c", "look", '{"at":"x"}', CALL.encode()),))
        conversation = Conversation(tuple(messages), tools, rng.choice(["high", "none"]))
        key = visible_key(preparer.renderer, engine.tokenizer, conversation, answer)
        assert key is not None
        after = Message("tool", "t", call_id="c") if answer.calls else Message("user", "more")
        grown = preparer.renderer.render(replace(conversation, messages=(*messages, answer, after)))
        whole = engine.tokenizer.key_bytes(grown.segments)
        assert whole.startswith(key)
        end = engine.tokenizer.special_ids["<｜end▁of▁sentence｜>"]
        assert whole[len(key) :].startswith(b"\xff" + end.to_bytes(4, "little"))
        text = b"".join(engine.tokenizer.token_bytes(t) for t in tokens_of_key(engine.tokenizer, key) or [])
        assert text.endswith((CALL if answer.calls else answer.content).encode())


def test_tokens_that_imitate_a_prompt_are_not_found_by_their_text() -> None:
    """A prompt of raw token ids whose bytes are those of a key with special tokens."""
    talk = Talk(f"{THOUGHT}</think>Good day.")
    prompt = asyncio.run(talk.preparer.prompt(Conversation((USER,))))
    imitation = talk.preparer.token_prompt(list(prompt.key))
    assert talk.engine.tokenizer.key_bytes_of_ids(imitation.tokens) == prompt.key
    assert imitation.key == b""
    request = talk.preparer.request(
        "id", "completions", "m", imitation, None, SamplingParams(temperature=0), Limits(), param=None
    )
    talk.driver.scheduler.submit(request)
    talk.driver.run()
    slot = talk.driver.scheduler.slots[0]
    assert slot.text is None and slot.asked is None
    assert talk.reuse(talk.ask(USER)) == ("none", 0)
