"""Sends generated constraints to a real daemon, and holds every complete answer to its constraint.

    python -m tests.fuzz.schemas                            1,000 cases, the embedded model
    python -m tests.fuzz.schemas --count 5000 --seed 7 --model 7b.gguf
    python -m tests.fuzz.schemas --only 123 --seed 0        one case, with its answer

Requirements:

- Every answer that says to be complete follows its constraint: JSON that ``jsonschema`` accepts, formats included; a
  match of Python's ``re``; one of the choices.
- Every other answer says that it is not complete.
- Every refusal is ``E_CONSTRAINT_INVALID`` with the name of the field.

Exit code 1 if an answer violates a requirement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import attrs

from tests.support.real_daemon import Answer, Daemon, missing, real_daemon
from tests.support.schemas import Case, make_case

MAX_TOKENS = 300
THREADS = 6


@attrs.define
class Outcome:
    """What a case led to: ``complete``, ``incomplete``, ``refused`` or ``wrong``."""

    kind: str
    text: str
    complaint: str = ""
    tokens: int = 0


def fields_of(case: Case, seed: int) -> dict[str, Any]:
    """The request of a case: every other one is sampled."""
    request: dict[str, Any] = {"prompt": "Make a record: ", "max_tokens": MAX_TOKENS, "constraint": case.constraint}
    if Random(seed).random() < 0.5:
        request |= {"temperature": 1.0, "seed": seed}
    return request


def judge(case: Case, answer: Answer) -> Outcome:
    """What ``answer`` is worth."""
    end, text = answer.last, answer.text
    if end["event"] == "error":
        right = end["code"] == "E_CONSTRAINT_INVALID" and "constraint." in end["message"]
        return Outcome("refused" if right else "wrong", "", f"{end['code']} {end['message']}")
    tokens = end["usage"]["completion_tokens"]
    complete = end.get("constraint_complete")
    wrong = case.check(text)
    if complete:
        return Outcome("complete" if wrong is None else "wrong", text, wrong or "", tokens)
    if complete is None or end["reason"] != "length":
        return Outcome("wrong", text, f"not complete, but its reason is {end['reason']}", tokens)
    return Outcome("incomplete", text, "", tokens)


def run_cases(daemon: Daemon, seeds: Sequence[int], threads: int = THREADS) -> dict[int, Outcome]:
    """Send the cases of ``seeds``, several at a time."""
    left = list(reversed(seeds))
    outcomes: dict[int, Outcome] = {}

    def work() -> None:
        with daemon.wire(timeout_s=120) as wire:
            while True:
                try:
                    seed = left.pop()
                except IndexError:
                    return
                case = make_case(seed)
                try:
                    outcomes[seed] = judge(case, wire.ask(keep_alive=True, **fields_of(case, seed)))
                except Exception as error:  # noqa: BLE001  (a hang or a lost connection is what is looked for)
                    outcomes[seed] = Outcome("wrong", "", f"{type(error).__name__}: {error}")
                    return

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outcomes


@contextlib.contextmanager
def _daemon(model: str | None) -> Iterator[Daemon]:
    with real_daemon("--parallel", "8", *(["--model", model] if model else [])) as daemon:
        yield daemon


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--only", type=int, help="seed of the only case")
    parser.add_argument("--model", help="GGUF file; the embedded model by default")
    chosen = parser.parse_args()
    if (reason := missing()) is not None:
        print(reason)
        return 2
    seeds = [chosen.only] if chosen.only is not None else range(chosen.seed, chosen.seed + chosen.count)
    with _daemon(chosen.model) as daemon:
        began = time.monotonic()
        outcomes = run_cases(daemon, seeds)
        took = time.monotonic() - began
    for seed, outcome in sorted(outcomes.items()):
        if outcome.kind == "wrong" or chosen.only is not None:
            print(seed, outcome.kind, outcome.complaint, json.dumps(make_case(seed).constraint, ensure_ascii=False))
            print("    ", outcome.text)
    reasons = Counter(outcome.complaint for outcome in outcomes.values() if outcome.kind == "refused")
    for reason, n in reasons.most_common():
        print(f"refused {n}: {reason}")
    kinds = Counter(outcome.kind for outcome in outcomes.values())
    n_tokens = sum(outcome.tokens for outcome in outcomes.values())
    print(", ".join([f"{kind} {n}" for kind, n in kinds.most_common()]))
    print(
        f"{len(outcomes)} of {len(seeds)} cases in {took:.1f} s: {len(outcomes) / took:.1f}/s, {n_tokens / took:.0f} tokens/s"
    )
    return int(kinds["wrong"] > 0 or len(outcomes) < len(seeds))


if __name__ == "__main__":
    sys.exit(main())
