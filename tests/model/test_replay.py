"""Answers are computed again from the perf log, and are equal; or the log says why not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from tests.support.profile import amount
from tests.support.real_daemon import Daemon, real_daemon
from uma_trio.cli import main
from uma_trio.cli.perf import read_logs
from uma_trio.cli.replay import ask_again
from uma_trio.telemetry.perf_records import RequestRecord
from uma_trio.telemetry.replays import Comparison, compare, find

STREAMS = 12


def requests(n: int) -> Iterator[dict[str, Any]]:
    """Requests of mixed sizes and sampling parameters, some with prompts that begin alike."""
    rng = random.Random(7)
    words = [
        "the",
        "grey",
        "goose",
        "and",
        "a",
        "green",
        "frog",
        "met",
        "brown",
        "bears",
        "near",
        "an",
        "old",
        "mill",
        "while",
        "it",
        "rained",
    ]
    for index in range(n):
        text = " ".join(rng.choices(words, k=rng.choice((4, 30, 120))))
        head = "A long beginning that many prompts share, so that one computes it for all of them. " * rng.choice(
            (0, 2)
        )
        drawn = rng.choice(({}, {"temperature": 1.0, "seed": index}, {"temperature": 0.7, "top_k": 20, "seed": index}))
        yield {"id": f"r{index}", "prompt": head + text, "max_tokens": rng.choice((4, 9, 16)), **drawn}


async def answer_all(daemon: Daemon, n: int, prefix: str = "") -> None:
    """Answer ``n`` requests, always ``STREAMS`` at a time."""
    left = iter([{**fields, "id": f"{prefix}{fields['id']}"} for fields in requests(n)])

    async def stream() -> None:
        async with daemon.client() as client:
            for fields in left:
                async for _ in client.generate(**fields, keep_alive=True):
                    pass

    async with trio.open_nursery() as nursery:
        for _ in range(STREAMS):
            nursery.start_soon(stream)


def records(daemon: Daemon, log: Path, n: int) -> dict[str, RequestRecord]:
    """The first ``n`` answers of the log, by their ids, when they are there."""

    def found() -> dict[str, RequestRecord]:
        return {each.id: each for run in read_logs([log]) for each in run.requests}

    daemon.wait_until(lambda _: len(found()) >= n, "all answers are in the log")
    return found()


def compared(daemon: Daemon, log: Path, names: Iterable[str]) -> dict[str, Comparison]:
    """Answers of the log with their replays."""
    runs = read_logs([log])
    before = {name: found for name in names if (found := find(runs, name)) is not None}
    again = {}
    for name, found in before.items():
        assert not found.replay.inexact
        again[name] = trio.run(ask_again, found.replay.fields, str(daemon.socket))
    daemon.wait_until(lambda _: {*again.values()} <= {*records(daemon, log, 1)}, "all replays are in the log")
    runs = read_logs([log])
    replays = {name: find(runs, other) for name, other in again.items()}
    return {name: compare(before[name], found) for name, found in replays.items() if found is not None}


@pytest.fixture(scope="module")
def logged(library: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path]]:
    log = tmp_path_factory.mktemp("replay") / "perf.jsonl"
    flags = ["--parallel", "8", "--ctx", "8192", "--flash-attn", "on", "--perf-log", str(log)]
    with real_daemon(*flags, "--perf-log-replay", "prompts") as daemon:
        yield daemon, log


def test_answers_that_ran_alone_are_equal(logged: tuple[Daemon, Path]) -> None:
    daemon, log = logged
    n = amount(quick=8, thorough=1000)
    for fields in requests(n):
        daemon.ask(**fields, cache_prompt=False)
    known = {name: each for name, each in records(daemon, log, n).items() if name.startswith("r")}
    assert all(each.replay is not None and not each.replay.steps_shared for each in known.values())
    found = compared(daemon, log, known)
    assert len(found) == n
    assert {name: each for name, each in found.items() if not each.equal} == {}


def test_the_log_tells_which_answers_ran_with_others(logged: tuple[Daemon, Path]) -> None:
    """One that differs has a cause: a batch of another shape may be rounded otherwise."""
    daemon, log = logged
    n = amount(quick=12, thorough=1000)
    trio.run(answer_all, daemon, n, "mixed")
    names = [f"mixedr{index}" for index in range(n)]
    daemon.wait_until(lambda _: {*names} <= {*records(daemon, log, 1)}, "all answers are in the log")
    shared = [each.replay is not None and each.replay.steps_shared > 0 for each in records(daemon, log, 1).values()]
    found = compared(daemon, log, names)
    different = [each for each in found.values() if not each.equal]
    print(f"{n} answers, {sum(shared)} of them in batches with others: {len(different)} differ")
    assert sum(shared) > n / 2
    assert len(found) == n
    assert all(each.causes for each in different)


def test_the_command_says_equal_or_where_and_why_not(logged: tuple[Daemon, Path], tmp_path: Path) -> None:
    daemon, log = logged
    daemon.ask(id="again", prompt="Once upon a time", max_tokens=8, temperature=1.0, seed=3)
    daemon.wait_until(lambda _: find(read_logs([log]), "again") is not None, "the answer is in the log")
    arguments = ["replay", "again", "--socket", str(daemon.socket), "--log"]
    shown = CliRunner().invoke(main, [*arguments, str(log)])
    assert (shown.exit_code, shown.output.strip()) == (0, "equal: all 8 tokens")
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
