"""Structured output: what a request asks its answer to look like, in every dialect, and the constraint that does it.

    choice = read_tool_choice(body)                                 # 400 with the path of what is wrong
    structure = read_structure(body, body.get("response_format"), conversation, choice)
    constraint = await constrain(preparer, structure)               # None: nothing is constrained; 400
    request = preparer.request(..., constraint=constraint)

`response_format` (Chat), `text.format` (Responses) and `output_config.format` (Messages) are one reader's work; so are
the spellings of `tool_choice`. A function's `strict` holds when it is called.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ds4._json import Node, Spans, parse
from ds4.bounded import remembered
from ds4.engine.constraint import Compiler, Constraint, ConstraintLike, Grammar, GrammarError, keyword_path
from ds4.errors import RequestError
from ds4.prompt.call_grammar import SYNTAXES, CallGrammar, Function, SchemaError
from ds4.prompt.call_inputs import CallConstraint
from ds4.prompt.types import Conversation, Tool
from ds4.server.api.common import required
from ds4.server.api.custom_tools import RawInput
from ds4.server.api.tools import SCHEMA

if TYPE_CHECKING:
    from ds4.server.api.prepare import Preparer

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name`: the one function that must be called. `single`: at most one call."""

    mode: Choice = "auto"
    name: str | None = None
    single: bool = False


@dataclass(frozen=True, slots=True)
class Declared:
    """A function, and the path of its parameters in the body."""

    function: Function
    param: str


@dataclass(frozen=True, slots=True)
class Structure:
    """What the answer must look like. `format` None: text; `param` is the path of the schema or grammar.

    `raw_inputs`: function name -> what its one parameter, a text, must match.
    """

    format: Grammar | None = None
    param: str = ""
    choice: ToolChoice = ToolChoice()
    functions: tuple[Declared, ...] = ()
    raw_inputs: Mapping[str, RawInput] = field(default_factory=dict)

    @property
    def constrains(self) -> bool:
        forced = self.choice.mode == "required"
        held = any(self.holds(d.function) for d in self.functions)
        return self.format is not None or forced or held

    def holds(self, function: Function) -> bool:
        """A call of the function follows its declaration, whether it must be called or not."""
        return function.strict or function.name in self.raw_inputs


_NO_RAW_INPUTS: Mapping[str, RawInput] = {}


def read_structure(
    body: Node,
    format_node: Node | None,
    conversation: Conversation,
    choice: ToolChoice,
    raw_inputs: Mapping[str, RawInput] = _NO_RAW_INPUTS,
) -> Structure:
    """The structure that a body asks for. `conversation` has the tools that the model is offered (none for `none`).

    Raises RequestError or JSONError with the path of what is wrong, also for combinations that make no sense.
    """
    tools = conversation.tools
    if format_node is None and not tools and choice.mode != "required" and "tools" not in body:
        return Structure(choice=choice, raw_inputs=raw_inputs)
    grammar, param = (None, "") if format_node is None else read_format(format_node)
    structure = Structure(grammar, param, choice, _declared(body, tools), raw_inputs)
    if not structure.constrains:
        return structure
    if choice.mode == "required" and not tools:
        raise RequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
    if choice.name is not None and all(tool.name != choice.name for tool in tools):
        raise RequestError(f"tool_choice names {choice.name[:64]!r}, which is not among the tools", param="tool_choice")
    if grammar is not None and grammar.kind != "json_schema" and tools:
        raise RequestError(f"a {grammar.kind} format cannot be combined with tools", param=param)
    if body.get_bool("ignore_eos", False):
        raise RequestError("ignore_eos cannot be combined with structured output", param="ignore_eos")
    if grammar is not None and conversation.continue_final:
        raise RequestError(
            "a structured answer cannot begin in the prompt: the last message is gone on with", param=param
        )
    return structure


# ---- format -----------------------------------------------------------------------------------------------------


def read_format(node: Node) -> tuple[Grammar | None, str]:
    """(grammar, its path) of a format object in any dialect; (None, "") for text.

    `{"type": "json_schema", "json_schema": {"schema": {...}}}` (Chat), `{"type": "json_schema", "schema": {...}}`
    (Responses, Messages), `{"type": "json_object"}`, and ours: `{"type": "regex", "regex": TEXT}`,
    `{"type": "lark", "lark": TEXT}`. `name` and `strict` change nothing.
    """
    kind = required(node.as_object(), "type").as_str()
    if kind == "text":
        return None, ""
    if kind == "json_object":
        return Grammar("json_schema", '{"type":"object"}'), _param(node)
    if kind == "json_schema":
        wrapper = node.get_object("json_schema") or node
        schema = required(wrapper, "schema").as_object()
        # A canonical text would put the properties into another order, and the answer has the order of the schema.
        return Grammar("json_schema", schema.minified()), _param(schema)
    if kind in ("regex", "lark"):
        text = required(node, kind)
        return Grammar("regex" if kind == "regex" else "lark", text.as_str()), _param(text)
    raise node["type"].error(f"Expected one of text, json_object, json_schema, regex, lark, got {kind[:40]!r}")


# ---- tools ------------------------------------------------------------------------------------------------------


