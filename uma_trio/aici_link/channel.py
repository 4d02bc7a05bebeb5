"""Channels between an engine and an AICI runtime: one message at a time, in shared memory.

Two variants have the same messages: named semaphores, which every POSIX system has, and futexes, on Linux.  The engine
creates the channels, then starts the runtime, which opens them.  docs/AICI.md has names and layout.

No wait lasts longer than its timeout, and none spins.
"""

from __future__ import annotations

import contextlib
import struct
import time
from typing import Final, Protocol

import attrs
import posix_ipc

from uma_trio.aici_link import futex
from uma_trio.aici_link.shared_memory import MODE, SharedMemory, inode, unlink_semaphore

MIB: Final = 1 << 20

LENGTH: Final = struct.Struct("<I")
EMPTY: Final = 0
BEING_WRITTEN: Final = 0xFFFFFFFF

PIECE_BYTES: Final = 1 << 18
"""Larger messages are copied in pieces of this size, so that other threads need not wait for the whole."""

POLL_S: Final = 0.002
"""How often to look where nobody wakes us: semaphores of macOS, a peer that empties its mailbox without a word."""


class ChannelTimeout(Exception):
    """The peer did not read, or did not write, in time."""


class BrokenChannel(Exception):
    """What the peer wrote cannot be a message."""


class MessageTooLarge(Exception):
    """The message does not fit into the shared memory."""


class Mailbox(Protocol):
    """Room for one message in one direction.  One thread at a time."""

    capacity: int
    """Size of the largest message, in bytes."""

    def send(self, data: bytes | bytearray, timeout: float) -> None:
        """Wait until the mailbox is free, and write.

        Raises:
            ChannelTimeout: the peer did not read in time.
            MessageTooLarge: ``data`` is larger than ``capacity``.
            OSError: no room in shared memory.
        """
        ...

    def receive(self, timeout: float) -> bytes:
        """Wait for a message, and take it.

        Raises:
            ChannelTimeout: the peer did not write in time.
            BrokenChannel: what it wrote cannot be a message.
        """
        ...

    def unlink(self) -> None: ...
    def close(self) -> None: ...


class SemaphoreMailbox:
    """A message in a memory of its own; one semaphore says that the mailbox is free, another that there is a message."""

    def __init__(self, name: str, size: int, *, create: bool) -> None:
        with contextlib.ExitStack() as stack:
            self._memory = SharedMemory(f"{name}-shm", size, create=create)
            stack.callback(self._memory.close)
            self._free = _Semaphore(f"{name}-wr", 1, create=create)
            stack.callback(self._free.close)
            self._ready = _Semaphore(f"{name}-rd", 0, create=create)
            stack.pop_all()
        self.capacity = size - LENGTH.size

    def send(self, data: bytes | bytearray, timeout: float) -> None:
        _check_fits(data, self.capacity)
        self._memory.reserve(0, LENGTH.size + len(data))
        self._free.acquire(timeout)
        _copy(data, self._memory, LENGTH.size)
        LENGTH.pack_into(self._memory.map, 0, len(data))
        self._ready.release()

    def receive(self, timeout: float) -> bytes:
        self._ready.acquire(timeout)
        (length,) = LENGTH.unpack_from(self._memory.map)
        try:
            if length > self.capacity:
                raise BrokenChannel(f"a message of {length} bytes; the largest has {self.capacity}")
            return self._memory.map[LENGTH.size : LENGTH.size + length]
        finally:
            LENGTH.pack_into(self._memory.map, 0, EMPTY)
            self._free.release()

    def unlink(self) -> None:
        for part in (self._memory, self._free, self._ready):
            part.unlink()

    def close(self) -> None:
        for part in (self._memory, self._free, self._ready):
            part.close()


