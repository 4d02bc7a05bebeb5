"""Sessions over the real server with connections and journal, and a fake engine in virtual time."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import trio

from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.profile import amount
from tests.support.serving import Serving, remembering, serving
from tests.support.state_files import at_once
from uma_trio.client import Eos, PrefillProgress, ServerError, Token, Transcript
from uma_trio.daemon.doors import connection
from uma_trio.daemon.sessions import table
from uma_trio.daemon.sessions.sessions import LONGEST_RETRY_S, SWEEP_S
from uma_trio.daemon.sessions.table import PART_CHARS, PART_SESSIONS
from uma_trio.daemon.store.journal import Journal, JournalError
from uma_trio.daemon.store.journal_format import SPARE_BYTES, SessionKey, SessionRecord
from uma_trio.principal import Principal
from uma_trio.protocol.chat import ChatMessage
from uma_trio.protocol.peer import OWN_PRINCIPAL

NEVER = 1e8


def tokens_of(text: str) -> list[int]:
    return [byte + 100 for byte in text.encode()]


async def ask(harness: Serving, session: str | None, prompt: str, n: int = 5, **fields):
    """All events of one request, on its own connection."""
    name = {} if session is None else {"session_id": session}
    async with harness.client() as client:
        return [event async for event in client.generate(prompt=prompt, max_tokens=n, **name, **fields)]


def ids(events) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Token) and not event.echo]


async def run_turns(harness: Serving, session: str, *prompts: str, n: int = 5) -> list[int]:
    """Run turns, and check that each answer continues one long prompt; returns the session's tokens."""
    said: list[int] = []
    for prompt in prompts:
        events = await ask(harness, session, prompt, n)
        said += tokens_of(prompt)
        assert ids(events) == expected_continuation(said, n)
        said += ids(events)
        assert events[-1].session.tokens == len(said)
    return said


async def continue_session(
    harness: Serving, session: str, said: list[int], prompt: str = "on", n: int = 5
) -> list[int]:
    """Run one more turn, and check that it continues ``said``; returns the session's tokens."""
    events = await ask(harness, session, prompt, n)
    before = [*said, *tokens_of(prompt)]
    assert ids(events) == expected_continuation(before, n)
    return [*before, *ids(events)]


async def listed(harness: Serving):
    async with harness.client() as client:
        return await client.sessions()


async def names(harness: Serving) -> list[str]:
    return [session.session_id for session in await listed(harness)]


async def query(harness: Serving, action: str, **fields):
    async with harness.client() as client:
        return (await client.sessions(action, **fields))[0]


async def read(harness: Serving, session: str, **options) -> Transcript:
    async with harness.client(**options) as client:
        return await client.transcript(session)


def after_a_crash(folder: Path, copy: Path) -> dict[str, SessionRecord]:
    """What a new server would find if this one were killed now."""
    shutil.copytree(folder / "sessions", copy, ignore=shutil.ignore_patterns("lock*"))
    journal = Journal(copy)
    try:
        found = journal.load()
        assert not journal.problems
        return {session.key.id: session for session in found}
    finally:
        journal.close()
        shutil.rmtree(copy)


async def drained(harness: Serving) -> None:
    """Drain the server, as after the first signal, and wait until it has ended."""
    harness.server.drain()
    with trio.fail_after(1000):
        while harness.nursery.child_tasks:
            await trio.sleep(0.1)


