"""What is decided about sessions without doing anything: who is forgotten, what fits, what can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.config import Limits
from uma_trio.engine.records import ModelFacts
from uma_trio.errors import BadRequest, SessionBusy, SessionExists, SessionNotFound
from uma_trio.models.prompt import Prompt
from uma_trio.protocol.messages import ChatMessage, Generate, SessionQuery, parse
from uma_trio.runner.admission import fitted
from uma_trio.sessions import Book, Session
from uma_trio.sessions.forgetting import without_oldest

# -- the book ---------------------------------------------------------------------------------------


def told(book: Book, name: str, at: float, *, tenant: int = 1) -> Session:
    session = book.begin(tenant, name, at)
    session.tokens = np.append(session.tokens, np.int32(len(name)))
    book.told(session, at)
    book.end(session)
    return session


def test_the_longest_unused_go_and_never_one_that_answers() -> None:
    book = Book(most=2, ttl_s=1000)
    for at, name in enumerate("abcd"):
        told(book, name, at)
    told(book, "a", 10)
    book.begin(1, "b", 11)
    assert [session.name for session in book.outdated(12)] == ["c", "d"]
    assert [session.name for session in book.of(1)] == ["a", "d", "c", "b"]
    assert book.of(2) == []


def test_those_unused_for_too_long_go() -> None:
    book = Book(most=10, ttl_s=5)
    told(book, "old", 0)
    told(book, "new", 4)
    assert book.outdated(5) == []
    assert [session.name for session in book.outdated(5.1)] == ["old"]


def test_one_at_a_time_and_each_users_own() -> None:
    book = Book(most=10, ttl_s=5)
    book.begin(1, "a", 0)
    with pytest.raises(SessionBusy):
        book.begin(1, "a", 0)
    other = book.begin(2, "a", 0)
    with pytest.raises(SessionBusy):
        book.remove(other)
    book.end(other)
    with pytest.raises(SessionNotFound):
        book.get(2, "a")


def test_a_fork_needs_something_said_and_a_free_name() -> None:
    book = Book(most=10, ttl_s=5)
    begun = book.begin(1, "begun", 0)
    with pytest.raises(SessionNotFound):
        book.fork(1, "begun", "b", 0)
    book.end(begun)
    source = told(book, "a", 0)
    forked = book.fork(1, "a", "b", 1)
    assert forked.tokens is source.tokens
    assert not forked.durable
    with pytest.raises(SessionExists):
        book.fork(1, "a", "b", 1)
    assert book.needs(source.tokens, tenant=1)
    assert not book.needs(source.tokens, tenant=2)


# -- n_keep -----------------------------------------------------------------------------------------

WINDOW = 100


def facts() -> ModelFacts:
    return ModelFacts(
        name="m", description="", n_vocab=10, n_ctx=WINDOW, n_ctx_seq=WINDOW, n_ctx_train=1000, n_batch=32, n_seq_max=1,
        eog_ids=(0,), size_bytes=1, n_params=1,
    )  # fmt: skip


def fit(n: int, n_keep: int | None, max_tokens: int) -> Prompt:
    request = Generate(id="r", prompt="x", max_tokens=max_tokens, n_keep=n_keep)
    return fitted(Prompt(np.arange(n, dtype=np.int32), "x"), request, facts(), Limits())


@given(st.integers(1, 1000), st.integers(0, 90), st.integers(1, WINDOW))
def test_what_does_not_fit_loses_its_middle(n: int, n_keep: int, max_tokens: int) -> None:
    prompt = fit(n, n_keep, max_tokens)
    room = WINDOW - max_tokens + 1
    assert len(prompt.tokens) + prompt.dropped == n
    if prompt.dropped:
        assert n_keep < len(prompt.tokens) <= room
        assert prompt.tokens[:n_keep].tolist() == list(range(n_keep))
        assert prompt.tokens[n_keep:].tolist() == list(range(n_keep + prompt.dropped, n)), "the newest stay"
    else:
        assert n <= room or room - n_keep < 2


@given(st.integers(0, 50), st.integers(1, 20))
def test_while_a_chat_grows_what_is_dropped_stays_the_same_for_many_turns(n_keep: int, max_tokens: int) -> None:
    drops = [fit(n, n_keep, max_tokens).dropped for n in range(1, 600)]
    step = (WINDOW - max_tokens + 1 - n_keep) // 2
    assert drops == sorted(drops)
    assert all(dropped % step == 0 for dropped in drops)
    assert len(set(drops)) <= 1 + -(-600 // step)


def test_without_n_keep_nothing_is_dropped() -> None:
    assert fit(1000, None, 10).dropped == 0


# -- which messages go ------------------------------------------------------------------------------

TEXTS = st.text(max_size=30)


@st.composite
def chats(draw: st.DrawFn) -> list[ChatMessage]:
    """Turns of user and assistant, perhaps behind a system message; roles in any order now and then."""
    roles = draw(
        st.integers(0, 12).map(lambda n: ["user", "assistant"] * n)
        | st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=12)
    )
    first = ["system"] if draw(st.booleans()) else []
    given: Any = [*first, *roles]
    return [ChatMessage(role=role, content=draw(TEXTS)) for role in given]


def size(messages: Sequence[ChatMessage]) -> int:
    """Tokens, in a model that has one for each byte and one for each message."""
    return sum(1 + len(message.content.encode()) for message in messages)


@given(chats(), TEXTS, st.integers(0, 100), st.integers(1, 500))
def test_the_oldest_messages_go_and_roles_still_take_turns(
    before: list[ChatMessage], asked: str, n_keep: int, n_drop: int
) -> None:
    new = [ChatMessage(role="user", content=asked)]
    left = without_oldest(before, new, n_tokens=size([*before, *new]), n_keep=n_keep, n_drop=n_drop)
    gone, after = len(before) - len(left), [*left, *new]
    gaps = [n for n in range(len(left) + 1) if [*left] == [*before[:n], *before[n + gone :]]]
    assert gaps, "only one piece goes"
    if gone:
        assert any(after[gap].role == before[gap].role for gap in gaps)
        assert before[0].role != "system" or left[0] == before[0]
    for n, message in enumerate(before):
        if size(before[:n]) >= n_keep:
            break
        assert left[n] == message, "what begins in the first tokens stays"
    if size(before) - size(left) < n_drop:
        again = without_oldest(left, new, n_tokens=size(after), n_keep=n_keep, n_drop=n_drop)
        assert again == left, "no more can go"


def test_no_more_messages_go_than_must() -> None:
    roles: Any = ("user", "assistant") * 5
    before = [ChatMessage(role=role, content=f"message {n}") for n, role in enumerate(roles)]
    new = [ChatMessage(role="user", content="message x")]
    for n_keep, n_drop, first, end in (
        *((0, 1, 0, 2), (0, 20, 0, 2), (0, 21, 0, 4), (0, 999, 0, 10)),
        *((1, 1, 1, 3), (10, 40, 1, 5), (11, 1, 2, 4), (11, 999, 2, 10)),
    ):
        left = without_oldest(before, new, n_tokens=110, n_keep=n_keep, n_drop=n_drop)
        assert list(left) == before[:first] + before[end:], (n_keep, n_drop)


# -- what can be asked ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "list"},
        {"action": "describe", "session_id": "a"},
        {"action": "close", "session_id": "a", "id": "q", "keep_alive": True},
        {"action": "fork", "session_id": "a" * 256, "new_id": "b"},
    ],
)
def test_queries_about_sessions(fields: dict[str, object]) -> None:
    assert parse({"type": "sessions", **fields}) == SessionQuery(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "list", "session_id": "a"},
        {"action": "describe"},
        {"action": "close", "session_id": ""},
        {"action": "close", "session_id": "a" * 257},
        {"action": "close", "session_id": "a", "new_id": "b"},
        {"action": "fork", "session_id": "a"},
        {"action": "fork", "new_id": "a"},
        {"action": "forget", "session_id": "a"},
        {"action": "describe", "session_id": 7},
    ],
)
def test_queries_that_make_no_sense_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        parse({"type": "sessions", **fields})
