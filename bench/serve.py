"""Load client for any OpenAI-compatible streaming server.

    # closed loop: 16 clients, each sends its next request when the last one ended
    python -m bench.serve --url http://127.0.0.1:8000 --concurrency 16 --requests 64 --max-tokens 64 --exact
    # open loop: Poisson arrivals, latencies counted from the moment a request was due
    python -m bench.serve --url http://127.0.0.1:8000 --rate 2 --requests 60 --max-tokens 64

Measured per complete request, from the moment it was due (closed loop: sent):

    TTFT  first event that carries text        ITL   gap between two events that carry text
    E2EL  the end marker `data: [DONE]`         TPOT  (E2EL - TTFT) / (output tokens - 1)

A stream counts only if the status is 200, every event parses, none is an error, a finish reason and `[DONE]` came,
the body ended as its HTTP framing says, and with --exact the token count is --max-tokens. Everything else is
rejected: left out of the latencies, listed by reason, and the exit status is 1.

The client speaks HTTP by itself and reads an answer when it has ended, so that it takes little of the cores that it
shares with the server; its own CPU seconds stand beside the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from bench import report

now = time.perf_counter

VOCABULARY = (
    "river stone window garden letter number simple answer question morning history science engine signal weight "
    "vector matrix table reader writer bridge island market village winter summer paper copper silver forest "
    "mountain valley ocean harbor station journey message token stream cache prefix batch memory thread core"
)
WORDS = VOCABULARY.split()


class Rejected(Exception):
    """A response that does not count; the text is the reason."""


@dataclass(slots=True)
class Timing:
    """One complete request: seconds from when it was due; `end` on the clock of `now`."""

    ttft: float
    e2el: float
    end: float
    itl: list[float]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def tpot(self) -> float | None:
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(slots=True)
class Events:
    """What an SSE body has said so far."""

    text_times: list[float] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    done_at: float | None = None
    tail: bytes = b""

    def feed(self, data: bytes, t: float) -> None:
        *events, self.tail = (self.tail + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._data(line[5:].strip(), t)

    def _data(self, payload: bytes, t: float) -> None:
        if self.done_at is not None:
            raise Rejected("event after [DONE]")
        if payload == b"[DONE]":
            self.done_at = t
            return
        try:
            body = json.loads(payload)
        except ValueError:
            raise Rejected("event is not JSON") from None
        if body.get("error"):
            raise Rejected(f"error event: {str(body['error'])[:80]}")
        for choice in body.get("choices") or ():
            delta = choice.get("delta") or choice
            if any(delta.get(k) for k in ("content", "reasoning_content", "reasoning", "text", "tool_calls")):
                self.text_times.append(t)
            self.finish = choice.get("finish_reason") or self.finish
        self.usage = body.get("usage") or self.usage


Pieces = list[tuple[float, bytes]]
"""A response as it came: when, and what."""


class Connection(asyncio.Protocol):
    """One keep-alive connection. Keeps what comes and when, and reads it only when the response has ended: on a machine
    that it shares with the server, a client that thinks about every event as it comes slows down what it measures."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pieces: Pieces = []
        self._tail = b""
        self._chunked = False
        self._lost = True
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._lost = False

    def data_received(self, data: bytes) -> None:
        if not self._pieces:
            self._chunked = chunked(data)
        self._pieces.append((now(), data))
        self._tail = data if len(data) >= len(LAST_CHUNK) else (self._tail + data)[-len(LAST_CHUNK) :]
        if not self._chunked or self._tail.endswith(LAST_CHUNK):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._end()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def exchange(self, host: str, port: int, payload: bytes) -> Pieces:
        """Sends a request; its response, or what came of it. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._lost:
            await loop.create_connection(lambda: self, host, port)
        assert self._transport is not None
        self._pieces, self._tail = [], b""
        self._transport.write(payload)
        while not self._lost and not complete(self._pieces):
            self._ended = loop.create_future()
            await self._ended
        return self._pieces

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._lost = True


LAST_CHUNK = b"\r\n0\r\n\r\n"


def chunked(head: bytes) -> bool:
    return b"\r\n\r\n" in head and b"transfer-encoding: chunked" in head.partition(b"\r\n\r\n")[0].lower()


def complete(pieces: Pieces) -> bool:
    """Is it a whole response? One without a length ends with its connection."""
    raw = b"".join(data for _, data in pieces)
    head, separator, body = raw.partition(b"\r\n\r\n")
    if not separator:
        return False
    if chunked(raw):
        return raw.endswith(LAST_CHUNK)
    length = head_fields(head).get(b"content-length")
    return length is not None and len(body) >= int(length)


def head_fields(head: bytes) -> dict[bytes, bytes]:
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def read_response(pieces: Pieces) -> Events:
    """The events of a response, each at the time when its chunk was complete. Raises Rejected."""
    raw = b"".join(data for _, data in pieces)
    ends = list(itertools.accumulate(len(data) for _, data in pieces))

    def arrived(offset: int) -> float:
        """When the bytes before `offset` were all there."""
        return pieces[bisect.bisect_left(ends, offset)][0]

    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not separator:
        raise Rejected("no response")
    status, position = int(head.split(None, 2)[1]), len(head) + 4
    if status != 200:
        raise Rejected(f"status {status}: {raw[position : position + 160].decode('utf-8', 'replace')}")
    events = Events()
    if not chunked(raw):
        events.feed(raw[position:], arrived(len(raw)))
        return events
    while True:
        end = raw.find(b"\r\n", position)
        size = int(raw[position:end].split(b";")[0], 16) if end > position else -1
        position = end + 2 + size + 2
        if size < 0 or position > len(raw):
            raise Rejected("body cut short")
        if size == 0:
            return events
        events.feed(raw[end + 2 : position - 2], arrived(position))


@dataclass
class Run:
    """One load: the requests to send, the outcomes."""

    args: argparse.Namespace
    answers: list[tuple[Pieces, float]] = field(default_factory=list)
    """And when each request was due."""
    done: list[Timing] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        url = urlsplit(self.args.url)
        self.host, self.port = url.hostname or "127.0.0.1", url.port or 80
        self.path = url.path.rstrip("/") + "/v1/chat/completions"
        self.rng = random.Random(self.args.seed)
        self.idle: list[Connection] = []
        shared = random.Random(self.args.seed + 7)
        self.prefix = " ".join(shared.choice(WORDS) for _ in range(self.args.shared_prefix))

    def payload(self) -> bytes:
        a = self.args
        if a.prompt_file:
            prompt = Path(a.prompt_file).read_text()
        else:
            words = " ".join(self.rng.choice(WORDS) for _ in range(a.input_words))
            prompt = f"{self.prefix} {words}".strip()
        body: dict[str, Any] = {
            "model": a.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": a.max_tokens,
            "temperature": a.temperature,
            "messages": [{"role": "user", "content": prompt}],
        }
        if a.exact:
            body["ignore_eos"] = True
        if a.extra:
            body.update(json.loads(a.extra))
        data = json.dumps(body).encode()
        key = f"Authorization: Bearer {a.api_key}\r\n" if a.api_key else ""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(data)}\r\n{key}\r\n"
        )
        return head.encode() + data

    async def one(self, payload: bytes, due: float) -> None:
        connection = self.idle.pop() if self.idle else Connection()
        try:
            exchange = connection.exchange(self.host, self.port, payload)
            self.answers.append((await asyncio.wait_for(exchange, self.args.timeout), due))
            self.idle.append(connection)
            return
        except asyncio.TimeoutError:
            self.rejected["timeout"] += 1
        except OSError as e:
            self.rejected[f"connection: {type(e).__name__}"] += 1
        connection.close()

    def read(self) -> None:
        """Sorts the answers into those that count and those that do not."""
        for pieces, due in self.answers:
            try:
                self.done.append(self.judge(read_response(pieces), due))
            except Rejected as e:
                self.rejected[str(e)] += 1

    def judge(self, events: Events, due: float) -> Timing:
        if events.tail.strip():
            raise Rejected("bytes after the last event")
        if events.done_at is None:
            raise Rejected("no [DONE]")
        if events.finish not in ("stop", "length", "tool_calls"):
            raise Rejected(f"finish_reason {events.finish}")
        if not events.text_times:
            raise Rejected("no text")
        tokens = events.usage.get("completion_tokens")
        if not isinstance(tokens, int) or not 1 <= tokens <= self.args.max_tokens:
            raise Rejected(f"usage.completion_tokens {tokens!r}")
        if self.args.exact and tokens != self.args.max_tokens:
            raise Rejected(f"tokens {tokens} != {self.args.max_tokens}")
        times = events.text_times
        return Timing(
            ttft=times[0] - due,
            e2el=events.done_at - due,
            end=events.done_at,
            itl=[b - a for a, b in itertools.pairwise(times)],
            prompt_tokens=events.usage.get("prompt_tokens", 0),
            cached_tokens=(events.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            output_tokens=tokens,
        )

    async def drive(self) -> float:
        """Sends everything; returns the moment of the first request."""
        a = self.args
        for _ in range(a.warmup):
            await self.one(self.payload(), now())
        self.answers.clear()
        self.rejected.clear()
        payloads = [self.payload() for _ in range(a.requests)]
        start = now()
        if a.rate:
            tasks, due = [], start
            for p in payloads:
                due += self.rng.expovariate(a.rate)
                await asyncio.sleep(max(0.0, due - now()))
                tasks.append(asyncio.create_task(self.one(p, due)))
            await asyncio.gather(*tasks)
        else:
            pending = iter(payloads)

            async def client() -> None:
                for p in pending:
                    await self.one(p, now())

            await asyncio.gather(*(client() for _ in range(a.concurrency)))
        for c in self.idle:
            c.close()
        return start


def percentile(values: Sequence[float], q: float) -> float:
    """Nearest-rank percentile with the index clamped to the last value; `values` sorted."""
    return values[min(int(q / 100 * len(values)), len(values) - 1)] if values else float("nan")


def summary(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    v = sorted(1e3 * x for x in values)
    mean = sum(v) / len(v) if v else float("nan")
    return {"mean": mean, **{f"p{q}": percentile(v, q) for q in (50, 90, 95, 99)}}


def process_facts(pid: int) -> tuple[float, float]:
    """(CPU seconds of all threads, resident MiB) of a process on this machine."""
    ticks = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        ticks += int((task / "schedstat").read_text().split()[0])
    status = Path(f"/proc/{pid}/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return ticks / 1e9, rss / 1024


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs one load and returns its numbers."""
    run = Run(args)
    cpu = process_facts(args.pid)[0] if args.pid else 0.0
    own = time.process_time()
    start = uvloop.run(run.drive())
    own = time.process_time() - own
    run.read()
    wall = max((t.end for t in run.done), default=now()) - start
    output = sum(t.output_tokens for t in run.done)
    prompt = sum(t.prompt_tokens for t in run.done)
    result: dict[str, Any] = {
        "mode": f"poisson {args.rate}/s" if args.rate else f"closed x{args.concurrency}",
        "complete": len(run.done),
        "rejected": dict(run.rejected),
        "wall_s": wall,
        "requests_per_s": len(run.done) / wall,
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": sum(t.cached_tokens for t in run.done),
        "output_tokens_per_s": output / wall,
        "total_tokens_per_s": (output + prompt) / wall,
        "ttft_ms": summary([t.ttft for t in run.done]),
        "itl_ms": summary([g for t in run.done for g in t.itl]),
        "tpot_ms": summary([t.tpot for t in run.done if t.tpot is not None]),
        "e2el_ms": summary([t.e2el for t in run.done]),
        "client_cpu_s": own,
    }
    if args.pid:
        after, rss = process_facts(args.pid)
        result["server_cpu_ms_per_token"] = 1e3 * (after - cpu) / max(1, output)
        result["server_rss_mib"] = rss
    return result


