"""Prefix reuse does not change any text, over a fake engine in virtual time.

The fake model's next token depends on all tokens before it, so a wrong or missing token in the KV cache changes the
text.
"""

from __future__ import annotations

import random

import pytest
import trio

from tests.support.asking import Client, Harness, asking
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.profile import amount, sampled, thorough
from tests.support.serving import serving
from uma_trio.engine_link.kv_ops import CopyPrefix, Truncate
from uma_trio.engine_link.messages import EngineDied, EngineError
from uma_trio.engine_link.sampling import NO_TOKEN
from uma_trio.protocol.events import Token
from uma_trio.protocol.requests import Slo
from uma_trio.protocol.usage import Explanation

SHARED = random.Random(1).choices(range(1, 800), k=1500)
"""About as long as a system prompt with a few tools."""

LAYOUTS = pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
FAILURES = pytest.mark.parametrize("failure", [EngineError("no room"), EngineDied("killed")], ids=str)


def engine(unified: bool, *, n_ctx: int = 32_768, **more: object) -> FakeEngine:
    return FakeEngine(n_ctx=n_ctx, unified=unified, **more)  # type: ignore[arg-type]


def is_right(client: Client) -> bool:
    """The tokens that ``client`` has so far follow its prompt."""
    return client.tokens == expected_continuation(client.prompt, len(client.tokens))


def fan_out(harness: Harness, n: int = 8, n_tokens: int = 8, **fields: object) -> list[Client]:
    """Several requests with the same prefix, all at once."""
    return [harness.ask([*SHARED, 800 + i, 900], n_tokens, **fields) for i in range(n)]


# -- one after another ------------------------------------------------------------------------------


@LAYOUTS
async def test_a_turn_of_a_chat_computes_only_new_tokens(autojump_clock, unified):
    async with asking(engine(unified)) as harness:
        chat = SHARED[:300]
        first = await harness.answer(chat, 20)
        assert (first.cached, harness.computed) == (0, 300)
        for turn in range(5):
            chat = [*chat, *expected_continuation(chat, 20), 801 + turn, *range(1, 30)]
            before = harness.computed
            client = await harness.answer(chat, 20)
            assert is_right(client)
            assert client.cached == len(chat) - 31, "the last token of an answer was never computed"
            assert harness.computed - before == 31
        await harness.clean()
        assert harness.scheduler.cache.statistics().cached_sequences == 1


@LAYOUTS
async def test_a_repeated_prompt_and_an_edited_one(autojump_clock, unified):
    async with asking(engine(unified)) as harness:
        first = await harness.answer(SHARED, 20)
        again = await harness.answer(SHARED, 20)
        assert again.tokens == first.tokens
        assert again.cached == len(SHARED) - 1
        edited = await harness.answer([*SHARED[:1000], 999, 998], 20)
        assert is_right(edited)
        assert edited.cached == 1000
        await harness.clean()


async def explained(harness: Harness, prompt: list[int]) -> Explanation:
    client = await harness.answer(prompt, 4, explain=True)
    found = client.last.usage.explanation
    assert found is not None
    return found


async def test_a_short_loss_is_explained_as_a_loss(autojump_clock):
    async with asking(engine(unified=True)) as harness:
        prompt = SHARED[:43]
        await harness.answer(prompt, 4)
        await harness.answer([*SHARED[:32], 999, 998], 4)  # goes on from the first 32 tokens
        found = await explained(harness, prompt)
        assert (found.reason, found.common_tokens, found.cached_tokens, found.again_tokens) == ("lost", 42, 32, 10)
        assert found.loss is not None
        assert found.loss.cause == "continued"
        again = await explained(harness, prompt)
        assert (again.reason, again.cached_tokens, again.again_tokens) == ("cached", 42, 0)


async def test_a_prompt_that_is_too_short_to_be_shared_has_lost_its_tokens(autojump_clock):
    async with asking(engine(unified=True)) as harness:
        await harness.answer(SHARED[:43], 4)
        await harness.answer([*SHARED[:32], 999, 998], 4)
        found = await explained(harness, SHARED[:10])
        assert (found.reason, found.cached_tokens, found.again_tokens) == ("lost", 0, 9)
        other = await explained(harness, [*SHARED[:5], *range(900, 930)])
        assert (other.reason, other.again_tokens) == ("new", 0), "any two prompts have as much in common"


async def test_a_copied_prefix_and_its_source_are_independent(autojump_clock):
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


async def test_usage_and_metrics_count_the_same(autojump_clock):
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


async def test_a_request_without_cache_prompt_reuses_nothing_and_leaves_nothing(autojump_clock):
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


