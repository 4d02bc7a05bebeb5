"""``uma-trio metrics --all``: how busy several daemons are, each in a line, and all of them together.

It asks their gateways what routers ask them, so a person sees what the router goes by (docs/SCALE-OUT.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import httpx2
import msgspec
import trio

PATH: Final = "/v1/loads"
ALL: Final = "all"
HEADER: Final = ("DAEMON", "RUNNING", "WAITING", "PLACES", "BACKLOG", "KV", "TOKENS/S", "CACHED")
SUMS: Final = (
    *("num_running_reqs", "num_waiting_reqs", "max_running_requests", "num_waiting_uncached_tokens"),
    *("num_used_tokens", "max_total_num_tokens", "gen_throughput"),
)
"""Fields of a load that add up."""


@attrs.frozen
class DaemonLoad:
    """What a daemon said."""

    url: str
    load: Mapping[str, Any] | None
    """``None`` if it said nothing of use."""
    reason: str = ""
    """Why not."""


def table(daemons: Sequence[DaemonLoad]) -> list[tuple[str, ...]]:
    """The lines of the table.  The last one has the sums of those that answered."""
    loads = [daemon.load for daemon in daemons if daemon.load is not None]
    rows: list[tuple[str, ...]] = [HEADER]
    for daemon in daemons:
        cells = ["-"] * (len(HEADER) - 1) if daemon.load is None else _cells(daemon.load, daemon.load)
        rows.append((daemon.url, *cells))
    sums = {name: sum(load[name] for load in loads) for name in SUMS}
    rows.append((f"{ALL} {len(loads)} of {len(daemons)}", *_cells(sums, {})))
    return rows


def _cells(load: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, ...]:
    """
    Args:
        own: what has the shares that do not add up.
    """
    running, waiting, places, backlog, used, cells, speed = (load[name] for name in SUMS)
    kv = f"{100 * used / cells:.0f} %" if cells else "-"
    cached = f"{100 * own['cache_hit_rate']:.0f} %" if own else "-"
    return (*(f"{n:,}" for n in (running, waiting, places, backlog)), kv, f"{speed:,.0f}", cached)


async def ask_all(urls: Sequence[str], key: str | None, limit_s: float) -> list[DaemonLoad]:
    """Ask all daemons at once, each for at most ``limit_s``; in the order of ``urls``."""
    answers: dict[str, DaemonLoad] = {}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=limit_s, follow_redirects=False) as http:

        async def ask(url: str) -> None:
            with trio.move_on_after(limit_s):
                answers[url] = await _ask(http, url)

        async with trio.open_nursery() as nursery:
            for url in urls:
                nursery.start_soon(ask, url)
    return [answers.get(url, DaemonLoad(url, None, f"no answer within {limit_s:g} s")) for url in urls]


async def _ask(http: httpx2.AsyncClient, url: str) -> DaemonLoad:
    try:
        answer = await http.get(url.rstrip("/") + PATH)
    except (httpx2.TransportError, httpx2.InvalidURL) as error:
        return DaemonLoad(url, None, str(error) or type(error).__name__)
    if answer.status_code != 200:
        return DaemonLoad(url, None, f"answers with the status {answer.status_code}")
    try:
        [load] = msgspec.json.decode(answer.content)["loads"]
        _cells(load, load)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        return DaemonLoad(url, None, f"its {PATH} is not that of a uma-trio daemon")
    return DaemonLoad(url, load)
