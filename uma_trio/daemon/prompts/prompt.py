"""Turn a request's prompt or messages into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from uma_trio.config import Limits
from uma_trio.daemon.prompts.chat import ChatTemplate
from uma_trio.daemon.prompts.context import MIN_PROMPT_BYTES, SHORT_ANSWER, explain_context, more_context
from uma_trio.daemon.prompts.fair_limiter import FairLimiter, in_thread
from uma_trio.daemon.prompts.infill import InfillFormat
from uma_trio.daemon.prompts.media import (
    PlacedRows,
    cut_at_pictures,
    has_all,
    picture_numbers,
    rows_of,
    shown,
    split_at_media,
    take_pictures,
    with_pictures,
)
from uma_trio.daemon.prompts.pairs import PairFormat
from uma_trio.daemon.prompts.pictures import NO_PROJECTOR, NoPictures, Pictures
from uma_trio.daemon.prompts.tool_prompts import PLAIN_TOOLS, ToolSupport, call_ids, template_chat
from uma_trio.daemon.text.budget import ReasoningLimit
from uma_trio.daemon.text.tool_calls import ToolCalling
from uma_trio.encoder.encoded import EncodedMedia
from uma_trio.engine_link.media import PLACEHOLDER
from uma_trio.engine_link.messages import ModelInfo, PromptPart
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.errors import (
    BadRequest,
    ContextTooSmall,
    MaxTokensTooLarge,
    NoChatTemplate,
    NoInfill,
    PromptTooLarge,
    UmaError,
)
from uma_trio.models.markers import ReasoningMarkers
from uma_trio.protocol.answers import TokenList
from uma_trio.protocol.chat import ChatMessage, Tool
from uma_trio.protocol.parameters import MAX_INT32
from uma_trio.protocol.queries import TokenizeQuery
from uma_trio.protocol.requests import Embed, Generate, Infill, Rerank
from uma_trio.tokenizer.tokenizer import Tokenizer

INLINE_BYTES: Final = 4096
"""Up to this size a prompt is tokenized on the event loop, in well under a millisecond.  A thread would cost more."""


INLINE_QUERY_LENGTH: Final = 512
"""The same for a tokenize query, in characters or tokens: finding where tokens begin takes longer."""

RENDERING_THREADS: Final = 2
"""Renderings take turns in the template's process.  One chat is tokenized while the next one is rendered."""
TOKENIZING_THREADS: Final = 4


@attrs.frozen(eq=False)
class Prompt:
    """A tokenized prompt."""

    tokens: TokenIds
    """Shape ``[n]``."""
    text: str
    """The text before tokenization.  For ``messages`` the rendered template; in a session of prompts the new text."""
    dropped: int = 0
    """Number of tokens dropped to fit; see ``Generate.n_keep``."""
    reasoning: ReasoningMarkers | None = None
    """How the output marks reasoning; ``None`` if it stays part of the text."""
    calling: ToolCalling | None = None
    """Which calls of tools the output may have; ``None``: none."""
    reasoning_limit: ReasoningLimit | None = None
    """How much reasoning the output may have; ``None``: as much as the model likes."""
    media: tuple[PlacedRows, ...] = ()
    """Tokens that are rows of pictures or sound, in order."""

    @property
    def text_tokens(self) -> TokenIds:
        """``tokens`` without placeholders of rows, shape ``[n]``."""
        return self.tokens[self.tokens < PLACEHOLDER] if self.media else self.tokens

    @property
    def opens_reasoning(self) -> bool:
        """Whether the output begins inside reasoning."""
        return self.reasoning is not None and self.reasoning.is_opened_by(self.text)


@attrs.frozen(eq=False)
class History:
    """The earlier turns of a session."""

    tokens: TokenIds
    """Shape ``[n]``: all prompts and answers, or the last rendered chat with its answer."""
    messages: Sequence[ChatMessage] = ()
    """Empty in a session of prompts."""


