"""Pictures and sound: a projector turns a file into rows that stand in a prompt in place of tokens.

    with Projector(model, "mmproj.gguf") as projector, projector.decode(Path("cat.png").read_bytes()) as bitmap:
        pieces = projector.encode(bitmap)

Decoding and encoding run code of libmtmd on untrusted input, cannot be interrupted, and may abort the process. So they
belong into a process of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llama_abi.errors import LlamaError, TooManyTokens
from llama_abi.handles import Handle
from llama_abi.model import Model
from llama_abi.mtmd_declarations import CHUNK_TYPE, mtmd_input_text

TEXT = CHUNK_TYPE["MTMD_INPUT_CHUNK_TYPE_TEXT"]
IMAGE = CHUNK_TYPE["MTMD_INPUT_CHUNK_TYPE_IMAGE"]
CHANNELS = 3


@attrs.frozen(eq=False)
class TextPiece:
    """Tokens that a model expects around a picture or sound, or between its parts."""

    tokens: npt.NDArray[np.int32]
    """Shape ``[n]``."""


@attrs.frozen(eq=False)
class MediaPiece:
    """A part of a picture or of sound."""

    rows: npt.NDArray[np.float32]
    """Shape ``[n, n_embd_inp]``: one row for each token that it takes the place of."""
    is_causal: bool
    """Otherwise each row attends to all rows of the piece, so one decode must have them all."""
    columns: int = 0
    """Rows of numbers side by side, where a picture has positions in two dimensions (M-RoPE); otherwise 0. The piece then
    takes as many positions as it is wide or high."""


class Bitmap(Handle):
    """A decoded picture or sound; made by ``Projector``."""

    def __init__(self, library: Any, pointer: Any) -> None:
        super().__init__(pointer, library.mtmd_bitmap_free)
        self._library = library

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of a picture in pixels; of sound, the number of its samples and 1."""
        pointer = self._pointer
        return int(self._library.mtmd_bitmap_get_nx(pointer)), int(self._library.mtmd_bitmap_get_ny(pointer))

    def pixels(self) -> npt.NDArray[np.uint8]:
        """A copy of a picture, ``[height, width, 3]``."""
        width, height = self.size
        data = self._library.mtmd_bitmap_get_data(self._pointer)
        n_bytes = width * height * CHANNELS
        return np.frombuffer(ctypes.string_at(data, n_bytes), np.uint8).reshape(height, width, CHANNELS)


