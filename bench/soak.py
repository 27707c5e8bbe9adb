"""Minutes of everything at once against a running ds4-server: nothing may fail, grow or change.

    ds4-server --model M.gguf --batched-session 16 --kv-disk-dir DIR --kv-cache-min-tokens 64 \\
        --kv-cache-boundary-align-tokens 64 --kv-cache-continued-interval-tokens 256 &
    python -m bench.soak --url http://127.0.0.1:8000 --pid $! --seconds 480

Clients come and go with new conversations, later turns of old ones (live, from disk, or evaluated again), prompts that
begin alike, several answers to one prompt (`n`), and connections that are dropped in the middle. All the while one
prompt is asked again and again, alone and among the others: its greedy text must stay the same. Memory of the server
process and of the GPU is watched: its peak in the last third of the time may not lie above that of the first two by
more than the bounds. Exit status 1 for any failure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from bench import report
from bench.serve import WORDS, Events, Rejected, now, summary

KINDS = {"new": 5, "turn": 6, "alike": 3, "several": 1, "dropped": 4, "long": 2}
"""What a client does next, and how often."""


@dataclass(slots=True)
class Spoken(Events):
    """Events with what they say, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    drop_after: int = 0

    def _data(self, payload: bytes, t: float) -> None:
        Events._data(self, payload, t)
        if payload == b"[DONE]":
            return
        for choice in json.loads(payload).get("choices") or ():
            delta = choice.get("delta") or {}
            said = "".join(delta.get(k) or "" for k in ("reasoning_content", "content"))
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + said
        if self.drop_after and len(self.text_times) >= self.drop_after:
            raise Dropped


class Dropped(Exception):
    """The client has heard enough."""


async def stream(host: str, port: int, body: bytes, events: Events) -> None:
    """One request on a connection of its own; feeds the events as they come. A drop closes it at once."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.split(b"\r\n", 1)[0]:
            raise Rejected(f"{answer[:40]!r} {(await reader.read(200))!r}")
        if b"chunked" in answer.lower():
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                events.feed((await reader.readexactly(size + 2))[:-2], now())
        else:
            while data := await reader.read(1 << 16):
                events.feed(data, now())
    finally:
        writer.close()


def words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


@dataclass
class Soak:
    args: argparse.Namespace
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    itl: list[float] = field(default_factory=list)
    conversations: list[list[dict[str, str]]] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)
    tokens: int = 0
    fixed: str | None = None

    def __post_init__(self) -> None:
        url = urlsplit(self.args.url)
        self.host, self.port = url.hostname or "127.0.0.1", url.port or 80
        self.rng = random.Random(self.args.seed)
        self.prefix = words(random.Random(self.args.seed + 1), 60)
        self.end = now() + self.args.seconds

    async def ask(self, messages: list[dict[str, str]], *, drop_after: int = 0, **options: Any) -> Spoken:
        """One streamed answer; raises what is wrong with it."""
        body = {"model": "ds4", "stream": True, "stream_options": {"include_usage": True}, "messages": messages}
        data = json.dumps({**body, "max_tokens": self.args.max_tokens, **options}).encode()
        events = Spoken(drop_after=drop_after)
        try:
            await asyncio.wait_for(stream(self.host, self.port, data, events), 120)
        except Dropped:
            return events
        if events.done_at is None or events.finish not in ("stop", "length"):
            raise Rejected(f"ended with {events.finish}, [DONE] {events.done_at is not None}")
        self.itl += [b - a for a, b in itertools.pairwise(events.text_times)]
        self.tokens += int(events.usage.get("completion_tokens") or 0)
        return events

    def keep(self, messages: list[dict[str, str]], events: Spoken) -> None:
        self.conversations.append([*messages, {"role": "assistant", "content": events.texts.get(0, "")}])
        if len(self.conversations) > self.args.conversations:
            self.conversations.pop(self.rng.randrange(len(self.conversations)))

    async def act(self, kind: str) -> None:
        rng = self.rng
        sampling = {"temperature": rng.choice([0.0, 0.7, 1.0]), "seed": rng.randrange(1 << 30)}
        fresh = [{"role": "user", "content": words(rng, rng.choice([8, 24, 60]))}]
        if kind == "turn" and self.conversations:
            old = rng.choice(self.conversations)
            messages = [*old, {"role": "user", "content": words(rng, 6)}]
            if sum(len(m["content"]) for m in messages) < 4 * self.args.long:
                self.keep(messages, await self.ask(messages, **sampling))
        elif kind == "alike":
            messages = [{"role": "user", "content": f"{self.prefix} {words(rng, 5)}"}]
            self.keep(messages, await self.ask(messages, **sampling))
        elif kind == "several":
            events = await self.ask(fresh, n=2, **sampling)
            if set(events.texts) - {0, 1}:
                raise Rejected(f"choices {sorted(events.texts)} of 2")
        elif kind == "dropped":
            await self.ask(fresh, drop_after=rng.randint(1, max(2, self.args.max_tokens // 2)), **sampling)
        elif kind == "long":
            messages = [{"role": "user", "content": words(rng, self.args.long // 8)}]
            self.keep(messages, await self.ask(messages, **sampling))
        else:
            self.keep(fresh, await self.ask(fresh, **sampling))

    async def guarded(self, kind: str, work: Any) -> None:
        try:
            await work
            self.done[kind] += 1
        except Rejected as e:
            self.failed[f"{kind}: {e}"] += 1
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as e:
            self.failed[f"{kind}: {type(e).__name__}"] += 1

    async def client(self) -> None:
        kinds, weights = list(KINDS), list(KINDS.values())
        while now() < self.end:
            [kind] = self.rng.choices(kinds, weights)
            await self.guarded(kind, self.act(kind))
            if self.rng.random() < 0.2:
                await asyncio.sleep(self.rng.random())

    async def ask_again(self) -> None:
        messages = [{"role": "user", "content": "The same question, asked again: what stays the same?"}]
        events = await self.ask(messages, temperature=0.0, ignore_eos=True)
        text = events.texts.get(0, "")
        if self.fixed is None:
            self.fixed = text
        elif text != self.fixed:
            raise Rejected(f"the fixed prompt's text changed: {text[:60]!r}, not {self.fixed[:60]!r}")

    async def repeat(self) -> None:
        while now() < self.end:
            await self.guarded("fixed", self.ask_again())
            await asyncio.sleep(1)

    async def watch(self) -> None:
        start = now()
        while now() < self.end:
            facts = await asyncio.to_thread(memory_of, self.args.pid)
            self.memory.append({"t": now() - start, **facts})
            await asyncio.sleep(self.args.seconds / 240)

    async def run(self) -> None:
        await self.guarded("fixed", self.ask_again())
        work = [self.client() for _ in range(self.args.clients)]
        await asyncio.gather(self.watch(), self.repeat(), *work)
        await self.guarded("fixed", self.ask_again())  # once more alone

    def growth(self, name: str) -> float:
        """MiB that the last third's peak lies above the one of the first two."""
        values = [m[name] for m in self.memory]
        border = 2 * len(values) // 3
        return max(values[border:]) - max(values[:border])


