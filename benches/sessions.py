"""Measure sessions that continue: from the KV cache, from disk, or computed again; and many more than fit into memory.

python benches/sessions.py --model /tmp/125m.gguf --threads 1
python benches/sessions.py --model /tmp/125m.gguf --threads 1 --tokens 32 --picture clip-l
python benches/sessions.py --model /tmp/125m.gguf --threads 1 --churn
python benches/sessions.py --churn --sessions 40 --turns 3 --hour 0.01
"""

from __future__ import annotations

import base64
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import trio
from command import Place, bench, carry_out, csv_option, places, repeat_option
from comparison import RunsFile
from make_projector import SHAPES, make_projector
from processes import rss_bytes
from prompts import of_tokens
from random_pictures import random_picture
from report import cell, table
from rigs import Rig, ServerSettings, uma_trio_flags, uma_trio_rig

from uma_trio.client import Client, Eos, ServerError, Token, open_client
from uma_trio.tokenizer.tokenizer import Tokenizer
from uma_trio.tokenizer.vocabulary import vocabulary

OFFLOAD_NOW = ("--offload-after-s", "0")
"""Sessions go to disk at once, so that the bench need not wait."""

SAMPLE_S = 0.25
MB = 1e6


# -- cold, warm, from disk --------------------------------------------------------------------------


Asked = Mapping[str, Any]
"""The field of a request that has the next prompt or message of a session."""


async def ttft(client: Client, session: str, asked: Asked, tokens: int = 4) -> tuple[float, Eos]:
    """Ask for the next turn of a session; return its TTFT in ms by the client's clock, and the last event."""
    began, first = time.perf_counter(), math.nan
    async for event in client.generate(
        **asked, session_id=session, max_tokens=tokens, ignore_eos=True, keep_alive=True
    ):
        if isinstance(event, Token) and math.isnan(first):
            first = 1e3 * (time.perf_counter() - began)
    assert isinstance(event, Eos)
    return first, event


async def offloaded(client: Client, n: int) -> dict[str, Any]:
    """Wait until the server has handled ``n`` states; return its metrics."""
    with trio.fail_after(120):
        while True:
            await client.send({"type": "metrics", "keep_alive": True})
            snapshot: dict[str, Any] = (await client.receive()).snapshot
            counted = snapshot["kv_offload"]
            if counted["saved_total"] + counted["save_failed_total"] + counted["skipped_total"] >= n:
                return snapshot
            await trio.sleep(0.05)


@attrs.define
class Times:
    """TTFT of one session."""

    cold_ms: float
    warm_ms: float
    restored_ms: float = math.nan
    restored_tokens: int = 0
    state_mb: float = math.nan


@attrs.frozen
class Talk:
    """The turns of every session."""

    firsts: Sequence[Asked]
    """The first turn of each."""
    then: Asked
    """All later turns."""
    flags: Sequence[str] = ()
    """What the server needs for them."""

    @classmethod
    def of(cls, texts: Sequence[str], projector: Path | None) -> Talk:
        """Sessions that begin with ``texts``; if there is a projector, each about a picture of its own."""
        if projector is None:
            return cls([{"prompt": text} for text in texts], {"prompt": " and then"})

        def user(*parts: Mapping[str, str]) -> Asked:
            return {"messages": [{"role": "user", "content": [*parts]}]}

        firsts = [user(_picture(n), {"type": "text", "text": text}) for n, text in enumerate(texts)]
        then = user({"type": "text", "text": "Which colours has it?"})
        return cls(firsts, then, ["--mmproj", str(projector), "--chat-template", "chatml"])


def _picture(seed: int) -> Mapping[str, str]:
    return {"type": "image", "data": base64.b64encode(random_picture(seed)).decode()}


async def three_ways(
    serving: ServerSettings, talk: Talk, state: Path, offload_mb: int
) -> tuple[list[Times], list[dict[str, Any]]]:
    """Begin sessions, continue each, and continue it once more after a restart of the server.

    Returns:
        The times of each session, and the server's metrics before and after the restart.
    """
    flags = [*uma_trio_flags(serving), "--state-dir", str(state), "--offload-max-mb", str(offload_mb), *OFFLOAD_NOW]
    all_times = []
    async with uma_trio_rig([*flags, *talk.flags]) as rig, open_client(path_of(rig)) as client:
        await ttft(client, "warm up", talk.then)
        for n, asked in enumerate(talk.firsts):
            cold, first = await ttft(client, f"s{n}", asked)
            warm, last = await ttft(client, f"s{n}", talk.then)
            if last.usage.cached_tokens < first.usage.prompt_tokens:
                raise click.ClickException(f"the session was not in the KV cache: {last.usage}")
            all_times.append(Times(cold, warm))
        before = await offloaded(client, len(talk.firsts))
    async with uma_trio_rig([*flags, *talk.flags]) as rig, open_client(path_of(rig)) as client:
        await ttft(client, "warm up", talk.then)
        n_bytes = 0
        for n, times in enumerate(all_times):
            times.restored_ms, last = await ttft(client, f"s{n}", talk.then)
            times.restored_tokens = last.usage.cached_tokens
            after = await offloaded(client, 0)
            times.state_mb = (after["kv_offload"]["loaded_bytes_total"] - n_bytes) / MB
            n_bytes = after["kv_offload"]["loaded_bytes_total"]
    return all_times, [before, after]


