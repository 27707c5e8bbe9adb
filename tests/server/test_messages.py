"""Messages over a real socket: Anthropic's SDK and its types judge every answer and every event."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from ds4.engine.types import SamplingParams
from ds4.errors import EngineError
from ds4.testing import Script, ScriptedEngine
from tests.support.api import (
    NamedEvent,
    anthropic_sdk,
    check_stream,
    named_events,
    openai_error,
    parse_events,
    read_until,
)
from tests.support.renderers import thinking_server
from tests.support.running_server import RunningServer, Serve

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOL = {
    "name": "bash",
    "description": "runs a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}},
}
CALL = (
    "I will look.\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls -l\n</parameter>\n"
    "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
)
TWO_CALLS = CALL + "\n<tool_call>\n<function=bash>\n<parameter=command>\npwd\n</parameter>\n</function>\n</tool_call>"
HI = {"role": "user", "content": "hi"}


def post(server: RunningServer, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 100, "messages": list(messages or (HI,)), **fields}
    return server.http.post("/v1/messages?beta=true", json=body)


def whole(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body = response.json()
    Message.model_validate(body, strict=True)
    return body


def events(response: httpx.Response) -> list[NamedEvent]:
    """The events, each valid by Anthropic's types and in an order that the protocol allows."""
    found = named_events(response)
    check_order(found)
    return found


def check_order(found: list[NamedEvent]) -> None:
    names = [e.name for e in found if e.name != "ping"]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    is_open: int | None = None
    n_blocks = deltas = 0
    for event in found:
        if event.name == "ping":
            continue
        EVENT.validate_python(event.data, strict=True)
        if event.name == "content_block_start":
            assert is_open is None, "two blocks are open"
            assert event.data["index"] == n_blocks
            is_open, deltas = n_blocks, 0
            n_blocks += 1
        elif event.name == "content_block_delta":
            assert event.data["index"] == is_open
            deltas += 1
        elif event.name == "content_block_stop":
            assert event.data["index"] == is_open
            is_open = None
        else:
            assert is_open is None


def blocks(found: list[NamedEvent]) -> list[dict[str, Any]]:
    """The message's content put together from its deltas, as a client does it."""
    content: list[dict[str, Any]] = []
    for event in found:
        if event.name == "content_block_start":
            content.append(dict(event.data["content_block"]))
            partial = ""
        elif event.name == "content_block_delta":
            delta = event.data["delta"]
            kind = delta["type"]
            if kind == "input_json_delta":
                partial += delta["partial_json"]
            else:
                member = kind.removesuffix("_delta")
                content[-1][member] += delta[member]
        elif event.name == "content_block_stop" and content[-1]["type"] == "tool_use":
            content[-1]["input"] = json.loads(partial or "{}")
    return content


def error(response: httpx.Response, status: int = 400, kind: str = "invalid_request_error") -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert body["error"]["type"] == kind
    return body["error"]


def prompt_of(server: RunningServer, *messages: dict[str, Any], **fields: Any) -> str:
    whole(post(server, *messages, **fields))
    return server.engine.prompts[-1]


# ---- Anthropic's SDK --------------------------------------------------------------------------------------------


def test_sdk_whole_answer(serve: Serve) -> None:
    with anthropic_sdk(serve("Hello there, friend.")) as client:
        answer = client.messages.create(model="any", max_tokens=50, messages=[HI])
    assert re.fullmatch(r"msg_[0-9a-f]{24}", answer.id)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "any")
    (block,) = answer.content
    assert (block.type, block.type == "text" and block.text) == ("text", "Hello there, friend.")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == 3


