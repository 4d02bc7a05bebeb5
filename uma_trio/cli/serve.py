"""``uma-trio serve``: its flags are made from the configuration's fields."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from uma_trio import config
from uma_trio.config import Config, ConfigError, Setting


def _option(setting: Setting) -> Callable[[Any], Any]:
    """The flag of one setting.  Values stay text: bounds are ``config``'s affair, and its messages better."""
    help = setting.help
    if setting.default is not None:
        shown = str(setting.default).lower() if isinstance(setting.default, bool) else setting.default
        help += f"  [default: {shown}]"
    if setting.type is bool:
        return click.option(f"{setting.flag}/--no-{setting.flag[2:]}", setting.name, default=None, help=help)
    metavar = "|".join(setting.choices) or {int: "N", float: "X"}.get(setting.type, "PATH")
    return click.option(setting.flag, setting.name, default=None, metavar=metavar, help=help)


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for setting in reversed(list(config.settings())):
        command = _option(setting)(command)
    return command


@click.command("serve", short_help="Load a model once and serve it to many clients.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="YAML file with settings.")
@click.option("--print-config", is_flag=True, help="Print all settings as a YAML file, and stop.")
@_options
def command(file: Path | None, print_config: bool, **flags: Any) -> None:
    """Load a model once and serve it to many clients.

    Every setting can also stand in a YAML file (--config, see --print-config for one) or in a UMA_*
    variable (UMA_MAX_CONNECTIONS for --max-connections).  Flags beat variables beat the file.

    The first Ctrl-C or SIGTERM lets running requests end, a second one stops at once.  SIGUSR1 writes
    a metrics snapshot to a file.
    """
    try:
        settings = config.load(file, os.environ, flags)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if print_config:
        click.echo(config.to_yaml(settings), nl=False)
        return
    sys.exit(_serve(settings))


def _serve(settings: Config) -> int:
    from uma_trio.cli.running import run
    from uma_trio.daemon import listener, logs, server
    from uma_trio.models.loaded import ModelError
    from uma_trio.protocol.address import default_socket_path

    logs.configure(settings.operations)
    path = settings.listen.socket or default_socket_path()
    with _Bar() as on_progress:
        try:
            return 0 if run(functools.partial(server.serve, settings, path, on_progress=on_progress)) else 1
        except (listener.SocketPathError, ModelError) as error:
            click.echo(f"uma-trio serve: {error}", err=True)
            return 1


class _Bar:
    """A progress bar on a terminal, nothing elsewhere."""

    def __enter__(self) -> Callable[[float], None] | None:
        if not sys.stderr.isatty():
            return None
        self._shown = -1
        return self._show

    def __exit__(self, *_: object) -> None:
        self._end()

    def _show(self, share: float) -> None:
        """Called from the loading thread."""
        percent = int(100 * share)
        if percent == self._shown:
            return
        self._shown = percent
        width = 30
        bar = "━" * (percent * width // 100)
        click.echo(f"\rloading {bar:<{width}} {percent:3d} %", err=True, nl=False)
        if percent >= 100:
            self._end()

    def _end(self) -> None:
        if getattr(self, "_shown", -1) >= 0:
            click.echo("\r\x1b[2K", err=True, nl=False)
            self._shown = -1
