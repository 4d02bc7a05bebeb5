"""Contents of messages with pictures: each API spells them its own way, and the socket protocol has a list of parts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import attrs
import msgspec

from uma_trio.gateway.errors import invalid
from uma_trio.gateway.media import MediaPart, ToFetch
from uma_trio.protocol.passed_files import LEAST_BYTES

SEEING_ROLES: Final = ("user", "tool", "function")
"""Roles of messages that may have pictures."""

_HEAD_CHARS: Final = 256
_DATA_URL: Final = re.compile(r"data:[a-z0-9.+-]*/?[a-z0-9.+-]*(?:;[a-z0-9.=+-]+)*;base64,", re.IGNORECASE | re.ASCII)


@attrs.frozen
class Picture:
    """A picture or sound of a message."""

    parameter: str
    """The field of the body that it comes from."""
    data: str | bytes = ""
    """Its file, unless it has a ``url``: as base64 if the request has it so.  The daemon checks it."""
    url: str | None = None
    """Where the gateway fetches its file, if the request has a URL in place of it; see ``PictureUrls``."""
    type: Literal["image", "audio"] = "image"


def picture_of_url(url: str, parameter: str) -> Picture:
    """The picture that a data URL contains, or that another URL names.

    Raises:
        HttpError: it is neither.
    """
    head = _DATA_URL.match(url[:_HEAD_CHARS])
    if head is not None:
        return Picture(parameter, url[head.end() :])
    scheme = url[:_HEAD_CHARS].partition(":")[0].lower()
    if scheme in ("http", "https"):
        return Picture(parameter, url=url)
    raise invalid(
        "this is no data URL, and none of http or https: send the file itself, as data:image/png;base64,...",
        parameter=parameter,
    )


def content_of(parts: Sequence[str | Picture], between: str) -> str | list[dict[str, Any]]:
    """A content of the socket protocol: one text if there are no pictures.

    Args:
        between: goes between two texts that follow each other.
    """
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Picture):
            if part.url is None:
                content.append(MediaPart(part.parameter, type=part.type, data=_file(part.data)))
            else:
                content.append(ToFetch(part.parameter, type=part.type, url=part.url))
        elif content and content[-1]["type"] == "text":
            content[-1] = {"type": "text", "text": f"{content[-1]['text']}{between}{part}"}
        else:
            content.append({"type": "text", "text": part})
    if all(part["type"] == "text" for part in content):
        return content[0]["text"] if content else ""
    return content


def _file(data: str | bytes) -> str | bytes:
    """A large file as bytes, so that the daemon gets a descriptor of it.  What is no base64 stays: the daemon refuses it.

    Base64 may be in lines, as that of MIME.
    """
    if isinstance(data, bytes):
        return data
    data = "".join(data.split())
    if len(data) > LEAST_BYTES * 4 // 3:
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(data, bytes)
    return data
