"""Publishes the blocks of one model over ZeroMQ: the event loop notes prefixes, and a thread tells of them.

The thread takes the newest state, however many have passed meanwhile, and publishes how it differs from the last one
that it took.  So nothing queues up, and subscribers that are slow or absent cost the daemon nothing: ZeroMQ drops their
messages, and they notice by the sequence numbers.

A batch that begins with ``AllBlocksCleared`` and goes on with everything that is there tells the whole state.  It is
published for each new subscriber, and when the batches since the last one take too much memory.  What can be replayed
are the batches since the last one, so that a replay always leads to the current state.

Needs the extra: ``pip install 'uma-trio[kv-events]'``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import structlog

from uma_trio.config import Config
from uma_trio.daemon.kv.cache import KvCache
from uma_trio.daemon.kv.held_prefixes import HeldPrefix, HeldPrefixes
from uma_trio.daemon.kv_events.blocks import BlockIndex
from uma_trio.daemon.kv_events.wire import BLOCK_TOKENS, Event, EventBatch, encode

log = structlog.get_logger("uma_trio.daemon")

TOPIC: Final = b""
END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
MAX_BATCHES: Final = 10_000
"""Batches for replay; after them, the whole state is published."""
MAX_REPLAY_BYTES: Final = 16 * 1024 * 1024
"""The same for their bytes, unless the whole state alone is larger."""
PAUSE_S: Final = 0.0005
"""Sleep of the thread after some of its work.  Releasing the GIL alone is not enough: it would take it again at once."""
WHOLE_EVERY_S: Final = 1.0
"""Shortest time between two batches with the whole state for new subscribers."""
MAX_REQUEST_BYTES: Final = 1024
"""Largest message that a subscriber may send."""
CLOSE_TIMEOUT_S: Final = 2.0

_ADDRESS: Final = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):(?P<port>[0-9]{1,5})", re.ASCII)


class KvEventsError(Exception):
    """The events cannot be published.  The message says why, and what helps."""


class KvEventPublisher:
    """Publishes until it is closed.

    Args:
        address: of the PUB socket, ``tcp://HOST:PORT``.
        replay_address: of the ROUTER socket; ``None``: nothing can be replayed.

    Raises:
        KvEventsError: pyzmq is missing, or an address cannot be used.
    """

    def __init__(self, address: str, replay_address: str | None = None) -> None:
        try:
            import zmq
        except ImportError as error:
            raise KvEventsError(f"pip install 'uma-trio[kv-events]' is needed for --kv-events: {error}") from None
        self._zmq: Any = zmq
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.XPUB, address, "--kv-events")
            self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
            self._replay = None
            if replay_address is not None:
                self._replay = self._bind(zmq.ROUTER, replay_address, "--kv-events-replay")
                self._replay.setsockopt(zmq.SNDHWM, 2 * MAX_BATCHES)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._held: HeldPrefixes | None = None
        self._latest: list[HeldPrefix] | None = None
        """What the thread is to publish; ``None`` if it has taken it."""
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._closing = False
        self._blocks = BlockIndex(lambda: time.sleep(PAUSE_S))
        self._next_number = 0
        self._kept: list[tuple[int, bytes]] = []
        """Batches for replay.  The first one has the whole state of its time."""
        self._kept_bytes = 0
        self._wants_whole = True
        self._whole_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="uma-trio kv events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, address: str, flag: str) -> Any:
        sock = self._context.socket(kind)
        sock.setsockopt(self._zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        sock.setsockopt(self._zmq.LINGER, 100)
        try:
            sock.bind(address)
        except self._zmq.ZMQError as error:
            raise KvEventsError(f"{flag} {address}: {error.strerror}; choose another address or port") from None
        return sock

    @property
    def addresses(self) -> tuple[str, str | None]:
        """Where the sockets are bound: with the ports that port 0 took."""
        kind = self._zmq.LAST_ENDPOINT
        replay = None if self._replay is None else self._replay.getsockopt(kind).rstrip(b"\0").decode()
        return self._pub.getsockopt(kind).rstrip(b"\0").decode(), replay

    @contextlib.contextmanager
    def following(self, cache: KvCache) -> Iterator[Callable[[], None]]:
        """Publish what ``cache`` holds, and at the end that nothing is there.

        Yields a function to call when that may have changed.  It never blocks, and costs microseconds while nothing has
        changed.  A model that is loaded again is followed from then on, also while its old copy still serves.
        """
        held = self._held = cache.held_prefixes(BLOCK_TOKENS)

        def note() -> None:
            if self._held is held and (changed := held.changed()) is not None:
                self._publish_soon(changed)

        try:
            yield note
        finally:
            if self._held is held:
                self._held = None
                self._publish_soon([])

    def _publish_soon(self, prefixes: list[HeldPrefix]) -> None:
        self._latest = prefixes
        self._wake()

    def close(self) -> None:
        """Publish what is left, and close the sockets.  Blocks for at most ``CLOSE_TIMEOUT_S``."""
        self._closing = True
        self._wake()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the thread of the KV events does not end")
            return
        os.close(self._woken)
        os.close(self._waker)

    def _wake(self) -> None:
        try:
            os.write(self._waker, b"\0")
        except BlockingIOError:
            pass  # it has yet to wake up for so many others
        except OSError:
            log.debug("the thread of the KV events has ended")

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # a bug in the events must not stop the daemon
            log.exception("there are no KV events any more; the daemon continues")
        finally:
            self._context.destroy(linger=100)

    def _serve(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        for sock in (self._woken, self._pub, self._replay):
            if sock is not None:
                poller.register(sock, zmq.POLLIN)
        while True:
            closing = self._closing
            self._publish_latest()
            if closing:
                return
            wait_s = max(0.0, self._whole_at + WHOLE_EVERY_S - time.monotonic()) if self._wants_whole else None
            ready = dict(poller.poll(None if wait_s is None else round(1e3 * wait_s) + 1))
            if self._woken in ready:
                os.read(self._woken, 4096)
            if self._pub in ready and self._pub.recv()[:1] == b"\1":
                self._wants_whole = True
            if self._replay is not None and self._replay in ready:
                self._send_replay(self._replay.recv_multipart())

    def _publish_latest(self) -> None:
        latest, self._latest = self._latest, None
        events = [] if latest is None else self._blocks.update(latest)
        is_due = self._wants_whole and time.monotonic() >= self._whole_at + WHOLE_EVERY_S
        is_full = len(self._kept) >= MAX_BATCHES or self._kept_bytes > max(MAX_REPLAY_BYTES, 4 * self._whole_bytes)
        if is_due or (events and is_full) or not self._kept:
            self._kept.clear()
            self._kept_bytes = 0
            self._wants_whole = False
            self._whole_at = time.monotonic()
            self._publish(self._blocks.everything())
        elif events:
            self._publish(events)

    @property
    def _whole_bytes(self) -> int:
        return len(self._kept[0][1]) if self._kept else 0

    def _publish(self, events: list[Event]) -> None:
        number, payload = self._next_number, encode(EventBatch(time.time(), events))
        self._next_number += 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        self._pub.send_multipart([TOPIC, number.to_bytes(8, "big"), payload])

    def _send_replay(self, frames: list[bytes]) -> None:
        """Send all batches from a number on; all that are kept if they begin later, or if nothing has this number yet."""
        assert self._replay is not None
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        peer, _, start = frames[0], frames[1], int.from_bytes(frames[2], "big")
        if start > self._next_number:  # of an earlier daemon
            start = 0
        for number, payload in self._kept:
            if number >= start:
                self._replay.send_multipart([peer, b"", number.to_bytes(8, "big"), payload])
        self._replay.send_multipart([peer, b"", END_OF_REPLAY, b""])


@contextlib.contextmanager
def kv_events(config: Config) -> Iterator[KvEventPublisher | None]:
    """The publisher that the settings ask for, closed at the end; ``None`` if they ask for none.

    Raises:
        KvEventsError: it cannot be had.
    """
    listen = config.listen
    if listen.kv_events is None:
        if listen.kv_events_replay is not None:
            raise KvEventsError("--kv-events-replay needs --kv-events tcp://HOST:PORT, whose events it repeats")
        yield None
        return
    for flag, address in (("--kv-events", listen.kv_events), ("--kv-events-replay", listen.kv_events_replay)):
        if address is not None:
            check_address(flag, address, exposed=listen.kv_events_exposed)
    publisher = KvEventPublisher(listen.kv_events, listen.kv_events_replay)
    own, replay = publisher.addresses
    log.info("KV events", address=own, replay=replay)
    try:
        yield publisher
    finally:
        publisher.close()


def check_address(flag: str, address: str, *, exposed: bool) -> None:
    """Check the address of a socket.

    Args:
        exposed: other machines may reach it.

    Raises:
        KvEventsError: it has another form than ``tcp://HOST:PORT``, or is not of this machine alone.
    """
    form = _ADDRESS.fullmatch(address)
    if form is None or int(form["port"]) >= 1 << 16:
        raise KvEventsError(f"{flag} {address!r} is not tcp://HOST:PORT; tcp://127.0.0.1:5557 is an example")
    host = form["host"].strip("[]")
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not exposed:
        raise KvEventsError(
            f"{flag} {address}: KV events contain the tokens of all prompts, and every machine that reaches this address "
            "can read them: use tcp://127.0.0.1:PORT, or add --kv-events-exposed to allow that"
        )
