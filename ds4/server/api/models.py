"""Endpoints about the server itself: models, health, slots, and the tokenizer as a service."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ds4._json import dumps
from ds4.errors import RequestError
from ds4.server.api import fields
from ds4.server.api.fields import FieldTable

if TYPE_CHECKING:
    from ds4.server.api.service import Service
    from ds4.server.http import Request, Responder

_CREATED = 1767225600
"""A constant (2026-01-01): clients show it, and a date that changes with every start would be noise."""

_PARAMETERS = (
    "tools",
    "tool_choice",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "ignore_eos",
    "stop",
    "seed",
    "stream",
    "reasoning_effort",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
)


TOKENIZE_FIELDS = FieldTable(
    "tokenize",
    (
        fields.accepted("content", fields.STRING, "required", "the text; `text` and `prompt` are taken for it"),
        fields.accepted("text", fields.STRING),
        fields.accepted("prompt", fields.STRING),
        fields.accepted("parse_special", fields.BOOLEAN, "false", "names of special tokens in the text become tokens"),
        fields.accepted("with_pieces", fields.BOOLEAN, "false", "each token's text, or its bytes where they are none"),
        fields.ignored("add_special", "nothing is added to the text"),
    ),
)

DETOKENIZE_FIELDS = FieldTable(
    "detokenize", (fields.required("tokens", fields.array_of(fields.INTEGER), "ids of the vocabulary"),)
)


_LINES = {
    "deepseek4": ("deepseek-v4-flash", "deepseek-v4-pro"),
    "deepseek41": ("deepseek-v4.1-flash",),
    "glm": ("glm-5.2", "glm-5.3-flash"),
    "qwen": ("qwen3.8-flash-next",),
}
"""Names that the makers' own services give to models of a prompt syntax: clients look for them by habit."""
_MAKERS = {"glm": "zai/", "qwen": "qwen/"}
_THINKING = ("-chat", "-no-think", "-nothink", "-reasoner")
"""Behind an id: the same model with thinking off, or on (`common.thinking_effort`)."""
_SHOWN = ("-chat", "-reasoner")


def model_object(service: Service, id: str) -> dict[str, object]:
    """The model as OpenAI, OpenRouter and Anthropic clients look for it: one object carries all three."""
    n_ctx = service.preparer.n_ctx
    return {
        "id": id,
        "object": "model",
        "created": _CREATED,
        "owned_by": "ds4.c",
        "name": service.engine.info.name,
        "context_length": n_ctx,
        "top_provider": {
            "context_length": n_ctx,
            "max_completion_tokens": min(service.config.max_output_tokens, n_ctx),
            "is_moderated": False,
        },
        "supported_parameters": list(_PARAMETERS),
        "type": "model",
        "display_name": service.engine.info.name,
        "created_at": datetime.fromtimestamp(_CREATED, timezone.utc).isoformat().replace("+00:00", "Z"),
    }


def listed_ids(service: Service) -> tuple[str, ...]:
    """The ids of the one model: its own or its alias and, where people choose thinking by the name of the model, that
    with thinking off and on."""
    own = service.model_id
    return (own, *(own + end for end in _SHOWN)) if service.preparer.syntax.name in _MAKERS else (own,)


def is_known(service: Service, id: str) -> bool:
    """Is this a name of the loaded model? Its alias, its own id, or one of its line, also with an end that switches
    thinking."""
    syntax = service.preparer.syntax
    bare = next((id.removesuffix(end) for end in _THINKING if id.endswith(end)), id) if syntax.thinking else id
    names = {service.model_id, service.engine.info.id}
    line = _LINES.get(syntax.name, ())
    maker = _MAKERS.get(syntax.name, "")
    # A full id may itself end like a switch.
    return id in names or bare in names or bare in line or (bool(maker) and bare.removeprefix(maker) in line)


async def list_models(service: Service, request: Request, responder: Responder) -> None:
    """The list of models: the loaded one, under its names."""
    ids = listed_ids(service)
    data = [model_object(service, id) for id in ids]
    ends = {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
    responder.send(200, dumps({"object": "list", "data": data, **ends}) + b"\n")


async def get_model(service: Service, request: Request, responder: Responder) -> None:
    """One model by its id, which may contain slashes."""
    wanted = request.path.partition("/models/")[2]
    if not is_known(service, wanted):
        raise RequestError(f"The model {wanted[:80]!r} does not exist", status=404, code="model_not_found")
    responder.send(200, dumps(model_object(service, wanted)) + b"\n")


async def health(service: Service, request: Request, responder: Responder) -> None:
    """200 while requests are served, 503 from the beginning of a shutdown."""
    if service.accepting:
        responder.send(200, b'{"status":"ok"}\n')
    else:
        responder.send(503, b'{"status":"error","reason":"server shutting down"}\n')


async def metrics(service: Service, request: Request, responder: Responder) -> None:
    """Metrics, for Prometheus."""
    from ds4.server.exposition import render

    body, content_type = render(service.metrics, request.headers.get("accept", ""))
    responder.send(200, body, content_type)


async def slots(service: Service, request: Request, responder: Responder) -> None:
    """What each resident session does. Read-only."""
    states = [{**asdict(state), "n_ctx": service.preparer.n_ctx} for state in service.scheduler.slot_states()]
    responder.send(200, dumps(states) + b"\n")


async def tokenize(service: Service, request: Request, responder: Responder) -> None:
    """A text as tokens: `{content[, parse_special][, with_pieces]}` to `{tokens, count}`.

    `parse_special` lets special tokens in the text become tokens, `with_pieces` adds each token's text (or its bytes
    where they are no text). llama.cpp's names; `text` and `prompt` are taken for `content`.
    """
    body = service.body(request)
    texts = [text for name in ("content", "text", "prompt") if (text := body.get_str(name)) is not None]
    if not texts:
        raise RequestError("missing content", param="content")
    text = texts[0]
    tokenizer = service.engine.tokenizer
    specials = body.get_bool("parse_special", False)
    encode = tokenizer.encode_with_specials if specials else tokenizer.encode
    tokens = await asyncio.to_thread(encode, text) if len(text) > 4096 else encode(text)
    if body.get_bool("with_pieces", False):
        pieces = [{"id": token, "piece": _piece(service.token_bytes(token))} for token in tokens]
        responder.send(200, dumps({"tokens": pieces, "count": len(tokens)}) + b"\n")
    else:
        responder.send(200, dumps({"tokens": list(tokens), "count": len(tokens)}) + b"\n")


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(service: Service, request: Request, responder: Responder) -> None:
    """Tokens as text: `{tokens}` to `{content}`; bytes that are no UTF-8 become U+FFFD."""
    node = service.body(request).get_array("tokens")
    if node is None:
        raise RequestError("missing tokens", param="tokens")
    ids = node.ints(0, service.preparer.vocab_size - 1)
    try:
        data = service.engine.tokenizer.decode(ids)
    except KeyError as error:
        raise RequestError(f"there is no token {error}", param="tokens") from None
    responder.send(200, dumps({"content": data.decode("utf-8", "replace")}) + b"\n")
