"""Several daemons behind a router: how much is prefilled again that one daemon would have had, and what clients see of
daemons that are killed, stopped or drained.

The routers come from PyPI, into an environment of their own.

python benches/scale_out.py
python benches/scale_out.py --router vllm-router --daemons 3
python benches/scale_out.py --faults kill,stop,drain --conversations 60
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from command import bench, carry_out, choices
from machine import machine
from report import cell, table
from rigs import LOG_TAIL, RivalError, free_port

from uma_trio.processes.interpreter import package_environment, python_module

try:
    import httpx
except ModuleNotFoundError:
    sys.exit("scale_out.py needs the package httpx, which the extra dev installs: run ./build_llama.sh --dev")

ENVIRONMENT: Final = Path(__file__).resolve().parent.parent / "build" / "routers"
HOST: Final = "127.0.0.1"
START_S: Final = 120.0
REQUEST_S: Final = 60.0
"""A request without an answer after this time counts as lost."""
STOPPED_S: Final = 3.0
"""How long a stopped daemon stands still."""
BETWEEN_FAULTS_S: Final = 4.0
FAULTS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "drain": signal.SIGTERM}
WORDS: Final = [
    "apple",
    "river",
    "stone",
    "music",
    "paper",
    "green",
    "house",
    "light",
    "seven",
    "north",
    "water",
    "under",
    "table",
    "along",
    "sweet",
]


@attrs.frozen(kw_only=True)
class Load:
    """Conversations, some of which begin with the same system prompt."""

    conversations: int
    clients: int
    turns: int
    systems: int
    system_words: int
    user_words: int
    tokens: int
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.conversations} conversations of {self.turns} turns, {self.clients} at a time; {self.systems} system prompts of "
            f"{self.system_words} words, turns of {self.user_words} words, answers of at most {self.tokens} tokens"
        )

    def texts(self) -> list[list[str]]:
        """The system prompt of each conversation, and what its user says."""
        rng = random.Random(self.seed)
        systems = [_words(rng, self.system_words) for _ in range(self.systems)]
        return [
            [rng.choice(systems), *[_words(rng, self.user_words) for _ in range(self.turns)]]
            for _ in range(self.conversations)
        ]


def _words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(WORDS, k=n))


@attrs.define
class Seen:
    """What the clients have seen."""

    outcomes: Counter[str] = attrs.field(factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    slowest_s: float = 0.0

    @property
    def prefilled(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Worker:
    """A daemon that can be started again at the same address."""

    def __init__(self, folder: Path, number: int, flags: Sequence[str]) -> None:
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self._folder, self._number = folder, number
        state = folder / f"state-{number}"
        self._command = [
            *(*python_module("uma_trio"), "serve", "--socket", str(folder / f"{number}.sock")),
            *("--http", f"{HOST}:{self.port}", "--state-dir", str(state), "--kv-events", f"tcp://{HOST}:{self.events}"),
            *("--kv-events-replay", f"tcp://{HOST}:{self.replay}", *flags),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self, http: httpx.AsyncClient) -> None:
        """Start the daemon, and wait until it serves."""
        self.process = _begin(self._command, self._folder / f"daemon-{self._number}.log")
        await _healthy(http, self.url, self.process, self._folder / f"daemon-{self._number}.log")

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self) -> None:
        assert self.process is not None
        await trio.to_thread.run_sync(self.process.wait)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _begin(command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    with open(log, "ab") as sink:
        environment = {**os.environ, **package_environment(), **variables}
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment)


async def _healthy(http: httpx.AsyncClient, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    with trio.move_on_after(START_S):
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"{url}/health")).status_code == 200:
                    return
            await trio.sleep(0.1)
    output = (await trio.Path(log).read_text(errors="replace")).strip()[-LOG_TAIL:]
    raise RivalError(f"{process.args[0]!s} did not serve at {url}: {output}")  # type: ignore[index]


# -- routers -----------------------------------------------------------------------------------


@attrs.frozen
class Router:
    """A router from PyPI."""

    requirement: str
    program: str
    flags: Callable[[Sequence[Worker], int], list[str]]


def _smg(workers: Sequence[Worker], port: int) -> list[str]:
    return [
        *("launch", "--host", HOST, "--port", str(port), "--policy", "cache_aware", "--worker-urls"),
        *([worker.url for worker in workers]),
        *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "2", "--health-failure-threshold", "1"),
        *("--health-success-threshold", "1", "--prometheus-port", str(free_port())),
    ]


def _vllm(policy: str) -> Callable[[Sequence[Worker], int], list[str]]:
    def flags(workers: Sequence[Worker], port: int) -> list[str]:
        events = [
            *[("--kv-event-source", f"{each.url}=tcp://{HOST}:{each.events}") for each in workers],
            *[("--kv-event-replay-source", f"{each.url}=tcp://{HOST}:{each.replay}") for each in workers],
            ("--kv-event-model", "embedded"),
        ]
        return [
            *("--host", HOST, "--port", str(port), "--policy", policy, "--prometheus-port", str(free_port())),
            *("--worker-urls", *[worker.url for worker in workers]),
            *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "2"),
            *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
            *([flag for pair in events for flag in pair] if policy == "kv_aware" else ()),
        ]

    return flags


ROUTERS: Final = {
    "smg": Router("smg==1.13.0", "smg", _smg),
    "vllm-router": Router("vllm-router==0.1.17", "vllm-router", _vllm("kv_aware")),
    "vllm-router round_robin": Router("vllm-router==0.1.17", "vllm-router", _vllm("round_robin")),
}


def installed(folder: Path, router: Router) -> Path:
    """The router's program in the environment ``folder``, which is made and filled if need be.

    Raises:
        RivalError: it cannot be installed.
    """
    program = folder / "bin" / router.program
    if not program.exists():
        for step in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", router.requirement],
        ):
            done = subprocess.run(step, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RivalError(f"{router.requirement} cannot be installed in {folder}: {done.stderr[-LOG_TAIL:]}")
    return program


@contextlib.asynccontextmanager
async def routed(
    name: str, folder: Path, environment: Path, workers: Sequence[Worker], http: httpx.AsyncClient
) -> AsyncIterator[str]:
    """A router in front of ``workers``; yields its URL."""
    router = ROUTERS[name]
    program = await trio.to_thread.run_sync(installed, environment, router)
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.json").write_bytes((await http.get(f"{workers[0].url}/tokenizer.json")).content)
    port, log = free_port(), folder / "router.log"
    command = [str(program), *router.flags(workers, port)]
    process = _begin(command, log, VLLM_ROUTER_TOKENIZER=str(tokenizer))
    try:
        await _healthy(http, f"http://{HOST}:{port}", process, log)
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        try:
            await trio.to_thread.run_sync(lambda: process.wait(10))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# -- the load ----------------------------------------------------------------------------------


async def converse(load: Load, url: str, http: httpx.AsyncClient) -> Seen:
    """Have all conversations; an error ends its turn, and the conversation goes on without an answer."""
    seen, waiting = Seen(), load.texts()

    async def client() -> None:
        while waiting:
            system, *turns = waiting.pop()
            messages = [{"role": "system", "content": system}]
            for text in turns:
                messages.append({"role": "user", "content": text})
                messages.append({"role": "assistant", "content": await ask(load, url, http, messages, seen)})

    async with trio.open_nursery() as nursery:
        for _ in range(load.clients):
            nursery.start_soon(client)
    return seen


async def ask(load: Load, url: str, http: httpx.AsyncClient, messages: list[dict[str, str]], seen: Seen) -> str:
    """Send one request, and count how it ends; returns the answer, which is empty if there was none."""
    body = {"model": "embedded", "messages": messages, "max_tokens": load.tokens, "temperature": 0}
    began, text = trio.current_time(), ""
    try:
        answer = await http.post(f"{url}/v1/chat/completions", json=body, timeout=REQUEST_S)
    except httpx.TimeoutException:
        seen.outcomes["lost"] += 1
    except httpx.TransportError as error:
        seen.outcomes[f"connection: {type(error).__name__}"] += 1
    else:
        if answer.status_code == 200:
            seen.outcomes["answered"] += 1
            data: dict[str, Any] = answer.json()
            seen.prompt_tokens += data["usage"]["prompt_tokens"]
            seen.cached_tokens += data["usage"]["prompt_tokens_details"]["cached_tokens"]
            text = data["choices"][0]["message"]["content"] or ""
        else:
            seen.outcomes[f"{answer.status_code} {_reason(answer)}"] += 1
    seen.slowest_s = max(seen.slowest_s, trio.current_time() - began)
    return text


def _reason(answer: httpx.Response) -> str:
    """The code of an error, or ``?`` for one that does not say what it is."""
    try:
        error = answer.json()["error"]
        return str(error.get("code") or error.get("type") or "?") if isinstance(error, dict) else str(error)[:60]
    except (json.JSONDecodeError, KeyError, TypeError):
        return answer.text[:60] or "?"


async def disturb(workers: Sequence[Worker], kinds: Sequence[str], http: httpx.AsyncClient, rng: random.Random) -> None:
    """Until cancelled: do something to one daemon after the other, and bring it back as a supervisor would."""
    while True:
        await trio.sleep(BETWEEN_FAULTS_S)
        worker, kind = rng.choice(workers), rng.choice(kinds)
        with trio.CancelScope(shield=True):
            worker.send(FAULTS[kind])
            if kind == "stop":
                await trio.sleep(STOPPED_S)
                worker.send(signal.SIGCONT)
            else:
                await worker.ended()
                await worker.start(http)
        click.echo(f"  {kind}: daemon at {worker.url}", err=True)


async def measure(load: Load, names: Sequence[str], n_daemons: int, kinds: Sequence[str], environment: Path) -> str:
    """One daemon, then several behind each router; returns a table."""
    click.echo(f"{load}; {n_daemons} daemons of the embedded model, one thread each\n")
    flags = ("--threads", "1", "--drain-timeout-s", "20")
    rows = []
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as http:
        ideal: Seen | None = None
        for name in ("one daemon", *names):
            alone = name == "one daemon"
            with tempfile.TemporaryDirectory(prefix="s") as text:
                folder = Path(text)
                workers = [Worker(folder, n, flags) for n in range(1 if alone else n_daemons)]
                try:
                    for worker in workers:
                        await worker.start(http)
                    seen = await _run(load, name, folder, environment, workers, () if alone else kinds, http)
                finally:
                    for worker in workers:
                        worker.end()
            ideal = ideal or seen
            asked = sum(seen.outcomes.values())
            rows.append((
                *(name, f"{seen.outcomes['answered']} of {asked}", str(seen.prompt_tokens), str(seen.prefilled)),
                *(cell(seen.prefilled / ideal.prefilled, 2), cell(100 * seen.cached_tokens / seen.prompt_tokens, 0)),
                *(cell(seen.slowest_s, 1), "; ".join(f"{n} x {what}" for what, n in seen.outcomes.items() if what != "answered")),
            ))  # fmt: skip
    return table(("behind", "answered", "prompt", "prefilled", "ratio", "cached %", "slowest s", "other"), rows)


async def _run(
    load: Load,
    name: str,
    folder: Path,
    environment: Path,
    workers: Sequence[Worker],
    kinds: Sequence[str],
    http: httpx.AsyncClient,
) -> Seen:
    if name == "one daemon":
        return await converse(load, workers[0].url, http)
    async with routed(name, folder, environment, workers, http) as url, trio.open_nursery() as nursery:
        if kinds:
            nursery.start_soon(disturb, workers, kinds, http, random.Random(load.seed))
        seen = await converse(load, url, http)
        nursery.cancel_scope.cancel()
    return seen


@bench()
@click.option("--router", "names", default="smg,vllm-router", help=f"Routers, with commas: {', '.join(ROUTERS)}.")
@click.option("--environment", type=click.Path(path_type=Path), default=ENVIRONMENT, show_default=False, help="Folder of the virtual environment for the routers.  [default: build/routers]")  # fmt: skip
@click.option("--daemons", type=click.IntRange(1, 16), default=2)
@click.option("--faults", default="", help=f"Faults at random, with commas: {', '.join(FAULTS)}.")
@click.option("--conversations", type=click.IntRange(1, 10_000), default=24)
@click.option("--clients", type=click.IntRange(1, 256), default=6, help="Conversations at a time.")
@click.option("--turns", type=click.IntRange(1, 100), default=6)
@click.option("--systems", type=click.IntRange(1, 1000), default=4, help="Different system prompts.")
@click.option("--seed", type=int, default=1)
def main(
    names: str,
    environment: Path,
    daemons: int,
    faults: str,
    conversations: int,
    clients: int,
    turns: int,
    systems: int,
    seed: int,
) -> None:
    """Compare several daemons behind a router with one daemon."""
    load = Load(
        conversations=conversations,
        clients=clients,
        turns=turns,
        systems=systems,
        system_words=120,
        user_words=20,
        tokens=24,
        seed=seed,
    )
    wanted = choices(names, "--router", [*ROUTERS])
    kinds = choices(faults, "--faults", [*FAULTS]) if faults else []
    for line in machine():
        click.echo(line)
    click.echo(carry_out(partial(measure, load, wanted, daemons, kinds, environment)))


if __name__ == "__main__":
    main()
