"""An error names the place of what is wrong: every member of every body, with a value of a kind that it never has."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ds4.testing import Script, ScriptedEngine
from tests.server.test_dialects import SEEDS
from tests.support.running_server import Serve


def places(value: Any, path: str = "") -> list[tuple[Any, Any, str]]:
    """(container, key, path) of everything inside."""
    found: list[tuple[Any, Any, str]] = []
    if isinstance(value, dict):
        for key, inner in value.items():
            at = (f"{path}.{key}" if path else key) if key.isidentifier() else f'{path}["{key}"]'
            found += [(value, key, at), *places(inner, at)]
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += [(value, index, f"{path}[{index}]"), *places(inner, f"{path}[{index}]")]
    return found


def related(param: str, path: str) -> bool:
    """The error names the place, something inside it, or what it is a part of."""
    return path.startswith(param) or param.startswith(path)


@pytest.mark.parametrize("path", SEEDS)
def test_errors_name_the_place(serve: Serve, path: str) -> None:
    server = serve(ScriptedEngine(Script.text("x</think>ok", "bytes"), syntax="deepseek41", ctx=4096))
    assert server.http.post(path, json=SEEDS[path]).status_code == 200, "the body is right as it is"
    refused = 0
    for number in range(len(places(SEEDS[path]))):
        for wrong in (1.5, [[1.5]], {"what": 1.5}):
            body = copy.deepcopy(SEEDS[path])
            container, key, at = places(body)[number]
            container[key] = wrong
            response = server.http.post(path, json=body)
            if response.status_code == 200:
                continue
            assert response.status_code == 400, (at, wrong, response.text)
            error = response.json()["error"]
            assert error["message"] and error.get("param"), (at, wrong, error)
            assert related(error["param"], at), (at, wrong, error)
            refused += 1
    assert refused > 20
