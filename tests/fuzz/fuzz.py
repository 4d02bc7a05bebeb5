"""Fuzzes the protocol: most cases through the codecs alone, some through the socket of a real daemon.

    python -m tests.fuzz.fuzz                     100,000 cases, seed 0
    python -m tests.fuzz.fuzz --cases 1000000 --seed 7
    python -m tests.fuzz.fuzz --replay FILE       one saved case, through both

Requirements for the codecs:

- Any bytes give messages or a protocol error, and no other exception.
- The result does not depend on how the bytes are split.
- The fields of every message are within their bounds.
- A client reads every answer as the server meant it.

Requirements for the daemon:

- Every answer is an event, and every error has a documented code.
- Another client's stream stays correct meanwhile.
- In the end, no sequence, KV cell or outbox is in use.

Exit code 1 if a case violates a requirement.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

import attrs

from tests.fuzz import generate
from tests.support.real_daemon import LONG_CTX, Canary, Daemon, missing, real_daemon
from uma_trio.errors import ProtocolError, all_errors
from uma_trio.protocol.answers import Metrics
from uma_trio.protocol.codec import ClientCodec, server_codec
from uma_trio.protocol.events import Eos, Failure, Token
from uma_trio.protocol.messages import Event
from uma_trio.protocol.queries import MetricsQuery
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import Timings, Usage

CODES = frozenset(error.code for error in all_errors())
SLOW_S = 1.0
DAEMON_FLAGS = (
    *LONG_CTX,
    *("--parallel", "8", "--max-frame-bytes", str(generate.CAP), "--log-level", "error", "--max-tx-bytes", "65536"),
    *("--frame-timeout-s", "2", "--idle-timeout-s", "2", "--write-timeout-s", "2", "--default-max-tokens", "8"),
)
LIVE_THREADS = 4


class Found(Exception):
    """A case violates a requirement."""


def require(holds: bool, complaint: str) -> None:
    if not holds:
        raise Found(complaint)


# -- codecs -------------------------------------------------------------------------------------


def read(mode: str, parts: list[bytes]) -> tuple[list[object], object]:
    """Feed ``parts`` and the end of the stream to a server's codec; return the outcomes and the codec."""
    codec = server_codec(mode, max_frame_bytes=generate.CAP)  # type: ignore[arg-type]
    outcomes: list[object] = []
    for part in [*parts, b""]:
        codec.receive_data(part)
        try:
            while (message := codec.next_message()) is not None:
                outcomes.append(message)
        except ProtocolError as error:
            require(error.code in CODES, f"the code {error.code} is not documented")
            require(len(str(error)) < 1000, f"an error message of {len(str(error))} characters")
            outcomes.append((error.code, str(error), error.request_id))
            outcomes.append(codec.encode(Failure.of(error)))
            break
    return outcomes, codec


def check_codecs(data: bytes, rng: Random) -> str:
    """Check one case and return how it ended; raises ``Found``."""
    began = time.perf_counter()
    mode = rng.choice(("auto", "auto", "auto", "auto", "json", "cbor", "newline"))
    outcomes, codec = read(mode, [data])
    again, _ = read(mode, generate.chunks(rng, data))
    require(
        repr(outcomes) == repr(again),
        f"the result depends on how the bytes are split ({mode}): {outcomes!r} or {again!r}",
    )
    for outcome in outcomes:
        if isinstance(outcome, Generate):
            check_bounds(outcome)
        if mode != "newline" and isinstance(outcome, Generate | MetricsQuery):
            check_answers(outcome, codec)
        if mode != "newline" and isinstance(outcome, bytes):
            require(len(events_of(outcome)) == 1, "a client cannot read the error")
    took = time.perf_counter() - began
    require(took < SLOW_S, f"it took {took:.1f} s")
    last = outcomes[-2] if outcomes and isinstance(outcomes[-1], bytes) else outcomes[-1] if outcomes else None
    return last[0] if isinstance(last, tuple) else type(last).__name__


