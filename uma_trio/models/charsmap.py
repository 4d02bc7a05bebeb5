"""Checks the table with which a Unigram tokenizer normalises text: ``tokenizer.ggml.precompiled_charsmap``.

It is a trie of characters in a double array, followed by the texts that replace them.  llama.cpp walks it for every
text and throws at an index outside, which ends the process.  So every walk is made here first.

Source: llama-vocab.cpp, ``llm_tokenizer_ugm_session::normalize_prefix``.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from uma_trio.models.gguf_header import GgufError

SIZE_BYTES: Final = 4
"""The table begins with the size of the array in bytes."""
NODE_BYTES: Final = 4
CHARACTERS: Final = np.arange(1, 256, dtype=np.uint32)
"""Bytes of a text that are looked up; 0 ends a walk."""
BLOCK: Final = 256
"""A state leads to nodes of one block of this size."""
STATES_AT_A_TIME: Final = 4096

LABEL: Final = np.uint32((1 << 31) | 0xFF)
LEAF: Final = np.uint32(1 << 8)
VALUE: Final = np.uint32((1 << 31) - 1)

Nodes = npt.NDArray[np.uint32]


def check_charsmap(data: bytes) -> None:
    """Walk the whole table.  Blocks for up to half a second.

    Args:
        data: the table; empty if there is none.

    Raises:
        GgufError: a text would lead outside of it.
    """
    if not data:
        return
    n_bytes = struct.unpack_from("<I", data)[0] if len(data) >= SIZE_BYTES else 0
    texts = data[SIZE_BYTES + n_bytes :]
    if SIZE_BYTES + n_bytes >= len(data) or texts[-1]:
        raise _damaged("its parts do not fit into it")
    nodes = np.frombuffer(data, "<u4", n_bytes // NODE_BYTES, SIZE_BYTES)
    if not len(nodes):
        return
    seen = np.zeros(len(nodes) + -len(nodes) % BLOCK, bool)
    states = _bases(nodes[:1])
    while len(states):
        if states.max() >= len(seen):
            raise _damaged("a character leads outside of its array")
        seen[states] = True
        parts = np.split(states, range(STATES_AT_A_TIME, len(states), STATES_AT_A_TIME))
        reached = np.unique(np.concatenate([_step(nodes, part, len(texts)) for part in parts]))
        states = reached[~seen[np.minimum(reached, len(seen) - 1)] | (reached >= len(seen))]


def _step(nodes: Nodes, states: Nodes, n_text_bytes: int) -> Nodes:
    """The states after one more byte.

    Raises:
        GgufError: one of them is outside.
    """
    places = states[:, np.newaxis] ^ CHARACTERS
    if places.max() >= len(nodes):
        raise _damaged("a character leads outside of its array")
    children = places[(nodes[places] & LABEL) == CHARACTERS]
    after: Nodes = children ^ _bases(nodes[children])
    ends = after[(nodes[children] & LEAF) != 0]
    if len(ends) and (ends.max() >= len(nodes) or (nodes[ends] & VALUE).max() >= n_text_bytes):
        raise _damaged("a character is replaced by a text outside of it")
    return after


def _bases(nodes: Nodes) -> Nodes:
    bases: Nodes = (nodes >> np.uint32(10)) << ((nodes & np.uint32(1 << 9)) >> np.uint32(6))
    return bases


def _damaged(defect: str) -> GgufError:
    return GgufError(f"its table of characters (tokenizer.ggml.precompiled_charsmap) is damaged: {defect}")
