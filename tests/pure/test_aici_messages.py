"""Messages to a runtime of controllers: a large module is encoded in pieces, and that changes nothing."""

from __future__ import annotations

import json
import random

from tests.support.cases import all_cases
from uma_trio.aici_link.messages import (
    PIECE_BYTES,
    Auth,
    MakeModule,
    ReceivedRequest,
    decode_request,
    encode_request,
    error_and_logs,
    readable_error,
)


@all_cases("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 3 * PIECE_BYTES + 2])
@all_cases("auth", [None, Auth("alice"), Auth('a"}', is_admin=True)])
def test_a_module_of_any_size(size: int, auth: Auth | None) -> None:
    wasm = random.Random(size).randbytes(size)
    message = encode_request(MakeModule(wasm), "r1", auth)
    assert decode_request(bytes(message)) == ReceivedRequest(MakeModule(wasm), "r1", auth or Auth())
    assert json.loads(message).keys() == {"$rid", "op", "binary", *(() if auth is None else ("$auth",))}


STOP = "*** aici_host_stop()\n"


@all_cases(
    ("error", "said", "printed", "why", "readable"),
    [
        (f"Error (mid): *** failed: no\n  at 1\n{STOP}", "*** failed: no\n  at 1\n", "", "no\n  at 1", "no\n  at 1"),
        (
            f"Error (mid): a\nb\n*** failed: no\n{STOP}",
            "a\nb\n*** failed: no\n",
            "a\nb\n",
            "no",
            "no\nPrinted before:\na\nb",
        ),
        (f"Error (mid): a\n*** failed: no\n{STOP}", "c\na\n*** failed: no\n", "c\na\n", "no", "no\nPrinted before:\na"),
        (f"Error (mid): a\nb\n{STOP}", "a\nb\n", "", "a\nb", "a\nb"),
        ("Error (mid): a\nmid: trap", "a\n", "a\n", "Error (mid): mid: trap", "Error (mid): a\nmid: trap"),
        ("Worker: too long", "a\n", "a\n", "Worker: too long", "Worker: too long"),
        ("Worker: too long", "", "", "Worker: too long", "Worker: too long"),
    ],
)
def test_an_error_and_what_was_printed_before(error: str, said: str, printed: str, why: str, readable: str) -> None:
    assert error_and_logs(error, said + error) == (why, printed)
    assert readable_error(error) == readable


def test_a_result_without_an_error_has_its_logs() -> None:
    assert error_and_logs("", "a\n") == ("", "a\n")
    assert error_and_logs("Error (mid): cut", "something else") == ("Error (mid): cut", "something else")
