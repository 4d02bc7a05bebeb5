"""Who may write a session that several daemons may have: leases, and what a daemon that looks for a session does next.

One daemon *holds* a session and may write it.  A daemon that wants it *claims* its name, asks all others, and takes it from
its holder, which raises the epoch of the lease, writes down who gets the session, and writes it never again.

This module is pure.  Design and proof: docs/design/cluster.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, TypeAlias

import attrs
from msgspec import Meta

from uma_trio.protocol.types import Name, Question

MAX_EPOCH: Final = (1 << 53) - 1

Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]


class LeaseChanged(Exception):
    """The lease is not the one that was seen: ask again."""


@attrs.frozen
class Lease:
    """What a daemon knows of a session that it has or had.  On disk before anybody acts on it."""

    epoch: Epoch = 0
    """Grows with each change, and is higher then than that of any other daemon.  The highest one has the latest turn."""
    given_to: Annotated[str, Meta(max_length=256)] = ""
    """The daemon that gets the session, or has got it; empty if this one may write."""

    def changed(self, seen: int, epoch: int, to: str = "") -> Lease:
        """The lease after the session was given to ``to``; if that is empty, after nobody else turned out to have it.

        Args:
            seen: the epoch for which that was decided.
            epoch: the next one, higher than that of any daemon.

        Raises:
            LeaseChanged: somebody else was faster, or the message is an old one.
        """
        if self.epoch != seen or epoch <= seen:
            raise LeaseChanged(f"the lease has the epoch {self.epoch}, and not {seen}")
        return Lease(epoch, to)


OWN: Final = Lease()
"""The lease of a session that was never handed over."""

State = Literal["absent", "claimed", "held", "giving", "gone", "self"]
"""What a daemon is to a session.

===========  =============================================================
``absent``   it knows nothing of it
``claimed``  it looks for it, or begins it
``held``     it may write it
``giving``   it has given it away, and keeps a copy until that has arrived
``gone``     it has given it away
``self``     it is the daemon that asks
===========  =============================================================
"""


@attrs.frozen(kw_only=True)
class SessionFile:
    """A file of a session that moves."""

    kind: Literal["turns", "state"]
    path: str
    """On the machine of the daemon that has it."""
    n_bytes: Annotated[int, Meta(ge=1, le=1 << 46)]


@attrs.frozen(kw_only=True)
class SessionLease:
    """Answer to a ``LeaseQuery``.  Its event is called ``lease``."""

    state: State
    epoch: Epoch = 0
    given_to: str = ""
    busy: bool = False
    """Whether a request of the session runs, or will, because its name is claimed here."""
    durable: bool = False
    """Whether all its turns are on disk."""
    node: str = ""
    """Identifies the daemon that answers, from its start to its end."""
    content: str = ""
    """Identifies its model: a session does not go on with another one."""
    files: list[SessionFile] = attrs.field(factory=list)
    """What is to be copied, after ``give``."""
    id: str | None = None


@attrs.frozen(kw_only=True)
class LeaseQuery(Question):
    """Asks about or changes the lease of a session.  Only for the user who runs the daemon: the gateway asks for peers.

    ===========  ===================================================================================================
    ``claim``    look for the session: until this connection ends nobody else begins it, and no peer gets it from here
    ``release``  give up the claim of this connection, if it has one
    ``ask``      what is this daemon to the session?
    ``give``     freeze the session for ``peer``, and name its files
    ``files``    name the files again, of the session that was given with ``epoch``
    ``accept``   go on with the session from copies of these files; it was given with ``epoch``
    ``confirm``  the session that was given with ``epoch`` has arrived: remove the copy
    ``take_back``  go on with the session that was given, because nobody has got it
    ===========  ===================================================================================================
    """

    action: Literal["claim", "release", "ask", "give", "files", "accept", "confirm", "take_back"]
    session_id: Name
    seen: Epoch = 0
    """The epoch that the lease had when the change was decided."""
    epoch: Epoch = 0
    """The epoch of the change."""
    peer: Annotated[str, Meta(max_length=256)] = ""
    """Who gets the session (``give``); the ``node`` of the daemon that asks (``ask``)."""
    content: Annotated[str, Meta(max_length=4096)] = ""
    """The model of the daemon that asks; empty: any."""
    turns: Annotated[str, Meta(max_length=4096)] = ""
    """Path of the copy with the turns (``accept``)."""
    kv_state: Annotated[str, Meta(max_length=4096)] = ""
    """Path of the copy with the KV cache, if there is one (``accept``)."""
    model: Name | None = None
    """The model whose session this is; ``None``: the daemon's first."""


