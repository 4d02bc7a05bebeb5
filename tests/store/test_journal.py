"""Journals: after any turns, damage, failures and restarts a session is correct, or it is rejected."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.crashes import crash_everywhere
from uma_trio.daemon.store import journal_format as form
from uma_trio.daemon.store.encoding import MAX_PRINCIPAL_BYTES, MAX_TOKEN_ID, MAX_TOKENS, DamagedFile
from uma_trio.daemon.store.journal import MAX_QUARANTINED, MAX_QUARANTINED_BYTES, Journal, JournalError
from uma_trio.daemon.store.journal_format import MARK, MAX_TURNS, SPARE_BYTES, SessionKey, SessionRecord, decode, encode
from uma_trio.engine_link.media import PLACEHOLDER
from uma_trio.protocol.chat import ChatMessage

KEY = SessionKey("uid:1000", "a")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    found = Journal(path)
    assert found.load() == []
    yield found
    found.close()


def said(
    tokens: Any = (), *texts: str, n: int = 1, key: SessionKey = KEY, created: float = 1.0, used: float = 2.0
) -> SessionRecord:
    """A session with these tokens and messages after ``n`` turns."""
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


def reloaded(path: Path, journal: Journal) -> tuple[Journal, dict[SessionKey, SessionRecord]]:
    """The journal and its sessions after a restart."""
    journal.close()
    again = Journal(path)
    return again, {session.key: session for session in again.load()}


def facts(session: SessionRecord) -> tuple[float, float, int]:
    return session.created_at, session.used_at, session.n_turns


def quarantined(path: Path) -> list[bytes]:
    """Contents of quarantined files, oldest first."""
    return [file.read_bytes() for file in sorted(path.glob("*.bad"), key=lambda file: file.stat().st_mtime_ns)]


def path_of(path: Path) -> Path:
    [file] = path.glob("*.session")
    return file


def turns_of(*sessions: SessionRecord) -> bytes:
    return b"".join(encode(session, before) for before, session in zip((None, *sessions), sessions, strict=False))


WHOLE = turns_of(*(said([*range(n), 9], *["text"] * n, n=n) for n in range(1, 4)))


# -- writing and reading ------------------------------------------------------------------------------

TURNS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.lists(st.integers(0, MAX_TOKEN_ID) | st.integers(PLACEHOLDER, 2**31 - 1), max_size=20),
        st.floats(0, 1),
        st.lists(st.text(max_size=10), max_size=3),
        st.floats(0, 1e10),
        st.integers(1, 3),
        st.sampled_from(["", "", "removed", "cut", "longer"]),
    ),
    min_size=1,
    max_size=8,
)
"""Each: share of tokens that stay, new tokens, share of messages that stay, new messages, time, number of turns, and
how the file is tampered with before."""


PRINCIPALS = st.text(min_size=1, max_size=MAX_PRINCIPAL_BYTES).filter(
    lambda principal: len(principal.encode()) <= MAX_PRINCIPAL_BYTES
)


@given(TURNS, PRINCIPALS, st.text(min_size=1, max_size=256), st.integers(1, 1000))
def test_a_session_is_restored_as_it_was_written_last(
    tmp_path_factory: pytest.TempPathFactory, turns: Any, principal: str, name: str, n: int
) -> None:
    path, key = tmp_path_factory.mktemp("j"), SessionKey(principal, name)
    tokens: list[int] = []
    texts: list[str] = []
    journal = Journal(path)
    lost = 0
    for stays, new, messages_stay, more, when, n_more, fate in turns:
        tokens = [*tokens[: int(stays * len(tokens))], *new]
        texts = [*texts[: int(messages_stay * len(texts))], *more]
        n += n_more
        tampered = tamper(path, fate)
        last = said(tokens, *texts, n=n, key=key, created=5.0, used=when)
        assert journal.write(last) == tampered
        lost += tampered
        assert journal.restored == lost
    journal, found = reloaded(path, journal)
    assert journal.problems == []
    assert list(found) == [key]
    assert plain(found[key]) == (tokens, texts)
    assert facts(found[key]) == facts(last)
    journal.close()


def tamper(path: Path, how: str) -> bool:
    """Tampers with the file, if there is one; returns whether the journal must recreate it."""
    files = [*path.glob("*.session")]
    for file in files:
        if how == "removed":
            file.unlink()
        elif how == "cut":
            os.truncate(file, file.stat().st_size // 2)
        elif how == "longer":
            file.write_bytes(file.read_bytes() + b"half a turn")
    return bool(files) and how in ("removed", "cut")


def test_least_recently_used_sessions_come_first(path: Path, journal: Journal) -> None:
    for name, when in (("x", 3.0), ("y", 1.0), ("z", 2.0)):
        journal.write(said([1], key=SessionKey("uid:1", name), used=when))
    journal.write(said([1, 1], key=SessionKey("uid:1", "y"), used=9.0, n=2))
    _, found = reloaded(path, journal)
    assert [key.id for key in found] == ["z", "x", "y"]


def test_each_principal_has_its_own_ids_and_ids_are_never_file_names(path: Path, journal: Journal) -> None:
    names = ["a", "A", "../../etc/passwd", "/", ".", "..", "\0", "a\n", "é", "e\u0301", "🦊" * 256, "x.session"]
    keys = [SessionKey(principal, name) for name in names for principal in ("uid:0", "uid:-1", "é" * 64)]
    for i, key in enumerate(keys):
        journal.write(said([i], key=key))
    journal, found = reloaded(path, journal)
    assert {key: session.tokens.tolist() for key, session in found.items()} == {key: [i] for i, key in enumerate(keys)}
    assert all(len(file.name) == 32 + len(".session") for file in path.glob("*.session"))
    assert {file.parent for file in path.parent.rglob("*.session")} == {path}
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    journal.close()


FEW_BYTES = 1 << 16
"""The limit in the next test."""

NOBODY: Any = [ChatMessage(role="nobody", content="x")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        said([-1], n=2),
        said([MAX_TOKEN_ID + 1], n=2),
        said([[1]], n=2),
        said([1], "\ud800", n=2),
        said([1], used=float("nan"), n=2),
        said([1], *["x"] * FEW_BYTES, n=2),
        said([1], "x" * FEW_BYTES, n=2),
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
def test_an_invalid_session_changes_nothing(
    path: Path, journal: Journal, wrong: SessionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "MAX_SESSION_BYTES", FEW_BYTES)
    journal.write(said([1, 2], "first"))
    before = path_of(path).read_bytes()
    for key in [KEY, SessionKey("uid:1", "new")] if wrong.key == KEY else [wrong.key]:
        with pytest.raises(JournalError):
            journal.write(attrs.evolve(wrong, key=key))
    assert path_of(path).read_bytes() == before
    assert journal.needs_repair() == [], "an invalid session is not tried again"
    journal.write(said([1, 2, 3], "first", "second", n=2))
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2, 3], ["first", "second"])


def test_a_removed_session_is_gone(path: Path, journal: Journal) -> None:
    journal.write(said([1], n=7))
    journal.remove(KEY)
    journal.remove(KEY)
    assert {file.name for file in path.iterdir()} == {"lock"}
    journal.write(said([2]))
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([2], [])
    assert found[KEY].n_turns == 1


def test_files_are_compacted_when_most_of_them_was_replaced(path: Path, journal: Journal) -> None:
    sizes = set()
    for i in range(300):
        journal.write(said([*range(min(i, 1) * 10), *range(i, 500)], f"turn {i}", n=i + 1))
        sizes.add(path_of(path).stat().st_size)
    assert max(sizes) <= SPARE_BYTES
    assert max(sizes) > SPARE_BYTES - 5000
    assert journal.restored == 0
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([*range(10), *range(299, 500)], ["turn 299"])
    assert found[KEY].n_turns == 300


def test_files_of_current_content_are_not_compacted(path: Path, journal: Journal) -> None:
    """So growing needs little room on a disk that is almost full."""
    grown = np.repeat(np.arange(61), 1000)
    large = None
    for i in range(60):
        journal.write(said(grown[: 1000 * (i + 1)], n=i + 1))
        assert path_of(path).stat().st_ino == (large or path_of(path).stat().st_ino)
        large = path_of(path).stat().st_ino
    assert path_of(path).stat().st_size > 60 * 4000 > SPARE_BYTES
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == (grown[:60_000].tolist(), [])
    journal.write(said(grown, n=61))
    assert path_of(path).stat().st_ino == large, "nor after a restart"
    for n in range(300):
        journal.write(said([n] * 1000, n=62 + n))
    assert path_of(path).stat().st_size <= SPARE_BYTES
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([299] * 1000, [])
    journal.close()


def test_many_threads_can_write_turns(path: Path, journal: Journal) -> None:
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


def test_a_folder_that_is_repeatedly_moved_away_loses_nothing(path: Path, journal: Journal) -> None:
    """The journal replaces the folder's descriptor while other threads use it."""
    done = threading.Event()

    def work(number: int) -> None:
        n = 0
        while not done.is_set():
            n += 1
            with contextlib.suppress(JournalError):  # the folder was moved away in the middle of the call
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


