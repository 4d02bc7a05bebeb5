"""Names of modules on disk: a file for each, so that damage takes one name and no other."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from uma_trio.aici.messages import TagInfo
from uma_trio.aici.runtime.store_files import replace_file
from uma_trio.files import read_text
from uma_trio.protocol.controllers import is_tag

log = logging.getLogger(__name__)

MODULE_ID: Final = re.compile(r"[0-9a-f]{64}")


class OwnedTag(TagInfo, frozen=True):
    """A name as it is stored."""

    owner: str
    """Whose module it means; the one who has set it may be an administrator."""

    @property
    def info(self) -> TagInfo:
        """What others see of it."""
        return TagInfo(**{name: getattr(self, name) for name in TagInfo.__struct_fields__})


class TagFiles:
    """The names in a folder.

    Args:
        folder: need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, tag: str) -> OwnedTag | None:
        """A name; ``None`` if it is not there, or its file is damaged."""
        if not is_tag(tag):
            return None
        path = self._path(tag)
        try:
            info = msgspec.json.decode(read_text(path), type=OwnedTag)
            if info.tag != tag or not MODULE_ID.fullmatch(info.module_id):
                raise ValueError("it is about something else")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            warn_once(path, f"the tag {tag} is ignored, its file is damaged: {error}")
            return None
        return info

    def all(self) -> list[OwnedTag]:
        """All names whose files can be read."""
        return [info for tag in self.names() if (info := self.find(tag)) is not None]

    def names(self) -> list[str]:
        """All names that have a file, damaged or not."""
        try:
            found = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            warn_once(self._folder, f"the tags in {self._folder} cannot be read: {error.strerror}")
            return []
        return [tag for each in found if each.endswith(".json") and is_tag(tag := each.removesuffix(".json"))]

    def write(self, infos: Iterable[OwnedTag]) -> None:
        """Set names.  Raises ``OSError``."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for info in infos:
            replace_file(self._path(info.tag), msgspec.json.encode(info))
            _warned.discard(self._path(info.tag))

    def remove(self, tag: str) -> None:
        """Remove a name.  Raises ``OSError``."""
        self._path(tag).unlink(missing_ok=True)

    def _path(self, tag: str) -> Path:
        return self._folder / f"{tag}.json"


_warned: set[Path] = set()


def warn_once(path: Path, message: str) -> None:
    """Log what is wrong with a file, the first time."""
    if path not in _warned:
        _warned.add(path)
        log.warning("%s", message)
