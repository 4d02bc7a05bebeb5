"""What a start does first, and what it leaves for later: clients wait, and a busy machine has little time."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from uma_trio.config import Config
from uma_trio.daemon import gateway_process as gateway
from uma_trio.daemon.gateway_process import FIRST_STANDBY_S, Gateway

SERVE = """
import pathlib, sys
from uma_trio.connect.reasons import is_locked
from uma_trio.daemon.engines.process import EngineProcess

def start():
    large = ("uma_trio.daemon.server", "uma_trio.engine.llama", "uma_trio.daemon.serving", "numpy", "structlog")
    print("imported before:", [name for name in large if name in sys.modules])
    print("a client sees that it loads:", is_locked(pathlib.Path(sys.argv[1])))
    sys.exit()

EngineProcess.start = start
from uma_trio.cli import main
main(["serve", "--socket", sys.argv[1], *sys.argv[2:]])
"""


def test_the_engine_is_started_before_the_daemon_imports_its_libraries(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE, str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "imported before: []\na client sees that it loads: True\n", done.stderr


@attrs.define(eq=False)
class FakeProcess:
    """A gateway that runs until it is killed."""

    ready: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    has_begun: bool = False
    cannot_start: str | None = None
    was_killed: bool = True

    def begin(self) -> None:
        self.has_begun = True

    async def wait(self) -> str:
        await self.ended.wait()
        return "it was killed"

    def kill(self) -> None:
        self.ended.set()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """The processes that were started."""
    processes: list[FakeProcess] = []

    def start(*_: object, **__: object) -> FakeProcess:
        processes.append(FakeProcess())
        return processes[-1]

    monkeypatch.setattr(gateway.ChildProcess, "of_module", start)
    return processes


async def test_the_first_standby_is_started_when_the_models_serve(
    autojump_clock, nursery: trio.Nursery, started: list[FakeProcess]
) -> None:
    """Before, the models and the clients that have waited need the time.  Later ones follow as soon as they can."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        supervised = Gateway(Config(), sock, Path("uma.sock"))
        nursery.start_soon(supervised.run)
        await trio.testing.wait_all_tasks_blocked()
        started[0].ready.set()
        await trio.sleep(1000)
        assert [each.has_begun for each in started] == [True], "the models are being loaded"
        supervised.models_serve()
        await trio.sleep(FIRST_STANDBY_S / 2)
        assert len(started) == 1
        await trio.sleep(FIRST_STANDBY_S)
        assert [each.has_begun for each in started] == [True, False]
        started[0].kill()
        await trio.testing.wait_all_tasks_blocked()
        started[1].ready.set()
        await trio.testing.wait_all_tasks_blocked()
        assert [each.has_begun for each in started] == [True, True, False], "the next standby does not wait"
        nursery.cancel_scope.cancel()
