"""Forks of controlled answers: their texts, the cells that they share, and what happens where there is no room."""

from __future__ import annotations

import numpy as np
import pytest
import trio

from tests.support.controlling import START, Client, Controlling, controlling
from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.programs import (
    Back,
    Fork,
    Gen,
    Insert,
    Program,
    Say,
    Script,
    Set,
    Wait,
    by_path,
    expected,
    straight,
)
from tests.support.state_files import MemoryFiles
from uma_trio.daemon.prompts.prompt import Prompt
from uma_trio.daemon.serving.controllers import forking
from uma_trio.daemon.serving.request import PreparedRequest
from uma_trio.principal import Principal
from uma_trio.protocol.events import Failure
from uma_trio.protocol.requests import Generate

LONG = list(range(100, 400))
PROGRAMS = {"program": Program}


async def run(harness: Controlling, script: Script, n: int = 100, **fields) -> Client:
    """Run a program to its end."""
    await harness.done(await harness.control("program", client := Client(), n, argument=script, **fields))
    return client


def cells(harness: Controlling) -> tuple[int, int]:
    """Cells that are used, by the bookkeeping and in the engine."""
    return harness.scheduler.cache.statistics().cells_used, harness.engine.distinct_cells()


@pytest.mark.parametrize(("most", "error"), [(3, "tenant:a has 1 answers in flight and may have 3"), (4, None)])
async def test_forks_count_as_answers_of_their_principal(autojump_clock, most: int, error: str | None) -> None:
    async with controlling(PROGRAMS, FakeEngine(n_ctx=16384)) as harness:
        client = await run(harness, FOUR, 400, principal=Principal("tenant:a", max_requests=most))
        if error is None:
            assert by_path(client, client.tokens) == expected(FOUR)
        else:
            assert error in client.ends[0].message
        await harness.clean()


FOUR = [
    Say(LONG),
    Fork(
        [
            [Set("ready"), Gen(5), Wait("done"), Gen(3)],
            [Gen(2), Wait("ready"), Gen(4), Set("done")],
            [Insert([7, 8, 9]), Gen(6)],
            [Gen(4), Back(3, [11, 12]), Gen(2)],
        ]
    ),
    Gen(2),
]
"""Four answers that say something else each, and wait for each other."""


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("can_truncate", [True, False])
async def test_forks_of_four_equal_four_separate_runs(autojump_clock, unified, can_truncate):
    engine = FakeEngine(n_ctx=16384, unified=unified, can_truncate=can_truncate)
    async with controlling(PROGRAMS, engine) as harness:
        client = await run(harness, FOUR, 400)
        together = by_path(client, client.tokens)
        assert together == expected(FOUR)
        for n, path in enumerate(expected(FOUR)):
            script = [each for each in straight(FOUR, [n]) if not isinstance(each, Wait)]
            alone = await run(harness, script, 400)
            assert alone.tokens[0] == together[path]
        await harness.clean()


async def test_sampled_forks_equal_separate_runs_with_their_seeds(autojump_clock):
    script = [Say(LONG), Fork([[Gen(8)]] * 4)]
    async with controlling(PROGRAMS) as harness:
        client = await run(harness, script, 400, temperature=1.0, seed=5)
        together = by_path(client, client.tokens)
        assert len({tuple(tokens) for tokens in together.values()}) == 4
        for index, path in enumerate(together):
            alone = await run(harness, straight(script, [int(path[1:])]), 400, temperature=1.0, seed=5 + index)
            assert alone.tokens[0] == together[path]
            assert client.ends[index].seed == 5 + index
        await harness.clean()


async def test_forks_share_cells_until_they_part(autojump_clock):
    """The engine would have no room for four copies of the text."""
    engine = FakeEngine(n_ctx=800)
    script = [Say(LONG), Fork([*[[Gen(10), Wait("end")]] * 3, [Gen(40), Set("end")]])]
    async with controlling(PROGRAMS, engine) as harness:
        answers = await harness.control("program", client := Client(), 400, argument=script)
        while len(client.tokens) < 4:
            await trio.sleep(0.001)
        assert harness.scheduler.cache.statistics().cells_reserved == 300 + 4 * 100
        assert cells(harness)[0] == 300, "each fork computes the last token of the text itself"
        while len(client.tokens[3]) < 320:
            await trio.sleep(0.001)
        held = harness.scheduler.cache.held().values()
        assert sorted(held)[:3] == [310] * 3, "suspended answers keep their cells"
        assert cells(harness)[0] == 300 + sum(n - 300 for n in held)
        assert harness.engine.distinct_cells() - cells(harness)[0] in (0, 1), "the engine may be a step ahead"
        await harness.done(answers)
        assert by_path(client, client.tokens) == expected(script)
        await harness.clean()
        assert len(harness.scheduler.cache.held()) <= 1, "what may stay for others is the last fork's"