def path_of(rig: Rig) -> Path:
    """The socket of the daemon."""
    return Path(rig.transport.path)  # type: ignore[attr-defined]


def show(times: Sequence[Times], before: dict[str, Any], after: dict[str, Any]) -> str:
    """A row for each way to continue, relative to a cold start.

    Args:
        before, after: metrics of the server before and after its restart.
    """

    def of(name: str) -> list[float]:
        return [getattr(one, name) for one in times]

    cold = statistics.median(of("cold_ms"))
    lines = [
        [name, cell(statistics.median(of(key))), cell(max(of(key))), f"{statistics.median(of(key)) / cold:.2%}"]
        for name, key in (("cold", "cold_ms"), ("in the cache", "warm_ms"), ("after a restart", "restored_ms"))
    ]
    saved, restored = before["kv_offload"], after["kv_offload"]
    pictures = [snapshot["pictures"] for snapshot in (before, after) if "pictures" in snapshot]
    loaded = [one.state_mb for one in times if one.state_mb]
    size = f", {statistics.median(loaded):,.1f} MB of {times[0].restored_tokens} tokens each" if loaded else ""
    return (
        f"{table(('session', 'TTFT p50 ms', 'max', 'of cold'), lines)}\n\n"
        f"saved {saved['saved_total']}, skipped {saved['skipped_total']}, failed {saved['save_failed_total']}; "
        f"after a restart {len(loaded)} of {len(times)} were read{size}\n"
        f"each p50 ms: prepared {restored['prepare_p50_ms']}, copied {restored['load_p50_ms']}, "
        f"verified after that {restored['verify_p50_ms']}"
        + "".join(
            f"\npictures {when} the restart: {figures['encoded_total']} encoded, {figures['loaded_total']} from disk, "
            f"{figures['found_total']} from memory"
            for when, figures in zip(("before", "after"), pictures, strict=False)
        )
    )


# -- more sessions than fit -------------------------------------------------------------------------


@attrs.define
class Conversation:
    """The conversation of one user."""

    name: str
    texts: list[str]
    tokens: int = 0
    """Tokens that the session should have."""
    turns: int = 0
    ttft_ms: list[float] = attrs.field(factory=list)
    cached: list[float] = attrs.field(factory=list)
    """Share of the history that came from the KV cache or from disk, for each later turn."""
    lost: list[str] = attrs.field(factory=list)
    """Turns that failed or lost a part of the history."""


async def converse(conversation: Conversation, path: Path, starts: Sequence[float], answer: int, began: float) -> None:
    """Send the turns of ``conversation`` at the times ``starts``, and check each answer."""
    for n, (text, start) in enumerate(zip(conversation.texts, starts, strict=True)):
        await trio.sleep_until(began + start)
        async with open_client(path) as client:
            try:
                first, last = await ttft(client, conversation.name, {"prompt": text}, answer)
            except ServerError as error:
                conversation.lost.append(f"turn {n + 1}: {error}")
                continue
        usage, session = last.usage, last.session
        conversation.ttft_ms.append(first)
        if n:
            conversation.cached.append(usage.cached_tokens / conversation.tokens)
            if usage.prompt_tokens <= conversation.tokens:
                conversation.lost.append(
                    f"turn {n + 1}: its prompt has {usage.prompt_tokens} of {conversation.tokens} tokens"
                )
        conversation.tokens, conversation.turns = session.tokens, conversation.turns + 1
        if (session.turns, session.durable) != (conversation.turns, True):
            conversation.lost.append(f"turn {n + 1}: {session}")


