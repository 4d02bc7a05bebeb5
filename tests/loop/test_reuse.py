"""What was computed once serves others: every text must be what it is without, in virtual time.

The fake model's next token depends on all tokens before it, so a wrong, missing or foreign one in the cache
changes the text.
"""

from __future__ import annotations

import random

import pytest
import trio

from tests.support.asking import Client, Harness, asking
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.serving import serving
from uma_trio.engine.messages import CopyPrefix, EngineError, Truncate
from uma_trio.protocol.messages import Slo

SHARED = random.Random(1).choices(range(1, 800), k=1500)
"""About as long as a system prompt with a few tools."""

LAYOUTS = pytest.mark.parametrize("unified", [True, False], ids=["unified", "apart"])


def engine(unified: bool, *, n_ctx: int = 32_768, **more: object) -> FakeEngine:
    return FakeEngine(n_ctx=n_ctx, unified=unified, **more)  # type: ignore[arg-type]


def is_right(client: Client) -> bool:
    """What it was told so far is what the model says after its prompt."""
    return client.tokens == expected_continuation(client.prompt, len(client.tokens))


def fan_out(harness: Harness, n: int = 8, n_tokens: int = 8, **fields: object) -> list[Client]:
    """Requests that begin alike, all at once."""
    return [harness.ask([*SHARED, 800 + i, 900], n_tokens, **fields) for i in range(n)]


# -- one after another ------------------------------------------------------------------------------


@LAYOUTS
async def test_a_chat_that_goes_on_computes_only_what_is_new(autojump_clock, unified):
    async with asking(engine(unified)) as harness:
        story = SHARED[:300]
        first = await harness.answer(story, 20)
        assert (first.cached, harness.computed) == (0, 300)
        for turn in range(5):
            story = [*story, *expected_continuation(story, 20), 801 + turn, *range(1, 30)]
            before = harness.computed
            client = await harness.answer(story, 20)
            assert is_right(client)
            assert client.cached == len(story) - 31, "the last token of an answer was never fed"
            assert harness.computed - before == 31
        await harness.clean()
        assert harness.scheduler.cache.statistics().cached_sequences == 1


@LAYOUTS
async def test_an_answer_asked_for_again_and_one_asked_for_otherwise(autojump_clock, unified):
    async with asking(engine(unified)) as harness:
        first = await harness.answer(SHARED, 20)
        again = await harness.answer(SHARED, 20)
        assert again.tokens == first.tokens
        assert again.cached == len(SHARED) - 1
        rewritten = await harness.answer([*SHARED[:1000], 999, 998], 20)
        assert is_right(rewritten)
        assert rewritten.cached == 1000
        await harness.clean()


async def test_what_was_copied_lives_on_by_itself(autojump_clock):
    async with asking(engine(unified=True, n_ctx=65_536)) as harness:
        long = [*SHARED, *range(1, 600), *SHARED]
        await harness.answer(long, 5)
        short = await harness.answer([*SHARED, 5, 6], 5)
        assert short.cached == len(SHARED)
        again = await harness.answer([*long, 7], 5)
        assert again.cached == len(long)
        assert is_right(short)
        assert is_right(again)
        await harness.clean()


async def test_what_is_told_adds_up(autojump_clock):
    """In ``usage`` and in the metrics."""
    async with asking(engine(unified=True)) as harness:
        clients = [await harness.answer([*SHARED, i], 4) for i in range(1, 4)]
        clients += fan_out(harness, 5)
        await harness.ended(*clients)
        await harness.clean()
        snapshot = harness.scheduler.snapshot()
        assert snapshot["prefix_cache_hits_total"] == sum(client.cached > 0 for client in clients) == 7
        assert snapshot["cached_tokens_total"] == sum(client.cached for client in clients)
        assert snapshot["prompt_tokens_total"] == sum(len(client.prompt) - client.cached for client in clients)
        kv = snapshot["kv"]
        held = harness.engine.used_cells()
        assert (kv["cached_sequences"], kv["cached_cells"]) == (len(held), sum(held.values()))
        assert kv["cached_cells"] > 0


