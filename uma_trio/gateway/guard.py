"""What every HTTP request has to pass before an endpoint sees it: host, origin, key and size.

The guard is an ASGI application around the others.  It reads the whole body, within bounds of size and time, after the
checks that need no body, and hands it on in one piece.  What it finds out is in ``RequestState``.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import attrs
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from uma_trio.errors import ShuttingDown, TooManyConnections
from uma_trio.gateway.body import Body, BodyLimits, Refusal, replay
from uma_trio.gateway.errors import (
    HEADERS_TOO_LARGE,
    NO_KEY,
    NOT_ADMIN,
    NOT_OWNER,
    TOO_MANY_WRONG_KEYS,
    UNKNOWN_HOST,
    UNKNOWN_ORIGIN,
    HttpError,
    try_again_in,
)
from uma_trio.gateway.key_file import CurrentTenants
from uma_trio.gateway.limits import Limiter, WrongKeys
from uma_trio.gateway.origins import ANY, Origins, is_loopback
from uma_trio.gateway.request_state import RequestState
from uma_trio.gateway.tenants import Tenant
from uma_trio.processes.large_work import LARGE_BYTES


class HeaderName(bytes):
    """The name of a header that keeps its usual spelling.

    Case has no meaning in HTTP, but some clients put headers into a plain dictionary, and look for this name.  uvicorn
    sends names in lower case, which for this type changes nothing.
    """

    def lower(self) -> HeaderName:
        """The same."""
        return self


MAX_HEADERS: Final = 100
MAX_HEADER_BYTES: Final = 32 * 1024
"""All names and values together."""

OVERLOADED_RETRY_MS: Final = 1000
DRAINING_RETRY_MS: Final = 5000
"""About as long as a restart takes."""

CORS_MAX_AGE_S: Final = 600
ALLOW_ORIGIN: Final = HeaderName(b"Access-Control-Allow-Origin")
METHODS: Final = "GET, POST, DELETE, OPTIONS"
EXPOSED: Final = (
    "x-request-id, x-uma-queue-position, x-uma-eta-ms, retry-after, retry-after-ms, "
    "x-ratelimit-limit-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)

KEY_MISSING: Final = "send an API key, as Authorization: Bearer KEY or as x-api-key: KEY"


@attrs.define
class Guard:
    """The application around ``app``.

    Args:
        open_paths: those that need no key.
        bodies: limits of the bodies of all requests but those that ``other_bodies`` has, by method and path.
        refuse: makes the response for an error, in the form that the path's clients know.
    """

    app: ASGIApp
    tenants: CurrentTenants
    limiter: Limiter
    wrong_keys: WrongKeys
    origins: Origins
    open_paths: frozenset[str]
    refuse: Callable[[HttpError, Scope], Response]
    bodies: BodyLimits
    other_bodies: Mapping[tuple[str, str], BodyLimits]
    drain_notice_s: float = 0.0
    """How long requests are served after ``drain``."""
    refuses_at: float = attrs.field(default=math.inf, init=False)
    """From when on every request but those of ``open_paths`` is refused, on ``now``'s clock."""
    now: Callable[[], float] = time.monotonic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        state = RequestState.of(scope)
        state.is_draining = self.is_draining
        if state.is_draining:
            send = with_headers(send, _close)
        bodies = self.other_bodies.get((scope["method"], path_of(scope)), self.bodies)
        body = state.body = Body(bodies, headers, receive)
        try:
            self._check_load(scope, state)
            _check_headers(scope)
            self._check_host(headers)
            if origin is not None and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(headers, is_allowed=self._allows_origin(headers, scope))(scope, receive, send)
                return
            self._check_origin(headers, scope)
            if origin is not None:
                send = with_headers(send, partial(_allow, origin))
            tenant = state.tenant = self._tenant_of(headers, scope, state)
            if tenant is not None:
                send = with_headers(send, partial(self._add_rates, tenant))
            content = b"" if bodies.are_streamed else await body.read()
        except HttpError as error:
            response = self.refuse(error, scope)
            if error.kind is TooManyConnections:
                response.headers["connection"] = "close"
            else:
                response = Refusal(response, body)
            await response(scope, receive, send)
            return
        if content is not None:
            state.is_large = len(content) > LARGE_BYTES
            await self.app(scope, receive if bodies.are_streamed else replay(content, receive), send)

    @property
    def is_draining(self) -> bool:
        """Whether the daemon stops: ``/health`` says so."""
        return self.refuses_at < math.inf

    def drain(self) -> None:
        """The daemon stops: say so from now on, and refuse new requests after the notice.  Those that run go on."""
        self.refuses_at = min(self.refuses_at, self.now() + self.drain_notice_s)

    def _check_load(self, scope: Scope, state: RequestState) -> None:
        if self.refuses_at <= self.now() and path_of(scope) not in self.open_paths:
            raise draining()
        if state.is_overloaded and path_of(scope) not in self.open_paths:
            message = f"too many requests are in flight (http_max_connections); {try_again_in(OVERLOADED_RETRY_MS)}"
            raise HttpError(TooManyConnections, message, retry_after_ms=OVERLOADED_RETRY_MS)

    # -- host and origin --

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.origins.allows_host(hosts[0]):
            name = hosts[0][:200] if hosts else ""
            raise HttpError(
                UNKNOWN_HOST, f"the host {name!r} is not served here; its operator can add it to http_hosts"
            )

    def _allows_origin(self, headers: Headers, scope: Scope) -> bool:
        allows = self.origins.allows_origin
        return all(allows(origin, headers["host"], scope["scheme"]) for origin in headers.getlist("origin"))

    def _check_origin(self, headers: Headers, scope: Scope) -> None:
        if not self._allows_origin(headers, scope):
            raise HttpError(
                UNKNOWN_ORIGIN,
                f"pages of {headers['origin'][:200]!r} may not use this gateway; its operator can add it to http_origins",
            )

    # -- who --

    def _tenant_of(self, headers: Headers, scope: Scope, state: RequestState) -> Tenant | None:
        """Find who sent the request.

        Raises:
            HttpError: there are tenants, and the request has no key or a wrong one.
        """
        tenants = self.tenants.now()
        if tenants is None:
            return None
        keys = list(_keys_in(headers))
        sender = next((tenant for tenant in map(tenants.find, keys) if tenant is not None), None)
        if sender is None and path_of(scope) not in self.open_paths:
            raise self._refused_key(scope) if keys else HttpError(NO_KEY, KEY_MISSING)
        state.n_tenants = len(tenants.by_name)
        return sender

    def _refused_key(self, scope: Scope) -> HttpError:
        wait_s = self.wrong_keys.note(_network(scope))
        if wait_s is None:
            return HttpError(NO_KEY, "Incorrect API key provided: it is not valid here, or was revoked")
        retry_after_ms = round(wait_s * 1000)
        message = (
            f"too many wrong API keys came from your address; {try_again_in(retry_after_ms)}, with a right one at once"
        )
        return HttpError(TOO_MANY_WRONG_KEYS, message, retry_after_ms=retry_after_ms)

    def _add_rates(self, tenant: Tenant, headers: MutableHeaders) -> None:
        for name, value in self.limiter.headers(tenant):
            headers[name] = value


