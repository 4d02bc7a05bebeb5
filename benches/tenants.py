"""Measure the service of two users with different numbers of clients: does each get half?

Used by ``goodput.py --tenants``.  The daemon knows users by the user id of their process, so this module connects with
two user ids, which need not exist.  Only root may do so.
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
from uma_trio.tokenizer.tokenizer import Tokenizer

FIRST_UID = 60_001
PER_GENERATED = 2
"""Weight of a generated token relative to a prompt token, as in ``uma_trio.daemon.policy.fairness``."""
WARM_UP_S = 3.0
"""Time at the beginning that does not count, because all clients start together."""
FAIR = 0.1
"""Largest relative difference between the shares."""


def why_not() -> str | None:
    """The reason why this process cannot use other user ids; ``None`` if it can."""
    if not hasattr(os, "seteuid"):
        return "this system has no user ids"
    if os.geteuid() != 0:
        return "only root can connect with other user ids; use sudo or a container"
    return None


@attrs.define(kw_only=True)
class User:
    """One user and its service."""

    uid: int
    clients: int
    requests: int = 0
    """Requests whose first token arrived in the time that counts."""
    prompt_tokens: int = 0
    generated: int = 0

    @property
    def service(self) -> int:
        """Weighted tokens."""
        return self.prompt_tokens + PER_GENERATED * self.generated


async def share(
    rig: Rig, mix: Mix, tokenizer: Tokenizer, sizes: Sequence[int], *, seconds: float, seed: int, pins: Pins | None
) -> list[User]:
    """Run clients of two users, which send one request after another, for ``seconds``.

    Args:
        sizes: number of clients of each user.
    """
    assert isinstance(rig.transport, Daemon)
    path = Path(rig.transport.path)
    _open_to_all(path)
    users = [User(uid=FIRST_UID + n, clients=clients) for n, clients in enumerate(sizes)]
    requests = mix.requests(seed)
    counts_from = trio.current_time() + WARM_UP_S

    async def client(user: User) -> None:
        async with await anyio.abc.UNIXSocketStream.from_socket(connected(path, user.uid)) as stream:
            connection = Client(stream)
            for request in requests:
                await _ask(connection, request, tokenizer, user, counts_from)

    with pinned(rig.pid, pins), trio.move_on_after(WARM_UP_S + seconds):
        async with trio.open_nursery() as nursery:
            for user in users:
                for _ in range(user.clients):
                    nursery.start_soon(client, user)
    return users


def _open_to_all(path: Path) -> None:
    """Give other users access to the socket, which belongs to a temporary daemon."""
    path.parent.chmod(0o711)
    path.chmod(0o666)


async def _ask(connection: Client, request: Request, tokenizer: Tokenizer, user: User, counts_from: float) -> None:
    """Send a request.  The prompt counts with the first token, so that requests without an end count too."""
    question, first = request.question, True
    fields = {"prompt": question.text, "max_tokens": question.max_tokens, "ignore_eos": True}
    async for event in connection.generate(keep_alive=True, cache_prompt=False, **fields):
        if isinstance(event, Token) and trio.current_time() >= counts_from:
            user.generated += 1
            if first:
                user.requests += 1
                user.prompt_tokens += len(tokenizer.encode(question.text))
        first = False


def connected(path: Path, uid: int) -> socket.socket:
    """Connect as the user ``uid``.

    Uses a relative path, since that user may have no access to the parent folders.
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
    """Set the effective user id of the whole process.  The block must not await anything."""
    before = os.geteuid()
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before)


def show(users: Sequence[User], seconds: float) -> str:
    """A row for each user, and a verdict."""
    total = sum(user.service for user in users) or 1
    lines = [
        [
            f"user {user.uid}", str(user.clients), str(user.requests), cell(user.prompt_tokens, 0), cell(user.generated, 0),
            cell(user.service / seconds), f"{user.service / total:.1%}",
        ]
        for user in users
    ]  # fmt: skip
    least, most = (of(user.service for user in users) for of in (min, max))
    difference = (most - least) / most if most else 0.0
    verdict = "equal" if difference <= FAIR else "NOT EQUAL"
    shown = table(("", "clients", "requests", "prompt tok", "generated", "service / s", "share"), lines)
    return f"{shown}\n\nservice   {verdict}: the least served user has {difference:.1%} less than the other; at most {FAIR:.0%} are allowed"
