"""What Ollama's clients change: ``/api/pull``, ``/api/delete``, ``/api/copy``, ``/api/create``.  For administrators.

A process of ``uma_trio.hub`` does each of them, so that a download neither takes the gateway's time nor ends with it.  A
client that leaves ends its download, which the next one resumes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from uma_trio.errors import ModelNotFound
from uma_trio.gateway.answer import NDJSON, encode, json_line, json_response
from uma_trio.gateway.dialects.common.shapes import Warned
from uma_trio.gateway.dialects.ollama.dialect import OLLAMA, LineRenderer, require_name
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import INVALID_MODEL, MODEL_IN_USE, AnyKind, HttpError, internal_error, invalid
from uma_trio.gateway.request_logger import log
from uma_trio.processes.interpreter import package_environment, python_module

MODULE: Final = "uma_trio.hub"
MAX_LINE_BYTES: Final = 64 * 1024
EXIT_S: Final = 1.0
"""How long a process may take to end after its output, so that the log has its exit code."""
LOADED: Final = ("loading", "ready", "draining")
"""States of models whose files are in use."""

ERRORS: Final[Mapping[str, AnyKind]] = {"missing": ModelNotFound, "loaded": MODEL_IN_USE}
"""Errors for what the process says went wrong; for anything else ``INVALID_MODEL``."""

NOT_CREATED: Final = (
    *("files", "adapters", "template", "system", "parameters", "messages", "quantize", "modelfile", "path"),
    "license",
)


class Status(Warned):
    """How far it is.  Sizes are in bytes."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class PullRequest(msgspec.Struct):
    """Names a model of the Hugging Face Hub; ``name`` is the older spelling."""

    model: str | None = None
    name: str | None = None
    stream: bool = True
    insecure: Any = None
    """Has no effect: downloads are verified."""


class DeleteRequest(msgspec.Struct):
    """Names a model, or a further name of one; ``name`` is the older spelling."""

    model: str | None = None
    name: str | None = None


class CopyRequest(msgspec.Struct):
    """Names a model, and what it shall be called as well."""

    source: str
    destination: str


class CreateRequest(msgspec.Struct):
    """Names a model, and what it shall be called as well; the other fields are refused."""

    model: str | None = None
    name: str | None = None
    from_: str | None = msgspec.field(name="from", default=None)
    stream: bool = True
    files: Any = None
    adapters: Any = None
    template: Any = None
    system: Any = None
    parameters: Any = None
    messages: Any = None
    quantize: Any = None
    modelfile: Any = None
    path: Any = None
    license: Any = None


async def pull(call: Call) -> Response:
    """Download a model, unless it is here.  With ``stream`` a line says how far each of its files is."""
    request, warnings = await call.read(PullRequest)
    name = require_name(request.model or request.name)
    lines = _run(call, action="pull", model=name)
    if request.stream:
        return call.stream_events(lines, _Lines(call.id, name))
    await call.unless_disconnected(_all(lines))
    return json_response(Status(status="success"), warnings=warnings)


async def delete(call: Call) -> Response:
    """Forget a further name of a model, or delete a model that was downloaded."""
    request, _ = await call.read(DeleteRequest)
    name = require_name(request.model or request.name)
    try:
        await _all(_run(call, action="delete", model=name, in_use=await _files_in_use(call)))
    except HttpError as error:
        if error.kind is not MODEL_IN_USE:
            raise
        await call.ask(lambda client: client.manage_model("release", name))
        await _all(_run(call, action="delete", model=name, in_use=await _files_in_use(call)))
    return Response()


async def copy(call: Call) -> Response:
    """Give a model a further name."""
    request, _ = await call.read(CopyRequest)
    source, destination = require_name(request.source), require_name(request.destination)
    await _all(_run(call, action="copy", model=source, new_name=destination))
    return Response()


