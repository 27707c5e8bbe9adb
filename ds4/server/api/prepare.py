"""From a conversation to a `GenerationRequest`: render, tokenise, check against the context. One way for all dialects.

The context check comes before any queue. What takes long (a long prompt) runs outside the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from ds4.engine.constraint import Compiler, ConstraintLike
from ds4.engine.types import EngineLike, SamplingParams
from ds4.errors import RequestError
from ds4.prompt.registry import syntax_of
from ds4.prompt.types import Conversation, Message, RenderedPrompt
from ds4.server.keys import key_of_tokens, visible_key
from ds4.server.types import Continuation, Dialect, GenerationRequest

_INLINE_CHARACTERS = 4096
"""So much text is tokenised in the event loop (about a millisecond); handing it over costs as much."""
_DRAWN_INLINE = 4 << 20
"""Characters of a conversation that is rendered in the event loop, which takes 1 to 3 ms per million."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt with its tokens, [n] int32, and its cache key (a special token is 0xFF and its id).

    `conversation` is what was rendered, with its calls as they were sampled; None: the prompt came as text or tokens.
    """

    rendered: RenderedPrompt
    tokens: npt.NDArray[np.int32]
    key: bytes
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How one generation ends."""

    max_tokens: int | None = None
    stop: tuple[bytes, ...] = ()
    ignore_eos: bool = False


