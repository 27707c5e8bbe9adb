#!/usr/bin/env python3
"""Runs fuzz targets: `python tests/fuzz/run.py --seconds 60 [TARGET ...]` (all of them if none is named).

A target is a module of this folder with two functions: `target(data: bytes)` raises for a defect, `example(rng)` makes
an input to start from. With atheris installed (and one target named) it drives the target by coverage; without it a
mutator of our own does: it bends examples, their pieces and boundary values, and needs nothing.

A failure prints the seed, shrinks the input, writes it to `out/fuzz/TARGET-<digest>` and ends with 1; `--replay FILE
TARGET` runs it again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

Target = Callable[[bytes], None]
Example = Callable[[random.Random], bytes]

BOUNDARIES = [
    b"\x00",
    b"\x1f",
    b"\x7f",
    b"\x80",
    b"\xc3",
    b"\xe2\x80",
    b"\xf0\x9f\x9a",
    b"\xff",
    b"\\",
    b'"',
    b"\n",
    b"<",
]


def names() -> list[str]:
    """The targets in this folder."""
    found = []
    for path in sorted(HERE.glob("*.py")):
        if "\ndef target(" in path.read_text(encoding="utf-8"):
            found.append(path.stem)
    return found


def load(name: str) -> tuple[Target, Example]:
    if name not in names():
        raise SystemExit(f"no fuzz target {name!r}; there are {', '.join(names())}")
    module = importlib.import_module(f"tests.fuzz.{name}")
    return module.target, module.example


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """`data` with one to four random changes; `other` gives pieces."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        kind = rng.randrange(7)
        at = rng.randrange(len(out) + 1)
        n = rng.choice([1, 1, 2, 4, 8, rng.randrange(1, 65)])
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 2:
            del out[at : at + n]
        elif kind == 3:
            out[at:at] = rng.choice(BOUNDARIES) * rng.choice([1, 1, n])
        elif kind == 4:
            out[at:at] = out[at : at + n] * rng.choice([1, 2, n])
        elif kind == 5:
            start = rng.randrange(len(other) + 1)
            out[at:at] = other[start : start + n]
        else:
            del out[at:]
    return bytes(out[: 1 << 14])


def fails(target: Target, data: bytes) -> BaseException | None:
    try:
        target(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        return e
    return None


def shrunk(target: Target, data: bytes, tries: int = 5000) -> bytes:
    """A shorter input that fails with the same kind of error: chunks are left out, large ones first."""
    error = type(fails(target, data))
    chunk = max(1, len(data) // 2)
    while chunk > 0 and tries > 0:
        at = 0
        while at < len(data) and tries > 0:
            tries -= 1
            shorter = data[:at] + data[at + chunk :]
            if type(fails(target, shorter)) is error:
                data = shorter
            else:
                at += chunk
        chunk //= 2
    return data


def fuzz(
    target: Target, example: Example, *, seed: int, seconds: float | None = None, runs: int | None = None
) -> tuple[int, bytes | None]:
    """(inputs tried, the shrunk input of the first failure or None). Stops after `seconds` or `runs`."""
    rng = random.Random(seed)
    end = None if seconds is None else time.monotonic() + seconds
    pool = [example(rng) for _ in range(8)]
    count = 0
    while (end is None or time.monotonic() < end) and (runs is None or count < runs):
        data = example(rng) if count % 3 == 0 else mutated(rng, rng.choice(pool), rng.choice(pool))
        count += 1
        # The pool drifts: damage adds up over a few steps, then fresh examples replace it.
        pool[rng.randrange(len(pool))] = data
        if fails(target, data) is not None:
            return count, shrunk(target, data)
    return count, None


def run(name: str, seed: int, seconds: float) -> bool:
    """Fuzzes one target with the built-in mutator and reports; False on a failure."""
    target, example = load(name)
    started = time.monotonic()
    count, failure = fuzz(target, example, seed=seed, seconds=seconds)
    print(f"{name}: seed {seed}, {count} inputs in {time.monotonic() - started:.1f} s", end="")
    if failure is None:
        print(", no failure", flush=True)
        return True
    folder = ROOT / "out" / "fuzz"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hashlib.sha256(failure).hexdigest()[:12]}"
    path.write_bytes(failure)
    print(f", FAILURE: {failure!r}\nagain: python tests/fuzz/run.py --replay {path.relative_to(ROOT)} {name}")
    error = fails(target, failure)
    if error is not None:
        traceback.print_exception(error)
    return False


def run_atheris(name: str, seed: int, seconds: float) -> None:
    """By coverage; libFuzzer ends the process."""
    import atheris  # type: ignore[import-not-found]

    target, example = load(name)
    folder = ROOT / "out" / "fuzz" / f"{name}-corpus"
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for i in range(64):
        (folder / f"example-{i}").write_bytes(example(rng))
    atheris.Setup([sys.argv[0], f"-max_total_time={max(1, int(seconds))}", f"-seed={seed}", str(folder)], target)
    atheris.Fuzz()


def main() -> int:
    # This folder must not be where `import json` looks.
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() not in (HERE, ROOT))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(names()))
    parser.add_argument("--seconds", type=float, default=60, help="for each target (default %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    parser.add_argument("--replay", type=Path, help="run one input again")
    parser.add_argument("--engine", choices=("auto", "builtin", "atheris"), default="auto")
    arguments = parser.parse_args()
    targets = arguments.targets or names()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    if arguments.replay is not None:
        if len(targets) != 1:
            parser.error("--replay needs one TARGET")
        load(targets[0])[0](arguments.replay.read_bytes())
        print("no failure")
        return 0
    engine = arguments.engine
    if engine == "auto":
        engine = "atheris" if len(targets) == 1 and importlib.util.find_spec("atheris") else "builtin"
    if engine == "atheris":
        if len(targets) != 1:
            parser.error("atheris runs one TARGET at a time")
        run_atheris(targets[0], seed, arguments.seconds)
        return 0
    results = [run(name, seed, arguments.seconds) for name in targets]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
