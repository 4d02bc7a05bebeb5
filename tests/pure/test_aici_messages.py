"""Messages to a runtime of controllers: a large module is encoded in pieces, and that changes nothing."""

from __future__ import annotations

import json
import random

import pytest

from uma_trio.aici.messages import PIECE_BYTES, Auth, MakeModule, ReceivedRequest, decode_request, encode_request


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 3 * PIECE_BYTES + 2])
@pytest.mark.parametrize("auth", [None, Auth("alice"), Auth('a"}', is_admin=True)])
def test_a_module_of_any_size(size: int, auth: Auth | None) -> None:
    wasm = random.Random(size).randbytes(size)
    message = encode_request(MakeModule(wasm), "r1", auth)
    assert decode_request(bytes(message)) == ReceivedRequest(MakeModule(wasm), "r1", auth or Auth())
    assert json.loads(message).keys() == {"$rid", "op", "binary", *(() if auth is None else ("$auth",))}
