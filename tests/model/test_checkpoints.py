"""Prefix reuse in a memory that cannot be truncated: checkpoints save work and change no token.

Where tokens are compared, flash attention is off and all steps have the same size; ``test_memories`` says why.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import pytest
import trio

from tests.support.asking import Client
from tests.support.checkpoint_contract import *  # noqa: F403  (the tests)
from tests.support.gpu import agree
from tests.support.profile import thorough
from tests.support.random_models import random_model
from tests.support.serving import settings
from uma_trio import config
from uma_trio.daemon.engines.link import ThreadLauncher
from uma_trio.daemon.engines.supervisor import SupervisedEngine
from uma_trio.daemon.kv.checkpoints import TOKENS_AFTER_LAST
from uma_trio.daemon.policy.timings import StepTimings
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.daemon.store.state_folder import StateFolder
from uma_trio.engine.llama import LlamaEngine
from uma_trio.engine_link.kv_ops import MAX_CHECKPOINTS
from uma_trio.engine_link.messages import Start
from uma_trio.principal import Principal
from uma_trio.protocol.requests import Generate

KV_LAYOUTS = pytest.mark.parametrize("kv_unified", ["off", thorough("on")])


def words(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(100, 30_000), k=n)


@pytest.fixture
def make(library: None) -> Iterator[Callable[..., LlamaEngine]]:
    """See ``tests.support.engine_contract``."""
    with contextlib.ExitStack() as stack:

        def make(*, n_ctx: int, n_seq_max: int, n_batch: int) -> LlamaEngine:
            options = config.Model(ctx=n_ctx, parallel=n_seq_max, batch_tokens=n_batch, threads=1)
            engine = LlamaEngine(random_model("tiny-hybrid"), options)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def prompts() -> list[list[int]]:
    return [words(seed, 5 + seed) for seed in range(4)]


@attrs.frozen
class Asking:
    """Sends requests to a scheduler over the real engine."""

    scheduler: Scheduler
    engine: LlamaEngine

    async def __call__(self, prompt: Sequence[int], n: int = 80, **fields: Any) -> Client:
        """Send one request and wait for its end."""
        client = Client(list(prompt))
        request = Generate(id="1", prompt="", max_tokens=n, temperature=0.0, ignore_eos=True, **fields)
        tokens = Prompt(np.asarray(prompt, dtype=np.int32), "")
        [client.answer] = self.scheduler.submit(PreparedRequest(request, tokens, client, Principal("uid:0")))
        with trio.fail_after(60):
            await client.answer.done.wait()
        return client

    async def uncached(self, prompt: Sequence[int], n: int = 80) -> list[int]:
        """The answer's tokens without prefix reuse."""
        client = await self(prompt, n, cache_prompt=False)
        assert client.cached == 0
        assert len(client.tokens) == n
        return client.tokens


@contextlib.asynccontextmanager
async def asking(kv_unified: str, states: Path | None = None) -> AsyncIterator[Asking]:
    """A scheduler over tiny-hybrid, whose engine runs in a thread.

    Args:
        states: folder for the states of idle sequences; states that are in it can be loaded.
    """
    options = config.Model(ctx=8192, parallel=4, batch_tokens=64, threads=1, kv_unified=kv_unified, flash_attn="off")
    start = Start(random_model("tiny-hybrid", ctx=4096), options)
    engines = []

    def open_engine(start: Start, on_progress: Callable[[float], bool]) -> LlamaEngine:
        engines.append(LlamaEngine(start.path, start.settings, on_progress))
        return engines[-1]

    with contextlib.ExitStack() as stack:
        files = None
        if states is not None:
            files = StateFolder(states, max_bytes=1 << 30, fingerprint="tiny")
            stack.callback(files.close)
        # loading a state of so small a model is slower than computing it
        stack.enter_context(patch.object(StepTimings, "worth_loading", lambda self, n_tokens, n_bytes: True))
        async with trio.open_nursery() as nursery:
            launcher = ThreadLauncher(nursery, open_engine)
            link = launcher.launch("tiny")
            assert await link.load(start, lambda progress: None, lambda: True)
            [engine] = engines
            scheduler = Scheduler(
                SupervisedEngine(launcher, start, link, config.Engine()),
                engine.tokenizer.token_to_bytes,
                settings(offload_after_s=1e8),
            )
            if files is not None:
                scheduler.offloader.open(files, files.scan())
            await nursery.start(scheduler.run)
            yield Asking(scheduler, engine)
            await scheduler.wait_idle()
            scheduler.check_integrity()
            assert engine.used_cells() == scheduler.cache.held()
            assert link.is_usable, "the engine never failed"
            await link.aclose()
            nursery.cancel_scope.cancel()


@KV_LAYOUTS
async def test_a_repeated_request(library: None, kv_unified: str) -> None:
    async with asking(kv_unified) as ask:
        prompt = words(1, 200)
        expected = await ask.uncached(prompt)
        for cached in (0, 200 - TOKENS_AFTER_LAST, 200 - TOKENS_AFTER_LAST):
            client = await ask(prompt)
            assert (client.tokens, client.cached) == (expected, cached)


