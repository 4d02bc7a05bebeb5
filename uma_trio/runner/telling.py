"""What a client is told of its tokens: text, and how likely they were."""

from __future__ import annotations

from collections.abc import Callable

from uma_trio.protocol.messages import Token
from uma_trio.runner.job import Job
from uma_trio.runner.wishes import logprobs_of
from uma_trio.sampling import Score

Piece = Callable[[int], bytes]
"""Token id -> its bytes."""


def tell_token(job: Job, token: int, score: Score | None, piece: Piece, *, last: bool) -> None:
    """Tell ``token`` and the text that can be shown with it.  ``job.assembler.matched`` says if it completes a stop string.

    Args:
        last: nothing follows, so what was held back is told as well.
    """
    ends = token in job.ending
    text = "" if ends else job.assembler.feed(piece(token))
    if last and job.assembler.matched is None:
        text += job.assembler.finish()
    if text or not ends:
        told = None if score is None else logprobs_of(token, score, piece)
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