@attrs.define
class Watch:
    """Samples of the server's metrics and memory."""

    cells: int = 0
    most_cells: int = 0
    most_saved_mb: float = 0.0
    rss_mb: list[float] = attrs.field(factory=list)
    last: dict[str, Any] = attrs.field(factory=dict)

    async def run(self, path: Path, pid: int | None) -> None:
        """Sample until cancelled."""
        while True:
            async with open_client(path) as client:
                self.last = await client.metrics()
            kv = self.last["kv"]
            self.cells = kv["cells"]
            self.most_cells = max(self.most_cells, kv["cells_reserved"] + kv["cached_cells"])
            self.most_saved_mb = max(self.most_saved_mb, kv["saved_bytes"] / MB)
            if pid is not None:
                self.rss_mb.append(rss_bytes(pid) / MB)
            await trio.sleep(SAMPLE_S)


async def churn(
    serving: ServerSettings,
    conversations: list[Conversation],
    hour_s: float,
    answer: int,
    state: Path,
    offload_mb: int,
    seed: int,
) -> Watch:
    """Run all conversations, each turn at a random moment of the hour."""
    rng = random.Random(seed)
    flags = [
        *uma_trio_flags(serving),
        "--state-dir",
        str(state),
        "--offload-max-mb",
        str(offload_mb),
        "--max-queue",
        "1000",
        "--max-connections",
        "1000",
    ]
    watch = Watch()
    async with uma_trio_rig(flags) as rig:
        path, began = path_of(rig), trio.current_time()
        async with trio.open_nursery() as watching:
            watching.start_soon(watch.run, path, rig.pid)
            async with trio.open_nursery() as nursery:
                for conversation in conversations:
                    starts = sorted(rng.uniform(0, hour_s) for _ in conversation.texts)
                    nursery.start_soon(converse, conversation, path, starts, answer, began)
            await trio.sleep(2 * SAMPLE_S)
            watching.cancel_scope.cancel()
    return watch


