"""Limits of tenants hold for any sequence of requests, and a wait that was announced is long enough."""

from __future__ import annotations

import datetime
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.errors import MaxTokensTooLarge, TooManyRequests
from uma_trio.gateway.errors import QUOTA, RATE, HttpError
from uma_trio.gateway.limits import (
    MAX_ADDRESSES,
    MINUTE_NS,
    NS,
    WRONG_KEYS_PER_MINUTE,
    Admission,
    Bucket,
    Limiter,
    QuotaPeriod,
    WrongKeys,
    go_duration,
)
from uma_trio.gateway.tenants import Tenant

BEGIN = datetime.datetime(2026, 1, 31, 23, 0, tzinfo=datetime.UTC).timestamp()


class Memory:
    """Usage that does not survive anything."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def tokens(self, tenant: str, period: str) -> int:
        return self.counts[tenant, period]

    def add(self, tenant: str, period: str, tokens: int) -> None:
        self.counts[tenant, period] += tokens


class World:
    """A limiter in virtual time."""

    def __init__(self, connections: float = math.inf) -> None:
        self.ns = 0
        self.usage = Memory()
        self.limiter = Limiter(
            self.usage, now_ns=lambda: self.ns, unix_s=lambda: BEGIN + self.ns / NS, connections=connections
        )

    def admit(self, tenant: Tenant, tokens: int = 0, answers: int = 1) -> Admission | HttpError:
        try:
            return self.limiter.admit(tenant, tokens=tokens, answers=answers)
        except HttpError as error:
            return error

    def use(self, tenant: Tenant, tokens: int, *, reserved: int | None = None) -> None:
        self.limiter.admit(tenant, tokens=tokens if reserved is None else reserved).settle(tokens)

    def wait(self, error: HttpError) -> None:
        assert error.retry_after_ms is not None
        self.ns += error.retry_after_ms * 1_000_000


limits = st.none() | st.integers(1, 500)
tenants = st.builds(
    Tenant, name=st.just("a"), requests_per_minute=limits, tokens_per_minute=limits, token_quota=limits,
    quota_period=st.sampled_from(["day", "month"]),
)  # fmt: skip
steps = st.lists(
    st.tuples(st.integers(0, 90 * NS), st.integers(0, 800), st.integers(0, 800)), min_size=1, max_size=40
)  # time until the request, tokens that are estimated, tokens that are used


@given(tenants, steps)
def test_a_client_that_waits_as_long_as_it_should_is_admitted(
    tenant: Tenant, requests: list[tuple[int, int, int]]
) -> None:
    world = World()
    for gap, estimate, used in requests:
        world.ns += gap
        found = world.admit(tenant, estimate)
        if isinstance(found, HttpError):
            if found.kind is MaxTokensTooLarge:
                assert tenant.token_quota is not None
                assert estimate > tenant.token_quota
                continue
            assert found.status == 429
            world.wait(found)
            found = world.admit(tenant, estimate)
        assert isinstance(found, Admission), found
        found.settle(used)


@given(st.integers(1, 100), st.lists(st.integers(0, 5 * NS), min_size=1, max_size=300))
def test_no_interval_has_more_requests_than_the_bucket_allows(limit: int, gaps: list[int]) -> None:
    world, tenant = World(), Tenant(name="a", requests_per_minute=limit)
    admitted: list[int] = []
    for gap in gaps:
        world.ns += gap
        if isinstance(world.admit(tenant), Admission):
            admitted.append(world.ns)
    for first, begin in enumerate(admitted):
        for last, end in enumerate(admitted[first:], first):
            assert last - first + 1 <= limit * (1 + (end - begin) / MINUTE_NS) + 1e-9


@given(tenants, steps)
def test_a_quota_is_never_exceeded_by_estimates_that_are_upper_bounds(
    tenant: Tenant, requests: list[tuple[int, int, int]]
) -> None:
    world = World()
    running: list[tuple[Admission, int]] = []
    for number, (gap, estimate, used) in enumerate(requests):
        world.ns += gap
        found = world.admit(tenant, estimate)
        if isinstance(found, Admission):
            running.append((found, min(used, estimate)))
        if running and number % 3 == 0:
            admission, tokens = running.pop(0)
            admission.settle(tokens)
        if tenant.token_quota is not None:
            assert max(world.usage.counts.values(), default=0) <= tenant.token_quota
        assert min(world.usage.counts.values(), default=0) >= 0


def test_a_token_bucket_is_exact_over_any_time() -> None:
    bucket = Bucket(7, 0)
    bucket.take(7, 0)
    wait = bucket.wait_ns(1, 0)
    assert bucket.wait_ns(1, wait - 1) == 1
    assert bucket.wait_ns(1, wait) == 0
    for _ in range(1000):
        now = bucket._at_ns + bucket.wait_ns(1, bucket._at_ns)
        bucket.take(1, now)
    assert now == pytest.approx(1000 * MINUTE_NS / 7, abs=1001)


def test_what_was_reserved_and_not_used_is_given_back() -> None:
    world, tenant = World(), Tenant(name="a", tokens_per_minute=1000, token_quota=5000)
    world.use(tenant, 10, reserved=900)
    world.use(tenant, 10, reserved=980)
    assert world.usage.counts == {("a", "2026-01"): 20}
    assert isinstance(world.admit(tenant, 981), HttpError)


def test_what_was_used_and_not_reserved_is_owed() -> None:
    world, tenant = World(), Tenant(name="a", tokens_per_minute=60)
    world.use(tenant, 180, reserved=10)
    error = world.admit(tenant, 1)
    assert isinstance(error, HttpError)
    assert (error.code, error.retry_after_ms) == (RATE.code, 121_000)


def test_a_request_larger_than_a_minutes_tokens_waits_for_a_full_bucket() -> None:
    world, tenant = World(), Tenant(name="a", tokens_per_minute=60)
    world.use(tenant, 30)
    error = world.admit(tenant, 1000)
    assert isinstance(error, HttpError)
    assert error.retry_after_ms == 30_000
    world.wait(error)
    assert isinstance(world.admit(tenant, 1000), Admission)


def test_a_quota_begins_anew_with_its_period() -> None:
    world, tenant = World(), Tenant(name="a", token_quota=100)
    world.use(tenant, 90)
    error = world.admit(tenant, 11)
    assert isinstance(error, HttpError)
    assert (error.status, error.code, error.headers["Retry-After"]) == (429, QUOTA.code, "3600")
    assert "10 of the 100 tokens" in error.message
    world.wait(error)
    world.use(tenant, 100)
    assert world.usage.counts == {("a", "2026-01"): 90, ("a", "2026-02"): 100}


def test_tokens_count_in_the_period_in_which_their_request_began() -> None:
    world, tenant = World(), Tenant(name="a", token_quota=100)
    admission = world.limiter.admit(tenant, tokens=60)
    world.ns += 2 * 3600 * NS
    admission.settle(50)
    assert world.usage.counts == {("a", "2026-01"): 50}


def test_more_than_a_quota_is_refused_for_good() -> None:
    error = World().admit(Tenant(name="a", token_quota=100, tokens_per_minute=1), 101)
    assert isinstance(error, HttpError)
    assert (error.status, error.code, error.retry_after_ms) == (400, MaxTokensTooLarge.code, None)


def test_one_tenant_leaves_connections_to_others() -> None:
    world, tenants = World(connections=16), [Tenant(name=name) for name in "abc"]
    held = {tenant.name: 0 for tenant in tenants}
    for tenant in tenants:
        while isinstance(found := world.admit(tenant), Admission):
            held[tenant.name] += 1
            last = found
        assert (found.status, found.retry_after_ms) == (429, 1000)
    assert held == {"a": 8, "b": 4, "c": 2}
    last.settle(0)
    assert isinstance(world.admit(tenants[2]), Admission)


def test_answers_in_flight() -> None:
    world, tenant = World(), Tenant(name="a", max_requests=3)
    first = world.admit(tenant, answers=2)
    second = world.admit(tenant)
    third = world.admit(tenant)
    assert isinstance(first, Admission)
    assert isinstance(second, Admission)
    assert isinstance(third, HttpError)
    assert (third.status, third.code, third.headers["Retry-After"]) == (429, TooManyRequests.code, "1")
    second.settle(0)
    assert isinstance(world.admit(tenant), Admission)
    never = world.admit(tenant, answers=4)
    assert isinstance(never, HttpError)
    assert (never.status, never.retry_after_ms) == (400, None)


def test_a_refused_request_takes_nothing() -> None:
    world, tenant = World(), Tenant(name="a", requests_per_minute=5, tokens_per_minute=100, token_quota=50)
    for _ in range(20):
        assert isinstance(world.admit(tenant, 60), HttpError)
    for _ in range(5):
        world.use(tenant, 10)


def test_tenants_do_not_share_limits() -> None:
    world = World()
    noisy, quiet = (Tenant(name=name, requests_per_minute=2) for name in ("noisy", "quiet"))
    assert [isinstance(world.admit(noisy), Admission) for _ in range(4)] == [True, True, False, False]
    assert isinstance(world.admit(quiet), Admission)


def test_a_changed_limit_counts_what_was_used_before() -> None:
    world = World()
    for _ in range(10):
        world.use(Tenant(name="a", requests_per_minute=10), 0)
    tenant = Tenant(name="a", requests_per_minute=12)
    assert [isinstance(world.admit(tenant), Admission) for _ in range(3)] == [True, True, False]
    assert isinstance(world.admit(Tenant(name="a")), Admission)


def test_headers_are_those_of_the_openai_api() -> None:
    world, tenant = World(), Tenant(name="a", requests_per_minute=60, tokens_per_minute=1000)
    world.use(tenant, 500)
    assert dict(world.limiter.headers(tenant)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "30s",
    }
    assert world.limiter.headers(Tenant(name="b")) == []


@pytest.mark.parametrize(
    ("ns", "shown"), [(0, "0ms"), (1, "1ms"), (20_000_000, "20ms"), (NS, "1s"), (1_500_000_000, "1.5s"), (360 * NS, "6m0s")]
)  # fmt: skip
def test_durations(ns: int, shown: str) -> None:
    assert go_duration(ns) == shown


@given(st.datetimes(datetime.datetime(2020, 1, 1), datetime.datetime(2100, 1, 1)), st.sampled_from(["day", "month"]))
def test_a_period_ends_where_the_next_one_begins(when: datetime.datetime, period: str) -> None:
    unix = when.replace(tzinfo=datetime.UTC, microsecond=0).timestamp()
    found = QuotaPeriod.at(unix, period)  # type: ignore[arg-type]
    assert found.ends_in_s > 0
    assert QuotaPeriod.at(unix + found.ends_in_s - 1, period).name == found.name  # type: ignore[arg-type]
    assert QuotaPeriod.at(unix + found.ends_in_s, period).name > found.name  # type: ignore[arg-type]


def test_wrong_keys_are_counted_by_address_within_bounds() -> None:
    now = 0
    wrong = WrongKeys(now_ns=lambda: now)
    assert [wrong.note("1.2.3.4") for _ in range(WRONG_KEYS_PER_MINUTE)] == [None] * WRONG_KEYS_PER_MINUTE
    wait = wrong.note("1.2.3.4")
    assert wait == 60 / WRONG_KEYS_PER_MINUTE
    assert wrong.note("5.6.7.8") is None
    now = round(wait * NS)
    assert wrong.note("1.2.3.4") is None
    for number in range(3 * MAX_ADDRESSES):
        wrong.note(str(number))
    assert len(wrong._buckets) == MAX_ADDRESSES
