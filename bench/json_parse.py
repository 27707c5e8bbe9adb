#!/usr/bin/env python3
"""Request JSON beside msgspec, orjson and the standard library, all in one run.

    python -m bench.json_parse [--rounds N]

1. The whole tool-heavy request to what rendering needs: model, flags, each message's texts and calls as str, each
   tool as a span of the body. Peer: a typed msgspec decoder with the tools as `msgspec.Raw`. Target: 1.5 x.
2. The 32 schemas as canonical text. Peer: `orjson.loads` and `json.dumps` of each. Target: 10 x.
3. One stream event from its constant parts and a text delta. Target: 120 ns.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec
import orjson

from bench import corpus, timing
from ds4 import _json


class Function(msgspec.Struct):
    name: str
    arguments: str


class Call(msgspec.Struct):
    id: str
    type: str
    function: Function


class Message(msgspec.Struct):
    role: str
    content: str | list[object] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class Request(msgspec.Struct):
    model: str
    messages: list[Message]
    tools: list[msgspec.Raw] = []
    stream: bool = False
    max_tokens: int | None = None


MANY = range(1000)

CALL = _json.Fields(id="str", function=_json.Fields(name="str", arguments="any"))
MESSAGE = _json.Fields(role="str", content="any", tool_call_id="str", tool_calls=[CALL])
TOOL = _json.Fields(type="str", function="object")


def read_request(body: bytes) -> tuple[object, ...]:
    """What the API takes from a request."""
    root = _json.parse(body)
    return (
        root.get_str("model"),
        root.get_bool("stream", False),
        root.get_int("max_tokens"),
        root.get_float("temperature"),
        MESSAGE.read_all(root["messages"]),
        TOOL.read_all(root["tools"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds

    decoder = msgspec.json.Decoder(Request)
    print(f"1. request to what rendering needs (instruction set {_json.use_isa('auto')}; ms, median of {rounds})")
    for size in corpus.RESULT_CHARS:
        body = corpus.body(size)
        peer = decoder.decode(body)
        ours = read_request(body)
        messages: Any = ours[4]
        assert [m[1] for m in messages] == [m.content for m in peer.messages]
        calls = [(c[0], *c[1]) for m in messages for c in m[3] or ()]
        assert calls == [
            (c.id, c.function.name, c.function.arguments) for m in peer.messages for c in m.tool_calls or ()
        ]
        found = timing.seconds(
            {
                "ds4": lambda body=body: read_request(body),  # type: ignore[misc]
                "ds4 parse only": lambda body=body: _json.parse(body),  # type: ignore[misc]
                "msgspec typed": lambda body=body: decoder.decode(body),  # type: ignore[misc]
                "orjson": lambda body=body: orjson.loads(body),  # type: ignore[misc]
                "json": lambda body=body: json.loads(body),  # type: ignore[misc]
            },
            rounds,
        )
        times = ", ".join(f"{name} {timing.median(t) * 1e3:.3f}" for name, t in found.items())
        ratio = timing.ratio(found["msgspec typed"], found["ds4"])
        print(f"   {size:6} {len(body):8} bytes: {times}; {ratio:.2f} x msgspec typed (target 1.5)")

    tools = [tool["function"] for tool in _json.parse(corpus.body("medium"))["tools"]]
    raw = [tool.raw for tool in tools]
    assert [t.canonical() for t in tools] == [json.dumps(orjson.loads(r), ensure_ascii=False) for r in raw]
    found = timing.seconds(
        {
            "ds4 from the request": lambda: [tool.canonical() for tool in tools],
            "ds4 from text": lambda: [_json.canonical(text) for text in raw],
            "orjson + json": lambda: [json.dumps(orjson.loads(text), ensure_ascii=False) for text in raw],
        },
        rounds,
    )
    print(f"2. 32 schemas ({sum(map(len, raw))} bytes) as canonical text (us)")
    print("   " + ", ".join(f"{name} {timing.median(t) * 1e6:.1f}" for name, t in found.items()))
    for name in ("ds4 from the request", "ds4 from text"):
        print(f"   {name}: {timing.ratio(found['orjson + json'], found[name]):.1f} x (target 10)")

    event = {
        "id": "chatcmpl-0123456789abcdef01234567",
        "object": "chat.completion.chunk",
        "created": 1790000000,
        "model": "deepseek-v4-flash",
        "choices": [{"index": 0, "delta": {"content": "@"}, "finish_reason": None}],
    }
    head, tail = (b"data: " + orjson.dumps(event) + b"\n\n").split(b"@")
    print("3. one stream event (ns; target 120)")
    for delta in (" token", ' tokén "q"', "深度求索", "line\n" * 40):
        assert _json.sse_chunk(head, delta, tail) == head + orjson.dumps(delta)[1:-1] + tail

        def ours(delta: str = delta) -> None:
            for _ in MANY:
                _json.sse_chunk(head, delta, tail)

        def peer_joined(delta: str = delta) -> None:
            for _ in MANY:
                head + orjson.dumps(delta)[1:-1] + tail

        def peer_whole(delta: str = delta) -> None:
            for _ in MANY:
                event["choices"][0]["delta"]["content"] = delta  # type: ignore[index]
                b"data: " + orjson.dumps(event) + b"\n\n"

        found = timing.seconds({"ds4": ours, "parts + orjson": peer_joined, "orjson": peer_whole}, rounds)
        times = ", ".join(f"{name} {timing.median(t) * 1e6:.0f}" for name, t in found.items())
        print(f"   {delta[:12]!r:16} {times}")


if __name__ == "__main__":
    main()
