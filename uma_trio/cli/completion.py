"""``uma-trio completion``: shell completion scripts, and what options and arguments complete to.

The scripts run ``uma-trio`` with the line up to the cursor in ``LINE_VARIABLE``.  It prints a line for each
completion: a kind, a value and a help text, with tabs between.  Kinds are ``plain``, and ``file``, ``dir`` and ``model``,
for which the shell completes the path.
"""

from __future__ import annotations

import os
from typing import Final

import click
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, split_arg_string

LINE_VARIABLE: Final = "_UMA_TRIO_LINE"

DAEMON_S: Final = 0.5
"""How long the daemon may take to list the sessions."""

BASH: Final = r"""
_uma_trio() {
    local current=${COMP_WORDS[COMP_CWORD]} line=${COMP_LINE:0:COMP_POINT} kind value help word before
    [[ $current == [=:] ]] && current=
    word=${line##*[[:space:]=]}    # bash divides words at more characters than blanks: at = and :
    before=${word%"$current"}
    COMPREPLY=()
    compopt -o nosort 2> /dev/null
    while IFS=$'\t' read -r kind value help; do
        case $kind in
            plain)
                value=${value#"$before"}
                [[ $current == [\"\']* ]] || printf -v value %q "$value"
                COMPREPLY+=("$value") ;;
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
            model)
                compopt -o default -o filenames
                local IFS=$'\n'
                if [[ $current != *[\"\'\\]* && -n $(compgen -f -X '!*.gguf' -- "$current") ]]; then
                    COMPREPLY=($(compgen -f -X '!*.gguf' -- "$current"; compgen -d -- "$current"))
                fi ;;
        esac
    done < <(_UMA_TRIO_LINE=$line _UMA_TRIO_COMPLETE=lines_complete "${1/#\~/$HOME}" 2> /dev/null)
}
complete -F _uma_trio uma-trio
"""

ZSH: Final = r"""#compdef uma-trio
_uma_trio() {
    local kind value help paths line="${(j: :)words[1,CURRENT-1]} $QIPREFIX$IPREFIX$PREFIX"
    local -a described
    while IFS=$'\t' read -r kind value help; do
        case $kind in
            plain) described+=("${value//:/\\:}${help:+:$help}") ;;
            *) paths=$kind ;;
        esac
    done < <(_UMA_TRIO_LINE=$line _UMA_TRIO_COMPLETE=lines_complete ${~words[1]} 2> /dev/null)
    [[ $PREFIX == -*=* ]] && compset -P '*='
    case $paths in
        file) _files ;;
        dir) _files -/ ;;
        model) _files -g '*.gguf' ;;
    esac
    (( $#described )) && _describe -V value described
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _uma_trio "$@"
else
    compdef _uma_trio uma-trio
fi
"""

FISH: Final = r"""
function __uma_trio
    set -l token (commandline -ct)
    set -l option ''    # of --option=value: fish completes the whole word
    string match -qr -- '^-[^=]*=' $token
    and set option (string replace -r -- '=.*' '=' $token)
    set -l value (string replace -r -- '^-[^=]*=' '' $token)
    for line in (_UMA_TRIO_LINE=(commandline -cp | string collect) _UMA_TRIO_COMPLETE=lines_complete uma-trio 2> /dev/null)
        set -l parts (string split \t -- $line)
        switch $parts[1]
            case plain
                string join \t -- $option$parts[2] $parts[3]
            case file
                string join \n -- $option(__fish_complete_path $value)
            case dir
                string join \n -- $option(__fish_complete_directories $value '')
            case model
                if test -z $option
                    __fish_complete_suffix .gguf
                else
                    string join \n -- $option(__fish_complete_path $value)
                end
        end
    end
end
complete --command uma-trio --no-files --keep-order --arguments '(__uma_trio)'
"""

SCRIPTS: Final = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@click.command("completion")
@click.argument("shell", type=click.Choice([*SCRIPTS]))
def command(shell: str) -> None:
    """Print the completion script for SHELL.  Save it where the shell looks for completions.

    It completes commands, flags, their values, files, and the names of your sessions if a daemon runs.

    \b
      bash   mkdir -p ~/.local/share/bash-completion/completions
             uma-trio completion bash > ~/.local/share/bash-completion/completions/uma-trio
      zsh    uma-trio completion zsh > "${fpath[1]}/_uma-trio"
      fish   mkdir -p ~/.config/fish/completions
             uma-trio completion fish > ~/.config/fish/completions/uma-trio.fish

    To try it in a running bash: source <(uma-trio completion bash)
    """
    click.echo(SCRIPTS[shell].lstrip("\n"), nl=False)


class Lines(ShellComplete):
    """The side of ``uma-trio`` in the protocol of the scripts, the same for all shells."""

    name = "lines"
    source_template = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Split the line.  A character at its end makes the word at the cursor the last one, even if it is empty."""
        *words, last = split_arg_string(os.environ.get(LINE_VARIABLE, "") + "_")
        return words[1:], last[:-1]

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type}\t{item.value}\t{' '.join((item.help or '').split())}".rstrip("\t")


add_completion_class(Lines)


# -- what options and arguments complete to: for the parameter ``shell_complete`` of click -----------------


def model_file(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A GGUF file, or the name of a model of this machine."""
    return [*model_name(context, parameter, incomplete), CompletionItem(incomplete, type="model")]


def model_name(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The name of a model of this machine, or an alias."""
    from uma_trio.cli.model_option import model_locations_of_environment
    from uma_trio.config import ConfigError
    from uma_trio.hub.caches import all_models
    from uma_trio.hub.errors import HubError
    from uma_trio.hub.folder import ModelFolder

    try:
        places = model_locations_of_environment()
        aliases = ModelFolder(places.folder).aliases()
    except (ConfigError, HubError):
        return []
    helps = {**{model.name: model.origin for model in all_models(places)}, **aliases}
    return [CompletionItem(name, help=help) for name, help in helps.items() if name.startswith(incomplete)]


def any_file(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A file, for an option that also takes something else."""
    return [CompletionItem(incomplete, type="file")]


def session_name(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A session of the running daemon, the most recently used first; nothing if none runs or it does not answer at once."""
    from uma_trio.cli.listed import STORED_RESPONSE
    from uma_trio.connect.errors import ClientError
    from uma_trio.connect.query import query
    from uma_trio.connect.reasons import is_locked
    from uma_trio.protocol.address import socket_path

    levels: list[click.Context] = [context, *([context.parent] if context.parent is not None else [])]
    path = socket_path(next(filter(None, (level.params.get("socket") for level in levels)), None))
    model = next(filter(None, (level.params.get("model") for level in levels)), None)
    question = {"type": "sessions", "model": model} if model else {"type": "sessions"}
    already = context.params.get(parameter.name or "")
    try:
        # without a lock there is no daemon; connecting could make systemd start one
        events = query(path, question, timeout_s=DAEMON_S) if is_locked(path) else []
        sessions = [session for event in events for session in event["sessions"]]
    except (ClientError, TimeoutError, LookupError):
        return []
    return [
        CompletionItem(name, help=f"{session['turns']} turns")
        for session in sessions
        if (name := session["session_id"]).startswith(incomplete)
        and name.isprintable()
        and (incomplete or not STORED_RESPONSE.fullmatch(name))
        and not (isinstance(already, tuple) and name in already)
    ]