def read_tool_choice(body: Node) -> ToolChoice:
    """`tool_choice` as the three dialects spell it: `auto`, `none`, `required` or `any`, or an object with `type`,
    where `function`, `tool` and `custom` name a function; with `parallel_tool_calls` or `disable_parallel_tool_use`."""
    single = not body.get_bool("parallel_tool_calls", True)
    node = body.get("tool_choice")
    if node is None:
        return ToolChoice(single=single)
    if node.kind == "str":
        kind = node.as_str()
    else:
        kind = required(node, "type").as_str()
        single = single or node.get_bool("disable_parallel_tool_use", False)
        if kind in ("function", "tool", "custom"):
            holder = node.get_object("function") or node.get_object("custom") or node
            return ToolChoice("required", required(holder, "name").as_str(), single=True)
    if kind in ("required", "any"):
        return ToolChoice("required", single=single)
    if kind == "none":
        return ToolChoice("none")
    if kind == "auto":
        return ToolChoice(single=single)
    raise RequestError(
        f"tool_choice={kind[:40]} is not supported: the choices are auto, none, required and a function",
        param="tool_choice",
    )


_declared_before = Spans(16 << 20)


def _declared(body: Node, tools: tuple[Tool, ...]) -> tuple[Declared, ...]:
    array = body.get_array("tools")
    known: tuple[tuple[Tool, ...], tuple[Declared, ...]] | None = None
    if array is not None and tools:
        known = _declared_before.get(array)
    if known is not None and known[0] == tools:
        return known[1]
    places = {}
    for node in array or ():
        if node.kind == "object":
            declaration = node.get_object("function") or node.get_object("custom") or node
            name = declaration.get("name")
            if name is not None and name.kind == "str":
                member = SCHEMA if "parameters" not in declaration and SCHEMA in declaration else "parameters"
                declaration.get_object(member)  # a schema of another kind is named by its place in the body
                places[name.as_str()] = f"{declaration.path.removeprefix('$.')}.{member}"
    declared = tuple(
        Declared(_function(tool.name, tool.schema), places.get(tool.name, f"tools.{tool.name[:64]}.parameters"))
        for tool in tools
    )
    if array is not None and tools:
        _declared_before.put(array, (tools, declared), sum(8 * len(tool.schema) for tool in tools))
    return declared


@remembered(16 << 20, lambda name, declared: 8 * len(declared))
def _function(name: str, declared: str) -> Function:
    """What a declaration says."""
    declaration = parse(declared.encode())
    schema = declaration.get_object("parameters")
    parameters: dict[str, Any] = {} if schema is None else json.loads(schema.minified())
    return Function(name, parameters, declaration.get_bool("strict", False))


# ---- the constraint ---------------------------------------------------------------------------------------------


async def constrain(preparer: Preparer, structure: Structure) -> ConstraintLike | None:
    """The constraint of an answer, compiled outside the event loop. Raises RequestError (400) with the path."""
    if not structure.constrains:
        return None
    loop = asyncio.get_running_loop()
    arguments = preparer.compiler, preparer.renderer.syntax, structure
    return await loop.run_in_executor(preparer.compiling, _constrain, *arguments)


def _constrain(compiler: Compiler, syntax: str, structure: Structure) -> ConstraintLike:
    try:
        outer = compiler.compile(_grammar(compiler, syntax, structure))
        return _with_raw_inputs(compiler, syntax, structure, outer)
    except SchemaError as error:
        place = next(d.param for d in structure.functions if d.function.name == error.function)
        raise RequestError(str(error), param=place + _member_path(error.path)) from None
    except GrammarError as error:
        raise RequestError(f"the constraint cannot be built: {error}", param=_at_fault(structure, error)) from None


def _with_raw_inputs(compiler: Compiler, syntax: str, structure: Structure, outer: Constraint) -> ConstraintLike:
    inputs = {}
    for declared in structure.functions:
        name = declared.function.name
        raw = structure.raw_inputs.get(name) if structure.choice.name in (None, name) else None
        if raw is None:
            continue
        try:
            inputs[name] = compiler.compile(raw.grammar)
        except GrammarError as error:
            raise RequestError(f"the grammar of tool {name[:64]!r} cannot be used: {error}", param=raw.param) from None
    return CallConstraint(outer, inputs, SYNTAXES[syntax], compiler.texts()) if inputs else outer


def _grammar(compiler: Compiler, syntax: str, structure: Structure) -> Grammar:
    choice = structure.choice
    if choice.mode != "required" and (structure.format is not None and not structure.functions):
        return structure.format
    functions = [
        d.function
        # Of functions that are not strict only the form is held, unless one must be called.
        if structure.holds(d.function) or choice.mode == "required"
        else Function(d.function.name, None)
        for d in structure.functions
        if choice.name in (None, d.function.name)
    ]
    calls = CallGrammar(SYNTAXES[syntax], functions, compiler.special_ids)
    if choice.mode == "required":
        return Grammar("lark", calls.forced(single=choice.single))
    if structure.format is not None:
        return Grammar("lark", calls.beside(json.loads(structure.format.text), single=choice.single))
    return Grammar("lark", calls.optional(single=choice.single))


def _at_fault(structure: Structure, error: GrammarError) -> str | None:
    """The path of a keyword that is not implemented, else of the schema that may hold the fault."""
    if structure.format is not None and structure.choice.mode != "required":
        grammar = structure.format
        if grammar.kind == "json_schema" and error.keywords:
            path = keyword_path(json.loads(grammar.text), error.keywords)
            if path is not None:
                return structure.param + _member_path(path)
        if not structure.functions:
            return structure.param
    for declared in structure.functions:
        path = keyword_path(declared.function.parameters, error.keywords) if declared.function.strict else None
        if path is not None:
            return declared.param + _member_path(path)
    return structure.param or "tools"


def _member_path(path: Iterable[str | int]) -> str:
    """Members and indexes as `Node.path` writes them."""
    text = ""
    for member in path:
        if isinstance(member, int):
            text += f"[{member}]"
        else:
            text += f".{member}" if member.isidentifier() or member.startswith("$") else f'["{member[:64]}"]'
    return text


def _param(node: Node) -> str:
    return node.path.removeprefix("$.")
