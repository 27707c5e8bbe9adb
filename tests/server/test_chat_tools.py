"""Custom tools in Chat: declared as functions of one text, they come back as OpenAI's types say, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion

from ds4.testing import Script, ScriptedEngine
from tests.support.api import chunks, openai_error, openai_sdk
from tests.support.running_server import RunningServer, Serve

TEXT = '*** Begin Patch\n+a "quoted" line\n*** End Patch'
FUNCTION = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


def custom(name: str = "patch", definition: str | None = None, syntax: str = "regex") -> dict[str, Any]:
    tool: dict[str, Any] = {"name": name, "description": "edits files"}
    if definition is not None:
        tool["format"] = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": tool}


def call(name: str, **arguments: str) -> str:
    members = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{members}</function>\n</tool_call>"


def calls_of(response: httpx.Response) -> list[dict[str, Any]]:
    body = response.json()
    ChatCompletion.model_validate(body, strict=True)
    return [{k: v for k, v in c.items() if k != "id"} for c in body["choices"][0]["message"]["tool_calls"]]


def streamed_calls(response: httpx.Response) -> list[dict[str, Any]]:
    """The calls put together from their deltas."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks(response):
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
            form = "custom" if "custom" in delta else "function"
            text = "input" if form == "custom" else "arguments"
            if "id" in delta:
                assert set(delta) == {"index", "id", "type", form} and delta[form][text] == ""
                found[delta["index"]] = {"type": delta["type"], form: dict(delta[form])}
            else:
                assert set(delta) == {"index", form} and set(delta[form]) == {text}
                found[delta["index"]][form][text] += delta[form][text]
    return [found[index] for index in sorted(found)]


def test_a_call_comes_back_in_the_form_of_its_tool(serve: Serve) -> None:
    said = call("patch", input=TEXT) + "\n" + call("bash")
    server = serve(Script.text(said, 3), slots=1)
    tools = [custom(), FUNCTION]
    expected = [
        {"type": "custom", "custom": {"name": "patch", "input": TEXT}},
        {"type": "function", "function": {"name": "bash", "arguments": "{}"}},
    ]
    assert calls_of(server.chat(tools=tools)) == expected
    assert streamed_calls(server.chat(tools=tools, stream=True)) == expected
    declared = json.loads(server.engine.prompts[0].split('"function": ')[1].splitlines()[0][:-1])
    assert declared == {
        "name": "patch",
        "description": "edits files",
        "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    }


def test_sdk_tool_loop(serve: Serve) -> None:
    server = serve(Script.text(call("patch", input=TEXT), 5), "Done.")
    messages: list[Any] = [{"role": "user", "content": "edit"}]
    with openai_sdk(server) as client:
        first = client.chat.completions.create(model="m", messages=messages, tools=[custom()])
        (made,) = first.choices[0].message.tool_calls or ()
        assert made.type == "custom" and (made.custom.name, made.custom.input) == ("patch", TEXT)
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": "ok"}]
        second = client.chat.completions.create(model="m", messages=messages, tools=[custom()])
    assert second.choices[0].message.content == "Done."
    assert f"assistant\n{call('patch', input=TEXT)}<|im_end|>" in server.engine.prompts[1]


def test_sdk_stream(serve: Serve) -> None:
    """OpenAI's package has no type for a custom tool's delta; it passes the members through."""
    with openai_sdk(serve(Script.text(call("patch", input=TEXT), 5))) as client:
        messages: list[Any] = [{"role": "user", "content": "edit"}]
        stream = client.chat.completions.create(model="m", messages=messages, tools=[custom()], stream=True)
        deltas = [delta for c in stream for delta in c.choices[0].delta.tool_calls or ()]
    parts = [(delta.model_extra or {})["custom"] for delta in deltas]
    assert parts == [{"name": "patch", "input": ""}, {"input": TEXT}]
    assert [delta.index for delta in deltas] == [0, 0] and deltas[0].id


@pytest.mark.parametrize("text", [TEXT, "", '{"a": 1}', "[1]", '"x"', "</parameter>"])
def test_an_input_of_the_history_is_text_whatever_it_looks_like(serve: Serve, text: str) -> None:
    """And the same prompt as in Responses."""
    server = serve()
    made = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": text}}
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    assert server.http.post("/v1/chat/completions", json={"messages": history, "tools": [custom()]}).status_code == 200
    items = [
        {"role": "user", "content": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": text},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
    ]
    tools = [{"type": "custom", **custom()["custom"]}]
    assert server.http.post("/v1/responses", json={"input": items, "tools": tools}).status_code == 200
    first, second = server.engine.prompts
    assert first == second
    assert f"<parameter=input>\n{text.replace('</p', '&lt;/p')}\n</parameter>" in first


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "custom": {"name": "patch"}}])
@pytest.mark.parametrize(
    ("syntax", "definition"), [("regex", "[a-z]+( [a-z]+)*"), ("lark", 'start: WORD (" " WORD)*\nWORD: /[a-z]+/')]
)
def test_the_input_follows_its_grammar(serve: Serve, choice: Any, syntax: str, definition: str) -> None:
    def ask(said: str) -> httpx.Response:
        server = serve(ScriptedEngine(Script.text(call("patch", input=said), "bytes")))
        return server.chat(tools=[custom("patch", definition, syntax), FUNCTION], tool_choice=choice)

    assert calls_of(ask("add one line")) == [{"type": "custom", "custom": {"name": "patch", "input": "add one line"}}]
    assert "no token" in openai_error(ask("add 1 line"), 500)["message"]


