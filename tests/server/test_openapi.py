"""The field tables tell the truth: the server, the OpenAPI document and the documentation say the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from ds4.server.api.fields import Field
from ds4.server.routes import ROUTES, Route
from tests.support.api_docs import DOCS, with_tables
from tests.support.running_server import RunningServer, Serve

WITH_BODY = [route for route in ROUTES if route.fields is not None]
MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "input_tokens": {"input": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}]},
    "count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "tokenize": {"content": "x"},
    "detokenize": {"tokens": [97]},
}


def minimal(route: Route) -> dict[str, Any]:
    assert route.fields is not None
    return MINIMAL[route.fields.where]


def kinds(schema: Mapping[str, Any]) -> set[str]:
    """JSON types that a schema allows."""
    if "anyOf" in schema:
        return {kind for part in schema["anyOf"] for kind in kinds(part)}
    return {schema["type"]}


def wrong_value(field: Field) -> object:
    """A value of a type that the field does not have."""
    allowed = kinds(field.schema)
    samples = {"boolean": True, "string": "x", "number": 0.5, "array": ["x"], "object": {"x": 1}}
    if "number" in allowed or "integer" in allowed:
        return "wrong" if "string" not in allowed else {"x": 1}
    return next(value for kind, value in samples.items() if kind not in allowed)


def test_the_document_is_valid_and_complete(serve: Serve) -> None:
    document = serve().http.get("/openapi.json").json()
    validate(document)
    for route in ROUTES:
        path = route.full_path + ("{id}" if route.path.endswith("/") and route.path != "/" else "")
        operation = document["paths"][path][route.method.lower()]
        assert operation["summary"]
        if route.fields is None:
            continue
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert list(schema["properties"]) == [field.name for field in route.fields.fields]
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema)
        validator.validate(minimal(route))
        for field in route.fields.fields:
            if field.use == "accepted" and field.schema:
                assert not validator.is_valid({**minimal(route), field.name: wrong_value(field)}), field.name
            if not field.required:
                validator.validate({**minimal(route), field.name: None})


def test_only_who_keeps_states_says_that_one_is_gone(serve: Serve) -> None:
    paths = serve().http.get("/openapi.json").json()["paths"]
    gone = {path for path, methods in paths.items() for found in methods.values() if "409" in found["responses"]}
    assert gone == {"/v1/responses", "/v1/messages"}


def test_paths_of_the_document_answer(serve: Serve) -> None:
    server = serve()
    for route in ROUTES:
        path = route.full_path
        if route.method == "GET":
            assert server.http.get(path + ("scripted" if path.endswith("models/") else "")).status_code == 200, path
        else:
            assert server.http.post(path, json=minimal(route)).status_code == 200, path


def ask(server: RunningServer, route: Route, name: str, value: object) -> Any:
    return server.http.post(route.full_path, json={**minimal(route), name: value})


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
def test_accepted_fields_are_read(serve: Serve, route: Route) -> None:
    """A value of another type is 400 with the field's name: nobody passes over what the table calls accepted."""
    server = serve("a")
    assert route.fields is not None
    for field in route.fields.fields:
        if field.use == "accepted":
            response = ask(server, route, field.name, wrong_value(field))
            assert response.status_code == 400, (field.name, response.text)
            assert response.json()["error"]["param"].startswith(field.name), response.text
            needed = field.required or field.default == "required"
            assert (ask(server, route, field.name, None).status_code == 200) is not needed, field.name


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
def test_refused_and_ignored_fields(serve: Serve, route: Route) -> None:
    server = serve("a")
    assert route.fields is not None
    for field in route.fields.fields:
        if field.use == "refused":
            for value in ({"x": 1}, [1], "x", 7):
                response = ask(server, route, field.name, value)
                assert response.status_code == 400, (field.name, value)
                assert response.json()["error"]["param"] == field.name
            for value in (None, {}, [], *field.harmless):
                assert ask(server, route, field.name, value).status_code == 200, (field.name, value)
        elif field.use == "ignored":
            for value in (None, {"x": 1}, ["x"], "x", 7, True):
                assert ask(server, route, field.name, value).status_code == 200, (field.name, value)


def test_the_documentation_names_every_endpoint() -> None:
    table = DOCS.read_text().partition("| method, path |")[2].partition("\n\n")[0]
    named = set()
    for line in table.splitlines()[2:]:
        method, _, paths = line.split("|")[1].strip().partition(" ")
        named |= {(method, path.replace("{id}", "")) for path in re.findall("`([^`]+)`", paths)}
    assert named == {(route.method, route.full_path) for route in ROUTES}


def test_the_documentation_has_the_tables() -> None:
    text = DOCS.read_text()
    assert text.count("<!-- fields: ") == 4
    assert with_tables(text) == text, "run python -m tests.support.api_docs"
