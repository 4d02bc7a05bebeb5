"""Sends the request of a row to its endpoint, as if it had come over HTTP, and of class ``background``."""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final, NoReturn, Self

import anyio
import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from uma_trio.config import Config
from uma_trio.errors import InvalidJson, ShuttingDown, TooManyValues
from uma_trio.gateway.answer import StreamedAnswer
from uma_trio.gateway.batches.rows import Row, RowResult
from uma_trio.gateway.batches.run import Later
from uma_trio.gateway.charging import Account
from uma_trio.gateway.daemon_client import Daemon
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import LOADING, NO_DAEMON, AnyKind, HttpError, internal_error, invalid, json_refusal
from uma_trio.gateway.request_logger import log
from uma_trio.gateway.request_record import RequestRecord
from uma_trio.gateway.request_state import RequestState
from uma_trio.processes.large_work import LARGE_BYTES, LargeWork
from uma_trio.protocol.json_cost import JsonCost

LATER: Final = (429, 502, 503)
"""Statuses of what may work later."""
OF_THE_DAEMON: Final[Container[AnyKind]] = (LOADING, NO_DAEMON, ShuttingDown)
"""Refusals that no request can be the reason of."""
LONGEST_WAIT_S: Final = 30.0
"""A longer wait is asked for again: limits of tenants may change meanwhile."""
RETRY_S: Final = 1.0

THIS_MACHINE: Final = ("127.0.0.1", 0)


@attrs.frozen
class RowCaller:
    """Answers rows.

    Args:
        endpoints: those that rows may have, by path.
        daemon: for requests of class ``background``.
    """

    endpoints: Mapping[str, Endpoint]
    config: Config
    daemon: Daemon
    large_work: LargeWork

    @classmethod
    def of(cls, endpoints: Iterable[Endpoint], config: Config, large_work: LargeWork) -> Self:
        """The caller of these endpoints.

        Nobody waits for the next token of a row, but a new request of somebody waits for the end of a tick.  So rows have
        the target that keeps ticks as short as they are without streams.
        """
        slo = {"priority": "background", "target_itl_ms": config.scheduling.prefill_tick_ms}
        daemon = Daemon.of(config, slo=slo)
        return cls({endpoint.path: endpoint for endpoint in endpoints}, config, daemon, large_work)

    async def answer(self, row: Row, account: Account | None = None, *, is_local: bool = True) -> RowResult | Later:
        """Answer a row.

        Args:
            account: of the tenant who is charged.
            is_local: without an account, whether the row is from this machine.
        """
        request_id = f"req-{secrets.token_hex(12)}"
        body = bytes(row.body)
        record = RequestRecord(request_id, row.method, [])
        state = RequestState(record, _never_sends, is_large=len(body) > LARGE_BYTES)
        if account is not None:
            state.tenant, state.n_tenants = account.tenant, 1
        scope: dict[str, Any] = {
            "type": "http",
            "method": row.method,
            "path": row.url,
            "query_string": b"",
            "headers": [],
            "client": THIS_MACHINE if is_local else None,
        }
        state.attach(scope)
        request = Request(scope, _never)
        request._body = body  # as Starlette keeps it when it has read it
        daemon = self.daemon.charging(account, record)
        call = Call(self.endpoints[row.url], request, state, self.config, daemon, self.large_work)
        later: Later | None = None
        try:
            async with call.part():
                _check_cost(body)
            response = await call.endpoint.answer(call)
            if isinstance(response, StreamedAnswer):
                raise invalid("a row cannot be streamed; leave out stream", parameter="stream")
            if any(end.event.reason == "cancelled" for end in record.ends):  # by a daemon that stops
                raise HttpError(ShuttingDown, "the daemon stopped during the answer")
        except Exception as caught:  # noqa: BLE001  (other rows go on)
            error = caught if isinstance(caught, HttpError) else _bug(request_id)
            response = call.refuse(error)
            if error.status in LATER:
                wait_s = RETRY_S if error.retry_after_ms is None else error.retry_after_ms / 1e3
                may_be_its_fault = error.status != 429 and error.kind not in OF_THE_DAEMON
                result = _result(row, request_id, response)
                later = Later(min(wait_s, LONGEST_WAIT_S), result, may_be_its_fault)
        return later or _result(row, request_id, response)


def _result(row: Row, request_id: str, response: Response) -> RowResult:
    return RowResult(row.custom_id, response.status_code, msgspec.Raw(bytes(response.body)), request_id)


def _bug(request_id: str) -> HttpError:
    """The error for an exception, which is logged, in an endpoint."""
    log.exception("a row of a batch has found a bug", id=request_id)
    return internal_error()


def _check_cost(body: bytes) -> None:
    try:
        JsonCost().add(body)
    except (InvalidJson, TooManyValues) as error:
        raise json_refusal(error) from None


async def _never() -> NoReturn:
    """Nobody leaves, because nobody waits."""
    await anyio.sleep_forever()
    raise AssertionError


async def _never_sends(_: Message) -> NoReturn:
    raise AssertionError("the answer of a row is kept, not sent")
