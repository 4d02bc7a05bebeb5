"""What the endpoints for files and batches use, and the task that answers batches."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import anyio
import anyio.to_thread
import attrs

from uma_trio.config import MB, Config
from uma_trio.files import state_folder
from uma_trio.gateway.batches.row_caller import RowCaller
from uma_trio.gateway.batches.rows import RowReader
from uma_trio.gateway.batches.store import Full, Store
from uma_trio.gateway.batches.worker import Worker
from uma_trio.gateway.charging import Account
from uma_trio.gateway.endpoint import UNKNOWN_PRINCIPAL, Call, Endpoint
from uma_trio.gateway.errors import FILES_FULL, NO_STORAGE, HttpError
from uma_trio.gateway.key_file import CurrentTenants
from uma_trio.gateway.limits import Limiter
from uma_trio.gateway.request_logger import log
from uma_trio.gateway.upload import Arriving
from uma_trio.processes.large_work import LargeWork
from uma_trio.protocol.address import socket_path

MAX_UPLOADS: Final = 4
"""Files that an owner uploads at a time."""

P = ParamSpec("P")
R = TypeVar("R")


@attrs.define
class BatchService:
    """Files and batches of one gateway."""

    store: Store
    reader: RowReader
    worker: Worker
    uploads: Arriving = attrs.field(factory=lambda: Arriving(MAX_UPLOADS, "files of yours"))
    _working: anyio.CancelScope | None = attrs.field(default=None, init=False)

    @classmethod
    def of(
        cls,
        config: Config,
        endpoints: Sequence[Endpoint],
        tenants: CurrentTenants,
        limiter: Limiter,
        large_work: LargeWork,
    ) -> BatchService:
        """The service of a gateway.

        Args:
            endpoints: those that rows may name.
        """

        def account_of(owner: str) -> Account | None:
            if not is_tenant(owner):
                return None
            now = tenants.now()
            by_name = {} if now is None else {tenant.principal.name: tenant for tenant in now.by_name.values()}
            return Account(by_name[owner], limiter, config.limits.default_max_tokens)

        store = Store(
            state_folder(config.sessions.state_dir) / "files",
            max_bytes=config.files.max_files_mb * MB,
            max_files=config.files.max_files,
        )
        caller = RowCaller.of(endpoints, config, large_work)
        reader = reader_of(config, endpoints)
        socket = str(Path(socket_path(config.listen.socket)).absolute())
        return cls(store, reader, Worker(store, caller, reader, account_of, socket, config.model.parallel))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer batches until the context ends."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._work)
            yield
            self.stop()

    def stop(self) -> None:
        """Give up the rows that are being answered, because the daemon stops: they are answered again after its start."""
        if self._working is not None:
            self._working.cancel()

    async def _work(self) -> None:
        try:
            with anyio.CancelScope() as self._working:
                await self.worker.run()
        except Exception:  # noqa: BLE001  (requests over HTTP go on)
            log.exception("batches are not answered any more")


def reader_of(config: Config, endpoints: Sequence[Endpoint]) -> RowReader:
    """The reader of files whose rows may name ``endpoints``."""
    return RowReader([endpoint.path for endpoint in endpoints], config.http.max_body_bytes, "http_max_body_bytes")


def is_tenant(owner: str) -> bool:
    """Whether an owner has to have a key."""
    return owner not in ("", UNKNOWN_PRINCIPAL)


def owner_of(call: Call) -> str:
    """Whose files and batches a client sees: those of its tenant, or without keys those of the user who runs the daemon."""
    account = call.daemon.account
    if account is not None:
        return account.tenant.principal.name
    return UNKNOWN_PRINCIPAL if call.is_unknown else ""


def service_of(call: Call) -> BatchService:
    """The service of the gateway that serves a call."""
    service: BatchService = call.request.app.state.batches
    return service


async def use_store(work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """The result of a method of the store, which runs in a thread.

    Raises:
        HttpError: there is no room, or the disk does not work.
    """
    call: Callable[[], R] = partial(work, *args, **options)
    try:
        return await anyio.to_thread.run_sync(call)
    except Full as error:
        raise HttpError(FILES_FULL, str(error)) from None
    except (OSError, sqlite3.Error) as error:
        raise unusable(error) from None


def unusable(error: Exception) -> HttpError:
    """The error for a disk that does not work."""
    log.error("files cannot be kept", reason=str(error))
    return HttpError(NO_STORAGE, "files cannot be kept now; the daemon's log has the reason")


def page_of(kind: Callable[..., R], items: Sequence[Any], *, has_more: bool) -> R:
    """A list of files or batches, as OpenAI's API has it."""
    first_id, last_id = (items[0].id, items[-1].id) if items else (None, None)
    return kind(data=items, first_id=first_id, last_id=last_id, has_more=has_more)
