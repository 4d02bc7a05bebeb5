"""What the modules of the runtime have in common: limits, actions and errors of controllers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import attrs

if TYPE_CHECKING:  # each module is compiled by a new process, which imports this module
    import numpy as np
    import numpy.typing as npt

Row: TypeAlias = "npt.NDArray[np.float32]"
"""Shape ``[n_vocab]``: added to the logits of a sequence."""

StorageCommand: TypeAlias = dict[str, Any]
"""A write of a variable, as in ``SequenceResult.storage``."""

ALLOWED: Final = 0.0
DISALLOWED: Final = -100.0

TURN_SECONDS: Final = 5.0
"""Longest wait for another compilation.  The daemon's ``SIDE_S`` has room for two of these waits."""

UNASSIGNED: Final = 424242
"""Id of a controller that no sequence has yet."""


class Vocabulary(Protocol):
    """Tokens of the model."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def eos(self) -> int: ...
    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; empty for a control token."""
        ...

    def tokenize(self, text: bytes) -> Sequence[int] | npt.NDArray[np.int32]:
        """Tokens of UTF-8, without special tokens; invalid bytes become U+FFFD."""
        ...

    def tokenize_prompt(self, text: str) -> list[int]:
        """Tokens of a prompt, with those that the model expects around one."""
        ...


@attrs.frozen
class Limits:
    """What controllers may take.  The defaults are those of the reference implementation."""

    max_forks: int = 16
    """Live sequences of one request."""
    max_memory_mb: int = 64
    """Linear memory of one controller."""
    max_total_memory_mb: int = 2048
    """Linear memory of all controllers together.  Above that, the request that has the most fails.  Not in the
    reference."""
    max_pre_step_ms: int = 4
    max_step_ms: int = 150
    max_init_ms: int = 1000
    max_compile_s: float = 10.0
    max_compile_memory_mb: int = 512
    second_chance_ms: int = 200
    """Time on top of a limit, since this machine may be busy."""


@attrs.frozen
class Sample:
    """Sample a token; the controller's row is added to the logits."""


@attrs.frozen
class Splice:
    """Replace the last ``n_removed`` tokens by ``ff_tokens``.  A token that would be sampled does not count."""

    n_removed: int
    ff_tokens: Sequence[int]


@attrs.frozen
class StopSequence:
    """End the sequence: only EOS is allowed."""


MidAction: TypeAlias = Sample | Splice | StopSequence


class BadRequest(Exception):
    """The daemon asked for something that cannot be done now.  The message says why."""


class BadModule(Exception):
    """The module cannot be used; says why.  The one who uploaded it can fix it."""


class CannotCompile(Exception):
    """The module cannot be compiled now, which is not its fault; says why.  Nothing remembers this: it may succeed later."""


class ControllerError(Exception):
    """The controller failed in this call; every later call fails with ``PREVIOUS_ERROR``."""


PREVIOUS_ERROR: Final = "Previous WASM Error"


class ControllerTimeout(Exception):
    """The controller was stopped at its deadline and cannot be used any more."""
