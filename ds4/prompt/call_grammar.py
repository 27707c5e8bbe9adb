"""Tool syntaxes as Lark grammars, for generations whose calls must be well-formed (`ds4.engine.constraint`).

A syntax writes a call as a name and a list of parameters: strings as they are, all else as JSON. The grammar of a
function follows its declared schema: parameters in the declared order, required ones always, no others. A string's
`enum`, `const`, `pattern` and length hold for the raw text; every other value is the JSON of its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4.engine.constraint import FORMATS, GrammarError, library_schema

_LEAF_MEMBERS = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength"})
"""What decides whether a value is a string, and which."""
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_TYPES = ("object", "array", "number", "boolean", "null")
_OBJECT_MEMBERS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", "strict"}
)
MAX_CALLS = 32
"""Calls in one turn: weak models that must call never stop to."""
_MAX_REFERENCES = 32
_MAX_LENGTH = 100_000


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes calls. Texts hold the names of special tokens where the model has such tokens.

    `trigger` begins every block of calls, `block` follows it (the first call's own beginning aside) and ends it;
    `between` stands between two calls.
    """

    before: str
    trigger: str
    block: tuple[str, str]
    between: str
    call: tuple[str, str, str]
    """Before the name, after the name, at the end."""
    parameter: tuple[str, str]
    """Before the name, at the end of the value."""
    text_value: str
    """Between name and value of a string."""
    json_value: str
    """Between name and value of anything else."""
    close: str
    """Ends a value: no string can hold it."""


_QWEN = CallSyntax(
    before="",
    trigger="<tool_call>",
    block=("", ""),
    between="\n<tool_call>",
    call=("\n<function=", ">\n", "</function>\n</tool_call>"),
    parameter=("<parameter=", "\n</parameter>\n"),
    text_value=">\n",
    json_value=">\n",
    close="</parameter>",
)


def _dsml(calls: str, invoke: str, parameter: str) -> CallSyntax:
    return CallSyntax(
        before="\n\n",
        trigger=f"<｜DSML｜{calls}>",
        block=("\n", f"</｜DSML｜{calls}>"),
        between="",
        call=(f'<｜DSML｜{invoke} name="', '">\n', f"</｜DSML｜{invoke}>\n"),
        parameter=(f'<｜DSML｜{parameter} name="', f"</｜DSML｜{parameter}>\n"),
        text_value='" string="true">',
        json_value='" string="false">',
        close=f"</｜DSML｜{parameter}>",
    )


SYNTAXES: Mapping[str, CallSyntax] = {
    "chatml": _QWEN,
    "qwen": _QWEN,
    "deepseek4": _dsml("tool_calls", "invoke", "parameter"),
    "deepseek41": _dsml(" calls", " invoke", " parameter"),
    "glm": CallSyntax(
        before="",
        trigger="<tool_call>",
        block=("", ""),
        between="<tool_call>",
        call=("", "", "</tool_call>"),
        parameter=("<arg_key>", "</arg_value>"),
        text_value="</arg_key><arg_value>",
        json_value="</arg_key><arg_value>",
        close="</arg_value>",
    ),
}
"""Syntax name (`ds4.prompt.types.Renderer.syntax`) -> how it writes calls."""


@dataclass(frozen=True, slots=True)
class Function:
    """A callable function. `parameters` is its schema, None when any parameters will do. `strict`: a keyword that is
    not implemented is an error; else it is ignored."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool = False


class SchemaError(GrammarError):
    """A function's schema cannot be obeyed. `function` names it, `path` is the place in its parameters."""

    def __init__(self, function: str, path: tuple[str | int, ...], message: str) -> None:
        self.function = function
        self.path = path
        super().__init__(f"function {function[:64]!r}: {message}")


