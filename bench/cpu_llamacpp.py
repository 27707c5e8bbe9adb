"""This engine and llama.cpp on the same file, in turn in one run.

    python -m bench.cpu_llamacpp --build ~/.cache/ds4-peer     # once: llama.cpp from source, its own environment
    python -m bench.cpu_llamacpp --peer ~/.cache/ds4-peer
    python -m bench.cpu_llamacpp --peer ~/.cache/ds4-peer --types Q8_0 Q4_0 Q4_K_M Q6_K BF16
    python -m bench.cpu_llamacpp --peer ~/.cache/ds4-peer --flash FOLDER   # four layers of DeepSeek V4 Flash, 9.5 GB

A run of some `--only` or `--types` replaces just those in the file that `--save` names.

`--types` measures files that llama.cpp's own quantiser makes of the model (kept in build/types), with the fallback
types that it chooses for matrices whose rows are no multiple of a block.

Each engine lives in a process of its own; the two take turns measurement by measurement, so that both see the same
neighbours, and the numbers are medians over the rounds. Decode feeds fixed tokens and reads the logits on both sides.
With `--flash` one engine does all its rounds and ends before the other one starts: memory holds the model only once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.peers.protocol import Worker
from ds4.convert.synth import DEFAULT_TYPES, synthesise
from ds4.engine.demo import demo_model_path

PEER_PACKAGE = "llama-cpp-python"

# (label, command, arguments)
WORK: list[tuple[str, str, dict[str, int]]] = [
    ("prefill 128", "prefill", {"n": 128}),
    ("prefill 512", "prefill", {"n": 512}),
    ("prefill 2048", "prefill", {"n": 2048}),
    ("decode", "decode", {"depth": 0, "n": 48}),
    ("decode at depth 2048", "decode", {"depth": 2048, "n": 32}),
    *((f"batch {w}", "batch", {"width": w, "n": 24}) for w in (2, 4, 8, 16)),
]
# What is measured of each of --types.
TYPES_WORK = ("prefill 512", "decode", "batch 16")
TYPES_FOLDER = Path("build/types")
# What is measured of --flash: a token of four layers reads 1.4 GB.
FLASH_WORK: list[tuple[str, str, dict[str, int]]] = [
    ("flash prefill 64", "prefill", {"n": 64}),
    ("flash decode", "decode", {"depth": 0, "n": 6}),
]
FLASH_LAYERS = 4


def build(folder: Path) -> None:
    """Makes an environment in `folder` with llama.cpp compiled for this machine."""
    venv.create(folder, with_pip=True)
    command = [folder / "bin/pip", "install", "--no-binary", PEER_PACKAGE, PEER_PACKAGE]
    subprocess.run([str(c) for c in command], check=True)


def of_type(model: Path, name: str, peer: Path) -> Path:
    """`model` in the type that llama.cpp calls `name`, made by its quantiser unless it is there."""
    target = TYPES_FOLDER / f"{model.stem}-{name}.gguf"
    if not target.exists():
        TYPES_FOLDER.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).resolve().parent / "peers/llamacpp_quantize.py"
        command = [peer / "bin/python", script, model, target, name]
        subprocess.run([str(c) for c in command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return target


def flash_file(folder: Path) -> Path:
    """The synthetic model of `--flash`, written once."""
    path = folder / f"flash-{FLASH_LAYERS}.gguf"
    if not path.exists():
        synthesise(path, "deepseek4", "flash", 0, DEFAULT_TYPES["flash"], layers=FLASH_LAYERS)
    return path


def measure(args: argparse.Namespace, model: Path, labels: Sequence[str] | None) -> dict[str, Any]:
    root = Path(__file__).resolve().parent
    commands = {
        "ds4": [sys.executable, "-m", "bench.peers.ds4_worker", str(model), str(args.threads), "8192", args.isa],
        "llama.cpp": [
            *(str(args.peer / "bin/python"), str(root / "peers/llamacpp_worker.py")),
            *(str(model), str(args.threads)),
        ],
    }
    work = [
        w for w in (FLASH_WORK if args.flash else WORK) if labels is None or any(w[0].startswith(o) for o in labels)
    ]
    rates: dict[str, dict[str, list[float]]] = {label: {name: [] for name in commands} for label, _, _ in work}
    facts: dict[str, Any] = {}
    for names in [[name] for name in commands] if args.flash else [list(commands)]:
        workers = {name: Worker(commands[name]) for name in names}
        for round_ in range(args.rounds + 1):
            for label, op, arguments in work:
                found = {name: worker.rate(op, **arguments) for name, worker in workers.items()}
                if round_:  # the first round warms up
                    for name, rate in found.items():
                        rates[label][name].append(rate)
                told = ", ".join(f"{name} {rate:.1f}" for name, rate in found.items())
                print(f"  {model.stem} round {round_} {label}: {told} t/s", file=sys.stderr)
        for name, worker in workers.items():
            facts[name] = worker.ask("facts")
            worker.close()
    lines = [
        {
            "what": label,
            "ds4": report.median(found["ds4"]),
            "llama.cpp": report.median(found["llama.cpp"]),
            "ratio": report.median([x / y for x, y in zip(found["ds4"], found["llama.cpp"], strict=True)]),
            "ds4_all": found["ds4"],
            "llama.cpp_all": found["llama.cpp"],
        }
        for label, found in rates.items()
    ]
    return {"model": Path(model).name, "threads": args.threads, "isa": args.isa, "facts": facts, "rates": lines}


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.cpu_llamacpp", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--build", type=Path, metavar="DIR", help="build the peer into DIR and exit")
    p.add_argument("--peer", type=Path, metavar="DIR", help="environment made by --build")
    p.add_argument("-m", "--model", type=Path, help="GGUF file (default: the demo model)")
    p.add_argument("--flash", type=Path, metavar="DIR", help="four synthetic layers of Flash, kept in DIR")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--isa", default="auto", help="cap ds4's instruction set: auto, avx512, avx2, scalar")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--only", nargs="*", help="labels to run, by prefix")
    p.add_argument("--types", nargs="+", metavar="TYPE", help="files of these types made from the model")
    p.add_argument("--save", metavar="NAME", help="keep the numbers as bench/results/NAME.json")
    args = p.parse_args()
    if args.build:
        build(args.build)
        return 0
    if not args.peer:
        p.error("--peer DIR is needed (make it with --build DIR)")
    model = flash_file(args.flash) if args.flash else args.model or demo_model_path()
    if args.types:
        results = {t: measure(args, of_type(model, t, args.peer), args.only or TYPES_WORK) for t in args.types}
        saved: dict[str, Any] = {"types": results}
    else:
        results = {"": measure(args, model, args.only)}
        saved = results[""]
    lines = [
        (t, r["what"], r["ds4"], r["llama.cpp"], f"{r['ratio']:.2f}") for t, x in results.items() for r in x["rates"]
    ]
    first = 0 if args.types else 1
    how = "one engine after the other" if args.flash else "in turn"
    print(f"{model.name}, {args.threads} threads, tokens/s, medians of {args.rounds} rounds {how}\n")
    print(report.table(("type", "what", "ds4", "llama.cpp", "ratio")[first:], [line[first:] for line in lines]))
    for kind, result in results.items():
        for name, facts in result["facts"].items():
            system = facts["system"].strip()
            print(f"{kind} {name}: {facts['version']}, {system}, {facts['rss_mib']:.0f} MiB resident".lstrip())
    if args.save:
        known = report.RESULTS / f"{args.save}.json"
        before = json.loads(known.read_text()) if (args.only or args.types) and known.exists() else {}
        if args.types:
            saved["types"] = {**before.get("types", {}), **results}
        elif before:
            rest = [line for line in before["rates"] if line["what"] not in {new["what"] for new in saved["rates"]}]
            order = [label for label, _, _ in (*WORK, *FLASH_WORK)]
            saved["rates"] = sorted([*saved["rates"], *rest], key=lambda line: order.index(line["what"]))
        print(f"saved {report.save(args.save, saved)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
