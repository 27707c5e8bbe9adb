"""ds4 behind the worker protocol.

python -m bench.peers.ds4_worker MODEL.gguf THREADS [CONTEXT] [ISA]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.peers import protocol
from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig, Row, SamplingParams


def main() -> None:
    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    context = int(sys.argv[3]) if len(sys.argv) > 3 else 8192
    isa = sys.argv[4] if len(sys.argv) > 4 else "auto"
    config = EngineConfig(model=path, ctx=context, slots=1, threads=threads, isa=isa, check_memory=False)
    engine = Engine.open(config)
    vocab = engine.info.vocab_size

    def tokens(first: int, end: int, offset: int = 0) -> list[int]:
        return [protocol.token(i + offset, vocab) for i in range(first, end)]

    def fill(session: Any, n: int, offset: int = 0) -> None:
        chunk = engine.config.prefill_chunk
        for start in range(0, n, chunk):
            end = min(n, start + chunk)
            engine.step([Row(session, tokens(start, end, offset), want_logits=end == n)])

    def prefill(n: int) -> dict[str, Any]:
        session = engine.new_session()
        start = time.perf_counter()
        fill(session, n)
        seconds = time.perf_counter() - start
        session.close()
        return {"seconds": seconds, "tokens": n}

    def decode(depth: int, n: int) -> dict[str, Any]:
        session = engine.new_session()
        fill(session, depth)
        engine.step([Row(session, tokens(depth, depth + 1), want_logits=True)])
        start = time.perf_counter()
        for i in range(depth + 1, depth + 1 + n):
            engine.step([Row(session, tokens(i, i + 1), want_logits=True)])
        seconds = time.perf_counter() - start
        session.close()
        return {"seconds": seconds, "tokens": n}

    def batched(width: int, n: int) -> dict[str, Any]:
        sessions = [engine.new_session(protocol.BATCH_DEPTH + n + 1) for _ in range(width)]
        depth = protocol.BATCH_DEPTH
        for s, session in enumerate(sessions):
            fill(session, depth, s)
        start = time.perf_counter()
        for i in range(depth, depth + n):
            engine.step([Row(x, tokens(i, i + 1, s), want_logits=True) for s, x in enumerate(sessions)])
        seconds = time.perf_counter() - start
        for session in sessions:
            session.close()
        return {"seconds": seconds, "tokens": n * width}

    def workload(width: int, prompt: int, n: int) -> dict[str, Any]:
        """What `width` streaming clients ask for: prompts first, then n sampled tokens each."""
        sessions = [engine.new_session(prompt + n + 1) for _ in range(width)]
        samplers = [engine.new_sampler(SamplingParams(temperature=0)) for _ in range(width)]
        for sampler in samplers:
            sampler.forbid(sorted(engine.tokenizer.eos_ids))
        start = time.perf_counter()
        feed = [tokens(0, prompt, 1000 * s) for s in range(width)]
        for _ in range(n):
            rows = [Row(x, f, sampler=y) for x, f, y in zip(sessions, feed, samplers, strict=True)]
            feed = [[r.token or 0] for r in engine.step(rows)]
        seconds = time.perf_counter() - start
        for session in sessions:
            session.close()
        return {"seconds": seconds, "tokens": n * width}

    def slots(width: int, n: int) -> dict[str, Any]:
        """Resident memory with `width` sessions open, before their first token and with n tokens in each."""
        sessions = [engine.new_session(n) for _ in range(width)]
        empty = protocol.resident_mib()
        fill(sessions[0], n)
        # As many rows of their own without as much arithmetic; by a file, since a buffer would count as resident.
        with tempfile.TemporaryFile() as saved:
            sessions[0].save(saved)
            for session in sessions[1:]:
                saved.seek(0)
                session.load(saved)
        full = protocol.resident_mib()
        for session in sessions:
            session.close()
        return {"empty_mib": empty, "full_mib": full}

    def facts() -> dict[str, Any]:
        return {"version": "ds4", "system": engine.backend_name, "rss_mib": protocol.resident_mib()}

    handlers = {"prefill": prefill, "decode": decode, "batch": batched, "workload": workload, "slots": slots}
    protocol.serve({**handlers, "facts": facts})


if __name__ == "__main__":
    main()
