"""The pictures of a model's requests: encoded once, and kept for the next turn of their chats."""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Final

import attrs
import trio

from uma_trio.daemon.prompts.fair_limiter import FairLimiter, in_thread
from uma_trio.daemon.prompts.media import Picture
from uma_trio.encoder.encoder import EncodedMedia, Projector, SandboxedEncoder
from uma_trio.encoder.media_file import Refused
from uma_trio.errors import BadRequest, ContextTooSmall
from uma_trio.models.fingerprint import model_fingerprint

MAX_KEPT: Final = 64
"""Encoded pictures that are kept, each with a file descriptor."""
MAX_KEPT_BYTES: Final = 256 << 20
"""Shared memory of those that are kept."""
IDLE_S: Final = 300.0
"""After how long without a picture the encoder's process ends: it has the projector's weights in memory."""


@attrs.define(eq=False)
class Pictures:
    """Encodes pictures, those of several principals in turns.

    Args:
        max_tokens: of one request; pictures that have more are refused before all of them are encoded.
    """

    _encoder: SandboxedEncoder
    _max_tokens: int
    _turns: FairLimiter = attrs.field(init=False, factory=partial(FairLimiter, 1))
    _kept: OrderedDict[bytes, EncodedMedia] = attrs.field(init=False, factory=OrderedDict)
    """By the SHA-256 of the file, the least recently used one first."""
    _used: trio.Event = attrs.field(init=False, factory=trio.Event)
    """The encoder's process may run."""
    _used_at: float = attrs.field(init=False, default=0.0)

    async def run(self) -> None:
        """End the encoder's process whenever it has been idle for ``IDLE_S``.  Runs until it is cancelled."""
        while True:
            await self._used.wait()
            await trio.sleep_until(self._used_at + IDLE_S)
            if trio.current_time() >= self._used_at + IDLE_S:  # no picture has come meanwhile
                self._used = trio.Event()
                await trio.to_thread.run_sync(self._encoder.close)

    async def encode(self, pictures: list[Picture], *, principal: str) -> list[EncodedMedia]:
        """Encode the pictures of one request.  Can be cancelled; the one that is being encoded goes on.

        Raises:
            BadRequest: one of them cannot be encoded.
            ContextTooSmall: they have more tokens than a request may have.
            ModelUnavailable: the encoder does not start.
        """
        found: list[EncodedMedia] = []
        n_tokens = 0
        for picture in pictures:
            found.append(await self._encode(picture, principal))
            n_tokens += len(found[-1].tokens)
            if n_tokens > self._max_tokens:
                raise ContextTooSmall(
                    f"the first {len(found)} of {len(pictures)} pictures have {n_tokens} tokens, and a request may have "
                    f"{self._max_tokens}: send fewer, or start uma-trio serve with a larger --ctx",
                    field=picture.field,
                )
        return found

    async def _encode(self, picture: Picture, principal: str) -> EncodedMedia:
        digest = hashlib.sha256(picture.data).digest()
        found = self._kept.pop(digest, None)
        if found is None:
            self._used_at = trio.current_time()
            self._used.set()
            try:
                found = await in_thread(self._encoder.encode, picture.data, limiter=self._turns.of(principal))
            except Refused as error:
                raise BadRequest(f"{picture.field}: {error}", field=picture.field) from None
            finally:
                self._used_at = trio.current_time()
                self._used.set()  # the process may have ended meanwhile, and have been started again for this picture
        self._kept[digest] = found
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)  # requests that have it keep its file
        return found

    @property
    def _kept_bytes(self) -> int:
        return sum([4 * each.rows.n * each.rows.width for each in self._kept.values()])


@contextlib.contextmanager
def open_pictures(projector: Projector, max_tokens: int) -> Iterator[Pictures]:
    """What encodes with ``projector``; its process starts with the first picture and ends with the context.

    Args:
        max_tokens: see ``Pictures``.

    Raises:
        OSError: the projector's file cannot be read.
    """
    encoder = SandboxedEncoder(projector, model_fingerprint(projector.path))
    with contextlib.closing(encoder):
        yield Pictures(encoder, max_tokens)
