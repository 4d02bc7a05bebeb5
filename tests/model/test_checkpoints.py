"""A model whose memory cannot be cut goes back to checkpoints: the text is what it is without, and less is computed.

Without flash attention and in steps of the same size wherever tokens are compared: see ``test_memories``.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import trio

from tests.support.asking import Client
from tests.support.checkpoint_contract import *  # noqa: F403  (the tests)
from tests.support.random_models import random_model
from tests.support.serving import settings
from uma_trio import config
from uma_trio.engine.llama import LlamaEngine
from uma_trio.engine.thread import EngineThread
from uma_trio.kv.checkpoints import BEFORE_END, EACH
from uma_trio.models.prompt import Prompt
from uma_trio.protocol.messages import Generate
from uma_trio.runner import Runner
from uma_trio.runner.pace import Pace
from uma_trio.runner.state_files import saved_state
from uma_trio.store import StateFolder, principal_uid

LAYOUTS = pytest.mark.parametrize("unified", ["off", "on"])


def words(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(100, 30_000), k=n)


@pytest.fixture
def make(library: None) -> Iterator[Callable[..., LlamaEngine]]:
    """As the contract of engines wants it."""
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


class Asking:
    """Asks a runner over the real engine."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    async def __call__(self, prompt: Sequence[int], n: int = 80, **fields: Any) -> Client:
        durable = fields.pop("durable", False)
        client = Client(list(prompt))
        request = Generate(id="1", prompt="", max_tokens=n, temperature=0.0, ignore_eos=True, **fields)
        tokens = Prompt(np.asarray(prompt, dtype=np.int32), "")
        client.job = self.runner.submit(request, tokens, client, durable=durable)
        with trio.fail_after(60):
            await client.job.done.wait()
        return client

    async def anew(self, prompt: Sequence[int], n: int = 80) -> list[int]:
        """What is said when nothing is reused."""
        client = await self(prompt, n, cache_prompt=False)
        assert client.cached == 0
        assert len(client.tokens) == n
        return client.tokens


@contextlib.asynccontextmanager
async def asking(unified: str, states: Path | None = None) -> AsyncIterator[Asking]:
    """A runner over tiny-hybrid.

    Args:
        states: a folder where idle sequences go; those there are found again.
    """
    options = config.Model(ctx=8192, parallel=4, batch_tokens=64, threads=1, kv_unified=unified, flash_attn="off")
    engine = LlamaEngine(random_model("tiny-hybrid", ctx=4096), options)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        files = None
        if states is not None:
            files = StateFolder(states, max_bytes=1 << 30, fingerprint="tiny")
            stack.callback(files.close)
        thread = EngineThread("tiny")
        stack.callback(thread.close)
        # loading a state of so small a model is slower than computing it
        stack.enter_context(patch.object(Pace, "worth_loading", lambda self, tokens, n_bytes: True))
        runner = Runner(engine, thread, engine.tokenizer.token_to_bytes, settings(offload_after_s=1e8), files=files)
        if files is not None:
            found = [
                saved_state(s.name, principal_uid(s.principal), s.tokens, s.n_bytes, s.extra) for s in files.scan()
            ]
            runner.cache.shelf.add_all(found)
        async with trio.open_nursery() as nursery:
            await nursery.start(runner.run)
            yield Asking(runner)
            await runner.wait_idle()
            runner.check_integrity()
            held = runner.cache.held()
            assert await thread.run(engine.used_cells) == held
            nursery.cancel_scope.cancel()


@LAYOUTS
async def test_an_answer_asked_for_again(library: None, unified: str) -> None:
    async with asking(unified) as ask:
        prompt = words(1, 200)
        expected = await ask.anew(prompt)
        for cached in (0, 200 - BEFORE_END, 200 - BEFORE_END):
            client = await ask(prompt)
            assert (client.tokens, client.cached) == (expected, cached)


