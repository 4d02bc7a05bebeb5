"""The pictures of a model's requests: encoded once, and kept for the next turn of their chats, on disk too.

Each principal has encoded pictures of its own: the response time would reveal the pictures of others.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import attrs
import structlog
import trio

from uma_trio.daemon.prompts.fair_limiter import FairLimiter, in_thread
from uma_trio.daemon.prompts.media import Picture
from uma_trio.daemon.store.picture_folder import PictureFileError, PictureFolder
from uma_trio.encoder.encoded import EncodedMedia
from uma_trio.encoder.encoder import Abilities, Projector, SandboxedEncoder, library_version
from uma_trio.encoder.refusals import Refused, TooManyRows
from uma_trio.errors import BadRequest, ContextTooSmall, NoHearing, NoVision
from uma_trio.models.fingerprint import model_fingerprint

log = structlog.get_logger("uma_trio.daemon")

MAX_KEPT: Final = 64
"""Encoded pictures that are kept, each with a file descriptor."""
MAX_KEPT_BYTES: Final = 256 << 20
"""Shared memory of those that are kept."""
MAX_UNWRITTEN: Final = MAX_KEPT
"""Encoded pictures that wait for the disk; others stay in memory only."""
IDLE_S: Final = 300.0
"""After how long without a picture the encoder's process ends: it has the projector's weights in memory."""


@attrs.define(eq=False)
class Pictures:
    """Encodes pictures, those of several principals in turns.

    Args:
        max_tokens: of one request; pictures that have more are refused before all of them are encoded.
        max_whole: rows that one step can compute at once.
        sees, hears: whether there is an encoder for pictures, and one for sound.
    """

    _encoder: SandboxedEncoder
    _max_tokens: int
    _max_whole: int
    sees: bool
    hears: bool
    _turns: FairLimiter = attrs.field(init=False, factory=partial(FairLimiter, 1))
    _reading: FairLimiter = attrs.field(init=False, factory=partial(FairLimiter, 1))
    """Threads that look for a picture, read and write files: none waits for the encoder."""
    _kept: OrderedDict[bytes, EncodedMedia] = attrs.field(init=False, factory=OrderedDict)
    """By ``_key``, the least recently used one first."""
    _in_work: dict[bytes, trio.Event] = attrs.field(init=False, factory=dict)
    """By ``_key``: what is being loaded or encoded, and its end."""
    _folder: PictureFolder | None = attrs.field(init=False, default=None)
    _unwritten: OrderedDict[bytes, EncodedMedia] = attrs.field(init=False, factory=OrderedDict)
    _to_write: trio.Event = attrs.field(init=False, factory=trio.Event)
    _used: trio.Event = attrs.field(init=False, factory=trio.Event)
    """The encoder's process may run."""
    _used_at: float = attrs.field(init=False, default=0.0)
    _n_encoded: int = attrs.field(init=False, default=0)
    _n_found: int = attrs.field(init=False, default=0)
    _n_loaded: int = attrs.field(init=False, default=0)

    def open(self, folder: PictureFolder) -> None:
        """Keep encoded pictures in ``folder``, too."""
        self._folder = folder

    def close(self) -> None:
        """End the encoder's process.  The next picture would start another one."""
        self._encoder.close()

    def snapshot(self) -> dict[str, Any]:
        """Numbers for the metrics."""
        return {
            "encoded_total": self._n_encoded,
            "found_total": self._n_found,
            "loaded_total": self._n_loaded,
            "kept_bytes": self._kept_bytes,
            "disk_bytes": 0 if self._folder is None else self._folder.n_bytes,
        }

    async def run(self) -> None:
        """Write encoded pictures, and end the encoder's process whenever it is idle.  Runs until it is cancelled."""
        self._note_use()  # the process has started with the model
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_idle)
            nursery.start_soon(self._write)

    async def _end_when_idle(self) -> None:
        while True:
            await self._used.wait()
            await trio.sleep_until(self._used_at + IDLE_S)
            if trio.current_time() >= self._used_at + IDLE_S:  # no picture has come meanwhile
                self._used = trio.Event()
                await trio.to_thread.run_sync(self.close)

    async def _write(self) -> None:
        while True:
            await self._to_write.wait()
            self._to_write = trio.Event()
            while self._unwritten and self._folder is not None:
                key, media = self._unwritten.popitem(last=False)
                try:
                    await in_thread(self._folder.add, key, media, limiter=self._reading.of(""))
                except PictureFileError as error:
                    log.warning("an encoded picture stays in memory only", reason=str(error))

    async def encode(self, pictures: list[Picture], *, principal: str, on_disk: bool = False) -> list[EncodedMedia]:
        """Encode the pictures of one request.  Can be cancelled; the one that is being encoded goes on.

        Args:
            on_disk: keep them on disk, too.

        Raises:
            BadRequest: one of them cannot be encoded.
            NoVision, NoHearing: the projector takes no such files.
            ContextTooSmall: they have more tokens than a request may have.
            ModelUnavailable: the encoder does not start.
        """
        encoded: list[EncodedMedia] = []
        n_tokens = 0
        for picture in pictures:
            if picture.is_sound and not self.hears:
                raise NoHearing("this model cannot hear: its projector takes pictures only", field=picture.field)
            if not picture.is_sound and not self.sees:
                raise NoVision("this model cannot see pictures: its projector takes sound only", field=picture.field)
            encoded.append(await self._encode(picture, principal, on_disk))
            largest = max([0, *[block.n for block in encoded[-1].blocks if not block.is_causal]])
            if largest > self._max_whole:
                raise ContextTooSmall(
                    f"the picture has {largest} rows that one step must compute, and a step has {self._max_whole}: send a "
                    "smaller one, or start uma-trio serve with a larger --batch-tokens",
                    field=picture.field,
                )
            n_tokens += len(encoded[-1].tokens)
            if n_tokens > self._max_tokens:
                raise ContextTooSmall(
                    f"the first {len(encoded)} of {len(pictures)} pictures have {n_tokens} tokens, and a request may have "
                    f"{self._max_tokens}: send fewer, or start uma-trio serve with a larger --ctx",
                    field=picture.field,
                )
        return encoded

    async def _encode(self, picture: Picture, principal: str, on_disk: bool) -> EncodedMedia:
        key = await in_thread(self._key, picture.data, principal, limiter=self._reading.of(principal))
        while (end := self._in_work.get(key)) is not None:  # for another request, which may be cancelled
            await end.wait()
        encoded = self._kept.pop(key, None)
        if encoded is not None:
            self._n_found += 1
        else:
            self._in_work[key] = trio.Event()
            try:
                encoded = await self._loaded(key, principal) or await self._newly_encoded(picture, principal)
            finally:
                self._in_work.pop(key).set()
        if on_disk and self._folder is not None and len(self._unwritten) < MAX_UNWRITTEN:
            self._unwritten[key] = encoded
            self._to_write.set()
        self._kept[key] = encoded
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)  # requests that have it keep its file
        return encoded

    def _key(self, data: bytes, principal: str) -> bytes:
        return hashlib.sha256(self._encoder.digest(data) + principal.encode()).digest()

    async def _loaded(self, key: bytes, principal: str) -> EncodedMedia | None:
        """The encoded picture from the folder; ``None`` if it is not there."""
        if self._folder is None:
            return None
        try:
            encoded = await in_thread(self._folder.find, key, limiter=self._reading.of(principal))
        except PictureFileError as error:
            log.warning("an encoded picture cannot be loaded, and is encoded again", reason=str(error))
            return None
        self._n_loaded += encoded is not None
        return encoded

    async def _newly_encoded(self, picture: Picture, principal: str) -> EncodedMedia:
        self._note_use()
        try:
            encoded = await in_thread(
                self._encoder.encode, picture.data, picture.is_sound, limiter=self._turns.of(principal)
            )
        except Refused as error:
            raise BadRequest(f"{picture.field}: {error}", field=picture.field) from None
        except TooManyRows as error:
            raise ContextTooSmall(
                f"the {'sound' if picture.is_sound else 'picture'} has {error.n_tokens} tokens or more, and a request may "
                f"have {self._max_tokens}: send a smaller one, or start uma-trio serve with a larger --ctx",
                field=picture.field,
            ) from None
        finally:
            self._note_use()  # the process may have ended meanwhile, and have been started again for this picture
        self._n_encoded += 1
        return encoded

    def _note_use(self) -> None:
        self._used_at = trio.current_time()
        self._used.set()

    @property
    def _kept_bytes(self) -> int:
        return sum([4 * picture.rows.n * picture.rows.width for picture in self._kept.values()])


