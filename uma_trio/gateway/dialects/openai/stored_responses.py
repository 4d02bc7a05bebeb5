"""Responses of OpenAI's API that are stored: how they are continued, read again, cancelled and deleted.

A stored response is a detached answer of the daemon, under the response's id, and a turn of a session.  The session has
the same name, or is the conversation that the request names.  What the gateway needs to write the response again goes
with the answer, so the gateway itself keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.responses import Response

from uma_trio.client import AnswerInfo, Event, Transcript
from uma_trio.errors import AnswerNotFound, SessionBusy, SessionNotFound
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.batches.store import new_id
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.extras import Extras
from uma_trio.gateway.dialects.openai.response_events import ResponseEvents
from uma_trio.gateway.dialects.openai.shapes import (
    ConversationObject,
    DeletedObject,
    ResponseEvent,
    ResponseHead,
    ResponseObject,
)
from uma_trio.gateway.endpoint import Call, Endpoint
from uma_trio.gateway.errors import LOST, HttpError, invalid
from uma_trio.protocol.chat import message_fields
from uma_trio.protocol.parameters import MAX_INT32

Messages = list[dict[str, Any]]

ENDED: Final = ("completed", "cancelled")
"""States of answers that have a turn in their session, if they have a token."""

EARLIER_NAMES: Final = {"answer_id": "previous_response_id"}
"""What the field of an earlier answer is called in requests that continue it."""


class StoredHead(msgspec.Struct, kw_only=True):
    """What the gateway needs to write a response again."""

    head: ResponseHead
    session: str
    """Where its turn is."""
    custom_tools: list[str]
    seals: bool
    """This field and the one before are as in ``ResponseEvents``."""

    @property
    def id(self) -> str:
        return self.head.id

    def encode(self) -> str:
        """The head as ``client_state`` of the daemon's answer."""
        return msgspec.json.encode(self).decode()

    def events(self, *, after: int = -1) -> ResponseEvents:
        """Writes the response, from the event after number ``after`` on."""
        return ResponseEvents(
            self.head,
            self.id.removeprefix("resp_"),
            Extras(),
            custom_tools=frozenset(self.custom_tools),
            seals=self.seals,
            after=after,
            is_stored=True,
        )


class ResponseQuery(msgspec.Struct, kw_only=True):
    """How a stored response is read."""

    stream: Annotated[bool, Meta(description="Send its events.")] = False
    starting_after: (
        Annotated[int, Meta(ge=0, le=MAX_INT32, description="Leave out events up to this number.")] | None
    ) = None


class Earlier(msgspec.Struct):
    """What a request continues."""

    messages: Messages
    """All messages before those of the request, without the instructions of the last one."""
    session: str | None = None
    """The conversation, which gets the turn; ``None``: a session of the response's name."""
    fork_of: str | None = None
    """The session that the new one begins with."""


async def find_earlier(call: Call, previous: str | None, conversation: Any, model: str | None) -> Earlier | None:
    """What a request continues that names a response or a conversation; ``None`` if it names neither.

    Raises:
        HttpError: there is no such thing, it has no answer yet, or a request of the conversation is running.
    """
    if previous is not None and conversation is not None:
        raise invalid("give previous_response_id or conversation, not both", parameter="conversation")
    if previous is not None:
        return await _after_response(call, previous, model)
    if conversation is None:
        return None
    match conversation:
        case str(name) | {"id": str(name)}:
            pass
        case _:
            raise invalid("conversation is the id of one, or an object with it", parameter="conversation")
    transcript = await _transcript(call, name, model)
    if transcript is None:
        return Earlier([], session=name)
    if transcript.session.busy:
        raise HttpError(SessionBusy, f"a request of the conversation {name!r} is running", parameter="conversation")
    return Earlier(_messages(transcript), session=name)


async def _after_response(call: Call, previous: str, model: str | None) -> Earlier:
    info, stored = await _find(call, previous, parameter="previous_response_id")
    if info.state not in ENDED:
        raise invalid(
            f"the response {previous!r} is {info.state}: it has no answer to continue", parameter="previous_response_id"
        )
    if stored.session != previous:
        raise invalid(
            f"the response {previous!r} is a part of the conversation {stored.session!r}: name that as conversation",
            parameter="previous_response_id",
        )
    own = stored.head.model
    transcript = await _transcript(call, previous, own)
    if transcript is None:
        raise _missing(previous, "previous_response_id")
    messages, instructions = _messages(transcript), stored.head.instructions
    if instructions and messages and messages[0] == {"role": "system", "content": instructions}:
        del messages[0]
    return Earlier(messages, fork_of=previous if model in (None, own) else None)


def _messages(transcript: Transcript) -> Messages:
    return [*map(message_fields, transcript.messages)]


async def _transcript(call: Call, session: str, model: str | None) -> Transcript | None:
    """The content of a session; ``None`` if there is none."""
    return await call.find(lambda client: client.transcript(session, model=model), SessionNotFound)


async def fork(call: Call, source: str, name: str, model: str | None) -> None:
    """Let the session ``name`` begin as ``source``: its tokens need not be computed again."""
    await call.ask(lambda client: client.sessions("fork", session_id=source, new_id=name, model=model))