async def test_simultaneous_requests_without_cache_prompt_share_nothing(autojump_clock):
    async with asking(engine(unified=True)) as harness:
        clients = fan_out(harness, 3, cache_prompt=False)
        await harness.ended(*clients)
        assert harness.computed == 3 * 1502
        assert all(is_right(client) for client in clients)
        await harness.clean()


async def test_without_prefix_reuse_nothing_is_shared_and_nothing_stays(autojump_clock):
    async with asking(engine(unified=True), prefix_reuse=False) as harness:
        clients = fan_out(harness, 3)
        await harness.ended(*clients)
        clients.append(await harness.answer(SHARED))
        assert harness.computed == 3 * 1502 + 1500
        assert [client.cached for client in clients] == [0] * 4
        await harness.clean()
        assert harness.engine.used_cells() == {}


async def test_principals_share_nothing(autojump_clock):
    """Otherwise the time to the first token would reveal the prompts of others."""
    async with asking(engine(unified=True)) as harness:
        first = await harness.answer(SHARED, principal="uid:1")
        other = await harness.answer(SHARED, principal="uid:2")
        assert other.cached == 0
        assert (
            other.answer.times.first_token_at - other.answer.times.arrived_at
            == first.answer.times.first_token_at - first.answer.times.arrived_at
        )
        assert (await harness.answer(SHARED, principal="uid:1")).cached == 1499
        together = [harness.ask([*SHARED[700:], 5], principal=principal) for principal in ("uid:1", "uid:2")]
        await harness.ended(*together)
        assert [client.cached for client in together] == [0, 0]
        await harness.clean()


async def test_a_cancelled_request_leaves_nothing(autojump_clock):
    async with asking(engine(unified=True)) as harness:
        for after_s in (0.0, 0.02, 0.5):
            client = harness.ask(SHARED, 500)
            await trio.sleep(after_s)
            harness.scheduler.cancel(client.answer)
            await harness.clean()
            assert harness.engine.used_cells() == {}
        assert len(client.tokens) > 10
        assert (await harness.answer(SHARED)).cached == 0


@pytest.mark.parametrize("at", [0, 5])
async def test_a_sequence_without_usable_logits_is_not_kept(autojump_clock, monkeypatch, at):
    """A request that reused it would get none either."""
    async with asking(engine(unified=True)) as harness:
        compute = harness.engine._compute
        monkeypatch.setattr(
            harness.engine,
            "_compute",
            lambda each, adapters: [
                NO_TOKEN if sample.n_before == at else token
                for sample, token in zip(each.samples, compute(each, adapters), strict=True)
            ],
        )
        client = await harness.answer(SHARED[:100], 20)
        assert (client.reason, len(client.tokens)) == ("E_RUNTIME_DECODE", at)
        monkeypatch.undo()
        again = await harness.answer(SHARED[:100], 20)
        assert again.cached == 0
        assert is_right(again)
        await harness.clean()


async def test_a_memory_without_truncation_and_checkpoints_reuses_whole_sequences_only(autojump_clock):
    model = engine(unified=True, can_truncate=False, checkpoints=0)
    async with asking(model) as harness:
        chat = SHARED[:300]
        await harness.answer(chat, 20)
        edited = await harness.answer([*chat, 999], 20)
        assert edited.cached == 0
        stopped = await harness.answer(SHARED[50:300], 20, stop=[f"{expected_continuation(SHARED[50:300], 9)[8]} "])
        assert stopped.reason == "stop"
        longer = [*SHARED[50:300], *expected_continuation(SHARED[50:300], 9), 998]
        after_stop = await harness.answer(longer, 20)
        assert after_stop.cached == 259
        chat = [*chat, *expected_continuation(chat, 20), 997]
        on = await harness.answer(chat, 20)
        assert on.cached == 319
        assert all(is_right(client) for client in (edited, after_stop, on))
        clients = fan_out(harness)
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert all(op == Truncate(op.seq_id) for step in model.steps for op in step.ops)
        await harness.clean()


# -- simultaneously ---------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("n_tokens", [1, 20])
async def test_eight_requests_at_once_compute_one_prompt(autojump_clock, unified, n_tokens):
    async with asking(engine(unified)) as harness:
        clients = fan_out(harness, 8, n_tokens)
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert harness.computed <= 1.1 * 1502
        assert sorted(client.cached for client in clients) == [0] + [1500] * 7
        await harness.clean()


@LAYOUTS
async def test_requests_that_come_later_share_the_prefix_too(autojump_clock, unified):
    """During the leader's prefill, while others follow it, and while others decode."""
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
async def test_requests_in_the_queue_share_the_prefix_too(autojump_clock, unified):
    async with asking(engine(unified)) as harness:
        clients = fan_out(harness, 30)
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert harness.computed <= 1.1 * 1502
        await harness.clean()


