"""Asks the daemon one question, without an event loop."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, Final

from uma_trio.connect.connector import SocketPath, connect_blocking
from uma_trio.connect.errors import BrokenProtocol
from uma_trio.errors import ProtocolError
from uma_trio.protocol.framing import FrameReader, frame

MAX_ANSWER_BYTES: Final = 4 << 20
"""Largest event of an answer that ``query`` reads."""
READ_BYTES: Final = 1 << 16


def query(path: SocketPath | None, message: Mapping[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
    """Send ``message`` as framed JSON and return the events of its answer.  Blocks.

    An event with ``more`` is followed by another one.

    Args:
        path: the daemon's socket; ``default_socket_path()`` if not given.

    Raises:
        NoDaemon: no daemon can be reached there.
        TimeoutError: there was no answer in ``timeout_s`` seconds.
        BrokenProtocol: the other side does not answer as a daemon does.
    """
    until = time.monotonic() + timeout_s
    frames = FrameReader(max_frame_bytes=MAX_ANSWER_BYTES)
    events: list[dict[str, Any]] = []
    with connect_blocking(path) as sock:
        try:
            sock.settimeout(timeout_s)
            with contextlib.suppress(BrokenPipeError):  # a daemon that closed the connection may have sent the reason
                sock.sendall(frame(json.dumps(message).encode()))
            while not events or events[-1].get("more"):
                while (payload := frames.next_payload()) is None:
                    left_s = until - time.monotonic()
                    if left_s <= 0:
                        raise TimeoutError
                    sock.settimeout(left_s)
                    data = sock.recv(READ_BYTES)
                    frames.receive_data(data)
                    if not data:
                        raise BrokenProtocol("the daemon closed the connection without an answer")
                event = json.loads(payload)
                if not isinstance(event, dict):
                    raise BrokenProtocol("the answer is not an object")
                events.append(event)
        except (ConnectionError, ProtocolError, ValueError) as error:
            raise BrokenProtocol(str(error)) from None
    return events
