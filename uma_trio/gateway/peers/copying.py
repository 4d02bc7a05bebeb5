"""Copies the files of a session that a peer has given."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from uma_trio.gateway.peers.channel import Channel, PeerSilent
from uma_trio.gateway.peers.messages import CHUNK_BYTES, FileOffer, PeerQuestion

PART_S: Final = 60.0
"""How long a part may take."""
TRIES: Final = 3
"""For each part."""


@contextlib.asynccontextmanager
async def temporary_folder(parent: Path) -> AsyncIterator[Path]:
    """A folder for files that arrive, which is removed at the end.

    Raises:
        OSError: it cannot be made.
    """
    folder = Path(await anyio.to_thread.run_sync(_make, parent))
    try:
        yield folder
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))


def _make(parent: Path) -> str:
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return tempfile.mkdtemp(dir=parent)


async def copy_file(channel: Channel, url: str, given: PeerQuestion, file: FileOffer, target: Path) -> None:
    """Copy a file, part by part.  A part that does not come is asked for again.

    Args:
        given: the question with which the session was given.

    Raises:
        PeerSilent, PeerRefused: it does not come.
        OSError: it cannot be written.
    """
    question = msgspec.structs.replace(given, action="read", kind=file.kind)
    async with await anyio.open_file(target, "xb") as sink:
        n_tries = 0
        while question.offset < file.n_bytes:
            try:
                part = await channel.post(url, question, PART_S)
            except PeerSilent:
                n_tries += 1
                if n_tries == TRIES:
                    raise
                continue
            if not 0 < len(part) <= min(CHUNK_BYTES, file.n_bytes - question.offset):
                raise PeerSilent(f"{url} sends {len(part)} bytes where others belong")
            await sink.write(part)
            question.offset += len(part)
            n_tries = 0


def read_part(path: str, offset: int) -> bytes:
    """A part of a file of a session that was given.  Blocks."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)