@LAYOUTS
async def test_a_tree_of_prompts(autojump_clock, unified):
    """One system prompt, two documents, several questions for each document.  Each part is computed once."""
    async with asking(engine(unified)) as harness:
        documents = [[*SHARED[:600], *(100 * d + i % 90 for i in range(700))] for d in (1, 2)]
        clients = [harness.ask([*documents[i % 2], 900 + i], 10) for i in range(8)]
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert harness.computed <= 1.1 * (600 + 2 * 700)
        await harness.clean()


@LAYOUTS
@pytest.mark.parametrize("after_s", [0.001, 0.03, 0.07, 0.12])
async def test_when_the_leader_is_cancelled_a_follower_takes_over(autojump_clock, unified, after_s):
    async with asking(engine(unified)) as harness:
        first, *others = fan_out(harness)
        await trio.sleep(after_s)
        assert not first.tokens
        harness.scheduler.cancel(first.answer)
        await harness.ended(*others)
        assert first.reason == "cancelled"
        assert all(is_right(client) and client.reason == "length" for client in others)
        assert harness.computed <= 2.1 * 1502
        await harness.clean()


@LAYOUTS
async def test_all_but_one_are_cancelled_in_turn(autojump_clock, unified):
    async with asking(engine(unified)) as harness:
        clients = fan_out(harness)
        for client in clients[:-1]:
            await trio.sleep(0.06)
            harness.scheduler.cancel(client.answer)
        await harness.ended(*clients)
        assert clients[-1].reason == "length"
        assert is_right(clients[-1])
        await harness.clean()


@LAYOUTS
@FAILURES
@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.07])
async def test_the_prefix_is_computed_again_after_a_failed_step(autojump_clock, unified, failure, after_s):
    async with asking(engine(unified)) as harness:
        resident = await harness.answer(range(1, 300), 5)
        clients = fan_out(harness)
        await trio.sleep(after_s)
        before = harness.computed
        harness.engine.fail_next = failure
        await harness.ended(*clients)
        assert all(is_right(client) and client.reason == "length" for client in clients)
        in_flight = harness.engine.info.n_batch  # was lost too
        assert harness.computed - before <= in_flight + 1.1 * 1502, "the prefix was computed once for all eight"
        again = await harness.answer(resident.prompt, 5)
        assert is_right(again)
        assert again.cached == 0, "the whole cache was lost"
        assert harness.engine.resets == 1
        await harness.clean()


@LAYOUTS
@FAILURES
async def test_a_request_that_follows_a_failing_step_gets_the_right_prefix(autojump_clock, unified, failure):
    """It was to copy tokens that the step in flight computes, but the step fails."""
    async with asking(engine(unified)) as harness:
        first = harness.ask(SHARED, 5)
        await trio.sleep(0.02)
        harness.engine.fail_next = failure
        before = len(harness.engine.steps)
        while len(harness.engine.steps) == before:
            await trio.sleep(0.001)
        assert harness.engine.fail_next is None
        n_computed = first.answer.n_computed
        assert n_computed > 0, "the failing step is still in flight"
        second = harness.ask([*SHARED[:n_computed], 5], 5)
        await harness.ended(first, second)
        assert first.reason == second.reason == "length"
        assert is_right(first)
        assert is_right(second)
        await harness.clean()


@FAILURES
async def test_a_sequence_that_ends_while_a_step_fails_leaves_no_wrong_tokens(autojump_clock, failure):
    """The failing step would compute the token that completes the stop string."""
    async with asking() as harness:
        expected = expected_continuation(SHARED[:50], 20)
        stopped = harness.ask(SHARED[:50], 20, stop=[f" {expected[9]} "])
        while len(stopped.tokens) < 9:
            await trio.sleep(0.001)
        harness.engine.fail_next = failure
        await harness.ended(stopped)
        assert stopped.reason == "stop"
        on = await harness.answer([*SHARED[:50], *expected[:10], 5], 5)
        assert on.reason == "length"
        assert is_right(on)
        await harness.clean()


@LAYOUTS
async def test_followers_do_not_wait_for_a_leader_whose_client_stops_reading(autojump_clock, unified):
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
async def test_a_client_that_never_read_does_not_block_others(autojump_clock, unified):
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


async def test_a_follower_whose_client_does_not_read_does_not_block_others(autojump_clock):
    async with asking(engine(unified=True)) as harness:
        clients = fan_out(harness)
        clients[3].has_room = False
        await harness.ended(*clients[:3], *clients[4:])
        harness.read_on(clients[3])
        await harness.ended(*clients)
        assert all(is_right(client) for client in clients)
        assert harness.computed <= 1.1 * 1502
        await harness.clean()


