"""Every error type that ds4 raises.

Each error is raised where the fact is known and turned into wire form (HTTP status, exit code) in one place.
Messages name what is wrong (file, tensor, JSON path, flag) and both values: the one found and the one allowed.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with control characters escaped: names in untrusted files must not reach a terminal as they are."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


class Ds4Error(Exception):
    """Base of all errors of this package."""


class ConfigError(Ds4Error):
    """A flag or environment variable has a bad value. Programs print it in one line and exit with 2."""


class ModelFileError(Ds4Error):
    """A model file is truncated, malformed or lies about itself.

    `path` is the file, `where` the tensor or metadata key at fault (may be empty for the header).
    """

    def __init__(self, path: object, where: str, message: str) -> None:
        self.path = str(path)
        self.where = where
        super().__init__(printable(f"{path}: {where + ': ' if where else ''}{message}"))


class UnsupportedModelError(ModelFileError):
    """The file is sound, but asks for something that this build does not implement."""


class MemoryPlanError(Ds4Error):
    """The plan (weights + sessions + workspace) does not fit the machine; the message says what would."""


class EngineError(Ds4Error):
    """The engine failed at run time: ours, 5xx on the wire."""


class SessionInvalidError(EngineError):
    """A session whose state was lost is used without a new `sync`."""


class ContextLengthError(Ds4Error):
    """A prompt or step needs more positions than the session has. `n_tokens` wanted, `n_ctx` available."""

    def __init__(self, n_tokens: int, n_ctx: int) -> None:
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx
        super().__init__(f"Prompt has {n_tokens} tokens, but the configured context size is {n_ctx} tokens")


class Cancelled(Ds4Error):
    """The caller asked to stop; the state is valid for exactly the tokens that the session reports."""


class CheckpointError(Ds4Error):
    """A saved session cannot be loaded: damaged, cut, of another model or another version."""


class RequestError(Ds4Error):
    """The client's mistake: 4xx in the dialect's own error object.

    `param` is the path of the field (`messages[2].content[0].type`), `code` the machine-readable code or None.
    `extra` holds further members of the error object (`n_prompt_tokens`, `n_ctx`).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        extra: dict[str, object] | None = None,
    ) -> None:
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.extra = extra or {}
        super().__init__(message)


class ShuttingDown(Ds4Error):
    """The server drains and takes no new work: 503."""


class ClientDisconnected(Ds4Error):
    """The client is gone (closed, reset or stalled): nothing can be sent to it any more. Never shown to anyone."""