class CallGrammar:
    """Writes the grammar of the calls to some functions in one syntax."""

    def __init__(self, syntax: CallSyntax, functions: Sequence[Function], special_ids: Mapping[str, int]) -> None:
        self._syntax = syntax
        self._functions = functions
        self._specials = special_ids
        names = sorted(filter(None, special_ids), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []

    def forced(self, *, single: bool) -> str:
        """The turn is calls and nothing else; `single`: one call. Raises SchemaError."""
        return self._grammar(f"{self._tag(self._syntax.before + self._syntax.trigger)} {self._rest(single)}")

    def optional(self, *, single: bool) -> str:
        """The turn is text, or text and calls. Raises SchemaError."""
        trigger = self._tag(self._syntax.trigger)
        head, special, tail = self._split(trigger)
        if not special:
            self._rules.append(f"trigger[lazy]: /(?s:.*)/ {trigger}")
            return self._grammar(f"TEXT | trigger {self._rest(single)}", "TEXT: /(?s:.*)/")
        # A special token ends the text by itself; what the syntax has before it is the text's end.
        before = json.loads(head) if head else ""
        self._rules.append(f"before: /(?s:.*){_regex_text(before)}/")
        return self._grammar(f"TEXT | before {special} {tail} {self._rest(single)}", "TEXT: /(?s:.*)/")

    def beside(self, schema: Mapping[str, Any], *, single: bool) -> str:
        """The turn is the JSON of a schema, or calls. Raises SchemaError."""
        self._rules.append(f"answer: {_json(schema, lenient=False)}")
        trigger = self._tag(self._syntax.before + self._syntax.trigger)
        return self._grammar(f"answer | {trigger} {self._rest(single)}")

    # ---- the parts

    def _grammar(self, start: str, *terminals: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, *terminals, ""])

    def _rest(self, single: bool) -> str:
        """What follows the trigger."""
        syntax = self._syntax
        calls = [self._call(index, function) for index, function in enumerate(self._functions)]
        self._rules.append(f"call: {' | '.join(calls)}")
        more = f"({self._tag(syntax.between)} call){{0,{MAX_CALLS - 1}}}".replace("( call)", "(call)")
        begin, end = (self._tag(text) for text in syntax.block)
        return f"{begin} call {'' if single else more} {end}"

    def _call(self, index: int, function: Function) -> str:
        name = _checked(function.name, function.name, ())
        before, after, end = self._syntax.call
        parameters = self._parameters(index, function)
        rule = f"call_{index}"
        self._rules.append(
            f"{rule}: {self._tag(before)} {_quoted(name)} {self._tag(after)} {parameters} {self._tag(end)}"
        )
        return rule

    def _parameters(self, index: int, function: Function) -> str:
        if function.parameters is None:
            return self._free_parameters()
        schema = function.parameters
        if function.strict:
            for member in schema:
                if member not in _OBJECT_MEMBERS and member not in _ANNOTATIONS:
                    raise SchemaError(
                        function.name, (member,), f"{member} is not implemented for a function's parameters"
                    )
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise SchemaError(function.name, ("properties",), "expected an object")
        wanted = schema.get("required", [])
        required = frozenset(map(str, wanted)) if isinstance(wanted, list) else frozenset()
        missing = sorted(required - properties.keys())
        if missing:
            raise SchemaError(function.name, ("required",), f"{missing[0][:64]!r} is required but not declared")
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parts = []
        for place, (name, value) in enumerate(properties.items()):
            if not isinstance(value, dict | bool):
                raise SchemaError(function.name, ("properties", name), "expected a schema")
            rule = f"parameter_{index}_{place}"
            self._parameter(rule, function, name, {} if value is True else value, definitions)
            parts.append(rule if name in required else f"{rule}?")
        return " ".join(parts)

    def _parameter(self, rule: str, function: Function, name: str, schema: Any, definitions: Mapping[str, Any]) -> None:
        _checked(name, function.name, ("properties", name))
        if schema is False:
            raise SchemaError(function.name, ("properties", name), "no value is allowed")
        begin = f"{self._tag(self._syntax.parameter[0])} {_quoted(name)}"
        choices: list[str] = []
        for leaf in _leaves(schema, definitions):
            text, other = _split_leaf(leaf)
            if text is not None:
                value = self._text_value(f"{rule}_{len(choices)}", function, name, text)
                choices.append(f"{begin} {self._tag(self._syntax.text_value)} {value}")
            if other is not None:
                value = _json({**definitions, **other}, lenient=not function.strict)
                choices.append(
                    f"{begin} {self._tag(self._syntax.json_value)} {value} {self._tag(self._syntax.parameter[1])}"
                )
        if not choices:
            raise SchemaError(function.name, ("properties", name), "no value is allowed")
        self._rules.append(f"{rule}: {' | '.join(choices)}")

    def _text_value(self, rule: str, function: Function, name: str, schema: Mapping[str, Any]) -> str:
        """A raw string and the end of its parameter."""
        end = self._tag(self._syntax.parameter[1])
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            texts = [value for value in values if isinstance(value, str) and self._syntax.close not in value]
            if not texts:
                raise SchemaError(function.name, ("properties", name), "none of its values can be written")
            return f"({' | '.join(map(_quoted, texts))}) {end}"
        terms: list[str] = []
        low = self._length(function, name, schema, "minLength")
        high = self._length(function, name, schema, "maxLength")
        if low is not None or high is not None:
            terms.append(f"/(?s:.){{{low or 0},{'' if high is None else high}}}/")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            terms.append(f"/{_search(pattern, function.name, name)}/")
        if schema.get("format") in FORMATS and function.strict:
            raise SchemaError(
                function.name, ("properties", name, "format"), "format is not implemented for a string parameter"
            )
        return self._text(rule, terms)

    def _text(self, rule: str, terms: Sequence[str]) -> str:
        """Raw text that matches all of `terms`, and the end of its parameter.

        The end belongs to the same terminal: a terminal is as long as it can be and never gives bytes back.
        """
        head, special, rest = self._split(self._tag(self._syntax.parameter[1]))
        if not special and not terms:
            self._rules.append(f"{rule}_v[lazy]: /(?s:.*)/ {head}")
            return f"{rule}_v"
        # Where a special token ends the text no other text can look like the end.
        terms = terms if special else [*terms, f"~/(?s:.*){_regex_text(self._syntax.close)}(?s:.*)/"]
        terminal = f"{rule}_t".upper()
        self._rules.append(f"{terminal}: ({' & '.join(terms) or '/(?s:.*)/'}) {head}")
        return f"{terminal} {special} {rest}"

    @staticmethod
    def _length(function: Function, name: str, schema: Mapping[str, Any], member: str) -> int | None:
        value = schema.get(member)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_LENGTH:
            raise SchemaError(
                function.name, ("properties", name, member), f"expected an integer from 0 to {_MAX_LENGTH}"
            )
        return value

    def _free_parameters(self) -> str:
        """Any parameters of any names."""
        if not any(rule.startswith("free:") for rule in self._rules):
            text = self._text("free_text", [])
            begin = f'{self._tag(self._syntax.parameter[0])} /[^<>"\\n]+/'
            choices = [f"{begin} {self._tag(self._syntax.text_value)} {text}"]
            if self._syntax.json_value != self._syntax.text_value:
                choices.append(
                    f"{begin} {self._tag(self._syntax.json_value)} {_json({}, lenient=False)} "
                    f"{self._tag(self._syntax.parameter[1])}"
                )
            self._rules.append(f"free: {' | '.join(choices)}")
        return "free*"

    # ---- texts of the syntax

    def _tag(self, text: str) -> str:
        """A text of the syntax: names of special tokens in it are those tokens."""
        parts: list[str] = []
        start = 0
        for match in self._special_pattern.finditer(text) if self._special_pattern else ():
            if match.start() > start:
                parts.append(_quoted(text[start : match.start()]))
            parts.append(f"<[{self._specials[match.group()]}]>")
            start = match.end()
        if start < len(text):
            parts.append(_quoted(text[start:]))
        return " ".join(parts)

    @staticmethod
    def _split(tag: str) -> tuple[str, str, str]:
        """(text before, the first special token, what follows) of a tag."""
        found = re.search(r"<\[\d+\]>", tag)
        if found is None:
            return tag, "", ""
        return tag[: found.start()].strip(), found.group(), tag[found.end() :].strip()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any], *, lenient: bool) -> str:
    return f"%json {json.dumps(library_schema(schema, lenient=lenient))}"


