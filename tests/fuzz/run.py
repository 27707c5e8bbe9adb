#!/usr/bin/env python3
"""Runs fuzz targets: `python tests/fuzz/run.py --seconds 60 [TARGET ...]` (all of them if none is named).

A target is a module of this folder with two functions: `target(data: bytes)` raises for a defect, `example(rng)` makes
an input to start from. `corpus/TARGET/` holds its seeds (`make_corpus.py` writes them).

Where atheris is installed it drives the targets by coverage, each in a process of its own (`guided.py`), `--jobs` at a
time; `--build build/fuzz` takes the modules that `make fuzz` builds with sanitizers and coverage of the native code.
Elsewhere a mutator of our own does: it bends seeds, examples, their pieces and boundary values, and needs nothing.

A failure leaves its input in `out/fuzz/TARGET-*` and ends with 1; `--replay FILE TARGET` runs it again. New inputs that
reach new code gather in `out/fuzz/corpus/TARGET`, logs in `out/fuzz/TARGET.log`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import os
import random
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CORPUS = HERE / "corpus"

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


def seeds(name: str) -> list[bytes]:
    """The target's corpus, in the order of its names."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


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
    target: Target,
    example: Example,
    *,
    seed: int,
    corpus: Sequence[bytes] = (),
    seconds: float | None = None,
    runs: int | None = None,
) -> tuple[int, bytes | None]:
    """(inputs tried, the shrunk input of the first failure or None). Stops after `seconds` or `runs`."""
    rng = random.Random(seed)
    end = None if seconds is None else time.monotonic() + seconds

    def fresh() -> bytes:
        return rng.choice(corpus) if corpus and rng.random() < 0.5 else example(rng)

    pool = [fresh() for _ in range(8)]
    count = 0
    while (end is None or time.monotonic() < end) and (runs is None or count < runs):
        data = fresh() if count % 3 == 0 else mutated(rng, rng.choice(pool), rng.choice(pool))
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
    count, failure = fuzz(target, example, seed=seed, corpus=seeds(name), seconds=seconds)
    print(f"{name}: built-in mutator, seed {seed}, {count} inputs in {time.monotonic() - started:.1f} s", end="")
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


@dataclass
class Guided:
    """A target under atheris, from the start of its process to its report."""

    name: str
    seed: int
    seconds: float
    build: Path | None

    def __post_init__(self) -> None:
        folder = ROOT / "out" / "fuzz"
        found = folder / "corpus" / self.name
        found.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{self.name}.log"
        command = [sys.executable, "-m", "tests.fuzz.guided", self.name, str(self.seed)]
        command += [
            f"-max_total_time={max(1, int(self.seconds))}",
            "-max_len=8192",
            "-timeout=300",
            "-rss_limit_mb=4096",
            "-detect_leaks=0",
            "-print_final_stats=1",
            f"-artifact_prefix={folder}/{self.name}-",
            str(found),
            str(CORPUS / self.name),
        ]
        paths = [str(self.build.resolve())] if self.build else []
        # Without the safe path, `-m` would put this folder's tree before the build.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]), "PYTHONSAFEPATH": "1"}
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def finished(self) -> bool:
        """Waits for the end and reports; False on a failure."""
        _, status, usage = os.wait4(self.process.pid, 0)
        code = self.process.returncode = os.waitstatus_to_exitcode(status)
        wall, cpu = time.monotonic() - self.started, usage.ru_utime + usage.ru_stime
        text = self.log.read_text(encoding="utf-8", errors="replace")

        def last(pattern: str) -> str:
            return (re.findall(pattern, text) or ["?"])[-1]

        count = last(r"number_of_executed_units: (\d+)")
        modules, places = last(r"guided by the native code of (.*)"), last(r"cov: (\d+)")
        print(
            f"{self.name}: atheris, seed {self.seed}, {count} inputs in {wall:.1f} s ({cpu:.1f} s of CPU), "
            f"native coverage of {modules}, {places} places reached",
            end="",
        )
        if code == 0 and count != "?":
            print(", no failure", flush=True)
            return True
        kept = last(r"Test unit written to (\S+)")
        print(f", FAILURE (status {code})\n{text[-6000:]}\nagain: python tests/fuzz/run.py --replay {kept} {self.name}")
        return False


def run_guided(targets: list[str], seed: int, seconds: float, jobs: int, build: Path | None) -> bool:
    """All targets under atheris, `jobs` processes at a time; False on a failure."""
    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(lambda name: Guided(name, seed, seconds, build).finished(), targets)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(names()))
    parser.add_argument("--seconds", type=float, default=60, help="for each target (default %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    parser.add_argument("--replay", type=Path, help="run one input again")
    parser.add_argument("--engine", choices=("auto", "builtin", "atheris"), default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time, atheris only (default %(default)s)")
    parser.add_argument("--build", type=Path, help="folder of a build whose modules are taken instead of the tree's")
    arguments = parser.parse_args()
    # This folder must not be where `import json` looks.
    builds = [str(arguments.build.resolve())] if arguments.build else []
    sys.path[:] = [*builds, str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() not in (HERE, ROOT))]
    targets = arguments.targets or names()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    if arguments.replay is not None:
        if len(targets) != 1:
            parser.error("--replay needs one TARGET")
        load(targets[0])[0](arguments.replay.read_bytes())
        print("no failure")
        return 0
    guided = importlib.util.find_spec("atheris") is not None
    if arguments.engine == "atheris" and not guided:
        parser.error("atheris is not installed")
    if arguments.engine != "builtin" and guided:
        return 0 if run_guided(targets, seed, arguments.seconds, arguments.jobs, arguments.build) else 1
    if not guided:
        print("atheris is not installed: the built-in mutator drives the targets, without coverage")
    results = [run(name, seed, arguments.seconds) for name in targets]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
