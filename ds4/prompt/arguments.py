"""Arguments of a call in the history, as a list of parameters for syntaxes that write them one by one.

Clients send arguments as JSON text, re-serialised in many ways, sometimes broken: the same value must render to the
same bytes, and garbage must render to something.
"""

from __future__ import annotations

from contextlib import suppress

from ds4._json import JSONError, Node, dumps, loads, parse
from ds4.bounded import remembered
from ds4.prompt.escaping import escape


def argument_members(arguments: str, schema: str | None, end: str = "") -> list[tuple[str, str]]:
    """(name, text) of each parameter: strings raw, other values as minified JSON.

    `end` is the delimiter that closes a value: where one contains it, a string is escaped as in `ds4.prompt.escaping`,
    JSON writes its `<` as an escape of its own. Parameters stand in the order in which `schema` (the function's
    declaration, JSON text) declares them, the others after them as sent. Text that is not a JSON object becomes one
    parameter named `arguments`; blank text none.
    """
    if not arguments.strip():
        return []
    value = _object(arguments)
    if value is None:
        return [("arguments", _escaped(arguments, end))]
    members = {name: _text(kind, text, end) for name, kind, text in value.texts()}
    order = [name for name in _declared(schema) if name in members] if schema else []
    return [(name, members.pop(name)) for name in order] + list(members.items())


def _text(kind: str, text: str, end: str) -> str:
    """A value's own text, where JSON has several for a value always the same."""
    if kind == "str":
        return _escaped(text, end)
    if kind == "bool" or kind == "null" or (kind == "int" and len(text) < 16 and text != "-0"):
        return text
    # Of a number beyond the range of a double only the source text is exact.
    with suppress(JSONError):
        text = dumps(loads(text)).decode()
    return text.replace(end, f"\\u003c{end[1:]}") if end else text


def _escaped(text: str, end: str) -> str:
    return escape(text, end) if end else text


def _object(text: str) -> Node | None:
    try:
        node = parse(text.encode("utf-8", "replace"))
    except JSONError:
        return None
    return node if node.kind == "object" else None


@remembered(4 << 20, lambda schema: 2 * len(schema) + 256)
def _declared(schema: str) -> tuple[str, ...]:
    """Names of the declared parameters, in order. Anthropic calls the schema `input_schema`."""
    declaration = _object(schema)
    if declaration is None:
        return ()
    for member in ("parameters", "input_schema"):
        parameters = declaration.get(member)
        if parameters is not None and parameters.kind == "object":
            properties = parameters.get("properties")
            return tuple(properties.keys()) if properties is not None and properties.kind == "object" else ()
    return ()
