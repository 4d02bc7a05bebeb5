"""Offers the sessions of a daemon that stops to its peers, and waits for moves that are under way.

A peer that accepts comes for the session as for any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import anyio
import attrs
import structlog

from uma_trio.client import Client, ClientError, SessionOffer
from uma_trio.gateway.errors import HttpError
from uma_trio.gateway.peers.channel import PeerRefused, PeerSilent
from uma_trio.gateway.peers.messages import PeerQuestion
from uma_trio.gateway.peers.moving import Peers

log = structlog.get_logger("uma_trio.gateway")

AT_A_TIME: Final = 4
"""Offers to one peer, once it has answered the first one."""
OFFER_S: Final = 5.0
"""A peer that has not taken a session in this time hangs.  If it goes on later and takes the session, that does no harm."""


@attrs.define(eq=False)
class Leaving:
    """Waits until the daemon stops, then offers.

    Args:
        peers: ``None``: there are none, and nothing is offered.
        connect: makes a connection to the daemon.
        notice_s: how long the daemon still serves requests, and keeps its sessions.
    """

    _peers: Peers | None
    _connect: Callable[[], AbstractAsyncContextManager[Client]]
    _notice_s: float
    _begin: Callable[[], None] = attrs.field(default=lambda: None, init=False)

    def begin(self) -> None:
        """The daemon stops.  Does not wait."""
        self._begin()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Offer the sessions, once it has begun, until the context ends."""
        begun = anyio.Event()
        self._begin = begun.set
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._offer_all, begun)
            yield
            tasks.cancel_scope.cancel()

    async def _offer_all(self, begun: anyio.Event) -> None:
        await begun.wait()
        if self._peers is None:
            return
        await anyio.sleep(self._notice_s)
        try:
            async with self._connect() as client:
                await self._offer_each(self._peers, client)
                while await self._peers.moves.wait_ended():  # what has come, or was not given after all, can be offered
                    await self._offer_each(self._peers, client)
                await client.next_offer(end=True)
        except* (HttpError, ClientError) as group:  # the daemon has waited long enough
            log.warning("not all sessions were offered to peers", reason=str(group.exceptions[0]))

    async def _offer_each(self, peers: Peers, client: Client) -> None:
        returned: list[SessionOffer] = []
        urls, one_asks, n_taken = {*peers.settings.others}, anyio.Lock(), 0

        async def next_offer() -> SessionOffer | None:
            async with one_asks:
                offer = returned.pop() if returned else await client.next_offer()
            return None if offer.session_id is None else offer

        async def offer_to(url: str, n_others: int) -> None:
            """Offer one session after the other, and ``n_others`` next to them once the peer has answered."""
            nonlocal n_taken
            while url in urls and (offer := await next_offer()) is not None:
                try:
                    n_taken += await _is_taken(peers, url, offer)
                except PeerSilent as error:
                    log.info("a peer takes no sessions", reason=str(error))
                    urls.discard(url)
                    returned.append(offer)
                while n_others and url in urls:
                    n_others -= 1
                    tasks.start_soon(offer_to, url, 0)

        while urls:
            async with anyio.create_task_group() as tasks:
                for url in urls:
                    tasks.start_soon(offer_to, url, AT_A_TIME - 1)
            if not returned:
                break
        log.info("peers took sessions over, because the daemon stops", sessions=n_taken)


async def _is_taken(peers: Peers, url: str, offer: SessionOffer) -> bool:
    """Offer a session to a peer; returns whether it took it.

    Raises:
        PeerSilent: it does not answer.
    """
    assert offer.session_id is not None
    question = PeerQuestion(action="offer", session_id=offer.session_id, model=offer.model, principal=offer.principal)
    try:
        return (await peers.channel.ask(url, question, OFFER_S)).state == "held"
    except PeerRefused as error:
        log.info("a peer does not take a session", session=offer.session_id, reason=str(error))
        return False
