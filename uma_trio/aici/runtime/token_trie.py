"""The vocabulary as the prefix tree that controllers walk.

Layout of the blob, all numbers uint32, little endian:

| part | content |
|---|---|
| header | magic, bytes of the header, bytes of the nodes, bytes of the offsets, bytes of the data, size of the vocabulary, id of EOS |
| nodes | two numbers each: ``token << 8 | byte``; ``nodes of the subtree << 8 | levels to go up after it`` |
| offsets | one number for each token: ``start << 8 | length`` |
| data | the bytes of all tokens |

Nodes are in depth-first order, children ascending by their byte.  A node counts as part of its own subtree.

Levels to go up after a node: 1; for a last child one more than its parent's, because the parent ends with it; 0 for the
root.  The root has byte 0xFF.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

MAGIC: Final = 0x558B6FD3
NODE_WITHOUT_TOKEN: Final = 0xFFFFFF
"""In place of the token of a node that is only the prefix of longer ones."""
ROOT_BYTE: Final = 0xFF
MAX_TOKEN_BYTES: Final = 254
MAX_DATA_BYTES: Final = (1 << 24) - 1
MAX_TOKENS: Final = NODE_WITHOUT_TOKEN

HEADER: Final = struct.Struct("<7I")


class TrieTooLarge(ValueError):
    """The vocabulary does not fit the format.  The message says why."""


def build_trie(tokens: Sequence[bytes], eos: int) -> bytes:
    """The blob of a vocabulary.  Blocks for about 3 us a token.

    Args:
        tokens: the bytes of each token.  Tokens without bytes, or with more than ``MAX_TOKEN_BYTES``, are not in the tree
            and have no data.  Of tokens with the same bytes the first is in the tree.

    Raises:
        TrieTooLarge: more than ``MAX_TOKENS`` tokens, or more than ``MAX_DATA_BYTES`` bytes in all of them.
    """
    if len(tokens) > MAX_TOKENS:
        raise TrieTooLarge(f"the vocabulary has {len(tokens)} tokens, more than {MAX_TOKENS}")
    kept = [token if len(token) <= MAX_TOKEN_BYTES else b"" for token in tokens]
    nodes = _nodes(kept)
    lengths = np.fromiter(map(len, kept), np.uint32, len(kept))
    if int(lengths.sum()) > MAX_DATA_BYTES:
        raise TrieTooLarge(f"the texts of all tokens have more than {MAX_DATA_BYTES} bytes")
    starts = np.cumsum(lengths, dtype=np.uint32) - lengths
    offsets = (starts << 8 | lengths).astype("<u4").tobytes()
    data = b"".join(kept)
    header = HEADER.pack(MAGIC, HEADER.size, len(nodes), len(offsets), len(data), len(tokens), eos)
    return header + nodes + offsets + data


def _nodes(tokens: Sequence[bytes]) -> bytes:
    """The nodes in depth-first order, from the sorted tokens.

    Each token adds nodes for the bytes that it does not share with the token before.
    """
    ids: dict[bytes, int] = {}
    for token, text in enumerate(tokens):
        if text:
            ids.setdefault(text, token)
    labels, sizes, parents, path = [NODE_WITHOUT_TOKEN << 8 | ROOT_BYTE], [1], [-1], [0]
    before = b""
    for text in sorted(ids):
        shared = _shared_length(before, text)
        del path[shared + 1 :]
        for byte in text[shared:]:
            parents.append(path[-1])
            path.append(len(labels))
            labels.append(NODE_WITHOUT_TOKEN << 8 | byte)
            sizes.append(1)
        labels[-1] = ids[text] << 8 | text[-1]
        before = text
    for node in range(len(labels) - 1, 0, -1):
        sizes[parents[node]] += sizes[node]
    levels = [0] * len(labels)
    for node in range(1, len(labels)):
        parent = parents[node]
        is_last = node + sizes[node] == parent + sizes[parent]
        levels[node] = levels[parent] + 1 if is_last else 1
    words = np.empty((len(labels), 2), "<u4")
    words[:, 0] = labels
    words[:, 1] = np.array(sizes, np.uint32) << 8 | np.array(levels, np.uint32)
    return words.tobytes()


def _shared_length(a: bytes, b: bytes) -> int:
    for n, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return n
    return min(len(a), len(b))
