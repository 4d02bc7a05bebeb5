"""``uma-trio models``: list, show, remove and name the models of this machine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from uma_trio.cli import SuggestingGroup
from uma_trio.cli.client_options import DEFAULT_SOCKET
from uma_trio.cli.completion import model_name
from uma_trio.cli.stdio import fail, print_table

if TYPE_CHECKING:
    from uma_trio.hub.environment import ModelLocations
    from uma_trio.hub.folder import InstalledModel

DAEMON_S: Final = 1.0
"""How long the daemon may take to say what it serves."""
MANAGE_S: Final = 3600.0
"""How long the daemon may take to load or to drain a model."""
SERVED: Final = ("ready", "loading", "draining")
"""States of models that the daemon has in memory."""
STATES: Final = {"ready": "served"}
"""The table's words for states of the protocol, where they differ."""
HOW_TO_REMOVE: Final = {
    "Ollama": "ollama rm {name}",
    "Hugging Face": "hf cache rm model/{place}",
    "LM Studio": "lms rm {place}, or delete its folder",
}
"""How to remove what another program keeps."""

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("models", cls=SuggestingGroup, invoke_without_command=True)
@_json
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List, show, remove and name the models of this machine, and load and unload those of the daemon.

    Models of this machine are those that uma-trio pull downloaded, and those of Ollama, LM Studio and Hugging Face's
    libraries, which stay where they are.  Without a subcommand, all are listed.

    \b
      uma-trio pull Qwen/Qwen3-0.6B-GGUF:Q8_0
      uma-trio models
      uma-trio models show Qwen3-0.6B
      uma-trio models alias small Qwen/Qwen3-0.6B-GGUF:Q8_0
      uma-trio serve --model small
      uma-trio models reload embedded
      uma-trio models remove --yes small

    Exit codes: 0 success, 1 no such model, or the command failed.
    """
    if context.invoked_subcommand is None:
        _list(as_json)


@command.command("list", short_help="List all models of this machine.")
@_json
def list_(as_json: bool) -> None:
    """List all models: their size, quantization and context, who keeps them, and whether a daemon serves them."""
    _list(as_json)


@command.command()
@click.argument("model", shell_complete=model_name)
@_json
def show(model: str, as_json: bool) -> None:
    """Show where MODEL is, and the metadata of its file.

    MODEL is a name that uma-trio models lists, or a path.
    """
    with _reporting():
        from uma_trio.engine_link.load_errors import explained
        from uma_trio.hub.locate import find_here
        from uma_trio.models.gguf_check import check_gguf
        from uma_trio.models.gguf_header import read_header
        from uma_trio.models.purpose import IN_WORDS

        places = _places()
        located = find_here(model, places)
        installed = next((candidate for candidate in _all(places) if candidate.path == located.path), None)
        with explained(located.path):
            summary = check_gguf(located.path)
            header = read_header(located.path)
    files = [located.path] if installed is None else installed.files
    shown = {
        "name": located.name,
        "files": [str(file) for file in files],
        "size_bytes": summary.size_bytes,
        "origin": None if installed is None else installed.origin,
        "source": None if installed is None else installed.source,
        "sha256": [] if installed is None else [digest for digest in installed.hashes if digest is not None],
        "architecture": summary.architecture,
        "purpose": summary.purpose,
        "quantization": _quantization(located.path) if installed is None else installed.quantization,
        "context_length": summary.context_length,
        "vocabulary": summary.n_vocab,
        "tensors": summary.n_tensors,
        "metadata": dict(header.values),
    }
    if as_json:
        click.echo(json.dumps(shown))
        return
    from uma_trio.hub.variants import format_bytes

    metadata: dict[str, Any] = header.values
    rows = [
        ("name", shown["name"]),
        *(("file", file) for file in files),
        ("size", format_bytes(summary.size_bytes)),
        ("kept by", shown["origin"]),
        ("from", shown["source"]),
        ("architecture", summary.architecture),
        ("purpose", f"it {IN_WORDS[summary.purpose]}"),
        ("quantization", shown["quantization"]),
        ("context", summary.context_length and f"{summary.context_length:,} tokens"),
        ("vocabulary", summary.n_vocab and f"{summary.n_vocab:,} tokens"),
        ("chat template", "yes" if "tokenizer.chat_template" in metadata else "no"),
    ]
    for label, value in rows:
        if value:
            click.echo(f"{label:<14}{value}")
    click.echo()
    for key, value in metadata.items():
        click.echo(f"{key} = {_short(value)}")


@command.command(short_help="Delete the files of a downloaded model.")
@click.argument("model", shell_complete=model_name)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def remove(model: str, yes: bool) -> None:
    """Delete the files of MODEL, which uma-trio downloaded, or an unfinished download.

    Also removes its aliases.  Remove a model of another program with that program.
    """
    with _reporting():
        from uma_trio.hub.errors import NotInstalled
        from uma_trio.hub.folder import ModelFolder
        from uma_trio.hub.locate import aliases_of, find, resolve
        from uma_trio.hub.variants import format_bytes

        places = _places()
        folder = ModelFolder(places.folder)
        reference, _ = resolve(model, places)
        models = _all(places)
        try:
            installed = find(reference, models, folder.aliases())
        except NotInstalled:
            unfinished = {state.name.lower(): (state.name, n_bytes) for state, n_bytes in folder.unfinished()}
            if str(reference).lower() not in unfinished:
                raise
            name, n_bytes = unfinished[str(reference).lower()]
            if not yes:
                click.confirm(
                    f"Delete the unfinished download of {name}, {format_bytes(n_bytes)}?", abort=True, err=True
                )
            if not folder.discard(name):
                fail("models", f"{name} is being downloaded; stop that first")
            click.echo(f"removed the unfinished download of {name}", err=True)
            return
        aliases = aliases_of(installed, models, places)
        if installed.origin == "the package":
            known = f"; uma-trio models alias --remove {aliases[0]} forgets the alias" if aliases else ""
            fail("models", f"{installed.name} comes with the package, and goes with it{known}")
        if installed.origin != "uma-trio":
            how = HOW_TO_REMOVE[installed.origin].format(name=installed.name, place=installed.name_without_quantization)
            fail("models", f"{installed.name} belongs to {installed.origin}; remove it with: {how}")
        if {installed.served_name, *aliases} & {*_served()}:
            fail(
                "models",
                f"a daemon serves {installed.name}; stop it first, or: uma-trio models unload {installed.name}",
            )
        what = f"{installed.name}, {format_bytes(installed.size_bytes)}"
        names = f" and the alias{'es' if len(aliases) > 1 else ''} {', '.join(aliases)}" if aliases else ""
        if not yes:
            click.confirm(f"Delete {what}, in {installed.path.parent}{names}?", abort=True, err=True)
        folder.remove(installed, aliases)
        click.echo(f"removed {what}{names}", err=True)


@command.command()
@click.argument("name", required=False)
@click.argument("model", required=False, shell_complete=model_name)
@click.option("--remove", "removing", is_flag=True, help="Forget the alias NAME.")
@_json
def alias(name: str | None, model: str | None, removing: bool, as_json: bool) -> None:
    """Give MODEL the further name NAME, for --model and for clients.  Without arguments, list the aliases.

    MODEL need not be here yet: serve downloads what the alias stands for.

    \b
      uma-trio models alias small Qwen/Qwen3-0.6B-GGUF:Q8_0
      uma-trio models alias --remove small
    """
    with _reporting():
        import os

        from uma_trio.hub.folder import ModelFolder
        from uma_trio.hub.locate import find_here, resolve
        from uma_trio.hub.names import HubReference, PathReference, UrlReference, check_alias

        places = _places()
        folder = ModelFolder(places.folder)
        if name is None:
            _print_aliases(folder.aliases(), as_json)
            return
        if removing:
            with folder.editing_aliases() as aliases:
                if aliases.pop(name, None) is None:
                    fail("models", f"there is no alias {name}; uma-trio models alias lists them")
            return
        if model is None:
            raise click.UsageError("give the model that this name stands for, or --remove")
        check_alias(name)
        reference, other = resolve(model, places)
        if other is not None:
            meaning = folder.aliases()[other]  # what the other alias stands for, since that one may be removed
        elif isinstance(reference, HubReference | UrlReference):
            meaning = model
        elif isinstance(reference, PathReference):
            meaning = os.path.abspath(find_here(model, places).path)
        else:
            meaning = find_here(model, places).name
        with folder.editing_aliases() as aliases:
            aliases[name] = meaning


@command.command(short_help="Have the daemon load a model.")
@click.argument("model")
@click.option("--socket", type=click.Path(path_type=Path, readable=False), help=DEFAULT_SOCKET)
def load(model: str, socket: Path | None) -> None:
    """Have the daemon load MODEL: one of its list, or any model of this machine."""
    _manage("load", model, socket)


@command.command(short_help="Have the daemon unload a model when it is idle.")
@click.argument("model")
@click.option("--socket", type=click.Path(path_type=Path, readable=False), help=DEFAULT_SOCKET)
def unload(model: str, socket: Path | None) -> None:
    """Have the daemon unload MODEL when its requests have ended.  Its next request loads it again."""
    _manage("unload", model, socket)


@command.command()
@click.argument("model")
@click.option("--socket", type=click.Path(path_type=Path, readable=False), help=DEFAULT_SOCKET)
def reload(model: str, socket: Path | None) -> None:
    """Have the daemon load MODEL again, with its file as it is now.  No request is dropped.

    With other settings: change the file of the daemon, and send it a SIGHUP.
    """
    _manage("reload", model, socket)


# -- helpers ----------------------------------------------------------------------------------------


def _list(as_json: bool) -> None:
    with _reporting():
        from uma_trio.hub.folder import ModelFolder
        from uma_trio.hub.locate import aliases_of

        places = _places()
        models = _all(places)
        unfinished = ModelFolder(places.folder).unfinished()
        names = [aliases_of(model, models, places) for model in models]
    daemon = _daemon_models()
    served = {name: model for model in daemon for name in (model["name"], *model["aliases"])}
    rows = [_describe(model, aliases, served) for model, aliases in zip(models, names, strict=True)]
    known = {name for model, aliases in zip(models, names, strict=True) for name in (model.served_name, *aliases)}
    rows += [_describe_served(model) for model in daemon if not known & {model["name"], *model["aliases"]}]
    if as_json:
        click.echo(json.dumps(rows))
        return
    from uma_trio.hub.variants import format_bytes

    if rows:
        table = [("NAME", "SIZE", "QUANTIZATION", "CONTEXT", "KEPT BY", "STATE", "NOTES")]
        for row in rows:
            notes = [f"alias {name}" for name in row["aliases"]]
            notes += [row["problem"]] if row["problem"] else []
            context = f"{row['context_length']:,}" if row["context_length"] else ""
            table.append(
                (
                    row["name"],
                    format_bytes(row["size_bytes"]),
                    row["quantization"],
                    context,
                    row["origin"] or "",
                    STATES.get(row["state"], row["state"] or ""),
                    ", ".join(notes),
                )
            )
        print_table(table)
    if all(row["origin"] == "the package" for row in rows) and not unfinished:
        click.echo("download another model with: uma-trio pull Qwen/Qwen3-0.6B-GGUF", err=True)
    for state, n_bytes in unfinished:
        total = None if None in state.sizes else sum(size or 0 for size in state.sizes)
        of = "" if total is None else f" of {format_bytes(total)}"
        click.echo(
            f"not complete: {state.name}, {format_bytes(n_bytes)}{of}; uma-trio pull {state.name} goes on", err=True
        )


def _describe(model: InstalledModel, aliases: Sequence[str], served: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    from uma_trio.models.gguf_header import GgufError, read_header

    context, problem = None, None
    try:
        header = read_header(model.path)
        context = header.values.get(f"{header.text('general.architecture')}.context_length")
    except GgufError as error:
        problem = error.reason
    except OSError as error:
        problem = error.strerror
    of_daemon = next((served[name] for name in (model.served_name, *aliases) if name in served), {})
    state = of_daemon.get("state")
    return {
        "name": model.name,
        "size_bytes": model.size_bytes,
        "quantization": model.quantization or of_daemon.get("quantization") or "",
        "context_length": context,
        "origin": model.origin,
        "source": model.source,
        "files": [str(file) for file in model.files],
        "aliases": [*aliases],
        "is_served": state in SERVED,
        "state": state,
        "problem": problem or of_daemon.get("reason"),
    }


def _describe_served(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model of the daemon that is not listed on this machine: it was given by its path."""
    return {
        "name": model["name"],
        "size_bytes": model["size_bytes"],
        "quantization": model.get("quantization") or "",
        "context_length": model["context_per_request"] or None,
        "origin": None,
        "source": None,
        "files": [],
        "aliases": model["aliases"],
        "is_served": model["state"] in SERVED,
        "state": model["state"],
        "problem": model.get("reason"),
    }


