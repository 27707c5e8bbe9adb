"""The `ds4` program: one-shot prompt, REPL, and the tools around model files."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4.cli.flags import (
    DRAFT_FLAGS,
    ENGINE_FLAGS,
    SAMPLING_FLAGS,
    Flag,
    HelpWanted,
    help_text,
    integer,
    nonempty,
    parse_flags,
    path,
)
from ds4.cli.program import run_program, version_line
from ds4.cli.terminal import work_bar
from ds4.engine.types import EngineConfig, SamplingParams
from ds4.errors import ConfigError, ContextLengthError

if TYPE_CHECKING:
    from ds4.prompt.registry import Syntax

PROGRAM = "ds4"
DEFAULT_SYSTEM = "You are a helpful assistant"
"""Where the syntax has no system text of its own."""
TOOLS = ("inspect", "tokenize", "logits", "kv", "convert", "synth")
"""Modules of `ds4.cli`, imported when asked for: what they need costs more than half of a short answer's time."""

FLAGS: tuple[Flag, ...] = (
    Flag(("--prompt", "-p"), "prompt", "one turn, then exit; - reads standard input", "TEXT", topic="prompt"),
    Flag(("--prompt-file",), "prompt_file", "the prompt from a file", "FILE", path, topic="prompt"),
    Flag(("--system", "-sys"), "system", "system text; empty is none", "TEXT", topic="prompt", shown="the model's own"),
    Flag(("--raw-prompt", "--raw"), "raw", "no chat markers: continue the text", default=False, topic="prompt"),
    Flag(("--tokens", "-n"), "max_tokens", "most new tokens of a turn", "N", integer(1), 50_000, topic="prompt"),
    *ENGINE_FLAGS,
    *DRAFT_FLAGS,
    *SAMPLING_FLAGS,
    Flag(
        ("--seed",), "seed", "same seed, same text", "N", integer(0, 2**63 - 1), None, topic="sampling", shown="random"
    ),
    Flag(("--think",), "effort", "reason before answering", stores="high", default="high", topic="thinking"),
    Flag(("--think-max",), "effort", "reason as long as it takes", stores="max", topic="thinking"),
    Flag(("--nothink",), "effort", "answer at once", stores="none", topic="thinking"),
    Flag(
        ("--think-level",),
        "effort",
        "effort of DeepSeek V4.1, 1 to 100; 0 answers at once",
        "N",
        integer(0, 100),
        topic="thinking",
    ),
    Flag(("--backends",), "backends", "list the backends and why one is missing", default=False, topic="diagnostics"),
    Flag(("--version",), "version", "print the version", default=False, topic="diagnostics"),
)

TOPICS = {
    "prompt": "Prompt",
    "runtime": "Model and engine",
    "drafts": "Guessing ahead (speculative decoding)",
    "sampling": "Sampling",
    "thinking": "Thinking",
    "diagnostics": "Diagnostics",
}

