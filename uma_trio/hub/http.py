"""Requests over HTTP: redirects by our rules, which failures a retry may mend, and retries."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import attrs
import httpx2
import trio

import uma_trio
from uma_trio.hub.errors import HubError, Interrupted, Unreachable
from uma_trio.hub.urls import is_public, origin_of, parse_url, redirected, without_secrets

T = TypeVar("T")

CONNECT_S: Final = 15.0
SILENCE_S: Final = 30.0
"""A connection that brings nothing for this time counts as cut."""
MAX_REDIRECTS: Final = 10
MAX_TEXT_BYTES: Final = 64 << 20
"""Largest answer that is kept in memory."""
ATTEMPTS: Final = 6
"""In a row without progress, after which a download ends."""
LONGEST_WAIT_S: Final = 120.0
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
BUSY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may work later."""
CUT: Final = re.compile("disconnected|closed")
"""In the text of an error of the protocol: the answer is incomplete, and not wrong."""
CHECK_NETWORK: Final = (
    "check the network; HTTPS_PROXY names a proxy, HF_ENDPOINT another hub, and with --offline only models that are here "
    "are used"
)
CHECK_ADDRESS: Final = "check HF_ENDPOINT or the URL, and whether a proxy asks for a login"


async def addresses_of(host: str) -> list[str]:
    """The IP addresses of a name; empty if it has none, as behind a proxy that alone resolves names."""
    try:
        addresses = await trio.socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in addresses]


Resolve = Callable[[str], Awaitable[list[str]]]
"""Finds the IP addresses of a name."""


@attrs.frozen
class Http:
    """A client."""

    _client: httpx2.AsyncClient
    _endpoint: str
    """The URL whose origin alone gets the token."""
    _token: str | None
    _resolve: Resolve = addresses_of

    @property
    def has_token(self) -> bool:
        return self._token is not None

    @contextlib.asynccontextmanager
    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> AsyncIterator[httpx2.Response]:
        """Open ``url``, follow redirects, and yield the answer, whose body has not been read.

        Raises:
            HubError: the URL or a redirect may not be opened, or the certificate is not valid.
            Interrupted: a retry may help.  Raised inside the context, too.
        """
        parse_url(url)
        asked = url
        with _explained(url):
            for _ in range(MAX_REDIRECTS + 1):
                request = self._client.build_request("GET", url, headers=self._headers(url, headers or {}))
                answer = await self._client.send(request, stream=True)
                try:
                    if answer.status_code not in REDIRECTS or "location" not in answer.headers:
                        _check_not_busy(answer)
                        yield answer
                        return
                    url = redirected(url, answer.headers["location"])
                    await self._check_redirect(asked, url)
                finally:
                    with trio.CancelScope(shield=True):
                        await answer.aclose()
        raise HubError(f"{urlsplit(url).hostname} redirects more than {MAX_REDIRECTS} times", "try again later")

    async def _check_redirect(self, asked: str, url: str) -> None:
        """Refuse a redirect by which a server of the internet would have this machine open a place inside its network.

        A URL of this machine or of a private network was named by the user, and may redirect to others there.
        """
        host, target = urlsplit(asked).hostname or "", urlsplit(url).hostname or ""
        if host == target:
            return
        inside = [address for address in await self._resolve(target) if not is_public(address)]
        if inside and all(map(is_public, await self._resolve(host))):
            raise HubError(
                f"{host} redirects to {target}, which is inside this network ({inside[0]})", "use another source"
            )

    async def read_json(self, url: str) -> tuple[int, Mapping[str, str], Any]:
        """The status, the headers and the body of an answer; the body is ``None`` if it is not JSON.

        Raises:
            HubError, Interrupted: see ``get``; also if the answer is too large.
        """
        import msgspec

        async with self.get(url, {"Accept": "application/json"}) as answer:
            body = bytearray()
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > MAX_TEXT_BYTES:
                    raise HubError(f"{without_secrets(url)} answers with more than {MAX_TEXT_BYTES >> 20} MiB")
            try:
                return answer.status_code, answer.headers, msgspec.json.decode(bytes(body))
            except (msgspec.DecodeError, RecursionError):  # also one that is nested without end
                return answer.status_code, answer.headers, None

    def _headers(self, url: str, more: Mapping[str, str]) -> dict[str, str]:
        headers = {"User-Agent": f"uma-trio/{uma_trio.__version__}", **more}
        if self._token is not None and origin_of(url) == origin_of(self._endpoint):
            headers["Authorization"] = f"Bearer {self._token}"
        return headers


