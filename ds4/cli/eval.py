"""`ds4-eval`: the command exists so that its name is taken; the program comes in a later release."""

from __future__ import annotations

import sys


def main() -> int:
    """Says so in one line; exit code 2."""
    print("ds4-eval: this release does not contain the program yet", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
