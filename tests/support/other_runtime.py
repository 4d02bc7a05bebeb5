"""A runtime of another make, from the specification alone: ``python other_runtime.py FLAGS``.

It takes the flags of the reference implementation and no others, serves semaphores, and shares no code with
``uma_trio``.  Its one controller, ``digits``, appends the tokens of its argument, a list; then it lets the model choose one
of the first 32 tokens, twice, and stops.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

import posix_ipc

N_VOCAB = 1000
"""Fewer than the embedded model has."""

Answer = Callable[[dict[str, Any]], Any]


def shared_memory(name: str, mib: int) -> mmap.mmap:
    memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREAT, size=mib << 20)
    try:
        return mmap.mmap(memory.fd, mib << 20)
    finally:
        memory.close_fd()


class Mailbox:
    def __init__(self, name: str, mib: int) -> None:
        self.map = shared_memory(f"{name}-shm", mib)
        self.free = posix_ipc.Semaphore(f"{name}-wr", posix_ipc.O_CREAT, initial_value=1)
        self.ready = posix_ipc.Semaphore(f"{name}-rd", posix_ipc.O_CREAT, initial_value=0)

    def send(self, message: bytes, length: int | None = None) -> None:
        self.free.acquire()
        self.map[4 : 4 + len(message)] = message
        self.map[:4] = struct.pack("<I", len(message) if length is None else length)
        self.ready.release()

    def receive(self) -> dict[str, Any]:
        self.ready.acquire()
        (size,) = struct.unpack("<I", self.map[:4])
        data = self.map[4 : 4 + size]
        self.free.release()
        found: dict[str, Any] = json.loads(data)
        return found


class Runtime:
    def __init__(self, biases: mmap.mmap) -> None:
        self.biases = biases
        self.tags: dict[str, dict[str, Any]] = {}
        self.waiting: dict[str, list[int]] = {}
        self.texts: dict[int, list[int]] = {}
        """Tokens that each sequence has still to append."""
        self.sampled: dict[int, int] = {}
        self.failing_uploads = int(os.environ.get("FAILING_UPLOADS", "0"))

    def main(self, message: dict[str, Any]) -> Any:
        match message["op"]:
            case "ping":
                return {"pong": 1}
            case "tokens":
                return {"vocab_size": N_VOCAB}
            case "post_pre_process":
                return self.post_pre(**{key: message[key] for key in ("post_ops", "pre_ops", "freed")})
            case "mid_process":
                return self.mid(message["ops"])

    def post_pre(self, post_ops: list[Any], pre_ops: list[Any], freed: list[int]) -> Any:
        posts = {}
        for op in post_ops:
            self.sampled[op["id"]] += len(op["tokens"])
            posts[str(op["id"])] = result({"stop": self.sampled[op["id"]] >= 2})
        for op in pre_ops:
            self.texts[op["id"]], self.sampled[op["id"]] = self.waiting.pop(op["req_id"]), 0
        pres = {}
        for id, text in self.texts.items():
            pres[str(id)] = result({"suspend": False, "num_forks": 1, "ff_tokens": text})
            self.texts[id] = []
        for id in freed:
            self.texts.pop(id, None)
        return {"post_seqs": posts, "pre_seqs": pres}

    def mid(self, ops: list[Any]) -> Any:
        row = struct.pack(f"<{N_VOCAB}f", *(0.0 if token < 32 else -100.0 for token in range(N_VOCAB)))
        for n in range(len(ops)):
            self.biases[n * len(row) : (n + 1) * len(row)] = row
        return {"seqs": {str(op["id"]): result(None) for op in ops}, "num_seqs": len(ops)}

    def side(self, message: dict[str, Any]) -> Any:
        match message["op"]:
            case "mk_module" if self.failing_uploads:
                self.failing_uploads -= 1
                raise OSError("no space left")
            case "mk_module":
                wasm = base64.b64decode(message["binary"])
                return {"module_id": hashlib.sha256(wasm).hexdigest(), "wasm_size": 1, "compiled_size": 1, "time": 1}
            case "set_tags":
                by = message["$auth"]["user"]
                about = {"module_id": message["module_id"], "updated_at": 1, "updated_by": by}
                made = [{"tag": tag, **about, "wasm_size": 1, "compiled_size": 1} for tag in message["tags"]]
                self.tags |= {each["tag"]: each for each in made}
                return {"tags": made}
            case "get_tags":
                return {"tags": [*self.tags.values()]}
            case "instantiate":
                if message["module_id"] != "digits":
                    raise ValueError(f"tag {message['module_id']} not found")
                self.waiting[message["req_id"]] = message["module_arg"]
                return {}


def result(value: Any) -> dict[str, Any]:
    return {"error": "", "result": value, "storage": [], "logs": "", "micros": 0}


def serve(command: Mailbox, response: Mailbox, answer: Answer) -> None:
    while True:
        message = command.receive()
        rid = {"$rid": message["$rid"]} if "$rid" in message else {}
        try:
            found = {"type": "ok", "data": answer(message), **rid}
        except (ValueError, OSError) as error:
            is_user_error = isinstance(error, ValueError)
            found = {"type": "error", "error": str(error), "is_user_error": is_user_error, **rid}
        if message["op"] == BROKEN_OP:
            send_broken(response, found, rid)
        else:
            response.send(encoded(found))


def encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


BROKEN_OP, _, HOW = os.environ.get("BREAKS", "").partition(":")
"""Which answers break the protocol, and how."""


def send_broken(response: Mailbox, right: dict[str, Any], rid: dict[str, Any]) -> None:
    data = encoded(right)
    match HOW:
        case "cut":
            response.send(data[:-2])
        case "nonsense":
            response.send(b"\xff")
        case "too long":
            response.send(data, length=0xFFFFFFF0)
        case "wrong data":
            response.send(encoded({"type": "ok", "data": [], **rid}))
        case "wrong type":
            response.send(encoded({"type": "maybe", **rid}))
        case "an error":
            response.send(encoded({"type": "error", "error": "no idea", "is_user_error": False, **rid}))
        case "no words":
            response.send(encoded({"type": "ok", "data": {"vocab_size": 0}}))
        case "twice":
            response.send(data)
            response.send(data)
        case "a stranger":
            response.send(encoded({"type": "ok", "data": [], "$rid": "nobody's"}))
            response.send(encoded({"type": "ok", "data": []}))
            response.send(data)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--server", action="store_true", required=True)
    for name in ("--tokenizer", "--name"):
        parser.add_argument(name, required=True)
    for name in ("json-size", "bin-size", *(f"wasm-max-{each}" for each in ("forks", "memory"))):
        parser.add_argument(f"--{name}", type=int, required=name.endswith("size"))
    for name in ("pre-step", "step", "init"):
        parser.add_argument(f"--wasm-max-{name}-time", type=int)
    flags = parser.parse_args()
    print(f"the tokenizer is {flags.tokenizer}", flush=True)
    runtime = Runtime(shared_memory(f"{flags.name}bin-shm", flags.bin_size))
    mailboxes = {name: Mailbox(flags.name + name, flags.json_size) for name in ("cmd", "resp", "cmd-side", "resp-side")}
    side = mailboxes["cmd-side"], mailboxes["resp-side"], runtime.side
    threading.Thread(target=serve, args=side, daemon=True).start()
    serve(mailboxes["cmd"], mailboxes["resp"], runtime.main)


if __name__ == "__main__":
    main()
