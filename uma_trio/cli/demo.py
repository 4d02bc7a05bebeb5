"""``uma-trio demo``: short chats next to a long document, and a go/no-go scorecard."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from uma_trio.cli.client_options import reporting_errors, say_which_daemon, socket_option
from uma_trio.cli.exits import FAILED, OK

if TYPE_CHECKING:
    import psutil
    from rich.console import Console

    from uma_trio.demo.load import Daemon, Watcher
    from uma_trio.demo.picture import Count
    from uma_trio.demo.scorecard import Counters, CpuUse, Scorecard
    from uma_trio.demo.view import Scene

FRAME_S = 0.1
COUNT_S = 0.25
GIL_TURN_S = 0.001
"""Python's switch interval while a thread draws frames.  The default of 5 ms would delay the timestamps of tokens."""


def _writable(_context: click.Context, _option: click.Parameter, file: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before the run instead of after it."""
    if file is None:
        return None
    is_new = not file.exists()
    if not (is_new or file.is_file() or file.is_dir()):  # opening a pipe would block
        raise click.BadParameter(f"{file} is not a regular file; give another file")
    try:
        file.open("ab").close()
    except FileNotFoundError:
        raise click.BadParameter(f"there is no folder {file.parent}; make it with: mkdir -p {file.parent}")
    except OSError as error:
        raise click.BadParameter(f"cannot write {file} ({error.strerror}); give another file")
    if is_new:
        file.unlink()
    return file


@click.command("demo")
@click.option("--no-live", is_flag=True, help="Print plain lines; the default if the output is not a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the scorecard as JSON and nothing else.")
@click.option(
    "--max-gap-ms",
    type=click.FloatRange(0, min_open=True),
    help="Maximum gap in a chat during prefill of the document.  [default: 1.5 times target_itl_ms, 300]",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_writable,
    help="Also save this run as an animated SVG file.",
)
@socket_option(help="Use the running daemon at this socket instead of starting one.")
def command(**options: Any) -> None:
    """Watch short chats stay fast next to a long document.

    Three clients chat, and while they do, a fourth one sends a document of 4,000 tokens.  The screen shows their
    answers side by side: the chats go on while the document is prefilled.  Then each client asks again, alone.

    The scorecard at the end is a GO if all of its lines pass: no chat froze, the streams took turns, every text is the
    same as alone, and so on.  docs/BENCHMARKS.md explains them.  The demo takes about 15 seconds on an idle machine; a busy one may
    be a NO-GO.  Without --socket, the demo starts and ends a daemon of its own, with the embedded model.

    \b
      uma-trio demo
      uma-trio demo --json > scorecard.json     for programs
      uma-trio demo --picture demo.svg          an animation of this run, for a web page

    \b
    Exit codes:
      0  GO
      1  NO-GO
      2  the daemon refused, or no daemon
      3  protocol error
    """
    from uma_trio.cli.run_trio import Interrupted, run, until_interrupted

    socket = options["socket"]
    try:
        with reporting_errors("demo", socket, daemon="its own daemon" if socket is None else None):
            card = run(until_interrupted, lambda: _demo(options))
    except Interrupted as interrupted:
        sys.exit(128 + interrupted.number)
    sys.exit(OK if card.go else FAILED)


async def _demo(options: dict[str, Any]) -> Scorecard:
    from contextlib import AsyncExitStack

    from rich.console import Console

    from uma_trio.demo.load import Daemon
    from uma_trio.demo.temporary_daemon import temporary_daemon
    from uma_trio.demo.view import scorecard

    console = Console(quiet=options["as_json"], highlight=False)
    async with AsyncExitStack() as stack:
        path = options["socket"]
        if path is None:
            with console.status("loading the model"):
                path = (await stack.enter_async_context(temporary_daemon())).path
        await say_which_daemon("demo", path)
        card = await _play(Daemon(path), console, options)
    if options["as_json"]:
        click.echo(json.dumps({"go": card.go, "advice": card.advice, **attrs.asdict(card)}, indent=2))
    else:
        console.print(scorecard(card))
    return card


async def _play(daemon: Daemon, console: Console, options: dict[str, Any]) -> Scorecard:
    """Run all streams at once, then each alone."""
    import trio

    from uma_trio.demo.load import one_by_one, together
    from uma_trio.demo.picture import picture
    from uma_trio.demo.scorecard import score
    from uma_trio.demo.script import HEAD_START, streams
    from uma_trio.demo.view import Lines, Scene

    script = streams()
    scene = Scene(script)
    live = console.is_terminal and not options["no_live"] and not options["as_json"]
    watchers: list[Watcher] = [scene] if live else [Lines(console)]
    counts: list[Count] = []
    before = await daemon.counters()
    others = _OtherPrograms((await daemon.snapshot())["engine"]["pid"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_count, daemon, before, scene, counts)
        if live:
            await nursery.start(_animate, scene, console)
        began = trio.current_time()
        tracks = await together(script, daemon, head_start=HEAD_START, watchers=watchers)
        wall_s = trio.current_time() - began
        nursery.cancel_scope.cancel()
    cpu = others.measured(wall_s)
    counted = (await daemon.counters()).since(before)
    with console.status("running each stream alone, to compare the texts"):
        alone = await one_by_one(script, daemon)
    max_gap_ms = options["max_gap_ms"] or _longest_gap_ms()
    card = score(tracks, alone, counted, wall_s=wall_s, max_gap_ms=max_gap_ms, cpu=cpu)
    if options["picture"] is not None:
        options["picture"].write_text(picture(tracks, counts, card))
    return card


async def _count(daemon: Daemon, before: Counters, scene: Scene, counts: list[Count]) -> None:
    """Read the daemon's counters until cancelled, for the status line."""
    import trio

    from uma_trio.demo.picture import Count
    from uma_trio.demo.scorecard import Counters

    while True:
        snapshot = await daemon.snapshot()
        count = Count(trio.current_time(), Counters.of(snapshot).since(before), snapshot.get("decode_ms_avg"))
        counts.append(count)
        scene.counted(count.counters, count.tick_ms)
        await trio.sleep(COUNT_S)


class _OtherPrograms:
    """Measures how much CPU time programs other than the demo and its daemon use, from now on."""

    def __init__(self, engine_pid: int | None) -> None:
        self._own = _own_processes(engine_pid)
        self._before_s = self._used_s()

    def measured(self, wall_s: float) -> CpuUse | None:
        """Return the use since the beginning, which is ``wall_s`` ago; ``None`` if it cannot be measured."""
        import psutil

        from uma_trio.demo.scorecard import CpuUse

        used_s = self._used_s()
        if used_s is None or self._before_s is None:
            return None
        return CpuUse(cores=psutil.cpu_count() or 1, by_others=round(max(0.0, used_s - self._before_s) / wall_s, 2))

    def _used_s(self) -> float | None:
        """CPU seconds of all programs but our own, since the machine started."""
        import psutil

        if self._own is None:
            return None
        machine = psutil.cpu_times()
        busy = sum(getattr(machine, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
        try:
            own = [process.cpu_times() for process in self._own]
        except psutil.Error:  # a process has ended, or belongs to somebody else
            return None
        return float(busy - sum(times.user + times.system for times in own))


def _own_processes(engine_pid: int | None) -> set[psutil.Process] | None:
    """Return the processes of the demo and of the daemon; ``None`` if the daemon's are not known."""
    import psutil

    if engine_pid is None:  # the engine is a thread of the daemon, whose process id nobody says
        return None
    me, engine = psutil.Process(), psutil.Process(engine_pid)
    return {me, *me.children(recursive=True), engine, *engine.parents()[:1]}


async def _animate(scene: Scene, console: Console, task_status: Any) -> None:
    """Draw until cancelled.  The last frame stays on the screen."""
    import functools

    import trio
    from rich.live import Live

    def frame() -> Any:
        return scene.render(width=console.width, height=console.height)

    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(GIL_TURN_S)
    try:
        with Live(frame(), console=console, auto_refresh=False) as live:
            task_status.started()
            try:
                while True:
                    await trio.to_thread.run_sync(functools.partial(live.update, frame(), refresh=True))
                    await trio.sleep(FRAME_S)
            finally:
                live.update(frame(), refresh=True)
    finally:
        sys.setswitchinterval(switch_interval)


def _longest_gap_ms() -> float:
    from uma_trio.config import Scheduling

    return 1.5 * Scheduling().target_itl_ms