def check_prompt_size(request: Generate, limits: Limits) -> int:
    """The size of a request's prompt or messages in UTF-8 bytes; of a prompt of tokens, their number.

    Raises:
        PromptTooLarge: the size exceeds ``max_prompt_bytes``.
    """
    if isinstance(request.prompt, list):
        size = len(request.prompt)  # of at least a byte each, except for control tokens
    elif request.infill is not None:
        files = [text for file in request.infill.files for text in (file.filename, file.text)]
        texts = (request.prompt or "", request.infill.prefix, request.infill.suffix, *files)
        size = sum(len(text.encode()) for text in texts)
    elif request.messages is None:
        size = len((request.prompt or "").encode())
    else:
        size = sum(map(_size, request.messages)) + sum(map(_size, request.tools))
    _check_size("the prompt", size, limits, field=_prompt_field(request))
    return size


def _prompt_field(request: Generate) -> str | None:
    """The field that the prompt comes from; ``None`` if a controller makes it."""
    if request.controller is not None:
        return None
    if request.infill is not None:
        return "infill"
    return "prompt" if request.messages is None else "messages"


def _size(given: ChatMessage | Tool) -> int:
    if isinstance(given, ChatMessage) and not given.tool_calls:
        return len(f"{given.text}{given.reasoning or ''}".encode())
    return len(msgspec.json.encode(given))


def _check_size(name: str, size: int, limits: Limits, *, field: str | None) -> None:
    most = limits.max_prompt_bytes or MIN_PROMPT_BYTES
    if size > most:
        raise PromptTooLarge(
            f"{name} has {size} bytes; this daemon takes {most}. Shorten it, or serve with more context (--ctx), "
            "from which the limit follows if --max-prompt-bytes is not set",
            field=field,
        )


