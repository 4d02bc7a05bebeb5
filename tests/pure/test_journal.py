"""Sessions in files: after any turns, cuts, failures and restarts they are what they should be, or are not believed."""

from __future__ import annotations

import os
import stat
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.protocol.messages import ChatMessage
from uma_trio.store import Journal, JournalError, SessionKey, SessionRecord, Turn
from uma_trio.store import journal_format as form
from uma_trio.store.journal import UNSURE
from uma_trio.store.journal_format import (
    MARK,
    MAX_MESSAGES,
    SPARE_BYTES,
    TURN,
    TURN_KIND,
    WASTE,
    Damaged,
    Extent,
    Foreign,
    Header,
    Session,
    decode,
    encode_header,
    encode_session,
    encode_turn,
)
from uma_trio.store.tokens import MAX_TOKEN_ID, MAX_TOKENS

KEY = SessionKey(1000, "a")
MODEL = "a model"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


def opened(path: Path, **changes: Any) -> Journal:
    settings: dict[str, Any] = {"model": MODEL, "max_sessions": 8} | changes
    return Journal(path, **settings)


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    found = opened(path)
    assert found.load() == []
    yield found
    found.close()


def turn(keep: int = 0, tokens: Any = (), *texts: str, keep_messages: int | None = None, when: float = 1.0) -> Turn:
    messages = [ChatMessage(role="user", content=text) for text in texts]
    return Turn(keep=keep, tokens=np.array(tokens, np.int32), keep_messages=keep_messages, messages=messages, when=when)


def plain(session: SessionRecord) -> tuple[list[int], list[str]]:
    return session.tokens.tolist(), [message.content for message in session.messages]


def reloaded(path: Path, journal: Journal, **changes: Any) -> tuple[Journal, dict[SessionKey, SessionRecord]]:
    """After a restart."""
    journal.close()
    again = opened(path, **changes)
    return again, {session.key: session for session in again.load()}


def file_of(path: Path) -> Path:
    [file] = path.glob("*.session")
    return file


# -- there and back -----------------------------------------------------------------------------------

TURNS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.lists(st.integers(0, MAX_TOKEN_ID), max_size=20),
        st.none() | st.floats(0, 1),
        st.lists(st.text(max_size=10), max_size=3),
        st.floats(0, 1e10),
    ),
    max_size=8,
)
"""Each: share of the tokens that stay, new ones, share of the messages that stay, new ones, when."""


@given(TURNS, st.integers(-(2**63), 2**63 - 1), st.text(min_size=1, max_size=256), st.integers(0, 8))
def test_a_session_is_what_its_turns_have_made_it(
    tmp_path_factory: pytest.TempPathFactory, turns: Any, tenant: int, name: str, rewritten: int
) -> None:
    path, key = tmp_path_factory.mktemp("j"), SessionKey(tenant, name)
    tokens: list[int] = []
    texts: list[str] = []
    journal = opened(path)
    journal.create(key, 5.0)
    for i, (stays, new, messages_stay, said, when) in enumerate(turns):
        keep = int(stays * len(tokens))
        keep_messages = None if messages_stay is None else int(messages_stay * len(texts))
        journal.append(key, turn(keep, new, *said, keep_messages=keep_messages, when=when))
        tokens, texts = tokens[:keep] + new, texts[:keep_messages] + said
        if i == rewritten:
            journal.rewrite(key)
    forked = journal.fork(key, "f" if name != "f" else "g")
    assert plain(forked) == (tokens, texts)
    journal, found = reloaded(path, journal)
    assert journal.problems == []
    assert set(found) == {key, forked.key}
    for session in found.values():
        assert plain(session) == (tokens, texts)
        assert session.n_turns == len(turns)
    assert found[key].created_at == 5.0
    assert found[key].last_used_at == (turns[-1][-1] if turns else 5.0)
    assert forked.created_at == found[forked.key].created_at
    journal.close()


def test_a_session_begins_with_its_first_turn(path: Path, journal: Journal) -> None:
    journal.append(KEY, turn(0, [1, 2], "hello", when=7.0))
    assert KEY in journal
    assert len(journal) == 1
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2], ["hello"])
    assert (found[KEY].created_at, found[KEY].n_turns) == (7.0, 1)
    journal.close()


