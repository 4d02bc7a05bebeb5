"""The client against a scripted server: under trio, under asyncio, and blocking."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import uma_trio
from tests.support.cases import all_cases
from uma_trio.client import (
    BrokenProtocol,
    Client,
    Eos,
    Event,
    Loading,
    NoDaemon,
    ServerError,
    Token,
    UnknownEvent,
    open_client,
)
from uma_trio.connect import connector
from uma_trio.protocol.address import lock_path
from uma_trio.protocol.framing import FrameReader, frame

TOKEN = {"id": "r1", "event": "token", "text": "hi", "token_id": 7}
EOS = {
    "id": "r1",
    "event": "eos",
    "reason": "stop",
    "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    "timings": {"queue_ms": 0.1, "total_ms": 2.0},
}


class Server:
    """Accepts one connection, keeps the first message, sends ``events`` and waits for the client to leave."""

    def __init__(self, path: Path, events: list[dict[str, Any]], *, closes: bool = False, backlog: int = 1) -> None:
        self.path = path
        self.asked: dict[str, Any] = {}
        self.left = threading.Event()
        self._events, self._closes = events, closes
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(backlog)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock:
            frames = FrameReader(max_frame_bytes=1 << 20)
            while (payload := frames.next_payload()) is None:
                data = sock.recv(1 << 16)
                if not data:
                    return
                frames.receive_data(data)
            self.asked = json.loads(payload)
            for event in self._events:
                sock.sendall(frame(json.dumps(event).encode()))
            if not self._closes:
                sock.recv(1)
            self.left.set()

    def close(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listener.close()


@contextlib.contextmanager
def server(folder: Path, *events: dict[str, Any], **options: Any) -> Iterator[Server]:
    found = Server(folder / "uma.sock", [*events], **options)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[Any]]], Any]:
    return lambda function: anyio.run(function, backend=request.param)


Run = Callable[[Callable[[], Awaitable[Any]]], Any]


def async_events(path: Path, **fields: Any) -> Callable[[], Awaitable[list[Event]]]:
    async def ask() -> list[Event]:
        async with open_client(path) as client:
            return [event async for event in client.generate(**fields)]

    return ask


def test_events_are_typed_and_unknown_ones_go_through(tmp_path: Path, run: Run) -> None:
    strange = {"id": "r1", "event": "thought", "text": "hm"}
    others = TOKEN | {"id": "other"}
    with server(tmp_path, TOKEN | {"new": 1}, strange, others, EOS) as found:
        first, unknown, last = run(async_events(found.path, prompt="x", logit_bias={5: 1}))
    assert first == Token(id="r1", text="hi", token_id=7)
    assert unknown == UnknownEvent(strange)
    assert isinstance(last, Eos)
    assert (last.usage.completion_tokens, last.timings.ttft_ms) == (2, None)
    assert found.asked == {"id": "r1", "prompt": "x", "logit_bias": {"5": 1}}


def test_with_several_answers_all_are_read(tmp_path: Path, run: Run) -> None:
    with server(tmp_path, EOS | {"index": 1}, TOKEN | {"index": 0}, EOS | {"index": 0}) as found:
        events = run(async_events(found.path, prompt="x", n=2))
    assert [event.index for event in events] == [1, 0, 0]


def test_an_error_event_is_raised(tmp_path: Path, run: Run) -> None:
    with (
        server(tmp_path, {"event": "error", "code": "E_LIMIT_KV", "message": "full", "retry_after_ms": 5}) as found,
        pytest.raises(ServerError, match="E_LIMIT_KV: full") as caught,
    ):
        run(async_events(found.path, prompt="x"))
    assert (caught.value.code, caught.value.event.retry_after_ms) == ("E_LIMIT_KV", 5)


@pytest.mark.parametrize(
    ("events", "why"),
    [([], "keep_alive=True"), ([TOKEN], "middle of an answer"), ([{"id": "r1", "event": "token"}], "event")],
)
def test_an_answer_that_breaks_off_is_an_error(
    tmp_path: Path, run: Run, events: list[dict[str, Any]], why: str
) -> None:
    with server(tmp_path, *events, closes=True) as found, pytest.raises(BrokenProtocol, match=why):
        run(async_events(found.path, prompt="x"))


def test_leaving_closes_the_connection_also_by_cancellation(tmp_path: Path, run: Run) -> None:
    with server(tmp_path, TOKEN) as found:

        async def leave() -> None:
            with anyio.CancelScope() as scope:
                async with open_client(found.path) as client:
                    async for _ in client.generate(prompt="x"):
                        scope.cancel()
            assert scope.cancelled_caught

        run(leave)
        assert found.left.wait(60)


def test_nobody_there_is_said(tmp_path: Path, run: Run) -> None:
    with pytest.raises(NoDaemon, match=r"no daemon at .*none.sock; .*uma-trio serve"):
        run(async_events(tmp_path / "none.sock", prompt="x"))


def test_an_error_inside_the_block_is_not_taken_for_a_missing_server(tmp_path: Path, run: Run) -> None:
    with server(tmp_path) as found:

        async def fail() -> None:
            async with open_client(found.path):
                raise FileNotFoundError("something else")

        with pytest.raises(FileNotFoundError, match="something else"):
            run(fail)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[socket.socket, Path]]:
    """A listener whose queue of new connections is full."""
    path = tmp_path / "full.sock"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(path))
        yield listener, path


def answer_the_last(listener: socket.socket) -> threading.Thread:
    """Accept all, a little later, and answer whoever asks."""

    def serve() -> None:
        time.sleep(0.1)
        with contextlib.ExitStack() as stack:
            socks = [listener]
            while True:
                readable, _, _ = select.select(socks, [], [], 60)
                if readable[0] is listener:
                    socks.append(stack.enter_context(listener.accept()[0]))
                elif readable[0].recv(1 << 16):
                    readable[0].sendall(frame(json.dumps(EOS | {"text": "at last"}).encode()))
                    return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_a_full_queue_is_tried_again(full: tuple[socket.socket, Path], run: Run) -> None:
    thread = answer_the_last(full[0])

    async def ask() -> str | None:
        async with open_client(full[1]) as client:
            return (await client.complete(prompt="x")).text

    assert run(ask) == "at last"
    thread.join(60)


def test_a_full_queue_is_tried_again_blocking(full: tuple[socket.socket, Path]) -> None:
    thread = answer_the_last(full[0])
    assert str(uma_trio.ask("x", socket=full[1])) == "at last"
    thread.join(60)


# -- blocking -----------------------------------------------------------------------------------------


def test_ask_gives_the_whole_answer(tmp_path: Path) -> None:
    with server(tmp_path, EOS | {"text": "Paris", "seed": 3}) as found:
        answer = uma_trio.ask("Where?", socket=found.path, max_tokens=5)
    assert f"{answer}" == answer.text == "Paris"
    assert (answer.reason, answer.usage.completion_tokens, answer.timings.total_ms, answer.seed) == ("stop", 2, 2.0, 3)
    assert found.asked == {
        "id": "r1",
        "messages": [{"role": "user", "content": "Where?"}],
        "max_tokens": 5,
        "stream": False,
    }


@pytest.mark.parametrize(
    ("prompt", "raw", "sent"),
    [
        ("x", True, {"prompt": "x"}),
        ([{"role": "user", "content": "x"}], False, {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_stream_yields_events_as_they_come(tmp_path: Path, prompt: Any, raw: bool, sent: dict[str, Any]) -> None:
    with server(tmp_path, TOKEN, TOKEN, EOS) as found:
        events = list(uma_trio.stream(prompt, raw=raw, socket=found.path))
    assert [type(event) for event in events] == [Token, Token, Eos]
    assert found.asked == {"id": "r1", **sent}


def test_leaving_the_loop_closes_the_connection(tmp_path: Path) -> None:
    with server(tmp_path, TOKEN) as found:
        for _ in uma_trio.stream("x", socket=found.path):
            break
        assert found.left.wait(60)


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_ask_works_inside_a_running_loop(tmp_path: Path, backend: str) -> None:
    """As in a notebook."""
    with server(tmp_path, EOS | {"text": "yes"}) as found:

        async def cell() -> str:
            return str(uma_trio.ask("x", socket=found.path))

        assert anyio.run(cell, backend=backend) == "yes"


def test_errors_of_the_blocking_functions(tmp_path: Path) -> None:
    with pytest.raises(NoDaemon):
        uma_trio.ask("x", socket=tmp_path / "none.sock")
    with pytest.raises(ValueError, match="one answer"):
        uma_trio.ask("x", n=2)
    with server(tmp_path, TOKEN, closes=True) as found, pytest.raises(BrokenProtocol, match="middle of an answer"):
        list(uma_trio.stream("x", socket=found.path))
    (tmp_path / "uma.sock").unlink()
    error = {"event": "error", "id": "r1", "code": "E_X", "message": "m"}
    with server(tmp_path, error) as found, pytest.raises(ServerError, match="E_X: m"):
        uma_trio.ask("x", socket=found.path)


def test_ask_waits_while_the_daemon_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "uma.sock"
    with contextlib.ExitStack() as stack, lock_path(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Loading):
            uma_trio.ask("x", socket=path, wait_s=0)

        def load(_: float) -> None:
            assert not path.exists(), "there is nothing to wait for"
            stack.enter_context(server(tmp_path, EOS | {"text": "loaded"}))

        monkeypatch.setattr(connector.time, "sleep", load)
        assert str(uma_trio.ask("x", socket=path)) == "loaded"


def test_the_variable_names_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMA_SOCKET", str(tmp_path / "uma.sock"))
    with server(tmp_path, EOS | {"text": "here"}):
        assert str(uma_trio.ask("x")) == "here"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "did you mean max_tokens?"),
        ("temp", "did you mean temperature?"),
        ("xyz", "docs/PROTOCOL-REFERENCE.md"),
    ],
)
def test_a_field_that_no_request_has_is_refused(tmp_path: Path, run: Run, name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=re.escape(meant)):
        uma_trio.ask("x", socket=tmp_path / "none", **{name: 5})
    with pytest.raises(TypeError, match=re.escape(meant)):
        list(uma_trio.stream("x", socket=tmp_path / "none", **{name: 5}))
    with server(tmp_path) as found, pytest.raises(TypeError, match=re.escape(meant)):
        run(async_events(found.path, prompt="x", **{name: 5}))


@pytest.mark.parametrize("prompt", ["", " \n", []])
def test_an_empty_question_is_refused(tmp_path: Path, prompt: Any) -> None:
    with pytest.raises(ValueError, match="nothing to ask"):
        uma_trio.ask(prompt, socket=tmp_path / "none")


def test_the_package_offers_the_client() -> None:
    assert uma_trio.open_client is open_client
    assert isinstance(Client, type)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        uma_trio.nothing  # noqa: B018


def test_the_package_shows_what_is_in_it() -> None:
    assert {*uma_trio.__all__, "__version__"} <= {*dir(uma_trio)}
    assert not {"Any", "annotations", "TYPE_CHECKING"} & {*dir(uma_trio)}


@all_cases(("name", "meant"), [("session", "session_id"), ("sokcet", "socket"), ("temprature", "temperature")])
def test_an_unknown_argument_brings_the_nearest_one(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"no field {name!r}; did you mean {meant}\\?"):
        uma_trio.ask("x", **{name: "y"})


def test_a_chat_is_the_first_argument() -> None:
    with pytest.raises(TypeError, match="a chat is the first argument"):
        uma_trio.ask("x", messages=[{"role": "user", "content": "y"}])
