"""Tokens that an answer got in a step, on their way to its client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias, get_args

import attrs

from uma_trio.daemon.serving.answer import NO_IDS, Answer
from uma_trio.daemon.store.answer_log import Change
from uma_trio.engine_link.sampling import NO_TOKEN, TokenLogprobs
from uma_trio.errors import DecodeFailed, InvalidConstraint, UmaError
from uma_trio.grammar.explain import explain
from uma_trio.protocol.usage import FinishReason

TokenToBytes: TypeAlias = Callable[[int], bytes]
"""Token id -> the bytes that it stands for."""

DraftSource: TypeAlias = Literal["lookup", "model", "grammar"]
"""Where draft tokens are from: prompt lookup, the draft model, or a grammar that allows nothing else."""

DRAFT_SOURCES: Final[tuple[DraftSource, ...]] = get_args(DraftSource)


@attrs.define(eq=False)
class NewTokens:
    """Tokens that an answer got in a step, on their way to its client.  Empty if its mask was late."""

    answer: Answer
    tokens: Sequence[int]
    n_before: int
    """Tokens that the answer had."""
    reason: FinishReason | UmaError | None
    """Why the answer ends after these tokens, if it does."""
    paused: bool
    """The client had not read: the time since the last token is not the server's."""
    scores: Sequence[TokenLogprobs | None]
    """Logprobs of the tokens, perhaps followed by those of rejected draft tokens.  Empty unless requested."""
    n_drafts_accepted: int = 0
    draft_source: DraftSource = "lookup"
    by_controller: bool = False
    """The answer's controller chose the tokens."""
    n_removed: int = 0
    """Tokens that the controller removed before these ones; ``n_before`` does not count them."""

    @property
    def is_late(self) -> bool:
        """Whether the mask was late."""
        return not self.tokens and not self.n_removed and self.reason is None

    @property
    def is_urgent(self) -> bool:
        """Whether the next step can wait: for a first or last token, and where some text would end the answer."""
        return not self.n_before or self.reason is not None or self.answer.text.assembler.may_end

    changes: list[Change] = attrs.field(factory=list)
    """What its client has changed meanwhile.  Insertions are among the tokens."""


def no_tokens(answer: Answer, reason: UmaError | None = None) -> NewTokens:
    """That ``answer`` got none: its mask was late, or it ends for ``reason``."""
    return NewTokens(answer, (), len(answer.tokens), reason, answer.times.paused, ())


def append_tokens(
    answer: Answer,
    tokens: Sequence[int],
    scores: Sequence[TokenLogprobs | None],
    failure: str | None,
    *,
    may_end: bool = True,
) -> NewTokens:
    """Add sampled tokens to ``answer``, up to one that ends it.

    Args:
        failure: why its grammar cannot go on.
        may_end: whether tokens that end an answer do so, and are not those of the chat template around a message.
    """
    n_before, paused = len(answer.tokens), answer.times.paused
    answer.times.paused = False
    reason: FinishReason | UmaError | None = None
    ending_ids = answer.ending_ids if may_end else NO_IDS
    for n, token in enumerate(tokens):
        if token == NO_TOKEN:
            reason, tokens = _no_token(failure), tokens[:n]
            break
        answer.append(token)
        if token in ending_ids:
            reason = "stop"
        elif len(answer.tokens) >= answer.bounds.token_limit:
            reason = "length"
        if reason is not None:
            tokens = tokens[: n + 1]
            break
    return NewTokens(answer, tokens, n_before, reason, paused, scores)


def _no_token(failure: str | None) -> UmaError:
    if failure is None:
        return DecodeFailed("the model gave no usable logits")
    return InvalidConstraint(f"the constraint cannot be followed any further: {explain(failure)}")


def append_forced(new: NewTokens, tokens: Sequence[int], *, may_end: bool = True) -> None:
    """Append ``tokens``, if there are some, to those that were sampled.  The next step computes them.

    Args:
        may_end: as in ``append_tokens``.
    """
    if not tokens:
        return
    answer, n_sampled = new.answer, len(new.tokens)
    forced = append_tokens(answer, tokens, (), None, may_end=may_end)
    new.tokens, new.reason = [*new.tokens, *forced.tokens], forced.reason
    if new.scores:
        new.scores = [*new.scores[:n_sampled], *[None] * len(forced.tokens)]
    answer.speculation.forced = ()
    answer.go_on()
