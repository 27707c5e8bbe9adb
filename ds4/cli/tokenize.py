"""`ds4 tokenize [FILE]`: text on standard input to token ids, and ids back to text."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from ds4.engine.demo import demo_model_path
from ds4.engine.model_file import read_model_file
from ds4.engine.tokenizer import Tokenizer
from ds4.errors import ConfigError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "tokenize",
        help="text on standard input to token ids and back",
        description="Reads text from standard input and prints one token per line: id, tab, text as a JSON string. "
        "A summary goes to standard error.",
    )
    p.add_argument("file", type=Path, nargs="?", help="GGUF file or safetensors directory (default: the demo model)")
    p.add_argument("--specials", action="store_true", help="names of special tokens in the text become these tokens")
    p.add_argument("--decode", action="store_true", help="read token ids instead and write their text")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    tokenizer = read_model_file(demo_model_path() if args.file is None else args.file).tokenizer()
    data = sys.stdin.buffer.read()
    if args.decode:
        return _decode(tokenizer, _parse_ids(data, tokenizer.vocab_size), args.json)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"standard input is not UTF-8 at byte {e.start}") from None
    ids = tokenizer.encode_with_specials(text) if args.specials else tokenizer.encode(text)
    exact = tokenizer.decode(ids) == data
    if args.json:
        _print_json({"ids": ids, "n_tokens": len(ids), "n_bytes": len(data), "round_trip": exact})
        return 0
    for token in ids:
        print(f"{token}\t{json.dumps(_text(tokenizer, token), ensure_ascii=False)}")
    ratio = f", {len(data) / len(ids):.2f} bytes per token" if ids else ""
    back = "the ids give the text back" if exact else "the vocabulary cannot spell all of the text"
    print(f"{len(ids)} tokens, {len(data)} bytes{ratio}; {back}", file=sys.stderr)
    return 0


def _decode(tokenizer: Tokenizer, ids: list[int], as_json: bool) -> int:
    data = tokenizer.decode(ids)
    if as_json:
        _print_json({"text": data.decode("utf-8", "replace"), "n_tokens": len(ids), "n_bytes": len(data)})
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    return 0


def _parse_ids(data: bytes, vocab: int) -> list[int]:
    """Ids separated by white space or commas, brackets allowed."""
    words = re.sub(rb"[\[\],]", b" ", data).split()
    ids = []
    for word in words:
        if not re.fullmatch(rb"\d{1,9}", word) or int(word) >= vocab:
            shown = word[:40].decode("ascii", "backslashreplace")
            raise ConfigError(f"standard input: {shown!r} is not a token id from 0 to {vocab - 1}")
        ids.append(int(word))
    return ids


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")


def _print_json(value: dict[str, object]) -> None:
    print(json.dumps(value, ensure_ascii=False))
