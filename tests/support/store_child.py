"""Processes that save states and turns, for tests that kill them, fill their disk, or take it away.

``python -m tests.support.store_child MODE FOLDER``; what it has done it tells on its standard output, a line each.
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

from uma_trio.protocol.messages import ChatMessage
from uma_trio.store import Journal, JournalError, SessionKey, SessionRecord, StateFolder, StoreError

NOBODY = 65534

PRINCIPAL = "uid:1000"
MAX_BYTES = 2 << 20
MOST_STATE_BYTES = 300_000
SESSIONS = ("a", "☃", "../c")


def state_folder(folder: Path) -> StateFolder:
    return StateFolder(folder / "states", max_bytes=MAX_BYTES, fingerprint="a model")


def journal(folder: Path) -> Journal:
    return Journal(folder / "sessions", model="a model", max_sessions=10)


# -- what is written, as a function of its number ----------------------------------------------------


def tokens_of(number: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(number).integers(0, 50_000, 100 + number % 50, dtype=np.int32)


def state_of(tokens: npt.NDArray[np.int32]) -> bytes:
    """What a child writes as the state of a sequence with these tokens."""
    rng = np.random.default_rng(tokens[:4].tolist())
    return bytes(rng.bytes(int(rng.integers(1, MOST_STATE_BYTES))))


State: TypeAlias = tuple[tuple[int, ...], tuple[str, ...]]
_states: dict[str, list[State]] = {}


def after(session: str, n_turns: int) -> State:
    """Tokens and messages of ``session`` after its first turns.

    Most of what was said before is replaced: files are written anew every few turns.
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


def tell(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def save_states(folder: Path) -> None:
    states = state_folder(folder)
    number = max((state.extra["number"] for state in states.scan()), default=0)
    while True:
        number += 1
        tokens = tokens_of(number)
        content = state_of(tokens)
        draft = states.begin(len(content) + number % 3 * 1000)
        draft.view[: len(content)] = content
        state = draft.finish(tokens, principal=PRINCIPAL, n_bytes=len(content), extra={"number": number})
        tell(f"state {state.name}")


def append_turns(folder: Path) -> None:
    sessions = journal(folder)
    done = {session.key.id: session.n_turns for session in sessions.load()}
    while True:
        for session in SESSIONS:
            done[session] = done.get(session, 0) + 1
            sessions.write(record(session, done[session]))
            tell(f"turn {SESSIONS.index(session)} {done[session]}")


def fork_on_request(folder: Path) -> None:
    """For each line of standard input a child that saves and appends until it is killed."""
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            tell(f"begun {os.getpid()}")
            threading.Thread(target=save_states, args=(folder,)).start()
            append_turns(folder)
        os.waitpid(pid, 0)
        tell("over")


def refused(doing: str, function: Callable[..., object], *arguments: Any) -> None:
    """Tell what ``function`` says against being called."""
    try:
        function(*arguments)
    except StoreError as error:
        tell(f"{doing}: {error}")
    else:
        raise AssertionError(f"{doing} went well")


def limit_files(n_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


def with_limited_files(folder: Path) -> None:
    """Files may not grow beyond a limit, then they may: each thing that fails is as before, and goes on later."""
    states, sessions = state_folder(folder), journal(folder)
    states.scan()
    sessions.load()
    sessions.write(said(np.arange(4000)))

    limit_files(20_000)
    [file] = (folder / "sessions").glob("*.session")
    before = file.read_bytes()
    refused("write", sessions.write, said(np.arange(8000), n_turns=2))
    assert file.read_bytes() == before
    refused("begin", states.begin, 100_000)
    draft = states.begin(1000)
    refused("finish", lambda: draft.finish(np.arange(4000), principal="uid:1"))
    limit_files(10_000)
    refused("write anew", sessions.write, said(np.arange(1, 4000), n_turns=2))
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
    tell("as before")


def on_full_disk(folder: Path) -> None:
    """On a disk of a megabyte that only this process sees."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    states, sessions = state_folder(folder), journal(folder)
    states.scan()
    sessions.load()
    kept = states.begin(600_000).finish([1, 2, 3], principal="uid:1")
    refused("begin", states.begin, 600_000)

    turns = 1
    while True:
        try:
            sessions.write(said(np.repeat(np.arange(turns), 2000), n_turns=turns))
        except JournalError as error:
            tell(f"write: {error}")
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
    tell("goes on")


def in_unwritable_folders(folder: Path) -> None:
    """In folders that lose their write permission, which means nothing to root: then as nobody."""
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
    refused("begin", states.begin, 1000)
    states.max_bytes = kept.file_bytes + 1000
    refused("make room", states.begin, 1000)
    assert kept.name in states
    assert states.used_bytes == kept.file_bytes
    sessions.write(said([1, 2], n_turns=2))
    refused("begin a session", sessions.write, said([1], session="b"))
    sessions.write(said(np.arange(20_000), n_turns=3))
    refused("write anew", sessions.write, said([7], n_turns=4))
    refused("repair", sessions.repair, key)
    refused("remove state", states.remove, kept.name)
    refused("remove session", sessions.remove, key)
    states.open(kept.name).close()
    for room in folder.iterdir():
        room.chmod(0o700)
    sessions.write(said([1, 2, 3], n_turns=5))
    assert sorted(each.id for each in sessions.needs_repair()) == ["b"]
    sessions.repair(SessionKey(PRINCIPAL, "b"))
    sessions.close()
    again = journal(folder)
    assert {each.key.id: each.tokens.tolist() for each in again.load()} == {"a": [1, 2, 3], "b": [1]}
    again.close()
    folder.chmod(0o500)
    (folder / "sessions" / "lock").chmod(0o400)
    refused("open", journal, folder)
    folder.chmod(0o700)
    tell("goes on")


MODES = {
    "fork": fork_on_request,
    "limited": with_limited_files,
    "full": on_full_disk,
    "unwritable": in_unwritable_folders,
}

if __name__ == "__main__":
    mode, path = sys.argv[1:]
    MODES[mode](Path(path))
