"""Cost of encoding with the demo model's vocabulary: cold text, a conversation that grows, and single tokens.

Run: `python bench/tokenizer.py [TEXT FILES]`. The peer is the same library called with offsets, as most programs do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from ds4.engine.demo import demo_model_path
from ds4.engine.model_file import open_model_file


def cpu_seconds(call: Callable[[], object], n: int) -> float:
    best = float("inf")
    for _ in range(n):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def main() -> None:
    files = [Path(a) for a in sys.argv[1:]] or sorted(Path(__file__).parents[1].glob("ds4/*/*.py"))
    text = "".join(f.read_text("utf-8", "replace") for f in files)
    mb = len(text.encode()) / 1e6
    tokenizer = open_model_file(demo_model_path()).tokenizer()
    library = tokenizer._encoder
    opened = cpu_seconds(lambda: open_model_file(demo_model_path()).tokenizer(), 5)
    print(f"{'open model and tokenizer':44}{opened * 1e3:10.1f} ms CPU")
    ours = cpu_seconds(lambda: tokenizer.encode(text), 3)
    theirs = cpu_seconds(lambda: library.encode(text, add_special_tokens=False).ids, 3)
    print(f"{'encode, ' + f'{mb:.2f} MB of source':44}{mb / ours:10.2f} MB/s CPU")
    print(f"{'library with offsets':44}{mb / theirs:10.2f} MB/s CPU")
    tokenizer.encode_segments([text])
    again = cpu_seconds(lambda: tokenizer.encode_segments(["".join(text)]), 20)
    print(f"{'the same text as a known segment':44}{mb / again:10.0f} MB/s CPU")
    ids = tokenizer.encode(text)
    single = cpu_seconds(lambda: [tokenizer.token_bytes(i) for i in ids], 5)
    whole = cpu_seconds(lambda: tokenizer.decode(ids), 5)
    print(f"{'token_bytes, per token':44}{single / len(ids) * 1e9:10.0f} ns CPU")
    print(f"{'decode, per token':44}{whole / len(ids) * 1e9:10.0f} ns CPU")


if __name__ == "__main__":
    main()