async def test_forks_of_forks(autojump_clock):
    script = [
        Say(LONG),
        Fork([[Gen(3), Fork([[Gen(4)], [Insert([5, 6]), Gen(2), Fork([[Gen(1)], [Gen(6)]])]])], [Gen(9)]]),
        Gen(3),
    ]
    engine = FakeEngine(n_ctx=900)
    async with controlling(PROGRAMS, engine) as harness:
        client = await run(harness, script, 400)
        assert by_path(client, client.tokens) == expected(script)
        assert {*expected(script)} == {"/0/0", "/0/1/0", "/0/1/1", "/1"}
        await harness.clean()


async def test_a_fork_that_goes_back_before_it_forked_reserves_its_own_cells(autojump_clock):
    script = [Say(LONG), Fork([[Gen(10), Wait("end")], [Back(200, [5]), Gen(250), Set("end")]])]
    async with controlling(PROGRAMS, FakeEngine(n_ctx=700)) as harness:
        answers = await harness.control("program", client := Client(), 400, argument=script)
        while len(client.tokens.get(1, [])) != 101:
            await trio.sleep(0.001)
        assert harness.scheduler.cache.statistics().cells_reserved == 101 + 2 * 299
        await harness.done(answers)
        assert by_path(client, client.tokens) == expected(script)
        await harness.clean()


async def test_a_fork_that_goes_back_where_there_is_no_room_fails_alone(autojump_clock):
    script = [Say(LONG), Fork([[Gen(50)], [Back(200, [5]), Gen(250)]])]
    async with controlling(PROGRAMS, FakeEngine(n_ctx=500)) as harness:
        client = await run(harness, script, 400)
        assert by_path(client, client.reasons) == {"/0": "stop", "/1": "E_LIMIT_KV"}
        assert by_path(client, client.tokens)["/0"] == expected(script)["/0"]
        assert "no room" in client.ends[1].message
        await harness.clean()


# -- where there is no room ---------------------------------------------------------------------


SMALL = [Say(LONG[:100]), Fork([[Gen(5)], [Gen(7)], [Gen(3)]])]


async def test_forks_wait_for_room_before_all_that_came_later(autojump_clock):
    """A long answer without a controller leaves no room; when it ends, the forks come first."""
    async with controlling(PROGRAMS, FakeEngine(n_ctx=1000)) as harness:
        plain, later = Client(), Client()
        running = harness.ask([5], plain, 650)
        answers = await harness.control("program", client := Client(), 200, argument=SMALL)
        await trio.sleep(0.2)
        assert [*client.tokens] == [0], "waits"
        waiting = harness.ask([6], later, 250, id="later")
        await trio.sleep(0.2)
        assert not later.tokens[0], "there would be room for it, but it came later"
        harness.scheduler.cancel(running)
        await harness.done(answers)
        assert by_path(client, client.tokens) == expected(SMALL)
        await harness.done([waiting])
        assert later.tokens[0] == expected_continuation([6], 250)
        await harness.clean()


async def test_forks_for_which_there_can_never_be_room_end_with_numbers(autojump_clock):
    async with controlling(PROGRAMS, FakeEngine(n_ctx=1000, n_seq_max=4)) as harness:
        client = await run(harness, SMALL, 900)
        assert client.reasons == {0: "E_CONTROLLER_FAILED"}
        assert "2500 cells" in client.ends[0].message
        client = await run(harness, [Gen(2), Fork([[Gen(1)]] * 5)], 20)
        assert client.reasons == {0: "E_CONTROLLER_FAILED"}
        assert "--parallel" in client.ends[0].message
        await harness.clean()


async def test_forks_that_all_wait_for_each_other_do_not_wait_for_ever(autojump_clock):
    """Two requests want to fork, and each of them has what the other one needs: the first is refused."""
    async with controlling(PROGRAMS, FakeEngine(n_ctx=1000)) as harness:
        clients = [Client(), Client()]
        requests = [await harness.control("program", client, 400, argument=SMALL) for client in clients]
        await harness.done(*requests)
        assert clients[0].reasons == {0: "E_LIMIT_KV"}
        assert by_path(clients[1], clients[1].tokens) == expected(SMALL)
        await harness.clean()


async def test_forks_that_come_to_wait_for_each_other_later_do_not_wait_for_ever(autojump_clock):
    """The first one waits for an answer that generates; then that one wants to fork as well."""
    async with controlling(PROGRAMS, FakeEngine(n_ctx=1000)) as harness:
        clients = [Client(), Client()]
        later = [Say(LONG[:100]), Gen(30), *SMALL[1:]]
        requests = [
            await harness.control("program", client, 400, argument=script)
            for client, script in zip(clients, [SMALL, later], strict=True)
        ]
        await harness.done(*requests)
        assert clients[0].reasons == {0: "E_LIMIT_KV"}
        assert by_path(clients[1], clients[1].tokens) == expected(later)
        await harness.clean()


async def test_forks_that_fork_again_without_end_are_stopped(autojump_clock, monkeypatch):
    """One branch of each fork ends, and the other one forks again, so there are never more than two at a time."""
    monkeypatch.setattr(forking, "MAX_ANSWERS", 20)
    script: Script = [Gen(1)]
    for _ in range(25):
        script = [Gen(1), Fork([[], script])]
    async with controlling(PROGRAMS, FakeEngine(n_ctx=2000, n_seq_max=4)) as harness:
        client = await run(harness, script)
        assert len(client.tokens) == 20
        failed = [end for end in client.ends.values() if isinstance(end, Failure)]
        assert [end.code for end in failed] == ["E_CONTROLLER_FAILED"]
        assert "forks into more than 20 answers" in failed[0].message
        await harness.clean()


