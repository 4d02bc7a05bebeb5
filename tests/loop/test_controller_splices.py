"""Tokens that controllers insert and remove: the rest of the answer is as if it had been so from the beginning."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio

from tests.support.controlling import START, Client, Controlling, controlling
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.profile import sampled, thorough
from tests.support.programs import Back, Fork, Gen, Insert, Program, Say, Script, Set, Wait, by_path, expected
from tests.support.serving import token_to_bytes
from uma_trio.protocol.events import Token

PROGRAMS = {"program": Program}
WORDS = list(range(100, 160))


async def run(harness: Controlling, script: Script, n: int = 200, **fields) -> Client:
    """Run a program to its end."""
    await harness.done(await harness.control("program", client := Client(), n, argument=script, **fields))
    return client


def engines() -> list:
    return [
        pytest.param({}, id="unified"),
        pytest.param({"unified": False, "n_ctx": 8 * 512}, id="per sequence"),
        pytest.param({"can_truncate": False}, id="without truncation"),
    ]


# -- backtracking -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", sampled(engines(), 3))
@pytest.mark.parametrize("n", [1, thorough(4), 9])
@pytest.mark.parametrize("tokens", [[], [7], thorough(WORDS)])
async def test_what_was_removed_was_never_generated(autojump_clock, options, n, tokens):
    """Texts, tokens, log-probabilities and KV cells; draws depend on seed and position alone."""
    with_detour = [Say(WORDS), Gen(5), Insert([3, 4]), Gen(n), Back(n, tokens), Gen(8)]
    direct = [Say(WORDS), Gen(5), Insert([3, 4, *tokens]), Gen(8)]
    fields = {"temperature": 1.0, "seed": 3, "logprobs": 2, "repetition_penalty": 1.2}
    async with controlling(PROGRAMS, FakeEngine(**options)) as harness:
        found, wanted = await run(harness, with_detour, **fields), await run(harness, direct, **fields)
        assert found.tokens == wanted.tokens
        assert found.texts == wanted.texts
        whole = {"stream": False, **fields}
        found, wanted = await run(harness, with_detour, **whole), await run(harness, direct, **whole)
        assert found.ends[0].text == wanted.ends[0].text
        assert found.ends[0].logprobs == wanted.ends[0].logprobs
        assert found.ends[0].usage.completion_tokens == wanted.ends[0].usage.completion_tokens
        assert found.ends[0].usage.sampled_tokens == wanted.ends[0].usage.sampled_tokens + n
        assert found.ends[0].usage.inserted_tokens == wanted.ends[0].usage.inserted_tokens
        await harness.clean()
        assert len({*harness.engine.used_cells().values()}) == 1, "equal answers leave equally many cells for others"


async def test_greedy_text_after_a_detour_is_that_of_the_prefix(autojump_clock):
    script = [Say(WORDS), Gen(7), Back(12, [9]), Gen(6)]
    async with controlling(PROGRAMS) as harness:
        client = await run(harness, script)
        kept = WORDS[:55]
        assert client.tokens[0] == [*kept, 9, *expected_continuation([START, *kept, 9], 6)] == expected(script)[""]
        await harness.clean()


async def test_everything_is_removed(autojump_clock):
    script = [Say(WORDS), Gen(3), Back(63), Gen(4)]
    async with controlling(PROGRAMS) as harness:
        client = await run(harness, script)
        assert client.tokens[0] == expected_continuation([START], 4)
        telemetry = harness.scheduler.telemetry
        assert telemetry.principals.of("uid:0").prompt_tokens_total == 1, "the first token of the answer comes once"
        assert telemetry.totals["late_masks"] == 0
        await harness.clean()


async def test_more_than_everything_is_an_error(autojump_clock):
    async with controlling(PROGRAMS) as harness:
        client = await run(harness, [Say(WORDS), Gen(3), Back(64), Gen(4)])
        assert client.reasons == {0: "E_CONTROLLER_FAILED"}
        assert "removes 64 tokens of an answer of 63" in client.ends[0].message
        await harness.clean()


@pytest.mark.parametrize("options", engines())
async def test_everything_is_removed_with_the_end_of_the_prompt_put_back(autojump_clock, options):
    """So does a controller that appends a token whenever it removes some."""
    script = [Say(WORDS), Gen(3), Back(64, [START]), Gen(4), Back(5, [START, 9]), Gen(2)]
    async with controlling(PROGRAMS, FakeEngine(**options)) as harness:
        client = await run(harness, script)
        assert client.tokens[0] == [9, *expected_continuation([START, 9], 2)]
        await harness.clean()


async def test_a_controller_that_removes_for_ever_is_ended(autojump_clock):
    async with controlling(PROGRAMS) as harness:
        client = await run(harness, [Gen(5), Back(5)] * 32 + [Gen(3)], n=10)
        assert client.reasons == {0: "stop"}
        client = await run(harness, [Gen(5), Back(5)] * 33 + [Gen(3)], n=10)
        assert client.reasons == {0: "E_CONTROLLER_FAILED"}
        assert "has removed 165 tokens, more than 16 times the longest answer of 10" in client.ends[0].message
        await harness.clean()


def half(token: int) -> bytes:
    """Tokens 500 and 501 are the halves of a character, and 502 to 504 the parts of another one."""
    return {500: b"\xc3", 501: b"\xa9", 502: b"\xf0\x9f", 503: b"\xa6", 504: b"\x8a"}.get(token) or token_to_bytes(
        token
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_characters_of_several_tokens(autojump_clock, monkeypatch, stream):
    """Text that is not sent yet belongs to the tokens: it goes with a fork, and comes back with backtracking."""
    script = [
        Say([7, 500]),
        Fork(
            [
                [Insert([501])],
                [Insert([501, 502, 503, 504]), Back(2, [503, 504])],
                [Insert([500]), Back(1, [501])],
                [Back(1, [502, 503]), Back(1, []), Insert([503, 504])],
            ]
        ),
    ]
    async with controlling(PROGRAMS) as harness:
        monkeypatch.setattr(harness.scheduler, "_token_to_bytes", half)
        client = await run(harness, script, stream=stream)
        found = client.texts if stream else {index: end.text for index, end in client.ends.items()}
        assert by_path(client, found) == {"/0": "7 é", "/1": "7 é🦊", "/2": "7 é", "/3": "7 🦊"}
        await harness.clean()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_ends_in_the_middle_of_a_character(autojump_clock, monkeypatch, stream):
    async with controlling(PROGRAMS) as harness:
        monkeypatch.setattr(harness.scheduler, "_token_to_bytes", half)
        client = await run(harness, [Say([7, 502])], stream=stream)
        assert (client.texts[0] if stream else client.ends[0].text) == "7 \ufffd"
        await harness.clean()


# -- inserted tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", engines())
async def test_inserted_tokens_are_like_a_prompt(autojump_clock, options):
    text = list(range(100, 400))
    async with controlling(PROGRAMS, FakeEngine(**options)) as harness:
        for script in ([Say(text), Gen(9)], [Insert(text), Gen(9)], [Say(text[:80]), Insert(text[80:]), Gen(9)]):
            client = await run(harness, script, 400)
            assert client.tokens[0][300:] == expected_continuation([START, *text], 9)
            assert client.ends[0].usage.inserted_tokens == 300
            forced = [event.inserted for event in client.events if isinstance(event, Token)]
            assert forced == [True] * 300 + [False] * 9
        plain = harness.ask([START, *text], asked := Client(), 9)
        await harness.done([plain])
        assert asked.tokens[0] == client.tokens[0][300:]
        await harness.clean()


async def test_inserted_tokens_are_prefilled_in_chunks_and_neighbours_keep_their_cadence(autojump_clock):
    """The same as next to a prompt of this length."""
    text = list(range(1, 900)) * 2

    async def gaps(*, controlled: bool) -> list[float]:
        engine = FakeEngine(cost_ms=lambda prompt, decodes: 2 + 0.2 * prompt + 0.5 * decodes)
        async with controlling(PROGRAMS, engine, target_itl_ms=40) as harness:
            times: list[float] = []

            class Neighbour(Client):
                def send(self, *events):
                    times.extend([trio.current_time()] * len(events))
                    super().send(*events)

            neighbour = harness.ask([5], Neighbour(), 200)
            await trio.sleep(0.2)
            if controlled:
                await run(harness, [Gen(2), Insert(text), Gen(3)], 2000)
            else:
                await harness.done([harness.ask([START, *text], Client(), 3, id="prompt")])
            await harness.done([neighbour])
            chunks = [len(each.tokens) for step in engine.steps for call in step.calls for each in call]
            assert 16 < max(chunks) < 200
            await harness.clean()
            return sorted(after - before for before, after in pairwise(times[:-1]))

    inserted, prompt = await gaps(controlled=True), await gaps(controlled=False)
    assert inserted[-1] <= 0.045
    assert sum(gap > 0.03 for gap in inserted) == pytest.approx(sum(gap > 0.03 for gap in prompt), abs=3)


@pytest.mark.parametrize("script", [[Say(WORDS)], [Gen(2), Insert(WORDS)], [Gen(9), Back(3, WORDS)]], ids=str)
async def test_max_tokens_ends_an_answer_within_inserted_tokens(autojump_clock, script):
    async with controlling(PROGRAMS) as harness:
        client = await run(harness, [*script, Gen(5)], 30)
        assert client.reasons == {0: "length"}
        assert client.tokens[0] == expected(script)[""][:30]
        assert client.ends[0].usage.completion_tokens == 30
        await harness.clean()


async def test_max_tokens_counts_what_is_there_and_not_what_was_removed(autojump_clock):
    script = [*[Gen(6), Back(6, [7])] * 8, Gen(12)]
    async with controlling(PROGRAMS) as harness:
        client = await run(harness, script, 20)
        assert client.reasons == {0: "length"}
        assert client.tokens[0] == expected(script)[""]
        assert client.ends[0].usage.sampled_tokens == 48 + 12
        await harness.clean()


async def test_an_inserted_text_after_a_wait(autojump_clock):
    script = [Gen(2), Fork([[Gen(1), Wait("done"), Say(WORDS), Gen(3)], [Gen(20), Set("done"), Say([5])]])]
    async with controlling(PROGRAMS) as harness:
        client = await run(harness, script)
        assert by_path(client, client.tokens) == expected(script)
        await harness.clean()