def test_sdk_stream_helper(serve: Serve) -> None:
    server = serve(Script.text(CALL, 3))
    with (
        anthropic_sdk(server) as client,
        client.messages.stream(model="m", max_tokens=90, messages=[HI], tools=[TOOL]) as stream,
    ):
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"text", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    text, call = message.content
    assert text.type == "text" and text.text == "I will look."
    assert call.type == "tool_use" and call.input == {"command": "ls -l", "n": 3}
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_sdk_tool_loop(serve: Serve, stream: bool) -> None:
    server = serve(TWO_CALLS, "Two files.")
    messages: list[Any] = [{"role": "user", "content": "list files"}]
    with anthropic_sdk(server) as client:

        def ask() -> Message:
            request = {"model": "m", "max_tokens": 90, "messages": messages, "tools": [TOOL]}
            if not stream:
                return client.messages.create(**request)
            with client.messages.stream(**request) as events:
                return events.get_final_message()

        first = ask()
        assert first.stop_reason == "tool_use"
        calls = [block for block in first.content if block.type == "tool_use"]
        assert all(re.fullmatch(r"toolu_[0-9a-f]{32}", call.id) for call in calls)
        assert [call.input for call in calls] == [{"command": "ls -l", "n": 3}, {"command": "pwd"}]
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": f"r{i}"} for i, c in enumerate(calls)]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = ask()
    assert second.content[0].type == "text" and second.content[0].text == "Two files."
    # The sampled block stands in the history as it was sampled.
    assert (
        f"<|im_start|>assistant\n{TWO_CALLS}<|im_end|>\n<|im_start|>user\n<tool_response>\nr0\n</tool_response>\n"
        "<tool_response>\nr1\n</tool_response><|im_end|>" in server.engine.prompts[1]
    )
    assert second.usage.cache_read_input_tokens and second.usage.cache_read_input_tokens > 0


def test_sdk_errors_have_their_types(serve: Serve) -> None:
    server = serve(api_keys=("right",))
    with anthropic_sdk(server, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError, match="incorrect API key"):
            client.messages.create(model="m", max_tokens=5, messages=[HI])
        client.api_key = "right"
        with pytest.raises(anthropic.BadRequestError, match="role"):
            client.messages.create(model="m", max_tokens=5, messages=[{"role": "x", "content": ""}])
        assert client.messages.create(model="m", max_tokens=5, messages=[HI]).content
    server = serve()
    server.engine.fail_in_prefill(EngineError("no memory"))
    with anthropic_sdk(server) as client, pytest.raises(anthropic.InternalServerError, match="no memory"):
        client.messages.create(model="m", max_tokens=5, messages=[HI])
    server.engine.fail_in_prefill(EngineError("no memory"))
    with anthropic_sdk(server) as client, pytest.raises(anthropic.APIStatusError, match="no memory"):
        list(client.messages.create(model="m", max_tokens=5, messages=[HI], stream=True))


def test_sdk_models_and_count(serve: Serve) -> None:
    server = serve()
    with anthropic_sdk(server) as client:
        assert [m.id for m in client.models.list()] == ["scripted"]
        counted = client.messages.count_tokens(model="m", system="Be brief.", messages=[HI], tools=[TOOL])
    used = whole(post(server, system="Be brief.", tools=[TOOL]))["usage"]
    assert counted.input_tokens == used["input_tokens"] + used["cache_creation_input_tokens"]


# ---- shapes -----------------------------------------------------------------------------------------------------


def test_whole_answer_shape(serve: Serve) -> None:
    server = serve("Hi.")
    body = whole(post(server))
    assert list(body) == ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"]
    assert body["content"] == [{"type": "text", "text": "Hi."}]
    used = body["usage"]
    prompt = used["cache_creation_input_tokens"]
    assert used == {
        "input_tokens": 0,
        "output_tokens": 1,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": prompt,
    }
    again = whole(post(server))["usage"]
    assert again["cache_read_input_tokens"] > 0
    assert sum(again.values()) == prompt + 1


