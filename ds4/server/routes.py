"""Which endpoint answers which request, who may ask, and how errors of an endpoint are drawn.

Paths work with and without `/v1`. A new dialect adds its routes to `ROUTES`, with their fields and error shape.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4._json import dumps
from ds4.errors import ClientDisconnected, RequestError
from ds4.server.api import chat, completions, messages, models, openapi, responses, shapes
from ds4.server.api.errors import Shape, anthropic_error, headers_of, openai_error, status_error, wire_error
from ds4.server.api.fields import FieldTable
from ds4.server.api.shapes import AnswerShape
from ds4.server.http import Refusal

if TYPE_CHECKING:
    from ds4.server.api.service import Service
    from ds4.server.http import Request, Responder

log = logging.getLogger("ds4.server")

Endpoint = Callable[["Service", "Request", "Responder"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """`path` stands without `/v1`; one that ends in a slash stands for everything below it. `public` needs no key.

    `answer` is what it answers, `fields` are those of the request body. `v1` says which spelling of the path is shown
    to people.
    """

    method: str
    path: str
    endpoint: Endpoint
    answer: AnswerShape
    fields: FieldTable | None = None
    shape: Shape = openai_error
    public: bool = False
    v1: bool = True

    @property
    def full_path(self) -> str:
        return f"/v1{self.path}" if self.v1 else self.path

    @property
    def summary(self) -> str:
        """The first sentence of the endpoint's docstring."""
        return (self.endpoint.__doc__ or "").strip().partition("\n")[0]


async def hello(service: Service, request: Request, responder: Responder) -> None:
    """Something is here: clients probe with HEAD."""
    responder.send(200, b'{"name":"ds4-server","status":"ok"}\n')


async def openapi_document(service: Service, request: Request, responder: Responder) -> None:
    """This API as an OpenAPI document."""
    responder.send(200, dumps(openapi.document(ROUTES)) + b"\n")


ROUTES = (
    Route("POST", "/chat/completions", chat.chat_completions, shapes.CHAT, chat.FIELDS),
    Route("POST", "/completions", completions.completions, shapes.COMPLETIONS, completions.FIELDS),
    Route("POST", "/responses", responses.responses, shapes.RESPONSES, responses.FIELDS),
    Route("POST", "/responses/input_tokens", responses.input_tokens, shapes.INPUT_TOKENS, responses.COUNT_FIELDS),
    Route("POST", "/messages", messages.messages, shapes.MESSAGES, messages.FIELDS, anthropic_error),
    Route(
        "POST",
        "/messages/count_tokens",
        messages.count_tokens,
        shapes.COUNT_TOKENS,
        messages.COUNT_FIELDS,
        anthropic_error,
    ),
    Route("GET", "/models", models.list_models, shapes.MODELS),
    Route("GET", "/models/", models.get_model, shapes.MODEL),
    Route("POST", "/apply-template", chat.apply_template, shapes.TEMPLATE, chat.FIELDS, v1=False),
    Route("POST", "/tokenize", models.tokenize, shapes.TOKENS, models.TOKENIZE_FIELDS, v1=False),
    Route("POST", "/detokenize", models.detokenize, shapes.TEXT, models.DETOKENIZE_FIELDS, v1=False),
    Route("GET", "/health", models.health, shapes.HEALTH, public=True, v1=False),
    Route("GET", "/metrics", models.metrics, shapes.METRICS, v1=False),
    Route("GET", "/slots", models.slots, shapes.SLOTS, v1=False),
    Route("GET", "/openapi.json", openapi_document, shapes.ANY_OBJECT, v1=False),
    Route("GET", "/", hello, shapes.ANY_OBJECT, v1=False),
)


def local_path(path: str) -> str:
    """The path without `/v1` in front and without a slash at its end."""
    if path == "/v1" or path.startswith("/v1/"):
        path = path[3:]
    return path.rstrip("/") or "/"


class Router:
    """The handler, gate and error body that `HttpServer` is given."""

    def __init__(self, service: Service, routes: tuple[Route, ...] = ROUTES) -> None:
        self._service = service
        self._keys = tuple(key.encode() for key in service.config.api_keys)
        self._exact = {(route.method, route.path): route for route in routes if not _is_folder(route)}
        self._folders = tuple(route for route in routes if _is_folder(route))

    def find(self, method: str, path: str) -> Route | None:
        local = local_path(path)
        found = self._exact.get((method, local))
        if found is not None:
            return found
        below = (route for route in self._folders if route.method == method and local.startswith(route.path))
        return next(below, None)

    # ---- what the HTTP server calls

    async def handle(self, request: Request, responder: Responder) -> None:
        if request.method == "OPTIONS":
            responder.send(204, b"", "")
            return
        route = self.find(request.method, request.path)
        shape = self._shape(request.path) if route is None else route.shape
        if route is not None and route.fields is not None:
            self._service.scheduler.stay_awake()
        try:
            if route is None:
                raise RequestError("unknown endpoint", status=404)
            await route.endpoint(self._service, request, responder)
        except ClientDisconnected:
            return
        except Exception as error:
            if responder.started:
                raise
            wire = wire_error(error)
            if wire.status == 500:
                log.error("%s %s failed: %s", request.method, request.path, error, exc_info=error)
            responder.send(wire.status, shape(wire), headers=headers_of(wire), reason=wire.message)

    def gate(self, request: Request) -> Refusal | None:
        """Asks for a key, where the server has one, before the body is read. Both clients' headers are taken."""
        if not self._keys:
            return None
        route = self.find(request.method, request.path)
        if route is not None and route.public:
            return None
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            given.append(bearer.strip())
        # Every comparison is made, whatever the result: the time taken says nothing about the keys.
        if sum(_same(key, text) for key in self._keys for text in given):
            return None
        message = "missing API key" if not any(given) else "incorrect API key"
        return Refusal(401, message, (("WWW-Authenticate", "Bearer"),))

    def error_body(self, status: int, message: str, path: str) -> bytes:
        """An error of the HTTP layer in the shape of the dialect that the path belongs to."""
        return self._shape(path)(status_error(status, message))

    def _shape(self, path: str) -> Shape:
        routes = (self.find(method, path) for method in ("POST", "GET"))
        return next((route.shape for route in routes if route is not None), openai_error)


def _is_folder(route: Route) -> bool:
    return len(route.path) > 1 and route.path.endswith("/")


def _same(key: bytes, text: str) -> bool:
    return hmac.compare_digest(key, text.encode())
