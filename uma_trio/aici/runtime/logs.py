"""What one controller has printed, bounded."""

from __future__ import annotations

from typing import Final

MAX_BYTES: Final = 64 << 10
DROPPED_BYTES: Final = 16 << 10
"""How much is dropped at once when there is too much."""


class LogBuffer:
    """The last ``MAX_BYTES`` of what was written; after an error the first ones, so that the error stays readable."""

    def __init__(self) -> None:
        self._text = bytearray()
        self.keeps_first = False
        """Whether new text is dropped when there is too much, instead of the oldest."""

    def write(self, text: bytes, n_before: int = 0) -> None:
        """Append ``text``.

        Args:
            n_before: bytes that stood before ``text`` and were left out, because it has ``MAX_BYTES`` without them.
        """
        excess = len(self._text) + n_before + len(text) - MAX_BYTES
        if excess <= 0:
            self._text += text
        elif self.keeps_first:
            self._text += text[: max(0, MAX_BYTES - len(self._text))]
        else:
            dropped = -(-excess // DROPPED_BYTES) * DROPPED_BYTES
            n_old = min(dropped, len(self._text))
            del self._text[:n_old]
            self._text += text[max(0, dropped - n_old - n_before) :]

    def take(self) -> str:
        """What was written since the last time.  Bytes that are not UTF-8 become U+FFFD."""
        text, self._text = self._text, bytearray()
        return text.decode("utf-8", "replace")
