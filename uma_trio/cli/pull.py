"""``uma-trio pull``: download a model."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from uma_trio.cli.completion import model_name
from uma_trio.cli.exits import FAILED, INTERRUPTED

if TYPE_CHECKING:
    from uma_trio.hub.environment import ModelLocations
    from uma_trio.hub.folder import InstalledModel


def _sha256(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise click.BadParameter("a SHA-256 has 64 hexadecimal digits")
    return None if value is None else value.lower()


@click.command("pull")
@click.argument("model", shell_complete=model_name)
@click.option("--sha256", callback=_sha256, metavar="HEX", help="Expected SHA-256 of the file (URLs only).")
@click.option("--offline", is_flag=True, help="Open no connection: only say whether the model is here.")
@click.option("--models-dir", type=click.Path(path_type=Path), help="Folder of downloaded models.")
@click.option("--quiet", "-q", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, sha256: str | None, offline: bool, models_dir: Path | None, quiet: bool, as_json: bool) -> None:
    """Download MODEL, or find it on this machine, and print where it is.

    MODEL is a repository of the Hugging Face Hub, with a quantization (:Q8_0) or without; the default is Q4_K_M if the
    repository has it.  MODEL can also be the https:// URL of a .gguf file, a name that uma-trio models lists, or a path.
    A model that Ollama, LM Studio or Hugging Face's libraries have here already is used where it is.

    The projector of a repository, with which its models see pictures, comes with the model.

    An interrupted download resumes.  Every file is compared with the hash that the hub has for it, and checked
    as a model.  docs/MODELS.md says where models are kept, and which variables of the environment count.

    \b
      uma-trio pull Qwen/Qwen3-0.6B-GGUF
      uma-trio pull Qwen/Qwen3-0.6B-GGUF:Q8_0
      uma-trio pull https://example.com/models/some-model.gguf
      uma-trio serve --model Qwen/Qwen3-0.6B-GGUF:Q8_0

    Exit codes: 0 the model is here, 1 it is not, 2 wrong usage, 130 interrupted.
    """
    import attrs

    from uma_trio import config
    from uma_trio.cli.model_option import model_locations_of_environment
    from uma_trio.errors import ErrorWithRemedy

    try:
        places = model_locations_of_environment()
        folder = places.folder if models_dir is None else models_dir
        places = attrs.evolve(places, folder=folder, is_offline=places.is_offline or offline)
        pulled = _pull(model, sha256, places, quiet=quiet)
    except (ErrorWithRemedy, config.ConfigError) as error:
        click.echo(f"uma-trio pull: {error}", err=True)
        sys.exit(FAILED)
    _print(pulled, as_json)


def _pull(text: str, sha256: str | None, places: ModelLocations, *, quiet: bool) -> dict[str, Any]:
    """Download the model, unless it is here.

    Raises:
        HubError: it is not here, and cannot be downloaded.
        ModelError: it is here, and cannot be served.
    """
    from uma_trio.cli.pull_view import pull_view
    from uma_trio.cli.run_trio import Interrupted, run, until_interrupted
    from uma_trio.engine_link.load_errors import explained
    from uma_trio.hub.errors import NotInstalled
    from uma_trio.hub.locate import find_here, resolve
    from uma_trio.hub.names import EXAMPLES, HubReference, UrlReference
    from uma_trio.hub.pull import Puller
    from uma_trio.models.gguf_check import check_gguf

    reference, _ = resolve(text, places)
    if not isinstance(reference, HubReference | UrlReference) or places.is_offline:
        with suggesting(text, places):
            located = find_here(text, places)
        if not located.path.exists():
            raise NotInstalled(f"there is no file {located.path}", EXAMPLES)
        with explained(located.path):
            check_gguf(located.path)
        return {"name": located.name, "path": str(located.path)}
    try:
        with pull_view(quiet=quiet) as view:
            puller = Puller(places, view)
            model: InstalledModel = run(until_interrupted, lambda: puller.pull(reference, sha256))
    except Interrupted:
        click.echo(f"stopped; uma-trio pull {text} resumes the download", err=True)
        sys.exit(INTERRUPTED)
    return {
        "name": model.name,
        "path": str(model.path),
        "size_bytes": model.size_bytes,
        "quantization": model.quantization,
        "origin": model.origin,
    }


@contextlib.contextmanager
def suggesting(text: str, places: ModelLocations) -> Iterator[None]:
    """Let the error for a name without an owner that is not here say what the hub has for it.  Asks the hub."""
    from uma_trio.hub.errors import HubError, NotInstalled
    from uma_trio.hub.locate import resolve
    from uma_trio.hub.names import EXAMPLES, ShortName

    try:
        yield
    except NotInstalled as error:
        if places.is_offline or not isinstance(resolve(text, places)[0], ShortName):
            raise
        from uma_trio.cli.pull_view import View
        from uma_trio.cli.run_trio import run
        from uma_trio.hub.pull import Puller

        if ":" in text:
            hint = (
                f"names without an owner, such as those of Ollama, are not downloaded: get it with ollama pull {text}, "
                "after which uma-trio uses it where it is"
            )
            raise NotInstalled(error.reason, f"{hint}; or {EXAMPLES}") from None
        try:
            similar = run(Puller(places, View()).suggest, text)
        except HubError as unreachable:
            raise NotInstalled(f"{error.reason}, and {unreachable.reason}", unreachable.remedy) from None
        there = f"the hub has {', '.join(similar)}; take one of them" if similar else f"{error.remedy}; {EXAMPLES}"
        raise NotInstalled(error.reason, there) from None


def _print(model: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(model))
        return
    click.echo(model["path"])
    origin = model.get("origin", "uma-trio")
    where = "" if origin == "uma-trio" else f", which {origin} keeps"
    if sys.stderr.isatty():
        click.echo(f"This is {model['name']}{where}.  Serve it with: uma-trio serve --model {model['name']}", err=True)
