"""Room for large frames: who gets it, and that all of it comes back."""

from __future__ import annotations

import pytest

from uma_trio.daemon.doors.frame_room import FREE_BYTES, LEAST_FRAMES, FrameRoom, HeldFrames, room_bytes
from uma_trio.errors import QueueFull
from uma_trio.protocol.peer import OWN_PRINCIPAL

MIB = 1 << 20


def test_a_principal_leaves_others_as_much_as_it_has() -> None:
    room = FrameRoom(64 * MIB)
    room.take("ada", 16 * MIB)
    room.take("ada", 16 * MIB)
    with pytest.raises(QueueFull) as refused:
        room.take("ada", 16 * MIB)
    assert refused.value.retry_after_ms
    room.take("ben", 16 * MIB)
    room.take(OWN_PRINCIPAL, 16 * MIB)
    with pytest.raises(QueueFull):
        room.take(OWN_PRINCIPAL, 1)
    for principal, n_bytes in (("ada", 32), ("ben", 16), (OWN_PRINCIPAL, 16)):
        room.give_back(principal, n_bytes * MIB)
    room.take(OWN_PRINCIPAL, 64 * MIB)


def test_a_connection_holds_room_from_the_first_byte_to_the_end_of_the_request() -> None:
    room = FrameRoom(16 * MIB)
    held = HeldFrames(room, OWN_PRINCIPAL)

    def has_room(n_bytes: int) -> bool:
        try:
            room.take("probe", n_bytes)
        except QueueFull:
            return False
        room.give_back("probe", n_bytes)
        return True

    held.arrive(FREE_BYTES)
    assert has_room(16 * MIB), "small frames need none"
    held.arrive(10 * MIB)
    held.arrive(10 * MIB)
    assert has_room(6 * MIB)
    assert not has_room(7 * MIB)
    held.handled(runs=True)
    assert not has_room(7 * MIB)
    held.arrive(4 * MIB)
    held.handled(runs=False)
    assert (has_room(6 * MIB), has_room(7 * MIB)) == (True, False)
    held.ended()
    assert has_room(16 * MIB)
    held.arrive(10 * MIB)
    held.handled(runs=True)
    held.arrive(4 * MIB)
    held.close()
    assert has_room(16 * MIB)


def test_any_machine_has_room_for_some_frames() -> None:
    assert room_bytes(16 * MIB) >= LEAST_FRAMES * 16 * MIB
    assert room_bytes(1 << 50) == LEAST_FRAMES << 50