async def _find(call: Call, id: str, *, parameter: str = "response_id") -> tuple[AnswerInfo, StoredHead]:
    """A stored response.

    Raises:
        HttpError: there is none.
    """
    infos = await call.find(lambda client: client.answers("read", answer_id=id), AnswerNotFound)
    if infos is None:
        raise _missing(id, parameter)
    [info] = infos
    try:
        return info, msgspec.json.decode(info.client_state or "", type=StoredHead)
    except msgspec.MsgspecError:  # a detached answer of the socket
        raise _missing(id, parameter) from None


def _missing(id: str, parameter: str) -> HttpError:
    return HttpError(AnswerNotFound, f"there is no stored response {id!r}", parameter=parameter)


# -- endpoints ----------------------------------------------------------------------------------------


async def retrieve(call: Call) -> Response:
    """A stored response as it is now, or its events, those to come as well."""
    query = call.query(ResponseQuery)
    info, stored = await _find(call, call.request.path_params["id"])
    if query.stream:
        after = -1 if query.starting_after is None else query.starting_after
        return call.stream_events(call.daemon.attach(stored.id), stored.events(after=after))
    return json_response(await read_stored(call, info, stored))


async def read_stored(call: Call, info: AnswerInfo, stored: StoredHead) -> ResponseObject:
    """A stored response as JSON; without its output as long as that grows."""
    events = stored.events()
    if info.state in ("queued", "running"):
        return events.response("queued" if info.state == "queued" else "in_progress")
    try:
        return await whole(call.daemon.attach(stored.id), events)
    except HttpError as error:
        if error.kind in LOST:
            raise
        return events.failure(error)


async def whole(batches: AsyncIterator[list[Event]], events: ResponseEvents) -> ResponseObject:
    """The response of these events, which are not streamed."""
    async with aclosing(batches) as closing:  # type: ignore[type-var]
        async for batch in closing:
            for event in batch:
                events.render(event)
    events.end()
    assert events.eos is not None
    return events.complete(events.eos)


async def cancel(call: Call) -> Response:
    """End a response that is generated; one that has ended stays as it is."""
    _, stored = await _find(call, call.request.path_params["id"])
    [info] = await call.ask(lambda client: client.answers("cancel", answer_id=stored.id), counts=True)
    return json_response(await read_stored(call, info, stored))


async def delete(call: Call) -> Response:
    """Delete a response and its session; one that is generated is cancelled before."""
    _, stored = await _find(call, call.request.path_params["id"])
    await call.ask(lambda client: client.answers("delete", answer_id=stored.id), counts=True)
    if stored.session == stored.id:
        await _close(call, stored.id, stored.head.model)
    return json_response(DeletedObject(id=stored.id, object="response", deleted=True))


async def _close(call: Call, session: str, model: str | None) -> bool:
    """Close a session; returns whether there was one."""
    closed = await call.find(lambda client: client.sessions("close", session_id=session, model=model), SessionNotFound)
    return closed is not None


class ConversationRequest(msgspec.Struct, kw_only=True):
    """A new conversation."""

    items: list[Any] | None = None
    metadata: dict[str, Any] | None = None
    """This is echoed, and not kept."""


async def create_conversation(call: Call) -> Response:
    """A name for a conversation, which begins with the first response that names it."""
    request, warnings = await call.read(ConversationRequest)
    if request.items:
        raise invalid("a conversation begins empty; send its items as input of the first response", parameter="items")
    body = ConversationObject(id=new_id("conv_"), created_at=int(time.time()), metadata=request.metadata or {})
    return json_response(body, warnings=warnings)


async def retrieve_conversation(call: Call) -> Response:
    """A conversation of the default model that has an answer."""
    name = call.request.path_params["id"]
    transcript = await _transcript(call, name, None)
    if transcript is None:
        raise _no_conversation(name)
    return json_response(ConversationObject(id=name, created_at=int(transcript.session.created_at), metadata={}))


async def delete_conversation(call: Call) -> Response:
    """Delete a conversation of the default model; its responses stay."""
    name = call.request.path_params["id"]
    if not await _close(call, name, None):
        raise _no_conversation(name)
    return json_response(DeletedObject(id=name, object="conversation.deleted", deleted=True))


def _no_conversation(name: str) -> HttpError:
    message = f"there is no conversation {name!r}, or it has no answer yet"
    return HttpError(SessionNotFound, message, parameter="conversation_id")


ENDPOINTS: Final[Sequence[Endpoint]] = (
    OPENAI.get("/v1/responses/{id}", retrieve, ResponseObject, event_shape=ResponseEvent, query=ResponseQuery),
    OPENAI.post("/v1/responses/{id}/cancel", cancel, None, ResponseObject),
    OPENAI.delete("/v1/responses/{id}", delete, DeletedObject),
    OPENAI.post("/v1/conversations", create_conversation, ConversationRequest, ConversationObject),
    OPENAI.get("/v1/conversations/{id}", retrieve_conversation, ConversationObject),
    OPENAI.delete("/v1/conversations/{id}", delete_conversation, DeletedObject),
)
