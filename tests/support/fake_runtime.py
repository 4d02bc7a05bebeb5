"""A runtime of controllers without Wasm and without a process, in virtual time.

Controllers are Python objects: see ``ScriptedController``.  The fake and the real one pass the same tests: see
``runtime_contract``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import trio

from tests.support.masks import SharedMasks
from uma_trio.aici.runtime.interface import PREVIOUS_ERROR, MidAction, Sample, Splice, StopSequence
from uma_trio.aici_link.messages import (
    Auth,
    MidAnswer,
    MidOp,
    MidResult,
    ModuleInfo,
    PostOp,
    PostPreAnswer,
    PostResult,
    PreOp,
    PreResult,
    SequenceResult,
    TagInfo,
)
from uma_trio.daemon.aici.exchange import AnswerCheck, Exchange, MidResults, PostPreResults
from uma_trio.engine_link.masks import MaskFile
from uma_trio.errors import ControllerFailed, ControllerNotFound, ControllerUnavailable

MAX_FORKS = 16
MAX_PRE_ROUNDS = 10
EOS = 0

SKIPPED = "skipped"
"""In place of a result of ``pre`` or of an action of ``mid``: the controller takes too long for this step."""

LATE: SequenceResult[PreResult] = SequenceResult("", PreResult(suspend=True), skipped=True)
"""The answer for such a ``pre``."""


class Trap(Exception):
    """The error of a scripted controller.  Any other exception is a defect of the test."""


class ScriptedController:
    """What a controller does; by default it allows everything and never ends.  Override what you need.

    ``Trap`` is the controller's error.  Attributes are copied with a fork, but for ``shared``.
    """

    def __init__(self, argument: Any = None) -> None:
        self.argument = argument
        self.id = 424242
        self.shared: dict[str, Any] = {}
        """Variables of the request."""
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        """Prompt and answer, kept by ``observe``."""
        self.storage: list[dict[str, Any]] = []
        self.logs = ""
        self.failed = False

    def init_prompt(self, tokens: list[int]) -> None:
        """The prompt, before the controller has a sequence."""

    def pre(self) -> PreResult | str:
        return PreResult()

    def mid(self, fork_group: Sequence[int]) -> MidAction | Collection[int] | str:
        """``Sample`` (all tokens allowed), the tokens that are allowed, ``Splice``, ``StopSequence``, or ``SKIPPED``."""
        return Sample()

    def post(self, tokens: Sequence[int], backtrack: int) -> bool:
        """Whether to stop."""
        return False

    def log(self, text: str) -> None:
        self.logs += text

    def write(self, name: str, value: str) -> None:
        """Set a variable."""
        self.shared[name] = value
        self.storage.append(
            {"WriteVar": {"name": name, "value": value.encode().hex(), "op": "Set", "when_version_is": None}}
        )

    # -- for the fake --------------------------------------------------------------------------

    def observe(self, tokens: Sequence[int], backtrack: int) -> bool:
        if backtrack:
            del self.tokens[-backtrack:]
        self.tokens += tokens
        return self.post(tokens, backtrack)

    def fork(self, id: int) -> ScriptedController:
        shared, self.shared = self.shared, {}
        child = copy.deepcopy(self)
        self.shared = child.shared = shared
        child.id = id
        return child


Module: TypeAlias = Callable[[Any], ScriptedController]
"""Makes a controller of its argument."""


@attrs.define
class _Call:
    """What the fake notes of each exchange."""

    post: Sequence[PostOp] = ()
    pre: Sequence[PreOp] = ()
    freed: Sequence[int] = ()
    mid: Sequence[MidOp] = ()
    at: float = attrs.field(factory=trio.current_time)


class FakeRuntime:
    """See ``ControllerRuntime``.  ``run`` must have been started.

    Args:
        modules: by name.
        exchange_ms: simulated time of an exchange, or what computes it: called with ``"post_pre"`` or ``"mid"``.
        init_ms: simulated time of ``instantiate``.
        restart_ms: simulated time of a restart.
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        *,
        n_vocab: int = 1000,
        n_rows: int = 64,
        exchange_ms: float | Callable[[str], float] = 0.5,
        init_ms: float = 1.0,
        restart_ms: float = 200.0,
        max_tokens: int = 1 << 16,
    ) -> None:
        self.modules = dict(modules)
        self.exchange_ms = exchange_ms
        self.is_usable = False
        self.reason = "it has not been started"
        self.generation = 0
        self.masks: MaskFile | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_unused: Callable[[str], None] = lambda req_id: None
        self.live: dict[int, ScriptedController] = {}
        """Controllers by the ids of their sequences."""
        self.waiting: dict[str, ScriptedController] = {}
        """Controllers without a sequence, by request."""
        self.calls: list[_Call] = []
        self.tags: dict[str, TagInfo] = {}
        self._check = AnswerCheck(n_vocab, MAX_FORKS, max_tokens)
        self._n_rows = n_rows
        self._init_ms, self._restart_ms = init_ms, restart_ms
        self._shared: SharedMasks | None = None
        self._pending: Exchange[Any] | None = None
        self._nursery: trio.Nursery | None = None
        self._request_of: dict[int, str] = {}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                self.start()
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.die("the daemon ends", restart=False)

    def start(self) -> None:
        self._shared = SharedMasks(self._n_rows, self._check.n_vocab)
        self.masks = self._shared.file
        self.generation += 1
        self.is_usable, self.reason = True, ""
        self.on_change()

    def die(self, reason: str = "the runtime was ended by SIGKILL", *, restart: bool = True) -> None:
        """The process ends, with all its sequences."""
        if not self.is_usable:
            return
        self.is_usable, self.reason, self.masks = False, reason, None
        self.live.clear()
        self.waiting.clear()
        assert self._shared is not None
        self._shared.close()
        if self._pending is not None:
            self._pending.finish(failure=reason)
        self.on_change()
        if restart and self._nursery is not None:
            self._nursery.start_soon(self._restart)

    async def _restart(self) -> None:
        await trio.sleep(self._restart_ms / 1e3)
        self.start()

    def snapshot(self) -> dict[str, Any]:
        return {"pid": None, "restarts_total": max(0, self.generation - 1)}

    # -- main channel --------------------------------------------------------------------------

    def post_pre(self, post: Sequence[PostOp], pre: Sequence[PreOp], freed: Sequence[int]) -> Exchange[PostPreResults]:
        def answer() -> PostPreResults:
            found = self._post_pre(post, pre, freed)
            return self._check.post_pre(found, [op.id for op in post], [op.id for op in pre])

        return self._exchange("post_pre", _Call(post, pre, freed), answer)

    def mid(self, ops: Sequence[MidOp]) -> Exchange[MidResults]:
        assert len(ops) <= self._n_rows
        return self._exchange("mid", _Call(mid=ops), lambda: self._check.mid(self._mid(ops), [op.id for op in ops]))

    def _exchange(self, name: str, call: _Call, answer: Callable[[], Any]) -> Exchange[Any]:
        exchange: Exchange[Any] = Exchange()
        if not self.is_usable:
            exchange.finish(failure=self.reason)
            return exchange
        if self._pending is not None and not self._pending.is_done:
            raise RuntimeError("the exchange before is not done")
        self._pending = exchange
        self.calls.append(call)
        assert self._nursery is not None
        ms = self.exchange_ms(name) if callable(self.exchange_ms) else self.exchange_ms
        self._nursery.start_soon(self._answer, exchange, ms, answer)
        return exchange

    async def _answer(self, exchange: Exchange[Any], ms: float, answer: Callable[[], Any]) -> None:
        if math.isinf(ms):
            return
        await trio.sleep(ms / 1e3)
        if not exchange.is_done:
            exchange.finish(answer())

    def _post_pre(self, post: Sequence[PostOp], pre: Sequence[PreOp], freed: Sequence[int]) -> PostPreAnswer:
        post_seqs: dict[str, SequenceResult[PostResult]] = {}
        pre_seqs: dict[str, SequenceResult[PreResult]] = {}
        for start in pre:
            controller = self.waiting.pop(start.req_id, None)
            if controller is None:
                pre_seqs[str(start.id)] = SequenceResult(f"invalid req_id {start.req_id}", None)
                continue
            controller.id = start.id
            self.live[start.id] = controller
            self._request_of[start.id] = start.req_id
        for op in post:
            found = self.live.get(op.id)
            if found is None:
                post_seqs[str(op.id)] = SequenceResult(f"invalid id {op.id}", None)
                continue
            backtrack = max(0, op.backtrack - 1)
            post_seqs[str(op.id)] = _call(
                found,
                "post",
                PostResult(True),
                lambda: PostResult(found.observe(op.tokens, backtrack)),  # noqa: B023
            )
        for id, controller in self.live.items():
            found_pre = _call(controller, "pre0", PreResult(), lambda: _pre(controller))  # noqa: B023
            pre_seqs[str(id)] = LATE if found_pre.result == SKIPPED else found_pre
        for id in freed:
            self.live.pop(id, None)
        return PostPreAnswer(post_seqs, pre_seqs)

    def _mid(self, ops: Sequence[MidOp]) -> MidAnswer:
        assert self._shared is not None
        groups: dict[int, list[int]] = {}
        errors: dict[int, str] = {}
        for op in ops:
            parent = op.id if op.clone_id is None else op.clone_id
            if op.clone_id is not None:
                if parent not in self.live or op.id in self.live:
                    errors[op.id] = f"cannot clone {parent} as {op.id}"
                    continue
                request = self._request_of[parent]
                if sum(self._request_of[id] == request for id in self.live) + 1 > MAX_FORKS:
                    errors[op.id] = f"too many forks (max={MAX_FORKS})"
                    continue
                self.live[op.id] = self.live[parent].fork(op.id)
                self._request_of[op.id] = request
            groups.setdefault(parent, []).append(op.id)
        seqs: dict[str, SequenceResult[MidResult]] = {}
        for row, op in enumerate(ops):
            controller = self.live.get(op.id)
            if controller is None:
                error = "Worker: " + errors.get(op.id, f"invalid id {op.id}")
                seqs[str(op.id)] = SequenceResult(error, None, logs=error)
                continue
            group = groups[op.id if op.clone_id is None else op.clone_id]
            self._shared.allow_only(row)
            seqs[str(op.id)] = self._mid_of(controller, group, row)
        return MidAnswer(seqs, len(ops))

    def _mid_of(self, controller: ScriptedController, group: Sequence[int], row: int) -> SequenceResult[MidResult]:
        assert self._shared is not None
        shared = self._shared
        is_skipped = False

        def act() -> MidResult | None:
            nonlocal is_skipped
            match controller.mid(group):
                case Sample():
                    shared.rows[row] = 0.0
                case StopSequence():
                    shared.allow_only(row, EOS)
                case Splice(ff_tokens=tokens) if any(token >= self._check.n_vocab for token in tokens):
                    raise Trap("ff_token out of range")
                case Splice(n_removed=0, ff_tokens=tokens):
                    shared.allow_only(row, tokens[0])
                    return MidResult(list(tokens), 0)
                case Splice(n_removed=backtrack, ff_tokens=tokens):
                    shared.rows[row] = 0.0
                    return MidResult(list(tokens), backtrack + 1)
                case str():
                    is_skipped = True
                case allowed:
                    shared.allow_only(row, *allowed)
            return None

        found = _call(controller, "mid", None, act)
        return (
            SequenceResult(found.error, found.result, found.storage, found.logs, 0, skipped=True)
            if is_skipped
            else found
        )

    # -- side channel --------------------------------------------------------------------------

    async def instantiate(
        self, req_id: str, module: str, argument: Any, prompt: Sequence[int], auth: Auth | None = None
    ) -> int:
        generation = self._check_usable()
        await trio.sleep(self._init_ms / 1e3)
        if self._check_usable() != generation:
            raise ControllerUnavailable("the runtime of controllers has ended")
        if module not in self.modules:
            raise ControllerNotFound(f"tag {module} not found")
        try:
            controller = self.modules[module](argument)
            controller.prompt, controller.tokens = list(prompt), list(prompt)
            controller.init_prompt(list(prompt))
        except Trap as error:
            raise ControllerFailed(str(error)) from None
        self.waiting[req_id] = controller
        return generation

    async def make_module(self, wasm: bytes, auth: Auth | None = None) -> ModuleInfo:
        self._check_usable()
        await trio.sleep(self._init_ms / 1e3)
        raise ControllerFailed("this is not a controller")

    async def set_tags(self, module_id: str, tags: Sequence[str], auth: Auth | None = None) -> list[TagInfo]:
        self._check_usable()
        await trio.sleep(self._init_ms / 1e3)
        if module_id not in self.modules:
            raise ControllerNotFound(f"module {module_id} not found")
        user = (auth or Auth()).user
        found = [TagInfo(tag, module_id, int(trio.current_time()), user, 1, 1) for tag in tags]
        for info in found:
            self.tags[info.tag] = info
            self.modules[info.tag] = self.modules[module_id]
        return found

    async def get_tags(self, auth: Auth | None = None) -> list[TagInfo]:
        self._check_usable()
        await trio.sleep(self._init_ms / 1e3)
        return sorted(self.tags.values(), key=lambda info: -info.updated_at)

    def _check_usable(self) -> int:
        if not self.is_usable:
            raise ControllerUnavailable(self.reason)
        return self.generation


def _pre(controller: ScriptedController) -> PreResult | str:
    """What the runtime does with tokens that ``pre`` appends: the controller sees them at once, and is asked again."""
    appended: list[int] = []
    for _ in range(MAX_PRE_ROUNDS):
        found = controller.pre()
        if isinstance(found, str):
            return found
        if not found.ff_tokens:
            return PreResult(found.suspend, found.num_forks, appended)
        appended += found.ff_tokens
        if controller.observe(found.ff_tokens, 0):
            return PreResult(False, 0, appended)
    raise Trap("too many ff_tokens rounds from pre_process")


def _call(controller: ScriptedController, name: str, failed: Any, call: Callable[[], Any]) -> SequenceResult[Any]:
    if controller.failed:
        return SequenceResult(PREVIOUS_ERROR, failed, logs=PREVIOUS_ERROR)
    error, result = "", failed
    try:
        result = call()
    except Trap as problem:
        controller.failed = True
        error = f"Error ({name}): {controller.logs}{problem}"
        controller.logs = error
    logs, controller.logs = controller.logs, ""
    storage, controller.storage = controller.storage, []
    return SequenceResult(error, result, storage, logs, 10)
