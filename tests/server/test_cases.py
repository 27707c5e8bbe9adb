"""What users of such servers reported as broken: the cases of `tests/data/cases.jsonl` that are requests.

Each case has a check of its own here, under its id.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import zstandard

from ds4.engine.types import TokenLogprobs
from ds4.errors import EngineError
from ds4.server.http import Limits
from ds4.server.kvpolicy import KvConfig
from ds4.testing import Script, ScriptedEngine
from tests.server.test_isolation import Client as Talker
from tests.server.test_isolation import answer as oracle
from tests.support.api import chunks, named_events, parse_events
from tests.support.neighbours import neighbours, say
from tests.support.renderers import server_for
from tests.support.running_server import RunningServer, Serve

LINES = (Path(__file__).parents[1] / "data" / "cases.jsonl").read_text().splitlines()
CASES: dict[str, Any] = {case["id"]: case for case in map(json.loads, LINES) if case["kind"] in ("http", "http_raw")}

Case = dict[str, Any]
Check = Callable[[Case, Serve], None]
CHECKS: dict[str, Check] = {}


def check(case_id: str) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS[case_id] = function
        return function

    return register


def test_every_case_is_checked() -> None:
    assert set(CHECKS) == set(CASES)


@pytest.mark.parametrize("case_id", sorted(CASES))
def test_case(case_id: str, serve: Serve) -> None:
    CHECKS[case_id](CASES[case_id], serve)


def requests_of(case: Case) -> list[Case]:
    return case["input"].get("requests") or [case["input"]]


def script(request: Case) -> Any:
    stub = request.get("stub", {"text": "Hello."})
    return stub["pieces"] if "pieces" in stub else Script.text(stub["text"], 4)


def ask(server: RunningServer, request: Case) -> httpx.Response:
    path = request.get("path", "/v1/chat/completions")
    if "raw_body" in request:
        return server.http.post(path, content=request["raw_body"].encode())
    return server.http.post(path, json=request["body"])


def choice(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def text_of(response: httpx.Response) -> tuple[str, str | None]:
    """Content and finish reason, streamed or not."""
    if response.headers["content-type"] == "application/json":
        found = choice(response)
        return found["message"]["content"], found["finish_reason"]
    deltas = [c["choices"][0] for c in chunks(response) if c["choices"]]
    return "".join(d["delta"].get("content", "") for d in deltas), deltas[-1]["finish_reason"]


def refused(response: httpx.Response, param: str) -> bool:
    return response.status_code == 400 and response.json()["error"]["param"] == param


# ---- chat -------------------------------------------------------------------------------------------------------


@check("AP-01")
def thinking_off_in_all_spellings(case: Case, serve: Serve) -> None:
    server = serve(ScriptedEngine("Hello.", syntax="deepseek4"))
    server.chat()
    assert server.engine.prompts[-1].endswith("<think>")
    for request in requests_of(case):
        message = choice(ask(server, request))["message"]
        assert server.engine.prompts[-1].endswith("</think>")
        assert message == {"role": "assistant", "content": "Hello."}


@check("AP-02")
def impossible_tokens_have_finite_logprobs(case: Case, serve: Serve) -> None:
    engine = ScriptedEngine("Yes")
    server = serve(engine)
    new_sampler = engine.new_sampler

    def sampler(params: Any) -> Any:
        made = new_sampler(params)
        draw = made.draw

        def with_infinity(session: Any) -> Any:
            result = draw(session)
            top = ((result.token, 0.0), *((i, float("-inf")) for i in range(19)))
            return type(result)(result.token, TokenLogprobs(0.0, top))

        made.draw = with_infinity
        return made

    engine.new_sampler = sampler  # type: ignore[method-assign]
    response = ask(server, case["input"])
    body = json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (token,) = body["choices"][0]["logprobs"]["content"]
    assert len(token["top_logprobs"]) == 20
    assert {entry["logprob"] for entry in token["top_logprobs"][1:]} == {-9999.0}


@check("AP-03")
def stop_strings_span_tokens(case: Case, serve: Serve) -> None:
    for request in requests_of(case):
        assert text_of(ask(serve(script(request)), request)) == ("one,", "stop")


@check("AP-04")
def a_forced_choice_is_no_promise_that_is_broken(case: Case, serve: Serve) -> None:
    call = (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="lookup">\n'
        '<｜DSML｜parameter name="item" string="true">milk</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    for request in requests_of(case):
        kept = serve(ScriptedEngine(Script.text(f"hm.</think>{call}", "bytes"), syntax="deepseek4"))
        (choice,) = ask(kept, request).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "lookup", "arguments": '{"item":"milk"}'}
        prose = serve(ScriptedEngine(Script.text("hm.</think>It is.", "bytes"), syntax="deepseek4"))
        assert ask(prose, request).status_code == 500


@check("AP-05")
def usage_chunk_only_when_asked(case: Case, serve: Serve) -> None:
    first, second = requests_of(case)
    server = serve(script(first))
    assert all(c["choices"] and not c.get("usage") for c in chunks(ask(server, first)))
    found = chunks(ask(server, second))
    assert [bool(c["choices"]) for c in found] == [True] * (len(found) - 1) + [False]
    assert found[-2]["choices"][0]["finish_reason"] == "stop"
    usage = found[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert all(not c.get("usage") for c in found[:-1])


@check("AP-06")
def several_choices(case: Case, serve: Serve) -> None:
    request = case["input"]
    assert [c["index"] for c in ask(serve("7", slots=3), request).json()["choices"]] == [0, 1, 2]
    assert refused(ask(serve("7", slots=2), request), "n")
    for n in (1, None):
        assert len(ask(serve("7"), {"body": {**request["body"], "n": n}}).json()["choices"]) == 1


@check("AP-08")
def a_budget_is_an_upper_bound(case: Case, serve: Serve) -> None:
    server = serve(ScriptedEngine("Hello.", ctx=2048))
    assert [ask(server, request).status_code for request in requests_of(case)] == [200] * 4


@check("AP-09")
def shape_of_call_deltas(case: Case, serve: Serve) -> None:
    request = case["input"]
    found = chunks(ask(server_for(serve, script(request), syntax="deepseek4"), request))
    deltas = [d for c in found for d in c["choices"][0]["delta"].get("tool_calls", ())]
    first, *later = deltas
    assert isinstance(first["id"], str) and first["id"]
    assert (first["index"], first["type"], first["function"]) == (0, "function", {"name": "bash", "arguments": ""})
    assert later and all(d == {"index": 0, "function": {"arguments": d["function"]["arguments"]}} for d in later)
    assert json.loads("".join(d["function"]["arguments"] for d in deltas)) == {"command": "ls"}
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


@check("AP-12")
def content_null_beside_a_call(case: Case, serve: Serve) -> None:
    server = serve()
    body = case["input"]["body"]
    assert ask(server, case["input"]).status_code == 200
    without = json.loads(json.dumps(body))
    del without["messages"][1]["content"]
    assert ask(server, {"body": without}).status_code == 200
    assert server.engine.prompts[0] == server.engine.prompts[1]
    history = server.engine.prompts[0].rpartition("</IMPORTANT>")[2]
    assert "24" in history
    assert not re.search("null|None", history)


@check("AP-13")
def stream_is_a_transport_option(case: Case, serve: Serve) -> None:
    plain, streamed = requests_of(case)
    server = server_for(serve, script(plain), syntax="deepseek4", slots=1)
    body = ask(server, plain).json()
    streamed["body"]["stream_options"] = {"include_usage": True}
    found = chunks(ask(server, streamed))
    deltas = [c["choices"][0]["delta"] for c in found if c["choices"]]
    message = body["choices"][0]["message"]
    assert "".join(d.get("content", "") for d in deltas) == message["content"] == "I will look."
    assert "".join(d.get("reasoning_content", "") for d in deltas) == message.get("reasoning_content", "")
    calls = [d for delta in deltas for d in delta.get("tool_calls", ())]
    (call,) = message["tool_calls"]
    assert calls[0]["function"]["name"] == call["function"]["name"] == "bash"
    arguments = "".join(d["function"]["arguments"] for d in calls)
    assert json.loads(arguments) == json.loads(call["function"]["arguments"]) == {"command": "ls"}
    assert found[-2]["choices"][0]["finish_reason"] == body["choices"][0]["finish_reason"] == "tool_calls"
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [found[-1]["usage"][k] for k in counts] == [body["usage"][k] for k in counts]


# ---- messages and responses -------------------------------------------------------------------------------------


@check("AP-07")
def blocks_are_closed_before_the_next_one_opens(case: Case, serve: Serve) -> None:
    first, second = requests_of(case)
    server = serve(ScriptedEngine(script(first), script(second), syntax="deepseek4"))
    found = named_events(ask(server, first))
    blocks: list[list[Any]] = []
    is_open = False
    partial = ""
    for event in found:
        if event.name == "content_block_start":
            assert not is_open
            is_open = True
            blocks.append([event.data["content_block"]["type"], event.data["index"], 0])
        elif event.name == "content_block_delta":
            assert is_open
            blocks[-1][2] += 1
            last_delta = event.data["delta"]
            partial += last_delta.get("partial_json", "")
        elif event.name == "content_block_stop":
            assert is_open
            is_open = False
            assert blocks[-1][0] != "thinking" or last_delta["type"] == "signature_delta"
    assert [block[:2] for block in blocks] == [["thinking", 0], ["text", 1], ["tool_use", 2]]
    assert all(block[2] for block in blocks)
    assert json.loads(partial) == {"command": "ls"}
    assert found[-2].data["delta"]["stop_reason"] == "tool_use"
    other = named_events(ask(server, second))
    starts = [e.data["content_block"]["type"] for e in other if e.name == "content_block_start"]
    assert starts == ["text"]
    assert other[-2].data["delta"]["stop_reason"] == "end_turn"


@check("AP-10")
def tool_output_as_parts(case: Case, serve: Serve) -> None:
    server = serve()
    assert ask(server, case["input"]).status_code == 200
    assert "a.c\nb.c\n" in server.engine.prompts[0]


@check("AP-11")
def instructions_reach_the_model(case: Case, serve: Serve) -> None:
    server = serve()
    request = case["input"]
    assert ask(server, request).status_code == 200
    without = {name: value for name, value in request["body"].items() if name != "tools"}
    assert ask(server, {**request, "body": without}).status_code == 200
    first, second = server.engine.prompts
    assert first == second
    assert 0 < first.index("Answer only in rhymes.") < first.index("Hi!")


@check("HT-04")
def failure_after_the_stream_has_started(case: Case, serve: Serve) -> None:
    server = serve()
    chat, messages, responses = requests_of(case)

    def failing(request: Case) -> str:
        server.engine.fail_in_prefill(EngineError("out of memory"))
        response = ask(server, request)
        assert response.status_code == 200
        assert "HTTP/1.1" not in response.text and "Traceback" not in response.text
        return response.text

    text = failing(chat)
    data = [json.loads(d) for d in re.findall("^data: (.*)$", text, re.MULTILINE)]
    assert data[-1]["error"]["message"] == "out of memory"
    assert all(c["choices"][0]["finish_reason"] is None for c in data[:-1])
    last = parse_events(failing(messages))[-1]
    assert (last.name, last.data["error"]["type"]) == ("error", "api_error")
    last = parse_events(failing(responses))[-1]
    assert last.name == "response.failed"
    assert last.data["response"]["error"]["message"] == "out of memory"


# ---- bodies -----------------------------------------------------------------------------------------------------


@check("SE-01")
def invalid_escapes_and_raw_control_characters(case: Case, serve: Serve) -> None:
    server = serve()
    answers = [ask(server, {"raw_body": body}) for body in case["input"]["raw_bodies"]]
    assert [answer.status_code for answer in answers] == [400, 400, 200, 400, 400]
    for answer in answers:
        if answer.status_code == 400:
            assert re.search(r"JSON.* byte \d+", answer.json()["error"]["message"])
    assert r"rg '^\s+\w'" in server.engine.prompts[0]


@check("SE-04")
def half_of_a_surrogate_pair(case: Case, serve: Serve) -> None:
    server = serve()
    for request in requests_of(case):
        assert ask(server, request).status_code == 200
        pair = "\\ud83d\\ude00" in request["raw_body"]
        assert ("😀" if pair else "\ufffd") in server.engine.prompts[-1]


@check("HT-05")
def compressed_bodies(case: Case, serve: Serve) -> None:
    server = serve()
    body = b'{"model":"m","input":"hi","max_output_tokens":4}'

    def send(coding: str, data: bytes) -> httpx.Response:
        return server.http.post("/v1/responses", content=data, headers={"content-encoding": coding})

    packed = {"zstd": zstandard.compress(body), "gzip": gzip.compress(body), "identity": body}
    assert {coding: send(coding, data).status_code for coding, data in packed.items()} == dict.fromkeys(packed, 200)
    unknown = send("br", b"\x0b\x02\x80")
    assert unknown.status_code == 415
    assert "content-encoding" in unknown.json()["error"]["message"].lower()
    assert send("gzip", gzip.compress(b" " * (100 << 20), 1)).status_code == 413
    mislabelled = send("gzip", body)
    assert mislabelled.status_code == 400
    assert "gzip" in mislabelled.json()["error"]["message"]


# ---- bytes on a connection --------------------------------------------------------------------------------------


def exchange(server: RunningServer, data: str) -> bytes:
    """All that comes back on a connection of its own."""
    with socket.create_connection((server.app._http.host, server.app.port), timeout=20) as connection:
        connection.sendall(data.encode())
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


@check("HT-01")
def a_request_behind_a_chunked_one(case: Case, serve: Serve) -> None:
    answer = exchange(serve(), case["input"]["send"][0]).decode()
    assert re.findall(r"HTTP/1\.1 (\d+)", answer) == ["200", "200"]
    assert answer.index('"chat.completion"') < answer.index('"object":"list"')


@check("HT-02")
def expect_100_continue(case: Case, serve: Serve) -> None:
    server = serve()
    head, awaited, body = case["input"]["send"]
    with socket.create_connection((server.app._http.host, server.app.port), timeout=20) as connection:
        connection.sendall(head["text"].encode())
        assert connection.recv(65536).decode() == awaited["wait_for"]
        connection.sendall(body["text"].encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert exchange(server, head["text"] + body["text"]).count(b"HTTP/1.1 200 ") == 1
    too_large = exchange(server, head["text"].replace("Content-Length: 72", "Content-Length: 99999999999"))
    assert re.findall(rb"HTTP/1\.1 (\d+)", too_large) == [b"413"]


@check("HT-03")
def slow_senders(case: Case, serve: Serve) -> None:
    """They never pause for long: the deadline for the whole head ends them, and touches no stream."""
    assert Limits().head_timeout <= Limits().request_timeout <= 120
    given = case["input"]["send"][0]
    server = serve(say, slots=4, limits=Limits(head_timeout=0.3, read_timeout=60.0))
    files = len(list(Path("/proc/self/fd").iterdir()))
    over = threading.Event()
    senders = [socket.create_connection((server.app._http.host, server.app.port)) for _ in range(given["repeat"])]
    ended: set[int] = set()

    def dribble() -> None:
        for sender in senders:
            sender.sendall(given["text"].encode())
            sender.setblocking(False)
        while not over.is_set() and len(ended) < len(senders):
            for index, sender in enumerate(senders):
                if index in ended:
                    continue
                try:
                    sender.send(b"a")
                    answer = sender.recv(4096)
                except BlockingIOError:
                    continue
                except ConnectionError:
                    answer = b""
                assert not answer or answer.startswith(b"HTTP/1.1 408 ")
                ended.add(index)
            over.wait(0.02)

    thread = threading.Thread(target=dribble)
    with neighbours(server):
        thread.start()
        while thread.is_alive():
            assert server.http.get("/v1/models").status_code == 200
    thread.join(60)
    over.set()
    assert len(ended) == len(senders)
    for sender in senders:
        sender.close()
    deadline = time.monotonic() + 20
    # The neighbours' connections and ours may stay open for a while.
    while len(list(Path("/proc/self/fd").iterdir())) > files + 16:
        assert time.monotonic() < deadline, "the server keeps sockets of ended connections"
        time.sleep(0.01)


@check("SE-02")
def a_page_that_reaches_the_server_under_another_name(case: Case, serve: Serve) -> None:
    server = serve()
    body = '{"messages":[{"role":"user","content":"x"}]}'

    def status(method: str, host: str | None, *headers: str, version: str = "1.1") -> int:
        path = "/v1/models" if method == "GET" else "/v1/chat/completions"
        lines = [f"{method} {path} HTTP/{version}", "Connection: close", *headers]
        lines += [f"Host: {host}"] if host else []
        lines += [f"Content-Length: {len(body)}"] if method == "POST" else []
        answer = exchange(server, "\r\n".join(lines) + "\r\n\r\n" + (body if method == "POST" else ""))
        return int(answer.split(b" ")[1])

    assert status("GET", "evil.example:8000") in (400, 403, 421)
    assert status("POST", "evil.example:8000") in (400, 403, 421)
    page = ("Origin: https://evil.example", "Content-Type: text/plain")
    assert status("POST", "127.0.0.1:8000", *page) in (400, 403, 415, 421)
    assert server.engine.prompts == []
    assert [status("GET", name) for name in ("localhost:8000", "[::1]:8000", "127.0.0.1:8000")] == [200] * 3
    assert status("GET", None, version="1.0") == 200
    assert status("GET", None) == 400


@check("SE-03")
def api_keys(case: Case, serve: Serve) -> None:
    server = serve(api_keys=("k3y",))
    headers = [
        *("Authorization: Bearer k3y", "authorization: bearer   k3y  ", "x-api-key: k3y", "Authorization: Bearer k3"),
        *("Authorization: Bearer k3yy", "Authorization: k3y", "Authorization: Bearer", "X-Nothing: 1"),
    ]

    def answer(line: str, *headers: str) -> tuple[int, str]:
        text = "\r\n".join([f"{line} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""])
        received = exchange(server, text).decode()
        return int(received.split(" ")[1]), received

    assert [answer("GET /v1/models", header)[0] for header in headers] == [200] * 3 + [401] * 5
    assert answer("OPTIONS /v1/models")[0] == 204
    twice = answer("GET /v1/models", "Authorization: Bearer bad", "Authorization: Bearer k3y")
    assert twice[0] in (400, 401)
    assert answer("GET /v1/nothing", "Authorization: Bearer k3y")[0] == 404
    assert answer("GET /health")[0] == 200
    for path, shape in (("/v1/chat/completions", '{"error":{"message"'), ("/v1/messages", '{"type":"error","error"')):
        # The body is announced and never sent: the refusal does not wait for it.
        status, text = answer(f"POST {path}", "Content-Length: 1000")
        assert status == 401
        assert "WWW-Authenticate: Bearer" in text and shape in text and "k3y" not in text


# ---- many at once -----------------------------------------------------------------------------------------------


@check("BA-01")
def a_long_prefill_beside_a_running_answer(case: Case, serve: Serve) -> None:
    """Counted, not timed: no step of the prefill goes without a token of the stream, and each is a small portion."""
    engine = ScriptedEngine(lambda prompt: Script.text("a " * 400 if "A" in prompt else "B").slow(0.002), ctx=16384)
    server = serve(engine, slots=2, mixed_prefill_quantum=128)
    stream = {"messages": [{"role": "user", "content": "A"}], "stream": True, "max_tokens": 400}
    with server.http.stream("POST", "/v1/chat/completions", json=stream) as first:
        lines = first.iter_lines()
        for _ in range(20):
            next(line for line in lines if '"content"' in line)
        with httpx.Client(base_url=server.url, timeout=60) as http:
            body = {"messages": [{"role": "user", "content": "b" * 6000}], "max_tokens": 4}
            answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == "B"
        assert any('"content"' in line for line in lines), "the stream was over before the prefill was"
        for _ in lines:
            pass
    index_b = next(row[0] for step in engine.steps[5:] for row in step.rows if row[1] > 1)
    portions = [step for step in engine.steps[5:] if any(row[0] == index_b and row[1] > 1 for row in step.rows)]
    assert sum(n for step in portions for index, n, _ in step.rows if index == index_b) >= 5900
    for step in portions:
        (stream_row,) = (row for row in step.rows if row[0] != index_b)
        assert stream_row[1] == 1 and stream_row[2] is not None, "the stream stood still"
        assert step.n_tokens <= 1 + 128


@check("BA-03")
def answers_do_not_leak(case: Case, serve: Serve) -> None:
    """Two sessions, eight conversations, evictions to a small disk cache: each answer is that of an idle server."""
    rng = random.Random(3)
    talkers = [Talker(seed) for seed in range(8)]
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        kv = KvConfig(Path(folder), budget_bytes=40_000, min_tokens=64, boundary_align=0, continued_interval=200)
        server = serve(ScriptedEngine(oracle, ctx=32768), slots=2, kv=kv)
        for _ in range(20):
            with ThreadPoolExecutor(4) as pool:
                # A turn raises when the answer is another than that of a model which saw this conversation alone.
                list(pool.map(lambda talker: talker.turn(server.http), rng.sample(talkers, 4)))
        used = set(
            re.findall(r'^ds4_cache_lookups_total\{tier="([^"]+)"\}', server.http.get("/metrics").text, re.MULTILINE)
        )
        assert any(tier.startswith("disk") for tier in used), used
        assert any(tier.startswith("memory") for tier in used), used
        server.stop()


@check("BA-02")
def aborting_one_of_a_batch(case: Case, serve: Serve) -> None:
    words = " ".join(f"w{i}" for i in range(30))
    server = serve(ScriptedEngine(Script.text(words).slow(0.001)), slots=4)
    for round in range(15):
        bodies = [{"messages": [{"role": "user", "content": f"{round} {i}"}], "stream": True} for i in range(4)]
        clients = [httpx.Client(base_url=server.url, timeout=30) for _ in bodies]
        requests = [
            client.build_request("POST", "/v1/chat/completions", json=body)
            for client, body in zip(clients, bodies, strict=True)
        ]
        streams = [client.send(request, stream=True) for client, request in zip(clients, requests, strict=True)]
        streams[round % 4].close()
        for index, stream in enumerate(streams):
            if index != round % 4:
                stream.read()
                assert text_of(stream) == (words, "stop")
        for client in clients:
            client.close()
    assert text_of(server.chat()) == (words, "stop")
    states = server.http.get("/slots").json()
    assert [state["phase"] for state in states] == ["idle"] * 4


@check("BA-04")
def a_new_conversation_takes_an_empty_slot(case: Case, serve: Serve) -> None:
    server = serve("Fine.", slots=2)
    system = {"role": "system", "content": "S" * 2000}
    history: dict[str, list[Any]] = {name: [system, {"role": "user", "content": name * 300}] for name in "ab"}
    sizes: dict[str, int] = {}
    for turn in range(2):
        for name, messages in history.items():
            usage = server.http.post("/v1/chat/completions", json={"messages": messages}).json()["usage"]
            if turn:
                assert usage["prompt_tokens_details"]["cached_tokens"] >= sizes[name] - 64
            sizes[name] = usage["prompt_tokens"]
            messages += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "more"}]
