"""The perf log of a real daemon agrees with the usage that clients received and with the metrics."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading
from itertools import pairwise

import pytest

from tests.support.commands import run_process
from tests.support.real_daemon import real_daemon
from uma_trio.telemetry.perf_records import decode
from uma_trio.telemetry.perf_summary import summarise

WORDS = "one two three four five six seven eight nine ten " * 30


def test_the_log_agrees_with_clients_and_counters(library, tmp_path):
    path = tmp_path / "perf.jsonl"
    with real_daemon("--perf-log", str(path), "--parallel", "4") as daemon:
        with daemon.wire() as wire:
            wire.send(id="left", prompt="Tell me", max_tokens=2000, ignore_eos=True)
            wire.receive()
        daemon.settled()
        answers = {}

        def ask(name: str, **fields: object) -> None:
            with daemon.wire() as wire:
                wire.send(id=name, max_tokens=60, ignore_eos=True, **fields)
                answers[name] = wire.answer()

        clients = [threading.Thread(target=ask, args=(f"r{n}",), kwargs={"prompt": WORDS[n:]}) for n in range(6)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        metrics = daemon.settled()
        assert metrics["perf_log_dropped_total"] == 0
    [run] = decode(path.read_bytes())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert run.unreadable_lines == 0
    assert run.trailer is not None
    assert run.trailer.dropped_records == 0
    assert run.header.model == "embedded.gguf"
    assert run.header.llama_cpp is not None
    requests = {request.id: request for request in run.requests}
    assert set(requests) == {*answers, "left"}
    for name, answer in answers.items():
        usage, timings, found = answer.last["usage"], answer.last["timings"], requests[name]
        assert (found.prompt_tokens, found.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert found.finish_reason == answer.reason
        assert found.ttft_ms is not None
        assert abs(found.ttft_ms - timings["ttft_ms"]) < 0.01
        assert abs(1e3 * (found.finished_s - found.arrived_s) - timings["total_ms"]) < 0.01
        gaps_ms = found.inter_token_ms
        assert 0 < len(gaps_ms) < found.completion_tokens
        assert abs(sum(gaps_ms) - (timings["total_ms"] - timings["ttft_ms"])) < 0.1 * timings["total_ms"] + 50
    assert requests["left"].finish_reason == "cancelled"
    figures = summarise(run)
    inter_token = figures["latency_ms"]["inter_token"]
    assert inter_token["n"] == metrics["histograms"]["inter_token_ms"]["count"]
    assert [inter_token[name] for name in ("p50", "p95", "p99")] == pytest.approx(
        [metrics[f"inter_token_{name}_ms"] for name in ("p50", "p95", "p99")], abs=0.01
    )
    assert inter_token["p50"] > 0
    assert figures["latency_ms"]["queue"]["n"] == metrics["histograms"]["request_queue_ms"]["count"]
    assert figures["latency_ms"]["ttft"]["n"] == metrics["histograms"]["ttft_ms"]["count"] == len(requests)
    assert figures["avg_batch"] == pytest.approx(metrics["avg_batch"], abs=0.001)
    assert figures["cached_tokens"] == metrics["cached_tokens_total"]
    assert sum(answer.last["usage"]["cached_tokens"] for answer in answers.values()) == figures["cached_tokens"]
    assert figures["ticks"] > 20
    assert figures["decode_calls"] == metrics["decode_calls_total"]
    assert figures["tokens"] == metrics["tokens_total"]
    assert figures["prompt_tokens"] == metrics["prompt_tokens_total"]
    assert (figures["draft_tokens"], figures["accepted_draft_tokens"]) == (
        metrics["draft_tokens_total"],
        metrics["accepted_draft_tokens_total"],
    )
    assert figures["draft_tokens"] > 0, "repetitive text is drafted"
    assert all(before.start_s < after.start_s for before, after in pairwise(run.ticks))


@pytest.mark.thorough
def test_the_time_of_a_real_run_is_explained(library, tmp_path):
    """Also while the daemon runs.  The bound is wide because a busy machine delays the messages between two processes."""
    path = tmp_path / "perf.jsonl"
    command = [sys.executable, "-m", "uma_trio", "perf", "explain", str(path), "--json"]

    def explained() -> dict[str, float]:
        found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        seconds = {each["cause"]: each["seconds"] for each in found["causes"]}
        assert sum(seconds.values()) == pytest.approx(found["wall_s"], rel=0.03)
        assert seconds["not_recorded"] < 0.2 * found["wall_s"]
        return seconds

    with real_daemon("--perf-log", str(path), "--parallel", "4") as daemon:

        def ask(name: str, n_tokens: int) -> None:
            with daemon.wire() as wire:
                wire.send(id=name, prompt=WORDS + name, max_tokens=n_tokens, ignore_eos=True)
                wire.answer()

        clients = [threading.Thread(target=ask, args=(f"r{n}", 40 + 40 * n)) for n in range(6)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        daemon.settled()
        daemon.wait_until(
            lambda _: path.read_bytes().count(b'"kind":"request"') == len(clients), "the log has all requests"
        )
        running = explained()
        daemon.ask(prompt="Hello", max_tokens=5)
    closed = explained()
    for name in ("prefill", "decode", "sampling"):
        assert running[name] > 0
    assert closed["idle"] > running["idle"], "the command itself took time without a request"


def test_two_starts_are_two_runs_and_the_report_shows_them(library, tmp_path):
    path = tmp_path / "perf.jsonl"
    for _ in range(2):
        with real_daemon("--perf-log", str(path)) as daemon:
            daemon.ask(prompt="Hello", max_tokens=5)
    for number in ("1", "2"):
        found = json.loads(run_process("perf", "report", path, "--json", "--run", number).stdout)
        assert (found["requests"], found["closed"], found["runs_in_log"]) == ({"length": 1}, True, 2)


def test_a_log_that_cannot_be_written_is_one_warning(library, tmp_path):
    path = tmp_path / "letter.txt"
    path.write_text("Dear friend,")
    with real_daemon("--perf-log", str(path), "--devices", "none", folder=tmp_path) as daemon:
        assert daemon.ask(prompt="Hello", max_tokens=5).reason == "length"
    warnings = [line for line in daemon.log_lines() if line["level"] == "warning"]
    assert [line["event"] for line in warnings] == ["there is no perf log; the daemon continues"]
    assert path.read_text() == "Dear friend,"
