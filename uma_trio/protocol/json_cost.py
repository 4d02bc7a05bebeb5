"""Bounds how long decoding a JSON document keeps an event loop, before it is decoded.

A decoder cannot be interrupted, and a megabyte of ``1e300,`` takes it two seconds.  What decoding costs depends on the
values, so they are counted: outside texts, by searches for single bytes, which take a few nanoseconds a byte.

============================================================  ======  ==================
what                                                          weight  at most
============================================================  ======  ==================
a value, such as a token id                                        1             524,288
a text, a list or an object                                        8              65,536
a number with an exponent, or 16 digits of a longer number       512               1,024
============================================================  ======  ==================

Measured with msgspec 0.22 on one EPYC core: 15 to 65 ns for a value, 40 to 320 ns for the second kind, 0.2 to 11 us for the
third.  So no document takes longer than about 25 ms, texts excluded: 16 MiB of those take 10 to 41 ms.

Lists and objects may be ``MAX_DEPTH`` deep in each other: what is decoded is encoded again, and both recurse.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from uma_trio.errors import InvalidJson, TooManyValues

MAX_COST: Final = 1 << 19
TEXT_OR_CONTAINER: Final = 8
QUOTE: Final = TEXT_OR_CONTAINER // 2
HARD_NUMBER: Final = 512
"""A decimal number far from 1 is converted to the nearest binary one in exact arithmetic."""

LONG_DIGITS: Final = b"0" * 16

MAX_DEPTH: Final = 128
STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_STEPS: Final = bytes(set(range(256)) - set(STEPS))

AS_DIGITS: Final = bytes.maketrans(b"123456789.+-E", b"000000000000e")
"""Makes all numbers look alike."""


SLICE_BYTES: Final = 64 * 1024
"""Counted at once, in less than a millisecond."""


class JsonCost:
    """What decoding a document costs that arrives in parts, or several documents together."""

    def __init__(self) -> None:
        self._cost = 0
        self._depth = 0
        self._in_text = False
        self._escape = b""
        """A backslash at the end of the part before."""

    def add(self, part: bytes) -> None:
        """Count the next part.

        Raises:
            TooManyValues: all parts together cost too much.
            InvalidJson: they are nested too deeply.
        """
        unescaped = (self._escape + part).replace(b"\\\\", b"")
        self._escape = b"\\" if unescaped.endswith(b"\\") else b""
        pieces = unescaped.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b" ".join(pieces[self._in_text :: 2]).translate(AS_DIGITS)
        self._in_text ^= len(pieces) % 2 == 0
        self._cost += (
            QUOTE * (len(pieces) - 1)
            + TEXT_OR_CONTAINER * (outside.count(b"[") + outside.count(b"{"))
            + outside.count(b",")
            + HARD_NUMBER * (outside.count(b"0e") + outside.count(LONG_DIGITS))
        )
        if self._cost > MAX_COST:
            raise TooManyValues(
                f"the JSON has too many values: it may have {MAX_COST:,} numbers, or {MAX_COST // TEXT_OR_CONTAINER:,} "
                f"texts, lists and objects, or {MAX_COST // HARD_NUMBER:,} numbers with an exponent or with "
                f"{len(LONG_DIGITS)} digits; split the request"
            )
        *depths, self._depth = accumulate(
            map(STEPS.__getitem__, outside.translate(None, NO_STEPS)), initial=self._depth
        )
        if max(depths, default=0) > MAX_DEPTH or self._depth > MAX_DEPTH:
            raise InvalidJson(f"the JSON is nested too deeply: lists and objects may be {MAX_DEPTH} deep in each other")
