"""Errors: what a client can receive, as one tree of exceptions, and errors for people, which bring a remedy.

Each class of the tree has a wire code (docs/PROTOCOL-REFERENCE.md) and its HTTP status.  The class is raised where the problem is
found; the connection, or the HTTP gateway, turns it into an answer with ``code``, ``str(error)`` and ``http_status``.

The branches say who can fix the problem: ``ProtocolError``, ``ModelRequestError``, ``ControllerRequestError``,
``LimitError`` and ``SessionError`` are up to the client, ``RuntimeFault`` to the daemon.
"""

from __future__ import annotations

from typing import ClassVar


class ErrorWithRemedy(Exception):
    """An error for a person: why something does not work, and what to do.  ``str`` joins both.

    Args:
        remedy: empty if none is known.
    """

    is_about_memory = False
    """Whether more free memory would help."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


class UmaError(Exception):
    """Base class of all errors that are reported to a client; never raised itself."""

    code: ClassVar[str]
    http_status: ClassVar[int]

    request_id: str | None = None
    """``id`` of the request that failed, if it is known; part of the error event."""

    eta_ms: int | None = None
    """In how many milliseconds the answer would have been complete, if it was refused for that; part of the error event."""

    def __init__(self, message: str = "", *, field: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        """Delay after which a retry may succeed, if the daemon can estimate it; part of the error event."""
        self.field = field
        """The field of the request that is wrong, as in ``messages[0].role``, if it is one; part of the error event."""


class ProtocolError(UmaError):
    """The client violated the protocol.  The daemon reports the error, then closes the connection."""

    http_status = 400


class FrameTooLarge(ProtocolError):
    """The header of a frame announces more than ``max_frame_bytes``.  Raised before the payload is received."""

    code = "E_PROTO_FRAME_TOO_LARGE"
    http_status = 413


class TruncatedFrame(ProtocolError):
    """The client stopped sending inside a frame, or did not finish it in time."""

    code = "E_PROTO_TRUNCATED"


class InvalidJson(ProtocolError):
    """A JSON payload is not one valid object."""

    code = "E_PROTO_INVALID_JSON"


class TooManyValues(ProtocolError):
    """Decoding a document would keep others waiting.  Raised before it is decoded."""

    code = "E_PROTO_TOO_MANY_VALUES"
    http_status = 413


class InvalidCbor(ProtocolError):
    """A CBOR payload is not one valid map with text keys."""

    code = "E_PROTO_INVALID_CBOR"


class BadRequest(ProtocolError):
    """A field of a message is missing, has the wrong type, or is out of bounds."""

    code = "E_PROTO_BAD_REQUEST"


class Busy(ProtocolError):
    """A second request arrived on a connection while its first was running.  The first one goes on."""

    code = "E_PROTO_BUSY"
    http_status = 409


class ModelRequestError(UmaError):
    """The daemon has models, and none of them can do what the request asks."""


class ModelNotFound(ModelRequestError):
    """The daemon has no model of the requested name."""

    code = "E_MODEL_NOT_FOUND"
    http_status = 404


class AdapterNotFound(ModelRequestError):
    """The model has no LoRA adapter of the requested name."""

    code = "E_MODEL_NO_ADAPTER"
    http_status = 404


class NoChatTemplate(ModelRequestError):
    """A request has ``messages``, and the model has no chat template to render them with."""

    code = "E_MODEL_NO_CHAT_TEMPLATE"
    http_status = 400


class NoInfill(ModelRequestError):
    """A request has ``infill``, and the model's vocabulary has no tokens for it."""

    code = "E_MODEL_NO_INFILL"
    http_status = 400


class NoVision(ModelRequestError):
    """A request has pictures, and the model cannot see: it has no projector, or one that cannot be used."""

    code = "E_MODEL_NO_VISION"
    http_status = 400


class NoHearing(ModelRequestError):
    """A request has sound, and the model cannot hear: its projector takes pictures only."""

    code = "E_MODEL_NO_AUDIO"
    http_status = 400


class InvalidConstraint(ModelRequestError):
    """The ``constraint`` of a request is invalid, unsupported or too complex."""

    code = "E_CONSTRAINT_INVALID"
    http_status = 400


class ControllerRequestError(UmaError):
    """The controller of a request does not do what it should."""


class ControllerFailed(ControllerRequestError):
    """The controller stopped with an error, took too long, or asked for something impossible.  Its answer ends."""

    code = "E_CONTROLLER_FAILED"
    http_status = 400


class ControllerNotFound(ControllerRequestError):
    """The daemon has no controller of this module id or tag."""

    code = "E_CONTROLLER_NOT_FOUND"
    http_status = 404


class LimitError(UmaError):
    """A valid request exceeds a limit of this daemon."""

    http_status = 429


