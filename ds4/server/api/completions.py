"""POST /v1/completions: a text is gone on with, as it stands; nothing in the output is more than text.

The prompt is a string, an array of token ids, or an array of either; with several prompts the choices of each follow
one another. `"template": "chat"` asks a chat model instead: the prompt becomes a user turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ds4._json import Node
from ds4.engine.types import SamplingParams
from ds4.errors import RequestError
from ds4.prompt.types import Conversation, Message
from ds4.server.api import common, fields
from ds4.server.api.choices_answer import new_style
from ds4.server.api.completions_answer import CompletionsAnswer
from ds4.server.api.delivery import send
from ds4.server.api.fields import FieldTable
from ds4.server.api.prepare import Limits, Preparer, Prompt
from ds4.server.api.structure import Structure, constrain, read_format

if TYPE_CHECKING:
    from ds4.server.api.service import Service
    from ds4.server.http import Request, Responder

MAX_PROMPTS = 256
"""Prompts in one request; each of them is a generation that waits in the queue."""

SYSTEM = "You are a helpful assistant"
"""System turn of `"template": "chat"`."""

_PROMPT: fields.Schema = fields.one_of(
    fields.STRING,
    fields.array_of(fields.STRING),
    fields.array_of(fields.INTEGER),
    fields.array_of(fields.array_of(fields.INTEGER)),
)

FIELDS = FieldTable(
    "completions",
    (
        fields.required("prompt", _PROMPT, f"a text, token ids, or an array of up to {MAX_PROMPTS} of either"),
        fields.MODEL,
        fields.accepted("max_tokens", fields.INTEGER, "`--tokens`", fields.MAX_TOKENS_NOTE),
        *fields.SAMPLING,
        fields.accepted("stop", fields.STOP_SCHEMA, "none", fields.STOP_NOTE),
        fields.IGNORE_EOS,
        fields.accepted("logprobs", fields.INTEGER, "none", "0 to 20 best tokens; not together with `echo`"),
        fields.accepted("echo", fields.BOOLEAN, "false", "the answer begins with the prompt"),
        fields.N,
        fields.accepted("best_of", fields.INTEGER, "`n`", "any other value is 400"),
        fields.STREAM,
        fields.STREAM_OPTIONS,
        fields.TIMINGS,
        fields.accepted(
            "template",
            {"type": "string", "enum": ["raw", "chat"]},
            "`raw`",
            f"`chat` makes the prompt a user turn behind the system text {SYSTEM!r}; the answer is still all that was "
            "generated, reasoning included",
        ),
        fields.accepted("parse_special", fields.BOOLEAN, "false", "names of special tokens in the text become tokens"),
        fields.accepted(
            "add_special_tokens", fields.BOOLEAN, "true", "the token that begins a text, if the model has it"
        ),
        *fields.THINKING,
        fields.refused("suffix", harmless=("",)),
        fields.accepted("response_format", fields.OBJECT, "text", fields.FORMAT_NOTE),
        *fields.CONSTRAINTS,
        *fields.ENDS,
        fields.refused("prompt_logprobs"),
        fields.ignored("user"),
    ),
)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A body that was understood. `prompts` holds texts or token ids."""

    model: str | None
    prompts: tuple[str | list[int], ...]
    effort: str | int
    chat: bool
    parse_special: bool
    bos: bool
    sampling: SamplingParams
    limits: Limits
    structure: Structure
    choices: int
    echo: bool
    stream: bool
    include_usage: bool
    timings: bool
    unused: tuple[str, ...]


def read_completion(body: Node, defaults: SamplingParams, preparer: Preparer, slots: int) -> CompletionRequest:
    """Everything of a body. Raises RequestError or JSONError with the path of what is wrong."""
    without_effect = FIELDS.check(body)
    prompts = _prompts(body, preparer.vocab_size)
    chat = _template(body)
    if chat and not all(isinstance(prompt, str) for prompt in prompts):
        raise body["prompt"].error("template chat needs a text as the prompt")
    n = common.choices(body, slots)
    best_of = body.get_int("best_of", n)
    if best_of != n:
        raise body["best_of"].error(f"best_of={best_of} is not supported: expected n, which is {n}")
    echo = body.get_bool("echo", False)
    logprobs = body.get_int("logprobs", None, 0, 20)
    if echo and logprobs is not None:
        raise body["logprobs"].error("logprobs together with echo is not supported: there are none of the prompt")
    ignore_eos = common.ignore_eos(body)
    structure = _structure(body, ignore_eos=ignore_eos)
    options = body.get_object("stream_options")
    return CompletionRequest(
        model=body.get_str("model"),
        prompts=prompts,
        effort=common.thinking_effort(body, body.get_str("model", ""), preparer.syntax, preparer.n_ctx),
        chat=chat,
        parse_special=body.get_bool("parse_special", False),
        bos=body.get_bool("add_special_tokens", True),
        sampling=common.sampling(body, defaults, preparer.vocab_size, logprobs=logprobs),
        limits=Limits(
            max_tokens=common.max_tokens(body, ("max_tokens",)),
            stop=common.stop_strings(body, "stop"),
            ignore_eos=ignore_eos,
        ),
        structure=structure,
        choices=n,
        echo=echo,
        stream=body.get_bool("stream", False),
        include_usage=options is not None and options.get_bool("include_usage", False),
        timings=body.get_bool("timings", False),
        unused=tuple(without_effect),
    )


