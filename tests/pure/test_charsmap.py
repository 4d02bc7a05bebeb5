"""Tables that normalise text: sound ones pass, and those in which a text leads outside are refused."""

from __future__ import annotations

import random
import struct

import pytest

from tests.support.cases import all_cases
from uma_trio.models.charsmap import LABEL, LEAF, check_charsmap
from uma_trio.models.gguf_header import GgufError

VALUE = 1 << 31


def table(replaced, *, n_nodes=512, texts=None):
    """A table in which each byte of ``replaced`` becomes another text; its values are in a block of their own."""
    nodes, found = [0] * n_nodes, b""
    nodes[0] = 256 << 10
    for place, (byte, text) in enumerate(replaced.items()):
        child, value = 256 ^ byte, 1 + place  # a block of nodes begins at 256, and the values are behind the root
        nodes[child] = (child ^ value) << 10 | int(LEAF) | byte
        nodes[value] = VALUE | len(found)
        found += text + b"\0"
    return packed(nodes, found if texts is None else texts)


def packed(nodes, texts):
    return struct.pack(f"<I{len(nodes)}I", 4 * len(nodes), *nodes) + texts


SOUND = {ord("A"): b"a", ord("B"): b"bb", 0xC3: b""}


def unpacked(data):
    n = struct.unpack_from("<I", data)[0] // 4
    return list(struct.unpack_from(f"<{n}I", data, 4)), data[4 + 4 * n :]


def test_sound_tables():
    check_charsmap(b"")
    check_charsmap(table(SOUND))
    check_charsmap(table(dict.fromkeys(range(1, 200), b"x")))


def damaged_tables():
    nodes, texts = unpacked(table(SOUND))
    child = 256 ^ ord("A")
    yield "no size", b"\1\2"
    yield "a size without texts", struct.pack("<I", 4) + bytes(4)
    yield "a size beyond the end", struct.pack("<I", 1 << 31) + bytes(100)
    yield "a text without an end", packed(nodes, texts[:-1] + b"x")
    yield "a root outside", packed([1 << 30, *nodes[1:]], texts)
    yield "a block that is cut", packed(nodes[:500], texts)
    yield "a child outside", packed([*nodes[:child], (1 << 28) | ord("A"), *nodes[child + 1 :]], texts)
    yield "a value outside", packed([*nodes[:child], (1 << 28) | int(LEAF) | ord("A"), *nodes[child + 1 :]], texts)
    yield "a text outside", packed([nodes[0], VALUE | 1000, *nodes[2:]], texts)


@all_cases(("what", "data"), [*damaged_tables()])
def test_damaged_tables(what, data):
    with pytest.raises(GgufError, match=r"precompiled_charsmap.* is damaged"):
        check_charsmap(data)


def test_a_walk_in_circles_ends():
    nodes, texts = unpacked(table(SOUND))
    child = 256 ^ ord("A")
    nodes[child] = (child ^ 256) << 10 | ord("A")  # back to the state from which it came
    check_charsmap(packed(nodes, texts))


def leads_outside(nodes, n_text_bytes, data):
    """Whether llama.cpp throws for the bytes ``data`` at the beginning of a text."""

    def base(node):
        return (node >> 10) << ((node & (1 << 9)) >> 6)

    index = base(nodes[0])
    for byte in data:
        index ^= byte
        if index >= len(nodes):
            return True
        if nodes[index] & int(LABEL) != byte:
            return False
        leaf = nodes[index] & int(LEAF)
        index ^= base(nodes[index])
        if leaf and (index >= len(nodes) or nodes[index] & (VALUE - 1) >= n_text_bytes):
            return True
    return False


def test_what_passes_never_leads_outside():
    """Against a plain walk, with bytes that follow the table; of damaged tables some pass and some are refused."""
    rng = random.Random(1)
    passed = refused = 0
    for _ in range(300):
        nodes, texts = unpacked(table(SOUND))
        for _ in range(rng.randrange(4)):
            place = rng.choice([0, 1, 256 ^ ord("A"), 256 ^ ord("B"), rng.randrange(512)])
            nodes[place] ^= 1 << rng.randrange(32)
        try:
            check_charsmap(packed(nodes, texts))
        except GgufError:
            refused += 1
            continue
        passed += 1
        labels = sorted({node & 0xFF for node in nodes} - {0})
        for _ in range(200):
            walk = [rng.choice([*labels, rng.randrange(1, 256)]) for _ in range(6)]
            assert not leads_outside(nodes, len(texts), walk)
    assert passed
    assert refused


def test_a_large_table():
    blocks = 256
    nodes = [0] * (256 * (blocks + 1))
    nodes[0] = 256 << 10
    for block in range(1, blocks):
        child = 256 * block + 1
        nodes[child] = (child ^ (256 * (block + 1))) << 10 | 1
    check_charsmap(packed(nodes, b"\0"))
    nodes[256 * 255 + 1] = 1 << 28 | 1
    with pytest.raises(GgufError, match="outside"):
        check_charsmap(packed(nodes, b"\0"))
