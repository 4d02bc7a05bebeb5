"""Metrics do not wait for the engine: they are answered during long prefills."""

from __future__ import annotations

import time

import pytest

from tests.support.real_daemon import LONG_CTX, real_daemon
from uma_trio.training.skills.documents import make_document


@pytest.mark.cpu("a GPU computes a step in less time than the metrics take")
def test_metrics_are_answered_during_a_prefill_of_2000_tokens(library):
    prompt = make_document(seed=3, facts=145).text
    with (
        real_daemon("--parallel", "4", *LONG_CTX) as daemon,
        daemon.wire() as asking,
        daemon.wire() as first,
        daemon.wire() as second,
    ):
        for wire in (first, second):
            wire.send(id="long", prompt=prompt, max_tokens=1)
        progress = []
        daemon.wait_until(lambda found: found["running"] == 2, "both prompts are in prefill")
        while True:
            snapshot = asking.metrics()
            if snapshot["running"] < 2:
                break
            assert "ttft_p50_ms" not in snapshot, "the prefill of a prompt has ended"
            progress.append(snapshot["kv"]["cells_used"])
            time.sleep(0.001)
        n_tokens = [wire.answer().last["usage"]["prompt_tokens"] for wire in (first, second)]
    n_steps = len(set(progress))
    print(f"{len(progress)} snapshots during the {n_steps} steps of the prefill of two prompts of {n_tokens} tokens")
    assert all(1700 < n < 2100 for n in n_tokens)
    assert n_steps > 1, "the snapshots show no progress"
    assert len(progress) > n_steps, "each snapshot waits for a step"