def print_result(r: dict[str, Any]) -> None:
    print(
        f"{r['mode']}: {r['complete']} complete, {sum(r['rejected'].values())} rejected, {r['wall_s']:.1f} s, "
        f"{r['requests_per_s']:.2f} req/s, {r['output_tokens_per_s']:.1f} output tok/s, "
        f"{r['total_tokens_per_s']:.1f} total tok/s"
    )
    names = ("ttft", "itl", "tpot", "e2el")
    rows = [(n.upper(), *(r[f"{n}_ms"][p] for p in ("mean", "p50", "p95", "p99"))) for n in names]
    print(report.table(("ms", "mean", "p50", "p95", "p99"), rows))
    if "server_rss_mib" in r:
        print(f"server: {r['server_cpu_ms_per_token']:.2f} CPU ms per token, {r['server_rss_mib']:.0f} MiB resident")
    for reason, n in r["rejected"].items():
        print(f"rejected {n}: {reason}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="bench.serve", description="Load client for OpenAI-compatible streaming servers.")
    p.add_argument("--url", default="http://127.0.0.1:8000", help="base URL without /v1 (default: %(default)s)")
    p.add_argument("--model", default="ds4")
    p.add_argument("--api-key")
    p.add_argument("--concurrency", type=int, default=8, help="closed-loop clients (default: %(default)s)")
    p.add_argument("--rate", type=float, default=0.0, help="requests per second, Poisson; 0: closed loop")
    p.add_argument("--requests", type=int, default=32)
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--input-words", type=int, default=64)
    p.add_argument("--shared-prefix", type=int, default=0, help="words that all prompts begin with")
    p.add_argument("--prompt-file", help="use this text as every prompt")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--exact", action="store_true", help="send ignore_eos and demand exactly --max-tokens")
    p.add_argument("--extra", help="JSON object merged into every request")
    p.add_argument("--seed", type=int, default=1, help="prompts; use a new one per run or the prompt cache answers")
    p.add_argument("--warmup", type=int, default=1)
    p.add_argument("--timeout", type=float, default=600.0)
    p.add_argument("--pid", type=int, help="server process on this machine: report its CPU time and memory")
    p.add_argument("--json", type=Path, help="write the numbers to this file")
    return p


def main() -> int:
    args = parser().parse_args()
    result = measure(args)
    print_result(result)
    if args.json:
        args.json.write_text(json.dumps({"machine": report.machine(), **result}, indent=1) + "\n")
    return 1 if result["rejected"] or not result["complete"] else 0


if __name__ == "__main__":
    sys.exit(main())
