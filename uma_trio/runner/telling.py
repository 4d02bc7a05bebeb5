"""What a client is told of its tokens: text, and how likely they were."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

from uma_trio.errors import UmaError
from uma_trio.protocol.messages import FinishReason, Logprob, Logprobs, Token
from uma_trio.runner.flight import Delivery
from uma_trio.runner.job import Job
from uma_trio.sampling import Score

Piece: TypeAlias = Callable[[int], bytes]
"""Token id -> its bytes."""


def tell_tokens(delivery: Delivery, piece: Piece) -> FinishReason | UmaError | None:
    """Tell new tokens, up to one that completes a stop string.

    Returns:
        Why the job ends with what was told, if it does.
    """
    job = delivery.job
    for n, token in enumerate(delivery.tokens, 1):
        score = delivery.scores[n - 1] if delivery.scores else None
        last = delivery.reason is not None and n == len(delivery.tokens)
        _tell_token(job, token, score, piece, last=last)
        if job.assembler.matched is not None:
            job.stopped(delivery.n_before + n, piece)
            return "stop"
    return delivery.reason


def _tell_token(job: Job, token: int, score: Score | None, piece: Piece, *, last: bool) -> None:
    """Tell ``token`` and the text that can be shown with it.

    Args:
        last: nothing follows, so what was held back is told as well.
    """
    ends = token in job.ending
    text = "" if ends else job.assembler.feed(piece(token))
    if last and job.assembler.matched is None:
        text += job.assembler.finish()
    if text or not ends:
        told = None if score is None else _logprobs(token, score, piece)
        if job.request.stream:
            job.sink.send(Token.of(job.request.id, text, token, told, index=job.index))
        else:
            job.texts.append(text)
            if told is not None:
                job.logprobs.append(told)


def tell_prompt(job: Job) -> None:
    """Give the prompt's text back, before everything else."""
    if job.request.stream:
        job.sink.send(Token.of(job.request.id, job.prompt.text, None, None, echo=True, index=job.index))
    else:
        job.texts.append(job.prompt.text)


def _logprobs(token: int, score: Score, piece: Piece) -> Logprobs:
    """How likely ``token`` was, and those that were most likely."""
    best = [_logprob(other, logprob, *_shown(piece(other))) for other, logprob in score.best]
    text, octets = _shown(piece(token))
    return Logprobs(token_id=token, text=text, bytes=octets, logprob=score.logprob, top_logprobs=best)


def _logprob(token: int, logprob: float, text: str, octets: list[int]) -> Logprob:
    return Logprob(token_id=token, text=text, bytes=octets, logprob=logprob)


@functools.lru_cache(maxsize=1 << 14)
def _shown(said: bytes) -> tuple[str, list[int]]:
    """Text and bytes of a token, made once: an answer that is not streamed keeps twenty times as many as it has tokens."""
    return said.decode("utf-8", "replace"), list(said)  # a token may be a part of a character
