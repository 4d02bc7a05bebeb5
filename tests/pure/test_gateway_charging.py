"""What requests cost their tenants."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import pytest

from tests.support.cases import all_cases
from tests.support.request_states import begin_request
from uma_trio.client import Embeddings, Eos, Event, RankedDocument, Ranking, Reasoning, Token
from uma_trio.errors import ControllerFailed, InternalError
from uma_trio.gateway.charging import UNKNOWN_MAX_TOKENS, Account, Charge, begin_charge, estimated_tokens
from uma_trio.gateway.errors import HttpError
from uma_trio.gateway.guard import check_admin
from uma_trio.gateway.limits import Limiter
from uma_trio.gateway.tenants import Tenant
from uma_trio.protocol.usage import Timings, Usage


class Memory:
    """Usage that does not survive anything."""

    total = 0

    def tokens(self, tenant: str, period: str) -> int:
        return self.total

    def add(self, tenant: str, period: str, tokens: int) -> None:
        self.total += tokens


class Costs:
    """Begins requests of one tenant, and reads what they cost."""

    def __init__(self, *, default_max_tokens: int = 0) -> None:
        self.usage = Memory()
        limiter = Limiter(self.usage, now_ns=lambda: 0, unix_s=lambda: 0.0)
        self.tenant = Tenant(name="alice", weight=2.0, max_requests=5, token_quota=10**12)
        self.account = Account(self.tenant, limiter, default_max_tokens)

    def begin(self, *, is_streamed: bool = True, **fields: Any) -> Charge:
        return begin_charge(self.account, fields, is_streamed=is_streamed)


def token(index: int | None = None, **more: Any) -> Event:
    return Token(id="r", text="a", index=index, **more)


def eos(prompt: int, completion: int, index: int | None = None) -> Event:
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=0)
    return Eos(id="r", reason="stop", usage=usage, timings=Timings(queue_ms=0, total_ms=0), index=index)


def test_a_request_is_made_for_its_tenant() -> None:
    fields = Costs().begin(prompt="x", principal="uid:0", principal_weight=100.0, principal_max_requests=1000).fields
    assert (fields["principal"], fields["principal_weight"], fields["principal_max_requests"]) == (
        "tenant:alice",
        2.0,
        5,
    )


def test_without_an_account_nothing_changes() -> None:
    with begin_charge(None, {"prompt": "x"}, is_streamed=True) as charge:
        assert charge.fields == {"prompt": "x"}
        charge.count([token(), eos(1, 1)])


@all_cases(
    ("fields", "estimate"),
    [
        ({"prompt": "x" * 30, "max_tokens": 5}, 15),
        ({"prompt": [1, 2, 3], "max_tokens": 5, "n": 4}, 23),
        ({"messages": [{"role": "user", "content": "x" * 8}], "max_tokens": 1}, 5),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 4}]}], "max_tokens": 1}, 5),
        ({"prompt": "字" * 5, "max_tokens": 5, "fit_max_tokens": True}, 10),
        ({"prompt": "x", "max_tokens": 4096, "fit_max_tokens": True}, 1 + 4096),
        ({"prompt": "x", "max_tokens": 4097, "fit_max_tokens": True}, 1 + UNKNOWN_MAX_TOKENS),
        ({"prompt": "x"}, 1 + UNKNOWN_MAX_TOKENS),
        *(({"prompt": "x", name: value}, 1 + UNKNOWN_MAX_TOKENS) for name in ("max_tokens", "n") for value in (-5, 0, "9", 2.5, True, None, [], 2**40)),
    ],
)  # fmt: skip
def test_the_estimate_that_is_charged_before_the_request_begins(fields: dict[str, Any], estimate: int) -> None:
    costs = Costs()
    costs.begin(**fields)
    assert costs.usage.total == estimate


def test_the_default_of_the_daemon_counts_if_a_request_has_no_max_tokens() -> None:
    costs = Costs(default_max_tokens=7)
    costs.begin(prompt="xxx", n=2)
    assert costs.usage.total == 1 + 2 * 7


def test_an_answer_that_takes_as_many_tokens_as_fit_ends_with_the_quota() -> None:
    costs = Costs()
    costs.account = attrs.evolve(costs.account, tenant=Tenant(name="alice", token_quota=1000))
    costs.usage.total = 400
    for fields, most, estimate in (
        ({}, 590, 590),
        ({"n": 2}, 295, 590),
        ({"max_tokens": 32_000, "fit_max_tokens": True}, 590, 590),
        ({"max_tokens": 50, "fit_max_tokens": True}, 50, 50),
    ):
        with costs.begin(prompt="x" * 30, **fields) as charge:
            assert (charge.fields["max_tokens"], charge.fields["fit_max_tokens"]) == (most, True)
            assert costs.usage.total == 400 + 10 + estimate
            charge.count([eos(0, 0)])
    costs.usage.total = 995
    with pytest.raises(HttpError, match="5 of the 1,000 tokens"):
        costs.begin(prompt="x" * 30)
    with pytest.raises(HttpError) as refused:
        costs.begin(prompt="x" * 30, max_tokens=2000)
    assert refused.value.status == 400


def test_answers_at_the_same_time_cannot_exceed_a_quota_together() -> None:
    costs = Costs()
    costs.account = attrs.evolve(costs.account, tenant=Tenant(name="alice", token_quota=100_000))
    bounds = []
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(HttpError):
            while True:
                charge = stack.enter_context(costs.begin(prompt="x" * 30))
                bounds.append(10 + charge.fields["max_tokens"])
                stack.callback(charge.count, [eos(10, charge.fields["max_tokens"])])  # each takes all that it may
        assert costs.usage.total < 100_000
    assert bounds[0] > 50_000
    assert len(bounds) > 5
    assert sum(bounds) == costs.usage.total <= 100_000


def test_what_was_promised_to_an_answer_is_free_when_it_has_ended() -> None:
    costs = Costs()
    costs.account = attrs.evolve(costs.account, tenant=Tenant(name="alice", token_quota=100_000))
    for _ in range(3):
        with costs.begin(prompt="x" * 30) as charge:
            assert charge.fields["max_tokens"] == UNKNOWN_MAX_TOKENS + (99_990 - UNKNOWN_MAX_TOKENS) // 2
            charge.count([eos(0, 0)])


def test_a_number_that_clients_always_send_does_not_use_up_a_minute() -> None:
    costs = Costs(default_max_tokens=300)
    costs.account = attrs.evolve(costs.account, tenant=Tenant(name="alice", tokens_per_minute=1000))
    with costs.begin(prompt="xxx", max_tokens=32_000, fit_max_tokens=True) as charge:
        assert charge.fields["max_tokens"] == 32_000
        costs.begin(prompt="xxx", max_tokens=600)


def test_embeddings_cost_their_texts() -> None:
    costs = Costs()
    with costs.begin(is_streamed=False, input=["x" * 30, [1, 2, 3]]) as charge:
        assert costs.usage.total == 13
        assert charge.fields.keys() <= {"input", "principal", "principal_weight", "principal_max_requests"}
        usage = Usage(prompt_tokens=17, completion_tokens=0, cached_tokens=0)
        charge.count([Embeddings(embeddings=[[1.0], [1.0]], usage=usage)])
    assert costs.usage.total == 17


def test_rankings_cost_the_query_with_each_document() -> None:
    costs = Costs()
    with costs.begin(is_streamed=False, query="q" * 9, documents=["x" * 30, "y" * 3]) as charge:
        assert costs.usage.total == 2 * 3 + 11
        usage = Usage(prompt_tokens=21, completion_tokens=0, cached_tokens=0)
        charge.count([Ranking(results=[RankedDocument(index=0, score=1.0)], usage=usage)])
    assert costs.usage.total == 21


def test_estimates_of_anything_deep() -> None:
    deep: Any = "xxx"
    for _ in range(100_000):
        deep = [deep]
    assert estimated_tokens(deep) == 1
    assert estimated_tokens([None, 1.5, {}, ""]) == 0


def test_what_ends_in_order_costs_its_usage() -> None:
    costs = Costs()
    with costs.begin(prompt="x" * 300, max_tokens=100, n=2) as charge:
        charge.count([token(0), token(1), eos(40, 1, 0)])
        charge.count([token(1), eos(40, 9, 1)])
    assert costs.usage.total == 40 + 1 + 9


def test_what_the_daemon_refuses_costs_nothing_and_what_fails_later_costs_what_was_generated() -> None:
    for events, cost in (([], 0), ([token(), Reasoning(id="r", text="b")], 3)):
        costs = Costs()
        with pytest.raises(HttpError), costs.begin(prompt="xxx", max_tokens=100) as charge:
            charge.count(events)
            raise HttpError(InternalError, "no")
        assert costs.usage.total == cost


def test_tokens_that_a_controller_has_removed_cost_as_much_as_others() -> None:
    costs = Costs()
    usage = Usage(prompt_tokens=1, completion_tokens=4, sampled_tokens=600, inserted_tokens=200)
    with costs.begin(controller="c", max_tokens=50) as charge:
        charge.count([Eos(id="r", reason="stop", usage=usage, timings=Timings(queue_ms=0, total_ms=0), index=0)])
    assert costs.usage.total == 1 + 600 + 200


@all_cases(("is_streamed", "cost"), [(True, 10 + 1), (False, 10 + 100)])
def test_an_answer_that_its_controller_ends_with_an_error_is_not_free(is_streamed: bool, cost: int) -> None:
    costs = Costs()
    with (
        pytest.raises(HttpError),
        costs.begin(prompt="x" * 30, max_tokens=100, controller="c", is_streamed=is_streamed) as charge,
    ):
        charge.count([token()] if is_streamed else [])
        raise HttpError(ControllerFailed, "the controller has printed all that it has generated")
    assert costs.usage.total == cost


@all_cases(
    ("is_streamed", "events", "cost"),
    [
        (True, [], 10),
        (True, [token(echo=True), token(), token()], 12),
        (False, [], 110),
    ],
)
def test_what_a_client_that_leaves_has_used(is_streamed: bool, events: list[Event], cost: int) -> None:
    costs = Costs()
    with pytest.raises(GeneratorExit), costs.begin(prompt="x" * 30, max_tokens=100, is_streamed=is_streamed) as charge:
        charge.count(events)
        raise GeneratorExit
    assert costs.usage.total == cost


def test_a_request_is_no_longer_in_flight_however_it_ends() -> None:
    costs = Costs()
    for ending in (ValueError, GeneratorExit, KeyboardInterrupt):
        for _ in range(10):
            with pytest.raises(ending), costs.begin(prompt="x", n=5):
                raise ending
    with costs.begin(prompt="x", n=5), pytest.raises(HttpError):
        costs.begin(prompt="x")


@all_cases(
    ("tenant", "has_tenants", "address", "allowed"),
    [
        (Tenant(name="ops", admin=True), True, "10.0.0.1", True),
        (Tenant(name="alice"), True, "127.0.0.1", False),
        (None, True, "127.0.0.1", False),
        (None, False, "127.0.0.1", True),
        (None, False, "::1", True),
        (None, False, "10.0.0.1", False),
        (None, False, None, False),
    ],
)
def test_who_is_an_administrator(tenant: Tenant | None, has_tenants: bool, address: str | None, allowed: bool) -> None:
    client = None if address is None else (address, 1)
    scope: dict[str, Any] = {"client": client, "path": "/"}
    state = begin_request(scope)
    state.tenant, state.n_tenants = tenant, 1 if has_tenants else None
    if allowed:
        check_admin(scope)
        return
    with pytest.raises(HttpError) as refused:
        check_admin(scope)
    assert (refused.value.status, refused.value.code) == (403, "E_GATEWAY_ADMIN")


def test_an_answer_that_goes_on_without_its_client_is_charged_at_its_end_and_is_no_longer_in_flight() -> None:
    costs = Costs()
    charges = []
    for _ in range(8):  # five may be in flight
        with costs.begin(prompt="x" * 30, max_tokens=100) as charge:
            charge.count([token()])
            charges.append(charge.hand_over())
    assert costs.usage.total == 8 * 110
    for kept in charges:
        assert kept is not None
        with kept:
            kept.count([eos(12, 40)])
    assert costs.usage.total == 8 * 52
    with begin_charge(None, {"prompt": "x"}, is_streamed=True) as free:
        assert free.hand_over() is None