# -- changes from outside while the journal is open -----------------------------------------------------


def test_a_removed_file_is_recreated_with_its_full_content(path: Path, journal: Journal) -> None:
    journal.write(said([1], "a"))
    path_of(path).unlink()
    assert journal.write(said([1, 2], "a", "b", n=2))
    assert journal.restored == 1
    assert not journal.write(said([1, 2, 3], "a", "b", n=3))
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2, 3], ["a", "b"])
    assert facts(found[KEY]) == (1.0, 2.0, 3)


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(path: Path, journal: Journal, tmp_path: Path) -> None:
    journal.write(said([1], "a"))
    outside = tmp_path / "outside"
    path_of(path).rename(outside)
    before = outside.read_bytes()
    (path / f"{form.file_stem(KEY)}.session").symlink_to(outside)
    assert journal.write(said([1, 2], "a", n=2))
    assert outside.read_bytes() == before
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2], ["a"])


@pytest.mark.parametrize("how", ["file", "folder", "all folders", "moved"])
def test_removed_files_of_idle_sessions_are_repaired(path: Path, how: str, tmp_path: Path) -> None:
    path = path / "below"
    journal = Journal(path)
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
    with pytest.raises(JournalError, match=f"in use by process {os.getpid()}"):
        Journal(path)
    journal, found = reloaded(path, journal)
    assert [plain(found[session.key]) for session in sessions] == [plain(session) for session in sessions]
    assert [facts(found[session.key]) for session in sessions] == [facts(session) for session in sessions]
    journal.close()


