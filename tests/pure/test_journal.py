"""Sessions in files: after any turns, cuts, failures and restarts they are what they should be, or are not believed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.crashes import crash_everywhere
from uma_trio.protocol.messages import ChatMessage
from uma_trio.store import Journal, JournalError, SessionKey, SessionRecord, principal_uid, uid_principal
from uma_trio.store import journal_format as form
from uma_trio.store.encoding import MAX_PRINCIPAL_BYTES, MAX_TOKEN_ID, MAX_TOKENS, DamagedFile, ForeignFile
from uma_trio.store.journal import MAX_QUARANTINED, MAX_QUARANTINED_BYTES
from uma_trio.store.journal_format import (
    MARK,
    MAX_MESSAGES,
    MAX_TURNS,
    SPARE_BYTES,
    TURN,
    TURN_KIND,
    WASTE,
    Header,
    decode,
    encode_header,
    encode_turn,
    turn_record,
)

KEY = SessionKey("uid:1000", "a")
MODEL = "a model"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


HEADER = encode_header(Header(model=MODEL, key=KEY, created_at=1.0))


def opened(path: Path, **changes: Any) -> Journal:
    settings: dict[str, Any] = {"model": MODEL, "max_sessions": 8} | changes
    return Journal(path, **settings)


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    found = opened(path)
    assert found.load() == []
    yield found
    found.close()


def said(
    tokens: Any = (), *texts: str, n: int = 1, key: SessionKey = KEY, created: float = 1.0, used: float = 2.0
) -> SessionRecord:
    """A session in which so much was said in ``n`` turns."""
    return SessionRecord(
        key=key,
        created_at=created,
        used_at=used,
        n_turns=n,
        tokens=np.array(tokens, np.int32),
        messages=tuple(ChatMessage(role="user", content=text) for text in texts),
    )


def plain(session: SessionRecord) -> tuple[list[int], list[str]]:
    return session.tokens.tolist(), [message.content for message in session.messages]


def reloaded(path: Path, journal: Journal, **changes: Any) -> tuple[Journal, dict[SessionKey, SessionRecord]]:
    """After a restart."""
    journal.close()
    again = opened(path, **changes)
    return again, {session.key: session for session in again.load()}


def facts(session: SessionRecord) -> tuple[float, float, int]:
    return session.created_at, session.used_at, session.n_turns


def aside(path: Path) -> list[bytes]:
    """What was set aside, the oldest first."""
    return [file.read_bytes() for file in sorted(path.glob("*.bad"), key=lambda file: file.stat().st_mtime_ns)]


def file_of(path: Path) -> Path:
    [file] = path.glob("*.session")
    return file


def turns_of(*sessions: SessionRecord) -> bytes:
    return b"".join(
        encode_turn(turn_record(session, before)) for before, session in zip((None, *sessions), sessions, strict=False)
    )


WHOLE = HEADER + turns_of(*(said([*range(n), 9], *["text"] * n, n=n) for n in range(1, 4)))


# -- there and back -----------------------------------------------------------------------------------

TURNS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.lists(st.integers(0, MAX_TOKEN_ID), max_size=20),
        st.floats(0, 1),
        st.lists(st.text(max_size=10), max_size=3),
        st.floats(0, 1e10),
        st.integers(1, 3),
        st.sampled_from(["", "", "removed", "cut", "longer"]),
    ),
    min_size=1,
    max_size=8,
)
"""Each: share of the tokens that stay, new ones, share of the messages that stay, new ones, when, by how many turns
more, and what somebody does to the file before."""


PRINCIPALS = st.text(min_size=1, max_size=MAX_PRINCIPAL_BYTES).filter(
    lambda principal: len(principal.encode()) <= MAX_PRINCIPAL_BYTES
)


@given(TURNS, PRINCIPALS, st.text(min_size=1, max_size=256), st.integers(1, 1000))
def test_a_session_is_what_was_written_last(
    tmp_path_factory: pytest.TempPathFactory, turns: Any, principal: str, name: str, n: int
) -> None:
    path, key = tmp_path_factory.mktemp("j"), SessionKey(principal, name)
    tokens: list[int] = []
    texts: list[str] = []
    journal = opened(path)
    lost = 0
    for stays, new, messages_stay, more, when, n_more, fate in turns:
        tokens = [*tokens[: int(stays * len(tokens))], *new]
        texts = [*texts[: int(messages_stay * len(texts))], *more]
        n += n_more
        spoilt = spoil(path, fate)
        last = said(tokens, *texts, n=n, key=key, created=5.0, used=when)
        assert journal.write(last) == spoilt
        lost += spoilt
        assert journal.restored == lost
    journal, found = reloaded(path, journal)
    assert journal.problems == []
    assert list(found) == [key]
    assert plain(found[key]) == (tokens, texts)
    assert facts(found[key]) == facts(last)
    journal.close()


def spoil(path: Path, how: str) -> bool:
    """Whether there was a file, and it is not as it was."""
    files = [*path.glob("*.session")]
    for file in files:
        if how == "removed":
            file.unlink()
        elif how == "cut":
            os.truncate(file, file.stat().st_size // 2)
        elif how == "longer":
            file.write_bytes(file.read_bytes() + b"half a turn")
    return bool(files) and how in ("removed", "cut")


def test_the_longest_unused_come_first(path: Path, journal: Journal) -> None:
    for name, when in (("x", 3.0), ("y", 1.0), ("z", 2.0)):
        journal.write(said([1], key=SessionKey("uid:1", name), used=when))
    journal.write(said([1, 1], key=SessionKey("uid:1", "y"), used=9.0, n=2))
    _, found = reloaded(path, journal)
    assert [key.id for key in found] == ["z", "x", "y"]


def test_ids_are_each_principals_own_and_never_file_names(path: Path, journal: Journal) -> None:
    names = ["a", "A", "../../etc/passwd", "/", ".", "..", "\0", "a\n", "é", "e\u0301", "🦊" * 256, "x.session"]
    keys = [SessionKey(principal, name) for name in names for principal in ("uid:0", "uid:-1", "é" * 64)]
    journal.max_sessions = len(keys)
    for i, key in enumerate(keys):
        journal.write(said([i], key=key))
    journal, found = reloaded(path, journal, max_sessions=len(keys))
    assert {key: session.tokens.tolist() for key, session in found.items()} == {key: [i] for i, key in enumerate(keys)}
    assert all(len(file.name) == 32 + len(".session") for file in path.glob("*.session"))
    assert {file.parent for file in path.parent.rglob("*.session")} == {path}
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    journal.close()


NOBODY: Any = [ChatMessage(role="nobody", content="x")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        said([-1], n=2),
        said([MAX_TOKEN_ID + 1], n=2),
        said([[1]], n=2),
        said([1], "\ud800", n=2),
        said([1], used=float("nan"), n=2),
        said([1], *["x"] * (MAX_MESSAGES + 1), n=2),
        said([1], "x" * (1 << 24), n=2),
        said(np.zeros(MAX_TOKENS + 1), n=2),
        said([1], n=0),
        said([1], n=MAX_TURNS + 1),
        attrs.evolve(said(n=2), tokens=np.array([0.5])),
        attrs.evolve(said(n=2), messages=NOBODY),
        said([1], created=float("inf"), n=2),
        *(said([1], key=SessionKey("uid:1", name)) for name in ("", "x" * 257, "\ud800")),
        *(said([1], key=SessionKey(principal, "a")) for principal in ("", "x" * 129, "é" * 65, "\ud800")),
    ],
    ids=range(20),
)
def test_a_session_out_of_bounds_changes_nothing(path: Path, journal: Journal, wrong: SessionRecord) -> None:
    journal.write(said([1, 2], "first"))
    before = file_of(path).read_bytes()
    for key in [KEY, SessionKey("uid:1", "new")] if wrong.key == KEY else [wrong.key]:
        with pytest.raises(JournalError):
            journal.write(attrs.evolve(wrong, key=key))
    assert file_of(path).read_bytes() == before
    assert journal.needs_repair() == [], "it is not tried again"
    journal.write(said([1, 2, 3], "first", "second", n=2))
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2, 3], ["first", "second"])


def test_there_are_at_most_so_many(path: Path, journal: Journal) -> None:
    for i in range(8):
        journal.write(said([i], key=SessionKey("uid:1", str(i)), used=float(i)))
        os.utime(max(path.glob("*.session"), key=lambda file: file.stat().st_mtime_ns), (i, i))
    with pytest.raises(JournalError, match="already 8 sessions"):
        journal.write(said())
    journal.write(said([0, 0], key=SessionKey("uid:1", "0"), used=50.0, n=2))
    journal, found = reloaded(path, journal, max_sessions=3)
    assert [key.id for key in found] == ["6", "7", "0"], "those used last"
    assert len(journal.problems) == 5
    journal, found = reloaded(path, journal)
    assert len(found) == 8
    journal.remove(SessionKey("uid:1", "3"))
    journal.write(said())
    journal.close()


def test_a_removed_session_is_gone(path: Path, journal: Journal) -> None:
    journal.write(said([1], n=7))
    journal.remove(KEY)
    journal.remove(KEY)
    assert {file.name for file in path.iterdir()} == {"lock"}
    journal.write(said([2]))
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([2], [])
    assert found[KEY].n_turns == 1


def test_files_do_not_grow_with_what_was_replaced(path: Path, journal: Journal) -> None:
    sizes = set()
    for i in range(300):
        journal.write(said([*range(min(i, 1) * 10), *range(i, 500)], f"turn {i}", n=i + 1))
        sizes.add(file_of(path).stat().st_size)
    assert max(sizes) <= SPARE_BYTES
    assert max(sizes) > SPARE_BYTES - 5000
    assert journal.restored == 0
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([*range(10), *range(299, 500)], ["turn 299"])
    assert found[KEY].n_turns == 300


def test_files_that_grow_with_what_is_live_are_not_written_anew(path: Path, journal: Journal) -> None:
    grown = np.repeat(np.arange(61), 1000)
    for i in range(60):
        journal.write(said(grown[: 1000 * (i + 1)], n=i + 1))
    assert file_of(path).stat().st_size > 60 * 4000 > SPARE_BYTES
    large = file_of(path).stat().st_ino
    for n in (61, 62):
        journal.write(said([*grown[:59_000], *[n] * 1000], n=n))
    assert file_of(path).stat().st_ino == large
    journal.write(said([*[0] * 1000, 5], n=63))
    assert file_of(path).stat().st_size < 2 * 4000 * WASTE
    assert file_of(path).stat().st_ino != large
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([0] * 1000 + [5], [])
    assert found[KEY].n_turns == 63


def test_turns_of_many_sessions_are_written_side_by_side(path: Path, journal: Journal) -> None:
    def work(number: int) -> None:
        for i in range(30):
            journal.write(said([number] * i, key=SessionKey(f"uid:{number}", "own"), n=i + 1))
            journal.write(said([i, number], key=SessionKey("uid:0", "closed again")))
            journal.remove(SessionKey("uid:0", "closed again"))
            for key in journal.needs_repair():
                journal.repair(key)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    journal, found = reloaded(path, journal)
    assert journal.problems == []
    assert set(found) == {SessionKey(f"uid:{number}", "own") for number in range(4)}
    for number in range(4):
        own = found[SessionKey(f"uid:{number}", "own")]
        assert (own.tokens.tolist(), own.n_turns) == ([number] * 29, 30)
    journal.close()


def test_a_folder_that_is_taken_away_again_and_again_loses_nothing(path: Path, journal: Journal) -> None:
    """Its descriptor is exchanged while others use it."""
    done = threading.Event()

    def work(number: int) -> None:
        n = 0
        while not done.is_set():
            n += 1
            with contextlib.suppress(JournalError):  # the folder went in the middle of it
                journal.write(said([number] * n, key=SessionKey(f"uid:{number}", "own"), n=n))
        turns[number] = n

    turns = [0] * 3
    with ThreadPoolExecutor(3) as threads:
        for number in range(3):
            threads.submit(work, number)
        for i in range(20):
            while not any(path.glob("*.session")):
                pass
            path.rename(path.with_name(f"away {i}"))
        done.set()
    for key in journal.needs_repair():
        journal.repair(key)
    assert journal.needs_repair() == []
    journal, found = reloaded(path, journal)
    assert journal.problems == []
    assert [found[SessionKey(f"uid:{number}", "own")].n_turns for number in range(3)] == turns
    journal.close()


# -- somebody removes things while it runs --------------------------------------------------------------


def test_a_file_that_was_removed_is_written_anew_with_all_that_was_said(path: Path, journal: Journal) -> None:
    journal.write(said([1], "a"))
    file_of(path).unlink()
    assert journal.write(said([1, 2], "a", "b", n=2))
    assert journal.restored == 1
    assert not journal.write(said([1, 2, 3], "a", "b", n=3))
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2, 3], ["a", "b"])
    assert facts(found[KEY]) == (1.0, 2.0, 3)


def test_what_is_in_its_place_is_replaced_and_not_followed(path: Path, journal: Journal, tmp_path: Path) -> None:
    journal.write(said([1], "a"))
    outside = tmp_path / "outside"
    file_of(path).rename(outside)
    before = outside.read_bytes()
    (path / f"{form.file_stem(MODEL, KEY)}.session").symlink_to(outside)
    assert journal.write(said([1, 2], "a", n=2))
    assert outside.read_bytes() == before
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2], ["a"])


@pytest.mark.parametrize("how", ["file", "folder", "all folders", "moved"])
def test_files_of_sessions_that_nobody_uses_are_repaired(path: Path, how: str, tmp_path: Path) -> None:
    path = path / "below"
    journal = opened(path)
    journal.load()
    sessions = [said([i], str(i), key=SessionKey("uid:1", str(i)), n=i) for i in range(1, 4)]
    for session in sessions:
        journal.write(session)
    assert journal.needs_repair() == []
    if how == "file":
        next(path.glob("*.session")).unlink()
    elif how == "moved":
        path.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(path if how == "folder" else path.parent)
    behind = journal.needs_repair()
    assert len(behind) == (1 if how == "file" else 3)
    for key in behind:
        written = journal.repair(key)
        assert written is not None
        assert written.key == key
    assert journal.restored == len(behind)
    assert journal.needs_repair() == []
    with pytest.raises(JournalError, match="in use by another process"):
        opened(path)
    journal, found = reloaded(path, journal)
    assert [plain(found[session.key]) for session in sessions] == [plain(session) for session in sessions]
    assert [facts(found[session.key]) for session in sessions] == [facts(session) for session in sessions]
    journal.close()


def test_a_lock_that_was_removed_is_taken_again(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    (path / "lock").unlink()
    journal.write(said([1, 2], n=2))
    assert (journal.restored, journal.needs_repair()) == (0, [])
    with pytest.raises(JournalError, match="in use by another process"):
        opened(path)
    (path / "lock").unlink()
    other = opened(path)
    with pytest.raises(JournalError, match="in use by another process"):
        journal.write(said([1, 2, 3], n=3))
    assert plain(other.load()[0]) == ([1, 2], [])
    other.close()


def test_a_folder_that_is_not_this_users_alone_is_not_gone_on_in(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    shutil.rmtree(path)
    path.mkdir(0o777)
    path.chmod(0o777)
    for use in (lambda: journal.write(said([1, 2], n=2)), journal.needs_repair):
        with pytest.raises(JournalError, match="others can write"):
            use()
    assert list(path.iterdir()) == []
    path.chmod(0o700)
    assert journal.needs_repair() == [KEY], "what could not be written is not forgotten"
    assert journal.repair(KEY) is not None
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2], [])


def test_what_was_removed_stays_so_and_what_failed_to_be_is_tried_again(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.write(said([1]))
    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", fails)
        with pytest.raises(JournalError, match="Input/output error"):
            journal.remove(KEY)
    assert journal.needs_repair() == [KEY]
    assert journal.repair(KEY) is None
    assert journal.needs_repair() == []
    assert {file.name for file in path.iterdir()} == {"lock"}


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_what_could_not_be_made_durable_is_tried_again(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Of a new session, of a turn more, and of a name: after a rename it is open which file is there."""
    for session in (said([1], "a"), said([1, 2], "a", n=2), said([9] * 50_000, "b", n=3), said([7], "b", n=4)):
        with monkeypatch.context() as broken:
            broken.setattr(os, call, fails)
            failed = False
            try:
                journal.write(session)
            except JournalError as error:
                failed = "Input/output error" in str(error)
        assert journal.needs_repair() == [KEY] * failed
        if failed:
            assert journal.repair(KEY) is session
        assert journal.restored == 0
        journal, found = reloaded(path, journal)
        assert (plain(found[KEY]), facts(found[KEY])) == (plain(session), facts(session))
    assert failed, "the last one is written anew, under a temporary name"
    journal.close()


