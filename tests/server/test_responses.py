"""Responses over a real socket: OpenAI's SDK and its types judge every answer and every event."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ds4.engine.types import SamplingParams
from ds4.testing import Script, ScriptedEngine
from tests.support.api import (
    NamedEvent,
    check_stream,
    named_events,
    openai_error,
    openai_sdk,
    parse_events,
    read_until,
)
from tests.support.renderers import thinking_server
from tests.support.running_server import RunningServer, Serve

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

TOOL = {
    "type": "function",
    "name": "bash",
    "description": "runs a command",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: line+\nline: /[^\\n]*\\n?/"},
}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "",
    "tools": [
        {"type": "function", "name": "spawn", "description": "starts one", "parameters": {"type": "object"}},
        {"type": "custom", "name": "exec", "description": "runs code"},
    ],
}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object", "properties": {"q": {}}}}


def call(name: str, **arguments: str) -> str:
    members = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{members}</function>\n</tool_call>"


CALL = "I will look.\n\n" + call("bash", command="ls -l", n="3")
TWO_CALLS = CALL + "\n" + call("bash", command="pwd")


def post(server: RunningServer, input: object = "hi", **fields: Any) -> httpx.Response:
    return server.http.post("/v1/responses", json={"model": "m", "input": input, **fields})


def whole(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body = response.json()
    Response.model_validate(body, strict=True)
    return body


def events(response: httpx.Response) -> list[NamedEvent]:
    found = named_events(response)
    check_events(found)
    return found


def check_events(found: list[NamedEvent]) -> None:
    """Valid by OpenAI's types, numbered, and every item complete before the end."""
    assert [e.data["sequence_number"] for e in found] == list(range(len(found)))
    assert [e.name for e in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1].name in ("response.completed", "response.incomplete")
    is_open: dict[int, str] = {}
    n_items = 0
    for event in found:
        EVENT.validate_python(event.data, strict=True)
        if event.name == "response.output_item.added":
            assert event.data["output_index"] == n_items
            is_open[n_items] = event.data["item"]["id"]
            n_items += 1
        elif event.name == "response.output_item.done":
            assert is_open.pop(event.data["output_index"]) == event.data["item"]["id"]
        elif "item_id" in event.data:
            assert is_open[event.data["output_index"]] == event.data["item_id"]
    assert not is_open
    done = [e.data["item"] for e in found if e.name == "response.output_item.done"]
    assert found[-1].data["response"]["output"] == done


def joined(found: list[NamedEvent], name: str) -> str:
    return "".join(e.data["delta"] for e in found if e.name == name)