@pytest.mark.thorough
@KV_LAYOUTS
async def test_a_rewritten_last_turn_reuses_the_turns_before(library: None, kv_unified: str) -> None:
    async with asking(kv_unified) as ask:
        story = words(1, 200)
        story += (await ask(story)).tokens
        ended = len(story) - 1
        first = await ask([*story, *words(2, 30)])
        assert first.cached == ended
        for seed in (3, 4):
            prompt = [*story, *words(seed, 40)]
            expected = await ask.uncached(prompt)
            client = await ask(prompt)
            assert (client.tokens, client.cached) == (expected, ended)


@KV_LAYOUTS
async def test_a_next_turn_without_the_reasoning_reuses_the_prompt(library: None, kv_unified: str) -> None:
    async with asking(kv_unified) as ask:
        prompt = words(1, 200)
        reasoning = (await ask(prompt, 150)).tokens
        after = [*prompt, *reasoning[-20:], *words(2, 30)]
        expected = await ask.uncached(after)
        client = await ask(after)
        assert (client.tokens, client.cached) == (expected, 200 - TOKENS_AFTER_LAST)


@pytest.mark.thorough
@KV_LAYOUTS
async def test_a_branch_leaves_its_source_usable(library: None, kv_unified: str) -> None:
    """Most of the sequence is behind the checkpoint, so the sequence is copied and stays usable."""
    async with asking(kv_unified) as ask:
        prompt = words(1, 100)
        long = [*prompt, *(await ask(prompt, 400)).tokens]
        branch = [*prompt, *words(2, 30)]
        wanted, continued = await ask.uncached(branch), await ask.uncached([*long, 500])
        client = await ask(branch)
        assert (client.tokens, client.cached) == (wanted, 100 - TOKENS_AFTER_LAST)
        client = await ask([*long, 500])
        assert (client.tokens, client.cached) == (continued, len(long) - 1)


@KV_LAYOUTS
async def test_a_prefix_of_concurrent_requests_is_computed_once(library: None, kv_unified: str) -> None:
    async with asking(kv_unified) as ask:
        shared = words(1, 700)
        prompts = [[*shared, *words(seed, 40)] for seed in range(2, 6)]
        expected = [await ask.uncached(prompt, 40) for prompt in prompts]
        clients: dict[int, Client] = {}

        async def one(n: int) -> None:
            clients[n] = await ask(prompts[n], 40)

        async with trio.open_nursery() as nursery:
            for n in range(4):
                nursery.start_soon(one, n)
        assert all(agree(clients[n].tokens, expected[n]) for n in range(4))
        assert sorted(client.cached for client in clients.values()) == [0, 700, 700, 700]


@pytest.mark.thorough
@KV_LAYOUTS
async def test_a_prefix_of_successive_requests_gets_a_checkpoint_at_its_end(library: None, kv_unified: str) -> None:
    async with asking(kv_unified) as ask:
        shared = words(1, 700)
        for seed, cached in ((2, 0), (3, 320), (4, 700), (5, 700)):
            prompt = [*shared, *words(seed, 40)]
            expected = await ask.uncached(prompt, 40)
            client = await ask(prompt, 40)
            assert (client.tokens, client.cached) == (expected, cached)


@KV_LAYOUTS
async def test_saved_checkpoints_are_usable_after_a_restart(library: None, kv_unified: str, tmp_path: Path) -> None:
    async with asking(kv_unified, tmp_path) as ask:
        story = words(1, 200)
        story += (await ask(story, session_id="story")).tokens
        ended = len(story) - 1
        story += words(2, 100)
        prompt = list(story)
        story += (await ask(story, session_id="story")).tokens
        questions = {
            len(story) - 1: [*story, 500],
            len(prompt) - TOKENS_AFTER_LAST: prompt,
            ended: [*story[: ended + 1], *words(3, 40)],
        }
        expected = {cached: await ask.uncached(question, 150) for cached, question in questions.items()}
        with trio.fail_after(60):
            await ask.scheduler.offloader.save_everything()
    for cached, question in questions.items():
        async with asking(kv_unified, tmp_path) as ask:
            client = await ask(question, 150)  # room for the whole saved state
            assert agree(client.tokens, expected[cached])
            assert client.cached == cached
            assert ask.scheduler.snapshot()["kv_offload"]["loaded_total"] == 1
            assert ask.scheduler.snapshot()["kv_offload"]["load_failed_total"] == 0


@pytest.mark.thorough
async def test_a_long_chat_keeps_the_maximum_number_of_checkpoints(library: None) -> None:
    async with asking("off") as ask:
        story = words(1, 100)
        for turn in range(MAX_CHECKPOINTS):
            story += (await ask(story, 70)).tokens + words(turn, 70)
        assert ask.engine._kv_operations.n_checkpoints == MAX_CHECKPOINTS