async def test_a_fork_waits_for_a_request_that_will_end_as_a_deadlock(autojump_clock):
    async with controlling(PROGRAMS, FakeEngine(n_ctx=1000)) as harness:
        waits = await harness.control("program", stuck := Client(), 700, argument=[Gen(3), Wait("never")])
        while len(stuck.tokens[0]) < 3:
            await trio.sleep(0.001)
        await harness.done(waits, await harness.control("program", client := Client(), 200, argument=SMALL))
        assert stuck.reasons == {0: "deadlock"}
        assert by_path(client, client.tokens) == expected(SMALL)
        await harness.clean()


async def test_a_fork_waits_for_cells_of_a_cancelled_answer(autojump_clock):
    """They are free when the step in flight is complete."""
    engine = FakeEngine(n_ctx=1000, cost_ms=lambda prompt, decodes: 50.0)
    async with controlling(PROGRAMS, engine) as harness:
        running = harness.ask([5], Client(), 650)
        answers = await harness.control("program", client := Client(), 200, argument=SMALL)
        while not client.tokens[0]:
            await trio.sleep(0.001)
        await trio.sleep(0.12)
        harness.scheduler.cancel(running)
        harness.scheduler._controllers.advance()
        await harness.done(answers)
        assert by_path(client, client.tokens) == expected(SMALL)
        await harness.clean()


async def test_a_fork_waits_for_cells_that_are_saved_first(autojump_clock):
    """Nobody runs who could make room, but what an ended session has left is on its way to a file."""
    async with controlling(PROGRAMS, FakeEngine(n_ctx=1000), files=MemoryFiles(), offload_after_s=1000) as harness:
        request = Generate(id="session", prompt="", max_tokens=400, session_id="s")
        prompt = Prompt(np.asarray(LONG, np.int32), "")
        durable = harness.scheduler.submit(PreparedRequest(request, prompt, Client(), Principal("uid:0")))
        await harness.done(durable)
        assert harness.scheduler.cache.statistics().cached_cells > 600
        client = await run(harness, SMALL, 200)
        assert by_path(client, client.tokens) == expected(SMALL)
        assert harness.scheduler.cache.statistics().saved_states == 1
        await harness.clean()


async def test_a_fork_that_waits_is_cancelled(autojump_clock):
    async with controlling(PROGRAMS, FakeEngine(n_ctx=1000)) as harness:
        running = harness.ask([5], Client(), 650)
        answers = await harness.control("program", client := Client(), 200, argument=SMALL)
        await trio.sleep(0.2)
        waiting = harness.ask([6], later := Client(), 100, id="later")
        harness.scheduler.cancel(answers[0])
        await harness.done([waiting])
        assert later.tokens[0] == expected_continuation([6], 100)
        assert not running.done.is_set()
        await harness.done([running])
        assert client.reasons == {0: "cancelled"}
        await harness.clean()


class Fickle(Program):
    """Wants to fork, and may think better of it when it is asked again."""

    better: Script = ()

    def pre(self):
        if self.better:
            self.rest = list(self.better)
        return super().pre()


async def test_a_fork_that_waits_may_change_its_mind(autojump_clock):
    """Its controller is asked again with every exchange of another one.  Requests behind it then wait no longer."""
    async with controlling({"fickle": Fickle, **PROGRAMS}, FakeEngine(n_ctx=1000)) as harness:
        running, other = harness.ask([5], Client(), 680), Client()
        answers = await harness.control("program", other, 100, argument=[Gen(100)])
        fickle = await harness.control("fickle", client := Client(), 150, argument=SMALL)
        await trio.sleep(0.1)
        waiting = harness.ask([6], later := Client(), 5, id="later")
        await trio.sleep(0.1)
        assert not later.tokens[0]
        [controller] = [each for each in harness.runtime.live.values() if isinstance(each, Fickle)]
        controller.better = [Gen(45)]
        await harness.done([waiting])
        assert later.tokens[0] == expected_continuation([6], 5)
        assert not client.ends
        await harness.done(fickle)
        assert client.tokens[0][100:] == expected_continuation([START, *LONG[:100]], 45)
        await harness.done([running], answers)
        await harness.clean()


async def test_a_fork_goes_on_with_the_state_of_its_sampler(autojump_clock):
    """The seeds of the forks decide nothing before they part: the fake engine uses them for every seventh draw."""
    fields = {"temperature": 1.0, "mirostat": 2}
    script = [Gen(3), Fork([[Gen(8)]] * 2)]
    async with controlling(PROGRAMS) as harness:
        client = await run(harness, script, 40, seed=5, **fields)
        for index, tokens in enumerate(by_path(client, client.tokens).values()):
            alone = await run(harness, straight(script, [index]), 40, seed=5 + index, **fields)
            assert alone.tokens[0] == tokens
        await harness.clean()
