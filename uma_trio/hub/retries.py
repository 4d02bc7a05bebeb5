"""When to try again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import attrs
import trio

from uma_trio.hub.errors import HubError, Interrupted, Unreachable

T = TypeVar("T")

ATTEMPTS: Final = 6
CHECK_NETWORK: Final = (
    "check the network; HTTPS_PROXY names a proxy, HF_ENDPOINT another hub, and with --offline only models that are here "
    "are used"
)


@attrs.frozen(kw_only=True)
class Delays:
    """Delays between attempts that bring nothing; each is twice the one before."""

    attempts: int = ATTEMPTS
    """In a row without progress, after which the download ends."""
    first_s: float = 1.0
    longest_s: float = 30.0

    def after(self, failures: int, asked_s: float | None) -> float | None:
        """Seconds to wait after a number of failures in a row; ``None``: give up.

        Args:
            failures: since there was progress.  A connection that was cut after it brought something is no failure.
            asked_s: what the server asks for.
        """
        if failures >= self.attempts:
            return None
        own = min(self.longest_s, self.first_s * 2 ** (failures - 1)) if failures else 0.0
        return max(own, asked_s or 0.0)


async def retrying(
    attempt: Callable[[], Awaitable[T]], delays: Delays, progress: Callable[[], int], said: Callable[[str], None]
) -> T:
    """Await ``attempt()`` until it does not raise ``Interrupted``.

    Args:
        progress: grows with what attempts bring.
        said: gets a line for people before each wait.

    Raises:
        HubError: too many attempts in a row brought nothing, or the first one could not reach the server.
    """
    failures = 0
    while True:
        before = progress()
        try:
            return await attempt()
        except Interrupted as error:
            if isinstance(error, Unreachable) and not progress():
                raise HubError(str(error), CHECK_NETWORK) from None
            failures = 0 if progress() > before else failures + 1
            wait_s = delays.after(failures, error.wait_s)
            if wait_s is None:
                raise HubError(
                    f"{error}, {failures} times in a row", f"try again: what is here already is kept; {CHECK_NETWORK}"
                ) from None
            again = "at once" if not wait_s else f"in {wait_s:.0f} s"
            said(f"{error}; trying again {again}")
            await trio.sleep(wait_s)
