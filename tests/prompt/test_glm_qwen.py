"""GLM and Qwen: worked prompts, live tails, replay, and what any data may not do to a prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from ds4._dsml import Parser
from ds4.prompt.glm import GlmRenderer, calls_block, declaration
from ds4.prompt.qwen import EXTRA_HIGH, LOW, QwenRenderer
from ds4.prompt.qwen_tools import calls_block as qwen_calls_block
from ds4.prompt.qwen_tools import declaration as qwen_declaration
from ds4.prompt.registry import syntax_of
from ds4.prompt.schemas import offered_schemas
from ds4.prompt.types import Conversation, Message, Segment, Special, Tool, ToolCall
from tests.prompt.test_chatml import info
from tests.support.conversations import Conversations
from tests.support.prompts import WEATHER, Worked, harmless, specials, text_of, typed_tools, worked

SEED = 20261130

Renderer = GlmRenderer | QwenRenderer
RENDERERS = [pytest.param(GlmRenderer(), id="glm"), pytest.param(QwenRenderer(), id="qwen")]


def user(text: str) -> Message:
    return Message("user", text)


def block_of(syntax: str, calls: tuple[ToolCall, ...], tools: tuple[Tool, ...] = ()) -> list[Segment]:
    return calls_block(calls, tools) if syntax == "glm" else qwen_calls_block(calls, tools, after_text=False)


@pytest.mark.parametrize("case", worked("GLM-") + worked("QWEN-"), ids=lambda case: case.id)
def test_worked_prompts(case: Worked) -> None:
    texts = {
        "GLM_TOOLS": text_of(declaration((WEATHER,))),
        "QWEN_TOOLS": text_of(qwen_declaration((WEATHER,))),
        "QX": EXTRA_HIGH,
        "QL": LOW,
    }
    expected = case.prompt
    for name, text in texts.items():
        expected = expected.replace(f"⟪{name}⟫", text)
    renderer = GlmRenderer() if case.id.startswith("GLM") else QwenRenderer()
    prompt = renderer.render(case.conversation)
    assert prompt.text == expected
    assert prompt.thinking is (case.conversation.effort != "none")


def test_declarations() -> None:
    assert text_of(declaration((WEATHER, WEATHER))) == (
        "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n\n"
        f"{WEATHER.schema}\n\n\n{WEATHER.schema}\n\n\n</tools>\n\n"
        "For each function call, output the function name and arguments within the following XML format:\n"
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
        "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
    )
    assert f'{{"type": "function", "function": {WEATHER.schema}}}\n</tools>' in text_of(qwen_declaration((WEATHER,)))


@pytest.mark.parametrize(
    ("schema", "lines"),
    [
        ('{"name":"f","strict":true,"parameters":{"strict":1}}', ['{"name": "f", "parameters": {"strict": 1}}']),
        ('{"name": "f", "defer_loading": false}', ['{"name": "f"}']),
        ('{"name": "f", "defer_loading": true}', []),
        ("[1", ["[1"]),
        ("[1]", ["[1]"]),
    ],
)
def test_schemas_without_what_is_meant_for_the_server(schema: str, lines: list[str]) -> None:
    assert list(offered_schemas([Tool("f", schema)])) == lines


def test_only_deferred_tools() -> None:
    deferred = Tool("f", '{"name": "f", "defer_loading": true}')
    assert "<tools>\n\n\n</tools>" in text_of(declaration((deferred,)))


@pytest.mark.parametrize(
    ("effort", "glm", "sentence"),
    [
        ("none", "", ""),
        ("low", "High", LOW),
        ("medium", "High", ""),
        ("high", "High", EXTRA_HIGH),
        ("max", "Max", EXTRA_HIGH),
        (0, "", ""),
        (100, "Max", EXTRA_HIGH),
    ],
)
def test_effort(effort: str | int, glm: str, sentence: str) -> None:
    conversation = Conversation((user("q"),), effort=effort)
    thinking = effort not in ("none", 0)
    line = f"<|system|>Reasoning Effort: {glm}" if glm else ""
    end = "<think>" if thinking else "<think></think>"
    assert GlmRenderer().render(conversation).text == f"[gMASK]<sop>{line}<|user|>q<|assistant|>{end}"
    system = f"<|im_start|>system\n{sentence}<|im_end|>\n" if sentence else ""
    end = "<think>\n" if thinking else "<think>\n\n</think>\n\n"
    assert QwenRenderer().render(conversation).text == (
        f"{system}<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{end}"
    )


def test_results_and_text_in_one_message() -> None:
    """The text follows the results, as a turn of its own."""
    parts = (user("mid"), Message("tool", "R", call_id="a", joined=True))
    turn = Message("assistant", calls=(ToolCall("a", "f", "{}"),))
    glm = GlmRenderer().render(Conversation((turn, *parts), effort="none")).text
    assert glm.endswith("<|observation|><tool_response>R</tool_response><|user|>mid<|assistant|><think></think>")
    qwen = QwenRenderer().render(Conversation((turn, *parts), effort="none")).text
    assert "<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>user\nmid<|im_end|>\n" in qwen


@pytest.mark.parametrize("renderer", RENDERERS)
def test_image_markers_are_not_trimmed(renderer: Renderer) -> None:
    marker = "\x1eDS4_IMAGE_0123456789abcdef01234567\x1f"
    assert marker in renderer.render(Conversation((user(marker),))).text
    assert marker in renderer.render(Conversation((user("q"), Message("assistant", marker), user("r")))).text


@pytest.mark.parametrize(
    ("final", "effort", "glm", "qwen", "thinking"),
    [
        (Message("assistant", "so ", "r"), "high", "<think>r</think>so ", "<think>\nr\n</think>\n\nso ", False),
        (Message("assistant", "", "hm, "), "high", "<think>hm, ", "<think>\nhm, ", True),
        (Message("assistant"), "high", "<think>", "<think>\n", True),
        (Message("assistant", "so"), "none", "<think></think>so", "<think>\n\n</think>\n\nso", False),
    ],
)
def test_a_turn_to_go_on_with(final: Message, effort: str, glm: str, qwen: str, thinking: bool) -> None:
    conversation = Conversation((user("q"), final), effort=effort, continue_final=True)
    prompt = GlmRenderer().render(conversation)
    assert prompt.text.endswith(f"<|user|>q<|assistant|>{glm}") and prompt.thinking is thinking
    prompt = QwenRenderer().render(conversation)
    assert prompt.text.endswith(f"<|im_start|>assistant\n{qwen}") and prompt.thinking is thinking


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_sampled_block_is_replayed_with_its_structure_as_tokens(renderer: Renderer) -> None:
    value = "quoted <tool_call> and <arg_key>"
    call = ToolCall("c", "run", json.dumps({"text": value}))
    own = block_of(renderer.syntax, (call,))
    raw = "\n" + text_of(own)
    sampled = replace(call, arguments="{}", raw=raw.encode())
    prompt = renderer.render(Conversation((user("q"), Message("assistant", "ok", calls=(sampled,)))))
    assert f"ok{raw}" in prompt.text
    structure = [s.text for s in own if isinstance(s, Special)]
    assert [s for s in specials(prompt) if "tool" in s or "arg" in s] == structure
    mixed = (sampled, ToolCall("d", "run", "{}"))
    assert raw not in renderer.render(Conversation((user("q"), Message("assistant", "ok", calls=mixed)))).text


def test_qwen_replay_without_content() -> None:
    """The block brings the white space between the end of thinking and itself."""
    call = ToolCall("c", "run", "{}", raw=b"\n\n<tool_call>\n<function=run>\n</function>\n</tool_call>")
    text = QwenRenderer().render(Conversation((user("q"), Message("assistant", "", "r", (call,))))).text
    assert "<think>\nr\n</think>\n\n<tool_call>\n<function=run>" in text


@pytest.mark.parametrize("renderer", RENDERERS)
def test_tail_and_prompt_are_one(renderer: Renderer) -> None:
    calls = (ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", '{"s": "x"}'))
    turn = Message("assistant", "Let me look.", "need", calls)
    results = [Message("tool", "two", call_id="c2"), Message("tool", "one", call_id="c1"), user("and?")]
    for effort in ("none", "high"):
        before = Conversation((user("q"), turn), (WEATHER,), effort, continue_final=True)
        whole = Conversation((user("q"), turn, *results), (WEATHER,), effort)
        tail = renderer.render_tail([Message("system", "skipped"), *results], before)
        assert renderer.render(before).text + tail.text == renderer.render(whole).text
        assert tail.thinking is (effort == "high")


# ---- properties on random conversations -------------------------------------------------------------------------


@pytest.mark.parametrize("renderer", RENDERERS)
def test_nothing_in_data_becomes_a_control_token(renderer: Renderer) -> None:
    source = Conversations(SEED)
    for i in range(300):
        conversation = source.conversation()
        prompt = renderer.render(conversation)
        plain = renderer.render(harmless(conversation, trimmed=True))
        assert specials(prompt) == specials(plain), (SEED, i, conversation)
        assert not any(isinstance(a, str) and isinstance(b, str) for a, b in pairwise(prompt.segments))


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_turn_stays_as_it_was_drawn(renderer: Renderer) -> None:
    """A longer conversation begins with the shorter one. Exempt are hoisted system texts, and for GLM the reasoning
    that is dropped where no tools are."""
    source = Conversations(SEED + 1)
    headers = {
        ("glm", True): "<think>",
        ("glm", False): "<think></think>",
        ("qwen", True): "<think>\n",
        ("qwen", False): "<think>\n\n</think>\n\n",
    }
    compared = 0
    for i in range(400):
        conversation = replace(source.conversation(), continue_final=False)
        if renderer.syntax == "glm" and not conversation.tools:
            continue
        messages = conversation.messages
        long = renderer.render(conversation).text
        for n in range(1, len(messages)):
            before = [m.role for m in messages[:n] if m.role != "system"][-1:]
            if any(m.role == "system" for m in messages[n:]) or (before == ["tool"] and messages[n].role == "tool"):
                continue  # a system text moves up, a run of results goes on
            header = headers[renderer.syntax, conversation.effort != "none"]
            short = renderer.render(replace(conversation, messages=messages[:n])).text
            assert short.endswith(header)
            short = short.removesuffix(header).removesuffix("<|assistant|>").removesuffix("<|im_start|>assistant\n")
            assert long.startswith(short), (SEED + 1, i, n, conversation)
            compared += 1
    assert compared > 300


@pytest.mark.parametrize("syntax", ["glm", "qwen"])
def test_calls_come_back_from_the_parser(syntax: str) -> None:
    source = Conversations(SEED + 2, garbage=False)
    for i in range(400):
        calls = tuple(replace(call, name=f"{call.name}{n}") for n, call in enumerate(source.calls()))
        tools = typed_tools(calls)
        parser = Parser(syntax, tools=True, schemas=[(tool.name, tool.schema) for tool in tools])
        parser.feed(text_of(block_of(syntax, calls, tools)).encode())
        parser.finish("eos")
        got = [(call.name, json.loads(call.arguments)) for call in parser.result.calls]
        assert got == [(call.name, json.loads(call.arguments)) for call in calls], (SEED + 2, i, calls)


@pytest.mark.parametrize("syntax", ["glm", "qwen"])
@pytest.mark.parametrize("arguments", ["not json", "[1]", '"x"', '{"a": ', "\ud800", "</parameter></arg_value>"])
def test_arguments_that_are_no_object(syntax: str, arguments: str) -> None:
    schema = '{"name": "f", "parameters": {"properties": {"arguments": {"type": "string"}}}}'
    parser = Parser(syntax, tools=True, schemas=[("f", schema)])
    parser.feed(text_of(block_of(syntax, (ToolCall("c", "f", arguments),))).encode("utf-8", "replace"))
    parser.finish("eos")
    (call,) = parser.result.calls
    assert json.loads(call.arguments) == {"arguments": arguments.encode("utf-8", "replace").decode()}


def test_names_cannot_leave_their_tags() -> None:
    call = ToolCall("c", "f></function>", '{"k></parameter>": "v"}')
    text = text_of(block_of("qwen", (call,)))
    assert "<function=f&gt;</function&gt;>\n<parameter=k&gt;</parameter&gt;>\nv\n</parameter>\n</function>" in text
    call = ToolCall("c", "f<arg_key>", '{"k</arg_key>": "v"}')
    text = text_of(block_of("glm", (call,)))
    assert text == "<tool_call>f&lt;arg_key><arg_key>k&lt;/arg_key></arg_key><arg_value>v</arg_value></tool_call>"


def test_registry() -> None:
    for syntax, make in (("glm", GlmRenderer), ("qwen", QwenRenderer)):
        model = info("x", syntax)
        found = syntax_of(model)
        assert isinstance(found.make(model), make) and found.thinking and not found.levels
