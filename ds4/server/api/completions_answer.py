"""What a generation looks like in Completions: one object, or a stream of chunks.

Shapes are those of OpenAI's API reference (completion object). Log-probabilities have the form that this endpoint has
always had: parallel lists, the best tokens as an object, offsets in characters of the choice's text.
"""

from __future__ import annotations

import codecs

from ds4.server.api.answer import Collected, TokenBytes
from ds4.server.api.choices_answer import ChoicesAnswer, Style
from ds4.server.api.usage import finite_logprob
from ds4.server.types import ContentDelta, Event, Finish, SampledToken


class CompletionsLogprobs:
    """Implements `ds4.server.api.choices_answer.Logprobs`. Offsets go on from piece to piece."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._tokens: list[SampledToken] = []

    def add(self, token: SampledToken) -> None:
        self._tokens.append(token)

    def take(self) -> object:
        """None without tokens."""
        if not self._tokens:
            return None
        offsets: list[int] = []
        for sampled in self._tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(sampled.data))
        taken, self._tokens = self._tokens, []
        return {
            "tokens": [_text(sampled.data) for sampled in taken],
            "token_logprobs": [finite_logprob(sampled.logprobs.logprob) for sampled in taken],
            "top_logprobs": [
                {_text(self._token_bytes(token)): finite_logprob(value) for token, value in sampled.logprobs.top}
                for sampled in taken
            ],
            "text_offset": offsets,
        }


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


class CompletionsAnswer(ChoicesAnswer):
    """Implements `ds4.server.api.answer.Answer`."""

    def __init__(self, style: Style, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        super().__init__(style, "text_completion", "text_completion")
        self._head = self._envelope + b'{"text":"'

    def _behind_text(self, choice: int) -> bytes:
        return b'","index":%d' % choice

    def _new_logprobs(self) -> CompletionsLogprobs:
        return CompletionsLogprobs(self._token_bytes)

    def _event(self, event: Event, choice: int) -> bytes:
        chunks = self._chunks[choice]
        match event:
            case ContentDelta():
                return chunks.text(self._head, event.text)
            case SampledToken():
                chunks.sampled(event)
            case Finish():
                return chunks.members(b'{"text":"' + self._behind_text(choice), event.reason)
            case _:
                pass
        return b""

    def _whole_choice(self, answer: Collected) -> dict[str, object]:
        return {"text": answer.content}