def fails(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def cached_tokens(harness: Serving) -> list[list[int]]:
    """The sequences in the engine's KV cache."""
    return [harness.engine._cache[seq_id].tokens for seq_id in harness.engine.used_cells()]


# -- what a session is ------------------------------------------------------------------------------


async def test_progress_of_the_prefill_comes_before_the_tokens(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness, harness.client() as client:
            fields = {"session_id": "a", "prompt": "x" * 1000, "max_tokens": 2, "progress": True}
            events = [event async for event in client.generate(**fields)]
            found = [event.prefilled_tokens for event in events if isinstance(event, PrefillProgress)]
            assert found[-1] == 1000
            assert [type(event) for event in events[len(found) :]] == [Token, Token, Eos]


async def test_turns_equal_one_long_prompt(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            said = await run_turns(harness, "a", "once upon a time", " there was", " and then", "")
            found = await query(harness, "describe", session_id="a")
            assert (found.turns, found.tokens, found.durable) == (4, len(said), True)
            await harness.settled()


async def test_a_turn_computes_only_new_tokens(autojump_clock):
    async with serving() as harness:
        said = await run_turns(harness, "a", "a long beginning of a story " * 10)
        events = await ask(harness, "a", "more")
        assert events[-1].usage.cached_tokens == len(said) - 1
        assert events[-1].usage.prompt_tokens == len(said) + 4


async def test_an_echoed_prompt_is_kept_once(autojump_clock):
    async with serving() as harness:
        events = await ask(harness, "a", "hello", stream=False, echo=True)
        expected = expected_continuation(tokens_of("hello"), 5)
        assert events[-1].text == "hello" + "".join(f"{token} " for token in expected)
        assert events[-1].session.tokens == 10
        await continue_session(harness, "a", [*tokens_of("hello"), *expected])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("echo", [True, False])
async def test_a_stop_string_is_not_kept(autojump_clock, stream, echo):
    expected = expected_continuation(tokens_of("hello"), 5)
    stop = f"{expected[2]} {expected[3]}"  # ends inside a token
    async with serving() as harness:
        events = await ask(harness, "a", "hello", stop=stop, stream=stream, echo=echo)
        assert (events[-1].reason, events[-1].stop) == ("stop", stop)
        await continue_session(harness, "a", [*tokens_of("hello"), *expected[:2]])


async def test_the_part_of_a_token_before_a_stop_string_is_kept(autojump_clock):
    expected = expected_continuation(tokens_of("hello"), 3)
    assert len(str(expected[2])) > 1
    stop = str(expected[2])[1:] + " "
    async with serving() as harness:
        events = await ask(harness, "a", "hello", stop=stop)
        shown = "".join((getattr(event, "text", "") or "") for event in events)
        assert shown.endswith(f" {str(expected[2])[0]}")
        await continue_session(harness, "a", [*tokens_of("hello"), *expected[:2], *tokens_of(str(expected[2])[0])])


async def test_an_end_token_is_not_kept(autojump_clock):
    async with serving(FakeEngine(eog_after=8)) as harness:
        events = await ask(harness, "a", "hello", 20)
        assert events[-1].reason == "stop"
        assert events[-1].session.tokens == 8
        assert events[-1].usage.completion_tokens == 4
        harness.engine.eog_after = None
        await continue_session(harness, "a", [*tokens_of("hello"), *expected_continuation(tokens_of("hello"), 3)])


async def test_a_chat_keeps_its_messages(autojump_clock, tmp_path):
    def user(text: str):
        return [{"role": "user", "content": text}]

    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness, harness.client() as client:
            said = ""
            for text in ("one", "two", "three"):
                said = f"{said}|{text}" if said else text
                eos = await client.complete(messages=user(text), max_tokens=4, session_id="a", keep_alive=True)
                expected = expected_continuation(tokens_of(said), 4)
                assert eos.text == "".join(f"{token} " for token in expected)
                said += "|" + eos.text
            with pytest.raises(ServerError, match="began with messages"):
                await client.complete(prompt="plain", session_id="a", keep_alive=True)
        found = after_a_crash(tmp_path, tmp_path / "copy")["a"]
        assert "|".join(message.content for message in found.messages) == said


async def test_a_request_replaces_the_last_messages(autojump_clock, tmp_path):
    def user(text: str):
        return [{"role": "user", "content": text}]

    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            async with harness.client() as client:
                for text in ("one", "two"):
                    await client.complete(messages=user(text), max_tokens=4, session_id="a", keep_alive=True)
                [*kept, _, _] = before = (await client.transcript("a")).messages
            async with harness.client() as client:
                with pytest.raises(ServerError, match="with a session_id"):
                    await client.complete(messages=user("x"), drop_messages=2, keep_alive=True)
                with pytest.raises(ServerError, match="has 4 messages; drop_messages is 5"):
                    await client.complete(messages=user("x"), session_id="a", drop_messages=5, keep_alive=True)
                with pytest.raises(ServerError, match="E_LIMIT_MAX_TOKENS"):
                    await client.complete(messages=user("x"), session_id="a", drop_messages=2, max_tokens=10**8)
            async with harness.client() as client:
                assert (await client.transcript("a")).messages == before
            async with harness.client() as client:
                eos = await client.complete(messages=user("three"), max_tokens=4, session_id="a", drop_messages=2)
            text = "|".join(message.content for message in kept) + "|three"
            assert eos.text == "".join(f"{token} " for token in expected_continuation(tokens_of(text), 4))
            assert (eos.session.turns, eos.session.durable) == (3, True)
            async with harness.client() as client:
                after = (await client.transcript("a")).messages
            assert [(each.role, each.content) for each in after] == [
                *((each.role, each.content) for each in kept),
                ("user", "three"),
                ("assistant", eos.text),
            ]
            await harness.settled()
        assert list(after_a_crash(tmp_path, tmp_path / "copy")["a"].messages) == after


async def test_a_session_keeps_a_continued_message_as_one(autojump_clock):
    begun = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two "}]
    async with serving() as harness:
        async with harness.client() as client:
            rest = await client.complete(
                messages=begun, max_tokens=4, session_id="a", continue_final_message=True, keep_alive=True
            )
            [_, answer] = (await client.transcript("a", keep_alive=True)).messages
            assert answer.content == f"two {rest.text}"
            again = [{"role": "assistant", "content": answer.content}]
            fields = {"drop_messages": 1, "continue_final_message": True}
            more = await client.complete(messages=again, max_tokens=3, session_id="a", keep_alive=True, **fields)
            [_, whole] = (await client.transcript("a")).messages
            assert whole.content == f"two {rest.text}{more.text}"
            assert (whole.generation.reason, whole.generation.usage.completion_tokens) == ("length", 7)
            assert whole.generation.usage.prompt_tokens == answer.generation.usage.prompt_tokens
            assert whole.generation.timings.ttft_ms == answer.generation.timings.ttft_ms
            assert whole.generation.timings.total_ms > answer.generation.timings.total_ms
            assert whole.generation.timings.tokens_per_s == pytest.approx(1000, rel=0.9)
        async with harness.client() as client:
            await client.complete(messages=begun, max_tokens=4, session_id="b", keep_alive=True)
            assert len((await client.transcript("b")).messages) == 3


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def contents(messages) -> list[str]:
    return [message.content for message in messages]


async def test_a_request_with_the_whole_conversation_replaces_the_sessions(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness, harness.client() as client:

            async def say(*texts: str) -> Eos:
                fields = {"session_id": "a", "history": "replace", "max_tokens": 4, "keep_alive": True}
                eos = await client.complete(messages=chat(*texts), **fields)
                assert eos.text == "".join(f"{n} " for n in expected_continuation(tokens_of("|".join(texts)), 4))
                return eos

            first = await say("one" * 20)
            second = await say("one" * 20, first.text, "two")
            assert second.usage.cached_tokens >= 60
            assert (second.session.turns, second.session.durable) == (2, True)
            third = await say("one" * 20, "an answer that the client has changed", "three")
            assert third.usage.cached_tokens >= 60
            found = after_a_crash(tmp_path, tmp_path / "copy")["a"]
            assert contents(found.messages) == [
                "one" * 20,
                "an answer that the client has changed",
                "three",
                third.text,
            ]
            eos = await client.complete(messages=chat("four"), session_id="a", max_tokens=4)
            said = "|".join([*contents(found.messages), "four"])
            assert eos.text == "".join(f"{token} " for token in expected_continuation(tokens_of(said), 4))
            await harness.settled()


async def test_a_prompt_may_replace_a_chat_and_a_chat_a_prompt(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness, harness.client() as client:
            fields = {"session_id": "a", "history": "replace", "max_tokens": 4, "keep_alive": True}
            await client.complete(messages=chat("one"), **fields)
            eos = await client.complete(prompt="plain", **fields)
            assert eos.text == "".join(f"{token} " for token in expected_continuation(tokens_of("plain"), 4))
            found = after_a_crash(tmp_path, tmp_path / "copy")["a"]
            assert (list(found.messages), len(found.tokens)) == ([], 9)
            await client.complete(messages=chat("two"), **fields)
            assert contents(after_a_crash(tmp_path, tmp_path / "copy")["a"].messages)[0] == "two"


async def test_a_busy_session_is_no_error_for_a_request_with_the_whole_conversation(autojump_clock):
    async with serving() as harness, harness.client() as first, harness.client() as second:
        fields = {"session_id": "a", "history": "replace"}
        events = first.generate(messages=chat("one"), max_tokens=50, **fields)
        await anext(events)
        eos = await second.complete(messages=chat("two"), max_tokens=4, **fields)
        assert eos.text == "".join(f"{token} " for token in expected_continuation(tokens_of("two"), 4))
        assert eos.session is None
        *_, last = [event async for event in events]
        assert (last.session.turns, last.usage.completion_tokens) == (1, 50)
        assert contents((await read(harness, "a")).messages)[0] == "one"


async def test_a_failed_request_with_the_whole_conversation_leaves_the_session_as_it_is(autojump_clock):
    async with serving() as harness, harness.client() as client:
        fields = {"session_id": "a", "history": "replace", "keep_alive": True}
        await client.complete(messages=chat("one"), max_tokens=4, **fields)
        for wrong in ({"max_tokens": 10**8}, {"drop_messages": 2}):
            with pytest.raises(ServerError):
                await client.complete(messages=chat("two"), **fields, **wrong)
        assert contents((await read(harness, "a")).messages)[0] == "one"
        with pytest.raises(ServerError, match="history is for the messages of a session"):
            await client.complete(messages=chat("two"), history="replace")


async def test_a_forked_chat_is_on_disk_with_all_messages(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            async with harness.client() as client:
                await client.complete(
                    messages=[{"role": "user", "content": "one"}], max_tokens=4, session_id="a", keep_alive=True
                )
            fork = await query(harness, "fork", session_id="a", new_id="b")
            assert fork.durable
        kept = after_a_crash(tmp_path, tmp_path / "copy")
        assert kept["b"].messages == kept["a"].messages
        assert kept["b"].tokens.tolist() == kept["a"].tokens.tolist()


async def test_a_title_is_found_and_survives_a_crash(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            async with harness.client() as client:
                for name, text in (("a", "  One\nfox  and more"), ("b", "An owl")):
                    messages = [{"role": "user", "content": text}]
                    await client.complete(messages=messages, max_tokens=4, session_id=name, keep_alive=True)
            assert (await query(harness, "describe", session_id="a")).title == "One fox and more"
            assert (await query(harness, "rename", session_id="a", title="Tiere")).title == "Tiere"
            forked = await query(harness, "fork", session_id="a", new_id="c")
            assert (forked.title, forked.durable) == ("Tiere", True)
            async with harness.client() as client:
                for text, names in (("FOX", ["c", "a"]), ("tiere", ["c", "a"]), ("owl", ["b"]), ("cat", [])):
                    found = await client.sessions(contains=text, keep_alive=True)
                    assert [each.session_id for each in found] == names
            assert (await query(harness, "rename", session_id="c", title="")).title == "One fox and more"
        kept = after_a_crash(tmp_path, tmp_path / "copy")
        assert {name: kept[name].title for name in kept} == {"a": "Tiere", "b": "", "c": ""}


async def test_a_title_that_is_given_during_an_answer_survives_a_crash_in_it(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            said = await run_turns(harness, "a", "hello")
            async with harness.client() as client:
                await client.send({"id": "r", "prompt": "go on", "max_tokens": 100, "session_id": "a"})
                assert isinstance(await client.receive(), Token)
                renamed = await query(harness, "rename", session_id="a", title="new")
                assert (renamed.title, renamed.busy, renamed.durable) == ("new", True, True)
                kept = after_a_crash(tmp_path, tmp_path / "copy")["a"]
                assert (kept.title, kept.tokens.tolist()) == ("new", said)
                while not isinstance(await client.receive(), Eos):
                    pass
        assert after_a_crash(tmp_path, tmp_path / "copy")["a"].title == "new"


async def test_a_fork_and_its_source_are_independent(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            said = await run_turns(harness, "a", "once upon a time", " there was")
            found = await query(harness, "fork", session_id="a", new_id="b")
            assert (found.session_id, found.turns, found.tokens) == ("b", 2, len(said))
            assert found.durable
            one = await continue_session(harness, "a", said, " a fox")
            other = await continue_session(harness, "b", said, " an owl")
            assert one != other
            with pytest.raises(ServerError, match="E_SESSION_EXISTS"):
                await query(harness, "fork", session_id="a", new_id="b")
            with pytest.raises(ServerError, match="E_SESSION_NOT_FOUND"):
                await query(harness, "fork", session_id="c", new_id="d")
            found = after_a_crash(tmp_path, tmp_path / "copy")
            assert {name: session.tokens.tolist() for name, session in found.items()} == {"a": one, "b": other}


async def test_a_fork_of_a_busy_session_starts_before_the_current_turn(autojump_clock):
    async with serving() as harness:
        said = await run_turns(harness, "a", "hello")
        async with harness.client() as client:
            await client.send({"id": "r", "prompt": "go on", "max_tokens": 500, "session_id": "a"})
            assert isinstance(await client.receive(), Token)
            await query(harness, "fork", session_id="a", new_id="b")
            await continue_session(harness, "b", said)


# -- one request at a time, one owner -----------------------------------------------------------------


async def test_a_session_runs_one_request_at_a_time(autojump_clock):
    async with serving() as harness:
        async with harness.client() as client:
            await client.send({"id": "r", "prompt": "hello", "max_tokens": 100, "session_id": "a"})
            assert isinstance(await client.receive(), Token)
            with pytest.raises(ServerError, match="E_SESSION_BUSY"):
                await ask(harness, "a", "me too")
            with pytest.raises(ServerError, match="E_SESSION_BUSY"):
                await query(harness, "close", session_id="a")
            assert ids(await ask(harness, "b", "me too", 1)), "other sessions are served"
            while not isinstance(event := await client.receive(), Eos):
                pass
            assert event.session.tokens == 105
        await continue_session(harness, "a", [*tokens_of("hello"), *expected_continuation(tokens_of("hello"), 100)])


async def test_principals_do_not_see_each_others_sessions(autojump_clock, monkeypatch):
    async with serving() as harness:
        monkeypatch.setattr(connection, "principal_of", lambda sock: Principal("uid:1"))
        mine = await run_turns(harness, "a", "a secret that nobody else must know")
        monkeypatch.setattr(connection, "principal_of", lambda sock: Principal("uid:2"))
        assert await names(harness) == []
        for action in ("describe", "close", "fork"):
            with pytest.raises(ServerError, match="E_SESSION_NOT_FOUND"):
                await query(harness, action, session_id="a", **({"new_id": "b"} if action == "fork" else {}))
        with pytest.raises(ServerError, match="E_SESSION_NOT_FOUND"):
            await read(harness, "a")
        theirs = await run_turns(harness, "a", "hello")
        events = await ask(harness, None, "a secret that nobody else must know")
        assert events[-1].usage.cached_tokens == 0
        await query(harness, "close", session_id="a")
        monkeypatch.setattr(connection, "principal_of", lambda sock: Principal("uid:1"))
        assert await names(harness) == ["a"]
        assert mine != theirs
        await continue_session(harness, "a", mine)


# -- transcripts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["json", "cbor"])
async def test_the_transcript_of_a_chat_has_its_messages(autojump_clock, encoding):
    async with serving() as harness, harness.client() as client:
        eos = None
        for text in ("one", "two"):
            chat = [{"role": "system", "content": "be brief"}] if text == "one" else []
            chat.append({"role": "user", "content": text})
            eos = await client.complete(messages=chat, max_tokens=4, session_id="a", keep_alive=True)
            found = await read(harness, "a", encoding=encoding)
            assert (found.messages[-1].role, found.messages[-1].content) == ("assistant", eos.text)
        assert [(message.role, message.content) for message in found.messages[:2]] == [
            ("system", "be brief"),
            ("user", "one"),
        ]
        assert [message.role for message in found.messages[2:]] == ["assistant", "user", "assistant"]
        assert (found.session, found.text, found.more) == (eos.session, None, False)


async def test_the_transcript_of_plain_prompts_is_one_text(autojump_clock, monkeypatch):
    monkeypatch.setattr(table, "PART_CHARS", 40)
    async with serving() as harness:
        tokens = await run_turns(harness, "a", "hello", "on", n=50)
        found = await read(harness, "a")
        assert (found.messages, found.text) == ([], "".join(f"{token} " for token in tokens))
        assert len(found.text) > 3 * 40, "it takes several events"


async def test_a_transcript_while_the_session_answers_ends_before_the_current_turn(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.complete(messages=[{"role": "user", "content": "one"}], session_id="a", keep_alive=True)
        before = await read(harness, "a")
        await client.send(
            {"id": "r", "messages": [{"role": "user", "content": "two"}], "max_tokens": 90, "session_id": "a"}
        )
        assert isinstance(await client.receive(), Token)
        found = await read(harness, "a")
        assert (found.messages, found.session.busy) == (before.messages, True)


async def test_a_client_that_does_not_read_a_long_transcript_costs_bounded_memory(autojump_clock):
    async with serving() as harness, harness.client() as client:
        await client.complete(messages=[{"role": "user", "content": "one"}], session_id="a", keep_alive=True)
        [session] = harness.service.sessions._table
        messages = [ChatMessage(role="user", content=f"{n} " * 10_000) for n in range(100)]
        session.change(messages=messages)
        await client.send({"type": "sessions", "action": "read", "session_id": "a"})
        await trio.sleep(30)
        n_bytes = sum(len(message.content) for message in messages)
        waiting = harness.server.snapshot()["send_queue_bytes"]
        assert 0 < waiting < connection.MAX_UNREAD_BYTES + harness.server.limits.max_tx_bytes + 2 * PART_CHARS < n_bytes
        received = []
        while (event := await client.receive()) is not None:
            received += event.messages
        assert received == messages


async def test_a_list_of_any_length_reaches_a_client_that_reads_it_later(autojump_clock):
    async with serving() as harness, harness.client() as client:
        stored, now = harness.service.sessions._table, time.time()
        for n in range(9000):
            session = stored.begin(SessionKey(OWN_PRINCIPAL, f"session {n}"), now)
            stored.record_turn(session, now, time.monotonic())
            stored.end(session)
        await client.send({"type": "sessions", "keep_alive": True})
        await trio.sleep(30)
        assert harness.server.snapshot()["send_queue_bytes"] > connection.MAX_UNREAD_BYTES
        await client.send({"type": "sessions", "action": "describe", "session_id": "session 7"})
        found = [await client.receive()]
        while found[-1].more:
            found.append(await client.receive())
        assert [len(part.sessions) for part in found] == [PART_SESSIONS] * 140 + [9000 - 140 * PART_SESSIONS]
        assert [session.session_id for part in found for session in part.sessions] == [
            f"session {n}" for n in reversed(range(9000))
        ]
        assert [session.session_id for session in (await client.receive()).sessions] == ["session 7"]


async def test_all_clients_together_have_one_event_of_an_answer_made_in_each_turn_of_the_event_loop(
    autojump_clock, monkeypatch
):
    """Streams get their tokens in these turns, so what queries cost in one of them is what streams wait."""
    made_in_turns = [0]

    class Turns(trio.abc.Instrument):
        def before_io_wait(self, timeout):
            made_in_turns.append(0)

    def count(owner, name):
        wrapped = getattr(owner, name)

        def counting(*arguments):
            made_in_turns[-1] += 1
            return wrapped(*arguments)

        monkeypatch.setattr(owner, name, counting)

    async with serving() as harness, contextlib.AsyncExitStack() as connections:
        stored, now = harness.service.sessions._table, time.time()
        for n in range(10 * PART_SESSIONS):
            stored.record_turn(stored.begin(SessionKey(OWN_PRINCIPAL, f"session {n}"), now), now, time.monotonic())
        clients = [await connections.enter_async_context(harness.client()) for _ in range(20)]
        count(harness.server, "snapshot")
        count(connection.Outbox, "send")
        trio.lowlevel.add_instrument(Turns())
        async with trio.open_nursery() as asking:
            for each in clients[:10]:
                asking.start_soon(each.sessions)
            for each in clients[10:]:
                asking.start_soon(each.metrics)
    assert sum(made_in_turns) == 10 * 10 + 10 * 2
    assert max(made_in_turns) <= 2, "one send, with the snapshot that it is made of"


# -- how a turn can end -----------------------------------------------------------------------------


async def test_a_cancelled_turn_keeps_what_was_sent(autojump_clock):
    async with serving() as harness:
        said = await run_turns(harness, "a", "hello")
        async with harness.client() as client:
            await client.send({"id": "r", "prompt": "go on", "max_tokens": 500, "session_id": "a"})
            events = [await client.receive() for _ in range(7)]
            await client.cancel("r")
            while not isinstance(events[-1], Eos):
                events.append(await client.receive())
        assert events[-1].reason == "cancelled"
        said += [*tokens_of("go on"), *ids(events)]
        assert events[-1].session.tokens == len(said)
        await continue_session(harness, "a", said)


async def test_a_turn_cancelled_before_its_first_token_changes_nothing(autojump_clock):
    async with serving() as harness:
        said = await run_turns(harness, "a", "hello")
        for wait_s in (0.0, 0.01):
            for session, prompt in (("a", "x" * 3000), ("new", "y" * 3000)):
                async with harness.client() as client:
                    await client.send({"id": "r", "prompt": prompt, "max_tokens": 5, "session_id": session})
                    await trio.sleep(wait_s)
                    await client.cancel("r")
                    while not isinstance(event := await client.receive(), Eos):
                        pass
                    assert event.reason == "cancelled"
        assert await names(harness) == ["a"], "a session without a completed turn does not exist"
        await continue_session(harness, "a", said)
        await harness.settled()


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.1, 1.0])
async def test_a_client_that_disconnects_cancels_its_turn(autojump_clock, after_s):
    async with serving() as harness:
        said = await run_turns(harness, "a", "hello")
        async with harness.client() as client:
            await client.send({"id": "r", "prompt": "go on", "max_tokens": 2000, "session_id": "a"})
            await trio.sleep(after_s)
        await harness.settled()
        found = await query(harness, "describe", session_id="a")
        assert not found.busy
        answered = found.tokens - len(said) - len("go on")
        assert answered > 0 or found.tokens == len(said)
        if answered > 0:
            said += tokens_of("go on")
            said += expected_continuation(said, answered)
        await continue_session(harness, "a", said)


async def test_an_error_leaves_the_session_unchanged(autojump_clock):
    async with serving(request_timeout_s=2.0, max_tokens=100_000) as harness:
        said = await run_turns(harness, "a", "hello")
        for fields, code in (
            ({"max_tokens": 3000}, "E_LIMIT_REQUEST_TIMEOUT"),
            ({"max_tokens": 100_000}, "E_LIMIT_CONTEXT"),
            ({"prompt": "x" * 5000}, "E_LIMIT_CONTEXT"),
        ):
            async with harness.client() as client:
                with pytest.raises(ServerError, match=code):
                    async for _ in client.generate(**{"prompt": "go on", "session_id": "a", **fields}):
                        pass
        await continue_session(harness, "a", said)
        await harness.settled()


async def test_a_turn_that_ends_while_draining_is_durable(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness, harness.client() as client:
            await client.send({"id": "r", "prompt": "hello", "max_tokens": 50, "session_id": "a"})
            assert isinstance(await client.receive(), Token)
            harness.server.drain()
            while not isinstance(event := await client.receive(), Eos):
                pass
            assert (event.reason, event.session.durable) == ("length", True)
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            await continue_session(harness, "a", [*tokens_of("hello"), *expected_continuation(tokens_of("hello"), 50)])


async def test_a_turn_cut_off_by_shutdown_changes_nothing(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, drain_timeout_s=0.5) as harness:
            said = await run_turns(harness, "a", "hello")
            async with harness.client() as client:
                await client.send({"id": "r", "prompt": "go on", "max_tokens": 2000, "session_id": "a"})
                harness.server.drain()
                while isinstance(event := await client.receive(), Token):
                    pass
                assert event.code == "E_RUNTIME_SHUTDOWN"
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            await continue_session(harness, "a", said)


# -- durability --------------------------------------------------------------------------------


async def test_a_turn_is_on_disk_before_its_eos_is_sent(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            said: list[int] = []
            for prompt in ("once", " upon", " a", " time"):
                said = await continue_session(harness, "a", said, prompt)
                assert after_a_crash(tmp_path, tmp_path / "copy")["a"].tokens.tolist() == said


async def test_only_the_eos_waits_for_the_disk(autojump_clock, tmp_path):
    written = trio.Event()

    async def slow_disk(call, *arguments):
        if getattr(call, "__name__", "") == "write":
            await written.wait()
        return await at_once(call, *arguments)

    with remembering(tmp_path) as storage:
        async with serving(storage=storage, in_thread=slow_disk) as harness, harness.client() as client:
            await client.send({"id": "r", "prompt": "hello", "max_tokens": 5, "session_id": "a"})
            events = [await client.receive() for _ in range(5)]
            assert ids(events) == expected_continuation(tokens_of("hello"), 5), "tokens do not wait"
            with trio.move_on_after(60):
                raise AssertionError(f"{await client.receive()} came before it was on disk")
            assert ids(await ask(harness, None, "others go on", 3))
            with pytest.raises(ServerError, match="E_SESSION_BUSY"):
                await ask(harness, "a", "not yet")
            await client.cancel("r")  # too late
            written.set()
            last = await client.receive()
            assert (type(last), last.reason, last.session.durable) == (Eos, "length", True)


async def test_after_a_disk_failure_the_next_turn_writes_the_whole_session(autojump_clock, tmp_path, monkeypatch):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            for session in ("old", "new"):
                said = await run_turns(harness, session, "hello") if session == "old" else []
                with monkeypatch.context() as broken:

                    def fails(self, session):
                        raise JournalError("the disk failed")

                    broken.setattr(Journal, "write", fails)
                    events = await ask(harness, session, " there")
                    said += tokens_of(" there")
                    assert ids(events) == expected_continuation(said, 5)
                    said += ids(events)
                    assert events[-1].session.durable is False
                    assert harness.server.snapshot()["sessions"]["not_durable"] == 1
                said = await continue_session(harness, session, said)
                assert (await query(harness, "describe", session_id=session)).durable
                assert after_a_crash(tmp_path, tmp_path / "copy")[session].tokens.tolist() == said
            found = harness.server.snapshot()["sessions"]
            assert (found["not_durable"], found["journal_failures_total"]) == (0, 2)


async def test_a_failed_write_is_repeated_soon(autojump_clock, tmp_path, monkeypatch):
    """Without another turn in the session."""
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            said = await run_turns(harness, "a", "hello")
            with monkeypatch.context() as broken:
                broken.setattr(os, "fdatasync", fails)
                said = await continue_session(harness, "a", said)
                await ask(harness, "new", "hello")
                await trio.sleep(SWEEP_S + 1)
                assert harness.server.snapshot()["sessions"]["not_durable"] == 2
            await trio.sleep(LONGEST_RETRY_S + 0.1)
            assert harness.server.snapshot()["sessions"]["not_durable"] == 0
            before = await listed(harness)
    assert {session.session_id: session.turns for session in before} == {"new": 1, "a": 2}
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            assert await listed(harness) == before
            await continue_session(harness, "a", said)


async def test_a_failed_write_is_repeated_when_the_server_drains(autojump_clock, tmp_path, monkeypatch):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            with monkeypatch.context() as broken:
                broken.setattr(os, "fdatasync", fails)
                await ask(harness, "a", "hello")
            before = await listed(harness)
            assert not before[0].durable
            await drained(harness)
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            assert await listed(harness) == [attrs.evolve(before[0], durable=True)]


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("then", ["another turn", "nothing"])
async def test_files_removed_under_a_running_server_are_written_again(autojump_clock, tmp_path, what, then):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, offload_after_s=0) as harness:
            said = await run_turns(harness, "a", "once upon a time", " there was")
            other = await run_turns(harness, "b", "hello")
            await trio.sleep(5)
            if what == "file":
                for file in (tmp_path / "sessions").glob("*.session"):
                    file.unlink()
            else:
                shutil.rmtree(tmp_path / "sessions")
                shutil.rmtree(tmp_path / "states")
            if then == "another turn":
                said = await continue_session(harness, "a", said)
                found = await query(harness, "describe", session_id="a")
                assert (found.durable, found.turns) == (True, 3)
                assert after_a_crash(tmp_path, tmp_path / "copy")["a"].tokens.tolist() == said
            await trio.sleep(SWEEP_S)
            assert harness.server.snapshot()["sessions"]["journal_restored_total"] == 2
            before = await listed(harness)
            await harness.settled()
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            assert await listed(harness) == before
            await continue_session(harness, "a", said)
            await continue_session(harness, "b", other)


async def test_without_its_folders_the_server_goes_on_without_durability(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, offload_after_s=0) as harness:
            said = await run_turns(harness, "a", "hello")
            await trio.sleep(5)
            for room in ("sessions", "states"):
                shutil.rmtree(tmp_path / room)
                (tmp_path / room).write_text("a file in its place")
            said = await continue_session(harness, "a", said)
            events = await ask(harness, "b", "hello")
            assert events[-1].session.durable is False
            await trio.sleep(SWEEP_S + 5)
            await query(harness, "close", session_id="a")
            assert await names(harness) == ["b"]
            await harness.settled()


async def test_the_list_of_sessions_is_the_same_after_a_restart(autojump_clock, tmp_path, monkeypatch):
    times = itertools.count(time.time(), 0.125)
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, offload=False) as harness:
            monkeypatch.setattr("uma_trio.daemon.sessions.sessions.time", SimpleNamespace(time=lambda: next(times)))
            await run_turns(harness, "a", "once", " upon", " a time")
            await query(harness, "fork", session_id="a", new_id="b")
            await ask(harness, "b", " there was")
            await query(harness, "fork", session_id="b", new_id="c")
            with monkeypatch.context() as broken:
                broken.setattr(Journal, "write", lambda self, session: (_ for _ in ()).throw(JournalError("no disk")))
                await ask(harness, "a", " not on disk")
            await ask(harness, "a", " and then")
            async with harness.client() as client:  # a failed request is not a turn
                with pytest.raises(ServerError, match="E_LIMIT_CONTEXT"):
                    async for _ in client.generate(prompt="x" * 5000, session_id="c"):
                        pass
            before = await listed(harness)
            turns = {session.session_id: session.turns for session in before}
            assert turns == {"a": 5, "b": 4, "c": 4}, "a fork starts with the turns of its source"
            assert list(turns) == ["a", "c", "b"]
    for _ in range(2):
        with remembering(tmp_path) as storage:
            async with serving(storage=storage, offload=False) as harness:
                assert await listed(harness) == before


async def test_more_messages_than_a_file_may_hold_are_refused(autojump_clock, monkeypatch):
    monkeypatch.setattr("uma_trio.daemon.sessions.sessions.MAX_MESSAGES", 4)
    user = [{"role": "user", "content": "hello"}]
    async with serving() as harness, harness.client() as client:
        await client.complete(messages=user, max_tokens=4, session_id="a", keep_alive=True)
        eos = await client.complete(messages=user, max_tokens=4, session_id="a", keep_alive=True)
        assert eos.session.turns == 2
        with pytest.raises(ServerError, match="at most 4"):
            await client.complete(messages=user, max_tokens=4, session_id="a", keep_alive=True)


async def test_a_chat_with_n_keep_does_not_grow(autojump_clock, tmp_path):
    """Neither in memory nor on disk."""
    with remembering(tmp_path) as storage:
        async with (
            serving(FakeEngine(n_ctx=400), storage=storage, offload=False) as harness,
            harness.client() as client,
        ):
            system = {"role": "system", "content": "be brief"}
            shown, sizes, n_messages, dropped = [], [], [], 0
            for n in range(n_turns := amount(quick=70, thorough=120)):
                new = [{"role": "user", "content": f"what is {n}?"}]
                eos = await client.complete(
                    messages=[system, *new] if n == 0 else new,
                    max_tokens=8, session_id="a", n_keep=9, keep_alive=True, echo=True,
                )  # fmt: skip
                prompt, _, _ = eos.text.rpartition("?")
                shown.append(prompt + "?")
                assert prompt.startswith("be brief|what is"), (
                    "only whole messages are dropped, and never the system message"
                )
                assert [f"what is {n}?"] == shown[-1].split("|")[-1:]
                assert eos.usage.prompt_tokens == len(shown[-1]) <= 400 - 8 + 1
                dropped += bool(eos.usage.dropped_tokens)
                [found] = [each.record for each in harness.service.sessions._table]
                n_messages.append(len(found.messages))
                roles = [message.role for message in found.messages[1:]]
                assert roles == ["user", "assistant"] * (len(roles) // 2), "roles still alternate"
                [file] = (tmp_path / "sessions").glob("*.session")
                sizes.append(file.stat().st_size)
            assert 5 < max(n_messages) < 40
            assert 4 < dropped < 40, "in large steps, so most turns compute only new tokens"
            assert max(sizes) <= SPARE_BYTES
            assert eos.session.turns == n_turns
        found = after_a_crash(tmp_path, tmp_path / "copy")["a"]
        assert len(found.messages) == n_messages[-1]
    with remembering(tmp_path) as storage:
        async with (
            serving(FakeEngine(n_ctx=400), storage=storage, offload=False) as harness,
            harness.client() as client,
        ):
            [session] = harness.service.sessions._table
            assert session.record.messages == found.messages


async def test_without_a_journal_sessions_end_with_the_server(autojump_clock):
    async with serving() as harness:
        said = await run_turns(harness, "a", "hello", " there")
        assert (await query(harness, "describe", session_id="a")).durable is False
        await continue_session(harness, "a", said)
    async with serving() as harness:
        assert await names(harness) == []


@pytest.mark.parametrize("at_end", ["drained", "at once"])
async def test_sessions_go_on_after_a_restart(autojump_clock, tmp_path, at_end):
    said = {}
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, offload_after_s=NEVER) as harness:
            for n in range(4):
                said[f"s{n}"] = await run_turns(harness, f"s{n}", f"{n} is the beginning " * 20, " and then")
            if at_end == "drained":
                await drained(harness)
    with remembering(tmp_path) as storage:
        assert (len(storage.states) == 4) == (at_end == "drained")
        async with serving(storage=storage, offload_after_s=NEVER) as harness:
            assert await names(harness) == ["s3", "s2", "s1", "s0"]
            for name, tokens in said.items():
                found = await query(harness, "describe", session_id=name)
                assert (found.turns, found.tokens, found.durable) == (2, len(tokens), True)
                await continue_session(harness, name, tokens)
            assert harness.server.snapshot()["kv_offload"]["loaded_total"] == len(storage.states)
            await harness.settled()


async def test_turns_of_five_servers_equal_one_long_prompt(autojump_clock, tmp_path):
    said: list[int] = []
    for n in range(5):
        with remembering(tmp_path) as storage:
            async with serving(storage=storage) as harness:
                said = await continue_session(harness, "a", said, f"part {n}")


# -- closing ----------------------------------------------------------------------------------------


async def test_a_closed_session_leaves_nothing(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, offload_after_s=0) as harness:
            for name in ("a", "b"):
                await run_turns(harness, name, f"the story of {name}, which is long enough " * 5, " and then")
            await trio.sleep(10)
            assert len(list((tmp_path / "states").glob("*.state"))) == 2
            found = await query(harness, "close", session_id="a")
            assert found.session_id == "a"
            await trio.sleep(10)
            assert len(list((tmp_path / "states").glob("*.state"))) == 1
            assert [session.key.id for session in storage.journal.load()] == ["b"]
            assert len(cached_tokens(harness)) == 1
            assert await names(harness) == ["b"]
            events = await ask(harness, "a", "the story of a, which is long enough " * 5)
            assert events[-1].usage.cached_tokens < 20, "the prefix that b has too"
            assert events[-1].session.turns == 1
            await harness.settled()


async def test_a_closed_session_that_ended_with_a_stop_string_leaves_nothing(autojump_clock, tmp_path):
    prompt = "the story of a fox, which is long enough " * 5
    stop = str(expected_continuation(tokens_of(prompt), 5)[3])
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, offload_after_s=0) as harness:
            events = await ask(harness, "a", prompt, 20, stop=stop)
            assert events[-1].reason == "stop"
            await query(harness, "close", session_id="a")
            await trio.sleep(10)
            assert cached_tokens(harness) == []
            assert list((tmp_path / "states").glob("*.state")) == []


async def test_closing_keeps_what_a_fork_needs(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, offload_after_s=0) as harness:
            said = await run_turns(harness, "a", "the story of a fox, which is long enough " * 5)
            await query(harness, "fork", session_id="a", new_id="b")
            await query(harness, "close", session_id="a")
            await trio.sleep(10)
            events = await ask(harness, "b", "on")
            assert events[-1].usage.cached_tokens == len(said) - 1
            await query(harness, "close", session_id="b")
            await trio.sleep(10)
            assert cached_tokens(harness) == []
            assert list((tmp_path / "states").glob("*.state")) == []


async def test_the_name_of_a_closed_session_can_be_used_again(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            for text in ("hello", "again", "once more"):
                said = await run_turns(harness, "a", text)
                if text != "once more":
                    await query(harness, "close", session_id="a")
            assert after_a_crash(tmp_path, tmp_path / "copy")["a"].tokens.tolist() == said


async def test_the_least_recently_used_sessions_are_closed_if_there_are_too_many(autojump_clock, tmp_path):
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, max_stored_sessions=3) as harness:
            for n in range(3):
                await run_turns(harness, f"s{n}", f"hello {n}")
            await continue_session(
                harness, "s0", [*tokens_of("hello 0"), *expected_continuation(tokens_of("hello 0"), 5)]
            )
            said = await run_turns(harness, "s3", "hello 3")
            await trio.sleep(61)
            assert await names(harness) == ["s3", "s0", "s2"]
            await continue_session(harness, "s3", said)
            assert set(after_a_crash(tmp_path, tmp_path / "copy")) == {"s0", "s2", "s3"}


async def test_sessions_expire_unless_they_are_busy(autojump_clock, monkeypatch):
    monkeypatch.setattr("uma_trio.daemon.sessions.sessions.SWEEP_S", 1.0)
    slow = FakeEngine(cost_ms=lambda prompt, decodes: 1000.0)
    async with serving(slow, session_ttl_s=5, request_timeout_s=1000) as harness:
        await run_turns(harness, "a", "hello", n=2)
        events = await ask(harness, "b", "hello", 20)
        assert events[-1].reason == "length"
        assert await names(harness) == ["b"]
        await trio.sleep(10)
        assert await names(harness) == []


@pytest.mark.parametrize("years", [-10, 10])
async def test_nothing_expires_when_somebody_sets_the_clock(autojump_clock, tmp_path, monkeypatch, years):
    """The clock is wrong at the start of some machines, and jumps when the network answers."""
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            await run_turns(harness, "before the start", "hello")
            await drained(harness)
    with remembering(tmp_path) as storage:
        async with serving(storage=storage) as harness:
            await run_turns(harness, "since the start", "hello")
            set_to = time.time() + years * 365 * 86400
            monkeypatch.setattr(time, "time", lambda: set_to)
            await trio.sleep(2 * SWEEP_S)
            assert await names(harness) == ["since the start", "before the start"]
            assert 0 <= harness.server.snapshot()["uptime_s"] < 1000


async def test_a_session_that_is_used_while_others_expire_stays(autojump_clock, tmp_path, monkeypatch):
    """On a slow disk, closing takes time.  A session that had expired when it began may be in use by now."""
    closing, go_on = trio.Event(), trio.Event()

    async def slow_disk(call, *arguments):
        if getattr(call, "__name__", "") == "remove" and not closing.is_set():
            closing.set()
            await go_on.wait()
        return await at_once(call, *arguments)

    monkeypatch.setattr("uma_trio.daemon.sessions.sessions.SWEEP_S", 10.0)
    with remembering(tmp_path) as storage:
        async with serving(storage=storage, in_thread=slow_disk, session_ttl_s=5, offload=False) as harness:
            await run_turns(harness, "a", "hello")
            said = await run_turns(harness, "b", "hello")
            await closing.wait()
            async with harness.client() as client:
                await client.send({"id": "r", "prompt": "go on", "max_tokens": 300, "session_id": "b"})
                assert isinstance(await client.receive(), Token)
                go_on.set()
                while not isinstance(event := await client.receive(), Eos):
                    pass
                assert event.session.turns == 2
            assert await names(harness) == ["b"]
            said += tokens_of("go on")
            await continue_session(harness, "b", [*said, *expected_continuation(said, 300)])
