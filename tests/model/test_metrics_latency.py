"""Metrics do not wait for the model: they come while long prompts are read."""

from __future__ import annotations

import statistics
import time

import pytest

from tests.support.real_daemon import real_daemon
from uma_trio.training.skills.documents import make_document


@pytest.mark.slow
def test_metrics_are_answered_while_4000_tokens_are_read(library):
    prompt = make_document(seed=3, facts=290).text
    with (
        real_daemon("--parallel", "4") as daemon,
        daemon.wire() as asking,
        daemon.wire() as first,
        daemon.wire() as second,
    ):
        for wire in (first, second):
            wire.send(id="long", prompt=prompt, max_tokens=1)
        took_ms, reading = [], set()
        daemon.wait_until(lambda found: found["running"] == 2, "both prompts are being read")
        while True:
            began = time.perf_counter()
            snapshot = asking.metrics()
            took_ms.append(1e3 * (time.perf_counter() - began))
            if snapshot["running"] < 2:
                break
            assert "ttft_p50_ms" not in snapshot, "a prompt is already read"
            reading.add(snapshot["kv"]["cells_used"])
            time.sleep(0.01)
        n_tokens = [wire.answer().last["usage"]["prompt_tokens"] for wire in (first, second)]
    took_ms.sort()
    print(
        f"{len(took_ms)} snapshots while two prompts of {n_tokens} tokens were read: median "
        f"{statistics.median(took_ms):.1f} ms, most {took_ms[-1]:.1f} ms"
    )
    assert all(3500 < n < 4096 for n in n_tokens)
    assert len(took_ms) > 20
    assert len(reading) > 5, "it saw no progress"
    assert statistics.median(took_ms) < 50
