"""Other daemons, between which sessions move: brings the session of a request here before the daemon sees the request.

The questions and answers are signed with a secret that all peers share, so a peer believes nobody else, and neither can be
changed on the way.  Who else may read them depends on TLS.  Design: docs/design/cluster.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import random
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import attrs
import msgspec
import platformdirs
import structlog
from msgspec import Meta

from uma_trio.client import Client, ClientError, ServerError, SessionLease
from uma_trio.config import MB, Config, Http
from uma_trio.errors import NotHandedOver, SessionBusy, SessionNotFound
from uma_trio.files import read_text
from uma_trio.gateway.errors import HttpError, from_client_error
from uma_trio.protocol.address import InvalidAddress, http_address
from uma_trio.protocol.lease import AskAgain, Begin, Epoch, Next, State, Take, TakeBack, Unreachable, Wait, next_step
from uma_trio.protocol.types import Name

log = structlog.get_logger("uma_trio.gateway")

PATH: Final = "/v1/peer"
SIGNATURE: Final = "x-uma-peer"
MIN_SECRET_CHARS: Final = 32
CODE: Final = "E_GATEWAY_PEER"

CONNECT_S: Final = 1.0
ANSWER_S: Final = 3.0
"""A peer that does not answer a question in this time counts as down."""
GIVE_S: Final = 60.0
"""How long a peer may take to bring a session to disk."""
LOOK_S: Final = 10.0
"""How long to look for a session at which others look as well."""
PAUSE_S: Final = (0.02, 0.15)
"""Between two attempts, at random."""
RETRY_MS: Final = 2000
CHUNK_BYTES: Final = 4 << 20
CHUNK_TRIES: Final = 3
MAX_TURNS_BYTES: Final = 1 << 29


class FileOffer(msgspec.Struct):
    """A file of a session that was given."""

    kind: Literal["turns", "state"]
    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,64}\.[a-z]{1,16}$")]
    n_bytes: Annotated[int, Meta(ge=1, le=1 << 46)]


class PeerQuestion(msgspec.Struct):
    """What a daemon asks another one: the lease of a session, or a part of a file of a session that was given."""

    action: Literal["ask", "give", "confirm", "read"]
    session_id: Name
    to: Annotated[str, Meta(max_length=256)] = ""
    """The peer that is asked.  Another one refuses, however the question came to it: a wrong address, a proxy, or somebody
    who passes it on.  Its answer would count as that of the peer that holds the session."""
    model: Name | None = None
    principal: Name | None = None
    """Whose session it is; ``None``: that of the user who runs the daemon."""
    node: Annotated[str, Meta(max_length=64)] = ""
    content: Annotated[str, Meta(max_length=4096)] = ""
    url: Annotated[str, Meta(max_length=256)] = ""
    """What the daemon that asks is called."""
    seen: Epoch = 0
    epoch: Epoch = 0
    kind: Literal["turns", "state"] = "turns"
    offset: Annotated[int, Meta(ge=0, le=1 << 46)] = 0

    @property
    def of_session(self) -> dict[str, Any]:
        """The fields that name the session in a query of the socket."""
        return {name: value for name in ("model", "principal") if (value := getattr(self, name)) is not None}


class PeerAnswer(msgspec.Struct):
    """What the daemon says of the lease."""

    state: State
    epoch: Epoch = 0
    given_to: str = ""
    busy: bool = False
    content: str = ""
    files: list[FileOffer] = []


class PeerSilent(Exception):
    """A peer does not answer, or not with the secret."""


class PeerRefused(Exception):
    """A peer refuses, with a code of docs/PROTOCOL-REFERENCE.md."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@attrs.frozen
class Session:
    """The session that a request names."""

    id: str
    model: str | None
    principal: str | None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Session | None:
        """The session of a request for the daemon; ``None`` if it has none."""
        name = fields.get("session_id")
        return cls(name, fields.get("model"), fields.get("principal")) if isinstance(name, str) else None

    @property
    def fields(self) -> dict[str, Any]:
        found = {"model": self.model, "principal": self.principal}
        return {name: value for name, value in found.items() if value is not None}


