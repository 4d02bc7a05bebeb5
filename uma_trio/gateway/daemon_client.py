"""The daemon, as the gateway sees it: connections to its socket, and errors as HTTP statuses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Self

import anyio
import attrs
from anyio.streams.memory import MemoryObjectSendStream

from uma_trio.client import (
    Client,
    ClientError,
    Embeddings,
    Eos,
    Event,
    ModelDescription,
    PrefillProgress,
    Ranking,
    Reasoning,
    ServerError,
    Token,
    TokenList,
    ToolCallDelta,
)
from uma_trio.config import Config
from uma_trio.gateway.charging import Account, Charge, begin_charge
from uma_trio.gateway.errors import NO_DAEMON, HttpError, from_client_error
from uma_trio.gateway.peers.messages import Session
from uma_trio.gateway.peers.moving import Peers
from uma_trio.gateway.picture_urls import PictureUrls
from uma_trio.gateway.request_record import RequestRecord
from uma_trio.gateway.transport import ConnectionPool
from uma_trio.gateway.unattended import Unattended

REQUESTS_AT_A_TIME: Final = 16
"""How many requests of one client request run together."""


KNOWN_S: Final = 1.0
"""How old a list of models may be that only describes an answer."""


@attrs.define
class KnownModels:
    """The latest list of models."""

    models: list[ModelDescription] = attrs.Factory(list)
    asked_at: float = -math.inf


@attrs.frozen
class Daemon:
    """Sends requests to the daemon.  Each has a connection for itself while it runs, and closing that cancels the request."""

    pool: ConnectionPool
    """Opens connections, and keeps those of requests without sessions of peers."""
    account: Account | None = None
    """Who is charged for requests; ``None``: the user who runs the daemon, without limits."""
    record: RequestRecord | None = None
    """Keeps the last events of answers."""
    slo: Mapping[str, Any] | None = None
    """The field ``slo`` of all requests, which are rows of batches; ``None``: each request has its own."""
    peers: Peers | None = None
    """Other daemons, which may have the session of a request."""
    unattended: Unattended = attrs.Factory(Unattended)
    """Charges answers that go on without their clients."""
    pictures: PictureUrls = attrs.Factory(PictureUrls)
    """Fetches pictures that requests name by URL."""
    _known: Mapping[bool, KnownModels] = attrs.Factory(lambda: {True: KnownModels(), False: KnownModels()})
    """For tenants, and for the user who runs the daemon, who may name more of them."""
    _snapshots: Snapshots = attrs.Factory(lambda self: Snapshots(self.pool), takes_self=True)

    @classmethod
    def of(cls, config: Config, **fields: Any) -> Self:
        """The daemon with these settings."""
        return cls(ConnectionPool.of(config), **fields)

    @property
    def is_background(self) -> bool:
        """Whether its requests are rows of batches, for whose answers nobody waits."""
        return self.slo is not None

    @property
    def principal(self) -> str | None:
        """Whose requests they are; ``None``: those of the user who runs the daemon."""
        return None if self.account is None else self.account.tenant.principal.name

    def charging(self, account: Account | None, record: RequestRecord | None = None) -> Daemon:
        """The same daemon, with requests on behalf of somebody."""
        return attrs.evolve(self, account=account, record=record)

    def _count(self, charge: Charge | None, events: Sequence[Event]) -> None:
        if charge is not None:
            charge.count(events)
        if self.record is not None:
            self.record.note(events)

    @contextlib.asynccontextmanager
    async def connect(self, *, is_pooled: bool = False) -> AsyncIterator[Client]:
        """A connection.

        Args:
            is_pooled: it is for one request with ``keep_alive``.  Otherwise it is for queries on behalf of the client.

        Raises:
            HttpError: the daemon cannot be reached, or what was done with the connection failed.
        """
        pool = self.pool
        try:
            async with pool.connect_for_request() if is_pooled else pool.connect(self.principal) as client:
                yield client
        except ClientError as error:
            raise from_client_error(error) from None

    @contextlib.asynccontextmanager
    async def sessions_at_hand(self, model: str | None, *names: str) -> AsyncIterator[Client]:
        """A connection, with the client's sessions of these names here if a peer had them.  While it is open nobody else
        begins or gets one of them.

        Raises:
            HttpError: the daemon cannot be reached, or a session cannot be had now.
        """
        async with self.connect() as client:
            for name in names:
                if self.peers is not None:
                    await self.peers.bring(client, Session(name, model, self.principal))
            yield client

    @contextlib.asynccontextmanager
    async def _sending(
        self, fields: Mapping[str, Any], *, is_streamed: bool, is_pooled: bool = False
    ) -> AsyncIterator[tuple[Client, Mapping[str, Any], Charge]]:
        """A connection for a request, the request as it is to be sent, and what it costs.

        The request gets the ``slo`` of batches, its tenant (``begin_charge``), and the files of its pictures.  It loses a
        session that cannot be had, if it has the whole conversation.

        Args:
            is_pooled: as for ``connect``.

        Raises:
            HttpError: a limit of the tenant refuses it, a picture cannot be fetched, the daemon cannot be reached, or the
                session cannot be had now.
        """
        if self.slo is not None:
            fields = {**fields, "slo": self.slo}
        with begin_charge(self.account, fields, is_streamed=is_streamed) as charge:
            request = await self.pictures.fetch(charge.fields)
            session = Session.of(request)
            if self.peers is not None and session is not None:
                async with self.connect() as client:  # a new one, which the daemon must see closed
                    try:
                        await self.peers.bring(client, session)
                    except HttpError:
                        if request.get("history") != "replace":
                            raise
                    else:
                        yield client, request, charge
                        return
                request = {name: value for name, value in request.items() if name not in ("session_id", "history")}
            async with self.connect(is_pooled=is_pooled) as client:
                yield client, request, charge

    async def generate(self, fields: Mapping[str, Any]) -> AsyncIterator[list[Event]]:
        """Send a request and yield its events, those together that have arrived together.

        Raises:
            HttpError: the daemon cannot be reached or refuses.
        """
        is_streamed = bool(fields.get("stream", True))
        async with self._sending(fields, is_streamed=is_streamed, is_pooled=True) as (client, request, charge):
            async for batch in client.generate_batches(**{**request, "keep_alive": True}):
                self._count(charge, batch)
                yield batch

    async def detach(self, fields: Mapping[str, Any]) -> None:
        """Send a request that the daemon answers on its own.

        Raises:
            HttpError: the daemon cannot be reached or refuses.
        """
        async with self._sending(fields, is_streamed=False) as (client, request, charge):
            info = await client.detach(**request)
            self.unattended.keep(self, info, charge)

    async def attach(self, id: str) -> AsyncIterator[list[Event]]:
        """Yield the events of a detached answer, as ``generate`` does.

        The first list is empty, so that a stream begins before its first event, which may be an error.

        Raises:
            HttpError: the daemon cannot be reached, there is no such answer, or it has ended with an error.
        """
        async with self.connect() as client:
            yield []
            async for batch in client.attach_batches(id):
                self._count(None, batch)
                yield batch

    async def generate_stored(self, fields: Mapping[str, Any], *, goes_on: bool = False) -> AsyncIterator[list[Event]]:
        """Send a detached request and yield its events.

        Args:
            goes_on: the answer goes on when the client leaves.  Otherwise it is cancelled, as with ``generate``.

        Raises:
            HttpError: the daemon cannot be reached or refuses.
        """
        has_ended = False
        async with self._sending(fields, is_streamed=True) as (client, request, charge):
            with anyio.CancelScope(shield=True):  # who leaves now could not cancel what the daemon has begun
                info = await client.detach(**request, keep_alive=True)
            try:
                async for batch in client.attach_batches(fields["id"]):
                    self._count(charge, batch)
                    has_ended = isinstance(batch[-1], Eos)
                    yield batch
            except ServerError:
                has_ended = True
                raise
            finally:
                if not has_ended and goes_on:
                    self.unattended.keep(self, info, charge)
                elif not has_ended:
                    with anyio.move_on_after(CANCEL_S, shield=True):
                        await self._cancel(fields["id"])

    async def _cancel(self, id: str) -> None:
        with contextlib.suppress(HttpError):
            async with self.connect() as client:
                await client.answers("cancel", answer_id=id)

    def generate_all(self, requests: Sequence[Mapping[str, Any]]) -> AsyncIterator[list[Event]]:
        """Send several requests, some at a time, and yield the events of all.

        ``index`` of an event counts the answers of all requests.  One request has its events as they come: to hand each one
        from task to task takes a quarter of the gateway's time.

        Raises:
            HttpError: one of them cannot be answered.  The others are cancelled.
        """
        return self.generate(requests[0]) if len(requests) == 1 else self._generate_together(requests)

    async def _generate_together(self, requests: Sequence[Mapping[str, Any]]) -> AsyncIterator[list[Event]]:
        send, receive = anyio.create_memory_object_stream[list[Event] | HttpError](0)
        at_a_time = anyio.CapacityLimiter(REQUESTS_AT_A_TIME)

        async def run(
            first_index: int, fields: Mapping[str, Any], send: MemoryObjectSendStream[list[Event] | HttpError]
        ) -> None:
            async with send, at_a_time:
                try:
                    async for batch in self.generate(fields):
                        await send.send([_shift_index(event, first_index) for event in batch])
                except HttpError as error:
                    await send.send(error)

        failure: HttpError | None = None
        async with anyio.create_task_group() as tasks, receive:
            first_index = 0
            async with send:
                for fields in requests:
                    tasks.start_soon(run, first_index, fields, send.clone())
                    first_index += int(fields.get("n", 1))
            try:
                async for batch in receive:
                    if isinstance(batch, HttpError):
                        failure = batch
                        break
                    yield batch
            except GeneratorExit:
                pass  # the caller wants no more; the task group would wrap this exception
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def complete(self, *requests: Mapping[str, Any]) -> list[Eos]:
        """Send requests without streaming, and return the last events of all answers by ``index``.

        Raises:
            HttpError: one of them cannot be answered.
        """
        together = self.generate_all([{**fields, "stream": False} for fields in requests])
        async with aclosing(together) as batches:  # type: ignore[type-var]
            ends = [event async for batch in batches for event in batch if isinstance(event, Eos)]
        return sorted(ends, key=lambda eos: eos.index or 0)

    async def embed(self, fields: Mapping[str, Any]) -> Embeddings:
        """The embeddings of texts.  ``fields`` are those of a request for embeddings in docs/PROTOCOL-REFERENCE.md.

        Raises:
            HttpError: the daemon cannot be reached or refuses.
        """
        with begin_charge(self.account, fields, is_streamed=False) as charge:
            async with self.connect() as client:
                embeddings = await client.embed(**charge.fields)
                charge.count([embeddings])
                return embeddings

    async def rerank(self, fields: Mapping[str, Any]) -> Ranking:
        """The ranking of documents.  ``fields`` are those of a request to rank in docs/PROTOCOL-REFERENCE.md.

        Raises:
            HttpError: the daemon cannot be reached or refuses.
        """
        with begin_charge(self.account, fields, is_streamed=False) as charge:
            async with self.connect() as client:
                ranking = await client.rerank(**charge.fields)
                charge.count([ranking])
                return ranking

    async def tokenize_chat(self, fields: Mapping[str, Any]) -> TokenList:
        """The text and the tokens of a chat, as a request would prefill it, with its pictures.

        Args:
            fields: those of a tokenize query in docs/PROTOCOL-REFERENCE.md.

        Raises:
            HttpError: a picture cannot be fetched, or the daemon cannot be reached or refuses.
        """
        given = await self.with_pictures(fields)
        async with self.connect() as client:
            return await client.tokenize(**given)

    async def with_pictures(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """``fields`` of a request with the files of pictures that it names by URL.

        Raises:
            HttpError: a picture cannot be fetched.
        """
        return await self.pictures.fetch({"principal": self.principal, **fields})

    async def models(self) -> list[ModelDescription]:
        """What the daemon serves, the default model first, as it was at most a second ago.

        Raises:
            HttpError: the daemon cannot be reached.
        """
        known, now = self._known[self.account is not None], anyio.current_time()
        if now - known.asked_at >= KNOWN_S:
            async with self.connect() as client:
                known.models = await client.models()
            known.asked_at = now
        return known.models

    async def model(self, name: str | None = None) -> ModelDescription:
        """The model with this name or alias, as it was at most a second ago; the default one for ``None``.

        A name that no model has counts as a request.

        Raises:
            HttpError: there is none, a limit of the tenant refuses to look for it, or the daemon cannot be reached.
        """
        known = await self.models()
        if name is None:
            return known[0]
        for model in known:
            if model.is_called(name):
                return model
        try:
            async with self.connect() as client:  # an alias, or a model that is not served: then the daemon says how to
                return (await client.models(model=name))[0]
        except HttpError:
            if self.account is not None:
                self.account.count_request()
            raise

    async def metrics(self) -> dict[str, Any]:
        """A snapshot of docs/METRICS.md, at most a tenth of a second old.

        Raises:
            HttpError: the daemon cannot be reached.
        """
        return await self._snapshots.latest()


def _shift_index(event: Event, first_index: int) -> Event:
    """The event with an ``index`` that counts from ``first_index``."""
    if isinstance(event, Token | Reasoning | ToolCallDelta | PrefillProgress | Eos):
        return attrs.evolve(event, index=first_index + (event.index or 0))
    return event


TIMEOUT_S: Final = 1.0
"""A daemon that does not answer for so long counts as down."""

CANCEL_S: Final = 30.0
"""A daemon that is busy may take seconds to cancel, and what is not cancelled goes on."""

FRESH_S: Final = 0.1
"""A snapshot may be this old, so that many who ask at a time cost the daemon one question."""


class Snapshots:
    """Reads snapshots over a connection that stays open: they come also when the daemon accepts no more connections."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._lock = anyio.Lock()
        self._open: tuple[Client, contextlib.AsyncExitStack] | None = None
        self._last: dict[str, Any] | HttpError = {}
        self._read_at = -FRESH_S

    async def latest(self) -> dict[str, Any]:
        """A snapshot as docs/METRICS.md describes it.

        Raises:
            HttpError: the daemon does not answer.
        """
        async with self._lock:
            if anyio.current_time() - self._read_at >= FRESH_S:
                self._last = await self._read()
                self._read_at = anyio.current_time()
            if isinstance(self._last, HttpError):
                raise self._last
            return self._last

    async def _read(self) -> dict[str, Any] | HttpError:
        was_open = self._open is not None
        with anyio.move_on_after(TIMEOUT_S):
            try:
                try:
                    return await self._ask()
                except ClientError:
                    if not was_open:
                        raise
                    return await self._ask()  # the daemon had closed the connection, which nobody used for long
            except ClientError as error:
                return from_client_error(error)
        text = f"the daemon does not answer within {TIMEOUT_S:g} s"
        return HttpError(NO_DAEMON, text)

    async def _ask(self) -> dict[str, Any]:
        """Ask over the connection, which stays open only if there is an answer.

        Raises:
            ClientError: there is none.
        """
        kept, self._open = self._open, None
        client, connection = kept or await self._pool.open()
        try:
            snapshot = await client.metrics(keep_alive=True)
            self._open = client, connection
            return snapshot
        finally:
            if self._open is None:
                with anyio.CancelScope(shield=True):
                    await connection.aclose()
