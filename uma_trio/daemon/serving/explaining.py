"""Says which tokens of a prompt were computed although an earlier prompt began alike, and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs
import trio

from uma_trio.daemon.kv.lost_prefixes import Comparison
from uma_trio.daemon.policy.timings import StepTimings
from uma_trio.daemon.prompts.difference import difference
from uma_trio.daemon.serving.answer import Answer
from uma_trio.engine_link.media import PLACEHOLDER
from uma_trio.engine_link.tokens import MIN_SHARED_TOKENS, TokenIds, common_prefix
from uma_trio.errors import AnswerNotFound
from uma_trio.protocol.queries import request_ids
from uma_trio.protocol.usage import Change, Explanation, Loss, Reason

MAX_KEPT: Final = 64
"""Ended requests that can be explained."""

MAX_KEPT_CHARS: Final = 1 << 22
"""Their texts together."""


SpellEach = Callable[[Iterable[int]], list[bytes]]


@attrs.frozen(eq=False, kw_only=True)
class Prefilled:
    """What is known of the prompt of one request."""

    request_id: str
    principal: str
    tokens: TokenIds
    text: str
    roles: Sequence[str]
    messages: Sequence[str]
    """Their texts."""
    tools: Sequence[str]
    n_cached: int
    is_private: bool
    comparison: Comparison
    token_ms: float
    """What a token of a prompt took, by the cost model."""


@attrs.define(eq=False)
class Explainer:
    """Explains the prompts of one model: those of running requests, and the last ones that ended.

    Args:
        spell_each: the bytes of each of some tokens, control tokens spelled out.
    """

    _spell_each: SpellEach
    _timings: StepTimings
    _kept: deque[Prefilled] = attrs.field(factory=deque, init=False)
    _n_chars: int = attrs.field(default=0, init=False)

    def ended(self, answer: Answer) -> None:
        """Keep what is known of the prompt of ``answer``, if it was computed; the oldest ones go."""
        prefilled = self._prefilled(answer)
        if prefilled is None or len(prefilled.text) > MAX_KEPT_CHARS or answer.index:
            return
        self._kept.append(prefilled)
        self._n_chars += len(prefilled.text)
        while len(self._kept) > MAX_KEPT or self._n_chars > MAX_KEPT_CHARS:
            self._n_chars -= len(self._kept.popleft().text)

    def forget(self, tokens: TokenIds, principal: str) -> None:
        """Forget the prompts of ``principal`` that are a prefix of ``tokens``."""
        kept = [
            prompt
            for prompt in self._kept
            if prompt.principal != principal or common_prefix(prompt.tokens, tokens) < len(prompt.tokens)
        ]
        self._kept, self._n_chars = deque(kept), sum([len(prompt.text) for prompt in kept])

    def find(self, request_id: str, principal: str, running: Iterable[Answer]) -> Explanation:
        """Explain the prompt of the last request of this id.

        Raises:
            AnswerNotFound: there is none, it has no place yet, or too many others have ended since.
        """
        ids = request_ids(request_id)
        now = [answer for answer in running if answer.request.id in ids and answer.principal.name == principal]
        prefilled = next(filter(None, [self._prefilled(answer) for answer in now]), None)
        if prefilled is None:
            for prompt in self._kept:
                if prompt.request_id in ids and prompt.principal == principal:
                    prefilled = prompt
        if prefilled is None:
            raise AnswerNotFound(
                f"nothing is known of a prompt of request {request_id!r}: it waits still, {MAX_KEPT} others have ended since, "
                "or it belongs to another principal or model",
                field="request_id",
            )
        return self._explain(prefilled)

    def of(self, answer: Answer) -> Explanation | None:
        """Explain the prompt of ``answer``; ``None`` if it was not computed."""
        prefilled = self._prefilled(answer)
        return None if prefilled is None else self._explain(prefilled)

    def _explain(self, prefilled: Prefilled) -> Explanation:
        comparison, n = prefilled.comparison, prefilled.comparison.n_common
        explanation = Explanation(
            request_id=prefilled.request_id,
            reason="private" if prefilled.is_private else "new",
            prompt_tokens=len(prefilled.tokens),
            cached_tokens=prefilled.n_cached,
            common_tokens=n,
        )
        earlier, lost = comparison.earlier, comparison.lost
        if earlier is None or prefilled.is_private:
            return explanation
        n_both = min(len(prefilled.tokens) - 1, len(earlier))  # the last token is always computed
        n_again = max(0, n_both - prefilled.n_cached)
        reason: Reason = "cached" if n >= n_both else "changed"
        n_missing, is_alike = n - prefilled.n_cached, n >= min(MIN_SHARED_TOKENS, n_both)
        if is_alike and n_missing > 0 and n_missing >= n_both - n:  # more for that than for the difference
            reason = "not_shared" if lost is None else "lost"
        change = None
        if reason == "changed":
            change = self._change(prefilled, earlier)
            if n < MIN_SHARED_TOKENS and change.kind == "text":
                return explanation  # both have no more in common than any two prompts
        return attrs.evolve(
            explanation,
            reason=reason,
            again_tokens=0 if reason == "cached" else n_again,
            cost_ms=0.0 if reason == "cached" else round(n_again * prefilled.token_ms, 1),
            change=change,
            obstacle=comparison.obstacle if reason == "not_shared" else None,
            loss=None
            if lost is None or reason != "lost"
            else Loss(
                cause=lost.cause,
                ago_ms=round(1e3 * (trio.current_time() - lost.at)),
                claimant=None
                if lost.claimant is None
                else "you"
                if lost.claimant == prefilled.principal
                else "another",
            ),
        )

    def _change(self, prefilled: Prefilled, earlier: TokenIds) -> Change:
        change = difference(
            prefilled.tokens,
            earlier,
            prefilled.comparison.n_common,
            self._spell,
            text=prefilled.text,
            messages=prefilled.messages,
            tools=prefilled.tools,
        )
        index = change.message_index
        return change if index is None else attrs.evolve(change, role=prefilled.roles[index])

    def _spell(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, without the rows of pictures."""
        pieces = self._spell_each([token for token in tokens if token < PLACEHOLDER])
        return b"".join(pieces).decode("utf-8", "replace")

    def _prefilled(self, answer: Answer) -> Prefilled | None:
        request, comparison = answer.request, answer.comparison
        if comparison is None:
            return None
        messages = request.messages or ()
        return Prefilled(
            request_id=request.id,
            principal=answer.principal.name,
            tokens=answer.prompt.tokens,
            text=answer.prompt.text,
            roles=[message.role for message in messages],
            messages=[message.text for message in messages],
            tools=[tool.name for tool in request.tools],
            n_cached=answer.n_cached,
            is_private=not request.cache_prompt,
            comparison=comparison,
            token_ms=self._timings.cost.prefill_token_ms,
        )
