"""Encodes files with a model's projector, in a child process within limits of memory and time.

Image files come from anywhere, their decoders are C code, and encoding cannot be interrupted. A file that crashes the
child or takes too long costs its own request an error, and nothing else waits. ``__main__.py`` is the child.

The child writes what it has encoded into a file in shared memory. The file has no name when ``encode`` returns, so it
ends with its last descriptor.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from llama_abi.locations import library_directory
from llama_abi.stamp import Stamp
from uma_trio.encoder.encoded import EncodedMedia, RowBlock, RowFile, memory_folder, placeholders
from uma_trio.encoder.refusals import Refused, TooManyRows
from uma_trio.engine_link.devices import size
from uma_trio.errors import ModelUnavailable
from uma_trio.models.projector import encodes, encoding_bytes
from uma_trio.processes.interpreter import python_module
from uma_trio.processes.machine import free_memory_bytes
from uma_trio.processes.sandbox import CannotStart, Interrupted, NoAnswer, Sandbox

ANSWER_SECONDS: Final = 120.0
BUSY_SECONDS: Final = 600.0
"""Longest wait for a picture on a machine that is so busy that the child has not had ``ANSWER_SECONDS`` of CPU time."""


@attrs.frozen
class Projector:
    """Which projector encodes, and how."""

    path: Path
    """A GGUF file."""
    model: Path
    """The text model that it belongs to."""
    use_gpu: bool = False
    n_threads: int = 1
    niceness: int = 0
    """How far its process gives way to others."""
    max_tokens: int = sys.maxsize
    """What has more of them is refused before it is encoded."""
    llama_dir: Path | None = None


@attrs.frozen
class Abilities:
    """What a projector encodes."""

    sees: bool
    hears: bool

    @classmethod
    def of(cls, projector: Projector) -> Abilities:
        """What the file says, which libmtmd need not be able to use."""
        return cls(*encodes(projector.path))


def library_version(llama_dir: Path | None) -> str:
    """Which llama.cpp the library in ``llama_dir``, or the default one, was built of."""
    return Stamp.read(library_directory(llama_dir)).pin


def _setup(projector: Projector) -> dict[str, Any]:
    """The first message to a child: the fields of ``projector``, with texts in place of paths."""
    fields = attrs.asdict(projector)
    return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}


class SandboxedEncoder:
    """Encodes in a child process, which starts with the first file at the latest. Thread-safe; files take turns.

    Args:
        fingerprint: of the projector's file: what another projector makes of a picture has other placeholders.
    """

    def __init__(self, projector: Projector, fingerprint: str) -> None:
        self._projector = projector
        self._fingerprint = fingerprint.encode()
        self._sandbox = Sandbox(
            python_module("uma_trio.encoder"), lambda: _setup(projector), ANSWER_SECONDS, BUSY_SECONDS
        )

    def start(self) -> Abilities:
        """Start the process, unless it runs; returns what the projector can.  Blocks while it is loaded.

        Raises:
            CannotStart, Ended: it does not start, or cannot use the projector.
        """
        return Abilities(**self._sandbox.start())

    def close(self) -> None:
        """End the process. The next file would start another one."""
        self._sandbox.stop()

    def digest(self, data: bytes) -> bytes:
        """32 bytes that name what the projector makes of a file."""
        return hashlib.sha256(self._fingerprint + hashlib.sha256(data).digest()).digest()

    def encode(self, data: bytes, is_sound: bool = False) -> EncodedMedia:
        """Encode a file. Blocks for ``ANSWER_SECONDS`` or ``BUSY_SECONDS`` at most, and the turns of other files.

        Raises:
            Refused: the file is not a picture or sound that the projector takes, is too large or damaged, or has ended
                the child.
            TooManyRows: the file would have more than ``max_tokens`` rows.
            ModelUnavailable: the child does not start, there is no memory for it, or somebody has ended it twice.
        """
        if not self._sandbox.is_running:
            self._check_memory()
        with self._files() as (given, made):
            given.write_bytes(data)
            try:
                answer = self._sandbox.ask({"file": str(given), "rows": str(made), "is_sound": is_sound})
            except CannotStart as error:
                raise ModelUnavailable(f"the encoder of pictures cannot start: {error}") from None
            except Interrupted as error:
                raise ModelUnavailable(f"the file could not be encoded: {error}; send the request again") from None
            except NoAnswer as error:
                raise Refused(f"the file cannot be encoded: {error}; send another one") from None
            if "error" in answer:
                raise Refused(answer["error"])
            if "n_tokens" in answer:
                raise TooManyRows(answer["n_tokens"])
            fd = os.open(made, os.O_RDONLY)
        rows = RowFile(fd, answer["n_rows"], answer["width"])
        blocks_and_tokens = [
            RowBlock(**part) if isinstance(part, dict) else np.array(part, np.int32) for part in answer["parts"]
        ]
        blocks = [part for part in blocks_and_tokens if isinstance(part, RowBlock)]
        ids, at = placeholders(self.digest(data), blocks), 0
        parts: list[npt.NDArray[np.int32]] = []
        for part in blocks_and_tokens:
            if isinstance(part, RowBlock):
                parts.append(ids[at : at + part.n])
                at += part.n
            else:
                parts.append(part)
        return EncodedMedia(np.concatenate(parts), rows, blocks)

    def _check_memory(self) -> None:
        """
        Raises:
            ModelUnavailable: a new process would have too little.
        """
        if self._projector.use_gpu:  # only the driver knows
            return
        try:
            needed, free = encoding_bytes(self._projector.path), free_memory_bytes(swap=False)
        except OSError:  # the file has gone: the process will say so
            return
        if free < needed:
            raise ModelUnavailable(
                f"there is no memory for the encoder of pictures now: it takes {size(needed)}, and {size(free)} are free; "
                "end other programs and send the request again, or start uma-trio serve with a smaller --ctx or projector"
            )

    @contextlib.contextmanager
    def _files(self) -> Iterator[tuple[Path, Path]]:
        """Two files for one question, which have no names afterwards."""
        with tempfile.TemporaryDirectory(prefix="uma-media-", dir=memory_folder()) as folder:
            yield Path(folder, "given"), Path(folder, "rows")
