"""Messages between an engine and an AICI runtime, as JSON.  Both sides use this module.

The engine sends a ``MainRequest`` or a ``SideRequest``; the runtime answers with an envelope: ``Ok``, ``Error`` or
``JsonError``.  docs/AICI.md has the exchange.
"""

from __future__ import annotations

import binascii
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

Id = Annotated[int, Meta(ge=0, lt=2**32)]
"""The number that an engine gives to a sequence."""
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]

T = TypeVar("T")

LOCAL_USER: Final = "local"

PIECE_BYTES: Final = 3 << 16
"""A module is encoded in pieces of this size, so that other threads need not wait for the whole."""

_ENDED_ITSELF: Final = re.compile(r"Error \(\w+\): (.*\S)\n\*\*\* aici_host_stop\(\)\s*", re.DOTALL)
_FAILED: Final = "*** failed: "
"""What ``aici_fail`` prints before the reason."""
_IN_CALLBACK: Final = re.compile(r"Error \(\w+\): ")


class Auth(Struct, frozen=True):
    """For whom a request is made."""

    user: str = LOCAL_USER
    is_admin: bool = False


class _SentAuth(Struct, frozen=True):
    user: str
    is_admin: bool


# Requests ---------------------------------------------------------------------------------------------------------


class Ping(Struct, frozen=True, tag_field="op", tag="ping"):
    """Answered with ``{"pong": 1}``."""


class Tokens(Struct, frozen=True, tag_field="op", tag="tokens"):
    """Asks for the size of the vocabulary."""


class Stop(Struct, frozen=True, tag_field="op", tag="stop"):
    """Ends the runtime.  Has no answer."""


class PostOp(Struct, frozen=True):
    """Tokens that the engine has appended to a sequence, after it has removed ``backtrack`` ones.

    ``backtrack`` is the number that the answer to ``mid_process`` gave: it counts the token that would have been sampled.
    """

    id: Id
    tokens: list[TokenId]
    backtrack: Annotated[int, Meta(ge=0, lt=2**32)] = 0


class PreOp(Struct, frozen=True):
    """Gives the controller of a request to a new sequence."""

    id: Id
    req_id: str


class PostPreProcess(Struct, frozen=True, tag_field="op", tag="post_pre_process"):
    """Ends one step and begins the next one, for all live sequences."""

    post_ops: list[PostOp]
    pre_ops: list[PreOp]
    freed: list[Id]


class MidOp(Struct, frozen=True):
    """A sequence whose logits are computed; with ``clone_id`` it begins as a fork of that sequence."""

    id: Id
    clone_id: Id | None = None


class MidProcess(Struct, frozen=True, tag_field="op", tag="mid_process"):
    """Asks which tokens are allowed next.  The position in ``ops`` is the row of the biases."""

    ops: list[MidOp]


class MakeModule(Struct, frozen=True, tag_field="op", tag="mk_module"):
    """Uploads a module.  ``binary`` is base64."""

    binary: bytes


class SetTags(Struct, frozen=True, tag_field="op", tag="set_tags"):
    """Gives names to a module."""

    module_id: str
    tags: list[str]


class GetTags(Struct, frozen=True, tag_field="op", tag="get_tags"):
    """Asks for all names of modules."""


class GetModules(Struct, frozen=True, tag_field="op", tag="uma_get_modules", omit_defaults=True):
    """Asks for modules, also for those without a name.  An extension, as ``RemoveModule`` and ``RemoveTags``."""

    owner: str | None = None
    """Whose; for administrators.  ``None``: those of the one who asks, and for administrators all."""


class RemoveModule(Struct, frozen=True, tag_field="op", tag="uma_remove_module", omit_defaults=True):
    """Removes a module of one owner, with its names."""

    module_id: str
    owner: str | None = None
    """Whose; for administrators.  ``None``: that of the one who asks."""


class RemoveTags(Struct, frozen=True, tag_field="op", tag="uma_remove_tags", omit_defaults=True):
    """Removes names of modules."""

    tags: list[str]
    owner: str | None = None
    """Whose; for administrators.  ``None``: those of the one who asks, and for administrators those for everybody."""


class Instantiate(Struct, frozen=True, tag_field="op", tag="instantiate"):
    """Starts the controller of a request, before the request has a sequence."""

    req_id: str
    prompt: list[TokenId] | str
    module_id: str
    module_arg: Any = None

    @property
    def argument(self) -> str:
        """``module_arg`` as the controller gets it: a string as it is, anything else as JSON."""
        if isinstance(self.module_arg, str):
            return self.module_arg
        return msgspec.json.encode(self.module_arg).decode()


MainRequest: TypeAlias = Ping | Tokens | PostPreProcess | MidProcess | Stop
Removal: TypeAlias = RemoveModule | RemoveTags
SideRequest: TypeAlias = Ping | MakeModule | SetTags | GetTags | GetModules | Removal | Instantiate | Stop
Request: TypeAlias = Tokens | PostPreProcess | MidProcess | SideRequest