INTRO = """\
Talks to a local model: one turn with -p, --prompt-file or text on standard input, else a prompt of its own.
Tools: ds4 inspect | tokenize | logits | convert | synth | kv; each has its --help."""


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Everything that `ds4` takes, parsed once. `prompt` None means the REPL."""

    engine: EngineConfig
    sampling: SamplingParams
    prompt: str | None
    system: str | None
    max_tokens: int
    raw: bool
    effort: str | int
    draft_timing: bool = False


def read_prompt(values: Mapping[str, Any]) -> str | None:
    """The one-shot prompt, or None for the REPL."""
    text, file = values["prompt"], values["prompt_file"]
    if text is not None and file is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other")
    if file is not None:
        try:
            return Path(file).read_text(encoding="utf-8")
        except OSError as e:
            raise ConfigError(f"--prompt-file {file}: {e.strerror}") from None
        except UnicodeDecodeError as e:
            raise ConfigError(f"--prompt-file {file}: not UTF-8 text at byte {e.start}") from None
    if text == "-" or (text is None and not sys.stdin.isatty()):
        return sys.stdin.read()
    return None if text is None else nonempty(str(text))


def chat_config(values: dict[str, Any]) -> ChatConfig:
    engine_fields = {flag.field for flag in (*ENGINE_FLAGS, *DRAFT_FLAGS)} - {"draft_timing", "mtp_exact"}
    sampling_fields = {flag.field for flag in SAMPLING_FLAGS} | {"seed"}
    return ChatConfig(
        engine=EngineConfig(slots=1, **{k: v for k, v in values.items() if k in engine_fields}),
        sampling=SamplingParams(**{k: v for k, v in values.items() if k in sampling_fields}),
        prompt=read_prompt(values),
        system=values["system"],
        max_tokens=values["max_tokens"],
        raw=values["raw"],
        effort=values["effort"],
        draft_timing=values["draft_timing"],
    )


def run_chat(config: ChatConfig) -> int:
    # Imported here: `ds4 --help` and the tools need neither the engine nor a terminal.
    from ds4.cli.chat import Chat
    from ds4.engine.engine import Engine
    from ds4.prompt.registry import syntax_of

    with work_bar("loading weights") as bar:
        engine = Engine.open(config.engine, bar)
    try:
        syntax = syntax_of(engine.info)
        chat = Chat(
            engine=engine,
            renderer=syntax.make(engine.info),
            sampling=config.sampling,
            max_tokens=config.max_tokens,
            system=system_text(config.system, syntax.name),
            effort=effort_for(config.effort, syntax, engine.config.ctx),
            raw=config.raw,
            draft_timing=config.draft_timing,
        )
        if config.prompt is not None:
            return one_shot(chat, config.prompt)
        from ds4.cli.repl import Repl

        return Repl(chat, Path.home() / ".ds4_history").run()
    finally:
        engine.close()


def effort_for(wanted: str | int, syntax: Syntax, n_ctx: int) -> str | int:
    """The effort that the model is told. Raises ConfigError for a level that it was not trained on."""
    if isinstance(wanted, int) and not syntax.levels:
        raise ConfigError("--think-level: this model takes no numeric effort (--think, --think-max, --nothink)")
    if not syntax.thinking:
        return "none"
    if wanted == "max" and n_ctx < syntax.max_effort_context:
        least = syntax.max_effort_context
        print(f"{PROGRAM}: --think-max is served as --think: context {n_ctx} is below {least}", file=sys.stderr)
        return "high"
    return wanted


def system_text(given: str | None, syntax: str) -> str:
    """ChatML models bring a default system text in their template; the others get ours."""
    if given is not None:
        return given
    return "" if syntax == "chatml" else DEFAULT_SYSTEM


def one_shot(chat: Any, prompt: str) -> int:
    """One turn on stdout, its cost on stderr; 130 when it was stopped, 1 when no token could be chosen."""
    from ds4.cli.terminal import Interrupt, TerminalOutput

    out, interrupt = TerminalOutput(), Interrupt()
    out.begin()
    try:
        with interrupt.armed():
            stats = chat.turn(prompt, out, interrupt)
    except ContextLengthError as e:
        raise ConfigError(f"{e}; --ctx sets it") from None
    finally:
        out.end()
    print(f"{PROGRAM}: {stats.line()}", file=sys.stderr)
    return {"cancelled": 130, "error": 1}.get(stats.finish, 0)


def run_tool(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM)
    tool = importlib.import_module(f"ds4.cli.{argv[0]}")
    tool.add_parser(parser.add_subparsers())
    return int(tool.run(parser.parse_args(argv)))


def dispatch(argv: Sequence[str]) -> int:
    if argv and argv[0] in TOOLS:
        return run_tool(argv)
    try:
        values: dict[str, Any] = dict(parse_flags(FLAGS, argv, os.environ))
    except HelpWanted as wanted:
        print(help_text(f"{PROGRAM} [options]", INTRO, FLAGS, TOPICS, wanted.topic), end="")
        return 0
    if values.pop("version"):
        print(version_line(PROGRAM))
        return 0
    if values.pop("backends"):
        from ds4.engine.backends import print_backends

        return print_backends()
    return run_chat(chat_config(values))


def main(argv: Sequence[str] | None = None) -> int:
    return run_program(PROGRAM, lambda: dispatch(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
