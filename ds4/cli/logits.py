"""`ds4 logits FILE`: the logits of every position of a token sequence, to hold this engine against another one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds4.cli.terminal import work_bar
from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig
from ds4.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser("logits", help="write the logits of every position of a token sequence (float32)")
    p.add_argument("file", type=Path, help="GGUF file or safetensors directory")
    p.add_argument("--tokens", type=Path, required=True, help="token ids, a one-dimensional integer .npy file")
    p.add_argument("--out", type=Path, required=True, help="where the [tokens, vocab] float32 .npy file goes")
    p.add_argument("--backend", default="auto", help="see ds4 --backends (default: %(default)s)")
    p.add_argument("--chunk", type=int, default=512, help="tokens per step (default: %(default)s)")
    p.add_argument("-t", "--threads", type=int, default=0, help="CPU threads; 0: one per core")
    p.add_argument("--isa", default="auto", help="cap the instruction set: auto, avx512, avx2, scalar")
    p.add_argument("--kv-qat", choices=("on", "off"), default="on", help="quantised KV rows where the family has them")
    p.set_defaults(run=run)


def read_tokens(path: Path) -> npt.NDArray[np.int32]:
    """Token ids from an .npy file, [n] int32. Raises ConfigError for anything else."""
    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as e:
        raise ConfigError(f"--tokens {path}: {e}") from None
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
        raise ConfigError(
            f"--tokens {path}: expected a non-empty one-dimensional integer array, got {ids.dtype} {ids.shape}"
        )
    return np.asarray(ids, dtype=np.int32)


def run(args: argparse.Namespace) -> int:
    if args.chunk < 1:
        raise ConfigError(f"--chunk: expected a positive number, got {args.chunk}")
    ids = read_tokens(args.tokens)
    config = EngineConfig(
        model=args.file,
        backend=args.backend,
        ctx=len(ids),
        threads=args.threads,
        prefill_chunk=args.chunk,
        isa=args.isa,
        kv_qat=args.kv_qat == "on",
    )
    with work_bar("loading weights") as bar:
        engine = Engine.open(config, bar)
    try:
        out = np.lib.format.open_memmap(args.out, mode="w+", dtype=np.float32, shape=(len(ids), engine.info.vocab_size))
        session = engine.new_session()
        for start in range(0, len(ids), args.chunk):
            chunk = ids[start : start + args.chunk]
            out[start : start + len(chunk)] = engine.all_logits(session, chunk)
            if sys.stderr.isatty():
                print(f"\rlogits {start + len(chunk)}/{len(ids)}", end="", file=sys.stderr)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        out.flush()
    finally:
        engine.close()
    return 0