class Projector(Handle):
    """The encoder of a model's pictures or sound, from a GGUF file of its own. Not thread-safe.

    Args:
        model: the text model; one without weights (``no_alloc``) suffices, one with its vocabulary only does not.
        path: the projector's file.
        use_gpu: encode on the first GPU, if there is one.
        n_threads: compute threads.

    Raises:
        LibraryError: the library was built without libmtmd.
        LlamaError: the file cannot be loaded, or belongs to another model. The message includes libmtmd's errors.

    A GGUF file is untrusted input, and some values in it abort the process: check the file first.
    Source: mtmd.h.
    """

    def __init__(self, model: Model, path: str | os.PathLike[str], *, use_gpu: bool = True, n_threads: int = 1) -> None:
        if model.vocab_only:
            raise LlamaError("a projector needs a model that knows its width; this one has its vocabulary only")
        if not os.path.isfile(path):
            raise LlamaError(f"there is no file {os.fspath(path)}")
        self._mtmd = model.library.mtmd
        self._logs = model.library.logs
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu, params.n_threads, params.print_timings, params.warmup = use_gpu, n_threads, False, False
        with self._logs.capture_warnings() as captured:
            try:
                pointer = self._mtmd.mtmd_init_from_file(os.fsencode(path), model._pointer, params)
            except LlamaError:
                raise LlamaError(
                    f"cannot load the projector {os.fspath(path)}: {str(captured) or 'no reason given'}"
                ) from None
        super().__init__(pointer, self._mtmd.mtmd_free, parent=model)
        self.n_embd = model.n_embd_inp
        """Width of a row."""
        self.sees = bool(self._mtmd.mtmd_support_vision(pointer))
        """Whether it encodes pictures."""
        self.hears = bool(self._mtmd.mtmd_support_audio(pointer))
        """Whether it encodes sound."""
        self.sample_rate = int(self._mtmd.mtmd_get_audio_sample_rate(pointer))
        """Samples of a second of decoded sound; -1 if it encodes none."""
        self.uses_mrope = bool(self._mtmd.mtmd_decode_use_mrope(pointer))
        """Whether the rows of a picture have positions in two dimensions (M-RoPE)."""

    def decode(self, data: bytes) -> Bitmap:
        """Decode a file: PNG, JPEG, BMP, GIF (its first frame); WAV, MP3 or FLAC for a projector that hears.

        Blocks without the GIL. Takes as much memory as the picture has pixels, whatever the size of the file: look at
        its header first.

        Raises:
            LlamaError: the file is no such file, or is damaged.
        """
        options = self._mtmd.mtmd_helper_init_opt_default()
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        with self._logs.capture_warnings():
            decoded = self._mtmd.mtmd_helper_bitmap_init_from_buf(self._pointer, buffer, len(data), False, options)
            if not decoded.bitmap:
                raise LlamaError("the file cannot be decoded: it is damaged, or no picture or sound of a known format")
        return Bitmap(self._mtmd, decoded.bitmap)

    def picture(self, pixels: npt.NDArray[np.uint8]) -> Bitmap:
        """A picture from its pixels, ``[height, width, 3]`` in RGB.

        Raises:
            LlamaError: the array has another shape, or no pixels.
        """
        if pixels.ndim != CHANNELS or pixels.shape[2] != CHANNELS or pixels.dtype != np.uint8 or not pixels.size:
            raise LlamaError(f"a picture is uint8 [height, width, 3], not {pixels.dtype} {pixels.shape}")
        height, width, _ = pixels.shape
        data = np.ascontiguousarray(pixels).tobytes()
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return Bitmap(self._mtmd, self._mtmd.mtmd_bitmap_init(width, height, buffer))

    def beginning(self, sound: Bitmap, n_samples: int) -> Bitmap:
        """A copy of the first samples of ``sound``."""
        data = ctypes.cast(self._mtmd.mtmd_bitmap_get_data(sound._pointer), ctypes.POINTER(ctypes.c_float))
        return Bitmap(self._mtmd, self._mtmd.mtmd_bitmap_init_from_audio(min(n_samples, sound.size[0]), data))

    def count_tokens(self, bitmap: Bitmap) -> int:
        """How many tokens and rows ``bitmap`` becomes. Encodes nothing, but computes the spectrum of sound.

        Raises:
            LlamaError: the projector does not take such a bitmap.
        """
        with self._chunks(bitmap) as chunks:
            return self._n_tokens(chunks)

    def encode(self, bitmap: Bitmap, max_tokens: int | None = None) -> list[TextPiece | MediaPiece]:
        """What ``bitmap`` becomes in a prompt, in order. Blocks without the GIL, for as long as it computes.

        Raises:
            TooManyTokens: it would be more than ``max_tokens`` tokens and rows. Nothing has been encoded then.
            LlamaError: the projector does not take such a bitmap, or the computation failed.
        """
        with self._chunks(bitmap) as chunks:
            n_tokens = self._n_tokens(chunks)
            if max_tokens is not None and n_tokens > max_tokens:
                raise TooManyTokens(n_tokens, max_tokens)
            return [self._piece(chunk) for chunk in chunks]

    def _n_tokens(self, chunks: list[Any]) -> int:
        return sum([int(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk)) for chunk in chunks])

    @contextlib.contextmanager
    def _chunks(self, bitmap: Bitmap) -> Iterator[list[Any]]:
        """What is to be encoded of ``bitmap``."""
        text = mtmd_input_text()
        text.text = self._mtmd.mtmd_default_marker()
        text.text_len, text.add_special, text.parse_special = len(text.text), False, True
        bitmaps = (type(bitmap._pointer) * 1)(bitmap._pointer)
        chunks = self._mtmd.mtmd_input_chunks_init()
        try:
            with self._logs.capture_warnings() as captured:
                code = self._mtmd.mtmd_tokenize(self._pointer, chunks, ctypes.byref(text), bitmaps, 1)
                if code:
                    raise LlamaError(
                        f"the projector does not take this: {str(captured) or 'no reason given'}", code=code
                    )
            n_chunks = self._mtmd.mtmd_input_chunks_size(chunks)
            yield [self._mtmd.mtmd_input_chunks_get(chunks, index) for index in range(n_chunks)]
        finally:
            self._mtmd.mtmd_input_chunks_free(chunks)

    def _piece(self, chunk: Any) -> TextPiece | MediaPiece:
        n_tokens = int(self._mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        if self._mtmd.mtmd_input_chunk_get_type(chunk) == TEXT:
            count = ctypes.c_size_t()
            tokens = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
            return TextPiece(np.array(tokens[: count.value], np.int32))
        with self._logs.capture_warnings() as captured:
            if code := self._mtmd.mtmd_encode_chunk(self._pointer, chunk):
                raise LlamaError(f"the projector failed: {str(captured) or 'no reason given'}", code=code)
        address = ctypes.cast(self._mtmd.mtmd_get_output_embd(self._pointer), ctypes.c_void_p).value
        memory = (ctypes.c_float * (n_tokens * self.n_embd)).from_address(address or 0)
        rows = np.array(memory, np.float32).reshape(n_tokens, self.n_embd)
        is_causal = not self._mtmd.mtmd_decode_use_non_causal(self._pointer, chunk)
        return MediaPiece(rows, is_causal, self._columns(chunk, n_tokens))

    def _columns(self, chunk: Any, n_tokens: int) -> int:
        """See ``MediaPiece``.

        Raises:
            LlamaError: the positions of the rows are no grid of columns.
        """
        if not self.uses_mrope or self._mtmd.mtmd_input_chunk_get_type(chunk) != IMAGE:
            return 0
        image = self._mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        places = [self._mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, index) for index in range(n_tokens)]
        columns = int(max([place.x for place in places])) + 1
        expected = [(0, *divmod(index, columns)) for index in range(n_tokens)]
        n_positions = int(self._mtmd.mtmd_input_chunk_get_n_pos(chunk))
        if [(place.t, place.y, place.x) for place in places] != expected or n_positions != max(
            columns, -(-n_tokens // columns)
        ):
            raise LlamaError("the projector gives its rows positions of an unknown kind")
        return columns