@attrs.define(eq=False)
class Peers:
    """The other daemons.

    Args:
        urls: where they are.  The own daemon may be among them.
        own_url: what they call this daemon.
        folder: for files that arrive.
    """

    urls: tuple[str, ...]
    own_url: str
    _secret: bytes
    _folder: Path
    _max_state_bytes: int
    _client: Any = attrs.field(default=None, init=False)

    @classmethod
    def of(cls, config: Config) -> Peers | None:
        """
        Returns:
            The configured peers; ``None`` if there are none.

        Raises:
            ValueError: the file with the secret cannot be used; the message says why.
        """
        http = config.http
        if not http.peers:
            return None
        if http.peers_key is None:
            raise ValueError("--peers needs --peers-key, a file with the secret that they share")
        try:
            secret, mode = read_text(http.peers_key).strip(), os.stat(http.peers_key).st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read --peers-key {http.peers_key}: {error}") from None
        if len(secret) < MIN_SECRET_CHARS:
            raise ValueError(f"the secret in {http.peers_key} has fewer than {MIN_SECRET_CHARS} characters")
        if mode & 0o077:
            raise ValueError(f"others may read {http.peers_key}: chmod 600 it")
        urls = tuple([url.strip().rstrip("/") for url in http.peers.split(",") if url.strip()])
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"--peers: {url!r} is not a URL such as http://10.0.0.2:8080")
        own_url = (http.peer_url or _url_of(http)).rstrip("/")
        if http.peer_url is None and urlsplit(own_url).hostname in ("0.0.0.0", "::"):
            raise ValueError(
                "--peers needs --peer-url, which is how the others call this daemon, since it has many addresses"
            )
        state = config.sessions.state_dir or Path(platformdirs.user_state_dir("uma-trio"))
        return cls(
            urls,
            own_url,
            secret.encode(),
            state / "incoming",
            config.sessions.offload_max_mb * MB,
        )

    # -- signatures --

    def sign(self, kind: Literal["question", "answer"], nonce: str, body: bytes) -> str:
        """The signature of a body."""
        return hmac.new(self._secret, f"{kind} {nonce} ".encode() + body, hashlib.sha256).hexdigest()

    def check(self, signature: str, body: bytes) -> str:
        """The nonce of a question, for the signature of its answer.

        Raises:
            HttpError: it is not signed with the secret.
        """
        nonce, _, found = signature.partition(".")
        if not hmac.compare_digest(self.sign("question", nonce, body).encode(), found.encode("utf-8", "replace")):
            raise HttpError(401, CODE, f"only peers with the same --peers-key may use {PATH}")
        return nonce

    def check_receiver(self, question: PeerQuestion) -> None:
        """
        Raises:
            HttpError: the question is for another daemon.
        """
        if question.to.rstrip("/") != self.own_url:
            message = f"this daemon is {self.own_url}, and the question is for {question.to}: --peers there must name --peer-url here"
            raise HttpError(421, CODE, message, parameter="to")

    async def _post(self, url: str, question: PeerQuestion, timeout_s: float) -> bytes:
        """Ask a peer.

        Raises:
            PeerSilent, PeerRefused: it does not answer, or refuses.
        """
        import httpx2  # a gateway without peers does not need it

        if self._client is None:
            verify = any(url.startswith("https://") for url in self.urls)
            self._client = httpx2.AsyncClient(verify=verify, follow_redirects=False, trust_env=False)
        body, nonce = msgspec.json.encode(msgspec.structs.replace(question, to=url)), secrets.token_hex(16)
        headers = {SIGNATURE: f"{nonce}.{self.sign('question', nonce, body)}", "content-type": "application/json"}
        headers["accept-encoding"] = "identity"  # what is read is what was signed, and no larger than it looks
        timeout, found = httpx2.Timeout(timeout_s, connect=CONNECT_S), bytearray()
        try:
            with anyio.fail_after(timeout_s):  # the timeout of the client is that of each read
                async with self._client.stream(
                    "POST", url + PATH, content=body, headers=headers, timeout=timeout
                ) as answer:
                    async for part in answer.aiter_raw():
                        found += part
                        if len(found) > CHUNK_BYTES:
                            raise PeerSilent(f"{url} answers with more than {CHUNK_BYTES} bytes")
        except (httpx2.HTTPError, TimeoutError) as error:
            raise PeerSilent(f"{url} does not answer: {error!r}") from None
        content = bytes(found)
        if answer.status_code != 200:
            code = _code(content)
            if code in (SessionBusy.code, NotHandedOver.code, SessionNotFound.code):
                raise PeerRefused(code)
            if answer.status_code == 421:
                raise PeerSilent(f"{url} leads to a daemon that has another --peer-url")
            raise PeerSilent(f"{url} answers with the status {answer.status_code} and {code or 'no code'}")
        signature = answer.headers.get(SIGNATURE, "").encode("utf-8", "replace")
        if not hmac.compare_digest(signature, self.sign("answer", nonce, content).encode()):
            raise PeerSilent(f"{url} does not know the secret")
        return content

    async def _ask(self, url: str, question: PeerQuestion, timeout_s: float = ANSWER_S) -> PeerAnswer:
        content = await self._post(url, question, timeout_s)
        try:
            return msgspec.json.decode(content, type=PeerAnswer)
        except msgspec.MsgspecError as error:
            raise PeerSilent(f"{url} answers with something else: {error}") from None

    # -- a session --

    @contextlib.asynccontextmanager
    async def at_hand(self, client: Client, fields: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Have the session of a request here, or know that there is none, until the end of the context.

        Yields the request.  It is without its session if that cannot be had and the request has the whole conversation.

        Args:
            client: a connection to the daemon for this alone: it keeps the claim.

        Raises:
            HttpError: the session cannot be had now.
        """
        session = Session.of(fields)
        if session is not None:
            try:
                with anyio.fail_after(LOOK_S + GIVE_S):
                    await self._bring(client, session)
            except HttpError:
                if fields.get("history") != "replace":
                    raise
                fields = {name: value for name, value in fields.items() if name not in ("session_id", "history")}
            except TimeoutError:
                raise self._unavailable(session, self.urls) from None
            except OSError as error:
                message = (
                    f"session {session.id!r} cannot be copied to {self._folder}: {error.strerror}; make room there"
                )
                raise HttpError(503, CODE, message, retry_after_ms=RETRY_MS, parameter="session_id") from None
            except ClientError as error:
                raise from_client_error(error) from None
        yield fields

    async def _bring(self, client: Client, session: Session) -> None:
        until = anyio.current_time() + LOOK_S
        while True:
            try:
                own = await client.lease("claim", session.id, **session.fields)
                if own.state == "held":
                    return
                step = await self._next_step(own, session)
                if await self._carry_out(client, session, own, step):
                    return
                is_busy = isinstance(step, Wait) and step.is_busy
            except (PeerSilent, PeerRefused) as error:
                log.info("a session did not come", session=session.id, reason=str(error))
                is_busy = isinstance(error, PeerRefused) and error.code == SessionBusy.code
            except ServerError as error:
                if error.event.code not in (SessionBusy.code, NotHandedOver.code):
                    raise
                is_busy = error.event.code == SessionBusy.code
            if anyio.current_time() > until:
                if is_busy:
                    message = f"session {session.id!r} is answering at another daemon; wait for its end"
                    raise HttpError(409, SessionBusy.code, message, parameter="session_id")
                raise self._unavailable(session, self.urls)
            # two that keep their claims would each wait for the other's
            await client.lease("release", session.id, **session.fields)
            await anyio.sleep(random.uniform(*PAUSE_S))

    def _unavailable(self, session: Session, urls: object) -> HttpError:
        peers = ", ".join(urls) if isinstance(urls, list | tuple) else str(urls)
        message = f"session {session.id!r} may be at {peers}, which cannot be reached or asked; try again soon"
        return HttpError(503, CODE, message, retry_after_ms=RETRY_MS, parameter="session_id")

    async def _next_step(self, own: SessionLease, session: Session) -> Next:
        question = PeerQuestion(
            action="ask", session_id=session.id, node=own.node, content=own.content, **session.fields
        )
        answers: dict[str, SessionLease | None] = {}
        step: Next = AskAgain()
        while isinstance(step, AskAgain):
            before, answers = answers, {}

            async def ask(url: str, answers: dict[str, SessionLease | None] = answers) -> None:
                try:
                    found = await self._ask(url, question)
                except (PeerSilent, PeerRefused) as error:
                    log.info("a peer does not answer", reason=str(error))
                    answers[url] = None
                    return
                answers[url] = SessionLease(
                    state=found.state, epoch=found.epoch, given_to=found.given_to, busy=found.busy
                )

            async with anyio.create_task_group() as tasks:
                for url in self.urls:
                    if url != self.own_url:
                        tasks.start_soon(ask, url)
            step = next_step(own, answers, before)
        return step

    async def _carry_out(self, client: Client, session: Session, own: SessionLease, step: Next) -> bool:
        """Returns whether the session is here now, or is nowhere.

        Raises:
            HttpError: a peer that may have it does not answer.
        """
        match step:
            case Begin(epoch=epoch):
                if epoch:
                    await client.lease("claim", session.id, epoch=epoch, **session.fields)
                return True
            case Unreachable(peers=peers):
                raise self._unavailable(session, peers)
            case TakeBack(seen=seen, epoch=epoch):
                await client.lease("take_back", session.id, seen=seen, epoch=epoch, **session.fields)
                return True
            case Take():
                await self._take(client, session, own, step)
                return True
        return False

    async def _take(self, client: Client, session: Session, own: SessionLease, take: Take) -> None:
        question = PeerQuestion(
            action="give",
            session_id=session.id,
            node=own.node,
            content=own.content,
            url=self.own_url,
            seen=take.seen,
            epoch=take.epoch,
            **session.fields,
        )
        given = await self._ask(take.peer, question, GIVE_S)
        folder = Path(await anyio.to_thread.run_sync(self._make_folder))
        try:
            paths: dict[str, str] = {}
            for file in given.files:
                most = MAX_TURNS_BYTES if file.kind == "turns" else self._max_state_bytes
                if file.n_bytes > most:
                    log.warning("a file of a session is too large to be taken over", kind=file.kind, size=file.n_bytes)
                    continue
                await self._copy(take.peer, question, file, folder / file.name)
                paths["turns" if file.kind == "turns" else "kv_state"] = str(folder / file.name)
            taken = await client.lease("accept", session.id, epoch=take.epoch, **paths, **session.fields)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))
        if not taken.durable:  # the copy there is the only one on a disk
            log.warning(
                "a session that was taken over is not on disk; its copy stays", session=session.id, at=take.peer
            )
            return
        question.action = "confirm"
        with contextlib.suppress(PeerSilent, PeerRefused):  # the copy there stays a little longer
            await self._ask(take.peer, question)

    def _make_folder(self) -> str:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return tempfile.mkdtemp(dir=self._folder)

    async def _copy(self, url: str, given: PeerQuestion, file: FileOffer, target: Path) -> None:
        """Copy a file, part by part.  A part that does not come is asked for again."""
        question = msgspec.structs.replace(given, action="read", kind=file.kind)
        async with await anyio.open_file(target, "xb") as sink:
            n_tries = 0
            while question.offset < file.n_bytes:
                try:
                    part = await self._post(url, question, GIVE_S)
                except PeerSilent:
                    n_tries += 1
                    if n_tries == CHUNK_TRIES:
                        raise
                    continue
                if not 0 < len(part) <= min(CHUNK_BYTES, file.n_bytes - question.offset):
                    raise PeerSilent(f"{url} sends {len(part)} bytes where others belong")
                await sink.write(part)
                question.offset += len(part)
                n_tries = 0


def _url_of(http: Http) -> str:
    scheme = "http" if http.tls_certificate is None else "https"
    try:
        host, port = http_address(http.listen or "0")
    except InvalidAddress as error:
        raise ValueError(f"--http {error}") from None
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _code(content: bytes) -> str:
    try:
        found = msgspec.json.decode(content)
        return str(found.get("code") or found.get("error", {}).get("code", ""))[:100]
    except (msgspec.DecodeError, AttributeError):
        return ""


def read_part(path: str, offset: int) -> bytes:
    """A part of a file of a session that was given.  Blocks."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)
