"""Starts the runtime with the vocabulary of a GGUF file, and ends it with the daemon."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

import attrs
import setproctitle

from uma_trio.aici.controllers import shipped
from uma_trio.aici.runtime.compiler import MAX_WASM_BYTES
from uma_trio.aici.runtime.host import WasmHost
from uma_trio.aici.runtime.interface import Limits
from uma_trio.aici.runtime.module_space import Space
from uma_trio.aici.runtime.module_store import FOLDER, ModuleStore
from uma_trio.aici.runtime.server import Server
from uma_trio.aici_link.channel import Channels, Layout
from uma_trio.aici_link.futex import continue_when_parent_ends
from uma_trio.aici_link.shared_memory import remove_stale
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.files import read_bytes
from uma_trio.hub.environment import find_model_locations
from uma_trio.hub.errors import HubError
from uma_trio.hub.locate import find_here
from uma_trio.processes import parent_process
from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.vocabulary import vocabulary

log = logging.getLogger(__name__)

GIL_TURN_S: Final = 0.0005
"""Python's switch interval.

A controller that keeps calling the host would otherwise delay each message by 5 ms per thread."""

POLL_PARENT_S: Final = 0.5
"""How often to look for the parent where the system does not report its end."""

REFERENCE_NAMES = ("gpt4", "llama", "llama16", "orca", "falcon", "mistral", "mpt", "phi", "gpt2")
"""Tokenizers that the reference implementation downloads."""


@attrs.frozen
class Options:
    """The command line of the runtime."""

    tokenizer: str
    layout: Layout
    limits: Limits
    expire_s: int
    skip_slow_ms: int | None
    llama_dir: Path | None
    space: Space
    folder: Path
    """Modules are in the folder ``cache`` in it."""

    def store(self, host: WasmHost) -> ModuleStore:
        """Opens the store of modules."""
        return ModuleStore(self.folder / FOLDER, host, self.space, _shipped())


def serve(options: Options) -> NoReturn:
    """Answer the requests of the daemon that started this process.

    The process ends when the daemon says so or ends, or at SIGTERM.

    Raises:
        OSError: the shared memory cannot be opened.
        NoVocabulary, ModelError: see ``open_vocabulary``.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # the daemon ends the runtime by its process group
    continue_when_parent_ends()
    sys.setswitchinterval(GIL_TURN_S)
    setproctitle.setproctitle(f"uma-trio aicirt: {options.tokenizer}")
    _log_to_stderr()
    if removed := remove_stale():
        log.info("removed %d names of processes that were killed", len(removed))
    channels = options.layout.open()
    process_exit = _ProcessExit(channels)
    process_exit.end_at_signals()
    process_exit.end_with(parent)
    with open_vocabulary(options.tokenizer, options.llama_dir) as vocabulary:
        host = WasmHost(vocabulary, options.limits)
        threading.Thread(target=host.prepare, name="prepare", daemon=True).start()
        skip_slow_s = None if options.skip_slow_ms is None else options.skip_slow_ms / 1000
        modules = options.store(host)
        Server(
            channels, host, vocabulary, options.limits, modules, process_exit.exit, options.expire_s, skip_slow_s
        ).run()


def add_module(options: Options, path: Path) -> str:
    """Compile a module into the store; returns its id.

    Raises:
        OSError: the file cannot be read.
    """
    from uma_trio.aici_link.messages import Auth

    wasm = read_bytes(path, MAX_WASM_BYTES, pipes=True)
    with open_vocabulary(options.tokenizer, options.llama_dir) as vocabulary:
        host = WasmHost(vocabulary, options.limits)
        try:
            return options.store(host).add(wasm, Auth(is_admin=True)).module_id
        finally:
            host.close()


def _shipped() -> dict[str, bytes]:
    try:
        return shipped()
    except OSError as error:
        log.error("the controllers that come with uma-trio are missing: %s; install uma-trio again", error)
        return {}


