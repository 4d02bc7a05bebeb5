"""Limits of tenants, decided without a clock: requests and tokens a minute, answers in flight, token quotas.

A rate is a token bucket that holds a minute's worth, so a tenant that was idle may use a whole minute's worth at once, and
then as much as flows in.  In any T seconds it gets at most ``limit * (1 + T / 60)``.

How many tokens a request takes is known when it has ended.  So its estimate is reserved when it begins, and the difference
is charged or given back at its end.  Levels are whole numbers, which makes each wait exact: a request that is repeated
after ``wait_s`` is admitted if its tenant did nothing in between.
"""

from __future__ import annotations

import datetime
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

import attrs

from uma_trio.errors import MaxTokensTooLarge, TooManyRequests
from uma_trio.gateway.errors import QUOTA, RATE, ErrorKind, HttpError, invalid, try_again_in
from uma_trio.gateway.tenants import Period, Tenant

NS: Final = 1_000_000_000
MINUTE_NS: Final = 60 * NS

IN_FLIGHT_RETRY_S: Final = 1.0
"""When to retry a request that others of its tenant leave no room.  Nobody knows when those will end."""

MAX_ADDRESSES: Final = 4096
"""Addresses whose wrong keys are counted, the most recent ones."""
WRONG_KEYS_PER_MINUTE: Final = 10


