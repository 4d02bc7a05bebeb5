"""The guard of the gateway, called as an ASGI application."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tests.pure.test_gateway_charging import Memory
from tests.support.request_states import begin_request
from uma_trio.gateway.body import MAX_INCOMPLETE, PACE_BYTES, BodyLimits
from uma_trio.gateway.errors import HttpError
from uma_trio.gateway.guard import Guard
from uma_trio.gateway.key_file import CurrentTenants
from uma_trio.gateway.limits import WRONG_KEYS_PER_MINUTE, Limiter, WrongKeys
from uma_trio.gateway.origins import Origins
from uma_trio.gateway.request_state import RequestState

MAX_BODY = 100
RAW, FILES = ("POST", "/raw"), ("POST", "/files")


async def served(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body, in upper case."""
    message = await receive()
    assert message["more_body"] is False
    await Response(message["body"].upper())(scope, receive, send)


def refuse(error: HttpError, scope: Scope) -> Response:
    return Response(json.dumps({"code": error.code}), error.status, error.headers)


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    """With tenants, and no key that fits."""
    file = tmp_path / "keys.yaml"
    file.write_text("tenants: {alice: {}}")
    return Guard(
        served,
        tenants=CurrentTenants(file),
        limiter=Limiter(Memory(), now_ns=lambda: 0, unix_s=lambda: 0.0),
        wrong_keys=WrongKeys(now_ns=lambda: 0),
        origins=Origins.of("", ""),
        open_paths=frozenset({"/open"}),
        refuse=refuse,
        bodies=BodyLimits(MAX_BODY, timeout_s=10, setting="http_max_body_bytes"),
        other_bodies={
            RAW: BodyLimits(10 * MAX_BODY, timeout_s=10, setting="max_controller_bytes", are_json=False),
            FILES: BodyLimits(100 * MAX_BODY, timeout_s=10, setting="max_file_mb", are_json=False, are_streamed=True),
        },
    )


@attrs.define
class Answer:
    """What the guard, or the application behind it, has sent."""

    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    body: bytes = b""

    @property
    def code(self) -> str:
        found: str = json.loads(self.body)["code"]
        return found


async def call(
    guard: Guard,
    path: str = "/open",
    *,
    parts: Iterable[bytes] = (b"",),
    last: Message | None = None,
    answer: Answer | None = None,
    is_overloaded: bool = False,
    **scope: Any,
) -> Answer:
    """Send a request whose body arrives in parts.

    Args:
        last: the message after them; the last part ends the body if not given.
        answer: gets what is sent.
    """
    answer = answer or Answer()
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if last is None:
        messages[-1]["more_body"] = False
    else:
        messages.append(last)

    async def receive() -> Message:
        if not messages:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return messages.pop(0)

    async def send(message: Message) -> None:
        answer.status = message.get("status", answer.status)
        answer.headers |= {name.decode(): value.decode() for name, value in message.get("headers", ())}
        answer.body += message.get("body", b"")

    headers = [(b"host", b"localhost"), *scope.pop("headers", [(b"transfer-encoding", b"chunked")])]
    found = {"type": "http", "method": "POST", "path": path, "scheme": "http", "headers": headers, **scope}
    found = {"client": ("127.0.0.1", 1), "root_path": "", **found}
    begin_request(found).is_overloaded = is_overloaded
    await guard(found, receive, send)
    return answer


async def test_a_body_in_parts_is_handed_on_whole(guard: Guard) -> None:
    assert (await call(guard, parts=[b"a", b"", b"b" * 50, b"c"])).body == b"A" + b"B" * 50 + b"C"
    assert guard.bodies.incomplete_bytes == 0


async def test_an_application_that_is_mounted_below_a_path(guard: Guard) -> None:
    assert (await call(guard, "/llm/open", root_path="/llm")).status == 200
    assert (await call(guard, "/open/closed", root_path="/open")).status == 401


async def test_more_connections_than_allowed_leave_the_open_paths(guard: Guard) -> None:
    found = await call(guard, "/closed", is_overloaded=True)
    assert (found.status, found.code) == (429, "E_LIMIT_CONNECTIONS")
    assert found.headers["retry-after"] == "1"
    assert found.headers["connection"] == "close"
    assert (await call(guard, is_overloaded=True)).status == 200


async def test_a_client_that_leaves_in_the_middle_reaches_nobody(guard: Guard) -> None:
    found = await call(guard, parts=[b"a"], last={"type": "http.disconnect"})
    assert found == Answer()
    assert guard.bodies.incomplete_bytes == 0


