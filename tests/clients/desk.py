"""The clients, and what it takes to run one of them against a server whose model follows a script.

The model thinks, lists the directory with the client's own tool, thinks, writes `hello.txt`, and answers. Asked to
`COUNT`, it does not end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ds4.engine.types import EngineConfig
from ds4.prompt.types import Special
from ds4.server.config import ServerConfig
from ds4.testing import Script, ScriptedEngine
from tests.support.running_server import RunningServer

HERE = Path(__file__).parent
SKIPPED = 77
CLIENT_SECONDS = 300
"""The first run of a client installs it."""
KEY = "a-local-key"
MODEL = "ds4-scripted"
PROMPT = "List the files in this directory, then create hello.txt containing hi."
COUNT = "Count up and do not stop before I say so."
SEEN = "ferry-timetable.txt"
"""A file that only the result of the first call can have told the model of."""
THOUGHTS = ("The directory first of all.", "Nothing of that name yet.", "Both steps are done.")
ANSWER = "The file hello.txt is there now."
EDIT = f"{ANSWER}\n\nhello.txt\n```\n<<<<<<< SEARCH\n=======\nhi\n>>>>>>> REPLACE\n```\n"
LONG = 30_000
"""Tokens that nobody waits for."""
COUNTED = 20
"""Tokens after which a client that waits for the end of `COUNT` is interrupted."""

Call = tuple[str, dict[str, str]]
"""A tool's name and its arguments, all of them strings."""


@dataclass(frozen=True)
class Overflow:
    """How a client shows that it knows what a full context is: its exit status, and what it prints (a regex).

    `ctx` is the server's and `long` the characters of the prompt that is too long for it. With `env` there may be more
    to it: a client that shortens its history by itself needs something that can be shortened.
    """

    says: str
    fails: bool = True
    ctx: int = 2048
    long: int = 6_000
    recovers: bool = False
    env: dict[str, str] = field(default_factory=dict)


def long_text(characters: int) -> str:
    return "Read this. " * (characters // 11)


@dataclass(frozen=True)
class Client:
    """`calls` gives the two tool calls for a working directory; None: no tools, the answer itself is the edit.

    `loops` is how many conversations one run has: more than one are a script around SDKs, which cancels its streams
    itself. `thinking` is how many of them show it.
    """

    name: str
    calls: Callable[[Path], tuple[Call, Call]] | None
    overflow: Overflow
    loops: int = 1
    thinking: int = 1
    env: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return "-".join([self.name, *(v for v in self.env.values() if "/" not in v)])

    @property
    def is_sdk(self) -> bool:
        return self.name.startswith("sdk_")


def shell(tool: str, argument: str, **more: str) -> Call:
    return tool, {argument: "ls", **more}


def functions(folder: Path) -> tuple[Call, Call]:
    return ("list_dir", {"path": "."}), ("write_file", {"path": "hello.txt", "content": "hi"})


def codex(folder: Path) -> tuple[Call, Call]:
    return shell("exec_command", "cmd"), ("exec_command", {"cmd": "printf hi > hello.txt"})


def claude(folder: Path) -> tuple[Call, Call]:
    write = {"file_path": str(folder / "hello.txt"), "content": "hi"}
    return shell("Bash", "command", description="Lists the files"), ("Write", write)


def opencode(folder: Path) -> tuple[Call, Call]:
    write = {"filePath": str(folder / "hello.txt"), "content": "hi"}
    return shell("bash", "command", description="Lists the files"), ("write", write)


def pi(folder: Path) -> tuple[Call, Call]:
    return shell("bash", "command"), ("write", {"path": "hello.txt", "content": "hi"})


def refusals(*dialects: str) -> Overflow:
    return Overflow("(?s)" + ".*".join(f"{dialect} refused" for dialect in dialects))


SDK_PYTHON = Client("sdk_python", functions, refusals("chat", "responses", "messages"), loops=3, thinking=3)
LANGCHAIN = replace(SDK_PYTHON, name="sdk_langchain", thinking=2)
"""Its Chat Completions drop the reasoning."""

COMPACTED = Overflow(
    f"context size is 60000 tokens.*conversation was compacted.*{ANSWER}", ctx=60_000, long=38_000, recovers=True
)
"""OpenCode: too long with its tools, but not for the summary, which has none. It goes on, and fails all the same."""

SUMMARISED = Overflow(
    f'"compaction_start","reason":"overflow".*{ANSWER}',
    fails=False,
    ctx=40_000,
    long=22_000,
    recovers=True,
    env={"KEEP_RECENT": "1000", "THEN": long_text(22_000) + PROMPT},
)
"""Pi: the second of two prompts is too long until the first is summarised."""

CLIENTS = [
    Client("codex", codex, Overflow("context window")),
    Client("claude", claude, Overflow("Prompt is too long")),
    Client("opencode", opencode, COMPACTED),
    *(
        Client("pi", pi, SUMMARISED, env={"PI_API": api})
        for api in ("openai-completions", "openai-responses", "anthropic-messages")
    ),
    Client("llm", functions, Overflow("maximum context length"), thinking=0),
    Client("aider", None, Overflow("has hit a token limit", fails=False)),
    SDK_PYTHON,
    LANGCHAIN,
    Client("sdk_node", functions, refusals("chat", "responses", "messages", "vercel"), loops=4, thinking=4),
]


def call_text(call: Call) -> str:
    """A call as DeepSeek V4 writes it (docs/parsing.md)."""
    name, arguments = call
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n'
        for key, value in arguments.items()
    )
    invoke = f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'
    return f"\n\n<｜DSML｜tool_calls>\n{invoke}</｜DSML｜tool_calls>"