# Answers ----------------------------------------------------------------------------------------------------------


ENDED: Final = 0
"""``num_forks`` of a sequence that ends."""


class PreResult(Struct, frozen=True):
    """How a sequence begins a step."""

    suspend: bool = False
    """Leave the sequence out of this step."""
    num_forks: int = 1
    """``ENDED``, or how many sequences to make of this one; 1: it goes on."""
    ff_tokens: list[int] = field(default_factory=list)
    """Tokens to append; the controller has seen them already."""
    waits_for: list[str] | UnsetType = UNSET
    """With ``suspend``: names of variables that the controller waits for, if it says so.  An extension."""


class PostResult(Struct, frozen=True):
    """How a sequence ends a step."""

    stop: bool = False


class MidResult(Struct, frozen=True):
    """Tokens that take the place of a sampled one."""

    ff_tokens: list[int]
    backtrack: int
    """Tokens to remove first, counting the one that would have been sampled; 0: append only."""


class SequenceResult(Struct, Generic[T], frozen=True):
    """What one controller did in one call."""

    error: str
    """Empty if all is well."""
    result: T | None
    storage: list[Any] = field(default_factory=list)
    """Writes of variables, in order."""
    logs: str = ""
    micros: int = 0
    skipped: bool | UnsetType = UNSET
    """The controller has not answered yet: leave the sequence out of this step, and ask again.  An extension; see
    ``--uma-skip-slow-ms``."""


def readable_error(error: str) -> str:
    """The error of a controller as its author wants it: one that ended itself has printed why.

    What it has printed before follows the reason.
    """
    if (said := _said_why(error)) is None:
        return error
    printed, why = said
    return f"{why}\nPrinted before:\n{printed}" if printed else why


def error_and_logs(error: str, logs: str) -> tuple[str, str]:
    """The error of a result and its logs, each without what it repeats of the other."""
    if not error or not logs.endswith(error):
        return readable_error(error), logs
    logs = logs.removesuffix(error)
    if (said := _said_why(error)) is not None:
        _, why = said
        return why, logs.removesuffix(f"{why}\n").removesuffix(_FAILED)
    place = _IN_CALLBACK.match(error)
    if place is not None and logs and error.startswith(logs, place.end()):
        error = place[0] + error[place.end() + len(logs) :]
    return error, logs


def _said_why(error: str) -> tuple[str, str] | None:
    """What a controller printed before it ended itself, and why it did; ``None`` if it did not end itself."""
    ended_itself = _ENDED_ITSELF.fullmatch(error)
    if ended_itself is None:
        return None
    printed, marker, why = f"\n{ended_itself[1]}".rpartition(f"\n{_FAILED}")
    return (printed.strip("\n"), why) if marker else ("", ended_itself[1])


class PostPreAnswer(Struct, frozen=True):
    post_seqs: Mapping[str, SequenceResult[PostResult]]
    pre_seqs: Mapping[str, SequenceResult[PreResult]]


class MidAnswer(Struct, frozen=True):
    seqs: Mapping[str, SequenceResult[MidResult]]
    num_seqs: int


class Pong(Struct, frozen=True):
    pong: int = 1


class VocabularySize(Struct, frozen=True):
    vocab_size: int


class ModuleInfo(Struct, frozen=True):
    """A module that was uploaded."""

    module_id: str
    """SHA-256 of the Wasm, in hexadecimal digits."""
    wasm_size: int
    compiled_size: int
    time: int
    """Milliseconds of the compilation."""


class TagInfo(Struct, frozen=True):
    """A name of a module."""

    tag: str
    module_id: str
    updated_at: int
    updated_by: str
    wasm_size: int
    compiled_size: int


class TagList(Struct, frozen=True):
    tags: list[TagInfo]


class ModuleRecord(Struct, frozen=True):
    """A module that is stored."""

    module_id: str
    owner: str
    wasm_size: int
    compiled_size: int
    used_at: int
    """When it was uploaded or instantiated last, in seconds since 1970."""
    tags: list[str]


class ModuleList(Struct, frozen=True):
    modules: list[ModuleRecord]


class Removed(Struct, frozen=True):
    names: list[str]
    """Modules and tags that are gone."""


class Empty(Struct, frozen=True):
    """The answer to ``instantiate``."""


class Ok(Struct, Generic[T], frozen=True, tag_field="type", tag="ok"):
    data: T
    rid: str | UnsetType = field(name="$rid", default=UNSET)


class Error(Struct, frozen=True, tag_field="type", tag="error"):
    error: str
    is_user_error: bool = False
    """Whether the one who uploaded or chose the controller can fix it."""
    rid: str | UnsetType = field(name="$rid", default=UNSET)


class JsonError(Struct, frozen=True, tag_field="type", tag="json-error"):
    """The request was no JSON."""

    error: str


Envelope: TypeAlias = Ok[T] | Error | JsonError


# Encoding and decoding --------------------------------------------------------------------------------------------


