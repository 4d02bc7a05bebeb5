"""What a module may import, and what it must export.

Types as letters: ``i`` for i32, ``I`` for i64.  A function is its parameters and its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

Signature: TypeAlias = tuple[str, str]

ENV: Final = "env"
WASI: Final = "wasi_snapshot_preview1"
CONSTRAINT: Final = "uma_trio_constraint"
"""Constraints of the engine; not a part of AICI."""

IMPORTS: Final[Mapping[str, Mapping[str, Signature]]] = {
    ENV: {
        "aici_host_read_blob": ("iii", "i"),
        "aici_host_module_arg": ("", "i"),
        "aici_host_process_arg": ("", "i"),
        "aici_host_token_trie": ("", "i"),
        "aici_host_tokens": ("", "i"),
        "aici_host_tokenize": ("ii", "i"),
        "aici_host_return_logit_bias": ("i", ""),
        "aici_host_return_process_result": ("ii", ""),
        "aici_host_storage_cmd": ("ii", "i"),
        "aici_host_self_seq_id": ("", "i"),
        "aici_host_eos_token": ("", "i"),
        "aici_host_stop": ("", ""),
    },
    WASI: {
        "args_get": ("ii", "i"),
        "args_sizes_get": ("ii", "i"),
        "clock_time_get": ("iIi", "i"),
        "environ_get": ("ii", "i"),
        "environ_sizes_get": ("ii", "i"),
        "fd_close": ("i", "i"),
        "fd_fdstat_get": ("ii", "i"),
        "fd_filestat_get": ("ii", "i"),
        "fd_filestat_set_size": ("iI", "i"),
        "fd_prestat_dir_name": ("iii", "i"),
        "fd_prestat_get": ("ii", "i"),
        "fd_read": ("iiii", "i"),
        "fd_readdir": ("iiiIi", "i"),
        "fd_seek": ("iIii", "i"),
        "fd_sync": ("i", "i"),
        "fd_write": ("iiii", "i"),
        "path_create_directory": ("iii", "i"),
        "path_filestat_get": ("iiiii", "i"),
        "path_filestat_set_times": ("iiiiIIi", "i"),
        "path_link": ("iiiiiii", "i"),
        "path_open": ("iiiiiIIii", "i"),
        "path_readlink": ("iiiiii", "i"),
        "path_remove_directory": ("iii", "i"),
        "path_rename": ("iiiiii", "i"),
        "path_unlink_file": ("iii", "i"),
        "poll_oneoff": ("iiii", "i"),
        "proc_exit": ("i", ""),
        "random_get": ("ii", "i"),
        "sched_yield": ("", "i"),
    },
    CONSTRAINT: {
        "constraint_new": ("ii", "i"),
        "constraint_mask": ("i", "i"),
        "constraint_allowed_one": ("i", "i"),
        "constraint_advance": ("iii", "i"),
        "constraint_can_end": ("i", "i"),
        "constraint_is_done": ("i", "i"),
        "constraint_drop": ("i", ""),
    },
}

EXPORTS: Final[Mapping[str, Signature]] = {
    "aici_init": ("", ""),
    "aici_create": ("", "i"),
    "aici_init_prompt": ("i", ""),
    "aici_pre_process": ("i", ""),
    "aici_mid_process": ("i", ""),
    "aici_post_process": ("i", ""),
}
"""Functions that a module must export, next to ``memory``."""

OPTIONAL_EXPORTS: Final[Mapping[str, Signature]] = {"aici_panic": ("", "")}
"""Functions that a module may export; under these names it exports nothing else."""
