"""Events of an answer with reasoning, text and two tool calls, for tests of what clients get."""

from __future__ import annotations

from typing import Any

from uma_trio.client import Eos, Event, Reasoning, Token, ToolCall, ToolCallDelta
from uma_trio.protocol.usage import Timings, Usage


def eos(**fields: Any) -> Eos:
    usage, timings = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2), Timings(queue_ms=0, total_ms=1)
    return Eos(id="r", usage=usage, timings=timings, **{"reason": "stop", **fields})


PATCH = '{"input": "*** Begin\\nPatch"}'
ANSWER: list[Event] = [
    Reasoning(id="r", text="I must "),
    Reasoning(id="r", text="look."),
    Token(id="r", text="I look."),
    ToolCallDelta(id="r", call=0, call_id="c1", name="shell"),
    ToolCallDelta(id="r", call=0, arguments='{"command": '),
    ToolCallDelta(id="r", call=0, arguments='"ls"}'),
    ToolCallDelta(id="r", call=1, call_id="c2", name="apply_patch"),
    ToolCallDelta(id="r", call=1, arguments=PATCH),
]
CALLS = [
    ToolCall(id="c1", name="shell", arguments={"command": "ls"}),
    ToolCall(id="c2", name="apply_patch", arguments={"input": "*** Begin\nPatch"}),
]
