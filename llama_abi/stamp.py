"""The stamp of a library: what it was built from, and which declarations its header was checked against.

``python -m llama_abi.check`` writes ``stamp.json`` after it has passed, as the last step of build_llama.sh. The loader
verifies the stamp before the first call. It refuses a library of another version, a header that was replaced, and
declarations that have changed since. In a checkout, which may have been updated, it compiles changed declarations first.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import attrs

from llama_abi.check_source import check_source, mtmd_check_source
from llama_abi.errors import LibraryError
from llama_abi.locations import STAMP, default_directory, is_default
from llama_abi.remedies import repair_command

MAX_STAMP = 1 << 20
"""Most bytes of one; those of build_llama.sh have about a thousand."""
MTMD_HEADER = "mtmd-helper.h"
"""In the headers of a library that has libmtmd."""
BACKENDS = ("cpu", "metal", "vulkan", "cuda", "hip")


def pin() -> str:
    """The llama.cpp version that the declarations belong to: the pip requirement in ``pin.txt``."""
    return Path(__file__).with_name("pin.txt").read_text().split()[0]


def declarations_sha256() -> str:
    """Digest of all declarations, as the compiler sees them."""
    return hashlib.sha256(check_source().encode()).hexdigest()


def mtmd_sha256(directory: Path) -> str:
    """Digest of the declarations of libmtmd; empty if the headers in ``directory`` do not have it."""
    if not (directory / MTMD_HEADER).is_file():
        return ""
    return hashlib.sha256(mtmd_check_source().encode()).hexdigest()


def header_sha256(directory: Path) -> str:
    """Digest of the names and contents of all headers in ``directory``."""
    digest = hashlib.sha256()
    for header in filter(Path.is_file, sorted(directory.glob("*.h"))):
        digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    """The content of a small file. A pipe is not waited for, and a device is not read."""
    if not path.is_file():
        path.stat()  # says what is missing
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        data = file.read(MAX_STAMP + 1)
    if len(data) > MAX_STAMP:
        raise ValueError(f"it has more than {MAX_STAMP} bytes")
    return data


def _sizes(directory: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_size
        for path in sorted(directory.glob("lib*"))
        if path.suffix in (".so", ".dylib") and path.is_file()
    }


@attrs.frozen(kw_only=True)
class Stamp:
    """The content of ``stamp.json``."""

    pin: str
    """Version of the source: a pip requirement, or ``source:`` and a version for a build with ``--source``."""
    backend: str
    """``cpu``, ``metal``, ``vulkan``, ``cuda`` or ``hip``."""
    header_sha256: str
    """Digest of ``include/`` when the check passed."""
    declarations_sha256: str
    """Digest of the declarations when the check passed."""
    options: tuple[str, ...]
    """CMake options of the build."""
    libraries: dict[str, int]
    """File name -> size in bytes, to detect files that were replaced or copied in part."""
    mtmd_sha256: str = ""
    """Digest of the declarations of libmtmd when the check passed; empty for a library without it."""

    def __attrs_post_init__(self) -> None:
        texts = (self.pin, self.backend, self.header_sha256, self.declarations_sha256, self.mtmd_sha256)
        if not all(isinstance(text, str) and text.isprintable() for text in texts) or self.backend not in BACKENDS:
            raise ValueError("its values are not those that build_llama.sh writes")
        if not isinstance(self.options, tuple) or not all(isinstance(option, str) for option in self.options):
            raise ValueError("its options are not a list of texts")

    @property
    def has_plugins(self) -> bool:
        """Whether the backends are plug-ins that are chosen on the machine, and not linked in."""
        return "-DGGML_BACKEND_DL=ON" in self.options

    @classmethod
    def read(cls, directory: Path) -> Stamp:
        """Read the stamp of ``directory``.

        Raises:
            LibraryError: there is no stamp, or it is not readable.
        """
        path = directory / STAMP
        try:
            fields = json.loads(_read(path))
            if isinstance(fields.get("options"), list):
                fields["options"] = tuple(fields["options"])
            return cls(**fields)
        except NotADirectoryError:
            raise LibraryError(
                f"{directory} is a file", f"give the folder of a library, or {repair_command(default_directory())}"
            ) from None
        except FileNotFoundError:
            if not any(directory.glob("libllama.*")):
                correct = "" if is_default(directory) else "correct the path, or "
                raise LibraryError(
                    f"there is no library in {directory}", f"{correct}{repair_command(directory)}"
                ) from None
            raise LibraryError(
                f"{directory} has no {STAMP}, so its library and header may not match", repair_command(directory)
            ) from None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise LibraryError(f"{path} is not readable ({error})", repair_command(directory, clean=True)) from None

    def has_declarations(self, directory: Path) -> bool:
        """Whether the library was checked against the declarations of this version."""
        now = declarations_sha256(), mtmd_sha256(directory / "include")
        return (self.declarations_sha256, self.mtmd_sha256) == now

    def verify(self, directory: Path) -> None:
        """Refuse a library that has changed since it was checked.

        Raises:
            LibraryError: the version, the headers, the files or the declarations are not those of the stamp.
        """
        remedy = repair_command(directory, self.backend)
        if not self.pin.startswith("source:") and self.pin != pin():
            raise LibraryError(f"the library in {directory} is {self.pin}, but this version needs {pin()}", remedy)
        if self.header_sha256 != header_sha256(directory / "include"):
            raise LibraryError(
                f"the headers in {directory}/include have changed since the declarations were checked", remedy
            )
        if not self.has_declarations(directory):
            raise LibraryError(
                f"the declarations in llama_abi have changed since the library in {directory} was checked",
                remedy,
            )
        if self.libraries != _sizes(directory):
            raise LibraryError(
                f"the library files in {directory} have changed since the check",
                repair_command(directory, self.backend, clean=True),
            )


def write(directory: Path, *, source: str, backend: str, options: tuple[str, ...]) -> Stamp:
    """Write the stamp of ``directory``. Call it right after the check has passed."""
    stamp = Stamp(
        pin=source,
        backend=backend,
        header_sha256=header_sha256(directory / "include"),
        declarations_sha256=declarations_sha256(),
        options=options,
        libraries=_sizes(directory),
        mtmd_sha256=mtmd_sha256(directory / "include"),
    )
    part = directory / f"{STAMP}.{os.getpid()}"
    part.write_text(json.dumps(attrs.asdict(stamp), indent=2) + "\n")
    part.replace(directory / STAMP)  # other processes read it
    return stamp


def required_action(directory: Path, *, source: str, backend: str, options: tuple[str, ...]) -> tuple[str, str]:
    """Decide what build_llama.sh has to do: ``build``, ``check`` or ``nothing``, and the reason."""
    try:
        stamp = Stamp.read(directory)
    except LibraryError as error:
        return "build", error.reason
    if (stamp.pin, stamp.backend) != (source, backend):
        return "build", f"the library is {stamp.pin} for {stamp.backend}"
    if stamp.options != options:
        return "build", "the options of the build have changed"
    if stamp.libraries != _sizes(directory) or stamp.header_sha256 != header_sha256(directory / "include"):
        return "build", "files of the library are missing or have changed"
    if not stamp.has_declarations(directory):
        return "check", "the declarations have changed"
    return "nothing", "it is up to date"