async def test_a_request_does_not_wait_for_a_leader_of_a_lower_priority(autojump_clock):
    async with asking(engine(unified=True)) as harness:
        background = harness.ask([*SHARED, 5], 5, slo=Slo(priority="background"))
        await trio.sleep(0.06)
        quick = harness.ask([*SHARED, 6], 5, slo=Slo(priority="interactive"))
        await harness.ended(background, quick)
        assert 0 < quick.cached < 1500
        assert quick.answer.times.first_token_at < background.answer.times.first_token_at
        assert is_right(quick)
        assert is_right(background)
        await harness.clean()


@LAYOUTS
async def test_a_leader_whose_client_disconnects_is_cancelled(autojump_clock, unified):
    """Over a socket: the first of eight clients disconnects during its prefill."""
    async with serving(engine(unified)) as harness:
        texts: dict[int, str] = {}
        prompt = "the same beginning " * 75

        async def ask(i: int) -> None:
            async with harness.client() as client:
                answer = [event async for event in client.generate(prompt=prompt + chr(65 + i), max_tokens=10)]
                texts[i] = "".join(event.text for event in answer if isinstance(event, Token))

        async with trio.open_nursery() as nursery, harness.client() as hasty, trio.open_nursery() as one:

            async def first() -> None:
                async for _ in hasty.generate(prompt=prompt + "@", max_tokens=10):
                    raise AssertionError("it should have been disconnected before")

            one.start_soon(first)
            while not list(harness.scheduler.answers()):
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


@pytest.mark.parametrize("failures", [thorough(0.0), 0.03], ids=["sound", "failing"])
@pytest.mark.parametrize("can_truncate", sampled([True, False], 2), ids=["truncatable", "recurrent"])
@LAYOUTS
async def test_many_conversations_in_a_cache_for_a_few(autojump_clock, unified, can_truncate, failures):
    """Turns, edited turns, cancellations, clients that do not read, failing steps: no text is ever wrong."""
    rng = random.Random(5)
    model = engine(unified, n_ctx=3000 if unified else 6000, n_seq_max=6, can_truncate=can_truncate, checkpoints=0)
    system = SHARED[:200]
    ends: dict[str, int] = {}
    n_conversations = amount(quick=50, thorough=200)

    async with asking(model, max_queue=300) as harness:

        async def converse(i: int) -> None:
            chat = [*system[: rng.choice([0, 60, 200])], *rng.choices(range(1, 900), k=rng.randint(1, 60))]
            await trio.sleep(rng.random() * n_conversations / 13)
            for _ in range(rng.randint(1, 4)):
                n = rng.randint(1, 30)
                client = harness.ask(
                    chat,
                    n,
                    principal=f"uid:{i % 3}",
                    cache_prompt=rng.random() < 0.9,
                    slo=Slo(priority=rng.choice(["normal", "background"])),
                )
                if rng.random() < 0.15:
                    await trio.sleep(rng.random() * 0.5)
                    harness.scheduler.cancel(client.answer)
                elif rng.random() < 0.2:
                    await trio.sleep(rng.random() * 0.3)
                    client.has_room = False
                    await trio.sleep(rng.random())
                    harness.read_on(client)
                if rng.random() < failures:
                    harness.engine.fail_next = EngineError("gone") if rng.random() < 0.5 else EngineDied("killed")
                await harness.ended(client)
                harness.scheduler.check_integrity()
                assert is_right(client)
                assert client.reason != "length" or len(client.tokens) == n
                ends[client.reason] = ends.get(client.reason, 0) + 1
                chat = [*chat, *client.tokens, *rng.choices(range(1, 900), k=rng.randint(1, 40))]
                if rng.random() < 0.2:
                    chat = chat[: rng.randint(1, len(chat))]
                if len(chat) > 800:
                    break

        async with trio.open_nursery() as nursery:
            for i in range(n_conversations):
                nursery.start_soon(converse, i)
        assert ends["length"] > 1.25 * n_conversations
        assert ends["cancelled"] > n_conversations / 10
        assert (model.resets > 0) == bool(failures)
        # a request that is alone in two failed steps is blamed; failures come at random, so a few are
        assert ends.pop("E_RUNTIME_DECODE", 0) <= 6 * bool(failures), "only a request in two failed steps may fail"
        assert set(ends) == {"length", "cancelled"}
        telemetry = harness.scheduler.telemetry
        assert telemetry.cached_tokens_total > (0.1 * telemetry.prompt_tokens_total if can_truncate else 0)
        copies = sum(isinstance(op, CopyPrefix) for step in model.steps for op in step.ops)
        assert (copies > 20) == can_truncate
        await harness.clean()