def _checked(text: str, function: str, path: tuple[str | int, ...]) -> str:
    if not text or not text.isprintable() or any(c in '<>&"' for c in text):
        raise SchemaError(function, path, f"a name like {text[:64]!r} cannot be forced")
    return text


# ---- values


def _leaves(schema: Any, definitions: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The alternatives of a schema with its outermost references resolved."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return
    plain = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
    reference = plain.get("$ref")
    if isinstance(reference, str) and len(plain) == 1:
        parts = reference.split("/")
        target = definitions.get(parts[1]) if len(parts) == 3 and parts[0] == "#" else None
        if isinstance(target, dict) and parts[2] in target:
            yield from _leaves(target[parts[2]], definitions, depth + 1)
            return
    for name in ("anyOf", "oneOf"):
        if len(plain) == 1 and isinstance(plain.get(name), list):
            for option in plain[name]:
                yield from _leaves(option, definitions, depth + 1)
            return
    yield plain


def _split_leaf(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """(the strings, the other values) that a schema without alternatives allows; None for none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    kinds = schema.get("type", None)
    if isinstance(kinds, str):
        kinds = [kinds]
    if kinds is None and not schema:
        return {}, None
    if isinstance(values, list):
        texts = [v for v in values if isinstance(v, str) and (kinds is None or "string" in kinds)]
        others = [v for v in values if not isinstance(v, str)]
        rest = {name: value for name, value in schema.items() if name not in ("enum", "const")}
        return ({"enum": texts} if texts else None), ({**rest, "enum": others} if others else None)
    if kinds is None:
        return None, {**schema, "type": list(_TYPES)}
    others = [kind for kind in kinds if kind != "string"]
    text = {name: value for name, value in schema.items() if name in (*_LEAF_MEMBERS, "format")}
    return (text if "string" in kinds else None), ({**schema, "type": others} if others else None)


def _regex_text(text: str) -> str:
    return re.sub(r"([^\w\s<>=\"'｜])", r"\\\1", text)


def _search(pattern: str, function: str, name: str) -> str:
    """A schema's pattern, which may match anywhere, as one that matches the whole text."""
    path = ("properties", name, "pattern")
    anchored_start = pattern.startswith("^")
    anchored_end = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern[anchored_start : len(pattern) - anchored_end]
    if (anchored_start or anchored_end) and _has_top_level_bar(body):
        raise SchemaError(function, path, "an anchor beside alternatives is not implemented")
    from llguidance import regex_to_lark  # with the first grammar, as in ds4.engine.constraint

    head = "" if anchored_start else "(?s:.*)"
    tail = "" if anchored_end else "(?s:.*)"
    return f"{head}({regex_to_lark(body, 'dw')}){tail}"


def _has_top_level_bar(pattern: str) -> bool:
    depth, escaped, in_class = 0, False, False
    for c in pattern:
        if escaped:
            escaped = False
        elif c == "\\":
            escaped = True
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
        elif c in "()":
            depth += 1 if c == "(" else -1
        elif c == "|" and depth == 0:
            return True
    return False
