"""Answers are computed again from the perf log, and are equal; or the log says why not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from tests.support.bench_scripts import bench_script
from tests.support.profile import amount
from tests.support.real_daemon import Daemon, real_daemon
from uma_trio.cli import main
from uma_trio.cli.perf import read_logs
from uma_trio.cli.replay import ask_again
from uma_trio.telemetry.replays import compare, find

STREAMS = 12
bench = bench_script("replays")


@pytest.fixture(scope="module")
def logged(library: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path]]:
    log = tmp_path_factory.mktemp("replay") / "perf.jsonl"
    flags = ["--parallel", "8", "--ctx", "16384", "--reproducible", "--devices", "none", "--perf-log", str(log)]
    with real_daemon(*flags, "--perf-log-replay", "prompts") as daemon:
        yield daemon, log


def test_answers_of_a_mixed_load_are_equal_when_each_is_computed_alone(logged: tuple[Daemon, Path]) -> None:
    """They shared batches and beginnings, and their prompts were prefilled in other chunks."""
    daemon, log = logged
    asked = [*bench.requests(amount(quick=6, thorough=1000))]
    trio.run(bench.answer_all, daemon.socket, asked, STREAMS)
    found = trio.run(bench.replayed, daemon.socket, log, [each["id"] for each in asked])
    assert sum(each.was_shared for each in found) > len(found) / 2
    assert any(each.was_cached for each in found)
    assert {each.logged.record.id: each.comparison for each in found if not each.comparison.equal} == {}


def test_the_command_says_equal_or_where_and_why_not(logged: tuple[Daemon, Path], tmp_path: Path) -> None:
    daemon, log = logged
    daemon.ask(id="again", prompt="Once upon a time", max_tokens=8, temperature=1.0, seed=3)
    daemon.wait_until(lambda _: find(read_logs([log]), "again") is not None, "the answer is in the log")
    arguments = ["replay", "again", "--socket", str(daemon.socket), "--log"]
    shown = CliRunner().invoke(main, [*arguments, str(log)])
    assert (shown.exit_code, shown.output.strip()) == (0, "equal: all 8 tokens")
    daemon.ask(id="again", prompt="Once upon a time", max_tokens=9, temperature=1.0, seed=3)
    daemon.wait_until(lambda _: (found := find(read_logs([log]), "again")) and found.n_alike == 2, "it is in the log")
    last = CliRunner().invoke(main, ["replay", "chatcmpl-again", "--socket", str(daemon.socket), "--log", str(log)])
    assert (last.exit_code, last.stdout.strip()) == (0, "equal: all 9 tokens")
    assert f"2 answers have the id 'chatcmpl-again'; this is the last one, of {time.strftime('%Y-')}" in last.stderr
    changed = tmp_path / "changed.jsonl"
    lines = []
    for line in log.read_text().splitlines():
        found = json.loads(line)
        if found["kind"] == "header":
            found["identity"]["model"] = "another"
        elif found.get("id") == "again":
            found["replay"]["answer"][5] = 1
            found["replay"]["answer_hash"] = "another"
        lines.append(json.dumps(found, separators=(",", ":")))
    changed.write_text("\n".join(lines) + "\n")
    before = find(read_logs([changed]), "again")
    assert before is not None
    name = trio.run(ask_again, before.replay.fields, str(daemon.socket))
    daemon.wait_until(lambda _: find(read_logs([log]), name) is not None, "the replay is in the log")
    again = find(read_logs([log]), name)
    assert again is not None
    result = compare(before, again)
    assert (result.equal, result.differs_at, result.was) == (False, 5, 1)
    assert "another model file" in result.causes


def test_what_cannot_be_computed_again_is_said(logged: tuple[Daemon, Path]) -> None:
    daemon, log = logged
    shown = CliRunner().invoke(main, ["replay", "nobody", "--socket", str(daemon.socket), "--log", str(log)])
    assert (shown.exit_code, "is not in the log" in shown.output) == (2, True)
