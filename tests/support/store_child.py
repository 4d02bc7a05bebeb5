"""Processes that save states and turns, for tests that kill them, fill their disk or make it read-only.

Run ``python -m tests.support.store_child MODE FOLDER``.  It reports each thing that is durable in a line of its output.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tests.support.state_files import fill
from uma_trio.daemon.store.folder import StoreError
from uma_trio.daemon.store.journal import Journal, JournalError
from uma_trio.daemon.store.journal_format import SessionKey, SessionRecord
from uma_trio.daemon.store.state_folder import StateFolder
from uma_trio.protocol.chat import ChatMessage

NOBODY = 65534

PRINCIPAL = "uid:1000"
MAX_BYTES = 2 << 20
MOST_STATE_BYTES = 300_000
SESSIONS = ("a", "☃", "../c")


def state_folder(folder: Path) -> StateFolder:
    return StateFolder(folder / "states", max_bytes=MAX_BYTES, fingerprint="a model")


def journal(folder: Path) -> Journal:
    return Journal(folder / "sessions")


# -- what is written, as a function of its number ----------------------------------------------------


def tokens_of(number: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(number).integers(0, 50_000, 100 + number % 50, dtype=np.int32)


def state_of(tokens: npt.NDArray[np.int32]) -> bytes:
    """The state that a child saves for a sequence with these tokens."""
    rng = np.random.default_rng(tokens[:4].tolist())
    return bytes(rng.bytes(int(rng.integers(1, MOST_STATE_BYTES))))


State: TypeAlias = tuple[tuple[int, ...], tuple[str, ...]]
_states: dict[str, list[State]] = {}


def after(session: str, n_turns: int) -> State:
    """Tokens and messages of ``session`` after its first turns.

    Each turn replaces most of the content, so files are compacted every few turns.
    """
    known = _states.setdefault(session, [((), ())])
    while (number := len(known) - 1) < n_turns:
        tokens, messages = known[-1]
        rng = np.random.default_rng([len(session), number])
        keep = int(rng.integers(0, 50))
        added = rng.integers(0, 50_000, 2000, dtype=np.int32)
        known.append(((*tokens[:keep], *added.tolist()), (*messages[: number % 7], f"{session} {number}")))
    return known[n_turns]


def record(session: str, n_turns: int) -> SessionRecord:
    tokens, texts = after(session, n_turns)
    return said(tokens, *texts, session=session, n_turns=n_turns)


def said(tokens: npt.ArrayLike, *texts: str, session: str = "a", n_turns: int = 1) -> SessionRecord:
    return SessionRecord(
        key=SessionKey(PRINCIPAL, session),
        created_at=0.0,
        used_at=float(n_turns),
        n_turns=n_turns,
        tokens=np.asarray(tokens, np.int32),
        messages=tuple(ChatMessage(role="user", content=text) for text in texts),
    )


# -- modes -------------------------------------------------------------------------------------------


def report(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def save_states(folder: Path) -> None:
    states = state_folder(folder)
    number = max((int(state.adapters) for state in states.scan()), default=0)
    while True:
        number += 1
        tokens = tokens_of(number)
        content = state_of(tokens)
        draft = states.begin(len(content) + number % 3 * 1000)
        fill(draft, content)
        state = draft.finish(tokens, principal=PRINCIPAL, n_bytes=len(content), adapters=str(number))
        report(f"state {state.name}")


def append_turns(folder: Path) -> None:
    sessions = journal(folder)
    done = {session.key.id: session.n_turns for session in sessions.load()}
    while True:
        for session in SESSIONS:
            done[session] = done.get(session, 0) + 1
            sessions.write(record(session, done[session]))
            report(f"turn {SESSIONS.index(session)} {done[session]}")


def fork_on_request(folder: Path) -> None:
    """Forks a child for each line of standard input; the child saves and appends until it is killed."""
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            report(f"begun {os.getpid()}")
            threading.Thread(target=save_states, args=(folder,)).start()
            append_turns(folder)
        os.waitpid(pid, 0)
        report("over")


def report_refusal(doing: str, function: Callable[..., object], *arguments: Any) -> None:
    """Reports the error that ``function`` raises."""
    try:
        function(*arguments)
    except StoreError as error:
        report(f"{doing}: {error}")
    else:
        raise AssertionError(f"{doing} succeeded")


def limit_files(n_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


def with_limited_files(folder: Path) -> None:
    """Limits the size of files for a while: whatever fails changes nothing, and succeeds later."""
    states, sessions = state_folder(folder), journal(folder)
    states.scan()
    sessions.load()
    sessions.write(said(np.arange(4000)))

    limit_files(20_000)
    [file] = (folder / "sessions").glob("*.session")
    before = file.read_bytes()
    report_refusal("write", sessions.write, said(np.arange(8000), n_turns=2))
    assert file.read_bytes() == before
    report_refusal("begin", states.begin, 100_000)
    draft = states.begin(1000)
    report_refusal("finish", lambda: draft.finish(np.arange(4000), principal="uid:1"))
    limit_files(10_000)
    report_refusal("compact", sessions.write, said(np.arange(1, 4000), n_turns=2))
    assert states.used_bytes == 0

    limit_files(resource.RLIM_INFINITY)
    assert sessions.needs_repair() == [SessionKey(PRINCIPAL, "a")]
    sessions.repair(SessionKey(PRINCIPAL, "a"))
    for n in range(2):
        sessions.write(said([*range(4000), *[7] * n], n_turns=3 + n))
    sessions.close()
    [found] = journal(folder).load()
    assert found.tokens.tolist() == [*range(4000), 7]
    assert found.n_turns == 4
    names = {path.name for room in ("states", "sessions") for path in (folder / room).iterdir()}
    assert not [name for name in names if name.endswith((".tmp", ".state"))], names
    report("as before")


def on_full_disk(folder: Path) -> None:
    """Works on a disk of one megabyte that only this process sees."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    states, sessions = state_folder(folder), journal(folder)
    states.scan()
    sessions.load()
    kept = states.begin(600_000).finish([1, 2, 3], principal="uid:1")
    report_refusal("begin", states.begin, 600_000)

    turns = 1
    while True:
        try:
            sessions.write(said(np.repeat(np.arange(turns), 2000), n_turns=turns))
        except JournalError as error:
            report(f"write: {error}")
            break
        turns += 1
    states.open(kept.name).close()
    states.remove(kept.name)
    for key in sessions.needs_repair():
        sessions.repair(key)
    sessions.close()
    states.close()
    [found] = journal(folder).load()
    assert found.tokens.tolist() == np.repeat(np.arange(turns), 2000).tolist()
    assert found.n_turns == turns
    report("goes on")


