"""Sessions in random sequences of events: each answer always equals the one to a single long prompt.

The rules only record events.  When an example is complete, it is played with the real server, its connections and its
journal, over a fake engine in virtual time, so it is reproducible.  After each event the bookkeeping is checked.
"""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import anyio
import attrs
import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.fake_engine import FakeEngine, expected_continuation
from tests.support.profile import amount
from tests.support.serving import Serving, remembering, serving
from tests.support.state_files import MemoryFiles
from uma_trio.client import BrokenProtocol, Client, Event, Failure, ServerError, SessionInfo, Token
from uma_trio.daemon.store.journal import JournalError
from uma_trio.engine_link.messages import EngineDied, EngineError

CELLS = 3 * 768
WORDS = random.Random(3)
PROMPTS = ["once upon a time there was a fox " * 8, "and then ", "", "".join(WORDS.choices("abcdef", k=500)), "?"]
NAMES = st.integers(0, 3).map(lambda n: f"s{n}")


def tokens_of(text: str) -> list[int]:
    return [byte + 100 for byte in text.encode()]


@attrs.define(eq=False)
class Request:
    """A turn in progress, as its client sees it."""

    prompt: list[int]
    n_tokens: int
    client: Client | None = None
    got: list[int] = attrs.field(factory=list)
    last: Event | None = None
    """``eos`` or ``error``; ``None`` if it has not come, or the connection ended before."""
    reads: trio.Event = attrs.field(factory=trio.Event)
    done: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@attrs.define(eq=False)
class ExpectedSession:
    """What a session must hold."""

    said: list[int] = attrs.field(factory=list)
    durable: list[int] | None = None
    """What a new server would find; ``None``: no such session."""
    request: Request | None = None
    """The turn in progress, or one whose result is not known yet."""

    def has_tokens(self, n_tokens: int) -> None:
        """The server reports ``n_tokens``: the tokens from before, or also a part of the turn in progress."""
        if n_tokens != len(self.said):
            assert self.request is not None, f"{n_tokens} tokens instead of {len(self.said)}"
            before = [*self.said, *self.request.prompt]
            n_new = n_tokens - len(before)
            assert max(1, len(self.request.got)) <= n_new <= self.request.n_tokens
            self.said = [*before, *expected_continuation(before, n_new)]