def bare(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without their ids, which are random."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


def prompt_of(server: RunningServer, input: object, **fields: Any) -> str:
    whole(post(server, input, **fields))
    return server.engine.prompts[-1]


# ---- OpenAI's SDK -----------------------------------------------------------------------------------------------


def test_sdk_whole_answer(serve: Serve) -> None:
    server = serve("Hello there, friend.")
    with openai_sdk(server) as client:
        answer = client.responses.create(model="any", input="hi", instructions="Be brief.")
    assert re.fullmatch(r"resp_[0-9a-f]{24}", answer.id)
    assert (answer.object, answer.model, answer.status) == ("response", "any", "completed")
    assert answer.output_text == "Hello there, friend."
    assert (answer.instructions, answer.error, answer.incomplete_details) == ("Be brief.", None, None)
    assert answer.usage is not None and answer.usage.output_tokens == 3
    assert answer.usage.total_tokens == answer.usage.input_tokens + 3
    assert "system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in server.engine.prompts[0]


def test_sdk_stream_helper(serve: Serve) -> None:
    server = serve(Script.text(CALL, 3))
    with (
        openai_sdk(server) as client,
        client.responses.stream(model="m", input="list", tools=[TOOL]) as stream,
    ):
        kinds = {event.type for event in stream}
        answer = stream.get_final_response()
    assert {"response.output_text.delta", "response.function_call_arguments.done", "response.completed"} <= kinds
    message, made = answer.output
    assert answer.output_text == "I will look."
    assert message.type == "message"
    assert made.type == "function_call" and json.loads(made.arguments) == {"command": "ls -l", "n": 3}


@pytest.mark.parametrize("previous", [False, True])
def test_sdk_tool_loop(serve: Serve, previous: bool) -> None:
    server = serve(TWO_CALLS, "Two files.")
    with openai_sdk(server) as client:
        first = client.responses.create(model="m", input="list files", tools=[TOOL])
        calls = [item for item in first.output if item.type == "function_call"]
        assert [json.loads(c.arguments) for c in calls] == [{"command": "ls -l", "n": 3}, {"command": "pwd"}]
        assert all(re.fullmatch(r"call_[0-9a-f]{32}", c.call_id) for c in calls)
        results: list[Any] = [
            {"type": "function_call_output", "call_id": c.call_id, "output": f"r{i}"} for i, c in enumerate(calls)
        ]
        if previous:
            second = client.responses.create(model="m", previous_response_id=first.id, input=results, tools=[TOOL])
            assert second.previous_response_id == first.id
        else:
            history: list[Any] = [{"role": "user", "content": "list files"}, *first.output, *results]
            second = client.responses.create(model="m", input=history, tools=[TOOL])
    assert second.output_text == "Two files."
    # The sampled block stands in the history as it was sampled.
    assert (
        f"<|im_start|>assistant\n{TWO_CALLS}<|im_end|>\n<|im_start|>user\n<tool_response>\nr0\n</tool_response>\n"
        "<tool_response>\nr1\n</tool_response><|im_end|>" in server.engine.prompts[1]
    )
    assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 0


def test_sdk_errors_have_their_types(serve: Serve) -> None:
    server = serve()
    with openai_sdk(server) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input=[{"role": "robot", "content": "x"}])
        assert caught.value.param == "input[0].role"
        server.engine.fail_in_prefill()
        with pytest.raises(openai.InternalServerError):
            client.responses.create(model="m", input="x")


# ---- shapes -----------------------------------------------------------------------------------------------------


def test_whole_answer_shape(serve: Serve) -> None:
    server = serve("Hi.")
    body = whole(post(server, tools=[TOOL], temperature=0.5, metadata={"a": "b"}, max_output_tokens=9))
    assert bare(body["output"]) == [
        {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": []}],
        }
    ]
    assert body["tools"] == [TOOL]
    echoed = ("temperature", "top_p", "metadata", "max_output_tokens", "tool_choice", "parallel_tool_calls")
    assert [body[name] for name in echoed] == [0.5, 1.0, {"a": "b"}, 9, "auto", True]
    used = body["usage"]
    assert used["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": used["input_tokens"]}
    again = whole(post(server, tools=[TOOL]))["usage"]["input_tokens_details"]
    assert again["cached_tokens"] > 0
    assert sum(again.values()) == used["input_tokens"]


@pytest.mark.parametrize("text", [CALL, TWO_CALLS, "just text", "", call("bash")])
def test_stream_equals_whole(serve: Serve, text: str) -> None:
    server = serve(Script.text(text, 4), slots=1)
    found = events(post(server, tools=[TOOL], stream=True))
    body = whole(post(server, tools=[TOOL]))
    last = found[-1].data["response"]
    assert bare(last["output"]) == bare(body["output"])
    same = ("status", "tools", "tool_choice", "model", "incomplete_details")
    assert [last[k] for k in same] == [body[k] for k in same]
    assert last["usage"]["output_tokens"] == body["usage"]["output_tokens"]
    assert joined(found, "response.output_text.delta") == "".join(
        part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]
    )
    assert joined(found, "response.function_call_arguments.delta") == "".join(
        item["arguments"] for item in body["output"] if item["type"] == "function_call"
    )


def test_order_of_events(serve: Serve) -> None:
    found = events(post(serve(Script.text(CALL, 100)), tools=[TOOL], stream=True))
    names = [e.name.removeprefix("response.") for e in found]
    assert [name for name, before in zip(names, ["", *names], strict=False) if name != before] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert found[0].data["response"]["status"] == "in_progress"
    assert found[0].data["response"]["output"] == []
    assert [e.data["name"] for e in found if e.name.endswith("call_arguments.done")] == ["bash"]


def test_percent_signs_and_quotes_are_text(serve: Serve) -> None:
    text = '100% "sure" \\ %d\n'
    found = events(post(serve(Script.text(text, 2)), stream=True))
    assert joined(found, "response.output_text.delta") == text


