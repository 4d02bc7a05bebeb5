"""Opens the durable storage of a model, which is the journal of its sessions, the states of their sequences and its encoded
pictures, and that of detached answers.

Storage is optional: if the folder cannot be used, the daemon logs the reason and serves without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import structlog

from uma_trio.config import MB, Config
from uma_trio.daemon.engines.loaded import LoadedModel
from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.serving.offload import StateFiles
from uma_trio.daemon.store.answer_folder import AnswerFolder, AnswerFolderError
from uma_trio.daemon.store.journal import Journal, JournalError
from uma_trio.daemon.store.picture_folder import PictureFileError, PictureFolder
from uma_trio.daemon.store.state_folder import StateFileError, StateFolder
from uma_trio.files import state_folder
from uma_trio.models.fingerprint import model_fingerprint
from uma_trio.models.packaged import model_path

log = structlog.get_logger("uma_trio.daemon")

MAX_READERS: Final = 4
"""Most threads that read one large state.  A few saturate the memory, and queue enough requests for a fast disk."""


@attrs.frozen
class Storage:
    """The storage of one model; a missing part is disabled or unusable."""

    journal: Journal | None = None
    files: StateFiles | None = None
    states: Sequence[SavedState] = ()
    """States that were found in ``files``, least recently used first."""
    pictures: PictureFolder | None = None
    """Encoded pictures."""


def storage_name(config: Config) -> str:
    """Returns the name of a model's folder there.  Models with the same content have the same one.  Blocks briefly.

    Raises:
        OSError: the model's file cannot be read.
    """
    return model_fingerprint(model_path(config.model.model))


@contextlib.contextmanager
def open_storage(config: Config, model: LoadedModel, name: str) -> Iterator[Storage]:
    """Opens the storage of ``model`` until the context ends.  Blocks while it scans the saved states.

    Args:
        name: of its folder.
    """
    folder = state_folder(config.sessions.state_dir) / name
    with contextlib.ExitStack() as stack:
        journal: Journal | None = None
        files: StateFolder | None = None
        states: list[SavedState] = []
        try:
            journal = Journal(folder / "sessions")
            stack.callback(journal.close)
        except JournalError as error:
            log.error("sessions will not survive a restart", reason=str(error), flag="--state-dir")
        if config.sessions.offload and journal is not None:
            try:
                files = StateFolder(
                    folder / "states",
                    max_bytes=config.sessions.offload_max_mb * MB,
                    fingerprint=model.state_name,
                    readers=min(MAX_READERS, model.info.spare_cores),
                )
                stack.callback(files.close)
                states = files.scan()
                for problem in files.problems:
                    log.warning("a saved state cannot be used", reason=problem)
            except StateFileError as error:
                log.error("KV caches of sessions will not be written to disk", reason=str(error), flag="--state-dir")
        pictures: PictureFolder | None = None
        if (
            config.sessions.pictures_max_mb
            and (model.prompts.pictures.sees or model.prompts.pictures.hears)
            and journal is not None
        ):
            try:
                pictures = PictureFolder(folder / "pictures", max_bytes=config.sessions.pictures_max_mb * MB)
                stack.callback(pictures.close)
            except PictureFileError as error:
                log.error("encoded pictures will not be written to disk", reason=str(error), flag="--state-dir")
        yield Storage(journal, files, states, pictures)


@contextlib.contextmanager
def open_answers(config: Config) -> Iterator[AnswerFolder | None]:
    """Opens the folder of detached answers until the context ends; ``None`` if it cannot be used."""
    try:
        folder = AnswerFolder(state_folder(config.sessions.state_dir) / "answers")
    except AnswerFolderError as error:
        log.warning("detached answers will not survive a restart", reason=str(error), flag="--state-dir")
        yield None
        return
    with contextlib.closing(folder):
        yield folder
