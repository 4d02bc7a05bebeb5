"""Log probabilities of tokens, as events have them and as answers do."""

from __future__ import annotations

from collections.abc import Sequence

from uma_trio.client import Reasoning, Token
from uma_trio.gateway.dialects.common.shapes import Probability, TokenProbability
from uma_trio.protocol.events import Logprobs


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
            token=each.text,
            logprob=each.logprob,
            bytes=each.bytes,
            top_logprobs=[
                Probability(token=top.text, logprob=top.logprob, bytes=top.bytes) for top in each.top_logprobs
            ],
        )
        for each in logprobs
    ]
