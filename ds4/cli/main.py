"""The `ds4` program: one-shot prompt, REPL, and the tools around model files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4.cli import flags, inspect, logits, tokenize
from ds4.cli.chat import Chat
from ds4.cli.terminal import Interrupt, TerminalOutput
from ds4.engine.types import EngineConfig, SamplingParams
from ds4.errors import ConfigError, ContextLengthError

PROGRAM = "ds4"
DEFAULT_SYSTEM = "You are a helpful assistant"
TOOLS = {"inspect": inspect, "tokenize": tokenize, "logits": logits}


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Everything that `ds4` takes, parsed once. `prompt` None means the REPL."""

    engine: EngineConfig
    sampling: SamplingParams
    prompt: str | None
    system: str
    max_tokens: int
    raw: bool
    effort: str | int


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Talk to a local model. Without -p or --prompt-file it opens a prompt of its own.",
        epilog="Also: ds4 inspect FILE, ds4 tokenize FILE, ds4 logits FILE, ds4 --backends. Each has its --help.",
    )
    p.add_argument("--version", action="version", version=flags.version_line(PROGRAM))
    p.add_argument("--backends", action="store_true", help="list the backends, and why one is missing")
    text = p.add_argument_group("prompt")
    text.add_argument("-p", "--prompt", metavar="TEXT", help="one turn, then exit; - reads standard input")
    text.add_argument("--prompt-file", type=Path, metavar="FILE", help="the prompt from a file")
    text.add_argument(
        "-sys", "--system", metavar="TEXT", default=DEFAULT_SYSTEM, help="default: %(default)r; '' is none"
    )
    text.add_argument("--raw", "--raw-prompt", action="store_true", help="no chat markers: continue the text")
    text.add_argument("-n", "--tokens", type=int, default=50_000, metavar="N", help="most new tokens (%(default)s)")
    flags.add_engine_flags(p)
    flags.add_sampling_flags(p)
    flags.add_thinking_flags(p)
    return p


def read_prompt(args: argparse.Namespace) -> str | None:
    """The one-shot prompt, or None for the REPL."""
    if args.prompt is not None and args.prompt_file is not None:
        raise ConfigError("-p and --prompt-file exclude each other")
    if args.prompt_file is not None:
        try:
            return str(args.prompt_file.read_text(encoding="utf-8"))
        except OSError as e:
            raise ConfigError(f"--prompt-file {args.prompt_file}: {e.strerror}") from None
        except UnicodeDecodeError as e:
            raise ConfigError(f"--prompt-file {args.prompt_file}: not UTF-8 text at byte {e.start}") from None
    if args.prompt == "-" or (args.prompt is None and not sys.stdin.isatty()):
        return sys.stdin.read()
    return None if args.prompt is None else str(args.prompt)


def config_of(args: argparse.Namespace) -> ChatConfig:
    if args.tokens < 1:
        raise ConfigError(f"-n: expected a positive number, got {args.tokens}")
    return ChatConfig(
        engine=flags.engine_config(args, slots=1),
        sampling=flags.sampling_params(args),
        prompt=read_prompt(args),
        system=args.system,
        max_tokens=args.tokens,
        raw=args.raw,
        effort=flags.effort(args),
    )


def run_chat(config: ChatConfig) -> int:
    from ds4.engine.engine import Engine
    from ds4.prompt.registry import renderer_for

    engine = Engine.open(config.engine)
    try:
        chat = Chat(
            engine=engine,
            renderer=renderer_for(engine.info.syntax),
            sampling=config.sampling,
            max_tokens=config.max_tokens,
            system=config.system,
            effort=config.effort,
            raw=config.raw,
        )
        if config.prompt is None:
            from ds4.cli.repl import Repl

            return Repl(chat, Path.home() / ".ds4_history").run()
        return one_shot(chat, config.prompt)
    finally:
        engine.close()


def one_shot(chat: Chat, prompt: str) -> int:
    out, interrupt = TerminalOutput(), Interrupt()
    out.begin()
    try:
        with interrupt.armed():
            stats = chat.turn(prompt, out, interrupt)
    except ContextLengthError as e:
        raise ConfigError(f"{e}; -c sets it") from None
    finally:
        out.end()
    print(f"{PROGRAM}: {stats.line()}", file=sys.stderr)
    return 130 if stats.finish == "cancelled" else 1 if stats.finish == "error" else 0


def dispatch(argv: Sequence[str]) -> int:
    if argv and argv[0] in TOOLS:
        p = argparse.ArgumentParser(prog=PROGRAM)
        subparsers = p.add_subparsers()
        for tool in TOOLS.values():
            tool.add_parser(subparsers)
        args = p.parse_args(argv)
        return int(args.run(args))
    args = parser().parse_args(argv)
    if args.backends:
        from ds4.engine.backends import print_backends

        return print_backends()
    return run_chat(config_of(args))


def main(argv: Sequence[str] | None = None) -> int:
    return flags.run_program(PROGRAM, lambda: dispatch(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
