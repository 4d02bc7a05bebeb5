"""Metrics do not wait for the engine: they are answered during long prefills."""

from __future__ import annotations

import statistics
import time

import pytest

from tests.support.real_daemon import real_daemon
from uma_trio.training.skills.documents import make_document


@pytest.mark.alone
@pytest.mark.slow
def test_metrics_are_answered_during_a_prefill_of_4000_tokens(library):
    prompt = make_document(seed=3, facts=290).text
    with (
        real_daemon("--parallel", "4") as daemon,
        daemon.wire() as asking,
        daemon.wire() as first,
        daemon.wire() as second,
    ):
        for wire in (first, second):
            wire.send(id="long", prompt=prompt, max_tokens=1)
        duration_ms, progress = [], set()
        daemon.wait_until(lambda found: found["running"] == 2, "both prompts are in prefill")
        while True:
            began = time.perf_counter()
            snapshot = asking.metrics()
            duration_ms.append(1e3 * (time.perf_counter() - began))
            if snapshot["running"] < 2:
                break
            assert "ttft_p50_ms" not in snapshot, "the prefill of a prompt has ended"
            progress.add(snapshot["kv"]["cells_used"])
            time.sleep(0.01)
        n_tokens = [wire.answer().last["usage"]["prompt_tokens"] for wire in (first, second)]
    duration_ms.sort()
    print(
        f"{len(duration_ms)} snapshots during the prefill of two prompts of {n_tokens} tokens: median "
        f"{statistics.median(duration_ms):.1f} ms, maximum {duration_ms[-1]:.1f} ms"
    )
    assert all(3500 < n < 4096 for n in n_tokens)
    assert len(duration_ms) > 20
    assert len(progress) > 5, "the snapshots show no progress"
    assert statistics.median(duration_ms) < 50
