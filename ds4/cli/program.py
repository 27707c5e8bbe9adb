"""What every program does around its work: one line per error, the exit codes, a quiet end on a closed pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from ds4 import __version__
from ds4.errors import ConfigError, Ds4Error


def run_program(program: str, body: Callable[[], int]) -> int:
    """Exit status of `body`: 2 for what the user asked wrongly, 1 for what failed, 130 for Ctrl+C."""
    try:
        return body()
    except ConfigError as e:
        return _fail(program, e, 2)
    except Ds4Error as e:
        return _fail(program, e, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of stdout is gone. Point stdout elsewhere, or the interpreter complains again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:
        return _fail(program, e, 1)


def _fail(program: str, error: BaseException, status: int) -> int:
    print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def version_line(program: str) -> str:
    return f"{program} {__version__}"
