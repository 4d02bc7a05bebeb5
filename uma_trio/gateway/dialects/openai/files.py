"""``/v1/files`` of OpenAI's API: files of requests for batches, and what the batches have answered."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import anyio
import anyio.to_thread
import msgspec
from msgspec import Meta
from starlette.responses import FileResponse, Response

from uma_trio.config import MB
from uma_trio.gateway.answer import json_response
from uma_trio.gateway.batches.rows import Contents, RowReader, RowsError
from uma_trio.gateway.batches.service import owner_of, page_of, service_of, unusable, use_store
from uma_trio.gateway.batches.store import StoredFile, new_id
from uma_trio.gateway.body import Body
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.shapes import DeletedFile, File, FilePage
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import FILE_IN_USE, NO_FILE, HttpError, invalid
from uma_trio.gateway.upload import Form, with_body

MAX_NAME: Final = 255
"""Characters of a file's name."""

MAX_PAGE: Final = 10_000
"""Files of one list, as in OpenAI's API."""
KEPT_S: Final = (3600, 30 * 86_400)
"""How long a client may let a file be kept."""

ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class UploadedFile(msgspec.Struct, kw_only=True):
    """A form with a file."""

    file: str
    """The file, which has a request on each line."""
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = msgspec.field(default=None, name=ANCHOR)
    seconds: Annotated[int, Meta(ge=KEPT_S[0], le=KEPT_S[1])] | None = msgspec.field(default=None, name=SECONDS)


class FileQuery(msgspec.Struct, kw_only=True):
    """Which files a list has."""

    purpose: str | None = None
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    order: Literal["asc", "desc"] = "desc"


async def upload(call: Call) -> Response:
    """Keep a file for a batch.  Each line of it is checked at once, and each body when its turn comes."""
    return await with_body(call, _receive)


async def _receive(call: Call, body: Body) -> Response:
    service, owner = service_of(call), owner_of(call)
    call.count_request()
    with service.uploads.one(owner):
        await use_store(service.store.check_room, owner)
        file_id = new_id("file-")
        path = await use_store(service.store.upload_path, file_id)
        with _removing(path):
            form = await _write(call, body, path)
            fields, warnings = _check(form)
            contents = await use_store(_contents, service.reader, path)
            now = int(time.time())
            file = StoredFile(
                id=file_id,
                owner=owner,
                filename=(form.filename or "file")[:MAX_NAME],
                purpose=fields.purpose,
                bytes=form.n_bytes,
                created_at=now,
                expires_at=now + int(fields.seconds or call.config.files.file_ttl_s),
                url=contents.url,
                rows=contents.rows,
            )
            await use_store(service.store.add_file, file)
    return json_response(_file(file), warnings=warnings)


async def _write(call: Call, body: Body, path: Path) -> Form:
    try:
        async with await anyio.open_file(path, "xb") as file:
            form = Form(file.write, call.config.files.max_file_mb * MB, "max_file_mb")
            await form.receive(body.parts(), call.request.headers.get("content-type", ""))
            await file.flush()
            await anyio.to_thread.run_sync(os.fsync, file.wrapped.fileno())
    except OSError as error:
        raise unusable(error) from None
    return form


def _check(form: Form) -> tuple[UploadedFile, list[str]]:
    try:
        return form.fields_as(UploadedFile)
    except HttpError as error:
        if error.parameter != "purpose":
            raise
        raise invalid(f"{error.message}; files are kept for batches only", parameter="purpose") from None


def _contents(reader: RowReader, path: Path) -> Contents:
    try:
        return reader.check(path)
    except RowsError as error:
        raise invalid(str(error), parameter="file" if error.field is None else f"file.{error.field}") from None


@contextlib.contextmanager
def _removing(path: Path) -> Iterator[None]:
    """Remove a file that is still there afterwards."""
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


async def list_files(call: Call) -> Response:
    """The files of the client, the newest one first."""
    query = call.query(FileQuery)
    service, owner = service_of(call), owner_of(call)
    if query.after is not None:
        await _find_file(call, query.after)
    files, has_more = await use_store(
        service.store.files,
        owner,
        purpose=query.purpose,
        after=query.after,
        limit=query.limit,
        newest_first=query.order == "desc",
    )
    return json_response(page_of(FilePage, [_file(file) for file in files], has_more=has_more))


async def retrieve(call: Call) -> Response:
    """One file, without its content."""
    return json_response(_file(await _find_file(call, call.request.path_params["id"])))


async def content(call: Call) -> Response:
    """The content of a file."""
    file = await _find_file(call, call.request.path_params["id"])
    return FileResponse(service_of(call).store.path(file.id), media_type="application/jsonl", filename=file.filename)


async def delete(call: Call) -> Response:
    """Delete a file, unless a batch still reads it."""
    file_id: str = call.request.path_params["id"]
    match await use_store(service_of(call).store.delete_file, owner_of(call), file_id):
        case "missing":
            raise no_file(file_id)
        case "in use":
            message = f"a batch still reads {file_id}; cancel it first, or wait for its end"
            raise HttpError(FILE_IN_USE, message, parameter="file_id")
    return json_response(DeletedFile(id=file_id, deleted=True))


async def _find_file(call: Call, file_id: str) -> StoredFile:
    file = await use_store(service_of(call).store.file, owner_of(call), file_id)
    if file is None:
        raise no_file(file_id)
    return file


def no_file(file_id: str, parameter: str = "file_id") -> HttpError:
    """The error for a file that the client does not have."""
    return HttpError(NO_FILE, f"there is no file {file_id[:100]!r}", parameter=parameter)


def _file(file: StoredFile) -> File:
    return File(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
        status="processed",
    )


ENDPOINTS: Final = (
    OPENAI.post("/v1/files", upload, None, File, form=UploadedFile),
    OPENAI.get("/v1/files", list_files, FilePage, query=FileQuery),
    OPENAI.get("/v1/files/{id}", retrieve, File),
    OPENAI.delete("/v1/files/{id}", delete, DeletedFile),
    OPENAI.get("/v1/files/{id}/content", content, media_types=("application/jsonl",)),
)
