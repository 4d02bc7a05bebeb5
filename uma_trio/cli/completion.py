"""``uma-trio completion``: shell completion scripts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion", short_help="Print the completion script for a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.  Save it where the shell looks for completions.

    \b
      bash   uma-trio completion bash > ~/.local/share/bash-completion/completions/uma-trio
      zsh    uma-trio completion zsh > "${fpath[1]}/_uma-trio"
      fish   uma-trio completion fish > ~/.config/fish/completions/uma-trio.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "uma-trio", "_UMA_TRIO_COMPLETE").source())
