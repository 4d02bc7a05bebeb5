"""Constrained output with the real library: generated constraints, and equivalences."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fuzz.hostile_constraints import attack
from tests.fuzz.schemas import run_cases
from tests.support import hostile_constraints
from tests.support.profile import amount, sampled, thorough
from tests.support.real_daemon import Answer, Canary, Daemon, real_daemon
from tests.support.schemas import make_case

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "größe": {"type": "integer", "minimum": 50, "maximum": 250},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "日本"]}, "minItems": 2, "maxItems": 6},
    },
    "required": ["name", "größe", "tags"],
    "additionalProperties": False,
}
DIGITS = {"regex": "([0-9]{3}, ){12}[0-9]{3}"}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json_schema": PERSON},
    DIGITS,
    {"choice": ["Lima is in Peru.", "Lima is in Japan.", "🦊"]},
    {"gbnf": 'root ::= item ("; " item){4}\nitem ::= [a-z] [a-z]? [a-z]? " = " [0-9]\n'},
    {"lark": 'start: "<" /[a-z]{2,9}/ ">" inner+\ninner: /[A-Z]/ | "(" inner ")"\n'},
    {"json_schema": {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 3}},
)
HOSTILE = [
    *("multipleOf", "many alternative objects", "a required circle", "counting from behind"),
    *("infinite ambiguity of empty rules", "many rules with one beginning", "an ambiguous expression"),
    *("64 KiB of different alternatives", "many patterns"),
][: amount(quick=8, thorough=9)]
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
SAMPLED = {"temperature": 1.0, "seed": 11}


@pytest.fixture(scope="module")
def reproducible(library: None) -> Iterator[Daemon]:
    """Sampled texts follow the smallest difference of the logits, which on some CPUs depends on the rows of a call."""
    with real_daemon("--parallel", "32", "--ctx", "131072", "--reproducible", "--devices", "none") as found:
        yield found


def together(daemon: Daemon, requests: list[dict[str, Any]]) -> list[Answer]:
    """All answers; the requests run at the same time."""
    answers: dict[int, Answer] = {}

    def one(n: int) -> None:
        answers[n] = daemon.ask(**requests[n])

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[n] for n in range(len(requests))]


def outcome(answer: Answer) -> tuple[Any, ...]:
    return answer.ids, answer.text, answer.reason, answer.last.get("constraint_complete")


@pytest.mark.thorough
def test_generated_constraints_are_followed_or_refused(daemon: Daemon) -> None:
    """``python -m tests.fuzz.schemas`` sends more of them."""
    n = amount(quick=20, thorough=60)
    outcomes = run_cases(daemon, range(n))
    wrong = {make_case(seed).name: outcome for seed, outcome in outcomes.items() if outcome.kind == "wrong"}
    assert not wrong
    kinds = Counter(outcome.kind for outcome in outcomes.values())
    assert kinds["complete"] >= 0.6 * n
    assert kinds.total() == n


@pytest.mark.parametrize("fields", [thorough({}), SAMPLED], ids=["greedy", "sampled"])
def test_among_others_as_alone(request: pytest.FixtureRequest, fields: dict[str, Any]) -> None:
    daemon: Daemon = request.getfixturevalue("reproducible" if fields else "daemon")
    requests = [{"prompt": f"Item {n}: ", "constraint": each} for n, each in enumerate(CONSTRAINTS)]
    requests += [{"prompt": f"Once upon a time {n}"} for n in range(4)] + [{"messages": STORY}]
    requests = [{"max_tokens": 80, **fields, **each} for each in requests]
    alone = [outcome(daemon.ask(**each, cache_prompt=False)) for each in requests]
    assert [outcome(answer) for answer in together(daemon, requests * 2)] == alone * 2


@pytest.mark.parametrize("constraint", sampled(CONSTRAINTS, 3), ids=lambda each: next(iter(each)))
def test_the_encoding_and_draft_tokens_do_not_change_an_answer(daemon: Daemon, constraint: dict[str, Any]) -> None:
    fields = {"prompt": "123, 123, 123, 123, <ab>ABAB [{", "max_tokens": 80, "constraint": constraint}
    plain = outcome(daemon.ask(**fields, speculate=False))
    assert outcome(daemon.ask(**fields, speculate=True)) == plain
    assert outcome(daemon.ask(**fields, encoding="cbor")) == plain
    whole = daemon.ask(**fields, stream=False)
    assert (whole.text, *outcome(whole)[2:]) == plain[1:]


def test_each_of_several_answers_is_that_of_its_seed(reproducible: Daemon) -> None:
    daemon = reproducible
    fields: dict[str, Any] = {"prompt": "A person: ", "max_tokens": 100, "constraint": {"json_schema": PERSON}}
    with daemon.wire() as wire:
        wire.send(id="r", n=3, **SAMPLED | fields)
        events = wire.rest()
    texts = ["".join([event.get("text") or "" for event in events if event.get("index") == n]) for n in range(3)]
    ends = {event["index"]: event for event in events if event["event"] == "eos"}
    for n, text in enumerate(texts):
        assert text == daemon.ask(**fields, temperature=1.0, seed=11 + n).text
        assert ends[n]["constraint_complete"] is (json.loads(text) is not None)
    assert len(set(texts)) > 1


def test_a_model_invents_no_keys(daemon: Daemon) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name"],
    }
    for temperature, seed in ((1, 5), (2, 5), (4, 0), (4, 5)):
        answer = daemon.ask(
            messages=STORY, max_tokens=300, temperature=temperature, seed=seed, constraint={"json_schema": schema}
        )
        assert {*json.loads(answer.text)} <= {"name", "age"}
    opened = {"json_schema": {**schema, "required": ["name", "extra"], "additionalProperties": {"type": "null"}}}
    answer = daemon.ask(messages=STORY, max_tokens=300, temperature=1, seed=0, constraint=opened)
    assert "extra" in json.loads(answer.text)


def test_only_an_answer_that_ends_by_itself_is_complete(daemon: Daemon) -> None:
    for max_tokens, reason, complete in ((1, "length", False), (2, "stop", True)):
        answer = daemon.ask(prompt="a", max_tokens=max_tokens, constraint={"choice": ["a"]})
        assert (answer.text, answer.reason, answer.last["constraint_complete"]) == ("a", reason, complete)


def test_a_constraint_that_allows_everything_changes_nothing(daemon: Daemon) -> None:
    plain = daemon.ask(messages=STORY, max_tokens=400)
    assert plain.reason == "stop"
    answer = daemon.ask(messages=STORY, max_tokens=400, constraint={"regex": r"(.|\n)*"})
    assert outcome(answer) == (plain.ids, plain.text, "stop", True)


def test_logprobs_are_those_of_the_model(daemon: Daemon) -> None:
    plain = daemon.ask(messages=STORY, max_tokens=30, logprobs=3)
    answer = daemon.ask(messages=STORY, max_tokens=30, logprobs=3, constraint={"choice": [plain.text, "Nothing."]})
    ids = [event["token_id"] for event in plain.events if "logprob" in event]
    values, constrained = (
        [(event["token_id"], event["logprob"], event["top_logprobs"][0]["logprob"]) for event in each.events if "logprob" in event]
        for each in (plain, answer)
    )  # fmt: skip
    same = next((n for n, (a, b) in enumerate(zip(values, constrained, strict=False)) if a[0] != b[0]), len(ids))
    assert same > 10
    for mine, theirs in zip(constrained[:same], values[:same], strict=True):
        assert mine[1:] == pytest.approx(theirs[1:], abs=1e-3)


def test_biases_and_penalties_choose_among_what_is_allowed(daemon: Daemon) -> None:
    fields: dict[str, Any] = {
        "prompt": "0, 0, 0, 0, 0, 0, 0, 0, ",
        "max_tokens": 60,
        "constraint": {"regex": "([0-9], ){12}"},
    }
    plain = daemon.ask(**fields)
    first = plain.ids[0]
    banned = daemon.ask(**fields, logit_bias={str(first): -100})
    assert first not in banned.ids
    penalised = daemon.ask(**fields, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5)
    for answer in (plain, banned, penalised):
        assert re.fullmatch("([0-9], ){12}", answer.text)
        assert answer.last["constraint_complete"] is True
    assert len(set(penalised.text)) > len(set(plain.text))
    favoured = daemon.ask(**fields, logit_bias={str(first): 50.0}, **SAMPLED)
    assert favoured.ids.count(first) == 12 or first not in plain.ids


def test_hostile_constraints_harm_no_neighbour(daemon: Daemon) -> None:
    """``python -m tests.fuzz.hostile_constraints`` sends all of them, and measures."""
    chosen = [each for each in hostile_constraints.ALL if each.name.split(": ")[1] in HOSTILE]
    assert len(chosen) == len(HOSTILE)
    with Canary(daemon):
        ends = attack(daemon, chosen, at_once=3)
    ways = Counter(end.split(":")[0] for end, _ in ends.values())
    assert ways.keys() == {"answered", "E_CONSTRAINT_INVALID"}
    assert ways.total() == len(HOSTILE)


@pytest.mark.thorough
def test_after_a_crash_of_the_engine_as_without(library: None) -> None:
    with real_daemon("--parallel", "4") as daemon:
        requests: list[dict[str, Any]] = [
            {"prompt": "Numbers: ", "max_tokens": 400, "constraint": {"regex": "([0-9]{3}, ){60}[0-9]{3}"}, **SAMPLED},
            {"prompt": "People: ", "max_tokens": 400, "constraint": CONSTRAINTS[-1]},
        ]
        expected = [outcome(daemon.ask(**each)) for each in requests]
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.extend(together(daemon, requests)))
        before = daemon.metrics()
        asking.start()
        produced = before["tokens_total"] + 60
        daemon.wait_until(lambda now: now["tokens_total"] > produced, "60 tokens of the answers")
        psutil.Process(before["engine"]["pid"]).kill()
        asking.join()
        assert daemon.settled()["engine"]["restarts_total"] == 1
        [line] = daemon.logged("the engine runs again")
        assert (line["restarts"], line["after_s"] > 0) == (1, True)
        assert [outcome(answer) for answer in answers] == expected


def test_a_turn_behind_a_state_from_disk(library: None, tmp_path: Path) -> None:
    flags = ("--parallel", "2", "--ctx", "8192", "--state-dir", str(tmp_path / "state"), "--offload-after-s", "1000000")
    turns = [{"json_schema": PERSON}, DIGITS, {"choice": ["yes", "no"]}]

    def say(daemon: Daemon, session: str, turn: int) -> tuple[Any, ...]:
        message = [{"role": "user", "content": f"Question {turn}: who is Mia?"}]
        return outcome(daemon.ask(messages=message, session_id=session, max_tokens=80, constraint=turns[turn]))

    with real_daemon(*flags) as daemon:
        expected = [say(daemon, "whole", turn) for turn in range(3)]
        assert say(daemon, "restored", 0) == expected[0]
    with real_daemon(*flags) as daemon:
        assert [say(daemon, "restored", turn) for turn in (1, 2)] == expected[1:]
        assert daemon.settled()["kv_offload"]["loaded_total"] >= 1
