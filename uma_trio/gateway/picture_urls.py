"""Fetches pictures that requests name by URL, if the operator allows it, and only from where no client can do harm.

A server that opens what clients name can be sent into its own network.  So a name is resolved once, all its addresses
must be public, and the connection goes to one of these addresses, whatever the name means a moment later.  The same holds
for every redirect.  No proxy, cookie, or credential is used.  Whatever has no public address is refused with the same
words after the same time, so that nobody learns which names there are inside.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import urljoin, urlsplit
from weakref import WeakValueDictionary

import anyio
import attrs

import uma_trio
from uma_trio.config import Config
from uma_trio.gateway.errors import HttpError, invalid
from uma_trio.gateway.media import MediaPart, ToFetch, media_of
from uma_trio.hub.errors import HubError
from uma_trio.hub.urls import is_public, parse_url, without_secrets
from uma_trio.protocol.chat import MAX_MEDIA_BYTES

FETCH_S: Final = 15.0
"""Longest time for a picture, with its redirects."""
RESOLVE_S: Final = 2.0
"""Longest time for the addresses of a name.  If none is public, it also is the shortest."""
MAX_REDIRECTS: Final = 3
AT_A_TIME: Final = 4
"""Pictures of a principal that are fetched together."""
MAX_FETCHES: Final = 16
"""Pictures of all principals that are fetched together.  The next one is that which has waited for longest, and a principal has
at most ``AT_A_TIME`` that wait."""
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Finds the IP addresses of a name and a port."""


async def addresses_of(host: str, port: int) -> list[str]:
    """The IP addresses of a name.

    Raises:
        OSError: it has none.
    """
    addresses = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in addresses]


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The authorities to trust.  To read them takes tens of milliseconds, in which no stream would go on."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=False)


@attrs.define
class PictureUrls:
    """Fetches the pictures of requests.

    Args:
        allowed: whether any are fetched.
        max_bytes: of the pictures of a request together.
    """

    allowed: bool = False
    max_bytes: int = 0
    _resolve: Resolve = addresses_of
    _transport: Callable[[], Any] | None = None
    """Makes what connects; ``None``: with the certificates of this machine."""
    _fetches: anyio.CapacityLimiter | None = attrs.field(init=False, default=None)
    """Made with the first picture: it belongs to the event loop."""
    _own: WeakValueDictionary[str | None, anyio.CapacityLimiter] = attrs.field(init=False, factory=WeakValueDictionary)
    """The share of each principal that has a picture fetched now."""

    @classmethod
    def of(cls, config: Config) -> PictureUrls:
        """As the settings say."""
        return cls(config.http.fetch_pictures, min(config.http.max_body_bytes, config.limits.max_frame_bytes) * 3 // 4)

    async def fetch(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """``fields`` of a request with the file of each picture that has a URL.

        Raises:
            HttpError: pictures are not fetched here, or one cannot be fetched.
        """
        parts = {place: part for place, part in media_of(fields.get("messages")) if isinstance(part, ToFetch)}
        if not parts:
            return fields
        if not self.allowed:
            raise _refusal(
                next(iter(parts)), "pictures are not fetched from other servers here", f"{SEND_IT}, or {ALLOW_IT}"
            )
        fetches = self._fetches = self._fetches or anyio.CapacityLimiter(MAX_FETCHES)
        files: dict[int, bytes] = {}
        left = [self.max_bytes]
        own = self._own.setdefault(fields.get("principal"), anyio.CapacityLimiter(AT_A_TIME))
        failures = list[HttpError]()

        async def fetch(place: str, part: ToFetch) -> None:
            async with own, fetches:
                try:
                    files[id(part)] = await self._fetch(part["url"], place, left)
                except HttpError as error:
                    failures.append(error)
                    tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for place, part in parts.items():
                tasks.start_soon(fetch, place, part)
        if failures:
            raise failures[0]

        def with_file(part: Any) -> Any:
            return MediaPart(part.parameter, type="image", data=files[id(part)]) if id(part) in files else part

        messages = [
            {**message, "content": [*map(with_file, message["content"])]}
            if isinstance(message.get("content"), list)
            else message
            for message in fields["messages"]
        ]
        return {**fields, "messages": messages}

    async def _fetch(self, url: str, place: str, left: list[int]) -> bytes:
        import httpx2  # a tenth of a second, which only those wait for who need it

        try:
            with anyio.fail_after(FETCH_S):
                for _ in range(MAX_REDIRECTS + 1):
                    content = await self._get(url, left)
                    if isinstance(content, bytes):
                        return content
                    url = urljoin(url, content)
        except HubError as error:
            raise _refusal(place, error.reason, error.remedy) from None
        except TimeoutError:
            raise _refusal(place, f"{_host(url)} takes longer than {FETCH_S:g} s", SEND_IT) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise _refusal(place, f"{without_secrets(url)} cannot be fetched: {reason}", SEND_IT) from None
        raise _refusal(place, f"{_host(url)} redirects more than {MAX_REDIRECTS} times", SEND_IT)

    async def _get(self, url: str, left: list[int]) -> bytes | str:
        """The body of the answer, or where it redirects to.

        Args:
            left: how many bytes the pictures of the request may still have.

        Raises:
            HubError: the URL may not be opened, or the answer is not a picture that may be taken.
        """
        import httpx2

        if urlsplit(url).scheme == "http":
            raise HubError(f"{without_secrets(url)} is not encrypted", "use https://")
        parts = parse_url(url)
        host, port = parts.hostname or "", parts.port or 443
        address = await self._public_address(host, port)
        where = f"[{address}]" if ":" in address else address
        target = parts._replace(netloc=f"{where}:{port}", fragment="").geturl()
        headers = {"Host": parts.netloc, "User-Agent": f"uma-trio/{uma_trio.__version__}", "Accept": "image/*"}
        transport = self._transport and self._transport()
        verify = await anyio.to_thread.run_sync(_certificates)
        async with (
            httpx2.AsyncClient(transport=transport, verify=verify, trust_env=False, timeout=FETCH_S) as client,
            client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as answer,
        ):
            if answer.status_code in REDIRECTS and "location" in answer.headers:
                return str(answer.headers["location"])
            if answer.status_code != 200:
                raise HubError(f"{host} answers with the status {answer.status_code}", SEND_IT)
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                left[0] -= len(chunk)
                if left[0] < 0 or len(body) > MAX_MEDIA_BYTES:
                    raise HubError(
                        f"the pictures of a request have more than {self.max_bytes:,} bytes",
                        "name smaller ones",
                    )
            return bytes(body)

    async def _public_address(self, host: str, port: int) -> str:
        """An address of ``host``, all of whose addresses are public.

        Raises:
            HubError: one of them is not, there is none, or it takes too long to find them.
        """
        addresses, until = list[str](), anyio.current_time() + RESOLVE_S
        with anyio.move_on_after(RESOLVE_S), contextlib.suppress(OSError, UnicodeError):
            addresses = await self._resolve(host, port)
        if addresses and all(map(is_public, addresses)):
            return addresses[0]
        await anyio.sleep_until(until)
        raise HubError(f"{host} has no public address", f"check the URL, or {SEND_IT}")


SEND_IT: Final = "send the file itself, as data:image/png;base64,..."
ALLOW_IT: Final = "start uma-trio serve with --http-fetch-pictures"


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def _refusal(place: str, reason: str, remedy: str | None) -> HttpError:
    return invalid(f"{reason}: {remedy}" if remedy else reason, parameter=place)
