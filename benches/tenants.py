"""Two users of one daemon, one with many clients and one with few: does each get half of it?

Used by ``goodput.py --tenants``.  A tenant is the user id of whoever connects, so this connects as two users
that need not exist, which only root may.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio.abc
import attrs
import trio
from open_load import Mix, Request
from pinning import Pins, pinned
from report import cell, table
from rigs import Rig

from uma_trio.client import Client, Token
from uma_trio.demo.load import Daemon
from uma_trio.engine.tokenizer import Tokenizer

FIRST_UID = 60_001
PER_GENERATED = 2
"""A token generated counts as two of a prompt, as in the scheduler (docs/ARCHITECTURE.md)."""
WARM_UP_S = 3.0
"""Of the time, not counted: until then all clients have begun together."""
FAIR = 0.1
"""By how much the shares may differ."""


def why_not() -> str | None:
    """Why this process cannot be two users; ``None`` if it can."""
    if not hasattr(os, "seteuid"):
        return "this system has no user ids"
    if os.geteuid() != 0:
        return "only root can connect as two users; run it with sudo, or in a container"
    return None


@attrs.define(kw_only=True)
class Tenant:
    """One user, and what it was given."""

    uid: int
    clients: int
    requests: int = 0
    """With a first token in the time that counts."""
    prompt_tokens: int = 0
    generated: int = 0

    @property
    def service(self) -> int:
        return self.prompt_tokens + PER_GENERATED * self.generated


async def share(
    rig: Rig, mix: Mix, tokenizer: Tokenizer, sizes: Sequence[int], *, seconds: float, seed: int, pins: Pins | None
) -> list[Tenant]:
    """Clients that ask one request after another, without a pause, for ``seconds``."""
    assert isinstance(rig.transport, Daemon)
    path = Path(rig.transport.path)
    _let_in(path)
    tenants = [Tenant(uid=FIRST_UID + n, clients=clients) for n, clients in enumerate(sizes)]
    requests = mix.requests(seed)
    counts_from = trio.current_time() + WARM_UP_S

    async def client(tenant: Tenant) -> None:
        async with await anyio.abc.UNIXSocketStream.from_socket(connected(path, tenant.uid)) as stream:
            connection = Client(stream)
            for request in requests:
                await _ask(connection, request, tokenizer, tenant, counts_from)

    with pinned(rig.pid, pins), trio.move_on_after(WARM_UP_S + seconds):
        async with trio.open_nursery() as nursery:
            for tenant in tenants:
                for _ in range(tenant.clients):
                    nursery.start_soon(client, tenant)
    return tenants


def _let_in(path: Path) -> None:
    """Folder and socket are of a daemon of our own, and closed to others."""
    path.parent.chmod(0o711)
    path.chmod(0o666)


async def _ask(connection: Client, request: Request, tokenizer: Tokenizer, tenant: Tenant, counts_from: float) -> None:
    """A prompt counts when its first token comes, and each token when it comes: requests that are cut off do as well."""
    question, first = request.question, True
    fields = {"prompt": question.text, "max_tokens": question.max_tokens, "ignore_eos": True}
    async for event in connection.generate(keep_alive=True, cache_prompt=False, **fields):
        if isinstance(event, Token) and trio.current_time() >= counts_from:
            tenant.generated += 1
            if first:
                tenant.requests += 1
                tenant.prompt_tokens += len(tokenizer.encode(question.text))
        first = False


def connected(path: Path, uid: int) -> socket.socket:
    """A connection whose other end takes us for the user ``uid``.

    By a relative path: that user need not be let into the folders above.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.chdir(path.parent), _effective(uid):
            sock.connect(path.name)
            sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _effective(uid: int) -> Iterator[None]:
    """Holds for the whole process: nothing may be awaited in here."""
    before = os.geteuid()
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before)


def show(tenants: Sequence[Tenant], seconds: float) -> str:
    all_service = sum(tenant.service for tenant in tenants) or 1
    lines = [
        [
            f"user {tenant.uid}", str(tenant.clients), str(tenant.requests), cell(tenant.prompt_tokens, 0), cell(tenant.generated, 0),
            cell(tenant.service / seconds), f"{tenant.service / all_service:.1%}",
        ]
        for tenant in tenants
    ]  # fmt: skip
    least, most = (of(tenant.service for tenant in tenants) for of in (min, max))
    apart = (most - least) / most if most else 0.0
    verdict = "equal" if apart <= FAIR else "NOT EQUAL"
    shown = table(("", "clients", "requests", "prompt tok", "generated", "service / s", "share"), lines)
    return f"{shown}\n\nservice   {verdict}: the least served has {apart:.1%} less than the most served, at most {FAIR:.0%} are allowed"
