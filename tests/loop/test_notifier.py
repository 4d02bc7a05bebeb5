"""What the daemon reports to a service manager, over real sockets and in virtual time."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import trio

from uma_trio.daemon.notifier import Notifier


class Manager:
    """The receiving end of a service manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + address[1:] if address.startswith("@") else address)
        self._sock.setblocking(False)

    def received(self) -> list[str]:
        """Messages since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._sock.recv(4096).decode())
        return found

    def close(self) -> None:
        self._sock.close()


@pytest.fixture(params=["a file", "an abstract name"])
def manager(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Manager]:
    found = Manager(str(tmp_path / "notify") if request.param == "a file" else f"@uma-trio-test-{os.getpid()}")
    yield found
    found.close()


def test_states_are_reported_and_the_variables_are_removed(manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "5", "WATCHDOG_PID": "1", "HOME": "/"}
    notifier = Notifier(environment)
    assert environment == {"HOME": "/"}
    notifier.report("READY=1", "STATUS=serving")
    assert manager.received() == ["READY=1\nSTATUS=serving"]


async def test_the_watchdog_is_pinged_twice_in_its_time(
    autojump_clock: trio.testing.MockClock, manager: Manager
) -> None:
    notifier = Notifier(
        {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notifier.ping_forever)
        await trio.sleep(0.5)
        for _ in range(20):
            assert manager.received() == ["WATCHDOG=1"]
            await trio.sleep(1)
        nursery.cancel_scope.cancel()


async def test_a_full_queue_does_not_block_the_event_loop(
    autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    manager = Manager(str(tmp_path / "notify"))
    notifier = Notifier({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "2000000"})
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notifier.ping_forever)
            await trio.sleep(2000)
            nursery.cancel_scope.cancel()
    assert 0 < len(manager.received()) < 2000
    assert [line["message"] for line in logs] == ["WATCHDOG=1"]  # the first failure, and none of the 1,900 others
    manager.close()


@pytest.mark.parametrize(
    "watchdog", [{}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}]
)
async def test_without_a_watchdog_there_are_no_pings(watchdog: dict[str, str], tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    await Notifier({"NOTIFY_SOCKET": manager.address, **watchdog}).ping_forever()
    assert manager.received() == []
    manager.close()


async def test_without_a_service_manager_nothing_happens() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "1000"})
    notifier.report("READY=1")
    await notifier.ping_forever()


def test_a_service_manager_that_has_gone_is_logged(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).report("READY=1")
    assert [(line["event"], line["message"]) for line in logs] == [("cannot notify the service manager", "READY=1")]


def test_a_path_in_a_state_cannot_spoil_it(manager: Manager) -> None:
    path = os.fsdecode(b"/tmp/\xff.sock\nSTOPPING=1")
    Notifier({"NOTIFY_SOCKET": manager.address}).report("READY=1", f"STATUS=serving on {path}")
    assert manager.received() == ["READY=1\nSTATUS=serving on /tmp/?.sock STOPPING=1"]


async def test_the_shortest_interval_between_pings(autojump_clock: trio.testing.MockClock, manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1"})
    with trio.move_on_after(0.035):
        await notifier.ping_forever()
    assert manager.received() == ["WATCHDOG=1"] * 4
