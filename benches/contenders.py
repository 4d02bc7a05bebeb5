"""Makes contenders from flags on the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from command import SERVER
from comparison import US, Contender
from rigs import Protocol, ServerSettings, llama_server_rig, uma_trio_flags, uma_trio_rig


def ours(serving: ServerSettings, settings: Iterable[str], *, protocol: Protocol = "json") -> list[Contender]:
    """A contender for each of ``settings``, which are flags of ``uma-trio serve``."""
    flags = uma_trio_flags(serving)
    return [
        Contender(server=US, setting=text, rig=partial(uma_trio_rig, [*flags, *shlex.split(text)], protocol=protocol))
        for text in settings
    ]


def rivals(folder: Path, serving: ServerSettings, settings: Iterable[str]) -> list[Contender]:
    """A contender for each of ``settings``, which are flags of llama-server."""
    return [
        Contender(server=SERVER, setting=text, rig=partial(llama_server_rig, folder, serving, shlex.split(text)))
        for text in settings
    ]
