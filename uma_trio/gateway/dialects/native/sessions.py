"""Sessions in the native API: list, read, fork, rename and close them; and answers that go on when their client leaves.

``GET /v1/sessions``, ``POST /v1/session/ACTION``.  A client on another machine needs an API key for all of these.
Without keys it would get the sessions of the user who runs the daemon, so the gateway refuses it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.responses import Response

from uma_trio.errors import AnswerNotFound, SessionBusy
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.dialects.common.fields import ModelQuery
from uma_trio.gateway.dialects.native.dialect import NATIVE
from uma_trio.gateway.dialects.native.generate import OF_THE_CONNECTION, Events, read_request
from uma_trio.gateway.dialects.native.shapes import Closed, OneSession, SessionContent, SessionPage, Stopped
from uma_trio.gateway.dialects.native.shapes import Event as NativeEvent
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import LOST, NO_ANSWER, HttpError, invalid
from uma_trio.protocol.answers import AnswerInfo, SessionInfo
from uma_trio.protocol.chat import message_fields
from uma_trio.protocol.requests import Generate


class SessionsQuery(ModelQuery, kw_only=True):
    """Which sessions are listed."""

    contains: Annotated[str | None, Meta(description="A text that their title or a message contains.")] = None


class SessionRequest(msgspec.Struct):
    """Names a session."""

    session_id: str
    model: str | None = None


class ForkRequest(SessionRequest, kw_only=True):
    """Names a session, and its copy."""

    new_id: str


class RenameRequest(SessionRequest, kw_only=True):
    """Names a session, and says its title."""

    title: str


async def list_sessions(call: Call) -> Response:
    """The client's sessions, the most recently used first."""
    query = call.query(SessionsQuery)
    sessions = await call.ask(lambda client: client.sessions(model=query.model, contains=query.contains))
    return json_response(SessionPage(sessions=sessions))


async def read_session(call: Call) -> Response:
    """What a session contains: the messages of a chat, or the text of plain prompts and their answers."""
    request, warnings = await call.read(SessionRequest)
    async with call.daemon.sessions_at_hand(request.model, request.session_id) as client:
        transcript = await client.transcript(**msgspec.structs.asdict(request))
    content: dict[str, Any] = (
        {"messages": transcript.messages} if transcript.text is None else {"text": transcript.text}
    )
    return json_response(SessionContent(session=transcript.session, **content), warnings=warnings)


async def close_session(call: Call) -> Response:
    """Forget a session and free its KV cache."""
    request, warnings = await call.read(SessionRequest)
    [closed] = await _change(call, "close", request)
    if await _find(call, name := _answer_id(request.session_id)) is not None:
        await call.ask(lambda client: client.answers("delete", answer_id=name))
    return json_response(Closed(session_id=closed.session_id, closed=True, tokens=closed.tokens), warnings=warnings)


async def fork_session(call: Call) -> Response:
    """Copy a session under a new name; both continue independently."""
    request, warnings = await call.read(ForkRequest)
    [forked] = await _change(call, "fork", request, request.new_id)
    return json_response(OneSession(session=forked), warnings=warnings)


async def rename_session(call: Call) -> Response:
    """Give a session a title."""
    request, warnings = await call.read(RenameRequest)
    [renamed] = await _change(call, "rename", request)
    return json_response(OneSession(session=renamed), warnings=warnings)


async def _change(call: Call, action: str, request: SessionRequest, *new_ids: str) -> list[SessionInfo]:
    """Change a session.

    Args:
        new_ids: of sessions that are to begin, so that no peer may have one.
    """
    call.count_request()
    async with call.daemon.sessions_at_hand(request.model, request.session_id, *new_ids) as client:
        return await client.sessions(action, **msgspec.structs.asdict(request))


# -- answers that go on --