def test_a_removed_lock_is_created_again(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    (path / "lock").unlink()
    journal.write(said([1, 2], n=2))
    assert (journal.restored, journal.needs_repair()) == (0, [])
    with pytest.raises(JournalError, match=f"in use by process {os.getpid()}"):
        Journal(path)
    (path / "lock").unlink()
    other = Journal(path)
    with pytest.raises(JournalError, match=f"in use by process {os.getpid()}"):
        journal.write(said([1, 2, 3], n=3))
    assert plain(other.load()[0]) == ([1, 2], [])
    other.close()


def test_a_new_folder_that_others_can_write_to_is_rejected(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    shutil.rmtree(path)
    path.mkdir(0o777)
    path.chmod(0o777)
    for use in (lambda: journal.write(said([1, 2], n=2)), journal.needs_repair):
        with pytest.raises(JournalError, match="others can write"):
            use()
    assert list(path.iterdir()) == []
    path.chmod(0o700)
    assert journal.needs_repair() == [KEY], "failed writes are remembered"
    assert journal.repair(KEY) is not None
    _, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2], [])


def test_a_failed_removal_is_tried_again(path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_failed_sync_is_tried_again(path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """For a new session, for an appended turn and for a rename, after which either file may exist."""
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
    assert failed, "the last one is compacted, under a temporary name"
    journal.close()


def fails(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


# -- crashes ------------------------------------------------------------------------------------------


def three_turns(path: Path, journal: Journal) -> tuple[bytes, list[int], list[tuple[list[int], list[str]]]]:
    """A file, the ends of its records, and the session at each of these ends."""
    ends: list[int] = [0]
    states: list[tuple[list[int], list[str]]] = [([], [])]
    for i in range(3):
        states.append(([*range(i + 1), 77], [f"m{k}" for k in range(i + 1)]))
        journal.write(said(states[-1][0], *states[-1][1], n=i + 1))
        ends.append(path_of(path).stat().st_size)
    return path_of(path).read_bytes(), ends, states


def test_a_file_cut_anywhere_keeps_its_complete_turns(path: Path, journal: Journal) -> None:
    data, ends, states = three_turns(path, journal)
    file = path_of(path)
    for size in sorted({*range(ends[1], len(data), 5), *(end + n for end in ends[1:3] for n in range(30))}):
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


def test_a_file_without_a_complete_turn_is_quarantined(path: Path, journal: Journal) -> None:
    data, ends, _ = three_turns(path, journal)
    name = path_of(path)
    for size in range(0, ends[1], 7):
        journal.remove(KEY)
        name.write_bytes(data[:size])
        journal, found = reloaded(path, journal)
        assert found == {}
        assert quarantined(path) == [data[:size]]
        journal.write(said([1]))
    journal.close()


@pytest.mark.parametrize("tail", [bytes(1), bytes(5000), b"\xff" * 300, MARK, MARK * 10, b"UMJ" * 50])
def test_garbage_after_the_last_record_is_cut_off(path: Path, journal: Journal, tail: bytes) -> None:
    data, _, states = three_turns(path, journal)
    path_of(path).write_bytes(data + tail)
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == states[-1]
    assert journal.problems == [f"{path_of(path).name}: cut off {len(tail)} bytes after the last intact record"]
    assert quarantined(path) == []
    assert path_of(path).read_bytes() == data
    journal.close()


def test_a_flipped_bit_never_changes_a_session(path: Path, journal: Journal) -> None:
    """The file is quarantined.  In the last turn, where a crash leaves half a record, only that turn is lost."""
    data, ends, states = three_turns(path, journal)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        try:
            session, n_bytes = decode(changed)
        except DamagedFile:
            assert at < ends[2], "damage in the last turn must not cost the others"
            continue
        assert at >= ends[2]
        assert n_bytes == ends[2]
        assert plain(session) == states[2]
    changed[ends[1] + 30] ^= 1
    path_of(path).write_bytes(changed)
    journal, found = reloaded(path, journal)
    assert found == {}
    assert "no record begins at byte" in journal.problems[0]
    assert quarantined(path) == [bytes(changed)]
    journal.close()


def test_the_next_turn_overwrites_the_remains_of_a_failed_one(path: Path, journal: Journal) -> None:
    first = said([1], "a")
    journal.write(first)
    with path_of(path).open("ab") as file:
        file.write(encode(said([1, *[9] * 100], "a", n=2), first)[:-3])
    journal.write(said([1, 2], "a", "b", n=2))
    journal, found = reloaded(path, journal)
    assert plain(found[KEY]) == ([1, 2], ["a", "b"])
    assert journal.problems == []
    journal.close()


def test_temporary_files_are_removed(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    (path / (path_of(path).name + ".tmp")).write_bytes(b"half")
    journal, found = reloaded(path, journal)
    assert list(found) == [KEY]
    assert not list(path.glob("*.tmp"))
    journal.close()


def test_methods_of_a_closed_journal_raise_its_error(journal: Journal) -> None:
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


# -- quarantine -----------------------------------------------------------------------------------------


def test_quarantined_files_are_limited_and_the_oldest_are_removed(path: Path, journal: Journal) -> None:
    for i in range(MAX_QUARANTINED + 5):
        name = path / f"{i:032x}.{'.session' if i % 2 else 'abcd.bad'}".replace("..", ".")
        name.write_bytes(b"%d" % i)
        os.utime(name, (i, i))
    journal, found = reloaded(path, journal)
    assert found == {}
    assert quarantined(path) == [b"%d" % i for i in range(5, MAX_QUARANTINED + 5)]
    for i in range(3):
        big = path / f"{i:032x}.bad"
        big.touch()
        os.truncate(big, MAX_QUARANTINED_BYTES // 2)
    journal, _ = reloaded(path, journal)
    assert len(list(path.glob("*.bad"))) == 2
    journal.close()


def test_closing_a_session_removes_its_quarantined_files(path: Path, journal: Journal) -> None:
    other = SessionKey(KEY.principal, "other")
    for _ in range(2):
        for key in (KEY, other):
            journal.write(said([1], "a secret", key=key))
        for file in path.glob("*.session"):
            file.write_bytes(b"damaged")
        journal, found = reloaded(path, journal)
        assert found == {}
    assert len(quarantined(path)) == 4
    journal.write(said([2]))
    journal.remove(KEY)
    assert [file.name.split(".")[0] for file in path.glob("*.bad")] == [form.file_stem(other)] * 2
    journal.close()


# -- foreign files --------------------------------------------------------------------------------------


def test_a_file_under_another_name_is_quarantined(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    path_of(path).rename(path / f"{'0' * 32}.session")
    journal, found = reloaded(path, journal)
    assert found == {}
    assert "the file of another session" in journal.problems[0]
    journal.close()


def test_links_pipes_and_unrelated_files_are_ignored(path: Path, journal: Journal, tmp_path: Path) -> None:
    journal.write(said([1]))
    outside = tmp_path / "outside"
    path_of(path).rename(outside)
    names = {kind: f"{kind * 32}.session" for kind in "abc"}
    (path / names["a"]).symlink_to(outside)
    os.mkfifo(path / names["b"])
    (path / names["c"]).mkdir()
    (path / "README").write_text("unrelated")
    journal, found = reloaded(path, journal)
    assert found == {}
    assert sorted(line.split(":")[0] for line in journal.problems) == sorted([*names.values(), "README"])
    assert quarantined(path) == []
    journal.close()


def test_only_one_process_can_use_a_folder(path: Path, journal: Journal) -> None:
    with pytest.raises(JournalError, match=f"in use by process {os.getpid()}"):
        Journal(path)


def test_a_file_that_is_too_large_is_not_read(path: Path, journal: Journal) -> None:
    journal.write(said([1]))
    os.truncate(path_of(path), 1 << 40)
    tracemalloc.start()
    journal, found = reloaded(path, journal)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
    assert found == {}
    assert "it has 1099511627776 bytes" in journal.problems[0]
    journal.close()


def assert_rejected_or_valid(data: bytes) -> None:
    """Checks that ``decode`` raises its error, or returns a session within all limits."""
    try:
        session, n_bytes = decode(data)
    except DamagedFile:
        return
    assert 0 < n_bytes <= len(data)
    assert 0 < session.n_turns <= MAX_TURNS
    again = decode(encode(session))[0]
    assert (plain(again), again.n_turns) == (plain(session), session.n_turns)


@given(st.binary(max_size=300), st.integers(0, len(WHOLE)), st.integers(0, 3))
def test_arbitrary_bytes_are_rejected_or_a_valid_session(noise: bytes, at: int, how: int) -> None:
    assert_rejected_or_valid(
        [noise, WHOLE[:at] + noise, WHOLE[:at] + noise + WHOLE[at:], WHOLE[:at] + noise + WHOLE[at + len(noise) :]][how]
    )


@given(*[st.integers(0, 4)] * 2, st.integers(0, 1 << 32), st.floats(), st.binary(max_size=12), st.booleans())
def test_records_with_valid_checksums_are_checked_for_their_limits(
    keep: int, keep_messages: int, n_turns: int, when: float, tokens: bytes, first: bool
) -> None:
    turn = form.Turn(
        key=KEY,
        created_at=1.0,
        used_at=when,
        n_turns=n_turns,
        keep=keep,
        tokens=tokens,
        keep_messages=keep_messages,
        messages=[],
    )
    assert_rejected_or_valid((b"" if first else WHOLE) + raw_record(msgspec.msgpack.encode(turn)))


def raw_record(payload: bytes) -> bytes:
    """A record with right checksums."""
    head = MARK + struct.pack("<II", len(payload), zlib.crc32(payload))
    return head + struct.pack("<I", zlib.crc32(head)) + payload


@pytest.mark.parametrize(
    "data",
    [
        b"",
        raw_record(b""),
        raw_record(b"\xc0"),
        raw_record(b"\x91" * 200_000),
        WHOLE + raw_record(b"\x80"),
        encode(said([1, 2], n=2), said([1])),
        encode(said([], "a", "b", n=2), said([], "a")),
        WHOLE + encode(said([1], key=SessionKey("uid:1000", "b"))),
        WHOLE + encode(said([1], created=2.0)),
        b"\xffUMJ" + WHOLE[4:],
    ],
    ids=range(10),
)
def test_what_no_crash_leaves_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedFile):
        decode(data)


@pytest.mark.parametrize("what", ["a new session", "an append", "a compaction", "a removal"])
def test_a_crash_at_any_point_leaves_the_session_before_or_after(path: Path, journal: Journal, what: str) -> None:
    before = None if what == "a new session" else said([1, 2], "a")
    after = {
        "a new session": said([1], "b"),
        "an append": said([1, 2, 3], "a", "b", n=2),
        "a compaction": said([7] * 30_000, n=2),
        "a removal": None,
    }[what]
    crashes = 0
    for run in crash_everywhere():
        if before is not None:
            journal.write(before)
        with run:
            if after is None:
                journal.remove(KEY)
            else:
                journal.write(after)
        journal, found = reloaded(path, journal)
        assert all("cut off" in problem for problem in journal.problems)
        now = found.get(KEY)
        if not run.crashed:
            assert (None if now is None else facts(now)) == (None if after is None else facts(after))
        possible = [None if each is None else (plain(each), facts(each)) for each in (before, after)]
        assert (None if now is None else (plain(now), facts(now))) in possible
        crashes += run.crashed
        journal.remove(KEY)
    assert crashes >= 2
    journal.close()
