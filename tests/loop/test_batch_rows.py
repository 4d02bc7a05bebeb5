"""The answers to rows of a batch, from a daemon that ends them in its own way."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
import attrs
import msgspec
from starlette.responses import Response

from uma_trio.client import Eos, Event
from uma_trio.config import Config
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.batches.row_caller import RowCaller
from uma_trio.gateway.batches.rows import Row, RowResult
from uma_trio.gateway.batches.run import Later
from uma_trio.gateway.daemon_client import Daemon
from uma_trio.gateway.dialects.native.dialect import NATIVE
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.transport import ConnectionPool
from uma_trio.processes.large_work import LargeWork
from uma_trio.protocol.usage import Timings, Usage

ROW = Row(custom_id="1", method="POST", url="/v1/row", body=msgspec.Raw(b"{}"))


@attrs.frozen
class Client:
    """Ends each answer for the same reason."""

    reason: Any

    async def generate_batches(self, **fields: Any) -> AsyncIterator[list[Event]]:
        usage, timings = Usage(prompt_tokens=1, completion_tokens=1), Timings(queue_ms=0, total_ms=1)
        yield [Eos(id="r", reason=self.reason, usage=usage, timings=timings)]


class Pool(ConnectionPool):
    """Connections to a daemon that ends each answer for the same reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(None)
        self._reason = reason

    @contextlib.asynccontextmanager
    async def connect_for_request(self) -> AsyncIterator[Any]:
        yield Client(self._reason)


async def complete(call: Call) -> Response:
    """Answer with the reason of the end."""
    [end] = await call.daemon.complete({"prompt": "x"})
    return json_response(end.reason)


async def answer(reason: str) -> RowResult | Later:
    endpoint = NATIVE.post(ROW.url, complete, None)
    caller = RowCaller({ROW.url: endpoint}, Config(), Daemon(Pool(reason)), LargeWork(anyio.Lock(), anyio.sleep))
    return await caller.answer(ROW)


async def test_a_row_whose_answer_a_stopping_daemon_cancels_is_answered_again() -> None:
    found = await answer("stop")
    assert isinstance(found, RowResult)
    assert (found.status, bytes(found.body)) == (200, b'"stop"')
    again = await answer("cancelled")
    assert isinstance(again, Later)
    assert not again.may_be_its_fault
