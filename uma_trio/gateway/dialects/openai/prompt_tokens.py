"""The tokens of a prompt without an answer: how many there are, as OpenAI's API says, or which, as vLLM does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.responses import Response

from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.shapes import InputTokens, PromptTokens
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import FieldNames


def prompt_endpoints(
    path: str, tokenize: Callable[[Call], Awaitable[tuple[list[int], list[str]]]], body: type, field_names: FieldNames
) -> tuple[Endpoint, Endpoint]:
    """The endpoints below ``path`` that count and that list the tokens of a prompt.

    Args:
        tokenize: reads a request; returns the tokens of its prompt, and warnings.
    """

    async def count_input(call: Call) -> Response:
        """Count the tokens of a prompt, as a request would prefill it."""
        tokens, warnings = await tokenize(call)
        return json_response(InputTokens(input_tokens=len(tokens)), warnings=warnings)

    async def render(call: Call) -> Response:
        """The tokens of a prompt, as a request would prefill them."""
        tokens, warnings = await tokenize(call)
        return json_response(PromptTokens(token_ids=tokens), warnings=warnings)

    return (
        OPENAI.post(f"{path}/input_tokens", count_input, body, InputTokens, field_names=field_names),
        OPENAI.post(f"{path}/render", render, body, PromptTokens, field_names=field_names),
    )