async def test_who_wants_nothing_cached_gets_and_leaves_nothing(autojump_clock):
    async with asking() as harness:
        await harness.answer(SHARED[:200], cache_prompt=True)
        private = await harness.answer(SHARED[:200], cache_prompt=False)
        assert (private.cached, harness.computed) == (0, 400)
        assert harness.scheduler.cache.statistics().cached_sequences == 1
        secret = [*SHARED[:200], *range(300, 400)]
        await harness.answer(secret, cache_prompt=False)
        again = await harness.answer(secret)
        assert again.cached == 200
        assert is_right(private)
        assert is_right(again)
        await harness.clean()


async def test_together_they_share_nothing_either_where_nobody_wants_to(autojump_clock):
    async with asking(engine(unified=True)) as harness:
        clients = fan_out(harness, 3, cache_prompt=False)
        await harness.ended(*clients)
        assert harness.computed == 3 * 1502
        assert all(is_right(client) for client in clients)
        await harness.clean()


async def test_switched_off_nothing_is_shared_and_nothing_stays(autojump_clock):
    async with asking(engine(unified=True), prefix_reuse=False) as harness:
        clients = fan_out(harness, 3)
        await harness.ended(*clients)
        clients.append(await harness.answer(SHARED))
        assert harness.computed == 3 * 1502 + 1500
        assert [client.cached for client in clients] == [0] * 4
        await harness.clean()
        assert harness.engine.used_cells() == {}


async def test_tenants_share_nothing(autojump_clock):
    """How fast an answer comes would tell one what another asked."""
    async with asking(engine(unified=True)) as harness:
        first = await harness.answer(SHARED, principal="uid:1")
        other = await harness.answer(SHARED, principal="uid:2")
        assert other.cached == 0
        assert (
            other.sequence.first_token_at - other.sequence.arrived_at
            == first.sequence.first_token_at - first.sequence.arrived_at
        )
        assert (await harness.answer(SHARED, principal="uid:1")).cached == 1499
        together = [harness.ask([*SHARED[700:], 5], principal=principal) for principal in (1, 2)]
        await harness.ended(*together)
        assert [client.cached for client in together] == [0, 0]
        await harness.clean()


async def test_what_was_cancelled_leaves_nothing(autojump_clock):
    async with asking(engine(unified=True)) as harness:
        for after_s in (0.0, 0.02, 0.5):
            client = harness.ask(SHARED, 500)
            await trio.sleep(after_s)
            harness.scheduler.cancel(client.sequence)
            await harness.clean()
            assert harness.engine.used_cells() == {}
        assert len(client.tokens) > 10
        assert (await harness.answer(SHARED)).cached == 0


@pytest.mark.parametrize("at", [0, 5])
async def test_what_gave_no_usable_logits_is_not_kept(autojump_clock, monkeypatch, at):
    """Whoever went on with it would get none either."""
    async with asking(engine(unified=True)) as harness:
        feed = harness.engine._feed
        monkeypatch.setattr(
            harness.engine,
            "_feed",
            lambda one: [-1 if draw.step == at else token for draw, token in zip(one.samples, feed(one), strict=True)],
        )
        client = await harness.answer(SHARED[:100], 20)
        assert (client.reason, len(client.tokens)) == ("E_RUNTIME_DECODE", at)
        monkeypatch.undo()
        again = await harness.answer(SHARED[:100], 20)
        assert again.cached == 0
        assert is_right(again)
        await harness.clean()


