"""Charges requests to tenants: an estimate when a request begins, what it has used when it ends.

A request that the daemon refuses costs nothing.  An answer whose client leaves costs the prompt and what was generated, or
the whole estimate if it was not streamed, since its tokens are not known then.  So does an answer that its controller has
ended with an error: a controller may fail when it has all that it wants, and the error says what it has printed.  An answer
that goes on without its client is charged at its end (``unattended``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final

import attrs

from uma_trio.client import Embeddings, Eos, Event, Ranking, Token
from uma_trio.errors import ControllerFailed
from uma_trio.gateway.errors import HttpError
from uma_trio.gateway.limits import Admission, Limiter
from uma_trio.gateway.tenants import Tenant
from uma_trio.protocol.events import Generated
from uma_trio.protocol.parameters import MAX_INT32
from uma_trio.protocol.usage import Usage

BYTES_PER_TOKEN: Final = 3
"""For estimates.  English has about four, and other languages have fewer."""
UNKNOWN_MAX_TOKENS: Final = 1024
"""Estimate for an answer that may take the whole context."""
MEANT_MAX_TOKENS: Final = 4096
"""A larger ``max_tokens`` that need not be granted is no estimate: some clients always send a large number."""


@attrs.frozen
class Account:
    """The tenant who is charged for the requests of a client."""

    tenant: Tenant
    limiter: Limiter
    default_max_tokens: int
    """The daemon's setting; 0 is as many as fit."""

    def count_request(self) -> None:
        """Admit a request that costs no tokens.

        Raises:
            HttpError: a limit of the tenant refuses it.
        """
        self.limiter.admit(self.tenant, tokens=0).settle(0)


def begin_charge(account: Account | None, fields: Mapping[str, Any], *, is_streamed: bool) -> Charge:
    """Admit a request for the daemon; without an account, for free.

    An answer that may take as many tokens as fit is bounded by what is left of a quota.  Of what is left after all
    estimates it gets a half, so that answers at the same time cannot exceed the quota together.

    Raises:
        HttpError: a limit of the tenant refuses it.
    """
    if account is None:
        return Charge(fields, None, 0, is_streamed)
    prompt = estimated_tokens([fields.get(name) for name in ("prompt", "messages", "tools", "input", "documents")])
    if isinstance(documents := fields.get("documents"), list):  # the query is computed with each of them
        prompt += len(documents) * estimated_tokens(fields.get("query"))
    answers = _count(fields.get("n"), 1)
    wanted = _count(fields.get("max_tokens"), account.default_max_tokens)
    estimate, promised = wanted or UNKNOWN_MAX_TOKENS, 0
    if "input" in fields or "documents" in fields:  # embeddings and rankings generate nothing
        estimate = 0
    elif "max_tokens" not in fields or fields.get("fit_max_tokens") is True:  # the answer may take as many as fit
        if not 0 < wanted <= MEANT_MAX_TOKENS:
            estimate = account.default_max_tokens or UNKNOWN_MAX_TOKENS
        left = account.limiter.quota_left(account.tenant)
        if left is not None:
            room = max(1, (left - prompt) // answers)
            estimate = min(estimate, room)
            longest = min(wanted or MAX_INT32, estimate + (room - estimate) // 2)
            promised = answers * (longest - estimate)
            fields = {**fields, "max_tokens": longest, "fit_max_tokens": True}
    tokens = prompt + answers * estimate
    admission = account.limiter.admit(account.tenant, tokens=tokens, promised=promised, answers=answers)
    principal = account.tenant.principal
    limit = {} if principal.max_requests is None else {"principal_max_requests": principal.max_requests}
    fields = {**fields, "principal": principal.name, "principal_weight": principal.weight, **limit}
    return Charge(fields, admission, prompt, is_streamed)


def _count(value: Any, default: int) -> int:
    """A number of a request that the daemon has not checked yet; ``default`` if it is not a count."""
    return value if type(value) is int and 0 < value <= MAX_INT32 else default


def estimated_tokens(content: Any) -> int:
    """Estimate the tokens of texts, token ids and anything made of them."""
    n_bytes = tokens = 0
    left = [content]
    while left:
        match left.pop():
            case str() as text:
                n_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            case Mapping() as mapping:
                left += mapping.values()
            case list() | tuple() as items:
                if items and type(items[0]) is int:  # token ids, up to half a million; the daemon refuses other lists
                    tokens += len(items)
                else:
                    left += items
            case int():
                tokens += 1
    return tokens - -n_bytes // BYTES_PER_TOKEN


def _computed_tokens(usage: Usage) -> int:
    """Tokens that an answer took, also those that its controller has removed from it."""
    if usage.sampled_tokens is None:
        return usage.completion_tokens
    return usage.sampled_tokens + (usage.inserted_tokens or 0)


class Charge:
    """What one request costs.  A context, which ends when the request does.

    Args:
        fields: the request for the daemon, with its principal.
        admission: ``None``: nobody is charged.
    """

    def __init__(
        self, fields: Mapping[str, Any], admission: Admission | None, prompt_estimate: int, is_streamed: bool
    ) -> None:
        self.fields = fields
        self._admission = admission
        self._prompt = prompt_estimate
        self._is_streamed = is_streamed
        self._generated: dict[int | None, int] = {}
        """Tokens of each answer, by index."""

    def count(self, events: Iterable[Event | Embeddings | Ranking]) -> None:
        """Count the tokens of events."""
        if self._admission is None:
            return
        for event in events:
            if isinstance(event, Embeddings | Ranking):
                self._prompt = event.usage.prompt_tokens
            elif isinstance(event, Eos):
                self._prompt = event.usage.prompt_tokens
                self._generated[event.index] = _computed_tokens(event.usage)
            elif isinstance(event, Generated) and not (isinstance(event, Token) and event.echo):
                self._generated[event.index] = self._generated.get(event.index, 0) + 1

    def count_estimate(self) -> None:
        """Count the whole estimate: nobody waits for the answer."""
        if self._admission is not None:
            self._generated[None] = max(0, self._admission.reserved - self._prompt)

    def hand_over(self) -> Charge | None:
        """The charge of an answer that goes on without its client, to be ended in place of this one; ``None`` if it is free."""
        if self._admission is None:
            return None
        other = Charge(self.fields, self._admission.leave(), self._prompt, is_streamed=True)
        other._generated, self._admission = self._generated, None
        return other

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._admission is None:
            return
        counted = self._prompt + sum(self._generated.values())
        is_own_failure = isinstance(error, HttpError) and error.kind is ControllerFailed
        if isinstance(error, Exception) and not is_own_failure:  # the daemon refused, or failed
            counted = counted if self._generated else 0
        elif error is not None and not self._is_streamed:  # the client left, or its controller failed
            counted = max(counted, self._admission.reserved)
        self._admission.settle(counted)
