"""What logs, metrics and traces say of one HTTP request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from uma_trio.protocol.events import Eos

NO_ROUTE: Final = "other"
"""Route of requests that no endpoint answers: paths come from outside."""

CLIENT_LEFT: Final = 499


@attrs.frozen
class EndOfAnswer:
    """The last event of an answer, and when it came."""

    event: Eos
    at_ns: int


@attrs.define
class RequestRecord:
    """What is known of one HTTP request."""

    request_id: str
    method: str
    headers: list[tuple[bytes, bytes]]
    began_ns: int = attrs.field(factory=time.time_ns)
    ended_ns: int = 0
    route: str = NO_ROUTE
    dialect: str = ""
    tenant: str | None = None
    status: int = CLIENT_LEFT
    is_stream: bool = False
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    """The request to the daemon, if there was one."""
    ends: list[EndOfAnswer] = attrs.field(factory=list)
    error_code: str | None = None
    """Why it was refused."""

    def note(self, events: Iterable[object]) -> None:
        """Keep the last events of answers."""
        for event in events:
            if type(event) is Eos:
                self.ends.append(EndOfAnswer(event, time.time_ns()))
