"""Endpoints: one table of what the gateway serves, from which the routes and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, TypeVar

import attrs
import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from uma_trio.client import Client, TokenList
from uma_trio.config import Config
from uma_trio.errors import ModelNotFound, UmaError
from uma_trio.gateway.answer import (
    EVENT_STREAM,
    JSON,
    AnswerRenderer,
    ForecastHeaders,
    Renderer,
    StreamedAnswer,
    json_response,
    unless_disconnected,
)
from uma_trio.gateway.charging import Account
from uma_trio.gateway.daemon_client import Daemon
from uma_trio.gateway.errors import FieldNames, HttpError, field_renamer, invalid
from uma_trio.gateway.guard import check_admin, check_owner, is_unknown
from uma_trio.gateway.limits import Limiter
from uma_trio.gateway.media import media_of
from uma_trio.gateway.request_record import RequestRecord
from uma_trio.gateway.request_state import RequestState
from uma_trio.processes.large_work import LargeWork
from uma_trio.protocol.field_errors import MAX_NAMED, did_you_mean, explain

MAX_FIELDS: Final = 1024
"""Fields of a body, known ones and others."""

PROMPTS: Final = ("prompt", "messages", "input", "content")
"""What the prompt is called in bodies: the first one that a body has."""

UNKNOWN_PRINCIPAL: Final = "http"
"""Who runs controllers and has sessions if there are no API keys and the client is on another machine."""

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")
Item = TypeVar("Item")


def without_effect(names: Sequence[str], kind: str, known: Iterable[str] = ()) -> list[str]:
    """A warning for each of ``names``, which is not one of ``known``."""
    warnings = [
        f"the {kind} {name[:100]!r} is not known and had no effect{did_you_mean(name, known)}"
        for name in names[:MAX_NAMED]
    ]
    more = len(names) - len(warnings)
    return [*warnings, f"{more} more of them are not known"] if more else warnings


def parse_fields(fields: Mapping[str, Any], cls: type[T], kind: str, *, strict: bool = True) -> tuple[T, list[str]]:
    """``fields`` as a ``cls``, and a warning for each that ``cls`` does not have.

    Args:
        kind: what a field is called.
        strict: texts do not stand for numbers.

    Raises:
        HttpError: one is of the wrong type or out of bounds.
    """
    try:
        body = msgspec.convert(fields, cls, strict=strict, str_keys=True)
    except msgspec.ValidationError as error:
        wrong = explain(error, cls, fields)
        raise invalid(wrong.message, parameter=wrong.field) from None
    known = set(cls.__struct_encode_fields__)
    return body, without_effect([name for name in fields if name not in known], kind, known)


@attrs.frozen
class Dialect:
    """An API that clients speak."""

    name: str
    title: str
    """Heading of its endpoints on the page at ``/docs``, and their tag in the OpenAPI document."""
    error_body: Callable[[HttpError, str], Any]
    """The body of an error, from the error and the id of the request: a text, or plain values for JSON."""
    field_names: FieldNames = attrs.field(factory=dict)
    """What fields of the daemon's requests are called, where that is something else.  Errors say it."""
    stream_type: str = EVENT_STREAM
    """Media type of streamed answers."""
    prefix: str | None = None
    """Begins the paths of this API, and of no other one."""
    header: str | None = None
    """All clients of this API send it.  Where two APIs have the same path, it says which one is meant."""
    instead: Mapping[str, str] = attrs.field(factory=dict)
    """What to use in place of paths of this API that do not exist here, by how they begin."""

    def get(self, path: str, answer: Answer, *shapes: Any, **more: Any) -> Endpoint:
        """An endpoint of this API.

        Args:
            more: as ``Endpoint`` has them.
        """
        return Endpoint(method="GET", path=path, dialect=self, answer=answer, shapes=shapes, **more)

    def post(self, path: str, answer: Answer, body: type | None, *shapes: Any, **more: Any) -> Endpoint:
        """The same for a request with a body; ``None``: one that is not JSON."""
        return Endpoint(method="POST", path=path, dialect=self, answer=answer, body=body, shapes=shapes, **more)

    def delete(self, path: str, answer: Answer, *shapes: Any, **more: Any) -> Endpoint:
        """The same for a request that deletes."""
        return Endpoint(method="DELETE", path=path, dialect=self, answer=answer, shapes=shapes, **more)

    def refuse(self, error: HttpError, request_id: str) -> Response:
        """The response for an error."""
        body = self.error_body(error, request_id)
        if isinstance(body, str):
            return PlainTextResponse(body, error.status, error.headers)
        return json_response(body, error.status, error.headers)