def pieces(text: str) -> list[str]:
    """Tokens: the special ones of the family, and words."""
    return re.findall(r"</think>|｜DSML｜|\s*[^\s<｜]+|.", text, re.DOTALL)


def say(client: Client, folder: Path) -> Callable[[str], Script]:
    """The model: what it says depends on how many results follow the prompt, and on whether it is to think."""
    calls = [call_text(call) for call in client.calls(folder)] if client.calls else []

    def script(prompt: str) -> Script:
        thinks = prompt.endswith("<think>")
        if calls and "｜DSML｜" not in prompt:
            turn, said = 0, "A title"
        elif COUNT in prompt:
            return Script.of([f" {n}" for n in range(LONG)]).slow(0.02)
        else:
            turn = prompt.rpartition(PROMPT)[2].count("<tool_result>")
            said = [*calls, ANSWER if calls else EDIT][turn]
        return Script.of(pieces(f"{THOUGHTS[turn]}</think>{said}" if thinks else said))

    return script


@dataclass
class Desk:
    """One client's server (`url`) and folders, and ways to run it. `env` is more of the environment of its script."""

    client: Client
    url: str
    work: Path
    home: Path
    env: dict[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, folder: Path, client: Client, url: str, **env: str) -> Desk:
        work, home = folder / "work", folder / "home"
        work.mkdir()
        home.mkdir()
        (work / SEEN).write_text("8:15\n")
        return cls(client, url, work, home, env)

    def start(self, prompt: str, turn: str) -> subprocess.Popen[str]:
        """The client as the leader of a process group of its own; what it prints goes to `shown`."""
        paths = {"WORKDIR": str(self.work), "RUN_HOME": str(self.home), "PYTHON": sys.executable}
        server = {"BASE_URL": self.url, "MODEL": MODEL, "API_KEY": KEY, "TURN": turn, "COUNT": COUNT}
        with self.log.open("w") as log:
            return subprocess.Popen(
                [HERE / f"{self.client.name}.sh", prompt],
                env={**os.environ, **paths, **server, **self.client.env, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                # A test run in the background may have been told to ignore interrupts, which would be inherited.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def log(self) -> Path:
        return self.home.parent / "shown.txt"

    def shown(self) -> str:
        """What the client has printed, with its white space evened out."""
        return " ".join(self.log.read_text(errors="replace").split())

    def ended(self, process: subprocess.Popen[str], seconds: float = CLIENT_SECONDS) -> int:
        """The exit status; skips the test when the machine lacks what the client needs."""
        try:
            status = process.wait(seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = self.log.read_text(errors="replace")
        if status == SKIPPED:
            pytest.skip(f"{self.client.name}: {text.strip().splitlines()[-1]}")
        print(text[-6000:])
        return status

    def run(self, prompt: str, turn: str = "tools") -> tuple[int, str]:
        """The client's exit status and what it printed."""
        status = self.ended(self.start(prompt, turn))
        return status, self.shown()


class Room:
    """Servers with a scripted model, and the desks at them; `close` stops the servers."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.env = env
        self.servers: list[RunningServer] = []

    def desk(self, client: Client, ctx: int = 400_000) -> tuple[Desk, RunningServer]:
        folder = self.folder / f"{len(self.servers)}"
        folder.mkdir()
        engine = ScriptedEngine(say(client, folder / "work"), syntax="deepseek4", ctx=ctx, model_id=MODEL)
        engine.tokenizer.encode_segments([Special("</think>"), Special("｜DSML｜")])
        config = ServerConfig(engine=EngineConfig(ctx=ctx, slots=2), port=0, api_keys=(KEY,), drain_seconds=2.0)
        server = RunningServer(engine, config)
        self.servers.append(server)
        return Desk.at(folder, client, server.url, **self.env), server

    def close(self) -> None:
        for server in self.servers:
            server.stop()


# ---- what every client does -------------------------------------------------------------------------------------


def check_tool_loop(room: Room, client: Client) -> None:
    """Two tools, the thinking of three turns, and an answer."""
    at, server = room.desk(client)
    check_loop(at, server, *at.run(PROMPT))


def check_loop(at: Desk, server: RunningServer, status: int, shown: str) -> None:
    client = at.client
    assert status == 0
    assert (at.work / "hello.txt").read_text().strip() == "hi"
    assert shown.count(ANSWER) >= client.loops
    for thought in THOUGHTS if client.calls else THOUGHTS[:1]:
        assert shown.count(thought) >= client.thinking, thought
    if client.calls:
        last = [p for p in server.engine.prompts if p.rpartition(PROMPT)[2].count("<tool_result>") == 2]
        assert len(last) == client.loops
        for prompt in last:
            results = re.findall("<tool_result>(.*?)</tool_result>", prompt.rpartition(PROMPT)[2], re.DOTALL)
            assert SEEN in results[0]


def check_cancel(room: Room, client: Client) -> None:
    """A turn that is broken off ends on the server at once, and the same client then has a whole tool loop."""
    at, server = room.desk(client)
    if client.is_sdk:
        done = at.run(PROMPT, "cancel")
        assert done[1].count("cancelled") == client.loops
    else:
        process = at.start(COUNT, "cancel")
        wait_for_counting(server, at, process)
        interrupt(at, process)
        idle(server)
        done = at.run(PROMPT)
    check_loop(at, server, *done)
    idle(server)
    metrics = server.http.get("/metrics", headers={"x-api-key": KEY}).text
    cancelled = re.findall(r'^ds4_generations_total\{.*finish="cancelled"\} (\S+)', metrics, re.MULTILINE)
    assert sum(float(count) for count in cancelled) == client.loops, metrics


def wait_for_counting(server: RunningServer, at: Desk, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + CLIENT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for sampler in server.engine.samplers:
            if sampler.script and len(sampler.script.pieces) == LONG and sampler.drawn >= COUNTED:
                return
        time.sleep(0.02)
    at.ended(process, 0)
    raise AssertionError("the client ended before the answer")


def interrupt(at: Desk, process: subprocess.Popen[str]) -> None:
    """Ctrl-C, and once more for a client that asks for it."""
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue
        break
    at.ended(process, 1)


def idle(server: RunningServer, seconds: float = 20.0) -> None:
    """Waits until no session generates and nobody waits."""
    deadline = time.monotonic() + seconds
    phases: list[str] = []
    while time.monotonic() < deadline:
        states = server.http.get("/slots", headers={"x-api-key": KEY}).json()
        phases = [state["phase"] for state in states]
        if set(phases) == {"idle"}:
            return
        time.sleep(0.02)
    raise AssertionError(f"still busy: {phases}")


def check_overflow(room: Room, client: Client) -> None:
    """The client knows that the context is too small, by what the server says."""
    full = client.overflow
    at, server = room.desk(client, ctx=full.ctx)
    at.env |= full.env
    status, shown = at.run(long_text(full.long))
    assert (status != 0) is full.fails
    assert re.search(full.says, shown), full.says
    if not full.recovers:
        assert not server.engine.prompts