def save_tokenizer(options: Options, path: Path) -> None:
    """Write the token trie that controllers see."""
    from uma_trio.aici.runtime.token_trie import build_trie

    with open_vocabulary(options.tokenizer, options.llama_dir) as vocabulary:
        tokens = [vocabulary.token_bytes(token) for token in range(vocabulary.n_vocab)]
        path.write_bytes(build_trie(tokens, vocabulary.eos))


class _ProcessExit:
    """Ends this process at once, since controllers may run in threads that nothing else stops."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._lock = threading.RLock()  # a signal may come while it is held

    def exit(self) -> NoReturn:
        """End with 0."""
        self._unlink_shared_memory()
        os._exit(0)

    def end_at_signals(self) -> None:
        """On a signal: remove the names of shared memory, then die of that signal."""

        def end(number: int, frame: object) -> None:
            self._unlink_shared_memory()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, end)

    def end_with(self, parent: int) -> None:
        """End when ``parent`` ends."""

        def watch() -> None:
            _wait_for_end(parent)
            self.exit()

        threading.Thread(target=watch, name="parent", daemon=True).start()

    def _unlink_shared_memory(self) -> None:
        with self._lock:
            self._channels.unlink()
        sys.stdout.flush()
        sys.stderr.flush()


def _wait_for_end(parent: int) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(parent)
        except OSError:
            pass
        else:
            if os.getppid() == parent:
                select.select([descriptor], [], [])
            return
    while os.getppid() == parent:
        time.sleep(POLL_PARENT_S)


def _log_to_stderr() -> None:
    if parent_process.LOG_VARIABLE in os.environ:
        parent_process.send_log_to_it(logging.DEBUG)
        return
    level = os.environ.get("RUST_LOG", "warn").upper()
    levels = {"TRACE": logging.DEBUG, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "ERROR": logging.ERROR}
    logging.basicConfig(level=levels.get(level, logging.WARNING), format="%(levelname)s %(name)s: %(message)s")


# -- the vocabulary of a GGUF file ---------------------------------------------------------------


class NoVocabulary(Exception):
    """There is no such vocabulary; the message says why and what to give instead."""


class ModelVocabulary:
    """The tokens of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.eos_id is None:
            raise NoVocabulary("this model has no EOS token, which controllers end with")
        self._tokenizer = tokenizer
        self.n_vocab = tokenizer.n_tokens
        self.eos = tokenizer.eos_id

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_to_bytes(token)

    def tokenize(self, text: bytes) -> TokenIds:
        return self._tokenizer.encode(
            text.decode("utf-8", "replace"), add_special=False, parse_special=False, continues=True
        )

    def tokenize_prompt(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids


@contextlib.contextmanager
def open_vocabulary(name: str, llama_dir: Path | None = None) -> Iterator[ModelVocabulary]:
    """The vocabulary of a model, until the end of the context.

    Args:
        name: a GGUF file, with or without ``.gguf``, a model of this machine, or ``embedded``.

    Raises:
        NoVocabulary: there is no such vocabulary.
        ModelError: see ``uma_trio.tokenizer.vocabulary``.
    """
    with vocabulary(_find(name), llama_dir) as tokenizer:
        yield ModelVocabulary(tokenizer)


def _find(name: str) -> Path:
    """The GGUF file that ``name`` means.  Raises ``NoVocabulary``."""
    if (path := Path(f"{name}.gguf")).is_file():
        return path
    try:
        path = find_here(name, find_model_locations(os.environ)).path
    except HubError as error:
        hint = "; this runtime downloads no tokenizers" if name in REFERENCE_NAMES else ""
        raise NoVocabulary(f"there is no tokenizer {name}{hint}: {error}") from None
    if not path.is_file():
        raise NoVocabulary(f"there is no tokenizer {name}; give a GGUF file, the name of a model, or embedded")
    return path
