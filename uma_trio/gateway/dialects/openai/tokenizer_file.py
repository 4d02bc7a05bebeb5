"""``GET /tokenizer.json``: the vocabulary of a model as the file of Hugging Face's tokenizers.

A process of its own makes it, because that takes seconds.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

import anyio
import attrs
from starlette.responses import Response

from uma_trio.client import ModelDescription
from uma_trio.gateway.answer import JSON
from uma_trio.gateway.dialects.common.fields import ModelQuery
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import NO_TOKENIZER_FILE, HttpError, internal_error
from uma_trio.gateway.request_logger import log
from uma_trio.processes.interpreter import package_environment, python_module

MODULE: Final = "uma_trio.tokenizer"
KEPT: Final = 2
"""Files that are kept in memory; those of large vocabularies have 10 MB."""

REFUSED: Final = 2
"""Exit code of a process whose output is the reason why there is no file."""


@attrs.frozen
class _File:
    content: bytes
    reason: str
    """Why there is none; otherwise empty."""

    @property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


class Files:
    """Makes the files, one at a time."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._known: dict[tuple[object, ...], _File] = {}

    async def of(self, path: str, model: ModelDescription, library: str | None) -> _File:
        """The file of the model at ``path``."""
        key = (path, model.created_at, model.size_bytes)
        async with self._lock:
            if key not in self._known:
                file = await _make(path, library)
                while len(self._known) >= KEPT:
                    del self._known[next(iter(self._known))]
                self._known[key] = file
            return self._known[key]


async def _make(path: str, library: str | None) -> _File:
    command = [*python_module(MODULE), path, *([] if library is None else [library])]
    done = await anyio.run_process(command, check=False, env={**os.environ, **package_environment()})
    if done.returncode == 0:
        return _File(done.stdout, "")
    if done.returncode == REFUSED:
        return _File(b"", done.stdout.decode("utf-8", "replace"))
    log.error(
        "the vocabulary cannot be written", code=done.returncode, stderr=done.stderr[-2000:].decode("utf-8", "replace")
    )
    raise internal_error("the vocabulary cannot be written")


FILES: Final = Files()


async def tokenizer_file(call: Call) -> Response:
    """The vocabulary of a model.

    The ids are those of ``/tokenize`` with ``prompt``.  A vocabulary that cannot be expressed is refused.
    """
    model = await call.daemon.model(call.query(ModelQuery).model)
    if model.path is None:
        raise HttpError(NO_TOKENIZER_FILE, "the gateway runs as another user than the daemon, so it has no file")
    library = call.config.model.llama_dir
    work = FILES.of(model.path, model, None if library is None else str(library))
    file = await call.unless_disconnected(work)
    if file.reason:
        raise HttpError(NO_TOKENIZER_FILE, f"{model.name} has no tokenizer.json: {file.reason}")
    headers = {"ETag": file.tag, "Cache-Control": "no-cache"}
    if call.request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=JSON)


ENDPOINTS = (OPENAI.get("/tokenizer.json", tokenizer_file, query=ModelQuery),)
