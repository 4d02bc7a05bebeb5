"""Large files of a message, which a client passes as descriptors instead of bytes: where the message has them.

A part of a message names such a file by ``"descriptor": true``.  The parts of a message take the files in the order in
which these came.  So a client may send messages and files without waiting, and the wire needs no numbers.  Pure.

Source: docs/PROTOCOL-REFERENCE.md, "Files as descriptors".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from uma_trio.errors import BadRequest
from uma_trio.protocol.chat import MAX_PICTURES

NAME: Final = "descriptor"
LEAST_BYTES: Final = 64 << 10
"""A client of ours sends a smaller file inside of its message."""
MAX_BYTES: Final = 64 << 20
"""Bytes of the files of a message together."""


def take_out(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """A message without its large files, and these files.  A file that is base64 already stays."""
    files: list[bytes] = []

    def without(part: Any) -> Any:
        data = part.get("data") if isinstance(part, Mapping) else None
        if not isinstance(data, bytes) or len(data) < LEAST_BYTES or len(files) == MAX_PICTURES:
            return part
        if sum(map(len, files)) + len(data) > MAX_BYTES:
            return part
        files.append(data)
        return {**{name: value for name, value in part.items() if name != "data"}, NAME: True}

    smaller = dict(fields)
    if isinstance(messages := fields.get("messages"), list | tuple):
        smaller["messages"] = [
            {**message, "content": [without(part) for part in message["content"]]} if _has_parts(message) else message
            for message in messages
        ]
    return smaller, files


def put_in(fields: Mapping[str, Any], files: list[bytes]) -> None:
    """Give the parts of a message that name files their ``data``, and remove these from ``files``.

    Raises:
        BadRequest: the message names more files than came, or a part has both.
    """
    n = 0
    for field, part in _parts(fields):
        if part.get(NAME) is not True:
            continue
        if "data" in part:
            raise BadRequest(f"{field}: a part has data or a descriptor, not both", field=field)
        if n == len(files):
            raise BadRequest(
                f"{field} names a descriptor, and none came with it: clients of the Unix socket can pass one if they run "
                "as the user of the daemon; send data",
                field=field,
            )
        del part[NAME]
        part["data"] = files[n]
        n += 1
    del files[:n]


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)


def _parts(fields: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of a message that has come, which may be anything, and their fields."""
    messages = fields.get("messages")
    for n, message in enumerate(messages if isinstance(messages, list) else ()):
        for i, part in enumerate(message["content"] if _has_parts(message) else ()):
            if isinstance(part, dict):
                yield f"messages[{n}].content[{i}]", part