def fails(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


# -- crashes ------------------------------------------------------------------------------------------


def three_turns(path: Path, journal: Journal) -> tuple[bytes, list[int], list[tuple[list[int], list[str]]]]:
    """A file, where its records end, and what the session is at each of these places."""
    ends: list[int] = [len(HEADER)]
    states: list[tuple[list[int], list[str]]] = [([], [])]
    for i in range(3):
        states.append(([*range(i + 1), 77], [f"m{k}" for k in range(i + 1)]))
        journal.write(said(states[-1][0], *states[-1][1], n=i + 1))
        ends.append(file_of(path).stat().st_size)
    return file_of(path).read_bytes(), ends, states


def test_a_file_that_was_cut_anywhere_gives_its_whole_turns(path: Path, journal: Journal) -> None:
    data, ends, states = three_turns(path, journal)
    file = file_of(path)
    for size in range(ends[1], len(data)):
        file.write_bytes(data[:size])
        journal, found = reloaded(path, journal)
        whole = max(i for i, end in enumerate(ends) if end <= size)
        assert plain(found[KEY]) == states[whole]
        assert found[KEY].n_turns == whole
        assert len(journal.problems) == (size != ends[whole])
        assert file.stat().st_size == ends[whole]
        journal.write(said([*states[whole][0][:whole], 5], n=whole + 1))
        journal, found = reloaded(path, journal)
        assert plain(found[KEY]) == ([*states[whole][0][:whole], 5], [])
        assert journal.problems == []
    journal.close()


def test_a_file_without_a_whole_turn_is_set_aside(path: Path, journal: Journal) -> None:
    data, ends, _ = three_turns(path, journal)
    name = file_of(path)
    for size in (*range(0, ends[1], 7), ends[0]):
        journal.remove(KEY)
        name.write_bytes(data[:size])
        journal, found = reloaded(path, journal)
        assert found == {}
        assert aside(path) == [data[:size]]
        journal.write(said([1]))
    journal.close()


@pytest.mark.parametrize("tail", [bytes(1), bytes(5000), b"\xff" * 300, MARK, MARK * 10, b"UMJ" * 50])
def test_what_follows_the_last_record_is_cut_off(path: Path, journal: Journal, tail: bytes) -> None:
    data, _, states = three_turns(path, journal)
    file_of(path).write_bytes(data + tail)
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == states[-1]
    assert journal.problems == [f"{file_of(path).name}: cut off {len(tail)} bytes after the last intact record"]
    assert aside(path) == []
    assert file_of(path).read_bytes() == data
    journal.close()


def test_a_flipped_bit_never_makes_another_session(path: Path, journal: Journal) -> None:
    """It is set aside; in the last turn, where half a record is no surprise, that one may be missing."""
    data, ends, states = three_turns(path, journal)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        try:
            content = decode(changed, MODEL)
        except DamagedFile:
            assert at < ends[2], "the end of the file is not to take all with it"
            continue
        assert at >= ends[2]
        assert content.n_bytes == ends[2]
        assert plain(content.session) == states[2]
    changed[ends[1] + 30] ^= 1
    file_of(path).write_bytes(changed)
    journal, found = reloaded(path, journal)
    assert found == {}
    assert "no record begins at byte" in journal.problems[0]
    assert aside(path) == [bytes(changed)]
    journal.close()


def test_what_a_failed_turn_has_left_is_taken_back_by_the_next(path: Path, journal: Journal) -> None:
    first = said([1], "a")
    journal.write(first)
    with file_of(path).open("ab") as file:
        file.write(encode_turn(turn_record(said([1, *[9] * 100], "a", n=2), first))[:-3])
    journal.write(said([1, 2], "a", "b", n=2))
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2], ["a", "b"])
    assert journal.problems == []
    journal.close()


