"""The stamp beside a library: what it was built from, and which declarations its header agreed with.

``python -m llama_abi.check`` writes ``stamp.json`` when it has passed, as the last step of
build_llama.sh.  The loader asks ``Stamp.read`` and ``Stamp.verify``; so a library of another
commit, a header that was exchanged afterwards, and declarations edited since are each refused
before the first call.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import attrs

from llama_abi.csource import source as c_source
from llama_abi.errors import LibraryError

STAMP = "stamp.json"
DEFAULT_DIRECTORY = Path(__file__).with_name("lib")


def pin() -> str:
    """The llama.cpp that these declarations are for, as ``pin.txt`` has it: a pip requirement."""
    return Path(__file__).with_name("pin.txt").read_text().split()[0]


def declarations_sha256() -> str:
    """Of all declarations, as the compiler sees them."""
    return hashlib.sha256(c_source().encode()).hexdigest()


def header_sha256(directory: Path) -> str:
    """Of every header in ``directory``, by name and content."""
    digest = hashlib.sha256()
    for header in sorted(directory.glob("*.h")):
        digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    return digest.hexdigest()


def fix(directory: Path, backend: str = "") -> str:
    """The command that puts ``directory`` right."""
    if directory == DEFAULT_DIRECTORY.resolve():
        return "run ./build_llama.sh"
    return f"run ./build_llama.sh{' --backend ' if backend else ''}{backend} --prefix {directory}"


def _sizes(directory: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_size for path in sorted(directory.glob("lib*")) if path.suffix in (".so", ".dylib")
    }


@attrs.frozen(kw_only=True)
class Stamp:
    """What ``stamp.json`` says."""

    pin: str
    """A pip requirement; for a build with ``--source`` it is ``source:`` and that tree's version."""
    backend: str
    """``cpu``, ``metal``, ``vulkan`` or ``cuda``."""
    header_sha256: str
    """Of ``include/`` when the check passed."""
    declarations_sha256: str
    """Of our declarations when the check passed."""
    options: tuple[str, ...]
    """The cmake options of the build."""
    libraries: dict[str, int]
    """File name -> size in bytes, so that a half-copied or exchanged file is noticed."""

    @classmethod
    def read(cls, directory: Path) -> Stamp:
        """The stamp of ``directory``.

        Raises:
            LibraryError: there is none, or it is not readable.
        """
        path = directory / STAMP
        try:
            found = json.loads(path.read_bytes())
            return cls(**{**found, "options": tuple(found["options"])})
        except FileNotFoundError:
            if not directory.is_dir():
                raise LibraryError(f"there is no library in {directory}: {fix(directory)}") from None
            raise LibraryError(
                f"{directory} has no {STAMP}, so nothing says that its library and header belong "
                f"together: {fix(directory)}"
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LibraryError(f"{path} is not readable ({error}): {fix(directory)} --clean") from None

    def verify(self, directory: Path) -> None:
        """Refuse a library that is not the one that was checked.

        Raises:
            LibraryError: another pin, headers or files exchanged, declarations edited since.
        """
        remedy = fix(directory, self.backend)
        if not self.pin.startswith("source:") and self.pin != pin():
            raise LibraryError(f"the library in {directory} is {self.pin}, but this version needs {pin()}: {remedy}")
        if self.header_sha256 != header_sha256(directory / "include"):
            raise LibraryError(
                f"the headers in {directory / 'include'} are not those that the declarations were "
                f"checked against: {remedy}"
            )
        if self.declarations_sha256 != declarations_sha256():
            raise LibraryError(
                f"the declarations in llama_abi have changed since they were checked against the header "
                f"in {directory}: {remedy} (it takes a second, only the check runs again)"
            )
        if self.libraries != _sizes(directory):
            raise LibraryError(f"the library files in {directory} are not those that were stamped: {remedy} --clean")


def write(directory: Path, *, source: str, backend: str, options: tuple[str, ...]) -> Stamp:
    """Stamp ``directory``, whose header has just been checked."""
    stamp = Stamp(
        pin=source,
        backend=backend,
        header_sha256=header_sha256(directory / "include"),
        declarations_sha256=declarations_sha256(),
        options=options,
        libraries=_sizes(directory),
    )
    (directory / STAMP).write_text(json.dumps(attrs.asdict(stamp), indent=2) + "\n")
    return stamp


def state(directory: Path, *, source: str, backend: str, options: tuple[str, ...]) -> tuple[str, str]:
    """What build_llama.sh has to do for ``directory``, and why: ``build``, ``check`` or ``nothing``."""
    try:
        stamp = Stamp.read(directory)
    except LibraryError as error:
        return "build", str(error).partition(":")[0]
    if (stamp.pin, stamp.backend) != (source, backend):
        return "build", f"the library there is {stamp.pin} for {stamp.backend}"
    if stamp.options != options:
        return "build", "the options of the build have changed"
    if stamp.libraries != _sizes(directory) or stamp.header_sha256 != header_sha256(directory / "include"):
        return "build", "files of the library are missing or were exchanged"
    if stamp.declarations_sha256 != declarations_sha256():
        return "check", "the declarations have changed"
    return "nothing", "it is up to date"