def check_bounds(request: Generate) -> None:
    require((request.prompt is None) != (request.messages is None), "prompt or messages")
    require(request.temperature is None or 0 <= request.temperature <= 100, "temperature")  # not NaN either
    require(request.top_p is None or 0 < request.top_p <= 1, "top_p")
    require(request.top_k is None or 0 <= request.top_k < 2**31, "top_k")
    require(request.seed is None or 0 <= request.seed < 2**63, "seed")
    require(request.max_tokens is None or 1 <= request.max_tokens < 2**31, "max_tokens")
    require(len(request.stops) <= 16 and all(0 < len(stop) <= 256 for stop in request.stops), "stop")
    require(0 < len(request.id) <= 256, "id")
    require(1 <= request.n <= 16, "n")
    require(request.min_p is None or 0 <= request.min_p <= 1, "min_p")
    require(request.repetition_penalty is None or 0.1 <= request.repetition_penalty <= 10, "repetition_penalty")
    require(request.repeat_last_n is None or 0 <= request.repeat_last_n <= 4096, "repeat_last_n")
    require(request.frequency_penalty is None or -2 <= request.frequency_penalty <= 2, "frequency_penalty")
    require(request.presence_penalty is None or -2 <= request.presence_penalty <= 2, "presence_penalty")
    require(len(request.logit_bias) <= 300, "logit_bias")
    require(all(0 <= token < 2**31 and -100 <= bias <= 100 for token, bias in request.logit_bias.items()), "logit_bias")
    require(
        len(request.stop_token_ids) <= 64 and all(0 <= token < 2**31 for token in request.stop_token_ids),
        "stop_token_ids",
    )
    require(request.logprobs is None or 0 <= request.logprobs <= 20, "logprobs")
    (request.prompt or "").encode()  # text that cannot be encoded would fail in the tokenizer


def check_answers(message: Generate | MetricsQuery, codec: object) -> None:
    """Check that a client reads every kind of answer as the server meant it."""
    if isinstance(message, MetricsQuery):
        answers: list[object] = [Metrics(snapshot={"tokens_total": 1}, id=message.id)]
    else:
        timings = Timings(queue_ms=1.0, total_ms=2.0)
        usage = Usage(prompt_tokens=1, completion_tokens=2)
        answers = [
            Token(id=message.id, text=message.prompt or "é", token_id=5),
            Eos(id=message.id, reason="stop", usage=usage, timings=timings, text="🦊", metadata=message.metadata),
        ]
    for answer in answers:
        (event,) = events_of(codec.encode(answer))  # type: ignore[attr-defined]
        if isinstance(event, Eos):  # fields of the request that are not known
            event = attrs.evolve(event, warnings=None)
        # repr, because NaN is not equal to itself and 0.0 is equal to -0.0
        require(repr(event) == repr(answer), f"{answer!r} arrives as {event!r}")


def events_of(data: bytes) -> list[Event]:
    client = ClientCodec()
    client.receive_data(data)
    events = []
    while (event := client.next_event()) is not None:
        events.append(event)
    return events


# -- the socket ---------------------------------------------------------------------------------


def check_live(daemon: Daemon, data: bytes, rng: Random) -> str:
    """Send ``data`` as one client and read some of the answer; return how the case ended."""
    last = "nothing"
    with daemon.wire(timeout_s=60) as wire:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in generate.chunks(rng, data) if rng.random() < 0.3 else [data]:
                wire.send_bytes(part)
        if rng.random() < 0.1:
            return "left without reading"
        with contextlib.suppress(OSError):
            wire.sock.shutdown(socket.SHUT_WR)
        for _ in range(rng.choice((1, 5, 100, 100, 100))):
            try:
                event = wire.receive()
            except TimeoutError:
                raise Found("neither an answer nor a close within 20 s") from None
            except ProtocolError as error:
                raise Found(f"the daemon sent something that is not an event: {error}") from None
            if event is None:
                return last
            last = check_event(event)
    return last


def check_event(event: dict[str, object]) -> str:
    kind = str(event.get("event"))
    require(kind in ("token", "eos", "error", "metrics"), f"an unknown event: {event!r}")
    if kind == "token":
        require(isinstance(event.get("text"), str), f"a token without text: {event!r}")
    if kind == "eos":
        require(event.get("reason") in ("stop", "length", "cancelled"), f"an unknown reason: {event!r}")
    if kind == "error":
        require(event.get("code") in CODES, f"an undocumented code: {event!r}")
        require(event.get("code") != "E_RUNTIME_INTERNAL", f"a defect: {event!r}")
        return str(event["code"])
    return kind


