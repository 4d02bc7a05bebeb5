"""``uma-trio aicirt``: the AICI runtime, which an engine starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from uma_trio.aici.runtime.command import Options


@click.command("aicirt")
@click.option(
    "--server", "-s", is_flag=True, help="Serve an engine. Needed, except with --module and --save-tokenizer."
)
@click.option(
    "--name", "-n", "prefix", default="/aici0-", show_default=True, help="Prefix of the names in shared memory."
)
@click.option(
    "--tokenizer",
    "-t",
    default="embedded",
    show_default=True,
    metavar="MODEL",
    help="Model whose vocabulary controllers see: a GGUF file, a name that uma-trio models lists, or embedded.",
)
@click.option("--json-size", type=click.IntRange(1, 1024), default=8, show_default=True, help="MiB for messages.")
@click.option("--bin-size", type=click.IntRange(1, 16384), default=16, show_default=True, help="MiB for biases.")
@click.option("--futex", is_flag=True, help="Wait on futexes instead of semaphores (Linux).")
@click.option(
    "--busy-wait-time", type=click.IntRange(0), default=200, help="Accepted and not used: this runtime never spins."
)
@click.option(
    "--wasm-max-forks", type=click.IntRange(1), default=16, show_default=True, help="Most sequences of one request."
)
@click.option(
    "--wasm-max-memory", type=click.IntRange(1, 4096), default=64, show_default=True, help="Most MiB of one controller."
)
@click.option(
    "--uma-max-total-memory",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="Most MiB of all controllers together. Above that, the request that has the most fails. Not in the reference "
    "implementation.",
)
@click.option(
    "--wasm-max-pre-step-time",
    type=click.IntRange(1, 600_000),
    default=4,
    show_default=True,
    help="Most milliseconds of a post_pre_process call.",
)
@click.option(
    "--wasm-max-step-time",
    type=click.IntRange(1, 600_000),
    default=150,
    show_default=True,
    help="Most milliseconds of a mid_process call.",
)
@click.option(
    "--wasm-max-init-time",
    type=click.IntRange(1, 600_000),
    default=1000,
    show_default=True,
    help="Milliseconds to instantiate a controller.",
)
@click.option(
    "--uma-skip-slow-ms",
    type=click.IntRange(1, 600_000),
    help="Leave a controller that has not answered after this time out of the step, and go on with it in the next one. "
    "Not in the reference implementation.",
)
@click.option(
    "--uma-expire-s",
    type=click.IntRange(1, 100_000_000),
    default=60,
    show_default=True,
    help="Seconds that a controller waits for a sequence before it is closed. Not in the reference implementation.",
)
@click.option(
    "--uma-max-modules",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Most MiB of all modules on disk. To make room, the least recently used modules without a tag are removed, "
    "first those of the user who uploads. Not in the reference implementation.",
)
@click.option(
    "--uma-max-principal-modules",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Most MiB of the modules of one user on disk; administrators may have all. Not in the reference "
    "implementation.",
)
@click.option(
    "--uma-folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder with the folder cache, for modules.  [default: the working directory]  Not in the reference "
    "implementation.",
)
@click.option(
    "--module",
    "-m",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Add this module to cache/ and print its id.",
)
@click.option(
    "--save-tokenizer", type=click.Path(path_type=Path, dir_okay=False), help="Write the token trie to a file."
)
@click.option("--run", "-r", is_flag=True, hidden=True)
@click.option("--run-arg", type=click.Path(path_type=Path), hidden=True)
@click.option("--bench", is_flag=True, hidden=True)
@click.option("--fork", is_flag=True, hidden=True)
@click.option("--llama-dir", type=click.Path(path_type=Path), help="Folder of the built libllama.")
def command(prefix: str, module: Path | None, save_tokenizer: Path | None, **flags: Any) -> None:
    """Run Wasm controllers for an engine, over shared memory.

    An engine starts this command.  It ends when the engine asks it to, or ends itself.  Modules are kept in the folder
    cache of the working directory, or of --uma-folder.  docs/AICI.md describes the protocol; flags, names and messages are those of
    Microsoft's aicirt.

    Exit codes: 0 stopped by the engine, 1 a flag, the shared memory or the model cannot be used.
    """
    if not prefix.startswith("/"):
        _fail("--name must start with /")
    if any(flags[name] for name in ("run", "run_arg", "bench", "fork")):
        _fail(
            "--run, --run-arg, --bench and --fork are for the developers of the reference implementation; leave them out"
        )
    if not flags["server"] and module is None and save_tokenizer is None:
        click.echo("missing --server")
        sys.exit(1)
    from uma_trio.aici.runtime.command import NoVocabulary, Options, serve
    from uma_trio.aici.runtime.command import save_tokenizer as save
    from uma_trio.aici.runtime.interface import BadModule, CannotCompile, Limits
    from uma_trio.aici.runtime.module_space import Space
    from uma_trio.aici.runtime.module_store import StoreError
    from uma_trio.aici_link.channel import Layout
    from uma_trio.engine_link.load_errors import ModelError

    options = Options(
        flags["tokenizer"],
        Layout(prefix, flags["json_size"], flags["bin_size"], flags["futex"]),
        Limits(
            max_forks=flags["wasm_max_forks"],
            max_memory_mb=flags["wasm_max_memory"],
            max_total_memory_mb=flags["uma_max_total_memory"],
            max_pre_step_ms=flags["wasm_max_pre_step_time"],
            max_step_ms=flags["wasm_max_step_time"],
            max_init_ms=flags["wasm_max_init_time"],
        ),
        flags["uma_expire_s"],
        flags["uma_skip_slow_ms"],
        flags["llama_dir"],
        Space(flags["uma_max_modules"] << 20, flags["uma_max_principal_modules"] << 20),
        flags["uma_folder"],
    )
    try:
        if save_tokenizer is not None:
            save(options, save_tokenizer)
        if module is not None:
            click.echo(_added(options, module))
        if flags["server"]:
            serve(options)
    except (OSError, NoVocabulary, ModelError, BadModule, CannotCompile, StoreError) as error:
        _fail(str(error))


def _added(options: Options, module: Path) -> str:
    from uma_trio.aici.runtime.command import add_module

    try:
        return add_module(options, module)
    except OSError as error:
        _fail(f"cannot add {module}: {error.strerror or error}")


def _fail(message: str) -> NoReturn:
    click.echo(f"uma-trio aicirt: {message}", err=True)
    sys.exit(1)
