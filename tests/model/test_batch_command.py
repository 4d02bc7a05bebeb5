"""``uma-trio batch``: answers, errors, interruptions, a daemon that dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import environment, invoke
from tests.support.gpu import agree, n_sure
from tests.support.real_daemon import ROOT, Daemon, started, wait_ready
from uma_trio.gateway.batches.results import RowFile
from uma_trio.telemetry.perf_records import decode

WAIT_S = 120.0


def row(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def written(folder: Path, rows: Sequence[object]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join([f"{json.dumps(each)}\n" for each in rows]))
    return path


def texts(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(found) == len(lines)
    return found


def test_rows_are_answered_once_and_errors_are_kept(daemon: Daemon, tmp_path: Path) -> None:
    rows = [*[row(f"row {n} é", prompt=f"Once {n}", max_tokens=8) for n in range(6)], row("bad", prompt="x", n=10_000)]
    file = written(tmp_path, rows)
    output, errors = tmp_path / "rows.jsonl.output.jsonl", tmp_path / "rows.jsonl.errors.jsonl"
    found = invoke("batch", file, "--socket", daemon.socket)
    assert (found.returncode, found.stdout) == (1, "")
    assert f"6 of 7 rows have answers, 1 have errors\nanswers: {output}\n" in found.stderr
    answers = texts(output)
    assert answers.keys() == {each["custom_id"] for each in rows[:6]}
    for each in rows[:6]:
        alone = daemon.ask(prompt=each["body"]["prompt"], max_tokens=8, logprobs=2)
        sure = [event["text"] for event in alone.events if event["event"] == "token"][: n_sure(alone.events)]
        assert agree(answers[each["custom_id"]], alone.text, n=len("".join(sure)))
    [error] = [json.loads(line) for line in errors.read_text().splitlines()]
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    before = output.read_bytes()
    assert invoke("batch", file, "--socket", daemon.socket).returncode == 1
    assert output.read_bytes() == before, "nothing is left to do"
    errors.unlink()
    written(tmp_path, rows[:6])
    assert invoke("batch", file, "--socket", daemon.socket).returncode == 0
    assert (output.read_bytes(), errors.exists()) == (before, False)


def test_what_cannot_be_used(daemon: Daemon, tmp_path: Path) -> None:
    file = written(tmp_path, [row("a", prompt="x"), row("a", prompt="x")])
    found = invoke("batch", file, "--socket", daemon.socket)
    assert (found.returncode, "line 2: custom_id 'a'" in found.stderr) == (1, True)
    written(tmp_path, [row("a", prompt="x")])
    found = invoke("batch", file, "--output", file, "--socket", daemon.socket)
    assert (found.returncode, "are three files" in found.stderr) == (2, True)
    found = invoke("batch", file, "--socket", tmp_path / "none.sock")
    assert (found.returncode, "no daemon" in found.stderr) == (2, True)
    with RowFile(tmp_path / "busy"):
        found = invoke("batch", file, "--output", tmp_path / "busy", "--socket", daemon.socket)
    assert (found.returncode, "another uma-trio batch" in found.stderr) == (1, True)
    found = invoke("batch", file, "--output", tmp_path / "none" / "out", "--socket", daemon.socket)
    assert (found.returncode, "No such file" in found.stderr) == (1, True)


@pytest.mark.thorough
def test_an_interrupted_command_goes_on_and_waits_for_the_next_daemon(tmp_path: Path) -> None:
    rows = [row(f"row-{n}", prompt=f"Once {n}", max_tokens=24, ignore_eos=True) for n in range(30)]
    file, output = written(tmp_path, rows), tmp_path / "answers"
    socket, log_file = tmp_path / "uma.sock", tmp_path / "log"
    command = [sys.executable, "-m", "uma_trio", "batch", str(file), "--output", str(output), "--socket", str(socket)]

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE)

    def grown(n: int) -> bytes:
        until = time.monotonic() + WAIT_S
        while not output.exists() or output.read_bytes().count(b"\n") < n:
            assert time.monotonic() < until
            time.sleep(0.005)
        return output.read_bytes()

    flags = ("--parallel", "4", "--threads", "1", "--perf-log", str(tmp_path / "perf"))
    with started(*flags, socket=socket, log_file=log_file) as daemon:
        wait_ready(daemon)
        with begin() as process:
            before = grown(4)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 130
        with begin() as process:
            grown(8)
            process.kill()
        process = begin()
        grown(12)
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    with started(*flags, socket=socket, log_file=log_file) as daemon:
        assert process.stderr is not None
        assert process.wait(WAIT_S) == 0, process.stderr.read()
        process.stderr.close()
        assert output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
        assert texts(output) == {
            each["custom_id"]: daemon.ask(
                **{name: each["body"][name] for name in ("prompt", "max_tokens", "ignore_eos")}
            ).text
            for each in rows
        }
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert not (tmp_path / "rows.jsonl.errors.jsonl").exists()
    requests = [each for run in decode((tmp_path / "perf").read_bytes()) for each in run.requests]
    classes = {each.priority for each in requests if each.id.startswith("req-")}
    assert classes == {"background"}, "the rows; the questions of this test have other ids"
