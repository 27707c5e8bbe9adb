"""The `ds4>` prompt: history, commands, Ctrl+C that stops an answer and keeps the session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from ds4.cli.chat import Chat
from ds4.cli.terminal import Interrupt, TerminalOutput
from ds4.errors import ContextLengthError, Ds4Error

HISTORY_LINES = 512
MAX_READ_BYTES = 16 * 2**20


class LineHistory(History):
    """One entry per line, newlines inside an entry kept as CR, the newest 512, readable by the owner only."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        try:
            # newline="": a CR inside an entry stays one.
            with self._path.open(encoding="utf-8", errors="replace", newline="") as file:
                lines = file.read().split("\n")
        except OSError:
            return []
        return [line.replace("\r", "\n") for line in reversed(lines) if line]

    def store_string(self, string: str) -> None:
        entries = [*reversed(list(self.load_history_strings())), string][-HISTORY_LINES:]
        text = "".join(entry.replace("\n", "\r") + "\n" for entry in entries)
        try:
            self._path.touch(mode=0o600)
            self._path.chmod(0o600)
            with self._path.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
        except OSError:
            pass  # a read-only home must not end the conversation


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    help: str
    run: Callable[[Repl, str], bool]
    """Gets the rest of the line; returns False to leave."""


class Repl:
    """Reads turns and commands until EOF or /quit."""

    def __init__(self, chat: Chat, history: Path | None = None) -> None:
        self.chat = chat
        self.out = TerminalOutput()
        self.interrupt = Interrupt()
        self._session: PromptSession[str] = PromptSession(
            history=LineHistory(history) if history else None,
            completer=WordCompleter(sorted(COMMANDS), sentence=True),
            complete_while_typing=False,
            key_bindings=key_bindings(),
        )

    def run(self) -> int:
        info = self.chat.engine.info
        print(f"{info.name}, {self.chat.session.ctx} tokens of context. /help lists the commands.", file=sys.stderr)
        while True:
            try:
                line = self._session.prompt("ds4> ").strip()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return 0
            if not line:
                continue
            if line.startswith("/"):
                if not self.command(line):
                    return 0
            else:
                self.turn(line)

    def command(self, line: str) -> bool:
        name, _, rest = line.partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            say(f"unknown command {name}; /help lists the commands")
            return True
        return command.run(self, rest.strip())

    def turn(self, text: str) -> None:
        """One turn; errors are told and the prompt comes back."""
        self.out.begin()
        try:
            with self.interrupt.armed():
                stats = self.chat.turn(text, self.out, self.interrupt)
        except ContextLengthError as e:
            say(f"{e}; /reset starts over, /ctx N makes room")
            return
        except Ds4Error as e:
            say(str(e))
            return
        except KeyboardInterrupt:
            say("stopped")
            return
        finally:
            self.out.end()
        say(stats.line())


def say(text: str) -> None:
    print(f"ds4: {text}", file=sys.stderr)


def key_bindings() -> KeyBindings:
    """Ctrl+U clears the whole line, Alt+Enter starts a new one."""
    keys = KeyBindings()

    @keys.add("c-u")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _help(repl: Repl, rest: str) -> bool:
    width = max(len(c.usage) for c in COMMANDS.values())
    for command in COMMANDS.values():
        print(f"  {command.usage.ljust(width)}  {command.help}")
    print(f"  {'Ctrl+C'.ljust(width)}  stop the answer, keep the conversation")
    return True


def _reset(repl: Repl, rest: str) -> bool:
    repl.chat.reset()
    say("Chat reset.")
    return True


def _ctx(repl: Repl, rest: str) -> bool:
    if not rest.isascii() or not rest.isdigit() or int(rest) < 1:
        say(f"/ctx needs a number of tokens, got {rest!r}")
        return True
    if int(rest) > repl.chat.engine.info.ctx_train:
        say(f"the model was trained for {repl.chat.engine.info.ctx_train} tokens of context, asked for {rest}")
        return True
    try:
        repl.chat.reset(ctx=int(rest))
    except (Ds4Error, ValueError) as e:
        say(str(e))
        return True
    say(f"context {rest} tokens, chat reset.")
    return True


def _read(repl: Repl, rest: str) -> bool:
    path = Path(rest).expanduser()
    try:
        size = path.stat().st_size
        if size > MAX_READ_BYTES:
            say(f"{path}: {size} bytes, at most {MAX_READ_BYTES} are read")
            return True
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        say(f"{path}: {e.strerror}")
    except UnicodeDecodeError as e:
        say(f"{path}: not UTF-8 text at byte {e.start}")
    else:
        repl.turn(text)
    return True


def _temp(repl: Repl, rest: str) -> bool:
    try:
        value = float(rest)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        say(f"/temp needs a number from 0 to 100, got {rest!r}")
    else:
        repl.chat.set_sampling(temperature=value)
        say(f"temperature {value:g}")
    return True


def _quit(repl: Repl, rest: str) -> bool:
    return False


COMMANDS: dict[str, Command] = {
    "/help": Command("/help", "this list", _help),
    "/reset": Command("/reset", "forget the conversation", _reset),
    "/ctx": Command("/ctx N", "new session with N tokens of context", _ctx),
    "/read": Command("/read FILE", "send a file's text as your turn", _read),
    "/temp": Command("/temp T", "temperature of the turns that follow; 0 is greedy", _temp),
    "/quit": Command("/quit", "leave (also /exit, Ctrl+D)", _quit),
    "/exit": Command("/exit", "leave", _quit),
}