@pytest.mark.parametrize("summary", [None, "auto", "detailed"])
def test_reasoning_items_only_when_asked(serve: Serve, summary: str | None) -> None:
    server = thinking_server(serve, Script.text("Let me see.</think>Yes.", 3), slots=1)
    fields = {"reasoning": {"effort": "high", "summary": summary}}
    found = events(post(server, **fields, stream=True))
    body = whole(post(server, **fields))
    assert bare(found[-1].data["response"]["output"]) == bare(body["output"])
    kinds = [item["type"] for item in body["output"]]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    if summary is None:
        assert kinds == ["message"]
        return
    assert kinds == ["reasoning", "message"]
    assert body["output"][0]["summary"] == [{"type": "summary_text", "text": "Let me see."}]
    assert body["output"][0]["status"] == "completed"
    assert joined(found, "response.reasoning_summary_text.delta") == "Let me see."
    names = [e.name for e in found]
    assert names.index("response.reasoning_summary_part.done") < names.index("response.content_part.added")
    assert body["reasoning"] == {"effort": "high", "summary": summary}


def test_effort_none_turns_thinking_off(serve: Serve) -> None:
    server = thinking_server(serve, "Yes.")
    body = whole(post(server, reasoning={"effort": "none", "summary": "auto"}, model="x-reasoner"))
    assert [item["type"] for item in body["output"]] == ["message"]
    on = whole(post(server, reasoning={"effort": "low", "summary": "auto"}, model="x-chat"))
    assert [item["type"] for item in on["output"]] == ["reasoning"]


@pytest.mark.parametrize("stream", [False, True])
def test_limit_is_incomplete(serve: Serve, stream: bool) -> None:
    server = serve("a b c")
    response = post(server, max_output_tokens=2, stream=stream)
    if stream:
        found = events(response)
        assert found[-1].name == "response.incomplete"
        body = found[-1].data["response"]
    else:
        body = whole(response)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["output"][0]["status"], body["output"][0]["content"][0]["text"]) == ("incomplete", "a b")


def test_a_call_cut_by_the_limit_is_never_done(serve: Serve) -> None:
    server = serve(Script.text(CALL, 4))
    response = post(server, tools=[TOOL], max_output_tokens=20, stream=True)
    found = named_events(response)
    assert found[-1].name == "response.incomplete"
    added = [e.data["item"]["type"] for e in found if e.name == "response.output_item.added"]
    done = [e.data["item"]["type"] for e in found if e.name == "response.output_item.done"]
    assert (added, done) == (["message", "function_call"], ["message"])
    assert [item["type"] for item in found[-1].data["response"]["output"]] == ["message"]


def test_calls_are_done_only_when_their_block_is_complete(serve: Serve) -> None:
    broken = TWO_CALLS.removesuffix("</tool_call>") + "<oops"
    server = serve(Script.text(broken, 4))
    response = post(server, tools=[TOOL], stream=True)
    found = parse_events(response.text)
    assert found[-1].name == "response.failed"
    assert found[-1].data["response"]["error"]["code"] == "server_error"
    assert {e.data["item"]["type"] for e in found if e.name == "response.output_item.done"} == {"message"}


def test_timings_when_asked(serve: Serve) -> None:
    server = serve("Hi.")
    assert whole(post(server, timings=True))["usage"]["timings"]["predicted_n"] == 1
    assert "timings" not in whole(post(server))["usage"]


# ---- tools ------------------------------------------------------------------------------------------------------


def both(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """The last item of an answer, streamed and not: the same but for its ids."""
    found = events(post(server, **fields, stream=True))
    body = whole(post(server, **fields))
    streamed = found[-1].data["response"]["output"][-1]
    (plain,) = bare(body["output"][-1:])
    assert bare([streamed]) == [plain]
    return plain


def test_reasoning_is_replayed_as_it_was_announced(serve: Serve) -> None:
    """LangChain keeps the item of `response.output_item.added`, whose status is that of its beginning."""
    server = serve("ok")

    def prompt(**status: str) -> str:
        thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], **status}
        said = {"type": "message", "role": "assistant", "content": "yes"}
        assert post(server, [{"role": "user", "content": "x"}, thought, said]).status_code == 200
        return server.engine.prompts[-1]

    assert prompt(status="in_progress") == prompt(status="completed") == prompt()


