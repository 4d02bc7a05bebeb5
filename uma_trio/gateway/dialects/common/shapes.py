"""What the shapes of answers have in common.  Endpoints make answers of them, and the OpenAPI document says them.

A field that may be missing is ``T | UnsetType``.  All other fields are always there.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from uma_trio.client import Reasoning, Token
from uma_trio.protocol.events import Logprobs


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object with these fields and no others."""


class Warned(Shape, kw_only=True):
    """An answer that names what had no effect."""

    warnings: list[str] | UnsetType = UNSET


class Probability(Shape):
    """A token and its log probability."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class TokenProbability(Probability):
    """A token of the answer, and its most likely alternatives."""

    top_logprobs: list[Probability]


Object = dict[str, Any]
"""An object whose fields are described elsewhere."""


def logprobs_of(event: Token | Reasoning) -> Logprobs | None:
    """The log probabilities of one token, if the request asked for them."""
    if event.token_id is None or event.logprob is None:
        return None
    return Logprobs(
        token_id=event.token_id,
        text=event.text,
        bytes=event.bytes or [],
        logprob=event.logprob,
        top_logprobs=event.top_logprobs or [],
    )


def probabilities(logprobs: Sequence[Logprobs]) -> list[TokenProbability]:
    """Log probabilities as the APIs of OpenAI and Ollama have them."""
    return [
        TokenProbability(
            token=token.text,
            logprob=token.logprob,
            bytes=token.bytes,
            top_logprobs=[
                Probability(token=top.text, logprob=top.logprob, bytes=top.bytes) for top in token.top_logprobs
            ],
        )
        for token in logprobs
    ]


def iso_time(seconds: float | None = None) -> str:
    """A time as Ollama and Anthropic write it, from Unix seconds; now, if none are given."""
    when = (
        datetime.datetime.now(datetime.UTC)
        if seconds is None
        else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    )
    return when.isoformat().replace("+00:00", "Z")
