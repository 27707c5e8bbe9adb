"""The API as an OpenAPI 3.1 document (`GET /openapi.json`) and as tables of `docs/api.md`, from the field tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from ds4 import __version__
from ds4.server.api.errors import Shape, anthropic_error
from ds4.server.api.fields import Field, FieldTable


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
            "schemas": {"Error": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"], "description": "path of what is wrong"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}, "param": {"type": "string"}},
        },
    },
}


def _operation(route: DocumentedRoute, path: str) -> dict[str, object]:
    name = "AnthropicError" if route.shape is anthropic_error else "Error"
    failed = {
        "description": "the error object of this dialect",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }
    operation: dict[str, object] = {
        "operationId": f"{route.method.lower()}_{re.sub('[^a-z0-9]+', '_', path.lower()).strip('_') or 'root'}",
        "summary": route.summary,
        "responses": {"200": {"description": "see docs/api.md"}, "4XX": failed, "5XX": failed},
        "security": [] if route.public else [{}, {"bearer": []}, {"key": []}],
    }
    if path.endswith("{id}"):
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.fields is not None:
        content = {"application/json": {"schema": body_schema(route.fields)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


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
