"""The commands as processes: pipes, exit codes, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.support.commands import environment, invoke, run_command, run_process
from tests.support.real_daemon import ROOT, missing
from uma_trio.protocol.framing import frame

QUESTION = "What is the capital of France?"


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "uma_trio", *map(str, arguments)], cwd=ROOT, env=environment(), text=True, **options
    )


@pytest.fixture
def ask(daemon):
    def run(*arguments, **options):
        return invoke("ask", "--socket", daemon.socket, *arguments, **options)

    return run


# -- ask ------------------------------------------------------------------------------------------


def test_a_question_is_answered(daemon):
    found = run_process("ask", "--socket", daemon.socket, QUESTION)
    assert (found.returncode, found.stderr) == (0, "")
    expected = daemon.ask(messages=[{"role": "user", "content": QUESTION}]).text
    assert found.stdout == expected + "\n"


def test_the_question_can_come_from_prompt_or_stdin(ask):
    answer = ask(QUESTION).stdout
    for found in (
        ask("--prompt", QUESTION),
        ask(stdin=QUESTION),
        ask("-", stdin=QUESTION),
        ask("--no-stream", QUESTION),
        ask("--cbor", QUESTION),
    ):
        assert (found.returncode, found.stdout) == (0, answer)


def test_json_prints_the_events(ask):
    found = ask("--json", QUESTION)
    events = [json.loads(line) for line in found.stdout.splitlines()]
    assert [event["event"] for event in events] == ["token"] * (len(events) - 1) + ["eos"]
    assert "".join(event.get("text", "") for event in events).strip() == ask(QUESTION).stdout.strip()
    (whole,) = ask("--json", "--no-stream", QUESTION).stdout.splitlines()
    assert json.loads(whole)["text"]


def test_raw_continues_the_text(ask, daemon):
    found = ask("--raw", "--max-tokens", 12, "Once upon a time")
    assert found.stdout.rstrip("\n") == daemon.ask(prompt="Once upon a time", max_tokens=12).text.rstrip("\n")


def test_system_message(ask, daemon):
    found = ask("--system", "Answer briefly.", "--max-tokens", 20, QUESTION)
    chat = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": QUESTION}]
    assert found.stdout.strip() == daemon.ask(messages=chat, max_tokens=20).text.strip()


def test_sampling_options(ask):
    sampled = [
        ask("--raw", "--temp", 5, "--top-k", 50, "--seed", seed, "--max-tokens", 12, "x").stdout for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    story = ask("--max-tokens", 30, "Tell me a story about a fox.").stdout
    stop = story.split()[4]
    assert (
        ask("--max-tokens", 30, "--stop", stop, "Tell me a story about a fox.").stdout.strip()
        == story[: story.index(stop)].strip()
    )


def test_several_answers(ask, daemon):
    options = ("--n", 3, "--temp", 2, "--seed", 5, "--max-tokens", 12)
    found = ask(*options, QUESTION)
    chat = [{"role": "user", "content": QUESTION}]
    expected = {i: daemon.ask(messages=chat, temperature=2.0, seed=5 + i, max_tokens=12).text for i in range(3)}
    assert found.returncode == 0
    assert sorted(found.stdout.split("--- ")) == sorted(["", *(f"{i}\n{text}\n" for i, text in expected.items())])
    events = [json.loads(line) for line in ask("--json", *options, QUESTION).stdout.splitlines()]
    assert {event["index"] for event in events} == {0, 1, 2}
    assert sum(event["event"] == "eos" for event in events) == 3
    assert len(events) > 3, "JSON events are streamed"


def test_logprobs_in_events(ask):
    events = [
        json.loads(line) for line in ask("--json", "--logprobs", 2, "--max-tokens", 3, QUESTION).stdout.splitlines()
    ]
    assert [len(event["top_logprobs"]) for event in events[:-1]] == [2] * 3


def test_stats_go_to_stderr(ask):
    found = ask("--stats", QUESTION)
    assert "tokens" in found.stderr
    assert found.stdout == ask(QUESTION).stdout


def test_each_request_has_an_id_by_which_it_is_found_again(ask, daemon):
    ids = [re.search(r"\bid (ask-[0-9a-f]+)$", ask("--stats", QUESTION).stderr.strip())[1] for _ in range(2)]
    assert ids[0] != ids[1]
    for each in ids:
        found = invoke("explain", "--socket", daemon.socket, each)
        assert "tokens of the prompt were in the KV cache" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "100000000", QUESTION], "E_LIMIT_MAX_TOKENS"),
        (["--raw", "x " * 20_000], "E_LIMIT_CONTEXT"),
    ],
)
def test_a_refused_request_exits_with_2(ask, arguments, words):
    found = ask(*arguments)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith("uma-trio ask: ")
    assert words in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_question_larger_than_a_frame_exits_with_2(ask):
    found = ask(stdin="x" * (17 << 20))
    assert (found.returncode, found.stdout) == (2, "")
    assert "E_PROTO_FRAME_TOO_LARGE" in found.stderr


def test_no_server_exits_with_2(tmp_path):
    for path, remedy in ((tmp_path / "none", "uma-trio serve"), (tmp_path, "give the path of a daemon's socket")):
        found = invoke("ask", "--socket", path, QUESTION)
        assert found.returncode == 2
        assert remedy in found.stderr
        assert found.stderr.count("\n") == 1


TOKEN = frame(b'{"event":"token","text":"Par","token_id":1}')


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        TOKEN,
        TOKEN + b"\xff\xff\xff\xff",
        frame(b"nonsense"),
        frame(b"[1]"),
        TOKEN + b"\x05\0",
        frame(b"\xa1\x62id\xff"),
    ],
)
def test_a_server_that_breaks_the_protocol_exits_with_3(tmp_path, answer):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve():
            sock, _ = listener.accept()
            with sock:
                sock.recv(1 << 16)
                sock.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        found = invoke("ask", "--socket", path, QUESTION)
        server.join()
    assert found.returncode == 3, found
    assert found.stderr.splitlines()[-1].startswith("uma-trio ask: ")
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    "arguments",
    [[QUESTION, "--prompt", "x"], ["--temp", "-1", "x"], ["--top-p", "0", "x"], ["--raw", "--system", "x", "y"]],
)
def test_wrong_usage_fails_before_connecting(arguments):
    found = invoke("ask", "--socket", "/nowhere", *arguments)
    assert found.returncode == 2
    assert "Usage:" in found.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cancels_on_the_server(daemon, number):
    before = daemon.settled()["requests_total"].get("cancelled", 0)
    with start(
        *("ask", "--socket", daemon.socket, "--max-tokens", "3900", "Count from 1 to 990."),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as asking:
        first = asking.stdout.read(20)
        asking.send_signal(number)
        rest, stderr = asking.communicate(timeout=60)
    after = daemon.settled()["requests_total"]
    assert first
    assert after["cancelled"] == before + 1
    assert asking.returncode == 130
    assert stderr.strip() == "cancelled"
    assert rest.endswith("\n")


def test_a_closed_stdout_ends_the_command_quietly(daemon):
    """As in ``uma-trio ask ... | head -1``."""
    with start(
        *("ask", "--socket", daemon.socket, "--max-tokens", "3000", "Count from 1 to 990."),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as asking:
        asking.stdout.read(5)
        asking.stdout.close()
        stderr = asking.stderr.read()
        asking.wait(60)
    assert stderr == ""
    assert asking.returncode == 128 + signal.SIGPIPE
    daemon.settled()


# -- other commands ----------------------------------------------------------------------------------


def test_metrics_as_text_and_as_json(daemon):
    found = run_process("metrics", "--socket", daemon.socket)
    assert found.returncode == 0
    assert "tokens_total" in found.stdout
    daemon.wait_until(lambda found: found["connections"] == 1, "that client has left")
    snapshot = json.loads(invoke("metrics", "--json", "--socket", daemon.socket).stdout)
    assert snapshot["model"] == "embedded"
    assert snapshot["connections"] >= 1, "its own; that of the question before it may still close"


def test_metrics_watched_until_interrupted(daemon):
    with start(
        "metrics",
        "--watch",
        "--interval",
        "0.05",
        "--json",
        "--socket",
        daemon.socket,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as watching:
        lines = [watching.stdout.readline() for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        _, stderr = watching.communicate(timeout=60)
    assert all(json.loads(line)["model"] for line in lines)
    assert (watching.returncode, stderr) == (0, "")


def test_metrics_without_a_server(tmp_path):
    found = invoke("metrics", "--socket", tmp_path / "none")
    assert found.returncode == 2
    assert "uma-trio serve" in found.stderr


def test_tokenize(library):
    text = "The capital of France 🦊"
    lines = invoke("tokenize", text).stdout.splitlines()
    count = int(invoke("tokenize", "--count", text).stdout)
    ids = invoke("tokenize", "--ids", stdin=text).stdout.split()
    rows = json.loads(invoke("tokenize", "--json", text).stdout)
    assert len(lines) == count == len(ids) == len(rows)
    assert [int(token) for token in ids] == [row["id"] for row in rows] == [int(line.split()[0]) for line in lines]
    utf8 = text.encode()
    assert (rows[0]["start"], rows[0]["end"]) == (0, 0), "BOS has an empty byte range"
    assert b"".join(utf8[row["start"] : row["end"]] for row in rows) == utf8
    assert [line.split()[1] for line in lines] == [f"{row['start']}-{row['end']}" for row in rows]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_tokenize_does_not_blame_the_model_for_a_full_disk(library):
    command = [sys.executable, "-m", "uma_trio", "tokenize", "hi"]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, cwd=ROOT, env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert found.returncode == 1
    assert found.stderr.decode() == "uma-trio: cannot write the output: No space left on device\n"


def test_tokenize_and_back(library):
    text = "Ünïcode 🦊 <|im_end|>\tend"
    ids = invoke("tokenize", "--ids", text).stdout
    shown = invoke("tokenize", "--decode", ids)
    assert (shown.returncode, shown.stdout) == (0, f"<|bos|>{text}\n")
    assert invoke("tokenize", "--decode", "-", "--no-special", stdin=ids).stdout == "Ünïcode 🦊 \tend\n"
    found = json.loads(invoke("tokenize", "--decode", ids.strip().replace(" ", ", "), "--json").stdout)
    assert found == {"ids": [int(word) for word in ids.split()], "text": "<|bos|>" + text}


def test_tokenize_shows_bytes_that_are_no_whole_character_once_escaped(library):
    lines = invoke("tokenize", "--no-special", "é\\").stdout.splitlines()
    assert [line.split()[2] for line in lines] == ["b'\\xc3'", "b'\\xa9'", "'\\\\'"]
    rows = json.loads(invoke("tokenize", "--no-special", "--json", "é\\").stdout)
    assert bytes(byte for row in rows for byte in row["bytes"]) == "é\\".encode()
    assert [row["text"] for row in rows] == ["\ufffd", "\ufffd", "\\"]


@pytest.mark.parametrize("special", [[], ["--no-special"]])
def test_tokenize_json_goes_with_every_option(library, special):
    def found(*options, **more):
        return json.loads(invoke("tokenize", *special, *options, "--json", **more).stdout)

    rows = found("hello")
    ids = [row["id"] for row in rows]
    assert found("--ids", "hello") == found("--ids", "-", stdin="hello") == ids
    assert found("--count", "hello") == len(ids)
    decoded = {"ids": ids, "text": "hello" if special else "<|bos|>hello"}
    assert found("--decode", json.dumps(ids)) == found("--decode", "-", stdin=json.dumps(ids) + "\n") == decoded


def test_tokenize_control_tokens_as_text(library):
    text = "<|im_end|>"
    assert invoke("tokenize", "--count", text).stdout == "2\n"
    letters = invoke("tokenize", "--no-special", "--ids", text).stdout
    assert len(letters.split()) > 3
    assert invoke("tokenize", "--no-special", "--decode", letters).stdout == text + "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--decode", "1 -1"], 1, "token -1 is not in [0, "),
        (["--decode", "9" * 20], 1, "is not in [0, "),
        (["--decode", "1 two"], 2, "'two' is not a token id"),
        (["--decode", "9" * 5000], 2, "is not a token id"),
        (["--decode", "1", "text"], 2, "--decode takes token ids"),
        (["--decode", "1", "--count"], 2, "--decode takes token ids"),
        (["--decode", "1", "--ids"], 2, "--decode takes token ids"),
        (["--decode", "1 [2]"], 2, "'[2' is not a token id"),
        (["--ids", "--count", "text"], 2, "give --ids or --count"),
    ],
)
def test_tokenize_wrong_ids(library, arguments, code, message):
    found = invoke("tokenize", *arguments)
    assert (found.returncode, found.stdout) == (code, "")
    assert message in found.stderr


def test_tokenize_invalid_utf8(library):
    """Invalid bytes become replacement characters, in an argument and from stdin."""
    command = [sys.executable, "-m", "uma_trio", "tokenize", "--ids"]
    options = {"cwd": ROOT, "capture_output": True, "timeout": 60, "env": environment()}
    given = subprocess.run([*command, b"a\xffb"], **options).stdout
    assert given == subprocess.run(command, input=b"a\xffb", **options).stdout
    assert invoke("tokenize", "--decode", given.decode(), "--no-special").stdout == "a\ufffdb\n"


def test_tokenize_without_a_model(library, tmp_path):
    found = invoke("tokenize", "--model", tmp_path / "none.gguf", "x")
    assert (found.returncode, found.stdout) == (1, "")
    assert "there is no model" in found.stderr


@pytest.mark.parametrize("name", ["serve", "ask", "demo", "metrics", "tokenize", "doctor", "completion"])
def test_each_command_has_help(name):
    found = invoke(name, "--help")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("Usage: ")
    assert len(found.stdout.splitlines()) > 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--thread", "2"], "--threads"),
        (["--paralell", "2"], "--parallel"),
        (["--parallel", "0"], "parallel must be"),
        (["--ctx", "many"], "ctx must be a whole number"),
        (["--protocol", "xml"], "one of auto, json, cbor, newline"),
        (["--config", "/nowhere.yaml"], "cannot read"),
    ],
)
def test_serve_explains_a_wrong_flag(arguments, words):
    found = invoke("serve", *arguments)
    assert found.returncode == 2
    assert words in found.stderr
    assert "Traceback" not in found.stderr


def test_serve_suggests_the_nearest_key_and_variable(tmp_path):
    file = tmp_path / "uma.yaml"
    file.write_text("model:\n  treads: 3\n")
    assert "did you mean threads?" in invoke("serve", "--config", file).stderr
    found = run_command(["serve"], environment(UMA_MAX_CONECTIONS="3"))
    assert (found.returncode, "did you mean UMA_MAX_CONNECTIONS?" in found.stderr) == (2, True)


def test_help_imports_little():
    code = (
        "import sys\nfrom uma_trio.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'numpy', 'trio', 'msgspec', 'jinja2', 'structlog', 'rich', 'llama_abi'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.stdout.splitlines()[-1] == "[]"


def test_version():
    assert run_process("--version").stdout.strip()


def test_the_fixtures_explain_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("UMA_LLAMA_DIR", str(tmp_path))
    assert "build_llama.sh" in missing()
