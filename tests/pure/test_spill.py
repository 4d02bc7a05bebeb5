"""States in files: what comes back is what was saved, or it does not come back."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import struct
import tempfile
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

from uma_trio.store import CorruptState, Spilled, SpillError, SpillFolder
from uma_trio.store.spill import ASIDE, KEY, SUFFIX
from uma_trio.store.spill_format import (
    CODE_BYTES,
    FIXED,
    MAX_EXTRA_BYTES,
    PAGE_BYTES,
    PAYLOAD_AT,
    Head,
    Unusable,
    code_of,
    fingerprint_of,
    make_header,
    read_header,
)
from uma_trio.store.tokens import MAX_TOKEN_ID, MAX_TOKENS

MIB = 1 << 20
ROOM = 16 * MIB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "states"


def opened(path: Path, **changes: Any) -> SpillFolder:
    settings: dict[str, Any] = {"max_bytes": ROOM, "fingerprint": "library, model, layout"} | changes
    return SpillFolder(path, **settings)


@pytest.fixture
def folder(path: Path) -> Iterator[SpillFolder]:
    states = opened(path)
    states.scan()
    yield states
    states.close()


def save(folder: SpillFolder, content: bytes = b"a state", *, tokens: Any = (1, 2, 3), **more: Any) -> Spilled:
    draft = folder.begin(len(content))
    draft.view[:] = content
    return folder_agrees(folder, draft.finish(np.array(tokens, np.int32), **{"tenant": 1000} | more))


def folder_agrees(folder: SpillFolder, state: Spilled) -> Spilled:
    """What ``finish`` says is what the next ``scan`` says."""
    [found] = [each for each in folder.scan() if each.name == state.name]
    assert found.tokens.tolist() == state.tokens.tolist()
    assert attrs.astuple(found, filter=not_tokens) == attrs.astuple(state, filter=not_tokens)
    assert os.stat(folder._folder.path / (state.name + SUFFIX)).st_size == state.file_bytes
    return state


def not_tokens(field: Any, _: Any) -> bool:
    return str(field.name) != "tokens"


def content(folder: SpillFolder, name: str) -> bytes:
    with folder.open(name) as loaded:
        assert loaded.view.readonly
        return bytes(loaded.view)


def file_of(path: Path, state: Spilled) -> Path:
    return path / (state.name + SUFFIX)


def aside(path: Path) -> list[str]:
    """Files that were found damaged."""
    return sorted(file.name for file in path.glob(f"*{ASIDE}"))


# -- there and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n_bytes", [1, 4096, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES, 5 * PAGE_BYTES // 2]
)
def test_a_state_comes_back_also_after_a_restart(path: Path, folder: SpillFolder, n_bytes: int) -> None:
    data = np.random.default_rng(n_bytes).bytes(n_bytes)
    state = save(folder, data, tokens=range(70), tenant=-5, extra={"model": "m", "parts": [1, None, {"a": 0.5}]})
    assert content(folder, state.name) == data
    folder.close()
    again = opened(path)
    [found] = again.scan()
    assert again.problems == []
    assert (found.tenant, found.extra, found.tokens.tolist()) == (-5, state.extra, list(range(70)))
    assert content(again, found.name) == data
    again.close()


def test_a_state_may_turn_out_smaller_and_its_sequence_empty(folder: SpillFolder) -> None:
    draft = folder.begin(3 * PAGE_BYTES)
    draft.view[: PAGE_BYTES + 5] = b"x" * (PAGE_BYTES + 5)
    state = folder_agrees(folder, draft.finish([], tenant=0, n_bytes=PAGE_BYTES + 5))
    assert content(folder, state.name) == b"x" * (PAGE_BYTES + 5)
    assert state.tokens.tolist() == []
    assert folder.used_bytes == state.file_bytes < PAYLOAD_AT + PAGE_BYTES + 200


def test_an_unwritten_draft_is_of_zeros_and_of_its_size(folder: SpillFolder) -> None:
    draft = folder.begin(10_000)
    assert len(draft.view) == 10_000
    assert bytes(draft.view) == bytes(10_000)
    draft.abandon()


def test_a_state_that_was_removed_is_gone_and_who_reads_it_reads_on(path: Path, folder: SpillFolder) -> None:
    state = save(folder, b"read on")
    loaded = folder.open(state.name)
    folder.remove(state.name)
    folder.remove(state.name)
    assert state.name not in folder
    assert folder.used_bytes == 0
    assert bytes(loaded.view) == b"read on"
    loaded.close()
    loaded.close()
    with pytest.raises(SpillError, match="removed"):
        folder.open(state.name)
    with pytest.raises(SpillError, match="removed"):
        folder.touch(state.name)


@pytest.mark.parametrize("name", ["", "key", "../key", "A" * 32, "a" * 31, "a" * 33, "a" * 31 + "\n", "é" * 32])
def test_only_names_of_states_are_opened(folder: SpillFolder, name: str) -> None:
    for function in (folder.open, folder.remove, folder.touch):
        with pytest.raises(SpillError, match="no name of a state"):
            function(name)
    assert name not in folder


def test_nobody_else_may_read_or_write(path: Path, folder: SpillFolder) -> None:
    before = os.umask(0)
    try:
        save(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


# -- drafts -------------------------------------------------------------------------------------------


def test_an_abandoned_draft_leaves_nothing(path: Path, folder: SpillFolder) -> None:
    draft = folder.begin(MIB)
    assert folder.used_bytes > MIB
    draft.abandon()
    draft.abandon()
    assert folder.used_bytes == 0
    assert {file.name for file in path.iterdir()} == {KEY, "lock"}
    for use in (lambda: draft.view, lambda: draft.finish([1], tenant=1)):
        with pytest.raises(SpillError, match="finished or abandoned"):
            use()


def test_a_dropped_draft_leaves_a_file_for_the_next_scan(path: Path, folder: SpillFolder) -> None:
    draft = folder.begin(MIB)
    folder.scan()
    assert len(list(path.glob("*.tmp"))) == 1, "a scan must not take a draft's file away"
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
        ([1], {"tenant": 1 << 63}),
        ([1], {"extra": {"a": "x" * MAX_EXTRA_BYTES}}),
        ([1], {"extra": {"a": object()}}),
        ([1], {"extra": {"a": float("nan")}}),
        ([1], {"extra": {"a": "\ud800"}}),
        ([1], {"extra": {1: (2,)}}),
    ],
)
def test_what_cannot_be_kept_is_refused_and_leaves_nothing(
    folder: SpillFolder, path: Path, tokens: Any, more: Any
) -> None:
    draft = folder.begin(100)
    with pytest.raises(SpillError):
        draft.finish(tokens, **{"tenant": 1} | more)
    assert folder.used_bytes == 0
    assert {file.name for file in path.iterdir()} == {KEY, "lock"}


def test_who_still_holds_a_part_of_the_view_is_not_in_the_way(folder: SpillFolder) -> None:
    draft = folder.begin(5000)
    part = np.frombuffer(draft.view, np.uint8)[:100]
    part[:] = 7
    state = draft.finish([1], tenant=1)
    loaded = folder.open(state.name)
    seen = np.frombuffer(loaded.view, np.uint8)
    loaded.close()
    assert seen[:101].tolist() == [7] * 100 + [0]


def test_a_draft_whose_file_has_vanished_is_an_error(path: Path, folder: SpillFolder) -> None:
    draft = folder.begin(5000)
    [file] = path.glob("*.tmp")
    file.unlink()
    with pytest.raises(SpillError, match="somebody has removed it"):
        draft.finish([1], tenant=1)
    assert folder.used_bytes == 0


# -- room ---------------------------------------------------------------------------------------------


def test_the_longest_unused_make_room(tmp_path: Path) -> None:
    folder = opened(tmp_path / "s", max_bytes=3 * (MIB + PAYLOAD_AT + 1000))
    folder.scan()
    first, second, third = (save(folder, bytes([i]) * MIB) for i in range(3))
    content(folder, first.name)
    fourth = save(folder, b"4" * MIB)
    assert [state.name in folder for state in (first, second, third, fourth)] == [True, False, True, True]
    assert folder.used_bytes <= folder.max_bytes
    with pytest.raises(SpillError, match="removed"):
        folder.open(second.name)

    folder.touch(third.name)
    folder.close()
    folder = opened(tmp_path / "s", max_bytes=folder.max_bytes)  # the order outlives a restart
    assert [state.name for state in folder.scan()] == [first.name, fourth.name, third.name]
    save(folder, b"5" * 2 * MIB)
    assert [state.name in folder for state in (first, fourth, third)] == [False, False, True]
    folder.close()


def test_what_can_never_fit_removes_nothing(folder: SpillFolder) -> None:
    state = save(folder)
    draft = folder.begin(ROOM // 2)
    for n_bytes in (ROOM, ROOM // 2, 1 << 62, 0, -1):
        with pytest.raises(SpillError):
            folder.begin(n_bytes)
    assert state.name in folder
    draft.abandon()


def test_tokens_need_room_too(tmp_path: Path) -> None:
    folder = opened(tmp_path / "s", max_bytes=2 * MIB)
    folder.scan()
    state = save(folder)
    draft = folder.begin(MIB)
    with pytest.raises(SpillError, match="no room"):
        draft.finish(np.zeros(MIB // 2, np.int32), tenant=1)
    assert state.name in folder
    draft = folder.begin(MIB)
    draft.finish(np.zeros(MIB // 4 - 8192, np.int32), tenant=1)
    assert state.name not in folder, "the older one made room"
    assert folder.used_bytes <= folder.max_bytes
    folder.close()


def test_what_was_found_makes_room_also_where_the_limit_was_lowered(path: Path, folder: SpillFolder) -> None:
    states = [save(folder, bytes(MIB)) for _ in range(4)]
    folder.close()
    smaller = opened(path, max_bytes=2 * MIB)
    assert len(smaller.scan()) == 4
    kept = save(smaller, bytes(MIB // 2))
    assert [state.name in smaller for state in (*states, kept)] == [False, False, False, True, True]
    smaller.close()


def test_many_threads_save_and_read(path: Path, folder: SpillFolder) -> None:
    names: list[str] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(20):
            data = bytes([number]) * int(rng.integers(1, MIB))
            draft = folder.begin(len(data))
            draft.view[:] = data
            if rng.random() < 0.2:
                draft.abandon()
                continue
            names.append(draft.finish([number], tenant=number).name)
            name = names[int(rng.integers(len(names)))]
            try:
                with folder.open(name) as loaded:
                    assert bytes(loaded.view) == bytes([loaded.tokens[0]]) * len(loaded.view)
            except CorruptState:
                raise
            except SpillError:  # made room
                assert name not in folder

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert aside(path) == []
    on_disk = {file.name.removesuffix(SUFFIX): file.stat().st_size for file in path.glob(f"*{SUFFIX}")}
    assert {name for name in names if name in folder} == set(on_disk)
    assert folder.used_bytes == sum(on_disk.values()) <= ROOM
    assert {state.name for state in folder.scan()} == set(on_disk)


# -- folders ------------------------------------------------------------------------------------------


def test_one_process_at_a_time(path: Path, folder: SpillFolder) -> None:
    with pytest.raises(SpillError, match="in use by another process"):
        opened(path)
    folder.close()
    folder.close()
    opened(path).close()


def test_a_folder_that_others_can_write_is_refused(path: Path) -> None:
    path.mkdir()
    for mode in (0o770, 0o707):
        path.chmod(mode)
        with pytest.raises(SpillError, match="others can write"):
            opened(path)
    path.chmod(0o755)
    opened(path).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away: run as root")
def test_what_belongs_to_somebody_else_is_refused(path: Path, folder: SpillFolder) -> None:
    state = save(folder)
    os.chown(file_of(path, state), 12345, -1)
    assert folder.scan() == []
    assert folder.problems == [f"{state.name}{SUFFIX}: left alone, it is another user's"]
    with pytest.raises(SpillError, match="another user's"):
        folder.open(state.name)
    folder.close()
    os.chown(path, 12345, -1)
    with pytest.raises(SpillError, match="belongs to another user"):
        opened(path)


def test_a_path_that_cannot_be_a_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "file", tmp_path / "file" / "states"):
        with pytest.raises(SpillError, match=str(path)):
            opened(path)


def test_a_folder_that_has_vanished_is_made_again(path: Path, folder: SpillFolder) -> None:
    state, draft = save(folder), folder.begin(1000)
    shutil.rmtree(path)
    with pytest.raises(SpillError, match="somebody has removed it"):
        draft.finish([1], tenant=1)
    with pytest.raises(SpillError, match="somebody has removed it"):
        folder.open(state.name)
    later = save(folder, b"later")
    assert folder.used_bytes == later.file_bytes
    assert state.name not in folder
    with pytest.raises(SpillError, match="in use by another process"):
        opened(path)
    folder.close()
    again = opened(path)
    assert [found.name for found in again.scan()] == [later.name]
    assert content(again, later.name) == b"later", "the key is the same"
    again.close()


def test_a_folder_that_cannot_be_made_again_is_an_error_each_time(path: Path, folder: SpillFolder) -> None:
    save(folder)
    shutil.rmtree(path)
    path.write_bytes(b"a file in its place")
    for _ in range(2):
        with pytest.raises(SpillError, match=str(path)):
            folder.begin(1000)
    path.unlink()
    save(folder)


def test_a_closed_folder_answers_with_its_error(folder: SpillFolder) -> None:
    state, draft = save(folder), folder.begin(1000)
    folder.close()
    for use in (
        folder.scan,
        lambda: folder.begin(9),
        lambda: folder.open(state.name),
        lambda: draft.finish([], tenant=1),
    ):
        with pytest.raises(SpillError):
            use()


@pytest.mark.parametrize("key", [b"", b"short", b"k" * 33, b"k" * 100_000])
def test_a_key_that_is_none_says_what_to_do(path: Path, folder: SpillFolder, key: bytes) -> None:
    folder.close()
    (path / KEY).write_bytes(key)
    with pytest.raises(SpillError, match="remove it"):
        opened(path)


def test_a_key_that_others_may_read_is_none(path: Path, folder: SpillFolder) -> None:
    folder.close()
    (path / KEY).chmod(0o640)
    with pytest.raises(SpillError, match="others may read it"):
        opened(path)


def test_links_pipes_and_strangers_are_left_alone(path: Path, folder: SpillFolder, tmp_path: Path) -> None:
    state = save(folder)
    outside = tmp_path / "outside"
    outside.write_bytes(file_of(path, state).read_bytes())
    names = {kind: f"{kind * 32}{SUFFIX}" for kind in "abc"}
    (path / names["a"]).symlink_to(outside)
    os.mkfifo(path / names["b"])
    (path / names["c"]).mkdir()
    (path / "README").write_text("a stranger")
    (path / "link.tmp").symlink_to(outside)
    assert [found.name for found in folder.scan()] == [state.name]
    assert sorted(line.split(":")[0] for line in folder.problems) == sorted([*names.values(), "README", "link.tmp"])
    assert folder.used_bytes == state.file_bytes
    for kind in "abc":
        with pytest.raises(SpillError):
            folder.open(kind * 32)
    assert outside.exists()
    assert aside(path) == []


# -- what was altered ---------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", [2, 8, 99])
@pytest.mark.parametrize("page", range(4))
def test_each_page_is_checked_however_many_check_them(path: Path, readers: int, page: int) -> None:
    folder = opened(path, readers=readers)
    whole = os.urandom(3 * PAGE_BYTES + 17)
    state = save(folder, whole)
    assert content(folder, state.name) == whole
    file = file_of(path, state)
    data = bytearray(file.read_bytes())
    data[PAYLOAD_AT + page * PAGE_BYTES + 16] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptState, match=f"altered between byte {page * PAGE_BYTES} and"):
        folder.open(state.name)
    folder.close()


SAMPLE = np.random.default_rng(3).bytes(700)


@pytest.fixture(scope="module")
def sample() -> Iterator[tuple[SpillFolder, Path, bytes]]:
    """A folder with one state: the folder, its file, and what belongs in it."""
    with tempfile.TemporaryDirectory() as where:
        path = Path(where, "s")
        folder = opened(path)
        folder.scan()
        state = save(folder, SAMPLE, tokens=range(40), extra={"a": 1})
        file = file_of(path, state)
        yield folder, file, file.read_bytes()
        folder.close()


def refuses(sample: tuple[SpillFolder, Path, bytes], data: bytes) -> None:
    """``data`` in the file is set aside, by ``scan`` or at the latest by ``open``, which says so by itself too."""
    folder, file, good = sample
    assert data != good
    name = file.name.removesuffix(SUFFIX)
    for scan_first in (True, False):
        file.write_bytes(data)
        found = folder.scan() if scan_first else []
        if found or not scan_first:
            with pytest.raises(CorruptState, match="set aside"):
                folder.open(name)
        assert name not in folder
        assert not file.exists()
        assert file.with_name(file.name + ASIDE).read_bytes() == data
    file.write_bytes(good)
    assert [state.name for state in folder.scan()] == [name]
    assert content(folder, name) == SAMPLE


@given(st.data())
def test_a_flipped_bit_is_recognised_wherever_it_is(
    sample: tuple[SpillFolder, Path, bytes], data: st.DataObject
) -> None:
    good = sample[2]
    parts = [(0, FIXED.size), (FIXED.size, PAYLOAD_AT), (PAYLOAD_AT, PAYLOAD_AT + 700), (PAYLOAD_AT + 700, len(good))]
    first, end = data.draw(st.sampled_from(parts))
    bits = data.draw(st.sets(st.integers(8 * first, 8 * end - 1), min_size=1, max_size=4))
    changed = bytearray(good)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    refuses(sample, bytes(changed))


@given(st.data())
def test_a_shorter_or_longer_file_is_recognised(sample: tuple[SpillFolder, Path, bytes], data: st.DataObject) -> None:
    good = sample[2]
    size = data.draw(st.integers(0, len(good) - 1) | st.sampled_from([0, 1, FIXED.size, PAYLOAD_AT, len(good) - 1]))
    refuses(sample, good[:size])
    refuses(sample, good + data.draw(st.binary(min_size=1, max_size=50)))
    refuses(sample, good[:size] + good[size + 1 :])


@given(st.binary(max_size=600), st.integers(0, PAYLOAD_AT + 1000), st.integers(0, 2))
def test_whatever_the_bytes_are_nothing_but_our_error_is_raised(
    sample: tuple[SpillFolder, Path, bytes], noise: bytes, at: int, how: int
) -> None:
    good = sample[2]
    made = [noise, good[:at] + noise + good[at + len(noise) :], good[:at] + noise][how]
    if made != good:
        refuses(sample, made)


def test_a_page_in_the_wrong_place_is_recognised(path: Path, folder: SpillFolder) -> None:
    state = save(folder, b"a" * PAGE_BYTES + b"b" * PAGE_BYTES + b"c")
    file = file_of(path, state)
    data = bytearray(file.read_bytes())
    data[PAYLOAD_AT : PAYLOAD_AT + 2 * PAGE_BYTES] = b"b" * PAGE_BYTES + b"a" * PAGE_BYTES
    file.write_bytes(data)
    assert len(folder.scan()) == 1, "the header is as it was"
    with pytest.raises(CorruptState, match="altered between byte 0 and"):
        folder.open(state.name)


def test_a_file_under_another_name_is_recognised(path: Path, folder: SpillFolder) -> None:
    one, other = save(folder, b"one"), save(folder, b"other")
    content_of_one = file_of(path, one).read_bytes()
    file_of(path, one).write_bytes(file_of(path, other).read_bytes())
    file_of(path, other).write_bytes(content_of_one)
    assert folder.scan() == []
    assert len(folder.problems) == len(aside(path)) == 2
    assert all("another state's file" in line for line in folder.problems)


def test_a_file_from_another_folder_is_recognised(path: Path, folder: SpillFolder, tmp_path: Path) -> None:
    elsewhere = opened(tmp_path / "elsewhere")
    state = save(elsewhere)
    os.rename(file_of(tmp_path / "elsewhere", state), file_of(path, state))
    elsewhere.close()
    assert folder.scan() == []
    assert "another key" in folder.problems[0]


def test_what_was_set_aside_counts_and_makes_room_first(tmp_path: Path) -> None:
    path = tmp_path / "s"
    folder = opened(path, max_bytes=3 * MIB)
    folder.scan()
    old, damaged = save(folder, b"o" * MIB), save(folder, b"d" * MIB)
    data = bytearray(file_of(path, damaged).read_bytes())
    data[-1] ^= 1
    file_of(path, damaged).write_bytes(data)
    assert [state.name for state in folder.scan()] == [old.name]
    assert folder.used_bytes == old.file_bytes + damaged.file_bytes
    assert [state.name for state in folder.scan()] == [old.name]
    assert folder.problems == [], "it is told once"
    assert folder.used_bytes == old.file_bytes + damaged.file_bytes
    new = save(folder, b"n" * MIB)
    assert old.name in folder
    assert new.name in folder
    assert not list(path.glob(f"*{ASIDE}"))
    folder.close()


def test_states_of_another_model_stay_until_room_is_needed(path: Path, folder: SpillFolder) -> None:
    theirs = save(folder, b"t" * MIB)
    folder.close()
    other = opened(path, fingerprint=b"another")
    assert other.scan() == []
    assert other.problems == [f"{theirs.name}{SUFFIX}: left alone, it is of another model, library or layout"]
    assert aside(path) == []
    assert other.used_bytes == theirs.file_bytes
    with pytest.raises(SpillError, match="of another model"):
        other.open(theirs.name)
    ours = save(other, b"o")
    other.close()
    again = opened(path, max_bytes=2 * MIB)
    assert [state.name for state in again.scan()] == [theirs.name]
    again.close()
    other = opened(path, max_bytes=PAYLOAD_AT + MIB + 5000, fingerprint=b"another")
    assert [state.name for state in other.scan()] == [ours.name]
    save(other, b"n" * 9000)
    assert not file_of(path, theirs).exists(), "the longest unused"
    assert ours.name in other
    other.close()


# -- headers by somebody who knows the key --------------------------------------------------------------


EXTREMES = st.sampled_from([0, 1, 255, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, (1 << 64) - 1])


@given(EXTREMES, EXTREMES, EXTREMES, st.floats())
def test_lengths_are_held_against_the_file_before_anything_is_read(
    n_bytes: int, n_tokens: int, extra: int, saved_at: float
) -> None:
    key, fingerprint = b"k" * 32, fingerprint_of("f")
    head = Head("0" * 32, 1, saved_at, n_bytes, n_tokens % (1 << 32), extra % (1 << 32), b"c" * CODE_BYTES)
    data = make_header(head, fingerprint, key)
    tracemalloc.start()
    try:
        with pytest.raises(Unusable):
            read_header(data, head.name, len(data) + 1, fingerprint, key)
        assert tracemalloc.get_traced_memory()[1] < 1 << 17
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=100), st.integers(0, 40))
def test_a_tail_by_somebody_who_knows_the_key_is_read_or_refused(
    sample: tuple[SpillFolder, Path, bytes], noise: bytes, at: int
) -> None:
    folder, file, good = sample
    tail = bytearray(good[PAYLOAD_AT + len(SAMPLE) :])
    tail[at * 4 : at * 4 + len(noise)] = noise[: len(tail) - at * 4]
    fields = list(FIXED.unpack_from(good))
    fields[-1] = code_of(tail, folder._key)
    coded = FIXED.pack(*fields).ljust(PAYLOAD_AT - CODE_BYTES, b"\0")
    file.write_bytes(coded + code_of(coded, folder._key) + SAMPLE + tail)
    for state in folder.scan():
        try:
            assert content(folder, state.name) == SAMPLE
            assert 0 <= min(state.tokens.tolist()) <= max(state.tokens.tolist()) <= MAX_TOKEN_ID
        except CorruptState:
            assert not file.exists()
    file.write_bytes(good)
    folder.scan()


def test_the_documented_layout_is_the_one_in_the_file(path: Path, folder: SpillFolder) -> None:
    state = save(folder, b"\x01" * 5000, tokens=[7, 8], tenant=42)
    data = file_of(path, state).read_bytes()
    assert data[:8] == b"UMASTATE"
    assert bytes.fromhex(state.name) == data[16:32]
    assert data[PAYLOAD_AT : PAYLOAD_AT + 5000] == b"\x01" * 5000
    assert struct.unpack_from("<ii", data, PAYLOAD_AT + 5000) == (7, 8)
    assert data[PAYLOAD_AT + 5008 : PAYLOAD_AT + 5010] == b"{}"
    assert len(data) == PAYLOAD_AT + 5010 + CODE_BYTES
    assert data[-CODE_BYTES:] == code_of(b"\x01" * 5000, (path / KEY).read_bytes())
