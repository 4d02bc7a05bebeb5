"""The pure parts of sessions: which ones expire, what fits into the context, which queries are valid."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import all_cases
from uma_trio.config import Limits
from uma_trio.daemon.prompts.prompt import Prompt, fit_prompt
from uma_trio.daemon.sessions import Session, SessionTable
from uma_trio.daemon.sessions.table import MESSAGE_CHARS, PART_CHARS, transcript
from uma_trio.daemon.sessions.titles import own_title
from uma_trio.daemon.sessions.trimming import drop_oldest
from uma_trio.daemon.store.journal_format import SessionKey
from uma_trio.engine_link.messages import ModelInfo
from uma_trio.errors import BadRequest, SessionBusy, SessionExists, SessionNotFound
from uma_trio.protocol.answers import SessionInfo
from uma_trio.protocol.chat import ChatMessage, ContentPart
from uma_trio.protocol.messages import parse
from uma_trio.protocol.queries import SessionQuery
from uma_trio.protocol.requests import Generate

# -- the table --------------------------------------------------------------------------------------

ALICE, BOB = "uid:1", "uid:2"
NEW_YEAR = 1.75e9
"""The other clock is elsewhere: none of this may depend on their difference."""


def answered(table: SessionTable, name: str, at: float, *, principal: str = ALICE) -> Session:
    """The session ``name`` with one more turn."""
    session = table.begin(SessionKey(principal, name), at)
    tokens = np.append(session.record.tokens, np.int32(len(name)))
    table.record_turn(session, NEW_YEAR + at, at, tokens=tokens)
    table.end(session)
    return session


def test_the_least_recently_used_sessions_expire_and_a_busy_one_never() -> None:
    table = SessionTable(max_sessions=2, ttl_s=1000)
    for at, name in enumerate("abcd"):
        answered(table, name, at)
    answered(table, "a", 10)
    table.begin(SessionKey(ALICE, "b"), 11)
    assert [session.record.key.id for session in table.expired(12)] == ["c", "d"]
    assert [session.record.key.id for session in table.of(ALICE)] == ["a", "d", "c", "b"]
    assert table.of(BOB) == []


FILE = "n.txt:\n\n````\nMia ``` is\n````"


@all_cases(
    ("question", "title"),
    [
        ("", ""),
        (FILE, "n.txt"),
        (f"{FILE}\n\n{FILE}\n\nWho is Mia?", "Who is Mia?"),
        ("n.txt:\n\n```\nMia", "n.txt: Mia"),
        ("# Of **bold** words\n\n- `a`, 2*3*4 and __init__", "Of bold words a, 2*3*4 and __init__"),
        ("Why?\n```py\nx = 1\n```", "Why? x = 1"),
        ("word " * 100, ("word " * 16).strip()),
        ("Who\x1b[2J is\x9b Mia?", "Who [2J is Mia?"),
    ],
)
def test_a_title_is_the_first_words_of_a_question(question: str, title: str) -> None:
    system = ChatMessage(role="system", content="Be brief.")
    assert own_title([system, ChatMessage(role="user", content=question)]) == title


def test_many_sessions_of_one_principal_do_not_displace_those_of_another() -> None:
    table = SessionTable(max_sessions=4, ttl_s=1000)
    for at, name in enumerate("ab"):
        answered(table, name, at, principal=BOB)
    for at, name in enumerate("cdefgh"):
        answered(table, name, 10 + at)
    assert [session.record.key.id for session in table.expired(20)] == ["c", "d", "e", "f"]


def test_sessions_that_are_unused_for_too_long_expire() -> None:
    table = SessionTable(max_sessions=10, ttl_s=5)
    answered(table, "old", 0)
    answered(table, "new", 4)
    assert table.expired(5) == []
    assert [session.record.key.id for session in table.expired(5.1)] == ["old"]


@all_cases(("used_ago", "expires_in"), [(0, 5), (4, 1), (-1e8, 5)])
def test_how_long_a_session_was_unused_at_the_start_of_the_daemon_counts(used_ago: float, expires_in: float) -> None:
    table = SessionTable(max_sessions=10, ttl_s=5)
    record = attrs.evolve(answered(table, "a", 0).record, used_at=NEW_YEAR - used_ago)
    restarted = SessionTable(max_sessions=10, ttl_s=5)
    restarted.add(Session.stored(record, NEW_YEAR, 100))
    assert restarted.expired(100 + expires_in) == []
    assert len(restarted.expired(100.1 + expires_in)) == 1


def test_one_request_at_a_time_and_names_belong_to_their_principal() -> None:
    table = SessionTable(max_sessions=10, ttl_s=5)
    table.begin(SessionKey(ALICE, "a"), 0)
    with pytest.raises(SessionBusy):
        table.begin(SessionKey(ALICE, "a"), 0)
    other = table.begin(SessionKey(BOB, "a"), 0)
    with pytest.raises(SessionBusy):
        table.remove(other)
    table.end(other)
    with pytest.raises(SessionNotFound):
        table.get(SessionKey(BOB, "a"))


def test_a_fork_needs_a_session_with_turns_and_a_free_name() -> None:
    table = SessionTable(max_sessions=10, ttl_s=5)
    begun = table.begin(SessionKey(ALICE, "begun"), 0)
    with pytest.raises(SessionNotFound):
        table.fork(begun, SessionKey(ALICE, "b"), 0, 0)
    table.end(begun)
    source = answered(table, "a", 0)
    forked = table.fork(source, SessionKey(ALICE, "b"), 1, 1)
    assert forked.record.tokens is source.record.tokens
    assert not forked.durable
    with pytest.raises(SessionExists):
        table.fork(source, SessionKey(ALICE, "b"), 1, 1)
    assert table.any_begins_with(source.record.tokens, principal=ALICE)
    assert not table.any_begins_with(source.record.tokens, principal=BOB)


# -- n_keep -----------------------------------------------------------------------------------------

WINDOW = 100


def info() -> ModelInfo:
    return ModelInfo(
        name="m", description="", n_vocab=10, n_ctx=WINDOW, n_ctx_seq=WINDOW, n_ctx_train=1000, n_batch=32, n_seq_max=1,
        eog_ids=(0,), size_bytes=1, n_params=1,
    )  # fmt: skip


def fit(n: int, n_keep: int | None, max_tokens: int) -> Prompt:
    request = Generate(id="r", prompt="x", max_tokens=max_tokens, n_keep=n_keep)
    return fit_prompt(Prompt(np.arange(n, dtype=np.int32), "x"), request, info(), Limits())


@given(st.integers(1, 1000), st.integers(0, 90), st.integers(1, WINDOW))
def test_a_prompt_that_does_not_fit_loses_its_middle(n: int, n_keep: int, max_tokens: int) -> None:
    prompt = fit(n, n_keep, max_tokens)
    room = WINDOW - max_tokens + 1
    assert len(prompt.tokens) + prompt.dropped == n
    if prompt.dropped:
        assert n_keep < len(prompt.tokens) <= room
        assert prompt.tokens[:n_keep].tolist() == list(range(n_keep))
        assert prompt.tokens[n_keep:].tolist() == list(range(n_keep + prompt.dropped, n)), "the newest tokens stay"
    else:
        assert n <= room or room - n_keep < 2


@given(st.integers(0, 50), st.integers(1, 20))
def test_the_dropped_part_stays_the_same_for_many_turns(n_keep: int, max_tokens: int) -> None:
    drops = [fit(n, n_keep, max_tokens).dropped for n in range(1, 600)]
    step = (WINDOW - max_tokens + 1 - n_keep) // 2
    assert drops == sorted(drops)
    assert all(dropped % step == 0 for dropped in drops)
    assert len(set(drops)) <= 1 + -(-600 // step)


def test_without_n_keep_nothing_is_dropped() -> None:
    assert fit(1000, None, 10).dropped == 0


# -- dropped messages --------------------------------------------------------------------------------

TEXTS = st.text(max_size=30)


@st.composite
def chats(draw: st.DrawFn) -> list[ChatMessage]:
    """Chats of user and assistant, some with a system message first, some with roles in any order."""
    roles = draw(
        st.integers(0, 12).map(lambda n: ["user", "assistant"] * n)
        | st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=12)
    )
    first = ["system"] if draw(st.booleans()) else []
    given: Any = [*first, *roles]
    return [ChatMessage(role=role, content=draw(TEXTS)) for role in given]


def size(messages: Sequence[ChatMessage]) -> int:
    """Tokens of a model that has one for each byte and one for each message."""
    return sum(1 + len(message.content.encode()) for message in messages)


@given(chats(), TEXTS, st.integers(0, 100), st.integers(1, 500))
def test_the_oldest_messages_are_dropped_and_roles_still_take_turns(
    before: list[ChatMessage], asked: str, n_keep: int, n_drop: int
) -> None:
    new = [ChatMessage(role="user", content=asked)]
    left = drop_oldest(before, new, n_tokens=size([*before, *new]), n_keep=n_keep, n_drop=n_drop)
    gone, after = len(before) - len(left), [*left, *new]
    gaps = [n for n in range(len(left) + 1) if [*left] == [*before[:n], *before[n + gone :]]]
    assert gaps, "the dropped messages are consecutive"
    if gone:
        assert any(after[gap].role == before[gap].role for gap in gaps)
        assert before[0].role != "system" or left[0] == before[0]
    for n, message in enumerate(before):
        if size(before[:n]) >= n_keep:
            break
        assert left[n] == message, "messages that begin in the first tokens stay"
    if size(before) - size(left) < n_drop:
        again = drop_oldest(left, new, n_tokens=size(after), n_keep=n_keep, n_drop=n_drop)
        assert again == left, "no more messages can be dropped"


def test_no_more_messages_are_dropped_than_needed() -> None:
    roles: Any = ("user", "assistant") * 5
    before = [ChatMessage(role=role, content=f"message {n}") for n, role in enumerate(roles)]
    new = [ChatMessage(role="user", content="message x")]
    for n_keep, n_drop, first, end in (
        *((0, 1, 0, 2), (0, 20, 0, 2), (0, 21, 0, 4), (0, 999, 0, 10)),
        *((1, 1, 1, 3), (10, 40, 1, 5), (11, 1, 2, 4), (11, 999, 2, 10)),
    ):
        left = drop_oldest(before, new, n_tokens=110, n_keep=n_keep, n_drop=n_drop)
        assert list(left) == before[:first] + before[end:], (n_keep, n_drop)


# -- transcripts ------------------------------------------------------------------------------------

INFO = SessionInfo(session_id="a", turns=1, tokens=9, durable=True)


@given(st.lists(st.integers(0, 3 * PART_CHARS), max_size=12), st.integers(0, 3000))
def test_a_transcript_has_all_messages_in_parts_of_bounded_size(sizes: list[int], n_short: int) -> None:
    messages = [ChatMessage(role="user", content="x" * n) for n in [*sizes, *[0] * n_short]]
    parts = [*transcript(INFO, messages, None, "q")]
    assert [message for part in parts for message in part.messages] == messages
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert {(part.session.session_id, part.id, part.text) for part in parts} == {("a", "q", None)}
    for part in parts:
        n_chars = sum(len(message.content) for message in part.messages)
        assert len(part.messages) == 1 or n_chars + MESSAGE_CHARS * len(part.messages) <= PART_CHARS
    for one, other in itertools.pairwise(parts):  # no more parts than needed
        both = [*one.messages, other.messages[0]]
        assert sum(len(message.content) for message in both) + MESSAGE_CHARS * len(both) > PART_CHARS


def test_pictures_count_for_the_size_of_a_part() -> None:
    picture = ContentPart(type="image", data=bytes(PART_CHARS // 2))
    parts = [*transcript(INFO, [ChatMessage(role="user", content=[picture])] * 3, None, "q")]
    assert [len(part.messages or ()) for part in parts] == [1, 1, 1]


@all_cases("n", [0, 1, PART_CHARS, PART_CHARS + 1, 3 * PART_CHARS])
def test_a_transcript_has_the_whole_text_in_parts_of_bounded_size(n: int) -> None:
    text = "".join(chr(65 + i % 26) for i in range(n))
    parts = [*transcript(INFO, (), text, None)]
    assert "".join(part.text or "" for part in parts) == text
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert len(parts) == max(1, -(-n // PART_CHARS))
    assert all(part.text is not None and len(part.text) <= PART_CHARS for part in parts)


# -- queries ----------------------------------------------------------------------------------------


@all_cases(
    "fields",
    [
        {"action": "list"},
        {"action": "list", "model": "m"},
        {"action": "describe", "session_id": "a"},
        {"action": "read", "session_id": "a"},
        {"action": "close", "session_id": "a", "id": "q", "keep_alive": True},
        {"action": "fork", "session_id": "a" * 256, "new_id": "b"},
        {"action": "list", "contains": "x" * 256},
        {"action": "rename", "session_id": "a", "title": ""},
    ],
)
def test_valid_queries(fields: dict[str, object]) -> None:
    assert parse({"type": "sessions", **fields}) == SessionQuery(**fields)  # type: ignore[arg-type]


@all_cases(
    "fields",
    [
        {"action": "list", "session_id": "a"},
        {"action": "describe"},
        {"action": "read"},
        {"action": "read", "session_id": "a", "new_id": "b"},
        {"action": "close", "session_id": ""},
        {"action": "close", "session_id": "a" * 257},
        {"action": "close", "session_id": "a", "new_id": "b"},
        {"action": "fork", "session_id": "a"},
        {"action": "fork", "new_id": "a"},
        {"action": "rename", "session_id": "a"},
        {"action": "rename", "title": "a"},
        {"action": "rename", "session_id": "a", "title": "x" * 257},
        {"action": "read", "session_id": "a", "title": "x"},
        {"action": "read", "session_id": "a", "contains": "x"},
        {"action": "list", "contains": "x" * 257},
        {"action": "forget", "session_id": "a"},
        {"action": "describe", "session_id": 7},
    ],
)
def test_invalid_queries_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        parse({"type": "sessions", **fields})