def draining() -> HttpError:
    """The refusal of a gateway whose daemon stops."""
    message = f"{ShuttingDown()}; {try_again_in(DRAINING_RETRY_MS)}, or ask another one"
    return HttpError(ShuttingDown, message, retry_after_ms=DRAINING_RETRY_MS)


def with_headers(send: Send, change: Callable[[MutableHeaders], None]) -> Send:
    """A ``send`` that lets ``change`` see the headers of the response before they are sent."""

    async def send_changed(message: Message) -> None:
        if message["type"] == "http.response.start":
            change(MutableHeaders(scope=message))
        await send(message)

    return send_changed


def _close(headers: MutableHeaders) -> None:
    headers["connection"] = "close"


def path_of(scope: Scope) -> str:
    """The path below the one where another application has mounted this one."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _check_headers(scope: Scope) -> None:
    size = sum([len(name) + len(value) for name, value in scope["headers"]])
    if len(scope["headers"]) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        raise HttpError(
            HEADERS_TOO_LARGE,
            f"a request has at most {MAX_HEADERS} headers and {MAX_HEADER_BYTES:,} bytes of them",
        )


def _keys_in(headers: Headers) -> Iterable[str]:
    """The API keys that a request presents; some clients send both headers."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        yield key.strip()
    for name in ("x-api-key", "api-key"):
        if key := headers.get(name, "").strip():
            yield key


