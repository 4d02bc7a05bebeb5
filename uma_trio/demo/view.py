"""The demo's display: a panel for each stream, and the scorecard."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from uma_trio.demo.load import NullWatcher
from uma_trio.demo.recording import Answer, Stream, Track
from uma_trio.demo.scorecard import Counters, Scorecard

COLOURS: Final = ("cyan", "green", "magenta", "yellow")
RIBBON: Final = 400
"""Number of arrivals to keep: more than the widest terminal shows."""

QUESTION_CHARS: Final = 60


class Scene(NullWatcher):
    """Live view of a mixed load."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = list(streams)
        self._tracks: dict[str, Track] = {}
        self._ribbon: deque[int] = deque(maxlen=RIBBON)
        self._chats_before = 0
        self._chats_after: int | None = None
        self._counted: Counters | None = None
        self._tick_ms: float | None = None

    def request_sent(self, track: Track) -> None:
        self._tracks[track.stream.name] = track
        if not track.stream.interactive:
            self._chats_before = self._chat_tokens()

    def token_received(self, track: Track) -> None:
        self._ribbon.append(self._streams.index(track.stream))
        if not track.stream.interactive and self._chats_after is None:
            self._chats_after = self._chat_tokens()

    def counted(self, counted: Counters, tick_ms: float | None) -> None:
        """Update the status line with the server's counters."""
        self._counted, self._tick_ms = counted, tick_ms

    def _chat_tokens(self) -> int:
        return sum(track.n_tokens for track in self._tracks.values() if track.stream.interactive)

    def render(self, *, width: int, height: int) -> RenderableType:
        """Return the current view.  Later events do not change it."""
        rows = max(4, min(11, (height - 6) // 2))
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        panels = [self._panel(index, width // 2 - 4, rows) for index in range(len(self._streams))]
        for left in range(0, len(panels), 2):
            grid.add_row(*panels[left : left + 2])
        return Group(grid, self._arrivals(width), self._status())

    def _panel(self, index: int, width: int, rows: int) -> Panel:
        stream = self._streams[index]
        track = self._tracks.get(stream.name)
        lines: list[Text] = []
        for answer in track.answers if track else ():
            lines += self._lines(stream, answer, width)
        shown = Text("\n").join(lines[-rows:])
        tokens = f" {track.n_tokens} tokens " if track and track.n_tokens else None
        return Panel(
            shown,
            title=f" {stream.name} ",
            title_align="left",
            subtitle=tokens,
            subtitle_align="right",
            border_style=COLOURS[index % len(COLOURS)],
            height=rows + 2,
        )

    def _lines(self, stream: Stream, answer: Answer, width: int) -> list[Text]:
        lines = [Text(f"> {shorten(answer.question.text)}", style="bold")]
        if not stream.interactive:
            lines.append(Text(self._prefill(answer), style="italic"))
        lines += [Text(line) for line in textwrap.wrap(answer.text, max(10, width))]
        return lines

    def _prefill(self, answer: Answer) -> str:
        if answer.ttft_ms is None:
            done = f", {self._counted.prompt_tokens:,} tokens so far" if self._counted else ""
            return f"prefill{done} ..."
        chats = (self._chats_after or 0) - self._chats_before
        return f"prefill took {answer.ttft_ms / 1e3:.1f} s; the chats got {chats} tokens meanwhile"

    def _arrivals(self, width: int) -> Text:
        """Draw the last tokens in order of arrival: a block in the stream's colour for each."""
        label = "arrivals  "
        line = Text().append(label, style="dim")
        for index in list(self._ribbon)[-(width - len(label)) :]:
            line.append("█", style=COLOURS[index % len(COLOURS)])
        return line

    def _status(self) -> Text:
        counted = self._counted
        if counted is None or counted.average_batch is None:
            return Text("starting", style="dim")
        tick = f", {self._tick_ms:.1f} ms each" if self._tick_ms is not None else ""
        return Text(
            f"{counted.ticks:,} ticks{tick} · {counted.average_batch:.2f} sequences a tick · "
            f"{counted.tokens:,} tokens generated · {counted.prompt_tokens:,} prompt tokens",
            style="dim",
        )


def shorten(text: str) -> str:
    """Format a question as one line; for a long one, show its length and its end."""
    if len(text) <= QUESTION_CHARS and "\n" not in text:
        return text
    return f"[{len(text):,} characters] {text.strip().splitlines()[-1][-QUESTION_CHARS:]}"


class Lines(NullWatcher):
    """Prints a line for each answer, for output that is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def request_sent(self, track: Track) -> None:
        if not track.stream.interactive:
            self._print(f"{track.stream.name:<9} asked: {shorten(track.answers[-1].question.text)}")

    def answer_ended(self, track: Track) -> None:
        answer = track.answers[-1]
        self._print(
            f"{track.stream.name:<9} {len(answer.token_s):4} tokens, first after {answer.ttft_ms or 0:.0f} ms: "
            f"{shorten(answer.question.text)} -> {textwrap.shorten(answer.text, 70, placeholder=' ...')}"
        )

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def scorecard(card: Scorecard) -> RenderableType:
    """Format the scorecard for people."""
    table = Table(title="Scorecard", title_justify="left", title_style="bold", header_style="dim")
    table.add_column("stream", no_wrap=True)
    for name in ("answers", "prompt tokens", "tokens", "TTFT ms", "ITL p50 ms", "p95", "max"):
        table.add_column(name, justify="right")
    for stream in card.streams:
        table.add_row(
            stream.name,
            str(stream.answers),
            f"{stream.prompt_tokens:,}",
            f"{stream.tokens:,}",
            *(
                "-" if value is None else f"{value:,.1f}"
                for value in (stream.ttft_ms, stream.itl_p50_ms, stream.itl_p95_ms, stream.itl_max_ms)
            ),
        )
    tokens_per_tick = f", {card.tokens_per_tick:.2f} new tokens" if card.tokens_per_tick is not None else ""
    batch = "-" if card.average_batch is None else f"{card.average_batch:.2f}"
    summary = Text(
        f"{card.wall_s:.1f} s side by side, {card.tokens_per_s:.0f} tokens/s; "
        f"a tick serves {batch} sequences on average{tokens_per_tick}"
    )
    checks = Table.grid(padding=(0, 2))
    for check in card.checks:
        verdict = Text("PASS", style="bold green") if check.passed else Text("FAIL", style="bold red")
        checks.add_row(verdict, Text(check.name), Text(check.detail, style="dim"))
    end = Text("GO", style="bold green") if card.go else Text("NO-GO", style="bold red")
    if card.advice is not None:
        end.append(f"  {card.advice}", style="not bold yellow")
    return Group(table, summary, Text(), checks, Text(), end)