def test_the_longest_unused_come_first(path: Path, journal: Journal) -> None:
    for name, when in (("x", 3.0), ("y", 1.0), ("z", 2.0)):
        journal.append(SessionKey(1, name), turn(0, [1], when=when))
    journal.append(SessionKey(1, "y"), turn(1, [1], when=9.0))
    _, found = reloaded(path, journal)
    assert [key.id for key in found] == ["z", "x", "y"]


def test_ids_are_each_tenants_own_and_never_file_names(path: Path, journal: Journal) -> None:
    names = ["a", "A", "../../etc/passwd", "/", ".", "..", "\0", "a\n", "é", "e\u0301", "🦊" * 256, "x.session"]
    keys = [SessionKey(tenant, name) for name in names for tenant in (0, -1)]
    journal.max_sessions = len(keys)
    for i, key in enumerate(keys):
        journal.append(key, turn(0, [i]))
    journal, found = reloaded(path, journal, max_sessions=len(keys))
    assert {key: session.tokens.tolist() for key, session in found.items()} == {key: [i] for i, key in enumerate(keys)}
    assert all(len(file.name) == 32 + len(".session") for file in path.glob("*.session"))
    assert {file.parent for file in path.parent.rglob("*.session")} == {path}
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    journal.close()


@pytest.mark.parametrize("name", ["", "x" * 257, "\ud800"])
def test_ids_have_bounds(path: Path, journal: Journal, name: str) -> None:
    journal.append(KEY, turn(0, [1]))
    for make in (
        lambda: journal.create(SessionKey(1, name), 1.0),
        lambda: journal.append(SessionKey(1, name), turn(0, [1])),
        lambda: journal.fork(KEY, name),
    ):
        with pytest.raises(JournalError, match=r"cannot be kept|utf-8"):
            make()
    assert len(journal) == len(list(path.glob("*.session"))) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        turn(3, [1]),
        turn(-1, [1]),
        turn(0, [-1]),
        turn(0, [MAX_TOKEN_ID + 1]),
        turn(0, [[1]]),
        turn(0, [1], keep_messages=2),
        turn(0, [1], keep_messages=-1),
        turn(0, [1], "\ud800"),
        turn(0, [1], when=float("nan")),
        turn(0, [1], *["x"] * (MAX_MESSAGES + 1)),
        turn(0, [1], "x" * (1 << 24)),
        turn(0, np.zeros(MAX_TOKENS + 1)),
        turn(2, np.zeros(MAX_TOKENS - 1)),
        Turn(keep=0, tokens=[0.5], when=1.0),
        Turn(keep=True, tokens=[1], when=1.0),
        Turn(keep=0, tokens=[1], messages=[ChatMessage(role="nobody", content="x")], when=1.0),  # type: ignore[arg-type]
    ],
)
def test_a_turn_that_does_not_fit_changes_nothing(path: Path, journal: Journal, wrong: Turn) -> None:
    journal.append(KEY, turn(0, [1, 2], "first"))
    before = file_of(path).read_bytes()
    with pytest.raises(JournalError):
        journal.append(KEY, wrong)
    with pytest.raises(JournalError):
        journal.append(SessionKey(1, "new"), wrong)
    assert file_of(path).read_bytes() == before
    journal.append(KEY, turn(2, [3], "second"))
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2, 3], ["first", "second"])


def test_there_are_at_most_so_many(path: Path, journal: Journal) -> None:
    for i in range(8):
        journal.append(SessionKey(1, str(i)), turn(0, [i], when=float(i)))
        os.utime(max(path.glob("*.session"), key=lambda file: file.stat().st_mtime_ns), (i, i))
    for more in (
        lambda: journal.create(KEY, 1.0),
        lambda: journal.append(KEY, turn()),
        lambda: journal.fork(SessionKey(1, "0"), "9"),
    ):
        with pytest.raises(JournalError, match="the most"):
            more()
    journal.append(SessionKey(1, "0"), turn(0, [0], when=50.0))
    journal, found = reloaded(path, journal, max_sessions=3)
    assert [key.id for key in found] == ["6", "7", "0"], "those used last"
    assert len(journal.problems) == 5
    journal, found = reloaded(path, journal)
    assert len(found) == 8
    journal.remove(SessionKey(1, "3"))
    journal.create(KEY, 1.0)
    journal.close()


