"""`ds4 convert SRC DST.gguf`: a model with other element types, or a directory as one file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ds4.cli.terminal import work_bar
from ds4.convert.convert import convert
from ds4.convert.encode import ENCODABLE
from ds4.convert.gguf_out import Progress as Report
from ds4.convert.types import TypePlan, add_type_flags, type_plan
from ds4.engine.model_file import open_model_file


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "convert",
        help="write a model as a GGUF file, with other element types where asked",
        description="Writes a GGUF file from a safetensors directory or another GGUF file. Types that nobody asks for "
        "stay as they are, exactly; 8- and 4-bit codes with scales beside them become BF16 and MXFP4.",
    )
    p.add_argument("source", type=Path, help="GGUF file or safetensors directory")
    p.add_argument("target", type=Path, help="the new .gguf file")
    add_type_flags(p, ENCODABLE, "as the source")
    p.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out")
    p.add_argument("--drafts", action="store_true", help="take the layers that draft along (--mtp, --dspark)")
    p.add_argument("--force", action="store_true", help="replace an existing file")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    plan = type_plan(args, ENCODABLE, TypePlan())
    model = open_model_file(args.source)
    with_progress(
        lambda progress: convert(
            model,
            args.target,
            plan,
            tokenizer=not args.no_tokenizer,
            drafts=args.drafts,
            force=args.force,
            progress=progress,
        ),
        args.target,
    )
    return 0


def with_progress(write: Callable[[Report | None], int], target: Path) -> None:
    """Runs a writer under a bar on a terminal's standard error; says what was written."""
    with work_bar(in_bytes=True) as bar:
        size = write(bar)
    print(f"{target}: {size} bytes", file=sys.stderr)
