"""What a controller's runtime and the scheduler know of one sequence that it steers."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Items
from typing import Final

import attrs

from uma_trio.aici.messages import MidResult, PostOp
from uma_trio.protocol.controllers import StorageWrite

STEADY_TOKENS: Final = 2
"""After so many tokens that the model chose, the controller is expected to let it choose the next one, too."""


class Phase(enum.Enum):
    """What a controlled sequence waits for."""

    NEW = enum.auto()
    """The runtime has its controller, which has no sequence yet."""
    REPORT = enum.auto()
    """The controller has not heard of its last tokens."""
    ASKED = enum.auto()
    """The controller is being asked how to go on."""
    SUSPENDED = enum.auto()
    """The controller waits, and must be asked again."""
    FORK = enum.auto()
    """It becomes several sequences as soon as there is room for them."""
    READY = enum.auto()
    """Its next token can be sampled as soon as there is a mask for it."""
    SAMPLING = enum.auto()
    """The controller is being asked for a mask."""
    ANSWERED = enum.auto()
    """There is a mask, or a splice, and the next token has not come of it yet."""


@attrs.define(eq=False)
class ControlledRequest:
    """A request whose answers one controller steers."""

    name: str
    """Under which the runtime has its controller until there is a sequence."""
    generation: int
    """Generation of the runtime that has it."""
    n_answers: int = 1
    n_deadlocked: int = 0
    """Exchanges in a row in which all of its sequences were suspended."""


@attrs.define(eq=False, kw_only=True)
class Control:
    """The state of one controlled sequence."""

    request: ControlledRequest
    id: int
    """Under which the runtime knows it; never used again."""
    phase: Phase = Phase.NEW
    report: PostOp | None = None
    """What the controller has to hear: tokens that were appended."""
    n_forks: int = 1
    """How many sequences it becomes, itself included; more than 1 in phase FORK."""
    clone_of: int | None = None
    """The sequence as whose copy the runtime has to begin it."""
    asks_ahead: bool = False
    """Its mask is asked for before the step that samples, not during it: it was just forked, or the mask was late."""
    is_asked: bool = False
    """It was asked for the mask of the next token; ``READY`` nevertheless if it has skipped the step."""
    mask_row: int | None = None
    """Row of its mask, if that is there."""
    splice: MidResult | None = None
    """Tokens that take the place of the sampled one."""
    is_permitted: bool = False
    """The next step may sample its next token, if the phase allows it."""
    n_plain: int = 0
    """How many tokens in a row its controller has let the model choose, with nothing to say between them."""
    logs: str = ""
    """What the controller has printed and its client has not got yet."""
    writes: list[StorageWrite] = attrs.field(factory=list)
    """Writes of variables, likewise."""
    n_sampled: int = 0
    """Tokens that the model chose, those that the controller removed included."""
    n_forced: int = 0
    """Tokens that the controller chose, likewise."""

    @property
    def may_sample(self) -> bool:
        """Whether the next step may sample its next token."""
        return self.is_permitted and self.phase in (Phase.READY, Phase.ANSWERED)

    @property
    def may_go_on(self) -> bool:
        """Whether the step that runs ahead may sample its next token, while a step in flight samples one."""
        stays = self.phase not in (Phase.SUSPENDED, Phase.FORK)
        return stays and self.n_plain >= STEADY_TOKENS and self.splice is None and not self.asks_ahead

    def set_report(self, tokens: Items[int], backtrack: int = 0) -> None:
        """The controller has to hear of ``tokens``; ``backtrack`` as in ``PostOp``."""
        self.report, self.phase = PostOp(self.id, list(tokens), backtrack), Phase.REPORT
        self.mask_row, self.splice, self.is_permitted, self.is_asked = None, None, False, False
