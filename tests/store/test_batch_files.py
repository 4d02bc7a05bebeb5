"""Files of results and the store of files and batches: crashes, several processes, owners, quotas, expiry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.gateway.batches.results import Busy, RowFile
from uma_trio.gateway.batches.store import ABANDONED_S, Batch, Full, Store, StoredFile, new_id

NOW = 1_800_000_000
SOCKET = "/run/uma.sock"


def line(custom_id: str) -> dict[str, bytes]:
    return {custom_id: json.dumps({"custom_id": custom_id, "response": "x" * 20}).encode() + b"\n"}


# -- files of results --


@given(n=st.integers(0, 5), cut=st.integers(0, 300))
def test_a_file_that_ends_anywhere_has_its_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, n: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("results") / "rows"
    with RowFile(path) as file:
        for number in range(n):
            file.append(line(f"row-{number}"))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    n_whole = whole[:cut].count(b"\n")
    with RowFile(path) as file:
        assert file.custom_ids == {f"row-{number}" for number in range(n_whole)}
        file.append(line("last"))
        assert file.n_bytes == path.stat().st_size
    assert path.read_bytes() == b"".join([*(whole.splitlines(keepends=True)[:n_whole]), *line("last").values()])


@pytest.mark.parametrize("lost", [b"\0\0\0\n", b'{"custom_id": "x", \0\0\0}\n'])
def test_a_line_that_a_crash_has_damaged_ends_what_counts(tmp_path: Path, lost: bytes) -> None:
    path = tmp_path / "rows"
    path.write_bytes(line("a")["a"] + lost + line("b")["b"])
    with RowFile(path) as file:
        assert file.custom_ids == {"a"}


@pytest.mark.parametrize("text", [b"my notes\n", b"my notes", b'{"custom_id": 5}\n', b"[1]\n"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(line("a")["a"] + text)
    with pytest.raises(OSError, match="line 2 is no result of a row"):
        RowFile(path)
    assert path.read_bytes() == line("a")["a"] + text


def test_a_file_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    code = f"import sys; from uma_trio.gateway.batches.results import RowFile; f = RowFile({os.fspath(path)!r}); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(Busy):
            RowFile(path)
        other.kill()
        other.wait()
    RowFile(path).close()


def test_a_line_that_does_not_fit_is_taken_back_before_the_next(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from uma_trio.gateway.batches.results import RowFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = RowFile(Path(sys.argv[1]))
good = b'{"custom_id": "a"}\\n'
file.append({"a": good})
resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) + 5, resource.RLIM_INFINITY))
try:
    file.append({"b": b'{"custom_id": "b"}\\n'})
except OSError as error:
    print(error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.append({"c": b'{"custom_id": "c"}\\n'})
print(sorted(file.custom_ids))
"""
    path = tmp_path / "rows"
    found = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["27", "['a', 'c']"]
    assert [json.loads(each)["custom_id"] for each in path.read_text().splitlines()] == ["a", "c"]


# -- the store --


def store(folder: Path, *, max_bytes: int = 1000, max_files: int = 10) -> Store:
    return Store(folder / "files", max_bytes=max_bytes, max_files=max_files)


def uploaded(where: Store, owner: str = "a", content: bytes = b"{}\n", **fields: object) -> StoredFile:
    file = StoredFile(
        **{
            "id": new_id("file-"),
            "owner": owner,
            "filename": "rows.jsonl",
            "purpose": "batch",
            "bytes": len(content),
            "created_at": NOW,
            "expires_at": NOW + 100,
            "url": "/v1/completions",
            "rows": 1,
            **fields,
        }  # type: ignore[arg-type]
    )
    where.upload_path(file.id).write_bytes(content)
    where.add_file(file)
    return file


def made(where: Store, file: StoredFile, **fields: object) -> Batch:
    batch = Batch(
        **{
            "id": new_id("batch_"),
            "owner": file.owner,
            "socket": SOCKET,
            "url": "/v1/completions",
            "input_file_id": file.id,
            "output_file_id": new_id("file-"),
            "error_file_id": new_id("file-"),
            "completion_window": "24h",
            "total": 1,
            "created_at": NOW,
            "expires_at": NOW + 50,
            "kept_s": 60,
            **fields,
        }  # type: ignore[arg-type]
    )
    where.add_batch(batch)
    return batch