@pytest.mark.parametrize(
    "text", [CALL, TWO_CALLS, "just text", "", "<tool_call>\n<function=bash>\n</function>\n</tool_call>"]
)
def test_stream_equals_whole(serve: Serve, text: str) -> None:
    server = serve(Script.text(text, 4), slots=1)
    stream = events(post(server, tools=[TOOL], stream=True))
    body = whole(post(server, tools=[TOOL]))
    strip = [{k: v for k, v in block.items() if k != "id"} for block in body["content"]]
    assert [{k: v for k, v in block.items() if k != "id"} for block in blocks(stream)] == strip
    last = stream[-2].data
    assert last["delta"] == {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    assert last["usage"]["output_tokens"] == body["usage"]["output_tokens"]
    start = stream[0].data["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert {**start["usage"], "output_tokens": 0} == {**last["usage"], "output_tokens": 0}
    assert start["id"].startswith("msg_")


def test_thinking_blocks(serve: Serve) -> None:
    call = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    server = thinking_server(serve, Script.text(f"Look first.</think>I will list.\n\n{call}", 3), slots=1)
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": [TOOL]}
    stream = events(post(server, **fields, stream=True))
    content = blocks(stream)
    assert [b["type"] for b in content] == ["thinking", "text", "tool_use"]
    signature = stream[0].data["message"]["id"]
    assert content[0] == {"type": "thinking", "thinking": "Look first.", "signature": signature}
    assert content[1]["text"] == "I will list."
    assert content[2]["input"] == {"command": "ls"}
    body = whole(post(server, **fields))
    assert [b["type"] for b in body["content"]] == ["thinking", "text", "tool_use"]
    assert body["content"][0]["signature"] == body["id"]
    off = whole(post(server, thinking={"type": "disabled"}))
    assert [b["type"] for b in off["content"]] == ["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_alone_is_followed_by_an_empty_text(serve: Serve, stream: bool) -> None:
    server = thinking_server(serve, "hmm, hmm")
    response = post(server, max_tokens=1, stream=stream)
    content = blocks(events(response)) if stream else whole(response)["content"]
    assert [b["type"] for b in content] == ["thinking", "text"]
    assert content[1]["text"] == ""


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(serve: Serve, stream: bool) -> None:
    server = serve("one,two,three four", slots=1)
    for fields, text, reason, stop in (
        ({}, "one,two,three four", "end_turn", None),
        ({"max_tokens": 1}, "one,two,three", "max_tokens", None),
        ({"max_tokens": 384000}, "one,two,three four", "end_turn", None),
        ({"max_tokens": 0}, "", "max_tokens", None),
        ({"stop_sequences": ["never", "o,th"]}, "one,tw", "stop_sequence", "o,th"),
    ):
        response = post(server, **fields, stream=stream)
        if stream:
            found = events(response)
            assert blocks(found) == [{"type": "text", "text": text}]
            assert found[-2].data["delta"] == {"stop_reason": reason, "stop_sequence": stop}
        else:
            body = whole(response)
            assert body["content"] == [{"type": "text", "text": text}]
            assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)


def test_timings_when_asked(serve: Serve) -> None:
    server = serve("Hi.")
    assert whole(post(server, timings=True))["usage"]["timings"]["predicted_n"] == 1
    assert "timings" in events(post(server, timings=True, stream=True))[-2].data["usage"]
    assert "timings" not in whole(post(server))["usage"]


# ---- fields -----------------------------------------------------------------------------------------------------


def test_sampling_fields_reach_the_sampler(serve: Serve) -> None:
    server = serve()
    whole(post(server, temperature=0.5, top_p=0.9, top_k=40))
    assert server.engine.samplers[-1].params == SamplingParams(temperature=0.5, top_p=0.9, top_k=40)
    nulls = ("system", "tools", "tool_choice", "temperature", "top_p", "top_k", "stop_sequences", "thinking", "stream")
    whole(post(server, **dict.fromkeys((*nulls, "max_tokens", "output_config", "metadata"))))
    assert server.engine.samplers[-1].params == SamplingParams()


def test_what_claude_code_sends(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    caplog.set_level("INFO", "ds4.server")
    mark = {"cache_control": {"type": "ephemeral"}}
    response = post(
        server,
        {"role": "user", "content": [{"type": "text", "text": "do it", **mark}]},
        {"role": "system", "content": [{"type": "text", "text": "context", **mark}]},
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=4fe;"},
            {"type": "text", "text": "You are an agent.", **mark},
            {"type": "text", "text": ""},
            {"type": "text", "text": "Rules.\n"},
            {"type": "text", "text": "More."},
        ],
        metadata={"user_id": "{}"},
        thinking={"type": "adaptive", "display": "omitted"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        tools=[
            {**TOOL, "defer_loading": True, "eager_input_streaming": True, **mark},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        tool_choice={"type": "auto"},
        stream=True,
    )
    events(response)
    prompt = server.engine.prompts[0]
    assert "You are an agent.\nRules.\nMore.<|im_end|>" in prompt
    assert "billing" not in prompt and "web_search" not in prompt and "cache_control" not in prompt
    assert "user\ndo it<|im_end|>\n<|im_start|>system\ncontext<|im_end|>\n" in prompt
    noted = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    assert sorted(noted) == [
        f"messages: field {name!r} has no effect"
        for name in ("context_management", "metadata", "thinking.display", "tools.web_search_20250305")
    ]


def test_marks_on_tools_and_forms_of_content_do_not_change_the_prompt(serve: Serve) -> None:
    server = serve()
    plain = prompt_of(server, {"role": "system", "content": "s"}, HI, tools=[TOOL], system="a\nb")
    marked = prompt_of(
        server,
        {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        tools=[{"type": "custom", **TOOL, "cache_control": {"type": "ephemeral"}}],
        system=["a", {"type": "text", "text": "b"}],
    )
    assert plain == marked
    assert '"parameters": {"type": "object"' in plain


def test_tool_choice(serve: Serve) -> None:
    server = serve(CALL)
    hidden = whole(post(server, tools=[TOOL], tool_choice={"type": "none"}))
    assert hidden["content"] == [{"type": "text", "text": CALL}]
    assert "bash" not in server.engine.prompts[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        ({"system": 5}, "system"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": "x"}, "tools"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop_sequences": [5]}, "stop_sequences[0]"),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "sometimes"}, "tools": [TOOL]}, "tool_choice"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": True}, "temperature"),
        ({"thinking": 5}, "thinking"),
    ],
)
def test_refused_fields_are_named(serve: Serve, fields: dict[str, Any], param: str) -> None:
    server = serve()
    assert error(post(server, **fields))["param"] == param
    assert server.engine.prompts == []


def test_content_that_occurs_twice(serve: Serve) -> None:
    body = '{"max_tokens":5,"messages":[{"role":"user","content":"x","content":"y"}]}'
    assert error(serve().http.post("/v1/messages", content=body))["param"] == "messages[0].content"


# ---- messages ---------------------------------------------------------------------------------------------------


def test_history_of_calls(serve: Serve) -> None:
    server = serve()
    use = {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls", "n": 1}}
    history = (
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "plan", "signature": "s"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "Look."},
                use,
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "is_error": False,
                    "content": [
                        {"type": "text", "text": "a.c\n"},
                        "b.c\n",
                        {"type": "image", "source": {}},
                        {"type": "tool_reference", "tool_name": "Grep"},
                    ],
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    )
    prompt = prompt_of(server, *history, tools=[TOOL])
    assert "assistant\nLook.\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n" in prompt
    assert "<tool_response>\na.c\nb.c\n[Unsupported image][tool_reference Grep]\n</tool_response><|im_end|>\n" in prompt
    assert "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n" in prompt
    assert "xyz" not in prompt


def test_a_failed_result_says_so_itself(serve: Serve) -> None:
    """`is_error` adds nothing to the text of a result."""
    server = serve()
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "bash", "input": {}}]}

    def prompt(**more: Any) -> str:
        result = {"type": "tool_result", "tool_use_id": "t", "content": "no such file", **more}
        return prompt_of(server, HI, use, {"role": "user", "content": [result]})

    assert prompt(is_error=True) == prompt(is_error=False) == prompt()


