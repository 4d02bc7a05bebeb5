"""Sessions that move between daemons: never two that may write, never none that has the latest turn."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.profile import amount
from uma_trio.protocol.lease import (
    AskAgain,
    Begin,
    Lease,
    LeaseChanged,
    Next,
    SessionLease,
    Take,
    TakeBack,
    next_step,
)


@attrs.define
class Disk:
    """What a daemon has written of the session."""

    lease: Lease
    turns: int | None
    """The latest turn of its copy; ``None``: it has no copy any more."""


@attrs.define(eq=False)
class Node:
    """A daemon and its gateway.  ``disk`` alone outlives a crash."""

    name: str
    disk: Disk | None = None
    claim: object | None = None
    life: int = 0
    """Counts the crashes: what was begun before one does not go on."""

    @property
    def may_write(self) -> bool:
        return self.disk is not None and not self.disk.lease.given_to

    def says(self) -> SessionLease:
        if self.disk is None:
            return SessionLease(state="claimed" if self.claim is not None else "absent")
        lease = self.disk.lease
        if not lease.given_to:
            return SessionLease(state="held", epoch=lease.epoch)
        if self.claim is not None:
            return SessionLease(state="claimed", epoch=lease.epoch)
        return SessionLease(state="gone" if self.disk.turns is None else "giving", epoch=lease.epoch)

    def own(self) -> SessionLease:
        """What the answer to a claim says."""
        claim, self.claim = self.claim, None
        try:
            return self.says()
        finally:
            self.claim = claim


class World:
    """Some daemons, a network that loses messages and delivers them late, and one session."""

    def __init__(self, n: int, rng: random.Random) -> None:
        self.nodes = [Node(f"n{i}") for i in range(n)]
        self.rng = rng
        self.loss = rng.choice([0.0, 0.1, 0.4])
        self.latest = 0
        self.begun = False
        self.moved = 0
        self.sent: list[tuple[Node, int, int, str]] = []
        """What sources were asked to give, and what they have given: the two epochs, and the receiver."""

    def check(self) -> None:
        assert sum(node.may_write for node in self.nodes) <= 1, "two may write"
        if not self.begun:
            return
        copies = [node for node in self.nodes if node.disk is not None and node.disk.turns is not None]
        assert copies, "nobody has a copy"
        newest = max(copies, key=lambda node: (node.disk.lease.epoch, node.may_write) if node.disk else ())
        assert newest.disk is not None
        assert newest.disk.turns == self.latest, "the copy with the highest epoch has not the latest turn"
        for node in self.nodes:
            assert not node.may_write or node is newest, "who may write has not the highest epoch"

    def request(self, node: Node) -> Iterator[None]:
        """One request at ``node``; anything may happen at each yield.  A message that is lost ends it."""
        life = node.life
        if node.may_write:
            self.write(node)
            return
        if node.claim is not None:
            return
        node.claim = mark = object()
        own = node.own()
        yield
        try:
            answers: dict[str, SessionLease | None] = {}
            step: Next = AskAgain()
            while isinstance(step, AskAgain):
                before, answers = answers, {}
                for other in self.shuffled():
                    if other is node:
                        continue
                    lost = self.rng.random() < self.loss
                    answers[other.name] = None if lost else other.says()
                    yield
                    if node.life != life:
                        return
                step = next_step(own, answers, before)
            match step:
                case Begin(epoch=epoch):
                    yield
                    if node.life == life and not node.may_write:
                        assert not self.begun, "begun a second time"
                        node.disk, self.begun = Disk(Lease(epoch), 1), True
                        self.latest = 1
                case TakeBack(seen=seen, epoch=epoch):
                    assert node.disk is not None
                    try:
                        node.disk.lease = node.disk.lease.changed(seen, epoch)
                    except LeaseChanged:
                        return
                    self.write(node)
                case Take(peer=peer, seen=seen, epoch=epoch):
                    source = next(each for each in self.nodes if each.name == peer)
                    yield from self.take(node, life, source, seen, epoch)
        finally:
            if node.claim is mark:
                node.claim = None

    def take(self, node: Node, life: int, source: Node, seen: int, epoch: int) -> Iterator[None]:
        yield  # the message is on its way, for as long as it likes
        if self.rng.random() < self.loss or source.disk is None or source.disk.turns is None:
            return
        try:
            source.disk.lease = source.disk.lease.changed(seen, epoch, node.name)
        except LeaseChanged:
            return
        self.sent.append((source, seen, epoch, node.name))
        copy = source.disk.turns
        yield  # so is the answer
        if self.rng.random() < self.loss or node.life != life or node.claim is None:
            return
        node.disk = Disk(Lease(epoch), copy)
        self.moved += 1
        self.write(node)
        yield
        if self.rng.random() < 0.3:
            return
        if source.disk is not None and source.disk.lease == Lease(epoch, node.name):
            source.disk.turns = None

    def deliver_again(self) -> None:
        """A message arrives a second time, however old it is."""
        if self.sent:
            source, seen, epoch, to = self.rng.choice(self.sent)
            assert source.disk is not None
            with contextlib.suppress(LeaseChanged):
                source.disk.lease = source.disk.lease.changed(seen, epoch, to)

    def write(self, node: Node) -> None:
        assert node.disk is not None
        assert node.may_write
        assert node.disk.turns == self.latest, "a turn is lost"
        self.latest += 1
        node.disk.turns = self.latest

    def crash(self, node: Node) -> None:
        node.life += 1
        node.claim = None

    def shuffled(self) -> list[Node]:
        return self.rng.sample(self.nodes, len(self.nodes))


def play(seed: int, n_nodes: int, n_steps: int) -> World:
    """Run requests, crashes and late messages in any order."""
    rng = random.Random(seed)
    world = World(n_nodes, rng)
    running: list[Iterator[None]] = []
    for _ in range(n_steps):
        luck = rng.random()
        if luck < 0.15 or not running:
            running.append(world.request(rng.choice(world.nodes)))
        elif luck < 0.2:
            world.crash(rng.choice(world.nodes))
        elif luck < 0.23:
            world.deliver_again()
        else:
            chosen = rng.choice(running)
            if next(chosen, "ended") == "ended":
                running.remove(chosen)
        world.check()
    return world


@settings(max_examples=amount(quick=300, thorough=20_000), deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(20, 400))
def test_one_daemon_at_most_may_write_and_the_latest_turn_is_never_lost(seed: int, n_nodes: int, n_steps: int) -> None:
    play(seed, n_nodes, n_steps)


def test_sessions_do_move_in_these_plays() -> None:
    """Otherwise the property above would hold for a protocol that does nothing."""
    moved = sum(play(seed, 3, 400).moved for seed in range(50))
    assert moved > 100