def test_what_is_there_is_not_made_and_what_is_not_is_not_changed(journal: Journal) -> None:
    journal.append(KEY, turn(0, [1]))
    for use in (lambda: journal.create(KEY, 1.0), lambda: journal.fork(KEY, KEY.id)):
        with pytest.raises(JournalError, match="already"):
            use()
    other = SessionKey(KEY.tenant + 1, KEY.id)
    for use in (lambda: journal.rewrite(other), lambda: journal.remove(other), lambda: journal.fork(other, "b")):
        with pytest.raises(JournalError, match="no session"):
            use()


def test_a_removed_session_is_gone(path: Path, journal: Journal) -> None:
    journal.append(KEY, turn(0, [1]))
    journal.remove(KEY)
    assert KEY not in journal
    assert journal.used_bytes == 0
    assert {file.name for file in path.iterdir()} == {"lock"}
    journal.append(KEY, turn(0, [2]))
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([2], [])


def test_a_fork_and_its_origin_go_their_own_ways(path: Path, journal: Journal) -> None:
    journal.append(KEY, turn(0, [1, 2], "a"))
    journal.fork(KEY, "b")
    journal.append(KEY, turn(1, [3]))
    journal.append(SessionKey(KEY.tenant, "b"), turn(2, [4], "b"))
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 3], ["a"])
    assert plain(found[SessionKey(KEY.tenant, "b")]) == ([1, 2, 4], ["a", "b"])


def test_files_do_not_grow_with_what_was_replaced(path: Path, journal: Journal) -> None:
    sizes = set()
    for i in range(300):
        journal.append(KEY, turn(min(i, 1) * 10, range(500), f"turn {i}", keep_messages=0))
        sizes.add(file_of(path).stat().st_size)
        assert journal.used_bytes == file_of(path).stat().st_size
    assert max(sizes) <= SPARE_BYTES
    assert max(sizes) > SPARE_BYTES - 5000
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([*range(10), *range(500)], ["turn 299"])
    assert found[KEY].n_turns == 300


def test_files_that_grow_with_what_is_live_are_not_written_anew(path: Path, journal: Journal) -> None:
    for i in range(60):
        journal.append(KEY, turn(1000 * i, np.full(1000, i)))
    assert file_of(path).stat().st_size > 60 * 4000 > SPARE_BYTES
    large = file_of(path).stat().st_ino
    for _ in range(2):
        journal.append(KEY, turn(59_000, np.full(1000, 60)))
    assert file_of(path).stat().st_ino == large
    journal.append(KEY, turn(1000, [5]))
    assert file_of(path).stat().st_size < 2 * 4000 * WASTE
    assert file_of(path).stat().st_ino != large
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([0] * 1000 + [5], [])


def test_turns_of_many_sessions_are_written_side_by_side(path: Path, journal: Journal) -> None:
    def work(number: int) -> None:
        for i in range(30):
            journal.append(SessionKey(number % 3, "shared"), turn(0, [i, number]))
            journal.append(SessionKey(number, "own"), turn(i, [i]))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    journal, found = reloaded(path, journal)
    assert journal.problems == []
    for number in range(4):
        assert found[SessionKey(number, "own")].tokens.tolist() == list(range(30))
    assert [found[SessionKey(tenant, "shared")].n_turns for tenant in range(3)] == [60, 30, 30]
    journal.close()


# -- crashes ------------------------------------------------------------------------------------------


def three_turns(path: Path, journal: Journal) -> tuple[bytes, list[int], list[tuple[list[int], list[str]]]]:
    """A file, where its records end, and what the session is at each of these places."""
    journal.create(KEY, 1.0)
    ends: list[int] = [file_of(path).stat().st_size]
    states: list[tuple[list[int], list[str]]] = [([], [])]
    for i in range(3):
        journal.append(KEY, turn(i, [i, 77], f"m{i}"))
        ends.append(file_of(path).stat().st_size)
        states.append(([*range(i + 1), 77], [f"m{k}" for k in range(i + 1)]))
    return file_of(path).read_bytes(), ends, states


