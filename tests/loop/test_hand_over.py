"""Sessions that another daemon asks for while they are used here."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from uma_trio.daemon.sessions.hand_over import HandOver
from uma_trio.daemon.sessions.table import Session, SessionTable
from uma_trio.daemon.store.journal_format import SessionKey, SessionRecord, encode
from uma_trio.errors import SessionBusy
from uma_trio.protocol.lease import Lease, LeaseQuery


@attrs.define
class SlowOffloader:
    """Saves a KV cache as slowly as a test wants."""

    begun: trio.Event = attrs.field(factory=trio.Event)
    may_end: trio.Event = attrs.field(factory=trio.Event)

    async def file_of(self, tokens: Any, principal: str) -> None:
        self.begun.set()
        await self.may_end.wait()


def hand_over(table: SessionTable, offloader: SlowOffloader, write: Any) -> HandOver:
    return HandOver(
        table, "model", offloader, 100, write, None, trio.to_thread.run_sync, trio.current_time, trio.current_time
    )


async def test_a_request_that_comes_while_a_session_arrives_waits_until_it_is_here(tmp_path):
    """Its connection may claim the session a moment later.  Otherwise it would be refused, since the session is busy."""
    table, writing, may_end = SessionTable(max_sessions=9, ttl_s=60), trio.Event(), trio.Event()

    async def write(each):
        writing.set()
        await may_end.wait()

    leases, key = hand_over(table, SlowOffloader(), write), SessionKey("unix:1", "s")
    tokens = np.arange(40, dtype=np.int32)
    record = SessionRecord(key=key, created_at=1, used_at=1, n_turns=1, tokens=tokens, lease=Lease(1))
    (tmp_path / "turns").write_bytes(encode(record))

    def ask(action, owner, **fields):
        return leases.answer(LeaseQuery(action=action, session_id="s", **fields), "unix:1", owner)

    await ask("claim", "first")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(ask, "accept", "first", epoch=1, turns=str(tmp_path / "turns")))
        await writing.wait()
        with pytest.raises(SessionBusy, match="arrives"):
            await ask("claim", "second")
        may_end.set()
    assert (await ask("claim", "second")).state == "held"


async def test_a_request_that_comes_while_a_session_is_saved_for_a_peer_keeps_it():
    table, offloader = SessionTable(max_sessions=9, ttl_s=60), SlowOffloader()
    session = Session("unix:1", "s", 0, 0, tokens=np.arange(40, dtype=np.int32), turns=1, turns_on_disk=1)
    table.add(session)
    written = []

    async def write(each):
        written.append(each)

    leases = hand_over(table, offloader, write)
    leases.journal = object()

    def ask(action, owner, **fields):
        return leases.answer(LeaseQuery(action=action, session_id="s", **fields), "unix:1", owner)

    async def give():
        with pytest.raises(SessionBusy):
            await ask("give", "peer", peer="http://b", seen=0, epoch=1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give)
        await offloader.begun.wait()
        assert (await ask("claim", "request")).state == "held"
        assert not session.busy, "the request would be refused"
        offloader.may_end.set()
    assert session.is_here
    assert written == []
    leases.release("request")
    assert not (await ask("ask", "peer")).busy
