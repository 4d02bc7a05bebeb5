"""Clients that leave at random moments, in all dialects; everything that they used is released.

pytest --profile thorough -n 0 -s tests/gateway/test_churn.py
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter

import psutil
import pytest

from tests.gateway.conftest import Gateway, HttpCanary, Raw
from tests.support.forked import WITH_STANDBY
from tests.support.profile import amount
from tests.support.real_daemon import Canary, missing, real_daemon

MIB = 1 << 20
DISCONNECTS = amount(quick=150, thorough=5000)
THREADS = 12
"""Clients at a time.  More than run together, so that some leave while they wait."""
ROOM = 6

CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
TOOL = {"name": "weather", "description": "", "input_schema": {"type": "object"}}
INPUT = {"input": "Tell me a story about a fox."}
REQUESTS: tuple[tuple[str, dict[str, object], str], ...] = (
    ("/v1/chat/completions", {**CHAT, "ignore_eos": True}, "max_tokens"),
    ("/v1/chat/completions", {**CHAT, "n": 3, "ignore_eos": True}, "max_tokens"),
    ("/v1/completions", {"prompt": ["Once upon a time", "The red fox"], "ignore_eos": True}, "max_tokens"),
    ("/v1/responses", INPUT, "max_output_tokens"),
    ("/v1/messages", {**CHAT, "tools": [TOOL], "system": "Be kind. " * 50}, "max_tokens"),
    ("/api/chat", CHAT, "num_predict"),
    ("/api/generate", {"prompt": "Tell me a story."}, "num_predict"),
    ("/v1/generate", {"prompt": "the red fox and the " * 150, "ignore_eos": True}, "max_tokens"),
    ("/v1/generate", {**CHAT, "session_id": "churn"}, "max_tokens"),
    ("/v1/embeddings", {"input": ["the red fox and the " * 50] * 20}, ""),
    ("/v1/tokenize", {"text": "x " * 5000}, ""),
    ("/readyz", {}, ""),
)
"""Path, body, and the field that says how long the answer may be."""


def request(rng: random.Random) -> tuple[str, bytes]:
    path, body, limit = rng.choice(REQUESTS)
    body = {"model": "embedded", **body}
    if limit:
        n_tokens = rng.choice((3, 300))
        body |= {"options": {limit: n_tokens}} if limit == "num_predict" else {limit: n_tokens}
        body["stream"] = rng.random() < 0.5
    if path == "/readyz":
        return path, b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    data = json.dumps(body).encode()
    return path, b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (
        path.encode(),
        len(data),
        data,
    )


def leave(gateway: Gateway, rng: random.Random) -> str:
    """Send a request, or a part of it, and leave: at once, after some bytes of the answer, or after some time.

    Returns:
        Path and moment.
    """
    path, data = request(rng)
    with Raw(gateway) as raw:
        if rng.random() < 0.1:
            raw.send(data[: rng.randrange(len(data))])
            return f"{path} sending"
        raw.send(data)
        if rng.random() < 0.1:
            raw.sock.shutdown(socket.SHUT_WR)
        raw.sock.settimeout(rng.choice((0.001, 0.01, 0.05, 0.2, 1)))
        received = 0
        for _ in range(rng.choice((0, 1, 1, 3, 10))):
            try:
                part = raw.sock.recv(rng.choice((1, 65536)))
            except (TimeoutError, ConnectionResetError):
                break
            if not part:
                return f"{path} ended"
            received += len(part)
        return f"{path} {'answer' if received else 'waiting'}"


def churn(gateway: Gateway, clients: int, seed: int) -> Counter[str]:
    """Let ``clients`` connect and leave, a few at a time; count their moments."""
    moments: Counter[str] = Counter()
    failures: list[Exception] = []

    def some(thread: int) -> None:
        rng = random.Random(f"{seed} {thread}")
        try:
            for _ in range(clients // THREADS):
                moments[leave(gateway, rng)] += 1
        except Exception as error:  # noqa: BLE001  (raised below)
            failures.append(error)

    threads = [threading.Thread(target=some, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return moments


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_disconnects_release_everything() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    flags = ("--parallel", str(ROOM), "--ctx", "24576", "--max-queue", "64")
    with real_daemon("--http", "0", *flags, "--frame-timeout-s", "2", environment=WITH_STANDBY) as daemon:
        gateway = Gateway.of(daemon)
        process = psutil.Process(daemon.metrics()["gateway"]["pid"])
        churn(gateway, 10 * THREADS, seed=1)  # warm-up
        daemon.standby()
        before = daemon.settled()
        fds, gateway_fds = daemon.n_fds(), process.num_fds()
        rss = {each: each.memory_info().rss for each in daemon.processes}
        began = time.monotonic()
        with Canary(daemon, max_tokens=30) as canary, HttpCanary(gateway, max_tokens=30) as http_canary:
            moments = churn(gateway, DISCONNECTS, seed=2)
        duration_s = time.monotonic() - began
        after = daemon.settled()
        grown = [each.memory_info().rss - was for each, was in rss.items()]
        ended = {reason: n - before["requests_total"].get(reason, 0) for reason, n in after["requests_total"].items()}
        print(
            f"{DISCONNECTS} clients in {duration_s:.0f} s: {sum(n for name, n in moments.items() if 'waiting' in name)} left "
            f"while waiting, {sum(n for name, n in moments.items() if 'answer' in name)} in the answer; ended {ended}; "
            f"RSS grew by {[f'{each / MIB:.1f}' for each in grown]} MiB, file descriptors {fds} -> {daemon.n_fds()}; "
            f"canaries: {canary.rounds} and {http_canary.rounds} rounds; {dict(moments)}"
        )
        assert process.is_running(), "the gateway did not die"
        daemon.wait_until(lambda _: process.num_fds() <= gateway_fds, "descriptors of the gateway are free")
        daemon.wait_fds(fds)
        assert sum(grown) < 32 * MIB
        assert ended["cancelled"] > DISCONNECTS / 10
        with gateway.http() as client:
            daemon.wait_until(
                lambda _: "uma_http_requests_in_flight 1.0" in client.get("/metrics").text, "no request has not ended"
            )
