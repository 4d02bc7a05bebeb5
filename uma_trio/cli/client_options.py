"""What the commands that talk to the daemon share: options, and errors that say what to do."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from uma_trio.cli.exits import PROTOCOL_ERROR, SERVER_ERROR
from uma_trio.cli.stdio import report

if TYPE_CHECKING:
    from uma_trio.client import ServerError

HINTS: Final = {
    "E_CONTROLLER_NOT_FOUND": "uma-trio controllers list shows the tags",
    "E_PROTO_FRAME_TOO_LARGE": "send less text or smaller pictures, or serve with a larger --max-frame-bytes",
    "E_LIMIT_MAX_TOKENS": "use a smaller --max-tokens, or serve with a larger one",
    "E_MODEL_NO_CHAT_TEMPLATE": "use --raw, and the model continues the text",
    "E_SESSION_NOT_FOUND": "uma-trio sessions lists yours",
    "E_RUNTIME_INTERNAL": "the log of uma-trio serve has the details",
}
"""What a person at the command line can do about an error, by its code, where the daemon's message does not say it."""


CONTROLLER_FAILED: Final = "E_CONTROLLER_FAILED"
"""Shown without "the daemon at ... answers": the fault is the controller's."""

_VERBOSE: Final = f"{__name__}.verbose"


DEFAULT_SOCKET: Final = "The daemon's socket.  [default: $UMA_SOCKET, or the one that serve uses]"


DEFAULT_VERBOSE: Final = "Say on stderr which daemon answers: its socket, model, pid and version."


def socket_option(
    *, help: str = DEFAULT_SOCKET, verbose: str = DEFAULT_VERBOSE
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--socket``, which becomes an argument, and ``--verbose``, for ``say_which_daemon``.

    Args:
        help: of ``--socket``.
        verbose: help of ``--verbose``.
    """
    add_verbose = click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_note_verbose,
        help=verbose,
    )
    socket = click.option("--socket", type=click.Path(readable=False), help=help)  # the connection says it better
    return lambda command: socket(add_verbose(command))


def _note_verbose(context: click.Context, _: click.Parameter, given: bool) -> None:
    """A group and its subcommands share ``meta``, so the flag counts before and after the subcommand's name."""
    if given:
        context.meta[_VERBOSE] = True


def is_verbose() -> bool:
    """Whether ``--verbose`` was given."""
    return _VERBOSE in click.get_current_context().meta


@contextlib.contextmanager
def reporting_errors(command: str, socket: str | None, *, daemon: str | None = None) -> Iterator[None]:
    """End the program with one line that names the daemon and a remedy, if the daemon cannot answer.

    Args:
        daemon: its name; ``None``: that of its socket.
    """
    from uma_trio.client import BrokenProtocol, ClientError, NoDaemon, ServerError
    from uma_trio.protocol.address import socket_path

    where = daemon or f"the daemon at {socket_path(socket)}"
    try:
        yield
    except NoDaemon as error:  # names the socket itself
        report(f"uma-trio {command}: {error}")
        sys.exit(SERVER_ERROR)
    except ServerError as error:
        said = error.event.message if error.code == CONTROLLER_FAILED else f"{where} answers {error}"
        report(f"uma-trio {command}: {said}{_hint(error)}")
        sys.exit(SERVER_ERROR)
    except ClientError as error:
        report(f"uma-trio {command}: {where}: {error}")
        sys.exit(PROTOCOL_ERROR if isinstance(error, BrokenProtocol) else SERVER_ERROR)


def _hint(error: ServerError) -> str:
    if error.event.retry_after_ms is not None:
        return f"; try again in {max(1, round(error.event.retry_after_ms / 1e3))} s"
    end = " " if error.event.message.endswith("?") else "; "
    return f"{end}{HINTS[error.code]}" if error.code in HINTS else ""


async def say_which_daemon(command: str, socket: str | os.PathLike[str] | None, wait_s: float | None = 0) -> None:
    """With ``--verbose``: ask the daemon what it is, and print that on stderr."""
    if not is_verbose():
        return
    from uma_trio.client import open_client

    async with open_client(socket, wait_s=wait_s) as client:
        name_daemon(command, socket, await client.metrics())


def name_daemon(command: str, socket: str | os.PathLike[str] | None, snapshot: Mapping[str, Any]) -> None:
    """With ``--verbose``: print on stderr what the daemon is that has given this snapshot."""
    if not is_verbose():
        return
    from uma_trio.protocol.address import socket_path

    known = [f"{name} {snapshot[name]}" for name in ("model", "pid", "version") if name in snapshot]
    click.echo(f"uma-trio {command}: the daemon at {socket_path(socket)}: {', '.join(known)}", err=True)
