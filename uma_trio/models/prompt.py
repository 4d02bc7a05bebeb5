"""From a request's words to the tokens that the model reads."""

from __future__ import annotations

from typing import Final

import attrs
import trio

from uma_trio.config import Limits
from uma_trio.engine.records import TokenIds
from uma_trio.engine.tokenizer import Tokenizer
from uma_trio.errors import BadRequest, PromptTooLarge
from uma_trio.models.chat import ChatTemplate
from uma_trio.protocol.messages import Generate

INLINE_BYTES: Final = 4096
"""Shorter prompts are tokenized where they arrive, in well under a millisecond; a thread would cost more."""


@attrs.frozen(eq=False)
class Prompt:
    """What a request's text became."""

    tokens: TokenIds
    """Shape ``[n]``."""
    text: str
    """As it was tokenized: for ``messages``, the rendered template."""


def checked_size(request: Generate, limits: Limits) -> int:
    """UTF-8 bytes of what ``request`` says.

    Raises:
        PromptTooLarge: more than ``max_prompt_bytes``.
    """
    if request.messages is None:
        size = len((request.prompt or "").encode())
    else:
        size = sum(len(message.content.encode()) for message in request.messages)
    if size > limits.max_prompt_bytes:
        raise PromptTooLarge(f"the prompt has {size} bytes; this server takes {limits.max_prompt_bytes}")
    return size


@attrs.frozen
class PromptMaker:
    """Renders and tokenizes for one model."""

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    """``None`` for a model without a template."""
    limits: Limits

    async def make(self, request: Generate) -> Prompt:
        """The prompt of ``request``.  Long ones are made in a thread; can be cancelled.

        Raises:
            PromptTooLarge: more than ``max_prompt_bytes``, seen before anything is rendered.
            BadRequest: ``messages`` that the template refuses, or for a model that has none.
        """
        size = checked_size(request, self.limits)
        if size <= INLINE_BYTES and request.messages is None:
            return self._make(request)
        return await trio.to_thread.run_sync(self._make, request, abandon_on_cancel=True)

    def _make(self, request: Generate) -> Prompt:
        text = request.prompt if request.messages is None else self._render(request)
        assert text is not None
        return Prompt(self.tokenizer.encode(text), text)

    def _render(self, request: Generate) -> str:
        if self.chat is None:
            raise BadRequest("this model has no chat template: send prompt instead of messages")
        return self.chat.render([attrs.asdict(message) for message in request.messages or ()])
