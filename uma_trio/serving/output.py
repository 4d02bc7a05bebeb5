"""From sampled tokens to events: text, stop strings, log-probabilities, and how an answer ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

from uma_trio.errors import UmaError
from uma_trio.protocol.messages import FinishReason, Logprob, Logprobs, PrefillProgress, Token
from uma_trio.sampling import TokenLogprobs
from uma_trio.serving.sequence import Sequence
from uma_trio.serving.step import NewTokens

TokenToBytes: TypeAlias = Callable[[int], bytes]
"""Token id -> the bytes that it stands for."""


def send_prompt(sequence: Sequence) -> None:
    """Send the prompt's text, in front of everything else."""
    if sequence.request.stream:
        event = Token.of(sequence.request.id, sequence.prompt.text, None, None, echo=True, index=sequence.index)
        sequence.sink.send(event)
    else:
        sequence.texts.append(sequence.prompt.text)


def send_progress(sequence: Sequence, n_prefilled: int) -> None:
    """Report that ``n_prefilled`` tokens of the prompt are in the KV cache, if the request asks for that.

    Prefill of an answer that goes on after the engine was restarted is not reported.
    """
    if sequence.request.progress and sequence.first_token_at is None:
        event = PrefillProgress(
            id=sequence.request.id,
            prefilled_tokens=n_prefilled,
            prompt_tokens=len(sequence.prompt.tokens),
            index=sequence.index,
        )
        sequence.sink.send(event)


def send_tokens(new: NewTokens, token_to_bytes: TokenToBytes) -> FinishReason | UmaError | None:
    """Send new tokens, up to one that completes a stop string.

    Returns:
        Why the sequence ends with them, if it does.
    """
    sequence = new.sequence
    for n, token in enumerate(new.tokens, 1):
        score = new.scores[n - 1] if new.scores else None
        last = new.reason is not None and n == len(new.tokens)
        _send_token(sequence, token, score, token_to_bytes, last=last)
        if sequence.assembler.matched is not None:
            sequence.cut_at_stop(new.n_before + n, token_to_bytes)
            return "stop"
    return new.reason


def _send_token(
    sequence: Sequence, token: int, score: TokenLogprobs | None, token_to_bytes: TokenToBytes, *, last: bool
) -> None:
    """Send ``token`` and the text that can be shown with it.

    Args:
        last: nothing follows, so text that was held back is sent as well.
    """
    is_end = token in sequence.end_ids
    text = "" if is_end else sequence.assembler.feed(token_to_bytes(token))
    if last and sequence.assembler.matched is None:
        text += sequence.assembler.finish()
    if not text and is_end:
        return
    logprobs = None if score is None else _logprobs(token, score, token_to_bytes)
    if sequence.request.stream:
        sequence.sink.send(Token.of(sequence.request.id, text, token, logprobs, index=sequence.index))
        return
    sequence.texts.append(text)
    if logprobs is not None:
        sequence.logprobs.append(logprobs)


def _logprobs(token: int, score: TokenLogprobs, token_to_bytes: TokenToBytes) -> Logprobs:
    """The log-probability of ``token``, and of the most likely tokens."""
    top = []
    for other, logprob in score.top_logprobs:
        text, octets = _shown(token_to_bytes(other))
        top.append(Logprob(token_id=other, text=text, bytes=octets, logprob=logprob))
    text, octets = _shown(token_to_bytes(token))
    return Logprobs(token_id=token, text=text, bytes=octets, logprob=score.logprob, top_logprobs=top)


@functools.lru_cache(maxsize=1 << 14)
def _shown(data: bytes) -> tuple[str, list[int]]:
    """Text and bytes of a token.  Cached: an answer that is not streamed keeps twenty times as many as it has tokens."""
    return data.decode("utf-8", "replace"), list(data)  # a token may be a part of a character
