"""llama.cpp behind the worker protocol; runs in the environment that `bench.cpu_llamacpp --build` made.

python llamacpp_worker.py MODEL.gguf THREADS [CONTEXT]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp as lc

sys.path.insert(0, str(Path(__file__).resolve().parent))
import protocol

path, threads = sys.argv[1], int(sys.argv[2])
context = int(sys.argv[3]) if len(sys.argv) > 3 else 8192
SEQUENCES = 16

lc.llama_backend_init()
model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
params = lc.llama_context_default_params()
params.n_ctx = context
params.n_batch = 2048
params.n_seq_max = SEQUENCES
params.kv_unified = True
params.n_threads = params.n_threads_batch = threads
ctx = lc.llama_init_from_model(model, params)
memory = lc.llama_get_memory(ctx)
batch = lc.llama_batch_init(2048, 0, 1)


def run(rows: list[tuple[int, int, int, bool]]) -> None:
    """One decode of (token, position, sequence, wants logits) rows, waited for."""
    for i, (tok, pos, seq, logits) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = tok, pos, 1
        batch.seq_id[i][0], batch.logits[i] = seq, logits
    batch.n_tokens = len(rows)
    if (status := lc.llama_decode(ctx, batch)) != 0:
        raise RuntimeError(f"llama_decode returned {status}")
    lc.llama_get_logits(ctx)


def fill(seq: int, n: int, first: int = 0) -> None:
    for start in range(first, n, 2048):
        end = min(n, start + 2048)
        run([(protocol.token(i + seq, vocab), i, seq, i == n - 1) for i in range(start, end)])


def prefill(n: int) -> dict[str, Any]:
    lc.llama_memory_clear(memory, True)
    start = time.perf_counter()
    fill(0, n)
    return {"seconds": time.perf_counter() - start, "tokens": n}


def decode(depth: int, n: int) -> dict[str, Any]:
    lc.llama_memory_clear(memory, True)
    fill(0, depth)
    run([(protocol.token(depth, vocab), depth, 0, True)])
    start = time.perf_counter()
    for i in range(depth + 1, depth + 1 + n):
        run([(protocol.token(i, vocab), i, 0, True)])
    return {"seconds": time.perf_counter() - start, "tokens": n}


def batched(width: int, n: int) -> dict[str, Any]:
    lc.llama_memory_clear(memory, True)
    for s in range(width):
        fill(s, protocol.BATCH_DEPTH)
    depth = protocol.BATCH_DEPTH
    start = time.perf_counter()
    for i in range(depth, depth + n):
        run([(protocol.token(i + s, vocab), i, s, True) for s in range(width)])
    return {"seconds": time.perf_counter() - start, "tokens": n * width}


def facts() -> dict[str, Any]:
    info = lc.llama_print_system_info().decode()
    return {"version": f"llama-cpp-python {lc.__version__}", "system": info, "rss_mib": protocol.resident_mib()}


protocol.serve({"prefill": prefill, "decode": decode, "batch": batched, "facts": facts})