def _structure(body: Node, *, ignore_eos: bool) -> Structure:
    node = body.get_object("response_format")
    grammar, param = (None, "") if node is None else read_format(node)
    if grammar is not None and ignore_eos:
        raise RequestError("ignore_eos cannot be combined with structured output", param="ignore_eos")
    return Structure(grammar, param)


def _template(body: Node) -> bool:
    template = body.get_str("template", "raw")
    if template not in ("raw", "chat"):
        raise body["template"].error(f"Expected `raw` or `chat`, got {template[:40]!r}")
    return template == "chat"


def _prompts(body: Node, vocab_size: int) -> tuple[str | list[int], ...]:
    node = body.get("prompt")
    if node is None:
        raise RequestError("missing prompt", param="prompt")
    if node.kind == "str":
        return (node.as_str(),)
    if node.kind != "array":
        raise node.error(f"Expected `str` or `array`, got `{node.kind}`")
    if len(node) == 0:
        raise node.error("Expected a prompt, got an empty array")
    if node[0].kind == "int":
        return (node.ints(0, vocab_size - 1),)
    if len(node) > MAX_PROMPTS:
        raise node.error(f"Expected at most {MAX_PROMPTS} prompts, got {len(node)}")
    return tuple(item.as_str() if item.kind == "str" else _ids(item, vocab_size) for item in node)


def _ids(node: Node, vocab_size: int) -> list[int]:
    if node.kind != "array":
        raise node.error(f"Expected `str` or an array of token ids, got `{node.kind}`")
    return node.ints(0, vocab_size - 1)


async def _prompt(service: Service, wanted: CompletionRequest, prompt: str | list[int]) -> Prompt:
    if not isinstance(prompt, str):
        return service.preparer.token_prompt(prompt)
    if wanted.chat:
        turns = (Message("system", SYSTEM), Message("user", prompt))
        return await service.prompt(Conversation(turns, effort=wanted.effort))
    return await service.preparer.raw_prompt(prompt, specials=wanted.parse_special, bos=wanted.bos)


async def completions(service: Service, request: Request, responder: Responder) -> None:
    """A text is gone on with (OpenAI Completions), whole or streamed."""
    wanted = read_completion(service.body(request), service.config.sampling, service.preparer, service.n_slots)
    service.unknown.note(FIELDS.where, wanted.unused)
    model = service.model_id if wanted.model is None else wanted.model
    total = len(wanted.prompts) * wanted.choices
    style = new_style(
        "cmpl",
        model,
        choices=total,
        per_prompt=wanted.choices,
        include_usage=wanted.include_usage,
        timings=wanted.timings or service.config.timings,
        logprobs=wanted.sampling.logprobs is not None,
    )
    constraint = await constrain(service.preparer, wanted.structure)
    prompts = [await _prompt(service, wanted, prompt) for prompt in wanted.prompts]
    if constraint is not None and any(prompt.rendered.thinking for prompt in prompts):
        raise RequestError("a structured answer of template chat needs thinking off", param="response_format")
    jobs = [
        service.preparer.request(
            common.choice_id(style.id, index * wanted.choices + choice, total),
            "completions",
            model,
            prompt,
            None,
            common.choice_sampling(wanted.sampling, choice),
            wanted.limits,
            param="prompt",
            echo=wanted.echo,
            constraint=constraint,
            received=request.received,
        )
        for index, prompt in enumerate(prompts)
        for choice in range(wanted.choices)
    ]
    answer = partial(CompletionsAnswer, style, service.token_bytes)
    await send(service, jobs, answer, responder, stream=wanted.stream)
