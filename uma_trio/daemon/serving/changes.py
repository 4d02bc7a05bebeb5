"""Changes of a running answer that its client asks for: made between two steps, and again when a detached answer goes on.

What is inserted is part of the answer's tokens.  A message of the user has those of the chat template around it, which
are no text of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.answer_record import AnswerRecord
from uma_trio.daemon.serving.new_tokens import NewTokens, TokenToBytes, append_forced, append_tokens, no_tokens
from uma_trio.daemon.serving.steering import TAIL_TOKENS, Steering, called_already, ends_sentence
from uma_trio.daemon.store.answer_log import Change
from uma_trio.errors import BadRequest
from uma_trio.protocol.answers import Steered
from uma_trio.protocol.usage import Insertion


def check_steering(answer: Answer, steering: Steering, *, n_sampled: int) -> None:
    """Raise BadRequest if ``answer`` cannot be changed so.

    Args:
        n_sampled: tokens that the steps in flight sample for it, at most.
    """
    query = steering.query
    if answer.control.exists:
        raise BadRequest("a controller makes this answer: only the controller can steer it", field="request_id")
    if answer.bounds.steering is not None:
        raise BadRequest("an earlier change of this answer is not made yet: wait for its event", field="request_id")
    field = "text" if query.message is None else "message"
    if steering.tokens and answer.sampling.grammar is not None:
        raise BadRequest("a constraint or tool call decides what may follow: nothing can be inserted", field=field)
    if query.message is not None and not answer.request.stream:
        raise BadRequest(
            "only a streamed answer can be interrupted by a message: cancel it, and ask again", field=field
        )
    if query.message is not None and answer.has_called:
        raise called_already()
    if (query.max_tokens or 0) > answer.max_tokens:
        raise BadRequest(f"this answer has room for max_tokens {answer.max_tokens}", field="max_tokens")
    n_left = (query.max_tokens or answer.bounds.token_limit) - len(answer.tokens) - max(1, n_sampled)
    if steering.tokens and n_left <= 1:
        if (query.max_tokens or math.inf) < answer.bounds.token_limit:
            raise BadRequest(f"max_tokens {query.max_tokens} leaves no room for {field}", field="max_tokens")
        raise BadRequest(
            "the last tokens of the answer are computed already, so nothing can be inserted: "
            "begin the request with larger max_tokens",
            field=field,
        )
    if len(steering.tokens) >= max(1, n_left):
        raise BadRequest(
            f"{field} has {len(steering.tokens)} tokens, and the answer has room for {n_left - 1} more: "
            f"shorten the {field}, or begin the request with larger max_tokens",
            field=field,
        )


def apply_steering(new: NewTokens, steering: Steering, token_to_bytes: TokenToBytes) -> None:
    """Change the answer as its client wants it, after the tokens that were sampled.  No step that runs ahead has it."""
    answer, query = new.answer, steering.query
    if new.reason is not None:
        return  # it ends, which is the outcome
    answer.bounds.steering = None
    if query.message is not None and answer.has_called:
        steering.end(called_already())
        return
    answer.bounds.was_steered = True
    change = Change(
        after_tokens=len(answer.tokens),
        insertions=[],
        opens_reasoning=steering.opens_reasoning,
        ends_reasoning=query.end_reasoning,
        max_tokens=query.max_tokens,
        stop=query.stop,
    )
    steering.change = change
    new.changes.append(change)
    if steering.reasoning_limit is not None and answer.bounds.budget is None:
        answer.bounds.budget = steering.reasoning_limit.budget(answer.prompt.text, answer.prompt.calling)
        answer.bounds.budget.end_after(answer.tokens[: new.n_before], token_to_bytes)
    _set_bounds(answer, change)
    budget = answer.bounds.budget
    end: Sequence[int] = ()
    if budget is not None:
        end = budget.end_after(new.tokens, token_to_bytes)
        if query.message is not None and not end:
            end = budget.close(token_to_bytes)
        _insert(new, "end_of_reasoning", end)
    if query.message is not None:
        _insert(new, "message", steering.tokens, query.message)
        answer.bounds.stops_at_sentence = False  # that was for the answer before it
        if budget is not None:
            budget.begin_message(is_open=change.opens_reasoning)
    elif query.text is not None:
        _insert(new, "text", steering.tokens, query.text)
        if budget is not None:
            _insert(new, "end_of_reasoning", budget.end_after(steering.tokens, token_to_bytes))
    _conclude(new, change)
    steering.end(
        Steered(
            request_id=answer.request.id,
            after_tokens=change.after_tokens,
            inserted_tokens=len(answer.tokens) - change.after_tokens,
            reasoning_ended=len(end) > 0,
            max_tokens=answer.bounds.token_limit,
            stop=query.stop,
            id=query.id,
        )
    )


def append_known(answer: Answer, record: AnswerRecord, token_to_bytes: TokenToBytes) -> NewTokens:
    """Add the tokens of an earlier daemon to an answer that has none, and make the changes between them again."""
    if record.mu is not None:
        answer.adapt(record.mu)
    new = no_tokens(answer)
    known, at = record.known, 0
    answer.bounds.was_steered = bool(record.changes)
    for change in record.changes:
        _replay(new, known[at : change.after_tokens], token_to_bytes)
        new.changes.append(change)
        _set_bounds(answer, change)
        at = change.after_tokens
        for insertion in change.insertions:
            _replay_insertion(new, insertion, known[at : at + insertion.tokens], change, token_to_bytes)
            at += insertion.tokens
        _conclude(new, change)
    _replay(new, known[at:], token_to_bytes)
    if new.reason is None and at_end_of_sentence(answer, token_to_bytes):
        new.reason = "stop"
    answer.n_replayed = len(new.tokens)
    answer.place.lose(answer.n_known - 1)
    return new


def at_end_of_sentence(answer: Answer, token_to_bytes: TokenToBytes) -> bool:
    """Whether ``answer`` is to end with its sentence, and does so here."""
    if not answer.bounds.stops_at_sentence:
        return False
    tail = b"".join(map(token_to_bytes, answer.tokens[-TAIL_TOKENS:]))
    return ends_sentence(tail.decode("utf-8", "replace"))


def _set_bounds(answer: Answer, change: Change) -> None:
    if change.max_tokens is not None:
        answer.bounds.token_limit = max(change.after_tokens, change.max_tokens)
    answer.bounds.stops_at_sentence = answer.bounds.stops_at_sentence or change.stop == "sentence"
    if change.ends_reasoning and answer.bounds.budget is not None:
        answer.bounds.budget.n_left = min(0, answer.bounds.budget.n_left)


def _insert(
    new: NewTokens, kind: Literal["text", "message", "end_of_reasoning"], tokens: Sequence[int], text: str = ""
) -> None:
    if not tokens or new.reason is not None:
        return
    n_before = len(new.answer.tokens)
    append_forced(new, tokens, may_end=kind != "message")
    n = len(new.answer.tokens) - n_before
    new.changes[-1].insertions.append(Insertion(kind=kind, after_tokens=n_before, tokens=n, text=text))


def _conclude(new: NewTokens, change: Change) -> None:
    """End the answer if ``change`` does."""
    if new.reason is None and change.stop == "now":
        new.reason = "stop"
    elif new.reason is None and len(new.answer.tokens) >= new.answer.bounds.token_limit:
        new.reason = "length"


def _replay(new: NewTokens, tokens: Sequence[int], token_to_bytes: TokenToBytes) -> None:
    """Add tokens that the model has sampled, or that a reasoning budget has put between them."""
    if new.answer.bounds.budget is not None:
        new.answer.bounds.budget.replay(tokens, token_to_bytes)
    _extend(new, tokens)


def _replay_insertion(
    new: NewTokens, insertion: Insertion, tokens: Sequence[int], change: Change, token_to_bytes: TokenToBytes
) -> None:
    _extend(new, tokens, may_end=insertion.kind != "message")
    if insertion.kind == "message":
        new.answer.bounds.stops_at_sentence = False
    budget = new.answer.bounds.budget
    if budget is None:
        return
    if insertion.kind == "message":
        budget.begin_message(is_open=change.opens_reasoning)
    elif insertion.kind == "text":
        budget.end_after(tokens, token_to_bytes)
    else:
        budget.close(token_to_bytes)


def _extend(new: NewTokens, tokens: Sequence[int], *, may_end: bool = True) -> None:
    if new.reason is None and tokens:
        appended = append_tokens(new.answer, tokens, (), None, may_end=may_end)
        new.tokens, new.reason = [*new.tokens, *appended.tokens], appended.reason
