"""What schemathesis sends to AICI's endpoints: modules in all states, and the controllers that come with uma-trio.

``SCHEMATHESIS_HOOKS`` names this module.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import schemathesis
from hypothesis import strategies as st

from tests.support.wat_controllers import controller
from uma_trio.aici.controllers import shipped

GOOD = controller()
SHIPPED = shipped()
PROGRAM = "start(async () => { await $`one `; await fork(2); await gen({ maxTokens: 3 }) })"
RUNS = (("none", "Once upon"), ("yesno", "Is it?"), ("jsctrl", PROGRAM), ("jsctrl", "import x"), ("uppercase", None))


def damaged(at: int, byte: int) -> bytes:
    """A module with one wrong byte."""
    place = at % len(GOOD)
    return GOOD[:place] + bytes([byte]) + GOOD[place + 1 :]


MODULES = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=64).map(lambda more: b"\0asm" + more),
    st.just(GOOD),
    st.builds(damaged, st.integers(8, 1 << 16), st.integers(0, 255)),
    st.integers(1, len(GOOD)).map(lambda n: GOOD[:n]),
)

schemathesis.openapi.media_type("application/wasm", MODULES)


@schemathesis.serializer("application/wasm")
def as_it_is(context: Any, value: bytes) -> bytes:
    """A module is sent as it is."""
    return value


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Half of the runs and of the tags are about controllers that exist."""
    path = context.operation.path
    if not isinstance(body, dict) or (chosen := int(hashlib.sha256(repr(body).encode()).hexdigest(), 16)) % 2:
        return body
    if path == "/v1/run" and isinstance(body.get("controller"), str):
        name, argument = RUNS[chosen // 2 % len(RUNS)]
        return {**body, "controller": name, "controller_arg": argument}
    if path == "/v1/controllers/tags" and re.fullmatch("[0-9a-f]{64}", str(body.get("module_id"))):
        return {**body, "module_id": hashlib.sha256(SHIPPED["yesno"]).hexdigest()}
    return body
