"""Mutates files of pictures and sends each of them to a real daemon, next to a stream of text.

    python -m tests.fuzz.mutate_pictures                       2,000 files, seed 0
    python -m tests.fuzz.mutate_pictures --count 20000 --seed 7
    python -m tests.fuzz.mutate_pictures --replay 1234 --out /tmp/bad.png

The files are PNG, JPEG, GIF, BMP and WebP, with one to eight mutations each; after them come files that are small and
claim to be large.  Every file has one of these outcomes:

    encoded             the model answered
    refused             the request got an error with the reason
    killed the encoder  likewise, and the process that decodes pictures died or took too long
    wrong               anything else

Afterwards the daemon and its engine are the same processes as before, a stream of somebody else was never harmed, no
sequence or cell is in use, and the memory is back.  The exit code is 1 if one of that does not hold, or a file is wrong.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from PIL import Image

from tests.support.pictures import bombs, drawn, gif, png
from tests.support.projectors import projector_file
from tests.support.real_daemon import ROOT, Canary, Daemon, missing, real_daemon

PHOTO: Final = ROOT / "build" / "llama.cpp" / "tools" / "mtmd" / "test-1.jpeg"
CLIENTS: Final = 4
MAX_GROWTH_BYTES: Final = 128 << 20
"""By how much the processes of the daemon, the encoder's aside, may grow."""
MAX_ENCODER_BYTES: Final = 1 << 30
INTERESTING: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
OUTCOMES: Final = ("encoded", "refused", "killed the encoder", "wrong")


def originals() -> list[bytes]:
    """Intact files of every kind that the decoder knows, and of one that it does not."""
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


def outcome_of(daemon: Daemon, data: bytes) -> tuple[str, str]:
    """How a file ended, and what the daemon said."""
    parts = [{"type": "image", "data": data}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": parts}]
    answer = daemon.ask(messages=messages, max_tokens=1, temperature=0, stream=False, encoding="cbor")
    if answer.code is None:
        return ("encoded" if answer.reason in ("stop", "length") else "wrong"), str(answer.last)[:200]
    message = str(answer.last["message"])
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


def run(daemon: Daemon, files: Sequence[tuple[str, bytes]]) -> tuple[Counter[str], list[str]]:
    """Send files, some at a time.  Returns how often each outcome came, and what must not have happened."""
    before, pids, problems = growing_bytes(daemon), engine_pids(daemon), []
    counts: Counter[str] = Counter()
    with Canary(daemon) as canary, ThreadPoolExecutor(CLIENTS) as clients:
        outcomes = clients.map(lambda each: (each[0], *outcome_of(daemon, each[1])), files)
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


def named(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """The files of a run, with names."""
    files = originals()
    for number in range(count):
        yield str(number), mutated(files, seed, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int, help="number of the only file to send")
    parser.add_argument("--out", type=Path, help="where to write the file of --replay")
    given = parser.parse_args()
    if (reason := missing()) is not None:
        print(reason)
        return 1
    files = [*named(given.seed, given.count), *bombs().items()]
    if given.replay is not None:
        files = [(str(given.replay), mutated(originals(), given.seed, given.replay))]
        if given.out is not None:
            given.out.write_bytes(files[0][1])
    with tempfile.TemporaryDirectory() as folder:
        projector = projector_file(Path(folder))
        with real_daemon("--mmproj", str(projector), "--log-level", "error") as daemon:
            counts, problems = run(daemon, files)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    print("\n".join(problems) or "no problem")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
