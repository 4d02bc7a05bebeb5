"""The command line: every setting has a flag, and every command and option has a help text."""

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.support.cases import all_cases
from uma_trio import config
from uma_trio.cli import COMMANDS, OF_OTHER_PROGRAMS, main
from uma_trio.cli.completion import LINE_VARIABLE, Lines
from uma_trio.cli.serve import ALIASES, OF_OTHER_SERVERS, USUAL
from uma_trio.cli.serve import command as serve

INSTALLED = [name for name in COMMANDS if importlib.util.find_spec(f"uma_trio.cli.{name}") is not None]


def run(*args: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(main, args, env=env, prog_name="uma-trio")
    return result.exit_code, result.output


def flags_of(command: click.Command) -> set[str]:
    shown = [option for option in command.params if not (isinstance(option, click.Option) and option.hidden)]
    return {flag for option in shown for flag in (*option.opts, *option.secondary_opts) if flag.startswith("-")}


def test_help_lists_every_command_without_importing_it() -> None:
    code, shown = run("--help")
    assert code == 0
    for name, line in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line[:20])}", shown, re.MULTILINE)
    assert run("-h") == (code, shown)


@all_cases("name", INSTALLED)
def test_each_command_has_a_help_text(name: str) -> None:
    command = importlib.import_module(f"uma_trio.cli.{name}").command
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, f"{name} {option.opts}"
            assert option.help.rstrip().endswith((".", "]")), f"{name} {option.opts}: {option.help}"
    code, shown = run(name, "--help")
    assert code == 0
    assert flags_of(command) <= set(re.findall(r"--?[a-z][a-z0-9-]*", shown))
    if isinstance(command, click.Group):
        cut = [line for line in shown.partition("\nCommands:\n")[2].splitlines() if line.endswith("...")]
        assert cut == [], "the first sentence of a command's help is too long for the list of its group"


@all_cases(
    ("args", "message"),
    [
        (["serv"], "there is no command serv; did you mean serve?"),
        (["server", "--model", "x"], "there is no command server; did you mean serve?"),
        (["sesions", "list"], "did you mean sessions?"),
        (["sessions", "lst"], "there is no command lst; did you mean list?"),
        (["perf", "reprot"], "there is no command reprot; did you mean report?"),
        (["generate", "x"], "there is no command generate; use uma-trio ask, or uma-trio chat"),
        (["top"], "there is no command top; use uma-trio metrics --watch"),
        (["version"], "there is no command version; use uma-trio --version"),
        (["xyzzy"], "there is no command xyzzy; the commands are run, serve, ask,"),
        (["--verson"], "--version"),
        *[([name, "--hlep"], "--help") for name in INSTALLED],
    ],
)
def test_a_misspelt_command_or_flag_gets_a_suggestion(args: list[str], message: str) -> None:
    code, shown = run(*args)
    assert code == 2
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    "args",
    [
        ["-m", "a.gguf", "-c", "32k", "-ngl", "99", "-np", "4", "-t", "3"],
        ["-ma.gguf", "-c32k", "-ngl=99", "-np=4", "-t3"],
        ["--model", "a.gguf", "--ctx", "32k", "--gpu-layers", "99", "--parallel", "4", "--threads", "3"],
    ],
)
def test_short_flags_are_those_of_llama_cpp(args: list[str], tmp_path: Path) -> None:
    code, shown = run("serve", "--print-config", *args)
    assert code == 0, shown
    file = tmp_path / "uma.yaml"
    file.write_text(shown)
    model = config.load(file).model
    assert (model.model, model.ctx, model.gpu_layers, model.parallel, model.threads) == (
        "a.gguf",
        32768,
        99,
        4,
        3,
    )


def test_every_setting_is_a_flag_of_serve() -> None:
    flags = flags_of(serve)
    for setting in config.settings():
        assert setting.flag in flags
        if setting.type is bool:
            assert f"--no-{setting.flag[2:]}" in flags
    assert {
        "--model",
        "--socket",
        "--protocol",
        "--threads",
        "--ctx",
        "--parallel",
        "--config",
        "--print-config",
    } <= flags


