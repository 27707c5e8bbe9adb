"""`ds4 synth OUT.gguf`: a random checkpoint of a supported family, for tests and measurements."""

from __future__ import annotations

import argparse
from pathlib import Path

from ds4.cli.convert import with_progress
from ds4.convert.blocks import DRAWABLE
from ds4.convert.synth import DEFAULT_TYPES, SIZES, recipe_of, synthesise
from ds4.convert.types import add_type_flags, type_plan
from ds4.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sizes = "; ".join(f"{family}: {', '.join(names)}" for family, names in SIZES.items())
    p = subparsers.add_parser(
        "synth",
        help="write a random checkpoint of a family",
        description=f"Random weights from a seed, in real shapes ({sizes}). The text that they write is noise.",
    )
    p.add_argument("target", type=Path, help="the new .gguf file")
    p.add_argument("--family", required=True, help=", ".join(SIZES))
    p.add_argument("--size", default="tiny", help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    p.add_argument("--layers", type=int, help="only the first N layers")
    p.add_argument(
        "--distinct-layers",
        type=int,
        metavar="N",
        help="draw N of each matrix, let later layers name the same bytes again: full size in a small file",
    )
    kinds = p.add_mutually_exclusive_group()
    kinds.add_argument(
        "--mtp", dest="drafts", action="store_const", const="mtp", help="with a multi-token prediction head"
    )
    kinds.add_argument(
        "--dspark", dest="drafts", action="store_const", const="dspark", help="with a DSpark block drafter"
    )
    add_type_flags(p, DRAWABLE, "tiny: F32; else as published files of the size")
    p.add_argument("--force", action="store_true", help="replace an existing file")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.seed < 0:
        raise ConfigError(f"--seed: expected a number from 0, got {args.seed}")
    recipe_of(args.family, args.size, args.layers, args.drafts)
    plan = type_plan(args, DRAWABLE, DEFAULT_TYPES[args.size])
    with_progress(
        lambda progress: synthesise(
            args.target,
            args.family,
            args.size,
            args.seed,
            plan,
            layers=args.layers,
            drafts=args.drafts,
            distinct_layers=args.distinct_layers,
            force=args.force,
            progress=progress,
        ),
        args.target,
    )
    return 0
