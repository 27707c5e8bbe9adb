"""Time to the first token of a prompt that a session still holds, as a client on the same machine sees it.

    python -m bench.cached_ttft [--words 200] [--rounds 30] [--url http://127.0.0.1:8080]

A chat prompt is asked once, then again and again over one connection, streamed, one client: from the last byte sent to
the event that carries text. One step of the model is in it (the prompt's last token must be evaluated for its logits);
the time between later tokens of the same stream stands beside it, which is that step's. Target: 5 ms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import sys
import time

from bench import report
from bench.http_share import start_server

TARGET = 5.0


class Client:
    """One connection; `ask` returns the milliseconds to each event that carries text."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._connect()

    def _connect(self) -> None:
        self._used = False
        self._sock = socket.create_connection(self._address)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, prompt: str, n: int) -> list[float]:
        messages = [{"role": "user", "content": prompt}]
        body = json.dumps(
            {"messages": messages, "max_tokens": n, "temperature": 0, "stream": True, "ignore_eos": True}
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        self._sock.sendall(head.encode() + body)
        sent = time.perf_counter()
        times: list[float] = []
        data = b""
        seen = 0
        while not data.endswith(b"\r\n0\r\n\r\n"):
            piece = self._sock.recv(65536)
            if not piece and not data and self._used:  # some servers end the connection with the answer
                self._connect()
                return self.ask(prompt, n)
            if not piece:
                raise RuntimeError(f"the server hung up after {data[-300:]!r}")
            data += piece
            now = (time.perf_counter() - sent) * 1e3
            texts = data.count(b'"content":"')
            times += [now] * (texts - seen)
            seen = texts
        self._used = True
        if not times:
            raise RuntimeError(f"no text in {data[-300:]!r}")
        return times


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.cached_ttft", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--words", type=int, default=200)
    p.add_argument("--rounds", type=int, default=30)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--url", help="of a server that runs already, ours or another (default: one of its own)")
    p.add_argument("--save", metavar="NAME", help="keep the numbers as bench/results/NAME.json")
    args = p.parse_args()
    server, url = (None, args.url) if args.url else start_server(args.threads)
    try:
        client = Client(url)
        prompt = "Tell me about " + " ".join(f"word{i % 17}" for i in range(args.words))
        cold = client.ask(prompt, 4)[0]
        first: list[float] = []
        between: list[float] = []
        for _ in range(args.rounds):
            times = client.ask(prompt, 8)
            first.append(times[0])
            between += [b - a for a, b in itertools.pairwise(times)]
    finally:
        if server is not None:
            server.terminate()
            server.wait(30)
    rows = [("cold", cold), ("cached", report.median(first)), ("between tokens", report.median(between))]
    print(report.table(("ms", "median"), rows))
    print(f"target {TARGET:g} ms: {'met' if report.median(first) <= TARGET else 'MISSED'}")
    if args.save:
        print(f"saved {report.save(args.save, {'cold': cold, 'cached': first, 'between': between})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
