"""An engine's side of AICI, from the specification alone: it shares no code with ``uma_trio.aici``.

It creates shared memory with semaphores or futexes, starts a runtime, and exchanges JSON with it.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import itertools
import json
import mmap
import os
import platform
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc

from tests.support.forked import UMA_TRIO, Forked, can_fork

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
PATIENT = [f"--wasm-max-{name}-time=10000" for name in ("pre-step", "step", "init")]
"""The usual limits of time are short for a machine that is busy with tests."""
"""How long to wait for anything.  A machine may be busy; nothing here measures time."""

ADMIN = {"user": "localhost", "is_admin": True}

_numbers = itertools.count()


class SharedMemory:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(name)
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREAT, size=size)
        self.map = mmap.mmap(memory.fd, size)
        memory.close_fd()

    def unlink(self) -> None:
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(self.name)


class SemaphoreSlot:
    """A message behind two semaphores."""

    def __init__(self, name: str, size: int) -> None:
        self.memory = SharedMemory(f"{name}-shm", size)
        self.semaphores = []
        for suffix, value in (("-wr", 1), ("-rd", 0)):
            with contextlib.suppress(posix_ipc.ExistentialError):
                posix_ipc.unlink_semaphore(name + suffix)
            self.semaphores.append(posix_ipc.Semaphore(name + suffix, posix_ipc.O_CREAT, initial_value=value))
        self.free, self.ready = self.semaphores

    def send(self, data: bytes) -> None:
        self.free.acquire(PATIENCE_S)
        self.memory.map[:4] = struct.pack("<I", len(data))
        self.memory.map[4 : 4 + len(data)] = data
        self.ready.release()

    def receive(self, seconds: float = PATIENCE_S) -> bytes:
        self.ready.acquire(seconds)
        (length,) = struct.unpack("<I", self.memory.map[:4])
        data = self.memory.map[4 : 4 + length]
        self.free.release()
        return data

    def unlink(self) -> None:
        self.memory.unlink()
        for each in self.semaphores:
            with contextlib.suppress(posix_ipc.ExistentialError):
                each.unlink()


class FutexSlot:
    """A message in one half of a memory."""

    def __init__(self, name: str, size: int, *, second_half: bool) -> None:
        self.memory = SharedMemory(name, size)
        self.at = size // 2 if second_half else 0
        self.word = ctypes.c_uint32.from_buffer(self.memory.map, self.at)

    def send(self, data: bytes) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.word.value != 0:
            assert time.monotonic() < until
            time.sleep(0.001)
        self.word.value = 0xFFFFFFFF
        self.memory.map[self.at + 4 : self.at + 4 + len(data)] = data
        self.word.value = len(data)
        _futex(self.word, 1, 2**31 - 1)

    def receive(self, seconds: float = PATIENCE_S) -> bytes:
        until = time.monotonic() + seconds
        while (length := self.word.value) in (0, 0xFFFFFFFF):
            if time.monotonic() > until:
                raise posix_ipc.BusyError
            _futex(self.word, 0, length, 0.1)
        data = self.memory.map[self.at + 4 : self.at + 4 + length]
        self.word.value = 0
        return data

    def unlink(self) -> None:
        self.memory.unlink()


def _futex(word: ctypes.c_uint32, operation: int, value: int, seconds: float = 0) -> None:
    number = {"x86_64": 202, "aarch64": 98}[platform.machine()]
    timeout = struct.pack("qq", 0, int(seconds * 1e9))
    ctypes.CDLL(None).syscall(number, ctypes.byref(word), operation, ctypes.c_uint32(value), timeout, None, 0)


class Engine:
    """An engine with its runtime.

    Args:
        flags: more flags of the runtime.
        folder: its working directory, where it keeps modules.
        form: ``=`` for ``--flag=value``, otherwise two words.
        forks: whether the runtime may start in a fork, which ends with this process.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        futex: bool = False,
        json_mb: int = 1,
        bin_mb: int = 4,
        form: str = "=",
        forks: bool = True,
    ) -> None:
        self.prefix = f"/at{os.getpid()}-{next(_numbers)}-"
        size = json_mb << 20
        self.slots: dict[str, Any] = {}
        for name in ("cmd", "resp", "cmd-side", "resp-side"):
            if futex:
                self.slots[name] = FutexSlot(self.prefix + name, size, second_half=name.startswith("resp"))
            else:
                self.slots[name] = SemaphoreSlot(self.prefix + name, size)
        self.biases = SharedMemory(self.prefix + "bin-shm", bin_mb << 20)
        values = {"tokenizer": "embedded", "json-size": json_mb, "bin-size": bin_mb, "name": self.prefix}
        words = [
            word
            for name, value in values.items()
            for word in ([f"--{name}={value}"] if form == "=" else [f"--{name}", str(value)])
        ]
        self.process = (Forked if forks and can_fork({}) else subprocess.Popen)(
            [*UMA_TRIO, "aicirt", *words, *(["--futex"] if futex else []), "--server", *PATIENT, *flags],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
        )
        self.n_vocab = 0

    def main(self, message: dict[str, Any] | bytes) -> dict[str, Any]:
        """An exchange on the main channel."""
        self.slots["cmd"].send(_bytes(message))
        return self._answer("resp")

    def side(self, message: dict[str, Any] | bytes) -> dict[str, Any]:
        """An exchange on the side channel, one at a time."""
        self.slots["cmd-side"].send(_bytes(message))
        return self._answer("resp-side")

    def ok(self, message: dict[str, Any]) -> Any:
        """The data of an answer on the main channel."""
        return _data(self.main(message))

    def side_ok(self, op: str, **fields: Any) -> Any:
        """The data of an answer on the side channel, for an administrator."""
        return _data(self.side({"op": op, "$rid": "r", "$auth": ADMIN, **fields}))

    def shake_hands(self) -> None:
        assert self.ok({"op": "ping"}) == {"pong": 1}
        self.n_vocab = self.ok({"op": "tokens"})["vocab_size"]

    def upload(self, wasm: bytes) -> str:
        """The id of a module."""
        module_id: str = self.side_ok("mk_module", binary=base64.b64encode(wasm).decode())["module_id"]
        return module_id

    @staticmethod
    def upload_id(wasm: bytes) -> str:
        """The id that a module has."""
        return hashlib.sha256(wasm).hexdigest()

    def instantiate(self, module: bytes | str, req_id: str, argument: Any = "", prompt: Any = (1,)) -> None:
        if isinstance(module, bytes):
            module = self.upload(module)
        fields = {"req_id": req_id, "prompt": prompt, "module_id": module, "module_arg": argument}
        assert self.side_ok("instantiate", **fields) == {}

    def begin(self, id: int, module: bytes | str, argument: Any = "") -> dict[str, Any]:
        """Begin a sequence; returns the result of its first pre."""
        self.instantiate(module, f"request-{id}", argument)
        found: dict[str, Any] = self.post_pre(new={id: f"request-{id}"})["pre_seqs"][str(id)]
        return found

    def post_pre(
        self, posts: Sequence[dict[str, Any]] = (), new: dict[int, str] | None = None, freed: Sequence[int] = ()
    ) -> Any:
        pre_ops = [{"id": id, "req_id": req_id} for id, req_id in (new or {}).items()]
        return self.ok({"op": "post_pre_process", "post_ops": posts, "pre_ops": pre_ops, "freed": freed})

    def mid(self, *ops: int | tuple[int, int]) -> Any:
        """Ask for ids, or for pairs of a new id and the one that it is a clone of."""
        sent = [{"id": op} if isinstance(op, int) else {"id": op[0], "clone_id": op[1]} for op in ops]
        return self.ok({"op": "mid_process", "ops": sent})

    def row(self, n: int) -> np.ndarray:
        """A copy of a row of biases."""
        return np.frombuffer(self.biases.map, "<f4", self.n_vocab, n * self.n_vocab * 4).copy()

    def allowed(self, n: int) -> list[int]:
        """The tokens that a row allows."""
        row = self.row(n)
        assert set(row.tolist()) <= {0.0, -100.0}
        found: list[int] = np.flatnonzero(row == 0.0).tolist()
        return found

    def names(self) -> list[str]:
        """What is left in the folder of shared memory."""
        prefix = self.prefix.removeprefix("/")
        return sorted(name for name in os.listdir("/dev/shm") if name.removeprefix("sem.").startswith(prefix))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for slot in self.slots.values():
            slot.unlink()
        self.biases.unlink()

    def _answer(self, name: str) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                found: dict[str, Any] = json.loads(self.slots[name].receive(0.5))
            except posix_ipc.BusyError:
                assert self.process.poll() is None, f"the runtime ended with {self.process.returncode}"
                assert time.monotonic() < until, "no answer"
            else:
                return found


def _bytes(message: dict[str, Any] | bytes) -> bytes:
    return message if isinstance(message, bytes) else json.dumps(message).encode()


def _data(answer: dict[str, Any]) -> Any:
    assert answer["type"] == "ok", answer
    return answer["data"]