def replace_turns(sessions: Journal) -> None:
    """Replaces the content of a session until its file is compacted."""
    for n in range(5):
        sessions.write(said(np.arange(n + 1, 20_000), n_turns=4 + n))


def in_unwritable_folders(folder: Path) -> None:
    """Works in folders that become read-only.  Root can always write, so root becomes another user first."""
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    key, states, sessions = SessionKey(PRINCIPAL, "a"), state_folder(folder), journal(folder)
    states.scan()
    sessions.load()
    kept = states.begin(1000).finish([1, 2, 3], principal="uid:1")
    sessions.write(said([1]))
    for room in folder.iterdir():
        room.chmod(0o500)
    report_refusal("begin", states.begin, 1000)
    used = states.used_bytes
    states.max_bytes = used + 1000
    report_refusal("make room", states.begin, 1000)
    assert kept.name in states
    assert states.used_bytes == used
    sessions.write(said([1, 2], n_turns=2))
    report_refusal("begin a session", sessions.write, said([1], session="b"))
    sessions.write(said(np.arange(20_000), n_turns=3))
    report_refusal("compact", replace_turns, sessions)
    report_refusal("repair", sessions.repair, key)
    report_refusal("remove state", states.remove, kept.name)
    report_refusal("remove session", sessions.remove, key)
    states.open(kept.name).close()
    for room in folder.iterdir():
        room.chmod(0o700)
    sessions.write(said([1, 2, 3], n_turns=20))
    assert sorted(each.id for each in sessions.needs_repair()) == ["b"]
    sessions.repair(SessionKey(PRINCIPAL, "b"))
    sessions.close()
    again = journal(folder)
    assert {each.key.id: each.tokens.tolist() for each in again.load()} == {"a": [1, 2, 3], "b": [1]}
    again.close()
    folder.chmod(0o500)
    (folder / "sessions" / "lock").chmod(0o400)
    report_refusal("open", journal, folder)
    folder.chmod(0o700)
    report("goes on")


MODES = {
    "fork": fork_on_request,
    "limited": with_limited_files,
    "full": on_full_disk,
    "unwritable": in_unwritable_folders,
}

if __name__ == "__main__":
    mode, path = sys.argv[1:]
    MODES[mode](Path(path))