def _manage(action: str, model: str, socket: Path | None) -> None:
    from uma_trio.connect.errors import ClientError
    from uma_trio.connect.query import query
    from uma_trio.protocol.address import socket_path

    path = socket_path(socket)
    try:
        [answer] = query(path, {"type": "models", "action": action, "model": model}, timeout_s=MANAGE_S)
    except ClientError as error:
        fail("models", str(error))
    except TimeoutError:
        fail("models", f"the daemon is not done after {MANAGE_S:g} s, and goes on")
    if answer["event"] == "error":
        fail("models", f"{answer['code']}: {answer['message']}")
    for description in answer["models"]:
        took = f", {description['memory_bytes'] / 1e6:,.0f} MB" if description.get("memory_bytes") else ""
        click.echo(f"{description['name']} is {description['state']}{took}", err=True)


def _served() -> list[str]:
    """Names of the models that the daemon at the usual socket has in memory; none if none runs."""
    loaded = [model for model in _daemon_models() if model["state"] in SERVED]
    return [name for model in loaded for name in (model["name"], *model["aliases"])]


def _daemon_models() -> list[dict[str, Any]]:
    """The models of the daemon at the usual socket; none if none runs."""
    from uma_trio.connect.errors import ClientError
    from uma_trio.connect.query import query
    from uma_trio.connect.reasons import is_locked
    from uma_trio.protocol.address import socket_path

    path = socket_path(None)
    try:
        # without a lock there is no daemon; connecting could make systemd start one
        events = query(path, {"type": "models"}, timeout_s=DAEMON_S) if is_locked(path) else []
        return [model for event in events for model in event["models"]]
    except (ClientError, TimeoutError, LookupError):
        return []


def _places() -> ModelLocations:
    from uma_trio.cli.model_option import model_locations_of_environment

    return model_locations_of_environment()


def _all(places: ModelLocations) -> list[InstalledModel]:
    from uma_trio.hub.caches import all_models

    return all_models(places)


def _quantization(path: Path) -> str:
    from uma_trio.hub.variants import quantization_of

    return quantization_of(str(path))


def _print_aliases(aliases: dict[str, str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(aliases))
    elif not aliases:
        click.echo("no aliases yet; make one with: uma-trio models alias NAME MODEL", err=True)
    else:
        print_table([("ALIAS", "MODEL"), *aliases.items()])


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    """End the program with one line if there is no such model, or its files cannot be used."""
    from uma_trio.config import ConfigError
    from uma_trio.errors import ErrorWithRemedy

    try:
        yield
    except (ErrorWithRemedy, ConfigError) as error:
        fail("models", str(error))
    except OSError as error:
        fail("models", f"{error.filename}: {error.strerror}")
