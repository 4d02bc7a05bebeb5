"""What peers ask: ``POST /v1/peer``.  Only for daemons that know the shared secret; see ``gateway.peers``."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import anyio.to_thread
import msgspec
from starlette.responses import Response

from uma_trio.gateway.answer import JSON
from uma_trio.gateway.dialects.native.dialect import NATIVE
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import NO_PEERS, SILENT_PEER, HttpError, invalid
from uma_trio.gateway.guard import draining
from uma_trio.gateway.peers.channel import OLD_STAMP
from uma_trio.gateway.peers.copying import read_part
from uma_trio.gateway.peers.messages import (
    PATH,
    SIGNATURE,
    FileOffer,
    PeerAnswer,
    PeerQuestion,
    Session,
    StampAnswer,
)
from uma_trio.gateway.peers.moving import Peers


async def answer_peer(call: Call) -> Response:
    """Answer another daemon's question about a session, or give it one."""
    peers: Peers | None = call.request.app.state.peers
    if peers is None:
        raise HttpError(NO_PEERS, "this daemon has no peers: start it with --peers and --peers-key")
    nonce, question = peers.admit(call.request.headers.get(SIGNATURE, ""), await call.request.body())
    status, content, media_type = OLD_STAMP, msgspec.json.encode(StampAnswer(peers.stamp)), JSON
    if question is not None:
        if question.action == "offer":
            await _take_over(call, peers, question)
        status = 200
        with peers.moves.answering(question):
            content, media_type = await _answer(call, question)
    return Response(content, status, {SIGNATURE: peers.signer.answer(nonce, content)}, media_type)


async def _take_over(call: Call, peers: Peers, offer: PeerQuestion) -> None:
    """Bring a session here that another daemon offers because it stops.

    Raises:
        HttpError: it does not come, or this daemon stops as well.
    """
    if call.is_draining:
        raise draining()
    async with call.daemon.connect() as client:
        await peers.bring(client, Session(offer.session_id, offer.model, offer.principal))


async def _answer(call: Call, question: PeerQuestion) -> tuple[bytes, str]:
    """The body of an answer, and its media type."""
    of: dict[str, Any] = {"model": question.model, "principal": question.principal}
    match question.action:
        case "ask":
            of |= {"peer": question.node, "content": question.content}
        case "give":
            of |= {"peer": question.url, "seen": question.seen, "epoch": question.epoch}
        case "confirm" | "read":
            of |= {"epoch": question.epoch}
    action = {"read": "files", "offer": "ask"}.get(question.action, question.action)
    lease = await call.ask(lambda client: client.lease(action, question.session_id, **of))
    if question.action == "read":
        paths = [file.path for file in lease.files if file.kind == question.kind]
        if not paths:
            raise invalid(f"the session has no file of the kind {question.kind}", parameter="kind")
        try:
            return await anyio.to_thread.run_sync(read_part, paths[0], question.offset), "application/octet-stream"
        except OSError as error:
            raise HttpError(SILENT_PEER, f"a file of the session cannot be read: {error.strerror}") from None
    answer = PeerAnswer(
        state=lease.state,
        epoch=lease.epoch,
        given_to=lease.given_to,
        busy=lease.busy,
        content=lease.content,
        files=[FileOffer(file.kind, PurePath(file.path).name, file.n_bytes) for file in lease.files],
    )
    return msgspec.json.encode(answer), JSON


ENDPOINTS = (
    NATIVE.post(
        PATH, answer_peer, PeerQuestion, PeerAnswer, media_types=(JSON, "application/octet-stream"), needs_key=False
    ),
)
