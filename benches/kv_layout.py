"""Measure the duration of llama_decode for each layout of the KV cache: unified or per sequence, with flash attention or without.

The rule in engine/layout.py rests on these figures.  Needs a model: benches/make_model.py --shape 125m --quant q8_0 --out FILE.

    python benches/kv_layout.py --model /tmp/125m.gguf --threads 1
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click
import numpy as np
from machine import machine

import llama_abi

Feeds = tuple[tuple[int, int], ...]

FILL = 1536
"""Tokens that sequences 1 to 5 have before each measurement."""

CASES: dict[str, Feeds] = {
    "1 decode": ((1, 1),),
    "4 decodes": ((1, 1), (2, 1), (3, 1), (4, 1)),
    "chunk of 16": ((5, 16),),
    "chunk of 63": ((5, 63),),
    "chunk of 64": ((5, 64),),
    "chunk of 256": ((5, 256),),
    "4 decodes and 64": ((1, 1), (2, 1), (3, 1), (4, 1), (5, 64)),
}


class Bench:
    """A context with one layout, and the number of tokens of each sequence."""

    def __init__(self, model: llama_abi.Model, *, unified: bool, flash_attn: str, threads: int) -> None:
        self._context = llama_abi.Context(
            model,
            llama_abi.ContextOptions(
                n_ctx=32768, n_batch=512, n_ubatch=512, n_seq_max=8, n_threads=threads, n_threads_batch=threads,
                kv_unified=unified, flash_attn=flash_attn,
            ),
        )  # fmt: skip
        self._batch = llama_abi.Batch(512)
        self._held: dict[int, int] = {}

    def ms(self, feeds: Feeds) -> float:
        """Duration of one call with ``feeds``, pairs of sequence and number of tokens, in ms."""
        self._batch.clear()
        for seq, n in feeds:
            pos = self._held.get(seq, 0)
            self._batch.add(np.arange(pos, pos + n, dtype=np.int32) % 1000 + 5, pos=pos, seq=seq)
            self._held[seq] = pos + n
        began = time.perf_counter()
        self._context.decode(self._batch)
        self._context.synchronize()
        return 1e3 * (time.perf_counter() - began)

    def truncate(self) -> None:
        """Truncate sequences 1 to 5 to ``FILL`` tokens."""
        for seq in range(1, 6):
            self._context.seq_remove(seq, FILL, -1)
            self._held[seq] = min(self._held.get(seq, 0), FILL)

    def close(self) -> None:
        self._context.close()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="GGUF file.")
@click.option(
    "--threads", envvar="UMA_THREADS", type=click.IntRange(1), default=1, show_default=True, help="Compute threads."
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Runs of each case; the table has the medians.",
)
def main(model: Path, threads: int, repeat: int) -> None:
    """Measure the duration of llama_decode for each layout of the KV cache, in ms.

    Five sequences have 1,536 tokens each.  The measured tokens follow these and are removed again.
    """
    for line in machine():
        click.echo(line)
    click.echo(f"model     {model.name}, {threads} threads\n")
    layouts = [(unified, flash) for unified in (False, True) for flash in ("off", "on")]
    columns: list[dict[str, float]] = []
    with llama_abi.Model(llama_abi.load(), model) as loaded:
        for unified, flash in layouts:
            bench = Bench(loaded, unified=unified, flash_attn=flash, threads=threads)
            filling = sum(bench.ms(((seq, 512),)) for seq in range(1, 6) for _ in range(FILL // 512))
            column = {f"5 x {FILL} tokens in chunks of 512": filling}
            for name, feeds in CASES.items():
                times = []
                for _ in range(repeat):
                    bench.truncate()
                    times.append(bench.ms(feeds))
                column[name] = statistics.median(times)
            columns.append(column)
            bench.close()
    heads = [f"{'unified' if unified else 'per sequence'}, flash {flash}" for unified, flash in layouts]
    click.echo(f"| {'ms':<34} | " + " | ".join(heads) + " |")
    click.echo(f"|{'-' * 36}|" + "|".join("-" * (len(head) + 1) + ":" for head in heads) + "|")
    for name in columns[0]:
        cells = [f"{column[name]:>{len(head)}.1f}" for column, head in zip(columns, heads, strict=True)]
        click.echo(f"| {name:<34} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