def memory_of(pid: int) -> dict[str, float]:
    """MiB: the process's anonymous memory, and the GPU's where there is one."""
    status = Path(f"/proc/{pid}/status").read_text()
    facts = {"host_mib": int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) / 1024}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        facts["device_mib"] = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    return facts


def tiers(url: str) -> dict[str, float]:
    """Generations by the cache tier that served them."""
    with urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    return {t: float(n) for t, n in re.findall(r'ds4_cache_lookups_total\{tier="([^"]+)"\} ([\d.e+]+)', text)}


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.soak", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--url", default="http://127.0.0.1:8000")
    p.add_argument("--pid", type=int, required=True, help="of the server, on this machine")
    p.add_argument("--seconds", type=float, default=480.0)
    p.add_argument("--clients", type=int, default=16)
    p.add_argument("--max-tokens", type=int, default=24)
    p.add_argument("--long", type=int, default=800, help="characters of long prompts; four times as many fit a context")
    p.add_argument("--conversations", type=int, default=64, help="that later turns go on from")
    p.add_argument("--host-growth-mib", type=float, default=64.0)
    p.add_argument("--device-growth-mib", type=float, default=64.0)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--json", type=Path, help="write the numbers to this file")
    args = p.parse_args()
    before = tiers(args.url)
    soak = Soak(args)
    asyncio.run(soak.run())
    served = {t: n - before.get(t, 0.0) for t, n in tiers(args.url).items()}
    bounds = {"host_mib": args.host_growth_mib, "device_mib": args.device_growth_mib}
    growth = {name: soak.growth(name) for name in bounds if name in soak.memory[0]}
    for name, bound in bounds.items():
        if growth.get(name, 0.0) > bound:
            soak.failed[f"{name} grew by {growth[name]:.0f}, allowed are {bound:.0f}"] += 1
    itl = summary(soak.itl)
    rate = soak.tokens / args.seconds
    print(f"{sum(soak.done.values())} requests in {args.seconds:.0f} s, {rate:.0f} tokens/s: {dict(soak.done)}")
    print(f"served from: { {t: int(n) for t, n in served.items() if n} }")
    print(f"inter-token ms: mean {itl['mean']:.1f}, p50 {itl['p50']:.1f}, p99 {itl['p99']:.1f}")
    for name, value in growth.items():
        seen = [m[name] for m in soak.memory]
        print(f"{name}: first {seen[0]:.0f}, peak {max(seen):.0f}, last {seen[-1]:.0f}; growth of the peak {value:.0f}")
    for reason, n in soak.failed.items():
        print(f"FAILED {n} x {reason}", file=sys.stderr)
    if args.json:
        facts = {"done": dict(soak.done), "failed": dict(soak.failed), "served_from": served, "growth_mib": growth}
        numbers = {"seconds": args.seconds, "tokens": soak.tokens, "itl_ms": itl, "memory": soak.memory}
        args.json.write_text(json.dumps({"machine": report.machine(), **facts, **numbers}, indent=1) + "\n")
    return 1 if soak.failed or not soak.done else 0


if __name__ == "__main__":
    sys.exit(main())
