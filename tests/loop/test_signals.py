"""What the daemon does with each signal, and what it logs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import structlog
import trio
import trio.testing

from uma_trio.config import Config
from uma_trio.daemon import server
from uma_trio.daemon.doors.claim import Claim
from uma_trio.daemon.notifier import Notifier
from uma_trio.daemon.server import _SignalHandler, _write_file


async def test_more_signals_than_two_add_nothing() -> None:
    async def signals():
        for _ in range(4):
            await trio.lowlevel.checkpoint()
            yield signal.SIGINT

    stop = trio.CancelScope()
    handler = _SignalHandler(Config(), Path("uma.sock"), stop, Notifier({}))
    with structlog.testing.capture_logs() as logged:
        await handler.run(signals())
    assert [line["event"] for line in logged] == ["draining; a second signal stops at once", "stopping at once"]
    assert stop.cancel_called
    assert not handler.should_load()


def test_a_snapshot_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "uma-metrics.json"
    target.mkdir()  # what replaces it fails, as writing does on a full disk
    with pytest.raises(OSError, match="directory"):
        _write_file(target, b"{}\n")
    assert [*tmp_path.iterdir()] == [target]


async def test_a_signal_at_the_end_of_loading_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)  # after the last question whether loading should continue
        await trio.testing.wait_all_tasks_blocked()
        return True

    async def serve_loaded(*_: object) -> None:
        raise AssertionError("it serves, and nobody will send a second signal")

    monkeypatch.setattr(server.ModelRegistry, "start", start)
    monkeypatch.setattr(server, "_serve_loaded", serve_loaded)
    assert await server.serve(Config(), Claim(tmp_path / "uma.sock"))