def test_custom_tools_come_back_as_such(serve: Serve) -> None:
    text = '*** Begin Patch\n+a "quoted" line\n*** End Patch'
    server = serve(Script.text(call("apply_patch", input=text), "bytes"), slots=1)
    item = both(server, tools=[PATCH])
    assert item == {"type": "custom_tool_call", "status": "completed", "name": "apply_patch", "input": text}
    declared = json.loads(server.engine.prompts[0].split('"function": ')[1].splitlines()[0][:-1])
    assert declared["name"] == "apply_patch"
    assert declared["parameters"]["required"] == ["input"]
    assert "start: line+" in declared["parameters"]["properties"]["input"]["description"]
    found = events(post(server, tools=[PATCH], stream=True))
    assert joined(found, "response.custom_tool_call_input.delta") == text
    assert [e.data["input"] for e in found if e.name == "response.custom_tool_call_input.done"] == [text]


@pytest.mark.parametrize("said", ["agentsspawn", "spawn"])
def test_namespace_tools_come_back_with_their_namespace(serve: Serve, said: str) -> None:
    server = serve(Script.text(call(said), 5), slots=1)
    item = both(server, tools=[NAMESPACE])
    assert item == {
        "type": "function_call",
        "status": "completed",
        "name": "spawn",
        "namespace": "agents",
        "arguments": "{}",
    }
    assert (
        '{"name": "agentsspawn", "description": "starts one", "parameters": {"type": "object"}}'
        in (server.engine.prompts[0])
    )
    (done,) = [
        e.data for e in events(post(server, tools=[NAMESPACE], stream=True)) if e.name.endswith("arguments.done")
    ]
    assert (done["name"], done["namespace"], done["arguments"]) == ("spawn", "agents", "{}")


def test_custom_tools_in_an_additional_tools_item(serve: Serve) -> None:
    server = serve(Script.text(call("agentsexec", input="1+1"), 5), slots=1)
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE]},
        {"role": "user", "content": "go"},
    ]
    item = both(server, input=items)
    assert item["type"] == "custom_tool_call"
    assert (item["name"], item["namespace"], item["input"]) == ("exec", "agents", "1+1")


@pytest.mark.parametrize(("choice", "said"), [("exec", "agentsexec"), ("apply_patch", "apply_patch")])
def test_a_custom_tool_can_be_forced(serve: Serve, choice: str, said: str) -> None:
    """The constraint is that of the declared name: another call in the script would be an error."""
    server = serve(Script.text(call(said, input="1+1"), "bytes"), slots=1)
    fields = {"tools": [NAMESPACE, PATCH, TOOL], "tool_choice": {"type": "custom", "name": choice}}
    (item,) = whole(post(server, **fields))["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", choice, "1+1")
    server = serve(Script.text(call("bash"), "bytes"))
    assert post(server, **fields).status_code == 500


def test_tool_search(serve: Serve) -> None:
    server = serve(Script.text(call("tool_search", q="files"), 5), slots=1)
    item = both(server, tools=[SEARCH])
    assert item["type"] == "tool_search_call"
    assert (item["execution"], item["arguments"]) == ("client", {"q": "files"})
    found = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": [TOOL]}
    asked = {"type": "tool_search_call", "call_id": "c1", "arguments": {"q": "files"}, "status": "completed"}
    prompt = prompt_of(server, [{"role": "user", "content": "x"}, asked, found], tools=[SEARCH])
    assert '"name": "bash", "description": "runs a command"' in prompt.partition("<|im_end|>")[0]
    assert "<function=tool_search>\n<parameter=q>\nfiles\n" in prompt


