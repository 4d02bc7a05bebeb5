"""Asks peers over HTTP."""

from __future__ import annotations

import ssl
from typing import Any, Final

import anyio
import attrs
import msgspec

from uma_trio.errors import NotHandedOver, SessionBusy, SessionNotFound
from uma_trio.gateway.errors import OTHER_PEER
from uma_trio.gateway.peers.messages import CHUNK_BYTES, PATH, SIGNATURE, PeerAnswer, PeerQuestion, StampAnswer
from uma_trio.gateway.peers.signatures import NotSigned, Signer

CONNECT_S: Final = 1.0
ANSWER_S: Final = 3.0
"""A peer that does not answer a question in this time counts as down."""

OLD_STAMP: Final = 425
"""The status of a question that has not the stamp of now."""


class PeerSilent(Exception):
    """A peer does not answer, or not with the secret."""


class PeerRefused(Exception):
    """A peer refuses, with a code of docs/PROTOCOL-REFERENCE.md."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@attrs.define(eq=False)
class Channel:
    """Connections to all peers.

    Args:
        verifies: whether there are peers with TLS, so that certificates are needed.
    """

    _signer: Signer
    _verifies: bool
    _client: Any = attrs.field(default=None, init=False)
    _stamps: dict[str, str] = attrs.field(factory=dict, init=False)
    """What each peer has said last."""

    async def ask(self, url: str, question: PeerQuestion, timeout_s: float = ANSWER_S) -> PeerAnswer:
        """Ask a peer about a lease.

        Raises:
            PeerSilent, PeerRefused: it does not answer, or refuses.
        """
        content = await self.post(url, question, timeout_s)
        try:
            return msgspec.json.decode(content, type=PeerAnswer)
        except msgspec.MsgspecError as error:
            raise PeerSilent(f"{url} answers with something else: {error}") from None

    async def post(self, url: str, question: PeerQuestion, timeout_s: float) -> bytes:
        """Ask a peer, and return the body of its answer.

        Raises:
            PeerSilent, PeerRefused: it does not answer, or refuses.
        """
        status, content = await self._exchange(url, question, timeout_s)
        if status == OLD_STAMP:
            try:
                self._stamps[url] = msgspec.json.decode(content, type=StampAnswer).stamp
            except msgspec.MsgspecError as error:
                raise PeerSilent(f"{url} answers with something else: {error}") from None
            status, content = await self._exchange(url, question, timeout_s)
        if status != 200:
            raise PeerSilent(f"{url} answers with the status {status}")
        return content

    async def _exchange(self, url: str, question: PeerQuestion, timeout_s: float) -> tuple[int, bytes]:
        """Ask once; returns an answer that is signed."""
        question = msgspec.structs.replace(question, to=url, stamp=self._stamps.get(url, ""))
        body = msgspec.json.encode(question)
        nonce, header = self._signer.question(body)
        status, signature, content = await self._send(url, body, header, timeout_s)
        if status not in (200, OLD_STAMP):
            code = _code(content)
            if code in (SessionBusy.code, NotHandedOver.code, SessionNotFound.code):
                raise PeerRefused(code)
            if status == OTHER_PEER.http_status:
                raise PeerSilent(f"{url} leads to a daemon that has another --peer-url")
            raise PeerSilent(f"{url} answers with the status {status} and {code or 'no code'}")
        try:
            self._signer.check_answer(signature, nonce, content)
        except NotSigned:
            raise PeerSilent(f"{url} does not know the secret") from None
        return status, content

    async def _send(self, url: str, body: bytes, header: str, timeout_s: float) -> tuple[int, str, bytes]:
        """The status, the signature and the body of an answer."""
        import httpx2  # a gateway without peers does not need it

        if self._client is None:
            # the authorities of the system, and those of SSL_CERT_FILE: peers may have one of their own
            verify = ssl.create_default_context() if self._verifies else False
            self._client = httpx2.AsyncClient(verify=verify, follow_redirects=False, trust_env=False)
        headers = {SIGNATURE: header, "content-type": "application/json"}
        headers["accept-encoding"] = "identity"  # what is read is what was signed, and no larger than it looks
        timeout, content = httpx2.Timeout(timeout_s, connect=CONNECT_S), bytearray()
        try:
            with anyio.fail_after(timeout_s):  # the timeout of the client is that of each read
                async with self._client.stream(
                    "POST", url + PATH, content=body, headers=headers, timeout=timeout
                ) as answer:
                    async for part in answer.aiter_raw():
                        content += part
                        if len(content) > CHUNK_BYTES:
                            raise PeerSilent(f"{url} answers with more than {CHUNK_BYTES} bytes")
        except (httpx2.HTTPError, TimeoutError) as error:
            raise PeerSilent(f"{url} does not answer: {error!r}") from None
        return answer.status_code, answer.headers.get(SIGNATURE, ""), bytes(content)


def _code(content: bytes) -> str:
    try:
        fields = msgspec.json.decode(content)
        return str(fields.get("code") or fields.get("error", {}).get("code", ""))[:100]
    except (msgspec.DecodeError, AttributeError):
        return ""