@attrs.frozen(kw_only=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    dialect: Dialect
    answer: Answer
    """Its docstring is the endpoint's in the OpenAPI document, the first sentence as the summary."""
    body: type | None = None
    """What a request contains, as JSON."""
    query: type[msgspec.Struct] | None = None
    """Parameters that a query string may have."""
    others: tuple[Endpoint, ...] = ()
    """Endpoints of other dialects at the same path, for requests with the header of their dialect."""
    is_batched: bool = False
    """Whether requests of batches may have this path."""
    raw_body: str | None = None
    """Media type of a body that is not JSON.  It may be as large as a controller."""
    form: type | None = None
    """Fields of a body that is a form with a file.  The endpoint reads it in parts, so it may be larger than memory."""
    hidden_fields: frozenset[str] = frozenset()
    """Fields of ``body`` that clients do not send."""
    field_names: FieldNames = attrs.field(factory=dict)
    """Further names of fields, or others than those of the dialect."""
    shapes: tuple[Any, ...] = ()
    """Types of an answer that is not streamed, one of which it has; empty if it may be anything."""
    event_shape: Any = None
    """Type of the JSON in an event, or in a line, of an answer that is streamed."""
    media_types: tuple[str, ...] = attrs.Factory(lambda self: self._media_types(), takes_self=True)
    """What an answer may be."""
    needs_key: bool = True
    """Whether a gateway with tenants asks for a key.  Paths of endpoints that need none have no parameters."""
    needs_admin: bool = False
    """Only for the key of an administrator; without tenants, only for clients on this machine."""

    needs_owner: bool = False
    """Only for clients who are known: by a key, or without tenants, because they are on this machine."""

    def _media_types(self) -> tuple[str, ...]:
        stream = () if self.event_shape is None else (self.dialect.stream_type,)
        return stream if stream and not self.shapes else (JSON, *stream)

    def chosen_by(self, headers: Container[str]) -> Endpoint:
        """The endpoint of this path that a request with these headers means."""
        return next((other for other in self.others if other.dialect.header in headers), self)

    def route(self, config: Config, daemon: Daemon, limiter: Limiter, large_work: LargeWork) -> Route:
        """The route of Starlette."""

        async def serve(request: Request) -> Response:
            endpoint = self.chosen_by(request.headers)
            state = RequestState.of(request.scope)
            tenant = state.tenant
            account = None if tenant is None else Account(tenant, limiter, config.limits.default_max_tokens)
            call = Call(endpoint, request, state, config, daemon.charging(account, state.record), large_work)
            try:
                if endpoint.needs_admin:
                    check_admin(request.scope)
                if endpoint.needs_owner:
                    check_owner(request.scope)
                return await endpoint.answer(call)
            except HttpError as error:
                return call.refuse(error)

        return Route(self.path, serve, methods=[self.method])


Answer = Callable[["Call"], Awaitable[Response]]
"""Serves a request."""


def dialects_of(endpoints: Iterable[Endpoint]) -> tuple[Dialect, ...]:
    """The dialects of these endpoints, each once."""
    return tuple({endpoint.dialect.name: endpoint.dialect for endpoint in endpoints}.values())


def by_path(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """One endpoint for each method and path.  If several dialects have it, the first one has the ``others``.

    Raises:
        ValueError: nothing says which of two endpoints is meant.
    """
    by_place: dict[tuple[str, str], Endpoint] = {}
    for endpoint in endpoints:
        place = endpoint.method, endpoint.path
        if (first := by_place.get(place)) is None:
            by_place[place] = endpoint
        elif endpoint.dialect.header is None:
            raise ValueError(f"{endpoint.method} {endpoint.path} has two endpoints")
        else:
            shapes = (*first.shapes, *endpoint.shapes)
            by_place[place] = attrs.evolve(first, others=(*first.others, endpoint), shapes=shapes)
    return tuple(by_place.values())


@attrs.frozen
class Call:
    """One request of a client to an endpoint."""

    endpoint: Endpoint
    request: Request
    state: RequestState
    config: Config
    daemon: Daemon
    large_work: LargeWork
    """Runs work that takes the event loop for a while; shared by all requests."""

    @property
    def id(self) -> str:
        """Identifies the request in headers, logs and errors, and towards the daemon."""
        return self.state.record.request_id

    @property
    def is_unknown(self) -> bool:
        """Whether the client is on another machine and has no key, because the gateway asks for none."""
        return is_unknown(self.request.scope)

    @property
    def is_draining(self) -> bool:
        """Whether the daemon stops."""
        return self.state.is_draining

    @property
    def dialect(self) -> Dialect:
        """The dialect of the client."""
        return self.endpoint.dialect

    @property
    def record(self) -> RequestRecord:
        """What logs and traces will say of the request."""
        return self.state.record

    def part(self) -> AbstractAsyncContextManager[None]:
        """Do work that grows with the body inside of this, without waiting: large bodies take turns."""
        return self.large_work.part() if self.state.is_large else nullcontext()

    async def read(self, cls: type[T]) -> tuple[T, list[str]]:
        """The body, and a warning for each of its fields that this gateway does not know.

        Raises:
            HttpError: it is not JSON, or a field is of the wrong type or out of bounds.
        """
        fields = await self.read_fields()
        async with self.part():
            return parse_fields(fields, cls, "parameter")

    def query(self, cls: type[T]) -> T:
        """The parameters of the query string; of those that are there twice, the last one.

        Args:
            cls: the ``query`` of the endpoint.

        Raises:
            HttpError: one is of the wrong type or out of bounds.
        """
        assert cls is self.endpoint.query, "the OpenAPI document has the parameters of the endpoint"
        return parse_fields(dict(self.request.query_params), cls, "parameter", strict=False)[0]

    async def read_fields(self) -> Mapping[str, Any]:
        """The body as plain values.

        Raises:
            HttpError: it is not a JSON object, or has too many fields, or the daemon cannot say which models it serves.
        """
        content = await self.request.body()
        if not content:
            raise invalid("the body is empty; send a JSON object")
        try:
            async with self.part():
                fields = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = str(error).removeprefix("JSON is malformed: ")
            raise invalid(f"the body is not valid JSON: {reason[:1].lower()}{reason[1:]}") from None
        except RecursionError:
            raise invalid("the body is nested too deeply") from None
        if not isinstance(fields, dict):
            raise invalid("the body must be a JSON object")
        if len(fields) > MAX_FIELDS:
            raise invalid(f"the body has {len(fields):,} fields; it may have {MAX_FIELDS:,}")
        self.state.given = frozenset(fields)
        if self.config.http.any_model and isinstance(fields.get("model"), str):
            try:
                await self.daemon.model(fields["model"])
            except HttpError as error:
                if error.kind is not ModelNotFound:
                    raise
                fields["model"] = (await self.daemon.model()).name
        return fields

    def for_daemon(self, **fields: Any) -> dict[str, Any]:
        """A request for the daemon: ``fields`` without those that are ``None``, on behalf of the client.

        A client on another machine without a key is not the user who runs the daemon: it has neither this user's
        controllers nor this user's sessions.
        """
        request = {"id": self.id, **{name: value for name, value in fields.items() if value is not None}}
        if ("controller" in request or "session_id" in request) and self.is_unknown:
            request["principal"] = UNKNOWN_PRINCIPAL
        self.record.fields = request
        return request

    async def ask(self, question: Callable[[Client], Awaitable[R]], *, counts: bool = False) -> R:
        """Ask the daemon something that it answers at once, on a connection of its own.

        Args:
            counts: as one of the requests that a tenant may send.

        Raises:
            HttpError: the daemon cannot be reached or refuses, or a limit of the tenant does.
        """
        if counts:
            self.count_request()
        async with self.daemon.connect() as client:
            return await question(client)

    async def find(self, question: Callable[[Client], Awaitable[R]], missing: type[UmaError]) -> R | None:
        """The same as ``ask``; ``None`` if the daemon refuses with the error ``missing``."""
        try:
            return await self.ask(question)
        except HttpError as error:
            if error.kind is not missing:
                raise
            return None

    async def tokenize_chat(self, **fields: Any) -> TokenList:
        """The text and the tokens of a chat, as a request with these fields would prefill it.  Counts as a request.

        Raises:
            HttpError: as ``ask``, a picture cannot be fetched, or the client has left.
        """
        self.count_request()
        return await self.unless_disconnected(self.daemon.tokenize_chat(self.for_daemon(**fields)))

    def count_request(self) -> None:
        """Count one of the requests that a tenant may send.

        Raises:
            HttpError: there were too many.
        """
        if self.daemon.account is not None:
            self.daemon.account.count_request()

    async def answers(
        self, *requests: Mapping[str, Any], renderer: AnswerRenderer, is_streamed: bool | None
    ) -> Response:
        """Send requests to the daemon, and their answers to the client: while they are generated, or whole.

        Raises:
            HttpError: an answer that is whole cannot be had.
        """
        if not is_streamed:
            return json_response(renderer.whole(await self.unless_disconnected(self.daemon.complete(*requests))))
        if len(requests) > 1:
            return self.stream_events(self.daemon.generate_all(requests), renderer)
        forecasts = ForecastHeaders(passes=bool(requests[0].get("forecast")))
        return self.stream_events(self.daemon.generate({**requests[0], "forecast": True}), renderer, forecasts)

    def stream_events(
        self,
        events: AsyncIterator[list[Item]],
        renderer: Renderer[Item],
        forecasts: ForecastHeaders | None = None,
    ) -> Response:
        """Send events to the client as they come.

        Args:
            forecasts: become headers of the response.
        """
        keep_alive_s = self.config.http.keep_alive_s
        return StreamedAnswer(events, renderer, refuse=self.refuse, keep_alive_s=keep_alive_s, forecasts=forecasts)

    async def unless_disconnected(self, work: Awaitable[R]) -> R:
        """The result of ``work``, which is cancelled when the client leaves.

        Raises:
            HttpError: the client has left, with status 499; or what ``work`` raises.
        """
        return await unless_disconnected(self.request.receive, work)

    def refuse(self, error: HttpError) -> Response:
        """The response for an error, in the dialect's form."""
        self.record.error_code = error.code
        given = self.state.given
        names: dict[str, str | Sequence[str]] = {**self.dialect.field_names, **self.endpoint.field_names}
        for place, part in media_of(self.record.fields.get("messages")):
            names |= {place: part.parameter, f"{place}.data": part.parameter}
        reworded = error.reword(field_renamer(names, given))
        field = (reworded.parameter or "").partition("[")[0]
        if field in PROMPTS and field not in given and self.record.fields:  # the daemon has a name of its own for it
            reworded.parameter = next((name for name in PROMPTS if name in given), None)
        return self.dialect.refuse(reworded, self.id)