class Preparer:
    """Renders and tokenises for one engine."""

    def __init__(
        self, engine: EngineLike, max_output_tokens: int, *, specials_in_text: bool = False, template: str = "ds4"
    ) -> None:
        self.syntax = syntax_of(engine.info, template)
        self.renderer = self.syntax.make(engine.info)
        self.n_ctx = engine.config.ctx
        self.vocab_size = engine.tokenizer.vocab_size
        self.compiler = Compiler(engine.tokenizer, engine.info.vocab_size)
        self.compiling = ThreadPoolExecutor(1, "ds4-grammar")
        """One grammar at a time: a schema that is made to be slow must not take the cores from the rest."""
        self._tokenizer = engine.tokenizer
        self._max_output_tokens = max_output_tokens
        self._specials_in_text = specials_in_text

    async def raw_prompt(self, text: str, *, specials: bool = False, bos: bool = True) -> Prompt:
        """A text as it stands. `specials`: names of special tokens in it become tokens; `bos`: with the token that
        begins a text, where the model was trained with one."""
        specials = specials or self._specials_in_text
        encode = self._tokenizer.encode_with_specials if specials else self._tokenizer.encode
        tokens = encode(text) if len(text) <= _INLINE_CHARACTERS else await asyncio.to_thread(encode, text)
        first = self._tokenizer.bos_id if bos and self._tokenizer.add_bos else None
        whole = tokens if first is None or tokens[:1] == [first] else [first, *tokens]
        return self._of_tokens(RenderedPrompt((text,)), whole)

    def token_prompt(self, tokens: list[int]) -> Prompt:
        """A prompt that is tokens already."""
        try:
            text = self._tokenizer.decode(tokens)
        except KeyError as error:
            raise RequestError(f"there is no token {error}", param="prompt") from None
        return self._of_tokens(RenderedPrompt((text.decode("utf-8", "replace"),)), tokens)

    def _of_tokens(self, rendered: RenderedPrompt, tokens: list[int]) -> Prompt:
        return Prompt(rendered, np.array(tokens, np.int32), self._key(tokens))

    def _key(self, tokens: list[int]) -> bytes:
        """The key of a prompt that came as tokens; empty when it could be taken for another prompt's."""
        return key_of_tokens(self._tokenizer, tokens) or b""

    async def prompt(self, conversation: Conversation) -> Prompt:
        """Renders and tokenises. What is mostly known from the last turn is done at once, a lot of new text outside
        the event loop."""
        if _characters(conversation) > _DRAWN_INLINE or self._specials_in_text:
            return await asyncio.to_thread(self._prompt, conversation)
        rendered = self.renderer.render(conversation)
        encoded = self._tokenizer.encode_prompt_within(rendered.drawn, _INLINE_CHARACTERS)
        if encoded is None:
            encoded = await asyncio.to_thread(self._tokenizer.encode_prompt, rendered.drawn)
        return Prompt(rendered, encoded.ids, encoded.key, conversation)

    def _prompt(self, conversation: Conversation) -> Prompt:
        return replace(self.encoded(self.renderer.render(conversation)), conversation=conversation)

    def encoded(self, rendered: RenderedPrompt) -> Prompt:
        """A rendered prompt, or what follows one, as tokens. Takes long for a long one."""
        if self._specials_in_text:
            return self._of_tokens(rendered, self._tokenizer.encode_with_specials(rendered.text))
        encoded = self._tokenizer.encode_prompt(rendered.drawn)
        return Prompt(rendered, encoded.ids, encoded.key)

    def tail(self, messages: Sequence[Message], conversation: Conversation) -> bytes:
        """The key of what follows the last assistant turn of a conversation, for `messages` behind it."""
        rendered = self.renderer.render_tail(messages, conversation)
        if self._specials_in_text:
            return self._key(self._tokenizer.encode_with_specials(rendered.text))
        return self._tokenizer.key_bytes(rendered.segments)

    def request(
        self,
        id: str,
        dialect: Dialect,
        model: str,
        prompt: Prompt,
        conversation: Conversation | None,
        sampling: SamplingParams,
        limits: Limits,
        *,
        param: str | None,
        echo: bool = False,
        constraint: ConstraintLike | None = None,
        received: float | None = None,
        continues: Continuation | None = None,
    ) -> GenerationRequest:
        """Raises RequestError (400, `context_length_exceeded`) when no token fits after the prompt.

        `conversation` None: everything that is generated is text. `param` is the dialect's name of the field that
        holds the prompt, None where errors have none. `echo` puts the prompt's text before the answer. `constraint`
        is what the answer must match (`structure.constrain`), `continues` the turn whose calls it answers.
        """
        n_prompt = len(prompt.tokens)
        self.check_fits(n_prompt, param, dialect)
        tools = () if conversation is None else conversation.tools
        wanted = self._max_output_tokens if limits.max_tokens is None else limits.max_tokens
        return GenerationRequest(
            id=id,
            dialect=dialect,
            model=model,
            prompt_tokens=prompt.tokens,
            key=prompt.key,
            sampling=sampling,
            max_tokens=min(wanted, self.n_ctx - n_prompt),
            stop=limits.stop,
            ignore_eos=limits.ignore_eos,
            syntax="raw" if conversation is None else self.renderer.syntax,
            thinking=conversation is not None and prompt.rendered.thinking,
            tools=bool(tools),
            tool_schemas=tuple((tool.name, tool.schema) for tool in tools),
            constraint=constraint,
            echo_text=prompt.rendered.text.encode("utf-8", "replace") if echo else b"",
            created=time.monotonic() if received is None else received,
            visible=None
            if conversation is None or self._specials_in_text
            else partial(visible_key, self.renderer, self._tokenizer, prompt.conversation or conversation),
            continues=continues,
        )

    def check_fits(self, n_prompt: int, param: str | None, dialect: Dialect) -> None:
        """The prompt and one more token must fit. The last sentence is what the dialect's clients recognise."""
        n_ctx = self.n_ctx
        if n_prompt < n_ctx:
            return
        # Clients know a full context by words: these are what LiteLLM, Pi and LangChain look for, not `code`.
        known = f"This model's maximum context length is {n_ctx} tokens (context_length_exceeded)."
        if dialect == "messages":
            known = f"prompt is too long: {n_prompt} tokens > {n_ctx - 1} maximum"
        raise RequestError(
            f"Prompt has {n_prompt} tokens, but the configured context size is {n_ctx} tokens. {known}",
            param=param,
            code="context_length_exceeded",
            extra={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
        )


def _characters(conversation: Conversation) -> int:
    """About as long as the prompt will be."""
    size = sum(len(tool.schema) for tool in conversation.tools)
    for message in conversation.messages:
        size += len(message.content) + sum(len(call.arguments) for call in message.calls)
    return size
