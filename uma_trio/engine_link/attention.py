"""How many KV cells the attention of a call scans.

The time of attention grows with the cells that it scans.  It may scan more cells than it needs: those of other sequences
too.  Which ones depends on the backend, on flash attention and on the layout of the KV cache.

Source: docs/design/scheduler.md, "What attention scans".
"""

from __future__ import annotations

import enum

import attrs


class AttentionScan(enum.Enum):
    """Which KV cells the attention of one row scans."""

    SEQUENCE = "sequence"
    """The cells of its own sequence.  Masked cells are skipped."""
    LONGEST = "longest"
    """As many cells as the longest sequence of its call has: shorter ones are padded."""
    CACHE = "cache"
    """All cells up to the highest one in use, of whichever sequence, also of idle ones that are kept for reuse."""


@attrs.frozen
class Attention:
    """What attention scans in one tick."""

    scan: AttentionScan = AttentionScan.SEQUENCE
    cells_scanned: int = 0
    """Cells up to the highest one that holds a token before the tick.  Used only with ``AttentionScan.CACHE``."""

    def decode_context(self, rows: int, total: int, longest: int) -> int:
        """Cells that the decode rows of one call scan, summed over the rows.

        Args:
            rows: number of rows.
            total: sum of their context lengths, in tokens.
            longest: the longest of their context lengths.
        """
        match self.scan:
            case AttentionScan.SEQUENCE:
                return total
            case AttentionScan.LONGEST:
                return rows * longest
            case AttentionScan.CACHE:
                return rows * self.cells_scanned

    def prefill_context(self, mean: float) -> float:
        """Cells that each token of the prefill chunks scans, without those of its chunk.

        Args:
            mean: tokens before a chunk, averaged over all tokens of the chunks.
        """
        return self.cells_scanned if self.scan is AttentionScan.CACHE else mean
