"""`ds4-server` as a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading


class ServerProcess:
    """A server that was started with these flags and listens at `url`. `lines` is its log so far.

    Raises AssertionError with the log when it ends before it listens.
    """

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ds4.cli.server", "--port", "0", *flags],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
            text=True,
        )
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"listening on (http://\S+)", line)
            if found:
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.lines))
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def stop(self) -> None:
        """Ends it as a person would; it has to end cleanly."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, "".join(self.lines)
