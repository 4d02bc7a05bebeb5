"""From sampled tokens to events: text, stop strings, log-probabilities, and how an answer ends."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from uma_trio.aici_link.messages import SequenceResult
from uma_trio.daemon.serving.answer import Answer
from uma_trio.daemon.serving.controllers.answers import control_of
from uma_trio.daemon.serving.new_tokens import NewTokens, TokenToBytes
from uma_trio.daemon.text.assembler import Split, TextAssembler
from uma_trio.engine_link.sampling import NO_TOKEN, TokenLogprobs
from uma_trio.errors import UmaError
from uma_trio.protocol.controllers import Backtrack, ControllerOutput, StorageWrite
from uma_trio.protocol.events import Inserted, Logprob, Logprobs, Reasoning, Token, ToolCallDelta
from uma_trio.protocol.messages import ServerEvent
from uma_trio.protocol.usage import FinishReason

MAX_UNSENT_CHARACTERS: Final = 1 << 16
MAX_UNSENT_WRITES: Final = 256
"""What is kept of a controller's logs and writes of variables while its client does not read."""

MAX_CHARACTER_BYTES: Final = 4
"""Longest character in UTF-8."""


def send_prompt(answer: Answer) -> None:
    """Send the prompt's text, in front of everything else."""
    if answer.request.stream:
        event = Token(id=answer.request.id, text=answer.prompt.text, echo=True, index=answer.index)
        answer.sink.send(event)
    else:
        answer.text.texts.append(answer.prompt.text)


def send_tokens(new: NewTokens, token_to_bytes: TokenToBytes) -> FinishReason | UmaError | None:
    """Send new tokens, up to one that completes a stop string, or the only call that the answer may have.

    Returns:
        Why the answer ends with them, if it does.
    """
    if new.answer.control.exists:
        return _send_controlled(new, token_to_bytes)
    events: list[ServerEvent] = []
    reason = _add_events(events, new, token_to_bytes)
    if events:
        new.answer.sink.send(*events)
    return reason


def _add_events(
    events: list[ServerEvent], new: NewTokens, token_to_bytes: TokenToBytes
) -> FinishReason | UmaError | None:
    """Add the events of new tokens; see ``send_tokens``."""
    answer = new.answer
    insertions = {
        insertion.after_tokens: (insertion, change) for change in new.changes for insertion in change.insertions
    }
    shown_from = 0
    for n, token in enumerate(new.tokens, 1):
        at = new.n_before + n - 1
        if at in insertions:
            insertion, change = insertions[at]
            if insertion.kind == "message":
                shown_from = at + insertion.tokens
                events += _end_of_message(answer)
                answer.answer_message(shown_from, opens_reasoning=change.opens_reasoning)
            events.append(Inserted(id=answer.request.id, index=answer.index, insertion=insertion))
        if at < shown_from:
            continue
        score = new.scores[n - 1] if new.scores else None
        last = new.reason is not None and n == len(new.tokens)
        _add_token(events, answer, token, score, token_to_bytes, last=last)
        assembler = answer.text.assembler
        if assembler.has_ended:
            if assembler.matched is not None:
                answer.cut_at_stop(new.n_before + n, token_to_bytes)
            else:
                del answer.tokens[new.n_before + n :]
            return "stop"
    return new.reason


def _end_of_message(answer: Answer) -> Iterator[ServerEvent]:
    """The events of what was held back of the text so far: a message of the user follows."""
    split = answer.text.assembler.finish()
    if split.reasoning:
        yield Reasoning(id=answer.request.id, text=split.reasoning, index=answer.index)
    if split.text:
        yield Token(id=answer.request.id, text=split.text, index=answer.index)


def _send_controlled(new: NewTokens, token_to_bytes: TokenToBytes) -> FinishReason | UmaError | None:
    """Send what was removed, then new tokens: an event for each, also for tokens without text."""
    answer, request, shown = new.answer, new.answer.request, new.answer.text
    assert answer.index is not None
    if new.n_removed:
        removed = "".join(shown.texts[new.n_before :])
        del shown.texts[new.n_before :], shown.logprobs[new.n_before :]
        shown.assembler = assembler_after(answer.tokens[: new.n_before], token_to_bytes)
        if request.stream:
            answer.sink.send(Backtrack(id=request.id, index=answer.index, tokens=new.n_removed, text=removed))
    for n, token in enumerate(new.tokens):
        text = "" if token in answer.end_ids else shown.assembler.feed(token, token_to_bytes(token)).text
        if new.reason is not None and n == len(new.tokens) - 1:
            text += shown.assembler.finish().text
        shown.texts.append(text)
        score = new.scores[n] if new.scores else None
        logprobs = None if score is None else _logprobs(token, score, token_to_bytes)
        if not request.stream:
            shown.logprobs.append(logprobs)
        elif new.by_controller:
            answer.sink.send(Token(id=request.id, text=text, token_id=token, index=answer.index, inserted=True))
        else:
            answer.sink.send(Token.of(request.id, text, token, logprobs, index=answer.index))
    return new.reason