@LAYOUTS
async def test_a_last_turn_that_is_written_anew_goes_back_to_the_turn_before(library: None, unified: str) -> None:
    async with asking(unified) as ask:
        story = words(1, 200)
        story += (await ask(story)).tokens
        ended = len(story) - 1
        first = await ask([*story, *words(2, 30)])
        assert first.cached == ended
        for seed in (3, 4):
            prompt = [*story, *words(seed, 40)]
            expected = await ask.anew(prompt)
            client = await ask(prompt)
            assert (client.tokens, client.cached) == (expected, ended)


@LAYOUTS
async def test_what_was_thought_is_left_out_of_the_next_turn(library: None, unified: str) -> None:
    async with asking(unified) as ask:
        prompt = words(1, 200)
        thought = (await ask(prompt, 150)).tokens
        after = [*prompt, *thought[-20:], *words(2, 30)]
        expected = await ask.anew(after)
        client = await ask(after)
        assert (client.tokens, client.cached) == (expected, 200 - BEFORE_END)


@LAYOUTS
async def test_a_branch_and_its_source_go_on(library: None, unified: str) -> None:
    """More lies behind the checkpoint than before it: it is copied, and the source is still there."""
    async with asking(unified) as ask:
        prompt = words(1, 100)
        long = [*prompt, *(await ask(prompt, 400)).tokens]
        branch = [*prompt, *words(2, 30)]
        wanted, goes_on = await ask.anew(branch), await ask.anew([*long, 500])
        client = await ask(branch)
        assert (client.tokens, client.cached) == (wanted, 100 - BEFORE_END)
        client = await ask([*long, 500])
        assert (client.tokens, client.cached) == (goes_on, len(long) - 1)


@LAYOUTS
async def test_what_several_begin_with_is_computed_once(library: None, unified: str) -> None:
    async with asking(unified) as ask:
        shared = words(1, 700)
        prompts = [[*shared, *words(seed, 40)] for seed in range(2, 6)]
        expected = [await ask.anew(prompt, 40) for prompt in prompts]
        clients: dict[int, Client] = {}

        async def one(n: int) -> None:
            clients[n] = await ask(prompts[n], 40)

        async with trio.open_nursery() as nursery:
            for n in range(4):
                nursery.start_soon(one, n)
        assert [clients[n].tokens for n in range(4)] == expected
        assert sorted(client.cached for client in clients.values()) == [0, 700, 700, 700]


@LAYOUTS
async def test_one_after_another_with_one_beginning(library: None, unified: str) -> None:
    async with asking(unified) as ask:
        shared = words(1, 700)
        for seed, cached in ((2, 0), (3, 320), (4, 700), (5, 700)):
            prompt = [*shared, *words(seed, 40)]
            expected = await ask.anew(prompt, 40)
            client = await ask(prompt, 40)
            assert (client.tokens, client.cached) == (expected, cached)


@LAYOUTS
async def test_after_a_restart_it_goes_on_and_goes_back(library: None, unified: str, tmp_path: Path) -> None:
    async with asking(unified, tmp_path) as ask:
        story = words(1, 200)
        story += (await ask(story, durable=True)).tokens
        ended = len(story) - 1
        story += words(2, 100)
        prompt = list(story)
        story += (await ask(story, durable=True)).tokens
        questions = {
            len(story) - 1: [*story, 500],
            len(prompt) - BEFORE_END: prompt,
            ended: [*story[: ended + 1], *words(3, 40)],
        }
        expected = {cached: await ask.anew(question, 150) for cached, question in questions.items()}
        with trio.fail_after(60):
            await ask.runner.states.save_everything()
    for cached, question in questions.items():
        async with asking(unified, tmp_path) as ask:
            client = await ask(question, 150)  # with room for all that was saved
            assert (client.tokens, client.cached) == (expected[cached], cached)
            assert ask.runner.snapshot()["kv_offload"]["loaded_total"] == 1
            assert ask.runner.snapshot()["kv_offload"]["load_failed_total"] == 0


async def test_a_long_chat_keeps_as_many_checkpoints_as_it_may(library: None) -> None:
    async with asking("off") as ask:
        story = words(1, 100)
        for turn in range(EACH):
            story += (await ask(story, 70)).tokens + words(turn, 70)
        engine = ask.runner._engine
        assert isinstance(engine, LlamaEngine)
        assert len(engine._marks) == EACH
