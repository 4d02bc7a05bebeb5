"""Errors of the gateway: what went wrong, as an HTTP status with a code and a text.

Each dialect has its own shape for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, NamedTuple

from uma_trio.client import ClientError, Failure, Loading, NoDaemon, ServerError
from uma_trio.errors import (
    BadRequest,
    ControllerNotFound,
    DeadlineMissed,
    FrameTooLarge,
    InternalError,
    InvalidJson,
    ModelNotFound,
    ShuttingDown,
    TooManyValues,
    UmaError,
    all_errors,
)

ETA: Final = "x-uma-eta-ms"
"""The header that says in how many milliseconds an answer will be complete."""


class ErrorKind(NamedTuple):
    """What programs compare.  The classes of ``uma_trio.errors`` are such kinds as well."""

    code: str
    http_status: int
    retry_after_ms: int | None = None
    """Delay after which a retry may succeed, unless an error has one of its own."""


AnyKind = ErrorKind | type[UmaError]

INVALID_MODEL: Final = ErrorKind("E_GATEWAY_MODELS", 400)
NO_KEY: Final = ErrorKind("E_GATEWAY_KEY", 401)
UNSIGNED_PEER: Final = ErrorKind("E_GATEWAY_PEER", 401)
NO_PEERS: Final = ErrorKind("E_GATEWAY_PEER", 403)
NOT_ADMIN: Final = ErrorKind("E_GATEWAY_ADMIN", 403)
NOT_OWNER: Final = ErrorKind("E_GATEWAY_OWNER", 403)
UNKNOWN_HOST: Final = ErrorKind("E_GATEWAY_HOST", 403)
UNKNOWN_ORIGIN: Final = ErrorKind("E_GATEWAY_ORIGIN", 403)
NO_PATH: Final = ErrorKind("E_GATEWAY_NOT_FOUND", 404)
NO_FILE: Final = ErrorKind("E_GATEWAY_FILE", 404)
NO_BATCH: Final = ErrorKind("E_GATEWAY_BATCH", 404)
NO_ANSWER: Final = ErrorKind("E_GATEWAY_NO_ANSWER", 404)
WRONG_METHOD: Final = ErrorKind("E_GATEWAY_METHOD", 405)
BODY_TIMEOUT: Final = ErrorKind("E_GATEWAY_BODY_TIMEOUT", 408)
FILE_IN_USE: Final = ErrorKind("E_GATEWAY_FILE_IN_USE", 409)
MODEL_IN_USE: Final = ErrorKind("E_GATEWAY_MODELS", 409)
BATCH_ENDED: Final = ErrorKind("E_GATEWAY_BATCH_ENDED", 409)
BODY_TOO_LARGE: Final = ErrorKind("E_GATEWAY_BODY_TOO_LARGE", 413)
FILES_FULL: Final = ErrorKind("E_GATEWAY_FILES_FULL", 413)
ENCODED_BODY: Final = ErrorKind("E_GATEWAY_ENCODING", 415)
OTHER_PEER: Final = ErrorKind("E_GATEWAY_PEER", 421)
RATE: Final = ErrorKind("E_GATEWAY_RATE", 429)
QUOTA: Final = ErrorKind("E_GATEWAY_QUOTA", 429)
TOO_MANY_WRONG_KEYS: Final = ErrorKind("E_GATEWAY_KEY", 429)
TOO_MANY_FILES: Final = ErrorKind("E_GATEWAY_BUSY", 429, retry_after_ms=1000)
HEADERS_TOO_LARGE: Final = ErrorKind("E_GATEWAY_HEADERS", 431)
CLIENT_LEFT: Final = ErrorKind("E_GATEWAY_CLIENT_LEFT", 499)
NO_TOKENIZER_FILE: Final = ErrorKind("E_GATEWAY_NO_FILE", 501)
BROKEN: Final = ErrorKind("E_GATEWAY_BROKEN", 502)
LOADING: Final = ErrorKind("E_GATEWAY_LOADING", 503, retry_after_ms=2000)
NO_DAEMON: Final = ErrorKind("E_GATEWAY_NO_DAEMON", 503, retry_after_ms=1000)
TOO_MANY_BODIES: Final = ErrorKind("E_GATEWAY_BUSY", 503, retry_after_ms=1000)
NO_STORAGE: Final = ErrorKind("E_GATEWAY_STORAGE", 503)
SILENT_PEER: Final = ErrorKind("E_GATEWAY_PEER", 503, retry_after_ms=2000)
"""The gateway's own errors, which docs/HTTP.md explains; docs/PROTOCOL-REFERENCE.md has those of the daemon."""