class World:
    """A server that can be restarted, and what its sessions must hold."""

    def __init__(self, folder: Path, clients: trio.Nursery, *, unified: bool, draft_errors: int | None) -> None:
        self.clients = clients
        self.expected: dict[str, ExpectedSession] = {}
        self.files = MemoryFiles()
        self.failed = False
        """The engine has failed since the last restart."""
        self._folder = folder / "0"
        self._n_folders = 0
        self._options = {"unified": unified, "draft_errors": draft_errors}
        self._stack = contextlib.AsyncExitStack()
        self.harness: Serving
        self.journal_fails = False

    # -- the server -----------------------------------------------------------------------------

    async def start(self) -> None:
        engine = FakeEngine(n_ctx=CELLS, n_seq_max=3, n_batch=128, **self._options)
        self._stack = contextlib.AsyncExitStack()
        storage = self._stack.enter_context(remembering(self._folder, self.files, states=self.files.scan()))
        assert storage.journal is not None
        settle = storage.journal._settle

        def settles(entry: Any) -> bool:
            if self.journal_fails and entry.wanted is not None:
                raise JournalError("the disk failed")
            return settle(entry)

        storage.journal._settle = settles  # type: ignore[method-assign]
        self.harness = await self._stack.enter_async_context(
            serving(engine, storage, offload_after_s=20, drain_timeout_s=3, request_timeout_s=1e6, max_tx_bytes=4096)
        )

    async def stop(self) -> None:
        await self._stack.aclose()

    async def restart(self, how: str) -> None:
        if how == "drained":
            self.harness.server.drain()
            for session in self.expected.values():
                if session.request is not None:
                    session.request.reads.set()
            with trio.fail_after(1000):
                while self.harness.nursery.child_tasks:
                    await trio.sleep(0.1)
        states, n = copy.copy(self.files.states), self._n_folders + 1
        folder = self._folder
        if how == "killed":  # keep only what is on disk now
            folder = self._folder.with_name(str(n))
            shutil.copytree(self._folder / "sessions", folder / "sessions")
        await self.stop()
        if how != "killed":
            states = self.files.states
        for session in self.expected.values():
            if session.request is not None:
                session.request.reads.set()
                await session.request.done.wait()
        self._folder, self._n_folders = folder, n
        self.files, self.journal_fails = MemoryFiles(states), False
        await self.start()
        found = {session.session_id: session for session in await self.query("list")}
        for name, session in list(self.expected.items()):
            if name not in found:
                assert session.durable is None, f"{name} is lost"
                del self.expected[name]
                continue
            assert found[name].durable
            if session.durable is not None and found[name].tokens == len(session.durable):
                session.said = session.durable
            else:
                session.has_tokens(found[name].tokens)
            session.durable, session.request = session.said, None
        assert set(found) == set(self.expected), (sorted(found), sorted(self.expected))
        self.failed = False

    # -- what clients do ------------------------------------------------------------------------

    async def query(self, action: str, **fields: Any) -> list[SessionInfo]:
        async with self.harness.client() as client:
            return await client.sessions(action, **fields)

    async def attempt(self, action: str, **fields: Any) -> tuple[list[SessionInfo], str | None]:
        """The answer, or the error code."""
        try:
            return await self.query(action, **fields), None
        except ServerError as error:
            return [], str(error.code)

    async def arrive(self, name: str, which: int, n_tokens: int) -> None:
        await self.settle_ended()
        if name in self.expected and self.expected[name].request is not None:
            return  # a session runs one turn at a time; see test_sessions.py
        session = self.expected.setdefault(name, ExpectedSession())
        prompt = PROMPTS[which]
        if not session.said and not prompt:
            prompt = "x"
        request = session.request = Request(tokens_of(prompt), n_tokens)
        request.reads.set()
        fields = {"prompt": prompt, "max_tokens": n_tokens, "session_id": name}
        self.clients.start_soon(self._converse, request, fields)
        await trio.testing.wait_all_tasks_blocked()

    async def _converse(self, request: Request, fields: dict[str, Any]) -> None:
        try:
            with request.scope:
                async with self.harness.client() as client:
                    request.client = client
                    await client.send({"id": "r", **fields})
                    while True:
                        await request.reads.wait()
                        event = await client.receive()
                        if event is None:
                            return
                        if not isinstance(event, Token):
                            request.last = event
                            return
                        request.got.append(event.token_id)
        except BrokenProtocol:
            pass  # the server has ended
        finally:
            request.client = None
            request.done.set()

    async def stall(self, name: str, stops: bool) -> None:
        request = self._request(name)
        if request is not None:
            if stops:
                request.reads = trio.Event()
            else:
                request.reads.set()

    async def cancel(self, name: str) -> None:
        request = self._request(name)
        if request is not None and request.client is not None:
            request.reads.set()
            with contextlib.suppress(BrokenProtocol, anyio.ClosedResourceError):  # it has just ended
                await request.client.cancel("r")

    async def hang_up(self, name: str) -> None:
        request = self._request(name)
        if request is not None:
            request.scope.cancel()
            await request.done.wait()
            await self.settle_ended()

    def _request(self, name: str) -> Request | None:
        return self.expected[name].request if name in self.expected else None

    async def fork(self, name: str, new_name: str) -> None:
        await self.settle_ended()
        answer, code = await self.attempt("fork", session_id=name, new_id=new_name)
        if code == "E_SESSION_EXISTS":
            assert new_name in self.expected
        elif code is not None:
            assert code == "E_SESSION_NOT_FOUND"
            assert name not in self.expected or not self.expected[name].said
        if code is not None:
            return
        (found,) = answer
        assert new_name not in self.expected or not self.expected[new_name].said
        source = self.expected[name]
        session = self.expected[new_name] = ExpectedSession(source.said, request=source.request)
        session.has_tokens(found.tokens)
        session.request, session.durable = None, session.said if found.durable else None

    async def close(self, name: str) -> None:
        await self.settle_ended()
        _, code = await self.attempt("close", session_id=name)
        if code is None:
            del self.expected[name]
        elif code == "E_SESSION_BUSY":
            assert self._request(name) is not None
        else:
            assert code == "E_SESSION_NOT_FOUND"
            assert name not in self.expected or not self.expected[name].said

    async def crowd(self, n_tokens: int) -> None:
        """Another request needs the cells."""
        async with self.harness.client() as client:
            prompt = "".join(random.Random(n_tokens).choices("ghijkl", k=n_tokens))
            with contextlib.suppress(ServerError):  # the engine may fail
                async for _ in client.generate(prompt=prompt, max_tokens=4):
                    pass

    async def fail(self, dies: bool) -> None:
        failure = EngineDied("killed") if dies else EngineError("it failed")
        self.harness.engine.fail_next, self.failed = failure, True

    async def fault(self, what: str, there: bool) -> None:
        if what == "journal":
            self.journal_fails = there
        else:
            setattr(self.files, what, there)

    # -- checks --------------------------------------------------------------------------------

    async def settle_ended(self) -> None:
        """Ask the server for the result of each turn that its client has seen end, or has left."""
        for name, session in list(self.expected.items()):
            request = session.request
            if request is None or not request.done.is_set():
                continue
            before = [*session.said, *request.prompt]
            assert request.got == expected_continuation(before, len(request.got))
            found = await self._described(name)
            if isinstance(request.last, Failure):
                self._check_error(request.last.code, len(before) + request.n_tokens - 1)
                assert found is None or found.tokens == len(session.said), "an error leaves the session unchanged"
            elif request.last is not None and found is not None:
                n_sent = len(request.got)
                assert found.tokens == (len(before) + n_sent if n_sent else len(session.said)), (
                    "tokens that were sent are kept"
                )
            if found is None:
                assert not session.said
                del self.expected[name]
                continue
            session.has_tokens(found.tokens)
            session.request = None
            if found.durable:
                session.durable = session.said

    def _check_error(self, code: str, cells: int) -> None:
        info = self.harness.engine.info
        if code == "E_LIMIT_CONTEXT":
            assert cells > info.max_request_tokens
        elif code == "E_RUNTIME_DECODE":
            assert self.failed
        else:
            assert code == "E_RUNTIME_SHUTDOWN"

    async def _described(self, name: str) -> dict[str, Any] | None:
        """Describe a session once it is not busy; ``None`` if it does not exist."""
        with trio.fail_after(500):
            while True:
                answer, code = await self.attempt("describe", session_id=name)
                assert code in (None, "E_SESSION_NOT_FOUND")
                if code is not None:
                    return None
                if not answer[0].busy:
                    return answer[0]
                await trio.sleep(0.1)

    def check(self) -> None:
        scheduler = self.harness.scheduler
        scheduler.check_integrity()
        kv = scheduler.cache.statistics()
        assert kv.cells_reserved + kv.cached_cells <= kv.cells == CELLS
        assert sum(self.harness.engine.used_cells().values()) <= CELLS
        assert self.files.open_files <= 1 + kv.sequences, (
            "one file is written at a time, and one is read for each waiting request"
        )

    async def finish(self) -> None:
        """Let all turns end, and check that each session can go on."""
        self.journal_fails = self.files.full = self.files.fails_late = self.files.broken = False
        for session in self.expected.values():
            if session.request is not None:
                session.request.reads.set()
                with trio.fail_after(500):
                    await session.request.done.wait()
        await self.settle_ended()
        await trio.sleep(100)
        await self.harness.settled()
        self.check()
        assert self.files.open_files == 0
        index = self.harness.scheduler.cache.index
        assert all(name in index for name in self.files.states), "a file that is not in the index"
        assert len(index) == len(self.files.states)
        self.harness.engine.fail_next = None
        for name in list(self.expected):
            await self.arrive(name, 1, 3)
            session = self.expected[name]
            assert session.request is not None
            await session.request.done.wait()
            await self.settle_ended()
            assert session.durable == session.said
        for name in list(self.expected):
            await self.close(name)
        await trio.sleep(100)
        assert (len(index), self.files.states) == (0, {}), "closed sessions leave nothing"


