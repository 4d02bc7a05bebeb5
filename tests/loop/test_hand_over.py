"""Sessions that another daemon asks for while they are used here, or while the daemon stops."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from uma_trio.client import SessionOffer
from uma_trio.daemon.sessions.hand_over import HandOver
from uma_trio.daemon.sessions.table import Session, SessionTable
from uma_trio.daemon.store.journal_format import SessionKey, SessionRecord, encode
from uma_trio.errors import SessionBusy
from uma_trio.gateway.peers.leaving import Leaving
from uma_trio.gateway.peers.messages import PeerAnswer, PeerQuestion
from uma_trio.gateway.peers.moving import Peers
from uma_trio.gateway.peers.settings import PeerSettings
from uma_trio.gateway.peers.signatures import Reception, Signer
from uma_trio.gateway.peers.under_way import QUIET_S, Moves
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
    return HandOver(table, "model", offloader, 100, write, None, trio.to_thread.run_sync)


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
    key, tokens = SessionKey("unix:1", "s"), np.arange(40, dtype=np.int32)
    record = SessionRecord(key=key, created_at=0, used_at=0, n_turns=1, tokens=tokens)
    session = Session(record, turns_on_disk=1)
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


def ask_of(moves: Moves, action: Any) -> None:
    with moves.answering(PeerQuestion(action=action, session_id="s")):
        pass


async def test_a_session_that_a_peer_has_been_given_is_under_way_until_it_is_confirmed_or_nobody_comes_for_it(
    autojump_clock,
):
    moves = Moves()
    assert not await moves.wait_ended()
    with pytest.raises(SessionBusy), moves.answering(PeerQuestion(action="give", session_id="s")):
        raise SessionBusy("it is answering")
    ask_of(moves, "ask")
    assert not await moves.wait_ended(), "nobody has got it"

    async def come_for_it():
        await trio.sleep(QUIET_S - 1)
        ask_of(moves, "read")
        await trio.sleep(QUIET_S - 1)
        ask_of(moves, "confirm")

    for last, asked in ((2 * QUIET_S - 2, come_for_it), (QUIET_S, partial(trio.sleep, 0))):
        began = trio.current_time()
        ask_of(moves, "give")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked)
            assert await moves.wait_ended()
            assert trio.current_time() == pytest.approx(began + last)


async def test_a_daemon_that_stops_waits_for_sessions_that_arrive_and_offers_them(autojump_clock):
    here, offered, ended_at = ["early"], [], []

    class Daemon:
        async def next_offer(self, *, end: bool = False) -> SessionOffer:
            await trio.lowlevel.checkpoint()
            if end:
                ended_at.append(trio.current_time())
            return SessionOffer(session_id=here.pop() if here else None)

    class Channel:
        async def ask(self, url: str, question: PeerQuestion, timeout_s: float) -> PeerAnswer:
            offered.append(question.session_id)
            await trio.lowlevel.checkpoint()
            return PeerAnswer("held")

    settings = PeerSettings(("http://b",), "http://a", b"secret", Path("/nowhere"), 1)
    peers = Peers(settings, Signer(b"secret"), Reception(), Channel())
    leaving, began = Leaving(peers, lambda: contextlib.nullcontext(Daemon()), 0.0), trio.current_time()
    async with leaving.running():
        with peers.moves.running():
            leaving.begin()
            await trio.sleep(30)
            assert offered == ["early"]
            here.append("late")
        while not ended_at:
            await trio.sleep(1)
    assert offered == ["early", "late"]
    assert ended_at[0] >= began + 30
