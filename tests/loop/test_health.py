"""The health query: what makes the daemon not ready, and that the answer waits for nothing."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import trio

from tests.support.fake_engine import FakeEngine
from tests.support.serving import serving
from uma_trio.daemon import server


def failing(health):
    """What is wrong: (name, reason) of each check that is not ok."""
    return [(check.name, check.reason) for check in health.checks if not check.ok]


async def test_a_ready_daemon(autojump_clock):
    async with serving() as harness, harness.client() as client:
        health = await client.health()
        assert health.ready
        assert [(check.name, check.model) for check in health.checks] == [
            *[(name, harness.service.name) for name in ("model", "engine", "queue", "memory")],
            ("memory", None),
            ("draining", None),
        ]
        assert all(check.reason for check in health.checks)


async def test_the_answer_does_not_wait_for_a_step(autojump_clock):
    slow = FakeEngine(cost_ms=lambda prompt, decodes: 10_000)
    async with serving(slow) as harness, harness.client() as client, harness.client() as asking:
        await client.send({"id": "r", "prompt": "hello", "max_tokens": 2})
        await trio.sleep(1)
        began = trio.current_time()
        assert (await asking.health()).ready
        assert trio.current_time() == began


async def test_a_full_queue_and_one_that_is_not(autojump_clock):
    async with (
        serving(FakeEngine(n_seq_max=1), max_queue=1) as harness,
        harness.client() as first,
        harness.client() as second,
        harness.client() as asking,
    ):
        await first.send({"id": "a", "prompt": "hello", "max_tokens": 500})
        await first.receive()
        assert (await asking.health(keep_alive=True)).ready
        await second.send({"id": "b", "prompt": "hello", "max_tokens": 500})
        await trio.sleep(0.1)
        health = await asking.health(keep_alive=True)
        assert not health.ready
        assert failing(health) == [("queue", "1 of 1 requests wait")]
        await first.cancel("a")
        await trio.sleep(0.1)
        assert (await asking.health()).ready


async def test_a_queue_of_no_length_is_full_when_every_sequence_is_taken(autojump_clock):
    async with (
        serving(FakeEngine(n_seq_max=1), max_queue=0) as harness,
        harness.client() as client,
        harness.client() as asking,
    ):
        assert (await asking.health(keep_alive=True)).ready
        await client.send({"id": "a", "prompt": "hello", "max_tokens": 500})
        await client.receive()
        assert failing(await asking.health()) == [("queue", "0 of 0 requests wait")]


async def test_requests_that_wait_for_cells(autojump_clock):
    async with (
        serving(FakeEngine(n_ctx=1000)) as harness,
        harness.client() as first,
        harness.client() as second,
        harness.client() as asking,
    ):
        await first.send({"id": "a", "prompt": "hello", "max_tokens": 900})
        await first.receive()
        assert (await asking.health(keep_alive=True)).ready, "nobody waits"
        await second.send({"id": "b", "prompt": "hello", "max_tokens": 900})
        await trio.sleep(0.1)
        [(name, reason)] = failing(await asking.health())
        found = re.fullmatch(r"running requests reserve 904 of 1000 KV cells and use (\d+)", reason)
        assert name == "memory"
        assert found is not None, reason
        assert 4 < int(found[1]) < 904, "a cell is reserved long before it holds a token"


@pytest.mark.parametrize("available", [0, 1_000_000_000])
async def test_a_machine_without_memory(autojump_clock, monkeypatch, available):
    memory = SimpleNamespace(available=available, total=16_000_000_000)
    monkeypatch.setattr(server.psutil, "virtual_memory", lambda: memory)
    async with serving() as harness, harness.client() as client:
        health = await client.health()
        assert health.ready == bool(available)
        assert failing(health) == ([] if available else [("memory", "0 MB of the machine's 16000 MB are free")])


async def test_an_engine_that_cannot_be_started(autojump_clock):
    async with serving(engine_restart_attempts=2) as harness, harness.client() as client:
        harness.engine.fail_restarts = 5
        harness.scheduler._engine.link.kill()
        await trio.sleep(0.1)
        [(name, reason)] = failing(await client.health(keep_alive=True))
        assert (name, reason.split(":")[0]) == ("engine", "restarting")
        await trio.sleep(2)
        [(name, reason)] = failing(await client.health(keep_alive=True))
        assert name == "engine"
        assert "cannot be started" in reason
        await trio.sleep(60)
        assert (await client.health()).ready


async def test_a_daemon_that_drains(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.send({"id": "a", "prompt": "hello", "max_tokens": 500})
        await client.receive()
        harness.server.drain()
        await client.send({"type": "health", "id": "h"})
        while (event := await client.receive()).id != "h":
            pass
        assert failing(event) == [("draining", "the server is shutting down")]