@attrs.frozen
class PromptMaker:
    """Renders and tokenizes prompts for one model."""

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    """``None`` for a model without a chat template."""
    limits: Limits
    reasoning: ReasoningMarkers | None = None
    """``None`` for a model that does not mark its reasoning."""
    tools: ToolSupport = PLAIN_TOOLS
    """How the model calls tools."""
    pairs: PairFormat | None = None
    """How a query and a document become one text; ``None`` for a model that does not rank."""
    infill: InfillFormat | None = None
    """How a gap becomes a prompt; ``None`` for a model that cannot fill it."""
    pictures: Pictures | NoPictures = NO_PROJECTOR
    """Encode pictures."""
    # A thread goes on after its request was cancelled.  With trio's default limiter, such threads would keep out those
    # that write sessions and KV states.  A request that is cancelled before it has a thread costs nothing.
    _rendering: FairLimiter = attrs.field(init=False, factory=partial(FairLimiter, RENDERING_THREADS))
    _walking: FairLimiter = attrs.field(init=False, factory=partial(FairLimiter, 1))
    """Bounds walks over tokens in Python: each further thread of them would take another share of the event loop's time."""
    _tokenizing: FairLimiter = attrs.field(init=False, factory=partial(FairLimiter, TOKENIZING_THREADS))

    async def make(self, request: Generate, history: History | None = None, *, principal: str) -> Prompt:
        """Build the prompt of ``request``.  Messages and long prompts are processed in a thread; can be cancelled.

        Pictures are encoded first, one after the other.

        Args:
            principal: name of the principal; principals take turns.
            history: earlier turns of the session.  The prompt continues its tokens, the messages continue its messages.

        Raises:
            PromptTooLarge: the size exceeds ``max_prompt_bytes``.  Checked before anything is rendered.
            BadRequest: the template refuses the messages, or a picture cannot be encoded.
            NoVision: the messages have pictures, and the model cannot see.
            ContextTooSmall: pictures alone have too many tokens.
            ModelUnavailable: the encoder of pictures does not start.
            NoChatTemplate: the model has no template for the messages.
            NoInfill: the model cannot fill gaps.
            BrokenTemplate: the template fails or exceeds its limits.
        """
        size = check_prompt_size(request, self.limits)
        if size <= INLINE_BYTES and request.messages is None:
            return self._make(request, history)
        encoded: Sequence[EncodedMedia] = ()
        if request.messages is not None:
            past = History(np.empty(0, np.int32)) if history is None else history
            messages, pictures = take_pictures(past.messages, request.messages)
            if pictures:
                on_disk = request.session_id is not None
                encoded = await self.pictures.encode(pictures, principal=principal, on_disk=on_disk)
            request, history = attrs.evolve(request, messages=messages), History(past.tokens)
        walks = isinstance(request.prompt, list)
        limiter = self._walking if walks else self._rendering if request.messages else self._tokenizing
        return await in_thread(self._make, request, history, encoded, limiter=limiter.of(principal))

    def start(self) -> Prompt:
        """The prompt of an answer that a controller makes: BOS, or a line break if the model has none."""
        return Prompt(self.tokenizer.encode(self.tokenizer.bos or "\n", continues=True), "")

    def _make(self, request: Generate, history: History | None, encoded: Sequence[EncodedMedia] = ()) -> Prompt:
        """
        Args:
            request: with the messages of the history in its own, and with characters for pictures.
            encoded: the pictures.
        """
        if request.infill is not None:
            return self._gap(request, request.infill)
        tokens, text, media = self._tokens_and_text(request, history, encoded)
        calling = None
        if request.tools and request.tool_choice != "none":
            calling = ToolCalling(
                markers=self.tools.markers,
                tools={tool.name: tool.parameters for tool in request.tools},
                parallel=request.parallel_tool_calls,
                make_id=call_ids(request.id if request.detached else None),
            )
        separate = request.separate_reasoning or calling is not None
        reasoning = self.reasoning if separate else None
        prompt = Prompt(tokens, text, reasoning=reasoning, calling=calling, media=media)
        return prompt if request.reasoning_budget is None else self._limited(prompt, request, request.reasoning_budget)

    def _gap(self, request: Generate, infill: Infill) -> Prompt:
        if self.infill is None:
            raise NoInfill(
                "this model cannot fill a gap in a text: its vocabulary has no tokens for that. Serve a model that was "
                "trained for it, such as Qwen2.5-Coder, or send what stands before the gap as a prompt",
                field="infill",
            )
        begun = request.prompt if isinstance(request.prompt, str) else ""
        wanted = request.max_tokens or self.limits.default_max_tokens or SHORT_ANSWER
        tokens, dropped = self.infill.tokens(infill, PromptPart(begun, request.parse_special), wanted)
        return Prompt(tokens, infill.prefix + begun, dropped=dropped)

    def _limited(self, prompt: Prompt, request: Generate, n_tokens: int) -> Prompt:
        """``prompt`` with a limit of reasoning.  Reasoning that it has begun is ended in it if the limit is 0.

        There is no limit where reasoning cannot come: if the model marks none, or a constraint applies from the first token.
        """
        markers, constraint = self.reasoning, request.constraint
        if markers is None:
            return prompt
        end = self.tokenizer.encode(markers.closed_by, continues=True)
        after = None if constraint is None else constraint.after
        if not n_tokens and after is None and markers.is_opened_by(prompt.text):
            tokens, text = np.concatenate([prompt.tokens, end]), prompt.text + markers.closed_by
            prompt = attrs.evolve(prompt, tokens=tokens, text=text)
        if (
            constraint is not None
            and (prompt.reasoning is None or constraint.has_own_start)
            and after != markers.closed_by
        ):
            return prompt
        return attrs.evolve(
            prompt, reasoning_limit=ReasoningLimit(n_tokens=n_tokens, end=end.tolist(), markers=markers)
        )

    def appended(self, text: str) -> list[int]:
        """Tokens of a short ``text`` that goes on a text.  Control tokens that it spells stay text."""
        tokens: list[int] = self.tokenizer.encode_parts([PromptPart(text, False)], continues=True).tolist()
        return tokens

    async def message(self, text: str, request: Generate, *, principal: str) -> tuple[list[int], bool]:
        """Tokens of a message of the user that interrupts the answer to ``request``, up to where its own answer begins.

        Returns:
            The tokens, and whether the answer to the message begins with reasoning.

        Raises:
            NoChatTemplate: the model has no template for messages.
            UmaError: as ``make``.
        """
        return await in_thread(self._message, text, request, limiter=self._rendering.of(principal))

    def _message(self, text: str, request: Generate) -> tuple[list[int], bool]:
        if self.chat is None or request.messages is None:
            raise NoChatTemplate("only an answer of a chat can be interrupted by a message", field="message")
        parts = self.chat.message_parts(text, request.chat_template_kwargs)
        tokens: list[int] = self.tokenizer.encode_parts(parts, continues=True).tolist()
        begun = "".join(part.text for part in parts)
        return tokens, self.reasoning is not None and self.reasoning.is_opened_by(begun)

    def reasoning_end(self, prompt: Prompt, request: Generate) -> ReasoningLimit | None:
        """How reasoning in the answer to ``prompt`` can be ended; ``None`` if there is none to end."""
        return self._limited(prompt, request, MAX_INT32).reasoning_limit

    def _tokens_and_text(
        self, request: Generate, history: History | None, encoded: Sequence[EncodedMedia]
    ) -> tuple[TokenIds, str, tuple[PlacedRows, ...]]:
        past = np.empty(0, np.int32) if history is None else history.tokens
        if isinstance(request.prompt, list):
            text = self._text_of("prompt", request.prompt)
            return np.concatenate([past, np.asarray(request.prompt, np.int32)]), text, ()
        if request.prompt is not None:
            part = PromptPart(request.prompt, request.parse_special)
            return self._continue(past, [part])[0], request.prompt, ()
        parts = self._parts(request, encoded)
        text = "".join(part.text for part in parts)
        past_text, placed = self._spelled(past, text, encoded)
        if past_text and text.startswith(past_text):  # keep the generated tokens: tokenizing their text may give others
            tokens, media = self._continue(past, _drop_chars(len(past_text), parts), encoded)
            return tokens, shown(text), (*placed, *media)
        tokens, media = self._continue(past[:0], parts, encoded)
        return tokens, shown(text), media

    def _spelled(self, past: TokenIds, text: str, encoded: Sequence[EncodedMedia]) -> tuple[str, list[PlacedRows]]:
        """The text of ``past`` with a character for each picture, as ``text`` has it, and the rows in ``past``.

        Empty if ``past`` has other pictures than ``text``.
        """
        numbers = picture_numbers(text) if encoded else []
        split = split_at_media(past, [encoded[number] for number in numbers])
        if split is None:
            return "", []
        segments, starts = split
        texts = [self.tokenizer.decode(segment, special=True) for segment in segments]
        if not text.startswith(self.tokenizer.bos):
            texts[0] = texts[0].removeprefix(self.tokenizer.bos)
        placed = [
            rows for number, start in zip(numbers, starts, strict=False) for rows in rows_of(encoded[number], start)
        ]
        return with_pictures(texts, numbers), placed

    def _continue(
        self, past: TokenIds, parts: Sequence[PromptPart], encoded: Sequence[EncodedMedia] = ()
    ) -> tuple[TokenIds, tuple[PlacedRows, ...]]:
        """The tokens of ``past``, which may be empty, and of what follows, and which of them are rows."""
        texts, numbers = cut_at_pictures(parts) if encoded else ([], [])
        if not numbers:
            ids = self.tokenizer.encode_parts(parts, continues=len(past) > 0)
            return (np.concatenate([past, ids]) if len(past) else ids), ()
        pictures = [encoded[number] for number in numbers]
        ids, starts = self.tokenizer.encode_around(
            texts, [picture.tokens for picture in pictures], continues=len(past) > 0
        )
        media = [
            rows
            for picture, start in zip(pictures, starts, strict=True)
            for rows in rows_of(picture, len(past) + start)
        ]
        return np.concatenate([past, ids]), tuple(media)

    def _parts(self, request: Generate, encoded: Sequence[EncodedMedia]) -> Sequence[PromptPart]:
        if self.chat is None:
            raise NoChatTemplate(
                "this model has no chat template: send prompt instead of messages, or start the daemon with --chat-template",
                field="messages",
            )
        tools = request.tools if request.tool_choice != "none" else ()
        chat, offered = template_chat(request.messages or (), tools, self.tools)
        try:
            parts = self.chat.parts(
                chat,
                offered,
                request.chat_template_kwargs,
                continue_final=request.continue_final_message,
                add_generation_prompt=request.add_generation_prompt,
            )
        except UmaError as error:
            if encoded:  # its text may quote a message
                raise type(error)(shown(str(error)), field=error.field) from None
            raise
        if not has_all(parts, len(encoded)):
            raise BadRequest("the chat template leaves out a picture: send it in another message", field="messages")
        return parts

    async def tokenize(self, query: TokenizeQuery, *, principal: str) -> TokenList:
        """Tokens of a text or of a chat, or the text of tokens.  Can be cancelled.

        Raises:
            BadRequest: a token is not in the vocabulary.
            UmaError: as ``make``.
        """
        if query.messages is not None:
            chat = Generate(
                id="tokenize",
                messages=query.messages,
                continue_final_message=query.continue_final_message,
                add_generation_prompt=query.add_generation_prompt,
                tools=query.tools,
                chat_template_kwargs=query.chat_template_kwargs,
            )
            prompt = await self.make(chat, principal=principal)
            return TokenList(tokens=prompt.tokens.tolist(), text=prompt.text, id=query.id)
        if len(query.text or query.tokens or ()) <= INLINE_QUERY_LENGTH:
            return self._tokenize(query)
        tokenize = partial(self._tokenize, query, pauses=True)
        return await in_thread(tokenize, limiter=self._walking.of(principal))

    def _tokenize(self, query: TokenizeQuery, *, pauses: bool = False) -> TokenList:
        if query.text is None:
            text = self._text_of("tokens", query.tokens or (), special=query.parse_special)
            return TokenList(tokens=query.tokens or [], text=text, id=query.id)
        _check_size("text", len(query.text.encode()), self.limits, field="text")
        encoded = self.tokenizer.encode_with_offsets(
            query.text, add_special=query.add_special, parse_special=query.parse_special, pauses=pauses
        )
        offsets = None if encoded.offsets is None else _chars_before(encoded.offsets[:, 0], query.text).tolist()
        tokens = encoded.ids.tolist()
        if not query.with_bytes:
            return TokenList(tokens=tokens, offsets=offsets, id=query.id)
        ranges = None if encoded.offsets is None else encoded.offsets.tolist()
        spelled = [[*spelling] for spelling in self.tokenizer.tokens_to_bytes(tokens)]
        return TokenList(tokens=tokens, offsets=offsets, bytes=spelled, byte_ranges=ranges, id=query.id)

    async def texts(self, request: Embed, max_tokens: int, *, principal: str) -> list[TokenIds]:
        """Tokens of each text to embed.  Control tokens that a text spells stay text.

        Can be cancelled.

        Args:
            max_tokens: of one text.

        Raises:
            BadRequest: a text has no tokens, or a token is not in the vocabulary.
            PromptTooLarge: a text exceeds ``max_prompt_bytes``.
            ContextTooSmall: a text has too many tokens.
        """
        if sum(map(len, request.input)) <= INLINE_BYTES:
            return self._texts(request, max_tokens)
        limiter = self._walking if list in set(map(type, request.input)) else self._tokenizing
        return await in_thread(self._texts, request, max_tokens, limiter=limiter.of(principal))

    def _texts(self, request: Embed, max_tokens: int) -> list[TokenIds]:
        texts = []
        for n, text in enumerate(request.input):
            name = f"input[{n}]"
            if isinstance(text, str):
                _check_size(name, len(text.encode()), self.limits, field=name)
                tokens = self.tokenizer.encode(text, parse_special=False)
            else:
                self._check_tokens(name, text)
                tokens = np.asarray(text, np.int32)
            if not len(tokens):
                raise BadRequest(f"{name} has no tokens", field=name)
            if len(tokens) > max_tokens:
                raise ContextTooSmall(
                    f"{name} has {len(tokens)} tokens; this daemon embeds texts of at most {max_tokens} with this "
                    "model: divide the text, or start uma-trio serve with a larger --embedding-ctx if the model was "
                    "trained for it",
                    field=name,
                )
            texts.append(tokens)
        return texts

    async def paired_texts(self, request: Rerank, max_tokens: int, *, principal: str) -> list[TokenIds]:
        """Tokens of the query with each document; otherwise as ``texts``."""
        if sum(map(len, request.documents)) + len(request.documents) * len(request.query) <= INLINE_BYTES:
            return self._pairs(request, max_tokens)
        return await in_thread(self._pairs, request, max_tokens, limiter=self._tokenizing.of(principal))

    def _pairs(self, request: Rerank, max_tokens: int) -> list[TokenIds]:
        for name, text in (
            ("query", request.query),
            *((f"documents[{n}]", d) for n, d in enumerate(request.documents)),
        ):
            _check_size(name, len(text.encode()), self.limits, field=name)
        assert self.pairs is not None, "checked before"
        pairs = self.pairs.tokens(request.query, request.documents)
        for n, tokens in enumerate(pairs):
            if len(tokens) > max_tokens:
                raise ContextTooSmall(
                    f"documents[{n}] with the query has {len(tokens)} tokens; this daemon ranks at most {max_tokens} "
                    "with this model: divide the document, or start uma-trio serve with a larger --embedding-ctx if the "
                    "model was trained for it",
                    field=f"documents[{n}]",
                )
        return pairs

    def _check_tokens(self, field: str, tokens: Sequence[int]) -> None:
        """
        Raises:
            BadRequest: one of ``tokens`` is not in the vocabulary.
        """
        n_tokens, largest = self.tokenizer.n_tokens, max(tokens, default=0)
        if largest >= n_tokens:
            raise BadRequest(f"{field} names the token {largest}; this model has 0 to {n_tokens - 1}", field=field)

    def _text_of(self, field: str, tokens: Sequence[int], *, special: bool = True) -> str:
        """The text that a client's ``tokens`` spell.

        Raises:
            BadRequest: one of them is not in the vocabulary.
            PromptTooLarge: the text exceeds ``max_prompt_bytes``.
        """
        self._check_tokens(field, tokens)
        size = sum(len(self.tokenizer.token_to_bytes(token)) for token in tokens)
        _check_size(field, max(size, len(tokens)), self.limits, field=field)
        return self.tokenizer.decode(np.asarray(tokens, np.int32), special=special)

    def truncate_tokens(self, tokens: Sequence[int], text: str) -> TokenIds:
        """Cut generated ``tokens`` to those of ``text``, which a stop string has cut short.  Shape ``[n]``.

        If the cut is inside a token, the rest of the text is tokenized anew.
        """
        left, n = len(text.encode()), 0
        for token in tokens:
            size = len(self.tokenizer.token_to_bytes(token))
            if size > left:
                break
            left -= size
            n += 1
        kept = np.asarray(tokens[:n], np.int32)
        rest = text.encode()[len(text.encode()) - left :].decode("utf-8", "replace")
        if not rest:
            return kept
        return np.concatenate([kept, self.tokenizer.encode(rest, parse_special=False, continues=True)])


