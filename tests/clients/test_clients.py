"""Real clients, each in its own folders, against a server whose model follows a script.

The script thinks, lists the directory with the client's own tool, thinks, writes `hello.txt`, and answers. The clients
are pinned in versions.sh and installed on first use (`make test-clients`, docs/clients.md).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ds4.engine.types import EngineConfig
from ds4.prompt.types import Special
from ds4.server.config import ServerConfig
from ds4.testing import ScriptedEngine
from tests.support.running_server import RunningServer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
SKIPPED = 77
CLIENT_SECONDS = 600
"""The first run of a client installs it."""
KEY = "a-local-key"
MODEL = "ds4-scripted"
PROMPT = "List the files in this directory, then create hello.txt containing hi."
SEEN = "ferry-timetable.txt"
"""A file that only the result of the first call can have told the model of."""
THOUGHTS = ("The directory first of all.", "Nothing of that name yet.", "Both steps are done.")
ANSWER = "The file hello.txt is there now."
EDIT = f"{ANSWER}\n\nhello.txt\n```\n<<<<<<< SEARCH\n=======\nhi\n>>>>>>> REPLACE\n```\n"

Call = tuple[str, dict[str, str]]
"""A tool's name and its arguments, all of them strings."""


@dataclass(frozen=True)
class Client:
    """`calls` gives the two tool calls for a working directory; None: no tools, the answer itself is the edit.

    `loops` is how many conversations one run has. `shows_thinking` False: the client has no way to print it.
    `overflow` is what it says, with a failing exit status, when the context is too small; None: it does not fail.
    """

    name: str
    calls: Callable[[Path], tuple[Call, Call]] | None
    loops: int = 1
    shows_thinking: bool = True
    overflow: str | None = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return "-".join([self.name, *self.env.values()])


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


CLIENTS = [
    Client("codex", codex, overflow="context window"),
    Client("claude", claude, overflow="Prompt is too long"),
    Client("opencode", opencode),
    *(
        Client("pi", pi, env={"PI_API": api})
        for api in ("openai-completions", "openai-responses", "anthropic-messages")
    ),
    Client("llm", functions, shows_thinking=False, overflow="maximum context length"),
    Client("aider", None),
    Client("sdk_python", functions, loops=3, overflow="(?s)chat refused.*responses refused.*messages refused"),
    Client("sdk_node", functions, loops=4, overflow="(?s)chat refused.*responses refused.*messages.*vercel refused"),
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


def say(client: Client, folder: Path) -> Callable[[str], list[str]]:
    """The model: what it says depends on how many results follow the prompt, and on whether it is to think."""
    calls = [call_text(call) for call in client.calls(folder)] if client.calls else []

    def script(prompt: str) -> list[str]:
        if calls and "｜DSML｜" not in prompt:
            turn, said = 0, "A title"
        else:
            turn = prompt.rpartition(PROMPT)[2].count("<tool_result>")
            said = [*calls, ANSWER if calls else EDIT][turn]
        return pieces(f"{THOUGHTS[turn]}</think>{said}" if prompt.endswith("<think>") else said)

    return script


@dataclass
class Desk:
    """One client's server, folders and way of running."""

    client: Client
    engine: ScriptedEngine
    server: RunningServer
    work: Path
    home: Path

    def run(self, prompt: str) -> tuple[int, str]:
        """The client's exit status and what it printed; skips the test when the machine lacks what it needs."""
        paths = {"WORKDIR": str(self.work), "RUN_HOME": str(self.home), "PYTHON": sys.executable}
        server = {"BASE_URL": self.server.url, "MODEL": MODEL, "API_KEY": KEY}
        done = subprocess.run(
            [HERE / f"{self.client.name}.sh", prompt],
            env={**os.environ, **paths, **server, **self.client.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=CLIENT_SECONDS,
        )
        if done.returncode == SKIPPED:
            pytest.skip(f"{self.client.name}: {done.stdout.strip().splitlines()[-1]}")
        print(done.stdout[-6000:])
        return done.returncode, " ".join(done.stdout.split())


Open = Callable[..., Desk]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Open]:
    running: list[RunningServer] = []

    def make(client: Client, ctx: int = 400_000) -> Desk:
        work, home = tmp_path / "work", tmp_path / "home"
        work.mkdir()
        home.mkdir()
        (work / SEEN).write_text("8:15\n")
        engine = ScriptedEngine(say(client, work), syntax="deepseek4", ctx=ctx, model_id=MODEL)
        engine.tokenizer.encode_segments([Special("</think>"), Special("｜DSML｜")])
        config = ServerConfig(engine=EngineConfig(ctx=ctx, slots=2), port=0, api_keys=(KEY,), drain_seconds=2.0)
        running.append(RunningServer(engine, config))
        return Desk(client, engine, running[-1], work, home)

    yield make
    for server in running:
        server.stop()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: c.id)
def test_a_client_works(client: Client, desk: Open) -> None:
    at = desk(client)
    status, shown = at.run(PROMPT)
    assert status == 0
    assert (at.work / "hello.txt").read_text().strip() == "hi"
    assert shown.count(ANSWER) >= client.loops
    if client.shows_thinking:
        for thought in THOUGHTS if client.calls else THOUGHTS[:1]:
            assert shown.count(thought) >= client.loops, thought
    if client.calls:
        last = [p for p in at.engine.prompts if p.rpartition(PROMPT)[2].count("<tool_result>") == 2]
        assert len(last) == client.loops
        for prompt in last:
            results = re.findall("<tool_result>(.*?)</tool_result>", prompt.rpartition(PROMPT)[2], re.DOTALL)
            assert SEEN in results[0]


@pytest.mark.parametrize("client", [c for c in CLIENTS if c.overflow], ids=lambda c: c.id)
def test_a_client_knows_a_full_context(client: Client, desk: Open) -> None:
    at = desk(client, ctx=2048)
    status, shown = at.run("Read this. " * 400)
    assert status != 0
    assert re.search(client.overflow or "", shown), client.overflow
    assert not at.engine.prompts
