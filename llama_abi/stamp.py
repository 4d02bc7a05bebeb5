"""The stamp of a library: what it was built from, and which declarations its header was checked against.

``python -m llama_abi.check`` writes ``stamp.json`` after it has passed, as the last step of build_llama.sh. The loader
verifies the stamp before the first call. It refuses a library of another version, a header that was replaced, and
declarations that have changed since. In a checkout, which may have been updated, it compiles changed declarations first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
from pathlib import Path

import attrs

from llama_abi.check_source import check_source, mtmd_check_source
from llama_abi.errors import LibraryError

STAMP = "stamp.json"
MAX_STAMP = 1 << 20
"""Most bytes of one; those of build_llama.sh have about a thousand."""
MTMD_HEADER = "mtmd-helper.h"
"""In the headers of a library that has libmtmd."""
BACKENDS = ("cpu", "metal", "vulkan", "cuda", "hip")
DIRECTORY_VARIABLE = "UMA_LLAMA_DIR"
DEFAULT_DIRECTORY = Path(__file__).with_name("lib")
"""Where build_llama.sh installs the library."""
WHEEL = "uma_trio_llama"
"""The package that has a library which was built before, for machines without a compiler."""
PLUGINS = ("uma_trio_llama_cuda13", "uma_trio_llama_cuda12", "uma_trio_llama_vulkan")
"""Packages with a further backend for such a library, the best first."""


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


def folder_of_package(name: str) -> Path | None:
    """The folder ``lib`` of an installed package; ``None`` if it is not installed, or only an empty folder is left."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0], "lib").resolve()


def plugin_folders() -> list[Path]:
    """The folders of the installed ``PLUGINS``."""
    return [folder for name in PLUGINS if (folder := folder_of_package(name)) is not None]


def library_directory(named: Path | None = None) -> Path:
    """Where the library is: the first of ``named``, ``$UMA_LLAMA_DIR``, what build_llama.sh has built, and the wheel.

    If there is none, this is where build_llama.sh would install it.
    """
    chosen = named or os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(os.path.realpath(chosen))  # resolve() refuses links that lead to themselves
    if (DEFAULT_DIRECTORY / STAMP).exists():
        return DEFAULT_DIRECTORY.resolve()
    return folder_of_package(WHEEL) or DEFAULT_DIRECTORY.resolve()


def is_checkout() -> bool:
    """Whether this package runs from a checkout, which can build a library."""
    return (DEFAULT_DIRECTORY.parents[1] / "build_llama.sh").exists()


def in_checkout(action: str) -> str:
    """``action``, which needs a checkout, and where to do it if this is none."""
    return action if is_checkout() else f"{action} in a checkout of uma-trio"


def build(options: str = "") -> str:
    """The command that builds a library with ``options``, for what no wheel can repair."""
    return in_checkout(f"run ./build_llama.sh {options}".rstrip())


def install(options: str = "", extra: str = "llama") -> str:
    """The command that installs uma-trio with a library. Until the first release, no package index has the wheels."""
    words = " ".join(filter(None, ["run pip install", options, "--find-links FOLDER", f"'uma-trio[{extra}]'"]))
    return f"{words}, where FOLDER has the wheels of uma-trio; or, in a checkout: ./build_llama.sh"


def fix(directory: Path, backend: str = "", *, clean: bool = False) -> str:
    """The command that repairs the library in ``directory``: a build in a checkout, otherwise an installation.

    Args:
        backend: what a library in a folder of its own was built for.
        clean: its files are damaged, so a build begins anew.
    """
    rebuild = " --clean" if clean else ""
    for package in (WHEEL, *PLUGINS):
        if directory == folder_of_package(package):
            return install("--upgrade --force-reinstall", package.split("_")[-1])
    if directory == DEFAULT_DIRECTORY.resolve():
        return build(rebuild.strip()) if is_checkout() else install()
    if not is_checkout():
        return f"leave out --llama-dir, llama_dir and {DIRECTORY_VARIABLE}, and {install()}"
    return build(f"{'--backend ' if backend else ''}{backend} --prefix {shlex.quote(str(directory))}{rebuild}".strip())


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
            found = json.loads(_read(path))
            if isinstance(found.get("options"), list):
                found["options"] = tuple(found["options"])
            return cls(**found)
        except NotADirectoryError:
            raise LibraryError(
                f"{directory} is a file", f"give the folder of a library, or {fix(DEFAULT_DIRECTORY.resolve())}"
            ) from None
        except FileNotFoundError:
            if not any(directory.glob("libllama.*")):
                correct = "" if directory == DEFAULT_DIRECTORY.resolve() else "correct the path, or "
                raise LibraryError(f"there is no library in {directory}", f"{correct}{fix(directory)}") from None
            raise LibraryError(
                f"{directory} has no {STAMP}, so its library and header may not match", fix(directory)
            ) from None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise LibraryError(f"{path} is not readable ({error})", fix(directory, clean=True)) from None

    def has_declarations(self, directory: Path) -> bool:
        """Whether the library was checked against the declarations of this version."""
        now = declarations_sha256(), mtmd_sha256(directory / "include")
        return (self.declarations_sha256, self.mtmd_sha256) == now

    def verify(self, directory: Path) -> None:
        """Refuse a library that has changed since it was checked.

        Raises:
            LibraryError: the version, the headers, the files or the declarations are not those of the stamp.
        """
        remedy = fix(directory, self.backend)
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
                fix(directory, self.backend, clean=True),
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
