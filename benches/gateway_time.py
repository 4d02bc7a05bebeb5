"""Measure the gateway's own CPU time for a token, and how long a token takes through it.

    python benches/gateway_time.py
    python benches/gateway_time.py --api responses --streams 1,32 --steps 1000

A real gateway process serves streams whose daemon is a list of tokens: in each step every stream gets one, and the next
step follows when the client of every stream has it.  *cpu* is the CPU time of the gateway's process for a token; *step* is the time
from the first token of a step to the last one at its client.  On a busy machine compare two versions in turns, by the
tenth of the steps that took least.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import click
import msgspec
from command import bench, csv_option, numbers
from comparison import RunsFile
from machine import machine
from report import cell, table

from uma_trio import config
from uma_trio.demo.recording import percentile
from uma_trio.processes.parent_process import READY
from uma_trio.protocol.answers import ModelDescription, ModelList
from uma_trio.protocol.codec import ServerCodec
from uma_trio.protocol.events import Eos, Token
from uma_trio.protocol.queries import ModelsQuery
from uma_trio.protocol.requests import Generate
from uma_trio.protocol.usage import Timings, Usage

FIRST_STEPS: Final = 20
"""Steps that do not count."""
MODEL: Final = ModelDescription(
    name="none", description="", architecture="", size_bytes=0, n_parameters=0, context=1, context_per_request=1,
    parallel=1, capabilities=[], embedding_length=1,
)  # fmt: skip
CHAT: Final = [{"role": "user", "content": "Tell me a story"}]
APIS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    "completions": ("/v1/completions", {"prompt": "Once"}),
    "responses": ("/v1/responses", {"input": "Once", "store": False}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 1000}),
    "ollama": ("/api/chat", {"model": "none", "messages": CHAT}),
    "llama": ("/completion", {"prompt": "Once"}),
}
"""Path and body by name."""


@contextlib.contextmanager
def gateway(path: Path) -> Iterator[tuple[int, int]]:
    """Process id and port of a gateway whose daemon listens at ``path``."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        settings = config.Config(listen=config.Listen(socket=path))
        text = msgspec.json.encode(settings, enc_hook=str).decode()
        command = [sys.executable, "-m", "uma_trio.gateway", str(sock.fileno()), text]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[sock.fileno()], bufsize=0
        ) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(b"\n")
            while READY.encode() not in (line := process.stderr.readline()):
                if not line:
                    raise click.ClickException("the gateway does not start")
            try:
                yield process.pid, sock.getsockname()[1]
            finally:
                process.kill()


def cpu_s(pid: int) -> float:
    """CPU time of a process."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@attrs.define
class Streams:
    """Answers that are streamed through a gateway.

    Args:
        listener: the daemon's socket.
        ask: sends one request to the gateway, and returns the connection.
    """

    listener: socket.socket
    ask: Callable[[], socket.socket]
    clients: list[socket.socket] = attrs.field(factory=list)
    requests: list[tuple[socket.socket, ServerCodec, str]] = attrs.field(factory=list)

    def open(self) -> None:
        """Send one more request, and answer what the gateway asks until it sends this one."""
        self.clients.append(self.ask())
        n_before = len(self.requests)
        while len(self.requests) == n_before:
            connection, _ = self.listener.accept()
            codec = ServerCodec("auto", max_frame_bytes=1 << 20)
            while (message := codec.next_message()) is None:
                codec.receive_data(connection.recv(1 << 16))
            if isinstance(message, ModelsQuery):
                connection.sendall(codec.encode(ModelList(id=message.id, models=[MODEL])))
                connection.close()
            else:
                assert isinstance(message, Generate)
                self.requests.append((connection, codec, message.id))

    def step(self, text: str) -> None:
        """Send a token to each stream, and wait until all of them are at their clients."""
        for connection, codec, id in self.requests:
            connection.sendall(codec.encode(Token(id=id, text=text, token_id=7)))
        poll = select.epoll()
        left = {client.fileno(): client for client in self.clients}
        for number in left:
            poll.register(number, select.EPOLLIN)
        wanted = text.strip().encode()
        while left:
            for number, _ in poll.poll(10):
                if wanted in left[number].recv(1 << 16):
                    poll.unregister(number)
                    del left[number]
        poll.close()

    def end(self) -> None:
        """End all answers."""
        for connection, codec, id in self.requests:
            usage, timings = (
                Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
                Timings(queue_ms=0, ttft_ms=1, total_ms=2),
            )
            connection.sendall(codec.encode(Eos(id=id, reason="length", usage=usage, timings=timings)))
        for client in self.clients:
            while client.recv(1 << 16):
                """The rest of the answer."""


def measured(api: str, n_streams: int, n_steps: int) -> tuple[list[float], list[float]]:
    """Microseconds of CPU time for a token, and of a step, for each step that counts."""
    path, body = APIS[api]
    content = json.dumps({**body, "stream": True}).encode()

    cpu_us, step_us = [], []
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/uma.sock")
        listener.listen(64)
        with gateway(Path(folder, "uma.sock")) as (pid, port):

            def ask() -> socket.socket:
                client = socket.create_connection(("127.0.0.1", port), timeout=10)
                head = f"POST {path} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\nContent-Length: {len(content)}"
                client.sendall(f"{head}\r\n\r\n".encode() + content)
                return client

            streams = Streams(listener, ask)
            for _ in range(n_streams):
                streams.open()
            for step in range(FIRST_STEPS + n_steps):
                began_s, began_cpu_s = time.perf_counter(), cpu_s(pid)
                streams.step(f" word{step}")
                if step >= FIRST_STEPS:
                    step_us.append(1e6 * (time.perf_counter() - began_s))
                    cpu_us.append(1e6 * (cpu_s(pid) - began_cpu_s) / n_streams)
            streams.end()
    return cpu_us, step_us


@bench()
@click.option("--api", "apis", default="chat", help=f"APIs: {', '.join(APIS)}.")
@click.option("--streams", default="1,8,32,128", help="Numbers of streams.")
@click.option("--steps", type=click.IntRange(10), default=300, help="Steps that count.")
@csv_option("the percentiles")
def main(apis: str, streams: str, steps: int, csv_file: Path | None) -> None:
    for line in machine():
        click.echo(line)
    names = ["api", "streams", "cpu_p10_us", "cpu_p50_us", "step_p10_us", "step_p50_us"]
    rows = []
    file = RunsFile(csv_file, names)
    for api in apis.split(","):
        for n_streams in numbers(streams, "--streams"):
            cpu_us, step_us = measured(api, n_streams, steps)
            percentiles = [percentile(times_us, at) for times_us in (cpu_us, step_us) for at in (10, 50)]
            file.add(api, n_streams, *percentiles)
            rows.append([api, str(n_streams), *[cell(value, 1) for value in percentiles]])
    click.echo(table([name.replace("_", " ") for name in names], rows))


if __name__ == "__main__":
    main()
