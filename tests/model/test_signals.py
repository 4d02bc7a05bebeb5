"""Signals to the real daemon."""

from __future__ import annotations

import json
import os
import pty
import signal
import stat
import sys
import time

import pytest

from tests.support.profile import sampled
from tests.support.real_daemon import LONG_CTX, real_daemon, started, wait_ready

ON_A_TERMINAL = (
    *(sys.executable, "-ISc"),
    "import os, sys; os.setsid(); os.dup2(os.open(sys.argv[1], os.O_RDWR), 0); os.execvp(sys.argv[2], sys.argv[2:])",
)
"""Command prefix: the terminal becomes the controlling one, and standard input."""

DRAINING = "draining; a second signal stops at once"
SHORT = {"prompt": "Hello", "max_tokens": 30, "ignore_eos": True}

SLOW_LOADING = """
import pathlib, sys, time
from uma_trio.daemon.engines import loaded
check = loaded.check_gguf
def slowly(path):
    pathlib.Path({marker!r}).touch()
    while pathlib.Path({marker!r}).exists():
        time.sleep(0.01)
    return check(path)
loaded.check_gguf = slowly
from uma_trio.cli import main
main(["serve", *sys.argv[1:]])
"""
"""``uma-trio serve`` with a model that loads while there is a file."""


@pytest.mark.parametrize("number", sampled([signal.SIGTERM, signal.SIGINT], 2))
def test_the_first_signal_lets_streams_finish(library, tmp_path, number):
    with real_daemon(folder=tmp_path) as daemon:
        with daemon.wire() as wire, daemon.wire() as idle:
            wire.send(id="a", keep_alive=True, prompt="Hello", max_tokens=250, ignore_eos=True)
            assert wire.receive()["event"] == "token"
            daemon.signal(number)
            codes = [each["code"] for each in idle.rest()]
            assert codes == ["E_RUNTIME_SHUTDOWN"], "a connection without a request is closed"
            answer = wire.answer()
            assert (answer.reason, len(answer.ids)) == ("length", 249)
            assert wire.rest() == []
        assert daemon.wait() == 0
    assert not (tmp_path / "uma.sock").exists()
    events = daemon.events_logged()
    assert events[-1] == "stopped"
    assert DRAINING in events


def test_a_draining_daemon_accepts_no_connections(library, tmp_path):
    with real_daemon(*LONG_CTX, folder=tmp_path) as daemon, daemon.wire() as wire:
        wire.send(id="a", prompt="Hello", max_tokens=3000, ignore_eos=True)
        assert wire.receive()["event"] == "token"
        daemon.signal(signal.SIGTERM)
        with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
            while True:
                with daemon.wire():
                    time.sleep(0.001)
        wire.send(event="cancel", id="a")
        assert wire.answer().reason == "cancelled" or wire.rest()
        assert daemon.wait() == 0


def test_a_second_signal_stops_at_once(library, tmp_path):
    with real_daemon(*LONG_CTX, folder=tmp_path) as daemon, daemon.wire() as wire:
        wire.send(id="a", prompt="Hello", max_tokens=4000, ignore_eos=True)
        assert wire.receive()["event"] == "token"
        daemon.signal(signal.SIGTERM)
        daemon.logged(DRAINING)  # two signals that arrive together are one
        assert daemon.process.poll() is None
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 1
        assert wire.rest()[-1].get("code") == "E_RUNTIME_SHUTDOWN"
    assert not (tmp_path / "uma.sock").exists()


def test_a_request_that_outlasts_the_drain_timeout_ends_with_an_error(library, tmp_path):
    with real_daemon(*LONG_CTX, "--drain-timeout-s", "0.2", folder=tmp_path) as daemon, daemon.wire() as wire:
        wire.send(id="a", prompt="Hello", max_tokens=4000, ignore_eos=True)
        assert wire.receive()["event"] == "token"
        daemon.signal(signal.SIGTERM)
        assert wire.answer().code == "E_RUNTIME_SHUTDOWN"
        assert daemon.wait() == 0


