"""Resident memory of this engine and of llama.cpp with the same slots and context.

    python -m bench.memory --peer ~/.cache/ds4-peer [--slots 16] [--ctx 4096] [--save memory]

llama.cpp reserves the keys and values of all slots at its start. Ours grow with the tokens: before the first one, and
with every slot full. The environment of --peer is made by `python -m bench.cpu_llamacpp --build DIR`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import report
from bench.peers.protocol import Worker
from ds4.engine.demo import demo_model_path


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.memory", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--peer", type=Path, metavar="DIR", required=True)
    p.add_argument("-m", "--model", type=Path, help="GGUF file (default: the demo model)")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--slots", type=int, default=16)
    p.add_argument("--ctx", type=int, default=4096)
    p.add_argument("--save", metavar="NAME", help="keep the numbers as bench/results/NAME.json")
    args = p.parse_args()
    model, threads = str(args.model or demo_model_path()), str(args.threads)
    ours = Worker([sys.executable, "-m", "bench.peers.ds4_worker", model, threads, str(args.ctx)])
    result = ours.ask("slots", width=args.slots, n=args.ctx)
    ours.close()
    script = str(Path(__file__).resolve().parent / "peers/llamacpp_worker.py")
    peer = Worker([str(args.peer / "bin/python"), script, model, threads, str(args.slots * args.ctx)])
    peer.ask("prefill", n=512)  # its buffers of a step, which ours has used too
    result["llama_cpp_mib"] = peer.ask("facts")["rss_mib"]
    peer.close()
    rows = [
        ("ds4, no token yet", result["empty_mib"]),
        ("ds4, every slot full", result["full_mib"]),
        ("llama.cpp", result["llama_cpp_mib"]),
    ]
    print(f"{args.slots} slots of {args.ctx} tokens, {Path(model).name}\n")
    print(report.table(("resident", "MiB"), rows))
    if args.save:
        print(f"saved {report.save(args.save, result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
