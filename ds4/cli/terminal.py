"""What a turn looks like on a terminal, and what it looks like when it is redirected."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

GREY, RESET, CLEAR = "\x1b[38;5;245m", "\x1b[0m", "\r\x1b[2K"
BAR_CELLS = 32
REPAINT_SECONDS = 0.1


def colour(stream: TextIO) -> bool:
    """Colours and cursor control only on a terminal that has them; NO_COLOR is honoured."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class TerminalOutput:
    """Writes answer text to stdout as it comes; prefill progress goes to stderr.

    On a terminal, the progress is one rewritten line and reasoning is grey. Redirected, stdout holds the answer
    only, without control codes, and reasoning goes nowhere.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._colour = colour(self._out)
        self._bar = colour(self._err)
        self._reasoning = False
        self._bar_drawn = False
        self._last_paint = 0.0
        self._start = time.perf_counter()

    def begin(self) -> None:
        """A new turn starts now."""
        self._start = time.perf_counter()
        self._last_paint = self._start
        self._reasoning = False

    def prefill(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if done >= total:
            self._clear_bar()
        elif self._bar and now - self._last_paint >= REPAINT_SECONDS:
            self._last_paint = now
            self._bar_drawn = True
            self._err.write(CLEAR + progress_line(done, total, now - self._start))
            self._err.flush()

    def _clear_bar(self) -> None:
        if self._bar_drawn:
            self._err.write(CLEAR)
            self._err.flush()
            self._bar_drawn = False

    def reasoning(self, text: str) -> None:
        if not self._colour:
            return
        if not self._reasoning:
            self._out.write(GREY)
            self._reasoning = True
        self._out.write(text)
        self._out.flush()

    def content(self, text: str) -> None:
        if self._reasoning:
            self._out.write(RESET + "\n\n")
            self._reasoning = False
        self._out.write(text)
        self._out.flush()

    def end(self) -> None:
        """The turn is over, however it ended: no bar, no colour is left behind."""
        self._clear_bar()
        if self._reasoning:
            self._out.write(RESET)
            self._reasoning = False
        self._out.write("\n")
        self._out.flush()


@contextmanager
def work_bar(what: str = "", *, in_bytes: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error for (done, total), gone when the work is; None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    columns: list[progress.ProgressColumn] = [progress.TextColumn("{task.description}"), progress.BarColumn()]
    if in_bytes:
        columns += [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    else:
        columns.append(progress.TaskProgressColumn())
    columns.append(progress.TimeRemainingColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def progress_line(done: int, total: int, seconds: float) -> str:
    """`processing 5120 tokens [████    342 t/s ····] 34.1%`."""
    share = done / total if total else 1.0
    filled = min(BAR_CELLS, max(1, int(share * BAR_CELLS)))
    rate = f" {done / seconds:.0f} t/s " if seconds > 0 else ""
    rest = BAR_CELLS - filled
    tail = rate[:rest] + "·" * (rest - len(rate[:rest]))
    return f"processing {total} tokens [{'█' * filled}{tail}] {100 * share:.1f}%"


class Interrupt:
    """Ctrl+C as a flag: the first one stops the turn at the next safe point, the second one at once."""

    def __init__(self) -> None:
        self.set = False

    def __call__(self) -> bool:
        return self.set

    @contextmanager
    def armed(self) -> Iterator[None]:
        self.set = False
        previous = signal.getsignal(signal.SIGINT)

        def handler(signum: int, frame: FrameType | None) -> None:
            if self.set:
                raise KeyboardInterrupt
            self.set = True

        signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