@attrs.frozen
class NoPictures:
    """In place of ``Pictures``: the model cannot see."""

    why: str
    sees: Final = False
    hears: Final = False

    def open(self, folder: PictureFolder) -> None:
        """Does nothing: there is nothing to keep."""

    def close(self) -> None:
        """Does nothing: there is no process."""

    def snapshot(self) -> dict[str, Any]:
        """No numbers."""
        return {}

    async def run(self) -> None:
        """Return at once."""

    async def encode(self, pictures: list[Picture], *, principal: str, on_disk: bool = False) -> list[EncodedMedia]:
        """Raise NoVision."""
        raise NoVision(f"this model cannot see pictures: {self.why}", field=pictures[-1].field)


NO_PROJECTOR: Final = NoPictures("it has no projector")


@contextlib.contextmanager
def open_pictures(projector: Projector, max_whole: int, *, waits: bool = False) -> Iterator[Pictures]:
    """What encodes with ``projector``, in a process that ends with the context.  Blocks while it starts.

    Args:
        max_whole: see ``Pictures``.
        waits: the process starts with the first picture, because memory is short.

    Raises:
        CannotStart, Ended: the process does not start, or cannot use the projector.
        OSError: the projector's file cannot be read.
    """
    encoder = SandboxedEncoder(projector, model_fingerprint(projector.path, library_version(projector.llama_dir)))
    with contextlib.closing(encoder):
        able = Abilities.of(projector) if waits else encoder.start()
        yield Pictures(encoder, projector.max_tokens, max_whole, able.sees, able.hears)
