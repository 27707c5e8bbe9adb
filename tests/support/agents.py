"""Clients as agents are, one class a dialect, and what they do: traces through a whole server, and what they must cost.

`ideal` is what no server can avoid: of each prompt, what is neither the beginning of a prompt before it nor the answer
that it continues. `evaluated` is prompt tokens less cached ones, as the usage says.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ds4.engine.types import EngineConfig, EngineLike
from ds4.prompt.types import Conversation, Special
from ds4.server.config import ServerConfig
from ds4.server.kvpolicy import KvConfig
from ds4.testing import ScriptedEngine
from tests.support.running_server import RunningServer

LIVE, RESTARTED = 1.05, 1.15
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "string"}}}


class Say:
    """The scripted model: thinks, answers in words that nobody said before, and calls as often as it was told."""

    def __init__(self, sentences: int = 6) -> None:
        self._sentences = sentences
        self._count = 0

    def __call__(self, prompt: str) -> list[str]:
        self._count += 1
        n = self._count
        found = re.findall(r"<calls:(\d)>", prompt.rpartition("<｜Assistant｜>")[0][-400:])
        text = (
            f"Let me think about number {n}, " * 4
            + f"</think>This is answer {n}. "
            + f"It has words {n}. " * self._sentences
        )
        calls = "".join(
            f'<｜DSML｜invoke name="read">\n'
            f'<｜DSML｜parameter name="path" string="true">/src/{n}/{i}</｜DSML｜parameter>\n'
            f'<｜DSML｜parameter name="lines" string="true">1-{n}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            for i in range(int(found[-1]) if found else 0)
        )
        if calls:
            text += f"\n\n<｜DSML｜tool_calls>\n{calls}</｜DSML｜tool_calls>"
        return re.findall("</think>|｜DSML｜|.", text, re.DOTALL)


class Counter:
    """Knows every prompt of a run and how much of it had to be evaluated."""

    def __init__(self) -> None:
        self.ideal = self.evaluated = self.sent = self.requests = 0
        self._prompts: list[str] = []

    def add(self, prompt: str, answer_end: str, count: Callable[[str], int], tokens: int, cached: int) -> None:
        """`answer_end` ends the answer that the prompt continues, "": it continues none."""
        known = max((_common(prompt, other) for other in self._prompts), default=0)
        if answer_end:
            at = prompt.rfind(answer_end)
            known = max(known, at + len(answer_end) if at >= 0 else 0)
        self._prompts.append(prompt)
        self.ideal += max(1, count(prompt[known:]))
        self.evaluated += tokens - cached
        self.sent += tokens
        self.requests += 1

    @property
    def ratio(self) -> float:
        return self.evaluated / max(1, self.ideal)


def _common(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


class Talk:
    """One conversation as a client of some dialect keeps it: `items` is what it sends."""

    def __init__(self, client: Client, system: str, user: str, tools: bool) -> None:
        self.client = client
        self.system = system
        self.tools = tools
        self.items: list[Any] = [client.user(user)]
        self.calls: list[str] = []
        self.answer_end = ""

    def ask(self) -> None:
        self.client.ask(self)

    def user(self, text: str) -> None:
        self.items.append(self.client.user(text))
        self.ask()

    def results(self, texts: Sequence[str]) -> None:
        self.items += self.client.results(self.calls, texts)
        self.ask()

    def again(self, turns: int = 1) -> None:
        """Drops the last answer (with `turns` more: what led to it) and asks for another one."""
        kept = self.client.before_answer(self.items, turns)
        self.items = self.items[:kept]
        self.answer_end = ""
        self.ask()

    def edit(self, text: str) -> None:
        """Another wording of the user's last turn but one, and everything behind it gone."""
        users = [i for i, item in enumerate(self.items) if item.get("role") == "user" and item.get("plain", True)]
        at = [i for i in users if self.client.is_user(self.items[i])][-2]
        self.items = [*self.items[:at], self.client.user(text)]
        self.answer_end = ""
        self.ask()


