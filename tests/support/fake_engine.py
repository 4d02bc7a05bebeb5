"""An engine without a model: it keeps the books that a KV cache keeps, and refuses what llama.cpp would refuse.

The next token of a sequence is a function of all tokens before it (and, where it is not greedy, of its seed and
its number), so a test can tell whether a stream was computed from the right prefix: ``expected_continuation`` says
what must come.  With penalties it says nothing again that they look at, and it refuses a ``Past`` that is not what the
sequence holds; a bias of 50 and more decides.  The same conformance tests run on it and on the real engine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import outcome
import trio

from uma_trio.engine.records import (
    Copy,
    Draw,
    EngineError,
    Feed,
    Forget,
    Load,
    Mark,
    ModelFacts,
    Remove,
    Save,
    Step,
    StepResult,
    TokenLogprobs,
)
from uma_trio.kv.checkpoints import EACH
from uma_trio.sampling import SamplingParams

N_VOCAB = 1000
EOG = 0
STATE_BYTES = 12_288
"""Of each token in a saved state."""
STATE_BYTES_A_MS = 2.4e6
MARK_BYTES = 64
"""Of a checkpoint."""


class Story:
    """A sequence as the fake model knows it: its tokens, and a digest of all of them after each."""

    def __init__(self, tokens: Iterable[int] = (), digests: Iterable[int] = (17,)) -> None:
        self._tokens = list(tokens)
        self._digests = list(digests)

    @property
    def length(self) -> int:
        return len(self._digests) - 1

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    def read(self, tokens: Iterable[int]) -> None:
        digest = self._digests[-1]
        for token in tokens:
            digest = (digest * 31 + int(token) + 7) % 99991
            self._tokens.append(int(token))
            self._digests.append(digest)

    def digest(self, length: int) -> int:
        """Of the first ``length`` tokens."""
        return self._digests[length]

    def before(self, length: int, n: int) -> list[int]:
        """The last ``n`` of the first ``length`` tokens."""
        return self._tokens[length - n : length]

    def beginning(self, length: int) -> Story:
        return Story(self._tokens[:length], self._digests[: length + 1])

    def said_after(self, length: int, draw: Draw, repeats: int = 0) -> int:
        """What the model says after the first ``length`` tokens: EOG only if it repeats one."""
        said = 1 + self._digests[length] % (N_VOCAB - 1)
        if repeats and length >= repeats and self._digests[length] % 8:
            said = self._tokens[length - repeats]
        if draw.params.greedy or (draw.params.seed + 3 * draw.step) % 7:
            return said
        return 1 + (said + draw.params.seed + draw.step) % (N_VOCAB - 1)


def chosen(liked: Iterable[int], avoided: Collection[int]) -> int:
    """The first that can be said."""
    return next(token for token in (*liked, *range(1, N_VOCAB)) if token not in avoided)


def said_before(params: SamplingParams, story: Sequence[int], n_prompt: int) -> set[int]:
    """What penalties look at, of a prompt with its answer."""
    window = story[-params.repetition_window :] if params.repetition_window else ()
    return {*window, *(story[n_prompt:] if params.counts_answer else ())}


def expected_score(token: int, n: int) -> TokenLogprobs:
    """What the model tells of ``token`` to who asks for ``n``."""
    return TokenLogprobs(-(token % 97) / 8, tuple((token + i, -(token % 97 + i) / 8) for i in range(n)))


def expected_continuation(
    prompt: Iterable[int], n: int, *, repeats: int = 0, params: SamplingParams | None = None
) -> list[int]:
    """The first ``n`` tokens that follow ``prompt``, where nothing is masked."""
    story, params = Story(), params or SamplingParams()
    read = list(prompt)
    n_prompt = len(read)
    story.read(read)
    for step in range(n):
        said = story.said_after(story.length, Draw(params, step), repeats)
        read.append(chosen([said], said_before(params, read, n_prompt)))
        story.read(read[-1:])
    return read[n_prompt:]


class FakeEngine:
    """See ``records.Engine``.

    Args:
        cost_ms: (prompt tokens, rows of decodes) -> simulated milliseconds of a call.
        eog_after: the model ends a sequence that has grown to so many tokens.
        rewinds: else only the whole of a sequence can be removed or copied, or what is behind a checkpoint.
        repeats: the model mostly says what stood so many tokens before; 0: never.
    """

    def __init__(
        self,
        *,
        n_ctx: int = 4096,
        n_seq_max: int = 8,
        n_batch: int = 512,
        unified: bool = True,
        cost_ms: Callable[[int, int], float] = lambda prompt, decodes: 5 + 0.1 * prompt + 0.5 * decodes,
        eog_after: int | None = None,
        repeats: int = 0,
        rewinds: bool = True,
        checkpoints: int | None = None,
    ) -> None:
        self.facts = ModelFacts(
            name="fake",
            description="fake",
            n_vocab=N_VOCAB,
            n_ctx=n_ctx,
            n_ctx_seq=n_ctx if unified else n_ctx // n_seq_max,
            n_ctx_train=1 << 20,
            n_batch=n_batch,
            n_seq_max=n_seq_max,
            eog_ids=(EOG,),
            size_bytes=1,
            n_params=1,
            unified=unified,
            rewinds=rewinds,
            states_rewind=rewinds,
            checkpoints=0 if rewinds else EACH * n_seq_max if checkpoints is None else checkpoints,
        )
        self.cost_ms = cost_ms
        self.eog_after = eog_after
        self.repeats = repeats
        self.steps: list[Step] = []
        self.cost_of_last_ms = 0.0
        self.fail_next: EngineError | None = None
        self.fail_reset: EngineError | None = None
        self.resets = 0
        self._aborted = False
        self._cache: dict[int, Story] = {}
        self.marks: dict[int, tuple[int, int]] = {}
        """Length and digest of what held, by number of the checkpoint."""

    def step(self, step: Step) -> StepResult:
        self.steps.append(step)
        self.cost_of_last_ms = 0.0
        refused: list[tuple[int, str]] = []
        copied_ms = 0.0
        saved_bytes = 0
        for edit in step.edits:
            if isinstance(edit, Save | Load):
                if isinstance(edit, Save):
                    saved_bytes += self.state_bytes(edit.seq_id) + sum(len(into) for _, into in edit.marks)
                copied_ms += self._copy_state(edit, refused)
            elif isinstance(edit, Forget):
                self.marks.pop(edit.mark, None)
            else:
                self._edit(edit)
        self.cost_of_last_ms += copied_ms
        feeds = [feed for batch in step.batches for feed in batch]
        if not feeds:
            return StepResult((), copied_ms=copied_ms, saved_bytes=saved_bytes, refused=refused)
        failure, self.fail_next = self.fail_next, None
        if self._aborted:
            failure = EngineError("aborted", fatal=False)
        if failure is not None:
            self.cost_of_last_ms = self.cost_ms(0, len(feeds))
            raise failure
        drawn = []
        draws = [draw for feed in feeds for draw in feed.draws]
        for batch in step.batches:
            sizes = [len(feed.tokens) for feed in batch]
            if not sizes or not all(sizes) or sum(sizes) > self.facts.n_batch:
                raise EngineError(f"a batch of {sizes} tokens", fatal=True)
            for feed in batch:
                drawn += self._feed(feed)
            if sum(held.length for held in self._cache.values()) > self.facts.n_ctx:
                raise EngineError("no room in the KV cache", fatal=False)
            decodes = sum(len(feed.draws) for feed in batch if len(feed.draws) == len(feed.tokens))
            self.cost_of_last_ms += self.cost_ms(sum(sizes) - decodes, decodes)
        scores = [
            None if draw.logprobs is None else expected_score(token, draw.logprobs)
            for token, draw in zip(drawn, draws, strict=True)
        ]
        return StepResult(
            tuple(drawn),
            decode_ms=self.cost_of_last_ms - copied_ms,
            scores=scores if any(scores) else (),
            copied_ms=copied_ms,
            saved_bytes=saved_bytes,
            refused=refused,
        )

    def _copy_state(self, edit: Save | Load, refused: list[tuple[int, str]]) -> float:
        """Simulated milliseconds of copying a state: its tokens as text, padded."""
        self._check_seq(edit.seq_id)
        if isinstance(edit, Save):
            state = self._state(edit.seq_id)
            view = memoryview(edit.into).cast("B")
            if len(view) < len(state):
                refused.append((edit.seq_id, "the buffer is too small"))
                return 0.0
            for mark, into in edit.marks:
                if self.mark_bytes(mark) != len(into):
                    refused.append((edit.seq_id, f"no checkpoint {mark}, or one of another size"))
                    return 0.0
                into[:] = b"%d %d" % self.marks[mark] + b" " * (MARK_BYTES - len(b"%d %d" % self.marks[mark]))
            view[: len(state)] = state
            return len(state) / STATE_BYTES_A_MS
        self._cache.pop(edit.seq_id, None)
        state = bytes(edit.state)
        try:
            tokens = [int(word) for word in state.rstrip(b"\0").split()]
        except ValueError:
            tokens = []
        if len(state) != STATE_BYTES * len(tokens):
            tokens = []
        room = self.facts.n_ctx - sum(held.length for held in self._cache.values())
        if not tokens or len(tokens) != edit.length or len(tokens) > min(room, self.facts.n_ctx_seq):
            refused.append((edit.seq_id, "not a state, or no room for it"))
            return 0.0
        story = Story()
        story.read(tokens)
        self._cache[edit.seq_id] = story
        for mark, kept in edit.marks:
            length, digest = map(int, bytes(kept).split())
            self.marks[mark] = (length, digest)
        return STATE_BYTES * len(tokens) / STATE_BYTES_A_MS

    def _state(self, seq_id: int) -> bytes:
        tokens = self._cache.get(seq_id, Story()).tokens
        return b" ".join(b"%d" % token for token in tokens).ljust(STATE_BYTES * len(tokens), b"\0")

    def state_bytes(self, seq_id: int) -> int:
        return len(self._state(seq_id))

    def mark_bytes(self, mark: int) -> int:
        return MARK_BYTES if mark in self.marks else 0

    def _edit(self, edit: Remove | Copy | Mark) -> None:
        if isinstance(edit, Mark):
            held = self._cache.get(edit.seq_id, Story())
            if edit.mark in self.marks or not held.length or len(self.marks) >= self.facts.checkpoints:
                raise EngineError(f"{edit} of {held.length} tokens beside {len(self.marks)}", fatal=True)
            self.marks[edit.mark] = (held.length, held.digest(held.length))
        elif isinstance(edit, Copy):
            self._check_seq(edit.source)
            self._check_seq(edit.target)
            source = self._cache.get(edit.source, Story())
            if self._cache.get(edit.target, Story()).length or edit.length > source.length:
                raise EngineError(f"{edit} of {source.length} tokens", fatal=True)
            self._check_cut(source, edit.length, edit.mark)
            self._cache[edit.target] = source.beginning(edit.length)
        else:
            self._check_seq(edit.seq_id)
            held = self._cache.get(edit.seq_id, Story())
            self._check_cut(held, edit.start, edit.mark)
            self._cache[edit.seq_id] = held.beginning(edit.start)

    def _check_cut(self, held: Story, length: int, mark: int | None) -> None:
        """A memory that cannot be cut goes back to a state that it had, and to no other."""
        if self.facts.rewinds or not 0 < length < held.length:
            return
        if mark is None or self.marks.get(mark) != (length, held.digest(length)):
            raise EngineError(f"{held.length} tokens cannot be cut to {length} by {mark} of {self.marks}", fatal=True)

    def _feed(self, feed: Feed) -> list[int]:
        self._check_seq(feed.seq_id)
        if len(feed.draws) not in (0, 1, len(feed.tokens)):
            raise EngineError(f"{len(feed.draws)} draws for {len(feed.tokens)} tokens", fatal=True)
        held = self._cache.setdefault(feed.seq_id, Story())
        if feed.pos != held.length:
            raise EngineError(f"sequence {feed.seq_id} holds {held.length} tokens, fed at {feed.pos}", fatal=True)
        held.read(np.asarray(feed.tokens).tolist())
        if held.length > self.facts.n_ctx_seq:
            raise EngineError("no room in the KV cache", fatal=False)
        drawn = []
        for length, draw in enumerate(feed.draws, held.length - len(feed.draws) + 1):
            ended = self.eog_after is not None and length >= self.eog_after
            mask = set() if draw.mask is None else set(np.asarray(draw.mask).tolist())
            said = held.said_after(length, draw, self.repeats)
            liked = [EOG, said] if ended else [said]
            if draw.bias is not None and draw.bias.values.max() >= 50:
                liked.insert(0, int(draw.bias.ids[draw.bias.values.argmax()]))
            drawn.append(chosen(liked, mask | self._seen(held, length, draw)))
        return drawn

    def _seen(self, held: Story, length: int, draw: Draw) -> set[int]:
        if draw.past is None:
            return set()
        past = draw.past.tokens.tolist()
        if past != held.before(length, len(past)):
            raise EngineError(f"a past of {past} where {held.before(length, len(past))} is held", fatal=True)
        return said_before(draw.params, past, draw.past.n_prompt)

    def _check_seq(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.facts.n_seq_max:
            raise EngineError(f"sequence {seq_id}", fatal=True)

    def used_cells(self) -> dict[int, int]:
        return {seq_id: held.length for seq_id, held in self._cache.items() if held.length}

    def reset(self) -> None:
        if self.fail_reset is not None:
            raise self.fail_reset
        self._cache.clear()
        self.marks.clear()
        self.resets += 1

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._cache.clear()


class VirtualThread:
    """Stands for ``EngineThread``: a call takes its simulated time on trio's clock, and no thread."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._waiting: deque[VirtualPending] = deque()
        self._free_at = -math.inf

    def submit(self, call: Callable[[], Any]) -> VirtualPending:
        pending = VirtualPending(self, call)
        self._waiting.append(pending)
        self.catch_up()
        return pending

    async def run(self, call: Callable[[], Any]) -> Any:
        return await self.submit(call).wait()

    def catch_up(self) -> float:
        """Begin all calls that should have begun by now; when the last of them ends."""
        while self._waiting and self._free_at <= trio.current_time():
            began = max(self._free_at, self._waiting[0].submitted_at)
            self._engine.cost_of_last_ms = 0.0
            pending = self._waiting.popleft()
            pending.begin()
            pending.began_s = began
            self._free_at = pending.ends_at = began + self._engine.cost_of_last_ms / 1e3
        return self._free_at


class VirtualPending:
    """A call whose end is known as soon as it begins."""

    def __init__(self, thread: VirtualThread, call: Callable[[], Any]) -> None:
        self._thread = thread
        self._call = call
        self._outcome: outcome.Outcome[Any] | None = None
        self.before_told: Callable[[], None] | None = None
        self.submitted_at = trio.current_time()
        self.began_s = math.nan
        self.ends_at = math.inf

    def begin(self) -> None:
        self._outcome = outcome.capture(self._call)

    @property
    def result(self) -> Any:
        return self._outcome.value if isinstance(self._outcome, outcome.Value) else None

    async def settled(self) -> None:
        with trio.CancelScope(shield=True):
            while self.ends_at > trio.current_time():
                await trio.sleep_until(min(self.ends_at, self._thread.catch_up()))
            self._thread.catch_up()

    async def wait(self) -> Any:
        await self.settled()
        return self._outcome.unwrap()