def _chars_before(offsets: npt.NDArray[np.int64], text: str) -> npt.NDArray[np.int64]:
    """How many characters of ``text`` begin before each byte offset, shape ``[n]``.

    An offset inside a character counts that character as not begun: it is the position of the character.
    """
    utf8 = np.frombuffer(text.encode(), np.uint8)
    begins = np.cumsum((utf8 & 0xC0) != 0x80)
    return np.append(begins - 1, len(text))[offsets]


def _drop_chars(n: int, parts: Sequence[PromptPart]) -> list[PromptPart]:
    """``parts`` without their first ``n`` characters."""
    left = []
    for part in parts:
        if n < len(part.text):
            left.append(attrs.evolve(part, text=part.text[n:]))
        n = max(0, n - len(part.text))
    return left


# -- does it fit into the context? ---------------------------------------------------------------------


def fit_prompt(prompt: Prompt, request: Generate, info: ModelInfo, limits: Limits) -> Prompt:
    """``prompt``, without the oldest tokens after the first ``n_keep`` if the request allows that and it is too long.

    What stays is computed again.  llama.cpp could shift the cached values instead, but they would still depend on the
    dropped tokens, and the same session would answer differently after a restart.
    """
    n_drop = surplus_tokens(len(prompt.tokens), request, info, limits)
    if not n_drop:
        return prompt
    assert request.n_keep is not None
    if prompt.media:
        raise BadRequest(
            f"n_keep drops tokens of a text, and this prompt has pictures or sound: send {n_drop} tokens less",
            field="n_keep",
        )
    kept = np.concatenate([prompt.tokens[: request.n_keep], prompt.tokens[request.n_keep + n_drop :]])
    return attrs.evolve(prompt, tokens=kept, dropped=prompt.dropped + n_drop)


