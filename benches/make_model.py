"""Write a GGUF file of any size with random weights and a real vocabulary.

    python benches/make_model.py --shape 125m --quant q8_0 --out /tmp/125m.gguf

The model is as fast as a trained one of its shape, but its text has no meaning.  Sequences of the shapes tiny-swa,
tiny-hybrid, tiny-hybrid-mrope and 125m-hybrid cannot be truncated.  Those with bert in their names are encoders: they embed texts, and
those of tiny-bert-rank, 33m-bert-rank and tiny-qwen3-rank rank documents.

Weights are scaled so that activations keep their size from layer to layer, and logits have a standard deviation of 3, so
that greedy text uses the whole vocabulary.  The same arguments write the same file.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import gguf
import numpy as np
import numpy.typing as npt
from gguf_file import Reader, Writer, copy_fields
from model_shapes import BLOCK, QUANTS, SHAPES, VECTORS, Shape, Tensor, describe, parse_shape, tensors
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

CHUNK_BYTES = 16 << 20
"""Bytes that are generated and written at once, so that memory stays small."""


def random_rows(
    noise: np.random.SFC64, rows: int, columns: int, deviation: float, kind: gguf.GGMLQuantizationType
) -> npt.NDArray[np.uint8]:
    """Rows of a matrix in its file format, ``[rows, bytes in a row]``, made directly from random bytes."""
    if kind in (VECTORS, gguf.GGMLQuantizationType.F16):
        values = np.linspace(-1, 1, 256) * deviation * math.sqrt(3)
        table = values.astype(np.float32 if kind == VECTORS else np.float16)
        return table[_bytes(noise, rows * columns)].reshape(rows, columns).view(np.uint8)
    if kind == gguf.GGMLQuantizationType.Q4_K:
        return _rows_of_q4_k(noise, rows, columns, deviation)
    blocks = rows * columns // BLOCK
    if kind == gguf.GGMLQuantizationType.Q8_0:
        levels = np.maximum(_bytes(noise, blocks * BLOCK).view(np.int8), -127)
        quants = levels.view(np.uint8).reshape(blocks, BLOCK)
        scale = deviation / math.sqrt(127 * 128 / 3)
    else:
        quants = _bytes(noise, blocks * BLOCK // 2).reshape(blocks, BLOCK // 2)
        scale = deviation / math.sqrt((16**2 - 1) / 12)
    # 4-bit levels are -8 to 7 times the scale; random signs of the scales make the mean 0
    signs = _bytes(noise, blocks) & 1
    scales = np.array([scale, -scale], np.float16)[signs]
    made = np.concatenate([scales[:, np.newaxis].view(np.uint8), quants], axis=1)
    return made.reshape(rows, -1)


def _rows_of_q4_k(noise: np.random.SFC64, rows: int, columns: int, deviation: float) -> npt.NDArray[np.uint8]:
    """Levels from 0 to 15, scaled and moved so that their mean is 0.  Random signs of both make blocks differ."""
    n_weights, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_K]
    blocks = rows * columns // n_weights
    quants = _bytes(noise, blocks * n_weights // 2).reshape(blocks, n_weights // 2)
    # all eight scales and minima of a block are 32, in six bits each
    packed = np.tile(np.array([160] * 8 + [0] * 4, np.uint8), (blocks, 1))
    scale = deviation / math.sqrt((16**2 - 1) / 12) / 32
    pairs = np.array([[scale, 7.5 * scale], [-scale, -7.5 * scale]], np.float16)[_bytes(noise, blocks) & 1]
    return np.concatenate([pairs.view(np.uint8), packed, quants], axis=1).reshape(rows, -1)


def _bytes(noise: np.random.SFC64, count: int) -> npt.NDArray[np.uint8]:
    raw: npt.NDArray[np.uint64] = noise.random_raw(-(-count // 8))
    return raw.view(np.uint8)[:count]


def tensor_bytes(tensor: Tensor, quant: str, seed: int, index: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the data of one tensor in chunks of whole rows."""
    if tensor.deviation is None:
        yield np.full(tensor.columns, tensor.value, np.float32).view(np.uint8)
        return
    noise = np.random.SFC64(np.random.SeedSequence([seed, index]))
    row_bytes = gguf.quant_shape_to_byte_shape((1, tensor.columns), tensor.ggml_type(quant))[1]
    step = max(1, CHUNK_BYTES // row_bytes)
    for first in range(0, tensor.rows, step):
        rows = min(step, tensor.rows - first)
        made = random_rows(noise, rows, tensor.columns, tensor.deviation, tensor.ggml_type(quant))
        silent = tensor.silent_rows[(tensor.silent_rows >= first) & (tensor.silent_rows < first + rows)]
        made[silent - first] = 0  # zeros in F16; otherwise a scale of zero
        yield made


def make_model(
    out: Path,
    shape: Shape,
    quant: str,
    *,
    vocabulary: Path | None = None,
    ctx: int = 8192,
    seed: int = 0,
    progress: bool = False,
) -> None:
    """Write the file ``out``, which appears when it is complete.  Blocks until then.

    Args:
        quant: a key of ``QUANTS``.
        vocabulary: a GGUF file whose ``tokenizer.*`` entries are copied; ``None`` for one that suits the shape.
        ctx: training context that the file declares, in tokens.

    Raises:
        FileNotFoundError: there is no such vocabulary; the message has a remedy.
        OSError: the disk is too small, or the file cannot be written.
    """
    vocabulary = vocabulary or shape.vocabulary
    if not vocabulary.exists():
        raise FileNotFoundError(f"there is no vocabulary at {vocabulary}: run ./build_llama.sh, or give --vocab PATH")
    reader = Reader(vocabulary)
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    all_tensors = list(tensors(shape, n_vocab, _special_tokens(reader, n_vocab), ctx))

    part = out.with_name(out.name + ".part")
    writer = Writer(part, shape.architecture)
    writer.add_name(f"random {out.stem}")
    describe(writer, shape, quant, n_vocab, ctx)
    copy_fields(reader, writer, "tokenizer.")
    total = 0
    for tensor in all_tensors:
        ggml_type = tensor.ggml_type(quant)
        n_bytes = math.prod(gguf.quant_shape_to_byte_shape(tensor.shape, ggml_type))
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, ggml_type)
        total += n_bytes
    free = shutil.disk_usage(out.parent).free
    if free < total + (16 << 20):
        raise OSError(f"{out.parent} has {free >> 20} MiB free, and the model takes {total >> 20} MiB")
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn(),
        disable=not progress,
    )  # fmt: skip
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (file,) = writer.fout
        with bar:
            task = bar.add_task(out.name, total=total)
            writer.write_padding(file, file.tell())
            for index, tensor in enumerate(all_tensors):
                for made in tensor_bytes(tensor, quant, seed, index):
                    file.write(made.data)
                    bar.advance(task, made.nbytes)
                writer.write_padding(file, file.tell())
        writer.close()
        part.replace(out)
    finally:
        writer.close()
        part.unlink(missing_ok=True)


