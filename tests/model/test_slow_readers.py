"""Clients that do not read, through a real daemon: they keep nobody else waiting, and lose nothing."""

from __future__ import annotations

import contextlib
import socket

import pytest

from tests.support.real_daemon import missing, real_daemon

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LONG = {"prompt": "Once", "max_tokens": 350, "ignore_eos": True, "logprobs": 20, "temperature": 1.0}


def test_streams_that_nobody_reads_give_their_places_away_and_go_on_with_the_same_text() -> None:
    exact = ("--reproducible", "--devices", "none")  # a stream next to another one rounds as it does alone
    with real_daemon("--parallel", "2", "--max-tx-bytes", "4096", "--ctx", "4096", *exact) as daemon:
        wanted = [daemon.ask(**LONG, seed=seed).ids for seed in range(2)]
        with contextlib.ExitStack() as stack:
            stuck = [stack.enter_context(daemon.wire(timeout_s=60)) for _ in range(2)]
            for seed, wire in enumerate(stuck):
                wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                wire.send(op="generate", id=f"stuck {seed}", **LONG, seed=seed)
            answer = daemon.ask(prompt="Hello", max_tokens=5, ignore_eos=True)  # long before write_timeout_s
            assert answer.reason == "length"
            for seed, wire in enumerate(stuck):
                late = wire.answer()
                assert late.ids == wanted[seed]
                assert (len(late.ids), late.reason) == (350, "length")
        daemon.settled()
