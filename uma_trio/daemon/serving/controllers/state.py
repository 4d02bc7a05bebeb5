"""What the scheduler knows of an answer with a controller."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import ClassVar, Final

import attrs

from uma_trio.aici_link.messages import MidResult, PostOp
from uma_trio.protocol.controllers import StorageWrite

STEADY_TOKENS: Final = 2
"""After this many sampled tokens in a row, the controller is expected to let the model choose the next one, too."""


class Phase(enum.Enum):
    """What a controlled answer waits for."""

    NEW = enum.auto()
    """The runtime has its controller, and no answer for it yet."""
    POST_PENDING = enum.auto()
    """The controller must get the last tokens: ``Control.post``."""
    AWAITING_PRE = enum.auto()
    """The controller is being asked how to continue."""
    SUSPENDED = enum.auto()
    """The controller waits, and must be asked again."""
    FORK = enum.auto()
    """The answer becomes ``Control.n_forks`` answers as soon as there is room for them."""
    READY = enum.auto()
    """The next token can be sampled as soon as there is a mask for it."""
    AWAITING_MASK = enum.auto()
    """The controller is being asked for a mask."""
    MASK_READY = enum.auto()
    """A mask (``Control.mask_row``) or a splice (``Control.splice``) is ready; the next step uses it."""


@attrs.define(eq=False)
class ControlledRequest:
    """A request with a controller, which chooses the tokens of all of its answers."""

    name: str
    """The runtime's name of the controller until there is an answer."""
    generation: int
    """Generation of the runtime that has it."""
    n_deadlocked: int = 0
    """Exchanges in a row in which all of its answers were suspended."""
    n_removed: int = 0
    """Tokens that it has removed from its answers."""


@attrs.define(eq=False, kw_only=True)
class Control:
    """The state of one controlled answer."""

    exists: ClassVar = True
    request: ControlledRequest
    id: int
    """The runtime's id of the answer; never used again."""
    phase: Phase = Phase.NEW
    post: PostOp | None = None
    """Tokens that were appended and that the controller must get.  In phase ``POST_PENDING``."""
    waits_for: list[str] = attrs.field(factory=list)
    """Variables that its controller waits for, if it says so.  In phase ``SUSPENDED``."""
    n_forks: int = 1
    """How many answers it becomes, itself included; more than 1 in phase ``FORK``."""
    clone_of: int | None = None
    """The answer that the runtime has to copy for it."""
    needs_mask_first: bool = False
    """Ask for the mask before the sampling step, not during it: the answer was just forked, or its mask was late."""
    mask_requested: bool = False
    """A mask was requested for the next token.  In phase ``READY`` only if the controller skipped the step."""
    mask_row: int | None = None
    """Row of the mask.  In phase ``MASK_READY``, unless there is a splice."""
    splice: MidResult | None = None
    """Tokens that replace the sampled one, and perhaps tokens before it."""
    is_permitted: bool = False
    """The next step may sample the next token, if the phase allows it."""
    n_sampled_in_row: int = 0
    """Tokens in a row that the model sampled without another action of the controller."""
    logs: str = ""
    """What the controller printed and its client has not received yet."""
    writes: list[StorageWrite] = attrs.field(factory=list)
    """Writes of variables that its client has not received yet."""
    n_sampled: int = 0
    """Tokens that the model chose, removed ones included."""
    n_inserted: int = 0
    """Tokens that the controller chose, removed ones included."""

    @property
    def may_sample(self) -> bool:
        """Whether the next step may sample the next token."""
        return self.is_permitted and self.phase in (Phase.READY, Phase.MASK_READY)

    @property
    def may_yield(self) -> bool:
        """Whether the answer can lose its place: a mask is for the next step."""
        return self.phase not in (Phase.AWAITING_MASK, Phase.MASK_READY)

    @property
    def is_suspended(self) -> bool:
        """The controller waits for others, so the answer has no work."""
        return self.phase is Phase.SUSPENDED

    @property
    def may_run_ahead(self) -> bool:
        """Whether a run-ahead step may sample the next token, while a step in flight samples the one before it."""
        continues = self.phase not in (Phase.SUSPENDED, Phase.FORK) and self.splice is None
        return continues and self.n_sampled_in_row >= STEADY_TOKENS and not self.needs_mask_first

    def set_post(self, tokens: Sequence[int], backtrack: int = 0) -> None:
        """Tell the controller of ``tokens`` with the next ``post_pre``; ``backtrack`` as in ``PostOp``."""
        self.post, self.phase = PostOp(self.id, list(tokens), backtrack), Phase.POST_PENDING
        self.mask_row, self.splice, self.is_permitted, self.mask_requested = None, None, False, False


class NoControl:
    """In place of a ``Control``: the answer has no controller."""

    exists: Final = False
    may_sample: Final = True
    may_yield: Final = True
    may_run_ahead: Final = True
    is_suspended: Final = False
    n_sampled: Final = None
    n_inserted: Final = None
    waits_for: Final[Sequence[str]] = ()


NO_CONTROL: Final = NoControl()
