"""Brings a model to this machine: finds out which files it has, downloads, checks and installs them.

Two processes that pull one model share one download: the second one waits, and shows the progress of the first.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

import attrs
import trio

from uma_trio.hub.caches import cached_models
from uma_trio.hub.download import Download, PullReporter
from uma_trio.hub.environment import ModelLocations, read_token
from uma_trio.hub.errors import FileRefused, HubError, Interrupted
from uma_trio.hub.folder import File, InstalledModel, Manifest, ModelFolder
from uma_trio.hub.http import CHECK_NETWORK, Delays, Http, open_http, retrying
from uma_trio.hub.huggingface import explain_refused_file, read_repository, suggestions
from uma_trio.hub.names import EXAMPLES, HubReference, UrlReference
from uma_trio.hub.partial import DownloadFolder, DownloadState, PartialFile, check_room
from uma_trio.hub.urls import without_secrets
from uma_trio.hub.variants import RemoteFile, choose, projector_of, variants_of
from uma_trio.models.gguf_check import GgufError, check_gguf_parts
from uma_trio.models.projector import check_projector
from uma_trio.models.split import PART, model_stem, part_name

NOT_MODELS: Final = (
    *(".txt", ".md", ".html", ".htm", ".json", ".yaml", ".yml", ".xml", ".pdf", ".py"),
    *(".safetensors", ".bin", ".pt", ".pth", ".onnx", ".zip", ".gz", ".tar"),
)
"""Ends of names that are certainly not those of GGUF files; a URL may also end in anything else, such as a number."""
POLL_S: Final = 0.2
"""Between two looks at the download of another process."""


@attrs.frozen(kw_only=True)
class PullPlan:
    """What there is to download."""

    name: str
    """What the model will be called."""
    source: str
    """For people, and to recognise it later."""
    revision: str | None = None
    files: tuple[RemoteFile, ...]
    targets: tuple[Path, ...]
    """Where the files go."""
    sees_for: Path | None = None
    """The model whose projector this is; ``None``: a model."""


class Puller:
    """Pulls models into our own folder.

    Args:
        silence_s: a connection that brings nothing for this time is cut.
    """

    def __init__(
        self, places: ModelLocations, reporter: PullReporter, *, delays: Delays | None = None, silence_s: float = 30.0
    ) -> None:
        self._places = places
        self._reporter = reporter
        self._delays = delays or Delays()
        self._silence_s = silence_s
        self._folder = ModelFolder(places.folder)

    async def pull(self, reference: HubReference | UrlReference, sha256: str | None = None) -> InstalledModel:
        """Bring the model to this machine, unless it is here already.

        Args:
            sha256: what the file of a URL must have.

        Raises:
            HubError: it does not exist, may not be downloaded, does not fit on the disk, or is not a model.
        """
        if self._places.is_offline:
            raise HubError(f"{reference} is not on this machine, and nothing is downloaded offline", _ONLINE)
        async with self._open_http() as http:
            if isinstance(reference, UrlReference):
                return await self._bring(http, self._plan_url(reference, sha256))
            plan, projector = await self._plan_hub(http, reference)
            model = await self._bring(http, plan)
            if projector is not None and model.path == plan.targets[0]:  # not in the folders of other programs
                try:
                    await self._bring(http, attrs.evolve(projector, sees_for=model.path))
                except FileRefused as error:
                    self._reporter.message(f"the model will not see pictures: {error}")
            return model

    async def _bring(self, http: Http, plan: PullPlan) -> InstalledModel:
        here = await trio.to_thread.run_sync(self._find, plan)
        return here or await self._fetch(http, plan)

    async def suggest(self, words: str) -> list[str]:
        """Names of repositories of the hub that may be meant.

        Raises:
            HubError: the hub cannot be asked.
        """
        async with self._open_http() as http:
            try:
                return await suggestions(http, self._places.endpoint, words)
            except Interrupted as error:
                raise HubError(str(error), CHECK_NETWORK) from None

    def _open_http(self) -> AbstractAsyncContextManager[Http]:
        return open_http(self._places.endpoint, read_token(self._places), silence_s=self._silence_s)

    # -- what to download -----------------------------------------------------------------------

    async def _plan_hub(self, http: Http, reference: HubReference) -> tuple[PullPlan, PullPlan | None]:
        """The model, and the projector of its repository, which goes next to it."""
        endpoint = self._places.endpoint
        read = functools.partial(read_repository, http, endpoint, reference)
        repository = await retrying(read, self._delays, lambda: 0, self._reporter.message)
        place = reference.repository_at_revision
        variant = choose(variants_of(repository.files), reference.choice, place)
        source = f"{endpoint}/{reference.repository}/blob/{reference.revision}"
        model = PullPlan(
            name=f"{place}:{variant.label}",
            source=f"{source}/{variant.path}",
            revision=repository.commit,
            files=tuple(attrs.evolve(file, path=f"{place}/{file.path}") for file in variant.files),
            targets=tuple(self._folder.hub_install_path(place, file.path) for file in variant.files),
        )
        projector = projector_of(repository.files)
        if projector is None:
            return model, None
        name = PurePosixPath(projector.path).name
        return model, PullPlan(
            name=f"{place}:{projector.path}",
            source=f"{source}/{projector.path}",
            revision=repository.commit,
            files=(attrs.evolve(projector, path=f"{place}/{projector.path}"),),
            targets=(self._folder.hub_install_path(place, str(PurePosixPath(variant.path).with_name(name))),),
        )

    def _plan_url(self, reference: UrlReference, sha256: str | None) -> PullPlan:
        parts = urlsplit(reference.url)
        segments = [unquote(segment) for segment in parts.path.split("/") if segment]
        name = segments[-1] if segments else "model"
        if name.lower().endswith(NOT_MODELS):
            raise HubError(f"{reference} is not a .gguf file", EXAMPLES)
        match = PART.fullmatch(name)
        names = [name if name.lower().endswith(".gguf") else f"{name}.gguf"]
        urls = [reference.url]
        if match is not None:
            if sha256 is not None:
                raise HubError(f"{reference} is one of {int(match['count'])} files", "leave out --sha256")
            count = int(match["count"])
            names = [part_name(match["stem"], number, count) for number in range(1, count + 1)]
            stem = parts.path[: -len("-00001-of-00001.gguf")]
            urls = [urlunsplit(parts._replace(path=part_name(stem, number, count))) for number in range(1, count + 1)]
        place = ("web", parts.netloc.replace(":", "_"), *segments[:-1])
        return PullPlan(
            name=model_stem(PurePosixPath(names[0])),
            source=str(reference),
            files=tuple(RemoteFile(without_secrets(url), url=url, sha256=sha256) for url in urls),
            targets=tuple(self._folder.install_path(*place, file_name) for file_name in names),
        )

    # -- what is here ---------------------------------------------------------------------------

    def _find(self, plan: PullPlan) -> InstalledModel | None:
        """The model or the projector, if exactly these files are here.  Blocks."""
        wanted = tuple(file.sha256 for file in plan.files)
        installed = self._folder.find(plan.targets)
        if installed is not None and installed.source == plan.source and (None in wanted or installed.hashes == wanted):
            return installed
        if None in wanted or plan.sees_for is not None:
            return None
        sizes = [file.size for file in plan.files]
        for model in cached_models(self._places):
            if model.hashes == wanted:
                return model
            if model.name == plan.name and None in model.hashes and [f.stat().st_size for f in model.files] == sizes:
                return model
        return None

    # -- the download ---------------------------------------------------------------------------

    async def _fetch(self, http: Http, plan: PullPlan) -> InstalledModel:
        folder = self._folder.download_folder(plan.name)
        waits = False
        while True:
            try:
                with folder.locked() as is_mine:
                    if is_mine:
                        here = await trio.to_thread.run_sync(self._find, plan) if waits else None
                        return here or await self._fetch_locked(http, plan, folder)
                if not waits:
                    self._reporter.message(f"another process downloads {plan.name}; waiting for it")
                    waits = True
                self._show_other(plan, folder)
                await trio.sleep(POLL_S)
            except OSError as error:
                raise HubError(
                    f"cannot write into {self._places.folder}: {error.strerror or error}",
                    "make it writable, or choose another folder with models_dir",
                ) from None

    def _show_other(self, plan: PullPlan, folder: DownloadFolder) -> None:
        state = folder.state()
        if state is None:
            return
        self._reporter.start(plan.name, state.sizes)
        for number, (done, size) in enumerate(zip(folder.sizes(len(state.sizes)), state.sizes, strict=True)):
            self._reporter.progress(number, done, size)

    async def _fetch_locked(self, http: Http, plan: PullPlan, folder: DownloadFolder) -> InstalledModel:
        state = self._begin(plan, folder)
        self._reporter.start(plan.name, state.sizes)
        hashes = []
        for number, wanted in enumerate(plan.files):
            file = await trio.to_thread.run_sync(
                PartialFile, folder.part(number), wanted.size if wanted.git_sha1 else None
            )
            try:
                await Download(
                    http=http,
                    wanted=wanted,
                    file=file,
                    number=number,
                    etag=state.etags[number],
                    reporter=self._reporter,
                    on_learned=functools.partial(self._note, folder, number),
                    refusal=functools.partial(
                        explain_refused_file, self._places.endpoint, wanted.path, has_token=http.has_token
                    ),
                    delays=self._delays,
                ).run()
                hashes.append((file.size, file.sha256))
            except HubError:
                if not any(folder.sizes(len(plan.files))):
                    folder.remove()
                raise
            finally:
                file.close()
        return await trio.to_thread.run_sync(self._install, plan, folder, hashes)

    def _begin(self, plan: PullPlan, folder: DownloadFolder) -> DownloadState:
        """Save the state of the download, discard parts of another version, and check the free space.

        Raises:
            HubError: there is too little.
        """
        identity = [f"{file.sha256 or file.git_sha1 or file.url}" for file in plan.files]
        state = folder.state()
        if state is None or state.identity != identity:
            for part in folder.path.glob("*.part"):
                part.unlink()
            none: list[str | None] = [None] * len(identity)
            state = DownloadState(
                name=plan.name, sizes=[file.size for file in plan.files], etags=none, identity=identity
            )
        self._check_room(folder, state)
        folder.write_state(state)
        return state

    def _check_room(self, folder: DownloadFolder, state: DownloadState) -> None:
        here = folder.sizes(len(state.sizes))
        missing = sum(max(0, size - done) for size, done in zip(state.sizes, here, strict=True) if size is not None)
        try:
            check_room(self._places.folder, missing)
        except HubError:
            if not any(here):
                folder.remove()
            raise

    async def _note(self, folder: DownloadFolder, number: int, size: int | None, etag: str | None) -> None:
        """Note what a server says, so that another process can go on."""
        state = folder.state()
        if state is None:
            return
        state.sizes[number], state.etags[number] = size, etag
        self._check_room(folder, state)
        folder.write_state(state)

    def _install(self, plan: PullPlan, folder: DownloadFolder, hashes: Sequence[tuple[int, str]]) -> InstalledModel:
        """Check the files as what they are to be, and move them to their places."""
        try:
            if plan.sees_for is None:
                check_gguf_parts([folder.part(number) for number in range(len(plan.files))])
            else:
                check_projector(folder.part(0), plan.sees_for)
        except GgufError as error:
            folder.remove()
            raise FileRefused(
                f"{plan.name} is refused: {_without_path(error.reason, folder.path)}", error.remedy
            ) from None
        manifest = Manifest(
            name=plan.name,
            source=plan.source,
            revision=plan.revision,
            files=[
                File(target.name, size, sha256) for target, (size, sha256) in zip(plan.targets, hashes, strict=True)
            ],
            pulled_at=time.time(),
        )
        return self._folder.install(folder, plan.targets, manifest)


_ONLINE: Final = "leave out --offline, and unset HF_HUB_OFFLINE"


def _without_path(reason: str, folder: Path) -> str:
    """The reason without the name of a temporary file."""
    head, _, rest = reason.partition(": ")
    return rest if rest and head.startswith(os.fspath(folder)) else reason