def test_declarations_that_say_little_are_completed(serve: Serve) -> None:
    server = serve()
    tools = [
        {"type": "tool_search"},
        {"type": "namespace", "name": "ns.", "tools": [{"type": "function", "name": "a"}]},
        {"type": "namespace", "name": "ns.", "tools": [{"type": "function", "name": "b", "input_schema": {"x": [1]}}]},
        {"type": "custom", "name": "c"},
        {"type": "function", "name": "d"},
    ]
    assert post(server, tools=tools).status_code == 200
    (prompt,) = server.engine.prompts
    nothing = '{"type": "object", "properties": {}}'
    text = '{"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}'
    for line in (
        f'{{"name": "tool_search", "description": "Search available tools.", "parameters": {nothing}}}',
        f'{{"name": "ns.a", "description": "", "parameters": {nothing}}}',
        '{"name": "ns.b", "description": "", "parameters": {"x": [1]}}',
        f'{{"name": "c", "description": "", "parameters": {text}}}',
        '{"name": "d"}',
    ):
        assert f'{{"type": "function", "function": {line}}}\n' in prompt


def test_the_first_declaration_of_a_tool_stands(serve: Serve) -> None:
    server = serve()
    again = {"type": "additional_tools", "tools": [{**TOOL, "description": "other"}]}
    user = {"role": "user", "content": "x"}
    assert prompt_of(server, [user, again], tools=[TOOL]) == prompt_of(server, [user], tools=[TOOL])


def test_hosted_tools_are_left_out_and_noted(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    caplog.set_level("INFO", "ds4.server")
    hosted = {**NAMESPACE, "tools": [*NAMESPACE["tools"], {"type": "file_search"}]}
    response = post(server, "x", tools=[{"type": "web_search"}, {"type": "mcp", "server_label": "s"}, hosted])
    assert response.status_code == 200
    (prompt,) = server.engine.prompts
    assert "web_search" not in prompt and "mcp" not in prompt and "agentsspawn" in prompt
    noted = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    assert noted == [f"responses: field 'tools.{kind}' has no effect" for kind in ("web_search", "mcp", "file_search")]


# ---- input ------------------------------------------------------------------------------------------------------


def test_items_of_every_kind(serve: Serve) -> None:
    server = serve(Script.text("ok", "bytes"))
    prompt = prompt_of(
        server,
        [
            {"type": "message", "role": "developer", "id": "msg_1", "content": [{"type": "input_text", "text": "D"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "encrypted_content": None,
                "content": [{"type": "reasoning_text", "text": "hmm"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Look.", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command":"ls"}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** x"},
            {"type": "local_shell_call", "call_id": "c3", "action": {"command": ["ls"]}},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "1"}, "2"]},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
            {"type": "local_shell_call_output", "id": "c3", "output": {"exit": 0}},
            {"type": "compaction", "encrypted_content": "x"},
            {"role": "user", "content": "next"},
        ],
        instructions="I",
        tools=[TOOL, PATCH],
    )
    body = prompt.partition("I<|im_end|>\n")[2]
    assert body == (
        "<|im_start|>system\nD<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nLook.\n\n"
        + "\n".join(
            (call("bash", command="ls"), call("apply_patch", input="*** x"), call("local_shell", command='["ls"]'))
        )
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\ndone\n</tool_response>"
        '\n<tool_response>\n{"exit":0}\n</tool_response><|im_end|>\n<|im_start|>user\nnext<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("kind", "name", "sent", "arguments"),
    [
        ("local_shell_call", "local_shell", {"action": {"command": "ls"}}, "<parameter=command>\nls\n</parameter>\n"),
        ("shell_call", "shell", {"action": {"commands": []}}, "<parameter=commands>\n[]\n</parameter>\n"),
        ("apply_patch_call", "apply_patch", {"input": "*** x"}, "<parameter=arguments>\n*** x\n</parameter>\n"),
        ("web_search_call", "web_search_call", {"action": {"query": "q"}}, "<parameter=query>\nq\n</parameter>\n"),
        ("image_generation_call", "image_generation_call", {}, ""),
        ("tool_search_call", "tool_search", {"arguments": '{"q":"x"}'}, "<parameter=q>\nx\n</parameter>\n"),
    ],
)
def test_calls_of_hosted_tools(serve: Serve, kind: str, name: str, sent: dict[str, Any], arguments: str) -> None:
    """By `call_id` or `id`; their results have the type of the call and are said as `output` or `result`."""
    server = serve()
    for id, result in (("call_id", {"output": "R"}), ("id", {"output": None, "result": [{"text": "R"}]})):
        items = [{"type": kind, id: "c", **sent}, {"type": f"{kind}_output", id: "c", **result}]
        prompt = prompt_of(server, items)
        assert f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>" in prompt
        assert "<tool_response>\nR\n</tool_response>" in prompt


def test_results_with_images(serve: Serve) -> None:
    """What the model cannot be shown is named: a refusal would end the conversation for good."""
    output = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,"}]
    for kind in ("function_call", "custom_tool_call"):
        items = [
            {"type": kind, "call_id": "c", "name": "f"},
            {"type": f"{kind}_output", "call_id": "c", "output": output},
        ]
        assert "<tool_response>\na[Unsupported input_image]\n</tool_response>" in prompt_of(serve(), items)


def test_reasoning_is_replayed_to_the_turn_it_belongs_to(serve: Serve) -> None:
    server = serve()
    seen: list[Any] = []
    prompt = server.app._service.preparer.prompt

    async def spy(conversation: Any) -> Any:
        seen.append(conversation.messages)
        return await prompt(conversation)

    server.app._service.preparer.prompt = spy
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "one"}], "content": None}
    used = {"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    whole(post(server, [{"role": "user", "content": "x"}, thought, thought, used, result, thought]))
    assert [(m.role, m.reasoning, len(m.calls)) for m in seen[0]] == [
        ("user", "", 0),
        ("assistant", "one\none", 1),
        ("tool", "", 0),
        ("assistant", "one", 0),
    ]


def test_warm_up_with_an_empty_input(serve: Serve) -> None:
    assert whole(post(serve(), "", max_output_tokens=1))["status"] == "incomplete"


def test_no_tools_and_an_empty_list_are_the_same(serve: Serve) -> None:
    server = serve()
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi!"}]}]
    assert prompt_of(server, items, tools=[]) == prompt_of(server, items) == prompt_of(server, "Hi!")


def test_garbage_arguments_in_the_history(serve: Serve) -> None:
    used = {"type": "function_call", "call_id": "c", "name": "bash", "arguments": '{"command": "l'}
    result = {"type": "function_call_output", "call_id": "c", "output": None}
    assert '<parameter=arguments>\n{"command": "l\n' in prompt_of(serve(), [used, result], tools=[TOOL])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"role": "assistant", "content": "x", "status": "incomplete"}]}, "input[0].status"),
        ({"input": [{"role": "assistant", "content": "x", "status": "in_progress"}]}, "input[0].status"),
        ({"input": [{"type": "reasoning", "summary": [], "status": "incomplete"}]}, "input[0].status"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": ""}]}, "tools[0].name"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"reasoning": {"summary": 5}}, "reasoning.summary"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
        ({"metadata": 5}, "metadata"),
        ({"store": "no"}, "store"),
    ],
)
def test_refused_fields_are_named(serve: Serve, fields: dict[str, Any], param: str) -> None:
    server = serve()
    body = {"input": "x", **fields}
    assert openai_error(server.http.post("/v1/responses", json=body))["param"] == param
    assert server.engine.prompts == []