OWN_KINDS: Final = tuple([kind for kind in list(vars().values()) if isinstance(kind, ErrorKind)])
"""All of these."""

STATUSES: Final = sorted(
    {kind.http_status for kinds in (OWN_KINDS, all_errors()) for kind in kinds} - {CLIENT_LEFT.http_status}
)
"""What a client may get instead of an answer."""

LOST: Final[Container[AnyKind]] = (NO_DAEMON, BROKEN, ShuttingDown)
"""Errors that end the connection to an answer, and not the answer, if it is detached."""

UNKNOWN_RETRY_MS: Final = 1000
"""Where the daemon cannot estimate the wait."""
LONGEST_WAIT_S: Final = 60

KIND_OF_CODE: Final[Mapping[str, AnyKind]] = {kind.code: kind for kind in all_errors()}
"""The errors of the socket protocol."""


class HttpError(Exception):
    """A request that cannot be answered.

    Args:
        kind: its code and its HTTP status.
        message: what people read; says what to do.
        retry_after_ms: delay after which a retry may succeed; ``None``: that of the kind, if it has one.
        eta_ms: in how many milliseconds the answer would have been complete, if that is too late.
        parameter: the field of the request that is wrong, if it is one.
    """

    def __init__(
        self,
        kind: AnyKind,
        message: str,
        *,
        retry_after_ms: int | None = None,
        eta_ms: int | None = None,
        parameter: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.code = kind.code
        self.status = kind.http_status
        self.message = message
        if retry_after_ms is None and isinstance(kind, ErrorKind):
            retry_after_ms = kind.retry_after_ms
        self.retry_after_ms = retry_after_ms
        self.eta_ms = eta_ms
        self.parameter = parameter

    def reword(self, rename: Callable[[str], str]) -> HttpError:
        """The same error with other names of fields."""
        return HttpError(
            self.kind,
            rename(self.message),
            retry_after_ms=self.retry_after_ms,
            eta_ms=self.eta_ms,
            parameter=self.parameter and rename(self.parameter),
        )

    @property
    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds, and OpenAI's header in milliseconds, if the delay is known; the time of an ETA.

        The clients of OpenAI and Anthropic wait no longer than a minute, so a longer delay comes with their header that
        says that a retry is useless.
        """
        headers = {} if self.eta_ms is None else {ETA: str(self.eta_ms)}
        if self.retry_after_ms is None:
            return {**headers, "X-Should-Retry": "false"} if self.kind is DeadlineMissed else headers
        seconds = max(1, math.ceil(self.retry_after_ms / 1000))
        headers |= {"Retry-After": str(seconds), "Retry-After-Ms": str(self.retry_after_ms)}
        return headers if seconds <= LONGEST_WAIT_S else {**headers, "X-Should-Retry": "false"}


def invalid(message: str, *, parameter: str | None = None) -> HttpError:
    """The error for a field that is missing, of the wrong type, out of bounds or not supported."""
    return HttpError(BadRequest, message, parameter=parameter)


def client_left() -> HttpError:
    """The error for a request whose client has closed the connection."""
    return HttpError(CLIENT_LEFT, "the client closed the connection")


def internal_error(what: str = "internal error") -> HttpError:
    """The error for a defect, which was logged."""
    return HttpError(InternalError, f"{what}; the daemon's log has the details")


def json_refusal(error: TooManyValues | InvalidJson, *, parameter: str | None = None) -> HttpError:
    """The error for JSON that would take too long to decode, or is nested too deeply."""
    if isinstance(error, InvalidJson):
        return invalid(str(error), parameter=parameter)
    return HttpError(type(error), str(error), parameter=parameter)


def try_again_in(retry_after_ms: int) -> str:
    """A remedy for people, in the unit that suits the wait: ``try again in 12 s``."""
    seconds = max(1, math.ceil(retry_after_ms / 1000))
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"try again in {math.ceil(seconds / length)} {unit}"
    return f"try again in {seconds} s"


def from_failure(failure: Failure) -> HttpError:
    """The error that the daemon's event reports.  A code of a newer daemon counts as an internal error."""
    kind = KIND_OF_CODE.get(failure.code, ErrorKind(failure.code, InternalError.http_status))
    retry_after_ms = failure.retry_after_ms
    if retry_after_ms is None and kind.http_status in (429, 503):
        retry_after_ms = UNKNOWN_RETRY_MS
    message = failure.message
    if kind is FrameTooLarge:
        message = f"the request is larger than the daemon takes (--max-frame-bytes): {message}"
    if kind is ControllerNotFound:
        message = (
            f"{message.rstrip()} (POST /v1/controllers stores a controller, GET /v1/controllers/tags lists the tags)"
        )
    if kind.http_status == 429 and retry_after_ms is not None and "again" not in message:
        message = f"{message}; {try_again_in(retry_after_ms)}"
    if kind is ModelNotFound and "--on-demand" not in message:
        message = f"{message}; uma-trio serve --http-any-model answers requests for other names with its first model"
    return HttpError(
        kind,
        message,
        retry_after_ms=retry_after_ms,
        eta_ms=failure.eta_ms,
        parameter=failure.field,
    )


def from_client_error(error: ClientError) -> HttpError:
    """The error for a request that the daemon did not answer."""
    match error:
        case ServerError():
            return from_failure(error.event)
        case Loading():
            return HttpError(LOADING, "the model is being loaded; try again soon")
        case NoDaemon():
            return HttpError(NO_DAEMON, f"the daemon is not there: {error.reason}")
    return HttpError(BROKEN, f"the daemon's answer broke off: {error}")


FieldNames = Mapping[str, str | Sequence[str]]
"""For a field of the socket protocol, the field of a body that it comes from.  If there are several, the first one that a
body has counts.  ``[]`` stands for any index: ``tools[].parameters``."""

_PLACE: Final = re.compile(r"(?<![\w.'/-])[a-z]\w*(?:\[\d+\]|\.\w+)*(?![\w'/-])")
"""A field and what is inside it; not a flag, and nothing that is quoted."""
_INDEX: Final = re.compile(r"\[\d+\]")
_STEP: Final = re.compile(r"(?=[.\[])")


def field_renamer(names: FieldNames, given: Container[str]) -> Callable[[str], str]:
    """A function that replaces names of fields in a message by those of a dialect.

    A word without an underscore is the name of a field at the beginning of a message only: the rest is English.

    Args:
        given: the fields of the body.
    """

    def rename(match: re.Match[str]) -> str:
        place = match[0]
        if match.start() and "_" not in place:
            return place
        steps = _STEP.split(place)
        for n in range(len(steps), 0, -1):
            known = "".join(steps[:n])
            name = names.get(known) or names.get(_INDEX.sub("[]", known))
            if (chosen := _choose(name, given)) is not None:
                for index in _INDEX.findall(known):
                    chosen = chosen.replace("[]", index, 1)
                return chosen + "".join(steps[n:])
        return place

    return lambda message: _PLACE.sub(rename, message)


def _choose(names: str | Sequence[str] | None, given: Container[str]) -> str | None:
    if names is None or isinstance(names, str):
        return names
    return next((name for name in names if name.partition(".")[0] in given), None)