def test_the_help_of_serve_begins_with_the_usual_flags() -> None:
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    first, rest = shown.partition("Usual options:")[2].split("\nOptions:")
    assert all(
        f"{known.flag} " in first and f" {known.flag} " not in rest
        for known in config.settings()
        if known.name in USUAL
    )


@all_cases(
    ("args", "hint"),
    [
        (("--port", "8000"), "serve has no --port; write --http 8000"),
        (("--port=8000", "--ctx", "5"), "serve has no --port; write --http 8000"),
        (("--host", "0.0.0.0", "--port", "8000"), "serve has no --host; write --http 0.0.0.0:8000"),
        (("--host", "0.0.0.0"), "serve has no --host; write --http 0.0.0.0:PORT"),
        (("--api-key", "x"), "write uma-trio keys create NAME"),
        (("--max-model-len", "8192"), "write --ctx N"),
        (("-m", "a.gguf", "-ctk", "q8_0"), "serve has no -ctk; write --type-k TYPE"),
        (("-fa", "on"), "serve has no -fa; write --flash-attn on, off or auto"),
        (("-hf", "Qwen/Qwen3-0.6B-GGUF"), "serve has no -hf; write --model NAME, such as Qwen/Qwen3-0.6B-GGUF:Q8_0"),
    ],
)
def test_flags_of_other_servers_have_a_hint(args: tuple[str, ...], hint: str) -> None:
    code, shown = run("serve", *args)
    assert code == 2
    assert hint in " ".join(shown.split())


@all_cases(("alias", "flag"), ALIASES.items())
def test_an_alias_of_a_flag_is_accepted_and_not_shown(alias: str, flag: str) -> None:
    for args in ((alias, "none"), (f"{alias}=none",)):
        assert run("serve", *args) == run("serve", flag, "none")
    help = run("serve", "--help")[1]
    assert flag in help
    assert alias not in help


def test_the_hints_for_flags_of_other_servers_name_flags_that_exist() -> None:
    flags = flags_of(serve)
    assert not flags & OF_OTHER_SERVERS.keys()
    assert {name for hint in OF_OTHER_SERVERS.values() for name in re.findall(r"--[a-z-]+", hint)} <= flags


def test_the_hints_for_commands_of_other_programs_name_commands_that_exist() -> None:
    assert not OF_OTHER_PROGRAMS.keys() & COMMANDS.keys()
    for hint in OF_OTHER_PROGRAMS.values():
        for line in re.findall(r"uma-trio ((?:[a-z]+ ?)*(?:--[a-z]+)?)", hint):
            command: click.Command = main
            for word in re.sub(r" (for|in) .*", "", line).split():
                if word.startswith("-"):
                    assert word in {*flags_of(command), "--help"}
                else:
                    assert isinstance(command, click.Group)
                    found = command.get_command(click.Context(command), word)
                    assert found is not None, hint
                    command = found


def test_the_help_of_serve_shows_defaults_and_choices() -> None:
    _, shown = run("serve", "--help")
    flat = " ".join(shown.split())
    for setting in config.settings():
        assert setting.choices == () or "|".join(setting.choices) in flat.replace("| ", "|")
        if setting.default is not None and not setting.is_list:
            text = str(setting.default).lower() if setting.type is bool else str(setting.default)
            assert f"[default: {text}]" in flat


def test_print_config_writes_a_file_with_the_same_settings(tmp_path: Path) -> None:
    code, shown = run(
        "serve", "--print-config", "--ctx", "2000", "--no-mmap", env={"UMA_MAX_QUEUE": "7", "UMA_CTX": "5000"}
    )
    assert code == 0
    file = tmp_path / "uma.yaml"
    file.write_text(shown)
    found = config.load(file)
    assert (found.model.ctx, found.model.mmap, found.limits.max_queue) == (2000, False, 7)
    assert run("serve", "--config", str(file), "--print-config") == (0, shown)


