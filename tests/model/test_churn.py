"""Clients disconnect at the worst moments; everything that they used is released."""

from __future__ import annotations

import random
import socket
import threading
import time

from tests.support.profile import amount
from tests.support.real_daemon import Canary, real_daemon

MIB = 1 << 20
CLIENTS, THREADS = amount(quick=100, thorough=2000), 6


def leave_mid_frame(wire, rng):
    frame = wire.frame(id="a", prompt="x" * rng.randint(1, 5000))
    wire.send_bytes(frame[: rng.randrange(len(frame))])


def leave_at_once(wire, rng):
    pass


def leave_in_prefill(wire, rng):
    wire.send(id="a", prompt="the red fox and the " * rng.randint(10, 80), max_tokens=50)
    time.sleep(rng.random() * 0.004)


def leave_in_stream(wire, rng):
    wire.send(id="a", prompt="Tell me a story", max_tokens=400, ignore_eos=True)
    for _ in range(rng.randint(1, 6)):
        assert wire.receive()["event"] == "token"


def reset(wire, rng):
    """Closing a socket with unread data resets the connection."""
    wire.send(id="a", prompt="Tell me a story", max_tokens=400, ignore_eos=True)
    wire.sock.recv(1)


def half_close(wire, rng):
    wire.send(id="a", prompt="Tell me a story", max_tokens=rng.choice((1, 400)), ignore_eos=True)
    wire.sock.shutdown(socket.SHUT_WR)
    if rng.random() < 0.5:
        wire.receive()


def half_close_mid_frame(wire, rng):
    wire.send_bytes(wire.frame(id="a", prompt="hello")[: rng.randint(1, 8)])
    wire.sock.shutdown(socket.SHUT_WR)
    if rng.random() < 0.5:
        assert [event["code"] for event in wire.rest()] == ["E_PROTO_TRUNCATED"]


def cancel_and_leave(wire, rng):
    wire.send(id="a", prompt="Tell me a story", max_tokens=400)
    wire.send(event="cancel", id="a")


def stay_to_the_end(wire, rng):
    assert wire.ask(prompt="Hello", max_tokens=rng.randint(1, 5)).reason in ("stop", "length")


WAYS = (
    *(leave_mid_frame, leave_at_once, leave_in_prefill, leave_in_stream, reset),
    *(half_close, half_close_mid_frame, cancel_and_leave, stay_to_the_end),
)


def churn(daemon, clients, seed):
    """Let ``clients`` connect and disconnect, a few at a time."""
    failures = []

    def some(thread):
        rng = random.Random(f"{seed} {thread}")
        try:
            for _ in range(clients // THREADS):
                with daemon.wire() as wire:
                    rng.choice(WAYS)(wire, rng)
        except Exception as error:  # noqa: BLE001  (raised below)
            failures.append(error)

    threads = [threading.Thread(target=some, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def test_disconnects_release_everything(library):
    with real_daemon("--parallel", "8", "--ctx", "8192", "--log-level", "warning") as daemon:
        churn(daemon, 60, seed=1)  # warm-up
        before = daemon.settled()
        fds, rss = daemon.n_fds(), daemon.rss
        began = time.monotonic()
        with Canary(daemon) as canary:
            churn(daemon, CLIENTS, seed=2)
        duration_s = time.monotonic() - began
        after = daemon.settled()  # connections, sequences, cells, queue and outboxes are at zero
        grown = daemon.rss - rss
        ended = {reason: n - before["requests_total"].get(reason, 0) for reason, n in after["requests_total"].items()}
        print(
            f"{CLIENTS} clients in {duration_s:.1f} s: RSS grew by {grown / MIB:.2f} MiB, file descriptors from {fds} to "
            f"{daemon.n_fds()}, ended {ended}, {canary.rounds} rounds of the canary, the slowest {canary.slowest_s:.2f} s"
        )
        assert after["kv"]["cached_sequences"] <= 8
        assert after["kv"]["cached_cells"] <= 8192
        daemon.wait_fds(fds)
        assert grown < 8 * MIB
        assert ended["cancelled"] > CLIENTS / 20
        assert daemon.ask(prompt="Hello", max_tokens=3).reason in ("stop", "length")
