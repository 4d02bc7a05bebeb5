"""The log of the real daemon: one line a fact, and one line for each answer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time

import pytest

from tests.support.profile import thorough
from tests.support.real_daemon import DIES_WITH_PARENT, LONG_CTX, real_daemon, started, wait_ready
from tests.support.terminal import terminal
from uma_trio.engine.llama import described

START = ["model", "KV cache", "serving"]


@pytest.mark.parametrize(
    ("n_params", "shown"),
    [(7_157_760, "7.2M"), (8_030_261_248, "8.0B"), (70_553_706_496, "71B"), (512, "512"), (1500, "1.5K")],
)
def test_a_description_says_how_many_weights_there_are(n_params, shown):
    assert described("llama ?B Q8_0", n_params) == f"llama {shown} Q8_0"
    assert described("llama 7B Q8_0", n_params) == "llama 7B Q8_0"


def test_each_fact_at_the_start_and_each_answer_has_one_line(library, tmp_path):
    with real_daemon(*LONG_CTX, "--kv-unified", "off", folder=tmp_path) as daemon, daemon.wire() as wire:
        long = "The red fox and the blue bird went to the river. " * 8
        first = wire.ask(id="a", keep_alive=True, prompt=long, max_tokens=5, ignore_eos=True)
        wire.ask(id="b", keep_alive=True, prompt=long, max_tokens=2, session_id="s")
        wire.ask(id="c", keep_alive=True, prompt="Hello", n=2, max_tokens=1)
        wire.answer()  # the second one
        wire.send(id="d", keep_alive=True, prompt="Hello", max_tokens=4000, ignore_eos=True)
        assert wire.receive()["event"] == "token"
        wire.send(event="cancel", id="d")
        assert wire.answer().reason == "cancelled"
        refused = wire.ask(id="e", keep_alive=True, prompt="Hello", max_tokens=10**8, session_id="t")
        assert refused.code == "E_LIMIT_MAX_TOKENS"
        wire.send(id="f", prompt="Hello", max_tokens=1, model="other")
        wire.rest()
    found = {line["event"]: line for line in daemon.log_lines()}
    assert set(START) <= set(found)
    assert found["model"]["description"] == "llama 7.2M Q8_0"
    assert (found["KV cache"]["parallel"], found["KV cache"]["ctx_per_request"]) == (8, 4096)
    assert found["serving"]["socket"] == str(daemon.socket)
    lines = [line for line in daemon.log_lines() if line["event"] == "request"]
    assert [line["id"] for line in lines] == ["a", "b", "c", "c", "d"]
    a, b, c, other, d = lines
    assert (a["model"], a["session"], a["index"], a["reason"]) == ("embedded", None, None, "length")
    assert a["prompt_tokens"] == first.last["usage"]["prompt_tokens"] > 50
    assert (a["cached_tokens"], a["tokens"]) == (0, 5)
    assert a["ttft_ms"] == first.last["timings"]["ttft_ms"] > 0
    assert a["tokens_per_s"] == first.last["timings"]["tokens_per_s"] > 0
    assert (b["session"], b["cached_tokens"]) == ("s", b["prompt_tokens"] - 1)
    assert {c["index"], other["index"]} == {0, 1}
    assert (d["reason"], d["tokens"] > 0) == ("cancelled", True)
    [too_long, unknown] = [line for line in daemon.log_lines() if line["event"] == "refused"]
    assert (too_long["id"], too_long["session"], too_long["code"]) == ("e", "t", "E_LIMIT_MAX_TOKENS")
    assert (unknown["id"], unknown["model"], unknown["code"]) == ("f", "other", "E_MODEL_NOT_FOUND")
    assert {line["level"] for line in (*lines, too_long, unknown)} == {"info"}


def test_at_level_warning_nothing_is_logged(library, tmp_path):
    with real_daemon("--log-level", "warning", "--devices", "none", folder=tmp_path) as daemon:
        daemon.ask(prompt="Hello", max_tokens=2)
        daemon.ask(prompt="Hello", max_tokens=10**6)
    assert daemon.logs() == ""


def test_for_people_a_line_has_no_python_in_it(library, tmp_path):
    cache = tmp_path / "cache"  # so that the layouts of the KV cache are measured now
    flags = ("--log-format", "human", "--layout-trial-s", "600", "--devices", "none")  # most GPUs get one by rule
    with real_daemon(*flags, folder=tmp_path, environment={"XDG_CACHE_HOME": str(cache)}) as daemon:
        daemon.ask(prompt="Hello", max_tokens=2)
    lines = daemon.logs().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d \[(info|warning) *\] ", line) for line in lines), daemon.logs()
    assert sum("measured a layout of the KV cache" in line for line in lines) >= 2
    assert not re.search(r"[{}\[]|None|uma_trio\.", "".join(line.split("]", 1)[1] for line in lines)), daemon.logs()
    assert "requests_total='length 1'" in lines[-1]


def test_a_second_signal_is_one_plain_line(library, tmp_path):
    with real_daemon(*LONG_CTX, folder=tmp_path) as daemon, daemon.wire() as wire:
        wire.send(id="a", prompt="Hello", max_tokens=4000, ignore_eos=True)
        assert wire.receive()["event"] == "token"
        daemon.signal(signal.SIGINT)
        daemon.logged("draining; a second signal stops at once")
        daemon.signal(signal.SIGINT)
        assert daemon.wait() == 1
    after = daemon.log_lines()[daemon.events_logged().index("draining; a second signal stops at once") + 1 :]
    assert [(line["event"], line["level"]) for line in after] == [("stopping at once", "warning"), ("request", "info")]
    assert after[1]["reason"] == "E_RUNTIME_SHUTDOWN"


@pytest.mark.parametrize("is_default", [thorough(True), False])
def test_on_a_terminal_the_start_says_what_to_try(library, tmp_path, monkeypatch, is_default):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("UMA_SOCKET", raising=False)
    flags = [] if is_default else ["--socket", str(tmp_path / "s")]
    command = [
        *(DIES_WITH_PARENT if sys.platform == "linux" else ()),
        sys.executable,
        "-m",
        "uma_trio",
        "serve",
        *flags,
    ]
    with terminal(command, columns=400, lines=30) as shown:
        shown.wait_for("in another terminal")
        [line] = [line for line in shown.text.splitlines() if "in another terminal" in line]
        assert ("--socket" in line) != is_default
        assert ("uma-trio ask" if is_default else f"uma-trio ask --socket {tmp_path / 's'}") in line
        assert "llama 7.2M Q8_0" in shown.text
        shown.type("\x03")
        assert shown.wait() == 0


@pytest.mark.thorough
def test_a_log_that_nobody_reads_holds_up_no_request(library, tmp_path):
    """A pipe takes 64 KiB; this log has several times as much."""
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with started("--log-level", "debug", socket=tmp_path / "uma.sock", log_file=fifo) as daemon:
            wait_ready(daemon)
            with daemon.wire() as wire:
                for n in range(400):
                    answer = wire.ask(id=f"{n}-{'x' * 200}", keep_alive=True, prompt="Hello", max_tokens=1)
                    assert answer.reason in ("length", "stop")
            assert len(os.read(reader, 1 << 20)) > 60_000  # it was full
            daemon.process.terminate()
            while daemon.process.poll() is None:  # now somebody reads
                with contextlib.suppress(BlockingIOError):
                    os.read(reader, 1 << 20)
                time.sleep(0.01)
    finally:
        os.close(reader)