async def test_a_model_that_cannot_forget_goes_on_with_whole_chats_only(autojump_clock):
    model = engine(unified=True)
    model.info = msgspec.structs.replace(model.info, can_truncate=False)
    async with asking(model) as harness:
        story = SHARED[:300]
        await harness.answer(story, 20)
        rewritten = await harness.answer([*story, 999], 20)
        assert rewritten.cached == 0
        stopped = await harness.answer(SHARED[50:300], 20, stop=[f"{expected_continuation(SHARED[50:300], 9)[8]} "])
        assert stopped.reason == "stop"
        longer = [*SHARED[50:300], *expected_continuation(SHARED[50:300], 9), 998]
        after_stop = await harness.answer(longer, 20)
        assert after_stop.cached == 259
        story = [*story, *expected_continuation(story, 20), 997]
        on = await harness.answer(story, 20)
        assert on.cached == 319
        assert all(is_right(client) for client in (rewritten, after_stop, on))
        clients = fan_out(harness)
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert all(op == Truncate(op.seq_id) for step in model.steps for op in step.ops)
        await harness.clean()


# -- together ---------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("n_tokens", [1, 20])
async def test_eight_that_arrive_together_compute_one_prompt(autojump_clock, unified, n_tokens):
    async with asking(engine(unified)) as harness:
        clients = fan_out(harness, 8, n_tokens)
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert harness.computed <= 1.1 * 1502
        assert sorted(client.cached for client in clients) == [0] + [1500] * 7
        await harness.clean()


@LAYOUTS
async def test_those_that_come_later_join_them(autojump_clock, unified):
    """While it is read, and while others wait for it or generate."""
    async with asking(engine(unified, n_seq_max=16, n_ctx=65_536)) as harness:
        clients = []
        for i in range(14):
            clients.append(harness.ask([*SHARED, 800 + i], 30))
            await trio.sleep(0.025)
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert harness.computed <= 1.1 * 1501
        await harness.clean()


@LAYOUTS
async def test_those_in_the_queue_share_as_well(autojump_clock, unified):
    async with asking(engine(unified)) as harness:
        clients = fan_out(harness, 30)
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert harness.computed <= 1.1 * 1502
        await harness.clean()


@LAYOUTS
async def test_a_tree_of_prompts(autojump_clock, unified):
    """A system prompt, under it two documents, under each some questions: each part is computed once."""
    async with asking(engine(unified)) as harness:
        documents = [[*SHARED[:600], *(100 * d + i % 90 for i in range(700))] for d in (1, 2)]
        clients = [harness.ask([*documents[i % 2], 900 + i], 10) for i in range(8)]
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert harness.computed <= 1.1 * (600 + 2 * 700)
        await harness.clean()


@LAYOUTS
@pytest.mark.parametrize("after_s", [0.001, 0.03, 0.07, 0.12])
async def test_when_the_first_is_cancelled_another_reads_it_for_the_rest(autojump_clock, unified, after_s):
    async with asking(engine(unified)) as harness:
        first, *others = fan_out(harness)
        await trio.sleep(after_s)
        assert not first.tokens
        harness.scheduler.cancel(first.sequence)
        await harness.ended(*others)
        assert first.reason == "cancelled"
        assert all(is_right(client) and client.reason == "length" for client in others)
        assert harness.computed <= 2.1 * 1502
        await harness.clean()


@LAYOUTS
async def test_one_after_another_is_cancelled(autojump_clock, unified):
    async with asking(engine(unified)) as harness:
        clients = fan_out(harness)
        for client in clients[:-1]:
            await trio.sleep(0.06)
            harness.scheduler.cancel(client.sequence)
        await harness.ended(*clients)
        assert clients[-1].reason == "length"
        assert is_right(clients[-1])
        await harness.clean()


@LAYOUTS
@pytest.mark.parametrize("fatal", [True, False])
@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.07])
async def test_when_the_first_fails_another_reads_it_for_the_rest(autojump_clock, unified, fatal, after_s):
    async with asking(engine(unified)) as harness:
        resident = await harness.answer(range(1, 300), 5)
        first, *others = fan_out(harness)
        await trio.sleep(after_s)
        harness.engine.fail_next = EngineError("the device has gone")
        await harness.ended(first, *others)
        assert first.reason == "E_RUNTIME_DECODE"
        assert all(is_right(client) and client.reason == "length" for client in others)
        again = await harness.answer(resident.prompt, 5)
        assert is_right(again)
        assert harness.engine.resets == fatal
        await harness.clean()


