"""Answers that controllers control, token by token."""

from __future__ import annotations

import trio

from tests.support.controlling import START, Client, controlling
from tests.support.fake_engine import expected_continuation
from tests.support.fake_runtime import SKIPPED, ScriptedController


class Count(ScriptedController):
    """Lets the model say as many tokens as its argument says."""

    def post(self, tokens, backtrack):
        return len(self.tokens) > self.argument


class OnlyEven(Count):
    """Allows even tokens only."""

    def mid(self, fork_group):
        return range(2, 900, 2)


async def test_a_controller_ends_the_answer(autojump_clock):
    async with controlling({"count": Count}) as harness:
        sequences = await harness.control("count", client := Client(), argument=5)
        await harness.done(sequences)
        assert client.tokens == {0: expected_continuation([START], 5)}
        assert client.reasons == {0: "stop"}
        assert client.ends[0].usage.sampled_tokens == 5
        assert client.ends[0].usage.inserted_tokens == 0
        await harness.clean()


async def test_a_mask_decides_what_is_sampled(autojump_clock):
    async with controlling({"even": OnlyEven}) as harness:
        sequences = await harness.control("even", client := Client(), n=40, argument=30)
        await harness.done(sequences)
        assert len(client.tokens[0]) == 30
        assert not any(token % 2 for token in client.tokens[0])
        await harness.clean()


async def test_max_tokens_ends_the_answer(autojump_clock):
    async with controlling({"count": Count}) as harness:
        sequences = await harness.control("count", client := Client(), n=10, argument=50)
        await harness.done(sequences)
        assert client.reasons == {0: "length"}
        assert client.tokens == {0: expected_continuation([START], 10)}
        await harness.clean()


async def test_a_controller_that_nobody_waits_for_any_more_is_forgotten(autojump_clock):
    async with controlling({"count": Count}) as harness:
        await harness.runtime.instantiate("gone", "count", 1, [START])
        harness.runtime.on_unused("gone")
        await harness.clean()
        assert not harness.runtime.waiting


class SlowToBegin(Count):
    """Does not answer ``pre`` in many steps."""

    n = 0

    def pre(self):
        self.n += 1
        return super().pre() if self.n % 20 == 0 else SKIPPED


async def test_a_controller_of_a_request_that_would_miss_its_deadline_is_forgotten(autojump_clock):
    """The request ends before ``submit`` returns."""
    async with controlling({"all": ScriptedController}) as harness:
        client = Client()
        [sequence] = await harness.control("all", client, deadline_at=trio.current_time() + 0.001)
        assert sequence.done.is_set()
        assert client.reasons == {0: "E_LIMIT_DEADLINE"}
        await harness.clean()
        assert harness.scheduler.snapshot()["controllers"]["sequences"] == 0


async def test_a_controller_that_is_late_with_pre_is_no_deadlock(autojump_clock):
    async with controlling({"slow": SlowToBegin, "count": Count}) as harness:
        slow = await harness.control("slow", late := Client(), argument=3)
        others = await harness.control("count", client := Client(), argument=15)
        await harness.done(others)
        assert late.ends == {}, "the other one has not waited"
        await harness.done(slow)
        assert late.reasons == client.reasons == {0: "stop"}
        assert late.tokens == {0: expected_continuation([START], 3)}
        await harness.clean()