async def test_a_body_that_is_too_slow_or_too_large_ends_the_connection(
    guard: Guard, autojump_clock: trio.testing.MockClock
) -> None:
    slow = {"type": "http.request", "body": b"", "more_body": True}
    for parts, status in (([b"a"], 408), ([b"a" * 60] * 2, 413)):
        found = await call(guard, parts=parts, last=slow)
        assert (found.status, found.headers["connection"]) == (status, "close")
    found = await call(guard, parts=[b"a" * 60] * 1000)
    assert found.status == 413
    assert "connection" not in found.headers, "it was read to its end, so that the client reads the answer"


async def test_incomplete_bodies_of_all_together_are_bounded(
    guard: Guard, autojump_clock: trio.testing.MockClock
) -> None:
    answers = [Answer() for _ in range(MAX_INCOMPLETE + 3)]

    async def one(answer: Answer) -> None:
        hangs = {"type": "http.request", "body": b"", "more_body": True}
        await call(guard, parts=[b"a" * MAX_BODY], last=hangs, answer=answer)

    async with trio.open_nursery() as nursery:
        for answer in answers:
            nursery.start_soon(one, answer)
        await trio.sleep(5)
        assert sorted(answer.status for answer in answers) == [0] * MAX_INCOMPLETE + [503] * 3
        assert guard.bodies.incomplete_bytes == MAX_INCOMPLETE * MAX_BODY
        assert (await call(guard)).status == 200, "bodies in one part need no memory before they are complete"
    assert sorted(answer.status for answer in answers) == [408] * MAX_INCOMPLETE + [503] * 3
    assert guard.bodies.incomplete_bytes == 0


async def test_a_file_reaches_its_endpoint_in_parts_which_may_be_slow_but_not_too_slow(
    guard: Guard, autojump_clock: trio.testing.MockClock
) -> None:
    arrived: list[bytes] = []

    async def received(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for part in RequestState.of(scope).body.parts():
                arrived.append(part)
                await trio.sleep(60)  # a slow disk is not the client's fault
            await Response(b"")(scope, receive, send)
        except HttpError as error:
            await refuse(error, scope)(scope, receive, send)

    guard.app = received
    guard.open_paths |= {"/files"}
    guard.other_bodies[FILES].max_bytes = 3 * PACE_BYTES
    many = [b"a" * (PACE_BYTES // 4)] * 12
    assert (await call(guard, "/files", parts=many)).status == 200
    assert arrived == many, "more than fits into a body that is read whole"
    for parts, last, status in (
        ([*many, b"a"], None, 413),
        (many[:1], {"type": "http.request", "body": b"", "more_body": True}, 408),
        (many[:1], {"type": "http.disconnect"}, 499),
    ):
        assert (await call(guard, "/files", parts=parts, last=last)).status == status
    announced = [(b"content-length", b"%d" % (3 * PACE_BYTES + 1))]
    assert (await call(guard, "/files", headers=announced)).status == 413
    guard.open_paths -= {"/files"}
    arrived.clear()
    assert (await call(guard, "/files", parts=many)).status == 401
    assert not arrived


async def test_json_that_is_dear_to_decode_is_refused_before_all_of_it_has_arrived(
    guard: Guard, autojump_clock: trio.testing.MockClock
) -> None:
    guard.bodies.max_bytes = guard.other_bodies[RAW].max_bytes = 1 << 22
    guard.open_paths |= {"/raw"}
    for parts, status, code in (
        ([b"[" + b"[]," * 10_000] * 7, 413, "E_PROTO_TOO_MANY_VALUES"),
        ([b"[" * 200], 400, "E_PROTO_BAD_REQUEST"),
    ):
        more = {"type": "http.request", "body": b"", "more_body": True}
        found = await call(guard, parts=parts, last=more)
        assert (found.status, found.code) == (status, code)
        assert (await call(guard, "/raw", parts=parts)).status == 200, "a controller is not decoded"
    assert guard.bodies.incomplete_bytes == 0


async def test_wrong_keys_of_one_network_are_counted_together(guard: Guard) -> None:
    async def status(address: str) -> int:
        wrong = [(b"x-api-key", b"wrong")]
        return (await call(guard, "/closed", headers=wrong, client=(address, 1))).status

    addresses = [f"2001:db8::{n:x}" for n in range(WRONG_KEYS_PER_MINUTE + 1)]
    assert [await status(address) for address in addresses] == [401] * WRONG_KEYS_PER_MINUTE + [429]
    assert await status("2001:db8:0:1::1") == 401
    assert await status("::ffff:10.0.0.1") == 401
    assert await status("not an address") == 401


async def test_other_protocols_are_not_served(guard: Guard) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await guard({"type": "websocket", "path": "/"}, trio.sleep_forever, send)
    assert not sent