def test_a_named_custom_tool_is_called_once(serve: Serve) -> None:
    said = "\n".join([call("patch", input="a"), call("patch", input="b")])
    server = serve(ScriptedEngine(Script.text(said, "bytes")))
    choice = {"type": "custom", "custom": {"name": "patch"}}
    assert [c["custom"]["input"] for c in calls_of(server.chat(tools=[custom(), FUNCTION], tool_choice=choice))] == [
        "a"
    ]
    named = {"type": "custom", "custom": {"name": "other"}}
    assert openai_error(server.chat(tools=[custom()], tool_choice=named))["param"] == "tool_choice"


def test_a_broken_call_of_a_custom_tool_is_never_executed(serve: Serve) -> None:
    broken = call("patch", input="a").removesuffix("</tool_call>") + "<oops"
    text = serve(Script.text(broken, 4)).chat(tools=[custom()], stream=True).text
    assert '"type":"custom"' in text and '"input":"a"' not in text
    assert text.rstrip("\n").split("\n\n")[-1].startswith("event: error\ndata: ")


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "grammar", "grammar": {"syntax": "regex", "definition": "(?=a)"}}, "format.grammar.definition"),
        ({"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "x"}}, "format.grammar.syntax"),
        ({"type": "grammar", "grammar": {"syntax": "lark"}}, "format.grammar.definition"),
        ({"type": "xml"}, "format.type"),
        ({}, "format.type"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_named(serve: Serve, form: dict[str, Any], param: str) -> None:
    server = serve()
    tools = [FUNCTION, {"type": "custom", "custom": {"name": "patch", "format": form}}]
    assert openai_error(server.chat(tools=tools))["param"] == f"tools[1].custom.{param}"
    assert server.engine.prompts == []


def prompt_of(server: RunningServer, **tool: Any) -> str:
    assert server.chat(tools=[tool]).status_code == 200
    return server.engine.prompts[-1]


def test_members_may_stand_at_the_top_level(serve: Serve) -> None:
    server = serve()
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert prompt_of(server, type="function", **function) == prompt_of(server, type="function", function=function)
    assert prompt_of(server, type="custom", **custom()["custom"]) == prompt_of(server, **custom())
