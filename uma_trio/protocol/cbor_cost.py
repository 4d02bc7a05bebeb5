"""Bounds how long decoding a CBOR document keeps an event loop, before it is decoded.

Like ``json_cost``, for CBOR.  A CBOR item begins with its length, so items are counted one by one.

====================================================  ======  =======
what                                                  weight  at most
====================================================  ======  =======
a number, ``true``, ``false`` or ``null``                  3  174,762
a text, or a byte string                                   4  131,072
a list, a map, a tag, or another simple value             16   32,768
====================================================  ======  =======

Measured with cbor2 6.3 on one EPYC core: 80 to 150 ns for a number, 80 to 210 ns for the second kind, 150 to 1,100 ns for the
third.  So no document takes longer than about 25 ms.

Source: RFC 8949, section 3 and appendix B.
"""

from __future__ import annotations

from typing import Final

from uma_trio.errors import TooManyValues

MAX_COST: Final = 1 << 19
NUMBER: Final = 3
TEXT: Final = 4
CONTAINER: Final = 16

_WEIGHTS: Final = (*[NUMBER] * 0x40, *[TEXT] * 0x40, *[CONTAINER] * 0x74, *[NUMBER] * 8, *[CONTAINER] * 4)
"""By the first byte of an item.  0xf4 to 0xfb are ``false``, ``true``, ``null``, ``undefined`` and floats."""

_ARGUMENT_BYTES: Final = (*[0] * 24, 1, 2, 4, 8, 0, 0, 0, 0)
"""By the lower five bits of the first byte."""


def _step(first: int) -> int:
    """Bytes from an item with this first byte to the next item; 0 if the argument of the item says it."""
    is_text, argument_bytes = 0x40 <= first < 0x80, _ARGUMENT_BYTES[first & 0x1F]
    if is_text and argument_bytes:
        return 0
    return 1 + argument_bytes + (first & 0x1F if is_text and first & 0x1F < 24 else 0)


_STEPS: Final = tuple(map(_step, range(256)))


class CborCost:
    """The cost of decoding a document, counted in parts."""

    def __init__(self) -> None:
        self._cost = 0
        self._skipped = 0
        """Bytes of the next part that belong to an item that has been counted."""
        self._rest = b""
        """The beginning of a text of which the length is not complete yet."""

    def add(self, part: bytes) -> None:
        """Count the next part.

        Raises:
            TooManyValues: all parts together cost too much.
        """
        part = self._rest + part
        self._rest = b""
        place, end, cost = self._skipped, len(part), self._cost
        while place < end:
            first = part[place]
            step = _STEPS[first]
            if not step:
                begin = place + 1 + _ARGUMENT_BYTES[first & 0x1F]
                if begin > end:
                    self._rest = part[place:]
                    place = end
                    break
                step = begin - place + int.from_bytes(part[place + 1 : begin], "big")
            place += step
            cost += _WEIGHTS[first]
        self._skipped, self._cost = place - end, cost
        if cost > MAX_COST:
            raise TooManyValues(
                f"the CBOR has too many values: it may have {MAX_COST // NUMBER:,} numbers, or {MAX_COST // TEXT:,} "
                f"texts, or {MAX_COST // CONTAINER:,} lists and maps; split the request, or send it as JSON, which may "
                "have more"
            )
