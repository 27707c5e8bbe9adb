"""`ds4 inspect [FILE]`: what is in a model file, and what memory a configuration of it needs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds4.engine.demo import demo_model_path
from ds4.engine.model_file import ModelFile, check_model_file, read_model_file
from ds4.engine.types import EngineConfig
from ds4.errors import ConfigError, ModelFileError, UnsupportedModelError, printable

_BIGGEST = 10
_LONG_VALUE = 60


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "inspect",
        help="what is in a model file and what memory it needs",
        description="Shows hyper-parameters, tensors, tokenizer and memory plan of a model; reads no weights. "
        "Exit status 1 when the file contradicts itself.",
    )
    p.add_argument("file", type=Path, nargs="?", help="GGUF file or safetensors directory (default: the demo model)")
    p.add_argument("-c", "--ctx", type=int, help="context for the memory plan (default: the trained one, <= 32768)")
    p.add_argument("--slots", type=int, default=1, help="sessions for the memory plan (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name in ("ctx", "slots"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}: expected a positive number, got {value}")
    model = read_model_file(demo_model_path() if args.file is None else args.file)
    facts = inspect(model, args.ctx, args.slots)
    if args.json:
        print(json.dumps(facts, ensure_ascii=False, indent=2, allow_nan=False))
    else:
        _render(facts)
    return 1 if facts["problem"] else 0


def inspect(model: ModelFile, ctx: int | None, slots: int) -> dict[str, Any]:
    """Everything that the command shows, as JSON values; sizes in bytes. `problem` is None or what is wrong."""
    problem = None
    try:
        check_model_file(model)
    except ModelFileError as e:
        problem = str(e)
    tensors = sorted(model.tensors.values(), key=lambda t: -t.nbytes)
    counts: dict[str, int] = {}
    for t in tensors:
        counts[t.dtype.name] = counts.get(t.dtype.name, 0) + 1
    return {
        "path": str(model.path),
        "format": model.format,
        "file_bytes": model.file_bytes,
        "family": model.family,
        "name": model.name,
        "id": model.id,
        "syntax": model.syntax,
        "n_params": model.n_params,
        "bits_per_weight": 8 * sum(t.nbytes for t in tensors) / model.n_params if model.n_params else 0.0,
        "rope_kind": model.rope_kind,
        "hparams": {key: _json_value(value) for key, value in model.hparams.items()},
        "types": {name: {"tensors": counts[name], "bytes": n} for name, n in model.type_bytes.items()},
        "n_tensors": len(tensors),
        "biggest": [
            {"name": t.name, "shape": list(t.shape), "type": t.dtype.name, "bytes": t.nbytes}
            for t in tensors[:_BIGGEST]
        ],
        "drafts": _draft_facts(model),
        "tokenizer": _tokenizer_facts(model),
        "memory": None if problem else _memory_plan(model, ctx, slots),
        "problem": problem,
    }


def _json_value(value: Any) -> Any:
    """JSON has no infinities and no NaN: these become text."""
    if isinstance(value, list):
        return [_json_value(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _draft_facts(model: ModelFile) -> dict[str, Any] | None:
    """The layers that draft, None where the file has none."""
    try:
        found = model.draft_layers()
    except (ModelFileError, UnsupportedModelError) as e:
        return {"problem": str(e)}
    if found is None:
        return None
    tensors = found.tensors.values()
    return {"kind": found.kind, "tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors), **found.hparams}


def _tokenizer_facts(model: ModelFile) -> dict[str, Any] | None:
    spec = model.tokenizer_spec
    if spec is None:
        return None
    return {
        "tokens": len(spec.tokens),
        "merges": None if spec.library_json is not None else len(spec.merges),
        "pre": spec.pre or None,
        "specials": len(spec.specials),
        "bos": spec.bos_id,
        "add_bos": spec.add_bos,
        "stop": {str(i): spec.specials.get(i, spec.tokens[i]) for i in spec.eos_ids},
        "chat_template": model.chat_template is not None,
    }


def _memory_plan(model: ModelFile, ctx: int | None, slots: int) -> dict[str, Any]:
    # Imported here: a file can be looked at where no backend is built.
    try:
        from ds4 import _cpu
        from ds4.engine.engine import build_model, plan_memory
    except ImportError as e:
        return {"unavailable": f"the CPU backend is not built: {e}"}
    if ctx is None:
        ctx = min(model.hparams.integer("context_length"), 32768)
    config = EngineConfig(model=model.path, ctx=ctx, slots=slots)
    try:
        # Sizes do not depend on the backend; the reference one starts no threads.
        plan = plan_memory(model, build_model(model, _cpu.Backend("reference")), config)
    except UnsupportedModelError as e:
        return {"unavailable": str(e)}
    return {
        "ctx": ctx,
        "slots": slots,
        "weight_bytes": plan.weight_bytes,
        "state_bytes_per_slot": plan.state_bytes,
        "snapshots_per_slot": plan.snapshots,
        "snapshot_bytes": plan.snapshot_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "start_bytes": plan.at_start,
        "total_bytes": plan.total,
        "available_bytes": plan.available_bytes,
    }


# ---- for people


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def _count(n: float) -> str:
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= factor:
            return f"{n / factor:.1f} {unit}"
    return f"{n:.0f}"


def _shown(value: Any) -> str:
    text = printable(f"{value:g}" if isinstance(value, float) else str(value))
    return text if len(text) <= _LONG_VALUE else text[: _LONG_VALUE - 1] + "\u2026"


def _draft_rows(drafts: dict[str, Any] | None) -> list[tuple[str, str]]:
    if drafts is None:
        return []
    if "problem" in drafts:
        return [("drafts", printable(drafts["problem"]))]
    return [("drafts", f"{drafts['kind']}, {drafts['tensors']} tensors, {_size(drafts['bytes'])}")]


def _render(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    path = printable(facts["path"])  # never shortened, unlike values in tables
    console.print(Text(f"{path} ({facts['format']}, {_size(facts['file_bytes'])})"))
    console.print()

    def table(title: str, *columns: str, rows: Iterable[Iterable[Any]]) -> None:
        t = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, show_header=any(columns))
        for column in columns:
            t.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
        for row in rows:
            t.add_row(*(Text(_shown(cell)) for cell in row))
        console.print(t)
        console.print()

    table(
        printable(facts["name"]),
        "",
        "",
        rows=[
            ("family", facts["family"]),
            ("id", facts["id"]),
            ("prompt syntax", facts["syntax"]),
            ("parameters", f"{_count(facts['n_params'])} at {facts['bits_per_weight']:.2f} bits"),
            ("rotary pairs", facts["rope_kind"]),
            *_draft_rows(facts["drafts"]),
        ],
    )
    table("Hyper-parameters", "", "", rows=sorted(facts["hparams"].items()))
    table(
        f"Tensors: {facts['n_tensors']}",
        "type",
        ">count",
        ">size",
        rows=[(name, t["tensors"], _size(t["bytes"])) for name, t in facts["types"].items()],
    )
    table(
        "Biggest tensors",
        "name",
        "shape",
        "type",
        ">size",
        rows=[(t["name"], t["shape"], t["type"], _size(t["bytes"])) for t in facts["biggest"]],
    )
    if (k := facts["tokenizer"]) is None:
        console.print(Text("No tokenizer."))
    else:
        table(
            "Tokenizer",
            "",
            "",
            rows=[
                ("tokens", f"{k['tokens']}, {k['specials']} of them special"),
                ("merges", "in tokenizer.json" if k["merges"] is None else k["merges"]),
                ("pre-tokenizer", k["pre"] or "in tokenizer.json"),
                ("begin", f"{k['bos']}{' (added)' if k['add_bos'] else ''}"),
                ("stop", ", ".join(f"{i} {text}" for i, text in k["stop"].items())),
                ("chat template", "yes" if k["chat_template"] else "no"),
            ],
        )
    if (m := facts["memory"]) is not None:
        if "unavailable" in m:
            console.print(Text(f"No memory plan: {printable(m['unavailable'])}"))
        else:
            snapshots = m["snapshots_per_slot"] * m["snapshot_bytes"]
            table(
                f"Memory for {m['slots']} \u00d7 {m['ctx']} tokens",
                "",
                ">",
                rows=[
                    ("weights", _size(m["weight_bytes"])),
                    ("workspace", _size(m["workspace_bytes"])),
                    ("at start", _size(m["start_bytes"])),
                    ("one full session", _size(m["state_bytes_per_slot"])),
                    *([(f"its {m['snapshots_per_slot']} snapshots", _size(snapshots))] if snapshots else []),
                    ("all sessions full", _size(m["total_bytes"])),
                    ("available", _size(m["available_bytes"])),
                ],
            )
    if facts["problem"]:
        console.print(Text(f"Problem: {printable(facts['problem'])}", style="bold red"))