def show_churn(conversations: Sequence[Conversation], watch: Watch, wall_s: float) -> None:
    """Print the figures.

    Raises:
        click.ClickException: a turn failed or lost a part of the history.
    """
    lost = [f"{conversation.name}, {why}" for conversation in conversations for why in conversation.lost]
    ttft_ms = sorted(ms for conversation in conversations for ms in conversation.ttft_ms)
    cached = [share for conversation in conversations for share in conversation.cached]
    offload, tick_ms = watch.last["kv_offload"], watch.last["decode_ms_avg"]
    click.echo(
        f"sessions      {len(conversations)}, {sum(conversation.turns for conversation in conversations)} turns in {wall_s:.0f} s, {sum(conversation.tokens for conversation in conversations):,} tokens at the end"
    )
    click.echo(f"lost          {len(lost)}")
    click.echo(f"cells         {watch.most_cells:,} of {watch.cells:,} at most")
    click.echo(f"on disk       {watch.most_saved_mb:,.0f} MB at most")
    if watch.rss_mb:
        later = watch.rss_mb[len(watch.rss_mb) // 4 :]
        click.echo(
            f"RSS           {later[0]:,.0f} MB after a quarter, {max(later):,.0f} at most, {later[-1]:,.0f} at the end"
        )
    click.echo(
        f"TTFT          p50 {statistics.median(ttft_ms):,.0f}, p95 {ttft_ms[int(0.95 * len(ttft_ms))]:,.0f}, max {ttft_ms[-1]:,.0f} ms"
    )
    click.echo(f"reused        {statistics.fmean(cached):.0%} of the history on average")
    click.echo(
        f"saved         {offload['saved_total']} states, {offload['saved_bytes_total'] / MB:,.0f} MB; {offload['save_failed_total']} failed, {offload['skipped_total']} are faster to compute"
    )
    click.echo(
        f"loaded        {offload['loaded_total']} states, {offload['loaded_bytes_total'] / MB:,.0f} MB; {offload['load_failed_total']} failed"
    )
    click.echo(
        f"longest stall {offload['stall_max_ms']} ms (p50 {offload['stall_p50_ms']}, p99 {offload['stall_p99_ms']}); a tick takes {tick_ms:.1f} ms on average"
    )
    for line in lost[:20]:
        click.echo(f"LOST: {line}", err=True)
    if lost:
        raise click.ClickException(f"{len(lost)} turns failed or lost a part of the history")


def random_texts(tokenizer: Tokenizer, rng: random.Random, turns: int, first: int, later: int) -> list[str]:
    """A prompt for each turn; sizes vary between 0.5 and 1.5 times ``first`` and ``later``."""
    spread = [first, *[later] * (turns - 1)]
    return [of_tokens(tokenizer, rng, max(4, int(n * rng.uniform(0.5, 1.5)))) for n in spread]


@bench()
@click.option("--tokens", type=click.IntRange(32), default=4000, help="Tokens of each session, without --churn.")
@click.option(
    "--picture",
    type=click.Choice([*SHAPES]),
    help="Begin each session with a picture, without --churn; size of the projector.",
)
@click.option("--churn", "churns", is_flag=True, help="Measure more sessions than fit into memory, instead.")
@click.option("--sessions", type=click.IntRange(1), default=500, help="With --churn: number of sessions.")
@click.option("--room", type=click.IntRange(1), default=20, help="With --churn: sequences of the server.")
@click.option("--turns", type=click.IntRange(1), default=4, help="With --churn: turns of each session.")
@click.option("--first", type=click.IntRange(4), default=400, help="With --churn: mean tokens of the first prompt.")
@click.option("--later", type=click.IntRange(4), default=60, help="With --churn: mean tokens of later prompts.")
@click.option("--answer", type=click.IntRange(1), default=24, help="With --churn: tokens generated in each turn.")
@click.option("--hour", type=click.FloatRange(0.001), default=0.1, help="With --churn: duration, in hours.")
@click.option("--offload-mb", type=click.IntRange(1), default=8192, help="Most megabytes of KV cache on disk.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the sessions.  [default: a temporary folder]",
)
@click.option("--seed", type=int, default=0, help="Seed of words and moments.")
@places()
@repeat_option(5, "Sessions, without --churn.")
@csv_option("a row for each session")
def main(repeat: int, csv_file: Path | None, **options: Any) -> None:
    """Measure sessions that continue.

    Without --churn: the TTFT of a session's first turn (cold), of its next turn while its sequence is in the KV cache,
    and of its next turn after a restart of the server, from disk.

    With --churn: --sessions conversations of --turns each, at random moments of a compressed hour, in a server with
    --room sequences. Each answer is checked. If a part of a history is missing, the exit code is 1.
    """
    place = Place.of(options)
    place.show()
    rng = random.Random(options["seed"])
    with vocabulary(place.model) as tokenizer, tempfile.TemporaryDirectory(dir=options["state_dir"]) as folder:
        if options["churns"]:
            _churn(place, options, tokenizer, rng, Path(folder), csv_file)
            return
        texts = [of_tokens(tokenizer, rng, options["tokens"]) for _ in range(repeat)]
        shape = SHAPES.get(options["picture"])
        rows = 0 if shape is None else shape.n_patches
        window = -(-(options["tokens"] + rows + 128) // 256) * 256
        serving = ServerSettings(
            model=place.model, threads=place.threads, parallel=repeat + 1, ctx=(repeat + 1) * window
        )
        click.echo(
            f"server    {serving}\nload      {repeat} sessions of {options['tokens']} tokens, seed {options['seed']}\n"
        )

        projector = None
        if shape is not None:
            projector = Path(folder, "mmproj.gguf")
            make_projector(projector, place.model, shape)
        talk = Talk.of(texts, projector)

        async def work() -> tuple[list[Times], list[dict[str, Any]]]:
            return await three_ways(serving, talk, Path(folder, "state"), options["offload_mb"])

        times, metrics = carry_out(work)
        file = RunsFile(csv_file, ["session", *[field.name for field in attrs.fields(Times)]])
        for n, one in enumerate(times, 1):
            file.add(n, *attrs.astuple(one))
        click.echo(show(times, *metrics))


def _churn(
    place: Place, options: dict[str, Any], tokenizer: Tokenizer, rng: random.Random, folder: Path, csv_file: Path | None
) -> None:
    turns, answer = options["turns"], options["answer"]
    conversations = [
        Conversation(f"talk {n}", random_texts(tokenizer, rng, turns, options["first"], options["later"]))
        for n in range(options["sessions"])
    ]
    most = 1.5 * (options["first"] + (turns - 1) * options["later"]) + turns * (answer + 2)
    window = -(-int(most + 64) // 256) * 256
    serving = ServerSettings(
        model=place.model, threads=place.threads, parallel=options["room"], ctx=options["room"] * window
    )
    hour_s = 3600 * options["hour"]
    click.echo(
        f"server    {serving}\nload      {len(conversations)} sessions of {turns} turns in {hour_s:.0f} s, {options['first']} tokens first, "
        f"{options['later']} later, {answer} generated, seed {options['seed']}\n"
    )
    began = time.perf_counter()

    async def work() -> Watch:
        return await churn(serving, conversations, hour_s, answer, folder, options["offload_mb"], options["seed"])

    watch = carry_out(work)
    file = RunsFile(csv_file, ["session", "turns", "tokens", "ttft_p50_ms", "cached_share"])
    for conversation in conversations:
        share = statistics.fmean(conversation.cached) if conversation.cached else math.nan
        file.add(
            conversation.name, conversation.turns, conversation.tokens, statistics.median(conversation.ttft_ms), share
        )
    show_churn(conversations, watch, time.perf_counter() - began)


if __name__ == "__main__":
    main()
