"""Writes a GGUF file in another type with llama.cpp's own quantiser; runs in the environment of `llamacpp_worker.py`.

python llamacpp_quantize.py SRC.gguf DST.gguf TYPE        TYPE: Q8_0, Q4_K_M, BF16, ... (LLAMA_FTYPE_MOSTLY_*)

Where rows are no multiple of a type's block, llama.cpp falls back to another type for that matrix.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp as lc


def main() -> int:
    source, target, name = sys.argv[1:]
    known = {n.removeprefix("LLAMA_FTYPE_MOSTLY_"): n for n in dir(lc) if n.startswith("LLAMA_FTYPE_MOSTLY_")}
    if name not in known:
        sys.exit(f"type {name} is none of {', '.join(known)}")
    params = lc.llama_model_quantize_default_params()
    params.ftype = getattr(lc, known[name])
    params.allow_requantize = True
    # Written beside and moved: a file that is there is whole.
    part = f"{target}.part"
    status = int(lc.llama_model_quantize(source.encode(), part.encode(), ctypes.byref(params)))
    if status == 0:
        Path(part).rename(target)
    return status


if __name__ == "__main__":
    sys.exit(main())
