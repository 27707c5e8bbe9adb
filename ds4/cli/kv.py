"""`ds4 kv ls|show|verify|gc DIR`: what lies in a directory of checkpoints, whether it is sound, and tidying it up."""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds4.engine import payload
from ds4.engine.encoding import key_parts
from ds4.errors import CheckpointError, ConfigError, printable
from ds4.server import kvfile
from ds4.server.kvdir import Entry, lock_directory, scan, sync_directory, temporary_files
from ds4.server.kvfile import DamagedFile
from ds4.server.kvpolicy import score, victims

_MIB = float(1 << 20)
_SHOWN_TEXT = 2000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "kv",
        help="checkpoints of ds4-server on disk",
        description="Looks at a directory that ds4-server --kv-disk-dir writes. Exit status 1: something is damaged.",
    )
    commands = p.add_subparsers(required=True, metavar="COMMAND")

    p.set_defaults(run=run)

    def command(name: str, action: Any, text: str) -> argparse.ArgumentParser:
        c = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        c.add_argument("directory", type=Path, metavar="DIR")
        c.set_defaults(action=action)
        return c

    ls = command("ls", list_files, "one line per checkpoint, the most valuable first")
    ls.add_argument("--json", action="store_true", help="print one JSON array")
    show = command("show", show_file, "header, model, text and tool calls of one checkpoint")
    show.add_argument("name", help="the file's name, or the digits it begins with")
    show.add_argument("--text", action="store_true", help="the whole text, not only its ends")
    verify = command("verify", verify_files, "reads every checkpoint against its checksum; changes nothing")
    verify.add_argument("-q", "--quiet", action="store_true", help="only what is wrong")
    gc = command("gc", collect, "removes leftovers and damaged files, then what exceeds a budget")
    gc.add_argument("--budget-mb", type=int, metavar="N", help="evict down to N MiB (default: evict nothing)")
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")


def run(args: argparse.Namespace) -> int:
    return int(args.action(args))


