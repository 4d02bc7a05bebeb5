"""KV events of a real engine, also of one that dies, and of a daemon with its flags."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import trio

from tests.support.asking import Client
from tests.support.kv_subscriber import BLOCK, HERE, Blocks, Subscriber, held_by, publishing_to
from tests.support.real_daemon import asked, real_daemon
from tests.support.serving import settings
from uma_trio import config
from uma_trio.daemon.engines.link import ProcessLauncher
from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.engine_link.messages import Start
from uma_trio.models.packaged import EMBEDDED
from uma_trio.principal import Principal
from uma_trio.protocol.requests import Generate

pytestmark = pytest.mark.usefixtures("forked_children")


async def test_a_subscriber_knows_what_a_real_engine_holds(library: None) -> None:
    """After requests that share prefixes, some of which are cancelled, and the death of the engine among them."""
    chance, options = random.Random(5), config.Model(ctx=4096, parallel=4, batch_tokens=64, threads=1, layout_trial_s=0)
    with publishing_to(loses=lambda number: number % 4 == 1) as (publisher, subscriber):
        async with trio.open_nursery() as nursery:
            launcher, start = ProcessLauncher(nursery), Start(EMBEDDED, options)
            link = launcher.launch("embedded")
            info = await link.load(start, lambda progress: None, lambda: True)
            assert info is not None
            scheduler = Scheduler(
                SupervisedEngine(launcher, start, link, config.Engine()), lambda token: b"x", settings()
            )
            await nursery.start(scheduler.run)
            with publisher.following(scheduler.cache) as scheduler.on_step:
                stories: list[list[int]] = [[]]
                clients: list[Client] = []
                for n in range(24):
                    story = chance.choice(stories[-4:])
                    prompt = [*story[: chance.randint(0, len(story))], *chance.choices(range(10, 900), k=40)]
                    stories.append(prompt)
                    client = Client(prompt)
                    request = Generate(id=str(n), prompt="", max_tokens=16, ignore_eos=True)
                    tokens = Prompt(np.asarray(prompt, dtype=np.int32), "")
                    [client.answer] = scheduler.submit(
                        PreparedRequest(request, tokens, client, Principal(f"uid:{n % 3}"))
                    )
                    clients.append(client)
                    match n % 8:
                        case 3:
                            await client.answer.done.wait()
                        case 5:
                            scheduler.cancel(client.answer)
                        case 7 if n == 15:
                            scheduler._engine.link.kill()
                for client in clients:
                    await client.answer.done.wait()
                await scheduler.wait_idle()
                assert scheduler._engine.restarts == 1
                expected = held_by(scheduler.cache)
                assert expected
                subscriber.receive_until(expected)
            subscriber.receive_until(Blocks())
            await scheduler._engine.link.aclose()
            nursery.cancel_scope.cancel()


def test_the_flags_of_a_daemon(library: None) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 8
    with real_daemon("--kv-events", HERE, "--kv-events-replay", HERE) as daemon:
        [entry] = [each for each in map(json.loads, daemon.logs().splitlines()) if each["event"] == "KV events"]
        subscriber = Subscriber(entry["address"], entry["replay"])
        try:
            prompt = asked(daemon, lambda client: client.tokenize(text)).tokens
            answer = daemon.ask(prompt=text, max_tokens=5, ignore_eos=True)
            held = [*prompt, *answer.ids[:-1]]  # the last token was sampled, and not computed
            subscriber.receive_until(
                Blocks(("GPU", "", tuple(held[:end])) for end in range(BLOCK, len(held) + 1, BLOCK))
            )
        finally:
            subscriber.close()
