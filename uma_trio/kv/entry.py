"""One sequence in use, and what is known of it."""

from __future__ import annotations

import attrs

from uma_trio.kv.checkpoints import Checkpoints
from uma_trio.kv.prefix import Tokens


@attrs.define(eq=False)
class Entry:
    """One sequence in use, busy or idle.  To others a handle."""

    tenant: int
    rank: int
    """Nobody waits for a sequence of a greater one."""
    tokens: Tokens
    """Of a busy one its prompt; of an idle one all that it holds."""
    reserved: int
    private: bool
    """Neither shared nor kept."""
    durable: bool = False
    """To be saved before its cells go to somebody else."""
    used: int = 0
    floor: int = 0
    """Tokens of which none can be removed without all, where the memory can be rewound at all."""
    idle: bool = False
    idle_since: float = 0.0
    saved: bool = False
    """All that it holds is on the shelf, or was given up."""
    wanted: bool = False
    """Somebody waits for its cells."""
    forgotten: bool = False
    """Nothing of it is to be kept, also if it is being saved just now."""
    restores: bool = False
    """Waits for a saved state to be loaded."""
    leader: Entry | None = None
    """Holds less than is shared with it so far, and is waited for."""
    until: int = 0
    """Tokens shared with the leader."""
    points: Checkpoints = ()
    """Where it can go back to, of a memory that cannot be cut."""
    pauses: tuple[int, ...] = ()
    """When it holds so many tokens reading its prompt pauses, and a checkpoint is made; ascending."""
    seq_id: int = -1

    @property
    def unsaved(self) -> bool:
        """It must not go before it is saved."""
        return self.durable and not self.saved

    def waits_for(self, other: Entry) -> bool:
        """``other`` is this one, its leader, the leader of that, and so on."""
        at: Entry | None = self
        while at is not None:
            if at is other:
                return True
            at = at.leader
        return False
