"""Sends hostile constraints to a real daemon, next to streams that must not notice.

    python -m tests.fuzz.hostile_constraints
    python -m tests.fuzz.hostile_constraints --at-once 8 --model 7b.gguf
    python -m tests.fuzz.hostile_constraints --only "multipleOf"

Requirements:

- Each constraint is refused with ``E_CONSTRAINT_INVALID`` or ``E_PROTO_*``, or followed; none ends the daemon or the engine.
- The neighbours' texts are those without hostile clients.

Prints what took long, the gaps between the neighbours' tokens without and with hostile clients, and the memory of each
process.  Exit code 1 if a requirement is violated.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

from tests.support.hostile_constraints import ALL, HostileConstraint
from tests.support.real_daemon import Daemon, missing, real_daemon

MAX_TOKENS = 200
BASELINE_S = 15.0
STORY = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 60}
JSON = {"prompt": "A record: ", "max_tokens": 60, "constraint": {"json_schema": {"type": "array", "minItems": 30}}}


@attrs.define
class Neighbour:
    """A client that repeats one request and notes the gaps between its tokens."""

    daemon: Daemon
    fields: dict[str, Any]
    gaps_s: list[float] = attrs.field(factory=list)
    firsts_s: list[float] = attrs.field(factory=list)
    wrong: list[str] = attrs.field(factory=list)
    _stop: threading.Event = attrs.field(factory=threading.Event)
    _alone: list[int] | None = None

    def run(self) -> None:
        with self.daemon.wire(timeout_s=120) as wire:
            while not self._stop.is_set():
                last = time.monotonic()
                wire.send(id="n", keep_alive=True, **self.fields)
                ids: list[int] = []
                while (event := wire.receive()) is not None and event["event"] == "token":
                    now = time.monotonic()
                    (self.gaps_s if ids else self.firsts_s).append(now - last)
                    last = now
                    ids.append(event["token_id"])
                if event is None or event["event"] != "eos":
                    self.wrong.append(str(event))
                    return
                if self._alone is None:
                    self._alone = ids
                elif ids != self._alone:
                    self.wrong.append(f"{ids} instead of {self._alone}")
                    return

    def stop(self) -> None:
        self._stop.set()


@attrs.define
class Load:
    """Neighbours that run in threads."""

    neighbours: list[Neighbour]
    threads: list[threading.Thread] = attrs.field(factory=list)

    def __enter__(self) -> Load:
        for each in self.neighbours:
            each.gaps_s.clear()
            each.firsts_s.clear()
            each._stop.clear()
        self.threads = [threading.Thread(target=each.run) for each in self.neighbours]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.neighbours:
            each.stop()
        for thread in self.threads:
            thread.join()

    def report(self, name: str) -> None:
        for kind, some in (("plain", self.neighbours[:-1]), ("constrained", self.neighbours[-1:])):
            gaps = np.concatenate([np.array(each.gaps_s or [0.0]) for each in some]) * 1e3
            firsts = np.concatenate([np.array(each.firsts_s or [0.0]) for each in some]) * 1e3
            p50, p99 = np.percentile(gaps, [50, 99])
            print(
                f"{name:8} {kind:12} {len(gaps):6} gaps: p50 {p50:.1f} ms, p99 {p99:.1f}, max {gaps.max():.1f};"
                f" first token p50 {np.median(firsts):.0f} ms, max {firsts.max():.0f}"
            )


def ask(daemon: Daemon, hostile: HostileConstraint) -> tuple[str, float]:
    """How the request ended, and how long it took."""
    began = time.monotonic()
    try:
        with daemon.wire(timeout_s=120) as wire:
            fields = {"prompt": "x", "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 1}
            answer = wire.ask(**fields, constraint=hostile.constraint)
    except RecursionError:
        return "cannot be sent as JSON", time.monotonic() - began
    end = answer.last
    said = end.get("message") or f"{end['reason']}, complete {end['constraint_complete']}, {len(answer.ids)} tokens"
    return f"{end.get('code', 'answered')}: {said}", time.monotonic() - began


def attack(daemon: Daemon, hostiles: Iterable[HostileConstraint], at_once: int) -> dict[str, tuple[str, float]]:
    """How each ended; ``at_once`` of them run at a time."""
    left = list(hostiles)[::-1]
    ends: dict[str, tuple[str, float]] = {}

    def work() -> None:
        while left:
            try:
                each = left.pop()
            except IndexError:
                return
            try:
                ends[each.name] = ask(daemon, each)
            except Exception as error:  # noqa: BLE001  (a finding)
                ends[each.name] = f"FAILED {type(error).__name__}: {error}", 0.0

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def print_memory(daemon: Daemon, when: str) -> None:
    found = [(process.cmdline()[-3:], process.memory_info().rss >> 20) for process in daemon.processes]
    names = [f"{_kind(command)} {rss} MB" for command, rss in found]
    print(f"memory {when}: {', '.join(names)}")


def _kind(command: list[str]) -> str:
    text = " ".join(command)
    return next((kind for kind in ("uma_trio.grammar", "template_worker", "engine") if kind in text), "daemon")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--model", help="GGUF file; the embedded model by default")
    chosen = parser.parse_args()
    if (reason := missing()) is not None:
        print(reason)
        return 2
    flags = ["--parallel", "16", *(["--model", chosen.model] if chosen.model else [])]
    with real_daemon(*flags) as daemon:
        engine = daemon.metrics()["engine"]["pid"]
        load = Load([Neighbour(daemon, fields) for fields in (STORY, STORY, STORY, JSON)])
        print_memory(daemon, "before")
        with load:
            time.sleep(BASELINE_S)
        load.report("without")
        began = time.monotonic()
        with load:
            ends = attack(daemon, [each for each in ALL if chosen.only in each.name], chosen.at_once)
        print(f"{len(ends)} hostile constraints in {time.monotonic() - began:.1f} s")
        load.report("with")
        print_memory(daemon, "after")
        restarted = daemon.settled()["engine"]["pid"] != engine
    bad = [name for name, (end, _) in ends.items() if end.startswith(("FAILED", "E_RUNTIME", "E_MODEL"))]
    for name, (end, took_s) in sorted(ends.items(), key=lambda each: -each[1][1]):
        if took_s > 1 or name in bad or chosen.only:
            print(f"{took_s:6.2f} s  {name:45} {end[:160]}")
    wrong = [text for each in load.neighbours for text in each.wrong]
    for text in wrong:
        print("a neighbour's text changed:", text)
    if restarted:
        print("the engine died")
    return int(bool(bad or wrong or restarted))


if __name__ == "__main__":
    sys.exit(main())
