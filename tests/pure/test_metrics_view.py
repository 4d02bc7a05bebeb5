"""What ``uma-trio metrics`` makes of snapshots: rates between two of them, a screen that fits, a table of all."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.support.cases import all_cases
from uma_trio.cli import metrics, metrics_all
from uma_trio.cli.metrics_view import Sample, is_restart, per_second, rows, screen, table
from uma_trio.client import ClientError, NoDaemon
from uma_trio.telemetry.metrics import Telemetry


def snapshot(**changes: Any) -> dict[str, Any]:
    return {
        **Telemetry().snapshot(),
        "model": "a.gguf",
        "pid": 1,
        "uptime_s": 100.0,
        "running": 3,
        "queue_depth": 0,
        "connections": 5,
        "inter_token_p50_ms": 2.14,
        "inter_token_p99_ms": 105.5,
        "requests_total": {"stop": 10, "length": 2, "cancelled": 4, "E_TIMEOUT": 1},
        "rejected_total": {"E_LIMIT_QUEUE": 7, "E_LIMIT_CONTEXT": 1_000},
        "kv": {"cells": 1000, "cells_used": 120, "cells_reserved": 500, "cached_cells": 30},
        "kv_offload": {"saved_total": 3, "loaded_total": 2, "disk_bytes": 1_000_000},
        "engine": {"pid": 5, "rss_bytes": 380_000_000, "cpu_s": 10.0, "restarts_total": 0},
        "sessions": {"stored": 12, "active": 1, "not_durable": 0},
        **changes,
    }


def sample(at_s: float = 0.0, **changes: Any) -> Sample:
    return Sample(at_s, snapshot(**changes))


def shown(before: Sample | None, now: Sample) -> dict[str, str]:
    return {f"{row.title} {cell.label}": cell.value for row in rows(before, now) for cell in row.cells}


def alarms(now: Sample) -> set[str]:
    return {f"{row.title} {cell.label}" for row in rows(None, now) for cell in row.cells if cell.is_alarm}


def drawn(samples: list[Sample], width: int = 80, height: int = 24, notice: str = "") -> list[str]:
    return [line.plain for line in screen(samples, notice=notice, interval_s=1.0, width=width, height=height)]


# -- rates -----------------------------------------------------------------------------------------


def test_a_rate_is_the_growth_of_a_counter_divided_by_the_time() -> None:
    before = sample(10.0, tokens_total=1000)
    now = sample(12.0, tokens_total=1500, uptime_s=102.0)
    assert per_second(before, now, "tokens_total") == 250.0
    assert per_second(before, now, "prompt_tokens_total") == 0.0


@all_cases(
    ("before", "now"),
    [
        (None, sample()),
        (sample(5.0), sample(5.0)),
        (sample(5.0, pid=1), sample(6.0, pid=2)),
        (sample(5.0, tokens_total=10), sample(6.0, tokens_total=9)),
    ],
)
def test_there_is_no_rate(before: Sample | None, now: Sample) -> None:
    assert per_second(before, now, "tokens_total") is None


def test_a_metric_that_the_daemon_does_not_have_has_no_rate() -> None:
    thread = {"pid": None, "restarts_total": 0}
    before, now = sample(0.0, engine=thread), sample(1.0, engine=thread, uptime_s=101.0)
    assert per_second(before, now, "engine.cpu_s") is None
    assert shown(before, now)["engine CPU"] == "-"


def test_a_restarted_engine_is_no_restart_of_the_daemon() -> None:
    before = sample(0.0, engine={"cpu_s": 10.0})
    now = sample(1.0, engine={"cpu_s": 0.3}, uptime_s=101.0)
    assert not is_restart(before, now)
    assert per_second(before, now, "engine.cpu_s") is None


def test_a_daemon_with_another_process_id_was_restarted() -> None:
    assert is_restart(sample(pid=1), sample(pid=2))
    assert not is_restart(sample(pid=1), sample(pid=1))


# -- rows ------------------------------------------------------------------------------------------


def test_the_rows_have_what_matters_most_first() -> None:
    titles = [row.title for row in rows(None, sample())]
    assert titles[:8] == ["streams", "ITL", "TTFT", "KV cache", "engine", "sessions", "requests", "overload"]


def test_the_figures() -> None:
    before = sample(0.0)
    now = sample(2.0, uptime_s=102.0, engine={"rss_bytes": 380_000_000, "cpu_s": 13.0, "restarts_total": 0})
    found = shown(before, now)
    assert found["streams running"] == "3"
    assert found["ITL p50"] == "2.1 ms"
    assert found["ITL p95"] == "-"
    assert found["KV cache used"] == "12.0%"
    assert found["KV cache reserved"] == "50.0%"
    assert found["engine memory"] == "380.0 MB"
    assert found["engine CPU"] == "150%", "three CPU seconds in two"
    assert found["sessions stored"] == "12"
    assert (found["requests complete"], found["requests cancelled"], found["requests failed"]) == ("12", "4", "1")
    assert found["overload refused"] == "1,007"
    assert shown(before, sample(2.0, preemptions_total=3))["overload preempted"] == "3"


def test_the_codes_of_refused_requests_are_named() -> None:
    [refused] = [row for row in rows(None, sample()) if row.title == "overload"]
    assert refused.note == "E_LIMIT_CONTEXT 1,000, E_LIMIT_QUEUE 7"


def test_alarms() -> None:
    calm = {"requests_total": {"stop": 3, "cancelled": 1}, "rejected_total": {}}
    assert alarms(sample(**calm)) == set()
    assert alarms(sample()) == {"requests failed", "overload refused"}
    assert alarms(sample(**calm, queue_depth=1)) == {"streams waiting"}
    assert alarms(sample(**calm, engine={"restarts_total": 1})) == {"engine restarts"}
    assert alarms(sample(**calm, sessions={"stored": 2, "not_durable": 1})) == {"sessions not durable"}


# -- the screen --------------------------------------------------------------------------------------


def growing(n: int, **changes: Any) -> list[Sample]:
    return [
        sample(float(at), tokens_total=100 * at, prompt_tokens_total=at * at, uptime_s=100.0 + at, **changes)
        for at in range(n)
    ]


@all_cases("height", [1, 5, 12, 24, 30, 60])
@all_cases("width", [20, 40, 80, 81, 200])
def test_the_screen_fits(width: int, height: int) -> None:
    latencies = {f"request-{n}": float(n) for n in range(100)}
    found = drawn(growing(300, requests_inter_token_ms=latencies, model="m" * 300), width, height, "n" * 300)
    assert len(found) <= height
    assert max(map(len, found)) <= width


def test_80_by_24_shows_all_rows() -> None:
    lines = drawn(growing(3))
    text = "\n".join(lines)
    for row in rows(None, sample()):
        assert any(line.startswith(row.title) for line in lines), row.title
    assert "generated      100.0 tokens/s" in text
    assert "prefill          3.0 tokens/s" in text
    assert lines[0].startswith("a.gguf  up 0:01:42")


def test_a_taller_terminal_shows_more() -> None:
    samples = growing(50, requests_inter_token_ms={"fast": 1.0, "slow": 9.0})
    small, tall = drawn(samples), drawn(samples, height=60)
    assert not any("slow" in line for line in small)
    assert [line.split()[-1] for line in tall[-2:]] == ["slow", "fast"]
    assert sum("█" in line for line in tall) > sum("█" in line for line in small)


def test_the_latest_rate_is_the_rightmost_bar() -> None:
    rates = [0, 100, 0, 50]
    totals = [sum(rates[: n + 1]) for n in range(4)]
    samples = [sample(float(at), tokens_total=total, uptime_s=100.0 + at) for at, total in enumerate(totals)]
    chart = [line for line in drawn(samples, height=13) if line.startswith("generated")]
    assert [line[-3:] for line in chart] == ["█ ▄"]


def test_the_notice_and_an_ending_daemon_are_on_top() -> None:
    lines = drawn([sample(draining=True)], notice="12:00:00 the daemon was restarted")
    assert "draining" in lines[0]
    assert lines[1] == "12:00:00 the daemon was restarted"


def test_before_the_second_snapshot_there_are_no_rates() -> None:
    assert "generated          - tokens/s" in "\n".join(drawn([sample()]))


def test_across_a_restart_the_chart_has_a_gap() -> None:
    samples = [*growing(3), sample(9.0, tokens_total=500, pid=2), sample(10.0, tokens_total=600, pid=2)]
    [chart] = [line for line in drawn(samples, height=13) if line.startswith("generated")]
    assert chart[-4:] == "██ █"


# -- the table ---------------------------------------------------------------------------------------


def test_the_table_has_every_metric_once() -> None:
    lines = table(snapshot())
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert len(names) == len(set(names))
    assert {name.split(".")[0] for name in names} == set(snapshot())
    assert {"kv.cells_used", "engine.rss_bytes", "requests_total.stop", "rejected_total.E_LIMIT_QUEUE"} <= set(names)


def test_the_table_has_metrics_of_newer_daemons() -> None:
    lines = table(snapshot(moon_phase=0.25))
    assert lines[lines.index("Other") + 1].split() == ["moon_phase", "0.25"]


def test_values_in_the_table() -> None:
    found = dict(
        line.split(maxsplit=1)
        for line in table(snapshot(tokens_total=1234567, draining=False, rejected_total={}))
        if line.startswith("  ")
    )
    assert found["tokens_total"] == "1,234,567"
    assert found["draining"] == "no"
    assert found["ttft_p50_ms"] == found["rejected_total"] == "-"


def test_a_process_id_has_no_separators() -> None:
    lines = [line.split() for line in table({"pid": 12345, "engine": {"pid": 23456}, "ticks_total": 34567})]
    assert [words for words in lines if len(words) == 2] == [
        ["pid", "12345"],
        ["ticks_total", "34,567"],
        ["engine.pid", "23456"],
    ]


def test_several_daemons_and_their_sums():
    def load(running: int, used: int, cells: int) -> dict[str, float]:
        counts = {"num_running_reqs": running, "num_waiting_reqs": 1, "max_running_requests": 8}
        tokens = {"num_waiting_uncached_tokens": 600, "num_used_tokens": used, "max_total_num_tokens": cells}
        return {**counts, **tokens, "gen_throughput": 10.5, "cache_hit_rate": 0.25}

    answers = [("http://a", load(1, 900, 1000)), ("http://b", load(3, 100, 3000)), ("http://c", None)]
    assert metrics_all.table([metrics_all.DaemonLoad(*each) for each in answers]) == [
        metrics_all.HEADER,
        ("http://a", "1", "1", "8", "600", "90 %", "10", "25 %"),
        ("http://b", "3", "1", "8", "600", "3 %", "10", "25 %"),
        ("http://c", *["-"] * 7),
        ("all 2 of 3", "4", "2", "16", "1,200", "25 %", "21", "-"),
    ]
    assert metrics_all.table([metrics_all.DaemonLoad("http://c", None)])[-1][1:] == ("0", "0", "0", "0", "-", "0", "-")


def test_a_watch_says_what_became_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = NoDaemon("nobody", "start it")
    answers = [sample(), ClientError("it shuts down"), gone, gone, sample(1.0), sample(2.0, pid=2, uptime_s=0.0)]

    async def read(*_: object) -> Sample:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(metrics, "_read", read)
    monkeypatch.setattr(metrics, "_clock", lambda: "12:00")
    watch = metrics._Watch(None, None)
    notices = []
    while answers:
        trio.run(watch.read)
        notices.append(watch.notice)
    before = "the figures are those of before"
    assert notices == [
        "",
        f"12:00 it shuts down; {before}",
        *[f"12:00 the daemon is gone; {before}"] * 2,
        "12:00 the daemon answers again",
        "12:00 the daemon was restarted",
    ]