@contextlib.asynccontextmanager
async def open_http(endpoint: str, token: str | None, *, silence_s: float = SILENCE_S) -> AsyncIterator[Http]:
    """A client with its connections, closed at the end.  Proxies are those of the environment."""
    timeout = httpx2.Timeout(silence_s, connect=CONNECT_S)
    async with httpx2.AsyncClient(timeout=timeout, follow_redirects=False) as client:
        yield Http(client, endpoint, token)


@contextlib.contextmanager
def _explained(url: str) -> Any:
    host = urlsplit(url).hostname
    try:
        yield
    except httpx2.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise HubError(
                f"the certificate of {host} is not valid: {error}",
                "check the clock, and whether a proxy replaces certificates; SSL_CERT_FILE names those to trust",
            ) from None
        if _is_about_name(error):
            raise Unreachable(f"cannot reach {host}: its name has no address ({_reason(error)})") from None
        raise Unreachable(f"cannot connect to {host}: {_reason(error)}{_of_system(error)}") from None
    except httpx2.TimeoutException as error:
        kind = "cannot connect to" if isinstance(error, httpx2.ConnectTimeout) else "nothing comes from"
        raise Interrupted(f"{kind} {host}") from None
    except (httpx2.RemoteProtocolError, httpx2.DecodingError) as error:
        if CUT.search(str(error)):
            raise Interrupted(f"the connection to {host} was cut: {_reason(error)}") from None
        raise HubError(f"{host} does not answer as an HTTP server does: {_reason(error)}", CHECK_ADDRESS) from None
    except (httpx2.TransportError, ssl.SSLError, trio.BrokenResourceError) as error:
        raise Interrupted(f"the connection to {host} was cut: {_reason(error)}") from None
    except httpx2.InvalidURL as error:
        raise HubError(f"{without_secrets(url)} is not a URL: {error}") from None


def _is_about_name(error: BaseException | None) -> bool:
    """Whether a name of a server could not be resolved."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def _of_system(error: BaseException | None) -> str:
    """What the operating system says about each address that was tried, in brackets."""
    while error is not None and not isinstance(error, BaseExceptionGroup):
        error = error.__cause__ or error.__context__
    tried = error.exceptions if error is not None else ()
    numbers = dict.fromkeys(attempt.errno for attempt in tried if isinstance(attempt, OSError) and attempt.errno)
    return f" ({', '.join(map(os.strerror, numbers))})" if numbers else ""


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _check_not_busy(answer: httpx2.Response) -> None:
    if answer.status_code in BUSY:
        host = answer.request.url.host
        raise Interrupted(f"{host} answers with the status {answer.status_code}", _retry_after(answer.headers))


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("retry-after", "")
    return min(float(text), LONGEST_WAIT_S) if text.isdecimal() and len(text) < 6 else None


# -- attempts ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Delays:
    """Delays between attempts that bring nothing; each is twice the one before."""

    attempts: int = ATTEMPTS
    """In a row without progress, after which the download ends."""
    first_s: float = 1.0
    longest_s: float = 30.0

    def after(self, failures: int, asked_s: float | None) -> float | None:
        """Seconds to wait after a number of failures in a row; ``None``: give up.

        Args:
            failures: since there was progress.  A connection that was cut after it brought something is no failure.
            asked_s: what the server asks for.
        """
        if failures >= self.attempts:
            return None
        own = min(self.longest_s, self.first_s * 2 ** (failures - 1)) if failures else 0.0
        return max(own, asked_s or 0.0)


async def retrying(
    attempt: Callable[[], Awaitable[T]], delays: Delays, progress: Callable[[], int], said: Callable[[str], None]
) -> T:
    """Await ``attempt()`` until it does not raise ``Interrupted``.

    Args:
        progress: grows with what attempts bring.
        said: gets a line for people before each wait.

    Raises:
        HubError: too many attempts in a row brought nothing, or the first one could not reach the server.
    """
    failures = 0
    while True:
        before = progress()
        try:
            return await attempt()
        except Interrupted as error:
            if isinstance(error, Unreachable) and not progress():
                raise HubError(str(error), CHECK_NETWORK) from None
            failures = 0 if progress() > before else failures + 1
            wait_s = delays.after(failures, error.wait_s)
            if wait_s is None:
                raise HubError(
                    f"{error}, {failures} times in a row", f"try again: what is here already is kept; {CHECK_NETWORK}"
                ) from None
            again = "at once" if not wait_s else f"in {wait_s:.0f} s"
            said(f"{error}; trying again {again}")
            await trio.sleep(wait_s)
