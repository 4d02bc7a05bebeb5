"""Turns the recording of a run into an animated picture.

The frames are drawn after the run, from the times at which tokens arrived, so drawing does not slow the run down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Final

import attrs
from rich.console import Group
from rich.text import Text

from uma_trio.demo.animation import Frame, lines_of, svg
from uma_trio.demo.recording import Answer, Track
from uma_trio.demo.scorecard import Counters, Scorecard
from uma_trio.demo.view import Scene, scorecard

WIDTH: Final = 116
HEIGHT: Final = 24
FRAME_S: Final = 0.2
MAX_FRAMES: Final = 40
"""Bounds the size of the file: on a slow machine there is more time between two frames."""
HOLD_S: Final = 8.0
"""How long the scorecard stays."""


@attrs.frozen
class Count:
    """A reading of the server's counters."""

    at_s: float
    counters: Counters
    tick_ms: float | None


def picture(tracks: Sequence[Track], counts: Sequence[Count], card: Scorecard) -> str:
    """Return the text of an SVG file: the run as it was seen, then the scorecard."""
    frames = list(_frames(tracks, counts, card))
    return svg(frames, title="uma-trio demo", width=WIDTH, hold_s=HOLD_S)


def _frames(tracks: Sequence[Track], counts: Sequence[Count], card: Scorecard) -> Iterator[Frame]:
    scene = Scene([track.stream for track in tracks])
    events = sorted(_events(tracks, counts, scene), key=lambda event: event[0])
    began_s, ended_s = events[0][0], events[-1][0]
    frame_s = max(FRAME_S, (ended_s - began_s) / MAX_FRAMES)
    played = 0
    for n in count():
        at_s = min(began_s + n * frame_s, ended_s)
        while played < len(events) and events[played][0] <= at_s:
            events[played][1]()
            played += 1
        seen = scene.render(width=WIDTH, height=HEIGHT)
        if at_s == ended_s:
            yield Frame(at_s - began_s, lines_of(Group(seen, Text(), scorecard(card)), WIDTH))
            return
        yield Frame(at_s - began_s, lines_of(seen, WIDTH))


def _events(
    tracks: Sequence[Track], counts: Sequence[Count], scene: Scene
) -> Iterator[tuple[float, Callable[[], object]]]:
    """Yield what ``scene`` has to see, with its time, not in order of time."""
    for reading in counts:
        yield reading.at_s, partial(scene.counted, reading.counters, reading.tick_ms)
    for track in tracks:
        seen = Track(stream=track.stream)
        for answer in track.answers:
            yield answer.sent_s, partial(_sent, scene, seen, answer)
            for at_s, text in zip(answer.token_s, answer.texts, strict=True):
                yield at_s, partial(_token, scene, seen, at_s, text)


def _sent(scene: Scene, seen: Track, answer: Answer) -> None:
    seen.answers.append(Answer(question=answer.question, sent_s=answer.sent_s))
    scene.request_sent(seen)


def _token(scene: Scene, seen: Track, at_s: float, text: str) -> None:
    seen.answers[-1].token_s.append(at_s)
    seen.answers[-1].texts.append(text)
    scene.token_received(seen)
