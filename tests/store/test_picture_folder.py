"""Encoded pictures on disk: what is written is read back, what is damaged is dropped, and the oldest go first."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from uma_trio.daemon.store.encoding import DamagedFile
from uma_trio.daemon.store.picture_folder import PictureFileError, PictureFolder, decode, encode
from uma_trio.encoder.encoded import EncodedMedia, RowBlock, RowFile


def picture(n: int, rows: int = 16) -> EncodedMedia:
    noise = np.random.default_rng(n)
    blocks = [RowBlock(rows - 1), RowBlock(1, is_causal=False)]
    made = RowFile.of(noise.standard_normal((rows, 8), np.float32))
    return EncodedMedia(np.arange(rows + 2, dtype=np.int32), made, blocks)


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def same(one: EncodedMedia | None, other: EncodedMedia) -> bool:
    return (
        one is not None
        and np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.rows.read(0, one.rows.n), other.rows.read(0, other.rows.n))
        and one.blocks == other.blocks
    )


SIZE = len(encode(key(0), picture(0)))


def test_what_is_written_is_there_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        folder = PictureFolder(tmp_path, max_bytes=1 << 20)
        folder.add(key(1), picture(1))
        assert same(folder.find(key(1)), picture(1))
        assert folder.find(key(2)) is None
        assert folder.n_bytes == SIZE
        folder.close()


def test_the_least_recently_used_go_first_also_over_a_restart(tmp_path: Path) -> None:
    folder = PictureFolder(tmp_path, max_bytes=3 * SIZE)
    for n in range(3):
        folder.add(key(n), picture(n))
        os.utime(tmp_path / f"{key(n).hex()}.picture", (n, n))
    assert same(folder.find(key(0)), picture(0))
    folder.close()
    folder = PictureFolder(tmp_path, max_bytes=3 * SIZE)
    folder.add(key(3), picture(3))
    assert [folder.find(key(n)) is not None for n in range(4)] == [True, False, True, True]
    folder.add(key(4), picture(4, rows=1000))
    assert folder.n_bytes == 3 * SIZE, "one that is larger than the folder may be is not written"
    folder.close()
    folder = PictureFolder(tmp_path, max_bytes=SIZE)
    assert (folder.n_bytes, len([*tmp_path.glob("*.picture")])) == (SIZE, 1)
    folder.close()


def test_damaged_files_are_dropped_and_unfinished_ones_are_removed(tmp_path: Path) -> None:
    folder = PictureFolder(tmp_path, max_bytes=1 << 20)
    for n in range(4):
        folder.add(key(n), picture(n))
    paths = [tmp_path / f"{key(n).hex()}.picture" for n in range(4)]
    whole = paths[0].read_bytes()
    paths[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    paths[1].write_bytes(whole[:100])
    paths[2].write_bytes(paths[3].read_bytes())
    for n in range(3):
        with pytest.raises(PictureFileError, match=r"is damaged: .* it was removed"):
            folder.find(key(n))
        assert not paths[n].exists()
        assert folder.find(key(n)) is None
    assert same(folder.find(key(3)), picture(3))
    assert folder.n_bytes == SIZE
    folder.close()
    (tmp_path / f"{key(9).hex()}.picture.tmp").write_bytes(b"half")
    (tmp_path / "a file of the user").write_bytes(b"stays")
    PictureFolder(tmp_path, max_bytes=1 << 20).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a file of the user", "lock", paths[3].name}


def test_no_file_is_read_that_is_not_what_was_written() -> None:
    data = encode(key(1), picture(1))
    noise = np.random.default_rng(3)
    for _ in range(200):
        changed = bytearray(data)
        changed[noise.integers(len(data))] ^= 1 << int(noise.integers(8))
        for bad in (changed, data[: noise.integers(len(data))]):
            with pytest.raises(DamagedFile):
                decode(key(1), bad)
    with pytest.raises(DamagedFile, match="of another picture"):
        decode(key(2), data)


def test_a_file_that_vanished_is_an_error_and_then_not_there(tmp_path: Path) -> None:
    folder = PictureFolder(tmp_path, max_bytes=1 << 20)
    folder.add(key(1), picture(1))
    (tmp_path / f"{key(1).hex()}.picture").unlink()
    with pytest.raises(PictureFileError, match="cannot open"):
        folder.find(key(1))
    assert (folder.find(key(1)), folder.n_bytes) == (None, 0)
    folder.close()
