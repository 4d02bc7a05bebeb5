"""Mutates files of pictures or sound and sends each of them to a real daemon, next to a stream of text.

    python -m tests.fuzz.mutate_media pictures                  2,000 files, seed 0
    python -m tests.fuzz.mutate_media sound --seed 7 --from 500 --to 1000
    python -m tests.fuzz.mutate_media sound --from 1234 --to 1235 --out /tmp/bad.mp3

The files are PNG, JPEG, GIF, BMP and WebP, or WAV, FLAC and MP3, with one to eight mutations each.  Runs from file 0 on
begin with files that are small and claim to be large.  Every file has one of these outcomes:

    encoded             the model answered
    refused             the request got an error with the reason
    killed the encoder  likewise, and the process that decodes files died or took too long
    wrong               anything else

Afterwards the daemon and its engine are the same processes as before, a stream of somebody else was never harmed, no
sequence or cell is in use, and the memory is back.  The exit code is 1 if one of that does not hold, or a file is wrong.
The gaps between the tokens of that stream are printed, without and with the files.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import attrs
import numpy as np
from PIL import Image

from tests.support import pictures, sounds
from tests.support.pictures import drawn, gif, png
from tests.support.projectors import projector_file
from tests.support.real_daemon import ROOT, Canary, Daemon, missing, real_daemon
from uma_trio.telemetry.perf_records import decode

SPEECH: Final = ROOT / "build" / "llama.cpp" / "tools" / "mtmd" / "test-2.mp3"
CLIENTS: Final = 4
ANSWER_S: Final = 3600.0
"""Longest wait for an answer: files take turns, and the daemon bounds each turn."""
MAX_GROWTH_BYTES: Final = 128 << 20
"""By how much the processes of the daemon, the encoder's aside, may grow."""
MAX_ENCODER_BYTES: Final = 1 << 30
INTERESTING: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
ROUNDS_ALONE: Final = 20
"""Answers of the stream of somebody else before the first file."""
OUTCOMES: Final = ("encoded", "refused", "killed the encoder", "wrong")


@attrs.frozen
class Media:
    """What is mutated."""

    part: Literal["image", "audio"]
    projector: str
    originals: Sequence[bytes]
    """Intact files of every kind that the decoder knows."""
    bombs: Mapping[str, bytes]


def media(name: str) -> Media:
    """Files by the name of their kind, which is one of ``KINDS``."""
    if name == "pictures":
        return Media("image", "mlp", drawings(), pictures.bombs())
    speech = [SPEECH.read_bytes()[:8000]] if SPEECH.exists() else []
    return Media("audio", "qwen2a", sounds.intact(speech), sounds.bombs())


KINDS: Final = ("pictures", "sound")


def drawings() -> list[bytes]:
    """Pictures of every kind that the decoder knows, and of one that it does not."""
    picture = Image.fromarray(drawn(1, 40, 56))
    smooth = Image.fromarray(np.add.outer(np.arange(64, dtype=np.uint8), np.arange(80, dtype=np.uint8)))

    def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    return [
        png(drawn(1)),
        saved(picture.quantize(16), "PNG"),
        saved(smooth.convert("LA"), "PNG"),
        saved(smooth.convert("I;16"), "PNG"),
        saved(picture, "JPEG", quality=80),
        saved(picture, "JPEG", progressive=True, quality=50, subsampling=2),
        saved(picture.convert("CMYK"), "JPEG", restart_marker_rows=1),
        saved(smooth, "JPEG", exif=Image.Exif()),
        gif([5, 200, 90]),
        saved(picture, "GIF", save_all=True, append_images=[smooth.convert("RGB").resize(picture.size)]),
        saved(picture, "BMP"),
        saved(picture.quantize(4), "BMP"),
        saved(picture, "WEBP"),
    ]


def mutated(files: Sequence[bytes], seed: int, number: int) -> bytes:
    """File ``number`` of a run.  The same arguments make the same bytes."""
    chosen = Random(f"{seed}/{number}")
    data = bytearray(files[number % len(files)])
    for _ in range(chosen.randint(1, 8)):
        _mutate(data, files, chosen)
    return bytes(data)


def _mutate(data: bytearray, files: Sequence[bytes], chosen: Random) -> None:
    """Change ``data``: more often its first bytes, which say how the others are read."""
    if not data:
        return
    end = len(data) if chosen.random() < 0.5 else min(len(data), 128)
    at, length = chosen.randrange(end), chosen.choice((1, 2, 4, 8, 32, 256))
    match chosen.randrange(8):
        case 0 | 1:
            data[at] = chosen.randrange(256)
        case 2:
            data[at] ^= 1 << chosen.randrange(8)
        case 3:
            size = chosen.choice((1, 2, 4))
            number = chosen.choice(INTERESTING) & ((1 << 8 * size) - 1)
            data[at : at + size] = number.to_bytes(size, chosen.choice(("big", "little")))
        case 4:
            del data[at : at + length]
        case 5:
            data[at:at] = data[at : at + length] * chosen.choice((1, 2, 50))
        case 6:
            other = chosen.choice(files)
            start = chosen.randrange(len(other))
            data[at : at + length] = other[start : start + length]
        case 7:
            del data[chosen.randrange(len(data)) :]


