"""From a request's words to the tokens that the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np
import trio

from uma_trio.config import Limits
from uma_trio.engine.messages import PromptPart, TokenIds
from uma_trio.engine.tokenizer import Tokenizer
from uma_trio.errors import BadRequest, PromptTooLarge
from uma_trio.models.chat import ChatTemplate
from uma_trio.protocol.messages import ChatMessage, Generate

INLINE_BYTES: Final = 4096
"""Shorter prompts are tokenized where they arrive, in well under a millisecond; a thread would cost more."""


@attrs.frozen(eq=False)
class Prompt:
    """What a request's text became."""

    tokens: TokenIds
    """Shape ``[n]``."""
    text: str
    """As it was tokenized: for ``messages``, the rendered template.  Of a session what is new."""
    dropped: int = 0
    """Tokens that had to go; see ``Generate.n_keep``."""


@attrs.frozen(eq=False)
class History:
    """What was said in a session before."""

    tokens: TokenIds
    """Shape ``[n]``: of prompts and answers, or of the last rendered chat and its answer."""
    messages: Sequence[ChatMessage] = ()
    """Of a chat; nothing of a session of prompts."""


def check_prompt_size(request: Generate, limits: Limits) -> int:
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

    async def make(self, request: Generate, before: History | None = None) -> Prompt:
        """The prompt of ``request``.  Long ones are made in a thread; can be cancelled.

        Args:
            before: of a session: its prompt follows these tokens, its messages these messages.

        Raises:
            PromptTooLarge: more than ``max_prompt_bytes``, seen before anything is rendered.
            BadRequest: ``messages`` that the template refuses, or for a model that has none.
        """
        size = check_prompt_size(request, self.limits)
        if size <= INLINE_BYTES and request.messages is None:
            return self._make(request, before)
        return await trio.to_thread.run_sync(self._make, request, before, abandon_on_cancel=True)

    def _make(self, request: Generate, before: History | None) -> Prompt:
        said = np.empty(0, np.int32) if before is None else before.tokens
        if request.prompt is not None:
            part = PromptPart(request.prompt, request.parse_special)
            return Prompt(self._after(said, [part]), request.prompt)
        messages = [*(before.messages if before is not None else ()), *(request.messages or ())]
        parts = self._parts(messages)
        text = "".join(part.text for part in parts)
        if len(said):
            spoken = self.tokenizer.decode(said, special=True).removeprefix(
                "" if text.startswith(self.tokenizer.bos) else self.tokenizer.bos
            )
            if text.startswith(spoken):  # the answer's own tokens stay, however it would be cut into tokens anew
                return Prompt(self._after(said, _without(len(spoken), parts)), text)
        return Prompt(self.tokenizer.encode_parts(parts), text)

    def _after(self, said: TokenIds, parts: Sequence[PromptPart]) -> TokenIds:
        if not len(said):
            return self.tokenizer.encode_parts(parts)
        return np.concatenate([said, self.tokenizer.encode_parts(parts, continues=True)])

    def _parts(self, messages: Sequence[ChatMessage]) -> Sequence[PromptPart]:
        if self.chat is None:
            raise BadRequest("this model has no chat template: send prompt instead of messages")
        return self.chat.parts([attrs.asdict(message) for message in messages])

    def truncate_tokens(self, tokens: Sequence[int], text: str) -> TokenIds:
        """The first of ``tokens`` that say ``text``, which a stop string has cut off somewhere; ``[n]``."""
        left, n = len(text.encode()), 0
        for token in tokens:
            size = len(self.tokenizer.token_to_bytes(token))
            if size > left:
                break
            left -= size
            n += 1
        kept = np.asarray(tokens[:n], np.int32)
        rest = text.encode()[len(text.encode()) - left :].decode("utf-8", "replace")
        return (
            np.concatenate([kept, self.tokenizer.encode(rest, parse_special=False, continues=True)]) if rest else kept
        )


def _without(n: int, parts: Sequence[PromptPart]) -> list[PromptPart]:
    """``parts`` but for their first ``n`` characters."""
    left = []
    for part in parts:
        if n < len(part.text):
            left.append(attrs.evolve(part, text=part.text[n:]))
        n = max(0, n - len(part.text))
    return left
