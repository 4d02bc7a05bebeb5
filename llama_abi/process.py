"""What the kernel does to this process when its parent ends."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the parent thread ends, also while this process is stopped.

    Linux only; elsewhere a no-op.  Does nothing either if the parent has ended before.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