def _network(scope: Scope) -> str:
    """The client's address; of an IPv6 address the /64, which belongs to one client."""
    client = scope.get("client")
    if client is None:
        return ""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return str(client[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def is_admin(scope: Scope) -> bool:
    """Whether a request that has passed the guard comes from an administrator: by its key, or if there are no keys, from
    this machine."""
    state = RequestState.of(scope)
    if state.n_tenants is not None:
        return state.tenant is not None and state.tenant.admin
    client = scope.get("client")
    return client is not None and is_loopback(client[0])


def is_only_user(scope: Scope) -> bool:
    """Whether a request comes from an administrator, and the gateway has no other tenant."""
    return is_admin(scope) and RequestState.of(scope).n_tenants in (None, 1)


def is_unknown(scope: Scope) -> bool:
    """Whether a request comes from another machine, and without a key because the gateway has no tenants."""
    return RequestState.of(scope).n_tenants is None and not is_admin(scope)


def check_owner(scope: Scope) -> None:
    """Check that a request comes from somebody who is known, and so can own sessions.

    Raises:
        HttpError: it comes from another machine, and the gateway has no keys.
    """
    if is_unknown(scope):
        message = (
            f"{scope['path']} is refused to other machines while this gateway has no API keys, because everybody could read "
            "all conversations; its operator can create a key with: uma-trio keys create NAME"
        )
        raise HttpError(NOT_OWNER, message)


def check_admin(scope: Scope) -> None:
    """Check that a request that has passed the guard comes from an administrator.

    Raises:
        HttpError: it has another key, or there are no keys and it comes from another machine.
    """
    if not is_admin(scope):
        message = f"{scope['path']} needs the key of an administrator: uma-trio keys create NAME --admin"
        raise HttpError(NOT_ADMIN, message)


def _allow(origin: str, headers: MutableHeaders) -> None:
    """Let a page of ``origin`` read the response."""
    headers["access-control-expose-headers"] = EXPOSED
    headers.add_vary_header("origin")
    headers.raw.append((ALLOW_ORIGIN, origin.encode("latin-1")))


def _preflight(headers: Headers, *, is_allowed: bool) -> Response:
    """The answer to a browser that asks whether a page may send a request.  Without headers it is no."""
    response = Response(headers={"vary": "origin"})
    if is_allowed:
        allowed = {
            ALLOW_ORIGIN: headers["origin"],
            HeaderName(b"Access-Control-Allow-Methods"): METHODS,
            HeaderName(b"Access-Control-Allow-Headers"): headers.get("access-control-request-headers", ANY)[:1000],
            HeaderName(b"Access-Control-Max-Age"): str(CORS_MAX_AGE_S),
        }
        if "access-control-request-private-network" in headers:  # a page of the internet asks for this network
            allowed[HeaderName(b"Access-Control-Allow-Private-Network")] = "true"
        response.raw_headers.extend((name, value.encode("latin-1")) for name, value in allowed.items())
    return response
