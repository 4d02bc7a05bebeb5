"""The command line ``uma-trio``.  Each command is a module of this package, imported when it is called."""

from __future__ import annotations

import difflib
import importlib
import os
from typing import Any

import click
from click.shell_completion import CompletionItem

import uma_trio
from uma_trio.cli.exits import check_arguments, clean_exit, open_closed_streams

COMMANDS = {
    "run": "Download a model if need be, and chat with it.",
    "serve": "Load one or several models, and serve them to many clients.",
    "ask": "Ask the daemon and stream the answer.",
    "attach": "Follow, list, cancel and delete detached answers.",
    "explain": "Say why tokens of a prompt were computed again.",
    "chat": "Chat with the daemon on a terminal.",
    "batch": "Answer a file of requests when nobody else needs the model.",
    "rerank": "Rank documents by how well they answer a query.",
    "sessions": "List, show, export, fork and close sessions.",
    "controllers": "Upload, tag, list and run controllers (AICI).",
    "keys": "Make, list and revoke API keys for HTTP.",
    "service": "Run the daemon as a service of systemd or launchd.",
    "pull": "Download a model.",
    "models": "List, show, remove and name the models of this machine.",
    "ps": "Show the models that are loaded, and who uses them.",
    "stop": "Stop the daemon.",
    "demo": "Watch short chats stay fast next to a long document.",
    "metrics": "Show the metrics of the daemon.",
    "replay": "Compute a logged answer again, and compare.",
    "perf": "Report on a perf log, as tables and plots.",
    "bench": "Run the benchmarks and write a report.",
    "tokenize": "Show the tokens of a text.",
    "doctor": "Check the installation and suggest fixes.",
    "aicirt": "Run Wasm controllers for an engine (AICI).",
    "completion": "Print the completion script for a shell.",
}

OF_OTHER_PROGRAMS = {
    "generate": "uma-trio ask, or uma-trio chat",
    **dict.fromkeys(("list", "ls"), "uma-trio models"),
    "show": "uma-trio models show",
    **dict.fromkeys(("rm", "remove"), "uma-trio models remove"),
    **dict.fromkeys(("load", "unload"), "uma-trio models"),
    **dict.fromkeys(("top", "stats"), "uma-trio metrics --watch"),
    **dict.fromkeys(("status", "check"), "uma-trio doctor"),
    "version": "uma-trio --version",
    "help": "uma-trio --help",
}
"""What stands here for the commands that users know from other programs, such as Ollama."""


os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
"""numpy starts a thread for each core when it is imported, and they spin; nothing here multiplies matrices with it.  The
processes that a command starts inherit the variable."""


class SuggestingGroup(click.Group):
    """A group that suggests the nearest command for a misspelt one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in known and not ctx.resilient_parsing:
            ctx.fail(f"there is no command {args[0]}; {self.hint(args[0], known)}")
        return super().resolve_command(ctx, args)

    def hint(self, name: str, known: list[str]) -> str:
        """What to write in place of the command ``name``, which does not exist."""
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        return f"did you mean {nearest[0]}?" if nearest else f"the commands are {', '.join(known)}."


class LazyGroup(SuggestingGroup):
    """A group that imports a command when it is needed, so that --help is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def hint(self, name: str, known: list[str]) -> str:
        return f"use {OF_OTHER_PROGRAMS[name]}" if name in OF_OTHER_PROGRAMS else super().hint(name, known)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"uma_trio.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        check_arguments(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def main(self, *args: Any, **extra: Any) -> Any:
        open_closed_streams()
        if "_UMA_TRIO_COMPLETE" in os.environ:
            importlib.import_module("uma_trio.cli.completion")  # adds our protocol to those of click
        return super().main(*args, **extra)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with clean_exit():  # --help is printed here
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with clean_exit():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(uma_trio.__version__, prog_name="uma-trio")
def main() -> None:
    """An LLM daemon over llama.cpp whose streams never freeze.

    Many clients share each model, on a Unix socket and over HTTP.

    \b
      uma-trio run embedded                           chat with the embedded demo model
      uma-trio serve                                  serve it to many clients
      uma-trio ask "What is the capital of France?"   ask it, in another terminal
      uma-trio doctor                                 find out why something does not work
    """