def test_missing_input(serve: Serve) -> None:
    assert openai_error(serve().http.post("/v1/responses", json={}))["message"] == "missing input"


def test_fields_reach_the_sampler_and_nulls_are_absent(serve: Serve) -> None:
    server = serve("a b c")
    whole(post(server, temperature=0.5, top_p=0.9, top_k=3, seed=4, stop=["c"]))
    assert server.engine.samplers[-1].params == SamplingParams(temperature=0.5, top_p=0.9, top_k=3, seed=4)
    nulls = ("instructions", "tools", "tool_choice", "temperature", "reasoning", "text", "previous_response_id")
    more = ("conversation", "max_output_tokens", "store", "metadata", "parallel_tool_calls", "stream", "top_logprobs")
    whole(post(server, **dict.fromkeys((*nulls, *more))))
    assert server.engine.samplers[-1].params == SamplingParams()


def test_what_codex_sends(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(Script.text("Done.", "bytes"))
    caplog.set_level("INFO", "ds4.server")
    metadata = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"session_id": "s"},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "low"},
    }
    for _ in range(2):
        events(post(server, tools=[TOOL, NAMESPACE, PATCH], stream=True, **metadata))
    noted = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    names = ("client_metadata", "include", "prompt_cache_key", "text.verbosity")
    assert sorted(noted) == [f"responses: field {name!r} has no effect" for name in names]


