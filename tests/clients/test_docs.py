"""The configurations of docs/clients.md work as they stand there, but for the server's address and context.

A section is run in a fresh HOME: a block goes to the file (`~/...`) that the paragraph before it names last; blocks of
`sh`, `python` and `js` are run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4.engine.types import EngineConfig
from ds4.server.config import ServerConfig
from ds4.testing import ScriptedEngine
from tests.clients.desk import Client, Desk, Overflow, pieces
from tests.support.running_server import RunningServer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

DOCS = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
SETUPS = {
    "Codex CLI": "codex",
    "Claude Code": "claude",
    "OpenCode": "opencode",
    "Pi": "pi",
    "Aider": "aider",
    "llm": "llm",
    "Python SDKs": "py",
    "LangChain": "langchain",
    "Node SDKs": "nodesdk",
    "AI SDK": "nodesdk",
}
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", DOCS, re.MULTILINE))
BLOCK = r"((?:.+\n)*)\n*^```(\w+)\n((?:(?!```).*\n)*)^```$"
"""The paragraph before a block, its language, and the block."""
SAID = "Hello from here."


@pytest.fixture
def server() -> Iterator[RunningServer]:
    engine = ScriptedEngine(
        lambda prompt: pieces(f"A greeting.</think>{SAID}" if prompt.endswith("<think>") else SAID),
        syntax="deepseek4",
        ctx=200_000,
    )
    running = RunningServer(engine, ServerConfig(engine=EngineConfig(ctx=200_000, slots=2), port=0))
    yield running
    running.stop()


def test_every_section_is_run() -> None:
    assert set(SECTIONS) == set(SETUPS)


@pytest.mark.parametrize("section", SETUPS)
def test_a_configuration_as_it_stands(section: str, server: RunningServer, tmp_path: Path) -> None:
    at = Desk.at(tmp_path, Client("snippet", None, Overflow("")), server.url, SETUP=SETUPS[section])
    # A scripted model has a token for each byte: agents would never cease to shorten their own instructions.
    text = SECTIONS[section].replace(ADDRESS, server.url).replace("32768", "200000")
    assert server.url in text
    scripts = []
    for before, kind, block in re.findall(BLOCK, text, re.MULTILINE):
        if kind in ("sh", "python", "js"):
            scripts.append((kind, block))
            continue
        path = at.home / re.findall(r"`~/([^`]+)`", before)[-1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block)
    ((kind, script),) = scripts
    at.env["KIND"] = kind
    status, shown = at.run(script)
    assert status == 0
    assert shown.count(SAID) >= max(1, script.count("Say hello.") if kind != "sh" else 1)
    assert server.engine.prompts
