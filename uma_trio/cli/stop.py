"""``uma-trio stop``: end the daemon."""

from __future__ import annotations

import os
import signal
import time
from typing import Final

import click

from uma_trio.cli.client_options import name_daemon, reporting_errors, socket_option
from uma_trio.cli.stdio import fail

ANSWER_S: Final = 5.0
"""How long the daemon may take to say which process it is."""
POLL_S: Final = 0.05


@click.command("stop")
@click.argument("model", required=False)
@click.option("--no-wait", is_flag=True, help="Return at once, while the daemon ends.")
@socket_option()
def command(model: str | None, no_wait: bool, socket: str | None) -> None:
    """Stop the daemon when its running requests have ended, as Ctrl-C in its terminal does.

    To unload a model, and leave the daemon running: uma-trio models unload MODEL.

    Exit codes: 0 it has ended, 1 it cannot be stopped, 2 no daemon runs.
    """
    if model is not None:
        raise click.UsageError(f"stop ends the daemon; to unload a model: uma-trio models unload {model}")
    from uma_trio.connect.query import query
    from uma_trio.connect.reasons import is_locked
    from uma_trio.protocol.address import socket_path

    path = socket_path(socket)
    with reporting_errors("stop", socket):
        try:
            [answer] = query(path, {"type": "metrics"}, timeout_s=ANSWER_S)
        except TimeoutError:
            fail("stop", f"the daemon at {path} does not answer")
    name_daemon("stop", path, answer)
    pid = answer["pid"]
    try:
        os.kill(pid, signal.SIGTERM)
    except OSError as error:  # it runs elsewhere, as in a container, or for another user
        fail("stop", f"cannot stop the process {pid}: {error.strerror}")
    while not no_wait and is_locked(path):
        time.sleep(POLL_S)
