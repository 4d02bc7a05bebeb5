"""Brings the session of a request here before the daemon sees the request."""

from __future__ import annotations

import contextlib
import random
from typing import Final

import anyio
import attrs
import msgspec
import structlog

from uma_trio.client import Client, ClientError, ServerError, SessionLease
from uma_trio.config import Config
from uma_trio.errors import NotHandedOver, SessionBusy
from uma_trio.gateway.errors import OTHER_PEER, SILENT_PEER, UNSIGNED_PEER, HttpError, from_client_error, invalid
from uma_trio.gateway.peers.channel import Channel, PeerRefused, PeerSilent
from uma_trio.gateway.peers.copying import copy_file, temporary_folder
from uma_trio.gateway.peers.messages import PATH, FileOffer, PeerAnswer, PeerQuestion, Session
from uma_trio.gateway.peers.settings import PeerSettings
from uma_trio.gateway.peers.signatures import NotSigned, OldStamp, Reception, Signer
from uma_trio.gateway.peers.under_way import Moves
from uma_trio.protocol.lease import AskAgain, Begin, Next, Take, TakeBack, Unreachable, Wait, next_step

log = structlog.get_logger("uma_trio.gateway")

GIVE_S: Final = 60.0
"""How long a peer may take to bring a session to disk."""
LOOK_S: Final = 10.0
"""How long to look for a session at which others look as well."""
PAUSE_S: Final = (0.02, 0.15)
"""Between two attempts, at random."""
MAX_TURNS_BYTES: Final = 1 << 29