# -- running ------------------------------------------------------------------------------------


class Fuzzer:
    """Runs cases, counts their endings, and saves those that violate a requirement."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.endings: Counter[str] = Counter()
        self.found: list[str] = []
        self._lock = threading.Lock()

    def run(self, kind: str, number: int, check: object) -> None:
        """Run case ``number``; ``check(data, rng)`` returns how it ended."""
        rng = Random(f"{self.seed} {kind} {number}")
        data = generate.case(rng)
        try:
            ending = check(data, rng)  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001  (any exception is a finding)
            self.report(kind, number, data, error)
        else:
            self.endings[f"{kind}: {ending}"] += 1

    def report(self, kind: str, number: int, data: bytes, error: Exception) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{kind}-{self.seed}-{number}.bin"
        path.write_bytes(data)
        complaint = str(error) if isinstance(error, Found) else f"{type(error).__name__}: {error}"
        with self._lock:
            self.found.append(complaint)
        print(
            f"FOUND in {kind} case {number}: {complaint[:500]}\n  python -m tests.fuzz.fuzz --replay {path}", flush=True
        )

    def codecs(self, n: int) -> float:
        """Run ``n`` cases through the codecs; return the cases per second."""
        began = time.perf_counter()
        for number in range(n):
            self.run("codec", number, check_codecs)
        return n / (time.perf_counter() - began)

    def live(self, n: int, daemon: Daemon) -> float:
        """Run ``n`` cases through the daemon's socket; return the cases per second."""

        def some(first: int) -> None:
            for number in range(first, n, LIVE_THREADS):
                self.run("live", number, lambda data, rng: check_live(daemon, data, rng))

        began = time.perf_counter()
        threads = [threading.Thread(target=some, args=(first,)) for first in range(LIVE_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return n / (time.perf_counter() - began)


def fuzz(cases: int, live: int, seed: int, folder: Path) -> Fuzzer:
    """Run ``cases`` cases in total, ``live`` of them through a daemon, and print a summary."""
    fuzzer = Fuzzer(seed, folder)
    rate = fuzzer.codecs(cases - live)
    print(f"{cases - live} cases through the codecs, {rate:,.0f} a second", flush=True)
    if live:
        with real_daemon(*DAEMON_FLAGS) as daemon:
            with Canary(daemon) as canary:
                rate = fuzzer.live(live, daemon)
            snapshot = daemon.settled()
            print(
                f"{live} cases through the socket, {rate:,.0f} a second; {canary.rounds} rounds of the other "
                f"client's stream, the slowest {canary.slowest_s:.2f} s; {snapshot['tokens_total']} tokens"
            )
    for ending, n in fuzzer.endings.most_common():
        print(f"  {n:>7}  {ending}")
    print(f"{len(fuzzer.found)} found")
    return fuzzer


def replay(path: Path) -> int:
    """Run one saved case through codecs and daemon, split in many ways."""
    data = path.read_bytes()
    for number in range(50):
        print("codec:", check_codecs(data, Random(number)))
    if missing() is None:
        with real_daemon(*DAEMON_FLAGS) as daemon, Canary(daemon):
            for number in range(20):
                print("live:", check_live(daemon, data, Random(number)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="number of cases  [default: 100000]")
    parser.add_argument("--live", type=int, help="how many of them go through a real daemon  [default: one in 20]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--save", type=Path, default=Path("bench-out/fuzz"), help="folder for the cases that violate a requirement"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one saved case")
    chosen = parser.parse_args()
    if chosen.replay:
        return replay(chosen.replay)
    live = chosen.cases // 20 if chosen.live is None else chosen.live
    if live and (reason := missing()) is not None:
        print(f"without the socket: {reason}")
        live = 0
    return 1 if fuzz(chosen.cases, live, chosen.seed, chosen.save).found else 0


if __name__ == "__main__":
    sys.exit(main())
