"""A perf log can be simulated: the device is found from its ticks, and the simulation agrees with the log."""

from __future__ import annotations

import itertools
import subprocess
import sys

import attrs
import pytest

from tests.support.bench_scripts import FOLDER, bench_script
from uma_trio.config import Scheduling
from uma_trio.telemetry.perf_records import Header, RequestRecord, TickRecord, Trailer, encode

STEP_MS, ROW_MS, TOKEN_MS = 10.0, 2.0, 0.5


def header():
    return Header(
        uma_trio="0", llama_cpp=None, started="", clock_s=0.0, model="m", n_ctx=8192, n_seq_max=4, n_batch=512,
        scheduling=attrs.asdict(Scheduling()),
    )  # fmt: skip


def alone(n_requests=8, prompt=40, answer=30):
    """Ticks and requests of one client on a device of ``STEP_MS`` a tick, ``ROW_MS`` a stream, ``TOKEN_MS`` a prompt token."""
    now, records = 0.0, []
    for n in range(n_requests):
        arrived, ends = now, []
        for at in range(answer):
            prefill = {"prefill_chunks": [(0, prompt)], "decode_seq_ids": []} if at == 0 else {"decode_seq_ids": [0]}
            ms = STEP_MS + (TOKEN_MS * prompt if at == 0 else ROW_MS)
            records.append(TickRecord(start_s=now, decode_ms=ms, tokens=1, host_gap_ms=0.0, **prefill))
            now += ms / 1e3
            ends.append(now)
        records.append(
            RequestRecord(
                id=f"r{n}", arrived_s=arrived, admitted_s=arrived, first_token_s=ends[0], finished_s=now,
                prompt_tokens=prompt, completion_tokens=answer, finish_reason="length",
                inter_token_ms=[1e3 * (b - a) for a, b in itertools.pairwise(ends)],
            )
        )  # fmt: skip
    return records


def write(path, records):
    path.write_bytes(b"".join(map(encode, [header(), *records, Trailer()])))
    return path


def run(log):
    return subprocess.run(
        [sys.executable, FOLDER / "policy_replay.py", log], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_simulation_of_a_log_agrees_with_it(tmp_path):
    done = run(write(tmp_path / "perf.jsonl", alone()))
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    ratios = [float(part) for part in last.split("|")[2:-1]]
    assert ratios == pytest.approx([1, 1, 1, 1], abs=0.02)


def test_a_log_with_few_ticks_is_refused_in_a_sentence(tmp_path):
    done = run(write(tmp_path / "perf.jsonl", alone(n_requests=1)))
    assert done.returncode == 1
    assert "the log has 30 ticks, and 50 are needed" in done.stderr


def test_what_was_cached_is_not_simulated():
    replay = bench_script("policy_replay")
    record = RequestRecord(
        id="r", arrived_s=1.0, first_token_s=1.5, finished_s=2.0, prompt_tokens=100, cached_tokens=90,
        completion_tokens=3, finish_reason="length",
    )  # fmt: skip
    log = bench_script("policy_replay").Run(header=header(), requests=[record])
    [request] = replay.requests_of(log, Scheduling())
    assert (request.n_pending, request.n_context, request.n_to_generate) == (10, 90, 3)
