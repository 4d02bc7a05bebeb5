"""Answers that outlive their connections and the daemon, over a fake engine in virtual time."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.profile import amount, sampled
from tests.support.serving import Serving, serving
from uma_trio.client import Client, Eos, Event, PrefillProgress, ServerError, SessionInfo, Token
from uma_trio.daemon.store.answer_folder import AnswerFolder
from uma_trio.engine_link.messages import Step, StepCallbacks, StepOutput
from uma_trio.errors import ModelUnavailable
from uma_trio.models.markers import ReasoningMarkers

PROMPT = [byte + 100 for byte in b"hello"]
ASK: dict[str, Any] = {"prompt": "hello", "max_tokens": 30}


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token))


def numbers(events: Sequence[Any]) -> list[int]:
    return [event.number for event in events]


@contextlib.contextmanager
def folder(path: Path) -> Iterator[AnswerFolder]:
    with contextlib.closing(AnswerFolder(path)) as found:
        yield found


async def attached(harness: Serving, name: str, **fields: Any) -> list[Event]:
    async with harness.client() as client:
        return [event async for event in client.attach(name, **fields)]


async def test_an_answer_goes_on_without_its_connection(autojump_clock: object) -> None:
    async with serving() as harness:
        async with harness.client() as client:
            accepted = await client.detach(id="a", **ASK)
        assert (accepted.answer_id, accepted.state) == ("a", "queued")
        events = await attached(harness, "a")
        assert text(events) == text_of(expected_continuation(PROMPT, 30))
        assert numbers(events) == [*range(1, 32)]
        assert events == await attached(harness, "a"), "a second client gets the same"
        assert await attached(harness, "a", after=20) == events[20:]
        assert await attached(harness, "a", after=31) == events[-1:], "the last event always comes"
        await harness.settled()


async def test_what_can_never_be_answered_is_refused_at_once(autojump_clock: object) -> None:
    async with serving() as harness, harness.client() as client:
        for fields in ({"max_tokens": 600_000}, {"max_tokens": 2**30}, {"history": "replace"}):
            with pytest.raises(ServerError, match=next(iter(fields))):
                await client.detach(**(ASK | fields), keep_alive=True)
        assert await client.answers(keep_alive=True) == []


async def test_a_list_says_why_an_answer_has_failed(autojump_clock: object, tmp_path: Path) -> None:
    async def reason() -> str:
        async with harness.client() as client:
            [answer] = await client.answers()
        assert answer.state == "failed"
        assert answer.reason is not None
        return answer.reason

    with folder(tmp_path / "answers") as kept:
        async with serving(answers=kept) as harness:
            async with harness.client() as client:
                await client.detach(id="a", prompt="hello" * 20_000)
            with pytest.raises(ServerError, match="E_LIMIT"):
                await attached(harness, "a")
            before = await reason()
        assert before.startswith("E_LIMIT")
        async with serving(answers=kept) as harness:
            assert await reason() == before, "it is on disk"


async def test_clients_come_and_go_while_it_is_made(autojump_clock: object) -> None:
    async with serving() as harness:
        async with harness.client() as client:
            await client.detach(id="a", **ASK)
        events: list[Event] = []
        while not events or not isinstance(events[-1], Eos):
            async with harness.client() as client:
                with trio.move_on_after(0.05):
                    async for event in client.attach("a", after=len(events)):
                        events.append(event)
        assert text(events) == text_of(expected_continuation(PROMPT, 30))
        assert numbers(events) == [*range(1, 32)]


async def test_clients_see_how_far_an_answer_is_before_its_first_token(autojump_clock: object) -> None:
    """The latest of such events, and those to come.  They have no number."""
    async with serving() as harness, harness.client() as other:
        await other.detach(id="a", prompt="hello " * 200, max_tokens=5, progress=True)
        events = await attached(harness, "a")
        late = await attached(harness, "a")
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert progress
    assert [each.prefilled_tokens for each in progress] == sorted({each.prefilled_tokens for each in progress})
    assert late == [event for event in events if not isinstance(event, PrefillProgress)]
    assert numbers(late) == [*range(1, 7)]


async def test_answers_are_listed_cancelled_and_deleted(autojump_clock: object) -> None:
    async with serving() as harness, harness.client() as client:
        await client.detach(id="a", client_state="note", keep_alive=True, **ASK)
        await client.detach(id="b", keep_alive=True, prompt="hello", max_tokens=4000, ignore_eos=True)
        await trio.sleep(0.5)
        assert [(each.answer_id, each.state) for each in await client.answers(keep_alive=True)] == [
            ("b", "running"),
            ("a", "completed"),
        ]
        [found] = await client.answers("read", answer_id="a", keep_alive=True)
        assert (found.client_state, found.events) == ("note", 31)
        [found] = await client.answers("cancel", answer_id="b", keep_alive=True)
        assert found.state == "cancelled"
        assert 10 < found.events < 4000
        [found] = await client.answers("cancel", answer_id="a", keep_alive=True)
        assert found.state == "completed", "an answer that has ended stays as it is"
        for name in "ab":
            await client.answers("delete", answer_id=name, keep_alive=True)
        assert await client.answers(keep_alive=True) == []
        with pytest.raises(ServerError, match="E_ANSWER_NOT_FOUND"):
            await client.answers("read", answer_id="a")


async def test_another_principals_answer_is_not_found(autojump_clock: object) -> None:
    async with serving() as harness:
        async with harness.client() as client:
            await client.detach(id="a", principal="alice", **ASK)
        for name in ("bob", None):
            async with harness.client(principal=name) as client:
                with pytest.raises(ServerError, match="E_ANSWER_NOT_FOUND"):
                    [event async for event in client.attach("a")]
            for action in ("read", "cancel", "delete"):
                async with harness.client(principal=name) as client:
                    with pytest.raises(ServerError, match="E_ANSWER_NOT_FOUND"):
                        await client.answers(action, answer_id="a")
            async with harness.client(principal=name) as client:
                assert await client.answers() == []
        async with harness.client(principal="alice") as client:
            assert [each.answer_id for each in await client.answers()] == ["a"]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"n": 2}, "E_PROTO_BAD_REQUEST"),
        ({"model": "other"}, "E_MODEL_NOT_FOUND"),
        ({"detached": False, "client_state": "x"}, "E_PROTO_BAD_REQUEST"),
    ],
)
async def test_what_cannot_be_detached_is_refused(autojump_clock: object, wrong: dict[str, Any], code: str) -> None:
    async with serving() as harness, harness.client() as client:
        with pytest.raises(ServerError) as refused:
            await client.detach(**{"id": "a", **ASK, **wrong})
        assert refused.value.code == code


async def test_a_principal_has_so_many_unfinished_answers(autojump_clock: object) -> None:
    async with serving(max_detached=2) as harness, harness.client() as client:
        for name in "ab":
            await client.detach(id=name, keep_alive=True, **ASK)
        with pytest.raises(ServerError, match="E_LIMIT_REQUESTS"):
            await client.detach(id="c", keep_alive=True, **ASK)
        with pytest.raises(ServerError, match="E_ANSWER_EXISTS"):
            await client.detach(id="a", keep_alive=True, **ASK)
        await client.detach(id="c", principal="alice", keep_alive=True, **ASK)
        await trio.sleep(10)
        await client.detach(id="c", **ASK)


async def test_many_wait_for_their_turn(autojump_clock: object) -> None:
    async with serving(max_queue=4) as harness, harness.client() as client:
        for n in range(40):
            await client.detach(id=str(n), keep_alive=True, prompt="hello", max_tokens=5)
        for n in range(40):
            assert text(await attached(harness, str(n))) == text_of(expected_continuation(PROMPT, 5))


async def test_an_answer_that_is_to_begin_now_does_not_wait(autojump_clock: object) -> None:
    async with serving() as harness, harness.client() as client:
        limit = {"principal": "alice", "principal_max_requests": 1}
        await client.detach(id="a", keep_alive=True, **ASK, **limit)
        await client.detach(id="b", keep_alive=True, **ASK, **limit)
        await client.detach(id="c", keep_alive=True, admit_now=True, **ASK, **limit)
        async with harness.client(principal="alice") as other:
            with pytest.raises(ServerError, match="E_LIMIT_REQUESTS"):
                [event async for event in other.attach("c")]
        async with harness.client(principal="alice") as other:
            events = [event async for event in other.attach("b")]
        assert text(events) == text_of(expected_continuation(PROMPT, 30))


@pytest.mark.parametrize(
    "field",
    sampled(
        [
            {},
            {"temperature": 1.0, "seed": 7},
            {"temperature": 1.0, "mirostat": 2, "seed": 3},
            {"repetition_penalty": 1.5, "repeat_last_n": 8},
            {"dry_multiplier": 0.8, "dry_penalty_last_n": 20},
            {"echo": True, "logprobs": 1},
            {"speculate": True},
            {"session_id": "s"},
        ],
        4,
    ),
    ids=str,
)
async def test_a_killed_daemon_changes_no_text(autojump_clock: object, tmp_path: Path, field: dict[str, Any]) -> None:
    """The files are copied while an answer is made: that is what a kill would leave."""
    ask = {**ASK, **field}
    copies = []
    with folder(tmp_path / "0") as kept:
        async with serving(answers=kept) as harness:
            async with harness.client() as client:
                await client.detach(id="a", **ask)
            async with harness.client() as client:
                whole = []
                async for event in client.attach("a"):
                    whole.append(event)
                    copy = tmp_path / str(len(whole))
                    shutil.copytree(tmp_path / "0", copy, ignore=shutil.ignore_patterns("lock"))
                    copies.append((len(whole), copy))
    for n_seen, copy in copies[:: amount(quick=6, thorough=1)]:
        with folder(copy) as kept:
            async with serving(answers=kept) as harness:
                events = await attached(harness, "a")
                assert text(events) == text(whole)
                assert numbers(events) == numbers(whole)
                assert events[: min(n_seen, 30)] == whole[: min(n_seen, 30)], "what a client has seen stays"
                await harness.settled()


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30}
THINKING: dict[str, Any] = {
    "reasoning": ReasoningMarkers(begin=("[",), end=("]",), opened_by=("hello", "|so|"), closed_by="]"),
    "spelled": {ord("]") + 100: b"]"},
}
SENTENCE = {expected_continuation(PROMPT, 20)[-1]: b". "}


@pytest.mark.parametrize(
    ("ask", "change", "options"),
    [
        (ASK, {"text": "so"}, {}),
        (CHAT, {"message": "so"}, {}),
        (ASK, {"max_tokens": 20}, {}),
        (ASK, {"stop": "now"}, {}),
        (ASK, {"stop": "sentence"}, {"spelled": SENTENCE}),
        ({**CHAT, "separate_reasoning": True}, {"end_reasoning": True, "text": "so"}, THINKING),
        ({**CHAT, "separate_reasoning": True}, {"message": "so", "max_tokens": 25}, THINKING),
    ],
    ids=str,
)
async def test_a_killed_daemon_keeps_changes(
    autojump_clock: object, tmp_path: Path, ask: dict[str, Any], change: dict[str, Any], options: dict[str, Any]
) -> None:
    """The files are copied as soon as the client knows of the change, and at each event from there on."""
    with folder(tmp_path / "0") as kept:
        async with serving(answers=kept, **options) as harness:
            async with harness.client() as client:
                await client.detach(id="a", **ask)
            await trio.sleep(0.05)
            async with harness.client() as client:
                done = await client.steer("a", **change)
            whole, copies = [], [tmp_path / "steered"]
            shutil.copytree(tmp_path / "0", copies[0], ignore=shutil.ignore_patterns("lock"))
            async with harness.client() as client:
                async for event in client.attach("a"):
                    whole.append(event)
                    if len(whole) > done.after_tokens:
                        copies.append(tmp_path / str(len(whole)))
                        shutil.copytree(tmp_path / "0", copies[-1], ignore=shutil.ignore_patterns("lock"))
    assert isinstance(whole[-1], Eos)
    assert 3 < done.after_tokens < 15, "the change comes in the middle"
    for copy in copies[::4]:
        with folder(copy) as kept:
            [stored] = kept.load()
            assert [each.after_tokens for each in stored.log.changes] == [done.after_tokens]
            async with serving(answers=kept, **options) as harness:
                events = await attached(harness, "a")
                assert events[:-1] == whole[:-1]
                assert isinstance(events[-1], Eos)
                assert (events[-1].reason, events[-1].usage) == (whole[-1].reason, whole[-1].usage)


@contextlib.asynccontextmanager
async def one_place(kept: AnswerFolder) -> AsyncIterator[Serving]:
    """A daemon that takes a second for a tick, and computes one answer at a time."""
    engine = FakeEngine(n_ctx=1 << 13, n_seq_max=1, cost_ms=lambda prompt, decodes: 1000)
    async with serving(engine, answers=kept) as harness:
        yield harness


async def killed(path: Path, times: int) -> None:
    """Kill as many daemons in the first tick of the answers in ``path / "0"``; the last folder is for the next one."""
    for n in range(times):
        with folder(path / str(n)) as kept:
            async with one_place(kept):
                await trio.sleep(0.5)
                shutil.copytree(path / str(n), path / str(n + 1), ignore=shutil.ignore_patterns("lock"))


async def accept(path: Path, *names: str) -> None:
    with folder(path) as kept:
        async with one_place(kept) as harness, harness.client() as client:
            for name in names:
                await client.detach(id=name, keep_alive=True, **ASK)


async def test_a_title_that_is_given_during_the_first_answer_survives_a_kill(
    autojump_clock: object, tmp_path: Path
) -> None:
    async def session(client: Client, *action: str, **fields: Any) -> SessionInfo:
        [found] = await client.sessions(*action, **fields, keep_alive=True)
        return found

    with folder(tmp_path / "0") as kept:
        async with serving(answers=kept) as harness, harness.client() as client:
            await client.detach(id="a", session_id="s", keep_alive=True, **CHAT)
            await trio.sleep(0.05)
            assert (await session(client, contains="HELLO")).title == "hello", "its first words, until it has a title"
            for title in ("Once", "Twice"):
                assert (await session(client, "rename", session_id="s", title=title)).title == title
            shutil.copytree(tmp_path / "0", tmp_path / "1", ignore=shutil.ignore_patterns("lock"))
    with folder(tmp_path / "1") as kept:
        async with serving(answers=kept) as harness, harness.client() as client:
            await trio.sleep(0.05)
            assert ((found := await session(client)).title, found.busy) == ("Twice", True)
            await attached(harness, "a")
            assert ((found := await session(client)).title, found.turns) == ("Twice", 1)


async def test_an_answer_that_ends_its_daemons_is_given_up(autojump_clock: object, tmp_path: Path) -> None:
    await accept(tmp_path / "0", "a")
    await killed(tmp_path, 4)
    with folder(tmp_path / "4") as kept:
        async with one_place(kept) as harness:
            with pytest.raises(ServerError, match="E_RUNTIME_DECODE"):
                await attached(harness, "a")


PROMPTS = {name: "hello " * 200 + name for name in "abcdefghij"}
POISONOUS = "f"


def continuation(name: str) -> list[int]:
    return expected_continuation([byte + 100 for byte in PROMPTS[name].encode()], 30)


class DeadlyEngine(FakeEngine):
    """The daemon dies in a step that computes the token ``deadly``."""

    def __init__(self, deadly: int, n_seq_max: int) -> None:
        super().__init__(n_ctx=1 << 13, n_seq_max=n_seq_max)
        self.deadly = deadly
        self.has_killed = trio.Event()

    def step(self, step: Step, callbacks: StepCallbacks | None = None) -> StepOutput:
        if any(self.deadly in each.tokens for call in step.calls for each in call):
            self.has_killed.set()
        return super().step(step, callbacks)


async def was_killed(path: Path, engine: DeadlyEngine, live: str | None = None) -> bool:
    """Run a daemon until its answers have ended or it is killed: then ``path`` has what it left.

    Args:
        live: a prompt that a client sends as soon as the daemon takes requests, and that is no detached answer.
    """
    left = path.with_name("left")
    with folder(path) as kept:
        async with serving(engine, answers=kept) as harness:

            async def wait_for_ends() -> None:
                for name in PROMPTS:
                    with contextlib.suppress(ServerError):
                        await attached(harness, name)
                harness.nursery.cancel_scope.cancel()

            async def ask() -> None:
                async with harness.client() as client:
                    [event async for event in client.generate(prompt=live)]

            harness.nursery.start_soon(wait_for_ends)
            if live is not None:
                harness.nursery.start_soon(ask)
            await engine.has_killed.wait()
            await trio.sleep(0.001)  # no step is as short as this
            shutil.copytree(path, left, ignore=shutil.ignore_patterns("lock"))
    if not left.exists():
        return False
    shutil.rmtree(path)
    left.rename(path)
    return True


async def accept_all(path: Path) -> None:
    with folder(path) as kept:
        async with one_place(kept) as harness, harness.client() as client:
            for name, prompt in PROMPTS.items():
                await client.detach(id=name, prompt=prompt, max_tokens=30, keep_alive=True)


async def require_texts(path: Path, *failed: str) -> None:
    with folder(path) as kept:
        async with serving(answers=kept) as harness:
            for name in PROMPTS:
                if name in failed:
                    with pytest.raises(ServerError, match="E_RUNTIME_DECODE"):
                        await attached(harness, name)
                else:
                    assert text(await attached(harness, name)) == text_of(continuation(name))


@pytest.mark.parametrize(("at", "n_places"), sampled(itertools.product([None, 0, 10], [1, 4, 16]), 4))
async def test_the_answer_that_ends_daemons_is_the_only_one_that_fails(
    autojump_clock: object, tmp_path: Path, at: int | None, n_places: int
) -> None:
    """It dies of its prompt, or of one of its tokens; the others are computed with it, before it and after it.

    Three daemons die of any work, one of it among the suspects, and one of it alone.
    """
    path = tmp_path / "answers"
    deadly = ord(POISONOUS) + 100 if at is None else continuation(POISONOUS)[at]
    innocent = {token for name in PROMPTS if name != POISONOUS for token in continuation(name)}
    assert deadly not in innocent
    await accept_all(path)
    n_killed = 0
    while await was_killed(path, DeadlyEngine(deadly, n_places)):
        n_killed += 1
        assert n_killed <= 6
    assert n_killed >= 4
    await require_texts(path, POISONOUS)


async def test_a_client_whose_requests_end_daemons_fails_no_answer(autojump_clock: object, tmp_path: Path) -> None:
    """It sends the next one as soon as a daemon takes requests."""
    path, deadly = tmp_path / "answers", ord("*") + 100
    assert all(deadly not in continuation(name) for name in PROMPTS)
    await accept_all(path)
    for _ in range(amount(quick=8, thorough=30)):
        assert await was_killed(path, DeadlyEngine(deadly, 4), live="*")
    await require_texts(path)


async def test_only_the_answer_that_is_computed_can_have_ended_a_daemon(autojump_clock: object, tmp_path: Path) -> None:
    """The others wait for their places."""
    await accept(tmp_path / "0", *"abc")
    await killed(tmp_path, 3)
    with folder(tmp_path / "3") as kept:
        assert sum(each.log.n_attempts for each in kept.load()) == 3
        async with one_place(kept) as harness:
            for name in "abc":
                assert text(await attached(harness, name)) == text_of(expected_continuation(PROMPT, 30))


async def test_daemons_that_are_stopped_end_no_answer(autojump_clock: object, tmp_path: Path) -> None:
    await accept(tmp_path, "a")
    for _ in range(6):
        with folder(tmp_path) as kept:
            async with one_place(kept):
                await trio.sleep(0.5)
    with folder(tmp_path) as kept:
        async with one_place(kept) as harness:
            assert text(await attached(harness, "a")) == text_of(expected_continuation(PROMPT, 30))


async def test_an_engine_that_cannot_be_started_ends_no_detached_answer(autojump_clock: object) -> None:
    async with serving() as harness, harness.client() as client:
        await client.detach(id="a", **ASK)
        await trio.sleep(0.05)
        harness.scheduler._recovery.fail_everything(ModelUnavailable("no memory"))
        harness.scheduler._recovery.refusal = None
        assert text(await attached(harness, "a")) == text_of(expected_continuation(PROMPT, 30))


async def test_ended_answers_make_room_for_new_ones(autojump_clock: object, tmp_path: Path) -> None:
    with folder(tmp_path) as kept:
        async with serving(answers=kept, detached_max_mb=1) as harness:
            for n in range(16):
                async with harness.client() as client:
                    await client.detach(id=str(n), client_state="x" * 100_000, **ASK)
                await attached(harness, str(n))
            async with harness.client() as client:
                left = [each.answer_id for each in await client.answers()]
            assert left == [str(n) for n in range(15, 15 - len(left), -1)], "the oldest go first"
            assert 5 <= len(left) <= 10
            assert len(kept.load()) == len(left)


async def test_answers_whose_clients_have_left_are_bounded_in_number_and_time(autojump_clock: object) -> None:
    engine = FakeEngine(n_ctx=1 << 13, n_seq_max=8, cost_ms=lambda prompt, decodes: 100)
    async with serving(engine, max_unattended=2, unattended_s=12) as harness, harness.client() as client:
        endless = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True, "keep_alive": True}
        for name in "abcde":
            await client.detach(id=name, admit_now=name != "e", **endless)
            await trio.sleep(0.1)

        async def cancelled() -> set[str]:
            return {each.answer_id for each in await client.answers(keep_alive=True) if each.state == "cancelled"}

        async with harness.client() as reader, contextlib.aclosing(reader.attach("a")) as events:
            await anext(events)
            await trio.sleep(6)
            assert await cancelled() == {"b"}, "a is read, e needs no reader, and of the others b was left first"
            await trio.sleep(12)
            assert await cancelled() == {"b", "c", "d"}
        await trio.sleep(18)
        assert await cancelled() == {"a", "b", "c", "d"}
        assert text(await attached(harness, "b")), "what it had is kept"


async def test_answers_expire_as_sessions_do(autojump_clock: object, tmp_path: Path) -> None:
    now = [1000.0]
    with folder(tmp_path) as kept:
        async with serving(answers=kept, session_ttl_s=100) as harness:
            harness.server.detached._clock = lambda: now[0]
            async with harness.client() as client:
                await client.detach(id="a", **ASK)
            await attached(harness, "a")
            now[0] += 99
            await trio.sleep(61)
            async with harness.client() as client:
                assert len(await client.answers()) == 1
            now[0] += 2
            await trio.sleep(61)
            async with harness.client() as client:
                assert await client.answers() == []