class Client:
    """A client of one dialect. `reorder`: it writes the arguments of calls anew; `drops`: it keeps no reasoning."""

    path = ""

    def __init__(self, *, reorder: bool = False, drops: bool = False) -> None:
        self.reorder, self.drops = reorder, drops
        self.server: Any = None
        self.counter = Counter()

    def start(self, system: str, user: str, *, tools: bool = True) -> Talk:
        talk = Talk(self, system, user, tools)
        talk.ask()
        return talk

    def ask(self, talk: Talk) -> None:
        answer = self.server.post(self.path, self.body(talk))
        prompt, tokens, cached = self.server.last_prompt(talk, self), *self.usage(answer)
        self.counter.add(prompt, talk.answer_end, self.server.count, tokens, cached)
        talk.items += self.turn(answer, talk)

    def user(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def is_user(self, item: dict[str, Any]) -> bool:
        return item.get("role") == "user" and isinstance(item.get("content"), str)

    def before_answer(self, items: list[Any], turns: int) -> int:
        """Where the last answer begins, less `turns` - 1 earlier ones."""
        at = len(items)
        for _ in range(turns):
            while at and not self.is_user(items[at - 1]) and items[at - 1].get("role") != "tool":
                at -= 1
        return at

    def rewritten(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return dict(reversed(arguments.items())) if self.reorder else arguments

    def body(self, talk: Talk) -> dict[str, Any]:
        raise RuntimeError("a dialect says how it asks")

    def results(self, calls: Sequence[str], texts: Sequence[str]) -> list[Any]:
        raise RuntimeError("a dialect says how it answers calls")

    def usage(self, answer: Any) -> tuple[int, int]:
        raise RuntimeError("a dialect says what it counts")

    def turn(self, answer: Any, talk: Talk) -> list[Any]:
        raise RuntimeError("a dialect says how a turn comes back")


def _end(text: str, calls: Sequence[Any]) -> str:
    return "</｜DSML｜tool_calls>" if calls else text[-30:]


class Chat(Client):
    path = "/v1/chat/completions"

    def body(self, talk: Talk) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
        messages = [{"role": "system", "content": talk.system}, *talk.items]
        body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": self.server.max_tokens}
        return {**body, "tools": [tool]} if talk.tools else body

    def results(self, calls: Sequence[str], texts: Sequence[str]) -> list[Any]:
        return [
            {"role": "tool", "tool_call_id": call, "content": text} for call, text in zip(calls, texts, strict=True)
        ]

    def usage(self, answer: Any) -> tuple[int, int]:
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def turn(self, answer: Any, talk: Talk) -> list[Any]:
        message = answer["choices"][0]["message"]
        if self.drops:
            message.pop("reasoning_content", None)
        calls = message.get("tool_calls") or []
        for call in calls:
            arguments = self.rewritten(json.loads(call["function"]["arguments"]))
            call["function"]["arguments"] = json.dumps(arguments) if self.reorder else call["function"]["arguments"]
        talk.calls = [call["id"] for call in calls]
        talk.answer_end = _end(message["content"] or "", calls)
        return [message]


class Responses(Client):
    path = "/v1/responses"

    def body(self, talk: Talk) -> dict[str, Any]:
        tool = {"type": "function", "name": "read", "parameters": PARAMETERS}
        body = {"model": "m", "instructions": talk.system, "input": talk.items, "temperature": 0}
        return {**body, "tools": [tool]} if talk.tools else body

    def results(self, calls: Sequence[str], texts: Sequence[str]) -> list[Any]:
        return [
            {"type": "function_call_output", "call_id": call, "output": text, "role": "tool"}
            for call, text in zip(calls, texts, strict=True)
        ]

    def usage(self, answer: Any) -> tuple[int, int]:
        usage = answer["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]

    def turn(self, answer: Any, talk: Talk) -> list[Any]:
        items = [item for item in answer["output"] if not (self.drops and item["type"] == "reasoning")]
        calls = [item for item in items if item["type"] == "function_call"]
        for call in calls:
            arguments = self.rewritten(json.loads(call["arguments"]))
            call["arguments"] = json.dumps(arguments) if self.reorder else call["arguments"]
        text = "".join(p["text"] for item in items if item["type"] == "message" for p in item["content"])
        talk.calls = [call["call_id"] for call in calls]
        talk.answer_end = _end(text, calls)
        return items


class Messages(Client):
    path = "/v1/messages"

    def body(self, talk: Talk) -> dict[str, Any]:
        tool = {"name": "read", "input_schema": PARAMETERS}
        body = {"model": "m", "system": talk.system, "messages": talk.items, "temperature": 0, "max_tokens": 1000}
        return {**body, "tools": [tool]} if talk.tools else body

    def results(self, calls: Sequence[str], texts: Sequence[str]) -> list[Any]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call, "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]
        return [{"role": "user", "content": blocks}]

    def usage(self, answer: Any) -> tuple[int, int]:
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached

    def turn(self, answer: Any, talk: Talk) -> list[Any]:
        blocks = [block for block in answer["content"] if not (self.drops and block["type"] == "thinking")]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        for call in calls:
            call["input"] = self.rewritten(call["input"])
        talk.calls = [call["id"] for call in calls]
        talk.answer_end = _end("".join(block["text"] for block in blocks if block["type"] == "text"), calls)
        return [{"role": "assistant", "content": blocks}]

    def before_answer(self, items: list[Any], turns: int) -> int:
        at = len(items)
        for _ in range(turns):
            while at and items[at - 1]["role"] == "assistant":
                at -= 1
        return at


DIALECTS: dict[str, type[Client]] = {"chat": Chat, "responses": Responses, "messages": Messages}


# ---- servers


class Ours:
    """This server around an engine, with a disk cache; can be stopped and started again."""

    def __init__(
        self, engine: Callable[[], EngineLike], directory: Path | None, slots: int, max_tokens: int = 1000
    ) -> None:
        self._engine, self._directory, self._slots = engine, directory, slots
        self.max_tokens = max_tokens
        self.tiers: dict[str, int] = {}
        """How many prompts each tier served, once the server has stopped."""
        self._prompts: list[str] = []
        self.start()

    def start(self) -> None:
        engine = self._engine()
        kv = None if self._directory is None else KvConfig(self._directory, boundary_align=0)
        config = ServerConfig(
            engine=EngineConfig(ctx=engine.config.ctx, slots=self._slots, prefill_chunk=512), port=0, kv=kv
        )
        self._server = RunningServer(engine, config)
        service = self._server.app._service
        self._tokenizer = engine.tokenizer
        render = service.prompt

        async def watched(conversation: Conversation) -> Any:
            prompt = await render(conversation)
            self._prompts.append(prompt.rendered.text)
            return prompt

        service.prompt = watched  # type: ignore[method-assign]

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self._server.stop()
        for tier, count in self._server.app._service.metrics.reuse.items():
            self.tiers[tier] = self.tiers.get(tier, 0) + count

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._server.http.post(path, json=body, timeout=600)
        if answer.status_code != 200:
            raise RuntimeError(answer.text)
        store = self._server.app._store
        if store is not None:
            store.flush()
        return answer.json()

    def last_prompt(self, talk: Talk, client: Client) -> str:
        return self._prompts[-1]

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode_with_specials(text))


# ---- traces


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(1000)}" for _ in range(count))


def agents(client: Client, rng: random.Random, system: str) -> None:
    """A main agent and three sub-agents with one system prompt, tools in each."""
    main = client.start(system, words(rng, 60) + " <calls:1>")
    for _ in range(3):
        sub = client.start(system, words(rng, 40) + " <calls:1>")
        sub.results([words(rng, 50) + " <calls:1>"])
        sub.results([words(rng, 50)])
        main.results([words(rng, 30) + " <calls:1>"])
    main.results([words(rng, 30)])


def parallel_results(client: Client, rng: random.Random, system: str) -> None:
    talk = client.start(system, words(rng, 40) + " <calls:3>")
    for _ in range(5):
        talk.results([words(rng, 40), words(rng, 40), words(rng, 40) + " <calls:3>"])
    talk.results([words(rng, 40)] * 3)
    talk.user(words(rng, 30))


def regenerate(client: Client, rng: random.Random, system: str) -> None:
    talk = client.start(system, words(rng, 60), tools=False)
    for _ in range(3):
        talk.again()
        talk.user(words(rng, 40))


def edit(client: Client, rng: random.Random, system: str) -> None:
    talk = client.start(system, words(rng, 60), tools=False)
    talk.user(words(rng, 50))
    talk.user(words(rng, 50))
    talk.edit(words(rng, 50))
    talk.user(words(rng, 50))


def compaction(client: Client, rng: random.Random, system: str) -> None:
    """The history is replaced by a summary of it; the system prompt stays."""
    talk = client.start(system, words(rng, 60), tools=False)
    for _ in range(3):
        talk.user(words(rng, 60))
    compacted = client.start(system, "Summary: " + words(rng, 80), tools=False)
    compacted.user(words(rng, 40))


def plain_agents(client: Client, rng: random.Random, system: str) -> None:
    """As `agents`, without tools."""
    main = client.start(system, words(rng, 60), tools=False)
    for _ in range(3):
        sub = client.start(system, words(rng, 40), tools=False)
        sub.user(words(rng, 30))
        main.user(words(rng, 30))


def more_than_sessions(client: Client, rng: random.Random, system: str) -> None:
    """Seven conversations take turns in four sessions: three are always on disk."""
    talks = [client.start(system, words(rng, 150), tools=False) for _ in range(7)]
    for _ in range(3):
        for talk in talks:
            talk.user(words(rng, 40))


def restart(client: Client, rng: random.Random, system: str) -> None:
    talks = [client.start(system, words(rng, 60) + " <calls:1>") for _ in range(2)]
    for talk in talks:
        talk.results([words(rng, 50)])
    client.server.restart()
    for talk in talks:
        talk.user(words(rng, 50) + " <calls:2>")
        talk.results([words(rng, 40)] * 2)


Trace = Callable[[Client, random.Random, str], None]
TRACES: dict[str, tuple[Trace, dict[str, bool], float]] = {
    "main agent, 3 sub-agents": (agents, {}, LIVE),
    "tool loop, parallel results": (parallel_results, {}, LIVE),
    "JSON keys in another order": (parallel_results, {"reorder": True}, LIVE),
    "thinking dropped, tools": (parallel_results, {"drops": True}, LIVE),
    "thinking dropped, no tools": (compaction, {"drops": True}, LIVE),
    "regenerate": (regenerate, {}, LIVE),
    "edit of an earlier turn": (edit, {}, LIVE),
    "compaction": (compaction, {}, LIVE),
    "7 conversations, 4 sessions": (more_than_sessions, {}, LIVE),
    "restart in the middle": (restart, {}, RESTARTED),
}


def scripted(**fields: Any) -> ScriptedEngine:
    """The model; `fields` say how its sessions are."""
    engine = ScriptedEngine(Say(), syntax="deepseek4", ctx=1 << 17, slots=4, **fields)
    engine.tokenizer.encode_segments([Special("</think>"), Special("｜DSML｜")])
    return engine