def test_a_file_that_was_cut_anywhere_gives_its_whole_turns(path: Path, journal: Journal) -> None:
    data, ends, states = three_turns(path, journal)
    file = file_of(path)
    for size in range(ends[0], len(data)):
        file.write_bytes(data[:size])
        journal, found = reloaded(path, journal)
        whole = max(i for i, end in enumerate(ends) if end <= size)
        assert plain(found[KEY]) == states[whole]
        assert journal.cut == len(journal.problems) == (size != ends[whole])
        assert file.stat().st_size == ends[whole]
        journal.append(KEY, turn(whole, [5], keep_messages=0))
        journal, found = reloaded(path, journal)
        assert plain(found[KEY]) == ([*states[whole][0][:whole], 5], [])
        assert journal.problems == []
    journal.close()


def test_a_file_whose_header_was_cut_is_set_aside(path: Path, journal: Journal) -> None:
    data, ends, _ = three_turns(path, journal)
    for size in range(0, ends[0], 7):
        (path / file_of(path).name).write_bytes(data[:size])
        journal, found = reloaded(path, journal)
        assert found == {}
        assert journal.set_aside == 1
        assert [file.read_bytes() for file in path.glob("*.bad")] == [data[:size]]
        for file in path.glob("*.bad"):
            file.unlink()
        journal.append(KEY, turn(0, [1]))
    journal.close()


@pytest.mark.parametrize("tail", [bytes(1), bytes(5000), b"\xff" * 300, MARK, MARK * 10, b"UMJ" * 50])
def test_what_follows_the_last_record_is_cut_off(path: Path, journal: Journal, tail: bytes) -> None:
    data, _, states = three_turns(path, journal)
    file_of(path).write_bytes(data + tail)
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == states[-1]
    assert (journal.cut, journal.set_aside) == (1, 0)
    assert journal.problems == [f"{file_of(path).name}: {len(tail)} bytes cut off behind the last whole record"]
    assert file_of(path).read_bytes() == data
    journal.close()


def test_a_flipped_bit_never_makes_another_session(path: Path, journal: Journal) -> None:
    """It is set aside; in the last turn, where half a record is no surprise, that one may be missing."""
    data, ends, states = three_turns(path, journal)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        try:
            session, good = decode(changed, MODEL)
        except Damaged:
            assert at < ends[2], "the end of the file is not to take all with it"
            continue
        assert at >= ends[2]
        assert good == ends[2]
        assert np.frombuffer(session.token_bytes, np.int32).tolist() == states[2][0]
    changed[ends[1] + 30] ^= 1
    file_of(path).write_bytes(changed)
    journal, found = reloaded(path, journal)
    assert found == {}
    assert (journal.cut, journal.set_aside) == (0, 1)
    assert "begins no record" in journal.problems[0]
    assert [file.read_bytes() for file in path.glob("*.bad")] == [bytes(changed)]
    journal.close()


def test_what_a_failed_turn_has_left_is_taken_back_by_the_next(path: Path, journal: Journal) -> None:
    journal.append(KEY, turn(0, [1], "a"))
    with file_of(path).open("ab") as file:
        file.write(encode_turn(form.as_record(turn(1, [9] * 100), 1))[:-3])
    journal.append(KEY, turn(1, [2], "b"))
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2], ["a", "b"])
    assert journal.problems == []
    journal.close()


@pytest.mark.parametrize("written", [False, True])
def test_where_it_is_open_which_file_is_there_it_is_looked_up(path: Path, journal: Journal, written: bool) -> None:
    """As after a rename that was done and could not be made durable, which cannot be brought about here."""
    for i in range(3):
        journal.append(KEY, turn(0, [i], str(i), keep_messages=0))
    if written:
        file_of(path).write_bytes(encode_session(decode(file_of(path).read_bytes(), MODEL)[0]))
    journal._entries[KEY].size = UNSURE
    assert journal.used_bytes == 0
    journal.append(KEY, turn(1, [5], "last"))
    assert journal.used_bytes == file_of(path).stat().st_size
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([2, 5], ["2", "last"])
    assert found[KEY].n_turns == 4
    assert journal.problems == []
    journal.close()


