"""The real daemon with listener and connections, over a fake engine in virtual time."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import trio

from tests.support.fake_engine import N_VOCAB, FakeEngine, VirtualEngine, fake_vocabulary
from tests.support.state_files import at_once
from uma_trio import config
from uma_trio.client import Client, open_client
from uma_trio.daemon.detached.answers import DetachedAnswers
from uma_trio.daemon.doors import listener
from uma_trio.daemon.doors.claim import claimed
from uma_trio.daemon.kv.offload_index import SavedState
from uma_trio.daemon.policy.cost import CostModel
from uma_trio.daemon.prompts.media import take_pictures
from uma_trio.daemon.prompts.pairs import PairFormat
from uma_trio.daemon.prompts.prompt import History, Prompt, PromptMaker, check_prompt_size
from uma_trio.daemon.prompts.tool_prompts import PLAIN_TOOLS, ToolSupport
from uma_trio.daemon.registry import ModelRegistry, ModelSpec, Needs
from uma_trio.daemon.server import Server
from uma_trio.daemon.service import ModelService
from uma_trio.daemon.serving.offload import InThread, StateFiles
from uma_trio.daemon.serving.scheduler import Scheduler
from uma_trio.daemon.storage import Storage
from uma_trio.daemon.store.answer_folder import AnswerFolder
from uma_trio.daemon.store.journal import Journal
from uma_trio.daemon.store.state_folder import StateFolder
from uma_trio.engine_link.devices import Devices
from uma_trio.engine_link.messages import ModelInfo, PromptPart
from uma_trio.engine_link.tokens import TokenIds
from uma_trio.grammar.checker import LocalChecker
from uma_trio.grammar.compiler import GrammarCompiler
from uma_trio.models.markers import ReasoningMarkers
from uma_trio.protocol.answers import ModelDescription, TokenList
from uma_trio.protocol.queries import TokenizeQuery
from uma_trio.protocol.requests import Embed, Generate, Rerank
from uma_trio.tokenizer.tokenizer import TokenizedText

NO_STORAGE: Final = Storage()
BEFORE, BETWEEN, AFTER = (1,), (2, 3), (4,)
"""Tokens around a query and a document, for an engine that ranks."""


class FakeTokenizer:
    """One token for each byte of a text: the byte plus 100, so none is EOG.  Tokens become decimal numbers."""

    bos = eos = ""
    n_tokens = N_VOCAB
    eos_id = added_bos_id = None
    adds_eos = False

    def encode_with_offsets(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, pauses: bool = False
    ) -> TokenizedText:
        ids = self.encode(text)
        return TokenizedText(ids, np.stack([np.arange(len(ids)), np.arange(len(ids)) + 1], axis=1))

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, continues: bool = False
    ) -> TokenIds:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + 100

    def encode_parts(self, parts: Sequence[PromptPart], *, continues: bool = False) -> TokenIds:
        return self.encode("".join(part.text for part in parts), continues=continues)

    def token_to_bytes(self, token: int) -> bytes:
        return token_to_bytes(token)

    def tokens_to_bytes(self, tokens: Iterable[int]) -> list[bytes]:
        return [token_to_bytes(token) for token in tokens]

    def decode(self, tokens: TokenIds, *, special: bool = False) -> str:
        return b"".join(token_to_bytes(token) for token in tokens.tolist()).decode()


class FakeChat:
    """Joins messages with bars.  The text never equals that of the chat's tokens, so each turn is tokenized again."""

    def parts(
        self,
        messages: list[dict[str, str]],
        tools: Sequence[object] = (),
        variables: object = None,
        *,
        continue_final: bool = False,
        add_generation_prompt: bool = True,
    ) -> tuple[PromptPart, ...]:
        return (PromptPart("|".join(message["content"] for message in messages)),)

    def message_parts(self, text: str, variables: object = None) -> tuple[PromptPart, ...]:
        return (PromptPart(f"|{text}|"),)


class FakePrompts(PromptMaker):
    """``PromptMaker`` without threads, which do not exist in virtual time."""

    async def make(self, request: Generate, before: History | None = None, *, principal: str) -> Prompt:
        await trio.lowlevel.checkpoint()
        check_prompt_size(request, self.limits)
        if request.messages is not None and before is not None:
            messages, _ = take_pictures(before.messages, request.messages)
            request, before = attrs.evolve(request, messages=messages), History(before.tokens)
        return self._make(request, before)

    async def message(self, text: str, request: Generate, *, principal: str) -> tuple[list[int], bool]:
        return self._message(text, request)

    async def texts(self, request: Embed, max_tokens: int, *, principal: str) -> list[TokenIds]:
        await trio.lowlevel.checkpoint()
        return self._texts(request, max_tokens)

    async def paired_texts(self, request: Rerank, max_tokens: int, *, principal: str) -> list[TokenIds]:
        await trio.lowlevel.checkpoint()
        return self._pairs(request, max_tokens)

    async def tokenize(self, query: TokenizeQuery, *, principal: str) -> TokenList:
        await trio.lowlevel.checkpoint()
        return self._tokenize(query) if query.messages is None else await super().tokenize(query, principal=principal)


def token_to_bytes(token: int) -> bytes:
    """A token as a decimal number; nothing for EOG."""
    return b"" if token == 0 else f"{token} ".encode()