def test_members_of_a_block_in_any_order(serve: Serve) -> None:
    server = serve()
    use = '{"input":{"command":"ls"},"name":"bash","id":"t","type":"tool_use"}'
    result = '{"content":[{"text":"R","type":"text"}],"tool_use_id":"t","type":"tool_result"}'
    turned = f'{{"messages":[{{"content":[{use}],"role":"assistant"}},{{"content":[{result}],"role":"user"}}]}}'
    assert server.http.post("/v1/messages", content=turned).status_code == 200
    straight = json.loads(turned)
    for message in straight["messages"]:
        message["content"] = [dict(sorted(block.items(), key=lambda m: m[0] != "type")) for block in message["content"]]
    assert server.http.post("/v1/messages", json=straight).status_code == 200
    first, second = server.engine.prompts
    assert first == second and "<parameter=command>\nls\n" in first and "<tool_response>\nR\n" in first


def test_final_assistant_message_is_continued(serve: Serve) -> None:
    server = serve(", three")
    history = (HI, {"role": "assistant", "content": "one, two"})
    body = whole(post(server, *history))
    assert server.engine.prompts[-1].endswith("<|im_start|>assistant\none, two")
    assert body["content"] == [{"type": "text", "text": ", three"}]


def test_results_of_unknown_calls(serve: Serve) -> None:
    server = serve()
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "x"}]}
    assert error(post(server, HI, result))["message"] == (
        "Anthropic continuation state is not available for tool_use_id toolu_9; "
        "retry by replaying the full messages history"
    )
    counted = server.http.post("/v1/messages/count_tokens", json={"messages": [HI, result]})
    assert counted.status_code == 200 and counted.json()["input_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_results_alone_continue_the_live_turn(serve: Serve, stream: bool) -> None:
    server = serve(TWO_CALLS, "Done.")
    first = post(server, tools=[TOOL], system="Be brief.", stream=stream)
    content = blocks(events(first)) if stream else whole(first)["content"]
    ids = [b["id"] for b in content if b["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": i, "content": "ok"} for i in ids]
    assert whole(post(server, {"role": "user", "content": results}))["content"][0]["text"] == "Done."
    replayed = prompt_of(
        server,
        HI,
        {"role": "assistant", "content": content},
        {"role": "user", "content": results},
        tools=[TOOL],
        system="Be brief.",
    )
    assert server.engine.prompts[1] == replayed
    one = error(post(server, {"role": "user", "content": results[:1]}))
    assert ids[0] in one["message"]


# ---- context, failures, time ------------------------------------------------------------------------------------


def test_context_overflow(serve: Serve) -> None:
    server = serve(ScriptedEngine("a b", ctx=200))
    found = error(post(server, {"role": "user", "content": "x" * 200}))
    used = found["n_prompt_tokens"]
    assert found["message"].startswith(f"Prompt has {used} tokens, but the configured context size is 200 tokens")
    assert f"prompt is too long: {used} tokens > 199 maximum" in found["message"]
    assert set(found) == {"type", "message", "n_prompt_tokens", "n_ctx"}


def test_errors_of_the_transport_have_the_shape(serve: Serve) -> None:
    server = serve()
    assert "JSON" in error(server.http.post("/v1/messages", content=b"{,}"))["message"]
    assert "JSON" in error(server.http.post("/messages/count_tokens", content=b"{,}"))["message"]
    broken = server.http.post("/v1/messages", content=b"x", headers={"content-encoding": "br"})
    error(broken, 415)
    error(server.http.get("/v1/messages"), 404, "not_found_error")
    openai_error(server.http.get("/v1/messages/batches"), 404)


def test_engine_error_in_the_stream(serve: Serve) -> None:
    server = serve(Script.text("a b c d").fail_at(3), "fine")
    response = post(server, stream=True)
    check_stream(response)
    found = parse_events(response.text)
    assert found[0].name == "message_start"
    assert found[-1].data == {
        "type": "error",
        "error": {"type": "api_error", "message": "scripted failure at token 3"},
    }
    assert not {"message_delta", "message_stop"} & {e.name for e in found}
    assert whole(post(server))["content"][0]["text"] == "fine"


def test_a_broken_call_is_never_executed(serve: Serve) -> None:
    broken = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n<oops"
    server = serve(Script.text(broken, 4))
    response = post(server, tools=[TOOL], stream=True)
    found = parse_events(response.text)
    assert found[-1].name == "error" and "unterminated tool call" in found[-1].data["error"]["message"]
    body = whole(post(server, tools=[TOOL]))
    assert (body["content"], body["stop_reason"]) == ([{"type": "text", "text": broken}], "end_turn")


def test_a_call_cut_by_the_limit_is_not_remembered(serve: Serve) -> None:
    server = serve(Script.text(CALL, 4))
    found = events(post(server, tools=[TOOL], max_tokens=20, stream=True))
    assert found[-2].data["delta"]["stop_reason"] == "max_tokens"
    assert len(server.app._service.live) == 0


def test_message_start_and_pings_come_before_the_prompt_is_evaluated(serve: Serve) -> None:
    engine = ScriptedEngine("late")
    server = serve(engine, keepalive_seconds=0.05)
    body = {"messages": [HI], "stream": True, "max_tokens": 5}
    with engine.paused(), server.http.stream("POST", "/v1/messages", json=body) as response:
        pieces = response.iter_raw()
        got = read_until(pieces, b"event: ping\ndata: ")
        assert engine.steps == []
        engine._open_gate.set()
        got += b"".join(pieces)
    found = parse_events(got.decode())
    check_order(found)
    assert found[0].name == "message_start" and found[1].data == {"type": "ping"}


def test_a_queued_request_gets_message_start_first(serve: Serve) -> None:
    engine = ScriptedEngine(Script.text("word ").endless().slow(0.002), "second")
    server = serve(engine, slots=1, keepalive_seconds=0.05)
    body = {"messages": [HI], "stream": True}
    with server.http.stream("POST", "/v1/messages", json=body) as first:
        running = first.iter_raw()
        assert b"message_start" in next(running)
        with (
            httpx.Client(base_url=server.url, timeout=30) as http,
            http.stream("POST", "/v1/messages", json={**body, "max_tokens": 3}) as second,
        ):
            pieces = second.iter_raw()
            got = read_until(pieces, b"event: ping")
            first.close()
            got += b"".join(pieces)
    found = parse_events(got.decode())
    check_order(found)
    start, end = found[0].data["message"]["usage"], found[-2].data["usage"]
    assert sum(start.values()) == sum(end.values()) - end["output_tokens"], "the prompt is counted once"