class Sessions(RuleBasedStateMachine):
    """Records events, and plays them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, tuple[Any, ...]]] = []
        self.options: dict[str, Any] = {}

    @initialize(unified=st.booleans(), draft_errors=st.sampled_from([None, 0, 5]))
    def begin(self, **options: Any) -> None:
        """There may be a draft model; see ``FakeEngine``."""
        self.options = options

    @rule(name=NAMES, which=st.integers(0, len(PROMPTS) - 1), n_tokens=st.sampled_from([1, 5, 40, 200]))
    def arrive(self, name: str, which: int, n_tokens: int) -> None:
        """Begin a session, or continue it."""
        self.events.append(("arrive", (name, which, n_tokens)))

    @rule(name=NAMES, stops=st.booleans())
    def stall(self, name: str, stops: bool) -> None:
        self.events.append(("stall", (name, stops)))

    @rule(name=NAMES)
    def cancel(self, name: str) -> None:
        self.events.append(("cancel", (name,)))

    @rule(name=NAMES)
    def hang_up(self, name: str) -> None:
        self.events.append(("hang_up", (name,)))

    @rule(name=NAMES, new_name=NAMES)
    def fork(self, name: str, new_name: str) -> None:
        self.events.append(("fork", (name, new_name)))

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        self.events.append(("close", (name,)))

    @rule(n_tokens=st.sampled_from([20, 600]))
    def crowd(self, n_tokens: int) -> None:
        self.events.append(("crowd", (n_tokens,)))

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.3, 40.0]))
    def wait(self, seconds: float) -> None:
        """Idle sequences are saved meanwhile."""
        self.events.append(("wait", (seconds,)))

    @rule(dies=st.booleans())
    def fail(self, dies: bool) -> None:
        self.events.append(("fail", (dies,)))

    @rule(what=st.sampled_from(["journal", "full", "fails_late", "broken"]), there=st.booleans())
    def fault(self, what: str, there: bool) -> None:
        self.events.append(("fault", (what, there)))

    @rule(how=st.sampled_from(["drained", "at once", "killed"]))
    def restart(self, how: str) -> None:
        self.events.append(("restart", (how,)))

    def teardown(self) -> None:
        trio.run(self._play, clock=trio.testing.MockClock(autojump_threshold=0))

    async def _play(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with trio.open_nursery() as clients:
                world = World(Path(folder), clients, **self.options)
                await world.start()
                try:
                    for name, arguments in self.events:
                        if name == "wait":
                            await trio.sleep(*arguments)
                        else:
                            await getattr(world, name)(*arguments)
                        world.check()
                    await world.finish()
                finally:
                    await world.stop()
                clients.cancel_scope.cancel()


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=amount(quick=12, thorough=1000), stateful_step_count=amount(quick=30, thorough=60), deadline=None
)