def test_half_written_files_are_removed(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    (path / (file_of(path).name + ".tmp")).write_bytes(b"half")
    journal, found = reloaded(path, journal)
    assert list(found) == [KEY]
    assert not list(path.glob("*.tmp"))
    journal.close()


def test_a_closed_journal_answers_with_its_error(journal: Journal) -> None:
    journal.write(said([1]))
    journal.close()
    for use in (
        journal.load,
        journal.needs_repair,
        lambda: journal.write(said([1, 1], n=2)),
        lambda: journal.write(said(key=SessionKey("uid:1", "b"))),
    ):
        with pytest.raises(JournalError):
            use()


# -- set aside ------------------------------------------------------------------------------------------


def test_there_are_at_most_so_many_set_aside_and_the_oldest_go(path: Path, journal: Journal) -> None:
    for i in range(MAX_QUARANTINED + 5):
        name = path / f"{i:032x}.{'.session' if i % 2 else 'abcd.bad'}".replace("..", ".")
        name.write_bytes(b"%d" % i)
        os.utime(name, (i, i))
    journal, found = reloaded(path, journal)
    assert found == {}
    assert aside(path) == [b"%d" % i for i in range(5, MAX_QUARANTINED + 5)]
    for i in range(3):
        big = path / f"{i:032x}.bad"
        big.touch()
        os.truncate(big, MAX_QUARANTINED_BYTES // 2)
    journal, _ = reloaded(path, journal)
    assert len(list(path.glob("*.bad"))) == 2
    journal.close()


def test_a_closed_session_takes_with_it_what_was_set_aside_of_it(path: Path, journal: Journal) -> None:
    other = SessionKey(KEY.principal, "other")
    for _ in range(2):
        for key in (KEY, other):
            journal.write(said([1], "a secret", key=key))
        for file in path.glob("*.session"):
            file.write_bytes(b"damaged")
        journal, found = reloaded(path, journal)
        assert found == {}
    assert len(aside(path)) == 4
    journal.write(said([2]))
    journal.remove(KEY)
    assert [file.name.split(".")[0] for file in path.glob("*.bad")] == [form.file_stem(MODEL, other)] * 2
    journal.close()


# -- files by others ------------------------------------------------------------------------------------


def test_sessions_of_another_model_are_left_alone(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    journal, found = reloaded(path, journal, model="another")
    assert found == {}
    assert "ignored, it is from another model" in journal.problems[0]
    journal.write(said([2]))
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1], [])
    journal, found = reloaded(path, journal, model="another")
    assert plain(found[KEY]) == ([2], [])
    assert aside(path) == []
    journal.close()


def test_a_session_of_a_later_version_is_left_alone(path: Path, journal: Journal) -> None:
    journal.write(said())
    later = encode_header(Header(version=form.VERSION + 1, model=MODEL, key=KEY, created_at=1.0))
    file_of(path).write_bytes(later)
    journal, found = reloaded(path, journal)
    assert found == {}
    assert f"format version {form.VERSION + 1}" in journal.problems[0]
    with pytest.raises(JournalError, match="remove it first"):
        journal.write(said())
    assert file_of(path).read_bytes() == later
    journal.close()


OF_VERSION_1 = bytes.fromhex(
    "ff554d4a000000005b000000ada770ec14eabcc07b22637265617465645f6174223a372e302c226b6579223a7b226964223a"
    "2261222c2274656e616e74223a313030307d2c226d6f64656c223a2261206d6f64656c222c226e5f7475726e73223a302c22"
    "76657273696f6e223a317dff554d4a010000003c000000510c71b556cc069300000000020000000000000000000000000020"
    "4001000000020000005b7b22636f6e74656e74223a226869222c22726f6c65223a2275736572227d5d"
)
"""A turn of two tokens and a message."""

OF_VERSION_2 = bytes.fromhex(
    "ff554d4a000000004f0000005c53e4143b4a11127b22637265617465645f6174223a372e302c226b6579223a7b226964223a"
    "2261222c2274656e616e74223a313030307d2c226d6f64656c223a2261206d6f64656c222c2276657273696f6e223a327dff"
    "554d4a0100000044000000c63b732fa374eccf00000000030000000000000001000000000000000000224001000000020000"
    "00030000005b7b22636f6e74656e74223a226869222c22726f6c65223a2275736572227d5dff554d4a01000000430000001b"
    "960b7deb1134a202000000020000000100000002000000000000000000244070110100050000005b7b22636f6e74656e7422"
    "3a227468657265222c22726f6c65223a2275736572227d5d"
)
"""Session ``a`` of user 1000: ``[1, 2, 3]`` and "hi", then ``[1, 2, 70000, 5]``, "hi" and "there"."""

NAME_IN_VERSION_2 = "e1c174332f37e8c420a8557818b99e4f.session"


def old_file(path: Path) -> Path:
    file = path / NAME_IN_VERSION_2
    file.write_bytes(OF_VERSION_2)
    return file


def is_the_old_session(session: SessionRecord) -> bool:
    """Whether it is what ``OF_VERSION_2`` contains."""
    return (session.key, plain(session), facts(session)) == (KEY, ([1, 2, 70000, 5], ["hi", "there"]), (7.0, 10.0, 2))


def test_a_session_of_version_2_is_rewritten(path: Path, journal: Journal) -> None:
    old = old_file(path)
    old.write_bytes(OF_VERSION_2 + b"half a turn")
    journal, found = reloaded(path, journal)
    assert journal.problems == [f"{old.name}: cut off 11 bytes after the last intact record"]
    assert is_the_old_session(found[KEY])
    assert file_of(path).name == f"{form.file_stem(MODEL, KEY)}.session" != old.name
    assert (journal.restored, journal.needs_repair()) == (0, [])
    journal.write(said([1, 2, 9], "hi", created=7.0, n=3))
    journal, found = reloaded(path, journal)
    assert journal.problems == []
    assert plain(found[KEY]) == ([1, 2, 9], ["hi"])
    journal.close()


@pytest.mark.parametrize("call", ["rename", "fsync", "fdatasync", "unlink"])
def test_a_session_of_version_2_outlives_an_upgrade_that_fails(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The process may die at that point, or it may go on and try again."""
    old = old_file(path)
    with monkeypatch.context() as broken:
        broken.setattr(os, call, fails)
        dying, found = reloaded(path, journal)
    assert is_the_old_session(found[KEY]), "it is usable although it could not be rewritten"
    assert old.read_bytes() == OF_VERSION_2
    journal, found = reloaded(path, dying)
    assert is_the_old_session(found[KEY])
    assert file_of(path) != old
    journal.close()


def test_a_session_of_version_2_outlives_a_crash_at_any_point_of_its_upgrade(path: Path, journal: Journal) -> None:
    old = old_file(path)
    crashes = 0
    for run in crash_everywhere():
        with run:
            journal.load()
        crashes += run.crashed
        journal, found = reloaded(path, journal)
        assert journal.problems == []
        assert is_the_old_session(found[KEY])
        assert file_of(path) != old
        journal.remove(KEY)
        old_file(path)
    assert crashes > 5
    journal.close()


def test_an_upgrade_that_failed_is_tried_again_by_repair(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = old_file(path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fails)
        journal, found = reloaded(path, journal)
    [problem] = journal.problems
    assert problem.startswith(f"{old.name}: not rewritten in the current format yet: ")
    assert journal.needs_repair() == [KEY]
    assert journal.repair(KEY) is found[KEY]
    assert file_of(path) != old
    assert journal.needs_repair() == []
    journal, found = reloaded(path, journal)
    assert is_the_old_session(found[KEY])
    journal.close()


def test_a_file_of_version_2_gives_way_to_the_one_that_replaced_it(path: Path, journal: Journal) -> None:
    """As after a crash between writing the new file and removing the old one, in either order of their times."""
    for time in (1, 1 << 32):
        journal.write(said([5], "newer", n=3))
        [new] = path.glob("*.session")
        os.utime(old_file(path), (time, time))
        journal, found = reloaded(path, journal)
        assert plain(found[KEY]) == ([5], ["newer"])
        assert file_of(path) == new
        journal.remove(KEY)
    journal.close()


def test_a_closed_session_of_version_2_does_not_come_back(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = old_file(path)
    old.with_name(f"{old.stem}.12345678.bad").write_bytes(b"damaged by an earlier server")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fails)
        journal, _ = reloaded(path, journal)
    journal.remove(KEY)
    assert {file.name for file in path.iterdir()} == {"lock"}
    journal.close()


def test_what_is_wrong_with_a_file_of_version_2_is_treated_like_in_any_other(path: Path, journal: Journal) -> None:
    old = old_file(path)
    old.write_bytes(OF_VERSION_2[:30] + b"?" + OF_VERSION_2[31:])
    journal, found = reloaded(path, journal)
    assert found == {}
    assert f"{old.name}: quarantined as" in journal.problems[0]
    old_file(path).rename(path / f"{form.file_stem(MODEL, KEY)}.session")
    journal, found = reloaded(path, journal)
    assert found == {}
    assert "the file of another session" in journal.problems[0]
    old = old_file(path)
    journal, found = reloaded(path, journal, model="another")
    assert found == {}
    assert journal.problems == [f"{old.name}: ignored, it is from another model"]
    journal, _ = reloaded(path, journal, model="another", max_sessions=1)
    journal, found = reloaded(path, journal)
    assert is_the_old_session(found[KEY])
    journal.close()


def test_a_session_whose_file_of_version_2_was_ignored_is_not_begun_anew(path: Path, journal: Journal) -> None:
    old = old_file(path)
    with pytest.raises(JournalError, match=f"{old.name} was ignored at the start: remove it first"):
        journal.write(said([1]))


def test_the_principals_of_users_are_written_in_one_way() -> None:
    for uid in (0, 1000, -1):
        assert principal_uid(uid_principal(uid)) == uid
    for principal in ("", "1000", "uid:", "uid:x", "uid: 1", "uid:1_0", "uid:01", "uid:+1", "uid:\u0661"):
        with pytest.raises(ValueError, match="is not a Unix user"):
            principal_uid(principal)


def test_a_session_of_an_earlier_version_is_set_aside_and_told(path: Path, journal: Journal) -> None:
    journal.write(said())
    file_of(path).write_bytes(OF_VERSION_1)
    journal, found = reloaded(path, journal)
    assert found == {}
    [problem] = journal.problems
    [bad] = path.glob("*.bad")
    assert f"quarantined as {bad.name}: it has format version 1" in problem
    assert bad.read_bytes() == OF_VERSION_1
    journal.write(said([1]))
    assert plain(reloaded(path, journal)[1][KEY]) == ([1], [])


def test_a_file_under_another_name_is_set_aside(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    file_of(path).rename(path / f"{'0' * 32}.session")
    journal, found = reloaded(path, journal)
    assert found == {}
    assert "the file of another session" in journal.problems[0]
    journal.close()


def test_links_pipes_and_strangers_are_left_alone_here_too(path: Path, journal: Journal, tmp_path: Path) -> None:
    journal.write(said([1]))
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
    assert aside(path) == []
    journal.close()


def test_two_processes_do_not_share_a_folder(path: Path, journal: Journal) -> None:
    with pytest.raises(JournalError, match="in use by another process"):
        opened(path)
    for model in ("", "x" * 1025):
        with pytest.raises(ValueError, match="characters"):
            opened(path, model=model)


def test_a_file_too_large_to_be_ours_is_not_read(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    os.truncate(file_of(path), 1 << 40)
    tracemalloc.start()
    journal, found = reloaded(path, journal)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
    assert found == {}
    assert "it has 1099511627776 bytes" in journal.problems[0]
    journal.close()


def believed(data: bytes) -> None:
    """Nothing but the two errors; what is believed is within bounds."""
    try:
        content = decode(data, MODEL)
    except (DamagedFile, ForeignFile):
        return
    session = content.session
    assert 0 < content.n_bytes <= len(data)
    assert len(session.tokens) == content.size.n_tokens
    assert len(session.messages) == len(content.size.sizes)
    assert 0 < session.n_turns <= MAX_TURNS
    again = decode(HEADER + encode_turn(turn_record(session)), MODEL).session
    assert (plain(again), again.n_turns) == (plain(session), session.n_turns)


@given(st.binary(max_size=300), st.integers(0, len(WHOLE)), st.integers(0, 3))
def test_whatever_the_bytes_are_they_are_damaged_or_a_session(noise: bytes, at: int, how: int) -> None:
    believed(
        [noise, WHOLE[:at] + noise, WHOLE[:at] + noise + WHOLE[at:], WHOLE[:at] + noise + WHOLE[at + len(noise) :]][how]
    )


COUNTS = st.sampled_from([0, 1, 2, 5, (1 << 24) - 1, 1 << 24, (1 << 31) - 1, (1 << 32) - 1])


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.floats(), st.binary(max_size=40), st.binary(max_size=40) | st.just(b"[]"))
def test_records_with_the_right_codes_are_held_against_bounds(
    keep: int, n_tokens: int, keep_messages: int, n_turns: int, when: float, tokens: bytes, text: bytes
) -> None:
    payload = TURN.pack(keep, n_tokens, keep_messages, n_turns, when) + tokens + text
    believed(HEADER + form._record(TURN_KIND, payload))
    believed(WHOLE + form._record(TURN_KIND, payload))


@pytest.mark.parametrize(
    "records",
    [
        [],
        [form._record(1, b"")],
        [form._record(0, b"")],
        [form._record(0, b"{}")],
        [form._record(0, b'{"version": 3, "more": ' + b"[" * 200_000)],
        [form._record(0, b"[" * 200_000)],
        [HEADER, form._record(1, b"")],
        [HEADER, form._record(2, b"")],
        [HEADER],
        [HEADER, HEADER],
        [HEADER, form._record(1, TURN.pack(0, 0, 0, 0, 1.0) + b"[]")],
        [HEADER, form._record(1, TURN.pack(0, 0, 0, MAX_TURNS + 1, 1.0) + b"[]")],
        [WHOLE, form._record(1, TURN.pack(0, 0, 0, 2, 1.0) + b"[]")],
        [HEADER, form._record(1, TURN.pack(0, 0, 0, 1, 1.0) + b"[" * 200_000)],
        [HEADER, form._record(1, TURN.pack(0, 0, 0, 1, 1.0) + b"\xff\xfe")],
        [HEADER, form._record(1, TURN.pack(0, 0, 0, 1, float("inf")) + b"[]")],
        [HEADER, form._record(1, TURN.pack(0, 1, 0, 1, 1.0) + b"\xff\xff\xff\xff[]")],
        [HEADER, form._record(1, TURN.pack(0, 1, 0, 1, 1.0) + b"[]")],
        [HEADER, form._record(1, TURN.pack(1, 0, 0, 1, 1.0) + b"[]")],
        [HEADER, form._record(1, TURN.pack(0, 0, 1, 1, 1.0) + b"[]")],
        [HEADER, form._record(1, TURN.pack(0, 0, 0, 1, 1.0) + b'[{"role":"nobody","content":""}]')],
    ],
    ids=range(21),
)
def test_records_that_make_no_sense_are_damage(records: list[bytes]) -> None:
    with pytest.raises(DamagedFile):
        decode(b"".join(records), MODEL)


def test_no_payload_looks_like_a_record() -> None:
    """So what is searched for behind a damaged record is one."""
    tokens = np.frombuffer(MARK * 3 + b"\0" * 4, "<u4") & MAX_TOKEN_ID
    text = "".join(map(chr, range(0xD800))) + MARK.decode("latin-1")
    record = turn_record(said(tokens, text))
    for shift in range(4):
        assert MARK not in (bytes(shift) + record.tokens)[shift:]
    assert encode_turn(record).count(MARK) == 1