async def begin_answer(call: Call) -> Response:
    """Continue a session as ``/v1/generate`` does.  The answer goes on if the client leaves, and can be followed again."""
    fields, warnings = await read_request(call)
    if not isinstance(fields.get("session_id"), str):
        raise invalid("session_id is missing; /v1/generate answers without a session", parameter="session_id")
    if fields.pop("stream", True) is not True:
        raise invalid("the answer is a stream; /v1/generate also answers whole", parameter="stream")
    name = _answer_id(fields["session_id"])
    before = await _find(call, name)
    if before is not None and before.state in RUNNING:
        message = "an answer of this session is running; follow it, stop it, or fork the session"
        raise HttpError(SessionBusy, message)
    if before is not None:
        await call.ask(lambda client: client.answers("delete", answer_id=name))
    shown: dict[str, Any] = {field: fields[field] for field in OF_A_REQUEST if field in fields}
    state = msgspec.json.encode({field: value for field, value in shown.items() if field != "messages"}).decode()
    fields |= {"id": name, "detached": True, "admit_now": True, "client_state": state}
    events = call.daemon.generate_stored(fields, goes_on=True)
    return call.stream_events(events, _KeptEvents(call.id, warnings, {"request_id": name, **shown}))


async def follow_answer(call: Call) -> Response:
    """The events of a running answer, from the first one on.  Before them ``request`` says what is answered."""
    request, warnings = await call.read(SessionRequest)
    info = await _find_running(call, request)
    shown = msgspec.json.decode(info.client_state or "{}", type=dict[str, Any])
    if info.messages is not None:
        shown["messages"] = [*map(message_fields, info.messages)]
    renderer = _KeptEvents(call.id, warnings, {"request_id": info.answer_id, **shown})
    return call.stream_events(call.daemon.attach(info.answer_id), renderer)


async def stop_answer(call: Call) -> Response:
    """End a running answer.  What was generated of it stays in the session."""
    request, warnings = await call.read(SessionRequest)
    info = await _find_running(call, request)
    await call.ask(lambda client: client.answers("cancel", answer_id=info.answer_id), counts=True)
    return json_response(Stopped(session_id=request.session_id, stopped=True), warnings=warnings)


RUNNING: Final = ("queued", "running")


def _answer_id(session_id: str) -> str:
    """The id of the detached answer of a session, which has one at a time."""
    return f"session-{hashlib.sha256(session_id.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


async def _find_running(call: Call, request: SessionRequest) -> AnswerInfo:
    """The running answer of a session.

    Raises:
        HttpError: none runs.
    """
    answer = await _find(call, _answer_id(request.session_id))
    if answer is None or answer.state not in RUNNING:
        message = f"no answer of the session {request.session_id[:100]!r} is running; read the session"
        raise HttpError(NO_ANSWER, message)
    return answer


async def _find(call: Call, name: str) -> AnswerInfo | None:
    answers = await call.find(lambda client: client.answers("read", answer_id=name, with_messages=True), AnswerNotFound)
    return None if answers is None else answers[0]


OF_A_REQUEST: Final = ("messages", "prompt", "model", "drop_messages", "history", "continue_final_message")
"""What those who follow an answer get to know of its request."""


class _KeptEvents(Events):
    """Writes the events of an answer that can be followed.

    Args:
        request: what is answered.
    """

    def __init__(self, request_id: str, warnings: list[str], request: Mapping[str, Any]) -> None:
        super().__init__(request_id, warnings, as_lines=False)
        self._request = request

    def begin(self) -> bytes:
        """What is answered."""
        return self.write({"event": "request", **self._request}) + super().begin()

    def fail(self, error: HttpError) -> bytes:
        """An error that ends the answer; where the daemon was lost, the events just end, and the answer goes on."""
        return b"" if error.kind in LOST else super().fail(error)


_get, _post = (partial(method, needs_owner=True) for method in (NATIVE.get, NATIVE.post))

ENDPOINTS = (
    _get("/v1/sessions", list_sessions, SessionPage, query=SessionsQuery),
    _post("/v1/session/read", read_session, SessionRequest, SessionContent),
    _post("/v1/session/fork", fork_session, ForkRequest, OneSession),
    _post("/v1/session/rename", rename_session, RenameRequest, OneSession),
    _post("/v1/session/close", close_session, SessionRequest, Closed),
    _post(
        "/v1/session/answer",
        begin_answer,
        Generate,
        event_shape=NativeEvent,
        field_names={"stop_token_ids": ("stop_token_ids", "stop")},
        hidden_fields=OF_THE_CONNECTION,
    ),
    _post("/v1/session/follow", follow_answer, SessionRequest, event_shape=NativeEvent),
    _post("/v1/session/stop", stop_answer, SessionRequest, Stopped),
)
