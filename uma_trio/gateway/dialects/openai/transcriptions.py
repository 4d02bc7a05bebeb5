"""``POST /v1/audio/transcriptions`` of OpenAI's API: a model that hears writes down the spoken words."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from starlette.responses import PlainTextResponse, Response

from uma_trio.gateway.answer import json_response
from uma_trio.gateway.body import Body
from uma_trio.gateway.dialects.common.contents import Picture, content_of
from uma_trio.gateway.dialects.openai.dialect import OPENAI
from uma_trio.gateway.dialects.openai.shapes import Transcription, TranscriptionUsage
from uma_trio.gateway.endpoint import Call
from uma_trio.gateway.upload import Arriving, Form, with_body

QUESTION: Final = "Transcribe this audio."
IN_LANGUAGE: Final = "Transcribe this audio, which is in the language {language}."


MAX_ARRIVING: Final = 8
"""Files that arrive at a time, from all clients: they are in memory."""

ARRIVING: Final = Arriving(MAX_ARRIVING, "files of sound")


class TranscriptionForm(msgspec.Struct, kw_only=True):
    """A form with a file of sound."""

    file: str
    """The file: WAV, MP3 or FLAC."""
    model: str | None = None
    language: Annotated[str, Meta(max_length=64)] | None = None
    """Its name or its code, for the model."""
    prompt: Annotated[str, Meta(max_length=4096)] | None = None
    """More words for the model, such as names."""
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    response_format: Literal["json", "text"] = "json"


async def transcribe(call: Call) -> Response:
    """Write down the words that are spoken in a file."""
    return await with_body(call, _transcribe)


async def _transcribe(call: Call, body: Body) -> Response:
    data = bytearray()

    async def write(part: bytes) -> None:
        data.extend(part)

    form = Form(write, call.config.http.max_body_bytes * 3 // 4, "http_max_body_bytes")
    with ARRIVING.one():
        await form.receive(body.parts(), call.request.headers.get("content-type", ""))
    wanted, warnings = form.fields_as(TranscriptionForm)
    question = IN_LANGUAGE.format(language=wanted.language) if wanted.language else QUESTION
    sound = Picture("file", bytes(data), type="audio")
    words = [question, *([wanted.prompt] if wanted.prompt else [])]
    fields = call.for_daemon(
        model=wanted.model,
        messages=[{"role": "user", "content": content_of([sound, *words], "\n")}],
        temperature=wanted.temperature,
        separate_reasoning=True,
    )
    [end] = await call.unless_disconnected(call.daemon.complete(fields))
    text = (end.text or "").strip()
    if wanted.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    prompt, answer = end.usage.prompt_tokens, end.usage.completion_tokens
    usage = TranscriptionUsage(input_tokens=prompt, output_tokens=answer, total_tokens=prompt + answer)
    return json_response(Transcription(text=text, usage=usage), warnings=warnings)


ENDPOINTS = (
    OPENAI.post(
        "/v1/audio/transcriptions",
        transcribe,
        None,
        Transcription,
        form=TranscriptionForm,
        media_types=("application/json", "text/plain"),
    ),
)
