"""Saved states: a state is read back exactly as it was saved, or not at all."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import tracemalloc
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
from tests.support.state_files import content_of, fill
from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.store.encoding import MAX_PRINCIPAL_BYTES, MAX_TOKEN_ID, MAX_TOKENS, DamagedFile
from uma_trio.daemon.store.folder import QUARANTINE_SUFFIX
from uma_trio.daemon.store.state_folder import (
    SUFFIX,
    CorruptState,
    StateDraft,
    StateFileError,
    StateFolder,
    StateReader,
)
from uma_trio.daemon.store.state_format import (
    FIELDS,
    MAX_EXTRA_BYTES,
    PAYLOAD_AT,
    Header,
    decode_header,
    decode_tail,
    encode_header,
    fingerprint_of,
)
from uma_trio.engine_link.media import PLACEHOLDER
from uma_trio.engine_link.state_pages import HASH_BYTES, PAGE_BYTES, hash_of

MIB = 1 << 20
ROOM = 16 * MIB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "states"


def opened(path: Path, **changes: Any) -> StateFolder:
    settings: dict[str, Any] = {"max_bytes": ROOM, "fingerprint": "library, model, layout"} | changes
    return StateFolder(path, **settings)


@pytest.fixture
def folder(path: Path) -> Iterator[StateFolder]:
    states = opened(path)
    states.scan()
    yield states
    states.close()


def save(folder: StateFolder, content: bytes = b"a state", *, tokens: Any = (1, 2, 3), **more: Any) -> SavedState:
    draft = folder.begin(len(content))
    fill(draft, content)
    return check_listed(folder, draft.finish(np.array(tokens, np.int32), **{"principal": "uid:1000"} | more))


def check_listed(folder: StateFolder, state: SavedState) -> SavedState:
    """Checks that the next ``scan`` lists the same state that ``finish`` returned."""
    [found] = [each for each in folder.scan() if each.name == state.name]
    assert found.tokens.tolist() == state.tokens.tolist()
    assert attrs.astuple(found, filter=not_tokens) == attrs.astuple(state, filter=not_tokens)
    return state


def not_tokens(field: Any, _: Any) -> bool:
    return str(field.name) != "tokens"


def content(folder: StateFolder, name: str) -> bytes:
    return content_of(folder.open(name))


def path_of(path: Path, state: SavedState) -> Path:
    return path / (state.name + SUFFIX)


def file_bytes(folder: StateFolder, state: SavedState) -> int:
    return folder.path_of(state.name).stat().st_size


def quarantined(path: Path) -> list[str]:
    """Names of quarantined files."""
    return sorted(file.name for file in path.glob(f"*{QUARANTINE_SUFFIX}"))


# -- saving and reading -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n_bytes", [1, 4096, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES, 5 * PAGE_BYTES // 2]
)
def test_a_state_survives_a_restart(path: Path, folder: StateFolder, n_bytes: int) -> None:
    data = np.random.default_rng(n_bytes).bytes(n_bytes)
    more = {"checkpoints": ((10, 1),) if n_bytes > 1 else (), "adapters": "é*0x1p-1"}
    state = save(folder, data, tokens=range(70), principal="é" * 64, **more)
    assert content(folder, state.name) == data
    folder.close()
    again = opened(path)
    [found] = again.scan()
    assert again.problems == []
    assert (found.principal, found.tokens.tolist()) == ("é" * 64, list(range(70)))
    assert {"checkpoints": found.checkpoints, "adapters": found.adapters} == more
    assert content(again, found.name) == data
    again.close()


def test_a_state_can_be_smaller_than_its_draft_and_its_sequence_empty(folder: StateFolder) -> None:
    draft = folder.begin(3 * PAGE_BYTES)
    fill(draft, b"x" * (PAGE_BYTES + 5))
    state = check_listed(folder, draft.finish(np.empty(0, np.int32), principal="uid:0", n_bytes=PAGE_BYTES + 5))
    assert content(folder, state.name) == b"x" * (PAGE_BYTES + 5)
    assert state.tokens.tolist() == []
    assert folder.used_bytes == file_bytes(folder, state) < PAYLOAD_AT + PAGE_BYTES + 200


def test_a_new_draft_has_its_full_size_and_contains_zeros(folder: StateFolder) -> None:
    draft = folder.begin(10_000)
    assert os.pread(draft.fd, 20_000, draft.offset) == bytes(10_000)
    draft.abandon()


def test_an_open_reader_keeps_a_removed_state(path: Path, folder: StateFolder) -> None:
    state = save(folder, b"read on")
    loaded = folder.open(state.name)
    folder.remove(state.name)
    folder.remove(state.name)
    assert state.name not in folder
    assert folder.used_bytes == 0
    assert content_of(loaded) == b"read on"
    loaded.close()
    with pytest.raises(StateFileError, match="removed"):
        folder.open(state.name)
    with pytest.raises(StateFileError, match="removed"):
        folder.touch(state.name)


@pytest.mark.parametrize("name", ["", "key", "../key", "A" * 32, "a" * 31, "a" * 33, "a" * 31 + "\n", "é" * 32])
def test_invalid_names_are_rejected(folder: StateFolder, name: str) -> None:
    for function in (folder.open, folder.remove, folder.touch):
        with pytest.raises(StateFileError, match="is not the name of a state"):
            function(name)
    assert name not in folder


def test_files_are_accessible_for_their_owner_alone(path: Path, folder: StateFolder) -> None:
    before = os.umask(0)
    try:
        save(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


# -- drafts -------------------------------------------------------------------------------------------


def test_an_abandoned_draft_leaves_no_file(path: Path, folder: StateFolder) -> None:
    draft = folder.begin(MIB)
    assert folder.used_bytes > MIB
    draft.abandon()
    draft.abandon()
    assert folder.used_bytes == 0
    assert {file.name for file in path.iterdir()} == {"lock"}
    for use in (lambda: draft.fd, lambda: draft.finish([1], principal="uid:1")):
        with pytest.raises(StateFileError, match="is closed"):
            use()


def test_another_process_can_write_and_read_through_descriptors(path: Path, folder: StateFolder) -> None:
    """The other process only gets a descriptor, an offset and a size."""
    data = np.random.default_rng(1).bytes(2 * PAGE_BYTES + 77)

    draft = folder.begin(len(data) + 100_000)
    in_another_process(
        "memory = mmap.mmap(fd, size, offset=offset)\nmemory[:] = sys.stdin.buffer.read()", draft, len(data), data
    )
    state = check_listed(folder, draft.finish(np.array([1], np.int32), principal="p", n_bytes=len(data)))
    with contextlib.closing(folder.open(state.name)) as reader:
        assert reader.state.n_bytes == len(data)
        read = "memory = mmap.mmap(fd, size, offset=offset, prot=mmap.PROT_READ)\nsys.stdout.buffer.write(memory)"
        assert in_another_process(read, reader, len(data)) == data
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(reader.fd, b"x")
    for closed in (draft, reader):
        with pytest.raises(StateFileError, match="is closed"):
            _ = closed.fd


def in_another_process(program: str, file: StateDraft | StateReader, size: int, stdin: bytes = b"") -> bytes:
    program = f"import mmap, sys\nfd, offset, size = map(int, sys.argv[1:])\n{program}"
    command = [sys.executable, "-S", "-c", program, str(file.fd), str(file.offset), str(size)]
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, pass_fds=[file.fd], check=True).stdout


def test_a_draft_has_its_space_on_disk_before_it_is_written(folder: StateFolder) -> None:
    draft = folder.begin(3 * PAGE_BYTES)
    assert 512 * os.fstat(draft.fd).st_blocks >= 3 * PAGE_BYTES
    draft.abandon()


def test_descriptors_are_never_leaked(path: Path, folder: StateFolder) -> None:
    gc.collect()  # what other tests have dropped
    before = len(os.listdir("/dev/fd"))
    state = save(folder)
    folder.open(state.name).close()
    folder.begin(100).abandon()
    with pytest.raises(StateFileError):
        folder.begin(100).finish([-1], principal="p")
    with pytest.raises(StateFileError):
        folder.begin(ROOM)
    path_of(path, state).write_bytes(b"damaged")
    with pytest.raises(CorruptState):
        folder.open(state.name)
    dropped = folder.begin(100), folder.open(save(folder).name)
    assert len(os.listdir("/dev/fd")) == before + 2
    del dropped
    gc.collect()
    assert len(os.listdir("/dev/fd")) == before


def test_the_next_scan_removes_the_file_of_a_dropped_draft(path: Path, folder: StateFolder) -> None:
    draft = folder.begin(MIB)
    folder.scan()
    assert len(list(path.glob("*.tmp"))) == 1, "a scan must not remove the file of a draft in use"
    del draft
    gc.collect()
    assert folder.used_bytes == 0
    assert len(list(path.glob("*.tmp"))) == 1
    assert folder.scan() == []
    assert not list(path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("tokens", "more"),
    [
        ([[1]], {}),
        ([0.5], {}),
        ([-1], {}),
        ([MAX_TOKEN_ID + 1], {}),
        (["a"], {}),
        (None, {}),
        (np.zeros(MAX_TOKENS + 1, np.int8), {}),
        ([1], {"n_bytes": 0}),
        ([1], {"n_bytes": 101}),
        ([1], {"n_bytes": -1}),
        ([1], {"principal": ""}),
        ([1], {"principal": "é" * (MAX_PRINCIPAL_BYTES // 2) + "e"}),
        ([1], {"principal": "\ud800"}),
        ([1], {"adapters": "x" * MAX_EXTRA_BYTES}),
        ([1], {"adapters": "\ud800"}),
    ],
)
def test_invalid_arguments_of_finish_are_rejected_and_leave_no_file(
    folder: StateFolder, path: Path, tokens: Any, more: Any
) -> None:
    draft = folder.begin(100)
    with pytest.raises(StateFileError):
        draft.finish(tokens, **{"principal": "uid:1"} | more)
    assert folder.used_bytes == 0
    assert {file.name for file in path.iterdir()} == {"lock"}


def test_a_crash_at_any_point_leaves_a_whole_state_or_none(path: Path, folder: StateFolder) -> None:
    crashes = 0
    for run in crash_everywhere():
        with run:
            draft = folder.begin(10_000)
            fill(draft, b"x" * 10_000)
            draft.finish([1, 2], principal="uid:1")
        folder.close()
        folder = opened(path)
        found = folder.scan()
        assert folder.problems == []
        assert [content(folder, state.name) for state in found] in ([], [b"x" * 10_000])
        assert found or run.crashed
        assert len([*path.iterdir()]) == len(found) + 1, "nothing else but the lock"
        for state in found:
            folder.remove(state.name)
        crashes += run.crashed
    assert crashes > 5
    folder.close()


def test_finishing_a_draft_whose_file_was_removed_fails(path: Path, folder: StateFolder) -> None:
    draft = folder.begin(5000)
    [file] = path.glob("*.tmp")
    file.unlink()
    with pytest.raises(StateFileError, match="it was removed while the daemon was running"):
        draft.finish([1], principal="uid:1")
    assert folder.used_bytes == 0


# -- eviction -----------------------------------------------------------------------------------------


def test_least_recently_used_states_make_room(tmp_path: Path) -> None:
    folder = opened(tmp_path / "s", max_bytes=3 * (MIB + PAYLOAD_AT + 1000))
    folder.scan()
    first, second, third = (save(folder, bytes([i]) * MIB) for i in range(3))
    content(folder, first.name)
    fourth = save(folder, b"4" * MIB)
    assert [state.name in folder for state in (first, second, third, fourth)] == [True, False, True, True]
    assert folder.used_bytes <= folder.max_bytes
    with pytest.raises(StateFileError, match="removed"):
        folder.open(second.name)

    folder.touch(third.name)
    folder.close()
    folder = opened(tmp_path / "s", max_bytes=folder.max_bytes)  # the order survives a restart
    assert [state.name for state in folder.scan()] == [first.name, fourth.name, third.name]
    save(folder, b"5" * 2 * MIB)
    assert [state.name in folder for state in (first, fourth, third)] == [False, False, True]
    folder.close()


def test_a_draft_that_can_never_fit_evicts_nothing(folder: StateFolder) -> None:
    state = save(folder)
    draft = folder.begin(ROOM // 2)
    for n_bytes in (ROOM, ROOM // 2, 1 << 62, 0, -1):
        with pytest.raises(StateFileError):
            folder.begin(n_bytes)
    assert state.name in folder
    draft.abandon()


def test_tokens_count_towards_the_limit(tmp_path: Path) -> None:
    folder = opened(tmp_path / "s", max_bytes=2 * MIB)
    folder.scan()
    state = save(folder)
    draft = folder.begin(MIB)
    with pytest.raises(StateFileError, match="no room"):
        draft.finish(np.zeros(MIB // 2, np.int32), principal="uid:1")
    assert state.name in folder
    draft = folder.begin(MIB)
    draft.finish(np.zeros(MIB // 4 - 8192, np.int32), principal="uid:1")
    assert state.name not in folder, "the older one made room"
    assert folder.used_bytes <= folder.max_bytes
    folder.close()


def test_existing_states_make_room_after_the_limit_was_lowered(path: Path, folder: StateFolder) -> None:
    states = [save(folder, bytes(MIB)) for _ in range(4)]
    folder.close()
    smaller = opened(path, max_bytes=2 * MIB)
    assert len(smaller.scan()) == 4
    kept = save(smaller, bytes(MIB // 2))
    assert [state.name in smaller for state in (*states, kept)] == [False, False, False, True, True]
    smaller.close()


def test_many_threads_can_save_and_read(path: Path, folder: StateFolder) -> None:
    names: list[str] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(20):
            data = bytes([number]) * int(rng.integers(1, MIB))
            draft = folder.begin(len(data))
            fill(draft, data)
            if rng.random() < 0.2:
                draft.abandon()
                continue
            names.append(draft.finish([number], principal=f"uid:{number}").name)
            name = names[int(rng.integers(len(names)))]
            try:
                loaded = folder.open(name)
                assert content_of(loaded) == bytes([loaded.state.tokens[0]]) * loaded.state.n_bytes
            except CorruptState:
                raise
            except StateFileError:  # evicted
                assert name not in folder

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert quarantined(path) == []
    on_disk = {file.name.removesuffix(SUFFIX): file.stat().st_size for file in path.glob(f"*{SUFFIX}")}
    assert {name for name in names if name in folder} == set(on_disk)
    assert folder.used_bytes == sum(on_disk.values()) <= ROOM
    assert {state.name for state in folder.scan()} == set(on_disk)


# -- folders ------------------------------------------------------------------------------------------


def test_only_one_process_can_use_a_folder(path: Path, folder: StateFolder) -> None:
    with pytest.raises(StateFileError, match=f"in use by process {os.getpid()}"):
        opened(path)
    folder.close()
    folder.close()
    opened(path).close()


def test_a_folder_that_others_can_write_to_is_rejected(path: Path) -> None:
    path.mkdir()
    for mode in (0o770, 0o707):
        path.chmod(mode)
        with pytest.raises(StateFileError, match="others can write"):
            opened(path)
    path.chmod(0o755)
    opened(path).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away: run as root")
def test_files_and_folders_of_another_user_are_rejected(path: Path, folder: StateFolder) -> None:
    state = save(folder)
    os.chown(path_of(path, state), 12345, -1)
    assert folder.scan() == []
    assert folder.problems == [f"{state.name}{SUFFIX}: ignored, it is owned by another user"]
    with pytest.raises(StateFileError, match="owned by another user"):
        folder.open(state.name)
    folder.close()
    os.chown(path, 12345, -1)
    with pytest.raises(StateFileError, match="belongs to another user"):
        opened(path)


def test_a_path_that_cannot_be_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "file", tmp_path / "file" / "states"):
        with pytest.raises(StateFileError, match=str(path)):
            opened(path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_a_folder_that_cannot_be_created_was_not_removed() -> None:
    with pytest.raises(StateFileError, match="choose a folder that can be created") as error:
        opened(Path("/proc/x/states"))
    assert "removed" not in str(error.value)


def test_a_removed_folder_is_created_again(path: Path, folder: StateFolder) -> None:
    state, draft = save(folder), folder.begin(1000)
    shutil.rmtree(path)
    with pytest.raises(StateFileError, match="it was removed while the daemon was running"):
        draft.finish([1], principal="uid:1")
    with pytest.raises(StateFileError, match="it was removed while the daemon was running"):
        folder.open(state.name)
    later = save(folder, b"later")
    assert folder.used_bytes == file_bytes(folder, later)
    assert state.name not in folder
    with pytest.raises(StateFileError, match=f"in use by process {os.getpid()}"):
        opened(path)
    folder.close()
    again = opened(path)
    assert [found.name for found in again.scan()] == [later.name]
    assert content(again, later.name) == b"later"
    again.close()


def test_a_removed_folder_that_cannot_be_created_again_is_an_error_each_time(path: Path, folder: StateFolder) -> None:
    save(folder)
    shutil.rmtree(path)
    path.write_bytes(b"a file in its place")
    for _ in range(2):
        with pytest.raises(StateFileError, match=str(path)):
            folder.begin(1000)
    path.unlink()
    save(folder)


def test_methods_of_a_closed_folder_raise_its_error(folder: StateFolder) -> None:
    state, draft = save(folder), folder.begin(1000)
    folder.close()
    for use in (
        folder.scan,
        lambda: folder.begin(9),
        lambda: folder.open(state.name),
        lambda: draft.finish([], principal="uid:1"),
    ):
        with pytest.raises(StateFileError):
            use()


def test_links_pipes_and_unrelated_files_are_ignored(path: Path, folder: StateFolder, tmp_path: Path) -> None:
    state = save(folder)
    outside = tmp_path / "outside"
    outside.write_bytes(path_of(path, state).read_bytes())
    names = {kind: f"{kind * 32}{SUFFIX}" for kind in "abc"}
    (path / names["a"]).symlink_to(outside)
    os.mkfifo(path / names["b"])
    (path / names["c"]).mkdir()
    (path / "README").write_text("unrelated")
    (path / "link.tmp").symlink_to(outside)
    assert [found.name for found in folder.scan()] == [state.name]
    assert sorted(line.split(":")[0] for line in folder.problems) == sorted([*names.values(), "README", "link.tmp"])
    assert folder.used_bytes == file_bytes(folder, state)
    for kind in "abc":
        with pytest.raises(StateFileError):
            folder.open(kind * 32)
    assert outside.exists()
    assert quarantined(path) == []


# -- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", [2, 8, 99])
@pytest.mark.parametrize("page", range(4))
def test_every_page_is_verified_with_any_number_of_readers(
    path: Path, monkeypatch: pytest.MonkeyPatch, readers: int, page: int
) -> None:
    monkeypatch.setattr("uma_trio.daemon.store.state_folder.PAGES_PER_READER", 1)
    folder = opened(path, readers=readers)
    whole = os.urandom(3 * PAGE_BYTES + 17)
    state = save(folder, whole)
    assert content(folder, state.name) == whole
    file = path_of(path, state)
    data = bytearray(file.read_bytes())
    data[PAYLOAD_AT + page * PAGE_BYTES + 16] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptState, match=f"altered between byte {page * PAGE_BYTES} and"):
        folder.open(state.name)
    folder.close()


def test_an_altered_state_in_the_page_cache_can_be_opened_for_others_to_verify(path: Path, folder: StateFolder) -> None:
    whole = os.urandom(3 * PAGE_BYTES + 17)
    state = save(folder, whole)
    with contextlib.closing(folder.open(state.name)) as verified:
        assert verified.hashes == b""
    file = path_of(path, state)
    data = bytearray(file.read_bytes())
    data[PAYLOAD_AT + 2 * PAGE_BYTES] ^= 1
    file.write_bytes(data)
    if can_tell_what_is_cached(file):
        with contextlib.closing(folder.open(state.name, verify=False)) as found:
            pages = [whole[at : at + PAGE_BYTES] for at in range(0, len(whole), PAGE_BYTES)]
            assert found.hashes == b"".join(map(hash_of, pages))
    with pytest.raises(CorruptState, match="altered between byte 2097152 and"):
        folder.open(state.name)
    assert quarantined(path)


def can_tell_what_is_cached(file: Path) -> bool:
    """Some file systems cannot, such as tmpfs."""
    with file.open("rb") as opened:
        try:
            return os.preadv(opened.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except (AttributeError, OSError):
            return False


@pytest.mark.parametrize("at", [20, -20], ids=["header", "tail"])
def test_the_metadata_are_always_verified(path: Path, folder: StateFolder, at: int) -> None:
    state = save(folder, os.urandom(PAGE_BYTES))
    data = bytearray(path_of(path, state).read_bytes())
    data[at] ^= 1
    path_of(path, state).write_bytes(data)
    with pytest.raises(CorruptState):
        folder.open(state.name, verify=False)


def test_a_state_that_is_not_in_the_page_cache_is_verified(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = save(folder, os.urandom(PAGE_BYTES))
    monkeypatch.setattr("uma_trio.daemon.store.state_folder._is_cached", lambda fd, n_bytes: False)
    with contextlib.closing(folder.open(state.name, verify=False)) as reader:
        assert reader.hashes == b""


SAMPLE = np.random.default_rng(3).bytes(700)


@pytest.fixture(scope="module")
def sample() -> Iterator[tuple[StateFolder, Path, bytes]]:
    """A folder with one state, the path of its file, and the intact content of that file."""
    with tempfile.TemporaryDirectory() as where:
        path = Path(where, "s")
        folder = opened(path)
        folder.scan()
        state = save(folder, SAMPLE, tokens=range(40), adapters="a")
        file = path_of(path, state)
        yield folder, file, file.read_bytes()
        folder.close()


def assert_quarantined(sample: tuple[StateFolder, Path, bytes], data: bytes) -> None:
    """Checks that a file with ``data`` is quarantined: by ``scan`` or by ``open`` after it, and by ``open`` alone."""
    folder, file, good = sample
    assert data != good
    name = file.name.removesuffix(SUFFIX)
    for scan_first in (True, False):
        file.write_bytes(data)
        found = folder.scan() if scan_first else []
        if found or not scan_first:
            with pytest.raises(CorruptState, match="quarantined"):
                folder.open(name)
        assert name not in folder
        assert not file.exists()
        assert file.with_name(file.name + QUARANTINE_SUFFIX).read_bytes() == data
    file.write_bytes(good)
    assert [state.name for state in folder.scan()] == [name]
    assert content(folder, name) == SAMPLE


@given(st.data())
def test_a_flipped_bit_is_detected_anywhere(sample: tuple[StateFolder, Path, bytes], data: st.DataObject) -> None:
    good = sample[2]
    parts = [(0, FIELDS.size), (FIELDS.size, PAYLOAD_AT), (PAYLOAD_AT, PAYLOAD_AT + 700), (PAYLOAD_AT + 700, len(good))]
    first, end = data.draw(st.sampled_from(parts))
    bits = data.draw(st.sets(st.integers(8 * first, 8 * end - 1), min_size=1, max_size=4))
    changed = bytearray(good)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    assert_quarantined(sample, bytes(changed))


@given(st.data())
def test_a_shorter_or_longer_file_is_detected(sample: tuple[StateFolder, Path, bytes], data: st.DataObject) -> None:
    good = sample[2]
    size = data.draw(st.integers(0, len(good) - 1) | st.sampled_from([0, 1, FIELDS.size, PAYLOAD_AT, len(good) - 1]))
    assert_quarantined(sample, good[:size])
    assert_quarantined(sample, good + data.draw(st.binary(min_size=1, max_size=50)))
    assert_quarantined(sample, good[:size] + good[size + 1 :])


@given(st.binary(max_size=600), st.integers(0, PAYLOAD_AT + 1000), st.integers(0, 2))
def test_arbitrary_bytes_are_quarantined(
    sample: tuple[StateFolder, Path, bytes], noise: bytes, at: int, how: int
) -> None:
    good = sample[2]
    made = [noise, good[:at] + noise + good[at + len(noise) :], good[:at] + noise][how]
    if made != good:
        assert_quarantined(sample, made)


def test_swapped_pages_are_detected(path: Path, folder: StateFolder) -> None:
    state = save(folder, b"a" * PAGE_BYTES + b"b" * PAGE_BYTES + b"c")
    file = path_of(path, state)
    data = bytearray(file.read_bytes())
    data[PAYLOAD_AT : PAYLOAD_AT + 2 * PAGE_BYTES] = b"b" * PAGE_BYTES + b"a" * PAGE_BYTES
    file.write_bytes(data)
    assert len(folder.scan()) == 1, "the header is intact"
    with pytest.raises(CorruptState, match="altered between byte 0 and"):
        folder.open(state.name)


def test_a_file_under_another_name_is_detected(path: Path, folder: StateFolder) -> None:
    one, other = save(folder, b"one"), save(folder, b"other")
    content_of_one = path_of(path, one).read_bytes()
    path_of(path, one).write_bytes(path_of(path, other).read_bytes())
    path_of(path, other).write_bytes(content_of_one)
    assert folder.scan() == []
    assert len(folder.problems) == len(quarantined(path)) == 2
    assert all("the file of another state" in line for line in folder.problems)


def test_a_file_from_another_folder_is_accepted(path: Path, folder: StateFolder, tmp_path: Path) -> None:
    """Hashes detect damage, not origin: names are random, and only its owner can write to the folder."""
    elsewhere = opened(tmp_path / "elsewhere")
    state = save(elsewhere)
    os.rename(path_of(tmp_path / "elsewhere", state), path_of(path, state))
    elsewhere.close()
    assert [found.name for found in folder.scan()] == [state.name]
    assert content(folder, state.name) == b"a state"


def test_quarantined_files_count_and_are_evicted_first(tmp_path: Path) -> None:
    path = tmp_path / "s"
    folder = opened(path, max_bytes=3 * MIB)
    folder.scan()
    old, damaged = save(folder, b"o" * MIB), save(folder, b"d" * MIB)
    used = folder.used_bytes
    data = bytearray(path_of(path, damaged).read_bytes())
    data[-1] ^= 1
    path_of(path, damaged).write_bytes(data)
    assert [state.name for state in folder.scan()] == [old.name]
    assert folder.used_bytes == used == file_bytes(folder, old) + len(data)
    assert [state.name for state in folder.scan()] == [old.name]
    assert folder.problems == [], "a problem is reported once"
    assert folder.used_bytes == used
    new = save(folder, b"n" * MIB)
    assert old.name in folder
    assert new.name in folder
    assert not list(path.glob(f"*{QUARANTINE_SUFFIX}"))
    folder.close()


def test_states_of_another_model_stay_until_room_is_needed(path: Path, folder: StateFolder) -> None:
    theirs = save(folder, b"t" * MIB)
    folder.close()
    other = opened(path, fingerprint=b"another")
    assert other.scan() == []
    assert other.problems == [f"{theirs.name}{SUFFIX}: ignored, it is from another model, library or layout"]
    assert quarantined(path) == []
    assert other.used_bytes == file_bytes(other, theirs)
    with pytest.raises(StateFileError, match="from another model"):
        other.open(theirs.name)
    ours = save(other, b"o")
    other.close()
    again = opened(path, max_bytes=2 * MIB)
    assert [state.name for state in again.scan()] == [theirs.name]
    again.close()
    other = opened(path, max_bytes=PAYLOAD_AT + MIB + 5000, fingerprint=b"another")
    assert [state.name for state in other.scan()] == [ours.name]
    save(other, b"n" * 9000)
    assert not path_of(path, theirs).exists(), "the least recently used"
    assert ours.name in other
    other.close()


def tail_with(checkpoints: Any) -> tuple[bytes, Header]:
    """The tail of a file of 30 tokens and 100 bytes, with this list of checkpoints."""
    extra = msgspec.json.encode({"checkpoints": checkpoints})
    tail = np.arange(30, dtype="<i4").tobytes() + extra + bytes(HASH_BYTES)
    return tail, Header("0" * 32, "p", 0.0, 100, 30, len(extra), hash_of(tail))


@pytest.mark.parametrize(
    "listed", [7, [7], [[1, 2, 3]], [["1", 2]], [[20, 5], [10, 5]], [[0, 5]], [[31, 5]], [[5, 0]], [[5, 100]], {"5": 6}]
)
def test_a_files_list_of_checkpoints_is_validated(listed: Any) -> None:
    assert decode_tail(*tail_with([[10, 5], [30, 5]]))[0].checkpoints == ((10, 5), (30, 5))
    with pytest.raises(DamagedFile, match="metadata"):
        decode_tail(*tail_with(listed))


# -- arbitrary content with valid hashes ---------------------------------------------------------------


EXTREMES = st.sampled_from([0, 1, 255, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, (1 << 64) - 1])


@given(EXTREMES, EXTREMES, EXTREMES, st.floats())
def test_sizes_in_a_header_are_checked_before_anything_is_read(
    n_bytes: int, n_tokens: int, extra: int, saved_at: float
) -> None:
    fingerprint = fingerprint_of("f")
    header = Header("0" * 32, "p", saved_at, n_bytes, n_tokens % (1 << 32), extra % (1 << 32), b"h" * HASH_BYTES)
    data = encode_header(header, fingerprint)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFile):
            decode_header(data, header.name, len(data) + 1, fingerprint)
        assert tracemalloc.get_traced_memory()[1] < 1 << 17
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=100), st.integers(0, 40))
def test_an_arbitrary_tail_with_a_valid_hash_is_read_or_quarantined(
    sample: tuple[StateFolder, Path, bytes], noise: bytes, at: int
) -> None:
    folder, file, good = sample
    tail = bytearray(good[PAYLOAD_AT + len(SAMPLE) :])
    tail[at * 4 : at * 4 + len(noise)] = noise[: len(tail) - at * 4]
    fields = list(FIELDS.unpack_from(good))
    fields[-1] = hash_of(tail)
    hashed = FIELDS.pack(*fields).ljust(PAYLOAD_AT - HASH_BYTES, b"\0")
    file.write_bytes(hashed + hash_of(hashed) + SAMPLE + tail)
    for state in folder.scan():
        try:
            assert content(folder, state.name) == SAMPLE
            assert all(0 <= token <= MAX_TOKEN_ID or token >= PLACEHOLDER for token in state.tokens.tolist())
        except CorruptState:
            assert not file.exists()
    file.write_bytes(good)
    folder.scan()


def test_files_have_the_documented_layout(path: Path, folder: StateFolder) -> None:
    state = save(folder, b"\x01" * 5000, tokens=[7, 8], principal="uid:42")
    data = path_of(path, state).read_bytes()
    assert data[:12] == b"UMASTATE\x02\0\0\0"
    assert bytes.fromhex(state.name) == data[16:32]
    assert data[64:72] == b"\x06uid:42\0"
    assert data[PAYLOAD_AT : PAYLOAD_AT + 5000] == b"\x01" * 5000
    assert struct.unpack_from("<ii", data, PAYLOAD_AT + 5000) == (7, 8)
    assert data[PAYLOAD_AT + 5008 : PAYLOAD_AT + 5010] == b"{}"
    assert len(data) == PAYLOAD_AT + 5010 + HASH_BYTES
    assert data[-HASH_BYTES:] == hash_of(b"\x01" * 5000)