def names(where: Store, owner: str, **options: object) -> list[str]:
    given = {"purpose": None, "after": None, "limit": 100, "newest_first": True, **options}
    return [file.id for file in where.files(owner, **given)[0]]  # type: ignore[arg-type]


def test_nothing_is_made_before_something_is_kept(tmp_path: Path) -> None:
    where = store(tmp_path)
    assert where.file("a", "file-x") is None
    assert where.batch("a", "batch_x") is None
    assert where.open_batches(SOCKET) == []
    assert where.delete_file("a", "file-x") == "missing"
    where.check_room("a", 10)
    where.expire(time.time())
    assert [*tmp_path.iterdir()] == []


def test_what_is_kept_is_there_after_a_restart_and_only_for_its_owner(tmp_path: Path) -> None:
    file = uploaded(store(tmp_path))
    batch = made(store(tmp_path), file)
    where = store(tmp_path)
    assert where.file("a", file.id) == file
    assert where.path(file.id).read_bytes() == b"{}\n"
    assert where.batch("a", batch.id) == batch
    assert where.open_batches(SOCKET) == [batch]
    assert where.open_batches("/another") == []
    for other in ("b", ""):
        assert where.file(other, file.id) is None
        assert where.batch(other, batch.id) is None
        assert (names(where, other), where.batches(other, after=None, limit=9)) == ([], ([], False))
        assert where.delete_file(other, file.id) == "missing"


def test_pages_follow_each_other_without_gaps(tmp_path: Path) -> None:
    where = store(tmp_path)
    ids = [uploaded(where, owner=owner).id for owner in "ababa"]
    mine = ids[::2]
    assert names(where, "a") == mine[::-1]
    assert names(where, "a", newest_first=False) == mine
    assert names(where, "a", newest_first=False, after=mine[0], limit=1) == [mine[1]]
    assert names(where, "a", after=mine[1]) == [mine[0]]
    assert names(where, "a", after=ids[1]) == [], "that of another owner"
    assert where.files("a", purpose=None, after=None, limit=2, newest_first=True)[1]
    assert not where.files("a", purpose=None, after=None, limit=3, newest_first=True)[1]
    assert names(where, "a", purpose="batch_output") == []


def test_quotas_count_by_owner(tmp_path: Path) -> None:
    where = store(tmp_path, max_bytes=10, max_files=2)
    file = uploaded(where, content=b"12345678")
    with pytest.raises(Full, match="max_files_mb"):
        uploaded(where, content=b"123")
    uploaded(where, content=b"12")
    uploaded(where, "b", content=b"1234567890")
    with pytest.raises(Full, match="max_files"):
        where.check_room("a")
    for _ in range(2):
        made(where, file)
    with pytest.raises(Full, match="batches"):
        made(where, file)
    where.change(made(where, file, owner="b").id, lambda batch: batch.with_status("cancelled"))


def test_a_file_that_a_batch_reads_stays(tmp_path: Path) -> None:
    where = store(tmp_path)
    file = uploaded(where)
    batch = made(where, file)
    assert where.delete_file("a", file.id) == "in use"
    where.expire(NOW + 1000)
    assert where.file("a", file.id) == file
    ended = where.change(batch.id, lambda known: known.with_status("completed", completed=1))
    assert (ended.status, ended.completed, [*ended.times]) == ("completed", 1, ["completed_at"])
    assert where.delete_file("a", file.id) == "deleted"
    assert not where.path(file.id).exists()


def test_what_has_expired_is_deleted(tmp_path: Path) -> None:
    where = store(tmp_path)
    file = uploaded(where)
    batch = made(where, file)
    result = msgspec.structs.replace(file, id=batch.output_file_id, purpose="batch_output", expires_at=NOW + 500)
    where.path(result.id).write_bytes(b"{}\n")
    where.change(batch.id, lambda known: known.with_status("completed"), [result])
    for name, age_s in (("old", ABANDONED_S + 9), ("new", 0)):
        where.upload_path(name).write_bytes(b"part")
        os.utime(where.upload_path(name), times=(NOW - age_s, NOW - age_s))
    where.expire(NOW + 99)
    assert where.file("a", file.id) is not None
    assert [where.upload_path(name).exists() for name in ("old", "new")] == [False, True]
    where.expire(NOW + 100)
    assert (where.file("a", file.id), where.path(file.id).exists()) == (None, False)
    assert where.batch("a", batch.id) is not None
    where.expire(NOW + 110)
    assert where.batch("a", batch.id) is None
    assert where.file("a", result.id) == result