class PromptTooLarge(LimitError):
    """The prompt exceeds ``max_prompt_bytes`` or ``max_prompt_tokens``."""

    code = "E_LIMIT_PROMPT_TOO_LARGE"
    http_status = 400


class MaxTokensTooLarge(LimitError):
    """``max_tokens`` of the request exceeds the daemon's limit."""

    code = "E_LIMIT_MAX_TOKENS"
    http_status = 400


class ContextTooSmall(LimitError):
    """Prompt and ``max_tokens`` together exceed the context window, even with no other request running."""

    code = "E_LIMIT_CONTEXT"
    http_status = 400


class TooManyConnections(LimitError):
    """``max_connections`` connections are open."""

    code = "E_LIMIT_CONNECTIONS"


class TooManyRequests(LimitError):
    """The principal has as many requests in flight as it may."""

    code = "E_LIMIT_REQUESTS"


class QueueFull(LimitError):
    """``max_queue`` requests are waiting already."""

    code = "E_LIMIT_QUEUE"


class KvFull(LimitError):
    """The KV cells that the request needs are reserved, and ``max_queue`` requests are waiting for such cells."""

    code = "E_LIMIT_KV"


class RequestTimeout(LimitError):
    """The request took longer than ``request_timeout_s``."""

    code = "E_LIMIT_REQUEST_TIMEOUT"
    http_status = 504


class DeadlineMissed(LimitError):
    """The answer will not be complete within ``deadline_ms``, or it had not begun by then."""

    code = "E_LIMIT_DEADLINE"
    http_status = 504


class IdleTimeout(LimitError):
    """The client sent nothing for ``idle_timeout_s`` while no request was running."""

    code = "E_LIMIT_IDLE_TIMEOUT"
    http_status = 408


class SessionError(UmaError):
    """The session is not in a state that allows the request."""

    http_status = 409


class SessionNotFound(SessionError):
    """The principal has no session of this name."""

    code = "E_SESSION_NOT_FOUND"
    http_status = 404


class SessionBusy(SessionError):
    """Another request of the session is running.  Retry when it has ended, or fork the session before it starts."""

    code = "E_SESSION_BUSY"


class SessionExists(SessionError):
    """The new name of a fork is taken."""

    code = "E_SESSION_EXISTS"


class SessionElsewhere(SessionError):
    """Another daemon has the session, or may have it."""

    code = "E_SESSION_ELSEWHERE"


class NotHandedOver(SessionError):
    """The session cannot be handed over to another daemon now."""

    code = "E_SESSION_NOT_HANDED_OVER"


class AnswerError(UmaError):
    """The detached answer is not in a state that allows the request."""

    http_status = 409


class AnswerNotFound(AnswerError):
    """The principal has no detached or running answer of this id, or nothing is known of its prompt."""

    code = "E_ANSWER_NOT_FOUND"
    http_status = 404


class AnswerExists(AnswerError):
    """The principal has a detached answer of this id already."""

    code = "E_ANSWER_EXISTS"


class RuntimeFault(UmaError):
    """The daemon failed to do what it accepted to do."""

    http_status = 500


class DecodeFailed(RuntimeFault):
    """``llama_decode`` failed.  The requests of that step end; the others go on."""

    code = "E_RUNTIME_DECODE"


class ModelUnavailable(RuntimeFault):
    """The model cannot be loaded, it failed and could not be restarted, or a process that it needs was killed twice."""

    code = "E_MODEL_UNAVAILABLE"
    http_status = 503


class ModelLoading(RuntimeFault):
    """The model was not loaded within ``load_wait_s``: loading takes longer, or other models leave no room for it."""

    code = "E_MODEL_LOADING"
    http_status = 503


class ControllerUnavailable(RuntimeFault):
    """The process that runs controllers has ended, cannot be started, or is switched off.  Other requests go on."""

    code = "E_CONTROLLER_UNAVAILABLE"
    http_status = 503


class ShuttingDown(RuntimeFault):
    """The daemon is draining and accepts no new requests."""

    code = "E_RUNTIME_SHUTDOWN"
    http_status = 503

    def __init__(self, message: str = "the server is shutting down") -> None:
        super().__init__(message)


class InternalError(RuntimeFault):
    """A bug in the daemon; its log has the traceback."""

    code = "E_RUNTIME_INTERNAL"


class WriteFailed(RuntimeFault):
    """The client read nothing for ``write_timeout_s``.  Appears in logs and metrics only."""

    code = "E_IO_WRITE"
    http_status = 499


def all_errors() -> tuple[type[UmaError], ...]:
    """Return every class that has a code, in breadth-first order.  The tests compare the documents with this list."""
    classes: list[type[UmaError]] = []
    branches: list[type[UmaError]] = [UmaError]
    while branches:
        branch = branches.pop(0)
        branches.extend(branch.__subclasses__())
        if "code" in vars(branch):
            classes.append(branch)
    return tuple(classes)