def _files(directory: Path) -> Iterator[tuple[str, Path, Entry | Exception]]:
    try:
        yield from scan(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None


def list_files(args: argparse.Namespace) -> int:
    now = time.time()
    rows: list[dict[str, Any]] = []
    damaged = False
    for name, path, found in _files(args.directory):
        if isinstance(found, Entry) and found.layout is not None:
            fields = asdict(found.layout.header)
            fields.update(key=found.layout.header.key_kind, text_bytes=found.text_bytes, size=found.size, problem=None)
            fields["score"] = score(found.candidate(), now)
        else:
            damaged = damaged or isinstance(found, DamagedFile)
            size = path.stat().st_size if path.exists() else 0
            fields = {"size": size, "score": 0.0, "problem": printable(str(found))}
        rows.append({"name": name, **fields})
    rows.sort(key=lambda row: -row["score"])
    if args.json:
        print(json.dumps(rows, indent=2))
        return int(damaged)
    print(f"{'name':12} {'reason':10} {'key':18} {'tokens':>8} {'MiB':>9} {'hits':>5} {'last used':>10} model")
    for row in rows:
        if row["problem"]:
            print(f"{row['name'][:12]} {'-':10} {'-':18} {'-':>8} {row['size'] / _MIB:9.2f}   {row['problem']}")
        else:
            print(
                f"{row['name'][:12]} {row['reason']:10} {row['key']:18} {row['tokens']:8} {row['size'] / _MIB:9.2f} "
                f"{row['hits']:5} {_ago(now - row['used']):>10} {row['model_id']:5}"
            )
    print(f"{len(rows)} files, {sum(row['size'] for row in rows) / _MIB:.2f} MiB")
    return int(damaged)


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def show_file(args: argparse.Namespace) -> int:
    wanted = args.name.lower().removesuffix(".kv")
    matches = [(path, found) for name, path, found in _files(args.directory) if name.startswith(wanted)]
    if len(matches) != 1:
        raise ConfigError(f"{args.name}: {len(matches)} checkpoints of that name in {args.directory}, expected one")
    path, found = matches[0]
    if isinstance(found, Exception) or found.layout is None:
        print(f"{path.name}: {printable(str(found))}")
        return 1
    layout = found.layout
    with path.open("rb", buffering=0) as file:
        text = kvfile.read_text(file, layout)
        calls = kvfile.read_map(file, layout)
        try:
            model: dict[str, Any] = asdict(payload.read_header(io.BufferedReader(kvfile.PayloadReader(file, layout))))
        except CheckpointError as error:
            model = {"problem": str(error)}
    buffers = model.pop("buffers", ())
    facts = {**asdict(layout.header), "key": layout.header.key_kind, "text_bytes": layout.text_bytes}
    facts.update(size=found.size, **{f"payload.{name}": value for name, value in model.items()})
    for name, value in facts.items():
        print(f"{name:20} {printable(str(value))}")
    print(f"{'payload.buffers':20} {len(buffers)}")
    for call_id, block in calls:
        print(f"{'tool call':20} {printable(call_id)} ({len(block)} bytes)")
    shown = spelled(text)
    if not args.text and len(shown) > _SHOWN_TEXT:
        half = _SHOWN_TEXT // 2
        shown = f"{shown[:half]}\n[... {len(shown) - 2 * half} characters ...]\n{shown[-half:]}"
    print(f"\n{shown}")
    return 0


def spelled(key: bytes) -> str:
    """A cache key for people: special tokens as `<|#ID|>`, control characters escaped."""
    parts: list[str] = []
    for _, part in key_parts(key):
        if isinstance(part, int):
            parts.append(f"<|#{part}|>")
        else:
            parts.append("\n".join(printable(line) for line in part.decode("utf-8", "replace").split("\n")))
    return "".join(parts)


def verify_files(args: argparse.Namespace) -> int:
    bad = good = 0
    for _, path, found in _files(args.directory):
        problem = str(found) if isinstance(found, Exception) else None
        if isinstance(found, Entry) and found.layout is not None:
            try:
                with path.open("rb", buffering=0) as file:
                    kvfile.verify(file, kvfile.read_layout(file))
            except (CheckpointError, OSError) as error:
                problem = str(error)
        bad, good = bad + (problem is not None), good + (problem is None)
        if problem is not None:
            print(f"{path.name}: {printable(problem)}")
        elif not args.quiet:
            print(f"{path.name}: ok")
    left = _leftovers(args.directory)
    for path in left:
        print(f"{path.name}: left by a writer that was killed")
    if not args.quiet:
        print(f"{good} sound, {bad} not, {len(left)} leftovers")
    return int(bad > 0)


def _leftovers(directory: Path) -> list[Path]:
    try:
        return temporary_files(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None


def collect(args: argparse.Namespace) -> int:
    if args.budget_mb is not None and args.budget_mb < 0:
        raise ConfigError(f"--budget-mb: expected 0 or more, got {args.budget_mb}")
    directory: Path = args.directory
    if not directory.is_dir():
        raise ConfigError(f"{directory}: not a directory")
    try:
        owner = lock_directory(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None
    with owner:
        removed = freed = 0
        doomed = [(path, "leftover") for path in temporary_files(directory)]
        candidates = []
        for _, path, found in scan(directory):
            if isinstance(found, DamagedFile):
                doomed.append((path, str(found)))
            elif isinstance(found, Entry):
                candidates.append(found.candidate())
        if args.budget_mb is not None:
            chosen = victims(candidates, args.budget_mb << 20, 0, time.time())
            doomed += [(directory / f"{victim.name}.kv", "over the budget") for victim in chosen]
        for path, why in doomed:
            size = path.stat().st_size
            if not args.dry_run:
                path.unlink(missing_ok=True)
            removed, freed = removed + 1, freed + size
            print(f"{path.name}: {printable(why)}, {size / _MIB:.2f} MiB")
        if doomed and not args.dry_run:
            sync_directory(directory)
    print(f"{'would remove' if args.dry_run else 'removed'} {removed} files, {freed / _MIB:.2f} MiB")
    return 0
