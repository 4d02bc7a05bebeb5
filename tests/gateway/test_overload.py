"""Many clients for 32 sequences: everybody is answered or learns when to come back, and that holds.

pytest --profile thorough -n 0 -s tests/gateway/test_overload.py
"""

from __future__ import annotations

import contextlib
import statistics

import httpx
import psutil
import pytest
import trio

from tests.gateway.conftest import Gateway, HttpCanary
from tests.support.profile import amount
from tests.support.real_daemon import Canary, missing, real_daemon

MIB = 1 << 20
CLIENTS = amount(quick=100, thorough=500)
ROOM, QUEUE = 32, 16
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


@pytest.mark.thorough
async def test_many_clients_for_32_sequences() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    flags = ("--parallel", str(ROOM), "--ctx", "32768", "--max-queue", str(QUEUE), "--http", "0")
    tries: list[int] = []
    texts: set[str] = set()
    waits_s: list[int] = []
    with real_daemon(*flags) as daemon:
        gateway = Gateway.of(daemon)
        canaries = Canary(daemon, max_tokens=30), HttpCanary(gateway, max_tokens=30)
        before = {each.pid: each.memory_info().rss for each in daemon.processes}
        most = dict(before)

        async def client(http: httpx.AsyncClient) -> None:
            for attempt in range(1, 100):
                answer = await http.post("/v1/chat/completions", json={**QUESTION, "max_tokens": 40})
                if answer.status_code == 200:
                    tries.append(attempt)
                    texts.add(answer.json()["choices"][0]["message"]["content"])
                    return
                assert answer.status_code == 429, answer.text
                assert answer.json()["error"]["uma_code"] in ("E_LIMIT_QUEUE", "E_LIMIT_KV", "E_LIMIT_CONNECTIONS")
                waits_s.append(int(answer.headers["retry-after"]))
                await trio.sleep(waits_s[-1])

        async def watch() -> None:
            while True:
                for process in daemon.processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        most[process.pid] = max(most.get(process.pid, 0), process.memory_info().rss)
                await trio.sleep(0.2)

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        began = trio.current_time()
        with canaries[0], canaries[1]:
            async with (
                httpx.AsyncClient(base_url=gateway.url, timeout=300, limits=limits) as http,
                trio.open_nursery() as watching,
            ):
                watching.start_soon(watch)
                async with trio.open_nursery() as nursery:
                    for _ in range(CLIENTS):
                        nursery.start_soon(client, http)
                watching.cancel_scope.cancel()
        daemon.settled()
    grown = [most[pid] - before[pid] for pid in before]
    print(
        f"{CLIENTS} clients in {trio.current_time() - began:.0f} s: {statistics.mean(tries):.2f} tries on average, at most "
        f"{max(tries)}; waits of {min(waits_s)} to {max(waits_s)} s; RSS grew by {[round(each / MIB) for each in grown]} MiB; "
        f"rounds of the canaries: {canaries[0].rounds} and {canaries[1].rounds}"
    )
    assert len(tries) == CLIENTS
    assert len(texts) == 1
    assert sum(grown) < 128 * MIB