# ---- going on ---------------------------------------------------------------------------------------------------


def test_previous_response(serve: Serve) -> None:
    server = serve("First.", "Second.", "Third.")
    first = whole(post(server, "one", instructions="Old."))
    second = whole(post(server, "two", previous_response_id=first["id"], instructions="New."))
    whole(post(server, "three", previous_response_id=second["id"]))
    turns = "user\none<|im_end|>\n<|im_start|>assistant\nFirst.<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
    assert turns in server.engine.prompts[1] and "New." in server.engine.prompts[1]
    assert "Old." not in server.engine.prompts[1] and "New." not in server.engine.prompts[2]
    assert f"{turns}<|im_start|>assistant\nSecond.<|im_end|>\n<|im_start|>user\nthree" in server.engine.prompts[2]
    # A response can be gone on with more than once.
    whole(post(server, "two", previous_response_id=first["id"], instructions="New."))
    assert server.engine.prompts[3] == server.engine.prompts[1]


def test_what_is_not_stored_cannot_be_gone_on_with(serve: Serve) -> None:
    server = serve()
    first = whole(post(server, store=False))
    found = openai_error(post(server, previous_response_id=first["id"]))
    assert (found["param"], found["code"]) == ("previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_outputs_alone_continue_the_live_turn(serve: Serve, stream: bool) -> None:
    server = serve(TWO_CALLS, call("agentsspawn"))
    tools = [TOOL, NAMESPACE]
    response = post(server, "x", tools=tools, instructions="Be brief.", stream=stream)
    output = events(response)[-1].data["response"]["output"] if stream else whole(response)["output"]
    ids = [item["call_id"] for item in output if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": i, "output": "ok"} for i in ids]
    second = whole(post(server, results))
    assert second["output"][0]["namespace"] == "agents"
    replay = [{"role": "user", "content": "x"}, *output, *results]
    assert server.engine.prompts[1] == prompt_of(server, replay, tools=tools, instructions="Be brief.")
    found = openai_error(post(server, results[:1]))
    assert found["message"] == (
        f"Responses continuation state is not available for call_id {ids[0]}; retry by replaying the full input history"
    )


def test_a_disconnect_binds_nothing(serve: Serve) -> None:
    """A client that saw a call and left finds no turn of it; the state is as good as any."""
    server = serve(ScriptedEngine(Script.text(CALL + " " * 400, 1).slow(0.002)), slots=1)
    body = {"input": "x", "tools": [TOOL], "stream": True}
    with server.http.stream("POST", "/v1/responses", json=body) as response:
        got = read_until(response.iter_raw(), b'"call_id":"call_')
    call_id = re.findall(rb'"call_id":"(call_[0-9a-f]{32})', got)[0].decode()
    found = openai_error(post(server, [{"type": "function_call_output", "call_id": call_id, "output": "R"}]))
    assert call_id in found["message"]
    assert len(server.app._service.live) == 0
    assert whole(post(server, "x", tools=[TOOL], max_output_tokens=3))["usage"]["input_tokens_details"]["cached_tokens"]


def test_input_tokens(serve: Serve) -> None:
    server = serve()
    body = {"input": "hi", "instructions": "Be brief.", "tools": [TOOL], "model": "m"}
    with openai_sdk(server) as client:
        counted = client.responses.input_tokens.count(**body)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == whole(server.http.post("/v1/responses", json=body))["usage"]["input_tokens"]
    assert openai_error(server.http.post("/responses/input_tokens", json={}))["param"] == "input"


# ---- context, failures, time ------------------------------------------------------------------------------------


def test_context_overflow(serve: Serve) -> None:
    server = serve(ScriptedEngine("a b", ctx=200))
    found = openai_error(post(server, "x" * 200, stream=True))
    for words in ("maximum context length is ", "context_length_exceeded"):
        assert words in found["message"], "clients look for these words"
    assert (found["param"], found["code"], found["n_ctx"]) == ("input", "context_length_exceeded", 200)


def test_engine_error_in_the_stream(serve: Serve) -> None:
    server = serve(Script.text("a b c d").fail_at(3), "fine")
    response = post(server, stream=True)
    check_stream(response)
    found = parse_events(response.text)
    last = found[-1]
    EVENT.validate_python(last.data, strict=True)
    assert last.name == "response.failed"
    assert last.data["response"]["status"] == "failed"
    assert last.data["response"]["error"] == {"code": "server_error", "message": "scripted failure at token 3"}
    assert [e.data["sequence_number"] for e in found] == list(range(len(found)))
    assert whole(post(server))["output"][0]["content"][0]["text"] == "fine"


def test_in_progress_events_come_before_the_prompt_is_evaluated(serve: Serve) -> None:
    engine = ScriptedEngine("late")
    server = serve(engine, keepalive_seconds=0.05)
    with (
        engine.paused(),
        server.http.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as response,
    ):
        pieces = response.iter_raw()
        got = b""
        while got.count(b"event: response.in_progress") < 3:
            got += next(pieces)
        assert engine.steps == []
        engine._open_gate.set()
        got += b"".join(pieces)
    check_events(parse_events(got.decode()))


# ---- grammars of custom tools


def grammar_tool(definition: str, syntax: str = "regex", **members: Any) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "patch", "description": "d", "format": form, **members}


def patch_call(text: str) -> str:
    return f"<tool_call>\n<function=patch>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "patch"}])
@pytest.mark.parametrize(
    ("syntax", "definition"), [("regex", "[a-z]+( [a-z]+)*"), ("lark", 'start: WORD (" " WORD)*\nWORD: /[a-z]+/')]
)
def test_the_input_of_a_custom_tool_follows_its_grammar(
    serve: Serve, choice: Any, syntax: str, definition: str
) -> None:
    def ask(said: str) -> Any:
        server = serve(ScriptedEngine(Script.text(patch_call(said), "bytes")))
        fields = {"input": "x", "tools": [grammar_tool(definition, syntax)], "tool_choice": choice}
        return server.http.post("/v1/responses", json=fields)

    (item,) = ask("add one line").json()["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", "add one line")
    found = openai_error(ask("add 1 line"), 500)
    assert "no token" in found["message"]


def test_text_and_other_tools_are_free_beside_a_grammar(serve: Serve) -> None:
    other = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
    call = "<tool_call>\n<function=f>\n<parameter=a>\nANY 1\n</parameter>\n</function>\n</tool_call>"
    tools = [grammar_tool("[a-z]+"), other, {"type": "custom", "name": "free", "format": {"type": "text"}}]
    free = patch_call("ANY 2").replace("=patch>", "=free>")
    server = serve(*(ScriptedEngine(*(Script.text(s, "bytes") for s in ("Just 1 text.", call, free))),))
    outputs = [server.http.post("/v1/responses", json={"input": "x", "tools": tools}).json()["output"] for _ in "123"]
    assert outputs[0][0]["content"][0]["text"] == "Just 1 text."
    assert outputs[1][0]["arguments"] == '{"a":"ANY 1"}'
    assert outputs[2][0]["input"] == "ANY 2"


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "grammar", "syntax": "regex", "definition": "(?=a)"}, "tools[0].format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": "start: nothing"}, "tools[0].format.definition"),
        ({"type": "grammar", "grammar": {"syntax": "lark", "definition": ""}}, "tools[0].format.grammar.definition"),
        ({"type": "grammar", "syntax": "ebnf", "definition": "x"}, "tools[0].format.syntax"),
        ({"type": "grammar", "syntax": "lark"}, "tools[0].format.definition"),
        ({"type": "grammar", "definition": "x"}, "tools[0].format.syntax"),
        ({"type": "xml"}, "tools[0].format.type"),
        ({}, "tools[0].format.type"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_named(serve: Serve, form: dict[str, Any], param: str) -> None:
    server = serve()
    tools = [{"type": "custom", "name": "patch", "format": form}]
    found = openai_error(server.http.post("/v1/responses", json={"input": "x", "tools": tools}))
    assert found["param"] == param
    assert server.engine.prompts == []


def test_a_tool_that_is_not_called_needs_no_grammar(serve: Serve) -> None:
    """What is hidden is not compiled."""
    fields = {"input": "x", "tools": [grammar_tool("(?=a)")], "tool_choice": "none"}
    assert serve("ok").http.post("/v1/responses", json=fields).status_code == 200