def outcome_of(daemon: Daemon, part: str, data: bytes) -> tuple[str, str]:
    """How a file ended, and what the daemon said."""
    parts = [{"type": part, "data": data}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": parts}]
    with daemon.wire(encoding="cbor") as wire:
        wire.sock.settimeout(ANSWER_S)
        while True:
            answer = wire.ask(keep_alive=True, messages=messages, max_tokens=1, temperature=0, stream=False)
            if answer.code != "E_MODEL_UNAVAILABLE" or "the machine is busy" not in str(answer.last["message"]):
                break
    if answer.code is None:
        return ("encoded" if answer.reason in ("stop", "length") else "wrong"), str(answer.last)[:200]
    message = str(answer.last["message"])
    if answer.code == "E_LIMIT_CONTEXT" and part == "audio":  # half an hour has more rows than there is room for
        return "refused", message
    if answer.code != "E_PROTO_BAD_REQUEST" or not message.startswith("messages[0].content[0]: "):
        return "wrong", f"{answer.code}: {message}"
    killed = "its process died" in message or "it takes longer than" in message
    return ("killed the encoder" if killed else "refused"), message


def encoders(daemon: Daemon) -> list[Any]:
    return [each for each in daemon.processes if "uma_trio.encoder" in each.cmdline()]


def engine_pids(daemon: Daemon) -> list[int]:
    return [each.pid for each in daemon.processes if "uma_trio.engine" in each.cmdline()]


def growing_bytes(daemon: Daemon) -> int:
    found = {each.pid for each in encoders(daemon)}
    return sum(each.memory_info().rss for each in daemon.processes if each.pid not in found)


def run(daemon: Daemon, part: str, files: Sequence[tuple[str, bytes]]) -> tuple[Counter[str], list[str]]:
    """Send files, some at a time.  Returns how often each outcome came, and what must not have happened."""
    before, pids, problems = growing_bytes(daemon), engine_pids(daemon), []
    counts: Counter[str] = Counter()
    with Canary(daemon) as canary, ThreadPoolExecutor(CLIENTS) as clients:
        outcomes = clients.map(lambda each: (each[0], *outcome_of(daemon, part, each[1])), files)
        for name, outcome, said in outcomes:
            counts[outcome] += 1
            if outcome in OUTCOMES[2:]:
                problems += [f"{name}: {said}"] if outcome == "wrong" else []
                print(f"{name}: {outcome}: {said}", flush=True)
    problems += [] if canary.rounds else ["the stream of somebody else never went on"]
    daemon.settled()
    if engine_pids(daemon) != pids:
        problems.append("the engine was started again")
    if (growth := growing_bytes(daemon) - before) > MAX_GROWTH_BYTES:
        problems.append(f"the processes have {growth >> 20} MiB more than before")
    problems += [
        f"the encoder has {each.memory_info().rss >> 20} MiB"
        for each in encoders(daemon)
        if each.memory_info().rss > MAX_ENCODER_BYTES
    ]
    return counts, problems


def print_gaps(perf_log: bytes) -> None:
    """Print the gaps between tokens, as the daemon measured them: of ``ROUNDS_ALONE`` requests, and of those after them."""
    [log] = decode(perf_log)
    streams = [request.inter_token_ms for request in log.requests if len(request.inter_token_ms) > 1]
    for name, found in (("alone", streams[:ROUNDS_ALONE]), ("next to the files", streams[ROUNDS_ALONE:])):
        gaps = np.concatenate([*map(np.array, found)])
        p50, p99, most = np.percentile(gaps, (50, 99, 100))
        print(f"gaps {name}: {len(gaps)}, p50 {p50:.1f}, p99 {p99:.1f}, longest {most:.1f} ms")


def named(files: Media, seed: int, numbers: range) -> list[tuple[str, bytes]]:
    """The files of a run, with names: mutated ones, and before number 0 those that claim to be large."""
    bombs = [] if numbers.start else files.bombs.items()
    return [*bombs, *[(str(number), mutated(files.originals, seed, number)) for number in numbers]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", type=int, default=0, dest="start", help="number of the first file")
    parser.add_argument("--to", type=int, default=2000, dest="stop", help="number of the file after the last one")
    parser.add_argument("--out", type=Path, help="where to write the last file")
    given = parser.parse_args()
    if (reason := missing()) is not None:
        print(reason)
        return 1
    chosen = media(given.kind)
    files = named(chosen, given.seed, range(given.start, given.stop))
    if given.out is not None:
        given.out.write_bytes(files[-1][1])
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--mmproj", str(projector_file(Path(folder), chosen.projector)), "--log-level", "error")
        log = Path(folder, "perf")
        with real_daemon(*flags, "--perf-log", str(log)) as daemon:
            with daemon.wire() as alone:
                for _ in range(ROUNDS_ALONE):
                    alone.ask(keep_alive=True, **Canary.FIELDS)
            counts, problems = run(daemon, chosen.part, files)
        print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
        print_gaps(log.read_bytes())
    print("\n".join(problems) or "no problem")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
