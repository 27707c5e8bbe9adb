"""One more attempt at a whole answer whose tool call cannot be read.

The model is told what was wrong (`ds4.prompt.feedback`) behind its own broken turn, so everything before that is still
evaluated. It happens once, where tokens of the budget are left and the context has room; what comes then is the answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from ds4.prompt.feedback import feedback
from ds4.prompt.types import Conversation, RenderedPrompt
from ds4.server.api.answer import Again
from ds4.server.api.prepare import Preparer, Prompt
from ds4.server.types import Finish, GenerationRequest


def once_more(preparer: Preparer, conversation: Conversation, prompt: Prompt) -> Again | None:
    """How a request goes on behind a broken call; None where no call is looked for."""
    if not conversation.tools:
        return None

    async def again(request: GenerationRequest, finish: Finish) -> GenerationRequest | None:
        # A constrained answer has no broken calls.
        if finish.broken is None or request.constraint is not None:
            return None
        left = request.max_tokens - finish.completion_tokens
        if left <= 0:
            return None
        return await asyncio.to_thread(_request, preparer, conversation, prompt.rendered, request, finish, left)

    return again


def _request(
    preparer: Preparer,
    conversation: Conversation,
    rendered: RenderedPrompt,
    request: GenerationRequest,
    finish: Finish,
    left: int,
) -> GenerationRequest | None:
    broken = finish.broken
    assert broken is not None
    told = feedback(preparer.renderer, conversation, rendered, broken.detail, reasoning_open=broken.reasoning_open)
    tokens = np.concatenate((np.array(broken.tokens, np.int32), preparer.encoded(told).tokens))
    room = preparer.n_ctx - len(tokens)
    if room <= 0:
        return None
    return replace(
        request,
        prompt_tokens=tokens,
        # A client never sends this state back, so nothing is to be found by its text.
        key=b"",
        visible=None,
        continues=None,
        max_tokens=min(left, room),
        thinking=told.thinking,
    )
