"""The published document against the running server, by `schemathesis`: requests made from it, right and wrong ones.

No request is an error of ours, every status and content type is documented, every answer and every error has its
documented shape, and what breaks the documented schema of a body is refused. Examples are bounded and always the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ds4.engine.types import EngineConfig
from ds4.server.config import ServerConfig
from ds4.server.routes import ROUTES, Route
from ds4.testing import ScriptedEngine
from tests.support.running_server import RunningServer

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402

CALL = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
EXAMPLES = 5


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    # A small context: a generated body may ask for an answer without end.
    engine = ScriptedEngine("Hello.", CALL, "Bye.", ctx=2048)
    running = RunningServer(engine, ServerConfig(engine=EngineConfig(ctx=2048, slots=2), port=0))
    yield running
    running.stop()


def path_of(route: Route) -> str:
    return route.full_path + ("{id}" if route.path.endswith("/") and route.path != "/" else "")


def hold(server: RunningServer, route: Route, mode: Any, examples: int) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = document[path_of(route)][route.method]

    statuses: Counter[int] = Counter()

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        wanted = [
            not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
            checks.response_headers_conformance,
        ]
        if mode == GenerationMode.NEGATIVE:
            wanted.append(checks.negative_data_rejection)
        statuses[case.call_and_validate(checks=wanted, timeout=600).status_code] += 1

    check()
    print(f"{route.method} {route.full_path} {mode.value}: {dict(statuses)}")
    # A handful of right bodies may all ask for what this server has not, a token id or a format.
    assert mode == GenerationMode.NEGATIVE or statuses[200] or examples <= EXAMPLES


WITH_BODY = [route for route in ROUTES if route.fields is not None]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_right_requests(server: RunningServer, route: Route) -> None:
    hold(server, route, GenerationMode.POSITIVE, EXAMPLES if route in WITH_BODY else 2)


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: f"{route.method} {route.path}")
def test_wrong_requests(server: RunningServer, route: Route) -> None:
    hold(server, route, GenerationMode.NEGATIVE, EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: f"{route.method} {route.path}")
@pytest.mark.parametrize("mode", GenerationMode)
def test_many_requests(server: RunningServer, route: Route, mode: Any) -> None:
    hold(server, route, mode, 120)