def _special_tokens(reader: gguf.GGUFReader, n_vocab: int) -> npt.NDArray[np.intp]:
    """Control, unknown and unused tokens, which should not appear in the text."""
    types = reader.fields.get("tokenizer.ggml.token_type")
    kinds = np.array(types.contents() if types else [gguf.TokenType.NORMAL] * n_vocab)
    return np.flatnonzero(np.isin(kinds, (gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED)))


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--shape",
    "shape_text",
    default="125m",
    show_default=True,
    help=f"{', '.join(SHAPES)}, or LAYERSxWIDTH[xHEADS[xKVHEADS[xFFN]]].",
)
@click.option("--quant", type=click.Choice(list(QUANTS)), default="q8_0", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File to write.")
@click.option(
    "--vocab",
    type=click.Path(path_type=Path),
    help="GGUF file with the vocabulary.  If not given, one of llama.cpp's that suits the shape.",
)
@click.option(
    "--ctx",
    type=click.IntRange(min=16),
    default=8192,
    show_default=True,
    help="Training context that the file declares.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def main(shape_text: str, quant: str, out: Path, vocab: Path | None, ctx: int, seed: int) -> None:
    try:
        shape = parse_shape(shape_text)
        make_model(out, shape, quant, vocabulary=vocab, ctx=ctx, seed=seed, progress=sys.stderr.isatty())
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out}: {out.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
