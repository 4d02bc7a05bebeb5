"""What goes wrong with a model at a start, as one reason with a remedy."""

from __future__ import annotations

import contextlib
import difflib
import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from uma_trio.engine_link.installed import library_fix
from uma_trio.engine_link.messages import NO_MEMORY, EngineDied, EngineError, LoadError
from uma_trio.errors import ErrorWithRemedy
from uma_trio.models.gguf_header import REMEDY, GgufError

GIVE_A_FILE: Final = "give the path of a .gguf file"
OUT_OF_FILES: Final = (errno.EMFILE, errno.ENFILE)
MORE_FILES: Final = "raise the limit on open files, such as with ulimit -n 4096"

_FUNCTION: Final = re.compile(r"^(?:\w+: )+(?:error loading model(?: \w+)?: )?(?:\w+: )*")
"""What llama.cpp puts in front of a reason: the functions that the error has passed."""
_FOLLOWS: Final = re.compile(r"failed to (?:load model|allocate buffer|initialize the context)")
"""A line that only reports that the function failed which the line before is about."""
_NO_CONTEXT: Final = "cannot create a context: "
_SIGNALS: Final = {
    "SIGABRT": f"llama.cpp cannot serve this file: {REMEDY}",
    "SIGSEGV": f"llama.cpp cannot serve this file: {REMEDY}",
    "SIGKILL": "if nobody did that by hand, the memory was full: lower --ctx, or take a smaller model",
}
"""What to do when the engine died while it loaded the model, by signal."""


class ModelError(ErrorWithRemedy):
    """The model cannot be loaded."""


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with the model at ``path`` into a ``ModelError``.

    Raises:
        ModelError: the model cannot be loaded.
    """
    try:
        yield
    except FileNotFoundError:
        raise ModelError(f"there is no model at {path}", _nearest(path)) from None
    except IsADirectoryError:
        raise ModelError(f"{path} is a folder", _within(path)) from None
    except PermissionError:
        raise ModelError(f"{path} may not be read", "run chmod u+r on it, or start the daemon as its owner") from None
    except OSError as error:
        remedy = MORE_FILES if error.errno in OUT_OF_FILES else GIVE_A_FILE
        raise ModelError(f"cannot load {path}: {error.strerror or error}", remedy) from error
    except (GgufError, EngineError, EngineDied, LoadError) as error:
        reason, remedy = _explain(error, path)
        explanation = ModelError(f"cannot load {path}: {reason}", remedy)
        explanation.is_about_memory = isinstance(error, LoadError) and error.is_about_memory
        raise explanation from error


def _explain(error: Any, path: Path) -> tuple[str, str]:
    reason = error.reason if isinstance(error, ErrorWithRemedy) else str(error)
    reason = reason.removeprefix("cannot load ").removeprefix(f"{path}: ")
    if remedy := getattr(error, "remedy", ""):  # the file, the settings or the library are wrong
        return reason, remedy
    died = isinstance(error, EngineDied) or isinstance(error.__cause__, EngineDied)
    return _of_death(reason) if died else readable(reason)


def readable(reason: str) -> tuple[str, str]:
    """llama.cpp's chain of error lines as one reason and its remedy.  Any other text is returned as it is."""
    of_context = reason.startswith(_NO_CONTEXT)
    lines = reason.removeprefix(_NO_CONTEXT).split("; ")
    if not any("_" in line.split(":")[0] and _FUNCTION.match(line) for line in lines):
        return reason, ""
    if NO_MEMORY.search(reason):
        if of_context:
            return "the context does not fit into memory", "lower --ctx, --parallel or --batch-tokens"
        return (
            "the weights do not fit into memory",
            "take a smaller model or a stronger quantization, or keep fewer layers on the GPU with --gpu-layers",
        )
    causes = [_FUNCTION.sub("", line) for line in (*(line for line in lines if not _FOLLOWS.search(line)), lines[0])]
    if of_context:
        return f"llama.cpp refuses these settings ({causes[0]})", "change those of the section model"
    if match := re.search(r"unknown model architecture: '([^']*)'", reason):
        return (
            f"the llama.cpp of this build does not know its architecture {match[1]!r}",
            "take another model, or a newer uma-trio",
        )
    if match := re.search(r"SPLIT_MODE_TENSOR not implemented for architecture '([^']*)'", reason):
        return (
            f"llama.cpp cannot divide layers of the architecture {match[1]!r} between devices",
            "set split_mode to layer",
        )
    return f"llama.cpp refuses the file ({causes[0]})", REMEDY


def _of_death(reason: str) -> tuple[str, str]:
    if NO_MEMORY.search(reason):  # such as a GPU that has too little for its own context
        return reason, "free memory of the GPU, or hide the GPU from this program, such as with CUDA_VISIBLE_DEVICES="
    if "SIGILL" in reason.split(":")[0]:
        return reason, f"the library is built for another processor: {library_fix()}"
    fix = next((fix for name, fix in _SIGNALS.items() if name in reason.split(":")[0]), None)
    return reason, fix or "the log has its last lines, and --log-level debug more of them"


def _nearest(path: Path) -> str:
    """What to give instead of a file that does not exist."""
    with contextlib.suppress(OSError):
        others = {file.name: file for file in path.parent.iterdir() if file.suffix == ".gguf"}
        if near := difflib.get_close_matches(path.name, others, n=1, cutoff=0.7):
            return f"did you mean {others[near[0]]}?"
    return GIVE_A_FILE


def _within(folder: Path) -> str:
    """What to give instead of a folder."""
    with contextlib.suppress(OSError):
        files = sorted(file for file in folder.iterdir() if file.suffix == ".gguf")
        if files:
            return f"give a file in it, such as {files[0]}"
    return GIVE_A_FILE