def test_a_file_that_somebody_has_cut_or_taken_away_is_an_error(path: Path, journal: Journal) -> None:
    journal.append(KEY, turn(0, [1], "a"))
    os.truncate(file_of(path), 50)
    for use in (lambda: journal.append(KEY, turn(1, [2])), lambda: journal.rewrite(KEY), lambda: journal.fork(KEY, "b")):
        with pytest.raises(JournalError, match=r"cut off|not what was written"):
            use()
    file_of(path).unlink()
    for use in (lambda: journal.append(KEY, turn(1, [2])), lambda: journal.rewrite(KEY), lambda: journal.fork(KEY, "b")):
        with pytest.raises(JournalError, match="somebody has removed it"):
            use()
    journal.remove(KEY)
    journal.append(KEY, turn(0, [3]))
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([3], [])


def test_half_written_files_are_removed(path: Path, journal: Journal) -> None:
    journal.append(KEY, turn(0, [1]))
    (path / (file_of(path).name + ".tmp")).write_bytes(b"half")
    journal, found = reloaded(path, journal)
    assert list(found) == [KEY]
    assert not list(path.glob("*.tmp"))
    journal.close()


def test_a_closed_journal_answers_with_its_error(journal: Journal) -> None:
    journal.append(KEY, turn(0, [1]))
    journal.close()
    for use in (lambda: journal.load(), lambda: journal.append(KEY, turn(1, [1])), lambda: journal.append(SessionKey(1, "b"), turn())):
        with pytest.raises(JournalError):
            use()


# -- files by others ------------------------------------------------------------------------------------


def test_sessions_of_another_model_are_left_alone(path: Path, journal: Journal) -> None:
    journal.append(KEY, turn(0, [1]))
    journal, found = reloaded(path, journal, model="another")
    assert found == {}
    assert "left alone, it is of another model" in journal.problems[0]
    journal.append(KEY, turn(0, [2]))
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1], [])
    journal, found = reloaded(path, journal, model="another")
    assert plain(found[KEY]) == ([2], [])
    assert journal.set_aside == 0
    journal.close()


def test_a_session_of_a_later_version_is_left_alone(path: Path, journal: Journal) -> None:
    journal.create(KEY, 1.0)
    later = Header(version=form.VERSION + 1, model=MODEL, key=KEY, created_at=1.0)
    file_of(path).write_bytes(encode_header(later))
    journal, found = reloaded(path, journal)
    assert found == {}
    assert "version 2" in journal.problems[0]
    with pytest.raises(JournalError, match="remove it first"):
        journal.create(KEY, 1.0)
    with pytest.raises(JournalError, match="remove it first"):
        journal.append(KEY, turn(0, [1]))
    assert file_of(path).read_bytes() == encode_header(later)
    journal.close()


def test_a_file_under_another_name_is_set_aside(path: Path, journal: Journal) -> None:
    journal.append(KEY, turn(0, [1]))
    file_of(path).rename(path / f"{'0' * 32}.session")
    journal, found = reloaded(path, journal)
    assert found == {}
    assert "another session's file" in journal.problems[0]
    journal.close()


def test_links_pipes_and_strangers_are_left_alone_here_too(path: Path, journal: Journal, tmp_path: Path) -> None:
    journal.append(KEY, turn(0, [1]))
    outside = tmp_path / "outside"
    file_of(path).rename(outside)
    names = {kind: f"{kind * 32}.session" for kind in "abc"}
    (path / names["a"]).symlink_to(outside)
    os.mkfifo(path / names["b"])
    (path / names["c"]).mkdir()
    (path / "README").write_text("a stranger")
    journal, found = reloaded(path, journal)
    assert found == {}
    assert sorted(line.split(":")[0] for line in journal.problems) == sorted([*names.values(), "README"])
    assert journal.set_aside == 0
    journal.close()


def test_two_processes_do_not_share_a_folder(path: Path, journal: Journal) -> None:
    with pytest.raises(JournalError, match="in use by another process"):
        opened(path)
    for model in ("", "x" * 1025):
        with pytest.raises(ValueError, match="characters"):
            opened(path, model=model)


