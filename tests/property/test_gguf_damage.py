"""Whatever is damaged, no GGUF raises anything but GgufError, and its header costs little time and memory."""

from __future__ import annotations

import random
import resource
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.gguf_files import ARRAY, STRING, array, big_vocabulary, gguf, pair
from tests.support.profile import sampled
from tests.support.steps import counted_steps
from uma_trio.models import gguf_header
from uma_trio.models.gguf_check import GgufError, check_gguf, check_values
from uma_trio.models.gguf_header import GgufHeader


def outcome(content, file_size=None):
    """Check a header without a file; return the type of its GgufError, and let anything else through."""
    try:
        check_values(GgufHeader(content, file_size or len(content), vocab_only=True), vocab_only=False)
    except (GgufError, gguf_header._BeyondWindow) as error:
        return type(error)
    return None


def test_random_damage():
    dice = random.Random(0)
    sound = gguf()
    for _ in range(20_000):
        content = bytearray(sound)
        for _ in range(dice.choice([1, 1, 2, 8])):
            content[dice.randrange(len(content))] = dice.choice([0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)])
        outcome(bytes(content[: dice.choice([len(content)] * 3 + [dice.randrange(len(content))])]))


@given(st.binary(max_size=300), st.integers(1, 2**64))
def test_any_bytes_after_the_magic(rest, file_size):
    outcome(b"GGUF\x03\x00\x00\x00" + rest, max(file_size, len(rest) + 8))


@given(st.lists(st.binary(max_size=60), max_size=4), st.lists(st.binary(max_size=60), max_size=4))
def test_any_pairs_and_tensors(pairs, tensors):
    outcome(gguf(pairs, tensors))


@pytest.mark.parametrize("n", sampled([32_000, 300_000], 2))
def test_a_large_vocabulary_is_walked_in_few_steps(tmp_path, n):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(big_vocabulary(n)))
    with counted_steps() as steps:
        assert check_gguf(path).n_vocab == n
    assert steps.n < 20 * n


@pytest.mark.thorough
def test_a_header_without_end_is_not_read(tmp_path):
    # A sparse file of 1 TiB: strings of length 0 for as long as anybody reads.
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(gguf([pair("k", ARRAY, array(STRING, 2**36, b""))], (), b"", n_tensors=1))
        try:
            file.truncate(2**40)
        except OSError:
            pytest.skip("this file system has no such large sparse files")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(GgufError, match="larger than 128 MiB"):
        check_gguf(path)
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 400 << 20