class Bucket:
    """A token bucket that holds a minute's worth.

    Args:
        limit: what it holds, and what flows in during a minute.
        now_ns: the time, on any clock that never goes backwards.
    """

    def __init__(self, limit: int, now_ns: int) -> None:
        self.limit = limit
        self._level = limit * MINUTE_NS
        """What it holds, times ``MINUTE_NS``; negative when more was charged than reserved."""
        self._at_ns = now_ns

    def _fill(self, now_ns: int) -> None:
        full = self.limit * MINUTE_NS
        self._level = min(full, self._level + self.limit * max(0, now_ns - self._at_ns))
        self._at_ns = max(self._at_ns, now_ns)

    def wait_ns(self, amount: int, now_ns: int) -> int:
        """Return the time until ``amount`` can be taken; for more than the bucket holds, the time until it is full."""
        self._fill(now_ns)
        missing = min(amount, self.limit) * MINUTE_NS - self._level
        return max(0, -(-missing // self.limit))

    def take(self, amount: int, now_ns: int) -> None:
        """Take ``amount``, even if that is more than there is.  A negative amount is given back."""
        self._fill(now_ns)
        self._level = min(self.limit * MINUTE_NS, self._level - amount * MINUTE_NS)

    def remaining(self, now_ns: int) -> int:
        """Return how much can be taken now."""
        self._fill(now_ns)
        return max(0, self._level // MINUTE_NS)

    def full_in_ns(self, now_ns: int) -> int:
        """Return the time until the bucket is full."""
        return self.wait_ns(self.limit, now_ns)

    def with_limit(self, limit: int, now_ns: int) -> Bucket:
        """Return a bucket with another limit, from which as much is missing as from this one."""
        bucket = Bucket(limit, now_ns)
        bucket.take(self.limit - self.remaining(now_ns), now_ns)
        return bucket


@attrs.frozen
class QuotaPeriod:
    """The day or month of the calendar, in UTC, that a moment belongs to."""

    name: str
    """``2026-01-31`` or ``2026-01``."""
    ends_in_s: float

    @classmethod
    def at(cls, unix_s: float, period: Period) -> QuotaPeriod:
        """Return the period that contains a moment."""
        now = datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
        begin = now.replace(hour=0, minute=0, second=0, microsecond=0)
        if period == "day":
            end = begin + datetime.timedelta(days=1)
            return cls(f"{begin:%Y-%m-%d}", (end - now).total_seconds())
        begin = begin.replace(day=1)
        end = (begin + datetime.timedelta(days=31)).replace(day=1)
        return cls(f"{begin:%Y-%m}", (end - now).total_seconds())


class Usage(Protocol):
    """Counts the tokens of tenants in periods, and survives the process."""

    def tokens(self, tenant: str, period: str) -> int:
        """Return what was counted so far."""

    def add(self, tenant: str, period: str, tokens: int) -> None:
        """Count tokens; a negative number takes them back."""


def go_duration(ns: int) -> str:
    """Write a duration as the OpenAI API does: ``20ms``, ``1s``, ``6m0s``."""
    ms = -(-ns // 1_000_000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, seconds = divmod(ms / 1000, 60)
    shown = f"{seconds:.3f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{shown}s" if minutes else f"{shown}s"


class _State:
    """What one tenant has used lately."""

    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.in_flight = 0
        self.open = 0
        """Requests in flight."""
        self.promised = 0
        """Tokens that answers in flight may take of a quota, besides their estimates."""
        self.estimated = 0
        """Estimates of the requests in flight, which are charged already."""

    def adapt(self, tenant: Tenant, now_ns: int) -> None:
        self.requests = _adapt(self.requests, tenant.requests_per_minute, now_ns)
        self.tokens = _adapt(self.tokens, tenant.tokens_per_minute, now_ns)


def _adapt(bucket: Bucket | None, limit: int | None, now_ns: int) -> Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit, now_ns)
    return bucket if bucket.limit == limit else bucket.with_limit(limit, now_ns)


class Limiter:
    """Admits the requests of tenants.

    Memory is bounded by the number of tenants that were ever configured, since nobody else gets here.

    Each request takes one of the daemon's connections.  A tenant gets another one only if more are free than it has, so one
    that takes all that it can leaves half of them to others.

    Args:
        now_ns: a clock that never goes backwards.
        unix_s: the clock that quotas go by.
        connections: that the daemon accepts.
    """

    def __init__(
        self, usage: Usage, *, now_ns: Callable[[], int], unix_s: Callable[[], float], connections: float = math.inf
    ) -> None:
        self._connections, self._open = connections, 0
        self._usage = usage
        self._now_ns = now_ns
        self._unix_s = unix_s
        self._states: dict[str, _State] = {}

    def admit(self, tenant: Tenant, *, tokens: int, promised: int = 0, answers: int = 1) -> Admission:
        """Admit a request, which counts from now on.

        Args:
            tokens: estimate of its tokens, prompt and answers together.
            promised: how many more it may take of a quota.
            answers: how many it asks for.

        Raises:
            HttpError: not now, and ``retry_after_ms`` says when; or never, because the request asks for more than a
                whole quota or for too many answers.
        """
        now = self._now_ns()
        state = self._state_of(tenant, now)
        tokens = max(0, tokens)
        refusals = [
            *self._rate_refusals(tenant, state, tokens, now),
            *self._quota_refusals(tenant, state, tokens),
            *_in_flight_refusals(tenant, state, answers),
            *self._connection_refusals(tenant, state),
        ]
        if refusals:
            raise max(refusals, key=lambda error: error.retry_after_ms or float("inf"))
        if state.requests is not None:
            state.requests.take(1, now)
        state.in_flight += answers
        state.open += 1
        self._open += 1
        state.promised += promised
        state.estimated += tokens
        return Admission(self, tenant, state, self._charge(tenant, state, tokens, now), tokens, promised, answers)

    def quota_left(self, tenant: Tenant) -> int | None:
        """Return how many tokens are left of a tenant's quota for further requests; ``None`` without one."""
        if tenant.token_quota is None:
            return None
        period = QuotaPeriod.at(self._unix_s(), tenant.quota_period)
        state = self._states.get(tenant.name)
        promised = 0 if state is None else state.promised
        return tenant.token_quota - self._usage.tokens(tenant.name, period.name) - promised

    def headers(self, tenant: Tenant) -> list[tuple[str, str]]:
        """Return the ``x-ratelimit-*`` headers for a response to ``tenant`` that begins now."""
        now = self._now_ns()
        state = self._state_of(tenant, now)
        rates: list[tuple[str, str]] = []
        for name, bucket in (("requests", state.requests), ("tokens", state.tokens)):
            if bucket is not None:
                rates += [
                    (f"x-ratelimit-limit-{name}", str(bucket.limit)),
                    (f"x-ratelimit-remaining-{name}", str(bucket.remaining(now))),
                    (f"x-ratelimit-reset-{name}", go_duration(bucket.full_in_ns(now))),
                ]
        return rates

    def _state_of(self, tenant: Tenant, now: int) -> _State:
        state = self._states.setdefault(tenant.name, _State())
        state.adapt(tenant, now)
        return state

    def _rate_refusals(self, tenant: Tenant, state: _State, tokens: int, now: int) -> list[HttpError]:
        refusals: list[HttpError] = []
        if state.requests is not None and (wait := state.requests.wait_ns(1, now)):
            refusals.append(_later(RATE, f"{tenant.name} may send {state.requests.limit:,} requests a minute", wait))
        if state.tokens is not None and (wait := state.tokens.wait_ns(tokens, now)):
            message = (
                f"{tenant.name} may use {state.tokens.limit:,} tokens a minute, {state.tokens.remaining(now):,} are left, "
                f"and this request may use {tokens:,}"
            )
            refusals.append(_later(RATE, message, wait))
        return refusals

    def _quota_refusals(self, tenant: Tenant, state: _State, tokens: int) -> list[HttpError]:
        quota, left = tenant.token_quota, self.quota_left(tenant)
        if quota is None or left is None or tokens <= left:
            return []
        period = QuotaPeriod.at(self._unix_s(), tenant.quota_period)
        message = (
            f"{max(0, left):,} of the {quota:,} tokens that {tenant.name} may use in a {tenant.quota_period} are left, and "
            f"this request may use {tokens:,}"
        )
        if tokens > quota:
            return [HttpError(MaxTokensTooLarge, f"{message}; give a smaller max_tokens", parameter="max_tokens")]
        could_fit = tokens <= left + state.promised + state.estimated  # when the answers in flight have ended
        return [_later(QUOTA, message, round((IN_FLIGHT_RETRY_S if could_fit else period.ends_in_s) * NS))]

    def _connection_refusals(self, tenant: Tenant, state: _State) -> list[HttpError]:
        if state.open < max(1, self._connections - self._open):
            return []
        message = f"{tenant.name} has {state.open} requests in flight, and as many connections of the daemon are free for others"
        return [_later(TooManyRequests, message, round(IN_FLIGHT_RETRY_S * NS))]

    def _charge(self, tenant: Tenant, state: _State, tokens: int, now: int) -> str:
        """Charge tokens; returns the period of the quota, in which a later difference belongs."""
        if state.tokens is not None:
            state.tokens.take(tokens, now)
        period = QuotaPeriod.at(self._unix_s(), tenant.quota_period).name
        if tenant.token_quota is not None:
            self._usage.add(tenant.name, period, tokens)
        return period

    def _settle(self, admission: Admission, tokens: int) -> None:
        difference = tokens - admission.reserved
        if admission.state.tokens is not None:
            admission.state.tokens.take(difference, self._now_ns())
        if admission.tenant.token_quota is not None and difference:
            self._usage.add(admission.tenant.name, admission.period, difference)
        self._leave(admission)
        admission.state.promised -= admission.promised
        admission.state.estimated -= admission.reserved

    def _leave(self, admission: Admission) -> None:
        admission.state.in_flight -= admission.answers
        admission.state.open -= admission.connections
        self._open -= admission.connections


def _in_flight_refusals(tenant: Tenant, state: _State, answers: int) -> list[HttpError]:
    most = tenant.max_requests
    if most is None or state.in_flight + answers <= most:
        return []
    if answers > most:
        message = f"{tenant.name} may have {most} answers in flight, and this request asks for {answers}"
        return [invalid(message, parameter="n")]
    message = f"{tenant.name} has {state.in_flight} answers in flight and may have {most}"
    return [_later(TooManyRequests, message, round(IN_FLIGHT_RETRY_S * NS))]


def _later(kind: ErrorKind | type[TooManyRequests], message: str, wait_ns: int) -> HttpError:
    retry_after_ms = -(-wait_ns // 1_000_000)
    return HttpError(kind, f"{message}; {try_again_in(retry_after_ms)}", retry_after_ms=retry_after_ms)


@attrs.frozen(eq=False)
class Admission:
    """A request that was admitted.  It has to be settled, however it ends."""

    _limiter: Limiter
    tenant: Tenant
    state: _State
    period: str
    reserved: int
    promised: int
    answers: int
    connections: int = 1

    def leave(self) -> Admission:
        """The client has left, and the answer goes on: it is no longer in flight.  Returns what is to be settled instead."""
        self._limiter._leave(self)
        return attrs.evolve(self, answers=0, connections=0)

    def settle(self, tokens: int) -> None:
        """Note the end of the request, and charge what it has used, prompt and answers together, in place of the estimate."""
        self._limiter._settle(self, tokens)


class WrongKeys:
    """Counts wrong keys by the address that they come from, to answer floods of them cheaply and with a wait.

    A right key is never refused for wrong ones from the same address, which may be that of a proxy.  Nobody finds a key by
    trying, so there is no need to.
    """

    def __init__(self, *, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def note(self, address: str) -> float | None:
        """Note a wrong key; returns the seconds that the address should wait, ``None`` if there were few so far."""
        now = self._now_ns()
        bucket = self._buckets.setdefault(address, Bucket(WRONG_KEYS_PER_MINUTE, now))
        self._buckets.move_to_end(address)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        if wait := bucket.wait_ns(1, now):
            return wait / NS
        bucket.take(1, now)
        return None