@attrs.frozen(kw_only=True)
class OfferQuery(Question):
    """Asks a daemon that stops for a session that another one may take over.  Only for the user who runs the daemon."""

    end: bool = False
    """No more are wanted, so the daemon need not wait."""


@attrs.frozen(kw_only=True)
class SessionOffer:
    """Answer to an ``OfferQuery``.  Its event is called ``offer``."""

    session_id: str | None = None
    """An idle session that is on disk, each once, the most recently used first; ``None``: there is no other one."""
    principal: str | None = None
    """Whose session it is; ``None``: that of the user who runs the daemon."""
    model: str | None = None
    id: str | None = None


# -- what a daemon does that has claimed a session --


@attrs.frozen
class Begin:
    """Nobody has it: begin it with ``epoch``, or do without it."""

    epoch: int


@attrs.frozen
class Wait:
    """Somebody else looks for it as well, or a request of it runs: try again soon."""

    is_busy: bool = False


@attrs.frozen
class Unreachable:
    """It may be at one of ``peers``, which do not answer."""

    peers: Sequence[str]


@attrs.frozen
class Take:
    """Take it from ``peer``, whose lease has the epoch ``seen``."""

    peer: str
    seen: int
    epoch: int


@attrs.frozen
class TakeBack:
    """Go on with the own copy, whose lease has the epoch ``seen``."""

    seen: int
    epoch: int


@attrs.frozen
class AskAgain:
    """Somebody has given it away, perhaps to one that was asked before that: ask everybody again."""


Next: TypeAlias = Begin | Wait | Unreachable | Take | TakeBack | AskAgain

Answers: TypeAlias = Mapping[str, SessionLease | None]
"""What each peer says; ``None`` if it does not answer."""


def next_step(own: SessionLease, answers: Answers, before: Answers) -> Next:
    """What to do with a session that was claimed, and then asked for everywhere.

    Args:
        own: the answer to the claim: ``absent``, ``giving`` or ``gone``.
        before: the answers of the round before, if there was one.
    """
    by_peer = {peer: answer for peer, answer in answers.items() if answer is not None and answer.state != "self"}
    epoch = 1 + max([own.epoch, *[answer.epoch for answer in by_peer.values()]])
    held = [(answer.epoch, peer) for peer, answer in by_peer.items() if answer.state == "held"]
    if held:  # it alone may write, whatever the others say
        seen, peer = max(held)
        return Wait(is_busy=True) if by_peer[peer].busy else Take(peer, seen, epoch)
    if any(answer.state == "claimed" for answer in by_peer.values()):
        return Wait()
    if silent := [peer for peer, answer in answers.items() if answer is None]:
        return Unreachable(silent)
    given = {peer: (answer.state, answer.epoch) for peer, answer in by_peer.items() if answer.state != "absent"}
    if given != {peer: (answer.state, answer.epoch) for peer in given if (answer := before.get(peer)) is not None}:
        return AskAgain()
    copies = [(answer.epoch, peer) for peer, answer in by_peer.items() if answer.state == "giving"]
    if own.state == "giving":
        copies.append((own.epoch, ""))
    if not copies or max(copies)[0] < epoch - 1:  # a later holder has closed it
        return Begin(epoch if given or own.epoch else 0)
    seen, peer = max(copies)
    return Take(peer, seen, epoch) if peer else TakeBack(seen, epoch)