def surplus_tokens(n_prompt: int, request: Generate, info: ModelInfo, limits: Limits) -> int:
    """How many prompt tokens must go so that prompt and answer fit; 0 without ``n_keep``, or if ``n_keep`` is too large.

    A multiple of half of what can go: a session that has filled its context can then go on for many turns before the
    prompt is computed again.
    """
    if request.n_keep is None:
        return 0
    room = prompt_room(request, info, limits)
    step = (room - request.n_keep) // 2
    if n_prompt <= room or step < 1:
        return 0
    return -(-(n_prompt - room) // step) * step


def prompt_room(request: Generate, info: ModelInfo, limits: Limits) -> int:
    """Prompt tokens that fit into the context together with the answer; with a short one, if its length is open."""
    context = info.max_request_tokens
    wanted = request.max_tokens or limits.default_max_tokens or min(SHORT_ANSWER, context // 4)
    return context - min(wanted, limits.max_tokens) + 1


def _default_max_tokens(n_prompt: int, info: ModelInfo, limits: Limits) -> int:
    """How many tokens a request may generate that does not say, if the context has room for them.

    See docs/design/kv-cache.md, "An answer of open length".
    """
    if limits.default_max_tokens:
        return limits.default_max_tokens
    if not info.unified:
        return info.n_ctx_seq
    share = info.n_ctx // info.n_seq_max
    return max(share - n_prompt + 1, share // 2, SHORT_ANSWER)


def check_max_tokens(request: Generate, info: ModelInfo, limits: Limits) -> None:
    """Refuse a ``max_tokens`` that no prompt leaves room for.

    Raises:
        MaxTokensTooLarge, ContextTooSmall: as from ``tokens_to_generate``.
    """
    wanted = request.max_tokens
    if wanted is None or request.fit_max_tokens:
        return
    if wanted > limits.max_tokens:
        raise MaxTokensTooLarge(f"max_tokens is {wanted}; this daemon gives {limits.max_tokens}", field="max_tokens")
    if wanted > info.max_request_tokens:
        raise ContextTooSmall(
            f"max_tokens is {wanted}, and this model's maximum context length is {explain_context(info)}; "
            f"ask for less{_or_more(info, wanted)}",
            field="max_tokens",
        )


def tokens_to_generate(request: Generate, n_prompt: int, info: ModelInfo, limits: Limits) -> int:
    """How many tokens the request may generate.

    The last sampled token is never computed, so prompt and answer need one cell less than they have tokens.

    Raises:
        BadRequest: the prompt has no tokens.
        PromptTooLarge: more than ``max_prompt_tokens``.
        MaxTokensTooLarge: more than ``limits.max_tokens`` asked for.
        ContextTooSmall: prompt and answer can never fit.
    """
    if n_prompt == 0:
        raise BadRequest("the prompt has no tokens", field=_prompt_field(request))
    if n_prompt > limits.max_prompt_tokens:
        raise PromptTooLarge(
            f"the prompt has {n_prompt} tokens; this daemon takes {limits.max_prompt_tokens}. Shorten it, or serve with a "
            "larger --max-prompt-tokens",
            field=_prompt_field(request),
        )
    room = info.max_request_tokens - n_prompt + 1
    if room < 1:
        raise ContextTooSmall(
            f"the prompt has {n_prompt} tokens, and this model's maximum context length is {explain_context(info)}; "
            f"send a shorter one{_or_more(info, n_prompt)}",
            field=_prompt_field(request),
        )
    wanted = request.max_tokens
    if wanted is None or (request.fit_max_tokens and wanted > min(limits.max_tokens, room)):
        return min(_default_max_tokens(n_prompt, info, limits), limits.max_tokens, room)
    if wanted > limits.max_tokens:
        raise MaxTokensTooLarge(f"max_tokens is {wanted}; this daemon gives {limits.max_tokens}", field="max_tokens")
    if wanted > room:
        raise ContextTooSmall(
            f"{n_prompt} prompt tokens and max_tokens {wanted} are too many; this model's maximum context length is "
            f"{explain_context(info)}; ask for at most {room}{_or_more(info, n_prompt + wanted - 1)}",
            field=_prompt_field(request),
        )
    return wanted


def _or_more(info: ModelInfo, n_tokens: int) -> str:
    """What the owner of the daemon can do for a request of ``n_tokens``, as the end of a sentence."""
    more = more_context(info, n_tokens)
    return f", or start uma-trio serve with {more}" if more else ""