class BadMessage(Exception):
    """The message is neither a request nor an answer.  ``rid`` is the id that it gives, if it gives one."""

    def __init__(self, reason: str, rid: str | UnsetType = UNSET) -> None:
        super().__init__(reason)
        self.rid = rid


class NotJson(BadMessage):
    """The message is not JSON at all."""


class ReceivedRequest(Struct, frozen=True):
    """A request with what comes along with it."""

    request: Request
    rid: str | UnsetType = UNSET
    auth: Auth = Auth()


class _Header(Struct, frozen=True):
    op: Any = UNSET
    rid: Any = field(name="$rid", default=UNSET)
    auth: _SentAuth | None = field(name="$auth", default=None)


_REQUESTS: Final[Mapping[str, msgspec.json.Decoder[Request]]] = {
    str(kind.__struct_config__.tag): msgspec.json.Decoder(kind)
    for kind in (
        *(Ping, Tokens, PostPreProcess, MidProcess, MakeModule, SetTags, GetTags, Instantiate, Stop),
        *(GetModules, RemoveModule, RemoveTags),
    )
}
_HEADER: Final = msgspec.json.Decoder(_Header)
_ENCODER: Final = msgspec.json.Encoder()


def encode(message: Envelope[Any]) -> bytes:
    """An answer as JSON."""
    return _ENCODER.encode(message)


def encode_request(request: Request, rid: str | None = None, auth: Auth | None = None) -> bytes | bytearray:
    """A request as JSON.  A large module takes long, and other threads run meanwhile."""
    fields: dict[str, Any] = {}
    if rid is not None:
        fields["$rid"] = rid
    if auth is not None:
        fields["$auth"] = auth
    if isinstance(request, MakeModule) and len(request.binary) > PIECE_BYTES:
        return _in_pieces(_ENCODER.encode({**fields, "op": "mk_module", "binary": ""}), request.binary)
    return _ENCODER.encode({**fields, **msgspec.to_builtins(request, builtin_types=())})


def _in_pieces(around: bytes, binary: bytes | bytearray) -> bytearray:
    """Put ``binary``, in base64, before the last two characters of ``around``: a quote and a brace."""
    at, end = len(around) - 2, around[-2:]
    message = bytearray(at + 4 * -(-len(binary) // 3) + len(end))
    message[:at], message[-len(end) :] = around[:-2], end
    whole = memoryview(binary)
    for begin in range(0, len(binary), PIECE_BYTES):
        piece = binascii.b2a_base64(whole[begin : begin + PIECE_BYTES], newline=False)
        message[at : at + len(piece)] = piece
        at += len(piece)
        time.sleep(0)  # lets other threads run
    return message


def decode_request(data: bytes) -> ReceivedRequest:
    """The request that ``data`` holds.

    Raises:
        NotJson: it is not JSON.
        BadMessage: unknown ``op``, or a field is missing or has the wrong type.
    """
    try:
        header = _HEADER.decode(data)
    except msgspec.ValidationError as error:
        raise BadMessage(f"bad message: {error}", _rid_of(data)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(str(error)) from None
    rid = header.rid if isinstance(header.rid, str) else UNSET
    decoder = _REQUESTS.get(header.op) if isinstance(header.op, str) else None
    if decoder is None:
        raise BadMessage("bad op", rid)
    try:
        request = decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        reason = f"{header.op}: {error}"
        if "$.prompt" in reason:
            reason = "expecting string or int array as prompt"
        raise BadMessage(reason, rid) from None
    auth = Auth() if header.auth is None else Auth(header.auth.user, header.auth.is_admin)
    return ReceivedRequest(request, rid, auth)


def _rid_of(data: bytes) -> str | UnsetType:
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return UNSET
    rid = fields.get("$rid") if isinstance(fields, dict) else None
    return rid if isinstance(rid, str) else UNSET


class _AnyAnswer(Struct, frozen=True):
    type: str
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    is_user_error: bool = False
    rid: str | UnsetType = field(name="$rid", default=UNSET)


_ANSWER: Final = msgspec.json.Decoder(_AnyAnswer)


def decode_answer(data: bytes, kind: type[T]) -> Ok[T] | Error | JsonError:
    """The answer that ``data`` holds, whose data is a ``kind``.

    Raises:
        BadMessage: it is not an answer, or not of this kind.
    """
    try:
        answer = _ANSWER.decode(data)
        if answer.type == "ok":
            return Ok(msgspec.json.decode(answer.data, type=kind), answer.rid)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not an answer of an AICI runtime: {error}") from None
    if answer.type == "error":
        return Error(answer.error, answer.is_user_error, answer.rid)
    if answer.type == "json-error":
        return JsonError(answer.error)
    raise BadMessage(f"not an answer of an AICI runtime: its type is {answer.type!r}")


def rid_of_answer(data: bytes) -> str | None:
    """Which request of the side channel ``data`` answers.

    Raises:
        BadMessage: as ``decode_answer``.
    """
    try:
        rid = _ANSWER.decode(data).rid
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not an answer of an AICI runtime: {error}") from None
    return None if rid is UNSET else rid
