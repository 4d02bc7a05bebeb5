"""``uma-trio serve``: run the daemon.  The flags are made from the fields of the configuration."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from uma_trio import config
from uma_trio.cli.completion import model_file
from uma_trio.cli.stdio import fail
from uma_trio.config import Config, ConfigError, Setting

if TYPE_CHECKING:
    from uma_trio.daemon.doors.claim import Claim
    from uma_trio.daemon.engines.process import EngineProcess


def _option(setting: Setting) -> Callable[[Any], Any]:
    """Make the flag of one setting.  Its value stays text: ``config`` converts it, with better errors than click."""
    help = setting.help
    if setting.name == "model":
        help += " Several flags serve several models."
    if setting.default is not None and not setting.is_list:
        shown = str(setting.default).lower() if isinstance(setting.default, bool) else setting.default
        help += f"  [default: {shown}]"
    if setting.type is bool:
        return click.option(f"{setting.flag}/--no-{setting.flag[2:]}", setting.name, default=None, help=help)
    names = (setting.flag,) if setting.short is None else (setting.short, setting.flag)
    takes_several = setting.is_list or setting.name == "model"
    return click.option(
        *names,
        setting.name,
        **({"multiple": True} if takes_several else {"default": None}),
        type=click.UNPROCESSED,
        metavar=setting.metavar,
        help=help,
        shell_complete=_completions_of(setting),
    )


def _completions_of(setting: Setting) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if setting.name == "model":
            return model_file(context, parameter, incomplete)
        if setting.metavar.endswith(("PATH", "FILE")):
            return [CompletionItem(incomplete, type="dir" if setting.name.endswith("_dir") else "file")]
        return [CompletionItem(choice) for choice in setting.choices if choice.startswith(incomplete)]

    return complete


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for setting in reversed(list(config.settings())):
        command = _option(setting)(command)
    return command


OF_OTHER_SERVERS: Final = {
    **dict.fromkeys(("--ctx-size", "--max-model-len", "--context-length"), "--ctx N, for all sequences together"),
    **dict.fromkeys(("--max-num-seqs", "--max-running-requests"), "--parallel N"),
    **dict.fromkeys(("--n-gpu-layers", "--n_gpu_layers"), "--gpu-layers N"),
    **dict.fromkeys(("--batch-size", "-b", "--ubatch-size", "-ub", "--max-num-batched-tokens"), "--batch-tokens N"),
    "-fa": "--flash-attn on, off or auto",
    "-fit": "--fit on or off",
    "-kvu": "--kv-unified on",
    **dict.fromkeys(("--cache-type-k", "-ctk"), "--type-k TYPE"),
    **dict.fromkeys(("--cache-type-v", "-ctv"), "--type-v TYPE"),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), "--memory-limit-mb SIZE"),
    "--device": "--devices NAMES",
    **dict.fromkeys(
        ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"), "--split-mode tensor, which takes all --devices"
    ),
    **dict.fromkeys(("--cpu-moe", "-cmoe"), "--n-cpu-moe N, with the model's number of layers"),
    "--served-model-name": "--alias NAME",
    **dict.fromkeys(("--lora", "--lora-scaled", "--lora-modules", "--lora-paths"), "--adapter NAME=FILE"),
    **dict.fromkeys(("--hf-repo", "-hfr", "-hf"), "--model NAME, such as Qwen/Qwen3-0.6B-GGUF:Q8_0"),
    **dict.fromkeys(("--api-key", "--api-key-file"), "uma-trio keys create NAME, which makes a key"),
    **dict.fromkeys(("--cors-origins", "--allowed-origins"), "--http-origins ORIGINS"),
    **dict.fromkeys(("--ssl-certfile", "--ssl-cert-file"), "--tls-certificate FILE"),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-key-file"), "--tls-key FILE"),
    "--chat-template-file": "--chat-template FILE",
    "--n-predict": "--default-max-tokens N",
    "--metrics": "--http, whose /metrics is always there",
    "--jinja": "nothing, since templates are always Jinja",
    **dict.fromkeys(("--verbose", "-v"), "--log-level debug"),
    **dict.fromkeys(("--embeddings", "--embedding"), "nothing, since embeddings are always served"),
    **dict.fromkeys(("--cont-batching", "-cb"), "nothing, since batching is always continuous"),
}
"""Flags of llama-server, vLLM and SGLang, and what to write here."""

ALIASES: Final = {"--background-tbt-ms": "--background-itl-ms", "--target-tbt-ms": "--target-itl-ms"}
"""Other names of flags; the help leaves them out."""


USUAL: Final = ("model", "ctx", "parallel", "socket", "http")
"""The settings that the help shows first."""


class _ServeCommand(click.Command):
    """A command whose help groups the flags by the sections of the configuration, after the usual ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True  # to say below what is wrong with them
        if not ctx.resilient_parsing:  # before click takes -ctk for -c tk
            hints = {**OF_OTHER_SERVERS, **dict.fromkeys(("--host", "--port", "-p"), f"--http {_address(args)}")}
            for name in (arg.partition("=")[0] for arg in args):
                if name in hints:
                    ctx.fail(f"serve has no {name}; write {hints[name]}")
        for at, arg in enumerate(args):
            name, *value = arg.split("=", 1)
            args[at] = "=".join((ALIASES.get(name, name), *value))
        super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            given = shlex.join(ctx.args)
            if any(arg.endswith(".gguf") for arg in ctx.args) and not ctx.params["model"]:
                ctx.fail(f"serve takes flags only; for a model write: uma-trio serve --model {given}")
            ctx.fail(f"serve takes flags only, and {given} belongs to none of them; put a value with spaces in quotes")
        return ctx.args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = {setting.name: setting.section for setting in config.settings()}
        groups: dict[str, list[tuple[str, str]]] = {"Usual options": [], "Options": []}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None:
                section = sections.get(option.name or "")
                title = f"{section.capitalize()} options" if section else "Options"
                title = "Usual options" if option.name in USUAL else title
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _address(args: list[str]) -> str:
    """The address for HTTP that the flags of other servers name."""
    words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("-") else [arg])]
    given = dict(itertools.pairwise(words))
    host, port = given.get("--host"), given.get("--port", given.get("-p", "PORT"))
    return port if host is None else f"{host}:{port}"


