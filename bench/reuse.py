"""How much of what agents send is evaluated twice: traces through the whole server in three dialects, and a peer.

    python -m bench.reuse                             # scripted DeepSeek model, all dialects; exit status 1 on a miss
    python -m bench.reuse --model v4.gguf             # a real one: its state, its tokens, and the script's words
    python -m bench.reuse --peer PATH/llama-server    # then the demo model beside llama.cpp's server, Chat only

A trace is what one kind of client does; each runs as Chat, Responses and Messages, over HTTP. `ideal` is what no server
can avoid: of each prompt, what is neither the beginning of a prompt before it nor the answer that it continues.
`evaluated` is prompt tokens less cached ones, as the usage says. Claims: evaluated <= 1.05 ideal while the server
lives, <= 1.15 across a restart. The scripted model's sessions can be cut anywhere; those of a real DeepSeek V4 cannot.

The peer gets those traces that its API can express, with the demo model, in turn with this server on the same file; a
restart is none of them (it keeps nothing), tools and thinking neither (the model has none).
"""

from __future__ import annotations

import argparse
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench import report
from ds4.engine.demo import demo_model_path
from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig, EngineLike, Row, RowResult, SamplerLike, SamplingParams
from ds4.prompt.types import Conversation, Message
from ds4.server.api.prepare import Preparer
from tests.support.agents import (
    DIALECTS,
    TRACES,
    Chat,
    Client,
    Ours,
    Say,
    Talk,
    Trace,
    compaction,
    edit,
    plain_agents,
    regenerate,
    scripted,
)

SYSTEM_TOKENS = 4000


