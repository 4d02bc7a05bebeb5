"""Prompts with pictures: which rows the engine is asked for, and what requests with equal pictures share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import trio

from tests.support.asking import Client, Harness, asking
from tests.support.fake_engine import FakeEngine
from tests.support.state_files import memory_file
from uma_trio import errors
from uma_trio.daemon.prompts.media import PlacedRows, rows_of
from uma_trio.encoder.encoded import EncodedMedia, RowBlock, RowFile, placeholders
from uma_trio.engine_link.media import PLACEHOLDER
from uma_trio.engine_link.messages import EngineDied, EngineError, StepInput

N_ROWS, WIDTH, AROUND = 40, 4, 7
"""Rows of a picture, their width, and the token that the model expects before, after and in the middle of it."""


def encoded(name: str, *, is_causal: bool = True) -> EncodedMedia:
    """A picture in two halves."""
    half = N_ROWS // 2
    blocks = [RowBlock(half, is_causal)] * 2
    ids = placeholders(hashlib.sha256(name.encode()).digest(), blocks)
    rows = np.arange(N_ROWS * WIDTH, dtype=np.float32)
    tokens = np.array([AROUND, *ids[:half], AROUND, *ids[half:], AROUND], np.int32)
    return EncodedMedia(tokens, RowFile(memory_file(rows.tobytes()), N_ROWS, WIDTH), blocks)


def prompt_of(*parts: Sequence[int] | EncodedMedia) -> tuple[list[int], list[PlacedRows]]:
    """Tokens of texts and pictures, and where the rows are."""
    tokens: list[int] = []
    placed: list[PlacedRows] = []
    for part in parts:
        if isinstance(part, EncodedMedia):
            placed += rows_of(part, len(tokens))
            tokens += part.tokens.tolist()
        else:
            tokens += part
    return tokens, placed


def prefills(harness: Harness, client: Client) -> list[StepInput]:
    """What the engine computed of the client's prompt."""
    inputs = [each for step in harness.engine.steps for call in step.calls for each in call]
    prompt = client.prompt
    return [
        each
        for each in inputs
        if isinstance(each, StepInput)
        and [*each.tokens] == prompt[each.position : each.position + len(each.tokens)]
        and len(each.tokens) > 1
    ]


def check_rows(chunk: StepInput, placed: Sequence[PlacedRows]) -> int:
    """Check that exactly the placeholders of a chunk are rows, and the right ones; returns how many there are."""
    rows = {}
    for media in chunk.media:
        for n in range(media.n):
            rows[chunk.position + media.at + n] = media.fd, media.start + n
    expected = {
        each.start + n: (each.file.fd, each.first + n)
        for each in placed
        for n in range(each.block.n)
        if chunk.position <= each.start + n < chunk.position + len(chunk.tokens)
    }
    assert rows == expected
    assert [at - chunk.position for at in rows] == [
        n for n, token in enumerate(np.asarray(chunk.tokens).tolist()) if token >= PLACEHOLDER
    ]
    return len(rows)


@pytest.mark.parametrize("batch", [16, 64, 512])
async def test_chunks_have_the_rows_of_their_placeholders(autojump_clock, batch):
    tokens, placed = prompt_of([1, 2, 3], encoded("a cat"), [4], encoded("a dog"), encoded("a cat"), [5, 6])
    assert len(placed) == 6
    async with asking(FakeEngine(n_batch=batch)) as harness:
        client = harness.ask(tokens, 5, media=placed)
        await harness.ended(client)
        chunks = prefills(harness, client)
        assert sum(check_rows(chunk, placed) for chunk in chunks) == 3 * N_ROWS
        assert client.reason == "length"
        await harness.clean()


@pytest.mark.parametrize("streams", [0, 3])
async def test_rows_that_attend_to_each_other_are_in_one_step(autojump_clock, streams):
    tokens, placed = prompt_of(
        [1, 2, 3], encoded("a cat", is_causal=False), [4], encoded("a dog", is_causal=False), [5]
    )
    async with asking(FakeEngine(n_batch=32)) as harness:
        others = [harness.ask([9, n], 200) for n in range(streams)]
        await trio.sleep(0.2)
        clients = [
            harness.ask([n, *tokens], 5, media=[attrs.evolve(each, start=each.start + 1) for each in placed])
            for n in range(2)
        ]
        for client in (*clients, *others):
            await harness.ended(client)
        chunks = [chunk for chunk in prefills(harness, clients[0]) if chunk.media]  # those of both: they look alike
        assert [[rows.n for rows in chunk.media] for chunk in chunks] == [[N_ROWS // 2]] * 8
        assert [len(chunk.tokens) for chunk in chunks] == [N_ROWS // 2] * 8
        assert not any(rows.is_causal for chunk in chunks for rows in chunk.media)
        await harness.clean()


@pytest.mark.parametrize("failure", [EngineError("no room"), EngineDied("SIGKILL")], ids=str)
async def test_rows_are_prefilled_again_after_a_failure(autojump_clock, failure):
    tokens, placed = prompt_of([1, 2, 3], encoded("a cat"), [5, 6])
    async with asking() as harness:
        alone = await harness.answer(tokens, 30, media=placed)
    async with asking() as harness:
        client = harness.ask(tokens, 30, media=placed)
        await trio.sleep(0.3)
        harness.engine.fail_next = failure
        await harness.ended(client)
        assert client.tokens == alone.tokens
        assert sum(check_rows(chunk, placed) for chunk in prefills(harness, client)) >= N_ROWS
        await harness.clean()


async def test_equal_pictures_share_their_prefix_and_others_do_not(autojump_clock):
    async with asking() as harness:
        tokens, placed = prompt_of([1, 2, 3], encoded("a cat"), [5, 6])
        await harness.answer(tokens, media=placed)
        same, placed = prompt_of([1, 2, 3], encoded("a cat"), [8, 9])
        assert (await harness.answer(same, media=placed)).cached == len(tokens) - 2
        other, placed = prompt_of([1, 2, 3], encoded("a dog"), [5, 6])
        assert (await harness.answer(other, media=placed)).cached <= 4
        await harness.clean()


async def test_penalties_do_not_see_placeholders_and_nothing_speculates(autojump_clock):
    tokens, placed = prompt_of([1, 2, 3], encoded("a cat"), [5, 6])
    async with asking(speculation=True) as harness:
        client = harness.ask(tokens, 20, media=placed, repetition_penalty=1.5, repeat_last_n=64)
        assert client.answer.sampling.history is not None
        assert client.answer.sampling.history.past(0).tokens.tolist() == [1, 2, 3, AROUND, AROUND, AROUND, 5, 6]
        await harness.ended(client)
        assert client.answer.speculation.lookup is None
        assert client.reason == "length"


async def test_nothing_of_a_prompt_with_pictures_is_dropped(autojump_clock):
    tokens, placed = prompt_of([1] * 100, encoded("a cat"))
    async with asking(FakeEngine(n_ctx=128)) as harness:
        with pytest.raises(errors.BadRequest, match=r"this prompt has pictures or sound: send \d+ tokens less"):
            harness.ask(tokens, 8, media=placed, n_keep=4)
