"""How a model can be named: what a person writes, and what it refers to."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

import attrs

from uma_trio.hub.errors import HubError
from uma_trio.hub.urls import origin_of, parse_url, without_secrets
from uma_trio.models.packaged import PACKAGED

HUB: Final = "https://huggingface.co"
HUB_HOSTS: Final = ("huggingface.co", "hf.co", "www.huggingface.co")
MAIN: Final = "main"
EXAMPLES: Final = "give a name such as Qwen/Qwen3-0.6B-GGUF:Q8_0, an https:// URL of a .gguf file, or a path"

_WORD: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY: Final = re.compile(rf"({_WORD}/{_WORD})(?:@([\w./-]{{1,200}}))?(?::(.{{1,300}}))?")
_SHORT: Final = re.compile(rf"{_WORD}(?::[A-Za-z0-9._-]{{1,100}})?")
_SHORT_ALIAS: Final = re.compile(_WORD)


@attrs.frozen
class HubReference:
    """A model of a repository of the Hugging Face Hub."""

    repository: str
    """``owner/name``"""
    choice: str | None = None
    """A quantization, or the path of a file; ``None``: the default, Q4_K_M if available."""
    revision: str = MAIN
    """A branch, a tag or a commit."""

    @property
    def repository_at_revision(self) -> str:
        """The repository, with the revision if it is not the main branch."""
        return self.repository if self.revision == MAIN else f"{self.repository}@{self.revision}"

    def __str__(self) -> str:
        return self.repository_at_revision if self.choice is None else f"{self.repository_at_revision}:{self.choice}"


@attrs.frozen
class UrlReference:
    """A file of any web server."""

    url: str

    def __str__(self) -> str:
        return without_secrets(self.url)


@attrs.frozen
class PathReference:
    """A file or a folder of this machine."""

    path: str

    def __str__(self) -> str:
        return self.path


@attrs.frozen
class ShortName:
    """A name without an owner: an alias, a part of a longer name, or the name that Ollama uses."""

    name: str

    def __str__(self) -> str:
        return self.name


Reference = HubReference | UrlReference | PathReference | ShortName


def parse(text: str, endpoint: str = HUB) -> Reference:
    """What ``text`` refers to.  Looks at the text only: whether there is such a model, others find out.

    Args:
        endpoint: URL of the hub, as in HF_ENDPOINT.

    Raises:
        HubError: it is not a name, a URL or a path.
    """
    if "://" in text:
        return _of_url(text, endpoint)
    if text.startswith(("/", "./", "../", "~")) or text in (".", "..") or text.lower().endswith(".gguf"):
        named = _of_hub(text) if ":" in text and not text.startswith((".", "/", "~")) else None
        return named or PathReference(text)
    if (named := _of_hub(text)) is not None:
        return named
    if _SHORT.fullmatch(text):
        return ShortName(text)
    if "/" in text and text.isprintable():
        return PathReference(text)
    raise HubError(f"{text[:100]!r} is not a name of a model", EXAMPLES)


def check_alias(name: str) -> None:
    """Raises HubError if ``name`` cannot be an alias."""
    if name.lower() in PACKAGED:
        raise HubError(f"{name} is the name of a model of the package", "choose another one")
    if not _SHORT_ALIAS.fullmatch(name) or name.lower().endswith(".gguf"):
        raise HubError(
            f"{name[:100]!r} cannot be an alias", "use letters, digits, dots, dashes and underscores, such as qwen3"
        )


def _of_hub(text: str) -> HubReference | None:
    host, _, rest = text.partition("/")
    if host.lower() in HUB_HOSTS:
        text = rest
    match = _REPOSITORY.fullmatch(text)
    if match is None or not text.isprintable():
        return None
    choice = match[3]
    return HubReference(match[1], None if choice in (None, "latest") else choice, match[2] or MAIN)


def _of_url(url: str, endpoint: str) -> Reference:
    parts = parse_url(url)
    is_hub = parts.hostname in HUB_HOSTS and parts.scheme == "https"
    base = urlsplit(endpoint).path.rstrip("/")
    if origin_of(url) == origin_of(endpoint) and parts.path.startswith(f"{base}/"):
        is_hub, path = True, parts.path[len(base) :]
    else:
        path = parts.path
    if not is_hub:
        return UrlReference(url)
    segments = [unquote(segment) for segment in path.strip("/").split("/")]
    repository = _of_hub("/".join(segments[:2])) if len(segments) >= 2 else None
    if repository is not None and len(segments) == 2:
        return repository
    if repository is not None and len(segments) > 4 and segments[2] in ("resolve", "blob", "raw"):
        return attrs.evolve(repository, choice="/".join(segments[4:]), revision=segments[3])
    if repository is not None and len(segments) >= 4 and segments[2] == "tree":
        return attrs.evolve(repository, revision="/".join(segments[3:]))
    raise HubError(f"{without_secrets(url)} is not the page or the file of a model", EXAMPLES)
