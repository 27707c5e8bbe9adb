"""Cache keys: a prompt as bytes. Text is UTF-8, a special token is 0xFF and its id in four bytes, little-endian.

0xFF never occurs in UTF-8, so a key says which special tokens there are and where; no text can imitate one. A key is
what selects a checkpoint or a live session; which tokens made its text is the state's own business.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ds4.engine.encoding import SPECIAL_KEY_BYTE, key_parts, special_key
from ds4.prompt.types import Conversation, Message, Renderer

if TYPE_CHECKING:
    from ds4.engine.tokenizer import Tokenizer

_SPECIAL_BYTES = len(special_key(0))
_NEXT = Message("user", "?")


class _Ambiguous(Exception):
    """An ordinary token holds the byte that announces a special one."""


class _Pieces(dict[int, bytes]):
    """The key of each token that was asked for. Sessions have thousands of tokens, most of them again and again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # The table lives as long as its tokenizer and must not keep it alive.
        self._tokenizer = weakref.ref(tokenizer)

    def __missing__(self, token: int) -> bytes:
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        if tokenizer.is_special(token):
            key = special_key(token)
        else:
            key = tokenizer.token_bytes(token)
            if SPECIAL_KEY_BYTE in key:
                raise _Ambiguous
        self[token] = key
        return key


_pieces: weakref.WeakKeyDictionary[Tokenizer, _Pieces] = weakref.WeakKeyDictionary()


def key_of_tokens(tokenizer: Tokenizer, tokens: Iterable[int]) -> bytes | None:
    """The key of a token sequence, None when an ordinary token holds the byte that announces a special one.

    A model can draw such a token; the key would then be another prompt's.
    """
    pieces = _pieces.get(tokenizer)
    if pieces is None:
        pieces = _pieces[tokenizer] = _Pieces(tokenizer)
    try:
        return b"".join([pieces[token] for token in tokens])
    except _Ambiguous:
        return None


def tokens_of_key(tokenizer: Tokenizer, key: bytes) -> list[int] | None:
    """Encodes the rest of a prompt's key. None when it does not begin between two characters."""
    tokens: list[int] = []
    try:
        for _, part in key_parts(key):
            tokens += [part] if isinstance(part, int) else tokenizer.encode(part.decode())
    except UnicodeDecodeError:
        return None
    return tokens


def _special_places(key: bytes) -> list[int]:
    return [place for place, part in key_parts(key) if isinstance(part, int)]


@dataclass(frozen=True, slots=True)
class Markers:
    """What a turn begins with, as keys; each starts with a special token."""

    user: bytes
    assistant: bytes


def markers_of(renderer: Renderer, tokenizer: Tokenizer) -> Markers | None:
    """The markers of a prompt syntax, taken from what its renderer writes. None where turns have no special token."""
    asked = Message("user", "QQ")
    answered = (asked, Message("assistant", "AA"), Message("user", "RR"))
    whole = tokenizer.key_bytes(renderer.render(Conversation(answered)).segments)
    opened = tokenizer.key_bytes(renderer.render(Conversation((asked,))).segments)
    question, answer, again = whole.find(b"QQ"), whole.find(b"AA"), whole.find(b"RR")
    if not 0 <= question < answer < again:
        return None
    user = whole.rfind(b"\xff", 0, again)
    # A new assistant turn and one of the history begin alike; what follows depends on thinking.
    new, old = opened[opened.find(b"QQ") + 2 :], whole[question + 2 : answer]
    same = next((i for i, (a, b) in enumerate(zip(new, old, strict=False)) if a != b), min(len(new), len(old)))
    places = [place for place in _special_places(new) if place + _SPECIAL_BYTES <= same]
    if user <= answer or not places:
        return None
    text_end = next((place for place in _special_places(new) if place >= places[-1] + _SPECIAL_BYTES), same)
    return Markers(whole[user:again], new[: min(same, text_end)])


def anchor(prompt: npt.NDArray[np.int32], key: bytes, markers: Markers | None, specials: Sequence[int]) -> int:
    """Tokens before the last user turn that precedes the first assistant turn; -1 when there is no such place.

    That is what conversations with the same system prompt and tools have in common.
    """
    if markers is None:
        return -1
    first = key.find(markers.assistant)
    return _token_at(prompt, key, key.rfind(markers.user, 0, len(key) if first < 0 else first), specials)


def last_turn(prompt: npt.NDArray[np.int32], key: bytes, markers: Markers, specials: Sequence[int]) -> int:
    """Tokens before the last user turn; -1 when there is none."""
    return _token_at(prompt, key, key.rfind(markers.user), specials)


def _token_at(prompt: npt.NDArray[np.int32], key: bytes, place: int, specials: Sequence[int]) -> int:
    """Which token the special one at `place` of the key is."""
    if place < 0:
        return -1
    before = len(_special_places(key[:place]))
    tokens = np.flatnonzero(np.isin(prompt, specials))
    return int(tokens[before]) if before < len(tokens) else -1


def visible_key(renderer: Renderer, tokenizer: Tokenizer, conversation: Conversation, answer: Message) -> bytes | None:
    """The key of a conversation up to the end of `answer`, without the end mark, as the next request renders it.

    `answer` is what the client saw. None when the renderer does not draw the next turn's beginning alike in a whole
    prompt and after a live one.
    """
    messages = conversation.messages
    if conversation.continue_final and messages:
        answer = replace(answer, content=messages[-1].content + answer.content)
        messages = messages[:-1]
    after = replace(conversation, messages=(*messages, answer, _NEXT), continue_final=False)
    whole = tokenizer.key_bytes(renderer.render(after).segments)
    tail = tokenizer.key_bytes(renderer.render_tail((_NEXT,), after).segments)
    return whole[: -len(tail)] if tail and whole.endswith(tail) else None
