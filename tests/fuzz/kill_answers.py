"""Kills client, gateway, engine and daemon at random moments, and compares detached answers with undisturbed ones.

    python -m tests.fuzz.kill_answers                         20 rounds, seed 0
    python -m tests.fuzz.kill_answers --rounds 28 --copies 4 --seed 7        1,008 answers

Each search has its own folder and ports, so several with other seeds can run at a time.

In each round, a daemon answers several requests on its own: chats, a turn of a session, calls of tools, drawn and greedy
texts, and responses of OpenAI's API in the background.  A reader follows each answer.  Meanwhile some of these die, one
after another: the connections of the readers, the gateway, the engine, the daemon, which is started again.  At the end
of a round,

    the text and the tokens are those of an answer that nothing has disturbed
    the events that a reader has got, over all of its connections, are numbered 1, 2, 3, ... without a gap
    a reader who comes afterwards gets the same events

The exit code is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import attrs
import httpx
import psutil

from tests.support.real_daemon import LONG_CTX, Answer, Daemon, Event, real_daemon
from uma_trio.daemon.store.answer_log import MAX_ATTEMPTS

EXACT: Final = ("--reproducible",)
"""Answers are computed again as they were decoded: docs/design/engine-process.md, "The same text"."""
DEADLINE_S: Final = 600.0
"""A round that takes longer has an answer that does not end."""
Victim = Literal["client", "gateway", "engine", "daemon"]
PAUSE_S: Final = 0.3
"""Mean time between two deaths, for each copy of the requests."""
VICTIMS: Final[Sequence[Victim]] = ("client", "gateway", "engine", "daemon", "daemon")

TOOLS: Final = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
STORY: Final = [{"role": "user", "content": "Tell me a story about a fox."}]
REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"messages": STORY, "max_tokens": 150, "ignore_eos": True},
    "drawn": {"messages": STORY, "max_tokens": 150, "ignore_eos": True, "temperature": 0.9, "seed": 5},
    "adaptive": {"messages": STORY, "max_tokens": 90, "ignore_eos": True, "temperature": 1.0, "mirostat": 2, "seed": 8},
    "penalised": {"messages": STORY, "max_tokens": 60, "repetition_penalty": 1.1},
    "close": {"prompt": "Once upon a time", "max_tokens": 150, "repetition_penalty": 1.3},
    "session": {"messages": STORY, "max_tokens": 100, "session_id": "s", "ignore_eos": True},
    "call": {
        "messages": [{"role": "user", "content": "How warm is it in Lima?"}],
        "tools": TOOLS,
        "tool_choice": "required",
    },
    "scores": {"messages": STORY, "max_tokens": 60, "logprobs": 2, "stop": ["zzz"]},
}
RESPONSE: Final = {"input": "Tell me a story about a fox.", "temperature": 0.7, "seed": 3, "max_output_tokens": 120}


@attrs.define
class Reader:
    """Follows one answer in a thread, over as many connections as it takes."""

    name: str
    is_response: bool
    events: list[Event] = attrs.field(factory=list)
    _ended: bool = False

    def follow(self, search: Search) -> None:
        """Read until the last event."""
        while not self._ended and not search.is_late:
            with contextlib.suppress(OSError, httpx.HTTPError):
                if self.is_response:
                    self._read_http(search)
                else:
                    self._read_socket(search)
            time.sleep(0.02)

    def _read_socket(self, search: Search) -> None:
        with search.daemon.wire(timeout_s=DEADLINE_S) as wire:
            search.connections[self.name] = wire.sock
            wire.send(type="attach", id=self.name, after=len(self.events))
            while (event := wire.receive()) is not None:
                if event["event"] == "error" and "number" not in event:  # the daemon is shutting down
                    return
                self.events.append(event)
                self._ended = event["event"] in ("eos", "error")

    def _read_http(self, search: Search) -> None:
        given = {"stream": "true", "starting_after": str(len(self.events) - 1)} if self.events else {"stream": "true"}
        with httpx.stream("GET", f"{search.url}/v1/responses/{self.name}", params=given, timeout=DEADLINE_S) as found:
            if found.status_code != 200:
                return
            for line in found.iter_lines():
                if line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                    self._ended = self.events[-1]["type"] in ENDS


ENDS: Final = ("response.completed", "response.incomplete", "response.failed")


@attrs.define
class Search:
    """Rounds with one folder of state."""

    flags: Sequence[str]
    rng: Random
    daemon: Daemon
    stack: contextlib.ExitStack
    connections: dict[str, Any] = attrs.field(factory=dict)
    deaths: Counter[str] = attrs.field(factory=Counter)
    killed: list[Victim] = attrs.field(factory=list)
    """What died in this round."""
    problems: list[str] = attrs.field(factory=list)
    until: float = 0.0
    copies: int = 1
    """How many answers each request gets in a round."""
    n_rounds: int = 0
    n_answers: int = 0

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.until

    @property
    def url(self) -> str:
        return self.daemon.http_url()

    def start(self) -> None:
        """Start the daemon again."""
        self.stack.close()
        self.daemon = self.stack.enter_context(real_daemon(*self.flags))

    def undisturbed(self) -> dict[str, Answer]:
        """The answers that the others are compared with."""
        return {
            name: self.daemon.ask(**{key: value for key, value in fields.items() if key != "session_id"})
            for name, fields in REQUESTS.items()
        }

    def kill(self, victim: Victim) -> None:
        """Let one of the processes, or a connection, end at once."""
        self.deaths[victim] += 1
        self.killed.append(victim)
        match victim:
            case "client":
                if self.connections:
                    with contextlib.suppress(OSError):
                        self.connections[self.rng.choice(sorted(self.connections))].shutdown(2)
            case "daemon":
                self.daemon.process.kill()
                self.daemon.process.wait()
                self.start()
            case _:
                for process in self.daemon.processes:
                    with contextlib.suppress(psutil.Error):
                        if (
                            process.cmdline()[:1]
                            and victim in process.cmdline()[0]
                            and "standby" not in process.cmdline()[0]
                        ):
                            process.send_signal(signal.SIGKILL)
                            break

    def round(self, expected: dict[str, Answer], response: str) -> None:
        """Begin all answers, kill, read, compare."""
        self.n_rounds += 1
        self.killed.clear()
        self.until = time.monotonic() + DEADLINE_S
        readers = [pair for copy in range(self.copies) for pair in self._begin(f"{self.n_rounds}-{copy}")]
        self.n_answers += len(readers)
        threads = [threading.Thread(target=reader.follow, args=(self,), daemon=True) for _, reader in readers]
        for thread in threads:
            thread.start()
        for _ in range(self.rng.randint(1, 4)):
            time.sleep(self.rng.expovariate(1 / (PAUSE_S * self.copies)))
            can_resume = (
                self.killed.count("daemon") < MAX_ATTEMPTS - 1
            )  # one more would end answers without a new token
            self.kill(self.rng.choice([each for each in VICTIMS if can_resume or each != "daemon"]))
        for thread in threads:
            thread.join(DEADLINE_S)
        self.connections.clear()
        for name, reader in readers:
            if reader.is_response:
                self._compare_response(reader, response)
            else:
                self._compare(reader, expected[name])

    def _begin(self, suffix: str) -> list[tuple[str, Reader]]:
        """Begin an answer to each request; returns their readers by the names of the requests."""
        readers = []
        for name, fields in REQUESTS.items():
            fields = {**fields, "session_id": f"s{suffix}"} if "session_id" in fields else fields
            self.daemon.ask(id=f"{name}-{suffix}", detached=True, **fields)
            readers.append((name, Reader(f"{name}-{suffix}", False)))
        made = httpx.post(f"{self.url}/v1/responses", json={**RESPONSE, "background": True}, timeout=DEADLINE_S).json()
        return [*readers, ("response", Reader(made["id"], True))]

    def _compare(self, reader: Reader, expected: Answer) -> None:
        found = Answer(reader.events)
        if not reader.events or found.last["event"] != "eos":
            self._report(reader, f"it has not ended: {reader.events[-1:]}")
            return
        self._require(reader, [each["number"] for each in reader.events] == [*range(1, len(reader.events) + 1)], "gaps")
        pairs = zip([*found.ids, None], [*expected.ids, None], strict=False)
        at = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
        self._require(reader, found.ids == expected.ids, f"another token at {at} of {len(expected.ids)}")
        self._require(reader, found.text == expected.text, "another text")
        self._require(reader, _calls(found) == _calls(expected), "other calls")
        self._require(reader, found.reason == expected.reason, f"ended with {found.reason}")
        with self.daemon.wire() as wire:
            wire.send(type="attach", id=reader.name)
            self._require(reader, wire.rest() == reader.events, "other events for one who comes later")

    def _compare_response(self, reader: Reader, expected: str) -> None:
        if not reader.events or reader.events[-1]["type"] not in ENDS:
            self._report(reader, "it has not ended")
            return
        numbers = [each["sequence_number"] for each in reader.events]
        self._require(reader, numbers == [*range(len(numbers))], "gaps")
        deltas = [each["delta"] for each in reader.events if each["type"] == "response.output_text.delta"]
        self._require(reader, "".join(deltas) == expected, f"another text: {''.join(deltas)!r}")

    def _require(self, reader: Reader, holds: bool, problem: str) -> None:
        if not holds:
            self._report(reader, problem)

    def _report(self, reader: Reader, problem: str) -> None:
        self.problems.append(f"{reader.name}, after {', '.join(self.killed)}: {problem}")
        print(self.problems[-1], flush=True)


def _calls(answer: Answer) -> list[tuple[str, Any]]:
    return [(call["name"], call["arguments"]) for call in answer.last.get("tool_calls", ())]


@contextlib.contextmanager
def searching(folder: Path, seed: int, copies: int) -> Iterator[Search]:
    """A search whose daemon runs."""
    flags = (*LONG_CTX, "--http", "0", "--state-dir", str(folder), *EXACT)
    with contextlib.ExitStack() as stack:
        yield Search(flags, Random(seed), stack.enter_context(real_daemon(*flags)), stack, copies=copies)


def search(rounds: int, seed: int, folder: Path, copies: int = 1) -> Search:
    """Run ``rounds`` rounds; what was found is in ``problems``."""
    with searching(folder, seed, copies) as found:
        expected = found.undisturbed()
        whole = httpx.post(f"{found.url}/v1/responses", json=RESPONSE, timeout=DEADLINE_S).json()
        response = whole["output"][0]["content"][0]["text"]
        for _ in range(rounds):
            found.round(expected, response)
    return found


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--copies", type=int, default=1, help="answers to each request in a round")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = search(given.rounds, given.seed, Path(folder), given.copies)
    print(
        f"{found.n_rounds} rounds, {found.n_answers} answers, {len(found.problems)} problems; killed: {dict(found.deaths)}"
    )
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