@all_cases(
    ("args", "message"),
    [
        (["--max-queue", "-1"], "--max-queue: max_queue must be a whole number from 0 to 1000000, not '-1'"),
        (["--protocol", "http"], "protocol must be one of auto, json, cbor, newline, not 'http'"),
        (["--batch-tokens", "32", "--parallel", "100"], "make batch_tokens at least 164"),
        (["--config", "/nowhere.yaml"], "cannot read /nowhere.yaml: No such file or directory; --config takes a file"),
        (["--max-que", "1"], "--max-queue"),
        (["--modle", "a.gguf"], "(Did you mean one of: '--model',"),
        (["a.gguf"], "write: uma-trio serve --model a.gguf"),
        (["--model", "a", "model.gguf"], "model.gguf belongs to none of them"),
        (["many", "words"], "many words belongs to none of them"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_2(args: list[str], message: str) -> None:
    code, shown = run("serve", *args)
    assert code == 2
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


@all_cases(
    ("args", "message"),
    [
        (["a", "--prompt", "b"], "give the question once"),
        (["a", "--raw", "--system", "b"], "no place for --system"),
        (["a", "--no-special"], "--no-special goes with --raw"),
        (["a", "--top-p", "0"], "--top-p"),
        (["a", "--top-p", "1.1"], "--top-p"),
        (["a", "--temp", "-1"], "--temp"),
        (["a", "--temp", "101"], "--temp"),
        (["a", "--temp", "inf"], "--temp"),
        (["a", "--temp", "nan"], "nan is not a number"),
        (["a", "--stop", "x", "--stop", ""], "'--stop': the text is empty"),
        (["a", "--session", ""], "'--session': the text is empty"),
        (["a", "--regex", ""], "'--regex': the text is empty"),
        (["a", "--min-p", "1.1"], "--min-p"),
        (["a", "--repetition-penalty", "0"], "--repetition-penalty"),
        (["a", "--frequency-penalty", "2.1"], "--frequency-penalty"),
        (["a", "--logprobs", "21"], "--logprobs"),
        (["a", "--logit-bias", "x=1"], "is not ID=BIAS"),
        (["a", "--logit-bias", "1"], "is not ID=BIAS"),
        (["a", "--logit-bias", "1=nan"], "a bias must be a finite number"),
        (["a", "--stop-token", "-1"], "--stop-token"),
        (["a", "--json-schema", ""], "'' is not a schema; give a file"),
        (["a", "--json-schema", "-"], "'-' is not a schema; give a file"),
        (["a", "--json-schema", "[]"], "must be a JSON object"),
        (["a", "--tool-choice", "required"], "add --tools FILE"),
        (["a", "--tools", "missing.json"], "missing.json"),
        (["a", "--tools", "pyproject.toml"], "is not valid JSON"),
        (["a", "--raw", "--tools", "pyproject.toml"], "--tools"),
        (["a", "--max-tokens", "0"], "--max-tokens"),
        (["a", "--priority", "high"], "--priority"),
    ],
)
def test_ask_refuses_before_it_connects(args: list[str], message: str) -> None:
    code, shown = run("ask", *args)
    assert code == 2
    assert message in shown


@pytest.mark.parametrize("command", [["ask", "hello"], ["metrics"]])
def test_without_a_daemon_the_error_is_one_sentence_with_a_remedy(command: list[str], tmp_path: Path) -> None:
    code, shown = run(*command, "--socket", str(tmp_path / "none.sock"))
    assert code == 2
    assert shown.count("\n") == 1
    assert "start one with: uma-trio serve" in shown


def test_the_request_that_ask_sends() -> None:
    from uma_trio.cli.ask import _request
    from uma_trio.cli.ask import command as ask
    from uma_trio.protocol.messages import parse
    from uma_trio.protocol.requests import Generate

    args = ["a", "--system", "b", "--max-tokens", "5", "--temp", "0.5", "--top-p", "0.9", "--top-k", "3"]
    args += ["--seed", "0", "--stop", "x", "--stop", "y", "--priority", "background"]
    args += ["--min-p", "0.1", "--repetition-penalty", "1.1", "--repeat-last-n", "0", "--frequency-penalty", "-1"]
    args += ["--presence-penalty", "0", "--logit-bias", "5=-100", "--logit-bias", "6=1.5", "--logprobs", "0"]
    args += ["--stop-token", "3", "--stop-token", "4", "--full-text"]
    with ask.make_context("ask", args) as context:
        options = {name: value for name, value in context.params.items() if name not in ("question", "prompt")}
    found = parse(_request("a", options) | {"id": "ask"})
    assert isinstance(found, Generate)
    assert [message.role for message in found.messages or ()] == ["system", "user"]
    assert (found.max_tokens, found.temperature, found.top_p, found.top_k, found.seed) == (5, 0.5, 0.9, 3, 0)
    assert (found.min_p, found.repetition_penalty, found.repeat_last_n) == (0.1, 1.1, 0)
    assert (found.frequency_penalty, found.presence_penalty, found.logprobs) == (-1, 0, 0)
    assert (found.logit_bias, found.stop_token_ids, found.return_full_text) == ({5: -100, 6: 1.5}, [3, 4], True)
    assert (found.stops, found.slo.priority, found.stream) == (("x", "y"), "background", True)


def test_several_answers_are_printed_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from uma_trio.cli import generation
    from uma_trio.protocol.events import Eos
    from uma_trio.protocol.usage import Timings, Usage

    async def generate(request: object, show: Callable[[Eos], None], *_: object, **__: object) -> Eos:
        usage, timings = Usage(prompt_tokens=1, completion_tokens=1), Timings(queue_ms=0.0, total_ms=1.0)
        ends = [
            Eos(id="ask", reason="stop", usage=usage, timings=timings, index=index, text="abc"[index])
            for index in (2, 0, 1)
        ]
        for eos in ends:
            show(eos)
        return ends[-1]

    monkeypatch.setattr(generation, "generate", generate)
    assert run("ask", "--n", "3", "x") == (0, "--- 0\na\n--- 1\nb\n--- 2\nc\n")


def test_ask_sends_only_the_fields_that_are_given() -> None:
    from uma_trio.cli.ask import _request
    from uma_trio.cli.ask import command as ask

    with ask.make_context("ask", ["a"]) as context:
        options = {name: value for name, value in context.params.items() if name not in ("question", "prompt")}
    assert _request("a", options) == {
        "stream": True,
        "messages": [{"role": "user", "content": "a"}],
        "separate_reasoning": True,
    }
    raw = options | {"raw": True}
    assert _request("a", raw) == {"stream": True, "prompt": "a"}
    assert _request("a", raw | {"no_special": True}) == {"stream": True, "prompt": "a", "parse_special": False}


@all_cases("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    code, shown = run("completion", shell)
    assert code == 0
    assert "_UMA_TRIO_COMPLETE=lines_complete" in shown
    assert LINE_VARIABLE in shown


def completed(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the scripts get for ``line``: kinds of paths, and values."""
    monkeypatch.setenv(LINE_VARIABLE, f"uma-trio {line}")
    lines = Lines(main, {}, "uma-trio", "_UMA_TRIO_COMPLETE").complete().splitlines()
    return [value if kind == "plain" else kind for kind, value, *_ in (f"{each}\t".split("\t") for each in lines)]


PACKAGED = ("embedded", "embedded-draft")
"""Models that every machine has."""


def test_every_setting_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in config.settings():
        if setting.type is bool:
            continue
        path = ["dir"] if setting.name.endswith("_dir") else ["file"]
        paths = [*PACKAGED, "model"] if setting.name == "model" else path
        expected = paths if setting.metavar.endswith(("PATH", "FILE")) else [*setting.choices]
        assert completed(f"serve {setting.flag} ", monkeypatch) == expected, setting.flag
    for line in ("serve --type-k=", "service install -- --type-k "):
        assert completed(line, monkeypatch) == completed("serve --type-k ", monkeypatch) != [], line


@all_cases(
    ("line", "expected"),
    [
        ("", [*COMMANDS]),
        ("se", ["serve", "sessions", "service"]),
        ("serve --type-k 'q", ["q8_0", "q4_0"]),
        ("serve --kv-u", ["--kv-unified"]),
        ("ask --priority b", ["background"]),
        ("chat --priority=n", ["normal"]),
        ("perf report ", ["file"]),
        ("tokenize --model ", [*PACKAGED, "model"]),
        ("ask --json-schema ", ["file"]),
        ("doctor --model ", [*PACKAGED, "model"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("sessions e", ["export"]),
        ("sessions export name ", ["file"]),
        ("serve --config 'un", ["file"]),
    ],
)
def test_completions(line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed(line, monkeypatch) == expected