@attrs.frozen
class FakeModel:
    engine: VirtualEngine
    prompts: FakePrompts
    cost: CostModel = attrs.field(factory=CostModel)
    cost_name: str = "fake"
    chat_template: str | None = None
    template_source: str | None = None
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    written_at: float = 0.0
    fit: None = None
    recommended_sampling: Mapping[str, float] = attrs.field(factory=dict)
    spelled: Mapping[int, bytes] = attrs.field(factory=dict)
    grammars: GrammarCompiler = attrs.field(
        factory=lambda: GrammarCompiler(fake_vocabulary, LocalChecker(fake_vocabulary))
    )

    @property
    def info(self) -> ModelInfo:
        return self.engine.info

    @property
    def devices(self) -> Devices:
        return self.engine.link.ready.devices

    def token_to_bytes(self, token: int) -> bytes:
        return self.spelled.get(token, token_to_bytes(token))


class OneModel:
    """Opens a service that is there already."""

    budget_bytes = 0
    budget_is_set = False
    n_threads = 1
    memory_bytes = 0
    storage_name = "fake"

    def __init__(self, service: ModelService, storage: Storage) -> None:
        self.service = service
        self._storage = storage

    @contextlib.asynccontextmanager
    async def open(self, *_: object) -> AsyncIterator[OneModel]:
        yield self

    async def open_storage(self) -> None:
        found = self._storage
        await self.service.open_storage(found.journal, found.files, found.states)

    async def needs(self, spec: ModelSpec) -> Needs:
        return Needs(whole=0, least=0)

    async def describe(self, spec: ModelSpec) -> ModelDescription:
        return self.service.description()

    on_demand = False

    async def find(self, name: str) -> None:
        return None

    async def installed(self) -> list[ModelSpec]:
        return []


@attrs.frozen
class Serving:
    """A running server."""

    server: Server
    service: ModelService
    engine: FakeEngine
    path: Path
    nursery: trio.Nursery

    @property
    def scheduler(self) -> Scheduler:
        return self.service.scheduler

    def client(self, **options: Any) -> contextlib.AbstractAsyncContextManager[Client]:
        return open_client(self.path, **options)

    async def settled(self) -> None:
        """Wait until nothing runs and no client is connected, and check the bookkeeping."""
        with trio.fail_after(1000):
            while list(self.scheduler.answers()) or self.server.snapshot()["connections"]:
                await trio.sleep(0.01)
            await self.service.scheduler.wait_idle()
        self.service.scheduler.check_integrity()
        kv = self.scheduler.cache.statistics()
        assert (kv.sequences, kv.cells_reserved, kv.cells_used) == (0, 0, 0)
        assert self.engine.used_cells() == self.scheduler.cache.held()
        assert self.server.snapshot()["send_queue_bytes"] == 0


def settings(**values: Any) -> config.Config:
    """A configuration from flat names."""
    return config.load(flags=values)


@contextlib.contextmanager
def remembering(
    folder: Path, files: StateFiles | None = None, *, states: Sequence[SavedState] = ()
) -> Iterator[Storage]:
    """The storage of a server in ``folder``; see ``daemon.storage.open_storage``.

    Args:
        files: takes the place of a folder of states, and has ``states`` in it.
    """
    with contextlib.ExitStack() as stack:
        journal = Journal(folder / "sessions")
        stack.callback(journal.close)
        if files is None:
            files = found = StateFolder(folder / "states", max_bytes=1 << 30, fingerprint="fake")
            stack.callback(found.close)
            states = found.scan()
        yield Storage(journal, files, states)


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    storage: Storage = NO_STORAGE,
    *,
    in_thread: InThread = at_once,
    recommended_sampling: Mapping[str, float] | None = None,
    reasoning: ReasoningMarkers | None = None,
    tools: ToolSupport = PLAIN_TOOLS,
    spelled: Mapping[int, bytes] | None = None,
    has_template: bool = True,
    answers: AnswerFolder | None = None,
    **values: Any,
) -> AsyncIterator[Serving]:
    """A server on a temporary socket, cancelled at the end.

    Args:
        storage: survives the server; see ``remembering``.
        in_thread: runs blocking calls.
        recommended_sampling: of the model file.
        reasoning: how the model marks its reasoning.
        tools: how the model calls tools.
        spelled: what tokens of answers stand for, instead of numbers.
        has_template: whether the model has a chat template.
        answers: keeps detached answers.
        values: configuration by flat names.
    """
    engine = engine or FakeEngine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "uma.sock")
        chosen = settings(adapters=[f"{each.name}={each.path}" for each in engine.info.adapters], **values)
        model = FakeModel(
            VirtualEngine(engine, settings=chosen.engine),
            FakePrompts(
                FakeTokenizer(),
                FakeChat() if has_template else None,
                chosen.limits,
                reasoning,
                tools,
                PairFormat(FakeTokenizer(), BEFORE, BETWEEN, AFTER) if engine.info.purpose == "rank" else None,
            ),
            recommended_sampling=recommended_sampling or {},
            spelled=spelled or {},
        )
        service = ModelService(chosen, model, in_thread=in_thread)
        models = ModelRegistry([ModelSpec(name=service.name, config=chosen)], OneModel(service, storage), chosen)
        server = Server(chosen, models, detached=DetachedAnswers(chosen, models, answers, in_thread=in_thread))
        with claimed(path):
            sock = listener.bind(path, backlog=16)
            async with models.running():
                await models.start(None, lambda: True)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(server.run, sock)
                    yield Serving(server, service, engine, path, nursery)
                    nursery.cancel_scope.cancel()
