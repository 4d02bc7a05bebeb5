"""KV events over real ZeroMQ sockets, of a scheduler over a fake engine in virtual time."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import zmq

from tests.support.asking import Client, Harness, asking
from tests.support.fake_engine import FakeEngine
from tests.support.kv_subscriber import HERE, PATIENCE_S, Blocks, Rebuilt, held_by, publishing_to
from tests.support.profile import amount, thorough
from tests.support.state_files import MemoryFiles
from uma_trio.config import load
from uma_trio.daemon.kv_events import publisher as publishing
from uma_trio.daemon.kv_events.publisher import KvEventPublisher, KvEventsError, kv_events


@asynccontextmanager
async def published(publisher: KvEventPublisher, **engine: object) -> AsyncIterator[Harness]:
    files = MemoryFiles()
    fake = FakeEngine(n_ctx=3072, n_seq_max=4, **engine)
    async with asking(fake, files, offload_after_s=5) as harness:
        with publisher.following(harness.scheduler.cache) as harness.scheduler.on_step:
            yield harness


async def random_work(harness: Harness, chance: random.Random, *, n: int) -> None:
    """Requests that share prefixes, of several principals; some are cancelled, some are sessions, and engines die."""
    stories: list[list[int]] = [[]]
    clients: list[Client] = []
    for _ in range(n):
        old = chance.choice(stories[-6:])
        prompt = [*old[: chance.randint(0, len(old))], *chance.choices(range(1, 800), k=chance.choice([1, 30, 200]))]
        if len(prompt) < 700:
            who, durable = chance.choice(["uid:0", "uid:0", "uid:1"]), chance.random() < 0.5
            client = harness.ask(prompt, chance.choice([1, 8, 60]), principal=who, session_id="s" if durable else None)
            clients.append(client)
            stories.append(prompt)
        await trio.sleep(chance.choice([0, 0, 0.02, 0.5, 7]))
        match chance.randrange(12):
            case 0:
                harness.scheduler.cancel(chance.choice(clients).answer)
            case 1:
                harness.scheduler._engine.link.kill()
            case 2 if clients[-1].answer.done.is_set():
                stories.append([*clients[-1].prompt, *clients[-1].tokens])
    await harness.ended(*clients)
    await harness.clean()
    await trio.testing.wait_all_tasks_blocked()


LOSSES = {
    "none": lambda number: False,
    "some": lambda number: number % 3 == 1,
    "most": lambda number: number % 7 != 0,
}


@pytest.mark.parametrize(
    "loses", [thorough(LOSSES["none"]), LOSSES["some"], thorough(LOSSES["most"])], ids=["none", "some", "most"]
)
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
async def test_a_subscriber_knows_what_the_prefix_index_holds(autojump_clock, unified, loses):
    with publishing_to(loses=loses) as (publisher, subscriber):
        for seed in range(amount(quick=1, thorough=60)):
            async with published(publisher, unified=unified) as harness:
                await random_work(harness, random.Random(seed), n=40)
                expected = held_by(harness.scheduler.cache)
                assert {medium for medium, _, _ in expected} == {"GPU", "DISK"}
                subscriber.receive_until(expected)
        subscriber.receive_until(Blocks())


async def test_an_engine_that_dies_leaves_the_saved_states_alone(autojump_clock):
    with publishing_to() as (publisher, subscriber):
        async with published(publisher) as harness:
            await harness.answer(range(1, 200), 8, session_id="s")
            await trio.sleep(30)
            both = held_by(harness.scheduler.cache)
            assert {medium for medium, _, _ in both} == {"GPU", "DISK"}
            subscriber.receive_until(both)
            harness.scheduler._engine.link.kill()
            await trio.sleep(30)
            saved = held_by(harness.scheduler.cache)
            assert {medium for medium, _, _ in saved} == {"DISK"}
            subscriber.receive_until(saved)


async def test_a_subscriber_that_comes_late_gets_everything_without_a_replay(autojump_clock):
    publisher = KvEventPublisher(HERE)
    context = zmq.Context()
    try:
        async with published(publisher) as harness:
            await harness.answer(range(1, 200), 8)
            await harness.answer([*range(1, 100), *range(300, 400)], 8)
            sub = context.socket(zmq.SUB)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(publisher.addresses[0])
            known, expected = Rebuilt(), held_by(harness.scheduler.cache)
            while known.blocks != expected:
                assert sub.poll(1e3 * PATIENCE_S)
                _, number, payload = sub.recv_multipart()
                assert not known.receive(int.from_bytes(number, "big"), payload) or known.next_number is None
    finally:
        context.destroy(linger=0)
        publisher.close()


async def test_what_is_kept_for_replays_is_bounded(autojump_clock, monkeypatch):
    monkeypatch.setattr(publishing, "MAX_BATCHES", 3)
    monkeypatch.setattr(publishing, "WHOLE_EVERY_S", 1e6)
    with publishing_to(loses=lambda number: number % 2 == 1) as (publisher, subscriber):
        async with published(publisher) as harness:
            for seed in range(20):
                await harness.answer(random.Random(seed).choices(range(1, 800), k=60), 4)
                subscriber.receive_until(held_by(harness.scheduler.cache))
            assert len(publisher._kept) <= 3
            assert subscriber.replays


async def test_nobody_waits_for_the_publisher(autojump_clock, monkeypatch):
    """While its thread stands still, requests are served; afterwards it tells the newest state."""
    with publishing_to() as (publisher, subscriber):
        stands, goes = threading.Event(), threading.Event()
        take = publisher._publish_latest

        def stop() -> None:
            stands.set()
            assert goes.wait(PATIENCE_S)
            take()

        async with published(publisher) as harness:
            monkeypatch.setattr(publisher, "_publish_latest", stop)
            await harness.answer(range(1, 50), 4)
            assert stands.wait(PATIENCE_S)
            for seed in range(50):
                await harness.answer(random.Random(seed).choices(range(1, 800), k=60), 4)
            goes.set()
            subscriber.receive_until(held_by(harness.scheduler.cache))


async def test_a_reload_is_followed_and_the_old_copy_is_not(autojump_clock):
    with publishing_to() as (publisher, subscriber):
        async with published(publisher) as old, published(publisher) as new:
            await new.answer(range(1, 100), 4)
            await old.answer(range(300, 400), 4)
            subscriber.receive_until(held_by(new.scheduler.cache))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_events": "tcp://0.0.0.0:0"}, "--kv-events-exposed"),
        ({"kv_events": "tcp://*:5557"}, "--kv-events-exposed"),
        ({"kv_events": "tcp://[::]:5557"}, "--kv-events-exposed"),
        ({"kv_events": "tcp://example.com:5557"}, "--kv-events-exposed"),
        ({"kv_events": HERE, "kv_events_replay": "tcp://0.0.0.0:0"}, "--kv-events-replay .*--kv-events-exposed"),
        ({"kv_events": "127.0.0.1:5557"}, "tcp://127.0.0.1:5557 is an example"),
        ({"kv_events": "tcp://127.0.0.1:65536"}, "tcp://127.0.0.1:5557 is an example"),
        ({"kv_events_replay": HERE}, "needs --kv-events"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(flags, message):
    with pytest.raises(KvEventsError, match=message), kv_events(load(flags=flags)):
        pass


def test_other_machines_may_read_them_if_that_is_said():
    with kv_events(load(flags={"kv_events": "tcp://0.0.0.0:0", "kv_events_exposed": True})) as publisher:
        assert publisher is not None


def test_a_port_that_is_taken_is_an_error_with_a_remedy():
    with kv_events(load(flags={"kv_events": HERE})) as publisher:
        address = publisher.addresses[0]
        with pytest.raises(KvEventsError, match="choose another"), kv_events(load(flags={"kv_events": address})):
            pass


def test_without_the_setting_nothing_is_published():
    with kv_events(load(flags={})) as publisher:
        assert publisher is None