@LAYOUTS
@pytest.mark.parametrize("fatal", [True, False])
async def test_what_comes_while_a_step_fails_does_not_rely_on_it(autojump_clock, unified, fatal):
    """It is to get a copy of tokens that the step under way computes, and does not."""
    async with asking(engine(unified)) as harness:
        first = harness.ask(SHARED, 5)
        await trio.sleep(0.02)
        harness.engine.fail_next = EngineError("no room")
        before = len(harness.engine.steps)
        while len(harness.engine.steps) == before:
            await trio.sleep(0.001)
        assert harness.engine.fail_next is None
        assert not first.sequence.done.is_set(), "the step that failed is not done yet"
        second = harness.ask([*SHARED[: first.sequence.n_computed], 5], 5)
        await harness.ended(first, second)
        assert first.reason == "E_RUNTIME_DECODE"
        assert second.reason == "length"
        assert second.cached == 0
        assert is_right(second)
        await harness.clean()


@pytest.mark.parametrize("fatal", [True, False])
async def test_what_found_its_stop_string_while_a_step_failed_leaves_nothing_wrong(autojump_clock, fatal):
    """Its last token is fed by that step."""
    async with asking() as harness:
        said = expected_continuation(SHARED[:50], 20)
        stopped = harness.ask(SHARED[:50], 20, stop=[f" {said[9]} "])
        while len(stopped.tokens) < 9:
            await trio.sleep(0.001)
        harness.engine.fail_next = EngineError("no room")
        await harness.ended(stopped)
        assert stopped.reason == "stop"
        on = await harness.answer([*SHARED[:50], *said[:10], 5], 5)
        assert on.reason == "length"
        assert is_right(on)
        await harness.clean()


@LAYOUTS
async def test_when_the_first_does_not_read_the_others_do_not_wait_for_it(autojump_clock, unified):
    async with asking(engine(unified)) as harness:
        first, *others = fan_out(harness, n_tokens=20)
        await trio.sleep(0.06)
        first.has_room = False
        with trio.fail_after(5):
            await harness.ended(*others)
        assert all(is_right(client) for client in others)
        assert harness.computed <= 1.2 * 1502
        assert not first.tokens
        harness.read_on(first)
        await harness.ended(first)
        assert is_right(first)
        await harness.clean()


@LAYOUTS
async def test_who_does_not_read_from_the_start_holds_nobody(autojump_clock, unified):
    async with asking(engine(unified)) as harness:
        first = harness.ask([*SHARED, 799], 20)
        first.has_room = False
        others = fan_out(harness, 7)
        with trio.fail_after(5):
            await harness.ended(*others)
        assert all(is_right(client) for client in others)
        assert harness.computed <= 1.1 * 1502
        harness.read_on(first)
        await harness.ended(first)
        assert is_right(first)
        await harness.clean()


async def test_a_follower_that_does_not_read_holds_nobody(autojump_clock):
    async with asking(engine(unified=True)) as harness:
        clients = fan_out(harness)
        clients[3].has_room = False
        await harness.ended(*clients[:3], *clients[4:])
        harness.read_on(clients[3])
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert harness.computed <= 1.1 * 1502
        await harness.clean()


async def test_a_higher_class_does_not_wait_for_a_lower_one(autojump_clock):
    async with asking(engine(unified=True)) as harness:
        background = harness.ask([*SHARED, 5], 5, slo=Slo(priority="background"))
        await trio.sleep(0.06)
        quick = harness.ask([*SHARED, 6], 5, slo=Slo(priority="interactive"))
        await harness.ended(background, quick)
        assert 0 < quick.cached < 1500
        assert quick.sequence.first_token_at < background.sequence.first_token_at
        assert is_right(quick)
        assert is_right(background)
        await harness.clean()