def assembler_after(tokens: Sequence[int], token_to_bytes: TokenToBytes) -> TextAssembler:
    """An assembler that goes on after ``tokens``, whose text was sent."""
    tail: list[bytes] = []
    for token in reversed(tokens):
        tail.append(token_to_bytes(token))
        if sum(map(len, tail)) >= MAX_CHARACTER_BYTES:
            break
    assembler = TextAssembler()
    assembler.feed(NO_TOKEN, b"".join(reversed(tail)))
    return assembler


def send_rest(answer: Answer) -> None:
    """Send what is left of the text of an answer that its controller has ended: bytes that are no whole character."""
    text = answer.text.assembler.finish().text
    if text and answer.request.stream:
        answer.sink.send(Token(id=answer.request.id, text=text, index=answer.index))
    elif text:
        answer.text.texts.append(text)


def send_controller_output(answer: Answer, result: SequenceResult[Any]) -> None:
    """Send what a controller has printed and written, and its error, if there is something.

    A controller may be asked again and again while its client does not read.  What it says meanwhile is kept, but only the
    end of it, and sent later.
    """
    control = control_of(answer)
    control.logs = (control.logs + result.logs)[-MAX_UNSENT_CHARACTERS:]
    control.writes = [*control.writes, *filter(None, map(_write, result.storage))][-MAX_UNSENT_WRITES:]
    if answer.sink.has_room or result.error:
        send_unsent(answer, result.error)


def send_unsent(answer: Answer, error: str = "") -> None:
    """Send what ``send_controller_output`` has kept, if there is something."""
    control = control_of(answer)
    assert answer.index is not None
    if control.logs or control.writes or error:
        answer.sink.send(
            ControllerOutput(
                id=answer.request.id,
                index=answer.index,
                logs=control.logs or None,
                storage=control.writes or None,
                error=error or None,
            )
        )
    control.logs, control.writes = "", []


def _write(command: object) -> StorageWrite | None:
    """A write of a variable as the runtime reports it; ``None`` if it is none."""
    try:
        write = msgspec.convert(command, _StorageCommand).WriteVar
        return StorageWrite.of(
            write.name, bytes.fromhex(write.value), "append" if write.op == "Append" else "set", write.when_version_is
        )
    except (msgspec.ValidationError, ValueError):
        return None


class _WriteVar(msgspec.Struct):
    name: str
    value: str
    op: str = "Set"
    when_version_is: int | None = None


class _StorageCommand(msgspec.Struct):
    WriteVar: _WriteVar


def _add_token(
    events: list[ServerEvent],
    answer: Answer,
    token: int,
    score: TokenLogprobs | None,
    token_to_bytes: TokenToBytes,
    *,
    last: bool,
) -> None:
    """Add the events of ``token`` and the text that can be shown with it.

    Args:
        last: nothing follows, so text that was held back is sent as well.
    """
    is_end, shown = token in answer.end_ids, answer.text
    assembler = shown.assembler
    was_call = assembler.in_calls
    split = Split() if is_end else assembler.feed(token, token_to_bytes(token))
    if last:
        split += assembler.finish()
    is_reasoning = not split.text and (bool(split.reasoning) or assembler.in_reasoning)
    is_call = not split.text and not split.reasoning and (bool(split.calls) or was_call or assembler.in_calls)
    if is_end and not any(split):
        return
    logprobs = None if score is None else _logprobs(token, score, token_to_bytes)
    if answer.request.stream:
        if not is_call:
            events += _text_events(answer, token, split.reasoning, split.text, logprobs, is_reasoning=is_reasoning)
        for delta in split.calls:
            events.append(ToolCallDelta(id=answer.request.id, index=answer.index, **delta._asdict()))
        return
    shown.texts.append(split.text)
    shown.reasoning_texts.append(split.reasoning)
    if logprobs is not None:
        shown.logprobs.append(logprobs)


def _text_events(
    answer: Answer, token: int, reasoning: str, text: str, logprobs: Logprobs | None, *, is_reasoning: bool
) -> list[ServerEvent]:
    """One event of a token, or two if the reasoning ends in the middle of it."""
    name, index = answer.request.id, answer.index
    if is_reasoning:
        return [Reasoning.of(name, reasoning, token, logprobs, index=index)]
    shown: ServerEvent = Token.of(name, text, token, logprobs, index=index)
    return [Reasoning.of(name, reasoning, None, None, index=index), shown] if reasoning else [shown]


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