def test_a_file_too_large_to_be_ours_is_not_read(path: Path, journal: Journal) -> None:
    journal.append(KEY, turn(0, [1]))
    os.truncate(file_of(path), 1 << 40)
    tracemalloc.start()
    journal, found = reloaded(path, journal)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
    assert found == {}
    assert "1099511627776 bytes" in journal.problems[0]
    journal.close()


HEADER = encode_header(Header(model=MODEL, key=KEY, created_at=1.0))
WHOLE = HEADER + b"".join(encode_turn(form.as_record(turn(i, [i, 9], "text"), i)) for i in range(3))


def believed(data: bytes) -> None:
    """Nothing but the two errors; what is believed is within bounds."""
    try:
        session, good = decode(data, MODEL)
    except (Damaged, Foreign):
        return
    assert 0 < good <= len(data)
    assert len(session.token_bytes) == 4 * session.extent.n_tokens
    assert len(session.messages) == len(session.extent.sizes)
    assert decode(encode_session(session), MODEL)[0].token_bytes == session.token_bytes


@given(st.binary(max_size=300), st.integers(0, len(WHOLE)), st.integers(0, 3))
def test_whatever_the_bytes_are_they_are_damaged_or_a_session(noise: bytes, at: int, how: int) -> None:
    believed([noise, WHOLE[:at] + noise, WHOLE[:at] + noise + WHOLE[at:], WHOLE[:at] + noise + WHOLE[at + len(noise) :]][how])


COUNTS = st.sampled_from([0, 1, 2, 5, (1 << 24) - 1, 1 << 24, (1 << 31) - 1, (1 << 32) - 1])


@given(COUNTS, COUNTS, COUNTS, st.floats(), st.binary(max_size=40), st.binary(max_size=40) | st.just(b"[]"))
def test_records_with_the_right_codes_are_held_against_bounds(
    keep: int, n_tokens: int, keep_messages: int, when: float, tokens: bytes, text: bytes
) -> None:
    payload = TURN.pack(keep, n_tokens, keep_messages, when) + tokens + text
    believed(HEADER + form._record(TURN_KIND, payload))
    believed(WHOLE + form._record(TURN_KIND, payload))


@pytest.mark.parametrize(
    "records",
    [
        [],
        [form._record(1, b"")],
        [form._record(0, b"")],
        [form._record(0, b"{}")],
        [form._record(0, b'{"version": 1, "more": ' + b"[" * 200_000)],
        [form._record(0, b"[" * 200_000)],
        [HEADER, form._record(1, b"")],
        [HEADER, form._record(2, b"")],
        [HEADER, HEADER],
        [HEADER, form._record(1, TURN.pack(0, 0, 0, 1.0) + b"[" * 200_000)],
        [HEADER, form._record(1, TURN.pack(0, 0, 0, 1.0) + b"\xff\xfe")],
        [HEADER, form._record(1, TURN.pack(0, 0, 0, float("inf")) + b"[]")],
        [HEADER, form._record(1, TURN.pack(0, 1, 0, 1.0) + b"\xff\xff\xff\xff[]")],
        [HEADER, form._record(1, TURN.pack(0, 1, 0, 1.0) + b"[]")],
        [HEADER, form._record(1, TURN.pack(1, 0, 0, 1.0) + b"[]")],
        [HEADER, form._record(1, TURN.pack(0, 0, 1, 1.0) + b"[]")],
        [HEADER, form._record(1, TURN.pack(0, 0, 0, 1.0) + b'[{"role":"nobody","content":""}]')],
    ],
    ids=range(17),
)
def test_records_that_make_no_sense_are_damage(records: list[bytes]) -> None:
    with pytest.raises(Damaged):
        decode(b"".join(records), MODEL)


def test_no_payload_looks_like_a_record() -> None:
    """So what is searched for behind a damaged record is one."""
    tokens = np.frombuffer(MARK * 3 + b"\0" * 4, "<u4") & MAX_TOKEN_ID
    text = "".join(map(chr, range(0xD800))) + MARK.decode("latin-1")
    session = Session(Header(model=MODEL, key=KEY, created_at=1.0), Extent(), 1.0)
    record = form.as_record(turn(0, tokens, text), 0)
    session.apply(record)
    for shift in range(4):
        assert MARK not in (bytes(shift) + record.tokens)[shift:]
    assert encode_session(session).count(MARK) == 2
