"""Serving leaks no memory, neither in the daemon nor in its engine."""

from __future__ import annotations

import random

import pytest

from tests.support.profile import amount
from tests.support.real_daemon import real_daemon

MIB = 1 << 20


@pytest.mark.thorough
def test_prompts_one_after_another_cost_less_than_2_mib(library):
    n, rng = amount(quick=60, thorough=200), random.Random(1)

    def ask(daemon, seed):
        words = " ".join(rng.choice(("red", "fox", "seven", "Paris", "river", "é")) for _ in range(rng.randint(1, 60)))
        answer = daemon.ask(
            encoding=rng.choice(("json", "cbor")),
            prompt=words,
            max_tokens=rng.randint(1, 8),
            temperature=rng.choice((0, 0.8)),
            seed=seed,
            stream=rng.random() < 0.7,
        )
        assert answer.reason in ("stop", "length")

    with real_daemon("--parallel", "4", "--ctx", "4096") as daemon:
        for seed in range(40):  # warm-up: buffers reach their final size
            ask(daemon, seed)
        before = daemon.settled()["tokens_total"], daemon.rss, daemon.n_fds()
        for seed in range(n):
            ask(daemon, seed)
        after = daemon.settled()["tokens_total"], daemon.rss
        daemon.wait_fds(before[2])
    print(f"RSS grew by {(after[1] - before[1]) / MIB:.2f} MiB over {after[0] - before[0]} tokens of {n} prompts")
    assert after[1] - before[1] < 2 * MIB
