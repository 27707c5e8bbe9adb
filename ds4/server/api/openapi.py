"""The API as an OpenAPI 3.1 document (`GET /openapi.json`) and as tables of `docs/api.md`, from the field tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from ds4 import __version__
from ds4.server.api.errors import Shape, anthropic_error
from ds4.server.api.fields import Field, FieldTable
from ds4.server.api.shapes import ANTHROPIC_ERROR, EVENT, JSON, OPENAI_ERROR, AnswerShape


class DocumentedRoute(Protocol):
    """What the document needs to know of a route."""

    @property
    def method(self) -> str: ...
    @property
    def full_path(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def fields(self) -> FieldTable | None: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def answer(self) -> AnswerShape: ...
    @property
    def public(self) -> bool: ...


def document(routes: Iterable[DocumentedRoute]) -> dict[str, object]:
    """The document of these routes."""
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        path = (
            f"{route.full_path}{{id}}"
            if len(route.full_path) > 1 and route.full_path.endswith("/")
            else route.full_path
        )
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ds4-server",
            "version": __version__,
            "description": "Every path works with and without /v1. null counts as absent. Members that are not listed "
            "are accepted and have no effect.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": OPENAI_ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


_STATUSES = {
    400: "the request is wrong; `param` says where",
    401: "an API key is missing or wrong",
    403: "a foreign Host or Origin",
    408: "the request did not arrive in time",
    414: "the path is too long",
    431: "the head is too large",
    500: "a fault of the server",
    503: "the server shuts down or has too much to do",
}
_BODY_STATUSES = {413: "the body is too large", 415: "the Content-Encoding is not supported"}


def _operation(route: DocumentedRoute, path: str) -> dict[str, object]:
    statuses = dict(_STATUSES)
    if route.fields is not None:
        statuses |= _BODY_STATUSES
    if path.endswith("{id}"):
        statuses[404] = "there is no such thing"
    if route.answer.live:
        statuses[409] = "results came without their calls, whose state is not live any more: send the whole history"
    name = "AnthropicError" if route.shape is anthropic_error else "Error"
    error: dict[str, object] = {"$ref": f"#/components/schemas/{name}"}
    responses: dict[str, object] = {"200": {"description": "the answer", "content": _answer(route.answer)}}
    for status, description in sorted(statuses.items()):
        schema = route.answer.other.get(status, error)
        responses[str(status)] = {"description": description, "content": {JSON: {"schema": schema}}}
    operation: dict[str, object] = {
        "operationId": f"{route.method.lower()}_{re.sub('[^a-z0-9]+', '_', path.lower()).strip('_') or 'root'}",
        "summary": route.summary,
        "responses": responses,
        "security": [] if route.public else [{}, {"bearer": []}, {"key": []}],
    }
    if path.endswith("{id}"):
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.fields is not None:
        content = {"application/json": {"schema": body_schema(route.fields)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _answer(answer: AnswerShape) -> dict[str, object]:
    content: dict[str, object] = {kind: {"schema": schema} for kind, schema in answer.content.items()}
    if answer.streams:
        content["text/event-stream"] = {"schema": EVENT}
    return content


def body_schema(table: FieldTable) -> dict[str, object]:
    """JSON Schema of a request body."""
    schema: dict[str, object] = {
        "type": "object",
        "properties": {field.name: _property(field) for field in table.fields},
        "additionalProperties": True,
    }
    names = [field.name for field in table.fields if field.required]
    return {**schema, "required": names} if names else schema


def _property(field: Field) -> dict[str, object]:
    if field.use == "refused":
        return {"description": _sentence("400 unless it asks for nothing", field.note), "x-ds4": "refused"}
    if field.use == "ignored":
        return {"description": _sentence("accepted, without effect", field.note), "x-ds4": "ignored"}
    schema = dict(field.schema)
    if not field.required and schema:
        schema = {"anyOf": [schema, {"type": "null"}]}
    default = "" if field.required or not field.default else f"default: {field.default}"
    text = _sentence(default, field.note)
    return {**schema, "description": text} if text else schema


def _sentence(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


# ---- tables for people ------------------------------------------------------------------------------------------


def markdown(table: FieldTable) -> str:
    """The fields of one endpoint for `docs/api.md`."""
    lines = ["| field | default | notes |", "| --- | --- | --- |"]
    lines += [f"| `{f.name}` | {f.default} | {f.note} |" for f in table.fields if f.use == "accepted"]
    for use, text in (("refused", "400 when they ask for something"), ("ignored", "Accepted, without effect")):
        chosen = [f for f in table.fields if f.use == use]
        if chosen:
            lines += ["", f"{text}: {_names(chosen)}."]
    return "\n".join(lines)


def _names(fields: Sequence[Field]) -> str:
    return ", ".join(f"`{field.name}`" + (f" ({field.note})" if field.note else "") for field in fields)