@click.command("serve", cls=_ServeCommand)
@click.option("--config", "file", type=click.Path(path_type=Path), help="YAML file with settings.")
@click.option("--print-config", is_flag=True, help="Print all settings as a YAML file, and exit.")
@_options
def command(file: Path | None, print_config: bool, **flags: Any) -> None:
    """Load one or several models, and serve them to many clients.

    Every flag can also be set in a YAML file (--config; --print-config prints an example) or in an environment variable
    (UMA_MAX_CONNECTIONS for --max-connections).  Flags override variables, and variables override the file.
    docs/CONFIG.md explains which settings to think about, and how each of several models gets settings of its own.

    N may be 32k (1024), SIZE 512MiB or 8GiB, and TIME 500ms, 30s, 5m or 1h.  A plain number has the unit in the name of
    the flag.

    Ctrl-C or SIGTERM stops the daemon after the running requests; a second one stops it at once.  SIGUSR1 writes a
    metrics snapshot to a file. SIGHUP reads the list of models of the file again, and lets the HTTP gateway read its keys
    and quotas again.

    \b
      uma-trio serve --model ~/models/some-model.gguf --ctx 32768
      uma-trio serve --model embedded --model ~/models/some-model.gguf
      uma-trio serve --config uma.yaml --log-level debug
    """
    try:
        settings = config.load(file, os.environ, flags)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if print_config:
        click.echo(config.to_yaml(settings), nl=False)
        return
    if settings.http.listen is not None:
        _check_http(settings)

    def read_again() -> Config:
        from uma_trio.cli.model_option import located

        return located(config.load(file, os.environ, flags), may_pull=False)

    from uma_trio.daemon.doors.claim import SocketPathError, claim
    from uma_trio.protocol.address import socket_path

    try:
        with claim(socket_path(settings.listen.socket), os.environ) as claimed:
            sys.exit(_serve(_located(settings), claimed, read_again))
    except SocketPathError as error:
        fail("serve", str(error))


