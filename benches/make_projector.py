"""Write a projector for pictures with random weights, for any text model.

    python benches/make_projector.py --model /tmp/tiny.gguf --out /tmp/mmproj-tiny.gguf

The projector is a LLaVA one: a CLIP encoder and two matrices to the width of the text model; or, with ``--kind gemma3``,
that of Gemma 3: a SigLIP encoder whose rows are averaged over squares of patches; or, with ``--kind qwen2vl_merger``, that
of Qwen2-VL, which takes pictures of any size, for models with positions in two dimensions.  ``--kind qwen2a`` is for
sound: a Whisper encoder with the matrix of Qwen2-Audio.  Encoding is as fast as with
trained weights of its shape, but a picture has no meaning.  The same arguments write the same file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import click
import gguf
import numpy as np
import numpy.typing as npt
from gguf_file import Reader, write_to_end

CLIP_MEAN: Final = [0.48145466, 0.4578275, 0.40821073]
CLIP_DEVIATION: Final = [0.26862954, 0.26130258, 0.27577711]


@attrs.frozen
class ProjectorShape:
    """Sizes of an encoder."""

    image_size: int
    """Width and height of the picture that it sees, in pixels."""
    patch_size: int
    width: int
    layers: int
    """One more than it computes: LLaVA leaves out the last one."""
    heads: int
    ffn: int

    @property
    def n_patches(self) -> int:
        """Squares that the encoder cuts a picture into."""
        return int((self.image_size // self.patch_size) ** 2)


SHAPES: Final = {
    "tiny": ProjectorShape(image_size=56, patch_size=14, width=32, layers=3, heads=2, ffn=64),
    "tiny-siglip": ProjectorShape(image_size=112, patch_size=14, width=32, layers=3, heads=2, ffn=64),
    "vit-s": ProjectorShape(image_size=224, patch_size=16, width=384, layers=13, heads=6, ffn=1536),
    "vit-b": ProjectorShape(image_size=224, patch_size=16, width=768, layers=13, heads=12, ffn=3072),
    "clip-l": ProjectorShape(image_size=336, patch_size=14, width=1024, layers=24, heads=16, ffn=4096),
}

KINDS: Final = ("mlp", "gemma3", "qwen2vl_merger", "qwen2a")
"""Types of projectors, as llama.cpp calls them."""
MEL_BINS: Final = 128
MEL_FRAMES: Final = 3000
"""Frames of the spectrum of 30 s of sound."""
MERGED: Final = 2
"""Side of the squares of patches that the projectors of Gemma 3 and Qwen2-VL make one row of."""

Weights = npt.NDArray[np.float16] | npt.NDArray[np.float32]


def _tensors(shape: ProjectorShape, n_embd: int, kind: str, seed: int) -> Iterator[tuple[str, Weights]]:
    noise = np.random.default_rng(seed)
    width = shape.width

    def matrix(rows: int, columns: int) -> Weights:
        made: Weights = (noise.standard_normal((rows, columns), np.float32) / np.sqrt(columns)).astype(np.float16)
        return made

    def bias(n: int) -> Weights:
        return 0.02 * noise.standard_normal(n, np.float32)

    patch = (width, 3, shape.patch_size, shape.patch_size)
    yield "v.patch_embd.weight", noise.standard_normal(patch, np.float32) / np.float32(np.sqrt(np.prod(patch[1:])))
    norms = ["v.post_ln"]
    if kind == "qwen2vl_merger":  # for the second picture of a film
        yield (
            "v.patch_embd.weight.1",
            noise.standard_normal(patch, np.float32) / np.float32(np.sqrt(np.prod(patch[1:]))),
        )
    if kind == "mlp":
        yield "v.class_embd", noise.standard_normal(width, np.float32)
        norms.append("v.pre_ln")
    n_positions = shape.n_patches + (kind == "mlp")
    if kind != "qwen2vl_merger":
        yield "v.position_embd.weight", noise.standard_normal((n_positions, width), np.float32)
    for layer in range(shape.layers):
        name = f"v.blk.{layer}"
        norms += [f"{name}.ln1", f"{name}.ln2"]
        sizes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (width, width))
        for part, size in {**sizes, "ffn_up": (shape.ffn, width), "ffn_down": (width, shape.ffn)}.items():
            yield f"{name}.{part}.weight", matrix(*size)
            yield f"{name}.{part}.bias", bias(size[0])
    for name in norms:
        yield f"{name}.weight", np.ones(width, np.float32)
        yield f"{name}.bias", bias(width)
    if kind == "gemma3":
        yield "mm.soft_emb_norm.weight", np.ones(width, np.float32)
        yield "mm.input_projection.weight", matrix(n_embd, width).T.copy()
        return
    merged = MERGED**2 * width if kind == "qwen2vl_merger" else width
    hidden = merged if kind == "qwen2vl_merger" else n_embd
    for number, rows, columns in ((0, hidden, merged), (2, n_embd, hidden)):
        yield f"mm.{number}.weight", matrix(rows, columns)
        yield f"mm.{number}.bias", bias(rows)


def _tensors_of_sound(shape: ProjectorShape, n_embd: int, seed: int) -> Iterator[tuple[str, Weights]]:
    """Those of a Whisper encoder, and one matrix to the width of the text model."""
    noise = np.random.default_rng(seed)
    width = shape.width

    def matrix(*sizes: int) -> Weights:
        made: Weights = (noise.standard_normal(sizes, np.float32) / np.sqrt(np.prod(sizes[1:]))).astype(np.float16)
        return made

    def bias(*sizes: int) -> Weights:
        return 0.02 * noise.standard_normal(sizes, np.float32)

    for number, channels in ((1, MEL_BINS), (2, width)):
        yield f"a.conv1d.{number}.weight", matrix(width, channels, 3)
        yield f"a.conv1d.{number}.bias", bias(width, 1)
    yield "a.position_embd.weight", noise.standard_normal((MEL_FRAMES // 2, width), np.float32)
    norms = ["a.post_ln"]
    for layer in range(shape.layers):
        name = f"a.blk.{layer}"
        norms += [f"{name}.ln1", f"{name}.ln2"]
        sizes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (width, width))
        for part, size in {**sizes, "ffn_up": (shape.ffn, width), "ffn_down": (width, shape.ffn)}.items():
            yield f"{name}.{part}.weight", matrix(*size)
            if part != "attn_k":
                yield f"{name}.{part}.bias", bias(size[0])
    for name in norms:
        yield f"{name}.weight", np.ones(width, np.float32)
        yield f"{name}.bias", bias(width)
    yield "mm.a.fc.weight", matrix(n_embd, width)
    yield "mm.a.fc.bias", bias(n_embd)


def width_of(model: Path) -> int:
    """Width of a text model."""
    fields = Reader(model).fields
    architecture = fields["general.architecture"].contents()
    return int(fields[f"{architecture}.embedding_length"].contents())


def make_projector(out: Path, model: Path, shape: ProjectorShape, *, kind: str = "mlp", seed: int = 0) -> None:
    """Write the file ``out``, which appears when it is complete.  Blocks until then.

    Args:
        model: the text model.
        kind: one of ``KINDS``.
    """
    n_embd = width_of(model)
    part = out.with_name(out.name + ".part")
    writer = gguf.GGUFWriter(part, "clip")
    writer.add_type("mmproj")
    writer.add_name(f"random {out.stem}")
    hears = kind == "qwen2a"
    encoder = "audio" if hears else "vision"
    writer.add_string("clip.projector_type", kind)
    writer.add_bool(f"clip.has_{encoder}_encoder", True)
    writer.add_bool("clip.use_gelu", False)
    numbers = {
        **({"num_mel_bins": MEL_BINS} if hears else {"image_size": shape.image_size, "patch_size": shape.patch_size}),
        "embedding_length": shape.width,
        "feed_forward_length": shape.ffn,
        "projection_dim": n_embd,
        "attention.head_count": shape.heads,
        "block_count": shape.layers,
    }
    for name, value in numbers.items():
        writer.add_uint32(f"clip.{encoder}.{name}", value)
    if kind == "gemma3":
        writer.add_uint32("clip.vision.projector.scale_factor", MERGED)
    writer.add_float32(f"clip.{encoder}.attention.layer_norm_epsilon", 1e-5)
    if not hears:
        writer.add_array("clip.vision.image_mean", CLIP_MEAN)
        writer.add_array("clip.vision.image_std", CLIP_DEVIATION)
    made = _tensors_of_sound(shape, n_embd, seed) if hears else _tensors(shape, n_embd, kind, seed)
    for name, weights in made:
        writer.add_tensor(name, weights)
    try:
        write_to_end(writer)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), required=True, help="The text model, a GGUF file."
)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="tiny", show_default=True)
@click.option("--kind", type=click.Choice(KINDS), default="mlp", show_default=True, help="Type of projector.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File to write.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def main(model: Path, shape: str, kind: str, out: Path, seed: int) -> None:
    make_projector(out, model, SHAPES[shape], kind=kind, seed=seed)
    click.echo(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
