"""Which element type a tensor gets: tensor classes, the types a user may ask for, and what is never converted."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields

from ds4.engine.tensors import DType
from ds4.errors import ConfigError

# The first match decides. Names as in GGUF files.
_CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("embedding", re.compile(r"token_embd\.weight")),
    ("output", re.compile(r"output\.weight")),
    ("experts_down", re.compile(r"(?:blk|mtp)\.\d+\.ffn_down_exps\.weight")),
    ("experts", re.compile(r"(?:blk|mtp)\.\d+\.ffn_(gate|up)_exps\.weight")),
    (
        "dense",
        re.compile(r"(?:blk|mtp)\.\d+\.(attn_(q|k|v|output|q_a|q_b|kv|output_a|output_b)|ffn_\w+_shexp)\.weight"),
    ),
    ("dense", re.compile(r"(?:blk|mtp)\.\d+\.ffn_(gate|up|down)\.weight")),
    ("dense", re.compile(r"mtp\.\d+\.(e_proj|h_proj|eh_proj|main_proj)\.weight")),
    ("embedding", re.compile(r"mtp\.\d+\.(embed_tokens|markov_head\.markov_w1)\.weight")),
    ("output", re.compile(r"mtp\.\d+\.(shared_head_head|markov_head\.markov_w2)\.weight")),
)


@dataclass(frozen=True, slots=True)
class TypePlan:
    """Element type of each class of matrices; None keeps what the source has. Vectors and tables are never touched."""

    embedding: DType | None = None
    output: DType | None = None
    experts: DType | None = None
    """Gate and up matrices of routed experts."""
    experts_down: DType | None = None
    dense: DType | None = None
    """Projections of attention, feed-forward matrices, shared experts."""
    other: DType | None = None
    """Small matrices: routers, compressors, indexers, hyper-connections."""

    def of(self, name: str, shape: tuple[int, ...], source: DType) -> DType:
        """The type to write a tensor in. Raises ConfigError where its rows are not whole blocks."""
        if len(shape) < 2 or source is DType.I32:
            return source
        kind = class_of(name)
        wanted: DType | None = getattr(self, kind)
        if wanted is None:
            return source
        if shape[-1] % wanted.block_elements:
            raise ConfigError(
                f"{name}: rows of {shape[-1]} are not whole {wanted.name} blocks of {wanted.block_elements}; "
                f"choose another type with --{kind.replace('_', '-')}"
            )
        return wanted


def class_of(name: str) -> str:
    """The name of the field of `TypePlan` that decides about a tensor."""
    return next((kind for kind, pattern in _CLASSES if pattern.fullmatch(name)), "other")


def add_type_flags(p: argparse.ArgumentParser, allowed: tuple[DType, ...], default: str) -> None:
    """`--type` for all big matrices and one flag per class, which wins over it."""
    names = ", ".join(t.name for t in allowed)
    group = p.add_argument_group("element types", f"One of {names}.")
    group.add_argument("--type", metavar="TYPE", help=f"of all classes but small matrices (default: {default})")
    for flag, text in (
        ("--experts", "routed experts"),
        ("--experts-down", "their down projections (default: as --experts)"),
        ("--dense", "attention, feed-forward and shared experts"),
        ("--embedding", "token embedding"),
        ("--output", "output head"),
        ("--other", "small matrices: routers, compressors, indexers, hyper-connections"),
    ):
        group.add_argument(flag, metavar="TYPE", help=text)


def type_plan(args: argparse.Namespace, allowed: tuple[DType, ...], default: TypePlan) -> TypePlan:
    """The plan that the flags of `add_type_flags` ask for. Raises ConfigError naming the flag."""

    def asked(flag: str) -> DType | None:
        text = getattr(args, flag)
        if text is None:
            return None
        found = next((t for t in allowed if t.name == text.upper()), None)
        if found is None:
            known = ", ".join(t.name for t in allowed)
            raise ConfigError(f"--{flag.replace('_', '-')} {text}: expected one of {known}")
        return found

    everything = asked("type")
    chosen: dict[str, DType | None] = {}
    for field in fields(TypePlan):
        own = asked(field.name)
        if own is None and field.name == "experts_down":
            own = asked("experts")
        if own is None and field.name != "other":
            own = everything
        chosen[field.name] = getattr(default, field.name) if own is None else own
    return TypePlan(**chosen)
