"""Every error that a client can be told, in one tree.

An error carries its wire code (docs/PROTOCOL.md) and the HTTP status that says the same.  Where it
arises is not this module's affair; whoever catches it at a front door turns it into that door's
language with ``code``, ``str(error)`` and ``http_status``.

Three branches say whose fault it is: ``ProtocolError`` and ``LimitError`` are the client's, and
``RuntimeFault`` is ours.
"""

from __future__ import annotations

from typing import ClassVar


class UmaError(Exception):
    """Base of everything that is reported to a client; never raised itself."""

    code: ClassVar[str]
    http_status: ClassVar[int]

    request_id: str | None = None
    """The ``id`` of the request at fault, where it is known; it goes into the error event."""

    retry_after_ms: int | None = None
    """When trying again may help, where that can be said."""


class ProtocolError(UmaError):
    """The client broke the protocol.  Framed connections answer with the code, then close."""

    http_status = 400


class FrameTooLarge(ProtocolError):
    """A frame announces more than ``max_frame_bytes``; raised before its payload is waited for."""

    code = "E_PROTO_FRAME_TOO_LARGE"
    http_status = 413


class TruncatedFrame(ProtocolError):
    """The client closed its side, or fell silent for too long, inside a frame."""

    code = "E_PROTO_TRUNCATED"


class InvalidJson(ProtocolError):
    """A JSON payload that does not parse to an object."""

    code = "E_PROTO_INVALID_JSON"


class InvalidCbor(ProtocolError):
    """A CBOR payload that does not parse to a map with text keys."""

    code = "E_PROTO_INVALID_CBOR"


class BadRequest(ProtocolError):
    """A message that parses, but lacks a field or has one of the wrong type or out of bounds."""

    code = "E_PROTO_BAD_REQUEST"


class Busy(ProtocolError):
    """A second request on a connection whose first is still running.  The first goes on."""

    code = "E_PROTO_BUSY"
    http_status = 409


class LimitError(UmaError):
    """The request is well formed, but more than this server gives."""

    http_status = 429


class PromptTooLarge(LimitError):
    """The prompt has more bytes or tokens than allowed."""

    code = "E_LIMIT_PROMPT_TOO_LARGE"
    http_status = 413


class MaxTokensTooLarge(LimitError):
    """``max_tokens`` is above the server's limit."""

    code = "E_LIMIT_MAX_TOKENS"
    http_status = 400


class ContextTooSmall(LimitError):
    """prompt + max_tokens can never fit into the context window, whoever else is served."""

    code = "E_LIMIT_CONTEXT"
    http_status = 400


class TooManySessions(LimitError):
    """As many connections are open as allowed."""

    code = "E_LIMIT_SESSIONS"


class QueueFull(LimitError):
    """As many requests wait for room as allowed."""

    code = "E_LIMIT_QUEUE"


class KvFull(LimitError):
    """Others hold the KV cells that the request would need, and too many wait for them already; ask again later."""

    code = "E_LIMIT_KV"


class RequestTimeout(LimitError):
    """The request ran for longer than ``request_timeout_s``."""

    code = "E_LIMIT_REQUEST_TIMEOUT"
    http_status = 504


class IdleTimeout(LimitError):
    """Nothing came from the client for ``idle_timeout_s`` while no request was running."""

    code = "E_LIMIT_IDLE_TIMEOUT"
    http_status = 408


class SessionError(UmaError):
    """What was asked of a session cannot be done."""

    http_status = 409


class SessionNotFound(SessionError):
    """There is no such session, or it is somebody else's."""

    code = "E_SESSION_NOT_FOUND"
    http_status = 404


class SessionBusy(SessionError):
    """The session is answering; ask again when it has, or fork it before."""

    code = "E_SESSION_BUSY"


class SessionExists(SessionError):
    """A fork was to get a name that is taken."""

    code = "E_SESSION_EXISTS"


class RuntimeFault(UmaError):
    """The server could not do what it had promised."""

    http_status = 500


class DecodeFailed(RuntimeFault):
    """llama_decode failed; the requests in that tick end, later ones are served."""

    code = "E_RUNTIME_DECODE"


class ModelUnavailable(RuntimeFault):
    """The model has failed for good: the server ends, and has nobody left who could compute."""

    code = "E_MODEL_UNAVAILABLE"
    http_status = 503


class ShuttingDown(RuntimeFault):
    """The daemon drains and takes no more requests."""

    code = "E_RUNTIME_SHUTDOWN"
    http_status = 503


class InternalError(RuntimeFault):
    """A defect of the server's own; the log has its traceback."""

    code = "E_RUNTIME_INTERNAL"


class WriteFailed(RuntimeFault):
    """The client did not take its bytes for ``write_timeout_s``; seen in logs and metrics only."""

    code = "E_IO_WRITE"
    http_status = 499


def all_errors() -> tuple[type[UmaError], ...]:
    """Every class that has a code, in the order of this file; the documents are held against it."""
    found: list[type[UmaError]] = []
    branches: list[type[UmaError]] = [UmaError]
    while branches:
        branch = branches.pop(0)
        branches.extend(branch.__subclasses__())
        if "code" in vars(branch):
            found.append(branch)
    return tuple(found)
