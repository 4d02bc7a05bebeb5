"""``/v1/batches`` of OpenAI's API: files of requests that are answered when nobody else needs the model."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from uma_trio.gateway.answer import json_response
from uma_trio.gateway.batches.service import owner_of, page_of, service_of, use_store
from uma_trio.gateway.batches.store import OPEN, Batch, new_id
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.files import KEPT_S, no_file
from uma_trio.gateway.dialects.openai.shapes import BatchObject, BatchPage, RequestCounts
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.errors import BATCH_ENDED, NO_BATCH, HttpError, invalid

WINDOW: Final = re.compile(r"([1-9][0-9]{0,4})([mhd])", re.ASCII)
UNITS_S: Final = {"m": 60, "h": 3600, "d": 86_400}
LONGEST_WINDOW_S: Final = 30 * 86_400
TIMES: Final = ("in_progress_at", "completed_at", "expired_at", "cancelling_at", "cancelled_at")
NEVER: Final = ("finalizing_at", "failed_at", "errors")
"""Fields of OpenAI's that are always null: a batch has ended when its last row has, and bad files are no batches."""


class Expiry(msgspec.Struct, kw_only=True):
    """How long files of results are kept."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=KEPT_S[0], le=KEPT_S[1])]


class BatchRequest(msgspec.Struct, kw_only=True):
    """A request to answer the rows of a file."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    """A number of minutes (``m``), hours (``h``) or days (``d``), up to 30 days."""
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    output_expires_after: Expiry | None = None


class BatchQuery(msgspec.Struct, kw_only=True):
    """Which batches a list has."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


async def create(call: Call) -> Response:
    """Answer the rows of a file, in the class ``background``."""
    request, warnings = await call.read(BatchRequest)
    service, owner = service_of(call), owner_of(call)
    call.count_request()
    window_s = _window_s(request.completion_window)
    file = await use_store(service.store.file, owner, request.input_file_id)
    if file is None:
        raise no_file(request.input_file_id, "input_file_id")
    if file.purpose != "batch" or file.url is None:
        raise invalid(f"{file.id} is a file of results; upload one with purpose batch", parameter="input_file_id")
    if request.endpoint != file.url:
        message = f"endpoint is {request.endpoint[:100]!r}, and the rows of {file.id} have the url {file.url}"
        raise invalid(message, parameter="endpoint")
    await use_store(service.store.check_room, owner)
    expiry, now = request.output_expires_after, int(time.time())
    batch = Batch(
        id=new_id("batch_"),
        owner=owner,
        is_local=not call.is_unknown,
        socket=service.worker.socket,
        url=file.url,
        input_file_id=file.id,
        output_file_id=new_id("file-"),
        error_file_id=new_id("file-"),
        completion_window=request.completion_window,
        metadata=request.metadata,
        total=file.rows,
        created_at=now,
        expires_at=now + window_s,
        kept_s=int(call.config.files.file_ttl_s) if expiry is None else expiry.seconds,
    )
    await use_store(service.store.add_batch, batch)
    service.worker.look()
    return json_response(_batch(batch), warnings=warnings)


async def list_batches(call: Call) -> Response:
    """The batches of the client, the newest one first."""
    query = call.query(BatchQuery)
    if query.after is not None:
        await _find_batch(call, query.after)
    batches, has_more = await use_store(
        service_of(call).store.batches, owner_of(call), after=query.after, limit=query.limit
    )
    return json_response(page_of(BatchPage, [_batch(batch) for batch in batches], has_more=has_more))


async def retrieve(call: Call) -> Response:
    """One batch, and how far it is."""
    return json_response(_batch(await _find_batch(call, call.request.path_params["id"])))


async def cancel(call: Call) -> Response:
    """Cancel a batch.  Rows that have an answer keep it, in the file of results."""
    batch = await _find_batch(call, call.request.path_params["id"])
    if batch.status not in OPEN:
        raise HttpError(BATCH_ENDED, f"{batch.id} is {batch.status}, so it cannot be cancelled")
    service = service_of(call)
    batch = await use_store(
        service.store.change,
        batch.id,
        lambda known: (
            known.with_status("cancelling") if known.status in OPEN and known.status != "cancelling" else known
        ),
    )
    service.worker.look(cancelled=batch.id)
    return json_response(_batch(batch))


async def _find_batch(call: Call, batch_id: str) -> Batch:
    batch = await use_store(service_of(call).store.batch, owner_of(call), batch_id)
    if batch is None:
        raise HttpError(NO_BATCH, f"there is no batch {batch_id[:100]!r}", parameter="batch_id")
    return batch


def _window_s(text: str) -> int:
    match = WINDOW.fullmatch(text)
    seconds = int(match[1]) * UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= LONGEST_WINDOW_S:
        raise invalid("completion_window is a time such as 24h, 90m or 7d, up to 30d", parameter="completion_window")
    return seconds


def _batch(batch: Batch) -> BatchObject:
    has_ended = batch.status not in OPEN
    times: dict[str, Any] = {name: batch.times.get(name) for name in (*TIMES, *NEVER)}
    return BatchObject(
        id=batch.id,
        endpoint=batch.url,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=batch.output_file_id if has_ended and batch.has_output else None,
        error_file_id=batch.error_file_id if has_ended and batch.has_errors else None,
        created_at=batch.created_at,
        expires_at=batch.expires_at,
        request_counts=RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed),
        metadata=batch.metadata,
        **times,
    )


ENDPOINTS: Final = (
    OPENAI.post("/v1/batches", create, BatchRequest, BatchObject),
    OPENAI.get("/v1/batches", list_batches, BatchPage, query=BatchQuery),
    OPENAI.get("/v1/batches/{id}", retrieve, BatchObject),
    OPENAI.post("/v1/batches/{id}/cancel", cancel, None, BatchObject),
)
