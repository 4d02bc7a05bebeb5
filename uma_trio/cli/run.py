"""``uma-trio run``: from nothing to a chat with a model, in one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from uma_trio.cli.client_options import reporting_errors, socket_option
from uma_trio.cli.completion import model_file
from uma_trio.cli.exits import INTERRUPTED
from uma_trio.cli.request_options import options_but_model
from uma_trio.cli.stdio import fail, note

if TYPE_CHECKING:
    from uma_trio.hub.locate import LocatedModel


@click.command("run")
@click.argument("model", shell_complete=model_file)
@click.argument("prompt", nargs=-1)
@click.option("--keep", is_flag=True, help="Leave the daemon running. uma-trio stop ends it.")
@click.option("--offline", is_flag=True, help="Download nothing: the model must be here.")
@click.option("--http", metavar="[HOST:]PORT", help="A daemon that is started also serves HTTP there.")
@options_but_model
@click.option("--plain", is_flag=True, help="Show answers as they are, without rendering Markdown.")
@click.option(
    "--stats", is_flag=True, help="With PROMPT: print usage, timings and the id of the request to stderr at the end."
)
@socket_option()
def command(model: str, prompt: tuple[str, ...], keep: bool, offline: bool, http: str | None, **options: Any) -> None:
    """Download MODEL if it is not here, load it, and chat with it; or answer PROMPT, and end.

    MODEL is a name of the Hugging Face Hub, the URL or the path of a .gguf file, or a name that uma-trio models lists;
    embedded comes with the package.  Text that is piped in is a prompt, as in uma-trio ask.

    If a daemon runs, it answers, and loads the model if it has not yet.  Otherwise one is started.  It serves other
    clients, too, and ends with the last uma-trio run that uses it: nothing keeps memory that nobody asked for.  Ollama
    keeps its server; --keep does the same here, until uma-trio stop.  Variables such as UMA_CTX are settings of a daemon
    that is started, as for uma-trio serve.

    Ctrl-C during the download keeps what has come, and the next run goes on from there.  Ctrl-C later ends what was
    started.  In a chat it cancels an answer; /bye or Ctrl-D ends the chat.  Exit codes are those of uma-trio ask.

    \b
      uma-trio run embedded
      uma-trio run Qwen/Qwen3-0.6B-GGUF
      uma-trio run Qwen/Qwen3-0.6B-GGUF:Q8_0 "What is the capital of France?"
      git diff | uma-trio run qwen3-0.6b "Summarise this change:"
      uma-trio run --keep --http 8080 ~/models/some-model.gguf
    """
    from uma_trio.cli.keyboard import hidden_keys
    from uma_trio.cli.model_option import is_path_of_model
    from uma_trio.cli.own_daemon import used
    from uma_trio.cli.progress import load_with_progress
    from uma_trio.cli.run_trio import run
    from uma_trio.protocol.address import socket_path

    located = _located(model, offline=offline)
    path = socket_path(options["socket"])
    with (
        hidden_keys(),
        reporting_errors("run", options["socket"]),
        used(path, _for_serve(model, located), keep=keep, http=http) as is_new,
    ):
        _say_where_http_is(http, is_new=is_new)
        if is_path_of_model(model):
            _check_path(located, path)
        run(load_with_progress, located.name, path)
        _talk(located.name, prompt, options)
        if keep and sys.stderr.isatty():
            note("the daemon goes on; uma-trio stop ends it")


def _talk(name: str, prompt: tuple[str, ...], options: dict[str, Any]) -> None:
    """Chat, or answer.  An answer ends the program with its exit code."""
    from uma_trio.cli import ask, chat

    context = click.get_current_context()
    is_question = bool(prompt) or not sys.stdin.isatty()
    chosen = ask.command if is_question else chat.command
    known = {parameter.name for parameter in chosen.params}
    given = {key: value for key, value in {**options, "model": name, "question": prompt}.items() if key in known}
    context.invoke(chosen, **given)


def _located(model: str, *, offline: bool) -> LocatedModel:
    """The model's file, downloaded if it is not here; ends the program if there is no such model."""
    import attrs

    from uma_trio.cli.model_option import locate, model_locations_of_environment
    from uma_trio.cli.pull import suggesting
    from uma_trio.cli.run_trio import Interrupted
    from uma_trio.config import ConfigError
    from uma_trio.engine_link.load_errors import explained
    from uma_trio.errors import ErrorWithRemedy
    from uma_trio.models.gguf_check import check_gguf

    try:
        places = model_locations_of_environment()
        places = attrs.evolve(places, is_offline=places.is_offline or offline)
        with suggesting(model, places):
            located = locate(model, places, may_pull=True)
        with explained(located.path):
            check_gguf(located.path)
    except (ErrorWithRemedy, ConfigError) as error:
        fail("run", str(error))
    except Interrupted:
        click.echo(f"stopped; uma-trio run {model} goes on with the download", err=True)
        sys.exit(INTERRUPTED)
    return located


def _for_serve(model: str, located: LocatedModel) -> str:
    """The model for serve: its name, which serve looks up itself, or its path."""
    from uma_trio.cli.model_option import is_path_of_model

    return str(located.path.absolute()) if is_path_of_model(model) else model


def _check_path(located: LocatedModel, socket: Path) -> None:
    """A daemon that runs takes no paths from clients, so it must serve this file already.

    Raises:
        NoDaemon: it does not.
    """
    from uma_trio.cli.run_trio import run
    from uma_trio.client import NoDaemon, ServerError, open_client

    async def served() -> str | None:
        async with open_client(socket, wait_s=None) as client:
            try:
                return (await client.models(model=located.name))[0].path
            except ServerError as error:
                if error.code != "E_MODEL_NOT_FOUND":
                    raise
                return ""

    path = run(served)
    if path is not None and (not path or Path(path) != located.path.resolve()):
        raise NoDaemon(
            f"the daemon at {socket} does not serve {located.path}",
            f"start another one with: uma-trio run --socket PATH; or name the file with: uma-trio models alias NAME "
            f"{located.path}, and run NAME",
        )


def _say_where_http_is(http: str | None, *, is_new: bool) -> None:
    from uma_trio.protocol.address import http_address

    if http is None:
        return
    if not is_new:
        note("a daemon runs already, so --http has no effect")
    elif sys.stderr.isatty():
        host, port = http_address(http)
        note(f"HTTP at http://{host}:{port}, with a page to chat: http://{host}:{port}/chat")
