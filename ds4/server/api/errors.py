"""Errors as they go over the wire: which status, which members, in which dialect's shape.

Every exception of the package becomes a `WireError` here and nowhere else. What a client did wrong is 4xx and says
where; what we did wrong is 5xx. The text of an unexpected exception stays in the log: it may show paths or data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ds4._json import JSONError, dumps
from ds4.errors import ContextLengthError, EngineError, RequestError, ShuttingDown
from ds4.server.types import Failed


@dataclass(frozen=True, slots=True)
class WireError:
    """An error ready to be shaped. `extra` are further members of the error object."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    extra: dict[str, object] = field(default_factory=dict)


Shape = Callable[[WireError], bytes]
"""Draws an error as the body of a response in one dialect."""


def error_type(status: int) -> str:
    """The `type` of an error: OpenAI's name for the client's mistakes, and for ours."""
    return "server_error" if status >= 500 else "invalid_request_error"


def wire_error(error: BaseException) -> WireError:
    """What `error` is on the wire."""
    if isinstance(error, RequestError):
        return WireError(
            error.status, error.message, error_type(error.status), error.param, error.code, dict(error.extra)
        )
    if isinstance(error, JSONError):
        prefix = "invalid JSON request: " if error.syntax else ""
        return WireError(400, f"{prefix}{error}", error_type(400), error.param)
    if isinstance(error, ContextLengthError):
        return WireError(
            400,
            str(error),
            "invalid_request_error",
            code="context_length_exceeded",
            extra={"n_prompt_tokens": error.n_tokens, "n_ctx": error.n_ctx},
        )
    if isinstance(error, ShuttingDown):
        return WireError(503, str(error) or "server shutting down", "server_error")
    if isinstance(error, EngineError):
        return WireError(500, str(error), "server_error")
    return WireError(500, "internal error", "server_error")


def failed_error(failed: Failed) -> WireError:
    """What a generation that failed is on the wire, before or after the headers."""
    return WireError(failed.status, failed.message, error_type(failed.status), extra=dict(failed.details))


def headers_of(error: WireError) -> tuple[tuple[str, str], ...]:
    """Headers that go with an error: when to come back, if that helps."""
    return (("Retry-After", "5"),) if error.status == 503 else ()


def status_error(status: int, message: str) -> WireError:
    """An error of the transport, which knows a status and a message only."""
    return WireError(status, message, error_type(status), code="invalid_api_key" if status == 401 else None)


def openai_error(error: WireError) -> bytes:
    """`{"error": {message, type, param, code}}` and a newline, for every OpenAI endpoint."""
    body: dict[str, object] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
        **error.extra,
    }
    return dumps({"error": body}) + b"\n"


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_object(error: WireError) -> dict[str, object]:
    """`{"type": "error", "error": {type, message[, param]}}`: also the data of an error event."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body: dict[str, object] = {"type": kind, "message": error.message}
    if error.param is not None:
        body["param"] = error.param
    return {"type": "error", "error": {**body, **error.extra}}


def anthropic_error(error: WireError) -> bytes:
    """The error of an Anthropic endpoint as a body."""
    return dumps(anthropic_object(error)) + b"\n"
