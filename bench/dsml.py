#!/usr/bin/env python3
"""Output parser, CPU time per token, beside the chunk generator of `deepseek-recipe` in the same run.

    python -m bench.dsml

Three streams of tokens of about four bytes: plain text without tools, text with tools, and one call with a long string
argument. Both sides get one token per call and give out events as Python objects. Targets: at least 3 times faster
than the peer, at most 1 us per token. The peer's chunks are not turned into JSON here.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

from bench import timing
from ds4._dsml import Parser

N = 20_000
D = "｜DSML｜"


def tokens(rng: random.Random, n: int) -> list[str]:
    words = ["the", " model", " writes", ",\n", " <b>", " é", "code", " x = 1", ". ", "\n    "]
    return [rng.choice(words) for _ in range(n)]


def ours(pieces: list[bytes], tools: bool) -> Callable[[], None]:
    def work() -> None:
        parser = Parser("deepseek4", tools=tools)
        feed = parser.feed
        for piece in pieces:
            feed(piece)
            _ = parser.greedy
        parser.finish("eos")

    return work


def theirs(recipe: Any, pieces: list[str], tools: bool) -> Callable[[], None]:
    def work() -> None:
        conversation = recipe.Conversation([recipe.UserMessage("x")], thinking_mode=False)
        request = recipe.ConversationRequest(conversation, recipe.ModelVersion.DeepseekV4Pro)
        stream = recipe.StreamProcessor(
            recipe.ChatCompletionRequest.chunk_generator(request, "id", "m"),
            recipe.ParsingOptions(parse_tool_calls=tools),
        )
        text, push = recipe.InferenceChunk.text, stream.push
        push(recipe.InferenceChunk.ready())
        for piece in pieces:
            push(text(piece, 1))
        push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
        stream.finish()

    return work


def main() -> None:
    rng = random.Random(7)
    body = tokens(rng, N)
    head = [f"\n\n<{D}tool_calls>\n", f'<{D}invoke name="write">\n', f'<{D}parameter name="text" string="true">']
    tail = [f"</{D}parameter>\n", f"</{D}invoke>\n", f"</{D}tool_calls>"]
    streams = [("text, no tools", body, False), ("text, tools", body, True), ("in a call", head + body + tail, True)]
    try:
        recipe = importlib.import_module("deepseek_recipe")
    except ImportError:
        recipe = None
    print(f"{N} tokens, us of CPU time per token (feed and the sampling question together)")
    print(f"{'':16s}{'ds4._dsml':>12s}{'peer':>12s}{'ratio':>10s}")
    for title, pieces, tools in streams:
        work = {"ours": ours([p.encode() for p in pieces], tools)}
        if recipe is not None:
            work["theirs"] = theirs(recipe, pieces, tools)
        found = timing.seconds(work)
        line = f"{title:16s}{timing.median(found['ours']) / len(pieces) * 1e6:12.3f}"
        if recipe is not None:
            line += f"{timing.median(found['theirs']) / len(pieces) * 1e6:12.3f}"
            line += f"{timing.ratio(found['theirs'], found['ours']):10.1f}"
        print(line)
    calls = [f'<{D}invoke name="f">\n<{D}parameter name="a" string="true">x</{D}parameter>\n</{D}invoke>\n'] * 100_000
    block = "".join([head[0], *calls, tail[-1]]).encode()
    whole = timing.seconds({"whole": ours([block], True)}, rounds=3)["whole"]
    print(f"100,000 calls in one block, at once: {len(block) / timing.median(whole) / 1e6:.0f} MB/s")


if __name__ == "__main__":
    main()