def test_a_signal_during_prefill(library, tmp_path):
    """The daemon waits for the running step and sends the client an error."""
    options = ("--drain-timeout-s", "0", "--parallel", "2")  # there is room for the long prompt
    with real_daemon(*LONG_CTX, *options, folder=tmp_path) as daemon, daemon.wire() as wire:
        wire.send(id="a", prompt="the red fox and " * 800, max_tokens=4000, ignore_eos=True)
        daemon.wait_until(lambda found: found["running"], "its prompt is in prefill")
        daemon.signal(signal.SIGTERM)
        assert wire.answer().code == "E_RUNTIME_SHUTDOWN"
        assert daemon.wait() == 0


@pytest.mark.parametrize("signals", sampled([1, 2], 2))
def test_signals_while_the_model_loads(library, tmp_path, signals):
    marker = tmp_path / "loading"
    command = (sys.executable, "-c", SLOW_LOADING.format(marker=str(marker)))
    with started(socket=tmp_path / "uma.sock", log_file=tmp_path / "log", command=command) as daemon:
        until = time.monotonic() + 60
        while not marker.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        for event in (DRAINING, "stopping at once")[:signals]:
            daemon.signal(signal.SIGTERM)
            daemon.logged(event)
        marker.unlink()
        assert daemon.wait() == (0 if signals == 1 else 1)
    assert not (tmp_path / "uma.sock").exists()
    assert "Traceback" not in daemon.logs()
    assert "serving" not in daemon.events_logged()


@pytest.mark.thorough
def test_hup_reloads_nothing_if_nothing_has_changed(library, tmp_path):
    with real_daemon(folder=tmp_path) as daemon, daemon.wire() as wire:
        wire.send(id="a", keep_alive=True, prompt="Hello", max_tokens=300, ignore_eos=True)
        assert wire.receive()["event"] == "token"
        daemon.signal(signal.SIGHUP)
        assert wire.answer().reason == "length"
        daemon.logged("reading the list of models again")
        assert daemon.metrics()["models"]["embedded"]["loads_total"] == 1


@pytest.mark.thorough
def test_a_closed_terminal_drains(library, tmp_path):
    terminal, its_end = pty.openpty()
    command = (sys.executable, "-m", "uma_trio", "serve")
    place = {"socket": tmp_path / "uma.sock", "log_file": tmp_path / "log"}
    with started(**place, command=(*ON_A_TERMINAL, os.ttyname(its_end), *command)) as daemon:
        os.close(its_end)
        wait_ready(daemon)
        with daemon.wire() as wire:
            wire.send(id="a", keep_alive=True, prompt="Hello", max_tokens=300, ignore_eos=True)
            assert wire.receive()["event"] == "token"
            os.close(terminal)
            assert wire.answer().reason == "length"
        assert daemon.wait() == 0


def test_usr1_writes_a_private_snapshot(library, tmp_path):
    """Without the folder that is only logged."""
    folder = tmp_path / "snapshots"
    with real_daemon("--snapshot-dir", str(folder), folder=tmp_path, umask=0) as daemon:
        for n in range(3):
            daemon.signal(signal.SIGUSR1)
            daemon.logged("cannot write the metrics snapshot", n + 1)
        assert daemon.ask(**SHORT).reason == "length"
        folder.mkdir()
        daemon.signal(signal.SIGUSR1)
        until = time.monotonic() + 60
        while not (files := list(folder.glob("uma-metrics-*.json"))):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
        snapshot = json.loads(files[0].read_text())
        assert snapshot["requests_total"] == {"length": 1}
        assert snapshot["tokens_total"] == 30
        assert list(folder.iterdir()) == files, "no temporary file is left"


def test_logs_are_json_lines_without_a_terminal(library, tmp_path):
    with real_daemon(folder=tmp_path) as daemon, daemon.wire() as wire:
        wire.send_bytes(b"\xff" * 8)
        wire.rest()
    lines = daemon.log_lines()  # every line parses
    assert {line["level"] for line in lines} <= {"info", "warning"}
    assert all({"event", "level", "timestamp", "logger"} <= set(line) for line in lines)
    refusal = next(line for line in lines if line["event"] == "refused")
    assert (refusal["code"], refusal["connection"][0]) == ("E_PROTO_FRAME_TOO_LARGE", "c")