class FutexMailbox:
    """A message in one half of a memory.  Its length is the word that the reader waits for."""

    def __init__(self, memory: SharedMemory, offset: int) -> None:
        self._memory = memory
        self._begin = offset + LENGTH.size
        self._word = futex.Word(memory.map, offset)
        self.capacity = memory.size // 2 - 16

    def send(self, data: bytes | bytearray, timeout: float) -> None:
        _check_fits(data, self.capacity)
        self._memory.reserve(self._begin, self._begin + len(data))
        deadline = time.monotonic() + timeout
        while (value := self._word.load()) != EMPTY:
            # a peer need not wake us, so this looks again and again
            self._word.wait_while(value, min(_left(deadline), POLL_S))
        self._word.store(BEING_WRITTEN)
        _copy(data, self._memory, self._begin)
        self._word.store(len(data))

    def receive(self, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while (length := self._word.load()) in (EMPTY, BEING_WRITTEN):
            self._word.wait_while(length, _left(deadline))
        try:
            if length > self.capacity:
                raise BrokenChannel(f"a message of {length} bytes; the largest has {self.capacity}")
            return self._memory.map[self._begin : self._begin + length]
        finally:
            self._word.store(EMPTY)

    def unlink(self) -> None:
        self._memory.unlink()

    def close(self) -> None:
        self._word.release()
        self._memory.close()


@attrs.frozen
class Channel:
    """Both directions, as one side sees them.  One thread may send while another one receives."""

    outgoing: Mailbox
    incoming: Mailbox


@attrs.frozen
class Channels:
    """All that an engine shares with a runtime."""

    main: Channel
    side: Channel
    biases: SharedMemory

    def unlink(self) -> None:
        """Remove the names.  Both sides can go on."""
        for mailbox in self._mailboxes():
            mailbox.unlink()
        self.biases.unlink()

    def close(self) -> None:
        """Unmap everything.  No thread may use it any more."""
        for mailbox in self._mailboxes():
            mailbox.close()
        self.biases.close()

    def _mailboxes(self) -> tuple[Mailbox, ...]:
        return (self.main.outgoing, self.main.incoming, self.side.outgoing, self.side.incoming)


@attrs.frozen
class Layout:
    """Names, sizes and variant: what both sides must agree on."""

    prefix: str
    """Begins with ``/``.  At most 18 characters on macOS."""
    json_mib: int
    """Size of each memory for messages."""
    bin_mib: int
    """Size of the memory for biases."""
    futex: bool = False

    def create(self) -> Channels:
        """The engine's side.  Names that exist are taken over.

        Raises:
            OSError: see ``SharedMemory``.
        """
        return self._make(is_engine=True)

    def open(self) -> Channels:
        """The runtime's side.  With futexes, the names are gone afterwards.

        Raises:
            OSError: see ``SharedMemory``.
        """
        channels = self._make(is_engine=False)
        if self.futex:
            channels.unlink()
        return channels

    def _make(self, *, is_engine: bool) -> Channels:
        if self.futex and not futex.is_supported():
            raise OSError("there are no futexes on this system; leave --futex out")
        with contextlib.ExitStack() as stack:
            biases = SharedMemory(f"{self.prefix}bin-shm", self.bin_mib * MIB, create=is_engine)
            stack.callback(biases.close)
            if is_engine:
                biases.lock()
            pairs: list[Channel] = []
            for suffix in ("", "-side"):
                command = self._mailbox(f"cmd{suffix}", second_half=False, create=is_engine)
                stack.callback(command.close)
                response = self._mailbox(f"resp{suffix}", second_half=True, create=is_engine)
                stack.callback(response.close)
                pairs.append(Channel(command, response) if is_engine else Channel(response, command))
            stack.pop_all()
        return Channels(pairs[0], pairs[1], biases)

    def _mailbox(self, name: str, *, second_half: bool, create: bool) -> Mailbox:
        size = self.json_mib * MIB
        if not self.futex:
            return SemaphoreMailbox(self.prefix + name, size, create=create)
        memory = SharedMemory(self.prefix + name, size, create=create)
        return FutexMailbox(memory, size // 2 if second_half else 0)


class _Semaphore:
    def __init__(self, name: str, value: int, *, create: bool) -> None:
        if create:
            unlink_semaphore(name)
        flags = posix_ipc.O_CREX if create else posix_ipc.O_CREAT
        try:
            self._semaphore = posix_ipc.Semaphore(name, flags, mode=MODE, initial_value=value)
        except (posix_ipc.Error, ValueError) as error:
            raise OSError(f"cannot open the semaphore {name}: {error}") from None
        self._name = name
        self._inode = inode(self._file)

    def acquire(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                if posix_ipc.SEMAPHORE_TIMEOUT_SUPPORTED:
                    self._semaphore.acquire(max(deadline - time.monotonic(), 0.0))
                else:
                    self._semaphore.acquire(0)
            except posix_ipc.SignalError:
                continue
            except posix_ipc.BusyError:
                left = _left(deadline)
                if not posix_ipc.SEMAPHORE_TIMEOUT_SUPPORTED:
                    time.sleep(min(left, POLL_S))
            else:
                return

    def release(self) -> None:
        self._semaphore.release()

    def unlink(self) -> None:
        if inode(self._file) in (None, self._inode):
            unlink_semaphore(self._name)

    def close(self) -> None:
        self._semaphore.close()

    @property
    def _file(self) -> str:
        return "sem." + self._name.removeprefix("/")


def _check_fits(data: bytes | bytearray, capacity: int) -> None:
    if len(data) > capacity:
        raise MessageTooLarge(f"a message of {len(data)} bytes; the largest has {capacity}")


def _copy(data: bytes | bytearray, memory: SharedMemory, begin: int) -> None:
    """Write ``data`` at ``begin``."""
    if len(data) <= PIECE_BYTES:
        memory.map[begin : begin + len(data)] = data
        return
    whole = memoryview(data)
    for at in range(0, len(data), PIECE_BYTES):
        piece = whole[at : at + PIECE_BYTES]
        memory.map[begin + at : begin + at + len(piece)] = piece
        time.sleep(0)  # lets other threads run


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise ChannelTimeout
    return left