@LAYOUTS
async def test_whose_client_is_gone_is_as_cancelled(autojump_clock, unified):
    """Over a socket: the first of eight hangs up while its prompt is read."""
    async with serving(engine(unified)) as harness:
        texts: dict[int, str] = {}
        prompt = "the same beginning " * 75

        async def ask(i: int) -> None:
            async with harness.client() as client:
                answer = [event async for event in client.generate(prompt=prompt + chr(65 + i), max_tokens=10)]
                texts[i] = "".join(event.get("text", "") for event in answer)

        async with trio.open_nursery() as nursery, harness.client() as hasty, trio.open_nursery() as one:

            async def first() -> None:
                async for _ in hasty.generate(prompt=prompt + "@", max_tokens=10):
                    raise AssertionError("it should have been gone before")

            one.start_soon(first)
            while not [*harness.scheduler.sequences()]:
                await trio.sleep(0.001)
            for i in range(7):
                nursery.start_soon(ask, i)
            await trio.sleep(0.05)
            one.cancel_scope.cancel()
        for i, text in texts.items():
            expected = expected_continuation([100 + ord(c) for c in prompt + chr(65 + i)], 10)
            assert text == "".join(f"{token} " for token in expected)
        assert len(texts) == 7
        assert harness.scheduler.telemetry.requests["cancelled"] == 1
        assert harness.scheduler.telemetry.prompt_tokens_total <= 2.1 * len(prompt)
        await harness.settled()


# -- under pressure ---------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [0.0, 0.03], ids=["sound", "failing"])
@pytest.mark.parametrize("rewinds", [True, False], ids=["rewinds", "recurrent"])
@LAYOUTS
async def test_200_conversations_in_a_cache_for_a_few(autojump_clock, unified, rewinds, failures):
    """Turns, rewritten turns, cancels, clients that do not read, a device that fails: no text is ever wrong."""
    chance = random.Random(5)
    model = engine(unified, n_ctx=3000 if unified else 6000, n_seq_max=6)
    model.info = msgspec.structs.replace(model.info, can_truncate=rewinds)
    system = SHARED[:200]
    ends: dict[str, int] = {}

    async with asking(model, max_queue=300) as harness:

        async def converse(i: int) -> None:
            story = [*system[: chance.choice([0, 60, 200])], *chance.choices(range(1, 900), k=chance.randint(1, 60))]
            await trio.sleep(chance.random() * 15)
            for _ in range(chance.randint(1, 4)):
                n = chance.randint(1, 30)
                client = harness.ask(
                    story,
                    n,
                    principal=i % 3,
                    cache_prompt=chance.random() < 0.9,
                    slo=Slo(priority=chance.choice(["normal", "background"])),
                )
                if chance.random() < 0.15:
                    await trio.sleep(chance.random() * 0.5)
                    harness.scheduler.cancel(client.sequence)
                elif chance.random() < 0.2:
                    await trio.sleep(chance.random() * 0.3)
                    client.has_room = False
                    await trio.sleep(chance.random())
                    harness.read_on(client)
                if chance.random() < failures:
                    harness.engine.fail_next = EngineError("gone")
                await harness.ended(client)
                harness.scheduler.check_integrity()
                assert is_right(client)
                assert client.reason != "length" or len(client.tokens) == n
                ends[client.reason] = ends.get(client.reason, 0) + 1
                story = [*story, *client.tokens, *chance.choices(range(1, 900), k=chance.randint(1, 40))]
                if chance.random() < 0.2:
                    story = story[: chance.randint(1, len(story))]
                if len(story) > 800:
                    break

        async with trio.open_nursery() as nursery:
            for i in range(200):
                nursery.start_soon(converse, i)
        assert ends["length"] > 250
        assert ends["cancelled"] > 20
        assert (ends.get("E_RUNTIME_DECODE", 0) > 3) == bool(failures)
        assert set(ends) <= {"length", "cancelled", "E_RUNTIME_DECODE"}
        telemetry = harness.scheduler.telemetry
        assert telemetry.cached_tokens_total > (0.1 * telemetry.prompt_tokens_total if rewinds else 0)
        copies = sum(isinstance(op, CopyPrefix) for step in model.steps for op in step.ops)
        assert (copies > 20) == rewinds
        await harness.clean()