class Peer:
    """llama.cpp's server on the demo model. Prompts are rendered here, for the ideal only."""

    def __init__(
        self, program: Path, slots: int, ctx: int, max_tokens: int, preparer: Preparer, engine: Engine
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [str(program), "-m", str(demo_model_path()), "--port", str(self._port), "-np", str(slots)]
        command += ["-c", str(slots * ctx), "-t", "2", "--no-kv-unified", "--log-disable"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.max_tokens = max_tokens
        self._preparer, self._tokenizer = preparer, engine.tokenizer
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=900)
        deadline = time.monotonic() + 120
        while True:
            try:
                if self._http.get("/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("llama-server did not start")
            time.sleep(0.2)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(path, json=body).raise_for_status().json()
        timings = answer["timings"]
        cached = answer["usage"]["prompt_tokens"] - timings["prompt_n"]
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        return answer

    def last_prompt(self, talk: Talk, client: Client) -> str:
        messages = [Message("system", talk.system), *(Message(i["role"], i["content"]) for i in talk.items)]
        return self._preparer.renderer.render(Conversation(tuple(messages))).text

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode_with_specials(text))

    def stop(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(30)


PEER_TRACES: dict[str, Trace] = {
    "main agent, 3 sub-agents": plain_agents,
    "regenerate": regenerate,
    "edit of an earlier turn": edit,
    "compaction": compaction,
}


class Dictated:
    """A real model that says what it is told: it evaluates every token, its state is its own, the words are known."""

    def __init__(self, engine: Engine, say: Callable[[str], list[str]]) -> None:
        self._engine, self._say = engine, say
        self._left: dict[int, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def most_drafts(self) -> int:
        return 0

    def new_sampler(self, params: SamplingParams) -> SamplerLike:
        sampler = self._engine.new_sampler(params)
        self._left.pop(id(sampler), None)
        return sampler

    def step(self, rows: Sequence[Row], *, wake: int | None = None) -> list[RowResult]:
        results = self._engine.step(rows, wake=wake)
        return [result if row.sampler is None else self._word(row) for row, result in zip(rows, results, strict=True)]

    def _word(self, row: Row) -> RowResult:
        left = self._left.get(id(row.sampler))
        if left is None:
            tokenizer = self._engine.tokenizer
            prompt = tokenizer.decode(row.session.tokens.tolist()).decode("utf-8", "replace")
            said = tokenizer.encode_with_specials("".join(self._say(prompt)))
            left = self._left[id(row.sampler)] = [*said, min(tokenizer.eos_ids)]
        return RowResult(left.pop(0))


def played(trace: Trace, client: Client, system: str, serve: Callable[[Path], Ours | Peer]) -> str:
    """The trace against a server with a directory of its own: tokens evaluated / ideal = ratio."""
    with tempfile.TemporaryDirectory() as directory:
        client.server = serve(Path(directory))
        try:
            trace(client, random.Random(1), system)
        finally:
            client.server.stop()
    counter = client.counter
    return f"{counter.evaluated} / {counter.ideal} = {counter.ratio:.3f}"


def economy(
    make: Callable[[], EngineLike],
    system: str,
    *,
    names: Sequence[str] = tuple(TRACES),
    dialects: Sequence[str] = tuple(DIALECTS),
    disk: bool = True,
) -> bool:
    """The traces `names`, as a table; whether all claims hold."""
    rows: list[list[object]] = []
    holds = True
    for name in names:
        trace, habits, limit = TRACES[name]
        row: list[object] = [name]
        for dialect in dialects:
            client = DIALECTS[dialect](**habits)
            row.append(played(trace, client, system, lambda at: Ours(make, at if disk else None, 4)))
            holds = holds and client.counter.ratio <= limit
        rows.append([*row, f"{limit:.2f}"])
        print("|".join(map(str, rows[-1])), file=sys.stderr)
    print(report.table(("trace", *dialects, "claim"), rows))
    return holds


def of_a_model(args: argparse.Namespace) -> bool:
    config = EngineConfig(model=args.model, ctx=1 << 14, slots=4, threads=args.threads, snapshots=args.snapshots)
    engine = Engine.open(config)
    sentence = "You are an agent that edits files with care. "
    system = sentence * (SYSTEM_TOKENS // len(engine.tokenizer.encode(sentence)))
    answer = len(engine.tokenizer.encode("".join(Say(args.sentences)(""))))
    where = "no disk" if args.no_disk else "checkpoints on disk"
    print(f"{args.model.name}, answers of about {answer} tokens, {args.snapshots} snapshots a session, {where}")
    names = [name for name in TRACES if not args.traces or any(part in name for part in args.traces)]
    holds = economy(
        lambda: Dictated(engine, Say(args.sentences)),
        system,
        names=names,
        dialects=args.dialects or tuple(DIALECTS),
        disk=not args.no_disk,
    )
    engine.close()
    return holds


def beside_the_peer(program: Path) -> list[list[object]]:
    """The demo model here and in llama.cpp's server, Chat only."""
    ctx, slots, most = 4096, 4, 16
    engine = Engine.open(EngineConfig(ctx=ctx, slots=slots, threads=2))
    preparer = Preparer(engine, most)
    system = "You are an agent that edits files with care. " * 150
    rows: list[list[object]] = []

    def ours(directory: Path) -> Ours:
        return Ours(lambda: engine, directory, slots, most)

    def theirs(directory: Path) -> Peer:
        return Peer(program, slots, ctx, most, preparer, engine)

    for name, trace in PEER_TRACES.items():
        found: list[object] = [name]
        for peer in (False, True):
            client = Chat()
            found.append(played(trace, client, system, theirs if peer else ours))
        rows.append(found)
        print("|".join(map(str, found)), file=sys.stderr)
    engine.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--model", type=Path, help="a DeepSeek V4, instead of the scripted model")
    parser.add_argument("--sentences", type=int, default=30, help="of its answers, seven tokens each")
    parser.add_argument("--snapshots", type=int, default=4)
    parser.add_argument("--no-disk", action="store_true", help="without checkpoints: traces that need none")
    parser.add_argument("--traces", nargs="+", metavar="PART", help="only those with such a name")
    parser.add_argument("--dialects", nargs="+", choices=tuple(DIALECTS))
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    print("evaluated / ideal prompt tokens")
    if args.model:
        holds = of_a_model(args)
    else:
        print(f"a system prompt of {SYSTEM_TOKENS} tokens, scripted DeepSeek model")
        holds = economy(scripted, "You are an agent that edits files with care. " * (SYSTEM_TOKENS // 45))
    print(f"the claims: {'hold' if holds else 'DO NOT HOLD'}")
    if args.peer:
        print("\nthe demo model, Chat")
        print(report.table(("trace", "ds4-server", "llama-server"), beside_the_peer(args.peer)))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