def _check_http(settings: Config) -> None:
    """End the program if the settings of HTTP are not safe, or do not work."""
    from uma_trio.errors import ErrorWithRemedy
    from uma_trio.gateway import startup

    try:
        startup.check_http_settings(settings)
    except ErrorWithRemedy as error:
        fail("serve", str(error))


def _located(settings: Config) -> Config:
    """The settings with the model's path; downloads it if it is not here, or ends the program."""
    from uma_trio.cli.exits import INTERRUPTED
    from uma_trio.cli.model_option import located
    from uma_trio.cli.run_trio import Interrupted
    from uma_trio.hub.errors import HubError

    try:
        return located(settings, may_pull=True)
    except (HubError, ConfigError) as error:
        fail("serve", str(error))
    except Interrupted:
        click.echo("stopped; the next start resumes the download", err=True)
        sys.exit(INTERRUPTED)


def _serve(settings: Config, claimed: Claim, read_again: Callable[[], Config]) -> int:
    gc.disable()  # imports leave little to collect, and each collection would look at all that they made
    from uma_trio.daemon.engines.process import EngineProcess

    engine = None
    try:
        engine = EngineProcess.start() if settings.engine.mode == "process" else None
        return _serve_with(engine, settings, claimed, read_again)
    except OSError as error:
        from uma_trio.engine_link.load_errors import MORE_FILES, OUT_OF_FILES

        if error.errno not in OUT_OF_FILES:
            raise
        fail("serve", f"{error.strerror}; {MORE_FILES}")
    finally:
        if engine is not None:
            engine.close()


def _serve_with(
    engine: EngineProcess | None, settings: Config, claimed: Claim, read_again: Callable[[], Config]
) -> int:
    """Serve.  The process of the first engine imports its libraries while this one imports its own."""
    from uma_trio.cli.run_trio import run
    from uma_trio.daemon import logs, server
    from uma_trio.daemon.doors.claim import SocketPathError
    from uma_trio.daemon.gateway_process import HttpAddressError
    from uma_trio.daemon.kv_events.publisher import KvEventsError
    from uma_trio.engine_link.load_errors import ModelError
    from uma_trio.errors import ModelUnavailable

    gc.freeze()  # so later collections are shorter as well
    gc.enable()
    logs.configure(settings.operations)
    with _progress_bar() as on_progress:
        try:
            serve = functools.partial(
                server.serve,
                settings,
                claimed,
                read_again=read_again,
                on_progress=on_progress,
                engine_process=engine,
                task_status=_Hint(claimed.path),
            )
            return 0 if run(serve) else 1
        except (SocketPathError, HttpAddressError, KvEventsError, ModelError, ModelUnavailable) as error:
            logs.flush()
            fail("serve", str(error))


class _Hint:
    """Says what to try next, on a terminal, when the daemon accepts clients."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def started(self, value: object = None) -> None:
        """See ``trio.TaskStatus``."""
        from uma_trio.daemon import logs
        from uma_trio.protocol.address import SOCKET_VARIABLE, default_socket_path

        if not sys.stderr.isatty():
            return
        elsewhere = {name: value for name, value in os.environ.items() if name != SOCKET_VARIABLE}
        is_default = self._path == default_socket_path(elsewhere)
        socket = "" if is_default else f" --socket {shlex.quote(os.path.abspath(self._path))}"
        logs.flush()
        commands = f'uma-trio chat{socket}   or   uma-trio ask{socket} "What is the capital of France?"'
        click.echo(f"\nNow, in another terminal:   {commands}\n", err=True)


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[float], None] | None]:
    """Show a progress bar for loading the model.  Yields ``None`` if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=1.0)

        def update(fraction: float) -> None:  # called in the thread that loads the model
            progress.update(task, completed=fraction)
            if fraction >= 1:  # from here on the terminal belongs to the log
                progress.stop()

        yield update
