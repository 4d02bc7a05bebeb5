"""The process that encodes pictures and sound: ``python -m uma_trio.encoder``, started by ``encoder.SandboxedEncoder`` alone."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil

import llama_abi
from llama_abi import LibraryError, LlamaError, MediaPiece, TooManyTokens
from uma_trio.encoder.media_file import MediaFile, inspect
from uma_trio.encoder.refusals import Refused
from uma_trio.encoder.sound_file import checked_length
from uma_trio.processes.sandbox import limit_memory

MEMORY_BYTES: Final = 2 << 30
"""Address space for decoding and encoding a file, besides what the process has when its projector is loaded."""

WINDOW_SECONDS: Final = 30
"""Sound that an encoder of Whisper's kind makes into a fixed number of rows; less has as many."""
COUNTED_SECONDS: Final = WINDOW_SECONDS - 1
"""Beginning of sound whose rows are counted before those of all of it."""
EDGE_TOKENS: Final = 32
"""Tokens around such a window, that sound of several has only once, at most."""

Pixels = npt.NDArray[np.uint8]


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Turn ``[height, width, 3]`` as EXIF's ``orientation`` says."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


class Encoder:
    """A loaded projector.

    Raises:
        LibraryError, LlamaError: it cannot be loaded.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        folder = setup["llama_dir"]
        library = llama_abi.load(None if folder is None else Path(folder))
        self._model = llama_abi.Model(library, setup["model"], no_alloc=True)
        self._projector = llama_abi.Projector(
            self._model, setup["path"], use_gpu=setup["use_gpu"], n_threads=setup["n_threads"]
        )
        self._max_tokens = setup["max_tokens"]
        self.abilities = {"sees": self._projector.sees, "hears": self._projector.hears}
        if not setup["use_gpu"]:  # drivers of GPUs reserve more address space than there is memory
            limit_memory(psutil.Process().memory_info().vms + MEMORY_BYTES)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Encode a file and write its rows.

        Raises:
            LlamaError, Refused: the file cannot be encoded.
            TooManyTokens: it would have too many.
        """
        data = Path(question["file"]).read_bytes()
        media = inspect(data)
        if media.is_sound != question["is_sound"]:
            raise Refused(f"the file is {'sound' if media.is_sound else 'a picture'}: send it as such")
        parts: list[dict[str, Any] | list[int]] = []
        n_rows = 0
        with self._bitmap(data, media) as bitmap, open(question["rows"], "wb") as file:
            for piece in self._projector.encode(bitmap, self._max_tokens):
                if not isinstance(piece, MediaPiece):
                    parts.append(piece.tokens.tolist())
                    continue
                if not np.isfinite(piece.rows).all():
                    raise Refused("the projector makes no finite numbers of this file")
                file.write(piece.rows.tobytes())
                parts.append({"n": len(piece.rows), "is_causal": piece.is_causal, "columns": piece.columns})
                n_rows += len(piece.rows)
        return {"parts": parts, "n_rows": n_rows, "width": self._projector.n_embd}

    def _bitmap(self, data: bytes, media: MediaFile) -> llama_abi.Bitmap:
        bitmap = self._projector.decode(data)
        if media.is_sound:
            self._check_rows(bitmap, checked_length(bitmap.size[0] / self._projector.sample_rate))
            return bitmap
        if bitmap.size != (media.width, media.height):
            raise Refused("the file's header does not give the size of its picture: it is damaged, send another one")
        if media.orientation == 1:
            return bitmap
        with bitmap:
            pixels = bitmap.pixels()
        return self._projector.picture(upright(pixels, media.orientation))

    def _check_rows(self, sound: llama_abi.Bitmap, seconds: float) -> None:
        """Refuse sound that has too many rows, by those of its beginning.

        The spectrum of half an hour takes ten seconds of CPU time, and a file of some kB can be so long.
        """
        n_windows = int(seconds) // WINDOW_SECONDS
        if n_windows < 2:
            return
        with self._projector.beginning(sound, COUNTED_SECONDS * self._projector.sample_rate) as beginning:
            least = n_windows * max(0, self._projector.count_tokens(beginning) - EDGE_TOKENS)
        if least > self._max_tokens:
            raise TooManyTokens(least, self._max_tokens)


def _serve() -> None:
    lines = map(json.loads, sys.stdin.buffer)
    setup = next(lines)
    try:
        encoder = Encoder(setup)
    except (LibraryError, LlamaError) as error:
        _send({"error": str(error)})
        return
    os.nice(setup["niceness"])  # the start waits for what comes before
    _send(encoder.abilities)
    for question in lines:
        try:
            answer = encoder.answer(question)
        except TooManyTokens as error:
            answer = {"n_tokens": error.n_tokens}
        except (LlamaError, Refused) as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": "the file takes too much memory"}
        _send(answer)


def _send(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve the daemon at the other end of stdin and stdout."""
    logging.getLogger("llama_abi").setLevel(logging.ERROR)
    _serve()


if __name__ == "__main__":
    main()
