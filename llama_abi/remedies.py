"""What a user can do about a library that is missing or wrong, as text for errors.  Runs nothing."""

from __future__ import annotations

import shlex
from pathlib import Path

from llama_abi.locations import DIRECTORY_VARIABLE, PLUGINS, WHEEL, folder_of_package, is_checkout, is_default


def where_checkout(action: str) -> str:
    """``action``, which needs a checkout, and that it needs one if this is none."""
    return action if is_checkout() else f"{action} in a checkout of uma-trio"


def build_command(options: str = "") -> str:
    """The command that builds a library with ``options``, for what no wheel can repair."""
    return where_checkout(f"run ./build_llama.sh {options}".rstrip())


def install_command(options: str = "", extra: str = "llama") -> str:
    """The command that installs uma-trio with a library. Until the first release, no package index has the wheels."""
    words = " ".join(filter(None, ["run pip install", options, "--find-links FOLDER", f"'uma-trio[{extra}]'"]))
    return f"{words}, where FOLDER has the wheels of uma-trio; or, in a checkout: ./build_llama.sh"


def repair_command(directory: Path, backend: str = "", *, clean: bool = False) -> str:
    """The command that repairs the library in ``directory``: a build in a checkout, otherwise an installation.

    Args:
        backend: what a library in a folder of its own was built for.
        clean: its files are damaged, so a build begins anew.
    """
    rebuild = " --clean" if clean else ""
    for package in (WHEEL, *PLUGINS):
        if directory == folder_of_package(package):
            return install_command("--upgrade --force-reinstall", package.split("_")[-1])
    if is_default(directory):
        return build_command(rebuild.strip()) if is_checkout() else install_command()
    if not is_checkout():
        return f"leave out --llama-dir, llama_dir and {DIRECTORY_VARIABLE}, and {install_command()}"
    options = f"{'--backend ' if backend else ''}{backend} --prefix {shlex.quote(str(directory))}{rebuild}".strip()
    return build_command(options)