async def create(call: Call) -> Response:
    """Give a model a further name, which is all that can be created: settings of a model belong to ``uma-trio serve``."""
    request, warnings = await call.read(CreateRequest)
    for parameter in NOT_CREATED:
        if getattr(request, parameter):
            raise invalid(
                f"{parameter} is not supported: create gives the model of from another name; send sampling parameters, "
                "messages and adapters with each request, or set them in the configuration",
                parameter=parameter,
            )
    if request.from_ is None:
        raise invalid("from is missing; name the model that gets another name", parameter="from")
    name = require_name(request.model or request.name)
    await _all(_run(call, action="copy", model=require_name(request.from_), new_name=name))
    if request.stream:
        return Response(_line(status="success"), media_type=NDJSON)
    return json_response(Status(status="success"), warnings=warnings)


async def _files_in_use(call: Call) -> list[str]:
    models = await call.ask(lambda client: client.models(principal=None))
    return [model.path for model in models if model.path is not None and model.state in LOADED]


async def _run(call: Call, **task: Any) -> AsyncIterator[list[Mapping[str, Any]]]:
    """Do a task, and yield the lines of its progress.

    Raises:
        HttpError: it cannot be done.
    """
    model = call.config.model
    folder = {} if model.models_dir is None else {"folder": str(model.models_dir)}
    text = encode({**folder, **task, "is_offline": model.offline}).decode()
    process = await anyio.open_process(
        [*python_module(MODULE), text],
        stdin=subprocess.DEVNULL,
        stderr=None,
        env={**os.environ, **package_environment()},
    )
    try:
        assert process.stdout is not None
        stream = BufferedByteReceiveStream(process.stdout)
        while True:
            line = msgspec.json.decode(await stream.receive_until(b"\n", MAX_LINE_BYTES))
            if "error" in line:
                raise HttpError(ERRORS.get(line["kind"], INVALID_MODEL), line["error"], parameter="model")
            if "is_done" in line:
                return
            yield [line]
    except (anyio.IncompleteRead, anyio.DelimiterNotFound):
        with anyio.move_on_after(EXIT_S):
            await process.wait()
        log.error("the process that changes models failed", action=task["action"], code=process.returncode)
        raise internal_error() from None
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def _all(lines: AsyncIterator[list[Mapping[str, Any]]]) -> None:
    async with aclosing(lines) as closing:  # type: ignore[type-var]
        async for _ in closing:
            """Progress, for which nobody waits."""


class _Lines(LineRenderer[Mapping[str, Any]]):
    """Writes the progress of a download as Ollama does.

    The digest of a file says which one it is.  It is not the hash of its content, which is known at the end.
    """

    def __init__(self, request_id: str, model: str) -> None:
        super().__init__(request_id)
        self._model = model

    def begin(self) -> bytes:
        """What Ollama says first."""
        return _line(status="pulling manifest")

    def render(self, event: Mapping[str, Any]) -> bytes:
        """One line."""
        if "message" in event:
            return _line(status=event["message"])
        digest = hashlib.sha256(f"{self._model} {event['number']}".encode()).hexdigest()
        sizes = {name: event[name] for name in ("total", "completed") if event[name] is not None}
        return _line(status=f"pulling {digest[:12]}", digest=f"sha256:{digest}", **sizes)

    def end(self) -> bytes:
        """The file has been compared with its hash, and installed."""
        return _line(status="verifying sha256 digest") + _line(status="writing manifest") + _line(status="success")


def _line(**fields: Any) -> bytes:
    return json_line(Status(**fields))


_post, _delete = (partial(method, needs_admin=True) for method in (OLLAMA.post, OLLAMA.delete))

ENDPOINTS = (
    _post("/api/pull", pull, PullRequest, Status, event_shape=Status),
    _delete("/api/delete", delete, body=DeleteRequest),
    _post("/api/copy", copy, CopyRequest),
    _post("/api/create", create, CreateRequest, Status, event_shape=Status),
)
