"""The API of the Hugging Face Hub, as far as it is needed: the files of a repository, and a search."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import attrs

from uma_trio.hub.errors import HubError, Interrupted
from uma_trio.hub.http import CHECK_ADDRESS, Http
from uma_trio.hub.names import HubReference
from uma_trio.hub.variants import RemoteFile, hex_hash

LOGIN: Final = "make a token in the settings of your account there, and put it into HF_TOKEN"
MAX_SUGGESTIONS: Final = 5
MAX_SIZE: Final = 1 << 63
"""Bytes that a file may have; a larger number is none."""


@attrs.frozen
class Repository:
    """A revision of a repository."""

    commit: str
    files: tuple[RemoteFile, ...]


async def read_repository(http: Http, endpoint: str, reference: HubReference) -> Repository:
    """The files of the repository, with sizes, hashes and the URLs of exactly this commit.

    Raises:
        HubError: there is no such repository, or it may not be read; says what to do.
        Interrupted: a retry may help.
    """
    revision = quote(reference.revision, safe="")
    url = f"{endpoint}/api/models/{reference.repository}/revision/{revision}?blobs=true"
    status, headers, body = await http.read_json(url)
    if status != 200:
        raise await _refusal(http, endpoint, reference, status, headers)
    if not isinstance(body, dict) or not isinstance(body.get("siblings"), list):
        raise HubError(f"{endpoint} does not answer as a hub does", CHECK_ADDRESS)
    commit = body.get("sha")
    if not isinstance(commit, str) or not commit.isalnum():
        commit = reference.revision
    base = f"{endpoint}/{reference.repository}/resolve/{quote(commit, safe='')}"
    files = [_file(entry, base) for entry in body["siblings"] if isinstance(entry, dict)]
    return Repository(commit, tuple(file for file in files if file is not None))


def explain_refused_file(
    endpoint: str, name: str, status: int, headers: Mapping[str, str], *, has_token: bool
) -> HubError:
    """Why the hub or the server does not give a file."""
    if status in (401, 403):
        return _no_access(status, headers, endpoint, name, has_token=has_token)
    return HubError(f"{name}: the server answers with the status {status}", "try again later, or use another source")


async def suggestions(http: Http, endpoint: str, words: str) -> list[str]:
    """Names of repositories with GGUF files that the hub finds, the most downloaded first.

    Raises:
        HubError, Interrupted: the hub cannot be asked.
    """
    query = f"search={quote(words)}&filter=gguf&sort=downloads&direction=-1&limit={MAX_SUGGESTIONS}"
    status, _, body = await http.read_json(f"{endpoint}/api/models?{query}")
    if status != 200 or not isinstance(body, list):
        return []
    names = [entry.get("id") or entry.get("modelId") for entry in body if isinstance(entry, dict)]
    return [name for name in names if isinstance(name, str) and name.isprintable()][:MAX_SUGGESTIONS]


async def _refusal(
    http: Http, endpoint: str, reference: HubReference, status: int, headers: Mapping[str, str]
) -> HubError:
    code = headers.get("x-error-code", "")
    name = reference.repository
    if code == "RevisionNotFound":
        return HubError(
            f"{name} has no revision {reference.revision}", f"see its branches at {endpoint}/{name}/tree/main"
        )
    if status == 404 or code == "RepoNotFound" or (status == 401 and not http.has_token and code != "GatedRepo"):
        # the hub answers 401 for what does not exist, so as not to say which private repositories do
        words = name.partition("/")[2].replace("-", " ").replace("_", " ").removesuffix(" GGUF")
        similar = []
        with contextlib.suppress(HubError, Interrupted):
            similar = [repository for repository in await suggestions(http, endpoint, words) if repository != name]
        there = f"; repositories that are similar: {', '.join(similar)}" if similar else ""
        private = "" if http.has_token else f"; if it is private, {LOGIN}"
        return HubError(f"there is no repository {name} at {endpoint}", f"check the spelling{there}{private}")
    if status in (401, 403):
        return _no_access(status, headers, endpoint, name, has_token=http.has_token)
    return HubError(f"{endpoint} answers with the status {status} for {name}", "try again later")


def _no_access(status: int, headers: Mapping[str, str], endpoint: str, name: str, *, has_token: bool) -> HubError:
    if headers.get("x-error-code") == "GatedRepo":
        accept = f"accept its conditions at {endpoint}/{name.partition(':')[0].partition('@')[0]}"
        if has_token:
            return HubError(f"{name} is gated, and the account of this token has no access", accept)
        return HubError(f"{name} is gated", f"{accept}; then {LOGIN}")
    if has_token:
        return HubError(f"{name}: the token gives no access (status {status})", f"is it still valid? otherwise {LOGIN}")
    return HubError(f"{name} needs a login (status {status})", LOGIN)


def _file(entry: dict[str, Any], base: str) -> RemoteFile | None:
    path, size, lfs = entry.get("rfilename"), entry.get("size"), entry.get("lfs")
    if not isinstance(path, str):
        return None
    lfs = lfs if isinstance(lfs, dict) else {}
    size = lfs.get("size", size)
    size = size if isinstance(size, int) and 0 <= size < MAX_SIZE else None
    sha256 = hex_hash(lfs.get("sha256") or lfs.get("oid"))
    git_sha1 = None if lfs or size is None else hex_hash(entry.get("blobId"), 40)
    return RemoteFile(path, size, sha256, git_sha1, f"{base}/{quote(path)}")
