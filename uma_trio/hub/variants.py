"""The models of a repository: its GGUF files, the parts of one model together, each with its quantization."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Final, TypeVar

import attrs

from uma_trio.hub.errors import HubError
from uma_trio.models.projector import PATTERN as PROJECTOR
from uma_trio.models.split import PART

QUANTIZATION: Final = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[1-8](?:_(?:[0-9]|K|X{0,2}[SL]|M|NL|P))*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|"
    r"FP?32))(?![A-Za-z0-9])",
    re.IGNORECASE,
)

PREFERRED: Final = (
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_XL", "Q4_K_S", "MXFP4", "MXFP4_MOE", "Q5_K_M", "Q5_K_S", "IQ4_XS", "IQ4_NL", "Q4_0",
    "Q4_1", "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "BF16", "F16", "F32",
)  # fmt: skip
"""Which quantization to take where none is named, the best first: four bits keep most of the quality."""

PROJECTOR_PREFERRED: Final = ("F16", "BF16", "Q8_0")
"""The same for projectors, of which quantized ones are rare."""

_SPELLINGS: Final = {"FP16": "F16", "FP32": "F32"}
_NO_MODEL: Final = ("mmproj", "imatrix")
"""Beginnings or parts of names of GGUF files that are no language models."""

T = TypeVar("T")


@attrs.frozen
class RemoteFile:
    """A file that can be downloaded."""

    path: str
    """In its repository; for errors, with the repository."""
    size: int | None = None
    """Bytes."""
    sha256: str | None = None
    git_sha1: str | None = None
    """Hash of a small file that the repository keeps in git: of ``blob SIZE NUL CONTENT``.  Needs ``size``."""
    url: str = ""


@attrs.frozen
class Variant:
    """One model of a repository."""

    quantization: str
    """In capitals; ``""`` if the name of the file has none."""
    files: tuple[RemoteFile, ...]
    """Its parts in order; most models have one."""

    @property
    def path(self) -> str:
        return self.files[0].path

    @property
    def label(self) -> str:
        """What to put behind the colon to get this model."""
        return self.quantization or self.path

    @property
    def size(self) -> int:
        return sum(file.size or 0 for file in self.files)


def format_bytes(n: int) -> str:
    """Format ``n`` bytes, in the unit that fits."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:,.1f} {unit}"
    return f"{n} B"


def hex_hash(value: object, digits: int = 64) -> str | None:
    """A hash as text in lower case; ``None`` if ``value`` is none."""
    if not isinstance(value, str):
        return None
    text = value.lower().removeprefix("sha256:")
    return text if len(text) == digits and set(text) <= set("0123456789abcdef") else None


def quantization_of(path: str) -> str:
    """The quantization in the name of a file, or of its folder; ``""`` if there is none."""
    for name in reversed(PurePosixPath(path).parts[-2:]):
        labels: list[str] = QUANTIZATION.findall(name)
        if labels:
            label = labels[-1].upper()
            return _SPELLINGS.get(label, label)
    return ""


def group_parts(paths: Iterable[str]) -> list[list[str]]:
    """Paths of GGUF files, those of one model together and in order.  Models with missing parts are left out."""
    whole: dict[str, list[str]] = {}
    for path in sorted(paths):
        name = PurePosixPath(path).name
        if not name.lower().endswith(".gguf") or any(part in name.lower() for part in _NO_MODEL):
            continue
        match = PART.fullmatch(path)
        key = path if match is None else f"{match['stem']}/{match['count']}"
        whole.setdefault(key, []).append(path)
    groups = []
    for parts in whole.values():
        match = PART.fullmatch(parts[0])
        numbers = [int(part["number"]) for part in map(PART.fullmatch, parts) if part is not None]
        if match is None or numbers == [*range(1, int(match["count"]) + 1)]:
            groups.append(parts)
    return groups


def variants_of(files: Iterable[RemoteFile]) -> list[Variant]:
    """The models among the files of a repository, by path."""
    by_path = {file.path: file for file in files}
    return [
        Variant(quantization_of(parts[0]), tuple(by_path[part] for part in parts)) for parts in group_parts(by_path)
    ]


def projector_of(files: Iterable[RemoteFile]) -> RemoteFile | None:
    """The projector for the models of a repository, in 16 bits if there are several; ``None`` if there is none."""
    projectors = [file for file in files if fnmatch(PurePosixPath(file.path).name.lower(), PROJECTOR)]
    ranks = {name: rank for rank, name in enumerate(PROJECTOR_PREFERRED)}
    return min(projectors, key=lambda file: ranks.get(quantization_of(file.path), len(ranks)), default=None)


def best(labelled: Sequence[tuple[str, T]]) -> T:
    """The item whose quantization comes first in ``PREFERRED``; the first one if none is there."""
    ranks = {name: rank for rank, name in enumerate(PREFERRED)}
    return min(labelled, key=lambda pair: ranks.get(pair[0], len(ranks)))[1]


def choose(variants: Sequence[Variant], choice: str | None, place: str) -> Variant:
    """The model that ``choice`` means.

    Args:
        choice: a quantization, or the name or the path of a file, in any case; ``None``: see ``PREFERRED``.
        place: the repository, for errors.

    Raises:
        HubError: there is none, or more than one; the remedy lists what there is.
    """
    if not variants:
        raise HubError(
            f"{place} has no GGUF files", "look for a repository that has some; their names often end with -GGUF"
        )
    there = ", ".join(
        f"{variant.label} ({format_bytes(variant.size)})"
        for variant in sorted(variants, key=lambda variant: variant.size)
    )
    if choice is None:
        return best([(variant.quantization, variant) for variant in variants])
    wanted = choice.lower()
    for names in (
        lambda variant: (
            variant.path,
            PurePosixPath(variant.path).name,
            PurePosixPath(variant.path).stem,
            variant.quantization,
        ),
        lambda variant: (variant.quantization.removeprefix("UD-"),),
    ):
        matching = [variant for variant in variants if wanted in [name.lower() for name in names(variant)]]
        if len(matching) == 1:
            return matching[0]
        if matching:
            paths = ", ".join(variant.path for variant in matching)
            raise HubError(
                f"{place} has {len(matching)} models with {choice}", f"name the file: {place}:FILE, of {paths}"
            )
    raise HubError(
        f"{place} has no {choice}",
        f"it has {there}; write {place}:{best([(v.quantization, v) for v in variants]).label}",
    )
