"""How many KV cells the attention of a call scans.

The time of attention grows with the cells that it scans, and these are not always the cells that it needs.
"""

from __future__ import annotations

import enum

import attrs


class AttentionScan(enum.Enum):
    """Which KV cells the attention of one row scans."""

    SEQUENCE = "sequence"
    """Those of its own sequence: what is masked is skipped."""
    LONGEST = "longest"
    """As many as the longest sequence of its call has."""
    CACHE = "cache"
    """All cells in use, of whichever sequence, also of idle ones that are kept for reuse."""


@attrs.frozen
class Attention:
    """What attention scans now."""

    scan: AttentionScan = AttentionScan.SEQUENCE
    cells_in_use: int = 0
    """Cells that hold tokens before the tick.  Needed only if all of them are scanned."""

    def decode_context(self, rows: int, total: int, longest: int) -> int:
        """Cells that the decode rows of one call scan together.

        Args:
            rows: number of rows.
            total: sum of their context lengths.
            longest: the longest of these.
        """
        match self.scan:
            case AttentionScan.SEQUENCE:
                return total
            case AttentionScan.LONGEST:
                return rows * longest
            case AttentionScan.CACHE:
                return rows * self.cells_in_use

    def prefill_context(self, mean: float) -> float:
        """Cells that each token of prefill chunks scans, without those of the chunk.

        Args:
            mean: tokens before the chunks, averaged over their tokens.
        """
        return self.cells_in_use if self.scan is AttentionScan.CACHE else mean
