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
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from llama_abi.stamp import Stamp, library_directory
from uma_trio.encoder.refusals import Refused, TooManyRows
from uma_trio.engine_link.media import PLACEHOLDER, STANDING
from uma_trio.errors import ModelUnavailable
from uma_trio.processes.interpreter import python_module
from uma_trio.processes.sandbox import CannotStart, Interrupted, NoAnswer, Sandbox

ANSWER_SECONDS: Final = 120.0
BUSY_SECONDS: Final = 600.0
"""Longest wait for a picture on a machine that is so busy that the child has not had ``ANSWER_SECONDS`` of CPU time."""
SHARED_MEMORY: Final = Path("/dev/shm")


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


def library_version(llama_dir: Path | None) -> str:
    """Which llama.cpp the library in ``llama_dir``, or the default one, was built of."""
    return Stamp.read(library_directory(llama_dir)).pin


@attrs.frozen(eq=False)
class RowFile:
    """Rows of numbers in shared memory, float32 ``[n, width]``. The file ends with this object."""

    fd: int
    n: int
    width: int

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, os.close, self.fd)

    @classmethod
    def of(cls, rows: npt.NDArray[np.float32]) -> RowFile:
        """A file with ``rows``, ``[n, width]``."""
        with tempfile.TemporaryFile(dir=_memory_folder()) as file:
            file.write(rows.tobytes())
            file.flush()
            return cls(os.dup(file.fileno()), *rows.shape)

    def read(self, start: int, n: int) -> npt.NDArray[np.float32]:
        """A copy of ``n`` rows from ``start`` on."""
        row_bytes = 4 * self.width
        data = os.pread(self.fd, n * row_bytes, start * row_bytes)
        return np.frombuffer(data, np.float32).reshape(n, self.width)


@attrs.frozen
class RowBlock:
    """Rows that are one picture, a part of one, or a part of sound."""

    n: int
    is_causal: bool = True
    """Otherwise each of them attends to all of them, so one step computes them all."""
    columns: int = 0
    """Columns of a picture with positions in two dimensions (M-RoPE); otherwise 0."""

    @property
    def n_positions(self) -> int:
        """Positions that they take in the prompt."""
        return max(self.columns, -(-self.n // self.columns)) if self.columns else self.n


@attrs.frozen(eq=False)
class EncodedMedia:
    """A picture or sound as it stands in a prompt."""

    tokens: npt.NDArray[np.int32]
    """Shape ``[n]``: tokens that the model expects around it, and one placeholder for each row.

    Placeholders are made of a hash of the file. So equal files have equal ids and others do not, and whatever compares
    prefixes by their tokens also compares pictures."""
    rows: RowFile
    """What stands in place of the placeholders, in their order."""
    blocks: Sequence[RowBlock]
    """What the rows are, in their order."""


def _memory_folder() -> Path | None:
    """Where files in shared memory are; ``None``: that of temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None


def placeholders(digest: bytes, blocks: Sequence[RowBlock]) -> npt.NDArray[np.int32]:
    """Ids for the rows of the file whose SHA-256 is ``digest``."""
    words = np.frombuffer(digest, "<u4") % (STANDING - PLACEHOLDER) + PLACEHOLDER
    ids = np.resize(words, sum([block.n for block in blocks])).astype(np.int32)
    at = 0
    for block in blocks:
        ids[at : at + block.n - block.n_positions] += STANDING - PLACEHOLDER
        at += block.n
    return ids


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
        self._fingerprint = fingerprint.encode()
        self._folder = Path(tempfile.mkdtemp(prefix="uma-media-", dir=_memory_folder()))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
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
            Refused: it is no picture or sound that the projector takes, it is too large or damaged, or the child died
                of it.
            TooManyRows: it would have more than ``max_tokens``.
            ModelUnavailable: the child does not start, or somebody has ended it twice.
        """
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
        found = [RowBlock(**part) if isinstance(part, dict) else np.array(part, np.int32) for part in answer["parts"]]
        blocks = [part for part in found if isinstance(part, RowBlock)]
        ids, at = placeholders(self.digest(data), blocks), 0
        parts: list[npt.NDArray[np.int32]] = []
        for part in found:
            if isinstance(part, RowBlock):
                parts.append(ids[at : at + part.n])
                at += part.n
            else:
                parts.append(part)
        return EncodedMedia(np.concatenate(parts), rows, blocks)

    @contextlib.contextmanager
    def _files(self) -> Iterator[tuple[Path, Path]]:
        """Two files for one question, which have no names afterwards."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            yield Path(folder, "given"), Path(folder, "rows")
