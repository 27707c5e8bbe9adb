"""The server around the API: routes, keys, CORS, small endpoints, start-up, shutdown, the program itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from ds4.cli.server import main
from ds4.engine.types import EngineConfig
from ds4.server.app import App
from ds4.server.bind import BindError, check_address
from ds4.server.config import ServerConfig
from ds4.server.routes import local_path
from ds4.testing import Script, ScriptedEngine
from tests.support.running_server import RunningServer, Serve

CORS = "access-control-allow-origin"


def running(response: httpx.Response) -> Iterator[bytes]:
    """The rest of a stream whose generation has begun. Keep the iterator: without it the client hangs up."""
    pieces = response.iter_raw()
    while b'"content"' not in next(pieces):
        pass
    return pieces


# ---- routes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_paths_with_and_without_version(serve: Serve, prefix: str) -> None:
    server = serve()
    for path in ("/models", "/models/", "/models/scripted", "/health", "/slots", "/metrics"):
        assert server.http.get(prefix + path).status_code == 200, path
    for path, body in (
        ("/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"content": "x"}),
        ("/detokenize", {"tokens": [65]}),
        ("/apply-template", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        assert server.http.post(prefix + path, json=body).status_code == 200, path


def test_local_path() -> None:
    paths = {
        "/": "/",
        "/v1": "/",
        "/v1/": "/",
        "/v1/models/": "/models",
        "/v1x/a": "/v1x/a",
        "/models/a/b": "/models/a/b",
    }
    assert {path: local_path(path) for path in paths} == paths


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nope"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/models"),
        ("DELETE", "/v1/models"),
        ("GET", "/v2"),
    ],
)
def test_unknown_endpoint(serve: Serve, method: str, path: str) -> None:
    response = serve().http.request(method, path)
    assert response.status_code == 404
    expected = {"message": "unknown endpoint", "type": "invalid_request_error", "param": None, "code": None}
    assert response.json() == {"error": expected}
    assert response.content.endswith(b"}\n")


def test_head_and_options(serve: Serve) -> None:
    http = serve().http
    for path in ("/", "/v1/models", "/health"):
        head, get = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(get.content))
    options = http.options("/v1/anything")
    assert (options.status_code, options.content) == (204, b"")


def test_query_strings_are_ignored(serve: Serve) -> None:
    assert serve().http.get("/v1/models?limit=1000").status_code == 200


def test_cors(serve: Serve) -> None:
    plain, open_ = serve("x"), serve("x", cors=True)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    for server, present in ((plain, False), (open_, True)):
        responses = [
            server.http.get("/v1/models"),
            server.http.get("/nope"),
            server.http.options("/v1/models"),
            server.http.post("/v1/chat/completions", json=body),
            server.http.post("/v1/chat/completions", json={}),
        ]
        assert [CORS in r.headers for r in responses] == [present] * len(responses)


# ---- keys -------------------------------------------------------------------------------------------------------


def test_api_keys(serve: Serve) -> None:
    http = serve("x", api_keys=("first", "ünï")).http
    for headers in (
        {"Authorization": "Bearer first"},
        {"authorization": "bearer first"},
        {"x-api-key": "first"},
    ):
        assert http.get("/v1/models", headers=headers).status_code == 200, headers
    for headers, message in (
        ({}, "missing API key"),
        ({"Authorization": "Bearer firs"}, "incorrect API key"),
        ({"Authorization": "Basic first"}, "missing API key"),
        ({"x-api-key": "nope"}, "incorrect API key"),
    ):
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/nope"),
            ("GET", "/metrics"),
        ):
            response = http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["message"], error["code"]) == (message, "invalid_api_key")
    assert http.get("/health").status_code == 200
    assert http.options("/v1/models").status_code == 204


def test_foreign_host_on_loopback(serve: Serve) -> None:
    server = serve(allowed_hosts=("box.local",))
    for host, status in (("evil.example", 403), ("box.local:80", 200), ("localhost:1", 200)):
        response = server.http.get("/v1/models", headers={"Host": host})
        assert response.status_code == status
        if status == 403:
            assert response.json()["error"]["type"] == "invalid_request_error"


def test_headers_of_clients_mean_nothing_without_keys(serve: Serve) -> None:
    headers = {"Authorization": "Basic x", "x-api-key": "k", "anthropic-version": "1999-01-01", "anthropic-beta": "a,b"}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    for path in ("/v1/messages?beta=true", "/v1/chat/completions?x=1"):
        assert serve("x").http.post(path, json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/completions"])
def test_both_headers_carry_a_key_everywhere(serve: Serve, path: str) -> None:
    http = serve("x", api_keys=("right",)).http
    said: dict[str, Any] = {"/v1/responses": {"input": "x"}, "/v1/completions": {"prompt": "x"}}
    body = said.get(path, {"messages": [{"role": "user", "content": "x"}]})
    for headers, status in (
        ({"Authorization": "Bearer right"}, 200),
        ({"x-api-key": "right"}, 200),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ):
        assert http.post(path, json=body, headers=headers).status_code == status


# ---- small endpoints --------------------------------------------------------------------------------------------


def test_models(serve: Serve) -> None:
    http = serve(ScriptedEngine(ctx=500, model_id="scripted"), alias="zai/tiny", max_output_tokens=1000).http
    listed = http.get("/v1/models").json()
    assert (listed["object"], listed["has_more"], listed["first_id"]) == ("list", False, "zai/tiny")
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["type"], model["context_length"]) == ("zai/tiny", "model", "model", 500)
    assert model["top_provider"]["max_completion_tokens"] == 500
    for name in ("zai/tiny", "scripted"):
        assert http.get(f"/v1/models/{name}").json() == {**model, "id": name}
    missing = http.get("/v1/models/gpt")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_a_model_object_has_every_member_that_clients_read(serve: Serve) -> None:
    (model,) = serve(ScriptedEngine(ctx=500), max_output_tokens=100).http.get("/v1/models").json()["data"]
    assert {name: model[name] for name in model if name not in ("name", "display_name", "supported_parameters")} == {
        "id": "scripted",
        "object": "model",
        "created": 1767225600,
        "owned_by": "ds4.c",
        "context_length": 500,
        "top_provider": {"context_length": 500, "max_completion_tokens": 100, "is_moderated": False},
        "type": "model",
        "created_at": "2026-01-01T00:00:00Z",
    }
    said = "tools tool_choice max_tokens temperature top_p top_k min_p ignore_eos stop seed stream reasoning_effort"
    assert set(said.split()) <= set(model["supported_parameters"])


@pytest.mark.parametrize(
    ("syntax", "listed", "known", "unknown"),
    [
        (
            "deepseek4",
            ["own"],
            ["own", "own-chat", "own-reasoner", "deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4-flash-nothink"],
            ["deepseek-v4.1-flash", "glm-5.2", "zai/own", "x", ""],
        ),
        ("deepseek41", ["own"], ["deepseek-v4.1-flash"], ["deepseek-v4-flash"]),
        (
            "glm",
            ["own", "own-chat", "own-reasoner"],
            ["own", "own-no-think", "glm-5.2", "glm-5.3-flash-chat", "zai/glm-5.2", "zai/glm-5.2-reasoner"],
            ["qwen/glm-5.2", "zai/zai/glm-5.2"],
        ),
        (
            "qwen",
            ["own", "own-chat", "own-reasoner"],
            ["qwen3.8-flash-next", "qwen3.8-flash-next-nothink", "qwen/qwen3.8-flash-next-chat"],
            ["qwen/", "qwen/other"],
        ),
        ("chatml", ["own"], ["own"], ["own-chat", "qwen3.8-flash-next"]),
    ],
)
def test_names_of_the_model(serve: Serve, syntax: str, listed: list[str], known: list[str], unknown: list[str]) -> None:
    http = serve(ScriptedEngine(syntax=syntax, model_id="own")).http
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == listed
    for name in (*listed, *known):
        assert http.get(f"/v1/models/{name}").json()["id"] == name
    for name in filter(None, unknown):
        found = http.get(f"/v1/models/{name}")
        assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found"), name


def test_tokenize_and_back(serve: Serve) -> None:
    http = serve().http
    text = "héllo <|im_end|> 😀"
    plain = http.post("/tokenize", json={"content": text}).json()
    assert plain["count"] == len(plain["tokens"]) == len(text.encode())
    special = http.post("/tokenize", json={"content": text, "parse_special": True}).json()
    assert special["count"] == plain["count"] - len("<|im_end|>") + 1
    for found in (plain, special):
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"content": text}
    pieces = http.post("/tokenize", json={"content": "aé", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
    long = "word " * 2000
    assert http.post("/tokenize", json={"content": long}).json()["count"] == len(long)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 10**9]}, "tokens[1]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_tokenizer_endpoints_name_what_is_wrong(serve: Serve, path: str, body: Any, param: str) -> None:
    response = serve().http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_health(serve: Serve) -> None:
    server = serve(api_keys=("k",))
    found = server.http.get("/health")
    assert (found.status_code, found.json()) == (200, {"status": "ok"})
    server.app._service.accepting = False
    found = server.http.get("/health")
    assert (found.status_code, found.json()) == (503, {"status": "error", "reason": "server shutting down"})


def test_slots(serve: Serve) -> None:
    engine = ScriptedEngine(Script.text("a ").endless().slow(0.002))
    server = serve(engine, slots=3)
    idle = server.http.get("/slots").json()
    assert [(s["index"], s["request"], s["n_ctx"]) for s in idle] == [(i, None, engine.config.ctx) for i in range(3)]
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = running(response)
        busy = [s for s in server.http.get("/slots").json() if s["request"]]
        del pieces
    assert len(busy) == 1
    assert busy[0]["request"].startswith("chatcmpl-")


def test_metrics(serve: Serve) -> None:
    server = serve("a b c")
    server.chat()
    server.http.get("/nope")
    text = server.http.get("/metrics").text
    assert 'ds4_generations_total{dialect="chat",finish="stop"} 1.0' in text
    assert 'ds4_http_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
    assert 'ds4_http_requests_total{endpoint="other",status="404"} 1.0' in text
    assert "ds4_slots 2.0" in text


def test_every_generation_is_one_line_in_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ds4.server")
    serve("a b c").chat()
    (line,) = [r.getMessage() for r in caplog.records if "gen=" in r.getMessage()]
    assert line.startswith("chat chatcmpl-")
    assert "gen=3 " in line
    assert "finish=stop" in line


# ---- many clients -----------------------------------------------------------------------------------------------


def test_sixteen_clients_get_what_one_gets(serve: Serve) -> None:
    def script(prompt: str) -> str:
        name = prompt.split("user\n")[1].split("<|im_end|>")[0]
        return " ".join(f"{name}-{i}" for i in range(20))

    server = serve(script, slots=5)
    results: dict[int, str] = {}

    def ask(i: int) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            body = {"messages": [{"role": "user", "content": f"client{i}"}], "stream": True}
            text = ""
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            results[i] = text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: " ".join(f"client{i}-{n}" for n in range(20)) for i in range(16)}


# ---- start and stop ---------------------------------------------------------------------------------------------


def test_startup_lines(serve: Serve) -> None:
    lines = serve(slots=3, api_keys=("k",)).app.startup_lines()
    text = "\n".join(lines)
    assert "model scripted" in lines[0]
    assert "context 32768 tokens" in text
    assert "3 sessions" in text
    assert "memory: weights" in text
    assert "backend scripted, of this process in huge pages: " in text
    assert "listening on http://127.0.0.1:" in text
    assert "Authorization: Bearer YOUR_KEY" in lines[-1]
    assert "warning" not in text


def test_startup_lines_of_a_drafter(serve: Serve) -> None:
    running = serve(ScriptedEngine("x", guess=lambda tokens: [1]))
    config = running.app.config
    running.app.config = replace(config, engine=replace(config.engine, mtp=True))
    assert "drafts: mtp, at most 16 tokens a step, while one request decodes" in running.app.startup_lines()
    running = serve(ScriptedEngine("x"))
    running.app.config = replace(config, engine=replace(config.engine, dspark=True, speculate=False))
    assert "drafts: loaded, speculative decoding is off" in running.app.startup_lines()


def test_the_curl_line_works(serve: Serve) -> None:
    server = serve("It works.")
    command = server.app.startup_lines()[-1].removeprefix("try: ")
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "It works."


def test_open_bind_without_a_key_warns(serve: Serve) -> None:
    def warnings(server: RunningServer) -> list[str]:
        return [line for line in server.app.startup_lines() if line.startswith("warning")]

    (line,) = warnings(serve(host="0.0.0.0"))
    assert "--api-key" in line
    assert warnings(serve(host="0.0.0.0", api_keys=("k",))) == []
    assert warnings(serve(host="localhost")) == []


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        app = App(ScriptedEngine(), ServerConfig(port=port, engine=EngineConfig()))
        with pytest.raises(BindError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*[Aa]ddress already in use"):
            asyncio.run(app.start())
        with pytest.raises(BindError, match="already in use"):
            check_address("localhost", port)
        assert main(["--port", str(port)]) == 1
    check_address("127.0.0.1", port)
    with pytest.raises(BindError, match=r"cannot listen on no\.such\.host\.invalid:1: "):
        check_address("no.such.host.invalid", 1)


def test_shutdown_lets_running_requests_finish(serve: Serve) -> None:
    engine = ScriptedEngine(Script.text("a b c d e f g h").slow(0.02))
    server = serve(engine, slots=1)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = running(response)
        server.request_stop()
        text = b"".join(pieces).decode()
    assert text.endswith("data: [DONE]\n\n")
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")


def test_shutdown_out_of_time_is_an_error_event(serve: Serve) -> None:
    engine = ScriptedEngine(Script.text("a ").endless().slow(0.01))
    server = serve(engine, slots=1, drain_seconds=0.1)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = running(response)
        server.request_stop()
        text = b"".join(pieces).decode()
    assert "event: error" in text
    assert "shutdown requested" in text
    assert "[DONE]" not in text


def test_queued_requests_are_refused_at_shutdown(serve: Serve) -> None:
    engine = ScriptedEngine(Script.text("a ").endless().slow(0.01))
    server = serve(engine, slots=1, drain_seconds=0.2)
    answers: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            answers.append(
                http.post(
                    "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 9999}
                )
            )

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    scheduler = server.app._scheduler
    while time.monotonic() < deadline:
        busy = any(slot.request for slot in scheduler.slot_states())
        if busy and scheduler.n_queued:
            break
        time.sleep(0.005)
    server.request_stop()
    for thread in threads:
        thread.join()
    assert [a.status_code for a in answers] == [503, 503]
    assert {a.json()["error"]["message"] for a in answers} == {"shutdown requested", "server shutting down"}
    assert all(a.json()["error"]["type"] == "server_error" for a in answers)
    assert all(a.headers["retry-after"] == "5" for a in answers)


# ---- the program ------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from ds4.server.app import App
from ds4.server.config import ServerConfig
from ds4.testing import Script, ScriptedEngine

async def run():
    app = App(ScriptedEngine(Script.text("a ").endless().slow(0.01)), ServerConfig(port=0, drain_seconds=60))
    await app.start()
    app.handle_signals()
    print(app.url, flush=True)
    await app.serve()

asyncio.run(run())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as response:
            pieces = running(response)
            process.send_signal(number)
            with pytest.raises(httpx.ConnectError):
                for _ in range(500):
                    httpx.get(f"{url}/health")
                    time.sleep(0.01)
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(30) == 130
            del pieces
    finally:
        process.kill()
        process.wait()


def test_one_signal_on_an_idle_server_ends_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_not_a_model(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"no model at all")
    assert main(["--model", str(file), "--port", "0"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"ds4-server: {file}: ")