@attrs.frozen
class Peers:
    """The other daemons, and this one as they see it."""

    settings: PeerSettings
    signer: Signer
    _reception: Reception
    channel: Channel
    moves: Moves = attrs.field(factory=Moves)

    @classmethod
    def of(cls, config: Config) -> Peers | None:
        """
        Returns:
            The configured peers; ``None`` if there are none.

        Raises:
            ValueError: the settings cannot be used; the message says why.
        """
        settings = PeerSettings.of(config)
        if settings is None:
            return None
        signer = Signer(settings.secret)
        verifies = any(url.startswith("https://") for url in settings.urls)
        return cls(settings, signer, Reception(), Channel(signer, verifies))

    # -- questions that arrive --

    @property
    def stamp(self) -> str:
        """What a question must have."""
        return self._reception.stamp

    def admit(self, header: str, body: bytes) -> tuple[str, PeerQuestion | None]:
        """The nonce of a question for the signature of its answer, and the question; ``None`` if its stamp is an old one.

        Raises:
            HttpError: it is not signed with the secret, is not for this daemon, or came before.
        """
        try:
            nonce = self.signer.nonce_of(header, body)
            question = msgspec.json.decode(body, type=PeerQuestion)
            if question.to.rstrip("/") != self.settings.own_url:
                message = f"this daemon is {self.settings.own_url}, and the question is for {question.to}: --peers there must name --peer-url here"
                raise HttpError(OTHER_PEER, message, parameter="to")
            self._reception.admit(question.stamp, nonce)
        except NotSigned:
            raise HttpError(UNSIGNED_PEER, f"only peers with the same --peers-key may use {PATH}, once") from None
        except OldStamp:
            return nonce, None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise invalid(f"the question is not valid: {error}") from None
        return nonce, question

    # -- a session --

    async def bring(self, client: Client, session: Session) -> None:
        """Bring a session here, or claim its name if there is none.  So it stays until the connection of ``client`` ends.

        Raises:
            HttpError: it cannot be had now.
        """
        try:
            with self.moves.running(), anyio.fail_after(LOOK_S + GIVE_S):
                await self._bring(client, session)
        except TimeoutError:
            raise self._unavailable(session, "peers take too long") from None
        except OSError as error:
            raise self._unavailable(
                session, f"it cannot be copied to {self.settings.folder}: {error.strerror}; make room there"
            ) from None
        except ClientError as error:
            raise from_client_error(error) from None

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
                reason, is_busy = "others look for it as well", isinstance(step, Wait) and step.is_busy
            except (PeerSilent, PeerRefused) as error:
                log.info("a session did not come", session=session.id, reason=str(error))
                reason, is_busy = str(error), isinstance(error, PeerRefused) and error.code == SessionBusy.code
            except ServerError as error:
                if error.event.code not in (SessionBusy.code, NotHandedOver.code):
                    raise
                reason, is_busy = str(error), error.event.code == SessionBusy.code
            if anyio.current_time() > until:
                if is_busy:
                    message = f"session {session.id!r} is answering at another daemon; wait for its end"
                    raise HttpError(SessionBusy, message, parameter="session_id")
                raise self._unavailable(session, reason)
            # two that keep their claims would each wait for the other's
            await client.lease("release", session.id, **session.fields)
            await anyio.sleep(random.uniform(*PAUSE_S))

    def _unavailable(self, session: Session, reason: str) -> HttpError:
        """The error for a session that cannot be had now.  Only the user who runs the daemon learns where the others are."""
        log.info("a session cannot be had", session=session.id, reason=reason)
        shown = reason if session.principal is None else "another daemon may have it"
        message = f"session {session.id!r} cannot be had now: {shown}; try again soon"
        return HttpError(SILENT_PEER, message, parameter="session_id")

    async def _next_step(self, own: SessionLease, session: Session) -> Next:
        question = PeerQuestion(
            action="ask", session_id=session.id, node=own.node, content=own.content, **session.fields
        )
        answers: dict[str, SessionLease | None] = {}
        step: Next = AskAgain()
        while isinstance(step, AskAgain):
            before, answers = answers, await self._ask_all(question)
            step = next_step(own, answers, before)
        return step

    async def _ask_all(self, question: PeerQuestion) -> dict[str, SessionLease | None]:
        """What all peers say; once one has the session, what they have said until then: no other one may write it."""
        answers: dict[str, SessionLease | None] = {}

        async def ask(url: str) -> None:
            try:
                answers[url] = lease = _lease_in(await self.channel.ask(url, question))
            except (PeerSilent, PeerRefused) as error:
                log.info("a peer does not answer", reason=str(error))
                answers[url] = None
            else:
                if lease.state == "held":
                    tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for url in self.settings.others:
                tasks.start_soon(ask, url)
        return answers

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
                raise self._unavailable(session, f"it may be at {', '.join(peers)}, which cannot be reached or asked")
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
            url=self.settings.own_url,
            seen=take.seen,
            epoch=take.epoch,
            **session.fields,
        )
        given = await self.channel.ask(take.peer, question, GIVE_S)
        async with temporary_folder(self.settings.folder) as folder:
            paths: dict[str, str] = {}
            for file in filter(self._has_room_for, given.files):
                try:
                    await copy_file(self.channel, take.peer, question, file, folder / file.name)
                except OSError as error:
                    if file.kind == "turns":
                        raise
                    log.warning("a KV cache cannot be copied and is computed again", reason=error.strerror)
                    continue
                paths["turns" if file.kind == "turns" else "kv_state"] = str(folder / file.name)
            taken = await client.lease("accept", session.id, epoch=take.epoch, **paths, **session.fields)
        if not taken.durable:  # the copy there is the only one on a disk
            log.warning(
                "a session that was taken over is not on disk; its copy stays", session=session.id, at=take.peer
            )
            return
        question.action = "confirm"
        with contextlib.suppress(PeerSilent, PeerRefused):  # the copy there stays a little longer
            await self.channel.ask(take.peer, question)

    def _has_room_for(self, file: FileOffer) -> bool:
        most = MAX_TURNS_BYTES if file.kind == "turns" else self.settings.max_state_bytes
        if file.n_bytes > most:
            log.warning("a file of a session is too large to be taken over", kind=file.kind, size=file.n_bytes)
        return file.n_bytes <= most


def _lease_in(answer: PeerAnswer) -> SessionLease:
    return SessionLease(state=answer.state, epoch=answer.epoch, given_to=answer.given_to, busy=answer.busy)
