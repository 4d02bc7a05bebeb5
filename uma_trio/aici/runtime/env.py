"""Functions that a module imports: of ``env``, which are AICI's own, and of ``wasi_snapshot_preview1``.

Of WASI there is output, and answers that say that there is nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec
import numpy as np

from uma_trio.aici.runtime.guest import (
    BLOB_ARGUMENT,
    BLOB_CALL,
    BLOB_STORAGE,
    BLOB_TOKENIZED,
    BLOB_TOKENS,
    BLOB_TRIE,
    MAX_LOG_BYTES,
    MAX_RESULT_BYTES,
    MAX_STORAGE_BYTES,
    N_PLAIN_BLOBS,
    Fatal,
    Guest,
    Stopped,
)
from uma_trio.aici.runtime.signatures import IMPORTS, WASI
from uma_trio.aici.runtime.variables import BadCommand, VariablesFull, run_command

MAX_TOKENIZED_BYTES: Final = 256 << 10
"""As much as a program may have.  Nothing interrupts the tokenizer, so a longer text could take longer than a callback may."""


def _read_blob(guest: Guest, blob: int, start: int, size: int) -> int:
    if blob == BLOB_TRIE:
        data = guest.trie
    elif blob < N_PLAIN_BLOBS:
        data = guest.blobs.get(blob, b"")
    else:
        raise Fatal(f"invalid blob id {blob}")
    if size:
        guest.memory.write(start, data[:size])
    return len(data)


def _tokenize(guest: Guest, start: int, size: int) -> int:
    guest.blobs[BLOB_TOKENIZED] = b""
    if size > MAX_TOKENIZED_BYTES:
        guest.logs.write(f"WARNING: cannot tokenize {size} bytes; at most {MAX_TOKENIZED_BYTES}\n".encode())
        return BLOB_TOKENIZED
    text = guest.memory.read(start, size)
    try:
        guest.blobs[BLOB_TOKENIZED] = np.asarray(guest.tokenize(text)).astype("<u4").tobytes()
    except Exception as error:  # noqa: BLE001  (whatever the tokenizer stumbles over is the text's fault)
        guest.logs.write(f"WARNING: cannot tokenize: {error}\n".encode())
    return BLOB_TOKENIZED


def _return_logit_bias(guest: Guest, start: int) -> None:
    guest.allow(guest.memory.read(start, 4 * -(-guest.n_vocab // 32)))


def _return_process_result(guest: Guest, start: int, size: int) -> None:
    if size > MAX_RESULT_BYTES:
        raise Fatal(f"the result has {size} bytes; at most {MAX_RESULT_BYTES}")
    guest.result = guest.memory.read(start, size)


def _storage_cmd(guest: Guest, start: int, size: int) -> int:
    if size > MAX_RESULT_BYTES:
        raise Fatal(f"the storage command has {size} bytes; at most {MAX_RESULT_BYTES}")
    try:
        answer, written = run_command(guest.variables, guest.memory.read(start, size))
    except (BadCommand, VariablesFull) as error:
        raise Fatal(f"storage command: {error}") from None
    if written is not None:
        guest.n_storage_bytes += size
        if guest.n_storage_bytes > MAX_STORAGE_BYTES:
            raise Fatal(f"the storage commands of one call have more than {MAX_STORAGE_BYTES} bytes")
        guest.storage.append(written)
    guest.blobs[BLOB_STORAGE] = msgspec.json.encode(answer)
    return BLOB_STORAGE


def _stop(guest: Guest) -> None:
    raise Stopped("*** aici_host_stop()")


FUNCTIONS: Final[Mapping[str, Callable[..., int | None]]] = {
    "aici_host_read_blob": _read_blob,
    "aici_host_module_arg": lambda guest: BLOB_ARGUMENT,
    "aici_host_process_arg": lambda guest: BLOB_CALL,
    "aici_host_token_trie": lambda guest: BLOB_TRIE,
    "aici_host_tokens": lambda guest: BLOB_TOKENS,
    "aici_host_tokenize": _tokenize,
    "aici_host_return_logit_bias": _return_logit_bias,
    "aici_host_return_process_result": _return_process_result,
    "aici_host_storage_cmd": _storage_cmd,
    "aici_host_self_seq_id": lambda guest: guest.sequence_id,
    "aici_host_eos_token": lambda guest: guest.eos,
    "aici_host_stop": _stop,
}
"""Each gets the guest and its arguments as unsigned numbers."""


SUCCESS: Final = 0
BADF: Final = 8
"""The answer to everything about files, the clock and the environment."""

STDOUT, STDERR = 1, 2
CHARACTER_DEVICE: Final = 2
MAX_BUFFERS: Final = 1024
"""Parts of one ``fd_write``; libraries use two."""


def _fd_write(guest: Guest, fd: int, buffers: int, n_buffers: int, n_written: int) -> int:
    if fd not in (STDOUT, STDERR):
        return BADF
    if n_buffers > MAX_BUFFERS:
        raise Fatal(f"fd_write of {n_buffers} buffers; at most {MAX_BUFFERS}")
    total = 0
    for start, size in struct.iter_unpack("<II", guest.memory.read(buffers, 8 * n_buffers)):
        kept = min(size, MAX_LOG_BYTES)
        first = start if guest.logs.keeps_first else start + size - kept
        guest.memory.read(start, 0)  # the part that is left out must be in the memory, too
        guest.logs.write(guest.memory.read(first, kept), size - kept)
        total += size
    guest.memory.write(n_written, (total & 0xFFFFFFFF).to_bytes(4, "little"))
    return SUCCESS


def _fd_fdstat_get(guest: Guest, fd: int, address: int) -> int:
    if fd > STDERR:
        return BADF
    guest.memory.write(address, bytes([CHARACTER_DEVICE]) + bytes(23))
    return SUCCESS


def _proc_exit(guest: Guest, code: int) -> None:
    raise Stopped(f"proc_exit: {code}")


def _sizes_get(guest: Guest, count: int, n_bytes: int) -> int:
    guest.memory.write(count, (0).to_bytes(4, "little"))
    guest.memory.write(n_bytes, (0).to_bytes(4, "little"))
    return SUCCESS


def _answer(code: int, guest: Guest, *_: int) -> int:
    return code


WASI_FUNCTIONS: Final[Mapping[str, Callable[..., int | None]]] = {
    **{name: partial(_answer, BADF) for name in IMPORTS[WASI]},
    "fd_write": _fd_write,
    "fd_fdstat_get": _fd_fdstat_get,
    "proc_exit": _proc_exit,
    "args_sizes_get": _sizes_get,
    "environ_sizes_get": _sizes_get,
    "args_get": partial(_answer, SUCCESS),
    "sched_yield": partial(_answer, SUCCESS),
    "fd_sync": partial(_answer, SUCCESS),
    "random_get": partial(_answer, SUCCESS),
}
"""As ``FUNCTIONS``.  ``random_get`` leaves the buffer as it is, so a controller does the same every time."""
