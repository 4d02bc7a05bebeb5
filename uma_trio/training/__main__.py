"""``python -m uma_trio.training``: train the embedded model and write its GGUF and model card."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from random import Random
from typing import Any

import attrs

from uma_trio.training import corpus
from uma_trio.training.bpe import Tokenizer, learn
from uma_trio.training.chat import CONTROLS
from uma_trio.training.shape import DRAFT, SHIPPED, SMOKE, Shape

HELP = """
Train the embedded model from scratch.  One command does everything, from fixed seeds:

    python -m uma_trio.training all --out build/embedded

  samples    print some training text (needs nothing)
  tokenizer  learn the byte-level BPE                     -> tokenizer.json
  train      train, on a GPU if available (needs torch)   -> weights.npz, run.json
  export     write the model file                         -> embedded.gguf
  evaluate   answer held-out questions through libllama
             (needs the built library)                    -> card.json
  all        tokenizer, train, export, evaluate

With `--draft` it is the draft model of the embedded one, with the tokenizer of that file.

`pip install -e '.[train]'` brings torch.  `train` takes about nine minutes on one NVIDIA H200, and would take weeks
on two CPU cores.  With `--seconds` a slower machine trains for that time.  `--smoke` runs every step with a toy model
in under a minute.
"""


EMBEDDED = Path(__file__).parents[1] / "models" / "embedded" / "embedded.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m uma_trio.training",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("samples", "tokenizer", "train", "export", "evaluate", "all"), metavar="what")
    parser.add_argument("--out", type=Path, help="output folder (build/embedded)")
    parser.add_argument("--device", default="", help="cuda or cpu (detected)")
    parser.add_argument("--steps", type=int, help="training steps (those of the recipe)")
    parser.add_argument("--seconds", type=float, help="time limit of `train` (none); its schedule ends then")
    parser.add_argument("--each", type=int, default=200, help="exam questions per skill (200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of `samples` and of the exam (1)")
    parser.add_argument("--draft", action="store_true", help="the draft model, in build/draft unless --out is given")
    parser.add_argument("--smoke", action="store_true", help="a toy model that learns nothing, to test the script")
    options = parser.parse_args()
    if options.what == "samples":
        _print_samples(options.seed)
        return
    options.out = options.out or Path("build/draft" if options.draft else "build/embedded")
    options.out.mkdir(parents=True, exist_ok=True)
    shape = DRAFT if options.draft else SMOKE if options.smoke else SHIPPED
    for name, step in (("tokenizer", _tokenizer), ("train", _train), ("export", _export), ("evaluate", _evaluate)):
        if options.what in (name, "all"):
            print(f"== {name}", flush=True)
            step(options, shape)


def _print_samples(seed: int) -> None:
    rng = Random(seed)
    for skill in corpus.SKILLS:
        turn = skill.make(rng)
        print(f"[{skill.name}]\n  {turn.question}\n  -> {turn.answer}")
    for sample in itertools.islice(corpus.samples_of_row("medium", seed), 5):
        print(f"[{sample.skill}] system: {sample.system!r}", *sample.tools, sep="\n  ")
        for turn in sample.turns:
            print(f"  {turn.question}\n  -> {turn.answer}")


def _tokenizer(options: argparse.Namespace, shape: Shape) -> None:
    if options.draft:
        from uma_trio.training.export import read_merges

        merges = read_merges(EMBEDDED)
    else:
        texts = corpus.tokenizer_texts(300 if options.smoke else 20_000)
        merges = learn(texts, shape.n_vocab - 256 - len(CONTROLS))
    (options.out / "tokenizer.json").write_text(json.dumps(merges, ensure_ascii=False))
    print(f"{len(merges)} merges")


def read_tokenizer(out: Path) -> Tokenizer:
    merges = json.loads((out / "tokenizer.json").read_text())
    return Tokenizer(CONTROLS, tuple((one, other) for one, other in merges))


def _train(options: argparse.Namespace, shape: Shape) -> None:
    import numpy as np
    import torch

    from uma_trio.training.train import OF_DRAFT, Recipe, train

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    recipe = OF_DRAFT if options.draft else Recipe()
    if options.smoke:
        recipe = Recipe(steps=12, tokens_per_step=4096)
    if options.steps:
        recipe = attrs.evolve(recipe, steps=options.steps)
    if options.seconds:
        recipe = attrs.evolve(recipe, seconds=options.seconds)
    trained = train(read_tokenizer(options.out), shape, recipe, device=device)
    np.savez(options.out / "weights.npz", **trained.weights)  # type: ignore[arg-type]
    run = {
        "device": trained.device,
        "seconds": round(trained.seconds),
        "steps": trained.steps,
        "final_loss": trained.final_loss,
        "torch": torch.__version__,
        "recipe": attrs.asdict(recipe),
    }
    (options.out / "run.json").write_text(json.dumps(run, indent=1))
    print(f"{trained.steps} steps, {trained.seconds:.0f} s on {trained.device}, loss {trained.final_loss:.5f}")


def _export(options: argparse.Namespace, shape: Shape) -> None:
    import numpy as np

    from uma_trio.training.export import NAME, NAME_OF_DRAFT, write_gguf

    weights = {name: weight.astype(np.float32) for name, weight in np.load(options.out / "weights.npz").items()}
    path = options.out / _file_name(options)
    write_gguf(path, weights, read_tokenizer(options.out), shape, NAME_OF_DRAFT if options.draft else NAME)
    print(f"{path}: {path.stat().st_size / 2**20:.2f} MiB")


def _file_name(options: argparse.Namespace) -> str:
    return "draft.gguf" if options.draft else "embedded.gguf"


def _evaluate(options: argparse.Namespace, shape: Shape) -> None:
    from uma_trio.engine.open_fitted import LOAD_ERRORS
    from uma_trio.training.card import card, table, write_card
    from uma_trio.training.evaluate import Examiner, marks_of, shown

    path = options.out / _file_name(options)
    questions = corpus.exam(1 if options.smoke else options.each, seed=options.seed)
    if options.smoke:
        questions = itertools.islice(questions, 5)
    try:
        with Examiner(path) as examiner:
            marked = list(shown(examiner.mark(questions)))
    except LOAD_ERRORS as error:
        raise SystemExit(f"no exam: {error}") from None
    run: dict[str, Any] = json.loads((options.out / "run.json").read_text())
    margins = [margin for one in marked if one.right for margin in one.margins]
    figures = card(path, shape, run, marks_of(marked), margins)
    write_card(options.out / "card.json", figures)
    print(table(figures))


if __name__ == "__main__":
    main()
